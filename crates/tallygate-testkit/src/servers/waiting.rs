//! Waiting for a condition in another process.

use std::thread;
use std::time::{Duration, Instant};

/// The pause between two checks of a condition.
pub(super) const PAUSE: Duration = Duration::from_millis(10);

/// The longest wait for an event that usually takes a second. The machine may be busy with a build.
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Waits until a condition is true.
///
/// # Panics
///
/// Panics if the condition is not true in time. `what` describes it, such as `"a replica is promoted"`.
pub fn wait_until(what: &str, within: Duration, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + within;
    while !holds() {
        assert!(Instant::now() < deadline, "timed out after {within:?} waiting until {what}");
        thread::sleep(PAUSE);
    }
}
