//! A stream that yields to other tasks, however much data it carries.
//!
//! The runtime only interrupts a task after 128 reads that do not wait. A client that sends small requests without
//! pause would occupy a thread for tens of milliseconds, and other clients of that thread would wait. The same is true
//! of a client that reads megabytes as fast as they are written.

use std::io;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// About how many bytes are read before other tasks run. A read that has begun is not cut short.
pub(crate) const TURN_BYTES: usize = 8 * 1024;

/// About how many bytes are written before other tasks run. Copying takes far less time than answering requests.
const TURN_WRITTEN: usize = 128 * 1024;

/// A stream that yields to other tasks after a number of bytes.
pub(crate) struct FairStream<S> {
    stream: S,
    read: usize,
    written: usize,
}

impl<S> FairStream<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, read: 0, written: 0 }
    }
}

impl<S> FairStream<S> {
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
            // The task waits for the client, so other tasks run anyway.
            Poll::Ready(Err(_)) | Poll::Pending => 0,
        };
        polled
    }
}

/// Becomes ready after other tasks have run. The waker alone is not enough: tasks that wait for a socket would wait
/// until the runtime polls sockets on its own.
fn next_turn(cx: &mut Context<'_>) -> Poll<()> {
    pin!(tokio::task::yield_now()).poll(cx)
}

impl<S: AsyncRead + Unpin> AsyncRead for FairStream<S> {
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
            // The task waits for more data, so other tasks run anyway.
            Poll::Pending => 0,
        };
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for FairStream<S> {
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
    async fn other_clients_are_served_between_turns_of_a_client_that_always_sends() {
        let mut endless = FairStream::new(Endless);
        let turns = turns_of_others(async {
            for _ in 0..100 {
                endless.read_exact(&mut [0; TURN_BYTES]).await.expect("more");
            }
        });
        let turns = turns.await;
        assert!(turns >= 98, "{turns} turns");
    }

    #[tokio::test]
    async fn other_clients_are_served_between_turns_of_a_client_that_always_reads() {
        let mut endless = FairStream::new(Endless);
        let turns = turns_of_others(async {
            endless.write_all(&vec![0; 100 * TURN_WRITTEN]).await.expect("room");
        });
        let turns = turns.await;
        assert!(turns >= 98, "{turns} turns");
    }

    /// Returns how often other tasks ran until `something` was done.
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

    /// A stream that is always ready to be read and written.
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
