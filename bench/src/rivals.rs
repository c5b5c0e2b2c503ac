//! Who takes part, and how each is asked "may this key do this now, yes or no".
//!
//! Each is in the best configuration it has for that, and by a clock that is right to the
//! nanosecond, where it reads one. Those that know no keys are in the map that their users put
//! around them.

use std::collections::HashMap;
use std::num::NonZeroU32;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use dashmap::DashMap;
use governor::clock::DefaultClock;
use governor::middleware::StateInformationMiddleware;
use governor::state::keyed::{DashMapStateStore, DefaultKeyedStateStore, HashMapStateStore};
use governor::state::{InMemoryState, NotKeyed};
use tallygate::{Capacity, Policy, PolicyStore, SystemClock, Ticks};

use crate::workload::Limit;

/// A limiter as its user shares it between threads.
pub trait Limiter: Sync + Sized + 'static {
    const NAME: &'static str;

    /// Whether it holds no more keys than it was made for.
    const BOUNDED: bool = false;

    /// For so many keys, each under the limit.
    fn new(limit: Limit, keys: usize) -> Self;

    // Governor looks a `String` up by `&String` only.
    #[expect(clippy::ptr_arg, reason = "as its users must")]
    fn allows(&self, key: &String) -> bool;

    /// How many of some keys are allowed; one by one, if there is no better way.
    #[inline]
    fn count_allowed(&self, keys: &[&String]) -> usize {
        keys.iter().filter(|key| self.allows(key)).count()
    }

    /// How many keys it keeps, if it can say.
    fn kept(&self) -> Option<usize> {
        None
    }
}

/// A limiter that says more than yes or no.
pub trait Telling: Sync + Sized + 'static {
    const NAME: &'static str;

    fn new(limit: Limit, keys: usize) -> Self;

    /// What remains after this request, if it is allowed.
    #[expect(clippy::ptr_arg, reason = "as its users must")]
    fn remaining(&self, key: &String) -> Option<u64>;
}

/// As [`tallygate::RateLimiter::new`] makes it, for as many keys as the case has.
pub struct Tallygate(tallygate::RateLimiter);

pub fn policy(limit: Limit) -> Policy {
    Policy::token_bucket(1)
        .per(nanoseconds(limit.one_per))
        .burst(limit.burst.into())
        .build()
        .expect("a policy")
}

fn nanoseconds(duration: Duration) -> Ticks {
    Ticks(u64::try_from(duration.as_nanos()).expect("less than 500 years"))
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
        self.0.is_allowed(key).expect("a decision")
    }

    #[inline]
    fn count_allowed(&self, keys: &[&String]) -> usize {
        let answers: Vec<bool> = self.0.check_many(keys).expect("decisions");
        answers.into_iter().filter(|allowed| *allowed).count()
    }

    fn kept(&self) -> Option<usize> {
        Some(self.0.store().usage().keys)
    }
}

impl Telling for Tallygate {
    const NAME: &'static str = "tallygate";

    fn new(limit: Limit, keys: usize) -> Self {
        <Self as Limiter>::new(limit, keys)
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let decision = std::hint::black_box(self.0.check(key).expect("a decision"));
        decision.allowed.then_some(decision.remaining)
    }
}

/// As [`governor::RateLimiter::keyed`] makes it: a `DashMap` with the standard hasher, which grows,
/// and the time-stamp counter.
pub struct Governor(governor::RateLimiter<String, DefaultKeyedStateStore<String>, DefaultClock>);

