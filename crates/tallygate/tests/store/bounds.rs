//! Invented keys: memory and pauses stay bounded, and other clients keep their quotas.

use tallygate::algorithm::Algorithm as _;
use tallygate::clock::ManualClock;
use tallygate::snapshot::SnapshotWriter;
use tallygate::store::{Capacity, MemoryStore, PolicyStore, WhenFull};
use tallygate::{Ask, InFlight, Policy, RateLimiter, StoreError, Tick, Ticks, Tiers, check_all};

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(policy: Policy, capacity: Capacity) -> Limiter {
    let store = PolicyStore::new(&policy, capacity, ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

fn hourly(limit: u64) -> Policy {
    Policy::token_bucket(limit).per_hour().build().expect("valid")
}

fn at_0(key: &[u8]) -> Ask<'_> {
    Ask::new(key).at(Tick(0))
}

/// The bound holds for tables of any size and for any home of the keys. (The table once kept one key more if no key was
/// within reach of a home at its end.)
///
/// Fault D1.
#[test]
fn the_bound_on_keys_is_exact() {
    for max_keys in [1, 2, 3, 10, 100] {
        for _ in 0..300 {
            let limiter = limiter(hourly(1), Capacity::of(max_keys));
            for key in 0..3 * max_keys {
                assert!(limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap());
                assert_eq!(limiter.store().usage().keys, max_keys.min(key + 1));
            }
        }
    }
}

/// Fault D2.
#[test]
fn inventing_keys_evicts_no_debt() {
    let limiter = limiter(hourly(100), Capacity::of(1_000));
    assert!(limiter.check(Ask::new("attacker").cost(100).at(Tick(0))).unwrap().allowed);
    for key in 0..200_000_u64 {
        assert!(limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap());
        if key % 1_000 == 0 {
            assert!(
                !limiter.is_allowed(Ask::new("attacker").at(Tick(0))).unwrap(),
                "after {key} keys"
            );
            let honest = format!("honest-{key}");
            assert!(
                limiter.is_allowed(Ask::new(&honest).at(Tick(0))).unwrap(),
                "others are served"
            );
        }
    }
}

#[test]
fn new_keys_are_rejected_if_so_configured() {
    let capacity = Capacity::of(100).when_full(WhenFull::RejectNew);
    let limiter = limiter(Policy::token_bucket(2).per(Ticks(1_000)).build().unwrap(), capacity);
    for key in 0..100_u8 {
        assert!(limiter.is_allowed(Ask::new(&[key]).at(Tick(0))).unwrap());
    }
    assert_eq!(
        limiter.is_allowed(Ask::new("new").at(Tick(0))),
        Err(StoreError::Full { max_keys: 100 })
    );
    assert!(limiter.is_allowed(Ask::new(&[7]).at(Tick(0))).unwrap(), "known keys are served");
    assert_eq!(limiter.store().usage().rejected, 1);
    // New keys find room when the sweep has dropped fresh keys.
    let served = (0..200_u8)
        .filter(|key| limiter.is_allowed(Ask::new(&[200, *key]).at(Tick(1_000))).is_ok());
    assert!(served.count() >= 100);
    assert_eq!(limiter.store().usage().evicted, 0, "no key was evicted that was not fresh");
}

/// Up to its bound the store evicts no key, however keys are distributed.
#[test]
fn a_store_holds_as_many_keys_as_it_says() {
    for max_keys in [1, 2, 5, 10, 100, 1_000, 100_000] {
        let limiter = limiter(hourly(1), Capacity::of(max_keys));
        for key in 0..max_keys as u64 {
            assert!(limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap());
        }
        for key in 0..max_keys as u64 {
            assert!(
                !limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap(),
                "of {max_keys}"
            );
        }
        let usage = limiter.store().usage();
        assert_eq!((usage.keys, usage.evicted), (max_keys, 0));
    }
}

/// The sweep keeps keys that are not fresh, however often it runs.
///
/// Fault C3.
#[test]
fn sweeping_keeps_keys_that_are_not_fresh() {
    let limiter = limiter(hourly(1), Capacity::of(1_000));
    for key in 0..1_000_u64 {
        assert!(limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(1))).unwrap());
    }
    for key in 0..1_000_u64 {
        assert!(!limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(1))).unwrap());
    }
    assert_eq!(limiter.store().usage().swept, 0);
}

