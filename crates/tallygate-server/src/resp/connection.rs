//! Reading, deciding and writing in step.
//!
//! Everything that has come is decided, then the replies are written, then more is read: whoever does not take replies
//! is not read from, and holds no more memory than two buffers, which are small again once it rests. Decisions of a store across the network run side by
//! side, and their replies go out in the order of the questions.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::{Buf as _, BytesMut};
use futures_util::stream::{FuturesOrdered, StreamExt as _};
use futures_util::{FutureExt as _, future};
use prometheus_client::metrics::histogram::Histogram;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::commands::{self, Ran};
use super::parse::{MAX_COMMAND, Parsed, Parser};
use super::reply::Output;
use super::session::Session;
use crate::config::Limits;
use crate::connection::{Connection, Stop, TURN_BYTES};
use crate::holdings::{HeldBytes, WAITING_BYTES};
use crate::metrics;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::traces::Trace;
use crate::turn::{COMMAND, REPLY_BYTE, Turn};

/// How much is read at a time: less while little comes.
const READ_LEAST: usize = 4 << 10;
const READ_MOST: usize = TURN_BYTES;
/// Replies are written when there are so many bytes of them, before more is decided.
const WRITE_AT: usize = 16 << 10;
/// What a connection keeps of its buffers while it rests. A command that needs more is counted among what its client makes the
/// server hold.
const KEPT: usize = 2 * READ_MOST;
/// What a connection keeps of its replies' buffer while it rests.
const KEPT_OUTPUT: usize = 4 << 10;
/// The longest command of a client that has yet to present a token.
const MAX_UNAUTHENTICATED: usize = 4 << 10;
/// How many commands are looked at before they are carried out.
const AHEAD: usize = 16;
/// How many commands may wait for a store across the network without being counted: their memory is among the buffers of a
/// connection.
const UNCOUNTED: usize = 4;
/// How many waiting commands are counted at a time.
const WAITING_STEP: usize = 16;
/// How long a client that is sent off may go on sending.
const LINGER: Duration = Duration::from_secs(1);

/// The replies that are to come, in order.
type Pending = FuturesOrdered<
    future::Either<std::pin::Pin<Box<dyn Future<Output = Vec<u8>> + Send>>, future::Ready<Vec<u8>>>,
>;

/// Commands that wait for a store, counted among the memory that clients make the server hold.
#[derive(Default)]
struct Waiting {
    held: Option<HeldBytes>,
    /// How many the held bytes are for.
    counted: usize,
}

impl Waiting {
    /// Returns whether one more command may wait besides so many others.
    fn has_room(&mut self, others: usize, session: &Session, limits: &Limits) -> bool {
        if others < UNCOUNTED + self.counted {
            return true;
        }
        let more = WAITING_STEP * WAITING_BYTES;
        let is_room = match &mut self.held {
            Some(held) => held.grow(more, limits),
            None => {
                self.held = session.hold(more, limits);
                self.held.is_some()
            }
        };
        if is_room {
            self.counted += WAITING_STEP;
        }
        is_room
    }
}

/// Serves a connection until either end closes it.
pub(super) async fn serve(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    stop: Stop,
) {
    let latency = shared.gate.metrics.latency("resp");
    let limits = shared.limits();
    let serving = Serving {
        stream,
        input: BytesMut::new(),
        parser: Parser::default(),
        output: Output::default(),
        pending: Pending::new(),
        session: Session::new(shared, peer),
        latency,
        limits,
        begun: None,
        held: None,
        connected: Instant::now(),
    };
    // Whoever went away in the midst of it is not told.
    let _ = serving.run(stop).await;
}

struct Serving {
    stream: Box<dyn Connection>,
    input: BytesMut,
    parser: Parser,
    output: Output,
    pending: Pending,
    session: Session,
    latency: Histogram,
    limits: Limits,
    /// When a command began of which only a part has come.
    begun: Option<Instant>,
    /// What a long command is counted by.
    held: Option<HeldBytes>,
    connected: Instant,
}

