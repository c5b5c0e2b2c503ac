//! Waiting for the keys of a memory store.

use std::task::Waker;

use tallygate_core::{Algorithm, Cost, Decision, Policy, Tick, Ticks};

use crate::clock::Alarm;
use crate::departures::Departure;
use crate::line::{Joined, Ticket, Turn, WaitMode};
use crate::storage::StoreError;
use crate::waiting_store::WaitingStore;

use super::kinds::{of_any_kind, of_its_kind};
use super::{MemoryStore, PolicyStore};

impl<A: Algorithm, C: Alarm> WaitingStore<A> for MemoryStore<A, C> {
    type Clock = C;

    fn clock(&self) -> &C {
        &self.engine.clock
    }

    fn join(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        wait: (Ticks, WaitMode),
    ) -> Result<Joined, StoreError> {
        self.engine.join(&self.keys, rule, key, cost, wait)
    }

    fn turn(&self, rule: &A, ticket: &mut Ticket, waker: &Waker) -> Result<Turn, StoreError> {
        self.engine.turn(&self.keys, rule, ticket, waker)
    }

    fn leave(&self, ticket: &Ticket) {
        self.keys.line.leave(ticket);
    }

    fn shape(&self, rule: &A, key: &[u8]) -> Result<(Decision, Option<Departure>), StoreError> {
        self.engine.shape(&self.keys, rule, key)
    }

    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick> {
        self.keys.departures.poll(departure, self.engine.read_for(&self.keys), waker)
    }

    fn cancel(&self, rule: &A, departure: &Departure) {
        self.engine.cancel(&self.keys, rule, departure);
    }
}

impl<C: Alarm> WaitingStore<Policy> for PolicyStore<C> {
    type Clock = C;

    fn clock(&self) -> &C {
        &self.engine.clock
    }

    fn join(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        wait: (Ticks, WaitMode),
    ) -> Result<Joined, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.engine.join(keys, rule, key, cost, wait)
        })
    }

    fn turn(
        &self,
        policy: &Policy,
        ticket: &mut Ticket,
        waker: &Waker,
    ) -> Result<Turn, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| self.engine.turn(keys, rule, ticket, waker))
    }

    fn leave(&self, ticket: &Ticket) {
        of_any_kind!(&self.kinds, |keys| keys.line.leave(ticket));
    }

    fn shape(
        &self,
        policy: &Policy,
        key: &[u8],
    ) -> Result<(Decision, Option<Departure>), StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| self.engine.shape(keys, rule, key))
    }

    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick> {
        of_any_kind!(&self.kinds, |keys| {
            keys.departures.poll(departure, self.engine.read_for(keys), waker)
        })
    }

    fn cancel(&self, policy: &Policy, departure: &Departure) {
        let canceled: Result<(), StoreError> = of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.engine.cancel(keys, rule, departure);
            Ok(())
        });
        debug_assert!(canceled.is_ok(), "it was charged under a policy of this kind");
    }
}
