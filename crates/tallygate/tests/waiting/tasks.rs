//! An executor for tests: it runs tasks step by step on one thread, and can stop polling some of them.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use tallygate::clock::{Alarm, Clock, ManualClock};
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Decision, MemoryLimiter, Policy, RateLimiter, StoreError, Tick, Ticks};

pub(crate) type Limiter<'a> = MemoryLimiter<&'a ManualClock>;

pub(crate) fn limiter(policy: Policy, clock: &ManualClock) -> Limiter<'_> {
    let store = PolicyStore::new(&policy, Capacity::of(10), clock);
    RateLimiter::with_store(policy, store)
}

pub(crate) const FOREVER: Ticks = Ticks(1 << 40);

type Task<'a> = dyn Future<Output = Result<Decision, StoreError>> + 'a;

/// Runs tasks on this thread, each only when it was woken.
pub(crate) struct Tasks<'a> {
    pub(crate) running: BTreeMap<usize, Pin<Box<Task<'a>>>>,
    next: usize,
    woken: Arc<Mutex<VecDeque<usize>>>,
    /// The frozen tasks: the executor polls them once, and not again until they are thawed.
    frozen: BTreeSet<usize>,
}

struct Woken(usize, Arc<Mutex<VecDeque<usize>>>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.1.lock().expect("not poisoned").push_back(self.0);
    }
}

impl<'a> Tasks<'a> {
    pub(crate) fn new() -> Self {
        Self { running: BTreeMap::new(), next: 0, woken: Arc::default(), frozen: BTreeSet::new() }
    }

    pub(crate) fn add(
        &mut self,
        task: impl Future<Output = Result<Decision, StoreError>> + 'a,
    ) -> usize {
        let number = self.next;
        self.next += 1;
        self.running.insert(number, Box::pin(task));
        self.woken.lock().expect("not poisoned").push_back(number);
        number
    }

    /// Freezes a task: it is not polled any more.
    pub(crate) fn freeze(&mut self, task: usize) {
        self.frozen.insert(task);
    }

    /// Polls a task again.
    pub(crate) fn thaw(&mut self, task: usize) {
        self.frozen.remove(&task);
        self.woken.lock().expect("not poisoned").push_back(task);
    }

    pub(crate) fn leave(&mut self, task: usize) -> bool {
        self.running.remove(&task).is_some()
    }

    /// Polls the tasks that were woken. Returns the tasks that are done.
    pub(crate) fn run(&mut self) -> Vec<(usize, Decision)> {
        let mut done = Vec::new();
        loop {
            let Some(number) = self.woken.lock().expect("not poisoned").pop_front() else {
                return done;
            };
            if self.frozen.contains(&number) {
                continue;
            }
            let Some(task) = self.running.get_mut(&number) else { continue };
            let waker = Waker::from(Arc::new(Woken(number, self.woken.clone())));
            if let Poll::Ready(decision) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
                self.running.remove(&number);
                done.push((number, decision.expect("a short key")));
            }
        }
    }

    /// Runs until a time. Returns which tasks were served, and when.
    pub(crate) fn run_until(
        &mut self,
        clock: &ManualClock,
        end: Tick,
    ) -> Vec<(usize, Tick, Decision)> {
        let mut served = Vec::new();
        loop {
            served.extend(
                self.run().into_iter().map(|(task, decision)| (task, clock.now(), decision)),
            );
            match clock.next_ring() {
                Some(next) if next <= end => clock.set(next),
                _ => {
                    clock.set(end);
                    return served;
                }
            }
        }
    }
}

/// A manual clock that can return a reading of the past once, like a thread that was descheduled after reading the
/// clock. It can be read at most a thousand times, so that a task that checks again and again fails.
pub(crate) struct LateClock<'a> {
    clock: &'a ManualClock,
    late: Mutex<Option<(u32, Tick)>>,
    readings: AtomicUsize,
}

impl<'a> LateClock<'a> {
    pub(crate) const fn new(clock: &'a ManualClock) -> Self {
        Self { clock, late: Mutex::new(None), readings: AtomicUsize::new(0) }
    }

    /// Makes the next reading one from before a set-back.
    pub(crate) fn read_late(&self, set_backs: u32, now: Tick) {
        *self.late.lock().expect("not poisoned") = Some((set_backs, now));
    }
}

impl Clock for LateClock<'_> {
    fn now(&self) -> Tick {
        assert!(self.readings.fetch_add(1, Ordering::Relaxed) < 1_000, "it checks again and again");
        let late = self.late.lock().expect("not poisoned").take();
        late.map_or_else(|| self.clock.now(), |(_, now)| now)
    }

    fn set_backs(&self) -> u32 {
        let late = *self.late.lock().expect("not poisoned");
        late.map_or_else(|| self.clock.set_backs(), |(set_backs, _)| set_backs)
    }
}

impl Alarm for LateClock<'_> {
    type Ring<'a>
        = <ManualClock as Alarm>::Ring<'a>
    where
        Self: 'a;

    fn ring_at(&self, when: Tick) -> Self::Ring<'_> {
        self.clock.ring_at(when)
    }
}
