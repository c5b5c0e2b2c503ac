//! Check, peek, refund and reset, one by one or in lists; and reservations.

use std::collections::HashSet;
use std::sync::Arc;

use foldhash::quality::RandomState;
use futures_util::{StreamExt as _, stream};
use hyper::StatusCode;
use serde::Deserialize;
use tallygate_redis::Stores;

use super::Reply;
use super::answer::{self, DecisionExtras};
use super::body::{self, Items, Text, WholeNumber, fields, required};
use super::headers::{DecisionHeaders, wanted_dialects};
use super::list::Split;
use super::problem::Problem;
use super::query::Query;
use super::sending::ReservedBytes;
use crate::client_budgets::{BudgetOwner, WAITING_BYTES};
use crate::config::MAX_NAME_BYTES;
use crate::gate::{
    Answer, Gate, GateRequest, Policies, PolicyRequest, ReservationId, SettleFailure, Verb,
};
use crate::turn::{DECISION, SCAN_BYTE, TimeSlice};

/// How many items of a list the memory store decides in one slice.
const IN_A_TURN: usize = 32;
/// How many items of a list are prepared at a time for a remote store, and how many are in flight.
const PREPARED: usize = 128;
const IN_FLIGHT: usize = 64;

/// The work of looking up a policy and a tier.
const LOOKED_UP: usize = 200;
/// The work of hashing a key in addition to its bytes, in bytes.
const HASHED_AS: usize = 32;

fields! {
    policy: Text<'de>,
    key: Text<'de>,
    cost: WholeNumber,
    tier: Text<'de>,
    ttl_ms: WholeNumber,
    reservation: Text<'de>,
    actual: WholeNumber,
}

/// A single request, or an item of a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckItem<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<WholeNumber>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
}

/// A body: a single request, or a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CheckBody<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<WholeNumber>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "items")]
    checks: Option<Items<CheckItem<'a>>>,
    #[serde(borrow, default, deserialize_with = "items")]
    all: Option<Items<CheckItem<'a>>>,
}

fn items<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Items<CheckItem<'de>>>, D::Error> {
    Items::deserialize(deserializer).map(Some)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReserveBody<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<WholeNumber>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::ttl_ms")]
    ttl_ms: Option<WholeNumber>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SettleBody<'a> {
    #[serde(borrow, default, deserialize_with = "field::reservation")]
    reservation: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::actual")]
    actual: Option<WholeNumber>,
}

impl CheckItem<'_> {
    fn request(&self) -> Result<GateRequest<'_>, Problem> {
        let policy = self.policy.as_deref();
        Ok(GateRequest {
            policy: check_name_length(required(policy, "policy")?)?,
            key: required(self.key.as_deref(), "key")?.as_bytes(),
            cost: self.cost.map(|cost| cost.0),
            tier: self.tier.as_deref(),
        })
    }
}

/// Checks that the name of a policy is short enough to exist.
pub(super) fn check_name_length(policy: &str) -> Result<&str, Problem> {
    if policy.len() <= MAX_NAME_BYTES {
        return Ok(policy);
    }
    let bytes = policy.len();
    let detail = format!("the policy name has {bytes} bytes; names have at most {MAX_NAME_BYTES}");
    Err(Problem::new(StatusCode::NOT_FOUND, detail))
}

