-- Checks one sliding window counter without options: does the same as open, sliding_window_counter, read, check and
-- close together, at half the cost.
--prelude--
local cost, _, limit, window, start = struct.unpack('>ddddd', ARGV[2])
local last, count, previous = now, start, 0
if value then
  local length = #head
  if #value ~= length + 24 or string.sub(value, 1, length) ~= head then
    --several--
    return {-1, now, value}
  end
  last, count, previous = struct.unpack('>ddd', value, length + 1)
  -- A value with a number that is not whole or not exact is not decided here.
  if not (count >= 0 and count <= EXACT and previous >= 0 and previous <= EXACT and last >= -EXACT and last <= EXACT)
    or count % 1 + previous % 1 + last % 1 > 0 then
    return {-1, now, value}
  end
  if last - now > window and count + previous > 0 then
    return {-1, now, value}
  end
end
-- The offset in its window. Not %, which is not exact for large numbers.
local into = math.fmod(last, window)
into = into < 0 and into + window or into
if now > last then
  into = into + now - last
  last = now
  if into >= 2 * window then
    into, count, previous = math.fmod(now, window), 0, 0
    into = into < 0 and into + window or into
  elseif into >= window then
    into, count, previous = into - window, 0, count
  end
elseif count + previous == 0 then
  into, last = math.fmod(now, window), now
  into = into < 0 and into + window or into
end
local room = limit - cost - count
-- floor(previous * (W - e) / W) <= room, without the division. Rounding keeps the order of products: only two
-- products that seem equal are computed exactly.
local weighted, allowed = previous * (window - into), (room + 1) * window
local fits = room >= 0 and weighted < allowed
if room >= 0 and weighted == allowed and weighted > 0 then
  --product--
  local weighted_high, weighted_low = product(previous, window - into)
  local allowed_high, allowed_low = product(room + 1, window)
  fits = weighted_high < allowed_high or (weighted_high == allowed_high and weighted_low < allowed_low)
end
if not fits then
  return struct.pack('>dddddd', 0, now, -1, last, count, previous)
end
count = count + cost
value = head .. struct.pack('>ddd', last, count, previous)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor((last + 2 * window - into) / 1000) + 1)
end
return struct.pack('>dddddd', 1, now, -1, last, count, previous)
