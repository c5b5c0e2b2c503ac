//! The encoding of states as bytes. It is compact, and bytes that are not a valid state are an error.
//!
//! Numbers are encoded as LEB128: seven bits per byte, the least significant first. Signed numbers are zigzag
//! encoded before. So a small state takes a few bytes, and every number has exactly one encoding.

use alloc::vec::Vec;
use core::fmt;

use crate::Tick;

/// The error for bytes that are not a state of a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecodeError {
    /// The bytes end before the state is complete.
    Truncated,
    /// There are more bytes after the state.
    Trailing {
        /// The number of bytes after the state.
        extra: usize,
    },
    /// The state belongs to another algorithm.
    Tag {
        /// The tag in the bytes.
        found: u8,
        /// The tag of the algorithm that decodes them.
        expected: u8,
    },
    /// The state belongs to a limit with other numbers. [`Limit::adopt`](crate::Limit::adopt) can read it.
    OtherLimit,
    /// A field has a value that no decision produces.
    Field {
        /// The name of the field.
        name: &'static str,
    },
}

impl fmt::Display for DecodeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Truncated => write!(f, "the state is truncated; expected more bytes"),
            Self::Trailing { extra } => {
                write!(f, "{extra} bytes after the end of the state; expected none")
            }
            Self::Tag { found, expected } => write!(
                f,
                "the state belongs to another algorithm: it has tag {found}, expected {expected}"
            ),
            Self::OtherLimit => write!(
                f,
                "the state belongs to a limit with other numbers; use Limit::adopt to carry it over"
            ),
            Self::Field { name } => write!(f, "the {name} in the state is out of range"),
        }
    }
}

impl core::error::Error for DecodeError {}

/// Appends a number of up to 128 bits.
pub(crate) fn put(out: &mut Vec<u8>, value: impl Into<u128>) {
    let mut value = value.into();
    while value >= 0x80 {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the low seven bits and the continuation bit"
        )]
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    #[expect(clippy::cast_possible_truncation, reason = "below 0x80")]
    out.push(value as u8);
}

/// Appends an instant.
pub(crate) fn put_tick(out: &mut Vec<u8>, tick: Tick) {
    put(out, u64::from_ne_bytes(((tick.0 << 1) ^ (tick.0 >> 63)).to_ne_bytes()));
}

/// Reads values from the front of bytes.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn tag(&mut self, expected: u8) -> Result<(), DecodeError> {
        match self.byte()? {
            found if found == expected => Ok(()),
            found => Err(DecodeError::Tag { found, expected }),
        }
    }

    pub(crate) fn byte(&mut self) -> Result<u8, DecodeError> {
        let (&byte, rest) = self.0.split_first().ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(byte)
    }

    /// Reads a number in its shortest encoding. `name` names the field in errors.
    pub(crate) fn number<N: TryFrom<u128>>(
        &mut self,
        name: &'static str,
    ) -> Result<N, DecodeError> {
        let mut value = 0_u128;
        let mut shift = 0;
        loop {
            let byte = self.byte()?;
            let bits = u128::from(byte & 0x7f);
            let last = byte & 0x80 == 0;
            let lost = shift > 126 || (bits << shift) >> shift != bits;
            let padded = last && byte == 0 && shift > 0;
            if lost || padded {
                return Err(DecodeError::Field { name });
            }
            value |= bits << shift;
            if last {
                return N::try_from(value).map_err(|_| DecodeError::Field { name });
            }
            shift += 7;
        }
    }

    pub(crate) fn tick(&mut self, name: &'static str) -> Result<Tick, DecodeError> {
        let zigzag: u64 = self.number(name)?;
        let signed = |value: u64| i64::from_ne_bytes(value.to_ne_bytes());
        Ok(Tick(signed(zigzag >> 1) ^ -signed(zigzag & 1)))
    }

    /// Reads `length` bytes without decoding them.
    pub(crate) fn bytes(&mut self, length: usize) -> Result<&'a [u8], DecodeError> {
        let (bytes, rest) = self.0.split_at_checked(length).ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(bytes)
    }

    pub(crate) fn end(self) -> Result<(), DecodeError> {
        match self.0.len() {
            0 => Ok(()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_and_largest_numbers_survive_encoding() {
        for value in [0, 1, 127, 128, u128::from(u64::MAX), u128::MAX - 1, u128::MAX] {
            let mut bytes = Vec::new();
            put(&mut bytes, value);
            let mut reader = Reader(&bytes);
            assert_eq!(reader.number::<u128>("n"), Ok(value));
            assert_eq!(reader.end(), Ok(()));
        }
        for tick in [i64::MIN, -1, 0, 1, i64::MAX] {
            let mut bytes = Vec::new();
            put_tick(&mut bytes, Tick(tick));
            assert_eq!(Reader(&bytes).tick("t"), Ok(Tick(tick)));
        }
    }

    #[test]
    fn a_number_has_one_encoding_and_fits_its_type() {
        let field = Err(DecodeError::Field { name: "n" });
        assert_eq!(Reader(&[0x80, 0x00]).number::<u64>("n"), field);
        assert_eq!(Reader(&[0x80]).number::<u64>("n"), Err(DecodeError::Truncated));
        let mut too_large = [0xff; 19];
        too_large[18] = 0x07;
        assert_eq!(Reader(&too_large).number::<u128>("n").map(|_| 0), field);
        let mut bytes = Vec::new();
        put(&mut bytes, u128::from(u64::MAX) + 1);
        assert_eq!(Reader(&bytes).number::<u64>("n"), field);
    }
}
