//! What came of it: the figures, for JSON as they are, for people in `text.rs` and `html.rs`.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;
use tallygate_core::{PolicyError, Tick, Ticks};

use super::activity::Activity;
use super::moment::Moment;
use super::reading::{CutShort, UnreadableLine};
use super::share::Share;
use super::suggest::{Suggestion, suggest};
use super::tally::{PolicyTally, Tally};
use super::{BacktestError, Plan};
use crate::spelling::{Span, Spelled};

/// The figures of a backtest.
#[derive(Debug, Serialize)]
pub struct Report {
    /// All lines but blank ones and headers: the next three together.
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    pub(crate) without_key: u64,
    pub(crate) requests: u64,
    pub(crate) clients: u64,
    pub(crate) key: String,
    pub(crate) from: Option<String>,
    pub(crate) to: Option<String>,
    pub(crate) peaks: Peaks,
    pub(crate) policies: Vec<PolicyReport>,
    pub(crate) over_time: OverTime,
    pub(crate) unreadable_lines: Vec<UnreadableLine>,
    pub(crate) cut_short: Vec<CutShort>,
}

/// The most requests of each client in a window.
#[derive(Debug, Serialize)]
pub(crate) struct Peaks {
    pub(crate) window: String,
    pub(crate) quantiles: Vec<Quantile>,
    pub(crate) histogram: Vec<Bin>,
}

/// This share of clients had a peak of at most so many requests.
#[derive(Debug, Serialize)]
pub(crate) struct Quantile {
    pub(crate) share: f64,
    pub(crate) requests: u32,
}

/// So many clients had a peak from and to.
#[derive(Debug, Serialize)]
pub(crate) struct Bin {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) clients: u64,
}

#[derive(Debug, Serialize)]
pub(crate) struct PolicyReport {
    pub(crate) policy: String,
    pub(crate) allowed: u64,
    pub(crate) refused: u64,
    pub(crate) refused_share: f64,
    pub(crate) clients_refused: u64,
    pub(crate) clients_refused_share: f64,
    /// Refused by this policy and not by the first, and the other way round.
    pub(crate) refused_here_only: u64,
    pub(crate) refused_by_first_only: u64,
    pub(crate) hardest_hit: Vec<HitClient>,
    /// The step of time with the most refusals.
    pub(crate) worst: Option<Worst>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) suggestion: Option<Suggested>,
}

#[derive(Debug, Serialize)]
pub(crate) struct HitClient {
    pub(crate) client: String,
    pub(crate) requests: u64,
    pub(crate) refused: u64,
    pub(crate) first_refused: String,
    pub(crate) last_refused: String,
    pub(crate) peak: u32,
    /// When its busiest window ended.
    pub(crate) peak_until: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct Worst {
    pub(crate) time: String,
    pub(crate) requests: u64,
    pub(crate) refused: u64,
}

/// The least limit that spares a share of the clients, if there is one.
#[derive(Debug, Serialize)]
pub(crate) struct Suggested {
    pub(crate) share: f64,
    pub(crate) policy: Option<String>,
    pub(crate) limit: Option<u64>,
    pub(crate) burst: Option<u64>,
    pub(crate) clients_refused: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// Requests and refusals in steps of time; steps without requests are left out.
#[derive(Debug, Serialize)]
pub(crate) struct OverTime {
    pub(crate) step_s: u64,
    pub(crate) points: Vec<Point>,
}

#[derive(Debug, Serialize)]
pub(crate) struct Point {
    pub(crate) time: String,
    #[serde(skip)]
    pub(crate) start: Tick,
    pub(crate) requests: u64,
    /// By policy.
    pub(crate) refused: Vec<u64>,
}

/// The quantiles that are told, in thousandths of a percent.
const QUANTILES: [u64; 7] = [50_000, 75_000, 90_000, 95_000, 99_000, 99_900, 100_000];

impl Report {
    /// Whether every input was read to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.cut_short.is_empty()
    }

