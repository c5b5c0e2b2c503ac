//! The core against the reference model, in every field, over every operation there is.
//!
//! The model searches where the core solves: a wrong rounding, a lost fraction or an overflow in
//! either shows as a difference.

use proptest::prelude::*;
use tollgate_core::{Algorithm, Decision, Kind, Limit, LimitState, Op, Part, Tick, apply};
use tollgate_testkit::{Model, Step, any_limit_of, cases, small_limit_of, steps};

/// Runs a history through both and compares what each tells.
fn compare(limit: &Limit, history: &[(Tick, Step)]) -> Result<(), TestCaseError> {
    let Some(&(start, _)) = history.first() else { return Ok(()) };
    let mut limit = limit.clone();
    let mut state = limit.first(start);
    let mut model = Model::first(limit.numbers(), start);
    for (index, (now, step)) in history.iter().enumerate() {
        let numbers = *limit.numbers();
        let context = || format!("under {numbers:?} after {:?}", &history[..=index]);
        match step {
            Step::Check(cost) => {
                let mut twin = state.clone();
                let told: Decision = limit.decide(&mut state, *now, *cost);
                prop_assert_eq!(told, model.decide(*now, *cost), "{}", context());
                let yes: bool = limit.decide(&mut twin, *now, *cost);
                prop_assert_eq!(yes, told.allowed, "the cheap answer differs: {}", context());
            }
            Step::Peek(cost) => {
                let told = run(&limit, &mut state, Op::Peek(*cost), *now).0;
                prop_assert_eq!(told, model.peek(*now, *cost), "{}", context());
            }
            Step::Force(amount) => {
                let dropped = run(&limit, &mut state, Op::Force(*amount), *now).1;
                prop_assert_eq!(dropped, model.force(*now, *amount), "dropped: {}", context());
            }
            Step::Reset => {
                let (told, _) = run(&limit, &mut state, Op::Reset, *now);
                prop_assert_eq!(told.remaining, told.limit, "{}", context());
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
                state = limit.decode(&bytes).expect("what was encoded can be decoded");
            }
        }
    }
    Ok(())
}

fn run(limit: &Limit, state: &mut LimitState, op: Op, now: Tick) -> (Decision, u128) {
    let applied = apply(&mut [Part { rule: limit, state, op }], now);
    (applied.answer.expect("one part"), applied.dropped)
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
