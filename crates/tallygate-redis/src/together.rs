//! Several keys in one decision: this user, this address, this route; all or nothing.
//!
//! If all keys are on one server and, in a cluster, in one slot (all policies of one client are), the decision is one
//! atomic step: one script, or compare-and-set if no script decides on what a key holds. One key alone is a plain
//! check. A key may come several times, under different rules: its costs are added up, and each rule must allow the sum.
//! That is decided by compare-and-set.
//!
//! Keys in different slots are charged in order, and the charges are given back if a later key denies. So the decision
//! never allows too much, but another caller may be denied in the moment between. A check has one time budget: a charge
//! that is not given back by then is given back in the background, and the caller has its denial in time. If that fails,
//! too, the units stay charged until the policy has earned them back; they are counted as
//! [unreturned](crate::Counts::unreturned). A server that does not answer leaves only its own keys to their failure policies.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tallygate::{
    Algorithm, Answer as _, Ask, Cost, Decision, InvalidAsk, Observer, Op, Outcome, Part,
    RateLimiter, Receipt, Rules, Script, Source, Store, Tick, Ticks, Timed,
};
use tokio::task::JoinHandle;
use tokio::time::timeout_at;

use crate::any::AnyLimiter;
use crate::client::Redis;
use crate::error::Error;
use crate::failure::ShareCharge;
use crate::key::Key;
use crate::script::Scripted;
use crate::store::{
    DecidedPart, Judge, Lowering, Prepared, RedisStore, Reply, Shareable, changed, lower,
    reserve_in,
};
use crate::transaction::{Seen, Write, unexpected};

/// A question to one limiter as a part of a decision over several.
#[must_use = "it is only asked by `check_all`"]
pub struct JointAsk<'a>(Place<'a>);

/// Where the key of a part is kept.
enum Place<'a> {
    Memory(tallygate::JointAsk<'a>),
    Redis(RedisAsk<'a>),
}

struct RedisAsk<'a> {
    part: Box<dyn Joint + 'a>,
}

/// The result of a decision over several keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a decision that nobody reads limits nothing"]
pub struct Together {
    /// The answer of all: allowed if all allow, the least remaining, the longest wait.
    pub decision: Decision,
    /// The first part that denied, by its place among the parts that were asked. Keys in different slots are asked one
    /// after the other until one denies.
    pub refused_ask: Option<usize>,
}

impl<'a> JointAsk<'a> {
    /// Makes a question to a limiter a part of a decision over several.
    ///
    /// # Errors
    /// The key is too long, the tier is not known, or the policy is not in microseconds.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn of<'k, R, O>(
        limiter: &'a RateLimiter<R, RedisStore, O>,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, Error>
    where
        R: Rules + Sync,
        R::Rule: Shareable,
        O: Observer,
    {
        RedisAsk::of(limiter, limiter.store(), ask.into()).map(|ask| Self(Place::Redis(ask)))
    }

    /// The same for a limiter on a store that was chosen at run time.
    ///
    /// # Errors
    /// As there.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn of_any<'k, O: Observer>(
        limiter: &'a AnyLimiter<O>,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, Error> {
        let place = match (limiter.store().memory(), limiter.store().redis()) {
            (_, Some(store)) => Place::Redis(RedisAsk::of(limiter, store, ask.into())?),
            (Some(store), _) => Place::Memory(tallygate::JointAsk::in_store(limiter, store, ask)?),
            (None, None) => unreachable!("a store is one of both"),
        };
        Ok(Self(place))
    }
}

impl<'a> RedisAsk<'a> {
    fn of<R, S, O>(
        limiter: &'a RateLimiter<R, S, O>,
        store: &'a RedisStore,
        ask: Ask<'_>,
    ) -> Result<Self, Error>
    where
        R: Rules + Sync,
        R::Rule: Shareable,
        S: Store<R::Rule> + Sync,
        O: Observer,
    {
        let rule = limiter.rule(&ask).map_err(InvalidAsk::from)?;
        let judge = rule.judge(store, ask.at)?;
        let key = store.key(ask.key)?;
        let (client, cost) = (ask.key.into(), ask.cost);
        let part = Asking { limiter, store, rule, judge, client, key, cost, at: ask.at };
        Ok(Self { part: Box::new(part) })
    }
}

