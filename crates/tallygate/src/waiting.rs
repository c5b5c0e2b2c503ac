//! Waiting for a turn, on any runtime or on none.
//!
//! The futures here are plain: they are woken by the [`Alarm`] of the store's clock (for the system's
//! clocks one timer thread for the whole process, started by the first future that waits) and by the
//! requests before them in the line. So any executor works, and programs that never wait pay for nothing.
//! `line.rs` has the rules of lines, `departures.rs` those of shaping.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tallygate_core::{Algorithm, Cost, Decision, Tick, Ticks};

use crate::ask::Ask;
use crate::clock::Alarm;
use crate::departures::Departure;
use crate::limiter::RateLimiter;
use crate::line::{Joined, Ticket, Turn};
use crate::observer::Observer;
use crate::rules::Rules;
use crate::store::{Store, StoreError};

/// A store in whose lines requests can wait: the memory stores. Not exported: tickets belong to one store.
pub trait WaitingStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// The clock that wakes requests that wait.
    type Clock: Alarm;

    /// The clock of the store.
    fn clock(&self) -> &Self::Clock;

    /// Asks for a key. If the cost does not fit yet, but may fit in time, the request waits in line.
    ///
    /// # Errors
    /// The key is too long, or the store is full.
    fn join(&self, rule: &A, key: &[u8], cost: Cost, max_wait: Ticks)
    -> Result<Joined, StoreError>;

    /// Asks whether it is a waiter's turn, and says when to ask again.
    ///
    /// # Errors
    /// The store is full, or the policy is of another kind.
    fn turn(&self, rule: &A, ticket: &mut Ticket, waker: &Waker) -> Result<Turn, StoreError>;

    /// Leaves the line.
    fn leave(&self, ticket: &Ticket);

    /// Decides a request of cost 1. If it is allowed and has to wait, it takes a departure time.
    ///
    /// # Errors
    /// The key is too long, or the store is full.
    fn shape(&self, rule: &A, key: &[u8]) -> Result<(Decision, Option<Departure>), StoreError>;

    /// Returns when a shaped request must ask again, or `None` if it leaves now.
    fn departs(&self, departure: &Departure, waker: &Waker) -> Option<Tick>;

    /// Cancels a shaped request that has not left.
    fn cancel(&self, rule: &A, departure: &Departure);
}

impl<R: Rules, S: WaitingStore<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// Waits until the client may use this much, first come, first served, and charges it. It goes by the clock of the
    /// store: a time that the question names is not read.
    ///
    /// It is denied at once if it cannot be served within `max_wait`, and by then at the latest, whatever the
    /// requests before it do; nothing is charged then. The `retry_after` of a denial behind a line is a lower
    /// bound: see [`check`](Self::check).
    ///
    /// The future joins the line when it is first polled. Nothing is charged before it is ready. If it is
    /// dropped earlier, it leaves the line, and the requests behind it move up. It is served when it is polled
    /// at or after the earliest time at which its cost fits. A future that is not polled holds up the requests
    /// behind it, and every check of the key, until its deadline at the longest; then it loses its place.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::{Policy, RateLimiter, block_on};
    /// # block_on(async {
    /// let limiter = RateLimiter::new(Policy::token_bucket(100).per_second().burst(1).build()?);
    /// for _ in 0..3 {
    ///     assert!(limiter.until_ready("alice", Duration::from_secs(5)).await?.allowed);
    /// }
    /// let refused = limiter.until_ready("alice", Duration::from_millis(1)).await?;
    /// assert!(!refused.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The store has no place for the key.
    pub async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        let (ask, max_wait) = (ask.into(), max_wait.into());
        let rule = self.rule(&ask)?;
        let ticket = match self.store.join(&rule, ask.key, ask.cost, max_wait)? {
            Joined::Decided(decision) => {
                self.notifier().decided(&*rule, ask.key, ask.cost, &decision, self.store.now());
                return Ok(decision);
            }
            Joined::Waiting(ticket) => ticket,
        };
        drop(rule);
        let mut place = InLine { store: &self.store, ticket, leave: S::leave };
        let mut ring = None;
        poll_fn(move |context| {
            loop {
                // The rules are asked each time: they may have changed.
                let rule = self.rule_by_now(&ask);
                match self.store.turn(&rule, &mut place.ticket, context.waker())? {
                    Turn::Done(decision) => {
                        let now = self.store.now();
                        self.notifier().decided(&*rule, ask.key, ask.cost, &decision, now);
                        return Poll::Ready(Ok(decision));
                    }
                    Turn::At(when) => {
                        if wait_for(self.store.clock(), &mut ring, when, context).is_pending() {
                            return Poll::Pending;
                        }
                    }
                }
            }
        })
        .await
    }

    /// Decides now, and waits as long as the [leaky bucket](tallygate_core::Kind::LeakyBucket) says, so that the
    /// output is flat. A denial does not wait. Each request leaves alone, so its cost is 1, whatever the question says.
    ///
    /// If the future is dropped while it waits, the requests behind it move up, and the last departure time is
    /// returned to the bucket, unless a request that was not shaped took a later one. The output stays flat.
    ///
    /// # Errors
    /// The store has no place for the key.
    pub async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>>) -> Result<Decision, StoreError> {
        let ask = ask.into();
        let rule = self.rule(&ask)?;
        let (decision, departure) = self.store.shape(&rule, ask.key)?;
        let mut shaped =
            departure.map(|departure| Shaped { limiter: self, ask, departure: Some(departure) });
        self.notifier().decided(&*rule, ask.key, 1, &decision, self.store.now());
        drop(rule);
        let mut ring = None;
        poll_fn(|context| {
            while let Some(departure) = shaped.as_ref().and_then(|shaped| shaped.departure.as_ref())
            {
                match self.store.departs(departure, context.waker()) {
                    None => break,
                    Some(when) => {
                        if wait_for(self.store.clock(), &mut ring, when, context).is_pending() {
                            return Poll::Pending;
                        }
                    }
                }
            }
            Poll::Ready(())
        })
        .await;
        if let Some(shaped) = &mut shaped {
            shaped.departure = None;
        }
        Ok(decision)
    }

    /// [`until_ready`](Self::until_ready) for threads: this one sleeps meanwhile.
    ///
    /// Within an asynchronous task it blocks the thread of the executor, and returns by its deadline also if
    /// a request before it in the line is a task of that same thread.
    ///
    /// # Errors
    /// As there.
    pub fn block_until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        block_on(self.until_ready(ask, max_wait))
    }
}

