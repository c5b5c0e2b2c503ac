-- Charges all limits without asking, or gives back.
--
-- ARGV[4]  when the amount was charged that is given back; none if it is not known
--
-- Replies as a check that was allowed.
local amount, charged = cost, ARGV[4] and tonumber(ARGV[4])
for i = 1, limits do
  local c = C[i]
  if charged then
    kinds[c[1]].give_back(c, S[i], -amount, charged)
  else
    kinds[c[1]].force(c, S[i], amount)
  end
end
local allowed, shadow, changed = true, -1, true
cost = 0
