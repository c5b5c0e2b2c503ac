//! Limits repeated log events: the first few are logged, the rest are counted.
//!
//! The same event (level, call site, message and fields) is logged five times in ten seconds. After that time, one line
//! reports how often it was repeated. Other events are logged meanwhile. If there are very many different events, those
//! of one call site are counted together, so that memory and lines are bounded.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// How often the same event is logged per period.
const MAX_LOGGED: u64 = 5;

/// The length of a period.
pub(crate) const PERIOD: Duration = Duration::from_secs(10);

/// How many different events are distinguished per period.
const MOST: usize = 256;

/// The longest text of an event in a line about repeats.
const MAX_TEXT_BYTES: usize = 512;

/// The target of lines about repeats, which are not counted themselves.
const TARGET: &str = "tallygate::repeats";

/// Decides which events are logged. Clones share their state.
#[derive(Clone)]
pub(crate) struct Repeats {
    since: Instant,
    hasher: RandomState,
    recent: Arc<Mutex<RecentEvents>>,
}

/// The events of the current period.
#[derive(Default)]
struct RecentEvents(HashMap<u64, EventCount>);

struct EventCount {
    began: Duration,
    seen: u64,
    /// How many events were not logged.
    more: u64,
    /// When the first of them happened.
    more_since: Duration,
    level: Level,
    text: String,
}

/// An event and its hashes.
struct LogEvent<'a> {
    /// Hash of the call site and the text.
    event: u64,
    /// Hash of the call site.
    place: u64,
    level: Level,
    text: &'a str,
}

/// How often an event was repeated without being logged.
#[derive(Debug, PartialEq, Eq)]
struct RepeatSummary {
    level: Level,
    more: u64,
    within: Duration,
    text: String,
}

impl Default for Repeats {
    fn default() -> Self {
        Self { since: Instant::now(), hasher: RandomState::new(), recent: Arc::default() }
    }
}

impl Repeats {
    /// Logs how often events were repeated whose period began at least `ago` before.
    pub(crate) fn log_repeats(&self, now: Instant, ago: Duration) {
        let take_expired = self.recent().take_expired(now.duration_since(self.since), ago);
        for RepeatSummary { level, more, within, text } in take_expired {
            let within = within.as_secs().max(1);
            macro_rules! summaries {
                ($level:ident) => {
                    tracing::event!(target: TARGET, Level::$level, "{text} … repeated {more} more times in the last {within} s")
                };
            }
            match level {
                Level::ERROR => summaries!(ERROR),
                Level::WARN => summaries!(WARN),
                Level::INFO => summaries!(INFO),
                Level::DEBUG => summaries!(DEBUG),
                Level::TRACE => summaries!(TRACE),
            }
        }
    }

    fn recent(&self) -> MutexGuard<'_, RecentEvents> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RecentEvents {
    /// Counts an event. Returns whether it should be logged.
    fn should_log(&mut self, log_event: &LogEvent<'_>, now: Duration) -> bool {
        let is_room = self.0.len() < MOST || self.0.contains_key(&log_event.event);
        let repeated = self
            .0
            .entry(if is_room { log_event.event } else { log_event.place })
            .or_insert_with(|| {
                let text = log_event.text.to_owned();
                EventCount {
                    began: now,
                    seen: 0,
                    more: 0,
                    more_since: now,
                    level: log_event.level,
                    text,
                }
            });
        if now.saturating_sub(repeated.began) >= PERIOD {
            (repeated.began, repeated.seen) = (now, 0);
        }
        repeated.seen += 1;
        if repeated.seen <= MAX_LOGGED {
            return true;
        }
        if repeated.more == 0 {
            repeated.more_since = now;
        }
        repeated.more += 1;
        false
    }

