//! Resident memory grows with the number of keys, not with the capacity.
#![cfg(target_os = "linux")]

use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Policy, RateLimiter, Tick, Tiers};

fn hourly(limit: u64) -> Policy {
    Policy::token_bucket(limit).per_hour().build().expect("a valid policy")
}

/// Returns the resident anonymous memory of this process in bytes: without code that is mapped from files.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("a status");
    let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("a size");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") * 1024
}

/// This variable names what to fill. The test then prints by how much the process grew.
const FILL: &str = "TALLYGATE_TEST_FILL";

#[test]
fn fill_in_a_process_of_its_own() {
    let Ok(fill) = std::env::var(FILL) else { return };
    let words: Vec<&str> = fill.split(' ').collect();
    let [kind, limiters, keys] = words[..] else { panic!("not a fill: {fill}") };
    let (limiters, keys): (usize, u64) = (limiters.parse().unwrap(), keys.parse().unwrap());
    let fill = |allows: &dyn Fn(&[u8]) -> bool| (0..keys).all(|key| allows(&key.to_le_bytes()));
    // Fill a small one first, so that memory which a process needs only once is not counted.
    let store = PolicyStore::new(&hourly(1), Capacity::of(10), ManualClock::default());
    assert!(RateLimiter::with_store(hourly(1), store).is_allowed("a").unwrap());
    let before = resident();
    let mut held: (Vec<_>, Vec<_>) = (Vec::new(), Vec::new());
    for _ in 0..limiters {
        match kind {
            "plain" => {
                let limiter = RateLimiter::new(hourly(1));
                assert!(fill(&|key| limiter.is_allowed(key).unwrap()));
                assert_eq!(limiter.store().usage().keys as u64, keys);
                held.0.push(limiter);
            }
            "flooded" => {
                let store =
                    PolicyStore::new(&hourly(1), Capacity::of(100_000), ManualClock::default());
                let limiter = RateLimiter::with_store(hourly(1), store);
                assert!(fill(&|key| limiter.is_allowed(key).unwrap()));
                let usage = limiter.store().usage();
                assert!(usage.keys <= 100_000, "{usage:?}");
                assert_eq!(usage.evicted, keys - usage.keys as u64);
            }
            _ => {
                let limiter = RateLimiter::tiered("tiered", Tiers::new(hourly(1)));
                assert!(fill(&|key| limiter.is_allowed(key).unwrap()));
                assert_eq!(limiter.store().usage().keys as u64, keys);
                held.1.push(limiter);
            }
        }
    }
    println!("grown by {}", resident().saturating_sub(before));
}

fn grown(kind: &str, limiters: usize, keys: u64) -> u64 {
    let output = Command::new(std::env::current_exe().expect("this test"))
        .args(["--exact", "fill_in_a_process_of_its_own", "--nocapture", "--test-threads=1"])
        .env(FILL, format!("{kind} {limiters} {keys}"))
        .output()
        .expect("a process");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let decision = String::from_utf8(output.stdout).expect("text");
    let bytes = decision.split("grown by ").nth(1).and_then(|rest| rest.split_whitespace().next());
    bytes.expect("a size").parse().expect("a number")
}

const KIB: u64 = 1024;

/// Fault D1.
#[test]
fn ten_million_invented_keys_stay_under_the_cap() {
    // 100 000 keys of 43 bytes, and some for large pages.
    let bytes = grown("flooded", 1, 10_000_000);
    assert!(bytes < 8 * KIB * KIB, "{bytes} bytes");
}

/// Fault K10.
#[test]
fn a_default_limiter_takes_what_its_keys_take() {
    for keys in [1, 10, 100, 1_000, 10_000, 100_000] {
        let bytes = grown("plain", 1, keys);
        assert!(bytes <= 64 * KIB + 256 * keys, "{bytes} bytes for {keys} keys");
    }
    let bytes = grown("plain", 1, 1_000_000);
    assert!(bytes <= 48_000_000, "{bytes} bytes for a million keys");
}

/// A key of tiers takes more: a pointer to its policy is beside its state.
///
/// Fault K10.
#[test]
fn a_tiered_limiter_takes_what_its_keys_take() {
    for keys in [1, 10, 100, 1_000, 10_000, 100_000] {
        let bytes = grown("tiered", 1, keys);
        assert!(bytes <= 96 * KIB + 512 * keys, "{bytes} bytes for {keys} keys");
    }
}

/// Fault K10.
#[test]
fn a_thousand_limiters_of_ten_keys_take_little() {
    let bytes = grown("plain", 1_000, 10);
    assert!(bytes < 100 * KIB * KIB, "{bytes} bytes");
}

/// Every key keeps what it used while the table grows from one key to hundreds of thousands.
#[test]
fn keys_survive_growth() {
    const KEYS: u64 = 200_000;
    let store = PolicyStore::new(&hourly(1), Capacity::of(1_000_000), ManualClock::default());
    let limiter = RateLimiter::with_store(hourly(1), store);
    let mut check_all_at = 1;
    for key in 0..KEYS {
        assert!(
            limiter.is_allowed(Ask::new(&key.to_le_bytes()).at(Tick(0))).unwrap(),
            "{key} is new"
        );
        if key + 1 == check_all_at || key + 1 == KEYS {
            check_all_at = check_all_at * 3 / 2 + 1;
            for known in 0..=key {
                let allowed =
                    limiter.is_allowed(Ask::new(&known.to_le_bytes()).at(Tick(0))).unwrap();
                assert!(!allowed, "{known} of {key} was forgotten");
            }
        }
    }
    let usage = limiter.store().usage();
    assert_eq!((usage.keys as u64, usage.evicted, usage.swept), (KEYS, 0, 0));
}

/// The same holds while threads add new keys, check known ones, and decide on several keys at once.
#[test]
fn keys_survive_growth_by_many_threads() {
    const KEYS: u64 = 60_000;
    const THREADS: u64 = 8;
    let store = PolicyStore::new(&hourly(2), Capacity::of(1_000_000), ManualClock::default());
    let limiter = &RateLimiter::with_store(hourly(2), store);
    let key = |thread: u64, number: u64| (thread << 32 | number).to_le_bytes();
    let twice = &AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                for number in 0..KEYS {
                    let new = key(thread, number);
                    assert!(limiter.is_allowed(Ask::new(&new).at(Tick(0))).unwrap());
                    // A key of this thread, and one that every thread asks for.
                    let shared = key(THREADS, number % 5_000);
                    let asks = [&new, &shared].map(|key| Ask::new(key).at(Tick(0)));
                    let asks = asks.map(|ask| limiter.joint(ask).unwrap());
                    let both = tallygate::check_all(asks).unwrap();
                    let left = limiter.check(Ask::new(&new).cost(0).at(Tick(0))).unwrap().remaining;
                    assert_eq!(left, u64::from(!both.decision.allowed));
                    twice.fetch_add(both.decision.allowed.into(), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(twice.load(Ordering::Relaxed), 2 * 5_000, "each shared key was allowed twice");
    for thread in 0..THREADS {
        for number in 0..KEYS {
            let allowed =
                limiter.check(Ask::new(&key(thread, number)).cost(2).at(Tick(0))).unwrap().allowed;
            assert!(!allowed, "{number} of thread {thread} was forgotten");
        }
    }
    let usage = limiter.store().usage();
    assert_eq!((usage.keys as u64, usage.evicted), (THREADS * KEYS + 5_000, 0));
}
