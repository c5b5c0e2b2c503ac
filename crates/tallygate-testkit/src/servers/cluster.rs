//! A cluster: slots, failover, migration.

use std::collections::{BTreeMap, HashSet};
use std::ops::RangeInclusive;
use std::thread;
use std::time::{Duration, Instant};

use super::flavor::Flavor;
use super::server::{Kind, Server};
use super::waiting::{PATIENCE, PAUSE, wait_until};

/// The number of slots.
const SLOTS: u16 = 16_384;

/// The time after which a handshake is started again.
const HANDSHAKE: Duration = Duration::from_secs(3);

/// A cluster. Nodes have indexes: first the primaries at the start, then the replicas of the first primary, of the second
/// primary, and so on. A node keeps its index if its role changes.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Server>,
    ids: Vec<String>,
}

/// Starting and stopping.
impl Cluster {
    /// Starts a cluster and waits until every node reports that the cluster is ok. A node is considered down after a
    /// second.
    #[must_use]
    pub fn start(flavor: Flavor, primaries: usize, replicas_each: usize) -> Self {
        Self::with(flavor, primaries, replicas_each, &[])
    }

    /// Starts a cluster with additional settings for every node.
    ///
    /// # Panics
    ///
    /// Panics if the nodes do not form a cluster in time.
    #[must_use]
    pub fn with(
        flavor: Flavor,
        primaries: usize,
        replicas_each: usize,
        arguments: &[&str],
    ) -> Self {
        let count = primaries * (1 + replicas_each);
        let nodes: Vec<Server> = thread::scope(|scope| {
            let start = || Server::of(Kind::ClusterNode, flavor, arguments);
            let starting: Vec<_> = (0..count).map(|_| scope.spawn(start)).collect();
            starting.into_iter().map(|node| node.join().expect("the node starts")).collect()
        });
        let ids = nodes.iter().map(|node| node.ask(&["CLUSTER", "MYID"])).collect();
        let cluster = Self { nodes, ids };
        cluster.share_slots(primaries);
        cluster.introduce();
        for replica in primaries..count {
            let primary = (replica - primaries) / replicas_each;
            cluster.nodes[replica].ask::<()>(&["CLUSTER", "REPLICATE", &cluster.ids[primary]]);
        }
        wait_until("every node knows the replicas", PATIENCE, || {
            cluster.views().all(|view| {
                view.iter().filter(|line| line.primary.is_some()).count() == count - primaries
            })
        });
        for replica in &cluster.nodes[primaries..] {
            replica.wait_until_linked();
        }
        cluster.wait_until_ok(PATIENCE);
        cluster
    }

    fn share_slots(&self, primaries: usize) {
        let first = |primary: usize| usize::from(SLOTS) * primary / primaries;
        for (index, node) in self.nodes.iter().enumerate() {
            // Different epochs from the start, so that the nodes need not resolve a conflict.
            node.ask::<()>(&["CLUSTER", "SET-CONFIG-EPOCH", &(index + 1).to_string()]);
            if index < primaries {
                let (from, to) = (first(index).to_string(), (first(index + 1) - 1).to_string());
                node.ask::<()>(&["CLUSTER", "ADDSLOTSRANGE", &from, &to]);
            }
        }
    }

    fn introduce(&self) {
        let deadline = Instant::now() + PATIENCE;
        while !self.all_know_all() {
            assert!(Instant::now() < deadline, "the nodes did not form a cluster in time");
            for node in &self.nodes[1..] {
                let (port, bus) = (node.port().to_string(), node.bus_port().to_string());
                self.nodes[0].ask::<()>(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus]);
            }
            let again = Instant::now() + HANDSHAKE;
            while !self.all_know_all() && Instant::now() < again {
                thread::sleep(PAUSE);
            }
        }
    }

    fn all_know_all(&self) -> bool {
        self.views().all(|view| {
            let known: HashSet<_> = view.iter().map(|line| &line.id).collect();
            self.ids.iter().all(|id| known.contains(id))
        })
    }

    /// Kills a node, like a crash.
    pub fn kill(&self, node: usize) {
        self.nodes[node].kill();
    }

    /// Waits until every running node reports that the cluster is ok and that running nodes serve all slots. After a
    /// primary was killed, this waits until its replica has taken over.
    ///
    /// # Panics
    ///
    /// Panics if that takes longer than `within`.
    pub fn wait_until_ok(&self, within: Duration) {
        wait_until("the cluster is well", within, || {
            let info = |node: &Server| node.ask::<String>(&["CLUSTER", "INFO"]);
            self.running().all(|node| info(node).contains("cluster_state:ok"))
                && self.views().all(|view| self.covers_all_slots(&view))
        });
    }

    fn covers_all_slots(&self, view: &[Line]) -> bool {
        let served: usize = view
            .iter()
            .filter(|line| self.index_of(&line.id).is_some_and(|i| self.nodes[i].is_running()))
            .flat_map(|line| &line.slots)
            .map(ExactSizeIterator::len)
            .sum();
        served == usize::from(SLOTS)
    }
}

