//! The tables of a policy store, one kind per algorithm.

use tallygate_core::{
    BucketState, FixedWindowState, Limit, LimitRecord, Machine, Policy, SlidingWindowCounterState,
    SlidingWindowLogState,
};

use super::Capacity;
use super::keys::Keys;

pub(super) enum KeysByKind {
    Bucket(Keys<BucketState>),
    WideBucket(Keys<BucketState<u128>>),
    FixedWindow(Keys<FixedWindowState>),
    SlidingWindowLog(Keys<SlidingWindowLogState>),
    SlidingWindowCounter(Keys<SlidingWindowCounterState>),
    /// The table for several limits, or for one limit with options.
    Several(Keys<Box<[LimitRecord]>>),
}

/// Runs an expression with a policy's rule and the keys of its kind.
macro_rules! of_its_kind {
    ($policy:expr, $kinds:expr, |$rule:ident, $keys:ident| $run:expr) => {{
        use tallygate_core::{Limit, Machine};
        use $crate::memory::kinds::KeysByKind;
        match ($policy.plain().map(Limit::machine), $kinds) {
            (Some(Machine::Bucket($rule)), KeysByKind::Bucket($keys)) => $run,
            (Some(Machine::WideBucket($rule)), KeysByKind::WideBucket($keys)) => $run,
            (Some(Machine::FixedWindow($rule)), KeysByKind::FixedWindow($keys)) => $run,
            (Some(Machine::SlidingWindowLog($rule)), KeysByKind::SlidingWindowLog($keys)) => $run,
            (
                Some(Machine::SlidingWindowCounter($rule)),
                KeysByKind::SlidingWindowCounter($keys),
            ) => $run,
            (None, KeysByKind::Several($keys)) => {
                let $rule = $policy;
                $run
            }
            _ => Err($crate::storage::StoreError::OtherPolicy),
        }
    }};
}

/// Runs an expression with the keys of any kind.
macro_rules! of_any_kind {
    ($kinds:expr, |$keys:ident| $run:expr) => {{
        use $crate::memory::kinds::KeysByKind;
        match $kinds {
            KeysByKind::Bucket($keys) => $run,
            KeysByKind::WideBucket($keys) => $run,
            KeysByKind::FixedWindow($keys) => $run,
            KeysByKind::SlidingWindowLog($keys) => $run,
            KeysByKind::SlidingWindowCounter($keys) => $run,
            KeysByKind::Several($keys) => $run,
        }
    }};
}

pub(super) use {of_any_kind, of_its_kind};

impl KeysByKind {
    pub(super) fn of(policy: &Policy, known_bits: u32, capacity: Capacity) -> Self {
        match policy.plain().map(Limit::machine) {
            Some(Machine::Bucket(_)) => Self::Bucket(Keys::with_known_bits(known_bits, capacity)),
            Some(Machine::WideBucket(_)) => {
                Self::WideBucket(Keys::with_known_bits(known_bits, capacity))
            }
            Some(Machine::FixedWindow(_)) => {
                Self::FixedWindow(Keys::with_known_bits(known_bits, capacity))
            }
            Some(Machine::SlidingWindowLog(_)) => {
                Self::SlidingWindowLog(Keys::with_known_bits(known_bits, capacity))
            }
            Some(Machine::SlidingWindowCounter(_)) => {
                Self::SlidingWindowCounter(Keys::with_known_bits(known_bits, capacity))
            }
            None => Self::Several(Keys::with_known_bits(known_bits, capacity)),
        }
    }
}