/// All keys expire at once, and no single call drops all of them: a call sweeps at most a few keys.
///
/// Fault D6.
#[test]
fn expiry_is_spread_over_many_calls() {
    let policy = Policy::token_bucket(1).per(Ticks(1_000)).build().unwrap();
    let limiter = limiter(policy, Capacity::of(300_000));
    for key in 0..200_000_u64 {
        limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap();
    }
    assert_eq!(limiter.store().usage().keys, 200_000);
    let (mut swept, mut most) = (0, 0);
    for key in 0..100_000_u64 {
        limiter.is_allowed(Ask::new(&(1_000_000 + key).to_le_bytes()).at(Tick(2_000))).unwrap();
        let now = limiter.store().usage().swept;
        most = most.max(now - swept);
        swept = now;
    }
    assert!(most <= 11, "{most} in one call");
    // It continues until half of the table is free.
    assert!(swept > 140_000, "only {swept} in all");
}

/// An eviction loses as few used units as possible: of the keys within reach, the least used one is evicted.
#[test]
fn the_least_used_key_is_evicted_first() {
    let limiter = limiter(hourly(100), Capacity::of(3));
    for (key, used) in [("a", 50), ("b", 1), ("c", 50)] {
        assert!(limiter.check(Ask::new(key).cost(used).at(Tick(0))).unwrap().allowed);
    }
    assert!(limiter.is_allowed(Ask::new("new").at(Tick(1))).unwrap());
    assert_eq!(limiter.store().usage().evicted, 1);
    let remaining = |key| limiter.check(Ask::new(key).cost(0).at(Tick(0))).unwrap().remaining;
    assert_eq!([remaining("a"), remaining("b"), remaining("c")], [50, 100, 50]);
}

