//! How Redis decides by a rule, and how the states of a rule are stored.

use std::sync::Arc;

use tallygate::algorithm::{Algorithm, LimitRecord};
use tallygate::store::ClientState;
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Kind, Policy, Tick};

use super::RedisStore;
use crate::error::Error;
use crate::prepared::{PolicyChange, Prepared};
use crate::value::{self, ReturnsForm};

/// A rule that processes can share through Redis. Not exported: how its states are stored is private to this crate.
pub trait RedisRule: Algorithm + Sync {
    /// How its states are read and written.
    #[expect(private_bounds, reason = "only this crate decides by it")]
    type StateCodec: StateCodec + Clone + 'static;

    /// Converts the rule to microseconds, for a decision at a time.
    ///
    /// # Errors
    /// Fails if a window is not a whole number of microseconds.
    fn codec(&self, store: &RedisStore, now: Option<Tick>) -> Result<Self::StateCodec, Error>;

    /// Returns the policy that decides now, prepared for Redis, if there is one.
    #[expect(private_interfaces, reason = "only this crate decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>>;

    /// Returns the same rule as a rule for one client.
    fn client_rule(&self) -> ClientRule;
}

impl RedisRule for Policy {
    type StateCodec = PolicyCodec;

    fn codec(&self, store: &RedisStore, _: Option<Tick>) -> Result<PolicyCodec, Error> {
        Ok(PolicyCodec(store.prepare(self, PolicyChange::Replace)?))
    }

    #[expect(private_interfaces, reason = "only this crate decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>> {
        store.prepare(self, PolicyChange::Replace).ok()
    }

    fn client_rule(&self) -> ClientRule {
        ClientRule::of(self.clone())
    }
}

impl RedisRule for ClientRule {
    type StateCodec = ClientRuleCodec;

    /// If the server's time decides, an override that ends just now may or may not count.
    fn codec(&self, store: &RedisStore, now: Option<Tick>) -> Result<ClientRuleCodec, Error> {
        let in_redis = |policy: &Arc<Policy>| {
            store.prepare(policy, PolicyChange::KeepBoth).map(|prepared| prepared.policy.clone())
        };
        let rule = self.with(in_redis, |time| store.to_redis_time(time))?;
        let now = now.unwrap_or_else(|| store.server_time());
        let script = match self.access(now) {
            Access::Limited(policy) => Some(store.prepare(policy, PolicyChange::KeepBoth)?),
            Access::Unlimited | Access::Blocked => None,
        };
        Ok(ClientRuleCodec { rule, script })
    }

    #[expect(private_interfaces, reason = "only this crate decides by it")]
    fn prepared(&self, store: &RedisStore) -> Option<Arc<Prepared>> {
        match self.access(store.server_time()) {
            Access::Limited(policy) => store.prepare(policy, PolicyChange::KeepBoth).ok(),
            Access::Unlimited | Access::Blocked => None,
        }
    }

    fn client_rule(&self) -> ClientRule {
        self.clone()
    }
}

/// A rule in microseconds, and how its states are stored.
pub(crate) trait StateCodec: Send + Sync {
    type Rule: Algorithm;

    fn rule(&self) -> &Self::Rule;

    /// Returns how many of the rule's ticks are one microsecond.
    fn scale(&self) -> u64 {
        1
    }

    /// Returns the policy whose script decides, if there is one.
    fn script(&self) -> Option<&Prepared>;

    /// Returns whether a state may hold levels or counts, which reservations have to know of when units are returned.
    fn has_usage(&self) -> bool {
        true
    }

    /// Returns how a script reads and writes the returns of a key, if one can.
    fn returns_form(&self) -> Option<ReturnsForm<'_>> {
        None
    }

    /// Returns the state that the script of that policy has written.
    fn state_under(&self, records: Box<[LimitRecord]>) -> <Self::Rule as Algorithm>::State;

    /// Charges single limits of the policy whose script decides. The function gets their records, and the most units that
    /// there is room for besides; it returns the most units that it charged to one of them.
    fn charge_limits(
        &self,
        _: &mut <Self::Rule as Algorithm>::State,
        _: Tick,
        _: &mut dyn FnMut(&mut [LimitRecord], Cost) -> Cost,
    ) {
    }

    /// Reads the state from a value.
    fn read(&self, value: &[u8], now: Tick) -> Result<<Self::Rule as Algorithm>::State, Error>;

    /// Writes a state as a value.
    fn write(&self, state: &<Self::Rule as Algorithm>::State) -> Vec<u8>;
}

/// The codec of one policy for all clients.
#[derive(Clone, Debug)]
pub struct PolicyCodec(pub(crate) Arc<Prepared>);

impl StateCodec for PolicyCodec {
    type Rule = Policy;

    fn rule(&self) -> &Policy {
        &self.0.policy
    }

    fn script(&self) -> Option<&Prepared> {
        Some(&self.0)
    }

    fn has_usage(&self) -> bool {
        let mut kinds = self.0.policy.limits().iter().map(|limit| limit.numbers().kind);
        kinds.any(|kind| kind != Kind::SlidingWindowLog)
    }

    fn returns_form(&self) -> Option<ReturnsForm<'_>> {
        self.0.returns_form(false)
    }

    fn state_under(&self, records: Box<[LimitRecord]>) -> Box<[LimitRecord]> {
        records
    }

    fn charge_limits(
        &self,
        state: &mut Box<[LimitRecord]>,
        _: Tick,
        charge: &mut dyn FnMut(&mut [LimitRecord], Cost) -> Cost,
    ) {
        charge(state, Cost::MAX);
    }

    /// Reads the state. Usage under another policy is carried over.
    fn read(&self, value: &[u8], now: Tick) -> Result<Box<[LimitRecord]>, Error> {
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
            None => policy.initial(now),
        })
    }

    fn write(&self, state: &Box<[LimitRecord]>) -> Vec<u8> {
        value::write(&self.0.policy, state)
    }
}

/// The codec of the rule of one client, by its tier and override.
#[derive(Clone, Debug)]
pub struct ClientRuleCodec {
    rule: ClientRule,
    script: Option<Arc<Prepared>>,
}

impl StateCodec for ClientRuleCodec {
    type Rule = ClientRule;

    fn rule(&self) -> &ClientRule {
        &self.rule
    }

    fn script(&self) -> Option<&Prepared> {
        self.script.as_deref()
    }

    fn returns_form(&self) -> Option<ReturnsForm<'_>> {
        self.script.as_ref()?.returns_form(true)
    }

    fn state_under(&self, records: Box<[LimitRecord]>) -> ClientState {
        ClientState::of(
            self.script.iter().map(|script| (script.policy.clone(), records.clone())),
            &[],
        )
    }

    fn charge_limits(
        &self,
        state: &mut ClientState,
        now: Tick,
        charge: &mut dyn FnMut(&mut [LimitRecord], Cost) -> Cost,
    ) {
        let Some(script) = &self.script else { return };
        state.charge_limits(&script.policy, now, charge);
    }

    /// Matches policies of the rule by their limits: values do not contain names.
    fn read(&self, value: &[u8], _: Tick) -> Result<ClientState, Error> {
        let (under, allowances) = value::read(value)?;
        let under = under.into_iter().map(|(policy, records)| {
            let own = self.rule.policies().find(|own| own.limits() == policy.limits());
            (own.unwrap_or(&policy).clone(), records)
        });
        Ok(ClientState::of(under, &allowances))
    }

    fn write(&self, kept: &ClientState) -> Vec<u8> {
        value::write_all(kept.policies(), kept.allowances())
    }
}
