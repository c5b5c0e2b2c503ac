//! Calls: their deadline, their messages, and how they fail.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use tonic::body::Body;
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::{Code, Status};

use crate::client_budgets::HeldBytes;
use crate::envoy::EnvoyError;
use crate::http::{Caller, Content, Problem, Reply, read_body};

/// The longest message of a stream, in bytes: the name of a service or of a symbol.
pub(super) const MAX_STREAMED_BYTES: usize = 512;
/// How long the client of a stream may take to send the next message.
const IDLE: Duration = Duration::from_secs(30);
/// The longest description of a status, in bytes: parts of it may come from the request.
const MAX_DETAIL_BYTES: usize = 512;
/// The longest deadline: a longer one is as good as none.
const LONGEST_TIMEOUT: Duration = Duration::from_secs(86_400);

/// Returns a reply to a request that is not a gRPC call, or `None` if it is one.
pub(super) fn check<B>(request: &Request<B>) -> Option<Reply> {
    let is_grpc = request.headers().get(header::CONTENT_TYPE).is_some_and(|kind| {
        let rest = kind.as_bytes().strip_prefix(GRPC_CONTENT_TYPE.as_bytes());
        rest.is_some_and(|rest| matches!(rest.first(), None | Some(b'+' | b';')))
    });
    let status = match *request.method() {
        Method::POST if is_grpc => return None,
        Method::POST => StatusCode::UNSUPPORTED_MEDIA_TYPE,
        _ => StatusCode::METHOD_NOT_ALLOWED,
    };
    Some(Problem::new(status, "this listener serves gRPC only; use the HTTP listener").reply())
}

/// Returns the deadline of a call, from now. tonic reads it in its own server only.
pub(super) fn timeout(fields: &HeaderMap) -> Result<Option<Duration>, Status> {
    let Some(given) = fields.get("grpc-timeout") else { return Ok(None) };
    let invalid = || {
        Status::invalid_argument(
            "grpc-timeout is not valid; use 1 to 8 digits and a unit: H, M, S, m, u or n",
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

/// Reads the body of a call with one message. Its memory is counted until the second value is dropped.
pub(super) async fn read(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<(Request<Full<Bytes>>, Option<HeldBytes>), Status> {
    let (parts, body) = request.into_parts();
    let (bytes, held) = read_body(body, caller).await?.into_parts();
    check_compression(parts.headers.get(ENCODING), &bytes)?;
    Ok((Request::from_parts(parts, Full::new(bytes)), held))
}

/// The encoding of compressed messages.
pub(super) const ENCODING: &str = "grpc-encoding";

/// Rejects a message that is compressed without an encoding. The protocol demands `INTERNAL` for it.
pub(super) fn check_compression(encoding: Option<&HeaderValue>, body: &[u8]) -> Result<(), Status> {
    let is_compressed = body.first() == Some(&1);
    let is_plain = encoding.is_none_or(|encoding| encoding == "identity");
    if is_compressed && is_plain {
        return Err(Status::internal(
            "the message is marked as compressed, but grpc-encoding names no compression; send it uncompressed",
        ));
    }
    Ok(())
}

/// Returns the request of a stream. Its messages end when the client is idle for too long, and when the server shuts
/// down.
pub(super) fn stream(caller: &Caller, request: Request<Incoming>) -> Request<Body> {
    let stop = caller.stop.clone();
    request.map(|body| {
        Body::new(StreamBody::new(stream::unfold((body, stop), async |(mut body, mut stop)| {
            let frame = tokio::select! {
                frame = tokio::time::timeout(IDLE, body.frame()) => frame.ok().flatten()?,
                _ = stop.wait_for(|stop| *stop) => return None,
            };
            Some((frame, (body, stop)))
        })))
    })
}

/// Returns the reply of a call with one message. All of it is known, so the buffers of tonic are not kept.
pub(super) async fn whole(response: Response<Body>) -> Response<Content> {
    let (parts, body) = checked(response).into_parts();
    let content = match body.collect().await {
        Ok(whole) => {
            let trailers = whole.trailers().cloned();
            Content::Whole(Bytes::copy_from_slice(&whole.to_bytes()), trailers)
        }
        Err(status) => return failed(&status),
    };
    Response::from_parts(parts, content)
}

/// Returns the reply of a stream.
pub(super) fn streamed(response: Response<Body>) -> Response<Content> {
    checked(response).map(Content::Stream)
}

/// Returns the reply of a failed call.
pub(super) fn failed(status: &Status) -> Response<Content> {
    described(status.code(), status).into_http::<Body>().map(|_| Content::from(Bytes::new()))
}

/// Describes a failed call as this server does. tonic reports a message that it cannot read as `INTERNAL` or
/// `OUT_OF_RANGE`, but the mistake is the client's.
fn checked(response: Response<Body>) -> Response<Body> {
    match Status::from_header_map(response.headers()) {
        Some(status) => {
            let code = match status.code() {
                Code::Ok => return response,
                Code::Internal => Code::InvalidArgument,
                Code::OutOfRange => Code::ResourceExhausted,
                code => code,
            };
            described(code, &status).into_http()
        }
        None => response,
    }
}

fn described(code: Code, status: &Status) -> Status {
    let mut detail = status.message().to_owned();
    if detail.len() > MAX_DETAIL_BYTES {
        detail.truncate(detail.floor_char_boundary(MAX_DETAIL_BYTES - '…'.len_utf8()));
        detail.push('…');
    }
    Status::new(code, detail)
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

impl From<EnvoyError> for Status {
    fn from(error: EnvoyError) -> Self {
        let code = match error {
            EnvoyError::Invalid(_) => Code::InvalidArgument,
            EnvoyError::TooLarge(_) => Code::ResourceExhausted,
            EnvoyError::Unavailable(_) | EnvoyError::NotConfigured => Code::Unavailable,
        };
        Self::new(code, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault E8.
    #[test]
    fn a_long_description_is_cut_and_encoded() {
        let long = Status::invalid_argument("ä%\n".repeat(10_000));
        for reply in [failed(&long).headers().clone(), checked(long.into_http()).headers().clone()]
        {
            let message = reply["grpc-message"].to_str().unwrap();
            assert!(message.starts_with("%C3%A4%25%0A") && message.ends_with("%E2%80%A6"));
            assert!(message.len() <= 3 * MAX_DETAIL_BYTES, "{} bytes", message.len());
        }
    }

    #[test]
    fn a_message_that_is_compressed_without_an_encoding_is_an_internal_error() {
        let code = |encoding: Option<&'static str>, body: &[u8]| {
            let encoding = encoding.map(HeaderValue::from_static);
            let checked = check_compression(encoding.as_ref(), body);
            checked.err().and_then(|status| Status::from_header_map(failed(&status).headers()))
        };
        for encoding in [None, Some("identity")] {
            let status = code(encoding, &[1, 0, 0, 0, 0]).expect("an error");
            assert_eq!(status.code(), Code::Internal, "{encoding:?}");
            assert!(code(encoding, &[0, 0, 0, 0, 0]).is_none() && code(encoding, &[]).is_none());
        }
        // The decoder rejects encodings that the server does not have.
        assert!(code(Some("gzip"), &[1, 0, 0, 0, 0]).is_none());
    }

    #[test]
    fn deadlines_have_a_number_and_a_unit() {
        let of = |text: &'static str| {
            let mut fields = HeaderMap::new();
            fields.insert("grpc-timeout", HeaderValue::from_static(text));
            timeout(&fields)
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
}
