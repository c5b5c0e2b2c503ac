//! Whose request a proxy hands on: the address that the first hop we do not trust connected from.
//!
//! Everything to the left of it was written by strangers. Which client has the address is in `tallygate_lab::address`.

use std::net::IpAddr;

use hyper::HeaderMap;
use ipnet::IpNet;
use tallygate_lab::address::parse;

use crate::peer::Peer;

const FORWARDED_FOR: &str = "x-forwarded-for";

/// The client's address; `None` if nobody that we trust knows it.
pub(super) fn client(peer: Peer, fields: &HeaderMap, trusted: &[IpNet]) -> Option<IpAddr> {
    let is_trusted = |address: &IpAddr| trusted.iter().any(|net| net.contains(address));
    let mut client = peer.address.map(|address| address.to_canonical());
    // Several lines are one list, in their order.
    for line in fields.get_all(FORWARDED_FOR).iter().rev() {
        for hop in line.as_bytes().rsplit(|byte| *byte == b',') {
            // Whoever is at the other end of a Unix socket was let in by the file system.
            if client.as_ref().is_some_and(|client| !is_trusted(client)) {
                return client;
            }
            let Some(hop) = parse(hop) else { return client };
            client = Some(hop);
        }
    }
    client
}

#[cfg(test)]
mod tests {
    use tallygate_lab::address::{key, key_within};

    use super::*;

    #[track_caller]
    fn says(peer: Option<&str>, lines: &[&str], expected: Option<&str>) {
        let trusted = ["10.0.0.0/8", "2001:db8:ffff::/48"].map(|net| net.parse().unwrap());
        let mut fields = HeaderMap::new();
        for line in lines {
            fields.append(FORWARDED_FOR, line.parse().unwrap());
        }
        let address = peer.map(|address| address.parse().unwrap());
        let peer = Peer { address, is_same_user: false };
        let found = client(peer, &fields, &trusted).map(key);
        assert_eq!(found.as_deref(), expected, "{peer:?} {lines:?}");
    }

    #[test]
    fn h1_a_stranger_is_itself_whatever_it_says() {
        says(Some("192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("192.0.2.1"), &["203.0.113.9"], Some("192.0.2.1"));
    }

    #[test]
    fn h1_hops_count_from_the_right_as_long_as_they_are_trusted() {
        says(Some("10.0.0.1"), &["203.0.113.9"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6, 203.0.113.9"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6, 203.0.113.9 ,10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["6.6.6.6", "203.0.113.9,10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["203.0.113.9", "10.2.2.2, 10.1.1.1"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["10.2.2.2, 10.1.1.1"], Some("10.2.2.2"));
    }

    #[test]
    fn h1_garbage_ends_the_walk_at_the_last_good_hop() {
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
    fn an_address_may_come_with_its_port() {
        says(Some("10.0.0.1"), &["203.0.113.9:4711"], Some("203.0.113.9"));
        says(Some("10.0.0.1"), &["[2001:db8::1]:4711"], Some("2001:db8::/64"));
        says(Some("10.0.0.1"), &["[2001:db8::1]"], Some("2001:db8::/64"));
    }

    #[test]
    fn h2_all_of_a_64_is_one_client() {
        says(Some("2001:db8:1:2:3:4:5:6"), &[], Some("2001:db8:1:2::/64"));
        says(Some("2001:db8:1:2:ffff::1"), &[], Some("2001:db8:1:2::/64"));
        says(Some("2001:db8:1:3::1"), &[], Some("2001:db8:1:3::/64"));
    }

    #[test]
    fn h3_a_mapped_address_is_the_address() {
        says(Some("::ffff:192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("::ffff:10.0.0.1"), &["::ffff:203.0.113.9"], Some("203.0.113.9"));
    }

    #[test]
    fn h3_the_ipv4_address_within_nat64_and_6to4_is_the_client() {
        says(Some("64:ff9b::192.0.2.1"), &[], Some("192.0.2.1"));
        says(Some("10.0.0.1"), &["64:ff9b::192.0.2.1"], Some("192.0.2.1"));
        says(Some("2002:c000:201::1"), &[], Some("192.0.2.1"));
        says(Some("2002:c000:201:ffff:1:2:3:4"), &[], Some("192.0.2.1"));
        assert_eq!(key_within("2002:c000:201:5::1".parse().unwrap(), 128), "192.0.2.1");
        // Other networks near them are their own.
        says(Some("64:ff9b:1::192.0.2.1"), &[], Some("64:ff9b:1::/64"));
        says(Some("64:ff9b::1:192.0.2.1"), &[], Some("64:ff9b::/64"));
    }

    /// The gateway is not the proxy that has the IPv4 address.
    #[test]
    fn h3_an_ipv4_address_within_nat64_or_6to4_is_trusted_no_more_than_its_gateway() {
        says(Some("64:ff9b::10.0.0.1"), &["6.6.6.6"], Some("10.0.0.1"));
        says(Some("2002:a00:1::1"), &["6.6.6.6"], Some("10.0.0.1"));
        let local = ["64:ff9b::127.0.0.1", "2002:7f00:1::1"];
        assert!(!local.iter().any(|address| Peer::at(address.parse().unwrap()).is_loopback()));
    }
}
