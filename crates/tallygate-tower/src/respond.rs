//! The response to a denied request: problem+json (RFC 9457), a gRPC status, or one of the application's own.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use tallygate::{Decision, Source, Ticks};

use crate::grpc;
use crate::limiter::LimiterError;
use crate::verdict::{Reason, Verdict};

const PROBLEM_JSON: HeaderValue = HeaderValue::from_static("application/problem+json");
const QUOTA_EXCEEDED: &str = "https://iana.org/assignments/http-problem-types#quota-exceeded";
const QUOTA_EXCEEDED_TITLE: &str =
    "Request cannot be satisfied as assigned quota has been exceeded";

/// A denied request, for a [response of your own](crate::RateLimit::respond_with).
#[derive(Clone, Copy)]
pub struct Denial<'a> {
    pub(crate) verdict: &'a Verdict,
    pub(crate) reason: &'a Reason,
}

impl<'a> Denial<'a> {
    /// Returns why the request is denied.
    #[must_use]
    pub const fn reason(&self) -> &'a Reason {
        self.reason
    }

    /// Returns the status of the default response: 429; 503 if the store is unavailable; 400 if the client sent no valid
    /// key; 500 if the application is not set up correctly.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.reason {
            Reason::Limited if self.is_outage() => StatusCode::SERVICE_UNAVAILABLE,
            Reason::Limited | Reason::InFlight => StatusCode::TOO_MANY_REQUESTS,
            Reason::MissingKey(missing) if missing.is_correctable() => StatusCode::BAD_REQUEST,
            Reason::Failed(LimiterError::KeyTooLong { .. }) => StatusCode::BAD_REQUEST,
            Reason::Failed(LimiterError::Store(_)) => StatusCode::SERVICE_UNAVAILABLE,
            Reason::MissingKey(_) | Reason::Failed(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    /// Returns the decision that denies the request, if a limit does.
    #[must_use]
    pub fn decision(&self) -> Option<&'a Decision> {
        self.verdict.decision().filter(|decision| !decision.allowed)
    }

    /// Returns the name of the policy that denies the request, if one does.
    #[must_use]
    pub fn policy(&self) -> Option<&'a str> {
        self.decision().and(self.verdict.policy())
    }

    /// Returns the name of the policy and, if it has several limits, of the limit that denies the request.
    #[must_use]
    pub fn limit(&self) -> Option<Cow<'a, str>> {
        self.decision().and_then(|_| self.verdict.violated())
    }

    /// Returns how long the client should wait; `None` if waiting does not help.
    ///
    /// `Retry-After` has the same time in whole seconds, rounded up.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match (self.reason, self.decision()) {
            (Reason::Limited, Some(decision)) => {
                decision.retry_after.map(|wait| wait.max(Ticks(1)).as_duration())
            }
            // The time when a request ends or a store recovers is unknown.
            (Reason::InFlight | Reason::Failed(LimiterError::Store(_)), _) => {
                Some(Duration::from_secs(1))
            }
            _ => None,
        }
    }

    /// Returns a sentence for the client. It does not reveal how the application is set up.
    pub(crate) fn detail(&self) -> Cow<'a, str> {
        match self.reason {
            Reason::Limited if self.is_outage() => {
                "the store of the rate limit is unavailable".into()
            }
            Reason::Limited => match self.limit() {
                Some(limit) => format!("the quota of {limit} is exceeded").into(),
                None => "the quota is exceeded".into(),
            },
            Reason::InFlight => "too many requests are in flight".into(),
            Reason::MissingKey(missing) if missing.is_correctable() => missing.to_string().into(),
            Reason::Failed(error @ LimiterError::KeyTooLong { .. }) => error.to_string().into(),
            Reason::Failed(LimiterError::Store(_)) => "the rate limit cannot be checked".into(),
            Reason::MissingKey(_) | Reason::Failed(_) => "the rate limit is misconfigured".into(),
        }
    }

    fn is_outage(&self) -> bool {
        self.decision().is_some_and(|decision| decision.source == Source::FailedClosed)
    }
}

impl fmt::Debug for Denial<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Denial")
            .field("reason", self.reason)
            .field("decision", &self.decision())
            .finish()
    }
}

/// Returns the response to a denied request, with the header fields of the quota.
pub(crate) fn response(denial: &Denial<'_>) -> Response<Bytes> {
    if denial.verdict.is_grpc {
        let mut response = grpc::response(denial.status(), &denial.detail(), denial.retry_after());
        denial.verdict.write_headers(response.headers_mut());
        return response;
    }
    let mut response = match &denial.verdict.limit.settings.respond {
        Some(respond) => respond(denial),
        None => problem(denial),
    };
    let mut fields = denial.verdict.headers();
    // A cache must not store the response (RFC 6585).
    fields.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let names: Vec<_> = fields.keys().cloned().collect();
    for name in names {
        if !response.headers().contains_key(&name) {
            for value in fields.get_all(&name) {
                response.headers_mut().append(name.clone(), value.clone());
            }
        }
    }
    response
}

fn problem(denial: &Denial<'_>) -> Response<Bytes> {
    let status = denial.status();
    let mut json = String::with_capacity(256);
    let limit = denial.limit().filter(|_| status == StatusCode::TOO_MANY_REQUESTS);
    json.push_str(r#"{"type":"#);
    if let Some(limit) = limit {
        push_text(&mut json, QUOTA_EXCEEDED);
        json.push_str(r#","title":"#);
        push_text(&mut json, QUOTA_EXCEEDED_TITLE);
        json.push_str(r#","violated-policies":["#);
        push_text(&mut json, &limit);
        json.push(']');
    } else {
        push_text(&mut json, "about:blank");
        json.push_str(r#","title":"#);
        push_text(&mut json, status.canonical_reason().unwrap_or("Denied"));
        json.push_str(r#","detail":"#);
        push_text(&mut json, &denial.detail());
    }
    json.push_str(&format!(r#","status":{}}}"#, status.as_u16()));
    let mut response = Response::new(Bytes::from(json));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, PROBLEM_JSON);
    response
}

/// Writes a string of JSON.
fn push_text(json: &mut String, text: &str) {
    json.push('"');
    for character in text.chars() {
        match character {
            '"' | '\\' => json.extend(['\\', character]),
            '\0'..='\x1f' => json.push_str(&format!("\\u{:04x}", u32::from(character))),
            _ => json.push(character),
        }
    }
    json.push('"');
}
