//! Charges costs that are known only afterwards, for a service that is metered by model tokens.
//!
//!     cargo run -p tallygate --example reserve_and_settle

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::time::Duration;

use tallygate::reservation::Reserved;
use tallygate::{Ask, Policy, RateLimiter, Ticks};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = RateLimiter::new(Policy::token_bucket(10_000).per_minute().build()?);

    for (prompt, used) in [("short", 900), ("long", 4_500), ("endless", 12_000), ("one more", 100)]
    {
        // Charge an estimate before the work begins, so that a client without quota is denied early.
        match tokens.reserve(Ask::new("alice").cost(2_000), Duration::from_secs(120))? {
            Reserved::Granted(mut reservation, _) => {
                // … the model answers …
                let decision = tokens.settle(&mut reservation, used)?;
                println!(
                    "{prompt}: used {used}, {} left, full quota in {:?}",
                    decision.remaining,
                    decision.reset_after.as_duration()
                );
            }
            Reserved::Denied(decision) => {
                let wait = decision.retry_after.map(Ticks::as_duration);
                println!("{prompt}: denied, retry after {wait:?}");
            }
        }
    }
    Ok(())
}
