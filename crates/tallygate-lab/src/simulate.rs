//! Simulates generated traffic: decides the same requests with each algorithm, in virtual time.
//!
//! Start with [`report`], which runs a [`Scenario`]; [`draw`] and [`page`] show the result.
//!
//! | question | file |
//! |---|---|
//! | Which traffic and which limit, within which bounds? | `scenario.rs` |
//! | When does each request arrive? | `traffic.rs`, with random numbers from `random.rs` |
//! | How is each request decided, and which clients retry? | `run.rs` |
//! | Which curves does a report contain? | `series.rs` |
//! | What does a report contain? | `report.rs`, with the policies as text from `policy_text.rs` |
//! | Why was a request allowed or denied? | `arithmetic.rs` |
//! | How is a report shown? | `terminal.rs`, `html.rs` |
//!
//! A tick is a microsecond. The core makes every decision. The same scenario gives the same bytes on every machine, over
//! HTTP and on the command line.

mod arithmetic;
mod html;
mod policy_text;
mod random;
mod report;
mod run;
mod scenario;
mod series;
mod terminal;
mod traffic;

pub use arithmetic::{Arithmetic, arithmetic};
pub use html::page;
pub use report::{Report, report};
pub use scenario::{Pattern, Retry, Scenario, ScenarioError};
pub use terminal::{Style, draw};
