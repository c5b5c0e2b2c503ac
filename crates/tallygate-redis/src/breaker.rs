//! The circuit breaker of a server: when to stop sending calls, and when to try again.
//!
//! After a few failures in a row, no calls are sent: the failure setting decides at once, and no calls pile up. After a
//! pause, one probe is sent. If the server answers it, all calls are sent again. If not, the next pause is twice as
//! long, up to a quarter of a second, so that a recovered server is found within a second. The pauses are random within
//! bounds, so that the servers of a fleet do not reconnect at the same time.

use std::time::{Duration, Instant};

/// How many failures in a row open the breaker.
const FAILURES: u32 = 3;
/// The first and the longest pause.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Decides whether calls are sent to a server.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures: u32,
    /// How many pauses there were since it opened.
    pauses: u32,
    state: State,
    /// When it was last closed.
    closed_at: Option<Instant>,
}

#[derive(Debug)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// A probe is in flight.
    HalfOpen,
}

/// What a failure changes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// Nothing: too few failures, or a call that was sent before the breaker opened.
    None,
    /// The breaker opened.
    Opened,
    /// The breaker stays open, because the probe failed.
    StaysOpen,
}

/// Whether a call may be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Go,
    /// Send the call as a probe: its result decides for all others.
    Probe,
    Stop,
}

impl Breaker {
    pub(crate) const fn new() -> Self {
        Self { failures: 0, pauses: 0, state: State::Closed, closed_at: None }
    }

    pub(crate) fn ask(&mut self, now: Instant) -> Pass {
        match self.state {
            State::Closed => Pass::Go,
            State::Open { until } if now >= until => {
                self.state = State::HalfOpen;
                Pass::Probe
            }
            State::Open { .. } | State::HalfOpen => Pass::Stop,
        }
    }

    /// Records that the server answered. Returns whether that closed the breaker.
    pub(crate) fn succeeded(&mut self) -> bool {
        let was_open = self.is_open();
        let closed_at = if was_open { Some(Instant::now()) } else { self.closed_at };
        *self = Self { closed_at, ..Self::new() };
        was_open
    }

    /// Records that the server did not answer. Returns what that changed.
    pub(crate) fn failed(&mut self, now: Instant) -> Change {
        self.failures = self.failures.saturating_add(1);
        let change = match self.state {
            State::Closed if self.failures >= FAILURES => Change::Opened,
            State::HalfOpen => Change::StaysOpen,
            State::Closed | State::Open { .. } => return Change::None,
        };
        let pause = pause(self.pauses, FIRST_PAUSE, LONGEST_PAUSE, fastrand::f64());
        self.pauses = self.pauses.saturating_add(1);
        self.state = State::Open { until: now + pause };
        change
    }

    /// Returns the time until the next probe; `None` if the breaker is closed.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Closed => None,
            State::Open { until } => Some(until.saturating_duration_since(now)),
            State::HalfOpen => Some(FIRST_PAUSE),
        }
    }

    /// Returns whether it was open at some time since a given time.
    pub(crate) fn was_open_since(&self, since: Instant) -> bool {
        self.is_open() || self.closed_at.is_some_and(|closed| closed >= since)
    }

    pub(crate) const fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed)
    }
}

/// Returns the pause before the next attempt: twice as long each time up to the longest, and a random part between half
/// of that and all of it.
#[expect(clippy::float_arithmetic, reason = "a random wait, not a decision")]
pub(crate) fn pause(tries: u32, first: Duration, longest: Duration, random: f64) -> Duration {
    let doubled = first.saturating_mul(1 << tries.min(16)).min(longest);
    doubled.mul_f64(0.5 + random / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opens_after_failures_in_a_row_and_closes_after_a_probe() {
        let start = Instant::now();
        let mut breaker = Breaker::new();
        assert_eq!([breaker.failed(start), breaker.failed(start)], [Change::None; 2]);
        breaker.succeeded();
        assert_eq!([breaker.failed(start), breaker.failed(start)], [Change::None; 2]);
        assert_eq!(breaker.ask(start), Pass::Go);
        assert_eq!(breaker.failed(start), Change::Opened);
        assert_eq!(breaker.failed(start), Change::None, "it was sent before");
        assert_eq!(breaker.ask(start), Pass::Stop);
        let later = start + FIRST_PAUSE;
        assert_eq!(breaker.ask(later), Pass::Probe);
        assert_eq!(breaker.ask(later), Pass::Stop, "one probe at a time");
        assert!(breaker.succeeded());
        assert_eq!(breaker.ask(later), Pass::Go);
    }

    #[test]
    fn a_probe_that_fails_doubles_the_pause_up_to_a_bound() {
        let mut now = Instant::now();
        let mut breaker = Breaker::new();
        (0..FAILURES).for_each(|_| {
            breaker.failed(now);
        });
        for pauses in 1..40_u32 {
            let longest = FIRST_PAUSE.saturating_mul(1 << (pauses - 1).min(16)).min(LONGEST_PAUSE);
            assert_eq!(breaker.ask(now + longest / 2 - Duration::from_millis(1)), Pass::Stop);
            now += longest;
            assert_eq!(breaker.ask(now), Pass::Probe, "after {pauses} pauses");
            assert_eq!(breaker.failed(now), Change::StaysOpen, "it does not open again");
        }
    }

    #[test]
    fn pauses_are_spread() {
        let pauses = [0.0, 0.5, 1.0].map(|random| pause(1, FIRST_PAUSE, LONGEST_PAUSE, random));
        assert_eq!(pauses, [100, 150, 200].map(Duration::from_millis));
    }
}
