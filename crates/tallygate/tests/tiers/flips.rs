//! Clients that are checked under several policies: the policies do not add up, and no client is locked out.

use std::sync::Arc;

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::algorithm::Algorithm as _;
use tallygate::store::{Allowance, ClientState};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Ask, Cost, Decision, Kind, Limit, Policy, Tick, Ticks};
use tallygate_testkit::cases;

fn policy(kind: Kind, limit: Cost, window: u64, debt: Option<Cost>) -> Policy {
    let limit = Policy::of(kind, limit).per(Ticks(window));
    let limit = match debt {
        Some(debt) => limit.debt(debt),
        None => limit,
    };
    limit.build().expect("valid")
}

/// Uses all remaining units under each policy in turn, every `step` ticks for `length` ticks. Returns how many units
/// were allowed.
fn greedy(policies: Vec<Policy>, length: i64, step: usize) -> Cost {
    let rules: Vec<ClientRule> = policies.into_iter().map(ClientRule::of).collect();
    let mut state = rules[0].initial(Tick(0));
    let mut allowed = 0;
    for now in (0..length).step_by(step).map(Tick) {
        for rule in &rules {
            while rule.decide::<bool>(&mut state, now, 1) {
                allowed += 1;
            }
        }
    }
    allowed
}

/// Fault K3.
#[test]
fn two_fixed_windows_do_not_add_up() {
    let windows = [60, 61].map(|window| policy(Kind::FixedWindow, 60, window, None));
    let allowed = greedy(windows.to_vec(), 3_600, 1);
    assert!((3_500..=3_600 + 120).contains(&allowed), "{allowed} in an hour");
}

/// Fault K3.
#[test]
fn four_tiers_do_not_add_up_whatever_their_algorithm_and_debt() {
    for kind in Kind::ALL {
        for debt in [None, Some(0)] {
            let tiers = (100..108).step_by(2).map(|window| policy(kind, 10, window, debt));
            let allowed = greedy(tiers.collect(), 100_000, 1);
            assert!((9_000..=10_000 + 40).contains(&allowed), "{allowed} of {kind}, debt {debt:?}");
        }
    }
}

/// Fault K3.
#[test]
fn more_policies_than_are_listed_do_not_add_up_either() {
    for kind in Kind::ALL {
        // A fast policy that is soon fresh, and slow ones of all sizes, which a client uses in turn.
        let slow = (1..=12).map(|size| policy(kind, 10 * size, 6_000 + size, Some(0)));
        let fast = policy(kind, 100, 100, Some(0));
        let most = 100 + (1..=12).map(|size| 10 * size).sum::<Cost>();
        let allowed = greedy([fast].into_iter().chain(slow).collect(), 10_000, 7);
        assert!(allowed <= 10_000 + most, "{allowed} of {kind}");
    }
}

/// The debt under a policy stays while a client is checked under other policies.
///
/// Fault J7.
#[test]
fn visiting_short_tiers_does_not_clear_a_long_one() {
    for kind in Kind::ALL {
        for debt in [None, Some(0)] {
            let long = ClientRule::of(policy(kind, 100, 86_400, debt));
            let mut state = long.initial(Tick(0));
            assert!(long.decide::<bool>(&mut state, Tick(0), 100));
            for size in 0..20 {
                let short = ClientRule::of(policy(kind, 1_000 + size, 1, debt));
                let now = Tick(2 * i64::try_from(size).expect("small"));
                let _ = short.decide::<bool>(&mut state, now, 900);
            }
            let asked: Decision = long.decide(&mut state, Tick(41), 50);
            assert!(!asked.allowed, "{kind}, debt {debt:?}");
            assert_eq!(asked.remaining, 0, "{kind}, debt {debt:?}");
        }
    }
}

/// A client of one policy is decided as by that policy alone, also long after a change of rules.
#[test]
fn a_client_that_is_back_at_one_policy_is_decided_by_that_policy_alone() {
    let (old, new) =
        (policy(Kind::TokenBucket, 10, 100, None), policy(Kind::TokenBucket, 20, 100, None));
    let (old, new) = (ClientRule::of(old), ClientRule::of(new));
    let mut state = old.initial(Tick(0));
    assert!(old.decide::<bool>(&mut state, Tick(0), 10));
    let mut now = 0;
    // It sends requests without a pause, so it is never fresh under the new policy.
    let mut allowed = 0;
    while now < 1_000 {
        now += 1;
        allowed += u32::from(new.decide::<bool>(&mut state, Tick(now), 1));
        assert!(state.has_usage(&new, Tick(now)));
    }
    assert_eq!(allowed, 209, "10.1 at the first tick, and 0.2 with each other");
    let _ = new.decide::<bool>(&mut state, Tick(now + 1_000), 1);
    assert_eq!(state.policies().count(), 1);
    assert_eq!(state.allowances().count(), 0);
}

