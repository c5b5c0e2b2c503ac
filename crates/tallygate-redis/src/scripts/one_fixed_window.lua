-- Checks one fixed window without options: does the same as open, fixed_window, read, check and close together, at
-- half the cost.
--plain_window--
if count > limit - amount then
  return struct.pack('>dddddd', 0, now, -1, last, into, count)
end
count = count + amount
--plain_window_write--
return struct.pack('>dddddd', 1, now, -1, last, into, count)
