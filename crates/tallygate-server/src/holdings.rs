//! Who holds what of the server: connections, and bytes of what is read and not yet decided, or answered and not yet taken.
//!
//! There is so much of both for all, and so much for one address: whoever takes what it can get leaves the rest to the
//! others. An address is a client as elsewhere, an IPv6 network of 64 bits being one. Who comes by a Unix socket or is a
//! trusted proxy brings many clients, and is counted among all only. Small bodies and replies are not counted: what they
//! take is bounded by the number of connections and streams.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use tallygate_lab::address::{IPV6_PREFIX, network};

use crate::config::{Limits, OPERATOR_BYTES, SHARE_OF_AN_ADDRESS};
use crate::peer::Peer;

/// Up to this a body or a reply is small.
pub(crate) const SMALL_BYTES: usize = 1024;
/// The memory of a decision that waits for a store across the network.
pub(crate) const WAITING_BYTES: usize = 4 * 1024;

/// Who holds what.
#[derive(Debug, Default)]
pub(crate) struct Holdings {
    held: Mutex<Held>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Held {
    all: Amount,
    by_address: HashMap<IpAddr, Amount>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Amount {
    connections: usize,
    bytes: usize,
}

/// Whom a holding is counted to, beside all.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Holder(Option<IpAddr>);

/// Why there is no room for one more connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// There is none for anybody.
    Server,
    /// There is none for this address.
    Address,
}

/// A connection that is counted while it lives.
#[derive(Debug)]
pub(crate) struct HeldConnection {
    holdings: Arc<Holdings>,
    holder: Holder,
}

/// Bytes that are counted while they are held.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    holdings: Arc<Holdings>,
    holder: Holder,
    bytes: usize,
}

impl Holder {
    /// Whether it is counted by itself, and not among all only.
    pub(crate) const fn is_counted(self) -> bool {
        self.0.is_some()
    }

    pub(crate) fn of(peer: Peer, trusted_proxies: &[IpNet]) -> Self {
        let address = peer.address.map(|address| address.to_canonical());
        let is_trusted = |address: &IpAddr| trusted_proxies.iter().any(|net| net.contains(address));
        Self(
            address
                .filter(|address| !is_trusted(address))
                .map(|address| network(address, IPV6_PREFIX)),
        )
    }
}

impl Holdings {
    /// Room for one more connection, if there is any.
    pub(crate) fn connect(
        self: &Arc<Self>,
        holder: Holder,
        limits: &Limits,
    ) -> Result<HeldConnection, NoRoom> {
        let mut held = self.held();
        if held.all.connections >= limits.max_connections {
            return Err(NoRoom::Server);
        }
        if held.of(holder).connections >= limits.max_connections_per_address() {
            return Err(NoRoom::Address);
        }
        held.change(holder, |amount| amount.connections += 1);
        Ok(HeldConnection { holdings: self.clone(), holder })
    }

    /// Room for so many bytes, if there is any.
    pub(crate) fn hold(
        self: &Arc<Self>,
        holder: Holder,
        bytes: usize,
        limits: &Limits,
    ) -> Option<HeldBytes> {
        let mut held = HeldBytes { holdings: self.clone(), holder, bytes: 0 };
        held.grow(bytes, limits).then_some(held)
    }

    /// Room in the reserve for operators, of which these holdings are. No reply is larger than the reserve.
    pub(crate) fn hold_of_reserve(
        self: &Arc<Self>,
        holder: Holder,
        bytes: usize,
    ) -> Option<HeldBytes> {
        if bytes > OPERATOR_BYTES {
            return None;
        }
        self.hold(holder, bytes, &Limits { max_held_bytes: OPERATOR_BYTES, ..Limits::default() })
    }

    /// How many connections there are.
    pub(crate) fn connections(&self) -> usize {
        self.held().all.connections
    }

