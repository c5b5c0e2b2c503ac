//! The layer in real servers over loopback: axum, hyper and tonic, HTTP/1 and HTTP/2.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]
#![allow(clippy::result_large_err, reason = "the status of tonic is large")]

mod axum_services;
mod cancellation;
mod charges;
mod client_addresses;
mod grpc;
mod hyper_services;
mod nesting;
mod network;
mod outgoing;
mod redis_store;
mod verdicts;
