//! Explains one decision of a scenario with the steps that the core computed.

use serde::Serialize;
use tallygate_core::explain::{self, Explanation, Formula};
use tallygate_core::{Cost, Kind, Numbers};

use super::report::name;
use super::run::ScenarioRun;
use super::scenario::{Scenario, ScenarioError, tick};
use super::traffic::arrivals;

/// A decision, and the arithmetic that led to it.
#[derive(Debug, Serialize)]
pub struct Arithmetic {
    #[serde(serialize_with = "name")]
    algorithm: Kind,
    event: u64,
    at_us: u64,
    client: usize,
    instance: usize,
    attempt: u64,
    cost: Cost,
    allowed: bool,
    /// The symbols that the formulas use and no step defines.
    symbols: Vec<Symbol>,
    steps: Vec<Step>,
    decision: DecisionReport,
}

#[derive(Debug, Serialize)]
struct Symbol {
    symbol: &'static str,
    meaning: &'static str,
    /// The value, with its unit. A symbol that can differ between steps has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<String>,
}

#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    description: &'static str,
    formula: String,
    value: String,
}

#[derive(Debug, Serialize)]
struct DecisionReport {
    allowed: bool,
    limit: Cost,
    remaining: Cost,
    retry_after_us: Option<u64>,
    reset_after_us: u64,
    delay_us: u64,
}

/// Runs a scenario up to a decision and explains the decision.
///
/// # Errors
/// Returns an error if the scenario is not valid or has no decision with the number `event`.
pub fn arithmetic(
    scenario: &Scenario,
    kind: Kind,
    event: u64,
) -> Result<Arithmetic, ScenarioError> {
    scenario.check()?;
    if !scenario.algorithms.contains(&kind) {
        return Err(ScenarioError::AlgorithmNotInScenario { kind });
    }
    let limits = scenario.limits_of(kind).map_err(|error| ScenarioError::Limit { kind, error })?;
    let arrivals = arrivals(scenario)?;
    let mut run = ScenarioRun::new(scenario, &arrivals, limits);
    let mut decided = 0;
    loop {
        let Some(request) = run.next().filter(|_| !run.is_full()) else {
            return Err(ScenarioError::UnknownEvent { given: event, events: decided });
        };
        if decided as u64 == event {
            let state = run.state(request.instance, request.client, request.at_us);
            let limit = run.limit(request.instance);
            let Explanation { steps, decision } =
                limit.explain(&state, tick(request.at_us), scenario.cost);
            return Ok(Arithmetic {
                algorithm: kind,
                event,
                at_us: request.at_us,
                client: request.client,
                instance: request.instance,
                attempt: request.attempt,
                cost: scenario.cost,
                allowed: decision.allowed,
                symbols: symbols(limit.numbers(), scenario.cost, request.at_us, &steps),
                steps: steps.iter().map(Step::of).collect(),
                decision: DecisionReport {
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

/// Returns the symbols of an algorithm's formulas. Symbols of the state are there only if a formula uses them.
fn symbols(numbers: &Numbers, cost: Cost, at_us: u64, steps: &[explain::Step]) -> Vec<Symbol> {
    let units = |symbol, meaning, value: Cost| {
        let value = Some(value.to_string());
        Symbol { symbol, meaning, value }
    };
    let time = |symbol, meaning, value: u64| {
        let value = Some(format!("{value} µs"));
        Symbol { symbol, meaning, value }
    };
    let mut symbols = vec![
        units("L", "limit: the units per window", numbers.limit),
        time("W", "window", numbers.window.0),
        units("c", "cost of this request", cost),
        time("now", "time of this request", at_us),
    ];
    if numbers.kind.is_bucket() {
        symbols.insert(2, units("B", "burst: the most units at one instant", numbers.burst));
    }
    for (symbol, meaning) in [
        ("newest", "time of the newest request in the log"),
        ("last", "time of the last change of the state"),
        ("into", "time from the start of its window to the last change"),
    ] {
        let mut values = Vec::new();
        for step in steps {
            collect(&step.formula, symbol, &mut values);
        }
        values.dedup();
        match values[..] {
            [] => {}
            [value] => {
                symbols.push(Symbol { symbol, meaning, value: Some(format!("{value} µs")) });
            }
            _ => symbols.push(Symbol { symbol, meaning, value: None }),
        }
    }
    symbols
}

/// Collects the values of a name in a formula.
fn collect(formula: &Formula, symbol: &str, values: &mut Vec<i128>) {
    match formula {
        Formula::Named { name, value } if *name == symbol => values.push(*value),
        Formula::Named { .. } | Formula::Number(_) => {}
        Formula::Binary(_, both) => {
            collect(&both.0, symbol, values);
            collect(&both.1, symbol, values);
        }
    }
}

impl Step {
    fn of(step: &explain::Step) -> Self {
        let (formula, value) = (step.formula.to_string(), step.display_value().to_string());
        Self { name: step.name, description: step.description, formula, value }
    }
}
