//! Several keys in one decision: this user, this address, this route; all or nothing.
//!
//! Each key has a limiter of its own, with whatever rule, and none is charged unless all admit. It is
//! one atomic step: the locks of all keys are held while they decide. `table.rs` says why that cannot
//! end in a deadlock.

use std::fmt;
use std::panic::AssertUnwindSafe;

use tallygate_core::{Algorithm, Answer as _, Cost, Decision, Op, Part, Tick};

use crate::ask::Ask;
use crate::in_flight::Place;
use crate::limiter::RateLimiter;
use crate::memory::{Keys, counted_from};
use crate::observer::Observer;
use crate::rules::Rules;
use crate::store::{Store, StoreError};
use crate::table::{Found, Locks, Spot};

/// A question to one limiter as a part of a decision over several: see [`RateLimiter::joint`].
#[must_use = "it is only asked by `check_all`"]
pub struct JointAsk<'a> {
    part: Box<dyn Joint<'a> + Send + 'a>,
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
/// If one key is asked for several times, its costs are added up, and each rule that it is asked under (see [`Ask::tier`])
/// must allow the sum. Each limiter goes by its own clock, unless a question for the key names a time. If an algorithm of a
/// user's own panics, nothing stays charged.
///
/// ```
/// use tallygate::{Policy, RateLimiter, check_all};
///
/// let users = RateLimiter::new(Policy::token_bucket(5).per_minute().build()?);
/// let addresses = RateLimiter::new(Policy::sliding_window_log(1).per_minute().build()?);
/// let ask = |user, address| check_all([users.joint(user)?, addresses.joint(address)?]);
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
pub fn check_all<'a>(asks: impl IntoIterator<Item = JointAsk<'a>>) -> Result<Together, StoreError> {
    decide(asks.into_iter().collect())
}

