//! The table: states by fingerprint, in buckets of two cache lines, each with its own lock.
//!
//! A bucket has five slots and a lock, so that a decision on a known key touches one or two lines and waits only for
//! the few keys in the same bucket.
//!
//! **Which bucket.** A key belongs to the bucket that its fingerprint selects at the present size of the table: its
//! *home*. The home's lock is the key's lock: a thread that finds, creates or changes the state of a key holds it. If the
//! home is full, the key is stored in one of the next buckets. The home counts these keys, so that a search only looks
//! further if there are any. Locks are waited for from lower to higher buckets only, also by a decision on several keys,
//! which holds several locks. So threads cannot deadlock.
//!
//! **Size.** The table reserves address space for all of its keys when it is created, and uses only the first buckets at
//! first: memory that was not touched is not resident. It grows by linear hashing, one bucket at a time (`growth.rs`). A
//! split holds the lock of the home that it splits. So if a thread has locked a home, and it is still the key's home,
//! it stays the key's home until it is unlocked.
//!
//! **Writes.** A decision writes only to the bucket of its key. New and dropped keys are counted in stripes
//! (`counts.rs`), and fields that threads write are on other cache lines than fields that every decision reads. A denial
//! of a key that was denied before writes nothing: see [`Table::deny_unlocked`].
//!
//! This is the only file with unsafe code: states are in cells under a lock of a few bytes, in memory that the system
//! provides zeroed and in large pages. `cfg(loom)` replaces atomics and cells by those of loom; `scripts/loom` runs the
//! interleavings of this file.

#![expect(unsafe_code, reason = "measured: 16-byte states behind a lock in their own cache line")]

mod counts;
mod denials;
mod growth;
mod joint;
mod place;
mod sweep;

use std::any::TypeId;
use std::mem::MaybeUninit;
use std::ops::Deref;

use tallygate_core::{
    Algorithm, Answer, BucketState, Cost, FixedWindowState, Outcome, SlidingWindowCounterState,
    Tick,
};

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::{Mutex, MutexGuard, atomic},
};
#[cfg(not(loom))]
use std::{
    cell::UnsafeCell,
    sync::{Mutex, MutexGuard, atomic},
};

use atomic::{AtomicU32, AtomicU64, Ordering, fence};

use crate::clock::Clock;
use crate::lateness::counted_from;

use counts::Counts;
use denials::{Denials, are_noted};
use growth::{HomeCount, choice};
use sweep::Pass;

pub(crate) use joint::{LockedKey, Locks};
pub use place::WhenFull;
pub use sweep::Swept;

/// The number of slots of a bucket: with 16-byte states, a bucket is two cache lines.
const SLOTS: usize = if cfg!(loom) { 1 } else { 5 };

/// The largest distance of a key from its home, in buckets.
const REACH: usize = if cfg!(loom) { 1 } else { 31 };

/// How many percent of the slots a full table uses. At 60 %, one key in fifteen is stored away from its home, and the
/// furthest of five million keys about 16 buckets away. At 70 %, some keys would find no slot within reach.
const FILL: usize = 60;

/// The fewest homes that a table starts with if it can grow. It starts with less than twice as many.
const FIRST_HOMES: usize = 128;

/// The maximum number of homes of a table, because their number is stored in 32 bits. They hold 12 billion keys.
const MOST_HOMES: usize = u32::MAX as usize;

/// The part of a table that uses small pages until the table has grown to [`LARGE`] bytes. The rest uses large pages. So a
/// table with few keys takes little memory.
#[cfg(not(loom))]
const SMALL: usize = 4 << 20;
#[cfg(not(loom))]
const LARGE: usize = 32 << 20;

/// The bytes of a cache line, and how many lines of a bucket are prefetched: all lines if states have at most 40 bytes.
#[cfg(all(target_arch = "x86_64", not(loom)))]
const LINE: usize = 64;
#[cfg(all(target_arch = "x86_64", not(loom)))]
const PREFETCHED: usize = 4;

/// How many consecutive homes share a watermark, as a power of two. The watermarks of a table take 1/4 byte per key.
const HOMES_PER_WATERMARK: u32 = 3;

/// The number of eras for which watermarks are kept. A thread that is behind by one era writes to the watermarks of its
/// own era.
const ERAS: usize = 2;

/// The hash of a key. A table stores its first bits: see [`Table::slot_of`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Fingerprint(u128);

impl From<u128> for Fingerprint {
    fn from(hash: u128) -> Self {
        Self(hash)
    }
}

impl Fingerprint {
    /// Returns the hash.
    pub(crate) const fn hash(self) -> u128 {
        self.0
    }

    /// Returns its first bits as bytes: a table stores only these.
    pub(crate) fn known_bytes(self, bits: u32) -> impl Iterator<Item = u8> {
        self.0.to_be_bytes().into_iter().take(bits.div_ceil(8) as usize)
    }
}

/// The bits of a slot's tag that hold the distance of its key from home. The other 59 distinguish the keys of a bucket.
const DISTANCE: u64 = 0x1f;
const TAG_BITS: u32 = 64 - DISTANCE.count_ones();

/// There is no place for a new key: the table is full and rejects new keys, or other threads use all places within reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// A time, and how often the clock had been set back when it was read. The time between two set-backs is an *era*.
#[derive(Clone, Copy, Debug)]
pub struct Reading {
    pub(crate) now: Tick,
    set_backs: u32,
}

impl Reading {
    /// The count of set-backs for a time that the caller gave.
    const GIVEN: u32 = u32::MAX;

    /// Reads a clock.
    #[inline]
    pub(crate) fn of(clock: &impl Clock) -> Self {
        // Read the count first: a time that is read after it is never of an earlier era.
        let set_backs = clock.set_backs();
        Self { now: clock.now(), set_backs }
    }

    /// Returns how often the clock had been set back; `None` if the caller gave the time.
    pub(crate) fn set_backs(self) -> Option<u32> {
        (!self.is_given()).then_some(self.set_backs)
    }

    /// Returns whether the caller gave the time. Such a caller may be late, but never sets the clock back.
    #[inline]
    const fn is_given(self) -> bool {
        self.set_backs == Self::GIVEN
    }
}

/// The earliest possible reading.
impl Default for Reading {
    fn default() -> Self {
        Self { now: Tick(i64::MIN), set_backs: 0 }
    }
}

impl From<Tick> for Reading {
    #[inline]
    fn from(now: Tick) -> Self {
        Self { now, set_backs: Self::GIVEN }
    }
}

/// A value on its own cache lines, so that writing to it does not slow down threads that read the fields beside it.
/// There are two lines, because processors fetch them in pairs.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct OwnLines<T>(pub(crate) T);

impl<T> Deref for OwnLines<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.0
    }
}

/// The states of many keys.
///
/// Every decision reads the first fields. Of these, `shape` changes with a split, and `era` and `era_began` change when
/// the clock was set back. All other fields that threads write are in [`OwnLines`].
pub(crate) struct Table<S: 'static> {
    buckets: Pages<Bucket<S>>,
    /// The initial number of homes.
    first_homes: usize,
    /// The number of leading bits of a hash that are not in a tag, because the first home determines them.
    bits_before_tag: u32,
    /// The maximum number of homes. The buckets after them are for keys that are stored away from the last homes.
    most_homes: usize,
    /// The current number of homes, and the bits of a tag that choose among them: see [`HomeCount`].
    shape: AtomicU64,
    /// The number of bits of a key's hash that are stored.
    known_bits: u32,
    /// A mask of these bits.
    known: u128,
    when_full: WhenFull,
    /// The most set-backs that any caller has reported: the era.
    era: AtomicU32,
    /// The first time that was read in the era. It is locked while a new era begins.
    era_began: Mutex<Tick>,
    /// For each of the last eras and each group of homes, the latest time at which a key was dropped: see
    /// [`Table::floor`].
    watermarks: Box<[AtomicU64]>,
    /// The last denials of states that are not plain.
    denials: Denials,
    counts: Counts,
    /// Locked by the thread that splits buckets.
    splitting: OwnLines<BucketLock>,
    /// Locked by the thread that sweeps in the background.
    pass: OwnLines<Mutex<Pass>>,
}

