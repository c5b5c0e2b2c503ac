//! Where connections come in: TCP or a Unix socket.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::net::{TcpListener, UnixListener};

use crate::connection::{Connection, Impatient, InTurns, Security, Stop};
use crate::metrics::SurfaceLabels;
use crate::peer::Peer;
use crate::shared::Shared;

/// How long the next try waits after a connection could not be accepted.
const AGAIN: Duration = Duration::from_millis(50);
/// How long none may have failed until it is over.
const OVER: Duration = Duration::from_secs(1);

/// A place where connections come in.
pub(super) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, path: PathBuf },
}

impl Listener {
    /// Listens on `HOST:PORT` or `unix:/path`.
    pub(super) async fn bind(address: &str) -> io::Result<Self> {
        let Some(path) = address.strip_prefix("unix:") else {
            return TcpListener::bind(address).await.map(Self::Tcp);
        };
        let path = PathBuf::from(path);
        // A socket that nobody listens on any more is in the way. One that cannot be asked may be somebody's.
        let asked = tokio::net::UnixStream::connect(&path).await;
        if asked.is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
            && is_socket(&path)
        {
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
        let given_up = &shared.gate.metrics.connections_given_up;
        let mut failing = Failing::default();
        let mut is_stopping = false;
        loop {
            let accepted = if is_stopping {
                // Whoever is in the queue has come in time: to close upon it would reset it.
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
                // The sockets are looked at once more.
                tokio::task::yield_now().await;
                continue;
            };
            match accepted {
                Ok((stream, peer)) => {
                    failing.accepted();
                    // One too many is closed at once.
                    let Some(counted) = shared.admit_connection(peer) else { continue };
                    let limits = shared.limits();
                    let stream = InTurns::new(stream);
                    let stream = Impatient::new(stream, limits.write_timeout, given_up.clone());
                    let patience = limits.head_timeout.min(limits.auth_timeout);
                    let (shared, stop) = (shared.clone(), stop.clone());
                    let (security, serve) = (security.clone(), serve.clone());
                    tokio::spawn(async move {
                        match security.agree(Box::new(stream), patience, stop.clone()).await {
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
                    shared.gate.metrics.accept_errors.inc();
                    failing.count(&error);
                    if is_stopping {
                        break;
                    }
                    // No descriptors left, most likely: others must close theirs first.
                    tokio::time::sleep(AGAIN).await;
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

/// Connections that cannot be accepted: told when it begins and when it is over, not each.
#[derive(Default)]
struct Failing {
    failed: u64,
    last: Option<Instant>,
}

impl Failing {
    fn count(&mut self, error: &io::Error) {
        if self.last.is_none() {
            tracing::warn!(%error, "connections cannot be accepted; those that are there are served");
        }
        self.failed += 1;
        self.last = Some(Instant::now());
    }

    /// One was accepted. Between two that are not, that is no end.
    fn accepted(&mut self) {
        if self.last.is_some_and(|last| last.elapsed() >= OVER) {
            tracing::warn!(failed = self.failed, "connections are accepted again");
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
