//! The state of one client: the amounts that it has used under each policy that it was checked under.
//!
//! Most clients are checked under one policy that is a single bucket. The state of this bucket is in the table itself,
//! so that a decision waits for memory only once. All other states are behind a pointer.

mod allowances;
mod listing;
mod policy_state;

use std::borrow::Cow;
use std::sync::Arc;

use tallygate_core::{
    Algorithm as _, Bucket, BucketState, Cost, Facts, Fit, FitBehind, LimitRecord, Policy, Receipt,
    Share, Tick, Ticks, Used,
};

use crate::allowance::{Allowance, Rate};

use listing::enter;
use policy_state::PolicyState;

/// The amounts that a client has used under each policy that it was checked under, the latest policy first.
///
/// Each cost is charged under all of them, under each at most up to its own bound. So used units stay used whatever
/// policy the client is checked under next, and each policy earns units back at its own rate. As soon as there is more
/// than one policy, each also has an [`Allowance`], so that the policies do not add up.
#[derive(Clone, Debug, Default)]
pub struct ClientState {
    first: Option<PolicyState>,
    others: Option<Box<OtherPolicies>>,
}

/// The additional state of clients under several policies, which few clients are.
#[derive(Clone, Debug)]
struct OtherPolicies {
    /// The allowance of the first policy.
    own: Allowance,
    /// The policies after the first.
    listed: Vec<PolicyUsage>,
}

impl OtherPolicies {
    fn allowances(&self) -> impl Iterator<Item = Allowance> {
        [self.own].into_iter().chain(self.listed.iter().map(|one| one.allowance))
    }
}

#[derive(Clone, Debug)]
struct PolicyUsage {
    state: PolicyState,
    allowance: Allowance,
}

/// The most policies that are kept for a client. A client has few tiers, and rules seldom change before it is fresh
/// again. If the client is checked under one more, the policy that will be fresh first is dropped, and the others take
/// over the usage under it.
pub(crate) const MAX_POLICIES: usize = 8;

impl ClientState {
    /// Returns the state of a client under some policies, the latest first, with the allowance of each if there are
    /// several.
    #[must_use]
    pub fn of(
        policies: impl IntoIterator<Item = (Arc<Policy>, Box<[LimitRecord]>)>,
        allowances: &[Allowance],
    ) -> Self {
        let unused = Allowance::unused(Tick(i64::MIN));
        let allowances = allowances.iter().copied().chain(std::iter::repeat(unused));
        let listed = policies.into_iter().zip(allowances).map(|((policy, records), allowance)| {
            PolicyUsage { state: PolicyState::new(policy, records), allowance }
        });
        Self::listed(listed.collect())
    }

    /// Returns the state under each policy, the latest first.
    pub fn policies(&self) -> impl Iterator<Item = (&Arc<Policy>, Cow<'_, Box<[LimitRecord]>>)> {
        self.each().map(|state| (&state.policy, state.records()))
    }

    /// Returns the allowance of each policy, in the order of [`policies`](Self::policies); none if there is only one
    /// policy.
    pub fn allowances(&self) -> impl Iterator<Item = Allowance> {
        self.others.iter().flat_map(|others| others.allowances())
    }

    pub(crate) fn fresh(policy: &Arc<Policy>, now: Tick) -> Self {
        Self::under(PolicyState::fresh(policy, now))
    }

    pub(crate) fn new(policy: &Arc<Policy>, now: Tick) -> Self {
        Self::under(PolicyState::first(policy, now))
    }

    pub(crate) fn with_used(policy: &Arc<Policy>, used: Used, now: Tick) -> Self {
        Self::under(PolicyState::with_used(policy, used, now))
    }

    const fn under(state: PolicyState) -> Self {
        Self { first: Some(state), others: None }
    }

    fn listed(all: Vec<PolicyUsage>) -> Self {
        let mut all = all.into_iter();
        let Some(first) = all.next() else { return Self::default() };
        let listed: Vec<_> = all.collect();
        let several = !listed.is_empty();
        let others = several.then(|| Box::new(OtherPolicies { own: first.allowance, listed }));
        Self { first: Some(first.state), others }
    }

