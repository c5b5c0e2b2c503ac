-- Reads the key and the time.
--
-- KEYS[1]  the key
-- ARGV[1]  the first bytes of a value that was written under this policy
-- ARGV[2]  the cost or amount, then the constants of its limits, ten each, as doubles
-- ARGV[3]  r to replace the state of another policy, l to leave it to the client; empty or absent to keep both
-- ARGV[4]  the time; absent to use the server's clock
--
-- Each kind of limit decides by its constants c and its state s, two lists of numbers. All of them are whole and at
-- most 2^52, so that sums are exact. Products may not be.
--prelude--
local numbers = ARGV[2]
local unpack_numbers, pack_numbers = struct.unpack, struct.pack
local kinds = {}
if value and string.sub(value, 1, #head) ~= head then
  --several--
  return {-1, now, value}
end
