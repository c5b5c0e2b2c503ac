//! Overrides at run time: exceptions for single clients, until they expire or are removed.
//!
//! The server that receives an override keeps it, through reloads and in its snapshot. It takes precedence over an
//! override of the configuration. The list contains both; overrides of the configuration can only be removed there.

use std::collections::BTreeMap;
use std::str::FromStr as _;
use std::sync::Arc;
use std::time::Duration;

use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde::Deserialize;
use tallygate::policy::Numbers;
use tallygate::store::MAX_KEY_BYTES;
use tallygate::tiers::{Access, Override};
use tallygate::{Kind, Policy, Tick, Ticks};
use tallygate_lab::duration;
use tallygate_lab::limit_syntax::in_durations;

use super::admin::list;
use super::answer;
use super::body::{self, Text, WholeNumber, fields, required};
use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply, operations};
use crate::background::run_in_background_in_order;
use crate::gate::{Gate, GateError, ServedPolicy};

fields! {
    policy: Text<'de>,
    key: Text<'de>,
    access: Text<'de>,
    algorithm: Text<'de>,
    limit: WholeNumber,
    window: Text<'de>,
    burst: WholeNumber,
    expires_in_ms: WholeNumber,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SetOverride<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::access")]
    access: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::algorithm")]
    algorithm: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::limit")]
    limit: Option<WholeNumber>,
    #[serde(borrow, default, deserialize_with = "field::window")]
    window: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::burst")]
    burst: Option<WholeNumber>,
    #[serde(default, deserialize_with = "field::expires_in_ms")]
    expires_in_ms: Option<WholeNumber>,
}

/// The override in force for a client.
struct OverrideView {
    set: Override,
    /// Whether it comes from the configuration, and not from a request.
    configured: bool,
}

impl OverrideView {
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
        Some(name) => vec![gate.policy(operations::check_name_length(name)?)?],
        None => gate.policies(),
    };
    Ok(run_in_background_in_order(move || all(entries)).await?)
}

fn all(entries: Vec<Arc<ServedPolicy>>) -> Reply {
    let mut shown = Vec::new();
    for entry in entries {
        let configured = entry.limiter.rules().by_key().into_iter();
        let mut in_force: BTreeMap<_, _> =
            configured.map(|(key, access)| (key, OverrideView::configured(access))).collect();
        let set = entry.limiter.overrides().into_iter();
        in_force.extend(set.map(|(key, set)| (key, OverrideView { set, configured: false })));
        shown.extend(in_force.into_iter().map(|(key, one)| (entry.clone(), key, one)));
    }
    let mut out = br#"{"overrides":"#.to_vec();
    list(&mut out, &shown, |out, (entry, key, one)| write(out, entry, key, one));
    out.push(b'}');
    answer::json(out)
}

pub(super) async fn set(gate: &Arc<Gate>, body: &[u8]) -> Result<Reply, Problem> {
    let body: SetOverride<'_> = body::parse(body)?;
    let policy = required(body.policy.as_deref(), "policy")?;
    let key = required(body.key.as_deref(), "key")?.as_bytes();
    let entry = gate.policy(operations::check_name_length(policy)?)?;
    if key.len() > MAX_KEY_BYTES {
        return Err(GateError::KeyTooLong { bytes: key.len() }.into());
    }
    let access = access(&body, &entry, gate.limits().max_time_to_fresh)?;
    let until = body.expires_in_ms.map(|WholeNumber(after_ms)| {
        let after = Ticks(after_ms.saturating_mul(Ticks::PER_MILLISECOND));
        entry.limiter.now().after(after).unwrap_or(Tick(i64::MAX))
    });
    let (gate, key) = (gate.clone(), Box::<[u8]>::from(key));
    // Every change copies the overrides of the policy, so that decisions read them without a lock.
    run_in_background_in_order(move || {
        gate.change_overrides(&entry, |entry| {
            check_number(&gate, entry, &key)?;
            entry.limiter.set_override(&key, access.clone(), until);
            Ok::<_, Problem>(())
        })?;
        let mut out = Vec::new();
        let shown = OverrideView { set: Override { access, until }, configured: false };
        write(&mut out, &entry, &key, &shown);
        Ok(answer::json(out))
    })
    .await?
}

/// Rejects an override above the maximum number, unless it replaces another.
fn check_number(gate: &Gate, entry: &ServedPolicy, key: &[u8]) -> Result<(), Problem> {
    let most = gate.limits().max_overrides;
    let found: usize = gate.policies().iter().map(|entry| entry.limiter.overrides().len()).sum();
    if found < most || entry.limiter.overrides().iter().any(|(set, _)| **set == *key) {
        return Ok(());
    }
    Err(Problem::new(
        StatusCode::CONFLICT,
        format!(
            "the server already has {found} overrides set at run time; remove some, or raise `max_overrides` in \
             `[limits]` ({most})"
        ),
    ))
}

