//! The lines of those who wait for a key: first come, first served, and nothing is booked.
//!
//! Nobody in a line has used anything. The head alone has a time: when its cost will fit if nothing
//! else comes. Then it asks as anybody would, uses what it asked for, and the next becomes the head. So
//! whoever leaves gives nothing back and those behind move up, and a change of policy, a refund or a
//! reset is only a reason for the head to ask again. While somebody waits for a key, a check of it is
//! behind them, and is refused.
//!
//! Charging those who wait beforehand would be simpler for a bucket, and wrong for a window: what is
//! charged in a window that passes is gone when its turn comes.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use tollgate_core::{Algorithm, Answer as _, Cost, Decision, Fit, Outcome, Tick, Ticks};

use crate::memory::counted_from;
use crate::table::{Full, Spot, Table};

/// Locks that lines are kept under.
const SHARDS: usize = 16;

pub(crate) struct Line<S> {
    /// How many wait for any key.
    waiting: AtomicUsize,
    shards: [Mutex<HashMap<Spot, Queue<S>>>; SHARDS],
}

struct Queue<S> {
    waiters: VecDeque<Waiter>,
    /// The number of the next to come.
    next: u64,
    /// How the key will stand when the last has been served, and when: what somebody else would have
    /// to wait for. Not known after anything that was not foreseen.
    tail: Option<(S, Tick)>,
}

struct Waiter {
    number: u64,
    cost: Cost,
    /// When it will be served, as far as was foreseen.
    due: Tick,
    waker: Option<Waker>,
}

/// A place in a line.
#[derive(Debug)]
pub struct Ticket {
    spot: Spot,
    number: u64,
    cost: Cost,
    /// It does not wait beyond this.
    until: Tick,
}

impl Ticket {
    /// The key that it waits for.
    pub(crate) const fn spot(&self) -> Spot {
        self.spot
    }
}

/// What came of joining a line.
#[derive(Debug)]
pub enum Joined {
    /// There was nothing to wait for, or waiting would take too long.
    Decided(Decision),
    /// It waits.
    Waiting(Ticket),
}

/// How one who waits stands.
#[derive(Debug)]
pub enum Turn {
    /// It was served, or cannot be any more; it has left the line.
    Done(Decision),
    /// It is the head, and is to ask again then.
    At(Tick),
    /// Others are before it. It is woken when they are gone.
    Behind,
}

impl<S> Default for Line<S> {
    fn default() -> Self {
        Self { waiting: AtomicUsize::new(0), shards: Default::default() }
    }
}

impl<S> Line<S> {
    /// Whether nobody waits for any key.
    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Relaxed) == 0
    }

    fn queues(&self, spot: Spot) -> MutexGuard<'_, HashMap<Spot, Queue<S>>> {
        // Nothing is left half done by a panic under it: queues change after the rules were asked.
        self.shards[spot.shard(SHARDS)].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves the line; those behind move up.
    pub(crate) fn leave(&self, ticket: &Ticket) {
        let mut queues = self.queues(ticket.spot);
        let Some(queue) = queues.get_mut(&ticket.spot) else { return };
        let place = queue.waiters.binary_search_by_key(&ticket.number, |one| one.number);
        if let Ok(place) = place {
            queue.waiters.remove(place);
            queue.tail = None;
            let head = self.gone(&mut queues, ticket.spot);
            drop(queues);
            wake(head.filter(|_| place == 0));
        }
    }

    /// One has gone from a line. Returns how to wake the head.
    fn gone(&self, queues: &mut HashMap<Spot, Queue<S>>, spot: Spot) -> Option<Waker> {
        self.waiting.fetch_sub(1, Ordering::Relaxed);
        let queue = queues.get(&spot)?;
        if queue.waiters.is_empty() {
            queues.remove(&spot);
            return None;
        }
        queue.head()
    }

    /// Something that nobody foresaw happened to a key: its head asks again.
    pub(crate) fn nudge(&self, spot: Spot) {
        if self.is_empty() {
            return;
        }
        let mut queues = self.queues(spot);
        let head = queues.get_mut(&spot).and_then(Queue::unforeseen);
        drop(queues);
        wake(head);
    }

    /// The same for all keys.
    pub(crate) fn nudge_all(&self) {
        for shard in &self.shards {
            let mut queues = shard.lock().unwrap_or_else(PoisonError::into_inner);
            let heads: Vec<_> = queues.values_mut().map(Queue::unforeseen).collect();
            drop(queues);
            heads.into_iter().for_each(wake);
        }
    }
}

