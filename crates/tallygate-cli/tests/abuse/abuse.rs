//! Clients that mean harm: whatever one of them does, memory stays bounded, the others are served, and it is ended.

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

/// Long enough for a busy machine; nobody waits for it unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(20);
/// A client that was sent nothing for so long is taken to be sent nothing more.
const QUIET: Duration = Duration::from_millis(300);

const POLICY: &str = "[policies.api]\nlimit = 1\nwindow = \"1000h\"\nburst = 50\n";
const CHECK: &str = r#"{"policy":"api","key":"alice"}"#;
/// A scenario whose report is some megabytes.
const LARGE: &str = r#"{"rate_per_minute":60000,"duration_ms":10000}"#;

fn served(limits: &str) -> Served {
    Served::start(&[], Some(&format!("{POLICY}[limits]\n{limits}")))
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// A connection from another address of this machine.
fn connect_from(from: [u8; 4], address: &str) -> TcpStream {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let stream = runtime.expect("a runtime").block_on(async {
        let socket = tokio::net::TcpSocket::new_v4().expect("a socket");
        socket.bind(SocketAddr::from((Ipv4Addr::from(from), 0))).expect("an address");
        socket.connect(address.parse().expect("an address")).await.expect("it listens").into_std()
    });
    let stream = stream.expect("a socket");
    stream.set_nonblocking(false).expect("a socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
    stream
}

/// Whether a RESP connection is served, or closed upon.
fn is_served(stream: &mut TcpStream) -> bool {
    let mut pong = [0; 7];
    stream.write_all(b"PING\r\n").is_ok()
        && stream.read_exact(&mut pong).is_ok()
        && &pong == b"+PONG\r\n"
}

/// A count of the metrics, as somebody else is told them: who attacks may hold too much for that.
fn counted(served: &Served, name: &str) -> u64 {
    let mut stream = connect_from([127, 0, 0, 9], served.http());
    let request = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
    stream.write_all(request).expect("it reads");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("text");
    let line = metrics.lines().find_map(|line| line.strip_prefix(name));
    line.expect("a count").trim().parse().expect("a number")
}

const GIVEN_UP: &str = "tallygate_connections_given_up_total";
const REFUSED: &str = "tallygate_connections_refused_total{reason=\"memory\"}";

/// Writes the same again and again, each time cut off in its midst, and reads nothing; how much was taken until
/// nothing more was, or the connection was closed. All the while the server may hold so much more.
fn flood(served: &Served, stream: &mut TcpStream, request: &[u8], most_kib: u64) -> usize {
    let before = served.resident_kib();
    let piece = request.repeat((256 << 10) / request.len() + 1);
    stream.set_nonblocking(true).expect("a socket");
    let (mut sent, mut moved) = (0, Instant::now());
    while moved.elapsed() < QUIET {
        let from = sent % request.len();
        // All but the end of the last one.
        match stream.write(&piece[from..piece.len() - request.len() / 2]) {
            Ok(taken) => (sent, moved) = (sent + taken, Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => break,
        }
        let grown = served.resident_kib().saturating_sub(before);
        assert!(grown < most_kib, "{grown} KiB after {sent} bytes of one client");
        assert!(sent < 256 << 20, "it reads whatever comes");
    }
    stream.set_nonblocking(false).expect("a socket");
    sent
}

#[test]
fn e3_a_pipeline_over_http1_is_answered_in_step() {
    let served = served("");
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n";
    let mut stream = connect(served.http());
    flood(&served, &mut stream, request, 16 << 10);
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
    // It goes on when it reads.
    let (mut piece, mut read) = (vec![0; 1 << 20], 0);
    while read < 16 << 20 {
        read += stream.read(&mut piece).expect("more replies");
    }
}

#[test]
fn e3_a_reply_does_not_wait_for_the_rest_of_the_next_request() {
    let served = served("");
    let mut client = Client::connect(served.http());
    let whole = "GET /livez HTTP/1.1\r\nhost: t\r\n\r\n";
    client.write(format!("{whole}{whole}GET /livez HT").as_bytes()).expect("it reads");
    for _ in 0..2 {
        assert_eq!(client.read().expect("a reply").status, 200);
    }
    client.write(b"TP/1.1\r\nhost: t\r\n\r\n").expect("it reads");
    assert_eq!(client.read().expect("a reply").status, 200);
}

#[test]
fn e12_who_never_reads_is_given_up_over_http1() {
    let served = served("write_timeout = \"100ms\"\n");
    let request = b"GET /openapi.json HTTP/1.1\r\nhost: t\r\n\r\n";
    let mut stream = connect(served.http());
    flood(&served, &mut stream, request, 16 << 10);
    wait_until("its end", PATIENCE, || counted(&served, GIVEN_UP) == 1);
    assert!(has_ended(&mut stream));
}

#[test]
fn e12_who_never_reads_is_given_up_over_resp() {
    let served = served("write_timeout = \"100ms\"\n");
    let mut stream = connect(served.resp());
    flood(&served, &mut stream, b"PING\r\n", 4 << 10);
    wait_until("its end", PATIENCE, || counted(&served, GIVEN_UP) == 1);
    assert!(has_ended(&mut stream));
}

/// Reads all that was on its way; whether the connection was closed then.
fn has_ended(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    stream
        .read_to_end(&mut rest)
        .map_or_else(|error| error.kind() != ErrorKind::WouldBlock, |_| true)
}

/// A connection of HTTP/2 that was greeted with some settings.
fn connect_http2(served: &Served, settings: &[(u16, u32)]) -> TcpStream {
    let mut stream = connect(served.http());
    stream.write_all(&http2::hello(settings)).expect("it reads");
    stream
}

/// The next frame: its kind and what is in it; `None` after the last.
fn next_frame(stream: &mut TcpStream) -> Option<(u8, Vec<u8>)> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).ok()?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    let mut payload = vec![0; usize::try_from(length).expect("small")];
    stream.read_exact(&mut payload).ok()?;
    Some((head[3], payload))
}

/// Why the server ends a connection, if it says so before it does.
fn farewell(stream: &mut TcpStream) -> Option<u32> {
    while let Some((kind, payload)) = next_frame(stream) {
        if kind == kind::GOAWAY {
            return Some(u32::from_be_bytes(payload[4..8].try_into().expect("four bytes")));
        }
    }
    None
}

#[test]
fn e12_who_never_reads_is_given_up_over_http2() {
    let served = served("write_timeout = \"100ms\"\n");
    // Windows are no obstacle: it is the connection that is full.
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0x7fff_ffff)]);
    stream
        .write_all(&frame(kind::WINDOW_UPDATE, 0, 0, &0x7fff_0000_u32.to_be_bytes()))
        .expect("it reads");
    for id in 0..200 {
        stream.write_all(&http2::request(2 * id + 1, "/openapi.json", None)).expect("it reads");
    }
    wait_until("its end", PATIENCE, || counted(&served, GIVEN_UP) == 1);
    assert!(has_ended(&mut stream));
    let mut stream = connect_http2(&served, &[]);
    let ping = frame(kind::PING, 0, 0, b"12345678");
    flood(&served, &mut stream, &ping, 4 << 10);
    wait_until("its end", PATIENCE, || counted(&served, GIVEN_UP) == 2);
}

