//! The address of a client: that of the connection, or the one that trusted proxies report.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::HeaderMap;
use http::header::{FORWARDED, HeaderName, HeaderValue};
use http::request::Parts;
use ipnet::IpNet;
use tallygate::address::{self, IPV6_PREFIX, hops_of_forwarded, hops_of_x_forwarded_for};

const X_FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The client end of the connection that a request came on: a request extension.
///
/// The layer also knows the extensions of axum (feature `axum`) and of tonic (feature `tonic`), so this is for servers
/// that are built on hyper or another library: insert it into each request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// A TCP connection from this address.
    Address(IpAddr),
    /// A Unix socket. Its clients are trusted as proxies, because the file system protects it.
    UnixSocket,
}

impl From<SocketAddr> for Peer {
    fn from(address: SocketAddr) -> Self {
        Self::Address(address.ip())
    }
}

impl Peer {
    /// Returns the peer of a request, by its extensions.
    #[must_use]
    pub fn of(parts: &Parts) -> Option<Self> {
        let extensions = &parts.extensions;
        if let Some(peer) = extensions.get::<Self>() {
            return Some(*peer);
        }
        #[cfg(feature = "axum")]
        if let Some(info) = extensions.get::<axum::extract::ConnectInfo<SocketAddr>>() {
            return Some(info.0.into());
        }
        #[cfg(feature = "tonic")]
        if let Some(info) = extensions.get::<tonic::transport::server::TcpConnectInfo>() {
            return info.remote_addr().map(Self::from);
        }
        None
    }
}

/// The way to find the address of a client.
///
/// ```
/// use tallygate_tower::{ClientAddress, Key};
///
/// // All connections come from a load balancer in this network, which appends to X-Forwarded-For.
/// let address = ClientAddress::behind(["10.0.0.0/8".parse()?]).ipv6_prefix(56);
/// let key = Key::client(address);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ClientAddress {
    trusted: Arc<[IpNet]>,
    header: HeaderName,
    ipv6_prefix: u8,
}

impl ClientAddress {
    /// Uses the address of the connection, and ignores all header fields.
    #[must_use]
    pub fn peer() -> Self {
        Self::behind([])
    }

    /// Trusts the proxies in these networks to append the address of their client to `X-Forwarded-For`.
    ///
    /// Hops count from the right: the client is the first address that is not in a trusted network. A client can
    /// write everything to the left of it, so that is not read. Name only networks from which no client connects
    /// directly.
    #[must_use]
    pub fn behind(trusted: impl IntoIterator<Item = IpNet>) -> Self {
        Self {
            trusted: trusted.into_iter().collect(),
            header: X_FORWARDED_FOR,
            ipv6_prefix: IPV6_PREFIX,
        }
    }

    /// Reads the field `Forwarded` (RFC 7239) instead of `X-Forwarded-For`.
    ///
    /// Only one of the fields is read: a proxy that writes one of them passes on what a client sends in the other.
    #[must_use]
    pub fn forwarded(mut self) -> Self {
        self.header = FORWARDED;
        self
    }

    /// Sets how many leading bits of an IPv6 address identify a client, from 1 to 128. Default: 64, because a client
    /// can use any address of its /64.
    #[must_use]
    pub fn ipv6_prefix(mut self, bits: u8) -> Self {
        self.ipv6_prefix = bits.clamp(1, 128);
        self
    }

    /// Returns the address of the client, as it was written; `None` if it is unknown.
    #[must_use]
    pub fn of(&self, parts: &Parts) -> Option<IpAddr> {
        let peer = match Peer::of(parts)? {
            // No header field is trusted, so none is read.
            Peer::Address(address) if self.trusted.is_empty() => {
                return Some(address.to_canonical());
            }
            Peer::Address(address) => Some(address),
            Peer::UnixSocket => None,
        };
        self.nearest_untrusted(peer, &parts.headers)
    }

    /// Returns the key of the client: its IPv4 address, or its IPv6 network. The server and the backtest use the same
    /// keys.
    #[must_use]
    pub fn key(&self, parts: &Parts) -> Option<String> {
        self.network(parts).map(|(address, prefix)| address::key_within(address, prefix))
    }

    /// Returns the address of the client, and how many of its bits identify an IPv6 client.
    pub(crate) fn network(&self, parts: &Parts) -> Option<(IpAddr, u8)> {
        self.of(parts).map(|address| (address, self.ipv6_prefix))
    }

    fn nearest_untrusted(&self, peer: Option<IpAddr>, headers: &HeaderMap) -> Option<IpAddr> {
        let is_trusted = |address| self.trusted.iter().any(|net| net.contains(&address));
        let lines = headers.get_all(&self.header).iter().map(HeaderValue::as_bytes);
        if self.header == FORWARDED {
            address::client(peer, hops_of_forwarded(lines), is_trusted)
        } else {
            address::client(peer, hops_of_x_forwarded_for(lines), is_trusted)
        }
    }
}
