//! Backtests: what a limit would have done to the requests of a log.
//!
//! | question | file |
//! |---|---|
//! | Where does the log come from? | `input.rs` |
//! | What is on a line? | `format.rs`: `combined.rs`, `json.rs`, `table.rs`; times in `moment.rs` |
//! | Whose request is it? | `key.rs` |
//! | How do lines become requests? | `reading.rs`, in a thread of its own |
//! | What is decided and counted? | `tally.rs`, with `activity.rs` for peaks and `timeline.rs` for when |
//! | Which limit would have spared nearly all? | `suggest.rs`, on `spool.rs` |
//! | What is told? | `report.rs`, as `text.rs` or `html.rs` |
//!
//! What is decided is decided by the core, request by request, in the order of the log. Memory grows with the clients.

mod activity;
mod combined;
mod format;
mod html;
mod input;
mod json;
mod key;
mod moment;
mod reading;
mod report;
mod share;
mod spool;
mod suggest;
mod table;
mod tally;
mod text;
mod timeline;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use tallygate_core::{Limit, Ticks};

pub use format::{Format, Wanted};
pub use html::write as write_html;
pub use input::Input;
pub use key::KeyFrom;
pub use reading::ABANDONED;
pub use report::Report;
pub use share::Share;
use tally::Tally;
pub use text::{grouped, write as write_text};

/// What is asked.
#[derive(Clone, Debug)]
pub struct Plan {
    /// How lines are read, and whose requests they are.
    pub wanted: Wanted,
    /// The limits that are tried.
    pub policies: Vec<Limit>,
    /// The window of the peaks.
    pub peak: Ticks,
    /// Finds for each policy the least limit that would have spared this share of clients.
    pub suggest: Option<Share>,
    /// How many clients are told of those hit hardest.
    pub top: usize,
}

/// How much is taken on.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes of the inputs, unpacked.
    pub unpacked_bytes: u64,
    /// The most memory that the clients' names, counts and states may take, by an estimate from above.
    pub memory_bytes: u64,
}

impl Bounds {
    /// No bounds, for logs of one's own.
    pub const NONE: Self = Self { unpacked_bytes: u64::MAX, memory_bytes: u64::MAX };
}

/// How far a backtest is.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress {
    /// It reads and decides.
    Reading {
        /// Bytes of the inputs that were read, as they are stored.
        bytes: u64,
        /// Lines that were decided.
        lines: u64,
    },
    /// All was read, and it looks for the limits that spare enough clients.
    Suggesting,
}

/// Why there is no report.
#[derive(Debug)]
#[non_exhaustive]
pub enum BacktestError {
    /// The lines cannot be read as is asked.
    Format(String),
    /// More than is taken on.
    TooLarge {
        /// What there is too much of.
        what: &'static str,
        /// The most that is taken on.
        most: u64,
    },
    /// The temporary file cannot be written or read.
    Spool(io::Error),
    /// Whoever sent the log has gone.
    Abandoned,
}

impl fmt::Display for BacktestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(reason) => f.write_str(reason),
            Self::TooLarge { what, most } => write!(f, "more than {most} {what}"),
            Self::Abandoned => f.write_str("the log was not sent to its end"),
            Self::Spool(error) => write!(f, "the temporary file for suggestions: {error}"),
        }
    }
}

impl std::error::Error for BacktestError {}

/// Batches that may wait to be decided.
const WAITING: usize = 8;

/// Reads inputs and decides the requests in them. `watch` is called now and then with the progress.
///
/// # Errors
/// The lines cannot be read as the plan asks, or there are more than the bounds allow.
pub fn backtest(
    inputs: Vec<Input>,
    plan: &Plan,
    bounds: &Bounds,
    watch: &mut dyn FnMut(Progress),
) -> Result<Report, BacktestError> {
    let tally = counted(inputs, plan, bounds, watch)?;
    if plan.suggest.is_some() {
        watch(Progress::Suggesting);
    }
    Report::of(tally, plan)
}

fn counted(
    inputs: Vec<Input>,
    plan: &Plan,
    bounds: &Bounds,
    progress: &mut dyn FnMut(Progress),
) -> Result<Tally, BacktestError> {
    let mut tally = Tally::new(plan, bounds).map_err(BacktestError::Spool)?;
    let bytes = Arc::new(AtomicU64::new(0));
    let hasher = tally.clients.hasher();
    std::thread::scope(|scope| {
        let (sender, batches) = sync_channel(WAITING);
        let (wanted, bytes, hasher) = (&plan.wanted, &bytes, &hasher);
        let reading =
            scope.spawn(move || reading::read(inputs, wanted, bounds, hasher, bytes, &sender));
        for batch in batches {
            tally.take(batch)?;
            let bytes = bytes.load(Ordering::Relaxed);
            progress(Progress::Reading { bytes, lines: tally.lines });
        }
        match reading.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })?;
    Ok(tally)
}
