//! Tiers and overrides: rules that differ between clients, and that can change while the limiter is in use.
//!
//! A [`ClientRule`] is the rule of one client: a policy, no limit, or blocked. The state of a key contains what was used
//! under each policy that the key was checked under, and a new policy takes it over. So clients keep what they have used
//! if their tier, their override or all rules change. Each decision uses one version of the rules: the version that was
//! in force when the decision began.

mod access;
mod client_rule;

use std::borrow::Cow;
use std::collections::HashMap;
use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use arc_swap::{ArcSwap, Guard};
use tallygate_core::Tick;

pub use crate::ask::UnknownTier;
pub use crate::rule_source::RuleSource;
pub use access::{Access, Override, OverrideEnd};
pub use client_rule::ClientRule;

/// Policies by tier and by client.
///
/// ```
/// use tallygate::tiers::Access;
/// use tallygate::{Ask, Policy, RateLimiter, Tiers};
///
/// let free = Policy::token_bucket(2).per_minute().build()?;
/// let pro = Policy::token_bucket(5).per_minute().build()?;
/// let limiter = RateLimiter::tiered("api", Tiers::new(free).tier("pro", pro));
///
/// assert_eq!(limiter.check("alice")?.remaining, 1);
/// let pro = |key| Ask::new(key).tier("pro");
/// assert_eq!(limiter.check(pro("alice"))?.remaining, 3); // usage is kept
/// limiter.set_override("mallory", Access::Blocked, None);
/// assert!(!limiter.check("mallory")?.allowed);
/// let unknown = limiter.check(Ask::new("alice").tier("gold")).unwrap_err();
/// assert_eq!(unknown.to_string(), "no tier is named \"gold\"; the only tier is pro");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Tiers {
    rules: ArcSwap<RuleSet>,
    resolver: Option<Resolver>,
}

type Resolver = Box<dyn Fn(&[u8]) -> Option<Cow<'static, str>> + Send + Sync>;

/// One version of all rules.
#[derive(Clone, Debug)]
struct RuleSet {
    /// The rule of clients without a tier and without an override.
    base: ClientRule,
    /// The rules of the tiers, sorted by name.
    tiers: Arc<Vec<(Box<str>, ClientRule)>>,
    /// Overrides that belong to the rules, and change with them.
    rule_overrides: Arc<HashMap<Box<[u8]>, Access>>,
    /// Overrides that were set at run time. They come first, and stay when the rules change.
    overrides: Arc<HashMap<Box<[u8]>, Override>>,
}

impl Tiers {
    /// Creates rules with the access of clients without a tier.
    #[must_use]
    pub fn new(base: impl Into<Access>) -> Self {
        let rules = RuleSet {
            base: ClientRule::of(base),
            tiers: Arc::default(),
            rule_overrides: Arc::default(),
            overrides: Arc::default(),
        };
        Self { rules: ArcSwap::from_pointee(rules), resolver: None }
    }

    /// Adds a tier.
    #[must_use]
    pub fn tier(self, name: impl Into<Box<str>>, access: impl Into<Access>) -> Self {
        let mut rules = Arc::unwrap_or_clone(self.rules.into_inner());
        let (name, rule) = (name.into(), ClientRule::of(access));
        let place = rules.place_of(&name);
        let tiers = Arc::make_mut(&mut rules.tiers);
        match place {
            Ok(tier) => tiers[tier].1 = rule,
            Err(next) => tiers.insert(next, (name, rule)),
        }
        Self { rules: ArcSwap::from_pointee(rules), resolver: self.resolver }
    }

