//! What clients ask: check, peek, refund and reset, one by one or in lists, and reservations.

use std::collections::HashSet;
use std::sync::Arc;

use foldhash::quality::RandomState;
use futures_util::{StreamExt as _, stream};
use hyper::StatusCode;
use serde::Deserialize;
use tallygate::{MAX_KEY_BYTES, Ticks};
use tallygate_redis::Stores;

use super::Reply;
use super::answer::{self, More};
use super::body::{self, Items, Text, Whole, fields, required};
use super::headers::{Dialect, Quota};
use super::list::Split;
use super::problem::Problem;
use super::query::Query;
use super::sending::Reserved;
use crate::config::MAX_NAME_BYTES;
use crate::gate::{Answer, Ask, AskError, Decided, Gate, SettleFailure, Verb};
use crate::holdings::{Holder, WAITING_BYTES};
use crate::turn::{DECISION, SCAN_BYTE, Turn};

/// How many questions of a list memory decides in one turn.
const IN_A_TURN: usize = 32;
/// How many questions of a list are prepared at a time for a store across the network, and how many are with it.
const PREPARED: usize = 128;
const IN_FLIGHT: usize = 64;

/// The work of looking up a policy and a tier.
const LOOKED_UP: usize = 200;
/// The bytes that take as long to look through as to find the place of any key by its hash.
const HASHED_AS: usize = 32;

fields! {
    policy: Text<'de>,
    key: Text<'de>,
    cost: Whole,
    tier: Text<'de>,
    ttl_ms: Whole,
    reservation: Text<'de>,
    actual: Whole,
}

/// One question, or one of a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Question<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
}

/// One question, or a list.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Questions<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "items")]
    checks: Option<Items<Question<'a>>>,
    #[serde(borrow, default, deserialize_with = "items")]
    all: Option<Items<Question<'a>>>,
}

fn items<'de, D: serde::Deserializer<'de>>(
    deserializer: D,
) -> Result<Option<Items<Question<'de>>>, D::Error> {
    Items::deserialize(deserializer).map(Some)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Reserve<'a> {
    #[serde(borrow, default, deserialize_with = "field::policy")]
    policy: Option<Text<'a>>,
    #[serde(borrow, default, deserialize_with = "field::key")]
    key: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::cost")]
    cost: Option<Whole>,
    #[serde(borrow, default, deserialize_with = "field::tier")]
    tier: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::ttl_ms")]
    ttl_ms: Option<Whole>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settle<'a> {
    #[serde(borrow, default, deserialize_with = "field::reservation")]
    reservation: Option<Text<'a>>,
    #[serde(default, deserialize_with = "field::actual")]
    actual: Option<Whole>,
}

impl Question<'_> {
    fn ask(&self) -> Result<Ask<'_>, Problem> {
        let policy = self.policy.as_deref();
        Ok(Ask {
            policy: known_length(required(policy, "policy")?)?,
            key: required(self.key.as_deref(), "key")?.as_bytes(),
            cost: self.cost.map(|cost| cost.0),
            tier: self.tier.as_deref(),
            shows_access: false,
        })
    }
}

/// A policy's name that is worth looking up.
pub(super) fn known_length(policy: &str) -> Result<&str, Problem> {
    if policy.len() <= MAX_NAME_BYTES {
        return Ok(policy);
    }
    let bytes = policy.len();
    let detail =
        format!("no policy has a name of {bytes} bytes; they have {MAX_NAME_BYTES} at most");
    Err(Problem::new(StatusCode::NOT_FOUND, detail))
}

