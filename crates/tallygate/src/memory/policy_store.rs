//! The store of one policy, with a table of the kind that its limits need.

use std::fmt;
use std::sync::Arc;

use tallygate_core::{Answer, Cost, Decision, Op, Policy, Tick, Ticks, Timed};

use crate::ask::Ask;
use crate::clock::{Clock, SystemClock};
use crate::reservation::{Charged, SettleError};
use crate::storage::{RuleRef, Store, StoreError, replies_at_once};
use crate::table::{Swept, Usage};

use super::engine::Engine;
use super::kinds::{KeysByKind, of_any_kind, of_its_kind};
use super::{Capacity, Sweep};

/// Keeps the keys of a [`Policy`] in memory. Each algorithm has its own kind of table, so that the state of a bucket takes
/// 16 bytes and not as many as the largest of the six.
pub struct PolicyStore<C = SystemClock> {
    /// The policy that the store was made for.
    pub(super) policy: Arc<Policy>,
    pub(super) kinds: KeysByKind,
    pub(super) engine: Engine<C>,
}

impl<C: Clock> PolicyStore<C> {
    /// Creates an empty store for the keys of a policy.
    ///
    /// # Panics
    /// Panics if the system has no address space for that many keys.
    pub fn new(policy: &Policy, capacity: Capacity, clock: C) -> Self {
        Self {
            policy: Arc::new(policy.clone()),
            kinds: KeysByKind::of(policy, u128::BITS, capacity),
            engine: Engine::new(clock),
        }
    }

    /// Returns how many keys there are, and how many were dropped so far.
    pub fn usage(&self) -> Usage {
        of_any_kind!(&self.kinds, |keys| keys.table.usage())
    }

    /// Drops idle keys in the next `buckets` buckets of the table: see
    /// [`RateLimiter::sweep`](crate::RateLimiter::sweep).
    ///
    /// # Errors
    /// Returns an error if the store was made for another kind of policy.
    pub fn sweep(&self, policy: &Policy, buckets: usize) -> Result<Swept, StoreError> {
        of_its_kind!(policy, &self.kinds, |rule, keys| Ok(self.engine.sweep(keys, rule, buckets)))
    }
}

impl<C: Clock> Store<Policy> for PolicyStore<C> {
    replies_at_once!();

    #[inline]
    fn apply<'a, T: Answer>(
        &'a self,
        policy: impl RuleRef<Policy> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<T, StoreError> {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, keys| self.engine.apply(keys, rule, key, op, now))
    }

    #[inline]
    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        policy: impl RuleRef<Policy> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&Policy, Timed) -> T + Send + 'a,
    ) -> Result<T, StoreError> {
        let timed = self.apply(&*policy, key, op, now)?;
        Ok(make(&policy, timed))
    }

    fn check_many<'a, T: Answer, K>(
        &'a self,
        policy: impl RuleRef<Policy> + 'a,
        asks: &'a [K],
    ) -> Result<Vec<T>, StoreError>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, kept| self.engine.check_many(kept, rule, asks))
    }

    fn reserve<'a>(
        &'a self,
        policy: impl RuleRef<Policy> + 'a,
        key: &[u8],
        estimate: Cost,
        time_to_live: Ticks,
        now: Option<Tick>,
    ) -> Result<Charged, StoreError> {
        let policy = &*policy;
        of_its_kind!(policy, &self.kinds, |rule, keys| {
            self.engine.reserve(keys, rule, key, (estimate, time_to_live), now)
        })
    }

    fn settle<'a>(
        &'a self,
        policy: impl RuleRef<Policy> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Result<Decision, StoreError>, SettleError> {
        let policy = &*policy;
        let settled = of_its_kind!(policy, &self.kinds, |rule, keys| {
            Ok(self.engine.settle(keys, rule, key, (change, charged), now))
        });
        settled.unwrap_or_else(|error| Ok(Err(error)))
    }

    fn now(&self) -> Tick {
        self.engine.now()
    }

    fn rules_changed(&self, key: Option<&[u8]>) {
        of_any_kind!(&self.kinds, |keys| self.engine.rules_changed(keys, key));
    }
}

impl<C: Clock> Sweep<Policy> for PolicyStore<C> {
    fn sweep(&self, rule: &Policy, buckets: usize) -> Swept {
        // A store that was made for another policy has no keys of this one.
        Self::sweep(self, rule, buckets).unwrap_or_default()
    }
}

impl<C: Clock> fmt::Debug for PolicyStore<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PolicyStore").field("usage", &self.usage()).finish_non_exhaustive()
    }
}