    /// Adds an exception for one client, whatever its tier.
    ///
    /// It belongs to the rules, and changes with them in one step. An override that is
    /// [set at run time](crate::RateLimiter::set_override) comes first while it is in force.
    ///
    /// ```
    /// use tallygate::tiers::Access;
    /// use tallygate::{Policy, RateLimiter, Tiers};
    ///
    /// let rules = |limit| Policy::token_bucket(limit).per_minute().build().map(Tiers::new);
    /// let limiter = RateLimiter::tiered("api", rules(2)?.overridden("mallory", Access::Blocked));
    /// assert!(!limiter.check("mallory")?.allowed);
    ///
    /// limiter.set_override("mallory", Access::Unlimited, None);
    /// assert!(limiter.check("mallory")?.allowed);
    /// limiter.remove_override("mallory");
    /// assert!(!limiter.check("mallory")?.allowed); // the override of the rules still applies
    ///
    /// limiter.replace(&rules(5)?);
    /// assert!(limiter.check("mallory")?.allowed);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn overridden(self, key: impl AsRef<[u8]>, access: impl Into<Access>) -> Self {
        let mut rules = Arc::unwrap_or_clone(self.rules.into_inner());
        Arc::make_mut(&mut rules.rule_overrides).insert(key.as_ref().into(), access.into());
        Self { rules: ArcSwap::from_pointee(rules), resolver: self.resolver }
    }

    /// Sets a function that returns the tier of a key. If there is no tier of that name, the key has no tier.
    #[must_use]
    pub fn resolved_by(
        mut self,
        resolver: impl Fn(&[u8]) -> Option<Cow<'static, str>> + Send + Sync + 'static,
    ) -> Self {
        self.resolver = Some(Box::new(resolver));
        self
    }

    /// Returns the access of clients without a tier.
    #[must_use]
    pub fn base(&self) -> Access {
        self.rules.load().base.access.clone()
    }

    /// Returns the tiers with their access, sorted by name.
    #[must_use]
    pub fn by_name(&self) -> Vec<(Box<str>, Access)> {
        let rules = self.rules.load();
        rules.tiers.iter().map(|(name, rule)| (name.clone(), rule.access.clone())).collect()
    }

    /// Returns the overrides of the rules, sorted by key. Overrides that were set at run time are not included.
    #[must_use]
    pub fn by_key(&self) -> Vec<(Box<[u8]>, Access)> {
        let rules = self.rules.load();
        let overrides = rules.rule_overrides.iter();
        let mut list: Vec<_> =
            overrides.map(|(key, access)| (key.clone(), access.clone())).collect();
        list.sort_by(|(one, _), (other, _)| one.cmp(other));
        list
    }

    /// Returns the override of the rules for a key.
    #[must_use]
    pub fn of_key(&self, key: &[u8]) -> Option<Access> {
        self.rules.load().rule_overrides.get(key).cloned()
    }

    /// Returns a copy of the rules for another limiter: the base, the tiers and their overrides, without the overrides
    /// that were set at run time and without the resolver.
    #[must_use]
    pub fn copy(&self) -> Self {
        let rules = RuleSet { overrides: Arc::default(), ..RuleSet::clone(&self.rules.load()) };
        Self { rules: ArcSwap::from_pointee(rules), resolver: None }
    }

    /// Returns other rules with the overrides that were set at run time in these, and without the resolver.
    ///
    /// A program that replaces the rules of several limiters together makes new limiters of them on the same stores. A
    /// request that keeps the old limiters is then decided under the old rules only.
    #[must_use]
    pub fn replaced_by(&self, new: &Self) -> Self {
        let rules = self.rules.load().replaced_by(&new.rules.load());
        Self { rules: ArcSwap::from_pointee(rules), resolver: None }
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

    /// Returns the overrides that were set at run time and have not ended, and drops the others.
    pub(crate) fn overrides(&self, now: Tick) -> Vec<(Box<[u8]>, Override)> {
        self.change_overrides(|overrides| overrides.retain(|_, set| set.is_in_force(now)));
        let rules = self.rules.load();
        rules.overrides.iter().map(|(key, set)| (key.clone(), set.clone())).collect()
    }

    fn change_overrides(&self, mut change: impl FnMut(&mut HashMap<Box<[u8]>, Override>)) {
        self.rules.rcu(|rules| {
            let mut rules = RuleSet::clone(rules);
            change(Arc::make_mut(&mut rules.overrides));
            rules
        });
    }

    /// Replaces the rules and their overrides. The resolver and the overrides that were set at run time stay.
    pub(crate) fn replace(&self, new: &Self) {
        let new = new.rules.load();
        self.rules.rcu(|old| old.replaced_by(&new));
    }

    fn rule(&self, key: &[u8]) -> RuleHandle {
        let rules = self.rules.load();
        let tier = self.resolver.as_ref().and_then(|resolver| resolver(key));
        let tier = tier.and_then(|tier| rules.place_of(&tier).ok());
        RuleHandle::of(rules, tier, key)
    }
}

