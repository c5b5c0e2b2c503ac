//! The busiest and the most denied clients of the last minutes, in bounded memory.
//!
//! Each thread counts for itself, so that counting writes no memory that another thread writes. The lists are merged
//! when they are read. A thread counts every decision of a period (a minute) until there are [`EXACT`] of them, then
//! one in [`SAMPLED`] on average, with that weight.
//!
//! A sketch (the space-saving algorithm) counts [`CLIENTS`] clients. A new client replaces the one with the lowest
//! count and inherits that count as its possible error. A client with more than 1/[`CLIENTS`] of the traffic is always
//! listed. Each client of the list has a count and an error: the true number is within `count ± error`. It is certain
//! while every decision is counted. For sampled decisions, the error is four standard deviations.

use std::collections::HashMap;
use std::hash::BuildHasher as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use hashbrown::HashTable;

use crate::striped::Striped;

/// How many clients a sketch counts.
const CLIENTS: usize = 256;
/// How many bytes the keys of a sketch may have. Further keys are not listed.
const KEY_BYTES: usize = 64 << 10;
/// How many decisions of a period a thread counts one by one.
const EXACT: u64 = 16_384;
/// One in this many further decisions is counted, on average.
const SAMPLED: u64 = 64;
/// What a client may have in a sampled period without being in the sample: less likely than one in 8000.
const UNSEEN: u64 = 9 * SAMPLED;
/// The length of a period. The counts of the previous period are kept.
const PERIOD: Duration = Duration::from_secs(60);

/// The busiest and the most denied clients.
pub(crate) struct HotClients {
    threads: Striped<ThreadCounts>,
    /// The number of the period. All threads read it, and it changes once per period.
    period: AtomicU64,
    created: Instant,
}

/// The counts of one thread. Only this thread and readers use them.
#[derive(Default)]
struct ThreadCounts {
    /// How many decisions to leave out before the next one is counted.
    skip: AtomicU32,
    /// How many decisions were not counted because the counts were being read.
    missed: AtomicU64,
    counts: Mutex<PeriodCounts>,
}

/// The counts of the current period and of the one before.
#[derive(Default)]
struct PeriodCounts {
    period: u64,
    now: Period,
    before: Period,
    /// Whether decisions were left out before the next one.
    is_sampling: bool,
    random: u64,
}

#[derive(Default)]
struct Period {
    decisions: u64,
    /// Whether some decisions were left out.
    is_sampled: bool,
    missed: u64,
    all: Sketch,
    denied: Sketch,
}

/// Counts of clients. The counts are contiguous, because every new client searches for the lowest.
#[derive(Default)]
struct Sketch {
    counts: Vec<u64>,
    clients: Vec<SketchClient>,
    /// The indexes of clients, by hash.
    places: HashTable<usize>,
    hasher: foldhash::fast::RandomState,
    key_bytes: usize,
    /// The highest count of a client that was replaced.
    unlisted: u64,
    /// How many decisions were of keys that had no room.
    too_long: u64,
}

/// The client of a count.
struct SketchClient {
    policy: Arc<str>,
    key: Box<[u8]>,
    hash: u64,
    /// How much of the count may belong to replaced clients.
    inherited: u64,
    /// How many decisions in the sample were of this client.
    samples: u64,
}

/// A client in the list.
pub(crate) struct HotClient {
    pub(crate) policy: Arc<str>,
    pub(crate) key: Box<[u8]>,
    /// The number of decisions, within `error`.
    pub(crate) count: u64,
    /// How far the count may be from the true number.
    pub(crate) error: u64,
}

impl Default for HotClients {
    fn default() -> Self {
        Self { threads: Striped::default(), period: AtomicU64::new(0), created: Instant::now() }
    }
}

impl HotClients {
    /// Counts a decision, or leaves it out if the thread is busy.
    #[inline]
    pub(crate) fn record(&self, policy: &Arc<str>, key: &[u8], allowed: bool) {
        let thread = self.threads.local();
        let skip = thread.skip.load(Ordering::Relaxed);
        if skip > 0 {
            // Threads that share these counts may both do so: the sample is then a little larger or smaller.
            thread.skip.store(skip - 1, Ordering::Relaxed);
            return;
        }
        thread.count(self.period.load(Ordering::Relaxed), policy, key, allowed);
    }

