//! Compares the core with the reference model: every field, every operation.
//!
//! The model searches for what the core computes. A wrong rounding, a lost fraction or an overflow in either of them
//! shows as a difference.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Decision, Kind, Limit, LimitState, Op, Part, Policy, Returns, Settlement, Tick,
    Ticks, apply, reserve, settle,
};
use tallygate_testkit::{Model, Step, any_limit_of, cases, settling_steps, small_limit_of, steps};

/// Runs a history on both, and compares their decisions.
fn compare(limit: &Limit, history: &[(Tick, Step)]) -> Result<(), TestCaseError> {
    let Some(&(start, _)) = history.first() else { return Ok(()) };
    let mut limit = limit.clone();
    let mut state = limit.initial(start);
    let mut model = Model::initial(limit.numbers(), start);
    for (index, (now, step)) in history.iter().enumerate() {
        let numbers = *limit.numbers();
        let context = || format!("under {numbers:?} after {:?}", &history[..=index]);
        match step {
            Step::Check(cost) => {
                let mut twin = state.clone();
                let decision: Decision = limit.decide(&mut state, *now, *cost);
                prop_assert_eq!(decision, model.decide(*now, *cost), "{}", context());
                let yes: bool = limit.decide(&mut twin, *now, *cost);
                prop_assert_eq!(
                    yes,
                    decision.allowed,
                    "the answer as a bool differs: {}",
                    context()
                );
            }
            Step::Peek(cost) => {
                let decision = run(&limit, &mut state, Op::Peek(*cost), *now).0;
                prop_assert_eq!(decision, model.peek(*now, *cost), "{}", context());
            }
            Step::Force(amount) => {
                let dropped = run(&limit, &mut state, Op::Force(*amount), *now).1;
                prop_assert_eq!(dropped, model.force(*now, *amount), "dropped: {}", context());
            }
            Step::Reset => {
                let (decision, _) = run(&limit, &mut state, Op::Reset, *now);
                prop_assert_eq!(decision.remaining, decision.limit, "{}", context());
                model.reset(*now);
            }
            Step::Change(other) => {
                state = other.carry(&limit, &state, *now);
                limit = other.clone();
                model.change(limit.numbers(), *now);
            }
            Step::Store => {
                let mut bytes = Vec::new();
                limit.encode(&state, &mut bytes);
                state = limit.decode(&bytes).expect("an encoded state can be decoded");
            }
        }
    }
    Ok(())
}

/// Compares reservations: every check is a reservation, and every settlement returns what the model returns, however
/// many others were settled, refunded or reset in between.
fn compare_settlements(limit: &Limit, history: &[(Tick, Step)]) -> Result<(), TestCaseError> {
    let Some(&(start, _)) = history.first() else { return Ok(()) };
    let mut state = limit.initial(start);
    let mut model = Model::initial(limit.numbers(), start);
    let mut returns = Returns::default();
    let (mut number, mut open, mut latest) = (0, Vec::new(), start);
    for (index, (now, step)) in history.iter().enumerate() {
        let context = || format!("under {:?} after {:?}", limit.numbers(), &history[..=index]);
        let fresh = limit.fresh_at(&state).unwrap_or(Tick(i64::MAX));
        // Callers may be late, but the clock is not set back: a store learns that from its clock.
        let now = if fresh <= latest { &latest.max(*now) } else { now };
        if limit.clock_was_set_back(&state, *now) {
            continue;
        }
        latest = latest.max(*now);
        match step {
            Step::Check(cost) | Step::Peek(cost) => {
                let (decision, receipt) = reserve::<_, Decision>(limit, &mut state, *now, *cost);
                let (expected, charge) = model.reserve(*now, *cost);
                prop_assert_eq!(decision, expected, "{}", context());
                if decision.allowed {
                    open.push((receipt, charge, number, *cost));
                }
            }
            Step::Force(amount) => {
                let dropped = run(limit, &mut state, Op::Force(*amount), *now).1;
                prop_assert_eq!(dropped, model.force(*now, *amount), "dropped: {}", context());
                if *amount < 0 {
                    number += 1;
                    note_return(&mut returns, number, limit, &state, fresh);
                }
            }
            Step::Reset => {
                let _ = run(limit, &mut state, Op::Reset, *now);
                model.reset(*now);
                number += 1;
                returns.reset(number, Tick(i64::MAX));
                prop_assert!(open.drain(..).all(|(_, _, number, _)| returns.voids(number)));
            }
            Step::Change(_) | Step::Store if open.is_empty() => {}
            Step::Change(_) | Step::Store => {
                let (mut receipt, charge, before, cost) = open.remove(index % open.len());
                prop_assert!(!returns.voids(before), "{}", context());
                let mut bytes = Vec::new();
                returns.encode(&mut bytes);
                prop_assert_eq!(
                    &Returns::decode(&bytes).expect("the encoding is complete"),
                    &returns
                );
                returns.lower(before, &mut receipt);
                let used_before = limit.receipt(&state);
                let change = match index % 4 {
                    0 => 3,
                    1 => -i128::from(cost.min(2)),
                    _ => -i128::from(cost),
                };
                let settled = settle::<_, Decision>(limit, &mut state, *now, change, &receipt);
                let dropped = model.settle(*now, charge, change);
                prop_assert_eq!(settled.1, dropped, "dropped: {}", context());
                prop_assert_eq!(
                    settled.0.remaining,
                    model.peek(*now, 0).remaining,
                    "{}",
                    context()
                );
                if change < 0 {
                    let after = &limit.receipt(&state);
                    let settlement =
                        Settlement { reservation: &receipt, before: &used_before, after };
                    returns.settled(before, &settlement);
                    number += 1;
                    note_return(&mut returns, number, limit, &state, fresh);
                }
            }
        }
    }
    Ok(())
}

