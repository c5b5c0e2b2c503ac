//! What is counted, as Prometheus reads it. No client is ever a label.

use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::{EncodeLabelSet, text};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use tallygate::{Source, Usage};
use tallygate_redis::Counts;

use crate::logs;

/// What is counted.
#[derive(Clone)]
pub(crate) struct Metrics {
    decisions: Family<DecisionLabels, Counter>,
    latency: Family<SurfaceLabels, Histogram, fn() -> Histogram>,
    pub(crate) reloads: Family<OutcomeLabels, Counter>,
    connections: Family<SurfaceLabels, Gauge>,
    pub(crate) connections_refused: Family<ReasonLabels, Counter>,
    pub(crate) connections_given_up: Counter,
    pub(crate) accept_errors: Counter,
    pub(crate) handshakes_failed: Family<SurfaceLabels, Counter>,
    pub(crate) tokens_refused: Family<SurfaceLabels, Counter>,
    pub(crate) snapshots: Snapshots,
    registry: Arc<Registry>,
}

/// A connection that is counted as open until it is dropped.
#[derive(Debug)]
pub(crate) struct OpenConnection(Gauge);

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.dec();
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DecisionLabels {
    policy: String,
    outcome: &'static str,
    source: &'static str,
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

/// The counters of one policy, found once.
pub(crate) struct PolicyMetrics {
    /// By outcome and source.
    decisions: [[Counter; SOURCES.len()]; 2],
}

const SOURCES: [Source; 7] = [
    Source::Store,
    Source::Lease,
    Source::DenyCache,
    Source::Local,
    Source::FailedOpen,
    Source::FailedClosed,
    Source::Overloaded,
];

/// Figures that are read when metrics are rendered, and not counted as things happen.
pub(crate) struct Figures {
    /// The most bytes of memory that the server takes.
    pub(crate) memory_bound: u64,
    /// The bytes that clients make the server hold, of the `max_held_bytes` of the configuration.
    pub(crate) held_bytes: usize,
    /// The keys in memory, by policy.
    pub(crate) keys: Vec<(Arc<str>, Usage)>,
    /// How many reservations are open.
    pub(crate) reservations_open: usize,
    /// What Redis was asked, where it keeps the clients.
    pub(crate) store: Option<Counts>,
}

/// From 1 µs to 1 s.
const BUCKETS: [f64; 13] =
    [1e-6, 5e-6, 1e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.05, 0.25, 1.0];

impl Metrics {
    pub(crate) fn new() -> Self {
        let mut registry = Registry::with_prefix("tallygate");
        let decisions = Family::default();
        registry.register("decisions", "Decisions made", decisions.clone());
        let make: fn() -> Histogram = || Histogram::new(BUCKETS);
        let latency = Family::new_with_constructor(make);
        registry.register("request_seconds", "How long requests took", latency.clone());
        let reloads = Family::<_, Counter>::default();
        registry.register("reloads", "Configurations read anew", reloads.clone());
        // Told from the start: an alert sees a count that grows, not one that appears.
        for outcome in ["applied", "refused"] {
            reloads.get_or_create_owned(&OutcomeLabels { outcome });
        }
        let connections = Family::default();
        registry.register("connections", "Connections that are open", connections.clone());
        let connections_refused = Family::default();
        registry.register(
            "connections_refused",
            "Connections that were one too many for the server or for their address, or had no memory left (HTTP/2)",
            connections_refused.clone(),
        );
        for reason in ["server", "address", "memory"] {
            drop(connections_refused.get_or_create(&ReasonLabels { reason }));
        }
        let connections_given_up = Counter::default();
        registry.register(
            "connections_given_up",
            "Connections of clients that did not take their replies",
            connections_given_up.clone(),
        );
        let accept_errors = Counter::default();
        registry.register(
            "accept_errors",
            "Connections that could not be accepted",
            accept_errors.clone(),
        );
        let handshakes_failed = Family::<_, Counter>::default();
        registry.register(
            "tls_handshakes_failed",
            "Connections on which no TLS was agreed on",
            handshakes_failed.clone(),
        );
        let tokens_refused = Family::<_, Counter>::default();
        registry.register(
            "tokens_refused",
            "Requests without a token, or with one that does not do",
            tokens_refused.clone(),
        );
        for surface in ["http", "resp"] {
            handshakes_failed.get_or_create_owned(&SurfaceLabels { surface });
            tokens_refused.get_or_create_owned(&SurfaceLabels { surface });
        }
        let snapshots = Snapshots::registered(&mut registry);
        let registry = Arc::new(registry);
        Self {
            decisions,
            latency,
            reloads,
            connections,
            connections_refused,
            connections_given_up,
            accept_errors,
            handshakes_failed,
            tokens_refused,
            snapshots,
            registry,
        }
    }

    pub(crate) fn of_policy(&self, policy: &str) -> PolicyMetrics {
        let counter = |outcome, source: Source| {
            let labels =
                DecisionLabels { policy: policy.to_owned(), outcome, source: source.name() };
            self.decisions.get_or_create_owned(&labels)
        };
        let by_source = |outcome| SOURCES.map(|source| counter(outcome, source));
        PolicyMetrics { decisions: [by_source("refused"), by_source("allowed")] }
    }

    /// Counts a connection as open until the result is dropped.
    pub(crate) fn count_connection(&self, surface: &'static str) -> OpenConnection {
        let gauge = self.connections.get_or_create_owned(&SurfaceLabels { surface });
        gauge.inc();
        OpenConnection(gauge)
    }

    /// A surface's histogram, found once.
    pub(crate) fn latency(&self, surface: &'static str) -> Histogram {
        self.latency.get_or_create_owned(&SurfaceLabels { surface })
    }

    /// All of it, as text.
    pub(crate) fn render(&self, figures: &Figures) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = text::encode_registry(&mut out, &self.registry);
        let _ = writeln!(out, "# TYPE tallygate_build_info gauge");
        let version = env!("CARGO_PKG_VERSION");
        let _ = writeln!(out, "tallygate_build_info{{version=\"{version}\"}} 1");
        let _ = writeln!(out, "# TYPE tallygate_log_lines_lost counter");
        let _ = writeln!(out, "tallygate_log_lines_lost_total {}", logs::lines_lost());
        let _ = writeln!(out, "# TYPE tallygate_memory_bound_bytes gauge");
        let _ = writeln!(out, "tallygate_memory_bound_bytes {}", figures.memory_bound);
        let _ = writeln!(out, "# TYPE tallygate_held_bytes gauge");
        let _ = writeln!(out, "tallygate_held_bytes {}", figures.held_bytes);
        let _ = writeln!(out, "# TYPE tallygate_keys_live gauge");
        let _ = writeln!(out, "# TYPE tallygate_evictions counter");
        let _ = writeln!(out, "# TYPE tallygate_keys_refused counter");
        for (policy, usage) in &figures.keys {
            let policy = policy.replace('\\', "\\\\").replace('"', "\\\"");
            let _ = writeln!(out, "tallygate_keys_live{{policy=\"{policy}\"}} {}", usage.keys);
            let _ =
                writeln!(out, "tallygate_evictions_total{{policy=\"{policy}\"}} {}", usage.evicted);
            let refused = usage.refused;
            let _ = writeln!(out, "tallygate_keys_refused_total{{policy=\"{policy}\"}} {refused}");
        }
        let _ = writeln!(out, "# TYPE tallygate_reservations_open gauge");
        let _ = writeln!(out, "tallygate_reservations_open {}", figures.reservations_open);
        if let Some(counts) = &figures.store {
            let mut count = |name: &str, value: u64| {
                let _ = writeln!(out, "# TYPE tallygate_store_{name} counter");
                let _ = writeln!(out, "tallygate_store_{name}_total {value}");
            };
            count("calls", counts.calls);
            count("timeouts", counts.timeouts);
            count("errors", counts.errors);
            count("overloaded", counts.overloaded);
            count("races_retried", counts.contended);
            count("races_lost", counts.races_lost);
            count("out_of_memory_replies", counts.out_of_memory);
            count("breaker_opened", counts.breaker_opened);
            count("connections", counts.connections);
            count("redirections", counts.redirections);
            count("returned", counts.returned);
            count("unreturned", counts.unreturned);
            count("coalesced", counts.coalesced);
            count("leased", counts.leased);
            count("lease_given_back", counts.given_back);
            count("lease_lapsed", counts.lapsed);
            let _ = writeln!(out, "# TYPE tallygate_store_breaker_open gauge");
            let _ = writeln!(out, "tallygate_store_breaker_open {}", u8::from(counts.is_open));
            let _ = writeln!(out, "# TYPE tallygate_store_out_of_memory gauge");
            let is_out = u8::from(counts.is_out_of_memory);
            let _ = writeln!(out, "tallygate_store_out_of_memory {is_out}");
        }
        // The end mark belongs behind everything.
        out = out.replace("# EOF\n", "");
        out.push_str("# EOF\n");
        out
    }
}

