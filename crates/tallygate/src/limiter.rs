//! The limiter: rules, a store and an observer.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Algorithm, Answer, Cost, Decision, Op, Policy, Source, Tick, Ticks, Timed};

use crate::ask::{Ask, InvalidAsk, UnknownTier};
use crate::clock::{Clock, SystemClock};
use crate::memory::{Capacity, MemoryStore, PolicyStore};
use crate::observer::{Event, NoObserver, Observer, notify};
use crate::reservation::{Actual, Reservation, Reserved, SettleError};
use crate::rules::Rules;
use crate::store::{MAX_KEY_BYTES, Store};
use crate::tiers::{Access, Override, Plan, Tiers};

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

/// A limiter in memory with [`Tiers`]: see [`RateLimiter::tiered`].
pub type TieredLimiter<C = SystemClock, O = NoObserver> =
    RateLimiter<Tiers, MemoryStore<Plan, C>, O>;

impl TieredLimiter {
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
    /// Puts other rules in force: decisions that begin from now on are made under them, those that
    /// have begun are not disturbed. What clients have used stays used, and whoever waits is served by
    /// the new rules. Overrides of the rules ([`Tiers::overridden`]) change with them, all at once. The
    /// limiter keeps those that were set at run time and its resolver, whatever the others have.
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
    /// Returns the same limiter with an observer that is notified of every decision. A tuple or a [`Vec`] of
    /// observers is one too.
    #[must_use]
    pub fn observed_by<O: Observer>(self, observer: O) -> RateLimiter<R, S, O> {
        RateLimiter { name: self.name, rules: self.rules, store: self.store, observer }
    }
}

