//! A store that is chosen when the program starts: memory or Redis.
//!
//! Both are the same type, so that an application can name the type of its limiter and choose the store by a URL.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use tallygate::{
    Answer, Ask, Capacity, Charged, Cost, Decision, InvalidAsk, Lent, MemoryStore, NoObserver, Op,
    Plan, RateLimiter, SettleError, Store, SystemClock, Tick, Ticks, Tiers, Timed,
};

use crate::client::Redis;
use crate::error::{AddressError, Error};
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

/// Where the clients of limiters are kept: in memory, each limiter by itself, or in Redis.
#[derive(Clone, Debug)]
pub enum Stores {
    /// In the memory of this process.
    Memory(Capacity),
    /// In Redis or Valkey.
    Redis(Redis),
}

/// Opens the stores that an address names: `memory`, or an address of Redis as [`Redis::open`] takes it. Connections are
/// made when they are needed.
///
/// # Errors
/// The address is neither.
pub fn open(url: &str) -> Result<Stores, AddressError> {
    match url {
        "memory" => Ok(Stores::Memory(Capacity::default())),
        url => Redis::open(url).map(Stores::Redis),
    }
}

impl Stores {
    /// Makes a limiter with rules. Its name is that of its keys in Redis.
    #[must_use]
    pub fn limiter(&self, name: &str, tiers: Tiers) -> AnyLimiter {
        RateLimiter::in_store(name, tiers, self.store(name))
    }

    /// Makes an empty store in memory, or one for the keys of a name in Redis.
    #[must_use]
    pub fn store(&self, name: &str) -> AnyStore {
        match self {
            Self::Memory(capacity) => MemoryStore::new(*capacity, SystemClock::new()).into(),
            Self::Redis(redis) => redis.store(name).into(),
        }
    }

    /// Returns the client of Redis, if clients are kept there.
    #[must_use]
    pub const fn redis(&self) -> Option<&Redis> {
        match self {
            Self::Memory(_) => None,
            Self::Redis(redis) => Some(redis),
        }
    }
}

/// A store in memory or in Redis. Its errors are those of Redis; [`Error::Memory`] is one of the store in memory.
#[derive(Debug)]
pub struct AnyStore(Kind);

#[derive(Debug)]
enum Kind {
    Memory(Box<MemoryStore<Plan>>),
    Redis(RedisStore),
}

impl AnyStore {
    /// Returns the store in memory, if it is one.
    #[must_use]
    pub const fn memory(&self) -> Option<&MemoryStore<Plan>> {
        match &self.0 {
            Kind::Memory(store) => Some(store),
            Kind::Redis(_) => None,
        }
    }

    /// Returns the store in Redis, if it is one.
    #[must_use]
    pub const fn redis(&self) -> Option<&RedisStore> {
        match &self.0 {
            Kind::Memory(_) => None,
            Kind::Redis(store) => Some(store),
        }
    }
}

impl From<MemoryStore<Plan>> for AnyStore {
    fn from(store: MemoryStore<Plan>) -> Self {
        Self(Kind::Memory(Box::new(store)))
    }
}

impl From<RedisStore> for AnyStore {
    fn from(store: RedisStore) -> Self {
        Self(Kind::Redis(store))
    }
}

/// An answer that is ready, or that comes. It is a future either way.
#[must_use = "futures do nothing unless they are polled"]
pub enum AnyReply<'a, T> {
    /// The answer; `None` after it was taken.
    Ready(Option<Result<T, Error>>),
    /// The answer when it comes.
    Later(Reply<'a, T>),
}

impl<T> AnyReply<'_, T> {
    fn ready(answer: Result<T, impl Into<Error>>) -> Self {
        Self::Ready(Some(answer.map_err(Into::into)))
    }

    /// Returns the answer if it is ready, as that of a store in memory always is.
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
    /// If it is polled again after it was ready.
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

impl Store<Plan> for AnyStore {
    type Reply<'a, T: 'a> = AnyReply<'a, T>;

    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<Plan> + 'a,
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
        rule: impl Lent<Plan> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&Plan, Timed) -> T + Send + 'a,
    ) -> AnyReply<'a, T> {
        match &self.0 {
            Kind::Memory(store) => AnyReply::ready(store.apply_with(rule, key, op, now, make)),
            Kind::Redis(store) => AnyReply::Later(store.apply_with(rule, key, op, now, make)),
        }
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl Lent<Plan> + 'a,
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
        rule: impl Lent<Plan> + 'a,
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
        rule: impl Lent<Plan> + 'a,
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
            Kind::Redis(store) => Store::<Plan>::now(store),
        }
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        match &self.0 {
            Kind::Memory(store) => store.rules_changed(key),
            Kind::Redis(store) => Store::<Plan>::rules_changed(store, key),
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
        // All of them are of one store, which answers at once or does not.
        if later.is_empty() {
            AnyReply::Ready(Some(ready.into_iter().collect()))
        } else {
            AnyReply::Later(Box::pin(in_order(later)))
        }
    }
}
