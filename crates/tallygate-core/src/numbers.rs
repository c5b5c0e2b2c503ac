//! The numbers of a limit: which algorithm, how much per which window, and which of them are valid.
//!
//! Every valid set of numbers is decided exactly. All others are a [`PolicyError`], which says what was given and what
//! would do.

use alloc::boxed::Box;
use core::fmt;
use core::str::FromStr;

use crate::penalty::Penalty;
use crate::{Cost, Ticks};

/// Which of the six algorithms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Saves up to a burst, earns at a rate.
    TokenBucket,
    /// The same decisions, thought of as an arrival time.
    Gcra,
    /// The same admissions, and a delay that makes the output flat.
    LeakyBucket,
    /// At most so many in each window.
    FixedWindow,
    /// At most so many in any window, remembered one by one.
    SlidingWindowLog,
    /// At most so many in an estimate of the last window.
    SlidingWindowCounter,
}

impl Kind {
    /// All six.
    pub const ALL: [Self; 6] = [
        Self::TokenBucket,
        Self::Gcra,
        Self::LeakyBucket,
        Self::FixedWindow,
        Self::SlidingWindowLog,
        Self::SlidingWindowCounter,
    ];

    /// The name in configurations and on command lines.
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

    /// Whether it is a bucket, which has a burst of its own.
    #[must_use]
    pub const fn is_bucket(self) -> bool {
        matches!(self, Self::TokenBucket | Self::Gcra | Self::LeakyBucket)
    }

    /// The first byte of an encoded state. Part of the format: never given to another algorithm.
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

    pub(crate) fn of_tag(tag: u8) -> Option<Self> {
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

/// A name that is none of the six.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownKind;

impl fmt::Display for UnknownKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such algorithm; use one of")?;
        for (index, kind) in Kind::ALL.into_iter().enumerate() {
            write!(f, "{} {kind}", if index > 0 { "," } else { "" })?;
        }
        Ok(())
    }
}

impl core::error::Error for UnknownKind {}

/// Where a fixed window starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Anchor {
    /// On multiples of the window, the same for everybody.
    #[default]
    Clock,
    /// At the first request admitted after the key was fresh.
    FirstRequest,
}

/// The numbers of a limit. Once in a [`Limit`](crate::Limit), they are valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Numbers {
    /// The algorithm.
    pub kind: Kind,
    /// L: how much is earned a window.
    pub limit: Cost,
    /// W: the window.
    pub window: Ticks,
    /// B: the most that can be admitted at one instant. L for windows.
    pub burst: Cost,
    /// How far beyond the capacity a settled reservation may go.
    pub debt: Cost,
    /// How much of the capacity a new key has.
    pub start: Cost,
    /// Where a fixed window starts.
    pub anchor: Anchor,
}

/// The longest time to fresh of a valid limit, and the longest with all its debt.
const MAX_TIME_TO_FRESH: u128 = 1 << 62;
const MAX_TIME_TO_FRESH_IN_DEBT: u128 = 1 << 63;

impl Numbers {
    /// Every valid set of numbers is decided exactly; everything else is refused here.
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

    /// How long a bucket takes to earn `used` back; for windows, until both have passed.
    fn time_to_fresh(&self, used: Cost) -> u128 {
        if self.kind.is_bucket() {
            (u128::from(used) * u128::from(self.window.0)).div_ceil(u128::from(self.limit))
        } else {
            2 * u128::from(self.window.0)
        }
    }

    /// Whether a state made under these numbers can be read under the others as it is.
    pub(crate) fn same_state(&self, other: &Self) -> bool {
        *self == Self { start: self.start, ..*other }
    }
}

/// The most entries that a sliding window log may need for a key: 16 bytes each.
pub const MAX_LOG_ENTRIES: u64 = 1 << 20;

