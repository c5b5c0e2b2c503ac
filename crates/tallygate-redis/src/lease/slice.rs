//! Slices of a quota: when their lease ends, and how the unused rest is returned.

use tallygate::algorithm::LimitRecord;
use tallygate::{Cost, Kind, Policy, Tick, Ticks};

/// The size of a slice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// The units that are needed now.
    pub(crate) need: Cost,
    /// The units that would be used within the life of a lease.
    pub(crate) want: Cost,
}

/// A slice that was taken, and the state in the store after that.
#[derive(Debug)]
pub(crate) struct TakenSlice {
    pub(crate) amount: Cost,
    pub(crate) at: Tick,
    pub(crate) state: Box<[LimitRecord]>,
}

/// Returns when a lease ends, by the clock of the store.
pub(crate) fn end_of_lease(taken: Tick, life: Ticks) -> Tick {
    taken.after(life).unwrap_or(Tick(i64::MAX))
}

/// Returns whether outstanding leases are tracked: for limits that earn units back meanwhile.
pub(crate) fn tracks_outstanding(policy: &Policy) -> bool {
    policy.plain().is_some_and(|limit| limit.numbers().kind.is_bucket())
}

/// Returns whether the unused rest of a slice is returned. The departure times of a leaky bucket are assigned already.
pub(crate) fn returns_unused(policy: &Policy) -> bool {
    policy.plain().is_some_and(|limit| limit.numbers().kind != Kind::LeakyBucket)
}
