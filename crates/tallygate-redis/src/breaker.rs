//! When to stop asking a server that does not answer, and when to try again.
//!
//! After a few failures in a row nobody is sent there any more: decisions are then made at once by the
//! failure policy, and nothing piles up. After a while one probe is sent. If it is answered, all go again;
//! if not, the while is twice as long, up to a quarter of a second, so that a server that is back is found within a second. The
//! whiles are random within bounds, so that a fleet does not come back in one step.

use std::time::{Duration, Instant};

/// How many failures in a row open it.
const FAILURES: u32 = 3;
/// The first while, and the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// Whether a server may be asked.
#[derive(Debug)]
pub(crate) struct Breaker {
    failures: u32,
    /// How many times it was opened in a row.
    opened: u32,
    state: State,
    /// When it was last closed after it had been open.
    closed_at: Option<Instant>,
}

#[derive(Debug)]
enum State {
    Closed,
    Open {
        until: Instant,
    },
    /// A probe is under way.
    HalfOpen,
}

/// What a caller may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Pass {
    Go,
    /// Go, and say how it went before anybody else does.
    Probe,
    Stop,
}

impl Breaker {
    pub(crate) const fn new() -> Self {
        Self { failures: 0, opened: 0, state: State::Closed, closed_at: None }
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

    /// The server answered. Says whether that closed it.
    pub(crate) fn succeeded(&mut self) -> bool {
        let was_open = self.is_open();
        let closed_at = if was_open { Some(Instant::now()) } else { self.closed_at };
        *self = Self { closed_at, ..Self::new() };
        was_open
    }

    /// The server did not answer in time, or not at all. Says whether that opened it.
    pub(crate) fn failed(&mut self, now: Instant) -> bool {
        self.failures = self.failures.saturating_add(1);
        let opens = match self.state {
            State::Closed => self.failures >= FAILURES,
            State::HalfOpen => true,
            State::Open { .. } => false,
        };
        if opens {
            let pause = pause(self.opened, FIRST_PAUSE, LONGEST_PAUSE, fastrand::f64());
            self.opened = self.opened.saturating_add(1);
            self.state = State::Open { until: now + pause };
        }
        opens
    }

    /// How long until the next probe; `None` if it is closed.
    pub(crate) fn pause(&self, now: Instant) -> Option<Duration> {
        match self.state {
            State::Closed => None,
            State::Open { until } => Some(until.saturating_duration_since(now)),
            State::HalfOpen => Some(FIRST_PAUSE),
        }
    }

    /// Returns whether it was open at any time since a moment.
    pub(crate) fn was_open_since(&self, since: Instant) -> bool {
        self.is_open() || self.closed_at.is_some_and(|closed| closed >= since)
    }

    pub(crate) const fn is_open(&self) -> bool {
        !matches!(self.state, State::Closed)
    }
}

/// How long to wait before trying again: twice as long each time up to the longest, and anywhere between
/// half of that and all of it.
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
        assert!(!breaker.failed(start) && !breaker.failed(start));
        breaker.succeeded();
        assert!(!breaker.failed(start) && !breaker.failed(start));
        assert_eq!(breaker.ask(start), Pass::Go);
        assert!(breaker.failed(start));
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
        for opened in 1..40_u32 {
            let longest = FIRST_PAUSE.saturating_mul(1 << (opened - 1).min(16)).min(LONGEST_PAUSE);
            assert_eq!(breaker.ask(now + longest / 2 - Duration::from_millis(1)), Pass::Stop);
            now += longest;
            assert_eq!(breaker.ask(now), Pass::Probe, "opened {opened} times");
            assert!(breaker.failed(now));
        }
    }

    #[test]
    fn pauses_are_spread() {
        let pauses = [0.0, 0.5, 1.0].map(|random| pause(1, FIRST_PAUSE, LONGEST_PAUSE, random));
        assert_eq!(pauses, [100, 150, 200].map(Duration::from_millis));
    }
}
