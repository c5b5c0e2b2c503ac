//! The table: states by fingerprint, in buckets of two cache lines, each with a lock of its own.
//!
//! A bucket holds five slots and its lock, so that a decision on a known key touches one or two
//! lines and waits only for the few keys that share them. The size is fixed when the table is made:
//! nothing is ever moved or grown, so there is no pause, and untouched memory is never resident.
//!
//! A key belongs to the bucket its fingerprint says, its home, and the home's lock is the key's
//! lock: whoever finds, makes or changes a key's state holds it. A key that finds its home full
//! lives in one of the next buckets; the home counts how many do, so that only then a search looks
//! further. Locks are taken from lower to higher buckets only, or not waited for; also by a decision on
//! several keys, which holds several locks.
//!
//! This is the one file with unsafe code: states lie in cells under a lock of a few bytes, in memory
//! that the system gives zeroed and in large pages. `cfg(loom)` swaps atomics and cells for loom's;
//! `scripts/loom` runs every interleaving of this very file.

#![expect(unsafe_code, reason = "measured: 16-byte states behind a lock in their own cache line")]

use std::mem::{ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};

use tollgate_core::{Algorithm, Tick};

#[cfg(loom)]
use loom::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicI64, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};
#[cfg(not(loom))]
use std::{
    cell::UnsafeCell,
    sync::atomic::{AtomicBool, AtomicI64, AtomicU16, AtomicU32, AtomicU64, AtomicUsize, Ordering},
};

/// Slots in a bucket: with 16-byte states and their tags, two cache lines with the lock.
const SLOTS: usize = if cfg!(loom) { 1 } else { 5 };

/// How many buckets beyond its home a key may live.
const REACH: usize = if cfg!(loom) { 1 } else { 31 };

/// How full the buckets are when the table is, in hundredths. At 60 a key in fifteen lives away from
/// home, and the furthest of five million about 16 buckets; at 70 some would find no place in reach.
const FILL: usize = 60;

/// The bytes of a cache line, and how many lines of a bucket are fetched ahead: all, of buckets with states of up to
/// 40 bytes.
#[cfg(all(target_arch = "x86_64", not(loom)))]
const LINE: usize = 64;
#[cfg(all(target_arch = "x86_64", not(loom)))]
const FETCHED: usize = 4;

/// How many buckets a new key sweeps in passing.
const SWEEP: usize = 2;

/// How many live keys are compared before the least used of them is evicted.
const CANDIDATES: usize = 8;

/// How many times of dropped keys are kept: homes share them.
const WATERMARKS: usize = if cfg!(loom) { 1 } else { 256 };

/// In how many rounds all buckets are shown.
const ROUNDS: usize = 64;

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
    /// Forget the least used of some: whoever invents keys pushes out other inventions, not the
    /// client that owes.
    #[default]
    EvictLeastUsed,
    /// Refuse the new key.
    RefuseNew,
}

/// The table was full, and set to refuse new keys then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Full;

pub(crate) struct Table<S> {
    buckets: Pages<Bucket<S>>,
    /// How many of the buckets can be homes; the rest are for the keys of the last homes.
    homes: usize,
    /// How many bits of a hash are known of a key.
    known_bits: u32,
    /// Those bits.
    known: u128,
    max_keys: usize,
    when_full: WhenFull,
    len: AtomicUsize,
    cursor: AtomicUsize,
    /// The latest time at which a key of some homes was dropped: see `floor`.
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

#[repr(C, align(64))]
struct Bucket<S> {
    /// 1 while somebody holds the bucket.
    lock: AtomicU32,
    /// How many keys whose home this is live in a later bucket. Raised under the home's lock before
    /// the key is placed, lowered by whoever dropped it afterwards: never too low.
    spilled: AtomicU16,
    /// Whether anybody has ever lived here. A look at it touches no memory that was not touched before.
    lived_in: AtomicBool,
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

/// A key in a table: its home, and what it is told by there.
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

/// A bucket whose lock is held. Dropping it lets go, also when a decision panics.
struct Held<'a, S>(&'a Bucket<S>);

/// Locks of buckets, of any tables, held together. Dropping them lets go of all.
///
/// They are taken in their order, as everybody does who waits for one while holding another: so nobody
/// waits in a circle.
#[derive(Debug, Default)]
pub struct Locks<'a>(Vec<&'a AtomicU32>);

/// A key whose lock is held, among others, and where its state is, if one is kept.
#[derive(Clone, Copy, Debug)]
pub struct Found {
    key: Spot,
    at: Option<(usize, usize)>,
}

