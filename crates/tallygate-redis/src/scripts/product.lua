-- Returns the exact product of two whole numbers up to 2^53, as high * 2^52 + low.
--
-- The rounding error of a * b follows from halves of both, whose products are exact.
local LIMB = 4503599627370496
local function product(a, b)
  local p = a * b
  if p < LIMB then
    return 0, p
  end
  local t = 134217729 * a
  local ah = t - (t - a)
  local al = a - ah
  t = 134217729 * b
  local bh = t - (t - b)
  local bl = b - bh
  local lost = ((ah * bh - p) + ah * bl + al * bh) + al * bl
  local high = math.floor(p / LIMB)
  local low = p - high * LIMB + lost
  if low < 0 then
    return high - 1, low + LIMB
  elseif low >= LIMB then
    return high + 1, low - LIMB
  end
  return high, low
end
