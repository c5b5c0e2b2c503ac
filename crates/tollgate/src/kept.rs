//! What a key has used under each policy it was asked for.
//!
//! Most keys are asked for under one policy that is one bucket: its state lies in the table itself, so that a decision
//! does not wait for memory a second time. Everything else is behind a pointer.

use std::borrow::Cow;
use std::sync::Arc;

use tollgate_core::{
    Algorithm, BucketState, Cost, Facts, Fit, Limit, LimitState, Machine, Policy, Receipt,
    Standing, Tick, Used,
};

/// What a key has used under each policy it was asked for, the last one first.
///
/// Whatever is charged under one is charged under all: so what a key used stays used wherever it goes,
/// going there and back changes nothing, and each policy goes on by its own rate.
#[derive(Clone, Debug, Default)]
pub struct Kept {
    first: Option<Under>,
    others: Option<Box<Others>>,
}

/// Those after the first: few keys have any.
#[derive(Clone, Debug)]
struct Others(Vec<Under>);

/// How many policies a key is kept under: a client has few tiers, and rules seldom change before it is
/// fresh again. Of more, the one under which least is used is forgotten.
pub(crate) const MAX_POLICIES: usize = 4;

/// What a key has used under a policy.
#[derive(Clone, Debug)]
pub(crate) struct Under {
    policy: Arc<Policy>,
    state: State,
}

#[derive(Clone, Debug)]
enum State {
    /// Of a policy that is one bucket without options.
    Bucket(BucketState),
    Listed(Box<[Standing]>),
}

/// Runs an expression with the rule of a policy, and says what the state it makes is.
macro_rules! make {
    ($policy:expr, |$rule:ident| $make:expr) => {
        match $policy.plain().map(Limit::machine) {
            Some(Machine::TokenBucket($rule)) => State::Bucket($make),
            Some(Machine::Gcra($rule)) => State::Bucket($make),
            Some(Machine::LeakyBucket($rule)) => State::Bucket($make),
            _ => {
                let $rule = &**$policy;
                State::Listed($make)
            }
        }
    };
}

/// Runs an expression with the rule and its state.
macro_rules! with {
    ($under:expr, |$rule:ident, $state:ident| $run:expr) => {{
        let Under { policy, state } = $under;
        match state {
            State::Bucket($state) => match policy.plain().map(Limit::machine) {
                Some(Machine::TokenBucket($rule)) => $run,
                Some(Machine::Gcra($rule)) => $run,
                Some(Machine::LeakyBucket($rule)) => $run,
                _ => unreachable!("only the state of a bucket is in place"),
            },
            State::Listed($state) => {
                let $rule = &**policy;
                $run
            }
        }
    }};
}

impl Under {
    fn new(policy: Arc<Policy>, standings: Box<[Standing]>) -> Self {
        let state = match (policy.plain(), &*standings) {
            (Some(_), [standing]) => match standing.state() {
                LimitState::Bucket(state) => State::Bucket(*state),
                _ => State::Listed(standings),
            },
            _ => State::Listed(standings),
        };
        Self { policy, state }
    }

    fn is(&self, policy: &Arc<Policy>) -> bool {
        Arc::ptr_eq(&self.policy, policy) || self.policy == *policy
    }

