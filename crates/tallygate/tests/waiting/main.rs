//! Waiting in line and shaping.

mod faults;
mod mixtures;
mod set_backs;
mod tasks;
mod waiting;
