//! The options of limits in a policy: shadows and penalties, against a model that knows nothing of
//! how they are kept.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Decision, Fit, Kind, Limit, LimitState, Op, Part, Penalty, Policy,
    PolicyError, Standing, Tick, Ticks, reserve, settle,
};
use tallygate_testkit::cases;

/// One limit, with every refusal remembered.
struct Modelled {
    limit: Limit,
    state: LimitState,
    refusals: Vec<Tick>,
    refused_until: Option<Tick>,
}

impl Modelled {
    fn lets(&self, now: Tick, cost: Cost) -> bool {
        self.refused_until.is_none_or(|until| now >= until)
            && self.limit.admits(&self.state, now, cost)
    }

    fn wait(&self, now: Tick, cost: Cost) -> Option<u64> {
        let penalty = self.refused_until.map_or(0, |until| until.since(now).0);
        match self.limit.fit(&self.state, now, cost) {
            Fit::Now => Some(penalty),
            Fit::After(wait) => Some(wait.0.max(penalty)),
            Fit::Never => None,
        }
    }

    fn refuse(&mut self, now: Tick) {
        let Some(penalty) = self.limit.penalty() else { return };
        if self.refused_until.is_some_and(|until| now < until) {
            return;
        }
        let window = self.limit.numbers().window;
        if self.refusals.first().is_some_and(|first| now.since(*first) >= window) {
            self.refusals.clear();
        }
        self.refusals.push(now);
        if self.refusals.len() as u64 == penalty.refusals() {
            self.refusals.clear();
            self.refused_until = now.after(penalty.lasts());
        }
    }

    /// What a request does to a limit that has refused it, or not, when all have been asked.
    fn take(&mut self, now: Tick, cost: Cost, go: bool) {
        if !self.lets(now, cost) {
            if cost > 0 && cost <= self.limit.capacity() {
                self.refuse(now);
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
            if let Some((lasts, after)) = penalty {
                limit = limit.penalty(Penalty::lasting(Ticks(lasts)).after(after));
            }
            limit.named(index.to_string())
        });
        Policy::all_of("options", limits).expect("valid")
    })
}

proptest! {
    #![proptest_config(cases(1000))]

    #[test]
    fn options_do_as_the_model_says(
        policy in any_policy(),
        trace in proptest::collection::vec((0..12_i64, 0..4_u64), 1..60),
    ) {
        let mut model: Vec<_> = policy
            .limits()
            .iter()
            .map(|limit| Modelled {
                limit: limit.clone(),
                state: limit.first(Tick(0)),
                refusals: Vec::new(),
                refused_until: None,
            })
            .collect();
        let mut state = policy.first(Tick(0));
        let mut now = 0;
        for (gap, cost) in trace {
            now += gap;
            let at = Tick(now);
            let refused_by =
                model.iter().position(|one| !one.limit.is_shadow() && !one.lets(at, cost));
            let shadow_refused_by =
                model.iter().position(|one| one.limit.is_shadow() && !one.lets(at, cost));
            let peeked: Decision =
                Part { rule: &policy, state: &mut state, op: Op::Peek(cost) }.step(at, true).0;
            let told: Decision = policy.decide(&mut state, at, cost);
            prop_assert_eq!(peeked, told, "a peek is what a check would answer");
            for one in &mut model {
                one.take(at, cost, refused_by.is_none());
            }
            prop_assert_eq!(told.refused_by, refused_by);
            prop_assert_eq!(told.shadow_refused_by, shadow_refused_by);
            prop_assert_eq!(told.allowed, refused_by.is_none());
            let enforced = || model.iter().filter(|one| !one.limit.is_shadow());
            if refused_by.is_some() {
                let waits: Option<Vec<u64>> = enforced().map(|one| one.wait(at, cost)).collect();
                let longest = waits.and_then(|waits| waits.into_iter().max()).map(Ticks);
                prop_assert_eq!(told.retry_after, longest);
            }
            let remaining = |one: &Modelled| (0..=9).rev().find(|cost| one.lets(at, *cost));
            let least = enforced().map(|one| remaining(one).unwrap_or(0)).min();
            prop_assert_eq!(told.remaining, least.unwrap_or(Cost::MAX));
            let scarcest = (0..model.len())
                .filter(|index| !model[*index].limit.is_shadow())
                .min_by_key(|index| remaining(&model[*index]).unwrap_or(0));
            prop_assert_eq!(told.scarcest, scarcest);

            // Kept and read back, it is the same; and whoever dropped it when it says it is fresh
            // would not be noticed.
            let mut bytes = Vec::new();
            policy.encode(&state, &mut bytes);
            state = policy.decode(&bytes).expect("its own");
            if policy.fresh_at(&state).is_some_and(|fresh| fresh <= at) {
                prop_assert!(model.iter().all(|one| one.refusals.is_empty()
                    || at.since(one.refusals[0]) >= one.limit.numbers().window));
                prop_assert!(model.iter().all(|one| one.lets(at, one.limit.capacity())));
            }
        }
    }
}

