//! The rule of a replay: the textbook's, or one of production's.

use tallygate_core::{
    Algorithm, Anchor, Cost, Decision, Kind, Policy, PolicyError, Simulator, Ticks,
};

use super::Options;
use super::clients::Request;
use super::remote::Remote;
use crate::machine::{ForMachine, for_machine};
use crate::textbook::{Textbook, TextbookState};

/// What the options ask for; the numbers are still to be read.
#[derive(Debug)]
pub(super) enum Rule {
    Textbook { burst: Option<Cost> },
    Production { kind: Kind, burst: Option<Cost>, anchor: Anchor, json: bool },
}

/// A rule with its numbers and its clients' states.
pub(super) trait Engine {
    /// Decides requests in order, and appends a line for each.
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()>;
}

impl Rule {
    pub(super) fn new(options: &Options) -> anyhow::Result<Self> {
        let &Options { algorithm, exact, burst, anchor, json } = options;
        let kind = algorithm.or(exact.then_some(Kind::TokenBucket));
        let Some(kind) = kind else {
            if json {
                anyhow::bail!(
                    "--json prints decisions, and the textbook rule only allows or denies; \
                     add --exact or --algorithm NAME"
                );
            }
            if anchor.is_some() {
                anyhow::bail!(
                    "--anchor is for fixed windows; add --algorithm fixed_window or leave it out"
                );
            }
            return Ok(Self::Textbook { burst });
        };
        if anchor.is_some() && kind != Kind::FixedWindow {
            anyhow::bail!(
                "--anchor is for fixed windows, found --algorithm {kind}; \
                 use fixed_window or leave it out"
            );
        }
        let anchor = anchor.unwrap_or_default();
        Ok(Self::Production { kind, burst, anchor, json })
    }

    /// Whether a number can be the limit or the window of this rule by itself.
    pub(super) fn accepts(&self, what: &str, number: i64) -> anyhow::Result<()> {
        match self {
            Self::Production { kind, .. } if number < 1 => anyhow::bail!(
                "found `{number}`; expected a {what} of at least 1 for {kind} \
                 (only the textbook rule gives less a meaning)"
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn engine(
        &self,
        capacity: i64,
        window: i64,
        store: Option<Remote>,
    ) -> Result<Box<dyn Engine>, PolicyError> {
        match *self {
            Self::Textbook { burst } => {
                let burst =
                    burst.map_or(capacity, |burst| i64::try_from(burst).unwrap_or(i64::MAX));
                let rule = Textbook::new(capacity, window).burst(burst);
                if let Some(store) = store {
                    return Ok(Box::new(store.textbook(rule)));
                }
                Ok(Box::new(TextbookEngine { rule, states: Vec::new() }))
            }
            Self::Production { kind, burst, anchor, json } => {
                // Both were accepted, so neither is negative.
                let (limit, window) = (capacity.unsigned_abs(), Ticks(window.unsigned_abs()));
                let mut builder = Policy::of(kind, limit).per(window).anchor(anchor);
                if let Some(burst) = burst {
                    builder = builder.burst(burst);
                }
                if let Some(store) = store {
                    return Ok(Box::new(store.production(builder.build()?, json)));
                }
                Ok(for_machine(&builder.limit()?, Production { json }))
            }
        }
    }
}

struct TextbookEngine {
    rule: Textbook,
    states: Vec<TextbookState>,
}

impl Engine for TextbookEngine {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        for &Request { client, now, cost } in requests {
            // Clients are numbered as they come, so a new one is the next.
            if client == self.states.len() {
                self.states.push(self.rule.first(now));
            }
            verdict(self.rule.decide(&mut self.states[client], now, cost), answers);
        }
        Ok(())
    }
}

struct ProductionEngine<A: Algorithm> {
    simulator: Simulator<A>,
    json: bool,
}

struct Production {
    json: bool,
}

impl ForMachine for Production {
    type Made = Box<dyn Engine>;

    fn made<A: Algorithm + 'static>(self, rule: A) -> Box<dyn Engine> {
        Box::new(ProductionEngine { simulator: Simulator::new(rule), json: self.json })
    }
}

impl<A: Algorithm> Engine for ProductionEngine<A> {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        for &Request { client, now, cost } in requests {
            if self.json {
                as_json(&self.simulator.step(client, now, cost), answers);
            } else {
                verdict(self.simulator.step(client, now, cost), answers);
            }
        }
        Ok(())
    }
}

#[inline]
pub(super) fn verdict(allowed: bool, answers: &mut Vec<u8>) {
    answers.extend_from_slice(if allowed { b"allow\n" } else { b"deny\n" });
}

/// The decision as a line of JSON, times in ticks.
pub(super) fn as_json(decision: &Decision, answers: &mut Vec<u8>) {
    let mut digits = itoa::Buffer::new();
    let mut field = |name: &str, value: u64| {
        answers.extend_from_slice(name.as_bytes());
        answers.extend_from_slice(digits.format(value).as_bytes());
    };
    let Decision { allowed, limit, remaining, retry_after, reset_after, delay, .. } = *decision;
    field(
        if allowed { r#"{"allowed":true,"limit":"# } else { r#"{"allowed":false,"limit":"# },
        limit,
    );
    field(r#","remaining":"#, remaining);
    match retry_after {
        Some(Ticks(wait)) => {
            field(r#","retry_after":"#, wait);
            field(r#","reset_after":"#, reset_after.0);
        }
        None => field(r#","retry_after":null,"reset_after":"#, reset_after.0),
    }
    field(r#","delay":"#, delay.0);
    answers.extend_from_slice(b"}\n");
}
