//! Scenarios: a limit, traffic and a seed, and the bounds of each field.
//!
//! Every field has a default. The bounds keep a simulation cheap, and keep every number of a report exact for programs
//! that read JSON numbers as doubles.

use std::fmt;
use std::time::Duration;

use serde::{Serialize, Serializer};
use tallygate_core::{Cost, Instance, Kind, Limit, LimitBuilder, Policy, PolicyError, Tick, Ticks};

use crate::duration::DurationText;
use crate::limit_syntax::in_durations_of;

/// Microseconds per millisecond and per minute.
pub(super) const MICROS_PER_MILLI: u64 = 1_000;
pub(super) const MICROS_PER_MINUTE: u64 = 60_000_000;

/// The most decisions per algorithm, including retries.
pub(super) const MAX_DECISIONS: usize = 20_000;
/// The most instances that share a quota.
const MAX_INSTANCES: u64 = 16;
/// The most clients, including the greedy one.
pub(super) const MAX_CLIENTS: u64 = 16;
const MAX_DURATION_MS: u64 = 24 * 60 * 60 * 1000;
const MAX_WINDOW_MS: u64 = 366 * MAX_DURATION_MS;
const MAX_AMOUNT: u64 = 1_000_000_000;
const MAX_RATE_PER_MINUTE: u64 = MICROS_PER_MINUTE;
const MAX_ATTEMPTS: u64 = 100;
/// The largest integer that a double represents exactly together with all smaller ones.
const MAX_EXACT: u64 = (1 << 53) - 1;

/// Generated traffic, and the limit that decides it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scenario {
    /// The units per window.
    pub limit: Cost,
    /// The window, in milliseconds.
    pub window_ms: u64,
    /// The burst of the bucket algorithms. Window algorithms ignore it.
    pub burst: Cost,
    /// The algorithms to compare.
    #[serde(serialize_with = "names")]
    pub algorithms: Vec<Kind>,
    /// The traffic pattern.
    #[serde(serialize_with = "name")]
    pub pattern: Pattern,
    /// Requests per minute from all normal clients together.
    pub rate_per_minute: u64,
    /// The duration of the traffic, in milliseconds.
    pub duration_ms: u64,
    /// The random seed: the same seed gives the same traffic.
    pub seed: u64,
    /// The units that a request charges.
    pub cost: Cost,
    /// How denied clients retry, for [`Pattern::Retry`].
    pub retry: Retry,
    /// The number of normal clients, for [`Pattern::Greedy`].
    pub clients: u64,
    /// How many times as many requests as a normal client the greedy one sends.
    pub greedy_factor: u64,
    /// The number of requests per burst, for [`Pattern::Bursty`].
    pub burst_size: u64,
    /// The number of instances behind a random load balancer. Each one decides alone, with its share of the quota.
    pub instances: u64,
}

/// The behavior of a denied client that retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Retry {
    /// Whether it waits for the returned `retry_after`.
    pub obeys: bool,
    /// Whether it waits a random time longer, up to twice as long.
    pub jitter: bool,
    /// The wait in milliseconds if it does not obey `retry_after`.
    pub naive_wait_ms: u64,
    /// The number of attempts, including the first.
    pub attempts: u64,
}

/// A traffic pattern.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Evenly spaced requests.
    Steady,
    /// Groups of simultaneous requests.
    Bursty,
    /// Random arrivals (a Poisson process).
    Poisson,
    /// A rate that rises from zero to twice the given rate.
    Ramp,
    /// As many requests as the limit just before the end of a window and again just after it, and few others.
    Spike,
    /// Evenly spaced requests; denied clients retry.
    Retry,
    /// Some normal clients, and one that sends far more.
    Greedy,
}

impl Pattern {
    /// All patterns.
    pub const ALL: [Self; 7] = [
        Self::Steady,
        Self::Bursty,
        Self::Poisson,
        Self::Ramp,
        Self::Spike,
        Self::Retry,
        Self::Greedy,
    ];

    /// Returns the name of the pattern.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Steady => "steady",
            Self::Bursty => "bursty",
            Self::Poisson => "poisson",
            Self::Ramp => "ramp",
            Self::Spike => "spike",
            Self::Retry => "retry",
            Self::Greedy => "greedy",
        }
    }

    /// Returns the pattern with this name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|pattern| pattern.name() == name)
    }
}

impl Default for Scenario {
    fn default() -> Self {
        Self {
            limit: 10,
            window_ms: 10_000,
            burst: 10,
            algorithms: vec![
                Kind::TokenBucket,
                Kind::LeakyBucket,
                Kind::FixedWindow,
                Kind::SlidingWindowLog,
                Kind::SlidingWindowCounter,
                Kind::Gcra,
            ],
            pattern: Pattern::Steady,
            rate_per_minute: 90,
            duration_ms: 30_000,
            seed: 1,
            cost: 1,
            retry: Retry { obeys: true, jitter: true, naive_wait_ms: 200, attempts: 5 },
            clients: 3,
            greedy_factor: 20,
            burst_size: 8,
            instances: 1,
        }
    }
}