/// Decides over several keys at once: all are charged, or none is.
///
/// If one key is asked for several times, its costs are added up, and each rule that it is asked under must allow the
/// sum. If a server cannot be asked, the parts whose keys it has decide by their own failure policies; the limits on other
/// servers hold.
///
/// ```no_run
/// use tallygate::{Policy, RateLimiter};
/// use tallygate_redis::{JointAsk, Redis, check_all};
///
/// # tokio::runtime::Runtime::new()?.block_on(async {
/// let redis = Redis::open("redis://127.0.0.1:6379")?;
/// let users = Policy::token_bucket(5).per_minute().build()?;
/// let users = RateLimiter::with_store(users, redis.store("users"));
/// let addresses = Policy::sliding_window_log(1).per_minute().build()?;
/// let addresses = RateLimiter::with_store(addresses, redis.store("addresses"));
/// let asked = check_all([JointAsk::of(&users, "alice")?, JointAsk::of(&addresses, "192.0.2.1")?]).await?;
/// assert!(asked.decision.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// A policy is not in microseconds, a store in memory is full, or parts are kept in memory and in Redis.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub async fn check_all<'a>(
    asks: impl IntoIterator<Item = JointAsk<'a>>,
) -> Result<Together, Error> {
    let (mut in_memory, mut in_redis) = (Vec::new(), Vec::new());
    for JointAsk(place) in asks {
        match place {
            Place::Memory(ask) => in_memory.push(ask),
            Place::Redis(ask) => in_redis.push(ask),
        }
    }
    match (in_memory.is_empty(), in_redis.is_empty()) {
        (true, _) => decide(in_redis).await,
        (false, true) => {
            let tallygate::Together { decision, refused_ask, .. } =
                tallygate::check_all(in_memory)?;
            Ok(Together { decision, refused_ask })
        }
        (false, false) => Err(Error::MixedStores),
    }
}

async fn decide(mut asks: Vec<RedisAsk<'_>>) -> Result<Together, Error> {
    // The clocks of servers are one clock, so a time that one question names is the time of all.
    let now = asks.iter().find_map(|ask| ask.part.time());
    if now.is_some() {
        for ask in &mut asks {
            ask.part.begin(now)?;
        }
    }
    let keys = grouped(&asks);
    let Some(first) = keys.first() else { return Ok(NOTHING_ASKED) };
    let in_one_step = keys.iter().all(|key| {
        key.redis().is(first.redis())
            && (!first.redis().is_cluster() || key.key().slot == first.key().slot)
    });
    let mut answers = match &keys[..] {
        [KeyParts { parts }] if parts.len() == 1 => {
            let (index, part) = parts[0];
            vec![(index, part.check_alone(now).await?)]
        }
        _ => match charge_shares(&keys, now) {
            Ok(mut shares) => {
                let decided = match in_one_step {
                    true => at_once(&keys, now).await,
                    false => in_order(&keys, &mut shares, now).await,
                };
                match decided {
                    Ok(answers) => {
                        if answers.iter().all(|(_, timed)| timed.decision.allowed) {
                            shares.into_iter().flatten().for_each(ShareCharge::keep);
                        }
                        answers
                    }
                    Err(error) => {
                        drop(shares);
                        without_redis(&keys, &error, now)?
                    }
                }
            }
            Err(denial) => vec![denial],
        },
    };
    answers.sort_unstable_by_key(|(index, _)| *index);
    let denial = answers.iter().find(|(_, timed)| !timed.decision.allowed).copied();
    let go = denial.is_none();
    for (index, timed) in &answers {
        asks[*index].part.observe(&Decision { allowed: go, ..timed.decision }, timed.at);
    }
    let refused_by = denial.and_then(|(_, denial)| denial.decision.refused_by);
    let all = answers.into_iter().map(|(_, timed)| timed.decision).reduce(Decision::merge);
    let decision = all.map(|all| {
        // The source is that of the part that denied.
        let source = denial.map_or(all.source, |(_, denial)| denial.decision.source);
        Decision { allowed: go, refused_by, source, ..all }
    });
    Ok(Together {
        decision: decision.unwrap_or(NOTHING_ASKED.decision),
        refused_ask: denial.map(|(index, _)| index),
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
        scarcest: None,
        refused_by: None,
        shadow_refused_by: None,
        source: Source::Store,
    },
    refused_ask: None,
};

/// The decisions of some parts, each with its place among the parts that were asked.
type Answers = Vec<(usize, Timed)>;

/// The parts of one key, each with its place among the parts that were asked.
struct KeyParts<'a> {
    parts: Vec<(usize, &'a (dyn Joint + 'a))>,
}

