//! One part of a joint decision: a check of one key under any rule.

use std::time::Instant;

use tallygate::algorithm::{Algorithm, Answer as _, Op, Outcome, Part, Receipt, Script, Timed};
use tallygate::observer::Observer;
use tallygate::store::Store;
use tallygate::tiers::RuleSource;
use tallygate::{Cost, Decision, RateLimiter, Tick};

use crate::error::Error;
use crate::failure::ShareCharge;
use crate::key::Key;
use crate::prepared::Prepared;
use crate::store::{
    DecidedPart, Lowering, RedisRule, RedisStore, Reply, StateCodec, changed, lower, reserve_in,
};
use crate::transaction::{Write, unexpected};

/// A part of a joint decision. Times of type `i64` are in microseconds, as Redis has them.
pub(super) trait JointPart: Send + Sync {
    fn key(&self) -> &Key;
    fn store(&self) -> &RedisStore;
    fn cost(&self) -> Cost;
    /// Returns the time that the request names.
    fn time(&self) -> Option<Tick>;
    /// Prepares for a decision at a given time.
    fn begin(&mut self, now: Option<Tick>) -> Result<(), Error>;
    /// Returns whether its rule charges at a time what it allows.
    fn charges(&self, now: i64) -> bool;
    /// Returns the same at a time in the caller's ticks.
    fn charges_for_caller(&self, now: Option<Tick>) -> bool;
    /// Charges a cost to this process's share as well: see [`RedisStore::charge_share`].
    fn charge_share(&self, cost: Cost, now: Option<Tick>)
    -> Result<Option<ShareCharge<'_>>, Timed>;
    /// Charges the units that the client used in this process while Redis was unavailable.
    fn pay_debt(&self, now: Option<Tick>, deadline: Instant) -> Reply<'_, ()>;
    /// Returns whether its rule allows a cost to a key with this value.
    fn agrees(&self, value: &[u8], now: i64, cost: Cost) -> Result<bool, Error>;
    /// Returns the decision of a step without changing anything.
    fn report(&self, value: &[u8], now: i64, cost: Cost, go: bool) -> Result<Timed, Error>;
    /// Moves a value to its rule, which a check does first.
    fn bring(&self, value: Vec<u8>, now: i64) -> Result<Vec<u8>, Error>;
    /// Charges a cost if all parts allow it. Returns the value to write (the same value if nothing changes), the decision,
    /// and the receipt of the charge.
    fn charge(
        &self,
        value: &[u8],
        now: i64,
        cost: Cost,
        go: bool,
    ) -> Result<(Write, Timed, Receipt), Error>;
    /// Returns the policy whose script decides on a cost of its key, if there is one.
    fn scripted(&self, cost: Cost) -> Option<&Prepared>;
    /// Makes its decision from the result of a script on a cost.
    fn answer(&self, decided: &DecidedPart, now: i64, cost: Cost, go: bool)
    -> Result<Timed, Error>;
    /// Checks it as the only part. Its failure setting decides if Redis does not.
    fn check_alone(&self, now: Option<Tick>) -> Reply<'_, Timed>;
    /// Checks it in Redis. Returns the receipt of the charge as well.
    fn reserve(&self, given: Option<i64>, deadline: Instant) -> Reply<'_, (Timed, Receipt)>;
    /// Returns the units of a charge that was made at a time, as far as they still count. It has its own time budget.
    fn return_charge(
        &self,
        cost: Cost,
        receipt: Receipt,
        charged_at: Tick,
        now: Option<Tick>,
    ) -> Reply<'static, Timed>;
    /// Decides by its failure setting.
    fn fall_back(&self, error: Error, op: Op, now: Option<Tick>) -> Result<Timed, Error>;
    /// Returns the units of a charge that its failure setting made in this process.
    fn uncharge(&self, cost: Cost, now: Option<Tick>) -> Decision;
    /// Reports the decision to the limiter's observer.
    fn observe(&self, decision: &Decision, at: Tick);
}

