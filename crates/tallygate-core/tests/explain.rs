//! Evaluating the formulas of an explanation gives the decision of the core.

use num_bigint::BigInt;
use proptest::prelude::*;
use tallygate_core::explain::{DecisionField, Explanation, Formula, Operation};
use tallygate_core::{
    Algorithm as _, Cost, Decision, Kind, Limit, LimitState, Op, Part, Policy, Tick, Ticks, apply,
};
use tallygate_testkit::{Step, any_limit_of, cases, costs, steps, times};

/// Returns the value of a formula, computed with unbounded integers.
fn evaluated(formula: &Formula) -> BigInt {
    let (operation, a, b) = match formula {
        Formula::Number(value) | Formula::Named { value, .. } => return BigInt::from(*value),
        Formula::Binary(operation, both) => (operation, evaluated(&both.0), evaluated(&both.1)),
    };
    let zero = BigInt::ZERO;
    // All divisors are positive. Only times can be negative.
    let floor = |a: &BigInt, b: &BigInt| {
        let remainder = ((a % b) + b) % b;
        ((a - &remainder) / b, remainder)
    };
    match operation {
        Operation::Plus => a + b,
        Operation::Minus => a - b,
        Operation::Above => (a - b).max(zero),
        Operation::Times => a * b,
        Operation::Over => floor(&a, &b).0,
        Operation::OverRoundedUp => {
            let (whole, remainder) = floor(&a, &b);
            whole + i32::from(remainder > zero)
        }
        Operation::Modulo => floor(&a, &b).1,
        Operation::CommonDivisor => {
            let (mut a, mut b) = (a, b);
            while b > zero {
                (a, b) = (b.clone(), a % b);
            }
            a
        }
        Operation::AtMost => i32::from(a <= b).into(),
        Operation::Below => i32::from(a < b).into(),
        other => unreachable!("the test does not know {other:?}"),
    }
}

/// Collects the names in a formula with their values.
fn names(formula: &Formula, into: &mut Vec<(&'static str, i128)>) {
    match formula {
        Formula::Number(_) => {}
        Formula::Named { name, value } => into.push((name, *value)),
        Formula::Binary(_, both) => {
            names(&both.0, into);
            names(&both.1, into);
        }
    }
}

/// The names of values that an explanation takes from the state.
const STORED: [&str; 9] =
    ["last", "level", "count", "previous", "into", "logged", "gone", "entry", "newest"];

/// Checks that the outcome of an explanation follows from its formulas, and that every number in them is an input, is
/// stored, or is the value of an earlier step.
#[track_caller]
fn follows(why: &Explanation, limit: &Limit, now: Tick, cost: Cost) {
    let numbers = limit.numbers();
    let mut known: Vec<(&str, i128)> = vec![
        ("L", numbers.limit.into()),
        ("W", numbers.window.0.into()),
        ("B", numbers.burst.into()),
        ("c", cost.into()),
        ("now", now.0.into()),
    ];
    let bound = BigInt::from(i128::MAX);
    for step in &why.steps {
        let mut used = Vec::new();
        names(&step.formula, &mut used);
        for (name, value) in used {
            match known.iter().rev().find(|(earlier, _)| *earlier == name) {
                Some((_, earlier)) => assert_eq!(*earlier, value, "{name} in {step}"),
                None => assert!(
                    STORED.contains(&name),
                    "{name} in {step} is neither stored nor computed"
                ),
            }
        }
        let exact = evaluated(&step.formula).min(bound.clone());
        assert_eq!(exact, BigInt::from(step.value()), "{step}");
        known.push((step.name, step.value()));
    }
    let value = |field| why.value_of(field);
    let wait = |wait: Option<i128>| wait.map(|wait| Ticks(u64::try_from(wait).unwrap_or(u64::MAX)));
    let decision = &why.decision;
    assert_eq!(value(DecisionField::Allowed), Some(decision.allowed.into()));
    assert_eq!(value(DecisionField::Remaining), Some(decision.remaining.into()));
    assert_eq!(wait(value(DecisionField::ResetAfter)), Some(decision.reset_after));
    assert_eq!(wait(value(DecisionField::Delay)).unwrap_or(Ticks::ZERO), decision.delay);
    let retry_after =
        if decision.allowed { Some(Ticks::ZERO) } else { wait(value(DecisionField::RetryAfter)) };
    assert_eq!(retry_after, decision.retry_after);
}

#[track_caller]
fn explains(limit: &Limit, state: &LimitState, now: Tick, cost: Cost) {
    let why = limit.explain(state, now, cost);
    let decided: Decision = limit.decide(&mut state.clone(), now, cost);
    assert_eq!(why.decision, decided, "{limit:?} {state:?} {now} {cost}: {:#?}", why.steps);
    follows(&why, limit, now, cost);
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn an_explanation_agrees_with_the_decision_in_every_history(
        (first, history, looks) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(any_limit_of)
            .prop_flat_map(|limit| {
                let looks = (times(&limit, 30, true), proptest::collection::vec(costs(&limit), 30));
                (steps(limit, 30), looks).prop_map(|((limit, steps), looks)| (limit, steps, looks))
            })
    ) {
        let mut limit = first;
        let mut state = limit.initial(history[0].0);
        let mut looks = looks.0.into_iter().zip(looks.1);
        for (now, step) in history {
            if let Some((at, cost)) = looks.next() {
                explains(&limit, &state, at, cost);
            }
            let op = match step {
                Step::Check(cost) | Step::Peek(cost) => {
                    explains(&limit, &state, now, cost);
                    Op::Check(cost)
                }
                Step::Force(amount) => Op::Force(amount),
                Step::Reset => Op::Reset,
                Step::Change(other) => {
                    state = other.carry(&limit, &state, now);
                    limit = other;
                    continue;
                }
                Step::Store => continue,
            };
            let part = Part { rule: &limit, state: &mut state, op };
            apply::<_, bool>(&mut [part], now);
        }
    }
}

#[test]
fn a_state_of_another_kind_is_explained_as_it_is_decided() {
    let bucket = Policy::token_bucket(5).per(Ticks(10)).limit().unwrap();
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 3).per(Ticks(10)).limit().unwrap();
        if !kind.is_bucket() {
            explains(&limit, &bucket.initial(Tick(7)), Tick(9), 1);
        }
    }
}

