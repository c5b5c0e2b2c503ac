//! Decides while Redis is unavailable.

mod debt;
mod local;
mod share;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tallygate::algorithm::Algorithm as _;
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Decision, Source, Tick, Ticks};

pub(crate) use self::debt::{
    DebtCharge, NextDebts, SentCharge, TakenDebt, pay_again_after, pay_each,
};
pub(crate) use self::local::{LocalLimiter, SHARED_FOR, ShareCharge};

/// The failure setting: it decides while Redis is unreachable, does not answer in time, or answers with an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnFailure {
    /// Allows every request: the default. For limits that protect little, where an outage of the service would cost more.
    #[default]
    Allow,
    /// Denies every request. For limits that protect much: logins, payments.
    Deny,
    /// Lets this process decide by itself, for its share of the quota. When Redis is available again, the process charges
    /// the units that it allowed there. For one second after that, a request needs both the share and Redis: other
    /// processes may not have charged their units yet.
    ///
    /// Over any interval and any number of outages, each limit of a policy allows at most its bound plus one burst, and
    /// the long-run rate is the policy's. A bucket is charged into debt. A window forgets at its end, so the units
    /// that do not fit into the present window stay unpaid, and the process charges them in the next one. Until then
    /// they count against its share: an outage that begins after Redis has allowed the quota of a window allows one
    /// share, which the following window pays for.
    ///
    /// Of a policy of several limits, each limit has its own share and its own unpaid units, and a request needs all of
    /// them. The following window of each limit pays for its units: an outage on a day on which Redis has allowed the quota
    /// of the day allows one share, and the next day pays for it.
    Local {
        /// How many processes share the quota.
        instances: u32,
    },
}

impl OnFailure {
    /// Returns the name of the setting in logs.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
            Self::Local { .. } => "local",
        }
    }
}

/// Returns the decision that allows a request without knowing how many units remain.
pub(crate) fn failed_open(rule: &ClientRule, now: Tick) -> Decision {
    let retry_after = Some(Ticks::ZERO);
    Decision { allowed: true, retry_after, source: Source::FailedOpen, ..failed_closed(rule, now) }
}

/// Returns the decision that denies a request without knowing when it would be allowed: the client retries after a second.
pub(crate) fn failed_closed(rule: &ClientRule, now: Tick) -> Decision {
    let limit = match rule.access(now) {
        Access::Limited(policy) => policy.capacity(),
        Access::Unlimited => Cost::MAX,
        Access::Blocked => 0,
    };
    Decision { limit, ..unknown_denial() }
}

/// Returns a denial without the state of the limit.
fn unknown_denial() -> Decision {
    Decision {
        allowed: false,
        limit: 0,
        remaining: 0,
        retry_after: Some(Ticks(RETRY_AFTER)),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        scarcest: None,
        denied_by: None,
        shadow_denied_by: None,
        quota: None,
        source: Source::FailedClosed,
    }
}

/// Returns the denial while Redis answers, but not in time. The client retries after one to two time budgets, at random, so
/// that not all clients retry at once.
pub(crate) fn overloaded(rule: &ClientRule, now: Tick, budget: Duration) -> Decision {
    let budget = Ticks::from_duration(budget).0.max(1);
    let retry_after = Some(Ticks(budget.saturating_add(fastrand::u64(0..budget))));
    Decision { retry_after, source: Source::Overloaded, ..failed_closed(rule, now) }
}

const RETRY_AFTER: u64 = 1_000_000_000;

/// Allows one log message per second.
pub(crate) struct LogThrottle(AtomicU64);

impl LogThrottle {
    pub(crate) const fn new() -> Self {
        Self(AtomicU64::new(0))
    }

    pub(crate) fn allows(&self) -> bool {
        static START: LazyLock<Instant> = LazyLock::new(Instant::now);
        let second = START.elapsed().as_secs() + 1;
        self.0.swap(second, Ordering::Relaxed) != second
    }
}
