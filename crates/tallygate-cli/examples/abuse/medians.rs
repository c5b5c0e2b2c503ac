//! Sends the largest accepted requests in a loop and measures the median latency of another client.
//!
//! Each kind is compared with ordinary checks from as many connections, since those compete for the same processors. Every
//! connection sends its next request when it has read the whole reply to the last one. Times without load, with ordinary checks
//! and with the largest requests are measured in turns, a few times, and the smallest median of each counts: other programs on the
//! machine only ever add to it.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tallygate_testkit::http2::{self, END_HEADERS, END_STREAM, frame, kind};

use crate::server::{Server, Store, connect};
use crate::{Failure, good, step_back};

/// The number and the length of measurements of each of the three.
const ROUNDS: usize = 3;
const ROUND: Duration = Duration::from_millis(300);
/// The time for which a load runs before the measurement.
const WARM_UP: Duration = Duration::from_millis(100);
/// The pause of the other client between two checks.
const PAUSE: Duration = Duration::from_millis(1);
/// The number of connections that send the largest requests.
const CONNECTIONS: [usize; 2] = [1, 4];
const PATIENCE: Duration = Duration::from_secs(5);

const ATTACKER: [u8; 4] = [127, 0, 0, 1];
const OTHER: [u8; 4] = [127, 0, 0, 2];

