-- Reads the state of every limit, and rebases it if the clock was set back.
local cost = unpack_numbers('>d', numbers)
local limits = (#numbers - 8) / 80
local C, S = {}, {}
local at = #head + 1
local rebased = false
for i = 1, limits do
  local c = {unpack_numbers('>dddddddddd', numbers, i * 80 - 71)}
  local kind = kinds[c[1]]
  local s
  if value then
    s = kind.read(at)
    at = at + 8 * (s.width or kind.width)
    -- A value with a number that is not whole or not exact is not decided here. Only the first number is a time.
    for j = 1, #s do
      if not (s[j] <= EXACT and s[j] >= (j == 1 and -EXACT or 0)) or s[j] % 1 > 0 then
        return {-1, now, value}
      end
    end
  else
    s = kind.first(c)
  end
  if kind.set_back(c, s) then
    if not kind.rebase then
      return {-1, now, value}
    end
    kind.rebase(c, s)
    rebased = true
  end
  if kind.is_full and kind.is_full(s) then
    return {-1, now, value or ''}
  end
  C[i], S[i] = c, s
  --[[penalty
  if c[9] > 0 then
    local time, denials = 0, -2
    if value then
      time, denials = unpack_numbers('>dd', value, at)
      at = at + 16
      if not (denials >= -2 and denials <= EXACT and time >= -EXACT and time <= EXACT)
        or denials % 1 + time % 1 > 0 then
        return {-1, now, value}
      end
    end
    if denials >= 0 and time - now > c[3] then
      rebased = true
      time = now
      denials = denials < c[10] and denials or c[10] - 1
    elseif denials == -1 and time - now > c[9] + c[3] then
      rebased = true
      time = now + c[9]
    end
    s.time, s.denials = time, denials
  end
  penalty]]
  --[[shadow
  if c[8] == 1 then
    s.runs, s.forgotten = {}, 0
    if value then
      local runs, forgotten = unpack_numbers('>dd', value, at)
      if not (runs >= 0 and runs <= 8 and forgotten >= 0 and forgotten <= EXACT) or runs % 1 + forgotten % 1 > 0 then
        return {-1, now, value}
      end
      s.forgotten = forgotten
      for j = 1, 2 * runs do
        local units = unpack_numbers('>d', value, at + 8 + 8 * j)
        if not (units >= 0 and units <= EXACT) or units % 1 > 0 then
          return {-1, now, value}
        end
        s.runs[j] = units
      end
      at = at + 16 + 16 * runs
    end
  end
  shadow]]
end
if value and at ~= #value + 1 then
  error('the value has another length')
end
