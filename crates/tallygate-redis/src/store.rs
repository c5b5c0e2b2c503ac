//! The store for the keys of a policy in Redis.
//!
//! A check is one call of the policy's script. The script returns the resulting state as numbers, and the core derives
//! the decision from them, so the decision is the same as in memory. If a script cannot decide on a value, it returns
//! the value, and this process decides by compare-and-set.

mod checks;
mod lease_calls;
mod operation;
mod outage;
mod reply;
mod rule;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use arc_swap::ArcSwap;
use futures_util::future::{join_all, ready};
use tallygate::algorithm::{Answer, NotAMultiple, Op, Receipt, Timed};
use tallygate::reservation::{Charged, SettleError};
use tallygate::store::{InvalidAsk, MAX_KEY_BYTES, RuleRef, Store};
use tallygate::{Ask, Cost, Decision, Policy, Quota, Tick, Ticks};

pub(crate) use self::operation::{
    Lowering, changed, decide, lower, lower_alone, lowers, reserve_in, step,
};
pub(crate) use self::reply::DecidedPart;
pub(crate) use self::rule::{PolicyCodec, RedisRule, StateCodec};
use crate::brokers::{Brokers, LocalDecisions};
use crate::client::Redis;
use crate::error::Error;
use crate::failure::{LocalLimiter, LogThrottle, OnFailure};
use crate::key::Key;
use crate::key_broker::Terms;
use crate::lease::Leases;
use crate::prepared::{PolicyChange, Prepared, ScriptUse};
use crate::script::Scripted;
use crate::transaction::ReadValues;
use crate::value;

/// The reply of a store in Redis: a future.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// Keeps the keys of a policy, or of [tiers](tallygate::Tiers), in Redis.
///
/// Cloning is cheap, and all clones are the same store. [`Redis::store`] makes one.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    redis: Redis,
    name: Arc<str>,
    on_failure: ArcSwap<OnFailure>,
    local: LocalLimiter,
    /// How many of the caller's ticks are one microsecond.
    scale: u64,
    /// The policies that are in use, prepared for Redis.
    prepared: ArcSwap<Vec<(Arc<Policy>, Arc<Prepared>)>>,
    log_throttle: LogThrottle,
    is_paying_debts: AtomicBool,
    local_decisions: ArcSwap<LocalDecisions>,
    brokers: Brokers,
}

/// How many prepared policies are kept: tiers, overrides and recent changes.
const MAX_PREPARED: usize = 64;

impl Redis {
    /// Makes a store for the keys of a policy, by its name. Limiters with the same name share the quotas of their
    /// clients, in all processes.
    #[must_use]
    pub fn store(&self, name: impl Into<Arc<str>>) -> RedisStore {
        RedisStore::new(self.clone(), name.into(), OnFailure::default())
    }
}

impl RedisStore {
    pub(crate) fn new(redis: Redis, name: Arc<str>, on_failure: OnFailure) -> Self {
        Self::with_settings(redis, name, on_failure, 1000, LocalDecisions::default())
    }

