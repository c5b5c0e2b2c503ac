//! What can be asked for on the command line.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser as _};
use clap::{Args, Parser, Subcommand, ValueEnum};
use tollgate_core::{Anchor, Cost, Kind};

/// A rate limiter that decides exactly.
#[derive(Debug, Parser)]
#[command(name = "tollgate", version, arg_required_else_help = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Replay(Replay),
}

/// Decide a trace of requests in virtual time.
///
/// Reads a line with the capacity, a line with the window, a line with the number of instructions n,
/// then n lines `request CLIENT TIMESTAMP [COST]`. Prints `allow` or `deny` a request. Lines with
/// another first word count and are skipped, blank lines do not count, lines after the n-th are
/// ignored.
///
/// Without options it follows the textbook token bucket in whole units of time to the letter,
/// including its drift. With --exact or --algorithm it decides as Tollgate does in production, and
/// the capacity is the limit of each window.
#[derive(Args, Debug)]
#[command(
    after_help = "Exit code 2 means bad input or bad options: the message says which line, what \
was found and what was expected. Results of the lines before it are printed."
)]
pub(crate) struct Replay {
    /// Where to read; standard input without it
    pub(crate) file: Option<PathBuf>,

    /// Decide by one of the six algorithms of production
    #[arg(long, value_name = "NAME", value_parser = kind())]
    pub(crate) algorithm: Option<Kind>,

    /// Decide by the drift-free token bucket of production (the others have no drift to lose)
    #[arg(long)]
    pub(crate) exact: bool,

    /// The most that is admitted at one instant, for buckets [default: the capacity]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(Cost).range(1..))]
    pub(crate) burst: Option<Cost>,

    /// Where a fixed window starts [default: clock]
    #[arg(long, value_name = "WHERE", value_enum)]
    pub(crate) anchor: Option<WindowAnchor>,

    /// Keep the clients in Redis or Valkey, under names of this run that are removed at its end
    ///
    /// `redis://HOST:PORT`, `rediss://…`, `redis+cluster://HOST,HOST` or `redis+sentinel://HOST,HOST/NAME`. The
    /// times are those of the trace.
    #[arg(long, value_name = "URL", verbatim_doc_comment)]
    pub(crate) store: Option<String>,

    /// Print each decision as a line of JSON, with times in units of the trace
    #[arg(long)]
    pub(crate) json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum WindowAnchor {
    /// On multiples of the window
    Clock,
    /// At the first request admitted after the client was fresh
    FirstRequest,
}

impl From<WindowAnchor> for Anchor {
    fn from(anchor: WindowAnchor) -> Self {
        match anchor {
            WindowAnchor::Clock => Self::Clock,
            WindowAnchor::FirstRequest => Self::FirstRequest,
        }
    }
}

fn kind() -> impl clap::builder::TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::name)).try_map(|name| name.parse::<Kind>())
}
