//! The commands on traces and logs, and the same over HTTP.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod backtest;
mod replay;
mod replay_store;
mod simulate;