/// The cost that a key is asked for.
struct Sum {
    /// The sum of the costs of the parts whose rules charge.
    units: u128,
    /// The place, among the parts of the key, of the part whose rule charges it.
    charger: usize,
}

impl Sum {
    /// Returns the cost, or the largest possible one if it [is too much](Self::is_too_much).
    fn cost(&self) -> Cost {
        Cost::try_from(self.units).unwrap_or(Cost::MAX)
    }

    /// Returns whether it is more than any limit can allow.
    fn is_too_much(&self) -> bool {
        self.units > Cost::MAX.into()
    }
}

/// A step of all parts of one key.
struct KeyStep {
    write: Write,
    is_changed: bool,
    answers: Answers,
    receipt: Receipt,
    sum: Sum,
}

/// A key that was decided on alone, with everything that is needed to give its charge back.
struct ChargedKey {
    answers: Answers,
    receipt: Receipt,
    cost: Cost,
    /// The place of the part that was charged, among the parts of the key.
    charger: usize,
}

impl ChargedKey {
    fn is_allowed(&self) -> bool {
        all_allow(&self.answers)
    }
}

/// Finds the parts that are about the same key, in the order of their first parts.
fn grouped<'a>(asks: &'a [RedisAsk<'_>]) -> Vec<KeyParts<'a>> {
    let mut keys: Vec<KeyParts<'a>> = Vec::with_capacity(asks.len());
    let mut places: HashMap<(usize, &[u8]), usize> = HashMap::with_capacity(asks.len());
    for (index, ask) in asks.iter().enumerate() {
        let part = &*ask.part;
        let identity = (part.store().redis().identity(), &part.key().name[..]);
        let place = *places.entry(identity).or_insert(keys.len());
        match keys.get_mut(place) {
            Some(key) => key.parts.push((index, part)),
            None => keys.push(KeyParts { parts: vec![(index, part)] }),
        }
    }
    keys
}

impl KeyParts<'_> {
    fn first(&self) -> &dyn Joint {
        self.parts[0].1
    }

    fn key(&self) -> &Key {
        self.first().key()
    }

    fn redis(&self) -> &Redis {
        self.first().store().redis()
    }

    fn sum(&self, charges: impl Fn(&dyn Joint) -> bool) -> Sum {
        let charging = || self.parts.iter().enumerate().filter(|(_, (_, part))| charges(*part));
        let units = charging().map(|(_, (_, part))| u128::from(part.cost())).sum();
        Sum { units, charger: charging().next().map_or(0, |(place, _)| place) }
    }

    /// Returns whether every rule allows the sum to a key with this value.
    fn agrees(&self, value: &[u8], now: i64) -> Result<bool, Error> {
        let sum = self.sum(|part| part.charges(now));
        let mut go = !sum.is_too_much();
        for (_, part) in &self.parts {
            go = go && part.agrees(value, now, sum.cost())?;
        }
        Ok(go)
    }

    /// Charges the sum if all agree. Each rule reports on the value before; the rule that charges sees a state that was
    /// brought under the others.
    fn step(&self, value: &[u8], now: i64, go: bool) -> Result<KeyStep, Error> {
        let sum = self.sum(|part| part.charges(now));
        let mut answers = Vec::with_capacity(self.parts.len());
        let mut brought = value.to_vec();
        for (place, (index, part)) in self.parts.iter().enumerate() {
            if place == sum.charger {
                continue;
            }
            answers.push((*index, part.report(value, now, sum.cost(), go)?));
            if !value.is_empty() && sum.units > 0 {
                brought = part.bring(brought, now)?;
            }
        }
        let (index, charger) = self.parts[sum.charger];
        let (write, timed, receipt) = charger.charge(&brought, now, sum.cost(), go)?;
        answers.push((index, timed));
        if sum.is_too_much() {
            answers.iter_mut().for_each(|(_, timed)| timed.decision = never(timed.decision));
        }
        let is_changed = write.value != value;
        Ok(KeyStep { write, is_changed, answers, receipt, sum })
    }

    /// Decides on this key alone; with the receipt of the charge.
    async fn reserve(&self, now: Option<Tick>, deadline: Instant) -> Result<ChargedKey, Error> {
        self.first().give_in(now, deadline).await?;
        let given = now.map(|now| self.first().store().in_redis(now).0);
        if let [(index, part)] = self.parts[..] {
            let (timed, receipt) = part.reserve(given, deadline).await?;
            let (answers, cost) = (vec![(index, timed)], part.cost());
            return Ok(ChargedKey { answers, receipt, cost, charger: 0 });
        }
        let decide = |seen: &Seen| {
            let value = &seen.values[0];
            let go = self.agrees(value, seen.now)?;
            let step = self.step(value, seen.now, go)?;
            let KeyStep { answers, receipt, sum, .. } = step;
            let charged = ChargedKey { answers, receipt, cost: sum.cost(), charger: sum.charger };
            Ok((step.is_changed.then(|| vec![step.write]), charged))
        };
        self.redis().transact(&[self.key()], given, None, deadline, decide).await
    }

    /// Decides by the failure policies of the parts: every rule must allow the sum. Returns the decisions, and the cost
    /// if this process has charged it.
    fn fall_back(&self, error: &Error, now: Option<Tick>) -> Result<(Answers, Sum), Error> {
        let sum = self.sum(|part| part.charges_outside(now));
        let cost = sum.cost();
        let mut answers = Vec::with_capacity(self.parts.len());
        let mut go = !sum.is_too_much();
        for (place, (index, part)) in self.parts.iter().enumerate() {
            if place != sum.charger {
                let timed = part.fall_back(error.clone(), Op::Peek(cost), now)?;
                go &= timed.decision.allowed;
                answers.push((*index, timed));
            }
        }
        let (index, charger) = self.parts[sum.charger];
        let op = if go { Op::Check(cost) } else { Op::Peek(cost) };
        answers.push((index, charger.fall_back(error.clone(), op, now)?));
        if sum.is_too_much() {
            answers.iter_mut().for_each(|(_, timed)| timed.decision = never(timed.decision));
        }
        Ok((answers, Sum { units: if go { sum.units } else { 0 }, ..sum }))
    }

    /// Takes back the charge that [falling back](Self::fall_back) has made in this process, if it has made one.
    fn uncharge(&self, answers: &mut Answers, sum: &Sum, now: Option<Tick>) {
        // The part that charges decided last.
        if let Some((_, timed)) = answers.last_mut()
            && timed.decision.allowed
            && timed.decision.source == Source::Local
            && sum.units > 0
        {
            timed.decision = self.parts[sum.charger].1.uncharge(sum.cost(), now);
        }
    }
}

