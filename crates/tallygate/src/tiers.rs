//! Tiers and overrides: clients with rules of their own, and rules that change while they serve.
//!
//! A [`Plan`] says what a client gets by now: a policy, no limit, or nothing. The state of a key remembers
//! what it used under each policy it was asked for, and takes it over to a new one: what was used stays
//! used, whether the tier, an override or the whole book of rules has changed. A decision is made under
//! one version of the book, the one that was in force when it began.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Deref;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tallygate_core::{
    Algorithm, Cost, DecodeError, Facts, Fit, FitBehind, Limit, Policy, Receipt, Share, Tick, Used,
};

use crate::ask::UnknownTier;
use crate::kept::Kept;
use crate::rules::Rules;

/// What a client gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// What a policy admits.
    Limited(Arc<Policy>),
    /// Everything. What it has used before is still earned back meanwhile.
    Unlimited,
    /// Nothing.
    Blocked,
}

impl Access {
    /// Hashes everything that a decision depends on.
    fn hash_into(&self, hasher: &mut impl Hasher) {
        std::mem::discriminant(self).hash(hasher);
        if let Self::Limited(policy) = self {
            for limit in policy.limits() {
                limit.numbers().hash(hasher);
                (limit.is_shadow(), limit.penalty()).hash(hasher);
            }
        }
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(policy) => policy.fmt(f),
            Self::Unlimited => f.write_str("unlimited"),
            Self::Blocked => f.write_str("blocked"),
        }
    }
}

impl From<Policy> for Access {
    fn from(policy: Policy) -> Self {
        Self::Limited(Arc::new(policy))
    }
}

/// What a single client was given at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// What it gets.
    pub access: Access,
    /// Until when, by the clock of the store; `None` for good.
    pub until: Option<Tick>,
}

impl Override {
    fn is_in_force(&self, now: Tick) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

/// Rules by tier and by client.
///
/// ```
/// use tallygate::{Access, Ask, Policy, RateLimiter, Tiers};
///
/// let free = Policy::token_bucket(2).per_minute().build()?;
/// let pro = Policy::token_bucket(5).per_minute().build()?;
/// let limiter = RateLimiter::tiered("api", Tiers::new(free).tier("pro", pro));
///
/// assert_eq!(limiter.check("alice")?.remaining, 1);
/// let pro = |key| Ask::new(key).tier("pro");
/// assert_eq!(limiter.check(pro("alice"))?.remaining, 3); // what was used stays used
/// limiter.set_override("mallory", Access::Blocked, None);
/// assert!(!limiter.check("mallory")?.allowed);
/// let unknown = limiter.check(Ask::new("alice").tier("gold")).unwrap_err();
/// assert_eq!(unknown.to_string(), "no tier is named \"gold\"; there is pro");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Tiers {
    book: ArcSwap<Book>,
    resolver: Option<Resolver>,
}

type Resolver = Box<dyn Fn(&[u8]) -> Option<Cow<'static, str>> + Send + Sync>;

/// One version of all rules.
#[derive(Clone, Debug)]
struct Book {
    /// Without a tier and without an override.
    base: Plan,
    tiers: Arc<HashMap<Box<str>, Access>>,
    /// Overrides of the rules: they change with them.
    ruled: Arc<HashMap<Box<[u8]>, Access>>,
    /// Overrides that were set at run time: they come first, and outlast the rules.
    overrides: Arc<HashMap<Box<[u8]>, Override>>,
}

impl Tiers {
    /// Rules for clients without a tier.
    #[must_use]
    pub fn new(base: impl Into<Access>) -> Self {
        let book = Book {
            base: Plan::of(base),
            tiers: Arc::default(),
            ruled: Arc::default(),
            overrides: Arc::default(),
        };
        Self { book: ArcSwap::from_pointee(book), resolver: None }
    }

    /// The same, with one more tier.
    #[must_use]
    pub fn tier(self, name: impl Into<Box<str>>, access: impl Into<Access>) -> Self {
        let mut book = Arc::unwrap_or_clone(self.book.into_inner());
        Arc::make_mut(&mut book.tiers).insert(name.into(), access.into());
        Self { book: ArcSwap::from_pointee(book), resolver: self.resolver }
    }

