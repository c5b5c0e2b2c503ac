//! Waits until a request is allowed: in threads, and in futures on any executor.
//!
//!     cargo run -p tallygate --example waiting

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::time::{Duration, Instant};

use tallygate::{Policy, RateLimiter, Ticks, block_on};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let from = Instant::now();
    let limiter = RateLimiter::new(Policy::token_bucket(20).per_second().burst(1).build()?);

    // Threads: first come, first served.
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let limiter = &limiter;
            scope.spawn(move || {
                let decision = limiter.block_until_ready("alice", Duration::from_secs(1));
                println!(
                    "worker {worker}: {:?} after {:?}",
                    decision.map(|decision| decision.allowed),
                    from.elapsed()
                );
            });
        }
    });

    // A future. `block_on` runs this one; tokio and other executors work as well.
    block_on(async {
        let decision = limiter.until_ready("alice", Duration::from_secs(1)).await?;
        println!("awaited: {} after {:?}", decision.allowed, from.elapsed());
        let decision = limiter.until_ready("alice", Duration::from_millis(10)).await?;
        let wait = decision.retry_after.map(Ticks::as_duration);
        println!("too long: {}, it would have taken {wait:?}", decision.allowed);
        Ok::<(), tallygate::StoreError>(())
    })?;

    // A leaky bucket returns how long each call has to wait so that calls leave at an even rate.
    let outgoing = RateLimiter::new(Policy::leaky_bucket(50).per_second().build()?);
    block_on(async {
        for call in 0..3 {
            let decision = outgoing.shape("partner").await?;
            println!("call {call}: {} after {:?}", decision.allowed, from.elapsed());
        }
        Ok::<(), tallygate::StoreError>(())
    })?;
    Ok(())
}
