//! The token bucket, GCRA and the leaky bucket. All three are one exact state machine.
//!
//! - **Token bucket**: a client saves up to B tokens and earns L of them per window. It is the default choice: it
//!   allows bursts of up to B, and its average rate is exact over any time. It does not space requests out.
//! - **GCRA**: it has a theoretical arrival time (TAT) per key instead of a count of tokens. A request conforms if
//!   max(TAT, now) + c·W/L − now ≤ B·W/L, and then the left side plus `now` is the new TAT. The TAT is the time at
//!   which the bucket is empty again, so GCRA equals the token bucket in every field. The state holds the distance
//!   of the TAT from the last change. So it is exact (a TAT is rarely a whole tick), and it distinguishes a clock
//!   that was set back from a client that used much.
//! - **Leaky bucket**: it allows the same requests, and returns a `delay` for each of them: the time that the level
//!   ahead of it takes to drain, rounded up. A caller that waits for the delay turns bursts into an even output. The
//!   bucket itself delays nothing.
//!
//! The state is the *used* level, in units of 1/W′ of a token, where L′ and W′ are the limit and the window divided
//! by their greatest common divisor. The level drains L′ per tick, a cost c adds c·W′, and a fresh level is 0. So all
//! steps are integer steps without rounding, and a check needs no division: a cost fits if the level is at most
//! (B − c)·W′. Only elapsed time is scaled, never absolute time.
//!
//! If the largest level fits 64 bits (as it nearly always does), the state takes 16 bytes and the arithmetic is
//! 64 bits wide. The same code handles all other buckets with 128 bits.

use alloc::vec::Vec;
use core::fmt;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::{self, NumberReader};
use crate::numbers::{Kind, Numbers, saturate};
use crate::receipt::{ChargeRecord, Receipt};
use crate::{Cost, Quota, Tick, Ticks};

/// The integer type of a level: `u64` if the largest level fits, `u128` otherwise.
pub trait Level:
    Copy + Ord + fmt::Debug + Into<u128> + TryFrom<u128> + private::Arithmetic + 'static
{
}

/// A token bucket, a GCRA or a leaky bucket of `burst` units that earns `limit` units per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket<N = u64> {
    /// B.
    burst: Cost,
    /// L.
    limit: Cost,
    /// L′: how much the level drains per tick.
    drain: u64,
    /// W′: how much one unit of cost adds to the level.
    unit: u64,
    /// W: the longest time by which a caller can be late. If `now` is earlier, the clock was set back.
    window: Ticks,
    /// The highest level, with all debt.
    ceiling: N,
    /// The units that a new key has used.
    start: Cost,
    /// Which of the three buckets it is. It determines the tag of encoded states, and only a leaky bucket has
    /// delays.
    kind: Kind,
}

/// A theoretical arrival time: a whole tick and a fraction of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalTime {
    /// The whole tick.
    pub tick: Tick,
    /// The fraction of a tick after it: a numerator, and a larger denominator.
    pub fraction: (u64, u64),
}

/// The state of a bucket: the used level at the last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketState<N = u64> {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// The level at that time, in units of 1/W′ of a token.
    pub(crate) level: N,
}

impl<N: Level> Bucket<N> {
    /// Creates the bucket for valid numbers; `None` if their levels need more bits.
    pub(crate) fn new(numbers: &Numbers) -> Option<Self> {
        let divisor = gcd(numbers.limit, numbers.window.0);
        let unit = numbers.window.0 / divisor;
        // At most 2¹²⁷: the time to fresh is bounded by 2⁶³ with all debt.
        let ceiling = u128::from(numbers.burst + numbers.debt) * u128::from(unit);
        Some(Self {
            burst: numbers.burst,
            limit: numbers.limit,
            drain: numbers.limit / divisor,
            unit,
            window: numbers.window,
            ceiling: N::try_from(ceiling).ok()?,
            start: numbers.burst - numbers.start,
            kind: numbers.kind,
        })
    }

    /// Returns the level at `now`. For a late caller, it is the level at the last change.
    #[inline]
    fn level(&self, state: &BucketState<N>, now: Tick) -> N {
        state.level.minus(N::times(now.since(state.last).0, self.drain))
    }

