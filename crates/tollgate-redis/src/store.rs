//! The keys of a policy in Redis.
//!
//! A check is one call of the policy's script. What the script leaves is told in numbers, and the core reads
//! the answer from them: so whatever is told is what the core would tell. Where a script does not decide, the
//! value comes back instead, and is decided on here, by compare-and-set.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

use arc_swap::ArcSwap;
use futures_util::future::join_all;
use redis::Value;
use tollgate::{
    Access, Algorithm, Answer, Cost, Decision, Kept, Lent, NotWhole, Op, Outcome, Part, Plan,
    Policy, Script as Numbers, Standing, Store, Tick, Ticks, Timed,
};

use crate::client::Redis;
use crate::error::Error;
use crate::failure::{Local, OnFailure, Seldom, Taken, allowed, refused};
use crate::key::Key;
use crate::script::{Script, Scripted};
use crate::transaction::{Seen, Step, Write, unexpected};
use crate::value;

/// How an answer comes from Redis.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A store for the keys of a policy, or of [tiers](tollgate::Tiers), in Redis.
///
/// It is cheap to clone, and all clones are one.
#[derive(Clone)]
pub struct RedisStore {
    shared: Arc<Shared>,
}

struct Shared {
    redis: Redis,
    name: Arc<str>,
    on_failure: ArcSwap<OnFailure>,
    local: Local,
    /// How many of the caller's ticks are one in Redis.
    scale: u64,
    /// What was found out about the policies that are in use.
    prepared: ArcSwap<Vec<(Arc<Policy>, Arc<Prepared>)>>,
    said: Seldom,
    is_returning: AtomicBool,
}

/// A policy as Redis takes it.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// In microseconds.
    pub(crate) policy: Arc<Policy>,
    /// How a value begins that was left under it.
    pub(crate) head: Vec<u8>,
    /// Its scripts; `None` if its numbers are not exact in doubles.
    pub(crate) scripted: Option<Scripted>,
}

/// How many policies are remembered: tiers, overrides and what changed lately.
const MAX_PREPARED: usize = 64;

impl RedisStore {
    pub(crate) fn new(redis: Redis, name: Arc<str>, on_failure: OnFailure) -> Self {
        Self::made(redis, name, on_failure, 1000)
    }