/// What the server may hold of bodies and replies; an address has a quarter.
const HELD: &str = "max_held_bytes = 16777216\n";

#[test]
fn e6_replies_that_no_window_takes_are_held_up_to_a_bound_and_given_up() {
    let served = served(&format!("{HELD}write_timeout = \"2s\"\n"));
    assert!(post(served.http(), "/v1/simulate", LARGE).body.len() > 1 << 20, "it is large");
    let before = served.peak_kib();
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    for id in 0..64 {
        let request = http2::request(2 * id + 1, "/v1/simulate", Some(LARGE.as_bytes()));
        stream.write_all(&request).expect("it reads");
    }
    // All are answered: with what they asked for, or with why not.
    let mut heads = 0;
    while heads < 64 {
        let (kind, _) = next_frame(&mut stream).expect("it is open");
        heads += u32::from(kind == kind::HEADERS);
    }
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 48 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
    assert!(farewell(&mut stream).is_none(), "nobody listens");
    assert_eq!(counted(&served, GIVEN_UP), 1);
    // What it held is there for others.
    let simulated = || post(served.http(), "/v1/simulate", LARGE).status == 200;
    wait_until("room", PATIENCE, simulated);
}

/// Holds bodies that lack their end, until a list of questions finds no room for its reply.
fn fill(served: &Served, sizes: &[usize], questions: usize) -> Vec<TcpStream> {
    let begin = |bytes: usize| {
        let mut stream = connect(served.http());
        let head = format!("POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: {bytes}\r\n\r\n");
        stream.write_all(head.as_bytes()).expect("it reads");
        stream.write_all(&vec![b' '; bytes - 1]).expect("it reads");
        stream
    };
    let mut held: Vec<_> = sizes.iter().copied().map(begin).collect();
    wait_until("all to be held", PATIENCE, || {
        // One that came while a list was being answered may have found no room.
        for (stream, bytes) in held.iter_mut().zip(sizes) {
            if is_told(stream) {
                *stream = begin(*bytes);
            }
        }
        post(served.http(), "/v1/peek", &list(questions)).status == 503
    });
    held
}

