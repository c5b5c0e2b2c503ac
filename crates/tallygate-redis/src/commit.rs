//! Decisions that are made in this process and written by compare-and-set, for many callers of one key at once.
//!
//! They are for values that no script decides on: several policies of which one has a log, a penalty or large numbers.
//!
//! Callers of a key do not race against each other: they queue, and one task decides for all who wait, in order, on one
//! value, and writes once. So races are between processes only, and there are at most as many as processes. A lost race is
//! tried again with the value that the reply brought, until the callers' time is over.
//!
//! At a distance the task remembers what it wrote, and guesses that it is still there: while no other process writes, a
//! round costs one round trip instead of two. The time of such a decision is an estimate that the server cannot have passed
//! when the callers came, and the script writes only if the server has reached it by then. So no decision is made at
//! a time before its request came, which would widen the bound on what is allowed in an interval.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tallygate::Timed;
use tokio::sync::{MutexGuard as Turn, oneshot};
use tokio::time::timeout_at;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::node::last_chance;
use crate::transaction::{At, Seen, Step, Write, Written, backoff};
use crate::value;

/// A decision on what was read.
type Decide = Box<dyn FnMut(&Seen) -> Result<Step<Timed>, Error> + Send>;

/// A decision that was written, and whether the key is kept under several policies.
type Committed = (Timed, bool);

/// The queues of some keys.
type Queues = HashMap<Box<[u8]>, Queue>;

/// The callers of each key who wait for a decision, and a lock for those who decide on several keys.
pub(crate) struct Commits {
    shards: Box<[Mutex<Queues>]>,
    locks: Box<[tokio::sync::Mutex<()>]>,
    hasher: RandomState,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<Entry>,
    is_running: bool,
    known: Option<Known>,
}

struct Entry {
    decide: Decide,
    done: oneshot::Sender<Result<Committed, Error>>,
    arrived: Instant,
    deadline: Instant,
}

/// What a key held when it was last written or read here.
struct Known {
    value: Vec<u8>,
    /// When that was, by the server's clock in microseconds.
    time: i64,
    /// When that was asked for, and what the reply took.
    sent: Instant,
    round_trip: Duration,
}

const SHARDS: usize = 16;
const LOCKS: usize = 256;
/// How many callers of one key wait at most. More are denied at once.
const MOST_WAITING: usize = 4096;
/// How many are decided on in one round.
const MOST_TOGETHER: usize = 256;
/// How many keys a shard remembers.
const MOST_KEYS: usize = 256;
/// From which round trip on it is guessed what a key holds: below, asking takes no time.
const GUESSED_FROM: Duration = Duration::from_millis(2);
/// How long what was written is taken for what is there.
const KNOWN_FOR: Duration = Duration::from_secs(1);
/// How long it is left to other processes to write at most.
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

impl Commits {
    pub(crate) fn new() -> Self {
        Self {
            shards: (0..SHARDS).map(|_| Mutex::default()).collect(),
            locks: (0..LOCKS).map(|_| tokio::sync::Mutex::default()).collect(),
            hasher: RandomState::new(),
        }
    }

    fn shard(&self, key: &[u8]) -> MutexGuard<'_, Queues> {
        let hash = usize::try_from(self.hasher.hash_one(key) >> 32).unwrap_or(0);
        self.shards[hash % SHARDS].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until nobody else in this process decides on these keys by compare-and-set.
    pub(crate) async fn turn(&self, keys: &[&Key], deadline: Instant) -> Option<Vec<Turn<'_, ()>>> {
        let hash = |key: &&Key| usize::try_from(self.hasher.hash_one(&key.name) >> 32).unwrap_or(0);
        let mut places: Vec<usize> = keys.iter().map(|key| hash(key) % LOCKS).collect();
        // All in the same order: nobody waits for each other.
        places.sort_unstable();
        places.dedup();
        let mut turns = Vec::with_capacity(places.len());
        for place in places {
            turns.push(timeout_at(deadline.into(), self.locks[place].lock()).await.ok()?);
        }
        Some(turns)
    }
}

