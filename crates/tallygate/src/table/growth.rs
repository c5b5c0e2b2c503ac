//! Growth: linear hashing, one bucket at a time.
//!
//! When the table fills up, each new key splits a few buckets. Of the keys of the next home to split, those whose next bit
//! of the tag is set move to the first bucket that is no home yet. Nothing else moves, no call splits more than [`SPLITS`]
//! buckets, and keys only move to higher buckets.

use super::atomic::Ordering;
use super::{DISTANCE, FILL, LockedBucket, ONE_SPILLED, REACH, SLOTS, TAG_BITS, Table};

/// The number of buckets that a new key splits while the number of homes doubles. Meanwhile, new keys also fill the
/// buckets that are still to be split: with 8 splits per key, these are 62 % full at the end instead of [`FILL`].
const SPLITS: usize = 8;

/// The number of splits by which the memory of a split is prefetched ahead.
const SPLITS_AHEAD: usize = 4;

/// How many homes there are, and which bits of a tag choose among them.
///
/// With n initial homes, a key's home is the initial home that its hash selects, plus n times the number in some
/// further bits of its hash. If there is no such home yet, the last of these bits does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct HomeCount(pub(super) u64);

impl HomeCount {
    const HALF: u32 = u32::BITS;

    /// Returns the shape with a number of homes and a first number of homes.
    pub(super) fn of(homes: usize, first_homes: usize) -> Self {
        let times = homes.div_ceil(first_homes).next_power_of_two();
        Self((homes as u64) << Self::HALF | (times as u64 - 1))
    }

    /// Returns the shape with one home more.
    #[inline]
    const fn with_one_more(self, first_homes: usize) -> Self {
        let is_filled = self.homes() == first_homes * (self.mask() + 1);
        let mask = if is_filled { 2 * self.mask() + 1 } else { self.mask() };
        Self((self.homes() as u64 + 1) << Self::HALF | mask as u64)
    }

    #[inline]
    pub(super) const fn homes(self) -> usize {
        (self.0 >> Self::HALF) as usize
    }

    /// Returns the bits that choose a home. There may be no such home yet for all of their values.
    #[inline]
    pub(super) const fn mask(self) -> usize {
        (self.0 & ((1 << Self::HALF) - 1)) as usize
    }
}

/// How a home is split: some of its keys move to the first bucket that was no home.
struct Split {
    from: usize,
    to: usize,
    /// The bit of a tag that says whether a key moves.
    bit: u64,
    /// The shape of the table afterwards.
    next: HomeCount,
}

impl Split {
    /// Returns whether a key, found at a distance from the home that is split, belongs to that home and moves.
    #[inline]
    const fn moves(&self, tag: u64, distance: usize) -> bool {
        tag != 0 && (tag & DISTANCE) as usize == distance && tag & self.bit != 0
    }
}

/// The number of low bits of the first half of a hash that choose no home. All other bits of that half are known for
/// every key, whatever table its hash was stored in: see [`Table::slot_of`].
const BITS_AFTER_CHOICE: u32 = u64::BITS - TAG_BITS;

/// Returns the bits of the first half of a hash that choose a home.
#[inline]
pub(super) const fn choice(high: u64) -> usize {
    (high >> BITS_AFTER_CHOICE) as usize
}

