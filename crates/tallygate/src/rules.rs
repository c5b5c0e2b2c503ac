//! Which rule a key is decided by.
//!
//! Nearly always it is the same for all: any [`Algorithm`] is its own choice, at no cost. [`Tiers`]
//! choose by tier and key.
//!
//! [`Tiers`]: crate::Tiers

use tallygate_core::Algorithm;

use crate::ask::UnknownTier;
use crate::store::Lent;

/// Chooses the rule for a key.
pub trait Rules {
    /// What is chosen.
    type Rule: Algorithm + Sync;

    /// How it is lent.
    type Chosen<'a>: Lent<Self::Rule> + Clone
    where
        Self: 'a;

    /// The rule for a key, for one decision.
    fn choose(&self, key: &[u8]) -> Self::Chosen<'_>;

    /// The rule for a key in a tier, for one decision. Rules without tiers know none.
    ///
    /// # Errors
    /// There is no tier of that name.
    #[cold]
    fn choose_in(&self, tier: &str, _key: &[u8]) -> Result<Self::Chosen<'_>, UnknownTier> {
        Err(UnknownTier { name: tier.into(), known: Vec::new() })
    }

    /// The rule for all keys, if there is only one.
    fn same_for_all(&self) -> Option<&Self::Rule>;
}

impl<A: Algorithm + Sync> Rules for A {
    type Rule = A;
    type Chosen<'a>
        = &'a A
    where
        A: 'a;

    #[inline]
    fn choose(&self, _: &[u8]) -> &A {
        self
    }

    #[inline]
    fn same_for_all(&self) -> Option<&A> {
        Some(self)
    }
}
