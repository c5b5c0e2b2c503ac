-- Takes a slice of one fixed window without options; `take` of lease/ledger.rs. Nothing comes back within a
-- window but what is given back, so nobody has to know what is out.
--
-- Arguments and reply are those of lease_bucket.
local EXACT = 9007199254740992
local head, given = ARGV[1], ARGV[4]
local need, _, limit, window, start, _, anchor = struct.unpack('>ddddddd', ARGV[2])
local want = struct.unpack('>d', ARGV[3])
local value = redis.call('GET', KEYS[1])
local now
if given then
  now = tonumber(given)
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local last, into, count
if value then
  local length = #head
  if #value ~= length + 24 or string.sub(value, 1, length) ~= head then
    return {-1, now, value}
  end
  last, into, count = struct.unpack('>ddd', value, length + 1)
  -- What is no number, or none that is whole and exact, is not decided on here.
  if not (count >= 0 and count <= EXACT and into >= 0 and into <= EXACT and last >= -EXACT and last <= EXACT)
    or count % 1 + into % 1 + last % 1 > 0 then
    return {-1, now, value}
  end
  if now > last then
    into = into + now - last
    last = now
  elseif count > 0 and last - now > window then
    return {-1, now, value}
  end
end
if not value or into >= window or count == 0 then
  -- A new window.
  last, into, count = now, 0, value and 0 or start
  if anchor == 0 then
    -- Not %, which is not exact for large numbers.
    into = math.fmod(now, window)
    into = into < 0 and into + window or into
  end
end
local left = limit > count and limit - count or 0
local grant = math.min(want, left, math.max(need, math.floor(left / 4)))
if grant == 0 then
  return struct.pack('>ddddd', 0, now, last, into, count)
end
count = count + grant
value = head .. struct.pack('>ddd', last, into, count)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor((last + window - into) / 1000) + 1)
end
return struct.pack('>ddddd', grant, now, last, into, count)
