//! Listeners: TCP or a Unix socket.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, UnixListener};

use crate::connection::{Connection, FairStream, Security, Stop, WriteDeadline};
use crate::metrics::SurfaceLabels;
use crate::peer::Peer;
use crate::shared::Shared;

/// The pause after an accept error.
const RETRY_AFTER: Duration = Duration::from_millis(50);
/// How long accepting must work until the failure counts as over.
const RECOVERED_AFTER: Duration = Duration::from_secs(1);

/// A listening socket.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf },
}

impl Listener {
    /// Listens on `HOST:PORT` or `unix:/path`.
    pub(super) async fn bind(address: &str) -> io::Result<Self> {
        let Some(path) = address.strip_prefix("unix:") else {
            let bound = TcpListener::bind(address).await.map(Self::Tcp);
            return bound.map_err(|error| match error.kind() {
                io::ErrorKind::InvalidInput => {
                    io::Error::other(format!("{error}; use HOST:PORT or unix:/path"))
                }
                _ => error,
            });
        };
        let path = PathBuf::from(path);
        // Remove a stale socket: no process listens on it any more. On other errors, it may be in use.
        let connected = tokio::net::UnixStream::connect(&path).await;
        if connected.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            && is_socket(&path)
        {
            std::fs::remove_file(&path)?;
        }
        Ok(Self::Unix { listener: UnixListener::bind(&path)?, path })
    }

    /// Returns the port of a TCP listener.
    pub(super) fn port(&self) -> Option<u16> {
        match self {
            Self::Tcp(listener) => listener.local_addr().ok().map(|address| address.port()),
            Self::Unix { .. } => None,
        }
    }

    /// Accepts and serves connections until the server shuts down.
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
        let given_up = &shared.gate.metrics.connections_aborted;
        let mut failures = AcceptFailures::default();
        let mut is_stopping = false;
        loop {
            let accepted = if is_stopping {
                // Connections in the queue arrived in time: closing the listener would reset them.
                self.next().now_or_never()
            } else {
                tokio::select! {
                    accepted = self.next() => Some(accepted),
                    _ = stop.wait_for(|stop| *stop) => None,
                }
            };
            let Some(accepted) = accepted else {
                if std::mem::replace(&mut is_stopping, true) {
                    break;
                }
                // Poll the sockets once more.
                tokio::task::yield_now().await;
                continue;
            };
            match accepted {
                Ok((stream, peer)) => {
                    failures.accepted();
                    // Without a free slot, close the connection at once.
                    let Some(counted) = shared.accept_connection(peer) else { continue };
                    let limits = shared.limits();
                    let stream = FairStream::new(stream);
                    let stream = WriteDeadline::new(stream, limits.write_timeout, given_up.clone());
                    let timeout = limits.head_timeout.min(limits.auth_timeout);
                    let (shared, stop) = (shared.clone(), stop.clone());
                    let (security, serve) = (security.clone(), serve.clone());
                    tokio::spawn(async move {
                        match security.handshake(Box::new(stream), timeout, stop.clone()).await {
                            Ok(stream) => serve(shared, stream, peer, stop).await,
                            Err(error) => {
                                let labels = SurfaceLabels { surface };
                                shared.gate.metrics.handshakes_failed.get_or_create(&labels).inc();
                                tracing::debug!(%error, surface, "TLS handshake failed; closing the connection");
                            }
                        }
                        drop(counted);
                    });
                }
                Err(error) => {
                    shared.gate.metrics.accept_errors.inc();
                    failures.count(&error);
                    if is_stopping {
                        break;
                    }
                    // Most likely there are no descriptors left: other connections must end first.
                    tokio::time::sleep(RETRY_AFTER).await;
                }
            }
        }
    }

    async fn next(&self) -> io::Result<(Box<dyn Connection>, Peer)> {
        match self {
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept().await?;
                // Replies are small, and clients wait for them.
                let _ = stream.set_nodelay(true);
                Ok((Box::new(stream), Peer::at(address.ip())))
            }
            Self::Unix { listener, .. } => {
                let (stream, _) = listener.accept().await?;
                let peer = Peer::of_socket(&stream);
                Ok((Box::new(stream), peer))
            }
        }
    }
}

/// Accept errors: logged when they begin and when they end, not each.
#[derive(Default)]
struct AcceptFailures {
    failed: u64,
    last: Option<Instant>,
}

impl AcceptFailures {
    fn count(&mut self, error: &io::Error) {
        if self.last.is_none() {
            tracing::warn!(%error, "cannot accept connections; still serving the open ones");
        }
        self.failed += 1;
        self.last = Some(Instant::now());
    }

    /// Notes an accepted connection. A single success between failures does not end the failure.
    fn accepted(&mut self) {
        if self.last.is_some_and(|last| last.elapsed() >= RECOVERED_AFTER) {
            tracing::warn!(failed = self.failed, "accepting connections again");
            *self = Self::default();
        }
    }
}

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
