//! Cases with their answers.

use serde::Deserialize;
use tallygate_core::{Cost, Decision, Kind, Tick, Ticks};

/// A trace and the decisions that must come of it.
#[derive(Clone, Debug, Deserialize)]
pub struct DecisionCase {
    /// The algorithm's name.
    pub algorithm: String,
    /// L.
    pub limit: Cost,
    /// W, in ticks.
    pub window: u64,
    /// B; L for windows.
    pub burst: Cost,
    /// Client, tick and cost of each request.
    pub trace: Vec<(String, i64, Cost)>,
    /// The decision on each.
    pub decisions: Vec<Expected>,
}

/// What a decision must say.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
pub struct Expected {
    /// As in [`Decision`].
    pub allowed: bool,
    /// As in [`Decision`].
    pub remaining: Cost,
    /// As in [`Decision`].
    pub retry_after: Option<u64>,
    /// As in [`Decision`].
    pub reset_after: u64,
    /// As in [`Decision`].
    pub delay: u64,
}

impl DecisionCase {
    /// Which of the six.
    #[must_use]
    pub fn kind(&self) -> Kind {
        self.algorithm.parse().expect("the vectors name the six algorithms")
    }

    /// The trace as the simulator takes it.
    pub fn requests(&self) -> impl Iterator<Item = (&str, Tick, Cost)> {
        self.trace.iter().map(|(client, tick, cost)| (client.as_str(), Tick(*tick), *cost))
    }

    /// The trace as `tallygate replay` reads it.
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

/// What the replay command reads, and the lines it must print.
#[derive(Clone, Debug, Deserialize)]
pub struct ReplayCase {
    /// What the case is about.
    pub name: String,
    /// Standard input.
    pub input: String,
    /// Standard output, by line.
    pub output: Vec<String>,
}

/// All decision cases.
#[must_use]
pub fn decision_cases() -> Vec<DecisionCase> {
    parse(include_str!("../vectors/decisions.jsonl"))
}

/// All replay cases.
#[must_use]
pub fn replay_cases() -> Vec<ReplayCase> {
    parse(include_str!("../vectors/replay.jsonl"))
}

fn parse<T: for<'a> Deserialize<'a>>(lines: &str) -> Vec<T> {
    lines.lines().map(|line| serde_json::from_str(line).expect("a vector a line")).collect()
}
