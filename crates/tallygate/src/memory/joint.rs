//! Decisions over several keys of memory stores.

use std::any::TypeId;

use tallygate_core::{Algorithm, Cost, Decision, Op, Part, Policy};

use crate::client_state::ClientState;
use crate::clock::Clock;
use crate::joint_store::JointStore;
use crate::lateness::counted_from;
use crate::storage::StoreError;
use crate::table::{Full, KeySlot, LockedKey, Locks, Reading};

use super::keys::Keys;
use super::kinds::{of_any_kind, of_its_kind};
use super::{MemoryStore, PolicyStore};

impl<S: Clone + 'static> Keys<S> {
    fn agrees<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) -> bool {
        let op = Op::Check(cost);
        let allows = |state: &mut S, now| Part { rule, state, op }.allows(now);
        self.table.read_found(rule, found, reading, locks, allows)
    }

    fn step<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        if cost == 0 {
            // A check of cost 0 stores nothing.
            return self.report(rule, found, cost, reading, locks, go);
        }
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            counted_from(reading.now, at, Part { rule, state, op }.step::<Decision>(at, go).0)
        };
        self.table.change_found(rule, found, reading, locks, step)
    }

    /// Does the same on a copy, so that a panic of the rule does not change the state.
    fn step_on_a_copy<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        if cost == 0 {
            return self.report(rule, found, cost, reading, locks, go);
        }
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            let mut copy = state.clone();
            let answer = Part { rule, state: &mut copy, op }.step::<Decision>(at, go).0;
            *state = copy;
            counted_from(reading.now, at, answer)
        };
        self.table.change_found(rule, found, reading, locks, step)
    }

    fn report<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            let step = |state: &mut S| Part { rule, state, op }.step::<Decision>(at, go).0;
            // A check of cost 0 changes nothing by itself.
            counted_from(
                reading.now,
                at,
                if cost == 0 { step(state) } else { step(&mut state.clone()) },
            )
        };
        self.table.read_found(rule, found, reading, locks, step)
    }

    fn change_kept<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: LockedKey,
        returned: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) {
        self.table.read_found(rule, found, reading, locks, |state, at| {
            if rule.clock_was_set_back(state, at) {
                rule.rebase(state, at);
            }
            if returned > 0 {
                rule.charge(state, at, -i128::from(returned));
            }
        });
    }
}

impl<A: Algorithm, C: Clock> JointStore<A> for MemoryStore<A, C> {
    fn spot(&self, _: &A, key: &[u8]) -> Result<KeySlot, StoreError> {
        self.engine.spot(&self.keys, key)
    }

    fn read(&self) -> Reading {
        self.engine.read(None)
    }

    fn lock_order(&self, spot: KeySlot) -> usize {
        self.keys.table.lock_order(spot)
    }

    fn behind_others(
        &self,
        rule: &A,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
        count: usize,
    ) -> Result<Option<Decision>, StoreError> {
        self.engine.before_others(&self.keys, rule, spot, (cost, count), reading)
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(&self.keys).addr()
    }

    fn look_for<'a>(&'a self, spot: KeySlot, locks: &mut Locks<'a>) -> Option<LockedKey> {
        self.keys.table.look_for(spot, locks)
    }

    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: LockedKey,
        reading: Reading,
        locks: &mut Locks<'a>,
    ) -> Result<LockedKey, StoreError> {
        self.keys.table.make_room(rule, found, reading, locks).map_err(|Full| self.keys.full())
    }

    fn give_up_room(&self, found: LockedKey, locks: &mut Locks<'_>) {
        self.keys.table.give_up_room(found, locks);
    }

    fn agrees(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        Ok(self.keys.agrees(rule, found, cost, reading, locks))
    }

    fn step(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        // Only a user's own algorithm can panic. The state of a client with tiers can be long, so it is not copied.
        if TypeId::of::<A::State>() == TypeId::of::<ClientState>() {
            return self.keys.step(rule, found, cost, reading, locks, go);
        }
        self.keys.step_on_a_copy(rule, found, cost, reading, locks, go)
    }

    fn report(
        &self,
        rule: &A,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        self.keys.report(rule, found, cost, reading, locks, go)
    }

    fn change_kept(
        &self,
        rule: &A,
        found: LockedKey,
        returned: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) {
        self.keys.change_kept(rule, found, returned, reading, locks);
    }
}

impl<C: Clock> JointStore<Policy> for PolicyStore<C> {
    fn spot(&self, policy: &Policy, key: &[u8]) -> Result<KeySlot, StoreError> {
        of_its_kind!(policy, &self.kinds, |_rule, keys| self.engine.spot(keys, key))
    }

    fn read(&self) -> Reading {
        self.engine.read(None)
    }

    fn lock_order(&self, spot: KeySlot) -> usize {
        of_any_kind!(&self.kinds, |keys| keys.table.lock_order(spot))
    }

    fn behind_others(
        &self,
        policy: &Policy,
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
        count: usize,
    ) -> Result<Option<Decision>, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.engine.before_others(keys, rule, spot, (cost, count), reading)
        })
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(&self.kinds).addr()
    }

    fn look_for<'a>(&'a self, spot: KeySlot, locks: &mut Locks<'a>) -> Option<LockedKey> {
        of_any_kind!(&self.kinds, |keys| keys.table.look_for(spot, locks))
    }

    fn make_room<'a>(
        &'a self,
        policy: &Policy,
        found: LockedKey,
        reading: Reading,
        locks: &mut Locks<'a>,
    ) -> Result<LockedKey, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            keys.table.make_room(rule, found, reading, locks).map_err(|Full| keys.full())
        })
    }

    fn give_up_room(&self, found: LockedKey, locks: &mut Locks<'_>) {
        of_any_kind!(&self.kinds, |keys| keys.table.give_up_room(found, locks));
    }

    fn agrees(
        &self,
        policy: &Policy,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.agrees(rule, found, cost, reading, locks))
        })
    }

    fn step(
        &self,
        policy: &Policy,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let answer = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.step(rule, found, cost, reading, locks, go))
        });
        answer.unwrap_or_else(|_| unreachable!("its spot was of this kind"))
    }

    fn report(
        &self,
        policy: &Policy,
        found: LockedKey,
        cost: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let answer = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.report(rule, found, cost, reading, locks, go))
        });
        answer.unwrap_or_else(|_| unreachable!("its spot was of this kind"))
    }

    fn change_kept(
        &self,
        policy: &Policy,
        found: LockedKey,
        returned: Cost,
        reading: Reading,
        locks: &mut Locks<'_>,
    ) {
        let changed: Result<(), StoreError> = of_its_kind!(policy, &self.kinds, |rule, keys| {
            keys.change_kept(rule, found, returned, reading, locks);
            Ok(())
        });
        debug_assert!(changed.is_ok(), "its spot was of this kind");
    }
}
