//! Metrics for Prometheus. Keys of clients are never labels.
//!
//! What happens with every decision or request is counted per thread and summed when metrics are requested
//! (`policy.rs`, `latency.rs`). Rare events have counters of the library. `figures.rs` and `process.rs` read other
//! values at the time of the request.

mod families;
mod figures;
mod format;
mod latency;
mod policy;
mod process;

use std::collections::HashSet;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use figures::FiguresCollector;
pub(crate) use figures::{Figures, PolicyFigures, PolicyRules};
pub(crate) use format::Format;
pub(crate) use latency::Latency;
pub(crate) use policy::PolicyMetrics;
use process::Process;

/// The metrics of the server.
#[derive(Clone)]
pub(crate) struct Metrics {
    latencies: Arc<Mutex<SurfaceLatencies>>,
    pub(crate) reloads: Family<OutcomeLabels, Counter>,
    connections: Family<SurfaceLabels, Gauge>,
    pub(crate) connections_rejected: Family<ReasonLabels, Counter>,
    pub(crate) connections_aborted: Counter,
    pub(crate) accept_errors: Counter,
    pub(crate) handshakes_failed: Family<SurfaceLabels, Counter>,
    pub(crate) tokens_rejected: Family<SurfaceLabels, Counter>,
    pub(crate) snapshots: Snapshots,
    pub(crate) envoy_details: EnvoyDetails,
    registry: Arc<Registry>,
    process: Arc<Registry>,
}

/// Response times by surface.
type SurfaceLatencies = Vec<(&'static str, Arc<Latency>)>;

/// A connection that is counted as open until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct SurfaceLabels {
    pub(crate) surface: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct OutcomeLabels {
    pub(crate) outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct ReasonLabels {
    pub(crate) reason: &'static str,
}

/// Decisions by descriptor values, for rules of Envoy that ask for it (`detailed_metric`, `value_to_metric`).
///
/// The values come from requests, so the number of series is bounded: further values are counted together.
#[derive(Clone, Default)]
pub(crate) struct EnvoyDetails {
    decisions: Family<DescriptorLabels, Counter>,
    names: Arc<RwLock<HashSet<Box<str>>>>,
}

/// The maximum number of values of the label `descriptor`.
const MAX_DESCRIPTORS: usize = 1_000;
/// The longest value of the label, in bytes.
const MAX_DESCRIPTOR_BYTES: usize = 256;
/// The descriptors beyond the maximum.
const OTHER_DESCRIPTORS: &str = "other";

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DescriptorLabels {
    descriptor: String,
    outcome: &'static str,
}

impl EnvoyDetails {
    pub(crate) fn count(&self, name: &str, allowed: bool) {
        let descriptor = if self.is_listed(name) { name } else { OTHER_DESCRIPTORS }.to_owned();
        let outcome = if allowed { "allowed" } else { "denied" };
        self.decisions.get_or_create(&DescriptorLabels { descriptor, outcome }).inc();
    }

    fn is_listed(&self, name: &str) -> bool {
        if self.names.read().unwrap_or_else(PoisonError::into_inner).contains(name) {
            return true;
        }
        if name.len() > MAX_DESCRIPTOR_BYTES {
            return false;
        }
        let mut names = self.names.write().unwrap_or_else(PoisonError::into_inner);
        let has_room = names.len() < MAX_DESCRIPTORS;
        if has_room {
            names.insert(name.into());
        }
        has_room || names.contains(name)
    }
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("tallygate");
        let reloads = Family::<_, Counter>::default();
        registry.register("reloads", "Configuration reloads", reloads.clone());
        // Create the series at startup, so that alerts on an increase also see the first event.
        for outcome in ["applied", "rejected"] {
            reloads.get_or_create_owned(&OutcomeLabels { outcome });
        }
        let connections = Family::default();
        registry.register("connections", "Open connections", connections.clone());
        let connections_rejected = Family::default();
        registry.register(
            "connections_rejected",
            "Connections closed on arrival because a limit was reached: max_connections, max_connections_per_address, or the buffers of HTTP/2 clients",
            connections_rejected.clone(),
        );
        for reason in ["server", "address", "buffers"] {
            drop(connections_rejected.get_or_create(&ReasonLabels { reason }));
        }
        let connections_aborted = Counter::default();
        registry.register(
            "connections_aborted",
            "Connections closed because the client did not read its replies in time, or its requests did not fit into the buffers",
            connections_aborted.clone(),
        );
        let accept_errors = Counter::default();
        registry.register(
            "accept_errors",
            "Errors while accepting connections",
            accept_errors.clone(),
        );
        let handshakes_failed = Family::<_, Counter>::default();
        registry.register(
            "tls_handshakes_failed",
            "Failed TLS handshakes",
            handshakes_failed.clone(),
        );
        let tokens_rejected = Family::<_, Counter>::default();
        registry.register(
            "tokens_rejected",
            "Requests rejected because the token was missing or invalid",
            tokens_rejected.clone(),
        );
        for surface in ["http", "resp", "grpc"] {
            handshakes_failed.get_or_create_owned(&SurfaceLabels { surface });
            tokens_rejected.get_or_create_owned(&SurfaceLabels { surface });
        }
        let snapshots = Snapshots::registered(&mut registry);
        let envoy_details = EnvoyDetails::default();
        registry.register(
            "envoy_descriptor_decisions",
            "Decisions by descriptor, for rules of Envoy with detailed_metric or value_to_metric",
            envoy_details.decisions.clone(),
        );
        let mut process = Registry::with_prefix("process");
        process.register_collector(Box::new(Process::new()));
        Self {
            latencies: Arc::default(),
            reloads,
            connections,
            connections_rejected,
            connections_aborted,
            accept_errors,
            handshakes_failed,
            tokens_rejected,
            snapshots,
            envoy_details,
            registry: Arc::new(registry),
            process: Arc::new(process),
        }
    }

    /// Counts a connection as open until the result is dropped.
    pub(crate) fn count_connection(&self, surface: &'static str) -> OpenConnection {
        let gauge = self.connections.get_or_create_owned(&SurfaceLabels { surface });
        gauge.inc();
        OpenConnection(gauge)
    }

    /// Returns the response times of a surface.
    pub(crate) fn latency(&self, surface: &'static str) -> Arc<Latency> {
        let mut latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, latency)) = latencies.iter().find(|(name, _)| *name == surface) {
            return latency.clone();
        }
        let latency = Arc::new(Latency::default());
        latencies.push((surface, latency.clone()));
        latency
    }

    /// Returns all metrics in a text format.
    pub(crate) fn render(&self, figures: Figures, format: Format) -> String {
        let latencies = self.latencies.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut values = Registry::with_prefix("tallygate");
        values.register_collector(Box::new(FiguresCollector { figures, latencies }));
        let mut out = String::new();
        // Writing to a string cannot fail.
        for registry in [&self.registry, &values, &self.process] {
            let _ = text::encode_registry(&mut out, registry);
        }
        let _ = text::encode_eof(&mut out);
        match format {
            Format::OpenMetrics => out,
            Format::Text => format::to_text(&out),
        }
    }
}

