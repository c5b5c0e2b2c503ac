//! The waits that are reported to a caller that is late.
//!
//! A caller reads the clock before it has the lock of its key. If another thread changed the key in between, the decision
//! is made at the time of that change.

use tallygate_core::{Answer, Tick};

/// Counts the waits of an answer from the caller's `now`, which is earlier than `at` if the caller is late.
#[inline]
pub(crate) fn counted_from<T: Answer>(now: Tick, at: Tick, answer: T) -> T {
    if at > now { answer.with_lateness(at.since(now)) } else { answer }
}
