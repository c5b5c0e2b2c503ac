//! The policies in force and the store behind them: what every surface asks.
//!
//! Surfaces translate their wire to a question and the answer back; the limiters of the policies decide. From memory
//! an answer is there at once, from Redis it comes later: [`Asked`] is either, so that a pipeline of questions to
//! memory costs no more than the decisions.

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
use tallygate::{
    Access, Cost, Decision, MemoryStore, Op, Plan, RateLimiter, StoreError, Tick, UnknownTier,
};
use tallygate_redis::{AnyLimiter, AnyReply, JointAsk, Redis, Stores};

use crate::config::{Config, KeySource, Limits, PolicyConfig};
use crate::metrics::{Figures, Metrics};
use crate::turn::off_worker;

use counts::Counts;
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
    stores: Stores,
    throttle: Throttle,
    /// What is counted of limits that come with the request, as if they were a policy.
    throttled: Counts,
    pub(crate) reservations: Reservations,
    pub(crate) hot: Arc<Hot>,
    suggestions: Suggestions,
    pub(crate) metrics: Metrics,
}

type Policies = HashMap<Arc<str>, Arc<Entry>>;

/// A policy in force.
pub(crate) struct Entry {
    pub(crate) name: Arc<str>,
    pub(crate) limiter: Arc<Limiter>,
    pub(crate) cost: Cost,
    pub(crate) key: KeySource,
    /// How many bits of an IPv6 address are one client.
    pub(crate) ipv6_prefix: u8,
}

/// The limiter of a policy. It outlives changes of the configuration, and with it what clients have used.
pub(crate) type Limiter = AnyLimiter<Counts>;

/// A question.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) policy: &'a str,
    pub(crate) key: &'a [u8],
    /// The policy's own if it is not said.
    pub(crate) cost: Option<Cost>,
    pub(crate) tier: Option<&'a str>,
    /// Whether the answer says what the client gets: for header fields.
    pub(crate) shows_access: bool,
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
    pub(crate) decided: Decided,
}

