//! The operations of a memory store, on the keys of one rule.

use std::task::Waker;

use tallygate_core::{
    Algorithm, Answer, Cost, Decision, Op, Part, Receipt, Settlement, Tick, Ticks, Timed, reserve,
    settle,
};

use crate::ask::Ask;
use crate::clock::Clock;
use crate::departures::Departure;
use crate::hash::KeyHasher;
use crate::lateness::counted_from;
use crate::line::{Joined, Ticket, Turn, WaitMode};
use crate::reservation::{Charged, SettleError};
use crate::returns::{ReturnLog, WasReset};
use crate::storage::{MAX_KEY_BYTES, StoreError};
use crate::table::{Fingerprint, Full, KeySlot, Lookup, OwnLines, Reading, Swept};

use super::keys::Keys;

/// The parts of a store that every request uses before it reaches a table: the hasher of keys, and the clock.
pub(super) struct Engine<C> {
    pub(super) hasher: KeyHasher,
    pub(super) clock: C,
    /// Reservations write to it, and every check reads the fields beside it.
    pub(super) returns: OwnLines<ReturnLog>,
}

/// The reason why there is no decision. It is one byte, so that the path of a known key carries it in a register.
#[derive(Clone, Copy)]
pub(super) enum NoDecision {
    KeyTooLong,
    Full,
}

impl From<Full> for NoDecision {
    fn from(_: Full) -> Self {
        Self::Full
    }
}

/// The number of keys of a batch that are hashed and prefetched at once.
const AHEAD: usize = 32;

impl<C: Clock> Engine<C> {
    pub(super) fn new(clock: C) -> Self {
        Self::with(KeyHasher::new(), clock)
    }

    pub(super) fn with(hasher: KeyHasher, clock: C) -> Self {
        Self { hasher, clock, returns: OwnLines(ReturnLog::new()) }
    }

    #[inline(always)]
    pub(super) fn fingerprint(&self, key: &[u8]) -> Result<Fingerprint, NoDecision> {
        if key.len() > MAX_KEY_BYTES {
            return Err(NoDecision::KeyTooLong);
        }
        Ok(self.hasher.fingerprint(key))
    }

