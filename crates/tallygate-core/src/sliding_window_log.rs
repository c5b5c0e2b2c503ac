//! Sliding window log: remembers every allowed request until it is as old as the window.
//!
//! It is exact: it allows at most L units in every window, wherever the window starts, and denies a request only if
//! L is reached. It needs memory: an entry per tick with an allowed request, so at most min(L, W) entries (and as
//! many again for debt). A limit that could need more than [`MAX_LOG_ENTRIES`] is a [`PolicyError`].
//!
//! [`MAX_LOG_ENTRIES`]: crate::MAX_LOG_ENTRIES
//! [`PolicyError`]: crate::PolicyError

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::fixed_window::{Windows, forced, many};
use crate::numbers::{Kind, Numbers, saturate};
use crate::receipt::{ChargeRecord, Receipt};
use crate::{Cost, Quota, Tick, Ticks};

/// A sliding window log that allows at most `limit` units in every window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowLog {
    limit: Cost,
    window: u64,
    /// The most units that can be used, with all debt.
    ceiling: Cost,
    /// The units that a new key has used.
    start: Cost,
}

/// The state of a sliding window log: the times and costs of allowed requests.
///
/// Entries hold running totals instead of costs. So a binary search finds how much is used, and when enough of it
/// will have expired.
#[derive(Clone, Debug)]
pub struct SlidingWindowLogState {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// The running total before the first entry. Totals wrap around; only their differences matter.
    before: u64,
    /// Ticks in ascending order, each with the running total after it.
    pub(crate) entries: VecDeque<(Tick, u64)>,
}

impl SlidingWindowLog {
    pub(crate) fn new(numbers: &Numbers) -> Self {
        Self {
            limit: numbers.limit,
            window: numbers.window.0,
            ceiling: numbers.limit + numbers.debt,
            start: numbers.limit - numbers.start,
        }
    }

