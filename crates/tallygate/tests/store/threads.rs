//! Many threads on few keys: exactly the quota is allowed, not one request more or less.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Duration;

use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::clock::{Clock, ManualClock, SystemClock};
use tallygate::observer::{Event, Observer};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::{Ask, Cost, Decision, Kind, Policy, RateLimiter, Tick, Ticks, check_all};

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(policy: Policy, max_keys: usize) -> Limiter {
    let store = PolicyStore::new(&policy, Capacity::of(max_keys), ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

/// Runs `work` in a number of threads at once, and adds up what they return.
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
        let allowed = together(100, |_| {
            (0..500).filter(|_| limiter.is_allowed(Ask::new("hot").at(Tick(0))).unwrap()).count()
                as u64
        });
        assert_eq!(allowed, 10_000, "{kind}");
    }
}

/// Time advances while they check, each by its own reading of a shared clock, so out of order.
///
/// Faults C4, B4.
#[test]
fn the_allowed_units_are_exactly_burst_plus_rate_times_duration() {
    // A window that is longer than any thread is late, because a longer delay would count as a clock set back.
    let (limit, window, burst) = (700_000, 1_000_000, 50);
    for kind in &Kind::ALL[..3] {
        let policy = Policy::of(*kind, limit).per(Ticks(window)).burst(burst).build().unwrap();
        let limiter = limiter(policy, 10);
        let clock = AtomicI64::new(0);
        let allowed = together(100, |_| {
            let mut allowed = 0;
            // Often enough that the threads meet, also on a machine with two processors.
            for _ in 0..5_000 {
                let now = Tick(clock.fetch_add(1, Ordering::Relaxed) / 8);
                // Check until a denial, so that no earned unit is left.
                while limiter.is_allowed(Ask::new("hot").at(now)).unwrap() {
                    allowed += 1;
                }
            }
            allowed
        });
        let last = clock.load(Ordering::Relaxed) / 8;
        let mut rest = 0;
        while limiter.is_allowed(Ask::new("hot").at(Tick(last))).unwrap() {
            rest += 1;
        }
        let earned = last.unsigned_abs() * limit / window;
        assert_eq!(allowed + rest, burst + earned, "{kind}");
    }
}

/// Fault C2.
#[test]
fn many_keys_are_each_made_once() {
    let limiter = limiter(Policy::token_bucket(3).per_hour().build().unwrap(), 10_000);
    let keys: Vec<String> = (0..5_000).map(|number| format!("client-{number}")).collect();
    let allowed = together(16, |thread| {
        let order = keys.iter().cycle().skip(thread * 311).take(keys.len());
        order.filter(|key| limiter.is_allowed(Ask::new(key).at(Tick(0))).unwrap()).count() as u64
    });
    assert_eq!(allowed, 3 * 5_000);
    assert_eq!(limiter.store().usage().keys, 5_000);
}

/// A clock that the threads themselves advance, when they have used up what there is. So no time passes without requests,
/// however the system runs the threads.
struct DrivenClock(AtomicI64);

impl Clock for DrivenClock {
    fn now(&self) -> Tick {
        Tick(self.0.load(Ordering::SeqCst))
    }
}

type Driven = RateLimiter<Policy, PolicyStore<Arc<DrivenClock>>>;

