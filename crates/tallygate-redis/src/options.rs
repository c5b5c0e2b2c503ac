//! The settings of a connection to Redis.

use std::time::Duration;

use redis::{Client, ConnectionInfo, RedisResult};

/// Options of a connection to Redis.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Options {
    /// The prefix of all keys. It must not contain braces, which would choose the slot in a cluster.
    pub prefix: String,
    /// The time budget per decision. The failure setting decides after that.
    pub budget: Duration,
    /// The number of connections per server. One connection carries many calls at once.
    pub connections: usize,
    /// The secret that spreads keys over the slots of a cluster, the same for all servers of the fleet. Without it, the
    /// servers share a secret that the first of them stores in the cluster.
    pub slot_secret: Option<Vec<u8>>,
    /// The root certificates in PEM, instead of those of the system.
    pub root_certificates: Option<Vec<u8>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            prefix: "tallygate:".into(),
            budget: Duration::from_millis(50),
            connections: 1,
            slot_secret: None,
            root_certificates: None,
        }
    }
}

impl Options {
    /// Sets the prefix of all keys.
    #[must_use]
    pub fn prefix(mut self, prefix: impl Into<String>) -> Self {
        self.prefix = prefix.into();
        self
    }

    /// Sets the time budget per decision.
    #[must_use]
    pub const fn budget(mut self, budget: Duration) -> Self {
        self.budget = budget;
        self
    }

    /// Sets the number of connections per server.
    #[must_use]
    pub const fn connections(mut self, connections: usize) -> Self {
        self.connections = connections;
        self
    }

    /// Sets the secret that spreads keys over the slots of a cluster.
    #[must_use]
    pub fn slot_secret(mut self, secret: impl Into<Vec<u8>>) -> Self {
        self.slot_secret = Some(secret.into());
        self
    }

    /// Sets the root certificates, in PEM.
    #[must_use]
    pub fn root_certificates(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.root_certificates = Some(pem.into());
        self
    }

    pub(crate) fn client(&self, info: ConnectionInfo) -> RedisResult<Client> {
        #[cfg(feature = "tls")]
        if matches!(info.addr(), redis::ConnectionAddr::TcpTls { .. }) {
            // This fails if the application has installed a provider, which then stays.
            let _ = rustls::crypto::ring::default_provider().install_default();
            return Client::build_with_tls(
                info,
                redis::TlsCertificates {
                    client_tls: None,
                    root_cert: self.root_certificates.clone(),
                },
            );
        }
        Client::open(info)
    }
}
