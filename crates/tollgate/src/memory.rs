//! Keys in memory: bounded, exact under any number of threads, and ready at once.

use std::fmt;

use tollgate_core::{
    Algorithm, Answer, BucketState, Cost, FixedWindowState, LimitState, Machine, Op, Part, Policy,
    SlidingWindowCounterState, SlidingWindowLogState, Tick, apply,
};

use crate::clock::{Clock, SystemClock};
use crate::hash::KeyHasher;
use crate::store::{MAX_KEY_BYTES, Store, StoreError};
use crate::table::{Fingerprint, Full, Spot, Table, Usage, WhenFull};

/// How much a memory store may hold, and what it does then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capacity {
    /// The most keys that are kept: about 43 bytes each for buckets, resident once they are used.
    pub max_keys: usize,
    /// What becomes of a new key when there are so many, and none is fresh.
    pub when_full: WhenFull,
}

impl Default for Capacity {
    /// A million keys, and the least used goes first.
    fn default() -> Self {
        Self { max_keys: 1_000_000, when_full: WhenFull::EvictLeastUsed }
    }
}

impl Capacity {
    /// At most so many keys.
    #[must_use]
    pub fn of(max_keys: usize) -> Self {
        Self { max_keys, ..Self::default() }
    }

    /// What becomes of a new key when there are so many.
    #[must_use]
    pub const fn when_full(mut self, when_full: WhenFull) -> Self {
        self.when_full = when_full;
        self
    }
}

/// The keys of one rule, in memory. For any [`Algorithm`], also one of a user's own.
pub struct MemoryStore<A: Algorithm, C = SystemClock> {
    table: Table<A::State>,
    front: Front<C>,
}

/// The keys of a [`Policy`], in memory: each algorithm in a table of its own kind, so that a bucket's
/// state takes 16 bytes and not as many as the largest of the six.
pub struct PolicyStore<C = SystemClock> {
    tables: Tables,
    front: Front<C>,
}

enum Tables {
    Bucket(Table<BucketState>),
    WideBucket(Table<BucketState<u128>>),
    FixedWindow(Table<FixedWindowState>),
    SlidingWindowLog(Table<SlidingWindowLogState>),
    SlidingWindowCounter(Table<SlidingWindowCounterState>),
    Several(Table<Box<[LimitState]>>),
}

/// What every request passes before a table: its key is hashed, its time is told.
struct Front<C> {
    hasher: KeyHasher,
    clock: C,
}

/// Why there is no decision, in a byte: the path of a known key carries it in a register.
enum NoDecision {
    KeyTooLong,
    Full,
}

impl From<Full> for NoDecision {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

impl NoDecision {
    #[cold]
    const fn explained(self, key_bytes: usize, max_keys: usize) -> StoreError {
        match self {
            Self::KeyTooLong => StoreError::KeyTooLong { bytes: key_bytes },
            Self::Full => StoreError::Full { max_keys },
        }
    }
}

/// How many keys of a batch are hashed and fetched ahead.
const AHEAD: usize = 32;

impl<C: Clock> Front<C> {
    fn new(clock: C) -> Self {
        Self { hasher: KeyHasher::new(), clock }
    }

    #[inline]
    fn fingerprint(&self, key: &[u8]) -> Result<Fingerprint, NoDecision> {
        if key.len() > MAX_KEY_BYTES {
            return Err(NoDecision::KeyTooLong);
        }
        Ok(self.hasher.fingerprint(key))
    }

    #[inline]
    fn apply<A: Algorithm, T: Answer>(
        &self,
        table: &Table<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        let decided = match op {
            Op::Check(cost) => self.check(table, rule, key, cost, now),
            op => self.other(table, rule, key, op, now),
        };
        decided.map_err(|why| why.explained(key.len(), table.max_keys()))
    }

    /// One function a rule, so that each is small: the choice among the six is made before it.
    #[inline(never)]
    fn check<A: Algorithm, T: Answer>(
        &self,
        table: &Table<A::State>,
        rule: &A,
        key: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<T, NoDecision> {
        let spot = table.spot(self.fingerprint(key)?);
        // The bucket comes from memory while the clock is read.
        let now = now.unwrap_or_else(|| self.clock.now());
        Ok(table.with(rule, spot, now, |state, now| rule.decide(state, now, cost))?)
    }

    /// The verbs that are not a check.
    #[cold]
    fn other<A: Algorithm, T: Answer>(
        &self,
        table: &Table<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, NoDecision> {
        let spot = table.spot(self.fingerprint(key)?);
        let now = now.unwrap_or_else(|| self.clock.now());
        Ok(table.with(rule, spot, now, |state, now| {
            let mut part = Part { rule, state, op };
            let agrees = part.admits(now);
            part.step(now, agrees).0
        })?)
    }

    /// Hashes some keys and asks for their memory, then decides them, then the next.
    fn check_many<A: Algorithm, T: Answer, K: AsRef<[u8]>>(
        &self,
        table: &Table<A::State>,
        rule: &A,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        if let Some(long) = keys.iter().find(|key| key.as_ref().len() > MAX_KEY_BYTES) {
            return Err(StoreError::KeyTooLong { bytes: long.as_ref().len() });
        }
        let now = now.unwrap_or_else(|| self.clock.now());
        let mut answers = Vec::with_capacity(keys.len());
        let mut spots = [Spot::default(); AHEAD];
        for some in keys.chunks(AHEAD) {
            for (spot, key) in spots.iter_mut().zip(some) {
                *spot = table.spot(self.hasher.fingerprint(key.as_ref()));
            }
            for spot in &spots[..some.len()] {
                let answer = table.with(rule, *spot, now, |state, now| rule.decide(state, now, cost));
                answers.push(answer.map_err(|Full| StoreError::Full { max_keys: table.max_keys() })?);
            }
        }
        Ok(answers)
    }
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// An empty store.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn new(capacity: Capacity, clock: C) -> Self {
        Self { table: Table::new(capacity.max_keys, capacity.when_full), front: Front::new(clock) }
    }

    /// What has become of keys so far.
    pub fn usage(&self) -> Usage {
        self.table.usage()
    }
}

impl<A: Algorithm, C: Clock> Store<A> for MemoryStore<A, C> {
    type Reply<T> = Result<T, StoreError>;

