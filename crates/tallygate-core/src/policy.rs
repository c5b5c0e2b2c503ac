//! A policy: a name, and the limits that are decided together under it.
//!
//! Constructors read aloud, and everything that cannot be decided exactly is refused when the policy
//! is made, with what was given and what would do.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::limit::{Limit, Options};
use crate::numbers::{Anchor, Kind, Numbers, PolicyError};
use crate::penalty::Penalty;
use crate::{Cost, Decision, Ticks};

/// A named set of one or more limits that are decided together, all or nothing.
///
/// ```
/// use tallygate_core::Policy;
///
/// let api = Policy::token_bucket(100).per_minute().burst(20).named("api").build()?;
/// assert_eq!(api.name(), "api");
///
/// let login = Policy::all_of(
///     "login",
///     [
///         Policy::sliding_window_log(5).per_minute().named("minute"),
///         Policy::fixed_window(100).per_day().named("day"),
///     ],
/// )?;
/// assert_eq!(login.limits().len(), 2);
///
/// let refused = Policy::token_bucket(100).per_minute().burst(0).build().unwrap_err();
/// assert_eq!(refused.to_string(), "burst 0 admits nothing; use at least 1");
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    name: Box<str>,
    limits: Box<[Limit]>,
    /// Whether it has one limit, and that one no options: stores ask with every decision.
    is_plain: bool,
}

impl Policy {
    /// A [token bucket](crate::Bucket) that earns `limit` a window.
    pub fn token_bucket(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::TokenBucket, limit)
    }

    /// The same decisions by [GCRA](crate::Bucket).
    pub fn gcra(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::Gcra, limit)
    }

    /// A [leaky bucket](crate::Bucket) that drains `limit` a window.
    pub fn leaky_bucket(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::LeakyBucket, limit)
    }

    /// A [fixed window](crate::FixedWindow) of at most `limit`.
    pub fn fixed_window(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::FixedWindow, limit)
    }

    /// A [sliding window log](crate::SlidingWindowLog) of at most `limit`.
    pub fn sliding_window_log(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::SlidingWindowLog, limit)
    }

    /// A [sliding window counter](crate::SlidingWindowCounter) of at most `limit`.
    pub fn sliding_window_counter(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::SlidingWindowCounter, limit)
    }

    /// A policy of an algorithm chosen at run time.
    pub fn of(kind: Kind, limit: Cost) -> LimitBuilder {
        LimitBuilder::new(kind, limit)
    }

    /// Several limits under one name, each told from the others by its own.
    ///
    /// # Errors
    /// One of the limits is not valid, there is none, or two have the same name.
    pub fn all_of(
        name: impl Into<Box<str>>,
        limits: impl IntoIterator<Item = LimitBuilder>,
    ) -> Result<Self, PolicyError> {
        let limits = limits.into_iter().map(LimitBuilder::limit).collect::<Result<Vec<_>, _>>()?;
        if limits.is_empty() {
            return Err(PolicyError::NoLimits);
        }
        for (index, limit) in limits.iter().enumerate() {
            if limits[..index].iter().any(|other| other.name() == limit.name()) {
                return Err(PolicyError::SameName { name: limit.name().into() });
            }
        }
        Ok(Self::new(name.into(), limits.into()))
    }

    pub(crate) fn new(name: Box<str>, limits: Box<[Limit]>) -> Self {
        let is_plain = matches!(&*limits, [limit] if limit.is_plain());
        Self { name, limits, is_plain }
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The same policy by another name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<Box<str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Its limits, at least one.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// Returns the limit that a decision of this policy is about: the limit that denied the request or, if none did,
    /// the limit with the least remaining. `None` if no limit decided.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
    ///
    /// let policy = Policy::all_of("login", [
    ///     Policy::fixed_window(10).per(Ticks(60)).named("minute"),
    ///     Policy::fixed_window(10).per(Ticks(3600)).named("hour"),
    /// ])?;
    /// let mut state = policy.first(Tick(0));
    /// let _: Decision = policy.decide(&mut state, Tick(0), 4);
    /// // A minute later, all of the minute's quota is there again, and 6 are left of the hour's.
    /// let decision: Decision = policy.decide(&mut state, Tick(60), 1);
    /// let limit = policy.decided_by(&decision).expect("one of its limits");
    /// assert_eq!((limit.name(), decision.remaining), ("hour", 5));
    /// assert_eq!((limit.numbers().limit, limit.numbers().window), (10, Ticks(3600)));
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn decided_by(&self, decision: &Decision) -> Option<&Limit> {
        self.limits.get(decision.decided_by()?)
    }

    /// Its only limit, if it has no other and that one has no options: then the limit's own machine
    /// decides as the policy does.
    #[must_use]
    #[inline]
    pub fn plain(&self) -> Option<&Limit> {
        self.limits.first().filter(|_| self.is_plain)
    }
}

