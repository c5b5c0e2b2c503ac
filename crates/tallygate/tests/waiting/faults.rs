//! Faults while requests wait: heads that are not polled, rules and debts that change, clocks that are set back,
//! cancellations, panics and nested executors.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::tasks::{FOREVER, LateClock, Tasks, limiter};
use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::clock::{Clock as _, ManualClock};
use tallygate::observer::{Event, Observer};
use tallygate::store::{Capacity, MemoryStore, PolicyStore};
use tallygate::tiers::Access;
use tallygate::{
    Ask, Cost, Decision, Kind, Limit, Policy, RateLimiter, StoreError, Tick, Ticks, Tiers, block_on,
};
use tallygate_testkit::{cases, small_limit_of};

fn bucket(limit: u64, window: u64) -> Policy {
    Policy::token_bucket(limit).per(Ticks(window)).burst(1).build().expect("valid")
}

/// Fault K5.
#[test]
fn waiters_behind_an_unpolled_head_are_answered_by_their_deadlines() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(bucket(1, 100), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    let head = tasks.add(limiter.until_ready("a", FOREVER));
    for max_wait in [200, 250, 301] {
        tasks.add(limiter.until_ready("a", Ticks(max_wait)));
    }
    let denied: Vec<_> =
        tasks.run().iter().map(|(task, decision)| (*task, decision.allowed)).collect();
    assert_eq!(denied, [(2, false)], "its turn would come at 300");
    tasks.freeze(head);
    let answered = tasks.run_until(&clock, Tick(10_000));
    let times: Vec<_> =
        answered.iter().map(|(task, at, decision)| (*task, at.0, decision.allowed)).collect();
    assert_eq!(times, [(1, 200, false), (3, 301, false)]);
    assert!(answered[0].2.retry_after.is_some_and(|wait| wait > Ticks::ZERO));
    // Nothing was charged meanwhile.
    assert!(tasks.leave(head));
    assert!(limiter.is_allowed("a").expect("short"));
}

/// A peek does not count as a check, also while requests wait: the client is not under the peeked policy after it.
///
/// Fault K6.
#[test]
fn a_peek_behind_a_line_changes_nothing() {
    let clock = ManualClock::new(Tick(0));
    let base = Policy::token_bucket(10).per(Ticks(1_000)).build().expect("valid");
    let log = Policy::sliding_window_log(10).per(Ticks(1_000)).build().expect("valid");
    let store = MemoryStore::new(Capacity::of(10), &clock);
    let limiter = RateLimiter::in_store("api", Tiers::new(base).tier("log", log), store);
    let in_log = |cost| Ask::new("a").cost(cost).tier("log");
    assert!(limiter.check(Ask::new("a").cost(10)).expect("short").allowed);
    let mut tasks = Tasks::new();
    let head = tasks.add(limiter.until_ready("a", FOREVER));
    assert!(tasks.run().is_empty());
    let peeked = limiter.peek(in_log(5)).expect("short");
    assert_eq!((peeked.allowed, peeked.retry_after), (false, Some(Ticks(1_000))));
    assert!(tasks.leave(head));
    clock.set(Tick(999));
    let decision = limiter.check(in_log(5)).expect("short");
    assert!(
        decision.allowed,
        "the log takes over what is used at its first check, and that is little"
    );
}

/// Fault K5.
#[test]
fn a_head_that_is_not_polled_by_its_deadline_loses_its_place() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(bucket(1, 100), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    let head = tasks.add(limiter.until_ready("a", Ticks(150)));
    let next = tasks.add(limiter.until_ready("a", FOREVER));
    assert!(tasks.run().is_empty());
    tasks.freeze(head);
    let served: Vec<_> =
        tasks.run_until(&clock, Tick(1_000)).iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(served, [(next, 151)]);
    assert!(limiter.is_allowed("a").expect("short"), "a check is not held up either");
    // Polled at last, it is answered at once.
    tasks.thaw(head);
    assert!(matches!(tasks.run()[..], [(0, decision)] if !decision.allowed));
}

