//! The policies in force and their store. Every surface sends its requests here.
//!
//! A surface translates its protocol to a request and the answer back; the limiters of the policies decide. The memory
//! store answers at once, Redis answers later. [`GateReply`] is either, so that a pipeline of requests to memory costs
//! no more than its decisions.

mod cell;
mod counts;
mod hot;
mod remembered;
mod reservations;
mod suggest;
mod throttle;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arc_swap::ArcSwap;
use tallygate::algorithm::Op;
use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, MAX_KEY_BYTES, MemoryStore};
use tallygate::tiers::{Access, ClientRule, UnknownTier};
use tallygate::{Cost, Decision, Limit, RateLimiter, StoreError, Tick, Ticks};
use tallygate_redis::{AnyLimiter, AnyReply, AnyStore, JointAsk, Leases, Redis, Stores};

use crate::config::{CL_THROTTLE, Config, EnvoyConfig, KeySource, Limits, PolicyConfig};
use crate::metrics::{Figures, Format, Metrics, PolicyFigures, PolicyMetrics, PolicyRules};
use crate::turn::off_worker;

use counts::DecisionCounter;
pub(crate) use hot::{HotClient, HotClients};
use remembered::RestoredPolicy;
pub(crate) use remembered::RestoredStores;
use reservations::Reservations;
pub(crate) use reservations::{ReservationId, ReservationScope, SettleFailure};
use suggest::Suggestions;
use throttle::Throttle;
pub(crate) use throttle::{ThrottleArguments, ThrottleError};

/// The most items of an `all` that take less than a millisecond. It cannot pause, because it holds the locks of all its
/// keys.
const QUICK_ALL: usize = 64;

/// The policies in force and their store.
pub(crate) struct Gate {
    policies: ArcSwap<Policies>,
    /// The limits per client, and whether `CL.THROTTLE` is enabled.
    limits: ArcSwap<(Limits, bool)>,
    /// The upper bound of memory, in bytes, by the configuration in force.
    memory_bound: AtomicU64,
    stores: Stores,
    throttle: Throttle,
    /// Counts the decisions of `CL.THROTTLE` like those of a policy.
    throttled: DecisionCounter,
    reservations: Reservations,
    pub(crate) hot: Arc<HotClients>,
    suggestions: Suggestions,
    pub(crate) metrics: Metrics,
}

/// The policies of one configuration. They are replaced together, so that a decision sees one configuration.
#[derive(Default)]
pub(crate) struct Policies {
    by_name: HashMap<Arc<str>, Arc<ServedPolicy>, foldhash::fast::RandomState>,
    /// The rules of Envoy's rate limit service. Their policies are among the others.
    pub(crate) envoy: Option<Arc<EnvoyConfig>>,
}

impl Policies {
    pub(crate) fn get(&self, name: &str) -> Option<&Arc<ServedPolicy>> {
        self.by_name.get(name)
    }
}

/// A policy in force.
pub(crate) struct ServedPolicy {
    pub(crate) name: Arc<str>,
    pub(crate) limiter: Arc<Limiter>,
    metrics: Arc<PolicyMetrics>,
    pub(crate) cost: Cost,
    pub(crate) key: KeySource,
    /// The length of the IPv6 prefix that identifies a client.
    pub(crate) ipv6_prefix: u8,
}

/// A table of the memory store.
pub(crate) enum Table {
    Policy(Arc<ServedPolicy>),
    /// The table of `CL.THROTTLE`.
    Throttle,
}

impl Table {
    /// Drops idle keys in the next buckets of the table. Returns how many buckets the pass has not visited yet.
    pub(crate) fn sweep(&self, gate: &Gate, buckets: usize) -> usize {
        match self {
            Self::Policy(entry) => {
                let rule = ClientRule::of(entry.limiter.rules().base());
                let store = entry.limiter.store().memory();
                store.map_or(0, |store| store.sweep(&rule, buckets).buckets_left)
            }
            Self::Throttle => gate.throttle.sweep(buckets),
        }
    }
}

