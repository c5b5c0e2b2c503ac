//! The keys of a policy in Redis.
//!
//! A check is one call of the policy's script. What the script leaves is told in numbers, and the core reads
//! the answer from them: so whatever is told is what the core would tell. Where a script does not decide, the
//! value comes back instead, and is decided on here, by compare-and-set.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use futures_util::future::{join_all, ready};
use redis::Value;
use tallygate::{
    Access, Algorithm, Answer, Bounds, Charged, Cost, Decision, Kept, Lent, MAX_KEY_BYTES,
    NotWhole, Op, Outcome, Part, Plan, Policy, Receipt, Script as Numbers, SettleError, Standing,
    Store, Tick, Ticks, Timed,
};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use crate::client::Redis;
use crate::desk::{Call, Came, Checked, GivenBack, Number, Terms, What};
use crate::error::Error;
use crate::failure::{
    Charge, Local, NextDue, OnFailure, SHARED_FOR, Seldom, ShareCharge, Taken, allowed, overloaded,
    pay_again_after, pay_each, refused,
};
use crate::key::Key;
use crate::lease::Leases;
use crate::lease::calls::Keys;
use crate::near::{self, Back, Habits, Near, Said, Told};
use crate::node::{STALL, last_chance};
use crate::script::{CHARGE_BUCKET, Script, Scripted, double};
use crate::transaction::{Seen, Step, Write, unexpected};
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

    /// Charges a cost to this process's share as well, while other processes may not know that Redis is back: see
    /// [`Local::charge_share`]. Returns a denial if the share does not allow it.
    pub(crate) fn charge_share<'a>(
        &'a self,
        rule: &impl Shareable,
        client: &'a [u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Option<ShareCharge<'a>>, Timed> {
        if cost == 0 || now.is_some() || !self.is_just_back(client) {
            return Ok(None);
        }
        let at = self.server_time();
        let charged = self.shared.local.charge_share(rule.plan(), client, cost, at);
        charged.map_err(|decision| Timed { decision, at })
    }

    /// Returns whether the server of a client did not answer a moment ago, and processes have shares of the quota.
    fn is_just_back(&self, client: &[u8]) -> bool {
        let Shared { redis, on_failure, .. } = &*self.shared;
        if redis.inner().counters.breaker_opened.load(Ordering::Relaxed) == 0
            || !matches!(**on_failure.load(), OnFailure::Local { .. })
        {
            return false;
        }
        let slot = match redis.is_cluster() {
            true => self.key(client).map_or(0, |key| key.slot),
            false => 0,
        };
        let since = Instant::now().checked_sub(SHARED_FOR);
        since.is_some_and(|since| redis.was_away_since(slot, since))
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

    /// What is asked at the desk of a key: a check by the store's clock, of a policy that has scripts.
    fn asked_near(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Option<(Arc<Prepared>, Cost)> {
        let (Op::Check(cost @ 1..), None) = (op, now) else { return None };
        let is_exact = i64::try_from(cost).is_ok_and(Numbers::takes);
        if !is_exact || client.len() > MAX_KEY_BYTES || !self.has_desk_now(client) {
            return None;
        }
        let prepared = rule.prepared(self)?;
        prepared.scripted.is_some().then_some((prepared, cost))
    }

    /// Returns whether checks of a client go to the desk of its key now. They do not while units have to be charged in Redis
    /// first, and while other processes may not know that Redis is back.
    fn has_desk_now(&self, client: &[u8]) -> bool {
        let local = &self.shared.local;
        let is_due = || !local.is_unused() && local.is_due(client, self.server_time());
        !is_due() && !self.is_just_back(client)
    }

    /// Decides on a check, at the desk of its key if it has one.
    pub(crate) async fn decide_any<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let asked = self.asked_near(rule, client, op, now);
        self.decide_asked(rule, client, op, now, asked).await
    }

    /// The same for a check of which is known what it asks at the desk of its key.
    async fn decide_asked<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
        asked: Option<(Arc<Prepared>, Cost)>,
    ) -> Result<Timed, Error> {
        let deadline = self.shared.redis.deadline();
        let Some((prepared, cost)) = asked.filter(|_| self.has_desk_now(client)) else {
            let by = (Way::AnyScript, deadline);
            return match self.key(client) {
                // In a box of its own: it would make every future several times as large.
                Ok(key) => Box::pin(self.decide(rule, client, &key, op, now, by)).await,
                Err(error @ Error::Unavailable { .. }) => {
                    self.fall_back(error, rule, client, op, now)
                }
                Err(error) => Err(error),
            };
        };
        let budget = self.shared.redis.budget();
        let told = self.shared.near.ask(&prepared, client, cost, (budget, deadline));
        self.keep_sweeping(&prepared.terms);
        self.decide_near(rule, client, op, &prepared, (told, deadline)).await
    }

    /// Decides on a check that came to a desk, by the failure policy if Redis cannot.
    async fn decide_near<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        prepared: &Arc<Prepared>,
        (told, deadline): (Told, Instant),
    ) -> Result<Timed, Error> {
        let mut way = Way::WithoutScript;
        let said = match told {
            Told::Now(told, call) => {
                if let Some(call) = call {
                    self.spawn_call(prepared, client, call);
                }
                return Ok(self.told(told));
            }
            Told::Alone => Ok(None),
            Told::WithoutDesk => {
                way = Way::AnyScript;
                Ok(None)
            }
            Told::Overloaded => Err(near::overloaded()),
            Told::Later { mut waits, call, flush_at } => {
                match call {
                    // Of a call for several, none may go with the one who made it.
                    Some(call) if call.checks > 1 => self.spawn_call(prepared, client, call),
                    Some(call) => self.make_call(prepared, client, call, deadline).await,
                    None => {}
                }
                match waits.try_recv() {
                    Ok(said) => said,
                    Err(_) => {
                        let until = (flush_at, deadline);
                        Box::pin(self.wait_for(prepared, client, waits, until)).await
                    }
                }
            }
        };
        match said {
            Ok(Some(told)) => {
                self.return_others();
                Ok(self.told(told))
            }
            Ok(None) => {
                let (key, by) = (self.key(client)?, (way, deadline));
                Box::pin(self.decide(rule, client, &key, op, None, by)).await
            }
            Err(error) => self.fall_back(error, rule, client, op, None),
        }
    }

    /// Waits for the answer to a check, and sees to it that it is sent in time.
    async fn wait_for(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        mut waits: oneshot::Receiver<Said>,
        (flush_at, deadline): (Option<Instant>, Instant),
    ) -> Said {
        if let Some(flush_at) = flush_at.filter(|flush_at| *flush_at < deadline) {
            if let Ok(said) = timeout_at(flush_at.into(), &mut waits).await {
                return said.unwrap_or_else(|_| Err(near::given_up()));
            }
            if let Some(call) = self.shared.near.flush(prepared, client) {
                self.spawn_call(prepared, client, call);
            }
        }
        let arrived = deadline.checked_sub(self.shared.redis.budget()).unwrap_or(deadline);
        let redis = &self.shared.redis;
        let mut said = timeout_at(deadline.into(), &mut waits).await.map_err(Some);
        let key = self.key(client)?;
        // A process that sees the deadline late was late to read the reply as well, although the server answers.
        let was_stalled = deadline.elapsed() > STALL;
        if said.is_err() && (was_stalled || !redis.is_busy_since(&key, arrived)) {
            said = last_chance(deadline, redis.budget(), &mut waits).await.ok_or(None);
        }
        match said {
            Ok(Ok(said)) => said,
            Ok(Err(_)) => Err(near::given_up()),
            Err(_) if redis.is_busy_since(&key, arrived) => Err(near::overloaded()),
            Err(_) => Err(Error::Unavailable {
                reason: "no reply within the time budget".into(),
                sent: true,
            }),
        }
    }

    fn spawn_call(&self, prepared: &Arc<Prepared>, client: &[u8], call: Call) {
        let (store, prepared) = (self.clone(), prepared.clone());
        let client: Box<[u8]> = client.into();
        tokio::spawn(async move {
            let deadline = store.shared.near.deadline_of(&call, store.shared.redis.budget());
            store.make_call(&prepared, &client, call, deadline).await;
        });
    }

    /// Makes a call, and answers the checks that wait for it. A task makes the call for the checks that came meanwhile.
    async fn make_call(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        call: Call,
        deadline: Instant,
    ) {
        let number = call.number;
        let pending = PendingCall { store: self, prepared, client, number, is_finished: false };
        let result = self.carry_out(prepared, client, &call, deadline).await;
        pending.finish(result);
    }

    async fn carry_out(
        &self,
        prepared: &Prepared,
        client: &[u8],
        call: &Call,
        deadline: Instant,
    ) -> Result<Came, Error> {
        let redis = &self.shared.redis;
        let key = self.key(client)?;
        match &call.what {
            What::Take(slice) => {
                let leases = redis.key_of_leases(&self.shared.name, client)?;
                let keys = Keys { client: &key, leases: &leases };
                let life = prepared.terms.leases().unwrap_or_default().in_store();
                let taking = redis.take_slice(prepared, keys, *slice, life, None, deadline);
                let taken = Box::pin(taking).await?;
                Ok(taken.map_or(Came::Undecided, Came::Taken))
            }
            What::Check(costs) => {
                let Some(scripted) = &prepared.scripted else { return Ok(Came::Undecided) };
                if let [cost] = costs[..] {
                    let numbers = scripted.numbers(i64::try_from(cost).unwrap_or(i64::MAX));
                    let arguments = [&prepared.head[..], &numbers, prepared.earlier.argument()];
                    let reply = redis.run(&scripted.check, &[&key], &arguments, deadline).await?;
                    let (now, part) = match read_reply(reply)? {
                        Scripts::Decided { now, part } | Scripts::Several { now, part, .. } => {
                            (now, part)
                        }
                        Scripts::Left(_) => return Ok(Came::Undecided),
                    };
                    redis.heard(now);
                    let answers = vec![part.checked(prepared)?];
                    return Ok(Came::Checked { at: Tick(now), answers });
                }
                let requests: Vec<_> = costs.iter().map(|cost| [(0, *cost)]).collect();
                let requests: Vec<&[_]> = requests.iter().map(|request| &request[..]).collect();
                let keys = [(&key, prepared)];
                let decided = redis.run_many(&scripted.many, &keys, &requests, None, deadline);
                let Some((now, parts)) = Box::pin(decided).await? else {
                    return Ok(Came::Undecided);
                };
                let answers = parts.into_iter().map(|part| part.checked(prepared));
                let answers = answers.collect::<Result<Vec<_>, Error>>()?;
                if answers.len() != costs.len() {
                    return Err(unexpected());
                }
                Ok(Came::Checked { at: Tick(now), answers })
            }
        }
    }

    /// Gives back what is left of a slice.
    pub(crate) async fn give_back(&self, back: &Back) {
        let Shared { redis, name, .. } = &*self.shared;
        let keys = self
            .key(&back.client)
            .and_then(|key| redis.key_of_leases(name, &back.client).map(|leases| (key, leases)));
        let Ok((key, leases)) = keys else { return };
        let keys = Keys { client: &key, leases: &leases };
        let GivenBack { amount, taken } = back.slice;
        let life = back.prepared.terms.leases().unwrap_or_default().in_store();
        let (prepared, deadline) = (&back.prepared, redis.deadline());
        let given =
            redis.give_back_slice(prepared, keys, (amount, taken), life, None, deadline).await;
        let counters = &redis.inner().counters;
        // What fails may have been given back; it is not served here any more in any case.
        let counter = if given.is_ok() { &counters.given_back } else { &counters.lapsed };
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Sweeps the desks while there are leases.
    fn keep_sweeping(&self, terms: &Terms) {
        let Some(leases) = terms.leases() else { return };
        if self.shared.near.is_swept.load(Ordering::Relaxed)
            || self.shared.near.is_swept.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (shared, every) = (Arc::downgrade(&self.shared), leases.life / 4);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = shared.upgrade() else { return };
                let (back, has_desks) = shared.near.sweep(false, &shared.redis.inner().counters);
                if !back.is_empty() {
                    let store = Self { shared: shared.clone() };
                    tokio::spawn(async move { near::give_back_all(&store, back).await });
                }
                if !has_desks {
                    shared.near.is_swept.store(false, Ordering::Release);
                    return;
                }
            }
        });
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
        if matches!(error, Error::Overloaded { .. } | Error::Contended { .. }) {
            // The server answers: no failure policy decides.
            if !matches!(op, Op::Check(_) | Op::Peek(_)) {
                return Err(error);
            }
            counters.overloaded.fetch_add(1, Ordering::Relaxed);
            if matches!(error, Error::Contended { .. }) {
                counters.races_lost.fetch_add(1, Ordering::Relaxed);
            }
            if said.may() {
                tracing::warn!(policy = &**name, %error, "denying checks that are not decided in time");
            }
            let at = now.unwrap_or_else(|| self.outside(Tick(redis.now())));
            return Ok(Timed { decision: overloaded(plan, at, redis.budget()), at });
        }
        counters.errors.fetch_add(1, Ordering::Relaxed);
        counters.last_error.store(Some(Arc::new(error.clone())));
        if said.may() {
            tracing::warn!(policy = &**name, %error, "redis could not decide");
        }
        let asks = matches!(op, Op::Check(_) | Op::Peek(_));
        let at = now.unwrap_or_else(|| self.outside(Tick(redis.now())));
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let decision = match **on_failure.load() {
            // No store is needed to know that a client is blocked.
            OnFailure::Allow if asks && !matches!(plan.access(at), Access::Blocked) => {
                count(&counters.allowed);
                allowed(plan, at)
            }
            OnFailure::Allow | OnFailure::Deny if asks => {
                count(&counters.denied);
                refused(plan, at)
            }
            OnFailure::Local { .. } if op != Op::Reset => {
                count(&counters.local);
                let decision = self.shared.local.decide(plan, client, op, (at, now.is_some()));
                self.return_others();
                decision
            }
            // There is nothing to decide, and nothing was done.
            _ => return Err(error),
        };
        Ok(Timed { decision, at })
    }

    /// Takes back what was just charged to a client in this process.
    pub(crate) fn uncharge(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Decision {
        let at = now.unwrap_or_else(|| self.server_time());
        let op = Op::Force(-i128::from(cost));
        self.shared.local.decide(&rule.plan(), client, op, (at, now.is_some()))
    }

    /// Charges in Redis what a client used here while Redis was away, before it is asked again.
    pub(crate) async fn give_in(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let local = &self.shared.local;
        if local.is_unused() || !local.is_due(client, now.unwrap_or_else(|| self.server_time())) {
            return Ok(());
        }
        let (judge, key, plan) = (rule.judge(self, now)?, self.key(client)?, rule.plan());
        // A look first: what is sent to a server that does not answer is lost, or is charged later.
        let stands = self.ask(&judge, &key, Op::Peek(0), now, deadline).await?;
        let mut charge = match local.take(&plan, client, now.unwrap_or(stands.at)) {
            Taken::Nothing => return Ok(()),
            Taken::ByAnother => {
                let reason = "what was used in this process is just being charged".into();
                return Err(Error::Unavailable { reason, sent: false });
            }
            Taken::Charge(charge) => charge,
        };
        let mut result = Ok(());
        if charge.used > 0 {
            charge.is_used_charged = true;
            result = self.charge_owed(&judge, client, &key, &charge, now, deadline).await;
            charge.is_used_charged = result.is_ok() || may_be_done(&result);
        }
        if result.is_ok() && charge.has_payments() {
            result = match charge.is_per_limit {
                true => self.pay_limits(&judge, &key, &mut charge, now, deadline).await,
                false => self.pay(&judge, &key, &plan, &mut charge, (stands, now), deadline).await,
            };
        }
        match result {
            Ok(()) => {
                if charge.is_any_charged() {
                    self.shared.redis.inner().counters.returned.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => {
                if !may_be_done(&Err(error.clone())) {
                    charge.failed();
                }
                Err(error)
            }
        }
    }

    /// Charges units that a client was allowed here, as far as there is room for them. The rest stays unpaid: a window would
    /// forget what exceeds its limit.
    async fn pay<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        key: &Key,
        plan: &Plan,
        charge: &mut Charge<'_>,
        (stands, now): (Timed, Option<Tick>),
        deadline: Instant,
    ) -> Result<(), Error> {
        let at = now.unwrap_or(stands.at);
        let retry_at = |decision: &Decision| match plan.access(at) {
            Access::Limited(policy) => {
                let limit = policy.limits().first()?;
                at.after(pay_again_after(limit, decision.reset_after))
            }
            Access::Unlimited | Access::Blocked => None,
        };
        charge.retry_at = retry_at(&stands.decision);
        let Some(payment) = charge.payments.first_mut() else { return Ok(()) };
        let amount = payment.pay.min(stands.decision.remaining);
        if amount > 0 {
            let checked = self.ask(judge, key, Op::Check(amount), now, deadline).await?.decision;
            charge.retry_at = retry_at(&checked);
            if checked.allowed {
                payment.paid = amount;
            }
        }
        Ok(())
    }

    /// The same for a policy of several limits: each of them is charged by itself, because one has forgotten units for which
    /// another has no room yet. No script does that; it is rare.
    async fn pay_limits<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        key: &Key,
        charge: &mut Charge<'_>,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let Some(policy) = judge.script().map(|prepared| prepared.policy.clone()) else {
            return Ok(());
        };
        let amounts: Vec<_> =
            charge.payments.iter().map(|payment| (payment.index, payment.pay)).collect();
        let given = now.map(|now| self.in_redis(now).0);
        let decide = |seen: &Seen| {
            let at = Tick(seen.now);
            let before = &seen.values[0];
            let mut state = match before.is_empty() {
                true => judge.rule().first(at),
                false => judge.read(before, at)?,
            };
            let mut paid = Ok(Vec::new());
            judge.change_limits(&mut state, at, &mut |standings| {
                paid = pay_each(&policy, standings, &amounts, at);
            });
            // The limits were built before.
            let paid = paid.map_err(|_| unexpected())?;
            let is_any_paid = paid.iter().any(|(amount, _)| *amount > 0);
            let writes = is_any_paid.then(|| changed(judge, &state, before)).flatten();
            Ok((writes, (paid, at)))
        };
        let (paid, at) = self.shared.redis.transact(&[key], given, None, deadline, decide).await?;
        let mut retry_at = None;
        for (payment, (amount, reset_after)) in charge.payments.iter_mut().zip(paid) {
            payment.paid = amount;
            if payment.paid < payment.pay {
                let wait = pay_again_after(&policy.limits()[payment.index], reset_after);
                let next = self.outside(at.after(wait).unwrap_or(at));
                retry_at = Some(retry_at.map_or(next, |before: Tick| before.min(next)));
            }
        }
        charge.retry_at = retry_at;
        Ok(())
    }

    /// Charges what a client used here while Redis was away, also past the policy's bound on debt: nothing is forgiven.
    /// Several limits keep their bounds, or the shortest would lock the client out for as long as the longest needs.
    async fn charge_owed<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        client: &[u8],
        key: &Key,
        charge: &Charge<'_>,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let redis = &self.shared.redis;
        let scripted = judge.script().and_then(|prepared| {
            let scripted = prepared.scripted.as_ref()?;
            (prepared.policy.limits().len() == 1).then_some((prepared, scripted))
        });
        let amount = i64::try_from(charge.used).ok().filter(|amount| Numbers::takes(*amount));
        if let (Some((prepared, scripted)), Some(amount)) = (scripted, amount) {
            let head = &prepared.head[..];
            if scripted.is_plain_bucket() {
                let outage = redis.key_of_outage(&self.shared.name, client)?;
                let began = self.in_redis(charge.began).0;
                let least = charge.least.min(charge.used);
                let terms = [least.into(), began.into(), i128::from(charge.processes)];
                let terms = terms.map(double).concat();
                let arguments = [head, &scripted.numbers(amount), &terms];
                let reply =
                    redis.run(&CHARGE_BUCKET, &[key, &outage], &arguments, deadline).await?;
                if matches!(reply, Value::BulkString(_)) {
                    return Ok(());
                }
            } else if let Some(force) = &scripted.force {
                let numbers = scripted.numbers_past_debt(amount);
                let reply = redis.run(force, &[key], &[head, &numbers], deadline).await?;
                if matches!(read_reply(reply)?, Scripts::Decided { .. }) {
                    return Ok(());
                }
            }
        }
        self.ask(judge, key, Op::Force(charge.used.into()), now, deadline).await.map(|_| ())
    }

    /// Charges in the background what clients used here, as soon as Redis is back and has room for it. Clients that make no
    /// request are charged, too: other processes would allow the same units again.
    fn return_others(&self) {
        let shared = &self.shared;
        if shared.local.is_unused()
            || shared.is_returning.load(Ordering::Relaxed)
            || tokio::runtime::Handle::try_current().is_err()
            || shared.is_returning.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let returning = Returning(Arc::downgrade(shared));
        tokio::spawn(async move {
            while let Some(shared) = returning.0.upgrade() {
                let store = Self { shared };
                let Some(pause) = store.return_some().await else { return };
                drop(store);
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Charges what some clients used here. Returns how long to wait before the next ones; `None` if there are none.
    async fn return_some(&self) -> Option<Duration> {
        let some = match self.shared.local.next_due(self.server_time(), 256) {
            NextDue::Now(some) => some,
            NextDue::In(wait) => {
                return Some(Duration::from_nanos(wait.0).clamp(RETURN_PAUSE, 10 * RETURN_PAUSE));
            }
            NextDue::Never => return None,
        };
        // No caller waits for it, and it takes several round trips.
        let deadline = Instant::now() + 4 * self.shared.redis.budget();
        // A few first: as long as Redis does not answer, little is sent.
        let (first, rest) = some.split_at(some.len().min(4));
        for clients in [first, rest] {
            let each =
                clients.iter().map(|(client, plan)| self.give_in(plan, client, None, deadline));
            let each = join_all(each).await;
            if !each.is_empty() && each.iter().all(Result::is_err) {
                return Some(RETURN_PAUSE);
            }
        }
        Some(Duration::ZERO)
    }
}

/// How long the background task waits before it asks again whether Redis is back.
const RETURN_PAUSE: Duration = Duration::from_millis(100);

/// The background task that charges what clients used here. When it ends, another one can begin.
struct Returning(Weak<Shared>);

impl Drop for Returning {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.is_returning.store(false, Ordering::Release);
        }
    }
}

/// Returns whether a call without a reply may have been carried out.
const fn may_be_done(result: &Result<(), Error>) -> bool {
    matches!(
        result,
        Err(Error::Unavailable { sent: true, .. } | Error::Overloaded { sent: true, .. })
    )
}

/// A call that was made, until its checks are answered.
struct PendingCall<'a> {
    store: &'a RedisStore,
    prepared: &'a Arc<Prepared>,
    client: &'a [u8],
    number: Number,
    is_finished: bool,
}