impl Scenario {
    pub(super) const fn window_us(&self) -> u64 {
        self.window_ms * MICROS_PER_MILLI
    }

    pub(super) const fn duration_us(&self) -> u64 {
        self.duration_ms * MICROS_PER_MILLI
    }

    /// Returns whether the traffic depends on the seed.
    #[must_use]
    pub fn is_random(&self) -> bool {
        let retries = self.pattern == Pattern::Retry && self.retry.attempts > 1;
        self.pattern == Pattern::Poisson || self.instances > 1 || (retries && self.retry.jitter)
    }

    /// Returns the units that a bucket earns back in a time.
    pub(super) fn earned(&self, time_us: u64) -> Cost {
        let earned = u128::from(time_us) * u128::from(self.limit) / u128::from(self.window_us());
        // A day at a billion per millisecond still fits.
        u64::try_from(earned).unwrap_or(u64::MAX)
    }

    /// Returns the scenario's limit for an algorithm.
    pub(super) fn limit_of(&self, kind: Kind) -> Result<Limit, PolicyError> {
        self.builder(kind).limit()
    }

    /// Returns the limit of each instance: its share of the scenario's limit and burst.
    pub(super) fn limits_of(&self, kind: Kind) -> Result<Vec<Limit>, PolicyError> {
        let whole = self.builder(kind).build()?;
        // At most `MAX_INSTANCES`.
        let count = u32::try_from(self.instances).unwrap_or(u32::MAX);
        let shares = (0..count).map(|index| whole.share(Instance { index, count }));
        shares.map(|share| Ok(share?.limits()[0].clone())).collect()
    }

    fn builder(&self, kind: Kind) -> LimitBuilder {
        let builder = Policy::of(kind, self.limit).per(Ticks(self.window_us()));
        if kind.is_bucket() { builder.burst(self.burst) } else { builder }
    }

    /// Returns the number of clients, including the greedy one.
    pub(super) fn number_of_clients(&self) -> usize {
        match self.pattern {
            // At most `MAX_CLIENTS`.
            Pattern::Greedy => usize::try_from(self.clients).unwrap_or_default() + 1,
            _ => 1,
        }
    }

    /// Checks that every field is valid. The error names the field and its valid range.
    pub(crate) fn check(&self) -> Result<(), ScenarioError> {
        let within = |field, given: u64, most: u64| match given {
            given if (1..=most).contains(&given) => Ok(()),
            given => Err(ScenarioError::OutOfRange { field, given, least: 1, most }),
        };
        within("limit", self.limit, MAX_AMOUNT)?;
        within("window_ms", self.window_ms, MAX_WINDOW_MS)?;
        within("burst", self.burst, MAX_AMOUNT)?;
        within("rate_per_minute", self.rate_per_minute, MAX_RATE_PER_MINUTE)?;
        within("duration_ms", self.duration_ms, MAX_DURATION_MS)?;
        within("cost", self.cost, MAX_AMOUNT)?;
        within("retry.naive_wait_ms", self.retry.naive_wait_ms, MAX_DURATION_MS)?;
        within("retry.attempts", self.retry.attempts, MAX_ATTEMPTS)?;
        within("clients", self.clients, MAX_CLIENTS - 1)?;
        within("greedy_factor", self.greedy_factor, MAX_AMOUNT)?;
        within("burst_size", self.burst_size, MAX_DECISIONS as u64)?;
        within("instances", self.instances, MAX_INSTANCES)?;
        if self.seed > MAX_EXACT {
            let (field, given) = ("seed", self.seed);
            return Err(ScenarioError::OutOfRange { field, given, least: 0, most: MAX_EXACT });
        }
        if self.algorithms.is_empty() {
            return Err(ScenarioError::NoAlgorithm);
        }
        for (field, given) in [("limit", self.limit), ("burst", self.burst)] {
            if given < self.instances {
                return Err(ScenarioError::ShareBelowOne {
                    field,
                    given,
                    instances: self.instances,
                });
            }
        }
        for (index, &kind) in self.algorithms.iter().enumerate() {
            if self.algorithms[..index].contains(&kind) {
                return Err(ScenarioError::DuplicateAlgorithm { kind });
            }
            self.limit_of(kind).map_err(|error| ScenarioError::Limit { kind, error })?;
        }
        let earned = u128::from(self.burst) * u128::from(self.window_us());
        if earned.div_ceil(self.limit.into()) > MAX_EXACT.into() {
            return Err(ScenarioError::RefillTooSlow { burst: self.burst, limit: self.limit });
        }
        if self.pattern == Pattern::Spike && self.duration_ms <= self.window_ms {
            let (window_ms, duration_ms) = (self.window_ms, self.duration_ms);
            return Err(ScenarioError::NoWindowBoundary { window_ms, duration_ms });
        }
        Ok(())
    }
}

