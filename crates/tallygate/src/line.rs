//! The lines of requests that wait for a key: first come, first served, and nothing is charged in advance.
//!
//! A waiting request has charged nothing. Only the head of a line has a time: the time at which its cost will fit if no
//! other request comes. At this time it checks the key like any other request, is charged, and the next waiter becomes
//! the head. So a request that leaves has nothing to return, and the requests behind it move up. After a change of
//! policy, a refund or a reset, the head only has to check again. While requests wait for a key, a check of the key
//! comes behind them and is denied.
//!
//! Every waiter has its own deadline, whatever the head does. A waiter that is not polled by its deadline loses its
//! place. Until then, waiters behind it are served if there is room for them and for everything ahead of them.
//!
//! Charging waiting requests in advance would be simpler for a bucket, and wrong for a window: units that are charged
//! in one window no longer count in the next one, in which the request is served.
//!
//! A thread that blocks while it waits polls no other future meanwhile. So a waiter that was last polled by this
//! thread is passed over: it keeps its place, but it is not the head, until another thread polls it or the blocking
//! request has left.
//!
//! Joining, checking and leaving take O(log n) steps for a line of n waiters. Therefore a line stores only how many
//! units wait ([`Group`]), and the rule computes the shortest time in which they can be allowed
//! ([`Algorithm::fit_behind`]). While a thread blocks, waiters that are passed over are visited one by one.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::task::Waker;
use std::thread::{self, ThreadId};

use tallygate_core::{Algorithm, Answer as _, Cost, Decision, Fit, Outcome, Source, Tick, Ticks};

use crate::lateness::counted_from;
use crate::shards::{SetBack, Shards, Timed, WakeList};
use crate::table::{Full, KeySlot, Reading, Table};

#[derive(Default)]
pub(crate) struct Line {
    /// The number of requests that wait for any key, or are about to.
    waiting: AtomicUsize,
    /// The number of the next ticket. All lines share the count, because a ticket may outlive its line.
    next: AtomicU64,
    queues: Shards<Queues>,
}

type Queues = HashMap<KeySlot, Queue>;

impl Timed for Queues {
    fn set_back(&mut self, by: &SetBack, wakes: &mut WakeList) {
        self.values_mut().for_each(|queue| queue.set_back(by, wakes));
    }
}

/// The requests that wait for one key.
#[derive(Default)]
struct Queue {
    /// By ticket number, so in the order in which they came.
    waiters: BTreeMap<u64, Waiter>,
    deadlines: BTreeSet<(Tick, u64)>,
    /// The waiting units, by the [identity](Algorithm::identity) of the rule that they wait under.
    groups: HashMap<u64, Group>,
    /// The threads that block until a waiter is answered, each once per waiter.
    blocked: Vec<ThreadId>,
    /// The number of events so far that may delay the waiters.
    disturbed: u64,
}

/// The requests that wait for a key under one rule.
#[derive(Default)]
struct Group {
    waiters: usize,
    units: u128,
    /// The units of the requests that will certainly be served if they stay in line.
    certain: u128,
}

struct Waiter {
    cost: Cost,
    /// The last time at which it can be served.
    until: Tick,
    /// The identity of the rule that it waits under; `None` after the rules have changed, until it checks again.
    rule: Option<u64>,
    /// The count of disturbances when it was last certain that the waiter will be served; it still is if there were
    /// none since.
    certain: Option<u64>,
    waker: Option<Waker>,
    /// The thread that polled it last.
    thread: ThreadId,
    /// Whether that thread sleeps until the waiter is answered.
    blocks: bool,
}

impl Waiter {
    /// Returns whether it cannot be polled before another waiter has left, because its thread blocks for that waiter.
    fn is_passed_over(&self, blocked: &[ThreadId]) -> bool {
        !self.blocks && blocked.contains(&self.thread)
    }
}

/// How the request of a waiter waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// As a future, which any thread may poll next.
    Async,
    /// The thread that joins the line sleeps until the request is answered.
    Blocking,
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
    /// It was served, or can no longer be served in time. It has left the line.
    Done(Decision),
    /// It waits, and must check again at this time or when it is woken.
    At(Tick),
}