/// The verbs. How an answer comes is the store's: from memory a [`Result`], whose errors are a key that
/// is too long and a store that is full and refuses new keys.
impl<R: Rules, S: Store<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// May this client do this now? Charges the cost if so.
    ///
    /// While requests [wait](RateLimiter::until_ready) for the key, a check comes behind them and is denied. Its
    /// `retry_after` is then a lower bound: the request is not admitted earlier if the waiting requests stay, and
    /// may have to wait longer. It is exact behind requests of the same token bucket, GCRA or leaky bucket that
    /// earns at most one unit per tick, if all of them have the same rule and are served in time.
    #[inline]
    pub fn check<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        self.decide(ask.into())
    }

    /// Answers a [`check`](Self::check) with yes or no. It is faster, because nothing is divided.
    #[inline]
    pub fn is_allowed<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, bool> {
        self.decide(ask.into())
    }

    /// Decides many questions as if one by one in order, but waits for their memory all at once. The answers are
    /// `bool` or [`Decision`].
    ///
    /// If a key is too long or a tier is not known, nothing is charged. If the store is full, the questions before
    /// that are charged.
    ///
    /// ```
    /// # use tallygate::{Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1).per_hour().build()?);
    /// let answers: Vec<bool> = limiter.check_many(&["alice", "bob", "alice"])?;
    /// assert_eq!(answers, [true, true, false]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn check_many<'a, T: Answer, K: Sync>(&'a self, asks: &'a [K]) -> S::Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        match self.rules.same_for_all() {
            Some(rule) => self.decide_many(rule, asks),
            None => self.decide_each(asks),
        }
    }

    /// Returns what a check would, and charges nothing. No observer is notified. Behind requests that wait for
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
    pub fn peek<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        let ask = ask.into();
        self.apply(ask, Op::Peek(ask.cost))
    }

    /// Returns the cost to the client's quota and returns the resulting state.
    ///
    /// A refund never raises the quota above its capacity, and it only affects usage that still counts:
    /// refunding a request from an expired window has no effect. It does not know which request it is for,
    /// so it lowers the usage of every limit, also of a shadow limit that would have denied the request and
    /// has not charged it. Make it under the tier that the request was charged under. Under the policies of other
    /// tiers it returns no more than is used beyond what those policies allowed themselves. To return exactly what
    /// a request charged, [`reserve`](Self::reserve) it and [`cancel`](Self::cancel) the reservation.
    ///
    /// ```
    /// # use tallygate::{Ask, Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(5).per_hour().build()?);
    /// limiter.check(Ask::new("alice").cost(3))?;
    /// assert_eq!(limiter.refund(Ask::new("alice").cost(2))?.remaining, 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn refund<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        let ask = ask.into();
        self.apply(ask, Op::Force(-i128::from(ask.cost)))
    }

    /// Makes a client as it was before it was ever seen: without a penalty, and with as much as new clients start
    /// with (all, unless the policy says otherwise). Returns the resulting state.
    pub fn reset<'a>(&'a self, ask: impl Into<Ask<'a>>) -> S::Reply<'a, Decision> {
        self.apply(ask.into(), Op::Reset)
    }

    /// Carries out an operation and makes something of the decision and of the rule that made it, such as the name of the
    /// limit that denied. A rule that is read afterwards may be another one, because rules change.
    ///
    /// The operation has its own cost; that of the question is not read. Observers are notified of a
    /// [check](Op::Check).
    ///
    /// ```
    /// # use tallygate::{Algorithm as _, Op, Policy, RateLimiter};
    /// let (fast, slow) = (Policy::token_bucket(5).per_second(), Policy::token_bucket(1).per_hour());
    /// let policy = Policy::all_of("api", [fast.named("per second"), slow.named("per hour")])?;
    /// let limiter = RateLimiter::new(policy);
    /// limiter.check("alice")?;
    /// let name = limiter.decide_with("alice", Op::Check(1), |policy, decision, at| {
    ///     decision.refused_by.map(|limit| policy.limit_name(limit, at).to_owned())
    /// })?;
    /// assert_eq!(name.as_deref(), Some("per hour"));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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

    /// Charges the cost as an estimate, for a request whose cost will be known later; then [`settle`](Self::settle)
    /// or [`cancel`](Self::cancel) it. A reservation that is dropped, or not settled within its time to
    /// live, keeps the estimate charged.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::{Ask, Policy, RateLimiter};
    /// let limiter = RateLimiter::new(Policy::token_bucket(1000).per_hour().build()?);
    /// let reserved = limiter.reserve(Ask::new("alice").cost(400), Duration::from_secs(60))?;
    /// let mut reservation = reserved.granted().expect("enough is left");
    /// let settled = limiter.settle(&mut reservation, 150)??;
    /// assert_eq!(settled.remaining, 850);
    /// assert!(limiter.settle(&mut reservation, 150).is_err()); // once is enough
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn reserve<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        time_to_live: impl Into<Ticks>,
    ) -> S::Reply<'a, Reserved> {
        self.reserve_with(ask, time_to_live, |_, _, reserved| reserved)
    }

    /// [Reserves](Self::reserve), and makes something of the result and of the rule that decided, as
    /// [`decide_with`](Self::decide_with) does.
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
            // A store that did not answer has charged nothing.
            let is_charged = rule.charges(at) && decision.source != Source::FailedOpen;
            let charged = if is_charged { estimate } else { 0 };
            let reservation = Reservation::new((key, tier), charged, charge.into(), time_to_live);
            make(&*rule, at, Reserved::new(decision, reservation))
        })
    }

    /// Replaces the estimate of a reservation by its actual cost, and returns the resulting state. The cost is a
    /// number, or an [`Actual`] with a time.
    ///
    /// If the actual cost is less than the estimate, the difference is returned as far as it still counts: a
    /// bucket's units that have not drained yet, the count of a window that has not passed, the
    /// reservation's own entry in a log. If it is more, the difference is charged, even into debt, which
    /// is bounded.
    ///
    /// A change of rules between the two calls makes no difference: the settlement is charged to the policies that
    /// the reservation was charged to. The state is that of the tier that the reservation was made under.
    ///
    /// # Errors
    /// The reservation was settled before, it has expired, its client was reset meanwhile, or another limiter
    /// made it. Nothing changes.
    pub fn settle(
        &self,
        reservation: &mut Reservation,
        actual: impl Into<Actual>,
    ) -> Result<S::Reply<'_, Decision>, SettleError> {
        let Actual { cost, at } = actual.into();
        let change = reservation.change_to(cost, at.unwrap_or_else(|| self.store.now()))?;
        let rule = self.rule_by_now(&reservation.ask());
        let reply = self.store.settle(rule, reservation.key(), change, reservation.charge(), at)?;
        reservation.mark_settled();
        Ok(reply)
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

    /// Notifies the observer of a decision that was made outside: for stores that decide on several keys.
    pub fn observe(&self, rule: &R::Rule, key: &[u8], cost: Cost, decision: &Decision, at: Tick) {
        self.notifier().decided(rule, key, cost, decision, at);
    }

    /// Returns the rule that a question is decided by: for stores that decide on several keys.
    ///
    /// # Errors
    /// The question names a tier that is not known.
    #[inline]
    pub fn rule(&self, ask: &Ask<'_>) -> Result<R::Chosen<'_>, UnknownTier> {
        match ask.tier {
            None => Ok(self.rules.choose(ask.key)),
            Some(tier) => self.rules.choose_in(tier, ask.key),
        }
    }

    /// Returns the rule that a question is decided by now. If its tier has gone meanwhile, it is asked without one.
    pub(crate) fn rule_by_now(&self, ask: &Ask<'_>) -> R::Chosen<'_> {
        self.rule(ask).unwrap_or_else(|_| self.rules.choose(ask.key))
    }

    /// Carries out an operation that is not a request, so observers are not notified.
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
    fn decide_under<'a, T: Answer>(&'a self, rule: R::Chosen<'a>, ask: Ask<'a>) -> S::Reply<'a, T> {
        let op = Op::Check(ask.cost);
        if !self.observer.observes() {
            return self.store.apply::<T>(rule, ask.key, op, ask.at);
        }
        let notifier = self.notifier();
        self.store.apply_with(rule, ask.key, op, ask.at, move |rule, Timed { decision, at }| {
            notifier.decided(rule, ask.key, ask.cost, &decision, at);
            T::of_decision(decision, at)
        })
    }

    /// Decides many questions that have the same rule.
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
        if let Some((tier, key)) = with_tier
            && let Err(unknown) = self.rules.choose_in(tier, key)
        {
            return S::fail(unknown.into());
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
                T::of_decision(decision, at)
            })
            .collect()
        })
    }

    /// Decides many questions each by its own rule. What would fail one is found before any is charged.
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
        // The names are read in there as well: they come from the user's rule.
        notify(|| {
            let name = |limit: Option<usize>| limit.map(|limit| rule.limit_name(limit, at));
            let event = Event {
                policy: self.policy,
                key,
                cost,
                at,
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

    /// May this be done now? Charges 1 if so.
    pub fn check(&self) -> Decision {
        self.decide(1)
    }

    /// May this much be used now?
    pub fn check_n(&self, cost: Cost) -> Decision {
        self.decide(cost)
    }

    /// Answers a [`check`](Self::check) with yes or no.
    pub fn is_allowed(&self) -> bool {
        self.decide(1)
    }

    #[inline]
    fn decide<T: Answer>(&self, cost: Cost) -> T {
        // Its one key is short, has its place, and the store was made for the policy.
        let decided = self.0.decide(Ask::new(b"").cost(cost));
        decided.unwrap_or_else(|error| unreachable!("{error}"))
    }
}
