//! Waiting for one's turn: in threads, in any asynchronous runtime, or in none.
//!
//!     cargo run -p tallygate --example waiting

#![expect(clippy::print_stdout, reason = "it shows what it does")]

use std::time::{Duration, Instant};

use tallygate::{Policy, RateLimiter, block_on};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let from = Instant::now();
    let limiter = RateLimiter::new(Policy::token_bucket(20).per_second().burst(1).build()?);

    // Threads: first come, first served.
    std::thread::scope(|scope| {
        for worker in 0..4 {
            let limiter = &limiter;
            scope.spawn(move || {
                let told = limiter.block_until_ready("alice", Duration::from_secs(1));
                println!(
                    "worker {worker}: {:?} after {:?}",
                    told.map(|told| told.allowed),
                    from.elapsed()
                );
            });
        }
    });

    // A future. This one is run by `block_on`; tokio and the others will do as well.
    block_on(async {
        let told = limiter.until_ready("alice", Duration::from_secs(1)).await?;
        println!("awaited: {} after {:?}", told.allowed, from.elapsed());
        let told = limiter.until_ready("alice", Duration::from_millis(10)).await?;
        println!("too long: {}, it would have taken {:?}", told.allowed, told.retry_after);
        Ok::<(), tallygate::StoreError>(())
    })?;

    // A leaky bucket says how long to wait so that what comes out is flat.
    let outgoing = RateLimiter::new(Policy::leaky_bucket(50).per_second().build()?);
    block_on(async {
        for call in 0..3 {
            let told = outgoing.shape("partner").await?;
            println!("call {call}: {} after {:?}", told.allowed, from.elapsed());
        }
        Ok::<(), tallygate::StoreError>(())
    })?;
    Ok(())
}