impl PendingCall<'_> {
    /// Answers the checks that wait for the call, and makes the next one.
    fn finish(mut self, result: Result<Came, Error>) {
        self.is_finished = true;
        if let Some(call) = self.answer(self.number, result) {
            self.store.spawn_call(self.prepared, self.client, call);
        }
    }

    fn answer(&self, number: Number, result: Result<Came, Error>) -> Option<Call> {
        let Shared { redis, near, .. } = &*self.store.shared;
        near.hear(self.prepared, self.client, number, result, &redis.inner().counters)
    }
}

/// The caller that made the call has gone before the reply. The checks that wait behind it go on.
impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let Some(call) = self.answer(self.number, Err(near::given_up())) else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(_) => self.store.spawn_call(self.prepared, self.client, call),
            // Without a runtime, no task can make the next call.
            Err(_) => {
                let _ = self.answer(call.number, Err(near::given_up()));
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

/// Decides on a key in Redis's ticks: by a script if there is one for it.
pub(crate) async fn decide<J: Judge + Clone + 'static>(
    redis: &Redis,
    judge: &J,
    key: &Key,
    op: Op,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    if lowers(judge, op) {
        return lower(redis, judge, key, &Lowering::Op(op), given, deadline).await;
    }
    let sent = Instant::now();
    let seen = match run_script(redis, judge, key, op, given, deadline, None).await? {
        Ran::Decided(Left { timed, .. }) => return Ok(timed),
        Ran::Not(seen) => seen,
    };
    let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
    if given.is_some() || looks {
        return redis.transact(&[key], given, seen, deadline, |seen| step(judge, op, seen)).await;
    }
    let judge = judge.clone();
    let seen = seen.map(|seen| (seen, sent));
    let (timed, _) = redis.commit(key, seen, deadline, move |seen| step(&judge, op, seen)).await?;
    Ok(timed)
}

