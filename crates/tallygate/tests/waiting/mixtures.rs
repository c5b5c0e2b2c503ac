//! Checks, joint decisions, waiting requests and reservations of one client under several tiers, in any order.

use std::collections::BTreeMap;

use crate::tasks::Tasks;
use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::Access;
use tallygate::{Ask, Cost, Kind, Policy, RateLimiter, Tick, Ticks, Tiers, check_all};
use tallygate_testkit::cases;

#[derive(Clone, Copy, Debug)]
struct Numbers {
    kind: Kind,
    limit: Cost,
    window: u64,
    burst: Cost,
    debt: Cost,
}

impl Numbers {
    fn policy(self) -> Policy {
        let builder = Policy::of(self.kind, self.limit).per(Ticks(self.window));
        builder.burst(self.capacity()).debt(self.debt).build().expect("valid")
    }

    const fn capacity(self) -> Cost {
        if matches!(self.kind, Kind::SlidingWindowLog) { self.limit } else { self.burst }
    }
}

/// A limit that never allows more than its capacity and its rate: not a window, which allows twice its limit around
/// its end.
fn numbers() -> impl Strategy<Value = Numbers> {
    let kinds = [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket, Kind::SlidingWindowLog];
    let kind = proptest::sample::select(kinds.to_vec());
    (kind, 1..9_u64, 1..40_u64, 1..12_u64, 0..12_u64)
        .prop_map(|(kind, limit, window, burst, debt)| Numbers { kind, limit, window, burst, debt })
}

#[derive(Clone, Debug)]
enum Step {
    Check(usize, Cost),
    Joint([(usize, Cost); 2]),
    Join(usize, Cost, u64),
    Leave(usize),
    Freeze(usize),
    Thaw(usize),
    Reserve(usize, Cost),
    Settle(usize, u64),
    Replace(usize),
    Override(Option<usize>, u64),
    Pass(u64),
}

fn step() -> impl Strategy<Value = Step> {
    let (tier, cost) = (0..3_usize, 1..6_u64);
    let part = || (0..3_usize, 1..4_u64);
    prop_oneof![
        4 => (tier.clone(), cost.clone()).prop_map(|(tier, cost)| Step::Check(tier, cost)),
        2 => [part(), part()].prop_map(Step::Joint),
        4 => (tier.clone(), cost.clone(), 0..90_u64).prop_map(|(tier, cost, wait)| Step::Join(tier, cost, wait)),
        1 => any::<usize>().prop_map(Step::Leave),
        1 => any::<usize>().prop_map(Step::Freeze),
        1 => any::<usize>().prop_map(Step::Thaw),
        3 => (tier.clone(), cost).prop_map(|(tier, cost)| Step::Reserve(tier, cost)),
        3 => (any::<usize>(), 0..101_u64).prop_map(|(which, percent)| Step::Settle(which, percent)),
        1 => tier.clone().prop_map(Step::Replace),
        1 => (proptest::option::of(tier), 1..50_u64).prop_map(|(tier, lasts)| Step::Override(tier, lasts)),
        5 => (0..30_u64).prop_map(Step::Pass),
    ]
}

fn rules(all: &[Numbers]) -> Tiers {
    Tiers::new(all[0].policy()).tier("one", all[1].policy()).tier("two", all[2].policy())
}

fn ask(tier: usize, cost: Cost) -> Ask<'static> {
    Ask::new("a").cost(cost).tier([None, Some("one"), Some("two")][tier])
}

proptest! {
    #![proptest_config(cases(800))]

    /// In every interval, the client gets at most the largest of the rates, and one capacity of each policy. A reservation
    /// counts with its settled cost.
    ///
    /// Faults K3, K4, K5.
    #[test]
    fn no_mixture_of_requests_exceeds_the_bound(
        all in vec(numbers(), 3),
        steps in vec(step(), 1..120),
    ) {
        let clock = ManualClock::new(Tick(0));
        let store = MemoryStore::new(Capacity::of(10), &clock);
        let limiter = RateLimiter::in_store("api", rules(&all), store);
        let mut tasks = Tasks::new();
        let mut waiting: BTreeMap<usize, Cost> = BTreeMap::new();
        let mut open = Vec::new();
        let mut charged: Vec<(i64, Cost)> = Vec::new();
        for step in steps {
            let now = limiter.now().0;
            let chosen = |which: usize| tasks.running.keys().copied().nth(which % tasks.running.len().max(1));
            match step {
                Step::Check(tier, cost) => {
                    if limiter.check(ask(tier, cost)).expect("short").allowed {
                        charged.push((now, cost));
                    }
                }
                Step::Joint(parts) => {
                    let cost = parts.iter().map(|(_, cost)| cost).sum();
                    let parts = parts.map(|(tier, cost)| limiter.joint(ask(tier, cost)).expect("short"));
                    if check_all(parts).expect("short").decision.allowed {
                        charged.push((now, cost));
                    }
                }
                Step::Join(tier, cost, wait) => {
                    let task = tasks.add(limiter.until_ready(ask(tier, cost), Ticks(wait)));
                    waiting.insert(task, cost);
                }
                Step::Leave(which) => {
                    let _ = chosen(which).map(|task| tasks.leave(task));
                }
                Step::Freeze(which) => {
                    let _ = chosen(which).map(|task| tasks.freeze(task));
                }
                Step::Thaw(which) => {
                    let _ = chosen(which).map(|task| tasks.thaw(task));
                }
                Step::Reserve(tier, cost) => {
                    let reserved = limiter.reserve(ask(tier, cost), Ticks(1 << 20)).expect("short");
                    if let Some(reservation) = reserved.granted() {
                        charged.push((now, cost));
                        open.push((reservation, charged.len() - 1));
                    }
                }
                Step::Settle(which, percent) if !open.is_empty() => {
                    let (mut reservation, index) = open.swap_remove(which % open.len());
                    let actual = charged[index].1 * percent / 100;
                    let _ = limiter.settle(&mut reservation, actual).expect("it is open");
                    charged[index].1 = actual;
                }
                Step::Settle(..) | Step::Pass(_) => {}
                Step::Replace(by) => {
                    let mut all = all.clone();
                    all.rotate_left(by);
                    limiter.replace(&rules(&all));
                }
                Step::Override(tier, lasts) => {
                    let access = tier.map_or(Access::Blocked, |tier| all[tier].policy().into());
                    limiter.set_override("a", access, clock_after(&clock, lasts));
                }
            }
            let passes = if let Step::Pass(ticks) = step { ticks } else { 0 };
            let end = clock_after(&clock, passes).expect("small");
            for (task, at, decision) in tasks.run_until(&clock, end) {
                if decision.allowed {
                    charged.push((at.0, waiting[&task]));
                }
            }
        }
        let fastest = all.iter().max_by_key(|one| one.limit * 1_000_000 / one.window).expect("three");
        let burst: Cost = all.iter().map(|one| one.capacity()).sum();
        charged.sort_unstable();
        for (first, (from, _)) in charged.iter().enumerate() {
            let mut sum = 0;
            for (to, cost) in &charged[first..] {
                sum += cost;
                let earned = (to - from).unsigned_abs() * fastest.limit;
                prop_assert!(
                    sum.saturating_sub(burst) * fastest.window <= earned,
                    "{sum} from {from} to {to}, with a capacity of {burst} and {fastest:?}",
                );
            }
        }
    }
}

fn clock_after(clock: &ManualClock, ticks: u64) -> Option<Tick> {
    use tallygate::clock::Clock as _;
    clock.now().after(Ticks(ticks))
}
