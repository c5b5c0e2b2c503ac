//! Notes of denials, which deny a client whose state has pointers without its lock.
//!
//! Such a state cannot be copied without the lock. But most of these clients have one policy that is one bucket, whose
//! state is two words. If a thread denies such a client under the lock, and the check before was denied as well, it
//! notes the two words, and the word that it leaves in the lock of the table's bucket. The note is valid while the lock
//! has that word. Other threads then deny by the note, and write nothing.
//!
//! There are few notes, and the buckets of the table share them. A client whose note is replaced is denied under its lock
//! and noted again.

use std::any::{Any, TypeId};

use tallygate_core::{Algorithm, Answer, Bucket, BucketState, Cost};

use super::atomic::{AtomicU64, Ordering};
use super::{BucketLock, LockedBucket, Lookup, Reading, Table, Version, from_words, word};
use crate::client_state::ClientState;
use crate::lateness::counted_from;

/// The number of notes of a table.
const NOTES: usize = if cfg!(loom) { 1 } else { 256 };

/// Returns whether denials of states of this type are noted.
#[inline(always)]
pub(super) fn are_noted<S: 'static>() -> bool {
    TypeId::of::<S>() == TypeId::of::<ClientState>()
}

/// The notes of a table.
pub(super) struct Denials(Box<[Note]>);

/// A note, on a cache line of its own. Its lock is a sequence lock, like those of the table's buckets.
#[repr(align(64))]
struct Note {
    lock: BucketLock,
    words: [AtomicU64; WORDS],
}

const WORDS: usize = FACTS + 2;

/// The words before the state, which must be equal for a note to be valid.
const FACTS: usize = 4;

impl Denials {
    pub(super) fn of<S: 'static>() -> Self {
        let note =
            |_| Note { lock: BucketLock::new(), words: std::array::from_fn(|_| AtomicU64::new(0)) };
        Self((0..if are_noted::<S>() { NOTES } else { 0 }).map(note).collect())
    }
}

impl Note {
    fn write(&self, facts: [u64; FACTS], state: &BucketState) {
        // Skip this note if another thread writes one now, which is as good.
        if self.lock.try_lock() {
            let words = facts.into_iter().chain([word(state, 0), word(state, 1)]);
            for (to, word) in self.words.iter().zip(words) {
                to.store(word, Ordering::Relaxed);
            }
            self.lock.unlock();
        }
    }

    /// Returns the state of a note with these facts.
    fn read(&self, facts: [u64; FACTS]) -> Option<BucketState> {
        let version = self.lock.begin_read()?;
        let words: [u64; WORDS] =
            std::array::from_fn(|index| self.words[index].load(Ordering::Relaxed));
        let is_true = self.lock.is_unchanged(version) && words[..FACTS] == facts;
        is_true.then(|| from_words(|index| words[FACTS + index]))
    }
}

/// Returns the words that must be equal for a note to be valid: the key, the word of the lock, and the bucket that
/// decides. A state keeps its bucket alive, so no other bucket has that address while the state is in the table.
fn facts(lookup: Lookup, version: Version, rule: &Bucket) -> [u64; FACTS] {
    let rule = std::ptr::from_ref(rule).addr();
    [lookup.home as u64, lookup.spot.tag, u64::from(version.0), rule as u64]
}

impl<S: 'static> Table<S> {
    /// Records whether the last check of a slot was denied, and notes a repeated denial. Called last, before the bucket is
    /// unlocked.
    pub(super) fn note_denial(
        &self,
        lookup: Lookup,
        home: &LockedBucket<'_, S>,
        slot: usize,
        is_denied: bool,
    ) {
        let is_repeated = is_denied && home.0.lock.was_denied(slot);
        home.0.lock.set_denied(slot, is_denied);
        if !is_repeated {
            return;
        }
        let version = home.0.lock.next_version();
        home.read(slot, |state| {
            let client = (state as &dyn Any).downcast_ref::<ClientState>();
            if let Some((rule, state)) = client.and_then(ClientState::sole_bucket) {
                self.note_of(lookup).write(facts(lookup, version, rule), state);
            }
        });
    }

    /// Denies a check from a note, if there is a valid one and its state still denies the check.
    ///
    /// An outdated note looks valid only if the lock was taken a multiple of 2²⁶ times since. Then a request can be
    /// denied by an old state, but none is allowed by it.
    #[inline(never)]
    pub(super) fn deny_as_noted<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        lookup: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Option<T> {
        let bucket = rule.sole_bucket(reading.now)?;
        let home = &self.buckets[lookup.home];
        let version = home.lock.begin_read()?;
        let mut state = self.note_of(lookup).read(facts(lookup, version, bucket))?;
        if !home.is_in_era(reading) || !home.lock.is_unchanged(version) {
            return None;
        }
        let at = bucket.decision_time(&state, reading.now);
        // The rule may decide by another bucket at a later time.
        let decides = rule.sole_bucket(at).is_some_and(|then| std::ptr::eq(then, bucket));
        if !decides || bucket.allows(&state, at, cost) {
            return None;
        }
        Some(counted_from(reading.now, at, bucket.decide::<T>(&mut state, at, cost)))
    }

    fn note_of(&self, lookup: Lookup) -> &Note {
        &self.denials.0[lookup.home % NOTES]
    }
}
