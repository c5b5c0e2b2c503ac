//! Six rate limiting algorithms as pure, exact integer state machines.
//!
//! This crate decides; it does nothing else. A rule, a state, a time and a cost go in; a state and a
//! decision come out. There is no clock, no lock, no I/O and no float in it, and it needs only
//! `alloc`. The crate `tallygate` puts a clock, a table and threads around it.
//!
//! ```
//! use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
//!
//! let policy = Policy::token_bucket(3).per(Ticks(10)).named("api").build()?;
//! let limit = &policy.limits()[0];
//!
//! let mut alice = limit.first(Tick(0));
//! let first: Decision = limit.decide(&mut alice, Tick(0), 2);
//! assert!(first.allowed);
//! assert_eq!(first.remaining, 1);
//!
//! let second: Decision = limit.decide(&mut alice, Tick(0), 2);
//! assert!(!second.allowed);
//! assert_eq!(second.retry_after, Some(Ticks(4))); // exact: at 3 it would still be refused
//! # Ok::<(), tallygate_core::PolicyError>(())
//! ```
//!
//! | question | file |
//! |---|---|
//! | What is an algorithm? | `algorithm.rs` |
//! | What comes back? | `decision.rs` |
//! | How are several limits and every verb one step? | `apply.rs` |
//! | How does each of the six decide? | `bucket.rs` (token bucket, GCRA, leaky bucket), `fixed_window.rs`, `sliding_window_log.rs`, `sliding_window_counter.rs` |
//! | Which numbers are valid? | `numbers.rs` |
//! | How does a state survive a change of its numbers? | `limit.rs` |
//! | How are limits described? | `policy.rs` |
//! | What does a reservation return when it is settled? | `receipt.rs` |
//! | How do several limits decide as one, and what do their options do? | `several.rs`, `penalty.rs` |
//! | How does a script in a database decide the same, in doubles? | `exchange.rs`, `doubles.rs` |
//! | How is a policy stored with a state? | `description.rs` |
//! | Why is a request decided as it is? | `explain.rs` and its folder |
//! | What would a limit do to a trace? | `simulator.rs` |

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
mod limit;
mod numbers;
mod penalty;
mod policy;
mod receipt;
mod several;
mod simulator;
mod sliding_window_counter;
mod sliding_window_log;
mod time;

pub use algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
pub use apply::{Applied, Op, Part, apply, reserve, settle};
pub use bucket::{ArrivalTime, Bucket, BucketState, Level};
pub use codec::DecodeError;
pub use decision::{Answer, Decision, Outcome, Source, Timed};
pub use exchange::{Constants, NotWhole, Script};
pub use fixed_window::{FixedWindow, FixedWindowState};
pub use limit::{Limit, LimitState, Machine};
pub use numbers::{Anchor, Kind, MAX_LOG_ENTRIES, Numbers, PolicyError, UnknownKind};
pub use penalty::Penalty;
pub use policy::{LimitBuilder, Policy};
pub use receipt::{Mark, Receipt, Returns};
pub use several::Standing;
pub use simulator::{Simulator, simulate};
pub use sliding_window_counter::{SlidingWindowCounter, SlidingWindowCounterState};
pub use sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};
pub use time::{Tick, Ticks};

/// How much a request uses: 1 for a request, or bytes, or model tokens.
pub type Cost = u64;
