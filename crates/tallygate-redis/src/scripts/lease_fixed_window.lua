-- Takes a slice of one fixed window without options; a port of `take` of lease/ledger.rs. A window earns nothing back
-- before it ends, so outstanding leases are not recorded.
--
-- Arguments and reply are those of lease_bucket.
--plain_window--
local want = struct.unpack('>d', ARGV[3])
local left = limit > count and limit - count or 0
local grant = math.min(want, left, math.max(amount, math.floor(left / 4)))
if grant == 0 then
  return struct.pack('>ddddd', 0, now, last, into, count)
end
count = count + grant
--plain_window_write--
return struct.pack('>ddddd', grant, now, last, into, count)
