//! How a limit is written in one line: `token_bucket 100/1m burst 20`.
//!
//! An algorithm, how much of it a window, and for buckets the burst if it is not the limit. What is printed is read
//! back as the same limit. Names, penalties and shadows are for configurations.

use std::fmt;
use std::str::FromStr as _;
use std::time::Duration;

use tallygate_core::{Anchor, Kind, Limit, Policy, PolicyError, Ticks};

use crate::names::nearest;

/// Reads a limit.
///
/// # Errors
/// The text is no limit; the error says what was found and what would work.
pub fn parse(text: &str) -> Result<Limit, SpellingError> {
    let mut words = text.split_whitespace();
    let Some(name) = words.next() else { return Err(SpellingError::Empty) };
    let kind = Kind::from_str(name).map_err(|_| SpellingError::Algorithm { name: name.into() })?;
    let rate = words.next().unwrap_or_default();
    let (limit, window) = rate_of(rate).ok_or_else(|| SpellingError::Rate { rate: rate.into() })?;
    let mut builder = Policy::of(kind, limit).per(window);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_default();
        builder = match word {
            "burst" => {
                let burst = number(value);
                builder.burst(burst.ok_or_else(|| SpellingError::Burst { burst: value.into() })?)
            }
            "anchor" if value == "first_request" => builder.anchor(Anchor::FirstRequest),
            _ => return Err(SpellingError::Word { word: word.into() }),
        };
    }
    builder.limit().map_err(SpellingError::Policy)
}

/// A limit, printed as it is written.
#[derive(Clone, Copy, Debug)]
pub struct Spelled<'a> {
    limit: &'a Limit,
    nanos_a_tick: u64,
}

impl<'a> Spelled<'a> {
    /// One that counts time in nanoseconds.
    #[must_use]
    pub const fn new(limit: &'a Limit) -> Self {
        Self { limit, nanos_a_tick: 1 }
    }

    /// One that counts it in microseconds.
    #[must_use]
    pub const fn in_micros(limit: &'a Limit) -> Self {
        Self { limit, nanos_a_tick: 1_000 }
    }

    /// Its window.
    #[must_use]
    pub fn window(&self) -> Span {
        Span(Ticks(self.limit.numbers().window.0.saturating_mul(self.nanos_a_tick)))
    }
}

impl fmt::Display for Spelled<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers = self.limit.numbers();
        write!(f, "{} {}/{}", numbers.kind, numbers.limit, self.window())?;
        if numbers.kind.is_bucket() {
            write!(f, " burst {}", numbers.burst)?;
        }
        match numbers.anchor {
            Anchor::Clock => Ok(()),
            Anchor::FirstRequest => f.write_str(" anchor first_request"),
        }
    }
}

/// A span of nanoseconds in the largest unit of which it is a whole number.
#[derive(Clone, Copy, Debug)]
pub struct Span(pub Ticks);

const UNITS: [(&str, u64); 7] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Ticks(span) = self.0;
        let (unit, length) = UNITS
            .into_iter()
            .find(|(_, length)| span > 0 && span.is_multiple_of(*length))
            .unwrap_or(("ns", 1));
        write!(f, "{}{unit}", span / length)
    }
}

/// `LIMIT/WINDOW`, the window with or without a number: `5/s`, `100/1m`.
fn rate_of(text: &str) -> Option<(u64, Ticks)> {
    let (limit, window) = text.split_once('/')?;
    Some((number(limit)?, span_of(window)?))
}

/// Reads a window of more than no time, such as `30s`, `1m` or `m`.
///
/// # Errors
/// The text is no time, or no time at all.
pub fn window(text: &str) -> Result<Ticks, String> {
    span_of(text)
        .filter(|window| *window > Ticks::ZERO)
        .ok_or_else(|| format!("found {text:?}; expected a time such as `30s`, `1m` or `1h`"))
}

/// A span such as `30s`, `1m` or `m`.
fn span_of(text: &str) -> Option<Ticks> {
    if let Some((_, length)) = UNITS.iter().find(|(unit, _)| *unit == text) {
        return Some(Ticks(*length));
    }
    let span: Duration = humantime::parse_duration(text).ok()?;
    Some(Ticks::from_duration(span))
}

fn number(text: &str) -> Option<u64> {
    let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_digits.then(|| text.parse().ok()).flatten()
}

