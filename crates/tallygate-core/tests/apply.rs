//! `apply` decides several limits in one step, all or nothing.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Applied, Cost, Decision, Limit, LimitState, Op, Part, Policy, Tick, Ticks, apply,
};
use tallygate_testkit::{any_limit, cases};

struct Keyed {
    limit: Limit,
    state: LimitState,
}

fn check(parts: &mut [Keyed], op: Op, now: Tick) -> Applied<Decision> {
    let mut parts: Vec<_> =
        parts.iter_mut().map(|Keyed { limit, state }| Part { rule: &*limit, state, op }).collect();
    apply(&mut parts, now)
}

fn remaining(part: &Keyed, now: Tick) -> Cost {
    part.limit.facts(&part.state, now, None).remaining
}

proptest! {
    #![proptest_config(cases(400))]

    /// Either all limits are charged or none, and the answer is the strictest one.
    #[test]
    fn several_limits_are_all_or_nothing(
        limits in proptest::collection::vec(any_limit(), 1..5),
        trace in proptest::collection::vec((0..40_i64, 0..6_u64), 1..30),
    ) {
        let mut parts: Vec<_> = limits
            .into_iter()
            .map(|limit| Keyed { state: limit.initial(Tick(0)), limit })
            .collect();
        let mut now = 0;
        for (gap, cost) in trace {
            now += gap;
            let at = Tick(now);
            let before: Vec<Cost> = parts.iter().map(|part| remaining(part, at)).collect();
            let fits: Vec<bool> =
                parts.iter().map(|part| part.limit.allows(&part.state, at, cost)).collect();
            let applied = check(&mut parts, Op::Check(cost), at);

            prop_assert_eq!(applied.denied_by, fits.iter().position(|fits| !fits));
            let go = applied.denied_by.is_none();
            for (index, part) in parts.iter().enumerate() {
                let charged = if go { cost } else { 0 };
                prop_assert_eq!(remaining(part, at), before[index] - charged);
            }
            let decision = applied.answer.expect("there are parts");
            prop_assert_eq!(decision.allowed, go);
            let least = parts.iter().map(|part| remaining(part, at)).min();
            prop_assert_eq!(Some(decision.remaining), least);
            let never = parts.iter().any(|part| cost > part.limit.capacity());
            prop_assert_eq!(decision.retry_after.is_none(), never);
            if let (false, Some(wait)) = (go, decision.retry_after) {
                let then = |wait: u64| {
                    let then = at.after(Ticks(wait)).expect("the time is in range");
                    parts.iter().all(|part| part.limit.allows(&part.state, then, cost))
                };
                prop_assert!(then(wait.0) && !then(wait.0 - 1), "it is the longest wait of all limits");
            }
        }
    }
}

fn pair() -> [Keyed; 2] {
    let tight = Policy::fixed_window(1).per(Ticks(10)).limit().expect("the limit is valid");
    let loose = Policy::token_bucket(5).per(Ticks(10)).limit().expect("the limit is valid");
    [tight, loose].map(|limit| Keyed { state: limit.initial(Tick(0)), limit })
}

/// If one limit denies a request, the others are not charged.
#[test]
fn a_denied_request_charges_no_limit() {
    let mut parts = pair();
    assert_eq!(check(&mut parts, Op::Check(1), Tick(0)).denied_by, None);
    assert_eq!(check(&mut parts, Op::Check(1), Tick(0)).denied_by, Some(0));
    assert_eq!(remaining(&parts[1], Tick(0)), 4);
}

#[test]
fn peeking_answers_as_a_check_would_and_changes_nothing() {
    let mut parts = pair();
    let peeked = check(&mut parts, Op::Peek(1), Tick(0));
    assert_eq!(check(&mut parts, Op::Peek(1), Tick(0)), peeked);
    assert_eq!(check(&mut parts, Op::Check(1), Tick(0)), peeked);
}

#[test]
fn refunds_and_resets_reach_every_limit() {
    let mut parts = pair();
    let _ = check(&mut parts, Op::Check(1), Tick(0));
    assert_eq!(check(&mut parts, Op::Force(-1), Tick(0)).dropped, 0);
    assert_eq!(check(&mut parts, Op::Check(1), Tick(0)).denied_by, None);
    assert_eq!(
        check(&mut parts, Op::Force(-3), Tick(0)).dropped,
        2 + 2,
        "each had 1 unit to return"
    );
    let _ = check(&mut parts, Op::Force(9), Tick(0));
    let _ = check(&mut parts, Op::Reset, Tick(0));
    assert_eq!([remaining(&parts[0], Tick(0)), remaining(&parts[1], Tick(0))], [1, 5]);
}
