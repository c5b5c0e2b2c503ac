//! Tests hostile clients: memory stays bounded, other clients are served, and the hostile connection is closed.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Client, get, post, remaining};
use bytes::Bytes;
use tallygate_testkit::http2::{
    self, END_HEADERS, END_STREAM, ENHANCE_YOUR_CALM, INITIAL_WINDOW_SIZE, Method, frame, kind,
};
use tallygate_testkit::servers::wait_until;

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);
/// If nothing moves for this long, the tests assume that nothing more will.
const QUIET: Duration = Duration::from_millis(300);

const POLICY: &str = "[policies.api]\nlimit = 1\nwindow = \"1000h\"\nburst = 50\n";
const CHECK: &str = r#"{"policy":"api","key":"alice"}"#;
/// A scenario with a report of a few megabytes.
const LARGE: &str = r#"{"rate_per_minute":60000,"duration_ms":10000}"#;

fn served(limits: &str) -> Served {
    Served::start(&[], Some(&format!("{POLICY}[limits]\n{limits}")))
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the connection opens");
    stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
    stream.set_write_timeout(Some(PATIENCE)).expect("the timeout is set");
    stream
}

/// Connects from another loopback address.
fn connect_from(from: [u8; 4], address: &str) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let stream = runtime.expect("the runtime starts").block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("the socket is created");
        socket.bind(SocketAddr::from((Ipv4Addr::from(from), 0))).expect("the address is valid");
        socket
            .connect(address.parse().expect("the address is valid"))
            .await
            .expect("the connection opens")
            .into_std()
    });
    let stream = stream.expect("the socket option is set");
    stream.set_nonblocking(false).expect("the socket option is set");
    stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
    stream
}

/// Returns whether a RESP connection is served; false if it is closed.
fn is_served(stream: &mut TcpStream) -> bool {
    let mut pong = [0; 7];
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut pong).is_ok()
        && &pong == b"+PONG\r\n"
}

/// Returns the value of a metric, read from another address, because the attacker may have used its share of buffers.
fn counted(served: &Served, name: &str) -> u64 {
    let mut stream = connect_from([127, 0, 0, 9], served.http());
    let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).expect("the write succeeds");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("the text is UTF-8");
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.expect("the metric exists").trim().parse().expect("the value is a number")
}

const ABORTED: &str = "tallygate_connections_aborted_total";
const REJECTED: &str = "tallygate_connections_rejected_total{reason=\"buffers\"}";

/// Writes the same request over and over, ending in the middle of one, and reads nothing. Returns how many bytes the server
/// took until it took no more for [`QUIET`], or closed the connection. Checks that the server's memory grows by less than
/// `max_kib`.
fn flood(served: &Served, stream: &mut TcpStream, request: &[u8], max_kib: u64) -> usize {
    let before = served.resident_kib();
    let piece = request.repeat((256 << 10) / request.len() + 1);
    stream.set_write_timeout(Some(QUIET)).expect("the socket option is set");
    let mut sent = 0;
    loop {
        let from = sent % request.len();
        // The last request lacks its end.
        match stream.write(&piece[from..piece.len() - request.len() / 2]) {
            Ok(taken) => sent += taken,
            // The write timed out, or the connection was closed.
            Err(_) => break,
        }
        let grown = served.resident_kib().saturating_sub(before);
        assert!(grown < max_kib, "{grown} KiB after {sent} bytes of one client");
        assert!(sent < 256 << 20, "the server reads without a bound");
    }
    stream.set_write_timeout(Some(PATIENCE)).expect("the socket option is set");
    sent
}

/// Fault E3.
#[test]
fn an_http1_pipeline_is_read_only_as_fast_as_the_client_reads() {
    let served = served("");
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n";
    let mut stream = connect(served.http());
    flood(&served, &mut stream, request, 16 << 10);
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
    // The connection continues when the client reads.
    let (mut piece, mut read) = (vec![0; 1 << 20], 0);
    while read < 16 << 20 {
        read += stream.read(&mut piece).expect("more replies arrive");
    }
}