/// The limiter of a policy. It outlives configuration changes, so that usage is not lost.
pub(crate) type Limiter = AnyLimiter<DecisionCounter>;

/// A request to the gate.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GateRequest<'a> {
    pub(crate) policy: &'a str,
    pub(crate) key: &'a [u8],
    /// The default is the cost of the policy.
    pub(crate) cost: Option<Cost>,
    pub(crate) tier: Option<&'a str>,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Check,
    Peek,
    Refund,
    Reset,
}

/// A decision and the rule that made it. The rule may change later, so an answer takes all that it says from here.
#[derive(Clone, Copy)]
pub(crate) struct RuledDecision<'a> {
    pub(crate) rule: &'a ClientRule,
    pub(crate) decision: Decision,
    /// The time of the decision.
    pub(crate) at: Tick,
}

/// A decision, its policy, and details of the rule that made it.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) entry: Arc<ServedPolicy>,
    pub(crate) decision: Decision,
    /// The access of the client, by the rule that decided.
    pub(crate) access: Access,
}

/// The decision of several requests that are charged together.
pub(crate) struct JointDecision {
    pub(crate) decision: Decision,
    /// The index of the request that was denied.
    pub(crate) denied: Option<usize>,
    /// The policy of the request that was denied; if none was, of the first request.
    pub(crate) entry: Arc<ServedPolicy>,
}

/// Why the gate has no decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum GateError {
    UnknownPolicy {
        name: Box<str>,
        nearest: Option<Arc<str>>,
    },
    UnknownTier(UnknownTier),
    KeyTooLong {
        bytes: usize,
    },
    TooManyReservations {
        scope: ReservationScope,
    },
    /// A reservation of nothing would use a slot for nothing.
    NothingToReserve,
    /// The time to live of a reservation is out of range.
    TimeToLive {
        given_ms: u64,
        longest_ms: u64,
    },
    /// A check of several keys has none, or too many.
    Items {
        given: usize,
        most: usize,
    },
    /// The store is unavailable or failed.
    Store(Box<str>),
}

/// An answer that is ready, or a future of one.
pub(crate) enum GateReply<T> {
    Now(Result<T, GateError>),
    Later(Pin<Box<dyn Future<Output = Result<T, GateError>> + Send>>),
}

impl<T> GateReply<T> {
    pub(crate) async fn answer(self) -> Result<T, GateError> {
        match self {
            Self::Now(answer) => answer,
            Self::Later(answer) => answer.await,
        }
    }
}

impl Gate {
    /// Creates a gate with the keys of a snapshot.
    pub(crate) fn new(
        config: &Config,
        stores: Stores,
        metrics: Metrics,
        mut remembered: RestoredStores,
    ) -> Self {
        let throttle = match &stores {
            Stores::Memory(capacity) => Throttle::in_memory(*capacity, remembered.throttle.take()),
            Stores::Redis(redis) => Throttle::in_redis(redis),
        };
        let hot = Arc::new(HotClients::default());
        let throttled = DecisionCounter::new(CL_THROTTLE.into(), hot.clone());
        let gate = Self {
            policies: ArcSwap::default(),
            limits: ArcSwap::from_pointee((config.limits, config.cl_throttle)),
            memory_bound: AtomicU64::new(0),
            stores,
            throttle,
            throttled,
            reservations: Reservations::default(),
            hot,
            suggestions: Suggestions::default(),
            metrics,
        };
        gate.put_all(config, remembered);
        gate
    }

    /// Puts a configuration in force, each policy with its overrides in one step. Usage and overrides that were set at
    /// run time are kept.
    pub(crate) fn put_in_force(&self, config: &Config) {
        self.put_all(config, RestoredStores::default());
    }

    fn put_all(&self, config: &Config, mut remembered: RestoredStores) {
        self.limits.store(Arc::new((config.limits, config.cl_throttle)));
        let max_keys = match &self.stores {
            Stores::Memory(capacity) => Some(capacity.max_keys),
            Stores::Redis(_) => None,
        };
        self.memory_bound.store(config.memory_bound(max_keys), Ordering::Relaxed);
        let old = self.policies.load();
        let new = config.policies.iter().map(|(name, policy)| {
            let old = old.get(name).map(|entry| &**entry);
            let entry = self.entry(name, policy, old, remembered.policies.remove(&**name));
            (name.clone(), Arc::new(entry))
        });
        let new = Policies { by_name: new.collect(), envoy: config.envoy.clone() };
        self.policies.store(Arc::new(new));
    }

