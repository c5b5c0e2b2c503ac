-- Writes the changed state with an expiry, and returns the reply.
if changed then
  local new, fresh_at = head, now
  for i = 1, limits do
    local c, s = C[i], S[i]
    local kind = kinds[c[1]]
    new = new .. kind.write(s)
    local over = kind.fresh_at(c, s)
    --[[penalty
    if c[9] > 0 then
      new = new .. pack_numbers('>dd', s.time, s.denials)
      local ends = s.denials == -1 and s.time or s.denials >= 0 and s.time + c[3] or now
      over = ends > over and ends or over
    end
    penalty]]
    --[[shadow
    if c[8] == 1 then
      new = new .. pack_numbers('>' .. string.rep('d', #s.runs + 2), #s.runs / 2, s.forgotten, unpack(s.runs))
    end
    shadow]]
    fresh_at = over > fresh_at and over or fresh_at
  end
  if given then
    -- If the caller gives the time, more real time may pass before its next call.
    redis.call('SET', KEYS[1], new, 'PX', 86400000)
  elseif fresh_at > now then
    redis.call('SET', KEYS[1], new, 'PXAT', math.floor(fresh_at / 1000) + 1)
  else
    redis.call('DEL', KEYS[1])
  end
end
local reply = {allowed and 1 or 0, now, shadow}
for i = 1, limits do
  local c, s = C[i], S[i]
  kinds[c[1]].tell(c, s, reply, cost)
  --[[penalty
  if c[9] > 0 then
    reply[#reply + 1], reply[#reply + 2] = s.time, s.denials
  end
  penalty]]
  --[[shadow
  if c[8] == 1 then
    reply[#reply + 1], reply[#reply + 2] = #s.runs / 2, s.forgotten
    for j = 1, #s.runs do
      reply[#reply + 1] = s.runs[j]
    end
  end
  shadow]]
end
-- One string is the fastest reply to read.
return pack_numbers('>' .. string.rep('d', #reply), unpack(reply))