/// Fault E3.
#[test]
fn a_reply_does_not_wait_for_the_rest_of_the_next_request() {
    let served = served("");
    let mut client = Client::connect(served.http());
    let whole = "GET /livez HTTP/1.1\r\nhost: t\r\n\r\n";
    client.write(format!("{whole}{whole}GET /livez HT").as_bytes()).expect("the write succeeds");
    for _ in 0..2 {
        assert_eq!(client.read().expect("there is a reply").status, 200);
    }
    client.write(b"TP/1.1\r\nhost: t\r\n\r\n").expect("the write succeeds");
    assert_eq!(client.read().expect("there is a reply").status, 200);
}

/// Fault E12.
#[test]
fn an_http1_client_that_never_reads_is_disconnected() {
    let served = served("write_timeout = \"100ms\"\n");
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n";
    let mut stream = connect(served.http());
    flood(&served, &mut stream, request, 16 << 10);
    wait_until("the connection ends", PATIENCE, || counted(&served, ABORTED) == 1);
    assert!(has_ended(&mut stream));
}

/// Fault E12.
#[test]
fn a_resp_client_that_never_reads_is_disconnected() {
    let served = served("write_timeout = \"100ms\"\n");
    let mut stream = connect(served.resp());
    flood(&served, &mut stream, b"PING\r\n", 4 << 10);
    wait_until("the connection ends", PATIENCE, || counted(&served, ABORTED) == 1);
    assert!(has_ended(&mut stream));
}

/// Reads to the end and returns whether the server closed the connection.
fn has_ended(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    stream
        .read_to_end(&mut rest)
        .map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |_| true)
}

/// Opens an HTTP/2 connection with the given settings.
fn connect_http2(served: &Served, settings: &[(u16, u32)]) -> TcpStream {
    let mut stream = connect(served.http());
    stream.write_all(&http2::hello(settings)).expect("the write succeeds");
    stream
}

/// Returns the kind and the payload of the next frame, or `None` at the end.
fn next_frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; usize::try_from(length).expect("the length is small")];
    stream.read_exact(&mut payload).ok()?;
    Some((head[3], payload))
}

/// Skips frames up to the next one of a kind, and returns its payload.
fn next_frame_of(stream: &mut TcpStream, expected: u8) -> Vec<u8> {
    loop {
        let (kind, payload) = next_frame(stream).expect("the connection is open");
        if kind == expected {
            return payload;
        }
    }
}

/// Returns the error code of the server's GOAWAY frame, or `None` if the connection ends without one.
fn goaway_code(stream: &mut TcpStream) -> Option<u32> {
    while let Some((kind, payload)) = next_frame(stream) {
        if kind == kind::GOAWAY {
            return Some(u32::from_be_bytes(
                payload[4..8].try_into().expect("the slice has four bytes"),
            ));
        }
    }
    None
}

/// Fault E12.
#[test]
fn an_http2_client_that_never_reads_is_disconnected() {
    let served = served("write_timeout = \"100ms\"\n");
    // The windows are large, so only the connection itself is full.
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0x7fff_ffff)]);
    stream
        .write_all(&frame(kind::WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes()))
        .expect("the write succeeds");
    for id in 0..200 {
        stream
            .write_all(&http2::request(2 * id + 1, "/openapi.json", None))
            .expect("the write succeeds");
    }
    wait_until("the connection ends", PATIENCE, || counted(&served, ABORTED) == 1);
    assert!(has_ended(&mut stream));
    let mut stream = connect_http2(&served, &[]);
    let ping = frame(kind::PING, 0, 0, b"12345678");
    flood(&served, &mut stream, &ping, 4 << 10);
    wait_until("the connection ends", PATIENCE, || counted(&served, ABORTED) == 2);
}