trait HasUsage {
    fn has_usage(&self, rule: &ClientRule, now: Tick) -> bool;
}

impl HasUsage for ClientState {
    fn has_usage(&self, rule: &ClientRule, now: Tick) -> bool {
        rule.fresh_at(self).is_none_or(|fresh| fresh > now)
    }
}

/// The allowance of a policy has its own time: the state that changed with it may have been dropped since.
///
/// Fault K2.
#[test]
fn a_late_caller_earns_no_allowance_twice() {
    let policies = [10, 20].map(|limit| Arc::new(policy(Kind::SlidingWindowLog, limit, 10, None)));
    let states = policies.clone().map(|policy| {
        let state = policy.initial(Tick(0));
        (policy, state)
    });
    // Both capacities were used up at 1000.
    let allowances = [100, 300].map(|level| Allowance { last: Tick(1_000), level });
    let mut state = ClientState::of(states, &allowances);
    let fast = ClientRule::of(Access::Limited(policies[1].clone()));
    for now in [Tick(500), Tick(1_000)] {
        let at = fast.decision_time(&state, now);
        assert!(!fast.decide::<bool>(&mut state, at, 1), "{now}");
    }
}

#[derive(Clone, Debug)]
struct Numbers {
    kind: usize,
    limit: Cost,
    window: u64,
    burst: Cost,
    debt: Option<Cost>,
    /// A second limit with ten times the window and a multiple of the amount.
    second: Option<Cost>,
}

impl Numbers {
    fn policy(&self) -> Policy {
        let kind = Kind::ALL[self.kind];
        let limit = |kind: Kind, limit: Cost, window| {
            let limit = Policy::of(kind, limit).per(Ticks(window));
            let limit = if kind.is_bucket() { limit.burst(self.burst) } else { limit };
            match self.debt {
                Some(debt) => limit.debt(debt),
                None => limit,
            }
        };
        let first = limit(kind, self.limit, self.window);
        match self.second {
            Some(times) => {
                let other = Kind::ALL[(self.kind + 1) % 6];
                let second = limit(other, times * self.limit, 10 * self.window).named("second");
                Policy::all_of("two", [first.named("first"), second]).expect("valid")
            }
            None => first.build().expect("valid"),
        }
    }
}

fn numbers() -> impl Strategy<Value = Numbers> {
    let debt = prop_oneof![Just(None), Just(Some(0))];
    let second = prop_oneof![3 => Just(None), 1 => (1..11_u64).prop_map(Some)];
    (0..6_usize, 1..12_u64, 3..60_u64, 1..15_u64, debt, second).prop_map(
        |(kind, limit, window, burst, debt, second)| Numbers {
            kind,
            limit,
            window,
            burst,
            debt,
            second,
        },
    )
}

/// The limit that gives a policy its long-run rate.
fn slowest(policy: &Policy) -> &Limit {
    let slower = |one: &Limit, other: &Limit| {
        let (one, other) = (one.numbers(), other.numbers());
        let (left, right) = (one.limit * other.window.0, other.limit * one.window.0);
        left < right || (left == right && one.burst < other.burst)
    };
    let limits = policy.limits().iter();
    limits.reduce(|one, other| if slower(other, one) { other } else { one }).expect("one")
}

/// An allowed request: its time, its cost, its policy and its period.
struct Admission {
    at: i64,
    cost: Cost,
    policy: usize,
    period: usize,
}

