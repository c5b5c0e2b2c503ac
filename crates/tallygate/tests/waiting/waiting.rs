//! Waiting in line: in order, at the exact time, and without any effect of requests that leave. The tests set the clock
//! and run the tasks step by step.

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::task::{Context, Waker};

use crate::tasks::{FOREVER, Tasks, limiter};
use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::algorithm::Algorithm as _;
use tallygate::clock::{Clock as _, ManualClock};
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::Access;
use tallygate::{
    Ask, Cost, Decision, Kind, Limit, Policy, RateLimiter, Tick, Ticks, Tiers, check_all,
};
use tallygate_testkit::{cases, small_limit_of};

#[test]
fn ten_thousand_wait_in_order_and_are_served_at_the_exact_rate() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(3).per(Ticks(21)).burst(1).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let mut tasks = Tasks::new();
    for _ in 0..=10_000 {
        tasks.add(limiter.until_ready("a", FOREVER));
    }
    let served = tasks.run_until(&clock, Tick(100_000));
    let times: Vec<(usize, Tick)> = served.iter().map(|(task, at, _)| (*task, *at)).collect();
    let exact = (0..=10_000).zip((0..).step_by(7).map(Tick));
    let wrong = times.iter().copied().zip(exact).find(|(served, exact)| served != exact);
    assert_eq!((times.len(), wrong), (10_001, None));
    assert!(served.iter().all(|(_, _, decision)| decision.allowed));
    assert!(tasks.running.is_empty() && clock.next_ring().is_none(), "nothing is left behind");
}

/// The same line, but every third request leaves before its turn, at any time. The others move up, and requests that
/// leave neither add nor remove units.
#[test]
fn a_third_of_ten_thousand_leave_and_the_rest_are_served_at_the_exact_rate() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::gcra(1).per(Ticks(7)).build().expect("valid");
    let limiter = limiter(policy, &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    for _ in 0..10_000 {
        tasks.add(limiter.until_ready("a", FOREVER));
    }
    assert!(tasks.run().is_empty());
    let mut served = Vec::new();
    let mut left = 0;
    for turn in 0..3_333_usize {
        // From all over the line: its head, its end, and between.
        let leaves = turn * 7_919 % 10_000 / 3 * 3;
        left += usize::from(tasks.leave(leaves));
        let end = Tick(clock.now().0 + 5);
        served.extend(tasks.run_until(&clock, end).into_iter().map(|(task, at, _)| (task, at)));
    }
    served
        .extend(tasks.run_until(&clock, Tick(100_000)).into_iter().map(|(task, at, _)| (task, at)));
    assert!(served.is_sorted(), "in order");
    let exact = served.iter().zip((1..).map(|turn| Tick(7 * turn)));
    let wrong = exact.into_iter().find(|((_, at), exact)| at != exact);
    assert_eq!(wrong, None, "one every seven ticks, whichever request left");
    assert!(left > 1_000 && served.len() + left == 10_000, "{left} left, {} served", served.len());
    assert!(tasks.running.is_empty() && limiter.is_allowed("a").expect("short"));
}

/// Every task is polled when it joins, when it becomes the second, when it becomes the head, and when it is
/// served.
#[test]
fn a_waiting_task_is_polled_four_times_at_most() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per(Ticks(10)).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let polls = std::cell::Cell::new(0);
    let mut tasks = Tasks::new();
    for _ in 0..100 {
        let mut waiting = Box::pin(limiter.until_ready("a", FOREVER));
        let polls = &polls;
        tasks.add(std::future::poll_fn(move |context| {
            polls.set(polls.get() + 1);
            waiting.as_mut().poll(context)
        }));
    }
    assert_eq!(tasks.run_until(&clock, Tick(10_000)).len(), 100);
    assert!(polls.get() <= 4 * 100, "{} polls", polls.get());
}

