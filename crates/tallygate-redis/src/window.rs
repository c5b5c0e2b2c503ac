//! Limits the number of calls in flight on one connection.
//!
//! Calls that a server has not reached yet only wait there, and a late reply is useless. So a connection has no more
//! calls in flight than the server answers within the time budget: the limit grows while replies are fast, and shrinks
//! while they are late. Further calls wait in this process, in order of arrival, and give up while there is still time
//! for a reply. The server is not blamed for that wait.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout_at;

/// The calls in flight on one connection.
#[derive(Debug)]
pub(crate) struct CallWindow {
    places: Arc<Semaphore>,
    budget: Duration,
    fewest: usize,
    in_flight: AtomicUsize,
    /// The number of their arguments.
    arguments: AtomicUsize,
    /// How many places are to be removed as soon as they are free. Changed under the lock of the state.
    excess: AtomicUsize,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    size: usize,
    /// The time of the fastest recent reply, and when it arrived.
    fastest: Option<(Duration, Instant)>,
    /// The average time of a reply.
    average: Duration,
    shrunk: Option<Instant>,
}

/// A place among the calls in flight. It is kept until the reply arrives, even if the caller has given up: the server
/// still has to carry out the call.
#[derive(Debug)]
pub(crate) struct InWindow {
    window: Arc<CallWindow>,
    permit: Option<OwnedSemaphorePermit>,
    arguments: usize,
}

/// The minimum number of places: a process that is short of processor time sees late replies however few calls it
/// makes.
pub(crate) const FEWEST: usize = 256;
/// The minimum for calls that decide on several keys, which take the server several times as long: it answers none of
/// the calls that it reads together before it has carried out all of them. Such a call takes a place per key, so that one
/// call on many keys takes as many as many calls on two.
pub(crate) const FEWEST_OF_SEVERAL_KEYS: usize = 64;
/// How many entries of a sliding window log take the server as long as another key.
pub(crate) const ENTRIES_PER_PLACE: u64 = 256;
const MOST: usize = 4096;
/// The estimated time per argument of a call: a check has about ten, and takes some tens of microseconds.
const TIME_PER_ARGUMENT: Duration = Duration::from_micros(10);
/// How long the fastest reply counts as the distance to the server.
const DISTANCE_HOLDS: Duration = Duration::from_secs(10);

impl CallWindow {
    pub(crate) fn new(budget: Duration, fewest: usize) -> Arc<Self> {
        Arc::new(Self {
            places: Arc::new(Semaphore::new(fewest)),
            budget,
            fewest,
            in_flight: AtomicUsize::new(0),
            arguments: AtomicUsize::new(0),
            excess: AtomicUsize::new(0),
            state: Mutex::new(State {
                size: fewest,
                fastest: None,
                average: Duration::ZERO,
                shrunk: None,
            }),
        })
    }

    /// Waits for a place. Returns `None` if there is none while a reply could still arrive before the deadline.
    pub(crate) async fn enter(self: &Arc<Self>, deadline: Instant) -> Option<InWindow> {
        self.enter_with(1, deadline).await
    }

    /// Waits for several places, but not for more than there always are. Returns `None` if they are not free while a reply
    /// could still arrive before the deadline.
    pub(crate) async fn enter_with(
        self: &Arc<Self>,
        places: usize,
        deadline: Instant,
    ) -> Option<InWindow> {
        let places = u32::try_from(places.min(self.fewest)).unwrap_or(1);
        let permit = match self.places.clone().try_acquire_many_owned(places) {
            Ok(permit) => permit,
            Err(_) => {
                let last_moment = deadline.checked_sub(self.state().average)?;
                let waiting = self.places.clone().acquire_many_owned(places);
                timeout_at(last_moment.into(), waiting).await.ok()?.ok()?
            }
        };
        Some(InWindow::new(self, permit))
    }

    /// Returns whether a call that needs so many places would not have to wait.
    pub(crate) fn has_room(&self, places: usize) -> bool {
        self.places.available_permits() >= places.min(self.fewest)
    }

    /// Returns the number of calls in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    /// Returns an upper estimate of the time that the server needs for the calls in flight: it carries out a call on
    /// many keys in one go, and a call has a few arguments per key.
    pub(crate) fn work(&self) -> Duration {
        let arguments = self.arguments.load(Ordering::Relaxed);
        TIME_PER_ARGUMENT.saturating_mul(u32::try_from(arguments).unwrap_or(u32::MAX))
    }

    /// Returns the time of the fastest recent reply, which is about the distance to the server.
    pub(crate) fn distance(&self) -> Duration {
        self.state().distance()
    }

    /// Returns whether recent replies took much longer than the distance to the server explains.
    pub(crate) fn is_slow(&self) -> bool {
        let state = self.state();
        let distance = state.distance();
        state.average.saturating_sub(distance) > self.budget.saturating_sub(distance) / 4
    }

