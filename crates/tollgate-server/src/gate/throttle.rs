//! Limits that come with the request: `CL.THROTTLE`.
//!
//! A client is known by its key alone, whatever numbers come with it: what it used under some stays used under others.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use tollgate::{
    Access, Capacity, Cost, Decision, Limit, MemoryStore, Op, Plan, Policy, PolicyError,
    Store as _, SystemClock, Ticks,
};
use tollgate_redis::{OnFailure, Redis, RedisStore};

use super::{AskError, Asked};

/// Limits that come with the request.
pub(super) enum Throttle {
    Memory(Box<MemoryStore<Plan>>),
    Redis(RedisStore),
}

/// The numbers of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ThrottleArguments {
    pub(crate) max_burst: u64,
    pub(crate) count: u64,
    pub(crate) period_s: u64,
}

type Known<T> = HashMap<ThrottleArguments, T, foldhash::fast::RandomState>;

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// How many sets of numbers are remembered.
const REMEMBERED: usize = 1024;

impl Throttle {
    /// With the clients of a store that was there before, or with none.
    pub(super) fn in_memory(max_keys: usize, remembered: Option<MemoryStore<Plan>>) -> Self {
        let new = || MemoryStore::new(Capacity::of(max_keys), SystemClock::new());
        Self::Memory(Box::new(remembered.unwrap_or_else(new)))
    }

    pub(super) fn in_memory_store(&self) -> Option<&MemoryStore<Plan>> {
        match self {
            Self::Memory(store) => Some(store),
            Self::Redis(_) => None,
        }
    }

    /// No policy of a configuration has a control character in its name.
    pub(super) fn in_redis(redis: &Redis) -> Self {
        Self::Redis(redis.store("\u{1}throttle").on_failure(OnFailure::Allow))
    }

    /// Says that a key is about to be asked for.
    pub(super) fn foresee(&self, key: &[u8]) {
        if let Self::Memory(store) = self {
            store.foresee(key);
        }
    }

    /// Decides; the error is that of the numbers.
    pub(super) fn ask(
        &self,
        key: &[u8],
        arguments: ThrottleArguments,
        quantity: Cost,
    ) -> Result<Asked<Decision>, PolicyError> {
        let op = Op::Check(quantity);
        arguments.with_plan(|plan| match self {
            Self::Memory(store) => {
                Asked::Now(store.apply(plan, key, op, None).map_err(AskError::from))
            }
            Self::Redis(store) => {
                let (store, plan, key) = (store.clone(), plan.clone(), Box::<[u8]>::from(key));
                Asked::Later(Box::pin(async move {
                    store.apply(&plan, &key, op, None).await.map_err(AskError::from)
                }))
            }
        })
    }
}

impl ThrottleArguments {
    /// Runs with the plan of these numbers. Its policy is the same one for all threads, so that a client's state knows
    /// it when it sees it; each thread holds it for itself, so that they do not count in the same place.
    fn with_plan<R>(self, run: impl FnOnce(&Plan) -> R) -> Result<R, PolicyError> {
        thread_local! {
            static NEAR: RefCell<Known<Plan>> = RefCell::default();
        }
        NEAR.with_borrow_mut(|near| {
            if let Some(plan) = near.get(&self) {
                return Ok(run(plan));
            }
            let plan = Plan::of(Access::Limited(self.policy()?));
            Ok(run(remember(near, self, plan)))
        })
    }

    fn policy(self) -> Result<Arc<Policy>, PolicyError> {
        static SHARED: Mutex<Option<Known<Arc<Policy>>>> = Mutex::new(None);
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        let shared = shared.get_or_insert_default();
        match shared.get(&self) {
            Some(policy) => Ok(policy.clone()),
            None => Ok(remember(shared, self, Arc::new(self.build()?)).clone()),
        }
    }

    /// The policy that all threads share which is the same as one, or that one.
    pub(super) fn shared(policy: Policy) -> Arc<Policy> {
        let numbers = policy.limits().first().map(Limit::numbers);
        let arguments = numbers.map(|numbers| Self {
            max_burst: numbers.burst.saturating_sub(1),
            count: numbers.limit,
            period_s: numbers.window.0 / NANOS_PER_SECOND,
        });
        let shared = arguments.and_then(|arguments| arguments.policy().ok());
        shared.filter(|shared| **shared == policy).unwrap_or_else(|| policy.into())
    }

    fn build(self) -> Result<Policy, PolicyError> {
        let window = Ticks(self.period_s.saturating_mul(NANOS_PER_SECOND));
        Policy::gcra(self.count).per(window).burst(self.max_burst.saturating_add(1)).debt(0).build()
    }
}

fn remember<T>(known: &mut Known<T>, arguments: ThrottleArguments, what: T) -> &T {
    if known.len() >= REMEMBERED {
        known.clear();
    }
    known.entry(arguments).or_insert(what)
}
