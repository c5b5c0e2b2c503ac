//! Keys in memory: bounded, exact under any number of threads, and ready at once.

use std::any::TypeId;
use std::fmt;
use std::io::{self, Read, Write};
use std::sync::Arc;
use std::task::Waker;

use tallygate_core::{
    Algorithm, Answer, BucketState, Cost, Decision, FixedWindowState, Limit, LimitState, Machine,
    Op, Part, Policy, Receipt, SlidingWindowCounterState, SlidingWindowLogState, Standing, Tick,
    Ticks, Timed, Used, reserve, settle,
};

use crate::ask::{Ask, InvalidAsk};
use crate::clock::{Alarm, Clock, SystemClock};
use crate::departures::{Departure, Departures};
use crate::hash::KeyHasher;
use crate::kept::Kept;
use crate::line::{Joined, Line, Ticket, Turn};
use crate::reservation::{Charged, SettleError};
use crate::returns::{ReturnLog, WasReset};
use crate::snapshot::{Section, SnapshotError, SnapshotWriter};
use crate::store::{Lent, MAX_KEY_BYTES, Store, StoreError};
use crate::table::{
    Fingerprint, Found, Full, Locks, Lookup, Reading, Spot, Table, Usage, WhenFull,
};
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
    /// A million keys, and a full store evicts the key that has used the smallest share of its quota.
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
    /// The policy that it was made for.
    policy: Arc<Policy>,
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
            (Some(Machine::Bucket($rule)), Kinds::Bucket($keys)) => $run,
            (Some(Machine::WideBucket($rule)), Kinds::WideBucket($keys)) => $run,
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
    pub(crate) line: Line,
    pub(crate) departures: Departures,
}

/// What every request passes before a table: its key is hashed, its time is told.
pub(crate) struct Front<C> {
    hasher: KeyHasher,
    clock: C,
    returns: ReturnLog,
}

/// Why there is no decision, in a byte: the path of a known key carries it in a register.
#[derive(Clone, Copy)]
enum NoDecision {
    KeyTooLong,
    Full,
}

impl From<Full> for NoDecision {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

/// Counts the waits of an answer from the caller's `now`, which is earlier than `at` if the caller is late.
#[inline]
pub(crate) fn counted_from<T: Answer>(now: Tick, at: Tick, answer: T) -> T {
    if at > now { answer.counted_from_earlier(at.since(now)) } else { answer }
}

/// Decides at `at` for a caller that read `now`, which is earlier if the caller is late.
///
/// This is a call of its own, with its arguments in registers, and the usual answer is written to where the caller reads
/// it: to copy what was just written takes longer than to write it.
#[inline(never)]
fn decide_in_full<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    at: Tick,
    cost: Cost,
) -> T {
    if at > now {
        return counted_from(now, at, rule.decide::<T>(state, at, cost));
    }
    rule.decide::<T>(state, at, cost)
}

/// How many keys of a batch are hashed and fetched ahead.
const AHEAD: usize = 32;

impl<S> Keys<S> {
    /// For keys of whose hashes at most so many bits are known.
    fn knowing(bits: u32, capacity: Capacity) -> Self {
        let Capacity { max_keys, when_full } = capacity;
        Self {
            table: Table::new(bits, max_keys, when_full),
            line: Line::default(),
            departures: Departures::default(),
        }
    }

    fn new(capacity: Capacity) -> Self {
        Self::knowing(u128::BITS, capacity)
    }

    /// Keeps a key as it was, if there is room for it.
    fn keep(&self, rule: &impl Algorithm<State = S>, key: Fingerprint, was: S, reading: Reading) {
        // Where there is none, the table counts it as refused.
        let _ = self.table.with(rule, self.table.spot(key), reading, |state, _| *state = was);
        self.table.grow_for_restored();
    }

    pub(crate) fn full(&self) -> StoreError {
        StoreError::Full { max_keys: self.table.max_keys() }
    }