/// A request to a limiter whose store is in Redis.
pub(super) struct RedisPart<'a, R: RuleSource + 'a, S, O>
where
    R::Rule: RedisRule,
{
    pub(super) limiter: &'a RateLimiter<R, S, O>,
    pub(super) store: &'a RedisStore,
    pub(super) rule: R::Ref<'a>,
    pub(super) codec: <R::Rule as RedisRule>::StateCodec,
    pub(super) client: Box<[u8]>,
    pub(super) key: Key,
    pub(super) cost: Cost,
    /// The time that the request names.
    pub(super) at: Option<Tick>,
}

type State<R> = <<<R as RuleSource>::Rule as RedisRule>::StateCodec as StateCodec>::Rule;

impl<R, S, O> RedisPart<'_, R, S, O>
where
    R: RuleSource + Sync,
    R::Rule: RedisRule,
    S: Store<R::Rule> + Sync,
    O: Observer,
{
    /// Reads the state from a value, or makes a first state if there is none.
    fn read(&self, value: &[u8], now: Tick) -> Result<<State<R> as Algorithm>::State, Error> {
        if value.is_empty() {
            Ok(self.codec.rule().initial(now))
        } else {
            self.codec.read(value, now)
        }
    }
}

impl<R, S, O> JointPart for RedisPart<'_, R, S, O>
where
    R: RuleSource + Sync,
    R::Rule: RedisRule,
    S: Store<R::Rule> + Sync,
    O: Observer,
{
    fn key(&self) -> &Key {
        &self.key
    }

    fn store(&self) -> &RedisStore {
        self.store
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn time(&self) -> Option<Tick> {
        self.at
    }

    fn begin(&mut self, now: Option<Tick>) -> Result<(), Error> {
        self.codec = self.rule.codec(self.store, now)?;
        Ok(())
    }

    fn charges(&self, now: i64) -> bool {
        self.codec.rule().charges(Tick(now))
    }

    fn charges_for_caller(&self, now: Option<Tick>) -> bool {
        self.rule.charges(now.unwrap_or_else(|| Store::<R::Rule>::now(self.store())))
    }

    fn charge_share(
        &self,
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Option<ShareCharge<'_>>, Timed> {
        self.store().charge_share(&*self.rule, &self.client, cost, now)
    }

    fn pay_debt(&self, now: Option<Tick>, deadline: Instant) -> Reply<'_, ()> {
        Box::pin(self.store().pay_debt(&*self.rule, &self.client, now, deadline))
    }

    fn agrees(&self, value: &[u8], now: i64, cost: Cost) -> Result<bool, Error> {
        let (rule, now) = (self.codec.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        Ok(Part { rule, state: &mut state, op: Op::Check(cost) }.allows(now))
    }

    fn report(&self, value: &[u8], now: i64, cost: Cost, go: bool) -> Result<Timed, Error> {
        let (rule, now) = (self.codec.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        let mut part = Part { rule, state: &mut state, op: Op::Check(cost) };
        Ok(self.store().in_caller_ticks(part.step::<Timed>(now, go).0))
    }

    fn bring(&self, value: Vec<u8>, now: i64) -> Result<Vec<u8>, Error> {
        let (rule, now) = (self.codec.rule(), Tick(now));
        let mut state = self.read(&value, now)?;
        if !rule.clock_was_set_back(&state, now) {
            return Ok(value);
        }
        rule.rebase(&mut state, now);
        Ok(self.codec.write(&state))
    }

    fn charge(
        &self,
        value: &[u8],
        now: i64,
        cost: Cost,
        go: bool,
    ) -> Result<(Write, Timed, Receipt), Error> {
        let (rule, now) = (self.codec.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        let before = if value.is_empty() { self.codec.write(&state) } else { value.to_vec() };
        let (timed, receipt) = if go {
            tallygate::algorithm::reserve(rule, &mut state, now, cost)
        } else {
            let mut part = Part { rule, state: &mut state, op: Op::Check(cost) };
            (part.step::<Timed>(now, false).0, Receipt::Nothing)
        };
        let write = match cost {
            0 => None,
            _ => changed(&self.codec, &state, &before).and_then(|mut writes| writes.pop()),
        };
        let write = write.unwrap_or_else(|| {
            let fresh_at = rule.fresh_at(&state).map(|fresh| fresh.0);
            Write { value: value.to_vec(), fresh_at }
        });
        Ok((write, self.store().in_caller_ticks(timed), receipt))
    }

    fn scripted(&self, cost: Cost) -> Option<&Prepared> {
        let is_exact = i64::try_from(cost).is_ok_and(|cost| cost > 0 && Script::is_exact(cost));
        self.codec.script().filter(|prepared| is_exact && prepared.scripted.is_some())
    }

    fn answer(
        &self,
        decided: &DecidedPart,
        now: i64,
        cost: Cost,
        go: bool,
    ) -> Result<Timed, Error> {
        let prepared = self.codec.script().ok_or_else(unexpected)?;
        let state = self.codec.state_under(prepared.policy.state_from_numbers(&decided.numbers)?);
        let outcome = match (go, decided.is_allowed) {
            (true, _) => Outcome::Charged(cost),
            (false, true) => Outcome::NotCharged(cost),
            (false, false) => Outcome::Denied(cost),
        };
        let mut timed =
            Timed::from_outcome(self.codec.rule(), &state, Tick(now), outcome, decided.shadow);
        let denied = (!decided.is_allowed).then_some(cost);
        decided.bounds.complete(&mut timed.decision, &prepared.policy, Tick(now), denied);
        Ok(self.store().in_caller_ticks(timed))
    }

    fn check_alone(&self, now: Option<Tick>) -> Reply<'_, Timed> {
        let op = Op::Check(self.cost);
        Box::pin(self.store().decide_any(&*self.rule, &self.client, op, now))
    }

    fn reserve(&self, given: Option<i64>, deadline: Instant) -> Reply<'_, (Timed, Receipt)> {
        Box::pin(async move {
            let redis = self.store().redis();
            let (timed, receipt) =
                reserve_in(redis, &self.codec, &self.key, self.cost, given, deadline).await?;
            Ok((self.store().in_caller_ticks(timed), receipt))
        })
    }

    fn return_charge(
        &self,
        cost: Cost,
        receipt: Receipt,
        charged_at: Tick,
        now: Option<Tick>,
    ) -> Reply<'static, Timed> {
        let (store, codec, key) = (self.store().clone(), self.codec.clone(), self.key.clone());
        Box::pin(async move {
            let number = store.to_redis_time(charged_at).0.saturating_sub(1);
            let what = Lowering::Settle { change: -i128::from(cost), receipt, number };
            let (redis, given) = (store.redis(), now.map(|now| store.to_redis_time(now).0));
            let deadline = redis.settlement_deadline();
            let returned = lower(redis, &codec, &key, what, given, deadline).await;
            let timed = match returned {
                // A reset has removed the charge with everything else.
                Err(Error::Settle(_)) => {
                    return store.ask(&codec, &key, Op::Peek(0), now, deadline).await;
                }
                returned => returned?,
            };
            Ok(store.in_caller_ticks(timed))
        })
    }

    fn fall_back(&self, error: Error, op: Op, now: Option<Tick>) -> Result<Timed, Error> {
        self.store().fall_back(error, &*self.rule, &self.client, op, now)
    }

    fn uncharge(&self, cost: Cost, now: Option<Tick>) -> Decision {
        self.store().uncharge(&*self.rule, &self.client, cost, now)
    }

    fn observe(&self, decision: &Decision, at: Tick) {
        self.limiter.observe(&*self.rule, &self.client, self.cost, decision, at);
    }
}
