if ARGV[3] ~= 'l' then
  --several--
  local request = struct.pack('>dd', 1, 1) .. string.sub(ARGV[2], 1, 8)
  local reply = try_several({ARGV[1]}, {ARGV[3]}, request)
  if reply then
    return reply
  end
end
