//! The busiest and the most refused clients of the last minutes, in bounded memory.
//!
//! A heavy-hitter sketch (space saving): so many clients are counted; a new one takes the place of the least counted
//! and inherits its count as a possible error. Whoever makes up more than one in [`CLIENTS`] of the traffic is surely
//! in it. One decision in [`SAMPLED`] is counted, as so many.

use std::cell::Cell;
use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashTable;

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

/// Counts of some clients. The counts lie together: the least of them is looked for with every new client.
#[derive(Default)]
struct Sketch {
    counts: Vec<u64>,
    clients: Vec<Client>,
    /// Their places, by hash.
    places: HashTable<usize>,
    hasher: foldhash::fast::RandomState,
}

/// Whose count it is.
struct Client {
    policy: Arc<str>,
    key: Vec<u8>,
    hash: u64,
    /// How much of the count may be somebody else's.
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
        let mut all = HashMap::<(Arc<str>, Box<[u8]>), (u64, u64)>::new();
        for sketch in [&counted.before[which], &counted.now[which]] {
            for (client, count) in sketch.clients.iter().zip(&sketch.counts) {
                let client_key = (client.policy.clone(), client.key.as_slice().into());
                let sum = all.entry(client_key).or_default();
                *sum = (sum.0 + count, sum.1 + client.error);
            }
        }
        drop(counted);
        let hot = |((policy, key), (count, error))| HotClient { policy, key, count, error };
        let mut top: Vec<HotClient> = all.into_iter().map(hot).collect();
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
        let hash = self.hasher.hash_one((&**policy, key));
        let is_it = |place: &usize| {
            let client: &Client = &self.clients[*place];
            client.key == key && client.policy == *policy
        };
        if let Some(place) = self.places.find(hash, is_it) {
            self.counts[*place] += u64::from(SAMPLED);
            return;
        }
        let place = if self.clients.len() < CLIENTS {
            self.counts.push(0);
            self.clients.push(Client { policy: policy.clone(), key: key.into(), hash, error: 0 });
            self.clients.len() - 1
        } else {
            self.replace_least(policy, key, hash)
        };
        self.counts[place] += u64::from(SAMPLED);
        self.places.insert_unique(hash, place, |place| self.clients[*place].hash);
    }

    /// Gives a client the place of the least counted, with its count; which one it is.
    fn replace_least(&mut self, policy: &Arc<str>, key: &[u8], hash: u64) -> usize {
        let least = self.counts.iter().copied().min().unwrap_or(0);
        let place = self.counts.iter().position(|count| *count == least).unwrap_or(0);
        let client = &mut self.clients[place];
        if let Ok(gone) = self.places.find_entry(client.hash, |one| *one == place) {
            gone.remove();
        }
        client.policy.clone_from(policy);
        client.key.clear();
        client.key.extend_from_slice(key);
        (client.hash, client.error) = (hash, least);
        place
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
        assert!(counted.now.iter().all(|sketch| sketch.places.len() <= CLIENTS));
    }

    #[test]
    fn what_is_long_past_is_forgotten() {
        let mut counted = Counted::default();
        let policy = Arc::from("api");
        counted.now[0].add(&policy, b"alice");
        counted.turn(counted.since + SPAN);
        assert_eq!((counted.now[0].places.len(), counted.before[0].places.len()), (0, 1));
        counted.turn(counted.since + 2 * SPAN);
        assert_eq!((counted.now[0].places.len(), counted.before[0].places.len()), (0, 0));
    }
}
