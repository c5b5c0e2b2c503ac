//! Deciding a recorded trace: many clients, in virtual time, without waiting.
//!
//! The replay command, the playground and backtests use it, with the same rules that serve requests.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{Algorithm, Answer, Cost, Decision, Tick};

/// A rule and the states of all clients seen so far.
///
/// Clients are numbers that count up from 0. [`simulate`] assigns them to keys of any type.
#[derive(Clone, Debug)]
pub struct Simulator<A: Algorithm> {
    rule: A,
    states: Vec<A::State>,
}

impl<A: Algorithm> Simulator<A> {
    /// Creates a simulator without clients.
    pub const fn new(rule: A) -> Self {
        Self { rule, states: Vec::new() }
    }

    /// Returns the rule.
    pub const fn rule(&self) -> &A {
        &self.rule
    }

    /// Returns the state of a client, or `None` if it has made no request.
    #[must_use]
    pub fn state(&self, client: usize) -> Option<&A::State> {
        self.states.get(client)
    }

    /// Decides a request of a client.
    ///
    /// If the number of a new client skips others, their states are created at the same time.
    #[inline]
    pub fn step<T: Answer>(&mut self, client: usize, now: Tick, cost: Cost) -> T {
        while self.states.len() <= client {
            self.states.push(self.rule.initial(now));
        }
        self.rule.decide(&mut self.states[client], now, cost)
    }
}

/// Decides a trace of keys, times and costs. Each request is decided when the iterator reaches it.
///
/// ```
/// use tallygate_core::{simulate, Policy, Tick, Ticks};
///
/// let limit = Policy::fixed_window(1).per(Ticks(10)).limit()?;
/// let trace = [("alice", Tick(0), 1), ("bob", Tick(5), 1), ("alice", Tick(9), 1)];
/// let allowed: Vec<bool> = simulate(limit, trace).map(|decision| decision.allowed).collect();
/// assert_eq!(allowed, [true, true, false]);
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
pub fn simulate<A: Algorithm, K: Ord>(
    rule: A,
    trace: impl IntoIterator<Item = (K, Tick, Cost)>,
) -> impl Iterator<Item = Decision> {
    let mut simulator = Simulator::new(rule);
    let mut clients = BTreeMap::new();
    trace.into_iter().map(move |(key, now, cost)| {
        let next = clients.len();
        let client = *clients.entry(key).or_insert(next);
        simulator.step(client, now, cost)
    })
}
