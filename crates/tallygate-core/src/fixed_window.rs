//! Fixed window: allows at most L units in each window. Every window starts at 0.
//!
//! It is the simplest algorithm to explain ("100 per calendar minute") and to count. Its weakness is the boundary: L at
//! the end of one window and L at the start of the next are 2L within a moment. Windows start at multiples of W, or
//! (anchored) at the first allowed request after the last window ended. Anchored windows have the same weakness, but
//! no boundary that all clients know.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::numbers::{Anchor, Kind, Numbers, saturate};
use crate::receipt::{ChargeRecord, Receipt};
use crate::{Cost, Quota, Tick, Ticks};

/// A fixed window that allows at most `limit` units in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    limit: Cost,
    window: u64,
    anchor: Anchor,
    /// The largest count, with all debt.
    ceiling: Cost,
    /// The units that a new key has used.
    start: Cost,
}

/// The state of a fixed window: the count of its window.
///
/// The state holds how far into its window the last change was, because the start of the window could be outside the
/// range of [`Tick`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindowState {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// How far into its window that was.
    pub(crate) into: u64,
    /// The units that are used in that window.
    pub(crate) count: Cost,
}

impl FixedWindow {
    pub(crate) fn new(numbers: &Numbers) -> Self {
        Self {
            limit: numbers.limit,
            window: numbers.window.0,
            anchor: numbers.anchor,
            ceiling: numbers.limit + numbers.debt,
            start: numbers.limit - numbers.start,
        }
    }

    /// Returns the count at `now`: 0 if its window has ended.
    #[inline]
    fn count(&self, state: &FixedWindowState, now: Tick) -> Cost {
        if now.since(state.last).0 < self.window - state.into { state.count } else { 0 }
    }

    /// Returns the time from `now` to the end of the counted window.
    fn until_end(&self, state: &FixedWindowState, now: Tick) -> Ticks {
        let left = self.window - state.into;
        if now < state.last {
            Ticks(left).plus(state.last.since(now))
        } else {
            Ticks(left.saturating_sub(now.since(state.last).0))
        }
    }

    /// Sets a new count at `now`, in the same window or in a new one.
    #[inline]
    fn set(&self, state: &mut FixedWindowState, now: Tick, count: Cost, new: Cost) {
        if count == 0 {
            *state = self.starting(new, now);
        } else {
            let into = state.into + now.since(state.last).0;
            *state = FixedWindowState { last: state.last.max(now), into, count: new };
        }
    }

    pub(crate) fn write_numbers(&self, state: &FixedWindowState, out: &mut Vec<i128>) {
        out.extend([i128::from(state.last.0), state.into.into(), state.count.into()]);
    }

    pub(crate) fn read_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<FixedWindowState, DecodeError> {
        self.valid(FixedWindowState {
            last: numbers.tick("last change")?,
            into: numbers.next("position in its window")?,
            count: numbers.next("count")?,
        })
    }

    /// Returns an error if no decision can produce this state.
    fn valid(&self, state: FixedWindowState) -> Result<FixedWindowState, DecodeError> {
        let aligned = self.anchor == Anchor::Clock;
        if state.into >= self.window
            || (aligned && state.into != into_window(state.last, self.window))
        {
            return Err(DecodeError::Field { name: "position in its window" });
        }
        if state.count > self.ceiling {
            return Err(DecodeError::Field { name: "count" });
        }
        Ok(state)
    }

    fn starting(&self, count: Cost, now: Tick) -> FixedWindowState {
        let into = match self.anchor {
            Anchor::Clock => into_window(now, self.window),
            Anchor::FirstRequest => 0,
        };
        FixedWindowState { last: now, into, count }
    }
}

impl Algorithm for FixedWindow {
    type State = FixedWindowState;

    fn capacity(&self) -> Cost {
        self.limit
    }

    fn fresh(&self, now: Tick) -> FixedWindowState {
        self.starting(0, now)
    }

    fn initial(&self, now: Tick) -> FixedWindowState {
        self.starting(self.start, now)
    }

    #[inline]
    fn last_change(&self, state: &FixedWindowState) -> Tick {
        state.last
    }

    #[inline]
    fn clock_was_set_back(&self, state: &FixedWindowState, now: Tick) -> bool {
        state.count > 0 && state.last.since(now).0 > self.window
    }

    fn rebase(&self, state: &mut FixedWindowState, now: Tick) {
        *state = self.starting(state.count, now);
    }

    #[inline]
    fn allows(&self, state: &FixedWindowState, now: Tick, cost: Cost) -> bool {
        cost <= self.limit && self.count(state, now) <= self.limit - cost
    }

    #[inline]
    fn try_charge(&self, state: &mut FixedWindowState, now: Tick, cost: Cost) -> bool {
        let count = self.count(state, now);
        let is_allowed = cost <= self.limit && count <= self.limit - cost;
        if is_allowed && cost > 0 {
            self.set(state, now, count, count + cost);
        }
        is_allowed
    }