impl Redis {
    /// Decides on a key together with all others in this process who do. `seen` is what a script has just read, and when
    /// it was sent.
    pub(crate) async fn commit(
        &self,
        key: &Key,
        seen: Option<(Seen, Instant)>,
        deadline: Instant,
        decide: impl FnMut(&Seen) -> Result<Step<Timed>, Error> + Send + 'static,
    ) -> Result<Committed, Error> {
        let (done, committed) = oneshot::channel();
        let arrived = Instant::now();
        let begins = {
            let mut shard = self.inner().commits.shard(&key.name);
            let queue = shard.entry(key.name.clone().into()).or_default();
            if queue.waiting.len() >= MOST_WAITING {
                queue.waiting.retain(|entry| !entry.done.is_closed());
            }
            if queue.waiting.len() >= MOST_WAITING {
                return Err(overloaded(false));
            }
            if let Some((seen, sent)) = seen {
                queue.known = Some(Known::of(seen, sent));
            }
            queue.waiting.push(Entry { decide: Box::new(decide), done, arrived, deadline });
            !std::mem::replace(&mut queue.is_running, true)
        };
        if begins {
            let (redis, key) = (self.clone(), key.clone());
            tokio::spawn(async move { Run { redis, key, is_over: false }.all().await });
        }
        let mut committed = committed;
        let mut told = timeout_at(deadline.into(), &mut committed).await.map_err(Some);
        if told.is_err() && !self.is_busy_since(key, arrived) {
            told = last_chance(deadline, self.budget(), &mut committed).await.ok_or(None);
        }
        match told {
            Ok(Ok(told)) => told,
            Ok(Err(_)) => Err(overloaded(true)),
            Err(_) if self.is_busy_since(key, arrived) => Err(overloaded(true)),
            Err(_) => Err(Error::Unavailable {
                reason: "no reply within the time budget".into(),
                sent: true,
            }),
        }
    }
}

fn overloaded(sent: bool) -> Error {
    Error::Overloaded { reason: "many decide on the same key".into(), sent }
}

/// The task that decides for all callers of a key. If it ends early, the callers are let go.
struct Run {
    redis: Redis,
    key: Key,
    is_over: bool,
}

impl Run {
    async fn all(mut self) {
        loop {
            let (entries, known) = {
                let mut shard = self.redis.inner().commits.shard(&self.key.name);
                let Some(queue) = shard.get_mut(&*self.key.name) else { return };
                let entries = take_waiting(queue, MOST_TOGETHER, Instant::now());
                if entries.is_empty() {
                    queue.is_running = false;
                    self.is_over = true;
                    if shard.len() > MOST_KEYS {
                        shard.retain(|_, queue| {
                            queue.is_running || queue.known.as_ref().is_some_and(Known::helps)
                        });
                    }
                    return;
                }
                (entries, queue.known.take().filter(Known::helps))
            };
            let (known, races) = self.round(entries, known).await;
            if races > 0 {
                // Others want to write, too: it is their turn.
                let pause = known.as_ref().map_or(Duration::ZERO, |known| known.round_trip);
                let nanos = u64::try_from(pause.min(LONGEST_PAUSE).as_nanos()).unwrap_or(0);
                tokio::time::sleep(Duration::from_nanos(fastrand::u64(0..=nanos))).await;
            }
            if let Some(known) = known {
                let mut shard = self.redis.inner().commits.shard(&self.key.name);
                if let Some(queue) = shard.get_mut(&*self.key.name) {
                    queue.known = Some(known);
                }
            }
        }
    }

