//! The policies in force, with their tiers: what a client may be asked about.

use hyper::http::request::Parts;
use tollgate::Access;

use super::admin::list;
use super::problem::Problem;
use super::query::Query;
use super::{Reply, answer};
use crate::gate::Gate;

pub(super) fn reply(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    Query::parse(request.uri.query(), &[])?;
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"policies":"#);
    list(&mut out, &gate.policies(), |out, entry| {
        named(out, &entry.name, &entry.limiter.base());
        out.extend_from_slice(br#","cost":"#);
        answer::number(out, entry.cost);
        out.extend_from_slice(br#","tiers":"#);
        list(out, &entry.limiter.tiers(), |out, (name, access)| {
            named(out, name, access);
            out.push(b'}');
        });
        out.push(b'}');
    });
    out.push(b'}');
    Ok(answer::json(out))
}

fn named(out: &mut Vec<u8>, name: &str, access: &Access) {
    out.extend_from_slice(br#"{"name":"#);
    answer::text(out, name);
    out.extend_from_slice(br#","rule":"#);
    answer::text(out, &access.to_string());
}