    pub(super) fn spot<S: 'static>(
        &self,
        keys: &Keys<S>,
        key: &[u8],
    ) -> Result<KeySlot, StoreError> {
        self.print(key).map(|print| keys.table.slot_of(print))
    }

    pub(super) fn print(&self, key: &[u8]) -> Result<Fingerprint, StoreError> {
        self.fingerprint(key).map_err(|_| StoreError::KeyTooLong { bytes: key.len() })
    }

    pub(super) fn now(&self) -> Tick {
        self.clock.now()
    }

    /// Returns the time that the caller gave, or the time of the clock.
    #[inline]
    pub(super) fn read(&self, now: Option<Tick>) -> Reading {
        now.map_or_else(|| Reading::of(&self.clock), Reading::from)
    }

    /// Reads the clock for a request that waits, or may wait.
    pub(super) fn read_for<S: Clone + 'static>(&self, keys: &Keys<S>) -> Reading {
        let reading = self.read(None);
        keys.note_set_back(reading);
        reading
    }

    #[inline]
    pub(super) fn apply<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        match op {
            Op::Check(cost) => match self.check(keys, rule, key, cost, now) {
                Ok(answer) => Ok(answer),
                Err(why) => self.undecided(keys, rule, (key.len(), cost), now, why),
            },
            op => self.other(keys, rule, key, op, now),
        }
    }

    /// Answers a check that the table did not decide.
    #[cold]
    #[inline(never)]
    fn undecided<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        (key_bytes, cost): (usize, Cost),
        now: Option<Tick>,
        why: NoDecision,
    ) -> Result<T, StoreError> {
        match why {
            NoDecision::Full => keys.without_place(rule, cost, self.read(now).now),
            NoDecision::KeyTooLong => Err(StoreError::KeyTooLong { bytes: key_bytes }),
        }
    }

    /// This is one function per rule, so that each is small: the algorithm is chosen before it is called.
    #[inline(never)]
    fn check<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<T, NoDecision> {
        let key = keys.table.look_up(self.fingerprint(key)?);
        // The bucket is loaded while the clock is read.
        keys.decide(rule, key, cost, self.read(now))
    }

    /// Carries out an operation that is not a check.
    #[cold]
    fn other<A: Algorithm, T: Answer>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        let print = self.print(key)?;
        let spot = keys.table.slot_of(print);
        let reading = self.read(now);
        keys.note_set_back(reading);
        if let Op::Peek(cost) = op {
            if let Some(decision) = keys.peek_behind_others(rule, spot, cost, reading) {
                return Ok(decision);
            }
        }
        let step = |state: &mut A::State, at| {
            let mut part = Part { rule, state, op };
            let agrees = part.allows(at);
            part.step::<T>(at, agrees)
        };
        if matches!(op, Op::Peek(_) | Op::Force(0)) {
            return Ok(keys.look(rule, spot, reading, |state, at| step(state, at).0));
        }
        let run = |state: &mut A::State, at| {
            let fresh = rule.fresh_at(state);
            let (answer, dropped) = step(state, at);
            match op {
                Op::Force(..0) => {
                    self.returns.returned(print.hash(), rule, state, at, fresh);
                }
                Op::Reset => self.returns.was_reset(print.hash(), at),
                _ => {}
            }
            (counted_from(reading.now, at, answer), dropped)
        };
        let stepped = match op {
            Op::Force(..0) | Op::Reset => keys.table.with_return(rule, spot, reading, run),
            _ => keys.table.with(rule, spot, reading, run),
        };
        let (answer, dropped) = stepped.map_err(|Full| keys.full())?;
        if matches!(op, Op::Force(1..)) {
            keys.table.count_dropped_debt(dropped);
        }
        keys.line.wake_head(spot);
        Ok(answer)
    }

    #[cold]
    pub(super) fn reserve<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        (estimate, time_to_live): (Cost, Ticks),
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        let spot = self.spot(keys, key)?;
        let reading = self.read(now);
        keys.note_set_back(reading);
        let store = self.returns.store();
        if let Some(answer) = keys.behind_others::<_, Timed>(rule, spot, estimate, reading) {
            let timed = answer.map_err(|Full| keys.full())?;
            return Ok(Charged { timed, receipt: Receipt::Nothing, number: 0, store });
        }
        if estimate == 0 {
            let look = |state: &mut A::State, at| rule.decide::<Timed>(state, at, 0);
            let timed = keys.look(rule, spot, reading, look);
            let until = timed.at.after(time_to_live).unwrap_or(Tick(i64::MAX));
            let number = self.returns.reserved(until);
            return Ok(Charged { timed, receipt: Receipt::Nothing, number, store });
        }
        let charged = keys.table.with(rule, spot, reading, |state, at| {
            let (timed, receipt) = reserve::<_, Timed>(rule, state, at, estimate);
            let until = at.after(time_to_live).unwrap_or(Tick(i64::MAX));
            let number = if timed.decision.allowed { self.returns.reserved(until) } else { 0 };
            Charged { timed: counted_from(reading.now, at, timed), receipt, number, store }
        });
        charged.or_else(|Full| {
            let timed = keys.without_place(rule, estimate, reading.now)?;
            Ok(Charged { timed, receipt: Receipt::Nothing, number: 0, store })
        })
    }

    #[cold]
    pub(super) fn settle<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        (change, charged): (i128, &Charged),
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        if charged.store != self.returns.store() {
            return Err(SettleError::OtherLimiter);
        }
        let print = match self.print(key) {
            Ok(print) => print,
            Err(error) => return Ok(Err(error)),
        };
        let spot = keys.table.slot_of(print);
        let reading = self.read(now);
        keys.note_set_back(reading);
        let run = |state: &mut A::State, at| {
            let mut receipt = charged.receipt.clone();
            let is_lowered = self.returns.lower(print.hash(), charged.number, &mut receipt)?;
            let before = (is_lowered && change < 0).then(|| rule.receipt(state));
            let fresh = rule.fresh_at(state);
            let (decision, dropped) = settle::<_, Decision>(rule, state, at, change, &receipt);
            if let Some(before) = &before {
                let after = &rule.receipt(state);
                let settlement = Settlement { reservation: &receipt, before, after };
                self.returns.settled(print.hash(), charged.number, &settlement);
            }
            if change < 0 {
                self.returns.returned(print.hash(), rule, state, at, fresh);
            }
            Ok((counted_from(reading.now, at, decision), dropped))
        };
        let settled = match change {
            1.. => keys.table.with(rule, spot, reading, run),
            _ => keys.table.with_return(rule, spot, reading, run),
        };
        let (decision, dropped) = match settled {
            Ok(Ok(settled)) => settled,
            Ok(Err(WasReset)) => return Err(SettleError::Reset),
            Err(Full) => return Ok(Err(keys.full())),
        };
        if change > 0 {
            keys.table.count_dropped_debt(dropped);
        }
        keys.line.wake_head(spot);
        Ok(Ok(decision))
    }

    /// Hashes and prefetches some keys, then decides them, then continues with the next ones.
    pub(super) fn check_many<A: Algorithm, T: Answer, K>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        asks: &[K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let mut lengths = asks.iter().map(|ask| ask.into().key.len());
        if let Some(bytes) = lengths.find(|bytes| *bytes > MAX_KEY_BYTES) {
            return Err(StoreError::KeyTooLong { bytes });
        }
        let by_clock = self.read(None);
        let mut answers = Vec::with_capacity(asks.len());
        let mut spots = [Lookup::default(); AHEAD];
        for some in asks.chunks(AHEAD) {
            for (spot, ask) in spots.iter_mut().zip(some) {
                *spot = keys.table.look_up(self.hasher.fingerprint(ask.into().key));
            }
            for (spot, ask) in spots.iter().zip(some) {
                let ask = ask.into();
                let reading = if ask.at.is_some() { self.read(ask.at) } else { by_clock };
                answers.push(match keys.decide(rule, *spot, ask.cost, reading) {
                    Ok(answer) => answer,
                    Err(Full) => keys.without_place(rule, ask.cost, reading.now)?,
                });
            }
        }
        Ok(answers)
    }

    /// Prepares a decision on `count` keys for one of them. Returns the answer for that key if requests wait for it.
    #[cold]
    pub(super) fn before_others<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        spot: KeySlot,
        (cost, count): (Cost, usize),
        reading: Reading,
    ) -> Result<Option<Decision>, StoreError> {
        keys.table.grow_for(count);
        keys.note_set_back(reading);
        keys.behind_others(rule, spot, cost, reading).transpose().map_err(|Full| keys.full())
    }

    pub(super) fn join<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
        cost: Cost,
        wait: (Ticks, WaitMode),
    ) -> Result<Joined, StoreError> {
        let spot = self.spot(keys, key)?;
        let reading = self.read_for(keys);
        let joined = keys.line.join((&keys.table, rule), spot, cost, reading, wait);
        joined.map_err(|Full| keys.full())
    }

    pub(super) fn shape<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        key: &[u8],
    ) -> Result<(Decision, Option<Departure>), StoreError> {
        let print = self.print(key)?;
        let spot = keys.table.slot_of(print);
        keys.departures.join((spot, print.hash()), rule.identity(), || {
            let reading = self.read(None);
            let lookup = keys.table.look_up(print);
            let decision = match keys.decide(rule, lookup, 1, reading) {
                Ok(decision) => decision,
                Err(Full) => keys.without_place(rule, 1, reading.now)?,
            };
            Ok((decision, reading))
        })
    }

    pub(super) fn cancel<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        departure: &Departure,
    ) {
        let reading = self.read_for(keys);
        let return_unit = |state: &mut A::State, at| {
            let fresh = rule.fresh_at(state);
            let has_effect = rule.charge(state, at, -1) == 0;
            self.returns.returned(departure.key(), rule, state, at, fresh);
            has_effect
        };
        if keys.departures.cancel((&keys.table, rule), departure, reading, return_unit) {
            keys.line.wake_head(departure.spot());
        }
    }

    /// Visits the next buckets of a table, and drops their idle keys.
    pub(super) fn sweep<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        buckets: usize,
    ) -> Swept {
        let reading = self.read(None);
        keys.note_set_back(reading);
        keys.table.sweep_idle(rule, reading, buckets)
    }

    /// Wakes the requests that wait for a key, or for any key, so that they check again.
    pub(super) fn rules_changed<S: 'static>(&self, keys: &Keys<S>, key: Option<&[u8]>) {
        match key {
            None => keys.line.wake_all(),
            // No request waits for a key that is too long.
            Some(key) => {
                if let Ok(spot) = self.spot(keys, key) {
                    keys.line.wake_all_of(spot);
                }
            }
        }
    }

    pub(super) fn turn<A: Algorithm>(
        &self,
        keys: &Keys<A::State>,
        rule: &A,
        ticket: &mut Ticket,
        waker: &Waker,
    ) -> Result<Turn, StoreError> {
        loop {
            let reading = self.read_for(keys);
            let turn = keys.line.turn((&keys.table, rule), ticket, reading, waker);
            let turn = turn.map_err(|Full| keys.full())?;
            // If the clock was set back meanwhile, the answer is for a time before that: check again.
            if matches!(turn, Turn::Done(_)) || reading.set_backs() == Some(self.clock.set_backs())
            {
                return Ok(turn);
            }
        }
    }
}