    fn entry(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        old: Option<&ServedPolicy>,
        remembered: Option<RestoredPolicy>,
    ) -> ServedPolicy {
        let (limiter, metrics) = match old {
            Some(old) => {
                old.limiter.replace(&policy.tiers);
                (old.limiter.clone(), old.metrics.clone())
            }
            None => {
                let counter = DecisionCounter::new(name.clone(), self.hot.clone());
                let metrics = counter.metrics();
                (Arc::new(self.limiter(name, policy, counter, remembered)), metrics)
            }
        };
        // Only Redis has settings for outages, leases and the deny cache.
        if let Some(store) = limiter.store().redis() {
            store.set_on_failure(policy.on_failure);
            store.set_leases(policy.lease.map(|life| Leases::default().life(life)));
            store.set_deny_cache(policy.deny_cache);
        }
        ServedPolicy {
            name: name.clone(),
            limiter,
            metrics,
            cost: policy.cost,
            key: policy.key.clone(),
            ipv6_prefix: policy.ipv6_prefix,
        }
    }

    fn limiter(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        counter: DecisionCounter,
        remembered: Option<RestoredPolicy>,
    ) -> Limiter {
        let (store, overrides) = match remembered {
            Some(RestoredPolicy { store, overrides }) => (store.into(), overrides),
            None => (self.store(name, policy), Vec::new()),
        };
        let limiter = RateLimiter::in_store(name.clone(), policy.tiers.copy(), store);
        for (key, set) in overrides {
            limiter.set_override(key, set.access, set.until);
        }
        limiter.observed_by(counter)
    }

    fn store(&self, name: &str, policy: &PolicyConfig) -> AnyStore {
        match &self.stores {
            Stores::Memory(_) if policy.has_one_key => {
                MemoryStore::new(Capacity::of(1), SystemClock::new()).into()
            }
            stores => stores.store(name),
        }
    }

    /// Returns leased units to the store before the server exits, so that other servers can use them.
    pub(crate) async fn give_back_leases(&self) {
        for entry in self.policies() {
            if let Some(store) = entry.limiter.store().redis() {
                store.give_back_leases().await;
            }
        }
    }

    /// Returns a policy by its name.
    pub(crate) fn policy(&self, name: &str) -> Result<Arc<ServedPolicy>, GateError> {
        let policies = self.policies.load();
        policies.get(name).cloned().ok_or_else(|| self.unknown_policy(name, &policies))
    }

    #[cold]
    fn unknown_policy(&self, name: &str, policies: &Policies) -> GateError {
        let nearest = self.suggestions.nearest(name, policies.by_name.keys()).cloned();
        GateError::UnknownPolicy { name: name.into(), nearest }
    }

    /// Returns the policies in force, for a decision that needs several of them.
    pub(crate) fn in_force(&self) -> Arc<Policies> {
        self.policies.load_full()
    }

