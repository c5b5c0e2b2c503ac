//! Carries out one operation on a key: by a script, or by compare-and-set where no script can.

use std::time::Instant;

use redis::Value;
use tallygate::algorithm::{
    Algorithm, Answer as _, Op, Outcome, Part, Receipt, Script as Numbers, Timed,
};
use tallygate::reservation::SettleError;
use tallygate::{Cost, Tick};

use super::reply::{ScriptReply, read_reply};
use super::rule::StateCodec;
use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::prepared::{PolicyChange, Prepared};
use crate::script::{Script, double};
use crate::settlement::settle_receipt;
use crate::transaction::{ReadValues, Step, Write, nothing_sent, unexpected};
use crate::value;

/// Decides on a key, in microseconds: by a script, if there is one for it.
pub(crate) async fn decide<J: StateCodec + Clone + 'static>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    op: Op,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    if lowers(codec, op) {
        return lower(redis, codec, key, Lowering::Op(op), given, deadline).await;
    }
    let sent = Instant::now();
    let seen = match run_script(redis, codec, key, op, given, deadline, None).await? {
        ScriptOutcome::Decided(ScriptDecision { timed, .. }) => return Ok(timed),
        ScriptOutcome::Undecided(seen) => seen,
    };
    let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
    if given.is_some() || looks {
        return redis.transact(&[key], given, seen, deadline, |seen| step(codec, op, seen)).await;
    }
    let codec = codec.clone();
    let seen = seen.map(|seen| (seen, sent));
    let (timed, _) =
        redis.commit([key], seen, deadline, move |seen| step(&codec, op, seen)).await?;
    Ok(timed)
}

/// Returns whether an operation lowers the usage of a client in a way that outstanding reservations must know of, or by the
/// script that does that.
pub(crate) fn lowers<J: StateCodec>(codec: &J, op: Op) -> bool {
    let is_refund = || matches!(op, Op::Force(..0));
    matches!(op, Op::Reset) || is_refund() && (codec.has_usage() || codec.returns_form().is_some())
}

/// Decides on an estimate, in microseconds. Returns the receipt of the charge as well.
pub(crate) async fn reserve_in<J: StateCodec>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    estimate: Cost,
    given: Option<i64>,
    deadline: Instant,
) -> Result<(Timed, Receipt), Error> {
    let op = Op::Check(estimate);
    // A script returns only the first shadow limit that would have denied.
    let shadows = |prepared: &Prepared| {
        prepared.policy.limits().iter().filter(|limit| limit.is_shadow()).count()
    };
    let mut seen = None;
    if estimate > 0 && codec.script().is_some_and(|prepared| shadows(prepared) < 2) {
        // A script does not return which units the other policies of the client did not charge; the receipt needs them.
        match run_script(redis, codec, key, op, given, deadline, Some(PolicyChange::LeaveToClient))
            .await?
        {
            ScriptOutcome::Decided(ScriptDecision { timed, state }) => {
                let receipt = match timed.decision.allowed {
                    true => codec.rule().receipt(&state),
                    false => Receipt::Nothing,
                };
                let uncharged = timed.decision.shadow_denied_by;
                return Ok((timed, receipt.without(uncharged.as_slice())));
            }
            ScriptOutcome::Undecided(found) => seen = found,
        }
    }
    let decide = |seen: &ReadValues| {
        let mut receipt = Receipt::Nothing;
        let (writes, timed) = step_by(codec, op, seen, |rule, state, now| {
            let (timed, left) = tallygate::algorithm::reserve(rule, state, now, estimate);
            receipt = left;
            timed
        })?;
        Ok((writes, (timed, receipt)))
    };
    redis.transact(&[key], given, seen, deadline, decide).await
}

/// An operation that lowers the usage of a client, or that depends on earlier such operations.
#[derive(Debug)]
pub(crate) enum Lowering {
    /// A refund or a reset.
    Op(Op),
    /// A settlement.
    Settle { change: i128, receipt: Receipt, number: i64 },
}

/// How long after a reset earlier reservations are void, at least, in microseconds.
const RESET_LIFE: i64 = 86_400_000_000;

