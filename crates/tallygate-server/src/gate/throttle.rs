//! Limits that come with the request: `CL.THROTTLE`.
//!
//! A client is known by its key alone, whatever numbers come with it: what it used under some stays used under others.
//! `cell.rs` is the rule that decides in memory. Redis keeps the values that policies have.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tallygate::{
    Access, Capacity, Cost, Decision, MemoryStore, Op, Plan, Policy, PolicyError, Store as _,
    SystemClock, Ticks, Usage,
};
use tallygate_redis::{OnFailure, Redis, RedisStore};

use super::cell::Cell;
use super::{AskError, Asked};

/// Limits that come with the request.
pub(super) enum Throttle {
    Memory(Box<MemoryStore<Cell>>),
    Redis(RedisStore),
}

/// The numbers of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ThrottleArguments {
    pub(crate) max_burst: u64,
    pub(crate) count: u64,
    pub(crate) period_s: u64,
}

/// Why a `CL.THROTTLE` is not decided.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ThrottleError {
    /// The configuration turns it off.
    Off,
    /// No limit has these numbers.
    Numbers(PolicyError),
    /// The state would live longer than the configuration allows for numbers that come with requests.
    TooLong { time_to_fresh: Duration, longest: Duration },
}

type Plans = HashMap<ThrottleArguments, Plan, foldhash::fast::RandomState>;

/// How many sets of numbers a thread remembers the plans of, for Redis.
const REMEMBERED: usize = 1024;

impl Throttle {
    /// Returns one with the clients of a store that was there before, or with none.
    pub(super) fn in_memory(capacity: Capacity, remembered: Option<MemoryStore<Cell>>) -> Self {
        let new = || MemoryStore::new(capacity, SystemClock::new());
        Self::Memory(Box::new(remembered.unwrap_or_else(new)))
    }

    pub(super) fn in_memory_store(&self) -> Option<&MemoryStore<Cell>> {
        match self {
            Self::Memory(store) => Some(store),
            Self::Redis(_) => None,
        }
    }

    /// No policy of a configuration has a control character in its name.
    pub(super) fn in_redis(redis: &Redis) -> Self {
        Self::Redis(redis.store("\u{1}throttle").on_failure(OnFailure::Allow))
    }

    /// Returns how many keys are kept here; `None` if they are in Redis.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.in_memory_store().map(MemoryStore::usage)
    }

    /// Says that a key is about to be asked for.
    pub(super) fn foresee(&self, key: &[u8]) {
        if let Self::Memory(store) = self {
            store.foresee(key);
        }
    }

    /// Decides by numbers that were [checked](ThrottleArguments::check).
    pub(super) fn ask(
        &self,
        key: &[u8],
        arguments: ThrottleArguments,
        quantity: Cost,
    ) -> Result<Asked<Decision>, ThrottleError> {
        let op = Op::Check(quantity);
        match self {
            Self::Memory(store) => {
                let told = store.apply(&Cell::new(arguments), key, op, None);
                Ok(Asked::Now(told.map_err(AskError::from)))
            }
            Self::Redis(store) => {
                let plan = arguments.plan().map_err(ThrottleError::Numbers)?;
                let (store, key) = (store.clone(), Box::<[u8]>::from(key));
                Ok(Asked::Later(Box::pin(async move {
                    store.apply(&plan, &key, op, None).await.map_err(AskError::from)
                })))
            }
        }
    }
}

impl ThrottleArguments {
    /// The most that can be used at once.
    pub(super) const fn burst(self) -> Cost {
        self.max_burst.saturating_add(1)
    }

    /// The period. Parsing bounds it: its nanoseconds fit.
    pub(super) const fn period(self) -> Ticks {
        Ticks(self.period_s.saturating_mul(Ticks::PER_SECOND))
    }

    /// Denies numbers under which a key could take longer than `longest` to be fresh again.
    ///
    /// # Errors
    /// It could: the state of such a key would stay in the store for as long.
    pub(super) fn check(self, longest: Duration) -> Result<(), ThrottleError> {
        let nanos = (u128::from(self.burst()) * u128::from(self.period().0))
            .div_ceil(u128::from(self.count.max(1)));
        if nanos <= longest.as_nanos() {
            return Ok(());
        }
        // To the second above, or to the nanosecond if that shows the difference: 7 days and 1 ns are not "7days".
        let seconds = u64::try_from(nanos / u128::from(Ticks::PER_SECOND)).unwrap_or(u64::MAX);
        let rest = u32::try_from(nanos % u128::from(Ticks::PER_SECOND)).unwrap_or(0);
        let time_to_fresh =
            Duration::new(seconds, if seconds == longest.as_secs() { rest } else { 0 });
        Err(ThrottleError::TooLong { time_to_fresh, longest })
    }

