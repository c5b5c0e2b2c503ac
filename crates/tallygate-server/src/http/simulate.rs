//! Scenarios over HTTP: what limits would do to made-up traffic, and the arithmetic of one of the decisions.
//!
//! Open to whoever may check, since no client's state is touched: to everybody, unless there are tokens of `check`. The
//! work is bounded by the scenario's own bounds, is done aside, and few at a time: whoever comes when all are busy is
//! told to come again.

use std::time::Duration;

use hyper::{StatusCode, header};
use serde::{Deserialize, Serialize};
use tallygate_core::Kind;
use tallygate_lab::simulate::{Pattern, Retry, Scenario, ScenarioError, arithmetic, report};
use tokio::sync::Semaphore;

use super::body::{self, Object, Text, Whole, fields, required};
use super::problem::Problem;
use super::{Reply, answer};
use crate::aside::{SCENARIOS_AT_A_TIME, aside};

/// How long the next one waits for one of those that are worked out to end.
const PATIENCE: Duration = Duration::from_millis(250);

static PLACES: Semaphore = Semaphore::const_new(SCENARIOS_AT_A_TIME);

fields! {
    limit: Whole,
    window_ms: Whole,
    burst: Whole,
    algorithms: Vec<Text<'de>>,
    pattern: Text<'de>,
    rate_per_minute: Whole,
    duration_ms: Whole,
    seed: Whole,
    cost: Whole,
    retry: Object<Retries>,
    obeys: bool,
    jitter: bool,
    naive_wait_ms: Whole,
    attempts: Whole,
    clients: Whole,
    greedy_factor: Whole,
    burst_size: Whole,
    scenario: Object<Traffic<'de>>,
    algorithm: Text<'de>,
    event: Whole,
}

/// A scenario as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Traffic<'a> {
    #[serde(default, deserialize_with = "field::limit")]
    limit: Option<Whole>,
    #[serde(default, deserialize_with = "field::window_ms")]
    window_ms: Option<Whole>,
    #[serde(default, deserialize_with = "field::burst")]
    burst: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "field::algorithms")]
    algorithms: Option<Vec<Text<'a>>>,
    #[serde(borrow, default, deserialize_with = "field::pattern")]
    pattern: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::rate_per_minute")]
    rate_per_minute: Option<Whole>,
    #[serde(default, deserialize_with = "field::duration_ms")]
    duration_ms: Option<Whole>,
    #[serde(default, deserialize_with = "field::seed")]
    seed: Option<Whole>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<Whole>,
    #[serde(default, deserialize_with = "field::retry")]
    retry: Option<Object<Retries>>,
    #[serde(default, deserialize_with = "field::clients")]
    clients: Option<Whole>,
    #[serde(default, deserialize_with = "field::greedy_factor")]
    greedy_factor: Option<Whole>,
    #[serde(default, deserialize_with = "field::burst_size")]
    burst_size: Option<Whole>,
}

/// What a refused client does, as it is written.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Retries {
    #[serde(default, deserialize_with = "field::obeys")]
    obeys: Option<bool>,
    #[serde(default, deserialize_with = "field::jitter")]
    jitter: Option<bool>,
    #[serde(default, deserialize_with = "field::naive_wait_ms")]
    naive_wait_ms: Option<Whole>,
    #[serde(default, deserialize_with = "field::attempts")]
    attempts: Option<Whole>,
}

/// Which decision is to be explained.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Explain<'a> {
    #[serde(borrow, default, deserialize_with = "field::scenario")]
    scenario: Option<Object<Traffic<'a>>>,
    #[serde(borrow, default, deserialize_with = "field::algorithm")]
    algorithm: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::event")]
    event: Option<Whole>,
}

/// What each algorithm would do to some traffic.
pub(super) async fn simulate(body: &[u8]) -> Result<Reply, Problem> {
    let scenario = body::parse::<Traffic<'_>>(body)?.scenario()?;
    worked_out(move || report(scenario)).await
}

/// Why one request was decided as it was.
pub(super) async fn explain(body: &[u8]) -> Result<Reply, Problem> {
    let Explain { scenario, algorithm, event } = body::parse(body)?;
    let Object(scenario) = scenario.unwrap_or(Object(Traffic::default()));
    let scenario = scenario.scenario()?;
    let algorithm = kind("algorithm", &required(algorithm, "algorithm")?)?;
    let Whole(event) = required(event, "event")?;
    worked_out(move || arithmetic(&scenario, algorithm, event)).await
}

/// Works something out away from the threads that serve, and answers with it.
async fn worked_out<T: Serialize>(
    work: impl FnOnce() -> Result<T, ScenarioError> + Send + 'static,
) -> Result<Reply, Problem> {
    let busy = || {
        let detail = "others are simulating; come again in a second";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "1")
    };
    let place = tokio::time::timeout(PATIENCE, PLACES.acquire()).await;
    let place = place.map_err(|_| busy())?.map_err(|_| busy())?;
    let working = aside(move || {
        let _held_until_done = place;
        let done = work().map_err(|error| Problem::bad(error.to_string()))?;
        serde_json::to_vec(&done).map_err(|error| broken(&error))
    });
    Ok(answer::json(working.await.map_err(|error| broken(&error))??))
}

fn broken(error: &dyn std::fmt::Display) -> Problem {
    tracing::error!(%error, "a scenario could not be worked out");
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the scenario could not be worked out")
}

impl Traffic<'_> {
    /// The scenario with its defaults. A limit of its own has a burst of its own, unless it says otherwise.
    fn scenario(self) -> Result<Scenario, Problem> {
        let default = Scenario::default();
        let Object(retries) = self.retry.unwrap_or(Object(Retries::default()));
        let or = |given: Option<Whole>, default| given.map_or(default, |Whole(given)| given);
        let limit = or(self.limit, default.limit);
        let algorithms = match self.algorithms {
            Some(names) => {
                names.iter().map(|name| kind("algorithms", name)).collect::<Result<_, _>>()?
            }
            None => default.algorithms,
        };
        Ok(Scenario {
            limit,
            window_ms: or(self.window_ms, default.window_ms),
            burst: or(self.burst, limit),
            algorithms,
            pattern: self.pattern.map_or(Ok(default.pattern), |name| pattern(&name))?,
            rate_per_minute: or(self.rate_per_minute, default.rate_per_minute),
            duration_ms: or(self.duration_ms, default.duration_ms),
            seed: or(self.seed, default.seed),
            cost: or(self.cost, default.cost),
            retry: Retry {
                obeys: retries.obeys.unwrap_or(default.retry.obeys),
                jitter: retries.jitter.unwrap_or(default.retry.jitter),
                naive_wait_ms: or(retries.naive_wait_ms, default.retry.naive_wait_ms),
                attempts: or(retries.attempts, default.retry.attempts),
            },
            clients: or(self.clients, default.clients),
            greedy_factor: or(self.greedy_factor, default.greedy_factor),
            burst_size: or(self.burst_size, default.burst_size),
        })
    }
}

fn kind(field: &str, name: &str) -> Result<Kind, Problem> {
    name.parse().map_err(|_| unknown(field, name, &Kind::ALL.map(Kind::name)))
}

fn pattern(name: &str) -> Result<Pattern, Problem> {
    Pattern::of_name(name).ok_or_else(|| unknown("pattern", name, &Pattern::ALL.map(Pattern::name)))
}

fn unknown(field: &str, name: &str, known: &[&str]) -> Problem {
    Problem::bad(format!("`{field}` has {name:?}; use {}", known.join(", ")))
}
