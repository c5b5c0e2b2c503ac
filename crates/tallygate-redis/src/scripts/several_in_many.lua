do
  --several--
  local heads, replaces = {}, {}
  for k = 1, #KEYS do
    heads[k], replaces[k] = ARGV[3 * k], ARGV[3 * k + 2]
  end
  local reply = try_several(heads, replaces, ARGV[2])
  if reply then
    return reply
  end
end
