//! Answers checks without a call of their own, where possible: one [`KeyBroker`] per key and policy.
//!
//! This is the impure edge of the pure [`KeyBroker`]: it adds the clock, the calls and the waiting callers. A key has
//! one broker per policy that it is checked under, because a call is for one policy. Brokers are kept as long as they
//! have something to remember, and their number is bounded; a key without a broker is checked by a plain call. There is
//! no thread or timer per key: one task sweeps all brokers of a store while there are leases.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tallygate::algorithm::Timed;
use tallygate::{Cost, Tick, Ticks};
use tokio::sync::oneshot;

use crate::clock::{ReadClock, since_boot};
use crate::counts::Counters;
use crate::error::Error;
use crate::key_broker::{
    AskOutcome, Call, CallResult, KeyBroker, Number, UnusedSlice, Verdict, Waiter,
};
use crate::lease::Leases;
use crate::prepared::{Prepared, ScriptUse};

/// Which decisions a store makes without a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LocalDecisions {
    pub(crate) caches_denials: bool,
    pub(crate) leases: Option<Leases>,
}

impl Default for LocalDecisions {
    fn default() -> Self {
        Self { caches_denials: true, leases: None }
    }
}

/// The brokers of a store.
pub(crate) struct Brokers {
    shards: Box<[Mutex<Shard>]>,
    hasher: KeyHasher,
    waiters: AtomicU64,
    clock: ReadClock,
    begin: Duration,
    pub(crate) is_swept: AtomicBool,
}

struct Shard {
    /// The brokers of each key, one per policy.
    keys: HashMap<Box<[u8]>, Vec<PolicyBroker>, KeyHasher>,
    cleared: Option<Instant>,
}

/// Hashes keys under a seed that clients do not know. A shard has few keys, and a check is hashed several times, so
/// this hash is weaker than that of the memory store.
#[derive(Clone, Copy)]
struct KeyHasher {
    seed: u64,
}

impl BuildHasher for KeyHasher {
    type Hasher = KeyHash;

    fn build_hasher(&self) -> KeyHash {
        KeyHash(self.seed)
    }
}

struct KeyHash(u64);

impl Hasher for KeyHash {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.0);
    }

    /// Ignores the length of a key: it is part of the hash of the bytes.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

struct PolicyBroker {
    prepared: Arc<Prepared>,
    broker: KeyBroker,
    /// The waiting callers in order of arrival: their numbers only grow.
    waiting: VecDeque<(Waiter, oneshot::Sender<WaiterResult>)>,
    /// Until when checks of the key skip the scripts, because no script could decide on it.
    no_script_until: Tick,
}

/// The result for a waiting caller: a decision, or `None` if the caller has to check without a script.
pub(crate) type WaiterResult = Result<Option<Timed>, Error>;

/// The immediate result of a check.
pub(crate) enum AskResult {
    Decided(Timed, Option<Call>),
    Pending {
        waits: oneshot::Receiver<WaiterResult>,
        call: Option<Call>,
        /// When to [flush](Brokers::flush) the queue, if it has not been sent by then.
        flush_at: Option<Instant>,
    },
    /// Too many checks of the key wait already.
    Overloaded,
    /// The caller decides without a broker: by compare-and-set, because no script can decide on the key; or by its own
    /// call, because there is no room for another broker.
    Undecided(ScriptUse),
}

const SHARDS: usize = 16;
/// How many keys of a shard have brokers.
const MAX_KEYS: usize = 1024;
/// How many brokers one key has, one per policy.
const MAX_POLICIES: usize = 8;
/// How often a full shard is searched for idle brokers.
const CLEAR_INTERVAL: Duration = Duration::from_millis(10);
/// How long checks of a key skip the scripts after one could not decide on it.
const NO_SCRIPT_FOR: Ticks = Ticks(1_000_000_000);

impl Brokers {
    pub(crate) fn new() -> Self {
        Self::with_clock(since_boot)
    }

    fn with_clock(clock: ReadClock) -> Self {
        let hasher = KeyHasher { seed: RandomState::new().hash_one(0) };
        Self {
            shards: (0..SHARDS).map(|_| Mutex::new(Shard::new(hasher))).collect(),
            hasher,
            waiters: AtomicU64::new(0),
            clock,
            begin: clock(),
            is_swept: AtomicBool::new(false),
        }
    }

    fn now(&self) -> Tick {
        let since = (self.clock)().saturating_sub(self.begin).as_nanos();
        Tick(i64::try_from(since).unwrap_or(i64::MAX))
    }

