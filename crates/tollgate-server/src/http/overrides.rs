//! Overrides at run time: what a single client gets instead of its tier, until it ends or is taken back.
//!
//! They are kept by the server that was told, until it stops; those of the configuration are listed with them.

use std::str::FromStr as _;

use hyper::body::Incoming;
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tollgate::{Access, Kind, MAX_KEY_BYTES, Numbers, Override, Policy, Tick, Ticks};

use super::admin::list;
use super::answer;
use super::body::{self, Text, Whole, field, required};
use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply, questions};
use crate::gate::{AskError, Entry, Gate};

const NANOS_A_MILLI: u64 = 1_000_000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Set<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::access")]
    access: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::algorithm")]
    algorithm: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::limit")]
    limit: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "field::window")]
    window: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::burst")]
    burst: Option<Whole>,
    #[serde(default, deserialize_with = "field::expires_in_ms")]
    expires_in_ms: Option<Whole>,
}

/// Lists, sets and removes overrides, by the method.
pub(super) async fn reply(
    caller: &Caller,
    request: &Parts,
    body: Incoming,
) -> Result<Reply, Problem> {
    let gate = &caller.shared.gate;
    match request.method {
        Method::PUT => set(gate, &body::read(body, caller).await?),
        Method::DELETE => remove(gate, request),
        _ => all(gate, request),
    }
}

fn all(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["policy"])?;
    let entries = match query.text("policy")? {
        Some(name) => vec![gate.policy(questions::known_length(name)?)?],
        None => gate.policies(),
    };
    let mut shown = Vec::new();
    for entry in entries {
        let mut overrides = entry.limiter.overrides();
        overrides.sort_by(|(one, _), (other, _)| one.cmp(other));
        shown.extend(overrides.into_iter().map(|(key, set)| (entry.clone(), key, set)));
    }
    let mut out = br#"{"overrides":"#.to_vec();
    list(&mut out, &shown, |out, (entry, key, set)| write(out, entry, key, set));
    out.push(b'}');
    Ok(answer::json(out))
}

pub(super) fn set(gate: &Gate, body: &[u8]) -> Result<Reply, Problem> {
    let said: Set<'_> = body::parse(body)?;
    let policy = required(said.policy.as_deref(), "policy")?;
    let key = required(said.key.as_deref(), "key")?.as_bytes();
    let entry = gate.policy(questions::known_length(policy)?)?;
    if key.len() > MAX_KEY_BYTES {
        return Err(AskError::KeyTooLong { bytes: key.len() }.into());
    }
    let access = access(&said, &entry)?;
    let until = said.expires_in_ms.map(|Whole(after_ms)| {
        let after = Ticks(after_ms.saturating_mul(NANOS_A_MILLI));
        entry.limiter.now().after(after).unwrap_or(Tick(i64::MAX))
    });
    entry.limiter.set_override(key, access.clone(), until);
    let mut out = Vec::new();
    write(&mut out, &entry, key, &Override { access, until });
    Ok(answer::json(out))
}

fn remove(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["policy", "key"])?;
    let (key, policy) = (query.required("key")?, query.text("policy")?);
    let entry = gate.policy(questions::known_length(required_policy(policy)?)?)?;
    if !entry.limiter.remove_override(key) {
        return Err(Problem::new(StatusCode::NOT_FOUND, "the client has no override there"));
    }
    let mut reply = Reply::default();
    *reply.status_mut() = StatusCode::NO_CONTENT;
    Ok(reply)
}

fn required_policy(policy: Option<&str>) -> Result<&str, Problem> {
    policy.ok_or_else(|| Problem::bad("parameter \"policy\" is missing"))
}

/// What the client gets. What is not said is as in the policy; a limit of its own has a burst of its own.
fn access(said: &Set<'_>, entry: &Entry) -> Result<Access, Problem> {
    let says_numbers = said.limit.is_some()
        || said.window.is_some()
        || said.burst.is_some()
        || said.algorithm.is_some();
    match said.access.as_deref() {
        Some(_) if says_numbers => {
            Err(Problem::bad("`access` stands alone; leave out the numbers or `access`"))
        }
        Some("unlimited") => Ok(Access::Unlimited),
        Some("blocked") => Ok(Access::Blocked),
        Some(other) => {
            Err(Problem::bad(format!("access {other:?} is unknown; there is unlimited, blocked")))
        }
        None => limited(said, entry),
    }
}

fn limited(said: &Set<'_>, entry: &Entry) -> Result<Access, Problem> {
    let Whole(limit) = required(said.limit, "limit")?;
    let base = entry.limiter.base();
    let base: Option<&Numbers> = match &base {
        Access::Limited(policy) => policy.limits().first().map(tollgate::Limit::numbers),
        Access::Unlimited | Access::Blocked => None,
    };
    let kind = match said.algorithm.as_deref() {
        Some(name) => Kind::from_str(name)
            .map_err(|unknown| Problem::bad(format!("algorithm {name:?}: {unknown}")))?,
        None => base.map_or(Kind::TokenBucket, |base| base.kind),
    };
    let window = match said.window.as_deref() {
        Some(text) => {
            Some(humantime::parse_duration(text).map(Ticks::from_duration).map_err(|_| {
                let expected = "expected a time such as \"30s\", \"1m\" or \"1h\"";
                Problem::bad(format!("window: found {text:?}; {expected}"))
            })?)
        }
        None => base.map(|base| base.window),
    };
    let mut builder = Policy::of(kind, limit);
    if let Some(window) = window {
        builder = builder.per(window);
    }
    if let Some(Whole(burst)) = said.burst {
        builder = builder.burst(burst);
    }
    let policy = Policy::all_of(&*entry.name, [builder]);
    policy.map(Access::from).map_err(|error| Problem::bad(error.to_string()))
}

fn write(out: &mut Vec<u8>, entry: &Entry, key: &[u8], set: &Override) {
    out.extend_from_slice(br#"{"policy":"#);
    answer::text(out, &entry.name);
    out.push(b',');
    answer::key(out, key);
    out.extend_from_slice(br#","access":"#);
    answer::text(out, &set.access.to_string());
    out.extend_from_slice(br#","expires_in_ms":"#);
    match set.until {
        Some(until) => {
            answer::number(out, until.since(entry.limiter.now()).0.div_ceil(NANOS_A_MILLI));
        }
        None => out.extend_from_slice(b"null"),
    }
    out.push(b'}');
}
