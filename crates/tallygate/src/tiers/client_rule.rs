//! The rule of one client, as an algorithm: its policy, or its override while that is in force.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::Arc;

use tallygate_core::{
    Algorithm, Bucket, Cost, DecodeError, Facts, Fit, FitBehind, Limit, Policy, Receipt, Share,
    Tick, Used,
};

use crate::client_state::ClientState;

use super::{Access, Override};

/// The rule of one client, for one decision.
#[derive(Clone, Debug)]
pub struct ClientRule {
    /// The override that was set at run time. It may have ended when the decision is made.
    pub(super) set: Option<Override>,
    /// The access without that override.
    pub(super) access: Access,
}

impl ClientRule {
    /// Creates a rule without an override.
    #[must_use]
    pub fn of(access: impl Into<Access>) -> Self {
        Self { set: None, access: access.into() }
    }

    /// Returns the access of the client at a time.
    #[must_use]
    pub fn access(&self, now: Tick) -> &Access {
        match &self.set {
            Some(set) if set.is_in_force(now) => &set.access,
            _ => &self.access,
        }
    }

    /// Returns the policy of the override and the policy without it.
    pub fn policies(&self) -> impl Iterator<Item = &Arc<Policy>> {
        let set = self.set.as_ref().map(|set| &set.access);
        set.into_iter().chain([&self.access]).filter_map(|access| match access {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked => None,
        })
    }

    /// Returns the rule with converted policies and times, for a store with its own unit of time.
    ///
    /// # Errors
    /// Returns the error of `policy`.
    pub fn with<E>(
        &self,
        policy: impl Fn(&Arc<Policy>) -> Result<Arc<Policy>, E>,
        time: impl Fn(Tick) -> Tick,
    ) -> Result<Self, E> {
        let access = |access: &Access| match access {
            Access::Limited(limited) => policy(limited).map(Access::Limited),
            Access::Unlimited => Ok(Access::Unlimited),
            Access::Blocked => Ok(Access::Blocked),
        };
        let set = self
            .set
            .as_ref()
            .map(|set| Ok(Override { access: access(&set.access)?, until: set.until.map(&time) }));
        Ok(Self { set: set.transpose()?, access: access(&self.access)? })
    }

    /// Calls `ask` if the client has a policy at `now`. The state is under that policy already.
    fn limited<T>(&self, now: Tick, ask: impl FnOnce() -> Option<T>) -> Option<T> {
        if self.charges(now) { ask() } else { None }
    }

    /// Returns whether an override is in force that will end.
    fn is_temporary(&self, now: Tick) -> bool {
        self.set.as_ref().is_some_and(|set| set.until.is_some_and(|until| now < until))
    }

    fn is_blocked(&self, now: Tick) -> bool {
        matches!(self.access(now), Access::Blocked)
    }
}

impl Algorithm for ClientRule {
    type State = ClientState;

    fn capacity(&self) -> Cost {
        match &self.access {
            Access::Limited(policy) => policy.capacity(),
            Access::Unlimited => Cost::MAX,
            Access::Blocked => 0,
        }
    }

    fn fresh(&self, now: Tick) -> ClientState {
        match self.access(now) {
            Access::Limited(policy) => ClientState::fresh(policy, now),
            Access::Unlimited | Access::Blocked => ClientState::default(),
        }
    }

    fn initial(&self, now: Tick) -> ClientState {
        match self.access(now) {
            Access::Limited(policy) => ClientState::new(policy, now),
            Access::Unlimited | Access::Blocked => ClientState::default(),
        }
    }

    #[inline]
    fn last_change(&self, state: &ClientState) -> Tick {
        state.last_change()
    }

    /// A state moves to another policy no earlier than at its last change. A policy itself takes that time for a late
    /// caller only if the caller is late by less than its window.
    #[inline]
    fn decision_time(&self, state: &ClientState, now: Tick) -> Tick {
        let at = state.decision_time(now);
        match self.access(at) {
            Access::Limited(policy) if !state.is_under(policy) => at.max(state.last_change()),
            _ => at,
        }
    }

    /// Adapts each state by its own policy. The rule is only that of the caller.
    fn rebase_after_set_back(&self, state: &mut ClientState, now: Tick) {
        state.rebase_after_set_back(now);
    }

    /// Also returns `true` if the state is not under this policy yet, so that [`rebase`](Self::rebase) brings it there.
    fn clock_was_set_back(&self, state: &ClientState, now: Tick) -> bool {
        match self.access(now) {
            Access::Limited(policy) => !state.is_under(policy) || state.clock_was_set_back(now),
            Access::Unlimited | Access::Blocked => false,
        }
    }

    /// Moves the state to the policy, whatever the decision will be. Otherwise the retry time of a denial would be
    /// wrong.
    fn rebase(&self, state: &mut ClientState, now: Tick) {
        let Access::Limited(policy) = self.access(now) else { return };
        state.bring_under(policy, now);
        state.rebase(now);
    }

    fn allows(&self, state: &ClientState, now: Tick, cost: Cost) -> bool {
        self.limited(now, || state.allows(now, cost)).unwrap_or_else(|| !self.is_blocked(now))
    }

    fn try_charge(&self, state: &mut ClientState, now: Tick, cost: Cost) -> bool {
        let allowed = if self.charges(now) { state.try_charge(now, cost) } else { None };
        allowed.unwrap_or_else(|| !self.is_blocked(now))
    }

