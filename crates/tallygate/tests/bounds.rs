//! Whatever an attacker invents: memory, pauses and other people's quotas stay bounded.

use tallygate::{
    Algorithm as _, Capacity, InFlight, ManualClock, MemoryStore, Policy, PolicyStore, RateLimiter,
    SnapshotWriter, StoreError, Tick, Ticks, Tiers, WhenFull, check_all, check_all_at,
};

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(policy: Policy, capacity: Capacity) -> Limiter {
    let store = PolicyStore::new(&policy, capacity, ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

fn hourly(limit: u64) -> Policy {
    Policy::token_bucket(limit).per_hour().build().expect("valid")
}

/// However small the table, and wherever in it the keys belong: not one more than was said. (It once
/// kept one more when nobody lived within reach of a home at the table's end.)
#[test]
fn d1_the_bound_on_keys_is_exact() {
    for max_keys in [1, 2, 3, 10, 100] {
        for _ in 0..300 {
            let limiter = limiter(hourly(100), Capacity::of(max_keys));
            for key in 0..3 * max_keys {
                assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap());
                assert_eq!(limiter.store().usage().keys, max_keys.min(key + 1));
            }
        }
    }
}

/// The same where each key uses up its quota: no more keys are allowed than are kept.
#[test]
fn d1_a_full_store_allows_no_key_that_it_cannot_keep() {
    for max_keys in [1, 2, 3, 10, 100] {
        for _ in 0..300 {
            let limiter = limiter(hourly(1), Capacity::of(max_keys));
            for key in 0..3 * max_keys {
                let is_allowed = limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap();
                assert_eq!(is_allowed, key < max_keys);
                assert_eq!(limiter.store().usage().keys, max_keys.min(key + 1));
            }
            let usage = limiter.store().usage();
            assert_eq!((usage.evicted, usage.refused), (0, 2 * max_keys as u64));
        }
    }
}

#[test]
fn d2_nobody_washes_their_debt_out_by_inventing_keys() {
    let limiter = limiter(hourly(100), Capacity::of(1_000));
    assert!(limiter.check_n_at("attacker", 100, Tick(0)).unwrap().allowed);
    for key in 0..200_000_u64 {
        assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap());
        if key % 1_000 == 0 {
            assert!(!limiter.is_allowed_at("attacker", Tick(0)).unwrap(), "after {key} keys");
            let honest = format!("honest-{key}");
            assert!(limiter.is_allowed_at(honest, Tick(0)).unwrap(), "others are served");
        }
    }
}

#[test]
fn new_keys_are_refused_if_that_was_asked_for() {
    let capacity = Capacity::of(100).when_full(WhenFull::RefuseNew);
    let limiter = limiter(Policy::token_bucket(2).per(Ticks(1_000)).build().unwrap(), capacity);
    for key in 0..100_u8 {
        assert!(limiter.is_allowed_at([key], Tick(0)).unwrap());
    }
    assert_eq!(limiter.is_allowed_at("new", Tick(0)), Err(StoreError::Full { max_keys: 100 }));
    assert!(limiter.is_allowed_at([7], Tick(0)).unwrap(), "known keys are served");
    assert_eq!(limiter.store().usage().refused, 1);
    // Fresh keys make room, once the sweep has come by.
    let served = (0..200_u8).filter(|key| limiter.is_allowed_at([200, *key], Tick(1_000)).is_ok());
    assert!(served.count() >= 100);
    assert_eq!(limiter.store().usage().evicted, 0, "nobody was forgotten who was not fresh");
}

/// Up to its bound the store forgets nobody, however keys fall.
#[test]
fn a_store_holds_as_many_keys_as_it_says() {
    for max_keys in [1, 2, 5, 10, 100, 1_000, 100_000] {
        let limiter = limiter(hourly(1), Capacity::of(max_keys));
        for key in 0..max_keys as u64 {
            assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap());
        }
        for key in 0..max_keys as u64 {
            assert!(!limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap(), "of {max_keys}");
        }
        let usage = limiter.store().usage();
        assert_eq!((usage.keys, usage.evicted), (max_keys, 0));
    }
}

