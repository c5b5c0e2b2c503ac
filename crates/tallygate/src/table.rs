//! The table: states by fingerprint, in buckets of two cache lines, each with a lock of its own.
//!
//! A bucket holds five slots and its lock, so that a decision on a known key touches one or two
//! lines and waits only for the few keys that share them.
//!
//! The address space is reserved for the most keys when the table is made, and only its first buckets are used
//! at first: untouched memory is never resident. The table grows by linear hashing, one bucket at a time. A new
//! key splits a few buckets when the table is filled: of the keys of the next bucket to split, those that have
//! the next bit of their tag set move to the first bucket that is not used yet. Nothing else moves, no call
//! splits more than [`SPLITS`] buckets, and keys only move to higher buckets.
//!
//! A key belongs to the bucket its fingerprint says at the present size, its home, and the home's lock is the key's
//! lock: whoever finds, makes or changes a key's state holds it. A key that finds its home full
//! lives in one of the next buckets; the home counts how many do, so that only then a search looks
//! further. Locks are taken from lower to higher buckets only, or not waited for; also by a decision on
//! several keys, which holds several locks. A split holds the lock of the home that it splits. So a caller that
//! has locked a home and finds that it is still the key's home knows that it stays so.
//!
//! This is the one file with unsafe code: states lie in cells under a lock of a few bytes, in memory
//! that the system gives zeroed and in large pages. `cfg(loom)` swaps atomics and cells for loom's;
//! `scripts/loom` runs every interleaving of this very file.

#![expect(unsafe_code, reason = "measured: 16-byte states behind a lock in their own cache line")]

use std::cell::Cell;
use std::cmp::Reverse;
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};

use tallygate_core::{Algorithm, Share, Tick};

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

use atomic::{
    AtomicBool, AtomicI64, AtomicU8, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering,
};

use crate::clock::Clock;

/// Slots in a bucket: with 16-byte states and their tags, two cache lines with the lock.
const SLOTS: usize = if cfg!(loom) { 1 } else { 5 };

/// How many buckets beyond its home a key may live.
const REACH: usize = if cfg!(loom) { 1 } else { 31 };

/// How full the buckets are when the table is, in hundredths. At 60 a key in fifteen lives away from
/// home, and the furthest of five million about 16 buckets; at 70 some would find no place in reach.
const FILL: usize = 60;

/// The fewest homes that a table starts with and then doubles, and less than twice as many are the most.
const FIRST_HOMES: usize = 128;

/// The most homes that a table can have: their number is kept in 32 bits. They hold 12 billion keys.
const MOST_HOMES: usize = u32::MAX as usize;

/// How many buckets a new key splits while the number of homes doubles. Each new key makes the buckets that are
/// still to be split fuller: with 8 splits they are filled by 62 % at the end instead of [`FILL`].
const SPLITS: usize = 8;

/// How many splits ahead the memory of a split is fetched.
const SPLITS_AHEAD: usize = 4;

/// From how many bytes on the memory of a table is in large pages. The first bytes are in small ones, so that a
/// table of a few keys takes little, until it has grown to [`LARGE`] bytes.
#[cfg(not(loom))]
const SMALL: usize = 4 << 20;
#[cfg(not(loom))]
const LARGE: usize = 32 << 20;

/// The bytes of a cache line, and how many lines of a bucket are fetched ahead: all, of buckets with states of up to
/// 40 bytes.
#[cfg(all(target_arch = "x86_64", not(loom)))]
const LINE: usize = 64;
#[cfg(all(target_arch = "x86_64", not(loom)))]
const FETCHED: usize = 4;

/// How many buckets a new key sweeps in passing: three keys on average, so fresh keys go faster than new ones come.
const SWEEP: usize = 1;

/// How many live keys are compared before one of them is evicted. They are fewer if one of them has used no larger share of
/// its quota than the new key, and more if all of them have used half of their quota.
const CANDIDATES: usize = 8;

/// How many buckets elsewhere are searched for a place, if there is none in reach and the table is small, or too few keys live
/// in reach.
const ELSEWHERE: usize = 128;

/// How many buckets beyond its home a new key looks for a fresh one's place when the table refuses new keys.
const REFUSED_REACH: usize = 1;

/// How many times of dropped keys are kept for each era: keys share them.
const WATERMARKS: usize = if cfg!(loom) { 1 } else { 256 };

/// For how many eras they are kept. A thread that is behind by one era writes to its own.
const ERAS: usize = 2;

/// What stands for a key: its hash, of which a table knows the first bits (see [`Table::spot`]).
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

    /// Its first bits, which are all that a table knows of it, as bytes.
    pub(crate) fn known_bytes(self, bits: u32) -> impl Iterator<Item = u8> {
        self.0.to_be_bytes().into_iter().take(bits.div_ceil(8) as usize)
    }
}

/// The bits of a slot's tag that say how far from home its key lives; the other 59 tell it from its neighbours.
const DISTANCE: u64 = 0x1f;
const TAG_BITS: u32 = 64 - DISTANCE.count_ones();

/// What to do with a new key when the table is full of keys that are not fresh.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Evicts the key that has used the smallest share of its own quota, of some that are compared, and of equal
    /// shares the one that was used most recently. Shares of a half and more count as equal. So invented keys evict
    /// invented keys, not the clients that had used up their quota before, even if they have earned a part of it back.
    /// If no key can be evicted, because other threads use those in reach, the new key is denied as if it had used up
    /// its quota.
    #[default]
    EvictLeastUsed,
    /// Returns [`StoreError::Full`](crate::StoreError::Full) for the new key.
    RefuseNew,
}

/// There is no place for a new key: the table refuses new keys when it is full, or other threads use all places in reach.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

/// The order in which keys are evicted: first the key that has used the smallest share of its own quota, and of equal
/// shares the one that was used most recently. So invented keys evict invented keys, whatever they cost and whatever
/// their limits are, and not the clients that had used up their quota before. Shares of a half and more count as equal:
/// otherwise a client would wait until it has earned one unit back, and be evicted by invented keys that have used all of
/// theirs.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    share: Share,
    since: Reverse<Tick>,
}

impl Rank {
    fn of<A: Algorithm>(rule: &A, state: &A::State, now: Tick) -> Self {
        let since = Reverse(rule.last_change(state));
        Self { share: rule.share_used(state, now).min(Share::HALF), since }
    }

    /// Whether it is the rank of a client that has used at least half of its quota.
    fn is_debt(&self) -> bool {
        self.share >= Share::HALF
    }
}

/// A time, and how often the clock had been set back when it was read. The table calls the time between two
/// set-backs an era.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) now: Tick,
    set_backs: u32,
}

impl Reading {
    /// Stands for the count of a time that the caller gave.
    const GIVEN: u32 = u32::MAX;

    /// Reads a clock.
    #[inline]
    pub(crate) fn of(clock: &impl Clock) -> Self {
        // The count first: a time that is read after it is never of an earlier era.
        let set_backs = clock.set_backs();
        Self { now: clock.now(), set_backs }
    }

    /// Whether the clock has ever been set back.
    pub(crate) const fn is_after_a_set_back(self) -> bool {
        self.set_backs > 0 && !self.is_given()
    }

    /// Whether the caller gave the time. Such a caller may be late, but never sets the clock back.
    #[inline]
    const fn is_given(self) -> bool {
        self.set_backs == Self::GIVEN
    }
}

impl From<Tick> for Reading {
    #[inline]
    fn from(now: Tick) -> Self {
        Self { now, set_backs: Self::GIVEN }
    }
}

pub(crate) struct Table<S> {
    buckets: Pages<Bucket<S>>,
    /// How many homes there are at first.
    first_homes: usize,
    /// How many of the first bits of a hash are not in a tag, because the first home determines them.
    bits_before_tag: u32,
    /// How many there can be. The buckets after them are for the keys of the last homes.
    most_homes: usize,
    /// How many homes there are now, and the bits of a tag that choose among them: see [`Shape`].
    shape: AtomicU64,
    /// Whether a thread splits buckets.
    splitting: AtomicBool,
    /// How many bits of a hash are known of a key.
    known_bits: u32,
    /// Those bits.
    known: u128,
    max_keys: usize,
    when_full: WhenFull,
    len: AtomicUsize,
    cursor: AtomicUsize,
    /// The most set-backs that any caller has reported: the era.
    era: AtomicU32,
    /// The first time that was read in the era. Locked while a new era begins.
    era_began: Mutex<Tick>,
    /// For some eras, the latest time at which one of some keys was dropped: see `floor`.
    watermarks: Box<[AtomicI64]>,
    counters: Counters,
}

