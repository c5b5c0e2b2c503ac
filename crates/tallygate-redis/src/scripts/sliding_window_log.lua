-- Sliding window log: {last change, total before the first entry, number of entries}, then per entry its time and the
-- total after it, the oldest first. The entries stay in their string, s.entries.
local function log_entry(s, index)
  local tick, total = unpack_numbers('>dd', s.entries, index * 16 - 15)
  if not (tick >= -EXACT and tick <= EXACT and total >= 0 and total <= EXACT) or tick % 1 + total % 1 > 0 then
    error('the log has an entry that is none')
  end
  return tick, total
end
local function log_total(s, index)
  if index == 0 then
    return s[2]
  end
  local _, total = log_entry(s, index)
  return total
end
-- Returns how many entries have expired: an exponential search from the oldest, then a binary search.
local function log_expired(c, s)
  local function gone(index)
    return index <= s[3] and now - log_entry(s, index) >= c[3]
  end
  local low, reach = 0, 1
  while gone(reach) do
    low, reach = reach, 2 * reach
  end
  while low + 1 < reach do
    local middle = math.floor((low + reach) / 2)
    if gone(middle) then
      low = middle
    else
      reach = middle
    end
  end
  return low
end
kinds[5] = {
  read = function(at)
    local s = {unpack_numbers('>ddd', value, at)}
    s.entries = string.sub(value, at + 24, at + 23 + s[3] * 16)
    if #s.entries ~= s[3] * 16 then
      error('the log is cut off')
    end
    s.width = 3 + 2 * s[3]
    return s
  end,
  first = function(c)
    local s = {now, 0, 0}
    s.entries = ''
    if c[4] > 0 then
      s[3], s.entries = 1, pack_numbers('>dd', now, c[4])
    end
    return s
  end,
  set_back = function(c, s)
    return s[3] > 0 and s[1] - now > c[3]
  end,
  -- A rebase would change every entry.
  rebase = nil,
  allows = function(c, s, cost)
    local expired = log_expired(c, s)
    local gone = log_total(s, expired)
    local count = log_total(s, s[3]) - gone
    s.expired, s.gone, s.count = expired, gone, count
    return count <= c[2] - cost, count
  end,
  charge = function(_, s, cost)
    local entries = string.sub(s.entries, s.expired * 16 + 1)
    local n = s[3] - s.expired
    local total = s.gone + s.count + cost
    if n == 0 or now > s[1] then
      s[1] = now
    end
    if n > 0 and log_entry(s, s[3]) == s[1] then
      entries, n = string.sub(entries, 1, -17), n - 1
    end
    s[2], s[3] = s.gone, n + 1
    s.entries = entries .. pack_numbers('>dd', s[1], total)
    s.expired, s.count = 0, s.count + cost
  end,
  -- Totals only grow. Before they become inexact, the client restarts them.
  is_full = function(s)
    return log_total(s, s[3]) > 2251799813685248
  end,
  fresh_at = function(c, s)
    if s[3] == 0 then
      return now
    end
    local newest = log_entry(s, s[3])
    return newest + c[3]
  end,
  write = function(s)
    return pack_numbers('>ddd', s[1], s[2], s[3]) .. s.entries
  end,
  -- The reply needs only two entries for the same decision: the one after whose expiry the cost fits, and the newest.
  tell = function(c, s, reply, cost)
    local at = #reply
    reply[at + 1], reply[at + 2], reply[at + 3] = s[1], 0, 0
    if s.count == 0 then
      return
    end
    local n, excess = 1, s.count - (c[2] - cost)
    if excess > 0 and cost <= c[2] then
      local low, high = s.expired, s[3]
      while low + 1 < high do
        local middle = math.floor((low + high) / 2)
        if log_total(s, middle) - s.gone < excess then
          low = middle
        else
          high = middle
        end
      end
      if high < s[3] then
        n = 2
        local tick, total = log_entry(s, high)
        reply[at + 4], reply[at + 5] = tick, total - s.gone
      end
    end
    local newest = log_entry(s, s[3])
    reply[at + 3], reply[at + 2 * n + 2], reply[at + 2 * n + 3] = n, newest, s.count
  end,
}