/// A denial of a cost that no limit can ever allow.
fn never(decision: Decision) -> Decision {
    let refused_by = decision.refused_by.or(Some(0));
    Decision { allowed: false, retry_after: None, refused_by, ..decision }
}

/// Charges each key to this process's share as well, while other processes may not know that Redis is back. Returns the first
/// denial if a share does not allow its cost.
fn charge_shares<'a>(
    keys: &'a [KeyParts<'_>],
    now: Option<Tick>,
) -> Result<Vec<Option<ShareCharge<'a>>>, (usize, Timed)> {
    let mut shares = Vec::with_capacity(keys.len());
    for key in keys {
        let sum = key.sum(|part| part.charges_outside(now));
        let (index, part) = key.parts[sum.charger];
        shares.push(part.charge_share(sum.cost(), now).map_err(|denial| (index, denial))?);
    }
    Ok(shares)
}

/// Decides on all keys in one atomic step. Parts that have no objection are reported as allowed.
async fn at_once(keys: &[KeyParts<'_>], now: Option<Tick>) -> Result<Answers, Error> {
    let (redis, store) = (keys[0].redis(), keys[0].first().store());
    let deadline = redis.deadline();
    let given = now.map(|now| store.in_redis(now).0);
    for key in keys {
        key.first().give_in(now, deadline).await?;
    }
    if let Some(answers) = by_script(keys, given, deadline).await? {
        return Ok(answers);
    }
    let decide = |seen: &Seen| {
        let mut go = true;
        for (key, value) in keys.iter().zip(&seen.values) {
            go = go && key.agrees(value, seen.now)?;
        }
        let mut answers = Vec::with_capacity(keys.len());
        let mut writes = Vec::with_capacity(keys.len());
        let mut is_changed = false;
        for (key, value) in keys.iter().zip(&seen.values) {
            let step = key.step(value, seen.now, go)?;
            is_changed |= step.is_changed;
            writes.push(step.write);
            answers.extend(step.answers);
        }
        Ok((is_changed.then_some(writes), answers))
    };
    let names: Vec<&Key> = keys.iter().map(KeyParts::key).collect();
    redis.transact(&names, given, None, deadline, decide).await
}

/// Decides on all keys by one script; `None` if there is no script for their policies or for what they hold.
async fn by_script(
    keys: &[KeyParts<'_>],
    given: Option<i64>,
    deadline: Instant,
) -> Result<Option<Answers>, Error> {
    if !given.is_none_or(Script::takes) {
        return Ok(None);
    }
    let mut parts = Vec::with_capacity(keys.len());
    for key in keys {
        let [(index, part)] = key.parts[..] else { return Ok(None) };
        let Some(prepared) = part.scripted() else { return Ok(None) };
        parts.push((index, part, prepared));
    }
    let scripts: Vec<_> =
        parts.iter().filter_map(|(_, _, prepared)| prepared.scripted.as_ref()).collect();
    let script = Scripted::of_all(&scripts);
    let costs: Vec<_> =
        parts.iter().enumerate().map(|(place, (_, part, _))| (place, part.cost())).collect();
    let names: Vec<_> = parts.iter().map(|(_, part, prepared)| (part.key(), *prepared)).collect();
    let redis = keys[0].redis();
    let decided = redis.run_many(&script, &names, &[&costs], given, deadline).await?;
    let Some((now, decided)) = decided else { return Ok(None) };
    if decided.len() != parts.len() {
        return Err(unexpected());
    }
    let go = decided.iter().all(|part| part.is_allowed);
    let answers = parts.iter().zip(decided).map(|((index, part, _), decided)| {
        part.answer(&decided, now, go).map(|timed| (*index, timed))
    });
    answers.collect::<Result<_, _>>().map(Some)
}

/// The decision on one key of several that are not decided in one step.
enum KeyDecision {
    ByRedis(ChargedKey),
    /// By the failure policies of its parts, because its server did not answer in time.
    ByFailurePolicy(Answers, Sum),
}

impl KeyDecision {
    fn is_allowed(&self) -> bool {
        match self {
            Self::ByRedis(charged) => charged.is_allowed(),
            Self::ByFailurePolicy(answers, _) => all_allow(answers),
        }
    }

    fn into_answers(self) -> Answers {
        match self {
            Self::ByRedis(charged) => charged.answers,
            Self::ByFailurePolicy(answers, _) => answers,
        }
    }
}

fn all_allow(answers: &Answers) -> bool {
    answers.iter().all(|(_, timed)| timed.decision.allowed)
}

/// Charges one key after the other, and gives the charges back if one denies. A server that does not answer leaves only its
/// own keys to their failure policies: the limits on other servers hold.
async fn in_order(
    keys: &[KeyParts<'_>],
    shares: &mut [Option<ShareCharge<'_>>],
    now: Option<Tick>,
) -> Result<Answers, Error> {
    let mut decided: Vec<KeyDecision> = Vec::with_capacity(keys.len());
    let mut failed = None;
    // One budget for all of them, and for giving back.
    let deadline = keys[0].redis().deadline();
    for (key, share) in keys.iter().zip(shares) {
        let decision = match key.reserve(now, deadline).await {
            Ok(charged) => Ok(KeyDecision::ByRedis(charged)),
            Err(error) => {
                // The failure policy charges the share itself.
                drop(share.take());
                let fallen_back = key.fall_back(&error, now);
                fallen_back.map(|(answers, sum)| KeyDecision::ByFailurePolicy(answers, sum))
            }
        };
        match decision {
            Ok(decision) => {
                let is_allowed = decision.is_allowed();
                decided.push(decision);
                if !is_allowed {
                    break;
                }
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    if failed.is_some() || !decided.last().is_none_or(KeyDecision::is_allowed) {
        give_back(keys, &mut decided, now, deadline).await;
    }
    match failed {
        Some(error) => Err(error),
        None => Ok(decided.into_iter().flat_map(KeyDecision::into_answers).collect()),
    }
}

/// Gives the charges of some keys back. What is not done by the deadline goes on in the background: the caller has its
/// answer in time, and no unit is lost because it was late.
async fn give_back(
    keys: &[KeyParts<'_>],
    decided: &mut [KeyDecision],
    now: Option<Tick>,
    deadline: Instant,
) {
    let mut taken = Vec::with_capacity(decided.len());
    for (key, decision) in keys.iter().zip(decided) {
        match decision {
            KeyDecision::ByRedis(one) if one.is_allowed() && one.cost > 0 => taken.push((key, one)),
            KeyDecision::ByRedis(_) => {}
            KeyDecision::ByFailurePolicy(answers, sum) => key.uncharge(answers, sum, now),
        }
    }
    let taken: Vec<(&mut ChargedKey, JoinHandle<Option<Timed>>)> = taken
        .into_iter()
        .map(|(key, one)| {
            let ((index, part), cost) = (key.parts[one.charger], one.cost);
            let charged_at = one.answers.iter().find(|(other, _)| *other == index);
            let charged_at = charged_at.map_or(Tick(i64::MAX), |(_, timed)| timed.at);
            let back = part.give_back(cost, one.receipt.clone(), charged_at, now);
            let redis = part.store().redis().clone();
            let name: Arc<str> = part.store().name().into();
            let task = tokio::spawn(async move {
                back.await
                    .inspect_err(|error| {
                        redis.inner().counters.unreturned.fetch_add(cost, Ordering::Relaxed);
                        tracing::warn!(
                            policy = &*name, units = cost, %error,
                            "cannot give back a charge that another key denied; it stays charged until it is earned back"
                        );
                    })
                    .ok()
            });
            (one, task)
        })
        .collect();
    for (one, task) in taken {
        let Ok(Ok(Some(returned))) = timeout_at(deadline.into(), task).await else { continue };
        // Rules that were asked and not charged reported on the state before.
        let last = one.answers.len() - 1;
        one.answers[last].1 = returned;
    }
}

/// Decides by the failure policies. What one key was charged in this process is taken back if another denies.
fn without_redis(
    keys: &[KeyParts<'_>],
    error: &Error,
    now: Option<Tick>,
) -> Result<Answers, Error> {
    let each = keys.iter().map(|key| key.fall_back(error, now));
    let mut decided = each.collect::<Result<Vec<_>, _>>()?;
    if !decided.iter().all(|(answers, _)| all_allow(answers)) {
        for (key, (answers, sum)) in keys.iter().zip(&mut decided) {
            key.uncharge(answers, sum, now);
        }
    }
    Ok(decided.into_iter().flat_map(|(answers, _)| answers).collect())
}

/// One key's part, whatever its rule. Times are in Redis's ticks where they are plain numbers.
trait Joint: Send + Sync {
    fn key(&self) -> &Key;
    fn store(&self) -> &RedisStore;
    fn cost(&self) -> Cost;
    /// Returns the time that the question names.
    fn time(&self) -> Option<Tick>;
    /// Prepares for a decision at a given time.
    fn begin(&mut self, now: Option<Tick>) -> Result<(), Error>;
    /// Returns whether its rule charges at a time what it allows.
    fn charges(&self, now: i64) -> bool;
    /// The same, at a time in the caller's ticks.
    fn charges_outside(&self, now: Option<Tick>) -> bool;
    /// Charges a cost to this process's share as well: see [`RedisStore::charge_share`].
    fn charge_share(&self, cost: Cost, now: Option<Tick>)
    -> Result<Option<ShareCharge<'_>>, Timed>;
    /// Charges the units that the client used in this process while Redis was unavailable.
    fn give_in(&self, now: Option<Tick>, deadline: Instant) -> Reply<'_, ()>;
    /// Returns whether its rule allows a cost to a key with this value.
    fn agrees(&self, value: &[u8], now: i64, cost: Cost) -> Result<bool, Error>;
    /// Returns the decision of a step that changes nothing.
    fn report(&self, value: &[u8], now: i64, cost: Cost, go: bool) -> Result<Timed, Error>;
    /// Brings a value under its rule, as a check does first.
    fn bring(&self, value: Vec<u8>, now: i64) -> Result<Vec<u8>, Error>;
    /// Charges a cost if all agree: the value to write, which is the same if nothing changes, the decision, and the
    /// receipt of the charge.
    fn charge(
        &self,
        value: &[u8],
        now: i64,
        cost: Cost,
        go: bool,
    ) -> Result<(Write, Timed, Receipt), Error>;
    /// Returns the policy whose script decides on its cost, if there is one.
    fn scripted(&self) -> Option<&Prepared>;
    /// Reads its decision from what a script decided.
    fn answer(&self, decided: &DecidedPart, now: i64, go: bool) -> Result<Timed, Error>;
    /// Checks it as if nothing else were asked for, by its failure policy if Redis cannot.
    fn check_alone(&self, now: Option<Tick>) -> Reply<'_, Timed>;
    /// Checks it in Redis; with the receipt of the charge.
    fn reserve(&self, given: Option<i64>, deadline: Instant) -> Reply<'_, (Timed, Receipt)>;
    /// Returns a charge that was made at a time, as far as it still counts. It has a time budget of its own.
    fn give_back(
        &self,
        cost: Cost,
        receipt: Receipt,
        charged_at: Tick,
        now: Option<Tick>,
    ) -> Reply<'static, Timed>;
    fn fall_back(&self, error: Error, op: Op, now: Option<Tick>) -> Result<Timed, Error>;
    /// Takes back a charge that falling back has made in this process.
    fn uncharge(&self, cost: Cost, now: Option<Tick>) -> Decision;
    /// Reports the decision to the limiter's observer.
    fn observe(&self, decision: &Decision, at: Tick);
}

struct Asking<'a, R: Rules + 'a, S, O>
where
    R::Rule: Shareable,
{
    limiter: &'a RateLimiter<R, S, O>,
    store: &'a RedisStore,
    rule: R::Chosen<'a>,
    judge: <R::Rule as Shareable>::Judge,
    client: Box<[u8]>,
    key: Key,
    cost: Cost,
    /// The time that the question names.
    at: Option<Tick>,
}

type State<R> = <<<R as Rules>::Rule as Shareable>::Judge as Judge>::Rule;

impl<R, S, O> Asking<'_, R, S, O>
where
    R: Rules + Sync,
    R::Rule: Shareable,
    S: Store<R::Rule> + Sync,
    O: Observer,
{
    /// Reads a value; an absent key is new.
    fn read(&self, value: &[u8], now: Tick) -> Result<<State<R> as Algorithm>::State, Error> {
        if value.is_empty() {
            Ok(self.judge.rule().first(now))
        } else {
            self.judge.read(value, now)
        }
    }
}

impl<R, S, O> Joint for Asking<'_, R, S, O>
where
    R: Rules + Sync,
    R::Rule: Shareable,
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
        self.judge = self.rule.judge(self.store, now)?;
        Ok(())
    }

    fn charges(&self, now: i64) -> bool {
        self.judge.rule().charges(Tick(now))
    }

    fn charges_outside(&self, now: Option<Tick>) -> bool {
        self.rule.charges(now.unwrap_or_else(|| Store::<R::Rule>::now(self.store())))
    }

    fn charge_share(
        &self,
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Option<ShareCharge<'_>>, Timed> {
        self.store().charge_share(&*self.rule, &self.client, cost, now)
    }

    fn give_in(&self, now: Option<Tick>, deadline: Instant) -> Reply<'_, ()> {
        Box::pin(self.store().give_in(&*self.rule, &self.client, now, deadline))
    }

    fn agrees(&self, value: &[u8], now: i64, cost: Cost) -> Result<bool, Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        Ok(Part { rule, state: &mut state, op: Op::Check(cost) }.admits(now))
    }

    fn report(&self, value: &[u8], now: i64, cost: Cost, go: bool) -> Result<Timed, Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        let mut part = Part { rule, state: &mut state, op: Op::Check(cost) };
        Ok(self.store().told(part.step::<Timed>(now, go).0))
    }

    fn bring(&self, value: Vec<u8>, now: i64) -> Result<Vec<u8>, Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state = self.read(&value, now)?;
        if !rule.set_back(&state, now) {
            return Ok(value);
        }
        rule.rebase(&mut state, now);
        Ok(self.judge.write(&state))
    }

    fn charge(
        &self,
        value: &[u8],
        now: i64,
        cost: Cost,
        go: bool,
    ) -> Result<(Write, Timed, Receipt), Error> {
        let (rule, now) = (self.judge.rule(), Tick(now));
        let mut state = self.read(value, now)?;
        let before = if value.is_empty() { self.judge.write(&state) } else { value.to_vec() };
        let (timed, receipt) = if go {
            tallygate::reserve(rule, &mut state, now, cost)
        } else {
            let mut part = Part { rule, state: &mut state, op: Op::Check(cost) };
            (part.step::<Timed>(now, false).0, Receipt::Nothing)
        };
        let write = match cost {
            0 => None,
            _ => changed(&self.judge, &state, &before).and_then(|mut writes| writes.pop()),
        };
        let write = write.unwrap_or_else(|| {
            let fresh_at = rule.fresh_at(&state).map(|fresh| fresh.0);
            Write { value: value.to_vec(), fresh_at }
        });
        Ok((write, self.store().told(timed), receipt))
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

    fn check_alone(&self, now: Option<Tick>) -> Reply<'_, Timed> {
        let op = Op::Check(self.cost);
        Box::pin(self.store().decide_any(&*self.rule, &self.client, op, now))
    }

    fn reserve(&self, given: Option<i64>, deadline: Instant) -> Reply<'_, (Timed, Receipt)> {
        Box::pin(async move {
            let redis = self.store().redis();
            let (timed, receipt) =
                reserve_in(redis, &self.judge, &self.key, self.cost, given, deadline).await?;
            Ok((self.store().told(timed), receipt))
        })
    }

    fn give_back(
        &self,
        cost: Cost,
        receipt: Receipt,
        charged_at: Tick,
        now: Option<Tick>,
    ) -> Reply<'static, Timed> {
        let (store, judge, key) = (self.store().clone(), self.judge.clone(), self.key.clone());
        Box::pin(async move {
            let number = store.in_redis(charged_at).0.saturating_sub(1);
            let what = Lowering::Settle { change: -i128::from(cost), receipt: &receipt, number };
            let (redis, given) = (store.redis(), now.map(|now| store.in_redis(now).0));
            // It takes two round trips, and the caller does not wait for all of this.
            let deadline = Instant::now() + 4 * redis.budget();
            let returned = lower(redis, &judge, &key, &what, given, deadline).await;
            let timed = match returned {
                // The client was reset: the charge is gone with everything else.
                Err(Error::Settle(_)) => {
                    return store.ask(&judge, &key, Op::Peek(0), now, deadline).await;
                }
                returned => returned?,
            };
            Ok(store.told(timed))
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

impl fmt::Debug for JointAsk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Place::Memory(ask) => ask.fmt(f),
            Place::Redis(ask) => {
                f.debug_struct("JointAsk").field("cost", &ask.part.cost()).finish_non_exhaustive()
            }
        }
    }
}
