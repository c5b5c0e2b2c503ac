//! Tries rate limits on recorded or generated traffic, in virtual time.
//!
//! Use this crate to choose the numbers of a limit before it runs in production. `tallygate-core` makes every decision
//! (Redis does, in a replay that names a store), so production would give the same results.
//!
//! # Where to start
//!
//! | to do this | start here |
//! |---|---|
//! | find out what a limit would have done to an access log | [`backtest::backtest`] |
//! | compare the six algorithms on generated traffic | [`simulate::report`] |
//! | decide a trace of `request CLIENT TIMESTAMP` lines | [`replay::Replay`] |
//! | read a limit such as `token_bucket 100/1m burst 20` | [`limit_syntax::parse`] |
//! | run the textbook token bucket on a few lines | [`rate_limiter`] |
//!
//! The binary `tallygate` offers the first three as `tallygate backtest`, `tallygate simulate` and `tallygate replay`;
//! the server returns the same reports over HTTP. The module [`names`] serves both: it finds the name
//! that a misspelled one probably means.
//!
//! This crate opens no sockets of its own and reads neither configuration files nor command-line arguments.
//!
//! ```
//! use tallygate_lab::simulate::{Pattern, Scenario, report};
//! use tallygate_lab::limit_syntax::{self, LimitText};
//!
//! let limit = limit_syntax::parse("token_bucket 100/1m burst 20")?;
//! assert_eq!(LimitText::new(&limit).to_string(), "token_bucket 100/1m burst 20");
//!
//! let scenario = Scenario { pattern: Pattern::Spike, ..Scenario::default() };
//! let report = serde_json::to_value(report(scenario)?)?;
//! assert_eq!(report["lanes"][0]["algorithm"], "token_bucket");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(docsrs, feature(doc_cfg))]

pub mod backtest;
pub mod duration;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod html_text;
mod instruction;
pub mod limit_syntax;
mod machine;
pub mod names;
pub mod replay;
pub mod simulate;
mod textbook;

pub use instruction::{Instruction, InstructionError};
pub use textbook::{Textbook, TextbookState, Verdict, rate_limiter};