    /// Returns whether a cost fits on top of a level, without division or overflow.
    #[inline]
    fn has_room(&self, level: N, cost: Cost) -> bool {
        cost <= self.burst && level <= N::times(self.burst - cost, self.unit)
    }

    /// Sets a new level at `now`, or at the last change if that is later and the old level is not 0.
    #[inline]
    fn set(state: &mut BucketState<N>, now: Tick, level: N, new: N) {
        let last = if level > N::ZERO { state.last.max(now) } else { now };
        *state = BucketState { last, level: new };
    }

    /// Returns how late a caller is: how far `now` is before the last change, if that still matters.
    #[inline]
    fn lateness(state: &BucketState<N>, now: Tick) -> Ticks {
        if state.level > N::ZERO { state.last.since(now) } else { Ticks::ZERO }
    }

    /// Returns the time that a level takes to drain, rounded up. It is at most 2⁶³, so it fits.
    fn time_to_drain(&self, level: u128) -> Ticks {
        Ticks(div_ceil(level, self.drain))
    }

    /// Returns the theoretical arrival time of a state, exactly: the time at which the bucket is empty again.
    #[must_use]
    pub fn arrival_time(&self, state: &BucketState<N>) -> ArrivalTime {
        let (level, drain) = (state.level.into(), u128::from(self.drain));
        let whole = state.last.after(Ticks(saturate(level / drain)));
        ArrivalTime {
            tick: whole.unwrap_or(Tick(i64::MAX)),
            fraction: (saturate(level % drain), self.drain),
        }
    }

    /// Returns L′: how much the level drains per tick.
    pub(crate) const fn drain(&self) -> u64 {
        self.drain
    }

    /// Returns W′: how much one unit of cost adds to the level.
    pub(crate) const fn unit(&self) -> u64 {
        self.unit
    }

    /// Returns whether a level must be split into two numbers for scripts that compute in doubles.
    pub(crate) fn is_deep(&self) -> bool {
        self.ceiling.into() > doubles::LARGEST.into()
    }

    /// Returns whether a state may have this level. After an outage, scripts charge beyond the bound on debt, as far as
    /// doubles are exact.
    fn is_readable(&self, level: N) -> bool {
        level.into() <= self.ceiling.into().max(doubles::LARGEST.into())
    }

    pub(crate) fn write_numbers(&self, state: &BucketState<N>, out: &mut Vec<i128>) {
        // A level has at most 127 bits.
        let signed = |value: u128| i128::from_ne_bytes(value.to_ne_bytes());
        let level: u128 = state.level.into();
        out.push(state.last.0.into());
        if self.is_deep() {
            out.push(signed(level >> doubles::LIMB_BITS));
        }
        out.push(signed(level & doubles::low_mask(self.is_deep())));
    }

    pub(crate) fn read_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<BucketState<N>, DecodeError> {
        let last = numbers.tick("last change")?;
        let high: u128 = if self.is_deep() { numbers.next("level")? } else { 0 };
        let low: u128 = numbers.next("level")?;
        let level = high
            .checked_mul(1 << doubles::LIMB_BITS)
            .and_then(|level| level.checked_add(low))
            .and_then(|level| N::try_from(level).ok())
            .filter(|level| self.is_readable(*level))
            .ok_or(DecodeError::Field { name: "level" })?;
        Ok(BucketState { last, level })
    }
}

impl<N: Level> Algorithm for Bucket<N> {
    type State = BucketState<N>;

    fn capacity(&self) -> Cost {
        self.burst
    }

    #[inline]
    fn fresh(&self, now: Tick) -> BucketState<N> {
        BucketState { last: now, level: N::ZERO }
    }

    #[inline]
    fn initial(&self, now: Tick) -> BucketState<N> {
        BucketState { last: now, level: N::times(self.start, self.unit) }
    }

    #[inline]
    fn last_change(&self, state: &BucketState<N>) -> Tick {
        state.last
    }

    #[inline]
    fn clock_was_set_back(&self, state: &BucketState<N>, now: Tick) -> bool {
        Self::lateness(state, now) > self.window
    }

    fn rebase(&self, state: &mut BucketState<N>, now: Tick) {
        state.last = now;
    }

    #[inline]
    fn allows(&self, state: &BucketState<N>, now: Tick, cost: Cost) -> bool {
        self.has_room(self.level(state, now), cost)
    }

