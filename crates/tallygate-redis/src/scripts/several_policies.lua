-- Decides on keys whose value was written under other policies than those of the check; a port of client_state.rs and
-- allowance.rs. A script runs it only if it finds such a value.
--
-- It decides if every limit of every policy is a bucket, a fixed window or a sliding window counter without a penalty,
-- all numbers are exact, and no clock was set back. It leaves all other values to the client.
--
-- Its arguments are the heads of the policies of the check, whether each replaces the state of other policies ('r') or is
-- kept with them, and the requests in the format of many_open. It returns the parts and the values, or nothing.
local function decide_several(heads, replaces, requests)
  local EXACT, LARGEST = 9007199254740992, 4503599627370496
  local MOST_POLICIES = 8
  local unpack_numbers, pack_numbers = struct.unpack, struct.pack
  local kinds, value = {}, nil
  --kinds--
  local function leave()
    error('not decided here')
  end
  -- Compares a * b with c * d: below 0, 0 or above 0. Rounding keeps the order of products: only two products
  -- that seem equal are computed exactly.
  local function compare(a, b, c, d)
    local left, right = a * b, c * d
    if left ~= right or left < EXACT then
      return left - right
    end
    local left_high, left_low = product(a, b)
    local right_high, right_low = product(c, d)
    return left_high ~= right_high and left_high - right_high or left_low - right_low
  end
  -- Returns a * b / c, rounded down; b is at most c.
  local function divide(a, b, c)
    local quotient = math.floor(a * b / c)
    while compare(quotient, c, a, b) > 0 do
      quotient = quotient - 1
    end
    while compare(quotient + 1, c, a, b) <= 0 do
      quotient = quotient + 1
    end
    return quotient
  end
  local function divide_up(a, b, c)
    local quotient = divide(a, b, c)
    return compare(quotient, c, a, b) < 0 and quotient + 1 or quotient
  end

  -- A used amount has whole units and a fraction of a unit: {whole, numerator, denominator}.
  local function used(c, s)
    if c[1] == 1 then
      local _, level = kinds[1].allows(c, s, 0)
      local part = math.fmod(level, c[6])
      return {(level - part) / c[6], part, c[6]}
    elseif c[1] == 3 then
      return {fixed_count(c, s), 0, 1}
    end
    local into, count, previous = counter_at(c, s)
    return {count + divide(previous, c[3] - into, c[3]), 0, 1}
  end
  local function rounded_up(amount)
    return amount[1] + (amount[2] > 0 and 1 or 0)
  end
  local function at_most(amount, capacity)
    return amount[1] < capacity and amount or {capacity, 0, 1}
  end
  local function is_more(one, other)
    if one[1] ~= other[1] then
      return one[1] > other[1]
    end
    return compare(one[2], other[3], other[2], one[3]) > 0
  end
  local function in_units(amount, unit)
    return amount[1] * unit + divide_up(unit, amount[2], amount[3])
  end
  local function with_used(c, amount, at)
    if c[1] == 1 then
      return {at, math.min(in_units(at_most(amount, c[2]), c[6]), c[2] * c[6])}
    end
    local count = math.min(rounded_up(amount), c[2])
    if c[1] == 3 then
      local into = c[6] == 0 and math.fmod(at, c[3]) or 0
      return {at, into < 0 and into + c[3] or into, count}
    end
    return {at, count, 0}
  end
  local function is_unused(c, s)
    if c[1] == 1 then
      local _, level = kinds[1].allows(c, s, 0)
      return level == 0
    elseif c[1] == 3 then
      return fixed_count(c, s) == 0
    end
    local _, count, previous = counter_at(c, s)
    return count + previous == 0
  end

  local function is_slower(one, other)
    local order = compare(one.limit, other.window, other.limit, one.window)
    return order < 0 or (order == 0 and one.capacity < other.capacity)
  end
  local function is_at_most(one, other)
    return compare(one.limit, other.window, other.limit, one.window) <= 0
  end
  -- Reads a policy from the description in its head: its limits, and its rate, which is that of its slowest limit.
  local policies = {}
  local function parse(head)
    local policy, bytes = {}, {string.byte(head, 7, #head)}
    local at = 2
    for i = 1, bytes[1] do
      local length = bytes[at]
      if length > 127 or bytes[1] > 127 then
        leave()
      end
      local name, tag = string.sub(head, at + 7, at + 6 + length), bytes[at + length + 1]
      at = at + length + 2
      -- The limit, the window, the capacity, the debt, the initial quota of a new key, flags, and the penalty, as
      -- numbers with seven bits per byte.
      local n, found, number, weight = {}, 0, 0, 1
      while found < 8 do
        local byte = bytes[at]
        at = at + 1
        if byte < 128 then
          found = found + 1
          n[found] = number + byte * weight
          number, weight = 0, 1
        else
          number, weight = number + (byte - 128) * weight, weight * 128
        end
      end
      local flags = n[6]
      if math.max(n[1], n[2], n[3], n[4], n[5]) > LARGEST then
        leave()
      end
      local code, unit, drain = tag == 4 and 3 or 4, tag == 4 and flags % 2 or 0, 0
      if tag <= 3 then
        local divisor, rest = n[1], n[2]
        while rest > 0 do
          divisor, rest = rest, math.fmod(divisor, rest)
        end
        code, unit, drain = 1, n[2] / divisor, n[1] / divisor
      end
      local most = n[3] + n[4]
      if tag == 5 or n[7] > 0 or most > LARGEST or most * math.max(unit, 1) > LARGEST then
        leave()
      end
      local c = {code, n[3], n[2], n[3] - n[5], most, unit, drain, flags > 1 and 1 or 0, 0, 0}
      policy[i] = {name = name, c = c, tag = tag, limit = n[1]}
      local rate = {limit = n[1], window = n[2], capacity = n[3], place = i}
      if flags < 2 and (not policy.rate or is_slower(rate, policy.rate)) then
        policy.rate = rate
      end
    end
    return policy
  end
  local function policy_of(head)
    local known = policies[head] or parse(head)
    policies[head] = known
    return {head = head, rate = known.rate, unpack(known)}
  end
  -- Returns whether one limit can use the state of the other without a change.
  local function has_same_state(one, other)
    return one.tag == other.tag and one.limit == other.limit and one.c[2] == other.c[2]
      and one.c[3] == other.c[3] and one.c[5] == other.c[5] and one.c[6] == other.c[6]
  end
  local function check_time(entry)
    for i = 1, #entry do
      if kinds[entry[i].c[1]].set_back(entry[i].c, entry.states[i]) then
        leave()
      end
    end
    local rate = entry.rate
    if rate and entry.level and entry.level > 0 and entry.last - now > rate.window then
      leave()
    end
  end
  -- An entry is a policy with its states. If there are several entries, each also has an allowance: last and level.
  local function entry_of(text)
    if string.sub(text, 1, 2) ~= '\001n' then
      leave()
    end
    local entry = policy_of(string.sub(text, 1, 6 + unpack_numbers('>I4', text, 3)))
    entry.states = {}
    local at = #entry.head + 1
    value = text
    for i = 1, #entry do
      local kind = kinds[entry[i].c[1]]
      local s = kind.read(at)
      at = at + 8 * kind.width
      for j = 1, #s do
        if not (s[j] <= EXACT and s[j] >= (j == 1 and -EXACT or 0)) or s[j] % 1 > 0 then
          leave()
        end
      end
      if entry[i].c[8] == 1 then
        local runs, forgotten = unpack_numbers('>dd', text, at)
        if not (runs >= 0 and runs <= 8 and forgotten >= 0 and forgotten <= EXACT) or runs % 1 + forgotten % 1 > 0 then
          leave()
        end
        s.runs, s.forgotten = {}, forgotten
        for j = 1, 2 * runs do
          local units = unpack_numbers('>d', text, at + 8 + 8 * j)
          if not (units >= 0 and units <= EXACT) or units % 1 > 0 then
            leave()
          end
          s.runs[j] = units
        end
        at = at + 16 + 16 * runs
      end
      entry.states[i] = s
    end
    if at ~= #text + 1 then
      leave()
    end
    check_time(entry)
    return entry
  end
  local function entries_of(text)
    if string.sub(text, 1, 2) ~= '\001s' then
      return {entry_of(text)}
    end
    local entries, at = {}, 3
    while at <= #text do
      local length = unpack_numbers('>I4', text, at)
      local entry = entry_of(string.sub(text, at + 4, at + 3 + length))
      local last, high, low = unpack_numbers('>i8I8I8', text, at + 4 + length)
      if high > 0 or low > LARGEST or last > LARGEST or last < -LARGEST then
        leave()
      end
      entry.last, entry.level = last, low
      check_time(entry)
      entries[#entries + 1] = entry
      at = at + 28 + length
    end
    return entries
  end

  local function most_used(entry)
    local most
    for i = 1, #entry do
      local amount = used(entry[i].c, entry.states[i])
      if not most or rounded_up(amount) >= rounded_up(most) then
        most = amount
      end
    end
    return most
  end
  -- Converts the states of an entry to another policy: used units stay used.
  local function carry(policy, entry)
    local states, is_alone = {}, #policy == 1 and #entry == 1
    for i = 1, #policy do
      local limit, from = policy[i], nil
      for j = #entry, 1, -1 do
        from = (is_alone or entry[j].name == limit.name) and j or from
      end
      if not from then
        states[i] = with_used(limit.c, most_used(entry), now)
      elseif has_same_state(entry[from], limit) then
        states[i] = {unpack(entry.states[from])}
      else
        local s = entry.states[from]
        states[i] = with_used(limit.c, used(entry[from].c, s), math.max(now, s[1]))
      end
      if limit.c[8] == 1 then
        local other = from and entry.states[from]
        states[i].runs = {unpack(other and other.runs or {})}
        states[i].forgotten = other and other.forgotten or 0
      end
    end
    return states
  end
  local function merge(policy, one, other)
    local states = {}
    for i = 1, #policy do
      local c = policy[i].c
      states[i] = is_more(used(c, other[i]), used(c, one[i])) and other[i] or one[i]
    end
    return states
  end
  local function level_at(entry)
    local earned = now > entry.last and (now - entry.last) * entry.rate.limit or 0
    return earned < entry.level and entry.level - earned or 0
  end
  local function is_fresh(entries)
    for _, entry in ipairs(entries) do
      for i = 1, #entry do
        if not is_unused(entry[i].c, entry.states[i]) then
          return false
        end
      end
      if #entries > 1 and entry.rate and level_at(entry) > 0 then
        return false
      end
    end
    return true
  end
  local function replace_all(entries, policy)
    local most
    for _, entry in ipairs(entries) do
      if entry.head == policy.head then
        return {entry}
      end
      if not most or rounded_up(most_used(entry)) >= rounded_up(most_used(most)) then
        most = entry
      end
    end
    policy.states = carry(policy, most)
    return {policy}
  end
  -- Moves a policy to the front. A new policy takes over the largest usage of all others.
  local function bring_under(entries, policy)
    local was_fresh = is_fresh(entries)
    if #entries == 1 then
      local only = entries[1]
      only.last, only.level = now, 0
      if only.rate then
        local place = only.rate.place
        local amount = used(only[place].c, only.states[place])
        only.level = in_units(at_most(amount, only.rate.capacity), only.rate.window)
      end
    end
    for place, entry in ipairs(entries) do
      if entry.head == policy.head then
        table.insert(entries, 1, table.remove(entries, place))
        return entries
      end
    end
    local states, slower
    for _, entry in ipairs(entries) do
      local carried = carry(policy, entry)
      states = states and merge(policy, states, carried) or carried
      if policy.rate and entry.rate and is_at_most(entry.rate, policy.rate)
        and (not slower or is_at_most(slower.rate, entry.rate)) then
        slower = entry
      end
    end
    policy.states, policy.last, policy.level = states, now, 0
    if slower then
      local level, window = level_at(slower), slower.rate.window
      local part = math.fmod(level, window)
      policy.level = in_units({(level - part) / window, part, window}, policy.rate.window)
      policy.last = math.max(slower.last, now)
    end
    entries = was_fresh and {} or entries
    if #entries >= MOST_POLICIES then
      leave()
    end
    table.insert(entries, 1, policy)
    return entries
  end
  -- Returns the allowances that a request under the first policy must fit into.
  local function bounds_of(entries)
    local bounds = {}
    for _, entry in ipairs(entries) do
      if #entries > 1 and entry.rate then
        local capacity = 0
        for _, other in ipairs(entries) do
          if other.rate and is_at_most(other.rate, entry.rate) then
            capacity = capacity + other.rate.capacity
          end
        end
        if capacity * entry.rate.window > LARGEST or entry.level > LARGEST then
          leave()
        end
        entry.capacity = capacity
        if entries[1].rate and is_at_most(entries[1].rate, entry.rate) then
          bounds[#bounds + 1] = entry
        end
      end
    end
    return bounds
  end

  local all = {}
  for k = 1, #KEYS do
    local text, policy = redis.call('GET', KEYS[k]), policy_of(heads[k])
    local key = {changed = false}
    if not text then
      policy.states = {}
      for i = 1, #policy do
        policy.states[i] = kinds[policy[i].c[1]].first(policy[i].c)
        policy.states[i].runs, policy.states[i].forgotten = {}, 0
      end
      key.entries = {policy}
    else
      local entries = entries_of(text)
      if replaces[k] == 'r' then
        key.changed = string.sub(text, 1, #heads[k]) ~= heads[k]
        entries = replace_all(entries, policy)
      elseif entries[1].head ~= policy.head then
        key.changed = true
        entries = bring_under(entries, policy)
      end
      key.entries = entries
      for _, entry in ipairs(entries) do
        check_time(entry)
      end
    end
    key.bounds = bounds_of(key.entries)
    all[k] = key
  end

  local replies, at = {pack_numbers('>d', now)}, 1
  while at <= #requests do
    local parts = unpack_numbers('>d', requests, at)
    local agree, asked = true, {}
    for p = 1, parts do
      local k, cost = unpack_numbers('>dd', requests, at + 16 * p - 8)
      local key = all[k]
      local first = key.entries[1]
      local part = {key = key, cost = cost, allowed = true, shadow = -1, lets = {}, found = {}}
      for i = 1, #first do
        local c = first[i].c
        part.lets[i], part.found[i] = kinds[c[1]].allows(c, first.states[i], cost)
        if not part.lets[i] and c[8] == 0 then
          part.allowed = false
        elseif not part.lets[i] and part.shadow < 0 then
          part.shadow = i - 1
        end
      end
      for _, entry in ipairs(key.bounds) do
        if cost > entry.capacity or level_at(entry) > (entry.capacity - cost) * entry.rate.window then
          part.allowed = false
        end
      end
      agree = agree and part.allowed
      asked[p] = part
    end
    at = at + 8 + 16 * parts
    for p = 1, parts do
      local part = asked[p]
      local key, cost = part.key, part.cost
      local first = key.entries[1]
      if agree then
        key.changed = true
        if #key.entries > 1 and is_fresh(key.entries) then
          key.entries, key.bounds = {first}, {}
        end
        for e, entry in ipairs(key.entries) do
          for i = 1, #entry do
            local c, s = entry[i].c, entry.states[i]
            if c[8] == 1 then
              note_request(s, cost, e > 1 or part.lets[i])
            end
            if e > 1 then
              kinds[c[1]].force(c, s, cost)
            elseif part.lets[i] then
              kinds[c[1]].charge(c, s, cost, part.found[i])
            end
          end
        end
        for _, entry in ipairs(key.bounds) do
          local level = level_at(entry)
          entry.last = level > 0 and math.max(entry.last, now) or now
          entry.level = level + cost * entry.rate.window
        end
      end
      local state_numbers = {}
      for i = 1, #first do
        kinds[first[i].c[1]].tell(first[i].c, first.states[i], state_numbers, cost)
        if first[i].c[8] == 1 then
          local runs = first.states[i].runs
          state_numbers[#state_numbers + 1], state_numbers[#state_numbers + 2] = #runs / 2, first.states[i].forgotten
          for j = 1, #runs do
            state_numbers[#state_numbers + 1] = runs[j]
          end
        end
      end
      local numbers = #state_numbers
      for _, entry in ipairs(key.bounds) do
        for _, number in ipairs({entry.last, entry.level, entry.rate.limit, entry.rate.window, entry.capacity}) do
          state_numbers[#state_numbers + 1] = number
        end
      end
      replies[#replies + 1] = pack_numbers('>dddd', numbers, #key.bounds, part.allowed and 1 or 0, part.shadow)
        .. pack_numbers('>' .. string.rep('d', #state_numbers), unpack(state_numbers))
    end
  end

  local values = {}
  for k = 1, #KEYS do
    local key, texts, fresh_at = all[k], {}, now
    local is_several = #key.entries > 1
    for e, entry in ipairs(key.entries) do
      local text = entry.head
      for i = 1, #entry do
        local kind = kinds[entry[i].c[1]]
        text = text .. kind.write(entry.states[i])
        if entry[i].c[8] == 1 then
          local runs, forgotten = entry.states[i].runs, entry.states[i].forgotten
          text = text .. pack_numbers('>' .. string.rep('d', #runs + 2), #runs / 2, forgotten, unpack(runs))
        end
        fresh_at = math.max(fresh_at, kind.fresh_at(entry[i].c, entry.states[i]))
      end
      if is_several then
        text = pack_numbers('>I4', #text) .. text .. pack_numbers('>i8I8I8', entry.last, 0, entry.level)
        if entry.rate then
          fresh_at = math.max(fresh_at, entry.last + math.ceil(entry.level / entry.rate.limit))
        end
      end
      texts[e] = text
    end
    values[k] = {(is_several and '\001s' or '') .. table.concat(texts), key.changed, fresh_at}
  end
  return table.concat(replies), values
end
-- A value that cannot be read raises an error, and is left to the client. Nothing was written before that.
local function try_several(heads, replaces, requests)
  local is_decided, parts, values = pcall(decide_several, heads, replaces, requests)
  if not is_decided then
    return nil
  end
  for k, written in ipairs(values) do
    local new, is_changed, fresh_at = unpack(written)
    if is_changed and given then
      -- If the caller gives the time, more real time may pass before its next call.
      redis.call('SET', KEYS[k], new, 'PX', 86400000)
    elseif is_changed and fresh_at > now then
      redis.call('SET', KEYS[k], new, 'PXAT', math.floor(fresh_at / 1000) + 1)
    elseif is_changed then
      redis.call('DEL', KEYS[k])
    end
  end
  return {1, now, parts, #KEYS == 1 and values[1][1] or ''}
end
