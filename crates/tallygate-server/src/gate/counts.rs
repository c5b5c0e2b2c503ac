//! Counts decisions for metrics, traces and the list of hot clients.

use std::sync::Arc;

use tallygate::observer::{Event, Observer};
use tallygate::{Decision, Source};

use super::HotClients;
use crate::metrics::PolicyMetrics;
use crate::traces;

/// Counts the decisions of one policy. All clones have the same counters.
#[derive(Clone)]
pub(crate) struct DecisionCounter {
    policy: Arc<str>,
    metrics: Arc<PolicyMetrics>,
    hot: Arc<HotClients>,
}

impl DecisionCounter {
    pub(super) fn new(policy: Arc<str>, hot: Arc<HotClients>) -> Self {
        Self { policy, metrics: Arc::default(), hot }
    }

    /// Returns the counters, which metrics show.
    pub(super) fn metrics(&self) -> Arc<PolicyMetrics> {
        self.metrics.clone()
    }

    /// Returns whether two counters are the same: then their policies have the same store.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.metrics, &other.metrics)
    }

    /// Counts a decision that was not made by a limiter.
    pub(super) fn count(&self, key: &[u8], decision: &Decision) {
        self.record(key, decision.allowed, decision.source);
    }

    fn record(&self, key: &[u8], allowed: bool, source: Source) {
        self.metrics.count_decision(allowed, source);
        traces::decided(&self.policy, allowed, source);
        self.hot.record(&self.policy, key, allowed);
    }
}

impl Observer for DecisionCounter {
    fn decided(&self, event: &Event<'_>) {
        self.record(event.key, event.allowed, event.source);
        if let Some(limit) = event.shadow_denied_by {
            self.metrics.count_shadow_denial(limit);
            tracing::debug!(
                policy = &*self.policy,
                limit,
                "a shadow limit would have denied the request"
            );
        }
    }
}
