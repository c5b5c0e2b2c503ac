//! `POST /json`: Envoy's rate limit service over HTTP, as envoyproxy/ratelimit has it.
//!
//! The body is a `RateLimitRequest` in JSON. The reply is the `RateLimitResponse`, with status 200, or 429 if the request
//! is over a limit.

use hyper::StatusCode;
use hyper::header::{HeaderMap, HeaderName};
use tallygate::headers::Dialect;

use super::headers::DecisionHeaders;
use super::problem::Problem;
use super::{Reply, answer, body};
use crate::config::EnvoyHeaders;
use crate::envoy::{
    Decided, EnvoyError, HeaderValue, RateLimitRequest, RateLimitResponse, TightestLimit, decide,
};
use crate::gate::Gate;

pub(super) async fn reply(gate: &Gate, received: &[u8]) -> Result<Reply, Problem> {
    let request = body::parse::<RateLimitRequest>(received)?;
    let response = decide_for_envoy(gate, &request).await?;
    // Writing to memory cannot fail.
    let mut reply = answer::json(serde_json::to_vec(&response).unwrap_or_default());
    if response.is_over_limit() {
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
    request: &RateLimitRequest,
) -> Result<RateLimitResponse, EnvoyError> {
    let mut decided = decide(gate, request).await?;
    decided.response.response_headers_to_add = header_fields(&decided);
    Ok(decided.response)
}

fn header_fields(decided: &Decided) -> Vec<HeaderValue> {
    let dialects: &[Dialect] = match decided.wanted_headers {
        EnvoyHeaders::None => return Vec::new(),
        EnvoyHeaders::X => &[Dialect::X],
        EnvoyHeaders::Draft => &[Dialect::Draft10],
        EnvoyHeaders::All => &Dialect::ALL,
    };
    let Some(tightest) = &decided.tightest else { return Vec::new() };
    let TightestLimit { policy, access, decision } = tightest;
    let mut fields = HeaderMap::new();
    DecisionHeaders { policy, access, decision }.write_all(&mut fields, dialects);
    let field = |(name, value): (&HeaderName, &hyper::header::HeaderValue)| HeaderValue {
        key: name.to_string(),
        value: value.to_str().unwrap_or_default().to_owned(),
    };
    fields.iter().map(field).collect()
}
