//! Client addresses: which address a request came from, and which key stands for it.
//!
//! An IPv6 client can use any address of a /64, so its network is the client. An IPv4 address that is embedded in an
//! IPv6 address (mapped, NAT64 or 6to4) is the same client as the plain IPv4 address.
//!
//! Behind proxies, the client is the first address that no trusted proxy owns, counted from the right of
//! `X-Forwarded-For` or `Forwarded`: everything to the left of it was written by the client. The server, the tower
//! layer and the backtest all use this module, so that one client has one key everywhere. It reads text only, and
//! opens no connections.
//!
//! ```
//! use tallygate::address;
//!
//! let client = address::client(
//!     Some("10.0.0.1".parse()?),
//!     address::hops_of_x_forwarded_for([&b"6.6.6.6, 203.0.113.9"[..]].into_iter()),
//!     |address| address.to_string().starts_with("10."),
//! );
//! assert_eq!(client.map(address::key).as_deref(), Some("203.0.113.9"));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::fmt::{self, Write as _};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The default number of leading bits of an IPv6 address that identify a client.
pub const IPV6_PREFIX: u8 = 64;

/// Returns the address of the client, given the hops that proxies report, from the nearest to the farthest.
///
/// `peer` is the address of the connection; `None` is a Unix socket, whose clients are trusted because the file system
/// protects it. The function follows the hops as long as the last one is trusted. A hop that is not an address
/// (`None`) ends the walk at the last known hop. Returns `None` if no trusted hop reports an address.
pub fn client(
    peer: Option<IpAddr>,
    hops: impl IntoIterator<Item = Option<IpAddr>>,
    is_trusted: impl Fn(IpAddr) -> bool,
) -> Option<IpAddr> {
    let mut client = peer.map(|address| address.to_canonical());
    let mut hops = hops.into_iter();
    // A hop is read only if it counts, so the text of strangers is not even parsed.
    while client.is_none_or(&is_trusted) {
        let Some(Some(hop)) = hops.next() else { break };
        client = Some(hop);
    }
    client
}

/// Returns the hops in the values of `X-Forwarded-For`, from the right to the left. Several header lines form one list.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub fn hops_of_x_forwarded_for<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    lines.rev().flat_map(|line| line.rsplit(|byte| *byte == b',')).map(parse)
}

/// Returns the hops in the values of `Forwarded` (RFC 7239), from the right to the left. A hop without an address, such
/// as `for=unknown`, is `None`.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub fn hops_of_forwarded<'a>(
    lines: impl DoubleEndedIterator<Item = &'a [u8]>,
) -> impl Iterator<Item = Option<IpAddr>> {
    lines.rev().flat_map(|line| split_unquoted(line, b',')).map(forwarded_for)
}

/// Returns the address of the parameter `for` in one element of `Forwarded`.
fn forwarded_for(element: &[u8]) -> Option<IpAddr> {
    let mut found = None;
    for pair in split_unquoted(element, b';') {
        let pair = pair.trim_ascii();
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&pair[..equals], &pair[equals + 1..]);
        if name.eq_ignore_ascii_case(b"for") {
            let quoted = value.strip_prefix(b"\"").and_then(|value| value.strip_suffix(b"\""));
            let address = parse(quoted.unwrap_or(value))?;
            // Two values contradict each other, and a client may have written one of them.
            if found.replace(address).is_some() {
                return None;
            }
        }
    }
    found
}

/// Splits at a separator outside of quoted strings, from the right to the left.
///
/// It starts at the right because the left end comes from the client: an opening quote there must not swallow what a
/// proxy appended.
fn split_unquoted(text: &[u8], separator: u8) -> impl Iterator<Item = &[u8]> {
    let mut rest = Some(text);
    std::iter::from_fn(move || {
        let text = rest?;
        let mut is_quoted = false;
        for at in (0..text.len()).rev() {
            let is_escaped =
                || text[..at].iter().rev().take_while(|byte| **byte == b'\\').count() % 2 == 1;
            if text[at] == b'"' && !(is_quoted && is_escaped()) {
                is_quoted = !is_quoted;
            } else if text[at] == separator && !is_quoted {
                rest = Some(&text[..at]);
                return Some(&text[at + 1..]);
            }
        }
        rest = None;
        Some(text)
    })
}

/// Parses an address with or without a port, as some proxies write it. Returns `None` if the text is not an address.
#[must_use]
pub fn parse(text: &[u8]) -> Option<IpAddr> {
    let text = std::str::from_utf8(text).ok()?.trim_matches([' ', '\t']);
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    let address = bare.parse().or_else(|_| text.parse().map(|socket: SocketAddr| socket.ip()));
    address.ok().map(|address: IpAddr| address.to_canonical())
}

/// Returns the key of the client with this address.
#[must_use]
pub fn key(address: IpAddr) -> String {
    key_within(address, IPV6_PREFIX)
}

