//! `/v1/authorize/{policy}`: a proxy asks whether to let a request through.
//!
//! For nginx's `auth_request`, Caddy's `forward_auth`, Traefik's `ForwardAuth`. The policy says where the client is found:
//! in a header field, or by its address. A refusal has the status that the proxy can hand on: `?deny=403` for nginx,
//! which makes a 500 of whatever is not 2xx, 401 or 403.

use hyper::StatusCode;
use hyper::header;
use hyper::http::request::Parts;
use tallygate::Source;
use tallygate_lab::address::key_within;

use super::headers::{Dialect, Quota};
use super::problem::{self, Problem};
use super::query::{self, Query};
use super::{Caller, Reply, address, answer, questions};
use crate::config::KeySource;
use crate::gate::{Ask, Entry, Verb};

const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const QUOTA_EXCEEDED_TITLE: &str =
    "Request cannot be satisfied as assigned quota has been exceeded";

/// How the proxy wants to be answered.
struct Wanted {
    deny: Option<StatusCode>,
    dialects: &'static [Dialect],
}

/// What a proxy asks, without the head of its request: the decision may take long.
pub(super) struct Question {
    policy: String,
    key: Vec<u8>,
    query: Query,
    wanted: Wanted,
}

impl Question {
    pub(super) fn of(caller: &Caller, policy: &str, request: &Parts) -> Result<Self, Problem> {
        let policy = String::from_utf8(query::decoded(policy, false)?)
            .map_err(|_| Problem::new(StatusCode::NOT_FOUND, "no policy has such a name"))?;
        let entry = caller.shared.gate.policy(questions::known_length(&policy)?)?;
        let query = Query::parse(request.uri.query(), &["tier", "cost", "deny", "headers"])?;
        query.text("tier")?;
        query.number("cost")?;
        let wanted =
            Wanted { deny: deny(&query)?, dialects: Dialect::wanted(&query, &Dialect::ALL)? };
        let key = key(caller, &entry, request).map_err(|problem| problem.under(wanted.deny))?;
        Ok(Self { policy, key, query, wanted })
    }
}

pub(super) async fn authorize(caller: &Caller, question: Question) -> Result<Reply, Problem> {
    let Question { policy, key, query, wanted } = question;
    let gate = &caller.shared.gate;
    let (tier, cost) = (query.text("tier")?, query.number("cost")?);
    let ask = Ask { policy: &policy, key: &key, cost, tier, shows_access: true };
    let asked = gate.ask(Verb::Check, ask).answer().await;
    let told = asked.map_err(|error| match Problem::from(error) {
        failure if failure.status == StatusCode::SERVICE_UNAVAILABLE => failure.under(wanted.deny),
        mistake => mistake,
    })?;
    let quota = Quota::of(&told).unwrap_or_else(|| unreachable!("the question shows the access"));
    Ok(reply(&quota, &wanted))
}

fn reply(quota: &Quota<'_>, wanted: &Wanted) -> Reply {
    let mut reply = match (quota.decision.allowed, quota.decision.source) {
        (true, _) => Reply::default(),
        (false, Source::FailedClosed) => {
            let detail = "the store cannot be asked, and the policy refuses meanwhile";
            Problem::new(StatusCode::SERVICE_UNAVAILABLE, detail).under(wanted.deny).reply()
        }
        (false, _) => refusal(quota, wanted.deny.unwrap_or(StatusCode::TOO_MANY_REQUESTS)),
    };
    let fields = reply.headers_mut();
    quota.write_all(fields, wanted.dialects);
    // A proxy that caches must not.
    fields.insert(header::CACHE_CONTROL, header::HeaderValue::from_static("no-store"));
    reply
}

fn refusal(quota: &Quota<'_>, status: StatusCode) -> Reply {
    let mut json = Vec::with_capacity(256);
    json.extend_from_slice(br#"{"type":"#);
    answer::text(&mut json, QUOTA_EXCEEDED);
    json.extend_from_slice(br#","title":"#);
    answer::text(&mut json, QUOTA_EXCEEDED_TITLE);
    json.extend_from_slice(br#","status":"#);
    answer::number(&mut json, status.as_u16());
    json.extend_from_slice(br#","violated-policies":["#);
    answer::text(&mut json, &quota.violated());
    json.extend_from_slice(b"]}");
    let mut reply = answer::with_type(json, problem::CONTENT_TYPE);
    *reply.status_mut() = status;
    reply
}

/// Who the client is, by the policy's account.
fn key(caller: &Caller, entry: &Entry, request: &Parts) -> Result<Vec<u8>, Problem> {
    match &entry.key {
        KeySource::Address => {
            let trusted = &caller.shared.settings.load().trusted_proxies;
            let address = address::client(caller.peer, &request.headers, trusted);
            let address = address.ok_or_else(|| {
                Problem::bad("the client has no address; send it in X-Forwarded-For")
            })?;
            Ok(key_within(address, entry.ipv6_prefix).into_bytes())
        }
        KeySource::Header(name) => {
            let mut values = request.headers.get_all(&**name).iter();
            match (values.next().filter(|value| !value.is_empty()), values.next()) {
                (Some(value), None) => Ok(value.as_bytes().to_vec()),
                (None, _) => Err(Problem::bad(format!(
                    "the header field {name} says who the client is, and is missing"
                ))),
                // Whoever stands behind the proxy may read the other one.
                (Some(_), Some(_)) => {
                    Err(Problem::bad(format!("the header field {name} is given more than once")))
                }
            }
        }
    }
}

fn deny(query: &Query) -> Result<Option<StatusCode>, Problem> {
    let Some(given) = query.number("deny")? else { return Ok(None) };
    let status = u16::try_from(given).ok().and_then(|status| StatusCode::from_u16(status).ok());
    // A refusal is no failure of the server, whatever it is called.
    let refusing = status.filter(StatusCode::is_client_error);
    let told = || Problem::bad(format!("deny={given} is no refusal; use a status from 400 to 499"));
    refusing.map(Some).ok_or_else(told)
}
