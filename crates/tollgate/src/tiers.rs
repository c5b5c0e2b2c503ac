//! Tiers and overrides: clients with rules of their own, and rules that change while they serve.
//!
//! A [`Plan`] says what a client gets by now: a policy, no limit, or nothing. The state of a key
//! remembers the policy it was charged under, and is carried over to another when it is next asked for:
//! what was used stays used, whether the tier, an override or the whole book of rules has changed. A
//! decision is made under one version of the book, the one that was in force when it began.

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use arc_swap::ArcSwap;
use tollgate_core::{
    Algorithm, Cost, DecodeError, Facts, Fit, Policy, Standing, Tick, Ticks, Used,
};

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

impl From<Policy> for Access {
    fn from(policy: Policy) -> Self {
        Self::Limited(Arc::new(policy))
    }
}

/// What a single client gets instead of its tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// What it gets.
    pub access: Access,
    /// Until when, by the clock of the store; `None` for good.
    pub until: Option<Tick>,
}

/// Rules by tier and by client.
///
/// ```
/// use tollgate::{Access, Policy, RateLimiter, Tiers};
///
/// let free = Policy::token_bucket(2).per_minute().build()?;
/// let pro = Policy::token_bucket(5).per_minute().build()?;
/// let limiter = RateLimiter::tiered("api", Tiers::new(free).tier("pro", pro));
///
/// assert_eq!(limiter.check("alice")?.remaining, 1);
/// assert_eq!(limiter.tier("pro")?.check("alice")?.remaining, 3); // what was used stays used
/// limiter.rules().set_override("mallory", Access::Blocked, None);
/// assert!(!limiter.check("mallory")?.allowed);
/// assert_eq!(limiter.tier("gold").unwrap_err().to_string(), "no tier is named \"gold\"; there is pro");
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
    base: Access,
    tiers: Arc<HashMap<Box<str>, Access>>,
    overrides: Arc<HashMap<Box<[u8]>, Override>>,
}

impl Tiers {
    /// Rules for clients without a tier.
    #[must_use]
    pub fn new(base: impl Into<Access>) -> Self {
        let book = Book { base: base.into(), tiers: Arc::default(), overrides: Arc::default() };
        Self { book: ArcSwap::from_pointee(book), resolver: None }
    }

    /// The same, with one more tier.
    #[must_use]
    pub fn tier(self, name: impl Into<Box<str>>, access: impl Into<Access>) -> Self {
        let mut book = Book::clone(&self.book.load());
        Arc::make_mut(&mut book.tiers).insert(name.into(), access.into());
        self.book.store(Arc::new(book));
        self
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

    /// Gives a client something else than its tier, until a time by the store's clock or for good.
    ///
    /// Overrides are looked up in one hash map that is copied when it changes: thousands are no
    /// burden, millions belong into tiers.
    pub fn set_override(
        &self,
        key: impl AsRef<[u8]>,
        access: impl Into<Access>,
        until: Option<Tick>,
    ) {
        let (key, set) = (key.as_ref(), Override { access: access.into(), until });
        self.change_overrides(|overrides| {
            overrides.insert(key.into(), set.clone());
        });
    }

    /// Takes an override back; says whether there was one.
    pub fn remove_override(&self, key: impl AsRef<[u8]>) -> bool {
        let mut was_there = false;
        self.change_overrides(|overrides| {
            was_there = overrides.remove(key.as_ref()).is_some();
        });
        was_there
    }

    /// Takes back the overrides that have ended. They have no effect any more; this is about memory.
    pub fn remove_ended_overrides(&self, now: Tick) {
        self.change_overrides(|overrides| {
            overrides.retain(|_, set| set.until.is_none_or(|until| until > now));
        });
    }

    /// All overrides, those that have ended too.
    #[must_use]
    pub fn overrides(&self) -> Vec<(Box<[u8]>, Override)> {
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

    /// Puts other rules for everybody in force. Overrides stay, and so does the resolver.
    pub(crate) fn replace(&self, new: &Self) {
        let new = new.book.load();
        self.book.rcu(|old| Book {
            base: reused(&new.base, [&old.base].into_iter().chain(old.tiers.values())),
            tiers: new
                .tiers
                .iter()
                .map(|(name, access)| {
                    let before = old.tiers.get(name).into_iter().chain([&old.base]);
                    (name.clone(), reused(access, before))
                })
                .collect::<HashMap<_, _>>()
                .into(),
            overrides: old.overrides.clone(),
        });
    }

    fn plan(&self, key: &[u8], tier: Option<&str>) -> Plan {
        let book = self.book.load();
        let resolved = match (tier, &self.resolver) {
            (None, Some(resolver)) => resolver(key),
            (tier, _) => tier.map(|tier| Cow::Owned(tier.to_owned())),
        };
        let tier = resolved.as_deref().and_then(|tier| book.tiers.get(tier));
        book.plan(key, tier.unwrap_or(&book.base))
    }
}

impl Book {
    fn plan(&self, key: &[u8], access: &Access) -> Plan {
        let first = if self.overrides.is_empty() { None } else { self.overrides.get(key) };
        Plan { first: first.cloned(), access: access.clone() }
    }
}

/// The same access in the place it has, if it has not changed: then no state needs to be carried over.
fn reused<'a>(new: &'a Access, mut before: impl Iterator<Item = &'a Access>) -> Access {
    before.find(|old| *old == new).unwrap_or(new).clone()
}

/// What one client gets, for one decision.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Its override, which may end before the decision.
    first: Option<Override>,
    access: Access,
}

