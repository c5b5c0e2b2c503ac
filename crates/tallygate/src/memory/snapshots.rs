//! Saving memory stores to snapshots, and restoring them.

use std::io::{self, Read, Write};
use std::sync::Arc;

use tallygate_core::{
    Algorithm, BucketState, FixedWindowState, LimitRecord, LimitState, Policy,
    SlidingWindowCounterState, SlidingWindowLogState,
};

use crate::client_state::ClientState;
use crate::clock::Clock;
use crate::snapshot::{Section, SnapshotError, SnapshotWriter};
use crate::storage::StoreError;
use crate::table::{Fingerprint, Reading};
use crate::tiers::{Access, ClientRule, Override};

use super::engine::Engine;
use super::keys::Keys;
use super::kinds::{KeysByKind, of_any_kind, of_its_kind};
use super::{Capacity, MemoryStore, PolicyStore};

/// Snapshots of the keys of [`Tiers`](crate::Tiers).
impl<C: Clock> MemoryStore<ClientRule, C> {
    /// Writes the usage of all keys to a snapshot, under a name and with some overrides. Returns the number of keys.
    ///
    /// If other threads use the store at the same time, each key is written as it is at some moment meanwhile.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tallygate::clock::SystemClock;
    /// use tallygate::snapshot::{SnapshotReader, SnapshotWriter};
    /// use tallygate::store::{Capacity, MemoryStore};
    /// use tallygate::tiers::Access;
    /// use tallygate::{Ask, Policy, RateLimiter, Tiers};
    ///
    /// let limiter = RateLimiter::tiered("api", Tiers::new(Policy::token_bucket(2).per_hour().build()?));
    /// limiter.check(Ask::new("alice").cost(2))?;
    /// limiter.set_override("mallory", Access::Blocked, None);
    /// let mut snapshot = SnapshotWriter::new(Vec::new())?;
    /// limiter.store().save(limiter.name(), &limiter.overrides(), &mut snapshot)?;
    /// let bytes = snapshot.finish()?;
    ///
    /// // Later, in another process, perhaps with other rules:
    /// let mut snapshot = SnapshotReader::new(&bytes[..])?;
    /// let mut section = snapshot.next_section()?.expect("there is one");
    /// let store =
    ///     MemoryStore::restored(Capacity::default(), SystemClock::new(), &mut section, Arc::new)?;
    /// let tiers = Tiers::new(Policy::sliding_window_log(5).per_hour().build()?);
    /// let limiter = RateLimiter::in_store(section.name(), tiers, store);
    /// for (key, set) in section.overrides() {
    ///     limiter.set_override(key, set.access.clone(), set.until);
    /// }
    /// assert_eq!(limiter.check("alice")?.remaining, 2);
    /// assert!(!limiter.check("mallory")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the snapshot cannot be written.
    pub fn save(
        &self,
        name: &str,
        overrides: &[(Box<[u8]>, Override)],
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        let table = &self.keys.table;
        snapshot.put_table((name, overrides), &self.engine.hasher, table, |kept, listed| {
            for (policy, records) in kept.policies() {
                listed.add(policy, &records);
            }
            listed.add_allowances(kept.allowances());
        })
    }

    /// Creates a store with the keys of a snapshot. If they are more than the capacity, the keys that have used the smallest
    /// shares of their quotas are evicted (see [`usage`](Self::usage)).
    ///
    /// Equal policies should share one allocation: `share` returns it, or is `Arc::new`. The overrides of the snapshot are
    /// not set.
    ///
    /// # Errors
    /// Returns an error if the snapshot is damaged, or was written by a version of Tallygate with another format.
    ///
    /// # Panics
    /// Panics if the system has no address space for that many keys.
    pub fn restored(
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
        share: impl FnMut(Policy) -> Arc<Policy>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let reading = Reading::of(&clock);
        let keys = Keys::with_known_bits(known_bits, capacity);
        // The usage does not depend on the rule.
        let rule = ClientRule::of(Access::Unlimited);
        section.each(share, |key, kept| keys.keep(&rule, key, kept, reading))?;
        Ok(Self { keys, engine: Engine::with(hasher, clock) })
    }
}

