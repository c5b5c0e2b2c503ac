//! Keys in memory: bounded, exact under any number of threads, and ready at once.

use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::task::Waker;

use tollgate_core::{
    Algorithm, Answer, BucketState, Cost, Decision, FixedWindowState, Limit, LimitState, Machine,
    Op, Part, Policy, SlidingWindowCounterState, SlidingWindowLogState, Standing, Tick, Ticks,
};

use crate::clock::{Alarm, Clock, SystemClock};
use crate::hash::KeyHasher;
use crate::kept::Kept;
use crate::line::{Joined, Line, Ticket, Turn};
use crate::snapshot::{Section, SnapshotError, SnapshotWriter};
use crate::store::{Lent, MAX_KEY_BYTES, Store, StoreError};
use crate::table::{Fingerprint, Found, Full, Locks, Spot, Table, Usage, WhenFull};
use crate::tiers::{Access, Override, Plan};
use crate::together::JointStore;
use crate::waiting::WaitingStore;

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
    keys: Keys<A::State>,
    front: Front<C>,
}

/// The keys of a [`Policy`], in memory: each algorithm in a table of its own kind, so that a bucket's
/// state takes 16 bytes and not as many as the largest of the six.
pub struct PolicyStore<C = SystemClock> {
    kinds: Kinds,
    front: Front<C>,
}

enum Kinds {
    Bucket(Keys<BucketState>),
    WideBucket(Keys<BucketState<u128>>),
    FixedWindow(Keys<FixedWindowState>),
    SlidingWindowLog(Keys<SlidingWindowLogState>),
    SlidingWindowCounter(Keys<SlidingWindowCounterState>),
    /// Several limits, or one with options.
    Several(Keys<Box<[Standing]>>),
}

/// Runs an expression with a policy's rule and the keys of its kind.
macro_rules! of_its_kind {
    ($policy:expr, $kinds:expr, |$rule:ident, $keys:ident| $run:expr) => {
        match ($policy.plain().map(Limit::machine), $kinds) {
            (Some(Machine::TokenBucket($rule)), Kinds::Bucket($keys)) => $run,
            (Some(Machine::Gcra($rule)), Kinds::Bucket($keys)) => $run,
            (Some(Machine::LeakyBucket($rule)), Kinds::Bucket($keys)) => $run,
            (Some(Machine::WideTokenBucket($rule)), Kinds::WideBucket($keys)) => $run,
            (Some(Machine::WideGcra($rule)), Kinds::WideBucket($keys)) => $run,
            (Some(Machine::WideLeakyBucket($rule)), Kinds::WideBucket($keys)) => $run,
            (Some(Machine::FixedWindow($rule)), Kinds::FixedWindow($keys)) => $run,
            (Some(Machine::SlidingWindowLog($rule)), Kinds::SlidingWindowLog($keys)) => $run,
            (Some(Machine::SlidingWindowCounter($rule)), Kinds::SlidingWindowCounter($keys)) => {
                $run
            }
            (None, Kinds::Several($keys)) => {
                let $rule = $policy;
                $run
            }
            _ => Err(StoreError::OtherPolicy),
        }
    };
}

/// Runs an expression with the keys, of whatever kind they are.
macro_rules! of_any_kind {
    ($kinds:expr, |$keys:ident| $run:expr) => {
        match $kinds {
            Kinds::Bucket($keys) => $run,
            Kinds::WideBucket($keys) => $run,
            Kinds::FixedWindow($keys) => $run,
            Kinds::SlidingWindowLog($keys) => $run,
            Kinds::SlidingWindowCounter($keys) => $run,
            Kinds::Several($keys) => $run,
        }
    };
}

/// The states of keys, and those who wait for them.
pub(crate) struct Keys<S> {
    pub(crate) table: Table<S>,
    pub(crate) line: Line<S>,
}

