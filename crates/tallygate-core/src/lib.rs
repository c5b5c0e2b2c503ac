//! Six rate limiting algorithms as pure state machines in exact integer arithmetic.
//!
//! This crate decides whether a request is allowed, and does nothing else. It takes a limit, the state of a
//! client, a time and a cost, and returns a [`Decision`] and the new state. It has no clock, no lock, no I/O
//! and no floating-point arithmetic. It is `no_std` and needs only `alloc`.
//!
//! **To limit the requests of a service, use the crate `tallygate` instead.** It adds a clock, a table of
//! clients that many threads can share, and everything in this crate is re-exported there. Use
//! `tallygate-core` directly if you keep the states yourself: in a simulation, in your own store, on a
//! device without an operating system.
//!
//! # Where to start
//!
//! 1. Describe a limit with one of the constructors of [`Policy`], such as [`Policy::token_bucket`].
//! 2. Create the state of a client with [`Algorithm::initial`] when the client is first seen.
//! 3. Call [`Algorithm::decide`] for each request, and keep the state between calls.
//!
//! ```
//! use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
//!
//! // 3 requests per 10 ticks. A tick is whatever unit of time you choose.
//! let policy = Policy::token_bucket(3).per(Ticks(10)).named("api").build()?;
//! let mut alice = policy.initial(Tick(0));
//!
//! let first: Decision = policy.decide(&mut alice, Tick(0), 2);
//! assert!(first.allowed);
//! assert_eq!(first.remaining, 1);
//!
//! let second: Decision = policy.decide(&mut alice, Tick(0), 2);
//! assert!(!second.allowed);
//! // The wait is exact: the same request is denied at tick 3 and allowed at tick 4.
//! assert_eq!(second.retry_after, Some(Ticks(4)));
//! # Ok::<(), tallygate_core::PolicyError>(())
//! ```
//!
//! Then, depending on what you want to do:
//!
//! | to do this | read |
//! |---|---|
//! | choose an algorithm | [`Kind`] |
//! | combine several limits, all or nothing | [`Policy::all_of`] |
//! | test a limit on recorded traffic | [`simulate`], [`Simulator`] |
//! | charge an estimate now and the actual cost later | [`reserve`], [`settle`] |
//! | charge without asking, refund, reset, decide several keys at once | [`apply`], [`Op`] |
//! | write your own algorithm | [`Algorithm`] |
//! | show a user why a request was denied | [`explain`](mod@explain) |
//! | store states as bytes | [`Algorithm::encode`], [`Limit::adopt`] |
//! | find out which numbers are valid | [`PolicyError`] |
//! | divide a quota between instances without a common store | [`Policy::share`] |
//! | tell a denial from an outage | [`Decision::verdict`] |
//!
//! # Guarantees
//!
//! - Every valid limit is decided exactly: without rounding, drift or overflow, for any window and rate. All
//!   other limits are a [`PolicyError`] when they are built.
//! - [`Decision::retry_after`] is the exact wait: the request is allowed at that tick and denied one tick
//!   earlier, if no other request comes.
//! - A denied request charges nothing and changes nothing, unless the limit has a [`Penalty`].
//! - No input causes a panic.
//!
//! # Features
//!
//! The crate has no dependencies by default. Both features need the standard library.
//!
//! | feature | adds |
//! |---|---|
//! | `http` | `Decision::headers`: a decision as HTTP header fields |
//! | `serde` | `Serialize` and `Deserialize` for [`Decision`], [`Policy`], [`Limit`] and the types in them |

#![cfg_attr(docsrs, feature(doc_cfg))]
#![no_std]

extern crate alloc;

mod algorithm;
mod apply;
mod bucket;
mod codec;
mod decision;
mod description;
mod doubles;
mod exchange;
pub mod explain;
mod fixed_window;
#[cfg(feature = "http")]
pub mod headers;
mod instance;
mod limit;
mod numbers;
mod penalty;
mod policy;
mod receipt;
#[cfg(feature = "serde")]
mod serde_form;
mod several;
mod shadow;
mod simulator;
mod sliding_window_counter;
mod sliding_window_log;
mod time;

pub use algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
pub use apply::{Applied, Op, Part, apply, reserve, settle};
pub use bucket::{ArrivalTime, Bucket, BucketState, Level};
pub use codec::DecodeError;
pub use decision::{Answer, Decision, Outcome, Quota, Source, Timed, Verdict};
pub use exchange::{Constants, NotAMultiple, Script};
pub use fixed_window::{FixedWindow, FixedWindowState};
pub use instance::Instance;
pub use limit::{Limit, LimitState, Machine};
pub use numbers::{Anchor, Kind, MAX_LOG_ENTRIES, Numbers, PolicyError, UnknownKind};
pub use penalty::Penalty;
pub use policy::{LimitBuilder, Policy};
pub use receipt::{ChargeRecord, Receipt, Returns, Settlement};
pub use several::LimitRecord;
pub use simulator::{Simulator, simulate};
pub use sliding_window_counter::{SlidingWindowCounter, SlidingWindowCounterState};
pub use sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};
pub use time::{Tick, Ticks};

/// The units that a request charges: 1 per request, or a number of bytes or of model tokens.
pub type Cost = u64;
