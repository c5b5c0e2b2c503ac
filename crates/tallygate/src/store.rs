//! Where storage plugs in.
//!
//! A store keeps states and runs one step on them: an [`Op`] on a key, atomically. The whole decision
//! is one call, so that a store across a network makes it one round trip, and the reply is of the
//! store's own kind: at once from memory, a future from elsewhere. There is no second, asynchronous
//! interface.

use std::fmt;
use std::ops::Deref;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Tick, Ticks, Timed};

use crate::ask::{Ask, InvalidAsk, UnknownTier};
use crate::reservation::{Charged, SettleError};

/// Keeps the states of keys, and decides on them.
pub trait Store<A: Algorithm> {
    /// How an answer comes: [`Result`] from memory, a future of one from a network.
    type Reply<'a, T: 'a>;

    /// Carries out one operation on a key, atomically for that key: finds its state or makes one,
    /// decides, keeps what changed.
    ///
    /// Without `now` the store's own clock rules. Times that are given should go on, give or take a
    /// thread's lateness: where a key was dropped at a time, a new one starts no earlier.
    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Self::Reply<'a, T>;

    /// Carries out an operation as [`apply`](Self::apply) does, and makes something of the decision and the rule that made
    /// it: for observers, and for callers who report the limit that decided. A rule that is read later may be another one.
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Self::Reply<'a, T>;

    /// Decides many questions under one rule, as if one by one in order. Their tiers are not read: the rule is chosen.
    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl Lent<A> + 'a,
        asks: &'a [K],
    ) -> Self::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>;

    /// Checks an estimate for a reservation that can be settled for a time after that. Returns the decision
    /// and what it charged.
    fn reserve<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Self::Reply<'a, Charged>;

    /// Changes what a reservation charged by `change` units: charges more without asking, or returns units
    /// as far as they still count.
    ///
    /// # Errors
    /// The reservation is void. A store that cannot know that at once fails in its reply.
    fn settle<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Self::Reply<'a, Decision>, SettleError>;

    /// The time by which reservations lapse.
    fn now(&self) -> Tick;

    /// Reports that the rules of one key, or of all keys, have changed: requests that wait ask again.
    fn rules_changed(&self, _key: Option<&[u8]>) {}

    /// Fails because of a question that cannot be answered.
    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Self::Reply<'a, T>;

    /// Makes something else of an answer on its way to the caller.
    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Self::Reply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Self::Reply<'a, U>;

    /// Several answers as one, each with the key it is about: those of one key in their order. If one of them
    /// failed, that it did.
    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Self::Reply<'a, T>)>,
    ) -> Self::Reply<'a, Vec<T>>;
}

/// A rule for one decision: borrowed, or chosen for it. A store that answers later keeps it until then.
pub trait Lent<A>: Deref<Target = A> + Send + Sync {}

impl<A, L: Deref<Target = A> + Send + Sync> Lent<A> for L {}

/// The longest key a store takes, in bytes.
pub const MAX_KEY_BYTES: usize = 4096;

/// Why there is no decision. A denial is one, and is not here.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// The key is longer than [`MAX_KEY_BYTES`].
    KeyTooLong {
        /// Its length.
        bytes: usize,
    },
    /// There is no place for a new key: the store is full and refuses new keys then, or other threads use all places near
    /// it. Checks of the latter kind are denied, and return no error.
    Full {
        /// How many it holds.
        max_keys: usize,
    },
    /// The store was made for a policy of another kind.
    OtherPolicy,
    /// The question names a tier that the limiter does not have.
    UnknownTier(Box<UnknownTier>),
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
        }
    }
}
