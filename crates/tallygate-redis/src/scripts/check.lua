-- Checks all limits, and charges all or none.
--
-- Returns as doubles whether the check is allowed, the time, the first shadow limit that would have denied it (-1 if
-- none), and the state; or a list of -1, the time and the value, if it cannot decide on the value.
local lets, found = {}, {}
local allowed, shadow = true, -1
for i = 1, limits do
  local c, s = C[i], S[i]
  lets[i], found[i] = kinds[c[1]].allows(c, s, cost)
  --[[penalty
  if s.denials == -1 and s.time > now then
    lets[i] = false
  end
  penalty]]
  if not lets[i] then
    if c[8] == 0 then
      allowed = false
    elseif shadow < 0 then
      shadow = i - 1
    end
  end
end

local changed = allowed or rebased
for i = 1, limits do
  local c, s = C[i], S[i]
  --[[shadow
  if allowed and c[8] == 1 then
    note_request(s, cost, lets[i])
  end
  shadow]]
  if allowed and lets[i] then
    kinds[c[1]].charge(c, s, cost, found[i])
  --[[penalty
  elseif c[9] > 0 and not lets[i] and cost <= c[2] and not (s.denials == -1 and s.time > now) then
    changed = true
    if s.denials >= 0 and now - s.time < c[3] then
      s.denials = s.denials + 1
    else
      s.time, s.denials = now, 1
    end
    if s.denials >= c[10] then
      s.time, s.denials = now + c[9], -1
    end
  penalty]]
  end
end
