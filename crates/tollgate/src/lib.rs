//! An exact rate limiter for any number of clients and threads, in bounded memory.
//!
//! ```
//! use tollgate::{Policy, RateLimiter};
//!
//! let limiter = RateLimiter::new(Policy::token_bucket(100).per_minute().burst(20).build()?);
//! let decision = limiter.check("alice")?;
//! assert!(decision.allowed);
//! assert_eq!(decision.remaining, 19);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! | question | file |
//! |---|---|
//! | How do I ask? | `limiter.rs` |
//! | What time is it? | `clock.rs` |
//! | Where does storage plug in? | `store.rs` |
//! | How are keys kept in memory? | `memory.rs`, on `table.rs` and `hash.rs` |
//! | Who is told? | `observer.rs` |
//!
//! The algorithms, policies and decisions are those of [`tollgate_core`], re-exported here.

mod clock;
mod hash;
mod limiter;
mod memory;
mod observer;
mod store;
mod table;

pub use clock::{Clock, CoarseClock, ManualClock, SystemClock};
pub use limiter::{RateLimiter, SingleLimiter};
pub use memory::{Capacity, MemoryStore, PolicyStore};
#[cfg(feature = "metrics")]
pub use observer::MetricsObserver;
pub use observer::{Event, NoObserver, Observer, Source};
pub use store::{MAX_KEY_BYTES, Store, StoreError};
pub use table::{Usage, WhenFull};
pub use tollgate_core::*;
