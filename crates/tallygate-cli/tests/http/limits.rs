//! Tests the limits per client: connections, bytes and time, over HTTP/1.1, HTTP/2 and RESP.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Client, get, post};
use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::client::conn::http2;
use hyper::{Request, StatusCode};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tallygate_testkit::servers::wait_until;

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

const POLICY: &str = "[policies.api]\nlimit = 1\nwindow = \"1000h\"\nburst = 50\n";
const CHECK: &str = r#"{"policy":"api","key":"alice"}"#;

fn served(limits: &str) -> Served {
    Served::start(&[], Some(&format!("{POLICY}[limits]\n{limits}")))
}

fn resp(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.resp()).expect("the connection opens");
    stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
    stream
}

/// Returns everything up to the end of the connection.
fn rest_of(stream: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    // If the server closes with unread bytes, the connection is reset.
    let _ = stream.read_to_end(&mut rest);
    String::from_utf8(rest).expect("the text is UTF-8")
}

/// Fault E1.
#[test]
fn a_head_that_does_not_arrive_times_out_and_others_are_served() {
    let served = served("head_timeout = \"200ms\"\nmax_connections_per_address = 1001\n");
    let mut slow: Vec<_> = (0..1000).map(|_| Client::connect(served.http())).collect();
    for (place, client) in slow.iter_mut().enumerate() {
        let begun: &[u8] =
            [b"".as_slice(), b"GET /livez HTTP/1.1\r\nhost: t", b"PRI * HTTP/2.0\r\n"][place % 3];
        client.write(begun).expect("the write succeeds");
    }
    assert_eq!(get(served.http(), "/livez").status, 200);
    for client in &mut slow {
        // The server may send an error before it closes.
        while client.read().is_some() {}
        assert!(client.is_closed());
    }
}

/// Fault E1.
#[test]
fn an_idle_client_is_disconnected() {
    let served = served("head_timeout = \"100ms\"\n");
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[], b"");
    assert_eq!(client.read().expect("there is a reply").status, 200);
    assert!(client.read().is_none() && client.is_closed());
}

/// Fault E1.
#[test]
fn a_body_that_does_not_arrive_in_time_gets_an_error() {
    let served = served("body_timeout = \"100ms\"\n");
    let mut client = Client::connect(served.http());
    let head = "POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 30\r\n\r\n";
    client.write(format!("{head}{{\"policy\"").as_bytes()).expect("the write succeeds");
    let late = client.read().expect("there is a reply");
    assert_eq!(late.status, 408);
    assert_eq!(late.problem(), "the body did not arrive within 100ms");
    assert!(client.is_closed(), "later bytes are not parsed as a request");
    assert_eq!(
        post(served.http(), "/v1/check", CHECK).json()["remaining"],
        49,
        "nothing was charged"
    );
}

/// Fault E2.
#[test]
fn a_head_that_is_too_large_is_rejected() {
    let served = served("max_head_bytes = 8192\n");
    let large = "x".repeat(9000);
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[("x-filler", &large)], b"");
    // Unread bytes may reset the connection before the reply is read.
    assert!(client.read().is_none_or(|reply| reply.status == 431));
    assert!(client.is_closed());
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[("x-filler", &large[..4000])], b"");
    assert_eq!(client.read().expect("there is a reply").status, 200);
}

/// Fault E2.
#[test]
fn the_maximum_length_of_a_body_is_configurable() {
    let served = served("max_body_bytes = 40\n");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200);
    let rejected = post(served.http(), "/v1/check", &format!("{CHECK}{}", " ".repeat(40)));
    assert_eq!(
        (rejected.status, &*rejected.problem()),
        (413, "the body is longer than 40 bytes (`max_body_bytes`)")
    );
}