    /// Splits the state into its parts. A client that had one policy gets the allowance of that policy.
    fn into_list(self, now: Tick) -> Vec<PolicyUsage> {
        let Some(state) = self.first else { return Vec::new() };
        let Some(others) = self.others else {
            let rate = Rate::of(&state.policy);
            let allowance =
                rate.map(|rate| Allowance::with_used(&rate, state.used_of(&rate, now), now));
            let allowance = allowance.unwrap_or(Allowance::unused(now));
            return vec![PolicyUsage { state, allowance }];
        };
        let OtherPolicies { own, mut listed } = *others;
        listed.insert(0, PolicyUsage { state, allowance: own });
        listed
    }

    fn each(&self) -> impl Iterator<Item = &PolicyState> {
        let others = self.others.iter().flat_map(|others| &others.listed);
        self.first.iter().chain(others.map(|one| &one.state))
    }

    /// Returns whether the client was last checked under this policy.
    #[inline]
    pub(crate) fn is_under(&self, policy: &Arc<Policy>) -> bool {
        self.first.as_ref().is_some_and(|state| state.is(policy))
    }

    /// Returns the bucket that decides alone, and its state, if the client has one policy and that is a single bucket.
    pub(crate) fn sole_bucket(&self) -> Option<(&Bucket, &BucketState)> {
        self.first.as_ref().filter(|_| self.others.is_none())?.bucket()
    }

    /// Returns whether the client has a state under the policy.
    pub(crate) fn lists(&self, policy: &Arc<Policy>) -> bool {
        self.each().any(|state| state.is(policy))
    }

    /// Moves a policy to the front, at a time. A policy that is not listed yet takes over the largest usage under any
    /// other policy.
    pub(crate) fn bring_under(&mut self, policy: &Arc<Policy>, now: Tick) {
        if !self.is_under(policy) {
            let is_fresh = self.is_fresh(now);
            let mut all = std::mem::take(self).into_list(now);
            match all.iter().position(|one| one.state.is(policy)) {
                Some(place) => all[..=place].rotate_right(1),
                None => enter(&mut all, policy, now, is_fresh),
            }
            *self = Self::listed(all);
        }
    }

    /// Returns whether the clock was set back since the last change of the states that decide under the first policy.
    #[inline]
    pub(crate) fn clock_was_set_back(&self, now: Tick) -> bool {
        self.first.as_ref().is_some_and(|first| first.clock_was_set_back(now))
            || (self.others.is_some()
                && self.rated_allowances().any(|(rate, allowance)| allowance.set_back(&rate, now)))
    }

    /// Rebases the states that decide under the first policy, if the clock was set back.
    pub(crate) fn rebase(&mut self, now: Tick) {
        if let Some(first) = &mut self.first {
            first.rebase(now);
        }
        self.rebase_allowances(now);
    }

    fn rebase_allowances(&mut self, now: Tick) {
        let rates = self.rates();
        for (rate, allowance) in rates.iter().zip(self.allowances_mut()) {
            if rate.is_some_and(|rate| allowance.set_back(&rate, now)) {
                allowance.rebase(now);
            }
        }
    }

    /// Drops the other policies when all states are fresh, because the store may have dropped the client in the
    /// meantime.
    #[inline]
    fn forget_if_fresh(&mut self, now: Tick) {
        if self.others.is_some() && self.is_fresh(now) {
            self.others = None;
        }
    }

    fn is_fresh(&self, now: Tick) -> bool {
        self.fresh_at().is_some_and(|fresh| fresh <= now)
    }

    /// Returns the time of the last change under any policy.
    #[inline]
    pub(crate) fn last_change(&self) -> Tick {
        self.each().map(PolicyState::last_change).max().unwrap_or(Tick(i64::MIN))
    }

    /// Returns the time at which all policies decide for a caller that read `now` before the state was locked.
    #[inline]
    pub(crate) fn decision_time(&self, now: Tick) -> Tick {
        let at = self.each().map(|state| state.decision_time(now)).max().unwrap_or(now);
        if self.others.is_some() { self.decision_time_of_allowances(at) } else { at }
    }

    /// The last change of an allowance can be later than that of all states, if the state that changed with it was
    /// dropped.
    #[cold]
    fn decision_time_of_allowances(&self, now: Tick) -> Tick {
        let is_late = |(rate, allowance): &(Rate, Allowance)| allowance.set_back(rate, now);
        let late = self.rated_allowances().filter(is_late).map(|(_, allowance)| allowance.last);
        late.fold(now, Tick::max)
    }

