//! Tests of a server's life: start, reload, monitoring and shutdown.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod compatibility;
mod deploy;
mod killed;
mod logs;
mod metrics;
mod notify;
mod secrets;
mod serve;
mod snapshot;
mod soak;
mod tls;
mod tokens;
mod traces;