/// What has become of keys in a table. A fresh key can be dropped without anybody noticing; an
/// eviction forgives what the key had used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Usage {
    /// Keys that are kept now.
    pub keys: usize,
    /// Keys that were dropped because they were fresh.
    pub swept: u64,
    /// Keys that were dropped though they were not, because the store was full.
    pub evicted: u64,
    /// New keys that were refused because the store was full.
    pub refused: u64,
    /// How much of settled costs was beyond the bound on debt, and dropped.
    pub forgiven: u64,
}

#[derive(Default)]
struct Counters {
    swept: AtomicU64,
    evicted: AtomicU64,
    refused: AtomicU64,
    forgiven: AtomicU64,
}

/// How many homes there are, and which bits of a tag choose among them.
///
/// With n homes at first, a key's home is that of the first n that its hash says, plus n times some later bits of
/// its hash. If there is no such home yet, the last of these bits does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Shape(u64);

impl Shape {
    const HALF: u32 = u32::BITS;

    /// The shape with so many homes, of which there were so many at first.
    fn of(homes: usize, first_homes: usize) -> Self {
        let times = homes.div_ceil(first_homes).next_power_of_two();
        Self((homes as u64) << Self::HALF | (times as u64 - 1))
    }

    /// The shape with one home more.
    #[inline]
    const fn with_one_more(self, first_homes: usize) -> Self {
        let is_filled = self.homes() == first_homes * (self.mask() + 1);
        let mask = if is_filled { 2 * self.mask() + 1 } else { self.mask() };
        Self((self.homes() as u64 + 1) << Self::HALF | mask as u64)
    }

    #[inline]
    const fn homes(self) -> usize {
        (self.0 >> Self::HALF) as usize
    }

    /// The bits that choose a home, while there may be no such home yet for all of them.
    #[inline]
    const fn mask(self) -> usize {
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
    next: Shape,
}

impl Split {
    /// Whether the key of a tag, found at a distance from the home that is split, is its key and moves.
    #[inline]
    const fn moves(&self, tag: u64, distance: usize) -> bool {
        tag != 0 && (tag & DISTANCE) as usize == distance && tag & self.bit != 0
    }
}

/// How many of the last bits of the first half of a hash choose no home. All other bits of that half are known of
/// every key, whatever table its hash was kept in: see [`Table::spot`].
const BITS_AFTER_CHOICE: u32 = u64::BITS - TAG_BITS;

/// The bits that choose a home, of the first half of a hash.
#[inline]
const fn choice(high: u64) -> usize {
    (high >> BITS_AFTER_CHOICE) as usize
}

#[repr(C, align(64))]
struct Bucket<S> {
    /// 1 while somebody holds the bucket.
    lock: AtomicU8,
    /// Whether anybody has ever lived here. A look at it touches no memory that was not touched before.
    lived_in: AtomicBool,
    /// How many keys whose home this is live in a later bucket. Raised under the home's lock before
    /// the key is placed, lowered by whoever dropped it afterwards: never too low.
    spilled: AtomicU16,
    /// The era that its states are in. It changes under the lock.
    era: AtomicU32,
    slots: UnsafeCell<Slots<S>>,
}

/// Tags stand together, so that a search reads one line and does not branch on what it finds.
#[repr(C)]
struct Slots<S> {
    /// For each slot 0, or a fingerprint's tag with the distance from home; then a state is there.
    tags: [u64; SLOTS],
    states: [MaybeUninit<S>; SLOTS],
}

// Safety: a bucket's slots are only reached through `Held`, which exists while its lock is held, so
// states are moved between threads (S: Send) but never seen by two at once.
unsafe impl<S: Send> Sync for Bucket<S> {}
unsafe impl<S: Send> Send for Bucket<S> {}

/// A key in a table: its home while the table had its first size, and its tag, by which it is told apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot {
    home: usize,
    tag: u64,
}

impl Spot {
    /// Which of so many shards it is in.
    pub(crate) const fn shard(self, shards: usize) -> usize {
        (self.tag >> 32) as usize % shards
    }
}

/// A key, and where its home was when it was looked up: so that a decision does not compute it again.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Lookup {
    pub(crate) spot: Spot,
    shape: Shape,
    home: usize,
}

/// A bucket whose lock is held. Dropping it lets go, also when a decision panics.
struct Held<'a, S>(&'a Bucket<S>);

/// Locks of buckets, of any tables, held together. Dropping them lets go of all.
///
/// They are taken in their order, as everybody does who waits for one while holding another: so nobody
/// waits in a circle.
#[derive(Debug, Default)]
pub struct Locks<'a> {
    /// In their order, so that one of many is found quickly.
    held: Vec<&'a AtomicU8>,
    /// Slots of keys of this decision, by the addresses of the locks of their buckets and in that order: no other key may take
    /// them.
    pinned: Vec<(usize, usize)>,
}

/// A key whose lock is held, among others, and where its state is, if one is kept.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    key: Spot,
    /// Its home, which is locked.
    home: usize,
    at: Option<(usize, usize)>,
    /// Whether the state was placed for this decision, and is given up if the decision fails.
    is_new: bool,
}

impl Found {
    /// Whether a state is kept for the key.
    pub(crate) const fn is_kept(&self) -> bool {
        self.at.is_some() && !self.is_new
    }
}

impl<S> Bucket<S> {
    #[inline]
    fn hold(&self) -> Held<'_, S> {
        take(&self.lock);
        Held(self)
    }

    /// Takes the lock if nobody has it.
    #[inline]
    fn try_hold(&self) -> Option<Held<'_, S>> {
        try_take(&self.lock).then(|| Held(self))
    }
}

/// The order of locks.
fn address(lock: &AtomicU8) -> usize {
    std::ptr::from_ref(lock).addr()
}

#[inline]
fn take(lock: &AtomicU8) {
    while !try_take(lock) {
        wait_for(lock);
    }
}

