//! The well-behaved client, whose latency must not suffer. It sends requests at a fixed rate and measures each from the time
//! when it was due.

use std::fmt;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::time::{Duration, Instant};

use crate::Failure;
use crate::server::{Server, connect};

/// The address of the client, which differs from that of the attackers.
const FROM: [u8; 4] = [127, 0, 0, 2];
/// The most time for a reply before the request counts as failed.
const PATIENCE: Duration = Duration::from_secs(2);
/// Requests per second over open connections, and over new ones.
const EVERY: Duration = Duration::from_millis(5);
const NEW_EVERY: Duration = Duration::from_millis(50);
/// A second counts as disturbed if the host took at least this many hundredths of it.
const DISTURBED: u64 = 2;
/// The most times as long that a measurement may take, to find undisturbed seconds.
const MOST_DISTURBED: usize = 5;

// The client always sends a token. A server without tokens ignores it; over RESP it replies with an error, which the client
// skips.
const HTTP: &[u8] = b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer the-token-of-the-good-client\r\ncontent-length: 29\r\n\r\n{\"policy\":\"api\",\"key\":\"good\"}";
const RESP: &[u8] = b"TG.CHECK api good\r\n";
const NEW: &[u8] = b"AUTH the-token-of-the-good-client\r\nTG.CHECK api good\r\n";

/// The latencies of the replies, and the number of missing ones.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Latency {
    pub(crate) p50: Duration,
    pub(crate) p99: Duration,
    pub(crate) failed: usize,
}

/// The measurements of a client.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ClientLatencies {
    pub(crate) http: Latency,
    pub(crate) resp: Latency,
    /// A new connection with one request and its reply.
    pub(crate) new: Latency,
}

/// A good client with its open connections.
pub(crate) struct GoodClient {
    http: Connection,
    resp: Connection,
}

/// A connection that is reopened if it is lost.
struct Connection {
    to: SocketAddrV4,
    request: &'static [u8],
    stream: Option<TcpStream>,
}

impl GoodClient {
    pub(crate) fn new(server: &Server) -> Self {
        Self { http: Connection::new(server.http, HTTP), resp: Connection::new(server.resp, RESP) }
    }

    /// Sends requests for a number of seconds. Seconds in which the host gave the processors to other machines do not
    /// count, unless there are too many of them.
    pub(crate) fn watch(&mut self, seconds: usize) -> Result<ClientLatencies, Failure> {
        let Self { http, resp } = self;
        let to = resp.to;
        let mut new = || connect(FROM, to, PATIENCE).is_ok_and(|mut stream| ask(&mut stream, NEW));
        let mut asked =
            [RequestResults::default(), RequestResults::default(), RequestResults::default()];
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
        let [http, resp, new] = asked.map(RequestResults::latency);
        Ok(ClientLatencies { http, resp, new })
    }
}

impl Connection {
    fn new(to: SocketAddrV4, request: &'static [u8]) -> Self {
        Self { to, request, stream: Self::open(to, request) }
    }

    fn open(to: SocketAddrV4, request: &[u8]) -> Option<TcpStream> {
        let mut stream = connect(FROM, to, PATIENCE).ok()?;
        let is_known = request != RESP || ask(&mut stream, NEW);
        is_known.then_some(stream)
    }

    fn ask(&mut self) -> bool {
        let is_answered = self.stream.as_mut().is_some_and(|stream| ask(stream, self.request));
        if !is_answered {
            self.stream = Self::open(self.to, self.request);
        }
        is_answered
    }
}

/// Sends one request and returns whether it was allowed.
fn ask(stream: &mut TcpStream, request: &[u8]) -> bool {
    let (mut reply, mut filled) = ([0; 1024], 0);
    let is_allowed = |reply: &[u8]| {
        reply.windows(8).any(|part| part == b"*6\r\n:1\r\n")
            || reply.windows(14).any(|part| part == b"\"allowed\":true")
    };
    if stream.write_all(request).is_err() {
        return false;
    }
    loop {
        match stream.read(&mut reply[filled..]) {
            Ok(read @ 1..) => filled += read,
            _ => return false,
        }
        // The reply to `AUTH` may arrive separately.
        let is_complete = request != NEW || memchr::memchr(b'*', &reply[..filled]).is_some();
        if is_complete {
            return is_allowed(&reply[..filled]);
        }
    }
}

/// The results of requests.
#[derive(Default)]
struct RequestResults {
    times: Vec<Duration>,
    failed: usize,
}

impl RequestResults {
    fn latency(mut self) -> Latency {
        self.times.sort_unstable();
        let last = self.times.len().saturating_sub(1);
        let at =
            |percent: usize| self.times.get((self.times.len() * percent / 100).min(last)).copied();
        let (p50, p99) = (at(50).unwrap_or_default(), at(99).unwrap_or_default());
        Latency { p50, p99, failed: self.failed }
    }
}

/// Sends the requests of a second when each is due. A late request counts the time since it was due.
fn steadily(every: Duration, mut ask: impl FnMut() -> bool) -> RequestResults {
    let (began, mut due) = (Instant::now(), Duration::ZERO);
    let mut asked = RequestResults::default();
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

/// Returns the time for which the host gave this machine's processors to others, in hundredths of a second.
fn stolen() -> Result<u64, Failure> {
    let all = std::fs::read_to_string("/proc/stat")?;
    let stolen = all.split_whitespace().nth(8).ok_or("/proc/stat has no steal time")?;
    Ok(stolen.parse()?)
}

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {}", shown(self.p50), shown(self.p99))
    }
}

/// Formats a duration in milliseconds.
pub(crate) fn shown(time: Duration) -> String {
    let micros = time.as_micros();
    format!("{}.{:02} ms", micros / 1000, micros % 1000 / 10)
}
