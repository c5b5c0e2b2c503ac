//! Waiting until a request is allowed, on any executor.
//!
//! The futures are woken by the [`Alarm`] of the store's clock and by the requests before them in the line. The alarm of
//! the system's clocks is one timer thread per process, which the first waiting future starts. So any executor works, and
//! programs that never wait pay for nothing. `line.rs` has the rules of lines, `departures.rs` the rules of shaping.

use std::future::poll_fn;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use tallygate_core::{Decision, Tick, Ticks};

use crate::ask::Ask;
use crate::block_on::block_on;
use crate::clock::Alarm;
use crate::departures::Departure;
use crate::limiter::RateLimiter;
use crate::line::{Joined, Ticket, Turn, WaitMode};
use crate::observer::Observer;
use crate::rule_source::RuleSource;
use crate::storage::{Store, StoreError};
use crate::waiting_store::WaitingStore;

impl<R: RuleSource, S: WaitingStore<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// Waits until the request is allowed, first come, first served, and charges it. It uses the clock of the store,
    /// and ignores the time of the request.
    ///
    /// The request is denied at once if it cannot be served within `max_wait`, and after `max_wait` at the latest, whatever
    /// the requests before it do. Nothing is charged then. The `retry_after` of a denial behind a line is a lower bound:
    /// see [`check`](Self::check).
    ///
    /// The future joins the line when it is first polled. Nothing is charged before it is ready. If it is dropped earlier,
    /// it leaves the line, and the requests behind it move up. It is served when it is polled at or after the earliest time
    /// at which its cost fits. A future that is not polled holds up the requests behind it, and every check of the key,
    /// until its deadline at the latest. Then it loses its place. Only
    /// [`block_until_ready`](Self::block_until_ready) on the thread that polled it last is served before it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tallygate::{Policy, RateLimiter, block_on};
    /// # block_on(async {
    /// let limiter = RateLimiter::new(Policy::token_bucket(100).per_second().burst(1).build()?);
    /// for _ in 0..3 {
    ///     assert!(limiter.until_ready("alice", Duration::from_secs(5)).await?.allowed);
    /// }
    /// let denied = limiter.until_ready("alice", Duration::from_millis(1)).await?;
    /// assert!(!denied.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// Fails if the key is too long, the tier is unknown, or the store has no place for the key.
    pub async fn until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        self.until_ready_in(&self.store, ask, max_wait).await
    }

    /// Checks the request now, and waits for the delay of the [leaky bucket](tallygate_core::Kind::LeakyBucket), so that
    /// requests leave at an even rate. A denial does not wait. The cost is always 1.
    ///
    /// If the future is dropped while it waits, the requests behind it move up, and the last departure time is
    /// returned to the bucket, unless a request that was not shaped took a later one. The output rate stays even.
    ///
    /// # Errors
    /// Fails if the key is too long, the tier is unknown, or the store has no place for the key.
    pub async fn shape<'a>(&'a self, ask: impl Into<Ask<'a>>) -> Result<Decision, StoreError> {
        self.shape_in(&self.store, ask).await
    }

    /// Waits as [`until_ready`](Self::until_ready) does, and blocks the thread meanwhile.
    ///
    /// Within an asynchronous task it blocks the thread of the executor. It then passes over futures of
    /// [`until_ready`](Self::until_ready) that wait for the same key and that this thread polled last: this thread cannot
    /// poll them meanwhile, and waiting for them would never end. They keep their places, and continue when another thread
    /// polls them or when this call returns. So `join!` of a waiting future and a blocking call works on one thread.
    ///
    /// # Errors
    /// Fails as `until_ready` does.
    pub fn block_until_ready<'a>(
        &'a self,
        ask: impl Into<Ask<'a>>,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        block_on(self.wait_in(&self.store, ask.into(), (max_wait.into(), WaitMode::Blocking)))
    }
}