    fn with_settings(
        redis: Redis,
        name: Arc<str>,
        on_failure: OnFailure,
        scale: u64,
        local_decisions: LocalDecisions,
    ) -> Self {
        let shared = Shared {
            redis,
            name,
            on_failure: ArcSwap::from_pointee(on_failure),
            local: LocalLimiter::new(on_failure),
            scale,
            prepared: ArcSwap::default(),
            log_throttle: LogThrottle::new(),
            is_paying_debts: AtomicBool::new(false),
            local_decisions: ArcSwap::from_pointee(local_decisions),
            brokers: Brokers::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Sets the failure setting, and returns a store that shares nothing with its clones before. Default:
    /// [`OnFailure::Allow`].
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        let Shared { redis, name, scale, local_decisions, .. } = &*self.shared;
        Self::with_settings(
            redis.clone(),
            name.clone(),
            on_failure,
            *scale,
            **local_decisions.load(),
        )
    }

    /// Turns on leases: for a key with many requests, this process takes a slice of the quota in one call, and serves
    /// from it without further calls.
    ///
    /// Leases work for policies of one bucket or one fixed window, without options; other policies are checked by plain
    /// calls. In any interval, a bucket allows at most what the policy allows in that interval and the life of a lease;
    /// a window allows no more than without leases. [Return the leases](Self::give_back_leases) before the process
    /// ends.
    #[must_use]
    pub fn leases(self, leases: Leases) -> Self {
        self.set_leases(Some(leases));
        self
    }

    /// Turns leases on or off, for this store and all its clones.
    pub fn set_leases(&self, leases: Option<Leases>) {
        self.set_local_decisions(|local_decisions| LocalDecisions { leases, ..local_decisions });
    }

    /// Turns the cache of denials on (the default) or off.
    ///
    /// While it is on, a denial is repeated without a call until the retry time that Redis returned, for at most one
    /// second. A refund, a reset or a change by another process takes effect within that second; one through this store
    /// takes effect at once. Decisions at a given time, and policies with a penalty, always make a call.
    #[must_use]
    pub fn deny_cache(self, is_on: bool) -> Self {
        self.set_deny_cache(is_on);
        self
    }

    /// Turns the cache of denials on or off, for this store and all its clones.
    pub fn set_deny_cache(&self, is_on: bool) {
        self.set_local_decisions(|local_decisions| LocalDecisions {
            caches_denials: is_on,
            ..local_decisions
        });
    }

    fn set_local_decisions(&self, change: impl Fn(LocalDecisions) -> LocalDecisions) {
        let before = **self.shared.local_decisions.load();
        if change(before) != before {
            self.shared.local_decisions.rcu(|local_decisions| Arc::new(change(**local_decisions)));
            // Prepared policies hold the previous settings.
            self.shared.prepared.store(Arc::default());
        }
    }

    /// Returns the leases of this process, so that other processes can use their units. Call it before the process
    /// ends.
    pub async fn give_back_leases(&self) {
        let counters = &self.shared.redis.inner().counters;
        let (back, _) = self.shared.brokers.sweep(true, counters);
        self.return_slices(back).await;
    }

    /// Sets the failure setting of this store and all its clones. Units that were used in this process stay used.
    pub fn set_on_failure(&self, on_failure: OnFailure) {
        self.shared.local.share_as(on_failure);
        self.shared.on_failure.store(Arc::new(on_failure));
    }

    /// Makes the store count in ticks of any length, for callers that give the time with every call: tests and replays.
    ///
    /// By default, a tick is a nanosecond, and given times are truncated to microseconds.
    #[must_use]
    pub fn in_ticks(self) -> Self {
        let Shared { redis, name, on_failure, local_decisions, .. } = &*self.shared;
        Self::with_settings(
            redis.clone(),
            name.clone(),
            **on_failure.load(),
            1,
            **local_decisions.load(),
        )
    }

    /// Returns the connection to Redis.
    #[must_use]
    pub fn redis(&self) -> &Redis {
        &self.shared.redis
    }

    /// Returns the name of the policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Removes all state of some clients, as if they had never made a request.
    ///
    /// # Errors
    /// Fails if a key is too long or Redis is unavailable. Some clients may be removed already.
    pub async fn forget(&self, clients: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<(), Error> {
        let mut keys = Vec::new();
        for client in clients {
            let client = client.as_ref();
            keys.push(self.key(client)?);
            if self.shared.local_decisions.load().leases.is_some() {
                keys.push(self.shared.redis.key_of_leases(&self.shared.name, client)?);
            }
            self.shared.brokers.changed(client, true);
        }
        self.shared.redis.remove(&keys).await
    }

    pub(crate) fn key(&self, client: &[u8]) -> Result<Key, Error> {
        self.shared.redis.key(&self.shared.name, client)
    }

    pub(crate) fn scale(&self) -> u64 {
        self.shared.scale
    }

    /// Prepares a policy for Redis: converts it to microseconds, and finds its scripts.
    pub(crate) fn prepare(
        &self,
        policy: &Policy,
        policy_change: PolicyChange,
    ) -> Result<Arc<Prepared>, NotAMultiple> {
        let known = self.shared.prepared.load();
        let is_same = |(known, prepared): &&(Arc<Policy>, Arc<Prepared>)| {
            **known == *policy && prepared.policy_change == policy_change
        };
        if let Some((_, prepared)) = known.iter().find(is_same) {
            return Ok(prepared.clone());
        }
        let in_redis = Arc::new(policy.with_coarser_ticks(self.shared.scale)?);
        let local_decisions = **self.shared.local_decisions.load();
        let scripted = Scripted::new(&in_redis);
        let is_leased = scripted.as_ref().is_some_and(|scripted| scripted.lease.is_some());
        let leases = local_decisions.leases.filter(|_| is_leased);
        if let Some(asked) = leases {
            let shortened = asked.shortened_for(&in_redis);
            if shortened != Some(asked) {
                tracing::warn!(
                    policy = &*self.shared.name,
                    lease = ?asked.lives_for(),
                    used = ?shortened.map(Leases::lives_for),
                    "the lease is longer than a tenth of a fixed window, which would starve other servers; shortening it"
                );
            }
        }
        let prepared = Arc::new(Prepared {
            head: value::head(&in_redis),
            scripted,
            terms: Terms::new(in_redis.clone(), local_decisions.caches_denials, leases)
                .within(self.shared.redis.budget()),
            policy: in_redis,
            policy_change,
        });
        let entry = (Arc::new(policy.clone()), prepared.clone());
        self.shared.prepared.rcu(|known| {
            let keep = known.len().min(MAX_PREPARED - 1);
            let mut new = Vec::with_capacity(keep + 1);
            new.push(entry.clone());
            new.extend(known.iter().take(keep).cloned());
            new
        });
        Ok(prepared)
    }

    /// Converts a time to microseconds.
    pub(crate) fn to_redis_time(&self, time: Tick) -> Tick {
        Tick(time.0.div_euclid(i64::try_from(self.shared.scale).unwrap_or(1)))
    }

    /// Converts a time to the caller's ticks.
    fn to_caller_time(&self, time: Tick) -> Tick {
        Tick(time.0.saturating_mul(i64::try_from(self.shared.scale).unwrap_or(1)))
    }

    /// Estimates the time of the server, in the caller's ticks.
    fn server_time(&self) -> Tick {
        self.to_caller_time(Tick(self.shared.redis.now()))
    }

    /// Converts a decision to the caller's ticks.
    pub(crate) fn in_caller_ticks(&self, Timed { decision, at }: Timed) -> Timed {
        let span = |span: Ticks| Ticks(span.0.saturating_mul(self.shared.scale));
        let decision = Decision {
            retry_after: decision.retry_after.map(span),
            reset_after: span(decision.reset_after),
            delay: span(decision.delay),
            quota: decision.quota.map(|quota| Quota { window: span(quota.window), ..quota }),
            ..decision
        };
        Timed { decision, at: self.to_caller_time(at) }
    }

    /// Decides on a key in Redis, in the caller's ticks.
    pub(crate) async fn ask<J: StateCodec + Clone + 'static>(
        &self,
        codec: &J,
        key: &Key,
        op: Op,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<Timed, Error> {
        let given = now.map(|now| self.to_redis_time(now).0);
        let timed = decide(&self.shared.redis, codec, key, op, given, deadline).await?;
        Ok(self.in_caller_ticks(timed))
    }

    /// Decides on a key that no script can decide on, together with all other callers of this process.
    async fn ask_without_script<J: StateCodec + Clone + 'static>(
        &self,
        codec: &J,
        client: &[u8],
        key: &Key,
        op: Op,
        deadline: Instant,
    ) -> Result<Timed, Error> {
        let codec = codec.clone();
        let decide = move |seen: &ReadValues| step(&codec, op, seen);
        let (timed, several) = self.shared.redis.commit([key], None, deadline, decide).await?;
        if several {
            self.shared.brokers.skip_scripts(client);
        }
        Ok(self.in_caller_ticks(timed))
    }

    /// Decides on a key. The failure setting decides if Redis does not.
    async fn decide<A: RedisRule>(
        &self,
        rule: &A,
        client: &[u8],
        key: &Key,
        op: Op,
        now: Option<Tick>,
        by: (ScriptUse, Instant),
    ) -> Result<Timed, Error> {
        match op {
            Op::Check(_) | Op::Peek(_) => {}
            Op::Force(_) => self.shared.brokers.changed(client, false),
            Op::Reset => self.shared.brokers.changed(client, true),
        }
        let codec = rule.codec(self, now)?;
        let (script_use, deadline) = by;
        let paid_debt = self.pay_debt(rule, client, now, deadline).await;
        let share = match (&paid_debt, op) {
            (Ok(()), Op::Check(cost)) => match self.charge_share(rule, client, cost, now) {
                Ok(share) => share,
                Err(denial) => return Ok(denial),
            },
            _ => None,
        };
        let result = match paid_debt {
            Ok(()) if script_use == ScriptUse::Never => {
                self.ask_without_script(&codec, client, key, op, deadline).await
            }
            Ok(()) => self.ask(&codec, key, op, now, deadline).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(timed) => {
                if let Some(share) = share.filter(|_| timed.decision.allowed) {
                    share.keep();
                }
                self.pay_debts_in_background();
                Ok(timed)
            }
            Err(error) => {
                drop(share);
                self.fall_back(error, rule, client, op, now)
            }
        }
    }

    /// Returns a hash that distinguishes this store from stores of other policies and prefixes.
    pub(crate) fn identity(&self) -> Result<u64, Error> {
        Ok(xxhash_rust::xxh3::xxh3_64(&self.key(b"")?.name))
    }

    /// Checks an estimate in Redis. If Redis does not decide, the failure setting does, and there is no receipt.
    async fn reserve_estimate<A: RedisRule>(
        &self,
        rule: &A,
        client: &[u8],
        estimate: Cost,
        now: Option<Tick>,
    ) -> Result<Charged, Error> {
        let (key, store) = (self.key(client)?, self.identity()?);
        let codec = rule.codec(self, now)?;
        let deadline = self.shared.redis.deadline();
        let mut share = None;
        let result = match self.pay_debt(rule, client, now, deadline).await {
            Ok(()) => {
                share = match self.charge_share(rule, client, estimate, now) {
                    Ok(share) => share,
                    Err(timed) => {
                        return Ok(Charged {
                            timed,
                            receipt: Receipt::Nothing,
                            number: i64::MAX,
                            store,
                        });
                    }
                };
                let given = now.map(|now| self.to_redis_time(now).0);
                reserve_in(&self.shared.redis, &codec, &key, estimate, given, deadline).await
            }
            Err(error) => Err(error),
        };
        match result {
            Ok((timed, receipt)) => {
                if let Some(share) = share.filter(|_| timed.decision.allowed) {
                    share.keep();
                }
                self.pay_debts_in_background();
                // A return at the same time as the charge counts as later.
                let number = timed.at.0.saturating_sub(1);
                Ok(Charged { timed: self.in_caller_ticks(timed), receipt, number, store })
            }
            Err(error) => {
                drop(share);
                let timed = self.fall_back(error, rule, client, Op::Check(estimate), now)?;
                Ok(Charged { timed, receipt: Receipt::Nothing, number: i64::MAX, store })
            }
        }
    }

    /// Settles a charge in Redis.
    async fn settle_charge<A: RedisRule>(
        &self,
        rule: &A,
        client: &[u8],
        change: i128,
        (receipt, number): (&Receipt, i64),
        now: Option<Tick>,
    ) -> Result<Decision, Error> {
        self.shared.brokers.changed(client, false);
        let (key, codec) = (self.key(client)?, rule.codec(self, now)?);
        let deadline = self.shared.redis.settlement_deadline();
        let result = match self.pay_debt(rule, client, now, deadline).await {
            Ok(()) => {
                let what = Lowering::Settle { change, receipt: receipt.clone(), number };
                let given = now.map(|now| self.to_redis_time(now).0);
                lower(&self.shared.redis, &codec, &key, what, given, deadline).await
            }
            Err(error) => Err(error),
        };
        match result {
            Ok(timed) => {
                self.pay_debts_in_background();
                Ok(self.in_caller_ticks(timed).decision)
            }
            Err(error @ Error::Settle(_)) => Err(error),
            // Units in Redis cannot be returned now. The reservation can be settled later.
            Err(error) if change < 0 && *receipt != Receipt::Nothing => {
                self.fall_back(error, rule, client, Op::Reset, now).map(|timed| timed.decision)
            }
            Err(error) => {
                let op = Op::Force(change.max(0));
                self.fall_back(error, rule, client, op, now).map(|timed| timed.decision)
            }
        }
    }
}

impl<A: RedisRule> Store<A> for RedisStore {
    type Reply<'a, T: 'a> = Reply<'a, T>;

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        let asked = self.prepare_check(&*rule, key, op, now);
        if let Some((prepared, cost)) = &asked
            && let Some(decision) = self.shared.brokers.answer_at_once(prepared, key, *cost)
        {
            return Box::pin(ready(Ok(make(&*rule, self.in_caller_ticks(decision)))));
        }
        let client: Box<[u8]> = key.into();
        Box::pin(async move {
            let timed = self.decide_prepared(&*rule, &client, op, now, asked).await?;
            Ok(make(&*rule, timed))
        })
    }