    /// Adapts the states under all policies to a clock that was set back, each by its own policy.
    pub(crate) fn rebase_after_set_back(&mut self, now: Tick) {
        let others = self.others.iter_mut().flat_map(|others| &mut others.listed);
        let others = others.map(|one| &mut one.state);
        self.first.iter_mut().chain(others).for_each(|state| state.rebase_after_set_back(now));
        self.rebase_allowances(now);
    }

    pub(crate) fn fresh_at(&self) -> Option<Tick> {
        let states = self.each().map(PolicyState::fresh_at);
        let allowances = self.rated_allowances().map(|(rate, allowance)| allowance.fresh_at(&rate));
        states.chain(allowances).try_fold(Tick(i64::MIN), |last, fresh| Some(last.max(fresh?)))
    }

    /// Returns the largest usage under any policy.
    pub(crate) fn used(&self, now: Tick) -> Used {
        let used = self.each().map(|state| state.used(now));
        used.reduce(|one, other| if other.is_more_than(one) { other } else { one })
            .unwrap_or(Used::NOTHING)
    }

    /// Returns the largest share of its quota that is used under any policy.
    pub(crate) fn share_used(&self, now: Tick) -> Share {
        let shares = self.each().map(|state| state.share_used(now));
        shares.max().unwrap_or(Share::of(Used::NOTHING, 1))
    }

    /// Returns whether the first policy allows a cost; `None` if there is none.
    pub(crate) fn allows(&self, now: Tick, cost: Cost) -> Option<bool> {
        Some(self.first.as_ref()?.allows(now, cost) && self.is_shared_out(now, cost))
    }

    /// Charges a cost under all policies if the first allows it; `None` if there is none.
    #[inline]
    pub(crate) fn try_charge(&mut self, now: Tick, cost: Cost) -> Option<bool> {
        if self.others.is_some() {
            return self.try_charge_shared(now, cost);
        }
        Some(self.first.as_mut()?.try_charge(now, cost))
    }

    #[cold]
    fn try_charge_shared(&mut self, now: Tick, cost: Cost) -> Option<bool> {
        self.forget_if_fresh(now);
        if !self.is_shared_out(now, cost) {
            return Some(false);
        }
        let allowed = self.first.as_mut()?.try_charge(now, cost);
        if allowed && cost > 0 {
            self.also_charge_others(now, cost, |state| {
                state.charge(now, cost.into());
            });
        }
        Some(allowed)
    }

    /// Charges a cost under all policies if the first allows it. Returns the receipt of the charge, or `None` if the
    /// cost is denied. The receipt of each policy records how much of the cost the policy did not charge.
    pub(crate) fn try_charge_with_receipt(&mut self, now: Tick, cost: Cost) -> Option<Receipt> {
        self.forget_if_fresh(now);
        if !self.is_shared_out(now, cost) {
            return None;
        }
        let first = self.first.as_mut()?;
        let receipt = first.try_charge_with_receipt(now, cost)?;
        let mut policies = vec![(first.policy.clone(), receipt)];
        self.also_charge_others(now, cost, |state| {
            policies.push((state.policy.clone(), state.charge_with_receipt(now, cost)));
        });
        Some(Receipt::Policies(policies))
    }

    /// Charges a cost to the other policies and to the allowances, after the first policy has allowed and charged it.
    fn also_charge_others(&mut self, now: Tick, cost: Cost, charge: impl FnMut(&mut PolicyState)) {
        self.also_others(now, charge);
        self.change_allowances(|allowance, rate, _| allowance.charge(rate, now, cost));
        self.drop_stale(now);
    }

    /// Records a denial under each policy that would have denied the cost.
    pub(crate) fn record_denial(&mut self, now: Tick, cost: Cost) {
        if let Some(first) = &mut self.first {
            first.record_denial(now, cost);
            self.also_others(now, |state| state.record_denial(now, cost));
        }
    }

    /// Returns the limit of the first policy that denies a cost. If none does but the allowances have no room, returns
    /// the limit that determines the rate of the policy.
    pub(crate) fn denying_limit(&self, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        let first = self.first.as_ref()?;
        let denying = first.denying_limit(now, cost, shadow);
        if denying.is_some() || shadow || self.is_shared_out(now, cost) {
            return denying;
        }
        Rate::of(&first.policy).map(|rate| rate.index)
    }

    /// Returns what is used under every policy as the receipt of a charge.
    pub(crate) fn receipt(&self) -> Receipt {
        Receipt::Policies(
            self.each().map(|state| (state.policy.clone(), state.receipt())).collect(),
        )
    }

