//! Reads the replies of check scripts, and makes the call that decides on several requests.

use std::time::Instant;

use redis::Value;
use tallygate::Cost;
use tallygate::store::Bounds;

use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::key_broker::CostDecision;
use crate::prepared::Prepared;
use crate::script::{Script, double};
use crate::transaction::{ReadValues, unexpected};
use crate::value;

/// A script's decision on one part of a request.
pub(crate) struct DecidedPart {
    pub(crate) is_allowed: bool,
    pub(crate) shadow: Option<usize>,
    pub(crate) numbers: Vec<i128>,
    /// The bounds of the other policies that the key was checked under.
    pub(crate) bounds: Bounds,
}

impl DecidedPart {
    pub(super) fn checked(self, prepared: &Prepared) -> Result<CostDecision, Error> {
        let Self { is_allowed, shadow, numbers, bounds } = self;
        let state = prepared.policy.state_from_numbers(&numbers)?;
        Ok(CostDecision { is_allowed, state, shadow, bounds })
    }
}

/// Reads the decisions of a script: the time, and all parts in order. Only the parts of keys under several policies have
/// bounds.
fn read_parts(bytes: &[u8], have_bounds: bool) -> Result<(i64, Vec<DecidedPart>), Error> {
    let numbers = value::numbers(bytes)?;
    let mut numbers = Numbers(&numbers);
    let now = i64::try_from(numbers.next()?).map_err(|_| unexpected())?;
    let mut parts = Vec::new();
    while !numbers.0.is_empty() {
        let count = numbers.next()?;
        let bounds = if have_bounds { numbers.next()? } else { 0 };
        let (is_allowed, shadow) = (numbers.next()? == 1, numbers.next()?);
        parts.push(DecidedPart {
            is_allowed,
            shadow: usize::try_from(shadow).ok(),
            numbers: numbers.take(count)?.into(),
            bounds: Bounds::of_numbers(numbers.take(5 * bounds)?).ok_or_else(unexpected)?,
        });
    }
    Ok((now, parts))
}

/// The numbers of a reply that were not read yet.
struct Numbers<'a>(&'a [i128]);

impl<'a> Numbers<'a> {
    fn next(&mut self) -> Result<i128, Error> {
        Ok(self.take(1)?[0])
    }

    fn take(&mut self, count: i128) -> Result<&'a [i128], Error> {
        let count = usize::try_from(count).map_err(|_| unexpected())?;
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(unexpected)?;
        self.0 = rest;
        Ok(taken)
    }
}

impl Redis {
    /// Decides on requests over some keys, one after the other, each of them all or nothing. A request is a list of
    /// indices of keys, each with a cost. Returns the time and all parts in order; `None` if no script can decide on
    /// the values, in which case nothing is changed.
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
            let policy_change = prepared.policy_change.argument();
            arguments.extend([&prepared.head[..], scripted.constants(), policy_change]);
        }
        let names: Vec<&Key> = keys.iter().map(|(key, _)| *key).collect();
        let window = (keys.len() > 1).then_some(&self.inner().several_keys);
        let places = keys.iter().map(|(_, prepared)| prepared.places()).sum();
        if window.is_some_and(|window| !window.has_room(places)) {
            self.inner().counters.note_queue();
        }
        let place = match window {
            Some(window) => Some(window.enter_with(places, deadline).await.ok_or_else(|| {
                Error::Overloaded {
                    reason: "too many decisions over several keys are in flight".into(),
                    sent: false,
                }
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
            // The server may still carry it out, so its place stays taken for another budget.
            let budget = self.inner().options.budget;
            tokio::spawn(async move {
                tokio::time::sleep(budget).await;
                drop(place);
            });
        }
        let (now, parts) = match reply? {
            Value::BulkString(bytes) => read_parts(&bytes, false)?,
            Value::Array(reply) => match &reply[..] {
                [Value::Int(1), _, Value::BulkString(parts), _] => read_parts(parts, true)?,
                _ => return Ok(None),
            },
            _ => return Err(unexpected()),
        };
        if given.is_none() {
            self.note_server_time(now);
        }
        Ok(Some((now, parts)))
    }
}

/// The reply of a script.
pub(super) enum ScriptReply {
    Decided {
        now: i64,
        part: DecidedPart,
    },
    /// It decided on a key that was written under another policy, and wrote this value.
    SeveralPolicies {
        now: i64,
        part: DecidedPart,
        value: Vec<u8>,
    },
    /// It could not decide on this value.
    Undecided(ReadValues),
}

pub(super) fn read_reply(reply: Value) -> Result<ScriptReply, Error> {
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
            Ok(ScriptReply::Decided { now: i64::try_from(now).map_err(|_| unexpected())?, part })
        }
        Value::Array(reply) => match <[Value; 4]>::try_from(reply) {
            Ok([Value::Int(1), _, Value::BulkString(parts), Value::BulkString(value)]) => {
                let (now, mut parts) = read_parts(&parts, true)?;
                let part = parts.pop().ok_or_else(unexpected)?;
                Ok(ScriptReply::SeveralPolicies { now, part, value })
            }
            Ok(_) => Err(unexpected()),
            Err(mut left) => match (left.pop(), left.pop()) {
                (Some(Value::BulkString(value)), Some(Value::Int(now))) => {
                    Ok(ScriptReply::Undecided(ReadValues { now, values: vec![value] }))
                }
                _ => Err(unexpected()),
            },
        },
        _ => Err(unexpected()),
    }
}
