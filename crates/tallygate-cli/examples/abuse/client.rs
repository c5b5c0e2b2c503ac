//! Connections of attackers and observers, and the ways in which attackers use them.

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{SocketAddrV4, TcpStream};
use std::time::Duration;

use crate::Failure;
use crate::attack::Attempt;
use crate::server::connect;

/// The address of the attackers, if an attack has only one.
pub(crate) const FROM: [u8; 4] = [127, 0, 0, 1];
const PATIENCE: Duration = Duration::from_secs(2);

/// Connects from the address of the attackers.
pub(crate) fn open(to: SocketAddrV4) -> Option<TcpStream> {
    connect(FROM, to, PATIENCE).ok()
}

/// A reply over HTTP.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
}

/// Reads a whole reply. Returns `None` if the connection ends before.
pub(crate) fn read_reply(stream: &mut TcpStream) -> Option<Reply> {
    let (mut reply, mut piece) = (Vec::new(), vec![0; 1 << 16]);
    let (mut status, mut body_from, mut end) = (0, 0, usize::MAX);
    while reply.len() < end {
        let read = stream.read(&mut piece).ok().filter(|read| *read > 0)?;
        reply.extend_from_slice(&piece[..read]);
        if end < usize::MAX {
            continue;
        }
        let Some(head) = memchr::memmem::find(&reply, b"\r\n\r\n") else { continue };
        let fields = String::from_utf8_lossy(&reply[..head]).to_ascii_lowercase();
        status = fields.split(' ').nth(1)?.parse().ok()?;
        let length =
            fields.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse().ok());
        body_from = head + 4;
        end = body_from + length.unwrap_or(0_usize);
    }
    Some(Reply { status, body: String::from_utf8_lossy(&reply[body_from..]).into_owned() })
}

/// Returns the bytes of a request. Each field ends with a line break.
pub(crate) fn request(line: &str, fields: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!("{line} HTTP/1.1\r\n{fields}content-length: {length}\r\n\r\n");
    [head.as_bytes(), body].concat()
}

/// Sends a request over a new connection from an address, and returns the reply.
pub(crate) fn ask(
    from: [u8; 4],
    to: SocketAddrV4,
    line: &str,
    body: &str,
) -> Result<Reply, Failure> {
    let mut stream = connect(from, to, PATIENCE)?;
    stream.write_all(&request(line, "host: localhost\r\n", body.as_bytes()))?;
    read_reply(&mut stream).ok_or_else(|| format!("{line}: no reply").into())
}

/// Returns whether the server has closed a connection from which nothing else is read.
pub(crate) fn is_closed(stream: &TcpStream) -> bool {
    let _ = stream.set_nonblocking(true);
    let looked = stream.peek(&mut [0; 1]);
    let _ = stream.set_nonblocking(false);
    match looked {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Sends a request repeatedly over one connection and reads the replies.
pub(crate) fn http_rounds<B: AsRef<[u8]>>(attempt: &Attempt, path: &str, body: impl Fn(u64) -> B) {
    let mut round = 0;
    while attempt.goes_on() {
        let Ok(mut stream) = connect(attempt.from, attempt.server.http, PATIENCE) else { continue };
        while attempt.goes_on() {
            let request =
                request(&format!("POST {path}"), "host: localhost\r\n", body(round).as_ref());
            round += 1;
            if stream.write_all(&request).is_err() || read_reply(&mut stream).is_none() {
                break;
            }
        }
    }
}

/// Sends generated commands, at most 100 000 per second, and reads the replies without counting them.
pub(crate) fn resp_rounds(attempt: &Attempt, command: impl Fn(u64) -> String) {
    rounds(attempt, 100, Duration::from_millis(1), command);
}

/// Sends generated commands as fast as possible, and reads the replies without counting them.
pub(crate) fn resp_flood(attempt: &Attempt, command: impl Fn(u64) -> String) {
    rounds(attempt, 1_000, Duration::ZERO, command);
}

fn rounds(attempt: &Attempt, size: u64, pause: Duration, command: impl Fn(u64) -> String) {
    let Ok(mut stream) = connect(attempt.from, attempt.server.resp, PATIENCE) else { return };
    let Ok(mut reading) = stream.try_clone() else { return };
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut piece = vec![0; 1 << 16];
            while reading.read(&mut piece).is_ok_and(|read| read > 0) {}
        });
        let mut sent = 0;
        while attempt.goes_on() {
            let script: String = (sent..sent + size).map(&command).collect();
            if stream.write_all(script.as_bytes()).is_err() {
                break;
            }
            sent += size;
            std::thread::sleep(pause);
        }
        let _ = stream.shutdown(std::net::Shutdown::Both);
    });
}

