//! Several keys in one decision: this user, this address, this route; all or nothing.
//!
//! Where all keys are on one server and, in a cluster, in one slot (all policies of one client are), it is one
//! atomic step: one script, or compare-and-set where no script decides on what a key holds. One key alone is a plain
//! check. Elsewhere they are taken in order, and given back if a later one refuses: that never admits too
//! much, but others may be refused in the moment in between.

use std::borrow::Borrow;
use std::fmt;
use std::time::Instant;

use futures_util::future::join_all;
use tollgate::{
    Algorithm as _, Answer as _, Cost, Decision, Observer, Op, Outcome, Part, RateLimiter, Receipt,
    Rules, Script, Source, Store, Tick, Ticks, Timed,
};

use crate::error::Error;
use crate::key::Key;
use crate::script::Scripted;
use crate::store::{
    DecidedPart, Judge as _, Lowering, Prepared, RedisStore, Reply, Shareable, changed, lower,
    reserve_in,
};
use crate::transaction::{Seen, Write, unexpected};

/// One key's part in a decision over several.
#[must_use = "it is only asked by `check_all`"]
pub struct Ask<'a> {
    part: Box<dyn Joint + 'a>,
}

/// What came of asking several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a decision that nobody reads limits nothing"]
pub struct Together {
    /// The answer of all: allowed if all allow, the least remaining, the longest wait.
    pub decision: Decision,
    /// The first that refused, by its place among those that were asked.
    pub refused_ask: Option<usize>,
}

impl<'a> Ask<'a> {
    /// A limiter's part, for a cost of 1.
    ///
    /// # Errors
    /// The key is too long, or the policy is not in microseconds.
    pub fn of<R, S, O>(
        limiter: &'a RateLimiter<R, S, O>,
        key: impl AsRef<[u8]>,
    ) -> Result<Self, Error>
    where
        R: Rules + Sync,
        R::Rule: Shareable,
        S: Store<R::Rule> + Borrow<RedisStore> + Sync,
        O: Observer,
    {
        let client = key.as_ref();
        let rule = limiter.rules().choose(client);
        let judge = rule.judge(limiter.store().borrow(), None)?;
        let key = limiter.store().borrow().key(client)?;
        let part = Asking { limiter, rule, judge, client: client.into(), key, cost: 1 };
        Ok(Self { part: Box::new(part) })
    }

    /// The same for another cost.
    pub fn cost(mut self, cost: Cost) -> Self {
        self.part.set_cost(cost);
        self
    }
}

