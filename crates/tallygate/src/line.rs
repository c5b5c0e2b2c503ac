//! The lines of requests that wait for a key: first come, first served, and nothing is charged ahead.
//!
//! A waiting request has charged nothing. Only the head of a line has a time: when its cost will fit if
//! nothing else comes. Then it asks like any other request, is charged, and the next becomes the head. So
//! a request that leaves has nothing to give back, the ones behind it move up, and a change of policy, a
//! refund or a reset is only a reason for the head to ask again. While requests wait for a key, a check of
//! it comes behind them and is denied.
//!
//! Every waiter has its own deadline, whatever the head does. A waiter that is not polled until its deadline
//! has passed loses its place to the ones behind it. Until then, the ones behind it are served beside it as far
//! as there is room for all of them.
//!
//! Charging waiting requests beforehand would be simpler for a bucket, and wrong for a window: units charged
//! in a window that passes are gone when their turn comes.
//!
//! Joining, asking and leaving take O(log n) steps for a line of n. That is why a line knows only how many
//! units wait ([`Group`]), and the rule says how long they take at least
//! ([`Algorithm::fit_behind`]).

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;

use tallygate_core::{Algorithm, Answer as _, Cost, Decision, Fit, Outcome, Source, Tick, Ticks};

use crate::lateness::counted_from;
use crate::shards::{SetBack, Shards, Timed, Wakes};
use crate::table::{Full, KeySlot, Reading, Table};

#[derive(Default)]
pub(crate) struct Line {
    /// The number of requests that wait for any key, or are about to.
    waiting: AtomicUsize,
    /// The number of the next ticket: of all lines, since a ticket may outlive its line.
    next: AtomicU64,
    queues: Shards<Queues>,
}

type Queues = HashMap<KeySlot, Queue>;

impl Timed for Queues {
    fn set_back(&mut self, by: &SetBack, wakes: &mut Wakes) {
        self.values_mut().for_each(|queue| queue.set_back(by, wakes));
    }
}

/// The requests that wait for one key.
#[derive(Default)]
struct Queue {
    /// By ticket number, so in the order in which they came.
    waiters: BTreeMap<u64, Waiter>,
    deadlines: BTreeSet<(Tick, u64)>,
    /// What waits, by the [identity](Algorithm::identity) of the rule that it waits under.
    groups: HashMap<u64, Group>,
    /// How often something has happened that may delay the waiters.
    disturbed: u64,
}

/// The requests that wait for a key under one rule.
#[derive(Default)]
struct Group {
    waiters: usize,
    units: u128,
    /// The units of the requests that are served for certain, if they stay.
    certain: u128,
}

struct Waiter {
    cost: Cost,
    /// The last time at which it can be served.
    until: Tick,
    /// The identity of the rule that it waits under; `None` after the rules have changed, until it asks again.
    rule: Option<u64>,
    /// Set if it is served for certain, unless the line was disturbed since.
    certain: Option<u64>,
    waker: Option<Waker>,
}

/// A place in a line.
#[derive(Debug)]
pub struct Ticket {
    spot: KeySlot,
    number: u64,
    cost: Cost,
}

/// The result of joining a line.
#[derive(Debug)]
pub enum Joined {
    /// The request was allowed at once, or denied because it would wait too long.
    Decided(Decision),
    /// It waits.
    Waiting(Ticket),
}

/// The state of a waiting request.
#[derive(Debug)]
pub enum Turn {
    /// It was served, or can no longer be served in time; it has left the line.
    Done(Decision),
    /// It waits, and must ask again at this time or when it is woken.
    At(Tick),
}

