//! The rule that decides a replay: the textbook rule or a production algorithm.

use tallygate_core::{
    Algorithm, Anchor, Cost, Decision, Kind, Policy, PolicyError, Simulator, Ticks,
};

use super::Options;
use super::clients::Request;
use super::remote::RedisRun;
use crate::machine::{MachineVisitor, visit_machine};
use crate::textbook::{Textbook, TextbookState};

/// The rule that the options select, before its numbers are read from the trace.
#[derive(Debug)]
pub(super) enum RuleTemplate {
    Textbook { burst: Option<Cost> },
    Production { kind: Kind, burst: Option<Cost>, anchor: Anchor, json: bool },
}

/// A rule with its numbers and the states of its clients.
pub(super) trait Engine {
    /// Decides requests in order and appends one line per request to `answers`.
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()>;
}

impl RuleTemplate {
    pub(super) fn new(options: &Options) -> anyhow::Result<Self> {
        let &Options { algorithm, exact, burst, anchor, json } = options;
        let kind = algorithm.or(exact.then_some(Kind::TokenBucket));
        let Some(kind) = kind else {
            if json {
                anyhow::bail!(
                    "--json needs --exact or --algorithm NAME: the textbook rule returns only \
                     allow or deny"
                );
            }
            if anchor.is_some() {
                anyhow::bail!(
                    "--anchor applies only to fixed windows; add --algorithm fixed_window or remove --anchor"
                );
            }
            return Ok(Self::Textbook { burst });
        };
        if anchor.is_some() && kind != Kind::FixedWindow {
            anyhow::bail!(
                "--anchor applies only to fixed windows (got --algorithm {kind}); \
                 use fixed_window or remove --anchor"
            );
        }
        let anchor = anchor.unwrap_or_default();
        Ok(Self::Production { kind, burst, anchor, json })
    }

    /// Checks that a number is large enough to be the limit or the window of this rule.
    pub(super) fn check_number(&self, field: &str, number: i64) -> anyhow::Result<()> {
        match self {
            Self::Production { kind, .. } if number < 1 => anyhow::bail!(
                "found `{number}`; expected a {field} of at least 1 for {kind} \
                 (only the textbook rule accepts less)"
            ),
            _ => Ok(()),
        }
    }

    pub(super) fn engine(
        &self,
        capacity: i64,
        window: i64,
        store: Option<RedisRun>,
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
                // `check_number` accepted both, so neither is negative.
                let (limit, window) = (capacity.unsigned_abs(), Ticks(window.unsigned_abs()));
                let mut builder = Policy::of(kind, limit).per(window).anchor(anchor);
                if let Some(burst) = burst {
                    builder = builder.burst(burst);
                }
                if let Some(store) = store {
                    return Ok(Box::new(store.production(builder.build()?, json)));
                }
                Ok(visit_machine(&builder.limit()?, MakeEngine { json }))
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
            // Clients are numbered in order of appearance, so a new client has the next number.
            if client == self.states.len() {
                self.states.push(self.rule.full_state(now));
            }
            write_verdict(self.rule.decide(&mut self.states[client], now, cost), answers);
        }
        Ok(())
    }
}

struct ProductionEngine<A: Algorithm> {
    simulator: Simulator<A>,
    json: bool,
}

struct MakeEngine {
    json: bool,
}

impl MachineVisitor for MakeEngine {
    type Output = Box<dyn Engine>;

    fn visit<A: Algorithm + 'static>(self, rule: A) -> Box<dyn Engine> {
        Box::new(ProductionEngine { simulator: Simulator::new(rule), json: self.json })
    }
}

impl<A: Algorithm> Engine for ProductionEngine<A> {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        for &Request { client, now, cost } in requests {
            if self.json {
                write_json(&self.simulator.step(client, now, cost), answers);
            } else {
                write_verdict(self.simulator.step(client, now, cost), answers);
            }
        }
        Ok(())
    }
}

#[inline]
pub(super) fn write_verdict(allowed: bool, answers: &mut Vec<u8>) {
    answers.extend_from_slice(if allowed { b"allow\n" } else { b"deny\n" });
}

/// Appends the decision as a line of JSON, with times in ticks.
pub(super) fn write_json(decision: &Decision, answers: &mut Vec<u8>) {
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
