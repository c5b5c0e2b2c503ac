//! A limiter of any kind as one type: [`Limiter`].
//!
//! Policies, tiers, stores, clocks and observers are type parameters of [`RateLimiter`]. The layer needs only four
//! operations, so it uses them through a trait object. A store in memory answers at once, without a future.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use tallygate::algorithm::Op;
use tallygate::headers::{NamedLimits, Values};
use tallygate::observer::Observer;
use tallygate::reservation::{Reservation, Reserved, SettleError};
use tallygate::store::{MAX_KEY_BYTES, Store};
use tallygate::tiers::{Access, ClientRule, RuleSource, UnknownTier};
use tallygate::{
    Ask, Cost, Decision, Limit, Policy, RateLimiter, StoreError, Tick, TieredLimiter, Tiers,
};

use crate::few::Few;

/// A limiter on any store, which all clones share.
///
/// It is made from a [`Policy`] (kept in memory), from a [`RateLimiter`] of any kind, or from an [`Arc`] of one if the
/// application also uses the limiter directly. With the feature `redis`, that includes limiters on Redis and limiters
/// whose store is chosen by a URL ([`Limiter::open`]). The type has no parameters, so a struct can name it:
///
/// ```
/// use tallygate::{Policy, Tiers};
/// use tallygate_tower::Limiter;
///
/// struct App {
///     api: Limiter,
///     login: Limiter,
/// }
///
/// let app = App {
///     api: Limiter::tiered("api", Tiers::new(Policy::token_bucket(100).per_minute().build()?)),
///     login: Policy::sliding_window_log(5).per_minute().named("login").build()?.into(),
/// };
/// assert_eq!((app.api.name(), app.login.name()), ("api", "login"));
/// # Ok::<(), tallygate::PolicyError>(())
/// ```
#[derive(Clone)]
pub struct Limiter {
    pub(crate) backend: Arc<dyn Backend>,
}

impl Limiter {
    /// Makes a limiter in memory with [`Tiers`].
    #[must_use]
    pub fn tiered(name: impl Into<Arc<str>>, tiers: Tiers) -> Self {
        TieredLimiter::tiered(name, tiers).into()
    }

    /// Makes a limiter on the store at a URL: `memory`, or an address of Redis as [`tallygate_redis::open`] takes it. In
    /// Redis, its keys contain its name.
    ///
    /// While Redis is unavailable, requests are allowed. To deny them instead, make the limiter from a store:
    ///
    /// ```
    /// use tallygate::{Policy, RateLimiter, Tiers};
    /// use tallygate_redis::{OnFailure, open};
    /// use tallygate_tower::Limiter;
    ///
    /// let tiers = Tiers::new(Policy::sliding_window_log(5).per_minute().build()?);
    /// let store = open("redis://127.0.0.1:6379")?.store("login").on_failure(OnFailure::Deny);
    /// let login: Limiter = RateLimiter::in_store("login", tiers, store).into();
    /// # assert_eq!(login.name(), "login");
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails if the URL is neither.
    #[cfg(feature = "redis")]
    pub fn open(
        url: &str,
        name: &str,
        tiers: Tiers,
    ) -> Result<Self, tallygate_redis::AddressError> {
        Ok(tallygate_redis::open(url)?.limiter(name, tiers).into())
    }

    /// Returns the name of the limiter, which header fields and log events show.
    #[must_use]
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    /// Returns the limits that a decision was made under.
    pub(crate) fn limits<'a>(&'a self, checked: &'a Checked) -> &'a [Limit] {
        let fixed = || self.backend.fixed().map(|fixed| &fixed.access);
        checked.access.as_ref().or_else(fixed).map_or(&[], Access::limits)
    }