/// Handles check, peek, refund and reset. A single request can also be answered in header fields. The memory of a long
/// reply is reserved before anything is charged.
pub(super) async fn ask(
    gate: &Arc<Gate>,
    verb: Verb,
    query: Option<&str>,
    body: &[u8],
    reserve: impl FnOnce(usize) -> Result<Option<ReservedBytes>, Problem>,
) -> Result<Reply, Problem> {
    let dialects = wanted_dialects(&Query::parse(query, &["headers"])?, &[])?;
    let mut turn = TimeSlice::default();
    let split = Split::of(body, &mut turn).await?;
    let CheckBody { policy, key, cost, tier, mut checks, mut all } = split.rest()?;
    // The whole request is decided under the configuration of this moment.
    let policies = gate.in_force();
    if let (Some(found), Some(_)) = (split.len(), &all) {
        policies.validate_number(found)?;
    }
    if let (Some(_), Some(Items(items))) = (split.len(), checks.as_mut().or(all.as_mut())) {
        *items = split.items(&mut turn).await?;
    }
    let one = CheckItem { policy, key, cost, tier };
    let is_one =
        one.policy.is_some() || one.key.is_some() || one.cost.is_some() || one.tier.is_some();
    match (is_one, checks, all) {
        (_, None, None) => {
            let asked = policies.ask_with(verb, one.request()?, Answer::new);
            let answer = asked.answer().await?;
            let mut out = Vec::with_capacity(answer::BYTES);
            write(&mut out, &answer, None);
            let mut reply = answer::json(out);
            if !dialects.is_empty() {
                DecisionHeaders::of(&answer).write_all(reply.headers_mut(), dialects);
            }
            Ok(reply)
        }
        _ if !dialects.is_empty() => {
            Err(Problem::bad("`headers` only works for a single check; remove it to send a list"))
        }
        (false, Some(Items(items)), None) => {
            if items.is_empty() {
                policies.validate_number(0)?;
            }
            let waiting = match gate.stores() {
                Stores::Memory(_) => 0,
                Stores::Redis(_) => WAITING_BYTES * items.len().min(PREPARED),
            };
            let reserved = reserve(answer::BYTES * items.len() + waiting)?;
            let mut reply = check_each(gate, &policies, verb, &items, &mut turn).await?;
            if let Some(reserved) = reserved {
                reply.extensions_mut().insert(reserved);
            }
            Ok(reply)
        }
        (false, None, Some(Items(items))) if verb == Verb::Check => {
            check_together(gate, &policies, &items, &mut turn).await
        }
        (false, None, Some(_)) => {
            Err(Problem::bad("`all` only works with /v1/check; send `checks`"))
        }
        _ => Err(Problem::bad(
            "send either `checks`, `all`, or a single request (`policy`, `key`), not several of them",
        )),
    }
}

/// Decides the items of a list one by one.
async fn check_each(
    gate: &Gate,
    policies: &Policies,
    verb: Verb,
    items: &[CheckItem<'_>],
    turn: &mut TimeSlice,
) -> Result<Reply, Problem> {
    let requests = find_items(policies, items, turn).await?;
    // Items of the same client are decided in order. The order of different clients does not matter.
    let mut clients = HashSet::with_capacity_and_hasher(requests.len(), RandomState::default());
    let mut are_distinct = true;
    for request in &requests {
        turn.spend(SCAN_BYTE * (HASHED_AS + request.ask.key.len())).await;
        are_distinct &= clients.insert((&request.entry.name, request.ask.key));
    }
    drop(clients);
    let in_flight = if are_distinct { IN_FLIGHT } else { 1 };
    let mut out = Vec::with_capacity(32 + answer::BYTES * requests.len());
    out.extend_from_slice(br#"{"results":["#);
    let mut index = 0;
    let at_a_time = match gate.stores() {
        Stores::Memory(_) => IN_A_TURN,
        Stores::Redis(_) => PREPARED,
    };
    for some in requests.chunks(at_a_time) {
        turn.spend(some.len() * DECISION).await;
        let answers: Vec<_> =
            some.iter().map(|request| request.entry.ask(verb, request.ask).answer()).collect();
        let mut answers = stream::iter(answers).buffered(in_flight);
        while let Some(answer) = answers.next().await {
            if index > 0 {
                out.push(b',');
            }
            write(&mut out, &answer.map_err(|error| Problem::from(error).of_item(index))?, None);
            index += 1;
        }
    }
    out.extend_from_slice(b"]}");
    Ok(answer::json(out))
}

/// Decides the items together: all are charged, or none is.
async fn check_together(
    gate: &Gate,
    policies: &Policies,
    items: &[CheckItem<'_>],
    turn: &mut TimeSlice,
) -> Result<Reply, Problem> {
    policies.validate_number(items.len())?;
    let requests = find_items(policies, items, turn).await?;
    turn.spend(requests.len() * DECISION).await;
    let answer = gate.ask_all(&requests).await?;
    let mut out = Vec::with_capacity(answer::BYTES);
    let more = DecisionExtras { denied_index: answer.denied, ..DecisionExtras::default() };
    answer::decision(&mut out, &answer.entry.name, &answer.decision, &more);
    Ok(answer::json(out))
}

/// Finds the policies of the items of a list, and validates all items before anything is charged.
async fn find_items<'a>(
    policies: &'a Policies,
    items: &'a [CheckItem<'_>],
    turn: &mut TimeSlice,
) -> Result<Vec<PolicyRequest<'a>>, Problem> {
    let mut requests = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        turn.spend(LOOKED_UP).await;
        let request = item.request().and_then(|request| Ok(policies.find(&request)?));
        requests.push(request.map_err(|problem| problem.of_item(index))?);
    }
    Ok(requests)
}

