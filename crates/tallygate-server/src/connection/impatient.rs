//! A connection whose other end has to take something of what is written now and then.
//!
//! Slowness is not the point: any byte taken is another full time. A timer is made only where there is no room to write.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream that fails once its other end has taken nothing for too long.
pub(crate) struct Impatient<S> {
    stream: S,
    patience: Duration,
    given_up: Counter,
    waiting: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    /// Whoever is given up is counted.
    pub(crate) fn new(stream: S, patience: Duration, given_up: Counter) -> Self {
        Self { stream, patience, given_up, waiting: None }
    }

    /// What came of writing, or that it took too long.
    fn within<T>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let patience = self.patience;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(patience)));
        if waiting.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        self.waiting = None;
        self.given_up.inc();
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.within(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        pieces: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, pieces);
        self.within(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(cx);
        self.within(cx, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let closed = Pin::new(&mut self.stream).poll_shutdown(cx);
        self.within(cx, closed)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(30);

    #[tokio::test(start_paused = true)]
    async fn e12_a_client_that_takes_nothing_is_given_up() {
        let (near, far) = tokio::io::duplex(64);
        let given_up = Counter::default();
        let mut near = Impatient::new(near, PATIENCE, given_up.clone());
        let began = tokio::time::Instant::now();
        let error = near.write_all(&[0; 1000]).await.expect_err("nobody reads");
        assert_eq!((error.kind(), began.elapsed()), (io::ErrorKind::TimedOut, PATIENCE));
        assert_eq!(given_up.get(), 1);
        drop(far);
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_takes_little_is_waited_for() {
        let (near, mut far) = tokio::io::duplex(64);
        let mut near = Impatient::new(near, PATIENCE, Counter::default());
        let slow = tokio::spawn(async move {
            let (mut taken, mut piece) = (0, [0; 64]);
            while taken < 1000 {
                tokio::time::sleep(PATIENCE - Duration::from_secs(1)).await;
                taken += far.read(&mut piece).await.unwrap_or_default();
            }
        });
        near.write_all(&[0; 1000]).await.expect("it takes something each time");
        slow.await.expect("it took all");
    }
}
