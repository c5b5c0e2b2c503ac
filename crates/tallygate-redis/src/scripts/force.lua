-- Charges all limits without asking, or refunds.
--
-- Replies as a check that was allowed.
local amount = cost
for i = 1, limits do
  kinds[C[i][1]].force(C[i], S[i], amount)
end
local allowed, shadow, changed = true, -1, true
cost = 0
