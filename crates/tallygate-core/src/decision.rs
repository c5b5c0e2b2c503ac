//! What comes back: a bare yes or no, or everything a caller needs to behave well.

use crate::{Algorithm, Cost, Fit, Tick, Ticks};

/// The answer to *may this client do this now?*
///
/// A denial is an answer, not an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a decision that nobody reads limits nothing"]
pub struct Decision {
    /// Whether the request may go ahead.
    pub allowed: bool,
    /// The capacity: what `remaining` counts down from.
    pub limit: Cost,
    /// The largest cost that would be admitted right after this decision; 0 in debt.
    pub remaining: Cost,
    /// The least wait at which the same request would be admitted if nothing else came: 0 when it
    /// was, `None` when no wait will do: its cost exceeds the capacity, it is blocked, or it lacks a
    /// place that only somebody else can give back. The largest number of ticks means that time ends
    /// first.
    pub retry_after: Option<Ticks>,
    /// The time until nothing is used any more.
    pub reset_after: Ticks,
    /// How long an admitted request should wait so that the output is flat (leaky bucket; else 0).
    pub delay: Ticks,
    /// Which limit `limit` and `remaining` belong to: its index in [`Policy::limits`](crate::Policy::limits), the first
    /// with the least remaining. `None` if no limit applies: the client is unlimited or blocked, or the store did not
    /// answer.
    pub scarcest: Option<usize>,
    /// Which limit refused: its place in [`Policy::limits`](crate::Policy::limits), the first if
    /// several did. `None` also where no limit did: the client is blocked, or others wait before it.
    pub refused_by: Option<usize>,
    /// Which [shadow](crate::LimitBuilder::shadow) limit would have refused, the first if several.
    pub shadow_refused_by: Option<usize>,
    /// Who answered.
    pub source: Source,
}

impl Decision {
    /// Returns the index of the limit that the decision is about: the limit that denied the request or, if none did,
    /// the [scarcest](Self::scarcest).
    ///
    /// [`Policy::decided_by`](crate::Policy::decided_by) and [`Algorithm::limit`] return the limit itself, with its name,
    /// quota and window. Ask the rule that decided: rules that were read later may be others.
    #[must_use]
    pub const fn decided_by(&self) -> Option<usize> {
        match self.refused_by {
            Some(limit) => Some(limit),
            None => self.scarcest,
        }
    }
}

/// Who answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Source {
    /// The store that keeps the client's state.
    #[default]
    Store,
    /// This process, from a slice of the quota that was paid for in the store before.
    Lease,
    /// This process: the store refused lately, and said until when.
    DenyCache,
    /// A limiter in this process, in place of a store that could not be asked.
    Local,
    /// Nobody: the store could not be asked, and everything is allowed meanwhile.
    FailedOpen,
    /// Nobody: the store could not be asked, and everything is refused meanwhile.
    FailedClosed,
    /// This process: the store answers, but this request could not be decided within its time budget. It is denied,
    /// and the caller may retry shortly.
    Overloaded,
}

impl Source {
    /// The name in metrics and replies.
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

/// A decision, and when it was made: by the clock of whoever made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "a decision that nobody reads limits nothing"]
pub struct Timed {
    /// The decision.
    pub decision: Decision,
    /// Its time.
    pub at: Tick,
}

/// What a decision is wanted as: `bool`, [`Decision`] or [`Timed`].
///
/// The point of the choice is cost: a `bool` needs no division.
pub trait Answer: Sized + Send + 'static {
    /// Whether more is wanted than yes or no.
    const TELLS: bool;

