//! The commands that decide: redis-cell's `CL.THROTTLE`, and Tallygate's `TG.CHECK`, `TG.PEEK`, `TG.REFUND`, `TG.RESET`,
//! `TG.CHECKALL`, `TG.RESERVE`, `TG.SETTLE` and `TG.CANCEL`.
//!
//! Each command has a function that runs it and a function that only validates it, for `MULTI`. Both use the same
//! parser. A decision is six integers, the same in RESP2 and RESP3. `TG.CHECKV` and `TG.PEEKV` reply with names.

use futures_util::FutureExt as _;
use tallygate::{Cost, Decision, Ticks};

use super::arguments::{MAX_NUMBER, Mistake, name, number};
use super::commands::{CommandResult, Outcome};
use super::parse::Arguments;
use super::reply::Output;
use super::session::Session;
use crate::gate::{
    self, Answer, Gate, GateError, GateReply, GateRequest, ReservationId, SettleFailure,
    ThrottleArguments, Verb,
};

/// The longest period in seconds whose nanoseconds can be counted: 292 years.
const MAX_PERIOD_S: u64 = MAX_NUMBER / Ticks::PER_SECOND;

/// Whether the arguments of a command are valid.
pub(super) type Validity<'a> = Result<(), Mistake<'a>>;

/// Runs `CL.THROTTLE`.
pub(super) fn throttle<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let (key, arguments, quantity) = throttle_arguments(words)?;
    Ok(reply(session.gate().throttle(key, arguments, quantity)?, out, write_throttled))
}

pub(super) fn validate_throttle<'a>(session: &Session, words: Arguments<'a>) -> Validity<'a> {
    let (_, arguments, _) = throttle_arguments(words)?;
    Ok(session.gate().validate_throttle(arguments)?)
}

/// Loads the memory of the key of a `CL.THROTTLE` that will run soon.
pub(super) fn prefetch_throttle(gate: &Gate, words: Arguments<'_>) {
    if let Some(key) = words.at(1) {
        gate.prefetch_throttle(key);
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

/// Runs `TG.CHECK`.
pub(super) fn check<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(decide(session, Verb::Check, with_options(words)?, out))
}

/// Runs `TG.CHECKV`.
pub(super) fn check_with_names<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(reply(session.gate().ask(Verb::Check, with_options(words)?), out, write_names))
}

/// Runs `TG.PEEK`.
pub(super) fn peek<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(decide(session, Verb::Peek, with_options(words)?, out))
}

/// Runs `TG.PEEKV`.
pub(super) fn peek_with_names<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(reply(session.gate().ask(Verb::Peek, with_options(words)?), out, write_names))
}

pub(super) fn validate_check<'a>(session: &Session, words: Arguments<'a>) -> Validity<'a> {
    validate(session, &with_options(words)?)
}

fn validate<'a>(session: &Session, request: &GateRequest<'_>) -> Validity<'a> {
    session.gate().in_force().find(request)?;
    Ok(())
}

/// Loads the memory of the key of a `TG.CHECK` that will run soon.
pub(super) fn prefetch_check(gate: &Gate, words: Arguments<'_>) {
    if let (Some(policy), Some(key)) = (words.at(1), words.at(2))
        && let Ok(policy) = std::str::from_utf8(policy)
    {
        gate.prefetch(policy, key);
    }
}

/// Runs `TG.REFUND`.
pub(super) fn refund<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(decide(session, Verb::Refund, refund_arguments(words)?, out))
}

pub(super) fn validate_refund<'a>(session: &Session, words: Arguments<'a>) -> Validity<'a> {
    validate(session, &refund_arguments(words)?)
}

fn refund_arguments(words: Arguments<'_>) -> Result<GateRequest<'_>, Mistake<'_>> {
    let units = words.at(3).ok_or(Mistake::Usage)?;
    let cost = Some(number("n", units, 0..=MAX_NUMBER)?);
    Ok(GateRequest { cost, ..policy_and_key(words)? })
}

/// Runs `TG.RESET`.
pub(super) fn reset<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    Ok(decide(session, Verb::Reset, policy_and_key(words)?, out))
}

