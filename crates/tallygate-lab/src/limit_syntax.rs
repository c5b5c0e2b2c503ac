//! Parses and prints a limit in one line: `token_bucket 100/1m burst 20`.
//!
//! A line names the algorithm, then the limit per window, then, for buckets, the burst if it differs from the limit.
//! Parsing a printed limit gives the same limit. A policy of several limits separates them by commas. Names, penalties and
//! shadow limits exist only in configuration files.

use std::fmt;
use std::str::FromStr as _;

use tallygate_core::{
    Anchor, Kind, Limit, LimitBuilder, MAX_LOG_ENTRIES, Policy, PolicyError, Ticks,
};

use crate::duration;
use crate::names::nearest;

/// Parses a limit.
///
/// # Errors
/// Returns an error if the text is not a valid limit. The error says what was found and what was expected.
pub fn parse(text: &str) -> Result<Limit, LimitSyntaxError> {
    builder(text)?.limit().map_err(LimitSyntaxError::Policy)
}

/// Parses a policy: one limit, or several limits that are separated by commas. A request must pass all of them.
///
/// # Errors
/// Returns an error if a limit is not valid or occurs twice.
pub fn parse_policy(text: &str) -> Result<Policy, LimitSyntaxError> {
    let limits = text.split(',').map(|limit| Ok(builder(limit)?.named(limit.trim())));
    let limits = limits.collect::<Result<Vec<_>, LimitSyntaxError>>()?;
    Policy::all_of(text.trim(), limits).map_err(LimitSyntaxError::Policy)
}

/// Describes why numbers are no valid policy, with durations instead of ticks, if a tick is a nanosecond.
#[must_use]
pub fn in_durations(error: &PolicyError) -> String {
    in_durations_of(error, 1)
}

/// Describes why numbers are no valid policy, with durations instead of ticks of some nanoseconds.
pub(crate) fn in_durations_of(error: &PolicyError, nanos_per_tick: u64) -> String {
    let time = |ticks: Ticks| Span(Ticks(ticks.0.saturating_mul(nanos_per_tick)));
    match error {
        PolicyError::ZeroWindow => {
            "window must be longer than \"0s\"; use a duration such as \"1m\"".to_owned()
        }
        PolicyError::TimeToFresh { kind, limit, window, burst, .. } => {
            let (window, remedy) = (
                time(*window),
                if kind.is_bucket() { ", a smaller burst or a larger limit" } else { "" },
            );
            format!(
                "a {kind} with limit {limit} and burst {burst} per {window} takes more than a century to restore a full \
                 quota, which cannot be counted exactly; use a shorter window{remedy}"
            )
        }
        PolicyError::LogTooLong { limit, window } => format!(
            "a sliding_window_log with limit {limit} per {} may need {} entries per key (at most {MAX_LOG_ENTRIES}); use \
             a smaller limit or a sliding_window_counter",
            time(*window),
            (*limit).min(window.0)
        ),
        PolicyError::PenaltyDuration { duration: Ticks(0) } => {
            "a penalty must last longer than \"0s\"; use a duration such as \"1m\"".to_owned()
        }
        PolicyError::PenaltyDuration { duration } => {
            format!("a penalty must last less than a century (got {})", time(*duration))
        }
        other => other.to_string(),
    }
}

fn builder(text: &str) -> Result<LimitBuilder, LimitSyntaxError> {
    let mut words = text.split_whitespace();
    let Some(name) = words.next() else { return Err(LimitSyntaxError::Empty) };
    let kind =
        Kind::from_str(name).map_err(|_| LimitSyntaxError::Algorithm { name: name.into() })?;
    let rate = words.next().unwrap_or_default();
    let (limit, window) =
        parse_rate(rate).ok_or_else(|| LimitSyntaxError::Rate { rate: rate.into() })?;
    let mut builder = Policy::of(kind, limit).per(window);
    while let Some(word) = words.next() {
        let value = words.next().unwrap_or_default();
        builder = match word {
            "burst" => {
                let burst = parse_number(value);
                builder.burst(burst.ok_or_else(|| LimitSyntaxError::Burst { burst: value.into() })?)
            }
            "anchor" if value == "first_request" => builder.anchor(Anchor::FirstRequest),
            _ => return Err(LimitSyntaxError::Word { word: word.into() }),
        };
    }
    Ok(builder)
}

