//! Sliding window counter: two aligned windows. The count of the previous one is weighted by how much of it still lies
//! within the last W.
//!
//! It is nearly as smooth as the log, in constant memory. It assumes that the requests of the previous window came
//! evenly. If they came at its end, up to 2L units can be allowed within one sliding window. If they came at its start,
//! requests are denied that the log would allow.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::fixed_window::{Windows, forced, into_window};
use crate::numbers::{Kind, Numbers, saturate};
use crate::receipt::{ChargeRecord, Receipt};
use crate::{Cost, Quota, Tick, Ticks};

/// A sliding window counter that allows at most `limit` units, by an estimate of the units in the last window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowCounter {
    limit: Cost,
    window: u64,
    /// The largest count, with all debt.
    ceiling: Cost,
    /// The units that a new key has used.
    start: Cost,
}

/// The state of a sliding window counter: the counts of two neighboring windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowCounterState {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// How far into its aligned window that was.
    pub(crate) into: u64,
    /// The units that are used in that window.
    pub(crate) count: Cost,
    /// The units that are used in the window before it.
    pub(crate) previous: Cost,
}

impl SlidingWindowCounter {
    pub(crate) fn new(numbers: &Numbers) -> Self {
        Self {
            limit: numbers.limit,
            window: numbers.window.0,
            ceiling: numbers.limit + numbers.debt,
            start: numbers.limit - numbers.start,
        }
    }

    /// Returns the state at `now`, after windows have ended.
    ///
    /// If both windows have ended, `into` is 0 and not the real position, which would cost a division.
    #[inline]
    fn at(&self, state: &SlidingWindowCounterState, now: Tick) -> SlidingWindowCounterState {
        let elapsed = now.since(state.last);
        let last = state.last.max(now);
        // The window is at most 2⁶¹, so only the elapsed time can be large.
        let into = state.into.saturating_add(elapsed.0);
        if into < self.window {
            SlidingWindowCounterState { last, into, ..*state }
        } else if into < 2 * self.window {
            let into = into - self.window;
            SlidingWindowCounterState { last, into, count: 0, previous: state.count }
        } else {
            SlidingWindowCounterState { last, into: 0, count: 0, previous: 0 }
        }
    }

    /// Returns how late a caller is: how far `now` is before the last change, if that still matters.
    #[inline]
    fn lateness(state: &SlidingWindowCounterState, now: Tick) -> Ticks {
        if state.is_fresh() { Ticks::ZERO } else { state.last.since(now) }
    }

    /// Returns whether a cost fits at the time of the state.
    #[inline]
    fn has_room(&self, state: &SlidingWindowCounterState, cost: Cost) -> bool {
        let Some(room) = self.limit.checked_sub(cost).and_then(|n| n.checked_sub(state.count))
        else {
            return false;
        };
        // floor(previous · (W − e) / W) ≤ room, without the division.
        u128::from(state.previous) * u128::from(self.window - state.into)
            < (u128::from(room) + 1) * u128::from(self.window)
    }

    /// Returns the estimate at the time of the state: floor(previous · (W − e) / W) + count.
    fn estimate(&self, state: &SlidingWindowCounterState) -> Cost {
        let window = u128::from(self.window);
        let weighted = u128::from(state.previous) * u128::from(self.window - state.into) / window;
        state.count.saturating_add(saturate(weighted))
    }

    /// Returns how far into the window the weighted `previous` count is at most `room`; W if this is only in the next
    /// window.
    fn position_where_it_fits(&self, previous: Cost, room: Cost) -> u64 {
        // floor(previous · (W − e) / W) ≤ room, solved for the least e.
        let below = (u128::from(room) + 1) * u128::from(self.window) - 1;
        let weight = below.checked_div(u128::from(previous)).map_or(u64::MAX, saturate);
        self.window.saturating_sub(weight)
    }

