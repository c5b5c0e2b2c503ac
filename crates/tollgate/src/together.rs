//! Several keys in one decision: this user, this address, this route; all or nothing.
//!
//! Each key has a limiter of its own, with whatever rule, and none is charged unless all admit. It is
//! one atomic step: the locks of all keys are held while they decide. `table.rs` says why that cannot
//! end in a deadlock.

use std::fmt;

use tollgate_core::{Algorithm, Answer as _, Cost, Decision, Op, Part, Tick};

use crate::in_flight::Place;
use crate::limiter::RateLimiter;
use crate::memory::{Keys, counted_from};
use crate::observer::Observer;
use crate::rules::Rules;
use crate::store::{Store, StoreError};
use crate::table::{Found, Locks, Spot};

/// One key's part in a decision over several.
#[must_use = "it is only asked by `check_all`"]
pub struct Ask<'a> {
    part: Box<dyn Joint<'a> + 'a>,
    place: Option<Place>,
}

/// What came of asking several.
#[derive(Debug)]
#[must_use = "a decision that nobody reads limits nothing"]
pub struct Together {
    /// The answer of all: allowed if all allow, the least remaining, the longest wait.
    pub decision: Decision,
    /// The first that refused, by its place among those that were asked. Which of its limits did is in
    /// the decision.
    pub refused_ask: Option<usize>,
    /// The places of requests in flight, if such limits were among them: given back when dropped.
    pub places: Vec<Place>,
}

/// Decides over several keys at once: all are charged, or none is.
///
/// A key that is asked for twice is asked for both costs. Each limiter goes by its own clock.
///
/// ```
/// use tollgate::{Policy, RateLimiter, check_all};
///
/// let users = RateLimiter::new(Policy::token_bucket(5).per_minute().build()?);
/// let addresses = RateLimiter::new(Policy::sliding_window_log(1).per_minute().build()?);
/// let ask = |user, address| check_all([users.ask(user)?, addresses.ask(address)?]);
///
/// assert!(ask("alice", "192.0.2.1")?.decision.allowed);
/// let refused = ask("alice", "192.0.2.1")?;
/// assert_eq!(refused.refused_ask, Some(1)); // the address
/// assert_eq!(users.peek("alice")?.remaining, 3); // and alice was not charged for it
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A store has no place for a key. Nobody is charged.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub fn check_all<'a>(asks: impl IntoIterator<Item = Ask<'a>>) -> Result<Together, StoreError> {
    decide(asks.into_iter().collect(), None)
}

/// [`check_all`] at a time.
///
/// # Errors
/// As there.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub fn check_all_at<'a>(
    asks: impl IntoIterator<Item = Ask<'a>>,
    now: Tick,
) -> Result<Together, StoreError> {
    decide(asks.into_iter().collect(), Some(now))
}

