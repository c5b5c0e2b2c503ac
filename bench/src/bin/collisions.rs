//! How long the slow checks take of keys that were chosen to collide.
//!
//! The attacker knows the hash function, not the secret: it picks keys whose hashes under the function's
//! well-known secret begin alike, so that without a secret of our own all would share one bucket in
//! 4096. Beside them, as many keys at random.

use std::time::Instant;

use tallygate::{Capacity, Policy, PolicyStore, RateLimiter, SystemClock};
use tallygate_bench::workload::{Random, quick, scaled};

/// Keys of each kind.
const KEYS: usize = 20_000;

/// Bits in which the hashes of chosen keys agree.
const ALIKE: u32 = 12;

const ROUNDS: usize = 50;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut random = Random::new();
    let mut candidates =
        std::iter::repeat_with(|| format!("client-{:010}", random.next() % 10_000_000_000));
    let at_random: Vec<String> = candidates.by_ref().take(scaled(KEYS)).collect();
    let is_chosen =
        |key: &String| xxhash_rust::xxh3::xxh3_128(key.as_bytes()) >> (128 - ALIKE) == 0;
    let chosen: Vec<String> = candidates.filter(is_chosen).take(scaled(KEYS)).collect();
    let mut p99 = [u32::MAX; 2];
    for _ in 0..if quick() { 1 } else { ROUNDS } {
        for (best, keys) in p99.iter_mut().zip([&at_random, &chosen]) {
            *best = (*best).min(slowest_of_a_hundred(keys)?);
        }
    }
    println!("p99 of a check: {} ns of keys at random, {} ns of chosen keys", p99[0], p99[1]);
    println!("ratio collisions-p99 random {:.2}", f64::from(p99[1]) / f64::from(p99[0]));
    Ok(())
}

/// The 99th hundredth of the times that checks of known keys take, in nanoseconds.
fn slowest_of_a_hundred(keys: &[String]) -> Result<u32, Box<dyn std::error::Error>> {
    let policy = Policy::token_bucket(1_000).per_hour().build()?;
    let store = PolicyStore::new(&policy, Capacity::of(2 * keys.len()), SystemClock::new());
    let limiter = RateLimiter::with_store(policy, store);
    for key in keys {
        assert!(limiter.is_allowed(key)?, "refused {key}");
    }
    let mut times = Vec::with_capacity(keys.len());
    for key in keys {
        let start = Instant::now();
        let allowed = limiter.is_allowed(key)?;
        times.push(u32::try_from(start.elapsed().as_nanos())?);
        assert!(allowed, "refused {key}");
    }
    times.sort_unstable();
    Ok(times[times.len() * 99 / 100])
}
