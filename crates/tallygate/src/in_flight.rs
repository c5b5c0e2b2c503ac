//! Requests in flight: limits how many requests are served at the same time.
//!
//! A request takes a place and returns it when it is done. It is unknown when a place will be free, so a denial has no
//! retry time.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Algorithm, Cost, Decision, DecodeError, Facts, Fit, Op, Tick, Used};

use crate::ask::Ask;
use crate::clock::Clock;
use crate::limiter::RateLimiter;
use crate::memory::{Capacity, MemoryStore};
use crate::storage::{Store as _, StoreError};
use crate::table::WhenFull;

/// Limits how many requests of a client are served at the same time.
///
/// It is cheap to clone, and all clones share the same places.
///
/// ```
/// use tallygate::{InFlight, Policy, RateLimiter, check_all};
///
/// let in_flight = InFlight::new(2);
/// let first = in_flight.enter("alice")?.expect("no request is in flight");
/// let second = in_flight.enter("alice")?.expect("one request is in flight");
/// assert!(in_flight.enter("alice")?.is_none());
/// drop(first);
/// assert!(in_flight.enter("alice")?.is_some()); // and returned at once
///
/// // In a joint decision, all parts are charged, or none is.
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
    pub(crate) limiter: Arc<RateLimiter<Places, MemoryStore<Places, ZeroClock>>>,
}

impl InFlight {
    /// Creates a limit of `places` requests per client, for up to a million clients.
    #[must_use]
    pub fn new(places: Cost) -> Self {
        Self::for_clients(places, Capacity::default().max_keys)
    }

    /// Creates a limit for another number of clients. If that many clients have requests in flight, further clients get an
    /// error, because no place may be forgotten.
    #[must_use]
    pub fn for_clients(places: Cost, max_clients: usize) -> Self {
        let capacity = Capacity::of(max_clients).when_full(WhenFull::RejectNew);
        let store = MemoryStore::new(capacity, ZeroClock);
        let limiter = RateLimiter::in_store("in flight", Places { places }, store);
        Self { limiter: Arc::new(limiter) }
    }

    /// Takes a place, if one is free.
    ///
    /// # Errors
    /// Fails if the key is too long or there are too many clients.
    pub fn enter(&self, key: impl AsRef<[u8]>) -> Result<Option<Place>, StoreError> {
        let place = self.place(key.as_ref());
        Ok(self.limiter.is_allowed(&key)?.then(|| place.taken()))
    }

    /// Returns the number of requests of a client in flight.
    ///
    /// # Errors
    /// Fails if the key is too long.
    pub fn count(&self, key: impl AsRef<[u8]>) -> Result<Cost, StoreError> {
        let decision: Decision =
            self.limiter.store().apply(self.limiter.rules(), key.as_ref(), Op::Check(0), None)?;
        Ok(decision.limit - decision.remaining)
    }

    pub(crate) fn place(&self, key: &[u8]) -> Place {
        Place { of: self.clone(), key: key.into(), size: 1, is_taken: false }
    }
}

/// A place among the requests in flight, or several if the request had a higher cost. Dropping it returns it.
#[derive(Debug)]
#[must_use = "the place is returned when it is dropped: keep it while the request is served"]
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
            // The key was accepted when the place was taken.
            let _ = self.of.limiter.refund(Ask::new(&self.key).cost(self.size));
        }
    }
}

/// Nothing here depends on the time.
pub(crate) struct ZeroClock;

impl Clock for ZeroClock {
    fn now(&self) -> Tick {
        Tick(0)
    }
}

/// The rule: a number of places. Only the request that holds a place releases it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Places {
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

    fn clock_was_set_back(&self, _: &Cost, _: Tick) -> bool {
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