/// Keys that are similar in all ways in which people choose similar keys: no key is evicted.
///
/// Fault D4.
#[test]
fn chosen_keys_spread_as_random_ones_do() {
    type Family = (&'static str, fn(u64) -> Vec<u8>);
    let families: [Family; 5] = [
        ("counting up", |n| n.to_le_bytes().to_vec()),
        ("counting up in the last byte", |n| n.to_be_bytes().to_vec()),
        ("one long prefix", |n| [&[b'x'; 500][..], &n.to_le_bytes()].concat()),
        ("one long ending", |n| [&n.to_le_bytes()[..], &[0; 500]].concat()),
        ("one set bit and zeros", |n| {
            let mut key = vec![0; 1_250];
            key[usize::try_from(n / 8).expect("small") % 1_250] = 1 << (n % 8);
            key.truncate(1_250 - usize::try_from(n / 10_000).expect("small"));
            key
        }),
    ];
    for (name, family) in families {
        let limiter = limiter(hourly(1), Capacity::of(100_000));
        let keys: std::collections::HashSet<Vec<u8>> = (0..100_000).map(family).collect();
        for key in &keys {
            assert!(
                limiter.is_allowed(Ask::new(key).at(Tick(0))).unwrap(),
                "{name}: mistaken for another"
            );
        }
        let usage = limiter.store().usage();
        assert_eq!((usage.keys, usage.evicted), (keys.len(), 0), "{name}: crowded");
    }
}

/// A decision on several keys that needs more places than there are charges none of its keys.
///
/// Fault K9.
#[test]
fn a_joint_decision_evicts_no_key_from_a_store_that_rejects_new_ones() {
    let rejecting = |max_keys| Capacity::of(max_keys).when_full(WhenFull::RejectNew);
    let full = limiter(hourly(2), rejecting(10));
    let other = limiter(hourly(100), Capacity::of(10));
    for key in 0..10_u8 {
        assert!(full.is_allowed(Ask::new(&[key]).at(Tick(0))).unwrap());
    }
    let error = StoreError::Full { max_keys: 10 };
    for key in 0..1_000_u16 {
        let client = other.joint(at_0(b"client")).unwrap();
        let new = check_all([client, full.joint(at_0(&key.to_be_bytes())).unwrap()]);
        assert_eq!(new.map(|together| together.decision), Err(error.clone()));
    }
    let usage = full.store().usage();
    assert_eq!((usage.keys, usage.evicted, usage.rejected), (10, 0, 1_000));
    assert_eq!(
        other.check(Ask::new("client").cost(0).at(Tick(0))).unwrap().remaining,
        100,
        "nothing is charged"
    );
    assert_eq!(other.store().usage().keys, 0);

    // Stored keys are decided as usual, and so is a decision that another key denies.
    let known = check_all([full.joint(at_0(&[3])).unwrap()]).unwrap();
    assert_eq!((known.decision.allowed, known.decision.remaining), (true, 0));
    let denied =
        check_all([full.joint(at_0(&[3])).unwrap(), full.joint(at_0(b"new")).unwrap()]).unwrap();
    assert!(!denied.decision.allowed);

    // With room for two keys, three new keys get no place, and two new keys get one each.
    let full = limiter(hourly(2), rejecting(3));
    assert!(full.is_allowed(Ask::new("kept").at(Tick(0))).unwrap());
    let asks = |keys: &'static [&'static str]| {
        check_all(keys.iter().map(|key| full.joint(at_0(key.as_bytes())).unwrap()))
    };
    assert_eq!(
        asks(&["a", "b", "c"]).map(|answer| answer.decision),
        Err(StoreError::Full { max_keys: 3 })
    );
    assert_eq!(full.store().usage().keys, 1, "the places are given up");
    assert!(asks(&["a", "kept", "b"]).unwrap().decision.allowed);
    assert_eq!((full.store().usage().keys, full.store().usage().evicted), (3, 0));
    for key in ["a", "b"] {
        assert_eq!(full.check(Ask::new(key).cost(0).at(Tick(0))).unwrap().remaining, 1);
    }
    assert_eq!(full.check(Ask::new("kept").cost(0).at(Tick(0))).unwrap().remaining, 0);
}

/// A fresh key's place can be taken, but not that of a key of the same decision: then there are too few places.
///
/// Fault K9.
#[test]
fn a_new_key_takes_no_place_of_a_key_in_the_same_decision() {
    let policy = Policy::token_bucket(2).per(Ticks(1_000)).build().unwrap();
    for when_full in [WhenFull::RejectNew, WhenFull::EvictLeastUsed] {
        for max_keys in 1..4 {
            let limiter = limiter(policy.clone(), Capacity::of(max_keys).when_full(when_full));
            for key in 0..max_keys {
                assert!(limiter.is_allowed(Ask::new(&key.to_be_bytes()).at(Tick(0))).unwrap());
            }
            // All are fresh now. The decision needs all of them, and one more.
            let joint =
                |key: usize| limiter.joint(Ask::new(&key.to_be_bytes()).at(Tick(5_000))).unwrap();
            let answer = check_all((0..=max_keys).map(joint));
            assert_eq!(answer.map(|answer| answer.decision), Err(StoreError::Full { max_keys }));
            let left = |key: usize| {
                limiter
                    .check(Ask::new(&key.to_be_bytes()).cost(0).at(Tick(5_000)))
                    .unwrap()
                    .remaining
            };
            assert!((0..=max_keys).all(|key| left(key) == 2), "nothing is charged");
            // With one key less there are enough.
            assert!(check_all((1..=max_keys).map(joint)).unwrap().decision.allowed);
            assert!((1..=max_keys).all(|key| left(key) == 1), "each has its own charge");
            assert_eq!(limiter.store().usage().keys, max_keys);
        }
    }
}

