//! Overrides at run time: what a single client gets instead of its tier, until it ends or is taken back.
//!
//! They are kept by the server that was told, through reloads and in its snapshot, and come before those of the
//! configuration. Those are listed with them, and only a change of the configuration takes them back.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tallygate::{Access, Kind, MAX_KEY_BYTES, Numbers, Override, Policy, Tick, Ticks};

use super::admin::list;
use super::answer;
use super::body::{self, Text, Whole, fields, required};
use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply, questions};
use crate::aside::aside_in_order;
use crate::gate::{AskError, Entry, Gate};

fields! {
    policy: Text<'de>,
    key: Text<'de>,
    access: Text<'de>,
    algorithm: Text<'de>,
    limit: Whole,
    window: Text<'de>,
    burst: Whole,
    expires_in_ms: Whole,
}

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

/// The override of a client that is in force.
struct Shown {
    set: Override,
    /// Whether the configuration has it, and not the run time.
    configured: bool,
}

impl Shown {
    const fn configured(access: Access) -> Self {
        Self { set: Override { access, until: None }, configured: true }
    }
}

/// Lists, sets and removes overrides, by the method.
pub(super) async fn reply(caller: &Caller, request: &Parts) -> Result<Reply, Problem> {
    let gate = &caller.shared.gate;
    match request.method {
        Method::DELETE => remove(gate, request).await,
        _ => list_all(gate, request).await,
    }
}

async fn list_all(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["policy"])?;
    let entries = match query.text("policy")? {
        Some(name) => vec![gate.policy(questions::known_length(name)?)?],
        None => gate.policies(),
    };
    Ok(aside_in_order(move || all(entries)).await?)
}

fn all(entries: Vec<Arc<Entry>>) -> Reply {
    let mut shown = Vec::new();
    for entry in entries {
        let configured = entry.limiter.rules().by_key().into_iter();
        let mut in_force: BTreeMap<_, _> =
            configured.map(|(key, access)| (key, Shown::configured(access))).collect();
        let set = entry.limiter.overrides().into_iter();
        in_force.extend(set.map(|(key, set)| (key, Shown { set, configured: false })));
        shown.extend(in_force.into_iter().map(|(key, one)| (entry.clone(), key, one)));
    }
    let mut out = br#"{"overrides":"#.to_vec();
    list(&mut out, &shown, |out, (entry, key, one)| write(out, entry, key, one));
    out.push(b'}');
    answer::json(out)
}

pub(super) async fn set(gate: &Arc<Gate>, body: &[u8]) -> Result<Reply, Problem> {
    let said: Set<'_> = body::parse(body)?;
    let policy = required(said.policy.as_deref(), "policy")?;
    let key = required(said.key.as_deref(), "key")?.as_bytes();
    let entry = gate.policy(questions::known_length(policy)?)?;
    if key.len() > MAX_KEY_BYTES {
        return Err(AskError::KeyTooLong { bytes: key.len() }.into());
    }
    let access = access(&said, &entry, gate.limits().max_time_to_fresh)?;
    let until = said.expires_in_ms.map(|Whole(after_ms)| {
        let after = Ticks(after_ms.saturating_mul(Ticks::PER_MILLISECOND));
        entry.limiter.now().after(after).unwrap_or(Tick(i64::MAX))
    });
    let (gate, key) = (gate.clone(), Box::<[u8]>::from(key));
    // Every change copies the overrides of the policy, so that decisions read them without a lock.
    aside_in_order(move || {
        check_number(&gate, &entry, &key)?;
        entry.limiter.set_override(&key, access.clone(), until);
        let mut out = Vec::new();
        let shown = Shown { set: Override { access, until }, configured: false };
        write(&mut out, &entry, &key, &shown);
        Ok(answer::json(out))
    })
    .await?
}

/// Denies one more override than the server may have, unless it replaces another.
fn check_number(gate: &Gate, entry: &Entry, key: &[u8]) -> Result<(), Problem> {
    let most = gate.limits().max_overrides;
    let found: usize = gate.policies().iter().map(|entry| entry.limiter.overrides().len()).sum();
    if found < most || entry.limiter.overrides().iter().any(|(set, _)| **set == *key) {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::CONFLICT,
        format!(
            "the server has {found} overrides that were set at run time; remove some, or raise `max_overrides` of \
             `[limits]` ({most})"
        ),
    ))
}

