//! Why there is no decision.

use std::fmt;

use tallygate::{
    DecodeError, InvalidAsk, MAX_KEY_BYTES, NotWhole, SettleError, StoreError, UnknownTier,
};

/// Why there is no decision. A denial is one, and so is what the failure policy says.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// The key is longer than [`MAX_KEY_BYTES`].
    KeyTooLong {
        /// Its length.
        bytes: usize,
    },
    /// A window or penalty is no whole number of microseconds, which is what Redis counts.
    NotInMicroseconds(NotWhole),
    /// The server could not be asked, or its answer did not come in time. Whether the call was carried out
    /// is not known if it was sent.
    Unavailable {
        /// What happened.
        reason: Box<str>,
        /// Whether it was sent.
        sent: bool,
    },
    /// The server answers, but this call was not decided within the time budget: too many others were before it.
    /// Checks are denied with the source [`Overloaded`](tallygate::Source::Overloaded) instead; only operations that
    /// cannot be denied return this error. Whether the call was carried out is not known if it was sent.
    Overloaded {
        /// What the call waited for.
        reason: Box<str>,
        /// Whether it was sent.
        sent: bool,
    },
    /// The server answered with an error.
    Server {
        /// What it said.
        message: Box<str>,
    },
    /// What is kept under the key is not a state.
    Corrupt {
        /// What is wrong with it.
        reason: DecodeError,
    },
    /// The server has no memory left for writes.
    OutOfMemory {
        /// What it said.
        message: Box<str>,
    },
    /// Other processes changed the key each time before it could be written, until the time budget was over. Checks
    /// are denied with the source [`Overloaded`](tallygate::Source::Overloaded) instead.
    Contended {
        /// How often it was tried.
        tries: u32,
    },
    /// The reservation cannot be settled. Nothing was changed.
    Settle(SettleError),
    /// The store in memory has no answer: see [`AnyStore`](crate::AnyStore).
    Memory(StoreError),
    /// A decision over several keys has parts in memory and parts in Redis, which cannot be one step.
    MixedStores,
    /// The question names a tier that the limiter does not have.
    UnknownTier(Box<UnknownTier>),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyTooLong { bytes } => {
                write!(f, "the key has {bytes} bytes; use at most {MAX_KEY_BYTES}, or a hash of it")
            }
            Self::NotInMicroseconds(NotWhole { span, .. }) => write!(
                f,
                "a window or penalty of {span} ns; Redis counts microseconds, use a multiple of 1000 ns"
            ),
            Self::Unavailable { reason, .. } => write!(f, "redis is not available: {reason}"),
            Self::Overloaded { reason, .. } => {
                write!(
                    f,
                    "not decided within the time budget, although redis answers: {reason}; retry shortly"
                )
            }
            Self::OutOfMemory { message } => write!(f, "redis is out of memory: {message}"),
            Self::Server { message } => write!(f, "redis answered with an error: {message}"),
            Self::Corrupt { reason } => {
                write!(f, "what redis has under the key is no state: {reason}; delete the key")
            }
            Self::Settle(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::MixedStores => write!(
                f,
                "some parts are decided in memory and some in redis; keep all limiters of a decision in one store"
            ),
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::Contended { tries } => write!(
                f,
                "other processes changed the key each of {tries} times before it could be written; retry shortly"
            ),
        }
    }
}

impl std::error::Error for Error {}

impl From<NotWhole> for Error {
    fn from(not_whole: NotWhole) -> Self {
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
            error => Self::Memory(error),
        }
    }
}

impl From<InvalidAsk> for Error {
    fn from(invalid: InvalidAsk) -> Self {
        match invalid {
            InvalidAsk::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            InvalidAsk::UnknownTier(unknown) => Self::UnknownTier(Box::new(unknown)),
        }
    }
}

/// Why an address is none.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AddressError {
    /// The address without its password.
    pub address: Box<str>,
    /// What is wrong with it.
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
