//! A caller that read the clock before it got the lock may be late by any time, and earns nothing twice.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tallygate::clock::{Alarm as _, Clock, ManualClock, SystemClock};
use tallygate::policy::LimitBuilder;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Decision, Kind, Policy, RateLimiter, Tick, Ticks, Tiers, check_all};

const LIMIT: u64 = 10;
const WINDOW: Ticks = Ticks(1000);

fn policy(kind: Kind) -> Policy {
    builder(kind).build().expect("a valid policy")
}

fn builder(kind: Kind) -> LimitBuilder {
    let make = match kind {
        Kind::TokenBucket => Policy::token_bucket,
        Kind::Gcra => Policy::gcra,
        Kind::LeakyBucket => Policy::leaky_bucket,
        Kind::FixedWindow => Policy::fixed_window,
        Kind::SlidingWindowLog => Policy::sliding_window_log,
        Kind::SlidingWindowCounter => Policy::sliding_window_counter,
    };
    make(LIMIT).per(WINDOW)
}

#[test]
fn alternating_early_and_late_callers_get_one_quota() {
    for kind in Kind::ALL {
        let limiter = RateLimiter::new(policy(kind));
        let tiered = RateLimiter::tiered("tiered", Tiers::new(policy(kind)));
        let (mut single, mut several, mut joint, mut under_tiers) = (0, 0, 0, 0);
        for step in 0..1000 {
            let now = if step % 2 == 0 { Tick(10_000) } else { Tick(8_999) };
            single += u64::from(limiter.is_allowed(Ask::new("bool").at(now)).expect("a decision"));
            let many: Vec<Decision> =
                limiter.check_many(&[Ask::new("many").at(now)]).expect("decisions");
            several += u64::from(many[0].allowed);
            let both = check_all([limiter.joint(Ask::new("joint").at(now)).expect("a part")])
                .expect("a decision");
            joint += u64::from(both.decision.allowed);
            under_tiers +=
                u64::from(tiered.check(Ask::new("tier").at(now)).expect("a decision").allowed);
        }
        assert_eq!((single, several, joint, under_tiers), (LIMIT, LIMIT, LIMIT, LIMIT), "{kind}");
    }
}

/// A late caller is the first one under another tier. That tier takes over the usage at the last change, not at the
/// time that the caller read.
///
/// Fault K2.
#[test]
fn a_late_caller_that_switches_tiers_earns_nothing() {
    for kind in Kind::ALL {
        let fast = Policy::token_bucket(LIMIT).per(Ticks(LIMIT)).build().expect("valid");
        let limiter = RateLimiter::tiered("tiered", Tiers::new(policy(kind)).tier("fast", fast));
        let fast = Ask::new("a").tier("fast");
        let all = Ask::new("a").cost(LIMIT).at(Tick(10_500));
        assert!(limiter.is_allowed(all).expect("a decision"), "{kind}");
        assert!(!limiter.is_allowed(fast.at(Tick(10_000))).expect("a decision"), "{kind}");
        assert!(!limiter.is_allowed(fast.at(Tick(10_500))).expect("a decision"), "{kind}");
        assert!(limiter.is_allowed(fast.at(Tick(10_501))).expect("a decision"), "{kind}");
    }
}

/// A clock that returns a reading from five windows ago two of three times, like a thread that was descheduled between
/// the clock and the lock. It never reports a set-back.
struct StaleClock<'a> {
    clock: &'a ManualClock,
    readings: AtomicU64,
}

impl Clock for StaleClock<'_> {
    fn now(&self) -> Tick {
        let late = self.readings.fetch_add(1, Ordering::Relaxed) % 3 > 0;
        let now = self.clock.now().0;
        Tick(if late { now - 5 * WINDOW.0.cast_signed() } else { now })
    }
}

/// The most that a limit allows from the start of an aligned window to `windows` windows later, both included.
fn bound(windows: u64) -> u64 {
    LIMIT * (windows + 1)
}

