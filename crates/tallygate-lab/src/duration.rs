//! Durations as text: `500ms`, `30s`, `1m`, `1h`, `7d`, or several of them in a row, such as `1h30m`.
//!
//! Units that people read in different ways do not exist: `M` is a month to some programs and a minute to others, and
//! months and years have no fixed length.

use std::fmt;
use std::time::Duration;

/// The units, and their lengths in nanoseconds.
const UNITS: [(&str, u64); 5] = [
    ("d", 86_400_000_000_000),
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
];

/// The expected syntax, for error messages.
pub const EXPECTED: &str =
    "a duration such as \"500ms\", \"30s\", \"1m\", \"1h\" or \"7d\" (units: ms, s, m, h, d)";

/// Parses a duration.
///
/// # Errors
/// Returns an error if the text is not a duration. The error says what was found and what was expected.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let error = || DurationError { text: text.to_owned() };
    let (mut rest, mut total) = (text.trim(), Duration::ZERO);
    if rest.is_empty() {
        return Err(error());
    }
    while !rest.is_empty() {
        let digits = rest.find(|c: char| !c.is_ascii_digit()).ok_or_else(error)?;
        let (number, after) = rest.split_at(digits);
        let end = after.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(after.len());
        let (unit, after) = after.split_at(end);
        let number: u64 = number.parse().map_err(|_| error())?;
        let (_, nanos) = UNITS.iter().find(|(name, _)| *name == unit).ok_or_else(error)?;
        let nanos = u128::from(number) * u128::from(*nanos);
        let part = Duration::new(
            u64::try_from(nanos / 1_000_000_000).map_err(|_| error())?,
            u32::try_from(nanos % 1_000_000_000).map_err(|_| error())?,
        );
        total = total.checked_add(part).ok_or_else(error)?;
        rest = after.trim_start();
    }
    Ok(total)
}

/// Displays a duration in the syntax that [`parse`] reads, in up to five units. Parts below a millisecond are shown as
/// `us` and `ns`.
#[derive(Clone, Copy, Debug)]
pub struct DurationText(pub Duration);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.as_nanos();
        if rest == 0 {
            return f.write_str("0s");
        }
        for (unit, nanos) in UNITS.into_iter().chain([("us", 1_000), ("ns", 1)]) {
            let nanos = u128::from(nanos);
            if rest >= nanos {
                write!(f, "{}{unit}", rest / nanos)?;
                rest %= nanos;
            }
        }
        Ok(())
    }
}

/// The error for a text that is not a duration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DurationError {
    text: String,
}

impl fmt::Display for DurationError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "found {:?}; expected {EXPECTED}", self.text)
    }
}

impl std::error::Error for DurationError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_read_and_shown_in_the_same_syntax() {
        let table = [
            ("500ms", 500, "500ms"),
            ("30s", 30_000, "30s"),
            ("90s", 90_000, "1m30s"),
            ("1m", 60_000, "1m"),
            ("1h30m", 5_400_000, "1h30m"),
            ("1h 30m", 5_400_000, "1h30m"),
            ("7d", 604_800_000, "7d"),
            ("0s", 0, "0s"),
            ("1000h", 3_600_000_000, "41d16h"),
        ];
        for (text, ms, shown) in table {
            assert_eq!(parse(text), Ok(Duration::from_millis(ms)), "{text}");
            assert_eq!(DurationText(Duration::from_millis(ms)).to_string(), shown);
        }
        assert_eq!(DurationText(Duration::from_nanos(1_002_003)).to_string(), "1ms2us3ns");
        let longest = parse(&format!("{}s", u64::MAX)).expect("it fits");
        assert_eq!(parse(&DurationText(longest).to_string()), Ok(longest));
    }

    #[test]
    fn a_unit_that_misleads_is_an_error() {
        for text in [
            "1M",
            "1y",
            "1w",
            "1min",
            "1sec",
            "1S",
            "1D",
            "1us",
            "1ns",
            "10",
            "s",
            "",
            " ",
            "-1s",
            "1.5s",
            "1e3s",
            "1s1",
            "1 h",
            "99999999999999999999s",
            "soon",
            "18446744073709551615d",
        ] {
            let error = parse(text).expect_err(text).to_string();
            assert!(
                error.starts_with(&format!("found {text:?}; expected a duration such as ")),
                "{error}"
            );
            assert!(error.ends_with("(units: ms, s, m, h, d)"), "{error}");
        }
    }
}