    /// Records how long a reply took.
    pub(crate) fn replied(&self, took: Duration, now: Instant) {
        let mut state = self.state();
        state.average = (state.average * 7 + took) / 8;
        let fastest = match state.fastest {
            Some((fastest, since)) if fastest <= took && now - since < DISTANCE_HOLDS => fastest,
            _ => {
                state.fastest = Some((took, now));
                took
            }
        };
        let bearable = self.budget.saturating_sub(fastest) / 4;
        if took - fastest > bearable {
            let is_over = state.shrunk.is_none_or(|shrunk| now - shrunk > took);
            if is_over && state.size > self.fewest {
                let smaller = (state.size - state.size / 8).max(self.fewest);
                self.excess.fetch_add(state.size - smaller, Ordering::Relaxed);
                state.size = smaller;
                state.shrunk = Some(now);
            }
        } else if state.size < MOST && self.places.available_permits() == 0 {
            state.size += 1;
            if self.excess.load(Ordering::Relaxed) > 0 {
                self.excess.fetch_sub(1, Ordering::Relaxed);
            } else {
                self.places.add_permits(1);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn distance(&self) -> Duration {
        self.fastest.map_or(Duration::ZERO, |(fastest, _)| fastest)
    }
}

impl InWindow {
    fn new(window: &Arc<CallWindow>, permit: OwnedSemaphorePermit) -> Self {
        window.in_flight.fetch_add(1, Ordering::Relaxed);
        Self { window: window.clone(), permit: Some(permit), arguments: 0 }
    }

    /// Records the number of arguments of the call, which measures its work.
    pub(crate) fn weigh(&mut self, arguments: usize) {
        self.arguments += arguments;
        self.window.arguments.fetch_add(arguments, Ordering::Relaxed);
    }
}

impl Drop for InWindow {
    fn drop(&mut self) {
        let window = &self.window;
        window.in_flight.fetch_sub(1, Ordering::Relaxed);
        window.arguments.fetch_sub(self.arguments, Ordering::Relaxed);
        if window.excess.load(Ordering::Relaxed) == 0 {
            return;
        }
        let _state = window.state();
        let Some(mut permit) = self.permit.take() else { return };
        let removed = window.excess.load(Ordering::Relaxed).min(permit.num_permits());
        if let Some(permit) = permit.split(removed) {
            window.excess.fetch_sub(removed, Ordering::Relaxed);
            permit.forget();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test]
    async fn grows_while_replies_are_quick_and_shrinks_while_they_are_late() {
        let window = CallWindow::new(50 * MS, FEWEST);
        let mut now = Instant::now();
        let soon = now + Duration::from_secs(60);
        let mut calls = Vec::new();
        for _ in 0..1000 {
            while let Ok(permit) = window.places.clone().try_acquire_owned() {
                calls.push(InWindow::new(&window, permit));
            }
            now += MS;
            window.replied(MS, now);
        }
        assert_eq!(window.state().size, FEWEST + 1000);
        for _ in 0..100 {
            now += 41 * MS;
            window.replied(40 * MS, now);
        }
        assert_eq!(window.state().size, FEWEST);
        calls.clear();
        assert_eq!(window.places.available_permits(), FEWEST);
        assert!(window.enter(soon).await.is_some());
    }

    /// Fault J15.
    #[tokio::test]
    async fn a_call_on_many_keys_takes_as_many_places_as_many_calls() {
        let window = CallWindow::new(50 * MS, FEWEST_OF_SEVERAL_KEYS);
        let soon = Instant::now() + MS;
        let large = window.enter_with(1000, soon).await.expect("it takes all places");
        assert!(window.enter_with(2, soon).await.is_none());
        drop(large);
        let mut calls = Vec::new();
        for _ in 0..FEWEST_OF_SEVERAL_KEYS / 2 {
            assert!(window.has_room(2));
            calls.push(window.enter_with(2, soon).await.expect("a place"));
        }
        assert!(!window.has_room(1));
        // Places that are to be removed are removed when the call that has them ends.
        window.excess.store(3, Ordering::Relaxed);
        calls.truncate(calls.len() - 2);
        assert_eq!(window.places.available_permits(), 1);
    }

    #[tokio::test]
    async fn a_call_gives_up_while_there_is_still_time_for_a_reply() {
        let window = CallWindow::new(50 * MS, FEWEST);
        (0..100).for_each(|_| window.replied(20 * MS, Instant::now()));
        let mut calls = Vec::new();
        for _ in 0..FEWEST {
            calls.push(window.enter(Instant::now() + MS).await.expect("there are places"));
        }
        let start = Instant::now();
        assert!(window.enter(start + 21 * MS).await.is_none());
        assert!(start.elapsed() < 20 * MS, "{:?}", start.elapsed());
    }
}
