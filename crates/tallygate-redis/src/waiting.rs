//! Waits until a request is allowed by a limiter on Redis.
//!
//! A waiting request checks again when the cost should fit. Within a process, each key is first come, first served;
//! between processes there is no order. A process retries after `retry_after` plus a small random time, so that not all
//! processes retry at once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tallygate::observer::Observer;
use tallygate::tiers::RuleSource;
use tallygate::{Ask, Decision, RateLimiter, Ticks};

use crate::any::AnyLimiter;
use crate::custom::CustomStore;
use crate::error::Error;
use crate::store::{RedisRule, RedisStore};

/// Waits, for limiters on Redis and for limiters whose store is [chosen at run time](crate::open).
pub trait Waiting {
    /// Waits until the request is allowed, and charges it.
    ///
    /// The request is denied at once if that would take longer than `max_wait`, and after `max_wait` at the latest,
    /// whatever the requests before it in this process do. If the future is dropped earlier, nothing is charged, unless
    /// a check is on its way to the server.
    ///
    /// Requests are served in order within this process only.
    ///
    /// # Errors
    /// Fails if the key is too long, or if a window of the policy is not a whole number of microseconds.
    fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> impl Future<Output = Result<Decision, Error>> + Send;

    /// Checks the request now, and waits for the delay of the [leaky bucket](tallygate::Kind::LeakyBucket), so that the
    /// output has a constant rate.
    ///
    /// A denial does not wait. If the future is dropped while it waits, its departure time stays unused: the output
    /// keeps its rate, and the unit stays charged.
    ///
    /// # Errors
    /// Fails as [`until_ready`](Self::until_ready) does.
    fn shape<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
    ) -> impl Future<Output = Result<Decision, Error>> + Send;
}

impl<R, O> Waiting for RateLimiter<R, RedisStore, O>
where
    R: RuleSource + Sync,
    R::Rule: RedisRule,
    O: Observer,
{
    async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        until_ready(self, ask.into(), max_wait).await
    }

    async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>> + Send) -> Result<Decision, Error> {
        shape(self, ask.into()).await
    }
}

impl<R: RuleSource + Sync, O: Observer> Waiting for RateLimiter<R, CustomStore, O> {
    async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        until_ready(self, ask.into(), max_wait).await
    }

    async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>> + Send) -> Result<Decision, Error> {
        shape(self, ask.into()).await
    }
}

/// In memory, requests wait in the lines of the memory store: in order, and at the exact time.
impl<O: Observer> Waiting for AnyLimiter<O> {
    async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        match self.store().memory() {
            Some(memory) => Ok(self.until_ready_in(memory, ask, max_wait).await?),
            None => until_ready(self, ask.into(), max_wait).await,
        }
    }

    async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>> + Send) -> Result<Decision, Error> {
        match self.store().memory() {
            Some(memory) => Ok(self.shape_in(memory, ask).await?),
            None => shape(self, ask.into()).await,
        }
    }
}

/// A limiter on Redis, whatever its rules are.
trait Limiter: Sync {
    fn name(&self) -> &str;

    fn check(&self, ask: Ask<'_>) -> impl Future<Output = Result<Decision, Error>> + Send;

    fn peek(&self, ask: Ask<'_>) -> impl Future<Output = Result<Decision, Error>> + Send;
}

macro_rules! limiter {
    ($(($($bounds:tt)*) $limiter:ty),*) => { $(
        impl<$($bounds)*> Limiter for $limiter {
            fn name(&self) -> &str {
                RateLimiter::name(self)
            }

            async fn check(&self, ask: Ask<'_>) -> Result<Decision, Error> {
                RateLimiter::check(self, ask).await
            }

            async fn peek(&self, ask: Ask<'_>) -> Result<Decision, Error> {
                RateLimiter::peek(self, ask).await
            }
        }
    )* };
}

limiter!(
    (R: RuleSource<Rule: RedisRule> + Sync, O: Observer) RateLimiter<R, RedisStore, O>,
    (R: RuleSource + Sync, O: Observer) RateLimiter<R, CustomStore, O>,
    (O: Observer) AnyLimiter<O>
);

async fn until_ready(
    limiter: &impl Limiter,
    ask: Ask<'_>,
    max_wait: Duration,
) -> Result<Decision, Error> {
    let now = Instant::now();
    // A wait that the system clock cannot represent has no deadline in practice.
    let deadline = now.checked_add(max_wait).unwrap_or(now + FAR);
    let line = line_of(limiter.name(), ask.key);
    let turn = tokio::time::timeout_at(deadline.into(), line.lock()).await;
    loop {
        // A request that did not get its turn in time only peeks: it reports the wait, and charges nothing.
        let decision =
            if turn.is_ok() { limiter.check(ask).await? } else { limiter.peek(ask).await? };
        let Some(wait) = decision.retry_after.map(Ticks::as_duration) else {
            return Ok(decision);
        };
        let left = deadline.saturating_duration_since(Instant::now());
        if turn.is_err() {
            let retry_after = decision.retry_after.map(|wait| wait.max(Ticks(1)));
            return Ok(Decision { allowed: false, retry_after, ..decision });
        }
        if decision.allowed || wait > left {
            return Ok(decision);
        }
        tokio::time::sleep(a_little_more(wait).min(left)).await;
    }
}

async fn shape(limiter: &impl Limiter, ask: Ask<'_>) -> Result<Decision, Error> {
    let decision = limiter.check(ask).await?;
    if decision.allowed {
        tokio::time::sleep(decision.delay.as_duration()).await;
    }
    Ok(decision)
}

/// A hundred years.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

/// Adds up to a twentieth, at most 10 ms.
fn a_little_more(wait: Duration) -> Duration {
    let more = (wait / 20).min(Duration::from_millis(10));
    wait + more.mul_f64(fastrand::f64()) + Duration::from_micros(1)
}

type Line = tokio::sync::Mutex<()>;

/// Returns the queue of a key in this process. It is dropped when no request waits in it.
fn line_of(limiter: &str, key: &[u8]) -> Arc<Line> {
    type Lines = HashMap<(Box<str>, Box<[u8]>), Weak<Line>>;
    static LINES: LazyLock<Mutex<Lines>> = LazyLock::new(Mutex::default);
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    // Remove empty queues from time to time.
    if lines.len() >= 1024 && lines.len().is_power_of_two() {
        lines.retain(|_, line| line.strong_count() > 0);
    }
    let place = lines.entry((limiter.into(), key.into())).or_default();
    place.upgrade().unwrap_or_else(|| {
        let line = Arc::new(Line::default());
        *place = Arc::downgrade(&line);
        line
    })
}