#[test]
fn a_connection_above_the_maximum_is_closed_and_counted() {
    let served = served("max_connections = 2\n");
    let mut http = Client::connect(served.http());
    http.send("GET /livez", &[], b"");
    assert_eq!(http.read().expect("there is a reply").status, 200);
    let mut command = resp(&served);
    command.write_all(b"PING\r\n").expect("the write succeeds");
    let mut pong = [0; 7];
    command.read_exact(&mut pong).expect("there is a reply");
    for _ in 0..3 {
        assert_eq!(rest_of(&mut resp(&served)), "");
    }
    http.send("GET /metrics", &[], b"");
    let metrics = http.read().expect("existing connections are served").body;
    assert!(
        metrics.contains("\ntallygate_connections_rejected_total{reason=\"server\"} 3\n"),
        "{metrics}"
    );
    drop(command);
    wait_until("there is room for a connection", PATIENCE, || {
        let mut client = Client::connect(served.http());
        // On a closed connection, sending fails.
        let sent = client.write(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n");
        sent.is_ok() && client.read().is_some_and(|reply| reply.status == 200)
    });
}

#[test]
fn a_reload_changes_the_limits_of_new_connections() {
    let served = served("max_body_bytes = 40\n");
    let long = format!("{CHECK}{}", " ".repeat(40));
    assert_eq!(post(served.http(), "/v1/check", &long).status, 413);
    std::fs::write(served.config(), POLICY).expect("the file is written");
    assert_eq!(post(served.http(), "/v1/admin/reload", "").status, 200);
    assert_eq!(post(served.http(), "/v1/check", &long).status, 200);
}

/// Fault E1.
#[test]
fn a_partial_command_times_out() {
    let served = served("head_timeout = \"100ms\"\n");
    let too_late = "-ERR the rest of the command did not arrive within 100ms\r\n";
    // The command stops in a line, a count, a length, an argument, and an argument that is too long.
    let long = format!("*2\r\n$4\r\nPING\r\n$100000\r\n{}", "x".repeat(70_000));
    for begun in
        ["PI", "*2\r", "*1\r\n", "*1\r\n$4", "*1\r\n$4\r\nPI", "*2\r\n$4\r\nPING\r\n", &long]
    {
        let mut stream = resp(&served);
        stream.write_all(begun.as_bytes()).expect("the write succeeds");
        assert_eq!(rest_of(&mut stream), too_late, "{:?}", &begun[..begun.len().min(30)]);
    }
    // Complete commands before it are answered and do not count as slow.
    let mut stream = resp(&served);
    stream.write_all(b"PING\r\nPING\r\nPI").expect("the write succeeds");
    assert_eq!(rest_of(&mut stream), format!("+PONG\r\n+PONG\r\n{too_late}"));
}

#[test]
fn a_resp_client_may_be_idle_unless_a_timeout_is_set() {
    // It was idle for longer than any head may take, because another connection timed out meanwhile.
    let patient = served("head_timeout = \"50ms\"\n");
    let mut idle = resp(&patient);
    idle.write_all(b"PING\r\n").expect("the write succeeds");
    let mut slow = resp(&patient);
    slow.write_all(b"PI").expect("the write succeeds");
    assert!(rest_of(&mut slow).starts_with("-ERR"));
    idle.write_all(b"PING\r\n").expect("the write succeeds");
    let mut pongs = [0; 14];
    idle.read_exact(&mut pongs).expect("both requests get replies");
    assert_eq!(&pongs, b"+PONG\r\n+PONG\r\n");

    let brief = served("idle_timeout = \"50ms\"\n");
    let mut idle = resp(&brief);
    idle.write_all(b"PING\r\n").expect("the write succeeds");
    assert_eq!(rest_of(&mut idle), "+PONG\r\n", "the server replies, then closes without an error");
}

/// Opens a connection for concurrent requests.
async fn connect<B>(served: &Served) -> http2::SendRequest<B>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>
        + Send
        + Unpin
        + 'static,
{
    let stream = tokio::net::TcpStream::connect(served.http()).await.expect("the connection opens");
    let shaken = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (client, connection) = shaken.expect("the HTTP/2 handshake succeeds");
    tokio::spawn(connection);
    client
}

fn check<B>(body: B) -> Request<B> {
    Request::post("http://127.0.0.1/v1/check").body(body).expect("the request is valid")
}

#[tokio::test]
async fn concurrent_requests_of_one_http2_connection_are_decided_separately() {
    let served = served("max_streams = 32\n");
    let mut client = connect::<Full<Bytes>>(&served).await;
    // The first reply contains the number of concurrent streams.
    let live =
        Request::get("http://127.0.0.1/livez").body(Full::default()).expect("the request is valid");
    assert_eq!(client.send_request(live).await.expect("there is a reply").status(), StatusCode::OK);
    let asked = (0..200).map(|_| {
        let mut client = client.clone();
        async move {
            client.ready().await.expect("the connection is open");
            let reply =
                client.send_request(check(Full::from(CHECK))).await.expect("there is a reply");
            assert_eq!(reply.status(), StatusCode::OK);
            let body = reply.into_body().collect().await.expect("the reply has a body").to_bytes();
            let decision: serde_json::Value =
                serde_json::from_slice(&body).expect("the text is JSON");
            (decision["allowed"] == true)
                .then(|| decision["remaining"].as_u64().expect("the value is a number"))
        }
    });
    let mut left: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
    left.sort_unstable();
    assert_eq!(left, (0..50).collect::<Vec<_>>(), "each remaining count appears once");
    let metrics = get(served.http(), "/metrics").body;
    assert!(
        metrics.contains("tallygate_connections{surface=\"http\"} 2"),
        "one, and who asks: {metrics}"
    );
}

/// Fault E6.
#[tokio::test]
async fn a_stalled_stream_blocks_no_other_and_is_reset() {
    let served = served("body_timeout = \"300ms\"\n");
    type Pieces = StreamBody<
        std::pin::Pin<
            Box<
                dyn futures_util::Stream<
                        Item = Result<hyper::body::Frame<Bytes>, std::convert::Infallible>,
                    > + Send,
            >,
        >,
    >;
    let mut client = connect::<Pieces>(&served).await;
    let never: Pieces = StreamBody::new(Box::pin(futures_util::stream::pending()));
    let stalled = tokio::spawn(client.send_request(check(never)));
    let whole = || {
        let whole = hyper::body::Frame::data(Bytes::from(CHECK));
        let whole: Pieces = StreamBody::new(Box::pin(futures_util::stream::iter([Ok(whole)])));
        check(whole)
    };
    for _ in 0..20 {
        let reply = client.send_request(whole()).await.expect("there is a reply");
        assert_eq!(reply.status(), StatusCode::OK);
    }
    let late = stalled.await.expect("the process ends").expect("there is a reply");
    assert_eq!(late.status(), StatusCode::REQUEST_TIMEOUT);
    let reply = client.send_request(whole()).await.expect("the connection continues");
    assert_eq!(reply.status(), StatusCode::OK);
}

/// Fault E6.
#[tokio::test]
async fn a_head_that_is_too_large_over_http2_is_rejected_and_others_are_served() {
    let served = served("max_http2_head_bytes = 8192\n");
    let mut client = connect::<Full<Bytes>>(&served).await;
    let mut large = check(Full::from(CHECK));
    for field in 0..10 {
        let name = hyper::header::HeaderName::try_from(format!("x-filler-{field}"))
            .expect("there is a name");
        large.headers_mut().insert(name, "x".repeat(1000).parse().expect("there is a value"));
    }
    match client.send_request(large).await {
        Ok(reply) => assert_eq!(reply.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        Err(error) => assert!(!error.is_closed(), "{error}"),
    }
    let reply = client.send_request(check(Full::from(CHECK))).await.expect("there is a reply");
    assert_eq!(reply.status(), StatusCode::OK);
}