/// Metrics of snapshots: how many were written or failed, and the figures of the last one.
#[derive(Clone, Default)]
pub(crate) struct Snapshots {
    outcomes: Family<OutcomeLabels, Counter>,
    keys: Gauge<u64, AtomicU64>,
    bytes: Gauge<u64, AtomicU64>,
    seconds: Gauge<f64, AtomicU64>,
}

impl Snapshots {
    fn registered(registry: &mut Registry) -> Self {
        let new = Self::default();
        registry.register("snapshots", "Snapshots of the memory store", new.outcomes.clone());
        for outcome in ["written", "failed"] {
            new.outcomes.get_or_create_owned(&OutcomeLabels { outcome });
        }
        registry.register("snapshot_keys", "Keys in the last snapshot", new.keys.clone());
        registry.register("snapshot_bytes", "Size of the last snapshot", new.bytes.clone());
        registry.register(
            "snapshot_seconds",
            "Time to write the last snapshot",
            new.seconds.clone(),
        );
        new
    }

    /// Counts a snapshot that was written.
    pub(crate) fn written(&self, keys: u64, bytes: u64, took: Duration) {
        self.outcomes.get_or_create(&OutcomeLabels { outcome: "written" }).inc();
        self.keys.set(keys);
        self.bytes.set(bytes);
        self.seconds.set(took.as_secs_f64());
    }

    /// Counts a snapshot that could not be written.
    pub(crate) fn failed(&self) {
        self.outcomes.get_or_create(&OutcomeLabels { outcome: "failed" }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_of_alerts_exist_before_the_first_event() {
        let mut text_format = String::new();
        text::encode_registry(&mut text_format, &Metrics::new().registry)
            .expect("a string takes it");
        for count in [
            "reloads_total{outcome=\"rejected\"}",
            "connections_rejected_total{reason=\"server\"}",
            "connections_rejected_total{reason=\"address\"}",
            "tls_handshakes_failed_total{surface=\"http\"}",
            "tls_handshakes_failed_total{surface=\"resp\"}",
            "tokens_rejected_total{surface=\"http\"}",
            "tokens_rejected_total{surface=\"resp\"}",
            "snapshots_total{outcome=\"written\"}",
            "snapshots_total{outcome=\"failed\"}",
        ] {
            assert!(
                text_format.contains(&format!("\ntallygate_{count} 0\n")),
                "no {count} in {text_format}"
            );
        }
    }
}
