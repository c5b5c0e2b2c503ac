//! Time as the core sees it: instants and spans of ticks.
//!
//! A tick means whatever the caller says. The clocks of Tallygate count nanoseconds, Redis counts
//! microseconds, a replay counts what its file counts. Nothing here asks the world what time it is.

use core::fmt;
use core::time::Duration;

/// An instant: ticks since an origin that only the caller knows, possibly before it.
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
pub struct Tick(pub i64);

/// A span of time, in ticks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticks(pub u64);

impl Tick {
    /// The time from `earlier` to here; none if `earlier` is later. Cannot overflow.
    #[must_use]
    #[inline]
    pub const fn since(self, earlier: Self) -> Ticks {
        if self.0 > earlier.0 { Ticks(self.0.abs_diff(earlier.0)) } else { Ticks(0) }
    }

    /// The instant a span later; `None` if it lies beyond the last there is.
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
    /// No time at all.
    pub const ZERO: Self = Self(0);

    /// Ticks per second where a tick is a nanosecond, as in Tallygate's own clocks.
    pub const PER_SECOND: u64 = 1_000_000_000;

    /// Ticks per millisecond where a tick is a nanosecond, as in Tallygate's own clocks.
    pub const PER_MILLISECOND: u64 = 1_000_000;

    /// The ticks of a [`Duration`] where a tick is a nanosecond, as in Tallygate's own clocks.
    ///
    /// Beyond 584 years it stays at the largest value, which no limit accepts as a window.
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

    /// These ticks as a [`Duration`], where a tick is a nanosecond.
    #[must_use]
    pub const fn as_duration(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// Both spans together, or the longest there is.
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