/// However the requests come: more clients than there is room for get an error, and none is forgotten.
///
/// Fault K9.
#[test]
fn requests_in_flight_are_never_forgotten() {
    let in_flight = InFlight::for_clients(1, 10);
    let mut held = Vec::new();
    for client in 0..10_u8 {
        let entered = check_all([in_flight.joint(&[client]).unwrap()]).unwrap();
        assert!(entered.decision.allowed);
        held.push(entered);
    }
    for client in 10..=255_u8 {
        assert!(in_flight.enter([client]).is_err());
        assert!(check_all([in_flight.joint(&[client]).unwrap()]).is_err());
        let both = [in_flight.joint(&[client]).unwrap(), in_flight.joint(&[client - 1]).unwrap()];
        assert!(!check_all(both).is_ok_and(|answer| answer.decision.allowed));
    }
    for client in 0..10_u8 {
        assert_eq!(in_flight.count([client]).unwrap(), 1);
        assert!(in_flight.enter([client]).unwrap().is_none());
    }
    drop(held);
    assert!(in_flight.enter("new").unwrap().is_some());
}

/// Threads that come at once get no more places than there are, and no key is evicted.
///
/// Fault K9.
#[test]
fn threads_at_once_get_no_more_places_than_there_are() {
    let capacity = Capacity::of(100).when_full(WhenFull::RejectNew);
    let limiter = &limiter(hourly(1), capacity);
    let served: usize = std::thread::scope(|scope| {
        let run = |thread: u64| {
            let keys = (0..200).map(move |key| (thread << 32 | key).to_le_bytes());
            keys.filter(|key| match key[0] % 2 {
                0 => limiter.is_allowed(Ask::new(key).at(Tick(0))).is_ok(),
                _ => check_all([limiter.joint(Ask::new(&key).at(Tick(0))).unwrap()]).is_ok(),
            })
            .count()
        };
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let usage = limiter.store().usage();
    assert_eq!((served, usage.keys, usage.evicted), (100, 100, 0), "{usage:?}");
}

/// Checks of cost 0 and peeks store nothing and are always answered, also for a policy whose new keys do not start with
/// a full quota.
///
/// Fault K9.
#[test]
fn peeks_store_nothing_and_work_in_a_full_store() {
    let policy = Policy::token_bucket(10).per_hour().starting_with(0).build().unwrap();
    let capacity = Capacity::of(1).when_full(WhenFull::RejectNew);
    let limiter = limiter(policy, capacity);
    let looks = || {
        assert!(!limiter.peek(Ask::new("new").at(Tick(0))).unwrap().allowed);
        assert_eq!(limiter.check(Ask::new("new").cost(0).at(Tick(0))).unwrap().remaining, 0);
        assert_eq!(limiter.refund(Ask::new("new").cost(0).at(Tick(0))).unwrap().remaining, 0);
        let joint = check_all([limiter.joint(at_0(b"new").cost(0)).unwrap()]).unwrap();
        assert_eq!(joint.decision.remaining, 0);
    };
    looks();
    assert_eq!(limiter.store().usage().keys, 0);
    assert!(!limiter.is_allowed(Ask::new("kept").at(Tick(0))).unwrap());
    assert_eq!(limiter.store().usage().keys, 1);
    looks();
    let usage = limiter.store().usage();
    assert_eq!((usage.keys, usage.evicted, usage.rejected), (1, 0, 0));
}

/// A refund, a reset and a cancellation charge nothing, so no other client pays for them.
///
/// Fault K9.
#[test]
fn operations_that_return_units_to_unknown_keys_evict_no_key() {
    const KEYS: u64 = 20;
    for kind in tallygate::Kind::ALL {
        for start in [0, 3, 10] {
            let policy = Policy::of(kind, 10).per(Ticks(1_000)).starting_with(start).build();
            let limiter = limiter(policy.unwrap(), Capacity::of(20));
            let (later, ages) = (Tick(900), Ticks(10_000));
            let mut reserved = Vec::new();
            for key in 0..KEYS {
                let key = key.to_le_bytes();
                let ask = Ask::new(&key).cost(if start == 0 { 1 } else { start });
                assert_eq!(limiter.is_allowed(ask.at(Tick(0))).unwrap(), start > 0, "{kind}");
                if let Some(reservation) = limiter.reserve(ask.at(later), ages).unwrap().granted() {
                    reserved.push(reservation);
                }
            }
            // The reservations are now those of keys that are not stored.
            for key in KEYS..3 * KEYS {
                let _ = limiter.check(Ask::new(&key.to_le_bytes()).cost(10).at(later)).unwrap();
            }
            let before = limiter.store().usage();
            assert_eq!(before.keys, 20, "{kind}, {start}");
            for key in 1_000..1_100_u64 {
                let key = key.to_le_bytes();
                let refunded = limiter.refund(Ask::new(&key).cost(2).at(later)).unwrap();
                assert_eq!(refunded.remaining, (start + 2).min(10), "{kind}, {start}");
                let reset = limiter.reset(Ask::new(&key).at(later)).unwrap();
                assert_eq!(reset.remaining, start, "{kind}, {start}");
            }
            for mut reservation in reserved {
                let _ = limiter.cancel(&mut reservation).unwrap();
            }
            let after = limiter.store().usage();
            assert_eq!(
                (after.evicted, after.rejected),
                (before.evicted, before.rejected),
                "{kind}"
            );
        }
    }
}

/// A reset restores the initial state of a key, and returns the state that the next check will find.
#[test]
fn a_reset_and_the_next_check_agree_for_keys_that_do_not_start_full() {
    for kind in tallygate::Kind::ALL {
        for start in [0, 3, 10] {
            let policy = Policy::of(kind, 10).per(Ticks(1_000)).starting_with(start).build();
            let limiter = limiter(policy.unwrap(), Capacity::of(10));
            let decision = limiter.reset(Ask::new("unseen").at(Tick(0))).unwrap();
            assert_eq!(decision.remaining, start, "{kind}");
            assert_eq!(
                limiter.check(Ask::new("unseen").cost(0).at(Tick(0))).unwrap().remaining,
                start,
                "{kind}"
            );
            assert_eq!(
                limiter.is_allowed(Ask::new("unseen").at(Tick(0))).unwrap(),
                start > 0,
                "{kind}"
            );
            assert_eq!(
                limiter.reset(Ask::new("unseen").at(Tick(1))).unwrap().remaining,
                start,
                "{kind}"
            );
            assert_eq!(
                limiter.check(Ask::new("unseen").cost(0).at(Tick(1))).unwrap().remaining,
                start,
                "{kind}"
            );
        }
    }
}

/// A store is saved only as the store of its own policy.
#[test]
fn a_snapshot_under_another_policy_is_rejected() {
    let limiter = limiter(hourly(5), Capacity::of(10));
    assert!(limiter.is_allowed(Ask::new("a").at(Tick(0))).unwrap());
    for other in [hourly(6), Policy::fixed_window(5).per_hour().build().unwrap()] {
        let mut snapshot = SnapshotWriter::new(Vec::new()).unwrap();
        let error = limiter.store().save(&other, "api", &mut snapshot).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::InvalidInput);
        let why = error.get_ref().and_then(|why| why.downcast_ref::<StoreError>());
        assert_eq!(why, Some(&StoreError::OtherPolicy));
    }
    let mut snapshot = SnapshotWriter::new(Vec::new()).unwrap();
    assert_eq!(limiter.store().save(&hourly(5), "api", &mut snapshot).unwrap(), 1);
}

const DAY: Ticks = Ticks(86_400_000_000_000);

fn daily(limit: u64) -> Policy {
    Policy::token_bucket(limit).per(DAY).build().expect("valid")
}

/// After a flood of ten times as many invented keys as there is room for, at least 99 % of the clients that had
/// used up their quota before are still denied, whatever the invented keys cost and whatever their limits are.
///
/// Fault J6.
#[test]
fn a_flood_of_invented_keys_evicts_no_client_with_debt() {
    const MAX_KEYS: usize = 10_000;
    const CLIENTS: u64 = 200;
    const STEP: Ticks = Ticks(1_000_000);
    // The tier of the invented keys, the cost of each, and whether the clock stops meanwhile.
    let floods = [
        ("free", 1, STEP),
        ("free", 5, STEP),
        ("free", 5, Ticks(0)),
        ("pro", 1, STEP),
        ("pro", 1_000, STEP),
        ("pro", 1_000, Ticks(0)),
        ("once", 1, STEP),
        ("huge", 1, STEP),
        ("huge", 1 << 40, STEP),
        ("short", 1_000, STEP),
        ("windows", 1_000, STEP),
    ];
    let windows = Policy::fixed_window(1_000).per(DAY).build().expect("valid");
    let short = Policy::token_bucket(1_000).per(Ticks(DAY.0 / 24)).build().expect("valid");
    for (tier, cost, step) in floods {
        let clock = ManualClock::new(Tick(1_000_000));
        let tiers = Tiers::new(daily(5))
            .tier("free", daily(5))
            .tier("pro", daily(1_000))
            .tier("once", daily(1))
            .tier("huge", daily(1 << 40))
            .tier("short", short.clone())
            .tier("windows", windows.clone());
        let store = MemoryStore::new(Capacity::of(MAX_KEYS), &clock);
        let limiter = RateLimiter::in_store("flooded", tiers, store);
        for client in 0..CLIENTS {
            assert!(limiter.check(Ask::new(&client.to_le_bytes()).cost(5)).unwrap().allowed);
            clock.advance(Ticks(1));
        }
        // Some ordinary clients, which have used a part of their quota.
        for client in 0..5_000_u64 {
            assert!(limiter.check(&(1 << 40 | client).to_le_bytes()).unwrap().allowed);
        }
        clock.advance(STEP);
        for key in 0..10 * MAX_KEYS as u64 {
            assert!(
                limiter
                    .check(Ask::new(&(1 << 50 | key).to_le_bytes()).cost(cost).tier(tier))
                    .unwrap()
                    .allowed
            );
            clock.advance(step);
        }
        let denied =
            (0..CLIENTS).filter(|client| !limiter.peek(&client.to_le_bytes()).unwrap().allowed);
        let denied = denied.count();
        assert!(denied * 100 >= 99 * 200, "{denied} after a flood of {tier} for {cost}");
        assert!(limiter.store().usage().keys <= MAX_KEYS);
        // A new client is served now, and its quota is counted.
        let served = (0..6).filter(|_| limiter.is_allowed("new client").unwrap()).count();
        assert!(served == 5 || step == Ticks(0), "{served} after a flood of {tier} for {cost}");
    }
}

/// The same for a store of one policy, where all invented keys use their quota up.
///
/// Fault J6.
#[test]
fn clients_that_used_up_their_quota_first_stay_denied() {
    for policy in [daily(1), daily(5), Policy::sliding_window_log(5).per(DAY).build().unwrap()] {
        let clock = ManualClock::new(Tick(1_000_000));
        let store = PolicyStore::new(&policy, Capacity::of(10_000), &clock);
        let cost = policy.capacity();
        let limiter = RateLimiter::with_store(policy, store);
        for key in 0..100_200_u64 {
            assert!(limiter.check(Ask::new(&key.to_le_bytes()).cost(cost)).unwrap().allowed);
            clock.advance(Ticks(1_000_000));
        }
        let denied = (0..200_u64).filter(|key| !limiter.peek(&key.to_le_bytes()).unwrap().allowed);
        assert_eq!(denied.count(), 200);
    }
}

/// A client that has earned a part of its quota back must not get the rest of it by a flood of keys that have used all of theirs.
///
/// Fault J6.
#[test]
fn a_debt_that_has_begun_to_drain_is_not_evicted() {
    const MAX_KEYS: usize = 10_000;
    const CLIENTS: u64 = 200;
    for drained in [DAY.0 / 1_000, DAY.0 / 4] {
        let clock = ManualClock::new(Tick(1_000_000));
        let tiers = Tiers::new(daily(1_000)).tier("once", daily(1));
        let store = MemoryStore::new(Capacity::of(MAX_KEYS), &clock);
        let limiter = RateLimiter::in_store("draining", tiers, store);
        for client in 0..CLIENTS {
            assert!(limiter.check(Ask::new(&client.to_le_bytes()).cost(1_000)).unwrap().allowed);
        }
        clock.advance(Ticks(drained));
        for key in 0..10 * MAX_KEYS as u64 {
            assert!(
                limiter
                    .check(Ask::new(&(1 << 50 | key).to_le_bytes()).tier("once"))
                    .unwrap()
                    .allowed
            );
            clock.advance(Ticks(1_000_000));
        }
        let earned = 1_000 * (drained + 100 * 1_000_000_000) / DAY.0 + 1;
        let cleared = (0..CLIENTS)
            .filter(|client| limiter.peek(&client.to_le_bytes()).unwrap().remaining > earned)
            .count();
        assert!(cleared * 100 <= 200, "{cleared} got more than the {earned} that they earned");
    }
}

/// Clients that have used up their quota take nineteen of twenty places. A flood of invented keys uses only the
/// remaining one.
///
/// Fault J6.
#[test]
fn a_store_that_is_almost_full_of_debts_keeps_them() {
    const MAX_KEYS: usize = 10_000;
    for (clients, cost) in [(9_000_u64, 1), (9_000, 1_000), (9_500, 1), (9_500, 1_000)] {
        let clock = ManualClock::new(Tick(1_000_000));
        let store = PolicyStore::new(&daily(1_000), Capacity::of(MAX_KEYS), &clock);
        let limiter = RateLimiter::with_store(daily(1_000), store);
        for client in 0..clients {
            assert!(limiter.check(Ask::new(&client.to_le_bytes()).cost(1_000)).unwrap().allowed);
        }
        for key in 0..10 * MAX_KEYS as u64 {
            clock.advance(Ticks(1_000));
            assert!(
                limiter.check(Ask::new(&(1 << 50 | key).to_le_bytes()).cost(cost)).unwrap().allowed
            );
        }
        let is_washed_out = |client: &u64| limiter.peek(&client.to_le_bytes()).unwrap().allowed;
        let washed_out = (0..clients).filter(is_washed_out).count() as u64;
        assert!(washed_out * 100 <= clients, "{washed_out} of {clients} at a cost of {cost}");
    }
}

/// Shares are compared, not units: a client that has used all of a small quota is evicted after one that has used a
/// little of a large quota.
#[test]
fn the_key_with_the_smallest_used_share_is_evicted_first() {
    let clock = ManualClock::new(Tick(0));
    let tiers = Tiers::new(daily(2)).tier("large", daily(1_000));
    let store = MemoryStore::new(Capacity::of(3), &clock);
    let limiter = RateLimiter::in_store("shares", tiers, store);
    assert!(limiter.check(Ask::new("large").cost(400).tier("large")).unwrap().allowed);
    assert!(limiter.check(Ask::new("all").cost(2)).unwrap().allowed);
    assert!(limiter.check("half").unwrap().allowed);
    clock.advance(Ticks(1));
    assert!(limiter.check(Ask::new("new").cost(2)).unwrap().allowed);
    assert_eq!(
        limiter.check(Ask::new("large").cost(0).tier("large")).unwrap().remaining,
        1_000,
        "two fifths went"
    );
    assert_eq!(limiter.check(Ask::new("all").cost(0)).unwrap().remaining, 0);
    assert_eq!(limiter.check(Ask::new("half").cost(0)).unwrap().remaining, 1);
}

/// A sweep drops the keys that are idle, keeps all others, and reports how many are in use.
#[test]
fn a_sweep_drops_idle_keys_and_counts_those_in_use() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(2).per(Ticks(1_000)).build().unwrap();
    let store = PolicyStore::new(&policy, Capacity::of(100_000), &clock);
    let limiter = RateLimiter::with_store(policy, store);
    let usage = || limiter.store().usage();
    for key in 0..10_000_u64 {
        assert!(limiter.is_allowed(&key.to_le_bytes()).unwrap());
    }
    clock.advance(Ticks(400));
    // These are fresh at 1000, and all others at 500.
    for key in 0..500_u64 {
        assert!(limiter.is_allowed(&key.to_le_bytes()).unwrap());
    }
    assert_eq!((usage().keys, usage().in_use), (10_000, None));

    clock.advance(Ticks(200));
    let mut calls = 0;
    loop {
        calls += 1;
        let swept = limiter.sweep(100);
        assert!(swept.dropped <= 500, "{swept:?}: a bucket has at most five keys");
        if swept.buckets_left == 0 {
            break;
        }
        assert_eq!(usage().in_use, None, "the pass is not complete");
    }
    assert!(calls > 10, "a call does a bounded piece of work");
    assert_eq!((usage().keys, usage().in_use), (500, Some(500)));
    assert_eq!((usage().swept, usage().evicted), (9_500, 0));
    for key in 0..500_u64 {
        let used = limiter.peek(&key.to_le_bytes()).unwrap();
        assert_eq!(used.reset_after, Ticks(900), "what was used stays used");
    }
}

