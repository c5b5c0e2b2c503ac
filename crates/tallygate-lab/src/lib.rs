//! What limits do to traffic, in virtual time: replays of traces, backtests of logs, simulations.
//!
//! Every decision here is made by `tallygate-core` (or by Redis, in a replay that names a store). The binary `tallygate`
//! prints the results on the command line; the server returns the same results over HTTP.
//!
//! | question | file |
//! |---|---|
//! | How is a limit written in one line? | `spelling.rs` |
//! | What does a limit do to a trace of requests? | `replay.rs`, with `instruction.rs` and `textbook.rs` |
//! | What would a limit have done to the requests of a log? | `backtest.rs` |
//! | What does each algorithm do to the same made-up traffic? | `simulate.rs` |
//! | Which client has an address? | `address.rs` |
//! | Which known name is nearest to a misspelled one? | `names.rs` |
//!
//! There are no sockets, no configuration files and no command-line arguments here.

pub mod address;
pub mod backtest;
#[cfg(any(test, fuzzing))]
pub mod fuzzing;
mod instruction;
mod machine;
pub mod names;
pub mod replay;
pub mod simulate;
pub mod spelling;
mod textbook;

pub use instruction::{Instruction, InstructionError};
pub use textbook::{Textbook, TextbookState, Verdict, rate_limiter};
