//! Lists the policies in force, with their tiers.

use std::sync::Arc;

use hyper::http::request::Parts;
use tallygate::tiers::Access;

use super::admin::list;
use super::problem::Problem;
use super::query::Query;
use super::{Reply, answer};
use crate::background::run_in_background_in_order;
use crate::gate::Gate;

pub(super) async fn reply(gate: &Arc<Gate>, request: &Parts) -> Result<Reply, Problem> {
    Query::parse(request.uri.query(), &[])?;
    let gate = gate.clone();
    Ok(run_in_background_in_order(move || all(&gate)).await?)
}

fn all(gate: &Gate) -> Reply {
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"policies":"#);
    list(&mut out, &gate.policies(), |out, entry| {
        named(out, &entry.name, &entry.limiter.rules().base());
        out.extend_from_slice(br#","cost":"#);
        answer::number(out, entry.cost);
        out.extend_from_slice(br#","tiers":"#);
        list(out, &entry.limiter.rules().by_name(), |out, (name, access)| {
            named(out, name, access);
            out.push(b'}');
        });
        out.push(b'}');
    });
    out.push(b'}');
    answer::json(out)
}

fn named(out: &mut Vec<u8>, name: &str, access: &Access) {
    out.extend_from_slice(br#"{"name":"#);
    answer::text(out, name);
    out.extend_from_slice(br#","rule":"#);
    answer::text(out, &access.to_string());
}
