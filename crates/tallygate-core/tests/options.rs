//! Compares the options of limits (shadow limits and penalties) with a simple model.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Decision, Fit, Kind, Limit, LimitRecord, LimitState, Op, Part, Penalty,
    Policy, PolicyError, Tick, Ticks, reserve, settle,
};
use tallygate_testkit::cases;

/// A limit that remembers every denial.
struct ModeledLimit {
    limit: Limit,
    state: LimitState,
    denials: Vec<Tick>,
    denied_until: Option<Tick>,
}

impl ModeledLimit {
    fn allows(&self, now: Tick, cost: Cost) -> bool {
        self.denied_until.is_none_or(|until| now >= until)
            && self.limit.allows(&self.state, now, cost)
    }

    fn wait(&self, now: Tick, cost: Cost) -> Option<u64> {
        let penalty = self.denied_until.map_or(0, |until| until.since(now).0);
        match self.limit.fit(&self.state, now, cost) {
            Fit::Now => Some(penalty),
            Fit::After(wait) => Some(wait.0.max(penalty)),
            Fit::Never => None,
        }
    }

    fn record_denial(&mut self, now: Tick) {
        let Some(penalty) = self.limit.penalty() else { return };
        if self.denied_until.is_some_and(|until| now < until) {
            return;
        }
        let window = self.limit.numbers().window;
        if self.denials.first().is_some_and(|first| now.since(*first) >= window) {
            self.denials.clear();
        }
        self.denials.push(now);
        if self.denials.len() as u64 == penalty.denials() {
            self.denials.clear();
            self.denied_until = now.after(penalty.duration());
        }
    }

    /// Applies a request to the limit. `go` is true if all limits allow the request.
    fn take(&mut self, now: Tick, cost: Cost, go: bool) {
        if !self.allows(now, cost) {
            if cost > 0 && cost <= self.limit.capacity() {
                self.record_denial(now);
            }
        } else if go && cost > 0 {
            self.limit.charge(&mut self.state, now, i128::from(cost));
        }
    }
}

fn any_policy() -> impl Strategy<Value = Policy> {
    let penalty = proptest::option::of((1..40_u64, 1..4_u64));
    let limit = (0..6_usize, 1..5_u64, 2..30_u64, any::<bool>(), penalty);
    proptest::collection::vec(limit, 1..4).prop_map(|limits| {
        let limits = limits.into_iter().enumerate().map(|(index, limit)| {
            let (kind, amount, window, shadow, penalty) = limit;
            let mut limit = Policy::of(Kind::ALL[kind], amount).per(Ticks(window));
            if shadow {
                limit = limit.shadow();
            }
            if let Some((duration, denials)) = penalty {
                limit = limit.penalty(Penalty::lasting(Ticks(duration)).after(denials));
            }
            limit.named(index.to_string())
        });
        Policy::all_of("options", limits).expect("the limit is valid")
    })
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn options_agree_with_the_model(
        policy in any_policy(),
        trace in proptest::collection::vec((0..12_i64, 0..4_u64), 1..60),
    ) {
        let mut model: Vec<_> = policy
            .limits()
            .iter()
            .map(|limit| ModeledLimit {
                limit: limit.clone(),
                state: limit.initial(Tick(0)),
                denials: Vec::new(),
                denied_until: None,
            })
            .collect();
        let mut state = policy.initial(Tick(0));
        let mut now = 0;
        for (gap, cost) in trace {
            now += gap;
            let at = Tick(now);
            let denied_by =
                model.iter().position(|one| !one.limit.is_shadow() && !one.allows(at, cost));
            let shadow_denied_by =
                model.iter().position(|one| one.limit.is_shadow() && !one.allows(at, cost));
            let peeked: Decision =
                Part { rule: &policy, state: &mut state, op: Op::Peek(cost) }.step(at, true).0;
            let decision: Decision = policy.decide(&mut state, at, cost);
            prop_assert_eq!(peeked, decision, "a peek returns what a check returns");
            for one in &mut model {
                one.take(at, cost, denied_by.is_none());
            }
            prop_assert_eq!(decision.denied_by, denied_by);
            prop_assert_eq!(decision.shadow_denied_by, shadow_denied_by);
            prop_assert_eq!(decision.allowed, denied_by.is_none());
            let enforced = || model.iter().filter(|one| !one.limit.is_shadow());
            if denied_by.is_some() {
                let waits: Option<Vec<u64>> = enforced().map(|one| one.wait(at, cost)).collect();
                let longest = waits.and_then(|waits| waits.into_iter().max()).map(Ticks);
                prop_assert_eq!(decision.retry_after, longest);
            }
            let remaining = |one: &ModeledLimit| (0..=9).rev().find(|cost| one.allows(at, *cost));
            let least = enforced().map(|one| remaining(one).unwrap_or(0)).min();
            prop_assert_eq!(decision.remaining, least.unwrap_or(Cost::MAX));
            let scarcest = (0..model.len())
                .filter(|index| !model[*index].limit.is_shadow())
                .min_by_key(|index| remaining(&model[*index]).unwrap_or(0));
            prop_assert_eq!(decision.scarcest, scarcest);

            // The state survives its encoding, and a fresh state has no effect.
            let mut bytes = Vec::new();
            policy.encode(&state, &mut bytes);
            state = policy.decode(&bytes).expect("the state was encoded by this rule");
            if policy.fresh_at(&state).is_some_and(|fresh| fresh <= at) {
                prop_assert!(model.iter().all(|one| one.denials.is_empty()
                    || at.since(one.denials[0]) >= one.limit.numbers().window));
                prop_assert!(model.iter().all(|one| one.allows(at, one.limit.capacity())));
            }
        }
    }
}