    /// The answer of one rule, read from its state after the decision: with the cost it admitted, or
    /// with the cost it refused; and which of its shadows would have refused.
    fn of<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_refused_by: Option<usize>,
    ) -> Self;

    /// What is wanted of a decision that was told in full, and when it was made.
    fn of_decision(decision: Decision, now: Tick) -> Self;

    /// Returns the same answer with its waits counted from a time that lies `lateness` earlier: a late
    /// caller is decided at the time of the state's last change, and counts from its own.
    #[must_use]
    fn counted_from_earlier(self, lateness: Ticks) -> Self;

    /// Whether the request may go ahead.
    fn is_allowed(&self) -> bool;

    /// Two limits decided together as one: allowed if both allow, the least remaining, the longest
    /// wait.
    #[must_use]
    fn merge(self, other: Self) -> Self;
}

/// How a limit took a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It was admitted, and charged.
    Admitted(Cost),
    /// It would have been admitted, but was not charged: another limit refused, or nothing was asked
    /// for (a refund, a reset).
    Spared(Cost),
    /// It was refused.
    Refused(Cost),
}

impl Answer for bool {
    const TELLS: Self = false;

    #[inline]
    fn of<A: Algorithm>(_: &A, _: &A::State, _: Tick, outcome: Outcome, _: Option<usize>) -> Self {
        !matches!(outcome, Outcome::Refused(_))
    }

    #[inline]
    fn of_decision(decision: Decision, _: Tick) -> Self {
        decision.allowed
    }

    #[inline]
    fn counted_from_earlier(self, _: Ticks) -> Self {
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
    const TELLS: bool = true;

    fn of<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_refused_by: Option<usize>,
    ) -> Self {
        let (admitted, retry_after) = match outcome {
            Outcome::Admitted(cost) => (Some(cost), Some(Ticks::ZERO)),
            Outcome::Spared(_) => (None, Some(Ticks::ZERO)),
            Outcome::Refused(cost) => match rule.fit(state, now, cost) {
                Fit::Now => (None, Some(Ticks::ZERO)),
                Fit::After(wait) => (None, Some(wait)),
                Fit::Never => (None, None),
            },
        };
        let refused_by = match outcome {
            Outcome::Refused(cost) => rule.refusing(state, now, cost, false),
            _ => None,
        };
        let facts = rule.facts(state, now, admitted);
        Self {
            allowed: !matches!(outcome, Outcome::Refused(_)),
            limit: facts.limit,
            remaining: facts.remaining,
            retry_after,
            reset_after: facts.reset_after,
            delay: facts.delay,
            scarcest: facts.scarcest,
            refused_by,
            shadow_refused_by,
            source: Source::Store,
        }
    }

    fn of_decision(decision: Decision, _: Tick) -> Self {
        decision
    }

    fn counted_from_earlier(self, lateness: Ticks) -> Self {
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
        Self {
            allowed: self.allowed && other.allowed,
            limit: tightest.limit,
            remaining: tightest.remaining,
            retry_after: self.retry_after.zip(other.retry_after).map(|(a, b)| a.max(b)),
            reset_after: self.reset_after.max(other.reset_after),
            delay: self.delay.max(other.delay),
            scarcest: tightest.scarcest,
            refused_by: self.refused_by.or(other.refused_by),
            shadow_refused_by: self.shadow_refused_by.or(other.shadow_refused_by),
            source: if self.source == Source::Store { other.source } else { self.source },
        }
    }
}

impl Answer for Timed {
    const TELLS: bool = true;

    fn of<A: Algorithm>(
        rule: &A,
        state: &A::State,
        now: Tick,
        outcome: Outcome,
        shadow_refused_by: Option<usize>,
    ) -> Self {
        Self { decision: Decision::of(rule, state, now, outcome, shadow_refused_by), at: now }
    }

    fn of_decision(decision: Decision, now: Tick) -> Self {
        Self { decision, at: now }
    }

    fn counted_from_earlier(self, lateness: Ticks) -> Self {
        Self { decision: self.decision.counted_from_earlier(lateness), at: self.at }
    }

    fn is_allowed(&self) -> bool {
        self.decision.allowed
    }

    fn merge(self, other: Self) -> Self {
        Self { decision: self.decision.merge(other.decision), at: self.at.max(other.at) }
    }
}
