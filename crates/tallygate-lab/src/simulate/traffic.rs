//! Who comes when: the first attempts of a scenario, in order of time, the same for every algorithm.
//!
//! Exact in integers: rates are whole requests a minute, and a request is due at the microsecond in which it becomes
//! whole.

use super::chance::Chance;
use super::scenario::{MAX_DECISIONS, MICROS_A_MINUTE, Pattern, Scenario, ScenarioError};

/// A first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at_us: u64,
    pub(super) client: usize,
}

/// The part of a window in which a spike comes, before and after its end.
const SPIKE_PART: u64 = 20;
/// How much less than the rate comes besides a spike.
const BACKGROUND_PART: u64 = 10;

/// The first attempts, if they are not too many.
pub(super) fn arrivals(scenario: &Scenario) -> Result<Vec<Arrival>, ScenarioError> {
    let minute = u128::from(MICROS_A_MINUTE);
    let rate = u128::from(scenario.rate_per_minute);
    match scenario.pattern {
        Pattern::Steady | Pattern::Retry => first_client(scenario, every(minute, rate)),
        Pattern::Bursty => {
            let size = u128::from(scenario.burst_size);
            first_client(scenario, (0_u128..).map(|i| i / size * size * minute / rate))
        }
        Pattern::Poisson => {
            let mut chance = Chance::new(scenario.seed);
            let gaps = std::iter::repeat_with(move || u128::from(chance.gap()));
            let sums = gaps.scan(0, |sum, gap| {
                *sum += gap;
                Some(*sum)
            });
            first_client(scenario, sums.map(|sum| (sum * minute / rate) >> 32))
        }
        Pattern::Ramp => {
            // By t have come rate · t² / duration: the rate grows from nothing to twice itself.
            let duration = u128::from(scenario.duration_us());
            first_client(scenario, (1_u128..).map(|i| (i * duration * minute / rate).isqrt()))
        }
        Pattern::Spike => {
            let background = every(minute * u128::from(BACKGROUND_PART), rate);
            let background = first_client(scenario, background)?;
            merged(background, spike(scenario)?)
        }
        Pattern::Greedy => {
            let polite = u128::from(scenario.clients);
            let mut arrivals = first_client(scenario, every(minute, rate))?;
            for (turn, arrival) in arrivals.iter_mut().enumerate() {
                arrival.client = turn % (scenario.number_of_clients() - 1);
            }
            let rate = rate * u128::from(scenario.greedy_factor);
            let mut greedy = first_client(scenario, every(minute * polite, rate))?;
            for arrival in &mut greedy {
                arrival.client = scenario.number_of_clients() - 1;
            }
            merged(arrivals, greedy)
        }
    }
}

/// Evenly spaced times: `rate` of them in `time`.
fn every(time: u128, rate: u128) -> impl Iterator<Item = u128> {
    (0_u128..).map(move |i| i * time / rate)
}

/// The first client's, at the times that lie within the scenario.
fn first_client(
    scenario: &Scenario,
    times: impl Iterator<Item = u128>,
) -> Result<Vec<Arrival>, ScenarioError> {
    let duration = scenario.duration_us();
    let mut arrivals = Vec::new();
    for time in times {
        let Some(at_us) = u64::try_from(time).ok().filter(|time| *time < duration) else { break };
        if arrivals.len() == MAX_DECISIONS {
            return Err(ScenarioError::TooMany);
        }
        arrivals.push(Arrival { at_us, client: 0 });
    }
    Ok(arrivals)
}

/// As much as the limit just before the window boundary in the middle, and as much from it on.
fn spike(scenario: &Scenario) -> Result<Vec<Arrival>, ScenarioError> {
    if scenario.limit > MAX_DECISIONS as u64 / 2 {
        return Err(ScenarioError::TooMany);
    }
    let (window, duration) = (scenario.window_us(), scenario.duration_us());
    // Later than the middle rather than earlier; within, because the duration is longer than a window.
    let boundary = duration.div_ceil(2 * window) * window;
    let gap = window / SPIKE_PART / scenario.limit;
    let before = (0..scenario.limit).rev().map(|i| boundary - 1 - i * gap);
    let after = (0..scenario.limit).map(|i| boundary + i * gap);
    let within = before.chain(after).filter(|at_us| *at_us < duration);
    Ok(within.map(|at_us| Arrival { at_us, client: 0 }).collect())
}

/// Both, in order of time; of those at one instant the first list's come first.
fn merged(mut first: Vec<Arrival>, second: Vec<Arrival>) -> Result<Vec<Arrival>, ScenarioError> {
    first.extend(second);
    first.sort_by_key(|arrival| arrival.at_us);
    if first.len() > MAX_DECISIONS { Err(ScenarioError::TooMany) } else { Ok(first) }
}
