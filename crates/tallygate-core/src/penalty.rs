//! [`Penalty`]: an option of a limit that denies a key for a fixed time after too many denials.
//!
//! It is meant for logins and similar endpoints. The denials are counted over one window of the limit, from the
//! first one on. When there are enough of them, all requests of the key are denied until the penalty ends, even
//! if the limit has room. Requests during a penalty do not extend it. A cost above the capacity is a mistake of
//! the caller and does not count as a denial.

use alloc::vec::Vec;

use crate::codec::{self, DecodeError, Reader};
use crate::{Tick, Ticks};

/// Denies all requests of a key for some time after a number of denials within one window.
///
/// ```
/// use tallygate_core::{Algorithm, Decision, Penalty, Policy, Tick, Ticks};
///
/// let login = Policy::sliding_window_log(2)
///     .per(Ticks(60))
///     .penalty(Penalty::lasting(Ticks(900)).after(2))
///     .build()?;
/// let mut state = login.initial(Tick(0));
/// let mut check = |now| login.decide::<Decision>(&mut state, Tick(now), 1);
/// assert!(check(0).allowed && check(0).allowed);
/// assert_eq!(check(10).retry_after, Some(Ticks(50))); // the first denial is counted
/// assert_eq!(check(20).retry_after, Some(Ticks(900))); // the second denial starts the penalty
/// assert!(!check(919).allowed && check(920).allowed);
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Penalty {
    duration: Ticks,
    after: u64,
}

impl Penalty {
    /// The longest penalty, in ticks.
    pub const MAX: Ticks = Ticks(1 << 62);

    /// Creates a penalty that starts with every denial.
    #[must_use]
    pub fn lasting(duration: impl Into<Ticks>) -> Self {
        Self { duration: duration.into(), after: 1 }
    }

    /// Sets how many denials within one window start the penalty. Default: 1.
    #[must_use]
    pub const fn after(mut self, denials: u64) -> Self {
        self.after = denials;
        self
    }

    /// Returns how long the key is denied.
    #[must_use]
    pub const fn duration(&self) -> Ticks {
        self.duration
    }

    /// Returns how many denials start the penalty.
    #[must_use]
    pub const fn denials(&self) -> u64 {
        self.after
    }
}

/// The state of a key under a penalty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PenaltyState {
    /// The key was denied this often since a time.
    Counting { since: Tick, denials: u64 },
    /// The key is denied until a time.
    Denied { until: Tick },
}

impl PenaltyState {
    /// Returns the state after another denial at `now`. `window` is the window of the limit.
    pub(crate) fn after_denial(
        state: Option<Self>,
        penalty: &Penalty,
        window: Ticks,
        now: Tick,
    ) -> Self {
        let (since, denials) = match state {
            Some(denied @ Self::Denied { until }) if until > now => return denied,
            Some(Self::Counting { since, denials }) if now.since(since) < window => {
                (since, denials + 1)
            }
            _ => (now, 1),
        };
        if denials < penalty.after {
            return Self::Counting { since, denials };
        }
        Self::Denied { until: now.after(penalty.duration).unwrap_or(Tick(i64::MAX)) }
    }

    /// Returns how much longer the key is denied.
    pub(crate) fn wait(&self, now: Tick) -> Ticks {
        match self {
            Self::Counting { .. } => Ticks::ZERO,
            Self::Denied { until } => until.since(now),
        }
    }

    /// Returns the time from which on the state has no effect; `None` if that is later than the last tick.
    pub(crate) fn ends_at(&self, window: Ticks) -> Option<Tick> {
        match self {
            Self::Counting { since, .. } => since.after(window),
            Self::Denied { until } => Some(*until),
        }
    }

    /// Returns the latest time at which the state is known to have changed.
    pub(crate) fn last_change(&self, penalty: &Penalty) -> Tick {
        match self {
            Self::Counting { since, .. } => *since,
            Self::Denied { until } => Tick(until.0.saturating_sub_unsigned(penalty.duration.0)),
        }
    }

    /// Returns whether the clock must have been set back since the last change.
    pub(crate) fn clock_was_set_back(&self, penalty: &Penalty, window: Ticks, now: Tick) -> bool {
        match self {
            Self::Counting { since, .. } => since.since(now) > window,
            Self::Denied { until } => until.since(now) > penalty.duration.plus(window),
        }
    }

    /// Returns the state at `now` under `penalty`. It denies the key for at most the duration of that penalty.
    pub(crate) fn rebased(self, penalty: &Penalty, now: Tick) -> Self {
        match self {
            Self::Counting { since, denials } => Self::Counting {
                since: since.min(now),
                denials: denials.min(penalty.after.saturating_sub(1)),
            },
            Self::Denied { until } => {
                Self::Denied { until: until.min(now.after(penalty.duration).unwrap_or(until)) }
            }
        }
    }

    pub(crate) fn encode(state: Option<&Self>, out: &mut Vec<u8>) {
        match state {
            None => out.push(0),
            Some(Self::Counting { since, denials }) => {
                out.push(1);
                codec::put_tick(out, *since);
                codec::put(out, *denials);
            }
            Some(Self::Denied { until }) => {
                out.push(2);
                codec::put_tick(out, *until);
            }
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Option<Self>, DecodeError> {
        Ok(match reader.byte()? {
            0 => None,
            1 => Some(Self::Counting {
                since: reader.tick("time of the first denial")?,
                denials: reader.number("number of denials")?,
            }),
            2 => Some(Self::Denied { until: reader.tick("end of the penalty")? }),
            _ => return Err(DecodeError::Field { name: "penalty" }),
        })
    }
}
