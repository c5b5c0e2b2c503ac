//! Shares the limits of [`tallygate`] between processes: keeps their state in Redis (7 or newer) or Valkey.
//!
//! To start, connect with [`Redis::open`], make a store with [`Redis::store`], and give it to a
//! [`RateLimiter`](tallygate::RateLimiter):
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
//! Every method of [`RateLimiter`](tallygate::RateLimiter) makes the same decisions as in memory, and returns a future. A
//! check is one call of one script, and the clock is the server's.
//!
//! Then choose:
//!
//! - what happens while Redis is unavailable: [`OnFailure`];
//! - the time budget per check, the key prefix and TLS certificates: [`Options`];
//! - whether this process decides on hot keys by itself, within a bound: [`Leases`];
//! - the store at run time, memory or Redis, by a URL: [`open`].
//!
//! | task | use |
//! |---|---|
//! | Decide over several keys at once | [`check_all`] |
//! | Limit how many requests are served at the same time | [`InFlight`] |
//! | Wait until a request is allowed, or delay requests | [`Waiting`] |
//! | Keep the states of your own algorithm | [`CustomStore`] |
//! | Tell a denial from an unavailable Redis | [`Decision::verdict`](tallygate::Decision::verdict), [`Source`](tallygate::Source) |
//! | See how many calls were made, failed and waited | [`Redis::counts`] |
//!
//! # One type for memory and Redis
//!
//! With [`open`], the address of the store decides where a limiter keeps its clients. All limiters have the type
//! [`AnyLimiter`], all operations return futures, and all errors are [`Error`]:
//!
//! ```
//! use std::time::Duration;
//! use tallygate::{Policy, Tiers};
//! use tallygate_redis::{Waiting as _, open};
//!
//! # tokio::runtime::Runtime::new()?.block_on(async {
//! let stores = open("memory")?; // or redis://127.0.0.1:6379
//! let api = stores.limiter("api", Tiers::new(Policy::token_bucket(100).per_second().burst(1).build()?));
//! assert!(api.check("alice").await?.allowed);
//! let mut reservation = api.reserve("bob", Duration::from_secs(60)).await?.granted().expect("the quota is free");
//! assert_eq!(api.cancel(&mut reservation).await?.remaining, 1);
//! assert!(api.until_ready("alice", Duration::from_secs(5)).await?.allowed);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! # })?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `tls` (default) | `rediss://` addresses, certificates in [`Options`] |

#![cfg_attr(docsrs, feature(doc_cfg))]

mod address;
mod any;
mod breaker;
mod brokers;
mod client;
mod clock;
mod commit;
mod counts;
mod custom;
mod error;
mod error_reply;
mod failure;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod in_flight;
mod joint;
mod key;
mod key_broker;
mod lease;
mod link;
mod loaded_scripts;
mod node;
mod options;
mod prepared;
mod pulse;
mod routes;
mod script;
mod settlement;
mod stall;
mod store;
mod transaction;
mod value;
mod waiting;
mod window;

pub use any::{AnyInFlight, AnyLimiter, AnyPlace, AnyReply, AnyStore, Stores, open};
pub use client::Redis;
pub use counts::Counts;
pub use custom::CustomStore;
pub use error::{AddressError, Error};
pub use failure::OnFailure;
pub use in_flight::{InFlight, Place};
pub use joint::{JointAsk, check_all};
pub use lease::Leases;
pub use options::Options;
pub use store::{RedisStore, Reply};
pub use tallygate::joint::JointDecision;
pub use waiting::Waiting;