/// Returns whether an operation lowers what a client has used in a way that outstanding reservations must know of.
pub(crate) fn lowers<J: Judge>(judge: &J, op: Op) -> bool {
    matches!(op, Op::Reset) || matches!(op, Op::Force(..0)) && judge.has_levels()
}

/// Decides on an estimate in Redis's ticks; with the receipt of what was charged.
pub(crate) async fn reserve_in<J: Judge>(
    redis: &Redis,
    judge: &J,
    key: &Key,
    estimate: Cost,
    given: Option<i64>,
    deadline: Instant,
) -> Result<(Timed, Receipt), Error> {
    let op = Op::Check(estimate);
    // A script tells only the first shadow limit that would have denied.
    let shadows = |prepared: &Prepared| {
        prepared.policy.limits().iter().filter(|limit| limit.is_shadow()).count()
    };
    let mut seen = None;
    if estimate > 0 && judge.script().is_some_and(|prepared| shadows(prepared) < 2) {
        // A script does not return what other policies of the client did not charge, which the receipt has to know.
        match run_script(redis, judge, key, op, given, deadline, Some(Earlier::Left)).await? {
            Ran::Decided(Left { timed, state }) => {
                let receipt = match timed.decision.allowed {
                    true => judge.rule().receipt(&state),
                    false => Receipt::Nothing,
                };
                let uncharged = timed.decision.shadow_refused_by;
                return Ok((timed, receipt.without(uncharged.as_slice())));
            }
            Ran::Not(found) => seen = found,
        }
    }
    let decide = |seen: &Seen| {
        let mut receipt = Receipt::Nothing;
        let (writes, timed) = step_by(judge, op, seen, |rule, state, now| {
            let (timed, left) = tallygate::reserve(rule, state, now, estimate);
            receipt = left;
            timed
        })?;
        Ok((writes, (timed, receipt)))
    };
    redis.transact(&[key], given, seen, deadline, decide).await
}

