//! The steps of a decision over several keys that a memory store provides.
//!
//! The locks of all keys are held while they decide. `table.rs` says why that cannot end in a deadlock.

use tallygate_core::{Algorithm, Cost, Decision};

use crate::storage::{Store, StoreError};
use crate::table::{Found, KeySlot, Locks, Reading};

/// A store whose keys can be decided on together with those of others: the memory stores. Not exported:
/// places and locks of one store mean nothing in another.
pub trait JointStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// Where a key belongs.
    ///
    /// # Errors
    /// Returns an error if the key is too long, or the policy is of another kind.
    fn spot(&self, rule: &A, key: &[u8]) -> Result<KeySlot, StoreError>;

    /// Where the lock of a key comes in the order of all, until the table grows.
    fn lock_order(&self, spot: KeySlot) -> usize;

    /// Identifies the store among all that there are.
    fn identity(&self) -> usize;

    /// Reads the clock.
    fn read(&self) -> Reading;

    /// What a check of the key hears because others wait for it. Makes room for so many new keys.
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

    /// Takes the locks of a key and looks where it is. Keys are to be looked for in the order of locks. `None` if
    /// the order is another by now: then all begin again.
    fn look_for<'a>(&'a self, spot: KeySlot, locks: &mut Locks<'a>) -> Option<Found>;

    /// Finds a place for a new key, if the store rejects new keys when it is full.
    ///
    /// # Errors
    /// Returns an error if the store is full.
    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: Found,
        reading: Reading,
        locks: &mut Locks<'a>,
    ) -> Result<Found, StoreError>;

    /// Gives up the place that was made for a key.
    fn give_up_room(&self, found: Found, locks: &mut Locks<'_>);

    /// Whether a key has nothing against a cost.
    ///
    /// # Errors
    /// Returns an error if the policy is of another kind.
    fn agrees(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError>;

    /// Charges a cost if all parts allow it, and returns the decision.
    fn step(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;

    /// Returns what a step would, and changes nothing.
    fn report(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;

    /// Changes the state of a key that is kept: brings it under a rule, and then returns a cost that was charged.
    fn change_kept(
        &self,
        rule: &A,
        found: Found,
        returned: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    );
}