    fn made(redis: Redis, name: Arc<str>, on_failure: OnFailure, scale: u64) -> Self {
        let shared = Shared {
            redis,
            name,
            on_failure: ArcSwap::from_pointee(on_failure),
            local: Local::new(on_failure),
            scale,
            prepared: ArcSwap::default(),
            said: Seldom::new(),
            is_returning: AtomicBool::new(false),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The same store with another failure policy.
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        let Shared { redis, name, scale, .. } = &*self.shared;
        Self::made(redis.clone(), name.clone(), on_failure, *scale)
    }

    /// Gives this store, and all its clones, another failure policy. What was used in this process stays used.
    pub fn set_on_failure(&self, on_failure: OnFailure) {
        self.shared.local.share_as(on_failure);
        self.shared.on_failure.store(Arc::new(on_failure));
    }

    /// The same store for those who give the time with every call, in ticks of their own: tests, replays.
    /// Without, a tick is a nanosecond, and what is given is cut off to microseconds.
    #[must_use]
    pub fn in_ticks(self) -> Self {
        let Shared { redis, name, on_failure, .. } = &*self.shared;
        Self::made(redis.clone(), name.clone(), **on_failure.load(), 1)
    }

    /// The Redis it is in.
    #[must_use]
    pub fn redis(&self) -> &Redis {
        &self.shared.redis
    }

    /// The name of its policy.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Removes whatever is kept of some clients, as if they had never come.
    ///
    /// # Errors
    /// A key is too long, or Redis could not be asked; some may be gone then.
    pub async fn forget(&self, clients: impl IntoIterator<Item: AsRef<[u8]>>) -> Result<(), Error> {
        let keys = clients.into_iter().map(|client| self.key(client.as_ref()));
        let keys = keys.collect::<Result<Vec<_>, _>>()?;
        self.shared.redis.remove(&keys).await
    }

    pub(crate) fn key(&self, client: &[u8]) -> Result<Key, Error> {
        self.shared.redis.key(&self.shared.name, client)
    }

    pub(crate) fn scale(&self) -> u64 {
        self.shared.scale
    }

    /// A policy in Redis's ticks, and all that is needed to decide by it.
    pub(crate) fn prepare(&self, policy: &Policy) -> Result<Arc<Prepared>, NotWhole> {
        let known = self.shared.prepared.load();
        if let Some((_, prepared)) = known.iter().find(|(known, _)| **known == *policy) {
            return Ok(prepared.clone());
        }
        let in_redis = Arc::new(policy.with_ticks_of(self.shared.scale)?);
        let prepared = Arc::new(Prepared {
            head: value::head(&in_redis),
            scripted: Scripted::new(&in_redis),
            policy: in_redis,
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

    /// A time in Redis's ticks.
    pub(crate) fn in_redis(&self, time: Tick) -> Tick {
        Tick(time.0.div_euclid(i64::try_from(self.shared.scale).unwrap_or(1)))
    }

    /// A time in the caller's ticks.
    fn outside(&self, time: Tick) -> Tick {
        Tick(time.0.saturating_mul(i64::try_from(self.shared.scale).unwrap_or(1)))
    }

    /// A decision in the caller's ticks.
    pub(crate) fn told(&self, Timed { decision, at }: Timed) -> Timed {
        let span = |span: Ticks| Ticks(span.0.saturating_mul(self.shared.scale));
        let decision = Decision {
            retry_after: decision.retry_after.map(span),
            reset_after: span(decision.reset_after),
            delay: span(decision.delay),
            ..decision
        };
        Timed { decision, at: self.outside(at) }
    }

    /// Decides on a key, in the caller's ticks; the error is that of the server or of the caller.
    pub(crate) async fn ask<J: Judge>(
        &self,
        judge: &J,
        key: &Key,
        op: Op,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<Timed, Error> {
        let op = match op {
            Op::GiveBack { amount, charged } => {
                Op::GiveBack { amount, charged: self.in_redis(charged) }
            }
            other => other,
        };
        let given = now.map(|now| self.in_redis(now).0);
        let timed = decide(&self.shared.redis, judge, key, op, given, deadline).await?;
        Ok(self.told(timed))
    }

    /// Decides on a key, by the failure policy if Redis cannot.
    async fn decide<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        key: &Key,
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let judge = rule.judge(self, now)?;
        let deadline = self.shared.redis.deadline();
        let result = match self.give_in(rule, client, deadline).await {
            Ok(()) => self.ask(&judge, key, op, now, deadline).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(timed) => {
                self.return_others(rule);
                Ok(timed)
            }
            Err(error) => self.fall_back(error, rule, client, op, now),
        }
    }

    pub(crate) fn fall_back(
        &self,
        error: Error,
        rule: &impl Shareable,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        if matches!(error, Error::KeyTooLong { .. } | Error::NotInMicroseconds(_)) {
            return Err(error);
        }
        let plan = &rule.plan();
        let Shared { redis, name, on_failure, said, .. } = &*self.shared;
        let counters = &redis.inner().counters;
        counters.errors.fetch_add(1, Ordering::Relaxed);
        counters.last_error.store(Some(Arc::new(error.clone())));
        if said.may() {
            tracing::warn!(policy = &**name, %error, "redis could not decide");
        }
        let asks = matches!(op, Op::Check(_) | Op::Peek(_));
        let at = now.unwrap_or_else(|| self.outside(Tick(redis.now())));
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let decision = match **on_failure.load() {
            OnFailure::Allow if asks => {
                count(&counters.allowed);
                allowed(plan, at)
            }
            OnFailure::Deny if asks => {
                count(&counters.denied);
                refused(plan, at)
            }
            OnFailure::Local { .. } if op != Op::Reset => {
                count(&counters.local);
                self.shared.local.decide(plan, client, op, now)
            }
            // There is nothing to decide, and nothing was done.
            _ => return Err(error),
        };
        Ok(Timed { decision, at })
    }

    /// Takes back what was just charged to a client in this process.
    pub(crate) fn uncharge(&self, rule: &impl Shareable, client: &[u8], cost: Cost) -> Decision {
        self.shared.local.decide(&rule.plan(), client, Op::Force(-i128::from(cost)), None)
    }

    /// Charges in Redis what a client used here while Redis was away, before it is asked again.
    pub(crate) async fn give_in(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        deadline: Instant,
    ) -> Result<(), Error> {
        if self.shared.local.is_unused() {
            return Ok(());
        }
        if !self.shared.local.owes(client) {
            return Ok(());
        }
        let (judge, key, plan) = (rule.judge(self, None)?, self.key(client)?, rule.plan());
        // A look first: what is sent to a server that does not answer is lost, or is charged later.
        let _ = self.ask(&judge, &key, Op::Peek(0), None, deadline).await?;
        let charge = match self.shared.local.take(&plan, client) {
            Taken::Nothing => return Ok(()),
            Taken::ByAnother => {
                let reason = "what was used in this process is just being charged".into();
                return Err(Error::Unavailable { reason, sent: false });
            }
            Taken::Charge(charge) => charge,
        };
        let charged = self.ask(&judge, &key, Op::Force(charge.used.into()), None, deadline);
        match charged.await {
            Ok(_) => {
                self.shared.redis.inner().counters.returned.fetch_add(1, Ordering::Relaxed);
                Ok(())
            }
            // It may have been charged: it is not charged again.
            Err(error @ Error::Unavailable { sent: true, .. }) => Err(error),
            Err(error) => {
                charge.failed();
                Err(error)
            }
        }
    }

    /// Redis is back: charges what the other clients used here, so that nobody else gives it out again.
    fn return_others(&self, rule: &impl Shareable) {
        if self.shared.local.is_unused() || self.shared.is_returning.swap(true, Ordering::AcqRel) {
            return;
        }
        let (store, plan) = (self.clone(), rule.plan());
        tokio::spawn(async move {
            loop {
                let some = store.shared.local.clients_left(256);
                if some.is_empty() {
                    break;
                }
                let deadline = store.shared.redis.deadline();
                let each = some.iter().map(|client| store.give_in(&plan, client, deadline));
                if join_all(each).await.iter().any(Result::is_err) {
                    break;
                }
            }
            store.shared.is_returning.store(false, Ordering::Release);
        });
    }
}

/// A rule that processes can share. Not exported: how it is kept is this crate's own affair.
pub trait Shareable: Algorithm + Sync {
    /// How it is decided by.
    #[expect(private_bounds, reason = "nobody else decides by it")]
    type Judge: Judge;

    /// The rule in Redis's ticks, for a decision at a time.
    ///
    /// # Errors
    /// It is not in microseconds.
    fn judge(&self, store: &RedisStore, now: Option<Tick>) -> Result<Self::Judge, Error>;

    /// The same as a plan.
    fn plan(&self) -> Plan;
}

impl Shareable for Policy {
    type Judge = ByPolicy;

    fn judge(&self, store: &RedisStore, _: Option<Tick>) -> Result<ByPolicy, Error> {
        Ok(ByPolicy(store.prepare(self)?))
    }

    fn plan(&self) -> Plan {
        Plan::of(self.clone())
    }
}

impl Shareable for Plan {
    type Judge = ByPlan;

    /// If the server's time rules, an override that ends just now may still be taken as in force, or not any more.
    fn judge(&self, store: &RedisStore, now: Option<Tick>) -> Result<ByPlan, Error> {
        let in_redis = |policy: &Arc<Policy>| store.prepare(policy).map(|p| p.policy.clone());
        let plan = self.with(in_redis, |time| store.in_redis(time))?;
        let now = now.unwrap_or_else(|| store.outside(Tick(store.shared.redis.now())));
        let script = match self.access(now) {
            Access::Limited(policy) => Some(store.prepare(policy)?),
            Access::Unlimited | Access::Blocked => None,
        };
        Ok(ByPlan { plan, script })
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

    /// The state that the script of that policy left.
    fn state_under(&self, standings: Box<[Standing]>) -> <Self::Rule as Algorithm>::State;

    /// The state in a value.
    fn read(&self, value: &[u8], now: Tick) -> Result<<Self::Rule as Algorithm>::State, Error>;

    /// A value for a state.
    fn write(&self, state: &<Self::Rule as Algorithm>::State) -> Vec<u8>;
}

/// One policy for everybody.
#[derive(Debug)]
pub struct ByPolicy(pub(crate) Arc<Prepared>);

impl Judge for ByPolicy {
    type Rule = Policy;

    fn rule(&self) -> &Policy {
        &self.0.policy
    }

    fn script(&self) -> Option<&Prepared> {
        Some(&self.0)
    }

    fn state_under(&self, standings: Box<[Standing]>) -> Box<[Standing]> {
        standings
    }

    /// What was left under another policy is carried over: what was used stays used.
    fn read(&self, value: &[u8], now: Tick) -> Result<Box<[Standing]>, Error> {
        let policy = &self.0.policy;
        let mut under = value::read(value)?;
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
#[derive(Debug)]
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
        Kept::of(self.script.iter().map(|script| (script.policy.clone(), standings.clone())))
    }

    /// Policies that are the plan's own are known by their limits: in the value they have no names.
    fn read(&self, value: &[u8], _: Tick) -> Result<Kept, Error> {
        let under = value::read(value)?.into_iter().map(|(policy, standings)| {
            let own = self.plan.policies().find(|own| own.limits() == policy.limits());
            (own.unwrap_or(&policy).clone(), standings)
        });
        Ok(Kept::of(under))
    }

    fn write(&self, kept: &Kept) -> Vec<u8> {
        value::write_all(kept.policies())
    }
}

/// Decides on a key in Redis's ticks: by a script if there is one for it.
pub(crate) async fn decide<J: Judge>(
    redis: &Redis,
    judge: &J,
    key: &Key,
    op: Op,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    let mut seen = None;
    if let Some(Call { prepared, script, numbers, charged }) = call_of(judge, op, given) {
        let time = given.map(|given| given.to_string());
        let charged = charged.map(|charged| charged.to_string());
        let mut arguments = vec![&prepared.head[..], &numbers];
        match (&time, &charged) {
            (None, None) => {}
            (time, charged) => {
                arguments.push(time.as_ref().map_or(&[], |time| time.as_bytes()));
                arguments.extend(charged.as_ref().map(String::as_bytes));
            }
        }
        let reply = redis.run(script, &[key], &arguments, deadline).await?;
        match read_reply(reply)? {
            Scripts::Decided { is_allowed, now, shadow, numbers } => {
                if given.is_none() {
                    redis.heard(now);
                }
                let state = judge.state_under(prepared.policy.state_of_numbers(&numbers)?);
                let outcome = match op {
                    Op::Check(cost) if is_allowed => Outcome::Admitted(cost),
                    Op::Check(cost) => Outcome::Refused(cost),
                    _ => Outcome::Spared(0),
                };
                return Ok(Timed::of(judge.rule(), &state, Tick(now), outcome, shadow));
            }
            Scripts::Left(value) => seen = Some(value),
        }
    }
    redis.transact(&[key], given, seen, deadline, |seen| step(judge, op, seen)).await
}

/// A call of a script.
struct Call<'a> {
    prepared: &'a Prepared,
    script: &'a Script,
    numbers: Vec<u8>,
    charged: Option<i64>,
}

/// The call for an operation, if it is one that a script does.
fn call_of<J: Judge>(judge: &J, op: Op, given: Option<i64>) -> Option<Call<'_>> {
    // More than the greatest number is more than there ever is.
    const MOST: i64 = 1 << 52;
    let prepared = judge.script()?;
    let scripted = prepared.scripted.as_ref()?;
    if !given.is_none_or(Numbers::takes) {
        return None;
    }
    let (script, amount, charged) = match op {
        Op::Check(cost @ 1..) => {
            (&scripted.check, i64::try_from(cost).ok().filter(|cost| Numbers::takes(*cost))?, None)
        }
        Op::Force(amount) if amount != 0 => {
            let amount = i64::try_from(amount.clamp(-i128::from(MOST), MOST.into())).ok()?;
            (scripted.force.as_ref()?, amount, None)
        }
        Op::GiveBack { amount: amount @ 1.., charged } if Numbers::takes(charged.0) => {
            let amount = i64::try_from(amount).map_or(MOST, |amount| amount.min(MOST));
            (scripted.force.as_ref()?, -amount, Some(charged.0))
        }
        _ => return None,
    };
    Some(Call { prepared, script, numbers: scripted.numbers(amount), charged })
}

/// What a script replied.
enum Scripts {
    Decided {
        is_allowed: bool,
        now: i64,
        shadow: Option<usize>,
        numbers: Vec<i128>,
    },
    /// It could not decide on what it found.
    Left(Seen),
}

fn read_reply(reply: Value) -> Result<Scripts, Error> {
    match reply {
        Value::BulkString(bytes) => {
            let numbers = value::numbers(&bytes)?;
            let [is_allowed, now, shadow, numbers @ ..] = &numbers[..] else {
                return Err(unexpected());
            };
            Ok(Scripts::Decided {
                is_allowed: *is_allowed == 1,
                now: i64::try_from(*now).map_err(|_| unexpected())?,
                shadow: usize::try_from(*shadow).ok(),
                numbers: numbers.into(),
            })
        }
        Value::Array(mut left) => match (left.pop(), left.pop()) {
            (Some(Value::BulkString(value)), Some(Value::Int(now))) => {
                Ok(Scripts::Left(Seen { now, values: vec![value] }))
            }
            _ => Err(unexpected()),
        },
        _ => Err(unexpected()),
    }
}

/// Decides here on what was read.
pub(crate) fn step<J: Judge>(judge: &J, op: Op, seen: &Seen) -> Result<Step<Timed>, Error> {
    let scale = i64::try_from(judge.scale()).unwrap_or(i64::MAX);
    let (rule, now) = (judge.rule(), Tick(seen.now.saturating_mul(scale)));
    let before = &seen.values[0];
    let mut state = if before.is_empty() { rule.first(now) } else { judge.read(before, now)? };
    let is_check = matches!(op, Op::Check(_));
    let as_new = (before.is_empty() && is_check).then(|| judge.write(&state));
    let mut part = Part { rule, state: &mut state, op };
    let agrees = part.admits(now);
    let (answer, _) = part.step::<Timed>(now, agrees);
    let looks =
        matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0) | Op::GiveBack { amount: 0, .. });
    // A refusal leaves nothing of a client that nobody knows.
    let unchanged = as_new.as_ref().filter(|_| !answer.decision.allowed).unwrap_or(before);
    Ok((if looks { None } else { changed(judge, &state, unchanged) }, answer))
}

/// What is to be written, if anything is.
pub(crate) fn changed<J: Judge>(
    judge: &J,
    state: &<J::Rule as Algorithm>::State,
    before: &[u8],
) -> Option<Vec<Write>> {
    let value = judge.write(state);
    let scale = i64::try_from(judge.scale()).unwrap_or(i64::MAX);
    let fresh_at = judge.rule().fresh_at(state);
    // Rounded up: a key may go a little late, never early.
    let fresh_at =
        fresh_at.map(|fresh| fresh.0.div_euclid(scale).saturating_add((scale > 1).into()));
    (value != before).then(|| vec![Write { value, fresh_at }])
}

impl<A: Shareable> Store<A> for RedisStore {
    type Reply<'a, T: 'a> = Reply<'a, T>;

