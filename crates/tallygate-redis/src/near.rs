//! The desks of a store: where checks are answered before they become calls of their own.
//!
//! This is the edge of the pure [`Desk`]: it brings the clock, the calls and those who wait. A key has a desk for each
//! policy that it is asked for under, because a call is for one policy. Desks are kept for as long
//! as there is something to remember, in bounded room; a key that finds none is asked for plainly. There is no thread
//! or timer a key: one task sweeps all desks of a store while there are leases.

use std::collections::hash_map::RandomState;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tallygate::{Cost, Tick, Ticks, Timed};
use tokio::sync::oneshot;

use crate::client::Counters;
use crate::clock::{ReadClock, since_boot};
use crate::desk::{Call, Came, Desk, GivenBack, Number, Verdict, Waiter};
use crate::error::Error;
use crate::lease::Leases;
use crate::store::Prepared;

/// What a store does without asking.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Habits {
    pub(crate) caches_refusals: bool,
    pub(crate) leases: Option<Leases>,
}

impl Default for Habits {
    fn default() -> Self {
        Self { caches_refusals: true, leases: None }
    }
}

/// The desks of a store.
pub(crate) struct Near {
    shards: Box<[Mutex<Shard>]>,
    hasher: KeyHasher,
    waiters: AtomicU64,
    clock: ReadClock,
    begin: Duration,
    pub(crate) is_swept: AtomicBool,
}

struct Shard {
    /// The desks of each key, one for each policy.
    desks: HashMap<Box<[u8]>, Vec<Entry>, KeyHasher>,
    cleared: Option<Instant>,
}