    /// Decides for some callers; returns what the key holds then, if it is known, and how often others were faster.
    async fn round(&self, mut entries: Vec<Entry>, known: Option<Known>) -> (Option<Known>, u32) {
        let redis = &self.redis;
        let keys = [&self.key];
        let Some(last) = entries.iter().map(|entry| entry.deadline).max() else { return (None, 0) };
        let Some(_turn) = redis.inner().commits.turn(&keys, last).await else {
            let_go(entries, &overloaded(false));
            return (None, 0);
        };
        let mut tries = 0;
        let mut is_guess = known.is_some();
        let mut sent = Instant::now();
        let mut seen = match known {
            Some(known) => {
                // The server is to have reached the time of the guess when it gets it.
                let pause = known.round_trip / 16;
                let seen = known.seen();
                tokio::time::sleep(pause).await;
                seen
            }
            None => match redis.read(&keys, None, last).await {
                Ok(seen) => seen,
                Err(error) => {
                    let_go(entries, &error);
                    return (None, 0);
                }
            },
        };
        loop {
            let (write, told) = decide_all(&mut entries, &seen);
            let Some(write) = write else {
                if !is_guess {
                    let several = value::is_of_several(&seen.values[0]);
                    deliver(entries, told, several);
                    return (Some(Known::of(seen, sent)), tries);
                }
                // Nothing is to be written, so nobody would notice that another process has written.
                sent = Instant::now();
                match redis.read(&keys, None, last).await {
                    Ok(read) => (seen, is_guess) = (read, false),
                    Err(error) => {
                        let_go(entries, &error);
                        return (None, 0);
                    }
                }
                continue;
            };
            sent = Instant::now();
            let at = if is_guess { At::Reached } else { At::Server };
            match redis.write(&keys, at, &seen, std::slice::from_ref(&write), last).await {
                Ok(Written::Done { now }) => {
                    let several = value::is_of_several(&write.value);
                    deliver(entries, told, several);
                    let is_fresh = write.fresh_at.is_some_and(|fresh| fresh <= seen.now);
                    let value = if is_fresh { Vec::new() } else { write.value };
                    return (Some(Known::of(Seen { now, values: vec![value] }, sent)), tries);
                }
                Ok(Written::Changed(changed)) => {
                    tries += 1;
                    redis.inner().counters.contended.fetch_add(1, Ordering::Relaxed);
                    (seen, is_guess) = (changed, false);
                    backoff(tries, sent.elapsed()).await;
                }
                Err(error) => {
                    let_go(entries, &error);
                    return (None, 0);
                }
            }
            let now = Instant::now();
            let (late, rest) = entries
                .into_iter()
                .partition(|entry: &Entry| entry.deadline <= now || entry.done.is_closed());
            let_go(late, &Error::Contended { tries });
            entries = rest;
            if entries.is_empty() {
                return (Some(Known::of(seen, sent)), tries);
            }
            // Those who came before the last call was sent come along: its reply tells of a time after that.
            let mut shard = redis.inner().commits.shard(&self.key.name);
            if let Some(queue) = shard.get_mut(&*self.key.name) {
                let room = MOST_TOGETHER.saturating_sub(entries.len());
                entries.extend(take_waiting(queue, room, sent));
            }
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // Only where the task was ended from outside: the callers that wait are let go with it.
        if !self.is_over {
            self.redis.inner().commits.shard(&self.key.name).remove(&*self.key.name);
        }
    }
}

impl Known {
    /// What was just read or written by a call that was sent at a moment.
    fn of(seen: Seen, sent: Instant) -> Self {
        let Seen { now, mut values } = seen;
        let value = values.pop().unwrap_or_default();
        Self { value, time: now, sent, round_trip: sent.elapsed() }
    }

    /// Whether a guess is worth it.
    fn helps(&self) -> bool {
        self.round_trip >= GUESSED_FROM && self.sent.elapsed() < KNOWN_FOR
    }

    /// The value, and a time that the server has not passed by now: it carried out the call after that was sent.
    fn seen(self) -> Seen {
        let since = self.sent.elapsed();
        let since = i64::try_from((since + since / 1000).as_micros()).unwrap_or(0);
        Seen { now: self.time.saturating_add(since), values: vec![self.value] }
    }
}

/// Takes some who came before a moment and still wait, in the order in which they came. Those who have gone are forgotten.
fn take_waiting(queue: &mut Queue, at_most: usize, before: Instant) -> Vec<Entry> {
    let now = Instant::now();
    queue.waiting.retain(|entry| !entry.done.is_closed() && entry.deadline > now);
    let came = queue.waiting.iter().take_while(|entry| entry.arrived <= before).count();
    queue.waiting.drain(..came.min(at_most)).collect()
}

/// Decides for each on what the one before it left. Those whose decision is an error are told so.
fn decide_all(entries: &mut Vec<Entry>, seen: &Seen) -> (Option<Write>, Vec<Timed>) {
    let mut told = Vec::with_capacity(entries.len());
    let mut write: Option<Write> = None;
    let mut at = Seen { now: seen.now, values: seen.values.clone() };
    let mut place = 0;
    while place < entries.len() {
        match (entries[place].decide)(&at) {
            Ok((writes, answer)) => {
                if let Some(new) = writes.and_then(|mut writes| writes.pop()) {
                    at.values[0].clone_from(&new.value);
                    write = Some(new);
                }
                told.push(answer);
                place += 1;
            }
            Err(error) => {
                let entry = entries.remove(place);
                let _ = entry.done.send(Err(error));
            }
        }
    }
    (write, told)
}

fn deliver(entries: Vec<Entry>, told: Vec<Timed>, several: bool) {
    for (entry, told) in entries.into_iter().zip(told) {
        // Who does not wait any more is not told.
        let _ = entry.done.send(Ok((told, several)));
    }
}

fn let_go(entries: Vec<Entry>, error: &Error) {
    for entry in entries {
        let _ = entry.done.send(Err(error.clone()));
    }
}