/// The buffers for bodies and replies; one address may use a quarter.
const BUFFERS: &str = "max_buffer_bytes = 16777216\n";

/// Fault E6.
#[test]
fn http2_replies_without_a_window_are_bounded_and_dropped() {
    let served = served(&format!("{BUFFERS}write_timeout = \"2s\"\n"));
    assert!(post(served.http(), "/v1/simulate", LARGE).body.len() > 1 << 20, "the report is large");
    let before = served.peak_kib();
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    for id in 0..64 {
        let request = http2::request(2 * id + 1, "/v1/simulate", Some(LARGE.as_bytes()));
        stream.write_all(&request).expect("the write succeeds");
    }
    // Every request gets a reply: a report or an error.
    let mut heads = 0;
    while heads < 64 {
        let (kind, _) = next_frame(&mut stream).expect("the connection is open");
        heads += u32::from(kind == kind::HEADERS);
    }
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 48 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
    assert!(goaway_code(&mut stream).is_none(), "the server sends no GOAWAY");
    assert_eq!(counted(&served, ABORTED), 1);
    // Its buffers are free for others.
    let simulated = || post(served.http(), "/v1/simulate", LARGE).status == 200;
    wait_until("there is room in the buffers", PATIENCE, simulated);
}

/// Sends bodies without their last byte, until a list of checks finds no room for its reply.
fn fill(served: &Served, sizes: &[usize], questions: usize) -> Vec<TcpStream> {
    let begin = |bytes: usize| {
        let mut stream = connect(served.http());
        let head = format!("POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: {bytes}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("the write succeeds");
        stream.write_all(&vec![b' '; bytes - 1]).expect("the write succeeds");
        stream
    };
    let mut held: Vec<_> = sizes.iter().copied().map(begin).collect();
    wait_until("all bodies are held", PATIENCE, || {
        // A body that arrived while a list was answered may have been rejected: send it again.
        for (stream, bytes) in held.iter_mut().zip(sizes) {
            if has_input(stream) {
                *stream = begin(*bytes);
            }
        }
        post(served.http(), "/v1/peek", &list(questions)).status == 503
    });
    held
}

/// Returns whether the server has sent something or closed the connection.
fn has_input(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("the socket option is set");
    let has_input = stream.peek(&mut [0]).is_ok();
    stream.set_nonblocking(false).expect("the socket option is set");
    has_input
}

/// Returns a list of checks of one client.
fn list(questions: usize) -> String {
    let questions = vec![r#"{"policy":"api","key":"listed"}"#; questions];
    format!(r#"{{"checks":[{}]}}"#, questions.join(","))
}

/// A list whose reply finds no room is rejected before anything is charged.
#[test]
fn memory_for_a_long_reply_is_reserved_before_the_charge() {
    let served = served(BUFFERS);
    let before = remaining(served.http(), "api", "listed");
    // About 150 KB of the address's share are left.
    let held = fill(&served, &[1 << 20, 1 << 20, 1 << 20, 900_000], 1000);
    let status = |verb| post(served.http(), verb, &list(1000)).status;
    assert_eq!(status("/v1/check"), 503);
    drop(held);
    wait_until("there is room in the buffers", PATIENCE, || status("/v1/peek") == 200);
    assert_eq!(remaining(served.http(), "api", "listed"), before);
    assert_eq!(status("/v1/check"), 200);
}

/// An HTTP/2 request without room ends its connection and is not decided.
#[test]
fn a_stream_without_memory_is_not_charged() {
    let served = served(BUFFERS);
    let before = remaining(served.http(), "api", "127.0.0.1");
    // The address has used its whole share.
    let mut stream = connect_http2(&served, &[]);
    assert!(next_frame(&mut stream).is_some(), "the connection has its 128 KiB");
    let held = fill(&served, &[1 << 20, 1 << 20, 1 << 20, (1 << 20) - (128 << 10)], 40);
    // A request without a body needs no other memory before it is decided.
    let request = http2::request(1, "/v1/authorize/api", None);
    stream.write_all(&request).expect("the write succeeds");
    assert!(goaway_code(&mut stream).is_none());
    drop(held);
    wait_until("there is room in the buffers", PATIENCE, || counted(&served, ABORTED) == 1);
    assert_eq!(remaining(served.http(), "api", "127.0.0.1"), before);
}

/// The buffers of a reply are free once it is sent, also while the connection stays open.
#[test]
fn idle_connections_hold_no_memory_after_large_replies() {
    let served = served(BUFFERS);
    // Each reply takes a fifth of the address's share.
    let clients: Vec<_> = (0..8)
        .map(|number| {
            let mut client = Client::connect(served.http());
            client.send("POST /v1/peek", &[], list(4_000).as_bytes());
            let reply = client.read().expect("there is a reply");
            assert_eq!(reply.status, 200, "of connection {number}");
            client
        })
        .collect();
    assert_eq!(clients.len(), 8);
}

#[test]
fn the_memory_of_long_commands_is_bounded() {
    let served = served(BUFFERS);
    // An address has 4 MiB: 32 commands of up to 128 KiB.
    let begun = [b"*2\r\n$4\r\nECHO\r\n$65000\r\n".as_slice(), &[b'x'; 40_000]].concat();
    let mut streams: Vec<_> = (0..64).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(&begun).expect("the write succeeds");
    }
    // The others get a reply only when their command is complete.
    wait_until("half of the commands are rejected", PATIENCE, || {
        streams.iter().filter(|stream| has_input(stream)).count() == 32
    });
    let rest = [[b'x'; 25_000].as_slice(), b"\r\n"].concat();
    let (rejected, mut accepted): (Vec<_>, Vec<_>) = streams.into_iter().partition(has_input);
    for mut stream in rejected {
        let mut error = [0; 4];
        stream.read_exact(&mut error).expect("there is a reply");
        assert_eq!(&error, b"-ERR");
    }
    for stream in &mut accepted {
        stream.write_all(&rest).expect("the write succeeds");
        let mut echo = vec![0; 65_000 + 10];
        stream.read_exact(&mut echo).expect("the echo arrives");
        assert!(echo.starts_with(b"$65000\r\nxx"));
    }
    // Their buffers are free for others, although they are still connected.
    let mut next = connect(served.resp());
    next.write_all(&[&begun[..], &rest].concat()).expect("the write succeeds");
    next.read_exact(&mut [0; 65_000]).expect("the echo arrives");
}

#[test]
fn idle_connections_hold_little_memory_after_long_commands() {
    const CLIENTS: u64 = 300;
    let served = served("");
    let command = [b"*2\r\n$4\r\nECHO\r\n$65000\r\n".as_slice(), &[b'x'; 65_000], b"\r\n"].concat();
    let ask = || {
        let mut stream = connect(served.resp());
        stream.write_all(&command).expect("the write succeeds");
        stream.read_exact(&mut vec![0; 65_000 + 10]).expect("the echo arrives");
        // The connection is idle now.
        assert!(is_served(&mut stream));
        stream
    };
    let first = ask();
    let before = served.resident_kib();
    let streams: Vec<_> = (0..CLIENTS).map(|_| ask()).collect();
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 48 * CLIENTS, "{grown} KiB for {CLIENTS} idle clients");
    drop((first, streams));
}

/// Fault E6.
#[test]
fn a_small_reply_without_a_window_ends_the_connection() {
    let served = served("write_timeout = \"200ms\"\n");
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    stream.write_all(&http2::request(1, "/livez", None)).expect("the write succeeds");
    assert!(goaway_code(&mut stream).is_none());
    wait_until("the connection ends", PATIENCE, || counted(&served, ABORTED) == 1);
    // A client that opens the window in time is served for longer than the timeout.
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    let began = Instant::now();
    for number in 0.. {
        let id = 2 * number + 1;
        stream.write_all(&http2::request(id, "/livez", None)).expect("the write succeeds");
        next_frame_of(&mut stream, kind::HEADERS);
        // The connection has a window of its own, which many replies would use up.
        for window in [0, id] {
            let update = frame(kind::WINDOW_UPDATE, 0, window, &6_u32.to_be_bytes());
            stream.write_all(&update).expect("the write succeeds");
        }
        assert_eq!(next_frame_of(&mut stream, kind::DATA), b"alive\n");
        if began.elapsed() > Duration::from_millis(400) {
            break;
        }
    }
    assert_eq!(counted(&served, ABORTED), 1);
}

/// Fault E6.
#[test]
fn the_memory_of_stalled_streams_is_bounded() {
    let unread = |id| http2::request(id, "/livez", None);
    let unsent = |id| http2::without_body(id, "/v1/check");
    // 2000 requests whose replies are never read, or whose bodies are never sent. There is room for the requests of four
    // connections.
    for stalled in [&unread as &dyn Fn(u32) -> Vec<u8>, &unsent] {
        let served = served(BUFFERS);
        let before = served.resident_kib();
        let mut script = http2::hello(&[(INITIAL_WINDOW_SIZE, 0)]);
        script.extend((0..100).flat_map(|number| stalled(2 * number + 1)));
        let mut streams: Vec<_> = (0..20).map(|_| connect(served.http())).collect();
        for stream in &mut streams {
            let _ = stream.write_all(&script);
        }
        wait_until("most connections end", PATIENCE, || {
            counted(&served, ABORTED) + counted(&served, REJECTED) >= 16
        });
        let grown = served.resident_kib().saturating_sub(before);
        // Until they are closed, all exist, and an unoptimized build needs about 16 KiB for each.
        assert!(grown < 2000 * 24, "{grown} KiB for one client");
        wait_until("there is room for others", PATIENCE, || {
            post(served.http(), "/v1/check", CHECK).status == 200
        });
    }
}

/// Fault E6.
#[tokio::test]
async fn the_memory_of_bodies_on_many_streams_is_bounded() {
    let served = served(&format!("{BUFFERS}body_timeout = \"2s\"\n"));
    let before = served.peak_kib();
    let stream = tokio::net::TcpStream::connect(served.http()).await.expect("the connection opens");
    let (client, connection) =
        h2::client::handshake(stream).await.expect("the HTTP/2 handshake succeeds");
    tokio::spawn(connection);
    let nearly = Bytes::from(vec![b' '; (1 << 20) - 1]);
    let mut replies = Vec::new();
    for _ in 0..64 {
        let mut client = client.clone().ready().await.expect("the connection is open");
        let request = hyper::Request::post("http://localhost/v1/check")
            .body(())
            .expect("the request is valid");
        let (reply, mut body) = client.send_request(request, false).expect("the request is sent");
        body.send_data(nearly.clone(), false).expect("the request is sent");
        replies.push((reply, body));
    }
    let (mut rejected, mut timed_out) = (0, 0);
    for (reply, _body) in replies {
        match reply.await.expect("there is a reply").status().as_u16() {
            503 => rejected += 1,
            408 => timed_out += 1,
            status => panic!("{status}"),
        }
    }
    // A quarter of 16 MiB holds three incomplete bodies.
    assert!(rejected >= 60 && timed_out <= 4, "{rejected}, {timed_out}");
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
}

/// Fault E4.
#[test]
fn a_client_that_resets_its_streams_rapidly_is_disconnected() {
    let served = served("");
    let before = served.resident_kib();
    let mut stream = connect_http2(&served, &[]);
    let fields = http2::fields(Method::Post, "/v1/check");
    let mut pairs = 0_u32;
    // Sends incomplete requests and resets them, as many as the server accepts.
    'send: while pairs < 200_000 {
        let mut batch = Vec::new();
        for _ in 0..500 {
            let id = 2 * pairs + 1;
            batch.extend(frame(kind::HEADERS, END_HEADERS, id, &fields));
            batch.extend(http2::reset(id));
            pairs += 1;
        }
        if stream.write_all(&batch).is_err() {
            break 'send;
        }
    }
    assert!(pairs < 200_000, "the server accepted all of them");
    // Unread bytes may reset the connection before the GOAWAY frame is read.
    assert!(goaway_code(&mut stream).is_none_or(|reason| reason == ENHANCE_YOUR_CALM));
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
}

