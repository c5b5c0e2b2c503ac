//! An exact rate limiter for any number of clients and threads, in bounded memory.
//!
//! ```
//! use tallygate::{Policy, RateLimiter};
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
//! | How do I ask? | `ask.rs`, `limiter.rs` |
//! | How do I charge what is only known later? | `reservation.rs`, on `returns.rs` |
//! | How do I wait for my turn? | `waiting.rs`, on `line.rs`, `departures.rs` and `timer.rs` |
//! | How do I make one key of several things? | `key.rs` |
//! | How do I decide over several keys, or over requests in flight? | `together.rs`, `in_flight.rs` |
//! | Which rule is a key decided by, and how does it change? | `rules.rs`, `tiers.rs`, on `kept.rs` and `allowance.rs` |
//! | What time is it? | `clock.rs` |
//! | Where does storage plug in? | `store.rs` |
//! | How are keys kept in memory? | `memory.rs`, on `table.rs` and `hash.rs` |
//! | How do keys outlast the process? | `snapshot.rs` |
//! | Who is told? | `observer.rs` |
//!
//! The algorithms, policies and decisions are those of [`tallygate_core`], re-exported here.

mod allowance;
mod ask;
mod clock;
mod departures;
mod hash;
mod in_flight;
mod kept;
mod key;
mod limiter;
mod line;
mod memory;
mod observer;
mod reservation;
mod returns;
mod rules;
mod snapshot;
mod store;
mod table;
mod tiers;
mod timer;
mod together;
mod waiting;

pub use allowance::{Allowance, Bounds};
pub use ask::{Ask, InvalidAsk, UnknownTier};
pub use clock::{Alarm, Clock, CoarseClock, ManualClock, ManualRing, SystemClock, SystemRing};
pub use in_flight::{InFlight, Place};
pub use kept::Kept;
pub use key::joined_key;
pub use limiter::{RateLimiter, SingleLimiter, TieredLimiter};
pub use memory::{Capacity, MemoryStore, PolicyStore};
#[cfg(feature = "metrics")]
pub use observer::MetricsObserver;
pub use observer::{Event, NoObserver, Observer};
pub use reservation::{Actual, Charged, Reservation, Reserved, SettleError};
pub use rules::Rules;
pub use snapshot::{Section, SnapshotError, SnapshotReader, SnapshotWriter, save_snapshot};
pub use store::{Lent, MAX_KEY_BYTES, Store, StoreError};
pub use table::{Usage, WhenFull};
pub use tallygate_core::*;
pub use tiers::{Access, Chosen, Override, Plan, Tiers};
pub use together::{JointAsk, Together, check_all};
pub use waiting::block_on;
