//! Outgoing requests: pace them, and wait as long as the server that they go to asks for.

mod instructions;

use std::collections::HashMap;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::header::HOST;
use http::{HeaderMap, Request, Response, StatusCode};
use tallygate::clock::Alarm;
use tallygate::{Ask, Tick, Ticks};
use tower_layer::Layer;
use tower_service::Service;

use crate::limiter::{Limiter, LimiterError, answer};
use crate::timer::Timer;

/// Paces outgoing requests: a tower [`Layer`] for clients.
///
/// A request waits until the limiter allows it, and as long as the server that it goes to asks for: in `Retry-After` of
/// a 429 or 503, or in `RateLimit`, `RateLimit-*` or `X-RateLimit-*` fields that say that nothing remains. Each server
/// has its own quota. A request that would have to wait too long fails without being sent.
///
/// Use a leaky bucket: then requests leave one by one at an even rate, in the order in which they came. The layer does
/// not repeat requests; combine it with a retry layer around it if they may be repeated.
///
/// ```
/// use std::time::Duration;
/// use tallygate::Policy;
/// use tallygate_tower::Pace;
///
/// // At most 10 requests per second to each server, and at most 50 that wait.
/// let policy = Policy::leaky_bucket(10).per_second().burst(50).build()?;
/// let pace = Pace::new(policy).max_wait(Duration::from_secs(5));
/// # let _: Pace<http::Request<()>, http::Response<()>> = pace;
/// # Ok::<(), tallygate::PolicyError>(())
/// ```
///
/// For clients whose requests are not those of the `http` crate, such as reqwest, use [`Pace::of_client`].
pub struct Pace<Req, Res> {
    shared: Arc<Shared>,
    target: fn(&Req) -> Vec<u8>,
    head: HeadOf<Res>,
    kind: PhantomData<fn(&Req) -> Res>,
}

/// A function that returns the status and the header fields of a response.
pub type HeadOf<Res> = for<'a> fn(&'a Res) -> (StatusCode, &'a HeaderMap);

struct Shared {
    limiter: Option<Limiter>,
    max_wait: Duration,
    timer: Timer,
    /// The servers that asked to wait, and until when.
    waits: Mutex<HashMap<Vec<u8>, Tick>>,
}

/// How long a request waits, unless the layer says otherwise.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// The longest wait that a server can ask for.
const MAX_ASKED: Duration = Duration::from_secs(86_400);

/// The most servers whose waits are remembered.
const MAX_SERVERS: usize = 10_000;

impl<B, R> Pace<Request<B>, Response<R>> {
    /// Paces requests by a limiter. Each host has its own quota.
    #[must_use]
    pub fn new(limiter: impl Into<Limiter>) -> Self {
        Self::of_client(host, |response| (response.status(), response.headers())).limiter(limiter)
    }

    /// Waits only as servers ask for.
    #[must_use]
    pub fn as_asked() -> Self {
        Self::of_client(host, |response| (response.status(), response.headers()))
    }
}

impl<Req, Res> Pace<Req, Res> {
    /// Makes a layer for the requests of any client: `target` returns the key of the server that a request goes to, and
    /// `head` the status and header fields of a response.
    ///
    /// With reqwest:
    ///
    /// ```
    /// use tallygate::Policy;
    /// use tallygate_tower::Pace;
    /// use tower::Layer;
    ///
    /// let policy = Policy::leaky_bucket(10).per_second().burst(50).build()?;
    /// let pace = Pace::of_client(
    ///     |request: &reqwest::Request| request.url().host_str().unwrap_or_default().into(),
    ///     |response: &reqwest::Response| (response.status(), response.headers()),
    /// );
    /// let client = pace.limiter(policy).layer(reqwest::Client::new());
    /// # Ok::<(), tallygate::PolicyError>(())
    /// ```
    #[must_use]
    pub fn of_client(target: fn(&Req) -> Vec<u8>, head: HeadOf<Res>) -> Self {
        let shared = Shared {
            limiter: None,
            max_wait: MAX_WAIT,
            timer: Timer::default(),
            waits: Mutex::default(),
        };
        Self { shared: Arc::new(shared), target, head, kind: PhantomData }
    }

    /// Sets the limiter.
    #[must_use]
    pub fn limiter(self, limiter: impl Into<Limiter>) -> Self {
        self.with(|shared| shared.limiter = Some(limiter.into()))
    }

    /// Sets how long a request waits at most. Default: 30 seconds.
    #[must_use]
    pub fn max_wait(self, max_wait: Duration) -> Self {
        self.with(|shared| shared.max_wait = max_wait)
    }

    /// Sets the clock that determines when waits end, for tests. Default: the system's clock.
    #[must_use]
    pub fn clock(self, clock: impl Alarm + Send + Sync + 'static) -> Self {
        self.with(|shared| shared.timer = Timer::new(clock))
    }

    fn with(mut self, change: impl FnOnce(&mut Shared)) -> Self {
        let mut shared = Shared {
            limiter: self.shared.limiter.clone(),
            max_wait: self.shared.max_wait,
            timer: self.shared.timer.clone(),
            waits: Mutex::default(),
        };
        change(&mut shared);
        self.shared = Arc::new(shared);
        self
    }
}

fn host<B>(request: &Request<B>) -> Vec<u8> {
    let authority = request.uri().authority().map(|authority| authority.as_str().as_bytes());
    let host = || request.headers().get(HOST).map(http::HeaderValue::as_bytes);
    authority.or_else(host).unwrap_or_default().to_ascii_lowercase()
}

impl<Req, Res> Clone for Pace<Req, Res> {
    fn clone(&self) -> Self {
        let Self { shared, target, head, kind } = self;
        Self { shared: shared.clone(), target: *target, head: *head, kind: *kind }
    }
}

impl<Req, Res> fmt::Debug for Pace<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pace")
            .field("limiter", &self.shared.limiter)
            .field("max_wait", &self.shared.max_wait)
            .finish_non_exhaustive()
    }
}

