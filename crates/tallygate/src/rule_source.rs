//! [`RuleSource`]: the choice of a rule for a key.
//!
//! In most limiters, one rule applies to all keys: every [`Algorithm`] is its own source, at no cost. [`Tiers`] choose by
//! tier and key.
//!
//! [`Tiers`]: crate::Tiers

use tallygate_core::Algorithm;

use crate::ask::UnknownTier;
use crate::storage::RuleRef;

/// Chooses the rule for a key.
pub trait RuleSource {
    /// The type of the rules.
    type Rule: Algorithm + Sync;

    /// A reference to a rule, for one decision.
    type Ref<'a>: RuleRef<Self::Rule> + Clone
    where
        Self: 'a;

    /// Returns the rule for a key.
    fn choose(&self, key: &[u8]) -> Self::Ref<'_>;

    /// Returns the rule for a key in a tier.
    ///
    /// # Errors
    /// Fails if there is no such tier.
    #[cold]
    fn choose_in(&self, tier: &str, _key: &[u8]) -> Result<Self::Ref<'_>, UnknownTier> {
        Err(UnknownTier { name: tier.into(), known: Vec::new() })
    }

    /// Returns a rule that can read the state of any key, whatever rule decides on the key: for sweeps.
    fn default_rule(&self) -> Self::Ref<'_>;

    /// Returns the rule for all keys, if there is only one.
    fn same_for_all(&self) -> Option<&Self::Rule>;
}

impl<A: Algorithm + Sync> RuleSource for A {
    type Rule = A;
    type Ref<'a>
        = &'a A
    where
        A: 'a;

    #[inline]
    fn choose(&self, _: &[u8]) -> &A {
        self
    }

    fn default_rule(&self) -> &A {
        self
    }

    #[inline]
    fn same_for_all(&self) -> Option<&A> {
        Some(self)
    }
}
