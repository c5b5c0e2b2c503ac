//! `/v1/authorize/{policy}`: a proxy checks a request.
//!
//! For nginx's `auth_request`, Caddy's `forward_auth`, Traefik's `ForwardAuth`. The policy defines where the key is: in
//! a header field, or the client address. A denial has a status that the proxy supports: `?deny=403` for nginx, which
//! turns every status except for 2xx, 401 and 403 into 500. A request without a key gets a 401, so that a proxy can distinguish
//! it from a denial.
//!
//! A leaky bucket computes how long an allowed request should wait. The reply has this delay in a header field, or the server
//! holds the reply for the delay (`?hold_ms=`), so that a proxy forwards requests evenly without a timer of its own.

use std::sync::Arc;
use std::time::Duration;

use hyper::StatusCode;
use hyper::header;
use hyper::http::request::Parts;
use tallygate::address::key_within;
use tallygate::headers::Dialect;
use tallygate::{Ask, Source, Ticks};

use super::headers::{DecisionHeaders, wanted_dialects};
use super::problem::{self, Problem};
use super::query::{self, Query};
use super::{Caller, Reply, address, answer, operations};
use crate::config::KeySource;
use crate::gate::{self, ServedPolicy, Verb};

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const QUOTA_EXCEEDED_TITLE: &str =
    "Request cannot be satisfied as assigned quota has been exceeded";

/// Options of the reply.
struct ReplyOptions {
    deny: Option<StatusCode>,
    dialects: &'static [Dialect],
    /// How long the reply may be held.
    hold: Duration,
}

/// How long the caller should delay the request, in milliseconds. Absent if there is no delay.
const DELAY: header::HeaderName = header::HeaderName::from_static("x-ratelimit-delay-ms");

/// The parsed request of a proxy. The head of the request is dropped, because the decision may take long.
pub(super) struct AuthorizeRequest {
    /// The policy that defines where the key is also decides: after a reload, another one may have its name.
    policy: Arc<ServedPolicy>,
    key: Vec<u8>,
    query: Query,
    wanted: ReplyOptions,
}

impl AuthorizeRequest {
    pub(super) fn of(caller: &Caller, policy: &str, request: &Parts) -> Result<Self, Problem> {
        let name = String::from_utf8(query::decoded(policy, false)?).map_err(|_| {
            Problem::new(StatusCode::NOT_FOUND, "no policy has this name (it is not valid UTF-8)")
        })?;
        let policy = caller.shared.gate.policy(operations::check_name_length(&name)?)?;
        let parameters = ["tier", "cost", "deny", "headers", "hold_ms"];
        let query = Query::parse(request.uri.query(), &parameters)?;
        query.text("tier")?;
        query.number("cost")?;
        let wanted = ReplyOptions {
            deny: deny(&query)?,
            dialects: wanted_dialects(&query, &Dialect::ALL)?,
            hold: hold(&query, caller.limits.max_hold)?,
        };
        let key = key(caller, &policy, request)?;
        Ok(Self { policy, key, query, wanted })
    }
}

pub(super) async fn authorize(request: AuthorizeRequest) -> Result<Reply, Problem> {
    let AuthorizeRequest { policy, key, query, wanted } = request;
    let cost = query.number("cost")?.unwrap_or(policy.cost);
    let ask = Ask::new(&key).cost(cost).tier(query.text("tier")?);
    let asked = policy.ask(Verb::Check, ask).answer().await;
    let answer = asked.map_err(|error| match Problem::from(error) {
        failure if failure.status == StatusCode::SERVICE_UNAVAILABLE => failure.under(wanted.deny),
        mistake => mistake,
    })?;
    let delay = answer.decision.delay.as_duration();
    let held = delay.min(wanted.hold);
    if !held.is_zero() {
        tokio::time::sleep(held).await;
    }
    Ok(reply(&DecisionHeaders::of(&answer), &wanted, delay - held))
}

fn reply(decided: &DecisionHeaders<'_>, wanted: &ReplyOptions, delay: Duration) -> Reply {
    let mut reply = match (decided.decision.allowed, decided.decision.source) {
        (true, _) => Reply::default(),
        (false, Source::FailedClosed) => {
            let detail = "the store is unavailable, and the policy denies requests meanwhile (on_store_error = \"deny\")";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).under(wanted.deny).reply()
        }
        (false, _) => denial(decided, wanted.deny.unwrap_or(StatusCode::TOO_MANY_REQUESTS)),
    };
    let fields = reply.headers_mut();
    decided.write_all(fields, wanted.dialects);
    if !delay.is_zero() {
        fields.insert(DELAY, gate::milliseconds(Ticks::from_duration(delay)).into());
    }
    // A proxy must not cache the reply.
    fields.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    reply
}

