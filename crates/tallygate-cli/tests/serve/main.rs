//! A server as it is started, changed, watched and stopped.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod deploy;
mod killed;
mod logs;
mod notify;
mod secrets;
mod serve;
mod snapshot;
mod soak;
mod tls;
mod tokens;
mod traces;
