//! A broker and a simulated store, in virtual time.

use std::sync::Arc;
use std::time::Duration;

use tallygate::Policy;
use tallygate::policy::Penalty;

use super::*;
use crate::lease::Leases;
use crate::lease::ledger::{self, OutstandingLeases};

const MS: i64 = 1_000_000;

/// A broker, and a store that has the same clock in microseconds.
struct Fixture {
    terms: Terms,
    broker: KeyBroker,
    state: Box<[LimitRecord]>,
    out: OutstandingLeases,
    waiters: u64,
    calls: Vec<Call>,
}

impl Fixture {
    fn new(policy: Policy, leases: Option<Leases>) -> Self {
        let policy = Arc::new(policy);
        let state = policy.initial(Tick(0));
        let terms = Terms::new(policy, true, leases);
        let broker = KeyBroker::default();
        Self {
            terms,
            broker,
            state,
            out: OutstandingLeases::default(),
            waiters: 0,
            calls: Vec::new(),
        }
    }

    fn ask(&mut self, cost: Cost, now: i64) -> AskOutcome {
        self.waiters += 1;
        let asked = self.broker.ask(&self.terms, self.waiters, cost, (Tick(now), FOREVER));
        self.calls.extend(call_of(&asked).cloned());
        asked
    }

    /// Returns whether a check waits for a call.
    fn waits(&mut self, cost: Cost, now: i64) -> bool {
        matches!(self.ask(cost, now), AskOutcome::Waits { .. })
    }

    /// Carries out the last call in the store at one time, and handles its reply at a later time.
    fn reply(&mut self, at: i64, now: i64) -> ReplyOutcome {
        let call = self.calls.last().unwrap().clone();
        let result = carry_out(&self.terms, (&mut self.state, &mut self.out), &call, at);
        let outcome = self.broker.handle_reply(&self.terms, call.number, result, Tick(now));
        self.calls.extend(outcome.call.clone());
        outcome
    }

    /// Checks a cost. A call is answered at once.
    fn check(&mut self, cost: Cost, now: i64) -> Decision {
        let asked = self.ask(cost, now);
        if let AskOutcome::Decided(timed, _) = asked {
            return timed.decision;
        }
        let outcome = self.reply(now, now);
        let timed = outcome.verdicts.into_iter().find(|(waiter, _)| *waiter == self.waiters);
        match timed {
            Some((_, Verdict::Decided(timed))) => timed.decision,
            other => panic!("{other:?}"),
        }
    }
}

/// Returns the call that a check makes.
fn call_of(asked: &AskOutcome) -> Option<&Call> {
    match asked {
        AskOutcome::Decided(_, call) | AskOutcome::Waits { call, .. } => call.as_ref(),
        AskOutcome::Overloaded => None,
    }
}

/// Carries out a call in the store.
fn carry_out(
    terms: &Terms,
    (state, out): (&mut Box<[LimitRecord]>, &mut OutstandingLeases),
    call: &Call,
    at: i64,
) -> CallResult {
    let (policy, at) = (&terms.policy, Tick(at / 1000));
    match &call.kind {
        CallKind::Check(costs) => {
            let answers = costs.iter().map(|cost| CostDecision {
                is_allowed: policy.decide::<bool>(state, at, *cost),
                state: state.clone(),
                shadow: None,
                bounds: Bounds::default(),
            });
            CallResult::Checked { at, answers: answers.collect() }
        }
        CallKind::Take(slice) => {
            let life = terms.leases.unwrap().in_store();
            let amount = ledger::take(policy, state, out, at, *slice, life);
            CallResult::Taken(TakenSlice { amount, at, state: state.clone() })
        }
    }
}

fn tokens(limit: Cost, window: Duration, burst: Cost) -> Policy {
    let micros = u64::try_from(window.as_micros()).unwrap();
    Policy::token_bucket(limit).per(Ticks(micros)).burst(burst).build().unwrap()
}

fn second(limit: Cost, burst: Cost) -> Policy {
    tokens(limit, Duration::from_secs(1), burst)
}

