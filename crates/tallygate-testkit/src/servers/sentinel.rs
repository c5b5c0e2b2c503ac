//! A primary, its replicas and three sentinels that watch them.

use std::time::Duration;

use super::flavor::Flavor;
use super::server::{Kind, Server};
use super::waiting::{PATIENCE, wait_until};

/// The name of the primary for the sentinels.
const NAME: &str = "main";

/// How many of the three sentinels must agree that the primary is down.
const QUORUM: &str = "2";

/// Servers and sentinels. The sentinels consider a server down after half a second.
#[derive(Debug)]
pub struct Sentinel {
    // Dropped first, so that stopping the servers does not start a failover.
    sentinels: Vec<Server>,
    servers: Vec<Server>,
}

impl Sentinel {
    /// Starts a primary with replicas and three sentinels, and waits until they all know each other.
    #[must_use]
    pub fn start(flavor: Flavor, replicas: usize) -> Self {
        let primary = Server::start(flavor);
        let replicas: Vec<_> = (0..replicas).map(|_| Server::replica_of(&primary)).collect();
        let watching = Self {
            sentinels: (0..3).map(|_| Server::of(Kind::Sentinel, flavor, &[])).collect(),
            servers: [primary].into_iter().chain(replicas).collect(),
        };
        watching.watch();
        watching
    }

    fn watch(&self) {
        let port = self.servers[0].port().to_string();
        for sentinel in &self.sentinels {
            sentinel.ask::<()>(&["SENTINEL", "MONITOR", NAME, "127.0.0.1", &port, QUORUM]);
            for (setting, value) in
                [("down-after-milliseconds", "500"), ("failover-timeout", "2000")]
            {
                sentinel.ask::<()>(&["SENTINEL", "SET", NAME, setting, value]);
            }
        }
        let replicas = self.servers.len() - 1;
        let known = format!("status=ok,address=127.0.0.1:{port},slaves={replicas},sentinels=3");
        for sentinel in &self.sentinels {
            wait_until("the sentinels know each other and the replicas", PATIENCE, || {
                sentinel.info("sentinel").get("master0").is_some_and(|main| main.ends_with(&known))
            });
        }
    }

    /// Returns the name by which a client asks the sentinels for the primary: `main`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        NAME
    }

    /// Returns the URLs of all sentinels, including stopped ones.
    #[must_use]
    pub fn urls(&self) -> Vec<String> {
        self.sentinels.iter().map(Server::url).collect()
    }

    /// Returns the three sentinels.
    #[must_use]
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// Returns the servers. The first one is the primary at the start.
    #[must_use]
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// Returns the address of the primary according to a running sentinel.
    ///
    /// # Panics
    ///
    /// Panics if no sentinel is running.
    #[must_use]
    pub fn primary(&self) -> String {
        let sentinel = self.sentinels.iter().find(|sentinel| sentinel.is_running());
        let address: Vec<String> = sentinel.expect("a sentinel is running").ask(&[
            "SENTINEL",
            "GET-MASTER-ADDR-BY-NAME",
            NAME,
        ]);
        address.join(":")
    }

    /// Returns the primary according to a running sentinel.
    ///
    /// # Panics
    ///
    /// Panics if no sentinel is running.
    #[must_use]
    pub fn primary_server(&self) -> &Server {
        let address = self.primary();
        let primary = self.servers.iter().find(|server| server.address() == address);
        primary.expect("the primary is one of the servers")
    }

    /// Waits until every running sentinel names a primary other than `address`, and that one accepts writes.
    ///
    /// # Panics
    ///
    /// Panics if that takes longer than `within`.
    pub fn wait_until_primary_is_not(&self, address: &str, within: Duration) {
        wait_until("the sentinels name another primary", within, || {
            let mut running = self.sentinels.iter().filter(|sentinel| sentinel.is_running());
            let moved = running.all(|sentinel| {
                let named: Vec<String> =
                    sentinel.ask(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
                named.join(":") != address
            });
            moved && {
                let role = self.primary_server().info("replication").remove("role");
                role.is_some_and(|role| role == "master")
            }
        });
    }
}
