//! Reservations: an estimate is charged first, and replaced by the actual cost later.
//!
//! They are for services that learn the cost of a request afterwards, such as services that are metered by model tokens.

use tallygate_core::{Cost, Decision, Receipt, Tick, Ticks, Timed};

use crate::ask::Ask;

pub use crate::settle_error::SettleError;

/// A charged estimate that can be settled.
///
/// Dropping it keeps the charge. It does not borrow the limiter, so it can be stored anywhere.
#[derive(Debug)]
#[must_use = "settle it, or the estimate stays charged"]
pub struct Reservation {
    key: Box<[u8]>,
    /// The tier that the request named.
    tier: Option<Box<str>>,
    charged: Cost,
    charge: Box<Charged>,
    until: Tick,
    settled: bool,
}

/// The charge of a reservation, as the store recorded it.
#[derive(Clone, Debug)]
pub struct Charged {
    /// The decision, and the time of the charge.
    pub timed: Timed,
    /// The receipt of the charge; [`Receipt::Nothing`] if nothing can be returned.
    pub receipt: Receipt,
    /// The number of the last return or reset before the charge, in the order of the store.
    pub number: i64,
    /// The store that made the charge.
    pub store: u64,
}

/// The result of [`reserve`](crate::RateLimiter::reserve). A denial is a normal result, not an error.
#[derive(Debug)]
#[must_use = "ignoring a reservation limits nothing"]
pub enum Reserved {
    /// The estimate was charged.
    Granted(Reservation, Decision),
    /// The request was denied, and nothing was charged.
    Denied(Decision),
}

impl Reserved {
    pub(crate) fn new(decision: Decision, reservation: Reservation) -> Self {
        if decision.allowed { Self::Granted(reservation, decision) } else { Self::Denied(decision) }
    }

    /// Returns the decision.
    pub const fn decision(&self) -> &Decision {
        match self {
            Self::Granted(_, decision) | Self::Denied(decision) => decision,
        }
    }

    /// Returns the reservation; `None` if the request was denied.
    pub fn granted(self) -> Option<Reservation> {
        match self {
            Self::Granted(reservation, _) => Some(reservation),
            Self::Denied(_) => None,
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

    /// Returns the key of the client.
    #[must_use]
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the charged units: the estimate, or 0 for a client without a limit.
    #[must_use]
    pub const fn charged(&self) -> Cost {
        self.charged
    }

    /// Returns the last time at which the reservation can be settled.
    #[must_use]
    pub const fn until(&self) -> Tick {
        self.until
    }

    /// Allows another settlement. Call it only if the store carried out nothing of the last one: otherwise the settlement
    /// counts twice.
    pub const fn reopen(&mut self) {
        self.settled = false;
    }

    /// Returns the request that finds the client.
    pub(crate) fn ask(&self) -> Ask<'_> {
        Ask::new(&self.key).tier(self.tier.as_deref())
    }

    /// Returns the charge of the store.
    pub(crate) fn charge(&self) -> &Charged {
        &self.charge
    }

    /// Returns by how many units an actual cost differs from the estimate.
    ///
    /// # Errors
    /// Returns an error if the reservation was settled before, or has expired.
    pub(crate) fn change_to(&self, actual: Cost, now: Tick) -> Result<i128, SettleError> {
        if self.settled {
            return Err(SettleError::AlreadySettled);
        }
        if now > self.until {
            return Err(SettleError::Expired { until: self.until, now });
        }
        Ok(i128::from(actual) - i128::from(self.charged))
    }

    /// Marks the reservation as settled.
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
    /// Creates a cost that is settled now, by the clock of the store.
    #[must_use]
    pub const fn new(cost: Cost) -> Self {
        Self { cost, at: None }
    }

    /// Sets the time of the settlement.
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