#[test]
fn a_key_that_cannot_be_leased_is_checked_by_calls() {
    let leases = Leases { life: Duration::from_millis(100) };
    let mut scene = Fixture::new(second(1000, 1000), Some(leases));
    let slice = loop {
        let asked = scene.ask(1, MS);
        match call_of(&asked) {
            Some(call) if matches!(call.kind, CallKind::Take(_)) => break call.clone(),
            Some(_) => drop(scene.reply(MS, MS)),
            None => panic!("a lease was taken already"),
        }
    };
    let waiter = scene.waiters;
    // This is the result for a key under several policies.
    let outcome =
        scene.broker.handle_reply(&scene.terms, slice.number, CallResult::Undecided, Tick(2 * MS));
    assert!(outcome.verdicts.is_empty(), "the check still waits: {:?}", outcome.verdicts);
    let call = outcome.call.unwrap();
    assert!(matches!(&call.kind, CallKind::Check(costs) if **costs == [1]), "{call:?}");
    scene.calls.push(call);
    let outcome = scene.reply(2 * MS, 3 * MS);
    assert!(
        matches!(&outcome.verdicts[..], [(timed, Verdict::Decided(_))] if *timed == waiter),
        "{outcome:?}"
    );
    let again = call_of(&scene.ask(1, 4 * MS)).unwrap().clone();
    assert!(matches!(again.kind, CallKind::Check(_)), "no slices for a while: {again:?}");
}

#[test]
fn a_cached_denial_holds_until_its_retry_time_and_no_longer() {
    let mut scene = Fixture::new(second(10, 1), None);
    assert!(scene.check(1, 0).allowed);
    let denied = scene.check(1, 1000);
    assert_eq!((denied.source, denied.retry_after), (Source::Store, Some(Ticks(99_999))));
    let calls = scene.calls.len();
    let again = scene.check(1, 40 * MS);
    assert_eq!((again.source, again.retry_after), (Source::DenyCache, Some(Ticks(60_000))));
    assert_eq!(scene.check(1, 100 * MS - 1001).source, Source::DenyCache);
    assert_eq!(scene.calls.len(), calls, "no call was made");
    assert!(scene.check(1, 100 * MS).allowed);
}

#[test]
fn a_cached_denial_counts_from_the_time_at_which_its_call_was_sent() {
    let mut scene = Fixture::new(second(10, 1), None);
    assert!(scene.check(1, 0).allowed);
    assert!(scene.waits(1, MS));
    // The store carries it out late, and the reply arrives later still: 60 ms of the wait have passed by then.
    scene.reply(20 * MS, 61 * MS);
    let timed = scene.check(1, 61 * MS);
    assert_eq!((timed.source, timed.retry_after), (Source::DenyCache, Some(Ticks(20_000))));
    assert_eq!(scene.check(1, 81 * MS).source, Source::Store);
}

#[test]
fn a_cached_denial_is_checked_again_after_a_second() {
    let mut scene = Fixture::new(tokens(1, Duration::from_secs(3600), 1), None);
    assert!(scene.check(1, 0).allowed);
    assert_eq!(scene.check(1, 0).source, Source::Store);
    assert_eq!(scene.check(1, 999 * MS).source, Source::DenyCache);
    assert_eq!(scene.check(1, 1000 * MS).source, Source::Store);
}

#[test]
fn a_cached_denial_covers_its_cost_and_larger_ones() {
    let mut scene = Fixture::new(second(10, 10), None);
    assert!(scene.check(8, 0).allowed);
    assert!(!scene.check(5, 0).allowed);
    let above = scene.check(6, 0);
    assert_eq!((above.source, above.retry_after), (Source::DenyCache, Some(Ticks(400_000))));
    assert_eq!(scene.check(2, 0).source, Source::Store, "less was not denied");
}

#[test]
fn a_cached_denial_of_a_log_covers_its_cost_only() {
    let log = Policy::sliding_window_log(10).per(Ticks(1_000_000)).build().unwrap();
    let mut scene = Fixture::new(log, None);
    assert!(scene.check(8, 0).allowed);
    assert!(!scene.check(5, 0).allowed);
    assert_eq!(scene.check(5, 0).source, Source::DenyCache);
    assert_eq!(scene.check(6, 0).source, Source::Store);
}

