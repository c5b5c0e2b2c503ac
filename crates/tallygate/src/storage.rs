//! [`Store`]: the interface of stores.
//!
//! A store keeps states and carries out one [`Op`] on a key at a time, atomically. The whole decision is one call, so
//! that a store on a network needs one round trip. Each store has its own type of reply: a [`Result`] from memory, a
//! future from a network. So there is no second, asynchronous interface.

use std::fmt;
use std::ops::Deref;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Tick, Ticks, Timed};

use crate::ask::{Ask, InvalidAsk, UnknownTier};
use crate::reservation::{Charged, SettleError};

/// Keeps the states of keys, and carries out operations on them.
pub trait Store<A: Algorithm> {
    /// The type of replies: a [`Result`] from memory, a future of one from a network.
    type Reply<'a, T: 'a>;

    /// Carries out one operation on a key, atomically: finds its state or creates one, decides, and keeps the new state.
    ///
    /// Without `now`, the store uses its own clock. Given times should not go back by more than threads can be late: if a
    /// key was dropped at a time, its new state starts no earlier.
    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Self::Reply<'a, T> {
        self.apply_with(rule, key, op, now, |_, Timed { decision, at }| {
            T::from_decision(decision, at)
        })
    }

    /// Carries out an operation as [`apply`](Self::apply) does, and calls `make` with the rule and the decision: for
    /// observers, and for callers that report the limit that decided. A rule that is read later may be another one.
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Self::Reply<'a, T>;

    /// Checks many keys under one rule, with the same result as one by one in order. The tiers of the requests are
    /// ignored, because the rule has been chosen.
    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        asks: &'a [K],
    ) -> Self::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>;

    /// Charges an estimate if it is allowed, for a reservation that can be settled within `time_to_live`. Returns the
    /// decision and what it charged.
    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Self::Reply<'a, Charged>;

    /// Changes what a reservation charged by `change` units: charges more, whether or not it is allowed, or returns units
    /// that still count.
    ///
    /// # Errors
    /// Fails if the reservation is void. A store that does not know this at once fails in its reply.
    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Self::Reply<'a, Decision>, SettleError>;

    /// Returns the time by the clock of the store, which reservations expire by.
    fn now(&self) -> Tick;

    /// Reports that the rules of one key, or of all keys, have changed, so that waiting requests check again.
    fn rules_changed(&self, _key: Option<&[u8]>) {}

    /// Creates the reply to an invalid request.
    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Self::Reply<'a, T>;

    /// Converts the answer of a reply.
    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Self::Reply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Self::Reply<'a, U>;

    /// Combines several replies, each with its key, into one. Replies of the same key are carried out in order. If one of
    /// them fails, so does the combined reply.
    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Self::Reply<'a, T>)>,
    ) -> Self::Reply<'a, Vec<T>>;
}

/// The replies of a store that answers at once, for its implementation of [`Store`].
macro_rules! replies_at_once {
    () => {
        type Reply<'a, T: 'a> = Result<T, $crate::storage::StoreError>;

        #[cold]
        fn fail<'a, T: Send + 'a>(
            invalid: $crate::ask::InvalidAsk,
        ) -> Result<T, $crate::storage::StoreError> {
            Err(invalid.into())
        }

        #[inline]
        fn map<'a, T: Send + 'a, U: Send + 'a>(
            reply: Result<T, $crate::storage::StoreError>,
            make: impl FnOnce(T) -> U + Send + 'a,
        ) -> Result<U, $crate::storage::StoreError> {
            reply.map(make)
        }

        fn gather<'a, T: Send + 'a>(
            replies: impl Iterator<Item = (&'a [u8], Result<T, $crate::storage::StoreError>)>,
        ) -> Result<Vec<T>, $crate::storage::StoreError> {
            replies.map(|(_, reply)| reply).collect()
        }
    };
}

pub(crate) use replies_at_once;

/// The rule of one decision, borrowed or owned. A store that replies later keeps it until then.
pub trait RuleRef<A>: Deref<Target = A> + Send + Sync {}

impl<A, L: Deref<Target = A> + Send + Sync> RuleRef<A> for L {}

/// The longest key that a store accepts, in bytes.
pub const MAX_KEY_BYTES: usize = 4096;

/// The reason why there is no decision. A denial is a decision and not an error.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// The key is longer than [`MAX_KEY_BYTES`].
    KeyTooLong {
        /// The length of the key.
        bytes: usize,
    },
    /// There is no place for a new key: the store is full and configured to reject new keys, or other threads use all
    /// places near it. In the second case, checks are denied and do not return this error.
    Full {
        /// The number of keys in the store.
        max_keys: usize,
    },
    /// The store was created for a policy of another kind.
    OtherPolicy,
    /// The request names an unknown tier.
    UnknownTier(Box<UnknownTier>),
    /// The reservation cannot be settled. Nothing was changed.
    Settle(SettleError),
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyTooLong { bytes } => {
                write!(f, "the key has {bytes} bytes; use at most {MAX_KEY_BYTES}, or a hash of it")
            }
            Self::Full { max_keys } => write!(
                f,
                "all {max_keys} keys are in use and none may be evicted for a new one; allow more keys"
            ),
            Self::OtherPolicy => {
                write!(f, "the store was made for another policy; make one for this policy")
            }
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::Settle(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StoreError {}

impl From<UnknownTier> for StoreError {
    fn from(unknown: UnknownTier) -> Self {
        Self::UnknownTier(Box::new(unknown))
    }
}

impl From<InvalidAsk> for StoreError {
    fn from(invalid: InvalidAsk) -> Self {
        match invalid {
            InvalidAsk::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            InvalidAsk::UnknownTier(unknown) => unknown.into(),
            InvalidAsk::Settle(error) => Self::Settle(error),
        }
    }
}
