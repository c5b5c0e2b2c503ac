//! Carries out one operation on a key: by a script, or by compare-and-set where no script can.

use std::time::Instant;

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
use crate::script::Script;
use crate::settlement::settle_receipt;
use crate::transaction::{ReadValues, Step, Write, nothing_sent};
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

/// Returns whether an operation lowers the usage of a client in a way that outstanding reservations must know of.
pub(crate) fn lowers<J: StateCodec>(codec: &J, op: Op) -> bool {
    matches!(op, Op::Reset) || matches!(op, Op::Force(..0)) && codec.has_usage()
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
pub(crate) enum Lowering {
    /// A refund or a reset.
    Op(Op),
    /// A settlement.
    Settle { change: i128, receipt: Receipt, number: i64 },
}

/// How long after a reset earlier reservations are void, at least, in microseconds.
const RESET_LIFE: i64 = 86_400_000_000;

/// Carries out an operation on a key and on the record of its returns, in microseconds, together with all other callers
/// in this process. So any number of settlements of one client at the same time are written, and none of them loses a
/// race against the others.
pub(crate) async fn lower<J: StateCodec + Clone + 'static>(
    redis: &Redis,
    codec: &J,
    key: &Key,
    what: Lowering,
    given: Option<i64>,
    deadline: Instant,
) -> Result<Timed, Error> {
    if given.is_some() {
        return lower_alone(redis, codec, key, &what, given, deadline).await;
    }
    let codec = codec.clone();
    let step = move |seen: &ReadValues| step_lowering(&codec, &what, seen);
    let (timed, _) = redis.commit([key, &key.of_returns()], None, deadline, step).await?;
    Ok(timed)
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
            value: value::write_returns(&returns),
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

/// A call of a script.
struct ScriptCall<'a> {
    prepared: &'a Prepared,
    script: &'a Script,
    numbers: Vec<u8>,
}

/// Returns the call for an operation, if a script can carry it out.
fn call_of<J: StateCodec>(codec: &J, op: Op, given: Option<i64>) -> Option<ScriptCall<'_>> {
    // No state is larger than this.
    const MOST: i64 = 1 << 52;
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
            let amount = i64::try_from(amount.clamp(-i128::from(MOST), MOST.into())).ok()?;
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