/// Polls an alarm that is set to a time; it is set again if the time has changed. Ready when it rings.
fn wait_for<'a, C: Alarm>(
    clock: &'a C,
    ring: &mut Option<(Tick, Pin<Box<C::Ring<'a>>>)>,
    when: Tick,
    context: &mut Context<'_>,
) -> Poll<()> {
    let (_, ringing) = match ring {
        Some(set) if set.0 == when => set,
        _ => ring.insert((when, Box::pin(clock.ring_at(when)))),
    };
    let polled = ringing.as_mut().poll(context);
    if polled.is_ready() {
        // The next time it is set again: it may have rung early.
        *ring = None;
    }
    polled
}

/// A place in a line, which is left when it is dropped.
struct InLine<'a, S> {
    store: &'a S,
    ticket: Ticket,
    leave: fn(&S, &Ticket),
}

impl<S> Drop for InLine<'_, S> {
    fn drop(&mut self) {
        (self.leave)(self.store, &self.ticket);
    }
}

/// A request that waits for its departure, and is canceled if it is dropped before.
struct Shaped<'a, R: Rules, S: WaitingStore<R::Rule>, O: Observer> {
    limiter: &'a RateLimiter<R, S, O>,
    ask: Ask<'a>,
    departure: Option<Departure>,
}

impl<R: Rules, S: WaitingStore<R::Rule>, O: Observer> Drop for Shaped<'_, R, S, O> {
    fn drop(&mut self) {
        let Some(departure) = &self.departure else { return };
        // A panic of a rule must not become a second one, if this is dropped because of a first.
        let canceled = catch_unwind(AssertUnwindSafe(|| {
            let rule = self.limiter.rule_by_now(&self.ask);
            self.limiter.store.cancel(&rule, departure);
        }));
        if let Err(payload) = canceled {
            std::mem::forget(payload);
        }
    }
}

/// Runs a future on this thread, which sleeps whenever the future waits. For programs without a
/// runtime.
///
/// Calls may be nested: a future that is run by it may call it for another.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark {
        thread: Thread,
        /// A nested call may use up what wakes the thread, so each call remembers that it was woken.
        woken: AtomicBool,
    }

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.wake_by_ref();
        }

        fn wake_by_ref(self: &Arc<Self>) {
            self.woken.store(true, Ordering::Release);
            self.thread.unpark();
        }
    }

    let mut future = pin!(future);
    let unpark = Arc::new(Unpark { thread: std::thread::current(), woken: AtomicBool::new(false) });
    let waker = Waker::from(unpark.clone());
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        while !unpark.woken.swap(false, Ordering::Acquire) {
            std::thread::park();
        }
    }
}
