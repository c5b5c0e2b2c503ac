//! A log that is sent to be decided anew: streamed, never held whole, and few at a time.
//!
//! The parameters are the command's. Reading, unpacking and deciding happen aside; the body is handed on piece by
//! piece, and waits where that is slower.

use std::io::{self, Read};
use std::time::Duration;

use bytes::{Buf as _, Bytes};
use hyper::StatusCode;
use hyper::body::{Body as _, Incoming};
use hyper::header;
use hyper::http::request::Parts;
use tallygate_core::Limit;
use tallygate_lab::backtest::{
    ABANDONED, BacktestError, Bounds, Format, Input, KeyFrom, Plan, Share, Wanted, backtest,
};
use tallygate_lab::spelling;
use tokio::sync::mpsc;

use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply, answer, body};
use crate::aside::{BACKTESTS_AT_A_TIME, aside};

/// How long a client may take over the next piece.
const IDLE: Duration = Duration::from_secs(30);
/// How many times its own size a body may unpack to.
const MAX_UNPACKED: u64 = 16;
/// The most policies that are tried.
const MAX_POLICIES: usize = 8;
/// How many clients are told of those hit hardest, without a number and at most.
const TOP: u64 = 10;
const MAX_TOP: u64 = 1_000;
/// How many pieces may wait.
const WAITING: usize = 16;

const PARAMETERS: [&str; 7] = ["key", "policy", "format", "time", "suggest", "peak", "top"];

pub(super) async fn reply(
    caller: &Caller,
    request: &Parts,
    body: Incoming,
) -> Result<Reply, Problem> {
    let settings = caller.shared.settings.load();
    let (max_bytes, deadline) = (settings.backtest_max_bytes, settings.limits.body_timeout);
    drop(settings);
    let mut sent = Sent { body, max_bytes, bytes: 0 };
    let result = decided(caller, request, &mut sent).await;
    if result.is_err() {
        // Closed upon at once, a client that still writes would never read the answer.
        let rest = max_bytes.saturating_sub(sent.bytes).max(body::MAX_SKIPPED_BYTES);
        tokio::spawn(body::skip(sent.body, rest, deadline));
    }
    result
}

async fn decided(caller: &Caller, request: &Parts, sent: &mut Sent) -> Result<Reply, Problem> {
    let plan = plan_of(request)?;
    if sent.body.size_hint().lower() > sent.max_bytes {
        return Err(sent.too_large());
    }
    let place = caller.shared.backtests.clone().try_acquire_owned().map_err(|_| {
        let detail = format!("{BACKTESTS_AT_A_TIME} backtests are being decided; come back later");
        Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "10")
    })?;
    let unpacked_bytes = sent.max_bytes.saturating_mul(MAX_UNPACKED);
    let memory_bytes = caller.shared.settings.load().backtest_max_memory;
    let bounds = Bounds { unpacked_bytes, memory_bytes };
    let (pieces, arriving) = mpsc::channel(WAITING);
    let deciding = aside(move || {
        let arriving =
            Input::upload(Arriving { pieces: arriving, here: Bytes::new(), ended: false });
        let report = backtest(vec![arriving], &plan, &bounds, &mut |_| {});
        drop(place);
        report
    });
    sent.hand_on(pieces).await?;
    let report = deciding.await.map_err(|_| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, "the backtest ended without a report")
    })??;
    let json = serde_json::to_vec(&report);
    let json = json.map_err(|error| {
        Problem::new(StatusCode::INTERNAL_SERVER_ERROR, format!("the report: {error}"))
    })?;
    Ok(answer::json(json))
}

fn plan_of(request: &Parts) -> Result<Plan, Problem> {
    let query = Query::with_lists(request.uri.query(), &PARAMETERS, &["policy"])?;
    let about = |name: &str, complaint: &dyn std::fmt::Display| {
        Problem::bad(format!("parameter {name:?}: {complaint}"))
    };
    let policies = query.texts("policy")?;
    if policies.is_empty() || policies.len() > MAX_POLICIES {
        let expected = format!("expected 1 to {MAX_POLICIES}, such as `token_bucket 100/1m`");
        return Err(about("policy", &format!("found {}; {expected}", policies.len())));
    }
    let read = |text: &&str| spelling::parse(text).map_err(|error| about("policy", &error));
    let policies: Vec<Limit> = policies.iter().map(read).collect::<Result<_, _>>()?;
    let key = query.text("key")?.unwrap_or("ip").parse::<KeyFrom>();
    let format = query.text("format")?.map(str::parse::<Format>).transpose();
    let suggest = query.text("suggest")?.map(str::parse::<Share>).transpose();
    let peak = query.text("peak")?.map(spelling::window).transpose();
    let peak = peak.map_err(|error| about("peak", &error))?;
    let top = query.number("top")?.unwrap_or(TOP);
    if top > MAX_TOP {
        return Err(about("top", &format!("found {top}; expected at most {MAX_TOP}")));
    }
    Ok(Plan {
        wanted: Wanted {
            key: key.map_err(|error| about("key", &error))?,
            format: format.map_err(|error| about("format", &error))?,
            time: query.text("time")?.map(str::to_owned),
        },
        peak: peak.unwrap_or(policies[0].numbers().window),
        policies,
        suggest: suggest.map_err(|error| about("suggest", &error))?,
        top: usize::try_from(top).unwrap_or(usize::MAX),
    })
}

/// A body on its way in.
struct Sent {
    body: Incoming,
    max_bytes: u64,
    bytes: u64,
}

/// A piece of a body; its end, if there is none.
type Piece = Option<Bytes>;

impl Sent {
    /// Hands all of it on, until nobody wants any more.
    async fn hand_on(&mut self, pieces: mpsc::Sender<Piece>) -> Result<(), Problem> {
        loop {
            let piece = match tokio::time::timeout(IDLE, body::next(&mut self.body)).await {
                Ok(Ok(piece)) => piece,
                Ok(Err(error)) => {
                    return Err(Problem::bad(format!("the body cannot be read: {error}")));
                }
                Err(_) => {
                    let detail = format!("nothing of the body came for {} s", IDLE.as_secs());
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
        let detail = format!("the body has more than {} bytes", self.max_bytes);
        Problem::new(StatusCode::PAYLOAD_TOO_LARGE, detail)
    }
}

/// The same body where it is read.
struct Arriving {
    pieces: mpsc::Receiver<Piece>,
    here: Bytes,
    ended: bool,
}

impl Read for Arriving {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.here.is_empty() && !self.ended {
            match self.pieces.blocking_recv() {
                Some(Some(piece)) => self.here = piece,
                Some(None) => self.ended = true,
                None => return Err(ABANDONED.into()),
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
            BacktestError::Format(_) | BacktestError::Abandoned => StatusCode::BAD_REQUEST,
            BacktestError::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            BacktestError::Spool(_) => StatusCode::INSUFFICIENT_STORAGE,
            _ => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, error.to_string())
    }
}
