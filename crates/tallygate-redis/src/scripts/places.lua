-- Places of requests in flight: a sorted set of their holders, by when each place lapses.
--
-- KEYS[1]  the key
-- ARGV[1]  take, keep, leave or count
-- ARGV[2]  the holder
-- ARGV[3]  the number of places
-- ARGV[4]  how long a place is kept, in microseconds
-- ARGV[5]  the time, or empty to use the server's clock
--
-- Returns whether the holder has a place, and how many are taken.
local now
if ARGV[5] == '' then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
else
  now = tonumber(ARGV[5])
end
local key, verb, who = KEYS[1], ARGV[1], ARGV[2]
redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%.0f', now))
local has = redis.call('ZSCORE', key, who)
local taken = redis.call('ZCARD', key)
if verb == 'take' and not has and taken < tonumber(ARGV[3]) then
  has = true
  taken = taken + 1
elseif verb == 'leave' and has then
  redis.call('ZREM', key, who)
  return {0, taken - 1}
elseif verb == 'count' or verb == 'leave' or verb == 'take' or not has then
  return {has and 1 or 0, taken}
end
local lapses = now + tonumber(ARGV[4])
redis.call('ZADD', key, string.format('%.0f', lapses), who)
-- All places are kept for the same time, so the one that was just kept lapses last.
if ARGV[5] == '' then
  redis.call('PEXPIREAT', key, string.format('%.0f', math.floor(lapses / 1000) + 1))
else
  redis.call('PEXPIRE', key, 86400000)
end
return {1, taken}
