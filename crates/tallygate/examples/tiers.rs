//! Tiers, overrides, and rules that change while the limiter is in use.
//!
//!     cargo run -p tallygate --example tiers

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::borrow::Cow;
use std::time::Duration;

use tallygate::tiers::Access;
use tallygate::{Ask, Policy, RateLimiter, Ticks, Tiers};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let free = Policy::token_bucket(3).per_minute().build()?;
    let pro = Policy::token_bucket(100).per_minute().burst(10).build()?;
    let tiers = Tiers::new(free).tier("pro", pro).tier("staff", Access::Unlimited);
    // The tier comes with the call, or from a function: for example, from a table of accounts.
    let tiers = tiers.resolved_by(|key| key.starts_with(b"staff/").then(|| Cow::from("staff")));
    let limiter = RateLimiter::tiered("api", tiers);

    for _ in 0..4 {
        println!("alice, free:  {:?}", limiter.check("alice")?.allowed);
    }
    let upgraded = limiter.check(Ask::new("alice").tier("pro"))?;
    println!("alice, pro:   {:?}, {} left: usage is kept", upgraded.allowed, upgraded.remaining);
    println!("staff/carol:  {:?}", limiter.check(Ask::new("staff/carol").cost(1_000_000))?.allowed);

    limiter.set_override("mallory", Access::Blocked, Duration::from_secs(60));
    let blocked = limiter.check("mallory")?;
    let wait = blocked.retry_after.map(Ticks::as_duration);
    println!("mallory:      {:?}, again after {wait:?}", blocked.allowed);

    // New rules for all clients in one step. Usage is kept.
    limiter.replace(&Tiers::new(Policy::sliding_window_log(5).per_minute().build()?));
    println!("alice, later: {} of 5 left", limiter.check(Ask::new("alice").cost(0))?.remaining);
    Ok(())
}
