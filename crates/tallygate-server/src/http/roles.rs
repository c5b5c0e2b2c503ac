//! Authorizes requests: who may check, and who may administer.
//!
//! Without check tokens, every client may check. Without admin tokens, admin requests are disabled, except over a Unix
//! socket for processes of the server's own user and of root. On loopback they are only allowed if the configuration
//! says so: a proxy on the same machine also connects from loopback, with requests of any client.

use std::sync::atomic::Ordering;

use hyper::header;
use hyper::http::request::Parts;
use hyper::{StatusCode, Version};

use super::Caller;
use super::identity::{is_called_local, is_forwarded};
use super::problem::Problem;
use crate::config::{AccessDenied, LONGEST_TOKEN, Role, TokenDigest};

/// Checks that the caller has a role.
pub(crate) fn authorize(caller: &Caller, role: Role, request: &Parts) -> Result<(), Problem> {
    let is_operator = || is_operator(caller, request);
    let denied = match caller.shared.authorize(caller.surface, role, || token(request), is_operator)
    {
        Ok(()) => {
            caller.has_authenticated.store(true, Ordering::Relaxed);
            return Ok(());
        }
        Err(denied) => denied,
    };
    let (status, detail) = match (denied, role) {
        (AccessDenied::AdminClosed, _) => (
            StatusCode::FORBIDDEN,
            "admin requests are disabled: configure a token in `[auth] admin`, call over a Unix socket as the server's own user, \
             or set `[admin] loopback = true` and call localhost or 127.0.0.1 by HTTP/1.1 without a proxy",
        ),
        (AccessDenied::CheckToken, _) => {
            (StatusCode::FORBIDDEN, "this needs an admin token; the token sent is a check token")
        }
        (AccessDenied::NoToken, Role::Admin) => (
            StatusCode::UNAUTHORIZED,
            "this needs an admin token; send `Authorization: Bearer TOKEN`",
        ),
        (AccessDenied::NoToken, Role::Check) => (
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

/// Returns the token of a request. Two tokens are ambiguous: a proxy might use the other one.
fn token(request: &Parts) -> Option<TokenDigest> {
    let mut given = request.headers.get_all(header::AUTHORIZATION).iter();
    match (given.next(), given.next()) {
        (Some(given), None) => bearer(given.as_bytes()).map(TokenDigest::new),
        _ => None,
    }
}

fn bearer(given: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = given.split_at_checked("Bearer ".len())?;
    // Valid tokens are shorter, so do not hash longer ones.
    (scheme.eq_ignore_ascii_case(b"Bearer ") && token.len() <= LONGEST_TOKEN).then_some(token)
}