fn shown(limit: &Limit, before: &[(i64, Cost)], now: i64, cost: Cost) -> Vec<String> {
    let mut state = limit.initial(Tick(before[0].0));
    for &(now, cost) in before {
        limit.decide::<bool>(&mut state, Tick(now), cost);
    }
    limit.explain(&state, Tick(now), cost).steps.iter().map(ToString::to_string).collect()
}

#[test]
fn a_fixed_window_shows_its_count_and_its_end() {
    let limit = Policy::fixed_window(3).per(Ticks(10)).limit().unwrap();
    assert_eq!(
        shown(&limit, &[(12, 2)], 17, 2),
        [
            "count = 2",
            "elapsed = max(0, now − last) = max(0, 17 − 12) = 5",
            "left = W − into = 10 − 2 = 8",
            "over = left ≤ elapsed = 8 ≤ 5 = no",
            "used = 2",
            "room = L − c = 3 − 2 = 1",
            "allowed = used ≤ room = 2 ≤ 1 = no",
            "retry_after = left + last − now = 8 + 12 − 17 = 3",
            "remaining = max(0, L − used) = max(0, 3 − 2) = 1",
            "reset_after = left + last − now = 8 + 12 − 17 = 3",
        ]
    );
}

#[test]
fn a_log_shows_which_request_must_leave_first() {
    let limit = Policy::sliding_window_log(3).per(Ticks(10)).limit().unwrap();
    assert_eq!(
        shown(&limit, &[(0, 1), (5, 1), (6, 1), (11, 1)], 12, 2),
        [
            "logged = 3",
            "gone = 0",
            "used = logged − gone = 3 − 0 = 3",
            "room = L − c = 3 − 2 = 1",
            "allowed = used ≤ room = 3 ≤ 1 = no",
            "excess = used − room = 3 − 1 = 2",
            "entry = 6",
            "retry_after = W + entry − now = 10 + 6 − 12 = 4",
            "remaining = max(0, L − used) = max(0, 3 − 3) = 0",
            "reset_after = W + newest − now = 10 + 11 − 12 = 9",
        ]
    );
}

#[test]
fn a_counter_shows_how_the_window_before_is_weighted() {
    let limit = Policy::sliding_window_counter(10).per(Ticks(10)).limit().unwrap();
    assert_eq!(
        shown(&limit, &[(5, 8), (11, 2)], 12, 3),
        [
            "count = 2",
            "previous = 8",
            "elapsed = max(0, now − last) = max(0, 12 − 11) = 1",
            "place = into + elapsed = 1 + 1 = 2",
            "current = 2",
            "before = 8",
            "e = 2",
            "weighted = ⌊before · (W − e) / W⌋ = ⌊8 · (10 − 2) / 10⌋ = 6",
            "used = weighted + current = 6 + 2 = 8",
            "room = L − c = 10 − 3 = 7",
            "allowed = used ≤ room = 8 ≤ 7 = no",
            "weight = ⌊((room − current + 1) · W − 1) / before⌋ = ⌊((7 − 2 + 1) · 10 − 1) / 8⌋ = 7",
            "at = max(0, W − weight) = max(0, 10 − 7) = 3",
            "retry_after = max(0, at − e) = max(0, 3 − 2) = 1",
            "remaining = max(0, L − used) = max(0, 10 − 8) = 2",
            "reset_after = W − e + W = 10 − 2 + 10 = 18",
        ]
    );
}

#[test]
fn a_cost_above_the_capacity_is_explained_without_a_wait() {
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 3).per(Ticks(10)).limit().unwrap();
        let why = limit.explain(&limit.initial(Tick(0)), Tick(0), 4);
        assert_eq!((why.decision.allowed, why.decision.retry_after), (false, None));
        assert_eq!(why.value_of(DecisionField::Allowed), Some(0));
        assert_eq!(why.value_of(DecisionField::RetryAfter), None);
    }
}
