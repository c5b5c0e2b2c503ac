//! Why there is no decision.

use std::fmt;

use tallygate::StoreError;
use tallygate::algorithm::{DecodeError, NotAMultiple};
use tallygate::reservation::SettleError;
use tallygate::store::{InvalidAsk, MAX_KEY_BYTES};
use tallygate::tiers::UnknownTier;

/// The reason for which there is no decision. A denial is a decision, and so is the result of a failure setting.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The key is longer than [`MAX_KEY_BYTES`].
    KeyTooLong {
        /// The length of the key.
        bytes: usize,
    },
    /// A window or penalty is not a whole number of microseconds, the unit of Redis.
    NotInMicroseconds(NotAMultiple),
    /// The server is unreachable, or its reply did not arrive in time. If the call was sent, it is unknown whether it
    /// was carried out.
    Unavailable {
        /// The cause.
        reason: Box<str>,
        /// Whether the call was sent.
        sent: bool,
    },
    /// The server answers or may be busy, but it did not decide on this call within the time budget. Checks
    /// are denied with the source [`Overloaded`](tallygate::Source::Overloaded) instead; only operations that cannot be
    /// denied return this error. If the call was sent, it is unknown whether it was carried out.
    Overloaded {
        /// What the call waited for.
        reason: Box<str>,
        /// Whether the call was sent.
        sent: bool,
    },
    /// The server answered with an error.
    Server {
        /// The message of the server.
        message: Box<str>,
    },
    /// The value of the key is not a valid state.
    Corrupt {
        /// The cause.
        reason: DecodeError,
    },
    /// The server has no memory left for writes.
    OutOfMemory {
        /// The message of the server.
        message: Box<str>,
    },
    /// Other processes changed the key before each write, until the time budget ended. Checks are denied with the
    /// source [`Overloaded`](tallygate::Source::Overloaded) instead.
    Contended {
        /// The number of attempts.
        tries: u32,
    },
    /// The reservation cannot be settled. Nothing was changed.
    Settle(SettleError),
    /// The store in memory failed: see [`AnyStore`](crate::AnyStore).
    Memory(StoreError),
    /// A joint decision has keys in memory and keys in Redis, which cannot be charged in one step.
    MixedStores,
    /// The request names an unknown tier.
    UnknownTier(Box<UnknownTier>),
}

impl Error {
    /// Returns whether the call may have been carried out although it has no reply. Such a call must not be repeated.
    ///
    /// ```
    /// # use tallygate_redis::Error;
    /// let lost = Error::Unavailable { reason: "no reply".into(), sent: true };
    /// assert!(lost.may_be_done());
    /// ```
    #[must_use]
    pub const fn may_be_done(&self) -> bool {
        matches!(self, Self::Unavailable { sent: true, .. } | Self::Overloaded { sent: true, .. })
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyTooLong { bytes } => {
                write!(f, "the key has {bytes} bytes; use at most {MAX_KEY_BYTES}, or a hash of it")
            }
            Self::NotInMicroseconds(NotAMultiple { span, .. }) => write!(
                f,
                "a window or penalty of {span} ns is not a whole number of microseconds; use a multiple of 1000 ns"
            ),
            Self::Unavailable { reason, .. } => write!(f, "redis is unavailable: {reason}"),
            Self::Overloaded { reason, .. } => {
                write!(f, "not decided within the time budget: {reason}; retry shortly")
            }
            Self::OutOfMemory { message } => write!(f, "redis is out of memory: {message}"),
            Self::Server { message } => write!(f, "redis answered with an error: {message}"),
            Self::Corrupt { reason } => {
                write!(
                    f,
                    "the value of the key in redis is not a valid state: {reason}; delete the key"
                )
            }
            Self::Settle(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::MixedStores => write!(
                f,
                "some keys are in memory and some in redis; keep all limiters of a joint decision in one store"
            ),
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::Contended { tries } => write!(
                f,
                "other processes changed the key before each of {tries} writes; retry shortly"
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<NotAMultiple> for Error {
    fn from(not_whole: NotAMultiple) -> Self {
        Self::NotInMicroseconds(not_whole)
    }
}

impl From<DecodeError> for Error {
    fn from(reason: DecodeError) -> Self {
        Self::Corrupt { reason }
    }
}

impl From<StoreError> for Error {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            StoreError::UnknownTier(unknown) => Self::UnknownTier(unknown),
            StoreError::Settle(error) => Self::Settle(error),
            error => Self::Memory(error),
        }
    }
}

impl From<InvalidAsk> for Error {
    fn from(invalid: InvalidAsk) -> Self {
        match invalid {
            InvalidAsk::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            InvalidAsk::UnknownTier(unknown) => Self::UnknownTier(Box::new(unknown)),
            InvalidAsk::Settle(error) => Self::Settle(error),
        }
    }
}

/// The error for an address that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressError {
    /// The address without its password.
    pub address: Box<str>,
    /// The cause.
    pub reason: Box<str>,
}

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, reason } = self;
        write!(
            f,
            "cannot use {address}: {reason}; use redis://[USER:PASSWORD@]HOST[:PORT][/DATABASE], \
             rediss:// for TLS, redis+cluster://HOST,HOST or redis+sentinel://HOST,HOST/NAME"
        )
    }
}

impl std::error::Error for AddressError {}
