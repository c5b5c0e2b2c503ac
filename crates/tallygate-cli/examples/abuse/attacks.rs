//! The attacks on the server, all from one address that is not the good client's.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tallygate_testkit::http2::{
    self, END_HEADERS, END_STREAM, INITIAL_WINDOW_SIZE, Method, frame, kind,
};

use crate::rest;
use crate::server::{Server, connect};

/// An attack that several threads run at once.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) attackers: usize,
    /// The most additional memory of the server during the attack.
    pub(crate) most_mib: u64,
    /// Additional configuration.
    pub(crate) config: &'static str,
    /// Whether other clients can connect during the attack.
    pub(crate) lets_in: bool,
    pub(crate) run: fn(&Server, usize, &AtomicBool),
}

const fn attack(
    name: &'static str,
    attackers: usize,
    most_mib: u64,
    run: fn(&Server, usize, &AtomicBool),
) -> Attack {
    Attack { name, attackers, most_mib, config: "", lets_in: true, run }
}

/// One address may use 64 MiB of buffers for bodies and replies. Growing buffers take up to twice the size of their
/// contents, and each connection has buffers of its own.
const SHARE_MIB: u64 = 2 * 64 + 32;

pub(crate) const ATTACKS: &[Attack] = &[
    attack("half-open", 1, 64, half_open),
    attack("slow-bodies", 1, 64, slow_bodies),
    attack("endless-bodies", 4, 64, endless_bodies),
    attack("unfinished-bodies", 1, SHARE_MIB, unfinished_bodies),
    attack("http-pipelines-unread", 1, 64, http_pipelines),
    attack("resp-pipelines-unread", 1, 64, resp_pipelines),
    attack("resp-commands", 2, 64, resp_commands),
    attack("http2-closed-windows", 1, SHARE_MIB, closed_windows),
    attack("http2-rapid-reset", 2, 64, rapid_reset),
    attack("http2-continuation", 2, 64, continuation),
    attack("http2-header-bombs", 2, 64, header_bombs),
    attack("http2-pings-unread", 1, 64, pings),
    attack("simulations", 4, 64, simulations),
    attack("connections", 2, 64, connections),
    attack("throttle-numbers", 1, 128, throttle_numbers),
    attack("throttle-years", 1, 16, throttle_years),
    attack("resp-words", 1, 64, resp_words),
    Attack { config: GUARDED, ..attack("unauthenticated", 1, 96, unauthenticated) },
    attack("large-lists", 3, 64, large_lists),
    attack("large-alls", 3, 64, large_alls),
    attack("unknown-names", 1, 16, unknown_names),
    attack("reservations", 1, 128, reservations),
    Attack { config: ADMIN, ..attack("archives", 2, 576, archives) },
    Attack { lets_in: false, ..attack("no-descriptors", 1, 16, no_descriptors) },
];

/// Checks need a token, and an address may have many connections.
const GUARDED: &str =
    "[auth]\ncheck = [\"env:ABUSE_TOKEN\"]\n[limits]\nmax_connections_per_address = 5000\n";
/// The attacker may administer.
const ADMIN: &str = "[admin]\nloopback = true\n";

/// Sends 1000 generated commands per round and reads the replies.
fn resp_rounds(server: &Server, over: &AtomicBool, command: impl Fn(u64) -> String) {
    let Some(mut stream) = open(server.resp) else { return };
    let Ok(mut reading) = stream.try_clone() else { return };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut piece = vec![0; 1 << 16];
            while reading.read(&mut piece).is_ok_and(|read| read > 0) {}
        });
        let mut round = 0;
        while goes_on(over) {
            let script: String = (round..round + 1000).map(&command).collect();
            if stream.write_all(script.as_bytes()).is_err() {
                break;
            }
            round += 1000;
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
}

/// Sends a request repeatedly over one connection and reads the replies.
fn http_rounds<B: AsRef<[u8]>>(
    server: &Server,
    over: &AtomicBool,
    path: &str,
    body: impl Fn(u64) -> B,
) {
    let mut round = 0;
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { return };
        while goes_on(over) {
            let body = body(round);
            round += 1;
            let head = format!(
                "POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\n\r\n",
                body.as_ref().len()
            );
            let sent =
                stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_ref()));
            if sent.is_err() || !read_reply(&mut stream) {
                break;
            }
        }
    }
}

