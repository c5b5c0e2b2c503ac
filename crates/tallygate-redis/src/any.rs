//! A store that is chosen at run time: memory or Redis.
//!
//! Both have the same type, so that an application can name the type of its limiter and choose the store by a URL.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tallygate::algorithm::{Answer, Op, Timed};
use tallygate::clock::SystemClock;
use tallygate::observer::NoObserver;
use tallygate::reservation::{Charged, SettleError};
use tallygate::store::{Capacity, InvalidAsk, MemoryStore, RuleRef, Store};
use tallygate::tiers::ClientRule;
use tallygate::{Ask, Cost, Decision, RateLimiter, Tick, Ticks, Tiers};

use crate::client::Redis;
use crate::error::{AddressError, Error};
use crate::failure::OnFailure;
use crate::in_flight::{InFlight, Place};
use crate::store::{RedisStore, Reply, in_order};

/// A limiter whose store is chosen when the program starts.
///
/// ```no_run
/// use tallygate::{Policy, Tiers};
/// use tallygate_redis::{AnyLimiter, open};
///
/// struct App {
///     api: AnyLimiter,
/// }
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let url = std::env::var("STORE").unwrap_or("memory".into()); // or redis://127.0.0.1:6379
/// let policy = Policy::token_bucket(100).per_minute().build()?;
/// let app = App { api: open(&url)?.limiter("api", Tiers::new(policy)) };
/// assert!(app.api.check("alice").await?.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type AnyLimiter<O = NoObserver> = RateLimiter<Tiers, AnyStore, O>;

/// The place in which limiters keep their clients: in memory, separately for each limiter, or in Redis.
#[derive(Clone, Debug)]
pub enum Stores {
    /// The memory of this process.
    Memory(Capacity),
    /// Redis or Valkey.
    Redis(Redis),
}

/// Opens the stores at an address: `memory`, or an address of Redis as [`Redis::open`] takes it. Connections are made
/// when they are needed. While Redis is unavailable, requests are allowed; [`AnyStore::on_failure`] changes that.
///
/// # Errors
/// Fails if the address is neither.
pub fn open(url: &str) -> Result<Stores, AddressError> {
    match url {
        "memory" => Ok(Stores::Memory(Capacity::default())),
        url => Redis::open(url).map(Stores::Redis),
    }
}

impl Stores {
    /// Makes a limiter. In Redis, its keys contain its name.
    #[must_use]
    pub fn limiter(&self, name: &str, tiers: Tiers) -> AnyLimiter {
        RateLimiter::in_store(name, tiers, self.store(name))
    }

    /// Makes an empty store in memory, or the store with a name in Redis.
    #[must_use]
    pub fn store(&self, name: &str) -> AnyStore {
        match self {
            Self::Memory(capacity) => MemoryStore::new(*capacity, SystemClock::new()).into(),
            Self::Redis(redis) => redis.store(name).into(),
        }
    }

    /// Makes a limit of `places` requests in flight per client.
    ///
    /// In Redis, a place is leased for `lease` at a time and renewed while it is held, so that it expires if its process
    /// dies. In memory, `lease` has no effect.
    #[must_use]
    pub fn in_flight(&self, name: &str, places: u64, lease: Duration) -> AnyInFlight {
        AnyInFlight(match self {
            Self::Memory(capacity) => {
                InFlightKind::Memory(tallygate::InFlight::for_clients(places, capacity.max_keys))
            }
            Self::Redis(redis) => InFlightKind::Redis(InFlight::new(redis, name, places, lease)),
        })
    }

    /// Returns the connection to Redis, if clients are kept there.
    #[must_use]
    pub const fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis) => Some(redis),
        }
    }
}

/// Limits how many requests of a client are in flight, in memory or in Redis: see [`Stores::in_flight`].
///
/// ```
/// use std::time::Duration;
/// use tallygate_redis::open;
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let uploads = open("memory")?.in_flight("uploads", 1, Duration::from_secs(30));
/// let place = uploads.enter("alice").await?.expect("no request is in flight");
/// assert!(uploads.enter("alice").await?.is_none());
/// place.leave().await?;
/// assert_eq!(uploads.count("alice").await?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct AnyInFlight(InFlightKind);