    /// The same, with something else for a single client, whatever its tier.
    ///
    /// It belongs to the rules, and changes with them in one step. One that is
    /// [set at run time](crate::RateLimiter::set_override) comes first while it is in force.
    ///
    /// ```
    /// use tallygate::{Access, Policy, RateLimiter, Tiers};
    ///
    /// let rules = |limit| Policy::token_bucket(limit).per_minute().build().map(Tiers::new);
    /// let limiter = RateLimiter::tiered("api", rules(2)?.overridden("mallory", Access::Blocked));
    /// assert!(!limiter.check("mallory")?.allowed);
    ///
    /// limiter.set_override("mallory", Access::Unlimited, None);
    /// assert!(limiter.check("mallory")?.allowed);
    /// limiter.remove_override("mallory");
    /// assert!(!limiter.check("mallory")?.allowed); // the rules still say so
    ///
    /// limiter.replace(&rules(5)?);
    /// assert!(limiter.check("mallory")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn overridden(self, key: impl AsRef<[u8]>, access: impl Into<Access>) -> Self {
        let mut book = Arc::unwrap_or_clone(self.book.into_inner());
        Arc::make_mut(&mut book.ruled).insert(key.as_ref().into(), access.into());
        Self { book: ArcSwap::from_pointee(book), resolver: self.resolver }
    }

    /// The same, with somebody who knows the tier of a key. A name that is no tier, as after a change
    /// of rules, is taken as none.
    #[must_use]
    pub fn resolved_by(
        mut self,
        resolver: impl Fn(&[u8]) -> Option<Cow<'static, str>> + Send + Sync + 'static,
    ) -> Self {
        self.resolver = Some(Box::new(resolver));
        self
    }

    /// What clients without a tier get.
    #[must_use]
    pub fn base(&self) -> Access {
        self.book.load().base.access.clone()
    }

    /// The tiers and what they get, by name.
    #[must_use]
    pub fn by_name(&self) -> Vec<(Box<str>, Access)> {
        let book = self.book.load();
        let mut tiers: Vec<_> =
            book.tiers.iter().map(|(name, access)| (name.clone(), access.clone())).collect();
        tiers.sort_by(|(one, _), (other, _)| one.cmp(other));
        tiers
    }

    /// The overrides of the rules, by key. Those that were set at run time are not among them.
    #[must_use]
    pub fn by_key(&self) -> Vec<(Box<[u8]>, Access)> {
        let book = self.book.load();
        let mut ruled: Vec<_> =
            book.ruled.iter().map(|(key, access)| (key.clone(), access.clone())).collect();
        ruled.sort_by(|(one, _), (other, _)| one.cmp(other));
        ruled
    }

    /// The override that the rules have for a key.
    #[must_use]
    pub fn of_key(&self, key: &[u8]) -> Option<Access> {
        self.book.load().ruled.get(key).cloned()
    }

    /// The same rules for another limiter: base, tiers and their overrides, without those that were set
    /// at run time, and without the resolver.
    #[must_use]
    pub fn copy(&self) -> Self {
        let book = Book { overrides: Arc::default(), ..Book::clone(&self.book.load()) };
        Self { book: ArcSwap::from_pointee(book), resolver: None }
    }

    pub(crate) fn set_override(&self, key: &[u8], set: &Override) {
        self.change_overrides(|overrides| {
            overrides.insert(key.into(), set.clone());
        });
    }

    pub(crate) fn remove_override(&self, key: &[u8]) -> bool {
        let mut was_there = false;
        self.change_overrides(|overrides| was_there = overrides.remove(key).is_some());
        was_there
    }

    /// Those of the run time that have not ended; the others are dropped.
    pub(crate) fn overrides(&self, now: Tick) -> Vec<(Box<[u8]>, Override)> {
        self.change_overrides(|overrides| overrides.retain(|_, set| set.is_in_force(now)));
        let book = self.book.load();
        book.overrides.iter().map(|(key, set)| (key.clone(), set.clone())).collect()
    }

    fn change_overrides(&self, mut change: impl FnMut(&mut HashMap<Box<[u8]>, Override>)) {
        self.book.rcu(|book| {
            let mut book = Book::clone(book);
            change(Arc::make_mut(&mut book.overrides));
            book
        });
    }

    /// Puts other rules in force, with their overrides. Those that were set at run time stay, and so
    /// does the resolver.
    pub(crate) fn replace(&self, new: &Self) {
        let new = new.book.load();
        self.book.rcu(|old| Book {
            base: Plan::of(reused(
                &new.base.access,
                [&old.base.access].into_iter().chain(old.tiers.values()),
            )),
            tiers: new
                .tiers
                .iter()
                .map(|(name, access)| {
                    let before = old.tiers.get(name).into_iter().chain([&old.base.access]);
                    (name.clone(), reused(access, before))
                })
                .collect::<HashMap<_, _>>()
                .into(),
            ruled: new
                .ruled
                .iter()
                .map(|(key, access)| {
                    let before = old.ruled.get(key).into_iter().chain([&old.base.access]);
                    (key.clone(), reused(access, before))
                })
                .collect::<HashMap<_, _>>()
                .into(),
            overrides: old.overrides.clone(),
        });
    }

    fn plan(&self, key: &[u8]) -> Choice {
        let book = self.book.load();
        let tier = self.resolver.as_ref().and_then(|resolver| resolver(key));
        match tier.and_then(|tier| book.tiers.get(&*tier)) {
            Some(access) => Choice::Own(book.plan(key, access)),
            None if !book.has_overrides() => Choice::Base(book),
            None => Choice::Own(book.plan(key, &book.base.access)),
        }
    }
}

