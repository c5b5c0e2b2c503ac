--prelude--
-- Computes the present count of one fixed window without options.
local amount, _, limit, window, start, _, anchor = struct.unpack('>ddddddd', ARGV[2])
local last, into, count
if value then
  local length = #head
  if #value ~= length + 24 or string.sub(value, 1, length) ~= head then
    --several--
    return {-1, now, value}
  end
  last, into, count = struct.unpack('>ddd', value, length + 1)
  -- A value with a number that is not whole or not exact is not decided here.
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
    -- The operator % is not exact for large numbers.
    into = math.fmod(now, window)
    into = into < 0 and into + window or into
  end
end