    fn standings(&self) -> Cow<'_, Box<[Standing]>> {
        match &self.state {
            State::Bucket(state) => Cow::Owned([LimitState::Bucket(*state).into()].into()),
            State::Listed(standings) => Cow::Borrowed(standings),
        }
    }

    fn carried_to(&self, policy: &Arc<Policy>, now: Tick) -> Self {
        let standings = policy.carry(&self.policy, &self.standings(), now);
        Self::new(policy.clone(), standings)
    }

    #[inline]
    fn last_change(&self) -> Tick {
        with!(self, |rule, state| rule.last_change(state))
    }

    #[inline]
    pub(crate) fn set_back(&self, now: Tick) -> bool {
        with!(self, |rule, state| rule.set_back(state, now))
    }

    /// Brings it to a time that lies before its own, if the clock was set back.
    pub(crate) fn rebase(&mut self, now: Tick) {
        with!(self, |rule, state| {
            if rule.set_back(state, now) {
                rule.rebase(state, now);
            }
        });
    }

    pub(crate) fn admits(&self, now: Tick, cost: Cost) -> bool {
        with!(self, |rule, state| rule.admits(state, now, cost))
    }

    #[inline]
    fn admit(&mut self, now: Tick, cost: Cost) -> bool {
        with!(self, |rule, state| rule.admit(state, now, cost))
    }

    fn refuse(&mut self, now: Tick, cost: Cost) {
        with!(self, |rule, state| rule.refuse(state, now, cost));
    }

    pub(crate) fn refusing(&self, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        with!(self, |rule, state| rule.refusing(state, now, cost, shadow))
    }

    pub(crate) fn fit(&self, now: Tick, cost: Cost) -> Fit {
        with!(self, |rule, state| rule.fit(state, now, cost))
    }

    fn charge(&mut self, now: Tick, amount: i128) -> u128 {
        with!(self, |rule, state| rule.charge(state, now, amount))
    }

    fn receipt(&self) -> Receipt {
        with!(self, |rule, state| rule.receipt(state))
    }

    fn settle(&mut self, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        with!(self, |rule, state| rule.settle(state, now, change, receipt))
    }

    fn uncharged(&self, now: Tick, cost: Cost) -> Vec<usize> {
        with!(self, |rule, state| rule.uncharged(state, now, cost))
    }

    #[inline]
    pub(crate) fn facts(&self, now: Tick, admitted: Option<Cost>) -> Facts {
        with!(self, |rule, state| rule.facts(state, now, admitted))
    }

    fn fresh_at(&self) -> Option<Tick> {
        with!(self, |rule, state| rule.fresh_at(state))
    }

    fn used(&self, now: Tick) -> Used {
        with!(self, |rule, state| rule.used(state, now))
    }

    /// As the policy encodes it.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        self.policy.encode(&self.standings(), out);
    }
}

impl Kept {
    /// What was used under some policies, the one it was last asked for first.
    #[must_use]
    pub fn of(under: impl IntoIterator<Item = (Arc<Policy>, Box<[Standing]>)>) -> Self {
        Self::listed(under.into_iter().map(|(policy, state)| Under::new(policy, state)).collect())
    }

    /// What was used under each policy, the one it was last asked for first.
    pub fn policies(&self) -> impl Iterator<Item = (&Arc<Policy>, Cow<'_, Box<[Standing]>>)> {
        self.each().map(|under| (&under.policy, under.standings()))
    }

    pub(crate) fn fresh(policy: &Arc<Policy>, now: Tick) -> Self {
        Self::under(policy, make!(policy, |rule| rule.fresh(now)))
    }

    pub(crate) fn new(policy: &Arc<Policy>, now: Tick) -> Self {
        Self::under(policy, make!(policy, |rule| rule.first(now)))
    }

    pub(crate) fn with_used(policy: &Arc<Policy>, used: Used, now: Tick) -> Self {
        Self::under(policy, make!(policy, |rule| rule.with_used(used, now)))
    }

    fn under(policy: &Arc<Policy>, state: State) -> Self {
        Self { first: Some(Under { policy: policy.clone(), state }), others: None }
    }

    fn listed(mut all: Vec<Under>) -> Self {
        let others = if all.len() > 1 { all.split_off(1) } else { Vec::new() };
        let others = (!others.is_empty()).then(|| Box::new(Others(others)));
        Self { first: all.pop(), others }
    }

    fn each(&self) -> impl Iterator<Item = &Under> {
        self.first.iter().chain(self.others.iter().flat_map(|others| &others.0))
    }

    /// That under the policy it was last asked for.
    #[inline]
    pub(crate) const fn first(&self) -> Option<&Under> {
        self.first.as_ref()
    }

    /// Whether the policy is the one it was last asked for.
    #[inline]
    pub(crate) fn is_under(&self, policy: &Arc<Policy>) -> bool {
        self.first.as_ref().is_some_and(|under| under.is(policy))
    }

    /// Puts a policy first, at a time. One it was never asked for takes over from that under which most is used.
    pub(crate) fn bring_under(&mut self, policy: &Arc<Policy>, now: Tick) {
        if !self.is_under(policy) {
            let Self { first, others } = std::mem::take(self);
            let others = others.map(|others| others.0).unwrap_or_default();
            let mut all: Vec<_> = first.into_iter().chain(others).collect();
            put_first(&mut all, policy, now);
            *self = Self::listed(all);
        }
    }

    /// Brings that under the policy it was last asked for to a time before its own, if the clock was set back.
    pub(crate) fn rebase_first(&mut self, now: Tick) {
        if let Some(first) = &mut self.first {
            first.rebase(now);
        }
    }

