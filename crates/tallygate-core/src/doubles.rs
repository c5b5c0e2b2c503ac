//! Numbers for a script that computes in doubles, which are exact up to 2⁵³.
//!
//! Each is at most [`LARGEST`]. A bucket's level may need more; it is then two numbers.

use crate::Tick;
use crate::codec::DecodeError;

/// The largest number that a script is given. Sums of two are still exact in doubles.
pub(crate) const LARGEST: u64 = 1 << 52;

/// How many bits of a deep bucket's level the lower of its two numbers has.
pub(crate) const LIMB_BITS: u32 = 52;

/// What is left of a level in its lower number.
pub(crate) const fn limb(is_deep: bool) -> u128 {
    if is_deep { (1 << LIMB_BITS) - 1 } else { u128::MAX }
}

/// Takes numbers from the front of a list.
#[derive(Debug)]
pub(crate) struct NumberReader<'a>(pub(crate) &'a [i128]);

impl NumberReader<'_> {
    pub(crate) fn any(&mut self) -> Result<i128, DecodeError> {
        let (&number, rest) = self.0.split_first().ok_or(DecodeError::Truncated)?;
        self.0 = rest;
        Ok(number)
    }

    pub(crate) fn next<N: TryFrom<i128>>(&mut self, name: &'static str) -> Result<N, DecodeError> {
        N::try_from(self.any()?).map_err(|_| DecodeError::Field { name })
    }

    pub(crate) fn tick(&mut self, name: &'static str) -> Result<Tick, DecodeError> {
        self.next(name).map(Tick)
    }
}