/// Displays a limit in the syntax that [`parse`] reads.
#[derive(Clone, Copy, Debug)]
pub struct LimitText<'a> {
    limit: &'a Limit,
    nanos_per_tick: u64,
}

impl<'a> LimitText<'a> {
    /// Displays a limit whose tick is a nanosecond.
    #[must_use]
    pub const fn new(limit: &'a Limit) -> Self {
        Self { limit, nanos_per_tick: 1 }
    }

    /// Displays a limit whose tick is a microsecond.
    #[must_use]
    pub const fn in_micros(limit: &'a Limit) -> Self {
        Self { limit, nanos_per_tick: 1_000 }
    }

    /// Returns the limit's window.
    #[must_use]
    pub fn window(&self) -> Span {
        Span(Ticks(self.limit.numbers().window.0.saturating_mul(self.nanos_per_tick)))
    }
}

impl fmt::Display for LimitText<'_> {
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

/// Displays a time span in nanoseconds as a whole number of the largest possible unit, such as `90s` or `1h`.
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

/// Parses `LIMIT/WINDOW`, where the window's number is optional: `5/s`, `100/1m`.
fn parse_rate(text: &str) -> Option<(u64, Ticks)> {
    let (limit, window) = text.split_once('/')?;
    Some((parse_number(limit)?, parse_span(window)?))
}

/// Parses a window such as `30s`, `1m` or `m`.
///
/// # Errors
/// Returns an error if the text is not a time span, or if the span is zero.
pub fn window(text: &str) -> Result<Ticks, String> {
    match parse_span(text) {
        Some(Ticks::ZERO) => Err("must be longer than 0s".to_owned()),
        Some(window) => Ok(window),
        None => Err(format!("found {text:?}; expected a time such as `30s`, `1m` or `1h`")),
    }
}

/// Parses a span such as `30s`, `1m` or `m`.
fn parse_span(text: &str) -> Option<Ticks> {
    if let Some((_, length)) = UNITS.iter().find(|(unit, _)| *unit == text) {
        return Some(Ticks(*length));
    }
    if let Ok(span) = duration::parse(text) {
        return Some(Ticks::from_duration(span));
    }
    // Below a millisecond, as a limit of a simulation is shown.
    let digits = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(digits);
    let (_, length) = UNITS.iter().find(|(name, _)| *name == unit)?;
    parse_number(number)?.checked_mul(*length).map(Ticks)
}

fn parse_number(text: &str) -> Option<u64> {
    let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    is_digits.then(|| text.parse().ok()).flatten()
}

/// The error for a text that is not a valid limit.
#[derive(Debug)]
#[non_exhaustive]
pub enum LimitSyntaxError {
    /// The text is empty.
    Empty,
    /// The algorithm does not exist.
    Algorithm {
        /// The name that was found.
        name: String,
    },
    /// The second word is not `LIMIT/WINDOW`.
    Rate {
        /// The word that was found.
        rate: String,
    },
    /// The word after `burst` is not a whole number.
    Burst {
        /// The word that was found.
        burst: String,
    },
    /// A word after the rate is unknown.
    Word {
        /// The word that was found.
        word: String,
    },
    /// The numbers do not make a valid limit.
    Policy(PolicyError),
}

impl fmt::Display for LimitSyntaxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str(
                "found an empty limit; expected a limit such as `token_bucket 100/1m burst 20`",
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
                "found {rate:?}; expected a limit and a window such as `100/1m`, `5/s` or `1000/1h` (whole numbers; units: ms, s, m, h, d)"
            ),
            Self::Burst { burst } if burst.is_empty() => f.write_str(
                "found nothing after `burst`; expected a whole number such as `burst 20`",
            ),
            Self::Burst { burst } => {
                write!(
                    f,
                    "found {burst:?} after `burst`; expected a whole number such as `burst 20`"
                )
            }
            Self::Word { word } => write!(
                f,
                "found {word:?} after the rate; expected `burst N`, `anchor first_request` or the end of the limit"
            ),
            Self::Policy(error) => f.write_str(&in_durations(error)),
        }
    }
}

