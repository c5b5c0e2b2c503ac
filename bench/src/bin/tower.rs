//! Measures the same axum service bare, with `tower_governor` and with `tallygate-tower`, all in one process: the time
//! of a call, and requests per second and latency over loopback.
//!
//! All limits are so wide that every request is allowed (except in the rows "denied"). Both limiters find the client by
//! the address of its connection. They are measured without header fields, with two fields each, and with all fields.
//! "empty layer" does nothing: it shows what axum itself takes for a layer.
//!
//! The services take turns in short rounds, and another one begins each round, so that other load on the machine affects
//! all of them equally. The figures are medians over the rounds. "adds" is the median of the differences to the bare
//! service in the same round, with the quartiles of the differences: if they are far apart, the median is noise.
//!
//! Arguments are the names of services to measure beside the bare one.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use bytes::Bytes;
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tallygate::Policy;
use tallygate::headers::Dialect;
use tallygate_bench::rounds::per_decision;
use tallygate_tower::{Key, RateLimit};
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_layer::Identity;
use tower_service::Service as _;

/// The rounds, as many as `BENCH_ROUNDS` says.
const ROUNDS: usize = 40;
const ROUND_OF_CALLS: Duration = Duration::from_millis(30);
const ROUND_OF_REQUESTS: Duration = Duration::from_millis(200);
const CONNECTIONS: usize = 16;

fn main() {
    let given = std::env::var("BENCH_ROUNDS").ok().and_then(|rounds| rounds.parse().ok());
    let rounds = given.unwrap_or(ROUNDS).max(1);
    let only: Vec<_> = std::env::args().skip(1).collect();
    let mut services = services();
    services.retain(|service| {
        only.is_empty() || service.name == "bare" || only.iter().any(|name| name == service.name)
    });
    println!("calls of the service in one thread, {rounds} rounds of {ROUND_OF_CALLS:?}");
    println!("{:<28} {:>8} {:>20} {:>7}", "service", "ns", "adds (quartiles)", "fields");
    let calls = in_turns(rounds, services.len(), |index| call(&services[index]));
    for (index, service) in services.iter().enumerate() {
        let ns = |round: &Call| round.ns;
        let (each, adds) = (median(&calls[index], ns), differences(&calls, index, ns));
        let fields = calls[index][0].fields;
        println!("{:<28} {each:>8.0} {:>20} {fields:>7}", service.name, in_quartiles(adds, 0));
    }

    let (serving, sending) = (runtime(), runtime());
    // The runtimes have one thread each, which runs only while it is blocked on.
    let addresses: Vec<_> = serving.block_on(async {
        let mut addresses = Vec::new();
        for service in &services {
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
            addresses.push(listener.local_addr().expect("an address"));
            let app = service.app.clone().into_make_service_with_connect_info::<SocketAddr>();
            tokio::spawn(async move { axum::serve(listener, app).await });
        }
        addresses
    });
    std::thread::spawn(move || serving.block_on(std::future::pending::<()>()));
    println!(
        "\n{CONNECTIONS} connections over loopback, {rounds} rounds of {ROUND_OF_REQUESTS:?}, µs"
    );
    println!(
        "{:<28} {:>10} {:>7} {:>20} {:>7} {:>20} {:>9}",
        "service", "requests/s", "p50", "adds (quartiles)", "p99", "adds (quartiles)", "p99.9"
    );
    let sent = in_turns(rounds, services.len(), |index| {
        sending.block_on(measure(addresses[index], services[index].status))
    });
    for (index, service) in services.iter().enumerate() {
        let of = |part: fn(&Requests) -> f64| {
            (median(&sent[index], part), differences(&sent, index, part))
        };
        let (rate, _) = of(|round| round.rate);
        let ((p50, p50_adds), (p99, p99_adds)) = (of(|round| round.p50), of(|round| round.p99));
        let (p999, _) = of(|round| round.p999);
        println!(
            "{:<28} {rate:>10.0} {p50:>7.1} {:>20} {p99:>7.1} {:>20} {p999:>9.1}",
            service.name,
            in_quartiles(p50_adds, 1),
            in_quartiles(p99_adds, 1),
        );
    }
}

/// Lets all services take turns, and returns the rounds of each.
fn in_turns<T>(rounds: usize, services: usize, mut turn: impl FnMut(usize) -> T) -> Vec<Vec<T>> {
    let mut all: Vec<Vec<T>> = (0..services).map(|_| Vec::with_capacity(rounds)).collect();
    for round in 0..rounds {
        for step in 0..services {
            let index = (round + step) % services;
            all[index].push(turn(index));
        }
    }
    all
}

fn median<T>(rounds: &[T], part: impl Fn(&T) -> f64) -> f64 {
    quartiles(rounds.iter().map(part).collect())[1]
}

/// Returns the quartiles of the differences to the bare service in the same round.
fn differences<T>(all: &[Vec<T>], index: usize, part: impl Fn(&T) -> f64) -> Option<[f64; 3]> {
    let pairs = all[index].iter().zip(&all[0]);
    (index > 0).then(|| quartiles(pairs.map(|(round, bare)| part(round) - part(bare)).collect()))
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

fn in_quartiles(values: Option<[f64; 3]>, digits: usize) -> String {
    values.map_or(String::new(), |[low, middle, high]| {
        format!("{middle:.digits$} ({low:.digits$} to {high:.digits$})")
    })
}

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().expect("a runtime")
}

