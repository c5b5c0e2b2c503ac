//! Serves a RESP connection: reads, decides and writes, in this order.
//!
//! All received commands are decided, then the replies are written, then more is read. So a client that does not read
//! its replies is not read from, and uses no more memory than two buffers, which shrink when the connection is idle.
//! Commands that wait for a remote store run concurrently; their replies keep the order of the commands.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::stream::{FuturesOrdered, StreamExt as _};
use futures_util::{FutureExt as _, future};
use tallygate_lab::duration::DurationText;
use tokio::io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};

use super::commands::{self, CommandResult};
use super::parse::{Arguments, MAX_COMMAND, Parsed, Parser, ProtocolError};
use super::reply::Output;
use super::session::Session;
use super::transaction::Transaction;
use crate::client_budgets::{HeldBytes, WAITING_BYTES};
use crate::config::Limits;
use crate::connection::{Connection, Stop, TURN_BYTES};
use crate::metrics::Latency;
use crate::peer::Peer;
use crate::shared::Shared;
use crate::traces::Trace;
use crate::turn::{COMMAND, REPLY_BYTE, TimeSlice};

/// How much is read at a time: less while the client sends little.
const READ_LEAST: usize = 4 << 10;
const READ_MOST: usize = TURN_BYTES;
/// Replies are written before more is decided when they have this many bytes.
const WRITE_AT: usize = 16 << 10;
/// The size of the input buffer of an idle connection. A command that is longer is counted in the budget of its client
/// before the buffer grows.
const KEPT: usize = 2 * READ_MOST;
/// The size of the output buffer of an idle connection.
const KEPT_OUTPUT: usize = 4 << 10;
/// The longest command of a client that has not presented a token yet.
const MAX_UNAUTHENTICATED: usize = 4 << 10;
/// How many commands may wait for a remote store without being counted: the buffers of a connection cover their memory.
const UNCOUNTED: usize = 4;
/// How many waiting commands are counted at a time.
const WAITING_STEP: usize = 16;
/// How long a connection that is being closed is still read.
const LINGER: Duration = Duration::from_secs(1);

/// The pending replies, in order.
type Pending = FuturesOrdered<
    future::Either<std::pin::Pin<Box<dyn Future<Output = Vec<u8>> + Send>>, future::Ready<Vec<u8>>>,
>;

/// The counted memory of commands that wait for a store.
#[derive(Default)]
struct WaitingCommands {
    held: Option<HeldBytes>,
    /// The number of commands that the bytes cover.
    counted: usize,
}

impl WaitingCommands {
    /// Returns whether one more command may wait in addition to `others`.
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

/// Runs the commands of a batch. Their replies keep the order of the commands.
struct Batch<'a> {
    output: &'a mut Output,
    pending: &'a mut Pending,
    session: &'a mut Session,
    limits: &'a Limits,
    waiting: WaitingCommands,
    turn: TimeSlice,
    /// The length of the last reply.
    replied: usize,
}

