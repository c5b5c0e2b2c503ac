//! Waiting in line and shaping.

mod faults;
mod set_backs;
mod tasks;
mod waiting;
