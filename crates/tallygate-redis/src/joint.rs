//! Decides over several keys at once (this user, this address, this route): all are charged, or none is.
//!
//! If one server has all keys and, in a cluster, one slot has them (one slot has all policies of a client), the decision is
//! one atomic step: one script, or compare-and-set if no script can decide on the stored values. A single key is a plain
//! check. A key may occur several times: its costs are added up, and each rule must allow the sum. Compare-and-set decides
//! on a key that occurs under different rules.
//!
//! Keys in different slots are charged in order, and their charges are returned if a later key denies. So the decision
//! never allows too much, but another caller may be denied in the meantime. A check has one time budget: charges that
//! are not returned by then are returned in the background, and the caller gets its denial in time. If that fails as well,
//! the units stay charged until the policy has earned them back; [`Counts::unreturned`](crate::Counts::unreturned) counts
//! them. If a server does not answer, the failure settings decide on its own keys only.

mod in_order;
mod key_parts;
mod one_step;
mod part;

use std::fmt;

use tallygate::algorithm::Timed;
use tallygate::joint::JointDecision;
use tallygate::merge::{group_by_key, merge};
use tallygate::observer::Observer;
use tallygate::store::{InvalidAsk, Store};
use tallygate::tiers::{ClientRule, RuleSource};
use tallygate::{Ask, Decision, RateLimiter, Tick, Tiers};

use self::in_order::{charge_in_order, decide_without_redis};
use self::key_parts::{Answers, KeyParts, all_allow};
use self::one_step::decide_in_one_step;
use self::part::{JointPart, RedisPart};
use crate::any::AnyLimiter;
use crate::error::Error;
use crate::failure::ShareCharge;
use crate::store::{RedisRule, RedisStore};

/// A request to one limiter as a part of a joint decision: see [`check_all`].
#[must_use = "only `check_all` asks it"]
pub struct JointAsk<'a>(PartKind<'a>);

/// A part, by the store that has its key.
enum PartKind<'a> {
    Memory(tallygate::joint::JointAsk<'a>),
    Redis(Box<dyn JointPart + 'a>),
}

impl<'a> JointAsk<'a> {
    /// Makes a request to a limiter a part of a joint decision.
    ///
    /// # Errors
    /// Fails if the key is too long, the tier is unknown, or a window of the policy is not a whole number of microseconds.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn of<'k, R, O>(
        limiter: &'a RateLimiter<R, RedisStore, O>,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, Error>
    where
        R: RuleSource + Sync,
        R::Rule: RedisRule,
        O: Observer,
    {
        let ask = ask.into();
        let rule = limiter.rule(&ask).map_err(InvalidAsk::from)?;
        redis_part(limiter, limiter.store(), rule, ask)
    }

    /// Makes a request to a limiter on a store that was chosen at run time a part of a joint decision.
    ///
    /// # Errors
    /// Fails as [`of`](Self::of) does.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn of_any<'k, O: Observer>(
        limiter: &'a AnyLimiter<O>,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, Error> {
        let ask = ask.into();
        let rule = limiter.rule(&ask).map_err(InvalidAsk::from)?;
        Self::of_any_in(limiter, rule, ask)
    }

    /// Makes a request a part of a joint decision under a rule of the caller's choice: for limits that come with a
    /// request. The usage of the key counts for this rule and for the rules of the limiter.
    ///
    /// # Errors
    /// Fails if the key is too long, or a window of the rule is not a whole number of microseconds.
    #[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
    pub fn of_any_under<'k, O: Observer>(
        limiter: &'a AnyLimiter<O>,
        rule: ClientRule,
        ask: impl Into<Ask<'k>>,
    ) -> Result<Self, Error> {
        Self::of_any_in(limiter, rule.into(), ask.into())
    }

    fn of_any_in<O: Observer>(
        limiter: &'a AnyLimiter<O>,
        rule: <Tiers as RuleSource>::Ref<'a>,
        ask: Ask<'_>,
    ) -> Result<Self, Error> {
        match (limiter.store().memory(), limiter.store().redis()) {
            (_, Some(store)) => redis_part(limiter, store, rule, ask),
            (Some(store), _) => {
                use tallygate::joint::JointAsk;
                let part = JointAsk::in_store_under(limiter, store, rule, ask)?;
                Ok(Self(PartKind::Memory(part)))
            }
            (None, None) => unreachable!("a store is in memory or in Redis"),
        }
    }
}

fn redis_part<'a, R, S, O>(
    limiter: &'a RateLimiter<R, S, O>,
    store: &'a RedisStore,
    rule: R::Ref<'a>,
    ask: Ask<'_>,
) -> Result<JointAsk<'a>, Error>
where
    R: RuleSource + Sync,
    R::Rule: RedisRule,
    S: Store<R::Rule> + Sync,
    O: Observer,
{
    let codec = rule.codec(store, ask.at)?;
    let key = store.key(ask.key)?;
    let (client, cost) = (ask.key.into(), ask.cost);
    let part = RedisPart { limiter, store, rule, codec, client, key, cost, at: ask.at };
    Ok(JointAsk(PartKind::Redis(Box::new(part))))
}

