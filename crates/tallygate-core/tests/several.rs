//! A policy of several limits decides as one rule.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Decision, DecodeError, Limit, LimitBuilder, Op, Part, Policy, Quota, Tick, Ticks,
    apply,
};
use tallygate_testkit::cases;

fn three() -> Policy {
    let limits: [LimitBuilder; 3] = [
        Policy::token_bucket(3).per(Ticks(7)).named("bucket"),
        Policy::fixed_window(5).per(Ticks(20)).named("window"),
        Policy::sliding_window_log(8).per(Ticks(60)).named("log"),
    ];
    Policy::all_of("three", limits).expect("the limit is valid")
}

proptest! {
    #![proptest_config(cases(500))]

    /// A policy decides as its limits do when they are applied together, also after its state was encoded.
    #[test]
    fn a_policy_decides_as_its_limits_do_together(
        trace in proptest::collection::vec((-9..30_i64, 0..5_u64), 1..40),
    ) {
        let policy = three();
        let mut together = policy.initial(Tick(0));
        let mut apart: Vec<_> = policy.limits().iter().map(|limit| limit.initial(Tick(0))).collect();
        let mut now = 0;
        for (gap, cost) in trace {
            now += gap;
            let one: Decision = policy.decide(&mut together, Tick(now), cost);
            let mut parts: Vec<_> = policy
                .limits()
                .iter()
                .zip(&mut apart)
                .map(|(rule, state)| Part { rule, state, op: Op::Check(cost) })
                .collect();
            let other = apply(&mut parts, Tick(now));
            let denied_by = other.denied_by;
            let other: Decision = other.answer.expect("there are three parts");
            let left = |index: usize| {
                let (rule, state) = (&policy.limits()[index], &mut apart[index].clone());
                let part = Part { rule, state, op: Op::Peek(0) };
                apply::<_, Decision>(&mut [part], Tick(now)).answer.expect("there is one part").remaining
            };
            let scarcest = (0..policy.limits().len()).min_by_key(|index| left(*index));
            prop_assert_eq!(one, Decision { denied_by, scarcest, ..other });
            let decided_by = policy.decided_by(&one).map(Limit::name);
            let expected = denied_by.or(scarcest).map(|index| policy.limits()[index].name());
            prop_assert_eq!(decided_by, expected);
            let mut bytes = Vec::new();
            policy.encode(&together, &mut bytes);
            together = policy.decode(&bytes).expect("the state was encoded by this rule");
        }
    }
}

#[test]
fn a_policy_is_as_tight_as_its_tightest_limit() {
    let policy = three();
    assert_eq!(policy.capacity(), 3);
    let mut state = policy.initial(Tick(0));
    assert!(policy.decide::<bool>(&mut state, Tick(0), 3));
    assert_eq!(policy.used(&state, Tick(0)).whole, 3);
    assert_eq!(policy.fresh_at(&state), Some(Tick(60)));
    let never: Decision = policy.decide(&mut state, Tick(0), 4);
    assert_eq!(never.retry_after, None);
    let window: Decision = policy.decide(&mut state, Tick(7), 3);
    assert_eq!(window.retry_after, Some(Ticks(13)), "the window has room for 2");
    assert_eq!((window.limit, window.remaining), (5, 2));
    assert_eq!(policy.charge(&mut state, Tick(7), -9), 9, "the bucket had nothing to return");
    let carried = policy.with_used(policy.used(&state, Tick(7)), Tick(7));
    assert_eq!(policy.fresh_at(&carried), Some(Tick(i64::MIN)), "the others returned everything");
}

#[test]
fn a_policy_returns_the_delay_of_its_leaky_bucket() {
    let limits = [
        Policy::fixed_window(9).per(Ticks(10)).named("window"),
        Policy::leaky_bucket(2).per(Ticks(10)).named("bucket"),
    ];
    let policy = Policy::all_of("both", limits).expect("the limit is valid");
    let mut state = policy.fresh(Tick(0));
    assert_eq!(state.len(), 2);
    assert!(policy.decide::<bool>(&mut state, Tick(0), 1));
    let second: Decision = policy.decide(&mut state, Tick(0), 1);
    assert_eq!((second.delay, second.limit), (Ticks(5), 2));
}

#[test]
fn the_state_of_another_policy_is_an_error() {
    let (policy, other) =
        (three(), Policy::gcra(1).per(Ticks(1)).build().expect("the limit is valid"));
    let mut bytes = Vec::new();
    policy.encode(&policy.initial(Tick(0)), &mut bytes);
    assert_eq!(other.decode(&bytes).err(), Some(DecodeError::OtherLimit));
    assert_eq!(policy.decode(&bytes[..9]).err(), Some(DecodeError::Truncated));
    assert_eq!(policy.decode(&[1]).err(), Some(DecodeError::Tag { found: 1, expected: 16 }));
}

#[test]
fn the_quota_is_that_of_the_limit_that_the_decision_is_about() {
    let policy = Policy::all_of(
        "api",
        [
            Policy::fixed_window(10).per(Ticks(100)).named("ten"),
            Policy::token_bucket(7).per(Ticks(30)).burst(5).named("seven"),
        ],
    )
    .expect("the policy is valid");
    let quota = |index: usize| Some(policy.limits()[index].quota());
    let mut state = policy.initial(Tick(0));
    let allowed: Decision = policy.decide(&mut state, Tick(0), 1);
    assert_eq!((allowed.scarcest, allowed.quota), (Some(1), quota(1)));
    // Both limits deny. The first one is reported, and the second one has less left.
    let denied: Decision = policy.decide(&mut state, Tick(0), 11);
    assert_eq!((denied.denied_by, denied.scarcest), (Some(0), Some(1)));
    assert_eq!(denied.quota, quota(0));
    assert_eq!(quota(1), Some(Quota { amount: 7, window: Ticks(30) }));
}
