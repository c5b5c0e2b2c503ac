-- Notes an allowed request in the history of a shadow limit; a port of shadow.rs. The history is a list of runs, the
-- newest first: the units that the limit charged, and the older units that it did not charge. `forgotten` is the number
-- before that of the oldest run.
local function note_request(s, cost, is_charged)
  local LARGEST = 4503599627370496
  local runs = s.runs
  if is_charged then
    if #runs > 0 then
      runs[1] = math.min(runs[1] + cost, LARGEST)
    end
  elseif runs[1] == 0 then
    runs[2] = math.min(runs[2] + cost, LARGEST)
  else
    if #runs == 0 and s.forgotten == 0 then
      s.forgotten = math.max(now, 0)
    elseif #runs == 16 then
      s.forgotten = s.forgotten + 1
    end
    table.insert(runs, 1, cost)
    table.insert(runs, 1, 0)
    runs[17], runs[18] = nil, nil
  end
end
