//! Clocks that are set back while requests wait: every waiter keeps the time that was left to it, whether or not it is
//! polled, and no key is denied for as long as the clock went back.

use std::pin::pin;
use std::task::{Context, Waker};

use crate::tasks::{FOREVER, LateClock, Tasks, limiter};
use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Policy, RateLimiter, Tick, Ticks, check_all};

fn one_per(window: u64) -> Policy {
    Policy::token_bucket(1).per(Ticks(window)).burst(1).build().expect("valid")
}

/// Fault K7.
#[test]
fn an_unpolled_waiter_holds_its_key_no_longer_because_the_clock_was_set_back() {
    let clock = ManualClock::new(Tick(1_000_000));
    let limiter = limiter(one_per(100), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut context = Context::from_waker(Waker::noop());
    let mut head = pin!(limiter.until_ready("a", Ticks(250)));
    assert!(head.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(500));
    assert!(!limiter.is_allowed("a").expect("short"));
    clock.set(Tick(750));
    assert!(!limiter.is_allowed("a").expect("short"), "the waiter comes first until its deadline");
    clock.set(Tick(751));
    assert!(limiter.is_allowed("a").expect("short"));
}

/// The clock passes the time of the last poll again before the waiter is polled: its deadline is not the old one.
///
/// Fault K5.
#[test]
fn a_waiter_that_is_polled_long_after_a_set_back_is_answered_by_its_deadline() {
    let clock = ManualClock::new(Tick(1_000));
    let limiter = limiter(one_per(10_000), &clock);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut context = Context::from_waker(Waker::noop());
    let mut head = Box::pin(limiter.until_ready("a", FOREVER));
    let mut second = pin!(limiter.until_ready("a", Ticks(20_000)));
    assert!(head.as_mut().poll(&mut context).is_pending());
    assert!(second.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(2_000));
    assert!(!limiter.is_allowed("a").expect("short"));
    clock.set(Tick(0));
    assert!(!limiter.is_allowed("a").expect("short"));
    clock.set(Tick(18_999));
    assert!(second.as_mut().poll(&mut context).is_pending(), "1000 of 20 000 ticks had passed");
    clock.set(Tick(19_000));
    assert!(second.as_mut().poll(&mut context).is_ready());
    drop(head);
}

/// Fault K7.
#[test]
fn a_late_reading_from_before_a_set_back_ends_no_wait() {
    let clock = ManualClock::new(Tick(1_000_000));
    let late = LateClock::new(&clock);
    let policy = one_per(100);
    let store = PolicyStore::new(&policy, Capacity::of(10), &late);
    let limiter = RateLimiter::with_store(policy, store);
    assert!(limiter.is_allowed("a").expect("short"));
    let mut context = Context::from_waker(Waker::noop());
    let mut head = pin!(limiter.until_ready("a", Ticks(250)));
    assert!(head.as_mut().poll(&mut context).is_pending());
    clock.set(Tick(500));
    assert!(head.as_mut().poll(&mut context).is_pending());
    late.read_late(0, Tick(1_000_900));
    assert!(!limiter.is_allowed("a").expect("short"));
    clock.set(Tick(600));
    assert!(!limiter.is_allowed("a").expect("short"), "the waiter has its place");
    assert!(head.as_mut().poll(&mut context).is_ready(), "and is served in time");
    assert!(!limiter.is_allowed("a").expect("short"));
    clock.set(Tick(700));
    assert!(limiter.is_allowed("a").expect("short"));
}

/// Fault K7.
#[test]
fn a_joint_decision_that_read_the_clock_before_a_set_back_locks_no_key_out() {
    let clock = ManualClock::new(Tick(1_000_000));
    let late = LateClock::new(&clock);
    let policy = one_per(100);
    let store = PolicyStore::new(&policy, Capacity::of(10), &late);
    let limiter = RateLimiter::with_store(policy, store);
    assert!(limiter.is_allowed("a").expect("short"));
    clock.set(Tick(500));
    assert!(!limiter.is_allowed("a").expect("short"));
    // The clock was set back after the decision had read it.
    late.read_late(0, Tick(1_000_000));
    let joint = check_all([limiter.joint("a").expect("short")]);
    assert!(!joint.expect("room").decision.allowed, "it is late, and the key has earned nothing");
    clock.set(Tick(600));
    assert!(limiter.is_allowed("a").expect("short"), "it has earned back what it used");
}

/// Fault K7.
#[test]
fn shaped_requests_that_are_not_polled_leave_as_if_the_clock_had_not_been_set_back() {
    let clock = ManualClock::new(Tick(1_000));
    let policy = Policy::leaky_bucket(1).per(Ticks(10)).burst(9).build().expect("valid");
    let limiter = limiter(policy, &clock);
    let mut tasks = Tasks::new();
    for _ in 0..4 {
        tasks.add(limiter.shape("a"));
    }
    assert_eq!(tasks.run().len(), 1);
    (1..=3).for_each(|task| tasks.freeze(task));
    clock.set(Tick(0));
    tasks.add(limiter.shape("a"));
    let mut left = tasks.run_until(&clock, Tick(45));
    (1..=3).for_each(|task| tasks.thaw(task));
    left.extend(tasks.run_until(&clock, Tick(45)));
    let left: Vec<_> = left.iter().map(|(task, at, _)| (*task, at.0)).collect();
    assert_eq!(left, [(4, 40), (1, 45), (2, 45), (3, 45)], "their departure times had passed");
}