/// An operation that lowers what a client has used other than by draining, or that has to know of those.
pub(crate) enum Lowering<'a> {
    /// A refund or a reset.
    Op(Op),
    /// A settlement.
    Settle { change: i128, receipt: &'a Receipt, number: i64 },
}

/// How long after a reset reservations are told that they are void, at least, in microseconds.
const RESET_LIFE: i64 = 86_400_000_000;

/// Carries out an operation on a key and on what is known of its returns, in Redis's ticks.
pub(crate) async fn lower<J: Judge>(
    redis: &Redis,
    judge: &J,
    key: &Key,
    what: &Lowering<'_>,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    let returns = key.of_returns();
    let mut was_read = false;
    let step = |seen: &Seen| {
        was_read = true;
        step_lowering(judge, what, seen)
    };
    match redis.transact(&[key, &returns], given, None, deadline, step).await {
        Ok(lowered) => lowered.map_err(Error::Settle),
        // Reading changes nothing: it is as if nothing had been sent.
        Err(Error::Unavailable { reason, .. }) if !was_read => {
            Err(Error::Unavailable { reason, sent: false })
        }
        Err(error) => Err(error),
    }
}

fn step_lowering<J: Judge>(
    judge: &J,
    what: &Lowering<'_>,
    seen: &Seen,
) -> Result<Step<Result<Timed, SettleError>>, Error> {
    let scale = i64::try_from(judge.scale()).unwrap_or(i64::MAX);
    let (rule, now) = (judge.rule(), Tick(seen.now.saturating_mul(scale)));
    let before = &seen.values[0];
    let mut state = if before.is_empty() { rule.first(now) } else { judge.read(before, now)? };
    let mut returns = value::read_returns(&seen.values[1], now);
    let fresh = rule.fresh_at(&state).unwrap_or(Tick(i64::MAX));
    let timed = match what {
        Lowering::Op(op) => {
            let (timed, _) = Part { rule, state: &mut state, op: *op }.step::<Timed>(now, true);
            timed
        }
        Lowering::Settle { number, .. } if returns.voids(*number) => {
            return Ok((None, Err(SettleError::Reset)));
        }
        Lowering::Settle { change, receipt, number } => {
            let mut receipt = (*receipt).clone();
            returns.lower(*number, &mut receipt);
            let (timed, _) = tallygate::settle(rule, &mut state, now, *change, &receipt);
            timed
        }
    };
    match what {
        Lowering::Op(Op::Reset) => {
            let until = Tick(now.0.saturating_add(RESET_LIFE.saturating_mul(scale)));
            returns.reset(now.0, until.max(fresh));
        }
        Lowering::Op(Op::Force(..0)) | Lowering::Settle { change: ..0, .. } => {
            returns.note(now.0, rule.receipt(&state), now, fresh);
        }
        Lowering::Settle { change: 0, .. } => return Ok((None, Ok(timed))),
        Lowering::Op(_) | Lowering::Settle { .. } => {}
    }
    let fresh_at = rule.fresh_at(&state).map(|fresh| in_micros(fresh, scale));
    let writes = vec![
        Write { value: judge.write(&state), fresh_at },
        Write {
            value: value::write_returns(&returns),
            fresh_at: Some(in_micros(returns.until(), scale)),
        },
    ];
    Ok((Some(writes), Ok(timed)))
}

