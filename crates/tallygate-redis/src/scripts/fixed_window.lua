-- Fixed window: {last change, its offset in the window, count}.
local function fixed_count(c, s)
  local elapsed = now > s[1] and now - s[1] or 0
  return elapsed < c[3] - s[2] and s[3] or 0
end
local function fixed_set(c, s, count, new)
  if count == 0 then
    kinds[3].rebase(c, s)
  elseif now > s[1] then
    s[1], s[2] = now, s[2] + now - s[1]
  end
  s[3] = new
end
kinds[3] = {
  width = 3,
  read = function(at)
    return {unpack_numbers('>ddd', value, at)}
  end,
  first = function(c)
    local s = {now, 0, c[4]}
    kinds[3].rebase(c, s)
    return s
  end,
  set_back = function(c, s)
    return s[3] > 0 and s[1] - now > c[3]
  end,
  rebase = function(c, s)
    s[1], s[2] = now, 0
    if c[6] == 0 then
      -- The operator % is not exact for large numbers.
      local into = math.fmod(now, c[3])
      s[2] = into < 0 and into + c[3] or into
    end
  end,
  allows = function(c, s, cost)
    local count = fixed_count(c, s)
    return count <= c[2] - cost, count
  end,
  charge = function(c, s, cost, count)
    fixed_set(c, s, count, count + cost)
  end,
  force = function(c, s, amount)
    local count = fixed_count(c, s)
    local new = count + amount
    if amount < 0 then
      new = new < 0 and 0 or new
    else
      local most = c[5] > count and c[5] or count
      new = new > most and most or new
    end
    fixed_set(c, s, count, new)
  end,
  fresh_at = function(c, s)
    return s[3] > 0 and s[1] + c[3] - s[2] or now
  end,
  write = function(s)
    return pack_numbers('>ddd', s[1], s[2], s[3])
  end,
  tell = function(_, s, reply)
    for i = 1, 3 do
      reply[#reply + 1] = s[i]
    end
  end,
}