impl Batch<'_> {
    /// Runs a command. Returns the commands of an `EXEC`, which the caller runs next.
    async fn run(&mut self, words: Arguments<'_>) -> Option<Box<Transaction>> {
        self.turn.spend(COMMAND + REPLY_BYTE * std::mem::take(&mut self.replied)).await;
        let before = self.output.bytes.len();
        if !self.pending.is_empty() {
            let room = if commands::may_overlap(words) { self.limits.max_pipeline } else { 1 };
            while self.pending.len() >= room {
                self.take().await;
            }
            // Without room, the command waits for the earlier ones, and nothing more is read.
            while !self.waiting.has_room(self.pending.len(), self.session, self.limits) {
                self.take().await;
            }
        }
        let mut transaction = None;
        if self.pending.is_empty() {
            match commands::run(self.session, words, self.output) {
                CommandResult::Done => {}
                CommandResult::Later(reply) => self.pending.push_back(future::Either::Left(reply)),
                CommandResult::Execute(commands) => transaction = Some(commands),
            }
        } else {
            // The reply waits for the earlier ones. `EXEC` does not overlap them, so it is not here.
            let mut behind = Output::new(self.output.protocol);
            self.pending.push_back(match commands::run(self.session, words, &mut behind) {
                CommandResult::Later(reply) => future::Either::Left(reply),
                CommandResult::Done | CommandResult::Execute(_) => {
                    future::Either::Right(future::ready(behind.bytes))
                }
            });
        }
        self.replied = self.output.bytes.len().saturating_sub(before);
        transaction
    }

    /// Waits for the next pending reply.
    async fn take(&mut self) {
        if let Some(reply) = self.pending.next().await {
            self.output.bytes.extend_from_slice(&reply);
        }
    }

    /// Waits for all pending replies.
    async fn finish(&mut self) {
        while !self.pending.is_empty() {
            self.take().await;
        }
    }

    /// Writes the replies if there are many, before more commands run.
    async fn write_if_long(&mut self, stream: &mut Box<dyn Connection>) -> io::Result<()> {
        if self.output.bytes.len() >= WRITE_AT {
            write(stream, &mut self.output.bytes).await?;
        }
        Ok(())
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
    let serving = RespConnection {
        stream,
        input: Vec::new(),
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
    // Errors mean that the client is gone.
    let _ = serving.run(stop).await;
}

struct RespConnection {
    stream: Box<dyn Connection>,
    input: Vec<u8>,
    parser: Parser,
    output: Output,
    pending: Pending,
    session: Session,
    latency: Arc<Latency>,
    limits: Limits,
    /// When the first part of an incomplete command arrived.
    begun: Option<Instant>,
    /// The counted memory of a long command.
    held: Option<HeldBytes>,
    connected: Instant,
}

impl RespConnection {
    async fn run(mut self, mut stop: Stop) -> io::Result<()> {
        let mut chunk = READ_LEAST;
        // Created once, and polled at every read.
        let stopped = async move {
            // If the sender is gone, shut down as well.
            let _ = stop.wait_for(|stop| *stop).await;
        };
        tokio::pin!(stopped);
        let mut is_stopping = None;
        loop {
            if !self.has_room() {
                return self.reject_command().await;
            }
            if !self.session.may_check() {
                chunk = READ_LEAST;
            }
            // The capacity is counted, not only the length, so a buffer grows by no more than it needs.
            self.input.reserve_exact(chunk);
            let room = self.input.capacity() - self.input.len();
            let deadline = match self.begun {
                Some(begun) => Some(begun + self.limits.head_timeout),
                None => self.limits.idle_timeout.map(|idle| Instant::now() + idle),
            };
            let deadline = [deadline, self.auth_deadline()].into_iter().flatten().min();
            let read = match is_stopping {
                None => tokio::select! {
                    biased;
                    read = self.stream.read_buf(&mut self.input) => read?,
                    () = &mut stopped => {
                        is_stopping = Some(Instant::now());
                        continue;
                    }
                    () = sleep_until(deadline), if deadline.is_some() => return self.close_after_timeout().await,
                },
                // Received commands are still answered, but no more are waited for: poll the socket once more.
                Some(since) if since.elapsed() < LINGER => {
                    tokio::task::yield_now().await;
                    // Twice: at the end of its share of bytes, the stream yields once without reading.
                    let read = self.stream.read_buf(&mut self.input).now_or_never();
                    match read.or_else(|| self.stream.read_buf(&mut self.input).now_or_never()) {
                        Some(read) => read?,
                        None => return self.close().await,
                    }
                }
                Some(_) => return self.close().await,
            };
            if read == 0 {
                return Ok(());
            }
            chunk = if read == room { (2 * chunk).min(READ_MOST) } else { chunk };
            let began = Instant::now();
            self.session.look_up_access();
            let patience = self.auth_deadline();
            let goes_on = Trace::of_batch().follow(self.answer(), |_| None).await?;
            self.latency.observe(began.elapsed());
            let is_within_command = !self.input.is_empty() || self.parser.is_within_command();
            self.begun = self.begun.or(Some(began)).filter(|_| is_within_command);
            let written = write(&mut self.stream, &mut self.output.bytes);
            match patience.filter(|_| !self.session.may_check()) {
                Some(patience) => tokio::time::timeout_at(patience.into(), written).await??,
                None => written.await?,
            }
            if !goes_on {
                return self.close().await;
            }
            self.shrink_buffers();
        }
    }

    /// Returns the deadline for presenting a token; `None` if none is needed.
    fn auth_deadline(&self) -> Option<Instant> {
        (!self.session.may_check()).then(|| self.connected + self.limits.auth_timeout)
    }

    /// Returns whether the buffers have room for the current command.
    fn has_room(&mut self) -> bool {
        if self.input.len() > MAX_UNAUTHENTICATED && !self.session.may_check() {
            return false;
        }
        if self.input.len() > KEPT && self.held.is_none() {
            self.held = self.session.hold(MAX_COMMAND, &self.limits);
            if self.held.is_some() {
                self.input.reserve_exact(MAX_COMMAND - KEPT);
            }
            return self.held.is_some();
        }
        true
    }

    /// Returns memory that only a large batch needed.
    fn shrink_buffers(&mut self) {
        if self.input.is_empty() && self.input.capacity() > KEPT {
            self.input = Vec::new();
        }
        if self.input.len() <= KEPT {
            // The start of the next command may be left in a buffer that the last one needed.
            if self.input.capacity() > KEPT + READ_MOST {
                self.input = small_copy(&self.input);
            }
            self.held = None;
        }
        self.output.bytes.shrink_to(KEPT_OUTPUT);
        self.parser.shrink();
    }

    /// Closes the connection of a client whose command does not fit into the buffers.
    async fn reject_command(mut self) -> io::Result<()> {
        if self.session.may_check() {
            let why = "the request and response buffers are full; retry in 1 s";
            self.output.error("ERR", why);
        } else {
            let why = format_args!(
                "Authentication required: before AUTH, a command must have at most {MAX_UNAUTHENTICATED} bytes"
            );
            self.output.error("NOAUTH", why);
        }
        write(&mut self.stream, &mut self.output.bytes).await?;
        self.close().await
    }

    /// Answers all complete commands. Returns whether the connection continues.
    async fn answer(&mut self) -> io::Result<bool> {
        let Self { stream, input, parser, output, pending, session, limits, begun, .. } = self;
        let mut done = 0;
        let mut batch = Batch {
            output,
            pending,
            session,
            limits,
            waiting: WaitingCommands::default(),
            turn: TimeSlice::default(),
            replied: 0,
        };
        let goes_on = loop {
            let gate = batch.session.gate();
            parser.look_ahead(&input[done..], |words| commands::prefetch(gate, words));
            let (used, parsed) = parser.next(&input[done..]);
            match parsed {
                Parsed::Command(words) => {
                    *begun = None;
                    if let Some(transaction) = batch.run(words).await {
                        for words in transaction.commands() {
                            let _ = batch.run(words).await;
                            batch.write_if_long(stream).await?;
                        }
                    }
                    if batch.session.is_over {
                        break false;
                    }
                }
                Parsed::Nothing => {}
                Parsed::Incomplete => {
                    done += used;
                    break true;
                }
                Parsed::Wrong(error) => {
                    batch.finish().await;
                    match error {
                        ProtocolError::Http => batch.output.http_error(error),
                        _ => batch.output.error("ERR", error),
                    }
                    batch.session.break_transaction();
                    if error.closes() {
                        break false;
                    }
                }
            }
            done += used;
            batch.write_if_long(stream).await?;
        };
        batch.finish().await;
        input.drain(..done);
        Ok(goes_on)
    }

    /// Closes the connection after a timeout, with an error if a command is incomplete.
    async fn close_after_timeout(mut self) -> io::Result<()> {
        if let Some(deadline) = self.auth_deadline()
            && deadline <= Instant::now()
        {
            let within = DurationText(self.limits.auth_timeout);
            let why = format!("Authentication required: no valid token arrived within {within}");
            self.output.error("NOAUTH", why);
            write(&mut self.stream, &mut self.output.bytes).await?;
        } else if self.begun.is_some() {
            let within = DurationText(self.limits.head_timeout);
            let message = format!("the rest of the command did not arrive within {within}");
            self.output.error("ERR", message);
            write(&mut self.stream, &mut self.output.bytes).await?;
        }
        self.close().await
    }

    /// Closes the connection so that the replies arrive: a close with unread bytes would reset the connection.
    async fn close(mut self) -> io::Result<()> {
        self.stream.shutdown().await?;
        let mut unread = [0; 1024];
        let drained = async {
            while self.stream.read(&mut unread).await? > 0 {}
            Ok(())
        };
        tokio::time::timeout(LINGER, drained).await.unwrap_or(Ok(()))
    }
}

/// Copies the start of a command into a small buffer. To shrink the large one would leave a gap that no other fits.
fn small_copy(input: &[u8]) -> Vec<u8> {
    let mut small = Vec::with_capacity(KEPT);
    small.extend_from_slice(input);
    small
}

/// Waits until a time; forever if there is none.
async fn sleep_until(until: Option<Instant>) {
    match until {
        Some(until) => tokio::time::sleep_until(until.into()).await,
        None => future::pending().await,
    }
}

/// Writes and flushes all bytes.
async fn write(
    stream: &mut (impl AsyncWrite + Unpin + ?Sized),
    bytes: &mut Vec<u8>,
) -> io::Result<()> {
    stream.write_all(bytes).await?;
    // TLS may have buffered the bytes.
    stream.flush().await?;
    bytes.clear();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn written_bytes_are_flushed_through_a_buffering_stream() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = tokio::io::BufWriter::new(near);
        write(&mut near, &mut b"+PONG\r\n".to_vec()).await.expect("there is room");
        let mut taken = [0; 7];
        let read = far.read_exact(&mut taken).now_or_never().expect("it is there");
        assert_eq!((read.expect("all of it"), &taken), (7, b"+PONG\r\n"));
    }
}