/// Runs `TG.CHECKALL`: all items are charged, or none is.
pub(super) fn check_all<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let items: Vec<_> = all_arguments(words)?.iter().map(OwnedRequest::of).collect();
    let gate = session.gate().clone();
    Ok(now_or_later(session.gate(), out, async move {
        let items: Vec<_> = items.iter().map(OwnedRequest::ask).collect();
        let policies = gate.in_force();
        let decided = gate.ask_all(&policies.find_all(&items)?).await?;
        Ok::<_, GateError>(move |out: &mut Output| {
            out.array(7);
            write_numbers(&decided.decision, out);
            let denied = decided.denied.and_then(|index| i64::try_from(index).ok());
            out.integer(denied.unwrap_or(-1));
        })
    }))
}

pub(super) fn validate_check_all<'a>(session: &Session, words: Arguments<'a>) -> Validity<'a> {
    session.gate().in_force().find_all(&all_arguments(words)?)?;
    Ok(())
}

/// Reads items that are separated by `AND`.
fn all_arguments(words: Arguments<'_>) -> Result<Vec<GateRequest<'_>>, Mistake<'_>> {
    let (mut items, mut at) = (Vec::new(), 1);
    loop {
        let (ask, next) = item(words, at)?;
        items.push(ask);
        match words.at(next) {
            None => return Ok(items),
            Some(word) if word.eq_ignore_ascii_case(b"AND") => at = next + 1,
            Some(_) => return Err(Mistake::Usage),
        }
    }
}

/// Runs `TG.RESERVE`.
pub(super) fn reserve<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let (ask, ttl_ms) = reserve_arguments(words)?;
    let (ask, gate, owner) = (OwnedRequest::of(&ask), session.gate().clone(), session.owner());
    Ok(now_or_later(session.gate(), out, async move {
        let (answer, reservation) = gate.reserve(ask.ask(), ttl_ms, owner).await?;
        Ok::<_, GateError>(move |out: &mut Output| {
            out.array(7);
            write_numbers(&answer.decision, out);
            match reservation {
                Some(id) => out.bulk(id.to_string()),
                None => out.null(),
            }
        })
    }))
}

pub(super) fn validate_reserve<'a>(session: &Session, words: Arguments<'a>) -> Validity<'a> {
    let (ask, ttl_ms) = reserve_arguments(words)?;
    session.gate().in_force().find_reservation(&ask, ttl_ms)?;
    Ok(())
}

/// Reads `policy key ttl_ms [COST n] [TIER name]`.
fn reserve_arguments(words: Arguments<'_>) -> Result<(GateRequest<'_>, u64), Mistake<'_>> {
    let ttl_ms = number("ttl_ms", words.at(3).ok_or(Mistake::Usage)?, 1..=MAX_NUMBER)?;
    let mut ask = policy_and_key(words)?;
    match options(words, 4, &mut ask)? == words.len() {
        true => Ok((ask, ttl_ms)),
        false => Err(Mistake::Usage),
    }
}

/// Runs `TG.SETTLE`.
pub(super) fn settle<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let (reservation, actual) = settle_arguments(words)?;
    Ok(finish_reservation(session, reservation, actual, out))
}

pub(super) fn validate_settle<'a>(_: &Session, words: Arguments<'a>) -> Validity<'a> {
    settle_arguments(words).map(|_| ())
}

fn settle_arguments(words: Arguments<'_>) -> Result<(&[u8], Cost), Mistake<'_>> {
    let (Some(reservation), Some(actual)) = (words.at(1), words.at(2)) else {
        return Err(Mistake::Usage);
    };
    Ok((reservation, number("actual", actual, 0..=MAX_NUMBER)?))
}

/// Runs `TG.CANCEL`: settles with a cost of 0.
pub(super) fn cancel<'a>(
    session: &mut Session,
    words: Arguments<'a>,
    out: &mut Output,
) -> Outcome<'a> {
    let reservation = words.at(1).ok_or(Mistake::Usage)?;
    Ok(finish_reservation(session, reservation, 0, out))
}

fn finish_reservation(
    session: &Session,
    reservation: &[u8],
    actual: Cost,
    out: &mut Output,
) -> CommandResult {
    let (id, gate) = (ReservationId::parse(reservation), session.gate().clone());
    now_or_later(session.gate(), out, async move {
        let id = id.ok_or(SettleFailure::Unknown)?;
        let (_, decision) = gate.settle(id, actual).await?;
        Ok::<_, SettleFailure>(move |out: &mut Output| {
            out.array(6);
            write_numbers(&decision, out);
        })
    })
}

fn policy_and_key(words: Arguments<'_>) -> Result<GateRequest<'_>, Mistake<'_>> {
    positional(words, 1)
}