    /// Begins a new period whenever one is over.
    pub(crate) async fn keep_time(&self) {
        loop {
            tokio::time::sleep(PERIOD).await;
            self.begin_period(Instant::now());
        }
    }

    fn begin_period(&self, now: Instant) {
        let passed = now.duration_since(self.created).as_secs() / PERIOD.as_secs();
        self.period.fetch_max(passed, Ordering::Relaxed);
    }

    /// Returns the busiest clients, the busiest first.
    pub(crate) fn busiest(&self, most: usize) -> Vec<HotClient> {
        self.top(|period| &period.all, most)
    }

    /// Returns the most denied clients, the most denied first.
    pub(crate) fn most_denied(&self, most: usize) -> Vec<HotClient> {
        self.top(|period| &period.denied, most)
    }

    fn top(&self, sketch: fn(&Period) -> &Sketch, most: usize) -> Vec<HotClient> {
        self.begin_period(Instant::now());
        let current = self.period.load(Ordering::Relaxed);
        let mut listed = HashMap::<(Arc<str>, Box<[u8]>), Merged>::new();
        // What a client that no sketch lists may have.
        let mut unlisted = 0;
        for thread in self.threads.iter() {
            let mut counts = thread.counts();
            counts.rotate(current);
            counts.now.missed += thread.missed.swap(0, Ordering::Relaxed);
            for period in [&counts.before, &counts.now] {
                let sketch = sketch(period);
                let uncounted = sketch.too_long + period.missed;
                let absent = sketch.unlisted + uncounted + period.unseen();
                unlisted += absent;
                for (client, count) in sketch.clients.iter().zip(&sketch.counts) {
                    let name = (client.policy.clone(), client.key.clone());
                    let merged = listed.entry(name).or_default();
                    merged.count += count;
                    merged.error += client.inherited + uncounted + period.deviation(client.samples);
                    merged.absent += absent;
                }
            }
        }
        let mut top: Vec<_> = listed
            .into_iter()
            .map(|((policy, key), Merged { count, error, absent })| HotClient {
                policy,
                key,
                count,
                error: error + unlisted - absent,
            })
            .collect();
        top.sort_by(|one, other| other.count.cmp(&one.count).then_with(|| one.key.cmp(&other.key)));
        top.truncate(most);
        top
    }
}

/// The counts of a client in several sketches.
#[derive(Default)]
struct Merged {
    count: u64,
    error: u64,
    /// What it would have in these sketches if they did not list it.
    absent: u64,
}

impl ThreadCounts {
    fn count(&self, period: u64, policy: &Arc<str>, key: &[u8], allowed: bool) {
        // Do not wait for a reader.
        let Ok(mut counts) = self.counts.try_lock() else {
            self.missed.fetch_add(SAMPLED, Ordering::Relaxed);
            return;
        };
        counts.rotate(period);
        let is_sampled = counts.is_sampling;
        counts.now.add(policy, key, allowed, is_sampled);
        counts.is_sampling = counts.now.decisions >= EXACT;
        if counts.is_sampling {
            let skip = counts.random_skip();
            drop(counts);
            self.skip.store(skip, Ordering::Relaxed);
        }
    }

    fn counts(&self) -> MutexGuard<'_, PeriodCounts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PeriodCounts {
    /// Starts a new period if the current one is over.
    fn rotate(&mut self, period: u64) {
        if period <= self.period {
            return;
        }
        let last = std::mem::take(&mut self.now);
        self.before = if period == self.period + 1 { last } else { Period::default() };
        self.period = period;
    }

    /// Returns how many decisions to leave out: `SAMPLED - 1` on average, and at random, so that no order of requests
    /// escapes the sample.
    fn random_skip(&mut self) -> u32 {
        if self.random == 0 {
            self.random = self.now.all.hasher.hash_one(0) | 1;
        }
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        u32::try_from(self.random % (2 * SAMPLED - 1)).unwrap_or(0)
    }
}