/// A decision, and what the rule says that made it. Rules that are read later may be others.
#[derive(Clone)]
pub(crate) struct Decided {
    pub(crate) decision: Decision,
    /// The limit that refused, by its name, where there are several.
    pub(crate) refused_by: Option<Box<str>>,
    /// What the client gets, if that was asked for.
    pub(crate) access: Option<Access>,
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
        stores: Stores,
        metrics: Metrics,
        mut remembered: Remembered,
    ) -> Self {
        let throttle = match &stores {
            Stores::Memory(capacity) => Throttle::in_memory(*capacity, remembered.throttle.take()),
            Stores::Redis(redis) => Throttle::in_redis(redis),
        };
        let hot = Arc::new(Hot::default());
        let throttled = Counts::new("CL.THROTTLE".into(), &metrics, hot.clone());
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

    /// Puts a configuration in force, each policy in one step, with its overrides. What clients have used stays used;
    /// overrides that were set at run time stay.
    pub(crate) fn put_in_force(&self, config: &Config) {
        self.put_all(config, Remembered::default());
    }

    fn put_all(&self, config: &Config, mut remembered: Remembered) {
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
                old.limiter.clone()
            }
            None => Arc::new(self.limiter(name, policy, remembered)),
        };
        // What is done while Redis cannot be asked, or need not be. Memory is always asked.
        if let Some(store) = limiter.store().redis() {
            store.set_on_failure(policy.on_failure);
            store.set_leases(policy.leases);
            store.set_deny_cache(policy.deny_cache);
        }
        Entry {
            name: name.clone(),
            limiter,
            cost: policy.cost,
            key: policy.key.clone(),
            ipv6_prefix: policy.ipv6_prefix,
        }
    }

    fn limiter(
        &self,
        name: &Arc<str>,
        policy: &PolicyConfig,
        remembered: Option<RememberedPolicy>,
    ) -> Limiter {
        let (store, overrides) = match remembered {
            Some(RememberedPolicy { store, overrides }) => (store.into(), overrides),
            None => (self.stores.store(name), Vec::new()),
        };
        let counts = Counts::new(name.clone(), &self.metrics, self.hot.clone());
        let limiter = RateLimiter::in_store(name.clone(), policy.tiers.copy(), store);
        for (key, set) in overrides {
            limiter.set_override(key, set.access, set.until);
        }
        limiter.observed_by(counts)
    }

    /// Gives back what is held on lease, so that others can use it: before the server ends.
    pub(crate) async fn give_back_leases(&self) {
        for entry in self.policies() {
            if let Some(store) = entry.limiter.store().redis() {
                store.give_back_leases().await;
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

    /// Returns where clients are kept.
    pub(crate) const fn stores(&self) -> &Stores {
        &self.stores
    }

    /// Returns what one client may take, by the configuration in force.
    pub(crate) fn limits(&self) -> Limits {
        self.limits.load().0
    }

    /// Returns the figures that the metrics show beside the counts.
    pub(crate) fn figures(&self, held_bytes: usize) -> Figures {
        let policies = self.policies();
        let keys = policies.iter().map(|entry| (entry.name.clone(), entry.usage()));
        let keys = keys.chain([("CL.THROTTLE".into(), self.throttle.usage())]);
        Figures {
            memory_bound: self.memory_bound.load(Ordering::Relaxed),
            held_bytes,
            keys: keys.filter_map(|(policy, usage)| Some((policy, usage?))).collect(),
            reservations_open: self.reservations.open(),
            store: self.stores.redis().map(Redis::counts),
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
            Asked::Now(decided) => {
                Asked::Now(decided.inspect(|decision| self.throttled.count(key, decision)))
            }
            Asked::Later(decided) => {
                let (gate, key) = (self.clone(), Box::<[u8]>::from(key));
                Asked::Later(Box::pin(async move {
                    decided.await.inspect(|decision| gate.throttled.count(&key, decision))
                }))
            }
        })
    }

    /// Says that a key is about to be asked for by [`throttle`](Self::throttle).
    pub(crate) fn foresee_throttle(&self, key: &[u8]) {
        self.throttle.foresee(key);
    }

    /// Says that a key is about to be asked for.
    pub(crate) fn foresee(&self, policy: &str, key: &[u8]) {
        if let Some(entry) = self.policies.load().get(policy)
            && let Some(store) = entry.limiter.store().memory()
        {
            store.foresee(key);
        }
    }

    /// Asks one question.
    pub(crate) fn ask(&self, verb: Verb, ask: Ask<'_>) -> Asked<Answer> {
        let entry = match self.policy(ask.policy) {
            Ok(entry) => entry,
            Err(error) => return Asked::Now(Err(error)),
        };
        if entry.limiter.store().redis().is_some() {
            let owned = OwnedAsk::of(ask);
            return Asked::Later(Box::pin(async move {
                let decided = decide(&entry, verb, owned.ask()).await?;
                Ok(Answer { entry, decided })
            }));
        }
        let decided = decide(&entry, verb, ask).into_ready();
        let decided = decided.unwrap_or_else(|| unreachable!("memory answers at once"));
        Asked::Now(decided.map(|decided| Answer { entry, decided }).map_err(AskError::from))
    }

    /// Asks several questions as one: all are charged, or none is.
    pub(crate) async fn ask_all(&self, asks: &[Ask<'_>]) -> Result<Together, AskError> {
        let entries =
            asks.iter().map(|ask| self.policy(ask.policy)).collect::<Result<Vec<_>, _>>()?;
        let parts = entries.iter().zip(asks).map(|(entry, ask)| {
            JointAsk::of_any(&entry.limiter, ask.of_limiter().cost(ask.cost.unwrap_or(entry.cost)))
        });
        let parts = parts.collect::<Result<Vec<_>, _>>()?;
        let deciding = tallygate_redis::check_all(parts);
        let decided = match &self.stores {
            Stores::Memory(_) if asks.len() > QUICK_ALL => {
                off_worker(|| tallygate::block_on(deciding))?
            }
            _ => deciding.await?,
        };
        let Some(entry) = entries.get(decided.refused_ask.unwrap_or(0)) else {
            return Err(AskError::Store("nothing was asked".into()));
        };
        let (decision, refused) = (decided.decision, decided.refused_ask);
        Ok(Together { decision, refused, entry: entry.clone() })
    }
}

/// Carries out a verb.
fn decide<'a>(entry: &'a Entry, verb: Verb, ask: Ask<'a>) -> AnyReply<'a, Decided> {
    let cost = ask.cost.unwrap_or(entry.cost);
    let op = match verb {
        Verb::Check => Op::Check(cost),
        Verb::Peek => Op::Peek(cost),
        Verb::Refund => Op::Force(-i128::from(cost)),
        Verb::Reset => Op::Reset,
    };
    entry.limiter.decide_with(ask.of_limiter(), op, move |plan, decision, at| {
        Decided::new(plan, decision, at, ask.shows_access)
    })
}

impl<'a> Ask<'a> {
    /// The question to the limiter of the policy.
    pub(crate) fn of_limiter(&self) -> tallygate::Ask<'a> {
        tallygate::Ask::new(self.key).tier(self.tier)
    }
}

/// A question that can wait.
struct OwnedAsk {
    policy: Box<str>,
    key: Box<[u8]>,
    cost: Option<Cost>,
    tier: Option<Box<str>>,
    shows_access: bool,
}

impl OwnedAsk {
    fn of(ask: Ask<'_>) -> Self {
        Self {
            policy: ask.policy.into(),
            key: ask.key.into(),
            cost: ask.cost,
            tier: ask.tier.map(Into::into),
            shows_access: ask.shows_access,
        }
    }

    fn ask(&self) -> Ask<'_> {
        Ask {
            policy: &self.policy,
            key: &self.key,
            cost: self.cost,
            tier: self.tier.as_deref(),
            shows_access: self.shows_access,
        }
    }
}

impl Decided {
    /// Reads what is said about a decision from the plan that made it.
    fn new(plan: &Plan, decision: Decision, at: Tick, shows_access: bool) -> Self {
        let refused_by = decision.refused_by.and_then(|limit| match plan.access(at) {
            Access::Limited(policy) if policy.limits().len() > 1 => {
                policy.limits().get(limit).map(|limit| limit.name().into())
            }
            _ => None,
        });
        Self { decision, refused_by, access: shows_access.then(|| plan.access(at).clone()) }
    }
}

impl Entry {
    /// Returns how many clients are kept here and how many were evicted; `None` if they are in Redis.
    pub(crate) fn usage(&self) -> Option<tallygate::Usage> {
        self.limiter.store().memory().map(MemoryStore::usage)
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
            tallygate_redis::Error::UnknownTier(unknown) => Self::UnknownTier(*unknown),
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
