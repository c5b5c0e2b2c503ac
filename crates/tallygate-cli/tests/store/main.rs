//! Tests of a server with a Redis store.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod leases;
mod store_faults;
