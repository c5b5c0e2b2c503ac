//! Costs that are only known afterwards: a service metered by model tokens.
//!
//!     cargo run -p tallygate --example reserve_and_settle

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::time::Duration;

use tallygate::{Ask, Policy, RateLimiter, Reserved, Ticks};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let tokens = RateLimiter::new(Policy::token_bucket(10_000).per_minute().build()?);

    for (prompt, used) in [("short", 900), ("long", 4_500), ("endless", 12_000), ("one more", 100)]
    {
        // An estimate is charged before the work begins, so that nobody starts what it cannot pay.
        match tokens.reserve(Ask::new("alice").cost(2_000), Duration::from_secs(120))? {
            Reserved::Granted(mut reservation, _) => {
                // … the model answers …
                let told = tokens.settle(&mut reservation, used)??;
                println!(
                    "{prompt}: used {used}, {} left, fresh in {:?}",
                    told.remaining, told.reset_after
                );
            }
            Reserved::Refused(told) => {
                let wait = told.retry_after.map(Ticks::as_duration);
                println!("{prompt}: refused, try again after {wait:?}");
            }
        }
    }
    Ok(())
}
