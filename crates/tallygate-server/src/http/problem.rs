//! Errors as `application/problem+json` (RFC 9457).

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{self, HeaderValue};

use super::{Reply, answer};
use crate::envoy::EnvoyError;
use crate::gate::{GateError, ReservationScope, SettleFailure};

/// The error of a request.
#[derive(Debug)]
pub(crate) struct Problem {
    pub(crate) status: StatusCode,
    detail: String,
    field: Option<(header::HeaderName, HeaderValue)>,
}

pub(super) const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The longest detail, in bytes: parts of it may come from the request.
const MAX_DETAIL_BYTES: usize = 512;

impl Problem {
    pub(crate) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: cut(detail.into()), field: None }
    }

    pub(super) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// Returns the description.
    pub(crate) fn detail(&self) -> &str {
        &self.detail
    }

    /// Adds a header field.
    pub(super) fn with(mut self, name: header::HeaderName, value: &'static str) -> Self {
        self.field = Some((name, HeaderValue::from_static(value)));
        self
    }

    /// Replaces the status, if another is given.
    pub(super) fn under(mut self, status: Option<StatusCode>) -> Self {
        self.status = status.unwrap_or(self.status);
        self
    }

    /// Adds the index of an item.
    pub(super) fn of_item(mut self, index: usize) -> Self {
        self.detail = cut(format!("item {index}: {}", self.detail));
        self
    }

    pub(crate) fn reply(self) -> Reply {
        let mut json = Vec::with_capacity(96 + self.detail.len());
        json.extend_from_slice(br#"{"type":"about:blank","title":"#);
        answer::text(&mut json, self.status.canonical_reason().unwrap_or("Request Rejected"));
        json.extend_from_slice(br#","status":"#);
        answer::number(&mut json, self.status.as_u16());
        json.extend_from_slice(br#","detail":"#);
        answer::text(&mut json, &self.detail);
        json.push(b'}');
        let mut reply = Reply::new(Bytes::from(json));
        *reply.status_mut() = self.status;
        reply.headers_mut().insert(header::CONTENT_TYPE, CONTENT_TYPE);
        if let Some((name, value)) = self.field {
            reply.headers_mut().insert(name, value);
        }
        reply
    }
}

fn cut(mut text: String) -> String {
    if text.len() > MAX_DETAIL_BYTES {
        text.truncate(text.floor_char_boundary(MAX_DETAIL_BYTES - '…'.len_utf8()));
        text.push('…');
    }
    text
}

impl From<EnvoyError> for Problem {
    fn from(error: EnvoyError) -> Self {
        let status = match error {
            EnvoyError::Invalid(_) => StatusCode::BAD_REQUEST,
            EnvoyError::TooLarge(_) => StatusCode::PAYLOAD_TOO_LARGE,
            EnvoyError::Unavailable(_) => StatusCode::SERVICE_UNAVAILABLE,
            EnvoyError::NotConfigured => StatusCode::NOT_FOUND,
        };
        Self::new(status, error.to_string())
    }
}

impl From<GateError> for Problem {
    fn from(error: GateError) -> Self {
        let status = match error {
            GateError::UnknownPolicy { .. } => StatusCode::NOT_FOUND,
            GateError::UnknownTier(_)
            | GateError::KeyTooLong { .. }
            | GateError::NothingToReserve
            | GateError::TimeToLive { .. }
            | GateError::Items { .. } => StatusCode::BAD_REQUEST,
            GateError::TooManyReservations { scope: ReservationScope::Server }
            | GateError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
            GateError::TooManyReservations { .. } => StatusCode::TOO_MANY_REQUESTS,
        };
        Self::new(status, error.to_string())
    }
}

impl From<SettleFailure> for Problem {
    fn from(failure: SettleFailure) -> Self {
        let status = match failure {
            SettleFailure::Unknown | SettleFailure::Reset => StatusCode::NOT_FOUND,
            SettleFailure::AlreadySettled => StatusCode::CONFLICT,
            SettleFailure::Store(error) => return error.into(),
        };
        Self::new(status, failure.to_string())
    }
}

impl From<std::io::Error> for Problem {
    /// Returns the error for failed background work.
    fn from(error: std::io::Error) -> Self {
        tracing::error!(%error, "background work failed; answering the request with status 500");
        Self::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "internal error; the server log has the reason",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault E8.
    #[test]
    fn a_long_text_is_cut_between_characters() {
        let problem = Problem::bad("ä".repeat(10_000)).of_item(3);
        assert!(problem.detail.len() <= MAX_DETAIL_BYTES);
        assert!(problem.detail.starts_with("item 3: ää") && problem.detail.ends_with("ä…"));
    }
}
