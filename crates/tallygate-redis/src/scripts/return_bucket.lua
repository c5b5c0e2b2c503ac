-- Returns the unused rest of a slice of one bucket without options; a port of `return_units` of lease/ledger.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  its outstanding leases
-- KEYS[3]  its returns and resets
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[2]  the unused units, then the constants of the limit, as doubles
-- ARGV[3]  the end of the lease, and its life, as doubles
-- ARGV[4]  the time; absent to use the server's clock
--
-- Returns how many units are in the bucket again.
--prelude--
local amount, _, _, window, _, _, unit, drain = struct.unpack('>dddddddd', ARGV[2])
local lease_ends, life = struct.unpack('>dd', ARGV[3])
if now > lease_ends then
  return 0
end
--out--
local step = math.max(1, math.floor(life / 8))
local ends = (math.floor(lease_ends / step) + 1) * step
local place = 1
while out[place] and out[place][1] < ends do
  place = place + 1
end
if not out[place] then
  return 0
end
local known = math.min(amount, out[place][2])
out[place][2] = out[place][2] - known
if out[place][2] == 0 then
  table.remove(out, place)
end
keep(out)
local length = #head
if not value or #value ~= length + 16 or string.sub(value, 1, length) ~= head then
  return 0
end
local last, level = struct.unpack('>dd', value, length + 1)
if not (level >= 0 and level <= EXACT and last >= -EXACT and last <= EXACT) or level % 1 + last % 1 > 0 then
  return 0
end
if now > last then
  local drained = (now - last) * drain
  level = drained < level and level - drained or 0
  last = now
elseif level == 0 or last - now > window then
  return 0
end
-- The available and the leased units are together never more than the burst: at least the leased units stay used.
local total = 0
for _, entry in ipairs(out) do
  total = total + entry[2]
end
local used = (level - math.fmod(level, unit)) / unit
local lifted = math.min(known, math.max(0, used - total))
if lifted == 0 then
  return 0
end
-- Earlier reservations return nothing after this, until all of them have drained.
local returns = redis.call('GET', KEYS[3])
local drained_after = math.floor((last - now + math.ceil(level / drain)) / 1000) + 1
local lives = math.max(drained_after, given and 86400000 or redis.call('PTTL', KEYS[3]))
local closed = now
if returns and #returns >= 10 then
  closed = math.max(closed, (struct.unpack('>d', returns, 3)))
end
closed = (returns and string.sub(returns, 1, 2) or '\1r') .. struct.pack('>d', closed)
redis.call('SET', KEYS[3], closed .. (returns and string.sub(returns, 11) or ''), 'PX', lives)
level = level - lifted * unit
if given then
  redis.call('SET', KEYS[1], head .. struct.pack('>dd', last, level), 'PX', 86400000)
elseif level > 0 then
  local fresh_at = last + math.ceil(level / drain)
  redis.call('SET', KEYS[1], head .. struct.pack('>dd', last, level), 'PXAT', math.floor(fresh_at / 1000) + 1)
else
  redis.call('DEL', KEYS[1])
end
return lifted