#[inline]
fn try_take(lock: &AtomicU8) -> bool {
    lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

#[inline]
fn let_go(lock: &AtomicU8) {
    lock.store(0, Ordering::Release);
}

/// How often a thread that waits for a lock yields before it sleeps, and how long it then sleeps, twice as long each time.
#[cfg(not(loom))]
const YIELDS: u32 = 8;
#[cfg(not(loom))]
const SHORTEST_NAP: std::time::Duration = std::time::Duration::from_micros(50);
#[cfg(not(loom))]
const LONGEST_NAP: std::time::Duration = std::time::Duration::from_millis(4);

/// Waits until a lock may be free, without writing, so that the holder keeps the line.
#[cfg(not(loom))]
#[cold]
fn wait_for(lock: &AtomicU8) {
    let (mut spins, mut nap) = (0_u32, SHORTEST_NAP);
    while lock.load(Ordering::Relaxed) != 0 {
        spins = spins.saturating_add(1);
        if spins >= YIELDS * 64 {
            // Many threads wait. As long as they only yield, they go on taking turns, and the holder gets one of many.
            std::thread::sleep(nap);
            nap = (2 * nap).min(LONGEST_NAP);
        } else if spins.is_multiple_of(64) {
            // A holder that was descheduled needs the processor more.
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

#[cfg(loom)]
fn wait_for(_: &AtomicU8) {
    loom::thread::yield_now();
}

/// Lets another thread go on.
fn pause() {
    #[cfg(loom)]
    loom::thread::yield_now();
    #[cfg(not(loom))]
    std::thread::yield_now();
}

impl<S> Drop for Held<'_, S> {
    #[inline]
    fn drop(&mut self) {
        let_go(&self.0.lock);
    }
}

impl<'a> Locks<'a> {
    fn take(&mut self, lock: &'a AtomicU8) {
        if let Err(place) = self.place(lock) {
            debug_assert_eq!(place, self.held.len(), "locks are waited for upwards only");
            take(lock);
            self.held.insert(place, lock);
        }
    }

    /// Whether a lock is held, or comes after all that are.
    fn can_take(&self, lock: &AtomicU8) -> bool {
        self.place(lock).err().is_none_or(|place| place == self.held.len())
    }

    fn have(&self, lock: &AtomicU8) -> bool {
        self.place(lock).is_ok()
    }

    /// Returns the place of a lock among those that are held, or the one that it would have.
    fn place(&self, lock: &AtomicU8) -> Result<usize, usize> {
        // Mostly it comes after all of them.
        match self.held.last() {
            Some(last) if address(last) >= address(lock) => {
                self.held.binary_search_by_key(&address(lock), |held| address(held))
            }
            _ => Err(self.held.len()),
        }
    }

    /// Takes over the lock of a bucket that was entered.
    fn keep<S>(&mut self, open: Open<'a, S>) {
        if let Open::Held(held) = open {
            let lock = &ManuallyDrop::new(held).0.lock;
            if let Err(place) = self.place(lock) {
                self.held.insert(place, lock);
            }
        }
    }

    fn pin(&mut self, lock: &'a AtomicU8, slot: usize) {
        let pinned = (address(lock), slot);
        let place = self.pinned.partition_point(|other| *other < pinned);
        self.pinned.insert(place, pinned);
    }

    fn is_pinned(&self, lock: &AtomicU8, slot: usize) -> bool {
        self.pinned.binary_search(&(address(lock), slot)).is_ok()
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        self.held.drain(..).for_each(let_go);
    }
}

impl<S> Held<'_, S> {
    #[inline]
    fn slots<R>(&mut self, run: impl FnOnce(&mut Slots<S>) -> R) -> R {
        // Safety: the lock is held, and `&mut self` makes this the only reference made through it.
        #[cfg(not(loom))]
        return run(unsafe { &mut *self.0.slots.get() });
        // Safety: as above, and loom checks it.
        #[cfg(loom)]
        return self.0.slots.with_mut(|slots| run(unsafe { &mut *slots }));
    }

    fn tags(&mut self) -> [u64; SLOTS] {
        self.slots(|slots| slots.tags)
    }

    /// The slot with a tag.
    #[inline]
    fn find(&mut self, tag: u64) -> Option<usize> {
        // All are compared: a branch for each would be mispredicted, and wait for memory to know it.
        let mut found = SLOTS;
        for (slot, here) in self.tags().into_iter().enumerate() {
            found = if here == tag { slot } else { found };
        }
        (found < SLOTS).then_some(found)
    }

    /// Runs on the state in a slot that was found to have one.
    #[inline]
    fn with_state<R>(&mut self, slot: usize, run: impl FnOnce(&mut S) -> R) -> R {
        self.slots(|slots| {
            debug_assert_ne!(slots.tags[slot], 0);
            // Safety: a slot with a tag has a state, and callers name only slots with one.
            run(unsafe { slots.states[slot].assume_init_mut() })
        })
    }

    /// An empty slot.
    #[inline]
    fn empty(&mut self) -> Option<usize> {
        self.tags().iter().position(|tag| *tag == 0)
    }

    /// Fills a slot, dropping the state that was there.
    fn put(&mut self, slot: usize, tag: u64, state: S) {
        self.clear(slot);
        self.fill(slot, tag, state);
    }

    /// Fills an empty slot.
    #[inline]
    fn fill(&mut self, slot: usize, tag: u64, state: S) {
        self.0.lived_in.store(true, Ordering::Relaxed);
        self.slots(|slots| {
            debug_assert_eq!(slots.tags[slot], 0);
            slots.states[slot] = MaybeUninit::new(state);
            slots.tags[slot] = tag;
        });
    }

    /// Empties a slot; returns the tag that was there.
    fn clear(&mut self, slot: usize) -> u64 {
        self.slots(|slots| {
            let tag = std::mem::take(&mut slots.tags[slot]);
            if tag != 0 {
                // Safety: it had a tag, so it has a state; the tag is gone, so nobody uses it again.
                unsafe { slots.states[slot].assume_init_drop() };
            }
            tag
        })
    }
}

impl<S> Table<S> {
    /// A table for at most so many keys, of whose hashes at most so many bits are known.
    pub(crate) fn new(known_bits: u32, max_keys: usize, when_full: WhenFull) -> Self {
        let homes = (max_keys.saturating_mul(100) / FILL).div_ceil(SLOTS).max(1);
        let doublings = (homes / FIRST_HOMES).checked_ilog2().unwrap_or(0);
        let first_homes = homes.div_ceil(1 << doublings);
        Self::of_homes(first_homes, doublings, known_bits, max_keys, when_full)
    }

    /// A table of so many homes at first, which double so often.
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
            shape: AtomicU64::new(Shape::of(first_homes, first_homes).0),
            splitting: AtomicBool::new(false),
            known_bits,
            known: u128::MAX << (u128::BITS - known_bits),
            max_keys: max_keys.max(1),
            when_full,
            len: AtomicUsize::new(0),
            cursor: AtomicUsize::new(0),
            era: AtomicU32::new(0),
            era_began: Mutex::new(Tick(i64::MIN)),
            watermarks: (0..ERAS * WATERMARKS).map(|_| AtomicI64::new(i64::MIN)).collect(),
            counters: Counters::default(),
        }
    }

    #[inline]
    fn shape(&self) -> Shape {
        Shape(self.shape.load(Ordering::Relaxed))
    }

    /// How many buckets are in use: the homes, and those after them.
    fn in_use(&self) -> usize {
        self.shape().homes() + REACH
    }

    /// The home of a key in a table of a shape.
    #[inline]
    fn home(&self, key: Spot, shape: Shape) -> usize {
        self.home_of(key.home, choice(key.tag >> self.bits_before_tag), shape)
    }

    /// The home of a key, by its first home and the bits of its hash that choose among the others.
    #[inline]
    const fn home_of(&self, first: usize, choice: usize, shape: Shape) -> usize {
        let mask = shape.mask();
        let home = first + self.first_homes * (choice & mask);
        if home < shape.homes() { home } else { first + self.first_homes * (choice & (mask >> 1)) }
    }

    /// Locks the home of a key. It stays the key's home while it is locked, for a split would lock it.
    fn hold_home(&self, key: Spot) -> (usize, Held<'_, S>) {
        let index = self.home(key, self.shape());
        self.hold_home_after(key, index, self.buckets[index].hold())
    }

    /// The same, after a bucket was locked that was the key's home a moment ago.
    #[inline]
    fn hold_home_after<'a>(
        &'a self,
        key: Spot,
        mut index: usize,
        mut home: Held<'a, S>,
    ) -> (usize, Held<'a, S>) {
        loop {
            // If the home was split before it was locked, this sees the shape that came of it.
            let now = self.home(key, self.shape());
            if now == index {
                return (index, home);
            }
            drop(home);
            home = self.buckets[now].hold();
            index = now;
        }
    }

    /// What has become of keys so far.
    pub(crate) fn usage(&self) -> Usage {
        Usage {
            keys: self.len(),
            swept: self.counters.swept.load(Ordering::Relaxed),
            evicted: self.counters.evicted.load(Ordering::Relaxed),
            refused: self.counters.refused.load(Ordering::Relaxed),
            forgiven: self.counters.forgiven.load(Ordering::Relaxed),
        }
    }

    /// Counts what a settled cost left beyond the bound on debt.
    pub(crate) fn forgive(&self, amount: u128) {
        let amount = u64::try_from(amount).unwrap_or(u64::MAX);
        self.counters.forgiven.fetch_add(amount, Ordering::Relaxed);
    }

    fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    pub(crate) const fn max_keys(&self) -> usize {
        self.max_keys
    }

    /// Whether a full table refuses all new keys.
    pub(crate) fn refuses_new(&self) -> bool {
        self.when_full == WhenFull::RefuseNew
    }

    /// How many bits of a hash are known of its keys.
    pub(crate) const fn known_bits(&self) -> u32 {
        self.known_bits
    }

    /// Where a key belongs. What a decision on it will need starts to load.
    ///
    /// The first half of its hash, as a fraction of 1, is stretched over the first homes: the whole part says which
    /// one. The tag is 59 bits of the hash, from the first bit on that the first home does not determine. Together
    /// they are as good as the first bits of the hash, 59 and as many as the number of first homes has, so that
    /// [`show`](Self::show) can find them again, for a table of another size. A table for 400 keys or more has at
    /// least 128 first homes, so the odds that any two of n keys are taken for one are at most n² / 2⁶⁷: for a
    /// million keys one in 147 million.
    ///
    /// The bits that choose among more homes are bits of the hash and not of a product: so the processor computes
    /// them while it multiplies for the first home, and knows sooner which memory it waits for.
    #[inline]
    pub(crate) fn look_up(&self, key: Fingerprint) -> Lookup {
        let (spot, high) = self.spot_and_high(key);
        let shape = self.shape();
        let home = self.home_of(spot.home, choice(high), shape);
        self.buckets.prefetch(home);
        Lookup { spot, shape, home }
    }

    /// Where a key belongs.
    pub(crate) fn spot(&self, key: Fingerprint) -> Spot {
        self.spot_and_high(key).0
    }

    /// Where a key belongs, and the first half of its hash as far as it is known.
    #[inline]
    fn spot_and_high(&self, key: Fingerprint) -> (Spot, u64) {
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
        // A tag is never 0. If it would be, it is 1 in a bit that chooses no home.
        (Spot { home, tag: (tag & !DISTANCE).max(DISTANCE + 1) }, high)
    }

    /// The key that belongs to a spot.
    fn key_at(&self, Spot { home, tag }: Spot) -> Fingerprint {
        // The least hash that belongs to the home, and how far hashes with the same tag are apart.
        let first = ((home as u128) << u64::BITS).div_ceil(self.first_homes as u128) << u64::BITS;
        let apart = 1_u128.checked_shl(u128::BITS - self.bits_before_tag).unwrap_or(0);
        let tail = u128::from(tag & !DISTANCE) << (u64::BITS - self.bits_before_tag);
        let key = (first & !apart.wrapping_sub(1)) | tail;
        // Each home has at most as many hashes as lie between two of the same tag.
        Fingerprint(if key < first { key.wrapping_add(apart) } else { key })
    }

    /// Its buckets, for [`show`](Self::show), upward: so a key that moves while the table grows is shown before or
    /// after. A run of them has keys from all over the hashes: a smaller table that takes over their keys in this
    /// order has all kinds of neighbors to evict the least used of.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = usize> {
        (0..).take_while(|index| *index < self.in_use())
    }

    /// Shows the keys that live in a bucket, and their states. Whoever goes through all buckets has seen all keys, but
    /// for those that were dropped and came again meanwhile: these may be seen twice, as they are last, or not at all.
    pub(crate) fn show(&self, index: usize, mut show: impl FnMut(Fingerprint, &S)) {
        if !self.buckets[index].lived_in.load(Ordering::Relaxed) {
            return;
        }
        let mut bucket = self.buckets[index].hold();
        for (slot, tag) in bucket.tags().into_iter().enumerate().filter(|(_, tag)| *tag != 0) {
            let home = (index - (tag & DISTANCE) as usize) % self.first_homes;
            let key = self.key_at(Spot { home, tag });
            bucket.with_state(slot, |state| show(key, state));
        }
    }

    /// Runs on a key's state while nobody else can: the one that is kept, or else a new one, which is
    /// then kept unless it is still fresh.
    ///
    /// `run` gets the time to decide at. It is later than the reading if the state has changed since: the
    /// clock was read before the lock, so the caller is late, and time that was earned already is not earned
    /// twice.
    pub(crate) fn with<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: Spot,
        reading: impl Into<Reading>,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        let index = self.home(key, self.shape());
        let home = self.buckets[index].hold();
        // No table has the shape without homes, so the key is looked for in its home.
        self.with_elsewhere(rule, key, (index, home, Shape::default()), reading.into(), run)
    }

    /// [`with`](Self::with) for a key that was looked up.
    // Always: see the one caller.
    #[inline(always)]
    pub(crate) fn with_lookup<A: Algorithm<State = S>, R, E: From<Full>>(
        &self,
        rule: &A,
        lookup: Lookup,
        reading: Reading,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, E> {
        let mut home = self.buckets[lookup.home].hold();
        // As almost always: the table has not grown, the clock was not set back, the key lives at home.
        if self.shape() == lookup.shape
            && self.is_entered(&home, reading)
            && let Some(slot) = home.find(lookup.spot.tag)
        {
            return Ok(home.with_state(slot, |state| run_late(rule, state, reading.now, run)));
        }
        let looked_up = (lookup.home, home, lookup.shape);
        self.with_elsewhere(rule, lookup.spot, looked_up, reading, run).map_err(E::from)
    }

    /// [`with`](Self::with) for a key that was not found in the bucket where it was looked up in a table of a shape. That
    /// bucket is locked.
    #[cold]
    #[inline(never)]
    fn with_elsewhere<'a, A: Algorithm<State = S>, R>(
        &'a self,
        rule: &A,
        key: Spot,
        (mut index, mut home, shape): (usize, Held<'a, S>, Shape),
        mut reading: Reading,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        if self.shape() != shape || !self.is_entered(&home, reading) {
            (index, home) = self.hold_home_after(key, index, home);
            reading = self.enter(rule, &mut home, reading);
            if let Some(slot) = home.find(key.tag) {
                return Ok(home.with_state(slot, |state| run_late(rule, state, reading.now, run)));
            }
        }
        // Acquire: whoever sees that a key is gone sees when it went.
        if home.0.spilled.load(Ordering::Acquire) > 0
            && let Some((mut bucket, slot)) = self.find_beyond(index, &home, key)
        {
            let reading = self.enter(rule, &mut bucket, reading);
            return Ok(bucket.with_state(slot, |state| run_late(rule, state, reading.now, run)));
        }
        self.with_new(rule, key, (index, home), reading, run)
    }

    /// Reads a key's state, or the state it would start with, and changes nothing: `read` gets a copy. The
    /// states of a bucket stay in their era.
    #[cold]
    pub(crate) fn look<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: Spot,
        reading: impl Into<Reading>,
        read: impl FnOnce(&mut S, Tick) -> R,
    ) -> R
    where
        S: Clone,
    {
        let reading = reading.into();
        let (index, mut home) = self.hold_home(key);
        let found = match home.find(key.tag) {
            Some(slot) => Some((self.era_of(&home), home.with_state(slot, |state| state.clone()))),
            None if home.0.spilled.load(Ordering::Acquire) > 0 => {
                let beyond = self.find_beyond(index, &home, key);
                beyond.map(|(mut bucket, slot)| {
                    (self.era_of(&bucket), bucket.with_state(slot, |state| state.clone()))
                })
            }
            None => None,
        };
        drop(home);
        let Some((era, mut state)) = found else {
            let reading = self.caught_up(self.era.load(Ordering::Acquire), reading);
            let now = reading.now.max(self.floor(key, reading));
            return read(&mut rule.first(now), now);
        };
        let reading = self.caught_up(era, reading);
        if !reading.is_given() && era < reading.set_backs {
            rule.clock_set_back(&mut state, reading.now);
        }
        run_late(rule, &mut state, reading.now, read)
    }

    /// Brings a key's state, if one is kept, into the era of a reading.
    #[cold]
    pub(crate) fn follow<A: Algorithm<State = S>>(&self, rule: &A, key: Spot, reading: Reading) {
        let (index, mut home) = self.hold_home(key);
        let reading = self.enter(rule, &mut home, reading);
        if home.find(key.tag).is_none()
            && home.0.spilled.load(Ordering::Acquire) > 0
            && let Some((mut bucket, _)) = self.find_beyond(index, &home, key)
        {
            self.enter(rule, &mut bucket, reading);
        }
    }

    /// Enters a bucket with a reading: states of an earlier era are moved into that of the reading, and a
    /// reading of an earlier era is replaced. Returns the reading to go on with.
    #[inline]
    fn enter<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut Held<'_, S>,
        reading: Reading,
    ) -> Reading {
        if self.is_entered(bucket, reading) {
            return reading;
        }
        self.enter_from_another_era(rule, bucket, reading)
    }

    /// Whether the states of a bucket are in the era of a reading.
    #[inline]
    fn is_entered(&self, bucket: &Held<'_, S>, reading: Reading) -> bool {
        reading.is_given() || self.era_of(bucket) == reading.set_backs
    }

    #[cold]
    fn enter_from_another_era<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut Held<'_, S>,
        reading: Reading,
    ) -> Reading {
        let reading = self.caught_up(self.era_of(bucket), reading);
        if self.era_of(bucket) < reading.set_backs {
            self.note_set_back(reading);
            let tags = bucket.tags();
            for slot in (0..SLOTS).filter(|slot| tags[*slot] != 0) {
                bucket.with_state(slot, |state| rule.clock_set_back(state, reading.now));
            }
            bucket.0.era.store(reading.set_backs, Ordering::Relaxed);
        }
        reading
    }

    /// Whether a bucket can be used with a reading, after its states were moved into the reading's era; not if
    /// the bucket is ahead of it.
    #[inline]
    fn can_enter<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut Held<'_, S>,
        reading: Reading,
    ) -> bool {
        let ahead = !reading.is_given() && self.era_of(bucket) > reading.set_backs;
        if !ahead {
            self.enter(rule, bucket, reading);
        }
        !ahead
    }

    /// The era of a bucket whose lock is held.
    #[inline]
    fn era_of(&self, bucket: &Held<'_, S>) -> u32 {
        bucket.0.era.load(Ordering::Relaxed)
    }

    /// The reading, unless it is older than an era: then the clock was set back since it was read, and the
    /// first time of the present era is taken instead. That time has passed, so nobody earns by it.
    fn caught_up(&self, era: u32, reading: Reading) -> Reading {
        if reading.is_given() || era <= reading.set_backs {
            return reading;
        }
        let began = self.era_began();
        Reading { now: *began, set_backs: self.era.load(Ordering::Acquire) }
    }

    fn era_began(&self) -> MutexGuard<'_, Tick> {
        // The tick under it is whole, whatever panicked.
        self.era_began.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Begins a new era if a reading is of one. Returns whether it is the first of its era.
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
            watermark.store(i64::MIN, Ordering::Release);
        }
        self.era.store(reading.set_backs, Ordering::Release);
        true
    }

    fn watermarks_of(&self, era: u32) -> &[AtomicI64] {
        let from = era as usize % ERAS * WATERMARKS;
        &self.watermarks[from..from + WATERMARKS]
    }

    /// Where the lock of a key comes in the order of all, until the table grows.
    pub(crate) fn lock_order(&self, key: Spot) -> usize {
        address(&self.buckets[self.home(key, self.shape())].lock)
    }

    /// Takes the locks of a key, in addition to those that are held, and looks where it is. Keys are
    /// to be looked for in the order of their locks. Returns `None` if the table has grown meanwhile, so that the
    /// order is another: then the caller lets go of all locks and begins again.
    pub(crate) fn look_for<'a>(&'a self, key: Spot, locks: &mut Locks<'a>) -> Option<Found> {
        let index = self.home(key, self.shape());
        let home = &self.buckets[index];
        if !locks.can_take(&home.lock) {
            return None;
        }
        locks.take(&home.lock);
        if self.home(key, self.shape()) != index {
            return None;
        }
        let reach = if home.spilled.load(Ordering::Acquire) > 0 { REACH } else { 0 };
        for distance in 0..=reach {
            let bucket = &self.buckets[index + distance];
            locks.take(&bucket.lock);
            let slot = under(bucket, locks).find(key.tag | distance as u64);
            if let Some(slot) = slot {
                locks.pin(&bucket.lock, slot);
                let at = Some((index + distance, slot));
                return Some(Found { key, home: index, at, is_new: false });
            }
        }
        Some(Found { key, home: index, at: None, is_new: false })
    }

    /// Finds a place for a key that is not kept, with the state that it would start with. So a decision on several keys
    /// knows before it charges any that all have one.
    ///
    /// # Errors
    /// There is no place for it.
    pub(crate) fn make_room<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        found: Found,
        reading: impl Into<Reading>,
        locks: &mut Locks<'a>,
    ) -> Result<Found, Full> {
        let Found { key, home: index, at: None, .. } = found else { return Ok(found) };
        let mut home = under(&self.buckets[index], locks);
        let reading = self.enter(rule, &mut home, reading.into());
        let now = reading.now.max(self.floor(key, reading));
        let reading = Reading { now, ..reading };
        let state = rule.first(now);
        let (index, slot, beyond) =
            self.place(rule, key, (found.home, &mut home), reading, state, Some(&*locks))?;
        if let Some(beyond) = beyond {
            locks.keep(beyond);
        }
        locks.pin(&self.buckets[index].lock, slot);
        Ok(Found { at: Some((index, slot)), is_new: true, ..found })
    }

    /// Gives up the place that was made for a key.
    pub(crate) fn give_up_room(&self, found: Found, locks: &mut Locks<'_>) {
        if let Found { at: Some((index, slot)), is_new: true, .. } = found {
            let tag = under(&self.buckets[index], locks).clear(slot);
            self.lower_spilled(index, tag);
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Reads the state of a key that was found, or the one it would start with.
    pub(crate) fn read_found<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        found: Found,
        reading: impl Into<Reading>,
        locks: &mut Locks<'_>,
        read: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        let reading = reading.into();
        match found.at {
            Some((bucket, slot)) => {
                let mut bucket = under(&self.buckets[bucket], locks);
                let reading = self.enter(rule, &mut bucket, reading);
                bucket.with_state(slot, |state| run_late(rule, state, reading.now, read))
            }
            None => {
                let mut home = under(&self.buckets[found.home], locks);
                let reading = self.enter(rule, &mut home, reading);
                let now = reading.now.max(self.floor(found.key, reading));
                read(&mut rule.first(now), now)
            }
        }
    }

    /// Changes the state of a key that was found; a new one is kept unless it is still fresh. Those
    /// that are kept already go first: a new one may take the place of one that is fresh.
    pub(crate) fn change_found<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        found: Found,
        reading: impl Into<Reading>,
        locks: &mut Locks<'_>,
        change: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        let Found { key, home: index, at: None, .. } = found else {
            return self.read_found(rule, found, reading, locks, change);
        };
        let mut home = under(&self.buckets[index], locks);
        let reading = self.enter(rule, &mut home, reading.into());
        let now = reading.now.max(self.floor(key, reading));
        let mut state = rule.first(now);
        let answer = change(&mut state, now);
        if !rule.is_fresh(&state, now) {
            let reading = Reading { now, ..reading };
            // Room was made before, or the decision charges nothing: then a penalty is forgotten if there is none.
            drop(self.place(rule, key, (index, &mut home), reading, state, Some(&*locks)));
            self.sweep(rule, reading);
        }
        answer
    }

    /// Looks for a key in the buckets after its home, whose lock is held.
    #[cold]
    fn find_beyond(
        &self,
        index: usize,
        home: &Held<'_, S>,
        key: Spot,
    ) -> Option<(Held<'_, S>, usize)> {
        let mut left = home.0.spilled.load(Ordering::Relaxed);
        for distance in 1..=REACH {
            let mut bucket = self.buckets[index + distance].hold();
            if let Some(slot) = bucket.find(key.tag | distance as u64) {
                return Some((bucket, slot));
            }
            let tags = bucket.tags();
            let from_here = tags.iter().filter(|tag| **tag & DISTANCE == distance as u64).count();
            left = left.saturating_sub(u16::try_from(from_here).unwrap_or(u16::MAX));
            if left == 0 {
                break;
            }
        }
        None
    }

    /// Decides for a key that is not kept.
    // Always: it has one caller, which is called for new keys only.
    #[inline(always)]
    fn with_new<'a, A: Algorithm<State = S>, R>(
        &'a self,
        rule: &A,
        key: Spot,
        (index, mut home): (usize, Held<'a, S>),
        reading: Reading,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        // A late thread must not find room that the key had already used when it was dropped.
        let now = reading.now.max(self.floor(key, reading));
        let reading = Reading { now, ..reading };
        let mut state = rule.first(now);
        let answer = run(&mut state, now);
        if rule.is_fresh(&state, now) {
            // What leaves nothing behind needs no place.
            return Ok(answer);
        }
        // As mostly: there may be one more key, and its home has room for it.
        match home.empty() {
            Some(slot) if self.reserve() => home.fill(slot, key.tag, state),
            _ => {
                // If there is no place for it, it must not be allowed: it could come again and again.
                self.place(rule, key, (index, &mut home), reading, state, None)?;
            }
        }
        drop(home);
        self.sweep(rule, reading);
        self.grow();
        Ok(answer)
    }

    /// Counts one more key, if there may be one more.
    fn reserve(&self) -> bool {
        let one_more = |len| (len < self.max_keys).then_some(len + 1);
        self.len.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    /// Keeps a new state: in an empty slot if there may be one more key, in a fresh one's place, or, unless the
    /// table refuses new keys, in the place of the least used. Only the home's lock is needed: other buckets
    /// that cannot be opened, because another caller has them, are passed over, so nobody is waited for.
    /// Returns where it is, and its bucket if that is not the home.
    ///
    /// # Errors
    /// The table is full, and refuses new keys then, or other threads use all places in reach.
    #[cold]
    #[inline(never)]
    fn place<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        key: Spot,
        (home_index, home): (usize, &mut Held<'a, S>),
        reading: Reading,
        state: S,
        locks: Option<&Locks<'_>>,
    ) -> Result<(usize, usize, Option<Open<'a, S>>), Full> {
        let mut reserved = self.reserve();
        if !reserved && self.refuses_new() {
            let in_use = self.in_use();
            self.sweep_some(rule, reading, if in_use <= ELSEWHERE { in_use } else { SWEEP });
            reserved = self.reserve();
        }
        let counted = Counted { len: &self.len, is_open: Cell::new(reserved) };
        let mut room =
            if reserved { self.find_free(rule, home_index, home, reading, locks) } else { None };
        if room.is_none() {
            let own = rule.share_used(&state, reading.now);
            let least = self.find_evictable(rule, (home_index, home), reading, own, locks);
            // Too few live in reach to choose from, as at the end of the table. One may go elsewhere.
            let is_elsewhere = !reserved && least.is_one_of_few;
            if is_elsewhere && self.evict_any(rule, reading, least.rank) {
                reserved = true;
                counted.is_open.set(true);
                room = self.find_free(rule, home_index, home, reading, locks);
            }
            room = room.or(least.room);
        }
        counted.settle();
        let Some(room) = room else {
            self.len.fetch_sub(reserved.into(), Ordering::Relaxed);
            self.counters.refused.fetch_add(1, Ordering::Relaxed);
            return Err(Full);
        };
        if reserved && room.was != Was::Empty {
            // It takes another's place, and gives back the one that was reserved.
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
        Ok(self.move_in(rule, key, (home_index, home), room, reading, state))
    }

    /// Opens a bucket, unless another caller has it or it is ahead of a reading.
    #[inline]
    fn open<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        index: usize,
        reading: Reading,
        locks: Option<&Locks<'_>>,
    ) -> Option<Open<'a, S>> {
        let bucket = &self.buckets[index];
        let mut bucket = match locks {
            Some(locks) => bucket.under_or_free(locks)?,
            None => bucket.try_hold().map(Open::Held)?,
        };
        self.can_enter(rule, &mut bucket, reading).then_some(bucket)
    }

    /// Finds an empty slot in reach of a home, or that of a fresh key.
    fn find_free<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        home_index: usize,
        home: &mut Held<'a, S>,
        reading: Reading,
        locks: Option<&Locks<'_>>,
    ) -> Option<Room<'a, S>> {
        for distance in 0..=REACH {
            let mut beyond = match distance {
                0 => None,
                _ => match self.open(rule, home_index + distance, reading, locks) {
                    Some(open) => Some(open),
                    None => continue,
                },
            };
            let bucket = beyond.as_deref_mut().unwrap_or(&mut *home);
            if let Some(slot) = bucket.empty() {
                return Some(Room { distance, slot, beyond, was: Was::Empty });
            }
            for slot in 0..SLOTS {
                if !is_pinned(locks, bucket, slot)
                    && bucket.with_state(slot, |state| rule.is_fresh(state, reading.now))
                {
                    return Some(Room { distance, slot, beyond, was: Was::Fresh });
                }
            }
        }
        None
    }

    /// Finds the place of a fresh key in reach of a home, or of the first key to be evicted for a new one that has used a
    /// share of its quota.
    fn find_evictable<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        (home_index, home): (usize, &mut Held<'a, S>),
        reading: Reading,
        own: Share,
        locks: Option<&Locks<'_>>,
    ) -> Least<'a, S> {
        let refuses = self.refuses_new();
        let (mut rank, mut room, mut seen) = (None, None, 0);
        for distance in 0..=if refuses { REFUSED_REACH } else { REACH } {
            let mut beyond = match distance {
                0 => None,
                _ => match self.open(rule, home_index + distance, reading, locks) {
                    Some(open) => Some(open),
                    None => continue,
                },
            };
            let bucket = beyond.as_deref_mut().unwrap_or(&mut *home);
            let mut least_here = None;
            for (slot, tag) in bucket.tags().into_iter().enumerate() {
                if tag == 0 || is_pinned(locks, bucket, slot) {
                    continue;
                }
                if bucket.with_state(slot, |state| rule.is_fresh(state, reading.now)) {
                    let room = Some(Room { distance, slot, beyond, was: Was::Fresh });
                    return Least { rank: None, room, is_one_of_few: false };
                }
                if refuses {
                    continue;
                }
                seen += 1;
                let here = bucket.with_state(slot, |state| Rank::of(rule, state, reading.now));
                if rank.is_none_or(|other| here < other) {
                    (rank, least_here) = (Some(here), Some(slot));
                }
            }
            if let Some(slot) = least_here {
                // It is held until the search ends: so it is the same key that goes.
                room = Some(Room { distance, slot, beyond, was: Was::Live });
            }
            // Clients that have used up their quota stay as long as any other key is in reach.
            let is_enough =
                |rank: Rank| !rank.is_debt() && (seen >= CANDIDATES || rank.share <= own);
            if rank.is_some_and(is_enough) {
                return Least { rank, room, is_one_of_few: false };
            }
        }
        Least { rank, room, is_one_of_few: !refuses && seen < CANDIDATES.min(self.len()) }
    }

    /// Returns whether a key is kept, or could be. A table that refuses new keys says so when they come.
    pub(crate) fn has_room_for<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        key: Spot,
        reading: impl Into<Reading>,
    ) -> bool {
        if self.len() < self.max_keys || self.refuses_new() {
            return true;
        }
        let (index, mut home) = self.hold_home(key);
        let reading = self.enter(rule, &mut home, reading.into());
        if home.find(key.tag).is_some()
            || home.0.spilled.load(Ordering::Acquire) > 0
                && self.find_beyond(index, &home, key).is_some()
        {
            return true;
        }
        let least = self.find_evictable(rule, (index, &mut home), reading, Share::ALL, None);
        least.room.is_some()
            || (least.is_one_of_few && self.find_elsewhere(rule, reading, None).is_some())
    }

    /// Puts a new key into a place that was found for it.
    fn move_in<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        key: Spot,
        (home_index, home): (usize, &mut Held<'a, S>),
        room: Room<'a, S>,
        reading: Reading,
        state: S,
    ) -> (usize, usize, Option<Open<'a, S>>) {
        let Room { distance, slot, mut beyond, was } = room;
        match was {
            Was::Empty => {}
            Was::Fresh => _ = self.counters.swept.fetch_add(1, Ordering::Relaxed),
            Was::Live => _ = self.counters.evicted.fetch_add(1, Ordering::Relaxed),
        }
        let bucket = beyond.as_deref_mut().unwrap_or(home);
        self.replace(rule, bucket, slot, (key, home_index, distance), reading, state);
        (home_index + distance, slot, beyond)
    }

    /// Evicts the first to go of some keys elsewhere, if it goes before a rank. Returns whether there was one.
    #[cold]
    fn evict_any<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        reading: Reading,
        before: Option<Rank>,
    ) -> bool {
        let Some((mut bucket, index, slot)) = self.find_elsewhere(rule, reading, before) else {
            return false;
        };
        let tag = bucket.clear(slot);
        self.forget(index, tag, reading, reading.now);
        self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Finds the first to go of some keys elsewhere, of buckets that no other caller has, if it goes before a rank. Returns its
    /// bucket, the index of that, and its slot.
    #[cold]
    fn find_elsewhere<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        reading: Reading,
        before: Option<Rank>,
    ) -> Option<(Held<'_, S>, usize, usize)> {
        let (now, in_use) = (reading.now, self.in_use());
        let mut least: Option<(Rank, Held<'_, S>, usize, usize)> = None;
        let mut seen = 0;
        for _ in 0..in_use.min(ELSEWHERE) {
            let index = self.cursor.fetch_add(1, Ordering::Relaxed) % in_use;
            // Without waiting, so the order of locks does not matter.
            let Some(mut bucket) = self.buckets[index].try_hold() else { continue };
            if !self.can_enter(rule, &mut bucket, reading) {
                continue;
            }
            let tags = bucket.tags();
            let lived_in = (0..SLOTS).filter(|slot| tags[*slot] != 0);
            let ranks = lived_in.map(|slot| {
                seen += 1;
                (bucket.with_state(slot, |state| Rank::of(rule, state, now)), slot)
            });
            if let Some((rank, slot)) = ranks.min_by_key(|(rank, _)| *rank)
                && before.is_none_or(|before| rank < before)
                && least.as_ref().is_none_or(|(other, ..)| rank < *other)
            {
                least = Some((rank, bucket, index, slot));
            }
            if seen >= CANDIDATES && (least.is_some() || before.is_some()) {
                break;
            }
        }
        least.map(|(_, bucket, index, slot)| (bucket, index, slot))
    }

    /// Puts a key, at a distance from its home, into a slot, in place of whatever is there.
    fn replace<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut Held<'_, S>,
        slot: usize,
        (key, home, distance): (Spot, usize, usize),
        reading: Reading,
        state: S,
    ) {
        if distance > 0 {
            self.buckets[home].spilled.fetch_add(1, Ordering::Relaxed);
        }
        let gone = bucket.tags()[slot];
        let at = match gone {
            0 => reading.now,
            _ => bucket.with_state(slot, |state| dropped_at(rule, state, reading.now)),
        };
        bucket.put(slot, key.tag | distance as u64, state);
        self.forget(home + distance, gone, reading, at);
    }

    /// Notes that a key is gone from a bucket, whose lock is held, and until when it had used its state.
    fn forget(&self, index: usize, tag: u64, reading: Reading, at: Tick) {
        if tag == 0 {
            return;
        }
        let era = self.era_to_note(reading);
        let watermark = &self.watermarks_of(era)[watermark_of(tag)];
        watermark.fetch_max(at.0, Ordering::AcqRel);
        if self.era.load(Ordering::Acquire) as usize >= era as usize + ERAS {
            // The clock was set back so often meanwhile that this watermark is of a later era. A time of an
            // earlier one would keep keys out; without it, one late thread may earn a little twice.
            watermark.store(i64::MIN, Ordering::Release);
        }
        self.lower_spilled(index, tag);
    }

    /// Notes at its home that a key is gone from a later bucket, whose lock is held.
    fn lower_spilled(&self, index: usize, tag: u64) {
        let distance = (tag & DISTANCE) as usize;
        if distance > 0 {
            self.buckets[index - distance].spilled.fetch_sub(1, Ordering::Release);
        }
    }

    /// The time before which no new key may start: when the last one that shares its watermark was dropped.
    fn floor(&self, key: Spot, reading: Reading) -> Tick {
        let watermarks = self.watermarks_of(self.era_to_note(reading));
        Tick(watermarks[watermark_of(key.tag)].load(Ordering::Relaxed))
    }

    /// The era of a reading. A time that was given counts to the present one.
    fn era_to_note(&self, reading: Reading) -> u32 {
        if reading.is_given() { self.era.load(Ordering::Acquire) } else { reading.set_backs }
    }

    /// Drops the fresh keys of the next few buckets, without waiting for any of them. While half of
    /// the table is free nothing is gained by it: the keys may come back.
    #[inline]
    fn sweep<A: Algorithm<State = S>>(&self, rule: &A, reading: Reading) {
        if self.len() > self.max_keys / 2 {
            self.sweep_some(rule, reading, SWEEP);
        }
    }

    fn sweep_some<A: Algorithm<State = S>>(&self, rule: &A, reading: Reading, buckets: usize) {
        let (now, in_use) = (reading.now, self.in_use());
        let first = self.cursor.fetch_add(buckets, Ordering::Relaxed) % in_use;
        // The memory of the next sweeps is on its way when they come.
        self.buckets.prefetch(first + buckets + 1);
        for index in first..first + buckets {
            let index = if index < in_use { index } else { index % in_use };
            let Some(mut bucket) = self.buckets[index].try_hold() else { continue };
            if !self.can_enter(rule, &mut bucket, reading) {
                continue;
            }
            for (slot, tag) in bucket.tags().into_iter().enumerate() {
                if tag != 0 && bucket.with_state(slot, |state| rule.is_fresh(state, now)) {
                    self.drop_fresh(rule, (index, &mut bucket), slot, reading);
                }
            }
        }
    }

    /// Drops a fresh key.
    #[cold]
    fn drop_fresh<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        (index, bucket): (usize, &mut Held<'_, S>),
        slot: usize,
        reading: Reading,
    ) {
        let at = bucket.with_state(slot, |state| dropped_at(rule, state, reading.now));
        let tag = bucket.clear(slot);
        self.forget(index, tag, reading, at);
        self.len.fetch_sub(1, Ordering::Relaxed);
        self.counters.swept.fetch_add(1, Ordering::Relaxed);
    }
}

