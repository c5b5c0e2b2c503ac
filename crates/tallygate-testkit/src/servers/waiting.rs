//! Waiting for what another process does.

use std::thread;
use std::time::{Duration, Instant};

/// How often a condition is tried.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// How long the harness waits for what should take a second, on a machine that builds meanwhile.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Tries a condition until it holds.
///
/// # Panics
///
/// If it does not in time; `what` names it: `"a replica is promoted"`.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < deadline, "waited {within:?} in vain until {what}");
        thread::sleep(PAUSE);
    }
}
