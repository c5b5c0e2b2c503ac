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
use std::sync::{Arc, Mutex, PoisonError};

use arc_swap::ArcSwap;
use tallygate::algorithm::Op;
use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, MAX_KEY_BYTES, MemoryStore};
use tallygate::tiers::{Access, ClientRule, UnknownTier};
use tallygate::{Cost, Decision, Limit, RateLimiter, StoreError, Tick, Ticks};
use tallygate_redis::{AnyLimiter, AnyReply, AnyStore, JointAsk, Leases, Redis, Stores};

use crate::config::{
    CL_THROTTLE, Config, EnvoyConfig, KeySource, Limits, PolicyConfig, RuleHistory,
};
use crate::metrics::{Figures, Format, Metrics, PolicyFigures, PolicyRules};
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
    /// Held while a configuration is put in force, and while overrides change.
    changing: Mutex<()>,
    stores: Stores,
    throttle: Throttle,
    /// Counts the decisions of `CL.THROTTLE` like those of a policy.
    throttled: DecisionCounter,
    reservations: Reservations,
    pub(crate) hot: Arc<HotClients>,
    pub(crate) metrics: Metrics,
}

/// The policies and limits of one configuration. A reload replaces all of them in one step and changes none of them, so
/// a request that reads them once is decided under one configuration.
pub(crate) struct Policies {
    by_name: HashMap<Arc<str>, Arc<ServedPolicy>, foldhash::fast::RandomState>,
    /// The rules of Envoy's rate limit service. Their policies are among the others.
    pub(crate) envoy: Option<Arc<EnvoyConfig>>,
    /// The limits per client.
    pub(crate) limits: Limits,
    has_cl_throttle: bool,
    /// The upper bound of memory, in bytes.
    memory_bound: u64,
    rule_history: RuleHistory,
    suggestions: Arc<Suggestions>,
}

impl Policies {
    pub(crate) fn get(&self, name: &str) -> Option<&Arc<ServedPolicy>> {
        self.by_name.get(name)
    }

    /// Returns a policy by its name.
    pub(crate) fn policy(&self, name: &str) -> Result<&Arc<ServedPolicy>, GateError> {
        self.get(name).ok_or_else(|| self.unknown_policy(name))
    }

    #[cold]
    fn unknown_policy(&self, name: &str) -> GateError {
        let nearest = self.suggestions.nearest(name, self.by_name.keys()).cloned();
        GateError::UnknownPolicy { name: name.into(), nearest }
    }

    /// Finds the policy of a request, and checks that the request can be decided: its policy and tier exist, and its key
    /// is short enough.
    pub(crate) fn find<'a>(
        &'a self,
        request: &GateRequest<'a>,
    ) -> Result<PolicyRequest<'a>, GateError> {
        let entry = self.policy(request.policy)?;
        let ask = request.of_limiter(entry);
        entry.limiter.rule(&ask)?;
        match request.key.len() {
            ..=MAX_KEY_BYTES => Ok(PolicyRequest { entry, ask }),
            bytes => Err(GateError::KeyTooLong { bytes }),
        }
    }

    /// Finds the policies of several requests that are decided together.
    pub(crate) fn find_all<'a>(
        &'a self,
        requests: &[GateRequest<'a>],
    ) -> Result<Vec<PolicyRequest<'a>>, GateError> {
        self.validate_number(requests.len())?;
        requests.iter().map(|request| self.find(request)).collect()
    }

    /// Checks that several requests may be decided together.
    pub(crate) fn validate_number(&self, given: usize) -> Result<(), GateError> {
        let most = self.limits.max_all_items;
        match given {
            1.. if given <= most => Ok(()),
            _ => Err(GateError::Items { given, most }),
        }
    }

    /// Returns all policies, sorted by name.
    fn sorted(&self) -> Vec<Arc<ServedPolicy>> {
        let mut all: Vec<_> = self.by_name.values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    /// Sends one request, and makes the answer from the policy and the decision.
    pub(crate) fn ask_with<T: Send + Unpin + 'static>(
        &self,
        verb: Verb,
        request: GateRequest<'_>,
        answer: MakeAnswer<T>,
    ) -> GateReply<T> {
        match self.policy(request.policy) {
            Ok(entry) => entry.ask_with(verb, request.of_limiter(entry), answer),
            Err(unknown) => GateReply::Now(Err(unknown)),
        }
    }
}