    /// The plan of these numbers, for a store that keeps policies.
    fn plan(self) -> Result<Plan, PolicyError> {
        thread_local! {
            static PLANS: RefCell<Plans> = RefCell::default();
        }
        PLANS.with_borrow_mut(|plans| {
            if let Some(plan) = plans.get(&self) {
                return Ok(plan.clone());
            }
            if plans.len() >= REMEMBERED {
                plans.clear();
            }
            let plan = Plan::of(Access::Limited(Arc::new(self.build()?)));
            plans.insert(self, plan.clone());
            Ok(plan)
        })
    }

    fn build(self) -> Result<Policy, PolicyError> {
        Policy::gcra(self.count).per(self.period()).burst(self.burst()).debt(0).build()
    }
}

impl fmt::Display for ThrottleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("CL.THROTTLE is turned off; use a policy with TG.CHECK"),
            Self::Numbers(error) => error.fmt(f),
            Self::TooLong { time_to_fresh, longest } => {
                let (time_to_fresh, longest) = (
                    humantime::format_duration(*time_to_fresh),
                    humantime::format_duration(*longest),
                );
                write!(
                    f,
                    "a key would take {time_to_fresh} to earn (max_burst + 1) * period / count back; "
                )?;
                write!(
                    f,
                    "use numbers that need at most {longest} (`max_time_to_fresh` of `[limits]`)"
                )
            }
        }
    }
}

impl std::error::Error for ThrottleError {}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tallygate::{ManualClock, Tick};

    use tallygate_redis::Stores;

    use super::super::{Gate, Remembered};
    use super::*;
    use crate::config::Config;
    use crate::metrics::Metrics;

    const MAX_KEYS: usize = 10_000;
    const CLIENTS: u64 = 200;
    const DAY_S: u64 = 86_400;
    /// The numbers of the clients that use up their quota: five per day.
    const VICTIM: ThrottleArguments = ThrottleArguments { max_burst: 4, count: 5, period_s: DAY_S };

    /// The numbers of invented keys, and how much each of them takes.
    const FLOODS: [(u64, u64, u64, Cost); 7] = [
        (0, 1, 1, 1),
        (0, 1, 7 * DAY_S, 1),
        (999_999, 1_000_000, 3_600, 500_000),
        (999_999, 1_000_000, 3_600, 1_000_000),
        (999_999, 1_000_000, 7 * DAY_S, 1_000_000),
        (u64::MAX / 4, u64::MAX / 4, 3_600, u64::MAX / 8),
        (u64::MAX / 4, u64::MAX / 4, 3_600, u64::MAX / 4),
    ];

    /// Lets clients use up their quota, sends a flood, and returns how many of them are still denied.
    fn still_denied(
        (max_burst, count, period_s, quantity): (u64, u64, u64, Cost),
        mut is_allowed: impl FnMut(&[u8], ThrottleArguments, Cost) -> bool,
    ) -> usize {
        for client in 0..CLIENTS {
            assert!(is_allowed(&client.to_le_bytes(), VICTIM, 5));
            assert!(!is_allowed(&client.to_le_bytes(), VICTIM, 1));
        }
        let numbers = ThrottleArguments { max_burst, count, period_s };
        for key in 0..10 * MAX_KEYS as u64 {
            assert!(is_allowed(&(1 << 50 | key).to_le_bytes(), numbers, quantity));
        }
        (0..CLIENTS).filter(|client| !is_allowed(&client.to_le_bytes(), VICTIM, 1)).count()
    }

    #[test]
    fn j6_a_flood_of_throttles_with_any_numbers_washes_no_debt_out() {
        for flood in FLOODS {
            let clock = ManualClock::new(Tick(1_000_000));
            let store = MemoryStore::<Cell, _>::new(Capacity::of(MAX_KEYS), &clock);
            let denied = still_denied(flood, |key, numbers, quantity| {
                clock.advance(Ticks(100_000));
                let op = Op::Check(quantity);
                let told: Decision = store.apply(&Cell::new(numbers), key, op, None).unwrap();
                told.allowed
            });
            assert!(denied * 100 >= 99 * 200, "{denied} are denied after {flood:?}");
            assert!(store.usage().keys <= MAX_KEYS);
        }
    }

    #[test]
    fn j6_a_flood_of_throttles_through_the_gate_washes_no_debt_out() {
        let config = Config::parse("", Path::new("")).unwrap();
        for flood in FLOODS {
            let stores = Stores::Memory(Capacity::of(MAX_KEYS));
            let gate = Arc::new(Gate::new(&config, stores, Metrics::new(), Remembered::default()));
            let denied = still_denied(flood, |key, numbers, quantity| {
                match gate.throttle(key, numbers, quantity) {
                    Ok(Asked::Now(Ok(decision))) => decision.allowed,
                    _ => unreachable!("memory decides at once"),
                }
            });
            assert!(denied * 100 >= 99 * 200, "{denied} are denied after {flood:?}");
        }
    }
}
