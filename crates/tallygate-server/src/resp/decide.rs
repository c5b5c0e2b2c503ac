//! The commands that decide: redis-cell's `CL.THROTTLE`, and `TALLYGATE.*` for the policies of the configuration.

use std::ops::RangeInclusive;
use std::pin::Pin;
use std::sync::Arc;

use tallygate::{Cost, Decision, Ticks};

use super::parse::Arguments;
use super::reply::{Output, Protocol, Quoted};
use crate::gate::{Answer, Ask, AskError, Asked, Gate, ThrottleArguments, Verb};
use crate::traces;

/// How a command was carried out.
pub(super) enum Ran {
    /// Its reply is written.
    Done,
    /// Its reply comes, as bytes.
    Later(Pin<Box<dyn Future<Output = Vec<u8>> + Send>>),
}

/// The greatest number an argument may be: RESP has no greater integers.
const MAX_NUMBER: u64 = i64::MAX as u64;
/// The longest period in seconds whose nanoseconds can be counted: 292 years.
const MAX_PERIOD_S: u64 = MAX_NUMBER / NANOS_PER_SECOND;
/// The longest name of a policy or a tier that is looked up, in bytes.
const MAX_NAME: usize = 255;

const NANOS_PER_SECOND: u64 = 1_000_000_000;
const NANOS_PER_MILLISECOND: u64 = 1_000_000;

/// `CL.THROTTLE key max_burst count period [quantity]`
pub(super) fn throttle(gate: &Arc<Gate>, words: Arguments<'_>, out: &mut Output) -> Ran {
    let (key, arguments, quantity) = match throttle_arguments(words) {
        Ok(read) => read,
        Err(mistake) => return mistake.told(out),
    };
    match gate.throttle(key, arguments, quantity) {
        Err(error) => {
            out.error("ERR", error);
            Ran::Done
        }
        Ok(asked) => told(asked, out, write_throttled),
    }
}

/// Says which client a command will be about, if it decides.
pub(super) fn foresee(gate: &Gate, words: Arguments<'_>) {
    let is = |name: &[u8]| words.name().eq_ignore_ascii_case(name);
    match (words.at(1), words.at(2)) {
        (Some(key), Some(_)) if is(b"CL.THROTTLE") => gate.foresee_throttle(key),
        (Some(policy), Some(key)) if is(b"TG.CHECK") => {
            if let Ok(policy) = std::str::from_utf8(policy) {
                gate.foresee(policy, key);
            }
        }
        _ => {}
    }
}

