//! The limiter: rules, a store and an observer.
//!
//! Every operation chooses the rule of the request and passes it to the store. The store finds the state of the key and
//! runs the algorithm on it.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Policy, Source, Tick, Ticks, Timed};

use crate::ask::{Ask, InvalidAsk, UnknownTier};
use crate::clock::{Clock, SystemClock};
use crate::memory::{Capacity, MemoryStore, PolicyStore, Sweep};
use crate::observer::{Event, NoObserver, Observer, notify};
use crate::reservation::{Actual, Reservation, Reserved, SettleError};
use crate::rule_source::RuleSource;
use crate::storage::{MAX_KEY_BYTES, Store};
use crate::table::Swept;
use crate::tiers::{Access, ClientRule, Override, OverrideEnd, Tiers};

/// Limits the requests of any number of clients, each with its own key.
///
/// Share it by reference: put it into a `static`, an `Arc`, or your application's state.
///
/// ```
/// use tallygate::{Policy, RateLimiter};
///
/// let limiter = RateLimiter::new(Policy::token_bucket(100).per_minute().burst(2).build()?);
/// assert!(limiter.check("alice")?.allowed);
/// assert!(limiter.check("alice")?.allowed);
/// let denied = limiter.check("alice")?;
/// assert!(!denied.allowed);
/// assert!(denied.retry_after.is_some_and(|wait| wait.as_duration().as_millis() <= 600));
/// assert!(limiter.is_allowed("bob")?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct RateLimiter<R: RuleSource = Policy, S = PolicyStore, O = NoObserver> {
    pub(crate) name: Arc<str>,
    pub(crate) rules: R,
    pub(crate) store: S,
    pub(crate) observer: O,
}

impl RateLimiter {
    /// Creates a limiter in memory for up to a million keys, with the system's clock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        let store = PolicyStore::new(&policy, Capacity::default(), SystemClock::new());
        Self::with_store(policy, store)
    }
}

impl<S: Store<Policy>> RateLimiter<Policy, S> {
    /// Creates a limiter on a store: in memory with another capacity or clock, in Redis, or your own.
    ///
    /// ```
    /// use tallygate::clock::ManualClock;
    /// use tallygate::store::{Capacity, PolicyStore};
    /// use tallygate::{Policy, RateLimiter, Tick, Ticks};
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
    /// Creates a limiter in memory for your own algorithm: see `examples/own_algorithm.rs`.
    #[must_use]
    pub fn of_algorithm(name: impl Into<Arc<str>>, rule: A) -> Self {
        Self::in_store(name, rule, MemoryStore::new(Capacity::default(), SystemClock::new()))
    }
}

/// A limiter in memory for one [`Policy`], with a clock and an observer of your choice.
///
/// Without parameters it is the type that [`RateLimiter::new`] returns.
pub type MemoryLimiter<C = SystemClock, O = NoObserver> = RateLimiter<Policy, PolicyStore<C>, O>;

/// A limiter in memory with [`Tiers`]: see [`RateLimiter::tiered`].
pub type TieredLimiter<C = SystemClock, O = NoObserver> =
    RateLimiter<Tiers, MemoryStore<ClientRule, C>, O>;

impl TieredLimiter {
    /// Creates a limiter in memory with [`Tiers`], whose rules can change while it is in use.
    #[must_use]
    pub fn tiered(name: impl Into<Arc<str>>, tiers: Tiers) -> Self {
        Self::in_store(name, tiers, MemoryStore::new(Capacity::default(), SystemClock::new()))
    }
}

impl<R: RuleSource, S: Store<R::Rule>> RateLimiter<R, S> {
    /// Creates a limiter of any rules (an algorithm, a policy, [`Tiers`]) on any store for them.
    #[must_use]
    pub fn in_store(name: impl Into<Arc<str>>, rules: R, store: S) -> Self {
        Self { name: name.into(), rules, store, observer: NoObserver }
    }
}