    /// Returns all policies, sorted by name.
    pub(crate) fn policies(&self) -> Vec<Arc<ServedPolicy>> {
        let mut all: Vec<_> = self.policies.load().by_name.values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// Returns the tables of the memory store, one per policy and one for `CL.THROTTLE`.
    pub(crate) fn tables(&self) -> Vec<Table> {
        match &self.stores {
            Stores::Memory(_) => {
                let policies = self.policies().into_iter().map(Table::Policy);
                policies.chain([Table::Throttle]).collect()
            }
            Stores::Redis(_) => Vec::new(),
        }
    }

    /// Returns the stores.
    pub(crate) const fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Returns the limits per client in force.
    pub(crate) fn limits(&self) -> Limits {
        self.limits.load().0
    }

    /// Returns all metrics in a text format.
    pub(crate) fn render_metrics(&self, buffer_bytes: usize, format: Format) -> String {
        let mut policies: Vec<_> = self.policies().iter().map(|entry| entry.figures()).collect();
        policies.push(PolicyFigures {
            policy: CL_THROTTLE.into(),
            metrics: self.throttled.metrics(),
            usage: self.throttle.usage(),
            rules: PolicyRules::OfRequests { algorithm: "gcra" },
        });
        let figures = Figures {
            memory_bound: self.memory_bound.load(Ordering::Relaxed),
            buffer_bytes,
            policies,
            reservations_open: self.reservations.open(),
            store: self.stores.redis().map(Redis::counts),
        };
        self.metrics.render(figures, format)
    }

    /// Decides a `CL.THROTTLE`, whose limits come with the request. Fails if they are invalid.
    pub(crate) fn throttle(
        self: &Arc<Self>,
        key: &[u8],
        arguments: ThrottleArguments,
        quantity: Cost,
    ) -> Result<GateReply<Decision>, ThrottleError> {
        self.validate_throttle(arguments)?;
        Ok(match self.throttle.ask(key, arguments, quantity)? {
            GateReply::Now(decided) => {
                GateReply::Now(decided.inspect(|decision| self.throttled.count(key, decision)))
            }
            GateReply::Later(decided) => {
                let (gate, key) = (self.clone(), Box::<[u8]>::from(key));
                GateReply::Later(Box::pin(async move {
                    decided.await.inspect(|decision| gate.throttled.count(&key, decision))
                }))
            }
        })
    }

    /// Checks that a `CL.THROTTLE` can be decided.
    pub(crate) fn validate_throttle(
        &self,
        arguments: ThrottleArguments,
    ) -> Result<(), ThrottleError> {
        let (limits, is_on) = **self.limits.load();
        if is_on { arguments.check(limits.max_time_to_fresh) } else { Err(ThrottleError::Off) }
    }

    /// Loads the memory of a key that [`throttle`](Self::throttle) will need soon.
    pub(crate) fn prefetch_throttle(&self, key: &[u8]) {
        self.throttle.prefetch(key);
    }

    /// Loads the memory of a key that will be needed soon.
    pub(crate) fn prefetch(&self, policy: &str, key: &[u8]) {
        if let Some(entry) = self.policies.load().get(policy)
            && let Some(store) = entry.limiter.store().memory()
        {
            store.prefetch(key);
        }
    }

    /// Sends one request.
    pub(crate) fn ask(&self, verb: Verb, request: GateRequest<'_>) -> GateReply<Answer> {
        self.ask_with(verb, request, Answer::new)
    }

    /// Sends one request, and makes the answer from the policy and the decision. Unless that clones the policy, whose
    /// reference count all threads would write, a decision of the memory store writes nothing that threads share.
    pub(crate) fn ask_with<T: Send + Unpin + 'static>(
        &self,
        verb: Verb,
        request: GateRequest<'_>,
        answer: MakeAnswer<T>,
    ) -> GateReply<T> {
        let policies = self.policies.load();
        match policies.get(request.policy) {
            Some(entry) => entry.ask_with(verb, request.of_limiter(entry), answer),
            None => GateReply::Now(Err(self.unknown_policy(request.policy, &policies))),
        }
    }

    /// Checks that a request can be decided: its policy and tier exist, and its key is short enough.
    pub(crate) fn validate(&self, request: &GateRequest<'_>) -> Result<(), GateError> {
        let entry = self.policy(request.policy)?;
        entry.limiter.rule(&request.of_limiter(&entry))?;
        match request.key.len() {
            ..=MAX_KEY_BYTES => Ok(()),
            bytes => Err(GateError::KeyTooLong { bytes }),
        }
    }

    /// Checks that several requests may be decided together.
    pub(crate) fn validate_number(&self, given: usize) -> Result<(), GateError> {
        let most = self.limits().max_all_items;
        match given {
            1.. if given <= most => Ok(()),
            _ => Err(GateError::Items { given, most }),
        }
    }