impl<S, Req, Res> Layer<S> for Pace<Req, Res> {
    type Service = Paced<S, Req, Res>;

    fn layer(&self, service: S) -> Paced<S, Req, Res> {
        Paced { service, pace: self.clone() }
    }
}

/// A client whose requests are paced: see [`Pace`].
#[derive(Debug)]
pub struct Paced<S, Req, Res> {
    service: S,
    pace: Pace<Req, Res>,
}

impl<S: Clone, Req, Res> Clone for Paced<S, Req, Res> {
    fn clone(&self) -> Self {
        Self { service: self.service.clone(), pace: self.pace.clone() }
    }
}

impl<S, Req, Res> Service<Req> for Paced<S, Req, Res>
where
    S: Service<Req, Response = Res, Error: Send, Future: Send> + Clone + Send + 'static,
    Req: Send + 'static,
    Res: 'static,
{
    type Response = Res;
    type Error = PaceError<S::Error>;
    type Future = Pin<Box<dyn Future<Output = Result<Res, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.service.poll_ready(context).map_err(PaceError::Service)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        // The service that is ready goes with the request; a clone may not be ready.
        let clone = self.service.clone();
        let mut service = std::mem::replace(&mut self.service, clone);
        let (shared, head) = (self.pace.shared.clone(), self.pace.head);
        let server = (self.pace.target)(&request);
        Box::pin(async move {
            shared.wait(&server).await?;
            let response = service.call(request).await.map_err(PaceError::Service)?;
            let (status, fields) = head(&response);
            shared.obey(server, status, fields);
            Ok(response)
        })
    }
}

impl Shared {
    /// Waits until a request to a server may leave, and charges it.
    async fn wait<E>(&self, server: &[u8]) -> Result<(), PaceError<E>> {
        let deadline = self.timer.after(self.max_wait);
        loop {
            self.sleep(self.asked_until(server), deadline).await?;
            let Some(limiter) = &self.limiter else { return Ok(()) };
            // It is reserved so that it can be returned if the delay is too long.
            let reserved = answer!(limiter.backend.reserve(Ask::new(server), self.max_wait));
            let charged = reserved.map_err(PaceError::Limiter)?;
            let decision = charged.checked.decision;
            let wait = if decision.allowed { Some(decision.delay) } else { decision.retry_after };
            let Some(wait) = wait else {
                return Err(PaceError::TooLong { wait: None, max_wait: self.max_wait });
            };
            let slept = self.sleep(self.timer.after(wait.as_duration()), deadline).await;
            match (slept, charged.reservation) {
                (Err(error), Some(mut reservation)) => {
                    let _ = answer!(limiter.backend.settle(&mut reservation, 0));
                    return Err(error);
                }
                (Err(error), None) => return Err(error),
                // The server may have asked to wait meanwhile, but the request has its turn and is charged.
                (Ok(()), Some(_)) => return self.sleep(self.asked_until(server), deadline).await,
                (Ok(()), None) => {}
            }
        }
    }

    /// Sleeps until a time, or fails at once if it is after the deadline.
    async fn sleep<E>(&self, until: Tick, deadline: Tick) -> Result<(), PaceError<E>> {
        if until > deadline {
            let now = self.timer.now();
            let wait = Ticks(until.0.saturating_sub(now.0).unsigned_abs()).as_duration();
            return Err(PaceError::TooLong { wait: Some(wait), max_wait: self.max_wait });
        }
        self.timer.sleep_until(until).await;
        Ok(())
    }

    /// Remembers how long a server asks to wait.
    fn obey(&self, server: Vec<u8>, status: StatusCode, fields: &HeaderMap) {
        let now = self.timer.now();
        let Some(wait) = instructions::wait(status, fields, now) else { return };
        let until = now.after(Ticks::from(wait.min(MAX_ASKED))).unwrap_or(now);
        let mut waits = self.waits();
        if waits.len() >= MAX_SERVERS {
            waits.retain(|_, until| *until > now);
        }
        if waits.len() < MAX_SERVERS {
            let known = waits.entry(server).or_insert(until);
            *known = until.max(*known);
        }
    }

    fn asked_until(&self, server: &[u8]) -> Tick {
        self.waits().get(server).copied().unwrap_or(Tick(i64::MIN))
    }

    fn waits(&self) -> MutexGuard<'_, HashMap<Vec<u8>, Tick>> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason for which an outgoing request has no response.
#[derive(Debug)]
#[non_exhaustive]
pub enum PaceError<E> {
    /// It would have to wait longer than it may. It was not sent.
    TooLong {
        /// How long it would have to wait; `None` if waiting does not help.
        wait: Option<Duration>,
        /// How long it may wait.
        max_wait: Duration,
    },
    /// The limiter has no decision. It was not sent.
    Limiter(LimiterError),
    /// The client failed.
    Service(E),
}

impl<E: fmt::Display> fmt::Display for PaceError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong { wait: Some(wait), max_wait } => {
                write!(
                    f,
                    "the request would have to wait {wait:?}, longer than the maximum of {max_wait:?}; retry later"
                )
            }
            Self::TooLong { wait: None, .. } => f.write_str("the limiter never allows the request"),
            Self::Limiter(error) => error.fmt(f),
            Self::Service(error) => error.fmt(f),
        }
    }
}

impl<E: std::error::Error + 'static> std::error::Error for PaceError<E> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::TooLong { .. } => None,
            Self::Limiter(error) => Some(error),
            Self::Service(error) => Some(error),
        }
    }
}
