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
use crate::config::{Denied, Given, Role};

/// Lets a request through if its caller has a role.
pub(super) fn admit(caller: &Caller, role: Role, request: &Parts) -> Result<(), Problem> {
    let is_operator = || is_operator(caller, request);
    let denied = match caller.shared.admit(SURFACE, role, || token(request), is_operator) {
        Ok(()) => {
            caller.has_authenticated.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(denied) => denied,
    };
    let (status, detail) = match (denied, role) {
        (Denied::AdminClosed, _) => (
            StatusCode::FORBIDDEN,
            "admin is closed: configure a token in `[auth] admin`, call over a Unix socket as the server's own user, \
             or set `[admin] loopback = true` and call localhost or 127.0.0.1 by HTTP/1.1 without a proxy",
        ),
        (Denied::CheckToken, _) => {
            (StatusCode::FORBIDDEN, "this is for the operator; your token lets you check")
        }
        (Denied::NoToken, Role::Admin) => (
            StatusCode::UNAUTHORIZED,
            "this is for the operator; send `Authorization: Bearer TOKEN`",
        ),
        (Denied::NoToken, Role::Check) => (
            StatusCode::UNAUTHORIZED,
            "missing or invalid token; send `Authorization: Bearer TOKEN`",
        ),
    };
    let problem = Problem::new(status, detail);
    Err(match status {
        StatusCode::UNAUTHORIZED => problem.with(header::WWW_AUTHENTICATE, "Bearer"),
        _ => problem,
    })
}

/// Returns whether a request comes from the operator, who needs no token while none is configured.
fn is_operator(caller: &Caller, request: &Parts) -> bool {
    // nginx calls with HTTP/1.0 and without forwarding fields unless it is configured otherwise.
    let is_direct = !is_forwarded(&request.headers) && request.version != Version::HTTP_10;
    let is_called_so = caller.peer.address.is_none() || is_called_local(request);
    caller.shared.is_operator(caller.peer) && is_direct && is_called_so
}

/// Returns the token that a request presents. Of two, another program may read the other one.
fn token(request: &Parts) -> Option<Given> {
    let mut given = request.headers.get_all(header::AUTHORIZATION).iter();
    match (given.next(), given.next()) {
        (Some(given), None) => bearer(given.as_bytes()).map(Given::new),
        _ => None,
    }
}

fn bearer(given: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = given.split_at_checked("Bearer ".len())?;
    // No token is longer: so long ones are not even hashed.
    (scheme.eq_ignore_ascii_case(b"Bearer ") && token.len() <= 1024).then_some(token)
}