/// Converts a time of a scenario, which starts at 0 and lasts at most a day, to a tick.
pub(super) fn tick(at_us: u64) -> Tick {
    Tick(i64::try_from(at_us).unwrap_or(i64::MAX))
}

fn names<S: Serializer>(kinds: &[Kind], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(kinds.iter().map(|kind| kind.name()))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn name<S: Serializer>(pattern: &Pattern, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(pattern.name())
}

/// The error for a scenario that cannot be run.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScenarioError {
    /// A number is out of range.
    OutOfRange {
        /// The field.
        field: &'static str,
        /// The number that was given.
        given: u64,
        /// The smallest valid number.
        least: u64,
        /// The largest valid number.
        most: u64,
    },
    /// No algorithm is named.
    NoAlgorithm,
    /// An algorithm is named twice.
    DuplicateAlgorithm {
        /// The algorithm.
        kind: Kind,
    },
    /// The numbers do not make a valid limit for an algorithm.
    Limit {
        /// The algorithm.
        kind: Kind,
        /// The reason.
        error: PolicyError,
    },
    /// There are more instances than units to share.
    ShareBelowOne {
        /// The field whose units are shared.
        field: &'static str,
        /// The number of units.
        given: u64,
        /// The number of instances.
        instances: u64,
    },
    /// The burst takes too long to refill.
    RefillTooSlow {
        /// The burst.
        burst: Cost,
        /// The limit that refills it.
        limit: Cost,
    },
    /// No window ends during the traffic, but a spike needs a window boundary.
    NoWindowBoundary {
        /// The window, in milliseconds.
        window_ms: u64,
        /// The duration of the traffic, in milliseconds.
        duration_ms: u64,
    },
    /// The scenario has more requests than the maximum.
    TooManyRequests,
    /// There is no decision with this number.
    UnknownEvent {
        /// The number that was given.
        given: u64,
        /// The number of decisions.
        events: usize,
    },
    /// The algorithm is not part of the scenario.
    AlgorithmNotInScenario {
        /// The algorithm.
        kind: Kind,
    },
}

impl ScenarioError {
    /// Returns the message, with the names that the caller uses for the fields of a scenario. The names of this module are
    /// those of the JSON fields; the command line passes its flags.
    #[must_use]
    pub fn message(&self, name_of: impl Fn(&'static str) -> String) -> String {
        match self {
            Self::OutOfRange { field, given, least, most } => {
                let (unit, longest) = match field {
                    field if field.ends_with("_ms") => {
                        let most = DurationText(Duration::from_millis(*most));
                        (" ms", format!(" ({most})"))
                    }
                    field if field.ends_with("_per_minute") => (" per minute", String::new()),
                    _ => ("", String::new()),
                };
                format!("{} is {given}{unit}; use {least} to {most}{unit}{longest}", name_of(field))
            }
            Self::NoAlgorithm => format!("{} is empty; name at least one", name_of("algorithms")),
            Self::DuplicateAlgorithm { kind } => {
                format!("{} has {kind} twice; name each once", name_of("algorithms"))
            }
            Self::Limit { kind, error } => {
                let error = in_durations_of(error, 1_000);
                format!("these numbers are not a valid {kind}: {error}")
            }
            Self::ShareBelowOne { field, given, instances } => format!(
                "{} is {given}, less than one unit for each of {instances} instances; use at least {instances}, or reduce \
                 {}",
                name_of(field),
                name_of("instances")
            ),
            Self::RefillTooSlow { burst, limit } => format!(
                "{} is {burst}, which takes more than 285 years to refill at a limit of {limit}; use a smaller burst",
                name_of("burst")
            ),
            Self::NoWindowBoundary { window_ms, duration_ms } => format!(
                "{} is {duration_ms} ms; a spike needs a duration longer than the window of {window_ms} ms",
                name_of("duration_ms")
            ),
            Self::TooManyRequests => format!(
                "the scenario has more than {MAX_DECISIONS} requests; use a lower {} or a shorter {}",
                name_of("rate_per_minute"),
                name_of("duration_ms")
            ),
            Self::UnknownEvent { given, events: 0 } => {
                format!("{} is {given}, but the scenario has no requests", name_of("event"))
            }
            Self::UnknownEvent { given, events } => {
                format!("{} is {given}; use 0 to {}", name_of("event"), events - 1)
            }
            Self::AlgorithmNotInScenario { kind } => format!(
                "{} is {kind}, which is not among the {} of the scenario",
                name_of("algorithm"),
                name_of("algorithms")
            ),
        }
    }
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message(|field| format!("`{field}`")))
    }
}

impl std::error::Error for ScenarioError {}