/// Decides over several keys at once: all are charged, or none is.
///
/// If one key occurs several times, its costs are added up, and each rule that it is checked under must allow the sum. If a
/// server does not answer, the failure settings of its own keys decide on them; the limits on other servers hold.
///
/// Keys in different slots of a cluster are checked in order until one denies, so the first part that denied is the only one
/// that is known to.
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
/// let joint = check_all([JointAsk::of(&users, "alice")?, JointAsk::of(&addresses, "192.0.2.1")?]).await?;
/// assert!(joint.decision.allowed);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// # })?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Fails if a window of a policy is not a whole number of microseconds, if a store in memory is full, or if some keys are in
/// memory and others in Redis.
#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
pub async fn check_all<'a>(
    asks: impl IntoIterator<Item = JointAsk<'a>>,
) -> Result<JointDecision, Error> {
    let (mut in_memory, mut in_redis) = (Vec::new(), Vec::new());
    for JointAsk(part) in asks {
        match part {
            PartKind::Memory(part) => in_memory.push(part),
            PartKind::Redis(part) => in_redis.push(part),
        }
    }
    match (in_memory.is_empty(), in_redis.is_empty()) {
        (true, _) => check_in_redis(in_redis).await,
        (false, true) => Ok(tallygate::check_all(in_memory)?),
        (false, false) => Err(Error::MixedStores),
    }
}

async fn check_in_redis(mut parts: Vec<Box<dyn JointPart + '_>>) -> Result<JointDecision, Error> {
    // All servers share one clock, so a time that one request names is the time of all requests.
    let now = parts.iter().find_map(|part| part.time());
    if now.is_some() {
        for part in &mut parts {
            part.begin(now)?;
        }
    }
    let groups = group_by_key(
        parts.iter().map(|part| (part.store().redis().identity(), &part.key().name[..])),
    );
    let keys: Vec<KeyParts<'_>> = groups
        .into_iter()
        .map(|group| KeyParts { parts: group.into_iter().map(|i| (i, &*parts[i])).collect() })
        .collect();
    let mut answers = decide(&keys, now).await?;
    answers.sort_unstable_by_key(|(index, _)| *index);
    let denial = answers.iter().find(|(_, timed)| !timed.decision.allowed);
    let denied_ask = denial.map(|(index, _)| *index);
    let denial = denial.map(|(_, timed)| &timed.decision);
    for (index, timed) in &answers {
        let decision = Decision { allowed: denial.is_none(), ..timed.decision };
        parts[*index].observe(&decision, timed.at);
    }
    let decisions: Vec<Decision> = answers.iter().map(|(_, timed)| timed.decision).collect();
    let decision = merge(&decisions, denial);
    let mut each = vec![None; parts.len()];
    for (index, timed) in answers {
        each[index] = Some(timed);
    }
    Ok(JointDecision { decision, denied_ask, parts: each, places: Vec::new() })
}

/// Decides on all keys. Returns the decisions of all parts, or of the parts up to the first denial.
async fn decide(keys: &[KeyParts<'_>], now: Option<Tick>) -> Result<Answers, Error> {
    let first = match keys {
        [] => return Ok(Vec::new()),
        [KeyParts { parts }] if parts.len() == 1 => {
            let (index, part) = parts[0];
            return Ok(vec![(index, part.check_alone(now).await?)]);
        }
        [first, ..] => first,
    };
    let is_one_step = keys.iter().all(|key| {
        key.redis().is(first.redis())
            && (!first.redis().is_cluster() || key.key().slot == first.key().slot)
    });
    let mut shares = match charge_shares(keys, now) {
        Ok(shares) => shares,
        Err(denial) => return Ok(vec![denial]),
    };
    let decided = match is_one_step {
        true => decide_in_one_step(keys, now).await,
        false => charge_in_order(keys, &mut shares, now).await,
    };
    match decided {
        Ok(answers) => {
            if all_allow(&answers) {
                shares.into_iter().flatten().for_each(ShareCharge::keep);
            }
            Ok(answers)
        }
        Err(error) => {
            drop(shares);
            decide_without_redis(keys, &error, now)
        }
    }
}

/// Charges each key to this process's share as well, while other processes may not know that Redis is available again. Returns
/// the first denial if a share does not allow its cost.
fn charge_shares<'a>(
    keys: &'a [KeyParts<'_>],
    now: Option<Tick>,
) -> Result<Vec<Option<ShareCharge<'a>>>, (usize, Timed)> {
    let mut shares = Vec::with_capacity(keys.len());
    for key in keys {
        let sum = key.sum(|part| part.charges_for_caller(now));
        let (index, part) = key.parts[sum.charger];
        shares.push(part.charge_share(sum.cost(), now).map_err(|denial| (index, denial))?);
    }
    Ok(shares)
}

impl fmt::Debug for JointAsk<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            PartKind::Memory(part) => part.fmt(f),
            PartKind::Redis(part) => {
                f.debug_struct("JointAsk").field("cost", &part.cost()).finish_non_exhaustive()
            }
        }
    }
}
