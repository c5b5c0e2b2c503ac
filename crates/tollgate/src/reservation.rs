//! Reservations: charge an estimate now, and what it cost when that is known.
//!
//! For services that learn the cost of a request afterwards, such as those metered by model tokens.

use std::fmt;

use tollgate_core::{Cost, Decision, Op, Tick, Ticks};

/// A cost that was charged as an estimate and waits to be settled.
///
/// Dropping it keeps the charge. It does not borrow the limiter, so that it can wait anywhere.
#[derive(Debug)]
#[must_use = "settle it, or the estimate stays charged"]
pub struct Reservation {
    key: Box<[u8]>,
    charged: Cost,
    at: Tick,
    until: Tick,
    settled: bool,
}

/// What came of a request to reserve. A refusal is an answer, not an error.
#[derive(Debug)]
#[must_use = "a reservation that nobody reads limits nothing"]
pub enum Reserved {
    /// The estimate was charged.
    Granted(Reservation, Decision),
    /// It was refused, and nothing was charged.
    Refused(Decision),
}

impl Reserved {
    pub(crate) fn new(decision: Decision, reservation: Reservation) -> Self {
        if decision.allowed {
            Self::Granted(reservation, decision)
        } else {
            Self::Refused(decision)
        }
    }

    /// The decision.
    pub const fn decision(&self) -> &Decision {
        match self {
            Self::Granted(_, decision) | Self::Refused(decision) => decision,
        }
    }

    /// The reservation, if there is one.
    pub fn granted(self) -> Option<Reservation> {
        match self {
            Self::Granted(reservation, _) => Some(reservation),
            Self::Refused(_) => None,
        }
    }
}

impl Reservation {
    pub(crate) fn new(key: Box<[u8]>, charged: Cost, at: Tick, time_to_live: Ticks) -> Self {
        let until = at.after(time_to_live).unwrap_or(Tick(i64::MAX));
        Self { key, charged, at, until, settled: false }
    }

    /// Whose it is.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// What was charged: the estimate, or nothing where the client is not limited.
    #[must_use]
    pub const fn charged(&self) -> Cost {
        self.charged
    }

    /// The last moment at which it can be settled.
    #[must_use]
    pub const fn until(&self) -> Tick {
        self.until
    }

    /// Lets it be settled again, for whoever knows that the store did nothing of what settling asked for: else that
    /// would count twice.
    pub const fn reopen(&mut self) {
        self.settled = false;
    }

    /// What remains to be done about a cost that is known now. Only once.
    pub(crate) fn settle(&mut self, actual: Cost, now: Tick) -> Result<Op, SettleError> {
        if self.settled {
            return Err(SettleError::AlreadySettled);
        }
        if now > self.until {
            return Err(SettleError::Expired { until: self.until, now });
        }
        self.settled = true;
        Ok(match actual.checked_sub(self.charged) {
            Some(more) => Op::Force(more.into()),
            None => Op::GiveBack { amount: self.charged - actual, charged: self.at },
        })
    }
}

/// Why a reservation cannot be settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettleError {
    /// It was settled or cancelled before.
    AlreadySettled,
    /// Its time to live is over: the estimate stays charged.
    Expired {
        /// When it could have been settled last.
        until: Tick,
        /// When it was tried.
        now: Tick,
    },
}

impl fmt::Display for SettleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AlreadySettled => {
                write!(f, "the reservation was settled before; settle each one once")
            }
            Self::Expired { until, now } => write!(
                f,
                "the reservation could be settled until {until}, and it is {now}; the estimate \
                 stays charged, reserve with a longer time to live"
            ),
        }
    }
}

impl std::error::Error for SettleError {}