/// Additional policies, whose names are compared with unknown ones.
pub(crate) fn config() -> String {
    let mut config = String::new();
    for number in 0..100 {
        let _ = write!(config, "[policies.policy-number-{number}]\nlimit = 10\nwindow = \"1h\"\n");
    }
    config
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Surface {
    Http,
    Http2,
    Resp,
}

/// A request that is sent repeatedly.
struct Load {
    name: &'static str,
    surface: Surface,
    /// The bytes that are sent at once; over HTTP/2, the requests of one round.
    script: fn(u32) -> Vec<u8>,
}

const fn load(name: &'static str, surface: Surface, script: fn(u32) -> Vec<u8>) -> Load {
    Load { name, surface, script }
}

const LOADS: &[Load] = &[
    load("`all` of 64 items with keys of 4096 bytes", Surface::Http, |_| {
        post(&list("all", 64, 4_096))
    }),
    load("list of 10 000 checks", Surface::Http, |_| post(&list("checks", 10_000, 1))),
    load("list of 240 checks with keys of 4096 bytes", Surface::Http, |_| {
        post(&list("checks", 240, 4_096))
    }),
    load("key of 32 KiB, escaped", Surface::Http, |_| {
        post(&format!(r#"{{"policy":"api","key":"{}"}}"#, r"\u0061".repeat(5_300)))
    }),
    load("body of 1 MiB that is not JSON", Surface::Http, |_| post(&"[".repeat(1 << 20))),
    load("list of 1 MiB without items", Surface::Http, |_| {
        post(&format!(r#"{{"checks":[{}]}}"#, ",".repeat((1 << 20) - 13)))
    }),
    load("head of 60 000 bytes in one field", Surface::Http, |_| {
        get("/livez", &format!("x: {}\r\n", "y".repeat(60_000)))
    }),
    load("head of 60 000 bytes in 90 fields", Surface::Http, |_| {
        let fields: String =
            (0..90).map(|field| format!("x-{field}: {}\r\n", "y".repeat(650))).collect();
        get("/livez", &fields)
    }),
    load("pipeline of 500 checks", Surface::Http, |_| {
        let check = request("POST /v1/check", "", r#"{"policy":"api","key":"attacker"}"#);
        [check.repeat(500), get(LAST, "")].concat()
    }),
    load("the largest fixed reply", Surface::Http, |_| get("/openapi.json", "")),
    load("pipeline of 20 of the largest fixed reply", Surface::Http, |_| {
        [get("/openapi.json", "").repeat(20), get(LAST, "")].concat()
    }),
    load("metrics of 100 policies", Surface::Http, |_| get("/metrics", "")),
    load("pipeline of 20 metrics of 100 policies", Surface::Http, |_| {
        [get("/metrics", "").repeat(20), get(LAST, "")].concat()
    }),
    load("100 streams of checks", Surface::Http2, |first| {
        let check = br#"{"policy":"api","key":"attacker"}"#;
        (0..STREAMS)
            .flat_map(|stream| http2::request(first + 2 * stream, "/v1/check", Some(check)))
            .collect()
    }),
    load("100 streams with heads of 16 KiB", Surface::Http2, |first| {
        // A field of 4000 bytes, four times.
        let mut head = http2::fields(http2::Method::Get, "/livez");
        for _ in 0..4 {
            head.extend_from_slice(&[0x00, 1, b'x', 0x7f, 0xa1, 0x1e]);
            head.extend_from_slice(&[b'y'; 4_000]);
        }
        let head = &head[..];
        (0..STREAMS)
            .flat_map(|stream| {
                frame(kind::HEADERS, END_HEADERS | END_STREAM, first + 2 * stream, head)
            })
            .collect()
    }),
    load("100 streams with heads of 470 fields", Surface::Http2, |first| {
        // Each field is a byte that refers to the dynamic table.
        let mut head = http2::fields(http2::Method::Get, "/livez");
        head.extend_from_slice(&[0x40, 1, b'a', 0]);
        head.resize(head.len() + 470, 0xbe);
        let head = &head[..];
        (0..STREAMS)
            .flat_map(|stream| {
                frame(kind::HEADERS, END_HEADERS | END_STREAM, first + 2 * stream, head)
            })
            .collect()
    }),
    load("pipeline of 1000 checks", Surface::Resp, |_| {
        resp(&"TG.CHECK api attacker\r\n".repeat(1_000))
    }),
    load("pipeline of 1000 throttles with new keys", Surface::Resp, |round| {
        let line = |number| format!("CL.THROTTLE key-{round}-{number} 10 10 3600\r\n");
        resp(&(0..1_000).map(line).collect::<String>())
    }),
    load("pipeline of 200 checks with keys of 4096 bytes", Surface::Resp, |_| {
        resp(&format!("TG.CHECK api {}\r\n", "x".repeat(4_096)).repeat(200))
    }),
    load("20 keys of 64 KiB", Surface::Resp, |_| {
        let key = "x".repeat(64 << 10);
        let length = key.len();
        resp(&format!("*3\r\n$8\r\nTG.CHECK\r\n$3\r\napi\r\n${length}\r\n{key}\r\n").repeat(20))
    }),
    load("10 lines of 32 000 words", Surface::Resp, |_| {
        resp(&format!("{}\r\n", "a ".repeat(32_000)).repeat(10))
    }),
    load("1000 unknown names of 32 bytes", Surface::Resp, |round| {
        let line = |number| format!("TG.CHECK policy-number-{:0>18} k\r\n", round + number);
        resp(&(0..1_000).map(line).collect::<String>())
    }),
    load("1000 unknown names of 250 bytes", Surface::Resp, |_| {
        resp(&format!("TG.CHECK {} k\r\n", "policy-number-".repeat(18)).repeat(1_000))
    }),
    load("1000 replies of COMMAND", Surface::Resp, |_| resp(&"COMMAND\r\n".repeat(1_000))),
    load("1000 replies of INFO", Surface::Resp, |_| resp(&"INFO\r\n".repeat(1_000))),
];

const ORDINARY_HTTP: Load = load("check", Surface::Http, |_| {
    request("POST /v1/check", "", r#"{"policy":"api","key":"attacker"}"#)
});
const ORDINARY_RESP: Load = load("check", Surface::Resp, |_| resp("TG.CHECK api attacker\r\n"));

/// The number of concurrent HTTP/2 requests.
const STREAMS: u32 = 100;
/// The last request of an HTTP pipeline, and the start of its reply.
const LAST: &str = "/the-last-of-a-pipeline";
const LAST_REPLY: &[u8] = b"HTTP/1.1 404 ";
/// The last RESP command, and its reply.
const END: &str = "PING the-end-of-a-round\r\n";
const END_REPLY: &[u8] = b"the-end-of-a-round\r\n";

fn request(method_and_path: &str, fields: &str, body: &str) -> Vec<u8> {
    let length = body.len();
    format!("{method_and_path} HTTP/1.1\r\nhost: localhost\r\n{fields}content-length: {length}\r\n\r\n{body}")
        .into_bytes()
}

fn post(body: &str) -> Vec<u8> {
    request("POST /v1/check", "", body)
}

fn get(path: &str, fields: &str) -> Vec<u8> {
    request(&format!("GET {path}"), fields, "")
}

fn resp(commands: &str) -> Vec<u8> {
    format!("{commands}{END}").into_bytes()
}

/// Returns a list of checks with distinct keys, of the given size in bytes.
fn list(field: &str, count: usize, key_bytes: usize) -> String {
    let items: Vec<_> = (0..count)
        .map(|key| format!(r#"{{"policy":"keys","key":"{key:x<key_bytes$}"}}"#))
        .collect();
    format!(r#"{{"{field}":[{}]}}"#, items.join(","))
}

impl Load {
    /// Returns the ordinary checks for comparison.
    const fn ordinary(&self) -> &'static Self {
        match self.surface {
            Surface::Http | Surface::Http2 => &ORDINARY_HTTP,
            Surface::Resp => &ORDINARY_RESP,
        }
    }

    /// Sends rounds of requests over one connection until the measurement ends.
    fn run(&self, server: &Server, over: &AtomicBool, rounds: &AtomicU64) {
        let to = if self.surface == Surface::Resp { server.resp } else { server.http };
        let same = (self.script)(1);
        let is_same = same == (self.script)(1_001);
        while !over.load(Ordering::Relaxed) {
            let Ok(mut stream) = connect(ATTACKER, to, PATIENCE) else { continue };
            if self.surface == Surface::Http2 {
                let window = (i32::MAX.cast_unsigned() - 0xffff).to_be_bytes();
                let hello = [http2::hello(&[]), frame(kind::WINDOW_UPDATE, 0, 0, &window)].concat();
                if stream.write_all(&hello).is_err() {
                    continue;
                }
            }
            let mut replies = Vec::new();
            for round in 0.. {
                let next = 1 + 2 * STREAMS * round;
                let other = if is_same { None } else { Some((self.script)(next)) };
                let script = other.as_ref().unwrap_or(&same);
                let is_pipeline = memchr::memmem::find(script, LAST.as_bytes()).is_some();
                let is_done = stream.write_all(script).is_ok()
                    && match self.surface {
                        Surface::Http if is_pipeline => {
                            read_until(&mut stream, &mut replies, LAST_REPLY)
                        }
                        Surface::Http => crate::client::read_reply(&mut stream).is_some(),
                        Surface::Http2 => read_streams(&mut stream, &mut replies),
                        Surface::Resp => read_until(&mut stream, &mut replies, END_REPLY),
                    };
                if !is_done || over.load(Ordering::Relaxed) {
                    break;
                }
                rounds.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
}

/// Reads until the given bytes arrive. Returns false at the end of the connection.
fn read_until(stream: &mut TcpStream, replies: &mut Vec<u8>, end: &[u8]) -> bool {
    replies.clear();
    let mut piece = [0; 1 << 16];
    loop {
        let Ok(read @ 1..) = stream.read(&mut piece) else { return false };
        // Earlier bytes cannot contain the text, except for its start.
        replies.drain(..replies.len().saturating_sub(end.len()));
        replies.extend_from_slice(&piece[..read]);
        if memchr::memmem::find(replies, end).is_some() {
            return true;
        }
    }
}

/// Reads frames until every stream of a round has ended.
fn read_streams(stream: &mut TcpStream, unread: &mut Vec<u8>) -> bool {
    let (mut ended, mut piece) = (0, [0; 1 << 16]);
    while ended < STREAMS {
        let mut at = 0;
        while let Some([a, b, c, kind, flags, ..]) = unread.get(at..at + 9) {
            let length = u32::from_be_bytes([0, *a, *b, *c]) as usize;
            if unread.len() < at + 9 + length {
                break;
            }
            match *kind {
                kind::HEADERS | kind::DATA if flags & END_STREAM != 0 => ended += 1,
                kind::RST_STREAM => ended += 1,
                kind::GOAWAY => return false,
                _ => {}
            }
            at += 9 + length;
        }
        unread.drain(..at);
        if ended < STREAMS {
            let Ok(read @ 1..) = stream.read(&mut piece) else { return false };
            unread.extend_from_slice(&piece[..read]);
        }
    }
    true
}

/// The median times of checks of another client over HTTP and RESP.
#[derive(Clone, Copy)]
struct Medians {
    http: Duration,
    resp: Duration,
}

impl Medians {
    const NONE: Self = Self { http: Duration::MAX, resp: Duration::MAX };

    fn least(self, other: Self) -> Self {
        Self { http: self.http.min(other.http), resp: self.resp.min(other.resp) }
    }
}

impl std::fmt::Display for Medians {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}, {}", good::shown(self.http), good::shown(self.resp))
    }
}

/// Measures the medians over one HTTP and one RESP connection, alternately.
fn medians(server: &Server) -> Result<Medians, Failure> {
    let check = request("POST /v1/check", "", r#"{"policy":"api","key":"good"}"#);
    let mut http = connect(OTHER, server.http, PATIENCE)?;
    let mut resp = connect(OTHER, server.resp, PATIENCE)?;
    let mut times = [Vec::new(), Vec::new()];
    let since = Instant::now();
    let mut reply = [0; 4096];
    while since.elapsed() < ROUND {
        let asked = [(&mut http, &check[..]), (&mut resp, b"TG.CHECK api good\r\n")];
        for ((stream, request), times) in asked.into_iter().zip(&mut times) {
            std::thread::sleep(PAUSE);
            let began = Instant::now();
            stream.write_all(request)?;
            // The reply is small and arrives in one read.
            if stream.read(&mut reply)? == 0 {
                return Err("the server closed the connection".into());
            }
            times.push(began.elapsed());
        }
    }
    let [http, resp] = times.map(|mut times| {
        times.sort_unstable();
        times[times.len() / 2]
    });
    Ok(Medians { http, resp })
}

/// Measures the medians under a load, and the rounds of the load per second.
fn under(server: &Server, load: &Load, connections: usize) -> Result<(Medians, u64), Failure> {
    let (over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for _ in 0..connections {
            scope.spawn(|| {
                step_back();
                load.run(server, &over, &rounds);
            });
        }
        std::thread::sleep(WARM_UP);
        let (before, began) = (rounds.load(Ordering::Relaxed), Instant::now());
        let medians = medians(server);
        let done = rounds.load(Ordering::Relaxed) - before;
        let per_second = u128::from(done) * 1_000 / began.elapsed().as_millis().max(1);
        over.store(true, Ordering::Relaxed);
        Ok((medians?, u64::try_from(per_second)?))
    })
}

const HEAD: &str = "\
| in a loop | connections | rounds per second | p50 of another client (HTTP, RESP) without load | with as many ordinary checks | with these | verdict |
|---|---|---|---|---|---|---|
";

/// Measures all kinds. Returns a table and whether each was within its bound.
pub(crate) fn measure(binary: &Path) -> Result<(String, bool), Failure> {
    let server = Server::configured(binary, &[], &config(), &Store::Memory)?;
    let (mut table, mut held) = (String::from(HEAD), true);
    print!("{table}");
    for connections in CONNECTIONS {
        for load in LOADS {
            let (mut quiet, mut ordinary, mut largest) =
                (Medians::NONE, Medians::NONE, Medians::NONE);
            let mut most = 0;
            for _ in 0..ROUNDS {
                quiet = quiet.least(medians(&server)?);
                ordinary = ordinary.least(under(&server, load.ordinary(), connections)?.0);
                let (medians, per_second) = under(&server, load, connections)?;
                largest = largest.least(medians);
                most = most.max(per_second);
            }
            let is_held = |quiet: Duration, ordinary: Duration, largest: Duration| {
                largest <= 2 * quiet.max(ordinary)
            };
            let is_held = is_held(quiet.http, ordinary.http, largest.http)
                && is_held(quiet.resp, ordinary.resp, largest.resp)
                && most > 0;
            held &= is_held;
            let verdict = if is_held { "held" } else { "more than twice" };
            let row = format!(
                "| {} | {connections} | {most} | {quiet} | {ordinary} | {largest} | {verdict} |\n",
                load.name
            );
            print!("{row}");
            table.push_str(&row);
        }
    }
    Ok((table, held))
}