    #[inline]
    fn try_charge(&self, state: &mut BucketState<N>, now: Tick, cost: Cost) -> bool {
        let level = self.level(state, now);
        let is_allowed = self.has_room(level, cost);
        if is_allowed && cost > 0 {
            Self::set(state, now, level, level.plus(N::times(cost, self.unit)));
        }
        is_allowed
    }

    fn fit(&self, state: &BucketState<N>, now: Tick, cost: Cost) -> Fit {
        let Some(room) = self.burst.checked_sub(cost) else { return Fit::Never };
        let level = self.level(state, now).into();
        let highest = u128::from(room) * u128::from(self.unit);
        match level.checked_sub(highest) {
            None | Some(0) => Fit::Now,
            Some(excess) => Fit::After(Self::lateness(state, now).plus(self.time_to_drain(excess))),
        }
    }

    /// The level and the units ahead must drain until the cost fits on top.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        if cost > self.burst {
            return FitBehind { earliest: Fit::Never, latest: None };
        }
        let unit = u128::from(self.unit);
        let wanted = ahead.saturating_add(cost.into()).saturating_mul(unit);
        let level: u128 = self.level(state, now).into();
        let excess = level.saturating_add(wanted).saturating_sub(u128::from(self.burst) * unit);
        let (earliest, wait) = match excess {
            0 => (Fit::Now, Ticks::ZERO),
            excess => {
                let wait = Self::lateness(state, now).plus(self.time_to_drain(excess));
                (Fit::After(wait), wait)
            }
        };
        // A level that drains by 1 per tick reaches every threshold exactly. A faster one can reach 0 between two
        // ticks, so each request ahead, of at least one unit, can lose a part of a tick.
        let lost = if self.drain == 1 { Ticks::ZERO } else { Ticks(saturate(ahead)) };
        FitBehind { earliest, latest: Some(wait.plus(lost)) }
    }

    fn charge(&self, state: &mut BucketState<N>, now: Tick, amount: i128) -> u128 {
        if amount == 0 {
            return 0;
        }
        let level = self.level(state, now);
        let (new, dropped) = self.forced(level, amount);
        Self::set(state, now, level, new);
        dropped
    }

    fn receipt(&self, state: &BucketState<N>) -> Receipt {
        Receipt::Limit(ChargeRecord::of_level(state.last, state.level.into(), self.drain))
    }

    /// Returns units to the bucket, and also exact fractions of a unit.
    fn settle(
        &self,
        state: &mut BucketState<N>,
        now: Tick,
        change: i128,
        receipt: &Receipt,
    ) -> u128 {
        if self.clock_was_set_back(state, now) {
            self.rebase(state, now);
        }
        if change > 0 {
            return self.charge(state, now, change);
        }
        let (asked, unit) = (change.unsigned_abs(), u128::from(self.unit));
        let most = |charge: &ChargeRecord| {
            charge.returnable(asked).saturating_mul(unit).min(charge.undrained(state.last, now))
        };
        let level = self.level(state, now);
        let returned = receipt.charge_record().map_or(0, most).min(level.into());
        if returned > 0 {
            let new = N::try_from(level.into() - returned).unwrap_or(level);
            Self::set(state, now, level, new);
        }
        asked - returned / unit
    }

    fn facts(&self, state: &BucketState<N>, now: Tick, charged: Option<Cost>) -> Facts {
        let level = self.level(state, now).into();
        let unit = u128::from(self.unit);
        let lateness = Self::lateness(state, now);
        let delay = match charged {
            Some(cost) if self.kind == Kind::LeakyBucket => {
                lateness.plus(self.time_to_drain(level.saturating_sub(u128::from(cost) * unit)))
            }
            _ => Ticks::ZERO,
        };
        Facts {
            limit: self.burst,
            remaining: div((u128::from(self.burst) * unit).saturating_sub(level), self.unit),
            reset_after: lateness.plus(self.time_to_drain(level)),
            delay,
            scarcest: Some(0),
            quota: Some(Quota { amount: self.limit, window: self.window }),
        }
    }

    fn fresh_at(&self, state: &BucketState<N>) -> Option<Tick> {
        if state.level == N::ZERO {
            return Some(Tick(i64::MIN));
        }
        state.last.after(self.time_to_drain(state.level.into()))
    }

    #[inline]
    fn is_fresh(&self, state: &BucketState<N>, now: Tick) -> bool {
        self.level(state, now) == N::ZERO
    }

    fn used(&self, state: &BucketState<N>, now: Tick) -> Used {
        let (level, unit) = (self.level(state, now).into(), u128::from(self.unit));
        Used { whole: saturate(level / unit), part: (saturate(level % unit), self.unit) }
    }

    fn share_used(&self, state: &BucketState<N>, now: Tick) -> Share {
        let level: u128 = self.level(state, now).into();
        // The same as `used`, rounded up, with one division of mostly 64 bits: a full store calls this for many keys.
        Share::of(Used::whole(div_ceil(level, self.unit)), self.burst)
    }

    fn with_used(&self, used: Used, now: Tick) -> BucketState<N> {
        let Used { whole, part: (numerator, denominator) } = used.at_most(self.burst);
        let part = (u128::from(numerator) * u128::from(self.unit))
            .div_ceil(u128::from(denominator.max(1)));
        let level = N::times(whole, self.unit).plus(N::times(saturate(part), 1));
        BucketState { last: now, level: level.min(N::times(self.burst, self.unit)) }
    }

    fn encode(&self, state: &BucketState<N>, out: &mut Vec<u8>) {
        out.push(self.kind.tag());
        codec::put_tick(out, state.last);
        codec::put(out, state.level);
    }

    fn decode(&self, bytes: &[u8]) -> Result<BucketState<N>, DecodeError> {
        let mut reader = Reader(bytes);
        reader.tag(self.kind.tag())?;
        let state =
            BucketState { last: reader.tick("last change")?, level: reader.number("level")? };
        reader.end()?;
        if !self.is_readable(state.level) {
            return Err(DecodeError::Field { name: "level" });
        }
        Ok(state)
    }
}

