//! Decides in this process and writes by compare-and-set, for many callers of the same keys at once.
//!
//! This is for values that no script can decide on: several policies of which one has a log, a penalty or large
//! numbers. Settlements and refunds also write a second key, with the record of what was returned.
//!
//! Callers of the same keys do not race against each other: they queue, and one task decides for all waiting callers, in
//! order, on the same values, and writes once. So only processes race, and at most as many as there are. A lost race is retried with
//! the value from the reply, until the deadline of the callers.
//!
//! If the server is far away, the task remembers what it wrote, and assumes that it is still there: while no other
//! process writes, a round costs one round trip instead of two. The time of such a decision is an estimate that the
//! server cannot have passed when the callers arrived, and the script writes only if the server has reached it by then.
//! So no decision is made at a time before its request arrived, which would widen the bound on what is allowed in an
//! interval.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher as _;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tallygate::algorithm::Timed;
use tokio::sync::{MutexGuard as Turn, oneshot};
use tokio::time::timeout_at;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::link::last_chance;
use crate::transaction::{ReadValues, Step, Write, WriteResult, WriteTime, late, nothing_sent};
use crate::value;

/// Decides on the values that were read.
type DecideFn = Box<dyn FnMut(&ReadValues) -> Result<Step<Timed>, Error> + Send>;

/// A decision that was written, and whether the value has the state of several policies.
type Committed = (Timed, bool);

/// The queues, by the name of the last key: a record of returns has a queue of its own.
type Queues = HashMap<Box<[u8]>, Queue>;

/// The waiting callers of each key, and locks for callers that decide on several keys.
pub(crate) struct Commits {
    shards: Box<[Mutex<Queues>]>,
    locks: Box<[tokio::sync::Mutex<()>]>,
    hasher: RandomState,
}

#[derive(Default)]
struct Queue {
    waiting: Vec<QueuedCheck>,
    is_running: bool,
    cached: Option<CachedValues>,
}

struct QueuedCheck {
    decide: DecideFn,
    done: oneshot::Sender<Result<Committed, Error>>,
    arrived: Instant,
    deadline: Instant,
}

/// The values of the keys when this process last wrote or read them.
struct CachedValues {
    values: Vec<Vec<u8>>,
    /// When that was, by the server's clock in microseconds.
    time: i64,
    /// When the call was sent, and how long its reply took.
    sent: Instant,
    round_trip: Duration,
}

const SHARDS: usize = 16;
const LOCKS: usize = 256;
/// How many callers of one key wait at most. Further callers are denied at once.
const MAX_WAITING: usize = 4096;
/// How many callers are decided on in one round at most.
const MAX_PER_ROUND: usize = 256;
/// How many keys a shard keeps at most.
const MAX_KEYS: usize = 256;
/// The shortest round trip for which a cached value is used. Below, reading takes hardly any time.
const LEAST_ROUND_TRIP: Duration = Duration::from_millis(2);
/// How long a value is cached.
const CACHED_FOR: Duration = Duration::from_secs(1);
/// How long this process waits at most to let other processes write.
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

    /// Waits until no other caller in this process decides on these keys by compare-and-set.
    pub(crate) async fn turn(&self, keys: &[&Key], deadline: Instant) -> Option<Vec<Turn<'_, ()>>> {
        let hash = |key: &&Key| usize::try_from(self.hasher.hash_one(&key.name) >> 32).unwrap_or(0);
        let mut places: Vec<usize> = keys.iter().map(|key| hash(key) % LOCKS).collect();
        // All callers lock in the same order, so that there is no deadlock.
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
    /// Decides on some keys of one slot, together with all other callers in this process. `seen` are values that a script
    /// has just read, and when its call was sent.
    pub(crate) async fn commit<const N: usize>(
        &self,
        keys: [&Key; N],
        seen: Option<(ReadValues, Instant)>,
        deadline: Instant,
        decide: impl FnMut(&ReadValues) -> Result<Step<Timed>, Error> + Send + 'static,
    ) -> Result<Committed, Error> {
        let (done, committed) = oneshot::channel();
        let arrived = Instant::now();
        let name = &keys[N - 1].name;
        let begins = {
            let mut shard = self.inner().commits.shard(name);
            let queue = shard.entry(name.clone().into()).or_default();
            if queue.waiting.len() >= MAX_WAITING {
                queue.waiting.retain(|entry| !entry.done.is_closed());
            }
            if queue.waiting.len() >= MAX_WAITING {
                return Err(overloaded(false));
            }
            if let Some((seen, sent)) = seen {
                queue.cached = Some(CachedValues::of(seen, sent));
            }
            queue.waiting.push(QueuedCheck { decide: Box::new(decide), done, arrived, deadline });
            !std::mem::replace(&mut queue.is_running, true)
        };
        if begins {
            let (redis, keys) = (self.clone(), keys.map(Key::clone));
            tokio::spawn(async move { KeyTask { redis, keys, is_over: false }.all().await });
        }
        let mut committed = committed;
        let mut result = timeout_at(deadline.into(), &mut committed).await.ok();
        if result.is_none() && !self.is_busy_since(keys[0], arrived) {
            result = last_chance(deadline, self.budget(), &mut committed).await;
        }
        match result {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(overloaded(true)),
            None if self.is_busy_since(keys[0], arrived) => Err(overloaded(true)),
            None => Err(Error::Unavailable {
                reason: "no reply within the time budget".into(),
                sent: true,
            }),
        }
    }
}

