//! The policies in force and the store behind them: what every surface asks.
//!
//! Surfaces translate their wire to a question and the answer back; whatever is decided is decided here. From memory
//! an answer is there at once, from Redis it comes later: [`Asked`] is either, so that a pipeline of questions to
//! memory costs no more than the decisions.

mod cell;
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
use tallygate::{
    Access, Capacity, Cost, Decision, MemoryStore, Override, Plan, RateLimiter, Rules as _,
    StoreError, SystemClock, Tick, Tiers, UnknownTier,
};
use tallygate_redis::{Redis, RedisStore};

use crate::config::{Config, KeySource, Limits, PolicyConfig};
use crate::metrics::{Figures, Metrics, PolicyMetrics};
use crate::traces;
use crate::turn::off_worker;

pub(crate) use hot::{Hot, HotClient};
pub(crate) use remembered::Remembered;
use remembered::RememberedPolicy;
pub(crate) use reservations::{Reservations, SettleFailure};
use suggest::Suggestions;
use throttle::Throttle;
pub(crate) use throttle::{ThrottleArguments, ThrottleError};

/// The most items of an `all` that take less than a millisecond. The locks of all its keys are held meanwhile, so that it cannot
/// pause.
const QUICK_ALL: usize = 64;

/// The policies in force and the store behind them.
pub(crate) struct Gate {
    policies: ArcSwap<Policies>,
    /// What one client may take, and whether `CL.THROTTLE` is answered.
    limits: ArcSwap<(Limits, bool)>,
    /// The most bytes of memory that the server takes by the configuration in force.
    memory_bound: AtomicU64,
    backend: Backend,
    throttle: Throttle,
    throttled: Throttled,
    pub(crate) reservations: Reservations,
    pub(crate) hot: Hot,
    suggestions: Suggestions,
    pub(crate) metrics: Metrics,
}

type Policies = HashMap<Arc<str>, Arc<Entry>>;

/// What is counted of limits that come with the request, as if they were a policy.
struct Throttled {
    name: Arc<str>,
    metrics: PolicyMetrics,
}

/// Where clients are kept.
pub(crate) enum Backend {
    Memory { max_keys: usize },
    Redis(Redis),
}

/// A policy in force.
pub(crate) struct Entry {
    pub(crate) name: Arc<str>,
    pub(crate) limiter: Limiter,
    pub(crate) cost: Cost,
    pub(crate) key: KeySource,
    /// How many bits of an IPv6 address are one client.
    pub(crate) ipv6_prefix: u8,
    metrics: PolicyMetrics,
}

/// Its limiter. It outlives changes of the configuration, and with it what clients have used.
#[derive(Clone)]
pub(crate) enum Limiter {
    Memory(Arc<RateLimiter<Tiers, MemoryStore<Plan>>>),
    Redis(Arc<RateLimiter<Tiers, RedisStore>>),
}

/// A question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) policy: &'a str,
    pub(crate) key: &'a [u8],
    /// The policy's own if it is not said.
    pub(crate) cost: Option<Cost>,
    pub(crate) tier: Option<&'a str>,
}

/// What is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verb {
    Check,
    Peek,
    Refund,
    Reset,
}

/// What was decided, and under which policy.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) entry: Arc<Entry>,
    pub(crate) decision: Decision,
    /// The limit that refused, by its name, where there are several.
    pub(crate) refused_by: Option<Box<str>>,
}

/// Several questions decided as one.
pub(crate) struct Together {
    pub(crate) decision: Decision,
    /// Which of the questions was refused.
    pub(crate) refused: Option<usize>,
    /// The policy of the first that refused, or of the first.
    pub(crate) entry: Arc<Entry>,
}

/// Why there is no answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AskError {
    UnknownPolicy {
        name: Box<str>,
        nearest: Option<Arc<str>>,
    },
    UnknownTier(UnknownTier),
    KeyTooLong {
        bytes: usize,
    },
    /// The server, the client's address or the key has as many open reservations as it may.
    Reservations {
        whose: &'static str,
    },
    /// The store could not do it.
    Store(Box<str>),
}