/// Whether a client was sent something, or closed upon.
fn is_told(stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("a socket");
    let is_told = stream.peek(&mut [0]).is_ok();
    stream.set_nonblocking(false).expect("a socket");
    is_told
}

/// As many questions about one client.
fn list(questions: usize) -> String {
    let questions = vec![r#"{"policy":"api","key":"listed"}"#; questions];
    format!(r#"{{"checks":[{}]}}"#, questions.join(","))
}

/// A list whose reply finds no room is refused before it is charged for.
#[test]
fn a_long_reply_has_its_room_before_anything_is_charged() {
    let served = served(HELD);
    let before = remaining(served.http(), "api", "listed");
    // Some 150 KB of the share are left.
    let held = fill(&served, &[1 << 20, 1 << 20, 1 << 20, 900_000], 1000);
    let asked = |verb| post(served.http(), verb, &list(1000)).status;
    assert_eq!(asked("/v1/check"), 503);
    drop(held);
    wait_until("room", PATIENCE, || asked("/v1/peek") == 200);
    assert_eq!(remaining(served.http(), "api", "listed"), before);
    assert_eq!(asked("/v1/check"), 200);
}

/// A request of HTTP/2 that there is no room for ends its connection, and is not decided.
#[test]
fn a_stream_without_room_is_not_charged() {
    let served = served(HELD);
    let before = remaining(served.http(), "api", "alice");
    // Nothing of the share is left.
    let mut stream = connect_http2(&served, &[]);
    assert!(next_frame(&mut stream).is_some(), "it has the 128 KiB of a connection");
    let held = fill(&served, &[1 << 20, 1 << 20, 1 << 20, (1 << 20) - (128 << 10)], 40);
    stream.write_all(&http2::request(1, "/v1/check", Some(CHECK.as_bytes()))).expect("it reads");
    assert!(farewell(&mut stream).is_none());
    drop(held);
    wait_until("room", PATIENCE, || counted(&served, GIVEN_UP) == 1);
    assert_eq!(remaining(served.http(), "api", "alice"), before);
}

/// What is sent is not held any more, however long a connection rests.
#[test]
fn connections_that_rest_after_large_replies_hold_nothing() {
    let served = served(HELD);
    // Each has a fifth of the share; a quarter of all is one address's.
    let clients: Vec<_> = (0..8)
        .map(|number| {
            let mut client = Client::connect(served.http());
            client.send("POST /v1/peek", &[], list(4_000).as_bytes());
            let reply = client.read().expect("a reply");
            assert_eq!(reply.status, 200, "of connection {number}");
            client
        })
        .collect();
    assert_eq!(clients.len(), 8);
}

#[test]
fn long_commands_are_held_up_to_a_bound() {
    let served = served(HELD);
    // 4 MiB are an address's, which are 32 commands of up to 128 KiB.
    let begun = [b"*2\r\n$4\r\nECHO\r\n$65000\r\n".as_slice(), &[b'x'; 40_000]].concat();
    let mut streams: Vec<_> = (0..64).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(&begun).expect("it reads");
    }
    // The others are told something only when their command is whole.
    wait_until("half to be turned away", PATIENCE, || {
        streams.iter().filter(|stream| is_told(stream)).count() == 32
    });
    let rest = [[b'x'; 25_000].as_slice(), b"\r\n"].concat();
    let (away, mut let_in): (Vec<_>, Vec<_>) = streams.into_iter().partition(is_told);
    for mut stream in away {
        let mut told = [0; 4];
        stream.read_exact(&mut told).expect("it is told");
        assert_eq!(&told, b"-ERR");
    }
    for stream in &mut let_in {
        stream.write_all(&rest).expect("it reads");
        let mut told = vec![0; 65_000 + 10];
        stream.read_exact(&mut told).expect("its echo");
        assert!(told.starts_with(b"$65000\r\nxx"));
    }
    // What they held is there for others, though they are still connected.
    let mut next = connect(served.resp());
    next.write_all(&[&begun[..], &rest].concat()).expect("it reads");
    next.read_exact(&mut [0; 65_000]).expect("its echo");
}

#[test]
fn connections_that_rest_after_long_commands_hold_little() {
    const CLIENTS: u64 = 300;
    let served = served("");
    let command = [b"*2\r\n$4\r\nECHO\r\n$65000\r\n".as_slice(), &[b'x'; 65_000], b"\r\n"].concat();
    let ask = || {
        let mut stream = connect(served.resp());
        stream.write_all(&command).expect("it reads");
        stream.read_exact(&mut vec![0; 65_000 + 10]).expect("its echo");
        // It has rested since.
        assert!(is_served(&mut stream));
        stream
    };
    let first = ask();
    let before = served.resident_kib();
    let streams: Vec<_> = (0..CLIENTS).map(|_| ask()).collect();
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 48 * CLIENTS, "{grown} KiB of {CLIENTS} clients that rest");
    drop((first, streams));
}

