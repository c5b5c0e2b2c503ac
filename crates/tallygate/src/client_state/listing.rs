//! Adds a policy to the list of a client, and drops one if there are too many.

use std::sync::Arc;

use tallygate_core::{Policy, Tick};

use crate::allowance::{Allowance, Rate};

use super::policy_state::PolicyState;
use super::{MAX_POLICIES, PolicyUsage};

/// Inserts a policy before the others that the client was checked under.
pub(super) fn enter(all: &mut Vec<PolicyUsage>, policy: &Arc<Policy>, now: Tick, is_fresh: bool) {
    let rate_of = |one: &PolicyUsage| Rate::of(&one.state.policy);
    for one in all.iter_mut() {
        one.state.rebase(now);
        if rate_of(one).is_some_and(|rate| one.allowance.set_back(&rate, now)) {
            one.allowance.rebase(now);
        }
    }
    let carried = all.iter().map(|one| policy.carry(&one.state.policy, &one.state.records(), now));
    let state = match carried.reduce(|one, other| policy.merge(&one, &other, now)) {
        Some(records) => PolicyState::new(policy.clone(), records),
        None => PolicyState::first(policy, now),
    };
    let new = Rate::of(policy);
    let slower = all.iter().filter_map(|one| Some((rate_of(one)?, one.allowance)));
    let slower = slower.filter(|(rate, _)| new.is_some_and(|new| rate.is_at_most(&new)));
    let next = slower.reduce(|one, other| if one.0.is_at_most(&other.0) { other } else { one });
    let allowance = match (new, next) {
        (Some(new), Some((rate, allowance))) => allowance.carried_to(&new, &rate, now),
        _ => Allowance::unused(now),
    };
    if is_fresh {
        all.clear();
    }
    if all.len() >= MAX_POLICIES {
        drop_one(all, new.as_ref(), now);
    }
    all.insert(0, PolicyUsage { state, allowance });
}

/// Makes room for a policy: drops the policy that will be fresh first. The others take over its usage. The fastest
/// policy is never dropped, because its allowance counts everything.
fn drop_one(all: &mut Vec<PolicyUsage>, new: Option<&Rate>, now: Tick) {
    let rates: Vec<_> = all.iter().map(|one| Rate::of(&one.state.policy)).collect();
    let is_fastest = |rate: &Rate| {
        rates.iter().flatten().chain(new).all(|other| other.is_at_most(rate))
            && new.is_none_or(|new| !rate.is_at_most(new))
    };
    let fresh_at = |one: &PolicyUsage| {
        let state = one.state.fresh_at().unwrap_or(Tick(i64::MAX));
        let rate = Rate::of(&one.state.policy);
        let allowance = rate.map_or(Some(state), |rate| one.allowance.fresh_at(&rate));
        state.max(allowance.unwrap_or(Tick(i64::MAX)))
    };
    let droppable =
        all.iter().enumerate().filter(|(place, _)| !rates[*place].as_ref().is_some_and(is_fastest));
    let Some((place, _)) = droppable.min_by_key(|(_, one)| fresh_at(one)) else { return };
    let dropped = all.remove(place).state;
    for one in all {
        let policy = one.state.policy.clone();
        let left = policy.carry(&dropped.policy, &dropped.records(), now);
        let merged = policy.merge(&one.state.records(), &left, now);
        one.state = PolicyState::new(policy, merged);
    }
}