/// A time in microseconds, rounded up: a key may expire a little late, never early.
const fn in_micros(time: Tick, scale: i64) -> i64 {
    time.0.div_euclid(scale).saturating_add((scale > 1) as i64)
}

/// What came of a script.
enum Ran<S> {
    Decided(Left<S>),
    /// It did not decide, perhaps because of what it has read.
    Not(Option<Seen>),
}

/// What a script has decided and left.
struct Left<S> {
    timed: Timed,
    state: S,
}

/// Runs the script of an operation, if there is one. `earlier` says what it does with a state that was left under another
/// policy, if that is not what the policy itself says.
async fn run_script<J: Judge>(
    redis: &Redis,
    judge: &J,
    key: &Key,
    op: Op,
    given: Option<i64>,
    deadline: Instant,
    earlier: Option<Earlier>,
) -> Result<Ran<<J::Rule as Algorithm>::State>, Error> {
    let Some(ScriptCall { prepared, script, numbers }) = call_of(judge, op, given) else {
        return Ok(Ran::Not(None));
    };
    let time = given.map(|given| given.to_string());
    let earlier = earlier.unwrap_or(prepared.earlier);
    let mut arguments = vec![&prepared.head[..], &numbers, earlier.argument()];
    arguments.extend(time.as_ref().map(String::as_bytes));
    let reply = redis.run(script, &[key], &arguments, deadline).await?;
    let (now, part, state) = match read_reply(reply)? {
        Scripts::Decided { now, part } => {
            let state = judge.state_under(prepared.policy.state_of_numbers(&part.numbers)?);
            (now, part, state)
        }
        Scripts::Several { now, part, value } => (now, part, judge.read(&value, Tick(now))?),
        Scripts::Left(value) => return Ok(Ran::Not(Some(value))),
    };
    if given.is_none() {
        redis.heard(now);
    }
    let outcome = match op {
        Op::Check(cost) if part.is_allowed => Outcome::Admitted(cost),
        Op::Check(cost) => Outcome::Refused(cost),
        _ => Outcome::Spared(0),
    };
    let timed = Timed::of(judge.rule(), &state, Tick(now), outcome, part.shadow);
    Ok(Ran::Decided(Left { timed, state }))
}