    /// Returns the limits that a decision was made under, for header fields.
    pub(crate) fn named_limits<'a>(&'a self, checked: &'a Checked) -> NamedLimits<'a> {
        match (&checked.access, self.backend.fixed()) {
            (None, Some(fixed)) => {
                NamedLimits::from((self.name(), fixed.access.limits())).with_values(&fixed.values)
            }
            (Some(access), _) => (self.name(), access.limits()).into(),
            (None, None) => self.name().into(),
        }
    }
}

impl fmt::Debug for Limiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Limiter").field(&self.name()).finish()
    }
}

/// Keeps the clients in the memory of this process.
impl From<Policy> for Limiter {
    fn from(policy: Policy) -> Self {
        RateLimiter::new(policy).into()
    }
}

impl<R, S, O> From<RateLimiter<R, S, O>> for Limiter
where
    R: RuleSource,
    Arc<RateLimiter<R, S, O>>: Into<Self>,
{
    fn from(limiter: RateLimiter<R, S, O>) -> Self {
        Arc::new(limiter).into()
    }
}

impl<R, S, O> From<Arc<RateLimiter<R, S, O>>> for Limiter
where
    R: Rules + Send + Sync + 'static,
    S: Store<R::Rule> + Send + Sync + 'static,
    O: Observer + Send + 'static,
    for<'a> S::Reply<'a, bool>: IntoPending<'a, bool>,
    for<'a> S::Reply<'a, Charged>: IntoPending<'a, Charged>,
    for<'a> S::Reply<'a, Decision>: IntoPending<'a, Decision>,
{
    fn from(limiter: Arc<RateLimiter<R, S, O>>) -> Self {
        let fixed = limiter.rules().fixed().map(|access| {
            let values = NamedLimits::from((limiter.name(), access.limits())).values();
            FixedAccess { access, values }
        });
        Self { backend: Arc::new(Typed { limiter, fixed }) }
    }
}

/// The rules whose policy the layer can show in header fields: a [`Policy`], or [`Tiers`].
pub trait Rules: RuleSource {
    /// Returns the access of all clients, if it is the same for all and never changes.
    fn fixed(&self) -> Option<Access>;

    /// Returns the access of the client at a time; `None` if it is [fixed](Self::fixed).
    fn access(rule: &Self::Rule, at: Tick) -> Option<Access>;
}

impl Rules for Policy {
    fn fixed(&self) -> Option<Access> {
        Some(self.clone().into())
    }

    fn access(_: &Self, _: Tick) -> Option<Access> {
        None
    }
}

impl Rules for Tiers {
    fn fixed(&self) -> Option<Access> {
        None
    }

    fn access(rule: &ClientRule, at: Tick) -> Option<Access> {
        Some(rule.access(at).clone())
    }
}

/// A decision, and the access that it was made under.
#[derive(Clone, Debug)]
pub(crate) struct Checked {
    pub(crate) decision: Decision,
    /// `None` if all clients of the limiter always have the same access.
    pub(crate) access: Option<Access>,
}

/// The access of all clients, if it is the same for all and never changes.
pub(crate) struct FixedAccess {
    pub(crate) access: Access,
    /// The values of its header fields.
    pub(crate) values: Values,
}

/// A decision, and the reservation if it is allowed.
#[derive(Debug)]
pub struct Charged {
    pub(crate) checked: Checked,
    pub(crate) reservation: Option<Reservation>,
}

/// The operations that the layer needs of a limiter.
pub(crate) trait Backend: Send + Sync {
    fn name(&self) -> &str;

    /// Returns whether its answers are always ready at once, as those of memory are.
    fn is_immediate(&self) -> bool;

    fn fixed(&self) -> Option<&FixedAccess>;

    /// Decides on a request of a rule, adds the decision to the list, and returns whether the request is allowed. A
    /// decision is large, so it is written where it stays.
    fn check<'a>(
        &'a self,
        ask: Ask<'a>,
        rule: usize,
        list: &'a mut Few<(usize, Checked)>,
    ) -> Pending<'a, bool>;

    fn reserve<'a>(&'a self, ask: Ask<'a>, time_to_live: Duration) -> Pending<'a, Charged>;

    fn settle<'a>(&'a self, reservation: &mut Reservation, actual: Cost) -> Pending<'a, Decision>;

    /// Settles a reservation without waiting for the result: at once in memory, in a task on Redis.
    fn settle_in_background(self: Arc<Self>, reservation: Reservation, actual: Cost);
}

