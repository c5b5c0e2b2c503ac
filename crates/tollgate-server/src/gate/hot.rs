//! The busiest and the most refused clients of the last minutes, in bounded memory.
//!
//! A heavy-hitter sketch (space saving): so many clients are counted; a new one takes the place of the least counted
//! and inherits its count as a possible error. Whoever makes up more than one in [`CLIENTS`] of the traffic is surely
//! in it. One decision in [`SAMPLED`] is counted, as so many.

use std::cell::Cell;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How many clients are counted at a time.
const CLIENTS: usize = 256;
/// One decision in so many is looked at.
const SAMPLED: u32 = 8;
/// How long is counted before it begins anew; the one before is kept.
const SPAN: Duration = Duration::from_secs(60);

/// The busiest and the most refused clients.
#[derive(Default)]
pub(crate) struct Hot {
    counted: Mutex<Counted>,
}

struct Counted {
    since: Instant,
    now: [Sketch; 2],
    before: [Sketch; 2],
}

impl Default for Counted {
    fn default() -> Self {
        Self { since: Instant::now(), now: Default::default(), before: Default::default() }
    }
}

/// Counts of some clients.
#[derive(Default)]
struct Sketch(HashMap<(Arc<str>, Box<[u8]>), Count>);

#[derive(Clone, Copy, Default)]
struct Count {
    count: u64,
    /// How much of it may be somebody else's.
    error: u64,
}

/// A client that is hot.
pub(crate) struct HotClient {
    pub(crate) policy: Arc<str>,
    pub(crate) key: Box<[u8]>,
    /// About how many decisions, at most.
    pub(crate) count: u64,
    /// How many of them may be others'.
    pub(crate) error: u64,
}

impl Hot {
    /// Counts a decision, or leaves it out of the sample.
    pub(crate) fn note(&self, policy: &Arc<str>, key: &[u8], allowed: bool) {
        thread_local! {
            static PASSED: Cell<u32> = const { Cell::new(0) };
        }
        let passed = PASSED.get().wrapping_add(1);
        PASSED.set(passed);
        if !passed.is_multiple_of(SAMPLED) {
            return;
        }
        // If somebody else counts just now, this one is left out.
        if let Ok(mut counted) = self.counted.try_lock() {
            counted.turn(Instant::now());
            counted.now[0].add(policy, key);
            if !allowed {
                counted.now[1].add(policy, key);
            }
        }
    }

    /// The busiest clients, the busiest first.
    pub(crate) fn busiest(&self, most: usize) -> Vec<HotClient> {
        self.top(0, most)
    }

    /// The most refused ones.
    pub(crate) fn most_refused(&self, most: usize) -> Vec<HotClient> {
        self.top(1, most)
    }

    fn top(&self, which: usize, most: usize) -> Vec<HotClient> {
        let mut counted = self.counted.lock().unwrap_or_else(PoisonError::into_inner);
        counted.turn(Instant::now());
        let mut all: HashMap<_, Count> = counted.before[which].0.clone();
        for (client, count) in &counted.now[which].0 {
            let sum = all.entry(client.clone()).or_default();
            sum.count += count.count;
            sum.error += count.error;
        }
        drop(counted);
        let mut top: Vec<HotClient> = all
            .into_iter()
            .map(|((policy, key), Count { count, error })| HotClient { policy, key, count, error })
            .collect();
        top.sort_by(|one, other| other.count.cmp(&one.count).then_with(|| one.key.cmp(&other.key)));
        top.truncate(most);
        top
    }
}

impl Counted {
    /// Begins anew when its span is over.
    fn turn(&mut self, now: Instant) {
        let passed = now.duration_since(self.since);
        if passed >= SPAN {
            let last = std::mem::take(&mut self.now);
            self.before = if passed < 2 * SPAN { last } else { Default::default() };
            self.since = now;
        }
    }
}

impl Sketch {
    fn add(&mut self, policy: &Arc<str>, key: &[u8]) {
        // Looked up by a made pair: the sample is small.
        let client = (policy.clone(), Box::<[u8]>::from(key));
        if let Some(count) = self.0.get_mut(&client) {
            count.count += u64::from(SAMPLED);
            return;
        }
        let mut inherited = 0;
        if self.0.len() >= CLIENTS
            && let Some(least) =
                self.0.iter().min_by_key(|(_, count)| count.count).map(|(client, _)| client.clone())
        {
            inherited = self.0.remove(&least).map_or(0, |count| count.count);
        }
        let count = Count { count: inherited + u64::from(SAMPLED), error: inherited };
        self.0.insert(client, count);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_is_hot_is_found_among_many_and_memory_is_bounded() {
        let hot = Hot::default();
        let policy = Arc::from("api");
        for round in 0..100_000_u32 {
            hot.note(&policy, format!("client {round}").as_bytes(), true);
            if round % 10 < 3 {
                hot.note(&policy, b"greedy", round % 10 == 0);
            }
        }
        let busiest = hot.busiest(3);
        assert_eq!(&*busiest[0].key, b"greedy");
        let (count, error) = (busiest[0].count, busiest[0].error);
        assert!(
            (count - error..=count).contains(&30_000) || count.abs_diff(30_000) < 4_000,
            "{count} {error}"
        );
        assert_eq!(&*hot.most_refused(1)[0].key, b"greedy");
        let counted = hot.counted.lock().unwrap_or_else(PoisonError::into_inner);
        assert!(counted.now.iter().all(|sketch| sketch.0.len() <= CLIENTS));
    }

    #[test]
    fn what_is_long_past_is_forgotten() {
        let mut counted = Counted::default();
        let policy = Arc::from("api");
        counted.now[0].add(&policy, b"alice");
        counted.turn(counted.since + SPAN);
        assert_eq!((counted.now[0].0.len(), counted.before[0].0.len()), (0, 1));
        counted.turn(counted.since + 2 * SPAN);
        assert_eq!((counted.now[0].0.len(), counted.before[0].0.len()), (0, 0));
    }
}