/// What every request passes before a table: its key is hashed, its time is told.
pub(crate) struct Front<C> {
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

impl<S> Keys<S> {
    /// For keys of whose hashes at most so many bits are known.
    fn knowing(bits: u32, capacity: Capacity) -> Self {
        let Capacity { max_keys, when_full } = capacity;
        Self { table: Table::new(bits, max_keys, when_full), line: Line::default() }
    }

    fn new(capacity: Capacity) -> Self {
        Self::knowing(u128::BITS, capacity)
    }

    /// Keeps a key as it was, if there is room for it.
    fn keep(&self, rule: &impl Algorithm<State = S>, key: Fingerprint, was: S, now: Tick) {
        // Where there is none, the table counts it as refused.
        let _ = self.table.with(rule, self.table.spot(key), now, |state, _| *state = was);
    }

    pub(crate) fn full(&self) -> StoreError {
        StoreError::Full { max_keys: self.table.max_keys() }
    }
}

impl<S: Clone> Keys<S> {
    /// Decides a check: of those who wait for the key first, if there are any.
    #[inline]
    fn decide<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Result<T, Full> {
        if !self.line.is_empty()
            && let Some(told) = self.behind_others(rule, spot, cost, now)
        {
            return told;
        }
        self.table.with(rule, spot, now, |state, now| rule.decide(state, now, cost))
    }

    /// What is heard because others wait for the key.
    #[cold]
    pub(crate) fn behind_others<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Option<Result<T, Full>> {
        // A look does not take anybody's turn.
        if cost == 0 || self.line.is_empty() {
            return None;
        }
        let told = self.line.answer((&self.table, rule), spot, cost, now)?;
        Some(told.map(|decision| T::of_decision(decision, now)))
    }
}

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

    pub(crate) fn spot<S>(&self, keys: &Keys<S>, key: &[u8]) -> Result<Spot, StoreError> {
        match self.fingerprint(key) {
            Ok(print) => Ok(keys.table.spot(print)),
            Err(why) => Err(why.explained(key.len(), keys.table.max_keys())),
        }
    }

    pub(crate) fn now(&self) -> Tick {
        self.clock.now()
    }

    #[inline]
    fn apply<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        match op {
            Op::Check(cost) => self
                .check(keys, rule, key, cost, now)
                .map_err(|why| why.explained(key.len(), keys.table.max_keys())),
            op => self.other(keys, rule, key, op, now),
        }
    }

    /// One function a rule, so that each is small: the choice among the six is made before it.
    #[inline(never)]
    fn check<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<T, NoDecision> {
        let spot = keys.table.spot(self.fingerprint(key)?);
        // The bucket comes from memory while the clock is read.
        let now = now.unwrap_or_else(|| self.clock.now());
        Ok(keys.decide(rule, spot, cost, now)?)
    }

    /// The verbs that are not a check.
    #[cold]
    fn other<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        let spot = self.spot(keys, key)?;
        let now = now.unwrap_or_else(|| self.clock.now());
        if let Op::Peek(cost) = op
            && let Some(told) = keys.behind_others(rule, spot, cost, now)
        {
            return told.map_err(|Full| keys.full());
        }
        let stepped = keys.table.with(rule, spot, now, |state, now| {
            let mut part = Part { rule, state, op };
            let agrees = part.admits(now);
            part.step(now, agrees)
        });
        let (answer, dropped) = stepped.map_err(|Full| keys.full())?;
        if matches!(op, Op::Force(1..)) {
            keys.table.forgive(dropped);
        }
        keys.line.nudge(spot);
        Ok(answer)
    }

    /// Hashes some keys and asks for their memory, then decides them, then the next.
    fn check_many<A: Algorithm, T: Answer, K: AsRef<[u8]>>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        many: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        if let Some(long) = many.iter().find(|key| key.as_ref().len() > MAX_KEY_BYTES) {
            return Err(StoreError::KeyTooLong { bytes: long.as_ref().len() });
        }
        let now = now.unwrap_or_else(|| self.clock.now());
        let mut answers = Vec::with_capacity(many.len());
        let mut spots = [Spot::default(); AHEAD];
        for some in many.chunks(AHEAD) {
            for (spot, key) in spots.iter_mut().zip(some) {
                *spot = keys.table.spot(self.hasher.fingerprint(key.as_ref()));
            }
            for spot in &spots[..some.len()] {
                let answer = keys.decide(rule, *spot, cost, now);
                answers.push(answer.map_err(|Full| keys.full())?);
            }
        }
        Ok(answers)
    }

    fn join<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        cost: Cost,
        max_wait: Ticks,
    ) -> Result<Joined, StoreError> {
        let spot = self.spot(keys, key)?;
        let joined = keys.line.join((&keys.table, rule), spot, cost, self.clock.now(), max_wait);
        joined.map_err(|Full| keys.full())
    }

    fn turn<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        ticket: &Ticket,
        waker: &Waker,
    ) -> Result<Turn, StoreError> {
        let turn = keys.line.turn((&keys.table, rule), ticket, self.clock.now(), waker);
        turn.map_err(|Full| keys.full())
    }
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// An empty store.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn new(capacity: Capacity, clock: C) -> Self {
        Self { keys: Keys::new(capacity), front: Front::new(clock) }
    }

    /// What has become of keys so far.
    pub fn usage(&self) -> Usage {
        self.keys.table.usage()
    }

    /// Asks for the memory of a key that is about to be asked for. Who has several questions at hand does so for all
    /// of them first, and does not wait for memory with each. It changes nothing.
    #[inline]
    pub fn foresee(&self, key: &[u8]) {
        if let Ok(print) = self.front.fingerprint(key) {
            self.keys.table.spot(print);
        }
    }
}