impl Found {
    /// Whether a state is kept for the key.
    pub(crate) const fn is_kept(&self) -> bool {
        self.at.is_some()
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
fn address(lock: &AtomicU32) -> usize {
    std::ptr::from_ref(lock).addr()
}

#[inline]
fn take(lock: &AtomicU32) {
    while !try_take(lock) {
        wait_for(lock);
    }
}

#[inline]
fn try_take(lock: &AtomicU32) -> bool {
    lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok()
}

#[inline]
fn let_go(lock: &AtomicU32) {
    lock.store(0, Ordering::Release);
}

/// Waits until a lock may be free, without writing, so that the holder keeps the line.
#[cfg(not(loom))]
#[cold]
fn wait_for(lock: &AtomicU32) {
    let mut spins = 0_u32;
    while lock.load(Ordering::Relaxed) != 0 {
        spins += 1;
        // A holder that was descheduled needs the processor more.
        if spins.is_multiple_of(64) { std::thread::yield_now() } else { std::hint::spin_loop() }
    }
}

#[cfg(loom)]
fn wait_for(_: &AtomicU32) {
    loom::thread::yield_now();
}

impl<S> Drop for Held<'_, S> {
    #[inline]
    fn drop(&mut self) {
        let_go(&self.0.lock);
    }
}

impl<'a> Locks<'a> {
    fn take(&mut self, lock: &'a AtomicU32) {
        if !self.have(lock) {
            debug_assert!(self.0.iter().all(|held| address(held) < address(lock)));
            take(lock);
            self.0.push(lock);
        }
    }