    fn apply<'a, T: Answer>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Reply<'a, T> {
        let (client, key): (Box<[u8]>, _) = (key.into(), self.key(key));
        Box::pin(async move {
            let Timed { decision, at } = self.decide(&*rule, &client, &key?, op, now).await?;
            Ok(T::of_decision(decision, at))
        })
    }

    /// All keys are asked for before the first is answered: one round trip to each server. A key that comes
    /// several times is asked for one time after the other, or its answers would be in any order.
    fn check_many<'a, T: Answer, K: AsRef<[u8]>>(
        &'a self,
        rule: impl Lent<A> + 'a,
        keys: &[K],
        cost: Cost,
        now: Option<Tick>,
    ) -> Reply<'a, Vec<T>> {
        let each = keys.iter().map(|key| {
            let key = key.as_ref();
            Ok::<_, Error>((Box::<[u8]>::from(key), self.key(key)?))
        });
        let keys = each.collect::<Result<Vec<_>, _>>();
        Box::pin(async move {
            let (keys, rule) = (&keys?, &*rule);
            let op = Op::Check(cost);
            let each = keys.iter().map(|(client, key)| {
                let decided = self.decide(rule, client, key, op, now);
                (&**client, decided)
            });
            let decided = in_order(each.collect()).await?.into_iter();
            Ok(decided.map(|timed| T::of_decision(timed.decision, timed.at)).collect())
        })
    }

    fn now(&self) -> Tick {
        self.outside(Tick(self.shared.redis.now()))
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

/// Waits for many answers at once, but for those of one key one after the other: else they would be in any order.
async fn in_order<T>(
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