/// The keys of a store: how many there are, and how many were dropped. Dropping a fresh key has no effect on decisions;
/// evicting a key loses the units that it had used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Keys that are stored now, idle ones included.
    pub keys: usize,
    /// Keys that were in use when the last complete [sweep](crate::RateLimiter::sweep) visited them: they had used units
    /// of their quota, or were charged since the sweep before it began. `None` before the first complete sweep.
    pub in_use: Option<usize>,
    /// Keys that were dropped because they were fresh.
    pub swept: u64,
    /// Keys that were dropped although they were not fresh, because the store was full.
    pub evicted: u64,
    /// New keys that were rejected because the store was full.
    pub rejected: u64,
    /// Units of settled costs that were beyond the bound on debt, and were dropped.
    pub debt_dropped: u64,
}

/// A key in a table: its home while the table had its first size, and its tag, which distinguishes it from other keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KeySlot {
    home: usize,
    tag: u64,
}

impl KeySlot {
    /// Returns in which of a number of shards the key is.
    pub(crate) const fn shard(self, shards: usize) -> usize {
        (self.tag >> 32) as usize % shards
    }
}

/// A key, and its home when it was looked up, so that a decision does not compute it again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lookup {
    pub(crate) spot: KeySlot,
    shape: HomeCount,
    home: usize,
}

/// Creates a table, and looks keys up.
impl<S: 'static> Table<S> {
    /// Creates a table with a maximum number of keys and a maximum number of stored bits per hash.
    pub(crate) fn new(known_bits: u32, max_keys: usize, when_full: WhenFull) -> Self {
        let homes = (max_keys.saturating_mul(100) / FILL).div_ceil(SLOTS).max(1);
        let doublings = (homes / FIRST_HOMES).checked_ilog2().unwrap_or(0);
        let first_homes = homes.div_ceil(1 << doublings);
        Self::of_homes(first_homes, doublings, known_bits, max_keys, when_full)
    }

    /// Creates a table with a first number of homes, which doubles a given number of times.
    fn of_homes(
        first_homes: usize,
        doublings: u32,
        known_bits: u32,
        max_keys: usize,
        when_full: WhenFull,
    ) -> Self {
        let most_homes = first_homes.checked_shl(doublings).filter(|most| *most <= MOST_HOMES);
        let most_homes = most_homes.expect("max_keys beyond memory");
        let bits_before_tag = first_homes.ilog2();
        let known_bits = known_bits.clamp(1, TAG_BITS + bits_before_tag);
        Self {
            buckets: Pages::new(most_homes + REACH),
            first_homes,
            bits_before_tag,
            most_homes,
            shape: AtomicU64::new(HomeCount::of(first_homes, first_homes).0),
            known_bits,
            known: u128::MAX << (u128::BITS - known_bits),
            when_full,
            era: AtomicU32::new(0),
            era_began: Mutex::new(Tick(i64::MIN)),
            watermarks: zeroed(ERAS * ((most_homes >> HOMES_PER_WATERMARK) + 1)),
            denials: Denials::of::<S>(),
            counts: Counts::new(max_keys),
            splitting: OwnLines(BucketLock::new()),
            pass: OwnLines(Mutex::new(Pass::NONE)),
        }
    }

    #[inline]
    fn shape(&self) -> HomeCount {
        HomeCount(self.shape.load(Ordering::Relaxed))
    }

    /// Returns how many buckets are in use: the homes, and those after them.
    fn in_use(&self) -> usize {
        self.shape().homes() + REACH
    }

    /// Returns the home of a key in a table of a shape.
    #[inline]
    fn home(&self, key: KeySlot, shape: HomeCount) -> usize {
        self.home_of(key.home, choice(key.tag >> self.bits_before_tag), shape)
    }

    /// Returns the home of a key, by its first home and the bits of its hash that choose among the others.
    #[inline]
    const fn home_of(&self, first: usize, choice: usize, shape: HomeCount) -> usize {
        let mask = shape.mask();
        let home = first + self.first_homes * (choice & mask);
        if home < shape.homes() { home } else { first + self.first_homes * (choice & (mask >> 1)) }
    }

    /// Locks the home of a key. It stays the key's home while it is locked, because a split would lock it.
    fn lock_home(&self, key: KeySlot) -> (usize, LockedBucket<'_, S>) {
        let index = self.home(key, self.shape());
        self.lock_home_after(key, index, self.buckets[index].lock())
    }

    /// Does the same after a bucket was locked that was the key's home a moment ago.
    #[inline]
    fn lock_home_after<'a>(
        &'a self,
        key: KeySlot,
        mut index: usize,
        mut home: LockedBucket<'a, S>,
    ) -> (usize, LockedBucket<'a, S>) {
        loop {
            // If the home was split before it was locked, this reads the shape after that split.
            let now = self.home(key, self.shape());
            if now == index {
                return (index, home);
            }
            drop(home);
            home = self.buckets[now].lock();
            index = now;
        }
    }

    /// Returns how many keys there are, and how many were dropped so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            keys: self.counts.keys(),
            in_use: self.keys_in_use(),
            swept: self.counts.sum(|stripe| &stripe.swept),
            evicted: self.counts.sum(|stripe| &stripe.evicted),
            rejected: self.counts.sum(|stripe| &stripe.rejected),
            debt_dropped: self.counts.sum(|stripe| &stripe.debt_dropped),
        }
    }

    /// Counts the units of a settled cost that were beyond the bound on debt.
    pub(crate) fn count_dropped_debt(&self, amount: u128) {
        let amount = u64::try_from(amount).unwrap_or(u64::MAX);
        self.counts.own().debt_dropped.fetch_add(amount, Ordering::Relaxed);
    }

    pub(crate) const fn max_keys(&self) -> usize {
        self.counts.max_keys
    }

    /// Returns how many bits of a hash the table stores of a key.
    pub(crate) const fn known_bits(&self) -> u32 {
        self.known_bits
    }

    /// Finds the home of a key, and starts to load the memory that a decision on it will need.
    #[inline]
    pub(crate) fn look_up(&self, key: Fingerprint) -> Lookup {
        let (spot, high) = self.slot_and_high(key);
        let shape = self.shape();
        let home = self.home_of(spot.home, choice(high), shape);
        self.buckets.prefetch(home);
        Lookup { spot, shape, home }
    }

    /// Returns the first home and the tag of a key.
    ///
    /// The first half of its hash, as a fraction of 1, is stretched over the first homes: the whole part is the home. The
    /// tag is 59 bits of the hash, from the first bit on that the first home does not determine. Together they
    /// determine the first bits of the hash (59 bits and the bits of the number of first homes), so that
    /// [`show`](Self::show) can restore them for a table of another size. A table for 400 keys or more has at least 128
    /// first homes, so the odds that any two of n keys are mistaken for one are at most n² / 2⁶⁷: for a million keys
    /// one in 147 million.
    ///
    /// The bits that choose among more homes are bits of the hash and not of a product. So the processor computes them
    /// while it multiplies for the first home, and can load the memory earlier.
    pub(crate) fn slot_of(&self, key: Fingerprint) -> KeySlot {
        self.slot_and_high(key).0
    }

    /// Returns the first home and the tag of a key, and the stored bits of the first half of its hash.
    #[inline]
    fn slot_and_high(&self, key: Fingerprint) -> (KeySlot, u64) {
        let hash = key.0 & self.known;
        let tail = (hash << self.bits_before_tag) >> u64::BITS;
        #[expect(clippy::cast_possible_truncation, reason = "the first halves, and below a usize")]
        let (high, tag, home) = {
            let high = (hash >> u64::BITS) as u64;
            (
                high,
                tail as u64,
                ((u128::from(high) * self.first_homes as u128) >> u64::BITS) as usize,
            )
        };
        // A tag is never 0. If it would be 0, a bit that chooses no home is set.
        (KeySlot { home, tag: (tag & !DISTANCE).max(DISTANCE + 1) }, high)
    }

    /// Restores the stored bits of a key's hash.
    fn key_at(&self, KeySlot { home, tag }: KeySlot) -> Fingerprint {
        // The least hash that belongs to the home, and how far hashes with the same tag are apart.
        let first = ((home as u128) << u64::BITS).div_ceil(self.first_homes as u128) << u64::BITS;
        let apart = 1_u128.checked_shl(u128::BITS - self.bits_before_tag).unwrap_or(0);
        let tail = u128::from(tag & !DISTANCE) << (u64::BITS - self.bits_before_tag);
        let key = (first & !apart.wrapping_sub(1)) | tail;
        // Each home has at most as many hashes as lie between two hashes with the same tag.
        Fingerprint(if key < first { key.wrapping_add(apart) } else { key })
    }

    /// Returns the indexes of the buckets for [`show`](Self::show), upward: so a key that moves while the table grows is
    /// shown before or after. A run of buckets has keys from all over the range of hashes: a smaller table that takes over
    /// keys in this order always has keys of all kinds to choose from when it evicts.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = usize> {
        (0..).take_while(|index| *index < self.in_use())
    }

    /// Returns whether a bucket ever had a key. It touches no memory that was not touched before.
    fn was_used(&self, index: usize) -> bool {
        self.buckets[index].marks.load(Ordering::Relaxed) & WAS_USED != 0
    }

    /// Calls a function with the keys of a bucket and their states. A caller that visits all buckets sees every key,
    /// except keys that were dropped and created again meanwhile: it may see these twice, the second time with the
    /// later state, or not at all.
    pub(crate) fn show(&self, index: usize, mut show: impl FnMut(Fingerprint, &S)) {
        if !self.was_used(index) {
            return;
        }
        let bucket = self.buckets[index].lock();
        for slot in bucket.filled() {
            let tag = bucket.tag(slot);
            let home = (index - (tag & DISTANCE) as usize) % self.first_homes;
            let key = self.key_at(KeySlot { home, tag });
            bucket.read(slot, |state| show(key, state));
        }
    }
}