    fn record_denial(&self, state: &mut ClientState, now: Tick, cost: Cost) {
        if self.charges(now) {
            state.record_denial(now, cost);
        }
    }

    fn denying_limit(
        &self,
        state: &ClientState,
        now: Tick,
        cost: Cost,
        shadow: bool,
    ) -> Option<usize> {
        self.limited(now, || state.denying_limit(now, cost, shadow))
    }

    fn limit(&self, index: usize, now: Tick) -> Option<&Limit> {
        match self.access(now) {
            Access::Limited(policy) => policy.limits().get(index),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn charges(&self, now: Tick) -> bool {
        matches!(self.access(now), Access::Limited(_))
    }

    /// While an override is in force that will end, the wait of a denial also depends on the access after it.
    fn sole_bucket(&self, now: Tick) -> Option<&Bucket> {
        match self.access(now) {
            Access::Limited(policy) if !self.is_temporary(now) => policy.sole_bucket(now),
            _ => None,
        }
    }

    /// If the override ends before the cost fits, the access after it decides.
    fn fit(&self, state: &ClientState, now: Tick, cost: Cost) -> Fit {
        let fit = match self.limited(now, || state.fit(now, cost)) {
            Some(fit) => fit,
            None if self.is_blocked(now) => Fit::Never,
            None => Fit::Now,
        };
        let end = self.set.as_ref().filter(|set| set.is_in_force(now)).and_then(|set| set.until);
        let Some(end) = end else { return fit };
        let rest = end.since(now);
        if matches!(fit, Fit::Now) || matches!(fit, Fit::After(wait) if wait < rest) {
            return fit;
        }
        let then = match &self.access {
            Access::Limited(policy) => state.fit_under(policy, end, cost),
            Access::Unlimited => Fit::Now,
            Access::Blocked => Fit::Never,
        };
        match then {
            Fit::Now => Fit::After(rest),
            Fit::After(wait) => Fit::After(rest.plus(wait)),
            Fit::Never => Fit::Never,
        }
    }

    /// Ignores the units ahead while an override is in force that will end.
    fn fit_behind(&self, state: &ClientState, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let is_limited = self.charges(now) && !self.is_temporary(now);
        let fit = is_limited.then(|| state.fit_behind(now, ahead, cost)).flatten();
        fit.unwrap_or_else(|| FitBehind::alone(self.fit(state, now, cost), ahead))
    }

    fn identity(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.access.hash_into(&mut hasher);
        if let Some(set) = &self.set {
            set.access.hash_into(&mut hasher);
            set.until.hash(&mut hasher);
        }
        hasher.finish()
    }

    /// Charges the policies that the client was checked under, even if the client has no limit now: the charge may settle
    /// a reservation that was made under a policy.
    fn charge(&self, state: &mut ClientState, now: Tick, amount: i128) -> u128 {
        if amount > 0 && state.is_empty() {
            return 0;
        }
        state.charge(now, amount)
    }

    fn receipt(&self, state: &ClientState) -> Receipt {
        state.receipt()
    }

    fn try_charge_with_receipt(
        &self,
        state: &mut ClientState,
        now: Tick,
        cost: Cost,
    ) -> Option<Receipt> {
        if self.charges(now) && !state.is_empty() {
            return state.try_charge_with_receipt(now, cost);
        }
        (!self.is_blocked(now)).then_some(Receipt::Nothing)
    }

    /// Settles the policies that were charged, whatever the rules are now.
    fn settle(&self, state: &mut ClientState, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let policy = match self.access(now) {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked if *receipt == Receipt::Nothing => return 0,
            Access::Unlimited | Access::Blocked => receipt.decided_by(),
        };
        let is_fresh = || state.fresh_at().is_some_and(|at| at <= now);
        // A fresh state may have been dropped, which must not change any decision.
        if let Some(policy) = policy.filter(|_| change > 0 && is_fresh()) {
            *state = ClientState::fresh(policy, now);
        }
        state.settle(now, change, receipt)
    }

    fn facts(&self, state: &ClientState, now: Tick, charged: Option<Cost>) -> Facts {
        match self.limited(now, || state.facts(now, charged)) {
            Some(facts) => facts,
            None if self.is_blocked(now) => Facts::BLOCKED,
            None => Facts::UNLIMITED,
        }
    }

    fn fresh_at(&self, state: &ClientState) -> Option<Tick> {
        state.fresh_at()
    }

    fn used(&self, state: &ClientState, now: Tick) -> Used {
        state.used(now)
    }

    fn share_used(&self, state: &ClientState, now: Tick) -> Share {
        state.share_used(now)
    }

    fn with_used(&self, used: Used, now: Tick) -> ClientState {
        match self.access(now) {
            Access::Limited(policy) => ClientState::with_used(policy, used, now),
            Access::Unlimited | Access::Blocked => ClientState::default(),
        }
    }

    /// Encodes the state under the policy of the last check: for stores that keep a key under one policy.
    fn encode(&self, state: &ClientState, out: &mut Vec<u8>) {
        state.encode_first(out);
    }

    /// Decodes only states of the policy without an override.
    fn decode(&self, bytes: &[u8]) -> Result<ClientState, DecodeError> {
        match &self.access {
            _ if bytes.is_empty() => Ok(ClientState::default()),
            Access::Limited(policy) => {
                Ok(ClientState::of([(policy.clone(), policy.decode(bytes)?)], &[]))
            }
            Access::Unlimited | Access::Blocked => Err(DecodeError::OtherLimit),
        }
    }
}
