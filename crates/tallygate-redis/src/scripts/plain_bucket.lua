--prelude--
-- Computes the present level of one bucket without options.
local amount, _, capacity, window, start, _, unit, drain = struct.unpack('>dddddddd', ARGV[2])
local last, level = now, start * unit
if value then
  local length = #head
  if #value ~= length + 16 or string.sub(value, 1, length) ~= head then
    --several--
    return {-1, now, value}
  end
  last, level = struct.unpack('>dd', value, length + 1)
  -- A value with a number that is not whole or not exact is not decided here.
  if not (level >= 0 and level <= EXACT and last >= -EXACT and last <= EXACT) or level % 1 + last % 1 > 0 then
    return {-1, now, value}
  end
  if now > last then
    -- A product above 2^53 is rounded, but every level is below that.
    local drained = (now - last) * drain
    level = drained < level and level - drained or 0
    last = now
  elseif level == 0 then
    last = now
  elseif last - now > window then
    return {-1, now, value}
  end
end
