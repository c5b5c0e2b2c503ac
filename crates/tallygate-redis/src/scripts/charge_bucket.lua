-- Charges one bucket without options for what a process allowed while the server was away; see `Local::take` of
-- failure.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  when the bucket was found full after an outage
-- ARGV[1]  how a value begins that was left under this policy
-- ARGV[2]  what the process allowed, then the constants of the limit, as doubles
-- ARGV[3]  what of it its share has not earned back, when it began to decide, and how many processes share the quota
--
-- Replies, in doubles, what was charged and the time; or a list as a check does.
--plain_bucket--
local least, began, processes = struct.unpack('>ddd', ARGV[3])
-- A bucket that is full has lost what it earned since then. All processes that were away meanwhile share that.
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
-- Past the bound on debt, as far as numbers are exact.
charge = math.max(0, math.min(charge, math.floor((EXACT / 2 - level) / unit)))
if charge > 0 then
  level = level + charge * unit
  --plain_bucket_write--
end
return struct.pack('>dd', charge, now)