/// Growth.
impl<S> Table<S> {
    /// Splits a few buckets, if the table is filled and not as large as it can be. The caller holds no lock.
    #[inline]
    pub(crate) fn grow(&self) {
        self.grow_from(FILL, 0);
    }

    /// The same before a decision on so many keys, which may all be new. While it holds their locks, the table cannot grow.
    /// Called for each of them, it splits enough buckets for all.
    pub(crate) fn grow_for(&self, keys: usize) {
        self.grow_from(FILL, keys);
    }

    /// The same for the keys of a snapshot, at half the fill: they come in the order of another table's buckets, so
    /// one part of this table gets its keys before the others, and is then filled twice as much as the average.
    pub(crate) fn grow_for_restored(&self) {
        self.grow_from(FILL / 2, 0);
    }

    #[inline]
    fn grow_from(&self, hundredths: usize, coming: usize) {
        if self.shape().homes() < self.most_homes && self.is_to_grow(hundredths, coming) {
            self.split_some(hundredths, coming);
        }
    }

    /// Whether the number of homes is being doubled, or is to be because they are filled by so many hundredths with the keys that
    /// are coming.
    fn is_to_grow(&self, hundredths: usize, coming: usize) -> bool {
        let shape = self.shape();
        let is_doubling = shape.homes() < self.first_homes * (shape.mask() + 1);
        shape.homes() < self.most_homes
            && (is_doubling || self.is_filled(shape.homes(), hundredths, coming))
    }

