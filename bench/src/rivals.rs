//! The limiters that are compared, behind one trait that returns yes or no.
//!
//! Each limiter has its best configuration for this answer, and a clock with nanosecond resolution if it reads one.
//! Limiters without keys are stored in a map, as their users do.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use governor::clock::DefaultClock;
use governor::middleware::StateInformationMiddleware;
use governor::state::keyed::{DashMapStateStore, DefaultKeyedStateStore, HashMapStateStore};
use governor::state::{InMemoryState, NotKeyed};
use tallygate::clock::{CoarseClock, SystemClock};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::ClientRule;
use tallygate::{Policy, Ticks, Tiers};

use crate::workload::Limit;

/// A limiter that threads share.
pub trait Limiter: Sync + Sized + 'static {
    const NAME: &'static str;

    /// Whether it stores at most the number of keys it was created for.
    const BOUNDED: bool = false;

    /// Creates a limiter for a number of keys.
    fn new(limit: Limit, keys: usize) -> Self;

    // Governor looks up a `String` only by `&String`.
    #[expect(clippy::ptr_arg, reason = "governor requires it")]
    fn allows(&self, key: &String) -> bool;

    /// Returns how many of the keys are allowed. The default checks them one by one.
    #[inline]
    fn count_allowed(&self, keys: &[&String]) -> usize {
        keys.iter().filter(|key| self.allows(key)).count()
    }

    /// Returns the number of stored keys, if the limiter can report it.
    fn stored_keys(&self) -> Option<usize> {
        None
    }
}

/// A limiter that returns more than yes or no.
pub trait DetailedLimiter: Sync + Sized + 'static {
    const NAME: &'static str;

    fn new(limit: Limit, keys: usize) -> Self;

    /// Returns the units that remain after this request, or `None` if it is denied.
    #[expect(clippy::ptr_arg, reason = "governor requires it")]
    fn remaining(&self, key: &String) -> Option<u64>;
}

/// Tallygate as [`tallygate::RateLimiter::new`] creates it, with room for the keys of the case.
pub struct Tallygate(tallygate::RateLimiter);

pub fn policy(limit: Limit) -> Policy {
    Policy::token_bucket(1)
        .per(nanoseconds(limit.one_per))
        .burst(limit.burst.into())
        .build()
        .expect("the policy is valid")
}

fn nanoseconds(duration: Duration) -> Ticks {
    Ticks(u64::try_from(duration.as_nanos()).expect("the time is less than 500 years"))
}

impl Limiter for Tallygate {
    const NAME: &'static str = "tallygate";
    const BOUNDED: bool = true;

    fn new(limit: Limit, keys: usize) -> Self {
        let policy = policy(limit);
        let store = PolicyStore::new(&policy, Capacity::of(keys), SystemClock::new());
        Self(tallygate::RateLimiter::with_store(policy, store))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.is_allowed(key).expect("the limiter decides")
    }

    #[inline]
    fn count_allowed(&self, keys: &[&String]) -> usize {
        let answers: Vec<bool> = self.0.check_many(keys).expect("the limiter decides");
        answers.into_iter().filter(|allowed| *allowed).count()
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.store().usage().keys)
    }
}

/// Tallygate with a coarse clock: right to the kernel's tick (1 to 10 ms), and a few nanoseconds per reading.
pub struct TallygateCoarse(tallygate::RateLimiter<Policy, PolicyStore<CoarseClock>>);

impl Limiter for TallygateCoarse {
    const NAME: &'static str = "tallygate";
    const BOUNDED: bool = true;

    fn new(limit: Limit, keys: usize) -> Self {
        let policy = policy(limit);
        let store = PolicyStore::new(&policy, Capacity::of(keys), CoarseClock::new());
        Self(tallygate::RateLimiter::with_store(policy, store))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.is_allowed(key).expect("the limiter decides")
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.store().usage().keys)
    }
}

/// Tallygate with rules that can differ by tier, as the server uses it.
pub struct TallygateTiered(tallygate::RateLimiter<Tiers, MemoryStore<ClientRule>>);

