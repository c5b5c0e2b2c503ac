//! Which client has an address: one IPv4 address, or one IPv6 network.
//!
//! An IPv6 client has a whole /64 to choose from, so the network is the client. An IPv4 address is the same client
//! also within an IPv6 address: mapped, behind NAT64, or by 6to4.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

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

/// Returns the IPv4 address of a client, or the network of `ipv6_prefix` bits of an IPv6 address.
#[must_use]
pub fn network(address: IpAddr, ipv6_prefix: u8) -> IpAddr {
    match with_ipv4_inside(address) {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let prefix = u32::from(ipv6_prefix.clamp(1, 128));
            Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - prefix))).into()
        }
    }
}

/// Returns the IPv4 address that an IPv6 address stands for, or the address itself. All clients behind a NAT64 gateway share
/// one /64, and one IPv4 address has 65 536 networks of 6to4.
///
/// This says who the client is, not what it may do: an address is a trusted proxy or loopback only as it is written.
fn with_ipv4_inside(address: IpAddr) -> IpAddr {
    let IpAddr::V6(v6) = address.to_canonical() else { return address.to_canonical() };
    let inside = |high: u16, low: u16| {
        let ([a, b], [c, d]) = (high.to_be_bytes(), low.to_be_bytes());
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    };
    match v6.segments() {
        // NAT64 (RFC 6052), and 6to4 (RFC 3056).
        [0x64, 0xff9b, 0, 0, 0, 0, high, low] | [0x2002, high, low, ..] => inside(high, low),
        _ => IpAddr::V6(v6),
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