    /// What has used nothing has no past: it may have been dropped meanwhile, and nobody may tell.
    #[inline]
    fn forget_if_fresh(&mut self, now: Tick) {
        if self.others.is_some() && self.fresh_at().is_some_and(|fresh| fresh <= now) {
            self.others = None;
        }
    }

    /// The time of the last change under any policy.
    #[inline]
    pub(crate) fn last_change(&self) -> Tick {
        self.each().map(Under::last_change).max().unwrap_or(Tick(i64::MIN))
    }

    pub(crate) fn fresh_at(&self) -> Option<Tick> {
        self.each().try_fold(Tick(i64::MIN), |last, under| Some(last.max(under.fresh_at()?)))
    }

    /// The most that is used under any.
    pub(crate) fn used(&self, now: Tick) -> Used {
        let used = self.each().map(|under| under.used(now));
        used.max_by_key(|used| used.rounded_up()).unwrap_or(Used::NOTHING)
    }

    /// Admits a cost under the first, and charges it under all; `None` if there is none.
    #[inline]
    pub(crate) fn admit(&mut self, now: Tick, cost: Cost) -> Option<bool> {
        self.forget_if_fresh(now);
        let admitted = self.first.as_mut()?.admit(now, cost);
        if admitted && cost > 0 {
            self.also_others(now, |under| {
                under.charge(now, cost.into());
            });
        }
        Some(admitted)
    }

    /// A refusal counts wherever the cost would have been refused.
    pub(crate) fn refuse(&mut self, now: Tick, cost: Cost) {
        if let Some(first) = &mut self.first {
            first.refuse(now, cost);
            self.also_others(now, |under| under.refuse(now, cost));
        }
    }

    /// Charges all without asking; how much of it had no effect on the first.
    pub(crate) fn charge(&mut self, now: Tick, amount: i128) -> u128 {
        self.change(now, |under| under.charge(now, amount)).unwrap_or(amount.unsigned_abs())
    }

    /// Returns the limits of the first policy that an allowed cost would not be charged to.
    pub(crate) fn uncharged(&self, now: Tick, cost: Cost) -> Vec<usize> {
        self.first.as_ref().map_or(Vec::new(), |under| under.uncharged(now, cost))
    }

    /// Returns the receipt of the charge that was just made, under every policy.
    pub(crate) fn receipt(&self) -> Receipt {
        Receipt::Policies(
            self.each().map(|under| (under.policy.clone(), under.receipt())).collect(),
        )
    }

    /// Changes a charge under every policy; returns how many units had no effect under the first.
    pub(crate) fn settle(&mut self, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let settle = |under: &mut Under| {
            let receipt = receipt.under(&under.policy);
            under.settle(now, change, receipt)
        };
        self.change(now, settle).unwrap_or(change.unsigned_abs())
    }

    fn change(&mut self, now: Tick, change: impl Fn(&mut Under) -> u128) -> Option<u128> {
        self.forget_if_fresh(now);
        let first = self.first.as_mut()?;
        first.rebase(now);
        let dropped = change(first);
        self.also_others(now, |under| {
            change(under);
        });
        Some(dropped)
    }

    #[inline]
    fn also_others(&mut self, now: Tick, change: impl Fn(&mut Under)) {
        for under in self.others.iter_mut().flat_map(|others| &mut others.0) {
            under.rebase(now);
            change(under);
        }
    }
}

/// Puts a policy before the others it was asked for.
fn put_first(all: &mut Vec<Under>, policy: &Arc<Policy>, now: Tick) {
    if let Some(place) = all.iter().position(|under| under.is(policy)) {
        all[..=place].rotate_right(1);
        return;
    }
    all.iter_mut().for_each(|under| under.rebase(now));
    let used = |under: &Under| under.used(now).rounded_up();
    let new = match all.iter().max_by_key(|under| used(under)) {
        Some(most) => most.carried_to(policy, now),
        None => Under { policy: policy.clone(), state: make!(policy, |rule| rule.first(now)) },
    };
    if all.len() == MAX_POLICIES
        && let Some((least, _)) = all.iter().enumerate().min_by_key(|(_, under)| used(under))
    {
        all.remove(least);
    }
    all.insert(0, new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_takes_little_room_in_a_table() {
        assert!(size_of::<Kept>() <= 40, "{}", size_of::<Kept>());
    }
}
