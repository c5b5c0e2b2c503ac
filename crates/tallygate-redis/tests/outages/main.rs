//! Servers that fail: how the limiter decides meanwhile, and how it recovers.
//!
//! `cluster` and `unavailable` stop and freeze real servers and wait for them in real time, so nextest retries them.

#![allow(clippy::unwrap_used, reason = "a test, also in functions that are not tests themselves")]

#[path = "../common/mod.rs"]
mod common;

mod clocks;
mod cluster;
mod rule_changes;
mod server_errors;
mod unavailable;
mod windows;