/// Returns the key of the client with this address. The first `ipv6_prefix` bits identify an IPv6 client.
#[must_use]
pub fn key_within(address: IpAddr, ipv6_prefix: u8) -> String {
    KeyText::of(address, ipv6_prefix).as_str().to_owned()
}

/// The length of the longest key of an address, in bytes: an IPv6 address and `/128`.
pub const MAX_KEY_TEXT: usize = 39 + 4;

/// The key of [`key_within`], without memory on the heap.
#[derive(Clone, Copy)]
pub struct KeyText {
    bytes: [u8; MAX_KEY_TEXT],
    length: usize,
}

impl KeyText {
    /// Returns the key of the client with this address. The first `ipv6_prefix` bits identify an IPv6 client.
    #[must_use]
    pub fn of(address: IpAddr, ipv6_prefix: u8) -> Self {
        let mut key = Self { bytes: [0; MAX_KEY_TEXT], length: 0 };
        match network(address, ipv6_prefix) {
            // As the address writes itself, in a fraction of the time.
            IpAddr::V4(address) => {
                for octet in address.octets() {
                    if octet >= 100 {
                        key.push(b'0' + octet / 100);
                    }
                    if octet >= 10 {
                        key.push(b'0' + octet / 10 % 10);
                    }
                    key.push(b'0' + octet % 10);
                    key.push(b'.');
                }
                key.length -= 1;
            }
            // The longest address fits.
            IpAddr::V6(network) => {
                let _ = write!(key, "{network}/{}", ipv6_prefix.clamp(1, 128));
            }
        }
        key
    }

    fn push(&mut self, byte: u8) {
        self.bytes[self.length] = byte;
        self.length += 1;
    }

    /// Returns the bytes of the key.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    fn as_str(&self) -> &str {
        std::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }
}

impl fmt::Write for KeyText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.length + text.len();
        let space = self.bytes.get_mut(self.length..end).ok_or(fmt::Error)?;
        space.copy_from_slice(text.as_bytes());
        self.length = end;
        Ok(())
    }
}

impl fmt::Debug for KeyText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

/// Returns the address of an IPv4 client, or the network of the first `ipv6_prefix` bits of an IPv6 address.
#[must_use]
pub fn network(address: IpAddr, ipv6_prefix: u8) -> IpAddr {
    match embedded_ipv4(address) {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => {
            let prefix = u32::from(ipv6_prefix.clamp(1, 128));
            Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << (128 - prefix))).into()
        }
    }
}

