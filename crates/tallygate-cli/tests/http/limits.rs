//! What one client may take of the server: connections, bytes and time, over HTTP/1.1, HTTP/2 and RESP.

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

/// Long enough for a busy machine; nobody waits for it unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(20);

const POLICY: &str = "[policies.api]\nlimit = 1\nwindow = \"1000h\"\nburst = 50\n";
const CHECK: &str = r#"{"policy":"api","key":"alice"}"#;

fn served(limits: &str) -> Served {
    Served::start(&[], Some(&format!("{POLICY}[limits]\n{limits}")))
}

fn resp(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.resp()).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// All that comes until the server closes the connection.
fn rest_of(stream: &mut TcpStream) -> String {
    let mut rest = Vec::new();
    // Closed upon what was not read, a connection is reset.
    let _ = stream.read_to_end(&mut rest);
    String::from_utf8(rest).expect("text")
}

#[test]
fn e1_a_head_that_does_not_come_is_not_waited_for_and_others_are_served() {
    let served = served("head_timeout = \"200ms\"\nmax_connections_per_address = 1001\n");
    let mut slow: Vec<_> = (0..1000).map(|_| Client::connect(served.http())).collect();
    for (place, client) in slow.iter_mut().enumerate() {
        let begun: &[u8] =
            [b"".as_slice(), b"GET /livez HTTP/1.1\r\nhost: t", b"PRI * HTTP/2.0\r\n"][place % 3];
        client.write(begun).expect("it reads");
    }
    assert_eq!(get(served.http(), "/livez").status, 200);
    for client in &mut slow {
        // It may be told why before the end.
        while client.read().is_some() {}
        assert!(client.is_closed());
    }
}

#[test]
fn e1_a_client_that_rests_between_two_requests_is_closed_upon() {
    let served = served("head_timeout = \"100ms\"\n");
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[], b"");
    assert_eq!(client.read().expect("a reply").status, 200);
    assert!(client.read().is_none() && client.is_closed());
}

#[test]
fn e1_a_body_that_does_not_come_in_time_is_told_so() {
    let served = served("body_timeout = \"100ms\"\n");
    let mut client = Client::connect(served.http());
    let head = "POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 30\r\n\r\n";
    client.write(format!("{head}{{\"policy\"").as_bytes()).expect("it reads");
    let late = client.read().expect("a reply");
    assert_eq!(late.status, 408);
    assert_eq!(late.problem(), "the body did not come within 100ms");
    assert!(client.is_closed(), "what comes later is not taken for a request");
    assert_eq!(
        post(served.http(), "/v1/check", CHECK).json()["remaining"],
        49,
        "nothing was charged"
    );
}

#[test]
fn e2_a_head_that_is_too_large_is_refused() {
    let served = served("max_head_bytes = 8192\n");
    let large = "x".repeat(9000);
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[("x-filler", &large)], b"");
    // What it did not read may take the reply back.
    assert!(client.read().is_none_or(|reply| reply.status == 431));
    assert!(client.is_closed());
    let mut client = Client::connect(served.http());
    client.send("GET /livez", &[("x-filler", &large[..4000])], b"");
    assert_eq!(client.read().expect("a reply").status, 200);
}

#[test]
fn e2_a_body_may_be_as_long_as_it_is_said() {
    let served = served("max_body_bytes = 40\n");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200);
    let refused = post(served.http(), "/v1/check", &format!("{CHECK}{}", " ".repeat(40)));
    assert_eq!((refused.status, &*refused.problem()), (413, "the body has more than 40 bytes"));
}

#[test]
fn one_connection_too_many_is_closed_and_counted_and_room_is_found_again() {
    let served = served("max_connections = 2\n");
    let mut http = Client::connect(served.http());
    http.send("GET /livez", &[], b"");
    assert_eq!(http.read().expect("a reply").status, 200);
    let mut command = resp(&served);
    command.write_all(b"PING\r\n").expect("it reads");
    let mut pong = [0; 7];
    command.read_exact(&mut pong).expect("a reply");
    for _ in 0..3 {
        assert_eq!(rest_of(&mut resp(&served)), "");
    }
    http.send("GET /metrics", &[], b"");
    let metrics = http.read().expect("those who are there are served").body;
    assert!(
        metrics.contains("\ntallygate_connections_refused_total{reason=\"server\"} 3\n"),
        "{metrics}"
    );
    drop(command);
    wait_until("room", PATIENCE, || {
        let mut client = Client::connect(served.http());
        // Closed upon, it cannot even be asked.
        let sent = client.write(b"GET /livez HTTP/1.1\r\nhost: t\r\n\r\n");
        sent.is_ok() && client.read().is_some_and(|reply| reply.status == 200)
    });
}

#[test]
fn limits_are_read_anew_for_connections_to_come() {
    let served = served("max_body_bytes = 40\n");
    let long = format!("{CHECK}{}", " ".repeat(40));
    assert_eq!(post(served.http(), "/v1/check", &long).status, 413);
    std::fs::write(served.config(), POLICY).expect("written");
    assert_eq!(post(served.http(), "/v1/admin/reload", "").status, 200);
    assert_eq!(post(served.http(), "/v1/check", &long).status, 200);
}