#[test]
fn denials_that_count_towards_a_penalty_always_make_a_call() {
    let penalty = Penalty::lasting(Ticks(1_000_000)).after(3);
    let policy = Policy::token_bucket(1).per(Ticks(1_000_000)).penalty(penalty);
    let mut scene = Fixture::new(policy.build().unwrap(), None);
    assert!(scene.check(1, 0).allowed);
    for _ in 0..3 {
        assert_eq!(scene.check(1, 0).source, Source::Store);
    }
}

#[test]
fn a_change_by_this_process_shows_at_once() {
    let mut scene = Fixture::new(second(10, 1), None);
    assert!(scene.check(1, 0).allowed);
    assert!(!scene.check(1, 0).allowed);
    scene.state = scene.terms.policy.fresh(Tick(0));
    assert_eq!(scene.check(1, 0).source, Source::DenyCache);
    scene.broker.changed();
    assert!(scene.check(1, 0).allowed);
}

#[test]
fn concurrent_checks_become_one_call_and_are_decided_as_one_by_one() {
    let policy = Policy::leaky_bucket(10).per(Ticks(1_000_000)).burst(100).build().unwrap();
    let mut scene = Fixture::new(policy.clone(), None);
    for cost in [1, 2, 3, 4] {
        assert!(scene.waits(cost, 0));
    }
    scene.reply(0, MS);
    assert_eq!(
        scene.calls.iter().map(|call| call.kind.clone()).collect::<Vec<_>>(),
        [CallKind::Check([1].into()), CallKind::Check([2, 3, 4].into())]
    );
    let outcome = scene.reply(2 * MS, 3 * MS);
    let mut alone = policy.initial(Tick(0));
    let _ = policy.decide::<Timed>(&mut alone, Tick(0), 1);
    for ((_, verdict), cost) in outcome.verdicts.into_iter().zip([2, 3, 4]) {
        let expected = policy.decide::<Timed>(&mut alone, Tick(2000), cost);
        let Verdict::Decided(timed) = verdict else { panic!("{verdict:?}") };
        assert_eq!((timed.at, timed.decision.allowed), (expected.at, true));
        assert_eq!(timed.decision.remaining, expected.decision.remaining);
        assert_eq!(timed.decision.delay, expected.decision.delay);
    }
    assert_eq!(scene.calls.len(), 2);
}

#[test]
fn of_checks_that_do_not_all_fit_as_many_are_allowed_as_one_by_one() {
    for there in 1..12 {
        let mut scene = Fixture::new(second(1, 100), None);
        scene.terms.policy.charge(&mut scene.state, Tick(0), i128::from(100 - there));
        let mut timed = Vec::new();
        (0..40).for_each(|_| assert!(scene.waits(1, 0)));
        let mut made = 0;
        while made < scene.calls.len() {
            made = scene.calls.len();
            timed.extend(scene.reply(0, 0).verdicts);
        }
        let allowed = timed.iter().filter(|(_, verdict)| match verdict {
            Verdict::Decided(timed) => timed.decision.allowed,
            other => panic!("{other:?}"),
        });
        assert_eq!((allowed.count(), timed.len()), (usize::try_from(there).unwrap(), 40));
        assert_eq!(made, 2, "calls for 40");
    }
}

/// A key with so many requests that it is leased.
fn hot(policy: Policy) -> Fixture {
    let mut scene = Fixture::new(policy, Some(Leases::default()));
    for _ in 0..HOT {
        assert!(scene.check(1, 0).allowed);
    }
    scene
}

#[test]
fn a_cold_key_makes_calls_and_a_hot_key_is_served_from_a_lease() {
    let mut scene = hot(second(1_000_000, 1_000_000));
    assert_eq!(scene.calls.iter().filter(|call| matches!(call.kind, CallKind::Take(_))).count(), 1);
    let calls = scene.calls.len();
    for served in 1..HOT / 2 {
        let timed = scene.check(1, MS);
        assert_eq!((timed.allowed, timed.source), (true, Source::Lease), "{served}");
    }
    assert_eq!(scene.calls.len(), calls);
}