/// Decisions on one key.
impl<S: 'static> Table<S> {
    /// Decides a check of a key that was looked up.
    ///
    /// The time of the decision is later than the reading if the state has changed since: the clock was read before the
    /// lock was taken, so the caller is late, and the key must not earn the same time twice.
    // Always inlined: it has one caller, and a call on the path of a known key can be measured.
    #[inline(always)]
    pub(crate) fn check<A: Algorithm<State = S>, T: Answer, E: From<Full>>(
        &self,
        rule: &A,
        lookup: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Result<T, E> {
        let bucket = &self.buckets[lookup.home];
        let has_denials = (is_plain::<S>() || are_noted::<S>()) && bucket.lock.has_denials();
        if has_denials {
            let denial = match is_plain::<S>() {
                true => self.deny_unlocked(rule, lookup, cost, reading),
                false => self.deny_as_noted(rule, lookup, cost, reading),
            };
            if let Some(denial) = denial {
                return Ok(denial);
            }
        }
        if let Some(home) = bucket.try_lock() {
            // Almost always: the table has not grown, the clock was not set back, the key is in its home.
            if self.shape() == lookup.shape && home.is_in_era(reading) {
                if let Some(slot) = home.find(lookup.spot.tag) {
                    let denials = (self, lookup, has_denials);
                    return Ok(home.check(rule, slot, reading.now, cost, denials));
                }
            }
            return self.check_elsewhere(rule, lookup, home, cost, reading).map_err(E::from);
        }
        self.check_contended(rule, lookup, cost, reading).map_err(E::from)
    }

    /// Decides a check of a key that is not in the home where it was looked up, or that is of another era. The home is
    /// locked.
    #[cold]
    #[inline(never)]
    fn check_elsewhere<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        lookup: Lookup,
        home: LockedBucket<'_, S>,
        cost: Cost,
        reading: Reading,
    ) -> Result<T, Full> {
        let now = reading.now;
        self.with_elsewhere(
            rule,
            lookup.spot,
            (lookup.home, home, lookup.shape),
            (reading, true),
            |state, at| counted_from(now, at, rule.decide::<T>(state, at, cost)),
        )
    }

    /// Decides a check of a key whose home is locked by another thread.
    #[cold]
    #[inline(never)]
    fn check_contended<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        lookup: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Result<T, Full> {
        let bucket = &self.buckets[lookup.home];
        let mut home = bucket.lock();
        if self.shape() == lookup.shape && home.is_in_era(reading) {
            if let Some(slot) = home.find(lookup.spot.tag) {
                let slot = home.bring_to_first_line(slot);
                return Ok(home.check(rule, slot, reading.now, cost, (self, lookup, true)));
            }
        }
        self.check_elsewhere(rule, lookup, home, cost, reading)
    }

    /// Denies a check without writing anything, if the last check of the key was denied and its state still denies this
    /// one. Returns `None` if it does not, or if another thread changes the bucket meanwhile: then the caller takes the
    /// lock.
    ///
    /// So any number of threads deny a client at once. The lock is a sequence lock: its word has a version, which every
    /// holder changes. The state is copied in between two equal readings of the word. Allowing a request always takes the
    /// lock, so a wrong copy could not allow more than the limit; there would have to be exactly 2²⁶ holders in between
    /// the two readings to get one.
    #[inline(never)]
    fn deny_unlocked<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        lookup: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Option<T> {
        let bucket = &self.buckets[lookup.home];
        let version = bucket.lock.begin_read()?;
        let slot = bucket.find_unlocked(lookup.spot.tag)?;
        if !version.is_denied(slot) || !bucket.is_in_era(reading) {
            return None;
        }
        let state = bucket.states[slot].load();
        // If the key had moved to another bucket, its tag would not be here.
        if !bucket.lock.is_unchanged(version) {
            return None;
        }
        let at = rule.decision_time(&state, reading.now);
        if rule.allows(&state, at, cost) {
            return None;
        }
        let mut after = copied(&state);
        let answer = rule.decide::<T>(&mut after, at, cost);
        // An algorithm can count its denials in its state.
        let is_denied = !answer.is_allowed() && are_equal(&state, &after);
        is_denied.then(|| counted_from(reading.now, at, answer))
    }

    /// Runs on a key's state, under its lock: on the state that is kept, or else on a new one, which is then kept unless
    /// it is still fresh.
    ///
    /// `run` gets the time to decide at: see [`check`](Self::check).
    pub(crate) fn with<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: KeySlot,
        reading: impl Into<Reading>,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        self.with_place(rule, key, reading.into(), true, run)
    }

    /// Does the same for an operation that only returns units. A full table does not evict a key for it, and does not
    /// keep the state of a new key.
    pub(crate) fn with_return<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: KeySlot,
        reading: Reading,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        self.with_place(rule, key, reading, false, run)
    }

    fn with_place<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: KeySlot,
        reading: Reading,
        evicts: bool,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        let index = self.home(key, self.shape());
        let home = self.buckets[index].lock();
        // No table has a shape without homes, so the key is searched for in its home.
        self.with_elsewhere(rule, key, (index, home, HomeCount::default()), (reading, evicts), run)
    }

    /// Does the same for a key that was not found in the bucket where it was looked up in a table of a shape. That bucket
    /// is locked.
    #[cold]
    #[inline(never)]
    fn with_elsewhere<'a, A: Algorithm<State = S>, R>(
        &'a self,
        rule: &A,
        key: KeySlot,
        (mut index, mut home, shape): (usize, LockedBucket<'a, S>, HomeCount),
        (mut reading, evicts): (Reading, bool),
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        if self.shape() != shape || !home.is_in_era(reading) {
            (index, home) = self.lock_home_after(key, index, home);
            reading = self.enter(rule, &mut home, reading);
            if let Some(slot) = home.find(key.tag) {
                return Ok(home.change(slot, |state| run_late(rule, state, reading.now, run)));
            }
        }
        // Acquire: a thread that sees that a key is gone also sees when it was dropped.
        if home.0.spilled(Ordering::Acquire) > 0 {
            if let Some((mut bucket, slot)) = self.find_beyond(index, &home, key) {
                let reading = self.enter(rule, &mut bucket, reading);
                return Ok(bucket.change(slot, |state| run_late(rule, state, reading.now, run)));
            }
        }
        self.with_new(rule, key, (index, home), (reading, evicts), run)
    }

    /// Reads a copy of a key's state, or the state it would start with, and changes nothing. The states of a bucket stay
    /// in their era.
    #[cold]
    pub(crate) fn look<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: KeySlot,
        reading: impl Into<Reading>,
        read: impl FnOnce(&mut S, Tick) -> R,
    ) -> R
    where
        S: Clone,
    {
        let reading = reading.into();
        let (index, home) = self.lock_home(key);
        let found = match home.find(key.tag) {
            Some(slot) => Some((self.era_of(&home), home.read(slot, S::clone))),
            None if home.0.spilled(Ordering::Acquire) > 0 => {
                let beyond = self.find_beyond(index, &home, key);
                beyond.map(|(bucket, slot)| (self.era_of(&bucket), bucket.read(slot, S::clone)))
            }
            None => None,
        };
        drop(home);
        let Some((era, mut state)) = found else {
            let reading = self.caught_up(self.era.load(Ordering::Acquire), reading);
            let now = reading.now.max(self.floor(index, reading));
            return read(&mut rule.initial(now), now);
        };
        let reading = self.caught_up(era, reading);
        if !reading.is_given() && era < reading.set_backs {
            rule.rebase_after_set_back(&mut state, reading.now);
        }
        run_late(rule, &mut state, reading.now, read)
    }

    /// Searches for a key in the buckets after its home, whose lock is held.
    #[cold]
    fn find_beyond(
        &self,
        index: usize,
        home: &LockedBucket<'_, S>,
        key: KeySlot,
    ) -> Option<(LockedBucket<'_, S>, usize)> {
        let mut left = home.0.spilled(Ordering::Relaxed);
        for distance in 1..=REACH {
            let bucket = self.buckets[index + distance].lock();
            if let Some(slot) = bucket.find(key.tag | distance as u64) {
                return Some((bucket, slot));
            }
            let tags = bucket.tags();
            let from_here = tags.iter().filter(|tag| **tag & DISTANCE == distance as u64).count();
            left = left.saturating_sub(from_here);
            if left == 0 {
                break;
            }
        }
        None
    }
}

