//! Which checks of a policy are decided without a call.

use std::sync::Arc;
use std::time::Duration;

use tallygate::{Kind, Limit, Policy, Ticks};

use super::NANOS_PER_MICRO;
use crate::lease::Leases;

/// How the checks of a policy are decided.
#[derive(Debug)]
pub(crate) struct Terms {
    /// In microseconds.
    pub(super) policy: Arc<Policy>,
    pub(super) caches_denials: bool,
    pub(super) leases: Option<Leases>,
    /// How long no slice is requested after the quota was used up.
    pub(super) pace: Ticks,
    /// Whether a denial holds for its own cost only, and not for larger ones.
    pub(super) denies_one_cost: bool,
    /// How long a check waits for others to share its call, while a call is in flight.
    pub(super) max_wait: Ticks,
}

/// Which fraction of the life of a lease no slice is requested after the quota was used up.
const REST_FRACTION: u64 = 8;
/// Which fraction of the time budget a check waits for others to share its call.
const WAIT_FRACTION: u32 = 16;

impl Terms {
    pub(crate) fn new(policy: Arc<Policy>, caches_denials: bool, leases: Option<Leases>) -> Self {
        let leases = leases.filter(|_| Leases::serve(&policy));
        let leases = leases.and_then(|leases| leases.shortened_for(&policy));
        let has_penalty = policy.limits().iter().any(|limit| limit.penalty().is_some());
        let denies_one_cost =
            policy.limits().iter().any(|limit| limit.numbers().kind == Kind::SlidingWindowLog);
        Self {
            // A denial counts towards a penalty, so the store has to make it.
            caches_denials: caches_denials && !has_penalty,
            pace: leases.map_or(Ticks::ZERO, |leases| pace(&policy, leases)),
            leases,
            denies_one_cost,
            policy,
            max_wait: Ticks(1_000_000),
        }
    }

    /// Sets the time budget: checks wait for a small part of it to share a call.
    pub(crate) fn within(mut self, budget: Duration) -> Self {
        self.max_wait = Ticks::from_duration(budget / WAIT_FRACTION);
        self
    }

    /// Returns the leases of the policy, if it has any.
    pub(crate) const fn leases(&self) -> Option<Leases> {
        self.leases
    }

    /// Returns half the life of a lease, in which the demand is counted.
    pub(super) fn half_life(&self) -> Ticks {
        Ticks(self.leases.map_or(0, |leases| leases.in_process().0 / 2).max(1))
    }
}

/// Returns a time in which a bucket does not overflow even if no request comes for a quarter of it.
fn pace(policy: &Policy, leases: Leases) -> Ticks {
    let longest = leases.in_process().0 / REST_FRACTION;
    let fills = policy.plain().map(Limit::numbers).filter(|n| n.kind.is_bucket()).map(|n| {
        let fills = u128::from(n.burst) * u128::from(n.window.0) * u128::from(NANOS_PER_MICRO)
            / u128::from(n.limit.max(1));
        u64::try_from(fills / 4).unwrap_or(u64::MAX)
    });
    Ticks(longest.min(fills.unwrap_or(u64::MAX)))
}
