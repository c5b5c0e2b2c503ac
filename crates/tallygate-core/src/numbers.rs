//! The numbers of a limit (its algorithm, amount, window and burst), and which of them are valid.
//!
//! Every valid set of numbers is decided exactly. All others are a [`PolicyError`], which says what was given and
//! what would work.

use alloc::boxed::Box;
use core::fmt;
use core::str::FromStr;

use crate::penalty::Penalty;
use crate::{Cost, Ticks};

/// One of the six algorithms.
///
/// In the table, `L` is the limit, `W` the window and `B` the burst.
///
/// | algorithm | allows | choose it for |
/// |---|---|---|
/// | [`TokenBucket`](Self::TokenBucket) | bursts of up to `B`, and `L` per `W` on average | most APIs; the default choice |
/// | [`Gcra`](Self::Gcra) | the same as the token bucket | users who think in arrival times |
/// | [`LeakyBucket`](Self::LeakyBucket) | the same, and returns a delay for each request | an even output rate |
/// | [`FixedWindow`](Self::FixedWindow) | `L` in each window of the clock, up to `2·L` around its boundary | quotas per hour or per day |
/// | [`SlidingWindowLog`](Self::SlidingWindowLog) | `L` in every window, wherever it starts | small limits that must hold strictly |
/// | [`SlidingWindowCounter`](Self::SlidingWindowCounter) | about `L` in every window, at most `2·L` | large limits in little memory |
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Kind {
    /// Saves up to a burst of tokens, and earns them at a constant rate.
    TokenBucket,
    /// Makes the same decisions as the token bucket, defined by a theoretical arrival time.
    Gcra,
    /// Allows the same requests as the token bucket, and returns a delay that makes the output even.
    LeakyBucket,
    /// Counts the units in each window of the clock.
    FixedWindow,
    /// Remembers every allowed request until it is as old as the window.
    SlidingWindowLog,
    /// Estimates the units in the last window from the counts of two windows.
    SlidingWindowCounter,
}

impl Kind {
    /// All six algorithms.
    pub const ALL: [Self; 6] = [
        Self::TokenBucket,
        Self::Gcra,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindowLog,
        Self::SlidingWindowCounter,
    ];

    /// Returns the name that configurations and command lines use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TokenBucket => "token_bucket",
            Self::Gcra => "gcra",
            Self::LeakyBucket => "leaky_bucket",
            Self::FixedWindow => "fixed_window",
            Self::SlidingWindowLog => "sliding_window_log",
            Self::SlidingWindowCounter => "sliding_window_counter",
        }
    }

    /// Returns whether it is a bucket, which can have a burst other than its limit.
    #[must_use]
    pub const fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket | Self::Gcra | Self::LeakyBucket)
    }

    /// Returns the first byte of an encoded state. It is part of the format and must never change.
    pub(crate) const fn tag(self) -> u8 {
        match self {
            Self::TokenBucket => 1,
            Self::Gcra => 2,
            Self::LeakyBucket => 3,
            Self::FixedWindow => 4,
            Self::SlidingWindowLog => 5,
            Self::SlidingWindowCounter => 6,
        }
    }

    pub(crate) fn from_tag(tag: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.tag() == tag)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or(UnknownKind)
    }
}

/// The error for a name that is none of the six algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKind;

impl fmt::Display for UnknownKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown algorithm; use one of")?;
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            write!(f, "{} {kind}", if index > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownKind {}

/// The start of fixed windows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
pub enum Anchor {
    /// At multiples of the window, the same for all keys.
    #[default]
    Clock,
    /// At the first allowed request of a key that had used nothing.
    FirstRequest,
}

/// The numbers of a limit. The numbers of a [`Limit`](crate::Limit) are always valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Numbers {
    /// The algorithm.
    pub kind: Kind,
    /// L: the units that are earned per window.
    pub limit: Cost,
    /// W: the window.
    pub window: Ticks,
    /// B: the most units that can be allowed at one instant. Equal to L for windows.
    pub burst: Cost,
    /// How many units a settled reservation may charge beyond the capacity.
    pub debt: Cost,
    /// How many units a new key may use at once.
    pub start: Cost,
    /// Where a fixed window starts.
    pub anchor: Anchor,
}

