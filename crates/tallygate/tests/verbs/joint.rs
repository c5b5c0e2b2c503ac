//! Several keys in one decision: all or nothing, under any number of threads.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Barrier, Mutex};

use proptest::collection::vec;
use proptest::prelude::*;
use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Used};
use tallygate::clock::ManualClock;
use tallygate::observer::{Event, Observer};
use tallygate::store::{Capacity, MemoryStore, PolicyStore, WhenFull};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{
    Ask, Cost, Decision, InFlight, Kind, Policy, RateLimiter, StoreError, Tick, Ticks, Tiers,
    check_all, joined_key,
};
use tallygate_testkit::cases;

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(kind: Kind, limit: Cost, max_keys: usize) -> Limiter {
    let policy = Policy::of(kind, limit).per_hour().build().expect("valid");
    let store = PolicyStore::new(&policy, Capacity::of(max_keys), ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

fn used(limiter: &Limiter, key: &str) -> Cost {
    let status = limiter.check(Ask::new(key).cost(0)).expect("short");
    status.limit - status.remaining
}

proptest! {
    #![proptest_config(cases(300))]

    /// Compares with limits that are checked one after the other, without other requests.
    #[test]
    fn all_are_charged_or_none_is(
        kinds in vec((0..6_usize, 1..6_u64), 3),
        requests in vec((vec((0..3_usize, 0..3_usize, 0..4_u64), 0..5), 0..20_i64), 1..40),
    ) {
        let limiters: Vec<Limiter> = kinds
            .iter()
            .map(|(kind, limit)| {
                let policy = Policy::of(Kind::ALL[*kind], *limit).per(Ticks(30)).build();
                let policy = policy.expect("valid");
                let clock = ManualClock::new(Tick(0));
                let store = PolicyStore::new(&policy, Capacity::of(100), clock);
                RateLimiter::with_store(policy, store)
            })
            .collect();
        let keys = ["a", "b", "c"];
        let mut states: Vec<Vec<_>> = limiters
            .iter()
            .map(|limiter| vec![limiter.rules().limits()[0].initial(Tick(0)); keys.len()])
            .collect();
        let mut now = 0;
        for (request, gap) in requests {
            now += gap;
            let asks = request.iter().map(|(limiter, key, cost)| {
                limiters[*limiter].joint(Ask::new(keys[*key]).cost(*cost).at(Tick(now))).expect("short")
            });
            let answer = check_all(asks).expect("short");
            // The total cost per key.
            let mut wanted: Vec<((usize, usize), Cost, usize)> = Vec::new();
            for (index, (limiter, key, cost)) in request.iter().enumerate() {
                match wanted.iter_mut().find(|(of, ..)| *of == (*limiter, *key)) {
                    Some((_, both, _)) => *both += cost,
                    None => wanted.push(((*limiter, *key), *cost, index)),
                }
            }
            let denied_by = wanted.iter().find(|((limiter, key), cost, _)| {
                let limit = &limiters[*limiter].rules().limits()[0];
                !limit.allows(&states[*limiter][*key], Tick(now), *cost)
            });
            prop_assert_eq!(answer.denied_ask, denied_by.map(|(_, _, index)| *index));
            prop_assert_eq!(answer.decision.allowed, answer.denied_ask.is_none());
            if answer.decision.allowed {
                for ((limiter, key), cost, _) in &wanted {
                    let limit = &limiters[*limiter].rules().limits()[0];
                    prop_assert!(limit.try_charge(&mut states[*limiter][*key], Tick(now), *cost));
                }
            }
            let mut least = Cost::MAX;
            for ((limiter, key), ..) in &wanted {
                let limit = &limiters[*limiter].rules().limits()[0];
                let facts = limit.facts(&states[*limiter][*key], Tick(now), None);
                let status = limiters[*limiter].check(Ask::new(keys[*key]).cost(0).at(Tick(now)));
                prop_assert_eq!(status.expect("short").remaining, facts.remaining);
                least = least.min(facts.remaining);
            }
            prop_assert_eq!(answer.decision.remaining, least);
        }
    }
}

/// Eight threads use overlapping keys. Each key is charged exactly as often as a decision on it was allowed. The limits
/// are small and fresh in each round, so that threads compete for the last units. The tables are small, so that keys
/// share buckets and are stored away from home.
///
/// Fault C7.
#[test]
fn eight_threads_over_overlapping_keys_charge_all_or_nothing() {
    const ROUNDS: usize = 1_500;
    let limiters = [
        limiter(Kind::TokenBucket, 6, 3 * ROUNDS),
        limiter(Kind::SlidingWindowCounter, 7, 3 * ROUNDS),
        limiter(Kind::FixedWindow, 8, 3 * ROUNDS),
    ];
    let counts: Vec<AtomicU64> = (0..9 * ROUNDS).map(|_| AtomicU64::new(0)).collect();
    let name = |round: usize, key: usize| format!("{round}/{key}");
    let together = Barrier::new(8);
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let (limiters, counts, together) = (&limiters, &counts, &together);
            scope.spawn(move || {
                let mut random = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(thread + 1);
                for round in 0..ROUNDS {
                    together.wait();
                    for _ in 0..6 {
                        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let picks: Vec<(usize, usize)> = (0..3)
                            .map(|pick| {
                                let bits = random >> (20 + 11 * pick);
                                ((bits % 3) as usize, (bits / 3 % 3) as usize)
                            })
                            .collect();
                        let ask = |(limiter, key): &(usize, usize)| {
                            limiters[*limiter].joint(&name(round, *key)).expect("short")
                        };
                        if check_all(picks.iter().map(ask)).expect("short").decision.allowed {
                            for (limiter, key) in picks {
                                let count = &counts[9 * round + 3 * limiter + key];
                                count.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    }
                }
            });
        }
    });
    for round in 0..ROUNDS {
        for (index, limiter) in limiters.iter().enumerate() {
            for key in 0..3 {
                let counted = counts[9 * round + 3 * index + key].load(Ordering::Relaxed);
                assert_eq!(used(limiter, &name(round, key)), counted, "limiter {index}, key {key}");
            }
        }
    }
}

/// Threads decide on four keys at a time of a full table, some of them away from home, in any order. They wait for each
/// other without deadlock.
///
/// Fault C7.
#[test]
fn threads_that_lock_the_same_keys_do_not_deadlock() {
    let limiter = limiter(Kind::TokenBucket, 1 << 40, 160);
    for key in 0..150 {
        assert!(limiter.is_allowed(&key.to_string()).expect("short"));
    }
    std::thread::scope(|scope| {
        for thread in 0..8_usize {
            let limiter = &limiter;
            scope.spawn(move || {
                for turn in 0..10_000 {
                    let asks = (0..4).map(|step| {
                        let key = (turn * 37 + step * (thread + 11)) % 150;
                        limiter.joint(&key.to_string()).expect("short")
                    });
                    assert!(check_all(asks).expect("short").decision.allowed);
                }
            });
        }
    });
    let total: Cost = (0..150).map(|key| used(&limiter, &key.to_string())).sum();
    assert_eq!(total, 150 + 8 * 10_000 * 4);
}

/// The observers of each limiter are notified.
#[test]
fn observers_are_notified_of_the_outcome() {
    #[derive(Default)]
    struct Recorder(Mutex<Vec<(Vec<u8>, Cost, bool)>>);

    impl Observer for &Recorder {
        fn decided(&self, event: &Event<'_>) {
            let answer = (event.key.to_vec(), event.cost, event.allowed);
            self.0.lock().expect("not poisoned").push(answer);
        }
    }

    let answer = Recorder::default();
    let policy = || Policy::token_bucket(2).per_hour().build().expect("valid");
    let (users, routes) = (
        RateLimiter::new(policy()).observed_by(&answer),
        RateLimiter::new(policy()).observed_by(&answer),
    );
    let ask = |cost| {
        check_all([
            users.joint("alice").expect("short"),
            routes.joint(Ask::new("/login").cost(cost)).expect("short"),
        ])
        .expect("short")
    };
    assert!(ask(2).decision.allowed);
    assert_eq!(ask(2).denied_ask, Some(1));
    let answer = answer.0.into_inner().expect("not poisoned");
    let (alice, login) = (b"alice".to_vec(), b"/login".to_vec());
    let expected = [(&alice, 1, true), (&login, 2, true), (&alice, 1, false), (&login, 2, false)];
    let answer: Vec<_> = answer.iter().map(|(key, cost, allowed)| (key, *cost, *allowed)).collect();
    assert_eq!(answer, expected);
}

#[test]
fn a_joint_decision_without_parts_is_allowed() {
    let answer = check_all([]).expect("nothing can go wrong");
    assert_eq!((answer.decision.allowed, answer.decision.remaining), (true, Cost::MAX));
}

#[test]
fn the_costs_of_a_key_that_occurs_twice_are_added_up() {
    let users = limiter(Kind::TokenBucket, 3, 10);
    let ask = |cost| users.joint(Ask::new("alice").cost(cost)).expect("short");
    assert_eq!(check_all([ask(2), ask(2)]).expect("short").denied_ask, Some(0));
    assert!(check_all([ask(2), ask(1)]).expect("short").decision.allowed);
    assert_eq!(used(&users, "alice"), 3);
    let never = check_all([ask(Cost::MAX), ask(2)]).expect("short");
    assert_eq!(never.decision.retry_after, None);
}

/// A part that has no place for its key is an error, and nothing is charged.
#[test]
fn a_full_store_is_an_error_and_charges_nothing() {
    let policy = Policy::token_bucket(3).per_hour().build().expect("valid");
    let capacity = Capacity::of(1).when_full(WhenFull::RejectNew);
    let store = PolicyStore::new(&policy, capacity, ManualClock::new(Tick(0)));
    let full = RateLimiter::with_store(policy, store);
    assert!(full.is_allowed("another").expect("room"));
    let users = limiter(Kind::TokenBucket, 3, 10);
    let asks = [users.joint("alice").expect("short"), full.joint("bob").expect("short")];
    assert_eq!(check_all(asks).expect_err("full"), StoreError::Full { max_keys: 1 });
    assert_eq!(used(&users, "alice"), 0);
    assert!(
        users.joint(&vec![0; 5_000]).is_err_and(|error| error.to_string().contains("5000 bytes"))
    );
}

/// Tiers decide together with the others like any rule.
#[test]
fn a_tiered_limiter_takes_part_in_a_joint_decision() {
    let free = Policy::token_bucket(1).per_hour().build().expect("valid");
    let pro = Policy::token_bucket(9).per_hour().build().expect("valid");
    let store = MemoryStore::new(Capacity::of(10), ManualClock::new(Tick(0)));
    let tiered = RateLimiter::in_store("api", Tiers::new(free).tier("pro", pro), store);
    let users = limiter(Kind::FixedWindow, 5, 10);
    let ask = || {
        check_all([
            users.joint("alice").expect("short"),
            tiered.joint(Ask::new("alice").tier("pro")).expect("short"),
        ])
    };
    assert!((0..5).all(|_| ask().expect("short").decision.allowed));
    assert_eq!(ask().expect("short").denied_ask, Some(0));
    assert_eq!(tiered.check(Ask::new("alice").cost(0).tier("pro")).expect("short").remaining, 4);
    assert!(!tiered.is_allowed("alice").expect("short"), "five are more than one");
}

#[test]
fn requests_in_flight_are_part_of_joint_decisions() {
    let in_flight = InFlight::new(3);
    let rate = limiter(Kind::TokenBucket, 4, 10);
    let enter = |cost| {
        let place = in_flight.joint(Ask::new("alice").cost(cost)).expect("short");
        check_all([place, rate.joint("alice").expect("short")]).expect("short")
    };
    let (first, second) = (enter(1), enter(2));
    assert!(first.decision.allowed && second.decision.allowed);
    let full = enter(1);
    assert_eq!((full.denied_ask, full.decision.retry_after), (Some(0), None), "it is unknown when");
    assert!(full.places.is_empty());
    assert_eq!((in_flight.count("alice").expect("short"), used(&rate, "alice")), (3, 2));
    drop(second);
    assert_eq!(in_flight.count("alice").expect("short"), 1, "both of its places");
    let more = [enter(1), enter(1)];
    drop(first);
    let out_of_rate = enter(1);
    assert_eq!(out_of_rate.denied_ask, Some(1));
    assert_eq!(in_flight.count("alice").expect("short"), 2, "no place was kept for it");
    drop(more);
    assert_eq!(in_flight.count("alice").expect("short"), 0);
    assert!(in_flight.clone().enter("alice").expect("short").is_some());
}

proptest! {
    #![proptest_config(cases(300))]

    /// Requests start and end, some of them under a rate as well. Never are more places taken than there are, and each
    /// is returned once.
    #[test]
    fn requests_in_flight_agree_with_a_count(
        places in 1..4_u64,
        limit in 1..8_u64,
        steps in vec((0..2_usize, 1..3_u64, any::<bool>(), 0..4_usize), 1..60),
    ) {
        let in_flight = InFlight::new(places);
        let rate = limiter(Kind::FixedWindow, limit, 10);
        let keys = ["a", "b"];
        let (mut inside, mut left) = ([0, 0], [limit, limit]);
        let mut held: Vec<(usize, u64, _)> = Vec::new();
        for (key, cost, rated, leaves) in steps {
            let place = in_flight.joint(Ask::new(keys[key]).cost(cost)).expect("short");
            let asks = if rated {
                vec![place, rate.joint(keys[key]).expect("short")]
            } else {
                vec![place]
            };
            let entered = check_all(asks).expect("short");
            let fits = inside[key] + cost <= places && (!rated || left[key] > 0);
            prop_assert_eq!(entered.decision.allowed, fits);
            if fits {
                inside[key] += cost;
                left[key] -= u64::from(rated);
                held.push((key, cost, entered));
            }
            if leaves < held.len() {
                let (key, cost, entered) = held.remove(leaves);
                inside[key] -= cost;
                drop(entered);
            }
            for (key, inside) in keys.iter().zip(inside) {
                prop_assert_eq!(in_flight.count(key).expect("short"), inside);
            }
        }
    }
}

/// Places are never forgotten: a client above the maximum gets an error, also if several clients arrive at once, and no
/// client loses its places.
#[test]
fn one_client_too_many_evicts_no_client_in_flight() {
    let in_flight = InFlight::for_clients(1, 2);
    let held = in_flight.enter("c").expect("room").expect("free");
    let both =
        check_all([in_flight.joint("a").expect("short"), in_flight.joint("b").expect("short")]);
    assert_eq!(both.expect_err("room for one only"), StoreError::Full { max_keys: 2 });
    let both =
        check_all([in_flight.joint("a").expect("short"), in_flight.joint("a").expect("short")]);
    assert!(!both.expect("room for one").decision.allowed, "two places of one");
    let both = in_flight.enter("b").expect("room for one").expect("free");
    assert_eq!(in_flight.enter("d").expect_err("too many"), StoreError::Full { max_keys: 2 });
    assert!(in_flight.enter("c").expect("known").is_none(), "it is still in flight");
    assert_eq!(in_flight.count("unknown").expect("looking needs no room"), 0);
    drop((held, both));
}

/// Threads take and return places, and never are more places taken than allowed.
#[test]
fn requests_in_flight_are_never_more_than_places() {
    let in_flight = InFlight::new(3);
    let (inside, most) = (AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..5_000 {
                    if let Some(place) = in_flight.enter("alice").expect("short") {
                        let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                        most.fetch_max(now, Ordering::SeqCst);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        drop(place);
                    }
                }
            });
        }
    });
    assert!((1..=3).contains(&most.load(Ordering::SeqCst)));
    assert_eq!(in_flight.count("alice").expect("short"), 0);
}