/// Nodes, slots and keys.
impl Cluster {
    /// Returns the URLs of all nodes, including stopped ones.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.nodes.iter().map(Server::url).collect()
    }

    /// Returns the nodes.
    #[must_use]
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// Returns the slot of a key.
    ///
    /// # Panics
    ///
    /// Panics if no node is running.
    #[must_use]
    pub fn slot_of(&self, key: impl AsRef<[u8]>) -> u16 {
        let node = self.running().next().expect("a node is running");
        node.ask(&[b"CLUSTER", b"KEYSLOT".as_slice(), key.as_ref()])
    }

    /// Returns the index of the primary of a slot according to the running nodes. If they differ, the newest
    /// configuration epoch counts.
    ///
    /// # Panics
    ///
    /// Panics if no running node knows one.
    #[must_use]
    pub fn primary_of(&self, slot: u16) -> usize {
        self.views()
            .flatten()
            .filter(|line| line.has(slot))
            .max_by_key(|line| line.epoch)
            .and_then(|line| self.index_of(&line.id))
            .expect("a node serves the slot")
    }

    /// Waits until all running nodes agree on the primary of a slot, and returns its index.
    ///
    /// # Panics
    ///
    /// Panics if they do not agree in time.
    #[must_use]
    pub fn agreed_primary_of(&self, slot: u16) -> usize {
        let mut agreed = None;
        wait_until("the nodes agree on the primary of a slot", PATIENCE, || {
            let owners: HashSet<_> = self
                .views()
                .map(|view| view.into_iter().find(|line| line.has(slot)).map(|line| line.id))
                .collect();
            agreed = match owners.into_iter().collect::<Vec<_>>().as_slice() {
                [Some(owner)] => self.index_of(owner),
                _ => None,
            };
            agreed.is_some()
        });
        agreed.expect("the nodes agree after the wait")
    }

    /// Returns the index of a running replica of a node.
    #[must_use]
    pub fn replica_of(&self, primary: usize) -> Option<usize> {
        self.views()
            .flatten()
            .find(|line| line.is_own && line.primary.as_ref() == Some(&self.ids[primary]))
            .and_then(|line| self.index_of(&line.id))
    }

    /// Returns the keys without an expiry on all running primaries.
    #[must_use]
    pub fn keys_without_ttl(&self) -> Vec<Vec<u8>> {
        self.views()
            .flatten()
            .filter(|line| line.is_own && line.primary.is_none())
            .filter_map(|line| self.index_of(&line.id))
            .flat_map(|index| self.nodes[index].keys_without_ttl())
            .collect()
    }

    fn running(&self) -> impl Iterator<Item = &Server> {
        self.nodes.iter().filter(|node| node.is_running())
    }

    /// Returns what each running node knows about all nodes.
    fn views(&self) -> impl Iterator<Item = Vec<Line>> {
        self.running().map(|node| {
            let text: String = node.ask(&["CLUSTER", "NODES"]);
            text.lines().filter_map(Line::of).collect()
        })
    }

    fn index_of(&self, id: &str) -> Option<usize> {
        self.ids.iter().position(|known| known == id)
    }
}

/// Moving slots, in the steps of an operator. Between the steps, a slot is on two nodes.
impl Cluster {
    /// Opens a slot on both nodes. From now on, its primary redirects clients (`ASK`) for keys that it does not have.
    pub fn begin_migration(&self, slot: u16, to: usize) {
        let from = self.agreed_primary_of(slot);
        self.set_slot(to, slot, &["IMPORTING", &self.ids[from]]);
        self.set_slot(from, slot, &["MIGRATING", &self.ids[to]]);
    }

    /// Moves the keys of an open slot.
    pub fn migrate_keys(&self, slot: u16, to: usize) {
        let from = &self.nodes[self.primary_of(slot)];
        let (slot, port) = (slot.to_string(), self.nodes[to].port().to_string());
        loop {
            let keys: Vec<Vec<u8>> = from.ask(&["CLUSTER", "GETKEYSINSLOT", &slot, "100"]);
            if keys.is_empty() {
                return;
            }
            let migrate = ["MIGRATE", "127.0.0.1", &port, "", "0", "1000", "KEYS"];
            let words =
                migrate.into_iter().map(str::as_bytes).chain(keys.iter().map(Vec::as_slice));
            from.ask::<String>(&words.collect::<Vec<_>>());
        }
    }

