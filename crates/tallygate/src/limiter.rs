//! The limiter: rules, a store, and whoever wants to know.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Policy, Source, Tick, Ticks, Timed};

use crate::clock::{Clock, SystemClock};
use crate::memory::{Capacity, MemoryStore, PolicyStore};
use crate::observer::{Event, NoObserver, Observer, notify};
use crate::reservation::{Reservation, Reserved, SettleError};
use crate::rules::Rules;
use crate::store::{MAX_KEY_BYTES, Store};
use crate::tiers::{Access, Override, Plan, Tier, Tiers, UnknownTier};

/// Decides for any number of clients, each under its own key.
///
/// It is shared by reference: put it into a `static`, an `Arc`, or your application's state.
///
/// ```
/// use tallygate::{Policy, RateLimiter};
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
pub struct RateLimiter<R: Rules = Policy, S = PolicyStore, O = NoObserver> {
    pub(crate) name: Arc<str>,
    pub(crate) rules: R,
    pub(crate) store: S,
    pub(crate) observer: O,
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
    /// use tallygate::{Capacity, ManualClock, Policy, PolicyStore, RateLimiter, Tick, Ticks};
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
        Self { name: policy.name().into(), rules: policy, store, observer: NoObserver }
    }
}

impl<A: Algorithm + Sync> RateLimiter<A, MemoryStore<A>> {
    /// A limiter in memory for an algorithm of one's own. `examples/own_algorithm.rs` has one.
    #[must_use]
    pub fn of_algorithm(name: impl Into<Arc<str>>, rule: A) -> Self {
        Self::in_store(name, rule, MemoryStore::new(Capacity::default(), SystemClock::new()))
    }
}

impl RateLimiter<Tiers, MemoryStore<Plan>> {
    /// A limiter in memory with [`Tiers`], whose rules can be changed while it serves.
    #[must_use]
    pub fn tiered(name: impl Into<Arc<str>>, tiers: Tiers) -> Self {
        Self::in_store(name, tiers, MemoryStore::new(Capacity::default(), SystemClock::new()))
    }
}

impl<R: Rules, S: Store<R::Rule>> RateLimiter<R, S> {
    /// A limiter of any rules (an algorithm, a policy, [`Tiers`]) on any store for them.
    #[must_use]
    pub fn in_store(name: impl Into<Arc<str>>, rules: R, store: S) -> Self {
        Self { name: name.into(), rules, store, observer: NoObserver }
    }
}

impl<S: Store<Plan>, O: Observer> RateLimiter<Tiers, S, O> {
    /// The same limiter for clients of a tier: the tier comes with the call. If the tier goes with a
    /// change of rules, its clients are without one.
    ///
    /// # Errors
    /// There is no tier of that name.
    pub fn tier(&self, name: &str) -> Result<RateLimiter<Tier<'_>, &S, &O>, UnknownTier> {
        let rules = self.rules.named(name)?;
        let (store, observer) = (&self.store, &self.observer);
        Ok(RateLimiter { name: self.name.clone(), rules, store, observer })
    }
}