    #[inline]
    fn apply<T: Answer>(
        &self,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        self.front.apply(&self.table, rule, key, op, now)
    }

    fn check_many<T: Answer, K: AsRef<[u8]>>(
        &self,
        rule: &A,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        self.front.check_many(&self.table, rule, keys, cost, now)
    }

    #[inline]
    fn inspect<T>(reply: Result<T, StoreError>, see: impl FnOnce(&T)) -> Result<T, StoreError> {
        reply.inspect(see)
    }
}

impl<C: Clock> PolicyStore<C> {
    /// An empty store for the keys of a policy.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn new(policy: &Policy, capacity: Capacity, clock: C) -> Self {
        let Capacity { max_keys, when_full } = capacity;
        let tables = match policy.limits() {
            [limit] => match limit.machine() {
                Machine::TokenBucket(_) | Machine::Gcra(_) | Machine::LeakyBucket(_) => {
                    Tables::Bucket(Table::new(max_keys, when_full))
                }
                Machine::WideTokenBucket(_)
                | Machine::WideGcra(_)
                | Machine::WideLeakyBucket(_) => {
                    Tables::WideBucket(Table::new(max_keys, when_full))
                }
                Machine::FixedWindow(_) => Tables::FixedWindow(Table::new(max_keys, when_full)),
                Machine::SlidingWindowLog(_) => {
                    Tables::SlidingWindowLog(Table::new(max_keys, when_full))
                }
                Machine::SlidingWindowCounter(_) => {
                    Tables::SlidingWindowCounter(Table::new(max_keys, when_full))
                }
            },
            _ => Tables::Several(Table::new(max_keys, when_full)),
        };
        Self { tables, front: Front::new(clock) }
    }

    /// What has become of keys so far.
    pub fn usage(&self) -> Usage {
        match &self.tables {
            Tables::Bucket(table) => table.usage(),
            Tables::WideBucket(table) => table.usage(),
            Tables::FixedWindow(table) => table.usage(),
            Tables::SlidingWindowLog(table) => table.usage(),
            Tables::SlidingWindowCounter(table) => table.usage(),
            Tables::Several(table) => table.usage(),
        }
    }
}

/// Runs an expression with the rule and the table of its kind.
macro_rules! in_its_table {
    ($policy:expr, $tables:expr, |$rule:ident, $table:ident| $run:expr) => {
        match ($policy.limits(), $tables) {
            ([limit], tables) => match (limit.machine(), tables) {
                (Machine::TokenBucket($rule), Tables::Bucket($table)) => $run,
                (Machine::Gcra($rule), Tables::Bucket($table)) => $run,
                (Machine::LeakyBucket($rule), Tables::Bucket($table)) => $run,
                (Machine::WideTokenBucket($rule), Tables::WideBucket($table)) => $run,
                (Machine::WideGcra($rule), Tables::WideBucket($table)) => $run,
                (Machine::WideLeakyBucket($rule), Tables::WideBucket($table)) => $run,
                (Machine::FixedWindow($rule), Tables::FixedWindow($table)) => $run,
                (Machine::SlidingWindowLog($rule), Tables::SlidingWindowLog($table)) => $run,
                (Machine::SlidingWindowCounter($rule), Tables::SlidingWindowCounter($table)) => {
                    $run
                }
                _ => Err(StoreError::OtherPolicy),
            },
            (_, Tables::Several($table)) => {
                let $rule = $policy;
                $run
            }
            _ => Err(StoreError::OtherPolicy),
        }
    };
}

impl<C: Clock> Store<Policy> for PolicyStore<C> {
    type Reply<T> = Result<T, StoreError>;

    #[inline]
    fn apply<T: Answer>(
        &self,
        policy: &Policy,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        in_its_table!(policy, &self.tables, |rule, table| {
            self.front.apply(table, rule, key, op, now)
        })
    }

    fn check_many<T: Answer, K: AsRef<[u8]>>(
        &self,
        policy: &Policy,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        in_its_table!(policy, &self.tables, |rule, table| {
            self.front.check_many(table, rule, keys, cost, now)
        })
    }

    #[inline]
    fn inspect<T>(reply: Result<T, StoreError>, see: impl FnOnce(&T)) -> Result<T, StoreError> {
        reply.inspect(see)
    }
}

impl<A: Algorithm, C: Clock> fmt::Debug for MemoryStore<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore").field("usage", &self.usage()).finish_non_exhaustive()
    }
}

impl<C: Clock> fmt::Debug for PolicyStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyStore").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
