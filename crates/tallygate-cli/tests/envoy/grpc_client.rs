//! A gRPC client on bare HTTP/2, and the messages of the service. It shares no code with the server.

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::client::SendRequest;
use hyper::{HeaderMap, Request};
use tokio::runtime::Runtime;

pub(crate) const SHOULD_RATE_LIMIT: &str =
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// A connection.
pub(crate) struct GrpcClient {
    runtime: Runtime,
    requests: SendRequest<Bytes>,
}

/// Why a call failed: the code and the description.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) code: u32,
    pub(crate) detail: String,
}

impl GrpcClient {
    pub(crate) fn connect(address: &str) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let requests = runtime.block_on(async {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            let (requests, connection) = h2::client::handshake(stream).await.unwrap();
            tokio::spawn(connection);
            requests.ready().await.unwrap()
        });
        Self { runtime, requests }
    }

    /// Makes a call with one message, and returns the messages of the reply.
    pub(crate) fn call(
        &mut self,
        path: &str,
        fields: &[(&str, &str)],
        message: &[u8],
    ) -> Result<Vec<Bytes>, Failed> {
        self.send(path, fields, framed(message))
    }

    /// Makes a call with bytes as they are.
    pub(crate) fn send(
        &mut self,
        path: &str,
        fields: &[(&str, &str)],
        body: Bytes,
    ) -> Result<Vec<Bytes>, Failed> {
        let mut request = Request::post(format!("http://localhost{path}"))
            .header("content-type", "application/grpc")
            .header("te", "trailers");
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(()).unwrap();
        let requests = &mut self.requests;
        self.runtime.block_on(async {
            let mut ready = requests.clone().ready().await.unwrap();
            let (reply, mut stream) = ready.send_request(request, body.is_empty()).unwrap();
            if !body.is_empty() {
                // The server may answer, and reset the stream, before it has read all of a long body.
                let _ = stream.send_data(body, true);
            }
            let reply =
                reply.await.map_err(|error| Failed { code: 1000, detail: error.to_string() })?;
            assert_eq!(reply.status(), 200, "{reply:?}");
            assert_eq!(reply.headers()["content-type"], "application/grpc");
            if let Some(failed) = status(reply.headers()) {
                return Err(failed);
            }
            let mut body = reply.into_body();
            let mut received = BytesMut::new();
            while let Some(data) = body.data().await {
                let data =
                    data.map_err(|error| Failed { code: 1000, detail: error.to_string() })?;
                body.flow_control().release_capacity(data.len()).unwrap();
                received.extend_from_slice(&data);
            }
            let trailers = body.trailers().await.unwrap().expect("the reply has trailers");
            match status(&trailers).expect("the trailers have a status") {
                Failed { code: 0, .. } => Ok(messages(received.freeze())),
                failed => Err(failed),
            }
        })
    }

    /// Sends a request of the service.
    pub(crate) fn ask(&mut self, request: &RateLimit) -> Result<Response, Failed> {
        self.call(SHOULD_RATE_LIMIT, &[], &request.encode()).map(|messages| {
            assert_eq!(messages.len(), 1);
            Response::decode(&messages[0])
        })
    }
}

fn status(fields: &HeaderMap) -> Option<Failed> {
    let code = fields.get("grpc-status")?.to_str().unwrap().parse().unwrap();
    let detail =
        fields.get("grpc-message").map_or("", |detail| detail.to_str().unwrap()).to_owned();
    Some(Failed { code, detail })
}

/// Returns a message with its prefix.
pub(crate) fn framed(message: &[u8]) -> Bytes {
    let mut framed = BytesMut::new();
    framed.put_u8(0);
    framed.put_u32(u32::try_from(message.len()).unwrap());
    framed.extend_from_slice(message);
    framed.freeze()
}

fn messages(mut bytes: Bytes) -> Vec<Bytes> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let prefix = bytes.split_to(5);
        assert_eq!(prefix[0], 0, "it is not compressed");
        let length = u32::from_be_bytes(prefix[1..].try_into().unwrap());
        messages.push(bytes.split_to(length as usize));
    }
    messages
}