impl Limiter for TallygateTiered {
    const NAME: &'static str = "tallygate";
    const BOUNDED: bool = true;

    fn new(limit: Limit, keys: usize) -> Self {
        let store = MemoryStore::new(Capacity::of(keys), SystemClock::new());
        Self(tallygate::RateLimiter::in_store("bench", Tiers::new(policy(limit)), store))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.is_allowed(key).expect("the limiter decides")
    }
}

impl DetailedLimiter for Tallygate {
    const NAME: &'static str = "tallygate";

    fn new(limit: Limit, keys: usize) -> Self {
        <Self as Limiter>::new(limit, keys)
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let decision = std::hint::black_box(self.0.check(key).expect("the limiter decides"));
        decision.allowed.then_some(decision.remaining)
    }
}

/// Governor as [`governor::RateLimiter::keyed`] creates it: a growing `DashMap` with the standard hasher, and the
/// time-stamp counter.
pub struct Governor(governor::RateLimiter<String, DefaultKeyedStateStore<String>, DefaultClock>);

fn quota(limit: Limit) -> governor::Quota {
    let burst = NonZeroU32::new(limit.burst).expect("the burst is not 0");
    governor::Quota::with_period(limit.one_per).expect("the period is not 0").allow_burst(burst)
}

impl Limiter for Governor {
    const NAME: &'static str = "governor";

