//! A stream that fails if the client does not read.
//!
//! A slow client is fine: every byte that it reads restarts the timeout. The timer only exists while a write waits.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream whose writes fail after the client has read nothing for too long.
pub(crate) struct WriteDeadline<S> {
    stream: S,
    timeout: Duration,
    timeouts: Counter,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> WriteDeadline<S> {
    /// Counts each timeout in `timeouts`.
    pub(crate) fn new(stream: S, timeout: Duration, timeouts: Counter) -> Self {
        Self { stream, timeout, timeouts, waiting: None }
    }

    /// Returns the result of a write, or an error if it has waited too long.
    fn or_timeout<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let timeout = self.timeout;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        if waiting.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.waiting = None;
        self.timeouts.inc();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteDeadline<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteDeadline<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.or_timeout(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.or_timeout(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.or_timeout(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.or_timeout(cx, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(30);

    /// Fault E12.
    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_nothing_is_disconnected() {
        let (server, client) = tokio::io::duplex(64);
        let timeouts = Counter::default();
        let mut server = WriteDeadline::new(server, TIMEOUT, timeouts.clone());
        let began = tokio::time::Instant::now();
        let error = server.write_all(&[0; 1000]).await.expect_err("the client does not read");
        assert_eq!((error.kind(), began.elapsed()), (io::ErrorKind::TimedOut, TIMEOUT));
        assert_eq!(timeouts.get(), 1);
        drop(client);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_reads_slowly_keeps_its_connection() {
        let (server, mut client) = tokio::io::duplex(64);
        let mut server = WriteDeadline::new(server, TIMEOUT, Counter::default());
        let slow = tokio::spawn(async move {
            let (mut taken, mut piece) = (0, [0; 64]);
            while taken < 1000 {
                tokio::time::sleep(TIMEOUT - Duration::from_secs(1)).await;
                taken += client.read(&mut piece).await.unwrap_or_default();
            }
        });
        server.write_all(&[0; 1000]).await.expect("it takes something each time");
        slow.await.expect("it took all");
    }
}