/// Hashes keys under a seed that clients do not know. A shard has few keys, so this need not be as strong as a hash of the
/// memory store, and a check is hashed several times.
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

    /// The length of a key, which is also part of its hash.
    fn write_usize(&mut self, _: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

struct Entry {
    prepared: Arc<Prepared>,
    desk: Desk,
    /// The callers that wait, in the order in which they came: their numbers only grow.
    waiting: VecDeque<(Waiter, oneshot::Sender<Said>)>,
    /// Until when the key is asked for by other ways: no script decides on it.
    alone_until: Tick,
}

/// What somebody who waits is told: a decision, or `None` to ask alone.
pub(crate) type Said = Result<Option<Timed>, Error>;

/// What came of a question.
pub(crate) enum Told {
    Now(Timed, Option<Call>),
    Later {
        waits: oneshot::Receiver<Said>,
        call: Option<Call>,
        /// When to [send](Near::flush) what waits, if it has not been sent by then.
        flush_at: Option<Instant>,
    },
    /// Too many wait already.
    Overloaded,
    /// To be asked for in this process: no script decides on it.
    Alone,
    /// To be asked for by its script, without a desk: there is no room for one.
    WithoutDesk,
}

const SHARDS: usize = 16;
/// How many keys a shard has desks for.
const MOST_DESKS: usize = 1024;
/// How many policies one key has desks for.
const MOST_POLICIES: usize = 8;
/// How often a full shard is looked through for desks that nobody needs.
const CLEARED_EVERY: Duration = Duration::from_millis(10);
/// How long a key is left alone that no script decides on.
const ALONE_FOR: Ticks = Ticks(1_000_000_000);

impl Near {
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
        // The table of a shard takes the other bits.
        let index = usize::try_from(hash >> 32).unwrap_or(0) % SHARDS;
        self.shards[index].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answers at a key's desk if nothing has to be sent for it.
    pub(crate) fn answer_at_once(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        cost: Cost,
    ) -> Option<Timed> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entry = shard.desk(prepared, client)?;
        if now < entry.alone_until {
            return None;
        }
        entry.desk.answer_at_once(&prepared.terms, cost, now)
    }

    /// Asks at a key's desk, for an answer within a time budget that has just begun and ends at a deadline.
    pub(crate) fn ask(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        cost: Cost,
        (budget, deadline): (Duration, Instant),
    ) -> Told {
        let now = self.now();
        let mut shard = self.shard(client);
        let Some(entry) = shard.desk_or_new(prepared, client, now) else {
            return Told::WithoutDesk;
        };
        if now < entry.alone_until {
            return Told::Alone;
        }
        let waiter = self.waiters.fetch_add(1, Ordering::Relaxed);
        let until = now.after(Ticks::from_duration(budget)).unwrap_or(now);
        let mut asked = entry.desk.ask(&prepared.terms, waiter, cost, (now, until));
        if asked.is_overloaded {
            entry.forget_gone();
            asked = entry.desk.ask(&prepared.terms, waiter, cost, (now, until));
        }
        match asked.answer {
            Some(told) => Told::Now(told, asked.call),
            None if asked.is_overloaded => Told::Overloaded,
            None => {
                let (sender, waits) = oneshot::channel();
                // Under the lock of the shard, so that the numbers of the callers of a key only grow.
                entry.waiting.push_back((waiter, sender));
                // The time budget began a moment before `now`.
                let began = deadline.checked_sub(budget).unwrap_or(deadline);
                let flush_at =
                    asked.flush_at.map(|at| began + Duration::from_nanos(at.since(now).0));
                Told::Later { waits, call: asked.call, flush_at }
            }
        }
    }

    /// Sends what waits for a key, if it has waited long enough.
    pub(crate) fn flush(&self, prepared: &Arc<Prepared>, client: &[u8]) -> Option<Call> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entry = shard.desk(prepared, client)?;
        entry.forget_gone();
        let heard = entry.desk.flush(&prepared.terms, now);
        entry.tell(heard.verdicts, None, now);
        heard.call
    }

    /// Leaves a key to other ways for a while: no script decides on it.
    pub(crate) fn leave_alone(&self, client: &[u8]) {
        let now = self.now();
        for entry in self.shard(client).desks.get_mut(client).into_iter().flatten() {
            entry.alone_until = now.after(ALONE_FOR).unwrap_or(now);
        }
    }

    /// How long a call may take for the checks that wait for it.
    pub(crate) fn deadline_of(&self, call: &Call, budget: Duration) -> Instant {
        let left = Duration::from_nanos(call.until.since(self.now()).0);
        Instant::now() + left.min(budget)
    }

    /// Takes what became of a call to whoever waits, and says which call is next.
    pub(crate) fn hear(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        number: Number,
        came: Result<Came, Error>,
        counters: &Counters,
    ) -> Option<Call> {
        let now = self.now();
        let mut shard = self.shard(client);
        let entries = shard.desks.get_mut(client)?;
        let is_asked = |entry: &Entry| Arc::ptr_eq(&entry.prepared, prepared);
        let index = entries.iter().position(is_asked)?;
        let entry = &mut entries[index];
        let (came, error) = match came {
            Ok(came) => (came, None),
            Err(Error::Overloaded { .. }) => (Came::Late, None),
            Err(error) => (Came::Nothing, Some(error)),
        };
        if let Came::Taken(taken) = &came {
            counters.leased.fetch_add(taken.amount, Ordering::Relaxed);
        }
        entry.forget_gone();
        let heard = entry.desk.hear(&prepared.terms, number, came, now);
        let shared = u64::try_from(heard.verdicts.len()).unwrap_or(0).saturating_sub(1);
        counters.coalesced.fetch_add(shared, Ordering::Relaxed);
        entry.tell(heard.verdicts, error.as_ref(), now);
        if heard.call.is_none()
            && now >= entry.alone_until
            && entry.desk.is_idle(&prepared.terms, now)
        {
            entries.swap_remove(index);
            if entries.is_empty() {
                shard.desks.remove(client);
            }
        }
        heard.call
    }

    /// The store was changed from here: what it said before does not hold.
    pub(crate) fn changed(&self, client: &[u8], is_fresh: bool) {
        for entry in self.shard(client).desks.get_mut(client).into_iter().flatten() {
            if is_fresh {
                entry.desk.reset();
            } else {
                entry.desk.changed();
            }
        }
    }

    /// Takes what is to be given back, and forgets desks that nobody needs; whether any are left.
    pub(crate) fn sweep(&self, ends: bool, counters: &Counters) -> (Vec<Back>, bool) {
        let now = self.now();
        let (mut back, mut has_desks) = (Vec::new(), false);
        for shard in &self.shards {
            let mut shard = shard.lock().unwrap_or_else(PoisonError::into_inner);
            shard.retain(|client, Entry { prepared, desk, alone_until, .. }| {
                let terms = &prepared.terms;
                let given = if ends { desk.close(terms, now) } else { desk.sweep(terms, now) };
                back.extend(given.into_iter().map(|slice| Back {
                    client: client.into(),
                    prepared: prepared.clone(),
                    slice,
                }));
                let lapsed = std::mem::take(&mut desk.lapsed);
                counters.lapsed.fetch_add(lapsed, Ordering::Relaxed);
                now < *alone_until || !desk.is_idle(terms, now)
            });
            let mut entries = shard.desks.values().flatten();
            has_desks |= entries.any(|entry| entry.prepared.terms.leases().is_some());
        }
        (back, has_desks)
    }
}

