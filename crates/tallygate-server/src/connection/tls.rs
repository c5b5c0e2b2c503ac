//! The certificate of a listener, and the handshake with whoever connects.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use super::{Connection, Stop};

/// How a listener speaks: in the clear, or by the certificate that is in force.
#[derive(Clone)]
pub(crate) struct Security(Option<Arc<ArcSwap<ServerConfig>>>);

impl Security {
    pub(crate) fn new(tls: Option<&Arc<ServerConfig>>) -> Self {
        Self(tls.map(|tls| Arc::new(ArcSwap::new(tls.clone()))))
    }

    /// Nobody can listen in on a Unix socket.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Shows another certificate to whoever connects from now on. Whether a listener speaks TLS at all is settled when
    /// it starts; whether it was asked to change that.
    pub(crate) fn renew(&self, tls: Option<&Arc<ServerConfig>>) -> bool {
        if let (Some(current), Some(tls)) = (&self.0, tls) {
            current.store(tls.clone());
        }
        self.0.is_some() != tls.is_some()
    }

    /// Completes the TLS handshake, within `patience` and not after the server is told to stop.
    pub(crate) async fn agree(
        &self,
        stream: Box<dyn Connection>,
        patience: Duration,
        mut stop: Stop,
    ) -> io::Result<Box<dyn Connection>> {
        let Some(tls) = &self.0 else { return Ok(stream) };
        let handshake = TlsAcceptor::from(tls.load_full()).accept(stream);
        tokio::select! {
            agreed = handshake => Ok(Box::new(agreed?)),
            () = tokio::time::sleep(patience) => Err(io::ErrorKind::TimedOut.into()),
            _ = stop.wait_for(|stop| *stop) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}