fn denial(decided: &DecisionHeaders<'_>, status: StatusCode) -> Reply {
    let mut json = Vec::with_capacity(256);
    json.extend_from_slice(br#"{"type":"#);
    answer::text(&mut json, QUOTA_EXCEEDED);
    json.extend_from_slice(br#","title":"#);
    answer::text(&mut json, QUOTA_EXCEEDED_TITLE);
    json.extend_from_slice(br#","status":"#);
    answer::number(&mut json, status.as_u16());
    json.extend_from_slice(br#","violated-policies":["#);
    answer::text(&mut json, &decided.violated());
    json.extend_from_slice(b"]}");
    let mut reply = answer::with_type(json, problem::CONTENT_TYPE);
    *reply.status_mut() = status;
    reply
}

/// Returns the key of the client, as the policy defines it.
fn key(caller: &Caller, policy: &ServedPolicy, request: &Parts) -> Result<Vec<u8>, Problem> {
    match &policy.key {
        KeySource::Address => {
            let settings = caller.shared.settings.load();
            settings.warn_if_ignored(caller.peer, &request.headers);
            let address = address::client(caller.peer, &request.headers, &settings.trusted_proxies);
            let address = address.ok_or_else(|| {
                Problem::bad("the client address is unknown; send it in X-Forwarded-For")
            })?;
            Ok(key_within(address, policy.ipv6_prefix).into_bytes())
        }
        KeySource::Header(name) => {
            let mut values = request.headers.get_all(&**name).iter();
            match (values.next().filter(|value| !value.is_empty()), values.next()) {
                (Some(value), None) => Ok(value.as_bytes().to_vec()),
                (None, _) => Err(no_key(format!(
                    "missing header field {name}; the policy uses it as the key"
                ))),
                // The upstream server might use the other value.
                (Some(_), Some(_)) => Err(no_key(format!(
                    "header field {name} is given more than once; send it once"
                ))),
            }
        }
    }
}

/// A request without a key is not denied by a limit: nginx passes on a 401, but not a 400.
fn no_key(detail: String) -> Problem {
    Problem::new(StatusCode::UNAUTHORIZED, detail).with(header::WWW_AUTHENTICATE, "Key")
}

/// Returns how long the reply may be held.
fn hold(query: &Query, longest: Duration) -> Result<Duration, Problem> {
    let Some(given) = query.number("hold_ms")? else { return Ok(Duration::ZERO) };
    let hold = Duration::from_millis(given);
    if hold <= longest {
        return Ok(hold);
    }
    let longest = longest.as_millis();
    Err(Problem::bad(format!(
        "hold_ms must be at most {longest} (got {given}; the maximum is `max_hold` in `[limits]`)"
    )))
}

fn deny(query: &Query) -> Result<Option<StatusCode>, Problem> {
    let Some(given) = query.text("deny")? else { return Ok(None) };
    let status = StatusCode::from_bytes(given.as_bytes()).ok();
    // A denial must not look like an error of the server.
    let denial = status.filter(StatusCode::is_client_error);
    let invalid = || Problem::bad(format!("deny must be a status from 400 to 499 (got {given})"));
    denial.map(Some).ok_or_else(invalid)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::Config;

    #[test]
    fn the_policy_that_defines_the_key_decides_and_is_named_whatever_is_reloaded() {
        let config = |text: &str| Config::parse(text, Path::new("")).expect("valid");
        let api =
            "[policies.api]\nalgorithm = \"fixed_window\"\nlimit = 5\nwindow = \"1h\"\ncost = 2\n";
        let shared = crate::fuzzing::shared(&config(api));
        let request = || AuthorizeRequest {
            policy: shared.gate.policy("api").expect("in force"),
            key: b"alice".to_vec(),
            query: Query::parse(None, &[]).unwrap_or_else(|_| unreachable!("it is empty")),
            wanted: ReplyOptions { deny: None, dialects: &Dialect::ALL, hold: Duration::ZERO },
        };
        let fields = |request| {
            let reply = tallygate::block_on(authorize(request));
            let reply = reply.unwrap_or_else(Problem::reply);
            let field = |name: &str| reply.headers().get(name).cloned();
            (reply.status(), field("x-ratelimit-remaining"), field("ratelimit-policy"))
        };
        let of_api = Some(header::HeaderValue::from_static("\"api\";q=5;w=3600"));
        let first = request();
        shared.gate.put_in_force(&config(&api.replace("cost = 2", "cost = 4")));
        assert_eq!(fields(first), (StatusCode::OK, Some(3.into()), of_api.clone()));
        let second = request();
        shared.gate.put_in_force(&config(""));
        let denied = (StatusCode::TOO_MANY_REQUESTS, Some(3.into()), of_api);
        assert_eq!(fields(second), denied, "the cost is 4");
    }
}
