-- Charges one bucket without options for the units that a process allowed while the server was unavailable; see
-- `LocalLimiter::take` of failure/local.rs.
--
-- KEYS[1]  the key
-- KEYS[2]  when the bucket was found full after an outage, when it had earned back the charges before that, and when it
--          will have earned back the last one, - for none; then the numbers of the last charges
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[2]  the units that the process allowed, then the constants of the limit, as doubles
-- ARGV[3]  how many of them its share has not earned back, when it began to decide, how many processes share the
--          quota, and the number of the charge: a charge whose reply was lost is sent again
-- ARGV[4]  the time; absent to use the server's clock
--
-- Returns the charged units and the time as doubles; or a list, as a check does.
--plain_bucket--
local least, began, processes, number = struct.unpack('>dddd', ARGV[3])
local notes = redis.call('GET', KEYS[2]) or ''
local full_at, free_at, drained_at, charges = string.match(notes, '^(%S+) (%S+) (%S+)(.*)$')
charges, number = charges or '', string.format(' %.0f ', number)
if string.find(charges .. ' ', number, 1, true) then
  return struct.pack('>dd', 0, now)
end
full_at, free_at, drained_at = tonumber(full_at or ''), tonumber(free_at or ''), tonumber(drained_at or '')
-- A full bucket has lost the units that it earned since then. All processes without a connection meanwhile share them.
if full_at and now - full_at >= 10000000 then
  full_at = nil
end
local is_new = not full_at and (not value or level == 0)
if is_new then
  full_at, free_at = now, drained_at
end
local lost = 0
if full_at and full_at > began then
  lost = math.floor((full_at - began) * drain / unit) - capacity
  -- A bucket in debt is full later than a burst after the beginning.
  if free_at then
    lost = math.min(lost, math.floor((full_at - free_at) * drain / unit))
  end
  lost = math.max(0, lost)
end
local charge = math.max(least, amount - math.floor(lost / processes))
-- Charge beyond the bound on debt, as far as numbers are exact.
charge = math.max(0, math.min(charge, math.floor((EXACT / 2 - level) / unit)))
level = level + charge * unit
local is_in_debt = level > capacity * unit
if is_in_debt then
  drained_at = last + math.ceil(level / drain)
end
local function note(time)
  return time and string.format('%.0f', time) or '-'
end
-- A debt has to be known after the next outage, when the bucket may have expired; a charge, until it is sent again.
local life = is_in_debt and 86400000 + math.ceil((drained_at - now) / 1000) or 600000
charges = string.sub(charges .. number, -1025, -2)
local times = {note(full_at), note(free_at), note(drained_at)}
redis.call('SET', KEYS[2], table.concat(times, ' ') .. charges, 'PX', life)
if charge > 0 then
  --plain_bucket_write--
end
return struct.pack('>dd', charge, now)
