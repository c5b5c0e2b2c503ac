//! Policies and states survive their conversion to numbers and bytes.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm as _, Anchor, Decision, DecodeError, Kind, NotAMultiple, Op, Part, Penalty, Policy,
    Tick, Ticks,
};

fn number() -> impl Strategy<Value = u64> {
    (0_u32..62).prop_flat_map(|bits| 1_u64 << bits..=(1_u64 << bits) * 2 - 1)
}

prop_compose! {
    fn limit(index: usize)(
        kind in prop::sample::select(&Kind::ALL[..]),
        limit in number(),
        window in number(),
        burst in prop::option::of(number()),
        debt in prop::option::of(number()),
        start in prop::option::of(number()),
        first in any::<bool>(),
        shadow in any::<bool>(),
        penalty in prop::option::of((number(), 1_u64..9)),
    ) -> tallygate_core::LimitBuilder {
        let mut builder = Policy::of(kind, limit).per(Ticks(window)).named(format!("limit {index}"));
        if let (Some(burst), true) = (burst, kind.is_bucket()) {
            builder = builder.burst(burst);
        }
        if let Some(debt) = debt {
            builder = builder.debt(debt);
        }
        if let Some(start) = start {
            builder = builder.starting_with(start % (burst.filter(|_| kind.is_bucket()).unwrap_or(limit) + 1));
        }
        if first && kind == Kind::FixedWindow {
            builder = builder.anchor(Anchor::FirstRequest);
        }
        if shadow {
            builder = builder.shadow();
        }
        if let Some((duration, denials)) = penalty {
            builder = builder.penalty(Penalty::lasting(Ticks(duration)).after(denials));
        }
        builder
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    let some = (limit(0), prop::option::of(limit(1)));
    some.prop_filter_map("the numbers are not valid", |(one, other)| {
        Policy::all_of("", [Some(one), other].into_iter().flatten()).ok()
    })
}

proptest! {
    #[test]
    fn a_policy_survives_its_description(policy in policy()) {
        let mut bytes = Vec::new();
        policy.describe(&mut bytes);
        prop_assert_eq!(Policy::from_description(&bytes), Ok(policy.clone()));
        for cut in 0..bytes.len() {
            prop_assert!(Policy::from_description(&bytes[..cut]).is_err());
        }
        bytes.push(0);
        prop_assert_eq!(Policy::from_description(&bytes), Err(DecodeError::Trailing { extra: 1 }));
    }

    #[test]
    fn a_state_survives_its_numbers(
        policy in policy(),
        steps in prop::collection::vec((0_u64..1 << 40, 0_u64..200, any::<bool>()), 1..12),
    ) {
        let mut now = Tick(1_700_000_000_000_000);
        let mut state = policy.initial(now);
        for (ahead, cost, force) in steps {
            now = now.after(Ticks(ahead)).expect("the time is in range");
            let op = if force { Op::Force(i128::from(cost) - 100) } else { Op::Check(cost) };
            let go = { let part = Part { rule: &policy, state: &mut state, op }; part.allows(now) };
            let _ = Part { rule: &policy, state: &mut state, op }.step::<Decision>(now, go);
            let numbers = policy.state_to_numbers(&state);
            let mut back = policy.state_from_numbers(&numbers).expect("a decision produced this state");
            prop_assert_eq!(policy.state_to_numbers(&back), numbers.clone());
            for cost in [0, 1, 100] {
                let peek = |state: &mut _| {
                    let part = Part { rule: &policy, state: &mut *state, op: Op::Peek(cost) };
                    let go = part.allows(now);
                    Part { rule: &policy, state, op: Op::Peek(cost) }.step::<Decision>(now, go).0
                };
                prop_assert_eq!(peek(&mut back), peek(&mut state));
            }
            prop_assert!(policy.state_from_numbers(&numbers[..numbers.len() - 1]).is_err());
            let extra = [&numbers[..], &[1]].concat();
            prop_assert!(policy.state_from_numbers(&extra).is_err());
            if policy.script().is_some() {
                prop_assert!(numbers.iter().all(|number| number.unsigned_abs() < 1 << 53), "{:?}", numbers);
            }
        }
    }
}

#[test]
fn numbers_that_no_decision_produces_are_errors() {
    let bucket = Policy::token_bucket(3).per(Ticks(10)).build().unwrap();
    // A script may charge beyond the bound on debt of 60, after an outage.
    assert!(bucket.state_from_numbers(&[0, 1 << 52]).is_ok());
    for bad in [&[0, (1 << 52) + 1][..], &[0, -1], &[i128::MAX, 0], &[0], &[0, 0, 0]] {
        assert!(bucket.state_from_numbers(bad).is_err(), "{bad:?}");
    }
    let window = Policy::fixed_window(3).per(Ticks(10)).build().unwrap();
    assert!(window.state_from_numbers(&[25, 5, 6]).is_ok());
    for bad in [[25, 4, 1], [25, 10, 1], [25, 5, 7], [25, 5, -1]] {
        assert!(window.state_from_numbers(&bad).is_err(), "{bad:?}");
    }
    let log = Policy::sliding_window_log(3).per(Ticks(10)).build().unwrap();
    assert!(log.state_from_numbers(&[9, 4, 2, 8, 5, 9, 6]).is_ok());
    for bad in [
        [9, 4, 2, 9, 5, 8, 6],
        [9, 4, 2, 8, 5, 8, 6],
        [9, 4, 2, 8, 4, 9, 6],
        [9, 4, 2, 8, 5, 9, 11],
        [7, 4, 2, 8, 5, 9, 6],
        [9, 4, 3, 8, 5, 9, 6],
    ] {
        assert!(log.state_from_numbers(&bad).is_err(), "{bad:?}");
    }
}

#[test]
fn coarser_ticks_must_divide_windows_and_penalties() {
    let policy = Policy::token_bucket(5)
        .per_second()
        .penalty(Penalty::lasting(Ticks(3_000)))
        .build()
        .unwrap();
    let micros = policy.with_coarser_ticks(1000).unwrap();
    assert_eq!(micros.limits()[0].numbers().window, Ticks(1_000_000));
    assert_eq!(micros.limits()[0].penalty().unwrap().duration(), Ticks(3));
    let odd = Policy::token_bucket(5).per(Ticks(1500)).build().unwrap();
    assert_eq!(odd.with_coarser_ticks(1000), Err(NotAMultiple { span: Ticks(1500), ticks: 1000 }));
    assert_eq!(
        NotAMultiple { span: Ticks(1500), ticks: 1000 }.to_string(),
        "a window or penalty must be a multiple of 1000 ticks (got 1500)"
    );
}