/// Eras, for clocks that are set back.
impl<S: 'static> Table<S> {
    /// Enters a bucket with a reading: states of an earlier era are moved into that of the reading, and a reading of an
    /// earlier era is replaced. Returns the reading to continue with.
    #[inline]
    fn enter<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut LockedBucket<'_, S>,
        reading: Reading,
    ) -> Reading {
        if bucket.is_in_era(reading) {
            return reading;
        }
        self.enter_from_another_era(rule, bucket, reading)
    }

    #[cold]
    fn enter_from_another_era<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut LockedBucket<'_, S>,
        reading: Reading,
    ) -> Reading {
        let reading = self.caught_up(self.era_of(bucket), reading);
        if self.era_of(bucket) < reading.set_backs {
            self.note_set_back(reading);
            for slot in bucket.filled() {
                bucket.change(slot, |state| rule.rebase_after_set_back(state, reading.now));
            }
            bucket.set_era(reading.set_backs);
        }
        reading
    }

    /// Moves the states of a bucket into the era of a reading, and returns whether the bucket can be used with the
    /// reading. It cannot if the bucket is of a later era.
    #[inline]
    fn can_enter<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut LockedBucket<'_, S>,
        reading: Reading,
    ) -> bool {
        let is_later = !bucket.is_in_era(reading) && self.era_of(bucket) > reading.set_backs;
        if !is_later {
            self.enter(rule, bucket, reading);
        }
        !is_later
    }

    /// Returns the era of a bucket, of which the bucket has the last bits: the latest one with these bits.
    fn era_of(&self, bucket: &LockedBucket<'_, S>) -> u32 {
        let latest = self.era.load(Ordering::Acquire);
        latest.wrapping_sub(latest.wrapping_sub(bucket.0.era_bits()) & ERA_BITS)
    }

    /// Returns the reading, unless it is of an earlier era: then the clock was set back since it was read, and the first
    /// time of the present era is returned instead. That time has passed, so no key earns units by it.
    fn caught_up(&self, era: u32, reading: Reading) -> Reading {
        if reading.is_given() || era <= reading.set_backs {
            return reading;
        }
        let began = self.era_began();
        Reading { now: *began, set_backs: self.era.load(Ordering::Acquire) }
    }

    fn era_began(&self) -> MutexGuard<'_, Tick> {
        // The tick under the lock is complete, whatever panicked.
        self.era_began.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Begins a new era if a reading belongs to one. Returns whether the reading is the first of its era.
    pub(crate) fn note_set_back(&self, reading: Reading) -> bool {
        if reading.is_given() || self.era.load(Ordering::Acquire) >= reading.set_backs {
            return false;
        }
        let mut began = self.era_began();
        if self.era.load(Ordering::Acquire) >= reading.set_backs {
            return false;
        }
        *began = reading.now;
        for watermark in self.watermarks_of(reading.set_backs) {
            // Most were never written, and are not written now.
            if watermark.load(Ordering::Relaxed) > 0 {
                watermark.store(0, Ordering::Release);
            }
        }
        self.era.store(reading.set_backs, Ordering::Release);
        true
    }
}

/// Watermarks: when keys were dropped.
///
/// A thread may read the clock before a key is dropped, and look for the key afterwards. It must not find room that the
/// key had used already. So groups of homes share a watermark of when one of their keys was last dropped, and a new key
/// starts no earlier.
impl<S: 'static> Table<S> {
    fn watermarks_of(&self, era: u32) -> &[AtomicU64] {
        let count = self.watermarks.len() / ERAS;
        &self.watermarks[era as usize % ERAS * count..][..count]
    }

    /// Returns the time before which no new key of a home may start.
    #[inline]
    fn floor(&self, home: usize, reading: Reading) -> Tick {
        let watermarks = self.watermarks_of(self.era_to_note(reading));
        watermark_time(watermarks[home >> HOMES_PER_WATERMARK].load(Ordering::Relaxed))
    }

    /// Records that a key is gone from a bucket, whose lock is held, and the time up to which its state was used.
    fn forget(&self, index: usize, tag: u64, reading: Reading, at: Tick) {
        if tag == 0 {
            return;
        }
        let era = self.era_to_note(reading);
        let home = index - (tag & DISTANCE) as usize;
        let watermark = &self.watermarks_of(era)[home >> HOMES_PER_WATERMARK];
        if watermark.load(Ordering::Relaxed) < watermark_at(at) {
            watermark.fetch_max(watermark_at(at), Ordering::AcqRel);
        }
        if self.era.load(Ordering::Acquire) as usize >= era as usize + ERAS {
            // The clock was set back so often meanwhile that this watermark is of a later era. A time of an earlier one
            // would deny keys for too long; without it, one late thread may earn a little twice.
            watermark.store(0, Ordering::Release);
        }
        self.lower_spilled(index, tag);
    }

    /// Copies the watermarks of a home that is split to its new home.
    fn copy_watermarks(&self, from: usize, to: usize) {
        for era in 0..2 {
            let watermarks = self.watermarks_of(era);
            let at = watermarks[from >> HOMES_PER_WATERMARK].load(Ordering::Relaxed);
            let copy = &watermarks[to >> HOMES_PER_WATERMARK];
            if copy.load(Ordering::Relaxed) < at {
                copy.fetch_max(at, Ordering::AcqRel);
            }
        }
    }

    /// Records at its home that a key is gone from a later bucket, whose lock is held.
    fn lower_spilled(&self, index: usize, tag: u64) {
        let distance = (tag & DISTANCE) as usize;
        if distance > 0 {
            self.buckets[index - distance].marks.fetch_sub(ONE_SPILLED, Ordering::Release);
        }
    }

    /// Returns the era of a reading. A time that the caller gave counts to the current era.
    fn era_to_note(&self, reading: Reading) -> u32 {
        if reading.is_given() { self.era.load(Ordering::Acquire) } else { reading.set_backs }
    }
}

