//! Replies that are being sent: counts their memory until the client has read them, and detects clients that do not
//! read.
//!
//! Over HTTP/2, a single reply can wait for its flow-control window forever, while the connection continues. So unread
//! replies are counted by the time of their last progress, in intervals of a quarter of the write timeout. A reply in
//! too old an interval aborts the connection. Over HTTP/1, the whole connection stops, and
//! `connection/write_deadline.rs` detects it.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::HeaderMap;
use hyper::body::{Body as HttpBody, Frame, SizeHint};
use hyper::http::Extensions;
use tokio::sync::Notify;
use tonic::body::Body;

use crate::client_budgets::HeldBytes;

/// The number of intervals in a write timeout.
const TURNS: u32 = 4;
/// The number of intervals that are distinguished: those of a timeout, the current one, and a reserve.
const KEPT: usize = 8;
/// The age, in intervals, at which a reply has timed out.
const TOO_OLD: usize = 1 + TURNS as usize;

/// The unread replies of a connection, by the interval of their last progress.
#[derive(Debug, Default)]
pub(super) struct UnreadReplies {
    turn: AtomicUsize,
    by_turn: [AtomicUsize; KEPT],
    first: Notify,
    too_many: Notify,
}

impl UnreadReplies {
    /// Aborts the connection at once.
    pub(super) fn abort(&self) {
        self.too_many.notify_one();
    }

    /// Waits until a reply made no progress for `timeout`, or the connection is aborted.
    pub(super) async fn wait_for_timeout(&self, timeout: Duration) {
        tokio::select! {
            () = self.too_many.notified() => {}
            () = self.wait_until_stale(timeout) => {}
        }
    }

    async fn wait_until_stale(&self, timeout: Duration) {
        // Without a reply there is nothing to time out.
        self.first.notified().await;
        loop {
            tokio::time::sleep(timeout / TURNS).await;
            let turn = self.turn.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
            let old = turn.wrapping_sub(TOO_OLD) % KEPT;
            if self.by_turn[old].load(Ordering::Relaxed) > 0 {
                return;
            }
        }
    }

    fn enter(&self) -> usize {
        let turn = self.turn.load(Ordering::Relaxed);
        self.by_turn[turn % KEPT].fetch_add(1, Ordering::Relaxed);
        turn
    }

    fn leave(&self, turn: usize) {
        self.by_turn[turn % KEPT].fetch_sub(1, Ordering::Relaxed);
    }
}

/// An unread reply.
#[derive(Debug)]
struct UnreadReply {
    among: Arc<UnreadReplies>,
    turn: AtomicUsize,
}

impl UnreadReply {
    fn new(among: Arc<UnreadReplies>) -> Self {
        let turn = AtomicUsize::new(among.enter());
        among.first.notify_one();
        Self { among, turn }
    }

    /// Notes progress.
    fn renew(&self) {
        let turn = self.among.enter();
        self.among.leave(self.turn.swap(turn, Ordering::Relaxed));
    }
}

impl Drop for UnreadReply {
    fn drop(&mut self) {
        self.among.leave(*self.turn.get_mut());
    }
}

/// Memory that is reserved before a reply is made, so that a reply about charged requests always fits.
#[derive(Clone, Debug)]
pub(super) struct ReservedBytes(Arc<HeldBytes>);

impl ReservedBytes {
    pub(super) fn new(held: HeldBytes) -> Self {
        Self(Arc::new(held))
    }

    /// Takes the reserved memory from a reply.
    pub(super) fn of(reply: &mut Extensions) -> Option<HeldBytes> {
        let Self(held) = reply.remove()?;
        Arc::into_inner(held)
    }
}

/// Marks a reply that an operator needs during an attack. A reserve holds it, even if clients use all of
/// `max_buffer_bytes`.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperatorReply;

impl OperatorReply {
    /// Returns whether a reply is marked, and removes the mark.
    pub(super) fn of(reply: &mut Extensions) -> bool {
        reply.remove::<Self>().is_some()
    }
}

