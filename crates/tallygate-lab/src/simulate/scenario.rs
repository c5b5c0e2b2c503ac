//! What is asked for: a limit, some traffic and a seed; and what may be asked for.
//!
//! Every field has a default. Bounds are there so that a call costs little, and so that every number of a reply is
//! exact where numbers are doubles.

use std::fmt;

use serde::{Serialize, Serializer};
use tallygate_core::{Cost, Kind, Limit, Policy, PolicyError, Ticks};

/// Microseconds a millisecond and a minute.
pub(super) const MICROS_A_MILLI: u64 = 1_000;
pub(super) const MICROS_A_MINUTE: u64 = 60_000_000;

/// The most decisions a lane, first attempts and retries together.
pub(super) const MAX_DECISIONS: usize = 20_000;
/// The most clients, with the greedy one.
pub(super) const MAX_CLIENTS: u64 = 16;
const MAX_DURATION_MS: u64 = 24 * 60 * 60 * 1000;
const MAX_WINDOW_MS: u64 = 366 * MAX_DURATION_MS;
const MAX_AMOUNT: u64 = 1_000_000_000;
const MAX_RATE_PER_MINUTE: u64 = MICROS_A_MINUTE;
const MAX_ATTEMPTS: u64 = 100;
/// The largest whole number that every double near it is apart from.
const MAX_EXACT: u64 = (1 << 53) - 1;

/// Traffic, and the limit it meets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Scenario {
    /// The limit.
    pub limit: Cost,
    /// Its window, in milliseconds.
    pub window_ms: u64,
    /// For buckets; windows have none.
    pub burst: Cost,
    /// The algorithms that are compared.
    #[serde(serialize_with = "names")]
    pub algorithms: Vec<Kind>,
    /// How requests come.
    #[serde(serialize_with = "name")]
    pub pattern: Pattern,
    /// What comes in, from all polite clients together.
    pub rate_per_minute: u64,
    /// How long requests come, in milliseconds.
    pub duration_ms: u64,
    /// The random seed: the same seed gives the same traffic.
    pub seed: u64,
    /// The units that a request charges.
    pub cost: Cost,
    /// What a refused client does, for [`Pattern::Retry`].
    pub retry: Retry,
    /// How many polite clients there are beside a greedy one.
    pub clients: u64,
    /// How many times as much as a polite client the greedy one sends.
    pub greedy_factor: u64,
    /// How many come at one instant.
    pub burst_size: u64,
}

/// What a refused client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Retry {
    /// Whether it waits as long as it is told to.
    pub obeys: bool,
    /// Whether it waits a random part longer, up to twice as long.
    pub jitter: bool,
    /// How long it waits if it does not obey.
    pub naive_wait_ms: u64,
    /// How often it tries, with the first time.
    pub attempts: u64,
}

/// How requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Evenly.
    Steady,
    /// In groups at one instant.
    Bursty,
    /// At random.
    Poisson,
    /// From none to twice the rate.
    Ramp,
    /// The limit just before a window's end and again just after, and little besides.
    Spike,
    /// Evenly, and a refused client comes again.
    Retry,
    /// From some polite clients, and one that sends far more.
    Greedy,
}

impl Pattern {
    /// Every pattern.
    pub const ALL: [Self; 7] = [
        Self::Steady,
        Self::Bursty,
        Self::Poisson,
        Self::Ramp,
        Self::Spike,
        Self::Retry,
        Self::Greedy,
    ];

    /// Returns its name.
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

    /// Returns the pattern with a name.
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
        }
    }
}

impl Scenario {
    pub(super) const fn window_us(&self) -> u64 {
        self.window_ms * MICROS_A_MILLI
    }

    pub(super) const fn duration_us(&self) -> u64 {
        self.duration_ms * MICROS_A_MILLI
    }

    /// The limit as one of the algorithms has it.
    pub(super) fn limit_of(&self, kind: Kind) -> Result<Limit, PolicyError> {
        let builder = Policy::of(kind, self.limit).per(Ticks(self.window_us()));
        if kind.is_bucket() { builder.burst(self.burst).limit() } else { builder.limit() }
    }

    /// How many clients there are, with a greedy one.
    pub(super) fn number_of_clients(&self) -> usize {
        match self.pattern {
            // At most `MAX_CLIENTS`.
            Pattern::Greedy => usize::try_from(self.clients).unwrap_or_default() + 1,
            _ => 1,
        }
    }