/// Fault K5.
#[test]
fn a_dead_waiter_holds_up_no_check() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(bucket(1, 100), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    let head = tasks.add(limiter.until_ready("a", Ticks(150)));
    assert!(tasks.run().is_empty());
    tasks.freeze(head);
    clock.set(Tick(150));
    assert!(!limiter.is_allowed("a").expect("short"), "it may still come");
    clock.set(Tick(151));
    assert!(limiter.is_allowed("a").expect("short"));
}

/// Fault K5.
#[test]
fn a_slower_policy_delays_no_answer_beyond_its_deadline() {
    let clock = ManualClock::new(Tick(0));
    let store = MemoryStore::new(Capacity::of(10), &clock);
    let limiter = RateLimiter::in_store("api", Tiers::new(bucket(1, 10)), store);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", FOREVER));
    let behind = tasks.add(limiter.until_ready("a", Ticks(20)));
    assert!(tasks.run().is_empty());
    limiter.replace(&Tiers::new(bucket(1, 100_000)));
    let answered = tasks.run_until(&clock, Tick(1_000));
    let times: Vec<_> =
        answered.iter().map(|(task, at, decision)| (*task, at.0, decision.allowed)).collect();
    assert_eq!(times, [(behind, 20, false)]);
}

/// All waiters are woken, not only the head: the head may not even be polled.
///
/// Fault K5.
#[test]
fn rules_that_allow_everything_serve_a_waiter_behind_an_unpolled_head_by_its_deadline() {
    let clock = ManualClock::new(Tick(0));
    let store = MemoryStore::new(Capacity::of(10), &clock);
    let limiter = RateLimiter::in_store("api", Tiers::new(bucket(1, 10)), store);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    let head = tasks.add(limiter.until_ready("a", FOREVER));
    let behind = tasks.add(limiter.until_ready("a", Ticks(30)));
    assert!(tasks.run().is_empty());
    tasks.freeze(head);
    limiter.set_override("a", Access::Unlimited, None);
    let answered = tasks.run_until(&clock, Tick(1_000));
    let times: Vec<_> = answered.iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(times, [(behind, 30)]);
}

/// Fault K5.
#[test]
fn a_debt_delays_no_answer_beyond_its_deadline() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per(Ticks(10)).debt(1_000).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let reserved = limiter.reserve("a", Ticks(50)).expect("short");
    let mut reservation = reserved.granted().expect("room");
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", FOREVER));
    let behind = tasks.add(limiter.until_ready("a", Ticks(20)));
    assert!(tasks.run().is_empty());
    let _ = limiter.settle(&mut reservation, 900).expect("in time");
    let answered = tasks.run_until(&clock, Tick(5_000));
    let times: Vec<_> =
        answered.iter().map(|(task, at, decision)| (*task, at.0, decision.allowed)).collect();
    assert_eq!(times, [(behind, 20, false)]);
}

/// A waiter whose deadline is the tick at which the line is served may be polled before the others.
///
/// Fault K5.
#[test]
fn waiters_that_are_due_at_their_deadline_are_served_in_whatever_order_they_are_polled() {
    let clock = ManualClock::new(Tick(1));
    let limiter = limiter(Policy::fixed_window(3).per(Ticks(10)).build().expect("valid"), &clock);
    assert!(limiter.check(Ask::new("a").cost(3)).expect("short").allowed);
    let mut context = Context::from_waker(Waker::noop());
    let mut waiting: Vec<_> =
        (0..4).map(|_| Box::pin(limiter.until_ready("a", Ticks(9)))).collect();
    for one in &mut waiting {
        let polled = one.as_mut().poll(&mut context);
        assert!(polled.is_pending(), "the fourth may come in the place of one that leaves");
    }
    clock.set(Tick(10));
    let answers: Vec<_> = waiting
        .iter_mut()
        .rev()
        .map(|one| match one.as_mut().poll(&mut context) {
            Poll::Ready(decision) => decision.expect("short").allowed,
            Poll::Pending => panic!("not answered by its deadline"),
        })
        .collect();
    assert_eq!(answers, [false, true, true, true], "the last was denied, as it was the last");
}

