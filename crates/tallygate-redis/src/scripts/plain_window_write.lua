value = head .. struct.pack('>ddd', last, into, count)
if given then
  redis.call('SET', KEYS[1], value, 'PX', 86400000)
else
  redis.call('SET', KEYS[1], value, 'PXAT', math.floor((last + window - into) / 1000) + 1)
end
