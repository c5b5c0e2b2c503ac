-- Several checks in one call: of one key, one after the other; or of several keys, each of them all or nothing.
--
-- KEYS       the keys
-- ARGV[1]    the time, or empty to use the server's clock
-- ARGV[2]    the requests, as doubles: per request the number of its parts, then per part its key and its cost
-- then per key: the first bytes of a value that was written under its policy, the constants of its limits, ten each,
-- and r to replace the state of another policy, or empty to keep both
--
-- Returns as doubles the time, then per part of each request: the number of numbers after the next two, whether its
-- limits allow it, the first shadow limit that would have denied it (-1 if none), and the state. If it cannot decide on
-- a value, it writes nothing, and returns a list of -1, the time and all values.
local EXACT = 9007199254740992
local given = ARGV[1] ~= '' and ARGV[1] or nil
local unpack_numbers, pack_numbers = struct.unpack, struct.pack
local kinds = {}
local value, now
if given then
  now = tonumber(given)
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local function leave()
  local reply = {-1, now}
  for k = 1, #KEYS do
    reply[k + 2] = redis.call('GET', KEYS[k]) or ''
  end
  return reply
end
