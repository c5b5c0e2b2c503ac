//! Many threads on few keys: to the request, never one too many and never one too few.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Barrier;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::clock::{Clock as _, ManualClock, SystemClock};
use tallygate::observer::{Event, Observer};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::{Ask, Cost, Kind, Policy, RateLimiter, Tick, Ticks};

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(policy: Policy, max_keys: usize) -> Limiter {
    let store = PolicyStore::new(&policy, Capacity::of(max_keys), ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

/// Runs `work` in so many threads at once, and adds up what they return.
fn together(threads: usize, work: impl Fn(usize) -> u64 + Sync) -> u64 {
    let barrier = Barrier::new(threads);
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads)
            .map(|thread| {
                let (barrier, work) = (&barrier, &work);
                scope.spawn(move || {
                    barrier.wait();
                    work(thread)
                })
            })
            .collect();
        running.into_iter().map(|thread| thread.join().expect("no panic")).sum()
    })
}

/// Fault C4.
#[test]
fn a_hundred_threads_on_one_key_get_the_burst_exactly() {
    for kind in Kind::ALL {
        let limiter = limiter(Policy::of(kind, 10_000).per_hour().build().unwrap(), 10);
        let admitted = together(100, |_| {
            (0..500).filter(|_| limiter.is_allowed(Ask::new("hot").at(Tick(0))).unwrap()).count()
                as u64
        });
        assert_eq!(admitted, 10_000, "{kind}");
    }
}

/// Time goes on while they ask, each by its own reading of a shared clock, so out of order.
///
/// Faults C4, B4.
#[test]
fn the_allowed_units_are_exactly_burst_plus_rate_times_duration() {
    // A window that no thread is late by: later than that is a clock set back.
    let (limit, window, burst) = (700_000, 1_000_000, 50);
    for kind in &Kind::ALL[..3] {
        let policy = Policy::of(*kind, limit).per(Ticks(window)).burst(burst).build().unwrap();
        let limiter = limiter(policy, 10);
        let clock = AtomicI64::new(0);
        let admitted = together(100, |_| {
            let mut admitted = 0;
            // Often enough that the threads meet, also on a machine with two processors.
            for _ in 0..5_000 {
                let now = Tick(clock.fetch_add(1, Ordering::Relaxed) / 8);
                // Check until a denial, so that no earned unit is left.
                while limiter.is_allowed(Ask::new("hot").at(now)).unwrap() {
                    admitted += 1;
                }
            }
            admitted
        });
        let last = clock.load(Ordering::Relaxed) / 8;
        let mut rest = 0;
        while limiter.is_allowed(Ask::new("hot").at(Tick(last))).unwrap() {
            rest += 1;
        }
        let earned = last.unsigned_abs() * limit / window;
        assert_eq!(admitted + rest, burst + earned, "{kind}");
    }
}

/// Fault C2.
#[test]
fn many_keys_are_each_made_once() {
    let limiter = limiter(Policy::token_bucket(3).per_hour().build().unwrap(), 10_000);
    let keys: Vec<String> = (0..5_000).map(|number| format!("client-{number}")).collect();
    let admitted = together(16, |thread| {
        let order = keys.iter().cycle().skip(thread * 311).take(keys.len());
        order.filter(|key| limiter.is_allowed(Ask::new(key).at(Tick(0))).unwrap()).count() as u64
    });
    assert_eq!(admitted, 3 * 5_000);
    assert_eq!(limiter.store().usage().keys, 5_000);
}

/// Keys come and go and are swept while others hold theirs: no charge is lost.
///
/// Fault C3.
#[test]
fn sweeping_loses_no_charge() {
    let policy = Policy::token_bucket(10).per(Ticks(1_000)).build().unwrap();
    let limiter = limiter(policy, 1_000);
    let clock = AtomicI64::new(0);
    let churn = 200_000;
    let admitted = together(8, |thread| {
        if thread == 0 {
            // One client that asks for all it can get.
            let mut admitted = 0;
            while clock.load(Ordering::Relaxed) < churn {
                let now = Tick(clock.load(Ordering::Relaxed));
                admitted += u64::from(limiter.is_allowed(Ask::new("steady").at(now)).unwrap());
            }
            return admitted;
        }
        loop {
            let now = clock.fetch_add(1, Ordering::Relaxed);
            if now >= churn {
                return 0;
            }
            limiter.is_allowed(Ask::new(&now.to_le_bytes()).at(Tick(now))).unwrap();
        }
    });
    assert!(admitted <= 10 + churn.unsigned_abs() * 10 / 1_000, "{admitted}");
    let usage = limiter.store().usage();
    assert!(usage.swept > 100_000 && usage.keys <= 1_000, "{usage:?}");
}

