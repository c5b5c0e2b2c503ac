//! Measures the same axum service bare, with `tower_governor` and with `tallygate-tower`: requests per second and
//! latency, all in one process, in alternating rounds.
//!
//! One thread serves and another one sends, over kept connections on loopback. All limits are so wide that every
//! request is allowed (except in the rows "denied"). Both limiters find the client by the address of its connection and
//! send header fields with the remaining quota.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Empty};
use hyper::Request;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use tallygate::Policy;
use tallygate_tower::{Key, RateLimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;

const ROUNDS: usize = 9;
const ROUND: Duration = Duration::from_millis(800);
const CONNECTIONS: usize = 16;

fn main() {
    let (serving, sending) = (runtime(), runtime());
    // The runtimes have one thread each, which runs only while it is blocked on.
    let services = services();
    let addresses: Vec<_> = serving.block_on(async {
        let mut addresses = Vec::new();
        for (_, _, app) in &services {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            addresses.push(listener.local_addr().expect("an address"));
            let service = app.clone().into_make_service_with_connect_info::<SocketAddr>();
            tokio::spawn(async move { axum::serve(listener, service).await });
        }
        addresses
    });
    std::thread::spawn(move || serving.block_on(std::future::pending::<()>()));

    let mut best: Vec<Option<Round>> = services.iter().map(|_| None).collect();
    for _ in 0..ROUNDS {
        for (index, address) in addresses.iter().enumerate() {
            let round = sending.block_on(measure(*address, services[index].1));
            if best[index].as_ref().is_none_or(|best| round.rate > best.rate) {
                best[index] = Some(round);
            }
        }
    }
    println!("{CONNECTIONS} connections, best of {ROUNDS} rounds of {ROUND:?}");
    println!(
        "{:<24} {:>10} {:>9} {:>9} {:>9} {:>14} {:>7}",
        "service", "requests/s", "p50", "p99", "p99.9", "ns per request", "fields"
    );
    for ((name, _, _), best) in services.iter().zip(best) {
        let Some(Round { rate, mut times, fields }) = best else { continue };
        times.sort_unstable();
        let at =
            |share: usize| format!("{} µs", times[(times.len() - 1) * share / 1000].as_micros());
        let (p50, p99, p999) = (at(500), at(990), at(999));
        let each = 1_000_000_000 / rate;
        println!("{name:<24} {rate:>10} {p50:>9} {p99:>9} {p999:>9} {each:>14} {fields:>7}");
    }
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

/// The services by name, with the status that each answers with.
fn services() -> Vec<(&'static str, u16, Router)> {
    let bare = Router::new().route("/", get(|| async { "hello" }));
    let ours = |burst| {
        let policy = Policy::gcra(1000).per_second().burst(burst).named("api").build();
        RateLimit::new(policy.expect("a policy"), Key::peer())
    };
    let hour = |burst| {
        let policy = Policy::gcra(1).per_hour().burst(burst).named("api").build();
        RateLimit::new(policy.expect("a policy"), Key::peer())
    };
    let governor = |period: Duration, burst| {
        let mut config = GovernorConfigBuilder::default();
        let config = config.period(period).burst_size(burst).use_headers().finish();
        GovernorLayer::new(Arc::new(config.expect("a configuration")))
    };
    let (millisecond, an_hour) = (Duration::from_millis(1), Duration::from_secs(3600));
    vec![
        ("bare", 200, bare.clone()),
        ("tower_governor", 200, bare.clone().layer(governor(millisecond, u32::MAX))),
        ("tallygate-tower", 200, bare.clone().layer(ours(u32::MAX.into()))),
        ("tower_governor denied", 429, bare.clone().layer(governor(an_hour, 1))),
        ("tallygate-tower denied", 429, bare.layer(hour(1))),
    ]
}

struct Round {
    rate: u64,
    times: Vec<Duration>,
    /// The number of header fields about the quota.
    fields: usize,
}

/// Sends requests over all connections for a round.
async fn measure(server: SocketAddr, status: u16) -> Round {
    let connecting = (0..CONNECTIONS).map(|_| connect(server));
    let mut connections = join_all(connecting).await;
    // Uses up a quota of 1.
    for connection in &mut connections {
        send(connection).await;
    }
    let started = Instant::now();
    let sent = connections.into_iter().map(|mut connection| async move {
        let (mut times, mut fields) = (Vec::new(), 0);
        while started.elapsed() < ROUND {
            let before = Instant::now();
            let (found, shown) = send(&mut connection).await;
            times.push(before.elapsed());
            assert_eq!(found, status);
            fields = shown;
        }
        (times, fields)
    });
    let sent = join_all(sent).await;
    let elapsed = started.elapsed();
    let fields = sent[0].1;
    let times: Vec<_> = sent.into_iter().flat_map(|(times, _)| times).collect();
    let rate = times.len() as u128 * 1_000_000_000 / elapsed.as_nanos();
    Round { rate: u64::try_from(rate).expect("a rate"), times, fields }
}

async fn connect(server: SocketAddr) -> SendRequest<Empty<Bytes>> {
    let stream = TcpStream::connect(server).await.expect("a connection");
    stream.set_nodelay(true).expect("an option");
    let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

/// Sends a request, and returns the status and the number of header fields about the quota.
async fn send(connection: &mut SendRequest<Empty<Bytes>>) -> (u16, usize) {
    connection.ready().await.expect("a connection that is ready");
    let request = Request::get("/").header("host", "localhost").body(Empty::new());
    let response = connection.send_request(request.expect("a request")).await.expect("a response");
    let status = response.status().as_u16();
    let names = response.headers().keys().map(|name| name.as_str());
    let fields = names.filter(|name| name.contains("ratelimit") || *name == "retry-after").count();
    response.into_body().collect().await.expect("a body");
    (status, fields)
}
