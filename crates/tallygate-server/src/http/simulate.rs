//! Simulations over HTTP, and the arithmetic of one of their decisions.
//!
//! Every client that may check may simulate, since no real state is affected. The size of a scenario is bounded. Few
//! simulations run at a time, on background threads; further requests get status 503. A result is measured and counted
//! in the budget of its client before it is written.

use std::io;
use std::time::Duration;

use hyper::{StatusCode, header};
use serde::{Deserialize, Serialize};
use tallygate_core::Kind;
use tallygate_lab::simulate::{Pattern, Retry, Scenario, ScenarioError, arithmetic, report};
use tokio::sync::Semaphore;

use super::body::{self, Object, Text, WholeNumber, fields, required};
use super::problem::Problem;
use super::sending::ReservedBytes;
use super::{Reply, answer};
use crate::background::{SCENARIOS_AT_A_TIME, run_in_background};

/// How long a request waits for a running simulation to end.
const QUEUE_TIMEOUT: Duration = Duration::from_millis(250);

static PLACES: Semaphore = Semaphore::const_new(SCENARIOS_AT_A_TIME);

fields! {
    limit: WholeNumber,
    window_ms: WholeNumber,
    burst: WholeNumber,
    algorithms: Vec<Text<'de>>,
    pattern: Text<'de>,
    rate_per_minute: WholeNumber,
    duration_ms: WholeNumber,
    seed: WholeNumber,
    cost: WholeNumber,
    retry: Object<RetryBody>,
    obeys: bool,
    jitter: bool,
    naive_wait_ms: WholeNumber,
    attempts: WholeNumber,
    clients: WholeNumber,
    greedy_factor: WholeNumber,
    burst_size: WholeNumber,
    instances: WholeNumber,
    scenario: Object<ScenarioBody<'de>>,
    algorithm: Text<'de>,
    event: WholeNumber,
}

/// The body of a scenario.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ScenarioBody<'a> {
    #[serde(default, deserialize_with = "field::limit")]
    limit: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::window_ms")]
    window_ms: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::burst")]
    burst: Option<WholeNumber>,
    #[serde(borrow, default, deserialize_with = "field::algorithms")]
    algorithms: Option<Vec<Text<'a>>>,
    #[serde(borrow, default, deserialize_with = "field::pattern")]
    pattern: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::rate_per_minute")]
    rate_per_minute: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::duration_ms")]
    duration_ms: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::seed")]
    seed: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::retry")]
    retry: Option<Object<RetryBody>>,
    #[serde(default, deserialize_with = "field::clients")]
    clients: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::greedy_factor")]
    greedy_factor: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::burst_size")]
    burst_size: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::instances")]
    instances: Option<WholeNumber>,
}

/// The body of the retry settings.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct RetryBody {
    #[serde(default, deserialize_with = "field::obeys")]
    obeys: Option<bool>,
    #[serde(default, deserialize_with = "field::jitter")]
    jitter: Option<bool>,
    #[serde(default, deserialize_with = "field::naive_wait_ms")]
    naive_wait_ms: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::attempts")]
    attempts: Option<WholeNumber>,
}

/// The body of `/v1/explain`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainBody<'a> {
    #[serde(borrow, default, deserialize_with = "field::scenario")]
    scenario: Option<Object<ScenarioBody<'a>>>,
    #[serde(borrow, default, deserialize_with = "field::algorithm")]
    algorithm: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::event")]
    event: Option<WholeNumber>,
}

/// Counts the bytes of a result before it is written, on another thread; an error if they do not fit.
pub(super) trait Reserve:
    FnOnce(usize) -> Result<Option<ReservedBytes>, Problem> + Send + 'static
{
}

impl<F: FnOnce(usize) -> Result<Option<ReservedBytes>, Problem> + Send + 'static> Reserve for F {}

/// Runs the algorithms on a scenario. `reserve` counts the bytes of the result.
pub(super) async fn simulate(body: &[u8], reserve: impl Reserve) -> Result<Reply, Problem> {
    let scenario = body::parse::<ScenarioBody<'_>>(body)?.scenario()?;
    run_simulation(move || report(scenario), reserve).await
}

/// Returns the arithmetic of one decision.
pub(super) async fn explain(body: &[u8], reserve: impl Reserve) -> Result<Reply, Problem> {
    let ExplainBody { scenario, algorithm, event } = body::parse(body)?;
    let Object(scenario) = scenario.unwrap_or(Object(ScenarioBody::default()));
    let scenario = scenario.scenario()?;
    let algorithm = kind("algorithm", &required(algorithm, "algorithm")?)?;
    let WholeNumber(event) = required(event, "event")?;
    run_simulation(move || arithmetic(&scenario, algorithm, event), reserve).await
}

/// Runs work on a background thread, and replies with its result.
async fn run_simulation<T: Serialize>(
    work: impl FnOnce() -> Result<T, ScenarioError> + Send + 'static,
    reserve: impl Reserve,
) -> Result<Reply, Problem> {
    let busy = || {
        let detail = "too many simulations are running; retry in 1 s";
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "1")
    };
    let place = tokio::time::timeout(QUEUE_TIMEOUT, PLACES.acquire()).await;
    let place = place.map_err(|_| busy())?.map_err(|_| busy())?;
    let working = run_in_background(move || {
        let _held_until_done = place;
        let done = work().map_err(|error| Problem::bad(error.to_string()))?;
        let mut length = ByteCount(0);
        serde_json::to_writer(&mut length, &done).map_err(|error| broken(&error))?;
        let ByteCount(length) = length;
        let reserved = reserve(length)?;
        let mut json = Vec::with_capacity(length);
        serde_json::to_writer(&mut json, &done).map_err(|error| broken(&error))?;
        Ok::<_, Problem>((json, reserved))
    });
    let (json, reserved) = working.await.map_err(|error| broken(&error))??;
    let mut reply = answer::json(json);
    if let Some(reserved) = reserved {
        reply.extensions_mut().insert(reserved);
    }
    Ok(reply)
}

/// Counts bytes without storing them.
struct ByteCount(usize);

impl io::Write for ByteCount {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn broken(error: &dyn std::fmt::Display) -> Problem {
    tracing::error!(%error, "simulation failed; answering the request with status 500");
    Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "internal error; the server log has the reason")
}

impl ScenarioBody<'_> {
    /// Returns the scenario with its defaults. The default of the burst is the limit.
    fn scenario(self) -> Result<Scenario, Problem> {
        let default = Scenario::default();
        let Object(retries) = self.retry.unwrap_or(Object(RetryBody::default()));
        let or =
            |given: Option<WholeNumber>, default| given.map_or(default, |WholeNumber(given)| given);
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
            instances: or(self.instances, default.instances),
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
    Problem::bad(format!("`{field}` {name:?} is unknown; use one of {}", known.join(", ")))
}
