//! What a slice of a quota is, when its lease ends, and what is done with the rest of it.

use tallygate::{Cost, Kind, Policy, Tick, Ticks};

/// How much is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Slice {
    /// What is needed now.
    pub(crate) need: Cost,
    /// What would be used within a lease's life.
    pub(crate) want: Cost,
}

/// When a lease ends by the store's clock.
pub(crate) fn end_of_lease(taken: Tick, life: Ticks) -> Tick {
    taken.after(life).unwrap_or(Tick(i64::MAX))
}

/// Whether it matters what is out: where something is earned back meanwhile.
pub(crate) fn notes_what_is_out(policy: &Policy) -> bool {
    policy.plain().is_some_and(|limit| limit.numbers().kind.is_bucket())
}

/// Whether what is left of a slice is given back. The turns of a leaky bucket are told already.
pub(crate) fn gives_back(policy: &Policy) -> bool {
    policy.plain().is_some_and(|limit| limit.numbers().kind != Kind::LeakyBucket)
}