/// What a script decided on one part of a request.
pub(crate) struct DecidedPart {
    pub(crate) is_allowed: bool,
    pub(crate) shadow: Option<usize>,
    pub(crate) numbers: Vec<i128>,
    /// What else it has to fit into, where the key was asked for under several policies.
    pub(crate) bounds: Bounds,
}

impl DecidedPart {
    fn checked(self, prepared: &Prepared) -> Result<Checked, Error> {
        let Self { is_allowed, shadow, numbers, bounds } = self;
        let state = prepared.policy.state_of_numbers(&numbers)?;
        Ok(Checked { is_allowed, state, shadow, bounds })
    }
}

/// Reads what a script decided on keys under several policies: the time, and all parts in order.
fn read_parts(bytes: &[u8]) -> Result<(i64, Vec<DecidedPart>), Error> {
    let numbers = value::numbers(bytes)?;
    let [now, rest @ ..] = &numbers[..] else { return Err(unexpected()) };
    let now = i64::try_from(*now).map_err(|_| unexpected())?;
    let (mut rest, mut parts) = (rest, Vec::new());
    while let [count, bounds, is_allowed, shadow, more @ ..] = rest {
        let count = usize::try_from(*count).map_err(|_| unexpected())?;
        let (numbers, more) = more.split_at_checked(count).ok_or_else(unexpected)?;
        let count = usize::try_from(*bounds).map_err(|_| unexpected())?;
        let (bounds, more) = more.split_at_checked(5 * count).ok_or_else(unexpected)?;
        parts.push(DecidedPart {
            is_allowed: *is_allowed == 1,
            shadow: usize::try_from(*shadow).ok(),
            numbers: numbers.into(),
            bounds: Bounds::of_numbers(bounds).ok_or_else(unexpected)?,
        });
        rest = more;
    }
    Ok((now, parts))
}