/// Charging in advance would serve the fifth and the sixth at 40.
#[test]
fn requests_behind_one_that_leaves_move_up_and_nothing_is_charged() {
    for kind in Kind::ALL {
        let clock = ManualClock::new(Tick(0));
        let policy = Policy::of(kind, 1).per(Ticks(10)).build().expect("valid");
        let limiter = limiter(policy, &clock);
        assert!(limiter.is_allowed("a").expect("short"));
        let mut tasks = Tasks::new();
        for _ in 0..5 {
            tasks.add(limiter.until_ready("a", FOREVER));
        }
        assert_eq!(tasks.run_until(&clock, Tick(5)).len(), 0);
        assert!(tasks.leave(2));
        tasks.add(limiter.until_ready("a", FOREVER));
        let served = tasks.run_until(&clock, Tick(1_000));
        let times: Vec<(usize, i64)> = served.iter().map(|(task, at, _)| (*task, at.0)).collect();
        // One tick into a window, the counter counts less than one of the window before.
        let exact = match kind {
            Kind::SlidingWindowCounter => [(0, 11), (1, 21), (3, 31), (4, 41), (5, 51)],
            _ => [(0, 10), (1, 20), (3, 30), (4, 40), (5, 50)],
        };
        assert_eq!(times, exact, "{kind}");
    }
}

#[test]
fn a_request_that_would_wait_too_long_is_denied_at_once_with_its_wait() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per(Ticks(10)).burst(3).build().expect("valid");
    let limiter = limiter(policy, &clock);
    assert!(limiter.check(Ask::new("a").cost(3)).expect("short").allowed);
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", Ticks(9)));
    tasks.add(limiter.until_ready(Ask::new("a").cost(4), FOREVER));
    let waits = tasks.add(limiter.until_ready(Ask::new("a").cost(2), Ticks(20)));
    tasks.add(limiter.until_ready("a", Ticks(29)));
    let last = tasks.add(limiter.until_ready("a", Ticks(30)));
    let denied = tasks.run();
    let answer: Vec<_> =
        denied.iter().map(|(task, answer)| (*task, answer.allowed, answer.retry_after)).collect();
    assert_eq!(
        answer,
        [(0, false, Some(Ticks(10))), (1, false, None), (3, false, Some(Ticks(30)))]
    );
    // A check comes after the waiting requests, and is denied.
    let check = limiter.check("a").expect("short");
    assert_eq!((check.allowed, check.retry_after), (false, Some(Ticks(40))));
    assert_eq!(limiter.peek("a").expect("short"), check);
    assert!(!limiter.is_allowed("a").expect("short"));
    assert!(limiter.check(Ask::new("a").cost(0)).expect("short").allowed, "a look takes no turn");
    assert!(limiter.is_allowed("b").expect("short"), "others are not concerned");
    let batch: Vec<bool> = limiter.check_many(&["a", "b"]).expect("short");
    assert_eq!(batch, [false, true]);
    let together =
        check_all([limiter.joint("b").expect("short"), limiter.joint("a").expect("short")]);
    let together = together.expect("short");
    assert_eq!((together.denied_ask, together.decision.retry_after), (Some(1), Some(Ticks(40))));
    let served = tasks.run_until(&clock, Tick(100));
    let times: Vec<_> = served.iter().map(|(task, at, _)| (*task, *at)).collect();
    assert_eq!(times, [(waits, Tick(20)), (last, Tick(30))]);
    assert!(limiter.is_allowed("a").expect("short"));
}

/// Dropped after any number of polls, at any time, it was charged once or not at all.
///
/// Fault C6.
#[test]
fn a_dropped_future_is_charged_once_or_not_at_all() {
    for kind in Kind::ALL {
        let mut all_served = 0;
        for polls in 0..12 {
            let clock = ManualClock::new(Tick(0));
            let policy = Policy::of(kind, 4).per(Ticks(40)).build().expect("valid");
            let limiter = limiter(policy, &clock);
            assert!(limiter.check(Ask::new("a").cost(4)).expect("short").allowed);
            let mut first = Box::pin(limiter.until_ready(Ask::new("a"), FOREVER));
            let mut second = Box::pin(limiter.until_ready(Ask::new("a").cost(2), FOREVER));
            let mut context = Context::from_waker(Waker::noop());
            // The served requests and their times. A limiter without a line is charged the same.
            let mut served = [false; 2];
            let twin = RateLimiter::new(limiter.rules().clone());
            assert!(twin.check(Ask::new("a").cost(4).at(Tick(0))).expect("short").allowed);
            for poll in 0..polls {
                let turn = poll % 2;
                let which = if turn == 0 { &mut first } else { &mut second };
                if !served[turn] && which.as_mut().poll(&mut context).is_ready() {
                    served[turn] = true;
                    let cost = Cost::try_from(turn).expect("small") + 1;
                    assert!(
                        twin.check(Ask::new("a").cost(cost).at(clock.now()))
                            .expect("short")
                            .allowed
                    );
                }
                clock.advance(Ticks(7));
            }
            drop((first, second));
            assert!(clock.next_ring().is_none(), "{kind}: its alarm is off");
            let status = limiter.check(Ask::new("a").cost(0)).expect("short");
            let twin = twin.check(Ask::new("a").cost(0).at(clock.now())).expect("short");
            assert_eq!(status, twin, "{kind} after {polls} polls");
            clock.advance(Ticks(1_000));
            assert_eq!(limiter.peek("a").expect("short").remaining, 3, "{kind}: no request waits");
            all_served += usize::from(served[0] && served[1]);
        }
        assert!(all_served > 0, "{kind} got so far");
    }
}

