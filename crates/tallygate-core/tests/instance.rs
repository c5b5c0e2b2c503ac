//! Shares of a policy for instances without a common store.

use proptest::prelude::*;
use tallygate_core::{
    Algorithm, Cost, Instance, Kind, Limit, Penalty, Policy, PolicyError, Tick, Ticks,
};
use tallygate_testkit::{cases, costs, small_limit_of, times};

fn shares(policy: &Policy, count: u32) -> Result<Vec<Policy>, PolicyError> {
    (0..count).map(|index| policy.share(Instance { index, count })).collect()
}

fn policy_of(limit: &Limit) -> Policy {
    let n = limit.numbers();
    let limit = Policy::of(n.kind, n.limit).per(n.window).burst(n.burst).debt(n.debt);
    limit.anchor(n.anchor).build().expect("it was valid")
}

/// The most units that a limit allows from `start` to `end`, both included.
fn bound(limit: &Limit, start: Tick, end: Tick) -> u128 {
    let n = limit.numbers();
    let (amount, window) = (u128::from(n.limit), u128::from(n.window.0));
    let span = u128::from(end.since(start).0);
    match n.kind {
        Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => {
            u128::from(n.burst) + span * amount / window
        }
        // A closed interval of this length touches at most this many windows. The counter allows twice the limit.
        Kind::FixedWindow | Kind::SlidingWindowLog => (span / window + 2) * amount,
        Kind::SlidingWindowCounter => 2 * (span / window + 1) * amount,
    }
}

proptest! {
    #![proptest_config(cases(300))]

    #[test]
    fn shares_add_up_to_the_whole(
        limit in (1..500_u64, 1..500_u64, 0..500_u64),
        count in 1..20_u32,
    ) {
        let (limit, burst, debt) = limit;
        let policy = Policy::gcra(limit).per(Ticks(1000)).burst(burst).debt(debt).build().unwrap();
        let Ok(shares) = shares(&policy, count) else {
            prop_assert!(limit.min(burst) < count.into());
            return Ok(());
        };
        let sum = |of: fn(&Limit) -> Cost| shares.iter().map(|share| of(&share.limits()[0])).sum::<Cost>();
        prop_assert_eq!(limit, sum(|limit| limit.numbers().limit));
        prop_assert_eq!(burst, sum(|limit| limit.numbers().burst));
        prop_assert_eq!(debt, sum(|limit| limit.numbers().debt));
        prop_assert_eq!(burst, sum(|limit| limit.numbers().start));
        let amounts = shares.iter().map(|share| share.limits()[0].quota().amount);
        let (least, most) = (amounts.clone().min(), amounts.max());
        prop_assert!(most.unwrap() - least.unwrap() <= 1);
    }

    /// However a balancer spreads the requests, all instances together keep the bound of the whole policy.
    #[test]
    fn instances_together_never_allow_more_than_the_policy(
        (limit, times, costs, targets) in proptest::sample::select(&Kind::ALL[..])
            .prop_flat_map(small_limit_of)
            .prop_flat_map(|limit| {
                let times = times(&limit, 80, false);
                let costs = proptest::collection::vec(costs(&limit), 80);
                (Just(limit), times, costs, proptest::collection::vec(0..3_usize, 80))
            }),
    ) {
        let policy = policy_of(&limit);
        let Ok(shares) = shares(&policy, 3) else { return Ok(()) };
        let mut states: Vec<_> = shares.iter().map(|share| share.initial(times[0])).collect();
        let mut allowed = Vec::new();
        for ((&now, &cost), &target) in times.iter().zip(&costs).zip(&targets) {
            if shares[target].decide::<bool>(&mut states[target], now, cost) {
                allowed.push((now, u128::from(cost)));
            }
        }
        for start in 0..allowed.len() {
            let mut sum = 0;
            for &(now, cost) in &allowed[start..] {
                sum += cost;
                prop_assert!(sum <= bound(&limit, allowed[start].0, now));
            }
        }
    }
}

#[test]
fn an_unbalanced_client_gets_only_the_share_of_its_instance() {
    let policy = Policy::fixed_window(10).per(Ticks(100)).build().unwrap();
    let shares = shares(&policy, 3).unwrap();
    let allowed_by = |share: &Policy| {
        let mut state = share.initial(Tick(0));
        (0..10).filter(|_| share.decide::<bool>(&mut state, Tick(0), 1)).count()
    };
    assert_eq!(shares.iter().map(allowed_by).collect::<Vec<_>>(), [4, 3, 3]);
}

#[test]
fn a_share_keeps_names_and_options() {
    let penalty = Penalty::lasting(Ticks(5)).after(2);
    let policy = Policy::all_of(
        "api",
        [
            Policy::fixed_window(10).per(Ticks(100)).named("slow").penalty(penalty),
            Policy::gcra(10).per(Ticks(10)).named("fast").shadow(),
        ],
    );
    let share = policy.unwrap().share(Instance { index: 1, count: 4 }).unwrap();
    assert_eq!(share.name(), "api");
    let [slow, fast] = share.limits() else { panic!("two limits") };
    assert_eq!((slow.name(), slow.penalty()), ("slow", Some(&penalty)));
    assert!(fast.is_shadow() && fast.name() == "fast");
}

#[test]
fn a_share_of_nothing_is_an_error() {
    let policy = Policy::token_bucket(5).per(Ticks(10)).burst(2).build().unwrap();
    let message = |index, count| policy.share(Instance { index, count }).unwrap_err().to_string();
    assert_eq!(
        message(0, 3),
        "3 instances cannot share a limit or burst of 2; use at most 2 instances, a larger limit and burst, or a common store"
    );
    assert_eq!(
        message(2, 2),
        "there is no instance 2 of 2; instances are numbered from 0 to one less than their count"
    );
    assert_eq!(message(0, 0).split(';').next(), Some("there is no instance 0 of 0"));
}