/// Check, peek, refund, reset. One question is answered in header fields too, if they are asked for. Room for a long reply
/// is reserved before anything is charged.
pub(super) async fn ask(
    gate: &Arc<Gate>,
    verb: Verb,
    query: Option<&str>,
    body: &[u8],
    reserve: impl FnOnce(usize) -> Result<Option<Reserved>, Problem>,
) -> Result<Reply, Problem> {
    let dialects = Dialect::wanted(&Query::parse(query, &["headers"])?, &[])?;
    let mut turn = Turn::default();
    let split = Split::of(body, &mut turn).await?;
    let Questions { policy, key, cost, tier, mut checks, mut all } = split.rest()?;
    if let (Some(found), Some(_)) = (split.len(), &all) {
        check_number(gate, found)?;
    }
    if let (Some(_), Some(Items(items))) = (split.len(), checks.as_mut().or(all.as_mut())) {
        *items = split.items(&mut turn).await?;
    }
    let one = Question { policy, key, cost, tier };
    let is_one =
        one.policy.is_some() || one.key.is_some() || one.cost.is_some() || one.tier.is_some();
    match (is_one, checks, all) {
        (_, None, None) => {
            let ask = Ask { shows_access: !dialects.is_empty(), ..one.ask()? };
            let told = gate.ask(verb, ask).answer().await?;
            let mut out = Vec::with_capacity(answer::BYTES);
            write(&mut out, &told);
            let mut reply = answer::json(out);
            if let Some(quota) = Quota::of(&told) {
                quota.write_all(reply.headers_mut(), dialects);
            }
            Ok(reply)
        }
        _ if !dialects.is_empty() => {
            Err(Problem::bad("header fields tell of one decision; leave out `headers` for a list"))
        }
        (false, Some(Items(items)), None) => {
            let waiting = match gate.stores() {
                Stores::Memory(_) => 0,
                Stores::Redis(_) => WAITING_BYTES * items.len().min(PREPARED),
            };
            let reserved = reserve(answer::BYTES * items.len() + waiting)?;
            let mut reply = each(gate, verb, &items, &mut turn).await?;
            if let Some(reserved) = reserved {
                reply.extensions_mut().insert(reserved);
            }
            Ok(reply)
        }
        (false, None, Some(Items(items))) if verb == Verb::Check => {
            together(gate, &items, &mut turn).await
        }
        (false, None, Some(_)) => Err(Problem::bad("`all` is for check; send `checks`")),
        _ => Err(Problem::bad("`checks` and `all` stand alone; send one of them, or one question")),
    }
}

/// Asks the questions of a list, each by itself.
async fn each(
    gate: &Arc<Gate>,
    verb: Verb,
    items: &[Question<'_>],
    turn: &mut Turn,
) -> Result<Reply, Problem> {
    let asks = all_known(gate, items, turn).await?;
    // What is asked about one client is asked in order; the order of others' nobody can tell.
    let mut clients = HashSet::with_capacity_and_hasher(asks.len(), RandomState::default());
    let mut are_others = true;
    for ask in &asks {
        turn.spend(SCAN_BYTE * (HASHED_AS + ask.key.len())).await;
        are_others &= clients.insert((ask.policy, ask.key));
    }
    drop(clients);
    let in_flight = if are_others { IN_FLIGHT } else { 1 };
    let mut out = Vec::with_capacity(32 + answer::BYTES * asks.len());
    out.extend_from_slice(br#"{"results":["#);
    let mut index = 0;
    let at_a_time = match gate.stores() {
        Stores::Memory(_) => IN_A_TURN,
        Stores::Redis(_) => PREPARED,
    };
    for some in asks.chunks(at_a_time) {
        turn.spend(some.len() * DECISION).await;
        let answers: Vec<_> = some.iter().map(|ask| gate.ask(verb, *ask).answer()).collect();
        let mut answers = stream::iter(answers).buffered(in_flight);
        while let Some(told) = answers.next().await {
            if index > 0 {
                out.push(b',');
            }
            write(&mut out, &told.map_err(|error| Problem::from(error).of_item(index))?);
            index += 1;
        }
    }
    out.extend_from_slice(b"]}");
    Ok(answer::json(out))
}

/// Denies an `all` with more items than it may have.
fn check_number(gate: &Gate, found: usize) -> Result<(), Problem> {
    let most = gate.limits().max_all_items;
    if found <= most {
        return Ok(());
    }
    Err(Problem::bad(format!(
        "`all` has {found} items; send at most {most} (`max_all_items` of `[limits]`)"
    )))
}

/// Asks them as one.
async fn together(
    gate: &Arc<Gate>,
    items: &[Question<'_>],
    turn: &mut Turn,
) -> Result<Reply, Problem> {
    if items.is_empty() {
        return Err(Problem::bad("`all` is empty; ask at least one question"));
    }
    check_number(gate, items.len())?;
    let asks = all_known(gate, items, turn).await?;
    turn.spend(asks.len() * DECISION).await;
    let told = gate.ask_all(&asks).await?;
    let mut out = Vec::with_capacity(answer::BYTES);
    let more = More { refused: told.refused, ..More::default() };
    answer::decision(&mut out, &told.entry.name, &told.decision, &more);
    Ok(answer::json(out))
}

/// The questions of a list, if all can be asked: else nothing is charged.
async fn all_known<'a>(
    gate: &Gate,
    items: &'a [Question<'_>],
    turn: &mut Turn,
) -> Result<Vec<Ask<'a>>, Problem> {
    let mut asks = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        turn.spend(LOOKED_UP).await;
        let ask = item.ask().and_then(|ask| {
            let entry = gate.policy(ask.policy)?;
            entry.limiter.rule(&ask.of_limiter()).map_err(AskError::from)?;
            match ask.key.len() {
                ..=MAX_KEY_BYTES => Ok(ask),
                bytes => Err(AskError::KeyTooLong { bytes }.into()),
            }
        });
        asks.push(ask.map_err(|problem| problem.of_item(index))?);
    }
    Ok(asks)
}

