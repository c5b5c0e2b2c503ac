//! A shadow limit keeps the state that it would have if it were enforced, whatever is refunded.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Decision, Kind, Limit, LimitBuilder, LimitRecord, LimitState, Op, Part,
    Penalty, Policy, Tick, Ticks, reserve, settle,
};
use tallygate_testkit::{cases, costs, small_limit_of, times};

/// The number of changes between charged and uncharged requests that a shadow limit remembers.
const RUNS: usize = 8;

fn builder(limit: &Limit) -> LimitBuilder {
    let n = limit.numbers();
    Policy::of(n.kind, n.limit)
        .per(n.window)
        .burst(n.burst)
        .debt(n.debt)
        .starting_with(n.start)
        .anchor(n.anchor)
}

/// A limit that allows everything, and the limit as a shadow.
fn with_shadow(shadow: LimitBuilder) -> Policy {
    let roomy = Policy::fixed_window(1 << 40).per(Ticks(1 << 40)).named("roomy");
    Policy::all_of("both", [roomy, shadow.named("tried").shadow()]).expect("both are valid")
}

fn encoded(limit: &Limit, state: &LimitState) -> Vec<u8> {
    let mut bytes = Vec::new();
    limit.encode(state, &mut bytes);
    bytes
}

/// The units of the newest requests that have not been refunded, the newest last.
#[derive(Default)]
struct Newest(Vec<(Cost, bool)>);

impl Newest {
    fn push(&mut self, units: Cost, is_charged: bool) {
        self.0.push((units, is_charged));
        let mut uncharged_runs = 0;
        let mut newer_is_charged = true;
        for (_, is_charged) in self.0.iter_mut().rev() {
            uncharged_runs += usize::from(newer_is_charged && !*is_charged);
            newer_is_charged = *is_charged;
            *is_charged |= uncharged_runs > RUNS;
        }
    }

    /// Takes off the newest units, and returns how many of them were charged.
    fn pop(&mut self, mut units: Cost) -> Cost {
        let mut charged = 0;
        while units > 0 {
            let (request, is_charged) = self.0.last_mut().expect("there are as many units");
            let taken = units.min(*request);
            *request -= taken;
            units -= taken;
            charged += if *is_charged { taken } else { 0 };
            if *request == 0 {
                self.0.pop();
            }
        }
        charged
    }

