//! Tests of HTTP: the API, its faults, proxies in front of it, and administrators.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod admin_access;
mod http;
mod http_faults;
mod http_proxies;
mod limits;