    /// Whether so many homes are filled by more than so many hundredths.
    fn is_filled(&self, homes: usize, hundredths: usize, coming: usize) -> bool {
        let keys = self.len().saturating_add(coming).min(self.max_keys);
        keys.saturating_mul(100) > homes.saturating_mul(SLOTS * hundredths)
    }

    #[cold]
    fn split_some(&self, hundredths: usize, coming: usize) {
        let take = || {
            let swapped =
                self.splitting.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed);
            swapped.is_ok()
        };
        while !take() {
            // One thread splits at a time. The others only wait for it if buckets that are to be split become
            // too full: then new keys come faster than one thread can split.
            let shape = self.shape();
            let homes = self.first_homes * (shape.mask() + 1) / 2;
            if shape.homes() >= self.most_homes || !self.is_filled(homes, FILL + 3, coming) {
                return;
            }
            pause();
        }
        for _ in 0..SPLITS {
            if !self.is_to_grow(hundredths, coming) || !self.split_next() {
                break;
            }
        }
        self.splitting.store(false, Ordering::Release);
    }

    /// Splits the next home. Only called by the thread that splits.
    fn split_next(&self) -> bool {
        let shape = self.shape();
        let (homes, next) = (shape.homes(), shape.with_one_more(self.first_homes));
        // The last bit that chooses among one home more is the one that the keys of the split home differ in.
        let last = next.mask().div_ceil(2);
        let bit = (last as u64) << (BITS_AFTER_CHOICE + self.bits_before_tag);
        let split = Split { from: homes - self.first_homes * last, to: homes, bit, next };
        // The keys of a home are its own while its lock is held. Locks are taken upward.
        let mut home = self.buckets[split.from].hold();
        let is_split =
            self.split_at_home(&split, &mut home) || self.split_beyond(&split, &mut home);
        // Homes are split in order: the memory of later splits is on its way when they come.
        self.buckets.prefetch(split.from + SPLITS_AHEAD);
        self.buckets.prefetch(split.to + SPLITS_AHEAD);
        is_split
    }

    /// Splits a home whose keys all live in its own bucket into one with room for them: as almost all are.
    #[inline]
    fn split_at_home(&self, split: &Split, home: &mut Held<'_, S>) -> bool {
        if home.0.spilled.load(Ordering::Acquire) > 0 {
            return false;
        }
        let mut target = self.buckets[split.to].hold();
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

    /// Splits a home some of whose keys live in later buckets, or must.
    #[cold]
    fn split_beyond<'a>(&'a self, split: &Split, home: &mut Held<'a, S>) -> bool {
        let &Split { from, to, .. } = split;
        // The later buckets in which keys of the home live.
        let mut sources: [Option<Held<'_, S>>; REACH] = std::array::from_fn(|_| None);
        let mut moving = home.tags().iter().filter(|tag| split.moves(**tag, 0)).count();
        let mut left = usize::from(home.0.spilled.load(Ordering::Acquire));
        for distance in 1..=REACH {
            if left == 0 {
                break;
            }
            let mut source = self.buckets[from + distance].hold();
            let tags = source.tags();
            let of_home = tags.iter().filter(|tag| **tag & DISTANCE == distance as u64).count();
            left = left.saturating_sub(of_home);
            moving += tags.iter().filter(|tag| split.moves(**tag, distance)).count();
            if of_home > 0 {
                sources[distance - 1] = Some(source);
            }
        }
        let mut targets: [Option<Held<'_, S>>; REACH + 1] = std::array::from_fn(|_| None);
        let mut room = 0;
        for (distance, target) in targets.iter_mut().enumerate() {
            if room >= moving {
                break;
            }
            let bucket = target.insert(self.buckets[to + distance].hold());
            room += bucket.tags().iter().filter(|tag| **tag == 0).count();
        }
        if room < moving {
            // It does not fit yet. Later, when keys were dropped, it may.
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
                        let empty = bucket.tags().iter().position(|tag| *tag == 0);
                        empty.map(|slot| (bucket, slot))
                    });
                    match empty {
                        Some(empty) => break empty,
                        None => target += 1,
                    }
                };
                self.carry((source, slot), empty, (tag & !DISTANCE) | target as u64);
                if distance > 0 {
                    self.buckets[from].spilled.fetch_sub(1, Ordering::Release);
                }
                if target > 0 {
                    self.buckets[to].spilled.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        self.bring_home(from, home, &mut sources);
        self.publish(split);
        true
    }

    /// Moves the keys of a home that live in later buckets into the slots that its split has emptied: a key is found sooner
    /// at home.
    fn bring_home(
        &self,
        index: usize,
        home: &mut Held<'_, S>,
        later: &mut [Option<Held<'_, S>>; REACH],
    ) {
        for (before, bucket) in later.iter_mut().enumerate() {
            let Some(bucket) = bucket else { continue };
            for (slot, tag) in bucket.tags().into_iter().enumerate() {
                if tag == 0 || (tag & DISTANCE) as usize != before + 1 {
                    continue;
                }
                let Some(empty) = home.empty() else { return };
                self.carry((bucket, slot), (home, empty), tag & !DISTANCE);
                self.buckets[index].spilled.fetch_sub(1, Ordering::Release);
            }
        }
    }

    /// Publishes one home more, under the locks of all keys that moved, and of where they are now.
    fn publish(&self, split: &Split) {
        self.shape.store(split.next.0, Ordering::Release);
        self.buckets.grown(split.to + 1 + REACH);
    }

    /// Moves a state to an empty slot of another bucket.
    fn carry(
        &self,
        (source, slot): (&mut Held<'_, S>, usize),
        (target, empty): (&mut Held<'_, S>, usize),
        tag: u64,
    ) {
        // States of the target may be of a later era than the one that comes: all are moved into it again when
        // the target is entered, which changes nothing for those that are in it.
        let era = self.era_of(source).min(self.era_of(target));
        target.0.era.store(era, Ordering::Relaxed);
        let state = source.slots(|slots| {
            slots.tags[slot] = 0;
            // Safety: it had a tag, so it has a state; the tag is gone, so it is not used again.
            unsafe { slots.states[slot].assume_init_read() }
        });
        target.fill(empty, tag, state);
    }
}

/// A bucket whose lock is among those that are held, and stays held. There is one such a bucket at a
/// time: callers have the locks to themselves (`&mut`), and let go of one before they make another of
/// the same bucket.
fn under<'a, S>(bucket: &'a Bucket<S>, locks: &Locks<'_>) -> ManuallyDrop<Held<'a, S>> {
    assert!(locks.have(&bucket.lock));
    ManuallyDrop::new(Held(bucket))
}

/// A bucket that can be entered: its lock was taken for it, or is among those that are held.
enum Open<'a, S> {
    Held(Held<'a, S>),
    Under(ManuallyDrop<Held<'a, S>>),
}

impl<S> Bucket<S> {
    /// The bucket, if its lock is held already or free.
    fn under_or_free(&self, locks: &Locks<'_>) -> Option<Open<'_, S>> {
        match locks.have(&self.lock) {
            true => Some(Open::Under(under(self, locks))),
            false => self.try_hold().map(Open::Held),
        }
    }
}

impl<'a, S> Deref for Open<'a, S> {
    type Target = Held<'a, S>;

    fn deref(&self) -> &Held<'a, S> {
        match self {
            Self::Held(held) => held,
            Self::Under(held) => held,
        }
    }
}

impl<S> DerefMut for Open<'_, S> {
    fn deref_mut(&mut self) -> &mut Self::Target {
        match self {
            Self::Held(held) => held,
            Self::Under(held) => held,
        }
    }
}

/// A place for a new key.
struct Room<'a, S> {
    distance: usize,
    slot: usize,
    /// Its bucket, if that is not the home.
    beyond: Option<Open<'a, S>>,
    was: Was,
}

/// What there was in a place before.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Was {
    Empty,
    Fresh,
    Live,
}

/// The key that is the first to go of those that were seen.
struct Least<'a, S> {
    /// Its rank, unless it is fresh.
    rank: Option<Rank>,
    room: Option<Room<'a, S>>,
    /// Whether too few live in reach to choose from.
    is_one_of_few: bool,
}