    /// Decides for a new key that found no place: as for a client that has used up its quota, because it may be one.
    ///
    /// # Errors
    /// The store refuses new keys when it is full.
    #[cold]
    fn without_place<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        cost: Cost,
        now: Tick,
    ) -> Result<T, StoreError> {
        if self.table.refuses_new() {
            return Err(self.full());
        }
        let mut used_up = rule.with_used(Used::whole(Cost::MAX), now);
        Ok(rule.decide(&mut used_up, now, cost))
    }
}

impl<S: Clone> Keys<S> {
    /// Decides a check: of those who wait for the key first, if there are any.
    // Always: a call in the path of a known key is measured, and so are the registers saved for it.
    #[inline(always)]
    fn decide<A: Algorithm<State = S>, T: Answer, E: From<Full>>(
        &self,
        rule: &A,
        key: Lookup,
        cost: Cost,
        reading: Reading,
    ) -> Result<T, E> {
        if (cost == 0 || !self.line.is_empty())
            && let Some(answer) = self.decide_unusual(rule, key.spot, cost, reading)
        {
            return answer.map_err(E::from);
        }
        let now = reading.now;
        // By value: what is borrowed would be written to memory for every key.
        self.table.with_lookup(rule, key, reading, move |state, at| match T::TELLS {
            true => decide_in_full(rule, state, now, at, cost),
            false => rule.decide::<T>(state, at, cost),
        })
    }