impl<R: RuleSource, S: Sweep<R::Rule>, O> RateLimiter<R, S, O> {
    /// Drops idle keys in the next `buckets` buckets of the store's table, of about three keys each.
    ///
    /// A key is idle if its state is fresh and it was not charged since the previous pass over the table began. Dropping
    /// it has no effect on decisions. New keys reuse the places of fresh keys by themselves, so sweeping is only needed
    /// if the number of keys ([`Usage`](crate::store::Usage)) is to follow the number of active clients.
    ///
    /// Call it regularly with as many buckets as fit the time that you have: a call locks one bucket at a time, visits
    /// some millions of buckets per second, and returns how many are left until the pass is complete. The next call then
    /// begins a new pass.
    ///
    /// ```
    /// use tallygate::clock::ManualClock;
    /// use tallygate::store::{Capacity, PolicyStore};
    /// use tallygate::{Policy, RateLimiter, Tick, Ticks};
    ///
    /// let clock = ManualClock::new(Tick(0));
    /// let policy = Policy::token_bucket(1).per(Ticks(10)).build()?;
    /// let store = PolicyStore::new(&policy, Capacity::default(), &clock);
    /// let limiter = RateLimiter::with_store(policy, store);
    /// limiter.check("alice")?;
    /// clock.advance(Ticks(10));
    ///
    /// while limiter.sweep(64).buckets_left > 0 {}
    /// assert_eq!(limiter.store().usage().keys, 0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn sweep(&self, buckets: usize) -> Swept {
        self.store.sweep(&self.rules.default_rule(), buckets)
    }
}

impl<S: Store<ClientRule>, O: Observer> RateLimiter<Tiers, S, O> {
    /// Replaces the rules. Decisions that begin from now on use the new rules.
    ///
    /// Clients keep what they have used, and waiting requests are served by the new rules. Overrides that belong to the
    /// rules ([`Tiers::overridden`]) change in the same step. The limiter keeps its resolver and the overrides that were
    /// set at run time.
    ///
    /// ```
    /// use tallygate::{Ask, Policy, RateLimiter, Tiers};
    ///
    /// let limiter =
    ///     RateLimiter::tiered("api", Tiers::new(Policy::token_bucket(2).per_minute().build()?));
    /// limiter.check(Ask::new("alice").cost(2))?;
    /// limiter.replace(&Tiers::new(Policy::sliding_window_log(5).per_hour().build()?));
    /// assert_eq!(limiter.check("alice")?.remaining, 2);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn replace(&self, tiers: &Tiers) {
        self.rules.replace(tiers);
        self.store.rules_changed(None);
    }

    /// Sets an exception for one client: for a [`Duration`](std::time::Duration), until a time by the store's clock
    /// (see [`now`](Self::now)), or with `None` until it is removed. [`replace`](Self::replace) does not change it.
    ///
    /// Overrides are in one hash map, which is copied when it changes. Use them for thousands of clients, and tiers for
    /// millions.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::tiers::Access;
    /// # use tallygate::{Policy, RateLimiter, Tiers};
    /// let limiter = RateLimiter::tiered("api", Tiers::new(Policy::gcra(1).per_hour().build()?));
    /// limiter.set_override("mallory", Access::Blocked, Duration::from_secs(3600));
    /// assert!(!limiter.check("mallory")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn set_override(
        &self,
        key: impl AsRef<[u8]>,
        access: impl Into<Access>,
        end: impl Into<OverrideEnd>,
    ) {
        let until = end.into().end(|| self.store.now());
        self.rules.set_override(key.as_ref(), &Override { access: access.into(), until });
        self.store.rules_changed(Some(key.as_ref()));
    }

    /// Removes an override that was set at run time. Returns whether there was one. The rules apply to the client again.
    pub fn remove_override(&self, key: impl AsRef<[u8]>) -> bool {
        let was_there = self.rules.remove_override(key.as_ref());
        self.store.rules_changed(Some(key.as_ref()));
        was_there
    }

    /// Returns the overrides that were set at run time and have not ended, and drops the others. [`Tiers::by_key`]
    /// returns the overrides of the rules.
    #[must_use]
    pub fn overrides(&self) -> Vec<(Box<[u8]>, Override)> {
        self.rules.overrides(self.store.now())
    }
}

impl<R: RuleSource, S: Store<R::Rule>> RateLimiter<R, S> {
    /// Returns the limiter with an observer that is notified of every decision. Several observers are a tuple or a
    /// [`Vec`].
    #[must_use]
    pub fn observed_by<O: Observer>(self, observer: O) -> RateLimiter<R, S, O> {
        RateLimiter { name: self.name, rules: self.rules, store: self.store, observer }
    }
}

