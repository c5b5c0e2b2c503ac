//! Limits on numbers for scripts that compute in doubles, which are exact up to 2⁵³.
//!
//! Each number is at most [`LARGEST`]. The level of a bucket may be larger: it is then split into two numbers.

use crate::Tick;
use crate::codec::DecodeError;

/// The largest number that a script gets. The sum of two such numbers is still exact in doubles.
pub(crate) const LARGEST: u64 = 1 << 52;

/// The number of bits in the low part of a deep bucket's level.
pub(crate) const LIMB_BITS: u32 = 52;

/// Returns the mask of the low part of a level.
pub(crate) const fn low_mask(is_deep: bool) -> u128 {
    if is_deep { (1 << LIMB_BITS) - 1 } else { u128::MAX }
}

/// Reads numbers from the front of a list.
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