/// An answer, now or later.
pub(crate) enum Asked<T> {
    Now(Result<T, AskError>),
    Later(Pin<Box<dyn Future<Output = Result<T, AskError>> + Send>>),
}

impl<T> Asked<T> {
    pub(crate) async fn answer(self) -> Result<T, AskError> {
        match self {
            Self::Now(answer) => answer,
            Self::Later(answer) => answer.await,
        }
    }
}

impl Gate {
    /// With the clients who are remembered from before.
    pub(crate) fn new(
        config: &Config,
        backend: Backend,
        metrics: Metrics,
        mut remembered: Remembered,
    ) -> Self {
        let throttle = match &backend {
            Backend::Memory { max_keys } => {
                Throttle::in_memory(*max_keys, remembered.throttle.take())
            }
            Backend::Redis(redis) => Throttle::in_redis(redis),
        };
        let name = Arc::from("CL.THROTTLE");
        let throttled = Throttled { metrics: metrics.of_policy(&name), name };
        let gate = Self {
            policies: ArcSwap::default(),
            limits: ArcSwap::from_pointee((config.limits, config.cl_throttle)),
            memory_bound: AtomicU64::new(0),
            backend,
            throttle,
            throttled,
            reservations: Reservations::default(),
            hot: Hot::default(),
            suggestions: Suggestions::default(),
            metrics,
        };
        gate.put_all(config, remembered);
        gate
    }

    /// Puts a configuration in force, each policy in one step, with its overrides. What clients have used stays used;
    /// overrides that were set at run time stay.
    pub(crate) fn put_in_force(&self, config: &Config) {
        self.put_all(config, Remembered::default());
    }

    fn put_all(&self, config: &Config, mut remembered: Remembered) {
        self.limits.store(Arc::new((config.limits, config.cl_throttle)));
        let max_keys = match self.backend {
            Backend::Memory { max_keys } => Some(max_keys),
            Backend::Redis(_) => None,
        };
        self.memory_bound.store(config.memory_bound(max_keys), Ordering::Relaxed);
        let old = self.policies.load();
        let new = config.policies.iter().map(|(name, policy)| {
            let old = old.get(name).map(|entry| &**entry);
            let entry = self.entry(name, policy, old, remembered.policies.remove(&**name));
            (name.clone(), Arc::new(entry))
        });
        self.policies.store(Arc::new(new.collect()));
    }

    fn entry(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        old: Option<&Entry>,
        remembered: Option<RememberedPolicy>,
    ) -> Entry {
        let limiter = match old {
            Some(old) => {
                old.limiter.replace(&policy.tiers);
                old.limiter.set_habits(policy);
                old.limiter.clone()
            }
            None => self.limiter(name, policy, remembered),
        };
        Entry {
            name: name.clone(),
            limiter,
            cost: policy.cost,
            key: policy.key.clone(),
            ipv6_prefix: policy.ipv6_prefix,
            metrics: self.metrics.of_policy(name),
        }
    }

    fn limiter(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        remembered: Option<RememberedPolicy>,
    ) -> Limiter {
        let tiers = policy.tiers.copy();
        match &self.backend {
            Backend::Memory { max_keys } => {
                let (store, overrides) = match remembered {
                    Some(RememberedPolicy { store, overrides }) => (store, overrides),
                    None => {
                        let capacity = Capacity::of(*max_keys);
                        (MemoryStore::new(capacity, SystemClock::new()), Vec::new())
                    }
                };
                let limiter = RateLimiter::in_store(name.clone(), tiers, store);
                for (key, set) in overrides {
                    limiter.set_override(key, set.access, set.until);
                }
                Limiter::Memory(Arc::new(limiter))
            }
            Backend::Redis(redis) => {
                let store = redis.store(name.clone());
                let limiter =
                    Limiter::Redis(Arc::new(RateLimiter::in_store(name.clone(), tiers, store)));
                limiter.set_habits(policy);
                limiter
            }
        }
    }

