//! The departures of shaped requests: in order of arrival, at the times that the leaky bucket assigned.
//!
//! An allowed request takes a departure time, and the first request to arrive leaves at the first time. If a request is
//! canceled, the requests behind it move up, and the last departure time is returned to the bucket. So the remaining
//! times are the same as if the canceled request had never been made, and the output stays even.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::Waker;

use tallygate_core::{Algorithm, Decision, Tick, Ticks};

use crate::line::on_a_copy;
use crate::shards::{SetBack, Shards, Timed, WakeList};
use crate::table::{KeySlot, Reading, Table};

#[derive(Default)]
pub(crate) struct Departures {
    /// The number of the next request. All schedules share the count, because a request may outlive its schedule.
    next: AtomicU64,
    schedules: Shards<Schedules>,
}

/// By key, and by the [identity](Algorithm::identity) of the rule: each rule has its own rate.
type Schedules = HashMap<(KeySlot, u64), Schedule>;

impl Timed for Schedules {
    fn set_back(&mut self, by: &SetBack, wakes: &mut WakeList) {
        self.values_mut().for_each(|schedule| schedule.set_back(by, wakes));
    }
}

#[derive(Default)]
struct Schedule {
    /// The requests that have not left, in order of arrival.
    requests: BTreeMap<u64, Request>,
    /// As many departure times, each with the number of the request that took it.
    times: BTreeSet<(Tick, u64)>,
}

struct Request {
    /// The time at which it checks again.
    when: Tick,
    waker: Option<Waker>,
}

/// A request that was allowed and has not left yet.
#[derive(Debug)]
pub struct Departure {
    spot: KeySlot,
    /// The hash of the key that was charged.
    key: u128,
    rule: u64,
    number: u64,
}

impl Departure {
    /// The key that was charged.
    pub(crate) const fn spot(&self) -> KeySlot {
        self.spot
    }

    /// The hash of that key.
    pub(crate) const fn key(&self) -> u128 {
        self.key
    }
}

impl Departures {
    /// Moves all departure times, and wakes all requests, if a reading is the first after the clock was set back.
    pub(crate) fn follow(&self, reading: Reading) {
        self.schedules.follow(reading);
    }

    /// Decides a request. If it is allowed and has to wait, it takes a departure time.
    pub(crate) fn join<E>(
        &self,
        (spot, key): (KeySlot, u128),
        rule: u64,
        decide: impl FnOnce() -> Result<(Decision, Reading), E>,
    ) -> Result<(Decision, Option<Departure>), E> {
        // Decided under the lock, so that requests are charged in the order in which they leave.
        let mut wakes = WakeList::default();
        let mut schedules = self.schedules.lock(spot);
        let (decision, reading) = decide()?;
        let now = schedules.enter(reading, &mut wakes).now;
        if !decision.allowed || decision.delay == Ticks::ZERO {
            return Ok((decision, None));
        }
        let when = now.after(decision.delay).unwrap_or(Tick(i64::MAX));
        let schedule = schedules.entry((spot, rule)).or_default();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        schedule.requests.insert(number, Request { when, waker: None });
        schedule.times.insert((when, number));
        Ok((decision, Some(Departure { spot, key, rule, number })))
    }

    /// Returns when a request must check again, or `None` if it leaves now.
    pub(crate) fn poll(
        &self,
        departure: &Departure,
        reading: Reading,
        waker: &Waker,
    ) -> Option<Tick> {
        let &Departure { spot, rule, number, .. } = departure;
        let mut replaced = Some(waker.clone());
        let mut wakes = WakeList::default();
        let (mut schedules, Reading { now, .. }) =
            self.schedules.lock_at(spot, reading, &mut wakes);
        let schedule = schedules.get_mut(&(spot, rule))?;
        schedule.release(now, &mut wakes);
        let head = schedule.requests.keys().next().copied();
        let first = schedule.times.first().map(|(when, _)| *when);
        let Some(request) = schedule.requests.get_mut(&number) else {
            schedule.wake_head(&mut wakes);
            if schedule.requests.is_empty() {
                schedules.remove(&(spot, rule));
            }
            return None;
        };
        // A request that was charged after a reset may have an earlier time than the requests that leave before it.
        let asks_at_next = head == Some(number) || request.when <= now;
        if let Some(first) = first.filter(|_| asks_at_next) {
            request.when = first;
        }
        std::mem::swap(&mut request.waker, &mut replaced);
        Some(request.when)
    }