    /// Sums up what was counted, and finds the suggestions.
    pub(super) fn of(mut tally: Tally, plan: &Plan) -> Result<Self, BacktestError> {
        let clients = tally.activities.len() as u64;
        let mut peaks: Vec<u32> = tally.activities.iter().map(|activity| activity.peak).collect();
        peaks.sort_unstable();
        let suggestions = suggestions(&mut tally, plan, &peaks)?;
        let step = tally.timeline.step();
        let points = tally.timeline.points();
        let names = tally.clients.names();
        let end_of =
            |activity: &Activity| Moment(tally.slices.end(activity.peak_slice())).to_string();
        let hardest_hit = |policy: &PolicyTally| {
            let client = |number: usize| {
                let (hit, activity) = (&policy.hits[number], &tally.activities[number]);
                HitClient {
                    client: shown(names[number]),
                    requests: activity.requests,
                    refused: hit.refused,
                    first_refused: Moment(hit.first).to_string(),
                    last_refused: Moment(hit.last).to_string(),
                    peak: activity.peak,
                    peak_until: end_of(activity),
                }
            };
            most_refused(policy, &names, plan.top).into_iter().map(client).collect()
        };
        let policies = tally.policies.iter().zip(suggestions).enumerate();
        let policies = policies.map(|(place, (policy, suggestion))| {
            let clients_refused = policy.clients_refused();
            let worst = points.iter().filter(|(_, counts)| counts[place + 1] > 0);
            let worst = worst.max_by_key(|(start, counts)| (counts[place + 1], Reverse(*start)));
            PolicyReport {
                policy: Spelled::new(&policy.limit).to_string(),
                allowed: tally.requests - policy.refused,
                refused: policy.refused,
                refused_share: share(policy.refused, tally.requests),
                clients_refused,
                clients_refused_share: share(clients_refused, clients),
                refused_here_only: policy.refused_here_only,
                refused_by_first_only: policy.refused_there_only,
                hardest_hit: hardest_hit(policy),
                worst: worst.map(|(start, counts)| Worst {
                    time: Moment(*start).to_string(),
                    requests: counts[0],
                    refused: counts[place + 1],
                }),
                suggestion,
            }
        });
        let policies = policies.collect();
        Ok(Self {
            lines: tally.lines,
            unreadable: tally.unreadable,
            without_key: tally.without_key,
            requests: tally.requests,
            clients,
            key: plan.wanted.key.to_string(),
            from: tally.span.map(|(from, _)| Moment(from).to_string()),
            to: tally.span.map(|(_, to)| Moment(to).to_string()),
            peaks: Peaks::of(&peaks, plan.peak),
            policies,
            over_time: OverTime {
                step_s: step.as_duration().as_secs(),
                points: points
                    .iter()
                    .map(|(start, counts)| Point {
                        time: Moment(*start).to_string(),
                        start: *start,
                        requests: counts[0],
                        refused: counts[1..].to_vec(),
                    })
                    .collect(),
            },
            unreadable_lines: tally.shown,
            cut_short: tally.cut_short,
        })
    }
}

impl Peaks {
    fn of(sorted: &[u32], window: Ticks) -> Self {
        let quantiles = QUANTILES.map(Share::thousandths).into_iter().filter_map(|share| {
            Some(Quantile { share: share.percent(), requests: quantile(sorted, share)? })
        });
        let mut histogram: Vec<Bin> = Vec::new();
        for &peak in sorted {
            // From a power of two to below the next.
            let from = 1 << peak.max(1).ilog2();
            match histogram.last_mut() {
                Some(bin) if bin.from == from => bin.clients += 1,
                _ => histogram.push(Bin { from, to: from + (from - 1), clients: 1 }),
            }
        }
        Self { window: Span(window).to_string(), quantiles: quantiles.collect(), histogram }
    }
}

/// The least peak that is not exceeded by this share of clients.
fn quantile(sorted: &[u32], share: Share) -> Option<u32> {
    let place = share.of(sorted.len() as u64).checked_sub(1)?;
    sorted.get(usize::try_from(place).ok()?).copied()
}

/// A suggestion for each policy, if they are wanted.
fn suggestions(
    tally: &mut Tally,
    plan: &Plan,
    peaks: &[u32],
) -> Result<Vec<Option<Suggested>>, BacktestError> {
    let (Some(share), Some(spool)) = (plan.suggest, tally.spool.take()) else {
        return Ok(tally.policies.iter().map(|_| None).collect());
    };
    let mut kept = spool.keep().map_err(BacktestError::Spool)?;
    let clients = peaks.len() as u64;
    let at_most = clients - share.of(clients);
    let busy = u128::from(quantile(peaks, share).unwrap_or(1));
    let one = |policy: &PolicyTally| {
        if clients == 0 {
            return Ok(Some(Suggested::none(share, "there are no clients".to_owned())));
        }
        let numbers = policy.limit.numbers();
        let guess = busy * u128::from(numbers.window.0) / u128::from(plan.peak.0);
        let guess = u64::try_from(guess).unwrap_or(u64::MAX);
        let found = suggest(&policy.limit, &mut kept, at_most, guess)?;
        Ok(Some(Suggested::of(share, found)))
    };
    tally.policies.iter().map(one).collect()
}

impl Suggested {
    fn of(share: Share, found: Result<Suggestion, PolicyError>) -> Self {
        let Suggestion { limit, clients_refused } = match found {
            Ok(found) => found,
            Err(error) => return Self::none(share, error.to_string()),
        };
        let numbers = limit.numbers();
        Self {
            share: share.percent(),
            policy: Some(Spelled::new(&limit).to_string()),
            limit: Some(numbers.limit),
            burst: Some(numbers.burst).filter(|_| numbers.kind.is_bucket()),
            clients_refused: Some(clients_refused),
            reason: None,
        }
    }

    fn none(share: Share, reason: String) -> Self {
        let reason = Some(reason);
        let share = share.percent();
        Self { share, policy: None, limit: None, burst: None, clients_refused: None, reason }
    }
}

/// The numbers of those clients who were refused most, by their names where they were refused alike.
fn most_refused(policy: &PolicyTally, names: &[&[u8]], top: usize) -> Vec<usize> {
    let mut most = BinaryHeap::new();
    for (number, hit) in policy.hits.iter().enumerate().filter(|(_, hit)| hit.refused > 0) {
        most.push((Reverse(hit.refused), names[number], number));
        if most.len() > top {
            most.pop();
        }
    }
    most.into_sorted_vec().into_iter().map(|(_, _, number)| number).collect()
}

/// A client's name; bytes that are no text are escaped.
fn shown(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(name) => name.to_owned(),
        Err(_) => name.escape_ascii().to_string(),
    }
}

#[expect(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    reason = "a share is there to be looked at; the counts stand beside it"
)]
fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}
