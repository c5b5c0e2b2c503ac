//! What went wrong, as RFC 9457 has it: `application/problem+json`.

use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::{self, HeaderValue};

use super::{Reply, answer};
use crate::gate::AskError;

/// Why a request is not answered.
#[derive(Debug)]
pub(super) struct Problem {
    pub(super) status: StatusCode,
    detail: String,
    field: Option<(header::HeaderName, HeaderValue)>,
}

pub(super) const CONTENT_TYPE: HeaderValue = HeaderValue::from_static("application/problem+json");

/// The longest text about a problem, in bytes: some of it may come from the request.
const MAX_DETAIL_BYTES: usize = 512;

impl Problem {
    pub(super) fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self { status, detail: cut(detail.into()), field: None }
    }

    pub(super) fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }

    /// The same, with a header field that says more.
    pub(super) fn with(mut self, name: header::HeaderName, value: &'static str) -> Self {
        self.field = Some((name, HeaderValue::from_static(value)));
        self
    }

    /// The same, under another status.
    pub(super) fn under(mut self, status: Option<StatusCode>) -> Self {
        self.status = status.unwrap_or(self.status);
        self
    }

    /// The same, of one item of a list.
    pub(super) fn of_item(mut self, index: usize) -> Self {
        self.detail = cut(format!("item {index}: {}", self.detail));
        self
    }

    pub(super) fn reply(self) -> Reply {
        let mut json = Vec::with_capacity(96 + self.detail.len());
        json.extend_from_slice(br#"{"type":"about:blank","title":"#);
        answer::text(&mut json, self.status.canonical_reason().unwrap_or("Refused"));
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

impl From<AskError> for Problem {
    fn from(error: AskError) -> Self {
        let status = match error {
            AskError::UnknownPolicy { .. } => StatusCode::NOT_FOUND,
            AskError::UnknownTier(_) | AskError::KeyTooLong { .. } => StatusCode::BAD_REQUEST,
            AskError::Reservations { whose } if whose != "the server has" => {
                StatusCode::TOO_MANY_REQUESTS
            }
            AskError::Reservations { .. } | AskError::Store(_) => StatusCode::SERVICE_UNAVAILABLE,
        };
        Self::new(status, error.to_string())
    }
}

impl From<std::io::Error> for Problem {
    /// The answer where work in the background failed.
    fn from(error: std::io::Error) -> Self {
        tracing::error!(%error, "work in the background failed; the request is answered with an error");
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "the request could not be carried out")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn e8_a_long_text_is_cut_between_characters() {
        let problem = Problem::bad("ä".repeat(10_000)).of_item(3);
        assert!(problem.detail.len() <= MAX_DETAIL_BYTES);
        assert!(problem.detail.starts_with("item 3: ää") && problem.detail.ends_with("ä…"));
    }
}