impl<S: Store<Plan>, O: Observer> RateLimiter<Tiers, S, O> {
    /// Puts other rules in force: decisions that begin from now on are made under them, those that
    /// have begun are not disturbed. What clients have used stays used, and whoever waits is served by
    /// the new rules. Overrides of the rules ([`Tiers::overridden`]) change with them, all at once. The
    /// limiter keeps those that were set at run time and its resolver, whatever the others have.
    ///
    /// ```
    /// use tallygate::{Policy, RateLimiter, Tiers};
    ///
    /// let limiter =
    ///     RateLimiter::tiered("api", Tiers::new(Policy::token_bucket(2).per_minute().build()?));
    /// limiter.check_n("alice", 2)?;
    /// limiter.replace(&Tiers::new(Policy::sliding_window_log(5).per_hour().build()?));
    /// assert_eq!(limiter.check("alice")?.remaining, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn replace(&self, tiers: &Tiers) {
        self.rules.replace(tiers);
        self.store.rules_changed(None);
    }

    /// Gives a client something else than the rules do, for good or until a time by the store's clock
    /// (see [`now`](Self::now)). It outlasts [`replace`](Self::replace).
    ///
    /// Overrides are looked up in one hash map that is copied when it changes: thousands are no
    /// burden, millions belong into tiers.
    pub fn set_override(
        &self,
        key: impl AsRef<[u8]>,
        access: impl Into<Access>,
        until: Option<Tick>,
    ) {
        self.rules.set_override(key.as_ref(), &Override { access: access.into(), until });
        self.store.rules_changed(Some(key.as_ref()));
    }

    /// Takes back an override that was set at run time; says whether there was one. What the rules say
    /// is in force again.
    pub fn remove_override(&self, key: impl AsRef<[u8]>) -> bool {
        let was_there = self.rules.remove_override(key.as_ref());
        self.store.rules_changed(Some(key.as_ref()));
        was_there
    }

    /// All overrides that were set at run time and have not ended. Those that have are forgotten.
    /// [`Tiers::by_key`] tells those of the rules.
    #[must_use]
    pub fn overrides(&self) -> Vec<(Box<[u8]>, Override)> {
        self.rules.overrides(self.store.now())
    }
}

impl<R: Rules, S: Store<R::Rule>> RateLimiter<R, S> {
    /// The same limiter, with somebody who is told of every decision.
    #[must_use]
    pub fn observed_by<O: Observer>(self, observer: O) -> RateLimiter<R, S, O> {
        RateLimiter { name: self.name, rules: self.rules, store: self.store, observer }
    }
}

