-- Charges one bucket without options for the units that a process allowed while the server was unavailable; see
-- `LocalLimiter::take` of failure/local.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  when the bucket was found full after an outage
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[2]  the units that the process allowed, then the constants of the limit, as doubles
-- ARGV[3]  how many of them its share has not earned back, when it began to decide, and how many processes share the
--          quota
--
-- Returns the charged units and the time as doubles; or a list, as a check does.
--plain_bucket--
local least, began, processes = struct.unpack('>ddd', ARGV[3])
-- A full bucket has lost the units that it earned since then. All processes without a connection meanwhile share them.
local full_at = tonumber(redis.call('GET', KEYS[2]) or '')
if not value and not full_at then
  full_at = now
  redis.call('SET', KEYS[2], string.format('%.0f', now), 'PX', 10000)
end
local lost = 0
if full_at and full_at > began then
  lost = math.max(0, math.floor((full_at - began) * drain / unit) - capacity)
end
local charge = math.max(least, amount - math.floor(lost / processes))
-- Charge beyond the bound on debt, as far as numbers are exact.
charge = math.max(0, math.min(charge, math.floor((EXACT / 2 - level) / unit)))
if charge > 0 then
  level = level + charge * unit
  --plain_bucket_write--
end
return struct.pack('>dd', charge, now)
