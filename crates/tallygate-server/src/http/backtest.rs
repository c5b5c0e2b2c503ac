//! Backtests over HTTP: the log is streamed, never held as a whole, and few backtests run at a time.
//!
//! The parameters are those of `tallygate backtest`. A background thread reads, unpacks and decides. The body is
//! forwarded piece by piece, at the speed of that thread.

use std::io::{self, Read};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use hyper::StatusCode;
use hyper::body::{Body as _, Incoming};
use hyper::header;
use hyper::http::request::Parts;
use tallygate_lab::backtest::{
    BacktestError, BacktestPlan, Bounds, Format, Input, KeyFrom, LineFilter, LogOptions, Share,
    Trial, UPLOAD_ABORTED, backtest,
};
use tallygate_lab::limit_syntax;
use tokio::sync::mpsc;

use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply, answer, body};
use crate::background::{BACKTESTS_AT_A_TIME, run_in_background};

/// How long a client may take to send the next piece.
const IDLE: Duration = Duration::from_secs(30);
/// Maximum ratio of the unpacked to the uploaded size.
const MAX_UNPACKED: u64 = 16;
/// Maximum number of policies, of their limits, and of filters.
const MAX_POLICIES: usize = 8;
const MAX_LIMITS: usize = 16;
const MAX_FILTERS: usize = 16;
/// The default and the maximum number of most-denied clients.
const TOP: u64 = 10;
const MAX_TOP: u64 = 1_000;
/// How many pieces may be buffered.
const WAITING: usize = 16;

const PARAMETERS: [&str; 10] = [
    "key",
    "policy",
    "format",
    "time",
    "suggest",
    "peak",
    "top",
    "where",
    "status",
    "exclude_agent",
];

pub(super) async fn reply(
    caller: &Caller,
    request: &Parts,
    body: Incoming,
) -> Result<Reply, Problem> {
    let settings = caller.shared.settings.load();
    let (max_bytes, deadline) = (settings.backtest_max_bytes, settings.limits.body_timeout);
    drop(settings);
    let mut upload = Upload { body, max_bytes, bytes: 0 };
    let result = run(caller, request, &mut upload).await;
    if result.is_err() {
        // If the connection were closed at once, a client that still writes would not see the reply.
        let rest = max_bytes.saturating_sub(upload.bytes).max(body::MAX_SKIPPED_BYTES);
        tokio::spawn(body::skip(upload.body, rest, deadline));
    }
    result
}

async fn run(caller: &Caller, request: &Parts, upload: &mut Upload) -> Result<Reply, Problem> {
    let plan = parse_plan(request)?;
    if upload.body.size_hint().lower() > upload.max_bytes {
        return Err(upload.too_large());
    }
    let place = caller.shared.backtests.clone().try_acquire_owned().map_err(|_| {
        let detail = format!("{BACKTESTS_AT_A_TIME} backtests are already running; retry in 10 s");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "10")
    })?;
    let unpacked_bytes = upload.max_bytes.saturating_mul(MAX_UNPACKED);
    let memory_bytes = caller.shared.settings.load().backtest_max_memory;
    let bounds = Bounds { unpacked_bytes, memory_bytes };
    let (pieces, reader) = mpsc::channel(WAITING);
    let deciding = run_in_background(move || {
        let reader =
            Input::upload(UploadReader { pieces: reader, here: Bytes::new(), ended: false });
        let report = backtest(vec![reader], &plan, &bounds, &mut |_| {});
        drop(place);
        report
    });
    upload.forward(pieces).await?;
    let report = deciding.await.map_err(|_| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the backtest failed without a report")
    })??;
    let json = serde_json::to_vec(&report);
    let json = json.map_err(|error| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("cannot write the report: {error}"))
    })?;
    Ok(answer::json(json))
}

