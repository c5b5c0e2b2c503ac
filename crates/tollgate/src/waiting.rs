//! Waiting for one's turn, on any runtime or on none.
//!
//! The futures here are plain: they are woken by the [`Alarm`] of the store's clock (for the system's
//! clocks one timer thread for the whole process, started by the first who waits) and by those before
//! them in the line. So any executor will do, and whoever never waits pays for nothing. `line.rs` has the
//! rules.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;

use tollgate_core::{Algorithm, Cost, Decision, Tick, Ticks};

use crate::clock::{Alarm, Clock as _};
use crate::limiter::RateLimiter;
use crate::line::{Joined, Ticket, Turn};
use crate::observer::Observer;
use crate::rules::Rules;
use crate::store::{Store, StoreError};

/// A store in whose lines one can wait: the memory stores. Not exported: tickets are of one store.
pub trait WaitingStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// What wakes those who wait.
    type Clock: Alarm;

    /// The clock of the store.
    fn clock(&self) -> &Self::Clock;

    /// Asks for a key, and has a place in its line if that is not for too long.
    ///
    /// # Errors
    /// The key is too long, or the store is full.
    fn join(&self, rule: &A, key: &[u8], cost: Cost, max_wait: Ticks)
    -> Result<Joined, StoreError>;

    /// Asks whether it is one's turn. Whoever is not done is woken when to ask again.
    ///
    /// # Errors
    /// The store is full, or the policy is of another kind.
    fn turn(&self, rule: &A, ticket: &Ticket, waker: &Waker) -> Result<Turn, StoreError>;

    /// Leaves the line.
    fn leave(&self, ticket: &Ticket);
}

impl<A: Algorithm, S: WaitingStore<A>> WaitingStore<A> for &S {
    type Clock = S::Clock;

    fn clock(&self) -> &S::Clock {
        (**self).clock()
    }

    fn join(
        &self,
        rule: &A,
        key: &[u8],
        cost: Cost,
        max_wait: Ticks,
    ) -> Result<Joined, StoreError> {
        (**self).join(rule, key, cost, max_wait)
    }

    fn turn(&self, rule: &A, ticket: &Ticket, waker: &Waker) -> Result<Turn, StoreError> {
        (**self).turn(rule, ticket, waker)
    }

    fn leave(&self, ticket: &Ticket) {
        (**self).leave(ticket);
    }
}