proptest! {
    #![proptest_config(cases(600))]

    /// Over every interval, at most the largest rate of the policies under which something was allowed in it, and one
    /// capacity of each policy that was used. A fixed window or a sliding window counter by itself may allow one more
    /// capacity around the end of its window: that much more for each period in the interval in which the client was a
    /// client of one such policy alone.
    ///
    /// Fault K3.
    #[test]
    fn flipping_policies_never_allows_more_than_the_fastest(
        policies in vec(numbers(), 2..7),
        steps in vec((0..7_usize, 0..10_u64, 0..40_i64), 1..250),
        pace in 1..8_i64,
    ) {
        let policies: Vec<Policy> = policies.iter().map(Numbers::policy).collect();
        let rules: Vec<ClientRule> = policies.iter().cloned().map(ClientRule::of).collect();
        let mut state = ClientState::default();
        let (mut now, mut asked) = (0, vec![false; rules.len()]);
        let mut allowed: Vec<Admission> = Vec::new();
        // Periods in which the client is under one policy: the policy, by the number of the period.
        let mut periods: Vec<usize> = Vec::new();
        let mut was_several = true;
        for (index, cost, gap) in steps {
            now += gap / pace / 4;
            let index = index % rules.len();
            let (rule, at) = (&rules[index], Tick(now));
            asked[index] = true;
            let is_fresh = rule.fresh_at(&state).is_some_and(|fresh| fresh <= at);
            // Half of the requests take all remaining units.
            let left: Decision = rule.decide(&mut state.clone(), at, 0);
            let cost = if cost > 4 { left.remaining.max(1) } else { cost };
            let decision: Decision = rule.decide(&mut state, at, cost);
            let is_several = state.policies().count() > 1;
            if !is_several && (is_fresh || was_several) {
                periods.push(index);
            }
            was_several = is_several;
            check_retry(rule, &state, at, cost, &decision)?;
            prop_assert!(decision.retry_after.is_none_or(|wait| wait.0 <= longest_lock_out(&policies[index])));
            if decision.allowed && cost > 0 {
                allowed.push(Admission { at: now, cost, policy: index, period: periods.len() });
            }
            let capacities: u128 = asked.iter().zip(&policies).filter(|(asked, _)| **asked)
                .map(|(_, policy)| u128::from(slowest(policy).numbers().burst)).sum();
            let (mut sum, mut fastest): (u128, Option<&Limit>) = (0, None);
            let last = allowed.last().map_or(0, |last| last.period);
            for admission in allowed.iter().rev() {
                sum += u128::from(admission.cost);
                let limit = slowest(&policies[admission.policy]);
                let rate = |limit: &Limit| (limit.numbers().limit, limit.numbers().window.0);
                fastest = match fastest {
                    Some(other) if rate(other).0 * rate(limit).1 >= rate(limit).0 * rate(other).1 => Some(other),
                    _ => Some(limit),
                };
                let (limit, window) = rate(fastest.expect("set"));
                let length = (now - admission.at).unsigned_abs();
                let slack: u128 = periods[admission.period.saturating_sub(1)..last].iter()
                    .map(|policy| slack(&policies[*policy])).sum();
                let most = (capacities + slack) * u128::from(window) + u128::from(length) * u128::from(limit);
                prop_assert!(
                    sum * u128::from(window) <= most,
                    "{sum} in [{}, {now}]: {limit} per {window} ticks and {capacities} with {slack}",
                    admission.at,
                );
            }
        }
    }
}

/// The units that a policy alone may allow in addition to those of a bucket.
fn slack(policy: &Policy) -> u128 {
    let numbers = slowest(policy).numbers();
    match numbers.kind {
        Kind::FixedWindow | Kind::SlidingWindowCounter => numbers.burst.into(),
        _ => 0,
    }
}

/// The time in which each limit earns its capacity and its debt.
fn longest_lock_out(policy: &Policy) -> u64 {
    let each = policy.limits().iter().map(|limit| {
        let numbers = limit.numbers();
        let earned = (numbers.burst + numbers.debt) * numbers.window.0;
        match numbers.kind {
            Kind::SlidingWindowCounter => 2 * numbers.window.0,
            _ => earned.div_ceil(numbers.limit),
        }
    });
    each.max().expect("one")
}

/// A denied request is allowed after exactly its `retry_after`, and not one tick sooner.
fn check_retry(
    rule: &ClientRule,
    state: &ClientState,
    now: Tick,
    cost: Cost,
    decision: &Decision,
) -> Result<(), TestCaseError> {
    if decision.allowed {
        return Ok(());
    }
    let Some(wait) = decision.retry_after else {
        prop_assert!(cost > rule.capacity());
        return Ok(());
    };
    let at = |wait: u64| now.after(Ticks(wait)).expect("soon");
    prop_assert!(rule.decide::<bool>(&mut state.clone(), at(wait.0), cost), "not after {wait}");
    prop_assert!(!rule.decide::<bool>(&mut state.clone(), at(wait.0 - 1), cost), "before {wait}");
    Ok(())
}

/// Random histories of tiers, overrides that end, changes of rules, refunds and peeks: the `retry_after` of every
/// denied check is exact, and a peek returns what a check would.
mod histories {
    use super::*;
    use tallygate::clock::ManualClock;
    use tallygate::store::{Capacity, MemoryStore};
    use tallygate::tiers::Access;
    use tallygate::{RateLimiter, Tiers};

    #[derive(Clone, Debug)]
    enum Event {
        Check { tier: usize, cost: Cost },
        Refund(Cost),
        Force { tier: usize, estimate: Cost, actual: Cost },
        Override { policy: usize, lasts: Option<i64> },
        EndOverride,
        Replace([usize; 3]),
    }

