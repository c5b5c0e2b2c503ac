//! A limit on the requests that are served at the same time.

use std::fmt;
use std::sync::Arc;

use crate::key::Key;
use crate::limiter::{IntoPending as _, Pending};

/// A limit on requests in flight, by a key.
#[derive(Clone)]
pub(crate) struct InFlightRule {
    pub(crate) places: Arc<dyn Places>,
    pub(crate) key: Key,
}

/// A place among the requests in flight, released when it is dropped.
pub(crate) type Place = Box<dyn Send + Sync>;

/// Takes places: [`tallygate::InFlight`] in memory, or `tallygate_redis::InFlight` over a fleet.
pub(crate) trait Places: Send + Sync {
    /// Takes a place if one is free.
    fn enter<'a>(&'a self, key: &'a [u8]) -> Pending<'a, Option<Place>>;

    /// Returns whether its answers are ready at once.
    fn is_immediate(&self) -> bool;
}

/// A limit on the requests in flight of a client, on any store.
#[derive(Clone)]
pub struct InFlightLimit(pub(crate) Arc<dyn Places>);

impl From<tallygate::InFlight> for InFlightLimit {
    fn from(in_flight: tallygate::InFlight) -> Self {
        Self(Arc::new(in_flight))
    }
}

impl Places for tallygate::InFlight {
    fn enter<'a>(&'a self, key: &'a [u8]) -> Pending<'a, Option<Place>> {
        let entered = Self::enter(self, key);
        entered.map(|place| place.map(|place| -> Place { Box::new(place) })).into_pending()
    }

    fn is_immediate(&self) -> bool {
        true
    }
}

/// Implements the limit for types that take places asynchronously.
#[cfg(feature = "redis")]
macro_rules! places_elsewhere {
    ($($kind:ty),*) => { $(
        impl From<$kind> for InFlightLimit {
            fn from(in_flight: $kind) -> Self {
                Self(Arc::new(in_flight))
            }
        }

        impl Places for $kind {
            fn enter<'a>(&'a self, key: &'a [u8]) -> Pending<'a, Option<Place>> {
                let entering = async move {
                    let place = Self::enter(self, key).await?;
                    Ok(place.map(|place| -> Place { Box::new(place) }))
                };
                let entering: tallygate_redis::Reply<'a, Option<Place>> = Box::pin(entering);
                entering.into_pending()
            }

            fn is_immediate(&self) -> bool {
                false
            }
        }
    )* };
}

#[cfg(feature = "redis")]
places_elsewhere!(tallygate_redis::InFlight, tallygate_redis::AnyInFlight);

impl fmt::Debug for InFlightLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("InFlightLimit")
    }
}

impl fmt::Debug for InFlightRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlightRule").field("key", &self.key).finish_non_exhaustive()
    }
}