/// The longest time that a valid limit may take to restore a full quota: without debt, and with all its debt.
const MAX_TIME_TO_FRESH: u128 = 1 << 62;
const MAX_TIME_TO_FRESH_IN_DEBT: u128 = 1 << 63;

impl Numbers {
    /// Returns an error if the numbers cannot be decided exactly.
    pub(crate) fn validate(&self) -> Result<(), PolicyError> {
        let &Self { kind, limit, window, burst, debt, start, anchor } = self;
        if limit == 0 {
            return Err(PolicyError::ZeroLimit);
        }
        if window == Ticks::ZERO {
            return Err(PolicyError::ZeroWindow);
        }
        if burst == 0 {
            return Err(PolicyError::ZeroBurst);
        }
        if !kind.is_bucket() && burst != limit {
            return Err(PolicyError::BurstOnWindow { kind, burst, limit });
        }
        if kind != Kind::FixedWindow && anchor != Anchor::Clock {
            return Err(PolicyError::AnchorOnOther { kind });
        }
        let time_to_fresh = self.time_to_fresh(burst);
        if time_to_fresh > MAX_TIME_TO_FRESH {
            return Err(PolicyError::TimeToFresh { kind, limit, window, burst, time_to_fresh });
        }
        if kind == Kind::SlidingWindowLog && limit.min(window.0) > MAX_LOG_ENTRIES {
            return Err(PolicyError::LogTooLong { limit, window });
        }
        if burst.checked_add(debt).is_none_or(|most| {
            kind.is_bucket() && self.time_to_fresh(most) > MAX_TIME_TO_FRESH_IN_DEBT
        }) {
            return Err(PolicyError::DebtTooLarge { debt, capacity: burst });
        }
        if start > burst {
            return Err(PolicyError::StartAboveCapacity { start, capacity: burst });
        }
        Ok(())
    }

    /// Returns how long a bucket takes to earn `used` units back. For windows, it is the length of two windows.
    fn time_to_fresh(&self, used: Cost) -> u128 {
        if self.kind.is_bucket() {
            (u128::from(used) * u128::from(self.window.0)).div_ceil(u128::from(self.limit))
        } else {
            2 * u128::from(self.window.0)
        }
    }

    /// Returns whether a state that was created under these numbers means the same under `other`.
    pub(crate) fn same_state(&self, other: &Self) -> bool {
        *self == Self { start: self.start, ..*other }
    }
}

/// The most entries that a sliding window log may need per key. An entry takes 16 bytes.
pub const MAX_LOG_ENTRIES: u64 = 1 << 20;