    /// Returns how many bytes are held.
    pub(crate) fn bytes(&self) -> usize {
        self.held().all.bytes
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldBytes {
    /// Holds more; whether there was room.
    pub(crate) fn grow(&mut self, bytes: usize, limits: &Limits) -> bool {
        let mut held = self.holdings.held();
        // One that is larger than the share is let in if it is the only one.
        let fits = |held: usize, most: usize| held == 0 || held + bytes <= most;
        let of_address = held.of(self.holder).bytes;
        let is_room = fits(held.all.bytes, limits.max_held_bytes)
            && fits(of_address, limits.max_held_bytes / SHARE_OF_AN_ADDRESS);
        if is_room {
            held.change(self.holder, |amount| amount.bytes += bytes);
            drop(held);
            self.bytes += bytes;
        }
        is_room
    }

    /// Holds as one what was held as two.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert_eq!(self.holder, other.holder, "of one client");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl Held {
    /// What a holder holds; nothing, if it is not counted by itself.
    fn of(&self, Holder(address): Holder) -> Amount {
        address.and_then(|address| self.by_address.get(&address)).copied().unwrap_or_default()
    }

    fn change(&mut self, Holder(address): Holder, change: impl Fn(&mut Amount)) {
        change(&mut self.all);
        let Some(address) = address else { return };
        let amount = self.by_address.entry(address).or_default();
        change(amount);
        if *amount == Amount::default() {
            self.by_address.remove(&address);
        }
    }
}

impl Drop for HeldConnection {
    fn drop(&mut self) {
        self.holdings.held().change(self.holder, |amount| amount.connections -= 1);
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.holdings.held().change(self.holder, |amount| amount.bytes -= self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(address: &str) -> Holder {
        let peer = Peer::at(address.parse().unwrap());
        Holder::of(peer, &["10.0.0.0/8".parse().unwrap()])
    }

    fn limits(connections: usize, of_address: usize, bytes: usize) -> Limits {
        Limits {
            max_connections: connections,
            max_connections_per_address: Some(of_address),
            max_held_bytes: bytes,
            ..Limits::default()
        }
    }

    #[test]
    fn an_address_has_its_part_and_the_others_the_rest() {
        let (holdings, limits) = (Arc::new(Holdings::default()), limits(5, 2, 0));
        let connect = |address| holdings.connect(holder(address), &limits);
        let first = [connect("192.0.2.1"), connect("::ffff:192.0.2.1")];
        assert!(first.iter().all(Result::is_ok));
        assert_eq!(connect("192.0.2.1").unwrap_err(), NoRoom::Address);
        // Of an IPv6 network any address is the same client.
        let second = [connect("2001:db8:1:2::1"), connect("2001:db8:1:2:ffff::9")];
        assert_eq!(connect("2001:db8:1:2::3").unwrap_err(), NoRoom::Address);
        let third = connect("2001:db8:1:3::1");
        assert_eq!(connect("192.0.2.9").unwrap_err(), NoRoom::Server);
        drop((first, second, third));
        assert_eq!(*holdings.held(), Held::default());
    }

    #[test]
    fn clients_behind_nat64_are_counted_by_their_ipv4_addresses() {
        assert_eq!(holder("64:ff9b::192.0.2.1"), holder("192.0.2.1"));
        assert_ne!(holder("64:ff9b::192.0.2.1"), holder("64:ff9b::192.0.2.2"));
        assert_eq!(holder("2002:c000:201:7::1"), holder("192.0.2.1"));
        assert!(holder("64:ff9b::10.0.0.1").is_counted(), "it is not the proxy 10.0.0.1");
    }

    #[test]
    fn a_trusted_proxy_brings_many() {
        let (holdings, limits) = (Arc::new(Holdings::default()), limits(4, 1, 0));
        let connect = |holder| holdings.connect(holder, &limits);
        let local = Holder::of(Peer { address: None, is_same_user: true }, &[]);
        let all = [
            connect(holder("10.0.0.1")),
            connect(holder("10.0.0.1")),
            connect(local),
            connect(local),
        ];
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(connect(local).unwrap_err(), NoRoom::Server);
    }

    #[test]
    fn the_reserve_for_operators_is_bounded_and_shared_out() {
        let holdings = Arc::new(Holdings::default());
        let hold = |address, bytes| holdings.hold_of_reserve(holder(address), bytes);
        assert!(hold("192.0.2.1", OPERATOR_BYTES + 1).is_none(), "larger than the reserve");
        let first = hold("192.0.2.1", OPERATOR_BYTES / 4).unwrap();
        assert!(hold("192.0.2.1", 1).is_none(), "more than a quarter");
        let second = hold("192.0.2.2", OPERATOR_BYTES / 4 * 3).unwrap();
        assert!(hold("192.0.2.3", 1).is_none(), "all is taken");
        drop(second);
        assert!(hold("192.0.2.3", OPERATOR_BYTES / 4 * 3).is_some());
        drop(first);
        assert_eq!(*holdings.held(), Held::default());
    }

    #[test]
    fn bytes_are_shared_out_and_given_back() {
        let (holdings, limits) = (Arc::new(Holdings::default()), limits(9, 9, 4000));
        let hold = |address, bytes| holdings.hold(holder(address), bytes, &limits);
        let mut one = hold("192.0.2.1", 600).unwrap();
        assert!(hold("192.0.2.1", 401).is_none(), "more than a quarter");
        one.join(hold("192.0.2.1", 300).unwrap());
        assert!(one.grow(100, &limits) && !one.grow(1, &limits));
        let whole = hold("192.0.2.2", 2500).unwrap();
        let rest = hold("10.0.0.1", 500).unwrap();
        assert!(hold("192.0.2.3", 1).is_none(), "all is taken");
        drop((one, whole));
        assert_eq!(holdings.held().all.bytes, 500);
        drop(rest);
        assert_eq!(*holdings.held(), Held::default());
    }
}
