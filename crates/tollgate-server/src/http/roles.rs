//! Who may ask, and who may administer.
//!
//! Tokens of the configuration say so. Without tokens to ask with, anybody may ask. Without tokens to administer with, the
//! operator is whoever is on this machine and not sent by somebody: a proxy, or a page in a browser, also one whose name
//! was made to lead here (DNS rebinding).

use std::net::IpAddr;

use hyper::header::{self, HeaderMap};
use hyper::http::request::Parts;
use hyper::http::uri::Authority;
use hyper::{StatusCode, Uri};

use super::problem::Problem;
use super::{Caller, SURFACE};
use crate::config::{Given, Role};
use crate::metrics::SurfaceLabels;

/// Header fields that only a proxy adds, beside those that begin with `x-forwarded-`.
const OF_PROXIES: [&str; 3] = ["forwarded", "via", "x-real-ip"];

/// Lets through who has a role, and nobody else.
pub(super) fn admit(caller: &Caller, role: Role, request: &Parts) -> Result<(), Problem> {
    let settings = caller.shared.settings.load();
    let tokens = &settings.tokens;
    match role {
        Role::Check if !tokens.guard_checks() => return Ok(()),
        Role::Admin if !tokens.guard_administration() => return admit_from_here(caller, request),
        Role::Check | Role::Admin => {}
    }
    let given =
        request.headers.get(header::AUTHORIZATION).and_then(|given| bearer(given.as_bytes()));
    let (status, detail) = match (given.and_then(|given| tokens.role(Given::new(given))), role) {
        (Some(Role::Admin), _) | (Some(Role::Check), Role::Check) => return Ok(()),
        (Some(Role::Check), Role::Admin) => {
            (StatusCode::FORBIDDEN, "this is for the operator; your token lets you check")
        }
        (None, Role::Admin) => (
            StatusCode::UNAUTHORIZED,
            "this is for the operator; send `Authorization: Bearer TOKEN`",
        ),
        (None, Role::Check) => (
            StatusCode::UNAUTHORIZED,
            "one needs a token to ask; send `Authorization: Bearer TOKEN`",
        ),
    };
    let refused = &caller.shared.gate.metrics.tokens_refused;
    refused.get_or_create(&SurfaceLabels { surface: SURFACE }).inc();
    let problem = Problem::new(status, detail);
    Err(match status {
        StatusCode::UNAUTHORIZED => problem.with(header::WWW_AUTHENTICATE, "Bearer"),
        _ => problem,
    })
}

/// Lets the operator through who needs no token, being here.
fn admit_from_here(caller: &Caller, request: &Parts) -> Result<(), Problem> {
    let fields = &request.headers;
    let is_sent = is_forwarded(fields) || is_foreign(fields);
    // No page reaches a Unix socket, and its clients call it what they like.
    let is_called_so = caller.peer.address.is_none() || is_called_local(request);
    if caller.peer.is_local() && !caller.shared.is_operators(caller.peer) {
        let detail = "this is for the operator, and your address is a trusted proxy's: configure a token of `admin`";
        return Err(Problem::new(StatusCode::FORBIDDEN, detail));
    }
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

/// Whether a proxy sent it, by what it says.
fn is_forwarded(fields: &HeaderMap) -> bool {
    let mut names = fields.keys().map(header::HeaderName::as_str);
    names.any(|name| name.starts_with("x-forwarded-") || OF_PROXIES.contains(&name))
}

/// Whether a page of somewhere else sent it, from a browser on this machine.
fn is_foreign(fields: &HeaderMap) -> bool {
    let Some(origin) = fields.get(header::ORIGIN) else { return false };
    let origin = origin.to_str().ok().and_then(|origin| origin.parse::<Uri>().ok());
    !origin.as_ref().and_then(Uri::host).is_some_and(is_loopback)
}

#[cfg(test)]
mod tests {
    use super::*;

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
