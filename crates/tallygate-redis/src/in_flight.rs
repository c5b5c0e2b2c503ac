//! Limits the requests in flight over a fleet. Places are leased, so that they expire when their process dies.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::PLACES;
use crate::transaction::unexpected;

/// Limits how many requests of a client are in flight at once, over all processes.
///
/// A request holds a place as long as its [`Place`] lives; a task renews its lease. If the process dies, the place expires
/// after the lease. There is no failure setting: an unavailable Redis is an error.
///
/// ```no_run
/// use std::time::Duration;
/// use tallygate_redis::{InFlight, Redis};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let in_flight = InFlight::new(&redis, "uploads", 2, Duration::from_secs(30));
/// if let Some(place) = in_flight.enter("alice").await? {
///     // Serve the request, then return the place:
///     place.leave().await?;
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct InFlight {
    redis: Redis,
    name: Arc<str>,
    places: u64,
    lease: Duration,
}

impl InFlight {
    /// Makes a limit of `places` requests per client, each leased for `lease` at a time.
    #[must_use]
    pub fn new(redis: &Redis, name: &str, places: u64, lease: Duration) -> Self {
        Self { redis: redis.clone(), name: format!("in flight/{name}").into(), places, lease }
    }

    /// Takes a place, if one is free.
    ///
    /// # Errors
    /// Fails if the key is too long or Redis is unavailable.
    pub async fn enter(&self, client: impl AsRef<[u8]>) -> Result<Option<Place>, Error> {
        let key = self.redis.key(&self.name, client.as_ref())?;
        let holder = format!("{:032x}", fastrand::u128(..));
        // The place is returned even if the caller has gone before the reply.
        let mut place = Place::new(self.clone(), key, holder);
        let (is_in, _) = self.ask("take", &place.key, &place.holder).await?;
        if !is_in {
            place.is_left = true;
            return Ok(None);
        }
        place.keep();
        Ok(Some(place))
    }

    /// Returns the number of requests of a client in flight.
    ///
    /// # Errors
    /// Fails if the key is too long or Redis is unavailable.
    pub async fn count(&self, client: impl AsRef<[u8]>) -> Result<u64, Error> {
        let key = self.redis.key(&self.name, client.as_ref())?;
        Ok(self.ask("count", &key, "").await?.1)
    }

    async fn ask(&self, verb: &str, key: &Key, holder: &str) -> Result<(bool, u64), Error> {
        let (places, lease) = (self.places.to_string(), self.lease.as_micros().to_string());
        let arguments =
            [verb, holder, &places, &lease, ""].map(|argument: &str| argument.as_bytes());
        let deadline = self.redis.deadline();
        let reply = self.redis.run(&PLACES, &[key], &arguments, deadline).await?;
        let Value::Array(reply) = reply else { return Err(unexpected()) };
        match reply[..] {
            [Value::Int(is_in), Value::Int(taken)] => {
                Ok((is_in == 1, u64::try_from(taken).unwrap_or(0)))
            }
            _ => Err(unexpected()),
        }
    }
}

/// A place among the requests in flight. When it is dropped, it is returned in the background; if that fails, it
/// expires.
#[must_use = "the place is returned when it is dropped: keep it while the request is served"]
pub struct Place {
    in_flight: InFlight,
    key: Key,
    holder: String,
    renewal: Option<tokio::task::JoinHandle<()>>,
    is_left: bool,
}

impl Place {
    fn new(in_flight: InFlight, key: Key, holder: String) -> Self {
        Self { in_flight, key, holder, renewal: None, is_left: false }
    }

    /// Renews the lease until the place is dropped.
    fn keep(&mut self) {
        let (in_flight, key, holder) =
            (self.in_flight.clone(), self.key.clone(), self.holder.clone());
        self.renewal = Some(tokio::spawn(async move {
            loop {
                tokio::time::sleep(in_flight.lease / 3).await;
                // A failed renewal is retried in time, or the place expires.
                if let Ok((false, _)) = in_flight.ask("keep", &key, &holder).await {
                    return;
                }
            }
        }));
    }

    /// Returns the place, and waits until that is done.
    ///
    /// # Errors
    /// Fails if Redis is unavailable. The place then expires after its lease.
    pub async fn leave(mut self) -> Result<(), Error> {
        self.is_left = true;
        self.stop();
        self.in_flight.ask("leave", &self.key, &self.holder).await.map(|_| ())
    }

    fn stop(&mut self) {
        if let Some(renewal) = self.renewal.take() {
            renewal.abort();
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.stop();
        if self.is_left {
            return;
        }
        let (in_flight, key, holder) =
            (self.in_flight.clone(), self.key.clone(), std::mem::take(&mut self.holder));
        // Without a runtime, the place expires.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = in_flight.ask("leave", &key, &holder).await;
            });
        }
    }
}

impl fmt::Debug for InFlight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InFlight").field("places", &self.places).finish_non_exhaustive()
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").field("holder", &self.holder).finish_non_exhaustive()
    }
}
