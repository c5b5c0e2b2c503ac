//! The errors of settling a reservation.

use std::fmt;

use tallygate_core::Tick;

/// The reason for which a reservation cannot be settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SettleError {
    /// The reservation was settled or canceled before.
    AlreadySettled,
    /// The time to live of the reservation is over. The estimate stays charged.
    Expired {
        /// The last time at which it could be settled.
        until: Tick,
        /// The time of the settlement.
        now: Tick,
    },
    /// The client was reset after the reservation was made, or the store has lost the client's state. There is nothing
    /// to settle.
    Reset,
    /// Another limiter made the reservation.
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
