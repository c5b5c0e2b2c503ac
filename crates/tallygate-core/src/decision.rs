//! The result of a check: [`Decision`], and [`Answer`] for callers that need less than all of it.

use crate::{Algorithm, Cost, Fit, Limit, Tick, Ticks};

/// The result of a check: whether the request is allowed, and what is left of the quota.
///
/// A denial is a normal result, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[must_use = "ignoring a decision limits nothing"]
pub struct Decision {
    /// Whether the request is allowed.
    pub allowed: bool,
    /// The capacity, from which `remaining` counts down.
    pub limit: Cost,
    /// The largest cost that would be allowed right after this decision; 0 if the client is in debt.
    pub remaining: Cost,
    /// The exact wait after which the same request would be allowed if no other request came; 0 if it was
    /// allowed.
    ///
    /// `None` if waiting does not help: the cost exceeds the capacity, the client is blocked, or all requests
    /// that may be in flight are in flight. `Ticks(u64::MAX)` means that the request is never allowed within
    /// the range of [`Tick`].
    pub retry_after: Option<Ticks>,
    /// The time until the whole capacity is available again.
    pub reset_after: Ticks,
    /// How long the caller should delay an allowed request so that the output is even (leaky bucket only; 0
    /// otherwise).
    pub delay: Ticks,
    /// The limit that `limit` and `remaining` describe: its index in
    /// [`Policy::limits`](crate::Policy::limits), the first one with the least remaining.
    ///
    /// `None` if no limit applies: the client is unlimited or blocked, or the store is unavailable.
    pub scarcest: Option<usize>,
    /// The first limit that denied the request: its index in [`Policy::limits`](crate::Policy::limits).
    ///
    /// `None` if the request was allowed, and if something other than a limit denied it: the client is
    /// blocked, or other requests wait ahead of it.
    pub denied_by: Option<usize>,
    /// The first [shadow limit](crate::LimitBuilder::shadow) that would have denied the request.
    pub shadow_denied_by: Option<usize>,
    /// The quota of the limit that the decision is [about](Self::decided_by): a number of units per window.
    ///
    /// `None` if no limit applies, and for an algorithm that is not one of the six.
    pub quota: Option<Quota>,
    /// The component that made the decision.
    pub source: Source,
}

/// The quota of a limit: a number of units per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Quota {
    /// L: the units that are earned per window.
    pub amount: Cost,
    /// W: the window.
    pub window: Ticks,
}

impl Decision {
    /// Returns the index of the limit that the decision is about: the limit that denied the request or, if none
    /// did, the [scarcest](Self::scarcest) one.
    ///
    /// [`Policy::decided_by`](crate::Policy::decided_by) and [`Algorithm::limit`] return the limit itself, with
    /// its name, quota and window. Pass the index to the rule that made the decision: after a configuration
    /// change, another rule may have other limits.
    #[must_use]
    pub const fn decided_by(&self) -> Option<usize> {
        match self.denied_by {
            Some(limit) => Some(limit),
            None => self.scarcest,
        }
    }

    /// Returns whether no limit applies to the client. `limit` and `remaining` are then `Cost::MAX`.
    #[must_use]
    pub const fn is_unlimited(&self) -> bool {
        self.allowed && self.scarcest.is_none() && self.limit == Cost::MAX
    }

    /// Returns whether the limits allowed or denied the request, or the store is unavailable.
    ///
    /// `allowed` alone cannot tell a client that used up its quota from a store that does not answer. A service
    /// usually reports the first as HTTP status 429 and the second as 503.
    ///
    /// ```
    /// use tallygate_core::{Decision, Verdict};
    ///
    /// fn status(decision: &Decision) -> u16 {
    ///     match decision.verdict() {
    ///         Verdict::Allowed | Verdict::Unavailable { allowed: true } => 200,
    ///         Verdict::Denied => 429,
    ///         Verdict::Unavailable { allowed: false } => 503,
    ///     }
    /// }
    /// ```
    #[must_use]
    pub const fn verdict(&self) -> Verdict {
        match (self.source, self.allowed) {
            (Source::FailedOpen | Source::FailedClosed, allowed) => {
                Verdict::Unavailable { allowed }
            }
            (_, true) => Verdict::Allowed,
            (_, false) => Verdict::Denied,
        }
    }
}

