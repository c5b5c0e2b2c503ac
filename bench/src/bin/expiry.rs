//! Measures the slowest checks while ten million keys expire.
//!
//! The limiter is filled with old keys, then checks new keys; each new key makes it sweep a few old ones. In one run all
//! old keys have expired, in the other none has. The runs differ only in the time that is passed to the checks. For
//! comparison, the benchmark measures governor's `retain_recent`, which removes all expired keys at once.

use std::time::{Duration, Instant};

use governor::clock::FakeRelativeClock;
use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Policy, RateLimiter, Tick, Ticks};
use tallygate_bench::workload::{name, names, quick, scaled};

/// The number of old keys.
const OLD: usize = 10_000_000;

/// The number of new keys, which is enough for the sweep to finish.
const NEW: usize = 3_000_000;

/// The time of the old keys.
const START: Tick = Tick(0);

/// The time until a key is fresh again.
const WINDOW_NS: i64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum OldKeys {
    Live,
    Expired,
}

/// The times of checks in nanoseconds: the percentiles of `COLUMNS`.
#[derive(Clone, Copy)]
struct Latency([u32; 5]);

const COLUMNS: [&str; 5] = ["p50", "p99", "p99.9", "p99.99", "max"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let new = names(scaled(OLD)..scaled(OLD) + scaled(NEW));
    let mut best = [Latency([u32::MAX; 5]); 2];
    for _ in 0..if quick() { 1 } else { 5 } {
        for (best, old) in best.iter_mut().zip([OldKeys::Live, OldKeys::Expired]) {
            *best = best.min(run(old, &new)?);
        }
    }
    print!("{:<34}", "ns per check of a new key");
    for column in COLUMNS {
        print!("{column:>10}");
    }
    println!();
    for (old, Latency(best)) in
        ["none of 10 million keys expired", "all of them expired"].iter().zip(best)
    {
        print!("{old:<34}");
        for ns in best {
            print!("{ns:>10}");
        }
        println!();
    }
    println!("governor's retain_recent with all keys expired: {:?}", retain_recent()?);
    Ok(())
}

/// Fills a limiter with old keys, then times the checks of new ones.
fn run(old: OldKeys, new: &[String]) -> Result<Latency, Box<dyn std::error::Error>> {
    let policy = Policy::token_bucket(1).per(Ticks(WINDOW_NS.unsigned_abs())).build()?;
    let capacity = Capacity::of(scaled(OLD) + new.len());
    let store = PolicyStore::new(&policy, capacity, SystemClock::new());
    let limiter = RateLimiter::with_store(policy, store);
    for key in (0..scaled(OLD)).map(name) {
        assert!(limiter.is_allowed(Ask::new(&key).at(START))?, "{key} was denied");
    }
    let now = match old {
        OldKeys::Live => Tick(WINDOW_NS / 2),
        OldKeys::Expired => Tick(WINDOW_NS * 2),
    };
    let mut latencies = Vec::with_capacity(new.len());
    for key in new {
        let start = Instant::now();
        let allowed = limiter.is_allowed(Ask::new(key).at(now))?;
        latencies.push(u32::try_from(start.elapsed().as_nanos())?);
        assert!(allowed, "{key} was denied");
    }
    let usage = limiter.store().usage();
    let swept = usize::try_from(usage.swept)?;
    match old {
        OldKeys::Live => assert_eq!(swept, 0, "live keys were swept"),
        OldKeys::Expired => assert!(swept > scaled(OLD) / 2, "only {swept} keys were swept"),
    }
    Ok(Latency::of(latencies))
}

impl Latency {
    fn of(mut latencies: Vec<u32>) -> Self {
        latencies.sort_unstable();
        let last = latencies.len() - 1;
        let at = |per_10_000: usize| latencies[last * per_10_000 / 10_000];
        Self([at(5_000), at(9_900), at(9_990), at(9_999), latencies[last]])
    }

    /// Returns the smaller value of each column.
    fn min(self, other: Self) -> Self {
        Self(std::array::from_fn(|column| self.0[column].min(other.0[column])))
    }
}

/// Returns the time that governor takes to remove as many keys.
fn retain_recent() -> Result<Duration, Box<dyn std::error::Error>> {
    let clock = FakeRelativeClock::default();
    let window = Duration::from_nanos(WINDOW_NS.unsigned_abs());
    let quota = governor::Quota::with_period(window).ok_or("no period")?;
    let limiter = governor::RateLimiter::dashmap_with_clock(quota, clock.clone());
    for key in (0..scaled(OLD)).map(name) {
        assert!(limiter.check_key(&key).is_ok(), "{key} was denied");
    }
    clock.advance(2 * window);
    let start = Instant::now();
    limiter.retain_recent();
    let time = start.elapsed();
    assert_eq!(limiter.len(), 0, "expired keys were kept");
    Ok(time)
}