/// Returns a time as a watermark: in the same order, and 0 for the earliest time, because memory is zeroed.
const fn watermark_at(at: Tick) -> u64 {
    u64::from_ne_bytes(at.0.to_ne_bytes()) ^ (1 << 63)
}

const fn watermark_time(watermark: u64) -> Tick {
    Tick(i64::from_ne_bytes((watermark ^ (1 << 63)).to_ne_bytes()))
}

/// Returns the time from which on a key that is dropped may start again. The state of a fresh key that a late caller drops
/// may have changed after the caller read the clock.
fn dropped_at<A: Algorithm>(rule: &A, state: &A::State, now: Tick) -> Tick {
    if rule.is_fresh(state, now) { now.max(rule.last_change(state)) } else { now }
}

/// Runs a function on a state, at `now` or at its last change if that is later.
#[inline]
fn run_late<A: Algorithm, R>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    run: impl FnOnce(&mut A::State, Tick) -> R,
) -> R {
    let at = rule.decision_time(state, now);
    run(state, at)
}

impl<S: 'static> Drop for Table<S> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<S>() {
            for bucket in &self.buckets[..self.in_use()] {
                let mut bucket = bucket.lock();
                for slot in 0..SLOTS {
                    bucket.clear(slot);
                }
            }
        }
    }
}

#[repr(C, align(64))]
struct Bucket<S: 'static> {
    lock: BucketLock,
    /// From the lowest bit: the number of keys of this home that are in later buckets (8 bits), whether the bucket ever
    /// had a key (1 bit), and the lowest bits of the era that its states are in (23 bits).
    ///
    /// The number of keys is raised under the home's lock before the key is placed, and lowered by the thread that
    /// dropped it, so it is never too low. The other fields change under the lock.
    marks: AtomicU32,
    /// For each slot, 0 if it is empty, or the tag of its key with the distance from home. They are side by side, so
    /// that a search reads one line.
    tags: [AtomicU64; SLOTS],
    states: [StateCell<S>; SLOTS],
}

const ONE_SPILLED: u32 = 1;
const SPILLED: u32 = 0xff;
const WAS_USED: u32 = 1 << 8;
const ERA_SHIFT: u32 = 9;
const ERA_BITS: u32 = u32::MAX >> ERA_SHIFT;

// Safety: whole states are only reached through a `LockedBucket`, which exists while the lock is held. So states are moved
// between threads (S: Send), but no two threads see one at the same time. Tags and the words of plain states are read
// without the lock, and are atomics.
unsafe impl<S: Send + 'static> Sync for Bucket<S> {}
unsafe impl<S: Send + 'static> Send for Bucket<S> {}

impl<S: 'static> Bucket<S> {
    /// Locks the bucket, and waits while another thread has it.
    #[inline]
    fn lock(&self) -> LockedBucket<'_, S> {
        self.lock.lock();
        LockedBucket(self)
    }

    /// Locks the bucket if no other thread has it.
    #[inline]
    fn try_lock(&self) -> Option<LockedBucket<'_, S>> {
        self.lock.try_lock().then(|| LockedBucket(self))
    }

    /// Returns how many keys of this home are in later buckets.
    #[inline]
    fn spilled(&self, ordering: Ordering) -> usize {
        (self.marks.load(ordering) & SPILLED) as usize
    }

    fn era_bits(&self) -> u32 {
        self.marks.load(Ordering::Relaxed) >> ERA_SHIFT
    }

    /// Returns whether the states are in the era of a reading.
    #[inline]
    fn is_in_era(&self, reading: Reading) -> bool {
        reading.is_given() || self.era_bits() == reading.set_backs & ERA_BITS
    }

    /// Searches for a tag without the lock.
    fn find_unlocked(&self, tag: u64) -> Option<usize> {
        self.tags.iter().position(|here| here.load(Ordering::Relaxed) == tag)
    }
}

/// The lock of a bucket, which is also a sequence lock. From the lowest bit: whether it is locked, for each slot
/// whether its last check was denied, and a version that changes whenever the bucket is unlocked.
#[derive(Debug)]
struct BucketLock(AtomicU32);

impl BucketLock {
    const LOCKED: u32 = 1;
    const DENIED: u32 = 0b11_1110;
    const VERSION: u32 = 1 << 6;

    fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    const fn denied(slot: usize) -> u32 {
        2 << slot
    }

