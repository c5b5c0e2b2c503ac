//! Sets the time in tests, so that they never sleep.
//!
//!     cargo run -p tallygate --example manual_clock

use std::time::Duration;

use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Policy, RateLimiter, Tick, Ticks};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let clock = ManualClock::new(Tick(0));
    let policy = Policy::fixed_window(2).per_minute().build()?;
    let store = PolicyStore::new(&policy, Capacity::default(), &clock);
    let limiter = RateLimiter::with_store(policy, store);

    assert!(limiter.is_allowed("alice")?);
    assert!(limiter.is_allowed("alice")?);
    assert!(!limiter.is_allowed("alice")?);

    clock.advance(Ticks::from_duration(Duration::from_secs(60)));
    assert!(limiter.is_allowed("alice")?);

    // The time can also come with the request, instead of from a clock.
    assert!(limiter.is_allowed(Ask::new("bob").at(Tick(5)))?);
    Ok(())
}