fn quota(limit: Limit) -> governor::Quota {
    let burst = NonZeroU32::new(limit.burst).expect("some");
    governor::Quota::with_period(limit.one_per).expect("a period").allow_burst(burst)
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

    fn kept(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Governor as fast as it gets on one thread with `String` keys and an exact clock: a map behind one
/// lock, a faster hasher, and room for all keys from the start.
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

    fn kept(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// The same for several threads: in shards.
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

    fn kept(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

/// Governor with the middleware that says what remains.
pub struct GovernorTelling(
    governor::RateLimiter<
        String,
        DefaultKeyedStateStore<String>,
        DefaultClock,
        StateInformationMiddleware,
    >,
);

impl Telling for GovernorTelling {
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

/// `quota`'s keyed pool, with its slot cache (its default), and room for all keys from the start.
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

    fn kept(&self) -> Option<usize> {
        Some(self.0.len())
    }
}

impl Telling for Quota {
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

/// `throttlecrab`'s library: a map that is asked by `&mut`, so behind a lock, which its documentation
/// advises. Of its stores the periodic one cleans up least often: every minute; here, not at all. It
/// always answers in full.
pub struct Throttlecrab {
    limiter: Mutex<throttlecrab::RateLimiter<throttlecrab::PeriodicStore>>,
    limit: Limit,
}

impl Throttlecrab {
    #[inline]
    fn ask(&self, key: &str) -> (bool, throttlecrab::RateLimitResult) {
        let (burst, seconds) = (i64::from(self.limit.burst), self.limit.one_per.as_secs() as i64);
        let mut limiter = self.limiter.lock().expect("nobody panicked");
        limiter.rate_limit(key, burst, 1, seconds, 1, SystemTime::now()).expect("a decision")
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
        self.ask(key).0
    }
}

impl Telling for Throttlecrab {
    const NAME: &'static str = "throttlecrab";

    fn new(limit: Limit, keys: usize) -> Self {
        <Self as Limiter>::new(limit, keys)
    }

    #[inline]
    fn remaining(&self, key: &String) -> Option<u64> {
        let (allowed, result) = std::hint::black_box(self.ask(key));
        allowed.then_some(result.remaining as u64)
    }
}

/// Limitador's library with its storage in memory. A request is a context of variables, which its
/// user makes from the key. It has a bound: twice the keys, so that it drops none of them.
pub struct Limitador {
    limiter: limitador::RateLimiter,
    namespace: limitador::limit::Namespace,
}

impl Limiter for Limitador {
    const NAME: &'static str = "limitador";

    fn new(limit: Limit, keys: usize) -> Self {
        let limiter = limitador::RateLimiter::new(2 * keys as u64);
        let variable = "key".try_into().expect("an expression");
        let rule =
            limitador::limit::Limit::new("bench", limit.burst.into(), 86_400, [], [variable]);
        limiter.add_limit(rule);
        Self { limiter, namespace: "bench".into() }
    }

    fn allows(&self, key: &String) -> bool {
        let values = HashMap::from([("key".to_owned(), key.clone())]);
        let checked =
            self.limiter.check_rate_limited_and_update(&self.namespace, &values.into(), 1);
        !checked.expect("a decision").limited
    }
}

/// Limiters without keys, in the map that their users put around them.
struct Keyed<L>(DashMap<String, L>);

impl<L> Keyed<L> {
    fn with_capacity(keys: usize) -> Self {
        Self(DashMap::with_capacity(keys))
    }

    #[inline]
    fn ask(&self, key: &str, new: impl FnOnce() -> L, ask: impl FnOnce(&L) -> bool) -> bool {
        if let Some(limiter) = self.0.get(key) {
            return ask(&limiter);
        }
        ask(&self.0.entry(key.to_owned()).or_insert_with(new))
    }
}

fn ratelimit(limit: Limit) -> ratelimit::Ratelimiter {
    ratelimit::Ratelimiter::builder(1)
        .period(limit.one_per)
        .max_tokens(limit.burst.into())
        .initial_available(limit.burst.into())
        .build()
        .expect("a limiter")
}

/// `ratelimit`, which knows no keys, in a map.
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
        self.limiters.ask(key, || ratelimit(self.limit), |limiter| limiter.try_wait().is_ok())
    }

    fn kept(&self) -> Option<usize> {
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

/// `leaky-bucket`, which knows no keys, in a map. It is made for waiting; this is its call that does
/// not, and that reads no clock while there are tokens left.
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
        self.limiters.ask(key, || leaky_bucket(self.limit), |limiter| limiter.try_acquire(1))
    }

    fn kept(&self) -> Option<usize> {
        Some(self.limiters.0.len())
    }
}

/// Those that limit one client that needs no name; the key is not looked at.
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

/// Calls a function for each of the keyed rivals: `keyed!(enter(arguments))` is a `Vec`.
///
/// Which of governor's configurations is the best depends on the number of threads.
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