/// Asks for a key, and returns how many requests were allowed and how many were denied.
type Verb = fn(&Driven, usize, Ask<'_>) -> (u64, u64);

const VERBS: [(&str, Verb); 5] = [
    ("bool", |limiter, _, ask| counts([limiter.is_allowed(ask).expect("a decision")])),
    ("decision", |limiter, _, ask| counts([limiter.check(ask).expect("a decision").allowed])),
    ("batch of bool", |limiter, _, ask| {
        counts(limiter.check_many::<bool, _>(&[ask; 4]).expect("a decision"))
    }),
    ("batch of decisions", |limiter, _, ask| {
        let decisions = limiter.check_many::<Decision, _>(&[ask; 4]).expect("a decision");
        counts(decisions.into_iter().map(|decision| decision.allowed))
    }),
    ("two keys", |limiter, thread, ask| {
        let mut other = ask;
        other.key = b"other";
        let [one, other] = [ask, other].map(|ask| limiter.joint(ask).expect("a part"));
        let parts = if thread % 2 == 0 { [one, other] } else { [other, one] };
        counts([check_all(parts).expect("a decision").decision.allowed])
    }),
];

fn counts(allowed: impl IntoIterator<Item = bool>) -> (u64, u64) {
    allowed.into_iter().fold((0, 0), |(yes, no), allowed| match allowed {
        true => (yes + 1, no),
        false => (yes, no + 1),
    })
}

/// More threads than any machine has processors, in a tight loop on one key. A quarter of them bring times that are
/// windows old, and none of them may earn anything twice. A denial by the present time proves that the quota is used up,
/// and only then the clock goes on. So the threads get exactly what one thread gets.
///
/// Fault K1.
#[test]
fn with_256_threads_a_key_gets_its_whole_bound_and_no_more() {
    const LIMIT: u64 = 100;
    const WINDOWS: u64 = 4;
    const STEPS: u64 = 64;
    for kind in Kind::ALL {
        for window in [1_000_000, 1_000_000_000] {
            let limit = |name| Policy::of(kind, LIMIT).per(Ticks(window)).named(name);
            let single = limit("single").build().unwrap();
            let several = Policy::all_of("both", [limit("a"), limit("b")]).unwrap();
            let all = VERBS.map(|(_, verb)| verb);
            let each = VERBS.map(|(name, verb)| (name, &single, vec![verb]));
            let mixed = ("all verbs, several limits", &several, all.to_vec());
            for (name, policy, verbs) in each.into_iter().chain([mixed]) {
                let step = (window / STEPS).cast_signed();
                // From within a window to the last step of a window.
                let start = Tick(window.cast_signed() * 1000 + 5 * step);
                let end = Tick((window * (1000 + WINDOWS)).cast_signed() - step);
                let clock = Arc::new(DrivenClock(AtomicI64::new(start.0)));
                // The clock never passes the end: a thread that is late would be allowed units of the time after it.
                let is_over = AtomicBool::new(false);
                let store = PolicyStore::new(policy, Capacity::of(10), clock.clone());
                let limiter = RateLimiter::with_store(policy.clone(), store);
                // The first request is in time: the bound counts from its time.
                let (first, _) = verbs[0](&limiter, 0, Ask::new("a"));
                let allowed = first
                    + together(256, |thread| {
                        let verb = verbs[thread % verbs.len()];
                        let late =
                            (thread % 4 == 3).then(|| Ticks((thread as u64 % 5 + 1) * window));
                        let mut allowed = 0;
                        while !is_over.load(Ordering::SeqCst) {
                            let now = clock.now();
                            let ask = match late {
                                Some(late) => Ask::new("a").at(Tick(now.0 - late.0.cast_signed())),
                                None => Ask::new("a"),
                            };
                            let (yes, no) = verb(&limiter, thread, ask);
                            allowed += yes;
                            if no == 0 || late.is_some() {
                                continue;
                            }
                            if now == end {
                                is_over.store(true, Ordering::SeqCst);
                            }
                            // Does nothing if time has passed since `now`: then the denial proves nothing.
                            let next = (now.0 + step).min(end.0);
                            let _ = clock.0.compare_exchange(
                                now.0,
                                next,
                                Ordering::SeqCst,
                                Ordering::SeqCst,
                            );
                        }
                        allowed
                    });
                let mut state = policy.initial(start);
                let mut alone = 0;
                for now in (start.0..=end.0).step_by(usize::try_from(step).unwrap()) {
                    while policy.decide::<bool>(&mut state, Tick(now), 1) {
                        alone += 1;
                    }
                }
                let elapsed = end.since(start).0;
                let bound = match kind {
                    Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
                        LIMIT + elapsed * LIMIT / window
                    }
                    _ => LIMIT * WINDOWS,
                };
                let case = format!("{kind} per {window}, {name}: {allowed} of {bound}");
                assert_eq!(allowed, alone, "{case}");
                assert!(allowed <= bound && allowed * 100 >= bound * 95, "{case}");
            }
        }
    }
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
    let allowed = together(8, |thread| {
        if thread == 0 {
            // One client that uses all units that it can get.
            let mut allowed = 0;
            while clock.load(Ordering::Relaxed) < churn {
                let now = Tick(clock.load(Ordering::Relaxed));
                allowed += u64::from(limiter.is_allowed(Ask::new("steady").at(now)).unwrap());
            }
            return allowed;
        }
        loop {
            let now = clock.fetch_add(1, Ordering::Relaxed);
            if now >= churn {
                return 0;
            }
            limiter.is_allowed(Ask::new(&now.to_le_bytes()).at(Tick(now))).unwrap();
        }
    });
    assert!(allowed <= 10 + churn.unsigned_abs() * 10 / 1_000, "{allowed}");
    let usage = limiter.store().usage();
    assert!(usage.swept > 100_000 && usage.keys <= 1_000, "{usage:?}");
}

