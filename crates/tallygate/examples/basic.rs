//! The smallest program: one limit and one check.
//!
//!     cargo run -p tallygate --example basic

use std::io::Write as _;

use tallygate::{Policy, RateLimiter};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limiter = RateLimiter::new(Policy::token_bucket(100).per_minute().burst(3).build()?);
    let mut out = std::io::stdout();
    for request in 1..=5 {
        let decision = limiter.check("alice")?;
        match (decision.allowed, decision.retry_after) {
            (true, _) => writeln!(out, "{request}: go ahead, {} left", decision.remaining)?,
            (false, Some(wait)) => {
                writeln!(out, "{request}: come back in {:?}", wait.as_duration())?;
            }
            (false, None) => writeln!(out, "{request}: never, it is more than the burst")?,
        }
    }
    Ok(())
}
