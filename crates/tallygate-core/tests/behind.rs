//! The wait behind other requests is within the bounds that `fit_behind` returns.

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate_core::{Algorithm, Cost, Fit, FitBehind, Kind, Limit, Policy, Tick, Ticks};
use tallygate_testkit::{cases, small_limit_of};

/// Charges costs one after the other, each as soon as it fits. Returns the time of the last one.
fn allowed_at<A: Algorithm>(rule: &A, state: &A::State, from: Tick, costs: &[Cost]) -> Tick {
    let (mut state, mut at) = (state.clone(), from);
    for cost in costs {
        match rule.fit(&state, at, *cost) {
            Fit::Now => {}
            Fit::After(wait) => at = at.after(wait).expect("the time is in range"),
            Fit::Never => unreachable!("the costs fit by themselves"),
        }
        rule.charge(&mut state, at, i128::from(*cost));
    }
    at
}

fn check<A: Algorithm>(rule: &A, used: &[(u64, Cost)], costs: &[Cost]) -> FitBehind {
    let mut now = Tick(1_000);
    let mut state = rule.initial(now);
    for (pass, cost) in used {
        now = now.after(Ticks(*pass)).expect("the time is in range");
        // This may lead into debt.
        rule.charge(&mut state, now, i128::from(*cost));
    }
    let costs: Vec<_> = costs.iter().map(|cost| 1 + (cost - 1) % rule.capacity()).collect();
    let (last, ahead) = costs.split_last().expect("there is at least one cost");
    let units = ahead.iter().map(|cost| u128::from(*cost)).sum();
    let wait = allowed_at(rule, &state, now, &costs).since(now);
    let behind = rule.fit_behind(&state, now, units, *last);
    let earliest = match behind.earliest {
        Fit::Now => Ticks::ZERO,
        Fit::After(wait) => wait,
        Fit::Never => unreachable!("the cost fits by itself"),
    };
    assert!(earliest <= wait, "the wait is {wait}, the lower bound {earliest}");
    assert!(
        behind.latest.is_none_or(|latest| wait <= latest),
        "the wait is {wait}, the bounds are {behind:?}"
    );
    if ahead.is_empty() {
        assert_eq!(
            (earliest, behind.latest),
            (wait, Some(wait)),
            "without requests ahead, the bounds are exact"
        );
    }
    behind
}

fn any_limit() -> impl Strategy<Value = Limit> {
    (0..6_usize).prop_flat_map(|kind| small_limit_of(Kind::ALL[kind]))
}

proptest! {
    #![proptest_config(cases(3_000))]

    #[test]
    fn the_wait_behind_others_lies_within_its_bounds(
        limits in vec(any_limit(), 1..3),
        used in vec((0..30_u64, 1..9_u64), 0..8),
        costs in vec(1..9_u64, 1..12),
    ) {
        let bounds = check(&limits[0], &used, &costs);
        prop_assert!(bounds.latest.is_some(), "one limit has both bounds");
        let builders = limits.iter().enumerate().map(|(index, limit)| {
            let n = *limit.numbers();
            let builder = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).anchor(n.anchor);
            builder.named(["one", "two"][index])
        });
        check(&Policy::all_of("all", builders).expect("the limit is valid"), &used, &costs);
    }

    #[test]
    fn the_wait_behind_others_of_a_slow_bucket_is_exact(
        (window, burst) in (1..30_u64, 1..9_u64),
        used in vec((0..30_u64, 1..9_u64), 0..8),
        costs in vec(1..9_u64, 1..12),
    ) {
        let bucket = Policy::token_bucket(1).per(Ticks(window)).burst(burst).limit().expect("the limit is valid");
        let FitBehind { earliest, latest } = check(&bucket, &used, &costs);
        let earliest = if let Fit::After(wait) = earliest { wait } else { Ticks::ZERO };
        prop_assert_eq!(Some(earliest), latest);
    }
}

#[test]
fn bounds_of_extreme_lines_stop_at_the_longest_time() {
    for kind in Kind::ALL {
        let limit = Policy::of(kind, 1).per(Ticks(1 << 61)).limit().expect("the limit is valid");
        let state = limit.fresh(Tick(i64::MAX));
        let behind = limit.fit_behind(&state, Tick(i64::MAX), u128::MAX, 1);
        assert!(matches!(behind.earliest, Fit::After(wait) if wait >= Ticks(1 << 61)), "{kind}");
        assert_eq!(limit.fit_behind(&state, Tick(0), u128::MAX, 2).earliest, Fit::Never, "{kind}");
    }
}