/// A task that joins a waiting future and a call that blocks. The blocking call cannot wait for the future, which its own
/// thread would have to poll.
///
/// Fault K5.
#[test]
fn a_thread_that_blocks_behind_its_own_future_is_served() {
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(bucket(1, 10), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let is_over = AtomicBool::new(false);
    let (blocked, polled) = std::thread::scope(|scope| {
        // A clock that moves forward as soon as a request waits for a time.
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                match clock.next_ring() {
                    Some(next) => clock.set(next),
                    None => std::thread::yield_now(),
                }
            }
        });
        let answers = block_on(async {
            let mut future = pin!(limiter.until_ready("a", FOREVER));
            let mut blocked = None;
            let polled = std::future::poll_fn(|context| {
                let polled = future.as_mut().poll(context);
                blocked.get_or_insert_with(|| {
                    (limiter.block_until_ready("a", Ticks(1_000)), clock.now())
                });
                polled
            });
            let polled = (polled.await, clock.now());
            (blocked, polled)
        });
        is_over.store(true, Ordering::Relaxed);
        answers
    });
    let allowed_at = |(answer, at): (Result<Decision, StoreError>, Tick)| {
        answer.is_ok_and(|decision| decision.allowed).then_some(at)
    };
    assert_eq!(blocked.and_then(allowed_at), Some(Tick(10)));
    assert_eq!(allowed_at(polled), Some(Tick(20)));
}

/// Fault K12.
#[test]
fn an_executor_in_an_executor_loses_no_wake_up() {
    let policy = Policy::gcra(1).per(Ticks(20_000_000)).build().expect("valid");
    let limiter = RateLimiter::new(policy);
    assert!(limiter.is_allowed("a").expect("short") && limiter.is_allowed("b").expect("short"));
    let long = Duration::from_secs(3_600);
    // The inner one sleeps on the same thread while the outer one is woken.
    block_on(async {
        let mut outer = pin!(limiter.until_ready("a", long));
        let mut inner = Some(|| {
            assert!(limiter.block_until_ready("b", long).expect("short").allowed);
            assert!(limiter.block_until_ready("b", long).expect("short").allowed);
        });
        let decision = std::future::poll_fn(|context| {
            let polled = outer.as_mut().poll(context);
            if let Some(inner) = inner.take() {
                inner();
            }
            polled
        })
        .await;
        assert!(decision.expect("short").allowed);
    });
}

/// An algorithm that panics in one of its methods, on demand.
struct Panics {
    limit: Limit,
    in_method: AtomicUsize,
}

const FIT: usize = 1;
const CHARGE: usize = 2;
const FACTS: usize = 3;
const ALLOWS: usize = 4;
const USED: usize = 5;

impl Panics {
    fn at(&self, method: usize) {
        assert!(self.in_method.load(Ordering::Relaxed) != method, "a bug in the user's algorithm");
    }
}

impl Algorithm for Panics {
    type State = <Limit as Algorithm>::State;

    fn capacity(&self) -> Cost {
        self.limit.capacity()
    }
    fn fresh(&self, now: Tick) -> Self::State {
        self.limit.fresh(now)
    }
    fn last_change(&self, state: &Self::State) -> Tick {
        self.limit.last_change(state)
    }
    fn clock_was_set_back(&self, state: &Self::State, now: Tick) -> bool {
        self.limit.clock_was_set_back(state, now)
    }
    fn rebase(&self, state: &mut Self::State, now: Tick) {
        self.limit.rebase(state, now);
    }
    fn allows(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.at(ALLOWS);
        self.limit.allows(state, now, cost)
    }
    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit {
        self.at(FIT);
        self.limit.fit(state, now, cost)
    }
    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128 {
        let dropped = self.limit.charge(state, now, amount);
        self.at(CHARGE);
        dropped
    }
    fn facts(&self, state: &Self::State, now: Tick, charged: Option<Cost>) -> Facts {
        self.at(FACTS);
        self.limit.facts(state, now, charged)
    }
    fn fresh_at(&self, state: &Self::State) -> Option<Tick> {
        self.limit.fresh_at(state)
    }
    fn used(&self, state: &Self::State, now: Tick) -> Used {
        self.at(USED);
        self.limit.used(state, now)
    }
    fn with_used(&self, used: Used, now: Tick) -> Self::State {
        self.limit.with_used(used, now)
    }
    fn encode(&self, state: &Self::State, out: &mut Vec<u8>) {
        self.limit.encode(state, out);
    }
    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError> {
        self.limit.decode(bytes)
    }
}

