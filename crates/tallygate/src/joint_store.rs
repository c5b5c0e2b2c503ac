//! The steps of a decision over several keys that a memory store provides.
//!
//! The locks of all keys are held during the decision. `table.rs` explains why this cannot lead to a deadlock.

use tallygate_core::{Algorithm, Cost, Decision};

use crate::storage::{Store, StoreError};
use crate::table::{KeySlot, LockedKey, Locks, Reading};

/// A memory store, whose keys can be decided together with keys of other memory stores. The trait is not exported, because
/// the slots and locks of one store are not valid in another.
pub trait JointStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// Returns the slot of a key.
    ///
    /// # Errors
    /// Returns an error if the key is too long, or the policy is of another kind.
    fn spot(&self, rule: &A, key: &[u8]) -> Result<KeySlot, StoreError>;

    /// Returns the position of a key's lock in the order in which locks are taken. It changes when the table grows.
    fn lock_order(&self, spot: KeySlot) -> usize;

    /// Returns a number that no other store has.
    fn identity(&self) -> usize;

    /// Reads the clock.
    fn read(&self) -> Reading;

    /// Makes room for `keys` new keys. Returns a denial if other requests already wait for this key, so that a check does
    /// not overtake them.
    ///
    /// # Errors
    /// Returns an error if the store is full.
    fn behind_others(
        &self,
        rule: &A,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
        keys: usize,
    ) -> Result<Option<Decision>, StoreError>;

    /// Takes the locks of a key and searches for it. Keys must be searched for in the order of their locks. Returns `None`
    /// if the order has changed; the caller then starts again with the first key.
    fn look_for<'a>(&'a self, spot: KeySlot, locks: &mut Locks<'a>) -> Option<LockedKey>;

    /// Finds a place for a new key, if the store rejects new keys when it is full.
    ///
    /// # Errors
    /// Returns an error if the store is full.
    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: LockedKey,
        reading: Reading,
        locks: &mut Locks<'a>,
    ) -> Result<LockedKey, StoreError>;

    /// Releases the place that [`make_room`](Self::make_room) found for a key.
    fn give_up_room(&self, found: LockedKey, locks: &mut Locks<'_>);

    /// Returns whether the limits of a key allow a cost.
    ///
    /// # Errors
    /// Returns an error if the policy is of another kind.
    fn agrees(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError>;

    /// Charges a cost if `go` is set, because all keys allow it, and returns the decision.
    fn step(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;

    /// Returns the decision that [`step`](Self::step) would return, and changes nothing.
    fn report(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;

    /// Converts the state of a known key to a rule, and refunds a cost that was charged.
    fn change_kept(
        &self,
        rule: &A,
        found: LockedKey,
        returned: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    );
}
