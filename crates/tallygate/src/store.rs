//! Where storage plugs in.
//!
//! A store keeps states and runs one step on them: an [`Op`] on a key, atomically. The whole decision
//! is one call, so that a store across a network makes it one round trip, and the reply is of the
//! store's own kind: at once from memory, a future from elsewhere. There is no second, asynchronous
//! interface.

use std::fmt;
use std::ops::Deref;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Tick, Ticks};

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

    /// Checks the same cost for many keys, as if one by one in order.
    fn check_many<'a, T: Answer, K: AsRef<[u8]>>(
        &'a self,
        rule: impl Lent<A> + 'a,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Self::Reply<'a, Vec<T>>;

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

/// A store may be lent.
impl<A: Algorithm, S: Store<A>> Store<A> for &S {
    type Reply<'a, T: 'a> = S::Reply<'a, T>;

    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> S::Reply<'a, T> {
        (**self).apply(rule, key, op, now)
    }

    fn check_many<'a, T: Answer, K: AsRef<[u8]>>(
        &'a self,
        rule: impl Lent<A> + 'a,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> S::Reply<'a, Vec<T>> {
        (**self).check_many(rule, keys, cost, now)
    }

    fn reserve<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> S::Reply<'a, Charged> {
        (**self).reserve(rule, key, estimate, time_to_live, now)
    }

    fn settle<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<S::Reply<'a, Decision>, SettleError> {
        (**self).settle(rule, key, change, charged, now)
    }

    fn now(&self) -> Tick {
        (**self).now()
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        (**self).rules_changed(key);
    }

    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: S::Reply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> S::Reply<'a, U> {
        S::map(reply, make)
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], S::Reply<'a, T>)>,
    ) -> S::Reply<'a, Vec<T>> {
        S::gather(replies)
    }
}

/// The longest key a store takes, in bytes.
pub const MAX_KEY_BYTES: usize = 4096;

/// Why there is no decision. A denial is one, and is not here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum StoreError {
    /// The key is longer than [`MAX_KEY_BYTES`].
    KeyTooLong {
        /// Its length.
        bytes: usize,
    },
    /// There is no place for a new key. The store refuses new keys when it is full, or all keys near the new one have used
    /// more than half of their quota. Checks of the latter kind are denied, and return no error.
    Full {
        /// How many it holds.
        max_keys: usize,
    },
    /// The store was made for a policy of another kind.
    OtherPolicy,
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
        }
    }
}

impl std::error::Error for StoreError {}