    /// The order of locks.
    fn address(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    #[inline]
    fn lock(&self) {
        if !self.try_lock() {
            self.wait();
        }
    }

    /// Takes the lock if it is free. If it is not, nothing is written, and its holder keeps the cache line.
    #[inline]
    fn try_lock(&self) -> bool {
        let (word, locked) = (self.0.load(Ordering::Relaxed), Self::LOCKED);
        let is_taken = word & locked == 0
            && self
                .0
                .compare_exchange(word, word | locked, Ordering::Acquire, Ordering::Relaxed)
                .is_ok();
        // A thread that reads without the lock and sees a write of this holder must see that the bucket was locked.
        fence(Ordering::Release);
        is_taken
    }

    #[inline]
    fn unlock(&self) {
        // Only the holder changes the word, so it need not be read and written in one step.
        self.0.store(self.next_version().0, Ordering::Release);
    }

    /// Returns the word that the lock has after it is unlocked. The lock is held.
    #[inline]
    fn next_version(&self) -> Version {
        Version(self.0.load(Ordering::Relaxed).wrapping_add(Self::VERSION - Self::LOCKED))
    }

    /// Waits for the lock and takes it.
    ///
    /// A waiting thread does not touch the lock's cache line most of the time, so that the holder can lock and unlock
    /// it several times before the line moves. After a while, the thread yields the processor, which a descheduled
    /// holder needs.
    #[cfg(not(loom))]
    #[cold]
    fn wait(&self) {
        let (mut pauses, mut yields, mut nap) = (FEWEST_PAUSES, 0, SHORTEST_NAP);
        loop {
            if pauses <= MOST_PAUSES {
                (0..pauses).for_each(|_| std::hint::spin_loop());
                pauses *= 2;
            } else if yields < YIELDS {
                std::thread::yield_now();
                yields += 1;
            } else {
                // Many threads wait. If they only yielded, the holder would rarely get the processor.
                std::thread::sleep(nap);
                nap = (2 * nap).min(LONGEST_NAP);
            }
            if self.try_lock() {
                return;
            }
        }
    }

    #[cfg(loom)]
    fn wait(&self) {
        while !self.try_lock() {
            loom::thread::yield_now();
        }
    }

    /// Returns whether the last check of any slot was denied.
    #[inline]
    fn has_denials(&self) -> bool {
        self.0.load(Ordering::Relaxed) & Self::DENIED != 0
    }

    /// Begins to read without the lock, unless the bucket is locked.
    #[inline]
    fn begin_read(&self) -> Option<Version> {
        let word = self.0.load(Ordering::Acquire);
        (word & Self::LOCKED == 0).then_some(Version(word))
    }

    /// Returns whether no thread has locked the bucket since a read began.
    #[inline]
    fn is_unchanged(&self, version: Version) -> bool {
        // All earlier reads happen before this one.
        fence(Ordering::Acquire);
        self.0.load(Ordering::Relaxed) == version.0
    }

    /// Returns whether the last check of a slot was denied. The lock is held.
    fn was_denied(&self, slot: usize) -> bool {
        Version(self.0.load(Ordering::Relaxed)).is_denied(slot)
    }

    /// Records whether the last check of a slot was denied. The lock is held.
    #[inline]
    fn set_denied(&self, slot: usize, is_denied: bool) {
        let (word, bit) = (self.0.load(Ordering::Relaxed), Self::denied(slot));
        let new = if is_denied { word | bit } else { word & !bit };
        if new != word {
            self.0.store(new, Ordering::Relaxed);
        }
    }
}

/// The word of a bucket's lock when a read without the lock began.
#[derive(Clone, Copy, Debug)]
struct Version(u32);

impl Version {
    const fn is_denied(self, slot: usize) -> bool {
        self.0 & BucketLock::denied(slot) != 0
    }
}

/// The waiting of a thread for a lock: first pauses of the processor, twice as many each time, then yields, then
/// sleeps, twice as long each time.
#[cfg(not(loom))]
const FEWEST_PAUSES: u32 = 8;
#[cfg(not(loom))]
const MOST_PAUSES: u32 = 256;
#[cfg(not(loom))]
const YIELDS: u32 = 8;
#[cfg(not(loom))]
const SHORTEST_NAP: std::time::Duration = std::time::Duration::from_micros(50);
#[cfg(not(loom))]
const LONGEST_NAP: std::time::Duration = std::time::Duration::from_millis(4);

/// A bucket whose lock is held. Dropping it unlocks the bucket, also when a decision panics.
struct LockedBucket<'a, S: 'static>(&'a Bucket<S>);

impl<S: 'static> Drop for LockedBucket<'_, S> {
    #[inline]
    fn drop(&mut self) {
        self.0.lock.unlock();
    }
}

impl<S: 'static> LockedBucket<'_, S> {
    /// Returns the tag of a slot.
    #[inline]
    fn tag(&self, slot: usize) -> u64 {
        #[cfg(not(loom))]
        return self.0.tags[slot].load(Ordering::Relaxed);
        // Safety: tags change under the lock only. Loom checks it.
        #[cfg(loom)]
        return unsafe { self.0.tags[slot].unsync_load() };
    }

    #[inline]
    fn tags(&self) -> [u64; SLOTS] {
        std::array::from_fn(|slot| self.tag(slot))
    }

    #[inline]
    fn set_tag(&mut self, slot: usize, tag: u64) {
        self.0.tags[slot].store(tag, Ordering::Relaxed);
    }

    /// Returns the slots that have a state.
    fn filled(&self) -> impl Iterator<Item = usize> + use<S> {
        let tags = self.tags();
        (0..SLOTS).filter(move |slot| tags[*slot] != 0)
    }

    /// Returns the slot with a tag.
    #[inline]
    fn find(&self, tag: u64) -> Option<usize> {
        // Compare all of them without branches: a branch for each would be mispredicted, which is only found out when
        // the memory is loaded.
        let mut found = SLOTS;
        for (slot, here) in self.tags().into_iter().enumerate() {
            found = if here == tag { slot } else { found };
        }
        (found < SLOTS).then_some(found)
    }

    /// Returns an empty slot.
    #[inline]
    fn empty(&self) -> Option<usize> {
        self.tags().iter().position(|tag| *tag == 0)
    }

    /// Returns whether the states are in the era of a reading.
    #[inline]
    fn is_in_era(&self, reading: Reading) -> bool {
        self.0.is_in_era(reading)
    }

    fn set_era(&mut self, era: u32) {
        // Other threads may change the number of keys in later buckets meanwhile.
        let change = (era & ERA_BITS).wrapping_sub(self.0.era_bits());
        if change != 0 {
            self.0.marks.fetch_add(change << ERA_SHIFT, Ordering::Relaxed);
        }
    }

    /// Reads the state in a slot that has one.
    #[inline]
    fn read<R>(&self, slot: usize, read: impl FnOnce(&S) -> R) -> R {
        debug_assert_ne!(self.tag(slot), 0);
        // Safety: the lock is held, and callers name only slots with a tag: these have a state.
        unsafe { self.0.states[slot].read(read) }
    }

    /// Changes the state in a slot that has one. If `change` panics, a plain state does not change.
    #[inline]
    fn change<R>(&mut self, slot: usize, change: impl FnOnce(&mut S) -> R) -> R {
        debug_assert_ne!(self.tag(slot), 0);
        // Safety: as above, and `&mut self` makes this the only reference to the state.
        unsafe { self.0.states[slot].change(change) }
    }

    /// Decides a check of a key that was looked up in a table, by the slot of the key, and unlocks the bucket.
    /// `has_denials` is whether a slot of the bucket may be recorded as denied.
    #[inline(always)]
    fn check<A: Algorithm<State = S>, T: Answer>(
        mut self,
        rule: &A,
        slot: usize,
        now: Tick,
        cost: Cost,
        (table, lookup, has_denials): (&Table<S>, Lookup, bool),
    ) -> T {
        if !is_plain::<S>() {
            let answer: T = self.change(slot, |state| decide_in_full(rule, state, now, cost));
            if are_noted::<S>() && (has_denials || !answer.is_allowed()) {
                table.note_denial(lookup, &self, slot, !answer.is_allowed());
            }
            return answer;
        }
        let mut state = self.read(slot, copied);
        let at = rule.decision_time(&state, now);
        let shadow_denied_by = match T::HAS_DETAILS {
            true => rule.denying_limit(&state, at, cost, true),
            false => None,
        };
        let is_allowed = rule.decide::<bool>(&mut state, at, cost);
        // Safety: the lock is held, `self` is the only access under it, and a plain state needs no drop.
        unsafe { self.0.states[slot].write(copied(&state)) };
        if !is_allowed || has_denials {
            self.0.lock.set_denied(slot, !is_allowed);
        }
        // The details are computed from the copy, while other threads decide.
        drop(self);
        let outcome = if is_allowed { Outcome::Charged(cost) } else { Outcome::Denied(cost) };
        match T::HAS_DETAILS {
            true => details(rule, &state, (now, at), outcome, shadow_denied_by),
            false => T::from_outcome(rule, &state, at, outcome, shadow_denied_by),
        }
    }

    /// Moves the state of a slot to the cache line of the lock, if it fits there, so that threads that contend for a
    /// key move one line instead of two. Returns its new slot.
    fn bring_to_first_line(&mut self, slot: usize) -> usize {
        if slot == 0 || !is_plain::<S>() || size_of::<S>() > 16 {
            return slot;
        }
        let (tag, first) = (self.tag(slot), self.tag(0));
        let state = self.take(slot);
        if first != 0 {
            let other = self.take(0);
            self.fill(slot, first, other);
        }
        self.fill(0, tag, state);
        0
    }

    /// Fills a slot, and drops the state that was there.
    fn put(&mut self, slot: usize, tag: u64, state: S) {
        self.clear(slot);
        self.fill(slot, tag, state);
    }

    /// Fills an empty slot.
    #[inline]
    fn fill(&mut self, slot: usize, tag: u64, state: S) {
        debug_assert_eq!(self.tag(slot), 0);
        if self.0.marks.load(Ordering::Relaxed) & WAS_USED == 0 {
            self.0.marks.fetch_or(WAS_USED, Ordering::Relaxed);
        }
        // Safety: the lock is held, `&mut self` makes this the only access, and there is no state to be dropped.
        unsafe { self.0.states[slot].write(state) };
        self.set_tag(slot, tag);
    }

    /// Empties a slot; returns the tag that was there.
    fn clear(&mut self, slot: usize) -> u64 {
        let tag = self.tag(slot);
        if tag != 0 {
            drop(self.take(slot));
        }
        tag
    }

    /// Takes the state out of a slot that has one.
    fn take(&mut self, slot: usize) -> S {
        debug_assert_ne!(self.tag(slot), 0);
        self.set_tag(slot, 0);
        // Safety: it had a tag, so it has a state. The tag is gone, so the state is not used again.
        unsafe { self.0.states[slot].take() }
    }
}

/// Decides a check under the lock.
///
/// This is a separate function, with its arguments in registers. The usual answer is written to where the caller reads
/// it, because copying the answer would take longer than writing it.
#[inline(never)]
fn decide_in_full<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
) -> T {
    let at = rule.decision_time(state, now);
    if at > now {
        return counted_from(now, at, rule.decide::<T>(state, at, cost));
    }
    rule.decide::<T>(state, at, cost)
}

/// Creates the answer of a decision that was made at `at`, for a caller that read `now`.
#[inline(never)]
fn details<A: Algorithm, T: Answer>(
    rule: &A,
    state: &A::State,
    (now, at): (Tick, Tick),
    outcome: Outcome,
    shadow_denied_by: Option<usize>,
) -> T {
    if at > now {
        let answer = T::from_outcome(rule, state, at, outcome, shadow_denied_by);
        return counted_from(now, at, answer);
    }
    T::from_outcome(rule, state, at, outcome, shadow_denied_by)
}

/// Returns whether a state is *plain*: some words of 64 bits, without padding, of which all values are valid, and nothing
/// to drop. It can then be copied word by word without the lock.
#[inline(always)]
fn is_plain<S: 'static>() -> bool {
    const {
        assert!(size_of::<BucketState>() == 2 * 8 && align_of::<BucketState>() == 8);
        assert!(size_of::<FixedWindowState>() == 3 * 8 && align_of::<FixedWindowState>() == 8);
        assert!(size_of::<SlidingWindowCounterState>() == 4 * 8);
        assert!(align_of::<SlidingWindowCounterState>() == 8);
    }
    let state = TypeId::of::<S>();
    state == TypeId::of::<BucketState>()
        || state == TypeId::of::<FixedWindowState>()
        || state == TypeId::of::<SlidingWindowCounterState>()
}

