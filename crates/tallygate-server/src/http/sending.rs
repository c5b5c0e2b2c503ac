//! Replies on their way out: what they hold until they are taken, and who does not take them.
//!
//! Over HTTP/2 each reply waits for a window that its client opens, or never does, while the connection goes on. So
//! replies are counted by when something of them was last taken, in turns of a quarter of the time that a client has: one
//! that is found in too old a turn ends the connection. Over HTTP/1 it is the connection itself that stands still, and
//! `connection/impatient.rs` that notices.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, Bytes};
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::Notify;

use super::Reply;
use crate::holdings::HeldBytes;

/// In how many turns a client's time passes.
const TURNS: u32 = 4;
/// Turns that are told apart: those of a client's time, the one in which it began, and some to spare.
const KEPT: usize = 8;
/// How many turns ago something was taken at the latest of what is too old.
const TOO_OLD: usize = 1 + TURNS as usize;

/// The replies of a connection that are not taken yet, by the turn in which something of them was.
#[derive(Debug, Default)]
pub(super) struct Untaken {
    turn: AtomicUsize,
    by_turn: [AtomicUsize; KEPT],
    first: Notify,
    too_many: Notify,
}

impl Untaken {
    /// There are too many of them.
    pub(super) fn give_up(&self) {
        self.too_many.notify_one();
    }

    /// Waits until something was not taken for so long, or there is too much of it.
    pub(super) async fn neglected(&self, patience: Duration) {
        tokio::select! {
            () = self.too_many.notified() => {}
            () = self.grow_old(patience) => {}
        }
    }

    async fn grow_old(&self, patience: Duration) {
        // Without a reply there is nothing to look for.
        self.first.notified().await;
        loop {
            tokio::time::sleep(patience / TURNS).await;
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

/// A reply among those that are not taken.
#[derive(Debug)]
struct Place {
    among: Arc<Untaken>,
    turn: AtomicUsize,
}

impl Place {
    fn new(among: Arc<Untaken>) -> Self {
        let turn = AtomicUsize::new(among.enter());
        among.first.notify_one();
        Self { among, turn }
    }

    /// Something was taken.
    fn renew(&self) {
        let turn = self.among.enter();
        self.among.leave(self.turn.swap(turn, Ordering::Relaxed));
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.among.leave(*self.turn.get_mut());
    }
}

/// What is held for a reply before it is made: one that tells what was charged is not to find that there is no room.
#[derive(Clone, Debug)]
pub(super) struct Reserved(Arc<HeldBytes>);

impl Reserved {
    pub(super) fn new(held: HeldBytes) -> Self {
        Self(Arc::new(held))
    }

    /// What a reply brings with it.
    pub(super) fn of(reply: &mut Reply) -> Option<HeldBytes> {
        let Self(held) = reply.extensions_mut().remove()?;
        Arc::into_inner(held)
    }
}

/// Marks a reply that an operator needs during an attack. It is held in a reserve, so that clients who hold all of
/// `max_held_bytes` do not keep it back.
#[derive(Clone, Copy, Debug)]
pub(super) struct ForOperators;

impl ForOperators {
    /// Returns whether a reply is marked, and removes the mark.
    pub(super) fn of(reply: &mut Reply) -> bool {
        reply.extensions_mut().remove::<Self>().is_some()
    }
}

/// The body of a reply. It is handed on piece by piece: to copy megabytes at once would hold up others.
#[derive(Debug)]
pub(super) struct Sending {
    bytes: Bytes,
    until_taken: Option<Arc<UntilTaken>>,
}

/// How much of a body is handed on at a time.
const PIECE_BYTES: usize = 16 * 1024;

/// What a reply keeps until its last piece is taken.
#[derive(Debug)]
struct UntilTaken {
    place: Option<Place>,
    _held: [Option<HeldBytes>; 2],
}

/// A piece of a body that is not taken yet.
#[derive(Debug)]
pub(super) struct Piece {
    bytes: Bytes,
    of: Option<Arc<UntilTaken>>,
}

impl Sending {
    /// A body, counted among those that are not taken where it can wait by itself.
    pub(super) fn new(
        bytes: Bytes,
        held: [Option<HeldBytes>; 2],
        among: Option<&Arc<Untaken>>,
    ) -> Self {
        let is_counted = among.is_some() || held.iter().any(Option::is_some);
        let until_taken = (!bytes.is_empty() && is_counted).then(|| {
            let place = among.cloned().map(Place::new);
            Arc::new(UntilTaken { place, _held: held })
        });
        Self { bytes, until_taken }
    }
}

impl Body for Sending {
    type Data = Piece;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Piece>, Infallible>>> {
        let length = self.bytes.len().min(PIECE_BYTES);
        if length == 0 {
            return Poll::Ready(None);
        }
        let bytes = self.bytes.split_to(length);
        // The last piece takes it along.
        let of =
            if self.bytes.is_empty() { self.until_taken.take() } else { self.until_taken.clone() };
        Poll::Ready(Some(Ok(Frame::data(Piece { bytes, of }))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.len() as u64)
    }
}

impl Buf for Piece {
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

    const PATIENCE: Duration = Duration::from_secs(8);

    /// How long it takes until somebody is found to take nothing, in seconds.
    async fn noticed_after(untaken: &Untaken) -> u64 {
        let began = tokio::time::Instant::now();
        untaken.neglected(PATIENCE).await;
        began.elapsed().as_secs()
    }

    fn unsent(untaken: &Arc<Untaken>, bytes: &'static [u8]) -> Piece {
        let mut sending = Sending::new(Bytes::from_static(bytes), [None, None], Some(untaken));
        next(&mut sending).expect("a body")
    }

    fn next(sending: &mut Sending) -> Option<Piece> {
        let mut context = Context::from_waker(std::task::Waker::noop());
        match Pin::new(sending).poll_frame(&mut context) {
            Poll::Ready(frame) => frame.map(|frame| match frame {
                Ok(frame) => frame.into_data().expect("data"),
                Err(never) => match never {},
            }),
            Poll::Pending => panic!("it is all there"),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn e6_a_reply_that_nobody_takes_is_noticed_whatever_the_others_do() {
        let untaken = Arc::new(Untaken::default());
        let _stalled = unsent(&untaken, b"stalled");
        let others = tokio::spawn({
            let untaken = untaken.clone();
            async move {
                loop {
                    let mut other = unsent(&untaken, b"taken");
                    tokio::time::sleep(Duration::from_secs(1)).await;
                    other.advance(5);
                }
            }
        });
        assert_eq!(noticed_after(&untaken).await, 10);
        others.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn a_reply_that_is_taken_bit_by_bit_is_waited_for() {
        let untaken = Arc::new(Untaken::default());
        let mut slow = unsent(&untaken, &[0; 20]);
        let taking = tokio::spawn(async move {
            while slow.has_remaining() {
                tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
                slow.advance(1);
            }
        });
        tokio::select! {
            () = untaken.neglected(PATIENCE) => panic!("it takes something each time"),
            taken = taking => taken.expect("it took all"),
        }
        assert!(untaken.by_turn.iter().all(|count| count.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn a_large_reply_is_handed_on_in_pieces_and_held_until_the_last_is_taken() {
        let untaken = Arc::new(Untaken::default());
        let body: Vec<u8> = (0..=u8::MAX).cycle().take(100_000).collect();
        let mut sending = Sending::new(Bytes::from(body.clone()), [None, None], Some(&untaken));
        let waiting =
            || -> usize { untaken.by_turn.iter().map(|count| count.load(Ordering::Relaxed)).sum() };
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
