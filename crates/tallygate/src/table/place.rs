//! Places for new keys: an empty slot, the slot of a fresh key, or that of a key that is evicted.

use std::cell::Cell;
use std::cmp::Reverse;

use tallygate_core::{Algorithm, Share, Tick};

use super::atomic::Ordering;
use super::counts::Counts;
use super::joint::{Locks, OpenBucket, is_pinned};
use super::{Full, KeySlot, LockedBucket, ONE_SPILLED, REACH, Reading, SLOTS, Table, dropped_at};

/// The number of keys that are not fresh and are compared before one of them is evicted. The search ends earlier if one
/// of them has used no larger share of its quota than the new key, and later if all of them have used half of their
/// quota.
const CANDIDATES: usize = 8;

/// The number of buckets out of reach in which a place is searched for, if there is none within reach and the table is
/// small, or if too few keys are within reach.
pub(super) const ELSEWHERE: usize = 128;

/// The number of searches out of reach for a key to evict for a key of a snapshot.
const RESTORE_SEARCHES: usize = 8;

/// The number of buckets beyond its home in which a new key looks for the slot of a fresh key if the table rejects new
/// keys.
const FRESH_REACH: usize = 1;

/// The behavior of a store that is full of keys that are not fresh, when a new key arrives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WhenFull {
    /// Compares some keys, and evicts the one that has used the smallest share of its own quota; among equal shares,
    /// the most recently used one. Shares of a half and more count as equal. So invented keys evict invented keys, and
    /// not clients that had used up their quota before, even if these have earned a part of it back. If no key can be
    /// evicted, because other threads use those in reach, the new key is denied as if it had used up its quota.
    #[default]
    EvictLeastUsed,
    /// Returns [`StoreError::Full`](crate::StoreError::Full) for the new key.
    RejectNew,
}

/// The order in which keys are evicted: first the key that has used the smallest share of its own quota; among equal
/// shares, the most recently used one. So invented keys evict invented keys, whatever their costs and limits are, and
/// not clients that had used up their quota before. Shares of a half and more count as equal: otherwise a client would
/// wait until it has earned one unit back, and be evicted by invented keys that have used all of theirs. No client can
/// invent keys while a snapshot is loaded, so its keys are compared by their exact shares.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Rank {
    share: Share,
    since: Reverse<Tick>,
}

/// For whom a place is searched: this decides which shares count as equal.
#[derive(Clone, Copy, PartialEq, Eq)]
enum NewKey {
    OfARequest,
    OfASnapshot,
}

impl NewKey {
    fn rank<A: Algorithm>(self, rule: &A, state: &A::State, now: Tick) -> Rank {
        let since = Reverse(rule.last_change(state));
        let share = rule.share_used(state, now);
        let share = if self == Self::OfARequest { share.min(Share::HALF) } else { share };
        Rank { share, since }
    }
}

impl Rank {
    /// Returns whether the client has used at least half of its quota.
    fn is_debt(&self) -> bool {
        self.share >= Share::HALF
    }
}

/// A place for a new key.
struct FreePlace<'a, S: 'static> {
    distance: usize,
    slot: usize,
    /// Its bucket, if that is not the home.
    beyond: Option<OpenBucket<'a, S>>,
    content: Content,
}

/// The content of a place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Content {
    Nothing,
    FreshKey,
    UsedKey,
}

/// The first key to evict among the compared keys.
struct Candidate<'a, S: 'static> {
    /// Its rank, unless it is fresh.
    rank: Option<Rank>,
    room: Option<FreePlace<'a, S>>,
    /// Whether there are too few keys within reach to choose from.
    is_one_of_few: bool,
}

/// The place of a key: its bucket, its slot, and the open bucket if it is not the home.
pub(super) type Placed<'a, S> = (usize, usize, Option<OpenBucket<'a, S>>);