    fn units(&self) -> Cost {
        self.0.iter().map(|(units, _)| units).sum()
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// The shadow limit runs beside an enforced limit that gets only the requests that it allows. Refunds return the
    /// newest requests.
    #[test]
    fn a_shadow_limit_decides_as_if_it_were_enforced(
        (limit, times, steps) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(small_limit_of)
            .prop_flat_map(|limit| {
                let times = times(&limit, 60, false);
                // Not more than the roomy limit allows.
                let costs = costs(&limit).prop_map(|cost| cost.min(1000));
                let step = (costs, proptest::option::weighted(0.4, 0..=100_u64));
                (Just(limit), times, proptest::collection::vec(step, 60))
            }),
        penalty in proptest::option::weighted(0.2, (1..30_u64, 1..4_u64)),
    ) {
        let penalized = |builder: LimitBuilder| match penalty {
            Some((lasts, after)) => builder.penalty(Penalty::lasting(Ticks(lasts)).after(after)),
            None => builder,
        };
        let enforced = penalized(builder(&limit)).build().unwrap();
        let policy = with_shadow(penalized(builder(&limit)));
        let (mut alone, mut both) = (enforced.initial(times[0]), policy.initial(times[0]));
        let mut newest = Newest::default();
        for (&now, &(cost, refund)) in times.iter().zip(&steps) {
            if let Some(percent) = refund {
                let units = newest.units() * percent / 100;
                let charged = newest.pop(units);
                let refund = |units: Cost| Op::Force(-i128::from(units));
                Part { rule: &policy, state: &mut both, op: refund(units) }.step::<bool>(now, true);
                Part { rule: &enforced, state: &mut alone, op: refund(charged) }
                    .step::<bool>(now, true);
            } else {
                let expected: Decision = enforced.decide(&mut alone, now, cost);
                let decision: Decision = policy.decide(&mut both, now, cost);
                prop_assert!(decision.allowed);
                prop_assert_eq!(decision.shadow_denied_by.is_some(), !expected.allowed);
                if cost > 0 {
                    newest.push(cost, expected.allowed);
                }
            }
            let (shadow, real) = (both[1].state(), alone[0].state());
            prop_assert_eq!(encoded(&limit, shadow), encoded(&limit, real));
            // The history survives both encodings.
            let mut bytes = Vec::new();
            policy.encode(&both, &mut bytes);
            let mut again = Vec::new();
            policy.encode(&policy.decode(&bytes).unwrap(), &mut again);
            prop_assert_eq!(&bytes, &again);
            let numbers = policy.state_to_numbers(&both);
            let read = policy.state_from_numbers(&numbers).unwrap();
            prop_assert_eq!(policy.state_to_numbers(&read), numbers);
            both = read;
        }
    }

    /// A store may drop a fresh state. The history of the shadow limit goes with it, which must not be noticeable.
    #[test]
    fn dropping_a_fresh_state_is_invisible(
        (limit, times, steps) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(small_limit_of)
            .prop_flat_map(|limit| {
                let times = times(&limit, 60, false);
                let step = (costs(&limit), proptest::option::weighted(0.4, 1..40_u64));
                (Just(limit), times, proptest::collection::vec(step, 60))
            }),
    ) {
        let policy = Policy::all_of(
            "both",
            [
                Policy::fixed_window(1 << 40).per(Ticks(7)).named("roomy"),
                builder(&limit).starting_with(limit.numbers().burst).named("tried").shadow(),
            ],
        )
        .unwrap();
        let (mut kept, mut dropped) = (policy.initial(times[0]), policy.initial(times[0]));
        for (&now, &(cost, refund)) in times.iter().zip(&steps) {
            if policy.is_fresh(&dropped, now) {
                dropped = policy.initial(now);
            }
            let op = match refund {
                Some(units) => Op::Force(-i128::from(units)),
                None => Op::Check(cost),
            };
            let step = |state| {
                let mut part = Part { rule: &policy, state, op };
                let goes = part.allows(now);
                part.step::<Decision>(now, goes).0
            };
            prop_assert_eq!(step(&mut kept), step(&mut dropped));
        }
    }
}

proptest! {
    #![proptest_config(cases(1500))]

    /// Checks and reservations are made, then some reservations are settled for less, in any order, then units are
    /// refunded. The exact history knows the units of each reservation.
    #[test]
    fn refunds_after_settlements_return_at_most_what_the_shadow_limit_charged(
        requests in proptest::collection::vec((1..9_u64, proptest::option::of(1..=8_u64)), 1..=2 * RUNS),
        order in any::<proptest::sample::Index>(),
        refunds in proptest::collection::vec(1..9_u64, 1..40),
    ) {
        let policy = with_shadow(Policy::fixed_window(20).per(Ticks(100)));
        let mut state = policy.initial(Tick(0));
        let used = |state: &[LimitRecord]| {
            policy.limits()[1].used(state[1].state(), Tick(0)).rounded_up()
        };
        let mut exact = Newest::default();
        let mut reservations = Vec::new();
        for (index, &(cost, returned)) in requests.iter().enumerate() {
            let (decision, receipt) = reserve::<_, Decision>(&policy, &mut state, Tick(0), cost);
            exact.0.push((cost, decision.shadow_denied_by.is_none()));
            reservations.extend(returned.map(|returned| (index, returned.min(cost), receipt)));
        }
        if !reservations.is_empty() {
            let first = order.index(reservations.len());
            reservations.rotate_left(first);
        }
        for (index, returned, receipt) in reservations {
            let _ = settle::<_, Decision>(&policy, &mut state, Tick(0), -i128::from(returned), &receipt);
            exact.0[index].0 -= returned;
        }
        let charged = |exact: &Newest| -> Cost {
            exact.0.iter().map(|(units, is_charged)| if *is_charged { *units } else { 0 }).sum()
        };
        prop_assert_eq!(used(&state), charged(&exact));
        for units in refunds {
            let units = units.min(exact.units());
            exact.pop(units);
            let op = Op::Force(-i128::from(units));
            Part { rule: &policy, state: &mut state, op }.step::<bool>(Tick(0), true);
            prop_assert!(used(&state) >= charged(&exact), "a refund returned units that were not charged");
            if exact.units() == 0 {
                prop_assert_eq!(used(&state), 0, "everything was returned");
            }
        }
    }
}

/// A refund that is not for a charged request does not lower the shadow limit.
#[test]
fn a_refund_of_a_request_that_the_shadow_limit_denied_returns_nothing_to_it() {
    let policy = with_shadow(Policy::fixed_window(2).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    let mut check = |refunds: bool| {
        let decision: Decision = policy.decide(&mut state, Tick(0), 1);
        if refunds {
            let op = Op::Force(-1);
            Part { rule: &policy, state: &mut state, op }.step::<bool>(Tick(0), true);
        }
        decision.shadow_denied_by
    };
    assert_eq!((check(false), check(false)), (None, None));
    for _ in 0..20 {
        assert_eq!(
            check(true),
            Some(1),
            "the shadow limit is used up, and nothing is returned to it"
        );
    }
}

#[test]
fn many_refunds_after_many_requests_return_what_was_charged() {
    let policy = with_shadow(Policy::token_bucket(1).per(Ticks(2)).burst(4));
    let mut state = policy.initial(Tick(0));
    // At one request per tick, the limit charges seven requests, and then every second one.
    let denied = (0..16)
        .filter(|now| {
            policy.decide::<Decision>(&mut state, Tick(*now), 1).shadow_denied_by.is_some()
        })
        .count();
    assert_eq!(denied, 5);
    let shadow = &policy.limits()[1];
    let used_before = shadow.used(state[1].state(), Tick(15)).rounded_up();
    // Of the newest six requests, three were charged.
    for _ in 0..6 {
        Part { rule: &policy, state: &mut state, op: Op::Force(-1) }.step::<bool>(Tick(15), true);
    }
    assert_eq!(shadow.used(state[1].state(), Tick(15)).rounded_up(), used_before - 3);
}

#[test]
fn a_canceled_reservation_that_the_shadow_limit_denied_is_forgotten() {
    let policy = with_shadow(Policy::fixed_window(3).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    assert!(policy.decide::<bool>(&mut state, Tick(0), 2));
    let (decision, receipt) = reserve::<_, Decision>(&policy, &mut state, Tick(0), 5);
    assert_eq!(decision.shadow_denied_by, Some(1));
    let _ = settle::<_, Decision>(&policy, &mut state, Tick(0), -5, &receipt);
    // The refund is for the first request, because the reservation is gone.
    Part { rule: &policy, state: &mut state, op: Op::Force(-2) }.step::<bool>(Tick(0), true);
    let next: Decision = policy.decide(&mut state, Tick(0), 3);
    assert_eq!(next.shadow_denied_by, None);
}

/// The settlement is for a request in an older run than the newest.
#[test]
fn a_settlement_of_an_older_run_lets_no_refund_return_uncharged_units() {
    let policy = with_shadow(Policy::fixed_window(6).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    let check = |state: &mut Box<[LimitRecord]>, cost| {
        policy.decide::<Decision>(state, Tick(0), cost).shadow_denied_by.is_none()
    };
    assert!(check(&mut state, 3));
    let (decision, denied) = reserve::<_, Decision>(&policy, &mut state, Tick(0), 5);
    assert_eq!(decision.shadow_denied_by, Some(1));
    assert!(check(&mut state, 2));
    assert!(!check(&mut state, 4));
    let _ = settle::<_, Decision>(&policy, &mut state, Tick(0), -5, &denied);
    // The newest 4 units were not charged.
    Part { rule: &policy, state: &mut state, op: Op::Force(-4) }.step::<bool>(Tick(0), true);
    assert!(!check(&mut state, 2), "5 of 6 units are used");
}

#[test]
fn a_damaged_history_is_an_error() {
    let policy = with_shadow(Policy::fixed_window(1).per(Ticks(100)));
    let mut state = policy.initial(Tick(0));
    for _ in 0..3 {
        assert!(policy.decide::<bool>(&mut state, Tick(0), 1));
    }
    let numbers = policy.state_to_numbers(&state);
    assert_eq!(numbers[6..], [1, 0, 2], "one run: nothing charged after two uncharged units");
    for damage in [[9, 0, 2], [1, 0, 0], [1, 1 << 53, 2], [1, -1, 2]] {
        let damaged = [&numbers[..6], &damage].concat();
        assert!(policy.state_from_numbers(&damaged).is_err(), "{damage:?}");
    }
}
