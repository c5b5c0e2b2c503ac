//! A connection that lets others have their turn, however much comes over it.
//!
//! A task that always finds something to read is stopped by the runtime after 128 reads only: a client that sends small
//! things without end would have a thread to itself for tens of milliseconds, and whoever else is served by it waits. The
//! same goes for one that takes megabytes as fast as they are written.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// How much is read in a turn, about: a read that has begun is not cut short.
pub(crate) const TURN_BYTES: usize = 8 * 1024;

/// How much is written in a turn, about: to copy it takes far less than to answer what is read.
const TURN_WRITTEN: usize = 128 * 1024;

/// A stream that is read and written turn by turn.
pub(crate) struct InTurns<S> {
    stream: S,
    read: usize,
    written: usize,
}

impl<S> InTurns<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, read: 0, written: 0 }
    }
}

impl<S> InTurns<S> {
    fn poll_turn_to_write(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.written < TURN_WRITTEN {
            return Poll::Ready(());
        }
        self.written = 0;
        next_turn(cx)
    }

    fn count_written(&mut self, polled: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        self.written = match polled {
            Poll::Ready(Ok(bytes)) => self.written + bytes,
            // It waits until something is taken: others have their turn anyway.
            Poll::Ready(Err(_)) | Poll::Pending => 0,
        };
        polled
    }
}

/// Comes back once the others had their turn. Not by the waker alone: whoever waits for a socket would wait until the runtime
/// looks at sockets of itself.
fn next_turn(cx: &mut Context<'_>) -> Poll<()> {
    pin!(tokio::task::yield_now()).poll(cx)
}

impl<S: AsyncRead + Unpin> AsyncRead for InTurns<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.read >= TURN_BYTES {
            self.read = 0;
            return next_turn(cx).map(Ok);
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
        ready!(self.poll_turn_to_write(cx));
        let polled = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.count_written(polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_turn_to_write(cx));
        let polled = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.count_written(polled)
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
    use std::cell::Cell;

    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    #[tokio::test]
    async fn others_have_their_turn_between_two_of_a_client_that_always_sends() {
        let mut endless = InTurns::new(Endless);
        let turns = turns_of_others(async {
            for _ in 0..100 {
                endless.read_exact(&mut [0; TURN_BYTES]).await.expect("more");
            }
        });
        let turns = turns.await;
        assert!(turns >= 98, "{turns} turns");
    }

    #[tokio::test]
    async fn others_have_their_turn_between_two_of_a_client_that_always_takes() {
        let mut endless = InTurns::new(Endless);
        let turns = turns_of_others(async {
            endless.write_all(&vec![0; 100 * TURN_WRITTEN]).await.expect("room");
        });
        let turns = turns.await;
        assert!(turns >= 98, "{turns} turns");
    }

    /// How often others had their turn until something was done.
    async fn turns_of_others(something: impl Future<Output = ()>) -> usize {
        let turns = Cell::new(0);
        let others = async {
            loop {
                turns.set(turns.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            () = something => turns.get(),
            () = others => 0,
        }
    }

    /// What has always something to read and room to write, and never a rest of its own.
    struct Endless;

    impl AsyncWrite for Endless {
        fn poll_write(
            self: Pin<&mut Self>,
            _: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            Poll::Ready(Ok(bytes.len().min(1024)))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl AsyncRead for Endless {
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
