//! The client address of a request behind proxies, by the rules of [`tallygate::address`].

use std::net::IpAddr;

use hyper::HeaderMap;
use hyper::header::HeaderValue;
use ipnet::IpNet;
use tallygate::address::{client as nearest_untrusted, hops_of_x_forwarded_for};

use crate::peer::Peer;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// Returns the client address; `None` if no trusted hop reports it.
pub(super) fn client(peer: Peer, fields: &HeaderMap, trusted: &[IpNet]) -> Option<IpAddr> {
    let lines = fields.get_all(FORWARDED_FOR).iter().map(HeaderValue::as_bytes);
    nearest_untrusted(peer.address, hops_of_x_forwarded_for(lines), |address| {
        trusted.iter().any(|net| net.contains(&address))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault H1.
    #[test]
    fn only_trusted_networks_may_forward_an_address() {
        let trusted = ["10.0.0.0/8", "2001:db8:ffff::/48"].map(|net| net.parse().unwrap());
        let mut fields = HeaderMap::new();
        fields.append(FORWARDED_FOR, HeaderValue::from_static("6.6.6.6, 203.0.113.9"));
        fields.append(FORWARDED_FOR, HeaderValue::from_static("10.1.1.1"));
        let found = |peer: &str| client(Peer::at(peer.parse().unwrap()), &fields, &trusted);
        let forwarded: IpAddr = "203.0.113.9".parse().unwrap();
        for proxy in ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8:ffff:1::1"] {
            assert_eq!(found(proxy), Some(forwarded), "{proxy}");
        }
        for stranger in ["192.0.2.1", "2001:db8:fffe::1", "64:ff9b::10.0.0.1"] {
            assert_eq!(found(stranger), Some(stranger.parse().unwrap()));
        }
    }

    /// The gateway is not the proxy with that IPv4 address.
    ///
    /// Fault H3.
    #[test]
    fn an_ipv4_loopback_address_within_nat64_or_6to4_is_not_loopback() {
        let local = ["64:ff9b::127.0.0.1", "2002:7f00:1::1"];
        assert!(!local.iter().any(|address| Peer::at(address.parse().unwrap()).is_loopback()));
    }
}