    fn fit(&self, state: &FixedWindowState, now: Tick, cost: Cost) -> Fit {
        if cost > self.limit {
            Fit::Never
        } else if self.allows(state, now, cost) {
            Fit::Now
        } else {
            Fit::After(self.until_end(state, now))
        }
    }

    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let alone = self.fit(state, now, cost);
        let count = self.count(state, now);
        let left = match count {
            0 => self.until_end(&self.fresh(now), now),
            _ => self.until_end(state, now),
        };
        let windows = Windows { left, window: self.window, limit: self.limit };
        let earliest = windows.fit(ahead, cost, self.limit.saturating_sub(count));
        FitBehind { latest: windows.latest(alone, ahead), earliest: alone.or_later(earliest) }
    }

    fn charge(&self, state: &mut FixedWindowState, now: Tick, amount: i128) -> u128 {
        if amount == 0 {
            return 0;
        }
        let count = self.count(state, now);
        let (new, dropped) = forced(count, self.ceiling, amount);
        self.set(state, now, count, new);
        dropped
    }

    fn receipt(&self, state: &FixedWindowState) -> Receipt {
        Receipt::Limit(ChargeRecord::of_counts(state.last, state.into, state.count, 0))
    }

    fn settle(
        &self,
        state: &mut FixedWindowState,
        now: Tick,
        change: i128,
        receipt: &Receipt,
    ) -> u128 {
        if self.clock_was_set_back(state, now) {
            self.rebase(state, now);
        }
        let is_of_this_window = |charge: &ChargeRecord| {
            let charged = charge.charged_at();
            charged <= state.last && state.last.since(charged).0 <= state.into
        };
        if change > 0 {
            return self.charge(state, now, change);
        }
        let asked = change.unsigned_abs();
        let charge = receipt.charge_record().filter(|charge| is_of_this_window(charge));
        let Some(charge) = charge.filter(|_| self.count(state, now) > 0) else { return asked };
        let returned = charge.returnable(asked);
        asked - returned + self.charge(state, now, 0_i128.saturating_sub_unsigned(returned))
    }

    fn facts(&self, state: &FixedWindowState, now: Tick, _: Option<Cost>) -> Facts {
        let count = self.count(state, now);
        Facts {
            limit: self.limit,
            remaining: self.limit.saturating_sub(count),
            reset_after: if count > 0 { self.until_end(state, now) } else { Ticks::ZERO },
            delay: Ticks::ZERO,
            scarcest: Some(0),
            quota: Some(Quota { amount: self.limit, window: Ticks(self.window) }),
        }
    }

    fn fresh_at(&self, state: &FixedWindowState) -> Option<Tick> {
        if state.count > 0 {
            state.last.after(Ticks(self.window - state.into))
        } else {
            Some(Tick(i64::MIN))
        }
    }

    fn used(&self, state: &FixedWindowState, now: Tick) -> Used {
        Used::whole(self.count(state, now))
    }

    fn with_used(&self, used: Used, now: Tick) -> FixedWindowState {
        self.starting(used.rounded_up().min(self.limit), now)
    }

    fn encode(&self, state: &FixedWindowState, out: &mut Vec<u8>) {
        out.push(Kind::FixedWindow.tag());
        codec::put_tick(out, state.last);
        codec::put(out, state.into);
        codec::put(out, state.count);
    }

    fn decode(&self, bytes: &[u8]) -> Result<FixedWindowState, DecodeError> {
        let mut reader = Reader(bytes);
        reader.tag(Kind::FixedWindow.tag())?;
        let state = FixedWindowState {
            last: reader.tick("last change")?,
            into: reader.number("position in its window")?,
            count: reader.number("count")?,
        };
        reader.end()?;
        self.valid(state)
    }
}

/// Consecutive windows, each of which allows at most a limit.
pub(crate) struct Windows {
    /// The rest of the current window.
    pub(crate) left: Ticks,
    pub(crate) window: u64,
    pub(crate) limit: Cost,
}

impl Windows {
    /// Returns a lower bound on the wait of a cost behind `ahead` units, if the current window has `room`.
    pub(crate) fn fit(&self, ahead: u128, cost: Cost, room: Cost) -> Fit {
        let beyond = ahead.saturating_add(cost.into()).saturating_sub(room.into());
        // All windows before the last needed one are full or have ended.
        match beyond.div_ceil(u128::from(self.limit)).checked_sub(1) {
            None => Fit::Now,
            Some(full) => Fit::After(self.left.plus(many(full, self.window))),
        }
    }

    /// Returns an upper bound on the wait: each request ahead, of at least one unit, is allowed within two windows
    /// after the one before it.
    pub(crate) fn latest(&self, alone: Fit, ahead: u128) -> Option<Ticks> {
        let each = many(ahead.saturating_mul(2), self.window);
        match alone {
            Fit::Now => Some(self.left.plus(each)).filter(|_| ahead > 0).or(Some(Ticks::ZERO)),
            Fit::After(wait) => Some(wait.plus(each)),
            Fit::Never => None,
        }
    }
}

/// Returns the length of a number of windows, or the longest duration if it overflows.
pub(crate) fn many(windows: u128, window: u64) -> Ticks {
    Ticks(saturate(windows.saturating_mul(window.into())))
}

/// Returns how far a time is into its aligned window.
pub(crate) fn into_window(now: Tick, window: u64) -> u64 {
    // In 128 bits, so that it does not depend on the longest valid window.
    let into = i128::from(now.0).rem_euclid(i128::from(window));
    u64::try_from(into).unwrap_or(0)
}

/// Returns the count after a forced charge or a refund, and how many units had no effect.
pub(crate) fn forced(count: Cost, ceiling: Cost, amount: i128) -> (Cost, u128) {
    let room = if amount < 0 { count } else { ceiling.saturating_sub(count) };
    let asked = amount.unsigned_abs();
    // At most the room is moved, so it fits.
    let moved = Cost::try_from(asked).unwrap_or(Cost::MAX).min(room);
    let new = if amount < 0 { count - moved } else { count + moved };
    (new, asked - u128::from(moved))
}