fn login() -> Policy {
    let limit = Policy::fixed_window(2).per(Ticks(10));
    limit.penalty(Penalty::lasting(Ticks(100)).after(2)).build().expect("the limit is valid")
}

fn check(policy: &Policy, state: &mut Box<[LimitRecord]>, now: i64) -> Decision {
    policy.decide(state, Tick(now), 1)
}

#[test]
fn a_penalty_denies_until_it_ends_or_is_reset() {
    let policy = login();
    let mut state = policy.initial(Tick(0));
    assert!(check(&policy, &mut state, 0).allowed && check(&policy, &mut state, 0).allowed);
    assert_eq!(check(&policy, &mut state, 1).retry_after, Some(Ticks(9)));
    let caught = check(&policy, &mut state, 2);
    assert_eq!((caught.retry_after, caught.remaining), (Some(Ticks(100)), 0));
    assert_eq!(caught.reset_after, Ticks(100));
    assert_eq!(
        check(&policy, &mut state, 50).retry_after,
        Some(Ticks(52)),
        "requests do not extend the penalty"
    );
    assert_eq!(policy.fresh_at(&state), Some(Tick(102)));
    assert!(!policy.decide::<bool>(&mut state, Tick(60), 0), "a cost of 0 is denied too");
    let mut ended = state.clone();
    assert!(check(&policy, &mut ended, 102).allowed);
    let mut part = Part { rule: &policy, state: &mut state, op: Op::Reset };
    let _ = part.step::<Decision>(Tick(60), true);
    assert!(check(&policy, &mut state, 60).allowed);
}

/// A cost above the capacity is a mistake of the caller.
#[test]
fn a_cost_above_the_capacity_does_not_count_as_a_denial() {
    let policy = login();
    let mut state = policy.initial(Tick(0));
    for _ in 0..5 {
        assert_eq!(policy.decide::<Decision>(&mut state, Tick(0), 3).retry_after, None);
    }
    assert!(check(&policy, &mut state, 0).allowed);
}

/// A clock that was set back extends a penalty by at most a window.
///
/// Fault B1.
#[test]
fn a_penalty_does_not_outlast_a_clock_set_back() {
    let policy = login();
    let mut state = policy.initial(Tick(1000));
    for _ in 0..4 {
        let _ = check(&policy, &mut state, 1000);
    }
    let denied = check(&policy, &mut state, 0);
    assert_eq!(denied.retry_after, Some(Ticks(100)));
    assert!(check(&policy, &mut state, 100).allowed);
}

#[test]
fn a_change_of_policy_keeps_what_was_used_and_the_penalty() {
    let policy = login();
    let mut state = policy.initial(Tick(0));
    for _ in 0..4 {
        let _ = check(&policy, &mut state, 0);
    }
    let milder = Policy::token_bucket(9).per(Ticks(9));
    let shorter =
        milder.clone().penalty(Penalty::lasting(Ticks(30))).build().expect("the limit is valid");
    let carried = shorter.carry(&policy, &state, Tick(1));
    let facts = shorter.facts(&carried, Tick(1), None);
    assert_eq!((facts.remaining, facts.reset_after), (0, Ticks(30)));
    assert_eq!(shorter.used(&carried, Tick(1)).whole, 2);
    let without = milder.build().expect("the limit is valid");
    let carried = without.carry(&policy, &state, Tick(1));
    assert_eq!(without.facts(&carried, Tick(1), None).remaining, 7);
}