proptest! {
    #![proptest_config(cases(2000))]

    /// Different parts make different keys.
    ///
    /// Fault H8.
    #[test]
    fn joined_keys_are_distinct(
        one in vec(vec(prop_oneof![Just(b':'), Just(b'1'), Just(b'a'), any::<u8>()], 0..4), 0..4),
        other in vec(vec(prop_oneof![Just(b':'), Just(b'1'), Just(b'a'), any::<u8>()], 0..4), 0..4),
    ) {
        prop_assert_eq!(joined_key(&one) == joined_key(&other), one == other);
    }

    /// The same text, divided differently.
    ///
    /// Fault H8.
    #[test]
    fn parts_that_are_split_differently_make_different_keys(
        text in vec(prop_oneof![Just(b':'), Just(b'1'), Just(b'2'), Just(b'a')], 1..8),
        cut in 0..8_usize,
        another in 0..8_usize,
    ) {
        let (cut, another) = (cut % text.len(), another % text.len());
        let split = |at: usize| joined_key([&text[..at], &text[at..]]);
        prop_assert_eq!(split(cut) == split(another), cut == another);
    }
}

type Tiered = RateLimiter<Tiers, MemoryStore<ClientRule, ManualClock>>;

fn tiered(rules: Tiers) -> Tiered {
    RateLimiter::in_store(
        "api",
        rules,
        MemoryStore::new(Capacity::of(100), ManualClock::new(Tick(0))),
    )
}