/// A request that is counted as waiting, unless it turns out that it does not wait.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(waiting: &'a AtomicUsize) -> Self {
        waiting.fetch_add(1, Ordering::Relaxed);
        Self(waiting)
    }

    fn stays(self) {
        std::mem::forget(self);
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Line {
    /// Returns whether no request waits for any key.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }

    /// Leaves the line; the waiters behind move up.
    pub(crate) fn leave(&self, ticket: &Ticket) {
        let mut wakes = Wakes::default();
        let mut queues = self.queues.lock(ticket.spot);
        self.remove(&mut queues, ticket.spot, ticket.number, &mut wakes);
    }

    /// Takes a waiter out of its line.
    fn remove(&self, queues: &mut Queues, spot: KeySlot, number: u64, wakes: &mut Wakes) {
        let Some(queue) = queues.get_mut(&spot) else { return };
        if queue.remove(number, wakes) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if queue.waiters.is_empty() {
            queues.remove(&spot);
        }
    }

    /// Takes the waiters out of a line that were not polled until their deadline had passed.
    fn expire(
        &self,
        queues: &mut Queues,
        spot: KeySlot,
        now: Tick,
        asking: Option<u64>,
        wakes: &mut Wakes,
    ) {
        while let Some(queue) = queues.get_mut(&spot) {
            let Some(number) = queue.expired(now, asking) else { break };
            // It is woken too, and gets its denial when it checks again.
            wakes
                .wake
                .extend(queue.waiters.get_mut(&number).and_then(|waiter| waiter.waker.take()));
            self.remove(queues, spot, number, wakes);
        }
    }

    /// Something unforeseen happened to a key's state: its head asks again.
    pub(crate) fn nudge(&self, spot: KeySlot) {
        if self.is_empty() {
            return;
        }
        let mut wakes = Wakes::default();
        let mut queues = self.queues.lock(spot);
        if let Some(queue) = queues.get_mut(&spot) {
            queue.disturb();
            queue.wake_first_two(&mut wakes);
        }
    }

    /// The rules of a key have changed: all of its waiters ask again.
    pub(crate) fn nudge_all_of(&self, spot: KeySlot) {
        if self.is_empty() {
            return;
        }
        let mut wakes = Wakes::default();
        let mut queues = self.queues.lock(spot);
        if let Some(queue) = queues.get_mut(&spot) {
            queue.rules_changed(&mut wakes);
        }
    }

    /// The rules of all keys have changed: all waiters ask again.
    pub(crate) fn nudge_all(&self) {
        self.queues.each(|queues, wakes| {
            queues.values_mut().for_each(|queue| queue.rules_changed(wakes));
        });
    }

    /// Moves the deadlines of all waiters, which ask again, if a reading is the first after the clock was set back.
    pub(crate) fn follow(&self, reading: Reading) {
        self.queues.follow(reading);
    }

    /// Returns the answer to a check of a key that others wait for; `None` if no request waits for it.
    pub(crate) fn answer<A: Algorithm>(
        &self,
        rule: (&Table<A::State>, &A),
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Option<Result<Decision, Full>> {
        let answer = |queue: &Queue, reading| queue.answer(rule, spot, cost, reading);
        let answer = self.with_line(spot, reading, answer)?;
        Some(answer.map(|behind| behind.decision))
    }

    /// Returns the same for a peek, which changes nothing.
    pub(crate) fn peek<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Option<Decision> {
        let look = |queue: &Queue, reading: Reading| {
            table.look(rule, spot, reading, queue.behind(rule, cost, reading.now))
        };
        Some(self.with_line(spot, reading, look)?.decision)
    }

    /// Calls `read` with the line of a key, if requests wait for it, and with the reading to go on with.
    fn with_line<R>(
        &self,
        spot: KeySlot,
        reading: Reading,
        read: impl FnOnce(&Queue, Reading) -> R,
    ) -> Option<R> {
        let mut wakes = Wakes::default();
        let (mut queues, reading) = self.queues.lock_at(spot, reading, &mut wakes);
        self.expire(&mut queues, spot, reading.now, None, &mut wakes);
        queues.get(&spot).map(|queue| read(queue, reading))
    }

    /// Asks for a key. If the cost does not fit yet, but may fit in time, the request waits in line.
    pub(crate) fn join<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
        max_wait: Ticks,
    ) -> Result<Joined, Full> {
        // Counted before the state is read: a change of the state after that finds the line not empty.
        let counted = Counted::new(&self.waiting);
        let mut wakes = Wakes::default();
        let (mut queues, reading) = self.queues.lock_at(spot, reading, &mut wakes);
        let now = reading.now;
        let until = now.after(max_wait).unwrap_or(Tick(i64::MAX));
        self.expire(&mut queues, spot, now, None, &mut wakes);
        let (decision, latest) = match queues.get(&spot) {
            // A look takes no turn.
            Some(queue) if cost > 0 => {
                let behind = queue.answer((table, rule), spot, cost, reading)?;
                (behind.decision, behind.latest)
            }
            queue => {
                let decision = ask_table((table, rule), spot, cost, reading, until)?;
                (decision, decision.retry_after.filter(|_| queue.is_none()))
            }
        };
        if due(&decision, now, until).is_none() {
            return Ok(Joined::Decided(decision));
        }
        let identity = rule.identity();
        let certain = latest.and_then(|wait| now.after(wait)).is_some_and(|latest| latest <= until);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        queues.entry(spot).or_default().push((number, cost), until, identity, certain);
        counted.stays();
        Ok(Joined::Waiting(Ticket { spot, number, cost }))
    }

    /// Asks whether it is a waiter's turn, and says when to wake it if it is not.
    pub(crate) fn turn<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        ticket: &mut Ticket,
        reading: Reading,
        waker: &Waker,
    ) -> Result<Turn, Full> {
        let &mut Ticket { spot, number, cost } = ticket;
        let mut replaced = Some(waker.clone());
        let mut wakes = Wakes::default();
        let (mut queues, reading) = self.queues.lock_at(spot, reading, &mut wakes);
        let now = reading.now;
        self.expire(&mut queues, spot, now, Some(number), &mut wakes);
        let queue = queues.get_mut(&spot);
        let place = queue.and_then(|queue| {
            let until = queue.update(number, rule.identity(), &mut replaced)?;
            Some((queue, until))
        });
        let Some((queue, until)) = place else {
            drop((queues, wakes));
            return self.turn_without_place((table, rule), ticket, reading, waker);
        };
        let mut places = queue.waiters.keys();
        if places.next() != Some(&number) {
            let is_second = places.next() == Some(&number);
            let place = (spot, number, cost);
            let beside = queue.serve_beside_others((table, rule), place, reading, &mut wakes)?;
            if now < until && beside.is_none() {
                // The second takes over when the head is not polled until its deadline.
                let head = queue.waiters.values().next().filter(|_| is_second);
                let over = head.and_then(|head| head.until.after(Ticks(1)));
                return Ok(Turn::At(over.map_or(until, |over| over.min(until))));
            }
            self.remove(&mut queues, spot, number, &mut wakes);
            return Ok(Turn::Done(match (beside, queues.get(&spot)) {
                (Some(decision), _) => decision,
                (None, Some(queue)) => queue.answer((table, rule), spot, cost, reading)?.decision,
                (None, None) => ask_table((table, rule), spot, cost, reading, now)?,
            }));
        }
        let decision = ask_table((table, rule), spot, cost, reading, until)?;
        if let Some(due) = due(&decision, now, until) {
            // A rule that denies a cost that fits must not keep this thread busy.
            return Ok(Turn::At(due.max(now.after(Ticks(1)).unwrap_or(due))));
        }
        self.remove(&mut queues, spot, number, &mut wakes);
        Ok(Turn::Done(decision))
    }

    /// The same for a waiter that lost its place because it was not polled until its deadline had passed: it may try
    /// once more, behind the others.
    #[cold]
    fn turn_without_place<A: Algorithm>(
        &self,
        rule: (&Table<A::State>, &A),
        ticket: &mut Ticket,
        reading: Reading,
        waker: &Waker,
    ) -> Result<Turn, Full> {
        match self.join(rule, ticket.spot, ticket.cost, reading, Ticks::ZERO)? {
            Joined::Decided(decision) => Ok(Turn::Done(decision)),
            Joined::Waiting(new) => {
                *ticket = new;
                self.turn(rule, ticket, reading, waker)
            }
        }
    }
}

