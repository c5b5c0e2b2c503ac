//! The TLS settings of a listener, and the handshake with clients.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use rustls::ServerConfig;
use tokio_rustls::TlsAcceptor;

use super::{Connection, Stop};

/// The TLS settings of a listener: plain text, or the current certificate.
#[derive(Clone)]
pub(crate) struct Security(Option<Arc<ArcSwap<ServerConfig>>>);

impl Security {
    pub(crate) fn new(tls: Option<&Arc<ServerConfig>>) -> Self {
        Self(tls.map(|tls| Arc::new(ArcSwap::new(tls.clone()))))
    }

    /// Returns whether connections are encrypted.
    pub(crate) const fn is_encrypted(&self) -> bool {
        self.0.is_some()
    }

    /// Returns plain text, for Unix sockets: they cannot be intercepted.
    pub(crate) const fn none() -> Self {
        Self(None)
    }

    /// Replaces the certificate for new connections. A listener cannot turn TLS on or off while it runs.
    pub(crate) fn renew(&self, tls: Option<&Arc<ServerConfig>>) {
        if let (Some(current), Some(tls)) = (&self.0, tls) {
            current.store(tls.clone());
        }
    }

    /// Completes the TLS handshake within `timeout`, unless the server shuts down first.
    pub(crate) async fn handshake(
        &self,
        stream: Box<dyn Connection>,
        timeout: Duration,
        mut stop: Stop,
    ) -> io::Result<Box<dyn Connection>> {
        let Some(tls) = &self.0 else { return Ok(stream) };
        let handshake = TlsAcceptor::from(tls.load_full()).accept(stream);
        tokio::select! {
            agreed = handshake => Ok(Box::new(agreed?)),
            () = tokio::time::sleep(timeout) => Err(io::ErrorKind::TimedOut.into()),
            _ = stop.wait_for(|stop| *stop) => Err(io::ErrorKind::ConnectionAborted.into()),
        }
    }
}