/// A client that is slower than its limit is fresh at every visit of the sweep, but still in use: it keeps its place if
/// it sends a request at least once per pass.
#[test]
fn a_client_that_comes_once_per_pass_keeps_its_place() {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::token_bucket(2).per(Ticks(10)).build().unwrap();
    let store = PolicyStore::new(&policy, Capacity::of(1_000), &clock);
    let limiter = RateLimiter::with_store(policy, store);
    let usage = || limiter.store().usage();
    let pass = || while limiter.sweep(7).buckets_left > 0 {};
    pass();
    assert_eq!(usage().in_use, Some(0));
    clock.advance(Ticks(1));
    for _ in 0..10 {
        assert!(limiter.is_allowed("slow").unwrap());
        clock.advance(Ticks(500));
        pass();
        assert_eq!((usage().keys, usage().in_use), (1, Some(1)));
        clock.advance(Ticks(500));
    }
    pass();
    assert_eq!((usage().keys, usage().in_use), (0, Some(0)), "it did not come for a whole pass");
    assert_eq!(usage().swept, 1);
}

/// Sweeps by several threads, while others decide, drop no key that has used units.
#[test]
fn a_sweep_beside_decisions_drops_no_key_that_is_in_use() {
    let limiter = &limiter(hourly(1), Capacity::of(10_000));
    std::thread::scope(|scope| {
        for thread in 0..2_u64 {
            scope.spawn(move || {
                for key in 0..4_000_u64 {
                    let key = (thread << 32 | key).to_le_bytes();
                    assert!(limiter.is_allowed(Ask::new(&key)).unwrap());
                }
            });
            scope.spawn(move || (0..400).for_each(|_| _ = limiter.sweep(50)));
        }
    });
    while limiter.sweep(100).buckets_left > 0 {}
    let usage = limiter.store().usage();
    assert_eq!((usage.keys, usage.swept, usage.evicted), (8_000, 0, 0), "{usage:?}");
}