/// Fault E5.
#[test]
fn an_endless_http2_head_ends_the_connection() {
    let served = served("");
    let before = served.resident_kib();
    // Endless fields, frames of one byte, and empty frames.
    let field = [&[0x40, 1, b'x', 126][..], &[b'y'; 126]].concat();
    for piece in [field.repeat(120), b"\x86".to_vec(), Vec::new()] {
        let mut stream = connect_http2(&served, &[]);
        let block = http2::fields(Method::Get, "/livez");
        stream.write_all(&frame(kind::HEADERS, END_STREAM, 1, &block)).expect("the write succeeds");
        let more = frame(kind::CONTINUATION, 0, 1, &piece);
        let (mut sent, most) = (0, 100_000 * more.len().min(200));
        while sent < most && stream.write_all(&more).is_ok() {
            sent += more.len();
        }
        assert!(sent < most, "all {sent} bytes were accepted, {} per frame", more.len());
        let grown = served.resident_kib().saturating_sub(before);
        assert!(grown < 8 << 10, "{grown} KiB for one client");
    }
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
}

/// Fault E6.
#[test]
fn a_header_bomb_is_not_decompressed() {
    let served = served("");
    let before = served.peak_kib();
    let mut stream = connect_http2(&served, &[]);
    for id in 0..10 {
        let bomb = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * id + 1, &http2::bomb());
        if stream.write_all(&bomb).is_err() {
            break;
        }
    }
    // The server rejects each stream or ends the connection.
    let _ = stream.write_all(&http2::request(101, "/livez", None));
    stream.set_read_timeout(Some(QUIET)).expect("the timeout is set");
    let mut answered = 0;
    while let Some((kind, _)) = next_frame(&mut stream) {
        answered += u32::from(kind == kind::DATA);
    }
    assert!(answered <= 1, "{answered} streams were answered, but only one was valid");
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "other clients are served");
}

