//! Denials as gRPC statuses: `RESOURCE_EXHAUSTED` with a `RetryInfo`.
//!
//! The status is in the head of the response, without a body. The details are a `google.rpc.Status` in
//! `grpc-status-details-bin`. They are two small messages, so they are encoded here and not by a protobuf library.

use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};

const GRPC: HeaderValue = HeaderValue::from_static("application/grpc");
const STATUS: HeaderName = HeaderName::from_static("grpc-status");
const MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

const INVALID_ARGUMENT: u8 = 3;
const RESOURCE_EXHAUSTED: u8 = 8;
const INTERNAL: u8 = 13;
const UNAVAILABLE: u8 = 14;

const RETRY_INFO: &str = "type.googleapis.com/google.rpc.RetryInfo";

/// Returns the response to a gRPC request that would be denied with an HTTP status.
pub(crate) fn response(
    status: StatusCode,
    message: &str,
    retry_after: Option<Duration>,
) -> Response<Bytes> {
    let code = match status {
        StatusCode::TOO_MANY_REQUESTS => RESOURCE_EXHAUSTED,
        StatusCode::SERVICE_UNAVAILABLE => UNAVAILABLE,
        StatusCode::BAD_REQUEST => INVALID_ARGUMENT,
        _ => INTERNAL,
    };
    let mut response = Response::new(Bytes::new());
    let fields = response.headers_mut();
    fields.insert(CONTENT_TYPE, GRPC);
    fields.insert(STATUS, HeaderValue::from(u16::from(code)));
    // Both encodings contain only visible ASCII characters and spaces.
    if let Ok(message) = HeaderValue::try_from(percent_encoded(message)) {
        fields.insert(MESSAGE, message);
    }
    if let Some(wait) = retry_after
        && let Ok(details) = HeaderValue::try_from(base64(&details(code, message, wait)))
    {
        fields.insert(DETAILS, details);
    }
    response
}

/// Encodes a `google.rpc.Status` with a `RetryInfo`.
fn details(code: u8, message: &str, wait: Duration) -> Vec<u8> {
    let mut duration = Vec::new();
    push_number(&mut duration, 1, wait.as_secs());
    push_number(&mut duration, 2, wait.subsec_nanos().into());
    let mut retry_info = Vec::new();
    push_bytes(&mut retry_info, 1, &duration);
    let mut any = Vec::new();
    push_bytes(&mut any, 1, RETRY_INFO.as_bytes());
    push_bytes(&mut any, 2, &retry_info);
    let mut status = Vec::new();
    push_number(&mut status, 1, code.into());
    push_bytes(&mut status, 2, message.as_bytes());
    push_bytes(&mut status, 3, &any);
    status
}

fn push_number(out: &mut Vec<u8>, field: u8, number: u64) {
    // Protobuf leaves out zeros.
    if number > 0 {
        out.push(field << 3);
        push_varint(out, number);
    }
}

fn push_bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    out.push(field << 3 | 2);
    push_varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn push_varint(out: &mut Vec<u8>, mut number: u64) {
    loop {
        let [low, ..] = number.to_le_bytes();
        number >>= 7;
        if number == 0 {
            return out.push(low & 0x7f);
        }
        out.push(low | 0x80);
    }
}

/// Encodes a message as gRPC requires: all bytes except for visible ASCII and spaces, and `%`, are escaped.
fn percent_encoded(message: &str) -> String {
    let mut out = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(byte.into()),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

/// Encodes bytes in base64 without padding, as gRPC has it.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let [a, b, c] = [0, 1, 2].map(|at| u32::from(chunk.get(at).copied().unwrap_or(0)));
        let bits = a << 16 | b << 8 | c;
        for digit in 0..=chunk.len() {
            out.push(DIGITS[(bits >> (18 - 6 * digit) & 63) as usize].into());
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_has_no_padding() {
        let cases = [("", ""), ("f", "Zg"), ("fo", "Zm8"), ("foo", "Zm9v"), ("foob", "Zm9vYg")];
        for (text, encoded) in cases {
            assert_eq!(base64(text.as_bytes()), encoded);
        }
        assert_eq!(base64(&[0xff, 0xff, 0xfe]), "///+");
    }

    #[test]
    fn a_varint_has_seven_bits_per_byte() {
        let encoded = |number| {
            let mut out = Vec::new();
            push_varint(&mut out, number);
            out
        };
        assert_eq!(encoded(0), [0]);
        assert_eq!(encoded(300), [0xac, 0x02]);
        assert_eq!(encoded(u64::MAX).len(), 10);
    }

    /// Fault H5.
    #[test]
    fn a_message_is_escaped() {
        assert_eq!(percent_encoded("50% off\r\nx: y\u{e9}"), "50%25 off%0D%0Ax: y%C3%A9");
    }
}
