-- Sliding window counter: {last change, count, previous count}.
local function counter_into(c, at)
  -- The operator % is not exact for large numbers.
  local into = math.fmod(at, c[3])
  return into < 0 and into + c[3] or into
end
-- Returns the offset in the window, and both counts, at the present time.
local function counter_at(c, s)
  local into = counter_into(c, s[1]) + (now > s[1] and now - s[1] or 0)
  if into < c[3] then
    return into, s[2], s[3]
  elseif into < 2 * c[3] then
    return into - c[3], 0, s[2]
  end
  return 0, 0, 0
end
local function counter_set(s, was_fresh, count, previous)
  if was_fresh or now > s[1] then
    s[1] = now
  end
  s[2], s[3] = count, previous
end
kinds[4] = {
  width = 3,
  read = function(at)
    return {unpack_numbers('>ddd', value, at)}
  end,
  first = function(c)
    return {now, c[4], 0}
  end,
  set_back = function(c, s)
    return (s[2] > 0 or s[3] > 0) and s[1] - now > c[3]
  end,
  -- The estimate needs a division, which is not exact here.
  rebase = nil,
  allows = function(c, s, cost)
    local into, count, previous = counter_at(c, s)
    local room = c[2] - cost - count
    if room < 0 then
      return false
    end
    -- floor(previous * (W - e) / W) <= room, without the division. Rounding keeps the order of products:
    -- only two products that seem equal are computed exactly.
    local weighted, allowed = previous * (c[3] - into), (room + 1) * c[3]
    if weighted ~= allowed then
      return weighted < allowed, {count, previous}
    end
    local weighted_high, weighted_low = product(previous, c[3] - into)
    local allowed_high, allowed_low = product(room + 1, c[3])
    local fits = weighted_high < allowed_high
      or (weighted_high == allowed_high and weighted_low < allowed_low)
    return fits, {count, previous}
  end,
  charge = function(_, s, cost, counts)
    local count, previous = counts[1], counts[2]
    counter_set(s, count + previous == 0, count + cost, previous)
  end,
  force = function(c, s, amount)
    local _, count, previous = counter_at(c, s)
    local was_fresh = count + previous == 0
    if amount < 0 then
      -- The current window first, then the one before it.
      local rest = count + amount
      count = rest > 0 and rest or 0
      if rest < 0 then
        previous = previous + rest > 0 and previous + rest or 0
      end
    elseif count < c[5] then
      count = amount < c[5] - count and count + amount or c[5]
    end
    counter_set(s, was_fresh, count, previous)
  end,
  fresh_at = function(c, s)
    if s[2] > 0 then
      return s[1] + 2 * c[3] - counter_into(c, s[1])
    end
    return s[3] > 0 and s[1] + c[3] - counter_into(c, s[1]) or now
  end,
  write = function(s)
    return pack_numbers('>ddd', s[1], s[2], s[3])
  end,
  tell = function(_, s, reply)
    for i = 1, 3 do
      reply[#reply + 1] = s[i]
    end
  end,
}
