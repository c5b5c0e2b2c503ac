//! The HTTP surface: HTTP/1.1 and HTTP/2 on one port.
//!
//! | question | file |
//! |---|---|
//! | What is served where? | `routes.rs` |
//! | How is a body read, and what may it say? | `body.rs`, `list.rs`, `operations.rs` |
//! | How does a decision look? | `answer.rs` in JSON, `headers.rs` in header fields |
//! | How does a proxy check a request? | `authorize.rs`, on `address.rs` |
//! | Who may check, and who may administer? | `roles.rs` |
//! | Which requests of other sites are rejected? | `identity.rs` |
//! | What may only the operator do? | `admin.rs`, `overrides.rs`, `policies.rs` |
//! | What does a browser get? | `page.rs` |
//! | How is a simulation requested? | `simulate.rs` |
//! | How is a log sent to a backtest? | `backtest.rs` |
//! | How does a failure look? | `problem.rs` |
//! | How is a reply counted until the client has read it? | `sending.rs` |
//! | How much memory may HTTP/2 clients use? | `http2.rs` |
//! | How does Envoy's rate limit service look over HTTP? | `envoy.rs` |
//!
//! gRPC has the same connections and limits, and other routes: see [`Service`]. The gate makes all decisions. Every limit of the protocol is set here; none is a default of a library.

mod address;
mod admin;
mod answer;
mod authorize;
mod backtest;
mod body;
mod envoy;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod headers;
mod http2;
mod identity;
mod list;
mod operations;
mod overrides;
mod page;
mod policies;
mod problem;
mod query;
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

use crate::client_budgets::{BudgetOwner, HeldBytes, SMALL_BYTES};
use crate::config::Limits;
use crate::connection::{Connection, Stop};
use crate::metrics::Latency;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::traces::Trace;
use http2::CountedStream;
use sending::{OperatorReply, ReplyBody, ReservedBytes, UnreadReplies};

pub(crate) use body::read as read_body;
pub(crate) use envoy::decide_for_envoy;
pub(crate) use problem::Problem;
pub(crate) use roles::authorize as authorize_caller;
pub(crate) use sending::Content;

/// What a listener serves over HTTP.
pub(crate) trait Service: Send + Sync + 'static {
    /// The name in logs and metrics.
    const SURFACE: &'static str;
    /// Whether only HTTP/2 is served.
    const IS_HTTP2_ONLY: bool;

    /// Returns the template of a path for traces; `None` if there is no such route.
    fn template(path: &str) -> Option<&str>;

    /// Answers a request. `head` is the counted memory of its head, and is dropped with it.
    fn reply(
        caller: &Caller,
        request: hyper::Request<Incoming>,
        head: Option<HeldBytes>,
    ) -> impl Future<Output = Response<Content>> + Send;
}

/// The routes of the HTTP listener.
struct HttpRoutes;

impl Service for HttpRoutes {
    const SURFACE: &'static str = "http";
    const IS_HTTP2_ONLY: bool = false;

    fn template(path: &str) -> Option<&str> {
        routes::template(path)
    }

    async fn reply(
        caller: &Caller,
        request: hyper::Request<Incoming>,
        head: Option<HeldBytes>,
    ) -> Response<Content> {
        routes::reply(caller, request, head).await.map(Content::from)
    }
}