/// The sweep passes over whoever is not fresh, however often it comes by.
#[test]
fn c3_sweeping_spares_whoever_is_not_fresh() {
    let limiter = limiter(hourly(1), Capacity::of(1_000));
    for key in 0..1_000_u64 {
        assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(1)).unwrap());
    }
    for key in 0..1_000_u64 {
        assert!(!limiter.is_allowed_at(key.to_le_bytes(), Tick(1)).unwrap());
    }
    assert_eq!(limiter.store().usage().swept, 0);
}

/// Everybody expires at once, and nobody pays for it at once: a call sweeps a few keys at most.
#[test]
fn d6_expiry_is_spread_over_many_calls() {
    let policy = Policy::token_bucket(1).per(Ticks(1_000)).build().unwrap();
    let limiter = limiter(policy, Capacity::of(300_000));
    for key in 0..200_000_u64 {
        limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap();
    }
    assert_eq!(limiter.store().usage().keys, 200_000);
    let (mut swept, mut most) = (0, 0);
    for key in 0..100_000_u64 {
        limiter.is_allowed_at((1_000_000 + key).to_le_bytes(), Tick(2_000)).unwrap();
        let now = limiter.store().usage().swept;
        most = most.max(now - swept);
        swept = now;
    }
    assert!(most <= 11, "{most} in one call");
    // It goes on until half of the table is free.
    assert!(swept > 140_000, "only {swept} in all");
}

/// What an eviction forgives is no more than it must be: of what lies near, the least used goes.
#[test]
fn the_least_used_goes_first() {
    let limiter = limiter(hourly(100), Capacity::of(3));
    for (key, used) in [("a", 50), ("b", 1), ("c", 50)] {
        assert!(limiter.check_n_at(key, used, Tick(0)).unwrap().allowed);
    }
    assert!(limiter.is_allowed_at("new", Tick(1)).unwrap());
    assert_eq!(limiter.store().usage().evicted, 1);
    let remaining = |key| limiter.check_n_at(key, 0, Tick(0)).unwrap().remaining;
    assert_eq!([remaining("a"), remaining("b"), remaining("c")], [50, 100, 50]);
}

/// Keys that are alike in all the ways people choose keys to be alike: nobody is crowded out.
#[test]
fn d4_chosen_keys_spread_as_random_ones_do() {
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
            assert!(limiter.is_allowed_at(key, Tick(0)).unwrap(), "{name}: taken for another");
        }
        let usage = limiter.store().usage();
        assert_eq!((usage.keys, usage.evicted), (keys.len(), 0), "{name}: crowded");
    }
}

/// A decision on several keys that needs more places than there are charges none of its keys.
#[test]
fn k9_a_joint_decision_evicts_no_key_from_a_store_that_refuses_new_ones() {
    let refusing = |max_keys| Capacity::of(max_keys).when_full(WhenFull::RefuseNew);
    let full = limiter(hourly(2), refusing(10));
    let other = limiter(hourly(100), Capacity::of(10));
    for key in 0..10_u8 {
        assert!(full.is_allowed_at([key], Tick(0)).unwrap());
    }
    let error = StoreError::Full { max_keys: 10 };
    for key in 0..1_000_u16 {
        let new = check_all_at(
            [other.ask("client").unwrap(), full.ask(key.to_be_bytes()).unwrap()],
            Tick(0),
        );
        assert_eq!(new.map(|together| together.decision), Err(error));
    }
    let usage = full.store().usage();
    assert_eq!((usage.keys, usage.evicted, usage.refused), (10, 0, 1_000));
    assert_eq!(
        other.check_n_at("client", 0, Tick(0)).unwrap().remaining,
        100,
        "nothing is charged"
    );
    assert_eq!(other.store().usage().keys, 0);

    // Keys that are kept are decided as ever, and so is a decision that another key denies.
    let known = check_all_at([full.ask([3]).unwrap()], Tick(0)).unwrap();
    assert_eq!((known.decision.allowed, known.decision.remaining), (true, 0));
    let denied = check_all_at([full.ask([3]).unwrap(), full.ask("new").unwrap()], Tick(0)).unwrap();
    assert!(!denied.decision.allowed);

    // With room for two, three new keys get none, and two get theirs.
    let full = limiter(hourly(2), refusing(3));
    assert!(full.is_allowed_at("kept", Tick(0)).unwrap());
    let asks = |keys: &'static [&'static str]| {
        check_all_at(keys.iter().map(|key| full.ask(key).unwrap()), Tick(0))
    };
    assert_eq!(
        asks(&["a", "b", "c"]).map(|told| told.decision),
        Err(StoreError::Full { max_keys: 3 })
    );
    assert_eq!(full.store().usage().keys, 1, "the places are given up");
    assert!(asks(&["a", "kept", "b"]).unwrap().decision.allowed);
    assert_eq!((full.store().usage().keys, full.store().usage().evicted), (3, 0));
    for key in ["a", "b"] {
        assert_eq!(full.check_n_at(key, 0, Tick(0)).unwrap().remaining, 1);
    }
    assert_eq!(full.check_n_at("kept", 0, Tick(0)).unwrap().remaining, 0);
}