impl Period {
    fn add(&mut self, policy: &Arc<str>, key: &[u8], allowed: bool, is_sampled: bool) {
        self.decisions += 1;
        self.is_sampled |= is_sampled;
        self.all.add(policy, key, is_sampled);
        if !allowed {
            self.denied.add(policy, key, is_sampled);
        }
    }

    /// Returns how many decisions of a client the sample may have left out entirely.
    const fn unseen(&self) -> u64 {
        if self.is_sampled { UNSEEN } else { 0 }
    }

    /// Returns how far the number of sampled decisions may be from the true number.
    const fn deviation(&self, samples: u64) -> u64 {
        // The standard deviation is below SAMPLED * sqrt(samples).
        self.unseen() + 4 * SAMPLED * (samples.isqrt() + (samples > 0) as u64)
    }
}

impl Sketch {
    fn add(&mut self, policy: &Arc<str>, key: &[u8], is_sampled: bool) {
        let (weight, samples) = if is_sampled { (SAMPLED, 1) } else { (1, 0) };
        let hash = self.hasher.hash_one((&**policy, key));
        let is_it = |place: &usize| {
            let client: &SketchClient = &self.clients[*place];
            *client.key == *key && client.policy == *policy
        };
        if let Some(&place) = self.places.find(hash, is_it) {
            self.counts[place] += weight;
            self.clients[place].samples += samples;
            return;
        }
        let is_full = self.clients.len() == CLIENTS || self.key_bytes + key.len() > KEY_BYTES;
        let place = match is_full {
            false => {
                // The new client may be one that was replaced earlier.
                let inherited = self.unlisted;
                self.counts.push(inherited);
                let (policy, key) = (policy.clone(), key.into());
                self.clients.push(SketchClient { policy, key, hash, inherited, samples });
                self.clients.len() - 1
            }
            true => match self.replace_least(policy, key, hash, samples) {
                Some(place) => place,
                None => {
                    self.too_long += weight;
                    return;
                }
            },
        };
        self.key_bytes += key.len();
        self.counts[place] += weight;
        self.places.insert_unique(hash, place, |place| self.clients[*place].hash);
    }

