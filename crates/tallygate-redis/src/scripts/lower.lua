-- Settles a reservation, or refunds units, and records what was returned; a port of settlement.rs, of receipt.rs and of
-- the `settle` of each algorithm.
--
-- KEYS[2]  the returns and resets of the key
-- ARGV[2]  by how much the charge changes, or the refund as a negative number; then the constants of the limits
-- ARGV[3]  the byte before the policy in KEYS[2]. For a settlement, doubles follow: the number of the reservation, and
--          five per limit for its receipt, as `Receipt::to_numbers` returns them
--
-- Returns the same reply as an allowed check; -2 if the client was reset since the reservation.
local NO_TIME, MAX_STEPS = -EXACT, 32
local function undecided()
  return {-1, now, value or ''}
end
if rebased then
  return undecided()
end
-- The value of KEYS[2]: a time, the byte of ARGV[3] and the policy, then the other numbers of `Returns::to_numbers`.
local beginning = string.sub(ARGV[3], 1, 1) .. head
local closed, void, until_time, steps = NO_TIME, NO_TIME, NO_TIME, {}
local is_valid = true
-- Returns the next numbers. All of them have to be whole and exact.
local function take(format, from, at)
  local list = {unpack_numbers(format, from, at)}
  list[#list] = nil
  for i = 1, #list do
    is_valid = is_valid and list[i] >= -EXACT and list[i] <= EXACT and list[i] % 1 == 0
  end
  return list
end
do
  local noted = redis.call('GET', KEYS[2])
  if noted then
    local first = 11 + #beginning
    local width = 8 * (2 + 5 * limits)
    if string.sub(noted, 1, 2) ~= '\1t' or string.sub(noted, 11, first - 1) ~= beginning
      or #noted < first + 15 or (#noted - first - 15) % width > 0 then
      return undecided()
    end
    closed = take('>d', noted, 3)[1]
    void, until_time = unpack(take('>dd', noted, first))
    for at = first + 16, #noted, width do
      local step = {}
      step.number, step.ends = unpack(take('>dd', noted, at))
      for i = 1, limits do
        local mark = take('>ddddd', noted, at + 40 * i - 24)
        is_valid = is_valid and mark[4] >= 0 and mark[5] >= 0
        step[i] = mark
      end
      if step.number > closed then
        steps[#steps + 1] = step
      end
    end
    if not is_valid then
      return undecided()
    end
  end
end

-- A mark is the usage under one limit: a tag, the time of the charge, and the usage at a time. For a bucket (tag 2), the
-- time, the level, and how much of it drains. For a window (tag 5), its start, its count, and the one before it.
local function left(mark, at)
  local drained = at > mark[3] and (at - mark[3]) * mark[5] or 0
  return drained < mark[4] and mark[4] - drained or 0
end
-- Returns the place of the count of the window that contains a time.
local function place_of(mark, at)
  return at >= mark[3] and 4 or 5
end
local function lower_to(mark, other)
  if mark[1] ~= other[1] then
    return
  elseif mark[1] == 2 then
    local at = math.max(mark[3], other[3])
    mark[3], mark[4] = at, math.min(left(mark, at), left(other, at))
  elseif mark[1] == 5 then
    local before = mark[3] == other[3] and other[5] or other[4]
    mark[4] = math.min(mark[4], other[place_of(other, mark[2])])
    mark[5] = math.min(mark[5], before)
  end
end
local function mark_of(c, s)
  if c[1] == 1 then
    return {2, s[1], s[1], s[2], c[7]}
  elseif c[1] == 3 then
    return {5, s[1], s[1] - s[2], s[3], 0}
  elseif c[1] == 4 then
    return {5, s[1], s[1] - counter_into(c, s[1]), s[2], s[3]}
  end
  return {1, s[1], 0, 0, 0}
end
local function marks()
  local all = {}
  for i = 1, limits do
    all[i] = mark_of(C[i], S[i])
  end
  return all
end
local function last_change()
  local last = S[1][1]
  for i = 2, limits do
    last = math.max(last, S[i][1])
  end
  return last
end
-- Drops the expired entries of a log, and returns how many units the others have.
local function log_count(c, s)
  local expired = log_expired(c, s)
  s[2], s.entries, s[3] = log_total(s, expired), string.sub(s.entries, expired * 16 + 1), s[3] - expired
  if s[3] == 0 or now > s[1] then
    s[1] = now
  end
  return log_total(s, s[3]) - s[2]
end
local function log_force(c, s, amount)
  local count = log_count(c, s)
  if amount > 0 then
    amount = math.min(amount, math.max(0, c[5] - count))
    if amount > 0 then
      kinds[5].allows(c, s, 0)
      kinds[5].charge(c, s, amount)
    end
    return
  end
  -- The newest entries first.
  local total = s[2] + math.max(0, count + amount)
  while s[3] > 0 and log_total(s, s[3] - 1) >= total do
    s[3] = s[3] - 1
  end
  s.entries = string.sub(s.entries, 1, s[3] * 16)
  if s[3] > 0 and log_total(s, s[3]) > total then
    local tick = log_entry(s, s[3])
    s.entries = string.sub(s.entries, 1, -17) .. pack_numbers('>dd', tick, total)
  end
end
local function force(c, s, amount)
  if c[1] == 5 then
    log_force(c, s, amount)
  else
    kinds[c[1]].force(c, s, amount)
  end
end
-- Returns units of a reservation, at most what still counts of it. Each limit has its own way.
local give_back = {
  [1] = function(c, s, mark, amount)
    local _, level = kinds[1].allows(c, s, 0)
    local undrained = mark[3] <= s[1] and left(mark, math.max(now, s[1])) or 0
    local returned = math.min(amount * c[6], undrained, level)
    if returned > 0 then
      if now > s[1] then
        s[1] = now
      end
      s[2] = level - returned
    end
  end,
  [3] = function(c, s, mark, amount)
    if mark[2] <= s[1] and s[1] - mark[2] <= s[2] and fixed_count(c, s) > 0 then
      local returned = math.min(amount, mark[4])
      if returned > 0 then
        kinds[3].force(c, s, -returned)
      end
    end
  end,
  [4] = function(c, s, mark, amount)
    local into, count, previous = counter_at(c, s)
    local at = math.max(now, s[1])
    if mark[2] > at or count + previous == 0 then
      return
    end
    local most, ago = math.min(amount, mark[4]), at - mark[2]
    local of_count = ago <= into and math.min(most, count) or 0
    local of_previous = ago > into and ago <= into + c[3] and math.min(most, previous) or 0
    if of_count + of_previous > 0 then
      counter_set(s, false, count - of_count, previous - of_previous)
    end
  end,
  [5] = function(c, s, mark, amount)
    if mark[2] > math.max(now, s[1]) then
      return
    end
    log_count(c, s)
    for i = 1, s[3] do
      local tick, total = log_entry(s, i)
      if tick == mark[2] then
        local units = total - log_total(s, i - 1)
        local taken = math.min(amount, units)
        local entries = {string.sub(s.entries, 1, (i - 1) * 16)}
        for j = taken == units and i + 1 or i, s[3] do
          local later, after = log_entry(s, j)
          entries[#entries + 1] = pack_numbers('>dd', later, after - taken)
        end
        s.entries = table.concat(entries)
        s[3] = #s.entries / 16
        return
      end
    end
  end,
}

local amount, before = cost, nil
local number, receipt, later = nil, nil, #steps + 1
local fresh_at = NO_TIME
for i = 1, limits do
  local c, s = C[i], S[i]
  -- The time of a limit without usage does not count.
  local used = s[2] > 0
  if c[1] == 3 then
    used = s[3] > 0
  elseif c[1] == 4 then
    used = s[2] > 0 or s[3] > 0
  elseif c[1] == 5 then
    used = s[3] > 0
  end
  if used then
    fresh_at = math.max(fresh_at, kinds[c[1]].fresh_at(c, s))
  end
end
if fresh_at > EXACT then
  return undecided()
end
if #ARGV[3] > 1 then
  number = unpack_numbers('>d', ARGV[3], 2)
  if number < void then
    return -2
  end
  if number >= closed then
    receipt = {}
    for i = 1, limits do
      receipt[i] = take('>ddddd', ARGV[3], 40 * i - 30)
    end
  end
  while later > 1 and steps[later - 1].number > number do
    later = later - 1
  end
  for j = later, #steps do
    for i = 1, receipt and limits or 0 do
      lower_to(receipt[i], steps[j][i])
    end
  end
  if amount < 0 and later <= #steps then
    before = marks()
  end
end
for i = 1, limits do
  local c, s = C[i], S[i]
  if amount > 0 or not number then
    force(c, s, amount)
  elseif amount < 0 and receipt then
    give_back[c[1]](c, s, receipt[i], -amount)
  end
end
if amount < 0 then
  local after, last, has_usage = marks(), last_change(), false
  for i = 1, limits do
    has_usage = has_usage or after[i][1] ~= 1
    for j = later, before and receipt and #steps or 0 do
      local mark, was, is = steps[j][i], before[i], after[i]
      if mark[1] == was[1] and mark[1] == 2 then
        mark[4] = math.max(0, mark[4] - math.max(0, left(was, is[3]) - is[4]))
      elseif mark[1] == was[1] and mark[1] == 5 then
        local at = receipt[i][2]
        local returned = was[place_of(was, at)] - is[place_of(is, at)]
        local place = place_of(mark, at)
        mark[place] = math.max(0, mark[place] - math.max(0, returned))
      end
    end
  end
  if fresh_at > last and has_usage then
    local kept = {}
    local newest = #steps > 0 and math.max(steps[#steps].number, now) or now
    for _, step in ipairs(steps) do
      if step.ends > last then
        kept[#kept + 1] = step
      end
    end
    after.number, after.ends = newest, fresh_at
    kept[#kept + 1] = after
    if #kept > MAX_STEPS then
      local oldest = table.remove(kept, 1)
      for i = 1, limits do
        lower_to(kept[1][i], oldest[i])
      end
      kept[1].ends = math.max(kept[1].ends, oldest.ends)
    end
    steps, until_time = kept, math.max(until_time, fresh_at)
  end
  local new = {'\1t', pack_numbers('>d', closed), beginning, pack_numbers('>dd', void, until_time)}
  for _, step in ipairs(steps) do
    new[#new + 1] = pack_numbers('>dd', step.number, step.ends)
    for i = 1, limits do
      new[#new + 1] = pack_numbers('>ddddd', unpack(step[i]))
    end
  end
  if until_time == NO_TIME and closed == NO_TIME and void == NO_TIME or not given and until_time <= now then
    redis.call('DEL', KEYS[2])
  elseif given then
    redis.call('SET', KEYS[2], table.concat(new), 'PX', 86400000)
  else
    redis.call('SET', KEYS[2], table.concat(new), 'PXAT', math.floor(until_time / 1000) + 1)
  end
end
local allowed, shadow, changed = true, -1, amount ~= 0
cost = 0
for i = 1, limits do
  if C[i][1] == 5 then
    kinds[5].allows(C[i], S[i], 0)
  end
end