impl RuleSet {
    /// Returns new rules with the overrides that were set at run time in these.
    fn replaced_by(&self, new: &Self) -> Self {
        Self {
            base: ClientRule::of(reused(
                &new.base.access,
                [&self.base.access]
                    .into_iter()
                    .chain(self.tiers.iter().map(|(_, rule)| &rule.access)),
            )),
            tiers: new
                .tiers
                .iter()
                .map(|(name, rule)| {
                    let same = self.place_of(name).ok().map(|tier| &self.tiers[tier].1.access);
                    let before = same.into_iter().chain([&self.base.access]);
                    (name.clone(), ClientRule::of(reused(&rule.access, before)))
                })
                .collect::<Vec<_>>()
                .into(),
            rule_overrides: new
                .rule_overrides
                .iter()
                .map(|(key, access)| {
                    let before =
                        self.rule_overrides.get(key).into_iter().chain([&self.base.access]);
                    (key.clone(), reused(access, before))
                })
                .collect::<HashMap<_, _>>()
                .into(),
            overrides: self.overrides.clone(),
        }
    }

    /// Returns the index of a tier, or the index at which it would be inserted.
    fn place_of(&self, tier: &str) -> Result<usize, usize> {
        self.tiers.binary_search_by(|(name, _)| (**name).cmp(tier))
    }

    /// Returns the rule of a tier, or of clients without one.
    #[inline]
    fn rule_of(&self, tier: Option<usize>) -> &ClientRule {
        tier.map_or(&self.base, |tier| &self.tiers[tier].1)
    }
}

/// Returns the old access if it equals the new one, so that states need not be carried over.
fn reused<'a>(new: &'a Access, mut before: impl Iterator<Item = &'a Access>) -> Access {
    before.find(|old| *old == new).unwrap_or(new).clone()
}

/// The rule of a key, for one decision.
#[derive(Debug)]
pub struct ChosenRule(RuleHandle);

#[derive(Debug)]
enum RuleHandle {
    /// The rule of a tier, or of clients without one, in place: threads that use it write to no shared memory.
    Shared(Guard<Arc<RuleSet>>, Option<usize>),
    /// The rule of a client with an override.
    Owned(ClientRule),
}

impl RuleHandle {
    /// Returns the rule of a key in a tier.
    fn of(rules: Guard<Arc<RuleSet>>, tier: Option<usize>, key: &[u8]) -> Self {
        let set = if rules.overrides.is_empty() { None } else { rules.overrides.get(key) };
        let fixed =
            if rules.rule_overrides.is_empty() { None } else { rules.rule_overrides.get(key) };
        if set.is_none() && fixed.is_none() {
            return Self::Shared(rules, tier);
        }
        let access = fixed.unwrap_or(&rules.rule_of(tier).access).clone();
        Self::Owned(ClientRule { set: set.cloned(), access })
    }
}

impl Clone for ChosenRule {
    fn clone(&self) -> Self {
        Self(RuleHandle::Owned(ClientRule::clone(self)))
    }
}

impl Deref for ChosenRule {
    type Target = ClientRule;

    #[inline]
    fn deref(&self) -> &ClientRule {
        match &self.0 {
            RuleHandle::Shared(rules, tier) => rules.rule_of(*tier),
            RuleHandle::Owned(rule) => rule,
        }
    }
}

impl From<ClientRule> for ChosenRule {
    fn from(rule: ClientRule) -> Self {
        Self(RuleHandle::Owned(rule))
    }
}

impl RuleSource for Tiers {
    type Rule = ClientRule;
    type Ref<'a> = ChosenRule;

    fn choose(&self, key: &[u8]) -> ChosenRule {
        ChosenRule(self.rule(key))
    }

    fn choose_in(&self, tier: &str, key: &[u8]) -> Result<ChosenRule, UnknownTier> {
        let rules = self.rules.load();
        let Ok(place) = rules.place_of(tier) else {
            let known = rules.tiers.iter().map(|(name, _)| name.clone()).collect();
            return Err(UnknownTier { name: tier.into(), known });
        };
        Ok(ChosenRule(RuleHandle::of(rules, Some(place), key)))
    }

    fn default_rule(&self) -> ChosenRule {
        ChosenRule(RuleHandle::Shared(self.rules.load(), None))
    }

    fn same_for_all(&self) -> Option<&ClientRule> {
        None
    }
}

impl fmt::Debug for Tiers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tiers").field("rules", &self.rules.load()).finish_non_exhaustive()
    }
}