    /// Replaces the client with the lowest count, and returns its index; `None` if the new key is too long.
    fn replace_least(
        &mut self,
        policy: &Arc<str>,
        key: &[u8],
        hash: u64,
        samples: u64,
    ) -> Option<usize> {
        let least = self.counts.iter().copied().min()?;
        let place = self.counts.iter().position(|count| *count == least)?;
        let client = &mut self.clients[place];
        let key_bytes = self.key_bytes - client.key.len();
        if key_bytes + key.len() > KEY_BYTES {
            return None;
        }
        if let Ok(gone) = self.places.find_entry(client.hash, |one| *one == place) {
            gone.remove();
        }
        self.key_bytes = key_bytes;
        let inherited = least.max(self.unlisted);
        self.unlisted = inherited;
        self.counts[place] = inherited;
        let (policy, key) = (policy.clone(), key.into());
        *client = SketchClient { policy, key, hash, inherited, samples };
        Some(place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record_all(hot: &HotClients, decisions: impl IntoIterator<Item = (String, bool)>) {
        let policy = Arc::from("api");
        for (key, allowed) in decisions {
            hot.record(&policy, key.as_bytes(), allowed);
        }
    }

    fn find(list: &[HotClient], key: &str) -> (u64, u64) {
        let found = list.iter().find(|client| *client.key == *key.as_bytes());
        found.map_or_else(|| panic!("{key} is not listed"), |client| (client.count, client.error))
    }

    #[test]
    fn small_counts_are_exact_from_all_threads() {
        let hot = HotClients::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    record_all(
                        &hot,
                        (0..200).flat_map(|client| {
                            (0..=client % 20).map(move |time| (client.to_string(), time < 5))
                        }),
                    );
                });
            }
        });
        let (busiest, denied) = (hot.busiest(CLIENTS), hot.most_denied(CLIENTS));
        assert_eq!((busiest.len(), denied.len()), (200, 150));
        for client in 0..200 {
            assert_eq!(find(&busiest, &client.to_string()), (4 * (client % 20 + 1), 0));
            if client % 20 >= 5 {
                assert_eq!(find(&denied, &client.to_string()), (4 * (client % 20 - 4), 0));
            }
        }
    }

    /// Clients with known counts among many others: each count is right to within its error.
    #[test]
    fn a_busy_server_lists_hot_clients_with_an_error_that_holds() {
        let hot = HotClients::default();
        let rounds = 300_000_u64;
        record_all(
            &hot,
            (0..rounds).flat_map(|round| {
                let greedy = (0..round % 3).map(|_| ("greedy".to_owned(), false));
                let steady = (round % 10 == 0).then(|| ("steady".to_owned(), true));
                greedy.chain(steady).chain([(format!("client {round}"), true)])
            }),
        );
        let (busiest, denied) = (hot.busiest(3), hot.most_denied(3));
        assert_eq!((&*busiest[0].key, &*denied[0].key), (&b"greedy"[..], &b"greedy"[..]));
        for (list, key, expected) in [
            (&busiest, "greedy", rounds),
            (&denied, "greedy", rounds),
            (&busiest, "steady", rounds / 10),
        ] {
            let (count, error) = find(list, key);
            assert!(count.abs_diff(expected) <= error, "{key}: {count} ± {error} of {expected}");
            assert!((1..expected / 3).contains(&error), "{key}: {count} ± {error}");
        }
    }

    #[test]
    fn a_replaced_client_is_listed_with_its_possible_count() {
        let hot = HotClients::default();
        let invented =
            |name: &'static str| (0..3 * CLIENTS).map(move |key| (format!("{name} {key}"), true));
        record_all(&hot, [("alice".to_owned(), true)]);
        record_all(&hot, invented("first"));
        record_all(&hot, (0..50).map(|_| ("alice".to_owned(), true)));
        let (count, error) = find(&hot.busiest(1), "alice");
        assert!(error > 0 && count.abs_diff(51) <= error, "{count} ± {error}");
    }

    /// One thread lists a client, and another has replaced it: the merged error covers both.
    #[test]
    fn clients_replaced_by_one_thread_count_as_an_error_of_the_merged_list() {
        let hot = HotClients::default();
        let alice = |times| (0..times).map(|_| ("alice".to_owned(), true));
        record_all(&hot, alice(40));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                record_all(&hot, alice(3));
                record_all(&hot, (0..20 * CLIENTS).map(|key| (key.to_string(), true)));
            });
        });
        let (count, error) = find(&hot.busiest(CLIENTS), "alice");
        assert!(error >= 3 && count.abs_diff(43) <= error, "{count} ± {error}");
    }

    #[test]
    fn long_keys_take_bounded_memory_and_are_an_error_of_the_others() {
        let hot = HotClients::default();
        record_all(&hot, (0..1000).map(|key| (format!("{key:04000}"), true)));
        record_all(&hot, [("alice".to_owned(), true)]);
        for thread in hot.threads.iter() {
            let counts = thread.counts();
            let sketch = &counts.now.all;
            let bytes: usize = sketch.clients.iter().map(|client| client.key.len()).sum();
            assert_eq!(bytes, sketch.key_bytes);
            assert!(bytes <= KEY_BYTES && sketch.places.len() == sketch.clients.len());
        }
        let (count, error) = find(&hot.busiest(CLIENTS), "alice");
        assert!(count.abs_diff(1) <= error, "{count} ± {error}");
    }

    #[test]
    fn the_counts_of_two_periods_are_kept() {
        let hot = HotClients::default();
        let alice = || record_all(&hot, [("alice".to_owned(), true)]);
        alice();
        hot.begin_period(hot.created + PERIOD);
        alice();
        assert_eq!(find(&hot.busiest(1), "alice"), (2, 0));
        hot.begin_period(hot.created + 2 * PERIOD);
        assert_eq!(find(&hot.busiest(1), "alice"), (1, 0));
        hot.begin_period(hot.created + 4 * PERIOD);
        assert!(hot.busiest(1).is_empty());
    }
}