/// What a key has used, and under which policy.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    /// `None` as long as no policy was asked.
    now: Option<Under>,
    /// What it had used under another policy and did not fit under this one: else a key could wash off
    /// what it used in a greater tier by passing through a smaller one.
    before: Option<Box<Under>>,
}

/// What a key has used under a policy.
#[derive(Clone, Debug)]
struct Under {
    policy: Arc<Policy>,
    standings: Box<[Standing]>,
}

impl Under {
    fn used(&self, now: Tick) -> Cost {
        self.policy.used(&self.standings, now).rounded_up()
    }

    /// Brings it forward to a time that lies before its own, if the clock was set back.
    fn rebase(&mut self, now: Tick) {
        if self.policy.set_back(&self.standings, now) {
            self.policy.rebase(&mut self.standings, now);
        }
    }

    fn charge(&mut self, now: Tick, amount: i128) -> u128 {
        self.rebase(now);
        self.policy.charge(&mut self.standings, now, amount)
    }
}

impl Plan {
    fn access(&self, now: Tick) -> &Access {
        match &self.first {
            Some(first) if first.until.is_none_or(|until| now < until) => &first.access,
            _ => &self.access,
        }
    }

    /// The policy at a time, with a state that was brought under it.
    fn limited<'a>(&self, kept: &'a Kept, now: Tick) -> Option<&'a Under> {
        match self.access(now) {
            Access::Limited(_) => kept.now.as_ref(),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn limited_mut<'a>(&self, kept: &'a mut Kept, now: Tick) -> Option<&'a mut Under> {
        match self.access(now) {
            Access::Limited(_) => kept.now.as_mut(),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn is_blocked(&self, now: Tick) -> bool {
        matches!(self.access(now), Access::Blocked)
    }
}

impl Kept {
    fn under(policy: &Arc<Policy>, standings: Box<[Standing]>) -> Self {
        Self { now: Some(Under { policy: policy.clone(), standings }), before: None }
    }

    fn is_under(&self, policy: &Arc<Policy>) -> bool {
        let same = |under: &Under| Arc::ptr_eq(&under.policy, policy) || under.policy == *policy;
        self.now.as_ref().is_some_and(same)
    }

    /// The same under another policy.
    fn carried(&self, policy: &Arc<Policy>, now: Tick) -> Self {
        let Some(mut last) = self.now.clone() else {
            return Self::under(policy, policy.first(now));
        };
        last.rebase(now);
        let mut standings = policy.carry(&last.policy, &last.standings, now);
        if let Some(mut before) = self.before.as_deref().cloned() {
            before.rebase(now);
            // What the policy can hold more than the last one is used by what did not fit there: so
            // the key has as much room as it had, until that is earned back.
            let more = policy.capacity().saturating_sub(last.policy.capacity());
            let room_kept = last.used(now).saturating_add(more);
            if more > 0 {
                let others = match before.used(now) <= room_kept {
                    true => policy.carry(&before.policy, &before.standings, now),
                    false => policy.with_used(Used::whole(room_kept), now),
                };
                standings = policy.more_used(standings, others, now);
            }
            if before.used(now) > last.used(now) {
                last = before;
            }
        }
        let mut kept = Self::under(policy, standings);
        if last.used(now) > kept.used(now) {
            kept.before = Some(Box::new(last));
        }
        kept
    }

