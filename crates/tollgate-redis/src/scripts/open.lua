-- Reads the key and the time.
--
-- KEYS[1]  the key
-- ARGV[1]  how a value begins that was left under this policy
-- ARGV[2]  the constants of its limits, ten doubles each
-- ARGV[3]  the cost or amount
-- ARGV[4]  the time, or nothing if it is the server's
--
-- A limit is decided on by its kind, with its constants c and its state s, two lists of numbers.
-- All of them are whole and at most 2^52, so that sums are exact; products are taken with care.
local head, constants = ARGV[1], ARGV[2]
local unpack_numbers, pack_numbers = struct.unpack, struct.pack
local kinds = {}

local value = redis.call('GET', KEYS[1])
local now
local is_given = ARGV[4] ~= ''
if is_given then
  now = tonumber(ARGV[4])
else
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
if value and string.sub(value, 1, #head) ~= head then
  return {-1, now, value}
end
