//! The wire format of protobuf: reads and writes fields.
//!
//! Messages are read without copies, and the reader of each message bounds its lists while it reads. A generated decoder
//! would build all of a message first: a list of empty entries takes two bytes each on the wire, and 25 times as much in
//! memory.

use std::fmt;

/// The value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Value<'a> {
    Varint(u64),
    /// A text, a message or bytes.
    Bytes(&'a [u8]),
    /// A number of 4 or 8 bytes. No message here has one, so it is skipped.
    Fixed,
}

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WireError {
    Truncated,
    LongVarint,
    BadTag,
    /// A field has another type than the message says.
    WrongType {
        field: u32,
    },
    NotUtf8 {
        field: u32,
    },
}

/// The fields of a message, in the order of its bytes.
#[derive(Clone, Debug)]
pub(crate) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(crate) const fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    /// Returns the number and the value of the next field.
    pub(crate) fn next(&mut self) -> Result<Option<(u32, Value<'a>)>, WireError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let tag = u32::try_from(self.varint()?).map_err(|_| WireError::BadTag)?;
        let number = tag >> 3;
        if number == 0 {
            return Err(WireError::BadTag);
        }
        let value = match tag & 7 {
            0 => Value::Varint(self.varint()?),
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let length = usize::try_from(self.varint()?).map_err(|_| WireError::Truncated)?;
                Value::Bytes(self.take(length)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            // Groups are not part of proto3.
            _ => return Err(WireError::BadTag),
        };
        Ok(Some((number, value)))
    }

    fn varint(&mut self) -> Result<u64, WireError> {
        let mut value = 0;
        for place in 0..10 {
            let (byte, rest) = self.rest.split_first().ok_or(WireError::Truncated)?;
            self.rest = rest;
            if place == 9 && *byte > 1 {
                return Err(WireError::LongVarint);
            }
            value |= u64::from(byte & 0x7f) << (7 * place);
            if byte & 0x80 == 0 {
                return Ok(value);
            }
        }
        Err(WireError::LongVarint)
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], WireError> {
        let (taken, rest) = self.rest.split_at_checked(length).ok_or(WireError::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }
}

impl<'a> Value<'a> {
    pub(crate) fn bytes(self, field: u32) -> Result<&'a [u8], WireError> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            _ => Err(WireError::WrongType { field }),
        }
    }

    pub(crate) fn text(self, field: u32) -> Result<&'a str, WireError> {
        std::str::from_utf8(self.bytes(field)?).map_err(|_| WireError::NotUtf8 { field })
    }

    pub(crate) fn number(self, field: u32) -> Result<u64, WireError> {
        match self {
            Self::Varint(number) => Ok(number),
            _ => Err(WireError::WrongType { field }),
        }
    }

    /// Returns a number of 32 bits: as in protobuf, the low bits of a longer one.
    #[expect(clippy::cast_possible_truncation, reason = "protobuf says so")]
    pub(crate) fn number32(self, field: u32) -> Result<u32, WireError> {
        self.number(field).map(|number| number as u32)
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => f.write_str("the message ends within a field"),
            Self::LongVarint => f.write_str("a number has more than 64 bits"),
            Self::BadTag => f.write_str("a field has an invalid tag"),
            Self::WrongType { field } => write!(f, "field {field} has another type than expected"),
            Self::NotUtf8 { field } => write!(f, "field {field} is not valid UTF-8"),
        }
    }
}

fn write_varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    out.push((number & 0x7f) as u8);
}

/// Writes a number, unless it is 0, which is the default.
pub(crate) fn number(out: &mut Vec<u8>, field: u32, number: u64) {
    if number != 0 {
        write_varint(out, u64::from(field) << 3);
        write_varint(out, number);
    }
}

/// Writes bytes, also if there are none: an element of a list, or a message that is present.
pub(crate) fn bytes(out: &mut Vec<u8>, field: u32, bytes: &[u8]) {
    write_varint(out, u64::from(field) << 3 | 2);
    write_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

/// Writes a text, unless it is empty, which is the default.
pub(crate) fn text(out: &mut Vec<u8>, field: u32, text: &str) {
    if !text.is_empty() {
        bytes(out, field, text.as_bytes());
    }
}

/// Writes a message.
pub(crate) fn message(out: &mut Vec<u8>, field: u32, write: impl FnOnce(&mut Vec<u8>)) {
    let mut inner = Vec::new();
    write(&mut inner);
    bytes(out, field, &inner);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        for number in [1, 127, 128, 300, u64::from(u32::MAX), u64::MAX] {
            let mut out = Vec::new();
            super::number(&mut out, 3, number);
            text(&mut out, 300, "ä");
            let mut fields = Fields::of(&out);
            assert_eq!(fields.next(), Ok(Some((3, Value::Varint(number)))));
            let (field, value) = fields.next().unwrap().unwrap();
            assert_eq!((field, value.text(field)), (300, Ok("ä")));
            assert_eq!(fields.next(), Ok(None));
        }
    }

    #[test]
    fn every_truncated_message_is_an_error_or_a_shorter_message() {
        let mut out = Vec::new();
        message(&mut out, 2, |out| text(out, 1, "entry"));
        for cut in 1..out.len() {
            assert_eq!(Fields::of(&out[..cut]).next(), Err(WireError::Truncated));
        }
    }

    #[test]
    fn invalid_tags_and_numbers_are_errors() {
        for (bytes, error) in [
            (&[0x00, 0][..], WireError::BadTag),
            (&[0x0b], WireError::BadTag),
            (&[0x0e], WireError::BadTag),
            (&[0xff; 11], WireError::LongVarint),
            (
                &[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2],
                WireError::LongVarint,
            ),
            (&[0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f], WireError::Truncated),
            (&[0x09, 0, 0], WireError::Truncated),
            (&[0x0d, 0, 0], WireError::Truncated),
        ] {
            assert_eq!(Fields::of(bytes).next(), Err(error), "{bytes:?}");
        }
    }
}