    /// Decides a check that uses nothing, or that comes behind others.
    #[cold]
    #[inline(never)]
    fn decide_unusual<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        reading: Reading,
    ) -> Option<Result<T, Full>> {
        if cost == 0 {
            let look = |state: &mut S, at| rule.decide::<T>(state, at, 0);
            return Some(Ok(self.look(rule, spot, reading, look)));
        }
        self.note_set_back(reading);
        self.behind_others(rule, spot, cost, reading.now)
    }

    /// Answers from a key's state, or from the state it would start with, and changes nothing.
    #[cold]
    fn look<A: Algorithm<State = S>, T: Answer>(
        &self,
        rule: &A,
        spot: Spot,
        reading: Reading,
        read: impl FnOnce(&mut S, Tick) -> T,
    ) -> T {
        self.table
            .look(rule, spot, reading, |state, at| counted_from(reading.now, at, read(state, at)))
    }

    /// If a reading is the first after the clock was set back, whoever waits asks again.
    #[cold]
    fn note_set_back(&self, reading: Reading) {
        if self.table.note_set_back(reading) {
            self.line.nudge_all();
        }
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
        Self::with(KeyHasher::new(), clock)
    }

    fn with(hasher: KeyHasher, clock: C) -> Self {
        Self { hasher, clock, returns: ReturnLog::new() }
    }

    #[inline(always)]
    fn fingerprint(&self, key: &[u8]) -> Result<Fingerprint, NoDecision> {
        if key.len() > MAX_KEY_BYTES {
            return Err(NoDecision::KeyTooLong);
        }
        Ok(self.hasher.fingerprint(key))
    }

    pub(crate) fn spot<S>(&self, keys: &Keys<S>, key: &[u8]) -> Result<Spot, StoreError> {
        self.print(key).map(|print| keys.table.spot(print))
    }

    fn print(&self, key: &[u8]) -> Result<Fingerprint, StoreError> {
        self.fingerprint(key).map_err(|_| StoreError::KeyTooLong { bytes: key.len() })
    }

    pub(crate) fn now(&self) -> Tick {
        self.clock.now()
    }

    /// The time that the caller gave, or that of the clock.
    #[inline]
    fn read(&self, now: Option<Tick>) -> Reading {
        now.map_or_else(|| Reading::of(&self.clock), Reading::from)
    }

    /// Reads the clock, and brings a key's state up to it if the clock was set back: for decisions that go on
    /// with the time alone.
    fn read_for<A: Algorithm>(&self, keys: &Keys<A::State>, rule: &A, spot: Spot) -> Reading {
        let reading = self.read(None);
        if reading.is_after_a_set_back() {
            keys.note_set_back(reading);
            keys.table.follow(rule, spot, reading);
        }
        reading
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
            Op::Check(cost) => match self.check(keys, rule, key, cost, now) {
                Ok(answer) => Ok(answer),
                Err(why) => self.undecided(keys, rule, (key.len(), cost), now, why),
            },
            op => self.other(keys, rule, key, op, now),
        }
    }

    /// Answers a check that the table did not decide.
    #[cold]
    #[inline(never)]
    fn undecided<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        (key_bytes, cost): (usize, Cost),
        now: Option<Tick>,
        why: NoDecision,
    ) -> Result<T, StoreError> {
        match why {
            NoDecision::Full => keys.without_place(rule, cost, self.read(now).now),
            NoDecision::KeyTooLong => Err(StoreError::KeyTooLong { bytes: key_bytes }),
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
        let key = keys.table.look_up(self.fingerprint(key)?);
        // The bucket comes from memory while the clock is read.
        keys.decide(rule, key, cost, self.read(now))
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
        let print = self.print(key)?;
        let spot = keys.table.spot(print);
        let reading = self.read(now);
        keys.note_set_back(reading);
        if let Op::Peek(cost) = op
            && let Some(told) = keys.behind_others(rule, spot, cost, reading.now)
        {
            return told.map_err(|Full| keys.full());
        }
        let step = |state: &mut A::State, at| {
            let mut part = Part { rule, state, op };
            let agrees = part.admits(at);
            part.step::<T>(at, agrees)
        };
        if matches!(op, Op::Peek(_) | Op::Force(0)) {
            return Ok(keys.look(rule, spot, reading, |state, at| step(state, at).0));
        }
        let stepped = keys.table.with(rule, spot, reading, |state, at| {
            let fresh = rule.fresh_at(state);
            let (answer, dropped) = step(state, at);
            match op {
                Op::Force(..0) => {
                    self.returns.returned(print.hash(), || rule.receipt(state), at, fresh);
                }
                Op::Reset => self.returns.was_reset(print.hash(), at),
                _ => {}
            }
            (counted_from(reading.now, at, answer), dropped)
        });
        let (answer, dropped) = stepped.map_err(|Full| keys.full())?;
        if matches!(op, Op::Force(1..)) {
            keys.table.forgive(dropped);
        }
        keys.line.nudge(spot);
        Ok(answer)
    }

    #[cold]
    fn reserve<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        (estimate, time_to_live): (Cost, Ticks),
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        let spot = self.spot(keys, key)?;
        let reading = self.read(now);
        keys.note_set_back(reading);
        let store = self.returns.store();
        if let Some(told) = keys.behind_others::<_, Timed>(rule, spot, estimate, reading.now) {
            let timed = told.map_err(|Full| keys.full())?;
            return Ok(Charged { timed, receipt: Receipt::Nothing, number: 0, store });
        }
        if estimate == 0 {
            let look = |state: &mut A::State, at| rule.decide::<Timed>(state, at, 0);
            let timed = keys.look(rule, spot, reading, look);
            let until = timed.at.after(time_to_live).unwrap_or(Tick(i64::MAX));
            let number = self.returns.reserved(until);
            return Ok(Charged { timed, receipt: Receipt::Nothing, number, store });
        }
        let charged = keys.table.with(rule, spot, reading, |state, at| {
            let (timed, receipt) = reserve::<_, Timed>(rule, state, at, estimate);
            let until = at.after(time_to_live).unwrap_or(Tick(i64::MAX));
            let number = if timed.decision.allowed { self.returns.reserved(until) } else { 0 };
            Charged { timed: counted_from(reading.now, at, timed), receipt, number, store }
        });
        charged.or_else(|Full| {
            let timed = keys.without_place(rule, estimate, reading.now)?;
            Ok(Charged { timed, receipt: Receipt::Nothing, number: 0, store })
        })
    }

    #[cold]
    fn settle<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        (change, charged): (i128, &Charged),
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        if charged.store != self.returns.store() {
            return Err(SettleError::OtherLimiter);
        }
        let print = match self.print(key) {
            Ok(print) => print,
            Err(error) => return Ok(Err(error)),
        };
        let spot = keys.table.spot(print);
        let reading = self.read(now);
        keys.note_set_back(reading);
        let settled = keys.table.with(rule, spot, reading, |state, at| {
            let mut receipt = charged.receipt.clone();
            self.returns.lower(print.hash(), charged.number, &mut receipt)?;
            let fresh = rule.fresh_at(state);
            let (decision, dropped) = settle::<_, Decision>(rule, state, at, change, &receipt);
            if change < 0 {
                self.returns.returned(print.hash(), || rule.receipt(state), at, fresh);
            }
            Ok((counted_from(reading.now, at, decision), dropped))
        });
        let (decision, dropped) = match settled {
            Ok(Ok(settled)) => settled,
            Ok(Err(WasReset)) => return Err(SettleError::Reset),
            Err(Full) => return Ok(Err(keys.full())),
        };
        if change > 0 {
            keys.table.forgive(dropped);
        }
        keys.line.nudge(spot);
        Ok(Ok(decision))
    }

    /// Hashes some keys and asks for their memory, then decides them, then the next.
    fn check_many<A: Algorithm, T: Answer, K>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        asks: &[K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let mut lengths = asks.iter().map(|ask| ask.into().key.len());
        if let Some(bytes) = lengths.find(|bytes| *bytes > MAX_KEY_BYTES) {
            return Err(StoreError::KeyTooLong { bytes });
        }
        let by_clock = self.read(None);
        let mut answers = Vec::with_capacity(asks.len());
        let mut spots = [Lookup::default(); AHEAD];
        for some in asks.chunks(AHEAD) {
            for (spot, ask) in spots.iter_mut().zip(some) {
                *spot = keys.table.look_up(self.hasher.fingerprint(ask.into().key));
            }
            for (spot, ask) in spots.iter().zip(some) {
                let ask = ask.into();
                let reading = if ask.at.is_some() { self.read(ask.at) } else { by_clock };
                answers.push(match keys.decide(rule, *spot, ask.cost, reading) {
                    Ok(answer) => answer,
                    Err(Full) => keys.without_place(rule, ask.cost, reading.now)?,
                });
            }
        }
        Ok(answers)
    }

    /// Prepares a decision on so many keys for one of them. Returns its answer if that does not depend on its state: because
    /// others wait for the key, or because there is no place for it.
    #[cold]
    fn before_others<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        spot: Spot,
        (cost, count): (Cost, usize),
        now: Tick,
    ) -> Result<Option<Decision>, StoreError> {
        keys.table.grow_for(count);
        self.read_for(keys, rule, spot);
        if let Some(told) = keys.behind_others(rule, spot, cost, now) {
            return told.map(Some).map_err(|Full| keys.full());
        }
        match cost == 0 || keys.table.has_room_for(rule, spot, now) {
            true => Ok(None),
            false => keys.without_place(rule, cost, now).map(Some),
        }
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
        let now = self.read_for(keys, rule, spot).now;
        let joined = keys.line.join((&keys.table, rule), spot, cost, now, max_wait);
        joined.map_err(|Full| keys.full())
    }

    fn shape<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
    ) -> Result<(Decision, Option<Departure>), StoreError> {
        let print = self.print(key)?;
        let spot = keys.table.spot(print);
        keys.departures.join((spot, print.hash()), rule.identity(), || {
            let reading = self.read_for(keys, rule, spot);
            let lookup = keys.table.look_up(print);
            let decision = match keys.decide(rule, lookup, 1, reading) {
                Ok(decision) => decision,
                Err(Full) => keys.without_place(rule, 1, reading.now)?,
            };
            Ok((decision, reading.now))
        })
    }

    fn cancel<A: Algorithm>(&self, keys: &Keys<A::State>, rule: &A, departure: &Departure) {
        let reading = self.read_for(keys, rule, departure.spot());
        let return_unit = |state: &mut A::State, at| {
            let fresh = rule.fresh_at(state);
            let has_effect = rule.charge(state, at, -1) == 0;
            self.returns.returned(departure.key(), || rule.receipt(state), at, fresh);
            has_effect
        };
        if keys.departures.cancel((&keys.table, rule), departure, reading, return_unit) {
            keys.line.nudge(departure.spot());
        }
    }

    /// Makes requests ask again that wait for a key, or for any.
    fn rules_changed<S>(&self, keys: &Keys<S>, key: Option<&[u8]>) {
        match key {
            None => keys.line.nudge_all(),
            // No request waits for a key that is too long.
            Some(key) => {
                if let Ok(spot) = self.spot(keys, key) {
                    keys.line.nudge_all_of(spot);
                }
            }
        }
    }

    fn turn<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        ticket: &mut Ticket,
        waker: &Waker,
    ) -> Result<Turn, StoreError> {
        loop {
            let set_backs = self.clock.set_backs();
            let now = self.read_for(keys, rule, ticket.spot()).now;
            let turn = keys.line.turn((&keys.table, rule), ticket, now, waker);
            let turn = turn.map_err(|Full| keys.full())?;
            // What was answered by a time of before a set-back is asked again.
            if matches!(turn, Turn::Done(_)) || self.clock.set_backs() == set_backs {
                return Ok(turn);
            }
        }
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
            self.keys.table.look_up(print);
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
    /// use tallygate::{
    ///     Access, Ask, Capacity, MemoryStore, Policy, RateLimiter, SnapshotReader, SnapshotWriter, SystemClock, Tiers,
    /// };
    ///
    /// let limiter = RateLimiter::tiered("api", Tiers::new(Policy::token_bucket(2).per_hour().build()?));
    /// limiter.check(Ask::new("alice").cost(2))?;
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
            listed.add_allowances(kept.allowances());
        })
    }

    /// A store with the keys of a snapshot, whatever its capacity was: if there are too many, those that used the smallest shares are evicted
    /// (see [`usage`](Self::usage)). Policies that are equal should be one: `share` finds the one, or is `Arc::new`.
    /// Its overrides are not set by this.
    ///
    /// # Errors
    /// The snapshot is damaged, or is of another version of Tallygate.
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
        let reading = Reading::of(&clock);
        let keys = Keys::knowing(known_bits, capacity);
        // What was used does not depend on the plan.
        let rule = Plan::of(Access::Unlimited);
        section.each(share, |key, kept| keys.keep(&rule, key, kept, reading))?;
        Ok(Self { keys, front: Front::with(hasher, clock) })
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
        let reading = Reading::of(&clock);
        let keys = Keys::knowing(known_bits, capacity);
        section.each_state(rule, |key, state| keys.keep(rule, key, state, reading))?;
        Ok(Self { keys, front: Front::with(hasher, clock) })
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

    #[inline]
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Result<T, StoreError> {
        let timed = self.front.apply(&self.keys, &*rule, key, op, now)?;
        Ok(make(&*rule, timed))
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl Lent<A> + 'a,
        asks: &'a [K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        self.front.check_many(&self.keys, &*rule, asks)
    }

    fn reserve<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        self.front.reserve(&self.keys, &*rule, key, (estimate, time_to_live), now)
    }

    fn settle<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        self.front.settle(&self.keys, &*rule, key, (change, charged), now)
    }

    fn now(&self) -> Tick {
        self.front.now()
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        self.front.rules_changed(&self.keys, key);
    }

    #[cold]
    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Result<T, StoreError> {
        Err(invalid.into())
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
            Some(Machine::Bucket(_)) => Self::Bucket(Keys::knowing(known_bits, capacity)),
            Some(Machine::WideBucket(_)) => Self::WideBucket(Keys::knowing(known_bits, capacity)),
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
    fn keep(&self, policy: &Policy, key: Fingerprint, kept: &Kept, reading: Reading) {
        let Some((_, standings)) = kept.policies().next() else { return };
        let kept: Result<(), StoreError> = of_its_kind!(policy, self, |rule, keys| {
            if let Some(state) = Standings::of(&standings) {
                keys.keep(rule, key, state, reading);
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
        Self {
            policy: Arc::new(policy.clone()),
            kinds: Kinds::of(policy, u128::BITS, capacity),
            front: Front::new(clock),
        }
    }

    /// Writes what its keys have used into a snapshot, by a name; how many keys. The policy is that of its limiter. While
    /// others use the store, each key is written as it is at some moment meanwhile. [`SnapshotWriter`] has an example.
    ///
    /// # Errors
    /// The snapshot cannot be written to, or the store was made for another policy: then the error is of the kind
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) and holds [`StoreError::OtherPolicy`], and nothing is written.
    pub fn save(
        &self,
        policy: &Policy,
        name: &str,
        snapshot: &mut SnapshotWriter<impl Write>,
    ) -> io::Result<u64> {
        if *policy != *self.policy {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, StoreError::OtherPolicy));
        }
        of_any_kind!(&self.kinds, |keys| {
            snapshot.put_table((name, &[]), &self.front.hasher, &keys.table, |state, listed| {
                listed.add(&self.policy, &state.standings());
            })
        })
    }

    /// A store for the keys of a policy, with those of a snapshot: whatever its capacity was, and whatever the policy was
    /// they were saved under. What was used stays used. [`SnapshotWriter`] has an example.
    ///
    /// # Errors
    /// The snapshot is damaged, or is of another version of Tallygate.
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
        let reading = Reading::of(&clock);
        let shared = Arc::new(policy.clone());
        let share = |saved: Policy| if saved == *shared { shared.clone() } else { Arc::new(saved) };
        let kinds = Kinds::of(policy, known_bits, capacity);
        section.each(share, |key, mut kept| {
            kept.bring_under(&shared, reading.now);
            kinds.keep(policy, key, &kept, reading);
        })?;
        Ok(Self { policy: shared, kinds, front: Front::with(hasher, clock) })
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

    #[inline]
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&Policy, Timed) -> T + Send + 'a,
    ) -> Result<T, StoreError> {
        let timed = self.apply(&*policy, key, op, now)?;
        Ok(make(&policy, timed))
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        asks: &'a [K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, kept| self.front.check_many(kept, rule, asks))
    }

    fn reserve<'a>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.front.reserve(keys, rule, key, (estimate, time_to_live), now)
        })
    }

    fn settle<'a>(
        &'a self,
        policy: impl Lent<Policy> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        let policy = &*policy;
        let settled = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(self.front.settle(keys, rule, key, (change, charged), now))
        });
        settled.unwrap_or_else(|error| Ok(Err(error)))
    }

    fn now(&self) -> Tick {
        self.front.now()
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        of_any_kind!(&self.kinds, |keys| self.front.rules_changed(keys, key));
    }

    #[cold]
    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Result<T, StoreError> {
        Err(invalid.into())
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

    fn turn(&self, rule: &A, ticket: &mut Ticket, waker: &Waker) -> Result<Turn, StoreError> {
        self.front.turn(&self.keys, rule, ticket, waker)
    }

    fn leave(&self, ticket: &Ticket) {
        self.keys.line.leave(ticket);
    }

    fn shape(&self, rule: &A, key: &[u8]) -> Result<(Decision, Option<Departure>), StoreError> {
        self.front.shape(&self.keys, rule, key)
    }

    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick> {
        self.keys.departures.poll(departure, self.front.now(), waker)
    }

    fn cancel(&self, rule: &A, departure: &Departure) {
        self.front.cancel(&self.keys, rule, departure);
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

    fn turn(
        &self,
        policy: &Policy,
        ticket: &mut Ticket,
        waker: &Waker,
    ) -> Result<Turn, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| self.front.turn(keys, rule, ticket, waker))
    }

    fn leave(&self, ticket: &Ticket) {
        of_any_kind!(&self.kinds, |keys| keys.line.leave(ticket));
    }

    fn shape(
        &self,
        policy: &Policy,
        key: &[u8],
    ) -> Result<(Decision, Option<Departure>), StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| self.front.shape(keys, rule, key))
    }

    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick> {
        let now = self.front.now();
        of_any_kind!(&self.kinds, |keys| keys.departures.poll(departure, now, waker))
    }

    fn cancel(&self, policy: &Policy, departure: &Departure) {
        let canceled: Result<(), StoreError> = of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.front.cancel(keys, rule, departure);
            Ok(())
        });
        debug_assert!(canceled.is_ok(), "it was charged under a policy of this kind");
    }
}