/// The outcome of a check, with an outage apart from a denial: see [`Decision::verdict`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Verdict {
    /// The limits allowed the request.
    Allowed,
    /// A limit denied the request, the client is blocked, or the store has too much to do.
    Denied,
    /// The store is unavailable. Its failure setting decided, and no limit was checked.
    Unavailable {
        /// Whether the failure setting allows requests.
        allowed: bool,
    },
}

/// The component that made a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(
    feature = "serde",
    derive(serde::Serialize, serde::Deserialize),
    serde(rename_all = "snake_case")
)]
#[non_exhaustive]
pub enum Source {
    /// The store that keeps the client's state.
    #[default]
    Store,
    /// This process, from units that it took from the store in advance.
    Lease,
    /// This process: the store denied the client, and the retry time that the store returned has not come.
    DenyCache,
    /// A limiter in this process, because the store is unavailable.
    Local,
    /// No component: the store is unavailable, and the failure setting allows all requests.
    FailedOpen,
    /// No component: the store is unavailable, and the failure setting denies all requests.
    FailedClosed,
    /// This process: the store is available, but could not decide this request within its time budget. The
    /// request is denied, and the caller may retry soon.
    Overloaded,
}

impl Source {
    /// Returns whether a limit was checked. Otherwise the remaining units are unknown.
    #[must_use]
    pub const fn is_answered(self) -> bool {
        match self {
            Self::Store | Self::Lease | Self::DenyCache | Self::Local => true,
            Self::FailedOpen | Self::FailedClosed | Self::Overloaded => false,
        }
    }

    /// Returns the name that metrics and replies use.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Lease => "lease",
            Self::DenyCache => "deny_cache",
            Self::Local => "local",
            Self::FailedOpen => "failed_open",
            Self::FailedClosed => "failed_closed",
            Self::Overloaded => "overloaded",
        }
    }
}

/// A decision and the time at which it was made, by the clock of the component that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[must_use = "ignoring a decision limits nothing"]
pub struct Timed {
    /// The decision.
    pub decision: Decision,
    /// The time of the decision.
    pub at: Tick,
}

/// The result type of a check that the caller asks for: `bool`, [`Decision`] or [`Timed`].
///
/// The choice saves work: a `bool` is computed without a division.
pub trait Answer: Sized + Send + 'static {
    /// Whether the answer has more than allowed or denied.
    const HAS_DETAILS: bool;

    /// Creates the answer of one rule from its state after the decision.
    ///
    /// `shadow_denied_by` is the first shadow limit that would have denied the request.
    fn from_outcome<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_denied_by: Option<usize>,
    ) -> Self;

    /// Creates the answer from a complete decision that was made at `now`.
    fn from_decision(decision: Decision, now: Tick) -> Self;

    /// Adds `lateness` to the waits of the answer.
    ///
    /// A store decides the request of a late caller at the time of the state's last change. The waits must
    /// count from the caller's time, which is earlier by `lateness`.
    #[must_use]
    fn with_lateness(self, lateness: Ticks) -> Self;

    /// Returns whether the request is allowed.
    fn is_allowed(&self) -> bool;

    /// Combines the answers of two limits: allowed if both allow it, with the least remaining units and the
    /// longest wait.
    #[must_use]
    fn merge(self, other: Self) -> Self;
}

/// The outcome of a request at one limit. Each variant has the cost of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The limit allowed the request and charged its cost.
    Charged(Cost),
    /// The limit allows the request but did not charge it: another limit denied it, or the operation charges
    /// nothing (a refund, a reset).
    NotCharged(Cost),
    /// The limit denied the request.
    Denied(Cost),
}

impl Answer for bool {
    const HAS_DETAILS: Self = false;