    fn used(&self, now: Tick) -> Cost {
        self.now.as_ref().map_or(0, |under| under.used(now))
    }

    /// What is charged now is also charged to what it had used before, as long as that is more.
    fn charge_before(&mut self, now: Tick, amount: i128) {
        if let Some(before) = &mut self.before {
            before.charge(now, amount);
            if before.used(now) <= self.used(now) {
                self.before = None;
            }
        }
    }
}

/// What is told where nothing is limited, and where nothing is admitted.
const fn facts(amount: Cost) -> Facts {
    Facts { limit: amount, remaining: amount, reset_after: Ticks::ZERO, delay: Ticks::ZERO }
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
            Access::Limited(policy) => Kept::under(policy, policy.fresh(now)),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    fn first(&self, now: Tick) -> Kept {
        match self.access(now) {
            Access::Limited(policy) => Kept::under(policy, policy.first(now)),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    /// Also where the state is still under another policy: it is brought under this one first.
    fn set_back(&self, kept: &Kept, now: Tick) -> bool {
        match (self.access(now), &kept.now) {
            (Access::Limited(policy), Some(under)) => {
                !kept.is_under(policy) || policy.set_back(&under.standings, now)
            }
            (Access::Limited(_), None) => true,
            (Access::Unlimited | Access::Blocked, _) => false,
        }
    }

    fn rebase(&self, kept: &mut Kept, now: Tick) {
        let Access::Limited(policy) = self.access(now) else { return };
        if !kept.is_under(policy) {
            *kept = kept.carried(policy, now);
        }
        if let Some(under) = &mut kept.now {
            under.rebase(now);
        }
    }

    fn admits(&self, kept: &Kept, now: Tick, cost: Cost) -> bool {
        match self.limited(kept, now) {
            Some(under) => under.policy.admits(&under.standings, now, cost),
            None => !self.is_blocked(now),
        }
    }

    fn admit(&self, kept: &mut Kept, now: Tick, cost: Cost) -> bool {
        let Some(under) = self.limited_mut(kept, now) else { return !self.is_blocked(now) };
        let admitted = under.policy.admit(&mut under.standings, now, cost);
        if admitted {
            kept.charge_before(now, cost.into());
        }
        admitted
    }

    fn refuse(&self, kept: &mut Kept, now: Tick, cost: Cost) {
        if let Some(under) = self.limited_mut(kept, now) {
            under.policy.refuse(&mut under.standings, now, cost);
        }
    }

    fn refusing(&self, kept: &Kept, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        let under = self.limited(kept, now)?;
        under.policy.refusing(&under.standings, now, cost, shadow)
    }

    fn limit_name(&self, limit: usize) -> &str {
        let accesses = self.first.as_ref().map(|first| &first.access).into_iter();
        let limited = accesses.chain([&self.access]).find_map(|access| match access {
            Access::Limited(policy) => Some(policy.limit_name(limit)),
            Access::Unlimited | Access::Blocked => None,
        });
        limited.unwrap_or("")
    }

    fn fit(&self, kept: &Kept, now: Tick, cost: Cost) -> Fit {
        if let Some(under) = self.limited(kept, now) {
            return under.policy.fit(&under.standings, now, cost);
        }
        if !self.is_blocked(now) {
            return Fit::Now;
        }
        // Blocked for a while: then, what comes after decides.
        let Some(until) = self.first.as_ref().and_then(|first| first.until) else {
            return Fit::Never;
        };
        let then = match &self.access {
            Access::Limited(policy) => match kept.carried(policy, until).now {
                Some(under) => policy.fit(&under.standings, until, cost),
                None => Fit::Now,
            },
            Access::Unlimited => Fit::Now,
            Access::Blocked => Fit::Never,
        };
        match then {
            Fit::Now => Fit::After(until.since(now)),
            Fit::After(wait) => Fit::After(until.since(now).plus(wait)),
            Fit::Never => Fit::Never,
        }
    }

    /// Who is not limited uses nothing, and has nothing given back.
    fn charge(&self, kept: &mut Kept, now: Tick, amount: i128) -> u128 {
        let Some(under) = self.limited_mut(kept, now) else { return 0 };
        let dropped = under.policy.charge(&mut under.standings, now, amount);
        kept.charge_before(now, amount);
        dropped
    }

    fn give_back(&self, kept: &mut Kept, now: Tick, amount: Cost, charged: Tick) -> u128 {
        let Some(under) = self.limited_mut(kept, now) else { return 0 };
        let dropped = under.policy.give_back(&mut under.standings, now, amount, charged);
        if let Some(before) = &mut kept.before {
            before.rebase(now);
            before.policy.give_back(&mut before.standings, now, amount, charged);
        }
        dropped
    }

    fn facts(&self, kept: &Kept, now: Tick, admitted: Option<Cost>) -> Facts {
        match self.limited(kept, now) {
            Some(under) => under.policy.facts(&under.standings, now, admitted),
            None => facts(if self.is_blocked(now) { 0 } else { Cost::MAX }),
        }
    }

    fn fresh_at(&self, kept: &Kept) -> Option<Tick> {
        let all = kept.now.iter().chain(kept.before.as_deref());
        let fresh =
            |last: Tick, under: &Under| Some(last.max(under.policy.fresh_at(&under.standings)?));
        all.into_iter().try_fold(Tick(i64::MIN), fresh)
    }

    fn used(&self, kept: &Kept, now: Tick) -> Used {
        let under = kept.now.as_ref();
        under.map_or(Used::NOTHING, |under| under.policy.used(&under.standings, now))
    }

    fn with_used(&self, used: Used, now: Tick) -> Kept {
        match self.access(now) {
            Access::Limited(policy) => Kept::under(policy, policy.with_used(used, now)),
            Access::Unlimited | Access::Blocked => Kept::default(),
        }
    }

    /// Without what did not fit under the policy: it is for stores that keep a key under one policy.
    fn encode(&self, kept: &Kept, out: &mut Vec<u8>) {
        if let Some(under) = &kept.now {
            under.policy.encode(&under.standings, out);
        }
    }

    /// Only what was encoded under the policy that is in force without an override.
    fn decode(&self, bytes: &[u8]) -> Result<Kept, DecodeError> {
        match &self.access {
            _ if bytes.is_empty() => Ok(Kept::default()),
            Access::Limited(policy) => Ok(Kept::under(policy, policy.decode(bytes)?)),
            Access::Unlimited | Access::Blocked => Err(DecodeError::OtherLimit),
        }
    }
}

/// A plan that was chosen for one decision.
#[derive(Debug)]
pub struct Chosen(Plan);

impl Deref for Chosen {
    type Target = Plan;

    fn deref(&self) -> &Plan {
        &self.0
    }
}

impl Rules for Tiers {
    type Rule = Plan;
    type Chosen<'a> = Chosen;

    fn choose(&self, key: &[u8]) -> Chosen {
        Chosen(self.plan(key, None))
    }

    fn same_for_all(&self) -> Option<&Plan> {
        None
    }
}

/// One tier, in one version of the rules.
#[derive(Debug)]
pub struct Tier {
    book: Arc<Book>,
    access: Access,
}

impl Tiers {
    /// A tier by its name, as it is now: whoever holds it decides under this version of the rules.
    ///
    /// # Errors
    /// There is none of that name.
    pub(crate) fn named(&self, name: &str) -> Result<Tier, UnknownTier> {
        let book = self.book.load_full();
        match book.tiers.get(name) {
            Some(access) => Ok(Tier { access: access.clone(), book }),
            None => {
                let mut known: Vec<_> = book.tiers.keys().cloned().collect();
                known.sort_unstable();
                Err(UnknownTier { name: name.into(), known })
            }
        }
    }
}

impl Rules for Tier {
    type Rule = Plan;
    type Chosen<'a> = Chosen;

    fn choose(&self, key: &[u8]) -> Chosen {
        Chosen(self.book.plan(key, &self.access))
    }

    fn same_for_all(&self) -> Option<&Plan> {
        None
    }
}

/// No tier has the name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownTier {
    /// The name.
    pub name: Box<str>,
    /// The names there are.
    pub known: Vec<Box<str>>,
}

impl fmt::Display for UnknownTier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "no tier is named \"{}\"; ", self.name)?;
        if self.known.is_empty() {
            return write!(f, "there are no tiers");
        }
        write!(f, "there is {}", self.known.join(", "))
    }
}

impl std::error::Error for UnknownTier {}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiers").field("book", &self.book.load()).finish_non_exhaustive()
    }
}
