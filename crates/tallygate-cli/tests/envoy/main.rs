//! Envoy's rate limit service: over gRPC and JSON, on every store, and behind a real Envoy.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

mod attacks;
#[path = "../common/mod.rs"]
mod common;
mod grpc_client;
#[path = "../http_client/mod.rs"]
mod http_client;
mod proxy;
mod service;
mod stores;