impl<S: 'static> Table<S> {
    /// Returns whether a full table rejects all new keys.
    pub(crate) fn rejects_new(&self) -> bool {
        self.when_full == WhenFull::RejectNew
    }

    /// Decides for a key that the table does not have. Keys are evicted for it only if `evicts` is true.
    // Always inlined: it has one caller, which is called for new keys only.
    #[inline(always)]
    pub(super) fn with_new<'a, A: Algorithm<State = S>, R>(
        &'a self,
        rule: &A,
        key: KeySlot,
        (index, mut home): (usize, LockedBucket<'a, S>),
        (reading, evicts): (Reading, bool),
        run: impl FnOnce(&mut S, Tick) -> R,
    ) -> Result<R, Full> {
        // A late thread must not find room that the key had already used when it was dropped.
        let now = reading.now.max(self.floor(index, reading));
        let reading = Reading { now, ..reading };
        let mut state = rule.initial(now);
        let answer = run(&mut state, now);
        if rule.is_fresh(&state, now) {
            // A state that is still fresh needs no place.
            return Ok(answer);
        }
        // In most cases, the table has room for one more key, and the home has an empty slot.
        match home.empty() {
            Some(slot) if self.counts.reserve() => home.fill(slot, key.tag, state),
            _ => {
                let placed =
                    self.place(rule, key, (index, &mut home), reading, state, (None, evicts));
                // A key without a place must not be allowed: it could send any number of requests.
                if evicts || self.rejects_new() {
                    placed?;
                }
            }
        }
        drop(home);
        self.sweep_in_passing(rule, reading);
        self.grow();
        Ok(answer)
    }

    /// Stores a new state: in an empty slot if the table has room for one more key, in the slot of a fresh key, or in
    /// the slot of the least used key, unless the table rejects new keys or `evicts` is false. The caller holds the
    /// home's lock. Buckets that other threads have locked are skipped, so it waits for no lock.
    ///
    /// # Errors
    /// The table is full and rejects new keys, or other threads use all places within reach.
    #[cold]
    #[inline(never)]
    pub(super) fn place<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        key: KeySlot,
        (home_index, home): (usize, &mut LockedBucket<'a, S>),
        reading: Reading,
        state: S,
        (locks, evicts): (Option<&Locks<'_>>, bool),
    ) -> Result<Placed<'a, S>, Full> {
        let mut reserved = self.counts.reserve();
        if !reserved && self.rejects_new() {
            self.sweep_when_full(rule, reading);
            reserved = self.counts.reserve();
        }
        let reservation = Reservation { counts: &self.counts, is_open: Cell::new(reserved) };
        let mut room =
            if reserved { self.find_free(rule, home_index, home, reading, locks) } else { None };
        if room.is_none() {
            let own = evicts.then(|| rule.share_used(&state, reading.now));
            let own = (NewKey::OfARequest, own);
            let first = self.find_evictable(rule, (home_index, home), reading, own, locks);
            // Too few keys are within reach to choose from, as at the end of the table. One may be evicted elsewhere.
            let is_elsewhere = !reserved && first.is_one_of_few;
            if is_elsewhere && self.evict_any(rule, reading, NewKey::OfARequest, first.rank) {
                reserved = true;
                reservation.is_open.set(true);
                room = self.find_free(rule, home_index, home, reading, locks);
            }
            room = room.or(first.room);
        }
        reservation.is_open.set(false);
        let Some(room) = room else {
            if reserved {
                self.counts.release();
            }
            if evicts || self.rejects_new() {
                self.counts.own().rejected.fetch_add(1, Ordering::Relaxed);
            }
            return Err(Full);
        };
        if reserved && room.content != Content::Nothing {
            // The key takes the place of another key, so the reserved place is returned.
            self.counts.release();
        }
        Ok(self.move_in(rule, key, (home_index, home), room, reading, state))
    }

    /// Opens a bucket, unless another thread has locked it or it is of a later era.
    #[inline]
    fn open<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        index: usize,
        reading: Reading,
        locks: Option<&Locks<'_>>,
    ) -> Option<OpenBucket<'a, S>> {
        let mut bucket = OpenBucket::of(&self.buckets[index], locks)?;
        self.can_enter(rule, &mut bucket, reading).then_some(bucket)
    }

    /// Finds an empty slot or the slot of a fresh key within reach of a home.
    fn find_free<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        home_index: usize,
        home: &mut LockedBucket<'a, S>,
        reading: Reading,
        locks: Option<&Locks<'_>>,
    ) -> Option<FreePlace<'a, S>> {
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
                return Some(FreePlace { distance, slot, beyond, content: Content::Nothing });
            }
            for slot in 0..SLOTS {
                if !is_pinned(locks, bucket, slot)
                    && bucket.read(slot, |state| rule.is_fresh(state, reading.now))
                {
                    return Some(FreePlace { distance, slot, beyond, content: Content::FreshKey });
                }
            }
        }
        None
    }

    /// Finds the slot of a fresh key within reach of a home, or of the first key to evict for a new key that has used a
    /// share of its quota. Without a share, finds only the slot of a fresh key.
    fn find_evictable<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        (home_index, home): (usize, &mut LockedBucket<'a, S>),
        reading: Reading,
        (new_key, own): (NewKey, Option<Share>),
        locks: Option<&Locks<'_>>,
    ) -> Candidate<'a, S> {
        let finds_fresh_only = self.rejects_new() || own.is_none();
        let (mut rank, mut room, mut seen) = (None, None, 0);
        for distance in 0..=if finds_fresh_only { FRESH_REACH } else { REACH } {
            let mut beyond = match distance {
                0 => None,
                _ => match self.open(rule, home_index + distance, reading, locks) {
                    Some(open) => Some(open),
                    None => continue,
                },
            };
            let bucket = beyond.as_deref_mut().unwrap_or(&mut *home);
            let mut first_here = None;
            for slot in bucket.filled() {
                if is_pinned(locks, bucket, slot) {
                    continue;
                }
                if bucket.read(slot, |state| rule.is_fresh(state, reading.now)) {
                    let room =
                        Some(FreePlace { distance, slot, beyond, content: Content::FreshKey });
                    return Candidate { rank: None, room, is_one_of_few: false };
                }
                if finds_fresh_only {
                    continue;
                }
                seen += 1;
                let here = bucket.read(slot, |state| new_key.rank(rule, state, reading.now));
                if rank.is_none_or(|other| here < other) {
                    (rank, first_here) = (Some(here), Some(slot));
                }
            }
            if let Some(slot) = first_here {
                // Its bucket stays locked until the search ends, so that exactly this key is evicted.
                room = Some(FreePlace { distance, slot, beyond, content: Content::UsedKey });
            }
            // Clients that have used up their quota stay as long as any other key is within reach.
            let is_enough =
                |rank: Rank| !rank.is_debt() && (seen >= CANDIDATES || Some(rank.share) <= own);
            if rank.is_some_and(is_enough) {
                return Candidate { rank, room, is_one_of_few: false };
            }
        }
        let is_one_of_few = !finds_fresh_only && seen < CANDIDATES.min(self.counts.keys());
        Candidate { rank, room, is_one_of_few }
    }

    /// Makes a place for a key of a snapshot. If only keys that come later in the order of eviction could make room,
    /// the key of the snapshot counts as evicted instead.
    pub(crate) fn make_place_for<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        key: KeySlot,
        reading: Reading,
        state: &S,
    ) -> bool {
        if self.rejects_new() {
            return true;
        }
        let new_key = NewKey::OfASnapshot;
        let rank = new_key.rank(rule, state, reading.now);
        let index = self.home(key, self.shape());
        let mut home = self.buckets[index].lock();
        let has_empty_slot = self.find_free(rule, index, &mut home, reading, None).is_some();
        if has_empty_slot && self.counts.keys() < self.max_keys() {
            return true;
        }
        let own = (new_key, Some(rank.share));
        let first = self.find_evictable(rule, (index, &mut home), reading, own, None);
        let (first_rank, room) = (first.rank, first.room);
        if first_rank.is_none() && room.is_some() {
            return true;
        }
        // All keys within reach can have used as much as this one although others have used less.
        let less_used = Rank { share: rank.share, since: Reverse(Tick(i64::MAX)) };
        let is_made = first_rank.is_none_or(|first| first >= less_used)
            && has_empty_slot
            && (0..RESTORE_SEARCHES)
                .any(|_| self.evict_any(rule, reading, new_key, Some(less_used)));
        let is_made = is_made
            || match room {
                Some(room) if first_rank.is_some_and(|first| first < rank) => {
                    let FreePlace { distance, slot, mut beyond, .. } = room;
                    let tag = beyond.as_deref_mut().unwrap_or(&mut home).clear(slot);
                    self.forget(index + distance, tag, reading, reading.now);
                    self.counts.own().evicted.fetch_add(1, Ordering::Relaxed);
                    true
                }
                _ => has_empty_slot && self.evict_any(rule, reading, new_key, Some(rank)),
            };
        if is_made {
            self.counts.release();
        } else {
            self.counts.own().evicted.fetch_add(1, Ordering::Relaxed);
        }
        is_made
    }

    /// Puts a new key into a place that was found for it.
    fn move_in<'a, A: Algorithm<State = S>>(
        &'a self,
        rule: &A,
        key: KeySlot,
        (home_index, home): (usize, &mut LockedBucket<'a, S>),
        room: FreePlace<'a, S>,
        reading: Reading,
        state: S,
    ) -> Placed<'a, S> {
        let FreePlace { distance, slot, mut beyond, content } = room;
        match content {
            Content::Nothing => {}
            Content::FreshKey => _ = self.counts.own().swept.fetch_add(1, Ordering::Relaxed),
            Content::UsedKey => _ = self.counts.own().evicted.fetch_add(1, Ordering::Relaxed),
        }
        let bucket = beyond.as_deref_mut().unwrap_or(home);
        self.replace(rule, bucket, slot, (key, home_index, distance), reading, state);
        (home_index + distance, slot, beyond)
    }

    /// Compares some keys out of reach, and evicts the first of them in the order of eviction if it comes before a
    /// rank. Returns whether it evicted one.
    #[cold]
    fn evict_any<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        reading: Reading,
        new_key: NewKey,
        before: Option<Rank>,
    ) -> bool {
        let elsewhere = self.find_elsewhere(rule, reading, new_key, before);
        let Some((mut bucket, index, slot)) = elsewhere else {
            return false;
        };
        let tag = bucket.clear(slot);
        self.forget(index, tag, reading, reading.now);
        self.counts.own().evicted.fetch_add(1, Ordering::Relaxed);
        true
    }

    /// Compares some keys out of reach, in buckets that no other thread has locked, and finds the first of them in the
    /// order of eviction if it comes before a rank. Returns its bucket, the index of the bucket, and its slot.
    #[cold]
    fn find_elsewhere<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        reading: Reading,
        new_key: NewKey,
        before: Option<Rank>,
    ) -> Option<(LockedBucket<'_, S>, usize, usize)> {
        let (now, in_use) = (reading.now, self.in_use());
        let mut first: Option<(Rank, LockedBucket<'_, S>, usize, usize)> = None;
        let mut seen = 0;
        for _ in 0..in_use.min(ELSEWHERE) {
            let index = spread(self.counts.own().searched.fetch_add(1, Ordering::Relaxed), in_use);
            // This does not wait for the lock, so the order of locks does not matter.
            let Some(mut bucket) = self.buckets[index].try_lock() else { continue };
            if !self.can_enter(rule, &mut bucket, reading) {
                continue;
            }
            let ranks = bucket.filled().map(|slot| {
                seen += 1;
                (bucket.read(slot, |state| new_key.rank(rule, state, now)), slot)
            });
            if let Some((rank, slot)) = ranks.min_by_key(|(rank, _)| *rank) {
                let is_first = first.as_ref().is_none_or(|(other, ..)| rank < *other);
                if is_first && before.is_none_or(|before| rank < before) {
                    first = Some((rank, bucket, index, slot));
                }
            }
            if seen >= CANDIDATES && (first.is_some() || before.is_some()) {
                break;
            }
        }
        first.map(|(_, bucket, index, slot)| (bucket, index, slot))
    }

    /// Replaces the key in a slot by another key, with its distance from its home.
    fn replace<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        bucket: &mut LockedBucket<'_, S>,
        slot: usize,
        (key, home, distance): (KeySlot, usize, usize),
        reading: Reading,
        state: S,
    ) {
        if distance > 0 {
            self.buckets[home].marks.fetch_add(ONE_SPILLED, Ordering::Relaxed);
        }
        let gone = bucket.tag(slot);
        let at = match gone {
            0 => reading.now,
            _ => bucket.read(slot, |state| dropped_at(rule, state, reading.now)),
        };
        bucket.put(slot, key.tag | distance as u64, state);
        self.forget(home + distance, gone, reading, at);
    }
}

/// Chooses a bucket by a count. A small table is visited in order, so that no bucket is missed. In a large one, the
/// buckets of successive counts are far apart, because the keys of a snapshot come in the order of their hashes and
/// would be compared with neighbors only.
const fn spread(count: usize, in_use: usize) -> usize {
    if in_use <= ELSEWHERE {
        return count % in_use;
    }
    /// 2⁶⁴ divided by the golden ratio.
    const STEP: u64 = 0x9E37_79B9_7F4A_7C15;
    #[expect(clippy::cast_possible_truncation, reason = "it is below a usize")]
    let index =
        (((count as u64).wrapping_mul(STEP) as u128 * in_use as u128) >> u64::BITS) as usize;
    index
}

/// A place that was reserved for a key that has no slot yet. If a user's algorithm panics meanwhile, the place is returned.
struct Reservation<'a> {
    counts: &'a Counts,
    is_open: Cell<bool>,
}

impl Drop for Reservation<'_> {
    fn drop(&mut self) {
        if self.is_open.get() && std::thread::panicking() {
            self.counts.release();
        }
    }
}
