//! [`Policy`], a named set of limits, and [`LimitBuilder`], which builds it.
//!
//! Building a policy checks its numbers. A policy that cannot be decided exactly is an error that says what was
//! given and what would work.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::limit::{Limit, Options};
use crate::numbers::{Anchor, Kind, Numbers, PolicyError};
use crate::penalty::Penalty;
use crate::{Cost, Decision, Ticks};

/// A named set of one or more limits that are decided together, all or nothing.
///
/// A request is allowed if every limit allows it, and then all limits charge it. If one limit denies it, none
/// charges it. A policy is an [`Algorithm`](crate::Algorithm).
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
/// let error = Policy::token_bucket(100).per_minute().burst(0).build().unwrap_err();
/// assert_eq!(error.to_string(), "burst must be at least 1 (got 0)");
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    name: Box<str>,
    limits: Box<[Limit]>,
    /// Whether there is exactly one limit and it has no options. Stores read this for every decision.
    is_plain: bool,
}

impl Policy {
    /// Starts a [token bucket](crate::Bucket) that earns `limit` units per window.
    pub fn token_bucket(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::TokenBucket, limit)
    }

    /// Starts a [GCRA](crate::Bucket), which decides exactly as a token bucket does.
    pub fn gcra(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::Gcra, limit)
    }

    /// Starts a [leaky bucket](crate::Bucket) that drains `limit` units per window.
    pub fn leaky_bucket(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::LeakyBucket, limit)
    }

    /// Starts a [fixed window](crate::FixedWindow) that allows at most `limit` units.
    pub fn fixed_window(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::FixedWindow, limit)
    }

    /// Starts a [sliding window log](crate::SlidingWindowLog) that allows at most `limit` units.
    pub fn sliding_window_log(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::SlidingWindowLog, limit)
    }

    /// Starts a [sliding window counter](crate::SlidingWindowCounter) that allows at most `limit` units.
    pub fn sliding_window_counter(limit: Cost) -> LimitBuilder {
        LimitBuilder::new(Kind::SlidingWindowCounter, limit)
    }

    /// Starts a limit whose algorithm is chosen at run time.
    pub fn of(kind: Kind, limit: Cost) -> LimitBuilder {
        LimitBuilder::new(kind, limit)
    }

    /// Builds a policy of several limits. Each limit needs its own name.
    ///
    /// # Errors
    /// Returns an error if a limit is not valid, if there is no limit, or if two limits have the same name.
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

    /// Returns the name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the policy with another name.
    #[must_use]
    pub fn with_name(mut self, name: impl Into<Box<str>>) -> Self {
        self.name = name.into();
        self
    }

    /// Returns the limits, of which there is at least one.
    #[must_use]
    pub fn limits(&self) -> &[Limit] {
        &self.limits
    }

    /// Returns the limit that a decision of this policy is about: the limit that denied the request or, if none
    /// did, the limit with the least remaining. Returns `None` if no limit decided.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
    ///
    /// let policy = Policy::all_of("login", [
    ///     Policy::fixed_window(10).per(Ticks(60)).named("minute"),
    ///     Policy::fixed_window(10).per(Ticks(3600)).named("hour"),
    /// ])?;
    /// let mut state = policy.initial(Tick(0));
    /// let _: Decision = policy.decide(&mut state, Tick(0), 4);
    /// // A minute later, the quota per minute is restored, and 6 units of the quota per hour are left.
    /// let decision: Decision = policy.decide(&mut state, Tick(60), 1);
    /// let limit = policy.decided_by(&decision).expect("a limit decided");
    /// assert_eq!((limit.name(), decision.remaining), ("hour", 5));
    /// assert_eq!((limit.numbers().limit, limit.numbers().window), (10, Ticks(3600)));
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn decided_by(&self, decision: &Decision) -> Option<&Limit> {
        self.limits.get(decision.decided_by()?)
    }

    /// Returns the limit if it is the only one and has no options.
    ///
    /// The limit's own state machine then decides exactly as the policy does, in less time.
    #[must_use]
    #[inline]
    pub fn plain(&self) -> Option<&Limit> {
        self.limits.first().filter(|_| self.is_plain)
    }
}

/// Writes the limits in words, such as `token_bucket 100 per 1m burst 20`. A tick is taken as a nanosecond.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, limit) in self.limits.iter().enumerate() {
            let numbers = limit.numbers();
            if index > 0 {
                f.write_str(", ")?;
            }
            write!(f, "{} {} per ", numbers.kind, numbers.limit)?;
            write_window(f, numbers.window)?;
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

