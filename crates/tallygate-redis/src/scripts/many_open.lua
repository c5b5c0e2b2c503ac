-- Several checks in one call: of one key, one after the other; or of several keys, each of them all or nothing.
--
-- KEYS       the keys
-- ARGV[1]    the time, or nothing if it is the server's
-- ARGV[2]    the requests, in doubles: of each how many parts it has, then of each part its key and its cost
-- then of each key: how a value begins that was left under its policy, the constants of its limits, ten each, and r
-- if what was left under another policy is replaced, or nothing if both are listed
--
-- Replies, in doubles, the time, then of each part of each request: how many numbers follow after the next two,
-- whether its limits allow it, the first shadow limit that would have refused (-1 if none), and the state. If there is
-- a value that it cannot decide on, nothing is written, and the reply is a list of -1, the time and all values.
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
