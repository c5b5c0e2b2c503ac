//! What a shadow limit remembers of the newest requests, so that refunds do not make it drift.
//!
//! A shadow limit charges only requests that it would allow. A refund does not say which request it is for. If it
//! lowered the usage of a shadow limit that never charged the request, the limit would later allow requests that it
//! would deny if it were enforced.
//!
//! **Definition.** A refund returns the newest units of the client that have not been returned. Units that the shadow
//! limit did not charge leave its state as it is. So the state is that of an enforced limit that got only the requests
//! that it allows, if every refund is for the newest requests.
//!
//! The history covers the newest requests back to the eighth change from allowed to denied. Older units count as
//! charged. It is empty until the limit denies an allowed request. If the state of the limit is fresh, the history has
//! no effect: a refund reaches it only after it has returned everything that was charged since, so nothing is used by
//! then. So a store may drop both together.

use alloc::vec::Vec;

use crate::codec::{self, DecodeError, Reader};
use crate::doubles::{LARGEST, NumberReader};

/// The most runs that are remembered.
const MAX_RUNS: usize = 8;

/// The newest requests of a key under a shadow limit, the newest run first.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShadowHistory(Vec<Run>);

/// Units that the limit did not charge, and the units that it charged after them. Scripts compute with these numbers,
/// so they are at most [`LARGEST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    /// Not 0, except in the newest run.
    charged: u64,
    /// Never 0.
    uncharged: u64,
}

impl ShadowHistory {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Records units of an allowed request.
    pub(crate) fn record(&mut self, units: u64, is_charged: bool) {
        let add = |sum: u64| sum.saturating_add(units).min(LARGEST);
        match self.0.first_mut() {
            Some(newest) if is_charged => newest.charged = add(newest.charged),
            Some(newest) if newest.charged == 0 => newest.uncharged = add(newest.uncharged),
            None if is_charged => {}
            _ => {
                self.0.insert(0, Run { charged: 0, uncharged: add(0) });
                self.0.truncate(MAX_RUNS);
            }
        }
    }

    /// Takes the newest units off. Returns how many of them the limit has charged.
    pub(crate) fn take_newest(&mut self, units: u128) -> u128 {
        let (mut left, mut charged) = (units, 0);
        while left > 0 {
            let Some(newest) = self.0.first_mut() else { return charged + left };
            charged += take(&mut left, &mut newest.charged);
            take(&mut left, &mut newest.uncharged);
            if newest.uncharged == 0 {
                self.0.remove(0);
            }
        }
        charged
    }

    /// Takes off units of a reservation that was settled for less.
    ///
    /// The history does not know which run the reservation is in. It takes the newest charged units, or the oldest
    /// uncharged ones. So later refunds may reach charged units later than they should, but not earlier. There are two
    /// exceptions: the reservation is older than the history, or a refund before the settlement took its units.
    pub(crate) fn take_settled(&mut self, mut units: u128, was_charged: bool) {
        if was_charged {
            self.0.iter_mut().for_each(|run| _ = take(&mut units, &mut run.charged));
        } else {
            self.0.iter_mut().rev().for_each(|run| _ = take(&mut units, &mut run.uncharged));
        }
        // Build the list again from the oldest run, because empty parts join their neighbors.
        for run in core::mem::take(&mut self.0).into_iter().rev() {
            for (units, is_charged) in [(run.uncharged, false), (run.charged, true)] {
                if units > 0 {
                    self.record(units, is_charged);
                }
            }
        }
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        codec::put(out, self.0.len() as u64);
        for run in &self.0 {
            codec::put(out, run.charged);
            codec::put(out, run.uncharged);
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let count: u64 = reader.number(NAME)?;
        let runs = (0..count.min(MAX_RUNS as u64 + 1))
            .map(|_| Ok(Run { charged: reader.number(NAME)?, uncharged: reader.number(NAME)? }));
        Self::of(runs.collect::<Result<_, _>>()?)
    }

    /// Appends the number of runs, and for each run the charged and the uncharged units.
    pub(crate) fn write_numbers(&self, out: &mut Vec<i128>) {
        out.push(self.0.len() as i128);
        out.extend(self.0.iter().flat_map(|run| [run.charged, run.uncharged].map(i128::from)));
    }

    pub(crate) fn read_numbers(numbers: &mut NumberReader<'_>) -> Result<Self, DecodeError> {
        let count: usize = numbers.next(NAME)?;
        let runs = (0..count.min(MAX_RUNS + 1))
            .map(|_| Ok(Run { charged: numbers.next(NAME)?, uncharged: numbers.next(NAME)? }));
        Self::of(runs.collect::<Result<_, _>>()?)
    }

    fn of(runs: Vec<Run>) -> Result<Self, DecodeError> {
        let is_valid = |(index, run): (usize, &Run)| {
            (index == 0 || run.charged > 0)
                && run.uncharged > 0
                && run.charged.max(run.uncharged) <= LARGEST
        };
        if runs.len() > MAX_RUNS || !runs.iter().enumerate().all(is_valid) {
            return Err(DecodeError::Field { name: NAME });
        }
        Ok(Self(runs))
    }
}

const NAME: &str = "history of a shadow limit";

/// Takes as many of `left` units as possible off `units`. Returns how many.
fn take(left: &mut u128, units: &mut u64) -> u128 {
    let taken = u64::try_from(*left).unwrap_or(u64::MAX).min(*units);
    *units -= taken;
    *left -= u128::from(taken);
    taken.into()
}
