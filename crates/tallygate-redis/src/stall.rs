//! Notices when this process gets too little processor time to read replies when they arrive.
//!
//! To a process that does not run, a reply that waits in its socket and a reply that was never sent look alike. So a
//! silent server counts as unavailable only if this process could have read its reply. While calls are in flight, a task
//! wakes up every few milliseconds. If it wakes up late, the process was *stalled*: other processes had the processor, or
//! its own tasks kept it busy.
//!
//! A stall is remembered for a second. A machine that is short of processor time for this process is usually short of it
//! for a server on the same machine as well.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Remembers when this process was last stalled.
#[derive(Debug)]
pub(crate) struct StallMonitor {
    created: Instant,
    is_running: AtomicBool,
    /// Until when calls may be in flight, in nanoseconds since the monitor was created.
    needed_until_ns: AtomicU64,
    /// When the task has to wake up next, counted in the same way; [`NEVER`] if it does not run.
    due_ns: AtomicU64,
    /// When the last stall ended, counted in the same way; 0 if there was none.
    stalled_ns: AtomicU64,
}

/// How often the task wakes up.
const INTERVAL: Duration = Duration::from_millis(5);
/// A process whose timers are late by more than this gets too little processor time to read replies in time.
pub(crate) const STALL: Duration = Duration::from_millis(4);
/// How long a stall is remembered.
const REMEMBERED: Duration = Duration::from_secs(1);
const NEVER: u64 = u64::MAX;

impl StallMonitor {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self {
            created: Instant::now(),
            is_running: AtomicBool::new(false),
            needed_until_ns: AtomicU64::new(0),
            due_ns: AtomicU64::new(NEVER),
            stalled_ns: AtomicU64::new(0),
        })
    }

    /// Watches for stalls until a time.
    pub(crate) fn watch_until(self: &Arc<Self>, until: Instant) {
        self.needed_until_ns.fetch_max(self.nanos(until), Ordering::Relaxed);
        if self.is_running.load(Ordering::Relaxed) || self.is_running.swap(true, Ordering::AcqRel) {
            return;
        }
        // From now on the task is due, even if the process stalls before it runs for the first time.
        let mut due = self.next_due(Instant::now());
        let watch = Watch(self.clone());
        tokio::spawn(async move {
            let monitor = &watch.0;
            while monitor.needed_until_ns.load(Ordering::Relaxed) > monitor.nanos(due) {
                tokio::time::sleep_until(due.into()).await;
                let now = Instant::now();
                monitor.woke_up(due, now);
                due = monitor.next_due(now);
            }
        });
    }

    /// Returns whether this process is stalled now, or was within the last second.
    pub(crate) fn was_stalled_lately(&self, now: Instant) -> bool {
        let stalled = self.stalled_ns.load(Ordering::Relaxed);
        let is_recent = stalled > 0 && self.since(stalled, now) < REMEMBERED;
        let due = self.due_ns.load(Ordering::Relaxed);
        is_recent || due != NEVER && self.since(due, now) > STALL
    }

    fn next_due(&self, now: Instant) -> Instant {
        let due = now + INTERVAL;
        self.due_ns.store(self.nanos(due), Ordering::Relaxed);
        due
    }

    /// Records that the task had to wake up at one time, and did at another.
    fn woke_up(&self, due: Instant, now: Instant) {
        if now.saturating_duration_since(due) > STALL {
            self.stalled_ns.fetch_max(self.nanos(now), Ordering::Relaxed);
        }
    }

    fn nanos(&self, time: Instant) -> u64 {
        let nanos = time.saturating_duration_since(self.created).as_nanos();
        u64::try_from(nanos).unwrap_or(NEVER - 1)
    }

    fn since(&self, nanos: u64, now: Instant) -> Duration {
        Duration::from_nanos(self.nanos(now).saturating_sub(nanos))
    }
}

/// The task of a monitor. When it ends, also together with its runtime, another one can start.
struct Watch(Arc<StallMonitor>);

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.due_ns.store(NEVER, Ordering::Relaxed);
        self.0.is_running.store(false, Ordering::Release);
    }
}

#[cfg(test)]
impl StallMonitor {
    /// Records a stall that ended at a time.
    pub(crate) fn stall_until(&self, time: Instant) {
        self.woke_up(time - 2 * STALL, time);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_late_wake_up_is_a_stall_for_a_second() {
        let monitor = StallMonitor::new();
        let due = monitor.created + 100 * MS;
        monitor.woke_up(due, due + STALL);
        assert!(!monitor.was_stalled_lately(due + STALL), "timers are a little late");
        let late = due + STALL + MS;
        monitor.woke_up(due, late);
        assert!(monitor.was_stalled_lately(late));
        assert!(monitor.was_stalled_lately(late + REMEMBERED - MS));
        assert!(!monitor.was_stalled_lately(late + REMEMBERED));
    }

    #[test]
    fn a_wake_up_that_is_overdue_is_a_stall() {
        let monitor = StallMonitor::new();
        let start = monitor.created + MS;
        assert!(!monitor.was_stalled_lately(start + REMEMBERED), "there is no task");
        let due = monitor.next_due(start);
        assert!(!monitor.was_stalled_lately(due + STALL));
        assert!(monitor.was_stalled_lately(due + STALL + MS));
    }

    #[tokio::test]
    async fn the_task_notices_a_blocked_thread_and_ends_when_it_is_not_needed() {
        let monitor = StallMonitor::new();
        monitor.watch_until(Instant::now() + 50 * MS);
        assert!(monitor.is_running.load(Ordering::Relaxed));
        // Nothing else runs on this thread, neither the task.
        let blocked = Instant::now();
        while blocked.elapsed() < 20 * MS {
            std::hint::spin_loop();
        }
        assert!(monitor.was_stalled_lately(Instant::now()));
        while monitor.is_running.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        assert!(monitor.was_stalled_lately(Instant::now()), "it is remembered");
        assert_eq!(monitor.due_ns.load(Ordering::Relaxed), NEVER);
    }
}
