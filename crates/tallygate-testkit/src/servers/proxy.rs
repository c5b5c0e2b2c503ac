//! A proxy whose connections fail on demand.
//!
//! The proxy forwards bytes and does not know the protocol, so it also works with TLS. It fails as a network does: lost
//! replies, broken connections, silence, a server that moved.

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
    shared: Arc<SharedState>,
    acceptor: Option<JoinHandle<()>>,
}

impl Proxy {
    /// Starts a proxy in front of `upstream`, such as `127.0.0.1:6379`.
    ///
    /// # Panics
    ///
    /// Panics if there is no free port.
    #[must_use]
    pub fn start(upstream: &str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let address = listener.local_addr().expect("a bound socket has an address");
        let shared = Arc::new(SharedState::default());
        shared.state().upstream = upstream.to_owned();
        let acceptor = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || shared.accept_all(&listener))
        };
        Self { address, shared, acceptor: Some(acceptor) }
    }

    /// Returns `127.0.0.1:port`.
    #[must_use]
    pub fn address(&self) -> String {
        self.address.to_string()
    }

    /// Returns `redis://127.0.0.1:port/`.
    #[must_use]
    pub fn url(&self) -> String {
        format!("redis://{}/", self.address)
    }

    /// Lets the server carry out the next request, and then breaks the client's connection instead of delivering the
    /// reply and any earlier replies that are pending. The client cannot know whether the request was carried out.
    ///
    /// The next request may be the greeting of a client: see [`lose_next_reply_to`](Self::lose_next_reply_to).
    pub fn lose_next_reply(&self) {
        self.lose_next_reply_to("");
    }

    /// Does the same for the next request that contains a word, such as `EVALSHA`, spelled as the client sends it.
    pub fn lose_next_reply_to(&self, word: &str) {
        self.shared.state().to_lose = Some(word.as_bytes().to_owned());
    }

    /// Returns how many replies were lost so far, by [`lose_next_reply`](Self::lose_next_reply) and
    /// [`lose_next_reply_to`](Self::lose_next_reply_to).
    #[must_use]
    pub fn replies_lost(&self) -> usize {
        self.shared.state().replies_lost
    }

    /// Breaks all open connections. New ones are accepted.
    pub fn cut(&self) {
        self.shared.state().lines.clear();
        self.shared.changed.notify_all();
    }

    /// Sets whether the proxy closes new connections immediately. Open ones stay open.
    pub fn reject_connections(&self, is_rejecting: bool) {
        self.shared.state().is_rejecting = is_rejecting;
    }

    /// Sets whether the proxy stalls: it then accepts connections, but forwards nothing until the stall ends.
    pub fn stall(&self, stalled: bool) {
        self.shared.state().stalled = stalled;
        self.shared.changed.notify_all();
    }

    /// Delays every reply by the given time, like a distant server. Requests are forwarded immediately, so the reply has
    /// the delay of the whole round trip. The order of replies stays the same.
    pub fn delay(&self, round_trip: Duration) {
        self.shared.state().round_trip = round_trip;
    }

    /// Connects new connections to another server. Open ones stay: see [`cut`](Self::cut).
    pub fn point_to(&self, upstream: &str) {
        self.shared.state().upstream = upstream.to_owned();
    }

    /// Returns when each connection was accepted, including connections that were rejected.
    #[must_use]
    pub fn connections(&self) -> Vec<Instant> {
        self.shared.state().accepted.clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.state().closing = true;
        self.cut();
        // The accepting thread checks whether to stop when a connection arrives.
        drop(TcpStream::connect(self.address));
        if let Some(acceptor) = self.acceptor.take() {
            drop(acceptor.join());
        }
    }
}

#[derive(Debug, Default)]
struct SharedState {
    state: Mutex<State>,
    /// Notified when something is no longer stalled, or a connection is gone.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    upstream: String,
    closing: bool,
    is_rejecting: bool,
    stalled: bool,
    round_trip: Duration,
    to_lose: Option<Vec<u8>>,
    replies_lost: usize,
    accepted: Vec<Instant>,
    lines: HashMap<usize, Link>,
}

/// The connection of a client and the connection to the server. Dropping it breaks both.
#[derive(Debug)]
struct Link {
    client: TcpStream,
    server: TcpStream,
    loses_reply: bool,
}

impl Drop for Link {
    fn drop(&mut self) {
        drop(self.client.shutdown(Shutdown::Both));
        drop(self.server.shutdown(Shutdown::Both));
    }
}

/// What the proxy does with bytes from a client.
enum Forwarding {
    Deliver,
    DeliverAndLoseReply,
    Gone,
}

impl SharedState {
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
            if state.is_rejecting {
                continue;
            }
            // Under the lock, so that `cut` misses no connection. A loopback address answers immediately.
            let Ok(server) = TcpStream::connect(&state.upstream) else { continue };
            drop((client.set_nodelay(true), server.set_nodelay(true)));
            let clones = (client.try_clone(), server.try_clone());
            let (Ok(from_client), Ok(from_server)) = clones else { continue };
            let clones = (client.try_clone(), server.try_clone());
            let (Ok(to_client), Ok(to_server)) = clones else { continue };
            state.lines.insert(number, Link { client, server, loses_reply: false });
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
                Forwarding::Deliver => {
                    if server.write_all(request).is_err() {
                        break;
                    }
                }
                Forwarding::DeliverAndLoseReply => {
                    drop(server.write_all(request));
                    // The server carries out everything that it received before it closes the connection. Then this
                    // request and all requests before it are done.
                    drop(server.shutdown(Shutdown::Write));
                    return;
                }
                Forwarding::Gone => break,
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

    fn fate_of(&self, number: usize, request: &[u8]) -> Forwarding {
        let mut state = self.unstalled(number);
        let State { to_lose, lines, .. } = &mut *state;
        let Some(line) = lines.get_mut(&number) else { return Forwarding::Gone };
        match to_lose.take_if(|word| contains(request, word)) {
            None => Forwarding::Deliver,
            Some(_) => {
                line.loses_reply = true;
                Forwarding::DeliverAndLoseReply
            }
        }
    }

    /// Returns the state when nothing is stalled or the connection is gone.
    fn unstalled(&self, number: usize) -> MutexGuard<'_, State> {
        self.changed
            .wait_while(self.state(), |state| state.stalled && state.lines.contains_key(&number))
            .unwrap_or_else(PoisonError::into_inner)
    }

    fn hang_up(&self, number: usize) {
        let mut state = self.state();
        if let Some(line) = state.lines.remove(&number) {
            // Count it before the client can see the end of the connection.
            state.replies_lost += usize::from(line.loses_reply);
        }
        self.changed.notify_all();
    }
}

/// Bytes, and the time at which to write them.
type Due = (Instant, Vec<u8>);

/// Writes immediately, or after a delay from its own thread.
struct DelayedWriter {
    stream: TcpStream,
    delayed: Option<(mpsc::Sender<Due>, JoinHandle<()>)>,
}

impl DelayedWriter {
    /// Returns whether the connection still accepts bytes.
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

/// Returns `None` at the end of the stream.
fn read_some<'buffer>(from: &mut TcpStream, buffer: &'buffer mut [u8]) -> Option<&'buffer [u8]> {
    let length = from.read(buffer).ok().filter(|length| *length > 0)?;
    Some(&buffer[..length])
}

fn contains(request: &[u8], word: &[u8]) -> bool {
    word.is_empty() || request.windows(word.len()).any(|part| part == word)
}