impl Book {
    fn has_overrides(&self) -> bool {
        !self.overrides.is_empty() || !self.ruled.is_empty()
    }

    /// What a key gets, whose tier gets this.
    fn plan(&self, key: &[u8], access: &Access) -> Plan {
        let set = if self.overrides.is_empty() { None } else { self.overrides.get(key) };
        let ruled = if self.ruled.is_empty() { None } else { self.ruled.get(key) };
        Plan { set: set.cloned(), access: ruled.unwrap_or(access).clone() }
    }
}

/// The same access in the place it has, if it has not changed: then no state needs to be carried over.
fn reused<'a>(new: &'a Access, mut before: impl Iterator<Item = &'a Access>) -> Access {
    before.find(|old| *old == new).unwrap_or(new).clone()
}

/// What one client gets, for one decision.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its override of the run time, which may have ended when the decision is made.
    set: Option<Override>,
    /// What it gets without it.
    access: Access,
}

impl Plan {
    /// A plan without an override.
    #[must_use]
    pub fn of(access: impl Into<Access>) -> Self {
        Self { set: None, access: access.into() }
    }

    /// What the client gets at a time.
    #[must_use]
    pub fn access(&self, now: Tick) -> &Access {
        match &self.set {
            Some(set) if set.is_in_force(now) => &set.access,
            _ => &self.access,
        }
    }

    /// Its policies: of the override, and without it.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let set = self.set.as_ref().map(|set| &set.access);
        set.into_iter().chain([&self.access]).filter_map(|access| match access {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked => None,
        })
    }

    /// The same plan with other policies and another count of time, for a store that has its own.
    ///
    /// # Errors
    /// What `policy` says.
    pub fn with<E>(
        &self,
        policy: impl Fn(&Arc<Policy>) -> Result<Arc<Policy>, E>,
        time: impl Fn(Tick) -> Tick,
    ) -> Result<Self, E> {
        let access = |access: &Access| match access {
            Access::Limited(limited) => policy(limited).map(Access::Limited),
            Access::Unlimited => Ok(Access::Unlimited),
            Access::Blocked => Ok(Access::Blocked),
        };
        let set = self
            .set
            .as_ref()
            .map(|set| Ok(Override { access: access(&set.access)?, until: set.until.map(&time) }));
        Ok(Self { set: set.transpose()?, access: access(&self.access)? })
    }

    /// Asks the policy at a time, if the client has one; the state was brought under it.
    fn limited<T>(&self, now: Tick, ask: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.charges(now) { ask() } else { None }
    }

    fn is_blocked(&self, now: Tick) -> bool {
        matches!(self.access(now), Access::Blocked)
    }
}

impl Algorithm for Plan {
    type State = Kept;