    /// Checks several requests together: all are charged, or none is.
    pub(crate) async fn ask_all(
        &self,
        requests: &[GateRequest<'_>],
    ) -> Result<JointDecision, GateError> {
        self.validate_number(requests.len())?;
        let entries = requests.iter().map(|request| self.policy(request.policy));
        let entries = entries.collect::<Result<Vec<_>, _>>()?;
        let parts = entries
            .iter()
            .zip(requests)
            .map(|(entry, request)| JointAsk::of_any(&entry.limiter, request.of_limiter(entry)));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let decided = self.check_parts(parts).await?;
        let Some(entry) = entries.get(decided.denied_ask.unwrap_or(0)) else {
            return Err(GateError::Store("nothing was asked".into()));
        };
        let (decision, denied) = (decided.decision, decided.denied_ask);
        Ok(JointDecision { decision, denied, entry: entry.clone() })
    }

    /// Checks several questions together: all are charged, or none is.
    pub(crate) async fn check_parts(
        &self,
        parts: Vec<JointAsk<'_>>,
    ) -> Result<tallygate::joint::JointDecision, GateError> {
        let is_long = parts.len() > QUICK_ALL;
        let deciding = tallygate_redis::check_all(parts);
        Ok(match &self.stores {
            Stores::Memory(_) if is_long => off_worker(|| tallygate::block_on(deciding))?,
            _ => deciding.await?,
        })
    }
}

impl Verb {
    fn op(self, cost: Cost) -> Op {
        match self {
            Self::Check => Op::Check(cost),
            Self::Peek => Op::Peek(cost),
            Self::Refund => Op::Force(-i128::from(cost)),
            Self::Reset => Op::Reset,
        }
    }
}

impl<'a> GateRequest<'a> {
    /// Returns the request to the limiter of the policy.
    fn of_limiter(&self, policy: &ServedPolicy) -> tallygate::Ask<'a> {
        tallygate::Ask::new(self.key).tier(self.tier).cost(self.cost.unwrap_or(policy.cost))
    }
}

/// Makes an answer from a policy and a decision of its limiter.
pub(crate) type MakeAnswer<T> = fn(&Arc<ServedPolicy>, RuledDecision<'_>) -> T;

impl Answer {
    pub(crate) fn new(entry: &Arc<ServedPolicy>, decided: RuledDecision<'_>) -> Self {
        let RuledDecision { rule, decision, at } = decided;
        Self { entry: entry.clone(), decision, access: rule.access(at).clone() }
    }

    /// Returns the name of the limit that denied the request, if the policy has several.
    pub(crate) fn denied_by(&self) -> Option<&str> {
        let limits = self.access.limits();
        limits.get(self.decision.denied_by?).filter(|_| limits.len() > 1).map(Limit::name)
    }

    /// Returns the name of the shadow limit that would have denied the request.
    pub(crate) fn shadow_denied_by(&self) -> Option<&str> {
        self.access.limits().get(self.decision.shadow_denied_by?).map(Limit::name)
    }
}

impl ServedPolicy {
    /// Sends one request to the policy, whether or not it is still in force.
    pub(crate) fn ask(self: &Arc<Self>, verb: Verb, ask: tallygate::Ask<'_>) -> GateReply<Answer> {
        self.ask_with(verb, ask, Answer::new)
    }

    fn ask_with<T: Send + Unpin + 'static>(
        self: &Arc<Self>,
        verb: Verb,
        ask: tallygate::Ask<'_>,
        answer: MakeAnswer<T>,
    ) -> GateReply<T> {
        let op = verb.op(ask.cost);
        if self.limiter.store().redis().is_some() {
            let entry = self.clone();
            let (key, tier) = (Box::<[u8]>::from(ask.key), ask.tier.map(Box::<str>::from));
            return GateReply::Later(Box::pin(async move {
                let ask = tallygate::Ask::new(&key).tier(tier.as_deref());
                Ok(entry.decide(op, ask, answer).await?)
            }));
        }
        let decided = self.decide(op, ask, answer).into_ready();
        let decided = decided.unwrap_or_else(|| unreachable!("memory answers at once"));
        GateReply::Now(decided.map_err(GateError::from))
    }

    fn decide<'a, T: Send + Unpin + 'static>(
        self: &'a Arc<Self>,
        op: Op,
        ask: tallygate::Ask<'a>,
        answer: MakeAnswer<T>,
    ) -> AnyReply<'a, T> {
        self.limiter.decide_with(ask, op, move |rule, decision, at| {
            answer(self, RuledDecision { rule, decision, at })
        })
    }

    /// Returns the usage of the memory store; `None` if the keys are in Redis.
    pub(crate) fn usage(&self) -> Option<tallygate::store::Usage> {
        self.limiter.store().memory().map(MemoryStore::usage)
    }

    /// Returns the values of the policy for metrics.
    fn figures(&self) -> PolicyFigures {
        let rules = self.limiter.rules();
        PolicyFigures {
            policy: self.name.clone(),
            metrics: self.metrics.clone(),
            usage: self.usage(),
            rules: PolicyRules::Configured { base: rules.base(), tiers: rules.by_name() },
        }
    }
}