/// A fresh key's place can be taken, but not that of a key of the same decision: then there are too few places.
#[test]
fn k9_a_new_key_takes_no_place_of_a_key_in_the_same_decision() {
    let policy = Policy::token_bucket(2).per(Ticks(1_000)).build().unwrap();
    for when_full in [WhenFull::RefuseNew, WhenFull::EvictLeastUsed] {
        for max_keys in 1..4 {
            let limiter = limiter(policy.clone(), Capacity::of(max_keys).when_full(when_full));
            for key in 0..max_keys {
                assert!(limiter.is_allowed_at(key.to_be_bytes(), Tick(0)).unwrap());
            }
            // All are fresh now. The decision needs all of them, and one more.
            let asks = (0..=max_keys).map(|key| limiter.ask(key.to_be_bytes()).unwrap());
            let told = check_all_at(asks, Tick(5_000));
            assert_eq!(told.map(|told| told.decision), Err(StoreError::Full { max_keys }));
            let left = |key: usize| {
                limiter.check_n_at(key.to_be_bytes(), 0, Tick(5_000)).unwrap().remaining
            };
            assert!((0..=max_keys).all(|key| left(key) == 2), "nothing is charged");
            // With one key less there are enough.
            let asks = (1..=max_keys).map(|key| limiter.ask(key.to_be_bytes()).unwrap());
            assert!(check_all_at(asks, Tick(5_000)).unwrap().decision.allowed);
            assert!((1..=max_keys).all(|key| left(key) == 1), "each has its own charge");
            assert_eq!(limiter.store().usage().keys, max_keys);
        }
    }
}

/// However the requests come: more clients than there is room for get an error, and none is forgotten.
#[test]
fn k9_requests_in_flight_are_never_forgotten() {
    let in_flight = InFlight::for_clients(1, 10);
    let mut held = Vec::new();
    for client in 0..10_u8 {
        let entered = check_all([in_flight.ask([client]).unwrap()]).unwrap();
        assert!(entered.decision.allowed);
        held.push(entered);
    }
    for client in 10..=255_u8 {
        assert!(in_flight.enter([client]).is_err());
        assert!(check_all([in_flight.ask([client]).unwrap()]).is_err());
        let both = [in_flight.ask([client]).unwrap(), in_flight.ask([client - 1]).unwrap()];
        assert!(!check_all(both).is_ok_and(|told| told.decision.allowed));
    }
    for client in 0..10_u8 {
        assert_eq!(in_flight.count([client]).unwrap(), 1);
        assert!(in_flight.enter([client]).unwrap().is_none());
    }
    drop(held);
    assert!(in_flight.enter("new").unwrap().is_some());
}

