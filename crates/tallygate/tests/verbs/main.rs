//! Every operation of a limiter, with one key and with several.

mod joint;
mod limiter;
#[cfg(feature = "metrics")]
mod metrics;
mod reservations;
mod verbs;