/// By the real clock: a drained bucket earns exactly its rate.
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
    let mut allowed = 0;
    let mut last = drained;
    while last.since(drained) < Ticks::from_duration(Duration::from_millis(300)) {
        last = clock.now();
        while limiter.is_allowed("a").unwrap() {
            allowed += 1;
        }
    }
    let end = clock.now();
    let earned = |span: Ticks| span.0 * 1_000 / 1_000_000_000;
    assert!(allowed <= earned(end.since(before)), "{allowed} in {}", end.since(before));
    assert!(allowed >= earned(last.since(drained)), "{allowed} in {}", last.since(drained));
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
    let allowed = together(4, |_| {
        let keys = [&b"bad"[..], b"good"].into_iter().cycle().take(100);
        keys.filter(|key| limiter.is_allowed(Ask::new(key).at(Tick(0))).unwrap()).count() as u64
    });
    assert_eq!(allowed, 200);
    let batch: Vec<bool> =
        limiter.check_many(&["bad", "good"].map(|key| Ask::new(key).at(Tick(0)))).unwrap();
    assert_eq!(batch, [false, false], "both keys were served to the last");
    assert_eq!(observer.0.load(Ordering::Relaxed), 402);
}

/// An algorithm of a user that panics: the lock of its key is released.
///
/// Fault C5.
#[test]
fn a_panicking_algorithm_releases_the_lock_of_its_key() {
    let store = MemoryStore::new(Capacity::of(10), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::in_store("buggy", PanickingAlgorithm::default(), store);
    assert!(limiter.is_allowed("a").unwrap());
    let panicked = catch_unwind(AssertUnwindSafe(|| limiter.check(Ask::new("a").cost(13))));
    assert!(panicked.is_err());
    assert!(limiter.is_allowed("a").unwrap(), "no thread holds it");
}

/// If a bucket of the table is full, the table checks whether its keys are fresh, which sometimes panics here.
///
/// Fault K12.
#[test]
fn a_panic_in_an_algorithm_leaks_no_count_of_keys() {
    // The capacity is twice the number of keys, so that no key is swept afterwards.
    let store = MemoryStore::new(Capacity::of(2000), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::in_store("buggy", PanickingAlgorithm::default(), store);
    let place = |key: usize| {
        let placed = catch_unwind(AssertUnwindSafe(|| limiter.is_allowed(&key.to_be_bytes())));
        usize::from(placed.is_ok())
    };
    let placed: usize = (0..900).map(place).sum();
    assert!((1..900).contains(&placed), "some panicked: {placed} of 900 did not");
    assert_eq!(limiter.store().usage().keys, placed);
}

/// Allows every cost except 13, on which it panics. It also panics on every seventh call of `is_fresh`.
#[derive(Default)]
struct PanickingAlgorithm {
    freshness_checks: AtomicU64,
}

impl Algorithm for PanickingAlgorithm {
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
        let checks = self.freshness_checks.fetch_add(1, Ordering::Relaxed) + 1;
        assert!(!checks.is_multiple_of(7), "a bug");
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
