//! Why one request of a scenario was decided as it was: the core's own explanation, of that very decision.

use serde::Serialize;
use tallygate_core::explain::{self, Explanation};
use tallygate_core::{Cost, Kind};

use super::report::name;
use super::run::{Run, tick};
use super::scenario::{Scenario, ScenarioError};
use super::traffic::arrivals;

/// A decision, and the arithmetic that made it.
#[derive(Debug, Serialize)]
pub struct Arithmetic {
    #[serde(serialize_with = "name")]
    algorithm: Kind,
    event: u64,
    at_us: u64,
    client: usize,
    attempt: u64,
    cost: Cost,
    allowed: bool,
    steps: Vec<Step>,
    decision: Told,
}

#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    says: &'static str,
    formula: String,
    value: String,
}

#[derive(Debug, Serialize)]
struct Told {
    allowed: bool,
    limit: Cost,
    remaining: Cost,
    retry_after_us: Option<u64>,
    reset_after_us: u64,
    delay_us: u64,
}

/// Runs a scenario up to a decision, and explains it.
///
/// # Errors
/// The scenario is not valid, or it has no such decision.
pub fn arithmetic(
    scenario: &Scenario,
    kind: Kind,
    event: u64,
) -> Result<Arithmetic, ScenarioError> {
    scenario.check()?;
    if !scenario.algorithms.contains(&kind) {
        return Err(ScenarioError::NoSuchLane { kind });
    }
    let limit = scenario.limit_of(kind).map_err(|error| ScenarioError::Limit { kind, error })?;
    let arrivals = arrivals(scenario)?;
    let mut run = Run::new(scenario, &arrivals, limit);
    let mut decided = 0;
    loop {
        let Some(request) = run.next().filter(|_| !run.is_full()) else {
            return Err(ScenarioError::UnknownEvent { given: event, events: decided });
        };
        if decided as u64 == event {
            let state = run.state(request.client, request.at_us);
            let Explanation { steps, decision } =
                run.limit().explain(&state, tick(request.at_us), scenario.cost);
            return Ok(Arithmetic {
                algorithm: kind,
                event,
                at_us: request.at_us,
                client: request.client,
                attempt: request.attempt,
                cost: scenario.cost,
                allowed: decision.allowed,
                steps: steps.iter().map(Step::of).collect(),
                decision: Told {
                    allowed: decision.allowed,
                    limit: decision.limit,
                    remaining: decision.remaining,
                    retry_after_us: decision.retry_after.map(|wait| wait.0),
                    reset_after_us: decision.reset_after.0,
                    delay_us: decision.delay.0,
                },
            });
        }
        let (_decided, _) = run.decide(&request);
        decided += 1;
    }
}

impl Step {
    fn of(step: &explain::Step) -> Self {
        let (formula, value) = (step.formula.to_string(), step.shown().to_string());
        Self { name: step.name, says: step.says, formula, value }
    }
}
