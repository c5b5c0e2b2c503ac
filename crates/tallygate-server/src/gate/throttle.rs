//! `CL.THROTTLE`, whose limits come with the request.
//!
//! The key alone identifies a client: usage charged with some numbers also counts with other numbers. `cell.rs` is the
//! algorithm in memory. Redis stores the same values as for policies.

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tallygate::algorithm::Op;
use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, MemoryStore, Store as _, Usage};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Decision, Policy, PolicyError, Ticks};
use tallygate_lab::duration::DurationText;
use tallygate_lab::limit_syntax::in_durations;
use tallygate_redis::{OnFailure, Redis, RedisStore};

use super::cell::Cell;
use super::{GateError, GateReply};
use crate::config::CL_THROTTLE;

/// The store of `CL.THROTTLE`.
pub(super) enum Throttle {
    Memory(Box<MemoryStore<Cell>>),
    Redis(RedisStore),
}

/// The numbers of a `CL.THROTTLE`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ThrottleArguments {
    pub(crate) max_burst: u64,
    pub(crate) count: u64,
    pub(crate) period_s: u64,
}

/// Why a `CL.THROTTLE` is rejected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ThrottleError {
    /// The configuration disables it.
    Off,
    /// The numbers are not a valid limit.
    Numbers(PolicyError),
    /// The store would keep the key for longer than `max_time_to_fresh`.
    TooLong { time_to_fresh: Duration, longest: Duration },
}

type ClientRules = HashMap<ThrottleArguments, ClientRule, foldhash::fast::RandomState>;

/// How many sets of numbers a thread caches the rules of, for Redis.
const REMEMBERED: usize = 1024;

impl Throttle {
    /// Creates a memory store, with the keys of a snapshot if there is one.
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

    /// Creates a Redis store. No policy has the same name, because the configuration rejects it.
    pub(super) fn in_redis(redis: &Redis) -> Self {
        Self::Redis(redis.store(CL_THROTTLE).on_failure(OnFailure::Allow))
    }

    /// Returns the usage of the memory store; `None` if the keys are in Redis.
    pub(super) fn usage(&self) -> Option<Usage> {
        self.in_memory_store().map(MemoryStore::usage)
    }

    /// Drops idle keys in the next buckets of the memory store. Returns how many buckets the pass has not visited yet.
    pub(super) fn sweep(&self, buckets: usize) -> usize {
        // A state has its own numbers, so any numbers will do.
        let rule = Cell::new(ThrottleArguments { max_burst: 0, count: 1, period_s: 1 });
        self.in_memory_store().map_or(0, |store| store.sweep(&rule, buckets).buckets_left)
    }

    /// Loads the memory of a key that will be needed soon.
    pub(super) fn prefetch(&self, key: &[u8]) {
        if let Self::Memory(store) = self {
            store.prefetch(key);
        }
    }

    /// Decides a request whose numbers were [checked](ThrottleArguments::check).
    pub(super) fn ask(
        &self,
        key: &[u8],
        arguments: ThrottleArguments,
        quantity: Cost,
    ) -> Result<GateReply<Decision>, ThrottleError> {
        let op = Op::Check(quantity);
        match self {
            Self::Memory(store) => {
                let decided = store.apply(&Cell::new(arguments), key, op, None);
                Ok(GateReply::Now(decided.map_err(GateError::from)))
            }
            Self::Redis(store) => {
                let rule = arguments.rule().map_err(ThrottleError::Numbers)?;
                let (store, key) = (store.clone(), Box::<[u8]>::from(key));
                Ok(GateReply::Later(Box::pin(async move {
                    store.apply(&rule, &key, op, None).await.map_err(GateError::from)
                })))
            }
        }
    }
}

impl ThrottleArguments {
    /// Returns the most units that can be used at once.
    pub(super) const fn burst(self) -> Cost {
        self.max_burst.saturating_add(1)
    }

    /// Returns the period. Parsing bounds it, so its nanoseconds do not overflow.
    pub(super) const fn period(self) -> Ticks {
        Ticks(self.period_s.saturating_mul(Ticks::PER_SECOND))
    }