/// Writes a window as the configuration of the server does, such as `1h30m`.
fn write_window(f: &mut fmt::Formatter<'_>, window: Ticks) -> fmt::Result {
    const UNITS: [(&str, u64); 7] = [
        ("d", 86_400_000_000_000),
        ("h", 3_600_000_000_000),
        ("m", 60_000_000_000),
        ("s", 1_000_000_000),
        ("ms", 1_000_000),
        ("us", 1_000),
        ("ns", 1),
    ];
    let mut rest = window.0;
    for (unit, ticks) in UNITS {
        if rest >= ticks {
            write!(f, "{}{unit}", rest / ticks)?;
            rest %= ticks;
        }
    }
    Ok(())
}

/// Builds a [`Limit`], or a [`Policy`] of one limit. The numbers are checked when it is [built](Self::build).
#[derive(Clone, Debug)]
#[must_use = "a builder limits nothing until it is built"]
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

    /// Sets the window: a [`Duration`](core::time::Duration), or [`Ticks`] of the caller's own unit of time.
    ///
    /// ```
    /// # use core::time::Duration;
    /// # use tallygate_core::Policy;
    /// let policy = Policy::fixed_window(5).per(Duration::from_secs(90)).build()?;
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    pub fn per(mut self, window: impl Into<Ticks>) -> Self {
        self.window = Some(window.into());
        self
    }

    /// Sets a window of one second, if a tick is a nanosecond as in Tallygate's own clocks.
    pub fn per_second(self) -> Self {
        self.per(Ticks(Ticks::PER_SECOND))
    }

    /// Sets a window of one minute, if a tick is a nanosecond.
    pub fn per_minute(self) -> Self {
        self.per(Ticks(60 * Ticks::PER_SECOND))
    }

    /// Sets a window of one hour, if a tick is a nanosecond.
    pub fn per_hour(self) -> Self {
        self.per(Ticks(3_600 * Ticks::PER_SECOND))
    }

    /// Sets a window of one day, if a tick is a nanosecond.
    pub fn per_day(self) -> Self {
        self.per(Ticks(86_400 * Ticks::PER_SECOND))
    }

    /// Sets the most units that can be allowed at one instant (buckets only). Default: the limit.
    pub const fn burst(mut self, burst: Cost) -> Self {
        self.burst = Some(burst);
        self
    }

    /// Sets how many units a settled reservation may charge beyond the capacity. Default: the capacity.
    pub const fn debt(mut self, debt: Cost) -> Self {
        self.debt = Some(debt);
        self
    }

    /// Sets how many units a new key may use at once. Default: the capacity.
    ///
    /// A store may drop a key that has used nothing. The key then starts with this many units again. This is
    /// the only case in which a client can notice that its key was dropped, and it never gains by it.
    pub const fn starting_with(mut self, start: Cost) -> Self {
        self.start = Some(start);
        self
    }

    /// Sets where a fixed window starts. Default: at multiples of the window.
    pub const fn anchor(mut self, anchor: Anchor) -> Self {
        self.anchor = anchor;
        self
    }

    /// Makes it a shadow limit: it keeps its state as if it were enforced, but denies no request.
    ///
    /// The requests that it would deny are reported to observers and in
    /// [`shadow_denied_by`](crate::Decision::shadow_denied_by). Use it to try out a limit on real traffic.
    pub const fn shadow(mut self) -> Self {
        self.options.shadow = true;
        self
    }

    /// Denies all requests of a key for some time after the limit has denied it too often.
    pub const fn penalty(mut self, penalty: Penalty) -> Self {
        self.options.penalty = Some(penalty);
        self
    }

    /// Sets the name of the limit, and of the policy if this is its only limit. Default: the name of the
    /// algorithm.
    pub fn named(mut self, name: impl Into<Box<str>>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Builds the limit.
    ///
    /// # Errors
    /// Returns an error if the numbers are not valid. The message says what was given and what would work.
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
            if penalty.denials() == 0 {
                return Err(PolicyError::PenaltyAfterZeroDenials);
            }
            if penalty.duration() == Ticks::ZERO || penalty.duration() > Penalty::MAX {
                return Err(PolicyError::PenaltyDuration { duration: penalty.duration() });
            }
        }
        let name = self.name.unwrap_or_else(|| self.kind.name().into());
        Limit::new(name, numbers, self.options)
    }

    /// Builds a policy of this one limit.
    ///
    /// # Errors
    /// Returns an error if the numbers are not valid. The message says what was given and what would work.
    pub fn build(self) -> Result<Policy, PolicyError> {
        let limit = self.limit()?;
        Ok(Policy::new(limit.name().into(), Box::new([limit])))
    }
}
