//! The HTTP surface: HTTP/1.1 and HTTP/2 on one port.
//!
//! | question | file |
//! |---|---|
//! | What is served where? | `routes.rs` |
//! | How is a body read, and what may it say? | `body.rs`, `list.rs`, `questions.rs` |
//! | How does a decision look? | `answer.rs` in JSON, `headers.rs` in header fields |
//! | How does a proxy ask? | `authorize.rs`, on `address.rs` |
//! | Who may ask, who may administer? | `roles.rs` |
//! | Does a page of another site send it? | `identity.rs` |
//! | What may only the operator do? | `admin.rs`, `overrides.rs`, `policies.rs` |
//! | What does a browser get? | `page.rs` |
//! | How is a scenario asked for? | `simulate.rs` |
//! | How is a log sent to be decided anew? | `backtest.rs` |
//! | How does a failure look? | `problem.rs` |
//! | What holds a reply until it is taken? | `sending.rs` |
//! | What may HTTP/2 clients make the server hold? | `http2.rs` |
//!
//! What is decided is decided by the gate. Every limit of the protocol is set here, none is left to a library's taste.

mod address;
mod admin;
mod answer;
mod authorize;
mod backtest;
mod body;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod headers;
mod http2;
mod identity;
mod list;
mod overrides;
mod page;
mod policies;
mod problem;
mod query;
mod questions;
mod roles;
mod routes;
mod sending;
mod simulate;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::service::service_fn;
use hyper::{Response, StatusCode, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use prometheus_client::metrics::histogram::Histogram;

use crate::config::Limits;
use crate::connection::{Connection, Stop};
use crate::holdings::{HeldBytes, Holder, SMALL_BYTES};
use crate::metrics::observe;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::traces::Trace;
use http2::CountedStream;
use problem::Problem;
use sending::{ForOperators, Reserved, Sending, Untaken};

const SURFACE: &str = "http";

/// How long HTTP/1 clients are still answered after the server was told to stop.
const FAREWELL: Duration = Duration::from_millis(500);
/// How often an HTTP/2 client is asked whether it is still there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(10);
/// How many requests an HTTP/2 client may take back before they are looked at, and how many may have to be refused
/// for mistakes in them, until its connection is ended.
const MAX_RESETS: usize = 32;
const MAX_MISTAKES: usize = 128;
/// How much of the bodies of an HTTP/2 connection, and of one of them, may come before it is read.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest frame of HTTP/2, which is the least that can be said.
const MAX_FRAME_BYTES: u32 = 16 * 1024;
/// What a request of HTTP/2 takes until its reply is taken, beside what is in them.
const STREAM_BYTES: usize = 8 * 1024;
/// The largest decoded head of HTTP/2 that is counted among those bytes.
const SMALL_HEAD_BYTES: usize = 4 * 1024;
/// How many requests of a connection are answered before other tasks have their turn: a pipeline brings hundreds at once.
const IN_A_TURN: usize = 32;
/// How many requests of an HTTP/2 connection are answered before other tasks have their turn. Each of them is a task of its own,
/// so that a hundred which come at once would otherwise be answered before the next request of another client.
const STREAMS_IN_A_TURN: usize = 8;
/// How much of a reply is handed to HTTP/2 ahead of its window.
const SEND_AHEAD: usize = 64 * 1024;

/// What is answered.
type Reply = Response<Bytes>;

/// What the requests of a connection share.
struct Caller {
    shared: Arc<Shared>,
    peer: Peer,
    holder: Holder,
    limits: Limits,
    latency: Histogram,
    has_asked: AtomicBool,
    /// Whether a request of the connection has presented a valid token.
    has_authenticated: AtomicBool,
    /// How many requests it has sent.
    requests: AtomicUsize,
    /// How many of its requests are being answered.
    in_flight: AtomicUsize,
    /// How many of its requests of HTTP/2 have come and wait for their turn.
    waiting: AtomicUsize,
    is_http2: AtomicBool,
    /// Whether there was no room for one of its requests: nothing more is read, and the connection ends.
    is_given_up: AtomicBool,
    /// Replies that are not taken yet, of HTTP/2.
    untaken: Arc<Untaken>,
}

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    mut stop: Stop,
) {
    let metrics = &shared.gate.metrics;
    let _open = metrics.count_connection(SURFACE);
    let latency = metrics.latency(SURFACE);
    let limits = shared.limits();
    let holder = shared.holder(peer);
    let caller = Arc::new(Caller {
        shared,
        peer,
        holder,
        limits,
        latency,
        has_asked: AtomicBool::new(false),
        has_authenticated: AtomicBool::new(false),
        requests: AtomicUsize::new(0),
        in_flight: AtomicUsize::new(0),
        waiting: AtomicUsize::new(0),
        is_http2: AtomicBool::new(false),
        is_given_up: AtomicBool::new(false),
        untaken: Arc::default(),
    });
    let answers = service_fn({
        let caller = caller.clone();
        move |request| {
            let waiting = Waiting::count(&caller);
            let request = caller.admit(request);
            serve(waiting, request)
        }
    });
    let protocol = protocol(&limits);
    let stream = CountedStream::new(stream, caller.clone());
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), answers));
    let mut stopped = pin!(farewell(&mut stop, &caller));
    // Which protocol it is to be is awaited without a deadline of its own.
    let mut begun = pin!(tokio::time::sleep(limits.head_timeout));
    let mut neglected = pin!(caller.untaken.neglected(limits.write_timeout));
    let needs_token = caller.shared.settings.load().tokens.guard_checks();
    let mut authenticated = pin!(tokio::time::sleep(limits.auth_timeout));
    let (mut is_stopping, mut has_begun, mut is_patient) = (false, false, needs_token);
    loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "a connection ended");
                }
                return;
            }
            () = &mut stopped, if !is_stopping => {
                is_stopping = true;
                connection.as_mut().graceful_shutdown();
            }
            () = &mut begun, if !has_begun => {
                has_begun = true;
                if !caller.has_asked.load(Ordering::Relaxed) {
                    return;
                }
            }
            () = &mut authenticated, if is_patient => {
                is_patient = false;
                if !caller.has_authenticated.load(Ordering::Relaxed) {
                    if caller.in_flight.load(Ordering::Relaxed) == 0 {
                        return;
                    }
                    connection.as_mut().graceful_shutdown();
                }
            }
            () = &mut neglected => {
                caller.give_up();
                return;
            }
        }
    }
}

