//! The keys of a policy in Redis.
//!
//! A check is one call of the policy's script. What the script leaves is told in numbers, and the core reads
//! the answer from them: so whatever is told is what the core would tell. Where a script does not decide, the
//! value comes back instead, and is decided on here, by compare-and-set.

mod checks;
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
use tallygate::{
    Answer, Ask, Charged, Cost, Decision, InvalidAsk, Lent, MAX_KEY_BYTES, NotWhole, Op, Policy,
    Receipt, SettleError, Store, Tick, Ticks, Timed,
};

pub(crate) use self::operation::{Lowering, changed, decide, lower, lowers, reserve_in, step};
pub(crate) use self::reply::DecidedPart;
pub(crate) use self::rule::{ByPolicy, Judge, Shareable};
use crate::client::Redis;
use crate::desk::Terms;
use crate::error::Error;
use crate::failure::{Local, OnFailure, Seldom};
use crate::key::Key;
use crate::lease::Leases;
use crate::near::{self, Habits, Near};
use crate::script::Scripted;
use crate::transaction::Seen;
use crate::value;

/// How an answer comes from Redis.
pub type Reply<'a, T> = Pin<Box<dyn Future<Output = Result<T, Error>> + Send + 'a>>;

/// A store for the keys of a policy, or of [tiers](tallygate::Tiers), in Redis.
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
    habits: ArcSwap<Habits>,
    near: Near,
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
    /// What is done without asking.
    pub(crate) terms: Terms,
    pub(crate) earlier: Earlier,
}

/// What a check does with a state that was left under another policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Earlier {
    /// It is taken over, and only the new state is kept.
    Replaced,
    /// Both are listed.
    Listed,
    /// The script leaves the key to the client.
    Left,
}

impl Earlier {
    /// The argument of a script.
    const fn argument(self) -> &'static [u8] {
        match self {
            Self::Replaced => b"r",
            Self::Listed => b"",
            Self::Left => b"l",
        }
    }
}

/// How many policies are remembered: tiers, overrides and what changed lately.
const MAX_PREPARED: usize = 64;

impl RedisStore {
    pub(crate) fn new(redis: Redis, name: Arc<str>, on_failure: OnFailure) -> Self {
        Self::made(redis, name, on_failure, 1000, Habits::default())
    }

    fn made(
        redis: Redis,
        name: Arc<str>,
        on_failure: OnFailure,
        scale: u64,
        habits: Habits,
    ) -> Self {
        let shared = Shared {
            redis,
            name,
            on_failure: ArcSwap::from_pointee(on_failure),
            local: Local::new(on_failure),
            scale,
            prepared: ArcSwap::default(),
            said: Seldom::new(),
            is_returning: AtomicBool::new(false),
            habits: ArcSwap::from_pointee(habits),
            near: Near::new(),
        };
        Self { shared: Arc::new(shared) }
    }

    /// The same store with another failure policy.
    #[must_use]
    pub fn on_failure(self, on_failure: OnFailure) -> Self {
        let Shared { redis, name, scale, habits, .. } = &*self.shared;
        Self::made(redis.clone(), name.clone(), on_failure, *scale, **habits.load())
    }

    /// The same store with leases: of a key that is asked for often, this process takes a slice of the quota in one
    /// call, and serves from it without asking.
    ///
    /// For policies of one bucket or one fixed window, without options; others are asked for plainly. What is
    /// admitted in any time is at most what the policy admits in that time and a lease's life; a window admits
    /// no more than ever. Before the process ends, [give them back](Self::give_back_leases).
    #[must_use]
    pub fn leases(self, leases: Leases) -> Self {
        self.set_leases(Some(leases));
        self
    }

    /// Takes leases from now on, or none any more, for this store and all its clones.
    pub fn set_leases(&self, leases: Option<Leases>) {
        self.set_habits(|habits| Habits { leases, ..habits });
    }

    /// Whether a refusal is remembered, which it is if nothing is said: until the time it told, for at most a second,
    /// what was refused is refused without asking. A refund, a reset or a change elsewhere shows within that second;
    /// one through this store shows at once. Decisions at a given time, and policies with a penalty, are always asked
    /// for.
    #[must_use]
    pub fn deny_cache(self, is_on: bool) -> Self {
        self.set_deny_cache(is_on);
        self
    }

    /// Remembers refusals from now on, or does not, for this store and all its clones.
    pub fn set_deny_cache(&self, is_on: bool) {
        self.set_habits(|habits| Habits { caches_refusals: is_on, ..habits });
    }

    fn set_habits(&self, change: impl Fn(Habits) -> Habits) {
        let before = **self.shared.habits.load();
        if change(before) != before {
            self.shared.habits.rcu(|habits| Arc::new(change(**habits)));
            // Whoever was prepared for other habits is prepared anew.
            self.shared.prepared.store(Arc::default());
        }
    }