    fn shard(&self, client: &[u8]) -> MutexGuard<'_, Shard> {
        let hash = self.hasher.hash_one(client);
        // The table of a shard uses the other bits.
        let index = usize::try_from(hash >> 32).unwrap_or(0) % SHARDS;
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the decision on a check if it needs no call.
    pub(crate) fn answer_at_once(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        cost: Cost,
    ) -> Option<Timed> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entry = shard.find(prepared, client)?;
        if now < entry.no_script_until {
            return None;
        }
        entry.broker.answer_at_once(&prepared.terms, cost, now)
    }

    /// Hands a check to the broker of its key, to be decided within a time budget that has just begun and ends at a
    /// deadline.
    pub(crate) fn ask(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        cost: Cost,
        (budget, deadline): (Duration, Instant),
    ) -> AskResult {
        let now = self.now();
        let mut shard = self.shard(client);
        let Some(entry) = shard.find_or_add(prepared, client, now) else {
            return AskResult::Undecided(ScriptUse::IfPossible);
        };
        if now < entry.no_script_until {
            return AskResult::Undecided(ScriptUse::Never);
        }
        let waiter = self.waiters.fetch_add(1, Ordering::Relaxed);
        let until = now.after(Ticks::from_duration(budget)).unwrap_or(now);
        let mut asked = entry.broker.ask(&prepared.terms, waiter, cost, (now, until));
        if matches!(asked, AskOutcome::Overloaded) {
            entry.drop_cancelled();
            asked = entry.broker.ask(&prepared.terms, waiter, cost, (now, until));
        }
        match asked {
            AskOutcome::Decided(timed, call) => AskResult::Decided(timed, call),
            AskOutcome::Overloaded => AskResult::Overloaded,
            AskOutcome::Waits { call, flush_at } => {
                let (sender, waits) = oneshot::channel();
                // This happens under the lock of the shard, so that the numbers of the callers of a key only grow.
                entry.waiting.push_back((waiter, sender));
                // The time budget began a moment before `now`.
                let began = deadline.checked_sub(budget).unwrap_or(deadline);
                let flush_at = flush_at.map(|at| began + Duration::from_nanos(at.since(now).0));
                AskResult::Pending { waits, call, flush_at }
            }
        }
    }

    /// Returns the call for the queued checks of a key, if they have waited long enough.
    pub(crate) fn flush(&self, prepared: &Arc<Prepared>, client: &[u8]) -> Option<Call> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entry = shard.find(prepared, client)?;
        entry.drop_cancelled();
        let outcome = entry.broker.flush(&prepared.terms, now);
        entry.answer(outcome.verdicts, None, now);
        outcome.call
    }

    /// Makes checks of a key skip the scripts for a while, because no script can decide on it.
    pub(crate) fn skip_scripts(&self, client: &[u8]) {
        let now = self.now();
        for entry in self.shard(client).keys.get_mut(client).into_iter().flatten() {
            entry.no_script_until = now.after(NO_SCRIPT_FOR).unwrap_or(now);
        }
    }

    /// Returns the deadline of a call, by the checks that wait for it.
    pub(crate) fn deadline_of(&self, call: &Call, budget: Duration) -> Instant {
        let left = Duration::from_nanos(call.until.since(self.now()).0);
        Instant::now() + left.min(budget)
    }

    /// Handles the result of a call: answers the waiting callers, and returns the next call.
    pub(crate) fn handle_reply(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        number: Number,
        result: Result<CallResult, Error>,
        counters: &Counters,
    ) -> Option<Call> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entries = shard.keys.get_mut(client)?;
        let is_asked = |entry: &PolicyBroker| Arc::ptr_eq(&entry.prepared, prepared);
        let index = entries.iter().position(is_asked)?;
        let entry = &mut entries[index];
        let (result, error) = match result {
            Ok(result) => (result, None),
            Err(Error::Overloaded { .. }) => (CallResult::Late, None),
            Err(error) => (CallResult::NoReply, Some(error)),
        };
        if let CallResult::Taken(taken) = &result {
            counters.leased.fetch_add(taken.amount, Ordering::Relaxed);
        }
        entry.drop_cancelled();
        let outcome = entry.broker.handle_reply(&prepared.terms, number, result, now);
        let shared = u64::try_from(outcome.verdicts.len()).unwrap_or(0).saturating_sub(1);
        counters.coalesced.fetch_add(shared, Ordering::Relaxed);
        entry.answer(outcome.verdicts, error.as_ref(), now);
        if outcome.call.is_none()
            && now >= entry.no_script_until
            && entry.broker.is_idle(&prepared.terms, now)
        {
            entries.swap_remove(index);
            if entries.is_empty() {
                shard.keys.remove(client);
            }
        }
        outcome.call
    }

    /// Forgets the known state of a key, because this process has changed it in the store.
    pub(crate) fn changed(&self, client: &[u8], is_fresh: bool) {
        for entry in self.shard(client).keys.get_mut(client).into_iter().flatten() {
            if is_fresh {
                entry.broker.reset();
            } else {
                entry.broker.changed();
            }
        }
    }

    /// Takes the unused slices that are to be returned, and drops idle brokers. Returns whether any broker with leases
    /// remains.
    pub(crate) fn sweep(&self, ends: bool, counters: &Counters) -> (Vec<SliceToReturn>, bool) {
        let now = self.now();
        let (mut back, mut has_leases) = (Vec::new(), false);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|client, PolicyBroker { prepared, broker, no_script_until, .. }| {
                let terms = &prepared.terms;
                let given = if ends { broker.close(terms, now) } else { broker.sweep(terms, now) };
                back.extend(given.into_iter().map(|slice| SliceToReturn {
                    client: client.into(),
                    prepared: prepared.clone(),
                    slice,
                }));
                let expired_units = std::mem::take(&mut broker.expired_units);
                counters.lease_expired.fetch_add(expired_units, Ordering::Relaxed);
                now < *no_script_until || !broker.is_idle(terms, now)
            });
            let mut entries = shard.keys.values().flatten();
            has_leases |= entries.any(|entry| entry.prepared.terms.leases().is_some());
        }
        (back, has_leases)
    }
}

