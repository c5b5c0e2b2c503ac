//! What is counted of every decision.

use std::sync::Arc;

use tallygate::{Decision, Event, Observer, Source};

use super::Hot;
use crate::metrics::{Metrics, PolicyMetrics};
use crate::traces;

/// Counts the decisions of one policy, for metrics, traces and the list of hot clients.
pub(crate) struct Counts {
    policy: Arc<str>,
    metrics: PolicyMetrics,
    hot: Arc<Hot>,
}

impl Counts {
    pub(super) fn new(policy: Arc<str>, metrics: &Metrics, hot: Arc<Hot>) -> Self {
        Self { metrics: metrics.of_policy(&policy), policy, hot }
    }

    /// Counts a decision that no limiter made.
    pub(super) fn count(&self, key: &[u8], decision: &Decision) {
        self.note(key, decision.allowed, decision.source);
    }

    fn note(&self, key: &[u8], allowed: bool, source: Source) {
        self.metrics.decided(allowed, source);
        traces::decided(&self.policy, allowed, source);
        self.hot.note(&self.policy, key, allowed);
    }
}

impl Observer for Counts {
    fn decided(&self, event: &Event<'_>) {
        self.note(event.key, event.allowed, event.source);
    }
}
