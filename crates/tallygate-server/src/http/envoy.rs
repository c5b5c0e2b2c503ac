//! `POST /json`: Envoy's rate limit service over HTTP, as envoyproxy/ratelimit has it.
//!
//! The body is a `RateLimitRequest` in JSON. The reply is the `RateLimitResponse`, with status 200, or 429 if the request
//! is over a limit.

use hyper::StatusCode;
use hyper::header::HeaderMap;
use tallygate::headers::Dialect;

use super::headers::Quota;
use super::problem::Problem;
use super::{Reply, answer, body};
use crate::config::EnvoyHeaders;
use crate::envoy::{
    EnvoyError, JsonRequest, RateLimitRequest, RateLimitResponse, decide, write_json,
};
use crate::gate::Gate;

pub(super) async fn reply(gate: &Gate, received: &[u8]) -> Result<Reply, Problem> {
    let request = body::parse::<JsonRequest<'_>>(received)?.into();
    let response = decide_for_envoy(gate, &request).await?;
    let mut reply = answer::json(write_json(&response).into_bytes());
    if response.is_over_limit {
        *reply.status_mut() = StatusCode::TOO_MANY_REQUESTS;
    }
    Ok(reply)
}

/// Decides a request, and adds the header fields that the configuration asks for.
///
/// # Errors
///
/// As for [`decide`].
pub(crate) async fn decide_for_envoy(
    gate: &Gate,
    request: &RateLimitRequest<'_>,
) -> Result<RateLimitResponse, EnvoyError> {
    let mut response = decide(gate, request).await?;
    response.headers = header_fields(&response);
    Ok(response)
}

fn header_fields(response: &RateLimitResponse) -> Vec<(String, String)> {
    let dialects: &[Dialect] = match response.wanted_headers {
        EnvoyHeaders::None => return Vec::new(),
        EnvoyHeaders::X => &[Dialect::X],
        EnvoyHeaders::Draft => &[Dialect::Draft10],
        EnvoyHeaders::All => &Dialect::ALL,
    };
    let Some(tightest) = &response.tightest else { return Vec::new() };
    let quota =
        Quota { policy: &tightest.policy, access: &tightest.access, decision: &tightest.decision };
    let mut fields = HeaderMap::new();
    quota.write_all(&mut fields, dialects);
    let text = |value: &hyper::header::HeaderValue| value.to_str().unwrap_or_default().to_owned();
    fields.iter().map(|(name, value)| (name.to_string(), text(value))).collect()
}