#[test]
fn a_flood_of_connections_leaves_room_for_other_addresses() {
    let served = served("max_connections = 20\nmax_connections_per_address = 10\n");
    let mut flood: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    assert_eq!(flood.iter_mut().filter_map(|one| is_served(one).then_some(())).count(), 10);
    let mut others: Vec<_> = (0..9).map(|_| connect_from([127, 0, 0, 2], served.resp())).collect();
    assert!(others.iter_mut().all(is_served));
    // The last free connection reads the metrics.
    let mut stream = connect_from([127, 0, 0, 3], served.http());
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        .expect("the write succeeds");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("there is a reply");
    assert!(
        metrics.contains("tallygate_connections_rejected_total{reason=\"address\"} 190\n"),
        "{metrics}"
    );
    drop(flood);
    wait_until("its connections are free again", PATIENCE, || {
        is_served(&mut connect(served.resp()))
    });
}

#[test]
fn trusted_proxies_and_unix_sockets_have_no_limit_per_address() {
    let path = std::env::temp_dir().join(format!("tallygate-abuse-{}.sock", std::process::id()));
    let address = format!("unix:{}", path.display());
    let config = format!(
        "trusted_proxies = [\"127.0.0.2/32\"]\n{POLICY}[limits]\nmax_connections_per_address = 2\n"
    );
    let served = Served::start(&["--http", &address], Some(&config));
    let mut proxied: Vec<_> =
        (0..10).map(|_| connect_from([127, 0, 0, 2], served.resp())).collect();
    assert!(proxied.iter_mut().all(is_served));
    let mut local: Vec<_> = (0..10)
        .map(|_| std::os::unix::net::UnixStream::connect(&path).expect("the connection opens"))
        .collect();
    for one in &mut local {
        one.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n")
            .expect("the write succeeds");
        one.read_exact(&mut [0; 15]).expect("there is a reply");
    }
}