/// The request whose poll panicked has left the line and was not charged.
///
/// Fault K12.
#[test]
fn a_panic_in_an_algorithm_leaves_no_charge_and_no_place_in_line() {
    let mut panics = 0;
    for method in [FIT, CHARGE, FACTS, ALLOWS, USED] {
        // The cases: a request joins without room and with room, as the head, and behind a head at its deadline.
        for (moment, at) in [("full", 0), ("empty", 10), ("head", 10), ("behind", 20)] {
            let clock = ManualClock::new(Tick(0));
            let limit = Policy::token_bucket(1).per(Ticks(10)).burst(2).limit().expect("valid");
            let store = MemoryStore::new(Capacity::of(10), &clock);
            let rule = Panics { limit, in_method: AtomicUsize::new(0) };
            let limiter = RateLimiter::in_store("buggy", rule, store);
            let mut context = Context::from_waker(Waker::noop());
            assert!(limiter.check(Ask::new("a").cost(2)).expect("short").allowed);
            let mut head = Box::pin(limiter.until_ready("a", FOREVER));
            let mut waiter = Box::pin(limiter.until_ready("a", Ticks(20)));
            if moment == "behind" {
                assert!(head.as_mut().poll(&mut context).is_pending());
            }
            if moment == "head" || moment == "behind" {
                assert!(waiter.as_mut().poll(&mut context).is_pending());
            }
            clock.set(Tick(at));
            let set = |method| limiter.rules().in_method.store(method, Ordering::Relaxed);
            set(method);
            let polled = catch_unwind(AssertUnwindSafe(|| waiter.as_mut().poll(&mut context)));
            set(0);
            let charged = match polled {
                Ok(Poll::Ready(decision)) => u64::from(decision.expect("short").allowed),
                Ok(Poll::Pending) => 0,
                Err(_) => {
                    panics += 1;
                    0
                }
            };
            drop((head, waiter));
            // The line is empty, and all units that were earned since the start and not charged remain.
            let earned = u64::try_from(at / 10).expect("small");
            let decision = limiter.check(Ask::new("a").cost(0)).expect("short");
            assert_eq!(decision.remaining, earned - charged, "method {method}, {moment}");
            assert_eq!(limiter.is_allowed("a").expect("short"), earned > charged);
        }
    }
    assert!(panics >= 10, "only {panics} panics");
}

/// Fault K12.
#[test]
fn a_panicking_observer_changes_nothing_for_waiting_requests() {
    struct PanickingObserver;
    impl Observer for PanickingObserver {
        fn decided(&self, _: &Event<'_>) {
            struct PanickingPayload;
            impl Drop for PanickingPayload {
                fn drop(&mut self) {
                    panic!("and its payload too");
                }
            }
            std::panic::panic_any(PanickingPayload);
        }
    }
    let clock = ManualClock::new(Tick(0));
    let limiter = limiter(bucket(1, 10), &clock).observed_by(PanickingObserver);
    let mut tasks = Tasks::new();
    for _ in 0..3 {
        tasks.add(limiter.until_ready("a", FOREVER));
    }
    let served: Vec<_> =
        tasks.run_until(&clock, Tick(100)).iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(served, [(0, 0), (1, 10), (2, 20)]);
}

