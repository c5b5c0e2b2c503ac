//! Reservations: charge an estimate now, and what it cost when that is known.
//!
//! For services that learn the cost of a request afterwards, such as those metered by model tokens.

use std::fmt;

use tallygate_core::{Cost, Decision, Receipt, Tick, Ticks, Timed};

use crate::ask::Ask;

/// A cost that was charged as an estimate and waits to be settled.
///
/// Dropping it keeps the charge. It does not borrow the limiter, so that it can wait anywhere.
#[derive(Debug)]
#[must_use = "settle it, or the estimate stays charged"]
pub struct Reservation {
    key: Box<[u8]>,
    /// The tier that it was asked under.
    tier: Option<Box<str>>,
    charged: Cost,
    charge: Box<Charged>,
    until: Tick,
    settled: bool,
}

/// What a store charged for a reservation.
#[derive(Clone, Debug)]
pub struct Charged {
    /// The decision, and the time of the charge.
    pub timed: Timed,
    /// What it left behind; [`Receipt::Nothing`] if nothing can be returned.
    pub receipt: Receipt,
    /// The number of the last return or reset before it, in the store's own order.
    pub number: i64,
    /// The store that charged it.
    pub store: u64,
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
    pub(crate) fn new(
        (key, tier): (Box<[u8]>, Option<Box<str>>),
        charged: Cost,
        charge: Box<Charged>,
        time_to_live: Ticks,
    ) -> Self {
        let until = charge.timed.at.after(time_to_live).unwrap_or(Tick(i64::MAX));
        Self { key, tier, charged, charge, until, settled: false }
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

    /// Allows it to be settled again. Call it only if the store did nothing of the last settlement: otherwise the
    /// settlement counts twice.
    pub const fn reopen(&mut self) {
        self.settled = false;
    }

    /// Returns the question by which its client is found.
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask::new(&self.key).tier(self.tier.as_deref())
    }

    /// Returns what the store charged.
    pub(crate) fn charge(&self) -> &Charged {
        &self.charge
    }

    /// Returns by how many units an actual cost differs from the estimate.
    ///
    /// # Errors
    /// The reservation was settled before, or has expired.
    pub(crate) fn change_to(&self, actual: Cost, now: Tick) -> Result<i128, SettleError> {
        if self.settled {
            return Err(SettleError::AlreadySettled);
        }
        if now > self.until {
            return Err(SettleError::Expired { until: self.until, now });
        }
        Ok(i128::from(actual) - i128::from(self.charged))
    }

    /// Notes that it was settled.
    pub(crate) const fn mark_settled(&mut self) {
        self.settled = true;
    }
}

/// The actual cost of a reserved request, for [`settle`](crate::RateLimiter::settle).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Actual {
    pub(crate) cost: Cost,
    pub(crate) at: Option<Tick>,
}

impl Actual {
    /// A cost that is settled now, by the clock of the store.
    #[must_use]
    pub const fn new(cost: Cost) -> Self {
        Self { cost, at: None }
    }

    /// The same, settled at a time of the caller's choice.
    #[must_use]
    pub const fn at(mut self, now: Tick) -> Self {
        self.at = Some(now);
        self
    }
}

impl From<Cost> for Actual {
    fn from(cost: Cost) -> Self {
        Self::new(cost)
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
    /// The client was reset after the reservation was made, or its store has lost its state: there is nothing to
    /// settle.
    Reset,
    /// Another limiter made it.
    OtherLimiter,
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
            Self::Reset => write!(
                f,
                "the reservation is void because its client was reset; nothing was changed"
            ),
            Self::OtherLimiter => write!(
                f,
                "the reservation was made by another limiter; settle it with the limiter that made it"
            ),
        }
    }
}

impl std::error::Error for SettleError {}