/// The answer to a request that comes behind others.
struct Behind {
    decision: Decision,
    /// The wait after which it has been served at the latest, if it is known.
    latest: Option<Ticks>,
}

impl Group {
    fn add(&mut self, cost: Cost, certain: bool) {
        self.waiters += 1;
        self.units += u128::from(cost);
        if certain {
            self.certain += u128::from(cost);
        }
    }
}

impl Queue {
    fn push(&mut self, (number, cost): (u64, Cost), until: Tick, rule: u64, certain: bool) {
        let certain = certain.then_some(self.disturbed);
        let waiter = Waiter { cost, until, rule: Some(rule), certain, waker: None };
        self.groups.entry(rule).or_default().add(cost, certain.is_some());
        self.waiters.insert(number, waiter);
        self.deadlines.insert((until, number));
    }

    /// Takes a waiter out; returns whether it was there. Wakes the ones that become first and second.
    fn remove(&mut self, number: u64, wakes: &mut Wakes) -> bool {
        let was_near = self.waiters.keys().take(2).any(|one| *one == number);
        let Some(waiter) = self.waiters.remove(&number) else { return false };
        self.deadlines.remove(&(waiter.until, number));
        self.ungroup(waiter.rule, waiter.cost, waiter.certain);
        if was_near {
            self.wake_first_two(wakes);
        }
        wakes.forget = waiter.waker;
        true
    }