    fn event() -> impl Strategy<Value = Event> {
        let lasts = prop_oneof![4 => (1..80_i64).prop_map(Some), 1 => Just(None)];
        prop_oneof![
            12 => (0..3_usize, 0..6_u64).prop_map(|(tier, cost)| Event::Check { tier, cost }),
            1 => (1..6_u64).prop_map(Event::Refund),
            1 => (0..3_usize, 1..4_u64, 0..20_u64)
                .prop_map(|(tier, estimate, actual)| Event::Force { tier, estimate, actual }),
            2 => (0..8_usize, lasts).prop_map(|(policy, lasts)| Event::Override { policy, lasts }),
            1 => Just(Event::EndOverride),
            1 => [0..8_usize, 0..8_usize, 0..8_usize].prop_map(Event::Replace),
        ]
    }

    proptest! {
        #![proptest_config(cases(1_000))]

        /// Fault K6.
        #[test]
        fn the_time_to_retry_is_exact_after_every_change(
            policies in vec(numbers(), 6),
            events in vec((event(), 0..30_i64), 1..80),
        ) {
            // Two of them are no policies.
            let access = |index: usize| match index {
                6 => Access::Unlimited,
                7 => Access::Blocked,
                index => policies[index].policy().into(),
            };
            let rules = |chosen: [usize; 3]| {
                let [base, pro, team] = chosen.map(access);
                Tiers::new(base).tier("pro", pro).tier("team", team)
            };
            let clock = ManualClock::new(Tick(0));
            let store = MemoryStore::new(Capacity::of(10), &clock);
            let limiter = RateLimiter::in_store("api", rules([0, 1, 2]), store);
            let mut now = 1_000;
            for (event, gap) in events {
                now += gap / 3;
                clock.set(Tick(now));
                let (tier, cost) = match event {
                    Event::Refund(cost) => {
                        let _ = limiter.refund(Ask::new("a").cost(cost)).expect("short");
                        continue;
                    }
                    Event::Override { policy, lasts } => {
                        let until = lasts.map(|lasts| Tick(now + lasts));
                        limiter.set_override("a", access(policy), until);
                        continue;
                    }
                    Event::EndOverride => {
                        limiter.remove_override("a");
                        continue;
                    }
                    Event::Replace(chosen) => {
                        limiter.replace(&rules(chosen));
                        continue;
                    }
                    Event::Force { tier, estimate, actual } => {
                        let reserved = match tier {
                            0 => limiter.reserve(Ask::new("a").cost(estimate), Ticks(1)),
                            1 => limiter.reserve(Ask::new("a").cost(estimate).tier("pro"), Ticks(1)),
                            _ => limiter.reserve(Ask::new("a").cost(estimate).tier("team"), Ticks(1)),
                        };
                        if let Some(mut reservation) = reserved.expect("short").granted() {
                            let _ = limiter.settle(&mut reservation, actual).expect("in time");
                        }
                        continue;
                    }
                    Event::Check { tier, cost } => (tier, cost),
                };
                let peek = |at: i64| match tier {
                    0 => limiter.peek(Ask::new("a").cost(cost).at(Tick(at))),
                    1 => limiter.peek(Ask::new("a").cost(cost).at(Tick(at)).tier("pro")),
                    _ => limiter.peek(Ask::new("a").cost(cost).at(Tick(at)).tier("team")),
                }.expect("short");
                let peeked = peek(now);
                let decision = match tier {
                    0 => limiter.check(Ask::new("a").cost(cost)),
                    1 => limiter.check(Ask::new("a").cost(cost).tier("pro")),
                    _ => limiter.check(Ask::new("a").cost(cost).tier("team")),
                }.expect("short");
                prop_assert_eq!(peeked, decision);
                if let (false, Some(wait)) = (decision.allowed, decision.retry_after) {
                    let wait = i64::try_from(wait.0).expect("short");
                    prop_assert!(peek(now + wait).allowed, "not after {} at {}", wait, now);
                    prop_assert!(!peek(now + wait - 1).allowed, "before {} at {}", wait, now);
                }
                let fits = decision.remaining;
                if fits < Cost::MAX {
                    let largest = |cost: Cost| match tier {
                        0 => limiter.peek(Ask::new("a").cost(cost)),
                        1 => limiter.peek(Ask::new("a").cost(cost).tier("pro")),
                        _ => limiter.peek(Ask::new("a").cost(cost).tier("team")),
                    }.expect("short").allowed;
                    prop_assert!(fits == 0 || largest(fits), "{} remain", fits);
                    prop_assert!(!largest(fits + 1), "more than {} remain", fits);
                }
            }
        }
    }
}