/// What is told of snapshots: how many there were, and what the last one was like.
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
        registry.register("snapshots", "Snapshots of clients", new.outcomes.clone());
        for outcome in ["written", "failed"] {
            new.outcomes.get_or_create_owned(&OutcomeLabels { outcome });
        }
        registry.register("snapshot_keys", "Clients in the last snapshot", new.keys.clone());
        registry.register("snapshot_bytes", "Its bytes", new.bytes.clone());
        registry.register("snapshot_seconds", "How long it took", new.seconds.clone());
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

impl PolicyMetrics {
    pub(crate) fn decided(&self, allowed: bool, source: Source) {
        let source = SOURCES.iter().position(|one| *one == source).unwrap_or(0);
        self.decisions[usize::from(allowed)][source].inc();
    }
}

/// How long something took, into a histogram.
pub(crate) fn observe(histogram: &Histogram, took: Duration) {
    histogram.observe(took.as_secs_f64());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_alerts_watch_is_told_before_it_happens() {
        let mut told = String::new();
        text::encode_registry(&mut told, &Metrics::new().registry).expect("a string takes it");
        for count in [
            "reloads_total{outcome=\"refused\"}",
            "connections_refused_total{reason=\"server\"}",
            "connections_refused_total{reason=\"address\"}",
            "tls_handshakes_failed_total{surface=\"http\"}",
            "tls_handshakes_failed_total{surface=\"resp\"}",
            "tokens_refused_total{surface=\"http\"}",
            "tokens_refused_total{surface=\"resp\"}",
            "snapshots_total{outcome=\"written\"}",
            "snapshots_total{outcome=\"failed\"}",
        ] {
            assert!(told.contains(&format!("\ntallygate_{count} 0\n")), "no {count} in {told}");
        }
    }
}
