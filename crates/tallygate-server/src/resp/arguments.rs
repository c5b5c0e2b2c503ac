//! Reads the arguments of a command.

use std::ops::RangeInclusive;

use super::reply::{Output, Quoted};
use crate::config::MAX_NAME_BYTES;
use crate::gate::{GateError, ThrottleError};

/// The largest number in an argument: the largest integer of RESP.
pub(super) const MAX_NUMBER: u64 = i64::MAX as u64;

/// An error in the arguments of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Mistake<'a> {
    /// There are too few or too many arguments.
    Count {
        given: usize,
    },
    /// The arguments do not follow the syntax.
    Usage,
    /// An argument where none or another one is expected.
    Unexpected {
        found: &'a [u8],
    },
    Number {
        what: &'static str,
        found: &'a [u8],
        range: RangeInclusive<u64>,
    },
    Name {
        what: &'static str,
        found: &'a [u8],
    },
    Gate(GateError),
    Throttle(ThrottleError),
}

impl From<GateError> for Mistake<'_> {
    fn from(error: GateError) -> Self {
        Self::Gate(error)
    }
}

impl From<ThrottleError> for Mistake<'_> {
    fn from(error: ThrottleError) -> Self {
        Self::Throttle(error)
    }
}

impl Mistake<'_> {
    /// Writes the error; `usage` is the syntax of the command.
    pub(super) fn write(self, usage: impl std::fmt::Display, out: &mut Output) {
        match self {
            Self::Count { given } => {
                out.error(
                    "ERR",
                    format_args!("wrong number of arguments (got {given}); use {usage}"),
                );
            }
            Self::Unexpected { found } => {
                let found = Quoted(found);
                out.error("ERR", format_args!("unexpected argument {found}; use {usage}"));
            }
            Self::Usage => out.error("ERR", format_args!("wrong arguments; use {usage}")),
            Self::Number { what, found, range } => {
                let (found, least, most) = (Quoted(found), range.start(), range.end());
                out.error(
                    "ERR",
                    format_args!(
                        "{what} must be a whole number from {least} to {most} (got {found})"
                    ),
                );
            }
            Self::Name { what, found } => {
                out.error("ERR", format_args!("no {what} is named {}", Quoted(found)));
            }
            Self::Gate(error) => out.error("ERR", error),
            Self::Throttle(error) => out.error("ERR", error),
        }
    }
}

/// Reads a whole number that consists of digits only.
pub(super) fn number<'a>(
    what: &'static str,
    found: &'a [u8],
    range: RangeInclusive<u64>,
) -> Result<u64, Mistake<'a>> {
    let digits = found.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    });
    match digits {
        Some(value) if range.contains(&value) && !found.is_empty() => Ok(value),
        _ => Err(Mistake::Number { what, found, range }),
    }
}

/// Reads the name of a policy or a tier. A name longer than the configuration allows is unknown.
pub(super) fn name<'a>(what: &'static str, found: &'a [u8]) -> Result<&'a str, Mistake<'a>> {
    let short = (found.len() <= MAX_NAME_BYTES).then_some(found);
    let text = short.and_then(|found| std::str::from_utf8(found).ok());
    text.ok_or(Mistake::Name { what, found })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault A14.
    #[test]
    fn numbers_are_digits_and_nothing_else() {
        assert_eq!(number("n", b"0", 0..=MAX_NUMBER), Ok(0));
        assert_eq!(number("n", b"9223372036854775807", 0..=MAX_NUMBER), Ok(MAX_NUMBER));
        let rejected: [&[u8]; 14] = [
            b"",
            b"-1",
            b"+1",
            b" 1",
            b"1 ",
            b"1e3",
            b"0x10",
            b"1.0",
            b"inf",
            b"nan",
            b"1\0",
            b"\xd9\xa1",
            b"9223372036854775808",
            b"18446744073709551617",
        ];
        for found in rejected {
            let mistake = Mistake::Number { what: "n", found, range: 0..=MAX_NUMBER };
            assert_eq!(number("n", found, 0..=MAX_NUMBER), Err(mistake));
        }
        assert!(number("n", b"0", 1..=MAX_NUMBER).is_err());
        assert!(number("n", b"2", 0..=1).is_err());
    }
}
