-- Reads some keys, or writes them if they are still what they were.
--
-- KEYS     the keys, all of one slot
-- ARGV[1]  the time, or nothing if it is the server's
-- then of each key, to write: what it was, what it is to be (nothing: gone), when it is to expire in ms
--
-- Replies 1 and the time if it was written; else 0, the time, and of each key what it is (nothing: none).
local time = ARGV[1]
if time == '' then
  local now = redis.call('TIME')
  time = string.format('%.0f', now[1] * 1000000 + now[2])
end
local reply, same = {0, time}, #ARGV > 1
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
    redis.call('SET', key, new, ARGV[1] == '' and 'PXAT' or 'PX', ARGV[3 * i + 1])
  end
end
return {1, time}
