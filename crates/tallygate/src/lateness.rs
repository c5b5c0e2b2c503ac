//! Corrects the waits that are reported to a late caller.
//!
//! A caller reads the clock before it has the lock of its key. If another thread changed the key in between, the decision
//! is made at the time of that change.

use tallygate_core::{Answer, Tick};

/// Adds to the waits of an answer the time from the caller's `now` to `at`, which is later if the caller is late.
#[inline]
pub(crate) fn counted_from<T: Answer>(now: Tick, at: Tick, answer: T) -> T {
    if at > now { answer.with_lateness(at.since(now)) } else { answer }
}