fn hourly(limit: Cost) -> Policy {
    Policy::token_bucket(limit).per_hour().build().expect("valid")
}

/// Fault K8.
#[test]
fn every_rule_that_a_key_is_checked_under_counts() {
    let rules = Tiers::new(Access::Unlimited)
        .tier("blocked", Access::Blocked)
        .tier("free", hourly(5))
        .tier("pro", hourly(10));
    let limiter = tiered(rules);
    for _ in 0..2 {
        let unlimited = limiter.joint("alice").expect("short");
        let together = check_all([
            unlimited,
            limiter.joint(Ask::new("alice").tier("blocked")).expect("short"),
        ]);
        let together = together.expect("short");
        assert_eq!((together.decision.allowed, together.denied_ask), (false, Some(1)));
        let unlimited = limiter.joint("alice").expect("short");
        let together = check_all([
            limiter.joint(Ask::new("alice").tier("blocked")).expect("short"),
            unlimited,
        ]);
        assert_eq!(together.expect("short").denied_ask, Some(0));

        let both = |one: Cost, other: Cost| {
            let one = limiter.joint(Ask::new("alice").cost(one).tier("pro")).expect("short");
            check_all([
                one,
                limiter.joint(Ask::new("alice").cost(other).tier("free")).expect("short"),
            ])
            .expect("short")
        };
        assert_eq!(both(3, 3).denied_ask, Some(1), "six are more than five");
        assert_eq!(both(1, 10).denied_ask, Some(0), "eleven are more than ten");
        assert_eq!(
            limiter.peek(Ask::new("alice").cost(0).tier("pro")).expect("short").remaining,
            10,
            "nothing was charged"
        );
        assert_eq!(
            limiter.peek(Ask::new("alice").cost(0).tier("free")).expect("short").remaining,
            5,
            "nothing was charged"
        );
        let together = both(2, 3);
        assert!(together.decision.allowed);
        assert_eq!(together.decision.remaining, 0, "the least of both");
        assert_eq!(
            limiter.peek(Ask::new("alice").cost(0).tier("pro")).expect("short").remaining,
            5
        );
        assert_eq!(
            limiter.peek(Ask::new("alice").cost(0).tier("free")).expect("short").remaining,
            0
        );
        // The unlimited part charges nothing, in either order.
        let asks = [
            limiter.joint(Ask::new("alice").cost(100)).expect("short"),
            limiter.joint(Ask::new("alice").tier("pro")).expect("short"),
        ];
        assert!(check_all(asks).expect("short").decision.allowed);
        assert_eq!(
            limiter.peek(Ask::new("alice").cost(0).tier("pro")).expect("short").remaining,
            4
        );
        let _ = limiter.reset(Ask::new("alice").tier("pro")).expect("short");
    }
}

