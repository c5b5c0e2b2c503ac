//! What the scripts that check reply, and the call that decides on several requests.

use std::time::Instant;

use redis::Value;
use tallygate::{Bounds, Cost};

use super::Prepared;
use crate::client::Redis;
use crate::desk::Checked;
use crate::error::Error;
use crate::key::Key;
use crate::script::{Script, double};
use crate::transaction::{Seen, unexpected};
use crate::value;

/// What a script decided on one part of a request.
pub(crate) struct DecidedPart {
    pub(crate) is_allowed: bool,
    pub(crate) shadow: Option<usize>,
    pub(crate) numbers: Vec<i128>,
    /// What else it has to fit into, where the key was asked for under several policies.
    pub(crate) bounds: Bounds,
}

impl DecidedPart {
    pub(super) fn checked(self, prepared: &Prepared) -> Result<Checked, Error> {
        let Self { is_allowed, shadow, numbers, bounds } = self;
        let state = prepared.policy.state_of_numbers(&numbers)?;
        Ok(Checked { is_allowed, state, shadow, bounds })
    }
}

/// Reads what a script decided on keys under several policies: the time, and all parts in order.
fn read_parts(bytes: &[u8]) -> Result<(i64, Vec<DecidedPart>), Error> {
    let numbers = value::numbers(bytes)?;
    let [now, rest @ ..] = &numbers[..] else { return Err(unexpected()) };
    let now = i64::try_from(*now).map_err(|_| unexpected())?;
    let (mut rest, mut parts) = (rest, Vec::new());
    while let [count, bounds, is_allowed, shadow, more @ ..] = rest {
        let count = usize::try_from(*count).map_err(|_| unexpected())?;
        let (numbers, more) = more.split_at_checked(count).ok_or_else(unexpected)?;
        let count = usize::try_from(*bounds).map_err(|_| unexpected())?;
        let (bounds, more) = more.split_at_checked(5 * count).ok_or_else(unexpected)?;
        parts.push(DecidedPart {
            is_allowed: *is_allowed == 1,
            shadow: usize::try_from(*shadow).ok(),
            numbers: numbers.into(),
            bounds: Bounds::of_numbers(bounds).ok_or_else(unexpected)?,
        });
        rest = more;
    }
    Ok((now, parts))
}

impl Redis {
    /// Decides on requests over some keys, one after the other, each of them all or nothing. A request is a list of
    /// places among the keys, each with a cost. Returns the time and all parts in order; `None` if no script decides on
    /// what the keys hold: nothing was done then.
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
            let earlier = prepared.earlier.argument();
            arguments.extend([&prepared.head[..], scripted.constants(), earlier]);
        }
        let names: Vec<&Key> = keys.iter().map(|(key, _)| *key).collect();
        let window = (keys.len() > 1).then_some(&self.inner().several_keys);
        if window.is_some_and(|window| window.is_full()) {
            self.inner().counters.note_queue();
        }
        let place = match window {
            Some(window) => Some(window.enter(deadline).await.ok_or_else(|| {
                Error::Overloaded { reason: "many decide on several keys".into(), sent: false }
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
            // The server may not have carried it out yet, so the place stays taken for another budget.
            let budget = self.inner().options.budget;
            tokio::spawn(async move {
                tokio::time::sleep(budget).await;
                drop(place);
            });
        }
        let bytes = match reply? {
            Value::BulkString(bytes) => bytes,
            Value::Array(reply) => {
                let [Value::Int(1), Value::Int(now), Value::BulkString(parts), _] = &reply[..]
                else {
                    return Ok(None);
                };
                if given.is_none() {
                    self.heard(*now);
                }
                return read_parts(parts).map(Some);
            }
            _ => return Err(unexpected()),
        };
        let numbers = value::numbers(&bytes)?;
        let [now, rest @ ..] = &numbers[..] else { return Err(unexpected()) };
        let now = i64::try_from(*now).map_err(|_| unexpected())?;
        if given.is_none() {
            self.heard(now);
        }
        let (mut rest, mut parts) = (rest, Vec::new());
        while let [count, is_allowed, shadow, more @ ..] = rest {
            let count = usize::try_from(*count).map_err(|_| unexpected())?;
            let (numbers, more) = more.split_at_checked(count).ok_or_else(unexpected)?;
            parts.push(DecidedPart {
                is_allowed: *is_allowed == 1,
                shadow: usize::try_from(*shadow).ok(),
                numbers: numbers.into(),
                bounds: Bounds::default(),
            });
            rest = more;
        }
        Ok(Some((now, parts)))
    }
}

/// What a script replied.
pub(super) enum Scripts {
    Decided {
        now: i64,
        part: DecidedPart,
    },
    /// It decided on a key that was left under another policy, and left this value.
    Several {
        now: i64,
        part: DecidedPart,
        value: Vec<u8>,
    },
    /// It could not decide on what it found.
    Left(Seen),
}

pub(super) fn read_reply(reply: Value) -> Result<Scripts, Error> {
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
            Ok(Scripts::Decided { now: i64::try_from(now).map_err(|_| unexpected())?, part })
        }
        Value::Array(reply) => match <[Value; 4]>::try_from(reply) {
            Ok([Value::Int(1), _, Value::BulkString(parts), Value::BulkString(value)]) => {
                let (now, mut parts) = read_parts(&parts)?;
                let part = parts.pop().ok_or_else(unexpected)?;
                Ok(Scripts::Several { now, part, value })
            }
            Ok(_) => Err(unexpected()),
            Err(mut left) => match (left.pop(), left.pop()) {
                (Some(Value::BulkString(value)), Some(Value::Int(now))) => {
                    Ok(Scripts::Left(Seen { now, values: vec![value] }))
                }
                _ => Err(unexpected()),
            },
        },
        _ => Err(unexpected()),
    }
}