/// A policy of one configuration. Only overrides that are set at run time change its rules.
pub(crate) struct ServedPolicy {
    pub(crate) name: Arc<str>,
    pub(crate) limiter: Limiter,
    counter: DecisionCounter,
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

/// The limiter of a policy. Its store outlives configuration changes, so that usage is not lost.
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

/// A request with its policy, of one configuration.
#[derive(Clone, Copy)]
pub(crate) struct PolicyRequest<'a> {
    pub(crate) entry: &'a Arc<ServedPolicy>,
    pub(crate) ask: tallygate::Ask<'a>,
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Check,
    Peek,
    Refund,
    Reset,
}

/// A decision and the rule that made it. The rule may change later, so an answer takes all of its fields from here.
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
    /// The policy of the request that `limit` and `remaining` describe.
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
    /// A reservation of 0 units would occupy a slot without effect.
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
        let no_policies = Policies {
            by_name: HashMap::default(),
            envoy: None,
            limits: config.limits,
            has_cl_throttle: false,
            memory_bound: 0,
            rule_history: RuleHistory::default(),
            suggestions: Arc::default(),
        };
        let gate = Self {
            policies: ArcSwap::from_pointee(no_policies),
            changing: Mutex::default(),
            stores,
            throttle,
            throttled,
            reservations: Reservations::default(),
            hot,
            metrics,
        };
        gate.apply_config(config, remembered);
        gate
    }

    /// Puts a configuration in force, all of it in one step. Usage and overrides that were set at run time are kept. What
    /// a store does in an outage, its leases and its deny cache belong to the store, and change a moment earlier.
    pub(crate) fn put_in_force(&self, config: &Config) {
        self.apply_config(config, RestoredStores::default());
    }

    fn apply_config(&self, config: &Config, mut remembered: RestoredStores) {
        let _overrides_wait = self.lock_changes();
        let max_keys = match &self.stores {
            Stores::Memory(capacity) => Some(capacity.max_keys),
            Stores::Redis(_) => None,
        };
        let old = self.policies.load();
        let new = config.policies.iter().map(|(name, policy)| {
            let old = old.get(name).map(|entry| &**entry);
            let entry = self.entry(name, policy, old, remembered.policies.remove(&**name));
            (name.clone(), Arc::new(entry))
        });
        let rule_history = old.rule_history.with(config);
        let new = Policies {
            by_name: new.collect(),
            envoy: config.envoy.clone(),
            limits: config.limits,
            has_cl_throttle: config.cl_throttle,
            memory_bound: config.memory_bound(max_keys, &rule_history),
            rule_history,
            suggestions: old.suggestions.clone(),
        };
        self.policies.store(Arc::new(new));
    }

    fn lock_changes(&self) -> impl Drop {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the overrides of a policy that were set at run time. A reload waits meanwhile, so that it keeps the change.
    pub(crate) fn change_overrides<T>(
        &self,
        entry: &Arc<ServedPolicy>,
        change: impl FnOnce(&ServedPolicy) -> T,
    ) -> T {
        let _reloads_wait = self.lock_changes();
        change(&self.latest(entry))
    }

    /// Returns a policy by the configuration in force; if that has removed it, the given one.
    fn latest(&self, entry: &Arc<ServedPolicy>) -> Arc<ServedPolicy> {
        let policies = self.policies.load();
        let latest = policies.get(&entry.name).filter(|latest| latest.counter.is(&entry.counter));
        latest.unwrap_or(entry).clone()
    }

    fn entry(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        old: Option<&ServedPolicy>,
        remembered: Option<RestoredPolicy>,
    ) -> ServedPolicy {
        let (limiter, counter) = match old {
            Some(old) => {
                let rules = old.limiter.rules().replaced_by(&policy.tiers);
                let store = old.limiter.store().clone();
                (RateLimiter::in_store(name.clone(), rules, store), old.counter.clone())
            }
            None => {
                let counter = DecisionCounter::new(name.clone(), self.hot.clone());
                (self.limiter(name, policy, remembered), counter)
            }
        };
        let limiter = limiter.observed_by(counter.clone());
        // Only Redis has settings for outages, leases and the deny cache.
        if let Some(store) = limiter.store().redis() {
            store.set_on_failure(policy.on_failure);
            store.set_leases(policy.lease.map(|life| Leases::default().life(life)));
            store.set_deny_cache(policy.deny_cache);
        }
        ServedPolicy {
            name: name.clone(),
            limiter,
            counter,
            cost: policy.cost,
            key: policy.key.clone(),
            ipv6_prefix: policy.ipv6_prefix,
        }
    }

    fn limiter(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        remembered: Option<RestoredPolicy>,
    ) -> AnyLimiter {
        let (store, overrides) = match remembered {
            Some(RestoredPolicy { store, overrides }) => (store.into(), overrides),
            None => (self.store(name, policy), Vec::new()),
        };
        let limiter = RateLimiter::in_store(name.clone(), policy.tiers.copy(), store);
        for (key, set) in overrides {
            limiter.set_override(key, set.access, set.until);
        }
        limiter
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
        self.policies.load().policy(name).cloned()
    }

    /// Returns the policies in force, for a request that needs them several times.
    pub(crate) fn in_force(&self) -> Arc<Policies> {
        self.policies.load_full()
    }

    /// Returns all policies, sorted by name.
    pub(crate) fn policies(&self) -> Vec<Arc<ServedPolicy>> {
        self.in_force().sorted()
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
        self.policies.load().limits
    }

    /// Returns all metrics in a text format.
    pub(crate) fn render_metrics(&self, buffer_bytes: usize, format: Format) -> String {
        let in_force = self.in_force();
        let mut policies: Vec<_> = in_force.sorted().iter().map(|entry| entry.figures()).collect();
        policies.push(PolicyFigures {
            policy: CL_THROTTLE.into(),
            metrics: self.throttled.metrics(),
            usage: self.throttle.usage(),
            rules: PolicyRules::OfRequests { algorithm: "gcra" },
        });
        let figures = Figures {
            memory_bound: in_force.memory_bound,
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
        let policies = self.policies.load();
        match policies.has_cl_throttle {
            true => arguments.check(policies.limits.max_time_to_fresh),
            false => Err(ThrottleError::Off),
        }
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

    /// Sends one request, and makes the answer from the policy and the decision. A decision of the memory store writes
    /// nothing that threads share, unless the function clones the policy: all threads would write its reference count.
    pub(crate) fn ask_with<T: Send + Unpin + 'static>(
        &self,
        verb: Verb,
        request: GateRequest<'_>,
        answer: MakeAnswer<T>,
    ) -> GateReply<T> {
        self.policies.load().ask_with(verb, request, answer)
    }

    /// Checks several requests together: all are charged, or none is.
    ///
    /// The policy, `limit` and `remaining` are those of one request: the first that was denied or, if none was, the first
    /// with the least remaining units. The waits are the longest of all requests.
    pub(crate) async fn ask_all(
        &self,
        requests: &[PolicyRequest<'_>],
    ) -> Result<JointDecision, GateError> {
        let parts =
            requests.iter().map(|request| JointAsk::of_any(&request.entry.limiter, request.ask));
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let decided = self.check_parts(parts).await?;
        let (decision, denied) = (decided.decision, decided.denied_ask);
        let part =
            |index: usize| decided.parts.get(index).copied().flatten().map(|part| part.decision);
        let least = |index: &usize| part(*index).map_or(Cost::MAX, |part| part.remaining);
        let described = denied.or_else(|| (0..requests.len()).min_by_key(least));
        let Some((index, request)) =
            described.and_then(|index| Some((index, requests.get(index)?)))
        else {
            return Err(GateError::Store("nothing was asked".into()));
        };
        let Decision { limit, remaining, scarcest, .. } = part(index).unwrap_or(decision);
        let decision = Decision { limit, remaining, scarcest, ..decision };
        Ok(JointDecision { decision, denied, entry: request.entry.clone() })
    }

    /// Checks several requests together: all are charged, or none is.
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
    /// Sends one request to the policy, by its own rules whether or not they are still in force.
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
            metrics: self.counter.metrics(),
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// Returns a configuration with two policies.
    fn config(api: u64, login: u64) -> Config {
        let policy = |name: &str, limit: u64| {
            format!(
                "[policies.{name}]\nalgorithm = \"fixed_window\"\nlimit = {limit}\nwindow = \"365d\"\n"
            )
        };
        Config::parse(&(policy("api", api) + &policy("login", login)), Path::new(""))
            .expect("valid")
    }

    fn gate(config: &Config) -> Gate {
        let stores = Stores::Memory(Capacity::of(100));
        Gate::new(config, stores, Metrics::new(), RestoredStores::default())
    }

    const fn request(policy: &str, cost: Cost) -> GateRequest<'_> {
        GateRequest { policy, key: b"alice", cost: Some(cost), tier: None }
    }

    fn limit(gate: &Gate, policy: &str) -> Cost {
        match gate.ask(Verb::Peek, request(policy, 0)) {
            GateReply::Now(answer) => answer.expect("it is in force").decision.limit,
            GateReply::Later(_) => unreachable!("memory answers at once"),
        }
    }

    /// Fault G4.
    #[test]
    fn a_request_is_decided_under_the_configuration_that_it_found() {
        let gate = gate(&config(5, 6));
        let policies = gate.in_force();
        let first = policies.find(&request("api", 1)).unwrap();
        gate.put_in_force(&config(50, 60));
        let second = policies.find(&request("login", 1)).unwrap();
        let decided = tallygate::block_on(gate.ask_all(&[first, second])).unwrap();
        assert_eq!((decided.decision.limit, decided.decision.remaining), (5, 4));
        let one = tallygate::block_on(second.entry.ask(Verb::Check, second.ask).answer()).unwrap();
        assert_eq!((one.decision.limit, one.decision.remaining), (6, 4));
        assert_eq!((limit(&gate, "api"), limit(&gate, "login")), (50, 60));
        let policies = gate.in_force();
        let both = policies.find_all(&[request("api", 1), request("login", 1)]).unwrap();
        let decided = tallygate::block_on(gate.ask_all(&both)).unwrap().decision;
        assert_eq!((decided.limit, decided.remaining), (50, 48), "usage is kept");
    }

    /// Fault G4.
    #[test]
    fn a_settlement_uses_the_rules_in_force() {
        let owner = crate::client_budgets::BudgetOwner::of(
            crate::peer::Peer { address: None, is_same_user: true },
            &[],
        );
        let gate = gate(&config(5, 6));
        let reserve = || {
            let reserving = gate.reserve(request("api", 3), 60_000, owner);
            tallygate::block_on(reserving).unwrap().1.expect("it is allowed")
        };
        let settle = |id| tallygate::block_on(gate.settle(id, 1)).expect("it is open").1;
        let reservation = reserve();
        gate.put_in_force(&config(50, 6));
        let settled = settle(reservation);
        assert_eq!((settled.limit, settled.remaining), (50, 49));
        // A policy that was removed and added again has another store, without what was reserved.
        let reservation = reserve();
        gate.put_in_force(&Config::parse("", Path::new("")).unwrap());
        gate.put_in_force(&config(7, 6));
        let policies = gate.in_force();
        let found = policies.find(&request("api", 2)).unwrap();
        tallygate::block_on(found.entry.ask(Verb::Check, found.ask).answer()).unwrap();
        let settled = settle(reservation);
        assert_eq!((settled.limit, settled.remaining), (50, 48), "of the old store");
        let now = tallygate::block_on(gate.ask(Verb::Peek, request("api", 0)).answer()).unwrap();
        assert_eq!(now.decision.remaining, 5, "nothing is returned to the new store");
    }

    /// Fault G4.
    #[test]
    fn a_reload_keeps_an_override_whenever_it_is_set() {
        let gate = gate(&config(5, 6));
        let entry = gate.policy("api").unwrap();
        let is_blocked = || {
            let asked = gate.ask(Verb::Peek, request("api", 1)).answer();
            !tallygate::block_on(asked).unwrap().decision.allowed
        };
        // The policy was found before the reload, and is changed after it.
        gate.put_in_force(&config(50, 6));
        gate.change_overrides(&entry, |entry| {
            entry.limiter.set_override("alice", Access::Blocked, None);
        });
        assert!(is_blocked());
        gate.put_in_force(&config(5, 6));
        assert!(is_blocked());
        assert!(gate.change_overrides(&entry, |entry| entry.limiter.remove_override("alice")));
        assert!(!is_blocked());
    }
}
