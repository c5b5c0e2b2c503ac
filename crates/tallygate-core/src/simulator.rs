//! What a rule would do to a trace: virtual time, many clients, no waiting.
//!
//! The replay command, the playground and backtests all decide here, with the very rules that serve.

use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use crate::{Algorithm, Answer, Cost, Decision, Tick};

/// A rule and the states of the clients that have come so far, numbered in order of appearance.
///
/// Whoever feeds it names the clients; [`simulate`] does so for keys of any kind.
#[derive(Clone, Debug)]
pub struct Simulator<A: Algorithm> {
    rule: A,
    states: Vec<A::State>,
}

impl<A: Algorithm> Simulator<A> {
    /// A simulator without clients.
    pub const fn new(rule: A) -> Self {
        Self { rule, states: Vec::new() }
    }

    /// The rule.
    pub const fn rule(&self) -> &A {
        &self.rule
    }

    /// The state of a client, if it has come.
    #[must_use]
    pub fn state(&self, client: usize) -> Option<&A::State> {
        self.states.get(client)
    }

    /// Decides a request. Clients are numbered from 0; one that skips numbers brings those before it
    /// along, as if they had come at the same time.
    #[inline]
    pub fn step<T: Answer>(&mut self, client: usize, now: Tick, cost: Cost) -> T {
        while self.states.len() <= client {
            self.states.push(self.rule.first(now));
        }
        self.rule.decide(&mut self.states[client], now, cost)
    }
}

/// Decides a trace of (key, time, cost), each request as it is asked for.
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