/// Snapshots of the keys of [`Tiers`](crate::Tiers).
impl<C: Clock> MemoryStore<Plan, C> {
    /// Writes what its keys have used into a snapshot, by a name and with some overrides; how many keys. While others
    /// use the store, each key is written as it is at some moment meanwhile.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use tollgate::{
    ///     Access, Capacity, MemoryStore, Policy, RateLimiter, SnapshotReader, SnapshotWriter, SystemClock, Tiers,
    /// };
    ///
    /// let limiter = RateLimiter::tiered("api", Tiers::new(Policy::token_bucket(2).per_hour().build()?));
    /// limiter.check_n("alice", 2)?;
    /// limiter.set_override("mallory", Access::Blocked, None);
    /// let mut snapshot = SnapshotWriter::new(Vec::new())?;
    /// limiter.store().save(limiter.name(), &limiter.overrides(), &mut snapshot)?;
    /// let bytes = snapshot.finish()?;
    ///
    /// // Later, in another process, perhaps with other rules:
    /// let mut snapshot = SnapshotReader::new(&bytes[..])?;
    /// let mut section = snapshot.next_section()?.expect("there is one");
    /// let store =
    ///     MemoryStore::restored(Capacity::default(), SystemClock::new(), &mut section, Arc::new)?;
    /// let tiers = Tiers::new(Policy::sliding_window_log(5).per_hour().build()?);
    /// let limiter = RateLimiter::in_store(section.name(), tiers, store);
    /// for (key, set) in section.overrides() {
    ///     limiter.set_override(key, set.access.clone(), set.until);
    /// }
    /// assert_eq!(limiter.check("alice")?.remaining, 2);
    /// assert!(!limiter.check("mallory")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The snapshot cannot be written to.
    pub fn save(
        &self,
        name: &str,
        overrides: &[(Box<[u8]>, Override)],
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        let table = &self.keys.table;
        snapshot.put_table((name, overrides), &self.front.hasher, table, |kept, listed| {
            for (policy, standings) in kept.policies() {
                listed.add(policy, &standings);
            }
        })
    }