/// Carries out an operation on a key and on the record of its returns, in microseconds.
///
/// A script does it in one call, so nothing that changes the key meanwhile is in its way. Where no script can, this
/// process decides together with all other callers: settlements of one client do not race against each other, but only
/// against other processes and against scripts.
pub(crate) async fn lower<J: StateCodec + Clone + 'static>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    what: Lowering,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    let returns = key.of_returns();
    let sent = Instant::now();
    let seen = match run_lowering(redis, codec, [key, &returns], &what, given, deadline).await? {
        LoweringOutcome::Done(timed) => return Ok(timed),
        LoweringOutcome::Undecided(seen) => seen,
    };
    if given.is_some() {
        return lower_alone(redis, codec, key, &what, given, deadline).await;
    }
    let codec = codec.clone();
    let step = move |seen: &ReadValues| step_lowering(&codec, &what, seen);
    let seen = seen.map(|seen| (seen, sent));
    let (timed, _) = redis.commit([key, &returns], seen, deadline, step).await?;
    Ok(timed)
}

/// The outcome of the script that lowers the usage of a key.
enum LoweringOutcome {
    Done(Timed),
    /// There is no script, or it did not decide. It may have returned the values that it read.
    Undecided(Option<ReadValues>),
}

/// Runs the script that settles a reservation or refunds units, if there is one for the policy and the numbers.
async fn run_lowering<J: StateCodec>(
    redis: &Redis,
    codec: &J,
    keys: [&Key; 2],
    what: &Lowering,
    given: Option<i64>,
    deadline: Instant,
) -> Result<LoweringOutcome, Error> {
    let Some(LoweringCall { prepared, script, numbers, terms }) = lowering_call(codec, what, given)
    else {
        return Ok(LoweringOutcome::Undecided(None));
    };
    let time = given.map(|given| given.to_string());
    let mut arguments = vec![&prepared.head[..], &numbers, &terms];
    arguments.extend(time.as_ref().map(String::as_bytes));
    let (now, numbers) = match redis.run(script, &keys, &arguments, deadline).await? {
        Value::Int(-2) => return Err(Error::Settle(SettleError::Reset)),
        Value::Array(reply) => match <[Value; 4]>::try_from(reply) {
            Ok([_, Value::Int(now), Value::BulkString(state), Value::BulkString(returns)]) => {
                let seen = ReadValues { now, values: vec![state, returns] };
                return Ok(LoweringOutcome::Undecided(Some(seen)));
            }
            _ => return Err(unexpected()),
        },
        reply => match read_reply(reply)? {
            ScriptReply::Decided { now, part } => (now, part.numbers),
            _ => return Err(unexpected()),
        },
    };
    if given.is_none() {
        redis.note_server_time(now);
    }
    let state = codec.state_under(prepared.policy.state_from_numbers(&numbers)?);
    let outcome = Outcome::NotCharged(0);
    let timed = Timed::from_outcome(codec.rule(), &state, Tick(now), outcome, None);
    Ok(LoweringOutcome::Done(timed))
}

/// A call of the script that lowers the usage of a key.
struct LoweringCall<'a> {
    prepared: &'a Prepared,
    script: &'a Script,
    numbers: Vec<u8>,
    /// The form of the returns; for a settlement, also the number of the reservation and its receipt.
    terms: Vec<u8>,
}

/// Returns the call for a settlement or a refund, if a script can carry it out.
fn lowering_call<'a, J: StateCodec>(
    codec: &'a J,
    what: &Lowering,
    given: Option<i64>,
) -> Option<LoweringCall<'a>> {
    let prepared = codec.script()?;
    let scripted = prepared.scripted.as_ref()?;
    let script = scripted.lower.as_deref()?;
    let form = codec.returns_form()?;
    let mut terms = vec![form.flag()];
    let change = match what {
        Lowering::Op(Op::Force(change @ ..0)) => change,
        Lowering::Settle { change, receipt, number } => {
            let receipt = receipt.to_numbers(form.policy, form.is_of_client)?;
            let is_exact = |number: &i128| i64::try_from(*number).is_ok_and(Numbers::is_exact);
            let number = i128::from(*number);
            if !is_exact(&number) || !receipt.iter().all(is_exact) {
                return None;
            }
            terms.extend([number].into_iter().chain(receipt).flat_map(double));
            change
        }
        Lowering::Op(_) => return None,
    };
    if !given.is_none_or(Numbers::is_exact) {
        return None;
    }
    let change = i64::try_from((*change).clamp(-MOST, MOST)).ok()?;
    Some(LoweringCall { prepared, script, numbers: scripted.numbers(change), terms })
}

