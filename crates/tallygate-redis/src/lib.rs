//! One quota for a fleet: the limiter of [`tallygate`], its state in Redis (7 or newer) or Valkey.
//!
//! ```no_run
//! use tallygate::{Policy, RateLimiter};
//! use tallygate_redis::{OnFailure, Redis};
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let redis = Redis::open("redis://127.0.0.1:6379")?;
//! let policy = Policy::token_bucket(100).per_minute().burst(20).named("api").build()?;
//! let limiter = RateLimiter::with_store(policy, redis.store("api").on_failure(OnFailure::Deny));
//! let decision = limiter.check("alice").await?;
//! println!("{} by {}", decision.allowed, decision.source.name());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Every verb of [`RateLimiter`](tallygate::RateLimiter) works as in memory, to the same answers, and is a
//! future. A check is one call of one script; the time is the server's.
//!
//! | question | file |
//! |---|---|
//! | How do I connect? | `client.rs`, on `address.rs` |
//! | How is a decision made? | `store.rs`, by `script.rs` and `scripts/` |
//! | What if many decide on one key at once? | `commit.rs`, by `transaction.rs`; `window.rs` |
//! | Which checks are no call of their own? | `near.rs`, by `desk.rs`; leases are in `lease.rs` |
//! | What is kept in Redis? | `key.rs`, `value.rs` |
//! | What happens when Redis is away? | `failure.rs`, `breaker.rs` |
//! | Which server has a key, and how is it asked? | `routes.rs`, `node.rs` |
//! | How do algorithms of one's own work? | `own.rs`, by `transaction.rs` |
//! | How do I decide over several keys? | `together.rs` |
//! | How do I limit requests in flight? | `in_flight.rs` |
//! | How do I wait for my turn? | `waiting.rs` |

mod address;
mod any;
mod breaker;
mod client;
mod clock;
mod commit;
mod desk;
mod error;
mod failure;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod in_flight;
mod key;
mod lease;
mod near;
mod node;
mod own;
mod routes;
mod script;
mod store;
mod together;
mod transaction;
mod value;
mod waiting;
mod window;

pub use any::{AnyLimiter, AnyReply, AnyStore, Stores, open};
pub use client::{Counts, Options, Redis};
pub use error::{AddressError, Error};
pub use failure::OnFailure;
pub use in_flight::{InFlight, Place};
pub use lease::Leases;
pub use own::OwnStore;
pub use store::{RedisStore, Reply};
pub use together::{JointAsk, Together, check_all};
pub use waiting::Waiting;