/// Reads a whole reply. Returns whether there was one.
pub(crate) fn read_reply(stream: &mut TcpStream) -> bool {
    let (mut reply, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    let mut missing = usize::MAX;
    while missing > 0 {
        let Ok(read @ 1..) = stream.read(&mut piece) else { return false };
        if missing < usize::MAX {
            missing = missing.saturating_sub(read);
            continue;
        }
        reply.extend_from_slice(&piece[..read]);
        let Some(end) = memchr::memmem::find(&reply, b"\r\n\r\n") else { continue };
        let head = String::from_utf8_lossy(&reply[..end]).to_ascii_lowercase();
        let length =
            head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        missing = length.unwrap_or(0_usize).saturating_sub(reply.len() - end - 4);
    }
    true
}

/// 2000 connections without a token that send the longest possible lines.
fn unauthenticated(server: &Server, _: usize, over: &AtomicBool) {
    let line = format!("{}\r\n", "a ".repeat(1_900)).repeat(4) + &"x".repeat(3_000);
    keep_open(server.resp, 2_000, over, |stream| {
        let _ = stream.write_all(line.as_bytes());
    });
}

/// Lists with the most items.
fn large_lists(server: &Server, place: usize, over: &AtomicBool) {
    let items: Vec<_> =
        (0..10_000).map(|key| format!(r#"{{"policy":"keys","key":"{place}-{key}"}}"#)).collect();
    let body = format!(r#"{{"checks":[{}]}}"#, items.join(","));
    http_rounds(server, over, "/v1/check", |_| &body);
}

/// Uploads compressed logs of two million clients each for a backtest.
fn archives(server: &Server, _: usize, over: &AtomicBool) {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for client in 0..2_000_000_u32 {
        let [_, b, c, d] = client.to_be_bytes();
        let line =
            format!("10.{b}.{c}.{d} - - [16/Nov/2026:06:00:00 +0000] \"GET / HTTP/1.1\" 200 1\n");
        let _ = packed.write_all(line.as_bytes());
    }
    let Ok(packed) = packed.finish() else { return };
    let path = "/v1/backtest?policy=gcra+1/s&policy=sliding_window_log+1000/1h";
    http_rounds(server, over, path, |_| &packed);
}

/// `CL.THROTTLE` with other numbers for every key.
fn throttle_numbers(server: &Server, _: usize, over: &AtomicBool) {
    resp_rounds(server, over, |round| {
        format!("CL.THROTTLE key-{round} {} {} 3600\r\n", round % 991, 1 + round)
    });
}

/// `CL.THROTTLE` with numbers that would need 126 years to refill.
fn throttle_years(server: &Server, _: usize, over: &AtomicBool) {
    resp_rounds(server, over, |round| {
        format!("CL.THROTTLE key-{round} 1000000 1 4000 1000000\r\n")
    });
}

/// 900 connections that send lines of many words, and then nothing.
fn resp_words(server: &Server, _: usize, over: &AtomicBool) {
    let line = format!("{}\r\n", "a ".repeat(32_000));
    keep_open(server.resp, 900, over, |stream| {
        let _ = stream.write_all(line.as_bytes());
    });
}

/// `all` with as many items as fit into a body.
fn large_alls(server: &Server, place: usize, over: &AtomicBool) {
    let items: Vec<_> =
        (0..10_000).map(|key| format!(r#"{{"policy":"keys","key":"{place}-{key}"}}"#)).collect();
    let body = format!(r#"{{"all":[{}]}}"#, items.join(","));
    http_rounds(server, over, "/v1/check", |_| &body);
}

/// Unknown names of policies.
fn unknown_names(server: &Server, _: usize, over: &AtomicBool) {
    resp_rounds(server, over, |round| format!("TG.CHECK {}{round} k\r\n", "apikeys".repeat(30)));
}

/// Reservations with long keys and the longest time to live.
fn reservations(server: &Server, _: usize, over: &AtomicBool) {
    http_rounds(server, over, "/v1/reserve", |round| {
        format!(r#"{{"policy":"keys","key":"{round:x<4000}","ttl_ms":3600000}}"#)
    });
}

const FROM: [u8; 4] = [127, 0, 0, 1];
const PATIENCE: Duration = Duration::from_secs(2);

fn open(to: SocketAddrV4) -> Option<TcpStream> {
    connect(FROM, to, PATIENCE).ok()
}

fn goes_on(over: &AtomicBool) -> bool {
    !over.load(Ordering::Relaxed)
}

/// Returns whether the server has closed a connection from which nothing else is read.
fn is_closed(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    let looked = stream.peek(&mut [0; 1]);
    let _ = stream.set_nonblocking(false);
    match looked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Keeps a number of connections open and replaces closed ones, at most 200 per second.
fn keep_open(to: SocketAddrV4, count: usize, over: &AtomicBool, begin: impl Fn(&mut TcpStream)) {
    let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    while goes_on(over) {
        let mut made = 0;
        for place in &mut streams {
            if place.as_ref().is_none_or(is_closed) && made < 20 {
                *place = open(to).map(|mut stream| {
                    begin(&mut stream);
                    stream
                });
                made += 1;
            }
        }
        rest(over, Duration::from_millis(100));
    }
}

/// 900 connections with a part of a head each.
fn half_open(server: &Server, _: usize, over: &AtomicBool) {
    keep_open(server.http, 900, over, |stream| {
        let _ = stream.write_all(b"GET /livez HTTP/1.1\r\nhost: t\r\nx: ");
    });
}

/// 500 requests whose bodies arrive one byte per second.
fn slow_bodies(server: &Server, _: usize, over: &AtomicBool) {
    let mut streams: Vec<Option<TcpStream>> = (0..500).map(|_| None).collect();
    while goes_on(over) {
        for place in &mut streams {
            let is_lost = place.as_mut().is_none_or(|stream| stream.write_all(b" ").is_err());
            if is_lost {
                *place = open(server.http);
                if let Some(stream) = place {
                    let head =
                        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n";
                    let _ = stream.write_all(head);
                }
            }
        }
        rest(over, Duration::from_secs(1));
    }
}

/// Endless bodies, 25 MB per second each.
fn endless_bodies(server: &Server, _: usize, over: &AtomicBool) {
    let chunk = [b"40000\r\n".as_slice(), &[b' '; 0x4_0000], b"\r\n"].concat();
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { continue };
        let head = b"POST /v1/check HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
        let _ = stream.write_all(head);
        while goes_on(over) && stream.write_all(&chunk).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// 500 incomplete bodies of nearly a megabyte.
fn unfinished_bodies(server: &Server, _: usize, over: &AtomicBool) {
    let body = vec![b' '; (1 << 20) - 1];
    keep_open(server.http, 500, over, |stream| {
        let head = b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 1048576\r\n\r\n";
        let _ = stream.write_all(head).and_then(|()| stream.write_all(&body));
    });
}

/// Writes the same request until the server takes no more.
fn fill(stream: &mut TcpStream, request: &[u8]) {
    let piece = request.repeat((64 << 10) / request.len());
    // Ends in the middle of a request.
    let piece = &piece[..piece.len() - request.len() / 2];
    let _ = stream.set_write_timeout(Some(Duration::from_millis(50)));
    let mut left = 32 << 20;
    while left > 0 {
        match stream.write(piece) {
            Ok(taken) => left -= taken.min(left),
            Err(_) => return,
        }
    }
}

/// 20 connections that request a large reply repeatedly and read none.
fn http_pipelines(server: &Server, _: usize, over: &AtomicBool) {
    keep_open(server.http, 20, over, |stream| {
        fill(stream, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n");
    });
}

/// 20 connections that send requests repeatedly and read no reply.
fn resp_pipelines(server: &Server, _: usize, over: &AtomicBool) {
    keep_open(server.resp, 20, over, |stream| fill(stream, b"TG.CHECK api attacker\r\n"));
}

/// 2 connections that send 1000 requests at a time and read the replies as fast as they arrive.
fn resp_commands(server: &Server, _: usize, over: &AtomicBool) {
    let Some(mut stream) = open(server.resp) else { return };
    let (script, mut piece) = (b"TG.CHECK api attacker\r\n".repeat(1000), vec![0; 1 << 16]);
    while goes_on(over) && stream.write_all(&script).is_ok() {
        let mut lines = 0;
        while lines < 7 * 1000 {
            match stream.read(&mut piece) {
                Ok(read @ 1..) => lines += memchr::memchr_iter(b'\n', &piece[..read]).count(),
                _ => return,
            }
        }
    }
}

/// 50 connections with 250 requests each, for large and small replies, and a flow-control window of 0.
fn closed_windows(server: &Server, _: usize, over: &AtomicBool) {
    let large = br#"{"rate_per_minute":60000,"duration_ms":10000}"#;
    keep_open(server.http, 50, over, |stream| {
        let mut script = http2::hello(&[(INITIAL_WINDOW_SIZE, 0)]);
        for id in 0..250 {
            let (path, body) = if id % 50 == 0 {
                ("/v1/simulate", Some(&large[..]))
            } else {
                ("/openapi.json", None)
            };
            script.extend(http2::request(2 * id + 1, path, body));
        }
        let _ = stream.write_all(&script);
    });
}

/// Requests that are reset at once, at most 10 000 per second and thread.
fn rapid_reset(server: &Server, _: usize, over: &AtomicBool) {
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { continue };
        let _ = stream.write_all(&http2::hello(&[]));
        for turn in 0_u32.. {
            let mut batch = Vec::new();
            for pair in 0..100 {
                let id = 2 * (100 * turn + pair) + 1;
                let fields = http2::fields(Method::Post, "/v1/check");
                batch.extend(frame(kind::HEADERS, END_HEADERS, id, &fields));
                batch.extend(http2::reset(id));
            }
            std::thread::sleep(Duration::from_millis(10));
            if !goes_on(over) || stream.write_all(&batch).is_err() || is_closed(&stream) {
                break;
            }
        }
    }
}

/// Endless heads; a new connection starts when one is closed, at most 500 per second and thread.
fn continuation(server: &Server, place: usize, over: &AtomicBool) {
    let field = [&[0x40, 1, b'x', 126][..], &[b'y'; 126]].concat();
    let piece = if place == 0 { field.repeat(120) } else { Vec::new() };
    let more = frame(kind::CONTINUATION, 0, 1, &piece);
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { continue };
        let head = frame(kind::HEADERS, END_STREAM, 1, &http2::fields(Method::Get, "/livez"));
        let _ = stream.write_all(&http2::hello(&[])).and_then(|()| stream.write_all(&head));
        while goes_on(over) && stream.write_all(&more).is_ok() {}
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Heads of a few bytes that decompress to 32 MB, at most 500 per second and thread.
fn header_bombs(server: &Server, _: usize, over: &AtomicBool) {
    let block = http2::bomb();
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { continue };
        let _ = stream.write_all(&http2::hello(&[]));
        for id in 0.. {
            let bomb = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * id + 1, &block);
            std::thread::sleep(Duration::from_millis(2));
            if !goes_on(over) || stream.write_all(&bomb).is_err() {
                break;
            }
        }
    }
}

/// 20 connections with pings whose replies are not read.
fn pings(server: &Server, _: usize, over: &AtomicBool) {
    keep_open(server.http, 20, over, |stream| {
        let _ = stream.write_all(&http2::hello(&[]));
        fill(stream, &frame(kind::PING, 0, 0, b"12345678"));
    });
}

/// Expensive scenarios, one after another.
fn simulations(server: &Server, _: usize, over: &AtomicBool) {
    let body = r#"{"rate_per_minute":60000,"duration_ms":10000}"#;
    let length = body.len();
    let request = format!(
        "POST /v1/simulate HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    while goes_on(over) {
        let Some(mut stream) = open(server.http) else { continue };
        let _ = stream.write_all(request.as_bytes());
        let mut piece = vec![0; 1 << 16];
        while matches!(stream.read(&mut piece), Ok(1..)) {}
    }
}

/// As many connections as possible, at most 1000 per second and thread; half of them for HTTP.
fn connections(server: &Server, place: usize, over: &AtomicBool) {
    let to = [server.http, server.resp][place % 2];
    let mut kept = Vec::new();
    while goes_on(over) {
        if let Some(mut stream) = open(to) {
            let _ = stream.write_all(b"PING\r\n");
            let _ = stream.set_read_timeout(Some(Duration::from_millis(1)));
            // Accepted connections stay open.
            if !matches!(stream.read(&mut [0; 7]), Ok(0)) && kept.len() < 5_000 {
                kept.push(stream);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The server can open no descriptors for 8 s while 50 connections wait to be accepted.
fn no_descriptors(server: &Server, _: usize, over: &AtomicBool) {
    let set = |most: &str| {
        let pid = server.pid().to_string();
        let _ =
            Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={most}:")]).status();
    };
    set("3");
    let waiting: Vec<_> = (0..50).map(|_| open(server.http)).collect();
    rest(over, Duration::from_secs(8));
    set("10000");
    drop(waiting);
}
