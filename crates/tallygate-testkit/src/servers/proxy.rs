//! A connection that fails on demand.
//!
//! A proxy hands bytes on and knows nothing of the protocol, so it also serves TLS. It fails in the
//! ways of a network: lost replies, broken connections, silence, a server that moved.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::mpsc;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A proxy on its own port in front of a server.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    switchboard: Arc<Switchboard>,
    door: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy in front of `upstream`, such as `127.0.0.1:6379`.
    ///
    /// # Panics
    ///
    /// If there is no free port.
    #[must_use]
    pub fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let switchboard = Arc::new(Switchboard::default());
        switchboard.state().upstream = upstream.to_owned();
        let door = {
            let switchboard = Arc::clone(&switchboard);
            thread::spawn(move || switchboard.accept_all(&listener))
        };
        Self { address, switchboard, door: Some(door) }
    }

    /// `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// `redis://127.0.0.1:port/`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Lets the server do the next request, and breaks the client's connection instead of
    /// delivering the reply, and any that were still to come before it. The client cannot know
    /// whether it was done.
    ///
    /// The next request may be a client's greeting: see
    /// [`lose_next_reply_to`](Self::lose_next_reply_to).
    pub fn lose_next_reply(&self) {
        self.lose_next_reply_to("");
    }

    /// The same for the next request that contains a word, in the letters that the client sends:
    /// `EVALSHA`.
    pub fn lose_next_reply_to(&self, word: &str) {
        self.switchboard.state().to_lose = Some(word.as_bytes().to_owned());
    }

    /// How many replies were lost so far, by [`lose_next_reply`](Self::lose_next_reply) and
    /// [`lose_next_reply_to`](Self::lose_next_reply_to).
    #[must_use]
    pub fn replies_lost(&self) -> usize {
        self.switchboard.state().replies_lost
    }

    /// Breaks all present connections. New ones are welcome.
    pub fn cut(&self) {
        self.switchboard.state().lines.clear();
        self.switchboard.changed.notify_all();
    }

    /// While true, new connections are accepted and closed at once. Present ones stay.
    pub fn refuse(&self, refusing: bool) {
        self.switchboard.state().refusing = refusing;
    }

    /// While true, connections are accepted and stay open, and nothing goes through. What was sent
    /// meanwhile goes through afterwards.
    pub fn stall(&self, stalled: bool) {
        self.switchboard.state().stalled = stalled;
        self.switchboard.changed.notify_all();
    }

    /// Delays every reply by the given time, as a server at that distance would. Requests are delivered at once, so the
    /// whole round trip is in the reply. The order of replies stays the same.
    pub fn delay(&self, round_trip: Duration) {
        self.switchboard.state().round_trip = round_trip;
    }

    /// Leads new connections to another server. Present ones stay: see [`cut`](Self::cut).
    pub fn point_to(&self, upstream: &str) {
        self.switchboard.state().upstream = upstream.to_owned();
    }

    /// When each connection so far was accepted, those that were refused included.
    #[must_use]
    pub fn connections(&self) -> Vec<Instant> {
        self.switchboard.state().accepted.clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.switchboard.state().closing = true;
        self.cut();
        // The door sees that it is closing when somebody knocks.
        drop(TcpStream::connect(self.address));
        if let Some(door) = self.door.take() {
            drop(door.join());
        }
    }
}

#[derive(Debug, Default)]
struct Switchboard {
    state: Mutex<State>,
    /// Told when something is no longer stalled, or a line is gone.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    upstream: String,
    closing: bool,
    refusing: bool,
    stalled: bool,
    round_trip: Duration,
    to_lose: Option<Vec<u8>>,
    replies_lost: usize,
    accepted: Vec<Instant>,
    lines: HashMap<usize, Line>,
}

/// A client's connection and ours to the server. Both break when it is dropped.
#[derive(Debug)]
struct Line {
    client: TcpStream,
    server: TcpStream,
    loses_reply: bool,
}

impl Drop for Line {
    fn drop(&mut self) {
        drop(self.client.shutdown(Shutdown::Both));
        drop(self.server.shutdown(Shutdown::Both));
    }
}

/// What becomes of bytes from a client.
enum Fate {
    Deliver,
    DeliverAndLoseReply,
    Gone,
}