fn note_return(returns: &mut Returns, number: i64, limit: &Limit, state: &LimitState, fresh: Tick) {
    returns.note(number, limit.receipt(state), limit.last_change(state), fresh);
}

proptest! {
    #![proptest_config(cases(6000))]
    #[test]
    fn settlements_agree_with_the_model((limit, history) in (0..6_usize)
        .prop_flat_map(|kind| prop_oneof![
            3 => small_limit_of(Kind::ALL[kind]),
            1 => any_limit_of(Kind::ALL[kind]),
        ])
        .prop_flat_map(|limit| settling_steps(limit, 40)))
    {
        compare_settlements(&limit, &history)?;
    }
}

/// Two reservations, a refund of most of them, and another charge: an order that random histories rarely have.
#[test]
fn settlements_after_a_refund_agree_with_the_model() {
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 10).per(Ticks(100)).limit().expect("valid");
        let denied = || Step::Check(100);
        // The place of a settlement in the history decides which reservation it is for, and how much it returns.
        let steps = [
            Step::Check(3),
            Step::Check(6),
            Step::Force(-6),
            Step::Check(5),
            denied(),
            denied(),
            Step::Store,
            denied(),
            denied(),
            denied(),
            Step::Store,
        ];
        let history: Vec<_> = (1_000..).map(Tick).zip(steps).collect();
        compare_settlements(&limit, &history).expect("the same as the model");
    }
}

/// A settlement that returns nothing, and then one of a late caller whose units were returned before both.
#[test]
fn late_settlements_agree_with_the_model() {
    let limit = Policy::sliding_window_counter(9).per(Ticks(8)).debt(9).limit().expect("valid");
    let history = [
        (12, Step::Store),
        (12, Step::Check(1)),
        (12, Step::Check(6)),
        (13, Step::Check(3)),
        (13, Step::Force(-1)),
        (6, Step::Check(1)),
        (6, Step::Force(-7)),
        (6, Step::Force(1)),
        (22, Step::Check(1)),
        (24, Step::Store),
        (23, Step::Store),
    ];
    let history = history.map(|(now, step)| (Tick(now), step));
    compare_settlements(&limit, &history).expect("the same as the model");
}

fn run(limit: &Limit, state: &mut LimitState, op: Op, now: Tick) -> (Decision, u128) {
    let applied = apply(&mut [Part { rule: limit, state, op }], now);
    (applied.answer.expect("there is one part"), applied.dropped)
}

macro_rules! agrees_with_the_model {
    ($($name:ident: $kind:ident,)*) => {$(
        proptest! {
            #![proptest_config(cases(1500))]
            #[test]
            fn $name((limit, history) in prop_oneof![
                small_limit_of(Kind::$kind),
                any_limit_of(Kind::$kind),
            ].prop_flat_map(|limit| steps(limit, 30))) {
                compare(&limit, &history)?;
            }
        }
    )*};
}

agrees_with_the_model! {
    token_bucket_agrees_with_the_model: TokenBucket,
    gcra_agrees_with_the_model: Gcra,
    leaky_bucket_agrees_with_the_model: LeakyBucket,
    fixed_window_agrees_with_the_model: FixedWindow,
    sliding_window_log_agrees_with_the_model: SlidingWindowLog,
    sliding_window_counter_agrees_with_the_model: SlidingWindowCounter,
}