fn write(out: &mut Vec<u8>, answer: &Answer, reservation: Option<ReservationId>) {
    let more = DecisionExtras {
        denied_by: answer.denied_by(),
        shadow_denied_by: answer.shadow_denied_by(),
        reservation,
        ..DecisionExtras::default()
    };
    answer::decision(out, &answer.entry.name, &answer.decision, &more);
}

/// Charges an estimate that is settled later.
pub(super) async fn reserve(
    gate: &Gate,
    holder: BudgetOwner,
    body: &[u8],
) -> Result<Reply, Problem> {
    let ReserveBody { policy, key, cost, tier, ttl_ms } = body::parse(body)?;
    let item = CheckItem { policy, key, cost, tier };
    let request = item.request()?;
    let WholeNumber(ttl_ms) = required(ttl_ms, "ttl_ms")?;
    let (answer, reservation) = gate.reserve(request, ttl_ms, holder).await?;
    let mut out = Vec::with_capacity(answer::BYTES);
    write(&mut out, &answer, reservation);
    Ok(answer::json(out))
}

/// Replaces the estimate of a reservation by the real cost.
pub(super) async fn settle(gate: &Gate, body: &[u8]) -> Result<Reply, Problem> {
    let SettleBody { reservation, actual } = body::parse(body)?;
    let reservation = required(reservation, "reservation")?;
    let WholeNumber(actual) = required(actual, "actual")?;
    let reservation = ReservationId::parse(reservation.as_bytes()).ok_or(SettleFailure::Unknown)?;
    let (entry, decision) = gate.settle(reservation, actual).await?;
    let mut out = Vec::with_capacity(answer::BYTES);
    answer::decision(&mut out, &entry.name, &decision, &DecisionExtras::default());
    Ok(answer::json(out))
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;
    use crate::config::Config;

    /// Fault G4.
    #[test]
    fn a_list_is_decided_under_one_configuration_whenever_a_reload_comes() {
        let config = |limit: u64| {
            let policy = |name: &str| {
                format!(
                    "[policies.{name}]\nalgorithm = \"fixed_window\"\nlimit = {limit}\nwindow = \"365d\"\n"
                )
            };
            Config::parse(&(policy("api") + &policy("login")), Path::new("")).expect("valid")
        };
        let item = |number: u32| {
            let policy = if number.is_multiple_of(2) { "api" } else { "login" };
            format!(r#"{{"policy":"{policy}","key":"{number}"}}"#)
        };
        let items: Vec<_> = (0..200).map(item).collect();
        let body = format!(r#"{{"checks":[{}]}}"#, items.join(","));
        let mut cx = Context::from_waker(Waker::noop());
        // A reload after each number of slices of the request.
        for slices in 0.. {
            let gate = crate::fuzzing::shared(&config(5)).gate;
            let mut asking = pin!(ask(&gate, Verb::Check, None, body.as_bytes(), |_| Ok(None)));
            for _ in 0..slices {
                if asking.as_mut().poll(&mut cx).is_ready() {
                    assert!(slices > 4, "the request is long");
                    return;
                }
            }
            gate.put_in_force(&config(7));
            let reply = loop {
                if let Poll::Ready(reply) = asking.as_mut().poll(&mut cx) {
                    break reply.unwrap_or_else(Problem::reply);
                }
            };
            let text = std::str::from_utf8(reply.body()).expect("text");
            let count = |limit: u64| text.matches(&format!(r#""limit":{limit},"#)).count();
            assert!(matches!((count(5), count(7)), (200, 0) | (0, 200)), "{slices}: {text}");
        }
    }
}