    fn new(limit: Limit, _: usize) -> Self {
        Self(governor::RateLimiter::keyed(quota(limit)))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Governor in its fastest configuration for one thread with `String` keys and an exact clock: a map behind one lock, a
/// faster hasher, and room for all keys.
pub struct GovernorLocked(
    governor::RateLimiter<
        String,
        HashMapStateStore<String, foldhash::fast::RandomState>,
        DefaultClock,
    >,
);

impl Limiter for GovernorLocked {
    const NAME: &'static str = "governor-best";

    fn new(limit: Limit, keys: usize) -> Self {
        let states: HashMap<String, InMemoryState, _> =
            HashMap::with_capacity_and_hasher(keys, foldhash::fast::RandomState::default());
        let states = HashMapStateStore::new(states);
        Self(governor::RateLimiter::new(quota(limit), states, DefaultClock::default()))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Governor in its fastest configuration for several threads: a sharded map.
pub struct GovernorSharded(
    governor::RateLimiter<
        String,
        DashMapStateStore<String, foldhash::fast::RandomState>,
        DefaultClock,
    >,
);

impl Limiter for GovernorSharded {
    const NAME: &'static str = "governor-best";

    fn new(limit: Limit, keys: usize) -> Self {
        let states: DashMap<String, InMemoryState, _> =
            DashMap::with_capacity_and_hasher(keys, foldhash::fast::RandomState::default());
        Self(governor::RateLimiter::new(quota(limit), states, DefaultClock::default()))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.check_key(key).is_ok()
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Governor with the middleware that returns the remaining units.
pub struct GovernorDetailed(
    governor::RateLimiter<
        String,
        DefaultKeyedStateStore<String>,
        DefaultClock,
        StateInformationMiddleware,
    >,
);

impl DetailedLimiter for GovernorDetailed {
    const NAME: &'static str = "governor";

    fn new(limit: Limit, _: usize) -> Self {
        let limiter = governor::RateLimiter::keyed(quota(limit));
        Self(limiter.with_middleware::<StateInformationMiddleware>())
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let snapshot = self.0.check_key(key).ok()?;
        Some(std::hint::black_box(snapshot).remaining_burst_capacity().into())
    }
}

/// The keyed pool of `quota`, with its default slot cache and room for all keys.
pub struct Quota(quota::QuotaPool);

impl Limiter for Quota {
    const NAME: &'static str = "quota";

    fn new(limit: Limit, keys: usize) -> Self {
        let rate = quota::RefillRate::per_sec(1.0 / limit.one_per.as_secs_f64());
        let policy =
            quota::QuotaPolicy::new().set_capacity(f64::from(limit.burst)).set_refill_rate(rate);
        Self(quota::QuotaPool::with_capacity(policy, limit.burst.into(), keys))
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.0.check(key.as_str(), 1)
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

impl DetailedLimiter for Quota {
    const NAME: &'static str = "quota";

    fn new(limit: Limit, keys: usize) -> Self {
        <Self as Limiter>::new(limit, keys)
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let current = self.0.consume(key.as_str(), 1).ok()?;
        Some(std::hint::black_box(current).available() as u64)
    }
}

/// The library of `throttlecrab`. Its map needs `&mut`, so it is behind a lock, as its documentation advises. The periodic
/// store cleans up least often; here, not during a run. It always returns a full decision.
pub struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<throttlecrab::PeriodicStore>>,
    limit: Limit,
}

impl Throttlecrab {
    #[inline]
    fn check(&self, key: &str) -> (bool, throttlecrab::RateLimitResult) {
        let (burst, seconds) = (i64::from(self.limit.burst), self.limit.one_per.as_secs() as i64);
        let mut limiter = self.limiter.lock().expect("no thread panicked");
        limiter
            .rate_limit(key, burst, 1, seconds, 1, SystemTime::now())
            .expect("the limiter decides")
    }
}

impl Limiter for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(limit: Limit, keys: usize) -> Self {
        let store = throttlecrab::PeriodicStore::builder()
            .capacity(keys)
            .cleanup_interval(Duration::from_secs(86_400))
            .build();
        Self { limiter: Mutex::new(throttlecrab::RateLimiter::new(store)), limit }
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.check(key).0
    }
}

impl DetailedLimiter for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(limit: Limit, keys: usize) -> Self {
        <Self as Limiter>::new(limit, keys)
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let (allowed, result) = std::hint::black_box(self.check(key));
        allowed.then_some(result.remaining as u64)
    }
}

/// The library of Limitador with its memory storage. A request is a context of variables, which the caller builds from the
/// key. The storage is bounded to twice the number of keys, so it drops none.
pub struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: limitador::limit::Namespace,
}

impl Limiter for Limitador {
    const NAME: &'static str = "limitador";

    fn new(limit: Limit, keys: usize) -> Self {
        let limiter = limitador::RateLimiter::new(2 * keys as u64);
        let variable = "key".try_into().expect("the expression is valid");
        let rule =
            limitador::limit::Limit::new("bench", limit.burst.into(), 86_400, [], [variable]);
        limiter.add_limit(rule);
        Self { limiter, namespace: "bench".into() }
    }

    fn allows(&self, key: &String) -> bool {
        let values = HashMap::from([("key".to_owned(), key.clone())]);
        let checked =
            self.limiter.check_rate_limited_and_update(&self.namespace, &values.into(), 1);
        !checked.expect("the limiter decides").limited
    }
}

/// Limiters without keys, stored in a map by key.
struct Keyed<L>(DashMap<String, L>);

impl<L> Keyed<L> {
    fn with_capacity(keys: usize) -> Self {
        Self(DashMap::with_capacity(keys))
    }

    #[inline]
    fn check(&self, key: &str, new: impl FnOnce() -> L, check: impl FnOnce(&L) -> bool) -> bool {
        if let Some(limiter) = self.0.get(key) {
            return check(&limiter);
        }
        check(&self.0.entry(key.to_owned()).or_insert_with(new))
    }
}

fn ratelimit(limit: Limit) -> ratelimit::Ratelimiter {
    ratelimit::Ratelimiter::builder(1)
        .period(limit.one_per)
        .max_tokens(limit.burst.into())
        .initial_available(limit.burst.into())
        .build()
        .expect("the limiter is valid")
}

/// `ratelimit`, which has no keys, in a map.
pub struct Ratelimit {
    limiters: Keyed<ratelimit::Ratelimiter>,
    limit: Limit,
}

impl Limiter for Ratelimit {
    const NAME: &'static str = "ratelimit";

    fn new(limit: Limit, keys: usize) -> Self {
        Self { limiters: Keyed::with_capacity(keys), limit }
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.limiters.check(key, || ratelimit(self.limit), |limiter| limiter.try_wait().is_ok())
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.limiters.0.len())
    }
}

fn leaky_bucket(limit: Limit) -> leaky_bucket::RateLimiter {
    leaky_bucket::RateLimiter::builder()
        .max(limit.burst as usize)
        .initial(limit.burst as usize)
        .refill(1)
        .interval(limit.one_per)
        .build()
}

/// `leaky-bucket`, which has no keys, in a map. It is designed for waiting; `try_acquire` does not wait, and it reads no
/// clock while tokens are left.
pub struct LeakyBucket {
    limiters: Keyed<leaky_bucket::RateLimiter>,
    limit: Limit,
}

impl Limiter for LeakyBucket {
    const NAME: &'static str = "leaky-bucket";

    fn new(limit: Limit, keys: usize) -> Self {
        Self { limiters: Keyed::with_capacity(keys), limit }
    }

    #[inline]
    fn allows(&self, key: &String) -> bool {
        self.limiters.check(key, || leaky_bucket(self.limit), |limiter| limiter.try_acquire(1))
    }

    fn stored_keys(&self) -> Option<usize> {
        Some(self.limiters.0.len())
    }
}

/// Limiters for a single client, which ignore the key.
pub mod single {
    use super::*;

    pub struct Tallygate(tallygate::SingleLimiter);

    impl Limiter for Tallygate {
        const NAME: &'static str = "tallygate";

        fn new(limit: Limit, _: usize) -> Self {
            Self(tallygate::SingleLimiter::new(policy(limit)))
        }

        #[inline]
        fn allows(&self, _: &String) -> bool {
            self.0.is_allowed()
        }
    }

    pub struct Governor(governor::RateLimiter<NotKeyed, InMemoryState, DefaultClock>);

    impl Limiter for Governor {
        const NAME: &'static str = "governor";

        fn new(limit: Limit, _: usize) -> Self {
            Self(governor::RateLimiter::direct(quota(limit)))
        }

        #[inline]
        fn allows(&self, _: &String) -> bool {
            self.0.check().is_ok()
        }
    }

    pub struct Ratelimit(ratelimit::Ratelimiter);

    impl Limiter for Ratelimit {
        const NAME: &'static str = "ratelimit";

        fn new(limit: Limit, _: usize) -> Self {
            Self(ratelimit(limit))
        }

        #[inline]
        fn allows(&self, _: &String) -> bool {
            self.0.try_wait().is_ok()
        }
    }

    pub struct LeakyBucket(leaky_bucket::RateLimiter);

    impl Limiter for LeakyBucket {
        const NAME: &'static str = "leaky-bucket";

        fn new(limit: Limit, _: usize) -> Self {
            Self(leaky_bucket(limit))
        }

        #[inline]
        fn allows(&self, _: &String) -> bool {
            self.0.try_acquire(1)
        }
    }
}

/// Calls a function for each keyed limiter and collects the results: `keyed!(enter(arguments))` is a `Vec`.
///
/// The best configuration of governor depends on the number of threads.
#[macro_export]
macro_rules! keyed {
    ($enter:ident($($argument:expr),*)) => {
        $crate::keyed!(GovernorLocked, $enter($($argument),*))
    };
    ($governor_best:ident, $enter:ident($($argument:expr),*)) => {
        vec![
            $enter::<$crate::rivals::Tallygate>($($argument),*),
            $enter::<$crate::rivals::Governor>($($argument),*),
            $enter::<$crate::rivals::$governor_best>($($argument),*),
            $enter::<$crate::rivals::Quota>($($argument),*),
            $enter::<$crate::rivals::Throttlecrab>($($argument),*),
            $enter::<$crate::rivals::Ratelimit>($($argument),*),
            $enter::<$crate::rivals::LeakyBucket>($($argument),*),
            $enter::<$crate::rivals::Limitador>($($argument),*),
        ]
    };
}
