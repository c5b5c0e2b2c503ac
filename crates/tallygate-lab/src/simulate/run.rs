//! What is decided, and who comes again: one algorithm on the traffic of a scenario.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tallygate_core::{Algorithm as _, Decision, Limit, LimitState, Simulator, Tick};

use super::chance::Chance;
use super::scenario::{MAX_DECISIONS, MICROS_A_MILLI, Pattern, Scenario};
use super::traffic::Arrival;

/// A request, the first attempt or a later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    pub(super) at_us: u64,
    pub(super) client: usize,
    /// 1 for the first.
    pub(super) attempt: u64,
    /// Which of the first attempts this is, or repeats.
    first: usize,
}

/// What a client does about a refusal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Nothing: it was admitted, or nobody comes again in this scenario.
    Nothing,
    /// It comes again, perhaps after the scenario's end.
    ComesAgain,
    /// It has tried often enough, or was told that no wait would do.
    GivesUp,
}

/// Decides request by request.
pub(super) struct Run<'a> {
    scenario: &'a Scenario,
    arrivals: &'a [Arrival],
    simulator: Simulator<Limit>,
    /// How many of the first attempts have come.
    come: usize,
    /// By time; of one instant, in the order in which they were refused.
    retries: BinaryHeap<Reverse<(u64, usize, Retry)>>,
    decided: usize,
}

/// A later attempt that is due.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Retry {
    first: usize,
    attempt: u64,
}

impl<'a> Run<'a> {
    pub(super) fn new(scenario: &'a Scenario, arrivals: &'a [Arrival], limit: Limit) -> Self {
        let simulator = Simulator::new(limit);
        Self { scenario, arrivals, simulator, come: 0, retries: BinaryHeap::new(), decided: 0 }
    }

    pub(super) fn limit(&self) -> &Limit {
        self.simulator.rule()
    }

    /// The state of a client; that of one never seen, if it has not come.
    pub(super) fn state(&self, client: usize, at_us: u64) -> LimitState {
        let state = self.simulator.state(client).cloned();
        state.unwrap_or_else(|| self.limit().first(tick(at_us)))
    }

    /// Reads the state of a client that has come.
    pub(super) fn known(&self, client: usize) -> Option<&LimitState> {
        self.simulator.state(client)
    }

    /// Whether the next request is one too many.
    pub(super) const fn is_full(&self) -> bool {
        self.decided == MAX_DECISIONS
    }

    /// The request that comes next. At one instant first attempts come before others.
    pub(super) fn next(&self) -> Option<Request> {
        let arrival = self.arrivals.get(self.come);
        let retry = self.retries.peek().map(|Reverse(retry)| retry);
        match (arrival, retry) {
            (Some(arrival), retry) if retry.is_none_or(|retry| arrival.at_us <= retry.0) => {
                let &Arrival { at_us, client } = arrival;
                Some(Request { at_us, client, attempt: 1, first: self.come })
            }
            (_, Some(&(at_us, _, Retry { first, attempt }))) => {
                Some(Request { at_us, client: self.arrivals[first].client, attempt, first })
            }
            (_, None) => None,
        }
    }

    /// Decides a request, which must be the next.
    pub(super) fn decide(&mut self, request: &Request) -> (Decision, Then) {
        let decision: Decision =
            self.simulator.step(request.client, tick(request.at_us), self.scenario.cost);
        self.decided += 1;
        if request.attempt == 1 {
            self.come += 1;
        } else {
            self.retries.pop();
        }
        let then = self.then(request, &decision);
        (decision, then)
    }

    fn then(&mut self, request: &Request, decision: &Decision) -> Then {
        if decision.allowed || self.scenario.pattern != Pattern::Retry {
            return Then::Nothing;
        }
        let &Request { at_us, attempt, first, .. } = request;
        let Some(told) = decision.retry_after else { return Then::GivesUp };
        let retry = &self.scenario.retry;
        if attempt == retry.attempts {
            return Then::GivesUp;
        }
        let wait = if retry.obeys { told.0 } else { retry.naive_wait_ms * MICROS_A_MILLI };
        let jitter = if retry.jitter {
            Chance::of(self.scenario.seed, first as u64, attempt).up_to(wait)
        } else {
            0
        };
        let at_us = at_us.saturating_add(wait).saturating_add(jitter);
        if at_us < self.scenario.duration_us() {
            let retry = Retry { first, attempt: attempt + 1 };
            self.retries.push(Reverse((at_us, self.decided, retry)));
        }
        Then::ComesAgain
    }
}

/// A microsecond of a scenario, which begins at 0 and lasts a day at most.
pub(super) fn tick(at_us: u64) -> Tick {
    Tick(i64::try_from(at_us).unwrap_or(i64::MAX))
}
