//! Carries out one operation on a key: by a script, or here by compare-and-set where no script does.

use std::time::Instant;

use tallygate::{
    Algorithm, Answer as _, Cost, Op, Outcome, Part, Receipt, Script as Numbers, SettleError, Tick,
    Timed,
};

use super::reply::{Scripts, read_reply};
use super::rule::Judge;
use super::{Earlier, Prepared};
use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::script::Script;
use crate::transaction::{Seen, Step, Write};
use crate::value;

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
