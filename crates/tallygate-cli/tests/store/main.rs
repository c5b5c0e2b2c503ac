//! A server whose clients are in Redis.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod leases;
mod store_faults;
