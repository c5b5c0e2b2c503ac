//! Who may ask, and who may administer.
//!
//! Tokens of the configuration decide. Without check tokens, every caller may ask. Without admin tokens, the admin verbs
//! are closed: they answer on a Unix socket to processes of the server's own user and of root, and on loopback only if the
//! configuration says so. A proxy on the same machine also connects from loopback, with anybody's requests.

use std::sync::atomic::Ordering;

use hyper::header;
use hyper::http::request::Parts;
use hyper::{StatusCode, Version};

use super::identity::{is_called_local, is_forwarded};
use super::problem::Problem;
use super::{Caller, SURFACE};
use crate::config::{Given, Role};
use crate::metrics::SurfaceLabels;

/// Lets through who has a role, and nobody else.
pub(super) fn admit(caller: &Caller, role: Role, request: &Parts) -> Result<(), Problem> {
    let settings = caller.shared.settings.load();
    let tokens = &settings.tokens;
    match role {
        Role::Check if !tokens.guard_checks() => return Ok(()),
        Role::Admin if !tokens.guard_administration() => {
            return admit_without_token(caller, request);
        }
        Role::Check | Role::Admin => {}
    }
    let mut given = request.headers.get_all(header::AUTHORIZATION).iter();
    let given = match (given.next(), given.next()) {
        (Some(given), None) => bearer(given.as_bytes()),
        // Of two, another program may read the other one.
        _ => None,
    };
    let (status, detail) = match (given.and_then(|given| tokens.role(Given::new(given))), role) {
        (Some(Role::Admin), _) | (Some(Role::Check), Role::Check) => {
            caller.has_authenticated.store(true, Ordering::Relaxed);
            return Ok(());
        }
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

/// Lets an operator through without a token, while none is configured.
fn admit_without_token(caller: &Caller, request: &Parts) -> Result<(), Problem> {
    // nginx calls with HTTP/1.0 and without forwarding fields unless it is configured otherwise.
    let is_direct = !is_forwarded(&request.headers) && request.version != Version::HTTP_10;
    let is_called_so = caller.peer.address.is_none() || is_called_local(request);
    if caller.shared.is_operator(caller.peer) && is_direct && is_called_so {
        return Ok(());
    }
    let detail = "admin is closed: configure a token in `[auth] admin`, call over a Unix socket as the server's own user, \
                  or set `[admin] loopback = true` and call localhost or 127.0.0.1 by HTTP/1.1 without a proxy";
    Err(Problem::new(StatusCode::FORBIDDEN, detail))
}

fn bearer(given: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = given.split_at_checked("Bearer ".len())?;
    // No token is longer: so long ones are not even hashed.
    (scheme.eq_ignore_ascii_case(b"Bearer ") && token.len() <= 1024).then_some(token)
}
