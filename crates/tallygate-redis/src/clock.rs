//! A clock that counts the time in which the machine is suspended.
//!
//! A lease ends by the store's clock, whether this machine runs or sleeps. [`Instant`](std::time::Instant) stops
//! while it sleeps on Linux, so leases count by the time since boot instead. Other systems have `Instant` only: macOS and
//! Windows machines that sleep with leases may serve them for the rest of their life when they wake.

use std::sync::LazyLock;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Reads a clock that never goes back.
pub(crate) type ReadClock = fn() -> Duration;

/// Returns the time since the machine was booted, suspended time included.
#[cfg(target_os = "linux")]
pub(crate) fn since_boot() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Returns the time since the first call.
#[cfg(not(target_os = "linux"))]
pub(crate) fn since_boot() -> Duration {
    static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
    START.elapsed()
}

/// Returns the time since the epoch, in microseconds, by the clock that this process read when it started. It never
/// goes back: windows end by it while Redis is unavailable.
pub(crate) fn since_epoch_us() -> i64 {
    static START: LazyLock<(Duration, Duration)> = LazyLock::new(|| {
        let since_epoch = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        (since_epoch, since_boot())
    });
    let (since_epoch, booted) = *START;
    let now = since_epoch.saturating_add(since_boot().saturating_sub(booted));
    i64::try_from(now.as_micros()).unwrap_or(i64::MAX)
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn the_clock_is_the_time_since_boot() {
        let before = since_boot();
        let uptime = std::fs::read_to_string("/proc/uptime").unwrap();
        let uptime: f64 = uptime.split(' ').next().unwrap().parse().unwrap();
        // The file has hundredths of a second.
        assert!((uptime - before.as_secs_f64()).abs() < 1.0, "{uptime} {before:?}");
    }
}
