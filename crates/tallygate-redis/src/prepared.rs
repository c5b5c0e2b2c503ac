//! A policy prepared for Redis: in microseconds, with its scripts and the terms of local decisions.

use std::sync::Arc;

use tallygate::{Cost, Kind, Policy};

use crate::key_broker::Terms;
use crate::script::Scripted;
use crate::value::ReturnsForm;
use crate::window::ENTRIES_PER_PLACE;

/// A policy prepared for Redis.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// In microseconds.
    pub(crate) policy: Arc<Policy>,
    /// The first bytes of a value that was written under it.
    pub(crate) head: Vec<u8>,
    /// Its scripts; `None` if its numbers are not exact in doubles.
    pub(crate) scripted: Option<Scripted>,
    /// Which checks are decided without a call.
    pub(crate) terms: Terms,
    pub(crate) policy_change: PolicyChange,
}

impl Prepared {
    /// Returns how the script that lowers the usage of a key reads and writes its returns; `None` if there is no such script.
    pub(crate) fn returns_form(&self, is_of_client: bool) -> Option<ReturnsForm<'_>> {
        self.scripted.as_ref()?.lower.as_ref()?;
        Some(ReturnsForm { policy: &self.policy, head: &self.head, is_of_client })
    }

    /// Returns how many places a key needs among the calls that decide on several keys: one, and more for long logs.
    pub(crate) fn places(&self) -> usize {
        let entries = self.policy.limits().iter().map(|limit| match limit.numbers() {
            numbers if numbers.kind == Kind::SlidingWindowLog => numbers.limit,
            _ => 0,
        });
        let places = entries.fold(0, Cost::saturating_add) / ENTRIES_PER_PLACE;
        usize::try_from(places).unwrap_or(usize::MAX / 2).min(1 << 20) + 1
    }
}

/// What a check does with a state that was written under another policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PolicyChange {
    /// Carries the usage over, and keeps only the new state.
    Replace,
    /// Keeps both states.
    KeepBoth,
    /// Does not decide in the script, but leaves the key to the client.
    LeaveToClient,
}

impl PolicyChange {
    /// Returns the argument for a script.
    pub(crate) const fn argument(self) -> &'static [u8] {
        match self {
            Self::Replace => b"r",
            Self::KeepBoth => b"",
            Self::LeaveToClient => b"l",
        }
    }
}

/// Whether a script decides on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScriptUse {
    /// A script decides, if there is one.
    IfPossible,
    /// This process decides, because no script can decide on the value of the key.
    Never,
}