fn login() -> Policy {
    let limit = Policy::fixed_window(2).per(Ticks(10));
    limit.penalty(Penalty::lasting(Ticks(100)).after(2)).build().expect("valid")
}

fn ask(policy: &Policy, state: &mut Box<[Standing]>, now: i64) -> Decision {
    policy.decide(state, Tick(now), 1)
}

#[test]
fn a_penalty_is_seen_served_and_cleared() {
    let policy = login();
    let mut state = policy.first(Tick(0));
    assert!(ask(&policy, &mut state, 0).allowed && ask(&policy, &mut state, 0).allowed);
    assert_eq!(ask(&policy, &mut state, 1).retry_after, Some(Ticks(9)));
    let caught = ask(&policy, &mut state, 2);
    assert_eq!((caught.retry_after, caught.remaining), (Some(Ticks(100)), 0));
    assert_eq!(caught.reset_after, Ticks(100));
    assert_eq!(
        ask(&policy, &mut state, 50).retry_after,
        Some(Ticks(52)),
        "asking prolongs nothing"
    );
    assert_eq!(policy.fresh_at(&state), Some(Tick(102)));
    assert!(!policy.decide::<bool>(&mut state, Tick(60), 0), "nor does a look pass");
    let mut served = state.clone();
    assert!(ask(&policy, &mut served, 102).allowed);
    let mut part = Part { rule: &policy, state: &mut state, op: Op::Reset };
    let _ = part.step::<Decision>(Tick(60), true);
    assert!(ask(&policy, &mut state, 60).allowed);
}

/// A cost that can never fit says nothing about the client.
#[test]
fn what_can_never_fit_is_not_held_against_a_key() {
    let policy = login();
    let mut state = policy.first(Tick(0));
    for _ in 0..5 {
        assert_eq!(policy.decide::<Decision>(&mut state, Tick(0), 3).retry_after, None);
    }
    assert!(ask(&policy, &mut state, 0).allowed);
}

/// B1: a clock that was set back prolongs a penalty by at most a window.
#[test]
fn b1_a_penalty_does_not_outlast_a_clock_set_back() {
    let policy = login();
    let mut state = policy.first(Tick(1000));
    for _ in 0..4 {
        let _ = ask(&policy, &mut state, 1000);
    }
    let refused = ask(&policy, &mut state, 0);
    assert_eq!(refused.retry_after, Some(Ticks(100)));
    assert!(ask(&policy, &mut state, 100).allowed);
}

