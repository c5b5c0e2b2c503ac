//! The access of a client: by a policy, without a limit, or blocked.

use std::fmt;
use std::hash::{Hash as _, Hasher};
use std::sync::Arc;
use std::time::Duration;

use tallygate_core::{Limit, Policy, Tick, Ticks};

/// The access of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Access {
    /// The requests that a policy allows.
    Limited(Arc<Policy>),
    /// All requests. Units that were used before are still earned back meanwhile.
    Unlimited,
    /// No requests.
    Blocked,
}

impl Access {
    /// Returns the limits of the policy; none for a client that is unlimited or blocked.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        match self {
            Self::Limited(policy) => policy.limits(),
            Self::Unlimited | Self::Blocked => &[],
        }
    }

    /// Hashes everything that a decision depends on.
    pub(super) fn hash_into(&self, hasher: &mut impl Hasher) {
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

/// An exception for one client that was set at run time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The access of the client.
    pub access: Access,
    /// When the override ends, by the clock of the store; `None` if it does not end.
    pub until: Option<Tick>,
}

/// The lifetime of an override: see [`set_override`](crate::RateLimiter::set_override).
///
/// It is made from a [`Duration`], from a time by the clock of the store ([`Tick`]), or from `None` for an override that
/// does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideEnd {
    /// Until it is removed.
    Forever,
    /// Until a time by the clock of the store.
    Until(Tick),
    /// For this long from now on.
    For(Ticks),
}

impl From<Option<Tick>> for OverrideEnd {
    fn from(until: Option<Tick>) -> Self {
        until.map_or(Self::Forever, Self::Until)
    }
}

impl From<Tick> for OverrideEnd {
    fn from(until: Tick) -> Self {
        Self::Until(until)
    }
}

impl From<Ticks> for OverrideEnd {
    fn from(span: Ticks) -> Self {
        Self::For(span)
    }
}

impl From<Duration> for OverrideEnd {
    fn from(duration: Duration) -> Self {
        Self::For(duration.into())
    }
}

impl OverrideEnd {
    /// Returns the end of an override that is set at `now`. One that ends after the last tick does not end.
    pub(crate) fn end(self, now: impl FnOnce() -> Tick) -> Option<Tick> {
        match self {
            Self::Forever => None,
            Self::Until(until) => Some(until),
            Self::For(span) => now().after(span),
        }
    }
}

impl Override {
    pub(super) fn is_in_force(&self, now: Tick) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}
