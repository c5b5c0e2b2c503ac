-- A bucket whose levels exceed 2^52: {last change, high, low}; the level is high * 2^52 + low.
kinds[2] = {
  width = 3,
  read = function(at)
    return {unpack_numbers('>ddd', value, at)}
  end,
  first = function(c)
    return {now, product(c[4], c[6])}
  end,
  set_back = function(c, s)
    return (s[2] > 0 or s[3] > 0) and s[1] - now > c[3]
  end,
  rebase = function(_, s)
    s[1] = now
  end,
  allows = function(c, s, cost)
    local high, low = s[2], s[3]
    if now > s[1] then
      local drained_high, drained_low = product(now - s[1], c[7])
      if drained_high > high or (drained_high == high and drained_low >= low) then
        high, low = 0, 0
      else
        high, low = high - drained_high, low - drained_low
        if low < 0 then
          high, low = high - 1, low + LIMB
        end
      end
    end
    if cost > c[2] then
      return false
    end
    local most_high, most_low = product(c[2] - cost, c[6])
    local fits = high < most_high or (high == most_high and low <= most_low)
    return fits, {high, low}
  end,
  charge = function(c, s, cost, level)
    local high, low = product(cost, c[6])
    if level[1] + level[2] == 0 or now > s[1] then
      s[1] = now
    end
    high, low = level[1] + high, level[2] + low
    if low >= LIMB then
      high, low = high + 1, low - LIMB
    end
    s[2], s[3] = high, low
  end,
  -- The division is inexact, so a little is added: a key may expire a little late, never early.
  fresh_at = function(c, s)
    return s[1] + math.ceil((s[2] * LIMB + s[3]) / c[7] * (1 + 1e-15)) + 2
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