/// Says what the client gets from now on, if the configuration has an override for it.
async fn remove(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["policy", "key"])?;
    let (key, policy) = (query.required("key")?, query.text("policy")?);
    let entry = gate.policy(questions::known_length(required_policy(policy)?)?)?;
    let key = Box::<[u8]>::from(key);
    aside_in_order(move || removed(&entry, &key)).await?
}

fn removed(entry: &Entry, key: &[u8]) -> Result<Reply, Problem> {
    let was_there = entry.limiter.remove_override(key);
    match (was_there, entry.limiter.rules().of_key(key)) {
        (true, None) => {
            let mut reply = Reply::default();
            *reply.status_mut() = StatusCode::NO_CONTENT;
            Ok(reply)
        }
        (true, Some(access)) => {
            let mut out = Vec::new();
            write(&mut out, entry, key, &Shown::configured(access));
            Ok(answer::json(out))
        }
        (false, None) => {
            Err(Problem::new(StatusCode::NOT_FOUND, "the client has no override there"))
        }
        (false, Some(access)) => Err(Problem::new(
            StatusCode::CONFLICT,
            format!(
                "the override is in the configuration and stays in force: {access}; \
                 remove it there, or set another over it"
            ),
        )),
    }
}

fn required_policy(policy: Option<&str>) -> Result<&str, Problem> {
    policy.ok_or_else(|| Problem::bad("parameter \"policy\" is missing"))
}

/// What the client gets. What is not said is as in the policy; a limit of its own has a burst of its own.
fn access(said: &Set<'_>, entry: &Entry, longest: Duration) -> Result<Access, Problem> {
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
        None => limited(said, entry, longest),
    }
}

fn limited(said: &Set<'_>, entry: &Entry, longest: Duration) -> Result<Access, Problem> {
    let Whole(limit) = required(said.limit, "limit")?;
    let base = entry.limiter.rules().base();
    let base: Option<&Numbers> = match &base {
        Access::Limited(policy) => policy.limits().first().map(tallygate::Limit::numbers),
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
    let policy = policy.map_err(|error| Problem::bad(error.to_string()))?;
    // Its numbers come with a request: they may keep state as long as the policy's own do, or as all such numbers may.
    let own = base.map_or(0, nanos_to_fresh);
    let most = longest.as_nanos().max(own);
    let found = policy.limits().iter().map(|limit| nanos_to_fresh(limit.numbers())).max();
    if found.is_some_and(|found| found > most) {
        let most = Duration::from_secs(u64::try_from(most / 1_000_000_000).unwrap_or(u64::MAX));
        let most = humantime::format_duration(most);
        return Err(Problem::bad(format!(
            "a client would take longer than {most} to be fresh again; use a shorter window or a smaller burst \
             (`max_time_to_fresh` of `[limits]`)"
        )));
    }
    Ok(Access::from(policy))
}

/// The longest that a key takes to be fresh again, without debt.
fn nanos_to_fresh(numbers: &Numbers) -> u128 {
    let window = u128::from(numbers.window.0);
    match numbers.kind.is_bucket() {
        true => (u128::from(numbers.burst) * window).div_ceil(u128::from(numbers.limit.max(1))),
        false => 2 * window,
    }
}

fn write(out: &mut Vec<u8>, entry: &Entry, key: &[u8], Shown { set, configured }: &Shown) {
    out.extend_from_slice(br#"{"policy":"#);
    answer::text(out, &entry.name);
    out.push(b',');
    answer::key(out, key);
    out.extend_from_slice(br#","access":"#);
    answer::text(out, &set.access.to_string());
    out.extend_from_slice(br#","expires_in_ms":"#);
    match set.until {
        Some(until) => {
            answer::number(
                out,
                until.since(entry.limiter.now()).0.div_ceil(Ticks::PER_MILLISECOND),
            );
        }
        None => out.extend_from_slice(b"null"),
    }
    let configured: &[u8] = if *configured { b"true" } else { b"false" };
    out.extend_from_slice(br#","configured":"#);
    out.extend_from_slice(configured);
    // An override that is set at run time holds on the server that took it; those of the configuration on every server
    // that has the configuration.
    let scope: &[u8] = if configured == b"true" { b"configuration" } else { b"this server" };
    out.extend_from_slice(br#","scope":""#);
    out.extend_from_slice(scope);
    out.extend_from_slice(b"\"}");
}
