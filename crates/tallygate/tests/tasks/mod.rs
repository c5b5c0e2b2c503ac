//! An executor for tests: it runs tasks on one thread, by hand, and can neglect some of them.

#![allow(dead_code, unreachable_pub, reason = "each test file uses its part")]

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};

use tallygate::{
    Capacity, Clock as _, Decision, ManualClock, Policy, PolicyStore, RateLimiter, StoreError,
    Tick, Ticks,
};

pub type Limiter<'a> = RateLimiter<Policy, PolicyStore<&'a ManualClock>>;

pub fn limiter(policy: Policy, clock: &ManualClock) -> Limiter<'_> {
    let store = PolicyStore::new(&policy, Capacity::of(10), clock);
    RateLimiter::with_store(policy, store)
}

pub const FOREVER: Ticks = Ticks(1 << 40);

type Task<'a> = dyn Future<Output = Result<Decision, StoreError>> + 'a;

/// Runs tasks on this thread, each only when it was woken.
pub struct Tasks<'a> {
    pub running: BTreeMap<usize, Pin<Box<Task<'a>>>>,
    next: usize,
    woken: Arc<Mutex<VecDeque<usize>>>,
    /// The tasks that the executor neglects: it polls them once, and not again until they are thawed.
    frozen: BTreeSet<usize>,
}

struct Woken(usize, Arc<Mutex<VecDeque<usize>>>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.1.lock().expect("not poisoned").push_back(self.0);
    }
}

impl<'a> Tasks<'a> {
    pub fn new() -> Self {
        Self { running: BTreeMap::new(), next: 0, woken: Arc::default(), frozen: BTreeSet::new() }
    }

    pub fn add(&mut self, task: impl Future<Output = Result<Decision, StoreError>> + 'a) -> usize {
        let number = self.next;
        self.next += 1;
        self.running.insert(number, Box::pin(task));
        self.woken.lock().expect("not poisoned").push_back(number);
        number
    }

    /// Neglects a task.
    pub fn freeze(&mut self, task: usize) {
        self.frozen.insert(task);
    }

    /// Polls a task again.
    pub fn thaw(&mut self, task: usize) {
        self.frozen.remove(&task);
        self.woken.lock().expect("not poisoned").push_back(task);
    }

    pub fn leave(&mut self, task: usize) -> bool {
        self.running.remove(&task).is_some()
    }

    /// Polls whoever was woken; returns who is done.
    pub fn run(&mut self) -> Vec<(usize, Decision)> {
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
            if let Poll::Ready(told) = task.as_mut().poll(&mut Context::from_waker(&waker)) {
                self.running.remove(&number);
                done.push((number, told.expect("a short key")));
            }
        }
    }

    /// Runs until a time; returns who was served when.
    pub fn run_until(&mut self, clock: &ManualClock, end: Tick) -> Vec<(usize, Tick, Decision)> {
        let mut served = Vec::new();
        loop {
            served.extend(self.run().into_iter().map(|(task, told)| (task, clock.now(), told)));
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