/// What can be asked together with others.
trait Joint<'a> {
    /// Returns the store and the key: parts that are equal in this are about the same state.
    fn identity(&self) -> (usize, Spot);
    /// Where the lock of the key comes in the order of all.
    fn lock_order(&self) -> usize;
    fn cost(&self) -> Cost;
    /// Returns the time that the question names.
    fn time(&self) -> Option<Tick>;
    /// Sets the time of the decision, by the clock if none is given, and returns it.
    fn begin(&mut self, now: Option<Tick>) -> Tick;
    /// Returns whether its rule charges what it allows.
    fn charges(&self) -> bool;
    /// Looks whether others wait for the key: they come first. `keys` is how many keys are decided on.
    fn line_up(&mut self, cost: Cost, keys: usize) -> Result<(), StoreError>;
    /// Takes the locks of the key. Returns whether the order of locks is still the one that they were taken in.
    fn look(&mut self, locks: &mut Locks<'a>) -> bool;
    fn found(&self) -> Found;
    fn set_found(&mut self, found: Found);
    /// Finds a place for a key that is new, before any is charged.
    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError>;
    /// Gives up that place.
    fn give_up_room(&mut self, locks: &mut Locks<'a>);
    /// Returns whether its rule allows a cost.
    fn agrees(&self, cost: Cost, locks: &mut Locks<'a>) -> Result<bool, StoreError>;
    /// Returns what a step would, and changes nothing.
    fn report(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision;
    /// Brings the state under its rule, as a check does first.
    fn bring(&self, locks: &mut Locks<'a>);
    /// Charges a cost if all agree, and returns the result.
    fn step(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision;
    /// Returns a cost that was charged to a key that is kept.
    fn undo(&self, cost: Cost, locks: &mut Locks<'a>);
    /// Returns a cost that was charged to a key that was new; it takes the locks itself.
    fn undo_new(&self, cost: Cost);
    fn tell(&self, decision: &Decision);
}

/// The parts of one key.
struct Group {
    /// Their places among those that were asked, in order. The first finds the state.
    parts: Vec<usize>,
    /// What is charged to the key: the sum of the costs of the parts whose rules charge.
    cost: u128,
    /// The part whose rule charges it.
    charger: usize,
}

impl Group {
    /// The cost, or the largest there is: then [`is_too_much`](Self::is_too_much) says so.
    fn cost(&self) -> Cost {
        Cost::try_from(self.cost).unwrap_or(Cost::MAX)
    }

    /// Whether it is more than any limit has.
    fn is_too_much(&self) -> bool {
        self.cost > Cost::MAX.into()
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().copied().filter(|part| *part != self.charger)
    }
}

/// Finds the parts that are about the same key.
fn grouped(asks: &mut [JointAsk<'_>]) -> Vec<Group> {
    let mut order: Vec<((usize, Spot), usize)> =
        asks.iter().enumerate().map(|(index, ask)| (ask.part.identity(), index)).collect();
    order.sort_unstable();
    let mut groups: Vec<Group> = Vec::with_capacity(asks.len());
    for same in order.chunk_by(|(one, _), (other, _)| one == other) {
        let parts: Vec<usize> = same.iter().map(|(_, index)| *index).collect();
        let now = parts.iter().find_map(|part| asks[*part].part.time());
        let now = asks[parts[0]].part.begin(now);
        for part in &parts[1..] {
            asks[*part].part.begin(Some(now));
        }
        let charging = || parts.iter().copied().filter(|part| asks[*part].part.charges());
        let cost = charging().map(|part| u128::from(asks[part].part.cost())).sum();
        let charger = charging().next().unwrap_or(parts[0]);
        groups.push(Group { parts, cost, charger });
    }
    groups
}

fn decide(mut asks: Vec<JointAsk<'_>>) -> Result<Together, StoreError> {
    for ask in &mut asks {
        if let Some(place) = &mut ask.place {
            place.size = ask.part.cost();
        }
    }
    let mut groups = grouped(&mut asks);
    for group in &groups {
        for part in &group.parts {
            asks[*part].part.line_up(group.cost(), groups.len())?;
        }
    }
    let mut locks = lock_all(&mut asks, &groups);
    for group in &groups {
        share_found(&mut asks, group);
    }
    let mut refused_ask: Option<usize> = None;
    for group in &groups {
        for part in &group.parts {
            if group.is_too_much() || !asks[*part].part.agrees(group.cost(), &mut locks)? {
                refused_ask = refused_ask.into_iter().chain([*part]).min();
            }
        }
    }
    let go = refused_ask.is_none();
    if go {
        make_room(&mut asks, &groups, &mut locks)?;
    }
    // New keys come last: they may be kept in the place of a fresh one.
    groups.sort_by_key(|group| !asks[group.charger].part.found().is_kept());
    let decisions = steps(&asks, &groups, locks, go);
    let refused_by = refused_ask.and_then(|refused| decisions[refused].refused_by);
    let decision = decisions.iter().copied().reduce(Decision::merge).unwrap_or(NOTHING_ASKED);
    let decision = Decision { allowed: go, refused_by, ..decision };
    // Places are taken before observers are called: if one panics, they are given back.
    let places = asks.iter_mut().filter_map(|ask| ask.place.take());
    let places = if go { places.map(Place::taken).collect() } else { Vec::new() };
    for (ask, decision) in asks.iter().zip(decisions) {
        // A part that had no objection is told the result of all.
        ask.part.tell(&Decision { allowed: go, ..decision });
    }
    Ok(Together { decision, refused_ask, places })
}

/// Takes the locks of all keys in the order of locks, and looks where the keys are.
fn lock_all<'a>(asks: &mut [JointAsk<'a>], groups: &[Group]) -> Locks<'a> {
    let mut in_order: Vec<usize> = groups.iter().map(|group| group.parts[0]).collect();
    loop {
        in_order.sort_by_cached_key(|part| asks[*part].part.lock_order());
        let mut locks = Locks::default();
        if in_order.iter().all(|part| asks[*part].part.look(&mut locks)) {
            return locks;
        }
        // A table has grown meanwhile: some keys have other locks.
    }
}

/// Lets all parts of a key know where its first part has found it.
fn share_found(asks: &mut [JointAsk<'_>], group: &Group) {
    let found = asks[group.parts[0]].part.found();
    group.parts[1..].iter().for_each(|part| asks[*part].part.set_found(found));
}

/// Makes all steps, and returns the decision of each part. If an algorithm of a user's own panics, nothing stays charged.
fn steps<'a>(
    asks: &[JointAsk<'a>],
    groups: &[Group],
    mut locks: Locks<'a>,
    go: bool,
) -> Vec<Decision> {
    let mut decisions = vec![NOTHING_ASKED; asks.len()];
    let mut done = 0;
    let all = std::panic::catch_unwind(AssertUnwindSafe(|| {
        for group in groups {
            step(asks, group, &mut locks, go, &mut decisions);
            done += 1;
        }
    }));
    let Err(panic) = all else { return decisions };
    let quietly = |undo: &mut dyn FnMut()| drop(std::panic::catch_unwind(AssertUnwindSafe(undo)));
    let charged = groups[..done].iter().filter(|group| go && group.cost > 0);
    let (kept, new): (Vec<_>, Vec<_>) =
        charged.partition(|group| asks[group.charger].part.found().is_kept());
    for group in kept {
        quietly(&mut || asks[group.charger].part.undo(group.cost(), &mut locks));
    }
    drop(locks);
    for group in new {
        quietly(&mut || asks[group.charger].part.undo_new(group.cost()));
    }
    std::panic::resume_unwind(panic)
}

fn step<'a>(
    asks: &[JointAsk<'a>],
    group: &Group,
    locks: &mut Locks<'a>,
    go: bool,
    decisions: &mut [Decision],
) {
    for part in group.others() {
        decisions[part] = asks[part].part.report(group.cost(), locks, go);
    }
    if asks[group.charger].part.found().is_kept() && group.cost > 0 {
        group.others().for_each(|part| asks[part].part.bring(locks));
    }
    decisions[group.charger] = asks[group.charger].part.step(group.cost(), locks, go);
    if group.is_too_much() {
        for part in &group.parts {
            let decision = &mut decisions[*part];
            let refused_by = decision.refused_by.or(Some(0));
            *decision = Decision { allowed: false, retry_after: None, refused_by, ..*decision };
        }
    }
}

/// Finds a place for every new key, or for none.
fn make_room<'a>(
    asks: &mut [JointAsk<'a>],
    groups: &[Group],
    locks: &mut Locks<'a>,
) -> Result<(), StoreError> {
    for (count, group) in groups.iter().enumerate().filter(|(_, group)| group.cost > 0) {
        if let Err(error) = asks[group.parts[0]].part.make_room(locks) {
            let before = groups[..count].iter().filter(|group| group.cost > 0);
            before.for_each(|group| asks[group.parts[0]].part.give_up_room(locks));
            return Err(error);
        }
        share_found(asks, group);
    }
    Ok(())
}

/// The answer to no question.
const NOTHING_ASKED: Decision = Decision {
    allowed: true,
    limit: Cost::MAX,
    remaining: Cost::MAX,
    retry_after: Some(tallygate_core::Ticks::ZERO),
    reset_after: tallygate_core::Ticks::ZERO,
    delay: tallygate_core::Ticks::ZERO,
    scarcest: None,
    refused_by: None,
    shadow_refused_by: None,
    source: tallygate_core::Source::Store,
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

    /// Where the lock of a key comes in the order of all, until the table grows.
    fn lock_order(&self, spot: Spot) -> usize;

    /// Identifies the store among all that there are.
    fn identity(&self) -> usize;

    /// What a check of the key hears because others wait for it. Makes room for so many new keys.
    ///
    /// # Errors
    /// The store is full.
    fn behind_others(
        &self,
        rule: &A,
        spot: Spot,
        cost: Cost,
        now: Tick,
        keys: usize,
    ) -> Result<Option<Decision>, StoreError>;

    /// Takes the locks of a key and looks where it is. Keys are to be looked for in the order of locks. `None` if
    /// the order is another by now: then all begin again.
    fn look_for<'a>(&'a self, spot: Spot, locks: &mut Locks<'a>) -> Option<Found>;

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

    /// Returns what a step would, and changes nothing.
    fn report(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision;

    /// Changes the state of a key that is kept: brings it under a rule, and then returns a cost that was charged.
    fn change_kept(&self, rule: &A, found: Found, returned: Cost, now: Tick, locks: &mut Locks<'_>);
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
        if cost == 0 {
            // A look leaves nothing behind.
            return self.report(rule, found, cost, now, locks, go);
        }
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            counted_from(now, at, Part { rule, state, op }.step::<Decision>(at, go).0)
        };
        self.table.change_found(rule, found, now, locks, step)
    }

    /// The same on a copy, so that a rule that panics leaves the state as it was.
    pub(crate) fn step_on_a_copy<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: Found,
        cost: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
        go: bool,
    ) -> Decision {
        if cost == 0 {
            return self.report(rule, found, cost, now, locks, go);
        }
        let op = Op::Check(cost);
        let step = |state: &mut S, at| {
            let mut copy = state.clone();
            let answer = Part { rule, state: &mut copy, op }.step::<Decision>(at, go).0;
            *state = copy;
            counted_from(now, at, answer)
        };
        self.table.change_found(rule, found, now, locks, step)
    }

    pub(crate) fn report<A: Algorithm<State = S>>(
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
            let step = |state: &mut S| Part { rule, state, op }.step::<Decision>(at, go).0;
            // A look changes nothing by itself.
            counted_from(now, at, if cost == 0 { step(state) } else { step(&mut state.clone()) })
        };
        self.table.read_found(rule, found, now, locks, step)
    }

    pub(crate) fn change_kept<A: Algorithm<State = S>>(
        &self,
        rule: &A,
        found: Found,
        returned: Cost,
        now: Tick,
        locks: &mut Locks<'_>,
    ) {
        self.table.read_found(rule, found, now, locks, |state, at| {
            if rule.set_back(state, at) {
                rule.rebase(state, at);
            }
            if returned > 0 {
                rule.charge(state, at, -i128::from(returned));
            }
        });
    }
}

impl<R: Rules + Sync, S: JointStore<R::Rule> + Sync, O: Observer> RateLimiter<R, S, O> {
    /// Makes a question to this limiter a part of a decision over several: see [`check_all`].
    ///
    /// # Errors
    /// The key is too long, or the tier is not known.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn joint<'a, 'k>(&'a self, ask: impl Into<Ask<'k>>) -> Result<JointAsk<'a>, StoreError>
    where
        R: 'a,
        S: 'a,
    {
        JointAsk::in_store(self, &self.store, ask)
    }
}

impl<'a> JointAsk<'a> {
    /// Makes a question to a limiter a part of a decision over several: for a limiter whose own store hands on to this one.
    ///
    /// # Errors
    /// The key is too long, or the tier is not known.
    pub fn in_store<'k, R, S, K, O>(
        limiter: &'a RateLimiter<R, S, O>,
        store: &'a K,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, StoreError>
    where
        R: Rules + Sync,
        S: Store<R::Rule> + Sync,
        K: JointStore<R::Rule> + Sync,
        O: Observer,
    {
        let ask: Ask<'k> = ask.into();
        let rule = limiter.rule(&ask)?;
        let spot = store.spot(&rule, ask.key)?;
        let Ask { cost, at, .. } = ask;
        let (now, behind, found) = (Tick(0), None, None);
        let key = ask.key.into();
        let part = Asking { limiter, store, rule, key, cost, at, spot, now, behind, found };
        Ok(Self { part: Box::new(part), place: None })
    }

    pub(crate) fn with_place(mut self, place: Place) -> Self {
        self.place = Some(place);
        self
    }
}

impl fmt::Debug for JointAsk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("JointAsk").field("cost", &self.part.cost()).finish_non_exhaustive()
    }
}

struct Asking<'a, R: Rules + 'a, S, K, O> {
    limiter: &'a RateLimiter<R, S, O>,
    store: &'a K,
    rule: R::Chosen<'a>,
    key: Box<[u8]>,
    cost: Cost,
    /// The time that the question names.
    at: Option<Tick>,
    spot: Spot,
    now: Tick,
    /// What it hears because others wait for the key.
    behind: Option<Decision>,
    found: Option<Found>,
}

impl<'a, R, S, K, O> Joint<'a> for Asking<'a, R, S, K, O>
where
    R: Rules,
    S: Store<R::Rule>,
    K: JointStore<R::Rule>,
    O: Observer,
{
    fn identity(&self) -> (usize, Spot) {
        (self.store.identity(), self.spot)
    }

    fn lock_order(&self) -> usize {
        self.store.lock_order(self.spot)
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn time(&self) -> Option<Tick> {
        self.at
    }

    fn begin(&mut self, now: Option<Tick>) -> Tick {
        self.now = now.unwrap_or_else(|| self.store.now());
        self.now
    }

    fn charges(&self) -> bool {
        self.rule.charges(self.now)
    }

    fn line_up(&mut self, cost: Cost, keys: usize) -> Result<(), StoreError> {
        let store = self.store;
        self.behind = store.behind_others(&self.rule, self.spot, cost, self.now, keys)?;
        Ok(())
    }

    fn look(&mut self, locks: &mut Locks<'a>) -> bool {
        self.found = self.store.look_for(self.spot, locks);
        self.found.is_some()
    }

    fn found(&self) -> Found {
        self.found.unwrap_or_else(|| unreachable!("it is asked when all were found"))
    }

    fn set_found(&mut self, found: Found) {
        self.found = Some(found);
    }

    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError> {
        let store = self.store;
        self.found = Some(store.make_room(&self.rule, self.found(), self.now, locks)?);
        Ok(())
    }

    fn give_up_room(&mut self, locks: &mut Locks<'a>) {
        self.store.give_up_room(self.found(), locks);
    }

    fn agrees(&self, cost: Cost, locks: &mut Locks<'a>) -> Result<bool, StoreError> {
        let store = self.store;
        let agrees = store.agrees(&self.rule, self.found(), cost, self.now, locks)?;
        Ok(agrees && self.behind.is_none())
    }

    fn report(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision {
        let store = self.store;
        let told = store.report(&self.rule, self.found(), cost, self.now, locks, go);
        self.behind.unwrap_or(told)
    }

    fn bring(&self, locks: &mut Locks<'a>) {
        self.store.change_kept(&self.rule, self.found(), 0, self.now, locks);
    }

    fn step(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision {
        let store = self.store;
        let told = store.step(&self.rule, self.found(), cost, self.now, locks, go);
        self.behind.unwrap_or(told)
    }

    fn undo(&self, cost: Cost, locks: &mut Locks<'a>) {
        self.store.change_kept(&self.rule, self.found(), cost, self.now, locks);
    }

    fn undo_new(&self, cost: Cost) {
        let op = Op::Force(-i128::from(cost));
        // It was placed under this rule, so the store takes it.
        let _ = self.store.apply::<Decision>(&*self.rule, &self.key, op, Some(self.now));
    }

    fn tell(&self, decision: &Decision) {
        let notifier = self.limiter.notifier();
        notifier.decided(&*self.rule, &self.key, self.cost, decision, self.now);
    }
}