#[test]
fn limits_carry_over_by_name_and_new_ones_start_with_the_most_used() {
    let limits = |names: [(&str, u64); 2]| {
        let limits = names.map(|(name, n)| Policy::fixed_window(n).per(Ticks(100)).named(name));
        Policy::all_of("several", limits).expect("the limit is valid")
    };
    let (old, new) = (limits([("a", 5), ("b", 9)]), limits([("b", 9), ("c", 20)]));
    let mut state = old.initial(Tick(0));
    assert!(old.decide::<bool>(&mut state, Tick(0), 3));
    let carried = new.carry(&old, &state, Tick(0));
    assert_eq!(new.facts(&carried, Tick(0), None).remaining, 6, "b keeps its state");
    let mut carried = carried;
    assert_eq!(new.charge(&mut carried, Tick(0), -3), 0, "c has used as much");
}

#[test]
fn invalid_penalties_are_errors() {
    let limit = || Policy::fixed_window(2).per(Ticks(10));
    let nothing = limit().penalty(Penalty::lasting(Ticks(1)).after(0)).build().unwrap_err();
    assert_eq!(nothing, PolicyError::PenaltyAfterZeroDenials);
    assert_eq!(nothing.to_string(), "a penalty must come after at least 1 denial (got 0)");
    for duration in [Ticks(0), Ticks((1 << 62) + 1)] {
        let error = limit().penalty(Penalty::lasting(duration)).build().unwrap_err();
        assert_eq!(error, PolicyError::PenaltyDuration { duration });
    }
    assert!(limit().penalty(Penalty::lasting(Penalty::MAX)).build().is_ok());
}

/// A limit without a penalty cannot have produced such a state.
#[test]
fn a_penalty_state_under_a_limit_without_penalty_is_an_error() {
    let (with, without) =
        (login(), Policy::fixed_window(2).per(Ticks(10)).build().expect("the limit is valid"));
    let mut state = with.initial(Tick(0));
    for _ in 0..3 {
        let _ = check(&with, &mut state, 0);
    }
    let mut bytes = Vec::new();
    with.encode(&state, &mut bytes);
    assert!(with.decode(&bytes).is_ok() && without.decode(&bytes).is_err());
}

/// A settlement returns units to the window of the charge.
#[test]
fn a_settlement_returns_only_what_still_counts() {
    // The times of a charge of 2, of a charge of 1 and of the settlement; the units of 2 without effect.
    let cases: [(Kind, i64, i64, i64, u128); 14] = [
        (Kind::TokenBucket, 0, 1, 1, 1), // half a unit has drained
        (Kind::TokenBucket, 0, 0, 0, 0),
        (Kind::TokenBucket, 0, 99, 99, 2),
        (Kind::TokenBucket, 0, 3, 3, 2),
        (Kind::Gcra, 0, 1, 1, 1),
        (Kind::LeakyBucket, 0, 1, 1, 1),
        (Kind::FixedWindow, 0, 9, 9, 0),
        (Kind::FixedWindow, 0, 10, 10, 2),
        (Kind::SlidingWindowLog, 0, 9, 9, 0),
        (Kind::SlidingWindowLog, 0, 10, 10, 2),
        (Kind::SlidingWindowCounter, 0, 9, 9, 0),
        (Kind::SlidingWindowCounter, 5, 11, 11, 0), // from the previous window
        (Kind::SlidingWindowCounter, 5, 11, 19, 0),
        (Kind::SlidingWindowCounter, 5, 19, 20, 2),
    ];
    for (kind, charged, other, now, dropped) in cases {
        let policy = Policy::of(kind, 5).per(Ticks(10)).build().expect("the limit is valid");
        let mut state = policy.initial(Tick(charged));
        let (allowed, receipt) = reserve::<_, bool>(&policy, &mut state, Tick(charged), 2);
        assert!(allowed && policy.decide::<bool>(&mut state, Tick(other), 1));
        let (_, actual) = settle::<_, Decision>(&policy, &mut state, Tick(now), -2, &receipt);
        assert_eq!(actual, dropped, "{kind} charged at {charged}, settled at {now}");
    }
}

/// A late change of policy does not move the key back in time.
///
/// Fault B4.
#[test]
fn a_late_change_of_policy_earns_nothing_twice() {
    for from in Kind::ALL {
        for to in Kind::ALL {
            let old = Policy::of(from, 10).per(Ticks(10)).build().expect("the limit is valid");
            let new = Policy::of(to, 10).per(Ticks(20)).build().expect("the limit is valid");
            let mut state = old.initial(Tick(100));
            assert!(old.decide::<bool>(&mut state, Tick(100), 10));
            let mut late = new.carry(&old, &state, Tick(91));
            let mut in_time = new.carry(&old, &state, Tick(100));
            for now in 100..140 {
                let both = [&mut late, &mut in_time]
                    .map(|state| new.decide::<Decision>(state, Tick(now), 1));
                assert_eq!(both[0], both[1], "{from} to {to} at {now}");
            }
        }
    }
}