struct Service {
    name: &'static str,
    /// The status of all responses but the first.
    status: u16,
    app: Router,
}

fn services() -> Vec<Service> {
    let bare = Router::new().route("/", get(|| async { "hello" }));
    let ours = |policy: Policy, dialects: &[Dialect]| {
        let limit = RateLimit::new(policy, Key::peer());
        bare.clone().layer(limit.headers(dialects.iter().copied()))
    };
    let wide = || {
        let policy = Policy::gcra(1000).per_second().burst(u32::MAX.into()).named("api").build();
        policy.expect("a policy")
    };
    let narrow = Policy::gcra(1).per_hour().burst(1).named("api").build().expect("a policy");
    let governor = |period: Duration, burst| {
        let mut config = GovernorConfigBuilder::default();
        config.period(period).burst_size(burst);
        config
    };
    let governed = |period, burst| {
        let config = governor(period, burst).use_headers().finish().expect("a configuration");
        bare.clone().layer(GovernorLayer::new(Arc::new(config)))
    };
    let (millisecond, hour) = (Duration::from_millis(1), Duration::from_secs(3600));
    let without_fields = governor(millisecond, u32::MAX).finish().expect("a configuration");
    let without_fields = bare.clone().layer(GovernorLayer::new(Arc::new(without_fields)));
    [
        ("bare", 200, bare.clone()),
        ("empty layer", 200, bare.clone().layer(Identity::new())),
        ("tower_governor, no fields", 200, without_fields),
        ("tallygate-tower, no fields", 200, ours(wide(), &[])),
        ("tower_governor", 200, governed(millisecond, u32::MAX)),
        ("tallygate-tower, Draft10", 200, ours(wide(), &[Dialect::Draft10])),
        ("tallygate-tower, X", 200, ours(wide(), &[Dialect::X])),
        ("tallygate-tower", 200, ours(wide(), &Dialect::ALL)),
        ("tower_governor denied", 429, governed(hour, 1)),
        ("tallygate-tower denied", 429, ours(narrow, &Dialect::ALL)),
    ]
    .map(|(name, status, app)| Service { name, status, app })
    .into()
}

/// A round of calls.
struct Call {
    ns: f64,
    /// The number of header fields about the quota.
    fields: usize,
}

/// Calls a service directly for a round.
fn call(service: &Service) -> Call {
    let mut app = service.app.clone();
    let mut call = || {
        let mut request = Request::new(Body::empty());
        let peer = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 1234));
        request.extensions_mut().insert(ConnectInfo(peer));
        app.call(request).now_or_never().expect("no store to wait for").expect("a response")
    };
    // Uses up a quota of 1.
    call();
    let (started, mut calls) = (Instant::now(), 0);
    let response = loop {
        let response = call();
        calls += 1;
        if started.elapsed() >= ROUND_OF_CALLS {
            break response;
        }
    };
    let ns = per_decision(started.elapsed(), calls);
    assert_eq!(response.status().as_u16(), service.status);
    Call { ns, fields: quota_fields(&response) }
}

/// A round of requests; times in microseconds.
struct Requests {
    rate: f64,
    p50: f64,
    p99: f64,
    p999: f64,
}

/// Sends requests over all connections for a round.
async fn measure(server: SocketAddr, status: u16) -> Requests {
    let connecting = (0..CONNECTIONS).map(|_| connect(server));
    let mut connections = join_all(connecting).await;
    // Uses up a quota of 1.
    for connection in &mut connections {
        send(connection).await;
    }
    let started = Instant::now();
    let sent = connections.into_iter().map(|mut connection| async move {
        let mut times = Vec::new();
        while started.elapsed() < ROUND_OF_REQUESTS {
            let before = Instant::now();
            let found = send(&mut connection).await;
            times.push(before.elapsed());
            assert_eq!(found, status);
        }
        times
    });
    let sent = join_all(sent).await;
    let elapsed = started.elapsed();
    let mut times: Vec<_> = sent.into_iter().flatten().collect();
    times.sort_unstable();
    let at = |share: usize| times[(times.len() - 1) * share / 1000].as_secs_f64() * 1e6;
    let rate = times.len() as f64 / elapsed.as_secs_f64();
    Requests { rate, p50: at(500), p99: at(990), p999: at(999) }
}

async fn connect(server: SocketAddr) -> SendRequest<Empty<Bytes>> {
    let stream = TcpStream::connect(server).await.expect("a connection");
    stream.set_nodelay(true).expect("an option");
    let (sender, connection) = handshake(TokioIo::new(stream)).await.expect("a handshake");
    tokio::spawn(connection);
    sender
}

/// Sends a request, and returns the status.
async fn send(connection: &mut SendRequest<Empty<Bytes>>) -> u16 {
    connection.ready().await.expect("a connection that is ready");
    let request = Request::get("/").header("host", "localhost").body(Empty::new());
    let response = connection.send_request(request.expect("a request")).await.expect("a response");
    let status = response.status().as_u16();
    response.into_body().collect().await.expect("a body");
    status
}

/// Returns the number of header fields about the quota.
fn quota_fields<B>(response: &Response<B>) -> usize {
    let names = response.headers().keys().map(|name| name.as_str());
    names.filter(|name| name.contains("ratelimit") || *name == "retry-after").count()
}