/// Why a policy cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PolicyError {
    /// A limit of nothing.
    ZeroLimit,
    /// A window of no time.
    ZeroWindow,
    /// No window was given.
    NoWindow {
        /// The limit that lacks one.
        limit: Cost,
    },
    /// A burst of nothing.
    ZeroBurst,
    /// A window algorithm was asked for a burst other than its limit.
    BurstOnWindow {
        /// The algorithm.
        kind: Kind,
        /// The burst asked for.
        burst: Cost,
        /// Its limit.
        limit: Cost,
    },
    /// Another algorithm was asked for a fixed window's anchor.
    AnchorOnOther {
        /// The algorithm.
        kind: Kind,
    },
    /// Earning everything back takes longer than can be counted exactly.
    TimeToFresh {
        /// The algorithm.
        kind: Kind,
        /// L.
        limit: Cost,
        /// W.
        window: Ticks,
        /// B.
        burst: Cost,
        /// How many ticks it would take.
        time_to_fresh: u128,
    },
    /// A sliding window log that could need too many entries for a key.
    LogTooLong {
        /// L.
        limit: Cost,
        /// W.
        window: Ticks,
    },
    /// More debt than can be counted exactly.
    DebtTooLarge {
        /// The debt asked for.
        debt: Cost,
        /// The capacity it would come on top of.
        capacity: Cost,
    },
    /// New keys were to start with more than the capacity.
    StartAboveCapacity {
        /// What they were to start with.
        start: Cost,
        /// The capacity.
        capacity: Cost,
    },
    /// A penalty before anybody was refused.
    PenaltyAfterNothing,
    /// A penalty of no time, or of more than can be counted exactly.
    PenaltyLasts {
        /// How long it was to last.
        lasts: Ticks,
    },
    /// A policy without limits.
    NoLimits,
    /// Two limits of one policy have the same name.
    SameName {
        /// The name.
        name: Box<str>,
    },
}

impl fmt::Display for PolicyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::ZeroLimit => write!(f, "limit 0 admits nothing; use at least 1"),
            Self::ZeroWindow => write!(f, "window 0 has no rate; use at least 1 tick"),
            Self::NoWindow { limit } => {
                write!(f, "limit {limit} has no window; say per second, per minute or per what")
            }
            Self::ZeroBurst => write!(f, "burst 0 admits nothing; use at least 1"),
            Self::BurstOnWindow { kind, burst, limit } => write!(
                f,
                "burst {burst} on a {kind} of limit {limit}: a window's burst is its limit; \
                 leave burst out or use a bucket"
            ),
            Self::AnchorOnOther { kind } => {
                write!(f, "a {kind} has no anchor; leave it out or use a fixed_window")
            }
            Self::TimeToFresh { kind, limit, window, burst, time_to_fresh } => {
                write!(f, "a {kind} of limit {limit} and burst {burst} per {window} ticks takes ")?;
                write!(
                    f,
                    "{time_to_fresh} ticks to be fresh again, at most {MAX}",
                    MAX = 1_u64 << 62
                )?;
                write!(f, " can be counted exactly; use a shorter window")?;
                if kind.is_bucket() {
                    write!(f, ", a smaller burst or a greater limit")?;
                }
                Ok(())
            }
            Self::LogTooLong { limit, window } => write!(
                f,
                "a sliding_window_log of limit {limit} per {window} ticks may need {} entries a key, \
                 at most {MAX_LOG_ENTRIES} are kept; use a smaller limit or a \
                 sliding_window_counter",
                (*limit).min(window.0)
            ),
            Self::DebtTooLarge { debt, capacity } => write!(
                f,
                "debt {debt} on top of capacity {capacity} is more than can be counted exactly; \
                 use at most the capacity"
            ),
            Self::StartAboveCapacity { start, capacity } => {
                write!(
                    f,
                    "new keys cannot start with {start}; use at most the capacity, {capacity}"
                )
            }
            Self::PenaltyAfterNothing => {
                write!(f, "a penalty after 0 refusals refuses everybody; use at least 1")
            }
            Self::PenaltyLasts { lasts } => {
                write!(f, "a penalty of {lasts} ticks; use 1 to {}", Penalty::MAX)
            }
            Self::NoLimits => {
                write!(f, "a policy without limits limits nothing; give at least one")
            }
            Self::SameName { name } => {
                write!(f, "two limits are named \"{name}\"; give each a name of its own")
            }
        }
    }
}

impl core::error::Error for PolicyError {}

/// A number that is known to fit 64 bits, or is meant to stop there.
pub(crate) fn saturate(value: u128) -> u64 {
    u64::try_from(value).unwrap_or(u64::MAX)
}
