//! Waiting for one's turn on Redis: asking again when the cost should fit.
//!
//! Within a process it is first come, first served for each key; between processes there is no order. Each
//! comes back after `retry_after` and a little more, a random part of it, so that they do not come all at once.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use tallygate::{Ask, Decision, Observer, RateLimiter, Rules, Store, Ticks};

use crate::error::Error;
use crate::store::Reply;

/// Waiting, for limiters on Redis.
pub trait Waiting {
    /// Waits until the client may use this much, and charges it. It is denied at once if that would take longer
    /// than `max_wait`, and by then at the latest, whatever the requests before it in this process do. If the
    /// future is dropped earlier, nothing is charged, unless a check is on its way to the server.
    ///
    /// First come, first served within this process only: other processes take their turns as they come.
    ///
    /// # Errors
    /// The key is too long, or the policy is not in microseconds.
    fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> impl Future<Output = Result<Decision, Error>> + Send;

    /// Decides now, and waits as long as the [leaky bucket](tallygate::Kind::LeakyBucket) says, so that the output is
    /// flat. A denial does not wait. If the future is dropped while it waits, its departure time stays unused: the
    /// output stays flat, and the unit stays charged.
    ///
    /// # Errors
    /// As there.
    fn shape<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
    ) -> impl Future<Output = Result<Decision, Error>> + Send;
}

impl<R, S, O> Waiting for RateLimiter<R, S, O>
where
    R: Rules + Sync,
    S: for<'a> Store<R::Rule, Reply<'a, Decision> = Reply<'a, Decision>> + Sync,
    O: Observer,
{
    async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>> + Send,
        max_wait: Duration,
    ) -> Result<Decision, Error> {
        let ask = ask.into();
        let now = Instant::now();
        // A wait beyond what the system can count has no deadline to speak of.
        let deadline = now.checked_add(max_wait).unwrap_or(now + FAR);
        let line = line_of(self.name(), ask.key);
        let turn = tokio::time::timeout_at(deadline.into(), line.lock()).await;
        loop {
            // Who did not get a turn in time is told how long it would take, and uses nothing.
            let decision =
                if turn.is_ok() { self.check(ask).await? } else { self.peek(ask).await? };
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

    async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>> + Send) -> Result<Decision, Error> {
        let decision = self.check(ask).await?;
        if decision.allowed {
            tokio::time::sleep(decision.delay.as_duration()).await;
        }
        Ok(decision)
    }
}

/// A hundred years.
const FAR: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

/// Up to a twentieth more, at most 10 ms.
fn a_little_more(wait: Duration) -> Duration {
    let more = (wait / 20).min(Duration::from_millis(10));
    wait + more.mul_f64(fastrand::f64()) + Duration::from_micros(1)
}

type Line = tokio::sync::Mutex<()>;

/// The line of a key in this process. It is gone when nobody waits in it.
fn line_of(limiter: &str, key: &[u8]) -> Arc<Line> {
    type Lines = HashMap<(Box<str>, Box<[u8]>), Weak<Line>>;
    static LINES: LazyLock<Mutex<Lines>> = LazyLock::new(Mutex::default);
    let mut lines = LINES.lock().unwrap_or_else(PoisonError::into_inner);
    // Now and then, those that nobody waits in are cleared away.
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