/// A thousand cancellations in the middle of a line, each followed by a check behind it, take about the same time in a
/// line of a hundred thousand waiters. They once took a hundred times as long.
///
/// Fault K5.
#[test]
fn leaving_a_long_line_costs_about_the_same_as_leaving_a_short_one() {
    let departures = |length: usize| {
        let clock = ManualClock::new(Tick(0));
        let limiter = limiter(bucket(1, 10), &clock);
        assert!(limiter.is_allowed("a").expect("short"));
        let mut context = Context::from_waker(Waker::noop());
        let mut line: BTreeMap<usize, _> =
            (0..length).map(|place| (place, Box::pin(limiter.until_ready("a", FOREVER)))).collect();
        for one in line.values_mut() {
            assert!(one.as_mut().poll(&mut context).is_pending());
        }
        let mut slowest = [Duration::ZERO; 5];
        for (round, took) in slowest.iter_mut().enumerate() {
            let from = Instant::now();
            for step in 0..100 {
                let leaves = (round * 100 + step) * length / 500;
                drop(line.remove(&leaves));
                assert!(!limiter.peek("a").expect("short").allowed);
            }
            *took = from.elapsed();
        }
        slowest.sort_unstable();
        slowest[2]
    };
    let (short, long) = (departures(1_000), departures(100_000));
    assert!(long < short * 20, "{short:?} in a short line, {long:?} in a long one");
}

/// A clock that is set back does not prolong the remaining wait.
///
/// Fault K7.
#[test]
fn a_waiter_waits_no_longer_because_the_clock_was_set_back() {
    let clock = ManualClock::new(Tick(1_000_000));
    let limiter = limiter(bucket(1, 100), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut context = Context::from_waker(Waker::noop());
    let mut head = Box::pin(limiter.until_ready("a", FOREVER));
    let mut second = Box::pin(limiter.until_ready("a", Ticks(250)));
    assert!(head.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(500));
    // The manual clock wakes all waiters.
    assert!(second.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(749));
    assert!(second.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(750));
    assert!(second.as_mut().poll(&mut context).is_ready());
    drop(head);
}

/// An event of a line.
#[derive(Clone, Debug)]
enum Step {
    Join { tier: usize, cost: Cost, max_wait: u64 },
    Leave(usize),
    Freeze(usize),
    Thaw(usize),
    Replace(usize),
    Override(usize, u64),
    Refund(Cost),
    Penalize(Cost),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => (0..3_usize, 1..5_u64, 0..90_u64).prop_map(|(tier, cost, max_wait)| Step::Join { tier, cost, max_wait }),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::Freeze),
        1 => any::<usize>().prop_map(Step::Thaw),
        1 => (0..3_usize).prop_map(Step::Replace),
        1 => (0..3_usize, 1..50_u64).prop_map(|(which, lasts)| Step::Override(which, lasts)),
        1 => (1..4_u64).prop_map(Step::Refund),
        1 => (1..4_u64).prop_map(Step::Penalize),
        6 => (0..30_u64).prop_map(Step::Pass),
    ]
}

fn any_small_limit() -> impl Strategy<Value = Limit> {
    (0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind]))
}

fn policy_of(limit: &Limit) -> Policy {
    let n = *limit.numbers();
    let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).anchor(n.anchor);
    builder.build().expect("valid")
}

fn rules(limits: &[Limit]) -> Tiers {
    let rules = Tiers::new(policy_of(&limits[0]));
    rules.tier("one", policy_of(&limits[1])).tier("two", policy_of(&limits[2]))
}

struct Waiter {
    joined: usize,
    until: i64,
    frozen: bool,
}