/// The operations. The store determines how they reply: a memory store with a [`Result`], a store on a network with a
/// future.
impl<R: RuleSource, S: Store<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// Charges the cost if the limits allow it, and returns the decision.
    ///
    /// While requests [wait](RateLimiter::until_ready) for the key, a check is denied, because it comes after them. Its
    /// `retry_after` is then a lower bound: the request is not allowed earlier if the waiting requests stay, and may have
    /// to wait longer. The time is exact behind requests of the same token bucket, GCRA or leaky bucket that earns at most
    /// one unit per tick, if all of them have the same rule and are served in time.
    ///
    /// # Errors
    /// Fails if there is no decision. In memory that is a [`StoreError`](crate::StoreError): the key is too long, the tier
    /// is unknown, or the store is full and rejects new keys. Nothing is charged then. A denial is not an error.
    #[inline]
    pub fn check<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        self.decide(ask.into())
    }

    /// Does the same as [`check`](Self::check), and returns only whether the request is allowed. It is faster, because it
    /// needs no division.
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    #[inline]
    pub fn is_allowed<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, bool> {
        self.decide(ask.into())
    }

    /// Checks many keys in order. The result is the same as that of one [`check`](Self::check) after the other, in less
    /// time per key. The answers are `bool` or [`Decision`].
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// let answers: Vec<bool> = limiter.check_many(&["alice", "bob", "alice"])?;
    /// assert_eq!(answers, [true, true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does. If a key is too long or a tier is unknown, nothing is charged. If the store is
    /// full, the keys before that one are charged.
    pub fn check_many<'a, T: Answer, K: Sync>(&'a self, asks: &'a [K]) -> S::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        match self.rules.same_for_all() {
            Some(rule) => self.decide_many(rule, asks),
            None => self.decide_each(asks),
        }
    }

    /// Returns what a [check](Self::check) would return, and charges nothing. Observers are not notified.
    ///
    /// After a change of tier or rules, a client is under its new policy from the first check on. A peek does not count as
    /// a check.
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// assert!(limiter.peek("alice")?.allowed && limiter.peek("alice")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn peek<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        let ask = ask.into();
        self.apply(ask, Op::Peek(ask.cost))
    }

    /// Returns the cost to the client's quota and returns the resulting state.
    ///
    /// A refund never raises the quota above its capacity, and it only affects usage that still counts:
    /// refunding a request from an expired window has no effect. It counts as a refund of the client's newest
    /// requests: of these, it returns to a shadow limit only what that limit has charged.
    ///
    /// A store may drop a key with its full quota. So under a policy that
    /// [starts with less](crate::policy::LimitBuilder::starting_with), a refund that restores the full quota need not last: the
    /// next check may find what a new key starts with.
    ///
    /// Name the tier under which the request was charged. Under the policies of other tiers, a refund returns no more
    /// than is used beyond what those policies allowed themselves. To return exactly what a request charged,
    /// [`reserve`](Self::reserve) it and [`cancel`](Self::cancel) the reservation.
    ///
    /// ```
    /// # use tallygate::{Ask, Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(5).per_hour().build()?);
    /// limiter.check(Ask::new("alice").cost(3))?;
    /// assert_eq!(limiter.refund(Ask::new("alice").cost(2))?.remaining, 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn refund<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        let ask = ask.into();
        self.apply(ask, Op::Force(-i128::from(ask.cost)))
    }

    /// Forgets everything that the client has used, and its penalty. Returns the resulting state, which is that of a new
    /// client.
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn reset<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        self.apply(ask.into(), Op::Reset)
    }

    /// Carries out an operation, and calls `make` with the rule that decided, the decision and its time.
    ///
    /// Use it to report the limit that denied a request: rules can change, and a rule that is read afterwards may be
    /// another one. The operation has its own cost; the cost of the request is ignored. Observers are notified of a
    /// [check](Op::Check).
    ///
    /// ```
    /// # use tallygate::algorithm::{Algorithm as _, Op};
    /// # use tallygate::{Policy, RateLimiter};
    /// let (fast, slow) = (Policy::token_bucket(5).per_second(), Policy::token_bucket(1).per_hour());
    /// let policy = Policy::all_of("api", [fast.named("per second"), slow.named("per hour")])?;
    /// let limiter = RateLimiter::new(policy);
    /// limiter.check("alice")?;
    /// let name = limiter.decide_with("alice", Op::Check(1), |policy, decision, at| {
    ///     decision.denied_by.map(|limit| policy.limit_name(limit, at).to_owned())
    /// })?;
    /// assert_eq!(name.as_deref(), Some("per hour"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn decide_with<'a, T: Send + 'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        op: Op,
        make: impl FnOnce(&R::Rule, Decision, Tick) -> T + Send + 'a,
    ) -> S::Reply<'a, T> {
        let ask = ask.into();
        let rule = match self.rule(&ask) {
            Ok(rule) => rule,
            Err(unknown) => return S::fail(unknown.into()),
        };
        let notifier = self.notifier();
        self.store.apply_with(rule, ask.key, op, ask.at, move |rule, Timed { decision, at }| {
            if let Op::Check(cost) = op {
                notifier.decided(rule, ask.key, cost, &decision, at);
            }
            make(rule, decision, at)
        })
    }

    /// Charges an estimate for a request whose actual cost will be known later. [`settle`](Self::settle) or
    /// [`cancel`](Self::cancel) the reservation then.
    ///
    /// If the reservation is dropped or not settled within its time to live, the estimate stays charged.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::{Ask, Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1000).per_hour().build()?);
    /// let reserved = limiter.reserve(Ask::new("alice").cost(400), Duration::from_secs(60))?;
    /// let mut reservation = reserved.granted().expect("enough is left");
    /// let settled = limiter.settle(&mut reservation, 150)?;
    /// assert_eq!(settled.remaining, 850);
    /// assert!(limiter.settle(&mut reservation, 150).is_err()); // a reservation is settled once
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn reserve<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        time_to_live: impl Into<Ticks>,
    ) -> S::Reply<'a, Reserved> {
        self.reserve_with(ask, time_to_live, |_, _, reserved| reserved)
    }

    /// Does the same as [`reserve`](Self::reserve), and calls `make` with the rule that decided, the time and the result, as
    /// [`decide_with`](Self::decide_with) does.
    ///
    /// # Errors
    /// Fails as [`check`](Self::check) does.
    pub fn reserve_with<'a, T: Send + 'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        time_to_live: impl Into<Ticks>,
        make: impl FnOnce(&R::Rule, Tick, Reserved) -> T + Send + 'a,
    ) -> S::Reply<'a, T> {
        let (ask, time_to_live) = (ask.into(), time_to_live.into());
        let rule = match self.rule(&ask) {
            Ok(rule) => rule,
            Err(unknown) => return S::fail(unknown.into()),
        };
        let (key, tier) = (Box::<[u8]>::from(ask.key), ask.tier.map(Box::from));
        let estimate = ask.cost;
        let notifier = self.notifier();
        let reply = self.store.reserve(rule.clone(), &key, estimate, time_to_live, ask.at);
        S::map(reply, move |charge| {
            let Timed { decision, at } = charge.timed;
            notifier.decided(&*rule, &key, estimate, &decision, at);
            // A store that was unavailable has charged nothing.
            let is_charged = rule.charges(at) && decision.source != Source::FailedOpen;
            let charged = if is_charged { estimate } else { 0 };
            let reservation = Reservation::new((key, tier), charged, charge.into(), time_to_live);
            make(&*rule, at, Reserved::new(decision, reservation))
        })
    }

    /// Replaces the estimate of a reservation by its actual cost, and returns the resulting state. The cost is a
    /// number, or an [`Actual`] with a time.
    ///
    /// If the actual cost is less than the estimate, the difference is returned as far as it still counts: units of a
    /// bucket that have not drained, the count of a window that has not ended, the reservation's own entry in a log. If
    /// the actual cost is more, the difference is charged, even into debt, which is bounded.
    ///
    /// The settlement changes the policies that the reservation was charged to, even if the rules have changed meanwhile.
    /// The returned state is that of the tier that the reservation was made under.
    ///
    /// # Errors
    /// Fails with a [`SettleError`] if the reservation was settled before, if it has expired, if its client was reset
    /// meanwhile, or if another limiter made it. Nothing changes then. Otherwise it fails as [`check`](Self::check) does.
    pub fn settle(
        &self,
        reservation: &mut Reservation,
        actual: impl Into<Actual>,
    ) -> S::Reply<'_, Decision> {
        let Actual { cost, at } = actual.into();
        match self.try_settle(reservation, cost, at) {
            Ok(reply) => {
                reservation.mark_settled();
                reply
            }
            Err(error) => S::fail(error.into()),
        }
    }

    fn try_settle(
        &self,
        reservation: &Reservation,
        cost: Cost,
        at: Option<Tick>,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        let change = reservation.change_to(cost, at.unwrap_or_else(|| self.store.now()))?;
        let rule = self.rule_by_now(&reservation.ask());
        self.store.settle(rule, reservation.key(), change, reservation.charge(), at)
    }

    /// Settles a reservation at a cost of 0: returns all of its estimate that still counts.
    ///
    /// # Errors
    /// Fails as [`settle`](Self::settle) does.
    pub fn cancel(&self, reservation: &mut Reservation) -> S::Reply<'_, Decision> {
        self.settle(reservation, 0)
    }

    /// Returns the time by the store's clock.
    pub fn now(&self) -> Tick {
        self.store.now()
    }

    /// Returns the name of the limiter. By default it is the name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the rules.
    pub const fn rules(&self) -> &R {
        &self.rules
    }

    /// Returns the store.
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Notifies the observer of a decision that the limiter did not make itself: for stores that decide on several keys
    /// at once.
    pub fn observe(&self, rule: &R::Rule, key: &[u8], cost: Cost, decision: &Decision, at: Tick) {
        self.notifier().decided(rule, key, cost, decision, at);
    }

    /// Returns the rule of a request: for stores that decide on several keys at once.
    ///
    /// # Errors
    /// Fails if the `Ask` names an unknown tier.
    #[inline]
    pub fn rule(&self, ask: &Ask<'_>) -> Result<R::Ref<'_>, UnknownTier> {
        match ask.tier {
            None => Ok(self.rules.choose(ask.key)),
            Some(tier) => self.rules.choose_in(tier, ask.key),
        }
    }

    /// Returns the current rule of a request. If its tier no longer exists, the request counts as one without a tier.
    pub(crate) fn rule_by_now(&self, ask: &Ask<'_>) -> R::Ref<'_> {
        self.rule(ask).unwrap_or_else(|_| self.rules.choose(ask.key))
    }

    /// Carries out an operation that is not a check, so observers are not notified.
    fn apply<'a>(&'a self, ask: Ask<'a>, op: Op) -> S::Reply<'a, Decision> {
        match self.rule(&ask) {
            Ok(rule) => self.store.apply(rule, ask.key, op, ask.at),
            Err(unknown) => S::fail(unknown.into()),
        }
    }

    #[inline]
    fn decide<'a, T: Answer>(&'a self, ask: Ask<'a>) -> S::Reply<'a, T> {
        match self.rule(&ask) {
            Ok(rule) => self.decide_under(rule, ask),
            Err(unknown) => S::fail(unknown.into()),
        }
    }

    #[inline]
    fn decide_under<'a, T: Answer>(&'a self, rule: R::Ref<'a>, ask: Ask<'a>) -> S::Reply<'a, T> {
        let op = Op::Check(ask.cost);
        if !self.observer.observes() {
            return self.store.apply::<T>(rule, ask.key, op, ask.at);
        }
        let notifier = self.notifier();
        self.store.apply_with(rule, ask.key, op, ask.at, move |rule, Timed { decision, at }| {
            notifier.decided(rule, ask.key, ask.cost, &decision, at);
            T::from_decision(decision, at)
        })
    }

    /// Decides requests that all have the same rule.
    fn decide_many<'a, T: Answer, K: Sync>(
        &'a self,
        rule: &'a R::Rule,
        asks: &'a [K],
    ) -> S::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let with_tier =
            asks.iter().find_map(|ask| ask.into().tier.map(|tier| (tier, ask.into().key)));
        if let Some((tier, key)) = with_tier {
            if let Err(unknown) = self.rules.choose_in(tier, key) {
                return S::fail(unknown.into());
            }
        }
        if !self.observer.observes() {
            return self.store.check_many(rule, asks);
        }
        let notifier = self.notifier();
        S::map(self.store.check_many::<Timed, K>(rule, asks), move |decisions| {
            let each = asks.iter().zip(decisions);
            each.map(|(ask, Timed { decision, at })| {
                let ask: Ask<'_> = ask.into();
                notifier.decided(rule, ask.key, ask.cost, &decision, at);
                T::from_decision(decision, at)
            })
            .collect()
        })
    }

    /// Decides requests that have different rules. Invalid requests are found before anything is charged.
    fn decide_each<'a, T: Answer, K: Sync>(&'a self, asks: &'a [K]) -> S::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let mut rules = Vec::with_capacity(asks.len());
        for ask in asks.iter().map(Into::<Ask<'a>>::into) {
            let bytes = ask.key.len();
            if bytes > MAX_KEY_BYTES {
                return S::fail(InvalidAsk::KeyTooLong { bytes });
            }
            match self.rule(&ask) {
                Ok(rule) => rules.push(rule),
                Err(unknown) => return S::fail(unknown.into()),
            }
        }
        S::gather(rules.into_iter().zip(asks).map(|(rule, ask)| {
            let ask: Ask<'a> = ask.into();
            (ask.key, self.decide_under(rule, ask))
        }))
    }

    pub(crate) const fn notifier(&self) -> Notifier<'_, O> {
        Notifier { policy: &self.name, observer: &self.observer }
    }
}