/// Removes an override. If the configuration has another one for the client, returns that.
async fn remove(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["policy", "key"])?;
    let (key, policy) = (query.required("key")?, query.text("policy")?);
    let entry = gate.policy(operations::check_name_length(required_policy(policy)?)?)?;
    let (gate, key) = (gate.clone(), Box::<[u8]>::from(key));
    run_in_background_in_order(move || gate.change_overrides(&entry, |entry| removed(entry, &key)))
        .await?
}

fn removed(entry: &ServedPolicy, key: &[u8]) -> Result<Reply, Problem> {
    let was_there = entry.limiter.remove_override(key);
    match (was_there, entry.limiter.rules().of_key(key)) {
        (true, None) => {
            let mut reply = Reply::default();
            *reply.status_mut() = StatusCode::NO_CONTENT;
            Ok(reply)
        }
        (true, Some(access)) => {
            let mut out = Vec::new();
            write(&mut out, entry, key, &OverrideView::configured(access));
            Ok(answer::json(out))
        }
        (false, None) => {
            Err(Problem::new(StatusCode::NOT_FOUND, "the client has no override in this policy"))
        }
        (false, Some(access)) => Err(Problem::new(
            StatusCode::CONFLICT,
            format!(
                "the override comes from the configuration ({access}) and cannot be removed here; \
                 remove it from the configuration, or set another one"
            ),
        )),
    }
}

fn required_policy(policy: Option<&str>) -> Result<&str, Problem> {
    policy.ok_or_else(|| Problem::bad("missing parameter \"policy\""))
}

/// Returns the access that a body describes. Missing fields are inherited from the policy, except for the burst.
fn access(
    body: &SetOverride<'_>,
    entry: &ServedPolicy,
    longest: Duration,
) -> Result<Access, Problem> {
    let has_numbers = body.limit.is_some()
        || body.window.is_some()
        || body.burst.is_some()
        || body.algorithm.is_some();
    match body.access.as_deref() {
        Some(_) if has_numbers => {
            Err(Problem::bad("`access` cannot be combined with a limit; remove one of them"))
        }
        Some("unlimited") => Ok(Access::Unlimited),
        Some("blocked") => Ok(Access::Blocked),
        Some(other) => {
            Err(Problem::bad(format!("access {other:?} is unknown; use unlimited or blocked")))
        }
        None => limited(body, entry, longest),
    }
}

fn limited(
    body: &SetOverride<'_>,
    entry: &ServedPolicy,
    longest: Duration,
) -> Result<Access, Problem> {
    let WholeNumber(limit) = required(body.limit, "limit")?;
    let base = entry.limiter.rules().base();
    let base: Option<&Numbers> = match &base {
        Access::Limited(policy) => policy.limits().first().map(tallygate::Limit::numbers),
        Access::Unlimited | Access::Blocked => None,
    };
    let kind = match body.algorithm.as_deref() {
        Some(name) => Kind::from_str(name)
            .map_err(|unknown| Problem::bad(format!("algorithm {name:?}: {unknown}")))?,
        None => base.map_or(Kind::TokenBucket, |base| base.kind),
    };
    let window = match body.window.as_deref() {
        Some(text) => {
            let window = duration::parse(text).map(Ticks::from_duration);
            Some(window.map_err(|error| Problem::bad(format!("window: {error}")))?)
        }
        None => base.map(|base| base.window),
    };
    let mut builder = Policy::of(kind, limit);
    if let Some(window) = window {
        builder = builder.per(window);
    }
    if let Some(WholeNumber(burst)) = body.burst {
        builder = builder.burst(burst);
    }
    let policy = Policy::all_of(&*entry.name, [builder]);
    let policy = policy.map_err(|error| Problem::bad(in_durations(&error)))?;
    // The numbers come with a request: they may keep state as long as those of the policy, or as `max_time_to_fresh`
    // allows.
    let own = base.map_or(0, nanos_to_fresh);
    let most = longest.as_nanos().max(own);
    let found = policy.limits().iter().map(|limit| nanos_to_fresh(limit.numbers())).max();
    if found.is_some_and(|found| found > most) {
        let most = Duration::from_secs(u64::try_from(most / 1_000_000_000).unwrap_or(u64::MAX));
        let most = duration::DurationText(most);
        return Err(Problem::bad(format!(
            "a client would need more than {most} to recover its full quota (`max_time_to_fresh` in `[limits]`); use a \
             shorter window or a smaller burst"
        )));
    }
    Ok(Access::from(policy))
}

/// Returns the longest time until a key without debt is fresh again.
fn nanos_to_fresh(numbers: &Numbers) -> u128 {
    let window = u128::from(numbers.window.0);
    match numbers.kind.is_bucket() {
        true => (u128::from(numbers.burst) * window).div_ceil(u128::from(numbers.limit.max(1))),
        false => 2 * window,
    }
}

fn write(
    out: &mut Vec<u8>,
    entry: &ServedPolicy,
    key: &[u8],
    OverrideView { set, configured }: &OverrideView,
) {
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
    // An override that is set at run time applies to one server; an override of the configuration applies to every
    // server that has it.
    let scope: &[u8] = if configured == b"true" { b"configuration" } else { b"this server" };
    out.extend_from_slice(br#","scope":""#);
    out.extend_from_slice(scope);
    out.extend_from_slice(b"\"}");
}