/// The error for a policy that is not valid.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyError {
    /// The limit is 0.
    ZeroLimit,
    /// The window is 0.
    ZeroWindow,
    /// The limit has no window.
    NoWindow {
        /// The limit.
        limit: Cost,
    },
    /// The burst is 0.
    ZeroBurst,
    /// A window algorithm has a burst other than its limit.
    BurstOnWindow {
        /// The algorithm.
        kind: Kind,
        /// The burst.
        burst: Cost,
        /// The limit.
        limit: Cost,
    },
    /// An algorithm other than the fixed window has an anchor.
    AnchorOnOther {
        /// The algorithm.
        kind: Kind,
    },
    /// Restoring a full quota takes longer than can be counted exactly.
    TimeToFresh {
        /// The algorithm.
        kind: Kind,
        /// L.
        limit: Cost,
        /// W.
        window: Ticks,
        /// B.
        burst: Cost,
        /// How many ticks it takes.
        time_to_fresh: u128,
    },
    /// A sliding window log could need too many entries per key.
    LogTooLong {
        /// L.
        limit: Cost,
        /// W.
        window: Ticks,
    },
    /// The debt is larger than can be counted exactly.
    DebtTooLarge {
        /// The debt.
        debt: Cost,
        /// The capacity.
        capacity: Cost,
    },
    /// New keys start with more than the capacity.
    StartAboveCapacity {
        /// The units that new keys start with.
        start: Cost,
        /// The capacity.
        capacity: Cost,
    },
    /// A penalty comes after 0 denials.
    PenaltyAfterZeroDenials,
    /// A penalty lasts 0 ticks, or longer than can be counted exactly.
    PenaltyDuration {
        /// How long the penalty lasts.
        duration: Ticks,
    },
    /// The policy has no limits.
    NoLimits,
    /// Two limits of the policy have the same name.
    SameName {
        /// The name.
        name: Box<str>,
    },
    /// The number of an instance is not less than the number of instances.
    NoSuchInstance {
        /// The number of the instance.
        index: u32,
        /// How many instances there are.
        count: u32,
    },
    /// A limit has fewer units than there are instances to share it.
    TooManyInstances {
        /// The limit or the burst, whichever is smaller.
        units: Cost,
        /// How many instances there are.
        count: u32,
    },
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLimit => write!(f, "limit must be at least 1 (got 0)"),
            Self::ZeroWindow => write!(f, "window must be at least 1 tick (got 0)"),
            Self::NoWindow { limit } => {
                write!(f, "limit {limit} has no window; set one, such as per second or per minute")
            }
            Self::ZeroBurst => write!(f, "burst must be at least 1 (got 0)"),
            Self::BurstOnWindow { kind, burst, limit } => write!(
                f,
                "the burst of a {kind} is its limit, {limit} (got {burst}); leave burst out or use a \
                 bucket"
            ),
            Self::AnchorOnOther { kind } => {
                write!(f, "a {kind} has no anchor; leave it out or use a fixed_window")
            }
            Self::TimeToFresh { kind, limit, window, burst, time_to_fresh } => {
                write!(
                    f,
                    "a {kind} with limit {limit} and burst {burst} per {window} ticks takes \
                     {time_to_fresh} ticks to restore a full quota, and at most \
                     {MAX_TIME_TO_FRESH} ticks can be counted exactly; use a shorter window"
                )?;
                if kind.is_bucket() {
                    write!(f, ", a smaller burst or a larger limit")?;
                }
                Ok(())
            }
            Self::LogTooLong { limit, window } => write!(
                f,
                "a sliding_window_log with limit {limit} per {window} ticks may need {} entries per \
                 key (at most {MAX_LOG_ENTRIES}); use a smaller limit or a sliding_window_counter",
                (*limit).min(window.0)
            ),
            Self::DebtTooLarge { debt, capacity } => write!(
                f,
                "debt {debt} on top of capacity {capacity} is too large to be counted exactly; use at \
                 most the capacity"
            ),
            Self::StartAboveCapacity { start, capacity } => write!(
                f,
                "new keys cannot start with {start} units; use at most the capacity, {capacity}"
            ),
            Self::PenaltyAfterZeroDenials => {
                write!(f, "a penalty must come after at least 1 denial (got 0)")
            }
            Self::PenaltyDuration { duration } => {
                write!(f, "a penalty must last 1 to {} ticks (got {duration})", Penalty::MAX)
            }
            Self::NoLimits => write!(f, "a policy needs at least one limit (got none)"),
            Self::SameName { name } => {
                write!(f, "two limits have the name \"{name}\"; give each limit its own name")
            }
            Self::NoSuchInstance { index, count } => write!(
                f,
                "there is no instance {index} of {count}; instances are numbered from 0 to one less than their count"
            ),
            Self::TooManyInstances { units, count } => write!(
                f,
                "{count} instances cannot share a limit or burst of {units}; use at most {units} instances, a larger limit \
                 and burst, or a common store"
            ),
        }
    }
}

impl core::error::Error for PolicyError {}

/// Converts a number to 64 bits. A larger number becomes the largest one.
pub(crate) fn saturate(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