impl<A: Algorithm<State: 'static>, C: Clock> JointStore<A> for MemoryStore<A, C> {
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
        count: usize,
    ) -> Result<Option<Decision>, StoreError> {
        self.front.before_others(&self.keys, rule, spot, (cost, count), now)
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(&self.keys).addr()
    }

    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Option<Found> {
        self.keys.table.look_for(spot, locks)
    }

    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: Found,
        now: Tick,
        locks: &mut Locks<'a>,
    ) -> Result<Found, StoreError> {
        self.keys.table.make_room(rule, found, now, locks).map_err(|Full| self.keys.full())
    }

    fn give_up_room(&self, found: Found, locks: &mut Locks<'_>) {
        self.keys.table.give_up_room(found, locks);
    }

    fn agrees(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        Ok(self.keys.agrees(rule, found, cost, now, locks))
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
        // Only an algorithm of a user's own can panic. A copy of what tiers keep may be long.
        if TypeId::of::<A::State>() == TypeId::of::<Kept>() {
            return self.keys.step(rule, found, cost, now, locks, go);
        }
        self.keys.step_on_a_copy(rule, found, cost, now, locks, go)
    }

    fn report(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        self.keys.report(rule, found, cost, now, locks, go)
    }

    fn change_kept(
        &self,
        rule: &A,
        found: Found,
        returned: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) {
        self.keys.change_kept(rule, found, returned, now, locks);
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
        count: usize,
    ) -> Result<Option<Decision>, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.front.before_others(keys, rule, spot, (cost, count), now)
        })
    }

    fn identity(&self) -> usize {
        std::ptr::from_ref(&self.kinds).addr()
    }

    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Option<Found> {
        of_any_kind!(&self.kinds, |keys| keys.table.look_for(spot, locks))
    }

    fn make_room<'a>(
        &'a self,
        policy: &Policy,
        found: Found,
        now: Tick,
        locks: &mut Locks<'a>,
    ) -> Result<Found, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            keys.table.make_room(rule, found, now, locks).map_err(|Full| keys.full())
        })
    }

    fn give_up_room(&self, found: Found, locks: &mut Locks<'_>) {
        of_any_kind!(&self.kinds, |keys| keys.table.give_up_room(found, locks));
    }

    fn agrees(
        &self,
        policy: &Policy,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.agrees(rule, found, cost, now, locks))
        })
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

    fn report(
        &self,
        policy: &Policy,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let told = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(keys.report(rule, found, cost, now, locks, go))
        });
        told.unwrap_or_else(|_| unreachable!("its spot was of this kind"))
    }

    fn change_kept(
        &self,
        policy: &Policy,
        found: Found,
        returned: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) {
        let changed: Result<(), StoreError> = of_its_kind!(policy, &self.kinds, |rule, keys| {
            keys.change_kept(rule, found, returned, now, locks);
            Ok(())
        });
        debug_assert!(changed.is_ok(), "its spot was of this kind");
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
