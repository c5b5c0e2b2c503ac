//! The timer of the system's clocks: one thread for the whole process, started by the first future that
//! waits.
//!
//! A process that was forked has its own timer: the thread of its parent does not exist there, and the lock
//! of its parent may be held forever. That is why the timer is looked up by the id of the process, without a
//! lock.

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use arc_swap::ArcSwapOption;

/// The timer of this process, followed by those of its parents if it was forked.
static TIMER: ArcSwapOption<Timer> = ArcSwapOption::const_empty();

#[derive(Debug)]
struct Timer {
    process: u32,
    /// The wakers by the time at which they are due, and by the number of their sleep.
    wakers: Mutex<BTreeMap<(Instant, u64), Waker>>,
    earlier: Condvar,
    next: AtomicU64,
}

/// A future that is ready at a time, or soon after it.
#[derive(Debug)]
pub(crate) struct Sleep {
    timer: Arc<Timer>,
    /// `None` if the time is beyond what the system can count.
    when: Option<Instant>,
    number: u64,
}

impl Sleep {
    /// Returns a future that is ready after a time.
    ///
    /// # Panics
    /// If the system cannot start the thread of the timer.
    pub(crate) fn new(wait: Duration) -> Self {
        let timer = Timer::of(std::process::id());
        let number = timer.next.fetch_add(1, Ordering::Relaxed);
        Self { when: Instant::now().checked_add(wait), timer, number }
    }

    /// Switches to the timer of this process, if it was forked since.
    fn move_to(&mut self, process: u32) {
        if self.timer.process != process {
            // The sleep in the parent's timer belongs to another process and need not be removed.
            self.timer = Timer::of(process);
            self.number = self.timer.next.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl Timer {
    fn new(process: u32) -> Self {
        Self { process, wakers: Mutex::default(), earlier: Condvar::new(), next: AtomicU64::new(0) }
    }

    /// The timer of a process, which is started if there is none yet.
    #[expect(clippy::panic, reason = "without a thread no waiting future would ever be woken")]
    fn of(process: u32) -> Arc<Self> {
        loop {
            let current = TIMER.load_full();
            if let Some(timer) = current.as_ref().filter(|timer| timer.process == process) {
                return timer.clone();
            }
            let new = Arc::new(Self::new(process));
            let before = TIMER.compare_and_swap(&current, Some(new.clone()));
            if before.as_ref().map(Arc::as_ptr) == current.as_ref().map(Arc::as_ptr) {
                let timer = new.clone();
                let thread = thread::Builder::new().name("tallygate-timer".into());
                if let Err(error) = thread.spawn(move || timer.run()) {
                    TIMER.store(None);
                    panic!("cannot start the timer thread, so nothing can wait: {error}");
                }
                return new;
            }
        }
    }

    fn wakers(&self) -> MutexGuard<'_, BTreeMap<(Instant, u64), Waker>> {
        self.wakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes the wakers at their times, until the process ends.
    fn run(&self) {
        let mut wakers = self.wakers();
        loop {
            let now = Instant::now();
            let due = wakers.first_key_value().map(|(&(when, _), _)| when.duration_since(now));
            wakers = match due {
                Some(Duration::ZERO) => {
                    let first = wakers.pop_first();
                    drop(wakers);
                    // If one executor panics, the tasks of the others are still woken.
                    let wake = || first.into_iter().for_each(|(_, waker)| waker.wake());
                    if let Err(payload) = catch_unwind(AssertUnwindSafe(wake)) {
                        std::mem::forget(payload);
                    }
                    self.wakers()
                }
                Some(wait) => {
                    let waited = self.earlier.wait_timeout(wakers, wait);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.earlier.wait(wakers).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        self.move_to(std::process::id());
        let Some(when) = self.when else { return Poll::Pending };
        if when <= Instant::now() {
            return Poll::Ready(());
        }
        let (key, waker) = ((when, self.number), context.waker().clone());
        let mut wakers = self.timer.wakers();
        let old = wakers.insert(key, waker);
        let is_first = wakers.first_key_value().is_some_and(|(first, _)| *first == key);
        drop(wakers);
        drop(old);
        if is_first {
            self.timer.earlier.notify_one();
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        // The lock of a parent's timer may be held forever by a thread that is not in this process.
        if self.timer.process != std::process::id() {
            return;
        }
        if let Some(when) = self.when {
            let waker = self.timer.wakers().remove(&(when, self.number));
            drop(waker);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block_on;

    #[test]
    fn sleeps_end_in_order_and_not_early() {
        let from = Instant::now();
        let waits = [3, 1, 2].map(Duration::from_millis);
        for sleep in waits.map(Sleep::new) {
            block_on(sleep);
        }
        assert!(from.elapsed() >= waits[0]);
    }

    /// A forked process has the memory of its parent, but not its threads.
    ///
    /// Fault K12.
    #[test]
    fn a_sleep_ends_in_a_process_without_the_thread_of_its_timer() {
        let parent = Arc::new(Timer::new(std::process::id() + 1));
        // A thread of the parent held the lock when it was forked, and will never release it.
        let held = parent.wakers();
        TIMER.store(Some(parent.clone()));
        let when = Instant::now().checked_add(Duration::from_millis(1));
        block_on(Sleep { timer: parent.clone(), when, number: 0 });
        block_on(Sleep::new(Duration::from_millis(1)));
        assert!(held.is_empty());
    }
}