    /// Finds a scenario valid, or says which field is not, and what would do.
    pub(crate) fn check(&self) -> Result<(), ScenarioError> {
        let within = |field, given: u64, most: u64| match given {
            given if (1..=most).contains(&given) => Ok(()),
            given => Err(ScenarioError::Outside { field, given, least: 1, most }),
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
        if self.seed > MAX_EXACT {
            let (field, given) = ("seed", self.seed);
            return Err(ScenarioError::Outside { field, given, least: 0, most: MAX_EXACT });
        }
        if self.algorithms.is_empty() {
            return Err(ScenarioError::NoAlgorithm);
        }
        for (index, &kind) in self.algorithms.iter().enumerate() {
            if self.algorithms[..index].contains(&kind) {
                return Err(ScenarioError::Twice { kind });
            }
            self.limit_of(kind).map_err(|error| ScenarioError::Limit { kind, error })?;
        }
        let earned = u128::from(self.burst) * u128::from(self.window_us());
        if earned.div_ceil(self.limit.into()) > MAX_EXACT.into() {
            return Err(ScenarioError::EarnedTooSlowly { burst: self.burst, limit: self.limit });
        }
        if self.pattern == Pattern::Spike && self.duration_ms <= self.window_ms {
            let (window_ms, duration_ms) = (self.window_ms, self.duration_ms);
            return Err(ScenarioError::NoBoundary { window_ms, duration_ms });
        }
        Ok(())
    }
}

fn names<S: Serializer>(kinds: &[Kind], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(kinds.iter().map(|kind| kind.name()))
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes references")]
fn name<S: Serializer>(pattern: &Pattern, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(pattern.name())
}

/// Why a scenario is not run.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScenarioError {
    /// A number is outside its bounds.
    Outside {
        /// The field.
        field: &'static str,
        /// The number that was given.
        given: u64,
        /// The least that is allowed.
        least: u64,
        /// The most that is allowed.
        most: u64,
    },
    /// No algorithm is named.
    NoAlgorithm,
    /// An algorithm is named twice.
    Twice {
        /// The algorithm.
        kind: Kind,
    },
    /// The numbers are no limit of an algorithm.
    Limit {
        /// The algorithm.
        kind: Kind,
        /// What is wrong with the numbers.
        error: PolicyError,
    },
    /// The burst takes too long to earn.
    EarnedTooSlowly {
        /// The burst.
        burst: Cost,
        /// The limit that earns it.
        limit: Cost,
    },
    /// No window ends while requests come, and a spike needs that.
    NoBoundary {
        /// The window, in milliseconds.
        window_ms: u64,
        /// How long requests come, in milliseconds.
        duration_ms: u64,
    },
    /// More requests would come than are decided.
    TooMany,
    /// There is no decision with this number.
    UnknownEvent {
        /// The number that was given.
        given: u64,
        /// How many decisions there are.
        events: usize,
    },
    /// The algorithm is none of the scenario's.
    NoSuchLane {
        /// The algorithm.
        kind: Kind,
    },
}

impl fmt::Display for ScenarioError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Outside { field, given, least, most } => {
                write!(f, "`{field}` is {given}; use {least} to {most}")
            }
            Self::NoAlgorithm => write!(f, "`algorithms` is empty; name one to six of them"),
            Self::Twice { kind } => write!(f, "`algorithms` has {kind} twice; name each once"),
            Self::Limit { kind, error } => write!(f, "no {kind} can be made of this: {error}"),
            Self::EarnedTooSlowly { burst, limit } => write!(
                f,
                "`burst` is {burst}, which a limit of {limit} takes more than 285 years to earn; use less"
            ),
            Self::NoBoundary { window_ms, duration_ms } => write!(
                f,
                "`duration_ms` is {duration_ms}, in which no window of {window_ms} ms ends; a spike needs a longer one"
            ),
            Self::TooMany => write!(
                f,
                "more than {MAX_DECISIONS} requests would come; use a lower rate or a shorter duration"
            ),
            Self::UnknownEvent { given, events: 0 } => {
                write!(f, "`event` is {given}, but nobody comes")
            }
            Self::UnknownEvent { given, events } => {
                write!(f, "`event` is {given}; use 0 to {}", events - 1)
            }
            Self::NoSuchLane { kind } => {
                write!(f, "`algorithm` is {kind}, which is none of the scenario's `algorithms`")
            }
        }
    }
}

impl std::error::Error for ScenarioError {}
