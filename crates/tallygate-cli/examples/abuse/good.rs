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
/// From how many hundredths of a second that others had of it a second counts as disturbed.
const DISTURBED: u64 = 2;
/// For how many times as long it is asked at most, to find seconds that are not.
const MOST_DISTURBED: usize = 5;

// A server that asks for no token takes one all the same: over RESP it answers with an error that nobody reads.
const HTTP: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer the-token-of-the-good-client\r\ncontent-length: 29\r\n\r\n{\"policy\":\"api\",\"key\":\"good\"}";
const RESP: &[u8] = b"TG.CHECK api good\r\n";
const NEW: &[u8] = b"AUTH the-token-of-the-good-client\r\nTG.CHECK api good\r\n";

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

    /// Asks for so many seconds. Those in which the host gave the machine's processors to others tell nothing, and are not
    /// counted; if there are too many of them, some of them are.
    pub(crate) fn watch(&mut self, seconds: usize) -> Result<Watched, Failure> {
        let Self { http, resp } = self;
        let to = resp.to;
        let mut new = || connect(FROM, to, PATIENCE).is_ok_and(|mut stream| ask(&mut stream, NEW));
        let mut asked = [Asked::default(), Asked::default(), Asked::default()];
        let mut calm = 0;
        for second in 0..MOST_DISTURBED * seconds {
            let before = stolen()?;
            let [http, resp, new] = std::thread::scope(|scope| {
                let all = [
                    scope.spawn(|| steadily(EVERY, || http.ask())),
                    scope.spawn(|| steadily(EVERY, || resp.ask())),
                    scope.spawn(|| steadily(NEW_EVERY, &mut new)),
                ];
                all.map(std::thread::ScopedJoinHandle::join)
            });
            let is_calm = stolen()? - before < DISTURBED;
            let too_many = second >= (MOST_DISTURBED - 1) * seconds;
            for (asked, second) in asked.iter_mut().zip([http, resp, new]) {
                let second = second.map_err(|_| "the good client failed")?;
                asked.failed += second.failed;
                if is_calm || too_many {
                    asked.times.extend(second.times);
                }
            }
            calm += usize::from(is_calm || too_many);
            if calm == seconds {
                break;
            }
        }
        let [http, resp, new] = asked.map(Asked::latency);
        Ok(Watched { http, resp, new })
    }
}

impl Kept {
    fn new(to: SocketAddrV4, question: &'static [u8]) -> Self {
        Self { to, question, stream: Self::open(to, question) }
    }

    fn open(to: SocketAddrV4, question: &[u8]) -> Option<TcpStream> {
        let mut stream = connect(FROM, to, PATIENCE).ok()?;
        let is_known = question != RESP || ask(&mut stream, NEW);
        is_known.then_some(stream)
    }

    fn ask(&mut self) -> bool {
        let is_answered = self.stream.as_mut().is_some_and(|stream| ask(stream, self.question));
        if !is_answered {
            self.stream = Self::open(self.to, self.question);
        }
        is_answered
    }
}

/// Asks once; whether it was allowed.
fn ask(stream: &mut TcpStream, question: &[u8]) -> bool {
    let (mut reply, mut filled) = ([0; 1024], 0);
    let is_allowed = |reply: &[u8]| {
        reply.windows(8).any(|part| part == b"*6\r\n:1\r\n")
            || reply.windows(14).any(|part| part == b"\"allowed\":true")
    };
    if stream.write_all(question).is_err() {
        return false;
    }
    loop {
        match stream.read(&mut reply[filled..]) {
            Ok(read @ 1..) => filled += read,
            _ => return false,
        }
        // The reply to `AUTH` may come by itself.
        let is_complete = question != NEW || memchr::memchr(b'*', &reply[..filled]).is_some();
        if is_complete {
            return is_allowed(&reply[..filled]);
        }
    }
}

/// What became of questions.
#[derive(Default)]
struct Asked {
    times: Vec<Duration>,
    failed: usize,
}

impl Asked {
    fn latency(mut self) -> Latency {
        self.times.sort_unstable();
        let last = self.times.len().saturating_sub(1);
        let at =
            |percent: usize| self.times.get((self.times.len() * percent / 100).min(last)).copied();
        let (p50, p99) = (at(50).unwrap_or_default(), at(99).unwrap_or_default());
        Latency { p50, p99, failed: self.failed }
    }
}

/// Asks for a second when it is due, however long the one before took: who is late has waited.
fn steadily(every: Duration, mut ask: impl FnMut() -> bool) -> Asked {
    let (began, mut due) = (Instant::now(), Duration::ZERO);
    let mut asked = Asked::default();
    while due < Duration::from_secs(1) {
        std::thread::sleep(due.saturating_sub(began.elapsed()));
        match ask() {
            true => asked.times.push(began.elapsed().saturating_sub(due)),
            false => asked.failed += 1,
        }
        due += every;
    }
    asked
}

/// How long the host has given this machine's processors to others, in hundredths of a second.
fn stolen() -> Result<u64, Failure> {
    let all = std::fs::read_to_string("/proc/stat")?;
    let stolen = all.split_whitespace().nth(8).ok_or("no times of the processors")?;
    Ok(stolen.parse()?)
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