    fn have(&self, lock: &AtomicU32) -> bool {
        self.0.iter().any(|held| std::ptr::eq(*held, lock))
    }
}

impl Drop for Locks<'_> {
    fn drop(&mut self) {
        self.0.drain(..).for_each(let_go);
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

    /// Fills a slot, dropping the state that was there.
    fn put(&mut self, slot: usize, tag: u64, state: S) {
        self.clear(slot);
        self.0.lived_in.store(true, Ordering::Relaxed);
        self.slots(|slots| {
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
        let known_bits = known_bits.clamp(1, TAG_BITS + homes.ilog2());
        Self {
            buckets: Pages::new(homes + REACH),
            homes,
            known_bits,
            known: u128::MAX << (u128::BITS - known_bits),
            max_keys: max_keys.max(1),
            when_full,
            len: AtomicUsize::new(0),
            cursor: AtomicUsize::new(0),
            watermarks: (0..WATERMARKS).map(|_| AtomicI64::new(i64::MIN)).collect(),
            counters: Counters::default(),
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

    /// How many bits of a hash are known of its keys.
    pub(crate) const fn known_bits(&self) -> u32 {
        self.known_bits
    }

    /// Where a key belongs. What a decision on it will need starts to load.
    ///
    /// Its hash, as a fraction of 1, is stretched over the homes: the whole part says which one, and the first
    /// 59 bits of the rest tell it from the others there. Together they are as good as the first bits of the
    /// hash, 59 and as many as the number of homes has, so that [`show`](Self::show) can tell them again, for a
    /// table of another size. In a table made for n keys, the odds that any two of n keys are taken for one are
    /// at most 3 · n / 2⁵⁹: for five million keys one in 38 billion.
    #[inline]
    pub(crate) fn spot(&self, key: Fingerprint) -> Spot {
        let hash = key.0 & self.known;
        #[expect(clippy::cast_possible_truncation, reason = "the two halves")]
        let (high, low) = ((hash >> 64) as u64, hash as u64);
        let homes = self.homes as u128;
        let place = u128::from(high) * homes + ((u128::from(low) * homes) >> 64);
        #[expect(clippy::cast_possible_truncation, reason = "below a usize, and the rest")]
        let (home, rest) = ((place >> 64) as usize, place as u64);
        self.buckets.prefetch(home);
        Spot { home, tag: (rest & !DISTANCE).max(DISTANCE + 1) }
    }

    /// The key that belongs to a spot.
    fn key_at(&self, Spot { home, tag }: Spot) -> Fingerprint {
        let homes = self.homes as u128;
        let place = (home as u128) << 64 | u128::from(tag & !DISTANCE);
        // The least that is stretched so far: by long division, for it has 192 bits.
        let least = ((place / homes) << 64) + ((place % homes) << 64).div_ceil(homes);
        Fingerprint(least.saturating_add(!self.known) & self.known)
    }

    /// Its buckets, for [`show`](Self::show). They come from all over the table: so a smaller one that takes over their
    /// keys in this order has all kinds of neighbours to evict the least used of.
    pub(crate) fn buckets(&self) -> impl Iterator<Item = usize> + use<S> {
        let buckets = self.buckets.len();
        (0..ROUNDS).flat_map(move |first| (first..buckets).step_by(ROUNDS))
    }

    /// Shows the keys that live in a bucket, and their states. Whoever goes through all buckets has seen all keys, but
    /// for those that were dropped and came again meanwhile: these may be seen twice, as they are last, or not at all.
    pub(crate) fn show(&self, index: usize, mut show: impl FnMut(Fingerprint, &S)) {
        if !self.buckets[index].lived_in.load(Ordering::Relaxed) {
            return;
        }
        let mut bucket = self.buckets[index].hold();
        for (slot, tag) in bucket.tags().into_iter().enumerate().filter(|(_, tag)| *tag != 0) {
            let home = index - (tag & DISTANCE) as usize;
            let key = self.key_at(Spot { home, tag });
            bucket.with_state(slot, |state| show(key, state));
        }
    }

    /// Runs on a key's state while nobody else can: the one that is kept, or else a new one, which is
    /// then kept unless it is still fresh.
    ///
    /// `run` gets the time to decide at. It is later than `now` if the state has changed since: `now` was
    /// read before the lock, so the caller is late, and time that was earned already is not earned twice.
    #[inline]
    pub(crate) fn with<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        key: Spot,
        now: Tick,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        let mut home = self.buckets[key.home].hold();
        if let Some(slot) = home.find(key.tag) {
            return Ok(home.with_state(slot, |state| run_late(rule, state, now, run)));
        }
        // Acquire: whoever sees that a key is gone sees when it went.
        if home.0.spilled.load(Ordering::Acquire) > 0
            && let Some((mut bucket, slot)) = self.find_beyond(&home, key)
        {
            return Ok(bucket.with_state(slot, |state| run_late(rule, state, now, run)));
        }
        self.with_new(rule, key, home, now, run)
    }

    /// Where the lock of a key comes in the order of all.
    pub(crate) fn lock_order(&self, key: Spot) -> usize {
        address(&self.buckets[key.home].lock)
    }

    /// Takes the locks of a key, in addition to those that are held, and looks where it is. Keys are
    /// to be looked for in the order of their locks.
    pub(crate) fn look_for<'a>(&'a self, key: Spot, locks: &mut Locks<'a>) -> Found {
        let home = &self.buckets[key.home];
        locks.take(&home.lock);
        let reach = if home.spilled.load(Ordering::Acquire) > 0 { REACH } else { 0 };
        for distance in 0..=reach {
            let index = key.home + distance;
            locks.take(&self.buckets[index].lock);
            let slot = under(&self.buckets[index], locks).find(key.tag | distance as u64);
            if let Some(slot) = slot {
                return Found { key, at: Some((index, slot)) };
            }
        }
        Found { key, at: None }
    }

    /// Whether a new key would be refused, because the table is full and set to refuse then.
    pub(crate) fn refuses_new<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: Found,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> bool {
        let home = || under(&self.buckets[found.key.home], locks);
        found.at.is_none() && self.is_closed(rule, &mut home(), now)
    }

    /// Reads the state of a key that was found, or the one it would start with.
    pub(crate) fn read_found<A: Algorithm<State = S>, R>(
        &self,
        rule: &A,
        found: Found,
        now: Tick,
        locks: &mut Locks<'_>,
        read: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        match found.at {
            Some((bucket, slot)) => {
                let mut bucket = under(&self.buckets[bucket], locks);
                bucket.with_state(slot, |state| run_late(rule, state, now, read))
            }
            None => {
                let now = now.max(self.floor(found.key.home));
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
        now: Tick,
        locks: &mut Locks<'_>,
        change: impl FnOnce(&mut S, Tick) -> R,
    ) -> R {
        let Found { key, at: None } = found else {
            return self.read_found(rule, found, now, locks, change);
        };
        let now = now.max(self.floor(key.home));
        let mut state = rule.first(now);
        let answer = change(&mut state, now);
        if !is_fresh(rule, &state, now) {
            let mut home = under(&self.buckets[key.home], locks);
            self.place(rule, key, &mut home, now, state, |bucket| bucket.under_or_free(locks));
            self.sweep(rule, now);
        }
        answer
    }

    /// Looks for a key in the buckets after its home, whose lock is held.
    #[cold]
    fn find_beyond(&self, home: &Held<'_, S>, key: Spot) -> Option<(Held<'_, S>, usize)> {
        let mut left = home.0.spilled.load(Ordering::Relaxed);
        for distance in 1..=REACH {
            let mut bucket = self.buckets[key.home + distance].hold();
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
    #[cold]
    fn with_new<'a, A: Algorithm<State = S>, R>(
        &'a self,
        rule: &A,
        key: Spot,
        mut home: Held<'a, S>,
        now: Tick,
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        // A late thread must not find room that the key had already used when it was dropped.
        let now = now.max(self.floor(key.home));
        let mut state = rule.first(now);
        let answer = run(&mut state, now);
        if !is_fresh(rule, &state, now) {
            // What leaves nothing behind, such as a look, needs no place.
            if self.is_closed(rule, &mut home, now) {
                return Err(Full);
            }
            self.place(rule, key, &mut home, now, state, |bucket| {
                bucket.try_hold().map(Open::Held)
            });
            drop(home);
            self.sweep(rule, now);
        }
        Ok(answer)
    }

    /// Whether a new key of a home is to be refused.
    fn is_closed<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        home: &mut Held<'_, S>,
        now: Tick,
    ) -> bool {
        if self.when_full != WhenFull::RefuseNew || self.len() < self.max_keys {
            return false;
        }
        self.sweep(rule, now);
        let closed = self.len() >= self.max_keys && !self.has_fresh(rule, home, now);
        self.counters.refused.fetch_add(closed.into(), Ordering::Relaxed);
        closed
    }

    /// Keeps a new state: in an empty slot if there may be one more key, in a fresh one's place, or
    /// in the place of the least used. Only the home's lock is needed: other buckets that cannot be
    /// opened, because somebody has them, are passed over, so nobody is waited for.
    fn place<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        key: Spot,
        home: &mut Held<'a, S>,
        now: Tick,
        state: S,
        open: impl Fn(&'a Bucket<S>) -> Option<Open<'a, S>>,
    ) {
        let reserved = self.len.fetch_add(1, Ordering::Relaxed) < self.max_keys
            // Whoever may not evict was let in before: threads that come at once may be a few too many.
            || self.when_full == WhenFull::RefuseNew;
        let mut least: Option<(usize, usize, u64)> = None;
        let mut seen = 0;
        for distance in 0..=REACH {
            let mut beyond = match distance {
                0 => None,
                _ => match open(&self.buckets[key.home + distance]) {
                    Some(open) => Some(open),
                    None => continue,
                },
            };
            let bucket = beyond.as_deref_mut().unwrap_or(home);
            let tags = bucket.tags();
            if let Some(slot) = tags.iter().position(|tag| *tag == 0).filter(|_| reserved) {
                return self.replace(bucket, slot, (key, distance), now, state);
            }
            for slot in (0..SLOTS).filter(|slot| tags[*slot] != 0) {
                if bucket.with_state(slot, |state| is_fresh(rule, state, now)) {
                    // It takes a fresh one's place, and gives back the one that was reserved.
                    self.counters.swept.fetch_add(1, Ordering::Relaxed);
                    self.len.fetch_sub(1, Ordering::Relaxed);
                    return self.replace(bucket, slot, (key, distance), now, state);
                }
                let used = bucket.with_state(slot, |state| rule.used(state, now)).rounded_up();
                if least.is_none_or(|(_, _, other)| used < other) {
                    least = Some((distance, slot, used));
                }
                seen += 1;
            }
            if !reserved && seen >= CANDIDATES {
                break;
            }
        }
        let Some((distance, slot, _)) = least else {
            // Nobody lives in reach, as at the end of the table: somebody goes elsewhere.
            if self.evict_any(rule, now) {
                self.len.fetch_sub(1, Ordering::Relaxed);
            }
            return self.replace(home, 0, (key, 0), now, state);
        };
        self.len.fetch_sub(1, Ordering::Relaxed);
        // Its bucket was let go meanwhile. If somebody has it now, one at home goes instead.
        let mut beyond = match distance {
            0 => None,
            _ => open(&self.buckets[key.home + distance]),
        };
        let (distance, slot) = if beyond.is_some() { (distance, slot) } else { (0, slot) };
        let bucket = beyond.as_deref_mut().unwrap_or(home);
        // Whoever is in the slot now goes; if nobody is, there is one key more for a while, for whoever
        // comes next finds the table full.
        if bucket.tags()[slot] == 0 {
            self.len.fetch_add(1, Ordering::Relaxed);
        } else {
            self.counters.evicted.fetch_add(1, Ordering::Relaxed);
        }
        self.replace(bucket, slot, (key, distance), now, state);
    }

    /// Evicts the least used of the next bucket that nobody has and somebody lives in.
    #[cold]
    fn evict_any<A: Algorithm<State = S>>(&self, rule: &A, now: Tick) -> bool {
        for _ in 0..self.buckets.len() {
            let index = self.cursor.fetch_add(1, Ordering::Relaxed) % self.buckets.len();
            let Some(mut bucket) = self.buckets[index].try_hold() else { continue };
            let tags = bucket.tags();
            let mut used = |slot: &usize| bucket.with_state(*slot, |state| rule.used(state, now));
            let lived_in = (0..SLOTS).filter(|slot| tags[*slot] != 0);
            if let Some(slot) = lived_in.min_by_key(|slot| used(slot).rounded_up()) {
                let tag = bucket.clear(slot);
                self.forget(index, tag, now);
                self.counters.evicted.fetch_add(1, Ordering::Relaxed);
                return true;
            }
        }
        false
    }

    /// Puts a key, at a distance from its home, into a slot, in place of whatever is there.
    fn replace(
        &self,
        bucket: &mut Held<'_, S>,
        slot: usize,
        (key, distance): (Spot, usize),
        now: Tick,
        state: S,
    ) {
        if distance > 0 {
            self.buckets[key.home].spilled.fetch_add(1, Ordering::Relaxed);
        }
        let gone = bucket.tags()[slot];
        bucket.put(slot, key.tag | distance as u64, state);
        self.forget(key.home + distance, gone, now);
    }

    /// Notes that a key is gone from a bucket, whose lock is held.
    fn forget(&self, index: usize, tag: u64, now: Tick) {
        if tag == 0 {
            return;
        }
        let distance = (tag & DISTANCE) as usize;
        let home = index - distance;
        self.watermarks[home % WATERMARKS].fetch_max(now.0, Ordering::Relaxed);
        if distance > 0 {
            self.buckets[home].spilled.fetch_sub(1, Ordering::Release);
        }
    }

    /// The time before which no new key of a home may start: when the last one was dropped there.
    fn floor(&self, index: usize) -> Tick {
        Tick(self.watermarks[index % WATERMARKS].load(Ordering::Relaxed))
    }

    fn has_fresh<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut Held<'_, S>,
        now: Tick,
    ) -> bool {
        (0..SLOTS).any(|slot| {
            bucket.tags()[slot] != 0 && bucket.with_state(slot, |state| is_fresh(rule, state, now))
        })
    }

    /// Drops the fresh keys of the next few buckets, without waiting for any of them. While half of
    /// the table is free nothing is gained by it: the keys may come back.
    fn sweep<A: Algorithm<State = S>>(&self, rule: &A, now: Tick) {
        if self.len() <= self.max_keys / 2 {
            return;
        }
        for _ in 0..SWEEP {
            let index = self.cursor.fetch_add(1, Ordering::Relaxed) % self.buckets.len();
            let Some(mut bucket) = self.buckets[index].try_hold() else { continue };
            for slot in 0..SLOTS {
                if bucket.tags()[slot] != 0
                    && bucket.with_state(slot, |state| is_fresh(rule, state, now))
                {
                    let tag = bucket.clear(slot);
                    self.forget(index, tag, now);
                    self.len.fetch_sub(1, Ordering::Relaxed);
                    self.counters.swept.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
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

/// Runs on a state at `now`, or at its last change if that is later.
#[inline]
fn run_late<A: Algorithm, R>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    run: impl FnOnce(&mut A::State, Tick) -> R,
) -> R {
    let at = now.max(rule.last_change(state));
    run(state, at)
}

fn is_fresh<A: Algorithm>(rule: &A, state: &A::State, now: Tick) -> bool {
    rule.fresh_at(state).is_some_and(|fresh| fresh <= now)
}

impl<S> Drop for Table<S> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<S>() {
            for bucket in self.buckets.iter() {
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
        // Without large pages it works as well, only slower.
        let _ = memory.advise(memmap2::Advice::HugePage);
        Self { memory, length, holds: std::marker::PhantomData }
    }

    #[inline]
    fn prefetch(&self, index: usize) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let bucket = std::ptr::from_ref(&self[index]).cast::<i8>();
            for line in 0..size_of::<Bucket<S>>().div_ceil(LINE).min(FETCHED) {
                // Safety: a prefetch reads nothing that can be observed, at any address; these lines are
                // of a bucket that is there.
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
        // and was zeroed, which is a valid bucket: not locked, nothing spilled, never lived in, no tags, so no
        // states.
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
            lock: AtomicU32::new(0),
            spilled: AtomicU16::new(0),
            lived_in: AtomicBool::new(false),
            slots: UnsafeCell::new(Slots {
                tags: [0; SLOTS],
                states: std::array::from_fn(|_| MaybeUninit::uninit()),
            }),
        };
        Self((0..length).map(bucket).collect())
    }

    fn prefetch(&self, _: usize) {}
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