/// Keeps a number of connections open and replaces closed ones, at most 200 per second.
pub(crate) fn keep_open(
    attempt: &Attempt,
    to: SocketAddrV4,
    count: usize,
    begin: impl Fn(&mut TcpStream),
) {
    let mut streams: Vec<Option<TcpStream>> = (0..count).map(|_| None).collect();
    while attempt.goes_on() {
        let mut made = 0;
        for place in &mut streams {
            if place.as_ref().is_none_or(is_closed) && made < 20 && attempt.goes_on() {
                *place = connect(attempt.from, to, PATIENCE).ok().map(|mut stream| {
                    begin(&mut stream);
                    stream
                });
                made += 1;
            }
        }
        attempt.rest(Duration::from_millis(100));
    }
}

/// Writes the same request until the server takes no more.
pub(crate) fn fill(stream: &mut TcpStream, request: &[u8]) {
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

/// A RESP connection whose replies are read.
pub(crate) struct RespClient {
    stream: TcpStream,
    replies: Vec<u8>,
}

impl RespClient {
    /// The lines of a reply to `TG.CHECK`: the length of the list, and six numbers.
    pub(crate) const CHECK: usize = 7;
    /// The lines of a reply to `CL.THROTTLE`: the length of the list, and five numbers.
    pub(crate) const THROTTLE: usize = 6;

    pub(crate) fn connect(from: [u8; 4], to: SocketAddrV4) -> Result<Self, Failure> {
        let stream = connect(from, to, Duration::from_secs(10))?;
        Ok(Self { stream, replies: Vec::new() })
    }

    /// Sends commands and returns the replies, which have this many lines.
    pub(crate) fn exchange(&mut self, commands: &str, lines: usize) -> Result<&[u8], Failure> {
        self.stream.write_all(commands.as_bytes())?;
        self.replies.clear();
        let (mut piece, mut read_lines) = ([0; 1 << 16], 0);
        while read_lines < lines {
            let read = self.stream.read(&mut piece)?;
            if read == 0 {
                return Err("the server closed the connection".into());
            }
            read_lines += memchr::memchr_iter(b'\n', &piece[..read]).count();
            self.replies.extend_from_slice(&piece[..read]);
        }
        Ok(&self.replies)
    }

    /// Sends commands whose replies have any number of lines, and returns the replies.
    pub(crate) fn ask(&mut self, commands: &str) -> Result<String, Failure> {
        const END: &str = "$11\r\nall-is-read\r\n";
        self.stream.write_all(format!("{commands}PING all-is-read\r\n").as_bytes())?;
        self.replies.clear();
        let mut piece = [0; 1 << 16];
        while !self.replies.ends_with(END.as_bytes()) {
            let read = self.stream.read(&mut piece)?;
            if read == 0 {
                return Err("the server closed the connection".into());
            }
            self.replies.extend_from_slice(&piece[..read]);
        }
        let replies = &self.replies[..self.replies.len() - END.len()];
        Ok(String::from_utf8_lossy(replies).into_owned())
    }

    /// Reserves, and returns the id of the reservation, or `None` if it is denied.
    pub(crate) fn reserve(&mut self, words: &str) -> Result<Option<String>, Failure> {
        let reply = self.ask(&format!("TG.RESERVE {words}\r\n"))?;
        Ok(reply.lines().last().filter(|id| id.len() == 32).map(str::to_owned))
    }

    /// Sends commands whose replies have the same number of lines, and returns how many were allowed.
    pub(crate) fn allowed(&mut self, commands: &[String], lines: usize) -> Result<usize, Failure> {
        let replies = self.exchange(&commands.concat(), lines * commands.len())?;
        let allowed: &[u8] = if lines == Self::CHECK { b"*6\r\n:1\r\n" } else { b"*5\r\n:0\r\n" };
        Ok(memchr::memmem::find_iter(replies, allowed).count())
    }
}