    /// Checks that a key cannot take longer than `longest` to be fresh again.
    ///
    /// # Errors
    ///
    /// It could take longer, and the store would keep the key for so long.
    pub(super) fn check(self, longest: Duration) -> Result<(), ThrottleError> {
        let nanos = (u128::from(self.burst()) * u128::from(self.period().0))
            .div_ceil(u128::from(self.count.max(1)));
        if nanos <= longest.as_nanos() {
            return Ok(());
        }
        // Show whole seconds, or nanoseconds if they make the difference: 7 days and 1 ns are not "7d".
        let seconds = u64::try_from(nanos / u128::from(Ticks::PER_SECOND)).unwrap_or(u64::MAX);
        let rest = u32::try_from(nanos % u128::from(Ticks::PER_SECOND)).unwrap_or(0);
        let time_to_fresh =
            Duration::new(seconds, if seconds == longest.as_secs() { rest } else { 0 });
        Err(ThrottleError::TooLong { time_to_fresh, longest })
    }

    /// Returns the rule of these numbers, for Redis.
    fn rule(self) -> Result<ClientRule, PolicyError> {
        thread_local! {
            static RULES: RefCell<ClientRules> = RefCell::default();
        }
        RULES.with_borrow_mut(|rules| {
            if let Some(rule) = rules.get(&self) {
                return Ok(rule.clone());
            }
            if rules.len() >= REMEMBERED {
                rules.clear();
            }
            let rule = ClientRule::of(Access::Limited(Arc::new(self.build()?)));
            rules.insert(self, rule.clone());
            Ok(rule)
        })
    }

    fn build(self) -> Result<Policy, PolicyError> {
        Policy::gcra(self.count).per(self.period()).burst(self.burst()).debt(0).build()
    }
}

impl fmt::Display for ThrottleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("CL.THROTTLE is disabled (`[cl_throttle] enabled = false`); use TG.CHECK with a policy"),
            Self::Numbers(error) => f.write_str(&in_durations(error)),
            Self::TooLong { time_to_fresh, longest } => {
                let (time_to_fresh, longest) =
                    (DurationText(*time_to_fresh), DurationText(*longest));
                write!(
                    f,
                    "a key would need {time_to_fresh} to recover ((max_burst + 1) * period / count); "
                )?;
                write!(
                    f,
                    "the maximum is {longest} (`max_time_to_fresh` in `[limits]`)"
                )
            }
        }
    }
}

impl std::error::Error for ThrottleError {}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tallygate::Tick;
    use tallygate::clock::ManualClock;

    use tallygate_redis::Stores;

    use super::super::{Gate, RestoredStores};
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

    /// Fault J6.
    #[test]
    fn a_flood_of_throttles_with_any_numbers_evicts_no_debt() {
        for flood in FLOODS {
            let clock = ManualClock::new(Tick(1_000_000));
            let store = MemoryStore::<Cell, _>::new(Capacity::of(MAX_KEYS), &clock);
            let denied = still_denied(flood, |key, numbers, quantity| {
                clock.advance(Ticks(100_000));
                let op = Op::Check(quantity);
                let decision: Decision = store.apply(&Cell::new(numbers), key, op, None).unwrap();
                decision.allowed
            });
            assert!(denied * 100 >= 99 * 200, "{denied} are denied after {flood:?}");
            assert!(store.usage().keys <= MAX_KEYS);
        }
    }

    /// Fault J6.
    #[test]
    fn a_flood_of_throttles_through_the_gate_evicts_no_debt() {
        let config = Config::parse("", Path::new("")).unwrap();
        for flood in FLOODS {
            let stores = Stores::Memory(Capacity::of(MAX_KEYS));
            let gate =
                Arc::new(Gate::new(&config, stores, Metrics::new(), RestoredStores::default()));
            let denied = still_denied(flood, |key, numbers, quantity| {
                match gate.throttle(key, numbers, quantity) {
                    Ok(GateReply::Now(Ok(decision))) => decision.allowed,
                    _ => unreachable!("memory decides at once"),
                }
            });
            assert!(denied * 100 >= 99 * 200, "{denied} are denied after {flood:?}");
        }
    }
}