/// What is left of a slice, and whose it is.
pub(crate) struct Back {
    pub(crate) client: Box<[u8]>,
    pub(crate) prepared: Arc<Prepared>,
    pub(crate) slice: GivenBack,
}

impl Entry {
    fn new(prepared: &Arc<Prepared>) -> Self {
        Self {
            prepared: prepared.clone(),
            desk: Desk::default(),
            waiting: VecDeque::new(),
            alone_until: Tick(i64::MIN),
        }
    }

    /// Takes checks out of the queue whose callers have gone: they are not charged.
    fn forget_gone(&mut self) {
        let waiting = &mut self.waiting;
        let count = waiting.len();
        waiting.retain(|(_, sender)| !sender.is_closed());
        if waiting.len() < count {
            self.desk.retain(|waiter| place_of(waiting, waiter).is_some());
        }
    }

    fn tell(&mut self, verdicts: Vec<(Waiter, Verdict)>, error: Option<&Error>, now: Tick) {
        for (waiter, verdict) in verdicts {
            let place = place_of(&self.waiting, waiter);
            let Some((_, sender)) = place.and_then(|place| self.waiting.remove(place)) else {
                continue;
            };
            // Who does not wait any more is not told.
            let _ = sender.send(match verdict {
                Verdict::Told(told) => Ok(Some(told)),
                Verdict::Alone => {
                    self.alone_until = now.after(ALONE_FOR).unwrap_or(now);
                    Ok(None)
                }
                Verdict::Overloaded => Err(overloaded()),
                Verdict::Nothing => Err(error.cloned().unwrap_or_else(given_up)),
            });
        }
    }
}

/// Returns the place of a caller among those that wait.
fn place_of(waiting: &VecDeque<(Waiter, oneshot::Sender<Said>)>, waiter: Waiter) -> Option<usize> {
    // Mostly the one that came first.
    match waiting.front() {
        Some((first, _)) if *first == waiter => Some(0),
        _ => waiting.binary_search_by_key(&waiter, |(waiter, _)| *waiter).ok(),
    }
}

impl Shard {
    fn new(hasher: KeyHasher) -> Self {
        Self { desks: HashMap::with_hasher(hasher), cleared: None }
    }

    /// Returns the desk of a key for a policy, if there is one.
    fn desk(&mut self, prepared: &Arc<Prepared>, client: &[u8]) -> Option<&mut Entry> {
        let mut entries = self.desks.get_mut(client)?.iter_mut();
        entries.find(|entry| Arc::ptr_eq(&entry.prepared, prepared))
    }

    /// Returns the desk of a key for a policy, a new one if there is none; `None` if there is no room for it.
    fn desk_or_new(
        &mut self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        now: Tick,
    ) -> Option<&mut Entry> {
        let is_new = !self.desks.contains_key(client);
        if is_new && self.desks.len() >= MOST_DESKS && !self.make_room(now) {
            return None;
        }
        let entries = if is_new {
            self.desks.entry(client.into()).or_default()
        } else {
            self.desks.get_mut(client)?
        };
        let is_asked = |entry: &Entry| Arc::ptr_eq(&entry.prepared, prepared);
        let index = match entries.iter().position(is_asked) {
            Some(index) => index,
            None => {
                if entries.len() >= MOST_POLICIES {
                    entries.retain(|entry| !entry.desk.is_idle(&entry.prepared.terms, now));
                }
                if entries.len() >= MOST_POLICIES {
                    return None;
                }
                let alone_until = entries.iter().map(|entry| entry.alone_until).max();
                let alone_until = alone_until.unwrap_or(Tick(i64::MIN));
                // Most keys are asked for under one policy.
                entries.reserve_exact(1);
                entries.push(Entry { alone_until, ..Entry::new(prepared) });
                entries.len() - 1
            }
        };
        entries.get_mut(index)
    }