fn overloaded(sent: bool) -> Error {
    Error::Overloaded { reason: "other checks of the same key wait for redis".into(), sent }
}

/// The task that decides for all callers of some keys. If it ends early, the callers fail.
struct KeyTask<const N: usize> {
    redis: Redis,
    keys: [Key; N],
    is_over: bool,
}

impl<const N: usize> KeyTask<N> {
    fn queue_name(&self) -> &[u8] {
        &self.keys[N - 1].name
    }

    async fn all(mut self) {
        loop {
            let (entries, cached) = {
                let mut shard = self.redis.inner().commits.shard(self.queue_name());
                let Some(queue) = shard.get_mut(self.queue_name()) else { return };
                let entries = take_waiting(queue, MAX_PER_ROUND, Instant::now());
                if entries.is_empty() {
                    queue.is_running = false;
                    self.is_over = true;
                    if shard.len() > MAX_KEYS {
                        shard.retain(|_, queue| {
                            queue.is_running
                                || queue.cached.as_ref().is_some_and(CachedValues::is_useful)
                        });
                    }
                    return;
                }
                (entries, queue.cached.take().filter(CachedValues::is_useful))
            };
            let (cached, races) = self.round(entries, cached).await;
            if races > 0 {
                // Let other processes write.
                let pause = cached.as_ref().map_or(Duration::ZERO, |cached| cached.round_trip);
                let nanos = u64::try_from(pause.min(LONGEST_PAUSE).as_nanos()).unwrap_or(0);
                tokio::time::sleep(Duration::from_nanos(fastrand::u64(0..=nanos))).await;
            }
            if let Some(cached) = cached {
                let mut shard = self.redis.inner().commits.shard(self.queue_name());
                if let Some(queue) = shard.get_mut(self.queue_name()) {
                    queue.cached = Some(cached);
                }
            }
        }
    }

    /// Decides for some callers. Returns the values of the keys after that, if they are known, and the number of lost
    /// races.
    async fn round(
        &self,
        mut entries: Vec<QueuedCheck>,
        cached: Option<CachedValues>,
    ) -> (Option<CachedValues>, u32) {
        let redis = &self.redis;
        let keys = self.keys.each_ref();
        let Some(last) = entries.iter().map(|entry| entry.deadline).max() else { return (None, 0) };
        let Some(_turn) = redis.inner().commits.turn(&keys, last).await else {
            fail_all(entries, &overloaded(false));
            return (None, 0);
        };
        let mut tries = 0;
        let mut is_guess = cached.is_some();
        let mut sent = Instant::now();
        let mut seen = match cached {
            Some(cached) => {
                // The server has to reach the estimated time before it gets the write.
                let pause = cached.round_trip / 16;
                let seen = cached.seen();
                tokio::time::sleep(pause).await;
                seen
            }
            None => match redis.read(&keys, None, last).await {
                Ok(seen) => seen,
                Err(error) => {
                    fail_all(entries, &nothing_sent(error));
                    return (None, 0);
                }
            },
        };
        loop {
            // The server must not carry out writes for callers that do not wait any more.
            let now = Instant::now();
            let (over, waiting) = entries
                .into_iter()
                .partition(|entry: &QueuedCheck| entry.deadline <= now || entry.done.is_closed());
            fail_all(over, &late(tries));
            entries = waiting;
            if entries.is_empty() {
                let cached = (!is_guess).then(|| CachedValues::of(seen, sent));
                return (cached, tries);
            }
            let (writes, result) = decide_all(&mut entries, &seen);
            let Some(writes) = writes else {
                if !is_guess {
                    let several = value::is_of_several(&seen.values[0]);
                    deliver(entries, result, several);
                    return (Some(CachedValues::of(seen, sent)), tries);
                }
                // Without a write, a change by another process would go unnoticed.
                sent = Instant::now();
                match redis.read(&keys, None, last).await {
                    Ok(read) => (seen, is_guess) = (read, false),
                    Err(error) => {
                        fail_all(entries, &nothing_sent(error));
                        return (None, 0);
                    }
                }
                continue;
            };
            sent = Instant::now();
            let at = if is_guess { WriteTime::ServerIfReached } else { WriteTime::Server };
            match redis.write(&keys, at, &seen, &writes, last).await {
                Ok(WriteResult::Done { now }) => {
                    let several = value::is_of_several(&writes[0].value);
                    deliver(entries, result, several);
                    let is_fresh =
                        |write: &Write| write.fresh_at.is_some_and(|fresh| fresh <= seen.now);
                    let written = |write: Write| {
                        if is_fresh(&write) { Vec::new() } else { write.value }
                    };
                    let values = writes.into_iter().map(written).collect();
                    return (Some(CachedValues::of(ReadValues { now, values }, sent)), tries);
                }
                Ok(WriteResult::Changed(changed)) => {
                    tries += 1;
                    redis.inner().counters.contended.fetch_add(1, Ordering::Relaxed);
                    (seen, is_guess) = (changed, false);
                    // Retry at once: the reply has the present values, and each moment of waiting makes it more likely that a
                    // script of another caller changes them.
                }
                Err(error) => {
                    fail_all(entries, &error);
                    return (None, 0);
                }
            }
            // Callers that arrived before the last call was sent join: the reply has a later time.
            let mut shard = redis.inner().commits.shard(self.queue_name());
            if let Some(queue) = shard.get_mut(self.queue_name()) {
                let room = MAX_PER_ROUND.saturating_sub(entries.len());
                entries.extend(take_waiting(queue, room, sent));
            }
        }
    }
}

