//! The reply: a scenario, and what became of it under each algorithm.

use serde::{Serialize, Serializer};
use tallygate_core::{Algorithm as _, Cost, Decision, Kind};

use super::policy_text;
use super::run::{Request, Run, Then};
use super::scenario::{Pattern, Scenario, ScenarioError};
use super::series::{StateSeries, Steps, WorstWindow};
use super::traffic::{Arrival, arrivals};

/// What became of a scenario.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(crate) scenario: Scenario,
    pub(crate) lanes: Vec<Lane>,
    /// What a bucket may admit to one client, at the most.
    pub(crate) ideal: Steps,
    /// What was asked for, by first attempts.
    pub(crate) offered: Steps,
}

/// What became of it under one algorithm.
#[derive(Debug, Serialize)]
pub(crate) struct Lane {
    #[serde(serialize_with = "name")]
    pub(crate) algorithm: Kind,
    pub(crate) policy: String,
    pub(crate) toml: String,
    pub(crate) rust: String,
    pub(crate) capacity: Cost,
    pub(crate) allowed: u64,
    pub(crate) refused: u64,
    pub(crate) retried: u64,
    pub(crate) gave_up: u64,
    pub(crate) worst_window: WorstWindow,
    pub(crate) first_refused_us: Option<u64>,
    /// Where it ends if there were too many to decide.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cut_at_us: Option<u64>,
    pub(crate) events: Events,
    /// Of the first client.
    pub(crate) state: StateSeries,
    /// What was admitted, to all clients.
    pub(crate) cumulative: Steps,
    pub(crate) clients: Vec<Client>,
}

/// The decisions, in order of time.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Events {
    pub(crate) at_us: Vec<u64>,
    pub(crate) client: Vec<usize>,
    pub(crate) attempt: Vec<u64>,
    pub(crate) allowed: Vec<u8>,
    pub(crate) remaining: Vec<u64>,
    pub(crate) retry_after_us: Vec<Option<u64>>,
    pub(crate) delay_us: Vec<u64>,
    pub(crate) reset_after_us: Vec<u64>,
}

/// What became of a client.
#[derive(Debug, Serialize)]
pub(crate) struct Client {
    pub(crate) name: String,
    pub(crate) greedy: bool,
    pub(crate) asked: u64,
    pub(crate) allowed: u64,
    pub(crate) refused: u64,
}

/// Runs a scenario, if it is valid.
///
/// # Errors
/// The scenario is not valid.
pub fn report(scenario: Scenario) -> Result<Report, ScenarioError> {
    scenario.check()?;
    let arrivals = arrivals(&scenario)?;
    let lanes = scenario.algorithms.iter().map(|&kind| lane(&scenario, &arrivals, kind));
    let lanes = lanes.collect::<Result<_, _>>()?;
    let duration_us = scenario.duration_us();
    let earned =
        u128::from(duration_us) * u128::from(scenario.limit) / u128::from(scenario.window_us());
    // A day at a billion a millisecond still fits.
    let earned = u64::try_from(earned).unwrap_or(u64::MAX);
    let ideal = Steps {
        at_us: vec![0, duration_us],
        value: vec![scenario.burst, scenario.burst.saturating_add(earned)],
    };
    let offered = arrivals.iter().map(|arrival| (arrival.at_us, scenario.cost));
    let offered = Steps::of(offered, duration_us);
    Ok(Report { scenario, lanes, ideal, offered })
}

fn lane(scenario: &Scenario, arrivals: &[Arrival], kind: Kind) -> Result<Lane, ScenarioError> {
    let limit = scenario.limit_of(kind).map_err(|error| ScenarioError::Limit { kind, error })?;
    let (policy, toml, rust) =
        (policy_text::line(&limit), policy_text::toml(&limit), policy_text::rust(&limit));
    let capacity = limit.capacity();
    let mut state = StateSeries::new(&limit, scenario.duration_us());
    let mut run = Run::new(scenario, arrivals, limit);
    let mut events = Events::default();
    let (mut retried, mut gave_up, mut cut_at_us) = (0, 0, None);
    while let Some(request) = run.next() {
        if run.is_full() {
            cut_at_us = Some(request.at_us);
            break;
        }
        let is_drawn = request.client == 0;
        if is_drawn {
            state.up_to(request.at_us, run.limit(), run.known(0));
            state.sample(request.at_us, run.limit(), run.known(0));
        }
        let (decision, then) = run.decide(&request);
        if is_drawn {
            state.sample(request.at_us, run.limit(), run.known(0));
        }
        retried += u64::from(request.attempt > 1);
        gave_up += u64::from(then == Then::GivesUp);
        events.push(&request, &decision);
    }
    state.up_to(cut_at_us.unwrap_or(scenario.duration_us()), run.limit(), run.known(0));
    let clients = clients(scenario, &events);
    let admissions = |of: Option<usize>| {
        let events = &events;
        let some = (0..events.at_us.len()).filter(move |&i| {
            events.allowed[i] == 1 && of.is_none_or(|client| events.client[i] == client)
        });
        some.map(|i| (events.at_us[i], scenario.cost))
    };
    let worst = (0..clients.len())
        .map(|client| WorstWindow::of(admissions(Some(client)), scenario.window_us()))
        // The first of those that are equally bad.
        .reduce(|worst, other| if other.count > worst.count { other } else { worst });
    let first_refused = events.allowed.iter().position(|allowed| *allowed == 0);
    Ok(Lane {
        algorithm: kind,
        policy,
        toml,
        rust,
        capacity,
        allowed: clients.iter().map(|client| client.allowed).sum(),
        refused: clients.iter().map(|client| client.refused).sum(),
        retried,
        gave_up,
        worst_window: worst.unwrap_or_default(),
        first_refused_us: first_refused.map(|i| events.at_us[i]),
        cut_at_us,
        cumulative: Steps::of(admissions(None), cut_at_us.unwrap_or(scenario.duration_us())),
        events,
        state,
        clients,
    })
}

impl Events {
    fn push(&mut self, request: &Request, decision: &Decision) {
        self.at_us.push(request.at_us);
        self.client.push(request.client);
        self.attempt.push(request.attempt);
        self.allowed.push(decision.allowed.into());
        self.remaining.push(decision.remaining);
        self.retry_after_us.push(decision.retry_after.map(|wait| wait.0));
        self.delay_us.push(decision.delay.0);
        self.reset_after_us.push(decision.reset_after.0);
    }
}

fn clients(scenario: &Scenario, events: &Events) -> Vec<Client> {
    let number = scenario.number_of_clients();
    let mut clients: Vec<Client> = (1..=number)
        .map(|place| {
            let greedy = scenario.pattern == Pattern::Greedy && place == number;
            let name = if greedy { "greedy".to_owned() } else { format!("client {place}") };
            Client { name, greedy, asked: 0, allowed: 0, refused: 0 }
        })
        .collect();
    for (&client, &allowed) in events.client.iter().zip(&events.allowed) {
        let client = &mut clients[client];
        client.asked += 1;
        client.allowed += u64::from(allowed);
        client.refused += u64::from(1 - allowed);
    }
    clients
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
pub(super) fn name<S: Serializer>(kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}