struct Typed<R: RuleSource, S, O> {
    limiter: Arc<RateLimiter<R, S, O>>,
    fixed: Option<FixedAccess>,
}

impl<R, S, O> Backend for Typed<R, S, O>
where
    R: Rules + Send + Sync + 'static,
    S: Store<R::Rule> + Send + Sync + 'static,
    O: Observer + Send + 'static,
    for<'a> S::Reply<'a, bool>: IntoPending<'a, bool>,
    for<'a> S::Reply<'a, Charged>: IntoPending<'a, Charged>,
    for<'a> S::Reply<'a, Decision>: IntoPending<'a, Decision>,
{
    fn name(&self) -> &str {
        self.limiter.name()
    }

    fn is_immediate(&self) -> bool {
        <S::Reply<'static, bool>>::IS_IMMEDIATE
    }

    fn fixed(&self) -> Option<&FixedAccess> {
        self.fixed.as_ref()
    }

    fn check<'a>(
        &'a self,
        ask: Ask<'a>,
        rule: usize,
        list: &'a mut Few<(usize, Checked)>,
    ) -> Pending<'a, bool> {
        let add = move |limits: &R::Rule, decision: Decision, at| {
            list.push((rule, Checked { decision, access: R::access(limits, at) }));
            decision.allowed
        };
        self.limiter.decide_with(ask, Op::Check(ask.cost), add).into_pending()
    }

    fn reserve<'a>(&'a self, ask: Ask<'a>, time_to_live: Duration) -> Pending<'a, Charged> {
        let make = |rule: &R::Rule, at, reserved: Reserved| {
            let checked = Checked { decision: *reserved.decision(), access: R::access(rule, at) };
            Charged { checked, reservation: reserved.granted() }
        };
        self.limiter.reserve_with(ask, time_to_live, make).into_pending()
    }

    fn settle<'a>(&'a self, reservation: &mut Reservation, actual: Cost) -> Pending<'a, Decision> {
        self.limiter.settle(reservation, actual).into_pending()
    }

    fn settle_in_background(self: Arc<Self>, mut reservation: Reservation, actual: Cost) {
        let settling = async move {
            if let Err(error) = answer!(self.settle(&mut reservation, actual)) {
                let policy = self.name();
                tracing::warn!(policy, %error, "settlement failed; the estimate stays charged");
            }
        };
        if <S::Reply<'static, bool>>::IS_IMMEDIATE {
            ready_now(settling);
        } else {
            spawn(settling);
        }
    }
}

/// Runs a future that waits for nothing.
///
/// # Panics
/// Panics if the future waits.
pub(crate) fn ready_now<F: Future>(future: F) -> F::Output {
    let mut context = Context::from_waker(Waker::noop());
    match pin!(future).poll(&mut context) {
        Poll::Ready(output) => output,
        Poll::Pending => unreachable!("a store in memory answers at once"),
    }
}

/// Runs a future in a task. The store on Redis needs tokio, so there is a runtime; without one, the future is dropped.
#[cfg(feature = "redis")]
fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    match tokio::runtime::Handle::try_current() {
        Ok(runtime) => drop(runtime.spawn(future)),
        Err(_) => tracing::warn!(
            "settlement failed, because there is no tokio runtime; the estimate stays charged"
        ),
    }
}

#[cfg(not(feature = "redis"))]
fn spawn(future: impl Future<Output = ()> + Send + 'static) {
    drop(future);
}

/// An answer that is ready or pending.
#[derive(Debug)]
pub enum Pending<'a, T> {
    /// The answer.
    Ready(Result<T, LimiterError>),
    /// The pending answer of a remote store.
    Later(PendingAnswer<'a, T>),
}

