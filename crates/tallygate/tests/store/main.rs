//! The memory stores: their bounds, threads, clocks and snapshots.

#![allow(clippy::incompatible_msrv, reason = "built with the toolchain of the workspace only")]

mod bounds;
mod contract;
mod late;
mod snapshot;
mod threads;
