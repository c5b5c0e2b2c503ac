-- The outstanding leases: a list of ends and units, in the order of their ends.
local OUT_HEAD = '\001l'
local out = {}
do
  local noted = redis.call('GET', KEYS[2])
  if noted and string.sub(noted, 1, 2) == OUT_HEAD and #noted % 16 == 2 then
    for at = 3, #noted, 16 do
      local ends, amount = struct.unpack('>dd', noted, at)
      if ends > now then
        out[#out + 1] = {ends, amount}
      end
    end
  end
end
local function keep(list)
  -- The first lease counts as ending with the next one: outstanding units are never underestimated.
  while #list > 16 do
    list[2][2] = list[1][2] + list[2][2]
    table.remove(list, 1)
  end
  if #list == 0 then
    redis.call('DEL', KEYS[2])
    return
  end
  local new = {OUT_HEAD}
  for i, entry in ipairs(list) do
    new[i + 1] = struct.pack('>dd', entry[1], entry[2])
  end
  if given then
    redis.call('SET', KEYS[2], table.concat(new), 'PX', 86400000)
  else
    redis.call('SET', KEYS[2], table.concat(new), 'PXAT', math.floor(list[#list][1] / 1000) + 1)
  end
end