    /// Returns how many entries have expired by `now`. For a late caller, no entry has expired since the last
    /// change.
    #[inline]
    pub(crate) fn expired(&self, state: &SlidingWindowLogState, now: Tick) -> usize {
        let is_expired = |index: usize| {
            state.entries.get(index).is_some_and(|&(tick, _)| now.since(tick).0 >= self.window)
        };
        // Usually no or few entries have expired: double the distance from the front, then search between.
        let mut reach = 0;
        while is_expired(reach) {
            reach = 2 * reach + 1;
        }
        let (mut low, mut high) = (reach / 2, reach);
        while low < high {
            let middle = low.midpoint(high);
            if is_expired(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// Returns the units that are used at `now`.
    #[inline]
    fn count(&self, state: &SlidingWindowLogState, now: Tick) -> Cost {
        state.total().wrapping_sub(state.total_before(self.expired(state, now)))
    }

    /// Returns how late a caller is: how far `now` is before the last change, if that still matters.
    #[inline]
    fn lateness(state: &SlidingWindowLogState, now: Tick) -> Ticks {
        if state.entries.is_empty() { Ticks::ZERO } else { state.last.since(now) }
    }

    /// Returns the time from `now` until an entry expires. The entry is younger than W.
    fn time_to_expiry(&self, entry: Tick, now: Tick) -> Ticks {
        if now < entry {
            Ticks(self.window).plus(entry.since(now))
        } else {
            Ticks(self.window - now.since(entry).0)
        }
    }

    pub(crate) fn write_numbers(&self, state: &SlidingWindowLogState, out: &mut Vec<i128>) {
        out.extend([i128::from(state.last.0), 0, state.entries.len() as i128]);
        for &(tick, total) in &state.entries {
            out.extend([i128::from(tick.0), total.wrapping_sub(state.before).into()]);
        }
    }

    pub(crate) fn read_numbers(
        &self,
        numbers: &mut NumberReader<'_>,
    ) -> Result<SlidingWindowLogState, DecodeError> {
        let (last, before) = (numbers.tick("last change")?, numbers.next("total before")?);
        let count: u64 = numbers.next("number of entries")?;
        let mut entries = VecDeque::new();
        let (mut earlier, mut sum) = (None, before);
        for _ in 0..count {
            let (tick, total) = (numbers.tick("entry's age")?, numbers.next("entry's cost")?);
            if earlier >= Some(tick) || tick > last {
                return Err(DecodeError::Field { name: "entry's age" });
            }
            if total <= sum || total - before > self.ceiling {
                return Err(DecodeError::Field { name: "entry's cost" });
            }
            entries.push_back((tick, total));
            (earlier, sum) = (Some(tick), total);
        }
        Ok(SlidingWindowLogState { last, before, entries })
    }

    fn starting(count: Cost, now: Tick) -> SlidingWindowLogState {
        let entries = (count > 0).then_some((now, count)).into_iter().collect();
        SlidingWindowLogState { last: now, before: 0, entries }
    }
}

impl SlidingWindowLogState {
    /// Returns the running total after the last entry.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total_before(self.entries.len())
    }

    /// Returns the running total before the entry with this index.
    #[inline]
    pub(crate) fn total_before(&self, index: usize) -> u64 {
        index.checked_sub(1).map_or(self.before, |index| self.entries[index].1)
    }

    /// Returns the time of the entry with whose expiry `excess` units have expired. It skips `expired` entries.
    pub(crate) fn expiring(&self, expired: usize, excess: Cost) -> Option<Tick> {
        let enough = self.total_before(expired).wrapping_sub(self.before) + excess;
        let entry =
            self.entries.partition_point(|&(_, total)| total.wrapping_sub(self.before) < enough);
        self.entries.get(entry).map(|&(tick, _)| tick)
    }

    /// Drops the expired entries, and sets the time of the last change.
    fn move_to(&mut self, now: Tick, expired: usize) {
        self.before = self.total_before(expired);
        // In one call, because a million entries can expire with one request.
        self.entries.drain(..expired);
        self.last = if self.entries.is_empty() { now } else { self.last.max(now) };
    }

    fn add(&mut self, now: Tick, cost: Cost) {
        let total = self.total().wrapping_add(cost);
        match self.entries.back_mut() {
            Some(newest) if newest.0 == now => newest.1 = total,
            _ => self.entries.push_back((now, total)),
        }
    }

    /// Removes units from the entry of a tick, at most as many as it has. Returns how many were removed.
    fn take_from(&mut self, tick: Tick, asked: u128) -> Cost {
        let Ok(index) = self.entries.binary_search_by_key(&tick, |&(tick, _)| tick) else {
            return 0;
        };
        let cost = self.entries[index].1.wrapping_sub(self.total_before(index));
        let taken = Cost::try_from(asked).unwrap_or(Cost::MAX).min(cost);
        // Only differences of totals matter, so change the shorter side of the log.
        if index < self.entries.len() / 2 {
            self.before = self.before.wrapping_add(taken);
            for (_, total) in self.entries.range_mut(..index) {
                *total = total.wrapping_add(taken);
            }
        } else {
            for (_, total) in self.entries.range_mut(index..) {
                *total = total.wrapping_sub(taken);
            }
        }
        if taken == cost {
            self.entries.remove(index);
        }
        taken
    }

    /// Removes units from the newest entries. The last affected entry may keep a part of its units.
    fn refund(&mut self, cost: Cost) {
        let total = self.total().wrapping_sub(cost);
        let kept = total.wrapping_sub(self.before);
        while let Some(index) = self.entries.len().checked_sub(1) {
            if self.total_before(index).wrapping_sub(self.before) < kept {
                self.entries[index].1 = total;
                return;
            }
            self.entries.pop_back();
        }
    }
}

impl Algorithm for SlidingWindowLog {
    type State = SlidingWindowLogState;

    fn capacity(&self) -> Cost {
        self.limit
    }

    fn fresh(&self, now: Tick) -> SlidingWindowLogState {
        Self::starting(0, now)
    }

    fn initial(&self, now: Tick) -> SlidingWindowLogState {
        Self::starting(self.start, now)
    }

    #[inline]
    fn last_change(&self, state: &SlidingWindowLogState) -> Tick {
        state.last
    }

    #[inline]
    fn clock_was_set_back(&self, state: &SlidingWindowLogState, now: Tick) -> bool {
        Self::lateness(state, now).0 > self.window
    }

    /// Moves the entries back in time. Each entry keeps its age.
    fn rebase(&self, state: &mut SlidingWindowLogState, now: Tick) {
        let mut rebased = Self::starting(0, now);
        let mut total = state.total_before(self.expired(state, state.last));
        for &(tick, after) in state.entries.range(self.expired(state, state.last)..) {
            // Entries are younger than W. At the first ticks of the range, an entry may become younger.
            let tick = Tick(now.0.saturating_sub_unsigned(state.last.since(tick).0));
            rebased.add(tick, after.wrapping_sub(total));
            total = after;
        }
        *state = rebased;
    }

    #[inline]
    fn allows(&self, state: &SlidingWindowLogState, now: Tick, cost: Cost) -> bool {
        cost <= self.limit && self.count(state, now) <= self.limit - cost
    }

    #[inline]
    fn try_charge(&self, state: &mut SlidingWindowLogState, now: Tick, cost: Cost) -> bool {
        let expired = self.expired(state, now);
        let count = state.total().wrapping_sub(state.total_before(expired));
        let is_allowed = cost <= self.limit && count <= self.limit - cost;
        if is_allowed && cost > 0 {
            state.move_to(now, expired);
            state.add(state.last, cost);
        }
        is_allowed
    }

    fn fit(&self, state: &SlidingWindowLogState, now: Tick, cost: Cost) -> Fit {
        let Some(most) = self.limit.checked_sub(cost) else { return Fit::Never };
        let excess = self.count(state, now).saturating_sub(most);
        if excess == 0 {
            return Fit::Now;
        }
        match state.expiring(self.expired(state, now), excess) {
            Some(entry) => Fit::After(self.time_to_expiry(entry, now)),
            None => Fit::Now,
        }
    }

    /// The first units fit when enough units have expired, and each further L units a window later.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let windows = Windows { left: Ticks(self.window), window: self.window, limit: self.limit };
        let latest = windows.latest(self.fit(state, now, cost), ahead);
        if cost > self.limit {
            return FitBehind { earliest: Fit::Never, latest };
        }
        let limit = u128::from(self.limit);
        let units = ahead.saturating_add(cost.into());
        let full = units.saturating_sub(1) / limit;
        // It is at most the limit, so it fits 64 bits.
        let first = saturate(units - full * limit);
        let earliest = match (self.fit(state, now, first), many(full, self.window)) {
            (Fit::Now, Ticks::ZERO) => Fit::Now,
            (Fit::Now, wait) => Fit::After(wait),
            (Fit::After(wait), more) => Fit::After(wait.plus(more)),
            (Fit::Never, _) => Fit::Never,
        };
        FitBehind { earliest, latest }
    }

    fn charge(&self, state: &mut SlidingWindowLogState, now: Tick, amount: i128) -> u128 {
        if amount == 0 {
            return 0;
        }
        state.move_to(now, self.expired(state, now));
        let count = state.total().wrapping_sub(state.before);
        let (new, dropped) = forced(count, self.ceiling, amount);
        if new > count {
            state.add(state.last, new - count);
        } else {
            state.refund(count - new);
        }
        dropped
    }

    fn receipt(&self, state: &SlidingWindowLogState) -> Receipt {
        Receipt::Limit(ChargeRecord::at(state.last))
    }

    /// Returns units from the entry that they were charged to, if it has not expired.
    fn settle(
        &self,
        state: &mut SlidingWindowLogState,
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
        let charge =
            receipt.charge_record().filter(|charge| charge.charged_at() <= now.max(state.last));
        let Some(charge) = charge else { return asked };
        let most = charge.returnable(asked);
        if most == 0 {
            return asked;
        }
        state.move_to(now, self.expired(state, now));
        asked - u128::from(state.take_from(charge.charged_at(), most))
    }

    fn facts(&self, state: &SlidingWindowLogState, now: Tick, _: Option<Cost>) -> Facts {
        let expired = self.expired(state, now);
        let used = state.total().wrapping_sub(state.total_before(expired));
        let newest = state.entries.back().filter(|_| expired < state.entries.len());
        Facts {
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            reset_after: newest.map_or(Ticks::ZERO, |&(tick, _)| self.time_to_expiry(tick, now)),
            delay: Ticks::ZERO,
            scarcest: Some(0),
            quota: Some(Quota { amount: self.limit, window: Ticks(self.window) }),
        }
    }

    fn fresh_at(&self, state: &SlidingWindowLogState) -> Option<Tick> {
        match state.entries.back() {
            Some(&(newest, _)) => newest.after(Ticks(self.window)),
            None => Some(Tick(i64::MIN)),
        }
    }

    fn used(&self, state: &SlidingWindowLogState, now: Tick) -> Used {
        Used::whole(self.count(state, now))
    }

    fn with_used(&self, used: Used, now: Tick) -> SlidingWindowLogState {
        Self::starting(used.rounded_up().min(self.limit), now)
    }

    fn encode(&self, state: &SlidingWindowLogState, out: &mut Vec<u8>) {
        out.push(Kind::SlidingWindowLog.tag());
        codec::put_tick(out, state.last);
        codec::put(out, state.entries.len() as u64);
        let (mut later, mut total) = (state.last, state.total());
        // From the newest to the oldest entry, because ages and costs are small numbers.
        for index in (0..state.entries.len()).rev() {
            let (tick, before) = (state.entries[index].0, state.total_before(index));
            codec::put(out, later.since(tick).0);
            codec::put(out, total.wrapping_sub(before));
            (later, total) = (tick, before);
        }
    }

    fn decode(&self, bytes: &[u8]) -> Result<SlidingWindowLogState, DecodeError> {
        let mut reader = Reader(bytes);
        reader.tag(Kind::SlidingWindowLog.tag())?;
        let last = reader.tick("last change")?;
        let count: u64 = reader.number("number of entries")?;
        let mut entries = VecDeque::new();
        let (mut later, mut total) = (last, 0_u64);
        for index in 0..count {
            let age: u64 = reader.number("entry's age")?;
            let cost: u64 = reader.number("entry's cost")?;
            let tick = Tick(
                later
                    .0
                    .checked_sub_unsigned(age)
                    .ok_or(DecodeError::Field { name: "entry's age" })?,
            );
            if index > 0 && age == 0 {
                return Err(DecodeError::Field { name: "entry's age" });
            }
            if cost == 0 || total.checked_add(cost).is_none_or(|sum| sum > self.ceiling) {
                return Err(DecodeError::Field { name: "entry's cost" });
            }
            // Totals count from the oldest entry, which is not known yet. So they count down from 0.
            entries.push_front((tick, 0_u64.wrapping_sub(total)));
            total += cost;
            later = tick;
        }
        reader.end()?;
        Ok(SlidingWindowLogState { last, before: 0_u64.wrapping_sub(total), entries })
    }
}