/// What can be asked together with others.
trait Joint<'a> {
    /// Which lock and key: in the order of locks, and those that are equal are one.
    fn identity(&self) -> (usize, Spot);
    fn cost(&self) -> Cost;
    fn set_cost(&mut self, cost: Cost);
    /// Reads the clock, and whether others wait for the key: they come first.
    fn begin(&mut self, now: Option<Tick>) -> Result<(), StoreError>;
    /// Takes the locks of the key.
    fn look(&mut self, locks: &mut Locks<'a>);
    fn is_kept(&self) -> bool;
    /// Finds a place for a key that is new, before any is charged.
    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError>;
    /// Gives up that place.
    fn give_up_room(&mut self, locks: &mut Locks<'a>);
    /// Whether it admits its cost.
    fn agrees(&self, locks: &mut Locks<'a>) -> Result<bool, StoreError>;
    fn step(&self, locks: &mut Locks<'a>, go: bool) -> Decision;
    fn tell(&self, decision: &Decision);
}

fn decide(mut asks: Vec<Ask<'_>>, now: Option<Tick>) -> Result<Together, StoreError> {
    // The same key twice is one key with both costs: the first asks for both.
    let mut parts: Vec<usize> = Vec::with_capacity(asks.len());
    for index in 0..asks.len() {
        let (identity, cost) = (asks[index].part.identity(), asks[index].part.cost());
        if let Some(place) = &mut asks[index].place {
            place.size = cost;
        }
        match parts.iter().find(|part| asks[**part].part.identity() == identity) {
            Some(&first) => {
                let both = asks[first].part.cost().saturating_add(cost);
                asks[first].part.set_cost(both);
            }
            None => parts.push(index),
        }
    }
    for &part in &parts {
        asks[part].part.begin(now)?;
    }
    let mut in_order = parts.clone();
    in_order.sort_unstable_by_key(|part| asks[*part].part.identity());
    let mut locks = Locks::default();
    for part in in_order {
        asks[part].part.look(&mut locks);
    }
    let mut refused_ask = None;
    for &part in &parts {
        if !asks[part].part.agrees(&mut locks)? {
            refused_ask = refused_ask.or(Some(part));
        }
    }
    let go = refused_ask.is_none();
    if go {
        make_room(&mut asks, &parts, &mut locks)?;
    }
    // New keys come last: they may be kept in the place of a fresh one.
    let mut new_last = parts.clone();
    new_last.sort_by_key(|part| !asks[*part].part.is_kept());
    let mut decisions: Vec<(usize, Decision)> =
        new_last.iter().map(|part| (*part, asks[*part].part.step(&mut locks, go))).collect();
    drop(locks);
    decisions.sort_by_key(|(part, _)| *part);
    for (part, decision) in &decisions {
        // Whoever had no objection is told what came of it all.
        asks[*part].part.tell(&Decision { allowed: go, ..*decision });
    }
    let refusal = decisions.iter().find(|(part, _)| Some(*part) == refused_ask);
    let refused_by = refusal.and_then(|(_, decision)| decision.refused_by);
    let decisions = decisions.into_iter().map(|(_, decision)| decision);
    let decision = decisions.reduce(Decision::merge).unwrap_or(NOTHING_ASKED);
    let decision = Decision { allowed: go, refused_by, ..decision };
    let places = asks.into_iter().filter_map(|ask| ask.place);
    let places = if go { places.map(Place::taken).collect() } else { Vec::new() };
    Ok(Together { decision, refused_ask, places })
}

/// Finds a place for every new key, or for none.
fn make_room<'a>(
    asks: &mut [Ask<'a>],
    parts: &[usize],
    locks: &mut Locks<'a>,
) -> Result<(), StoreError> {
    for (count, part) in parts.iter().enumerate() {
        if let Err(error) = asks[*part].part.make_room(locks) {
            parts[..count].iter().for_each(|part| asks[*part].part.give_up_room(locks));
            return Err(error);
        }
    }
    Ok(())
}

/// The answer to no question.
const NOTHING_ASKED: Decision = Decision {
    allowed: true,
    limit: Cost::MAX,
    remaining: Cost::MAX,
    retry_after: Some(tollgate_core::Ticks::ZERO),
    reset_after: tollgate_core::Ticks::ZERO,
    delay: tollgate_core::Ticks::ZERO,
    refused_by: None,
    shadow_refused_by: None,
    source: tollgate_core::Source::Store,
};

/// A store whose keys can be decided on together with those of others: the memory stores. Not exported:
/// places and locks of one store mean nothing in another.
pub trait JointStore<A: Algorithm>:
    for<'a> Store<A, Reply<'a, Decision> = Result<Decision, StoreError>>
{
    /// Where a key belongs.
    ///
    /// # Errors
    /// The key is too long, or the policy is of another kind.
    fn spot(&self, rule: &A, key: &[u8]) -> Result<Spot, StoreError>;

    /// Where the lock of a key comes in the order of all.
    fn lock_order(&self, spot: Spot) -> usize;

    /// What a check of the key hears because others wait for it.
    ///
    /// # Errors
    /// The store is full.
    fn behind_others(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Result<Option<Decision>, StoreError>;

    /// Takes the locks of a key and looks where it is. Keys are to be looked for in the order of locks.
    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Found;

    /// Finds a place for a key that is new, if the store refuses new keys when it is full.
    ///
    /// # Errors
    /// The store is full.
    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: Found,
        now: Tick,
        locks: &mut Locks<'a>,
    ) -> Result<Found, StoreError>;

    /// Gives up the place that was made for a key.
    fn give_up_room(&self, found: Found, locks: &mut Locks<'_>);

    /// Whether a key has nothing against a cost.
    ///
    /// # Errors
    /// The policy is of another kind.
    fn agrees(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError>;

    /// Charges a cost if all agree, and tells how the key stands.
    fn step(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;
}

impl<A: Algorithm, S: JointStore<A>> JointStore<A> for &S {
    fn spot(&self, rule: &A, key: &[u8]) -> Result<Spot, StoreError> {
        (**self).spot(rule, key)
    }

    fn lock_order(&self, spot: Spot) -> usize {
        (**self).lock_order(spot)
    }

    fn behind_others(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
    ) -> Result<Option<Decision>, StoreError> {
        (**self).behind_others(rule, spot, cost, now)
    }

    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Found {
        (**self).look_for(spot, locks)
    }

    fn make_room<'a>(
        &'a self,
        rule: &A,
        found: Found,
        now: Tick,
        locks: &mut Locks<'a>,
    ) -> Result<Found, StoreError> {
        (**self).make_room(rule, found, now, locks)
    }

    fn give_up_room(&self, found: Found, locks: &mut Locks<'_>) {
        (**self).give_up_room(found, locks);
    }

    fn agrees(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> Result<bool, StoreError> {
        (**self).agrees(rule, found, cost, now, locks)
    }

    fn step(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        (**self).step(rule, found, cost, now, locks, go)
    }
}

impl<S: Clone> Keys<S> {
    pub(crate) fn agrees<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) -> bool {
        let op = Op::Check(cost);
        let admits = |state: &mut S, now| Part { rule, state, op }.admits(now);
        self.table.read_found(rule, found, now, locks, admits)
    }

    pub(crate) fn step<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            counted_from(now, at, Part { rule, state, op }.step::<Decision>(at, go).0)
        };
        if cost == 0 {
            // A look leaves nothing behind.
            let look = |state: &mut S, at| step(&mut state.clone(), at);
            return self.table.read_found(rule, found, now, locks, look);
        }
        self.table.change_found(rule, found, now, locks, step)
    }
}

impl<R: Rules, S: JointStore<R::Rule>, O: Observer> RateLimiter<R, S, O> {
    /// This limiter's part in a decision over several keys, for a cost of 1: see [`check_all`].
    ///
    /// # Errors
    /// The key is too long.
    pub fn ask<'a>(&'a self, key: impl AsRef<[u8]>) -> Result<Ask<'a>, StoreError>
    where
        R: 'a,
        S: 'a,
    {
        let key = key.as_ref();
        let rule = self.rules.choose(key);
        let spot = self.store.spot(&rule, key)?;
        let (cost, now) = (1, Tick(0));
        let (behind, found) = (None, None);
        let part = Asking { limiter: self, rule, key: key.into(), spot, cost, now, behind, found };
        Ok(Ask { part: Box::new(part), place: None })
    }
}

impl Ask<'_> {
    /// The same for another cost.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.part.set_cost(cost);
        self
    }

    pub(crate) fn with_place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }
}