impl Redis {
    /// Decides on requests over some keys, one after the other, each of them all or nothing. A request is a list of
    /// places among the keys, each with a cost. Returns the time and all parts in order; `None` if no script decides on
    /// what the keys hold: nothing was done then.
    pub(crate) async fn run_many(
        &self,
        script: &Script,
        keys: &[(&Key, &Prepared)],
        requests: &[&[(usize, Cost)]],
        given: Option<i64>,
        deadline: Instant,
    ) -> Result<Option<(i64, Vec<DecidedPart>)>, Error> {
        let mut list = Vec::new();
        for request in requests {
            list.extend(double(i128::try_from(request.len()).unwrap_or(0)));
            for (key, cost) in *request {
                list.extend(double(i128::try_from(key + 1).unwrap_or(0)));
                list.extend(double(i128::from(*cost)));
            }
        }
        let time = given.map(|given| given.to_string()).unwrap_or_default();
        let mut arguments = vec![time.as_bytes(), &list];
        for (_, prepared) in keys {
            let Some(scripted) = &prepared.scripted else { return Ok(None) };
            let earlier = prepared.earlier.argument();
            arguments.extend([&prepared.head[..], scripted.constants(), earlier]);
        }
        let names: Vec<&Key> = keys.iter().map(|(key, _)| *key).collect();
        let window = (keys.len() > 1).then_some(&self.inner().several_keys);
        if window.is_some_and(|window| window.is_full()) {
            self.inner().counters.note_queue();
        }
        let place = match window {
            Some(window) => Some(window.enter(deadline).await.ok_or_else(|| {
                Error::Overloaded { reason: "many decide on several keys".into(), sent: false }
            })?),
            None => None,
        };
        let sent = Instant::now();
        let reply = self.run(script, &names, &arguments, deadline).await;
        let may_be_under_way = matches!(
            reply,
            Err(Error::Overloaded { sent: true, .. } | Error::Unavailable { sent: true, .. })
        );
        if let Some(window) = window.filter(|_| reply.is_ok() || may_be_under_way) {
            window.replied(sent.elapsed(), Instant::now());
        }
        if let Some(place) = place.filter(|_| may_be_under_way) {
            // The server may not have carried it out yet, so the place stays taken for another budget.
            let budget = self.inner().options.budget;
            tokio::spawn(async move {
                tokio::time::sleep(budget).await;
                drop(place);
            });
        }
        let bytes = match reply? {
            Value::BulkString(bytes) => bytes,
            Value::Array(reply) => {
                let [Value::Int(1), Value::Int(now), Value::BulkString(parts), _] = &reply[..]
                else {
                    return Ok(None);
                };
                if given.is_none() {
                    self.heard(*now);
                }
                return read_parts(parts).map(Some);
            }
            _ => return Err(unexpected()),
        };
        let numbers = value::numbers(&bytes)?;
        let [now, rest @ ..] = &numbers[..] else { return Err(unexpected()) };
        let now = i64::try_from(*now).map_err(|_| unexpected())?;
        if given.is_none() {
            self.heard(now);
        }
        let (mut rest, mut parts) = (rest, Vec::new());
        while let [count, is_allowed, shadow, more @ ..] = rest {
            let count = usize::try_from(*count).map_err(|_| unexpected())?;
            let (numbers, more) = more.split_at_checked(count).ok_or_else(unexpected)?;
            parts.push(DecidedPart {
                is_allowed: *is_allowed == 1,
                shadow: usize::try_from(*shadow).ok(),
                numbers: numbers.into(),
                bounds: Bounds::default(),
            });
            rest = more;
        }
        Ok(Some((now, parts)))
    }
}