    /// A store with the keys of a snapshot, whatever its capacity was: if there are too many, the least used are evicted
    /// (see [`usage`](Self::usage)). Policies that are equal should be one: `share` finds the one, or is `Arc::new`.
    /// Its overrides are not set by this.
    ///
    /// # Errors
    /// The snapshot is damaged, or is of another version of Tollgate.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn restored(
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
        share: impl FnMut(Policy) -> Arc<Policy>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let now = clock.now();
        let keys = Keys::knowing(known_bits, capacity);
        // What was used does not depend on the plan.
        let rule = Plan::of(Access::Unlimited);
        section.each(share, |key, kept| keys.keep(&rule, key, kept, now))?;
        Ok(Self { keys, front: Front { hasher, clock } })
    }
}

/// Snapshots of the keys of any rule whose states stand for themselves, whatever the numbers of the rule that encodes and
/// decodes them.
impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Writes the states of its keys into a snapshot, by a name, and returns how many there are.
    ///
    /// # Errors
    /// The snapshot cannot be written to.
    pub fn save_states(
        &self,
        rule: &A,
        name: &str,
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        let table = &self.keys.table;
        snapshot.put_table((name, &[]), &self.front.hasher, table, |state, listed| {
            listed.add_state(|out| rule.encode(state, out));
        })
    }

    /// Returns a store with the keys that [`save_states`](Self::save_states) wrote.
    ///
    /// # Errors
    /// The snapshot is damaged, or its states are not this rule's.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn restored_states(
        rule: &A,
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let now = clock.now();
        let keys = Keys::knowing(known_bits, capacity);
        section.each_state(rule, |key, state| keys.keep(rule, key, state, now))?;
        Ok(Self { keys, front: Front { hasher, clock } })
    }
}

impl<A: Algorithm, C: Clock> Store<A> for MemoryStore<A, C> {
    type Reply<'a, T: 'a> = Result<T, StoreError>;

    #[inline]
    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        self.front.apply(&self.keys, &*rule, key, op, now)
    }

    fn check_many<'a, T: Answer, K: AsRef<[u8]>>(
        &'a self,
        rule: impl Lent<A> + 'a,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        self.front.check_many(&self.keys, &*rule, keys, cost, now)
    }

    fn now(&self) -> Tick {
        self.front.now()
    }

    fn rules_changed(&self) {
        self.keys.line.nudge_all();
    }

    #[inline]
    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Result<T, StoreError>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Result<U, StoreError> {
        reply.map(make)
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Result<T, StoreError>)>,
    ) -> Result<Vec<T>, StoreError> {
        replies.map(|(_, reply)| reply).collect()
    }
}

impl Kinds {
    fn of(policy: &Policy, known_bits: u32, capacity: Capacity) -> Self {
        match policy.plain().map(Limit::machine) {
            Some(Machine::TokenBucket(_) | Machine::Gcra(_) | Machine::LeakyBucket(_)) => {
                Self::Bucket(Keys::knowing(known_bits, capacity))
            }
            Some(
                Machine::WideTokenBucket(_) | Machine::WideGcra(_) | Machine::WideLeakyBucket(_),
            ) => Self::WideBucket(Keys::knowing(known_bits, capacity)),
            Some(Machine::FixedWindow(_)) => Self::FixedWindow(Keys::knowing(known_bits, capacity)),
            Some(Machine::SlidingWindowLog(_)) => {
                Self::SlidingWindowLog(Keys::knowing(known_bits, capacity))
            }
            Some(Machine::SlidingWindowCounter(_)) => {
                Self::SlidingWindowCounter(Keys::knowing(known_bits, capacity))
            }
            None => Self::Several(Keys::knowing(known_bits, capacity)),
        }
    }

