//! What a shadow limit remembers of the newest requests, so that refunds do not make it drift.
//!
//! A shadow limit charges only requests that it would allow. A refund does not say which request it is for. If it
//! lowered the usage of a shadow limit that never charged the request, the limit would later allow requests that it
//! would deny if it were enforced.
//!
//! **Definition.** A refund returns the newest units of the client that have not been returned. A settlement returns
//! units of its reservation. If a refund has returned these already, the settlement returns the newest units before
//! them. Units that the shadow limit did not charge leave its state as it is. So the state is that of an enforced limit
//! that got only the requests that it allows, if every refund is for the newest requests.
//!
//! The history covers the newest requests back to the eighth change from allowed to denied. Older units count as
//! charged. It is empty until the limit denies an allowed request. If the state of the limit is fresh, the history has
//! no effect: a refund reaches it only after it has returned everything that was charged since, so nothing is used by
//! then. So a store may drop both together.
//!
//! **Numbers.** Each run of requests has a number, and the receipt of a reservation contains the number of its run.
//! Numbers start at the time of the first run. So a reservation from before its state was dropped is older than the
//! history, and its settlement changes no newer run.
//!
//! The history does not distinguish the units of a run. So if a refund returns units of a reservation and newer requests
//! then get into the same run, a later settlement returns units of these requests, and not units before the reservation.

use alloc::vec::Vec;

use crate::Tick;
use crate::codec::{self, DecodeError, Reader};
use crate::doubles::{LARGEST, NumberReader};

/// The most runs that are remembered.
const MAX_RUNS: usize = 8;

/// The newest requests of a key under a shadow limit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ShadowHistory {
    /// The number before that of the oldest run in the list.
    forgotten: u64,
    /// The runs, the newest first. Their numbers are consecutive, so a run that a settlement empties stays in the list.
    runs: Vec<Run>,
}

/// Units that the limit did not charge, and the units that it charged after them. Scripts compute with these numbers,
/// so they are at most [`LARGEST`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    charged: u64,
    uncharged: u64,
}

impl Run {
    const fn is_empty(self) -> bool {
        self.charged == 0 && self.uncharged == 0
    }
}

impl ShadowHistory {
    pub(crate) fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the number of the newest run.
    pub(crate) fn newest(&self) -> u64 {
        self.forgotten.saturating_add(self.runs.len() as u64)
    }

    /// Records units of an allowed request.
    pub(crate) fn record(&mut self, units: u64, is_charged: bool, now: Tick) {
        let add = |sum: u64| sum.saturating_add(units).min(LARGEST);
        match self.runs.first_mut() {
            Some(newest) if is_charged => newest.charged = add(newest.charged),
            Some(newest) if newest.charged == 0 => newest.uncharged = add(newest.uncharged),
            None if is_charged => {}
            _ => {
                if self.is_empty() {
                    self.forgotten = now.0.max(0).unsigned_abs();
                }
                self.runs.insert(0, Run { charged: 0, uncharged: add(0) });
                if self.runs.len() > MAX_RUNS {
                    self.runs.pop();
                    self.forgotten = self.forgotten.saturating_add(1);
                }
            }
        }
    }

    /// Takes the newest units off. Returns how many of them the limit has charged.
    pub(crate) fn take_newest(&mut self, units: u128) -> u128 {
        self.take(0, true, units)
    }

    /// Takes off units of a reservation of a run. Returns how many of them the limit has charged.
    pub(crate) fn take_settled(&mut self, units: u128, run: u64, was_charged: bool) -> u128 {
        if run <= self.forgotten {
            // Older than the history.
            return if was_charged { units } else { 0 };
        }
        // Refunds have returned the units of runs that are newer than the newest one.
        let newer = self.newest().checked_sub(run);
        self.take(newer.map_or(0, saturate), was_charged || newer.is_none(), units)
    }

    /// Takes units off the runs from `first` on: off the charged units of that run only if `with_charged` is true.
    /// Returns how many charged units that are. Units before the history count as charged.
    fn take(&mut self, first: usize, with_charged: bool, units: u128) -> u128 {
        let (mut left, mut charged) = (units, 0);
        for (index, run) in self.runs.iter_mut().enumerate().skip(first) {
            if index > first || with_charged {
                charged += take(&mut left, &mut run.charged);
            }
            take(&mut left, &mut run.uncharged);
        }
        let emptied = self.runs.iter().take_while(|run| run.is_empty()).count();
        self.runs.drain(..emptied);
        charged + left
    }

    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        codec::put(out, self.runs.len() as u64);
        codec::put(out, self.forgotten);
        for run in &self.runs {
            codec::put(out, run.charged);
            codec::put(out, run.uncharged);
        }
    }

    pub(crate) fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        let (count, forgotten): (u64, u64) = (reader.number(NAME)?, reader.number(NAME)?);
        let runs = (0..count.min(MAX_RUNS as u64 + 1))
            .map(|_| Ok(Run { charged: reader.number(NAME)?, uncharged: reader.number(NAME)? }));
        Self::of(forgotten, runs.collect::<Result<_, _>>()?)
    }

    /// Appends the number of runs, the number before that of the oldest, and for each run the charged and the uncharged
    /// units.
    pub(crate) fn write_numbers(&self, out: &mut Vec<i128>) {
        out.extend([self.runs.len() as i128, self.forgotten.into()]);
        out.extend(self.runs.iter().flat_map(|run| [run.charged, run.uncharged].map(i128::from)));
    }

    pub(crate) fn read_numbers(numbers: &mut NumberReader<'_>) -> Result<Self, DecodeError> {
        let (count, forgotten): (usize, u64) = (numbers.next(NAME)?, numbers.next(NAME)?);
        let runs = (0..count.min(MAX_RUNS + 1))
            .map(|_| Ok(Run { charged: numbers.next(NAME)?, uncharged: numbers.next(NAME)? }));
        Self::of(forgotten, runs.collect::<Result<_, _>>()?)
    }

    fn of(forgotten: u64, runs: Vec<Run>) -> Result<Self, DecodeError> {
        let is_valid = |run: &Run| run.charged.max(run.uncharged) <= LARGEST;
        let is_trimmed = runs.first().is_none_or(|newest| !newest.is_empty());
        if runs.len() > MAX_RUNS || !is_trimmed || !runs.iter().all(is_valid) {
            return Err(DecodeError::Field { name: NAME });
        }
        Ok(Self { forgotten, runs })
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

fn saturate(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
