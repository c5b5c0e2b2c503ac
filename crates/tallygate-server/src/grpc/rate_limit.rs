//! `ShouldRateLimit`: reads a request, has it decided, and writes the response.

use std::time::Duration;

use bytes::{Buf as _, Bytes};
use futures_util::future::BoxFuture;
use hyper::body::Incoming;
use hyper::{Request, Response};
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, DecodeBuf, Decoder};
use tonic::server::{Grpc, UnaryService};
use tonic_prost::ProstEncoder;

use super::call::{self, ENCODING};
use crate::client_budgets::HeldBytes;
use crate::config::Role;
use crate::envoy::{RateLimitRequest, RateLimitResponse};
use crate::gate::Gate;
use crate::http::{Caller, Content, authorize_caller, decide_for_envoy};

/// The first buffer for a message, and when a response is sent in parts. Most messages have a few hundred bytes; tonic
/// would take 8 KiB per call.
fn buffer() -> BufferSettings {
    BufferSettings::new(512, 128 * 1024)
}

pub(super) async fn reply(
    caller: &Caller,
    request: Request<Incoming>,
    head: Option<HeldBytes>,
) -> Result<Response<Content>, Status> {
    let (parts, body) = request.into_parts();
    authorize_caller(caller, Role::Check, &parts)?;
    let timeout = call::timeout(&parts.headers)?;
    let mut request = Request::new(body);
    if let Some(encoding) = parts.headers.get(ENCODING) {
        request.headers_mut().insert(ENCODING, encoding.clone());
    }
    // The body may take long to arrive, so drop the head first.
    drop((parts, head));
    let deciding = async {
        let (request, _held) = call::read(caller, request).await?;
        let gate = &caller.shared.gate;
        let mut grpc = grpc(caller.limits.max_body_bytes);
        Ok(call::whole(grpc.unary(ShouldRateLimit { gate }, request).await).await)
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

fn grpc(max_bytes: usize) -> Grpc<RateLimitCodec> {
    Grpc::new(RateLimitCodec { is_read: false }).max_decoding_message_size(max_bytes)
}

/// The method, on a gate.
struct ShouldRateLimit<'a> {
    gate: &'a Gate,
}

impl<'a> UnaryService<Bytes> for ShouldRateLimit<'a> {
    type Response = RateLimitResponse;
    type Future = BoxFuture<'a, Result<tonic::Response<RateLimitResponse>, Status>>;

    fn call(&mut self, request: tonic::Request<Bytes>) -> Self::Future {
        let gate = self.gate;
        Box::pin(async move {
            let message = request.into_inner();
            let request = RateLimitRequest::read(&message, gate.limits().max_all_items).await?;
            drop(message);
            let response = decide_for_envoy(gate, &request).await?;
            Ok(tonic::Response::new(response))
        })
    }
}

/// Reads the bytes of one request, which are decoded in time slices afterwards, and writes a response.
#[derive(Clone, Copy)]
struct RateLimitCodec {
    is_read: bool,
}

impl Codec for RateLimitCodec {
    type Encode = RateLimitResponse;
    type Decode = Bytes;
    type Encoder = ProstEncoder<RateLimitResponse>;
    type Decoder = Self;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::new(buffer())
    }

    fn decoder(&mut self) -> Self {
        *self
    }
}

impl Decoder for RateLimitCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        if std::mem::replace(&mut self.is_read, true) {
            return Err(Status::invalid_argument("send one message per call"));
        }
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }

    fn buffer_settings(&self) -> BufferSettings {
        buffer()
    }
}

#[cfg(test)]
mod tests {
    use bytes::BufMut as _;
    use http_body_util::Full;
    use tallygate::store::Capacity;
    use tallygate_redis::Stores;
    use tonic::Code;

    use super::*;
    use crate::config::Config;
    use crate::gate::RestoredStores;
    use crate::metrics::Metrics;

    /// The longest message of these calls.
    const MAX_BYTES: usize = 1_000;

    /// Returns the code of a call with this body.
    fn code(body: Vec<u8>) -> Code {
        let config = Config::parse("", std::path::Path::new("")).unwrap();
        let stores = Stores::Memory(Capacity::of(1));
        let gate = Gate::new(&config, stores, Metrics::new(), RestoredStores::default());
        let mut grpc = grpc(MAX_BYTES);
        let request = Request::new(Full::new(Bytes::from(body)));
        let called = grpc.unary(ShouldRateLimit { gate: &gate }, request);
        let reply = tallygate::block_on(async { call::whole(called.await).await });
        Status::from_header_map(reply.headers()).expect("a failed call").code()
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
        assert_eq!(code([one, vec![0]].concat()), Code::InvalidArgument);
        assert_eq!(code(Vec::new()), Code::InvalidArgument);
    }
}