    fn capacity(&self) -> Cost {
        match &self.access {
            Access::Limited(policy) => policy.capacity(),
            Access::Unlimited => Cost::MAX,
            Access::Blocked => 0,
        }
    }

    fn fresh(&self, now: Tick) -> Kept {
        match self.access(now) {
            Access::Limited(policy) => Kept::fresh(policy, now),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    fn first(&self, now: Tick) -> Kept {
        match self.access(now) {
            Access::Limited(policy) => Kept::new(policy, now),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    #[inline]
    fn last_change(&self, kept: &Kept) -> Tick {
        kept.last_change()
    }

    #[inline]
    fn decides_at(&self, kept: &Kept, now: Tick) -> Tick {
        kept.decides_at(now)
    }

    /// Each state by the policy that it is under: the plan is only that of the caller.
    fn clock_set_back(&self, kept: &mut Kept, now: Tick) {
        kept.clock_set_back(now);
    }

    /// Also where the state is still under another policy: it is brought under this one first.
    fn set_back(&self, kept: &Kept, now: Tick) -> bool {
        match self.access(now) {
            Access::Limited(policy) => !kept.is_under(policy) || kept.set_back(now),
            Access::Unlimited | Access::Blocked => false,
        }
    }

    /// Who asks under a policy for the first time goes on under it from then, whatever the answer:
    /// otherwise the time that a refusal tells would not be right.
    fn rebase(&self, kept: &mut Kept, now: Tick) {
        let Access::Limited(policy) = self.access(now) else { return };
        kept.bring_under(policy, now);
        kept.rebase(now);
    }

    fn admits(&self, kept: &Kept, now: Tick, cost: Cost) -> bool {
        self.limited(now, || kept.admits(now, cost)).unwrap_or_else(|| !self.is_blocked(now))
    }

    fn admit(&self, kept: &mut Kept, now: Tick, cost: Cost) -> bool {
        let admitted = if self.charges(now) { kept.admit(now, cost) } else { None };
        admitted.unwrap_or_else(|| !self.is_blocked(now))
    }

    fn refuse(&self, kept: &mut Kept, now: Tick, cost: Cost) {
        if self.charges(now) {
            kept.refuse(now, cost);
        }
    }

    fn refusing(&self, kept: &Kept, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        self.limited(now, || kept.refusing(now, cost, shadow))
    }

    fn limit(&self, index: usize, now: Tick) -> Option<&Limit> {
        match self.access(now) {
            Access::Limited(policy) => policy.limits().get(index),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn charges(&self, now: Tick) -> bool {
        matches!(self.access(now), Access::Limited(_))
    }

    /// Where an override ends before the cost fits, what comes after it decides.
    fn fit(&self, kept: &Kept, now: Tick, cost: Cost) -> Fit {
        let fit = match self.limited(now, || kept.fit(now, cost)) {
            Some(fit) => fit,
            None if self.is_blocked(now) => Fit::Never,
            None => Fit::Now,
        };
        let end = self.set.as_ref().filter(|set| set.is_in_force(now)).and_then(|set| set.until);
        let Some(end) = end else { return fit };
        let rest = end.since(now);
        if matches!(fit, Fit::Now) || matches!(fit, Fit::After(wait) if wait < rest) {
            return fit;
        }
        let then = match &self.access {
            Access::Limited(policy) => kept.fit_under(policy, end, cost),
            Access::Unlimited => Fit::Now,
            Access::Blocked => Fit::Never,
        };
        match then {
            Fit::Now => Fit::After(rest),
            Fit::After(wait) => Fit::After(rest.plus(wait)),
            Fit::Never => Fit::Never,
        }
    }

    /// Ignores the units ahead while an override is in force that ends.
    fn fit_behind(&self, kept: &Kept, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let ends = self.set.as_ref().is_some_and(|set| set.until.is_some_and(|until| now < until));
        let is_limited = self.charges(now) && !ends;
        let fit = is_limited.then(|| kept.fit_behind(now, ahead, cost)).flatten();
        fit.unwrap_or_else(|| FitBehind::alone(self.fit(kept, now, cost), ahead))
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.access.hash_into(&mut hasher);
        if let Some(set) = &self.set {
            set.access.hash_into(&mut hasher);
            set.until.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// A client without a limit uses nothing by its requests. What is forced, such as the rest of a reservation that
    /// was made under a policy, is charged under the policies that the client was asked under.
    fn charge(&self, kept: &mut Kept, now: Tick, amount: i128) -> u128 {
        if amount > 0 && kept.is_empty() {
            return 0;
        }
        kept.charge(now, amount)
    }

    fn receipt(&self, kept: &Kept) -> Receipt {
        kept.receipt()
    }

    fn admit_with_receipt(&self, kept: &mut Kept, now: Tick, cost: Cost) -> Option<Receipt> {
        if self.charges(now) && !kept.is_empty() {
            return kept.admit_with_receipt(now, cost);
        }
        (!self.is_blocked(now)).then_some(Receipt::Nothing)
    }

    /// Whatever the rules say now, the policies that were charged are settled.
    fn settle(&self, kept: &mut Kept, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let was_limited = *receipt != Receipt::Nothing;
        match self.access(now) {
            // A state that has used nothing may have been dropped, and nobody may notice.
            Access::Limited(policy)
                if change > 0 && kept.fresh_at().is_some_and(|at| at <= now) =>
            {
                *kept = Kept::fresh(policy, now);
            }
            Access::Unlimited | Access::Blocked if !was_limited => return 0,
            _ => {}
        }
        kept.settle(now, change, receipt)
    }

    fn facts(&self, kept: &Kept, now: Tick, admitted: Option<Cost>) -> Facts {
        match self.limited(now, || kept.facts(now, admitted)) {
            Some(facts) => facts,
            None if self.is_blocked(now) => Facts::BLOCKED,
            None => Facts::UNLIMITED,
        }
    }

    fn fresh_at(&self, kept: &Kept) -> Option<Tick> {
        kept.fresh_at()
    }

    fn used(&self, kept: &Kept, now: Tick) -> Used {
        kept.used(now)
    }

    fn share_used(&self, kept: &Kept, now: Tick) -> Share {
        kept.share_used(now)
    }

    fn with_used(&self, used: Used, now: Tick) -> Kept {
        match self.access(now) {
            Access::Limited(policy) => Kept::with_used(policy, used, now),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    /// What was used under the policy it was last asked for: for stores that keep a key under one.
    fn encode(&self, kept: &Kept, out: &mut Vec<u8>) {
        kept.encode_first(out);
    }

    /// Only what was encoded under the policy that is in force without an override.
    fn decode(&self, bytes: &[u8]) -> Result<Kept, DecodeError> {
        match &self.access {
            _ if bytes.is_empty() => Ok(Kept::default()),
            Access::Limited(policy) => Ok(Kept::of([(policy.clone(), policy.decode(bytes)?)], &[])),
            Access::Unlimited | Access::Blocked => Err(DecodeError::OtherLimit),
        }
    }
}

/// A plan that was chosen for one decision.
#[derive(Debug)]
pub struct Chosen(Choice);

#[derive(Debug)]
enum Choice {
    /// That of everybody, in the book: threads that lend it write to no memory they share.
    Base(Guard<Arc<Book>>),
    Own(Plan),
}

impl Clone for Chosen {
    fn clone(&self) -> Self {
        Self(Choice::Own(Plan::clone(self)))
    }
}

impl Deref for Chosen {
    type Target = Plan;

    #[inline]
    fn deref(&self) -> &Plan {
        match &self.0 {
            Choice::Base(book) => &book.base,
            Choice::Own(plan) => plan,
        }
    }
}

impl Rules for Tiers {
    type Rule = Plan;
    type Chosen<'a> = Chosen;

    fn choose(&self, key: &[u8]) -> Chosen {
        Chosen(self.plan(key))
    }

    fn choose_in(&self, tier: &str, key: &[u8]) -> Result<Chosen, UnknownTier> {
        let book = self.book.load();
        let Some(access) = book.tiers.get(tier) else {
            let mut known: Vec<_> = book.tiers.keys().cloned().collect();
            known.sort_unstable();
            return Err(UnknownTier { name: tier.into(), known });
        };
        Ok(Chosen(Choice::Own(book.plan(key, access))))
    }

    fn same_for_all(&self) -> Option<&Plan> {
        None
    }
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiers").field("book", &self.book.load()).finish_non_exhaustive()
    }
}