/// A call of a script.
struct ScriptCall<'a> {
    prepared: &'a Prepared,
    script: &'a Script,
    numbers: Vec<u8>,
}

/// The call for an operation, if it is one that a script does.
fn call_of<J: Judge>(judge: &J, op: Op, given: Option<i64>) -> Option<ScriptCall<'_>> {
    // More than the greatest number is more than there ever is.
    const MOST: i64 = 1 << 52;
    let prepared = judge.script()?;
    let scripted = prepared.scripted.as_ref()?;
    if !given.is_none_or(Numbers::takes) {
        return None;
    }
    let (script, amount) = match op {
        Op::Check(cost @ 1..) => {
            (&scripted.check, i64::try_from(cost).ok().filter(|cost| Numbers::takes(*cost))?)
        }
        Op::Force(amount) if amount != 0 => {
            let amount = i64::try_from(amount.clamp(-i128::from(MOST), MOST.into())).ok()?;
            (scripted.force.as_ref()?, amount)
        }
        _ => return None,
    };
    Some(ScriptCall { prepared, script, numbers: scripted.numbers(amount) })
}

/// What a script replied.
enum Scripts {
    Decided {
        now: i64,
        part: DecidedPart,
    },
    /// It decided on a key that was left under another policy, and left this value.
    Several {
        now: i64,
        part: DecidedPart,
        value: Vec<u8>,
    },
    /// It could not decide on what it found.
    Left(Seen),
}

fn read_reply(reply: Value) -> Result<Scripts, Error> {
    match reply {
        Value::BulkString(bytes) => {
            let mut numbers = value::numbers(&bytes)?;
            let [is_allowed, now, shadow, ..] = numbers[..] else {
                return Err(unexpected());
            };
            numbers.drain(..3);
            let part = DecidedPart {
                is_allowed: is_allowed == 1,
                shadow: usize::try_from(shadow).ok(),
                numbers,
                bounds: Bounds::default(),
            };
            Ok(Scripts::Decided { now: i64::try_from(now).map_err(|_| unexpected())?, part })
        }
        Value::Array(reply) => match <[Value; 4]>::try_from(reply) {
            Ok([Value::Int(1), _, Value::BulkString(parts), Value::BulkString(value)]) => {
                let (now, mut parts) = read_parts(&parts)?;
                let part = parts.pop().ok_or_else(unexpected)?;
                Ok(Scripts::Several { now, part, value })
            }
            Ok(_) => Err(unexpected()),
            Err(mut left) => match (left.pop(), left.pop()) {
                (Some(Value::BulkString(value)), Some(Value::Int(now))) => {
                    Ok(Scripts::Left(Seen { now, values: vec![value] }))
                }
                _ => Err(unexpected()),
            },
        },
        _ => Err(unexpected()),
    }
}

/// Decides here on what was read.
pub(crate) fn step<J: Judge>(judge: &J, op: Op, seen: &Seen) -> Result<Step<Timed>, Error> {
    step_by(judge, op, seen, |rule, state, now| {
        let mut part = Part { rule, state, op };
        let agrees = part.admits(now);
        part.step::<Timed>(now, agrees).0
    })
}

/// The same, carried out by a function.
fn step_by<J: Judge>(
    judge: &J,
    op: Op,
    seen: &Seen,
    carry_out: impl FnOnce(&J::Rule, &mut <J::Rule as Algorithm>::State, Tick) -> Timed,
) -> Result<Step<Timed>, Error> {
    let scale = i64::try_from(judge.scale()).unwrap_or(i64::MAX);
    let (rule, now) = (judge.rule(), Tick(seen.now.saturating_mul(scale)));
    let before = &seen.values[0];
    let mut state = if before.is_empty() { rule.first(now) } else { judge.read(before, now)? };
    let is_check = matches!(op, Op::Check(_));
    let as_new = (before.is_empty() && is_check).then(|| judge.write(&state));
    let answer = carry_out(rule, &mut state, now);
    let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
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
    let fresh_at = fresh_at.map(|fresh| in_micros(fresh, scale));
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
        let asked = self.asked_near(&*rule, key, op, now);
        if let Some((prepared, cost)) = &asked
            && let Some(told) = self.shared.near.answer_at_once(prepared, key, *cost)
        {
            let Timed { decision, at } = self.told(told);
            return Box::pin(ready(Ok(T::of_decision(decision, at))));
        }
        let client: Box<[u8]> = key.into();
        Box::pin(async move {
            let Timed { decision, at } = self.decide_asked(&*rule, &client, op, now, asked).await?;
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
        let long = keys.iter().map(|key| key.as_ref().len()).find(|bytes| *bytes > MAX_KEY_BYTES);
        let keys: Vec<Box<[u8]>> = keys.iter().map(|key| key.as_ref().into()).collect();
        Box::pin(async move {
            if let Some(bytes) = long {
                return Err(Error::KeyTooLong { bytes });
            }
            let (rule, op) = (&*rule, Op::Check(cost));
            let each = keys.iter().map(|key| (&**key, self.decide_any(rule, key, op, now)));
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
