//! Your own store: a map behind a mutex.
//!
//! It is exact, and slower than the built-in memory store.
//!
//!     cargo run -p tallygate --example own_store

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::{Mutex, PoisonError};

use tallygate::algorithm::Algorithm;
use tallygate::clock::{Clock as _, SystemClock};
use tallygate::store::{Entry, MapStore, StateMap};
use tallygate::{Policy, RateLimiter, StoreError, Tick};

/// The entries of all clients, by key.
type Entries<S> = HashMap<Box<[u8]>, Option<Entry<S>>>;

pub(crate) struct MutexMap<S> {
    entries: Mutex<Entries<S>>,
    clock: SystemClock,
}

impl<S> MutexMap<S> {
    pub(crate) fn new() -> Self {
        Self { entries: Mutex::default(), clock: SystemClock::new() }
    }
}

impl<A: Algorithm<State: Send>> StateMap<A> for MutexMap<A::State> {
    fn with_entry<T>(
        &self,
        key: &[u8],
        step: impl FnOnce(&mut Option<Entry<A::State>>) -> T,
    ) -> Result<T, StoreError> {
        let mut entries = self.entries.lock().unwrap_or_else(PoisonError::into_inner);
        // From time to time, drop the entries that have expired.
        if entries.len() >= 1024 && entries.len().is_power_of_two() {
            let now = self.clock.now();
            entries.retain(|_, entry| entry.as_ref().is_some_and(|entry| entry.expires_at() > now));
        }
        Ok(step(entries.entry(key.into()).or_default()))
    }

    fn now(&self) -> Tick {
        self.clock.now()
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let policy = Policy::token_bucket(100).per_hour().burst(2).build()?;
    let limiter = RateLimiter::with_store(policy, MapStore::new(MutexMap::new()));
    let mut out = std::io::stdout();
    for client in ["alice", "alice", "bob", "alice"] {
        let decision = limiter.check(client)?;
        writeln!(out, "{client}: allowed {}, {} left", decision.allowed, decision.remaining)?;
    }
    Ok(())
}
