//! The returns and resets that affect open reservations of a memory store.
//!
//! A settlement may return only units that still count ([`Returns`]). Two events between a reservation and its
//! settlement affect this, and are not part of a key's state: units that other requests returned, and a reset. They are
//! stored here by key, only while reservations are open, and only until everything that was charged before them has
//! drained. A check never reads them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tallygate_core::{Algorithm, Receipt, Returns, Settlement, Tick};

/// The number of locks.
const SHARDS: usize = 16;
/// The maximum number of keys per lock. Beyond it, reservations that were made before return nothing.
const MAX_KEYS: usize = 16_384;

/// The returns and resets of a store's keys.
pub(crate) struct ReturnLog {
    /// The number of this store, which no other store of the process has.
    store: u64,
    /// The number of the last return or reset.
    last: AtomicI64,
    /// The latest time at which any reservation can be settled.
    latest_end: AtomicI64,
    shards: [Mutex<Shard>; SHARDS],
}

struct Shard {
    /// Reservations below this number return nothing.
    closed_below: i64,
    keys: HashMap<u128, Returns>,
    /// The number of keys from which on keys that no longer matter are removed.
    sweep_at: usize,
}

impl Default for Shard {
    fn default() -> Self {
        Self { closed_below: i64::MIN, keys: HashMap::new(), sweep_at: 64 }
    }
}

impl ReturnLog {
    pub(crate) fn new() -> Self {
        static STORES: AtomicU64 = AtomicU64::new(1);
        Self {
            store: STORES.fetch_add(1, Ordering::Relaxed),
            last: AtomicI64::new(0),
            latest_end: AtomicI64::new(i64::MIN),
            shards: Default::default(),
        }
    }

    /// Returns the number of this store, which no other store of the process has.
    pub(crate) const fn store(&self) -> u64 {
        self.store
    }

    /// Returns the number of a reservation that can be settled until a time. Call it with the key's lock.
    pub(crate) fn reserved(&self, until: Tick) -> i64 {
        self.latest_end.fetch_max(until.0, Ordering::Relaxed);
        self.last.load(Ordering::Relaxed)
    }

    /// Lowers a receipt to what it can still return. Returns whether units were returned since its charge. Call it with
    /// the key's lock.
    ///
    /// # Errors
    /// Returns an error if the key was reset after the reservation was made.
    pub(crate) fn lower(
        &self,
        key: u128,
        number: i64,
        receipt: &mut Receipt,
    ) -> Result<bool, WasReset> {
        let shard = self.shard(key);
        let mut is_lowered = false;
        if let Some(returns) = shard.keys.get(&key) {
            if returns.voids(number) {
                return Err(WasReset);
            }
            is_lowered = returns.lower(number, receipt);
        }
        if number < shard.closed_below {
            *receipt = Receipt::Nothing;
        }
        Ok(is_lowered)
    }

    /// Records that a reservation with a number was settled, for the returns since its charge. Call it with the key's
    /// lock.
    pub(crate) fn settled(&self, key: u128, number: i64, settlement: &Settlement<'_>) {
        if let Some(returns) = self.shard(key).keys.get_mut(&key) {
            returns.settled(number, settlement);
        }
    }

    /// Records that units were returned to a state that would have been fresh at a time. Call it with the key's lock.
    pub(crate) fn returned<A: Algorithm>(
        &self,
        key: u128,
        rule: &A,
        state: &A::State,
        now: Tick,
        fresh: Option<Tick>,
    ) {
        if fresh.is_none_or(|fresh| fresh > now) && self.is_anything_reserved(now) {
            let number = self.next();
            self.note(key, now, |returns| {
                let until = fresh.unwrap_or(Tick(i64::MAX));
                returns.note(number, rule.receipt(state), rule.last_change(state), until);
            });
        }
    }

    /// Records a reset. Call it with the key's lock.
    pub(crate) fn was_reset(&self, key: u128, now: Tick) {
        if self.is_anything_reserved(now) {
            let number = self.next();
            let until = Tick(self.latest_end.load(Ordering::Relaxed).saturating_add(1));
            self.note(key, now, |returns| returns.reset(number, until));
        }
    }

    fn is_anything_reserved(&self, now: Tick) -> bool {
        self.latest_end.load(Ordering::Relaxed) >= now.0
    }

    fn next(&self) -> i64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn note(&self, key: u128, now: Tick, note: impl FnOnce(&mut Returns)) {
        let mut shard = self.shard(key);
        let Shard { keys, sweep_at, .. } = &mut *shard;
        if keys.len() >= *sweep_at && !keys.contains_key(&key) {
            keys.retain(|_, returns| returns.until() > now);
            *sweep_at = (2 * keys.len()).max(64);
        }
        if shard.keys.len() >= MAX_KEYS {
            shard.keys.clear();
            shard.closed_below = self.next();
        }
        note(shard.keys.entry(key).or_default());
    }

    fn shard(&self, key: u128) -> MutexGuard<'_, Shard> {
        let index = (key % SHARDS as u128) as usize;
        // Each change is complete before any code can panic.
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The error for a key that was reset after a reservation was made.
#[derive(Debug)]
pub(crate) struct WasReset;