/// The verbs. How an answer comes is the store's: from memory a [`Result`], whose errors are a key that
/// is too long and a store that is full and refuses new keys.
impl<R: Rules, S: Store<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// May this client do this now? Uses 1 if so.
    ///
    /// While requests [wait](RateLimiter::until_ready) for the key, a check comes behind them and is denied. Its
    /// `retry_after` is then a lower bound: the request is not admitted earlier if the waiting requests stay, and
    /// may have to wait longer. It is exact behind requests of the same token bucket, GCRA or leaky bucket that
    /// earns at most one unit per tick, if all of them have the same rule and are served in time.
    #[inline]
    pub fn check<'a>(&'a self, key: impl AsRef<[u8]> + Send + 'a) -> S::Reply<'a, Decision> {
        self.check_key(key, 1, None)
    }

    /// [`check`](Self::check) at a time.
    #[inline]
    pub fn check_at<'a>(
        &'a self,
        key: impl AsRef<[u8]> + Send + 'a,
        now: Tick,
    ) -> S::Reply<'a, Decision> {
        self.check_key(key, 1, Some(now))
    }

    /// May this client use this much now? A cost of 0 looks, and uses nothing: it is allowed unless the
    /// client is in debt, in a penalty or blocked.
    #[inline]
    pub fn check_n<'a>(
        &'a self,
        key: impl AsRef<[u8]> + Send + 'a,
        cost: Cost,
    ) -> S::Reply<'a, Decision> {
        self.check_key(key, cost, None)
    }

    /// [`check_n`](Self::check_n) at a time.
    #[inline]
    pub fn check_n_at<'a>(
        &'a self,
        key: impl AsRef<[u8]> + Send + 'a,
        cost: Cost,
        now: Tick,
    ) -> S::Reply<'a, Decision> {
        self.check_key(key, cost, Some(now))
    }

    /// [`check`](Self::check), when yes or no will do: nothing is divided.
    #[inline]
    pub fn is_allowed<'a>(&'a self, key: impl AsRef<[u8]> + Send + 'a) -> S::Reply<'a, bool> {
        self.check_key(key, 1, None)
    }

    /// [`is_allowed`](Self::is_allowed) at a time.
    #[inline]
    pub fn is_allowed_at<'a>(
        &'a self,
        key: impl AsRef<[u8]> + Send + 'a,
        now: Tick,
    ) -> S::Reply<'a, bool> {
        self.check_key(key, 1, Some(now))
    }

    /// Decides for many keys as if one by one in order, but waits for their memory all at once.
    /// Ask for `bool` or for [`Decision`]. Of a key that is too long nobody is charged; if the store is
    /// full, those before it are.
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// let answers: Vec<bool> = limiter.check_many(&["alice", "bob", "alice"])?;
    /// assert_eq!(answers, [true, true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_many<'a, T: Answer>(
        &'a self,
        keys: &'a [impl AsRef<[u8]> + Sync],
    ) -> S::Reply<'a, Vec<T>> {
        self.apply_many(keys, None)
    }

    /// [`check_many`](Self::check_many) at a time.
    pub fn check_many_at<'a, T: Answer>(
        &'a self,
        keys: &'a [impl AsRef<[u8]> + Sync],
        now: Tick,
    ) -> S::Reply<'a, Vec<T>> {
        self.apply_many(keys, Some(now))
    }

    /// What a check of 1 would answer. Nothing is used, and no observer is told. Behind requests that wait for
    /// the key, `retry_after` is a lower bound, as for a [check](Self::check).
    ///
    /// Also `retry_after` is that of a check at this time. A client that was not asked yet under a policy since a change
    /// of tier or rules is under it from its first check on, not from a peek.
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// assert!(limiter.peek("alice")?.allowed && limiter.peek("alice")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn peek(&self, key: impl AsRef<[u8]>) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Peek(1), None)
    }

    /// [`peek`](Self::peek) at a time.
    pub fn peek_at(&self, key: impl AsRef<[u8]>, now: Tick) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Peek(1), Some(now))
    }

    /// What a check of a cost would answer.
    pub fn peek_n(&self, key: impl AsRef<[u8]>, cost: Cost) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Peek(cost), None)
    }

    /// [`peek_n`](Self::peek_n) at a time.
    pub fn peek_n_at(
        &self,
        key: impl AsRef<[u8]>,
        cost: Cost,
        now: Tick,
    ) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Peek(cost), Some(now))
    }

    /// Returns `cost` units to the client's quota and returns the resulting state.
    ///
    /// A refund never raises the quota above its capacity, and it only affects usage that still counts:
    /// refunding a request from an expired window has no effect. It does not know which request it is for,
    /// so it lowers the usage of every limit, also of a shadow limit that would have denied the request and
    /// has not charged it. Make it under the tier that the request was charged under. Under the policies of other
    /// tiers it returns no more than is used beyond what those policies allowed themselves. To return exactly what a request charged, [`reserve`](Self::reserve) it and
    /// [`cancel`](Self::cancel) the reservation.
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(5).per_hour().build()?);
    /// limiter.check_n("alice", 3)?;
    /// assert_eq!(limiter.refund("alice", 2)?.remaining, 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refund(&self, key: impl AsRef<[u8]>, cost: Cost) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Force(-i128::from(cost)), None)
    }

    /// [`refund`](Self::refund) at a time.
    pub fn refund_at(
        &self,
        key: impl AsRef<[u8]>,
        cost: Cost,
        now: Tick,
    ) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Force(-i128::from(cost)), Some(now))
    }

    /// Makes a client as it was before it was ever seen: without a penalty, and with as much as new clients start
    /// with (all, unless the policy says otherwise). Returns the resulting state.
    pub fn reset(&self, key: impl AsRef<[u8]>) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Reset, None)
    }

    /// [`reset`](Self::reset) at a time.
    pub fn reset_at(&self, key: impl AsRef<[u8]>, now: Tick) -> S::Reply<'_, Decision> {
        self.quietly(key.as_ref(), Op::Reset, Some(now))
    }

    /// Uses an estimate now, for a cost that will be known later; then [`settle`](Self::settle) or
    /// [`cancel`](Self::cancel) it. A reservation that is dropped, or not settled within its time to
    /// live, keeps the estimate charged.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1000).per_hour().build()?);
    /// let reserved = limiter.reserve("alice", 400, Duration::from_secs(60))?;
    /// let mut reservation = reserved.granted().expect("enough is left");
    /// let settled = limiter.settle(&mut reservation, 150)??;
    /// assert_eq!(settled.remaining, 850);
    /// assert!(limiter.settle(&mut reservation, 150).is_err()); // once is enough
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserve(
        &self,
        key: impl AsRef<[u8]>,
        estimate: Cost,
        time_to_live: impl Into<Ticks>,
    ) -> S::Reply<'_, Reserved> {
        self.reserve_key(key.as_ref(), estimate, time_to_live.into(), None)
    }

    /// [`reserve`](Self::reserve) at a time.
    pub fn reserve_at(
        &self,
        key: impl AsRef<[u8]>,
        estimate: Cost,
        time_to_live: impl Into<Ticks>,
        now: Tick,
    ) -> S::Reply<'_, Reserved> {
        self.reserve_key(key.as_ref(), estimate, time_to_live.into(), Some(now))
    }

    /// Replaces the estimate of a reservation by its actual cost, and returns the resulting state.
    ///
    /// If the actual cost is less than the estimate, the difference is returned as far as it still counts: a
    /// bucket's units that have not drained yet, the count of a window that has not passed, the
    /// reservation's own entry in a log. If it is more, the difference is charged, even into debt, which
    /// is bounded.
    ///
    /// A tier or a change of rules between the two calls makes no difference: the settlement is charged to the
    /// policies that the reservation was charged to.
    ///
    /// # Errors
    /// The reservation was settled before, it has expired, its client was reset meanwhile, or another limiter
    /// made it. Nothing changes.
    pub fn settle(
        &self,
        reservation: &mut Reservation,
        actual: Cost,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        self.settle_key(reservation, actual, None)
    }

    /// [`settle`](Self::settle) at a time.
    ///
    /// # Errors
    /// As there.
    pub fn settle_at(
        &self,
        reservation: &mut Reservation,
        actual: Cost,
        now: Tick,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        self.settle_key(reservation, actual, Some(now))
    }

    /// Settles a reservation at a cost of 0: returns all of its estimate that still counts.
    ///
    /// # Errors
    /// As for [`settle`](Self::settle). Nothing changes.
    pub fn cancel(
        &self,
        reservation: &mut Reservation,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        self.settle(reservation, 0)
    }

    /// [`cancel`](Self::cancel) at a time.
    ///
    /// # Errors
    /// As there.
    pub fn cancel_at(
        &self,
        reservation: &mut Reservation,
        now: Tick,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        self.settle_at(reservation, 0, now)
    }

    /// The time by the store's clock.
    pub fn now(&self) -> Tick {
        self.store.now()
    }

    /// Its name: that of the policy, where it has one.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The rules.
    pub const fn rules(&self) -> &R {
        &self.rules
    }

    /// The store.
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// An operation that is no request, of which nobody is told.
    fn quietly(&self, key: &[u8], op: Op, now: Option<Tick>) -> S::Reply<'_, Decision> {
        self.store.apply(self.rules.choose(key), key, op, now)
    }

    #[inline]
    fn check_key<'a, T: Answer>(
        &'a self,
        key: impl AsRef<[u8]> + Send + 'a,
        cost: Cost,
        now: Option<Tick>,
    ) -> S::Reply<'a, T> {
        self.check_under(self.rules.choose(key.as_ref()), key, cost, now)
    }

    #[inline]
    fn check_under<'a, T: Answer>(
        &'a self,
        rule: R::Chosen<'a>,
        key: impl AsRef<[u8]> + Send + 'a,
        cost: Cost,
        now: Option<Tick>,
    ) -> S::Reply<'a, T> {
        let op = Op::Check(cost);
        if !O::OBSERVES {
            return self.store.apply::<T>(rule, key.as_ref(), op, now);
        }
        let told = self.told();
        let reply = self.store.apply::<Timed>(rule.clone(), key.as_ref(), op, now);
        S::map(reply, move |Timed { decision, at }| {
            told.of(&*rule, key.as_ref(), cost, &decision, at);
            T::of_decision(decision, at)
        })
    }

    fn reserve_key(
        &self,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> S::Reply<'_, Reserved> {
        let key: Box<[u8]> = key.into();
        let rule = self.rules.choose(&key);
        let told = self.told();
        let reply = self.store.reserve(rule.clone(), &key, estimate, time_to_live, now);
        S::map(reply, move |charge| {
            let Timed { decision, at } = charge.timed;
            told.of(&*rule, &key, estimate, &decision, at);
            // A store that did not answer has charged nothing.
            let is_charged = rule.charges(at) && decision.source != Source::FailedOpen;
            let charged = if is_charged { estimate } else { 0 };
            Reserved::new(decision, Reservation::new(key, charged, charge.into(), time_to_live))
        })
    }

    fn settle_key(
        &self,
        reservation: &mut Reservation,
        actual: Cost,
        now: Option<Tick>,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        let time = now.unwrap_or_else(|| self.store.now());
        let change = reservation.change_to(actual, time)?;
        let (key, charge) = (reservation.key(), reservation.charge());
        let reply = self.store.settle(self.rules.choose(key), key, change, charge, now)?;
        reservation.mark_settled();
        Ok(reply)
    }

    fn apply_many<'a, T: Answer>(
        &'a self,
        keys: &'a [impl AsRef<[u8]> + Sync],
        now: Option<Tick>,
    ) -> S::Reply<'a, Vec<T>> {
        let Some(rule) = self.rules.same_for_all() else {
            if let Some(long) = keys.iter().find(|key| key.as_ref().len() > MAX_KEY_BYTES) {
                // Its error is that of all, and comes before anybody is charged.
                return S::map(self.check_key::<T>(long, 0, now), |_| Vec::new());
            }
            return S::gather(keys.iter().map(|key| (key.as_ref(), self.check_key(key, 1, now))));
        };
        if !O::OBSERVES {
            return self.store.check_many(rule, keys, 1, now);
        }
        let told = self.told();
        S::map(self.store.check_many::<Timed, _>(rule, keys, 1, now), move |decisions| {
            let each = keys.iter().zip(decisions);
            each.map(|(key, Timed { decision, at })| {
                told.of(rule, key.as_ref(), 1, &decision, at);
                T::of_decision(decision, at)
            })
            .collect()
        })
    }

    /// Tells whoever observes of a decision that was made outside: for stores that decide on several keys.
    pub fn observe(&self, rule: &R::Rule, key: &[u8], cost: Cost, decision: &Decision, at: Tick) {
        self.told().of(rule, key, cost, decision, at);
    }

    /// Whoever observes.
    pub(crate) fn told(&self) -> Told<'_, O> {
        Told { policy: &self.name, observer: &self.observer }
    }
}

