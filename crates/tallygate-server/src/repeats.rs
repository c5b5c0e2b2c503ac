//! What is logged again and again is told a few times and then counted.
//!
//! The same event (level, place in the program, message and fields) is told five times in ten seconds; how often it came
//! beyond that is told once they are over. Others pass meanwhile, unless there are very many that are all different:
//! then those of one place in the program are taken together, so that memory and lines are bounded.

use std::collections::HashMap;
use std::fmt::{self, Write as _};
use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// How often the same is told in a period.
const TOLD: u64 = 5;

/// How long it is counted.
pub(crate) const PERIOD: Duration = Duration::from_secs(10);

/// How many different events are told apart in a period.
const MOST: usize = 256;

/// The longest text of an event that is told again.
const MAX_TEXT_BYTES: usize = 512;

/// What is said of repeats is not counted among them.
const TARGET: &str = "tallygate::repeats";

/// Decides which events are told. All clones are one.
#[derive(Clone)]
pub(crate) struct Repeats {
    since: Instant,
    hasher: RandomState,
    known: Arc<Mutex<Known>>,
}

/// Events of this period.
#[derive(Default)]
struct Known(HashMap<u64, Repeated>);

struct Repeated {
    began: Duration,
    seen: u64,
    /// How many were not told.
    more: u64,
    /// When the first of those came.
    more_since: Duration,
    level: Level,
    text: String,
}

/// An event as it is told from others.
struct Told<'a> {
    /// Of all there is to it.
    event: u64,
    /// Of its place in the program.
    place: u64,
    level: Level,
    text: &'a str,
}

/// What came more often than it was told.
#[derive(Debug, PartialEq, Eq)]
struct Again {
    level: Level,
    more: u64,
    within: Duration,
    text: String,
}

impl Default for Repeats {
    fn default() -> Self {
        Self { since: Instant::now(), hasher: RandomState::new(), known: Arc::default() }
    }
}

impl Repeats {
    /// Tells what came more often than was told, of events that began so long ago.
    pub(crate) fn tell(&self, now: Instant, ago: Duration) {
        let over = self.known().over(now.duration_since(self.since), ago);
        for Again { level, more, within, text } in over {
            let within = within.as_secs().max(1);
            macro_rules! again {
                ($level:ident) => {
                    tracing::event!(target: TARGET, Level::$level, "{text} … and {more} more in the last {within} s")
                };
            }
            match level {
                Level::ERROR => again!(ERROR),
                Level::WARN => again!(WARN),
                Level::INFO => again!(INFO),
                Level::DEBUG => again!(DEBUG),
                Level::TRACE => again!(TRACE),
            }
        }
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    /// Whether an event is to be told at a time.
    fn note(&mut self, told: &Told<'_>, now: Duration) -> bool {
        let is_room = self.0.len() < MOST || self.0.contains_key(&told.event);
        let repeated =
            self.0.entry(if is_room { told.event } else { told.place }).or_insert_with(|| {
                let text = told.text.to_owned();
                Repeated { began: now, seen: 0, more: 0, more_since: now, level: told.level, text }
            });
        if now.saturating_sub(repeated.began) >= PERIOD {
            (repeated.began, repeated.seen) = (now, 0);
        }
        repeated.seen += 1;
        if repeated.seen <= TOLD {
            return true;
        }
        if repeated.more == 0 {
            repeated.more_since = now;
        }
        repeated.more += 1;
        false
    }

    /// Forgets those that began so long ago, and says what was not told of them.
    fn over(&mut self, now: Duration, ago: Duration) -> Vec<Again> {
        let mut again = Vec::new();
        self.0.retain(|_, repeated| {
            if now.saturating_sub(repeated.began) < ago {
                return true;
            }
            let Repeated { more, level, .. } = *repeated;
            if more > 0 {
                let within = now.saturating_sub(repeated.more_since);
                let text = std::mem::take(&mut repeated.text);
                again.push(Again { level, more, within, text });
            }
            false
        });
        again
    }
}

impl<S: Subscriber> Layer<S> for Repeats {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        if metadata.target() == TARGET {
            return true;
        }
        let mut text = Text::default();
        event.record(&mut text);
        let Text { message, fields } = text;
        let place: Identifier = metadata.callsite();
        let text = format!("{message}{fields}");
        let told = Told {
            event: self.hasher.hash_one((&place, &text)),
            place: self.hasher.hash_one(&place),
            level: *metadata.level(),
            text: cut(&text),
        };
        self.known().note(&told, self.since.elapsed())
    }
}

/// An event in words.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
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

    const fn told(event: u64, place: u64, text: &str) -> Told<'_> {
        Told { event, place, level: Level::ERROR, text }
    }

    const fn s(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn the_same_is_told_a_few_times_and_then_counted() {
        let mut known = Known::default();
        let same = told(1, 100, "no descriptors");
        let passed = (0..1239).filter(|_| known.note(&same, s(0))).count();
        assert_eq!(passed, 5);
        assert_eq!(known.over(s(9), PERIOD), []);
        let again = known.over(s(10), PERIOD);
        let text = "no descriptors".to_owned();
        assert_eq!(again, [Again { level: Level::ERROR, more: 1234, within: s(10), text }]);
        assert_eq!(known.over(s(20), PERIOD), [], "told once");
        assert!(known.note(&same, s(20)), "later it is news again");
    }

    #[test]
    fn others_pass_meanwhile() {
        let mut known = Known::default();
        for _ in 0..100 {
            known.note(&told(1, 100, "the same"), s(0));
        }
        assert!(known.note(&told(2, 100, "another of the same place"), s(0)));
        assert!(known.note(&told(3, 300, "of another place"), s(0)));
    }

    /// A writer that is stuck tells nothing meanwhile; it tells everything when it goes on.
    #[test]
    fn what_was_not_told_in_time_is_told_later() {
        let mut known = Known::default();
        for period in 0..3 {
            let now = s(10 * period);
            let passed = (0..25).filter(|_| known.note(&told(1, 100, "x"), now)).count();
            assert_eq!(passed, 5);
        }
        let again = known.over(s(30), PERIOD);
        assert_eq!((again.len(), again[0].more, again[0].within), (1, 60, s(30)));
    }

    /// Who makes every event another one fills neither the memory nor the log.
    #[test]
    fn very_many_different_ones_are_bounded() {
        let mut known = Known::default();
        let passed = (0..100_000).filter(|event| known.note(&told(*event, 1 << 60, "x"), s(0)));
        assert_eq!(passed.count(), MOST + 5);
        assert!(known.0.len() <= MOST + 1);
        assert_eq!(known.over(s(10), PERIOD).iter().map(|again| again.more).sum::<u64>(), 99_739);
    }

    #[test]
    fn a_text_is_cut_at_a_character() {
        assert_eq!(cut(&"ä".repeat(300)).len(), 512);
        assert_eq!(cut(&format!("x{}", "ä".repeat(300))).len(), 511);
    }
}
