//! The client that must not notice: so many questions a second, each timed from when it was due.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use crate::Failure;
use crate::server::{Server, connect};

/// Where it is, apart from the attackers.
const FROM: [u8; 4] = [127, 0, 0, 2];
/// How long an answer may take before it counts as none.
const PATIENCE: Duration = Duration::from_secs(2);
/// How often it asks over connections that it keeps, and over new ones.
const EVERY: Duration = Duration::from_millis(5);
const NEW_EVERY: Duration = Duration::from_millis(50);

const HTTP: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 29\r\n\r\n{\"policy\":\"api\",\"key\":\"good\"}";
const RESP: &[u8] = b"TOLLGATE.CHECK api good\r\n";

/// How long answers took, and how many there were not.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latency {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) failed: usize,
}

/// What was noticed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watched {
    pub(crate) http: Latency,
    pub(crate) resp: Latency,
    /// A connection, a question and its answer.
    pub(crate) new: Latency,
}

/// A good client, with the connections that it keeps.
pub(crate) struct Good {
    http: Kept,
    resp: Kept,
}

/// A connection that is made again if it is lost.
struct Kept {
    to: SocketAddrV4,
    question: &'static [u8],
    stream: Option<TcpStream>,
}

impl Good {
    pub(crate) fn new(server: &Server) -> Self {
        Self { http: Kept::new(server.http, HTTP), resp: Kept::new(server.resp, RESP) }
    }

    /// Asks for so long.
    pub(crate) fn watch(&mut self, time: Duration) -> Result<Watched, Failure> {
        let Self { http, resp } = self;
        let (failed, to) = (|_| "the good client failed", resp.to);
        std::thread::scope(|scope| {
            let http = scope.spawn(|| steadily(time, EVERY, || http.ask()));
            let resp = scope.spawn(|| steadily(time, EVERY, || resp.ask()));
            let new = scope.spawn(|| {
                steadily(time, NEW_EVERY, || {
                    connect(FROM, to, PATIENCE).is_ok_and(|mut stream| ask(&mut stream, RESP))
                })
            });
            Ok(Watched {
                http: http.join().map_err(failed)?,
                resp: resp.join().map_err(failed)?,
                new: new.join().map_err(failed)?,
            })
        })
    }
}

impl Kept {
    fn new(to: SocketAddrV4, question: &'static [u8]) -> Self {
        Self { to, question, stream: connect(FROM, to, PATIENCE).ok() }
    }

    fn ask(&mut self) -> bool {
        let is_answered = self.stream.as_mut().is_some_and(|stream| ask(stream, self.question));
        if !is_answered {
            self.stream = connect(FROM, self.to, PATIENCE).ok();
        }
        is_answered
    }
}

/// Asks once; whether it was allowed.
fn ask(stream: &mut TcpStream, question: &[u8]) -> bool {
    let mut reply = [0; 1024];
    let is_allowed = |reply: &[u8]| {
        reply.starts_with(b"*6\r\n:1\r\n")
            || reply.windows(14).any(|part| part == b"\"allowed\":true")
    };
    stream.write_all(question).is_ok()
        && stream.read(&mut reply).is_ok_and(|read| is_allowed(&reply[..read]))
}

/// Asks when it is due, however long the one before took: who is late has waited.
fn steadily(time: Duration, every: Duration, mut ask: impl FnMut() -> bool) -> Latency {
    let (began, mut due) = (Instant::now(), Duration::ZERO);
    let (mut times, mut failed) = (Vec::new(), 0);
    while due < time {
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        match ask() {
            true => times.push(began.elapsed().saturating_sub(due)),
            false => failed += 1,
        }
        due += every;
    }
    times.sort_unstable();
    let at = |percent: usize| {
        times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).copied()
    };
    Latency { p50: at(50).unwrap_or_default(), p99: at(99).unwrap_or_default(), failed }
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", shown(self.p50), shown(self.p99))
    }
}

/// In milliseconds.
pub(crate) fn shown(time: Duration) -> String {
    let micros = time.as_micros();
    format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10)
}