/// What it limits, in words; where a tick is a nanosecond.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, limit) in self.limits.iter().enumerate() {
            let numbers = limit.numbers();
            if place > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{} {} per {:?}", numbers.kind, numbers.limit, numbers.window.as_duration())?;
            if numbers.burst != numbers.limit {
                write!(f, " burst {}", numbers.burst)?;
            }
            if limit.is_shadow() {
                f.write_str(" (shadow)")?;
            }
        }
        Ok(())
    }
}

/// A limit being described. Nothing is checked until it is [made](Self::build).
#[derive(Clone, Debug)]
#[must_use = "a description limits nothing until it is built"]
pub struct LimitBuilder {
    kind: Kind,
    limit: Cost,
    window: Option<Ticks>,
    burst: Option<Cost>,
    debt: Option<Cost>,
    start: Option<Cost>,
    anchor: Anchor,
    name: Option<Box<str>>,
    options: Options,
}

impl LimitBuilder {
    const fn new(kind: Kind, limit: Cost) -> Self {
        Self {
            kind,
            limit,
            window: None,
            burst: None,
            debt: None,
            start: None,
            anchor: Anchor::Clock,
            name: None,
            options: Options { shadow: false, penalty: None },
        }
    }

    /// The window, in whatever a tick means to the caller.
    pub const fn per(mut self, window: Ticks) -> Self {
        self.window = Some(window);
        self
    }

    /// A window of a second, where a tick is a nanosecond as in Tallygate's own clocks.
    pub const fn per_second(self) -> Self {
        self.per(Ticks(Ticks::PER_SECOND))
    }

    /// A window of a minute, where a tick is a nanosecond.
    pub const fn per_minute(self) -> Self {
        self.per(Ticks(60 * Ticks::PER_SECOND))
    }

    /// A window of an hour, where a tick is a nanosecond.
    pub const fn per_hour(self) -> Self {
        self.per(Ticks(3_600 * Ticks::PER_SECOND))
    }

    /// A window of a day, where a tick is a nanosecond.
    pub const fn per_day(self) -> Self {
        self.per(Ticks(86_400 * Ticks::PER_SECOND))
    }

    /// The most that can be admitted at one instant (buckets only). Without it: the limit.
    pub const fn burst(mut self, burst: Cost) -> Self {
        self.burst = Some(burst);
        self
    }

    /// How far beyond the capacity a settled reservation may go. Without it: one capacity.
    pub const fn debt(mut self, debt: Cost) -> Self {
        self.debt = Some(debt);
        self
    }

    /// How much a new key may use at once. Without it: the whole capacity.
    ///
    /// With less, a store that forgets an idle key has it start over with this much: the one case
    /// in which eviction can be noticed, and never to a client's gain.
    pub const fn starting_with(mut self, start: Cost) -> Self {
        self.start = Some(start);
        self
    }

    /// Where a fixed window starts. Without it: on multiples of the window.
    pub const fn anchor(mut self, anchor: Anchor) -> Self {
        self.anchor = anchor;
        self
    }

    /// Only watches: the limit keeps its state as if it were enforced, and its refusals are told to
    /// observers and in [`shadow_refused_by`](crate::Decision::shadow_refused_by), but refuse nobody.
    pub const fn shadow(mut self) -> Self {
        self.options.shadow = true;
        self
    }

    /// Refuses a key for a while after it was refused too often.
    pub const fn penalty(mut self, penalty: Penalty) -> Self {
        self.options.penalty = Some(penalty);
        self
    }

    /// The name of the limit, and of the policy if it is the only one. Without it: the algorithm's.
    pub fn named(mut self, name: impl Into<Box<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// The limit, if it is valid.
    ///
    /// # Errors
    /// It is not: the error says what was given and what would do.
    pub fn limit(self) -> Result<Limit, PolicyError> {
        let window = self.window.ok_or(PolicyError::NoWindow { limit: self.limit })?;
        let burst = self.burst.unwrap_or(self.limit);
        let numbers = Numbers {
            kind: self.kind,
            limit: self.limit,
            window,
            burst,
            debt: self.debt.unwrap_or(burst.min(Cost::MAX - burst)),
            start: self.start.unwrap_or(burst),
            anchor: self.anchor,
        };
        if let Some(penalty) = self.options.penalty {
            if penalty.refusals() == 0 {
                return Err(PolicyError::PenaltyAfterNothing);
            }
            if penalty.lasts() == Ticks::ZERO || penalty.lasts() > Penalty::MAX {
                return Err(PolicyError::PenaltyLasts { lasts: penalty.lasts() });
            }
        }
        let name = self.name.unwrap_or_else(|| self.kind.name().into());
        Limit::new(name, numbers, self.options)
    }

    /// A policy of this one limit, if it is valid.
    ///
    /// # Errors
    /// It is not: the error says what was given and what would do.
    pub fn build(self) -> Result<Policy, PolicyError> {
        let limit = self.limit()?;
        Ok(Policy::new(limit.name().into(), Box::new([limit])))
    }
}
