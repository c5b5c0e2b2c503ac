//! Parses one line of a replay: `request CLIENT TIMESTAMP [COST]`, or the same as a list:
//! `["request", "alice", "0"]`.
//!
//! In a plain line, a client is any bytes without white space; in a list, it is any string. Numbers are decimal digits only,
//! with or without quotes in a list; a timestamp may have a minus sign. `+1`, `1e3`, `0x10` and `1_000` are errors.

use std::borrow::Cow;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, Visitor};
use tallygate_core::{Cost, Tick};

/// A parsed line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Instruction<'a> {
    /// A request to be decided.
    Request {
        /// The client's name.
        client: Cow<'a, [u8]>,
        /// The time of the request.
        now: Tick,
        /// The units that the request charges; 1 if the line has no cost.
        cost: Cost,
    },
    /// A line that starts with another word. It counts as an instruction and is skipped.
    Other,
}

impl<'a> Instruction<'a> {
    /// Parses a line. Returns `None` if the line is blank.
    ///
    /// # Errors
    /// Returns an error if the line is a request with a missing, malformed or extra field, or an incomplete list.
    #[inline]
    pub fn parse(line: &'a [u8]) -> Result<Option<Self>, InstructionError> {
        let mut fields = Fields(line);
        match fields.next() {
            None => Ok(None),
            Some(b"request") => Self::request(fields.map(Cow::Borrowed)).map(Some),
            Some([b'[', ..]) => Self::parse_list(line).map(Some),
            Some(_) => Ok(Some(Self::Other)),
        }
    }

    /// Parses a line that is a JSON list. A comma after the list is accepted, as in a list of lists.
    #[cold]
    fn parse_list(line: &'a [u8]) -> Result<Self, InstructionError> {
        let line = line.trim_ascii();
        let list = line.strip_suffix(b",").unwrap_or(line);
        let list: Vec<ListItem<'a>> = serde_json::from_slice(list).map_err(|_| {
            let expected =
                "a list of texts and whole numbers, such as [\"request\", \"alice\", \"0\"]";
            InstructionError::found(line, expected)
        })?;
        let mut fields = list.into_iter().map(|item| item.0);
        match fields.next() {
            Some(word) if *word == *b"request" => Self::request(fields),
            _ => Ok(Self::Other),
        }
    }

    /// Parses the fields after `request`.
    #[inline]
    fn request(mut fields: impl Iterator<Item = Cow<'a, [u8]>>) -> Result<Self, InstructionError> {
        let client =
            fields.next().ok_or_else(|| InstructionError::missing("a client after `request`"))?;
        let now = fields
            .next()
            .ok_or_else(|| InstructionError::missing("a timestamp after the client"))?;
        let now = signed(&now)
            .ok_or_else(|| InstructionError::found(&now, "a timestamp, a whole 64-bit number"))?;
        let cost = match fields.next() {
            None => 1,
            Some(cost) => unsigned(&cost).ok_or_else(|| {
                InstructionError::found(&cost, "a cost, a whole 64-bit number without a sign")
            })?,
        };
        match fields.next() {
            None => Ok(Self::Request { client, now: Tick(now), cost }),
            Some(extra) => {
                Err(InstructionError::found(&extra, "the end of the line after the cost"))
            }
        }
    }

    /// Parses a line with one signed number, as in the header of a replay. Returns `None` if the line is blank.
    ///
    /// # Errors
    /// Returns an error if the line has anything else; the error names `expected`.
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

/// A text or a whole number in a list, as the bytes that a plain line would have.
struct ListItem<'a>(Cow<'a, [u8]>);

impl<'de: 'a, 'a> Deserialize<'de> for ListItem<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ListItemVisitor).map(ListItem)
    }
}

struct ListItemVisitor;

impl<'de> Visitor<'de> for ListItemVisitor {
    type Value = Cow<'de, [u8]>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text or a whole number")
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Cow::Borrowed(text.as_bytes()))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Cow::Owned(text.as_bytes().to_vec()))
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<Self::Value, E> {
        Ok(Cow::Owned(number.to_string().into_bytes()))
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<Self::Value, E> {
        Ok(Cow::Owned(number.to_string().into_bytes()))
    }
}

/// Iterates over the fields of a line, which spaces, tabs and line ends separate.
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

/// The error for an instruction that is not valid: the text that was found, and what was expected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstructionError {
    line: Option<usize>,
    /// The text that was found, escaped for printing; `None` at the end of the line.
    found: Option<String>,
    expected: &'static str,
}

/// The most bytes of the found text that an error quotes.
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
        let shown = found[..found.len().min(QUOTED)].escape_ascii().to_string();
        let _ = write!(quoted, "`{}`", shown.replace("\\\"", "\""));
        if found.len() > QUOTED {
            let _ = write!(quoted, " and {} more bytes", found.len() - QUOTED);
        }
        Self { line: None, found: Some(quoted), expected }
    }

    /// Returns the error with a line number, counted from 1.
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
