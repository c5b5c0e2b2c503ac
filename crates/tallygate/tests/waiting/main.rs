//! Waiting in line and shaping.

mod faults;
mod tasks;
mod waiting;