#[test]
fn a_change_of_policy_keeps_what_was_used_and_the_penalty() {
    let policy = login();
    let mut state = policy.first(Tick(0));
    for _ in 0..4 {
        let _ = ask(&policy, &mut state, 0);
    }
    let milder = Policy::token_bucket(9).per(Ticks(9));
    let shorter = milder.clone().penalty(Penalty::lasting(Ticks(30))).build().expect("valid");
    let carried = shorter.carry(&policy, &state, Tick(1));
    let facts = shorter.facts(&carried, Tick(1), None);
    assert_eq!((facts.remaining, facts.reset_after), (0, Ticks(30)));
    assert_eq!(shorter.used(&carried, Tick(1)).whole, 2);
    let without = milder.build().expect("valid");
    let carried = without.carry(&policy, &state, Tick(1));
    assert_eq!(without.facts(&carried, Tick(1), None).remaining, 7);
}

#[test]
fn limits_take_over_from_their_namesakes_and_new_ones_from_the_most_used() {
    let limits = |names: [(&str, u64); 2]| {
        let limits = names.map(|(name, n)| Policy::fixed_window(n).per(Ticks(100)).named(name));
        Policy::all_of("several", limits).expect("valid")
    };
    let (old, new) = (limits([("a", 5), ("b", 9)]), limits([("b", 9), ("c", 20)]));
    let mut state = old.first(Tick(0));
    assert!(old.decide::<bool>(&mut state, Tick(0), 3));
    let carried = new.carry(&old, &state, Tick(0));
    assert_eq!(new.facts(&carried, Tick(0), None).remaining, 6, "b goes on");
    let mut carried = carried;
    assert_eq!(new.charge(&mut carried, Tick(0), -3), 0, "and c has as much used");
}

#[test]
fn penalties_that_make_no_sense_are_refused() {
    let limit = || Policy::fixed_window(2).per(Ticks(10));
    let nothing = limit().penalty(Penalty::lasting(Ticks(1)).after(0)).build().unwrap_err();
    assert_eq!(nothing, PolicyError::PenaltyAfterNothing);
    assert_eq!(nothing.to_string(), "a penalty after 0 refusals refuses everybody; use at least 1");
    for lasts in [Ticks(0), Ticks((1 << 62) + 1)] {
        let error = limit().penalty(Penalty::lasting(lasts)).build().unwrap_err();
        assert_eq!(error, PolicyError::PenaltyLasts { lasts });
    }
    assert!(limit().penalty(Penalty::lasting(Penalty::MAX)).build().is_ok());
}

/// A penalty in the state of a limit that has none was not left there by us.
#[test]
fn a_record_without_a_penalty_is_refused() {
    let (with, without) = (login(), Policy::fixed_window(2).per(Ticks(10)).build().expect("valid"));
    let mut state = with.first(Tick(0));
    for _ in 0..3 {
        let _ = ask(&with, &mut state, 0);
    }
    let mut bytes = Vec::new();
    with.encode(&state, &mut bytes);
    assert!(with.decode(&bytes).is_ok() && without.decode(&bytes).is_err());
}

/// A settlement acts where the charge was.
#[test]
fn a_settlement_returns_only_what_still_counts() {
    // The time of a charge of 2, of another of 1, of the settlement; how many of 2 units have no effect.
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
        let policy = Policy::of(kind, 5).per(Ticks(10)).build().expect("valid");
        let mut state = policy.first(Tick(charged));
        let (allowed, receipt) = reserve::<_, bool>(&policy, &mut state, Tick(charged), 2);
        assert!(allowed && policy.decide::<bool>(&mut state, Tick(other), 1));
        let (_, told) = settle::<_, Decision>(&policy, &mut state, Tick(now), -2, &receipt);
        assert_eq!(told, dropped, "{kind} charged at {charged}, settled at {now}");
    }
}

/// B4: a thread that comes late with a change of policy does not take the key back in time.
#[test]
fn b4_a_late_change_of_policy_earns_nothing_twice() {
    for from in Kind::ALL {
        for to in Kind::ALL {
            let old = Policy::of(from, 10).per(Ticks(10)).build().expect("valid");
            let new = Policy::of(to, 10).per(Ticks(20)).build().expect("valid");
            let mut state = old.first(Tick(100));
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