/// Notifies the observer of a limiter.
pub(crate) struct Notifier<'a, O> {
    policy: &'a Arc<str>,
    observer: &'a O,
}

impl<O: Observer> Notifier<'_, O> {
    pub(crate) fn decided<A: Algorithm>(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        decision: &Decision,
        at: Tick,
    ) {
        if !self.observer.observes() {
            return;
        }
        // Reading the names may panic as well: they come from the user's rule.
        notify(|| {
            let name = |limit: Option<usize>| limit.map(|limit| rule.limit_name(limit, at));
            let event = Event {
                policy: self.policy,
                key,
                cost,
                at,
                allowed: decision.allowed,
                denied_by: name(decision.denied_by),
                shadow_denied_by: name(decision.shadow_denied_by),
                source: decision.source,
            };
            self.observer.decided(&event);
        });
    }
}

impl<R: RuleSource, S: fmt::Debug, O> fmt::Debug for RateLimiter<R, S, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimiter")
            .field("name", &self.name)
            .field("store", &self.store)
            .finish_non_exhaustive()
    }
}

/// Limits one client without a key, such as a process that limits itself.
///
/// ```
/// use tallygate::{Policy, SingleLimiter};
///
/// let outgoing = SingleLimiter::new(Policy::leaky_bucket(10).per_second().build()?);
/// let first = outgoing.check();
/// let second = outgoing.check();
/// assert!(first.delay < second.delay); // a caller that waits this long sends at an even rate
/// # Ok::<(), tallygate::PolicyError>(())
/// ```
#[derive(Debug)]
pub struct SingleLimiter<C: Clock = SystemClock>(RateLimiter<Policy, PolicyStore<C>>);

