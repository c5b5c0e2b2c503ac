//! The report of a backtest. It serializes to JSON; `text.rs` and `html.rs` render it for people.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::Serialize;
use tallygate_core::{PolicyError, Tick, Ticks};

use super::activity::Activity;
use super::filter::LineFilter;
use super::reading::{PartialInput, UnreadableLine};
use super::share::Share;
use super::suggest::{Suggestion, suggest};
use super::tally::{PolicyTally, Tally};
use super::timestamp::Timestamp;
use super::{BacktestError, BacktestPlan};
use crate::limit_syntax::{Span, in_durations};

/// The results of a backtest.
#[derive(Debug, Serialize)]
pub struct Report {
    /// All lines except blank ones and headers: the sum of `unreadable`, `filtered`, `without_key` and `requests`.
    pub(crate) lines: u64,
    pub(crate) unreadable: u64,
    pub(crate) filtered: u64,
    /// Sentences about filters whose field no line has.
    pub(crate) filters_without_effect: Vec<String>,
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
    pub(crate) cut_short: Vec<PartialInput>,
}

/// The most requests per client in a window.
#[derive(Debug, Serialize)]
pub(crate) struct Peaks {
    pub(crate) window: String,
    pub(crate) quantiles: Vec<Quantile>,
    pub(crate) histogram: Vec<Bin>,
}

/// A share of clients in percent, and the largest peak among them.
#[derive(Debug, Serialize)]
pub(crate) struct Quantile {
    pub(crate) share: f64,
    pub(crate) requests: u32,
}

/// The number of clients with a peak in a range.
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
    pub(crate) denied: u64,
    pub(crate) denied_share: f64,
    pub(crate) clients_denied: u64,
    pub(crate) clients_denied_share: f64,
    /// Requests that this policy denies and the first does not, and the reverse.
    pub(crate) denied_here_only: u64,
    pub(crate) denied_by_first_only: u64,
    pub(crate) most_denied: Vec<DeniedClient>,
    /// The time step with the most denials.
    pub(crate) worst: Option<WorstStep>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) suggestion: Option<SuggestionReport>,
}

#[derive(Debug, Serialize)]
pub(crate) struct DeniedClient {
    pub(crate) client: String,
    pub(crate) requests: u64,
    pub(crate) denied: u64,
    pub(crate) first_denied: String,
    pub(crate) last_denied: String,
    pub(crate) peak: u32,
    /// The end of the client's busiest window.
    pub(crate) peak_until: String,
}

#[derive(Debug, Serialize)]
pub(crate) struct WorstStep {
    pub(crate) time: String,
    pub(crate) requests: u64,
    pub(crate) denied: u64,
}

/// The smallest limit that denies no request of a share of the clients, if there is one.
#[derive(Debug, Serialize)]
pub(crate) struct SuggestionReport {
    pub(crate) share: f64,
    pub(crate) policy: Option<String>,
    /// The numbers of the first limit.
    pub(crate) limit: Option<u64>,
    pub(crate) burst: Option<u64>,
    pub(crate) clients_denied: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) reason: Option<String>,
}

/// Requests and denials per time step. Steps without requests are omitted.
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
    /// One number per policy.
    pub(crate) denied: Vec<u64>,
}

/// The quantiles of the report, in thousandths of a percent.
const QUANTILES: [u64; 7] = [50_000, 75_000, 90_000, 95_000, 99_000, 99_900, 100_000];