impl std::error::Error for LimitSyntaxError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn prints_as(text: &str, printed: &str) {
        let limit = parse(text).expect("the limit is valid");
        assert_eq!(LimitText::new(&limit).to_string(), printed);
        assert_eq!(parse(printed).expect("the printed limit is valid"), limit);
    }

    #[track_caller]
    fn rejects(text: &str, expected: &str) {
        assert_eq!(parse(text).expect_err("the limit is not valid").to_string(), expected);
    }

    #[test]
    fn a_printed_limit_parses_as_the_same_limit() {
        prints_as("token_bucket 100/1m burst 20", "token_bucket 100/1m burst 20");
        prints_as("token_bucket 10/10s", "token_bucket 10/10s burst 10");
        prints_as("gcra 5/s", "gcra 5/1s burst 5");
        prints_as("leaky_bucket 5/500ms", "leaky_bucket 5/500ms burst 5");
        prints_as("fixed_window 1000/1h", "fixed_window 1000/1h");
        prints_as("  sliding_window_log   3/90s ", "sliding_window_log 3/90s");
        prints_as("sliding_window_counter 7/24h", "sliding_window_counter 7/1d");
        prints_as(
            "fixed_window 5/1m anchor first_request",
            "fixed_window 5/1m anchor first_request",
        );
        prints_as("token_bucket 1/7ns burst 3", "token_bucket 1/7ns burst 3");
    }

    #[test]
    fn a_policy_can_have_several_limits() {
        let policy = parse_policy("gcra 5/s burst 2, fixed_window 1000/1h").expect("it is valid");
        let limits: Vec<String> =
            policy.limits().iter().map(|limit| LimitText::new(limit).to_string()).collect();
        assert_eq!(limits, ["gcra 5/1s burst 2", "fixed_window 1000/1h"]);
        assert_eq!(parse_policy("gcra 5/s").expect("it is valid").limits().len(), 1);
        for bad in ["", "gcra 5/s,", "gcra 5/s, gcra 5/s", "gcra 5/s fixed_window 1/m"] {
            assert!(parse_policy(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_error_names_what_was_found_and_what_was_expected() {
        rejects(
            "",
            "found an empty limit; expected a limit such as `token_bucket 100/1m burst 20`",
        );
        rejects("token_bukcet 1/s", "found \"token_bukcet\"; did you mean `token_bucket`?");
        rejects(
            "window 1/s",
            "found \"window\"; expected one of token_bucket, gcra, leaky_bucket, fixed_window, \
             sliding_window_log, sliding_window_counter",
        );
        for rate in [
            "100",
            "100/",
            "/1m",
            "-1/1m",
            "+1/1m",
            "1.5/s",
            "100/1M",
            "100/1q",
            "18446744073709551616/s",
        ] {
            rejects(
                &format!("gcra {rate}"),
                &format!(
                    "found {rate:?}; expected a limit and a window such as `100/1m`, `5/s` or `1000/1h` (whole numbers; units: ms, s, m, h, d)"
                ),
            );
        }
        rejects(
            "gcra 5/s burst",
            "found nothing after `burst`; expected a whole number such as `burst 20`",
        );
        rejects(
            "gcra 5/s burst x",
            "found \"x\" after `burst`; expected a whole number such as `burst 20`",
        );
        rejects(
            "gcra 5/s per key",
            "found \"per\" after the rate; expected `burst N`, `anchor first_request` or the end of the limit",
        );
        rejects("gcra 0/s", "limit must be at least 1 (got 0)");
        rejects("gcra 5/0s", "window must be longer than \"0s\"; use a duration such as \"1m\"");
        rejects(
            "fixed_window 5/s burst 6",
            "the burst of a fixed_window is its limit, 5 (got 6); leave burst out or use a bucket",
        );
    }
}
