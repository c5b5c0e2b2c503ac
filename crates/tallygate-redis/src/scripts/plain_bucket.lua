--prelude--
-- The level of one bucket without options, brought to now.
local amount, _, capacity, window, start, _, unit, drain = struct.unpack('>dddddddd', ARGV[2])
local last, level = now, start * unit
if value then
  local length = #head
  if #value ~= length + 16 or string.sub(value, 1, length) ~= head then
    --several--
    return {-1, now, value}
  end
  last, level = struct.unpack('>dd', value, length + 1)
  -- What is no number, or none that is whole and exact, is not decided on here.
  if not (level >= 0 and level <= EXACT and last >= -EXACT and last <= EXACT) or level % 1 + last % 1 > 0 then
    return {-1, now, value}
  end
  if now > last then
    -- Beyond 2^53 the product is rounded, but every level is less than that.
    local drained = (now - last) * drain
    level = drained < level and level - drained or 0
    last = now
  elseif level == 0 then
    last = now
  elseif last - now > window then
    return {-1, now, value}
  end
end