#[test]
fn stale_readings_earn_nothing_twice_in_any_verb() {
    const WINDOWS: u64 = 10;
    let several = |kind| {
        Policy::all_of("both", [builder(kind).named("a"), builder(kind).named("b")]).expect("valid")
    };
    for kind in Kind::ALL {
        for policy in [policy(kind), several(kind)] {
            let clock = ManualClock::new(Tick(1_000_000));
            let stale = StaleClock { clock: &clock, readings: AtomicU64::new(0) };
            let store = PolicyStore::new(&policy, Capacity::of(100), stale);
            let limiter = RateLimiter::with_store(policy, store);
            // The first call of each key is not late, because the bound counts from its reading.
            let first = |key| u64::from(limiter.is_allowed(Ask::new(key).at(clock.now())).unwrap());
            let mut allowed = ["bool", "all", "many", "joint"].map(first);
            for tick in 0..=WINDOWS * WINDOW.0 {
                for _ in 0..3 {
                    allowed[0] += u64::from(limiter.is_allowed("bool").expect("a decision"));
                    allowed[1] += u64::from(limiter.check("all").expect("a decision").allowed);
                    let many: Vec<bool> = limiter.check_many(&["many"]).expect("decisions");
                    allowed[2] += u64::from(many[0]);
                    let joint = check_all([limiter.joint("joint").expect("a part")]);
                    allowed[3] += u64::from(joint.expect("a decision").decision.allowed);
                }
                if tick < WINDOWS * WINDOW.0 {
                    clock.advance(Ticks(1));
                }
            }
            for (verb, allowed) in ["bool", "decision", "many", "joint"].into_iter().zip(allowed) {
                assert!(allowed <= bound(WINDOWS), "{kind}, {verb}: {allowed}");
                assert!(allowed * 20 >= bound(WINDOWS - 1) * 19, "{kind}, {verb}: {allowed}");
            }
        }
    }
}

/// More threads than any machine has processors, in a tight loop on one key: many are descheduled between the
/// clock and the lock for longer than a window.
///
/// Fault K1.
#[test]
fn with_256_threads_a_key_gets_no_more_than_the_bound() {
    const LIMIT: u64 = 100;
    const LASTS: u64 = 60_000_000;
    for window in [1_000_000_u64, 10_000_000] {
        for kind in Kind::ALL {
            let policy = Policy::of(kind, LIMIT).per(Ticks(window)).build().expect("valid");
            let limiter = RateLimiter::new(policy);
            let start = limiter.now();
            let until = start.after(Ticks(LASTS)).expect("a time");
            let run = |thread: usize| {
                let mut allowed = 0_u64;
                while limiter.now() < until {
                    for _ in 0..20 {
                        allowed += u64::from(match thread % 2 {
                            0 => limiter.is_allowed("a").expect("a decision"),
                            _ => limiter.check("a").expect("a decision").allowed,
                        });
                    }
                }
                allowed
            };
            let allowed: u64 = std::thread::scope(|scope| {
                let threads: Vec<_> = (0..256).map(|i| scope.spawn(move || run(i))).collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).sum()
            });
            let (from, to) = (start.0.cast_unsigned(), limiter.now().0.cast_unsigned());
            let most = match kind {
                Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
                    LIMIT + (to - from) * LIMIT / window
                }
                Kind::FixedWindow | Kind::SlidingWindowCounter => {
                    LIMIT * (to / window - from / window + 1)
                }
                Kind::SlidingWindowLog => LIMIT * ((to - from) / window + 1),
            };
            assert!(allowed <= most, "{kind} per {window} ns: {allowed} of {most}");
        }
    }
}

/// A state that has used nothing has a last change, too: the time before it was earned already.
#[test]
fn a_refund_to_fresh_gives_a_late_check_no_time_to_earn() {
    for kind in Kind::ALL {
        let limiter = RateLimiter::new(policy(kind));
        let all =
            |now| limiter.check(Ask::new("a").cost(LIMIT).at(now)).expect("a decision").allowed;
        assert!(all(Tick(10_500)), "{kind}");
        let fresh = limiter.refund(Ask::new("a").cost(LIMIT).at(Tick(10_500))).expect("a decision");
        assert_eq!(fresh.remaining, LIMIT, "{kind}");
        assert!(all(Tick(8_000)), "{kind}: the late caller has the one quota");
        assert!(!all(Tick(10_500)), "{kind}: and nothing was earned since");
    }
}

/// The same if a thread, which is also late, has dropped the fresh state in between.
#[test]
fn a_fresh_state_that_a_late_caller_drops_leaves_its_time_behind() {
    let limiter = {
        let store =
            PolicyStore::new(&policy(Kind::TokenBucket), Capacity::of(1), SystemClock::new());
        RateLimiter::with_store(policy(Kind::TokenBucket), store)
    };
    let all =
        |key, now| limiter.check(Ask::new(key).cost(LIMIT).at(now)).expect("a decision").allowed;
    assert!(all("a", Tick(10_500)));
    assert_eq!(
        limiter.refund(Ask::new("a").cost(LIMIT).at(Tick(10_500))).expect("a decision").remaining,
        LIMIT
    );
    assert!(all("b", Tick(8_000)), "it takes the place of the fresh key");
    assert_eq!(
        limiter.refund(Ask::new("b").cost(LIMIT).at(Tick(8_000))).expect("a decision").remaining,
        LIMIT
    );
    assert!(all("a", Tick(8_000)));
    assert!(!all("a", Tick(10_500)), "nothing was earned since");
}