/// By the real clock: what a drained bucket earns is its rate, no more and no less.
#[test]
fn a_drained_bucket_earns_its_average_rate_in_real_time() {
    // Room for five seconds' worth, so that a thread that is not run for a while loses nothing.
    let policy = Policy::token_bucket(1_000).per_second().burst(5_000).build().unwrap();
    let clock = SystemClock::new();
    let store = PolicyStore::new(&policy, Capacity::of(10), &clock);
    let limiter = RateLimiter::with_store(policy, store);
    let before = clock.now();
    assert!(limiter.check(Ask::new("a").cost(5_000)).unwrap().allowed);
    let drained = clock.now();
    let mut admitted = 0;
    let mut last = drained;
    while last.since(drained) < Ticks::from_duration(Duration::from_millis(300)) {
        last = clock.now();
        while limiter.is_allowed("a").unwrap() {
            admitted += 1;
        }
    }
    let end = clock.now();
    let earned = |span: Ticks| span.0 * 1_000 / 1_000_000_000;
    assert!(admitted <= earned(end.since(before)), "{admitted} in {}", end.since(before));
    assert!(admitted >= earned(last.since(drained)), "{admitted} in {}", last.since(drained));
}

struct Panics(AtomicU64);

impl Observer for Panics {
    fn decided(&self, event: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
        assert!(event.key != b"bad", "an observer with a bug");
    }
}

/// Fault C5.
#[test]
fn a_panicking_observer_affects_no_decision() {
    let observer = Panics(AtomicU64::new(0));
    let limiter =
        limiter(Policy::token_bucket(100).per_hour().build().unwrap(), 10).observed_by(&observer);
    let admitted = together(4, |_| {
        let keys = [&b"bad"[..], b"good"].into_iter().cycle().take(100);
        keys.filter(|key| limiter.is_allowed(Ask::new(key).at(Tick(0))).unwrap()).count() as u64
    });
    assert_eq!(admitted, 200);
    let batch: Vec<bool> =
        limiter.check_many(&["bad", "good"].map(|key| Ask::new(key).at(Tick(0)))).unwrap();
    assert_eq!(batch, [false, false], "both keys were served to the last");
    assert_eq!(observer.0.load(Ordering::Relaxed), 402);
}

/// An algorithm of a user's own, with a bug: the key it holds is let go.
///
/// Fault C5.
#[test]
fn a_panicking_algorithm_lets_go_of_its_key() {
    let store = MemoryStore::new(Capacity::of(10), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::in_store("buggy", Buggy::default(), store);
    assert!(limiter.is_allowed("a").unwrap());
    let panicked = catch_unwind(AssertUnwindSafe(|| limiter.check(Ask::new("a").cost(13))));
    assert!(panicked.is_err());
    assert!(limiter.is_allowed("a").unwrap(), "no thread holds it");
}

/// A full bucket makes the table ask whether its keys are fresh, which panics now and then here.
///
/// Fault K12.
#[test]
fn a_panic_in_an_algorithm_leaks_no_count_of_keys() {
    // Twice as many keys as are placed, so that none is looked for to be swept afterwards.
    let store = MemoryStore::new(Capacity::of(2000), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::in_store("buggy", Buggy::default(), store);
    let place = |key: usize| {
        let placed = catch_unwind(AssertUnwindSafe(|| limiter.is_allowed(&key.to_be_bytes())));
        usize::from(placed.is_ok())
    };
    let placed: usize = (0..900).map(place).sum();
    assert!((1..900).contains(&placed), "some panicked: {placed} of 900 did not");
    assert_eq!(limiter.store().usage().keys, placed);
}

/// Allows every cost but 13, on which it panics, as it does on every seventh question whether a key is fresh.
#[derive(Default)]
struct Buggy {
    questions: AtomicU64,
}

impl Algorithm for Buggy {
    type State = ();

    fn capacity(&self) -> Cost {
        1
    }
    fn fresh(&self, _: Tick) {}
    fn last_change(&self, (): &()) -> Tick {
        Tick(i64::MIN)
    }
    fn clock_was_set_back(&self, (): &(), _: Tick) -> bool {
        false
    }
    fn rebase(&self, (): &mut (), _: Tick) {}
    fn fit(&self, (): &(), _: Tick, cost: Cost) -> Fit {
        assert_ne!(cost, 13, "a bug");
        Fit::Now
    }
    fn charge(&self, (): &mut (), _: Tick, _: i128) -> u128 {
        0
    }
    fn facts(&self, (): &(), _: Tick, _: Option<Cost>) -> Facts {
        Facts::all_of(1)
    }
    fn fresh_at(&self, (): &()) -> Option<Tick> {
        None
    }
    fn is_fresh(&self, (): &(), _: Tick) -> bool {
        let questions = self.questions.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(!questions.is_multiple_of(7), "a bug");
        false
    }
    fn used(&self, (): &(), _: Tick) -> Used {
        Used::NOTHING
    }
    fn with_used(&self, _: Used, _: Tick) {}
    fn encode(&self, (): &(), _: &mut Vec<u8>) {}
    fn decode(&self, _: &[u8]) -> Result<(), DecodeError> {
        Ok(())
    }
}