/// Waits for an answer that may be ready. It is not a future that is awaited in both cases, because a future would keep a
/// copy of the ready answer.
macro_rules! answer {
    ($pending:expr) => {
        match $pending {
            $crate::limiter::Pending::Ready(answer) => answer,
            $crate::limiter::Pending::Later(later) => later.await,
        }
    };
}
pub(crate) use answer;

/// A future of an answer.
pub struct PendingAnswer<'a, T>(Pin<Box<dyn Future<Output = Result<T, LimiterError>> + Send + 'a>>);

impl<T> fmt::Debug for PendingAnswer<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PendingAnswer")
    }
}

impl<T> Future for PendingAnswer<'_, T> {
    type Output = Result<T, LimiterError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(context)
    }
}

/// A reply of a store, as the layer takes it.
pub trait IntoPending<'a, T> {
    /// Whether all such replies are ready.
    const IS_IMMEDIATE: bool;

    /// Converts the reply.
    fn into_pending(self) -> Pending<'a, T>;
}

impl<'a, T> IntoPending<'a, T> for Result<T, StoreError> {
    const IS_IMMEDIATE: bool = true;

    fn into_pending(self) -> Pending<'a, T> {
        Pending::Ready(self.map_err(LimiterError::from))
    }
}

#[cfg(feature = "redis")]
impl<'a, T: Send + 'a> IntoPending<'a, T> for tallygate_redis::Reply<'a, T> {
    const IS_IMMEDIATE: bool = false;

    fn into_pending(self) -> Pending<'a, T> {
        let reply = async move { self.await.map_err(LimiterError::from) };
        Pending::Later(PendingAnswer(Box::pin(reply)))
    }
}

/// A store that was chosen at run time may be Redis.
#[cfg(feature = "redis")]
impl<'a, T: Send + 'a> IntoPending<'a, T> for tallygate_redis::AnyReply<'a, T> {
    const IS_IMMEDIATE: bool = false;

    fn into_pending(self) -> Pending<'a, T> {
        match self {
            Self::Ready(Some(answer)) => Pending::Ready(answer.map_err(LimiterError::from)),
            Self::Ready(None) => unreachable!("a reply is converted before it is polled"),
            Self::Later(reply) => reply.into_pending(),
        }
    }
}

/// The reason for which there is no decision. A denial is a decision, and so is the result of a failure setting of the store.
#[derive(Debug)]
#[non_exhaustive]
pub enum LimiterError {
    /// The key is longer than [`MAX_KEY_BYTES`](tallygate::store::MAX_KEY_BYTES).
    KeyTooLong {
        /// The length of the key.
        bytes: usize,
    },
    /// The rule names a tier that the limiter does not have.
    UnknownTier(Box<UnknownTier>),
    /// The reservation cannot be settled.
    Settle(SettleError),
    /// The store failed.
    Store(Box<dyn StdError + Send + Sync>),
}

impl fmt::Display for LimiterError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::KeyTooLong { bytes } => {
                write!(f, "the key has {bytes} bytes; use at most {MAX_KEY_BYTES}, or a hash of it")
            }
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::Settle(error) => error.fmt(f),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl StdError for LimiterError {}

impl From<StoreError> for LimiterError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            StoreError::UnknownTier(unknown) => Self::UnknownTier(unknown),
            StoreError::Settle(error) => Self::Settle(error),
            error => Self::Store(Box::new(error)),
        }
    }
}

#[cfg(feature = "redis")]
impl From<tallygate_redis::Error> for LimiterError {
    fn from(error: tallygate_redis::Error) -> Self {
        use tallygate_redis::Error;
        match error {
            Error::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            Error::UnknownTier(unknown) => Self::UnknownTier(unknown),
            Error::Settle(error) => Self::Settle(error),
            error => Self::Store(Box::new(error)),
        }
    }
}