fn parse_plan(request: &Parts) -> Result<BacktestPlan, Problem> {
    let query =
        Query::with_lists(request.uri.query(), &PARAMETERS, &["policy", "where", "exclude_agent"])?;
    let about = |name: &str, complaint: &dyn std::fmt::Display| {
        Problem::bad(format!("parameter {name:?}: {complaint}"))
    };
    let policies = query.texts("policy")?;
    if policies.is_empty() || policies.len() > MAX_POLICIES {
        let found = policies.len();
        return Err(Problem::bad(format!(
            "parameter \"policy\" must be given 1 to {MAX_POLICIES} times (got {found}), such as policy=gcra 5/s"
        )));
    }
    let parse = |text: &&str| Trial::parse(text).map_err(|error| about("policy", &error));
    let policies: Vec<Trial> = policies.iter().map(parse).collect::<Result<_, _>>()?;
    let limits = policies.iter().map(|policy| policy.limits().len()).sum::<usize>();
    if limits > MAX_LIMITS {
        let complaint = format!("{limits} limits in all policies; use at most {MAX_LIMITS}");
        return Err(about("policy", &complaint));
    }
    let filters = parse_filters(&query)?;
    let key = query.text("key")?.unwrap_or("ip").parse::<KeyFrom>();
    let format = query.text("format")?.map(str::parse::<Format>).transpose();
    let suggest = query.text("suggest")?.map(str::parse::<Share>).transpose();
    let peak = query.text("peak")?.map(limit_syntax::window).transpose();
    let peak = peak.map_err(|error| about("peak", &error))?;
    let top = query.number("top")?.unwrap_or(TOP);
    if top > MAX_TOP {
        return Err(about("top", &format!("found {top}; expected at most {MAX_TOP}")));
    }
    Ok(BacktestPlan {
        log: LogOptions {
            key: key.map_err(|error| about("key", &error))?,
            format: format.map_err(|error| about("format", &error))?,
            time: query.text("time")?.map(str::to_owned),
            filters,
        },
        peak: peak.unwrap_or(policies[0].limits()[0].numbers().window),
        policies,
        suggest: suggest.map_err(|error| about("suggest", &error))?,
        top: usize::try_from(top).unwrap_or(usize::MAX),
    })
}

fn parse_filters(query: &Query) -> Result<Vec<LineFilter>, Problem> {
    let about =
        |name: &str, complaint: String| Problem::bad(format!("parameter {name:?}: {complaint}"));
    let mut filters = Vec::new();
    for text in query.texts("where")? {
        filters.push(text.parse::<LineFilter>().map_err(|error| about("where", error))?);
    }
    if let Some(text) = query.text("status")? {
        filters.push(LineFilter::status(text).map_err(|error| about("status", error))?);
    }
    for text in query.texts("exclude_agent")? {
        let filter = LineFilter::exclude_agent(text);
        filters.push(filter.map_err(|error| about("exclude_agent", error))?);
    }
    if filters.len() > MAX_FILTERS {
        let complaint = format!("{} filters in all; use at most {MAX_FILTERS}", filters.len());
        return Err(about("where", complaint));
    }
    Ok(filters)
}

/// The body of a request.
struct Upload {
    body: Incoming,
    max_bytes: u64,
    bytes: u64,
}

/// A piece of a body; `None` is its end.
type Piece = Option<Bytes>;

impl Upload {
    /// Forwards the body until its end, or until the reader stops.
    async fn forward(&mut self, pieces: mpsc::Sender<Piece>) -> Result<(), Problem> {
        loop {
            let piece = match tokio::time::timeout(IDLE, body::next(&mut self.body)).await {
                Ok(Ok(piece)) => piece,
                Ok(Err(error)) => {
                    return Err(Problem::bad(format!("cannot read the body: {error}")));
                }
                Err(_) => {
                    let detail = format!("no part of the body arrived for {} s", IDLE.as_secs());
                    return Err(Problem::new(StatusCode::REQUEST_TIMEOUT, detail)
                        .with(header::CONNECTION, "close"));
                }
            };
            self.bytes += piece.as_ref().map_or(0, |piece| piece.len() as u64);
            if self.bytes > self.max_bytes {
                return Err(self.too_large());
            }
            let is_end = piece.is_none();
            if pieces.send(piece).await.is_err() || is_end {
                return Ok(());
            }
        }
    }

    fn too_large(&self) -> Problem {
        let detail = format!("the body is longer than {} bytes", self.max_bytes);
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }
}

/// The reader of the body, on the background thread.
struct UploadReader {
    pieces: mpsc::Receiver<Piece>,
    here: Bytes,
    ended: bool,
}

impl Read for UploadReader {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.here.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Some(piece)) => self.here = piece,
                Some(None) => self.ended = true,
                None => return Err(UPLOAD_ABORTED.into()),
            }
        }
        let length = self.here.len().min(buffer.len());
        buffer[..length].copy_from_slice(&self.here[..length]);
        self.here.advance(length);
        Ok(length)
    }
}

impl From<BacktestError> for Problem {
    fn from(error: BacktestError) -> Self {
        let status = match error {
            BacktestError::Format(_)
            | BacktestError::NoRequests(_)
            | BacktestError::UploadAborted => StatusCode::BAD_REQUEST,
            BacktestError::LogTooLarge { .. } | BacktestError::TooMuchMemory { .. } => {
                StatusCode::PAYLOAD_TOO_LARGE
            }
            BacktestError::Spool(_) => StatusCode::INSUFFICIENT_STORAGE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}