/// The content of a reply.
pub(crate) enum Content {
    /// All of it, and the trailers after it.
    Whole(Bytes, Option<HeaderMap>),
    /// A stream of gRPC messages, and trailers at its end.
    Stream(Body),
}

/// The memory of a stream: the buffers of tonic in both directions, and a frame of the client.
const STREAM_BYTES: usize = 2 * 8 * 1024 + 16 * 1024;

impl Content {
    /// Returns the memory that the content takes until the client has read it.
    pub(super) fn held_bytes(&self) -> usize {
        match self {
            Self::Whole(bytes, _) => bytes.len(),
            Self::Stream(_) => STREAM_BYTES,
        }
    }
}

impl From<Bytes> for Content {
    fn from(bytes: Bytes) -> Self {
        Self::Whole(bytes, None)
    }
}

/// The body of a reply. It is sent in chunks: copying megabytes at once would delay other tasks.
#[derive(Debug)]
pub(super) struct ReplyBody {
    bytes: Bytes,
    hold: Option<Arc<ReplyHold>>,
    tail: Option<Tail>,
}

/// What follows the bytes of a body.
#[derive(Debug)]
enum Tail {
    Trailers(Box<HeaderMap>),
    Stream(Box<StreamTail>),
}

#[derive(Debug)]
struct StreamTail {
    messages: Body,
    /// Counts each message among the unread replies until it is read. The stream itself may be silent for long.
    among: Option<Arc<UnreadReplies>>,
    /// What the stream holds until its end.
    _held: [Option<HeldBytes>; 2],
}

/// The size of a chunk.
const PIECE_BYTES: usize = 16 * 1024;

/// What a reply holds until its last chunk is written.
#[derive(Debug)]
struct ReplyHold {
    place: Option<UnreadReply>,
    _held: [Option<HeldBytes>; 2],
}

/// A chunk of a body that is not written yet.
#[derive(Debug)]
pub(super) struct BodyChunk {
    bytes: Bytes,
    of: Option<Arc<ReplyHold>>,
}

impl ReplyBody {
    /// Creates a body. `among` counts it among the unread replies of an HTTP/2 connection.
    pub(super) fn new(
        content: Content,
        held: [Option<HeldBytes>; 2],
        among: Option<&Arc<UnreadReplies>>,
    ) -> Self {
        let (bytes, trailers) = match content {
            Content::Whole(bytes, trailers) => (bytes, trailers),
            Content::Stream(messages) => {
                let stream = StreamTail { messages, among: among.cloned(), _held: held };
                let tail = Some(Tail::Stream(Box::new(stream)));
                return Self { bytes: Bytes::new(), hold: None, tail };
            }
        };
        let has_own_budget = among.is_some() || held.iter().any(Option::is_some);
        let hold = (!bytes.is_empty() && has_own_budget).then(|| {
            let place = among.cloned().map(UnreadReply::new);
            Arc::new(ReplyHold { place, _held: held })
        });
        Self { bytes, hold, tail: trailers.map(|trailers| Tail::Trailers(Box::new(trailers))) }
    }

    /// Returns the next message, or the trailers.
    fn poll_tail(&mut self, cx: &mut Context<'_>) -> Poll<Option<Frame<BodyChunk>>> {
        let Some(Tail::Stream(stream)) = &mut self.tail else {
            return Poll::Ready(match self.tail.take() {
                Some(Tail::Trailers(trailers)) => Some(Frame::trailers(*trailers)),
                _ => None,
            });
        };
        // tonic turns failures into trailers.
        let frame = ready!(Pin::new(&mut stream.messages).poll_frame(cx)).and_then(Result::ok);
        let chunk = |bytes| {
            let place = stream.among.clone().map(UnreadReply::new);
            let of =
                place.map(|place| Arc::new(ReplyHold { place: Some(place), _held: [None, None] }));
            BodyChunk { bytes, of }
        };
        Poll::Ready(frame.map(|frame| frame.map_data(chunk)))
    }
}