/// Returns a word of a plain state.
#[inline(always)]
fn word<S: 'static>(state: &S, index: usize) -> u64 {
    assert!(is_plain::<S>() && index < size_of::<S>() / 8);
    // Safety: a plain state consists of words.
    unsafe { std::ptr::from_ref(state).cast::<u64>().add(index).read() }
}

/// Creates a plain state from its words.
#[inline(always)]
fn from_words<S: 'static>(word: impl Fn(usize) -> u64) -> S {
    assert!(is_plain::<S>());
    let mut state = MaybeUninit::<S>::uninit();
    for index in 0..size_of::<S>() / 8 {
        // Safety: a plain state consists of words.
        unsafe { state.as_mut_ptr().cast::<u64>().add(index).write(word(index)) };
    }
    // Safety: all of its words are written, and all of their values are valid.
    unsafe { state.assume_init() }
}

/// Copies a plain state.
#[inline(always)]
fn copied<S: 'static>(state: &S) -> S {
    from_words(|index| word(state, index))
}

/// Returns whether two plain states are equal.
fn are_equal<S: 'static>(one: &S, other: &S) -> bool {
    (0..size_of::<S>() / 8).all(|index| word(one, index) == word(other, index))
}

/// A place for a state. Plain states are written word by word with atomics, since threads read them without the lock.
#[cfg(not(loom))]
#[repr(transparent)]
struct StateCell<S>(UnsafeCell<MaybeUninit<S>>);

#[cfg(not(loom))]
impl<S: 'static> StateCell<S> {
    #[inline(always)]
    fn words(&self) -> &[AtomicU64] {
        assert!(is_plain::<S>());
        // Safety: a plain state consists of aligned words, and a cell is zeroed before it has one. No word is written other
        // than through this function.
        unsafe { std::slice::from_raw_parts(self.0.get().cast::<AtomicU64>(), size_of::<S>() / 8) }
    }

    /// Copies a plain state without the lock. The copy is only meaningful if the lock was not taken meanwhile.
    #[inline]
    fn load(&self) -> S {
        let words = self.words();
        from_words(|index| words[index].load(Ordering::Relaxed))
    }

    /// Reads the state.
    ///
    /// # Safety
    /// There is a state, and the lock is held.
    #[inline(always)]
    unsafe fn read<R>(&self, read: impl FnOnce(&S) -> R) -> R {
        // Safety: as the caller says. Threads without the lock only read.
        read(unsafe { (*self.0.get()).assume_init_ref() })
    }

    /// Changes the state.
    ///
    /// # Safety
    /// There is a state, the lock is held, and this is the only access under it.
    #[inline(always)]
    unsafe fn change<R>(&self, change: impl FnOnce(&mut S) -> R) -> R {
        if !is_plain::<S>() {
            // Safety: as the caller says.
            return change(unsafe { (*self.0.get()).assume_init_mut() });
        }
        // Safety: as the caller says.
        let mut state = unsafe { self.read(copied) };
        let result = change(&mut state);
        // Safety: as the caller says, and a plain state needs no drop.
        unsafe { self.write(state) };
        result
    }

    /// Writes a state, without dropping one that was there.
    ///
    /// # Safety
    /// The lock is held, and this is the only access under it.
    #[inline(always)]
    unsafe fn write(&self, state: S) {
        if !is_plain::<S>() {
            // Safety: as the caller says.
            unsafe { (*self.0.get()).write(state) };
            return;
        }
        for (index, to) in self.words().iter().enumerate() {
            to.store(word(&state, index), Ordering::Relaxed);
        }
    }

    /// Takes the state.
    ///
    /// # Safety
    /// There is a state, the lock is held, and the state is not used again.
    #[inline]
    unsafe fn take(&self) -> S {
        // Safety: as the caller says. Threads without the lock only read.
        unsafe { (*self.0.get()).assume_init_read() }
    }
}

/// Under loom, a place has words that it follows, and a cell that it follows.
#[cfg(loom)]
struct StateCell<S> {
    whole: UnsafeCell<MaybeUninit<S>>,
    words: Vec<AtomicU64>,
}

#[cfg(loom)]
impl<S: 'static> StateCell<S> {
    fn new() -> Self {
        let words = if is_plain::<S>() { size_of::<S>() / 8 } else { 0 };
        Self {
            whole: UnsafeCell::new(MaybeUninit::uninit()),
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    fn load(&self) -> S {
        from_words(|index| self.words[index].load(Ordering::Relaxed))
    }

    unsafe fn read<R>(&self, read: impl FnOnce(&S) -> R) -> R {
        match is_plain::<S>() {
            // Safety: words change under the lock only. Loom checks it.
            true => read(&from_words(|index| unsafe { self.words[index].unsync_load() })),
            // Safety: as the caller says, and loom checks it.
            false => self.whole.with(|state| read(unsafe { (*state).assume_init_ref() })),
        }
    }

    unsafe fn change<R>(&self, change: impl FnOnce(&mut S) -> R) -> R {
        if !is_plain::<S>() {
            // Safety: as the caller says, and loom checks it.
            return self.whole.with_mut(|state| change(unsafe { (*state).assume_init_mut() }));
        }
        // Safety: as the caller says.
        unsafe {
            let mut state = self.read(copied);
            let result = change(&mut state);
            self.write(state);
            result
        }
    }

    unsafe fn write(&self, state: S) {
        if is_plain::<S>() {
            for (index, to) in self.words.iter().enumerate() {
                to.store(word(&state, index), Ordering::Relaxed);
            }
        } else {
            // Safety: as the caller says, and loom checks it.
            self.whole.with_mut(|cell| _ = unsafe { (*cell).write(state) });
        }
    }

    unsafe fn take(&self) -> S {
        match is_plain::<S>() {
            // Safety: as the caller says.
            true => unsafe { self.read(copied) },
            // Safety: as the caller says, and loom checks it.
            false => self.whole.with_mut(|state| unsafe { (*state).assume_init_read() }),
        }
    }
}

/// Returns zeros, resident only where they are written.
#[cfg(not(loom))]
fn zeroed(count: usize) -> Box<[AtomicU64]> {
    use std::alloc::{Layout, alloc_zeroed, handle_alloc_error};

    let Ok(layout) = Layout::array::<AtomicU64>(count) else { return Box::default() };
    if layout.size() == 0 {
        return Box::default();
    }
    // Safety: the size is not 0.
    let memory = unsafe { alloc_zeroed(layout) }.cast::<AtomicU64>();
    if memory.is_null() {
        handle_alloc_error(layout);
    }
    // Safety: the memory has the layout of the slice, and zero is a valid atomic.
    unsafe { Box::from_raw(std::ptr::slice_from_raw_parts_mut(memory, count)) }
}

#[cfg(loom)]
fn zeroed(count: usize) -> Box<[AtomicU64]> {
    (0..count).map(|_| AtomicU64::new(0)).collect()
}

/// Buckets in memory that the system zeroes, that is resident only where it was touched, and in large pages where the
/// system has them.
#[cfg(not(loom))]
struct Pages<T> {
    memory: memmap2::MmapMut,
    length: usize,
    holds: std::marker::PhantomData<T>,
}

#[cfg(not(loom))]
impl<S: 'static> Pages<Bucket<S>> {
    fn new(length: usize) -> Self {
        const {
            assert!(align_of::<Bucket<S>>() <= 4096, "pages are aligned to at least 4096");
        }
        let bytes = length.checked_mul(size_of::<Bucket<S>>()).expect("max_keys beyond memory");
        let memory = memmap2::MmapMut::map_anon(bytes).expect("no memory for max_keys");
        #[cfg(target_os = "linux")]
        {
            // Without large pages it works as well, only slower.
            let small = SMALL.min(bytes);
            let _ = memory.advise_range(memmap2::Advice::NoHugePage, 0, small);
            if small < bytes {
                let _ = memory.advise_range(memmap2::Advice::HugePage, small, bytes - small);
            }
        }
        Self { memory, length, holds: std::marker::PhantomData }
    }

    /// Is called when this many buckets are in use.
    #[inline]
    fn grown(&self, in_use: usize) {
        #[cfg(target_os = "linux")]
        if in_use == LARGE / size_of::<Bucket<S>>() {
            // The table is large now: the system may put its first part into large pages too.
            let _ = self.memory.advise_range(memmap2::Advice::HugePage, 0, SMALL);
        }
        #[cfg(not(target_os = "linux"))]
        let _ = in_use;
    }

    #[inline]
    fn prefetch(&self, index: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let bucket = self.memory.as_ptr().cast::<Bucket<S>>().wrapping_add(index).cast::<i8>();
            for line in 0..size_of::<Bucket<S>>().div_ceil(LINE).min(PREFETCHED) {
                // Safety: a prefetch reads nothing that can be observed, at any address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(bucket.wrapping_add(LINE * line)) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = index;
    }
}

#[cfg(not(loom))]
impl<S: 'static> Deref for Pages<Bucket<S>> {
    type Target = [Bucket<S>];

    #[inline]
    fn deref(&self) -> &[Bucket<S>] {
        // Safety: the memory is page-aligned, as long as `length` buckets, mapped as long as `self` exists, and was zeroed,
        // which is a valid bucket: not locked, nothing spilled, never used, in the first era, no tags, so no states. It is
        // only written through the cells and atomics of the buckets.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<Bucket<S>>(), self.length) }
    }
}