impl<const N: usize> Drop for KeyTask<N> {
    fn drop(&mut self) {
        // This happens only if the task is aborted: the waiting callers fail with it.
        if !self.is_over {
            self.redis.inner().commits.shard(self.queue_name()).remove(self.queue_name());
        }
    }
}

impl CachedValues {
    /// Makes cached values from the result of a call.
    fn of(ReadValues { now, values }: ReadValues, sent: Instant) -> Self {
        Self { values, time: now, sent, round_trip: sent.elapsed() }
    }

    /// Returns whether the cached values save a round trip.
    fn is_useful(&self) -> bool {
        self.round_trip >= LEAST_ROUND_TRIP && self.sent.elapsed() < CACHED_FOR
    }

    /// Returns the values, and a time that the server has not passed by now: it carried out the call after the call was
    /// sent.
    fn seen(self) -> ReadValues {
        let since = self.sent.elapsed();
        let since = i64::try_from((since + since / 1000).as_micros()).unwrap_or(0);
        ReadValues { now: self.time.saturating_add(since), values: self.values }
    }
}

/// Takes some waiting callers that arrived before a time, in order of arrival. Drops callers that have gone.
fn take_waiting(queue: &mut Queue, at_most: usize, before: Instant) -> Vec<QueuedCheck> {
    let now = Instant::now();
    queue.waiting.retain(|entry| !entry.done.is_closed() && entry.deadline > now);
    let came = queue.waiting.iter().take_while(|entry| entry.arrived <= before).count();
    queue.waiting.drain(..came.min(at_most)).collect()
}

/// Decides for each caller on the values that the previous one left. Removes and answers callers whose decision is an
/// error.
fn decide_all(
    entries: &mut Vec<QueuedCheck>,
    seen: &ReadValues,
) -> (Option<Vec<Write>>, Vec<Timed>) {
    let mut result = Vec::with_capacity(entries.len());
    let mut last: Option<Vec<Write>> = None;
    let mut at = ReadValues { now: seen.now, values: seen.values.clone() };
    let mut place = 0;
    while place < entries.len() {
        match (entries[place].decide)(&at) {
            Ok((writes, answer)) => {
                if let Some(writes) = writes {
                    for (value, write) in at.values.iter_mut().zip(&writes) {
                        value.clone_from(&write.value);
                    }
                    last = Some(writes);
                }
                result.push(answer);
                place += 1;
            }
            Err(error) => {
                let entry = entries.remove(place);
                let _ = entry.done.send(Err(error));
            }
        }
    }
    (last, result)
}

fn deliver(entries: Vec<QueuedCheck>, result: Vec<Timed>, several: bool) {
    for (entry, result) in entries.into_iter().zip(result) {
        // A caller that has gone is not answered.
        let _ = entry.done.send(Ok((result, several)));
    }
}

fn fail_all(entries: Vec<QueuedCheck>, error: &Error) {
    for entry in entries {
        let _ = entry.done.send(Err(error.clone()));
    }
}
