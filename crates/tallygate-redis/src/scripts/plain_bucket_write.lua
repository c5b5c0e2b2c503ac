value = head .. struct.pack('>dd', last, level)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  local fresh_at = last + math.ceil(level / drain)
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor(fresh_at / 1000) + 1)
end
