//! Generates the first attempts of a scenario in order of time. Every algorithm gets the same ones.
//!
//! The arithmetic is exact: rates are whole requests per minute, and arrival times are rounded down to a microsecond.

use super::random::RandomStream;
use super::scenario::{MAX_DECISIONS, MICROS_PER_MINUTE, Pattern, Scenario, ScenarioError};

/// A first attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Arrival {
    pub(super) at_us: u64,
    pub(super) client: usize,
}

/// A spike takes one twentieth of a window on each side of the window's end.
const SPIKE_PART: u64 = 20;
/// Between spikes, the rate is divided by this number.
const BACKGROUND_PART: u64 = 10;

/// Returns the first attempts of a scenario.
///
/// # Errors
/// Returns an error if there are too many.
pub(super) fn arrivals(scenario: &Scenario) -> Result<Vec<Arrival>, ScenarioError> {
    let minute = u128::from(MICROS_PER_MINUTE);
    let rate = u128::from(scenario.rate_per_minute);
    match scenario.pattern {
        Pattern::Steady | Pattern::Retry => first_client(scenario, every(minute, rate)),
        Pattern::Bursty => {
            let size = u128::from(scenario.burst_size);
            first_client(scenario, (0_u128..).map(|i| i / size * size * minute / rate))
        }
        Pattern::Poisson => {
            let mut random = RandomStream::new(scenario.seed);
            let gaps = std::iter::repeat_with(move || u128::from(random.gap()));
            let sums = gaps.scan(0, |sum, gap| {
                *sum += gap;
                Some(*sum)
            });
            first_client(scenario, sums.map(|sum| (sum * minute / rate) >> 32))
        }
        Pattern::Ramp => {
            // By time t, rate · t² / duration requests have arrived: the rate grows from 0 to twice the given one.
            let duration = u128::from(scenario.duration_us());
            first_client(scenario, (1_u128..).map(|i| (i * duration * minute / rate).isqrt()))
        }
        Pattern::Spike => {
            let background = every(minute * u128::from(BACKGROUND_PART), rate);
            let background = first_client(scenario, background)?;
            merged(background, spike(scenario)?)
        }
        Pattern::Greedy => {
            let normal = u128::from(scenario.clients);
            let mut arrivals = first_client(scenario, every(minute, rate))?;
            for (turn, arrival) in arrivals.iter_mut().enumerate() {
                arrival.client = turn % (scenario.number_of_clients() - 1);
            }
            let rate = rate * u128::from(scenario.greedy_factor);
            let mut greedy = first_client(scenario, every(minute * normal, rate))?;
            for arrival in &mut greedy {
                arrival.client = scenario.number_of_clients() - 1;
            }
            merged(arrivals, greedy)
        }
    }
}

/// Returns evenly spaced times: `rate` of them per `time`.
fn every(time: u128, rate: u128) -> impl Iterator<Item = u128> {
    (0_u128..).map(move |i| i * time / rate)
}

/// Returns requests of the first client at the given times, up to the end of the scenario.
fn first_client(
    scenario: &Scenario,
    times: impl Iterator<Item = u128>,
) -> Result<Vec<Arrival>, ScenarioError> {
    let duration = scenario.duration_us();
    let mut arrivals = Vec::new();
    for time in times {
        let Some(at_us) = u64::try_from(time).ok().filter(|time| *time < duration) else { break };
        if arrivals.len() == MAX_DECISIONS {
            return Err(ScenarioError::TooManyRequests);
        }
        arrivals.push(Arrival { at_us, client: 0 });
    }
    Ok(arrivals)
}

/// Returns as many requests as the limit just before the window boundary in the middle, and as many from the boundary on.
fn spike(scenario: &Scenario) -> Result<Vec<Arrival>, ScenarioError> {
    if scenario.limit > MAX_DECISIONS as u64 / 2 {
        return Err(ScenarioError::TooManyRequests);
    }
    let (window, duration) = (scenario.window_us(), scenario.duration_us());
    // The first boundary at or after the middle. It lies within the scenario, which is longer than a window.
    let boundary = duration.div_ceil(2 * window) * window;
    let gap = window / SPIKE_PART / scenario.limit;
    let before = (0..scenario.limit).rev().map(|i| boundary - 1 - i * gap);
    let after = (0..scenario.limit).map(|i| boundary + i * gap);
    let within = before.chain(after).filter(|at_us| *at_us < duration);
    Ok(within.map(|at_us| Arrival { at_us, client: 0 }).collect())
}

/// Merges two lists in order of time. At equal times, those of the first list come first.
fn merged(mut first: Vec<Arrival>, second: Vec<Arrival>) -> Result<Vec<Arrival>, ScenarioError> {
    first.extend(second);
    first.sort_by_key(|arrival| arrival.at_us);
    if first.len() > MAX_DECISIONS { Err(ScenarioError::TooManyRequests) } else { Ok(first) }
}