    fn ungroup(&mut self, rule: Option<u64>, cost: Cost, certain: Option<u64>) {
        let Some(rule) = rule else { return };
        if let Some(group) = self.groups.get_mut(&rule) {
            group.waiters -= 1;
            group.units -= u128::from(cost);
            if certain == Some(self.disturbed) {
                group.certain -= u128::from(cost);
            }
            if group.waiters == 0 {
                self.groups.remove(&rule);
            }
        }
    }

    /// The head is to ask; the second watches that it does so by its deadline.
    fn wake_first_two(&mut self, wakes: &mut Wakes) {
        let first_two = self.waiters.values_mut().take(2);
        wakes.wake.extend(first_two.filter_map(|waiter| waiter.waker.take()));
    }

    /// No waiter is certain any more to be served in time.
    fn disturb(&mut self) {
        self.disturbed += 1;
        self.groups.values_mut().for_each(|group| group.certain = 0);
    }

    fn rules_changed(&mut self, wakes: &mut Wakes) {
        self.disturb();
        self.groups.clear();
        for waiter in self.waiters.values_mut() {
            waiter.rule = None;
            wakes.wake.extend(waiter.waker.take());
        }
    }

    /// Moves all deadlines with the clock. The rules may decide differently at the new time.
    fn set_back(&mut self, by: &SetBack, wakes: &mut Wakes) {
        self.deadlines.clear();
        for (number, waiter) in &mut self.waiters {
            waiter.until = by.moved(waiter.until);
            self.deadlines.insert((waiter.until, *number));
        }
        self.rules_changed(wakes);
    }

    /// A waiter whose deadline has passed, other than the one that asks.
    fn expired(&self, now: Tick, asking: Option<u64>) -> Option<u64> {
        let passed = self.deadlines.iter().take_while(|(until, _)| *until < now);
        passed.map(|(_, number)| *number).find(|number| Some(*number) != asking)
    }

    /// Brings a waiter that asks up to date, and returns its deadline; `None` if it has no place. Its old waker is put
    /// in place of the new one.
    fn update(&mut self, number: u64, rule: u64, waker: &mut Option<Waker>) -> Option<Tick> {
        let waiter = self.waiters.get_mut(&number)?;
        std::mem::swap(&mut waiter.waker, waker);
        let (cost, until, certain) = (waiter.cost, waiter.until, waiter.certain);
        if waiter.rule != Some(rule) {
            let old = waiter.rule.replace(rule);
            waiter.certain = None;
            self.ungroup(old, cost, certain);
            self.groups.entry(rule).or_default().add(cost, false);
            // The answers to the other waiters depended on the old rule.
            self.disturb();
        }
        Some(until)
    }