/// Threads that come at once get no more places than there are, and nobody is evicted.
#[test]
fn k9_threads_at_once_get_no_more_places_than_there_are() {
    let capacity = Capacity::of(100).when_full(WhenFull::RefuseNew);
    let limiter = &limiter(hourly(1), capacity);
    let served: usize = std::thread::scope(|scope| {
        let run = |thread: u64| {
            let keys = (0..200).map(move |key| (thread << 32 | key).to_le_bytes());
            keys.filter(|key| match key[0] % 2 {
                0 => limiter.is_allowed_at(key, Tick(0)).is_ok(),
                _ => check_all_at([limiter.ask(key).unwrap()], Tick(0)).is_ok(),
            })
            .count()
        };
        let threads: Vec<_> = (0..8).map(|thread| scope.spawn(move || run(thread))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    let usage = limiter.store().usage();
    assert_eq!((served, usage.keys, usage.evicted), (100, 100, 0), "{usage:?}");
}

/// Looks keep nothing and are always answered, also for a policy whose new keys do not start full.
#[test]
fn k9_looks_store_nothing_and_are_answered_by_a_full_store() {
    let policy = Policy::token_bucket(10).per_hour().starting_with(0).build().unwrap();
    let capacity = Capacity::of(1).when_full(WhenFull::RefuseNew);
    let limiter = limiter(policy, capacity);
    let looks = || {
        assert!(!limiter.peek_at("new", Tick(0)).unwrap().allowed);
        assert_eq!(limiter.check_n_at("new", 0, Tick(0)).unwrap().remaining, 0);
        assert_eq!(limiter.refund_at("new", 0, Tick(0)).unwrap().remaining, 0);
        let joint = check_all_at([limiter.ask("new").unwrap().cost(0)], Tick(0)).unwrap();
        assert_eq!(joint.decision.remaining, 0);
    };
    looks();
    assert_eq!(limiter.store().usage().keys, 0);
    assert!(!limiter.is_allowed_at("kept", Tick(0)).unwrap());
    assert_eq!(limiter.store().usage().keys, 1);
    looks();
    let usage = limiter.store().usage();
    assert_eq!((usage.keys, usage.evicted, usage.refused), (1, 0, 0));
}

/// A reset makes a key as it was before it was ever seen, and says what the next check will find.
#[test]
fn a_reset_and_the_next_check_agree_for_keys_that_do_not_start_full() {
    for kind in tallygate::Kind::ALL {
        for start in [0, 3, 10] {
            let policy = Policy::of(kind, 10).per(Ticks(1_000)).starting_with(start).build();
            let limiter = limiter(policy.unwrap(), Capacity::of(10));
            let told = limiter.reset_at("unseen", Tick(0)).unwrap();
            assert_eq!(told.remaining, start, "{kind}");
            assert_eq!(
                limiter.check_n_at("unseen", 0, Tick(0)).unwrap().remaining,
                start,
                "{kind}"
            );
            assert_eq!(limiter.is_allowed_at("unseen", Tick(0)).unwrap(), start > 0, "{kind}");
            assert_eq!(limiter.reset_at("unseen", Tick(1)).unwrap().remaining, start, "{kind}");
            assert_eq!(
                limiter.check_n_at("unseen", 0, Tick(1)).unwrap().remaining,
                start,
                "{kind}"
            );
        }
    }
}

/// What a store holds is only saved as what it is.
#[test]
fn a_snapshot_under_another_policy_is_refused() {
    let limiter = limiter(hourly(5), Capacity::of(10));
    assert!(limiter.is_allowed_at("a", Tick(0)).unwrap());
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
#[test]
fn j6_a_flood_of_invented_keys_washes_no_debt_out() {
    const MAX_KEYS: usize = 10_000;
    const CLIENTS: u64 = 200;
    const STEP: Ticks = Ticks(1_000_000);
    // The tier of the invented keys, the cost of each, and how far the clock goes for each.
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
            assert!(limiter.check_n(client.to_le_bytes(), 5).unwrap().allowed);
            clock.advance(Ticks(1));
        }
        // Some ordinary clients, which have used a part of their quota.
        for client in 0..5_000_u64 {
            assert!(limiter.check((1 << 40 | client).to_le_bytes()).unwrap().allowed);
        }
        clock.advance(STEP);
        let invented = limiter.tier(tier).unwrap();
        let mut allowed = 0;
        for key in 0..10 * MAX_KEYS as u64 {
            let decision = invented.check_n((1 << 50 | key).to_le_bytes(), cost).unwrap();
            allowed += usize::from(decision.allowed);
            clock.advance(step);
        }
        // Invented keys evict each other, unless they have used more than half of their quota.
        let are_debts = 2 * cost > invented.peek("size").unwrap().limit;
        assert_eq!(
            allowed == 10 * MAX_KEYS,
            !are_debts,
            "{allowed} in a flood of {tier} for {cost}"
        );
        let denied =
            (0..CLIENTS).filter(|client| !limiter.peek(client.to_le_bytes()).unwrap().allowed);
        let denied = denied.count();
        assert!(denied * 100 >= 99 * 200, "{denied} after a flood of {tier} for {cost}");
        assert!(limiter.store().usage().keys <= MAX_KEYS);
        // A client that comes now is served if there is a place for it, and never gets more than its quota.
        let served = (0..20).filter(|_| limiter.is_allowed("new client").unwrap()).count();
        assert_eq!(served, if are_debts { 0 } else { 5 }, "after a flood of {tier} for {cost}");
    }
}

/// The same for a store of one policy, where all invented keys use their quota up.
#[test]
fn j6_clients_that_used_up_their_quota_first_stay_denied() {
    for policy in [daily(1), daily(5), Policy::sliding_window_log(5).per(DAY).build().unwrap()] {
        let clock = ManualClock::new(Tick(1_000_000));
        let store = PolicyStore::new(&policy, Capacity::of(10_000), &clock);
        let cost = policy.capacity();
        let limiter = RateLimiter::with_store(policy, store);
        for key in 0..100_000_u64 {
            let decision = limiter.check_n(key.to_le_bytes(), cost).unwrap();
            assert_eq!(decision.allowed, key < 10_000);
            clock.advance(Ticks(1_000_000));
        }
        let allowed = |key: &u64| limiter.is_allowed(key.to_le_bytes()).unwrap();
        assert_eq!((0..100_000).filter(allowed).count(), 0);
    }
}

/// A client that has earned a part of its quota back must not get the rest of it by a flood of keys that have used all of theirs.
#[test]
fn j6_a_debt_that_has_begun_to_drain_is_not_washed_out() {
    const MAX_KEYS: usize = 10_000;
    const CLIENTS: u64 = 200;
    for drained in [DAY.0 / 1_000, DAY.0 / 4] {
        let clock = ManualClock::new(Tick(1_000_000));
        let tiers = Tiers::new(daily(1_000)).tier("once", daily(1));
        let store = MemoryStore::new(Capacity::of(MAX_KEYS), &clock);
        let limiter = RateLimiter::in_store("draining", tiers, store);
        for client in 0..CLIENTS {
            assert!(limiter.check_n(client.to_le_bytes(), 1_000).unwrap().allowed);
        }
        clock.advance(Ticks(drained));
        let invented = limiter.tier("once").unwrap();
        for key in 0..10 * MAX_KEYS as u64 {
            let _ = invented.check((1 << 50 | key).to_le_bytes()).unwrap();
            clock.advance(Ticks(1_000_000));
        }
        let earned = 1_000 * (drained + 100 * 1_000_000_000) / DAY.0 + 1;
        let washed = (0..CLIENTS)
            .filter(|client| limiter.peek(client.to_le_bytes()).unwrap().remaining > earned)
            .count();
        assert_eq!(washed, 0, "got more than the {earned} that they earned");
    }
}

/// However many of the places are taken by clients that have used up their quota, a flood gets by with the others. New
/// clients are served as long as there is another place within their reach.
#[test]
fn j6_a_store_that_is_almost_full_of_debts_keeps_them() {
    const MAX_KEYS: usize = 10_000;
    // How many clients have used up their quota, and how many in a thousand new ones may find no place: the last homes of the
    // table have few keys in their reach.
    for (clients, most) in [(5_000, 5), (9_000_u64, 20), (9_500, 50), (9_900, 600), (10_000, 1_000)]
    {
        for cost in [1, 1_000] {
            let clock = ManualClock::new(Tick(1_000_000));
            let store = PolicyStore::new(&daily(1_000), Capacity::of(MAX_KEYS), &clock);
            let limiter = RateLimiter::with_store(daily(1_000), store);
            for client in 0..clients {
                assert!(limiter.check_n(client.to_le_bytes(), 1_000).unwrap().allowed);
            }
            let mut denied = 0;
            for key in 0..10 * MAX_KEYS as u64 {
                clock.advance(Ticks(1_000));
                let decision = limiter.check_n((1 << 50 | key).to_le_bytes(), cost).unwrap();
                denied += usize::from(!decision.allowed);
            }
            let is_washed_out = |client: &u64| limiter.is_allowed(client.to_le_bytes()).unwrap();
            let washed_out = (0..clients).filter(is_washed_out).count();
            assert_eq!(washed_out, 0, "of {clients} at a cost of {cost}");
            let most = if cost == 1 { most * 10 * MAX_KEYS / 1_000 } else { 10 * MAX_KEYS };
            assert!(denied <= most, "{denied} new keys found no place beside {clients}");
        }
    }
}

/// A client whose debt finds no place in a full store is denied, whichever way it asks. (It was once allowed again as soon
/// as another key had come: the newest debts evicted each other.)
#[test]
fn j6_a_client_whose_debt_finds_no_place_is_denied() {
    const MAX_KEYS: usize = 1_000;
    let kinds = tallygate::Kind::ALL;
    for policy in kinds.map(|kind| Policy::of(kind, 10).per(Ticks(1_000_000)).build().unwrap()) {
        let limiter = limiter(policy, Capacity::of(MAX_KEYS));
        for key in 0..MAX_KEYS {
            assert!(limiter.check_n_at(key.to_le_bytes(), 10, Tick(0)).unwrap().allowed);
        }
        for key in 0..1_000_u64 {
            assert!(!limiter.is_allowed_at("client", Tick(0)).unwrap());
            assert!(!limiter.is_allowed_at((1 << 50 | key).to_le_bytes(), Tick(0)).unwrap());
        }
        // The answer is that of a client that has used up its quota, as those are that are kept.
        let kept = limiter.check_at(0_usize.to_le_bytes(), Tick(0)).unwrap();
        assert_eq!(limiter.check_at("client", Tick(0)).unwrap(), kept);
        assert_eq!(limiter.check_many_at::<bool>(&["client"], Tick(0)).unwrap(), [false]);
        let together = check_all_at([limiter.ask("client").unwrap()], Tick(0)).unwrap();
        assert_eq!((together.decision.allowed, together.refused_ask), (false, Some(0)));
        assert_eq!(together.decision.retry_after, kept.retry_after);
        let usage = limiter.store().usage();
        assert_eq!((usage.keys, usage.evicted), (MAX_KEYS, 0));
        assert!(usage.refused > 2_000);
        // A debt that has drained makes room, and then the quota of the client is counted.
        for key in 0..MAX_KEYS {
            assert!(limiter.refund_at(key.to_le_bytes(), 5, Tick(0)).unwrap().allowed);
        }
        let allowed = (0..50).filter(|_| limiter.is_allowed_at("client", Tick(0)).unwrap()).count();
        assert_eq!(allowed, 10);
    }
}

/// Many clients that ask for more than half of their quota, in any order, in a store with too few places: each gets at
/// most its quota.
#[test]
fn j6_in_a_store_full_of_debts_each_client_stays_within_its_quota() {
    const CLIENTS: u64 = 3_000;
    const WINDOW: Ticks = Ticks(1_000_000_000);
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = move |below: u64| {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed % below
    };
    for kind in tallygate::Kind::ALL {
        let policy = Policy::of(kind, 100).per(WINDOW).build().unwrap();
        let clock = ManualClock::new(Tick(0));
        let store = PolicyStore::new(&policy, Capacity::of(1_000), &clock);
        let limiter = RateLimiter::with_store(policy, store);
        let mut allowed = vec![0; usize::try_from(CLIENTS).unwrap()];
        for _ in 0..100_000 {
            // All of it takes a hundredth of a window: one unit is earned back.
            clock.advance(Ticks(random(2 * WINDOW.0 / 100 / 100_000)));
            let (client, cost) = (random(CLIENTS), 60 + random(41));
            let decision = limiter.check_n(client.to_le_bytes(), cost).unwrap();
            allowed[usize::try_from(client).unwrap()] += if decision.allowed { cost } else { 0 };
        }
        let most = allowed.iter().max().unwrap();
        assert!(*most <= 101, "{kind}: a client was allowed {most}");
        assert_eq!(limiter.store().usage().evicted, 0);
    }
}

/// Shares are compared, not units: who has used all of a small quota stays before who has used a little of a
/// large one.
#[test]
fn the_smallest_share_goes_first_whatever_the_units() {
    let clock = ManualClock::new(Tick(0));
    let tiers = Tiers::new(daily(2)).tier("large", daily(1_000));
    let store = MemoryStore::new(Capacity::of(3), &clock);
    let limiter = RateLimiter::in_store("shares", tiers, store);
    let large = limiter.tier("large").unwrap();
    assert!(large.check_n("large", 400).unwrap().allowed);
    assert!(limiter.check_n("all", 2).unwrap().allowed);
    assert!(limiter.check_n("half", 1).unwrap().allowed);
    clock.advance(Ticks(1));
    assert!(limiter.check_n("new", 2).unwrap().allowed);
    assert_eq!(large.check_n("large", 0).unwrap().remaining, 1_000, "two fifths went");
    assert_eq!(limiter.check_n("all", 0).unwrap().remaining, 0);
    assert_eq!(limiter.check_n("half", 0).unwrap().remaining, 1);
}