    /// Gives back what this process holds on lease, so that others can use it: before the process ends.
    pub async fn give_back_leases(&self) {
        let counters = &self.shared.redis.inner().counters;
        let (back, _) = self.shared.near.sweep(true, counters);
        near::give_back_all(self, back).await;
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
        let Shared { redis, name, on_failure, habits, .. } = &*self.shared;
        Self::made(redis.clone(), name.clone(), **on_failure.load(), 1, **habits.load())
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
        let mut keys = Vec::new();
        for client in clients {
            let client = client.as_ref();
            keys.push(self.key(client)?);
            if self.shared.habits.load().leases.is_some() {
                keys.push(self.shared.redis.key_of_leases(&self.shared.name, client)?);
            }
            self.shared.near.changed(client, true);
        }
        self.shared.redis.remove(&keys).await
    }

    pub(crate) fn key(&self, client: &[u8]) -> Result<Key, Error> {
        self.shared.redis.key(&self.shared.name, client)
    }

    pub(crate) fn scale(&self) -> u64 {
        self.shared.scale
    }

    /// A policy in Redis's ticks, and all that is needed to decide by it.
    pub(crate) fn prepare(
        &self,
        policy: &Policy,
        earlier: Earlier,
    ) -> Result<Arc<Prepared>, NotWhole> {
        let known = self.shared.prepared.load();
        let is_asked = |(known, prepared): &&(Arc<Policy>, Arc<Prepared>)| {
            **known == *policy && prepared.earlier == earlier
        };
        if let Some((_, prepared)) = known.iter().find(is_asked) {
            return Ok(prepared.clone());
        }
        let in_redis = Arc::new(policy.with_ticks_of(self.shared.scale)?);
        let habits = **self.shared.habits.load();
        let scripted = Scripted::new(&in_redis);
        let is_leased = scripted.as_ref().is_some_and(|scripted| scripted.lease.is_some());
        let leases = habits.leases.filter(|_| is_leased);
        if let Some(asked) = leases {
            let shortened = asked.shortened_for(&in_redis);
            if shortened != Some(asked) {
                tracing::warn!(
                    policy = &*self.shared.name,
                    lease = ?asked.lives_for(),
                    used = ?shortened.map(Leases::lives_for),
                    "the lease is longer than a tenth of a fixed window, which would starve other servers; shortened"
                );
            }
        }
        let prepared = Arc::new(Prepared {
            head: value::head(&in_redis),
            scripted,
            terms: Terms::new(in_redis.clone(), habits.caches_refusals, leases)
                .within(self.shared.redis.budget()),
            policy: in_redis,
            earlier,
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

    /// About what time the server has, in the caller's ticks.
    fn server_time(&self) -> Tick {
        self.outside(Tick(self.shared.redis.now()))
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
    pub(crate) async fn ask<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        key: &Key,
        op: Op,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<Timed, Error> {
        let given = now.map(|now| self.in_redis(now).0);
        let timed = decide(&self.shared.redis, judge, key, op, given, deadline).await?;
        Ok(self.told(timed))
    }

    /// Decides on a key that no script decides on, together with all others in this process who do.
    async fn ask_without_script<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        client: &[u8],
        key: &Key,
        op: Op,
        deadline: Instant,
    ) -> Result<Timed, Error> {
        let judge = judge.clone();
        let decide = move |seen: &Seen| step(&judge, op, seen);
        let (timed, several) = self.shared.redis.commit(key, None, deadline, decide).await?;
        if several {
            self.shared.near.leave_alone(client);
        }
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
        by: (Way, Instant),
    ) -> Result<Timed, Error> {
        match op {
            Op::Check(_) | Op::Peek(_) => {}
            Op::Force(_) => self.shared.near.changed(client, false),
            Op::Reset => self.shared.near.changed(client, true),
        }
        let judge = rule.judge(self, now)?;
        let (way, deadline) = by;
        let given_in = self.give_in(rule, client, now, deadline).await;
        let share = match (&given_in, op) {
            (Ok(()), Op::Check(cost)) => match self.charge_share(rule, client, cost, now) {
                Ok(share) => share,
                Err(denial) => return Ok(denial),
            },
            _ => None,
        };
        let result = match given_in {
            Ok(()) if way == Way::WithoutScript => {
                self.ask_without_script(&judge, client, key, op, deadline).await
            }
            Ok(()) => self.ask(&judge, key, op, now, deadline).await,
            Err(error) => Err(error),
        };
        match result {
            Ok(timed) => {
                if let Some(share) = share.filter(|_| timed.decision.allowed) {
                    share.keep();
                }
                self.return_others();
                Ok(timed)
            }
            Err(error) => {
                drop(share);
                self.fall_back(error, rule, client, op, now)
            }
        }
    }

    /// What tells this store from those of other policies and other prefixes.
    pub(crate) fn identity(&self) -> Result<u64, Error> {
        Ok(xxhash_rust::xxh3::xxh3_64(&self.key(b"")?.name))
    }

    /// Checks an estimate in Redis; by the failure policy, and without a receipt, if Redis cannot.
    async fn reserve_estimate<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        estimate: Cost,
        now: Option<Tick>,
    ) -> Result<Charged, Error> {
        let (key, store) = (self.key(client)?, self.identity()?);
        let judge = rule.judge(self, now)?;
        let deadline = self.shared.redis.deadline();
        let mut share = None;
        let result = match self.give_in(rule, client, now, deadline).await {
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
                let given = now.map(|now| self.in_redis(now).0);
                reserve_in(&self.shared.redis, &judge, &key, estimate, given, deadline).await
            }
            Err(error) => Err(error),
        };
        match result {
            Ok((timed, receipt)) => {
                if let Some(share) = share.filter(|_| timed.decision.allowed) {
                    share.keep();
                }
                self.return_others();
                // A return at the very time of the charge counts as one after it.
                let number = timed.at.0.saturating_sub(1);
                Ok(Charged { timed: self.told(timed), receipt, number, store })
            }
            Err(error) => {
                drop(share);
                let timed = self.fall_back(error, rule, client, Op::Check(estimate), now)?;
                Ok(Charged { timed, receipt: Receipt::Nothing, number: i64::MAX, store })
            }
        }
    }

    /// Settles in Redis.
    async fn settle_charge<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        change: i128,
        (receipt, number): (&Receipt, i64),
        now: Option<Tick>,
    ) -> Result<Decision, Error> {
        self.shared.near.changed(client, false);
        let (key, judge) = (self.key(client)?, rule.judge(self, now)?);
        let deadline = self.shared.redis.deadline();
        let result = match self.give_in(rule, client, now, deadline).await {
            Ok(()) => {
                let what = Lowering::Settle { change, receipt, number };
                let given = now.map(|now| self.in_redis(now).0);
                lower(&self.shared.redis, &judge, &key, &what, given, deadline).await
            }
            Err(error) => Err(error),
        };
        match result {
            Ok(timed) => {
                self.return_others();
                Ok(self.told(timed).decision)
            }
            Err(error @ Error::Settle(_)) => Err(error),
            // Without Redis, nothing of its own can be returned. It may be settled later.
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

/// How a key is decided on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// By a script, if there is one.
    AnyScript,
    /// In this process, since no script decides on what the key holds.
    WithoutScript,
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
        self.apply_with(rule, key, op, now, |_, Timed { decision, at }| {
            T::of_decision(decision, at)
        })
    }

    fn apply_with<'a, T: Send + 'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        op: Op,
        now: Option<Tick>,
        make: impl FnOnce(&A, Timed) -> T + Send + 'a,
    ) -> Reply<'a, T> {
        let asked = self.asked_near(&*rule, key, op, now);
        if let Some((prepared, cost)) = &asked
            && let Some(told) = self.shared.near.answer_at_once(prepared, key, *cost)
        {
            return Box::pin(ready(Ok(make(&*rule, self.told(told)))));
        }
        let client: Box<[u8]> = key.into();
        Box::pin(async move {
            let timed = self.decide_asked(&*rule, &client, op, now, asked).await?;
            Ok(make(&*rule, timed))
        })
    }

    /// All keys are asked for before the first is answered: one round trip to each server. A key that comes
    /// several times is asked for one time after the other, or its answers would be in any order.
    fn check_many<'a, T: Answer, K>(
        &'a self,
        rule: impl Lent<A> + 'a,
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
            Ok(decided.map(|timed| T::of_decision(timed.decision, timed.at)).collect())
        })
    }

    /// Goes past leases and remembered denials: one call of the policy's script.
    fn reserve<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
        key: &[u8],
        estimate: Cost,
        _: Ticks,
        now: Option<Tick>,
    ) -> Reply<'a, Charged> {
        let client: Box<[u8]> = key.into();
        Box::pin(async move { self.reserve_estimate(&*rule, &client, estimate, now).await })
    }

    /// Fails with [`Error::Settle`] if the client was reset meanwhile.
    fn settle<'a>(
        &'a self,
        rule: impl Lent<A> + 'a,
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
        self.outside(Tick(self.shared.redis.now()))
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

/// Waits for many answers at once, but for those of one key one after the other: else they would be in any order.
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
