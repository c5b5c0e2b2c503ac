//! Budgets of clients: connections, and bytes of requests that are not decided yet and of replies that are not read
//! yet.
//!
//! Both are limited in total and per address, so that one client cannot use up the server. For IPv6, an address is a
//! /64 network. Unix sockets and trusted proxies carry many clients, so only the total limits them. Small bodies and
//! replies are not counted: the numbers of connections and streams bound them.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ipnet::IpNet;
use tallygate::address::{IPV6_PREFIX, network};

use crate::config::{Limits, OPERATOR_BYTES, SHARE_OF_AN_ADDRESS};
use crate::peer::Peer;

/// The largest body or reply that is not counted.
pub(crate) const SMALL_BYTES: usize = 1024;
/// The memory of a decision that waits for a store across the network.
pub(crate) const WAITING_BYTES: usize = 4 * 1024;

/// The connections and bytes that clients use.
#[derive(Debug, Default)]
pub(crate) struct ClientBudgets {
    held: Mutex<BudgetTotals>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct BudgetTotals {
    all: BudgetUsage,
    by_address: HashMap<IpAddr, BudgetUsage>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct BudgetUsage {
    connections: usize,
    bytes: usize,
}

/// The address whose budget is charged; `None` charges the total only.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct BudgetOwner(Option<IpAddr>);

/// Why there is no room for one more connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BudgetExceeded {
    /// The server has `max_connections`.
    Server,
    /// The address has `max_connections_per_address`.
    Address,
}

/// A connection that is counted until it is dropped.
#[derive(Debug)]
pub(crate) struct HeldConnection {
    budgets: Arc<ClientBudgets>,
    holder: BudgetOwner,
}

/// Bytes that are counted until they are dropped.
#[derive(Debug)]
pub(crate) struct HeldBytes {
    budgets: Arc<ClientBudgets>,
    holder: BudgetOwner,
    bytes: usize,
}

impl BudgetOwner {
    /// Returns whether an address is charged, and not only the total.
    pub(crate) const fn has_own_budget(self) -> bool {
        self.0.is_some()
    }

