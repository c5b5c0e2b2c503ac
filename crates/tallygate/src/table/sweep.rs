//! Sweeps, which drop keys that are fresh and idle. The work per call is bounded.
//!
//! - While the table is more than half full, each new key sweeps one bucket *in passing*.
//! - The *background sweep* visits the whole table once per pass, whether or not new keys come, so that the number of keys
//!   follows the number of active clients. Its caller chooses how many buckets one call visits, and so how long a pass
//!   takes.
//!
//! The first does not drop a key that was charged since the current pass began, and the second does not drop a key that
//! was charged since the previous pass began. A client that is slower than its limit is fresh at every visit. If its
//! key was dropped each time, each of its requests would cost as much as that of a new client.

use tallygate_core::{Algorithm, Tick};

use super::atomic::Ordering;
use super::place::ELSEWHERE;
use super::{LockedBucket, Reading, Table, dropped_at};

/// The number of buckets that a new key sweeps in passing. They have three keys on average, so idle keys are dropped
/// faster than new ones come.
const SWEEP: usize = 1;

/// The result of one call of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// The number of idle keys that it dropped.
    pub dropped: usize,
    /// The number of buckets that the pass has not visited yet; 0 if this call completed the pass.
    pub buckets_left: usize,
}

/// The position of the background sweep.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pass {
    /// The next bucket to visit.
    next: usize,
    /// The time at which the pass began.
    began: Tick,
    /// A fresh key is idle if it was not charged after this time: when the pass before this one began. So a client that
    /// comes once per pass is never dropped.
    idle_since: Tick,
    /// The number of keys that the pass has kept so far.
    in_use: usize,
    /// The number of keys that the last complete pass has kept.
    in_use_before: Option<usize>,
}

impl Pass {
    pub(super) const NONE: Self = Self {
        next: 0,
        began: Tick(i64::MIN),
        idle_since: Tick(i64::MIN),
        in_use: 0,
        in_use_before: None,
    };

    /// Begins the next pass. For the first pass, keys that were not charged since it began count as idle.
    fn begin(&mut self, now: Tick) {
        let is_first = self.in_use_before.is_none();
        self.idle_since = if is_first { now } else { self.began.min(now) };
        (self.began, self.in_use) = (now, 0);
    }
}

impl<S: 'static> Table<S> {
    /// Visits the next buckets of the table, at most `buckets` of them, and drops their idle keys: the keys that are fresh
    /// and were not charged since the pass before this one began. After the last bucket, the next call begins a new pass.
    ///
    /// It holds one lock at a time. If another thread sweeps already, it does nothing.
    pub(crate) fn sweep_idle<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        reading: Reading,
        buckets: usize,
    ) -> Swept {
        let Ok(mut pass) = self.pass.0.try_lock() else { return Swept::default() };
        if pass.next == 0 {
            pass.begin(reading.now);
        }
        let mut dropped = 0;
        for _ in 0..buckets {
            if pass.next >= self.in_use() {
                break;
            }
            // A bucket that was never used is not touched: its memory is not resident.
            if self.was_used(pass.next) {
                let mut bucket = self.buckets[pass.next].lock();
                let idle_since = pass.idle_since;
                dropped += self.sweep_bucket(rule, (pass.next, &mut bucket), reading, idle_since);
                pass.in_use += bucket.filled().count();
            }
            pass.next += 1;
        }
        let buckets_left = self.in_use().saturating_sub(pass.next);
        if buckets_left == 0 {
            (pass.next, pass.in_use_before) = (0, Some(pass.in_use));
        }
        Swept { dropped, buckets_left }
    }

    /// Returns how many keys the last complete pass kept; `None` before the first one.
    pub(super) fn keys_in_use(&self) -> Option<usize> {
        self.pass.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner).in_use_before
    }

    /// Drops the idle keys of the next bucket, without waiting for its lock. Does nothing while half of the table is
    /// free, because the keys may come back.
    #[inline]
    pub(super) fn sweep_in_passing<A: Algorithm<State = S>>(&self, rule: &A, reading: Reading) {
        if self.counts.reserved() > self.max_keys() / 2 {
            self.sweep_next(rule, reading, false);
        }
    }

    /// Drops fresh keys, idle or not, to make room for a new key that would be rejected otherwise: all fresh keys of a
    /// small table, or those of the next bucket of a large one. It waits for no lock.
    pub(super) fn sweep_when_full<A: Algorithm<State = S>>(&self, rule: &A, reading: Reading) {
        let in_use = self.in_use();
        if in_use > ELSEWHERE {
            self.sweep_next(rule, reading, true);
            return;
        }
        for index in 0..in_use {
            if let Some(mut bucket) = self.buckets[index].try_lock() {
                self.sweep_bucket(rule, (index, &mut bucket), reading, Tick(i64::MAX));
            }
        }
    }

    fn sweep_next<A: Algorithm<State = S>>(&self, rule: &A, reading: Reading, is_full: bool) {
        for _ in 0..SWEEP {
            let (index, pass_began) = self.counts.next_to_sweep(self.in_use(), reading.now);
            let idle_since = if is_full { Tick(i64::MAX) } else { pass_began };
            // The memory of the next sweeps is prefetched.
            self.buckets.prefetch(index + 1 + SWEEP);
            if let Some(mut bucket) = self.buckets[index].try_lock() {
                self.sweep_bucket(rule, (index, &mut bucket), reading, idle_since);
            }
        }
    }

    /// Drops the keys of a bucket that are fresh and were not charged after a time. Returns how many it dropped.
    #[inline]
    fn sweep_bucket<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        (index, bucket): (usize, &mut LockedBucket<'_, S>),
        reading: Reading,
        idle_since: Tick,
    ) -> usize {
        if !self.can_enter(rule, bucket, reading) {
            return 0;
        }
        let mut dropped = 0;
        for slot in bucket.filled() {
            let is_idle = bucket.read(slot, |state| {
                rule.is_fresh(state, reading.now) && rule.last_change(state) <= idle_since
            });
            if is_idle {
                self.drop_fresh(rule, (index, &mut *bucket), slot, reading);
                dropped += 1;
            }
        }
        dropped
    }

    /// Drops a fresh key.
    #[cold]
    fn drop_fresh<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        (index, bucket): (usize, &mut LockedBucket<'_, S>),
        slot: usize,
        reading: Reading,
    ) {
        let at = bucket.read(slot, |state| dropped_at(rule, state, reading.now));
        let tag = bucket.clear(slot);
        self.forget(index, tag, reading, at);
        self.counts.release();
        self.counts.own().swept.fetch_add(1, Ordering::Relaxed);
    }
}
