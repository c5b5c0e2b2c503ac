//! Times and durations, in ticks.
//!
//! The caller chooses what a tick is. The clocks of Tallygate count nanoseconds, Redis counts microseconds, and a
//! replay uses the unit of its file. Nothing here reads a clock.

use core::fmt;
use core::time::Duration;

/// A point in time: the number of ticks since an origin that the caller chooses. It may be negative.
///
/// ```
/// use tallygate_core::{Tick, Ticks};
///
/// assert_eq!(Tick(5).since(Tick(2)), Ticks(3));
/// assert_eq!(Tick(2).since(Tick(5)), Ticks(0));
/// assert_eq!(Tick(5).after(Ticks(7)), Some(Tick(12)));
/// assert_eq!(Tick(i64::MAX).after(Ticks(1)), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Tick(pub i64);

/// A duration, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct Ticks(pub u64);

impl Tick {
    /// Returns the time from `earlier` to `self`, or 0 if `earlier` is later. It cannot overflow.
    #[must_use]
    #[inline]
    pub const fn since(self, earlier: Self) -> Ticks {
        if self.0 > earlier.0 { Ticks(self.0.abs_diff(earlier.0)) } else { Ticks(0) }
    }

    /// Returns the time `span` later; `None` if it is later than the last tick.
    #[must_use]
    #[inline]
    pub const fn after(self, span: Ticks) -> Option<Self> {
        match self.0.checked_add_unsigned(span.0) {
            Some(tick) => Some(Self(tick)),
            None => None,
        }
    }
}

impl Ticks {
    /// A duration of 0.
    pub const ZERO: Self = Self(0);

    /// The ticks per second if a tick is a nanosecond, as in Tallygate's own clocks.
    pub const PER_SECOND: u64 = 1_000_000_000;

    /// The ticks per millisecond if a tick is a nanosecond, as in Tallygate's own clocks.
    pub const PER_MILLISECOND: u64 = 1_000_000;

    /// Converts a [`Duration`] to ticks of one nanosecond, as in Tallygate's own clocks.
    ///
    /// A duration of more than 584 years becomes the largest value, which no limit accepts as a window.
    ///
    /// ```
    /// # use core::time::Duration;
    /// # use tallygate_core::Ticks;
    /// assert_eq!(Ticks::from_duration(Duration::from_millis(2)), Ticks(2_000_000));
    /// ```
    #[must_use]
    pub fn from_duration(duration: Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }

    /// Converts ticks of one nanosecond to a [`Duration`].
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// Returns the sum of both durations, or the longest duration if it overflows.
    #[must_use]
    #[inline]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl From<Duration> for Ticks {
    fn from(duration: Duration) -> Self {
        Self::from_duration(duration)
    }
}

impl fmt::Display for Tick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Ticks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
