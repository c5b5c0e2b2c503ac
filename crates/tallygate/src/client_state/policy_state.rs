//! The state of a client under one policy.

use std::borrow::Cow;
use std::sync::Arc;

use tallygate_core::{
    Algorithm, Bucket, BucketState, Cost, Facts, Fit, FitBehind, Limit, LimitRecord, LimitState,
    Machine, Policy, Receipt, Share, Tick, Used,
};

use crate::allowance::Rate;

/// The state of a client under one policy.
#[derive(Clone, Debug)]
pub(super) struct PolicyState {
    pub(super) policy: Arc<Policy>,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// The state of a policy that is one bucket without options.
    Bucket(BucketState),
    Records(Box<[LimitRecord]>),
}

/// Runs an expression with the rule of a policy, and wraps the state that it makes.
macro_rules! make {
    ($policy:expr, |$rule:ident| $make:expr) => {
        match $policy.plain().map(Limit::machine) {
            Some(Machine::Bucket($rule)) => State::Bucket($make),
            _ => {
                let $rule = &**$policy;
                State::Records($make)
            }
        }
    };
}

/// Runs an expression with the rule and its state.
macro_rules! with {
    ($under:expr, |$rule:ident, $state:ident| $run:expr) => {{
        let PolicyState { policy, state } = $under;
        match state {
            State::Bucket($state) => match policy.plain().map(Limit::machine) {
                Some(Machine::Bucket($rule)) => $run,
                _ => unreachable!("only the state of a bucket is in place"),
            },
            State::Records($state) => {
                let $rule = &**policy;
                $run
            }
        }
    }};
}

impl PolicyState {
    pub(super) fn new(policy: Arc<Policy>, records: Box<[LimitRecord]>) -> Self {
        let state = match (policy.plain(), &*records) {
            (Some(_), [standing]) => match standing.state() {
                LimitState::Bucket(state) => State::Bucket(*state),
                _ => State::Records(records),
            },
            _ => State::Records(records),
        };
        Self { policy, state }
    }

    pub(super) fn fresh(policy: &Arc<Policy>, now: Tick) -> Self {
        Self { policy: policy.clone(), state: make!(policy, |rule| rule.fresh(now)) }
    }

    pub(super) fn first(policy: &Arc<Policy>, now: Tick) -> Self {
        Self { policy: policy.clone(), state: make!(policy, |rule| rule.initial(now)) }
    }

    pub(super) fn with_used(policy: &Arc<Policy>, used: Used, now: Tick) -> Self {
        Self { policy: policy.clone(), state: make!(policy, |rule| rule.with_used(used, now)) }
    }

    pub(super) fn is(&self, policy: &Arc<Policy>) -> bool {
        Arc::ptr_eq(&self.policy, policy) || self.policy == *policy
    }

    pub(super) fn records(&self) -> Cow<'_, Box<[LimitRecord]>> {
        match &self.state {
            State::Bucket(state) => Cow::Owned([LimitState::Bucket(*state).into()].into()),
            State::Records(records) => Cow::Borrowed(records),
        }
    }

    /// Returns the bucket that the policy is, and its state.
    pub(super) fn bucket(&self) -> Option<(&Bucket, &BucketState)> {
        match (&self.state, self.policy.plain().map(Limit::machine)) {
            (State::Bucket(state), Some(Machine::Bucket(rule))) => Some((rule, state)),
            _ => None,
        }
    }

    #[inline]
    pub(super) fn last_change(&self) -> Tick {
        with!(self, |rule, state| rule.last_change(state))
    }

    pub(super) fn decision_time(&self, now: Tick) -> Tick {
        with!(self, |rule, state| rule.decision_time(state, now))
    }

    pub(super) fn rebase_after_set_back(&mut self, now: Tick) {
        with!(self, |rule, state| rule.rebase_after_set_back(state, now));
    }

    #[inline]
    pub(super) fn clock_was_set_back(&self, now: Tick) -> bool {
        with!(self, |rule, state| rule.clock_was_set_back(state, now))
    }

    /// Rebases the state, if the clock was set back.
    pub(super) fn rebase(&mut self, now: Tick) {
        with!(self, |rule, state| {
            if rule.clock_was_set_back(state, now) {
                rule.rebase(state, now);
            }
        });
    }

    pub(super) fn allows(&self, now: Tick, cost: Cost) -> bool {
        with!(self, |rule, state| rule.allows(state, now, cost))
    }

    #[inline]
    pub(super) fn try_charge(&mut self, now: Tick, cost: Cost) -> bool {
        with!(self, |rule, state| rule.try_charge(state, now, cost))
    }

    pub(super) fn record_denial(&mut self, now: Tick, cost: Cost) {
        with!(self, |rule, state| rule.record_denial(state, now, cost));
    }

    pub(super) fn denying_limit(&self, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        with!(self, |rule, state| rule.denying_limit(state, now, cost, shadow))
    }

    pub(super) fn fit(&self, now: Tick, cost: Cost) -> Fit {
        with!(self, |rule, state| rule.fit(state, now, cost))
    }

    pub(super) fn fit_behind(&self, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        with!(self, |rule, state| rule.fit_behind(state, now, ahead, cost))
    }

    pub(super) fn charge(&mut self, now: Tick, amount: i128) -> u128 {
        with!(self, |rule, state| rule.charge(state, now, amount))
    }

    pub(super) fn receipt(&self) -> Receipt {
        with!(self, |rule, state| rule.receipt(state))
    }

    pub(super) fn try_charge_with_receipt(&mut self, now: Tick, cost: Cost) -> Option<Receipt> {
        with!(self, |rule, state| rule.try_charge_with_receipt(state, now, cost))
    }

    pub(super) fn charge_with_receipt(&mut self, now: Tick, cost: Cost) -> Receipt {
        with!(self, |rule, state| rule.charge_with_receipt(state, now, cost))
    }

    pub(super) fn settle(&mut self, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        with!(self, |rule, state| rule.settle(state, now, change, receipt))
    }

    #[inline]
    pub(super) fn facts(&self, now: Tick, charged: Option<Cost>) -> Facts {
        with!(self, |rule, state| rule.facts(state, now, charged))
    }

    pub(super) fn fresh_at(&self) -> Option<Tick> {
        with!(self, |rule, state| rule.fresh_at(state))
    }

    pub(super) fn used(&self, now: Tick) -> Used {
        with!(self, |rule, state| rule.used(state, now))
    }

    /// Returns the units that are used under the limit that determines the rate of the policy.
    pub(super) fn used_of(&self, rate: &Rate, now: Tick) -> Used {
        let limit = self.policy.limits().get(rate.index);
        match (limit, self.records().get(rate.index)) {
            (Some(limit), Some(standing)) => limit.used(standing.state(), now),
            _ => Used::NOTHING,
        }
    }

    pub(super) fn share_used(&self, now: Tick) -> Share {
        with!(self, |rule, state| rule.share_used(state, now))
    }
}