/// Does the same as [`lower`] for one caller: at a given time, or by a rule that cannot be shared.
pub(crate) async fn lower_alone<J: StateCodec>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    what: &Lowering,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    let returns = key.of_returns();
    let mut was_read = false;
    let step = |seen: &ReadValues| {
        was_read = true;
        step_lowering(codec, what, seen)
    };
    let result = redis.transact(&[key, &returns], given, None, deadline, step).await;
    result.map_err(|error| if was_read { error } else { nothing_sent(error) })
}

fn step_lowering<J: StateCodec>(
    codec: &J,
    what: &Lowering,
    seen: &ReadValues,
) -> Result<Step<Timed>, Error> {
    let scale = i64::try_from(codec.scale()).unwrap_or(i64::MAX);
    let (rule, now) = (codec.rule(), Tick(seen.now.saturating_mul(scale)));
    let before = &seen.values[0];
    let mut state = if before.is_empty() { rule.initial(now) } else { codec.read(before, now)? };
    let mut returns = value::read_returns(&seen.values[1], now);
    let fresh = rule.fresh_at(&state).unwrap_or(Tick(i64::MAX));
    let timed = match what {
        Lowering::Op(op) => {
            let (timed, _) = Part { rule, state: &mut state, op: *op }.step::<Timed>(now, true);
            timed
        }
        Lowering::Settle { number, .. } if returns.voids(*number) => {
            return Err(Error::Settle(SettleError::Reset));
        }
        Lowering::Settle { change, receipt, number } => {
            let reservation = (receipt, *number);
            settle_receipt(rule, (&mut state, &mut returns), now, *change, reservation).0
        }
    };
    match what {
        Lowering::Op(Op::Reset) => {
            let until = Tick(now.0.saturating_add(RESET_LIFE.saturating_mul(scale)));
            returns.reset(now.0, until.max(fresh));
        }
        Lowering::Op(Op::Force(..0)) => {
            returns.note(now.0, rule.receipt(&state), rule.last_change(&state), fresh);
        }
        Lowering::Settle { change: 0, .. } => return Ok((None, timed)),
        Lowering::Op(_) | Lowering::Settle { .. } => {}
    }
    let fresh_at = rule.fresh_at(&state).map(|fresh| in_micros(fresh, scale));
    let writes = vec![
        Write { value: codec.write(&state), fresh_at },
        Write {
            value: value::write_returns(&returns, codec.returns_form()),
            fresh_at: Some(in_micros(returns.until(), scale)),
        },
    ];
    Ok((Some(writes), timed))
}

/// Converts a time to microseconds, rounded up: a key may expire a little late, never early.
const fn in_micros(time: Tick, scale: i64) -> i64 {
    time.0.div_euclid(scale).saturating_add((scale > 1) as i64)
}

/// The outcome of running a script.
enum ScriptOutcome<S> {
    Decided(ScriptDecision<S>),
    /// The script did not decide. It may have returned the values that it read.
    Undecided(Option<ReadValues>),
}

/// The decision of a script, and the state after it.
struct ScriptDecision<S> {
    timed: Timed,
    state: S,
}