/// Reads a policy and a key.
fn positional(words: Arguments<'_>, at: usize) -> Result<GateRequest<'_>, Mistake<'_>> {
    let (Some(policy), Some(key)) = (words.at(at), words.at(at + 1)) else {
        return Err(Mistake::Usage);
    };
    Ok(GateRequest { policy: name("policy", policy)?, key, cost: None, tier: None })
}

/// Reads `policy key [COST n] [TIER name]` to the end of the command.
fn with_options(words: Arguments<'_>) -> Result<GateRequest<'_>, Mistake<'_>> {
    let (ask, end) = item(words, 1)?;
    match words.at(end) {
        None => Ok(ask),
        Some(found) => Err(Mistake::Unexpected { found }),
    }
}

/// Reads `policy key [COST n] [TIER name]`, and returns the index of the next word.
fn item(words: Arguments<'_>, at: usize) -> Result<(GateRequest<'_>, usize), Mistake<'_>> {
    let mut ask = positional(words, at)?;
    let next = options(words, at + 2, &mut ask)?;
    Ok((ask, next))
}

/// Reads `[COST n] [TIER name]`, and returns the index of the next word.
fn options<'a>(
    words: Arguments<'a>,
    mut at: usize,
    ask: &mut GateRequest<'a>,
) -> Result<usize, Mistake<'a>> {
    while let Some(option) = words.at(at) {
        let value = || words.at(at + 1).ok_or(Mistake::Usage);
        if option.eq_ignore_ascii_case(b"COST") && ask.cost.is_none() {
            ask.cost = Some(number("COST", value()?, 0..=MAX_NUMBER)?);
        } else if option.eq_ignore_ascii_case(b"TIER") && ask.tier.is_none() {
            ask.tier = Some(name("tier", value()?)?);
        } else {
            break;
        }
        at += 2;
    }
    Ok(at)
}

/// A request to the gate that outlives its command.
struct OwnedRequest {
    policy: Box<str>,
    key: Box<[u8]>,
    cost: Option<Cost>,
    tier: Option<Box<str>>,
}

impl OwnedRequest {
    fn of(ask: &GateRequest<'_>) -> Self {
        let GateRequest { policy, key, cost, tier, .. } = *ask;
        Self { policy: policy.into(), key: key.into(), cost, tier: tier.map(Box::from) }
    }

    fn ask(&self) -> GateRequest<'_> {
        let (policy, key, cost) = (&*self.policy, &*self.key, self.cost);
        GateRequest { policy, key, cost, tier: self.tier.as_deref() }
    }
}

/// Sends a request to the gate, and writes the six numbers of its decision.
fn decide(session: &Session, verb: Verb, ask: GateRequest<'_>, out: &mut Output) -> CommandResult {
    let asked = session.gate().ask_with(verb, ask, |_, decided| decided.decision);
    reply(asked, out, write_decision)
}

/// Writes an answer, now or when the store has decided.
fn reply<T: 'static>(
    asked: GateReply<T>,
    out: &mut Output,
    write: fn(&T, &mut Output),
) -> CommandResult {
    let finish = move |answer: Result<T, GateError>, out: &mut Output| match answer {
        Ok(answer) => write(&answer, out),
        Err(error) => out.error("ERR", error),
    };
    match asked {
        GateReply::Now(answer) => {
            finish(answer, out);
            CommandResult::Done
        }
        GateReply::Later(answer) => {
            let mut out = Output::new(out.protocol);
            CommandResult::Later(Box::pin(async move {
                finish(answer.await, &mut out);
                out.bytes
            }))
        }
    }
}

/// Writes the reply of a future: at once if the store is in memory, and else when it is ready.
fn now_or_later<E: std::fmt::Display, W: FnOnce(&mut Output)>(
    gate: &Gate,
    out: &mut Output,
    deciding: impl Future<Output = Result<W, E>> + Send + 'static,
) -> CommandResult {
    let finish = |decided: Result<W, E>, out: &mut Output| match decided {
        Ok(write) => write(out),
        Err(error) => out.error("ERR", error),
    };
    if gate.stores().redis().is_none() {
        let decided = deciding.now_or_never();
        finish(decided.unwrap_or_else(|| unreachable!("memory answers at once")), out);
        return CommandResult::Done;
    }
    let mut out = Output::new(out.protocol);
    CommandResult::Later(Box::pin(async move {
        finish(deciding.await, &mut out);
        out.bytes
    }))
}