#[test]
fn e6_a_small_reply_that_no_window_takes_ends_the_connection() {
    let served = served("write_timeout = \"200ms\"\n");
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    stream.write_all(&http2::request(1, "/livez", None)).expect("it reads");
    assert!(farewell(&mut stream).is_none());
    wait_until("its end", PATIENCE, || counted(&served, GIVEN_UP) == 1);
    // Who opens the window in time is served as long as it likes.
    let mut stream = connect_http2(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    for id in 0..8 {
        let id = 2 * id + 1;
        stream.write_all(&http2::request(id, "/livez", None)).expect("it reads");
        std::thread::sleep(Duration::from_millis(50));
        stream
            .write_all(&frame(kind::WINDOW_UPDATE, 0, id, &6_u32.to_be_bytes()))
            .expect("it reads");
    }
    let mut bodies = 0;
    while bodies < 8 {
        let (kind, payload) = next_frame(&mut stream).expect("it is open");
        bodies += u32::from(kind == kind::DATA && payload == b"alive\n");
    }
    assert_eq!(counted(&served, GIVEN_UP), 1);
}

#[test]
fn e6_streams_that_stand_still_are_held_up_to_a_bound() {
    let served = served(HELD);
    let before = served.resident_kib();
    // 3200 requests whose replies no client reads: about 450 are held. Connections that bring more are closed.
    let mut script = http2::hello(&[(INITIAL_WINDOW_SIZE, 0)]);
    for id in 0..100 {
        script.extend(http2::request(2 * id + 1, "/livez", None));
    }
    let mut streams: Vec<_> = (0..32).map(|_| connect(served.http())).collect();
    for stream in &mut streams {
        let _ = stream.write_all(&script);
    }
    wait_until("the end of most", PATIENCE, || {
        counted(&served, GIVEN_UP) + counted(&served, REFUSED) >= 26
    });
    let grown = served.resident_kib().saturating_sub(before);
    // Until they are given up they are all there, and a build without optimisation has some 16 KiB for each.
    assert!(grown < 3200 * 24, "{grown} KiB for one client");
    wait_until("a place for others", PATIENCE, || {
        post(served.http(), "/v1/check", CHECK).status == 200
    });
}

#[tokio::test]
async fn e6_bodies_on_many_streams_are_held_up_to_a_bound() {
    let served = served(&format!("{HELD}body_timeout = \"2s\"\n"));
    let before = served.peak_kib();
    let stream = tokio::net::TcpStream::connect(served.http()).await.expect("it listens");
    let (client, connection) = h2::client::handshake(stream).await.expect("it speaks HTTP/2");
    tokio::spawn(connection);
    let nearly = Bytes::from(vec![b' '; (1 << 20) - 1]);
    let mut replies = Vec::new();
    for _ in 0..64 {
        let mut client = client.clone().ready().await.expect("it is open");
        let request =
            hyper::Request::post("http://localhost/v1/check").body(()).expect("a request");
        let (reply, mut body) = client.send_request(request, false).expect("it is sent");
        body.send_data(nearly.clone(), false).expect("it is sent");
        replies.push((reply, body));
    }
    let (mut too_many, mut too_late) = (0, 0);
    for (reply, _body) in replies {
        match reply.await.expect("a reply").status().as_u16() {
            503 => too_many += 1,
            408 => too_late += 1,
            status => panic!("{status}"),
        }
    }
    // A quarter of 16 MiB is three bodies that are never whole.
    assert!(too_many >= 60 && too_late <= 4, "{too_many}, {too_late}");
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 32 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
}

#[test]
fn e4_who_takes_requests_back_as_fast_as_it_makes_them_is_ended() {
    let served = served("");
    let before = served.resident_kib();
    let mut stream = connect_http2(&served, &[]);
    let fields = http2::fields(Method::Post, "/v1/check");
    let mut pairs = 0_u32;
    // Requests that never end and are taken back: as many as it lets us make.
    'made: while pairs < 200_000 {
        let mut batch = Vec::new();
        for _ in 0..500 {
            let id = 2 * pairs + 1;
            batch.extend(frame(kind::HEADERS, END_HEADERS, id, &fields));
            batch.extend(http2::reset(id));
            pairs += 1;
        }
        if stream.write_all(&batch).is_err() {
            break 'made;
        }
    }
    assert!(pairs < 200_000, "all were taken");
    // What it did not read may take its last words back.
    assert!(farewell(&mut stream).is_none_or(|reason| reason == ENHANCE_YOUR_CALM));
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
}

