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
//! # Where to start
//!
//! 1. Describe the limits with a [`Policy`]: an algorithm, an amount, a window. [`Kind`] lists the six algorithms.
//! 2. Create one [`RateLimiter`] per policy and share it by reference. It keeps the clients in memory.
//! 3. Call [`check`](RateLimiter::check) with the client's key. The [`Decision`] says whether the request is allowed,
//!    how much is left, and how long to wait after a denial.
//!
//! # Common tasks
//!
//! | task | use |
//! |---|---|
//! | Charge more than one unit, name a tier, or give the time | [`Ask`] |
//! | See what a check would return, return units, or forget a client | [`peek`](RateLimiter::peek), [`refund`](RateLimiter::refund), [`reset`](RateLimiter::reset) |
//! | Check many keys at once | [`check_many`](RateLimiter::check_many) |
//! | Enforce several limits on one key, such as 10 per second and 1000 per hour | [`Policy::all_of`] |
//! | Decide over several keys at once, such as a user and an address | [`check_all`] |
//! | Give clients different limits, and change limits while serving | [`Tiers`], [`TieredLimiter`] |
//! | Charge an estimate now and the actual cost later | [`reserve`](RateLimiter::reserve), [`settle`](RateLimiter::settle) |
//! | Wait until a request is allowed | [`until_ready`](RateLimiter::until_ready), [`block_until_ready`](RateLimiter::block_until_ready) |
//! | Delay requests so that they leave at a steady rate | [`shape`](RateLimiter::shape) |
//! | Limit how many requests are served at the same time | [`InFlight`] |
//! | Limit the process itself, without keys | [`SingleLimiter`] |
//! | Build one key from several values | [`joined_key`] |
//! | Derive a key from a client's address, also behind proxies | [`address`] |
//! | Show the decision to an HTTP client | `Decision::headers` (feature `http`) |
//! | Store or send decisions and policies | `serde` for [`Decision`] and [`Policy`] (feature `serde`) |
//! | Tell a denial from an unavailable store | [`Decision::verdict`] |
//! | Divide a quota between instances without a common store | [`Policy::share`] |
//! | Count or log decisions | [`observer`] |
//! | Keep usage over a restart | [`snapshot`] |
//! | Test with a clock that you control | [`clock::ManualClock`] |
//! | Share limits between processes through Redis | the crate `tallygate-redis` |
//! | Name the type of a limiter in a struct | [`MemoryLimiter`], [`TieredLimiter`], `tallygate_redis::AnyLimiter` |
//!
//! # Extension points
//!
//! - [`algorithm`]: the interface that the six algorithms implement, for an algorithm of your own.
//! - [`store`]: the memory stores, and the interface for a store of your own.
//! - [`explain`]: the arithmetic behind a decision, step by step.
//!
//! # Guarantees
//!
//! All arithmetic is in integers and exact: a limit never allows more than its definition, and a request that is denied
//! with a `retry_after` is allowed at exactly that time if nothing else is charged. A denial is a [`Decision`], not an
//! error; errors ([`StoreError`]) mean that there is no decision.
//!
//! # Features
//!
//! | feature | adds |
//! |---|---|
//! | `http` | `Decision::headers`: a decision as HTTP header fields |
//! | `serde` | `Serialize` and `Deserialize` for [`Decision`], [`Policy`] and the types in them |
//! | `metrics` | `observer::MetricsObserver`: counts decisions through the `metrics` facade |

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod address;
mod allowance;
mod ask;
mod block_on;
mod client_state;
pub mod clock;
mod departures;
mod hash;
pub mod in_flight;
pub mod joint;
mod joint_store;
mod key;
mod lateness;
mod limiter;
mod line;
mod map_store;
mod memory;
pub mod merge;
pub mod observer;
pub mod reservation;
mod returns;
mod rule_source;
mod settle_error;
mod shards;
pub mod snapshot;
mod storage;
mod table;
pub mod tiers;
mod timer;
mod waiting;
mod waiting_store;

pub use ask::Ask;
pub use block_on::block_on;
pub use in_flight::InFlight;
pub use joint::check_all;
pub use key::joined_key;
pub use limiter::{MemoryLimiter, RateLimiter, SingleLimiter, TieredLimiter};
pub use storage::StoreError;
pub use tallygate_core::{
    Cost, Decision, Kind, Limit, Policy, PolicyError, Quota, Source, Tick, Ticks, Verdict, explain,
};
pub use tiers::Tiers;

pub mod algorithm {
    //! The interface of algorithms, the six that implement it, and their states.
    //!
    //! Implement [`Algorithm`] to limit by a rule of your own; `examples/own_algorithm.rs` shows how. Applications that
    //! use the built-in algorithms through a [`Policy`](crate::Policy) need nothing from this module.

    pub use tallygate_core::{
        Algorithm, Answer, Applied, ArrivalTime, Bucket, BucketState, ChargeRecord, Constants,
        DecodeError, Facts, Fit, FitBehind, FixedWindow, FixedWindowState, Level, LimitRecord,
        LimitState, MAX_LOG_ENTRIES, Machine, NotAMultiple, Op, Outcome, Part, Receipt, Returns,
        Script, Settlement, Share, Simulator, SlidingWindowCounter, SlidingWindowCounterState,
        SlidingWindowLog, SlidingWindowLogState, Timed, Used, apply, reserve, settle, simulate,
    };
}

#[cfg(feature = "http")]
pub use tallygate_core::headers;

pub mod policy {
    //! The parts of a [`Policy`](crate::Policy): the builder of a limit, its numbers and its options.

    pub use tallygate_core::{Anchor, Instance, LimitBuilder, Numbers, Penalty, UnknownKind};
}

pub mod store {
    //! Stores: the two that keep clients in memory, and the interfaces for other stores.
    //!
    //! [`PolicyStore`] keeps the clients of a [`Policy`](crate::Policy), [`MemoryStore`] those of
    //! [`Tiers`](crate::Tiers) or of an algorithm of your own. Make one with a [`Capacity`] and a
    //! [clock](crate::clock), and give it to [`RateLimiter::with_store`](crate::RateLimiter::with_store) or
    //! [`RateLimiter::in_store`](crate::RateLimiter::in_store).
    //!
    //! For your own store, implement [`StateMap`] and wrap it in a [`MapStore`], or implement [`Store`].

    pub use crate::allowance::{Allowance, Bounds};
    pub use crate::ask::InvalidAsk;
    pub use crate::client_state::ClientState;
    pub use crate::map_store::{Entry, MapStore, StateMap};
    pub use crate::memory::{Capacity, MemoryStore, PolicyStore, Sweep};
    pub use crate::storage::{MAX_KEY_BYTES, RuleRef, Store};
    pub use crate::table::{Swept, Usage, WhenFull};
}