impl<R: Rules, S: WaitingStore<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// Waits until the client may use this much, first come, first served, and uses it. Refused at
    /// once if that would take longer than `max_wait`; the decision says how long it would take.
    ///
    /// It joins the line when it is first polled. Nothing is used before it is done; dropped earlier, it
    /// leaves the line, and those behind move up. It is served when it is polled at or after the earliest
    /// time its cost fits: a future that nobody polls holds up those behind it, and every check of the key
    /// is refused meanwhile.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use tollgate::{Policy, RateLimiter, block_on};
    /// # block_on(async {
    /// let limiter = RateLimiter::new(Policy::token_bucket(100).per_second().burst(1).build()?);
    /// for _ in 0..3 {
    ///     assert!(limiter.until_ready("alice", 1, Duration::from_secs(5)).await?.allowed);
    /// }
    /// let refused = limiter.until_ready("alice", 1, Duration::from_millis(1)).await?;
    /// assert!(!refused.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// # }).unwrap();
    /// ```
    ///
    /// # Errors
    /// The store has no place for the key.
    pub async fn until_ready(
        &self,
        key: impl AsRef<[u8]>,
        cost: Cost,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        let (key, max_wait) = (key.as_ref(), max_wait.into());
        let rule = self.rules.choose(key);
        let ticket = match self.store.join(&rule, key, cost, max_wait)? {
            Joined::Decided(decision) => {
                self.told().of(&*rule, key, cost, &decision, self.store.now());
                return Ok(decision);
            }
            Joined::Waiting(ticket) => ticket,
        };
        drop(rule);
        let mut place = InLine { store: &self.store, ticket: Some(ticket), leave: S::leave };
        let mut ring: Option<(Tick, Pin<Box<_>>)> = None;
        poll_fn(move |context| {
            loop {
                let Some(ticket) = &place.ticket else {
                    unreachable!("a future that is done is not polled")
                };
                // The rules are asked each time: they may have changed.
                let rule = self.rules.choose(key);
                match self.store.turn(&rule, ticket, context.waker())? {
                    Turn::Done(decision) => {
                        place.ticket = None;
                        self.told().of(&*rule, key, cost, &decision, self.store.now());
                        return Poll::Ready(Ok(decision));
                    }
                    Turn::Behind => return Poll::Pending,
                    Turn::At(when) => {
                        if ring.as_ref().is_none_or(|(set, _)| *set != when) {
                            ring = Some((when, Box::pin(self.store.clock().ring_at(when))));
                        }
                    }
                }
                if let Some((_, ringing)) = &mut ring
                    && ringing.as_mut().poll(context).is_pending()
                {
                    return Poll::Pending;
                }
                // It has rung: ask again, and set it anew if it was early.
                ring = None;
            }
        })
        .await
    }

    /// Decides now, and waits as long as the [leaky bucket](tollgate_core::LeakyBucket) says, so that
    /// what comes out is flat. A refusal does not wait. Dropped while it waits, it gives back what it
    /// used.
    ///
    /// # Errors
    /// The store has no place for the key.
    pub async fn shape(&self, key: impl AsRef<[u8]>) -> Result<Decision, StoreError> {
        let key = key.as_ref();
        let clock = self.store.clock();
        // One time for both, so that who was first is let out first.
        let now = clock.now();
        let decision = self.check_at(key, now)?;
        if decision.allowed && decision.delay > Ticks::ZERO {
            let when = now.after(decision.delay).unwrap_or(Tick(i64::MAX));
            let mut unused = Unused { limiter: self, key: Some(key) };
            let mut ring = pin!(clock.ring_at(when));
            while clock.now() < when {
                ring.as_mut().await;
                ring.set(clock.ring_at(when));
            }
            unused.key = None;
        }
        Ok(decision)
    }

    /// [`until_ready`](Self::until_ready) for threads: this one sleeps meanwhile.
    ///
    /// # Errors
    /// As there.
    pub fn block_until_ready(
        &self,
        key: impl AsRef<[u8]>,
        cost: Cost,
        max_wait: impl Into<Ticks>,
    ) -> Result<Decision, StoreError> {
        block_on(self.until_ready(key, cost, max_wait))
    }
}

/// A place in a line, which is left if it is dropped before its turn.
struct InLine<'a, S> {
    store: &'a S,
    ticket: Option<Ticket>,
    leave: fn(&S, &Ticket),
}

impl<S> Drop for InLine<'_, S> {
    fn drop(&mut self) {
        if let Some(ticket) = &self.ticket {
            (self.leave)(self.store, ticket);
        }
    }
}

/// What was charged for a request that may not come to be.
struct Unused<'a, R: Rules, S: WaitingStore<R::Rule>, O: Observer> {
    limiter: &'a RateLimiter<R, S, O>,
    key: Option<&'a [u8]>,
}

impl<R: Rules, S: WaitingStore<R::Rule>, O: Observer> Drop for Unused<'_, R, S, O> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            // The key was taken a moment ago, so it is one that can be taken.
            let _ = self.limiter.refund(key, 1);
        }
    }
}

/// Runs a future on this thread, which sleeps whenever the future waits. For programs without a
/// runtime.
pub fn block_on<F: Future>(future: F) -> F::Output {
    struct Unpark(Thread);

    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        if let Poll::Ready(output) = future.as_mut().poll(&mut context) {
            return output;
        }
        std::thread::park();
    }
}