    #[inline]
    fn from_outcome<A: Algorithm>(
        _: &A,
        _: &A::State,
        _: Tick,
        outcome: Outcome,
        _: Option<usize>,
    ) -> Self {
        !matches!(outcome, Outcome::Denied(_))
    }

    #[inline]
    fn from_decision(decision: Decision, _: Tick) -> Self {
        decision.allowed
    }

    #[inline]
    fn with_lateness(self, _: Ticks) -> Self {
        self
    }

    #[inline]
    fn is_allowed(&self) -> bool {
        *self
    }

    #[inline]
    fn merge(self, other: Self) -> Self {
        self && other
    }
}

impl Answer for Decision {
    const HAS_DETAILS: bool = true;

    fn from_outcome<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_denied_by: Option<usize>,
    ) -> Self {
        let (charged, retry_after) = match outcome {
            Outcome::Charged(cost) => (Some(cost), Some(Ticks::ZERO)),
            Outcome::NotCharged(_) => (None, Some(Ticks::ZERO)),
            Outcome::Denied(cost) => match rule.fit(state, now, cost) {
                Fit::Now => (None, Some(Ticks::ZERO)),
                Fit::After(wait) => (None, Some(wait)),
                Fit::Never => (None, None),
            },
        };
        let denied_by = match outcome {
            Outcome::Denied(cost) => rule.denying_limit(state, now, cost, false),
            _ => None,
        };
        let facts = rule.facts(state, now, charged);
        let denying = denied_by.filter(|limit| facts.scarcest != Some(*limit));
        let quota = denying.and_then(|limit| rule.limit(limit, now)).map(Limit::quota);
        Self {
            allowed: !matches!(outcome, Outcome::Denied(_)),
            limit: facts.limit,
            remaining: facts.remaining,
            retry_after,
            reset_after: facts.reset_after,
            delay: facts.delay,
            scarcest: facts.scarcest,
            denied_by,
            shadow_denied_by,
            quota: quota.or(facts.quota),
            source: Source::Store,
        }
    }

    fn from_decision(decision: Decision, _: Tick) -> Self {
        decision
    }

    fn with_lateness(self, lateness: Ticks) -> Self {
        let later = |wait: Ticks| if wait == Ticks::ZERO { wait } else { wait.plus(lateness) };
        Self {
            retry_after: self.retry_after.map(later),
            reset_after: later(self.reset_after),
            delay: later(self.delay),
            ..self
        }
    }

    fn is_allowed(&self) -> bool {
        self.allowed
    }

    fn merge(self, other: Self) -> Self {
        let tightest = if other.remaining < self.remaining { other } else { self };
        let deciding = [self, other].into_iter().find(|decision| decision.denied_by.is_some());
        Self {
            allowed: self.allowed && other.allowed,
            limit: tightest.limit,
            remaining: tightest.remaining,
            retry_after: self.retry_after.zip(other.retry_after).map(|(a, b)| a.max(b)),
            reset_after: self.reset_after.max(other.reset_after),
            delay: self.delay.max(other.delay),
            scarcest: tightest.scarcest,
            denied_by: self.denied_by.or(other.denied_by),
            shadow_denied_by: self.shadow_denied_by.or(other.shadow_denied_by),
            quota: deciding.unwrap_or(tightest).quota,
            source: if self.source == Source::Store { other.source } else { self.source },
        }
    }
}

impl Answer for Timed {
    const HAS_DETAILS: bool = true;

    fn from_outcome<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_denied_by: Option<usize>,
    ) -> Self {
        Self {
            decision: Decision::from_outcome(rule, state, now, outcome, shadow_denied_by),
            at: now,
        }
    }

    fn from_decision(decision: Decision, now: Tick) -> Self {
        Self { decision, at: now }
    }

    fn with_lateness(self, lateness: Ticks) -> Self {
        Self { decision: self.decision.with_lateness(lateness), at: self.at }
    }

    fn is_allowed(&self) -> bool {
        self.decision.allowed
    }

    fn merge(self, other: Self) -> Self {
        Self { decision: self.decision.merge(other.decision), at: self.at.max(other.at) }
    }
}
