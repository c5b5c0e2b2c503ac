//! The states of the keys of one rule, and the requests that wait for these keys.

use tallygate_core::{Algorithm, Answer, Cost, Tick, Used};

use crate::departures::Departures;
use crate::lateness::counted_from;
use crate::line::Line;
use crate::storage::StoreError;
use crate::table::{Fingerprint, Full, KeySlot, Lookup, Reading, Table};

use super::Capacity;

/// The states of keys, and the requests that wait for them.
pub(super) struct Keys<S: 'static> {
    pub(super) table: Table<S>,
    pub(super) line: Line,
    pub(super) departures: Departures,
}

impl<S: 'static> Keys<S> {
    /// Creates an empty table that stores at most a given number of bits of the hash of a key.
    pub(super) fn with_known_bits(bits: u32, capacity: Capacity) -> Self {
        let Capacity { max_keys, when_full } = capacity;
        Self {
            table: Table::new(bits, max_keys, when_full),
            line: Line::default(),
            departures: Departures::default(),
        }
    }

    pub(super) fn new(capacity: Capacity) -> Self {
        Self::with_known_bits(u128::BITS, capacity)
    }

    /// Adds a key of a snapshot, unless it would be the first to be evicted.
    pub(super) fn keep(
        &self,
        rule: &impl Algorithm<State = S>,
        key: Fingerprint,
        was: S,
        reading: Reading,
    ) {
        let slot = self.table.slot_of(key);
        if !self.table.make_place_for(rule, slot, reading, &was) {
            return;
        }
        // A table that rejects new keys counts the keys that find no place.
        let _ = self.table.with(rule, slot, reading, |state, _| *state = was);
        self.table.grow_for_restored();
    }

    pub(super) fn full(&self) -> StoreError {
        StoreError::Full { max_keys: self.table.max_keys() }
    }

    /// Decides for a new key without a place: as for a client that has used up its quota, because the key may have been
    /// evicted.
    ///
    /// # Errors
    /// Returns an error if the store is full and rejects new keys.
    #[cold]
    pub(super) fn without_place<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        cost: Cost,
        now: Tick,
    ) -> Result<T, StoreError> {
        if self.table.rejects_new() {
            return Err(self.full());
        }
        let mut used_up = rule.with_used(Used::whole(Cost::MAX), now);
        Ok(rule.decide(&mut used_up, now, cost))
    }
}

impl<S: Clone + 'static> Keys<S> {
    /// Decides a check. Requests that wait for the key come first.
    // Always inlined: a call on the path of a known key can be measured, and so can the registers saved for it.
    #[inline(always)]
    pub(super) fn decide<A: Algorithm<State = S>, T: Answer, E: From<Full>>(
        &self,
        rule: &A,
        key: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Result<T, E> {
        if cost == 0 || !self.line.is_empty() {
            if let Some(answer) = self.decide_unusual(rule, key.spot, cost, reading) {
                return answer.map_err(E::from);
            }
        }
        self.table.check(rule, key, cost, reading)
    }

    /// Decides a check of cost 0, or of a key that requests wait for.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_unusual<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Option<Result<T, Full>> {
        if cost == 0 {
            let look = |state: &mut S, at| rule.decide::<T>(state, at, 0);
            return Some(Ok(self.look(rule, spot, reading, look)));
        }
        self.line.follow(reading);
        self.behind_others(rule, spot, cost, reading)
    }

    /// Answers from the state of a key, or from the state that it would start with, and changes nothing.
    #[cold]
    pub(super) fn look<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: KeySlot,
        reading: Reading,
        read: impl FnOnce(&mut S, Tick) -> T,
    ) -> T {
        self.table
            .look(rule, spot, reading, |state, at| counted_from(reading.now, at, read(state, at)))
    }

    /// Wakes all waiting requests, and moves their times, if a reading is the first after the clock was set back. A
    /// caller that decides a departure must not call it, because it holds a lock of the departures.
    #[cold]
    pub(super) fn note_set_back(&self, reading: Reading) {
        self.table.note_set_back(reading);
        self.line.follow(reading);
        self.departures.follow(reading);
    }

    /// Returns the answer to a check of a key that requests wait for; `None` if none does.
    #[cold]
    pub(super) fn behind_others<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Option<Result<T, Full>> {
        // A check of cost 0 charges nothing, so it needs no place in the line.
        if cost == 0 || self.line.is_empty() {
            return None;
        }
        let answer = self.line.answer((&self.table, rule), spot, cost, reading)?;
        Some(answer.map(|decision| T::from_decision(decision, reading.now)))
    }

    /// Returns the answer to a peek at a key that requests wait for; `None` if none does. It changes nothing.
    #[cold]
    pub(super) fn peek_behind_others<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Option<T> {
        if cost == 0 || self.line.is_empty() {
            return None;
        }
        let decision = self.line.peek((&self.table, rule), spot, cost, reading)?;
        Some(T::from_decision(decision, reading.now))
    }
}
