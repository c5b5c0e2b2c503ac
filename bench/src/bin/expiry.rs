//! How long the slowest checks take while ten million keys expire.
//!
//! A limiter is filled, then asked by new keys, each of which makes it sweep a little. All of the
//! old keys have expired meanwhile, or none has: only the time that it is told differs. Beside it,
//! what governor's users do about such keys, all at once.

use std::time::{Duration, Instant};

use governor::clock::FakeRelativeClock;
use tallygate::{Ask, Capacity, Policy, PolicyStore, RateLimiter, SystemClock, Tick, Ticks};
use tallygate_bench::workload::{name, names, quick, scaled};

/// Keys that are there, and expire.
const OLD: usize = 10_000_000;

/// Keys that come: enough for the sweep to make as much room as it wants to.
const NEW: usize = 3_000_000;

/// When the old keys come.
const START: Tick = Tick(0);

/// How long a key is remembered.
const WINDOW_NS: i64 = 1_000_000_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Old {
    Live,
    Expired,
}

/// How long checks took, in nanoseconds: the median, the slow, and the slowest.
#[derive(Clone, Copy)]
struct Latency([u32; 5]);

const COLUMNS: [&str; 5] = ["p50", "p99", "p99.9", "p99.99", "max"];

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let new = names(scaled(OLD)..scaled(OLD) + scaled(NEW));
    let mut best = [Latency([u32::MAX; 5]); 2];
    for _ in 0..if quick() { 1 } else { 5 } {
        for (best, old) in best.iter_mut().zip([Old::Live, Old::Expired]) {
            *best = best.min(run(old, &new)?);
        }
    }
    print!("{:<34}", "ns a check of a new key");
    for column in COLUMNS {
        print!("{column:>10}");
    }
    println!();
    for (old, Latency(best)) in
        ["none of 10 million keys expires", "all of them expire"].iter().zip(best)
    {
        print!("{old:<34}");
        for ns in best {
            print!("{ns:>10}");
        }
        println!();
    }
    println!("governor's retain_recent, all of them expired: {:?}", retain_recent()?);
    Ok(())
}

/// Fills a limiter with old keys, then times the checks of new ones.
fn run(old: Old, new: &[String]) -> Result<Latency, Box<dyn std::error::Error>> {
    let policy = Policy::token_bucket(1).per(Ticks(WINDOW_NS.unsigned_abs())).build()?;
    let capacity = Capacity::of(scaled(OLD) + new.len());
    let store = PolicyStore::new(&policy, capacity, SystemClock::new());
    let limiter = RateLimiter::with_store(policy, store);
    for key in (0..scaled(OLD)).map(name) {
        assert!(limiter.is_allowed(Ask::new(&key).at(START))?, "refused {key}");
    }
    let now = match old {
        Old::Live => Tick(WINDOW_NS / 2),
        Old::Expired => Tick(WINDOW_NS * 2),
    };
    let mut latencies = Vec::with_capacity(new.len());
    for key in new {
        let start = Instant::now();
        let allowed = limiter.is_allowed(Ask::new(key).at(now))?;
        latencies.push(u32::try_from(start.elapsed().as_nanos())?);
        assert!(allowed, "refused {key}");
    }
    let usage = limiter.store().usage();
    let swept = usize::try_from(usage.swept)?;
    match old {
        Old::Live => assert_eq!(swept, 0, "swept what was live"),
        Old::Expired => assert!(swept > scaled(OLD) / 2, "only {swept} were swept"),
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

    /// What the machine disturbed least, column by column.
    fn min(self, other: Self) -> Self {
        Self(std::array::from_fn(|column| self.0[column].min(other.0[column])))
    }
}

/// How long governor takes to forget as many keys.
fn retain_recent() -> Result<Duration, Box<dyn std::error::Error>> {
    let clock = FakeRelativeClock::default();
    let window = Duration::from_nanos(WINDOW_NS.unsigned_abs());
    let quota = governor::Quota::with_period(window).ok_or("no period")?;
    let limiter = governor::RateLimiter::dashmap_with_clock(quota, clock.clone());
    for key in (0..scaled(OLD)).map(name) {
        assert!(limiter.check_key(&key).is_ok(), "refused {key}");
    }
    clock.advance(2 * window);
    let start = Instant::now();
    limiter.retain_recent();
    let time = start.elapsed();
    assert_eq!(limiter.len(), 0, "kept what had expired");
    Ok(time)
}
