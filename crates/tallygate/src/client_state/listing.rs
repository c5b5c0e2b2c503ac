//! Listing a client under one more policy, and dropping one when there are too many.

use std::sync::Arc;

use tallygate_core::{Policy, Tick};

use crate::allowance::{Allowance, Rate};

use super::policy_state::PolicyState;
use super::{Listed, MAX_POLICIES};

/// Lists a policy before the others that the client was asked under.
pub(super) fn enter(all: &mut Vec<Listed>, policy: &Arc<Policy>, now: Tick, is_fresh: bool) {
    let rate_of = |one: &Listed| Rate::of(&one.state.policy);
    for one in all.iter_mut() {
        one.state.rebase(now);
        if rate_of(one).is_some_and(|rate| one.allowance.set_back(&rate, now)) {
            one.allowance.rebase(now);
        }
    }
    let carried =
        all.iter().map(|one| policy.carry(&one.state.policy, &one.state.standings(), now));
    let state = match carried.reduce(|one, other| policy.merge(&one, &other, now)) {
        Some(standings) => PolicyState::new(policy.clone(), standings),
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
    all.insert(0, Listed { state, allowance });
}

/// Makes room for a policy: drops the one that is fresh soonest. What is still used under it is left with the others.
/// The fastest stays, because its allowance counts everything.
fn drop_one(all: &mut Vec<Listed>, new: Option<&Rate>, now: Tick) {
    let rates: Vec<_> = all.iter().map(|one| Rate::of(&one.state.policy)).collect();
    let is_fastest = |rate: &Rate| {
        rates.iter().flatten().chain(new).all(|other| other.is_at_most(rate))
            && new.is_none_or(|new| !rate.is_at_most(new))
    };
    let fresh_at = |one: &Listed| {
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
        let left = policy.carry(&dropped.policy, &dropped.standings(), now);
        let merged = policy.merge(&one.state.standings(), &left, now);
        one.state = PolicyState::new(policy, merged);
    }
}