/// Called with no lock held: it may run anybody's code.
fn wake(waker: Option<Waker>) {
    if let Some(waker) = waker {
        waker.wake();
    }
}

impl<S> Queue<S> {
    /// How to wake the head.
    fn head(&self) -> Option<Waker> {
        self.waiters.front()?.waker.clone()
    }

    /// The same, after something that changes what was foreseen.
    fn unforeseen(&mut self) -> Option<Waker> {
        self.tail = None;
        self.head()
    }

    fn push(&mut self, spot: Spot, cost: Cost, due: Tick, until: Tick) -> Ticket {
        let number = self.next;
        self.next += 1;
        self.waiters.push_back(Waiter { number, cost, due, waker: None });
        Ticket { spot, number, cost, until }
    }
}

impl<S: Clone> Line<S> {
    /// What a check hears while others wait for its key; `None` if nobody does.
    pub(crate) fn answer<A: Algorithm<State = S>>(
        &self,
        (table, rule): (&Table<S>, &A),
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Option<Result<Decision, Full>> {
        let mut queues = self.queues(spot);
        let queue = queues.get_mut(&spot)?;
        Some(queue.tail(table, rule, spot, now).map(|(mut state, at)| {
            let mut told = behind(rule, &mut state, at, now, cost);
            queue.tail = Some((state, at));
            // Those before it may be due at this very tick, and are still to come.
            told.retry_after = told.retry_after.map(|wait| wait.max(Ticks(1)));
            told
        }))
    }

    /// Asks for a key; if it has to wait, but not for too long, it has a place in the line.
    pub(crate) fn join<A: Algorithm<State = S>>(
        &self,
        (table, rule): (&Table<S>, &A),
        spot: Spot,
        cost: Cost,
        now: Tick,
        max_wait: Ticks,
    ) -> Result<Joined, Full> {
        let until = now.after(max_wait).unwrap_or(Tick(i64::MAX));
        let mut queues = self.queues(spot);
        let Some(queue) = queues.get_mut(&spot) else {
            let told = table.with(rule, spot, now, |state, at| {
                counted_from(now, at, ask(rule, state, at, cost, until))
            })?;
            let Some(due) = due(&told, now, until) else { return Ok(Joined::Decided(told)) };
            let mut queue = Queue { waiters: VecDeque::new(), next: 0, tail: None };
            let ticket = queue.push(spot, cost, due, until);
            queues.insert(spot, queue);
            self.waiting.fetch_add(1, Ordering::Relaxed);
            return Ok(Joined::Waiting(ticket));
        };
        let (mut state, mut at) = queue.tail(table, rule, spot, now)?;
        let told = behind(rule, &mut state, at, now, cost);
        let Some(due) = due(&told, now, until) else {
            queue.tail = Some((state, at));
            return Ok(Joined::Decided(told));
        };
        serve(rule, &mut state, &mut at, cost);
        queue.tail = Some((state, at));
        let ticket = queue.push(spot, cost, due, until);
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Ok(Joined::Waiting(ticket))
    }

    /// Asks whether it is one's turn.
    pub(crate) fn turn<A: Algorithm<State = S>>(
        &self,
        (table, rule): (&Table<S>, &A),
        ticket: &Ticket,
        now: Tick,
        waker: &Waker,
    ) -> Result<Turn, Full> {
        let &Ticket { spot, number, cost, until } = ticket;
        let mut queues = self.queues(spot);
        let queue = queues.get_mut(&spot).unwrap_or_else(|| unreachable!("it has a place"));
        let place = queue.waiters.binary_search_by_key(&number, |one| one.number);
        let place = place.unwrap_or_else(|_| unreachable!("it has a place"));
        queue.waiters[place].waker = Some(waker.clone());
        if place > 0 {
            return Ok(Turn::Behind);
        }
        let told = table.with(rule, spot, now, |state, at| {
            counted_from(now, at, ask(rule, state, at, cost, until))
        })?;
        if let Some(due) = due(&told, now, until) {
            if due != queue.waiters[0].due {
                queue.waiters[0].due = due;
                queue.tail = None;
            }
            return Ok(Turn::At(due));
        }
        if !told.allowed || queue.waiters[0].due != now {
            queue.tail = None;
        }
        queue.waiters.pop_front();
        let next = self.gone(&mut queues, spot);
        drop(queues);
        wake(next);
        Ok(Turn::Done(told))
    }
}

impl<S: Clone> Queue<S> {
    /// How the key will stand when all have been served, and when.
    fn tail<A: Algorithm<State = S>>(
        &mut self,
        table: &Table<S>,
        rule: &A,
        spot: Spot,
        now: Tick,
    ) -> Result<(S, Tick), Full> {
        if let Some((state, at)) = self.tail.take() {
            return Ok((state, at.max(now)));
        }
        let (mut state, mut at) = table.with(rule, spot, now, |state, now| (state.clone(), now))?;
        for waiter in &mut self.waiters {
            serve(rule, &mut state, &mut at, waiter.cost);
            waiter.due = at;
        }
        Ok((state, at))
    }
}

/// Serves a cost as soon as it fits.
fn serve<A: Algorithm>(rule: &A, state: &mut A::State, at: &mut Tick, cost: Cost) {
    bring(rule, state, *at);
    match rule.fit(state, *at, cost) {
        Fit::Now => {}
        Fit::After(wait) => *at = at.after(wait).unwrap_or(Tick(i64::MAX)),
        Fit::Never => return,
    }
    bring(rule, state, *at);
    rule.charge(state, *at, i128::from(cost));
}

/// Brings a state under the rule of a time: an override may have ended by then.
fn bring<A: Algorithm>(rule: &A, state: &mut A::State, at: Tick) {
    if rule.set_back(state, at) {
        rule.rebase(state, at);
    }
}

/// When one who was refused will be served, if it waits for it.
fn due(told: &Decision, now: Tick, until: Tick) -> Option<Tick> {
    let due = now.after(told.retry_after.filter(|_| !told.allowed)?)?;
    (due <= until).then_some(due)
}

/// Asks. Whoever has to wait has not been refused, unless it would wait too long.
fn ask<A: Algorithm>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
    until: Tick,
) -> Decision {
    bring(rule, state, now);
    if rule.admits(state, now, cost) {
        return rule.decide(state, now, cost);
    }
    let told = Decision::of(rule, state, now, Outcome::Refused(cost), None);
    if due(&told, now, until).is_some() { told } else { rule.decide(state, now, cost) }
}

/// What one who comes behind others is told: the state is that when they will have been served.
fn behind<A: Algorithm>(
    rule: &A,
    state: &mut A::State,
    at: Tick,
    now: Tick,
    cost: Cost,
) -> Decision {
    bring(rule, state, at);
    let ahead = at.since(now);
    let facts = rule.facts(state, at, None);
    let retry_after = match rule.fit(state, at, cost) {
        Fit::Now => Some(ahead),
        Fit::After(wait) => Some(ahead.plus(wait)),
        Fit::Never => None,
    };
    Decision {
        allowed: false,
        limit: facts.limit,
        remaining: 0,
        retry_after,
        reset_after: ahead.plus(facts.reset_after),
        delay: Ticks::ZERO,
        refused_by: None,
        shadow_refused_by: None,
        source: tollgate_core::Source::Store,
    }
}