/// Under loom, buckets are objects that it follows.
#[cfg(loom)]
struct Pages<T>(Vec<T>);

#[cfg(loom)]
impl<S: 'static> Pages<Bucket<S>> {
    fn new(length: usize) -> Self {
        let bucket = |_| Bucket {
            lock: BucketLock::new(),
            marks: AtomicU32::new(0),
            tags: std::array::from_fn(|_| AtomicU64::new(0)),
            states: std::array::from_fn(|_| StateCell::new()),
        };
        Self((0..length).map(bucket).collect())
    }

    fn prefetch(&self, _: usize) {}

    fn grown(&self, _: usize) {}
}

#[cfg(loom)]
impl<T> Deref for Pages<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        &self.0
    }
}

#[cfg(all(test, not(loom)))]
mod denial_tests;
#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use std::mem::offset_of;

    use super::*;

    /// The stored bits of a key are enough for any other table, smaller or larger, to find the key by its whole hash.
    #[test]
    fn keys_can_be_restored_for_a_table_of_any_size() {
        let table = |bits, keys| Table::<()>::new(bits, keys, WhenFull::EvictLeastUsed);
        for keys in [1, 2, 3, 7, 100, 12_345, 5_000_000] {
            let one = table(u128::BITS, keys);
            for other_keys in [1, 5, 99, 1_000, 54_321, 20_000_000] {
                let other = table(one.known_bits(), other_keys);
                let mut hash = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835_u128;
                for _ in 0..200 {
                    hash =
                        hash.wrapping_mul(0x2360_ed05_1fc6_5da4_4385_df64_9fcc_f645) ^ (hash >> 67);
                    let key = Fingerprint(hash);
                    let restored = one.key_at(one.slot_of(key));
                    assert_eq!(restored, Fingerprint(hash & one.known), "{keys} keys");
                    assert_eq!(
                        other.slot_of(restored),
                        other.slot_of(key),
                        "{keys} keys to {other_keys}"
                    );
                }
            }
        }
    }

    type Buckets = Table<BucketState>;

    /// The cache lines of a field, in pairs, since processors fetch them in pairs.
    fn lines(offset: usize, size: usize) -> std::ops::RangeInclusive<usize> {
        offset / 128..=(offset + size - 1) / 128
    }

    /// Fields that threads write while others decide are on other cache lines than fields that every decision reads.
    #[test]
    fn no_field_that_decisions_read_shares_a_cache_line_with_one_that_threads_write() {
        let read = [
            (
                "buckets",
                lines(offset_of!(Buckets, buckets), size_of::<Pages<Bucket<BucketState>>>()),
            ),
            ("first_homes", lines(offset_of!(Buckets, first_homes), 8)),
            ("bits_before_tag", lines(offset_of!(Buckets, bits_before_tag), 4)),
            ("shape", lines(offset_of!(Buckets, shape), 8)),
            ("known", lines(offset_of!(Buckets, known), 16)),
            ("era", lines(offset_of!(Buckets, era), 4)),
        ];
        let written = [
            ("splitting", lines(offset_of!(Buckets, splitting), size_of::<BucketLock>())),
            ("pass", lines(offset_of!(Buckets, pass), size_of::<Mutex<Pass>>())),
        ];
        let counts = offset_of!(Buckets, counts);
        let written = written.into_iter().chain(
            counts::written().map(|(name, offset, size)| (name, lines(counts + offset, size))),
        );
        assert_eq!(align_of::<Buckets>() % 128, 0);
        for (name, written) in written {
            for (other, read) in &read {
                let apart = written.end() < read.start() || read.end() < written.start();
                assert!(apart, "{name} is written, and {other} is read by every decision");
            }
        }
        assert_eq!(counts::STRIPE_BYTES % 128, 0, "stripes share no lines");
        for distance in counts::distances() {
            assert!(
                distance >= 128,
                "a new key reads a line that other threads write for each key"
            );
        }
    }

    /// A bucket is two lines. The first has all that a search reads, and the state that threads contend for.
    #[test]
    fn a_bucket_is_two_cache_lines_and_its_first_slot_is_beside_the_lock() {
        type One = Bucket<BucketState>;
        assert_eq!((size_of::<One>(), align_of::<One>()), (128, 64));
        assert_eq!(offset_of!(One, lock), 0);
        assert!(offset_of!(One, marks) + 4 <= 64);
        assert!(offset_of!(One, tags) + 8 * SLOTS <= 64);
        assert!(offset_of!(One, states) + size_of::<BucketState>() <= 64);
        assert_eq!(size_of::<StateCell<BucketState>>(), 16);
    }

    #[test]
    fn plain_states_are_copied_exactly() {
        let policy = tallygate_core::Policy::token_bucket(7).per(tallygate_core::Ticks(10));
        let limit = policy.limit().expect("valid");
        let tallygate_core::Machine::Bucket(rule) = limit.machine() else { unreachable!() };
        let state = rule.with_used(tallygate_core::Used::whole(3), Tick(5));
        assert_eq!(copied(&state), state);
        assert!(are_equal(&state, &copied(&state)));
        assert!(!are_equal(&state, &rule.with_used(tallygate_core::Used::whole(4), Tick(5))));
        assert!(is_plain::<BucketState>() && !is_plain::<BucketState<u128>>());
        assert!(!is_plain::<tallygate_core::SlidingWindowLogState>() && !is_plain::<[u64; 2]>());
    }
}