/// How long HTTP/1 connections stay open after the shutdown begins.
const FAREWELL: Duration = Duration::from_millis(500);
/// The interval of HTTP/2 pings, and how long a client may take to answer one.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(10);
/// How many requests of an HTTP/2 connection may be reset before they are handled, and how many may be rejected as
/// invalid, until the connection is closed.
const MAX_RESETS: usize = 32;
const MAX_MISTAKES: usize = 128;
/// The flow-control windows of an HTTP/2 connection and of one stream.
const CONNECTION_WINDOW: u32 = 1024 * 1024;
const STREAM_WINDOW: u32 = 256 * 1024;
/// The largest frame of HTTP/2: the smallest value that the protocol allows.
const MAX_FRAME_BYTES: u32 = 16 * 1024;
/// The memory of an HTTP/2 request until its reply is read, in addition to its contents.
const STREAM_BYTES: usize = 8 * 1024;
/// The largest decoded head that these bytes cover.
const SMALL_HEAD_BYTES: usize = 4 * 1024;
/// How many requests of a connection are answered before other tasks run: a pipeline sends hundreds at once.
const IN_A_TURN: usize = 32;
/// How many requests of an HTTP/2 connection are answered before other tasks run. Each request is a separate task, so a
/// hundred of them would otherwise delay the next request of another client.
const STREAMS_IN_A_TURN: usize = 8;
/// How much of a reply is buffered ahead of the HTTP/2 window.
const SEND_AHEAD: usize = 64 * 1024;

/// A reply with its whole body.
pub(crate) type Reply = Response<Bytes>;

/// The state that the requests of a connection share.
pub(crate) struct Caller {
    pub(crate) shared: Arc<Shared>,
    /// Becomes true when the server shuts down.
    pub(crate) stop: Stop,
    /// The name of the listener in metrics.
    surface: &'static str,
    peer: Peer,
    holder: BudgetOwner,
    pub(crate) limits: Limits,
    latency: Arc<Latency>,
    has_asked: AtomicBool,
    /// Whether a request of the connection has presented a valid token.
    has_authenticated: AtomicBool,
    /// The number of requests received.
    requests: AtomicUsize,
    /// The number of requests being answered.
    in_flight: AtomicUsize,
    /// The number of HTTP/2 requests that wait to be answered.
    waiting: AtomicUsize,
    is_http2: AtomicBool,
    /// Whether the connection is being aborted, because a request did not fit into the buffers. No more is read.
    is_aborted: AtomicBool,
    /// HTTP/2 replies that the client has not read yet.
    unread: Arc<UnreadReplies>,
}

/// Serves a connection of the HTTP listener until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    stop: Stop,
) {
    serve_routes::<HttpRoutes>(shared, stream, peer, stop).await;
}

/// Serves a connection until either end closes it.
pub(crate) async fn serve_routes<S: Service>(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    mut stop: Stop,
) {
    let metrics = &shared.gate.metrics;
    let _open = metrics.count_connection(S::SURFACE);
    let latency = metrics.latency(S::SURFACE);
    let limits = shared.limits();
    let holder = shared.holder(peer);
    let caller = Arc::new(Caller {
        shared,
        stop: stop.clone(),
        surface: S::SURFACE,
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
        is_aborted: AtomicBool::new(false),
        unread: Arc::default(),
    });
    let answers = service_fn({
        let caller = caller.clone();
        move |request| {
            let waiting = QueuedRequest::count(&caller);
            let request = caller.accept(request);
            serve::<S>(waiting, request)
        }
    });
    let protocol = protocol::<S>(&limits);
    let stream = CountedStream::new(stream, caller.clone());
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), answers));
    let mut stopped = pin!(wait_for_shutdown(&mut stop, &caller));
    // hyper has no deadline for detecting the protocol.
    let mut begun = pin!(tokio::time::sleep(limits.head_timeout));
    let mut wait_for_timeout = pin!(caller.unread.wait_for_timeout(limits.write_timeout));
    let needs_token = caller.shared.settings.load().tokens.checks_need_token();
    let mut authenticated = pin!(tokio::time::sleep(limits.auth_timeout));
    let (mut is_stopping, mut has_begun, mut is_patient) = (false, false, needs_token);
    loop {
        tokio::select! {
            biased;
            ended = connection.as_mut() => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "HTTP connection failed; closing it");
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
            () = &mut wait_for_timeout => {
                caller.abort();
                return;
            }
        }
    }
}

