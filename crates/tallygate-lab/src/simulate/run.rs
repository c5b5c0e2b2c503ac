//! Runs one algorithm on the traffic of a scenario: decides each request and schedules retries.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use tallygate_core::{Algorithm as _, Decision, Kind, Limit, LimitState, Simulator};

use super::random::RandomStream;
use super::scenario::{MAX_DECISIONS, MICROS_PER_MILLI, Pattern, Scenario, tick};
use super::series::{Thousandths, level};
use super::traffic::Arrival;

/// A request: a first attempt or a retry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Attempt {
    pub(super) at_us: u64,
    pub(super) client: usize,
    /// 1 for the first attempt.
    pub(super) attempt: u64,
    /// The instance that decides it.
    pub(super) instance: usize,
    /// The index of the first attempt that this is or repeats.
    first: usize,
}

/// How a client reacts to a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClientReaction {
    /// It does nothing: the request was allowed, or clients do not retry in this scenario.
    Nothing,
    /// It retries, possibly after the end of the scenario.
    Retries,
    /// It gives up: it has used all attempts, or no wait would be long enough.
    GivesUp,
}

/// Decides the requests of a scenario one by one.
pub(super) struct ScenarioRun<'a> {
    scenario: &'a Scenario,
    arrivals: &'a [Arrival],
    /// The clients' states, per instance.
    instances: Vec<Simulator<Limit>>,
    /// The number of first attempts that have been decided.
    arrived: usize,
    /// Ordered by time; at equal times, in the order of the denials.
    retries: BinaryHeap<Reverse<(u64, usize, PendingRetry)>>,
    decided: usize,
}

/// A scheduled retry.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct PendingRetry {
    first: usize,
    attempt: u64,
}

impl<'a> ScenarioRun<'a> {
    /// Starts a run. There is one limit per instance.
    pub(super) fn new(
        scenario: &'a Scenario,
        arrivals: &'a [Arrival],
        limits: impl IntoIterator<Item = Limit>,
    ) -> Self {
        let instances = limits.into_iter().map(Simulator::new).collect();
        Self { scenario, arrivals, instances, arrived: 0, retries: BinaryHeap::new(), decided: 0 }
    }

    /// Returns the limit of an instance.
    pub(super) fn limit(&self, instance: usize) -> &Limit {
        self.instances[instance].rule()
    }

    /// Returns the state of a client on an instance. Without requests, this is the state of a new client.
    pub(super) fn state(&self, instance: usize, client: usize, at_us: u64) -> LimitState {
        let state = self.instances[instance].state(client).cloned();
        state.unwrap_or_else(|| self.limit(instance).initial(tick(at_us)))
    }

    /// Returns what a report shows of a client's states: the sum over the instances or, for times, the mean.
    pub(super) fn level(&self, client: usize, at_us: u64) -> Thousandths {
        let levels = self.instances.iter().map(|simulator| {
            let limit = simulator.rule();
            match simulator.state(client) {
                Some(state) => level(limit, state, at_us),
                None => level(limit, &limit.initial(tick(at_us)), at_us),
            }
        });
        let sum = levels.map(|Thousandths(level)| level).sum();
        match self.limit(0).numbers().kind {
            Kind::Gcra => Thousandths(sum / self.instances.len() as u64),
            _ => Thousandths(sum),
        }
    }

    /// Returns whether another instance would have allowed a request.
    pub(super) fn fits_elsewhere(&self, request: &Attempt) -> bool {
        let others = (0..self.instances.len()).filter(|instance| *instance != request.instance);
        others.into_iter().any(|instance| {
            let state = self.state(instance, request.client, request.at_us);
            self.limit(instance).allows(&state, tick(request.at_us), self.scenario.cost)
        })
    }

    /// Returns whether the run has reached its maximum number of decisions.
    pub(super) const fn is_full(&self) -> bool {
        self.decided == MAX_DECISIONS
    }

    /// Returns the next request. At equal times, first attempts come before retries.
    pub(super) fn next(&self) -> Option<Attempt> {
        let arrival = self.arrivals.get(self.arrived);
        let retry = self.retries.peek().map(|Reverse(retry)| retry);
        match (arrival, retry) {
            (Some(arrival), retry) if retry.is_none_or(|retry| arrival.at_us <= retry.0) => {
                let &Arrival { at_us, client } = arrival;
                let (attempt, first) = (1, self.arrived);
                Some(Attempt {
                    at_us,
                    client,
                    attempt,
                    instance: self.balance(first, attempt),
                    first,
                })
            }
            (_, Some(&(at_us, _, PendingRetry { first, attempt }))) => {
                let client = self.arrivals[first].client;
                Some(Attempt {
                    at_us,
                    client,
                    attempt,
                    instance: self.balance(first, attempt),
                    first,
                })
            }
            (_, None) => None,
        }
    }

    /// Returns the instance to which the load balancer sends an attempt: a random one, the same for every algorithm.
    fn balance(&self, first: usize, attempt: u64) -> usize {
        let last = self.instances.len() - 1;
        // Not the numbers that choose the jitter.
        let mut random = RandomStream::of(!self.scenario.seed, first as u64, attempt);
        usize::try_from(random.up_to(last as u64)).unwrap_or(last)
    }

    /// Decides a request, which must be the next one.
    pub(super) fn decide(&mut self, request: &Attempt) -> (Decision, ClientReaction) {
        let decision: Decision = self.instances[request.instance].step(
            request.client,
            tick(request.at_us),
            self.scenario.cost,
        );
        self.decided += 1;
        if request.attempt == 1 {
            self.arrived += 1;
        } else {
            self.retries.pop();
        }
        let reaction = self.react(request, &decision);
        (decision, reaction)
    }

    fn react(&mut self, request: &Attempt, decision: &Decision) -> ClientReaction {
        if decision.allowed || self.scenario.pattern != Pattern::Retry {
            return ClientReaction::Nothing;
        }
        let &Attempt { at_us, attempt, first, .. } = request;
        let Some(retry_after) = decision.retry_after else { return ClientReaction::GivesUp };
        let retry = &self.scenario.retry;
        if attempt == retry.attempts {
            return ClientReaction::GivesUp;
        }
        let wait = if retry.obeys { retry_after.0 } else { retry.naive_wait_ms * MICROS_PER_MILLI };
        let jitter = if retry.jitter {
            RandomStream::of(self.scenario.seed, first as u64, attempt).up_to(wait)
        } else {
            0
        };
        let at_us = at_us.saturating_add(wait).saturating_add(jitter);
        if at_us < self.scenario.duration_us() {
            let retry = PendingRetry { first, attempt: attempt + 1 };
            self.retries.push(Reverse((at_us, self.decided, retry)));
        }
        ClientReaction::Retries
    }
}