#[test]
fn e5_a_head_that_goes_on_for_ever_is_ended() {
    let served = served("");
    let before = served.resident_kib();
    // Fields without end, frames of a byte, frames of none.
    let field = [&[0x40, 1, b'x', 126][..], &[b'y'; 126]].concat();
    for piece in [field.repeat(120), b"\x86".to_vec(), Vec::new()] {
        let mut stream = connect_http2(&served, &[]);
        let block = http2::fields(Method::Get, "/livez");
        stream.write_all(&frame(kind::HEADERS, END_STREAM, 1, &block)).expect("it reads");
        let more = frame(kind::CONTINUATION, 0, 1, &piece);
        let (mut sent, most) = (0, 100_000 * more.len().min(200));
        while sent < most && stream.write_all(&more).is_ok() {
            sent += more.len();
        }
        assert!(sent < most, "all {sent} bytes were taken, {} a frame", more.len());
        let grown = served.resident_kib().saturating_sub(before);
        assert!(grown < 8 << 10, "{grown} KiB for one client");
    }
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
}

#[test]
fn e6_a_field_that_is_named_again_and_again_is_not_unpacked() {
    let served = served("");
    let before = served.peak_kib();
    let mut stream = connect_http2(&served, &[]);
    for id in 0..10 {
        let bomb = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * id + 1, &http2::bomb());
        if stream.write_all(&bomb).is_err() {
            break;
        }
    }
    // Refused stream by stream, or ended.
    let _ = stream.write_all(&http2::request(101, "/livez", None));
    stream.set_read_timeout(Some(QUIET)).expect("a timeout");
    let mut answered = 0;
    while let Some((kind, _)) = next_frame(&mut stream) {
        answered += u32::from(kind == kind::DATA);
    }
    assert!(answered <= 1, "{answered} were answered, and one was no bomb");
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB for one client");
    assert_eq!(post(served.http(), "/v1/check", CHECK).status, 200, "others are served");
}

