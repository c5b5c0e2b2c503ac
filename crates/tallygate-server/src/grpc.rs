//! The gRPC surface: Envoy's rate limit service, health and reflection.
//!
//! | question | file |
//! |---|---|
//! | Is it a call, when does it end, and how does it fail? | `call.rs` |
//! | How is a request read and answered? | `rate_limit.rs` |
//! | Is the server ready? | `health.rs` |
//! | Which services are there? | `reflection.rs` |
//!
//! Connections, tokens and limits are those of HTTP (`http.rs`): a call is a request there. tonic reads and writes the
//! messages of a call; its own server is not used, because it would not share these limits.

mod call;
mod health;
mod rate_limit;
mod reflection;

use std::sync::Arc;

use hyper::body::Incoming;
use hyper::{Request, Response};
use tonic::Status;

use crate::client_budgets::HeldBytes;
use crate::connection::{Connection, Stop};
use crate::http::{self, Caller, Content, Service};
use crate::peer::Peer;
use crate::shared::Shared;

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
const REFLECTION_V1: &str = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo";
const REFLECTION_V1ALPHA: &str = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo";

impl Service for GrpcRoutes {
    const SURFACE: &'static str = "grpc";
    const IS_HTTP2_ONLY: bool = true;

    fn template(path: &str) -> Option<&str> {
        let known =
            [SHOULD_RATE_LIMIT, HEALTH_CHECK, HEALTH_WATCH, REFLECTION_V1, REFLECTION_V1ALPHA];
        known.into_iter().find(|known| *known == path)
    }

    async fn reply(
        caller: &Caller,
        request: Request<Incoming>,
        head: Option<HeldBytes>,
    ) -> Response<Content> {
        if let Some(rejected) = call::check(&request) {
            return rejected.map(Content::from);
        }
        let replied = match request.uri().path() {
            SHOULD_RATE_LIMIT => rate_limit::reply(caller, request, head).await,
            HEALTH_CHECK => health::check(caller, request).await,
            HEALTH_WATCH => health::watch(caller, request).await,
            REFLECTION_V1 => reflection::v1(caller, request).await,
            REFLECTION_V1ALPHA => reflection::v1alpha(caller, request).await,
            _ => Err(Status::unimplemented(
                "unknown method; this server has RateLimitService, Health and ServerReflection",
            )),
        };
        replied.unwrap_or_else(|status| call::failed(&status))
    }
}