/// The unused rest of a slice, and the client that it belongs to.
pub(crate) struct SliceToReturn {
    pub(crate) client: Box<[u8]>,
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) slice: UnusedSlice,
}

impl PolicyBroker {
    fn new(prepared: &Arc<Prepared>) -> Self {
        Self {
            prepared: prepared.clone(),
            broker: KeyBroker::default(),
            waiting: VecDeque::new(),
            no_script_until: Tick(i64::MIN),
        }
    }

    /// Removes queued checks whose callers have gone: they are not charged.
    fn drop_cancelled(&mut self) {
        let waiting = &mut self.waiting;
        let count = waiting.len();
        waiting.retain(|(_, sender)| !sender.is_closed());
        if waiting.len() < count {
            self.broker.retain(|waiter| position_of(waiting, waiter).is_some());
        }
    }

    fn answer(&mut self, verdicts: Vec<(Waiter, Verdict)>, error: Option<&Error>, now: Tick) {
        for (waiter, verdict) in verdicts {
            let place = position_of(&self.waiting, waiter);
            let Some((_, sender)) = place.and_then(|place| self.waiting.remove(place)) else {
                continue;
            };
            // A caller that has gone is not answered.
            let _ = sender.send(match verdict {
                Verdict::Decided(timed) => Ok(Some(timed)),
                Verdict::AskAlone => {
                    self.no_script_until = now.after(NO_SCRIPT_FOR).unwrap_or(now);
                    Ok(None)
                }
                Verdict::Overloaded => Err(overloaded()),
                Verdict::NoReply => Err(error.cloned().unwrap_or_else(abandoned)),
            });
        }
    }
}

/// Returns the position of a caller in the queue.
fn position_of(
    waiting: &VecDeque<(Waiter, oneshot::Sender<WaiterResult>)>,
    waiter: Waiter,
) -> Option<usize> {
    // Usually it is the first one.
    match waiting.front() {
        Some((first, _)) if *first == waiter => Some(0),
        _ => waiting.binary_search_by_key(&waiter, |(waiter, _)| *waiter).ok(),
    }
}

impl Shard {
    fn new(hasher: KeyHasher) -> Self {
        Self { keys: HashMap::with_hasher(hasher), cleared: None }
    }

    /// Returns the broker of a key for a policy, if there is one.
    fn find(&mut self, prepared: &Arc<Prepared>, client: &[u8]) -> Option<&mut PolicyBroker> {
        let mut entries = self.keys.get_mut(client)?.iter_mut();
        entries.find(|entry| Arc::ptr_eq(&entry.prepared, prepared))
    }

    /// Returns the broker of a key for a policy, or adds one; `None` if there is no room for it.
    fn find_or_add(
        &mut self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        now: Tick,
    ) -> Option<&mut PolicyBroker> {
        let is_new = !self.keys.contains_key(client);
        if is_new && self.keys.len() >= MAX_KEYS && !self.make_room(now) {
            return None;
        }
        let entries = if is_new {
            self.keys.entry(client.into()).or_default()
        } else {
            self.keys.get_mut(client)?
        };
        let is_asked = |entry: &PolicyBroker| Arc::ptr_eq(&entry.prepared, prepared);
        let index = match entries.iter().position(is_asked) {
            Some(index) => index,
            None => {
                if entries.len() >= MAX_POLICIES {
                    entries.retain(|entry| !entry.broker.is_idle(&entry.prepared.terms, now));
                }
                if entries.len() >= MAX_POLICIES {
                    return None;
                }
                let no_script_until = entries.iter().map(|entry| entry.no_script_until).max();
                let no_script_until = no_script_until.unwrap_or(Tick(i64::MIN));
                // Most keys are checked under one policy only.
                entries.reserve_exact(1);
                entries.push(PolicyBroker { no_script_until, ..PolicyBroker::new(prepared) });
                entries.len() - 1
            }
        };
        entries.get_mut(index)
    }

