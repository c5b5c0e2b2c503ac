//! How a rule is decided by in Redis, and how its states are kept there.

use std::sync::Arc;

use tallygate::{Access, Algorithm, Kept, Plan, Policy, Standing, Tick};

use super::{Earlier, Prepared, RedisStore};
use crate::error::Error;
use crate::value;

/// A rule that processes can share. Not exported: how it is kept is this crate's own affair.
pub trait Shareable: Algorithm + Sync {
    /// How it is decided by.
    #[expect(private_bounds, reason = "nobody else decides by it")]
    type Judge: Judge + Clone + 'static;

    /// The rule in Redis's ticks, for a decision at a time.
    ///
    /// # Errors
    /// It is not in microseconds.
    fn judge(&self, store: &RedisStore, now: Option<Tick>) -> Result<Self::Judge, Error>;

    /// The policy that decides now, as Redis takes it, if there is one.
    #[expect(private_interfaces, reason = "nobody else decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>>;

    /// The same as a plan.
    fn plan(&self) -> Plan;
}

impl Shareable for Policy {
    type Judge = ByPolicy;

    fn judge(&self, store: &RedisStore, _: Option<Tick>) -> Result<ByPolicy, Error> {
        Ok(ByPolicy(store.prepare(self, Earlier::Replaced)?))
    }

    #[expect(private_interfaces, reason = "nobody else decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>> {
        store.prepare(self, Earlier::Replaced).ok()
    }

    fn plan(&self) -> Plan {
        Plan::of(self.clone())
    }
}

impl Shareable for Plan {
    type Judge = ByPlan;

    /// If the server's time rules, an override that ends just now may still be taken as in force, or not any more.
    fn judge(&self, store: &RedisStore, now: Option<Tick>) -> Result<ByPlan, Error> {
        let in_redis = |policy: &Arc<Policy>| {
            store.prepare(policy, Earlier::Listed).map(|prepared| prepared.policy.clone())
        };
        let plan = self.with(in_redis, |time| store.in_redis(time))?;
        let now = now.unwrap_or_else(|| store.outside(Tick(store.shared.redis.now())));
        let script = match self.access(now) {
            Access::Limited(policy) => Some(store.prepare(policy, Earlier::Listed)?),
            Access::Unlimited | Access::Blocked => None,
        };
        Ok(ByPlan { plan, script })
    }

    #[expect(private_interfaces, reason = "nobody else decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>> {
        match self.access(store.outside(Tick(store.shared.redis.now()))) {
            Access::Limited(policy) => store.prepare(policy, Earlier::Listed).ok(),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn plan(&self) -> Plan {
        self.clone()
    }
}

/// A rule in Redis's ticks, and how its states are kept.
pub(crate) trait Judge: Send + Sync {
    type Rule: Algorithm;

    fn rule(&self) -> &Self::Rule;

    /// How many of the rule's ticks are a microsecond.
    fn scale(&self) -> u64 {
        1
    }

    /// The policy whose script decides, if there is one.
    fn script(&self) -> Option<&Prepared>;

    /// Whether a state may hold levels, which reservations have to know of when units are returned.
    fn has_levels(&self) -> bool {
        true
    }

    /// The state that the script of that policy left.
    fn state_under(&self, standings: Box<[Standing]>) -> <Self::Rule as Algorithm>::State;

    /// Changes how a key stands under the limits of the policy whose script decides.
    fn change_limits(
        &self,
        _: &mut <Self::Rule as Algorithm>::State,
        _: Tick,
        _: &mut dyn FnMut(&mut [Standing]),
    ) {
    }

    /// The state in a value.
    fn read(&self, value: &[u8], now: Tick) -> Result<<Self::Rule as Algorithm>::State, Error>;

    /// A value for a state.
    fn write(&self, state: &<Self::Rule as Algorithm>::State) -> Vec<u8>;
}

/// One policy for everybody.
#[derive(Clone, Debug)]
pub struct ByPolicy(pub(crate) Arc<Prepared>);

impl Judge for ByPolicy {
    type Rule = Policy;

    fn rule(&self) -> &Policy {
        &self.0.policy
    }

    fn script(&self) -> Option<&Prepared> {
        Some(&self.0)
    }

    fn has_levels(&self) -> bool {
        self.0.policy.limits().iter().any(|limit| limit.numbers().kind.is_bucket())
    }

    fn state_under(&self, standings: Box<[Standing]>) -> Box<[Standing]> {
        standings
    }

    fn change_limits(
        &self,
        state: &mut Box<[Standing]>,
        _: Tick,
        change: &mut dyn FnMut(&mut [Standing]),
    ) {
        change(state);
    }

    /// What was left under another policy is carried over: what was used stays used.
    fn read(&self, value: &[u8], now: Tick) -> Result<Box<[Standing]>, Error> {
        let policy = &self.0.policy;
        let (mut under, _) = value::read(value)?;
        if under.iter().any(|(other, _)| other.limits() == policy.limits()) {
            under.retain(|(other, _)| other.limits() == policy.limits());
        }
        let most =
            under.into_iter().max_by_key(|(other, state)| other.used(state, now).rounded_up());
        Ok(match most {
            Some((other, state)) if other.limits() == policy.limits() => state,
            Some((other, state)) => policy.carry(&other, &state, now),
            None => policy.first(now),
        })
    }

    fn write(&self, state: &Box<[Standing]>) -> Vec<u8> {
        value::write(&self.0.policy, state)
    }
}

/// What one client gets by its tier and override.
#[derive(Clone, Debug)]
pub struct ByPlan {
    plan: Plan,
    script: Option<Arc<Prepared>>,
}

impl Judge for ByPlan {
    type Rule = Plan;

    fn rule(&self) -> &Plan {
        &self.plan
    }

    fn script(&self) -> Option<&Prepared> {
        self.script.as_deref()
    }

    fn state_under(&self, standings: Box<[Standing]>) -> Kept {
        Kept::of(self.script.iter().map(|script| (script.policy.clone(), standings.clone())), &[])
    }

    /// Only under the policy that the client has now: the others do not know of outages.
    fn change_limits(&self, state: &mut Kept, now: Tick, change: &mut dyn FnMut(&mut [Standing])) {
        let Some(script) = &self.script else { return };
        let mut under: Vec<(Arc<Policy>, Box<[Standing]>)> = state
            .policies()
            .map(|(policy, standings)| (policy.clone(), standings.into_owned()))
            .collect();
        let allowances: Vec<_> = state.allowances().collect();
        let own = script.policy.limits();
        match under.iter_mut().find(|(policy, _)| policy.limits() == own) {
            Some((_, standings)) => change(standings),
            None => {
                let mut standings = script.policy.first(now);
                change(&mut standings);
                under.push((script.policy.clone(), standings));
            }
        }
        *state = Kept::of(under, &allowances);
    }

    /// Policies that are the plan's own are known by their limits: in the value they have no names.
    fn read(&self, value: &[u8], _: Tick) -> Result<Kept, Error> {
        let (under, allowances) = value::read(value)?;
        let under = under.into_iter().map(|(policy, standings)| {
            let own = self.plan.policies().find(|own| own.limits() == policy.limits());
            (own.unwrap_or(&policy).clone(), standings)
        });
        Ok(Kept::of(under, &allowances))
    }

    fn write(&self, kept: &Kept) -> Vec<u8> {
        value::write_all(kept.policies(), kept.allowances())
    }
}
