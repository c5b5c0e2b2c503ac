//! Several limits as one step: all or nothing.

use proptest::prelude::*;
use tollgate_core::{
    Algorithm, Applied, Cost, Decision, Limit, LimitState, Op, Part, Policy, Tick, Ticks, apply,
};
use tollgate_testkit::{any_limit, cases};

struct Keyed {
    limit: Limit,
    state: LimitState,
    shadow: bool,
}

fn ask(parts: &mut [Keyed], op: Op, now: Tick) -> Applied<Decision> {
    let mut parts: Vec<_> = parts
        .iter_mut()
        .map(|Keyed { limit, state, shadow }| Part { rule: &*limit, state, op, shadow: *shadow })
        .collect();
    apply(&mut parts, now)
}

fn remaining(part: &Keyed, now: Tick) -> Cost {
    part.limit.facts(&part.state, now, None).remaining
}

proptest! {
    #![proptest_config(cases(400))]

    /// Either every limit is charged or none, and the answer is the tightest of all.
    #[test]
    fn several_limits_are_all_or_nothing(
        limits in proptest::collection::vec((any_limit(), any::<bool>()), 1..5),
        trace in proptest::collection::vec((0..40_i64, 0..6_u64), 1..30),
    ) {
        let mut parts: Vec<_> = limits
            .into_iter()
            .map(|(limit, shadow)| Keyed { state: limit.first(Tick(0)), limit, shadow })
            .collect();
        let mut now = 0;
        for (gap, cost) in trace {
            now += gap;
            let at = Tick(now);
            let before: Vec<Cost> = parts.iter().map(|part| remaining(part, at)).collect();
            let fits: Vec<bool> =
                parts.iter().map(|part| part.limit.admits(&part.state, at, cost)).collect();
            let told = ask(&mut parts, Op::Check(cost), at);

            let refused = |shadow| {
                (0..parts.len()).find(|&index| parts[index].shadow == shadow && !fits[index])
            };
            prop_assert_eq!(told.refused_by, refused(false));
            prop_assert_eq!(told.shadow_refused_by, refused(true));
            let go = told.refused_by.is_none();
            for (index, part) in parts.iter().enumerate() {
                let charged = if go && fits[index] { cost } else { 0 };
                prop_assert_eq!(remaining(part, at), before[index] - charged);
            }
            let enforced = || parts.iter().filter(|part| !part.shadow);
            prop_assert_eq!(told.answer.is_some(), enforced().count() > 0);
            if let Some(decision) = told.answer {
                prop_assert_eq!(decision.allowed, go);
                let least = enforced().map(|part| remaining(part, at)).min();
                prop_assert_eq!(Some(decision.remaining), least);
                let never = enforced().any(|part| cost > part.limit.capacity());
                prop_assert_eq!(decision.retry_after.is_none(), never);
                if let (false, Some(wait)) = (go, decision.retry_after) {
                    let then = |wait: u64| {
                        let then = at.after(Ticks(wait)).expect("near");
                        enforced().all(|part| part.limit.admits(&part.state, then, cost))
                    };
                    prop_assert!(then(wait.0) && !then(wait.0 - 1), "the longest wait of all");
                }
            }
        }
    }
}

fn pair(shadow: bool) -> [Keyed; 2] {
    let tight = Policy::fixed_window(1).per(Ticks(10)).limit().expect("valid");
    let loose = Policy::token_bucket(5).per(Ticks(10)).limit().expect("valid");
    [(tight, shadow), (loose, false)].map(|(limit, shadow)| Keyed {
        state: limit.first(Tick(0)),
        limit,
        shadow,
    })
}

/// A refusal of one limit spares the others.
#[test]
fn a_refused_request_charges_no_limit() {
    let mut parts = pair(false);
    assert_eq!(ask(&mut parts, Op::Check(1), Tick(0)).refused_by, None);
    assert_eq!(ask(&mut parts, Op::Check(1), Tick(0)).refused_by, Some(0));
    assert_eq!(remaining(&parts[1], Tick(0)), 4);
}

#[test]
fn a_shadow_limit_tells_and_refuses_nobody() {
    let mut parts = pair(true);
    assert_eq!(ask(&mut parts, Op::Check(1), Tick(0)).shadow_refused_by, None);
    let second = ask(&mut parts, Op::Check(1), Tick(0));
    assert_eq!((second.refused_by, second.shadow_refused_by), (None, Some(0)));
    assert_eq!(second.answer.map(|decision| (decision.allowed, decision.limit)), Some((true, 5)));
    assert_eq!(remaining(&parts[0], Tick(0)), 0, "not charged for what it would have refused");
    assert_eq!(remaining(&parts[1], Tick(0)), 3);
}

#[test]
fn peeking_answers_as_a_check_would_and_changes_nothing() {
    let mut parts = pair(false);
    let peeked = ask(&mut parts, Op::Peek(1), Tick(0));
    assert_eq!(ask(&mut parts, Op::Peek(1), Tick(0)), peeked);
    assert_eq!(ask(&mut parts, Op::Check(1), Tick(0)), peeked);
}

#[test]
fn refunds_and_resets_reach_every_limit() {
    let mut parts = pair(false);
    let _ = ask(&mut parts, Op::Check(1), Tick(0));
    assert_eq!(ask(&mut parts, Op::Force(-1), Tick(0)).dropped, 0);
    assert_eq!(ask(&mut parts, Op::Check(1), Tick(0)).refused_by, None);
    assert_eq!(ask(&mut parts, Op::Force(-3), Tick(0)).dropped, 2 + 2, "each had 1 to give back");
    let _ = ask(&mut parts, Op::Force(9), Tick(0));
    let _ = ask(&mut parts, Op::Reset, Tick(0));
    assert_eq!([remaining(&parts[0], Tick(0)), remaining(&parts[1], Tick(0))], [1, 5]);
}