/// Fault K8.
#[test]
fn costs_of_one_key_are_added_up_exactly() {
    let policy = Policy::token_bucket(Cost::MAX).per(Ticks(1)).build().expect("valid");
    let store = PolicyStore::new(&policy, Capacity::of(10), ManualClock::new(Tick(0)));
    let limiter = RateLimiter::with_store(policy, store);
    let ask = |cost| limiter.joint(Ask::new("alice").cost(cost)).expect("short");
    for costs in [[Cost::MAX, Cost::MAX], [Cost::MAX, 1], [1, Cost::MAX]] {
        let together = check_all(costs.map(ask)).expect("short");
        assert_eq!((together.decision.allowed, together.denied_ask), (false, Some(0)));
        assert_eq!(together.decision.retry_after, None, "no time is enough");
        assert_eq!(limiter.peek(Ask::new("alice").cost(0)).expect("short").remaining, Cost::MAX);
    }
    assert!(check_all([ask(Cost::MAX), ask(0)]).expect("short").decision.allowed);
}

/// Fault K8.
#[test]
fn hundreds_of_parts_with_keys_that_repeat_are_one_decision() {
    let limiter = limiter(Kind::TokenBucket, 4, 1_000);
    let asks = || (0..400).map(|index| limiter.joint(&(index % 100).to_string()).expect("short"));
    assert!(check_all(asks()).expect("short").decision.allowed);
    assert!((0..100).all(|key| used(&limiter, &key.to_string()) == 4));
    assert_eq!(check_all(asks().skip(7)).expect("short").denied_ask, Some(0));
}

