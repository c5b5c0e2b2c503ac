//! A load generator for `scripts/bench envoy`: calls a gRPC service, or sends requests over HTTP/1.1.
//!
//!     grpc_load grpc ADDRESS tallygate|throttlecrab CONNECTIONS STREAMS SECONDS
//!     grpc_load http ADDRESS PATH REQUESTS
//!
//! Prints calls per second, and the median and the 99th percentile of the latency in microseconds. It fails if a call fails
//! or is denied.
#![allow(
    clippy::print_stdout,
    clippy::unwrap_used,
    clippy::panic,
    reason = "a tool for benchmarks"
)]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use hyper::Request;

const KEYS: u64 = 100_000;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (rate, latencies) = match arguments[..] {
        ["grpc", address, service, connections, streams, seconds] => {
            let runtime = tokio::runtime::Runtime::new().unwrap();
            let service = Service::named(service);
            let (connections, streams) = (connections.parse().unwrap(), streams.parse().unwrap());
            let seconds = Duration::from_secs(seconds.parse().unwrap());
            runtime.block_on(grpc(address.to_owned(), service, connections, streams, seconds))
        }
        ["http", address, path, requests] => http(address, path, requests.parse().unwrap()),
        _ => panic!("see the documentation of this example"),
    };
    let at = |share: usize| latencies[(latencies.len() - 1) * share / 100].as_micros();
    println!("{rate} {} {}", at(50), at(99));
}

/// The service that is called.
#[derive(Clone, Copy)]
enum Service {
    Tallygate,
    Throttlecrab,
}

impl Service {
    fn named(name: &str) -> Self {
        match name {
            "tallygate" => Self::Tallygate,
            "throttlecrab" => Self::Throttlecrab,
            _ => panic!("{name} is not known"),
        }
    }

    const fn path(self) -> &'static str {
        match self {
            Self::Tallygate => "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
            Self::Throttlecrab => "/throttlecrab.RateLimiter/Throttle",
        }
    }

    /// Returns the request for a key: a limit of a million per minute.
    fn request(self, key: u64) -> Bytes {
        let key = format!("key:{key}");
        let mut message = Vec::new();
        match self {
            Self::Tallygate => {
                let mut entry = Vec::new();
                field(&mut entry, 1, b"user");
                field(&mut entry, 2, key.as_bytes());
                let mut descriptor = Vec::new();
                field(&mut descriptor, 1, &entry);
                field(&mut message, 1, b"bench");
                field(&mut message, 2, &descriptor);
            }
            Self::Throttlecrab => {
                field(&mut message, 1, key.as_bytes());
                for (number, value) in [(2, 1_000_000), (3, 1_000_000), (4, 60), (5, 1)] {
                    message.push(number << 3);
                    varint(&mut message, value);
                }
            }
        }
        let mut framed = BytesMut::with_capacity(message.len() + 5);
        framed.put_u8(0);
        framed.put_u32(u32::try_from(message.len()).unwrap());
        framed.extend_from_slice(&message);
        framed.freeze()
    }

    /// Returns whether a response allows the request: the code is OK, or `allowed` is true. Both are the first field.
    fn is_allowed(self, response: &[u8]) -> bool {
        response.get(5..7) == Some(&[0x08, 1])
    }
}

fn field(out: &mut Vec<u8>, number: u8, bytes: &[u8]) {
    out.push(number << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap());
}

async fn grpc(
    address: String,
    service: Service,
    connections: usize,
    streams: usize,
    time: Duration,
) -> (u64, Vec<Duration>) {
    let began = Instant::now();
    let address: Arc<str> = address.into();
    let mut callers = Vec::new();
    for _ in 0..connections {
        let stream = tokio::net::TcpStream::connect(&*address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (requests, connection) = h2::client::handshake(stream).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..streams {
            let requests = requests.clone();
            callers.push(tokio::spawn(async move { call(requests, service, began + time).await }));
        }
    }
    let mut latencies = Vec::new();
    for caller in callers {
        latencies.extend(caller.await.unwrap());
    }
    let rate = latencies.len() as u128 * 1_000_000 / began.elapsed().as_micros();
    latencies.sort_unstable();
    (u64::try_from(rate).unwrap(), latencies)
}

/// Makes calls one after the other until a time.
async fn call(requests: SendRequest<Bytes>, service: Service, until: Instant) -> Vec<Duration> {
    let mut latencies = Vec::new();
    while Instant::now() < until {
        let began = Instant::now();
        let request = Request::post(format!("http://localhost{}", service.path()))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())
            .unwrap();
        let mut ready = requests.clone().ready().await.unwrap();
        let (reply, mut stream) = ready.send_request(request, false).unwrap();
        stream.send_data(service.request(fastrand::u64(..KEYS)), true).unwrap();
        let mut body = reply.await.unwrap().into_body();
        let mut response = BytesMut::new();
        while let Some(data) = body.data().await {
            let data = data.unwrap();
            body.flow_control().release_capacity(data.len()).unwrap();
            response.extend_from_slice(&data);
        }
        body.trailers().await.unwrap();
        assert!(service.is_allowed(&response), "{response:?}");
        latencies.push(began.elapsed());
    }
    latencies
}

/// Sends requests one after the other on one connection.
fn http(address: &str, path: &str, requests: usize) -> (u64, Vec<Duration>) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_nodelay(true).unwrap();
    let mut latencies = Vec::with_capacity(requests);
    let mut buffer = [0; 4096];
    let started = Instant::now();
    for _ in 0..requests {
        let began = Instant::now();
        let user = fastrand::u64(..KEYS);
        write!(stream, "GET {path} HTTP/1.1\r\nhost: localhost\r\nx-user: key:{user}\r\n\r\n")
            .unwrap();
        let mut read = 0;
        while !ends(&buffer[..read]) {
            let more = stream.read(&mut buffer[read..]).unwrap();
            assert!(more > 0, "the connection ended");
            read += more;
        }
        assert!(
            buffer.starts_with(b"HTTP/1.1 200"),
            "{}",
            String::from_utf8_lossy(&buffer[..read])
        );
        latencies.push(began.elapsed());
    }
    let rate = latencies.len() as u128 * 1_000_000 / started.elapsed().as_micros().max(1);
    latencies.sort_unstable();
    (u64::try_from(rate).unwrap(), latencies)
}

/// Returns whether a reply is complete. All replies have a length.
fn ends(reply: &[u8]) -> bool {
    let text = String::from_utf8_lossy(reply);
    let Some((head, body)) = text.split_once("\r\n\r\n") else { return false };
    let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
    length.is_some_and(|length| length.parse::<usize>().unwrap() == body.len())
}
