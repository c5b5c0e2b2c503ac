//! GCRA: one theoretical arrival time (TAT) a key instead of a count of tokens.
//!
//! A request conforms if max(TAT, now) + c·W/L − now ≤ B·W/L, and then the left side plus `now` is
//! the new TAT. It decides as the token bucket does in every field, because the two are one machine:
//! the TAT is the instant at which the bucket is empty again. It is kept as a distance from the last
//! change, which makes it exact (a TAT is rarely a whole tick) and lets it tell a clock that was set
//! back from a client that used much.

use crate::Tick;
use crate::bucket::{Bucket, BucketState, Face, Level};
use crate::limit::Kind;

/// The exact generic cell rate algorithm.
pub type Gcra<N = u64> = Bucket<Cell, N>;

/// The face of GCRA.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cell {}

impl Face for Cell {
    const KIND: Kind = Kind::Gcra;
}

/// A theoretical arrival time: a whole tick and a fraction of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArrivalTime {
    /// The whole tick.
    pub tick: Tick,
    /// The fraction of a tick after it: a numerator below its denominator.
    pub fraction: (u64, u64),
}

impl<N: Level> Gcra<N> {
    /// The theoretical arrival time that a state stands for.
    #[must_use]
    pub fn arrival_time(&self, state: &BucketState<N>) -> ArrivalTime {
        let (tick, numerator) = self.empty_at(state);
        ArrivalTime { tick, fraction: (numerator, self.drain()) }
    }
}
