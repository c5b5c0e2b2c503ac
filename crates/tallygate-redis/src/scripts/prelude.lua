-- Reads the key and the time: every script for one key begins with this.
--
-- KEYS[1]  the key
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[4]  the time; absent to use the server's clock
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