#[test]
fn e1_half_a_command_is_waited_for_only_so_long() {
    let served = served("head_timeout = \"100ms\"\n");
    let too_late = "-ERR the rest of the command did not come within 100ms\r\n";
    // At every kind of place: in a line, a count, a length, an argument, one that is too long and read past.
    let long = format!("*2\r\n$4\r\nPING\r\n$100000\r\n{}", "x".repeat(70_000));
    for begun in
        ["PI", "*2\r", "*1\r\n", "*1\r\n$4", "*1\r\n$4\r\nPI", "*2\r\n$4\r\nPING\r\n", &long]
    {
        let mut stream = resp(&served);
        stream.write_all(begun.as_bytes()).expect("it reads");
        assert_eq!(rest_of(&mut stream), too_late, "{:?}", &begun[..begun.len().min(30)]);
    }
    // Whole commands before it are answered, and do not count as slow.
    let mut stream = resp(&served);
    stream.write_all(b"PING\r\nPING\r\nPI").expect("it reads");
    assert_eq!(rest_of(&mut stream), format!("+PONG\r\n+PONG\r\n{too_late}"));
}

#[test]
fn a_resp_client_may_rest_unless_it_is_told_how_long() {
    // It has rested for longer than any head may take, while another one was waited for.
    let patient = served("head_timeout = \"50ms\"\n");
    let mut resting = resp(&patient);
    resting.write_all(b"PING\r\n").expect("it reads");
    let mut slow = resp(&patient);
    slow.write_all(b"PI").expect("it reads");
    assert!(rest_of(&mut slow).starts_with("-ERR"));
    resting.write_all(b"PING\r\n").expect("it reads");
    let mut pongs = [0; 14];
    resting.read_exact(&mut pongs).expect("both are answered");
    assert_eq!(&pongs, b"+PONG\r\n+PONG\r\n");

    let brief = served("idle_timeout = \"50ms\"\n");
    let mut resting = resp(&brief);
    resting.write_all(b"PING\r\n").expect("it reads");
    assert_eq!(rest_of(&mut resting), "+PONG\r\n", "answered, then closed without a word");
}

/// A connection over which several requests go at once.
async fn connect<B>(served: &Served) -> http2::SendRequest<B>
where
    B: hyper::body::Body<Data = Bytes, Error: Into<Box<dyn std::error::Error + Send + Sync>>>
        + Send
        + Unpin
        + 'static,
{
    let stream = tokio::net::TcpStream::connect(served.http()).await.expect("it listens");
    let shaken = http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await;
    let (client, connection) = shaken.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    client
}

fn check<B>(body: B) -> Request<B> {
    Request::post("http://127.0.0.1/v1/check").body(body).expect("a request")
}

#[tokio::test]
async fn requests_of_one_http2_connection_are_decided_one_by_one_and_answered_each_for_itself() {
    let served = served("max_streams = 32\n");
    let mut client = connect::<Full<Bytes>>(&served).await;
    // From the first reply on it is known how many may go at once.
    let live = Request::get("http://127.0.0.1/livez").body(Full::default()).expect("a request");
    assert_eq!(client.send_request(live).await.expect("a reply").status(), StatusCode::OK);
    let asked = (0..200).map(|_| {
        let mut client = client.clone();
        async move {
            client.ready().await.expect("it is open");
            let reply = client.send_request(check(Full::from(CHECK))).await.expect("a reply");
            assert_eq!(reply.status(), StatusCode::OK);
            let body = reply.into_body().collect().await.expect("a body").to_bytes();
            let told: serde_json::Value = serde_json::from_slice(&body).expect("JSON");
            (told["allowed"] == true).then(|| told["remaining"].as_u64().expect("a number"))
        }
    });
    let mut left: Vec<_> = join_all(asked).await.into_iter().flatten().collect();
    left.sort_unstable();
    assert_eq!(left, (0..50).collect::<Vec<_>>(), "each of the fifty once");
    let metrics = get(served.http(), "/metrics").body;
    assert!(
        metrics.contains("tallygate_connections{surface=\"http\"} 2"),
        "one, and who asks: {metrics}"
    );
}

#[tokio::test]
async fn e6_a_stream_that_stalls_holds_up_nobody_and_is_ended() {
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
        let reply = client.send_request(whole()).await.expect("a reply");
        assert_eq!(reply.status(), StatusCode::OK);
    }
    let late = stalled.await.expect("it ends").expect("a reply");
    assert_eq!(late.status(), StatusCode::REQUEST_TIMEOUT);
    let reply = client.send_request(whole()).await.expect("the connection goes on");
    assert_eq!(reply.status(), StatusCode::OK);
}

#[tokio::test]
async fn e6_a_head_that_is_too_large_over_http2_is_refused_and_the_rest_served() {
    let served = served("max_http2_head_bytes = 8192\n");
    let mut client = connect::<Full<Bytes>>(&served).await;
    let mut large = check(Full::from(CHECK));
    for field in 0..10 {
        let name =
            hyper::header::HeaderName::try_from(format!("x-filler-{field}")).expect("a name");
        large.headers_mut().insert(name, "x".repeat(1000).parse().expect("a value"));
    }
    match client.send_request(large).await {
        Ok(reply) => assert_eq!(reply.status(), StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE),
        Err(error) => assert!(!error.is_closed(), "{error}"),
    }
    let reply = client.send_request(check(Full::from(CHECK))).await.expect("a reply");
    assert_eq!(reply.status(), StatusCode::OK);
}