/// Whether a slot belongs to a key of the same decision.
fn is_pinned<S>(locks: Option<&Locks<'_>>, bucket: &Held<'_, S>, slot: usize) -> bool {
    locks.is_some_and(|locks| locks.is_pinned(&bucket.0.lock, slot))
}

/// Which watermark a key shares with others, wherever it lives.
const fn watermark_of(tag: u64) -> usize {
    ((tag >> 32) % WATERMARKS as u64) as usize
}

/// The time from which a key that is dropped may start again. What a late caller drops because it is fresh
/// may have changed after the caller read the clock.
fn dropped_at<A: Algorithm>(rule: &A, state: &A::State, now: Tick) -> Tick {
    if rule.is_fresh(state, now) { now.max(rule.last_change(state)) } else { now }
}

/// A key that was counted and has no place yet. If an algorithm of a user's own panics meanwhile, it is not counted.
struct Counted<'a> {
    len: &'a AtomicUsize,
    is_open: Cell<bool>,
}

impl Counted<'_> {
    fn settle(&self) {
        self.is_open.set(false);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        if self.is_open.get() && std::thread::panicking() {
            self.len.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

/// Runs on a state at `now`, or at its last change if that is later.
#[inline]
fn run_late<A: Algorithm, R>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    run: impl FnOnce(&mut A::State, Tick) -> R,
) -> R {
    let at = rule.decides_at(state, now);
    run(state, at)
}

impl<S> Drop for Table<S> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<S>() {
            for bucket in &self.buckets[..self.in_use()] {
                let mut bucket = bucket.hold();
                for slot in 0..SLOTS {
                    bucket.clear(slot);
                }
            }
        }
    }
}