/// Returns the IPv4 address that is embedded in an IPv6 address, or the address itself. Without this, all clients behind a
/// NAT64 gateway would share one /64, and one IPv4 address would have 65 536 networks of 6to4.
///
/// Use the result to identify a client, never to trust it: compare trusted proxies and loopback with the address as given.
fn embedded_ipv4(address: IpAddr) -> IpAddr {
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

    fn is_trusted(address: IpAddr) -> bool {
        let text = address.to_string();
        text.starts_with("10.") || text.starts_with("2001:db8:ffff:")
    }

    /// Returns the key of the client, by `X-Forwarded-For` and by `Forwarded` with the same hops.
    #[track_caller]
    fn says(peer: Option<&str>, lines: &[&str], expected: Option<&str>) {
        let peer = peer.map(|address| address.parse().unwrap());
        let bytes = lines.iter().map(|line| line.as_bytes());
        let found = client(peer, hops_of_x_forwarded_for(bytes), is_trusted).map(key);
        assert_eq!(found.as_deref(), expected, "{peer:?} {lines:?}");
        let hop = |hop: &str| format!("proto=http;for=\"{}\"", hop.trim());
        let lines =
            lines.iter().map(|line| line.split(',').map(hop).collect::<Vec<_>>().join(", "));
        says_forwarded(peer, &lines.collect::<Vec<_>>(), expected);
    }

    #[track_caller]
    fn says_forwarded(peer: Option<IpAddr>, lines: &[String], expected: Option<&str>) {
        let bytes = lines.iter().map(String::as_bytes);
        let found = client(peer, hops_of_forwarded(bytes), is_trusted).map(key);
        assert_eq!(found.as_deref(), expected, "{peer:?} {lines:?}");
    }

    /// Fault H1.
    #[test]
    fn an_untrusted_peer_is_the_client_whatever_it_sends() {
        says(Some("192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("192.0.2.1"), &["203.0.113.9"], Some("192.0.2.1"));
    }

    /// Fault H1.
    #[test]
    fn hops_count_from_the_right_as_long_as_they_are_trusted() {
        says(Some("10.0.0.1"), &["203.0.113.9"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6, 203.0.113.9"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6, 203.0.113.9 ,10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6", "203.0.113.9,10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["203.0.113.9", "10.2.2.2, 10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["10.2.2.2, 10.1.1.1"], Some("10.2.2.2"));
    }

    /// Fault H1.
    #[test]
    fn a_hop_that_is_not_an_address_ends_the_walk_at_the_last_good_hop() {
        says(Some("10.0.0.1"), &["203.0.113.9, unknown"], Some("10.0.0.1"));
        says(Some("10.0.0.1"), &["203.0.113.9, x, 10.1.1.1"], Some("10.1.1.1"));
        says(Some("10.0.0.1"), &[""], Some("10.0.0.1"));
    }

    #[test]
    fn a_unix_socket_is_trusted_and_has_no_address_of_its_own() {
        says(None, &["6.6.6.6, 203.0.113.9"], Some("203.0.113.9"));
        says(None, &["203.0.113.9, 10.1.1.1"], Some("203.0.113.9"));
        says(None, &[], None);
        says(None, &["unknown"], None);
    }

    #[test]
    fn an_address_may_have_a_port() {
        says(Some("10.0.0.1"), &["203.0.113.9:4711"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["[2001:db8::1]:4711"], Some("2001:db8::/64"));
        says(Some("10.0.0.1"), &["[2001:db8::1]"], Some("2001:db8::/64"));
    }

    /// Fault H2.
    #[test]
    fn all_addresses_of_a_64_are_one_client() {
        says(Some("2001:db8:1:2:3:4:5:6"), &[], Some("2001:db8:1:2::/64"));
        says(Some("2001:db8:1:2:ffff::1"), &[], Some("2001:db8:1:2::/64"));
        says(Some("2001:db8:1:3::1"), &[], Some("2001:db8:1:3::/64"));
    }

    /// Fault H3.
    #[test]
    fn a_mapped_address_is_the_ipv4_address() {
        says(Some("::ffff:192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("::ffff:10.0.0.1"), &["::ffff:203.0.113.9"], Some("203.0.113.9"));
    }

    /// Fault H3.
    #[test]
    fn the_ipv4_address_within_nat64_and_6to4_is_the_client() {
        says(Some("64:ff9b::192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("10.0.0.1"), &["64:ff9b::192.0.2.1"], Some("192.0.2.1"));
        says(Some("2002:c000:201::1"), &[], Some("192.0.2.1"));
        says(Some("2002:c000:201:ffff:1:2:3:4"), &[], Some("192.0.2.1"));
        assert_eq!(key_within("2002:c000:201:5::1".parse().unwrap(), 128), "192.0.2.1");
        // Other networks near them are their own.
        says(Some("64:ff9b:1::192.0.2.1"), &[], Some("64:ff9b:1::/64"));
        says(Some("64:ff9b::1:192.0.2.1"), &[], Some("64:ff9b::/64"));
    }

    /// The gateway is not the proxy with that IPv4 address.
    ///
    /// Fault H3.
    #[test]
    fn an_ipv4_address_within_nat64_or_6to4_is_trusted_no_more_than_its_gateway() {
        says(Some("64:ff9b::10.0.0.1"), &["6.6.6.6"], Some("10.0.0.1"));
        says(Some("2002:a00:1::1"), &["6.6.6.6"], Some("10.0.0.1"));
    }

    /// Fault H1.
    #[test]
    fn quotes_from_a_client_do_not_swallow_what_a_proxy_appended_to_forwarded() {
        let proxy = Some("10.0.0.1".parse().unwrap());
        let says = |line: &str, expected| says_forwarded(proxy, &[line.to_owned()], expected);
        says("for=\"evil, for=203.0.113.9", Some("203.0.113.9"));
        says("for=6.6.6.6, for=\", for=\"[2001:db8::1]:80\"", Some("2001:db8::/64"));
        // A proxy quotes the host that the client sent.
        says(r#"for=203.0.113.9;host="a\", for=6.6.6.6;x=\"""#, Some("203.0.113.9"));
        says("For=203.0.113.9 ; Proto=http", Some("203.0.113.9"));
        says("for=6.6.6.6;for=203.0.113.9", Some("10.0.0.1"));
        for garbage in ["", "203.0.113.9", "for", "for=_hidden", "for=\"203.0.113.9", "by=10.0.0.1"]
        {
            says(garbage, Some("10.0.0.1"));
        }
    }

    #[test]
    fn the_prefix_length_that_identifies_an_ipv6_client_is_configurable() {
        let key = |prefix| key_within("2001:db8:1:2:3:4:5:6".parse().unwrap(), prefix);
        assert_eq!(key(64), "2001:db8:1:2::/64");
        assert_eq!(key(56), "2001:db8:1::/56");
        assert_eq!(key(48), "2001:db8:1::/48");
        assert_eq!(key(128), "2001:db8:1:2:3:4:5:6/128");
        assert_eq!(key(1), "::/1");
        assert_eq!(key_within("::ffff:192.0.2.1".parse().unwrap(), 48), "192.0.2.1");
    }
    #[test]
    fn the_key_of_an_ipv4_address_is_its_text() {
        for octet in 0..=255 {
            for address in [Ipv4Addr::new(octet, 0, 10, 255), Ipv4Addr::new(192, 0, 2, octet)] {
                assert_eq!(key(address.into()), address.to_string());
            }
        }
    }
}
