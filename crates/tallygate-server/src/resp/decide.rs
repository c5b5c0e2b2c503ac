//! The commands that decide: redis-cell's `CL.THROTTLE`, and `TG.CHECK` and others for the policies of the configuration.

use std::sync::Arc;

use tallygate::{Cost, Decision, Ticks};

use super::arguments::{MAX_NUMBER, Mistake, name, number};
use super::commands::{Outcome, Ran};
use super::parse::Arguments;
use super::reply::{Output, Protocol};
use crate::gate::{Answer, Ask, AskError, Asked, Gate, ThrottleArguments, Verb};

/// The longest period in seconds whose nanoseconds can be counted: 292 years.
const MAX_PERIOD_S: u64 = MAX_NUMBER / Ticks::PER_SECOND;

/// Carries out `CL.THROTTLE`.
pub(super) fn throttle<'a>(
    gate: &Arc<Gate>,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let (key, arguments, quantity) = throttle_arguments(words)?;
    match gate.throttle(key, arguments, quantity) {
        Err(error) => {
            out.error("ERR", error);
            Ok(Ran::Done)
        }
        Ok(asked) => Ok(reply(asked, out, write_throttled)),
    }
}

/// Loads the memory of the key of a `CL.THROTTLE` that will be carried out soon.
pub(super) fn prefetch_throttle(gate: &Gate, words: Arguments<'_>) {
    if let Some(key) = words.at(1) {
        gate.foresee_throttle(key);
    }
}

fn throttle_arguments(
    words: Arguments<'_>,
) -> Result<(&[u8], ThrottleArguments, Cost), Mistake<'_>> {
    let (Some(key), Some(max_burst), Some(count), Some(period)) =
        (words.at(1), words.at(2), words.at(3), words.at(4))
    else {
        return Err(Mistake::Usage);
    };
    let arguments = ThrottleArguments {
        max_burst: number("max_burst", max_burst, 0..=MAX_NUMBER)?,
        count: number("count", count, 1..=MAX_NUMBER)?,
        period_s: number("period", period, 1..=MAX_PERIOD_S)?,
    };
    let quantity =
        words.at(5).map_or(Ok(1), |quantity| number("quantity", quantity, 0..=MAX_NUMBER))?;
    Ok((key, arguments, quantity))
}

/// Carries out `TG.CHECK`.
pub(super) fn check<'a>(gate: &Arc<Gate>, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
    Ok(decide(gate, Verb::Check, with_options(words)?, out))
}

/// Loads the memory of the key of a `TG.CHECK` that will be carried out soon.
pub(super) fn prefetch_check(gate: &Gate, words: Arguments<'_>) {
    if let (Some(policy), Some(key)) = (words.at(1), words.at(2))
        && let Ok(policy) = std::str::from_utf8(policy)
    {
        gate.foresee(policy, key);
    }
}

/// Carries out `TG.PEEK`.
pub(super) fn peek<'a>(gate: &Arc<Gate>, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
    Ok(decide(gate, Verb::Peek, with_options(words)?, out))
}

/// Carries out `TG.REFUND`.
pub(super) fn refund<'a>(gate: &Arc<Gate>, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
    let units = words.at(3).ok_or(Mistake::Usage)?;
    let cost = Some(number("n", units, 0..=MAX_NUMBER)?);
    Ok(decide(gate, Verb::Refund, Ask { cost, ..policy_and_key(words)? }, out))
}

/// Carries out `TG.RESET`.
pub(super) fn reset<'a>(gate: &Arc<Gate>, words: Arguments<'a>, out: &mut Output) -> Outcome<'a> {
    Ok(decide(gate, Verb::Reset, policy_and_key(words)?, out))
}

fn policy_and_key(words: Arguments<'_>) -> Result<Ask<'_>, Mistake<'_>> {
    let (Some(policy), Some(key)) = (words.at(1), words.at(2)) else { return Err(Mistake::Usage) };
    Ok(Ask { policy: name("policy", policy)?, key, cost: None, tier: None, shows_access: false })
}

/// Reads `policy key [COST n] [TIER name]`.
fn with_options(words: Arguments<'_>) -> Result<Ask<'_>, Mistake<'_>> {
    let mut ask = policy_and_key(words)?;
    let mut options = words.from(3);
    while let Some(option) = options.next() {
        let value = options.next().ok_or(Mistake::Usage)?;
        if option.eq_ignore_ascii_case(b"COST") && ask.cost.is_none() {
            ask.cost = Some(number("COST", value, 0..=MAX_NUMBER)?);
        } else if option.eq_ignore_ascii_case(b"TIER") && ask.tier.is_none() {
            ask.tier = Some(name("tier", value)?);
        } else {
            return Err(Mistake::Usage);
        }
    }
    Ok(ask)
}

fn decide(gate: &Arc<Gate>, verb: Verb, ask: Ask<'_>, out: &mut Output) -> Ran {
    let write = |answer: Answer, out: &mut Output| write_decision(&answer.decided.decision, out);
    reply(gate.ask(verb, ask), out, write)
}

