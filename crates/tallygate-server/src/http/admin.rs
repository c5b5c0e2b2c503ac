//! What only the operator may do: hot clients, one client, and the configuration anew.

use std::sync::Arc;

use hyper::StatusCode;
use hyper::http::request::Parts;
use tallygate::Decision;

use super::Reply;
use super::answer::{self, More};
use super::problem::Problem;
use super::query::Query;
use crate::aside::aside_in_order;
use crate::gate::{Ask, Gate, HotClient, Verb};
use crate::shared::Shared;
use crate::turn::{DECISION, Turn};

/// How many hot clients are told of each kind.
const HOT: usize = 20;
/// The busiest and the most refused clients.
pub(super) async fn hot(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    Query::parse(request.uri.query(), &[])?;
    let gate = gate.clone();
    Ok(aside_in_order(move || hottest(&gate)).await?)
}

fn hottest(gate: &Gate) -> Reply {
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"busiest":"#);
    list(&mut out, &gate.hot.busiest(HOT), clients);
    out.extend_from_slice(br#","most_refused":"#);
    list(&mut out, &gate.hot.most_refused(HOT), clients);
    out.push(b'}');
    answer::json(out)
}

fn clients(out: &mut Vec<u8>, client: &HotClient) {
    out.extend_from_slice(br#"{"policy":"#);
    answer::text(out, &client.policy);
    out.push(b',');
    answer::key(out, &client.key);
    out.extend_from_slice(br#","count":"#);
    answer::number(out, client.count);
    out.extend_from_slice(br#","error":"#);
    answer::number(out, client.error);
    out.push(b'}');
}

/// A list of JSON.
pub(super) fn list<T>(out: &mut Vec<u8>, items: &[T], write: impl Fn(&mut Vec<u8>, &T)) {
    out.push(b'[');
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        write(out, item);
    }
    out.push(b']');
}

/// One client in every policy: whether its next request would be admitted, and how much it has left now.
pub(super) async fn client(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["key"])?;
    let key = query.required("key")?;
    let mut out = Vec::new();
    out.push(b'{');
    answer::key(&mut out, key);
    out.extend_from_slice(br#","policies":["#);
    let mut turn = Turn::default();
    for (index, entry) in gate.policies().iter().enumerate() {
        turn.spend(2 * DECISION).await;
        let ask = Ask { policy: &entry.name, key, cost: None, tier: None, shows_access: false };
        let next = gate.ask(Verb::Peek, ask).answer().await?.decided;
        let now =
            gate.ask(Verb::Peek, Ask { cost: Some(0), ..ask }).answer().await?.decided.decision;
        if index > 0 {
            out.push(b',');
        }
        let more = More { refused_by: next.refused_by.as_deref(), ..More::default() };
        let shown = Decision {
            limit: now.limit,
            remaining: now.remaining,
            reset_after: now.reset_after,
            scarcest: now.scarcest,
            ..next.decision
        };
        answer::decision(&mut out, &entry.name, &shown, &more);
    }
    out.extend_from_slice(b"]}");
    Ok(answer::json(out))
}

/// Reads the configuration anew.
pub(super) async fn reload(shared: &Shared) -> Result<Reply, Problem> {
    match shared.reload().await {
        Ok(()) => Ok(answer::json(br#"{"reloaded":true}"#.to_vec())),
        Err(mistake) => Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, mistake)),
    }
}