impl From<StoreError> for GateError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            other => Self::Store(other.to_string().into()),
        }
    }
}

impl From<tallygate_redis::Error> for GateError {
    fn from(error: tallygate_redis::Error) -> Self {
        match error {
            tallygate_redis::Error::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            tallygate_redis::Error::UnknownTier(unknown) => Self::UnknownTier(*unknown),
            other => Self::Store(other.to_string().into()),
        }
    }
}

impl From<UnknownTier> for GateError {
    fn from(unknown: UnknownTier) -> Self {
        Self::UnknownTier(unknown)
    }
}

impl fmt::Display for GateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPolicy { name, nearest: Some(nearest) } => {
                write!(f, "no policy is named {name:?}; did you mean {nearest:?}?")
            }
            Self::UnknownPolicy { name, nearest: None } => write!(f, "no policy is named {name:?}"),
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::KeyTooLong { bytes } => StoreError::KeyTooLong { bytes: *bytes }.fmt(f),
            Self::TooManyReservations { scope } => {
                let owner = match scope {
                    ReservationScope::Server => "the server has",
                    ReservationScope::Address => "your address has",
                    ReservationScope::Key => "the key has",
                    ReservationScope::AddressAndKey => "your address and this key have",
                };
                write!(
                    f,
                    "{owner} too many open reservations; settle some, or wait until they expire"
                )
            }
            Self::NothingToReserve => {
                f.write_str("cost must be at least 1 (got 0); to look without charging, use a peek")
            }
            Self::TimeToLive { given_ms, longest_ms } => write!(
                f,
                "ttl_ms must be from 1 to {longest_ms} (got {given_ms}; the maximum is `max_reservation_ttl` in `[limits]`)"
            ),
            Self::Items { given: 0, .. } => {
                f.write_str("there is nothing to check; send at least one item")
            }
            Self::Items { given, most } => write!(
                f,
                "a check of several keys must have at most {most} items (got {given}; the maximum is `max_all_items` in `[limits]`)"
            ),
            Self::Store(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for GateError {}

/// Returns whole milliseconds, rounded up, so that clients do not retry too early.
pub(crate) const fn milliseconds(span: Ticks) -> u64 {
    span.0.div_ceil(Ticks::PER_MILLISECOND)
}

/// Returns the time until the same request would be allowed, in milliseconds: at least 1 for a denied request. `None`
/// if waiting does not help.
pub(crate) fn retry_after_ms(decision: &Decision) -> Option<u64> {
    let least = u64::from(!decision.allowed);
    decision.retry_after.map(|wait| milliseconds(wait).max(least))
}

/// Returns the window of the limit that the decision is about, in milliseconds; `None` if no limit applies.
pub(crate) fn window_ms(decision: &Decision) -> Option<u64> {
    decision.quota.map(|quota| milliseconds(quota.window))
}

/// Returns whether no limit applies to the client.
pub(crate) const fn is_unlimited(decision: &Decision) -> bool {
    decision.allowed && decision.scarcest.is_none() && decision.limit == Cost::MAX
}