/// Buckets in memory that is zeroed by the system, resident only where it was touched, and in large
/// pages where the system has them.
#[cfg(not(loom))]
struct Pages<T> {
    memory: memmap2::MmapMut,
    length: usize,
    holds: std::marker::PhantomData<T>,
}

#[cfg(not(loom))]
impl<S> Pages<Bucket<S>> {
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

    /// Is called when so many buckets are in use.
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
            for line in 0..size_of::<Bucket<S>>().div_ceil(LINE).min(FETCHED) {
                // Safety: a prefetch reads nothing that can be observed, at any address.
                unsafe { _mm_prefetch::<_MM_HINT_T0>(bucket.wrapping_add(LINE * line)) };
            }
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = index;
    }
}

#[cfg(not(loom))]
impl<S> Deref for Pages<Bucket<S>> {
    type Target = [Bucket<S>];

    #[inline]
    fn deref(&self) -> &[Bucket<S>] {
        // Safety: the memory is page-aligned, as long as `length` buckets, lives as long as `self`,
        // and was zeroed, which is a valid bucket: not locked, nothing spilled, never lived in, in the first era,
        // no tags, so no states.
        // It is only ever written through the cells and atomics of the buckets.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<Bucket<S>>(), self.length) }
    }
}

/// Under loom, buckets are objects that it follows.
#[cfg(loom)]
struct Pages<T>(Vec<T>);

#[cfg(loom)]
impl<S> Pages<Bucket<S>> {
    fn new(length: usize) -> Self {
        let bucket = |_| Bucket {
            lock: AtomicU8::new(0),
            lived_in: AtomicBool::new(false),
            spilled: AtomicU16::new(0),
            era: AtomicU32::new(0),
            slots: UnsafeCell::new(Slots {
                tags: [0; SLOTS],
                states: std::array::from_fn(|_| MaybeUninit::uninit()),
            }),
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

#[cfg(all(test, loom))]
mod loom_tests;

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// What a table knows of a key is enough for any other, smaller or larger, to find the key by its whole hash.
    #[test]
    fn keys_can_be_told_again_for_a_table_of_any_size() {
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
                    let told = one.key_at(one.spot(key));
                    assert_eq!(told, Fingerprint(hash & one.known), "{keys} keys");
                    assert_eq!(other.spot(told), other.spot(key), "{keys} keys to {other_keys}");
                }
            }
        }
    }
}
