//! The steps of waiting that a memory store provides.

use std::task::Waker;

use tallygate_core::{Algorithm, Cost, Decision, Tick, Ticks};

use crate::clock::Alarm;
use crate::departures::Departure;
use crate::line::{Joined, Ticket, Turn, WaitMode};
use crate::storage::{Store, StoreError};

/// A store in whose lines requests can wait: the memory stores. Not exported: tickets belong to one store.
pub trait WaitingStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// The clock that wakes waiting requests.
    type Clock: Alarm;

    /// Returns the clock of the store.
    fn clock(&self) -> &Self::Clock;

    /// Checks a key. If the cost does not fit yet, but may fit in time, the request waits in line. `wait` is the
    /// longest wait and how the request waits.
    ///
    /// # Errors
    /// Returns an error if the key is too long, or the store is full.
    fn join(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        wait: (Ticks, WaitMode),
    ) -> Result<Joined, StoreError>;

    /// Checks whether it is a waiter's turn. If not, returns when to check again.
    ///
    /// # Errors
    /// Returns an error if the store is full, or the policy is of another kind.
    fn turn(&self, rule: &A, ticket: &mut Ticket, waker: &Waker) -> Result<Turn, StoreError>;

    /// Leaves the line.
    fn leave(&self, ticket: &Ticket);

    /// Decides a request of cost 1. If it is allowed and has to wait, it takes a departure time.
    ///
    /// # Errors
    /// Returns an error if the key is too long, or the store is full.
    fn shape(&self, rule: &A, key: &[u8]) -> Result<(Decision, Option<Departure>), StoreError>;

    /// Returns when a shaped request must check again, or `None` if it leaves now.
    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick>;

    /// Cancels a shaped request that has not left.
    fn cancel(&self, rule: &A, departure: &Departure);
}