proptest! {
    #![proptest_config(cases(400))]

    /// A key may occur several times, under any tiers and with any costs: either all of its rules allow the sum, or
    /// nothing is charged.
    ///
    /// Fault K8.
    #[test]
    fn all_tiers_of_a_key_allow_the_sum_or_nothing_is_charged(
        limits in vec((0..6_usize, 1..9_u64, 5..40_u64), 3),
        requests in vec((vec((0..5_usize, 0..2_usize, 0..4_u64), 1..6), 0..20_i64), 1..40),
    ) {
        const TIERS: [&str; 5] = ["a", "b", "c", "unlimited", "blocked"];
        let policy = |index: usize| {
            let (kind, limit, window) = limits[index];
            Policy::of(Kind::ALL[kind], limit).per(Ticks(window)).build().expect("valid")
        };
        let rules = Tiers::new(Access::Unlimited)
            .tier("a", policy(0))
            .tier("b", policy(1))
            .tier("c", policy(2))
            .tier("unlimited", Access::Unlimited)
            .tier("blocked", Access::Blocked);
        let limiter = tiered(rules);
        let keys = ["x", "y"];
        let mut now = 0;
        for (request, gap) in requests {
            now += gap;
            let at = Tick(now);
            let total = |of: usize| -> Cost {
                request.iter().filter(|(tier, key, _)| *key == of && *tier < 3).map(|(_, _, cost)| cost).sum()
            };
            let denied = request.iter().position(|(tier, key, _)| {
                !limiter.peek(Ask::new(keys[*key]).cost(total(*key)).tier(TIERS[*tier]).at(at)).expect("short").allowed
            });
            let stand = || -> Vec<Decision> {
                let all = (0..3).flat_map(|tier| keys.map(|key| (tier, key)));
                all.map(|(tier, key)| limiter.peek(Ask::new(key).cost(0).tier(TIERS[tier]).at(at)).expect("short")).collect()
            };
            let before = stand();
            let asks = request.iter().map(|(tier, key, cost)| {
                limiter.joint(Ask::new(keys[*key]).cost(*cost).tier(TIERS[*tier]).at(at)).expect("short")
            });
            let together = check_all(asks).expect("short");
            prop_assert_eq!(together.denied_ask, denied);
            let after = stand();
            for (tier, key) in (0..3).flat_map(|tier| (0..2).map(move |key| (tier, key))) {
                let (before, after) = (before[2 * tier + key].remaining, after[2 * tier + key].remaining);
                let asked = request.iter().any(|part| (part.0, part.1) == (tier, key));
                if denied.is_some() {
                    prop_assert!(after >= before, "{} of {} remain", after, before);
                } else if asked {
                    let most = limits[tier].1 - total(key);
                    prop_assert!(after <= most, "{} remain, at most {}", after, most);
                }
            }
        }
    }
}

