//! What only the operator may do: who that is, hot clients, one client, and the configuration anew.
//!
//! Without a token in the configuration the operator is whoever is on this machine and not sent by somebody: a proxy,
//! or a page in a browser, also one whose name was made to lead here (DNS rebinding). With a token it is whoever has it.

use std::hint::black_box;
use std::net::IpAddr;
use std::sync::Arc;

use hyper::header::{self, HeaderMap};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::{StatusCode, Uri};
use tollgate::Decision;

use super::answer::{self, More};
use super::problem::Problem;
use super::query::Query;
use super::{Caller, Reply};
use crate::gate::{Ask, Gate, HotClient, Verb};
use crate::server::Shared;

/// How many hot clients are told of each kind.
const HOT: usize = 20;
/// Header fields that only a proxy adds.
const OF_PROXIES: [&str; 3] = ["x-forwarded-for", "forwarded", "x-real-ip"];

/// Lets the operator through, and nobody else.
pub(super) fn admit(caller: &Caller, request: &Parts) -> Result<(), Problem> {
    let fields = &request.headers;
    let settings = caller.shared.settings.load();
    if let Some(token) = settings.admin_token.as_deref() {
        let given = fields.get(header::AUTHORIZATION).and_then(|given| bearer(given.as_bytes()));
        if given.is_some_and(|given| is_same(given, token.as_bytes())) {
            return Ok(());
        }
        let detail = "this is for the operator; send `Authorization: Bearer TOKEN`";
        return Err(
            Problem::new(StatusCode::UNAUTHORIZED, detail).with(header::WWW_AUTHENTICATE, "Bearer")
        );
    }
    let is_sent = OF_PROXIES.iter().any(|name| fields.contains_key(*name)) || is_foreign(fields);
    // No page reaches a Unix socket, and its clients call it what they like.
    let is_called_so = caller.peer.address.is_none() || is_called_local(request);
    let detail = match (caller.peer.is_local() && !is_sent, is_called_so) {
        (true, true) => return Ok(()),
        (true, false) => {
            "this is for the operator, who calls this machine localhost, 127.0.0.1 or [::1] until a token is configured"
        }
        (false, _) => {
            "this is for the operator: from the same machine, until a token is configured"
        }
    };
    Err(Problem::new(StatusCode::FORBIDDEN, detail))
}

/// Whether the request calls this server by a name that leads nowhere else.
fn is_called_local(request: &Parts) -> bool {
    let host = match request.uri.host() {
        Some(host) => Some(host.to_owned()),
        None => match request.headers.get(header::HOST).map(|host| host.to_str()) {
            // Browsers always say whom they mean.
            None => return true,
            Some(host) => host
                .ok()
                .and_then(|host| host.parse::<Authority>().ok())
                .map(|host| host.host().to_owned()),
        },
    };
    host.is_some_and(|host| is_loopback(&host))
}

/// Whether a host is this machine, by name or by number.
fn is_loopback(host: &str) -> bool {
    let number = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost")
        || number.parse::<IpAddr>().is_ok_and(|address| address.to_canonical().is_loopback())
}

fn bearer(given: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = given.split_at_checked("Bearer ".len())?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then_some(token)
}

/// Compares in a time that depends on the length alone.
fn is_same(one: &[u8], other: &[u8]) -> bool {
    let differing = one.iter().zip(other).fold(0, |bits, (one, other)| bits | (one ^ other));
    black_box(differing) == 0 && one.len() == other.len()
}

/// Whether a page of somewhere else sent it, from a browser on this machine.
fn is_foreign(fields: &HeaderMap) -> bool {
    let Some(origin) = fields.get(header::ORIGIN) else { return false };
    let origin = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
    !origin.as_ref().and_then(Uri::host).is_some_and(is_loopback)
}

/// The busiest and the most refused clients.
pub(super) fn hot(gate: &Gate, request: &Parts) -> Result<Reply, Problem> {
    Query::parse(request.uri.query(), &[])?;
    let mut out = Vec::new();
    out.extend_from_slice(br#"{"busiest":"#);
    list(&mut out, &gate.hot.busiest(HOT), clients);
    out.extend_from_slice(br#","most_refused":"#);
    list(&mut out, &gate.hot.most_refused(HOT), clients);
    out.push(b'}');
    Ok(answer::json(out))
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
    for (index, entry) in gate.policies().iter().enumerate() {
        let ask = Ask { policy: &entry.name, key, cost: None, tier: None };
        let next = gate.ask(Verb::Peek, ask).answer().await?;
        let now = gate.ask(Verb::Peek, Ask { cost: Some(0), ..ask }).answer().await?.decision;
        if index > 0 {
            out.push(b',');
        }
        let more = More { refused_by: next.refused_by.as_deref(), ..More::default() };
        let shown = Decision {
            limit: now.limit,
            remaining: now.remaining,
            reset_after: now.reset_after,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_are_the_same_or_not() {
        assert!(is_same(b"secret", b"secret"));
        for other in ["", "secre", "secrets", "secrex", "Secret"] {
            assert!(!is_same(other.as_bytes(), b"secret"), "{other}");
        }
    }

    #[test]
    fn a_page_of_somewhere_else_is_foreign() {
        let from = |origin: &str| {
            let mut fields = HeaderMap::new();
            fields.insert(header::ORIGIN, origin.parse().unwrap());
            is_foreign(&fields)
        };
        for foreign in ["https://evil.example", "null", "http://localhost.evil.example", "x"] {
            assert!(from(foreign), "{foreign}");
        }
        for own in ["http://localhost:8080", "http://127.0.0.1:8080", "http://[::1]:8080"] {
            assert!(!from(own), "{own}");
        }
        assert!(!is_foreign(&HeaderMap::new()));
    }
}