#[derive(Clone, Debug)]
enum InFlightKind {
    Memory(tallygate::InFlight),
    Redis(InFlight),
}

impl AnyInFlight {
    /// Takes a place, if one is free.
    ///
    /// # Errors
    /// Fails if the key is too long, too many clients have requests in flight, or Redis is unavailable.
    pub async fn enter(&self, client: impl AsRef<[u8]>) -> Result<Option<AnyPlace>, Error> {
        Ok(match &self.0 {
            InFlightKind::Memory(places) => places.enter(client)?.map(PlaceKind::Memory),
            InFlightKind::Redis(places) => places.enter(client).await?.map(PlaceKind::Redis),
        }
        .map(AnyPlace))
    }

    /// Returns the number of requests of a client in flight.
    ///
    /// # Errors
    /// Fails as [`enter`](Self::enter) does.
    pub async fn count(&self, client: impl AsRef<[u8]>) -> Result<u64, Error> {
        match &self.0 {
            InFlightKind::Memory(places) => Ok(places.count(client)?),
            InFlightKind::Redis(places) => places.count(client).await,
        }
    }
}

/// A place among the requests in flight. Dropping it returns it: at once in memory, in the background in Redis.
#[derive(Debug)]
#[must_use = "the place is returned when it is dropped: keep it while the request is served"]
pub struct AnyPlace(PlaceKind);

#[derive(Debug)]
enum PlaceKind {
    Memory(tallygate::in_flight::Place),
    Redis(Place),
}

impl AnyPlace {
    /// Returns the place, and waits until that is done.
    ///
    /// # Errors
    /// Fails if Redis is unavailable. The place then expires after its lease.
    pub async fn leave(self) -> Result<(), Error> {
        match self.0 {
            PlaceKind::Memory(place) => {
                drop(place);
                Ok(())
            }
            PlaceKind::Redis(place) => place.leave().await,
        }
    }
}

/// A store in memory or in Redis. Errors of the store in memory are [`Error::Memory`].
///
/// Cloning is cheap, and all clones are the same store.
#[derive(Clone, Debug)]
pub struct AnyStore(Kind);

#[derive(Clone, Debug)]
enum Kind {
    Memory(Arc<MemoryStore<ClientRule>>),
    Redis(RedisStore),
}

impl AnyStore {
    /// Sets the failure setting, as [`RedisStore::on_failure`] does. In memory, it has no effect.
    ///
    /// ```
    /// use tallygate::{Policy, RateLimiter, Tiers, Verdict};
    /// use tallygate_redis::{AnyLimiter, OnFailure, open};
    ///
    /// # tokio::runtime::Runtime::new()?.block_on(async {
    /// let url = "redis://127.0.0.1:1"; // no server listens there
    /// let store = open(url)?.store("login").on_failure(OnFailure::Deny);
    /// let policy = Policy::token_bucket(5).per_minute().build()?;
    /// let login: AnyLimiter = RateLimiter::in_store("login", Tiers::new(policy), store);
    /// let decision = login.check("alice").await?;
    /// assert_eq!(decision.verdict(), Verdict::Unavailable { allowed: false });
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        match self.0 {
            Kind::Redis(store) => store.on_failure(on_failure).into(),
            memory @ Kind::Memory(_) => Self(memory),
        }
    }

    /// Returns the store if it is in memory.
    #[must_use]
    pub fn memory(&self) -> Option<&MemoryStore<ClientRule>> {
        match &self.0 {
            Kind::Memory(store) => Some(store),
            Kind::Redis(_) => None,
        }
    }

    /// Returns the store if it is in Redis.
    #[must_use]
    pub const fn redis(&self) -> Option<&RedisStore> {
        match &self.0 {
            Kind::Memory(_) => None,
            Kind::Redis(store) => Some(store),
        }
    }
}

impl From<MemoryStore<ClientRule>> for AnyStore {
    fn from(store: MemoryStore<ClientRule>) -> Self {
        Self(Kind::Memory(Arc::new(store)))
    }
}

impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self(Kind::Redis(store))
    }
}

/// A reply that is ready (from memory) or pending (from Redis). It is a future in both cases.
#[must_use = "futures do nothing unless they are polled"]
pub enum AnyReply<'a, T> {
    /// The result; `None` after it was taken.
    Ready(Option<Result<T, Error>>),
    /// The pending reply.
    Later(Reply<'a, T>),
}

