local C, S, changed = {}, {}, {}
for k = 1, #KEYS do
  local head, numbers = ARGV[3 * k], ARGV[3 * k + 1]
  value = redis.call('GET', KEYS[k])
  if value and string.sub(value, 1, #head) ~= head then
    --several--
    return leave()
  end
  local at = #head + 1
  C[k], S[k] = {}, {}
  for i = 1, #numbers / 80 do
    local c = {unpack_numbers('>dddddddddd', numbers, i * 80 - 79)}
    local kind = kinds[c[1]]
    local s
    if value then
      s = kind.read(at)
      at = at + 8 * (s.width or kind.width)
      -- A value with a number that is not whole or not exact is not decided here. Only the first number is a time.
      for j = 1, #s do
        if not (s[j] <= EXACT and s[j] >= (j == 1 and -EXACT or 0)) or s[j] % 1 > 0 then
          return leave()
        end
      end
    else
      s = kind.first(c)
    end
    if kind.set_back(c, s) then
      if not kind.rebase then
        return leave()
      end
      kind.rebase(c, s)
      changed[k] = true
    end
    C[k][i], S[k][i] = c, s
    --[[penalty
    if c[9] > 0 then
      local time, denials = 0, -2
      if value then
        time, denials = unpack_numbers('>dd', value, at)
        at = at + 16
        if not (denials >= -2 and denials <= EXACT and time >= -EXACT and time <= EXACT)
          or denials % 1 + time % 1 > 0 then
          return leave()
        end
      end
      if denials >= 0 and time - now > c[3] then
        changed[k] = true
        time = now
        denials = denials < c[10] and denials or c[10] - 1
      elseif denials == -1 and time - now > c[9] + c[3] then
        changed[k] = true
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
          return leave()
        end
        s.forgotten = forgotten
        for j = 1, 2 * runs do
          local units = unpack_numbers('>d', value, at + 8 + 8 * j)
          if not (units >= 0 and units <= EXACT) or units % 1 > 0 then
            return leave()
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
end

local replies, requests, at = {pack_numbers('>d', now)}, ARGV[2], 1
while at <= #requests do
  local parts = unpack_numbers('>d', requests, at)
  local all, asked = true, {}
  for p = 1, parts do
    local k, cost = unpack_numbers('>dd', requests, at + 16 * p - 8)
    local part = {k = k, cost = cost, allowed = true, shadow = -1, lets = {}, found = {}}
    for i = 1, #C[k] do
      local c, s = C[k][i], S[k][i]
      local kind = kinds[c[1]]
      if kind.is_full and kind.is_full(s) then
        return leave()
      end
      part.lets[i], part.found[i] = kind.allows(c, s, cost)
      --[[penalty
      if s.denials == -1 and s.time > now then
        part.lets[i] = false
      end
      penalty]]
      if not part.lets[i] then
        if c[8] == 0 then
          part.allowed = false
        elseif part.shadow < 0 then
          part.shadow = i - 1
        end
      end
    end
    all = all and part.allowed
    asked[p] = part
  end
  at = at + 8 + 16 * parts
  for p = 1, parts do
    local part = asked[p]
    local k, cost = part.k, part.cost
    changed[k] = changed[k] or all
    local numbers = {}
    for i = 1, #C[k] do
      local c, s = C[k][i], S[k][i]
      --[[shadow
      if all and c[8] == 1 then
        note_request(s, cost, part.lets[i])
      end
      shadow]]
      if all and part.lets[i] then
        kinds[c[1]].charge(c, s, cost, part.found[i])
      --[[penalty
      elseif c[9] > 0 and not part.lets[i] and cost <= c[2] and not (s.denials == -1 and s.time > now) then
        changed[k] = true
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
      kinds[c[1]].tell(c, s, numbers, cost)
      --[[penalty
      if c[9] > 0 then
        numbers[#numbers + 1], numbers[#numbers + 2] = s.time, s.denials
      end
      penalty]]
      --[[shadow
      if c[8] == 1 then
        numbers[#numbers + 1], numbers[#numbers + 2] = #s.runs / 2, s.forgotten
        for j = 1, #s.runs do
          numbers[#numbers + 1] = s.runs[j]
        end
      end
      shadow]]
    end
    replies[#replies + 1] = pack_numbers('>ddd', #numbers, part.allowed and 1 or 0, part.shadow)
      .. pack_numbers('>' .. string.rep('d', #numbers), unpack(numbers))
  end
end

for k = 1, #KEYS do
  if changed[k] then
    local new, fresh_at = ARGV[3 * k], now
    for i = 1, #C[k] do
      local c, s = C[k][i], S[k][i]
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
      redis.call('SET', KEYS[k], new, 'PX', 86400000)
    elseif fresh_at > now then
      redis.call('SET', KEYS[k], new, 'PXAT', math.floor(fresh_at / 1000) + 1)
    else
      redis.call('DEL', KEYS[k])
    end
  end
end
return table.concat(replies)