/// A request that is counted as waiting until it is known whether it waits.
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

    /// Leaves the line. The waiters behind move up.
    pub(crate) fn leave(&self, ticket: &Ticket) {
        let mut wakes = WakeList::default();
        let mut queues = self.queues.lock(ticket.spot);
        self.remove(&mut queues, ticket.spot, ticket.number, &mut wakes);
    }

    /// Removes a waiter from its line.
    fn remove(&self, queues: &mut Queues, spot: KeySlot, number: u64, wakes: &mut WakeList) {
        let Some(queue) = queues.get_mut(&spot) else { return };
        if queue.remove(number, wakes) {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
        }
        if queue.waiters.is_empty() {
            queues.remove(&spot);
        }
    }

    /// Removes the waiters that were not polled by their deadline from a line.
    fn expire(
        &self,
        queues: &mut Queues,
        spot: KeySlot,
        now: Tick,
        asking: Option<u64>,
        wakes: &mut WakeList,
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

    /// Wakes the head of a key's line to check again, because the state of the key has changed unexpectedly.
    pub(crate) fn wake_head(&self, spot: KeySlot) {
        if self.is_empty() {
            return;
        }
        let mut wakes = WakeList::default();
        let mut queues = self.queues.lock(spot);
        if let Some(queue) = queues.get_mut(&spot) {
            queue.forget_certainty();
            queue.wake_first_two(&mut wakes);
        }
    }

    /// Wakes all waiters of a key to check again, because the rules of the key have changed.
    pub(crate) fn wake_all_of(&self, spot: KeySlot) {
        if self.is_empty() {
            return;
        }
        let mut wakes = WakeList::default();
        let mut queues = self.queues.lock(spot);
        if let Some(queue) = queues.get_mut(&spot) {
            queue.rules_changed(&mut wakes);
        }
    }

    /// Wakes all waiters to check again, because the rules of all keys have changed.
    pub(crate) fn wake_all(&self) {
        self.queues.each(|queues, wakes| {
            queues.values_mut().for_each(|queue| queue.rules_changed(wakes));
        });
    }

    /// Moves the deadlines of all waiters, and wakes them to check again, if a reading is the first after the clock was
    /// set back.
    pub(crate) fn follow(&self, reading: Reading) {
        self.queues.follow(reading);
    }

    /// Returns the answer to a check of a key that other requests wait for; `None` if no request waits for it.
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

    /// Calls `read` with the line of a key, if requests wait for it, and with the reading to continue with.
    fn with_line<R>(
        &self,
        spot: KeySlot,
        reading: Reading,
        read: impl FnOnce(&Queue, Reading) -> R,
    ) -> Option<R> {
        let mut wakes = WakeList::default();
        let (mut queues, reading) = self.queues.lock_at(spot, reading, &mut wakes);
        self.expire(&mut queues, spot, reading.now, None, &mut wakes);
        queues.get(&spot).map(|queue| read(queue, reading))
    }

    /// Checks a key. If the cost does not fit yet, but may fit in time, the request waits in line.
    pub(crate) fn join<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        spot: KeySlot,
        cost: Cost,
        reading: Reading,
        (max_wait, mode): (Ticks, WaitMode),
    ) -> Result<Joined, Full> {
        // Counted before the state is read, so that a later change of the state finds a line that is not empty.
        let counted = Counted::new(&self.waiting);
        let mut wakes = WakeList::default();
        let (mut queues, reading) = self.queues.lock_at(spot, reading, &mut wakes);
        let now = reading.now;
        let until = now.after(max_wait).unwrap_or(Tick(i64::MAX));
        self.expire(&mut queues, spot, now, None, &mut wakes);
        let (decision, latest) = match queues.get(&spot) {
            // A check of cost 0 does not wait in line.
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
        let queue = queues.entry(spot).or_default();
        queue.push((number, cost), until, identity, certain);
        if mode == WaitMode::Blocking {
            queue.pass_over_futures_of_this_thread(number, &mut wakes);
        }
        counted.stays();
        Ok(Joined::Waiting(Ticket { spot, number, cost }))
    }

    /// Checks whether it is a waiter's turn. If it is not, returns when the waiter must check again.
    pub(crate) fn turn<A: Algorithm>(
        &self,
        (table, rule): (&Table<A::State>, &A),
        ticket: &mut Ticket,
        reading: Reading,
        waker: &Waker,
    ) -> Result<Turn, Full> {
        let &mut Ticket { spot, number, cost } = ticket;
        let mut replaced = Some(waker.clone());
        let mut wakes = WakeList::default();
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
        let [head, second] = queue.first_two();
        if head.is_none_or(|(first, _)| first != number) {
            let is_second = second.is_some_and(|(second, _)| second == number);
            let place = (spot, number, cost);
            let beside = queue.serve_beside_others((table, rule), place, reading, &mut wakes)?;
            if now < until && beside.is_none() {
                // The second waiter takes over if the head is not polled by its deadline.
                let over = head.filter(|_| is_second).and_then(|(_, until)| until.after(Ticks(1)));
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
            // A faulty rule that denies a cost that fits must not keep this thread busy.
            return Ok(Turn::At(due.max(now.after(Ticks(1)).unwrap_or(due))));
        }
        self.remove(&mut queues, spot, number, &mut wakes);
        Ok(Turn::Done(decision))
    }

    /// Does the same for a waiter that lost its place because it was not polled by its deadline: it may try once more,
    /// behind the others.
    #[cold]
    fn turn_without_place<A: Algorithm>(
        &self,
        rule: (&Table<A::State>, &A),
        ticket: &mut Ticket,
        reading: Reading,
        waker: &Waker,
    ) -> Result<Turn, Full> {
        let at_once = (Ticks::ZERO, WaitMode::Async);
        match self.join(rule, ticket.spot, ticket.cost, reading, at_once)? {
            Joined::Decided(decision) => Ok(Turn::Done(decision)),
            Joined::Waiting(new) => {
                *ticket = new;
                self.turn(rule, ticket, reading, waker)
            }
        }
    }
}

/// The answer to a request that comes behind waiting requests.
struct AnswerBehind {
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
        let waiter = Waiter {
            cost,
            until,
            rule: Some(rule),
            certain,
            waker: None,
            thread: thread::current().id(),
            blocks: false,
        };
        self.groups.entry(rule).or_default().add(cost, certain.is_some());
        self.waiters.insert(number, waiter);
        self.deadlines.insert((until, number));
    }

    /// Removes a waiter, and returns whether it was in line. Wakes the waiters that become first and second.
    fn remove(&mut self, number: u64, wakes: &mut WakeList) -> bool {
        let was_near = self.first_two().iter().flatten().any(|(one, _)| *one == number);
        let Some(waiter) = self.waiters.remove(&number) else { return false };
        if waiter.blocks {
            let blocked = self.blocked.iter().position(|thread| *thread == waiter.thread);
            blocked.map(|index| self.blocked.swap_remove(index));
        }
        self.deadlines.remove(&(waiter.until, number));
        self.ungroup(waiter.rule, waiter.cost, waiter.certain);
        if was_near || waiter.blocks {
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

    /// Returns the waiters in the order in which they are served, without waiters that are passed over.
    fn in_turn(&self) -> impl Iterator<Item = (&u64, &Waiter)> {
        self.waiters.iter().filter(|(_, waiter)| !waiter.is_passed_over(&self.blocked))
    }

    /// Returns the numbers and the deadlines of the first two of them.
    fn first_two(&self) -> [Option<(u64, Tick)>; 2] {
        let mut in_turn = self.in_turn().map(|(number, waiter)| (*number, waiter.until));
        [in_turn.next(), in_turn.next()]
    }

    /// Records that the thread that joined as this waiter sleeps until the waiter is answered.
    fn pass_over_futures_of_this_thread(&mut self, number: u64, wakes: &mut WakeList) {
        let Some(waiter) = self.waiters.get_mut(&number) else { return };
        waiter.blocks = true;
        self.blocked.push(waiter.thread);
        if self.waiters.values().any(|waiter| waiter.is_passed_over(&self.blocked)) {
            // They may be served later than planned. This thread does not wake them, because some executors would queue
            // them for this thread.
            self.forget_certainty();
            self.wake_first_two_in_turn(wakes);
        }
    }

    /// Wakes the head to check again, and the second waiter to take over if the head does not do so by its deadline. If
    /// the first two waiters of the line are passed over, it wakes them too: another thread may poll them.
    fn wake_first_two(&mut self, wakes: &mut WakeList) {
        let first_two = self.waiters.values_mut().take(2);
        wakes.wake.extend(first_two.filter_map(|waiter| waiter.waker.take()));
        if !self.blocked.is_empty() {
            self.wake_first_two_in_turn(wakes);
        }
    }

    fn wake_first_two_in_turn(&mut self, wakes: &mut WakeList) {
        let waiters = self.waiters.values_mut();
        let in_turn = waiters.filter(|waiter| !waiter.is_passed_over(&self.blocked)).take(2);
        wakes.wake.extend(in_turn.filter_map(|waiter| waiter.waker.take()));
    }

    /// Forgets which waiters will certainly be served in time.
    fn forget_certainty(&mut self) {
        self.disturbed += 1;
        self.groups.values_mut().for_each(|group| group.certain = 0);
    }

    fn rules_changed(&mut self, wakes: &mut WakeList) {
        self.forget_certainty();
        self.groups.clear();
        for waiter in self.waiters.values_mut() {
            waiter.rule = None;
            wakes.wake.extend(waiter.waker.take());
        }
    }

    /// Moves all deadlines with the clock. The rules may decide differently at the new time.
    fn set_back(&mut self, by: &SetBack, wakes: &mut WakeList) {
        self.deadlines.clear();
        for (number, waiter) in &mut self.waiters {
            waiter.until = by.moved(waiter.until);
            self.deadlines.insert((waiter.until, *number));
        }
        self.rules_changed(wakes);
    }

    /// Returns a waiter whose deadline has passed, other than the one that checks.
    fn expired(&self, now: Tick, asking: Option<u64>) -> Option<u64> {
        let passed = self.deadlines.iter().take_while(|(until, _)| *until < now);
        passed.map(|(_, number)| *number).find(|number| Some(*number) != asking)
    }

    /// Updates a waiter that checks again, and returns its deadline; `None` if it has no place. Its old waker is stored
    /// in place of the new one.
    fn update(&mut self, number: u64, rule: u64, waker: &mut Option<Waker>) -> Option<Tick> {
        let waiter = self.waiters.get_mut(&number)?;
        std::mem::swap(&mut waiter.waker, waker);
        waiter.thread = thread::current().id();
        let (cost, until, certain) = (waiter.cost, waiter.until, waiter.certain);
        if waiter.rule != Some(rule) {
            let old = waiter.rule.replace(rule);
            waiter.certain = None;
            self.ungroup(old, cost, certain);
            self.groups.entry(rule).or_default().add(cost, false);
            // The answers to the other waiters depended on the old rule.
            self.forget_certainty();
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
    ) -> Result<AnswerBehind, Full> {
        table.with(rule, spot, reading, self.behind(rule, cost, reading.now))
    }

    /// Returns the step that denies a request because it comes behind all waiters. Its retry time is a lower bound.
    fn behind<A: Algorithm>(
        &self,
        rule: &A,
        cost: Cost,
        now: Tick,
    ) -> impl FnOnce(&mut A::State, Tick) -> AnswerBehind {
        // Units of other rules are not counted, because they may be charged differently under this rule, or not at all.
        // Waiters that may give up are not counted either, because they would then make room.
        let group = self.groups.get(&rule.identity());
        let (certain, all) = group.map_or((0, 0), |group| (group.certain, group.units));
        let is_alone = group.is_some_and(|group| group.waiters == self.waiters.len());
        move |state, at| {
            // From now on the key is under this rule, as after a check. Otherwise the wait would be wrong.
            bring(rule, state, at);
            let wait = match rule.fit_behind(state, at, certain, cost).earliest {
                // The requests ahead may be due at this very tick and not served yet.
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
            AnswerBehind { decision: counted_from(now, at, decision), latest }
        }
    }

    /// A waiter behind others is served if there is room now for it and for everything ahead of it. The others, which
    /// are due but have not been polled yet, then lose nothing. They are woken.
    fn serve_beside_others<A: Algorithm>(
        &mut self,
        (table, rule): (&Table<A::State>, &A),
        (spot, number, cost): (KeySlot, u64, Cost),
        reading: Reading,
        wakes: &mut WakeList,
    ) -> Result<Option<Decision>, Full> {
        let fits = |units: Cost| {
            let allows = |state: &A::State, at| rule.allows(state, at, units);
            table.with(rule, spot, reading, |state, at| {
                read_at(rule, state, at, |state| allows(state, at))
            })
        };
        let identity = Some(rule.identity());
        let mut units = cost;
        let ahead = self.waiters.range(..number).map(|(_, waiter)| waiter);
        let in_turn = ahead.filter(|waiter| !waiter.is_passed_over(&self.blocked));
        for (place, waiter) in in_turn.enumerate() {
            let Some(with_it) = units.checked_add(waiter.cost).filter(|_| waiter.rule == identity)
            else {
                return Ok(None);
            };
            units = with_it;
            // Usually the head is not due, and the loop ends here. The rest of the line is visited once.
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

/// Checks the table for the head, or for a request without a line.
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

/// Changes a copy of a state, and stores it at the end. If the rule panics, nothing was charged.
pub(crate) fn on_a_copy<S: Clone, R>(state: &mut S, change: impl FnOnce(&mut S) -> R) -> R {
    let mut copy = state.clone();
    let changed = change(&mut copy);
    *state = copy;
    changed
}

/// Reads a state under the rule that applies at a time, without changing it.
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

/// Moves a state to the rule that applies at a time: an override may have ended by then.
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

#[cfg(test)]
mod tests {
    use tallygate_core::{Limit, Policy};

    use super::*;
    use crate::hash::KeyHasher;
    use crate::table::WhenFull;

    /// The line of one key that has used up a limit of one request per ten ticks.
    struct Fixture {
        rule: Limit,
        table: Table<<Limit as Algorithm>::State>,
        spot: KeySlot,
        line: Line,
    }

    impl Fixture {
        fn new() -> Self {
            let rule = Policy::token_bucket(1).per(Ticks(10)).burst(1).limit().expect("valid");
            let table = Table::new(u128::BITS, 10, WhenFull::EvictLeastUsed);
            let spot = table.slot_of(KeyHasher::new().fingerprint(b"a"));
            let decide = |state: &mut _, at| rule.decide::<bool>(state, at, 1);
            assert!(table.with(&rule, spot, Tick(0), decide).is_ok_and(|allowed| allowed));
            Self { rule, table, spot, line: Line::default() }
        }

        fn join(&self, mode: WaitMode) -> Ticket {
            let wait = (Ticks(1_000), mode);
            let rule = (&self.table, &self.rule);
            match self.line.join(rule, self.spot, 1, Tick(0).into(), wait) {
                Ok(Joined::Waiting(ticket)) => ticket,
                other => panic!("it waits: {other:?}"),
            }
        }

        /// Polls a waiter. Returns whether it is served.
        fn is_served(&self, ticket: &mut Ticket, now: i64) -> bool {
            let rule = (&self.table, &self.rule);
            match self.line.turn(rule, ticket, Tick(now).into(), Waker::noop()) {
                Ok(Turn::Done(decision)) => decision.allowed,
                Ok(Turn::At(_)) => false,
                Err(Full) => panic!("there is room"),
            }
        }
    }

    /// Runs a function on another thread.
    fn elsewhere<R: Send>(act: impl FnOnce() -> R + Send) -> R {
        thread::scope(|scope| scope.spawn(act).join().expect("no panic"))
    }

    /// Fault K5.
    #[test]
    fn a_blocking_request_is_served_before_futures_of_its_own_thread_only() {
        let scene = Fixture::new();
        let mut own = scene.join(WaitMode::Async);
        let mut other = elsewhere(|| scene.join(WaitMode::Async));
        let mut blocking = scene.join(WaitMode::Blocking);
        assert!(!scene.is_served(&mut blocking, 10), "the other thread was first");
        assert!(elsewhere(|| scene.is_served(&mut other, 10)));
        assert!(!scene.is_served(&mut blocking, 19));
        assert!(scene.is_served(&mut blocking, 20));
        assert!(!scene.is_served(&mut own, 29));
        assert!(scene.is_served(&mut own, 30));
    }

    /// Fault K5.
    #[test]
    fn a_future_that_another_thread_polls_keeps_its_turn() {
        let scene = Fixture::new();
        let mut moved = scene.join(WaitMode::Async);
        let mut blocking = scene.join(WaitMode::Blocking);
        assert!(!elsewhere(|| scene.is_served(&mut moved, 5)));
        assert!(!scene.is_served(&mut blocking, 10), "the future is still before it");
        assert!(elsewhere(|| scene.is_served(&mut moved, 10)));
        assert!(scene.is_served(&mut blocking, 20));
    }

    /// Fault K5.
    #[test]
    fn a_future_gets_its_turn_back_when_its_thread_no_longer_blocks() {
        let scene = Fixture::new();
        let mut first = scene.join(WaitMode::Async);
        let blocking = scene.join(WaitMode::Blocking);
        let mut last = elsewhere(|| scene.join(WaitMode::Async));
        scene.line.leave(&blocking);
        assert!(!elsewhere(|| scene.is_served(&mut last, 10)));
        assert!(scene.is_served(&mut first, 10));
    }

    /// Fault K5.
    #[test]
    fn a_request_behind_a_future_that_is_passed_over_is_woken() {
        use std::sync::Arc;
        use std::sync::atomic::AtomicBool;

        struct Woken(AtomicBool);
        impl std::task::Wake for Woken {
            fn wake(self: Arc<Self>) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let scene = Fixture::new();
        let _own = scene.join(WaitMode::Async);
        let woken = Arc::new(Woken(AtomicBool::new(false)));
        let waker = Waker::from(woken.clone());
        elsewhere(|| {
            let mut other = scene.join(WaitMode::Async);
            let rule = (&scene.table, &scene.rule);
            let turn = scene.line.turn(rule, &mut other, Tick(0).into(), &waker);
            assert!(matches!(turn, Ok(Turn::At(_))));
        });
        let _blocking = scene.join(WaitMode::Blocking);
        assert!(woken.0.load(Ordering::Relaxed), "it is the head now");
    }
}
