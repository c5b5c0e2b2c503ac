//! The report: a scenario, and its results for each algorithm.

use serde::{Serialize, Serializer};
use tallygate_core::{Algorithm as _, Cost, Decision, Kind, Limit};

use super::policy_text;
use super::run::{Attempt, ClientReaction, ScenarioRun};
use super::scenario::{Pattern, Scenario, ScenarioError};
use super::series::{StateSeries, StepLine, WorstWindow};
use super::traffic::{Arrival, arrivals};

/// The results of a scenario.
#[derive(Debug, Serialize)]
pub struct Report {
    pub(crate) scenario: Scenario,
    pub(crate) lanes: Vec<AlgorithmReport>,
    /// The most units that a bucket allows one client.
    pub(crate) ideal: StepLine,
    /// The units that the first attempts of each client requested.
    pub(crate) offered: Vec<StepLine>,
}

/// The results of a scenario for one algorithm.
#[derive(Debug, Serialize)]
pub(crate) struct AlgorithmReport {
    #[serde(serialize_with = "name")]
    pub(crate) algorithm: Kind,
    pub(crate) policy: String,
    pub(crate) toml: String,
    pub(crate) rust: String,
    pub(crate) capacity: Cost,
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) retried: u64,
    pub(crate) gave_up: u64,
    pub(crate) worst_window: WorstWindow,
    /// Why the worst window has more than the limit, if it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) worst_window_reason: Option<String>,
    /// The longest time that an allowed request was asked to wait.
    pub(crate) longest_delay_us: u64,
    pub(crate) first_denied_us: Option<u64>,
    /// The time at which the run stopped because of too many requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) cut_at_us: Option<u64>,
    /// What the division of the quota between several instances changed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) division: Option<Division>,
    pub(crate) events: Events,
    pub(crate) clients: Vec<ClientReport>,
}

/// How several instances with a share each differ from one shared quota.
#[derive(Debug, Serialize)]
pub(crate) struct Division {
    /// The requests that one shared quota would have allowed.
    pub(crate) allowed_if_shared: u64,
    /// The denied requests that another instance would have allowed.
    pub(crate) denied_with_room_elsewhere: u64,
    /// The requests that each instance received and allowed.
    pub(crate) requests: Vec<u64>,
    pub(crate) allowed: Vec<u64>,
}

/// The decisions, in order of time.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Events {
    pub(crate) at_us: Vec<u64>,
    pub(crate) client: Vec<usize>,
    pub(crate) instance: Vec<usize>,
    pub(crate) attempt: Vec<u64>,
    pub(crate) allowed: Vec<u8>,
    pub(crate) remaining: Vec<u64>,
    pub(crate) retry_after_us: Vec<Option<u64>>,
    pub(crate) delay_us: Vec<u64>,
    pub(crate) reset_after_us: Vec<u64>,
}

/// The results of one client.
#[derive(Debug, Serialize)]
pub(crate) struct ClientReport {
    pub(crate) name: String,
    pub(crate) greedy: bool,
    pub(crate) requests: u64,
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    pub(crate) worst_window: WorstWindow,
    pub(crate) state: StateSeries,
    /// The units allowed so far.
    pub(crate) cumulative: StepLine,
    /// The units that have left so far: each allowed request leaves after its delay.
    pub(crate) departures: StepLine,
}

/// Runs a scenario and returns its results.
///
/// # Errors
/// Returns an error if the scenario is not valid.
pub fn report(scenario: Scenario) -> Result<Report, ScenarioError> {
    scenario.check()?;
    let arrivals = arrivals(&scenario)?;
    let lanes = scenario.algorithms.iter().map(|&kind| run_algorithm(&scenario, &arrivals, kind));
    let lanes = lanes.collect::<Result<_, _>>()?;
    let duration_us = scenario.duration_us();
    let ideal = StepLine {
        at_us: vec![0, duration_us],
        value: vec![scenario.burst, scenario.burst.saturating_add(scenario.earned(duration_us))],
    };
    let offered = (0..scenario.number_of_clients()).map(|client| {
        let own = arrivals.iter().filter(|arrival| arrival.client == client);
        StepLine::of(own.map(|arrival| (arrival.at_us, scenario.cost)), duration_us)
    });
    let offered = offered.collect();
    Ok(Report { scenario, lanes, ideal, offered })
}