    /// Drops idle brokers, if that was not just tried.
    fn make_room(&mut self, now: Tick) -> bool {
        if self.cleared.is_some_and(|cleared| cleared.elapsed() < CLEAR_INTERVAL) {
            return false;
        }
        self.cleared = Some(Instant::now());
        self.retain(|_, entry| !entry.broker.is_idle(&entry.prepared.terms, now));
        self.keys.len() < MAX_KEYS
    }

    /// Keeps only the brokers that a function returns true for.
    fn retain(&mut self, mut keeps: impl FnMut(&[u8], &mut PolicyBroker) -> bool) {
        self.keys.retain(|client, entries| {
            entries.retain_mut(|entry| keeps(client, entry));
            !entries.is_empty()
        });
    }
}

/// Returns the error of a check that was not decided in time, although the store answers.
pub(crate) fn overloaded() -> Error {
    Error::Overloaded { reason: "redis has not replied yet".into(), sent: true }
}

/// Returns the error of a call whose caller has gone before the reply.
pub(crate) fn abandoned() -> Error {
    Error::Unavailable { reason: "the caller abandoned the call".into(), sent: true }
}

#[cfg(test)]
mod tests {
    use tallygate::algorithm::Algorithm as _;
    use tallygate::store::Bounds;
    use tallygate::{Policy, Source};

    use super::*;
    use crate::key_broker::{CallKind, CostDecision};
    use crate::lease::slice::TakenSlice;
    use crate::prepared::PolicyChange;
    use crate::{OnFailure, Redis};

    const MINUTE: Duration = Duration::from_secs(60);

    static NOW_MS: AtomicU64 = AtomicU64::new(1000);

    fn now() -> Duration {
        Duration::from_millis(NOW_MS.load(Ordering::Relaxed))
    }

    #[test]
    fn a_key_is_checked_under_two_policies_at_once() {
        let redis = Redis::open("redis://127.0.0.1:1").unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny);
        let brokers = Brokers::new();
        let deadline = Instant::now() + MINUTE;
        for limit in [100, 200] {
            let policy = Policy::token_bucket(limit).per_second().build().unwrap();
            let prepared = store.prepare(&policy, PolicyChange::KeepBoth).unwrap();
            let timed = brokers.ask(&prepared, b"alice", 1, (MINUTE, deadline));
            assert!(
                matches!(timed, AskResult::Pending { call: Some(_), .. }),
                "a call for {limit}"
            );
            // A further check waits for the call of the same policy.
            let timed = brokers.ask(&prepared, b"alice", 1, (MINUTE, deadline));
            assert!(matches!(timed, AskResult::Pending { call: None, .. }), "one call for {limit}");
        }
    }

    /// Fault J17.
    #[test]
    fn a_lease_is_not_served_after_the_machine_was_suspended_for_longer_than_its_life() {
        let redis = Redis::open("redis://127.0.0.1:1").unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny).leases(Leases::default());
        let policy = Policy::token_bucket(1_000_000).per_second().build().unwrap();
        let prepared = store.prepare(&policy, PolicyChange::Replace).unwrap();
        let brokers = Brokers::with_clock(now);
        let counters = Counters::default();
        let ask = || brokers.ask(&prepared, b"alice", 1, (MINUTE, Instant::now() + MINUTE));
        let mut at = Tick(1_000_000);
        let held = loop {
            let call = match ask() {
                AskResult::Pending { call: Some(call), .. } => call,
                AskResult::Decided(timed, _) => break timed,
                _ => panic!("there is a call or an answer"),
            };
            at = at.after(Ticks(1)).unwrap();
            let state = prepared.policy.initial(at);
            let result = match &call.kind {
                CallKind::Take(slice) => {
                    CallResult::Taken(TakenSlice { amount: slice.want + 50, at, state })
                }
                CallKind::Check(_) => {
                    let answers = vec![CostDecision {
                        is_allowed: true,
                        state,
                        shadow: None,
                        bounds: Bounds::default(),
                    }];
                    CallResult::Checked { at, answers }
                }
            };
            let _ = brokers.handle_reply(&prepared, b"alice", call.number, Ok(result), &counters);
        };
        assert_eq!(held.decision.source, Source::Lease);
        // The machine is suspended for longer than the lease lives; a monotonic clock would stop.
        NOW_MS.fetch_add(10_000, Ordering::Relaxed);
        assert!(matches!(ask(), AskResult::Pending { .. }), "what is held has ended");
    }
}
