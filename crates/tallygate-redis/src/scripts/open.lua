-- Reads the key and the time.
--
-- KEYS[1]  the key
-- ARGV[1]  how a value begins that was left under this policy
-- ARGV[2]  the cost or amount, then the constants of its limits, ten each, all as doubles
-- ARGV[3]  r if what was left under another policy is replaced, l if it is left to the client; nothing or none if
--          both are listed
-- ARGV[4]  the time; none if it is the server's
--
-- A limit is decided on by its kind, with its constants c and its state s, two lists of numbers.
-- All of them are whole and at most 2^52, so that sums are exact; products are taken with care.
--prelude--
local numbers = ARGV[2]
local unpack_numbers, pack_numbers = struct.unpack, struct.pack
local kinds = {}
if value and string.sub(value, 1, #head) ~= head then
  --several--
  return {-1, now, value}
end