    pub(crate) fn write_numbers(&self, state: &SlidingWindowCounterState, out: &mut Vec<i128>) {
        out.extend([i128::from(state.last.0), state.count.into(), state.previous.into()]);
    }

    pub(crate) fn read_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<SlidingWindowCounterState, DecodeError> {
        let last = numbers.tick("last change")?;
        self.valid(last, numbers.next("count")?, numbers.next("count")?)
    }

    /// Returns an error if no decision can produce this state.
    fn valid(
        &self,
        last: Tick,
        count: Cost,
        previous: Cost,
    ) -> Result<SlidingWindowCounterState, DecodeError> {
        if count > self.ceiling || previous > self.ceiling {
            return Err(DecodeError::Field { name: "count" });
        }
        Ok(SlidingWindowCounterState { previous, ..self.starting(count, last) })
    }

    fn starting(&self, count: Cost, now: Tick) -> SlidingWindowCounterState {
        let into = into_window(now, self.window);
        SlidingWindowCounterState { last: now, into, count, previous: 0 }
    }
}

impl SlidingWindowCounterState {
    #[inline]
    const fn is_fresh(&self) -> bool {
        self.count == 0 && self.previous == 0
    }
}

impl Algorithm for SlidingWindowCounter {
    type State = SlidingWindowCounterState;

    fn capacity(&self) -> Cost {
        self.limit
    }

    fn fresh(&self, now: Tick) -> SlidingWindowCounterState {
        self.starting(0, now)
    }

    fn initial(&self, now: Tick) -> SlidingWindowCounterState {
        self.starting(self.start, now)
    }

    #[inline]
    fn last_change(&self, state: &SlidingWindowCounterState) -> Tick {
        state.last
    }

    #[inline]
    fn clock_was_set_back(&self, state: &SlidingWindowCounterState, now: Tick) -> bool {
        Self::lateness(state, now).0 > self.window
    }

    fn rebase(&self, state: &mut SlidingWindowCounterState, now: Tick) {
        *state = self.starting(self.estimate(state).min(self.ceiling), now);
    }

    #[inline]
    fn allows(&self, state: &SlidingWindowCounterState, now: Tick, cost: Cost) -> bool {
        self.has_room(&self.at(state, now), cost)
    }

    #[inline]
    fn try_charge(&self, state: &mut SlidingWindowCounterState, now: Tick, cost: Cost) -> bool {
        let mut new = self.at(state, now);
        let is_allowed = self.has_room(&new, cost);
        if is_allowed && cost > 0 {
            if new.is_fresh() {
                new = self.fresh(now);
            }
            new.count += cost;
            *state = new;
        }
        is_allowed
    }

    fn fit(&self, state: &SlidingWindowCounterState, now: Tick, cost: Cost) -> Fit {
        let Some(most) = self.limit.checked_sub(cost) else { return Fit::Never };
        if self.allows(state, now, cost) {
            return Fit::Now;
        }
        let lateness = Self::lateness(state, now);
        let state = self.at(state, now);
        let at = match most.checked_sub(state.count) {
            Some(room) => self.position_where_it_fits(state.previous, room),
            None => self.window + self.position_where_it_fits(state.count, most),
        };
        Fit::After(lateness.plus(Ticks(at.saturating_sub(state.into))))
    }

