//! Real servers for tests, on free ports of the loopback interface.
//!
//! Each test starts what it needs and drops it: a server stops with its value, by its own process
//! id, and takes its folder with it. Nothing is shared and nothing is kept, so tests run side by
//! side. A value in a `static` is never dropped: do not put a server there.
//!
//! | file | what |
//! |---|---|
//! | `flavor.rs` | Redis or Valkey, and where its binary is |
//! | `server.rs` | one server: its life, its questions, its replicas |
//! | `cluster.rs` | a cluster: slots, failover, migration |
//! | `sentinel.rs` | a primary, its replicas and three sentinels |
//! | `proxy.rs` | a connection that fails on demand |
//! | `folder.rs`, `port.rs`, `tls.rs`, `waiting.rs` | what they are made of |
//!
//! Everything blocks and panics when it fails, also in asynchronous tests: a harness that goes on
//! without its server tests nothing. What a server answers is a result where a test may want the
//! error. `scripts/install-test-servers` installs the servers.

mod cluster;
mod flavor;
mod folder;
mod port;
mod proxy;
mod sentinel;
mod server;
mod tls;
mod waiting;

pub use cluster::Cluster;
pub use flavor::Flavor;
pub use proxy::Proxy;
pub use sentinel::Sentinel;
pub use server::Server;
pub use tls::Certificates;
pub use waiting::wait_until;
