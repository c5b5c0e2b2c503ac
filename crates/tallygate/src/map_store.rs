//! [`MapStore`]: a store on any map that gives exclusive access to a key.
//!
//! It is the easiest way to write your own store. The map finds and keeps entries, and this module does everything
//! else: the operations, the reservations, and that a check of cost 0 stores nothing. A store that replies later, such
//! as a database, implements [`Store`] itself.

use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

use tallygate_core::{
    Algorithm, Answer, Cost, Decision, Op, Part, Returns, Settlement, Tick, Ticks, Timed, reserve,
    settle,
};

use crate::ask::Ask;
use crate::reservation::{Charged, SettleError};
use crate::storage::{MAX_KEY_BYTES, RuleRef, Store, StoreError, replies_at_once};

/// A map of states that gives exclusive access to one key at a time.
///
/// [`MapStore`] makes it a store for every operation. `examples/own_store.rs` has one.
pub trait StateMap<A: Algorithm>: Sync {
    /// Calls `step` with the entry of a key, and keeps the entry that `step` leaves there.
    ///
    /// The entry is `None` if the map has none for the key. No other caller may access the entry until `step` has
    /// returned: two callers that both read and then both write would allow one request too many.
    ///
    /// # Errors
    /// Fails if there is no place for the key.
    fn with_entry<T>(
        &self,
        key: &[u8],
        step: impl FnOnce(&mut Option<Entry<A::State>>) -> T,
    ) -> Result<T, StoreError>;

    /// Returns the time. [`MapStore`] calls it within `step`, so that no caller decides at an earlier time than the
    /// caller before it.
    fn now(&self) -> Tick;
}

/// The state of a key in a [`StateMap`].
#[derive(Clone, Debug)]
pub struct Entry<S> {
    state: S,
    /// The returns and resets that affect later settlements.
    returns: Returns,
    expires_at: Tick,
}

impl<S> Entry<S> {
    /// Returns the time from which on the map may drop the entry: a new entry then decides in the same way.
    #[must_use]
    pub const fn expires_at(&self) -> Tick {
        self.expires_at
    }
}

/// A store on a [`StateMap`].
#[derive(Debug)]
pub struct MapStore<M> {
    map: M,
    /// The number of this store, which no other store has, so that a reservation is settled where it was made.
    id: u64,
    /// The number of returns and resets.
    returns: AtomicI64,
    /// The latest time at which any reservation can be settled.
    latest_end: AtomicI64,
}

impl<M> MapStore<M> {
    /// Creates a store on a map.
    pub fn new(map: M) -> Self {
        static STORES: AtomicU64 = AtomicU64::new(1);
        Self {
            map,
            id: STORES.fetch_add(1, Ordering::Relaxed),
            returns: AtomicI64::new(0),
            latest_end: AtomicI64::new(i64::MIN),
        }
    }

    /// Returns the map.
    pub const fn map(&self) -> &M {
        &self.map
    }

    /// Runs a step on the entry of a key. The entry changes only if the step returns, and not if its rule panics.
    fn step<A: Algorithm, T>(
        &self,
        rule: &A,
        key: &[u8],
        now: Option<Tick>,
        step: impl FnOnce(&mut Entry<A::State>, Tick) -> (T, Step),
    ) -> Result<T, StoreError>
    where
        M: StateMap<A>,
    {
        check_length(key)?;
        self.map.with_entry(key, |found| {
            let now = now.unwrap_or_else(|| self.map.now());
            let mut entry = found.clone().unwrap_or_else(|| Entry {
                state: rule.initial(now),
                returns: Returns::default(),
                expires_at: now,
            });
            let fresh_at = rule.fresh_at(&entry.state).unwrap_or(NEVER);
            let (answer, step) = step(&mut entry, now);
            let number = || self.returns.fetch_add(1, Ordering::Relaxed) + 1;
            match step {
                Step::Looked => return answer,
                Step::Charged => {}
                Step::Returned => {
                    let (left, last_change) =
                        (rule.receipt(&entry.state), rule.last_change(&entry.state));
                    entry.returns.note(number(), left, last_change, fresh_at);
                }
                Step::Reset => {
                    // A later reservation stays valid, and an earlier one has expired by then.
                    let until = Tick(self.latest_end.load(Ordering::Relaxed).saturating_add(1));
                    entry.returns.reset(number(), until);
                }
            }
            let fresh_at = rule.fresh_at(&entry.state).unwrap_or(NEVER);
            entry.expires_at = fresh_at.max(entry.returns.until());
            *found = Some(entry);
            answer
        })
    }
}

/// The last tick, which means never.
const NEVER: Tick = Tick(i64::MAX);

/// The outcome of a step.
enum Step {
    Looked,
    Charged,
    Returned,
    Reset,
}

fn check_length(key: &[u8]) -> Result<(), StoreError> {
    match key.len() {
        ..=MAX_KEY_BYTES => Ok(()),
        bytes => Err(StoreError::KeyTooLong { bytes }),
    }
}

impl<A: Algorithm + Sync, M: StateMap<A>> Store<A> for MapStore<M> {
    replies_at_once!();

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Result<T, StoreError> {
        let timed = self.step(&*rule, key, now, |entry, now| {
            let mut part = Part { rule: &*rule, state: &mut entry.state, op };
            let is_allowed = part.allows(now);
            let (timed, _) = part.step::<Timed>(now, is_allowed);
            let step = match op {
                Op::Check(0) | Op::Peek(_) | Op::Force(0) => Step::Looked,
                Op::Check(_) | Op::Force(1..) => Step::Charged,
                Op::Force(_) => Step::Returned,
                Op::Reset => Step::Reset,
            };
            (timed, step)
        })?;
        Ok(make(&rule, timed))
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        asks: &'a [K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        // If one key is too long, nothing is charged.
        asks.iter().try_for_each(|ask| check_length(ask.into().key))?;
        let decide = |ask: Ask<'_>| self.apply(&*rule, ask.key, Op::Check(ask.cost), ask.at);
        asks.iter().map(|ask| decide(ask.into())).collect()
    }

    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        self.step(&*rule, key, now, |entry, now| {
            let until = now.after(time_to_live).unwrap_or(NEVER);
            self.latest_end.fetch_max(until.0, Ordering::Relaxed);
            let (timed, receipt) = reserve(&*rule, &mut entry.state, now, estimate);
            let number = self.returns.load(Ordering::Relaxed);
            let step = if estimate == 0 { Step::Looked } else { Step::Charged };
            (Charged { timed, receipt, number, store: self.id }, step)
        })
    }

    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        if charged.store != self.id {
            return Err(SettleError::OtherLimiter);
        }
        let settled = self.step(&*rule, key, now, |entry, now| {
            if entry.returns.voids(charged.number) {
                return (Err(SettleError::Reset), Step::Looked);
            }
            let mut receipt = charged.receipt.clone();
            entry.returns.lower(charged.number, &mut receipt);
            let before = rule.receipt(&entry.state);
            let (decision, _) = settle(&*rule, &mut entry.state, now, change, &receipt);
            if change >= 0 {
                return (Ok(decision), if change == 0 { Step::Looked } else { Step::Charged });
            }
            let after = rule.receipt(&entry.state);
            let settlement = Settlement { reservation: &receipt, before: &before, after: &after };
            entry.returns.settled(charged.number, &settlement);
            (Ok(decision), Step::Returned)
        });
        settled.map_or_else(|error| Ok(Err(error)), |settled| settled.map(Ok))
    }

    fn now(&self) -> Tick {
        self.map.now()
    }
}
