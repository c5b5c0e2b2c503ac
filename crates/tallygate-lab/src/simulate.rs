//! What limits would do to made-up traffic: the same traffic under each algorithm, in virtual time.
//!
//! | question | file |
//! |---|---|
//! | What is asked for, and what may be? | `scenario.rs` |
//! | Who comes when? | `traffic.rs`, with chance from `chance.rs` |
//! | What is decided, and who comes again? | `run.rs` |
//! | What is drawn of it? | `series.rs` |
//! | What does the reply say? | `report.rs`, with the policies as text from `policy_text.rs` |
//! | Why was a request decided as it was? | `arithmetic.rs` |
//! | How is a report shown? | `terminal.rs`, `html.rs` |
//!
//! A tick is a microsecond. Every decision is the core's: nothing here knows how an algorithm decides. The same
//! scenario gives the same bytes, on any machine, over HTTP as on the command line.

mod arithmetic;
mod chance;
mod html;
mod policy_text;
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