/// A refund, a reset or a settlement makes the head check again.
#[test]
fn every_change_that_makes_room_serves_the_head_at_once() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::fixed_window(3).per(Ticks(100)).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let reserved = limiter.reserve(Ask::new("a").cost(3), Ticks(50)).expect("short");
    let mut reservation = reserved.granted().expect("room");
    let mut tasks = Tasks::new();
    let waiting: Vec<usize> =
        (0..4).map(|_| tasks.add(limiter.until_ready("a", FOREVER))).collect();
    assert_eq!(tasks.run().len(), 0);
    let _ = limiter.refund("a").expect("short");
    assert_eq!(tasks.run().iter().map(|one| one.0).collect::<Vec<_>>(), waiting[..1]);
    let _ = limiter.settle(&mut reservation, 2).expect("in time");
    assert_eq!(tasks.run().iter().map(|one| one.0).collect::<Vec<_>>(), waiting[1..2]);
    let _ = limiter.reset("a").expect("short");
    assert_eq!(tasks.run().iter().map(|one| one.0).collect::<Vec<_>>(), waiting[2..]);
}

#[test]
fn a_change_of_policy_checks_the_head_again() {
    let clock = ManualClock::new(Tick(0));
    let slow = Policy::token_bucket(1).per(Ticks(100)).build().expect("valid");
    let store = MemoryStore::new(Capacity::of(10), &clock);
    let limiter = RateLimiter::in_store("api", Tiers::new(slow), store);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    for _ in 0..3 {
        tasks.add(limiter.until_ready("a", FOREVER));
    }
    assert_eq!(tasks.run().len(), 0);
    clock.set(Tick(50));
    let fast = Policy::token_bucket(1).per(Ticks(10)).build().expect("valid");
    limiter.replace(&Tiers::new(fast));
    let served = tasks.run_until(&clock, Tick(70));
    let times: Vec<_> = served.iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(times, [(0, 55), (1, 65)], "half was left to earn, at the new rate");
    // Blocked while it waits: it can never be served, and is denied.
    limiter.set_override("a", Access::Blocked, None);
    limiter.replace(&Tiers::new(Access::Unlimited));
    let denied = tasks.run();
    assert!(matches!(denied[..], [(2, Decision { allowed: false, retry_after: None, .. })]));
}

/// The line knows that an override will end, and is served by what comes after it; and one that is set
/// or removed is noticed by waiting requests.
#[test]
fn waiting_requests_notice_overrides() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per(Ticks(10)).build().expect("valid");
    let store = MemoryStore::new(Capacity::of(10), &clock);
    let limiter = RateLimiter::in_store("api", Tiers::new(policy), store);
    limiter.set_override("a", Access::Blocked, Some(Tick(100)));
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", Ticks(105)));
    tasks.add(limiter.until_ready("a", Ticks(105)));
    tasks.add(limiter.until_ready("a", Ticks(110)));
    let answered: Vec<_> = tasks
        .run_until(&clock, Tick(105))
        .iter()
        .map(|(task, at, decision)| (*task, at.0, decision.allowed))
        .collect();
    assert_eq!(answered, [(0, 100, true), (1, 100, false)], "known when it is the head");
    let pro = limiter.peek(Ask::new("a").tier("gold")).expect_err("unknown");
    assert_eq!(pro.to_string(), "no tier is named \"gold\"; there are no tiers");
    limiter.set_override("a", Access::Unlimited, None);
    assert!(matches!(tasks.run()[..], [(2, Decision { allowed: true, .. })]), "at once");
}