impl<T> AnyReply<'_, T> {
    fn ready(answer: Result<T, impl Into<Error>>) -> Self {
        Self::Ready(Some(answer.map_err(Into::into)))
    }

    /// Returns the result if it is ready, which is always so for a store in memory.
    pub fn into_ready(self) -> Option<Result<T, Error>> {
        match self {
            Self::Ready(answer) => answer,
            Self::Later(_) => None,
        }
    }
}

impl<T: Unpin> Future for AnyReply<'_, T> {
    type Output = Result<T, Error>;

    /// # Panics
    /// Panics if it is polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut *self {
            Self::Ready(answer) => match answer.take() {
                Some(answer) => Poll::Ready(answer),
                None => unreachable!("it is polled after it was ready"),
            },
            Self::Later(reply) => reply.as_mut().poll(context),
        }
    }
}

impl<T> fmt::Debug for AnyReply<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ready(_) => "Ready",
            Self::Later(_) => "Later",
        })
    }
}

impl Store<ClientRule> for AnyStore {
    type Reply<'a, T: 'a> = AnyReply<'a, T>;

    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl RuleRef<ClientRule> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> AnyReply<'a, T> {
        match &self.0 {
            Kind::Memory(store) => AnyReply::ready(store.apply(rule, key, op, now)),
            Kind::Redis(store) => AnyReply::Later(store.apply(rule, key, op, now)),
        }
    }

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<ClientRule> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&ClientRule, Timed) -> T + Send + 'a,
    ) -> AnyReply<'a, T> {
        match &self.0 {
            Kind::Memory(store) => AnyReply::ready(store.apply_with(rule, key, op, now, make)),
            Kind::Redis(store) => AnyReply::Later(store.apply_with(rule, key, op, now, make)),
        }
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<ClientRule> + 'a,
        asks: &'a [K],
    ) -> AnyReply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        match &self.0 {
            Kind::Memory(store) => AnyReply::ready(store.check_many(rule, asks)),
            Kind::Redis(store) => AnyReply::Later(store.check_many(rule, asks)),
        }
    }

    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<ClientRule> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> AnyReply<'a, Charged> {
        match &self.0 {
            Kind::Memory(store) => {
                AnyReply::ready(store.reserve(rule, key, estimate, time_to_live, now))
            }
            Kind::Redis(store) => {
                AnyReply::Later(store.reserve(rule, key, estimate, time_to_live, now))
            }
        }
    }

    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<ClientRule> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<AnyReply<'a, Decision>, SettleError> {
        Ok(match &self.0 {
            Kind::Memory(store) => AnyReply::ready(store.settle(rule, key, change, charged, now)?),
            Kind::Redis(store) => AnyReply::Later(store.settle(rule, key, change, charged, now)?),
        })
    }

    fn now(&self) -> Tick {
        match &self.0 {
            Kind::Memory(store) => store.now(),
            Kind::Redis(store) => Store::<ClientRule>::now(store),
        }
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        match &self.0 {
            Kind::Memory(store) => store.rules_changed(key),
            Kind::Redis(store) => Store::<ClientRule>::rules_changed(store, key),
        }
    }

    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> AnyReply<'a, T> {
        AnyReply::ready(Err(invalid))
    }

    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: AnyReply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> AnyReply<'a, U> {
        match reply {
            AnyReply::Ready(answer) => AnyReply::Ready(answer.map(|answer| answer.map(make))),
            AnyReply::Later(reply) => {
                AnyReply::Later(Box::pin(async move { reply.await.map(make) }))
            }
        }
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], AnyReply<'a, T>)>,
    ) -> AnyReply<'a, Vec<T>> {
        let mut ready = Vec::new();
        let mut later = Vec::new();
        for (key, reply) in replies {
            match reply {
                AnyReply::Ready(answer) => ready.extend(answer),
                AnyReply::Later(reply) => later.push((key, reply)),
            }
        }
        // All replies are from one store, so all are ready or all are pending.
        if later.is_empty() {
            AnyReply::Ready(Some(ready.into_iter().collect()))
        } else {
            AnyReply::Later(Box::pin(in_order(later)))
        }
    }
}