    /// Sends the calls for all keys before the first reply: one round trip per server. Checks of the same key are made
    /// one after the other, to keep their order.
    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        asks: &'a [K],
    ) -> Reply<'a, Vec<T>>
    where
        for<'k> &'k K: Into<Ask<'k>>,
    {
        let asks: Vec<Ask<'a>> = asks.iter().map(Into::into).collect();
        let long = asks.iter().map(|ask| ask.key.len()).find(|bytes| *bytes > MAX_KEY_BYTES);
        Box::pin(async move {
            if let Some(bytes) = long {
                return Err(Error::KeyTooLong { bytes });
            }
            let decide = |ask: &Ask<'a>| {
                (ask.key, self.decide_any(&*rule, ask.key, Op::Check(ask.cost), ask.at))
            };
            let each = asks.iter().map(decide);
            let decided = in_order(each.collect()).await?.into_iter();
            Ok(decided.map(|timed| T::from_decision(timed.decision, timed.at)).collect())
        })
    }

    /// Makes one call of the policy's script, without leases and cached denials.
    fn reserve<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        estimate: Cost,
        _: Ticks,
        now: Option<Tick>,
    ) -> Reply<'a, Charged> {
        let client: Box<[u8]> = key.into();
        Box::pin(async move { self.reserve_estimate(&*rule, &client, estimate, now).await })
    }

    /// Fails with [`Error::Settle`] if the client was reset since the reservation.
    fn settle<'a>(
        &'a self,
        rule: impl RuleRef<A> + 'a,
        key: &[u8],
        change: i128,
        charged: &Charged,
        now: Option<Tick>,
    ) -> Result<Reply<'a, Decision>, SettleError> {
        if self.identity() != Ok(charged.store) {
            return Err(SettleError::OtherLimiter);
        }
        let (client, receipt): (Box<[u8]>, _) = (key.into(), charged.receipt.clone());
        let number = charged.number;
        Ok(Box::pin(async move {
            self.settle_charge(&*rule, &client, change, (&receipt, number), now).await
        }))
    }

    fn now(&self) -> Tick {
        self.server_time()
    }

    fn fail<'a, T: Send + 'a>(invalid: InvalidAsk) -> Reply<'a, T> {
        Box::pin(ready(Err(invalid.into())))
    }

    fn map<'a, T: Send + 'a, U: Send + 'a>(
        reply: Reply<'a, T>,
        make: impl FnOnce(T) -> U + Send + 'a,
    ) -> Reply<'a, U> {
        Box::pin(async move { reply.await.map(make) })
    }

    fn gather<'a, T: Send + 'a>(
        replies: impl Iterator<Item = (&'a [u8], Reply<'a, T>)>,
    ) -> Reply<'a, Vec<T>> {
        Box::pin(in_order(replies.collect::<Vec<_>>()))
    }
}

