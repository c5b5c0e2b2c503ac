//! Several limits on one key, several keys in one decision, and requests in flight: all or nothing.
//!
//!     cargo run -p tallygate --example several_limits

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::time::Duration;

use tallygate::policy::Penalty;
use tallygate::{InFlight, Policy, RateLimiter, check_all};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let users = RateLimiter::new(Policy::all_of(
        "user",
        [
            Policy::token_bucket(2).per_second().named("second"),
            Policy::sliding_window_counter(1_000).per_hour().named("hour"),
            Policy::fixed_window(20_000).per_day().named("day"),
            // A shadow limit reports what it would deny, and denies nothing.
            Policy::fixed_window(1).per_day().named("planned").shadow(),
        ],
    )?);
    for _ in 0..3 {
        let decision = users.check("alice")?;
        let name = |limit: Option<usize>| limit.map(|limit| users.rules().limits()[limit].name());
        println!(
            "alice: {}, denied by {:?}, the planned limit would deny it: {}",
            decision.allowed,
            name(decision.denied_by),
            name(decision.shadow_denied_by).is_some(),
        );
    }

    // One decision over a user, an address, and the requests in flight.
    let quarter_hour = Duration::from_secs(900);
    let addresses = RateLimiter::new(
        Policy::sliding_window_log(5)
            .per_minute()
            .penalty(Penalty::lasting(quarter_hour).after(3))
            .named("address")
            .build()?,
    );
    let in_flight = InFlight::new(2);
    let request = |user: &str, address: &str| {
        check_all([users.joint(user)?, addresses.joint(address)?, in_flight.joint(user)?])
    };
    let first = request("bob", "192.0.2.7")?;
    println!("bob: {}, {} place taken", first.decision.allowed, first.places.len());
    drop(first); // the request is done, and its place is free
    println!("in flight: {}", in_flight.count("bob")?);
    Ok(())
}
