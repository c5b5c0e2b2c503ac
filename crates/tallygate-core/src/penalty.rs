//! A penalty: whoever keeps asking after being refused is refused for a set time.
//!
//! An option of a limit, for logins and the like. The refusals are counted from the first one for a
//! window of the limit; when there were enough, the key is refused until the penalty is over, however
//! much room the limit has. Asking meanwhile does not prolong it. A cost that can never fit is the
//! caller's mistake, and is not held against the key.

use alloc::vec::Vec;

use crate::codec::{self, DecodeError, Reader};
use crate::{Tick, Ticks};

/// How many refusals within a window lead to how long a penalty.
///
/// ```
/// use tallygate_core::{Algorithm, Decision, Penalty, Policy, Tick, Ticks};
///
/// let login = Policy::sliding_window_log(2)
///     .per(Ticks(60))
///     .penalty(Penalty::lasting(Ticks(900)).after(2))
///     .build()?;
/// let mut state = login.first(Tick(0));
/// let mut ask = |now| login.decide::<Decision>(&mut state, Tick(now), 1);
/// assert!(ask(0).allowed && ask(0).allowed);
/// assert_eq!(ask(10).retry_after, Some(Ticks(50))); // the first refusal is only counted
/// assert_eq!(ask(20).retry_after, Some(Ticks(900))); // the second has a penalty
/// assert!(!ask(919).allowed && ask(920).allowed);
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Penalty {
    lasts: Ticks,
    after: u64,
}

impl Penalty {
    /// The longest penalty, in ticks.
    pub const MAX: Ticks = Ticks(1 << 62);

    /// A penalty after every refusal.
    #[must_use]
    pub fn lasting(lasts: impl Into<Ticks>) -> Self {
        Self { lasts: lasts.into(), after: 1 }
    }

    /// The same, but only after so many refusals within a window.
    #[must_use]
    pub const fn after(mut self, refusals: u64) -> Self {
        self.after = refusals;
        self
    }

    /// How long the key is refused.
    #[must_use]
    pub const fn lasts(&self) -> Ticks {
        self.lasts
    }

    /// How many refusals it takes.
    #[must_use]
    pub const fn refusals(&self) -> u64 {
        self.after
    }
}

/// How a key stands with a penalty: refusals being counted, or a penalty being served, or neither.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Record {
    /// So many refusals since a time.
    Counting { since: Tick, refusals: u64 },
    /// Refused until a time.
    Serving { until: Tick },
}

impl Record {
    /// What another refusal at `now` makes of a record; the window is the limit's.
    pub(crate) fn refused(
        record: Option<Self>,
        penalty: &Penalty,
        window: Ticks,
        now: Tick,
    ) -> Self {
        let (since, refusals) = match record {
            Some(serving @ Self::Serving { until }) if until > now => return serving,
            Some(Self::Counting { since, refusals }) if now.since(since) < window => {
                (since, refusals + 1)
            }
            _ => (now, 1),
        };
        if refusals < penalty.after {
            return Self::Counting { since, refusals };
        }
        Self::Serving { until: now.after(penalty.lasts).unwrap_or(Tick(i64::MAX)) }
    }

    /// How long the key is still refused.
    pub(crate) fn wait(&self, now: Tick) -> Ticks {
        match self {
            Self::Counting { .. } => Ticks::ZERO,
            Self::Serving { until } => until.since(now),
        }
    }

    /// When nobody can tell any more that there was one.
    pub(crate) fn over_at(&self, window: Ticks) -> Option<Tick> {
        match self {
            Self::Counting { since, .. } => since.after(window),
            Self::Serving { until } => Some(*until),
        }
    }

    /// The latest time at which the record is known to have changed.
    pub(crate) fn last_change(&self, penalty: &Penalty) -> Tick {
        match self {
            Self::Counting { since, .. } => *since,
            Self::Serving { until } => Tick(until.0.saturating_sub_unsigned(penalty.lasts.0)),
        }
    }

    /// Whether the clock must have been set back since it was made.
    pub(crate) fn set_back(&self, penalty: &Penalty, window: Ticks, now: Tick) -> bool {
        match self {
            Self::Counting { since, .. } => since.since(now) > window,
            Self::Serving { until } => until.since(now) > penalty.lasts.plus(window),
        }
    }

    /// The record as seen from `now` and under a penalty: never longer than that penalty lasts.
    pub(crate) fn moved(self, penalty: &Penalty, now: Tick) -> Self {
        match self {
            Self::Counting { since, refusals } => Self::Counting {
                since: since.min(now),
                refusals: refusals.min(penalty.after.saturating_sub(1)),
            },
            Self::Serving { until } => {
                Self::Serving { until: until.min(now.after(penalty.lasts).unwrap_or(until)) }
            }
        }
    }

    pub(crate) fn encode(record: Option<&Self>, out: &mut Vec<u8>) {
        match record {
            None => out.push(0),
            Some(Self::Counting { since, refusals }) => {
                out.push(1);
                codec::put_tick(out, *since);
                codec::put(out, *refusals);
            }
            Some(Self::Serving { until }) => {
                out.push(2);
                codec::put_tick(out, *until);
            }
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Option<Self>, DecodeError> {
        Ok(match reader.byte()? {
            0 => None,
            1 => Some(Self::Counting {
                since: reader.tick("first refusal")?,
                refusals: reader.number("refusals")?,
            }),
            2 => Some(Self::Serving { until: reader.tick("end of the penalty")? }),
            _ => return Err(DecodeError::Field { name: "penalty" }),
        })
    }
}
