//! Where connections come in: TCP or a Unix socket.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};

use super::tls::Security;
use super::{Peer, Shared, Stop};
use crate::metrics::SurfaceLabels;

/// A place where connections come in.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf },
}

/// What a connection is made of, whatever it runs on.
pub(crate) trait Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin + 'static> Stream for S {}

impl Listener {
    /// Listens on `HOST:PORT` or `unix:/path`.
    pub(super) async fn bind(address: &str) -> io::Result<Self> {
        let Some(path) = address.strip_prefix("unix:") else {
            return TcpListener::bind(address).await.map(Self::Tcp);
        };
        let path = PathBuf::from(path);
        // A socket that nobody listens on any more is in the way.
        if tokio::net::UnixStream::connect(&path).await.is_err() && is_socket(&path) {
            std::fs::remove_file(&path)?;
        }
        Ok(Self::Unix { listener: UnixListener::bind(&path)?, path })
    }

    /// The port, where there is one.
    pub(super) fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
            Self::Unix { .. } => None,
        }
    }

    /// Serves every connection that comes, until it is told to stop.
    pub(super) async fn accept<F>(
        self,
        surface: &'static str,
        security: Security,
        shared: Arc<Shared>,
        mut stop: Stop,
        serve: impl Fn(Arc<Shared>, Box<dyn Connection>, Peer, Stop) -> F + Send + Sync + 'static,
    ) where
        F: Future<Output = ()> + Send + 'static,
    {
        let security = if self.port().is_some() { security } else { Security::none() };
        let serve = Arc::new(serve);
        loop {
            let accepted = tokio::select! {
                accepted = self.next() => accepted,
                _ = stop.wait_for(|stop| *stop) => break,
            };
            match accepted {
                Ok((stream, peer)) => {
                    // One too many is closed at once.
                    let Some(counted) = shared.admit_connection() else { continue };
                    let (shared, stop) = (shared.clone(), stop.clone());
                    let (security, serve) = (security.clone(), serve.clone());
                    tokio::spawn(async move {
                        match security.agree(stream, &shared, stop.clone()).await {
                            Ok(stream) => serve(shared, stream, peer, stop).await,
                            Err(error) => {
                                let labels = SurfaceLabels { surface };
                                shared.gate.metrics.handshakes_failed.get_or_create(&labels).inc();
                                tracing::debug!(%error, surface, "no TLS was agreed on");
                            }
                        }
                        drop(counted);
                    });
                }
                Err(error) => {
                    // No descriptors left, most likely: others must close theirs first.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn next(&self) -> io::Result<(Box<dyn Connection>, Peer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Replies are small and waited for.
                let _ = stream.set_nodelay(true);
                Ok((Box::new(stream), Peer { address: Some(address.ip()) }))
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                Ok((Box::new(stream), Peer { address: None }))
            }
        }
    }
}

/// A connection of whatever kind.
pub(crate) trait Connection: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: Stream> Connection for S {}

fn is_socket(path: &std::path::Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket())
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Self::Unix { path, .. } = self {
            let _ = std::fs::remove_file(path);
        }
    }
}

impl fmt::Display for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(listener) => match listener.local_addr() {
                Ok(address) => address.fmt(f),
                Err(_) => f.write_str("?"),
            },
            Self::Unix { path, .. } => write!(f, "unix:{}", path.display()),
        }
    }
}
