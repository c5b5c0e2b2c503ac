//! `grpc.health.v1.Health`: answers for the server (`""`) and for the service `ratelimit`.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::{Stream, StreamExt as _, stream};
use hyper::body::Incoming;
use hyper::{Request, Response};
use tonic::Status;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_server::{Health, HealthServer};
use tonic_health::pb::{HealthCheckRequest, HealthCheckResponse};
use tower_service::Service as _;

use super::call::{self, MAX_STREAMED_BYTES};
use crate::connection::Stop;
use crate::http::{Caller, Content};
use crate::shared::Shared;

/// The services that have a health, beside the server as a whole.
const SERVICES: [&str; 3] = ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"];

pub(super) async fn check(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Response<Content>, Status> {
    let (request, _held) = call::read(caller, request).await?;
    let Ok(response) = service(caller).call(request).await;
    Ok(call::whole(response).await)
}

pub(super) async fn watch(
    caller: &Caller,
    request: Request<Incoming>,
) -> Result<Response<Content>, Status> {
    let Ok(response) = service(caller).call(call::stream(caller, request)).await;
    Ok(call::streamed(response))
}

fn service(caller: &Caller) -> HealthServer<ServerHealth> {
    let health = ServerHealth { shared: caller.shared.clone(), stop: caller.stop.clone() };
    HealthServer::new(health).max_decoding_message_size(MAX_STREAMED_BYTES)
}

/// The health of this server.
struct ServerHealth {
    shared: Arc<Shared>,
    stop: Stop,
}

impl ServerHealth {
    fn status(&self, service: &str) -> ServingStatus {
        if !SERVICES.contains(&service) {
            return ServingStatus::ServiceUnknown;
        }
        match self.shared.is_ready.load(Ordering::Acquire) {
            true => ServingStatus::Serving,
            false => ServingStatus::NotServing,
        }
    }
}

fn response(status: ServingStatus) -> HealthCheckResponse {
    HealthCheckResponse { status: status.into() }
}

#[tonic::async_trait]
impl Health for ServerHealth {
    async fn check(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<HealthCheckResponse>, Status> {
        match self.status(&request.get_ref().service) {
            ServingStatus::ServiceUnknown => Err(Status::not_found("unknown service")),
            status => Ok(tonic::Response::new(response(status))),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<HealthCheckResponse, Status>> + Send>>;

    /// Returns the present status and, when the server shuts down, the last one.
    async fn watch(
        &self,
        request: tonic::Request<HealthCheckRequest>,
    ) -> Result<tonic::Response<Self::WatchStream>, Status> {
        let present = self.status(&request.get_ref().service);
        let mut stop = self.stop.clone();
        let last = async move {
            // If the sender is gone, the server shuts down as well.
            let _ = stop.wait_for(|stop| *stop).await;
            match present {
                ServingStatus::ServiceUnknown => present,
                _ => ServingStatus::NotServing,
            }
        };
        let statuses = stream::iter([present]).chain(stream::once(last));
        Ok(tonic::Response::new(Box::pin(statuses.map(|status| Ok(response(status))))))
    }
}