/// Writes an answer, now or when the store has decided.
fn reply<T: 'static>(asked: Asked<T>, out: &mut Output, write: fn(T, &mut Output)) -> Ran {
    let finish = move |answer: Result<T, AskError>, out: &mut Output| match answer {
        Ok(answer) => write(answer, out),
        Err(error) => out.error("ERR", error),
    };
    match asked {
        Asked::Now(answer) => {
            finish(answer, out);
            Ran::Done
        }
        Asked::Later(answer) => {
            let mut out = Output::new(out.protocol);
            Ran::Later(Box::pin(async move {
                finish(answer.await, &mut out);
                out.bytes
            }))
        }
    }
}

/// Writes five integers, as redis-cell does. Seconds are rounded up, so that no client comes back too early.
fn write_throttled(decision: Decision, out: &mut Output) {
    let seconds = |span: Ticks| span.0.div_ceil(Ticks::PER_SECOND);
    out.array(5);
    out.integer((!decision.allowed).into());
    out.count(decision.limit);
    out.count(decision.remaining);
    match decision.retry_after {
        Some(wait) if !decision.allowed => out.count(seconds(wait)),
        _ => out.integer(-1),
    }
    out.count(seconds(decision.reset_after));
}

/// Writes six numbers in RESP2; in RESP3 with their names. Milliseconds are rounded up.
fn write_decision(decision: &Decision, out: &mut Output) {
    let milliseconds = |span: Ticks| span.0.div_ceil(Ticks::PER_MILLISECOND);
    let name = |name: &str, out: &mut Output| {
        if out.protocol == Protocol::Resp3 {
            out.bulk(name);
        }
    };
    match out.protocol {
        Protocol::Resp2 => out.array(6),
        Protocol::Resp3 => out.map(6),
    }
    name("allowed", out);
    out.boolean(decision.allowed);
    name("limit", out);
    out.count(decision.limit);
    name("remaining", out);
    out.count(decision.remaining);
    name("retry_after_ms", out);
    match decision.retry_after {
        Some(wait) => out.count(milliseconds(wait)),
        None => out.integer(-1),
    }
    name("reset_after_ms", out);
    out.count(milliseconds(decision.reset_after));
    name("delay_ms", out);
    out.count(milliseconds(decision.delay));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decision() -> Decision {
        Decision {
            allowed: false,
            limit: 5,
            remaining: 0,
            retry_after: Some(Ticks(1)),
            reset_after: Ticks(1),
            delay: Ticks::ZERO,
            scarcest: None,
            refused_by: None,
            shadow_refused_by: None,
            source: tallygate::Source::Store,
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_none_is_told_as_minus_one() {
        const S: u64 = Ticks::PER_SECOND;
        // (allowed, retry_after, reset_after) in nanoseconds, and what redis-cell's clients are told.
        let table = [
            (true, Some(0), 0, ":0 :-1 :0"),
            (true, Some(0), 1, ":0 :-1 :1"),
            (false, Some(0), S, ":1 :0 :1"),
            (false, Some(1), S + 1, ":1 :1 :2"),
            (false, Some(S - 1), 60 * S - 1, ":1 :1 :60"),
            (false, Some(S), 60 * S, ":1 :1 :60"),
            (false, Some(S + 1), 60 * S + 1, ":1 :2 :61"),
            (false, Some(u64::MAX), u64::MAX, ":1 :18446744074 :18446744074"),
            (false, None, 7 * S, ":1 :-1 :7"),
        ];
        for (allowed, retry_after, reset_after, expected) in table {
            let retry_after = retry_after.map(Ticks);
            let reset_after = Ticks(reset_after);
            let mut out = Output::default();
            write_throttled(Decision { allowed, retry_after, reset_after, ..decision() }, &mut out);
            let text = String::from_utf8(out.bytes).expect("text");
            let told: Vec<_> = text.split_terminator("\r\n").collect();
            let [array, limited, limit, remaining, retry, reset] = told[..] else {
                panic!("{text:?}")
            };
            assert_eq!((array, limit, remaining), ("*5", ":5", ":0"));
            assert_eq!(format!("{limited} {retry} {reset}"), expected);
        }
    }

    #[test]
    fn milliseconds_are_rounded_up_and_never_is_minus_one() {
        let told = |decision| {
            let mut out = Output::default();
            write_decision(&decision, &mut out);
            String::from_utf8(out.bytes).expect("text").replace("\r\n", " ")
        };
        let decision = Decision { delay: Ticks(1_000_001), ..decision() };
        assert_eq!(told(decision), "*6 :0 :5 :0 :1 :1 :2 ");
        let never = Decision { retry_after: None, limit: u64::MAX, ..decision };
        assert_eq!(told(never), "*6 :0 :9223372036854775807 :0 :-1 :1 :2 ");
    }
}
