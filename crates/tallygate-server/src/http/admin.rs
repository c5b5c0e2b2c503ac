//! Admin requests: hot clients, the state of one client, and reload.

use std::sync::Arc;

use hyper::StatusCode;
use hyper::http::request::Parts;
use tallygate::{Ask, Decision};

use super::Reply;
use super::answer::{self, DecisionExtras};
use super::problem::Problem;
use super::query::Query;
use crate::background::run_in_background_in_order;
use crate::gate::{Gate, HotClient, Verb};
use crate::shared::Shared;
use crate::turn::{DECISION, TimeSlice};

/// Maximum number of clients per list.
const HOT: usize = 20;
/// Lists the busiest and the most denied clients.
pub(super) async fn hot(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    Query::parse(request.uri.query(), &[])?;
    let gate = gate.clone();
    Ok(run_in_background_in_order(move || hottest(&gate)).await?)
}

fn hottest(gate: &Gate) -> Reply {
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"busiest":"#);
    list(&mut out, &gate.hot.busiest(HOT), clients);
    out.extend_from_slice(br#","most_denied":"#);
    list(&mut out, &gate.hot.most_denied(HOT), clients);
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

/// Writes a JSON list.
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

/// Returns the state of one client in every policy: whether its next request would be allowed, and its remaining units.
pub(super) async fn client(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    let query = Query::parse(request.uri.query(), &["key"])?;
    let key = query.required("key")?;
    let mut out = Vec::new();
    out.push(b'{');
    answer::key(&mut out, key);
    out.extend_from_slice(br#","policies":["#);
    let mut turn = TimeSlice::default();
    for (index, entry) in gate.policies().iter().enumerate() {
        turn.spend(2 * DECISION).await;
        let ask = Ask::new(key).cost(entry.cost);
        let next = entry.ask(Verb::Peek, ask).answer().await?;
        let now = entry.ask(Verb::Peek, ask.cost(0)).answer().await?.decision;
        if index > 0 {
            out.push(b',');
        }
        let more = DecisionExtras { denied_by: next.denied_by(), ..DecisionExtras::default() };
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

/// Reloads the configuration. The reply names the changed settings that need a restart.
pub(super) async fn reload(shared: &Shared) -> Result<Reply, Problem> {
    match shared.reload().await {
        Ok(needs_restart) => {
            let mut out = br#"{"reloaded":true,"needs_restart":"#.to_vec();
            list(&mut out, &needs_restart, |out, name| answer::text(out, name));
            out.push(b'}');
            Ok(answer::json(out))
        }
        Err(mistake) => Err(Problem::new(StatusCode::UNPROCESSABLE_ENTITY, mistake)),
    }
}
