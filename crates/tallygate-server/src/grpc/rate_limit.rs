//! `ShouldRateLimit`: reads a request, has it decided, and writes the response.
//!
//! Without the codec of tonic: it copies a message twice, and a message can be as long as a body.

use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use hyper::body::Incoming;
use hyper::header::{self, HeaderMap, HeaderValue};
use hyper::{Request, Response};
use prost::Message as _;
use tonic::Status;
use tonic::metadata::GRPC_CONTENT_TYPE;

use super::call::{self, ENCODING};
use crate::client_budgets::HeldBytes;
use crate::config::Role;
use crate::envoy::{RateLimitRequest, RateLimitResponse};
use crate::gate::Gate;
use crate::http::{Caller, Content, authorize_caller, decide_for_envoy, read_body};

/// The bytes before a message: a flag and its length.
const PREFIX_BYTES: usize = 5;

pub(super) async fn reply(
    caller: &Caller,
    request: Request<Incoming>,
    head: Option<HeldBytes>,
) -> Result<Response<Content>, Status> {
    let (parts, body) = request.into_parts();
    authorize_caller(caller, Role::Check, &parts)?;
    let timeout = call::timeout(&parts.headers)?;
    let encoding = parts.headers.get(ENCODING).cloned();
    // The body may take long to arrive, so drop the head first.
    drop((parts, head));
    let deciding = async {
        let (body, _held) = read_body(body, caller).await?.into_parts();
        let max_bytes = caller.limits.max_body_bytes;
        decide(&caller.shared.gate, encoding.as_ref(), body, max_bytes).await
    };
    let late = || Status::deadline_exceeded("the deadline of the call has passed");
    match timeout {
        None => deciding.await,
        // The first poll may already charge the request.
        Some(Duration::ZERO) => Err(late()),
        Some(timeout) => {
            tokio::time::timeout(timeout, deciding).await.unwrap_or_else(|_| Err(late()))
        }
    }
}

/// Decides the request in a body, whose message has at most so many bytes.
async fn decide(
    gate: &Gate,
    encoding: Option<&HeaderValue>,
    body: Bytes,
    max_bytes: usize,
) -> Result<Response<Content>, Status> {
    let message = message_in(&body, encoding, max_bytes)?;
    let request = RateLimitRequest::read(message, gate.limits().max_all_items).await?;
    drop(body);
    Ok(written(&decide_for_envoy(gate, &request).await?))
}

/// Returns the only message of a body.
fn message_in<'a>(
    body: &'a [u8],
    encoding: Option<&HeaderValue>,
    max_bytes: usize,
) -> Result<&'a [u8], Status> {
    call::check_compression(encoding, body)?;
    let incomplete = || Status::invalid_argument("the message is incomplete");
    let (prefix, message) = body.split_first_chunk::<PREFIX_BYTES>().ok_or_else(incomplete)?;
    let [flag, length @ ..] = *prefix;
    match flag {
        0 => {}
        1 => {
            return Err(Status::unimplemented(
                "compression is not supported; send it uncompressed",
            ));
        }
        _ => return Err(Status::invalid_argument("the first byte of a message must be 0 or 1")),
    }
    let length = usize::try_from(u32::from_be_bytes(length)).unwrap_or(usize::MAX);
    if length > max_bytes {
        let reason = format!("the message is longer than {max_bytes} bytes (`max_body_bytes`)");
        return Err(Status::resource_exhausted(reason));
    }
    match message.len() {
        more if more > length => Err(Status::invalid_argument(
            "the call has a second message; send one message per call",
        )),
        less if less < length => Err(incomplete()),
        _ => Ok(message),
    }
}

/// Returns the reply with a response.
fn written(response: &RateLimitResponse) -> Response<Content> {
    let length = response.encoded_len();
    let mut bytes = BytesMut::with_capacity(PREFIX_BYTES + length);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // Writing to a buffer that grows cannot fail.
    let _ = response.encode(&mut bytes);
    let mut trailers = HeaderMap::with_capacity(1);
    trailers.insert(Status::GRPC_STATUS, HeaderValue::from_static("0"));
    let mut reply = Response::new(Content::Whole(bytes.freeze(), Some(trailers)));
    reply.headers_mut().insert(header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    reply
}

#[cfg(test)]
mod tests {
    use tallygate::store::Capacity;
    use tallygate_redis::Stores;
    use tonic::Code;

    use super::*;
    use crate::config::Config;
    use crate::gate::RestoredStores;
    use crate::metrics::Metrics;

    /// The longest message of these calls.
    const MAX_BYTES: usize = 1_000;

    /// Returns the code of a failed call with this body.
    fn code_of(encoding: Option<&'static str>, body: Vec<u8>) -> Code {
        let config = Config::parse("", std::path::Path::new("")).unwrap();
        let stores = Stores::Memory(Capacity::of(1));
        let gate = Gate::new(&config, stores, Metrics::new(), RestoredStores::default());
        let encoding = encoding.map(HeaderValue::from_static);
        let decided = decide(&gate, encoding.as_ref(), body.into(), MAX_BYTES);
        tallygate::block_on(decided).err().expect("a failed call").code()
    }

    fn code(body: Vec<u8>) -> Code {
        code_of(None, body)
    }

    fn framed(flag: u8, length: u32, message: &[u8]) -> Vec<u8> {
        let mut framed = vec![flag];
        framed.put_u32(length);
        framed.extend_from_slice(message);
        framed
    }

    /// Fault E7.
    #[test]
    fn a_message_over_the_limit_is_rejected_by_its_prefix() {
        let most = u32::try_from(MAX_BYTES).unwrap();
        assert_eq!(code(framed(0, most + 1, &[])), Code::ResourceExhausted);
        assert_eq!(code(framed(0, u32::MAX, &[])), Code::ResourceExhausted);
        assert_eq!(code(framed(0, most, &[])), Code::InvalidArgument, "it is not all there");
    }

    #[test]
    fn a_call_has_one_message() {
        let message = b"\x0a\x03web\x12\x00";
        let one = framed(0, 7, message);
        assert_eq!(code(one.clone()), Code::Unavailable, "there are no rules");
        assert_eq!(code([one.clone(), one.clone()].concat()), Code::InvalidArgument);
        assert_eq!(code([one.clone(), vec![0]].concat()), Code::InvalidArgument);
        assert_eq!(code(Vec::new()), Code::InvalidArgument);
        assert_eq!(code(vec![0; 4]), Code::InvalidArgument);
        // A message may be uncompressed although the call names a compression.
        assert_eq!(code_of(Some("gzip"), one), Code::Unavailable);
        assert_eq!(code_of(Some("gzip"), framed(1, 7, message)), Code::Unimplemented);
        assert_eq!(code(framed(1, 7, message)), Code::Internal);
        assert_eq!(code(framed(2, 7, message)), Code::InvalidArgument);
    }

    #[test]
    fn a_response_is_one_message_and_the_status_is_in_the_trailers() {
        let response = RateLimitResponse { overall_code: 1, ..Default::default() };
        let reply = written(&response);
        assert_eq!(reply.headers()[header::CONTENT_TYPE], "application/grpc");
        let Content::Whole(bytes, Some(trailers)) = reply.into_body() else {
            panic!("no trailers")
        };
        assert_eq!(bytes[..], framed(0, 2, &[8, 1]));
        assert_eq!(trailers[Status::GRPC_STATUS], "0");
    }
}