#[test]
fn slices_grow_with_the_demand() {
    let mut scene = hot(second(1_000_000, 1_000_000));
    for request in 0..20_000 {
        let now = request * MS / 100;
        let asked = scene.ask(1, now);
        if call_of(&asked).is_some() {
            scene.reply(now, now);
        }
    }
    assert!(scene.calls.len() < 40, "{} calls for 20 000", scene.calls.len());
}

#[test]
fn a_lease_ends_after_its_life_counted_from_its_request() {
    let mut scene = hot(second(1_000_000, 1_000_000));
    assert!(scene.broker.left() > 0);
    (0..scene.broker.left()).for_each(|_| {
        let _ = scene.ask(1, MS);
    });
    assert!(scene.waits(1, 2 * MS) || scene.broker.is_asking());
    scene.reply(50 * MS, 90 * MS);
    assert!(scene.broker.left() > 0);
    let life = scene.terms.leases.unwrap().in_process();
    let ends = MS + i64::try_from(life.0).unwrap();
    assert_eq!(scene.check(1, ends - 1).source, Source::Lease);
    let held = scene.broker.left();
    assert!(held > 0);
    assert!(scene.waits(1, ends + MS), "it is over");
}

#[test]
fn a_lease_of_a_window_ends_with_the_window() {
    let policy = Policy::fixed_window(1000).per(Ticks(30_000)).build().unwrap();
    let mut scene = Fixture::new(policy, Some(Leases::default()));
    for _ in 0..HOT {
        assert!(scene.check(1, 28 * MS).allowed);
    }
    assert!(scene.broker.left() > 0);
    assert_eq!(scene.check(1, 29 * MS).source, Source::Lease);
    assert!(scene.broker.left() > 0);
    assert!(scene.waits(1, 30 * MS), "it is over with the window");
}

/// Fault J17.
#[test]
fn a_lease_of_a_window_lives_for_a_tenth_of_it_at_most() {
    let policy = |window_us| Policy::fixed_window(1000).per(Ticks(window_us)).build().unwrap();
    let life = |window_us, life_ms| {
        let leases = Leases::default().life(Duration::from_millis(life_ms));
        Terms::new(Arc::new(policy(window_us)), true, Some(leases)).leases().map(Leases::lives_for)
    };
    assert_eq!(life(1_000_000, 500), Some(Duration::from_millis(100)));
    assert_eq!(life(1_000_000, 5000), Some(Duration::from_millis(100)));
    assert_eq!(life(1_000_000, 50), Some(Duration::from_millis(50)));
    assert_eq!(life(5000, 100), None, "too short for any lease");
    let bucket = Terms::new(Arc::new(second(10, 10)), true, Some(Leases::default()));
    assert_eq!(bucket.leases(), Some(Leases::default()), "a bucket earns all the time");
}

/// Four processes share a window whose quota is in demand by 90 %, with leases as long as half of the window or longer than
/// it. The traffic moves from process to process, so leased units are often in the wrong one.
///
/// Fault J17.
#[test]
fn long_leases_of_a_window_starve_no_process() {
    let policy = Arc::new(Policy::fixed_window(1000).per(Ticks(1_000_000)).build().unwrap());
    for life_ms in [500, 5000] {
        let leases = Leases::default().life(Duration::from_millis(life_ms));
        let terms = Terms::new(policy.clone(), true, Some(leases));
        let life = terms.leases.unwrap().in_store();
        let mut brokers = [(); 4].map(|()| KeyBroker::default());
        let (mut state, mut out) = (policy.initial(Tick(0)), OutstandingLeases::default());
        let mut random = fastrand::Rng::with_seed(1);
        let (requests, mut denied, mut by_lease) = (9000, 0, 0);
        for request in 0..requests {
            let now = Tick(request * 1000 * MS / 900);
            let busiest = usize::try_from(now.0 / (250 * MS) % 4).unwrap();
            let index = if random.bool() { busiest } else { random.usize(0..4) };
            let waiter = request.cast_unsigned();
            let asked = brokers[index].ask(&terms, waiter, 1, (now, FOREVER));
            let (mut timed, mut call) = match asked {
                AskOutcome::Decided(timed, call) => (Some(timed), call),
                AskOutcome::Waits { call, .. } => (None, call),
                AskOutcome::Overloaded => panic!("{asked:?}"),
            };
            while let Some(made) = call {
                let result = carry_out(&terms, (&mut state, &mut out), &made, now.0);
                let outcome = brokers[index].handle_reply(&terms, made.number, result, now);
                for (_, verdict) in outcome.verdicts {
                    let Verdict::Decided(decided) = verdict else { panic!("{verdict:?}") };
                    timed = Some(decided);
                }
                call = outcome.call;
            }
            let decision = timed.unwrap().decision;
            denied += i64::from(!decision.allowed);
            by_lease += i64::from(decision.source == Source::Lease && decision.allowed);
            // The store sweeps four times per life of a lease, which is about once per 20 requests.
            if request % 20 == 0 {
                for broker in &mut brokers {
                    for UnusedSlice { amount, taken } in broker.sweep(&terms, now) {
                        let at = Tick(now.0 / 1000);
                        ledger::return_units(
                            &policy,
                            &mut state,
                            &mut out,
                            at,
                            (amount, taken),
                            life,
                        );
                    }
                }
            }
        }
        assert!(by_lease > requests / 2, "leases are in use: {by_lease} of {requests}");
        assert!(denied * 100 <= requests, "{denied} of {requests} denied with {life_ms} ms");
    }
}

