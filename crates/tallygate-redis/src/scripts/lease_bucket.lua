-- Takes a slice of one bucket without options, and records its lease; a port of `take` of lease/ledger.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  its outstanding leases
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[2]  the units that are needed now, then the constants of the limit, as doubles
-- ARGV[3]  the units that are wanted, and the life of the lease, as doubles
-- ARGV[4]  the time; absent to use the server's clock
--
-- Returns the units that were taken, the time, and the state, as doubles; or a list, as a check does.
--plain_bucket--
local want, life = struct.unpack('>dd', ARGV[3])
local room = capacity * unit - level
local tokens = room > 0 and (room - math.fmod(room, unit)) / unit or 0
local grant = math.min(want, tokens, math.max(amount, math.floor(tokens / 4)))
if grant == 0 then
  return struct.pack('>dddd', 0, now, last, level)
end
level = level + grant * unit
--plain_bucket_write--
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