/// Waits until it is time to end a connection. HTTP/2 tells its client which requests still count. HTTP/1 cannot: a
/// request may be on its way while the connection is closed. So its clients have a moment in which the next reply
/// tells them to go.
async fn farewell(stop: &mut Stop, caller: &Caller) {
    // Whoever could say so has gone: then it is time as well.
    let _ = stop.wait_for(|stop| *stop).await;
    if !caller.is_http2.load(Ordering::Relaxed) {
        tokio::time::sleep(FAREWELL).await;
    }
}

fn protocol(limits: &Limits) -> Builder<TokioExecutor> {
    let mut protocol = Builder::new(TokioExecutor::new());
    // The number of header fields stays at hyper's 100: to set it costs an allocation a request.
    protocol
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(usize::try_from(limits.max_head_bytes).unwrap_or(usize::MAX))
        // A head and its body are one write. Replies are not kept for those of later requests (`pipeline_flush`): hyper
        // then holds all that a pipeline asks for, and any reply as long as a part of a next request has come.
        .writev(false)
        .pipeline_flush(false);
    protocol
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(limits.max_http2_head_bytes)
        .max_concurrent_streams(limits.max_streams)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(MAX_MISTAKES)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .initial_stream_window_size(STREAM_WINDOW)
        .adaptive_window(false)
        .max_frame_size(MAX_FRAME_BYTES)
        .max_send_buf_size(SEND_AHEAD)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG);
    protocol
}

/// A request that was counted before its handler runs.
struct Admitted {
    request: hyper::Request<Incoming>,
    /// Of HTTP/2: the memory of the request until its reply is taken.
    stream: Option<HeldBytes>,
    /// The memory of the head, if it is large.
    head: Option<HeldBytes>,
}