    /// Removes the events whose period began at least `ago` before, and returns the events that were not all logged.
    fn take_expired(&mut self, now: Duration, ago: Duration) -> Vec<RepeatSummary> {
        let mut summaries = Vec::new();
        self.0.retain(|_, repeated| {
            if now.saturating_sub(repeated.began) < ago {
                return true;
            }
            let EventCount { more, level, .. } = *repeated;
            if more > 0 {
                let within = now.saturating_sub(repeated.more_since);
                let text = std::mem::take(&mut repeated.text);
                summaries.push(RepeatSummary { level, more, within, text });
            }
            false
        });
        summaries
    }
}

impl<S: Subscriber> Layer<S> for Repeats {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if metadata.target() == TARGET {
            return true;
        }
        let mut text = EventText::default();
        event.record(&mut text);
        let EventText { message, fields } = text;
        let place: Identifier = metadata.callsite();
        let text = format!("{message}{fields}");
        let log_event = LogEvent {
            event: self.hasher.hash_one((&place, &text)),
            place: self.hasher.hash_one(&place),
            level: *metadata.level(),
            text: cut(&text),
        };
        self.recent().should_log(&log_event, self.since.elapsed())
    }
}

/// The text of an event.
#[derive(Default)]
struct EventText {
    message: String,
    fields: String,
}

impl Visit for EventText {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string cannot fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.fields, " {name}={value:?}"),
        };
    }
}

fn cut(text: &str) -> &str {
    &text[..text.floor_char_boundary(MAX_TEXT_BYTES)]
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn log_event(event: u64, place: u64, text: &str) -> LogEvent<'_> {
        LogEvent { event, place, level: Level::ERROR, text }
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_repeated_event_is_logged_a_few_times_and_then_counted() {
        let mut recent = RecentEvents::default();
        let same = log_event(1, 100, "no descriptors");
        let passed = (0..1239).filter(|_| recent.should_log(&same, s(0))).count();
        assert_eq!(passed, 5);
        assert_eq!(recent.take_expired(s(9), PERIOD), []);
        let summaries = recent.take_expired(s(10), PERIOD);
        let text = "no descriptors".to_owned();
        assert_eq!(
            summaries,
            [RepeatSummary { level: Level::ERROR, more: 1234, within: s(10), text }]
        );
        assert_eq!(recent.take_expired(s(20), PERIOD), [], "reported once");
        assert!(recent.should_log(&same, s(20)), "later it is news again");
    }

    #[test]
    fn other_events_are_logged_meanwhile() {
        let mut recent = RecentEvents::default();
        for _ in 0..100 {
            recent.should_log(&log_event(1, 100, "the same"), s(0));
        }
        assert!(recent.should_log(&log_event(2, 100, "another of the same place"), s(0)));
        assert!(recent.should_log(&log_event(3, 300, "of another place"), s(0)));
    }

    /// A blocked writer reports all repeats when it continues.
    #[test]
    fn repetitions_are_reported_when_their_period_has_ended() {
        let mut recent = RecentEvents::default();
        for period in 0..3 {
            let now = s(10 * period);
            let passed =
                (0..25).filter(|_| recent.should_log(&log_event(1, 100, "x"), now)).count();
            assert_eq!(passed, 5);
        }
        let summaries = recent.take_expired(s(30), PERIOD);
        assert_eq!((summaries.len(), summaries[0].more, summaries[0].within), (1, 60, s(30)));
    }

    /// Events that are all different fill neither memory nor the log.
    #[test]
    fn the_number_of_different_events_is_bounded() {
        let mut recent = RecentEvents::default();
        let passed =
            (0..100_000).filter(|event| recent.should_log(&log_event(*event, 1 << 60, "x"), s(0)));
        assert_eq!(passed.count(), MOST + 5);
        assert!(recent.0.len() <= MOST + 1);
        assert_eq!(
            recent.take_expired(s(10), PERIOD).iter().map(|summaries| summaries.more).sum::<u64>(),
            99_739
        );
    }

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(cut(&"ä".repeat(300)).len(), 512);
        assert_eq!(cut(&format!("x{}", "ä".repeat(300))).len(), 511);
    }
}