type PanickingLimiter<'a> = RateLimiter<Panics<'a>, MemoryStore<Panics<'a>, ManualClock>>;

/// An algorithm that panics on demand, and counts its units itself.
struct Panics<'a>(&'a Mutex<&'static str>);

impl Panics<'_> {
    fn at(&self, place: &str) {
        let when = *self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        assert!(when != place, "decision to");
    }
}

impl Algorithm for Panics<'_> {
    type State = Cost;

    fn capacity(&self) -> Cost {
        5
    }
    fn fresh(&self, _: Tick) -> Cost {
        0
    }
    fn last_change(&self, _: &Cost) -> Tick {
        Tick(i64::MIN)
    }
    fn clock_was_set_back(&self, _: &Cost, _: Tick) -> bool {
        false
    }
    fn rebase(&self, _: &mut Cost, _: Tick) {}
    fn fit(&self, used: &Cost, _: Tick, cost: Cost) -> Fit {
        self.at("fit");
        if used + cost <= 5 { Fit::Now } else { Fit::Never }
    }
    fn charge(&self, used: &mut Cost, _: Tick, amount: i128) -> u128 {
        *used = u64::try_from(i128::from(*used) + amount).unwrap_or(0);
        self.at("charge");
        0
    }
    fn facts(&self, used: &Cost, _: Tick, _: Option<Cost>) -> Facts {
        self.at("facts");
        Facts { remaining: 5 - used.min(&5), ..Facts::all_of(5) }
    }
    fn fresh_at(&self, used: &Cost) -> Option<Tick> {
        (*used == 0).then_some(Tick(i64::MIN))
    }
    fn used(&self, used: &Cost, _: Tick) -> Used {
        self.at("used");
        Used::whole(*used)
    }
    fn with_used(&self, used: Used, _: Tick) -> Cost {
        used.whole
    }
    fn encode(&self, _: &Cost, _: &mut Vec<u8>) {}
    fn decode(&self, _: &[u8]) -> Result<Cost, DecodeError> {
        Err(DecodeError::Truncated)
    }
}

