-- The key and the time, which every script for one key begins with.
--
-- KEYS[1]  the key
-- ARGV[1]  how a value begins that was left under this policy
-- ARGV[4]  the time; none if it is the server's
local EXACT = 9007199254740992
local head, given = ARGV[1], ARGV[4]
local value = redis.call('GET', KEYS[1])
local now
if given then
  now = tonumber(given)
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
