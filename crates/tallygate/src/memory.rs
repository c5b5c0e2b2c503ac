//! Stores in memory: bounded, exact under any number of threads, with answers that are ready at once.

mod engine;
mod joint;
mod keys;
mod kinds;
mod policy_store;
mod snapshots;
mod waiting;

use std::fmt;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Tick, Ticks, Timed};

use crate::ask::Ask;
use crate::clock::{Clock, SystemClock};
use crate::reservation::{Charged, SettleError};
use crate::storage::{RuleRef, Store, StoreError, replies_at_once};
use crate::table::{Swept, Usage, WhenFull};

use engine::Engine;
use keys::Keys;

pub use policy_store::PolicyStore;

/// The maximum number of keys of a memory store, and what it does with new keys when it is full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capacity {
    /// The maximum number of keys. A bucket takes about 43 bytes per key, which are resident once the key is used.
    pub max_keys: usize,
    /// What the store does with a new key when it is full and no key is fresh.
    pub when_full: WhenFull,
}

impl Default for Capacity {
    /// A million keys, and a full store evicts the key that has used the smallest share of its quota.
    fn default() -> Self {
        Self { max_keys: 1_000_000, when_full: WhenFull::EvictLeastUsed }
    }
}

impl Capacity {
    /// Returns the capacity for at most `max_keys` keys.
    #[must_use]
    pub fn of(max_keys: usize) -> Self {
        Self { max_keys, ..Self::default() }
    }

    /// Sets what a full store does with new keys.
    #[must_use]
    pub const fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }
}

/// Keeps the keys of one rule in memory, for any [`Algorithm`], including your own.
pub struct MemoryStore<A: Algorithm, C = SystemClock> {
    keys: Keys<A::State>,
    engine: Engine<C>,
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Creates an empty store.
    ///
    /// # Panics
    /// Panics if the system has no address space for that many keys.
    pub fn new(capacity: Capacity, clock: C) -> Self {
        Self { keys: Keys::new(capacity), engine: Engine::new(clock) }
    }

    /// Returns how many keys there are, and how many were dropped so far.
    pub fn usage(&self) -> Usage {
        self.keys.table.usage()
    }

    /// Drops idle keys in the next `buckets` buckets of the table: see
    /// [`RateLimiter::sweep`](crate::RateLimiter::sweep). Any rule of the store will do.
    pub fn sweep(&self, rule: &A, buckets: usize) -> Swept {
        self.engine.sweep(&self.keys, rule, buckets)
    }

    /// Starts to load the memory of a key that will be checked soon. It changes nothing.
    ///
    /// If you have several requests, prefetch all of their keys first: then the checks do not wait for memory one
    /// after the other.
    #[inline]
    pub fn prefetch(&self, key: &[u8]) {
        if let Ok(print) = self.engine.fingerprint(key) {
            self.keys.table.look_up(print);
        }
    }
}

impl<A: Algorithm, C: Clock> Store<A> for MemoryStore<A, C> {
    replies_at_once!();

    #[inline]
    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        self.engine.apply(&self.keys, &*rule, key, op, now)
    }

    #[inline]
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Result<T, StoreError> {
        let timed = self.engine.apply(&self.keys, &*rule, key, op, now)?;
        Ok(make(&*rule, timed))
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        asks: &'a [K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        self.engine.check_many(&self.keys, &*rule, asks)
    }

    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        self.engine.reserve(&self.keys, &*rule, key, (estimate, time_to_live), now)
    }

    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        self.engine.settle(&self.keys, &*rule, key, (change, charged), now)
    }

    fn now(&self) -> Tick {
        self.engine.now()
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        self.engine.rules_changed(&self.keys, key);
    }
}

/// A store in memory, whose idle keys a limiter can sweep.
pub trait Sweep<A: Algorithm> {
    /// Drops idle keys in the next `buckets` buckets: see [`RateLimiter::sweep`](crate::RateLimiter::sweep).
    fn sweep(&self, rule: &A, buckets: usize) -> Swept;
}

impl<A: Algorithm, C: Clock> Sweep<A> for MemoryStore<A, C> {
    fn sweep(&self, rule: &A, buckets: usize) -> Swept {
        Self::sweep(self, rule, buckets)
    }
}

impl<A: Algorithm, C: Clock> fmt::Debug for MemoryStore<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
