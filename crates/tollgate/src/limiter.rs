//! The limiter: a rule, a store, and whoever wants to know.

use std::fmt;

use tollgate_core::{Algorithm, Answer, Cost, Decision, Op, Policy, Tick};

use crate::clock::{Clock, SystemClock};
use crate::memory::{Capacity, MemoryStore, PolicyStore};
use crate::observer::{Event, NoObserver, Observer, Source, notify};
use crate::store::Store;

/// Decides for any number of clients, each under its own key.
///
/// It is shared by reference: put it into a `static`, an `Arc`, or your application's state.
///
/// ```
/// use tollgate::{Policy, RateLimiter};
///
/// let limiter = RateLimiter::new(Policy::token_bucket(100).per_minute().burst(2).build()?);
/// assert!(limiter.check("alice")?.allowed);
/// assert!(limiter.check("alice")?.allowed);
/// let refused = limiter.check("alice")?;
/// assert!(!refused.allowed);
/// assert!(refused.retry_after.is_some_and(|wait| wait.as_duration().as_millis() <= 600));
/// assert!(limiter.is_allowed("bob")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RateLimiter<A: Algorithm = Policy, S = PolicyStore, O = NoObserver> {
    name: Box<str>,
    rule: A,
    store: S,
    observer: O,
}

impl RateLimiter {
    /// A limiter in memory, for a million keys, by the system's clock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let store = PolicyStore::new(&policy, Capacity::default(), SystemClock::new());
        Self::with_store(policy, store)
    }
}

impl<S: Store<Policy>> RateLimiter<Policy, S> {
    /// A limiter on a store of one's choice.
    ///
    /// ```
    /// use tollgate::{Capacity, ManualClock, Policy, PolicyStore, RateLimiter, Tick, Ticks};
    ///
    /// let clock = ManualClock::new(Tick(0));
    /// let policy = Policy::fixed_window(1).per(Ticks(10)).build()?;
    /// let store = PolicyStore::new(&policy, Capacity::of(1000), &clock);
    /// let limiter = RateLimiter::with_store(policy, store);
    /// assert!(limiter.is_allowed("alice")?);
    /// assert!(!limiter.is_allowed("alice")?);
    /// clock.advance(Ticks(10));
    /// assert!(limiter.is_allowed("alice")?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn with_store(policy: Policy, store: S) -> Self {
        Self { name: policy.name().into(), rule: policy, store, observer: NoObserver }
    }
}

impl<A: Algorithm> RateLimiter<A, MemoryStore<A>> {
    /// A limiter in memory for an algorithm of one's own. `examples/own_algorithm.rs` has one.
    #[must_use]
    pub fn of_algorithm(name: impl Into<Box<str>>, rule: A) -> Self {
        let store = MemoryStore::new(Capacity::default(), SystemClock::new());
        Self { name: name.into(), rule, store, observer: NoObserver }
    }
}

impl<A: Algorithm, C: Clock> RateLimiter<A, MemoryStore<A, C>> {
    /// The same on a store of one's choice.
    #[must_use]
    pub fn of_algorithm_in(name: impl Into<Box<str>>, rule: A, store: MemoryStore<A, C>) -> Self {
        Self { name: name.into(), rule, store, observer: NoObserver }
    }
}

impl<A: Algorithm, S: Store<A>> RateLimiter<A, S> {
    /// The same limiter, with somebody who is told of every decision.
    #[must_use]
    pub fn observed_by<O: Observer>(self, observer: O) -> RateLimiter<A, S, O> {
        RateLimiter { name: self.name, rule: self.rule, store: self.store, observer }
    }
}

impl<A: Algorithm, S: Store<A>, O: Observer> RateLimiter<A, S, O> {
    /// May this client do this now? Uses 1 if so.
    #[inline]
    pub fn check(&self, key: impl AsRef<[u8]>) -> S::Reply<Decision> {
        self.apply(key.as_ref(), 1, None)
    }

    /// [`check`](Self::check) at a time.
    #[inline]
    pub fn check_at(&self, key: impl AsRef<[u8]>, now: Tick) -> S::Reply<Decision> {
        self.apply(key.as_ref(), 1, Some(now))
    }

    /// May this client use this much now? A cost of 0 looks, and uses nothing.
    #[inline]
    pub fn check_n(&self, key: impl AsRef<[u8]>, cost: Cost) -> S::Reply<Decision> {
        self.apply(key.as_ref(), cost, None)
    }

    /// [`check_n`](Self::check_n) at a time.
    #[inline]
    pub fn check_n_at(&self, key: impl AsRef<[u8]>, cost: Cost, now: Tick) -> S::Reply<Decision> {
        self.apply(key.as_ref(), cost, Some(now))
    }

