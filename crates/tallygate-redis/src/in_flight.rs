//! Requests in flight, over a fleet: places that are leased, so that they lapse when their holder dies.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use redis::Value;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::PLACES;
use crate::transaction::unexpected;

/// At most so many requests of a client at once, whichever processes serve them.
///
/// A place is kept as long as its [`Place`] lives; a task renews it meanwhile. If the process dies, it lapses
/// after the lease. There is no failure policy: if Redis cannot be asked, that is an error.
///
/// ```no_run
/// use std::time::Duration;
/// use tallygate_redis::{InFlight, Redis};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let in_flight = InFlight::new(&redis, "uploads", 2, Duration::from_secs(30));
/// if let Some(place) = in_flight.enter("alice").await? {
///     // Serve, then let go:
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
    /// At most so many places a client, each leased for so long at a time.
    #[must_use]
    pub fn new(redis: &Redis, name: &str, places: u64, lease: Duration) -> Self {
        Self { redis: redis.clone(), name: format!("in flight/{name}").into(), places, lease }
    }

    /// Takes a place, if there is one.
    ///
    /// # Errors
    /// The key is too long, or Redis could not be asked.
    pub async fn enter(&self, client: impl AsRef<[u8]>) -> Result<Option<Place>, Error> {
        let key = self.redis.key(&self.name, client.as_ref())?;
        let who = format!("{:032x}", fastrand::u128(..));
        // Given back also if nobody waits for the answer any more.
        let mut place = Place::new(self.clone(), key, who);
        let (is_in, _) = self.ask("take", &place.key, &place.who).await?;
        if !is_in {
            place.is_left = true;
            return Ok(None);
        }
        place.keep();
        Ok(Some(place))
    }

    /// How many requests of a client are in flight.
    ///
    /// # Errors
    /// The key is too long, or Redis could not be asked.
    pub async fn count(&self, client: impl AsRef<[u8]>) -> Result<u64, Error> {
        let key = self.redis.key(&self.name, client.as_ref())?;
        Ok(self.ask("count", &key, "").await?.1)
    }

    async fn ask(&self, verb: &str, key: &Key, who: &str) -> Result<(bool, u64), Error> {
        let (places, lease) = (self.places.to_string(), self.lease.as_micros().to_string());
        let arguments = [verb, who, &places, &lease, ""].map(|argument: &str| argument.as_bytes());
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

/// A place among the requests in flight. Dropped, it is given back in the background; if that fails, it lapses.
#[must_use = "it is given back when it is dropped: keep it as long as the request is served"]
pub struct Place {
    of: InFlight,
    key: Key,
    who: String,
    renewal: Option<tokio::task::JoinHandle<()>>,
    is_left: bool,
}

impl Place {
    fn new(of: InFlight, key: Key, who: String) -> Self {
        Self { of, key, who, renewal: None, is_left: false }
    }

    /// Renews the lease until it is dropped.
    fn keep(&mut self) {
        let (of, key, who) = (self.of.clone(), self.key.clone(), self.who.clone());
        self.renewal = Some(tokio::spawn(async move {
            loop {
                tokio::time::sleep(of.lease / 3).await;
                // What fails is tried again in time, or it lapses.
                if let Ok((false, _)) = of.ask("keep", &key, &who).await {
                    return;
                }
            }
        }));
    }

    /// Gives it back, and waits until it is.
    ///
    /// # Errors
    /// Redis could not be asked: it lapses after the lease.
    pub async fn leave(mut self) -> Result<(), Error> {
        self.is_left = true;
        self.stop();
        self.of.ask("leave", &self.key, &self.who).await.map(|_| ())
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
        let (of, key, who) = (self.of.clone(), self.key.clone(), std::mem::take(&mut self.who));
        // Without a runtime it lapses.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                let _ = of.ask("leave", &key, &who).await;
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
        f.debug_struct("Place").field("who", &self.who).finish_non_exhaustive()
    }
}
