//! What a limiter is asked: for which client, how much, in which tier, and when.

use std::fmt;

use tallygate_core::{Cost, Tick};

/// A question to a limiter. Every verb of [`RateLimiter`](crate::RateLimiter) takes one.
///
/// A key alone is a question of cost 1, without a tier, by the clock of the store. So most callers write
/// `limiter.check("alice")`, and the others say what differs:
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
#[must_use = "pass it to a verb of a limiter"]
#[non_exhaustive]
pub struct Ask<'a> {
    /// The client.
    pub key: &'a [u8],
    /// How many units.
    pub cost: Cost,
    /// The tier whose rules decide, if the question names one.
    pub tier: Option<&'a str>,
    /// The time of the decision, if it is not the time by the clock of the store.
    pub at: Option<Tick>,
}

impl<'a> Ask<'a> {
    /// Asks for the client with this key, for a cost of 1.
    #[inline]
    pub fn new(key: &'a (impl AsRef<[u8]> + ?Sized)) -> Self {
        Self { key: key.as_ref(), cost: 1, tier: None, at: None }
    }

    /// Asks for this many units. A cost of 0 changes nothing: it is allowed unless the client is in debt, in a
    /// penalty or blocked.
    #[inline]
    pub const fn cost(mut self, cost: Cost) -> Self {
        self.cost = cost;
        self
    }

    /// Asks under the rules of a tier of [`Tiers`](crate::Tiers). The verb fails with
    /// [`UnknownTier`](crate::UnknownTier) if the limiter has no such tier. `None` asks without a tier.
    #[inline]
    pub fn tier(mut self, tier: impl Into<Option<&'a str>>) -> Self {
        self.tier = tier.into();
        self
    }

    /// Asks at a time of the caller's choice, not by the clock of the store. `None` asks by the clock.
    ///
    /// Times should go on, give or take the lateness of a thread: see [`Store::apply`](crate::Store::apply).
    #[inline]
    pub fn at(mut self, now: impl Into<Option<Tick>>) -> Self {
        self.at = now.into();
        self
    }
}

/// A key is a question of cost 1.
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

/// Why a question cannot be answered by any store. Nothing was charged.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InvalidAsk {
    /// The key is longer than [`MAX_KEY_BYTES`](crate::MAX_KEY_BYTES).
    KeyTooLong {
        /// Its length.
        bytes: usize,
    },
    /// The limiter has no such tier.
    UnknownTier(UnknownTier),
}

impl From<UnknownTier> for InvalidAsk {
    fn from(unknown: UnknownTier) -> Self {
        Self::UnknownTier(unknown)
    }
}

/// No tier has the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownTier {
    /// The name.
    pub name: Box<str>,
    /// The names there are.
    pub known: Vec<Box<str>>,
}

impl fmt::Display for UnknownTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no tier is named \"{}\"; ", self.name)?;
        if self.known.is_empty() {
            return write!(f, "there are no tiers");
        }
        write!(f, "there is {}", self.known.join(", "))
    }
}

impl std::error::Error for UnknownTier {}