/// A penalty counts requests that would wait too long, and not waiting requests.
#[test]
fn waiting_is_not_a_denial_but_giving_up_is() {
    let clock = ManualClock::new(Tick(0));
    let limit = Policy::fixed_window(1).per(Ticks(10));
    let penalty = tallygate::policy::Penalty::lasting(Ticks(500)).after(2);
    let limiter = limiter(limit.penalty(penalty).build().expect("valid"), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", FOREVER));
    let served = tasks.run_until(&clock, Tick(10));
    assert!(matches!(served[..], [(0, Tick(10), Decision { allowed: true, .. })]), "not punished");
    for _ in 0..2 {
        tasks.add(limiter.until_ready("a", Ticks(3)));
    }
    let decision: Vec<_> =
        tasks.run().into_iter().map(|(_, decision)| decision.retry_after).collect();
    assert_eq!(decision, [Some(Ticks(10)), Some(Ticks(500))]);
}

/// A request that would be allowed only after its maximum wait is denied as soon as that is known.
#[test]
fn a_request_that_must_wait_longer_than_expected_is_denied() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(1).per(Ticks(10)).debt(9).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let reserved = limiter.reserve("a", Ticks(50)).expect("short");
    let mut reservation = reserved.granted().expect("room");
    let mut tasks = Tasks::new();
    tasks.add(limiter.until_ready("a", Ticks(20)));
    assert_eq!(tasks.run().len(), 0);
    let _ = limiter.settle(&mut reservation, 4).expect("in time");
    let denied = tasks.run();
    assert!(matches!(
        denied[..],
        [(0, Decision { allowed: false, retry_after: Some(Ticks(40)), .. })]
    ));
    assert!(!limiter.is_allowed("a").expect("short"));
}

#[test]
fn shape_releases_requests_at_an_even_rate() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::leaky_bucket(2).per(Ticks(10)).burst(4).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let mut tasks = Tasks::new();
    for _ in 0..5 {
        tasks.add(limiter.shape("a"));
    }
    let served = tasks.run_until(&clock, Tick(100));
    let out: Vec<_> =
        served.iter().map(|(task, at, decision)| (*task, at.0, decision.allowed)).collect();
    assert_eq!(
        out,
        [(0, 0, true), (4, 0, false), (1, 5, true), (2, 10, true), (3, 15, true)],
        "the fifth was denied, and did not wait for it"
    );
    // C6: a request that leaves before its time returns what it used.
    assert!(limiter.check("a").expect("short").allowed);
    tasks.add(limiter.shape("a"));
    assert_eq!(tasks.run().len(), 0);
    assert!(tasks.leave(5));
    assert_eq!(limiter.check(Ask::new("a").cost(0)).expect("short").remaining, 3);
}

/// Without a runtime: a thread waits for a real clock.
#[test]
fn a_thread_can_wait_too() {
    let policy = Policy::gcra(500).per_second().burst(1).build().expect("valid");
    let limiter = RateLimiter::new(policy);
    let from = std::time::Instant::now();
    for _ in 0..6 {
        let decision = limiter.block_until_ready("a", std::time::Duration::from_secs(10));
        assert!(decision.expect("short").allowed);
    }
    assert!(
        from.elapsed() >= std::time::Duration::from_millis(9),
        "five waits of 2 ms, bar rounding"
    );
    let hourly = RateLimiter::new(Policy::gcra(1).per_hour().build().expect("valid"));
    assert!(hourly.is_allowed("a").expect("short"));
    assert!(hourly.block_until_ready("a", Ticks(1)).is_ok_and(|decision| !decision.allowed));
}