/// Waits until a connection should be closed. HTTP/2 reports which requests were processed. HTTP/1 cannot: a request
/// may arrive while the connection is being closed. So HTTP/1 clients have a moment in which the next reply says
/// `Connection: close`.
async fn wait_for_shutdown(stop: &mut Stop, caller: &Caller) {
    // If the sender is gone, shut down as well.
    let _ = stop.wait_for(|stop| *stop).await;
    if !caller.is_http2.load(Ordering::Relaxed) {
        tokio::time::sleep(FAREWELL).await;
    }
}

fn protocol<S: Service>(limits: &Limits) -> Builder<TokioExecutor> {
    let mut protocol = Builder::new(TokioExecutor::new());
    if S::IS_HTTP2_ONLY {
        protocol = protocol.http2_only();
    }
    // The number of header fields stays at hyper's 100: setting it costs an allocation per request.
    protocol
        .http1()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_timeout)
        .max_buf_size(usize::try_from(limits.max_head_bytes).unwrap_or(usize::MAX))
        // A head and its body are one write. Replies are not collected for a whole pipeline (`pipeline_flush`): hyper
        // would then buffer all replies of a pipeline, and any reply while part of the next request has arrived.
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

/// A request whose memory was counted before its handler runs.
struct AcceptedRequest {
    request: hyper::Request<Incoming>,
    /// For HTTP/2: the memory of the request until its reply is read.
    stream: Option<HeldBytes>,
    /// The memory of the head, if it is large.
    head: Option<HeldBytes>,
}

/// Serves a request; `None` is a request that does not fit into the buffers.
async fn serve<S: Service>(
    waiting: QueuedRequest,
    accepted: Option<AcceptedRequest>,
) -> Result<Response<ReplyBody>, Infallible> {
    let began = Instant::now();
    let caller = waiting.turn().await;
    caller.has_asked.store(true, Ordering::Relaxed);
    let Some(AcceptedRequest { request, stream, head }) = accepted else {
        return Ok(buffers_full()
            .reply()
            .map(|body| ReplyBody::new(body.into(), [None, None], None)));
    };
    if caller.requests.fetch_add(1, Ordering::Relaxed) % IN_A_TURN == IN_A_TURN - 1 {
        tokio::task::yield_now().await;
    }
    let is_http2 = request.version() == Version::HTTP_2;
    let _answering = InFlight::count(&caller);
    let trace = Trace::of_request(&request, S::template);
    let mut reply =
        trace.follow(S::reply(&caller, request, head), |reply| Some(reply.status())).await;
    if !is_http2 && !caller.shared.is_ready.load(Ordering::Relaxed) {
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    caller.latency.observe(began.elapsed());
    Ok(sending(&caller, reply, is_http2, stream))
}

/// Counts the memory of a reply until the client has read it. Replies with an error instead if it does not fit into the
/// buffers.
fn sending(
    caller: &Caller,
    mut reply: Response<Content>,
    is_http2: bool,
    mut held: Option<HeldBytes>,
) -> Response<ReplyBody> {
    let bytes = reply.body().held_bytes();
    let is_for_operators = OperatorReply::of(reply.extensions_mut());
    let mut of_reserve = None;
    if let Some(reserved) = ReservedBytes::of(reply.extensions_mut()) {
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
            return sending(caller, buffers_full().reply().map(Content::from), is_http2, held);
        }
    }
    let among = is_http2.then_some(&caller.unread);
    reply.map(|content| ReplyBody::new(content, [held, of_reserve], among))
}

/// Reserves memory of a client for a reply; `None` if it is small.
fn reserve(
    shared: &Shared,
    holder: BudgetOwner,
    bytes: usize,
    limits: &Limits,
) -> Result<Option<ReservedBytes>, Problem> {
    match bytes {
        ..=SMALL_BYTES => Ok(None),
        _ => {
            let held = shared.hold(holder, bytes, limits);
            held.map(|held| Some(ReservedBytes::new(held))).ok_or_else(buffers_full)
        }
    }
}

/// Returns the error for a request that does not fit into the buffers.
fn buffers_full() -> Problem {
    let detail = "the request and response buffers are full; retry in 1 s";
    Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).with(header::RETRY_AFTER, "1")
}

