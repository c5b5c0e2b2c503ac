//! [`Ask`]: the key, cost, tier and time of a request.

use std::fmt;

use tallygate_core::{Cost, Tick};

use crate::settle_error::SettleError;

/// A request to a limiter: a key, with an optional cost, tier and time. Every operation of
/// [`RateLimiter`](crate::RateLimiter) takes one.
///
/// A key alone is a request of cost 1, without a tier, at the time of the store's clock. So most callers write
/// `limiter.check("alice")`, and the others add what differs:
///
/// ```
/// use tallygate::{Ask, Policy, RateLimiter, Tiers};
///
/// let free = Policy::token_bucket(10).per_minute().build()?;
/// let pro = Policy::token_bucket(100).per_minute().build()?;
/// let limiter = RateLimiter::tiered("api", Tiers::new(free).tier("pro", pro));
///
/// assert_eq!(limiter.check("alice")?.remaining, 9);
/// assert_eq!(limiter.check(Ask::new("bob").cost(5).tier("pro"))?.remaining, 95);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "pass it to an operation of a limiter"]
#[non_exhaustive]
pub struct Ask<'a> {
    /// The key of the client.
    pub key: &'a [u8],
    /// The units that the request charges.
    pub cost: Cost,
    /// The tier, if the request names one.
    pub tier: Option<&'a str>,
    /// The time of the request; `None` is the time of the store's clock.
    pub at: Option<Tick>,
}

impl<'a> Ask<'a> {
    /// Creates a request for a key, with a cost of 1.
    #[inline]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { key: key.as_ref(), cost: 1, tier: None, at: None }
    }

    /// Sets the cost. A cost of 0 changes nothing: it is allowed unless the client is in debt, in a penalty or blocked.
    #[inline]
    pub const fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Sets the tier of [`Tiers`](crate::Tiers); `None` for no tier. The operation fails with
    /// [`UnknownTier`](crate::tiers::UnknownTier) if the limiter has no such tier.
    #[inline]
    pub fn tier(mut self, tier: impl Into<Option<&'a str>>) -> Self {
        self.tier = tier.into();
        self
    }

    /// Sets the time of the request; `None` for the time by the clock of the store.
    ///
    /// Times should not go back by more than threads can be late: see [`Store::apply`](crate::store::Store::apply).
    #[inline]
    pub fn at(mut self, now: impl Into<Option<Tick>>) -> Self {
        self.at = now.into();
        self
    }
}

/// A key is a request of cost 1.
impl<'a, K: AsRef<[u8]> + ?Sized> From<&'a K> for Ask<'a> {
    #[inline]
    fn from(key: &'a K) -> Self {
        Self::new(key)
    }
}

impl<'k> From<&'k Ask<'_>> for Ask<'k> {
    #[inline]
    fn from(ask: &'k Ask<'_>) -> Self {
        *ask
    }
}

/// The error for a request that no store can decide. Nothing was charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidAsk {
    /// The key is longer than [`MAX_KEY_BYTES`](crate::store::MAX_KEY_BYTES).
    KeyTooLong {
        /// The length of the key.
        bytes: usize,
    },
    /// The limiter has no such tier.
    UnknownTier(UnknownTier),
    /// The reservation cannot be settled.
    Settle(SettleError),
}

impl From<SettleError> for InvalidAsk {
    fn from(error: SettleError) -> Self {
        Self::Settle(error)
    }
}

impl From<UnknownTier> for InvalidAsk {
    fn from(unknown: UnknownTier) -> Self {
        Self::UnknownTier(unknown)
    }
}

/// The error for a tier that does not exist.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownTier {
    /// The name that was given.
    pub name: Box<str>,
    /// The names of the existing tiers.
    pub known: Vec<Box<str>>,
}

impl fmt::Display for UnknownTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no tier is named \"{}\"; ", self.name)?;
        match &*self.known {
            [] => write!(f, "there are no tiers"),
            [only] => write!(f, "the only tier is {only}"),
            known => write!(f, "the tiers are {}", known.join(", ")),
        }
    }
}

impl std::error::Error for UnknownTier {}
