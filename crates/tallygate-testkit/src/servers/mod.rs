//! Real servers for tests, on free ports of the loopback interface.
//!
//! Each test starts the servers that it needs. Dropping a server stops its process, by its own process id, and removes
//! its folder. Tests share nothing, so they can run in parallel. Do not put a server into a `static`, which is never
//! dropped.
//!
//! | file | contents |
//! |---|---|
//! | `flavor.rs` | Redis or Valkey, and the path of its binary |
//! | `server.rs` | one server: starting and stopping it, commands, replicas |
//! | `cluster.rs` | a cluster: slots, failover, migration |
//! | `sentinel.rs` | a primary, its replicas and three sentinels |
//! | `proxy.rs` | a connection that fails on demand |
//! | `stock_proxy.rs` | nginx, haproxy and Caddy in their stock configuration |
//! | `folder.rs`, `port.rs`, `tls.rs`, `waiting.rs` | temporary folders, free ports, certificates, waiting for a condition |
//!
//! All functions block, and panic if they fail, also in asynchronous tests: a test without its server tests nothing.
//! Functions that send commands return a `Result` if a test may want the error. `scripts/install-test-servers` installs
//! the servers.

mod cluster;
mod flavor;
mod folder;
mod port;
mod proxy;
mod sentinel;
mod server;
mod stock_proxy;
mod tls;
mod waiting;

pub use cluster::Cluster;
pub use flavor::Flavor;
pub use proxy::Proxy;
pub use sentinel::Sentinel;
pub use server::Server;
pub use stock_proxy::StockProxy;
pub use tls::Certificates;
pub use waiting::wait_until;