/// Waits for many replies at once, but for replies of the same key one after the other, to keep their order.
pub(crate) async fn in_order<T>(
    replies: Vec<(&[u8], impl Future<Output = Result<T, Error>>)>,
) -> Result<Vec<T>, Error> {
    let mut by_key: HashMap<&[u8], Vec<_>> = HashMap::with_capacity(replies.len());
    for (place, (key, reply)) in replies.into_iter().enumerate() {
        by_key.entry(key).or_default().push((place, reply));
    }
    let each = by_key.into_values().map(|replies| async move {
        let mut answers = Vec::with_capacity(replies.len());
        for (place, reply) in replies {
            answers.push((place, reply.await?));
        }
        Ok(answers)
    });
    let answers = join_all(each).await.into_iter().collect::<Result<Vec<_>, Error>>()?;
    let mut answers: Vec<_> = answers.into_iter().flatten().collect();
    answers.sort_unstable_by_key(|(place, _)| *place);
    Ok(answers.into_iter().map(|(_, answer)| answer).collect())
}

impl fmt::Debug for RedisStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RedisStore")
            .field("redis", &self.shared.redis)
            .field("name", &self.shared.name)
            .field("on_failure", &**self.shared.on_failure.load())
            .finish_non_exhaustive()
    }
}