/// Futures that wait can be spawned where futures must be `Send`.
#[test]
fn waiting_works_on_tokio() {
    let policy = Policy::gcra(1_000).per_second().burst(1).build().expect("valid");
    let limiter = Arc::new(RateLimiter::new(policy));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build();
    runtime.expect("a runtime").block_on(async {
        let tasks: Vec<_> = (0..20)
            .map(|_| {
                let limiter = limiter.clone();
                tokio::spawn(async move { limiter.until_ready("a", FOREVER).await })
            })
            .collect();
        for task in tasks {
            assert!(task.await.expect("no panic").expect("short").allowed);
        }
        let policy = Policy::leaky_bucket(1_000).per_second().build().expect("valid");
        let outgoing = Arc::new(RateLimiter::new(policy));
        let shaped = (0..3).map(|_| {
            let outgoing = outgoing.clone();
            tokio::spawn(async move { outgoing.shape("b").await })
        });
        for call in shaped.collect::<Vec<_>>() {
            assert!(call.await.expect("no panic").expect("short").allowed);
        }
    });
}

/// A waiter of the model.
#[derive(Debug)]
struct ModelWaiter {
    task: usize,
    cost: Cost,
}

#[derive(Clone, Debug)]
enum Event {
    Join(Cost),
    Leave(usize),
    Check(Cost),
    Refund(Cost),
    Pass(u64),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1..4_u64).prop_map(Event::Join),
        2 => (0..9_usize).prop_map(Event::Leave),
        2 => (1..3_u64).prop_map(Event::Check),
        1 => (1..3_u64).prop_map(Event::Refund),
        4 => (0..25_u64).prop_map(Event::Pass),
    ]
}

proptest! {
    #![proptest_config(cases(600))]

    /// Compares with a simple line that is checked at every tick.
    #[test]
    fn lines_move_as_if_checked_at_every_tick(
        limit in (0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind])),
        events in vec(event(), 1..40),
    ) {
        let n = *limit.numbers();
        let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).anchor(n.anchor);
        let clock = ManualClock::new(Tick(0));
        let limiter = limiter(builder.build().expect("valid"), &clock);
        let mut tasks = Tasks::new();
        let mut state = limit.fresh(Tick(0));
        let mut line: VecDeque<ModelWaiter> = VecDeque::new();
        let mut now = 0;
        let serve = |line: &mut VecDeque<ModelWaiter>, state: &mut _, limit: &Limit, now| {
            let mut served = Vec::new();
            while let Some(head) = line.front()
                && limit.decide::<bool>(state, Tick(now), head.cost)
            {
                served.push((head.task, Tick(now)));
                line.pop_front();
            }
            served
        };
        for event in events {
            match event {
                Event::Join(cost) => {
                    let task = tasks.add(limiter.until_ready(Ask::new("a").cost(cost), FOREVER));
                    if cost <= n.burst {
                        line.push_back(ModelWaiter { task, cost });
                    }
                }
                Event::Leave(which) if !line.is_empty() => {
                    let left = line.remove(which % line.len()).expect("there");
                    prop_assert!(tasks.leave(left.task));
                }
                Event::Leave(_) => {}
                Event::Check(cost) => {
                    let decision = limiter.check(Ask::new("a").cost(cost)).expect("short").allowed;
                    let allowed = line.is_empty() && limit.decide(&mut state, Tick(now), cost);
                    prop_assert_eq!(decision, allowed);
                }
                Event::Refund(cost) => {
                    let _ = limiter.refund(Ask::new("a").cost(cost)).expect("short");
                    limit.charge(&mut state, Tick(now), -i128::from(cost));
                }
                Event::Pass(ticks) => {
                    let mut expected = Vec::new();
                    let end = now + i64::try_from(ticks).expect("small");
                    while now < end {
                        now += 1;
                        expected.extend(serve(&mut line, &mut state, &limit, now));
                    }
                    let served = tasks.run_until(&clock, Tick(now));
                    let served: Vec<_> = served.iter().map(|(task, at, _)| (*task, *at)).collect();
                    prop_assert_eq!(served, expected);
                }
            }
            let served: Vec<_> = tasks.run();
            let expected = serve(&mut line, &mut state, &limit, now);
            let served: Vec<_> = served.iter().filter(|(_, decision)| decision.allowed)
                .map(|(task, _)| (*task, Tick(now))).collect();
            prop_assert_eq!(served, expected);
        }
    }
}