/// Writes five integers, as redis-cell does. Seconds are rounded up, so that clients do not retry too early.
fn write_throttled(decision: &Decision, out: &mut Output) {
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

fn write_decision(decision: &Decision, out: &mut Output) {
    out.array(6);
    write_numbers(decision, out);
}

/// Writes the six numbers of a decision, the same in RESP2 and RESP3. Milliseconds are rounded up.
fn write_numbers(decision: &Decision, out: &mut Output) {
    out.integer(decision.allowed.into());
    out.count(decision.limit);
    out.count(decision.remaining);
    match gate::retry_after_ms(decision) {
        Some(wait) => out.count(wait),
        None => out.integer(-1),
    }
    out.count(gate::milliseconds(decision.reset_after));
    out.count(gate::milliseconds(decision.delay));
}

/// Writes a decision with names, as the JSON of HTTP has them. What does not apply is null.
fn write_names(answer: &Answer, out: &mut Output) {
    let Answer { entry, decision, .. } = answer;
    let is_unlimited = decision.is_unlimited();
    let number = |name: &str, value: Option<u64>, out: &mut Output| {
        out.bulk(name);
        match value {
            Some(value) => out.count(value),
            None => out.null(),
        }
    };
    let text = |name: &str, value: Option<&str>, out: &mut Output| {
        out.bulk(name);
        match value {
            Some(value) => out.bulk(value),
            None => out.null(),
        }
    };
    out.map(11);
    number("allowed", Some(decision.allowed.into()), out);
    text("policy", Some(&*entry.name), out);
    number("limit", Some(decision.limit).filter(|_| !is_unlimited), out);
    number("remaining", Some(decision.remaining).filter(|_| !is_unlimited), out);
    number("retry_after_ms", gate::retry_after_ms(decision), out);
    number("reset_after_ms", Some(gate::milliseconds(decision.reset_after)), out);
    number("delay_ms", Some(gate::milliseconds(decision.delay)), out);
    number("window_ms", gate::window_ms(decision), out);
    text("source", Some(decision.source.name()), out);
    text("denied_by", answer.denied_by(), out);
    text("shadow_denied_by", answer.shadow_denied_by(), out);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resp::reply::Protocol;

    fn decision() -> Decision {
        Decision {
            allowed: false,
            limit: 5,
            remaining: 0,
            retry_after: Some(Ticks(1)),
            reset_after: Ticks(1),
            delay: Ticks::ZERO,
            scarcest: None,
            denied_by: None,
            shadow_denied_by: None,
            quota: None,
            source: tallygate::Source::Store,
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_never_is_minus_one() {
        const S: u64 = Ticks::PER_SECOND;
        // (allowed, retry_after, reset_after) in nanoseconds, and the reply in the format of redis-cell.
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
            write_throttled(
                &Decision { allowed, retry_after, reset_after, ..decision() },
                &mut out,
            );
            let text = String::from_utf8(out.bytes).expect("text");
            let lines: Vec<_> = text.split_terminator("\r\n").collect();
            let [array, limited, limit, remaining, retry, reset] = lines[..] else {
                panic!("{text:?}")
            };
            assert_eq!((array, limit, remaining), ("*5", ":5", ":0"));
            assert_eq!(format!("{limited} {retry} {reset}"), expected);
        }
    }

    #[test]
    fn milliseconds_are_rounded_up_and_never_is_minus_one() {
        let written = |decision, protocol| {
            let mut out = Output::new(protocol);
            write_numbers(&decision, &mut out);
            String::from_utf8(out.bytes).expect("text").replace("\r\n", " ")
        };
        let decision = Decision { delay: Ticks(1_000_001), ..decision() };
        let never = Decision { retry_after: None, limit: u64::MAX, ..decision };
        let at_once = Decision { retry_after: Some(Ticks::ZERO), ..decision };
        // The reply is the same in both protocols: code that unpacks six numbers must not get six names.
        for protocol in [Protocol::Resp2, Protocol::Resp3] {
            assert_eq!(written(decision, protocol), ":0 :5 :0 :1 :1 :2 ");
            assert_eq!(written(never, protocol), ":0 :9223372036854775807 :0 :-1 :1 :2 ");
            assert_eq!(written(at_once, protocol), ":0 :5 :0 :1 :1 :2 ", "a denial never says now");
        }
    }
}