/// Decides over several keys at once: all are charged, or none is.
///
/// A key that is asked for twice is asked for both costs. If Redis cannot be asked, each decides by its own
/// failure policy.
///
/// ```no_run
/// use tollgate::{Policy, RateLimiter};
/// use tollgate_redis::{Ask, Redis, check_all};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let users = Policy::token_bucket(5).per_minute().build()?;
/// let users = RateLimiter::with_store(users, redis.store("users"));
/// let addresses = Policy::sliding_window_log(1).per_minute().build()?;
/// let addresses = RateLimiter::with_store(addresses, redis.store("addresses"));
/// let asked = check_all([Ask::of(&users, "alice")?, Ask::of(&addresses, "192.0.2.1")?]).await?;
/// assert!(asked.decision.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// What was charged could not be given back.
pub async fn check_all<'a>(asks: impl IntoIterator<Item = Ask<'a>>) -> Result<Together, Error> {
    let mut asks: Vec<Ask<'a>> = asks.into_iter().collect();
    // The same key twice is one key with both costs: the first asks for both.
    let mut parts: Vec<usize> = Vec::new();
    for index in 0..asks.len() {
        let same = parts.iter().find(|part| asks[**part].part.key() == asks[index].part.key());
        match same {
            Some(&first) => {
                let both = asks[first].part.cost().saturating_add(asks[index].part.cost());
                asks[first].part.set_cost(both);
            }
            None => parts.push(index),
        }
    }
    let Some(&first) = parts.first() else { return Ok(NOTHING_ASKED) };
    let joint: Vec<&(dyn Joint + 'a)> = parts.iter().map(|part| &*asks[*part].part).collect();
    let (redis, slot) = (asks[first].part.store().redis(), asks[first].part.key().slot);
    let in_one_step = joint.iter().all(|part| {
        part.store().redis().is(redis) && (!redis.is_cluster() || part.key().slot == slot)
    });
    let decided = match joint[..] {
        // The failure policy has been asked already.
        [only] => Ok(vec![only.check_alone().await?]),
        _ if in_one_step => at_once(&joint).await,
        _ => in_order(&joint).await,
    };
    let told = match decided {
        Ok(told) => told,
        Err(error) => without_redis(&joint, &error)?,
    };
    let refused = told.iter().position(|timed| !timed.decision.allowed);
    let go = refused.is_none();
    for (part, timed) in joint.iter().zip(&told) {
        part.tell(&Decision { allowed: go, ..timed.decision }, timed.at);
    }
    let refusal = refused.map(|part| told[part].decision);
    let refused_by = refusal.and_then(|refusal| refusal.refused_by);
    let all = told.into_iter().map(|timed| timed.decision).reduce(Decision::merge);
    let decision = all.map(|all| {
        // Who refused is who answered.
        let source = refusal.map_or(all.source, |refusal| refusal.source);
        Decision { allowed: go, refused_by, source, ..all }
    });
    Ok(Together {
        decision: decision.unwrap_or(NOTHING_ASKED.decision),
        refused_ask: refused.map(|part| parts[part]),
    })
}

/// The answer to no question.
const NOTHING_ASKED: Together = Together {
    decision: Decision {
        allowed: true,
        limit: Cost::MAX,
        remaining: Cost::MAX,
        retry_after: Some(Ticks::ZERO),
        reset_after: Ticks::ZERO,
        delay: Ticks::ZERO,
        refused_by: None,
        shadow_refused_by: None,
        source: Source::Store,
    },
    refused_ask: None,
};

/// All in one atomic step. Those that did not refuse are told as allowed.
async fn at_once(joint: &[&(dyn Joint + '_)]) -> Result<Vec<Timed>, Error> {
    let redis = joint[0].store().redis();
    let keys: Vec<&Key> = joint.iter().map(|part| part.key()).collect();
    let deadline = redis.deadline();
    for part in joint {
        part.give_in(deadline).await?;
    }
    if let Some(told) = by_script(joint, deadline).await? {
        return Ok(told);
    }
    let decide = |seen: &Seen| {
        let mut go = true;
        for (part, value) in joint.iter().zip(&seen.values) {
            go &= part.agrees(value, seen.now)?;
        }
        let mut answers = Vec::with_capacity(joint.len());
        let mut writes = Vec::with_capacity(joint.len());
        let mut is_changed = false;
        for (part, value) in joint.iter().zip(&seen.values) {
            let (write, changes, answer) = part.step(value, seen.now, go)?;
            is_changed |= changes;
            writes.push(write);
            answers.push(answer);
        }
        Ok((is_changed.then_some(writes), answers))
    };
    redis.transact(&keys, None, None, deadline, decide).await
}

/// All by one script; `None` if there is none for what they are or hold.
async fn by_script(
    joint: &[&(dyn Joint + '_)],
    deadline: Instant,
) -> Result<Option<Vec<Timed>>, Error> {
    let mut keys = Vec::with_capacity(joint.len());
    for part in joint {
        let Some(prepared) = part.scripted() else { return Ok(None) };
        keys.push((part.key(), prepared));
    }
    let all: Vec<_> = keys.iter().filter_map(|(_, prepared)| prepared.scripted.as_ref()).collect();
    let script = Scripted::of_all(&all);
    let request: Vec<_> = joint.iter().enumerate().map(|(at, part)| (at, part.cost())).collect();
    let redis = joint[0].store().redis();
    let decided = redis.run_many(&script, &keys, &[&request], None, deadline).await?;
    let Some((now, parts)) = decided else { return Ok(None) };
    if parts.len() != joint.len() {
        return Err(unexpected());
    }
    let go = parts.iter().all(|part| part.is_allowed);
    let told = joint.iter().zip(parts).map(|(part, decided)| part.answer(&decided, now, go));
    told.collect::<Result<_, _>>().map(Some)
}

/// One after the other, and back again if one refuses.
async fn in_order(joint: &[&(dyn Joint + '_)]) -> Result<Vec<Timed>, Error> {
    let mut told: Vec<Timed> = Vec::new();
    let mut receipts = Vec::new();
    let mut failed = None;
    // One budget for all of them.
    let deadline = joint[0].store().redis().deadline();
    for part in joint {
        match part.check(deadline).await {
            Ok((timed, receipt)) => {
                told.push(timed);
                receipts.push(receipt);
                if !timed.decision.allowed {
                    break;
                }
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    let is_refused = told.last().is_some_and(|timed| !timed.decision.allowed);
    if failed.is_some() || is_refused {
        let taken = joint.iter().zip(&mut told).zip(&receipts);
        let taken = taken.filter(|((_, timed), _)| timed.decision.allowed);
        let backs = taken.map(|((part, timed), receipt)| async move {
            *timed = part.give_back(receipt, timed.at).await?;
            Ok(())
        });
        join_all(backs).await.into_iter().collect::<Result<(), Error>>()?;
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(told),
    }
}

/// Each by its own failure policy. What one of them charged in this process is taken back if another refuses.
fn without_redis(joint: &[&(dyn Joint + '_)], error: &Error) -> Result<Vec<Timed>, Error> {
    let each = joint.iter().map(|part| part.fall_back(error.clone()));
    let mut told = each.collect::<Result<Vec<_>, _>>()?;
    if told.iter().any(|timed| !timed.decision.allowed) {
        let allowed = joint.iter().zip(&mut told).filter(|(_, timed)| timed.decision.allowed);
        for (part, timed) in allowed.filter(|(_, timed)| timed.decision.source == Source::Local) {
            timed.decision = part.uncharge();
        }
    }
    Ok(told)
}

/// What can be asked together with others.
trait Joint: Send + Sync {
    fn key(&self) -> &Key;
    fn store(&self) -> &RedisStore;
    fn cost(&self) -> Cost;
    fn set_cost(&mut self, cost: Cost);
    /// Charges what was used here while Redis was away.
    fn give_in(&self, deadline: Instant) -> Reply<'_, ()>;
    /// Whether a key with this value has nothing against its cost.
    fn agrees(&self, value: &[u8], now: i64) -> Result<bool, Error>;
    /// What becomes of it, whether that is anything new, and how it stands.
    fn step(&self, value: &[u8], now: i64, go: bool) -> Result<(Write, bool, Timed), Error>;
    /// The policy whose script decides on it, if there is one.
    fn scripted(&self) -> Option<&Prepared>;
    /// What a script decided, as it is told.
    fn answer(&self, decided: &DecidedPart, now: i64, go: bool) -> Result<Timed, Error>;
    /// Checks it as if nothing else were asked for, by its failure policy if Redis cannot.
    fn check_alone(&self) -> Reply<'_, Timed>;
    fn check(&self, deadline: Instant) -> Reply<'_, (Timed, Receipt)>;
    /// Returns what was charged at a time, as far as it still counts.
    fn give_back<'a>(&'a self, receipt: &'a Receipt, charged: Tick) -> Reply<'a, Timed>;
    fn fall_back(&self, error: Error) -> Result<Timed, Error>;
    /// Takes back what falling back has charged in this process.
    fn uncharge(&self) -> Decision;
    fn tell(&self, decision: &Decision, at: Tick);
}

struct Asking<'a, R: Rules + 'a, S, O>
where
    R::Rule: Shareable,
{
    limiter: &'a RateLimiter<R, S, O>,
    rule: R::Chosen<'a>,
    judge: <R::Rule as Shareable>::Judge,
    client: Box<[u8]>,
    key: Key,
    cost: Cost,
}

impl<R, S, O> Joint for Asking<'_, R, S, O>
where
    R: Rules + Sync,
    R::Rule: Shareable,
    S: Store<R::Rule> + Borrow<RedisStore> + Sync,
    O: Observer,
{
    fn key(&self) -> &Key {
        &self.key
    }

    fn store(&self) -> &RedisStore {
        self.limiter.store().borrow()
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn set_cost(&mut self, cost: Cost) {
        self.cost = cost;
    }

    fn give_in(&self, deadline: Instant) -> Reply<'_, ()> {
        Box::pin(self.store().give_in(&*self.rule, &self.client, deadline))
    }

    fn agrees(&self, value: &[u8], now: i64) -> Result<bool, Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state =
            if value.is_empty() { rule.first(now) } else { self.judge.read(value, now)? };
        Ok(Part { rule, state: &mut state, op: Op::Check(self.cost) }.admits(now))
    }

    fn step(&self, value: &[u8], now: i64, go: bool) -> Result<(Write, bool, Timed), Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state =
            if value.is_empty() { rule.first(now) } else { self.judge.read(value, now)? };
        let before = if value.is_empty() { self.judge.write(&state) } else { value.to_vec() };
        let mut part = Part { rule, state: &mut state, op: Op::Check(self.cost) };
        let (timed, _) = part.step::<Timed>(now, go);
        let told = self.store().told(timed);
        Ok(match changed(&self.judge, &state, &before).and_then(|mut writes| writes.pop()) {
            Some(write) => (write, true, told),
            None => {
                let fresh_at = rule.fresh_at(&state).map(|fresh| fresh.0);
                (Write { value: value.to_vec(), fresh_at }, false, told)
            }
        })
    }

    fn scripted(&self) -> Option<&Prepared> {
        let is_exact = i64::try_from(self.cost).is_ok_and(|cost| cost > 0 && Script::takes(cost));
        self.judge.script().filter(|prepared| is_exact && prepared.scripted.is_some())
    }

    fn answer(&self, decided: &DecidedPart, now: i64, go: bool) -> Result<Timed, Error> {
        let prepared = self.judge.script().ok_or_else(unexpected)?;
        let state = self.judge.state_under(prepared.policy.state_of_numbers(&decided.numbers)?);
        let outcome = match (go, decided.is_allowed) {
            (true, _) => Outcome::Admitted(self.cost),
            (false, true) => Outcome::Spared(self.cost),
            (false, false) => Outcome::Refused(self.cost),
        };
        let mut timed = Timed::of(self.judge.rule(), &state, Tick(now), outcome, decided.shadow);
        let denied = (!decided.is_allowed).then_some(self.cost);
        decided.bounds.complete(&mut timed.decision, &prepared.policy, Tick(now), denied);
        Ok(self.store().told(timed))
    }

    fn check_alone(&self) -> Reply<'_, Timed> {
        let op = Op::Check(self.cost);
        Box::pin(self.store().decide_any(&*self.rule, &self.client, op, None))
    }

    fn check(&self, deadline: Instant) -> Reply<'_, (Timed, Receipt)> {
        Box::pin(async move {
            let redis = self.store().redis();
            self.give_in(deadline).await?;
            let (timed, receipt) =
                reserve_in(redis, &self.judge, &self.key, self.cost, None, deadline).await?;
            Ok((self.store().told(timed), receipt))
        })
    }

    fn give_back<'a>(&'a self, receipt: &'a Receipt, charged: Tick) -> Reply<'a, Timed> {
        Box::pin(async move {
            let number = self.store().in_redis(charged).0.saturating_sub(1);
            let what = Lowering::Settle { change: -i128::from(self.cost), receipt, number };
            let redis = self.store().redis();
            let deadline = redis.deadline();
            let returned = lower(redis, &self.judge, &self.key, &what, None, deadline).await;
            let timed = match returned {
                // The client was reset: what was charged is gone with everything else.
                Err(Error::Settle(_)) => {
                    let look = Op::Peek(0);
                    return self.store().ask(&self.judge, &self.key, look, None, deadline).await;
                }
                returned => returned?,
            };
            Ok(self.store().told(timed))
        })
    }

    fn fall_back(&self, error: Error) -> Result<Timed, Error> {
        let op = Op::Check(self.cost);
        self.store().fall_back(error, &*self.rule, &self.client, op, None)
    }

    fn uncharge(&self) -> Decision {
        self.store().uncharge(&*self.rule, &self.client, self.cost)
    }

    fn tell(&self, decision: &Decision, at: Tick) {
        self.limiter.observe(&*self.rule, &self.client, self.cost, decision, at);
    }
}

impl fmt::Debug for Ask<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ask").field("cost", &self.part.cost()).finish_non_exhaustive()
    }
}