    /// Keeps a key as it was, under a policy of this kind.
    fn keep(&self, policy: &Policy, key: Fingerprint, kept: &Kept, now: Tick) {
        let Some((_, standings)) = kept.policies().next() else { return };
        let kept: Result<(), StoreError> = of_its_kind!(policy, self, |rule, keys| {
            if let Some(state) = Standings::of(&standings) {
                keys.keep(rule, key, state, now);
            }
            Ok(())
        });
        debug_assert!(kept.is_ok(), "the kinds are made for the policy");
    }
}

/// The state of a kind as a policy has it, and back.
trait Standings: Sized {
    fn standings(&self) -> Box<[Standing]>;
    fn of(standings: &[Standing]) -> Option<Self>;
}

macro_rules! standings_of_one {
    ($state:ty, $kind:ident) => {
        impl Standings for $state {
            fn standings(&self) -> Box<[Standing]> {
                [LimitState::$kind(self.clone()).into()].into()
            }

            fn of(standings: &[Standing]) -> Option<Self> {
                match standings {
                    [one] => match one.state() {
                        LimitState::$kind(state) => Some(state.clone()),
                        _ => None,
                    },
                    _ => None,
                }
            }
        }
    };
}

standings_of_one!(BucketState, Bucket);
standings_of_one!(BucketState<u128>, WideBucket);
standings_of_one!(FixedWindowState, FixedWindow);
standings_of_one!(SlidingWindowLogState, SlidingWindowLog);
standings_of_one!(SlidingWindowCounterState, SlidingWindowCounter);

impl Standings for Box<[Standing]> {
    fn standings(&self) -> Box<[Standing]> {
        self.clone()
    }

    fn of(standings: &[Standing]) -> Option<Self> {
        Some(standings.into())
    }
}

impl<C: Clock> PolicyStore<C> {
    /// An empty store for the keys of a policy.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn new(policy: &Policy, capacity: Capacity, clock: C) -> Self {
        Self { kinds: Kinds::of(policy, u128::BITS, capacity), front: Front::new(clock) }
    }

    /// Writes what its keys have used into a snapshot, by a name; how many keys. The policy is that of its limiter. While
    /// others use the store, each key is written as it is at some moment meanwhile. [`SnapshotWriter`] has an example.
    ///
    /// # Errors
    /// The snapshot cannot be written to, or the store is for another policy.
    pub fn save(
        &self,
        policy: &Policy,
        name: &str,
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        let shared = Arc::new(policy.clone());
        let saved = of_its_kind!(policy, &self.kinds, |_rule, keys| {
            Ok(snapshot.put_table((name, &[]), &self.front.hasher, &keys.table, |state, listed| {
                listed.add(&shared, &state.standings());
            }))
        });
        saved.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?
    }

    /// A store for the keys of a policy, with those of a snapshot: whatever its capacity was, and whatever the policy was
    /// they were saved under. What was used stays used. [`SnapshotWriter`] has an example.
    ///
    /// # Errors
    /// The snapshot is damaged, or is of another version of Tollgate.
    ///
    /// # Panics
    /// If the system has no address space for so many keys.
    pub fn restored(
        policy: &Policy,
        capacity: Capacity,
        clock: C,
        section: &mut Section<'_, impl Read>,
    ) -> Result<Self, SnapshotError> {
        let (known_bits, hasher) = section.hashes();
        let now = clock.now();
        let shared = Arc::new(policy.clone());
        let share = |saved: Policy| if saved == *shared { shared.clone() } else { Arc::new(saved) };
        let kinds = Kinds::of(policy, known_bits, capacity);
        section.each(share, |key, mut kept| {
            kept.bring_under(&shared, now);
            kinds.keep(policy, key, &kept, now);
        })?;
        Ok(Self { kinds, front: Front { hasher, clock } })
    }

    /// What has become of keys so far.
    pub fn usage(&self) -> Usage {
        of_any_kind!(&self.kinds, |keys| keys.table.usage())
    }
}

impl<C: Clock> Store<Policy> for PolicyStore<C> {
    type Reply<'a, T: 'a> = Result<T, StoreError>;