impl fmt::Debug for Ask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("cost", &self.part.cost()).finish_non_exhaustive()
    }
}

struct Asking<'a, R: Rules + 'a, S, O> {
    limiter: &'a RateLimiter<R, S, O>,
    rule: R::Chosen<'a>,
    key: Box<[u8]>,
    spot: Spot,
    cost: Cost,
    now: Tick,
    /// What it hears because others wait for the key.
    behind: Option<Decision>,
    found: Option<Found>,
}

impl<R: Rules, S: JointStore<R::Rule>, O> Asking<'_, R, S, O> {
    fn found(&self) -> Found {
        self.found.unwrap_or_else(|| unreachable!("it is asked when all were found"))
    }
}

impl<'a, R: Rules, S: JointStore<R::Rule>, O: Observer> Joint<'a> for Asking<'a, R, S, O> {
    fn identity(&self) -> (usize, Spot) {
        (self.limiter.store.lock_order(self.spot), self.spot)
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn set_cost(&mut self, cost: Cost) {
        self.cost = cost;
    }

    fn begin(&mut self, now: Option<Tick>) -> Result<(), StoreError> {
        let store = &self.limiter.store;
        self.now = now.unwrap_or_else(|| store.now());
        self.behind = store.behind_others(&self.rule, self.spot, self.cost, self.now)?;
        Ok(())
    }

    fn look(&mut self, locks: &mut Locks<'a>) {
        self.found = Some(self.limiter.store.look_for(self.spot, locks));
    }

    fn is_kept(&self) -> bool {
        self.found().is_kept()
    }

    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError> {
        if self.cost > 0 {
            let store = &self.limiter.store;
            self.found = Some(store.make_room(&self.rule, self.found(), self.now, locks)?);
        }
        Ok(())
    }

    fn give_up_room(&mut self, locks: &mut Locks<'a>) {
        self.limiter.store.give_up_room(self.found(), locks);
    }

    fn agrees(&self, locks: &mut Locks<'a>) -> Result<bool, StoreError> {
        let store = &self.limiter.store;
        let agrees = store.agrees(&self.rule, self.found(), self.cost, self.now, locks)?;
        Ok(agrees && self.behind.is_none())
    }

    fn step(&self, locks: &mut Locks<'a>, go: bool) -> Decision {
        let store = &self.limiter.store;
        let told = store.step(&self.rule, self.found(), self.cost, self.now, locks, go);
        self.behind.unwrap_or(told)
    }

    fn tell(&self, decision: &Decision) {
        let told = self.limiter.told();
        told.of(&*self.rule, &self.key, self.cost, decision, self.now);
    }
}