    /// [`check`](Self::check), when yes or no will do: nothing is divided.
    #[inline]
    pub fn is_allowed(&self, key: impl AsRef<[u8]>) -> S::Reply<bool> {
        self.apply(key.as_ref(), 1, None)
    }

    /// [`is_allowed`](Self::is_allowed) at a time.
    #[inline]
    pub fn is_allowed_at(&self, key: impl AsRef<[u8]>, now: Tick) -> S::Reply<bool> {
        self.apply(key.as_ref(), 1, Some(now))
    }

    /// Decides for many keys as if one by one in order, but waits for their memory all at once.
    /// Ask for `bool` or for [`Decision`].
    ///
    /// ```
    /// # use tollgate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// let answers: Vec<bool> = limiter.check_many(&["alice", "bob", "alice"])?;
    /// assert_eq!(answers, [true, true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_many<T: Answer>(&self, keys: &[impl AsRef<[u8]>]) -> S::Reply<Vec<T>> {
        self.apply_many(keys, None)
    }

    /// [`check_many`](Self::check_many) at a time.
    pub fn check_many_at<T: Answer>(
        &self,
        keys: &[impl AsRef<[u8]>],
        now: Tick,
    ) -> S::Reply<Vec<T>> {
        self.apply_many(keys, Some(now))
    }

    /// The name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The store.
    pub const fn store(&self) -> &S {
        &self.store
    }

    #[inline]
    fn apply<T: Answer>(&self, key: &[u8], cost: Cost, now: Option<Tick>) -> S::Reply<T> {
        let reply = self.store.apply::<T>(&self.rule, key, Op::Check(cost), now);
        if !O::OBSERVES {
            return reply;
        }
        S::inspect(reply, |answer| self.tell(key, cost, answer))
    }

    fn apply_many<T: Answer>(
        &self,
        keys: &[impl AsRef<[u8]>],
        now: Option<Tick>,
    ) -> S::Reply<Vec<T>> {
        let reply = self.store.check_many::<T, _>(&self.rule, keys, 1, now);
        if !O::OBSERVES {
            return reply;
        }
        S::inspect(reply, |answers| {
            for (key, answer) in keys.iter().zip(answers) {
                self.tell(key.as_ref(), 1, answer);
            }
        })
    }

    fn tell(&self, key: &[u8], cost: Cost, answer: &impl Answer) {
        let allowed = answer.is_allowed();
        let event = Event { policy: &self.name, key, cost, allowed, source: Source::Store };
        notify(&self.observer, &event);
    }
}

impl<A: Algorithm, S: fmt::Debug, O> fmt::Debug for RateLimiter<A, S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter")
            .field("name", &self.name)
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// Decides for one client that needs no name: a process that limits itself.
///
/// ```
/// use tollgate::{Policy, SingleLimiter};
///
/// let outgoing = SingleLimiter::new(Policy::leaky_bucket(10).per_second().build()?);
/// let first = outgoing.check();
/// let second = outgoing.check();
/// assert!(first.delay < second.delay); // wait that long, and the output is flat
/// # Ok::<(), tollgate::PolicyError>(())
/// ```
#[derive(Debug)]
pub struct SingleLimiter<C: Clock = SystemClock>(RateLimiter<Policy, PolicyStore<C>>);

impl SingleLimiter {
    /// By the system's clock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self::with_clock(policy, SystemClock::new())
    }
}

impl<C: Clock> SingleLimiter<C> {
    /// By any clock.
    #[must_use]
    pub fn with_clock(policy: Policy, clock: C) -> Self {
        let store = PolicyStore::new(&policy, Capacity::of(1), clock);
        Self(RateLimiter::with_store(policy, store))
    }

    /// May this be done now? Uses 1 if so.
    pub fn check(&self) -> Decision {
        self.decide(1, None)
    }

    /// [`check`](Self::check) at a time.
    pub fn check_at(&self, now: Tick) -> Decision {
        self.decide(1, Some(now))
    }

    /// May this much be used now?
    pub fn check_n(&self, cost: Cost) -> Decision {
        self.decide(cost, None)
    }

    /// [`check_n`](Self::check_n) at a time.
    pub fn check_n_at(&self, cost: Cost, now: Tick) -> Decision {
        self.decide(cost, Some(now))
    }

    /// [`check`](Self::check), when yes or no will do.
    pub fn is_allowed(&self) -> bool {
        self.decide(1, None)
    }

    /// [`is_allowed`](Self::is_allowed) at a time.
    pub fn is_allowed_at(&self, now: Tick) -> bool {
        self.decide(1, Some(now))
    }

    #[inline]
    fn decide<T: Answer>(&self, cost: Cost, now: Option<Tick>) -> T {
        // Its one key is short, has its place, and the store was made for the policy.
        let decided = self.0.apply(b"", cost, now);
        decided.unwrap_or_else(|error| unreachable!("{error}"))
    }
}