    /// Forgets idle desks, if that was not just tried.
    fn make_room(&mut self, now: Tick) -> bool {
        if self.cleared.is_some_and(|cleared| cleared.elapsed() < CLEARED_EVERY) {
            return false;
        }
        self.cleared = Some(Instant::now());
        self.retain(|_, entry| !entry.desk.is_idle(&entry.prepared.terms, now));
        self.desks.len() < MOST_DESKS
    }

    /// Keeps only the desks that a function returns true for.
    fn retain(&mut self, mut keeps: impl FnMut(&[u8], &mut Entry) -> bool) {
        self.desks.retain(|client, entries| {
            entries.retain_mut(|entry| keeps(client, entry));
            !entries.is_empty()
        });
    }
}

/// It was not decided in time, although the store answers.
pub(crate) fn overloaded() -> Error {
    Error::Overloaded { reason: "many checks of the same key wait".into(), sent: true }
}

/// Who made the call went away before the reply.
pub(crate) fn given_up() -> Error {
    Error::Unavailable { reason: "the call was given up".into(), sent: true }
}

/// Gives back what is left of some slices. What fails is lost.
pub(crate) async fn give_back_all(store: &crate::RedisStore, back: Vec<Back>) {
    join_all(back.iter().map(|back| store.give_back(back))).await;
}

#[cfg(test)]
mod tests {
    use tallygate::{Algorithm as _, Bounds, Policy, Source};

    use super::*;
    use crate::desk::{Checked, What};
    use crate::lease::calls::Taken;
    use crate::store::Earlier;
    use crate::{OnFailure, Redis};

    const MINUTE: Duration = Duration::from_secs(60);

    static NOW_MS: AtomicU64 = AtomicU64::new(1000);

    fn now() -> Duration {
        Duration::from_millis(NOW_MS.load(Ordering::Relaxed))
    }

    #[test]
    fn a_key_is_asked_for_under_two_policies_at_once() {
        let redis = Redis::open("redis://127.0.0.1:1").unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny);
        let near = Near::new();
        let deadline = Instant::now() + MINUTE;
        for limit in [100, 200] {
            let policy = Policy::token_bucket(limit).per_second().build().unwrap();
            let prepared = store.prepare(&policy, Earlier::Listed).unwrap();
            let told = near.ask(&prepared, b"alice", 1, (MINUTE, deadline));
            assert!(matches!(told, Told::Later { call: Some(_), .. }), "a call for {limit}");
            // What comes meanwhile waits for the call of its own policy.
            let told = near.ask(&prepared, b"alice", 1, (MINUTE, deadline));
            assert!(matches!(told, Told::Later { call: None, .. }), "one call for {limit}");
        }
    }

    #[test]
    fn j17_a_lease_is_not_served_after_the_machine_was_suspended_for_longer_than_its_life() {
        let redis = Redis::open("redis://127.0.0.1:1").unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny).leases(Leases::default());
        let policy = Policy::token_bucket(1_000_000).per_second().build().unwrap();
        let prepared = store.prepare(&policy, Earlier::Replaced).unwrap();
        let near = Near::with_clock(now);
        let counters = Counters::default();
        let ask = || near.ask(&prepared, b"alice", 1, (MINUTE, Instant::now() + MINUTE));
        let mut at = Tick(1_000_000);
        let held = loop {
            let call = match ask() {
                Told::Later { call: Some(call), .. } => call,
                Told::Now(told, _) => break told,
                _ => panic!("there is a call or an answer"),
            };
            at = at.after(Ticks(1)).unwrap();
            let state = prepared.policy.first(at);
            let came = match &call.what {
                What::Take(slice) => Came::Taken(Taken { amount: slice.want + 50, at, state }),
                What::Check(_) => {
                    let answers = vec![Checked {
                        is_allowed: true,
                        state,
                        shadow: None,
                        bounds: Bounds::default(),
                    }];
                    Came::Checked { at, answers }
                }
            };
            let _ = near.hear(&prepared, b"alice", call.number, Ok(came), &counters);
        };
        assert_eq!(held.decision.source, Source::Lease);
        // The machine sleeps for longer than the lease lives: the monotonic clock would stand still.
        NOW_MS.fetch_add(10_000, Ordering::Relaxed);
        assert!(matches!(ask(), Told::Later { .. }), "what is held has ended");
    }
}