impl Report {
    /// Returns whether every input was read to its end.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.cut_short.is_empty()
    }

    /// Builds the report from the counts, and searches the suggestions.
    pub(super) fn of(mut tally: Tally, plan: &BacktestPlan) -> Result<Self, BacktestError> {
        let clients = tally.activities.len() as u64;
        let mut peaks: Vec<u32> = tally.activities.iter().map(|activity| activity.peak).collect();
        peaks.sort_unstable();
        let suggestions = suggestions(&mut tally, plan, &peaks)?;
        let step = tally.timeline.step();
        let points = tally.timeline.points();
        let names = tally.clients.names();
        let end_of =
            |activity: &Activity| Timestamp(tally.slices.end(activity.peak_slice())).to_string();
        let most_denied = |policy: &PolicyTally| {
            let client = |number: usize| {
                let (denials, activity) = (&policy.denials[number], &tally.activities[number]);
                DeniedClient {
                    client: shown(names[number]),
                    requests: activity.requests,
                    denied: denials.denied,
                    first_denied: Timestamp(denials.first).to_string(),
                    last_denied: Timestamp(denials.last).to_string(),
                    peak: activity.peak,
                    peak_until: end_of(activity),
                }
            };
            most_denied_clients(policy, &names, plan.top).into_iter().map(client).collect()
        };
        let policies = tally.policies.iter().zip(suggestions).enumerate();
        let policies = policies.map(|(place, (policy, suggestion))| {
            let clients_denied = policy.clients_denied();
            let worst = points.iter().filter(|(_, counts)| counts[place + 1] > 0);
            let worst = worst.max_by_key(|(start, counts)| (counts[place + 1], Reverse(*start)));
            PolicyReport {
                policy: policy.trial.text(),
                allowed: tally.requests - policy.denied,
                denied: policy.denied,
                denied_share: share(policy.denied, tally.requests),
                clients_denied,
                clients_denied_share: share(clients_denied, clients),
                denied_here_only: policy.denied_here_only,
                denied_by_first_only: policy.denied_by_first_only,
                most_denied: most_denied(policy),
                worst: worst.map(|(start, counts)| WorstStep {
                    time: Timestamp(*start).to_string(),
                    requests: counts[0],
                    denied: counts[place + 1],
                }),
                suggestion,
            }
        });
        let policies = policies.collect();
        Ok(Self {
            lines: tally.lines,
            unreadable: tally.unreadable,
            filtered: tally.filtered,
            filters_without_effect: plan
                .log
                .filters
                .iter()
                .filter_map(LineFilter::without_effect)
                .collect(),
            without_key: tally.without_key,
            requests: tally.requests,
            clients,
            key: plan.log.key.to_string(),
            from: tally.span.map(|(from, _)| Timestamp(from).to_string()),
            to: tally.span.map(|(_, to)| Timestamp(to).to_string()),
            peaks: Peaks::of(&peaks, plan.peak),
            policies,
            over_time: OverTime {
                step_s: step.as_duration().as_secs(),
                points: points
                    .iter()
                    .map(|(start, counts)| Point {
                        time: Timestamp(*start).to_string(),
                        start: *start,
                        requests: counts[0],
                        denied: counts[1..].to_vec(),
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
            // Each bin reaches from one power of two to the next.
            let from = 1 << peak.max(1).ilog2();
            match histogram.last_mut() {
                Some(bin) if bin.from == from => bin.clients += 1,
                _ => histogram.push(Bin { from, to: from + (from - 1), clients: 1 }),
            }
        }
        Self { window: Span(window).to_string(), quantiles: quantiles.collect(), histogram }
    }
}

/// Returns the smallest peak that this share of clients does not exceed.
fn quantile(sorted: &[u32], share: Share) -> Option<u32> {
    let place = share.of(sorted.len() as u64).checked_sub(1)?;
    sorted.get(usize::try_from(place).ok()?).copied()
}

/// Returns a suggestion per policy, or `None` for each if the plan asks for no suggestions.
fn suggestions(
    tally: &mut Tally,
    plan: &BacktestPlan,
    peaks: &[u32],
) -> Result<Vec<Option<SuggestionReport>>, BacktestError> {
    let (Some(share), Some(spool)) = (plan.suggest, tally.spool.take()) else {
        return Ok(tally.policies.iter().map(|_| None).collect());
    };
    let mut spooled = spool.finish().map_err(BacktestError::Spool)?;
    let clients = peaks.len() as u64;
    let max_denied = clients - share.of(clients);
    let busy = u128::from(quantile(peaks, share).unwrap_or(1));
    let one = |policy: &PolicyTally| {
        let numbers = policy.trial.limits()[0].numbers();
        let guess = busy * u128::from(numbers.window.0) / u128::from(plan.peak.0);
        let guess = u64::try_from(guess).unwrap_or(u64::MAX);
        let found = suggest(&policy.trial, &mut spooled, max_denied, guess)?;
        Ok(Some(SuggestionReport::of(share, found)))
    };
    tally.policies.iter().map(one).collect()
}

impl SuggestionReport {
    fn of(share: Share, found: Result<Suggestion, PolicyError>) -> Self {
        let Suggestion { trial, clients_denied } = match found {
            Ok(found) => found,
            Err(error) => return Self::none(share, in_durations(&error)),
        };
        let numbers = trial.limits()[0].numbers();
        Self {
            share: share.percent(),
            policy: Some(trial.text()),
            limit: Some(numbers.limit),
            burst: Some(numbers.burst).filter(|_| numbers.kind.is_bucket()),
            clients_denied: Some(clients_denied),
            reason: None,
        }
    }

    fn none(share: Share, reason: String) -> Self {
        let reason = Some(reason);
        let share = share.percent();
        Self { share, policy: None, limit: None, burst: None, clients_denied: None, reason }
    }
}

/// Returns the numbers of the most denied clients; clients with equal denials are ordered by name.
fn most_denied_clients(policy: &PolicyTally, names: &[&[u8]], top: usize) -> Vec<usize> {
    let mut most = BinaryHeap::new();
    for (number, client) in
        policy.denials.iter().enumerate().filter(|(_, client)| client.denied > 0)
    {
        most.push((Reverse(client.denied), names[number], number));
        if most.len() > top {
            most.pop();
        }
    }
    most.into_sorted_vec().into_iter().map(|(_, _, number)| number).collect()
}

/// Returns a client's name, escaped if it is not UTF-8.
fn shown(name: &[u8]) -> String {
    match std::str::from_utf8(name) {
        Ok(name) => name.to_owned(),
        Err(_) => name.escape_ascii().to_string(),
    }
}

#[expect(
    clippy::float_arithmetic,
    clippy::cast_precision_loss,
    reason = "the share is only displayed; the report also has the exact counts"
)]
fn share(part: u64, all: u64) -> f64 {
    if all == 0 { 0.0 } else { part as f64 / all as f64 }
}
