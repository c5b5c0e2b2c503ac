//! The promises of a store on a healthy Redis or Valkey: the same results as in memory, shared by all processes.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test, also in functions that are not tests themselves"
)]

#[path = "../common/mod.rs"]
mod common;

mod brokers;
mod contract;
mod format;
mod joint;
mod leases;
mod processes;
mod security;
mod tiers;
mod verbs;
