//! Which client has an address: one IPv4 address, or one IPv6 network.
//!
//! An IPv6 client has a whole /64 to choose from, so the network is the client. An IPv4 address is the same client
//! whether it is written as IPv4 or mapped into IPv6.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// The bits of an IPv6 address that are one client, unless a policy says otherwise.
pub const IPV6_PREFIX: u8 = 64;

/// Reads an address with or without a port, as some proxies write it.
#[must_use]
pub fn parse(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?.trim_matches([' ', '\t']);
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().or_else(|_| text.parse().map(|socket: SocketAddr| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// Returns the key of the client that has an address.
#[must_use]
pub fn key(address: IpAddr) -> String {
    key_within(address, IPV6_PREFIX)
}

/// Returns the key of the client that has an address, where `ipv6_prefix` bits of an IPv6 address are one client.
#[must_use]
pub fn key_within(address: IpAddr, ipv6_prefix: u8) -> String {
    match network(address, ipv6_prefix) {
        IpAddr::V4(address) => address.to_string(),
        IpAddr::V6(network) => format!("{network}/{}", ipv6_prefix.clamp(1, 128)),
    }
}

/// Returns the IPv4 address, or the network of `ipv6_prefix` bits of an IPv6 address.
#[must_use]
pub fn network(address: IpAddr, ipv6_prefix: u8) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let prefix = u32::from(ipv6_prefix.clamp(1, 128));
            Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - prefix))).into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_much_of_an_ipv6_address_is_a_client_can_be_chosen() {
        let key = |prefix| key_within("2001:db8:1:2:3:4:5:6".parse().unwrap(), prefix);
        assert_eq!(key(64), "2001:db8:1:2::/64");
        assert_eq!(key(56), "2001:db8:1::/56");
        assert_eq!(key(48), "2001:db8:1::/48");
        assert_eq!(key(128), "2001:db8:1:2:3:4:5:6/128");
        assert_eq!(key(1), "::/1");
        assert_eq!(key_within("::ffff:192.0.2.1".parse().unwrap(), 48), "192.0.2.1");
    }
}
