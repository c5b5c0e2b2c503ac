//! Decisions on several keys, which hold the locks of all of them at once.

use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};

use tallygate_core::{Algorithm, Tick};

use super::atomic::Ordering;
use super::{Bucket, BucketLock, Full, KeySlot, LockedBucket, REACH, Reading, Table, run_late};

/// Locks of buckets of any tables that are held at once. Dropping them unlocks all.
///
/// Every thread that waits for a lock while it holds another takes locks in the order of their addresses, so threads
/// cannot deadlock.
#[derive(Debug, Default)]
pub struct Locks<'a> {
    /// Sorted, so that one of many is found quickly.
    held: Vec<&'a BucketLock>,
    /// The slots of keys of this decision, sorted by the addresses of the locks of their buckets. No other key may take
    /// them.
    pinned: Vec<(usize, usize)>,
}

/// A key whose lock is held, and the slot of its state, if it has one.
#[derive(Clone, Copy, Debug)]
pub struct LockedKey {
    key: KeySlot,
    /// The home of the key, which is locked.
    home: usize,
    at: Option<(usize, usize)>,
    /// Whether the state was placed for this decision and is removed if the decision fails.
    is_new: bool,
}

impl LockedKey {
    /// Returns whether the table has a state for the key.
    pub(crate) const fn is_kept(&self) -> bool {
        self.at.is_some() && !self.is_new
    }
}

impl<'a> Locks<'a> {
    fn take(&mut self, lock: &'a BucketLock) {
        if let Err(place) = self.place(lock) {
            debug_assert_eq!(place, self.held.len(), "locks are waited for upward only");
            lock.lock();
            self.held.insert(place, lock);
        }
    }

    /// Returns whether a lock is held, or comes after all held locks.
    fn can_take(&self, lock: &BucketLock) -> bool {
        self.place(lock).err().is_none_or(|place| place == self.held.len())
    }

    fn holds(&self, lock: &BucketLock) -> bool {
        self.place(lock).is_ok()
    }

    /// Returns the index of a lock among the held locks, or the index that it would have.
    fn place(&self, lock: &BucketLock) -> Result<usize, usize> {
        // In most cases it comes after all of them.
        match self.held.last() {
            Some(last) if last.address() >= lock.address() => {
                self.held.binary_search_by_key(&lock.address(), |held| held.address())
            }
            _ => Err(self.held.len()),
        }
    }

    /// Takes over the lock of a bucket that was opened.
    fn keep<S: 'static>(&mut self, open: OpenBucket<'a, S>) {
        if let OpenBucket::Locked(locked) = open {
            let lock = &ManuallyDrop::new(locked).0.lock;
            if let Err(place) = self.place(lock) {
                self.held.insert(place, lock);
            }
        }
    }

    fn pin(&mut self, lock: &'a BucketLock, slot: usize) {
        let pinned = (lock.address(), slot);
        let place = self.pinned.partition_point(|other| *other < pinned);
        self.pinned.insert(place, pinned);
    }

    fn is_pinned(&self, lock: &BucketLock, slot: usize) -> bool {
        self.pinned.binary_search(&(lock.address(), slot)).is_ok()
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        self.held.drain(..).for_each(BucketLock::unlock);
    }
}

/// Returns whether a slot belongs to a key of the same decision.
pub(super) fn is_pinned<S: 'static>(
    locks: Option<&Locks<'_>>,
    bucket: &LockedBucket<'_, S>,
    slot: usize,
) -> bool {
    locks.is_some_and(|locks| locks.is_pinned(&bucket.0.lock, slot))
}

/// Returns a bucket whose lock is held, and stays held. There is only one such value at a time: callers have exclusive
/// access to the locks (`&mut`), and drop the bucket before they get it again.
fn under<'a, S: 'static>(
    bucket: &'a Bucket<S>,
    locks: &Locks<'_>,
) -> ManuallyDrop<LockedBucket<'a, S>> {
    assert!(locks.holds(&bucket.lock));
    ManuallyDrop::new(LockedBucket(bucket))
}

/// A bucket that can be used, because it was locked now or its lock is held with others.
pub(super) enum OpenBucket<'a, S: 'static> {
    Locked(LockedBucket<'a, S>),
    Under(ManuallyDrop<LockedBucket<'a, S>>),
}

impl<'a, S: 'static> OpenBucket<'a, S> {
    /// Returns the bucket if its lock is held already or free.
    pub(super) fn of(bucket: &'a Bucket<S>, locks: Option<&Locks<'_>>) -> Option<Self> {
        match locks {
            Some(locks) if locks.holds(&bucket.lock) => Some(Self::Under(under(bucket, locks))),
            _ => bucket.try_lock().map(Self::Locked),
        }
    }
}

impl<'a, S: 'static> Deref for OpenBucket<'a, S> {
    type Target = LockedBucket<'a, S>;