fn throttle_arguments(
    words: Arguments<'_>,
) -> Result<(&[u8], ThrottleArguments, Cost), Mistake<'_>> {
    let (Some(key), Some(max_burst), Some(count), Some(period), 5..=6) =
        (words.at(1), words.at(2), words.at(3), words.at(4), words.len())
    else {
        return Err(Mistake::Usage("CL.THROTTLE key max_burst count period [quantity]"));
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

/// `TG.CHECK policy key [COST n] [TIER name]` and its kin.
pub(super) fn ask(gate: &Arc<Gate>, verb: Verb, words: Arguments<'_>, out: &mut Output) -> Ran {
    match question(verb, words) {
        Ok(ask) => told(gate.ask(verb, ask), out, |Answer { decision, .. }, out| {
            write_decision(&decision, out);
        }),
        Err(mistake) => mistake.told(out),
    }
}

fn question(verb: Verb, words: Arguments<'_>) -> Result<Ask<'_>, Mistake<'_>> {
    let usage = Mistake::Usage(match verb {
        Verb::Check => "TG.CHECK policy key [COST n] [TIER name]",
        Verb::Peek => "TG.PEEK policy key [COST n] [TIER name]",
        Verb::Refund => "TG.REFUND policy key n",
        Verb::Reset => "TG.RESET policy key",
    });
    let (Some(policy), Some(key)) = (words.at(1), words.at(2)) else { return Err(usage) };
    let mut ask = Ask { policy: name("policy", policy)?, key, cost: None, tier: None };
    match (verb, words.at(3)) {
        (Verb::Refund, Some(cost)) if words.len() == 4 => {
            ask.cost = Some(number("n", cost, 0..=MAX_NUMBER)?);
        }
        (Verb::Refund, _) | (Verb::Reset, Some(_)) => return Err(usage),
        (Verb::Reset, None) => {}
        (Verb::Check | Verb::Peek, _) => {
            let mut options = words.from(3);
            while let Some(option) = options.next() {
                match (option, options.next()) {
                    (option, Some(cost))
                        if option.eq_ignore_ascii_case(b"COST") && ask.cost.is_none() =>
                    {
                        ask.cost = Some(number("COST", cost, 0..=MAX_NUMBER)?);
                    }
                    (option, Some(tier))
                        if option.eq_ignore_ascii_case(b"TIER") && ask.tier.is_none() =>
                    {
                        ask.tier = Some(name("tier", tier)?);
                    }
                    _ => return Err(usage),
                }
            }
        }
    }
    Ok(ask)
}

/// Writes an answer, now or when it is there.
fn told<T: 'static>(asked: Asked<T>, out: &mut Output, write: fn(T, &mut Output)) -> Ran {
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

/// Five integers, as redis-cell has them. Seconds are rounded up: nobody is told to come back too early.
fn write_throttled(decision: Decision, out: &mut Output) {
    traces::decided("CL.THROTTLE", &decision);
    let seconds = |span: Ticks| span.0.div_ceil(NANOS_PER_SECOND);
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

/// Six numbers in RESP2; in RESP3 with their names. Milliseconds are rounded up.
fn write_decision(decision: &Decision, out: &mut Output) {
    let milliseconds = |span: Ticks| span.0.div_ceil(NANOS_PER_MILLISECOND);
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

/// What is wrong with a call.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Mistake<'a> {
    Usage(&'static str),
    Number { what: &'static str, found: &'a [u8], range: RangeInclusive<u64> },
    Name { what: &'static str, found: &'a [u8] },
}

impl Mistake<'_> {
    fn told(self, out: &mut Output) -> Ran {
        match self {
            Self::Usage(usage) => {
                out.error("ERR", format_args!("wrong arguments; use {usage}"));
            }
            Self::Number { what, found, range } => {
                let (found, least, most) = (Quoted(found), range.start(), range.end());
                let use_ = format_args!("use a whole number from {least} to {most}");
                out.error("ERR", format_args!("{what} is {found}; {use_}"));
            }
            Self::Name { what, found } => {
                out.error("ERR", format_args!("no {what} is named {}", Quoted(found)));
            }
        }
        Ran::Done
    }
}

/// A whole number in digits and nothing else: no sign, no space, no exponent.
fn number<'a>(
    what: &'static str,
    found: &'a [u8],
    range: RangeInclusive<u64>,
) -> Result<u64, Mistake<'a>> {
    let digits = found.iter().try_fold(0_u64, |value, byte| {
        let digit = byte.is_ascii_digit().then(|| u64::from(byte - b'0'))?;
        value.checked_mul(10)?.checked_add(digit)
    });
    match digits {
        Some(value) if range.contains(&value) && !found.is_empty() => Ok(value),
        _ => Err(Mistake::Number { what, found, range }),
    }
}

/// The name of something in the configuration.
fn name<'a>(what: &'static str, found: &'a [u8]) -> Result<&'a str, Mistake<'a>> {
    let short = (found.len() <= MAX_NAME).then_some(found);
    let text = short.and_then(|found| std::str::from_utf8(found).ok());
    text.ok_or(Mistake::Name { what, found })
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
            refused_by: None,
            shadow_refused_by: None,
            source: tallygate::Source::Store,
        }
    }

    #[test]
    fn seconds_are_rounded_up_and_none_is_told_as_minus_one() {
        const S: u64 = NANOS_PER_SECOND;
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

    #[test]
    fn a14_numbers_are_digits_and_nothing_else() {
        assert_eq!(number("n", b"0", 0..=MAX_NUMBER), Ok(0));
        assert_eq!(number("n", b"9223372036854775807", 0..=MAX_NUMBER), Ok(MAX_NUMBER));
        let refused: [&[u8]; 14] = [
            b"",
            b"-1",
            b"+1",
            b" 1",
            b"1 ",
            b"1e3",
            b"0x10",
            b"1.0",
            b"inf",
            b"nan",
            b"1\0",
            b"\xd9\xa1",
            b"9223372036854775808",
            b"18446744073709551617",
        ];
        for found in refused {
            let mistake = Mistake::Number { what: "n", found, range: 0..=MAX_NUMBER };
            assert_eq!(number("n", found, 0..=MAX_NUMBER), Err(mistake));
        }
        assert!(number("n", b"0", 1..=MAX_NUMBER).is_err());
        assert!(number("n", b"2", 0..=1).is_err());
    }
}
