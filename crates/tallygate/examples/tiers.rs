//! Tiers, overrides, and rules that change while the limiter serves.
//!
//!     cargo run -p tallygate --example tiers

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::borrow::Cow;

use tallygate::{Access, Ask, Clock as _, Policy, RateLimiter, SystemClock, Ticks, Tiers};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let free = Policy::token_bucket(3).per_minute().build()?;
    let pro = Policy::token_bucket(100).per_minute().burst(10).build()?;
    let tiers = Tiers::new(free).tier("pro", pro).tier("staff", Access::Unlimited);
    // The tier comes with the call, or from whoever knows it: a table of accounts, say.
    let tiers = tiers.resolved_by(|key| key.starts_with(b"staff/").then(|| Cow::from("staff")));
    let limiter = RateLimiter::tiered("api", tiers);

    for _ in 0..4 {
        println!("alice, free:  {:?}", limiter.check("alice")?.allowed);
    }
    let upgraded = limiter.check(Ask::new("alice").tier("pro"))?;
    println!(
        "alice, pro:   {:?}, {} left: the three stay used",
        upgraded.allowed, upgraded.remaining
    );
    println!("staff/carol:  {:?}", limiter.check(Ask::new("staff/carol").cost(1_000_000))?.allowed);

    let in_a_minute = SystemClock::new().now().after(Ticks::from_duration(MINUTE));
    limiter.set_override("mallory", Access::Blocked, in_a_minute);
    let blocked = limiter.check("mallory")?;
    println!("mallory:      {:?}, again after {:?}", blocked.allowed, blocked.retry_after);

    // New rules, at once and for everybody; what was used stays used.
    limiter.replace(&Tiers::new(Policy::sliding_window_log(5).per_minute().build()?));
    println!("alice, later: {} of 5 left", limiter.check(Ask::new("alice").cost(0))?.remaining);
    Ok(())
}

const MINUTE: std::time::Duration = std::time::Duration::from_secs(60);
