//! Decisions over several keys, such as a user, an address and a route: all keys are charged, or none is.
//!
//! Each key has its own limiter, with any rule. The decision is one atomic step: the locks of all keys are held while it
//! is made. `table.rs` explains why this cannot lead to a deadlock.

use std::fmt;
use std::panic::AssertUnwindSafe;

use tallygate_core::{Algorithm as _, Cost, Decision, Op, Tick, Timed};

use crate::ask::Ask;
use crate::in_flight::{InFlight, Place};
use crate::joint_store::JointStore;
use crate::limiter::RateLimiter;
use crate::merge::{self, KeyCost};
use crate::observer::Observer;
use crate::rule_source::RuleSource;
use crate::storage::{Store, StoreError};
use crate::table::{KeySlot, LockedKey, Locks, Reading};

/// A request to one limiter, as a part of a joint decision: see [`RateLimiter::joint`].
#[must_use = "it is only asked by `check_all`"]
pub struct JointAsk<'a> {
    part: Box<dyn Joint<'a> + Send + 'a>,
    place: Option<Place>,
}

/// The result of [`check_all`].
#[derive(Debug)]
#[must_use = "ignoring a decision limits nothing"]
pub struct JointDecision {
    /// The decision: allowed if all parts allow it, with the least remaining units and the longest wait.
    pub decision: Decision,
    /// The index of the first part that denied the request. `decision.denied_by` is the limit of that part.
    pub denied_ask: Option<usize>,
    /// The decision of each part by itself, in order: whether its own rules allow it, its state after the joint
    /// decision, and its time. `None` if the part was not checked, because a part before it was denied in another slot of
    /// a cluster.
    pub parts: Vec<Option<Timed>>,
    /// The places of requests in flight, if there were such parts. Dropping a place returns it.
    pub places: Vec<Place>,
}

/// Decides over several keys at once: all are charged, or none is.
///
/// If one key occurs several times, its costs are added up, and each of its rules (see [`Ask::tier`]) must allow the sum.
/// Each limiter uses its own clock, unless a request for the key has a time. If a user-defined algorithm panics,
/// nothing stays charged.
///
/// ```
/// use tallygate::{Policy, RateLimiter, check_all};
///
/// let users = RateLimiter::new(Policy::token_bucket(5).per_minute().build()?);
/// let addresses = RateLimiter::new(Policy::sliding_window_log(1).per_minute().build()?);
/// let ask = |user, address| check_all([users.joint(user)?, addresses.joint(address)?]);
///
/// assert!(ask("alice", "192.0.2.1")?.decision.allowed);
/// let denied = ask("alice", "192.0.2.1")?;
/// assert_eq!(denied.denied_ask, Some(1)); // the address
/// assert_eq!(users.peek("alice")?.remaining, 3); // alice was not charged again
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if a store has no place for a key. Nothing is charged then.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub fn check_all<'a>(
    asks: impl IntoIterator<Item = JointAsk<'a>>,
) -> Result<JointDecision, StoreError> {
    decide(asks.into_iter().collect())
}

