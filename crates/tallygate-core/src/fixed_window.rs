//! Fixed window: at most L in each window, and every window starts from nothing.
//!
//! The cheapest to explain and to count with ("100 a calendar minute"). Its weakness is the
//! boundary: L at the end of one window and L at the start of the next are 2L in an instant. Windows
//! lie on multiples of W, or (anchored) each starts at the first request admitted after the last one
//! ended, which has the same weakness but no boundary that everybody knows.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::numbers::{Anchor, Kind, Numbers, saturate};
use crate::receipt::{Mark, Receipt};
use crate::{Cost, Tick, Ticks};

/// At most `limit` in each window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    limit: Cost,
    window: u64,
    anchor: Anchor,
    /// The most a count can reach in debt.
    ceiling: Cost,
    /// How much a new key has used already.
    start: Cost,
}

/// How much of a window is used.
///
/// The window is known by how far into it the last change was: absolute window starts would leave
/// the range of time at its ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindowState {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// How far into its window that was.
    pub(crate) into: u64,
    /// What was used in that window.
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

    /// The count that still holds at `now`: none once its window is over.
    #[inline]
    fn count(&self, state: &FixedWindowState, now: Tick) -> Cost {
        if now.since(state.last).0 < self.window - state.into { state.count } else { 0 }
    }

    /// The time from `now` to the end of the window that the count is of.
    fn until_end(&self, state: &FixedWindowState, now: Tick) -> Ticks {
        let left = self.window - state.into;
        if now < state.last {
            Ticks(left).plus(state.last.since(now))
        } else {
            Ticks(left.saturating_sub(now.since(state.last).0))
        }
    }

    /// Changes the count at `now`, in its window or in a new one.
    #[inline]
    fn set(&self, state: &mut FixedWindowState, now: Tick, count: Cost, new: Cost) {
        if count == 0 {
            *state = self.starting(new, now);
        } else {
            let into = state.into + now.since(state.last).0;
            *state = FixedWindowState { last: state.last.max(now), into, count: new };
        }
    }

    pub(crate) fn put_numbers(&self, state: &FixedWindowState, out: &mut Vec<i128>) {
        out.extend([i128::from(state.last.0), state.into.into(), state.count.into()]);
    }

    pub(crate) fn take_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<FixedWindowState, DecodeError> {
        self.valid(FixedWindowState {
            last: numbers.tick("last change")?,
            into: numbers.next("place in its window")?,
            count: numbers.next("count")?,
        })
    }

    /// A state that came from outside, if it is one that a decision can have left.
    fn valid(&self, state: FixedWindowState) -> Result<FixedWindowState, DecodeError> {
        let aligned = self.anchor == Anchor::Clock;
        if state.into >= self.window
            || (aligned && state.into != into_window(state.last, self.window))
        {
            return Err(DecodeError::Field { name: "place in its window" });
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

    fn first(&self, now: Tick) -> FixedWindowState {
        self.starting(self.start, now)
    }

    #[inline]
    fn last_change(&self, state: &FixedWindowState) -> Tick {
        state.last
    }

    #[inline]
    fn set_back(&self, state: &FixedWindowState, now: Tick) -> bool {
        state.count > 0 && state.last.since(now).0 > self.window
    }

    fn rebase(&self, state: &mut FixedWindowState, now: Tick) {
        *state = self.starting(state.count, now);
    }

    #[inline]
    fn admits(&self, state: &FixedWindowState, now: Tick, cost: Cost) -> bool {
        cost <= self.limit && self.count(state, now) <= self.limit - cost
    }

    #[inline]
    fn admit(&self, state: &mut FixedWindowState, now: Tick, cost: Cost) -> bool {
        let count = self.count(state, now);
        let admits = cost <= self.limit && count <= self.limit - cost;
        if admits && cost > 0 {
            self.set(state, now, count, count + cost);
        }
        admits
    }

    fn fit(&self, state: &FixedWindowState, now: Tick, cost: Cost) -> Fit {
        if cost > self.limit {
            Fit::Never
        } else if self.admits(state, now, cost) {
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
        Receipt::Limit(Mark::at(state.last))
    }

    fn settle(
        &self,
        state: &mut FixedWindowState,
        now: Tick,
        change: i128,
        receipt: &Receipt,
    ) -> u128 {
        if self.set_back(state, now) {
            self.rebase(state, now);
        }
        let is_of_this_window = |mark: &Mark| {
            let charged = mark.charged_at();
            charged <= state.last && state.last.since(charged).0 <= state.into
        };
        if change > 0 {
            return self.charge(state, now, change);
        }
        let asked = change.unsigned_abs();
        let mark = receipt.mark().filter(|mark| is_of_this_window(mark));
        let Some(mark) = mark.filter(|_| self.count(state, now) > 0) else { return asked };
        let returned = mark.returnable(asked);
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
            into: reader.number("place in its window")?,
            count: reader.number("count")?,
        };
        reader.end()?;
        self.valid(state)
    }
}

/// Windows that follow each other without a gap, of which each admits at most a limit.
pub(crate) struct Windows {
    /// The rest of the current one.
    pub(crate) left: Ticks,
    pub(crate) window: u64,
    pub(crate) limit: Cost,
}

impl Windows {
    /// A lower bound for a cost behind units ahead, where the current window has some room.
    pub(crate) fn fit(&self, ahead: u128, cost: Cost, room: Cost) -> Fit {
        let beyond = ahead.saturating_add(cost.into()).saturating_sub(room.into());
        // All windows before the last that is needed are full, or over.
        match beyond.div_ceil(u128::from(self.limit)).checked_sub(1) {
            None => Fit::Now,
            Some(full) => Fit::After(self.left.plus(many(full, self.window))),
        }
    }

    /// An upper bound: each request, of at least one unit, is admitted within two windows of the one before.
    pub(crate) fn latest(&self, alone: Fit, ahead: u128) -> Option<Ticks> {
        let each = many(ahead.saturating_mul(2), self.window);
        match alone {
            Fit::Now => Some(self.left.plus(each)).filter(|_| ahead > 0).or(Some(Ticks::ZERO)),
            Fit::After(wait) => Some(wait.plus(each)),
            Fit::Never => None,
        }
    }
}

/// So many windows, or the longest time there is.
pub(crate) fn many(windows: u128, window: u64) -> Ticks {
    Ticks(saturate(windows.saturating_mul(window.into())))
}

/// How far into its aligned window an instant lies.
pub(crate) fn into_window(now: Tick, window: u64) -> u64 {
    // Not in i64: a window may be as long as 2⁶¹, but nothing here should depend on that.
    let into = i128::from(now.0).rem_euclid(i128::from(window));
    u64::try_from(into).unwrap_or(0)
}

/// A count after a charge into debt or a refund, and how much of it had no effect.
pub(crate) fn forced(count: Cost, ceiling: Cost, amount: i128) -> (Cost, u128) {
    let room = if amount < 0 { count } else { ceiling.saturating_sub(count) };
    let asked = amount.unsigned_abs();
    // What is moved is at most the room, so it fits.
    let moved = Cost::try_from(asked).unwrap_or(Cost::MAX).min(room);
    let new = if amount < 0 { count - moved } else { count + moved };
    (new, asked - u128::from(moved))
}
