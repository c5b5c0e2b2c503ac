-- A check of one bucket without options, in one go: what open, bucket, read, check and close do together, at
-- half the cost.
local EXACT = 9007199254740992
local head, given = ARGV[1], ARGV[4]
local cost, _, capacity, window, start, _, unit, drain = struct.unpack('>dddddddd', ARGV[2])
local value = redis.call('GET', KEYS[1])
local now
if given then
  now = tonumber(given)
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
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
if cost > capacity or level > (capacity - cost) * unit then
  return struct.pack('>ddddd', 0, now, -1, last, level)
end
level = level + cost * unit
value = head .. struct.pack('>dd', last, level)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  local fresh_at = last + math.ceil(level / drain)
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor(fresh_at / 1000) + 1)
end
return struct.pack('>ddddd', 1, now, -1, last, level)