/// Snapshots of the keys of any rule whose states can be read alone, whatever the numbers of the rule that encodes and
/// decodes them.
impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Writes the states of its keys to a snapshot, under a name, and returns their number.
    ///
    /// # Errors
    /// Returns an error if the snapshot cannot be written.
    pub fn save_states(
        &self,
        rule: &A,
        name: &str,
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        let table = &self.keys.table;
        snapshot.put_table((name, &[]), &self.engine.hasher, table, |state, listed| {
            listed.add_state(|out| rule.encode(state, out));
        })
    }

    /// Returns a store with the keys that [`save_states`](Self::save_states) wrote.
    ///
    /// # Errors
    /// Returns an error if the snapshot is damaged, or if its states are not states of this rule.
    ///
    /// # Panics
    /// Panics if the system has no address space for that many keys.
    pub fn restored_states(
        rule: &A,
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let reading = Reading::of(&clock);
        let keys = Keys::with_known_bits(known_bits, capacity);
        section.each_state(rule, |key, state| keys.keep(rule, key, state, reading))?;
        Ok(Self { keys, engine: Engine::with(hasher, clock) })
    }
}

/// Snapshots of the keys of one policy.
impl<C: Clock> PolicyStore<C> {
    /// Writes the usage of all keys to a snapshot, under a name. Returns the number of keys. The policy is that of the
    /// limiter. [`SnapshotWriter`] has an example.
    ///
    /// If other threads use the store at the same time, each key is written as it is at some moment meanwhile.
    ///
    /// # Errors
    /// Returns an error if the snapshot cannot be written, or if the store was made for another policy. The second error has the kind
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) and holds [`StoreError::OtherPolicy`], and nothing is written.
    pub fn save(
        &self,
        policy: &Policy,
        name: &str,
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        if *policy != *self.policy {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, StoreError::OtherPolicy));
        }
        of_any_kind!(&self.kinds, |keys| {
            snapshot.put_table((name, &[]), &self.engine.hasher, &keys.table, |state, listed| {
                listed.add(&self.policy, &state.records());
            })
        })
    }

    /// Creates a store for the keys of a policy, with the keys of a snapshot. The snapshot may have another capacity and
    /// another policy: the units that were used stay used. [`SnapshotWriter`] has an example.
    ///
    /// # Errors
    /// Returns an error if the snapshot is damaged, or was written by a version of Tallygate with another format.
    ///
    /// # Panics
    /// Panics if the system has no address space for that many keys.
    pub fn restored(
        policy: &Policy,
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let reading = Reading::of(&clock);
        let shared = Arc::new(policy.clone());
        let share = |saved: Policy| if saved == *shared { shared.clone() } else { Arc::new(saved) };
        let kinds = KeysByKind::of(policy, known_bits, capacity);
        section.each(share, |key, mut kept| {
            kept.bring_under(&shared, reading.now);
            kinds.keep(policy, key, &kept, reading);
        })?;
        Ok(Self { policy: shared, kinds, engine: Engine::with(hasher, clock) })
    }
}

impl KeysByKind {
    /// Adds a key of a snapshot, under a policy of this kind.
    fn keep(&self, policy: &Policy, key: Fingerprint, kept: &ClientState, reading: Reading) {
        let Some((_, records)) = kept.policies().next() else { return };
        let kept: Result<(), StoreError> = of_its_kind!(policy, self, |rule, keys| {
            if let Some(state) = LimitRecords::of(&records) {
                keys.keep(rule, key, state, reading);
            }
            Ok(())
        });
        debug_assert!(kept.is_ok(), "the kinds are made for the policy");
    }
}

/// Converts the state of one kind to that of a policy, and back.
trait LimitRecords: Sized {
    fn records(&self) -> Box<[LimitRecord]>;
    fn of(records: &[LimitRecord]) -> Option<Self>;
}

macro_rules! records_of_one {
    ($state:ty, $kind:ident) => {
        impl LimitRecords for $state {
            fn records(&self) -> Box<[LimitRecord]> {
                [LimitState::$kind(self.clone()).into()].into()
            }

            fn of(records: &[LimitRecord]) -> Option<Self> {
                match records {
                    [one] => match one.state() {
                        LimitState::$kind(state) => Some(state.clone()),
                        _ => None,
                    },
                    _ => None,
                }
            }
        }
    };
}

records_of_one!(BucketState, Bucket);
records_of_one!(BucketState<u128>, WideBucket);
records_of_one!(FixedWindowState, FixedWindow);
records_of_one!(SlidingWindowLogState, SlidingWindowLog);
records_of_one!(SlidingWindowCounterState, SlidingWindowCounter);

impl LimitRecords for Box<[LimitRecord]> {
    fn records(&self) -> Box<[LimitRecord]> {
        self.clone()
    }

    fn of(records: &[LimitRecord]) -> Option<Self> {
        Some(records.into())
    }
}
