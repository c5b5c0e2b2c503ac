//! `grpc.health.v1.Health`: answers for the server (`""`) and for the service `ratelimit`.

use std::sync::atomic::Ordering;

use tokio::sync::mpsc;

use super::call;
use crate::envoy::wire::{self, Fields, WireError};
use crate::http::{Caller, Reply};

/// The services that have a health, beside the server as a whole.
const SERVICES: [&str; 3] = ["", "ratelimit", "envoy.service.ratelimit.v3.RateLimitService"];

const SERVING: u64 = 1;
const NOT_SERVING: u64 = 2;
const SERVICE_UNKNOWN: u64 = 3;

/// Reads a `HealthCheckRequest`.
pub(super) fn service(message: &[u8]) -> Result<&str, WireError> {
    let mut service = "";
    let mut fields = Fields::of(message);
    while let Some((field, value)) = fields.next()? {
        if field == 1 {
            service = value.text(field)?;
        }
    }
    Ok(service)
}

/// Returns whether a service is ready; `None` if there is no such service.
pub(super) fn serving(caller: &Caller, service: &str) -> Option<bool> {
    SERVICES.contains(&service).then(|| caller.shared.is_ready.load(Ordering::Acquire))
}

/// Writes a `HealthCheckResponse`.
pub(super) fn response(serving: Option<bool>) -> Vec<u8> {
    let mut out = Vec::new();
    wire::number(
        &mut out,
        1,
        match serving {
            Some(true) => SERVING,
            Some(false) => NOT_SERVING,
            None => SERVICE_UNKNOWN,
        },
    );
    out
}

/// Returns a stream with the present state and, when the server shuts down, the last one.
pub(super) fn watch(caller: &Caller, serving: Option<bool>) -> Reply {
    let (send, messages) = mpsc::channel(2);
    let mut stop = caller.stop.clone();
    tokio::spawn(async move {
        let _ = send.send(call::framed(&response(serving))).await;
        tokio::select! {
            _ = stop.wait_for(|stop| *stop) => {}
            () = send.closed() => return,
        }
        let last = serving.map(|_| false);
        let _ = send.send(call::framed(&response(last))).await;
    });
    call::stream_reply(messages)
}