    /// Assigns an open slot to its new primary, on all primaries, first on the two that are involved. A primary that
    /// learned it later by gossip could see a newer epoch of the old primary first, and assign the slot back to it.
    ///
    /// The new primary takes a newer epoch than all that it knows. So it has to know the newest one first: otherwise the
    /// old primary, which still announces the slot, may get it back on some nodes, and they never agree again.
    pub fn end_migration(&self, slot: u16, to: usize) {
        self.wait_until_epochs_agree();
        let from = self.primary_of(slot);
        let primaries: Vec<_> = self.views().flatten().filter(|line| line.is_own).collect();
        let others = primaries.iter().filter(|line| line.primary.is_none());
        let others = others.filter_map(|line| self.index_of(&line.id));
        for node in [to, from].into_iter().chain(others.filter(|node| ![to, from].contains(node))) {
            self.assign_slot(node, slot, to);
        }
    }

    /// Moves a slot in all three steps.
    pub fn migrate(&self, slot: u16, to: usize) {
        self.begin_migration(slot, to);
        self.migrate_keys(slot, to);
        self.end_migration(slot, to);
    }

    /// Waits until all running nodes know the same epoch of each primary, all of them different.
    fn wait_until_epochs_agree(&self) {
        wait_until("the nodes agree on the epochs", PATIENCE, || {
            let epochs = |view: Vec<Line>| -> BTreeMap<String, u64> {
                let primaries = view.into_iter().filter(|line| line.primary.is_none());
                primaries.map(|line| (line.id, line.epoch)).collect()
            };
            let mut views: Vec<_> = self.views().map(epochs).collect();
            views.dedup();
            let [epochs] = &views[..] else { return false };
            epochs.values().collect::<HashSet<_>>().len() == epochs.len()
        });
    }

    /// Changes which node one node takes for the primary of a slot, without the other steps.
    pub fn assign_slot(&self, node: usize, slot: u16, primary: usize) {
        self.set_slot(node, slot, &["NODE", &self.ids[primary]]);
    }

    fn set_slot(&self, node: usize, slot: u16, state: &[&str]) {
        let slot = slot.to_string();
        self.nodes[node].ask::<()>(&[&["CLUSTER", "SETSLOT", &slot], state].concat());
    }
}

/// A line of `CLUSTER NODES`: what a node knows about another node or about itself.
#[derive(Debug)]
struct Line {
    id: String,
    is_own: bool,
    primary: Option<String>,
    epoch: u64,
    slots: Vec<RangeInclusive<u16>>,
}

impl Line {
    fn has(&self, slot: u16) -> bool {
        self.slots.iter().any(|slots| slots.contains(&slot))
    }

    /// Returns `None` for a node that is still in its handshake.
    fn of(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [id, _address, flags, primary, _ping, _pong, epoch, _link, slots @ ..] = &words[..]
        else {
            return None;
        };
        let flags: Vec<&str> = flags.split(',').collect();
        if flags.contains(&"handshake") {
            return None;
        }
        Some(Self {
            id: (*id).to_owned(),
            is_own: flags.contains(&"myself"),
            primary: (*primary != "-").then(|| (*primary).to_owned()),
            epoch: epoch.parse().ok()?,
            slots: slots.iter().filter_map(|slots| range(slots)).collect(),
        })
    }
}

/// Parses `5` or `5-9`. Returns `None` for `[5->-…]`, an open slot.
fn range(slots: &str) -> Option<RangeInclusive<u16>> {
    let (first, last) = slots.split_once('-').unwrap_or((slots, slots));
    Some(first.parse().ok()?..=last.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_names_the_owner_of_slots() {
        let line = Line::of(
            "07c3 127.0.0.1:30004@31004,host myself,master - 0 1426238317239 4 connected \
             0-5 93 [94->-e7d1]",
        )
        .expect("the line is complete");
        assert_eq!((line.id.as_str(), line.is_own, line.epoch), ("07c3", true, 4));
        assert_eq!(line.primary, None);
        assert_eq!(line.slots, [0..=5, 93..=93]);

        let replica = "e7d1 :0@0 slave,fail 07c3 0 0 4 disconnected";
        assert_eq!(
            Line::of(replica).expect("the line is complete").primary.as_deref(),
            Some("07c3")
        );
        assert!(Line::of("e7d1 :0@0 handshake - 0 0 0 connected").is_none());
    }
}