fn write(out: &mut Vec<u8>, told: &Answer) {
    let Decided { decision, refused_by, .. } = &told.decided;
    let more = More { refused_by: refused_by.as_deref(), ..More::default() };
    answer::decision(out, &told.entry.name, decision, &more);
}

/// Charges an estimate that is settled later.
pub(super) async fn reserve(gate: &Gate, holder: Holder, body: &[u8]) -> Result<Reply, Problem> {
    let Reserve { policy, key, cost, tier, ttl_ms } = body::parse(body)?;
    let question = Question { policy, key, cost, tier };
    let ask = question.ask()?;
    let Whole(ttl_ms) = required(ttl_ms, "ttl_ms")?;
    let longest = u64::try_from(gate.limits().max_reservation_ttl.as_millis()).unwrap_or(u64::MAX);
    if !(1..=longest).contains(&ttl_ms) {
        return Err(Problem::bad(format!(
            "ttl_ms {ttl_ms} is not from 1 to {longest} (`max_reservation_ttl` of `[limits]`)"
        )));
    }
    let entry = gate.policy(ask.policy)?;
    let estimate = ask.cost.unwrap_or(entry.cost);
    if estimate == 0 {
        // It would take a place for nothing.
        return Err(Problem::bad("cost is 0; reserve at least 1, or look with /v1/peek"));
    }
    let time_to_live = Ticks(ttl_ms * Ticks::PER_MILLISECOND);
    let (client, counted) = ((ask.key, ask.tier), (holder, &gate.limits()));
    let reserving = gate.reservations.reserve(&entry, client, estimate, time_to_live, counted);
    let (Decided { decision, refused_by, .. }, reservation) = reserving.await?;
    let more = More { reservation, refused_by: refused_by.as_deref(), ..More::default() };
    let mut out = Vec::with_capacity(answer::BYTES);
    answer::decision(&mut out, &entry.name, &decision, &more);
    Ok(answer::json(out))
}

/// Charges what it cost.
pub(super) async fn settle(gate: &Gate, body: &[u8]) -> Result<Reply, Problem> {
    let Settle { reservation, actual } = body::parse(body)?;
    let reservation = required(reservation, "reservation")?;
    let Whole(actual) = required(actual, "actual")?;
    let unknown = || {
        let detail = "no such reservation; it has lapsed, or another server made it";
        Problem::new(StatusCode::NOT_FOUND, detail)
    };
    let is_written = reservation.len() == 32 && !reservation.starts_with('+');
    let number = u128::from_str_radix(&reservation, 16).ok().filter(|_| is_written);
    match gate.reservations.settle(number.ok_or_else(unknown)?, actual, &gate.limits()).await {
        Ok((entry, decision)) => {
            let mut out = Vec::with_capacity(answer::BYTES);
            answer::decision(&mut out, &entry.name, &decision, &More::default());
            Ok(answer::json(out))
        }
        Err(SettleFailure::Unknown) => Err(unknown()),
        Err(SettleFailure::Reset) => Err(Problem::new(
            StatusCode::NOT_FOUND,
            "the client was reset after the reservation was made; there is nothing to settle",
        )),
        Err(SettleFailure::AlreadySettled) => Err(Problem::new(
            StatusCode::CONFLICT,
            "the reservation was settled before; settle each one once",
        )),
        Err(SettleFailure::Store(error)) => Err(error.into()),
    }
}