    /// Gives back what is held on lease, so that others can use it: before the server ends.
    pub(crate) async fn give_back_leases(&self) {
        for entry in self.policies() {
            if let Limiter::Redis(limiter) = &entry.limiter {
                limiter.store().give_back_leases().await;
            }
        }
    }

    /// A policy by its name.
    pub(crate) fn policy(&self, name: &str) -> Result<Arc<Entry>, AskError> {
        let policies = self.policies.load();
        policies.get(name).cloned().ok_or_else(|| {
            let nearest = self.suggestions.nearest(name, policies.keys()).cloned();
            AskError::UnknownPolicy { name: name.into(), nearest }
        })
    }

    /// All policies, by name.
    pub(crate) fn policies(&self) -> Vec<Arc<Entry>> {
        let mut all: Vec<_> = self.policies.load().values().cloned().collect();
        all.sort_by(|one, other| one.name.cmp(&other.name));
        all
    }

    pub(crate) const fn backend(&self) -> &Backend {
        &self.backend
    }

    /// Returns what one client may take, by the configuration in force.
    pub(crate) fn limits(&self) -> Limits {
        self.limits.load().0
    }

    /// Returns the figures that the metrics show beside the counts.
    pub(crate) fn figures(&self, held_bytes: usize) -> Figures {
        let policies = self.policies();
        let keys = policies.iter().map(|entry| (entry.name.clone(), entry.limiter.usage()));
        let keys = keys.chain([("CL.THROTTLE".into(), self.throttle.usage())]);
        let store = match &self.backend {
            Backend::Redis(redis) => Some(redis.counts()),
            Backend::Memory { .. } => None,
        };
        Figures {
            memory_bound: self.memory_bound.load(Ordering::Relaxed),
            held_bytes,
            keys: keys.filter_map(|(policy, usage)| Some((policy, usage?))).collect(),
            reservations_open: self.reservations.open(),
            store,
        }
    }

    /// Decides by limits that come with the request; the error is that of their numbers.
    pub(crate) fn throttle(
        self: &Arc<Self>,
        key: &[u8],
        arguments: ThrottleArguments,
        quantity: Cost,
    ) -> Result<Asked<Decision>, ThrottleError> {
        let (limits, is_on) = **self.limits.load();
        if !is_on {
            return Err(ThrottleError::Off);
        }
        arguments.check(limits.max_time_to_fresh)?;
        Ok(match self.throttle.ask(key, arguments, quantity)? {
            Asked::Now(told) => Asked::Now(told.inspect(|decision| self.throttled(key, decision))),
            Asked::Later(told) => {
                let (gate, key) = (self.clone(), Box::<[u8]>::from(key));
                Asked::Later(Box::pin(async move {
                    told.await.inspect(|decision| gate.throttled(&key, decision))
                }))
            }
        })
    }

    fn throttled(&self, key: &[u8], decision: &Decision) {
        self.throttled.metrics.decided(decision);
        self.hot.note(&self.throttled.name, key, decision.allowed);
    }

    /// Says that a key is about to be asked for by [`throttle`](Self::throttle).
    pub(crate) fn foresee_throttle(&self, key: &[u8]) {
        self.throttle.foresee(key);
    }

    /// Says that a key is about to be asked for.
    pub(crate) fn foresee(&self, policy: &str, key: &[u8]) {
        if let Some(entry) = self.policies.load().get(policy)
            && let Limiter::Memory(limiter) = &entry.limiter
        {
            limiter.store().foresee(key);
        }
    }