/// Why a text is no limit.
#[derive(Debug)]
#[non_exhaustive]
pub enum SpellingError {
    /// Nothing is written.
    Empty,
    /// There is no algorithm of that name.
    Algorithm {
        /// The name that was found.
        name: String,
    },
    /// The second word is not a limit and a window.
    Rate {
        /// The word that was found.
        rate: String,
    },
    /// What stands behind `burst` is no whole number.
    Burst {
        /// The word that was found.
        burst: String,
    },
    /// A word that says nothing about a limit.
    Word {
        /// The word that was found.
        word: String,
    },
    /// The numbers are no limit.
    Policy(PolicyError),
}

impl fmt::Display for SpellingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str(
                "found nothing; expected a policy such as `token_bucket 100/1m burst 20`",
            ),
            Self::Algorithm { name } => {
                let known = Kind::ALL.map(Kind::name);
                write!(f, "found {name:?}; ")?;
                match nearest(name, known.iter().copied()) {
                    Some(near) => write!(f, "did you mean `{near}`?"),
                    None => write!(f, "expected one of {}", known.join(", ")),
                }
            }
            Self::Rate { rate } => write!(
                f,
                "found {rate:?}; expected a limit and a window such as `100/1m`, `5/s` or `1000/1h`"
            ),
            Self::Burst { burst } => {
                write!(
                    f,
                    "found {burst:?} behind `burst`; expected a whole number such as `burst 20`"
                )
            }
            Self::Word { word } => write!(
                f,
                "found {word:?} behind the rate; expected `burst N`, `anchor first_request` or nothing"
            ),
            Self::Policy(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for SpellingError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn reads(text: &str, printed: &str) {
        let limit = parse(text).expect("a limit");
        assert_eq!(Spelled::new(&limit).to_string(), printed);
        assert_eq!(parse(printed).expect("the same limit"), limit);
    }

    #[track_caller]
    fn refuses(text: &str, expected: &str) {
        assert_eq!(parse(text).expect_err("no limit").to_string(), expected);
    }

    #[test]
    fn what_is_printed_is_read_back() {
        reads("token_bucket 100/1m burst 20", "token_bucket 100/1m burst 20");
        reads("token_bucket 10/10s", "token_bucket 10/10s burst 10");
        reads("gcra 5/s", "gcra 5/1s burst 5");
        reads("leaky_bucket 5/500ms", "leaky_bucket 5/500ms burst 5");
        reads("fixed_window 1000/1h", "fixed_window 1000/1h");
        reads("  sliding_window_log   3/90s ", "sliding_window_log 3/90s");
        reads("sliding_window_counter 7/24h", "sliding_window_counter 7/1d");
        reads("fixed_window 5/1m anchor first_request", "fixed_window 5/1m anchor first_request");
        reads("token_bucket 1/7ns burst 3", "token_bucket 1/7ns burst 3");
    }

    #[test]
    fn what_is_wrong_is_told_with_what_would_do() {
        refuses("", "found nothing; expected a policy such as `token_bucket 100/1m burst 20`");
        refuses("token_bukcet 1/s", "found \"token_bukcet\"; did you mean `token_bucket`?");
        refuses(
            "window 1/s",
            "found \"window\"; expected one of token_bucket, gcra, leaky_bucket, fixed_window, \
             sliding_window_log, sliding_window_counter",
        );
        for rate in
            ["100", "100/", "/1m", "-1/1m", "+1/1m", "1.5/s", "100/1q", "18446744073709551616/s"]
        {
            refuses(
                &format!("gcra {rate}"),
                &format!(
                    "found {rate:?}; expected a limit and a window such as `100/1m`, `5/s` or `1000/1h`"
                ),
            );
        }
        refuses(
            "gcra 5/s burst x",
            "found \"x\" behind `burst`; expected a whole number such as `burst 20`",
        );
        refuses(
            "gcra 5/s per key",
            "found \"per\" behind the rate; expected `burst N`, `anchor first_request` or nothing",
        );
        refuses("gcra 0/s", "limit 0 admits nothing; use at least 1");
        refuses("gcra 5/0s", "window 0 has no rate; use at least 1 tick");
        refuses(
            "fixed_window 5/s burst 6",
            "burst 6 on a fixed_window of limit 5: a window's burst is its limit; \
             leave burst out or use a bucket",
        );
    }
}