proptest! {
    #![proptest_config(cases(800))]

    /// Whatever happens, every waiter that is polled is answered by its own deadline, and the waiters that are
    /// served are served in the order in which they came.
    ///
    /// Fault K5.
    #[test]
    fn every_waiter_is_answered_by_its_own_deadline(
        limits in vec(any_small_limit(), 3),
        steps in vec(step(), 1..60),
    ) {
        let clock = ManualClock::new(Tick(0));
        let store = MemoryStore::new(Capacity::of(10), &clock);
        let limiter = RateLimiter::in_store("api", rules(&limits), store);
        let mut tasks = Tasks::new();
        let mut waiters: BTreeMap<usize, Waiter> = BTreeMap::new();
        let mut served: Vec<(usize, i64)> = Vec::new();
        for step in steps {
            match step {
                Step::Join { tier, cost, max_wait } => {
                    let max_wait = Ticks(max_wait);
                    let tier = [None, Some("one"), Some("two")][tier];
                    let ask = Ask::new("a").cost(cost).tier(tier);
                    let task = tasks.add(limiter.until_ready(ask, max_wait));
                    let until = clock.now().after(max_wait).expect("small").0;
                    waiters.insert(task, Waiter { joined: waiters.len(), until, frozen: false });
                }
                Step::Leave(which) if !tasks.running.is_empty() => {
                    let task = *tasks.running.keys().nth(which % tasks.running.len()).expect("there");
                    prop_assert!(tasks.leave(task));
                }
                Step::Freeze(which) if !tasks.running.is_empty() => {
                    let task = *tasks.running.keys().nth(which % tasks.running.len()).expect("there");
                    tasks.freeze(task);
                    waiters.get_mut(&task).expect("there").frozen = true;
                }
                Step::Thaw(which) if !tasks.running.is_empty() => {
                    let task = *tasks.running.keys().nth(which % tasks.running.len()).expect("there");
                    tasks.thaw(task);
                }
                Step::Leave(_) | Step::Freeze(_) | Step::Thaw(_) | Step::Pass(_) => {}
                Step::Replace(by) => {
                    let mut limits = limits.clone();
                    limits.rotate_left(by);
                    limiter.replace(&rules(&limits));
                }
                Step::Override(which, lasts) => {
                    let access = [Access::Unlimited, Access::Blocked, policy_of(&limits[1]).into()];
                    limiter.set_override("a", access[which].clone(), clock.now().after(Ticks(lasts)));
                }
                Step::Refund(cost) => {
                    let _ = limiter.refund(Ask::new("a").cost(cost)).expect("short");
                }
                Step::Penalize(cost) => {
                    let reserved = limiter.reserve(Ask::new("b").cost(0), Ticks(9)).expect("short");
                    if let Some(mut reservation) = reserved.granted() {
                        let _ = limiter.settle(&mut reservation, cost);
                    }
                }
            }
            let end = clock.now().0 + if let Step::Pass(ticks) = step { i64::try_from(ticks).expect("small") } else { 0 };
            for (task, at, decision) in tasks.run_until(&clock, Tick(end)) {
                let waiter = &waiters[&task];
                prop_assert!(
                    waiter.frozen || at.0 <= waiter.until,
                    "answered at {} instead of {}", at, waiter.until,
                );
                if decision.allowed && !waiter.frozen {
                    served.push((waiter.joined, at.0));
                }
            }
        }
        served.sort_unstable();
        prop_assert!(served.iter().is_sorted_by_key(|(_, at)| at), "out of order: {served:?}");
    }

    /// The charges of waiting requests count like all others: the bound of the bucket holds, whichever request leaves
    /// or is not polled.
    #[test]
    fn waiting_keeps_the_bound_of_a_bucket(
        (limit, window, burst) in (1..9_u64, 1..24_u64, 1..9_u64),
        joins in vec((0..12_u64, 1..5_u64, 0..90_u64, 0..4_u8), 1..60),
    ) {
        let clock = ManualClock::new(Tick(0));
        let policy = Policy::token_bucket(limit).per(Ticks(window)).burst(burst).build().expect("valid");
        let limiter = limiter(policy, &clock);
        let mut tasks = Tasks::new();
        let mut costs = BTreeMap::new();
        let mut charged: Vec<(i64, u64)> = Vec::new();
        for (pass, cost, max_wait, fate) in joins {
            let task = tasks.add(limiter.until_ready(Ask::new("a").cost(cost), Ticks(max_wait)));
            costs.insert(task, cost);
            let end = clock.now().after(Ticks(pass)).expect("small");
            let mut done = tasks.run_until(&clock, clock.now());
            match fate {
                0 => tasks.freeze(task),
                1 => drop(tasks.leave(task)),
                _ => {}
            }
            done.extend(tasks.run_until(&clock, end));
            charged.extend(done.iter().filter(|(_, _, decision)| decision.allowed).map(|(task, at, _)| (at.0, costs[task])));
        }
        for (from, &(s, _)) in charged.iter().enumerate() {
            let mut sum = 0;
            for &(t, cost) in &charged[from..] {
                sum += cost;
                let bound = burst + u64::try_from(t - s).expect("later") * limit / window;
                prop_assert!(sum <= bound, "{sum} in [{s}, {t}], at most {bound}");
            }
        }
    }

    /// The retry time of a request behind a line is never too late, if no other request comes and the waiters stay.
    ///
    /// Fault K6.
    #[test]
    fn the_retry_time_behind_a_line_is_never_too_late(
        limits in vec(any_small_limit(), 3),
        joins in vec((0..4_usize, 1..5_u64, 0..120_u64, 0..5_u64), 1..25),
        (tier, cost) in (0..3_usize, 1..5_u64),
    ) {
        let clock = ManualClock::new(Tick(0));
        let store = MemoryStore::new(Capacity::of(10), &clock);
        let limiter = RateLimiter::in_store("api", rules(&limits).tier("free", Access::Unlimited), store);
        let ask = |tier: usize, cost| {
            Ask::new("a").cost(cost).tier([None, Some("one"), Some("two"), Some("free")][tier])
        };
        let mut tasks = Tasks::new();
        for (tier, cost, max_wait, pass) in joins {
            tasks.add(limiter.until_ready(ask(tier, cost), Ticks(max_wait)));
            let end = clock.now().after(Ticks(pass)).expect("small");
            tasks.run_until(&clock, end);
        }
        let peek = || limiter.peek(ask(tier, cost)).expect("short");
        if tasks.running.is_empty() {
            return Ok(());
        }
        // A check moves the client to the policy that the wait is counted under; a peek would not.
        let decision = limiter.check(ask(tier, cost)).expect("short");
        let from = clock.now();
        prop_assert!(!decision.allowed);
        let Some(wait) = decision.retry_after else { return Ok(()) };
        prop_assert!(wait > Ticks::ZERO);
        for ticks in 1..wait.0 {
            tasks.run_until(&clock, from.after(Ticks(ticks)).expect("small"));
            prop_assert!(!peek().allowed, "decision {wait}, allowed after {ticks}");
        }
    }

    /// Behind a line of one bucket that earns at most one unit per tick, it is exact.
    ///
    /// Fault K6.
    #[test]
    fn the_retry_time_behind_a_line_of_one_bucket_is_exact(
        (window, burst) in (1..24_u64, 1..9_u64),
        joins in vec((1..5_u64, 0..200_u64, 0..9_u64), 1..25),
        cost in 1..5_u64,
    ) {
        let clock = ManualClock::new(Tick(0));
        let policy = Policy::token_bucket(1).per(Ticks(window)).burst(burst).build().expect("valid");
        let limiter = limiter(policy, &clock);
        let mut tasks = Tasks::new();
        for (cost, max_wait, pass) in joins {
            tasks.add(limiter.until_ready(Ask::new("a").cost(cost), Ticks(max_wait)));
            let end = clock.now().after(Ticks(pass)).expect("small");
            tasks.run_until(&clock, end);
        }
        let decision = limiter.peek(Ask::new("a").cost(cost)).expect("short");
        if let Some(wait) = decision.retry_after.filter(|_| !decision.allowed) {
            let from = clock.now();
            tasks.run_until(&clock, from.after(Ticks(wait.0 - 1)).expect("small"));
            prop_assert!(!limiter.peek(Ask::new("a").cost(cost)).expect("short").allowed);
            tasks.run_until(&clock, from.after(wait).expect("small"));
            prop_assert!(limiter.peek(Ask::new("a").cost(cost)).expect("short").allowed);
        }
    }

    /// Requests of a leaky bucket leave in order and at an even rate, whichever request is canceled.
    ///
    /// Fault K11.
    #[test]
    fn shaped_output_stays_flat_after_cancellations(
        (limit, window, burst) in (1..9_u64, 1..24_u64, 1..14_u64),
        steps in vec((0..6_u64, any::<bool>(), any::<usize>(), 0..3_u8), 1..80),
    ) {
        let clock = ManualClock::new(Tick(0));
        let policy = Policy::leaky_bucket(limit).per(Ticks(window)).burst(burst).build().expect("valid");
        let limiter = limiter(policy, &clock);
        let mut tasks = Tasks::new();
        let mut departed: Vec<(usize, i64)> = Vec::new();
        let note = |departed: &mut Vec<_>, done: Vec<(usize, Tick, Decision)>| {
            departed.extend(done.iter().filter(|(_, _, decision)| decision.allowed).map(|(task, at, _)| (*task, at.0)));
        };
        for (pass, arrives, which, cancels) in steps {
            if arrives {
                tasks.add(limiter.shape("a"));
            }
            note(&mut departed, tasks.run_until(&clock, clock.now()));
            if cancels == 0 && !tasks.running.is_empty() {
                let task = *tasks.running.keys().nth(which % tasks.running.len()).expect("there");
                prop_assert!(tasks.leave(task));
            }
            let end = clock.now().after(Ticks(pass)).expect("small");
            note(&mut departed, tasks.run_until(&clock, end));
        }
        note(&mut departed, tasks.run_until(&clock, Tick(100_000)));
        prop_assert!(tasks.running.is_empty() && clock.next_ring().is_none());
        prop_assert!(departed.is_sorted(), "in order of arrival: {departed:?}");
        for (from, &(_, s)) in departed.iter().enumerate() {
            for (count, &(_, t)) in departed[from..].iter().enumerate() {
                let most = 1 + u64::try_from(t - s + 1).expect("later") * limit / window;
                prop_assert!((count as u64) < most, "{} in [{s}, {t}]: {departed:?}", count + 1);
            }
        }
    }
}