    /// Asks one question.
    pub(crate) fn ask(self: &Arc<Self>, verb: Verb, ask: Ask<'_>) -> Asked<Answer> {
        let entry = match self.policy(ask.policy) {
            Ok(entry) => entry,
            Err(error) => return Asked::Now(Err(error)),
        };
        let cost = ask.cost.unwrap_or(entry.cost);
        let told = match &entry.limiter {
            Limiter::Memory(limiter) => in_memory(limiter, verb, ask.key, cost, ask.tier),
            Limiter::Redis(limiter) => {
                let (gate, limiter, key) =
                    (self.clone(), limiter.clone(), Box::<[u8]>::from(ask.key));
                let tier = ask.tier.map(Box::<str>::from);
                return Asked::Later(Box::pin(async move {
                    let told = in_redis(&limiter, verb, &key, cost, tier.as_deref()).await;
                    told.map(|decision| gate.told(entry, verb, &key, tier.as_deref(), decision))
                }));
            }
        };
        Asked::Now(told.map(|decision| self.told(entry, verb, ask.key, ask.tier, decision)))
    }

    /// Asks several questions as one: all are charged, or none is.
    pub(crate) async fn ask_all(&self, asks: &[Ask<'_>]) -> Result<Together, AskError> {
        let entries =
            asks.iter().map(|ask| self.policy(ask.policy)).collect::<Result<Vec<_>, _>>()?;
        let (decision, refused) = match &self.backend {
            Backend::Memory { .. } if asks.len() > QUICK_ALL => {
                off_worker(|| all_in_memory(asks, &entries))?
            }
            Backend::Memory { .. } => all_in_memory(asks, &entries)?,
            Backend::Redis(_) => all_in_redis(asks, &entries).await?,
        };
        for (ask, entry) in asks.iter().zip(&entries) {
            self.note(entry, ask.key, &decision);
        }
        let Some(entry) = entries.get(refused.unwrap_or(0)) else {
            return Err(AskError::Store("nothing was asked".into()));
        };
        Ok(Together { decision, refused, entry: entry.clone() })
    }

    fn told(
        &self,
        entry: Arc<Entry>,
        verb: Verb,
        key: &[u8],
        tier: Option<&str>,
        decision: Decision,
    ) -> Answer {
        if verb == Verb::Check {
            self.note(&entry, key, &decision);
        }
        let refused_by =
            decision.refused_by.and_then(|limit| entry.limiter.limit_name(key, tier, limit));
        Answer { entry, decision, refused_by }
    }

    /// Counts a decision.
    pub(crate) fn note(&self, entry: &Entry, key: &[u8], decision: &Decision) {
        entry.metrics.decided(decision);
        traces::decided(&entry.name, decision);
        self.hot.note(&entry.name, key, decision.allowed);
    }
}

fn in_memory(
    limiter: &RateLimiter<Tiers, MemoryStore<Plan>>,
    verb: Verb,
    key: &[u8],
    cost: Cost,
    tier: Option<&str>,
) -> Result<Decision, AskError> {
    Ok(match (tier, verb) {
        (None, Verb::Check) => limiter.check_n(key, cost),
        (None, Verb::Peek) => limiter.peek_n(key, cost),
        (None, Verb::Refund) => limiter.refund(key, cost),
        (None, Verb::Reset) => limiter.reset(key),
        (Some(tier), verb) => {
            let limiter = limiter.tier(tier)?;
            match verb {
                Verb::Check => limiter.check_n(key, cost),
                Verb::Peek => limiter.peek_n(key, cost),
                Verb::Refund => limiter.refund(key, cost),
                Verb::Reset => limiter.reset(key),
            }
        }
    }?)
}

async fn in_redis(
    limiter: &RateLimiter<Tiers, RedisStore>,
    verb: Verb,
    key: &[u8],
    cost: Cost,
    tier: Option<&str>,
) -> Result<Decision, AskError> {
    Ok(match (tier, verb) {
        (None, Verb::Check) => limiter.check_n(key, cost).await,
        (None, Verb::Peek) => limiter.peek_n(key, cost).await,
        (None, Verb::Refund) => limiter.refund(key, cost).await,
        (None, Verb::Reset) => limiter.reset(key).await,
        (Some(tier), verb) => {
            let limiter = limiter.tier(tier)?;
            match verb {
                Verb::Check => limiter.check_n(key, cost).await,
                Verb::Peek => limiter.peek_n(key, cost).await,
                Verb::Refund => limiter.refund(key, cost).await,
                Verb::Reset => limiter.reset(key).await,
            }
        }
    }?)
}

fn all_in_memory(
    asks: &[Ask<'_>],
    entries: &[Arc<Entry>],
) -> Result<(Decision, Option<usize>), AskError> {
    let limiters = entries.iter().filter_map(|entry| match &entry.limiter {
        Limiter::Memory(limiter) => Some(limiter),
        Limiter::Redis(_) => None,
    });
    // Limiters of a tier are made for the occasion, and must outlive what is asked of them.
    let tiered = limiters
        .clone()
        .zip(asks)
        .map(|(limiter, ask)| ask.tier.map(|tier| limiter.tier(tier)).transpose());
    let tiered = tiered.collect::<Result<Vec<_>, _>>()?;
    let parts =
        limiters.zip(&tiered).zip(asks).zip(entries).map(|(((limiter, tier), ask), entry)| {
            let part = match tier {
                Some(tier) => tier.ask(ask.key),
                None => limiter.ask(ask.key),
            };
            part.map(|part| part.cost(ask.cost.unwrap_or(entry.cost)))
        });
    let told = tallygate::check_all(parts.collect::<Result<Vec<_>, _>>()?)?;
    Ok((told.decision, told.refused_ask))
}

async fn all_in_redis(
    asks: &[Ask<'_>],
    entries: &[Arc<Entry>],
) -> Result<(Decision, Option<usize>), AskError> {
    let limiters = entries.iter().filter_map(|entry| match &entry.limiter {
        Limiter::Redis(limiter) => Some(limiter),
        Limiter::Memory(_) => None,
    });
    let tiered = limiters
        .clone()
        .zip(asks)
        .map(|(limiter, ask)| ask.tier.map(|tier| limiter.tier(tier)).transpose());
    let tiered = tiered.collect::<Result<Vec<_>, _>>()?;
    let parts =
        limiters.zip(&tiered).zip(asks).zip(entries).map(|(((limiter, tier), ask), entry)| {
            let part = match tier {
                Some(tier) => tallygate_redis::Ask::of(tier, ask.key),
                None => tallygate_redis::Ask::of(&**limiter, ask.key),
            };
            part.map(|part| part.cost(ask.cost.unwrap_or(entry.cost)))
        });
    let told = tallygate_redis::check_all(parts.collect::<Result<Vec<_>, _>>()?).await?;
    Ok((told.decision, told.refused_ask))
}

impl Limiter {
    fn rules(&self) -> &Tiers {
        match self {
            Self::Memory(limiter) => limiter.rules(),
            Self::Redis(limiter) => limiter.rules(),
        }
    }

    fn replace(&self, tiers: &Tiers) {
        match self {
            Self::Memory(limiter) => limiter.replace(tiers),
            Self::Redis(limiter) => limiter.replace(tiers),
        }
    }

    /// What is done where Redis cannot be asked, or need not be. Memory is always asked.
    fn set_habits(&self, policy: &PolicyConfig) {
        if let Self::Redis(limiter) = self {
            let store = limiter.store();
            store.set_on_failure(policy.on_failure);
            store.set_leases(policy.leases);
            store.set_deny_cache(policy.deny_cache);
        }
    }

    /// Gives a client something else than the configuration does.
    pub(crate) fn set_override(&self, key: &[u8], access: Access, until: Option<Tick>) {
        match self {
            Self::Memory(limiter) => limiter.set_override(key, access, until),
            Self::Redis(limiter) => limiter.set_override(key, access, until),
        }
    }

    /// Takes it back; says whether there was one.
    pub(crate) fn remove_override(&self, key: &[u8]) -> bool {
        match self {
            Self::Memory(limiter) => limiter.remove_override(key),
            Self::Redis(limiter) => limiter.remove_override(key),
        }
    }

    /// All that were set at run time and have not ended.
    pub(crate) fn overrides(&self) -> Vec<(Box<[u8]>, Override)> {
        match self {
            Self::Memory(limiter) => limiter.overrides(),
            Self::Redis(limiter) => limiter.overrides(),
        }
    }

    /// The overrides of the configuration, by key.
    pub(crate) fn configured(&self) -> Vec<(Box<[u8]>, Access)> {
        self.rules().by_key()
    }

    /// What the configuration gives a single client.
    pub(crate) fn configured_for(&self, key: &[u8]) -> Option<Access> {
        self.rules().of_key(key)
    }

    /// The time by the store's clock, in nanoseconds.
    pub(crate) fn now(&self) -> Tick {
        match self {
            Self::Memory(limiter) => limiter.now(),
            Self::Redis(limiter) => limiter.now(),
        }
    }

    /// How many clients are kept here, and how many were pushed out; nobody knows of Redis.
    pub(crate) fn usage(&self) -> Option<tallygate::Usage> {
        match self {
            Self::Memory(limiter) => Some(limiter.store().usage()),
            Self::Redis(_) => None,
        }
    }

    /// What clients get that have neither a tier nor an override.
    pub(crate) fn base(&self) -> Access {
        self.rules().base()
    }

    /// The tiers and what they get, by name.
    pub(crate) fn tiers(&self) -> Vec<(Box<str>, Access)> {
        self.rules().by_name()
    }

    /// What a client gets now: by a tier if one is named, and by its override.
    pub(crate) fn access(&self, key: &[u8], tier: Option<&str>) -> Result<Access, UnknownTier> {
        let now = self.now();
        let plan = match (self, tier) {
            (Self::Memory(limiter), None) => limiter.rules().choose(key),
            (Self::Memory(limiter), Some(tier)) => limiter.tier(tier)?.rules().choose(key),
            (Self::Redis(limiter), None) => limiter.rules().choose(key),
            (Self::Redis(limiter), Some(tier)) => limiter.tier(tier)?.rules().choose(key),
        };
        Ok(plan.access(now).clone())
    }

    /// The name of a limit of a client, where it has several.
    pub(crate) fn limit_name(
        &self,
        key: &[u8],
        tier: Option<&str>,
        limit: usize,
    ) -> Option<Box<str>> {
        match self.access(key, tier) {
            Ok(Access::Limited(policy)) if policy.limits().len() > 1 => {
                policy.limits().get(limit).map(|limit| limit.name().into())
            }
            _ => None,
        }
    }
}

impl From<StoreError> for AskError {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            other => Self::Store(other.to_string().into()),
        }
    }
}

impl From<tallygate_redis::Error> for AskError {
    fn from(error: tallygate_redis::Error) -> Self {
        match error {
            tallygate_redis::Error::KeyTooLong { bytes } => Self::KeyTooLong { bytes },
            other => Self::Store(other.to_string().into()),
        }
    }
}

impl From<UnknownTier> for AskError {
    fn from(unknown: UnknownTier) -> Self {
        Self::UnknownTier(unknown)
    }
}

impl fmt::Display for AskError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownPolicy { name, nearest: Some(nearest) } => {
                write!(f, "no policy is named {name:?}; did you mean {nearest:?}?")
            }
            Self::UnknownPolicy { name, nearest: None } => write!(f, "no policy is named {name:?}"),
            Self::UnknownTier(unknown) => unknown.fmt(f),
            Self::KeyTooLong { bytes } => StoreError::KeyTooLong { bytes: *bytes }.fmt(f),
            Self::Reservations { whose } => {
                write!(
                    f,
                    "{whose} as many open reservations as it may; settle some, or let them expire"
                )
            }
            Self::Store(reason) => f.write_str(reason),
        }
    }
}

impl std::error::Error for AskError {}