impl Serving {
    async fn run(mut self, mut stop: Stop) -> io::Result<()> {
        let mut chunk = READ_LEAST;
        // Made once: it is asked at every read.
        let stopped = async move {
            // If nobody can tell it any more, it is over too.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        tokio::pin!(stopped);
        let mut is_stopping = None;
        loop {
            if !self.has_room() {
                return self.turn_away().await;
            }
            if !self.session.may_check() {
                chunk = READ_LEAST;
            }
            self.input.reserve(chunk);
            let room = self.input.capacity() - self.input.len();
            let deadline = match self.begun {
                Some(begun) => Some(begun + self.limits.head_timeout),
                None => self.limits.idle_timeout.map(|idle| Instant::now() + idle),
            };
            let deadline = [deadline, self.to_authenticate()].into_iter().flatten().min();
            let read = match is_stopping {
                None => tokio::select! {
                    biased;
                    read = self.stream.read_buf(&mut self.input) => read?,
                    () = &mut stopped => {
                        is_stopping = Some(Instant::now());
                        continue;
                    }
                    () = rest(deadline), if deadline.is_some() => return self.send_off().await,
                },
                // What has come is still answered, what has not is not waited for: the sockets are looked at once more.
                Some(since) if since.elapsed() < LINGER => {
                    tokio::task::yield_now().await;
                    // Twice: at the end of a turn nothing is read, whatever has come.
                    let read = self.stream.read_buf(&mut self.input).now_or_never();
                    match read.or_else(|| self.stream.read_buf(&mut self.input).now_or_never()) {
                        Some(read) => read?,
                        None => return self.part().await,
                    }
                }
                Some(_) => return self.part().await,
            };
            if read == 0 {
                return Ok(());
            }
            chunk = if read == room { (2 * chunk).min(READ_MOST) } else { chunk };
            let began = Instant::now();
            self.session.look_up_access();
            let patience = self.to_authenticate();
            let goes_on = Trace::of_batch().follow(self.answer(), |_| None).await?;
            metrics::observe(&self.latency, began.elapsed());
            let is_amid = !self.input.is_empty() || self.parser.is_amid();
            self.begun = self.begun.or(Some(began)).filter(|_| is_amid);
            let written = write(&mut self.stream, &mut self.output.bytes);
            match patience.filter(|_| !self.session.may_check()) {
                Some(patience) => tokio::time::timeout_at(patience.into(), written).await??,
                None => written.await?,
            }
            if !goes_on {
                return self.part().await;
            }
            self.rest_small();
        }
    }

    /// Until when the client has to present a token; `None` if it need not, or has.
    fn to_authenticate(&self) -> Option<Instant> {
        (!self.session.may_check()).then(|| self.connected + self.limits.auth_timeout)
    }

    /// Whether there is room for what has come of a command and for the rest of it.
    fn has_room(&mut self) -> bool {
        if self.input.len() > MAX_UNAUTHENTICATED && !self.session.may_check() {
            return false;
        }
        if self.input.len() > KEPT && self.held.is_none() {
            self.held = self.session.hold(MAX_COMMAND, &self.limits);
            return self.held.is_some();
        }
        true
    }

    /// Gives back what only a large batch needed.
    fn rest_small(&mut self) {
        if self.input.len() <= KEPT {
            self.held = None;
        }
        if self.input.is_empty() && self.input.capacity() > KEPT {
            self.input = BytesMut::new();
        }
        self.output.bytes.shrink_to(KEPT_OUTPUT);
        self.parser.shrink();
    }

    /// Closes the connection of a client whose command there is no room for.
    async fn turn_away(mut self) -> io::Result<()> {
        if self.session.may_check() {
            let why = "the server holds as much as it may of what clients send; retry in 1 s";
            self.output.error("ERR", why);
        } else {
            let why = format_args!(
                "Authentication required: a command before AUTH has at most {MAX_UNAUTHENTICATED} bytes"
            );
            self.output.error("NOAUTH", why);
        }
        write(&mut self.stream, &mut self.output.bytes).await?;
        self.part().await
    }

    /// Answers every command that has come whole; whether the connection goes on.
    async fn answer(&mut self) -> io::Result<bool> {
        let Self { stream, input, parser, output, pending, session, limits, begun, .. } = self;
        let (mut done, mut foreseen) = (0, 0);
        let (mut turn, mut replied) = (Turn::default(), 0);
        let mut waiting = Waiting::default();
        let goes_on = loop {
            if done >= foreseen {
                foreseen = done + foresee(session, parser, &input[done..]);
            }
            let (used, parsed) = parser.next(&input[done..]);
            match parsed {
                Parsed::Command(words) => {
                    *begun = None;
                    turn.spend(COMMAND + REPLY_BYTE * std::mem::take(&mut replied)).await;
                    let before = output.bytes.len();
                    if !pending.is_empty() {
                        let room =
                            if commands::may_overlap(words) { limits.max_pipeline } else { 1 };
                        while pending.len() >= room {
                            take(pending, output).await;
                        }
                        // Without room, the command waits for the ones before it, and nothing more is read.
                        while !waiting.has_room(pending.len(), session, limits) {
                            take(pending, output).await;
                        }
                    }
                    if pending.is_empty() {
                        match commands::run(session, words, output) {
                            Ran::Done => {}
                            Ran::Later(reply) => pending.push_back(future::Either::Left(reply)),
                        }
                    } else {
                        // It waits behind the others.
                        let mut behind = Output::new(output.protocol);
                        pending.push_back(match commands::run(session, words, &mut behind) {
                            Ran::Done => future::Either::Right(future::ready(behind.bytes)),
                            Ran::Later(reply) => future::Either::Left(reply),
                        });
                    }
                    replied = output.bytes.len().saturating_sub(before);
                    if session.is_over {
                        break false;
                    }
                }
                Parsed::Nothing => {}
                Parsed::Incomplete => {
                    done += used;
                    break true;
                }
                Parsed::Wrong(error) => {
                    while !pending.is_empty() {
                        take(pending, output).await;
                    }
                    output.error("ERR", error);
                    if error.closes() {
                        break false;
                    }
                }
            }
            done += used;
            if output.bytes.len() >= WRITE_AT {
                write(stream, &mut output.bytes).await?;
            }
        };
        while !pending.is_empty() {
            take(pending, output).await;
        }
        input.advance(done);
        Ok(goes_on)
    }

    /// Closes the connection of a client that took too long, and says so if it is in the midst of a command.
    async fn send_off(mut self) -> io::Result<()> {
        if let Some(deadline) = self.to_authenticate()
            && deadline <= Instant::now()
        {
            let within = humantime::format_duration(self.limits.auth_timeout);
            let why = format!("Authentication required: no valid token came within {within}");
            self.output.error("NOAUTH", why);
            write(&mut self.stream, &mut self.output.bytes).await?;
        } else if self.begun.is_some() {
            let within = humantime::format_duration(self.limits.head_timeout);
            let told = format!("the rest of the command did not come within {within}");
            self.output.error("ERR", told);
            write(&mut self.stream, &mut self.output.bytes).await?;
        }
        self.part().await
    }

    /// Closes the connection so that what was written arrives: a system that closes on unread bytes takes replies back.
    async fn part(mut self) -> io::Result<()> {
        self.stream.shutdown().await?;
        let mut unread = [0; 1024];
        let drained = async {
            while self.stream.read(&mut unread).await? > 0 {}
            Ok(())
        };
        tokio::time::timeout(LINGER, drained).await.unwrap_or(Ok(()))
    }
}

/// Looks at the next commands, so that what they need is there when they are carried out; how many bytes they have.
fn foresee(session: &Session, parser: &Parser, input: &[u8]) -> usize {
    let (mut scout, mut seen) = (Parser::default(), 0);
    if parser.is_amid() {
        return 0;
    }
    for _ in 0..AHEAD {
        let (used, Parsed::Command(words)) = scout.next(&input[seen..]) else { break };
        commands::prefetch(session.gate(), words);
        seen += used;
    }
    seen
}

/// Waits for a time, or for ever.
async fn rest(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until.into()).await,
        None => future::pending().await,
    }
}

/// Takes the next reply that was waited for.
async fn take(pending: &mut Pending, output: &mut Output) {
    if let Some(reply) = pending.next().await {
        output.bytes.extend_from_slice(&reply);
    }
}

/// Writes all of it, through whatever lies between.
async fn write(
    stream: &mut (impl AsyncWrite + Unpin + ?Sized),
    bytes: &mut Vec<u8>,
) -> io::Result<()> {
    stream.write_all(bytes).await?;
    // What TLS has taken is not yet on its way.
    stream.flush().await?;
    bytes.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_is_written_is_on_its_way_also_where_the_stream_keeps_it_back() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = tokio::io::BufWriter::new(near);
        write(&mut near, &mut b"+PONG\r\n".to_vec()).await.expect("there is room");
        let mut taken = [0; 7];
        let read = far.read_exact(&mut taken).now_or_never().expect("it is there");
        assert_eq!((read.expect("all of it"), &taken), (7, b"+PONG\r\n"));
    }
}