/// Serves a request; `None` is one that there is no room for.
async fn serve(
    waiting: Waiting,
    admitted: Option<Admitted>,
) -> Result<Response<Sending>, Infallible> {
    let began = Instant::now();
    let caller = waiting.turn().await;
    caller.has_asked.store(true, Ordering::Relaxed);
    let Some(Admitted { request, stream, head }) = admitted else {
        return Ok(no_room().reply().map(|body| Sending::new(body, [None, None], None)));
    };
    if caller.requests.fetch_add(1, Ordering::Relaxed) % IN_A_TURN == IN_A_TURN - 1 {
        tokio::task::yield_now().await;
    }
    let is_http2 = request.version() == Version::HTTP_2;
    let _answering = Answering::count(&caller);
    let trace = Trace::of_request(&request, routes::template);
    let mut reply =
        trace.follow(routes::reply(&caller, request, head), |reply| Some(reply.status())).await;
    if !is_http2 && !caller.shared.is_ready.load(Ordering::Relaxed) {
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    observe(&caller.latency, began.elapsed());
    Ok(sending(&caller, reply, is_http2, stream))
}

/// A reply that is sent, or another one if there is no room for what is not taken yet. Of HTTP/2 its stream is held.
fn sending(
    caller: &Caller,
    mut reply: Reply,
    is_http2: bool,
    mut held: Option<HeldBytes>,
) -> Response<Sending> {
    let bytes = reply.body().len();
    let is_for_operators = ForOperators::of(&mut reply);
    let mut of_reserve = None;
    if let Some(reserved) = Reserved::of(&mut reply) {
        match &mut held {
            Some(held) => held.join(reserved),
            None => held = Some(reserved),
        }
    } else if bytes > SMALL_BYTES {
        if is_for_operators {
            of_reserve = caller.shared.hold_of_reserve(caller.holder, bytes);
        }
        let is_room = match &mut held {
            _ if of_reserve.is_some() => true,
            Some(held) => held.grow(bytes, &caller.limits),
            None => {
                held = caller.hold(bytes);
                held.is_some()
            }
        };
        if !is_room {
            return sending(caller, no_room().reply(), is_http2, held);
        }
    }
    let among = is_http2.then_some(&caller.untaken);
    reply.map(|body| Sending::new(body, [held, of_reserve], among))
}

/// Why a request is not answered that would make the server hold too much.
fn no_room() -> Problem {
    let detail = "the server holds as much as it may of what clients send and do not take; come again in a second";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "1")
}

impl Caller {
    /// Counts a request that the library hands on, before its handler is scheduled: thousands may be handed on at once.
    /// Returns `None` if there is no room for it.
    fn admit(&self, request: hyper::Request<Incoming>) -> Option<Admitted> {
        if request.version() != Version::HTTP_2 {
            return Some(Admitted { request, stream: None, head: None });
        }
        self.is_http2.store(true, Ordering::Relaxed);
        let held = self.hold(STREAM_BYTES).and_then(|stream| {
            let head = match http2::head_bytes(&request) {
                ..=SMALL_HEAD_BYTES => None,
                bytes => Some(self.hold(bytes)?),
            };
            Some((stream, head))
        });
        let Some((stream, head)) = held else {
            // Answering each of its requests with an error would take as much memory.
            self.give_up();
            return None;
        };
        Some(Admitted { request, stream: Some(stream), head })
    }

    /// Ends the connection.
    fn give_up(&self) {
        if !self.is_given_up.swap(true, Ordering::Relaxed) {
            self.shared.gate.metrics.connections_given_up.inc();
            self.untaken.give_up();
        }
    }

    /// Room for bytes that this client makes the server hold, if there is any.
    fn hold(&self, bytes: usize) -> Option<HeldBytes> {
        self.shared.hold(self.holder, bytes, &self.limits)
    }

    /// Room for a reply that is yet to be made; `None` if it needs none.
    fn reserve(&self, bytes: usize) -> Result<Option<Reserved>, Problem> {
        match bytes {
            ..=SMALL_BYTES => Ok(None),
            _ => self.hold(bytes).map(|held| Some(Reserved::new(held))).ok_or_else(no_room),
        }
    }
}

/// A request that is counted while it waits for its turn.
struct Waiting {
    caller: Arc<Caller>,
    /// How many requests of the connection waited when it came.
    before: usize,
}

impl Waiting {
    fn count(caller: &Arc<Caller>) -> Self {
        let before = caller.waiting.fetch_add(1, Ordering::Relaxed);
        Self { caller: caller.clone(), before }
    }

    /// Waits until it is its turn. Over HTTP/1 no request waits for another.
    async fn turn(self) -> Arc<Caller> {
        pass_turns(self.before).await;
        self.caller.clone()
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.caller.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets as many turns pass as the requests before need.
async fn pass_turns(before: usize) {
    for _ in 0..before / STREAMS_IN_A_TURN {
        tokio::task::yield_now().await;
    }
}

/// A request that is counted while it is being answered.
struct Answering<'a>(&'a AtomicUsize);

impl<'a> Answering<'a> {
    fn count(caller: &'a Caller) -> Self {
        caller.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(&caller.in_flight)
    }
}

impl Drop for Answering<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn j4_eight_of_a_hundred_streams_are_answered_per_turn() {
        let turns = (0..100).map(|before| crate::turn::count_polls(pass_turns(before)).1);
        let mut by_turn = std::collections::BTreeMap::new();
        turns.for_each(|turn| *by_turn.entry(turn).or_insert(0) += 1);
        assert!(by_turn.values().all(|streams| *streams <= 8), "{by_turn:?}");
        assert_eq!(by_turn.get(&1), Some(&8), "the first do not wait");
    }
}