    #[inline]
    fn apply<'a, T: Answer>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, keys| self.front.apply(keys, rule, key, op, now))
    }

    fn check_many<'a, T: Answer, K: AsRef<[u8]>>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Vec<T>, StoreError> {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, kept| {
            self.front.check_many(kept, rule, keys, cost, now)
        })
    }

    fn now(&self) -> Tick {
        self.front.now()
    }

    fn rules_changed(&self) {
        of_any_kind!(&self.kinds, |keys| keys.line.nudge_all());
    }

    #[inline]
    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Result<T, StoreError>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Result<U, StoreError> {
        reply.map(make)
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Result<T, StoreError>)>,
    ) -> Result<Vec<T>, StoreError> {
        replies.map(|(_, reply)| reply).collect()
    }
}

impl<A: Algorithm, C: Alarm> WaitingStore<A> for MemoryStore<A, C> {
    type Clock = C;

    fn clock(&self) -> &C {
        &self.front.clock
    }

    fn join(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        max_wait: Ticks,
    ) -> Result<Joined, StoreError> {
        self.front.join(&self.keys, rule, key, cost, max_wait)
    }

    fn turn(&self, rule: &A, ticket: &Ticket, waker: &Waker) -> Result<Turn, StoreError> {
        self.front.turn(&self.keys, rule, ticket, waker)
    }

    fn leave(&self, ticket: &Ticket) {
        self.keys.line.leave(ticket);
    }
}

impl<C: Alarm> WaitingStore<Policy> for PolicyStore<C> {
    type Clock = C;

    fn clock(&self) -> &C {
        &self.front.clock
    }

    fn join(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        max_wait: Ticks,
    ) -> Result<Joined, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.front.join(keys, rule, key, cost, max_wait)
        })
    }

    fn turn(&self, policy: &Policy, ticket: &Ticket, waker: &Waker) -> Result<Turn, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| self.front.turn(keys, rule, ticket, waker))
    }

    fn leave(&self, ticket: &Ticket) {
        of_any_kind!(&self.kinds, |keys| keys.line.leave(ticket));
    }
}

impl<A: Algorithm, C: Clock> JointStore<A> for MemoryStore<A, C> {
    fn spot(&self, _: &A, key: &[u8]) -> Result<Spot, StoreError> {
        self.front.spot(&self.keys, key)
    }

    fn lock_order(&self, spot: Spot) -> usize {
        self.keys.table.lock_order(spot)
    }

    fn behind_others(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Result<Option<Decision>, StoreError> {
        self.keys.behind_others(rule, spot, cost, now).transpose().map_err(|Full| self.keys.full())
    }

    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Found {
        self.keys.table.look_for(spot, locks)
    }

    fn agrees(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        self.keys.agrees(rule, found, cost, now, locks)
    }

    fn step(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        self.keys.step(rule, found, cost, now, locks, go)
    }
}

impl<C: Clock> JointStore<Policy> for PolicyStore<C> {
    fn spot(&self, policy: &Policy, key: &[u8]) -> Result<Spot, StoreError> {
        of_its_kind!(policy, &self.kinds, |_rule, keys| self.front.spot(keys, key))
    }

    fn lock_order(&self, spot: Spot) -> usize {
        of_any_kind!(&self.kinds, |keys| keys.table.lock_order(spot))
    }

    fn behind_others(
        &self,
        policy: &Policy,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Result<Option<Decision>, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            keys.behind_others(rule, spot, cost, now).transpose().map_err(|Full| keys.full())
        })
    }

    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Found {
        of_any_kind!(&self.kinds, |keys| keys.table.look_for(spot, locks))
    }

    fn agrees(
        &self,
        policy: &Policy,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| keys.agrees(rule, found, cost, now, locks))
    }

    fn step(
        &self,
        policy: &Policy,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let told = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.step(rule, found, cost, now, locks, go))
        });
        told.unwrap_or_else(|_| unreachable!("its spot was of this kind"))
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
