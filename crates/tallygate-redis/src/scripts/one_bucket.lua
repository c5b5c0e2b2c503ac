-- Checks one bucket without options: does the same as open, bucket, read, check and close together, at half the cost.
--plain_bucket--
if amount > capacity or level > (capacity - amount) * unit then
  return struct.pack('>ddddd', 0, now, -1, last, level)
end
level = level + amount * unit
--plain_bucket_write--
return struct.pack('>ddddd', 1, now, -1, last, level)