impl<S: 'static> Table<S> {
    /// Splits a few buckets if the table is filled and can still grow. The caller holds no lock.
    #[inline]
    pub(crate) fn grow(&self) {
        self.grow_from(FILL, 0);
    }

    /// Does the same before a decision on several keys, which may all be new. The table cannot grow while the decision
    /// holds their locks. If this is called for each key, it splits enough buckets for all.
    pub(crate) fn grow_for(&self, keys: usize) {
        self.grow_from(FILL, keys);
    }

    /// Does the same for the keys of a snapshot, at half the fill: they come in the order of another table's buckets, so
    /// one part of this table gets its keys before the others, and is then filled twice as much as the average.
    pub(crate) fn grow_for_restored(&self) {
        self.grow_from(FILL / 2, 0);
    }

    #[inline]
    fn grow_from(&self, percent: usize, coming: usize) {
        if self.shape().homes() < self.most_homes && self.is_to_grow(percent, coming) {
            self.split_some(percent, coming);
        }
    }

    /// Returns whether the number of homes is being doubled, or should be, because the homes will be fuller than a
    /// given percentage with the new keys.
    fn is_to_grow(&self, percent: usize, coming: usize) -> bool {
        let shape = self.shape();
        let is_doubling = shape.homes() < self.first_homes * (shape.mask() + 1);
        shape.homes() < self.most_homes
            && (is_doubling || self.is_filled(shape.homes(), percent, coming))
    }

    /// Returns whether a number of homes is fuller than a given percentage.
    fn is_filled(&self, homes: usize, percent: usize, coming: usize) -> bool {
        // Slightly more places are reserved than there are keys. Counting the keys would read every stripe.
        let keys = self.counts.reserved().saturating_add(coming).min(self.max_keys());
        keys.saturating_mul(100) > homes.saturating_mul(SLOTS * percent)
    }

    #[cold]
    fn split_some(&self, percent: usize, coming: usize) {
        // One thread splits at a time. The others wait for it only if the buckets that are still to be split become too
        // full, because new keys come faster than one thread can split. It splits a few buckets at a time, so the wait
        // is short.
        if !self.splitting.try_lock() {
            let shape = self.shape();
            let homes = self.first_homes * (shape.mask() + 1) / 2;
            if shape.homes() >= self.most_homes || !self.is_filled(homes, FILL + 3, coming) {
                return;
            }
            self.splitting.lock();
        }
        for _ in 0..SPLITS {
            if !self.is_to_grow(percent, coming) || !self.split_next() {
                break;
            }
        }
        self.splitting.unlock();
    }

    /// Splits the next home. Only called by the thread that splits.
    pub(super) fn split_next(&self) -> bool {
        let shape = self.shape();
        let (homes, next) = (shape.homes(), shape.with_one_more(self.first_homes));
        // The keys of the split home differ in the last bit that chooses among the homes when there is one more.
        let last = next.mask().div_ceil(2);
        let bit = (last as u64) << (BITS_AFTER_CHOICE + self.bits_before_tag);
        let split = Split { from: homes - self.first_homes * last, to: homes, bit, next };
        // No other thread changes the keys of a home while its lock is held. Locks are taken upward.
        let mut home = self.buckets[split.from].lock();
        let is_split =
            self.split_at_home(&split, &mut home) || self.split_beyond(&split, &mut home);
        // Homes are split in order: the memory of later splits is prefetched.
        self.buckets.prefetch(split.from + SPLITS_AHEAD);
        self.buckets.prefetch(split.to + SPLITS_AHEAD);
        is_split
    }

    /// Splits a home whose keys are all in its own bucket into a bucket with room for them. This is the usual case.
    #[inline]
    fn split_at_home(&self, split: &Split, home: &mut LockedBucket<'_, S>) -> bool {
        if home.0.spilled(Ordering::Acquire) > 0 {
            return false;
        }
        let mut target = self.buckets[split.to].lock();
        let (tags, taken) = (home.tags(), target.tags());
        let moving = tags.iter().filter(|tag| split.moves(**tag, 0)).count();
        if moving > taken.iter().filter(|tag| **tag == 0).count() {
            return false;
        }
        let mut empty = (0..SLOTS).filter(|slot| taken[*slot] == 0);
        for (slot, tag) in tags.into_iter().enumerate().filter(|(_, tag)| split.moves(*tag, 0)) {
            if let Some(empty) = empty.next() {
                self.carry((home, slot), (&mut target, empty), tag);
            }
        }
        self.publish(split);
        true
    }

    /// Splits a home some of whose keys are in later buckets, or must move there.
    #[cold]
    fn split_beyond<'a>(&'a self, split: &Split, home: &mut LockedBucket<'a, S>) -> bool {
        let &Split { from, to, .. } = split;
        // The later buckets that have keys of the home.
        let mut sources: [Option<LockedBucket<'_, S>>; REACH] = std::array::from_fn(|_| None);
        let mut moving = home.tags().iter().filter(|tag| split.moves(**tag, 0)).count();
        let mut left = home.0.spilled(Ordering::Acquire);
        for distance in 1..=REACH {
            if left == 0 {
                break;
            }
            let source = self.buckets[from + distance].lock();
            let tags = source.tags();
            let of_home = tags.iter().filter(|tag| **tag & DISTANCE == distance as u64).count();
            left = left.saturating_sub(of_home);
            moving += tags.iter().filter(|tag| split.moves(**tag, distance)).count();
            if of_home > 0 {
                sources[distance - 1] = Some(source);
            }
        }
        let mut targets: [Option<LockedBucket<'_, S>>; REACH + 1] = std::array::from_fn(|_| None);
        let mut room = 0;
        for (distance, target) in targets.iter_mut().enumerate() {
            if room >= moving {
                break;
            }
            let bucket = target.insert(self.buckets[to + distance].lock());
            room += bucket.tags().iter().filter(|tag| **tag == 0).count();
        }
        if room < moving {
            // There is no room yet. There may be when keys have been dropped.
            return false;
        }
        let mut target = 0;
        for distance in 0..=REACH {
            let source = match distance {
                0 => Some(&mut *home),
                _ => sources[distance - 1].as_mut(),
            };
            let Some(source) = source else { continue };
            for (slot, tag) in source.tags().into_iter().enumerate() {
                if !split.moves(tag, distance) {
                    continue;
                }
                let empty = loop {
                    let empty = targets[target].as_mut().and_then(|bucket| {
                        let empty = bucket.empty();
                        empty.map(|slot| (bucket, slot))
                    });
                    match empty {
                        Some(empty) => break empty,
                        None => target += 1,
                    }
                };
                self.carry((source, slot), empty, (tag & !DISTANCE) | target as u64);
                if distance > 0 {
                    self.buckets[from].marks.fetch_sub(ONE_SPILLED, Ordering::Release);
                }
                if target > 0 {
                    self.buckets[to].marks.fetch_add(ONE_SPILLED, Ordering::Relaxed);
                }
            }
        }
        self.bring_home(from, home, &mut sources);
        self.publish(split);
        true
    }

    /// Moves the keys of a home that are in later buckets into the slots that its split has emptied: a key is found sooner
    /// at home.
    fn bring_home(
        &self,
        index: usize,
        home: &mut LockedBucket<'_, S>,
        later: &mut [Option<LockedBucket<'_, S>>; REACH],
    ) {
        for (before, bucket) in later.iter_mut().enumerate() {
            let Some(bucket) = bucket else { continue };
            for (slot, tag) in bucket.tags().into_iter().enumerate() {
                if tag == 0 || (tag & DISTANCE) as usize != before + 1 {
                    continue;
                }
                let Some(empty) = home.empty() else { return };
                self.carry((bucket, slot), (home, empty), tag & !DISTANCE);
                self.buckets[index].marks.fetch_sub(ONE_SPILLED, Ordering::Release);
            }
        }
    }

    /// Publishes one more home, under the locks of all keys that moved and of the buckets that they are in now.
    fn publish(&self, split: &Split) {
        self.copy_watermarks(split.from, split.to);
        self.shape.store(split.next.0, Ordering::Release);
        self.buckets.grown(split.to + 1 + REACH);
    }

    /// Moves a state to an empty slot of another bucket.
    fn carry(
        &self,
        (source, slot): (&mut LockedBucket<'_, S>, usize),
        (target, empty): (&mut LockedBucket<'_, S>, usize),
        tag: u64,
    ) {
        // States of the target may be of a later era than the state that is moved in. All are moved into that era again
        // when the target is entered, which does not change states that are already in it.
        target.set_era(self.era_of(source).min(self.era_of(target)));
        let state = source.take(slot);
        target.fill(empty, tag, state);
    }
}