/// A part of a joint decision.
trait Joint<'a> {
    /// Returns the store and the key. Parts with the same store and key have the same state.
    fn identity(&self) -> (usize, KeySlot);
    /// Returns the position of the key's lock in the order of all locks.
    fn lock_order(&self) -> usize;
    fn cost(&self) -> Cost;
    /// Returns the time of the request, if it has one.
    fn time(&self) -> Option<Tick>;
    /// Sets the time of the decision and returns it. Without a given time, reads the clock.
    fn begin(&mut self, reading: Option<Reading>) -> Reading;
    /// Returns the time of the decision.
    fn now(&self) -> Tick;
    /// Returns whether its rule charges what it allows.
    fn charges(&self) -> bool;
    /// Checks whether requests wait for the key, because these come first. `keys` is the number of keys in the
    /// decision.
    fn line_up(&mut self, cost: Cost, keys: usize) -> Result<(), StoreError>;
    /// Takes the locks of the key. Returns false if the order of locks has changed meanwhile.
    fn look(&mut self, locks: &mut Locks<'a>) -> bool;
    fn found(&self) -> LockedKey;
    fn set_found(&mut self, found: LockedKey);
    /// Finds a place for a new key, before any key is charged.
    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError>;
    /// Releases that place.
    fn give_up_room(&mut self, locks: &mut Locks<'a>);
    /// Returns whether its rule allows a cost.
    fn agrees(&self, cost: Cost, locks: &mut Locks<'a>) -> Result<bool, StoreError>;
    /// Returns what a step would return, and changes nothing.
    fn report(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision;
    /// Moves the state to its rule, which a check does first.
    fn bring(&self, locks: &mut Locks<'a>);
    /// Charges a cost if all parts allow it, and returns the decision of this part.
    fn step(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision;
    /// Refunds a cost that was charged to a key that is stored.
    fn undo(&self, cost: Cost, locks: &mut Locks<'a>);
    /// Refunds a cost that was charged to a key that was new. It takes the locks itself.
    fn undo_new(&self, cost: Cost);
    fn notify(&self, decision: &Decision);
}

/// The parts of one key.
struct Group {
    /// Their indices among all parts, in order. The first finds the state.
    parts: Vec<usize>,
    /// The units that are charged to the key, and the part that charges them.
    sum: KeyCost,
}

impl Group {
    fn cost(&self) -> Cost {
        self.sum.cost()
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().copied().filter(|part| *part != self.sum.charger)
    }
}

/// Groups the parts by key, and sets their time.
fn grouped(asks: &mut [JointAsk<'_>]) -> Vec<Group> {
    let keys = merge::group_by_key(asks.iter().map(|ask| ask.part.identity()));
    let group = |parts: Vec<usize>| {
        let given = parts.iter().find_map(|part| asks[*part].part.time());
        let reading = asks[parts[0]].part.begin(given.map(Reading::from));
        for part in &parts[1..] {
            asks[*part].part.begin(Some(reading));
        }
        let part = |index: &usize| {
            let part = &asks[*index].part;
            (*index, part.cost(), part.charges())
        };
        let sum = KeyCost::of(parts.iter().map(part));
        Group { parts, sum }
    };
    keys.into_iter().map(group).collect()
}

fn decide(mut asks: Vec<JointAsk<'_>>) -> Result<JointDecision, StoreError> {
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
    let mut denied_ask: Option<usize> = None;
    for group in &groups {
        for part in &group.parts {
            if group.sum.is_impossible() || !asks[*part].part.agrees(group.cost(), &mut locks)? {
                denied_ask = denied_ask.into_iter().chain([*part]).min();
            }
        }
    }
    let go = denied_ask.is_none();
    if go {
        make_room(&mut asks, &groups, &mut locks)?;
    }
    // New keys come last: they may take the place of a fresh key.
    groups.sort_by_key(|group| !asks[group.sum.charger].part.found().is_kept());
    let decisions = steps(&asks, &groups, locks, go);
    let denial = denied_ask.map(|part| &decisions[part]);
    let decision = merge::merge(&decisions, denial);
    // Places are taken before observers are called: if an observer panics, they are returned.
    let places = asks.iter_mut().filter_map(|ask| ask.place.take());
    let places = if go { places.map(Place::taken).collect() } else { Vec::new() };
    for (ask, decision) in asks.iter().zip(&decisions) {
        // The observer of every part gets the result of the joint decision.
        ask.part.notify(&Decision { allowed: go, ..*decision });
    }
    let timed = |(ask, decision): (&JointAsk<'_>, Decision)| Timed { decision, at: ask.part.now() };
    let parts = asks.iter().zip(decisions).map(timed).map(Some).collect();
    Ok(JointDecision { decision, denied_ask, parts, places })
}

/// Takes the locks of all keys in the order of locks, and finds the slots of the keys.
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

/// Passes the position that the first part of a key has found to its other parts.
fn share_found(asks: &mut [JointAsk<'_>], group: &Group) {
    let found = asks[group.parts[0]].part.found();
    group.parts[1..].iter().for_each(|part| asks[*part].part.set_found(found));
}

/// Carries out all steps, and returns the decision of each part. If a user-defined algorithm panics, nothing stays
/// charged.
fn steps<'a>(
    asks: &[JointAsk<'a>],
    groups: &[Group],
    mut locks: Locks<'a>,
    go: bool,
) -> Vec<Decision> {
    let mut decisions = vec![merge::NO_PARTS; asks.len()];
    let mut done = 0;
    let all = std::panic::catch_unwind(AssertUnwindSafe(|| {
        for group in groups {
            step(asks, group, &mut locks, go, &mut decisions);
            done += 1;
        }
    }));
    let Err(panic) = all else { return decisions };
    let quietly = |undo: &mut dyn FnMut()| drop(std::panic::catch_unwind(AssertUnwindSafe(undo)));
    let charged = groups[..done].iter().filter(|group| go && group.sum.units > 0);
    let (kept, new): (Vec<_>, Vec<_>) =
        charged.partition(|group| asks[group.sum.charger].part.found().is_kept());
    for group in kept {
        quietly(&mut || asks[group.sum.charger].part.undo(group.cost(), &mut locks));
    }
    drop(locks);
    for group in new {
        quietly(&mut || asks[group.sum.charger].part.undo_new(group.cost()));
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
    if asks[group.sum.charger].part.found().is_kept() && group.sum.units > 0 {
        group.others().for_each(|part| asks[part].part.bring(locks));
    }
    decisions[group.sum.charger] = asks[group.sum.charger].part.step(group.cost(), locks, go);
    if group.sum.is_impossible() {
        for part in &group.parts {
            decisions[*part] = merge::impossible(decisions[*part]);
        }
    }
}

/// Finds a place for every new key, or for none.
fn make_room<'a>(
    asks: &mut [JointAsk<'a>],
    groups: &[Group],
    locks: &mut Locks<'a>,
) -> Result<(), StoreError> {
    for (count, group) in groups.iter().enumerate().filter(|(_, group)| group.sum.units > 0) {
        if let Err(error) = asks[group.parts[0]].part.make_room(locks) {
            let before = groups[..count].iter().filter(|group| group.sum.units > 0);
            before.for_each(|group| asks[group.parts[0]].part.give_up_room(locks));
            return Err(error);
        }
        share_found(asks, group);
    }
    Ok(())
}

impl<R: RuleSource + Sync, S: JointStore<R::Rule> + Sync, O: Observer> RateLimiter<R, S, O> {
    /// Makes a request to this limiter a part of a joint decision: see [`check_all`].
    ///
    /// # Errors
    /// Fails if the key is too long or the tier is unknown.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn joint<'a, 'k>(&'a self, ask: impl Into<Ask<'k>>) -> Result<JointAsk<'a>, StoreError>
    where
        R: 'a,
        S: 'a,
    {
        JointAsk::in_store(self, &self.store, ask)
    }
}

impl InFlight {
    /// Makes a place in flight a part of a joint decision: see [`check_all`].
    ///
    /// # Errors
    /// Fails if the key is too long.
    pub fn joint<'a, 'k>(&'a self, ask: impl Into<Ask<'k>>) -> Result<JointAsk<'a>, StoreError> {
        let ask: Ask<'k> = ask.into();
        Ok(self.limiter.joint(ask)?.with_place(self.place(ask.key)))
    }
}

impl<'a> JointAsk<'a> {
    /// Makes a request to a limiter a part of a joint decision in `store`, which the limiter's own store contains.
    ///
    /// # Errors
    /// Fails if the key is too long or the tier is unknown.
    pub fn in_store<'k, R, S, K, O>(
        limiter: &'a RateLimiter<R, S, O>,
        store: &'a K,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, StoreError>
    where
        R: RuleSource + Sync,
        S: Store<R::Rule> + Sync,
        K: JointStore<R::Rule> + Sync,
        O: Observer,
    {
        let ask: Ask<'k> = ask.into();
        let rule = limiter.rule(&ask)?;
        Self::in_store_under(limiter, store, rule, ask)
    }

    /// Does the same under a rule of the caller's choice, whatever the limiter's own rules are.
    ///
    /// # Errors
    /// Fails if the key is too long.
    pub fn in_store_under<'k, R, S, K, O>(
        limiter: &'a RateLimiter<R, S, O>,
        store: &'a K,
        rule: R::Ref<'a>,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, StoreError>
    where
        R: RuleSource + Sync,
        S: Store<R::Rule> + Sync,
        K: JointStore<R::Rule> + Sync,
        O: Observer,
    {
        let ask: Ask<'k> = ask.into();
        let spot = store.spot(&rule, ask.key)?;
        let Ask { cost, at, .. } = ask;
        let (reading, behind, found) = (Reading::default(), None, None);
        let key = ask.key.into();
        let part =
            LimiterPart { limiter, store, rule, key, cost, at, spot, reading, behind, found };
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

struct LimiterPart<'a, R: RuleSource + 'a, S, K, O> {
    limiter: &'a RateLimiter<R, S, O>,
    store: &'a K,
    rule: R::Ref<'a>,
    key: Box<[u8]>,
    cost: Cost,
    /// The time of the request, if it has one.
    at: Option<Tick>,
    spot: KeySlot,
    reading: Reading,
    /// The denial, if other requests wait for the key.
    behind: Option<Decision>,
    found: Option<LockedKey>,
}

impl<'a, R, S, K, O> Joint<'a> for LimiterPart<'a, R, S, K, O>
where
    R: RuleSource,
    S: Store<R::Rule>,
    K: JointStore<R::Rule>,
    O: Observer,
{
    fn identity(&self) -> (usize, KeySlot) {
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

    fn begin(&mut self, reading: Option<Reading>) -> Reading {
        self.reading = reading.unwrap_or_else(|| self.store.read());
        self.reading
    }

    fn now(&self) -> Tick {
        self.reading.now
    }

    fn charges(&self) -> bool {
        self.rule.charges(self.reading.now)
    }

    fn line_up(&mut self, cost: Cost, keys: usize) -> Result<(), StoreError> {
        let store = self.store;
        self.behind = store.behind_others(&self.rule, self.spot, cost, self.reading, keys)?;
        Ok(())
    }

    fn look(&mut self, locks: &mut Locks<'a>) -> bool {
        self.found = self.store.look_for(self.spot, locks);
        self.found.is_some()
    }

    fn found(&self) -> LockedKey {
        self.found.unwrap_or_else(|| unreachable!("it is asked when all were found"))
    }

    fn set_found(&mut self, found: LockedKey) {
        self.found = Some(found);
    }

    fn make_room(&mut self, locks: &mut Locks<'a>) -> Result<(), StoreError> {
        let store = self.store;
        self.found = Some(store.make_room(&self.rule, self.found(), self.reading, locks)?);
        Ok(())
    }

    fn give_up_room(&mut self, locks: &mut Locks<'a>) {
        self.store.give_up_room(self.found(), locks);
    }

    fn agrees(&self, cost: Cost, locks: &mut Locks<'a>) -> Result<bool, StoreError> {
        let store = self.store;
        let agrees = store.agrees(&self.rule, self.found(), cost, self.reading, locks)?;
        Ok(agrees && self.behind.is_none())
    }

    fn report(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision {
        let store = self.store;
        let decision = store.report(&self.rule, self.found(), cost, self.reading, locks, go);
        self.behind.unwrap_or(decision)
    }

    fn bring(&self, locks: &mut Locks<'a>) {
        self.store.change_kept(&self.rule, self.found(), 0, self.reading, locks);
    }

    fn step(&self, cost: Cost, locks: &mut Locks<'a>, go: bool) -> Decision {
        let store = self.store;
        let decision = store.step(&self.rule, self.found(), cost, self.reading, locks, go);
        self.behind.unwrap_or(decision)
    }

    fn undo(&self, cost: Cost, locks: &mut Locks<'a>) {
        self.store.change_kept(&self.rule, self.found(), cost, self.reading, locks);
    }

    fn undo_new(&self, cost: Cost) {
        let op = Op::Force(-i128::from(cost));
        // The key was placed under this rule, so the store accepts it.
        let _ = self.store.apply::<Decision>(&*self.rule, &self.key, op, Some(self.reading.now));
    }

    fn notify(&self, decision: &Decision) {
        let notifier = self.limiter.notifier();
        notifier.decided(&*self.rule, &self.key, self.cost, decision, self.reading.now);
    }
}