impl Switchboard {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn accept_all(self: &Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming().map_while(Result::ok) {
            let mut state = self.state();
            if state.closing {
                return;
            }
            let number = state.accepted.len();
            state.accepted.push(Instant::now());
            if state.refusing {
                continue;
            }
            // Under the lock, so that `cut` misses no line: a loopback address answers at once.
            let Ok(server) = TcpStream::connect(&state.upstream) else { continue };
            drop((client.set_nodelay(true), server.set_nodelay(true)));
            let clones = (client.try_clone(), server.try_clone());
            let (Ok(from_client), Ok(from_server)) = clones else { continue };
            let clones = (client.try_clone(), server.try_clone());
            let (Ok(to_client), Ok(to_server)) = clones else { continue };
            state.lines.insert(number, Line { client, server, loses_reply: false });
            drop(state);
            let up = Arc::clone(self);
            thread::spawn(move || up.carry_requests(number, from_client, to_server));
            let down = Arc::clone(self);
            thread::spawn(move || down.carry_replies(number, from_server, to_client));
        }
    }

    fn carry_requests(&self, number: usize, mut client: TcpStream, mut server: TcpStream) {
        let mut buffer = vec![0; 64 * 1024];
        while let Some(request) = read_some(&mut client, &mut buffer) {
            match self.fate_of(number, request) {
                Fate::Deliver => {
                    if server.write_all(request).is_err() {
                        break;
                    }
                }
                Fate::DeliverAndLoseReply => {
                    drop(server.write_all(request));
                    // The server does what it was sent before it sees the end and hangs up: by then
                    // the request is done, however many were before it.
                    drop(server.shutdown(Shutdown::Write));
                    return;
                }
                Fate::Gone => break,
            }
        }
        self.hang_up(number);
    }

    fn carry_replies(&self, number: usize, mut server: TcpStream, client: TcpStream) {
        let mut buffer = vec![0; 64 * 1024];
        let mut client = DelayedWriter { stream: client, delayed: None };
        while let Some(reply) = read_some(&mut server, &mut buffer) {
            let (loses_reply, round_trip) = {
                let state = self.unstalled(number);
                let Some(line) = state.lines.get(&number) else { break };
                (line.loses_reply, state.round_trip)
            };
            if !loses_reply && !client.write(reply, round_trip) {
                break;
            }
        }
        client.finish();
        self.hang_up(number);
    }

    fn fate_of(&self, number: usize, request: &[u8]) -> Fate {
        let mut state = self.unstalled(number);
        let State { to_lose, lines, .. } = &mut *state;
        let Some(line) = lines.get_mut(&number) else { return Fate::Gone };
        match to_lose.take_if(|word| contains(request, word)) {
            None => Fate::Deliver,
            Some(_) => {
                line.loses_reply = true;
                Fate::DeliverAndLoseReply
            }
        }
    }

    /// The state, once nothing is stalled or the line is gone.
    fn unstalled(&self, number: usize) -> MutexGuard<'_, State> {
        self.changed
            .wait_while(self.state(), |state| state.stalled && state.lines.contains_key(&number))
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn hang_up(&self, number: usize) {
        let mut state = self.state();
        if let Some(line) = state.lines.remove(&number) {
            // Counted before the client can see the end.
            state.replies_lost += usize::from(line.loses_reply);
        }
        self.changed.notify_all();
    }
}

/// Bytes, and when they are to be written.
type Due = (Instant, Vec<u8>);

/// Writes at once, or from a thread of its own after a delay.
struct DelayedWriter {
    stream: TcpStream,
    delayed: Option<(mpsc::Sender<Due>, JoinHandle<()>)>,
}

impl DelayedWriter {
    /// Returns whether the connection still takes bytes.
    fn write(&mut self, bytes: &[u8], delay: Duration) -> bool {
        if self.delayed.is_none() {
            if delay.is_zero() {
                return self.stream.write_all(bytes).is_ok();
            }
            let Ok(mut stream) = self.stream.try_clone() else { return false };
            let (sender, due) = mpsc::channel::<Due>();
            let writer = thread::spawn(move || {
                while let Ok((when, bytes)) = due.recv() {
                    thread::sleep(when.saturating_duration_since(Instant::now()));
                    if stream.write_all(&bytes).is_err() {
                        return;
                    }
                }
            });
            self.delayed = Some((sender, writer));
        }
        let due = (Instant::now() + delay, bytes.to_vec());
        self.delayed.as_ref().is_some_and(|(sender, _)| sender.send(due).is_ok())
    }

    /// Waits until everything is written.
    fn finish(self) {
        if let Some((sender, writer)) = self.delayed {
            drop(sender);
            drop(writer.join());
        }
    }
}

/// None at the end.
fn read_some<'buffer>(from: &mut TcpStream, buffer: &'buffer mut [u8]) -> Option<&'buffer [u8]> {
    let length = from.read(buffer).ok().filter(|length| *length > 0)?;
    Some(&buffer[..length])
}

fn contains(request: &[u8], word: &[u8]) -> bool {
    word.is_empty() || request.windows(word.len()).any(|part| part == word)
}