/// Runs the script of an operation, if there is one. `policy_change` overrides what it does with a state of another
/// policy.
async fn run_script<J: StateCodec>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    op: Op,
    given: Option<i64>,
    deadline: Instant,
    policy_change: Option<PolicyChange>,
) -> Result<ScriptOutcome<<J::Rule as Algorithm>::State>, Error> {
    let Some(ScriptCall { prepared, script, numbers }) = call_of(codec, op, given) else {
        return Ok(ScriptOutcome::Undecided(None));
    };
    let time = given.map(|given| given.to_string());
    let policy_change = policy_change.unwrap_or(prepared.policy_change);
    let mut arguments = vec![&prepared.head[..], &numbers, policy_change.argument()];
    arguments.extend(time.as_ref().map(String::as_bytes));
    let reply = redis.run(script, &[key], &arguments, deadline).await?;
    let (now, part, state) = match read_reply(reply)? {
        ScriptReply::Decided { now, part } => {
            let state = codec.state_under(prepared.policy.state_from_numbers(&part.numbers)?);
            (now, part, state)
        }
        ScriptReply::SeveralPolicies { now, part, value } => {
            (now, part, codec.read(&value, Tick(now))?)
        }
        ScriptReply::Undecided(value) => return Ok(ScriptOutcome::Undecided(Some(value))),
    };
    if given.is_none() {
        redis.note_server_time(now);
    }
    let outcome = match op {
        Op::Check(cost) if part.is_allowed => Outcome::Charged(cost),
        Op::Check(cost) => Outcome::Denied(cost),
        _ => Outcome::NotCharged(0),
    };
    let timed = Timed::from_outcome(codec.rule(), &state, Tick(now), outcome, part.shadow);
    Ok(ScriptOutcome::Decided(ScriptDecision { timed, state }))
}

/// No state of a scripted policy is larger than this.
const MOST: i128 = 1 << 52;

/// A call of a script.
struct ScriptCall<'a> {
    prepared: &'a Prepared,
    script: &'a Script,
    numbers: Vec<u8>,
}

/// Returns the call for an operation, if a script can carry it out.
fn call_of<J: StateCodec>(codec: &J, op: Op, given: Option<i64>) -> Option<ScriptCall<'_>> {
    let prepared = codec.script()?;
    let scripted = prepared.scripted.as_ref()?;
    if !given.is_none_or(Numbers::is_exact) {
        return None;
    }
    let (script, amount) = match op {
        Op::Check(cost @ 1..) => {
            (&scripted.check, i64::try_from(cost).ok().filter(|cost| Numbers::is_exact(*cost))?)
        }
        Op::Force(amount) if amount != 0 => {
            let amount = i64::try_from(amount.clamp(-MOST, MOST)).ok()?;
            (scripted.force.as_ref()?, amount)
        }
        _ => return None,
    };
    Some(ScriptCall { prepared, script, numbers: scripted.numbers(amount) })
}

/// Decides in this process on values that were read.
pub(crate) fn step<J: StateCodec>(
    codec: &J,
    op: Op,
    seen: &ReadValues,
) -> Result<Step<Timed>, Error> {
    step_by(codec, op, seen, |rule, state, now| {
        let mut part = Part { rule, state, op };
        let agrees = part.allows(now);
        part.step::<Timed>(now, agrees).0
    })
}

/// Applies a function to the state in values that were read.
fn step_by<J: StateCodec>(
    codec: &J,
    op: Op,
    seen: &ReadValues,
    carry_out: impl FnOnce(&J::Rule, &mut <J::Rule as Algorithm>::State, Tick) -> Timed,
) -> Result<Step<Timed>, Error> {
    let scale = i64::try_from(codec.scale()).unwrap_or(i64::MAX);
    let (rule, now) = (codec.rule(), Tick(seen.now.saturating_mul(scale)));
    let before = &seen.values[0];
    let mut state = if before.is_empty() { rule.initial(now) } else { codec.read(before, now)? };
    let is_check = matches!(op, Op::Check(_));
    let as_new = (before.is_empty() && is_check).then(|| codec.write(&state));
    let answer = carry_out(rule, &mut state, now);
    let looks = matches!(op, Op::Peek(_) | Op::Check(0) | Op::Force(0));
    // A denial of a new client writes nothing.
    let unchanged = as_new.as_ref().filter(|_| !answer.decision.allowed).unwrap_or(before);
    Ok((if looks { None } else { changed(codec, &state, unchanged) }, answer))
}

/// Returns the write for a state, if it differs from the value before.
pub(crate) fn changed<J: StateCodec>(
    codec: &J,
    state: &<J::Rule as Algorithm>::State,
    before: &[u8],
) -> Option<Vec<Write>> {
    let value = codec.write(state);
    let scale = i64::try_from(codec.scale()).unwrap_or(i64::MAX);
    let fresh_at = codec.rule().fresh_at(state);
    let fresh_at = fresh_at.map(|fresh| in_micros(fresh, scale));
    (value != before).then(|| vec![Write { value, fresh_at }])
}