#[test]
fn an_idle_lease_is_returned_once() {
    let mut scene = hot(second(1_000_000, 1_000_000));
    let left = scene.broker.left();
    assert_eq!(scene.broker.sweep(&scene.terms, Tick(10 * MS)), []);
    let back = scene.broker.sweep(&scene.terms, Tick(25 * MS));
    assert_eq!(back, [UnusedSlice { amount: left, taken: Tick(0) }]);
    assert_eq!((scene.broker.left(), scene.broker.expired_units), (0, 0));
    assert_eq!(scene.broker.close(&scene.terms, Tick(26 * MS)), []);
    assert!(!scene.broker.is_idle(&scene.terms, Tick(26 * MS)));
    assert!(scene.broker.is_idle(&scene.terms, Tick(200 * MS)));
}

#[test]
fn a_leaky_bucket_returns_no_units_and_keeps_its_departure_times() {
    let policy = Policy::leaky_bucket(100).per(Ticks(1_000_000)).burst(100).build().unwrap();
    let mut scene = hot(policy);
    let first = scene.check(1, 0);
    let next = scene.check(1, 0);
    assert_eq!((first.source, next.source), (Source::Lease, Source::Lease));
    assert_eq!(next.delay.0 - first.delay.0, 10_000, "{first:?} {next:?}");
    assert_eq!(scene.broker.close(&scene.terms, Tick(MS)), []);
}

#[test]
fn a_used_up_quota_is_requested_only_from_time_to_time() {
    let mut scene = hot(second(1000, 12));
    let mut allowed = HOT;
    for request in 0..10_000 {
        allowed += u64::from(scene.check(1, request * MS / 100).allowed);
    }
    assert!((100..=112).contains(&allowed), "{allowed}");
    assert!(scene.calls.len() < 60, "{} calls for 10 000 in 100 ms", scene.calls.len());
}

#[test]
fn a_cost_above_the_capacity_is_never_served_from_several_slices() {
    let mut scene = hot(second(1_000_000, 100));
    assert!(scene.broker.left() > 0);
    let timed = scene.check(101, 0);
    assert_eq!((timed.allowed, timed.retry_after), (false, None));
}

#[test]
fn the_reply_to_an_abandoned_call_is_ignored() {
    let mut scene = Fixture::new(second(10, 1), None);
    assert!(scene.waits(1, 0));
    let late = scene.calls[0].clone();
    scene.broker.handle_reply(&scene.terms, late.number, CallResult::NoReply, Tick(50 * MS));
    scene.broker = KeyBroker::default();
    assert!(scene.waits(1, 60 * MS));
    let result =
        CallResult::Taken(TakenSlice { amount: 9, at: Tick(0), state: scene.state.clone() });
    assert!(
        scene
            .broker
            .handle_reply(&scene.terms, late.number, result, Tick(61 * MS))
            .verdicts
            .is_empty()
    );
    assert!(scene.broker.is_asking());
}