fn run_algorithm(
    scenario: &Scenario,
    arrivals: &[Arrival],
    kind: Kind,
) -> Result<AlgorithmReport, ScenarioError> {
    let invalid = |error| ScenarioError::Limit { kind, error };
    let limit = scenario.limit_of(kind).map_err(invalid)?;
    let limits = scenario.limits_of(kind).map_err(invalid)?;
    let number = scenario.number_of_clients();
    let mut states: Vec<StateSeries> =
        (0..number).map(|_| StateSeries::new(&limit, scenario.duration_us())).collect();
    let mut run = ScenarioRun::new(scenario, arrivals, limits);
    let mut events = Events::default();
    let (mut retried, mut gave_up, mut room_elsewhere, mut cut_at_us) = (0, 0, 0, None);
    while let Some(request) = run.next() {
        if run.is_full() {
            cut_at_us = Some(request.at_us);
            break;
        }
        let (client, at_us) = (request.client, request.at_us);
        states[client].up_to(at_us, |at_us| run.level(client, at_us));
        states[client].sample(at_us, run.level(client, at_us));
        let (decision, reaction) = run.decide(&request);
        states[client].sample(at_us, run.level(client, at_us));
        retried += u64::from(request.attempt > 1);
        gave_up += u64::from(reaction == ClientReaction::GivesUp);
        room_elsewhere += u64::from(!decision.allowed && run.fits_elsewhere(&request));
        events.push(&request, &decision);
    }
    let end_us = cut_at_us.unwrap_or(scenario.duration_us());
    for (client, state) in states.iter_mut().enumerate() {
        state.up_to(end_us, |at_us| run.level(client, at_us));
    }
    let clients: Vec<ClientReport> = states
        .into_iter()
        .enumerate()
        .map(|(client, state)| ClientReport::of(scenario, &events, client, state, end_us))
        .collect();
    let worst_window = clients.iter().map(|client| client.worst_window);
    // The first of several equal ones.
    let worst_window =
        worst_window.reduce(|worst, other| if other.count > worst.count { other } else { worst });
    let worst_window = worst_window.unwrap_or_default();
    let first_denied = events.allowed.iter().position(|allowed| *allowed == 0);
    Ok(AlgorithmReport {
        algorithm: kind,
        policy: policy_text::line(&limit),
        toml: policy_text::toml(&limit, scenario.instances),
        rust: policy_text::rust(&limit, scenario.instances),
        capacity: limit.capacity(),
        allowed: clients.iter().map(|client| client.allowed).sum(),
        denied: clients.iter().map(|client| client.denied).sum(),
        retried,
        gave_up,
        worst_window,
        worst_window_reason: worst_window_reason(scenario, kind, worst_window),
        longest_delay_us: events.delay_us.iter().copied().max().unwrap_or(0),
        first_denied_us: first_denied.map(|i| events.at_us[i]),
        cut_at_us,
        division: (scenario.instances > 1)
            .then(|| Division::of(scenario, arrivals, limit, &events, room_elsewhere)),
        events,
        clients,
    })
}

/// Explains a worst window with more than the limit, with the most that the algorithm allows in any window.
fn worst_window_reason(scenario: &Scenario, kind: Kind, worst: WorstWindow) -> Option<String> {
    let limit = scenario.limit;
    if worst.count <= limit {
        return None;
    }
    let doubled = limit.saturating_mul(2);
    Some(match kind {
        Kind::FixedWindow => format!(
            "It spans the end of a fixed window, and both windows allow the limit: up to {doubled}."
        ),
        Kind::SlidingWindowCounter => format!(
            "The counter assumes that the requests of the previous window came evenly: up to {doubled}."
        ),
        // A log never allows more than its limit.
        Kind::SlidingWindowLog => return None,
        Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
            match scenario.earned(scenario.window_us() - 1) {
                0 => format!("A bucket allows its burst at once: up to {}.", scenario.burst),
                earned => format!(
                    "A burst of {} at once, plus up to {earned} earned back within the window: up to {}.",
                    scenario.burst,
                    scenario.burst.saturating_add(earned)
                ),
            }
        }
    })
}

impl Division {
    fn of(
        scenario: &Scenario,
        arrivals: &[Arrival],
        limit: Limit,
        events: &Events,
        denied_with_room_elsewhere: u64,
    ) -> Self {
        let mut shared = ScenarioRun::new(scenario, arrivals, [limit]);
        let mut allowed_if_shared = 0;
        while let Some(request) = shared.next().filter(|_| !shared.is_full()) {
            allowed_if_shared += u64::from(shared.decide(&request).0.allowed);
        }
        let number = usize::try_from(scenario.instances).unwrap_or_default();
        let (mut requests, mut allowed) = (vec![0; number], vec![0; number]);
        for (&instance, &is_allowed) in events.instance.iter().zip(&events.allowed) {
            requests[instance] += 1;
            allowed[instance] += u64::from(is_allowed);
        }
        Self { allowed_if_shared, denied_with_room_elsewhere, requests, allowed }
    }
}

impl ClientReport {
    fn of(
        scenario: &Scenario,
        events: &Events,
        client: usize,
        state: StateSeries,
        end_us: u64,
    ) -> Self {
        let greedy =
            scenario.pattern == Pattern::Greedy && client + 1 == scenario.number_of_clients();
        let name = if greedy { "greedy".to_owned() } else { format!("client {}", client + 1) };
        let own = || (0..events.at_us.len()).filter(|&i| events.client[i] == client);
        let allowed = || own().filter(|&i| events.allowed[i] == 1);
        let arrivals = || allowed().map(|i| (events.at_us[i], scenario.cost));
        let mut departures: Vec<u64> =
            allowed().map(|i| events.at_us[i].saturating_add(events.delay_us[i])).collect();
        // Several instances do not keep the order of arrival.
        departures.sort_unstable();
        let departures = departures.into_iter().take_while(|at_us| *at_us <= end_us);
        let (requests, allowed) = (own().count() as u64, allowed().count() as u64);
        Self {
            name,
            greedy,
            requests,
            allowed,
            denied: requests - allowed,
            worst_window: WorstWindow::of(arrivals(), scenario.window_us()),
            state,
            cumulative: StepLine::of(arrivals(), end_us),
            departures: StepLine::of(departures.map(|at_us| (at_us, scenario.cost)), end_us),
        }
    }
}

impl Events {
    fn push(&mut self, request: &Attempt, decision: &Decision) {
        self.at_us.push(request.at_us);
        self.client.push(request.client);
        self.instance.push(request.instance);
        self.attempt.push(request.attempt);
        self.allowed.push(decision.allowed.into());
        self.remaining.push(decision.remaining);
        self.retry_after_us.push(decision.retry_after.map(|wait| wait.0));
        self.delay_us.push(decision.delay.0);
        self.reset_after_us.push(decision.reset_after.0);
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
pub(super) fn name<S: Serializer>(kind: &Kind, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(kind.name())
}
