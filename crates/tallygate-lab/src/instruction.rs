//! One line of a replay: `request CLIENT TIMESTAMP [COST]`.
//!
//! Clients are bytes, not text. Numbers are decimal digits and nothing else, but for the minus sign
//! of a timestamp: `+1`, `1e3`, `0x10` and `1_000` are refused, never guessed at.

use std::fmt;

use tallygate_core::{Cost, Tick};

/// What a line asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Instruction<'a> {
    /// A request to decide.
    Request {
        /// Whose.
        client: &'a [u8],
        /// When.
        now: Tick,
        /// How much; 1 if the line does not say.
        cost: Cost,
    },
    /// Another word: it counts as an instruction, and is skipped.
    Other,
}

impl<'a> Instruction<'a> {
    /// Reads a line; `None` if it is blank.
    ///
    /// # Errors
    /// It is a request, but not one that can be read.
    #[inline]
    pub fn parse(line: &'a [u8]) -> Result<Option<Self>, InstructionError> {
        let mut fields = Fields(line);
        let Some(word) = fields.next() else { return Ok(None) };
        if word != b"request" {
            return Ok(Some(Self::Other));
        }
        let client =
            fields.next().ok_or_else(|| InstructionError::missing("a client after `request`"))?;
        let now = fields
            .next()
            .ok_or_else(|| InstructionError::missing("a timestamp after the client"))?;
        let now = signed(now)
            .ok_or_else(|| InstructionError::found(now, "a timestamp, a whole 64-bit number"))?;
        let cost = match fields.next() {
            None => 1,
            Some(cost) => unsigned(cost).ok_or_else(|| {
                InstructionError::found(cost, "a cost, a whole 64-bit number without a sign")
            })?,
        };
        match fields.next() {
            None => Ok(Some(Self::Request { client, now: Tick(now), cost })),
            Some(extra) => {
                Err(InstructionError::found(extra, "the end of the line after the cost"))
            }
        }
    }

    /// Reads a line that holds one signed number and nothing else, as the head of a replay does;
    /// `None` if it is blank.
    ///
    /// # Errors
    /// It holds something else than `expected`, which the error quotes.
    pub fn parse_number(
        line: &[u8],
        expected: &'static str,
    ) -> Result<Option<i64>, InstructionError> {
        let mut fields = Fields(line);
        let Some(number) = fields.next() else { return Ok(None) };
        let value = signed(number).ok_or_else(|| InstructionError::found(number, expected))?;
        match fields.next() {
            None => Ok(Some(value)),
            Some(extra) => Err(InstructionError::found(extra, "one number on this line")),
        }
    }
}

/// The fields of a line, between spaces, tabs and line ends.
struct Fields<'a>(&'a [u8]);

impl<'a> Iterator for Fields<'a> {
    type Item = &'a [u8];

    #[inline]
    fn next(&mut self) -> Option<&'a [u8]> {
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t' | b'\r' | b'\n');
        let start = self.0.iter().position(|byte| !blank(byte))?;
        let rest = &self.0[start..];
        let end = rest.iter().position(blank).unwrap_or(rest.len());
        let (field, rest) = rest.split_at(end);
        self.0 = rest;
        Some(field)
    }
}

#[inline]
fn unsigned(digits: &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    if digits.is_empty() {
        return None;
    }
    for &byte in digits {
        let digit = byte.wrapping_sub(b'0');
        if digit > 9 {
            return None;
        }
        value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
    }
    Some(value)
}

#[inline]
fn signed(digits: &[u8]) -> Option<i64> {
    match digits {
        [b'-', digits @ ..] => 0_i64.checked_sub_unsigned(unsigned(digits)?),
        digits => i64::try_from(unsigned(digits)?).ok(),
    }
}

/// Why an instruction cannot be read: what was found, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstructionError {
    line: Option<usize>,
    /// What was found, safe to print; `None` at the end of the line.
    found: Option<String>,
    expected: &'static str,
}

/// How much of what was found an error quotes, in bytes.
const QUOTED: usize = 60;

impl InstructionError {
    #[cold]
    fn missing(expected: &'static str) -> Self {
        Self { line: None, found: None, expected }
    }

    #[cold]
    fn found(found: &[u8], expected: &'static str) -> Self {
        use fmt::Write as _;
        let mut quoted = String::new();
        // Writing to a string cannot fail.
        let _ = write!(quoted, "`{}`", found[..found.len().min(QUOTED)].escape_ascii());
        if found.len() > QUOTED {
            let _ = write!(quoted, " and {} bytes more", found.len() - QUOTED);
        }
        Self { line: None, found: Some(quoted), expected }
    }

    /// The same error, with the line it is on, counted from 1.
    #[must_use]
    pub fn at_line(mut self, line: usize) -> Self {
        self.line = Some(line);
        self
    }
}

impl fmt::Display for InstructionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        let found = self.found.as_deref().unwrap_or("the end of the line");
        write!(f, "found {found}; expected {}", self.expected)
    }
}

impl std::error::Error for InstructionError {}