impl SingleLimiter {
    /// Creates a limiter with the system's clock.
    #[must_use]
    pub fn new(policy: Policy) -> Self {
        Self::with_clock(policy, SystemClock::new())
    }
}

impl<C: Clock> SingleLimiter<C> {
    /// Creates a limiter with another clock.
    #[must_use]
    pub fn with_clock(policy: Policy, clock: C) -> Self {
        let store = PolicyStore::new(&policy, Capacity::of(1), clock);
        Self(RateLimiter::with_store(policy, store))
    }

    /// Charges one unit if the limits allow it, and returns the decision.
    pub fn check(&self) -> Decision {
        self.decide(1)
    }

    /// Charges the cost if the limits allow it, and returns the decision.
    pub fn check_n(&self, cost: Cost) -> Decision {
        self.decide(cost)
    }

    /// Does the same as [`check`](Self::check), and returns only whether the request is allowed.
    pub fn is_allowed(&self) -> bool {
        self.decide(1)
    }

    #[inline]
    fn decide<T: Answer>(&self, cost: Cost) -> T {
        // The only key is short and always has a place, and the store was made for the policy.
        let decided = self.0.decide(Ask::new(b"").cost(cost));
        decided.unwrap_or_else(|error| unreachable!("{error}"))
    }
}