    fn deref(&self) -> &LockedBucket<'a, S> {
        match self {
            Self::Locked(locked) => locked,
            Self::Under(locked) => locked,
        }
    }
}

impl<S: 'static> DerefMut for OpenBucket<'_, S> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Locked(locked) => locked,
            Self::Under(locked) => locked,
        }
    }
}

impl<S: 'static> Table<S> {
    /// Returns the position of a key's lock in the order of all locks, which is valid until the table grows.
    pub(crate) fn lock_order(&self, key: KeySlot) -> usize {
        self.buckets[self.home(key, self.shape())].lock.address()
    }

    /// Takes the locks of a key, in addition to the held locks, and searches for it. Keys must be searched for in the
    /// order of their locks. Returns `None` if the order has changed, because the table has grown meanwhile. Then the
    /// caller drops all locks and starts again.
    pub(crate) fn look_for<'a>(&'a self, key: KeySlot, locks: &mut Locks<'a>) -> Option<LockedKey> {
        let index = self.home(key, self.shape());
        let home = &self.buckets[index];
        if !locks.can_take(&home.lock) {
            return None;
        }
        locks.take(&home.lock);
        if self.home(key, self.shape()) != index {
            return None;
        }
        let reach = if home.spilled(Ordering::Acquire) > 0 { REACH } else { 0 };
        for distance in 0..=reach {
            let bucket = &self.buckets[index + distance];
            locks.take(&bucket.lock);
            let slot = under(bucket, locks).find(key.tag | distance as u64);
            if let Some(slot) = slot {
                locks.pin(&bucket.lock, slot);
                let at = Some((index + distance, slot));
                return Some(LockedKey { key, home: index, at, is_new: false });
            }
        }
        Some(LockedKey { key, home: index, at: None, is_new: false })
    }

    /// Finds a place for a new key, with its initial state. So a decision on several keys makes sure that all have a
    /// place before it charges any of them.
    ///
    /// # Errors
    /// There is no place for it.
    pub(crate) fn make_room<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        found: LockedKey,
        reading: impl Into<Reading>,
        locks: &mut Locks<'a>,
    ) -> Result<LockedKey, Full> {
        let LockedKey { key, home: index, at: None, .. } = found else { return Ok(found) };
        let mut home = under(&self.buckets[index], locks);
        let reading = self.enter(rule, &mut home, reading.into());
        let now = reading.now.max(self.floor(index, reading));
        let reading = Reading { now, ..reading };
        let state = rule.initial(now);
        let (index, slot, beyond) =
            self.place(rule, key, (found.home, &mut home), reading, state, (Some(&*locks), true))?;
        if let Some(beyond) = beyond {
            locks.keep(beyond);
        }
        locks.pin(&self.buckets[index].lock, slot);
        Ok(LockedKey { at: Some((index, slot)), is_new: true, ..found })
    }

    /// Releases the place that was made for a key.
    pub(crate) fn give_up_room(&self, found: LockedKey, locks: &mut Locks<'_>) {
        if let LockedKey { at: Some((index, slot)), is_new: true, .. } = found {
            let tag = under(&self.buckets[index], locks).clear(slot);
            self.lower_spilled(index, tag);
            self.counts.release();
        }
    }

    /// Runs a function on the state of a key, or on its initial state.
    pub(crate) fn read_found<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        found: LockedKey,
        reading: impl Into<Reading>,
        locks: &mut Locks<'_>,
        read: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        let reading = reading.into();
        match found.at {
            Some((bucket, slot)) => {
                let mut bucket = under(&self.buckets[bucket], locks);
                let reading = self.enter(rule, &mut bucket, reading);
                bucket.change(slot, |state| run_late(rule, state, reading.now, read))
            }
            None => {
                let mut home = under(&self.buckets[found.home], locks);
                let reading = self.enter(rule, &mut home, reading);
                let now = reading.now.max(self.floor(found.home, reading));
                read(&mut rule.initial(now), now)
            }
        }
    }

    /// Changes the state of a key. A new state is stored unless it is still fresh. Call it for stored keys first,
    /// because a new key may take the place of a stored fresh one.
    pub(crate) fn change_found<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        found: LockedKey,
        reading: impl Into<Reading>,
        locks: &mut Locks<'_>,
        change: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        let LockedKey { key, home: index, at: None, .. } = found else {
            return self.read_found(rule, found, reading, locks, change);
        };
        let mut home = under(&self.buckets[index], locks);
        let reading = self.enter(rule, &mut home, reading.into());
        let now = reading.now.max(self.floor(index, reading));
        let mut state = rule.initial(now);
        let answer = change(&mut state, now);
        if !rule.is_fresh(&state, now) {
            let reading = Reading { now, ..reading };
            // Either room was made before, or the decision charges nothing. In the second case, a penalty is lost if
            // there is no room.
            drop(self.place(rule, key, (index, &mut home), reading, state, (Some(&*locks), true)));
            self.sweep_in_passing(rule, reading);
        }
        answer
    }
}
