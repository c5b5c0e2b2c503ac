//! A quota for each client, shared by all threads, with a bound on how many clients are kept.
//!
//!     cargo run -p tallygate --example per_key

use std::io::Write as _;

use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Policy, RateLimiter};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::sliding_window_counter(1_000).per_hour().named("uploads").build()?;
    let store = PolicyStore::new(&policy, Capacity::of(100_000), SystemClock::new());
    let limiter = RateLimiter::with_store(policy, store);

    // Four workers, three clients, one of them greedy.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for request in 0..1_000 {
                    let client = if request % 10 == 0 { "bob" } else { "mallory" };
                    // A key that is too long is the only error here.
                    let _ = limiter.is_allowed(client);
                }
            });
        }
    });

    let mut out = std::io::stdout();
    for client in ["alice", "bob", "mallory"] {
        let look = limiter.check(Ask::new(client).cost(0))?;
        writeln!(out, "{client}: {} of {} left", look.remaining, look.limit)?;
    }
    writeln!(out, "{:?}", limiter.store().usage())?;
    Ok(())
}
