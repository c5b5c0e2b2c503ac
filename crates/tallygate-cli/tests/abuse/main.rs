//! Tests of a server under attack.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod abuse;
mod force;
mod key_floods;
