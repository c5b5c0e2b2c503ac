-- Token bucket, GCRA and leaky bucket: {last change, level}.
kinds[1] = {
  width = 2,
  read = function(at)
    return {unpack_numbers('>dd', value, at)}
  end,
  first = function(c)
    return {now, c[4] * c[6]}
  end,
  set_back = function(c, s)
    return s[2] > 0 and s[1] - now > c[3]
  end,
  rebase = function(_, s)
    s[1] = now
  end,
  -- Returns whether a cost fits, and the level before it.
  allows = function(c, s, cost)
    local level = s[2]
    if now > s[1] then
      -- A product above 2^53 is rounded, but every level is below that.
      local drained = (now - s[1]) * c[7]
      level = drained < level and level - drained or 0
    end
    return cost <= c[2] and level <= (c[2] - cost) * c[6], level
  end,
  charge = function(c, s, cost, level)
    if level == 0 or now > s[1] then
      s[1] = now
    end
    s[2] = level + cost * c[6]
  end,
  force = function(c, s, amount)
    local _, level = kinds[1].allows(c, s, 0)
    local unit = c[6]
    local new
    if amount < 0 then
      new = level + amount * unit
      -- A product above 2^53 is larger than any level, even if it is rounded.
      if new < 0 then
        new = 0
      end
    else
      local room = c[5] * unit - level
      local units = room > 0 and (room - math.fmod(room, unit)) / unit or 0
      new = level + (amount < units and amount or units) * unit
    end
    if level == 0 or now > s[1] then
      s[1] = now
    end
    s[2] = new
  end,
  fresh_at = function(c, s)
    return s[1] + math.ceil(s[2] / c[7])
  end,
  write = function(s)
    return pack_numbers('>dd', s[1], s[2])
  end,
  tell = function(_, s, reply)
    reply[#reply + 1] = s[1]
    reply[#reply + 1] = s[2]
  end,
}