/// Fault K11.
#[test]
fn no_two_shaped_requests_leave_at_once_after_a_cancellation() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::leaky_bucket(1).per(Ticks(10)).burst(5).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let mut tasks = Tasks::new();
    for _ in 0..4 {
        tasks.add(limiter.shape("a"));
    }
    assert_eq!(tasks.run().len(), 1);
    assert!(tasks.leave(1));
    tasks.add(limiter.shape("a"));
    let left: Vec<_> =
        tasks.run_until(&clock, Tick(1_000)).iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(left, [(2, 10), (3, 20), (4, 30)], "the others moved up, and one more had room");
}

/// After a reset, a request can get an earlier departure time than the requests before it. It leaves after them, and its
/// thread does not check again and again meanwhile.
///
/// Fault K12.
#[test]
fn a_shaped_request_with_an_earlier_departure_time_than_others_waits_for_them() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::leaky_bucket(1).per(Ticks(10)).burst(9).build().expect("valid");
    let counting = LateClock::new(&clock);
    let store = PolicyStore::new(&policy, Capacity::of(10), &counting);
    let limiter = RateLimiter::with_store(policy, store);
    let mut tasks = Tasks::new();
    for _ in 0..5 {
        tasks.add(limiter.shape("a"));
    }
    assert_eq!(tasks.run().len(), 1);
    let _ = limiter.reset("a").expect("short");
    tasks.add(limiter.shape("a"));
    tasks.add(limiter.shape("a"));
    let left: Vec<_> =
        tasks.run_until(&clock, Tick(100)).iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(left, [(5, 0), (1, 10), (2, 10), (3, 20), (4, 30), (6, 40)]);
}
