//! Sliding window log: every admitted request remembered until it is W old.
//!
//! Exact: at most L in every window, wherever it starts, and never a refusal that was not due. It
//! pays with memory, an entry for each distinct tick with an admission, so at most min(L, W) of them
//! (and as many again for debt); limits that could need more than [`MAX_LOG_ENTRIES`] are refused.

use alloc::collections::VecDeque;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::NumberReader;
use crate::fixed_window::{Windows, forced, many};
use crate::numbers::{Kind, Numbers, saturate};
use crate::receipt::{Mark, Receipt};
use crate::{Cost, Tick, Ticks};

/// At most `limit` in every window of this length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindowLog {
    limit: Cost,
    window: u64,
    /// The most that can be used in debt.
    ceiling: Cost,
    /// How much a new key has used already.
    start: Cost,
}

/// When how much was admitted.
///
/// Entries hold running totals instead of costs, so that what is used, and when enough of it will
/// have left, are binary searches however long the log is.
#[derive(Clone, Debug)]
pub struct SlidingWindowLogState {
    /// The time of the last change.
    pub(crate) last: Tick,
    /// The running total before the first entry. Totals wrap round: only differences count.
    before: u64,
    /// Ticks in rising order, each with the running total after it.
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

    /// How many entries have left by `now`. A late `now` is before every entry's leaving.
    #[inline]
    pub(crate) fn expired(&self, state: &SlidingWindowLogState, now: Tick) -> usize {
        let gone = |index: usize| {
            state.entries.get(index).is_some_and(|&(tick, _)| now.since(tick).0 >= self.window)
        };
        // Mostly none or few: look at the first, then twice as far each time, then between.
        let mut reach = 0;
        while gone(reach) {
            reach = 2 * reach + 1;
        }
        let (mut low, mut high) = (reach / 2, reach);
        while low < high {
            let middle = low.midpoint(high);
            if gone(middle) { low = middle + 1 } else { high = middle }
        }
        low
    }

    /// What is used at `now`.
    #[inline]
    fn count(&self, state: &SlidingWindowLogState, now: Tick) -> Cost {
        state.total().wrapping_sub(state.total_before(self.expired(state, now)))
    }

    /// How far `now` lies before the time the state is taken at.
    #[inline]
    fn behind(state: &SlidingWindowLogState, now: Tick) -> Ticks {
        if state.entries.is_empty() { Ticks::ZERO } else { state.last.since(now) }
    }

    /// The time from `now` until an entry leaves. Its age is below W.
    fn until_it_leaves(&self, entry: Tick, now: Tick) -> Ticks {
        if now < entry {
            Ticks(self.window).plus(entry.since(now))
        } else {
            Ticks(self.window - now.since(entry).0)
        }
    }

    pub(crate) fn put_numbers(&self, state: &SlidingWindowLogState, out: &mut Vec<i128>) {
        out.extend([i128::from(state.last.0), 0, state.entries.len() as i128]);
        for &(tick, total) in &state.entries {
            out.extend([i128::from(tick.0), total.wrapping_sub(state.before).into()]);
        }
    }

