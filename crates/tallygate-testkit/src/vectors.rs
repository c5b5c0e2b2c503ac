//! Test vectors: cases with their expected results.

use serde::Deserialize;
use tallygate_core::{Cost, Decision, Kind, Tick, Ticks};

/// A trace and its expected decisions.
#[derive(Clone, Debug, Deserialize)]
pub struct DecisionCase {
    /// The name of the algorithm.
    pub algorithm: String,
    /// L.
    pub limit: Cost,
    /// W, in ticks.
    pub window: u64,
    /// B. Equal to L for windows.
    pub burst: Cost,
    /// The client, tick and cost of each request.
    pub trace: Vec<(String, i64, Cost)>,
    /// The decision on each request.
    pub decisions: Vec<Expected>,
}

/// The expected fields of a decision.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Expected {
    /// See [`Decision`].
    pub allowed: bool,
    /// See [`Decision`].
    pub remaining: Cost,
    /// See [`Decision`].
    pub retry_after: Option<u64>,
    /// See [`Decision`].
    pub reset_after: u64,
    /// See [`Decision`].
    pub delay: u64,
}

impl DecisionCase {
    /// Returns the algorithm.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.algorithm.parse().expect("the vectors name the six algorithms")
    }

    /// Returns the trace for the simulator.
    pub fn requests(&self) -> impl Iterator<Item = (&str, Tick, Cost)> {
        self.trace.iter().map(|(client, tick, cost)| (client.as_str(), Tick(*tick), *cost))
    }

    /// Returns the trace as input of `tallygate replay`.
    #[must_use]
    pub fn as_replay(&self) -> String {
        let mut lines = vec![self.limit.to_string(), self.window.to_string()];
        lines.push(self.trace.len().to_string());
        lines.extend(
            self.trace.iter().map(|(client, t, cost)| format!("request {client} {t} {cost}")),
        );
        lines.join("\n")
    }
}

impl From<Decision> for Expected {
    fn from(decision: Decision) -> Self {
        Self {
            allowed: decision.allowed,
            remaining: decision.remaining,
            retry_after: decision.retry_after.map(|Ticks(wait)| wait),
            reset_after: decision.reset_after.0,
            delay: decision.delay.0,
        }
    }
}

/// An input of the replay command, and its expected output.
#[derive(Clone, Debug, Deserialize)]
pub struct ReplayCase {
    /// A description of the case.
    pub name: String,
    /// Standard input.
    pub input: String,
    /// The lines of standard output.
    pub output: Vec<String>,
}

/// Returns all decision cases.
#[must_use]
pub fn decision_cases() -> Vec<DecisionCase> {
    parse(include_str!("../vectors/decisions.jsonl"))
}

/// Returns all replay cases.
#[must_use]
pub fn replay_cases() -> Vec<ReplayCase> {
    parse(include_str!("../vectors/replay.jsonl"))
}

fn parse<T: for<'a> Deserialize<'a>>(lines: &str) -> Vec<T> {
    lines.lines().map(|line| serde_json::from_str(line).expect("each line is a vector")).collect()
}
