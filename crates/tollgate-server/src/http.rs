//! The HTTP surface: HTTP/1.1 and HTTP/2 on one port.
//!
//! | question | file |
//! |---|---|
//! | What is served where? | `routes.rs` |
//! | How is a body read, and what may it say? | `body.rs`, `questions.rs` |
//! | How does a decision look? | `answer.rs` in JSON, `headers.rs` in header fields |
//! | How does a proxy ask? | `authorize.rs`, on `address.rs` |
//! | Who may ask, who may administer? | `roles.rs` |
//! | What may only the operator do? | `admin.rs`, `overrides.rs`, `policies.rs` |
//! | What does a browser get? | `page.rs` |
//! | How is a scenario asked for? | `simulate.rs` |
//! | How is a log sent to be decided anew? | `backtest.rs` |
//! | How does a failure look? | `problem.rs` |
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
mod overrides;
mod page;
mod policies;
mod problem;
mod query;
mod questions;
mod roles;
mod routes;
mod simulate;

pub(crate) use address::{key as address_key, parsed as parsed_address};
pub(crate) use backtest::places as backtest_places;

use std::convert::Infallible;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::service::service_fn;
use hyper::{Response, Version};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto::Builder;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;

use crate::config::Limits;
use crate::metrics::{SurfaceLabels, observe};
use crate::server::{Connection, Peer, Shared, Stop};
use crate::traces::Trace;

const SURFACE: &str = "http";

/// How long HTTP/1 clients are still answered after the server was told to stop.
const FAREWELL: Duration = Duration::from_millis(500);
/// How often an HTTP/2 client is asked whether it is still there, and how long it may take to say so.
const PING_EVERY: Duration = Duration::from_secs(30);
const PONG: Duration = Duration::from_secs(10);
/// How many requests an HTTP/2 client may take back before they are looked at.
const MAX_RESETS: usize = 32;

/// What is answered.
type Reply = Response<Full<Bytes>>;

/// What the requests of a connection share.
struct Caller {
    shared: Arc<Shared>,
    peer: Peer,
    limits: Limits,
    latency: Histogram,
    has_asked: AtomicBool,
    is_http2: AtomicBool,
}

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    mut stop: Stop,
) {
    let metrics = &shared.gate.metrics;
    let connections = metrics.connections.get_or_create_owned(&SurfaceLabels { surface: SURFACE });
    let _open = Open::count(connections);
    let latency = metrics.latency(SURFACE);
    let limits = shared.limits();
    let caller = Arc::new(Caller {
        shared,
        peer,
        limits,
        latency,
        has_asked: AtomicBool::new(false),
        is_http2: AtomicBool::new(false),
    });
    let answers = service_fn({
        let caller = caller.clone();
        move |request| serve(caller.clone(), request)
    });
    let protocol = protocol(&limits);
    let mut connection = pin!(protocol.serve_connection(TokioIo::new(stream), answers));
    let mut stopped = pin!(farewell(&mut stop, &caller));
    // Which protocol it is to be is awaited without a deadline of its own.
    let mut begun = pin!(tokio::time::sleep(limits.head_timeout));
    let (mut is_stopping, mut has_begun) = (false, false);
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
        .pipeline_flush(true);
    protocol
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(limits.max_head_bytes)
        .max_concurrent_streams(limits.max_streams)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .keep_alive_interval(PING_EVERY)
        .keep_alive_timeout(PONG);
    protocol
}

async fn serve(
    caller: Arc<Caller>,
    request: hyper::Request<Incoming>,
) -> Result<Reply, Infallible> {
    let began = Instant::now();
    caller.has_asked.store(true, Ordering::Relaxed);
    let is_http2 = request.version() == Version::HTTP_2;
    if is_http2 {
        caller.is_http2.store(true, Ordering::Relaxed);
    }
    let trace = Trace::of_request(&request, routes::template);
    let mut reply =
        trace.follow(routes::reply(&caller, request), |reply| Some(reply.status())).await;
    if !is_http2 && !caller.shared.is_ready.load(Ordering::Relaxed) {
        reply.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    observe(&caller.latency, began.elapsed());
    Ok(reply)
}

/// A connection that is counted while it is open.
struct Open(Gauge);

impl Open {
    fn count(gauge: Gauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}