    /// Cancels a request that has not left. If nothing was charged after it, calls `returned`, which refunds its unit
    /// to the bucket and returns whether that had an effect. Returns the result of `returned`.
    pub(crate) fn cancel<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        departure: &Departure,
        reading: Reading,
        returned: impl FnOnce(&mut A::State, Tick) -> bool,
    ) -> bool {
        let &Departure { spot, rule: identity, number, .. } = departure;
        let mut wakes = WakeList::default();
        let (mut schedules, reading) = self.schedules.lock_at(spot, reading, &mut wakes);
        let Some(schedule) = schedules.get_mut(&(spot, identity)) else { return false };
        schedule.release(reading.now, &mut wakes);
        // The request is missing if its departure time came before it was canceled.
        let canceled = schedule.requests.remove(&number);
        let last = canceled.and_then(|canceled| {
            wakes.forget = canceled.waker;
            schedule.times.pop_last()
        });
        schedule.wake_head(&mut wakes);
        if schedule.requests.is_empty() {
            schedules.remove(&(spot, identity));
        }
        let Some((when, _)) = last.filter(|_| rule.identity() == identity) else { return false };
        // Still under the lock, so that the next request gets the time that has become free.
        let returned = table.with(rule, spot, reading, |state, at| {
            on_a_copy(state, |state| {
                // Only if nothing was charged after it: a later charge has a later time.
                let is_last = when > at
                    && !rule.clock_was_set_back(state, at)
                    && rule.facts(state, at, Some(1)).delay == when.since(at);
                is_last && returned(state, at)
            })
        });
        returned.unwrap_or(false)
    }
}

impl Schedule {
    /// Lets the requests leave whose departure times have come.
    fn release(&mut self, now: Tick, wakes: &mut WakeList) {
        while self.times.first().is_some_and(|(when, _)| *when <= now) {
            self.times.pop_first();
            let released = self.requests.pop_first();
            wakes.wake.extend(released.and_then(|(_, request)| request.waker));
        }
    }

    /// Wakes the head of the schedule, if it was not notified that it has moved up.
    fn wake_head(&mut self, wakes: &mut WakeList) {
        let first = self.times.first().map(|(when, _)| *when);
        if let Some(mut head) = self.requests.first_entry() {
            if first.is_some_and(|first| first < head.get().when) {
                wakes.wake.extend(head.get_mut().waker.take());
            }
        }
    }

    /// Moves all times with the clock.
    fn set_back(&mut self, by: &SetBack, wakes: &mut WakeList) {
        for request in self.requests.values_mut() {
            request.when = by.moved(request.when);
            wakes.wake.extend(request.waker.take());
        }
        let times = std::mem::take(&mut self.times);
        self.times = times.into_iter().map(|(when, number)| (by.moved(when), number)).collect();
    }
}

#[cfg(test)]
mod tests {
    use tallygate_core::Policy;

    use super::*;
    use crate::hash::KeyHasher;
    use crate::table::{Full, WhenFull};

    /// Otherwise the schedule of a key whose request is dropped late would never be freed.
    #[test]
    fn a_request_that_is_canceled_after_its_departure_time_leaves_no_schedule() {
        let rule = Policy::leaky_bucket(1).per(Ticks(10)).burst(2).limit().expect("valid");
        let table = Table::new(u128::BITS, 10, WhenFull::EvictLeastUsed);
        let print = KeyHasher::new().fingerprint(b"a");
        let spot = table.slot_of(print);
        let departures = Departures::default();
        let join = || {
            departures.join((spot, print.hash()), rule.identity(), || {
                let decide = |state: &mut _, at| rule.decide::<Decision>(state, at, 1);
                Ok::<_, Full>((table.with(&rule, spot, Tick(0), decide)?, Tick(0).into()))
            })
        };
        let leaves_at_once = join().expect("room").1;
        assert!(leaves_at_once.is_none());
        let departure = join().expect("room").1.expect("it waits for ten ticks");
        let is_returned =
            departures.cancel((&table, &rule), &departure, Tick(10).into(), |_, _| true);
        assert!(!is_returned, "its time has come, so it counts as departed");
        departures.schedules.each(|schedules, _| assert!(schedules.is_empty()));
    }
}
