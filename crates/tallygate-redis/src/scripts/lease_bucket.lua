-- Takes a slice of one bucket without options, and notes what is out on lease; `take` of lease/ledger.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  what of it is out on lease
-- ARGV[1]  how a value begins that was left under this policy
-- ARGV[2]  what is needed now, then the constants of the limit, as doubles
-- ARGV[3]  what is wanted, and how long a lease lives, as doubles
-- ARGV[4]  the time; none if it is the server's
--
-- Replies, in doubles, what was taken, the time, and the state; or a list as a check does.
local EXACT = 9007199254740992
local head, given = ARGV[1], ARGV[4]
local need, _, capacity, window, start, _, unit, drain = struct.unpack('>dddddddd', ARGV[2])
local want, life = struct.unpack('>dd', ARGV[3])
local value = redis.call('GET', KEYS[1])
local now
if given then
  now = tonumber(given)
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local last, level = now, start * unit
if value then
  local length = #head
  if #value ~= length + 16 or string.sub(value, 1, length) ~= head then
    return {-1, now, value}
  end
  last, level = struct.unpack('>dd', value, length + 1)
  -- What is no number, or none that is whole and exact, is not decided on here.
  if not (level >= 0 and level <= EXACT and last >= -EXACT and last <= EXACT) or level % 1 + last % 1 > 0 then
    return {-1, now, value}
  end
  if now > last then
    -- Beyond 2^53 the product is rounded, but every level is less than that.
    local drained = (now - last) * drain
    level = drained < level and level - drained or 0
    last = now
  elseif level == 0 then
    last = now
  elseif last - now > window then
    return {-1, now, value}
  end
end
local room = capacity * unit - level
local tokens = room > 0 and (room - math.fmod(room, unit)) / unit or 0
local grant = math.min(want, tokens, math.max(need, math.floor(tokens / 4)))
if grant == 0 then
  return struct.pack('>dddd', 0, now, last, level)
end
level = level + grant * unit
value = head .. struct.pack('>dd', last, level)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  local fresh_at = last + math.ceil(level / drain)
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor(fresh_at / 1000) + 1)
end
--out--
local step = math.max(1, math.floor(life / 8))
local ends = (math.floor((now + life) / step) + 1) * step
local place = 1
while out[place] and out[place][1] < ends do
  place = place + 1
end
if out[place] and out[place][1] == ends then
  out[place][2] = out[place][2] + grant
else
  table.insert(out, place, {ends, grant})
end
keep(out)
return struct.pack('>dddd', grant, now, last, level)