impl<N: Level> Bucket<N> {
    /// Returns the level after a forced charge or a refund, and how many units had no effect.
    fn forced(&self, level: N, amount: i128) -> (N, u128) {
        let unit = u128::from(self.unit);
        let asked = amount.unsigned_abs();
        let (level, ceiling): (u128, u128) = (level.into(), self.ceiling.into());
        let room =
            if amount < 0 { level.div_ceil(unit) } else { ceiling.saturating_sub(level) / unit };
        let moved = asked.min(room);
        let new =
            if amount < 0 { level.saturating_sub(moved * unit) } else { level + moved * unit };
        (N::try_from(new).unwrap_or(self.ceiling), asked - moved)
    }
}

/// Divides a level. Nearly all levels fit 64 bits, for which a division is faster.
#[inline]
fn div(level: u128, by: u64) -> u64 {
    match u64::try_from(level) {
        Ok(level) => level / by,
        Err(_) => saturate(level / u128::from(by)),
    }
}

/// Divides a level and rounds up.
#[inline]
fn div_ceil(level: u128, by: u64) -> u64 {
    match u64::try_from(level) {
        Ok(level) => level.div_ceil(by),
        Err(_) => saturate(level.div_ceil(u128::from(by))),
    }
}

const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

impl Level for u64 {}
impl Level for u128 {}

mod private {
    /// The arithmetic of levels. Results saturate at the ends of the range. A product that saturates is larger than
    /// any level, so the level drains to 0 as it should.
    pub trait Arithmetic: Sized {
        const ZERO: Self;
        fn times(a: u64, b: u64) -> Self;
        fn plus(self, other: Self) -> Self;
        fn minus(self, other: Self) -> Self;
    }

    impl Arithmetic for u64 {
        const ZERO: Self = 0;
        #[inline]
        fn times(a: u64, b: u64) -> Self {
            a.saturating_mul(b)
        }
        #[inline]
        fn plus(self, other: Self) -> Self {
            self.saturating_add(other)
        }
        #[inline]
        fn minus(self, other: Self) -> Self {
            self.saturating_sub(other)
        }
    }

    impl Arithmetic for u128 {
        const ZERO: Self = 0;
        #[inline]
        fn times(a: u64, b: u64) -> Self {
            Self::from(a) * Self::from(b)
        }
        #[inline]
        fn plus(self, other: Self) -> Self {
            self.saturating_add(other)
        }
        #[inline]
        fn minus(self, other: Self) -> Self {
            self.saturating_sub(other)
        }
    }
}
