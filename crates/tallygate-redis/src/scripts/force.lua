-- Charges all limits without a check.
--
-- Returns the same reply as an allowed check. Refunds are decided by compare-and-set.
local amount = cost
for i = 1, limits do
  --[[shadow
  if C[i][8] == 1 then
    note_request(S[i], amount, true)
  end
  shadow]]
  kinds[C[i][1]].force(C[i], S[i], amount)
end
local allowed, shadow, changed = true, -1, true
cost = 0