    pub(crate) fn take_numbers(
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
    /// The running total after the last entry.
    #[inline]
    pub(crate) fn total(&self) -> u64 {
        self.total_before(self.entries.len())
    }

    /// The running total before the entry of this index.
    #[inline]
    pub(crate) fn total_before(&self, index: usize) -> u64 {
        index.checked_sub(1).map_or(self.before, |index| self.entries[index].1)
    }

    /// The entry with which `excess` will have left, of those that have not expired.
    pub(crate) fn leaving(&self, expired: usize, excess: Cost) -> Option<Tick> {
        let enough = self.total_before(expired).wrapping_sub(self.before) + excess;
        let entry =
            self.entries.partition_point(|&(_, total)| total.wrapping_sub(self.before) < enough);
        self.entries.get(entry).map(|&(tick, _)| tick)
    }

    /// Drops what has expired by `now`, the time of a change.
    fn move_to(&mut self, now: Tick, expired: usize) {
        self.before = self.total_before(expired);
        // At once: a million entries can leave with one request.
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

    /// Takes units from the entry of a tick, at most as many as it has. Returns how many.
    fn take_from(&mut self, tick: Tick, asked: u128) -> Cost {
        let Ok(index) = self.entries.binary_search_by_key(&tick, |&(tick, _)| tick) else {
            return 0;
        };
        let cost = self.entries[index].1.wrapping_sub(self.total_before(index));
        let taken = Cost::try_from(asked).unwrap_or(Cost::MAX).min(cost);
        // Totals only count by their differences, so the shorter side of the log is the one to change.
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

    /// Gives up the newest entries, the last of them perhaps in part.
    fn give_back(&mut self, cost: Cost) {
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

    fn first(&self, now: Tick) -> SlidingWindowLogState {
        Self::starting(self.start, now)
    }

    #[inline]
    fn last_change(&self, state: &SlidingWindowLogState) -> Tick {
        state.last
    }

    #[inline]
    fn set_back(&self, state: &SlidingWindowLogState, now: Tick) -> bool {
        Self::behind(state, now).0 > self.window
    }

    /// Every entry keeps its age.
    fn rebase(&self, state: &mut SlidingWindowLogState, now: Tick) {
        let mut rebased = Self::starting(0, now);
        let mut total = state.total_before(self.expired(state, state.last));
        for &(tick, after) in state.entries.range(self.expired(state, state.last)..) {
            // Ages are below W; at the very start of time an entry may lose some of its own.
            let tick = Tick(now.0.saturating_sub_unsigned(state.last.since(tick).0));
            rebased.add(tick, after.wrapping_sub(total));
            total = after;
        }
        *state = rebased;
    }

    #[inline]
    fn admits(&self, state: &SlidingWindowLogState, now: Tick, cost: Cost) -> bool {
        cost <= self.limit && self.count(state, now) <= self.limit - cost
    }

    #[inline]
    fn admit(&self, state: &mut SlidingWindowLogState, now: Tick, cost: Cost) -> bool {
        let expired = self.expired(state, now);
        let count = state.total().wrapping_sub(state.total_before(expired));
        let admits = cost <= self.limit && count <= self.limit - cost;
        if admits && cost > 0 {
            state.move_to(now, expired);
            state.add(state.last, cost);
        }
        admits
    }

    fn fit(&self, state: &SlidingWindowLogState, now: Tick, cost: Cost) -> Fit {
        let Some(most) = self.limit.checked_sub(cost) else { return Fit::Never };
        let excess = self.count(state, now).saturating_sub(most);
        if excess == 0 {
            return Fit::Now;
        }
        match state.leaving(self.expired(state, now), excess) {
            Some(entry) => Fit::After(self.until_it_leaves(entry, now)),
            None => Fit::Now,
        }
    }

    /// The first units fit when enough has left, and each further limit of them a window later.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let windows = Windows { left: Ticks(self.window), window: self.window, limit: self.limit };
        let latest = windows.latest(self.fit(state, now, cost), ahead);
        if cost > self.limit {
            return FitBehind { earliest: Fit::Never, latest };
        }
        let limit = u128::from(self.limit);
        let units = ahead.saturating_add(cost.into());
        let full = units.saturating_sub(1) / limit;
        // At most the limit, so it fits 64 bits.
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
            state.give_back(count - new);
        }
        dropped
    }

    fn receipt(&self, state: &SlidingWindowLogState) -> Receipt {
        Receipt::Limit(Mark::at(state.last))
    }

    /// Returns units to the entry that they were charged to, if it has not left.
    fn settle(
        &self,
        state: &mut SlidingWindowLogState,
        now: Tick,
        change: i128,
        receipt: &Receipt,
    ) -> u128 {
        if self.set_back(state, now) {
            self.rebase(state, now);
        }
        if change > 0 {
            return self.charge(state, now, change);
        }
        let asked = change.unsigned_abs();
        let mark = receipt.mark().filter(|mark| mark.charged_at() <= now.max(state.last));
        let Some(mark) = mark else { return asked };
        let most = mark.returnable(asked);
        if most == 0 {
            return asked;
        }
        state.move_to(now, self.expired(state, now));
        asked - u128::from(state.take_from(mark.charged_at(), most))
    }

    fn facts(&self, state: &SlidingWindowLogState, now: Tick, _: Option<Cost>) -> Facts {
        let expired = self.expired(state, now);
        let used = state.total().wrapping_sub(state.total_before(expired));
        let newest = state.entries.back().filter(|_| expired < state.entries.len());
        Facts {
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            reset_after: newest.map_or(Ticks::ZERO, |&(tick, _)| self.until_it_leaves(tick, now)),
            delay: Ticks::ZERO,
            scarcest: Some(0),
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
        // From the newest to the oldest: ages and costs are small numbers.
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
            // Totals run from the oldest, which is not known yet: they count down from 0 until then.
            entries.push_front((tick, 0_u64.wrapping_sub(total)));
            total += cost;
            later = tick;
        }
        reader.end()?;
        Ok(SlidingWindowLogState { last, before: 0_u64.wrapping_sub(total), entries })
    }
}
