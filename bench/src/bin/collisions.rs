//! Measures the 99th percentile of checks with keys that an attacker chose to collide.
//!
//! The attacker knows the hash function but not the secret. It chooses keys whose hashes start with the same 12 bits under
//! the function's default secret. If the table used the default secret, all of them would fall into 1/4096 of its buckets.
//! The benchmark compares them with as many random keys.

use std::time::Instant;

use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Policy, RateLimiter};
use tallygate_bench::workload::{Random, quick, scaled};

/// The number of keys of each kind.
const KEYS: usize = 20_000;

/// The number of leading bits in which the hashes of chosen keys agree.
const EQUAL_BITS: u32 = 12;

const ROUNDS: usize = 50;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut random = Random::new();
    let mut candidates =
        std::iter::repeat_with(|| format!("client-{:010}", random.next() % 10_000_000_000));
    let at_random: Vec<String> = candidates.by_ref().take(scaled(KEYS)).collect();
    let is_chosen =
        |key: &String| xxhash_rust::xxh3::xxh3_128(key.as_bytes()) >> (128 - EQUAL_BITS) == 0;
    let chosen: Vec<String> = candidates.filter(is_chosen).take(scaled(KEYS)).collect();
    let mut p99 = [u32::MAX; 2];
    for _ in 0..if quick() { 1 } else { ROUNDS } {
        for (best, keys) in p99.iter_mut().zip([&at_random, &chosen]) {
            *best = (*best).min(p99_ns(keys)?);
        }
    }
    println!("p99 of a check: {} ns with random keys, {} ns with chosen keys", p99[0], p99[1]);
    println!("ratio collisions-p99 random {:.2}", f64::from(p99[1]) / f64::from(p99[0]));
    Ok(())
}

/// Returns the 99th percentile of the times of checks of known keys, in nanoseconds.
fn p99_ns(keys: &[String]) -> Result<u32, Box<dyn std::error::Error>> {
    let policy = Policy::token_bucket(1_000).per_hour().build()?;
    let store = PolicyStore::new(&policy, Capacity::of(2 * keys.len()), SystemClock::new());
    let limiter = RateLimiter::with_store(policy, store);
    for key in keys {
        assert!(limiter.is_allowed(key)?, "{key} was denied");
    }
    let mut times = Vec::with_capacity(keys.len());
    for key in keys {
        let start = Instant::now();
        let allowed = limiter.is_allowed(key)?;
        times.push(u32::try_from(start.elapsed().as_nanos())?);
        assert!(allowed, "{key} was denied");
    }
    times.sort_unstable();
    Ok(times[times.len() * 99 / 100])
}