/// Wherever an algorithm panics, nothing stays charged, and the keys can be checked again.
///
/// Fault K12.
#[test]
fn a_panic_in_an_algorithm_leaves_nothing_charged() {
    let when = Mutex::new("");
    let own = |max_keys| {
        let store = MemoryStore::new(Capacity::of(max_keys), ManualClock::new(Tick(0)));
        RateLimiter::in_store("own", Panics(&when), store)
    };
    let set = |place| *when.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = place;
    for place in ["fit", "charge", "facts", "used"] {
        // The store of the last part is full, so it calls the algorithm to compare the usage of its keys.
        let (one, other, full) = (own(10), own(10), own(1));
        let users = limiter(Kind::TokenBucket, 5, 10);
        assert!(full.is_allowed("another").expect("room"));
        assert!(one.is_allowed("kept").expect("room") && users.is_allowed("kept").expect("room"));
        let ask = || {
            check_all([
                users.joint("kept").expect("short"),
                users.joint("new").expect("short"),
                one.joint("kept").expect("short"),
                one.joint("new").expect("short"),
                other.joint(Ask::new("new").cost(2)).expect("short"),
                full.joint("new").expect("short"),
            ])
        };
        set(place);
        let panicked = catch_unwind(AssertUnwindSafe(|| drop(ask())));
        set("");
        assert!(panicked.is_err(), "{place}");
        let left = |limiter: &PanickingLimiter<'_>, key: &str| {
            limiter.peek(Ask::new(key).cost(0)).expect("short").remaining
        };
        assert_eq!((used(&users, "kept"), used(&users, "new")), (1, 0), "{place}");
        assert_eq!((left(&one, "kept"), left(&one, "new")), (4, 5), "{place}");
        assert_eq!((left(&other, "new"), left(&full, "new")), (5, 5), "{place}");
        assert!(ask().expect("room").decision.allowed, "{place}: it continues");
        assert_eq!((used(&users, "kept"), left(&one, "kept"), left(&other, "new")), (2, 3, 3));
    }
}

/// The table cannot grow while the locks of many keys are held. If it had not grown before, keys without room would be
/// allowed and not charged.
#[test]
fn a_decision_on_many_new_keys_charges_each_of_them() {
    for (kind, keys) in [(Kind::Gcra, 100), (Kind::FixedWindow, 1_000), (Kind::Gcra, 20_000)] {
        let limiter = limiter(kind, 1, 100_000);
        let names: Vec<String> = (0..keys).map(|key| format!("key {key}")).collect();
        let asks = names.iter().map(|key| limiter.joint(key).expect("short"));
        assert!(check_all(asks).expect("room").decision.allowed);
        let again = names.iter().filter(|key| limiter.is_allowed(key).expect("room")).count();
        assert_eq!(again, 0, "{again} of {keys} were allowed twice");
    }
}