#[cfg(test)]
mod tests {
    use tallygate::policy::{Anchor, LimitBuilder};
    use tallygate::tiers::ClientRule;
    use tallygate::{Kind, Policy, Ticks};
    use tallygate_testkit::servers::{Flavor, Server};

    use super::*;
    use crate::store::{RedisRule, RedisStore};
    use crate::{OnFailure, Options};

    /// How many operations of each kind there were.
    #[derive(Debug, Default)]
    struct Counted {
        settled: u32,
        refunded: u32,
        void: u32,
        /// Settlements and refunds that lowered the steps of earlier ones.
        after_returns: u32,
        undecided: u32,
    }

    /// A random history of reservations, settlements, refunds and resets of one client.
    struct History<'a> {
        redis: &'a Redis,
        store: &'a RedisStore,
        random: fastrand::Rng,
        counted: Counted,
    }

    impl History<'_> {
        /// Lowers the usage by the script, and compares the result with that of the core.
        async fn lower<J: StateCodec>(&mut self, codec: &J, key: &Key, what: Lowering, now: i64) {
            let (redis, given) = (self.redis, Some(now));
            let returns = key.of_returns();
            let (keys, deadline) = ([key, &returns], redis.deadline());
            let seen = redis.read(&keys, given, deadline).await.unwrap();
            let expected = step_lowering(codec, &what, &seen);
            let script = run_lowering(redis, codec, keys, &what, given, deadline).await;
            let context = || format!("{what:?} at {now} on {:?}", self.store);
            let (writes, timed) = match (expected, script) {
                (Err(Error::Settle(expected)), Err(Error::Settle(found))) => {
                    assert_eq!(found, expected);
                    self.counted.void += 1;
                    return;
                }
                (Ok(expected), Ok(LoweringOutcome::Done(found))) => {
                    assert_eq!(found, expected.1, "{}", context());
                    expected
                }
                (expected, Ok(LoweringOutcome::Undecided(_))) => {
                    self.counted.undecided += 1;
                    let found = lower_alone(redis, codec, key, &what, given, deadline).await;
                    assert_eq!(found, expected.map(|(_, timed)| timed), "{}", context());
                    return;
                }
                (expected, script) => {
                    panic!("{}: {expected:?} {:?}", context(), script.err())
                }
            };
            let after = redis.read(&keys, given, deadline).await.unwrap().values;
            let Some(writes) = writes else {
                assert_eq!(after, seen.values, "{}", context());
                return;
            };
            let at = Tick(now);
            let state = |value: &[u8]| codec.write(&codec.read(value, at).unwrap());
            assert_eq!(state(&after[0]), state(&writes[0].value), "{} {timed:?}", context());
            let record = |value: &[u8]| value::read_returns(value, at);
            assert_eq!(
                record(&after[1]),
                record(&writes[1].value),
                "{} after {:?}",
                context(),
                record(&seen.values[1])
            );
            if !matches!(what, Lowering::Settle { change: 0.., .. }) {
                // Both write the same bytes, so that the next script can read what this process wrote.
                assert_eq!(after[1], writes[1].value, "{}", context());
            }
            self.counted.after_returns += u32::from(!seen.values[1].is_empty());
            match what {
                Lowering::Settle { .. } => self.counted.settled += 1,
                Lowering::Op(_) => self.counted.refunded += 1,
            }
        }

        async fn run<R: RedisRule>(&mut self, round: usize, rule: impl Fn(Policy) -> R) {
            let key = self.store.key(format!("client {round}").as_bytes()).unwrap();
            let mut policy = policy(&mut self.random);
            let mut now = 1_700_000_000_000_000 + self.random.i64(0..1_000_000);
            let mut open: Vec<(Cost, Receipt, i64)> = Vec::new();
            for _ in 0..60 {
                let window = i64::try_from(policy.limits()[0].numbers().window.0).unwrap();
                now += match self.random.u8(0..16) {
                    0..6 => 0,
                    6 => -self.random.i64(0..=window / 2),
                    7 => self.random.i64(0..=2 * window),
                    _ => self.random.i64(0..=window / 8 + 1),
                };
                if self.random.u8(0..240) == 0 {
                    policy = self::policy(&mut self.random);
                }
                let rule = rule(policy.clone());
                let codec = rule.codec(self.store, None).unwrap();
                let deadline = self.redis.deadline();
                match self.random.u8(0..16) {
                    0 => {
                        let amount = i128::from(self.random.u64(1..12));
                        let what = Lowering::Op(Op::Force(-amount));
                        self.lower(&codec, &key, what, now).await;
                    }
                    1 if self.random.u8(0..4) == 0 => {
                        let what = Lowering::Op(Op::Reset);
                        let given = Some(now);
                        let _ = lower_alone(self.redis, &codec, &key, &what, given, deadline)
                            .await
                            .unwrap();
                    }
                    2..8 if !open.is_empty() => {
                        let reserved = open.swap_remove(self.random.usize(0..open.len()));
                        let (cost, receipt, number) = reserved;
                        let actual = self.random.u64(0..=cost + cost / 2 + 1);
                        let change = i128::from(actual) - i128::from(cost);
                        let what = Lowering::Settle { change, receipt, number };
                        self.lower(&codec, &key, what, now).await;
                    }
                    _ => {
                        let cost = self.random.u64(1..8);
                        let reserving =
                            reserve_in(self.redis, &codec, &key, cost, Some(now), deadline);
                        let (timed, receipt) = reserving.await.unwrap();
                        if timed.decision.allowed {
                            open.push((cost, receipt, timed.at.0.saturating_sub(1)));
                        }
                    }
                }
            }
        }
    }

    /// Returns a policy of one to three limits, without options.
    fn policy(random: &mut fastrand::Rng) -> Policy {
        let limit = |random: &mut fastrand::Rng| -> LimitBuilder {
            let kind = Kind::ALL[random.usize(0..Kind::ALL.len())];
            let window = if random.bool() { 1..4000 } else { 1000..3_000_000_000 };
            let mut limit = Policy::of(kind, random.u64(1..60)).per(Ticks(random.u64(window)));
            if kind == Kind::FixedWindow && random.bool() {
                limit = limit.anchor(Anchor::FirstRequest);
            }
            if random.u8(0..4) == 0 {
                limit = limit.debt(random.u64(0..9));
            }
            if kind.is_bucket() { limit.burst(random.u64(1..200)) } else { limit }
        };
        let several = if random.u8(0..4) == 0 { random.usize(2..4) } else { 1 };
        let limits = (0..several).map(|place| limit(random).named(format!("limit {place}")));
        Policy::all_of("a policy", limits.collect::<Vec<_>>()).unwrap()
    }

    /// Settles and refunds by the script and by the core, in random histories: every kind of limit, clocks that go back a
    /// little, resets, and policies that change.
    async fn compare(flavor: Flavor) {
        let server = Server::start(flavor);
        let options = Options::default().budget(std::time::Duration::from_secs(20));
        let redis = Redis::with(&server.url(), options).unwrap();
        let store = redis.store("api").on_failure(OnFailure::Deny).in_ticks();
        let random = fastrand::Rng::with_seed(11);
        let counted = Counted::default();
        let mut history = History { redis: &redis, store: &store, random, counted };
        let rounds = std::env::var("TALLYGATE_SETTLEMENTS").map_or(150, |n| n.parse().unwrap());
        for round in 0..rounds {
            match round % 2 {
                0 => history.run(round, |policy| policy).await,
                _ => history.run(round, ClientRule::of).await,
            }
        }
        let Counted { settled, refunded, void, after_returns, undecided } = history.counted;
        assert!(settled > 900 && refunded > 200 && void > 5, "{:?}", history.counted);
        assert!(after_returns > 700 && undecided < settled / 3, "{:?}", history.counted);
        assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
    }

    #[tokio::test]
    async fn redis_settles_and_refunds_as_the_core_does() {
        compare(Flavor::Redis).await;
    }

    #[tokio::test]
    async fn valkey_settles_and_refunds_as_the_core_does() {
        compare(Flavor::Valkey).await;
    }
}
