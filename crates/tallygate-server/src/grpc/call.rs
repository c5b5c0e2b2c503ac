//! Calls: messages with a prefix in an HTTP/2 request, and a status in trailers.

use std::time::Duration;

use bytes::Bytes;
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderName, HeaderValue};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use tokio::sync::mpsc;

use crate::envoy::wire::WireError;
use crate::http::{Caller, Problem, Received, Reply, ReplyTail, read_body};

/// The longest message, in bytes. A descriptor has at most the header fields of a request, which Envoy limits to 60 KiB
/// by default.
pub(super) const MAX_MESSAGE_BYTES: usize = 128 * 1024;
/// The flag for compression, and the length of the message.
pub(super) const PREFIX_BYTES: usize = 5;
/// The longest description of a status, in bytes: parts of it may come from the request.
const MAX_DETAIL_BYTES: usize = 512;
/// The longest deadline: a longer one is as good as none.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(86_400);

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// The codes of failed calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    NotFound = 5,
    PermissionDenied = 7,
    ResourceExhausted = 8,
    Unimplemented = 12,
    Unavailable = 14,
    Unauthenticated = 16,
}

/// Why a call failed.
#[derive(Debug)]
pub(super) struct Status {
    code: Code,
    detail: String,
}

impl Status {
    pub(super) fn new(code: Code, detail: impl Into<String>) -> Self {
        let mut detail = detail.into();
        if detail.len() > MAX_DETAIL_BYTES {
            detail.truncate(detail.floor_char_boundary(MAX_DETAIL_BYTES - '…'.len_utf8()));
            detail.push('…');
        }
        Self { code, detail }
    }

    /// Returns a reply without a message.
    pub(super) fn reply(self) -> Reply {
        let mut reply = empty();
        let fields = reply.headers_mut();
        fields.insert(GRPC_STATUS, HeaderValue::from(self.code as u16));
        if let Ok(detail) = HeaderValue::try_from(percent_encoded(&self.detail)) {
            fields.insert(GRPC_MESSAGE, detail);
        }
        reply
    }
}