    /// Returns how many bytes the owner may use.
    pub(crate) const fn share(self, limits: &Limits) -> usize {
        match self.0 {
            Some(_) => limits.max_buffer_bytes / SHARE_OF_AN_ADDRESS,
            None => limits.max_buffer_bytes,
        }
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

impl ClientBudgets {
    /// Counts one more connection, if the limits allow it.
    pub(crate) fn connect(
        self: &Arc<Self>,
        holder: BudgetOwner,
        limits: &Limits,
    ) -> Result<HeldConnection, BudgetExceeded> {
        let mut held = self.held();
        if held.all.connections >= limits.max_connections {
            return Err(BudgetExceeded::Server);
        }
        if held.of(holder).connections >= limits.max_connections_per_address() {
            return Err(BudgetExceeded::Address);
        }
        held.change(holder, |amount| amount.connections += 1);
        Ok(HeldConnection { budgets: self.clone(), holder })
    }

    /// Counts `bytes`, if the limits allow it.
    pub(crate) fn hold(
        self: &Arc<Self>,
        holder: BudgetOwner,
        bytes: usize,
        limits: &Limits,
    ) -> Option<HeldBytes> {
        let mut held = HeldBytes { budgets: self.clone(), holder, bytes: 0 };
        held.grow(bytes, limits).then_some(held)
    }

    /// Counts bytes of the reserve for operators, if these budgets are that reserve. No reply is larger than the
    /// reserve.
    pub(crate) fn hold_of_reserve(
        self: &Arc<Self>,
        holder: BudgetOwner,
        bytes: usize,
    ) -> Option<HeldBytes> {
        if bytes > OPERATOR_BYTES {
            return None;
        }
        self.hold(holder, bytes, &Limits { max_buffer_bytes: OPERATOR_BYTES, ..Limits::default() })
    }

    /// Returns the number of open connections.
    pub(crate) fn connections(&self) -> usize {
        self.held().all.connections
    }

    /// Returns the number of counted bytes.
    pub(crate) fn bytes(&self) -> usize {
        self.held().all.bytes
    }

    fn held(&self) -> MutexGuard<'_, BudgetTotals> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldBytes {
    /// Counts more bytes. Returns whether the limits allow it.
    pub(crate) fn grow(&mut self, bytes: usize, limits: &Limits) -> bool {
        let mut held = self.budgets.held();
        // A request that is larger than the share is allowed if it is the only one.
        let fits = |held: usize, most: usize| held == 0 || held + bytes <= most;
        let of_address = held.of(self.holder).bytes;
        let is_room = fits(held.all.bytes, limits.max_buffer_bytes)
            && fits(of_address, limits.max_buffer_bytes / SHARE_OF_AN_ADDRESS);
        if is_room {
            held.change(self.holder, |amount| amount.bytes += bytes);
            drop(held);
            self.bytes += bytes;
        }
        is_room
    }

    /// Adds the bytes of `other` to these.
    pub(crate) fn join(&mut self, mut other: Self) {
        debug_assert_eq!(self.holder, other.holder, "of one client");
        self.bytes += std::mem::take(&mut other.bytes);
    }
}

impl BudgetTotals {
    /// Returns the usage of an owner; zero if only the total is charged.
    fn of(&self, BudgetOwner(address): BudgetOwner) -> BudgetUsage {
        address.and_then(|address| self.by_address.get(&address)).copied().unwrap_or_default()
    }

    fn change(&mut self, BudgetOwner(address): BudgetOwner, change: impl Fn(&mut BudgetUsage)) {
        change(&mut self.all);
        let Some(address) = address else { return };
        let amount = self.by_address.entry(address).or_default();
        change(amount);
        if *amount == BudgetUsage::default() {
            self.by_address.remove(&address);
        }
    }
}

impl Drop for HeldConnection {
    fn drop(&mut self) {
        self.budgets.held().change(self.holder, |amount| amount.connections -= 1);
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.budgets.held().change(self.holder, |amount| amount.bytes -= self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holder(address: &str) -> BudgetOwner {
        let peer = Peer::at(address.parse().unwrap());
        BudgetOwner::of(peer, &["10.0.0.0/8".parse().unwrap()])
    }

    fn limits(connections: usize, of_address: usize, bytes: usize) -> Limits {
        Limits {
            max_connections: connections,
            max_connections_per_address: Some(of_address),
            max_buffer_bytes: bytes,
            ..Limits::default()
        }
    }

    #[test]
    fn an_address_has_its_part_and_the_others_the_rest() {
        let (budgets, limits) = (Arc::new(ClientBudgets::default()), limits(5, 2, 0));
        let connect = |address| budgets.connect(holder(address), &limits);
        let first = [connect("192.0.2.1"), connect("::ffff:192.0.2.1")];
        assert!(first.iter().all(Result::is_ok));
        assert_eq!(connect("192.0.2.1").unwrap_err(), BudgetExceeded::Address);
        // All addresses of an IPv6 network are the same client.
        let second = [connect("2001:db8:1:2::1"), connect("2001:db8:1:2:ffff::9")];
        assert_eq!(connect("2001:db8:1:2::3").unwrap_err(), BudgetExceeded::Address);
        let third = connect("2001:db8:1:3::1");
        assert_eq!(connect("192.0.2.9").unwrap_err(), BudgetExceeded::Server);
        drop((first, second, third));
        assert_eq!(*budgets.held(), BudgetTotals::default());
    }

    #[test]
    fn clients_behind_nat64_are_counted_by_their_ipv4_addresses() {
        assert_eq!(holder("64:ff9b::192.0.2.1"), holder("192.0.2.1"));
        assert_ne!(holder("64:ff9b::192.0.2.1"), holder("64:ff9b::192.0.2.2"));
        assert_eq!(holder("2002:c000:201:7::1"), holder("192.0.2.1"));
        assert!(holder("64:ff9b::10.0.0.1").has_own_budget(), "it is not the proxy 10.0.0.1");
    }

    #[test]
    fn a_trusted_proxy_is_not_limited_as_one_address() {
        let (budgets, limits) = (Arc::new(ClientBudgets::default()), limits(4, 1, 0));
        let connect = |holder| budgets.connect(holder, &limits);
        let local = BudgetOwner::of(Peer { address: None, is_same_user: true }, &[]);
        let all = [
            connect(holder("10.0.0.1")),
            connect(holder("10.0.0.1")),
            connect(local),
            connect(local),
        ];
        assert!(all.iter().all(Result::is_ok));
        assert_eq!(connect(local).unwrap_err(), BudgetExceeded::Server);
    }

    #[test]
    fn the_reserve_for_operators_is_bounded_and_shared_out() {
        let budgets = Arc::new(ClientBudgets::default());
        let hold = |address, bytes| budgets.hold_of_reserve(holder(address), bytes);
        assert!(hold("192.0.2.1", OPERATOR_BYTES + 1).is_none(), "larger than the reserve");
        let first = hold("192.0.2.1", OPERATOR_BYTES / 4).unwrap();
        assert!(hold("192.0.2.1", 1).is_none(), "more than a quarter");
        let second = hold("192.0.2.2", OPERATOR_BYTES / 4 * 3).unwrap();
        assert!(hold("192.0.2.3", 1).is_none(), "all is taken");
        drop(second);
        assert!(hold("192.0.2.3", OPERATOR_BYTES / 4 * 3).is_some());
        drop(first);
        assert_eq!(*budgets.held(), BudgetTotals::default());
    }

    #[test]
    fn bytes_are_divided_between_owners_and_returned() {
        let (budgets, limits) = (Arc::new(ClientBudgets::default()), limits(9, 9, 4000));
        let hold = |address, bytes| budgets.hold(holder(address), bytes, &limits);
        let mut one = hold("192.0.2.1", 600).unwrap();
        assert!(hold("192.0.2.1", 401).is_none(), "more than a quarter");
        one.join(hold("192.0.2.1", 300).unwrap());
        assert!(one.grow(100, &limits) && !one.grow(1, &limits));
        let whole = hold("192.0.2.2", 2500).unwrap();
        let rest = hold("10.0.0.1", 500).unwrap();
        assert!(hold("192.0.2.3", 1).is_none(), "all is taken");
        drop((one, whole));
        assert_eq!(budgets.held().all.bytes, 500);
        drop(rest);
        assert_eq!(*budgets.held(), BudgetTotals::default());
    }
}
