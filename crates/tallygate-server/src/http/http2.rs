//! Bounds the memory that HTTP/2 clients can use before a handler runs.
//!
//! A head that HPACK compresses to a few hundred bytes can take a hundred times as much when it is decoded, and the
//! library decodes all received heads before it delivers the first request. So memory is counted at two places:
//!
//! - [`CountedStream`] sees the bytes of a connection before the library does. After the preface of HTTP/2, it reserves
//!   memory for the head that the library decodes; if the buffers are full, it closes the connection with GOAWAY. It
//!   also closes connections that send long trailers: these use memory like heads, and no handler reads them.
//! - [`head_bytes`] is counted when the library delivers a request, before its handler is scheduled. If the buffers are
//!   full, [`CountedStream`] fails, so that the library delivers no more.
//!
//! In between, all heads of one connection may be decoded at once, but only by the thread that reads the connection: the
//! formula in `docs/operations.md` has a term for it.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, ready};

use hyper::Request;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::Caller;
use crate::client_budgets::HeldBytes;
use crate::config::DECODED_HEAD;
use crate::connection::Connection;
use crate::metrics::ReasonLabels;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const CONTINUATION: u8 = 9;
/// Empty SETTINGS, then GOAWAY with the error `ENHANCE_YOUR_CALM`. No stream was processed, so the client may retry all.
const FAREWELL: [u8; 26] =
    [0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0, 8, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 11];
/// The longest trailers, compressed. A request's own count covers the memory that they take.
const MAX_TRAILERS: usize = 64;
/// How many bytes of HTTP/2 are read before other tasks run: about ten heads.
const TURN_BYTES: usize = 4096;
/// How much of a rejected connection is read before it is closed: a close with unread bytes would reset it, and the
/// client would not see GOAWAY.
const MAX_DRAINED: usize = 64 * 1024;

/// The memory of one field name in a header map, its share of the index and of room to grow included.
const NAME_BYTES: usize = 112;
/// The memory of each further value of a name, with room to grow.
const VALUE_BYTES: usize = 144;

/// Returns the memory that a decoded head takes.
pub(super) fn head_bytes<B>(request: &Request<B>) -> usize {
    let fields = request.headers();
    let text: usize = fields.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    let target = request.uri().path().len() + request.uri().query().map_or(0, str::len);
    fields.capacity() * NAME_BYTES
        + (fields.len() - fields.keys_len()) * VALUE_BYTES
        + text
        + target
}

/// A connection whose incoming bytes are checked before they are decoded.
pub(super) struct CountedStream {
    stream: Box<dyn Connection>,
    caller: Arc<Caller>,
    state: State,
    /// Memory for the head that the library decodes.
    head: Option<HeldBytes>,
    /// How many bytes of HTTP/2 were read since other tasks could run.
    turn: usize,
}

/// The state of a connection.
enum State {
    /// This many bytes of the preface have arrived.
    Preface(usize),
    Http1,
    Http2(Frames),
    /// The connection is being closed. Counts the bytes of GOAWAY that were written, and the received bytes dropped
    /// since.
    Rejected {
        written: usize,
        drained: usize,
    },
}

/// Why a connection is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RejectReason {
    BudgetExceeded,
    LongTrailers,
}

impl CountedStream {
    pub(super) fn new(stream: Box<dyn Connection>, caller: Arc<Caller>) -> Self {
        Self { stream, caller, state: State::Preface(0), head: None, turn: 0 }
    }