#[test]
fn a_flood_of_connections_leaves_places_for_other_addresses() {
    let served = served("max_connections = 20\nmax_connections_per_address = 10\n");
    let mut flood: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    assert_eq!(flood.iter_mut().filter_map(|one| is_served(one).then_some(())).count(), 10);
    let mut others: Vec<_> = (0..9).map(|_| connect_from([127, 0, 0, 2], served.resp())).collect();
    assert!(others.iter_mut().all(is_served));
    // The one that is left asks for the counts.
    let mut stream = connect_from([127, 0, 0, 3], served.http());
    stream
        .write_all(b"GET /metrics HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
        .expect("it reads");
    let mut metrics = String::new();
    stream.read_to_string(&mut metrics).expect("a reply");
    assert!(
        metrics.contains("tallygate_connections_refused_total{reason=\"address\"} 190\n"),
        "{metrics}"
    );
    drop(flood);
    wait_until("its places", PATIENCE, || is_served(&mut connect(served.resp())));
}

#[test]
fn a_trusted_proxy_and_a_unix_socket_are_nobodys_address() {
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
        .map(|_| std::os::unix::net::UnixStream::connect(&path).expect("it listens"))
        .collect();
    for one in &mut local {
        one.write_all(b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n").expect("it reads");
        one.read_exact(&mut [0; 15]).expect("a reply");
    }
}

/// What the system lets a process have open.
fn set_descriptors(served: &Served, most: u64) {
    use rustix::process::{Pid, Resource, Rlimit, prlimit};
    let pid = Pid::from_raw(i32::try_from(served.pid()).expect("a process"));
    let limit = Rlimit { current: Some(most), maximum: Some(20_000) };
    prlimit(pid, Resource::Nofile, limit).expect("it is set");
}

#[test]
fn e16_without_descriptors_those_who_are_there_are_served_and_others_later() {
    let served = served("");
    let (mut resp, mut http) = (connect(served.resp()), Client::connect(served.http()));
    let mut check = || {
        http.send("POST /v1/check", &[], CHECK.as_bytes());
        http.read().expect("a reply").status
    };
    assert!(is_served(&mut resp) && check() == 200);
    // Less than there are: what is open stays open, and nothing more is opened.
    set_descriptors(&served, 3);
    // The system takes these in, and nobody fetches them.
    let mut waiting: Vec<_> =
        (0..20).map(|place| connect([served.resp(), served.http()][place % 2])).collect();
    for stream in &mut waiting {
        stream
            .write_all(b"GET /livez HTTP/1.1\r\nhost: t\r\nconnection: close\r\n\r\n")
            .expect("room");
    }
    let used = || cpu_ticks(served.pid());
    let (began, spent) = (Instant::now(), used());
    let mut asked = 0;
    while began.elapsed() < Duration::from_secs(1) {
        assert!(is_served(&mut resp) && check() == 200);
        std::thread::sleep(Duration::from_millis(20));
        asked += 1;
    }
    // A hundred ticks a second: it does not try and try again.
    assert!(used() - spent < 30, "{} ticks for {asked} questions", used() - spent);
    let told = |what: &str| served.log().matches(what).count();
    assert_eq!(told("connections cannot be accepted"), 2, "once a listener: {}", served.log());
    set_descriptors(&served, 20_000);
    for stream in &mut waiting {
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
        assert!(!rest.is_empty(), "it is answered");
    }
    assert!(counted(&served, "tallygate_accept_errors_total") > 2);
    wait_until("a word that it is over", PATIENCE, || {
        assert!(is_served(&mut connect(served.resp())));
        assert_eq!(get(served.http(), "/livez").status, 200);
        told("connections are accepted again") == 2
    });
    assert_eq!(told("accepted"), 4, "{}", served.log());
}

/// How long a process has been at work.
fn cpu_ticks(pid: u32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it runs");
    let fields = stat.rsplit_once(')').expect("a name").1.split_whitespace();
    fields.skip(11).take(2).map(|ticks| ticks.parse::<u64>().expect("a number")).sum()
}

#[test]
fn e16_as_many_descriptors_are_asked_for_as_there_are() {
    let served = Served::after("ulimit -Sn 100", &[], None);
    let mut streams: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    assert!(streams.iter_mut().all(is_served));
}

#[test]
fn e16_more_connections_than_descriptors_are_warned_of_and_refused_in_time() {
    let served = Served::after("ulimit -n 100", &[], None);
    // Nobody waits for the log.
    wait_until("the warning", PATIENCE, || {
        served.log().contains("there are descriptors for 36 connections only")
    });
    let mut streams: Vec<_> = (0..100).map(|_| connect(served.resp())).collect();
    assert_eq!(streams.iter_mut().filter_map(|one| is_served(one).then_some(())).count(), 36);
    assert!(!served.log().contains("cannot be accepted"), "it never came to that");
}