impl HttpBody for ReplyBody {
    type Data = BodyChunk;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<BodyChunk>, Infallible>>> {
        let length = self.bytes.len().min(PIECE_BYTES);
        if length == 0 {
            return self.poll_tail(cx).map(|frame| frame.map(Ok));
        }
        let bytes = self.bytes.split_to(length);
        // The last chunk takes the hold with it.
        let of = if self.bytes.is_empty() { self.hold.take() } else { self.hold.clone() };
        Poll::Ready(Some(Ok(Frame::data(BodyChunk { bytes, of }))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty() && self.tail.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        match &self.tail {
            None => SizeHint::with_exact(self.bytes.len() as u64),
            Some(_) => SizeHint::default(),
        }
    }
}

impl Buf for BodyChunk {
    fn remaining(&self) -> usize {
        self.bytes.len()
    }

    fn chunk(&self) -> &[u8] {
        &self.bytes
    }

    fn advance(&mut self, taken: usize) {
        self.bytes.advance(taken);
        if let Some(place) = self.of.as_ref().and_then(|of| of.place.as_ref()) {
            place.renew();
        }
        if self.bytes.is_empty() {
            self.of = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(8);

    /// Returns the seconds until a timeout is detected.
    async fn seconds_until_timeout(unread: &UnreadReplies) -> u64 {
        let began = tokio::time::Instant::now();
        unread.wait_for_timeout(TIMEOUT).await;
        began.elapsed().as_secs()
    }

    fn unsent(unread: &Arc<UnreadReplies>, bytes: &'static [u8]) -> BodyChunk {
        let mut sending =
            ReplyBody::new(Bytes::from_static(bytes).into(), [None, None], Some(unread));
        next(&mut sending).expect("a body")
    }

    fn next(sending: &mut ReplyBody) -> Option<BodyChunk> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        match Pin::new(sending).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| match frame {
                Ok(frame) => frame.into_data().expect("data"),
                Err(never) => match never {},
            }),
            Poll::Pending => panic!("it is all there"),
        }
    }

    /// Fault E6.
    #[tokio::test(start_paused = true)]
    async fn an_unread_reply_is_noticed_whatever_other_streams_do() {
        let unread = Arc::new(UnreadReplies::default());
        let _stalled = unsent(&unread, b"stalled");
        let others = tokio::spawn({
            let unread = unread.clone();
            async move {
                loop {
                    let mut other = unsent(&unread, b"taken");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    other.advance(5);
                }
            }
        });
        assert_eq!(seconds_until_timeout(&unread).await, 10);
        others.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_that_is_read_slowly_is_sent_to_its_end() {
        let unread = Arc::new(UnreadReplies::default());
        let mut slow = unsent(&unread, &[0; 20]);
        let taking = tokio::spawn(async move {
            while slow.has_remaining() {
                tokio::time::sleep(TIMEOUT - Duration::from_secs(1)).await;
                slow.advance(1);
            }
        });
        tokio::select! {
            () = unread.wait_for_timeout(TIMEOUT) => panic!("it takes something each time"),
            taken = taking => taken.expect("it took all"),
        }
        assert!(unread.by_turn.iter().all(|count| count.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_large_reply_is_handed_on_in_pieces_and_held_until_the_last_is_taken() {
        let unread = Arc::new(UnreadReplies::default());
        let body: Vec<u8> = (0..=u8::MAX).cycle().take(100_000).collect();
        let mut sending =
            ReplyBody::new(Bytes::from(body.clone()).into(), [None, None], Some(&unread));
        let waiting =
            || -> usize { unread.by_turn.iter().map(|count| count.load(Ordering::Relaxed)).sum() };
        let (mut taken, mut pieces) = (Vec::new(), 0);
        while let Some(mut piece) = next(&mut sending) {
            assert_eq!(waiting(), 1);
            assert!(piece.remaining() <= PIECE_BYTES);
            taken.extend_from_slice(piece.chunk());
            assert_eq!(sending.size_hint().exact(), Some((body.len() - taken.len()) as u64));
            piece.advance(piece.remaining());
            pieces += 1;
        }
        assert_eq!((taken, pieces), (body, 100_000_usize.div_ceil(PIECE_BYTES)));
        assert_eq!(waiting(), 0, "nothing is left to be taken");
    }
}