impl Caller {
    /// Counts the memory of a request before its handler is scheduled: hyper may deliver thousands at once. Returns
    /// `None` if it does not fit into the buffers.
    fn accept(&self, request: hyper::Request<Incoming>) -> Option<AcceptedRequest> {
        if request.version() != Version::HTTP_2 {
            return Some(AcceptedRequest { request, stream: None, head: None });
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
            // Answering each request with an error would take as much memory.
            self.abort();
            return None;
        };
        Some(AcceptedRequest { request, stream: Some(stream), head })
    }

    /// Aborts the connection.
    fn abort(&self) {
        if !self.is_aborted.swap(true, Ordering::Relaxed) {
            self.shared.gate.metrics.connections_aborted.inc();
            self.unread.abort();
        }
    }

    /// Counts buffered bytes of this client, if the limits allow it.
    fn hold(&self, bytes: usize) -> Option<HeldBytes> {
        self.shared.hold(self.holder, bytes, &self.limits)
    }

    /// Reserves memory for a reply; `None` if it is small.
    fn reserve(&self, bytes: usize) -> Result<Option<ReservedBytes>, Problem> {
        reserve(&self.shared, self.holder, bytes, &self.limits)
    }

    /// Returns a function that reserves memory for the report of a simulation, on another thread. A report that could
    /// never fit is an error of the client.
    fn reserve_for_report(&self) -> impl simulate::Reserve + use<> {
        let (shared, holder, limits) = (self.shared.clone(), self.holder, self.limits);
        move |bytes| {
            // Over HTTP/2, the request itself is counted as well.
            let most = holder.share(&limits).saturating_sub(STREAM_BYTES);
            if bytes > most {
                let share = match limits.max_buffer_bytes / holder.share(&limits).max(1) {
                    1 => "`max_buffer_bytes`".to_owned(),
                    parts => format!("1/{parts} of `max_buffer_bytes`"),
                };
                return Err(Problem::bad(format!(
                    "the reply would have {bytes} bytes, more than the {most} bytes that one client may use ({share}); use fewer \
                     `algorithms`, a lower `rate_per_minute` or a shorter `duration_ms`"
                )));
            }
            reserve(&shared, holder, bytes, &limits)
        }
    }
}

/// A request that is counted while it waits to be answered.
struct QueuedRequest {
    caller: Arc<Caller>,
    /// How many requests of the connection waited when it arrived.
    before: usize,
}

impl QueuedRequest {
    fn count(caller: &Arc<Caller>) -> Self {
        let before = caller.waiting.fetch_add(1, Ordering::Relaxed);
        Self { caller: caller.clone(), before }
    }

    /// Waits until the request can be answered. HTTP/1 requests do not wait.
    async fn turn(self) -> Arc<Caller> {
        yield_turns(self.before).await;
        self.caller.clone()
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        self.caller.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Yields once per group of requests before this one.
async fn yield_turns(before: usize) {
    for _ in 0..before / STREAMS_IN_A_TURN {
        tokio::task::yield_now().await;
    }
}

/// A request that is counted while it is being answered.
struct InFlight<'a>(&'a AtomicUsize);

impl<'a> InFlight<'a> {
    fn count(caller: &'a Caller) -> Self {
        caller.in_flight.fetch_add(1, Ordering::Relaxed);
        Self(&caller.in_flight)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault J4.
    #[test]
    fn eight_of_a_hundred_streams_are_answered_per_turn() {
        let turns = (0..100).map(|before| crate::turn::count_polls(yield_turns(before)).1);
        let mut by_turn = std::collections::BTreeMap::new();
        turns.for_each(|turn| *by_turn.entry(turn).or_insert(0) += 1);
        assert!(by_turn.values().all(|streams| *streams <= 8), "{by_turn:?}");
        assert_eq!(by_turn.get(&1), Some(&8), "the first do not wait");
    }
}