    /// Changes a charge under every policy. Returns how many units had no effect under the first one.
    ///
    /// Each policy returns at most what it charged. The charge also counts in the allowances of the policy that decided
    /// and of all policies that are not slower. These allowances return as many units as that policy does, except for
    /// units that they have earned back since.
    pub(crate) fn settle(&mut self, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let settle =
            |state: &mut PolicyState| state.settle(now, change, receipt.under(&state.policy));
        if change > 0 {
            return self.force(now, change.unsigned_abs(), settle);
        }
        self.forget_if_fresh(now);
        self.rebase(now);
        let asked = change.unsigned_abs();
        let (mut dropped, mut returned) = (asked, 0);
        let mut settle = |state: &mut PolicyState| {
            let dropped = settle(state);
            if receipt.is_decided_by(&state.policy) {
                returned = asked - dropped;
            }
            dropped
        };
        if let Some(first) = &mut self.first {
            dropped = settle(first);
        }
        self.also_others(now, |state| {
            settle(state);
        });
        let decided_by = receipt.decided_by().and_then(|policy| Rate::of(policy));
        if let (Some(decided_by), Some(charged_at)) = (decided_by, receipt.charged_at()) {
            let was_charged = |rate: &Rate| decided_by.is_at_most(rate);
            self.give_back_allowances(now, returned, charged_at, was_charged);
        }
        self.drop_stale(now);
        dropped
    }

    /// Returns when the first policy allows a cost; `None` if there is none.
    pub(crate) fn fit(&self, now: Tick, cost: Cost) -> Option<Fit> {
        let mut fit = self.first.as_ref()?.fit(now, cost);
        self.each_bound(|allowance, rate, capacity| {
            fit = match (fit, allowance.wait(rate, capacity, now, cost)) {
                (Fit::Never, _) | (_, None) => Fit::Never,
                (fit, Some(Ticks::ZERO)) => fit,
                (Fit::Now, Some(wait)) => Fit::After(wait),
                (Fit::After(own), Some(wait)) => Fit::After(own.max(wait)),
            };
        });
        Some(fit)
    }

    /// Returns when the first policy allows a cost behind waiting requests; `None` if there is none. The allowances are
    /// checked for the cost alone, so the time is a lower bound.
    pub(crate) fn fit_behind(&self, now: Tick, ahead: u128, cost: Cost) -> Option<FitBehind> {
        let behind = self.first.as_ref()?.fit_behind(now, ahead, cost);
        if self.others.is_none() {
            return Some(behind);
        }
        let earliest = match (behind.earliest, self.fit(now, cost)?) {
            (Fit::Never, _) | (_, Fit::Never) => Fit::Never,
            (Fit::Now, other) | (other, Fit::Now) => other,
            (Fit::After(one), Fit::After(other)) => Fit::After(one.max(other)),
        };
        Some(FitBehind { earliest, latest: None })
    }

    /// Returns when a policy allows a cost to a client that is checked under it from `start` on.
    ///
    /// A listed policy has its own state, so its wait is known. Any other policy takes over the usage that is left when
    /// the client is checked, so the result is the first time at which that usage leaves enough room. The room never
    /// shrinks later, so a binary search finds this time.
    pub(crate) fn fit_under(&self, policy: &Arc<Policy>, start: Tick, cost: Cost) -> Fit {
        let asked_at = |now: Tick| {
            let mut asked = self.clone();
            asked.bring_under(policy, now);
            asked.rebase(now);
            asked
        };
        let fit = asked_at(start).fit(start, cost).unwrap_or(Fit::Now);
        if !matches!(fit, Fit::After(_)) || self.is_empty() || self.lists(policy) {
            return fit;
        }
        // From this time on nothing is used.
        let Some(fresh) = self.fresh_at() else { return Fit::After(Ticks(u64::MAX)) };
        let is_allowed = |now: Tick| asked_at(now).allows(now, cost) == Some(true);
        let (mut low, mut high) = (0, fresh.since(start).0);
        while low < high {
            let middle = low.midpoint(high);
            let now = start.after(Ticks(middle)).unwrap_or(fresh);
            if is_allowed(now) { high = middle } else { low = middle + 1 }
        }
        Fit::After(Ticks(low))
    }