    /// Reads some bytes; for HTTP/2, a few at a time, so that the library delivers requests and other tasks run in
    /// between.
    fn poll_turn(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if !matches!(self.state, State::Http2(_)) {
            return Pin::new(&mut self.stream).poll_read(cx, into);
        }
        if self.turn == TURN_BYTES {
            self.turn = 0;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let mut some = [0; TURN_BYTES];
        let length = (TURN_BYTES - self.turn).min(into.remaining());
        let mut some = ReadBuf::new(&mut some[..length]);
        if Pin::new(&mut self.stream).poll_read(cx, &mut some)?.is_pending() {
            self.turn = 0;
            return Poll::Pending;
        }
        self.turn += some.filled().len();
        into.put_slice(some.filled());
        Poll::Ready(Ok(()))
    }

    /// Checks received bytes.
    fn check(&mut self, mut bytes: &[u8]) -> Result<(), RejectReason> {
        if let State::Preface(matched) = &mut self.state {
            let expected = &PREFACE[*matched..];
            let length = expected.len().min(bytes.len());
            if bytes[..length] != expected[..length] {
                self.state = State::Http1;
                return Ok(());
            }
            *matched += length;
            if *matched < PREFACE.len() {
                return Ok(());
            }
            bytes = &bytes[length..];
            let head =
                usize::try_from(self.caller.limits.max_http2_head_bytes).unwrap_or(usize::MAX);
            let held = self.caller.hold(head.saturating_mul(DECODED_HEAD));
            if held.is_none() {
                return Err(RejectReason::BudgetExceeded);
            }
            self.head = held;
            self.state = State::Http2(Frames::default());
        }
        match &mut self.state {
            State::Http2(frames) => frames.check(bytes),
            State::Preface(_) | State::Http1 | State::Rejected { .. } => Ok(()),
        }
    }

    /// Writes GOAWAY, drops received bytes, and fails.
    fn poll_reject(&mut self, cx: &mut Context<'_>) -> Poll<io::Error> {
        let State::Rejected { written, drained } = &mut self.state else {
            return Poll::Ready(io::ErrorKind::InvalidInput.into());
        };
        let mut stream = Pin::new(&mut self.stream);
        while *written < FAREWELL.len() {
            match ready!(stream.as_mut().poll_write(cx, &FAREWELL[*written..])) {
                Ok(0) => return Poll::Ready(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => *written += bytes,
                Err(error) => return Poll::Ready(error),
            }
        }
        if let Err(error) = ready!(stream.as_mut().poll_shutdown(cx)) {
            return Poll::Ready(error);
        }
        while *drained < MAX_DRAINED {
            let mut scratch = [0; 1024];
            let mut scratch = ReadBuf::new(&mut scratch);
            match stream.as_mut().poll_read(cx, &mut scratch) {
                Poll::Ready(Ok(())) if !scratch.filled().is_empty() => {
                    *drained += scratch.filled().len();
                }
                _ => break,
            }
        }
        Poll::Ready(io::Error::other("the buffers are full; closing an HTTP/2 connection"))
    }
}

impl AsyncRead for CountedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if matches!(this.state, State::Rejected { .. }) {
            return this.poll_reject(cx).map(Err);
        }
        if this.caller.is_aborted.load(Ordering::Relaxed) {
            return Poll::Ready(Err(io::Error::other(
                "the buffers are full; rejecting an HTTP/2 request",
            )));
        }
        let before = into.filled().len();
        ready!(this.poll_turn(cx, into))?;
        match this.check(&into.filled()[before..]) {
            Ok(()) => Poll::Ready(Ok(())),
            Err(RejectReason::BudgetExceeded) => {
                let rejected = &this.caller.shared.gate.metrics.connections_rejected;
                rejected.get_or_create(&ReasonLabels { reason: "buffers" }).inc();
                into.set_filled(before);
                this.state = State::Rejected { written: 0, drained: 0 };
                this.poll_reject(cx).map(Err)
            }
            Err(RejectReason::LongTrailers) => Poll::Ready(Err(io::Error::other(format!(
                "the client sent trailers longer than {MAX_TRAILERS} bytes"
            )))),
        }
    }
}

impl AsyncWrite for CountedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, pieces)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

/// The frames of a connection, by their headers.
#[derive(Debug, Default)]
struct Frames {
    header: [u8; FRAME_HEADER],
    filled: usize,
    /// How much of the payload of the current frame has not arrived yet.
    payload: usize,
    /// The newest stream that a head has opened.
    newest: u32,
    /// The length of the trailers that are being sent; `None` if the head of a new stream is.
    trailers: Option<usize>,
}

impl Frames {
    fn check(&mut self, mut bytes: &[u8]) -> Result<(), RejectReason> {
        while !bytes.is_empty() {
            let skipped = self.payload.min(bytes.len());
            self.payload -= skipped;
            bytes = &bytes[skipped..];
            let length = (FRAME_HEADER - self.filled).min(bytes.len());
            self.header[self.filled..self.filled + length].copy_from_slice(&bytes[..length]);
            self.filled += length;
            bytes = &bytes[length..];
            if self.filled == FRAME_HEADER {
                self.filled = 0;
                self.begin()?;
            }
        }
        Ok(())
    }

    /// Starts a frame whose header has arrived.
    fn begin(&mut self) -> Result<(), RejectReason> {
        let [a, b, c, kind, _, stream @ ..] = self.header;
        self.payload = usize::try_from(u32::from_be_bytes([0, a, b, c])).unwrap_or(usize::MAX);
        let stream = u32::from_be_bytes(stream) & (u32::MAX >> 1);
        match kind {
            HEADERS if stream > self.newest => {
                self.newest = stream;
                self.trailers = None;
            }
            HEADERS => self.trailers = Some(self.payload),
            CONTINUATION => {
                self.trailers = self.trailers.map(|length| length.saturating_add(self.payload));
            }
            _ => return Ok(()),
        }
        match self.trailers {
            Some(length) if length > MAX_TRAILERS => Err(RejectReason::LongTrailers),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, stream: u32, length: u8) -> Vec<u8> {
        let mut frame = vec![0, 0, length, kind, 0];
        frame.extend_from_slice(&stream.to_be_bytes());
        frame.extend(std::iter::repeat_n(HEADERS, usize::from(length)));
        frame
    }

    #[test]
    fn long_trailers_are_found_however_the_bytes_arrive() {
        let heads = [frame(HEADERS, 1, 200), frame(HEADERS, 3, 200), frame(0, 1, 99)].concat();
        let short = [heads.clone(), frame(HEADERS, 1, 40), frame(HEADERS, 3, 64)].concat();
        let long = [heads.clone(), frame(HEADERS, 1, 65)].concat();
        let continued = [heads, frame(HEADERS, 1, 40), frame(CONTINUATION, 1, 25)].concat();
        for size in 1..30 {
            let checked = |bytes: &[u8]| {
                let mut frames = Frames::default();
                bytes.chunks(size).try_for_each(|bytes| frames.check(bytes))
            };
            assert_eq!(checked(&short), Ok(()));
            assert_eq!(checked(&long), Err(RejectReason::LongTrailers));
            assert_eq!(checked(&continued), Err(RejectReason::LongTrailers));
        }
    }
}