/// If a clock reports that it was set back, all states are moved, also those of keys that were not checked since, and
/// the times at which keys were dropped do not lock new keys out.
///
/// Fault K7.
#[test]
fn a_reported_set_back_locks_no_key_out() {
    for kind in Kind::ALL {
        let clock = ManualClock::new(Tick(1_000_000));
        let store = PolicyStore::new(&policy(kind), Capacity::of(64), &clock);
        let limiter = RateLimiter::with_store(policy(kind), store);
        let allowed = |key: u32| {
            (0..=LIMIT).filter(|_| limiter.is_allowed(&key.to_le_bytes()).unwrap()).count() as u64
        };
        for key in 0..1000 {
            assert_eq!(allowed(key), LIMIT, "{kind}");
        }
        clock.set(Tick(500_000));
        // Two windows after the first call that saw the set-back, everything is earned back.
        assert!(limiter.peek("seen").is_ok() && limiter.is_allowed("seen").unwrap());
        assert!((0..1000).map(allowed).sum::<u64>() > 0, "{kind}: new keys are served at once");
        clock.advance(Ticks(2 * WINDOW.0));
        for key in 2000..3000 {
            assert_eq!(allowed(key), LIMIT, "{kind}: key {key}");
        }
        assert_eq!(allowed(2999), 0, "{kind}: it has its quota once");
        clock.advance(Ticks(2 * WINDOW.0));
        assert_eq!(allowed(2999), LIMIT, "{kind}: and earns it back from the present time");
    }
}

/// A clock that was set back clears no usage, whichever operation notices it first.
#[test]
fn a_reported_set_back_clears_no_usage() {
    type Verb = fn(&RateLimiter<Policy, PolicyStore<&ManualClock>>);
    let verbs: [(&str, Verb); 5] = [
        ("check", |limiter| assert!(!limiter.is_allowed("a").unwrap())),
        ("peek", |limiter| assert!(!limiter.peek("a").unwrap().allowed)),
        ("many", |limiter| assert_eq!(limiter.check_many::<bool, _>(&["a"]).unwrap(), [false])),
        ("joint", |limiter| {
            assert!(!check_all([limiter.joint("a").unwrap()]).unwrap().decision.allowed);
        }),
        ("another key", |limiter| assert!(limiter.is_allowed("b").unwrap())),
    ];
    for kind in Kind::ALL {
        for (verb, run) in verbs {
            let clock = ManualClock::new(Tick(1_000_000));
            let store = PolicyStore::new(&policy(kind), Capacity::of(10), &clock);
            let limiter = RateLimiter::with_store(policy(kind), store);
            assert!(limiter.check(Ask::new("a").cost(LIMIT)).unwrap().allowed);
            clock.set(Tick(500_000));
            run(&limiter);
            let answer = limiter.check(Ask::new("a").cost(LIMIT)).unwrap();
            assert!(!answer.allowed, "{kind}, {verb}");
            let wait = answer.retry_after.expect("it fits some day");
            assert!(wait <= Ticks(2 * WINDOW.0), "{kind}, {verb}: {wait}");
            clock.advance(wait);
            assert!(limiter.check(Ask::new("a").cost(LIMIT)).unwrap().allowed, "{kind}, {verb}");
        }
    }
}

/// A set-back wakes all futures that wait for a time of this clock, so that waiters check again.
#[test]
fn setting_a_manual_clock_back_wakes_all_rings() {
    struct Count(AtomicU64);
    impl std::task::Wake for Count {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }
    let clock = ManualClock::new(Tick(100));
    let count = Arc::new(Count(AtomicU64::new(0)));
    let waker = std::task::Waker::from(count.clone());
    let mut context = std::task::Context::from_waker(&waker);
    let mut rings: Vec<_> =
        [150, 200, 1_000].map(|when| Box::pin(clock.ring_at(Tick(when)))).into_iter().collect();
    let mut pending = || {
        let polls = rings.iter_mut().map(|ring| ring.as_mut().poll(&mut context));
        polls.filter(std::task::Poll::is_pending).count()
    };
    assert_eq!(pending(), 3);
    clock.set(Tick(120));
    assert_eq!((count.0.load(Ordering::Relaxed), clock.set_backs()), (0, 0));
    clock.set(Tick(50));
    assert_eq!((count.0.load(Ordering::Relaxed), clock.set_backs()), (3, 1));
    assert_eq!(pending(), 3);
    clock.set(Tick(200));
    assert_eq!(count.0.load(Ordering::Relaxed), 5, "two of them are due");
}
