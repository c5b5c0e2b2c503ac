//! A connection that lets others have their turn, however much comes over it.
//!
//! A task that always finds something to read is stopped by the runtime after 128 reads only: a client that sends small
//! things without end would have a thread to itself for tens of milliseconds, and whoever else is served by it waits.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much is read in a turn, about: a read that has begun is not cut short.
pub(crate) const TURN_BYTES: usize = 8 * 1024;

/// A stream that is read turn by turn.
pub(super) struct InTurns<S> {
    stream: S,
    read: usize,
}

impl<S> InTurns<S> {
    pub(super) fn new(stream: S) -> Self {
        Self { stream, read: 0 }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for InTurns<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read >= TURN_BYTES {
            self.read = 0;
            // Not by the waker: who waits for a socket would wait until the runtime looks at sockets of itself.
            return pin!(tokio::task::yield_now()).poll(cx).map(Ok);
        }
        let before = into.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(cx, into);
        self.read = match polled {
            Poll::Ready(_) => self.read + into.filled().len() - before,
            // It waits for more: others have their turn anyway.
            Poll::Pending => 0,
        };
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for InTurns<S> {
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

#[cfg(test)]
mod tests {
    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[tokio::test]
    async fn others_have_their_turn_between_two_of_a_client_that_always_sends() {
        let turns = std::rc::Rc::new(std::cell::Cell::new(0));
        let others = async {
            loop {
                turns.set(turns.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        let mut endless = InTurns::new(EndlessInput);
        let reading = async {
            for _ in 0..100 {
                endless.read_exact(&mut [0; TURN_BYTES]).await.expect("more");
            }
        };
        tokio::select! {
            biased;
            () = reading => {}
            () = others => {}
        }
        assert!(turns.get() >= 98, "{} turns", turns.get());
    }

    /// What has always something to read, and never a rest of its own.
    struct EndlessInput;

    impl AsyncRead for EndlessInput {
        fn poll_read(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            into: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            into.put_slice(&[0; 1024]);
            Poll::Ready(Ok(()))
        }
    }
}