    /// No aligned window allows more than the limit, whatever the estimate is.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let alone = self.fit(state, now, cost);
        let lateness = Self::lateness(state, now);
        let state = self.at(state, now);
        let into = if state.is_fresh() { into_window(now, self.window) } else { state.into };
        let left = lateness.plus(Ticks(self.window - into));
        let windows = Windows { left, window: self.window, limit: self.limit };
        let earliest = windows.fit(ahead, cost, self.limit.saturating_sub(state.count));
        FitBehind { latest: windows.latest(alone, ahead), earliest: alone.or_later(earliest) }
    }

    fn charge(&self, state: &mut SlidingWindowCounterState, now: Tick, amount: i128) -> u128 {
        if amount == 0 {
            return 0;
        }
        let mut new = self.at(state, now);
        if new.is_fresh() {
            new = self.fresh(now);
        }
        let dropped = if amount < 0 {
            // Refund from the current window first, then from the previous one.
            let (count, rest) = forced(new.count, self.ceiling, amount);
            let (previous, dropped) =
                forced(new.previous, self.ceiling, 0_i128.saturating_sub_unsigned(rest));
            (new.count, new.previous) = (count, previous);
            dropped
        } else {
            let (count, dropped) = forced(new.count, self.ceiling, amount);
            new.count = count;
            dropped
        };
        *state = new;
        dropped
    }

    fn receipt(&self, state: &SlidingWindowCounterState) -> Receipt {
        let SlidingWindowCounterState { last, into, count, previous } = *state;
        Receipt::Limit(ChargeRecord::of_counts(last, into, count, previous))
    }

    /// Returns units to the window that they were charged in, while that window counts.
    fn settle(
        &self,
        state: &mut SlidingWindowCounterState,
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
        let asked = change.unsigned_abs();
        let mut new = self.at(state, now);
        let charge = receipt.charge_record().filter(|charge| charge.charged_at() <= new.last);
        let Some(charge) = charge.filter(|_| !new.is_fresh()) else { return asked };
        let ago = new.last.since(charge.charged_at()).0;
        let most = charge.returnable(asked);
        let return_units = |count: &mut Cost| {
            let (left, dropped) =
                forced(*count, self.ceiling, 0_i128.saturating_sub_unsigned(most));
            *count = left;
            most - dropped
        };
        let returned = if ago <= new.into {
            return_units(&mut new.count)
        } else if ago <= new.into + self.window {
            return_units(&mut new.previous)
        } else {
            0
        };
        if returned > 0 {
            *state = new;
        }
        asked - returned
    }

    fn facts(&self, state: &SlidingWindowCounterState, now: Tick, _: Option<Cost>) -> Facts {
        let lateness = Self::lateness(state, now);
        let state = self.at(state, now);
        let left = self.window - state.into;
        let reset_after = match (state.count, state.previous) {
            (0, 0) => Ticks::ZERO,
            (0, _) => lateness.plus(Ticks(left)),
            _ => lateness.plus(Ticks(left + self.window)),
        };
        Facts {
            limit: self.limit,
            remaining: self.limit.saturating_sub(self.estimate(&state)),
            reset_after,
            delay: Ticks::ZERO,
            scarcest: Some(0),
            quota: Some(Quota { amount: self.limit, window: Ticks(self.window) }),
        }
    }

    fn fresh_at(&self, state: &SlidingWindowCounterState) -> Option<Tick> {
        if state.is_fresh() {
            return Some(Tick(i64::MIN));
        }
        state.last.after(self.facts(state, state.last, None).reset_after)
    }

    fn used(&self, state: &SlidingWindowCounterState, now: Tick) -> Used {
        Used::whole(self.estimate(&self.at(state, now)))
    }

    fn with_used(&self, used: Used, now: Tick) -> SlidingWindowCounterState {
        self.starting(used.rounded_up().min(self.limit), now)
    }

    fn encode(&self, state: &SlidingWindowCounterState, out: &mut Vec<u8>) {
        out.push(Kind::SlidingWindowCounter.tag());
        codec::put_tick(out, state.last);
        codec::put(out, state.count);
        codec::put(out, state.previous);
    }

    fn decode(&self, bytes: &[u8]) -> Result<SlidingWindowCounterState, DecodeError> {
        let mut reader = Reader(bytes);
        reader.tag(Kind::SlidingWindowCounter.tag())?;
        let last = reader.tick("last change")?;
        let count = reader.number("count")?;
        let previous = reader.number("previous count")?;
        reader.end()?;
        self.valid(last, count, previous)
    }
}