    /// Returns the denial of a request that comes behind all waiters.
    fn answer<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
    ) -> Result<Behind, Full> {
        table.with(rule, spot, reading, self.behind(rule, cost, reading.now))
    }

    /// Returns the step that denies a request because it comes behind all waiters. Its retry time is a lower bound.
    fn behind<A: Algorithm>(
        &self,
        rule: &A,
        cost: Cost,
        now: Tick,
    ) -> impl FnOnce(&mut A::State, Tick) -> Behind {
        // Units of other rules are left out: they may be charged differently under this one, or not at all. So
        // are waiters that may give up, because they then make room.
        let group = self.groups.get(&rule.identity());
        let (certain, all) = group.map_or((0, 0), |group| (group.certain, group.units));
        let is_alone = group.is_some_and(|group| group.waiters == self.waiters.len());
        move |state, at| {
            // From now on it goes on under this rule, as after a check: otherwise the wait would not be right.
            bring(rule, state, at);
            let wait = match rule.fit_behind(state, at, certain, cost).earliest {
                // The requests ahead may be due at this very tick, and are still to come.
                Fit::Now => Some(Ticks(1)),
                Fit::After(wait) => Some(wait),
                Fit::Never => None,
            };
            let latest = if is_alone {
                let latest = rule.fit_behind(state, at, all, cost).latest;
                latest.map(|wait| wait.plus(at.since(now)))
            } else {
                None
            };
            let facts = rule.facts(state, at, None);
            let decision = Decision {
                allowed: false,
                limit: facts.limit,
                remaining: 0,
                retry_after: wait,
                reset_after: facts.reset_after.max(wait.unwrap_or(Ticks::ZERO)),
                delay: Ticks::ZERO,
                scarcest: facts.scarcest,
                denied_by: None,
                shadow_denied_by: None,
                quota: facts.quota,
                source: Source::Store,
            };
            Behind { decision: counted_from(now, at, decision), latest }
        }
    }

    /// A waiter behind others is served if there is room now for it and for everything ahead of it: then the
    /// others, which are due but have not been polled yet, lose nothing. They are woken.
    fn serve_beside_others<A: Algorithm>(
        &mut self,
        (table, rule): (&Table<A::State>, &A),
        (spot, number, cost): (KeySlot, u64, Cost),
        reading: Reading,
        wakes: &mut Wakes,
    ) -> Result<Option<Decision>, Full> {
        let fits = |units: Cost| {
            let allows = |state: &A::State, at| rule.allows(state, at, units);
            table.with(rule, spot, reading, |state, at| {
                read_at(rule, state, at, |state| allows(state, at))
            })
        };
        let identity = Some(rule.identity());
        let mut units = cost;
        for (place, (_, waiter)) in self.waiters.range(..number).enumerate() {
            let Some(with_it) = units.checked_add(waiter.cost).filter(|_| waiter.rule == identity)
            else {
                return Ok(None);
            };
            units = with_it;
            // Mostly the head is not due, and that ends it. The rest of the line is looked at once.
            if units > rule.capacity() || (place == 0 && !fits(units)?) {
                return Ok(None);
            }
        }
        if !fits(units)? {
            return Ok(None);
        }
        let ahead = self.waiters.range_mut(..number);
        wakes.wake.extend(ahead.filter_map(|(_, waiter)| waiter.waker.take()));
        ask_table((table, rule), spot, cost, reading, reading.now).map(Some)
    }
}

/// Asks the table for the head, or for a request without a line.
fn ask_table<A: Algorithm>(
    (table, rule): (&Table<A::State>, &A),
    spot: KeySlot,
    cost: Cost,
    reading: Reading,
    until: Tick,
) -> Result<Decision, Full> {
    table.with(rule, spot, reading, |state, at| {
        on_a_copy(state, |state| counted_from(reading.now, at, ask(rule, state, at, cost, until)))
    })
}

/// Changes a state all at once: if the rule panics, nothing was charged.
pub(crate) fn on_a_copy<S: Clone, R>(state: &mut S, change: impl FnOnce(&mut S) -> R) -> R {
    let mut copy = state.clone();
    let changed = change(&mut copy);
    *state = copy;
    changed
}

/// Reads a state under the rule of a time, without changing it.
fn read_at<A: Algorithm, R>(
    rule: &A,
    state: &A::State,
    at: Tick,
    read: impl FnOnce(&A::State) -> R,
) -> R {
    if rule.clock_was_set_back(state, at) {
        let mut copy = state.clone();
        rule.rebase(&mut copy, at);
        read(&copy)
    } else {
        read(state)
    }
}

/// Brings a state under the rule of a time: an override may have ended by then.
fn bring<A: Algorithm>(rule: &A, state: &mut A::State, at: Tick) {
    if rule.clock_was_set_back(state, at) {
        on_a_copy(state, |state| rule.rebase(state, at));
    }
}

/// Returns when a denied request can be served, if it can be served in time. The wait of the decision counts
/// from `now`.
fn due(decision: &Decision, now: Tick, until: Tick) -> Option<Tick> {
    let due = now.after(decision.retry_after.filter(|_| !decision.allowed)?)?;
    (due <= until).then_some(due)
}

/// Checks a request. A request that has to wait is not denied, unless it would wait too long.
fn ask<A: Algorithm>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
    until: Tick,
) -> Decision {
    bring(rule, state, now);
    if rule.allows(state, now, cost) {
        return rule.decide(state, now, cost);
    }
    let decision = Decision::from_outcome(rule, state, now, Outcome::Denied(cost), None);
    if due(&decision, now, until).is_some() { decision } else { rule.decide(state, now, cost) }
}
