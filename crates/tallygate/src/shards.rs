//! Values under a few locks, whose times move with a clock that is set back.
//!
//! A time in the future, such as a deadline, means nothing after the clock was set back. So each lock stores how often
//! the clock was set back, and the latest time that was read since. The first reading after another set-back moves all
//! times under the lock: the time that was left at the latest reading is left now. A reading from before that set-back
//! is replaced by the latest one after it.

use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tallygate_core::Tick;

use crate::table::{KeySlot, Reading};

/// The number of locks.
const SHARDS: usize = 16;

/// Values by key, under some locks.
#[derive(Default)]
pub(crate) struct Shards<T> {
    /// The number of set-backs that all values have followed.
    followed: AtomicU32,
    shards: [Mutex<Shard<T>>; SHARDS],
}

/// The values under one lock.
#[derive(Default)]
pub(crate) struct Shard<T> {
    values: T,
    /// The latest reading of the clock.
    latest: Reading,
}

/// Values with times, and with wakers of tasks that wait for them.
pub(crate) trait Timed: Default {
    /// Moves all times because the clock was set back, and wakes all tasks.
    fn set_back(&mut self, by: &SetBack, wakes: &mut WakeList);
}

/// A set-back of the clock, as seen under one lock.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SetBack {
    /// The latest time that was read before.
    from: Tick,
    /// The first time that was read after it.
    to: Tick,
}

impl SetBack {
    /// Moves a time, so that the wait until then stays the same. A time never moves forward.
    pub(crate) fn moved(&self, when: Tick) -> Tick {
        self.to.after(when.since(self.from)).unwrap_or(when).min(when)
    }
}

impl<T: Timed> Shards<T> {
    /// Locks the values of a key.
    pub(crate) fn lock(&self, spot: KeySlot) -> MutexGuard<'_, Shard<T>> {
        // A panic under the lock leaves no incomplete change: values change after the rules were called.
        self.shards[spot.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the values of a key with a reading. Returns the reading to continue with.
    pub(crate) fn lock_at(
        &self,
        spot: KeySlot,
        reading: Reading,
        wakes: &mut WakeList,
    ) -> (MutexGuard<'_, Shard<T>>, Reading) {
        let mut shard = self.lock(spot);
        let reading = shard.enter(reading, wakes);
        (shard, reading)
    }

    /// Calls `change` with the values under each lock.
    pub(crate) fn each(&self, mut change: impl FnMut(&mut Shard<T>, &mut WakeList)) {
        for shard in &self.shards {
            let mut wakes = WakeList::default();
            change(&mut shard.lock().unwrap_or_else(PoisonError::into_inner), &mut wakes);
        }
    }

    /// Moves all times, and wakes all tasks, if a reading is the first after the clock was set back.
    pub(crate) fn follow(&self, reading: Reading) {
        let Some(set_backs) = reading.set_backs() else { return };
        if self.followed.load(Ordering::Relaxed) < set_backs
            && self.followed.fetch_max(set_backs, Ordering::Relaxed) < set_backs
        {
            self.each(|shard, wakes| _ = shard.enter(reading, wakes));
        }
    }
}

impl<T: Timed> Shard<T> {
    /// Moves all times if a reading is the first after the clock was set back. Returns the reading to continue with.
    pub(crate) fn enter(&mut self, reading: Reading, wakes: &mut WakeList) -> Reading {
        let (Some(was), Some(is)) = (self.latest.set_backs(), reading.set_backs()) else {
            return reading;
        };
        if is < was {
            return self.latest;
        }
        if is > was {
            self.values.set_back(&SetBack { from: self.latest.now, to: reading.now }, wakes);
        }
        if is > was || reading.now > self.latest.now {
            self.latest = reading;
        }
        reading
    }
}

impl<T> Deref for Shard<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.values
    }
}

impl<T> DerefMut for Shard<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.values
    }
}

/// Wakes tasks, and drops the wakers of others, when it is dropped. It must be declared before a lock, so that it is
/// dropped after it: wakers run code of the executor, which may call the limiter again.
#[derive(Default)]
pub(crate) struct WakeList {
    pub(crate) wake: Vec<Waker>,
    pub(crate) forget: Option<Waker>,
}

impl Drop for WakeList {
    fn drop(&mut self) {
        for waker in self.wake.drain(..) {
            // If one executor panics, the tasks of the others are still woken.
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| waker.wake())) {
                std::mem::forget(payload);
            }
        }
    }
}
