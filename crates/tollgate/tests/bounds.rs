//! Whatever an attacker invents: memory, pauses and other people's quotas stay bounded.

use tollgate::{
    Capacity, ManualClock, Policy, PolicyStore, RateLimiter, StoreError, Tick, Ticks, WhenFull,
};

type Limiter = RateLimiter<Policy, PolicyStore<ManualClock>>;

fn limiter(policy: Policy, capacity: Capacity) -> Limiter {
    let store = PolicyStore::new(&policy, capacity, ManualClock::new(Tick(0)));
    RateLimiter::with_store(policy, store)
}

fn hourly(limit: u64) -> Policy {
    Policy::token_bucket(limit).per_hour().build().expect("valid")
}

/// Resident memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

#[cfg(target_os = "linux")]
#[test]
fn d1_ten_million_invented_keys_stay_under_the_cap() {
    let limiter = limiter(hourly(1), Capacity::of(100_000));
    let before = resident();
    for key in 0..10_000_000_u64 {
        assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap());
    }
    let grown = resident().saturating_sub(before);
    // 100 000 keys of 43 bytes, and some for large pages and the test itself.
    assert!(grown < 16 << 20, "{grown} bytes");
    let usage = limiter.store().usage();
    assert!(usage.keys <= 100_000, "{usage:?}");
    assert_eq!(usage.evicted, 10_000_000 - usage.keys as u64);
}

/// However small the table, and wherever in it the keys belong: not one more than was said. (It once
/// kept one more when nobody lived within reach of a home at the table's end.)
#[test]
fn d1_the_bound_on_keys_is_exact() {
    for max_keys in [1, 2, 3, 10, 100] {
        for _ in 0..300 {
            let limiter = limiter(hourly(1), Capacity::of(max_keys));
            for key in 0..3 * max_keys {
                assert!(limiter.is_allowed_at(key.to_le_bytes(), Tick(0)).unwrap());
                assert_eq!(limiter.store().usage().keys, max_keys.min(key + 1));
            }
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
    assert!(limiter.is_allowed_at("new", Tick(0)).unwrap());
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
