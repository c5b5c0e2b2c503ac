-- Reads some keys, or writes them if their values have not changed.
--
-- KEYS     the keys, all of one slot
-- ARGV[1]  the time, or empty to use the server's clock; or > and a time that the server must have reached to write
-- to write, then per key: the previous value, the new value (empty: delete), and the expiry in ms
--
-- Returns 1 and the time if it wrote; otherwise 0, the time, and the value of each key (empty: none).
local time = ARGV[1]
local is_given = time ~= '' and string.sub(time, 1, 1) ~= '>'
local reached = true
if not is_given then
  local now = redis.call('TIME')
  now = now[1] * 1000000 + now[2]
  reached = time == '' or now >= tonumber(string.sub(time, 2))
  time = string.format('%.0f', now)
end
local reply, same = {0, time}, #ARGV > 1 and reached
for i, key in ipairs(KEYS) do
  local value = redis.call('GET', key) or ''
  reply[i + 2] = value
  same = same and value == ARGV[3 * i - 1]
end
if not same then
  return reply
end
for i, key in ipairs(KEYS) do
  local new = ARGV[3 * i]
  if new == '' then
    redis.call('DEL', key)
  else
    redis.call('SET', key, new, is_given and 'PX' or 'PXAT', ARGV[3 * i + 1])
  end
end
return {1, time}