/// A `RateLimitRequest`.
#[derive(Clone, Default)]
pub(crate) struct RateLimit {
    pub(crate) domain: &'static str,
    pub(crate) descriptors: Vec<Vec<(String, String)>>,
    pub(crate) hits: u64,
}

impl RateLimit {
    pub(crate) fn of(domain: &'static str, descriptors: &[&[(&str, &str)]]) -> Self {
        let entry = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let descriptor = |entries: &&[(&str, &str)]| entries.iter().map(entry).collect();
        Self { domain, descriptors: descriptors.iter().map(descriptor).collect(), hits: 0 }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        bytes(&mut out, 1, self.domain.as_bytes());
        for descriptor in &self.descriptors {
            let mut inner = Vec::new();
            for (key, value) in descriptor {
                let mut entry = Vec::new();
                bytes(&mut entry, 1, key.as_bytes());
                bytes(&mut entry, 2, value.as_bytes());
                bytes(&mut inner, 1, &entry);
            }
            bytes(&mut out, 2, &inner);
        }
        if self.hits > 0 {
            varint(&mut out, 3 << 3);
            varint(&mut out, self.hits);
        }
        out
    }
}

/// A `RateLimitResponse`.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Response {
    /// 1 is `OK`, 2 is `OVER_LIMIT`.
    pub(crate) code: u64,
    pub(crate) statuses: Vec<Status>,
    pub(crate) headers: Vec<(String, String)>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Status {
    pub(crate) code: u64,
    /// Requests per unit, and the unit.
    pub(crate) limit: Option<(u64, u64)>,
    pub(crate) remaining: u64,
    pub(crate) reset_s: u64,
}

impl Response {
    fn decode(message: &[u8]) -> Self {
        let mut response = Self::default();
        for (field, number, text) in fields(message) {
            match field {
                1 => response.code = number,
                2 => response.statuses.push(Status::decode(text)),
                3 => {
                    let header = fields(text);
                    let text = |at: usize| String::from_utf8(header[at].2.to_vec()).unwrap();
                    response.headers.push((text(0), text(1)));
                }
                other => panic!("field {other}"),
            }
        }
        response
    }
}

impl Status {
    fn decode(message: &[u8]) -> Self {
        let mut status = Self::default();
        for (field, number, text) in fields(message) {
            let inner = |at: u64| {
                fields(text)
                    .iter()
                    .find(|(field, ..)| *field == at)
                    .map_or(0, |(_, number, _)| *number)
            };
            match field {
                1 => status.code = number,
                2 => status.limit = Some((inner(1), inner(2))),
                3 => status.remaining = number,
                4 => status.reset_s = inner(1),
                other => panic!("field {other}"),
            }
        }
        status
    }
}

pub(crate) fn bytes(out: &mut Vec<u8>, field: u64, bytes: &[u8]) {
    varint(out, field << 3 | 2);
    varint(out, bytes.len() as u64);
    out.extend_from_slice(bytes);
}

fn varint(out: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        out.push(u8::try_from(number & 0x7f).unwrap() | 0x80);
        number >>= 7;
    }
    out.push(u8::try_from(number).unwrap());
}

/// Returns the fields of a message: number, value, and bytes.
pub(crate) fn fields(mut rest: &[u8]) -> Vec<(u64, u64, &[u8])> {
    fn varint(rest: &mut &[u8]) -> u64 {
        let mut number = 0;
        for place in 0.. {
            let byte = rest[0];
            *rest = &rest[1..];
            number |= u64::from(byte & 0x7f) << (7 * place);
            if byte < 0x80 {
                break;
            }
        }
        number
    }
    let mut fields = Vec::new();
    while !rest.is_empty() {
        let tag = varint(&mut rest);
        let number = varint(&mut rest);
        match tag & 7 {
            0 => fields.push((tag >> 3, number, &[][..])),
            2 => {
                let (text, after) = rest.split_at(usize::try_from(number).unwrap());
                rest = after;
                fields.push((tag >> 3, 0, text));
            }
            other => panic!("wire type {other}"),
        }
    }
    fields
}