/// Waiting in the lines of a memory store that the limiter's own store contains.
impl<R: RuleSource, S: Store<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// Waits as [`until_ready`](RateLimiter::until_ready) does, in a line of `store`.
    ///
    /// # Errors
    /// Fails as `until_ready` does.
    pub async fn until_ready_in<'a, W: WaitingStore<R::Rule>>(
        &'a self,
        store: &'a W,
        ask: impl Into<Ask<'a>>,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        self.wait_in(store, ask.into(), (max_wait.into(), WaitMode::Async)).await
    }

    async fn wait_in<'a, W: WaitingStore<R::Rule>>(
        &'a self,
        store: &'a W,
        ask: Ask<'a>,
        wait: (Ticks, WaitMode),
    ) -> Result<Decision, StoreError> {
        let rule = self.rule(&ask)?;
        let ticket = match store.join(&rule, ask.key, ask.cost, wait)? {
            Joined::Decided(decision) => {
                self.notifier().decided(&*rule, ask.key, ask.cost, &decision, store.now());
                return Ok(decision);
            }
            Joined::Waiting(ticket) => ticket,
        };
        drop(rule);
        let mut place = PlaceInLine { store, ticket, leave: W::leave };
        let mut ring = None;
        poll_fn(move |context| {
            loop {
                // The rule is looked up each time, because rules can change.
                let rule = self.rule_by_now(&ask);
                match store.turn(&rule, &mut place.ticket, context.waker())? {
                    Turn::Done(decision) => {
                        let now = store.now();
                        self.notifier().decided(&*rule, ask.key, ask.cost, &decision, now);
                        return Poll::Ready(Ok(decision));
                    }
                    Turn::At(when) => {
                        if wait_for(store.clock(), &mut ring, when, context).is_pending() {
                            return Poll::Pending;
                        }
                    }
                }
            }
        })
        .await
    }

    /// Decides and waits as [`shape`](RateLimiter::shape) does, by the departures of `store`.
    ///
    /// # Errors
    /// Fails as `shape` does.
    pub async fn shape_in<'a, W: WaitingStore<R::Rule>>(
        &'a self,
        store: &'a W,
        ask: impl Into<Ask<'a>>,
    ) -> Result<Decision, StoreError> {
        let ask = ask.into();
        let rule = self.rule(&ask)?;
        let (decision, departure) = store.shape(&rule, ask.key)?;
        let mut shaped = departure.map(|departure| Shaped {
            limiter: self,
            store,
            ask,
            departure: Some(departure),
        });
        self.notifier().decided(&*rule, ask.key, 1, &decision, store.now());
        drop(rule);
        let mut ring = None;
        poll_fn(|context| {
            while let Some(departure) = shaped.as_ref().and_then(|shaped| shaped.departure.as_ref())
            {
                match store.departs(departure, context.waker()) {
                    None => break,
                    Some(when) => {
                        if wait_for(store.clock(), &mut ring, when, context).is_pending() {
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
}

/// Polls an alarm for a time, and sets it again if the time has changed. It is ready when the alarm rings.
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
        // Set it again with the next poll, because it may have rung early.
        *ring = None;
    }
    polled
}

/// A place in a line. Dropping it leaves the line.
struct PlaceInLine<'a, S> {
    store: &'a S,
    ticket: Ticket,
    leave: fn(&S, &Ticket),
}

impl<S> Drop for PlaceInLine<'_, S> {
    fn drop(&mut self) {
        (self.leave)(self.store, &self.ticket);
    }
}

/// A request that waits for its departure. Dropping it earlier cancels the request.
struct Shaped<'a, R: RuleSource, S: Store<R::Rule>, O: Observer, W: WaitingStore<R::Rule>> {
    limiter: &'a RateLimiter<R, S, O>,
    store: &'a W,
    ask: Ask<'a>,
    departure: Option<Departure>,
}

impl<R: RuleSource, S: Store<R::Rule>, O: Observer, W: WaitingStore<R::Rule>> Drop
    for Shaped<'_, R, S, O, W>
{
    fn drop(&mut self) {
        let Some(departure) = &self.departure else { return };
        // If this is dropped because of a panic, a panic of a rule must not become a second one.
        let canceled = catch_unwind(AssertUnwindSafe(|| {
            let rule = self.limiter.rule_by_now(&self.ask);
            self.store.cancel(&rule, departure);
        }));
        if let Err(payload) = canceled {
            std::mem::forget(payload);
        }
    }
}