/// Sets the limit of open files of the server.
fn set_descriptors(served: &Served, most: u64) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("the process id is valid"));
    let limit = Rlimit { current: Some(most), maximum: Some(20_000) };
    prlimit(pid, Resource::Nofile, limit).expect("the limit is set");
}

/// Fault E16.
#[test]
fn without_descriptors_open_connections_are_served_and_new_ones_wait() {
    let served = served("");
    let (mut resp, mut http) = (connect(served.resp()), Client::connect(served.http()));
    let mut check = || {
        http.send("POST /v1/check", &[], CHECK.as_bytes());
        http.read().expect("there is a reply").status
    };
    assert!(is_served(&mut resp) && check() == 200);
    // Fewer than are open: open files stay open, and no more can be opened.
    set_descriptors(&served, 3);
    // The system queues these connections; the server cannot accept them.
    let mut waiting: Vec<_> =
        (0..20).map(|index| connect([served.resp(), served.http()][index % 2])).collect();
    for stream in &mut waiting {
        stream
            .write_all(b"GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            .expect("the bytes fit");
    }
    let used = || cpu_ticks(served.pid());
    let (began, spent) = (Instant::now(), used());
    let mut requests = 0;
    wait_until("a second has passed", PATIENCE, || {
        assert!(is_served(&mut resp) && check() == 200);
        requests += 1;
        began.elapsed() > Duration::from_secs(1)
    });
    // There are a hundred ticks per second: the server does not retry in a busy loop.
    assert!(used() - spent < 30, "{} ticks for {requests} requests", used() - spent);
    let logged = |text: &str| served.log().matches(text).count();
    assert_eq!(logged("cannot accept connections"), 2, "once per listener: {}", served.log());
    set_descriptors(&served, 20_000);
    for stream in &mut waiting {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.is_empty(), "the request is answered");
    }
    assert!(counted(&served, "tallygate_accept_errors_total") > 2);
    wait_until("the recovery is logged", PATIENCE, || {
        assert!(is_served(&mut connect(served.resp())));
        assert_eq!(get(served.http(), "/livez").status, 200);
        logged("accepting connections again") == 2
    });
    assert_eq!(logged("cannot accept connections"), 2, "{}", served.log());
}

/// Returns the CPU time of a process, in ticks.
fn cpu_ticks(pid: u32) -> u64 {
    let stat =
        std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("the process is running");
    let fields = stat.rsplit_once(')').expect("there is a name").1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("the value is a number")).sum()
}

/// Fault E16.
#[test]
fn the_soft_descriptor_limit_is_raised_to_the_hard_limit() {
    let served = Served::after("ulimit -Sn 100", &[], None);
    let mut streams: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    assert!(streams.iter_mut().all(is_served));
}

/// Fault E16.
#[test]
fn a_low_descriptor_limit_is_logged_and_bounds_the_connections() {
    let served = Served::after("ulimit -n 100", &[], None);
    // A background thread writes the log.
    wait_until("the warning", PATIENCE, || served.log().contains("leaves room for 36 connections"));
    let mut streams: Vec<_> = (0..100).map(|_| connect(served.resp())).collect();
    assert_eq!(streams.iter_mut().filter_map(|one| is_served(one).then_some(())).count(), 36);
    assert!(!served.log().contains("cannot accept connections"), "the limit was reached");
}
