//! Requests in flight: a limit on how many are being served at once, not on how many come.
//!
//! A request takes a place and gives it back when it is done. There is no time in it: nobody can say
//! when a place will be free, so a refusal has no retry time.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Algorithm, Cost, Decision, DecodeError, Facts, Fit, Op, Tick, Used};

use crate::ask::Ask;
use crate::clock::Clock;
use crate::limiter::RateLimiter;
use crate::memory::{Capacity, MemoryStore};
use crate::store::{Store as _, StoreError};
use crate::table::WhenFull;
use crate::together::JointAsk;

/// At most so many requests of a client at once.
///
/// It is cheap to clone, and all clones are one.
///
/// ```
/// use tallygate::{InFlight, Policy, RateLimiter, check_all};
///
/// let in_flight = InFlight::new(2);
/// let first = in_flight.enter("alice")?.expect("nobody is there");
/// let second = in_flight.enter("alice")?.expect("one is there");
/// assert!(in_flight.enter("alice")?.is_none());
/// drop(first);
/// assert!(in_flight.enter("alice")?.is_some()); // and left again at once
///
/// // In one decision with others: all or nothing.
/// let rate = RateLimiter::new(Policy::token_bucket(100).per_minute().build()?);
/// let entered = check_all([rate.joint("alice")?, in_flight.joint("alice")?])?;
/// assert!(entered.decision.allowed);
/// assert_eq!(in_flight.count("alice")?, 2);
/// drop(entered);
/// assert_eq!(in_flight.count("alice")?, 1);
/// # drop(second);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct InFlight {
    limiter: Arc<RateLimiter<Places, MemoryStore<Places, Timeless>>>,
}

impl InFlight {
    /// At most so many at once, for a million clients.
    #[must_use]
    pub fn new(places: Cost) -> Self {
        Self::for_clients(places, Capacity::default().max_keys)
    }

    /// The same for another number of clients. When more than that have requests in flight, new ones
    /// get an error: none of those can be forgotten.
    #[must_use]
    pub fn for_clients(places: Cost, max_clients: usize) -> Self {
        let capacity = Capacity::of(max_clients).when_full(WhenFull::RefuseNew);
        let store = MemoryStore::new(capacity, Timeless);
        let limiter = RateLimiter::in_store("in flight", Places { places }, store);
        Self { limiter: Arc::new(limiter) }
    }

    /// Takes a place, if there is one.
    ///
    /// # Errors
    /// The key is too long, or there are too many clients.
    pub fn enter(&self, key: impl AsRef<[u8]>) -> Result<Option<Place>, StoreError> {
        let place = self.place(key.as_ref());
        Ok(self.limiter.is_allowed(&key)?.then(|| place.taken()))
    }

    /// Its part in a decision over several: see [`check_all`](crate::check_all).
    ///
    /// # Errors
    /// The key is too long.
    pub fn joint<'a, 'k>(&'a self, ask: impl Into<Ask<'k>>) -> Result<JointAsk<'a>, StoreError> {
        let ask: Ask<'k> = ask.into();
        Ok(self.limiter.joint(ask)?.with_place(self.place(ask.key)))
    }

    /// How many requests of a client are in flight.
    ///
    /// # Errors
    /// The key is too long, or there are too many clients.
    pub fn count(&self, key: impl AsRef<[u8]>) -> Result<Cost, StoreError> {
        let stands: Decision =
            self.limiter.store().apply(self.limiter.rules(), key.as_ref(), Op::Check(0), None)?;
        Ok(stands.limit - stands.remaining)
    }

    fn place(&self, key: &[u8]) -> Place {
        Place { of: self.clone(), key: key.into(), size: 1, is_taken: false }
    }
}

/// A place among the requests in flight (or as many as were asked for), given back when it is dropped.
#[derive(Debug)]
#[must_use = "it is given back when it is dropped: keep it as long as the request is served"]
pub struct Place {
    of: InFlight,
    key: Box<[u8]>,
    pub(crate) size: Cost,
    is_taken: bool,
}

impl Place {
    pub(crate) fn taken(mut self) -> Self {
        self.is_taken = true;
        self
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        if self.is_taken {
            // It was taken under this key, so it can be given back under it.
            let _ = self.of.limiter.refund(Ask::new(&self.key).cost(self.size));
        }
    }
}

/// Nothing here depends on the time.
struct Timeless;

impl Clock for Timeless {
    fn now(&self) -> Tick {
        Tick(0)
    }
}

/// The rule: so many places, which only those who took them give back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Places {
    places: Cost,
}

impl Algorithm for Places {
    type State = Cost;

    fn capacity(&self) -> Cost {
        self.places
    }

    fn fresh(&self, _: Tick) -> Cost {
        0
    }

    fn last_change(&self, _: &Cost) -> Tick {
        Tick(i64::MIN)
    }

    fn set_back(&self, _: &Cost, _: Tick) -> bool {
        false
    }

    fn rebase(&self, _: &mut Cost, _: Tick) {}

    fn fit(&self, taken: &Cost, _: Tick, cost: Cost) -> Fit {
        if cost <= self.places.saturating_sub(*taken) { Fit::Now } else { Fit::Never }
    }

    fn charge(&self, taken: &mut Cost, _: Tick, amount: i128) -> u128 {
        let before = *taken;
        let after = i128::from(before).saturating_add(amount).clamp(0, Cost::MAX.into());
        *taken = u64::try_from(after).unwrap_or(Cost::MAX);
        amount.unsigned_abs() - u128::from(taken.abs_diff(before))
    }

    fn facts(&self, taken: &Cost, _: Tick, _: Option<Cost>) -> Facts {
        Facts { remaining: self.places.saturating_sub(*taken), ..Facts::all_of(self.places) }
    }

    fn fresh_at(&self, taken: &Cost) -> Option<Tick> {
        (*taken == 0).then_some(Tick(i64::MIN))
    }

    fn used(&self, taken: &Cost, _: Tick) -> Used {
        Used::whole(*taken)
    }

    fn with_used(&self, used: Used, _: Tick) -> Cost {
        used.rounded_up()
    }

    fn encode(&self, taken: &Cost, out: &mut Vec<u8>) {
        out.extend(taken.to_be_bytes());
    }

    fn decode(&self, bytes: &[u8]) -> Result<Cost, DecodeError> {
        bytes.try_into().map(u64::from_be_bytes).map_err(|_| DecodeError::Truncated)
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight")
            .field("places", &self.limiter.rules().places)
            .finish_non_exhaustive()
    }
}
