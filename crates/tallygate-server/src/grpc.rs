//! The gRPC surface: Envoy's rate limit service, health and reflection.
//!
//! | question | file |
//! |---|---|
//! | How does a call look on HTTP/2, and how does it fail? | `call.rs` |
//! | Is the server ready? | `health.rs` |
//! | Which services are there? | `reflection.rs`, on `schema.rs` |
//!
//! Connections, tokens and limits are those of HTTP (`http.rs`): a call is a request there. Messages are read by
//! `envoy/wire.rs`, which needs no generated code. A message may have at most [`call::MAX_MESSAGE_BYTES`].

mod call;
mod health;
mod reflection;
mod schema;

use std::sync::Arc;
use std::time::Duration;

use hyper::Request;
use hyper::body::Incoming;
use hyper::http::request::Parts;

use crate::client_budgets::HeldBytes;
use crate::config::Role;
use crate::connection::{Connection, Stop};
use crate::envoy::{EnvoyError, decode, encode};
use crate::http::{self, Caller, Reply, Service, authorize_caller, decide_for_envoy};
use crate::peer::Peer;
use crate::shared::Shared;
use call::{Code, Status, Unary};

/// Serves a connection until either end closes it.
pub(crate) async fn serve_connection(
    shared: Arc<Shared>,
    stream: Box<dyn Connection>,
    peer: Peer,
    stop: Stop,
) {
    http::serve_routes::<GrpcRoutes>(shared, stream, peer, stop).await;
}

/// The methods of the gRPC listener.
struct GrpcRoutes;

const SHOULD_RATE_LIMIT: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";
const HEALTH_CHECK: &str = "/grpc.health.v1.Health/Check";
const HEALTH_WATCH: &str = "/grpc.health.v1.Health/Watch";
const REFLECTION: [&str; 2] = [
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
];

impl Service for GrpcRoutes {
    const SURFACE: &'static str = "grpc";
    const IS_HTTP2_ONLY: bool = true;

    fn template(path: &str) -> Option<&str> {
        let known = [SHOULD_RATE_LIMIT, HEALTH_CHECK, HEALTH_WATCH].into_iter().chain(REFLECTION);
        known.into_iter().find(|known| *known == path)
    }

    async fn reply(caller: &Caller, request: Request<Incoming>, head: Option<HeldBytes>) -> Reply {
        let (request, body) = request.into_parts();
        if let Some(rejected) = call::check(&request) {
            return rejected;
        }
        let replied = match request.uri.path() {
            SHOULD_RATE_LIMIT => should_rate_limit(caller, request, head, body).await,
            HEALTH_CHECK => health_check(caller, body).await,
            HEALTH_WATCH => health_watch(caller, body).await,
            path if REFLECTION.contains(&path) => Ok(reflection::reply(caller, body)),
            _ => {
                let detail =
                    "unknown method; this server has RateLimitService, Health and ServerReflection";
                Err(Status::new(Code::Unimplemented, detail))
            }
        };
        replied.unwrap_or_else(Status::reply)
    }
}

async fn should_rate_limit(
    caller: &Caller,
    request: Parts,
    head: Option<HeldBytes>,
    body: Incoming,
) -> Result<Reply, Status> {
    authorize_caller(caller, Role::Check, &request)?;
    let timeout = call::timeout(&request.headers)?;
    // The body may take long to arrive, so drop the head first.
    drop((request, head));
    let deciding = async {
        let message = Unary::read(body, caller).await?;
        let gate = &caller.shared.gate;
        let request = decode(message.bytes(), gate.limits().max_all_items)?;
        let response = decide_for_envoy(gate, &request).await?;
        Ok(call::message_reply(&encode(&response)))
    };
    let late = || Status::new(Code::DeadlineExceeded, "the deadline of the call has passed");
    match timeout {
        None => deciding.await,
        // The first poll may already charge the request.
        Some(Duration::ZERO) => Err(late()),
        Some(timeout) => {
            tokio::time::timeout(timeout, deciding).await.unwrap_or_else(|_| Err(late()))
        }
    }
}

async fn health_check(caller: &Caller, body: Incoming) -> Result<Reply, Status> {
    let message = Unary::read(body, caller).await?;
    let service = health::service(message.bytes())?;
    match health::serving(caller, service) {
        Some(is_serving) => Ok(call::message_reply(&health::response(Some(is_serving)))),
        None => Err(Status::new(Code::NotFound, "unknown service")),
    }
}

async fn health_watch(caller: &Caller, body: Incoming) -> Result<Reply, Status> {
    let message = Unary::read(body, caller).await?;
    let service = health::service(message.bytes())?;
    Ok(health::watch(caller, health::serving(caller, service)))
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
