//! Backtests limits on an access log: which of its requests would each limit have denied?
//!
//! Start with [`backtest`], which returns a [`Report`]; [`write_text`] and [`write_html`] show it, and serializing it gives
//! the JSON report.
//!
//! | question | file |
//! |---|---|
//! | Where does the log come from? | `input.rs` |
//! | How is a line parsed? | `format.rs`: `combined.rs`, `json.rs`, `table.rs`; times in `timestamp.rs` |
//! | Which client made a request? | `key.rs` |
//! | Which lines take part? | `filter.rs` |
//! | What is tried? | `trial.rs` |
//! | How do lines become requests? | `reading.rs`, in a separate thread |
//! | How are requests decided and counted? | `tally.rs`, with `activity.rs` for peaks and `timeline.rs` for counts over time |
//! | Which limit would have denied almost no client? | `suggest.rs`, on `spool.rs` |
//! | What does a report contain? | `report.rs`, shown by `text.rs` and `html.rs` |
//!
//! The core decides every request, in the order of the log. Memory grows with the number of clients, not of requests.

mod activity;
mod combined;
mod filter;
mod format;
mod html;
mod input;
mod json;
mod key;
mod reading;
mod report;
mod share;
mod spool;
mod suggest;
mod table;
mod tally;
mod text;
mod timeline;
mod timestamp;
mod trial;

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use tallygate_core::Ticks;

pub use filter::LineFilter;
pub use format::{Format, LogOptions};
pub use html::write as write_html;
pub use input::Input;
pub use key::KeyFrom;
pub use reading::UPLOAD_ABORTED;
pub use report::Report;
pub use share::Share;
use tally::Tally;
pub use text::{grouped, write as write_text};
pub use trial::Trial;

/// The log format, the policies to try and the contents of the report.
#[derive(Clone, Debug)]
pub struct BacktestPlan {
    /// How lines are parsed, and which field identifies the client.
    pub log: LogOptions,
    /// The policies to try.
    pub policies: Vec<Trial>,
    /// The window in which each client's peak is counted.
    pub peak: Ticks,
    /// Suggest, for each policy, the smallest limit that denies no request of this share of clients.
    pub suggest: Option<Share>,
    /// The number of most denied clients in the report.
    pub top: usize,
}

/// Limits on the size of a backtest.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// The most bytes of the inputs after decompression.
    pub unpacked_bytes: u64,
    /// The most memory for the clients' names, counts and states, compared with an upper estimate.
    pub memory_bytes: u64,
}

impl Bounds {
    /// No bounds, for local logs.
    pub const NONE: Self = Self { unpacked_bytes: u64::MAX, memory_bytes: u64::MAX };
}

/// The progress of a backtest.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Progress {
    /// Requests are read and decided.
    Reading {
        /// Bytes read from the inputs, before decompression.
        bytes: u64,
        /// Lines read so far.
        lines: u64,
    },
    /// All requests are decided; limits are searched for the suggestions.
    Suggesting,
}

/// The error of a backtest.
#[derive(Debug)]
#[non_exhaustive]
pub enum BacktestError {
    /// The log does not have the requested or a known format.
    Format(String),
    /// The log exceeds [`Bounds::unpacked_bytes`].
    LogTooLarge {
        /// The bound.
        max_bytes: u64,
    },
    /// The clients exceed [`Bounds::memory_bytes`].
    TooMuchMemory {
        /// The bound.
        max_bytes: u64,
    },
    /// The temporary file cannot be written or read.
    Spool(io::Error),
    /// The client closed the connection before the log was complete.
    UploadAborted,
    /// No line is a request, so there is nothing to report: what was read instead, and what would work.
    NoRequests(String),
}

impl fmt::Display for BacktestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Format(reason) | Self::NoRequests(reason) => f.write_str(reason),
            Self::LogTooLarge { max_bytes } => write!(
                f,
                "the log has more than {max_bytes} bytes after decompression (each line counts as at least 64 bytes); \
                 send a smaller part of it"
            ),
            Self::TooMuchMemory { max_bytes } => write!(
                f,
                "the clients of the log need more than {max_bytes} bytes of memory; \
                 send a log with fewer clients, or try fewer policies"
            ),
            Self::UploadAborted => f.write_str("the upload ended before the log was complete"),
            Self::Spool(error) => {
                write!(f, "cannot use the temporary file for suggestions: {error}")
            }
        }
    }
}

impl std::error::Error for BacktestError {}

/// The most parsed batches that wait to be decided.
const MAX_QUEUED_BATCHES: usize = 8;

/// Reads logs, decides their requests with every policy, and returns the report. Calls `watch` with the progress after each
/// batch of lines.
///
/// # Errors
/// Returns an error if the log does not have the format of the plan, if it exceeds the bounds, if the temporary file
/// fails, or if no line can be used. A single line that cannot be parsed is not an error: the report counts it.
pub fn backtest(
    inputs: Vec<Input>,
    plan: &BacktestPlan,
    bounds: &Bounds,
    watch: &mut dyn FnMut(Progress),
) -> Result<Report, BacktestError> {
    let tally = count_requests(inputs, plan, bounds, watch)?;
    if tally.requests == 0 {
        return Err(BacktestError::NoRequests(tally.why_no_requests(plan)));
    }
    if plan.suggest.is_some() {
        watch(Progress::Suggesting);
    }
    Report::of(tally, plan)
}

fn count_requests(
    inputs: Vec<Input>,
    plan: &BacktestPlan,
    bounds: &Bounds,
    progress: &mut dyn FnMut(Progress),
) -> Result<Tally, BacktestError> {
    let mut tally = Tally::new(plan, bounds).map_err(BacktestError::Spool)?;
    let bytes = Arc::new(AtomicU64::new(0));
    let hasher = tally.clients.hasher();
    std::thread::scope(|scope| {
        let (sender, batches) = sync_channel(MAX_QUEUED_BATCHES);
        let (options, bytes, hasher) = (&plan.log, &bytes, &hasher);
        let reading =
            scope.spawn(move || reading::read(inputs, options, bounds, hasher, bytes, &sender));
        for batch in batches {
            tally.add(batch)?;
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
