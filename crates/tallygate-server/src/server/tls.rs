//! The certificate of a listener, and the handshake with whoever connects.

use std::io;
use std::sync::Arc;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use super::{Connection, Shared, Stop};

/// How a listener speaks: in the clear, or by the certificate that is in force.
#[derive(Clone)]
pub(crate) struct Security(Option<Arc<ArcSwap<ServerConfig>>>);

impl Security {
    pub(super) fn new(tls: Option<&Arc<ServerConfig>>) -> Self {
        Self(tls.map(|tls| Arc::new(ArcSwap::new(tls.clone()))))
    }

    /// Nobody can listen in on a Unix socket.
    pub(super) const fn none() -> Self {
        Self(None)
    }

    /// Shows another certificate to whoever connects from now on. Whether a listener speaks TLS at all is settled when
    /// it starts; whether it was asked to change that.
    pub(super) fn renew(&self, tls: Option<&Arc<ServerConfig>>) -> bool {
        if let (Some(current), Some(tls)) = (&self.0, tls) {
            current.store(tls.clone());
        }
        self.0.is_some() != tls.is_some()
    }

    /// Comes to terms with whoever connects: within the time for a head or a token, and not after it is time to stop.
    pub(super) async fn agree(
        &self,
        stream: Box<dyn Connection>,
        shared: &Shared,
        mut stop: Stop,
    ) -> io::Result<Box<dyn Connection>> {
        let Some(tls) = &self.0 else { return Ok(stream) };
        let limits = shared.limits();
        let patience = limits.head_timeout.min(limits.auth_timeout);
        let handshake = TlsAcceptor::from(tls.load_full()).accept(stream);
        tokio::select! {
            agreed = handshake => Ok(Box::new(agreed?)),
            () = tokio::time::sleep(patience) => Err(io::ErrorKind::TimedOut.into()),
            _ = stop.wait_for(|stop| *stop) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}