    /// Returns whether the client was not checked under any policy yet.
    pub(crate) const fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    /// Returns the facts of the first policy; `None` if there is none.
    pub(crate) fn facts(&self, now: Tick, charged: Option<Cost>) -> Option<Facts> {
        let mut facts = self.first.as_ref()?.facts(now, charged);
        self.each_bound(|allowance, rate, capacity| {
            facts.remaining = facts.remaining.min(allowance.remaining(rate, capacity, now));
            facts.reset_after = facts.reset_after.max(allowance.reset_after(rate, now));
        });
        Some(facts)
    }

    /// Charges all policies whether or not they allow it, or refunds a negative amount. Returns how many units had no
    /// effect on the first policy.
    pub(crate) fn charge(&mut self, now: Tick, amount: i128) -> u128 {
        if amount < 0 {
            return self.refund(now, amount.unsigned_abs());
        }
        self.force(now, amount.unsigned_abs(), |state| state.charge(now, amount))
    }

    /// Charges the state under each policy, and the allowances. Returns how many units had no effect on the first
    /// policy.
    fn force(
        &mut self,
        now: Tick,
        amount: u128,
        charge: impl Fn(&mut PolicyState) -> u128,
    ) -> u128 {
        self.forget_if_fresh(now);
        self.rebase(now);
        let Some(first) = &mut self.first else { return amount };
        let dropped = charge(first);
        self.also_others(now, |state| {
            charge(state);
        });
        self.change_allowances(|allowance, rate, capacity| {
            allowance.force(rate, capacity, now, amount);
        });
        self.drop_stale(now);
        dropped
    }

    /// Charges single limits of a policy: for units that were allowed without this state, and that some of the limits have
    /// forgotten since.
    ///
    /// Brings the state under the policy first, so that usage under other policies stays used. `charge` gets the records of
    /// the policy and the room in the allowances, charges the limits, and returns the most units that it charged to one
    /// of them. These are charged to the other policies and to the allowances.
    pub fn charge_limits(
        &mut self,
        policy: &Arc<Policy>,
        now: Tick,
        charge: impl FnOnce(&mut [LimitRecord], Cost) -> Cost,
    ) {
        self.bring_under(policy, now);
        self.rebase(now);
        self.forget_if_fresh(now);
        let mut room = Cost::MAX;
        self.each_bound(|allowance, rate, capacity| {
            room = room.min(allowance.remaining(rate, capacity, now));
        });
        let Some(first) = &mut self.first else { return };
        let mut records = first.records().into_owned();
        let amount = charge(&mut records, room);
        *first = PolicyState::new(policy.clone(), records);
        if amount > 0 {
            self.also_charge_others(now, amount, |state| {
                state.charge(now, amount.into());
            });
        }
    }

    /// Refunds an amount that was charged under the first policy. Returns how many units had no effect on it.
    ///
    /// A refund does not know how many units each of the other policies had room for. But the allowance of a policy
    /// counts what was allowed under it, so this amount stays used under it.
    fn refund(&mut self, now: Tick, amount: u128) -> u128 {
        self.forget_if_fresh(now);
        self.rebase(now);
        let Some(first) = &mut self.first else { return amount };
        let dropped = first.charge(now, 0_i128.saturating_sub_unsigned(amount));
        let rates = self.rates();
        let was_charged = |rate: &Rate| rates[0].is_some_and(|own| own.is_at_most(rate));
        self.give_back_allowances(now, amount - dropped, now, was_charged);
        let listed = self.others.iter_mut().flat_map(|others| &mut others.listed);
        for (PolicyUsage { state, allowance }, rate) in listed.zip(&rates[1..]) {
            state.rebase(now);
            let most = rate
                .map_or(amount, |rate| allowance.uncounted(&rate, state.used_of(&rate, now), now));
            state.charge(now, 0_i128.saturating_sub_unsigned(amount.min(most)));
        }
        self.drop_stale(now);
        dropped
    }

    #[inline]
    fn also_others(&mut self, now: Tick, mut change: impl FnMut(&mut PolicyState)) {
        for one in self.others.iter_mut().flat_map(|others| &mut others.listed) {
            one.state.rebase(now);
            change(&mut one.state);
        }
    }

    /// Encodes the state under the first policy, as that policy does.
    pub(crate) fn encode_first(&self, out: &mut Vec<u8>) {
        if let Some(first) = &self.first {
            first.policy.encode(&first.records(), out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_takes_little_room_in_a_table() {
        assert!(size_of::<ClientState>() <= 40, "{}", size_of::<ClientState>());
    }
}