/// Encodes a description as gRPC says: printable ASCII without `%` as it is, other bytes as `%XX`.
fn percent_encoded(detail: &str) -> String {
    let mut out = String::with_capacity(detail.len());
    for byte in detail.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

fn empty() -> Reply {
    let mut reply = Reply::default();
    reply.headers_mut().insert(header::CONTENT_TYPE, GRPC);
    reply
}

/// Returns a reply to a request that is not a gRPC call, or `None` if it is one.
pub(super) fn check(request: &Parts) -> Option<Reply> {
    let is_grpc = request.headers.get(header::CONTENT_TYPE).is_some_and(|kind| {
        let kind = kind.as_bytes();
        let rest = kind.strip_prefix(GRPC.as_bytes());
        rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
    });
    let status = match request.method {
        Method::POST if is_grpc => return None,
        Method::POST => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        _ => StatusCode::METHOD_NOT_ALLOWED,
    };
    Some(Problem::new(status, "this listener serves gRPC only; use the HTTP listener").reply())
}

/// Returns the deadline of a call, from now.
pub(super) fn timeout(fields: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(given) = fields.get(GRPC_TIMEOUT) else { return Ok(None) };
    let invalid = || {
        Status::new(
            Code::InvalidArgument,
            "grpc-timeout is not valid; use a number and H, M, S, m, u or n",
        )
    };
    let text = given.to_str().map_err(|_| invalid())?;
    let (number, unit) = text.split_at_checked(text.len().saturating_sub(1)).ok_or_else(invalid)?;
    let is_number =
        (1..=8).contains(&number.len()) && number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse::<u64>().ok().filter(|_| is_number).ok_or_else(invalid)?;
    let timeout = match unit {
        "H" => Duration::from_secs(number * 3_600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return Err(invalid()),
    };
    Ok(Some(timeout.min(LONGEST_TIMEOUT)))
}

/// The message of a call with one request message.
pub(super) struct Unary(Received);

impl Unary {
    pub(super) async fn read(body: Incoming, caller: &Caller) -> Result<Self, Status> {
        let body = read_body(body, caller).await?;
        let Some((prefix, message)) = body.split_at_checked(PREFIX_BYTES) else {
            return Err(Status::new(Code::InvalidArgument, "the call has no message"));
        };
        if prefixed_length(prefix)? != message.len() {
            let detail =
                "the length of the message does not match its prefix; send one message per call";
            return Err(Status::new(Code::InvalidArgument, detail));
        }
        Ok(Self(body))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0[PREFIX_BYTES..]
    }
}

/// Returns the length in the prefix of a message.
pub(super) fn prefixed_length(prefix: &[u8]) -> Result<usize, Status> {
    let [flag, length @ ..] = prefix else {
        return Err(Status::new(Code::InvalidArgument, "the prefix of a message is missing"));
    };
    if *flag != 0 {
        return Err(Status::new(Code::Unimplemented, "compression is not supported"));
    }
    let length = length.iter().fold(0_usize, |length, byte| length << 8 | usize::from(*byte));
    if length > MAX_MESSAGE_BYTES {
        let detail = format!("the message has {length} bytes; the maximum is {MAX_MESSAGE_BYTES}");
        return Err(Status::new(Code::ResourceExhausted, detail));
    }
    Ok(length)
}

/// Returns a message with its prefix.
pub(super) fn framed(message: &[u8]) -> Bytes {
    let mut framed = Vec::with_capacity(PREFIX_BYTES + message.len());
    framed.push(0);
    // Replies are far smaller than 4 GiB.
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap_or(u32::MAX).to_be_bytes());
    framed.extend_from_slice(message);
    framed.into()
}

/// Returns the reply of a successful call.
pub(super) fn message_reply(message: &[u8]) -> Reply {
    let mut reply = empty();
    reply.extensions_mut().insert(ReplyTail::new(None, ok()));
    reply.map(|_| framed(message))
}

/// Returns a reply with messages that follow later, each with its prefix.
pub(super) fn stream_reply(messages: mpsc::Receiver<Bytes>) -> Reply {
    let mut reply = empty();
    reply.extensions_mut().insert(ReplyTail::new(Some(messages), ok()));
    reply
}

fn ok() -> HeaderMap {
    HeaderMap::from_iter([(GRPC_STATUS, HeaderValue::from_static("0"))])
}

impl From<Problem> for Status {
    fn from(problem: Problem) -> Self {
        let code = match problem.status {
            StatusCode::UNAUTHORIZED => Code::Unauthenticated,
            StatusCode::FORBIDDEN => Code::PermissionDenied,
            StatusCode::PAYLOAD_TOO_LARGE => Code::ResourceExhausted,
            StatusCode::REQUEST_TIMEOUT => Code::DeadlineExceeded,
            StatusCode::SERVICE_UNAVAILABLE => Code::Unavailable,
            _ => Code::InvalidArgument,
        };
        Self::new(code, problem.detail())
    }
}

impl From<WireError> for Status {
    fn from(error: WireError) -> Self {
        Self::new(Code::InvalidArgument, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault E8.
    #[test]
    fn a_long_description_is_cut_and_encoded() {
        let status = Status::new(Code::InvalidArgument, "ä%\n".repeat(10_000));
        assert!(status.detail.len() <= MAX_DETAIL_BYTES);
        let reply = status.reply();
        let message = reply.headers()[GRPC_MESSAGE].to_str().unwrap();
        assert!(message.starts_with("%C3%A4%25%0A") && message.ends_with("%E2%80%A6"));
    }

    #[test]
    fn deadlines_have_a_number_and_a_unit() {
        let of = |text: &'static str| {
            timeout(&HeaderMap::from_iter([(GRPC_TIMEOUT, HeaderValue::from_static(text))]))
        };
        for (text, expected) in [
            ("20m", Duration::from_millis(20)),
            ("1S", Duration::from_secs(1)),
            ("99999999H", LONGEST_TIMEOUT),
            ("0n", Duration::ZERO),
            ("7u", Duration::from_micros(7)),
            ("2M", Duration::from_secs(120)),
        ] {
            assert_eq!(of(text).unwrap(), Some(expected), "{text}");
        }
        for text in ["", "m", "1", "1x", "-1S", "123456789S", "1.5S"] {
            assert!(of(text).is_err(), "{text}");
        }
        assert_eq!(timeout(&HeaderMap::new()).unwrap(), None);
    }

    /// Fault E7.
    #[test]
    fn a_message_over_the_limit_is_rejected_by_its_prefix() {
        assert_eq!(prefixed_length(&[0, 0, 2, 0, 0]).unwrap(), MAX_MESSAGE_BYTES);
        let too_long = prefixed_length(&[0, 0, 2, 0, 1]).unwrap_err();
        assert_eq!(too_long.code, Code::ResourceExhausted);
        assert_eq!(prefixed_length(&[1, 0, 0, 0, 1]).unwrap_err().code, Code::Unimplemented);
    }
}