/// Who is told of a limiter's decisions.
pub(crate) struct Told<'a, O> {
    policy: &'a str,
    observer: &'a O,
}

impl<O: Observer> Told<'_, O> {
    pub(crate) fn of<A: Algorithm>(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        decision: &Decision,
        at: Tick,
    ) {
        if !O::OBSERVES {
            return;
        }
        // Also the names are asked for in there: they come from the user's rule.
        notify(|| {
            let name = |limit: Option<usize>| limit.map(|limit| rule.limit_name(limit, at));
            let event = Event {
                policy: self.policy,
                key,
                cost,
                allowed: decision.allowed,
                refused_by: name(decision.refused_by),
                shadow_refused_by: name(decision.shadow_refused_by),
                source: decision.source,
            };
            self.observer.decided(&event);
        });
    }
}

impl<R: Rules, S: fmt::Debug, O> fmt::Debug for RateLimiter<R, S, O> {
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
/// use tallygate::{Policy, SingleLimiter};
///
/// let outgoing = SingleLimiter::new(Policy::leaky_bucket(10).per_second().build()?);
/// let first = outgoing.check();
/// let second = outgoing.check();
/// assert!(first.delay < second.delay); // wait that long, and the output is flat
/// # Ok::<(), tallygate::PolicyError>(())
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
        let decided = self.0.check_key(b"", cost, now);
        decided.unwrap_or_else(|error| unreachable!("{error}"))
    }
}
