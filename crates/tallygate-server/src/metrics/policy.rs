//! The counters of one policy.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tallygate::Source;

use crate::striped::Counters;

/// The sources of decisions, in the order of their counters.
pub(super) const SOURCES: [Source; 7] = [
    Source::Store,
    Source::Lease,
    Source::DenyCache,
    Source::Local,
    Source::FailedOpen,
    Source::FailedClosed,
    Source::Overloaded,
];

/// How many shadow limits of a policy are counted by name. Administrators name limits, but may do so again and again.
const MAX_SHADOW_LIMITS: usize = 256;
/// The name under which further shadow limits are counted.
const OTHER: &str = "other";

/// The counters of one policy.
#[derive(Default)]
pub(crate) struct PolicyMetrics {
    /// First the denials by source, then the allowed requests.
    decisions: Counters<{ 2 * SOURCES.len() }>,
    /// The denials of shadow limits, by the name of the limit.
    shadow_denials: ArcSwap<Vec<ShadowDenials>>,
}

#[derive(Clone)]
struct ShadowDenials {
    limit: Arc<str>,
    count: Arc<Counters<1>>,
}

impl PolicyMetrics {
    pub(crate) fn count_decision(&self, allowed: bool, source: Source) {
        let source = SOURCES.iter().position(|one| *one == source).unwrap_or(0);
        self.decisions.add(usize::from(allowed) * SOURCES.len() + source, 1);
    }

    /// Counts a request that a shadow limit would have denied.
    pub(crate) fn count_shadow_denial(&self, limit: &str) {
        if let Some(known) = find(&self.shadow_denials.load(), limit) {
            known.count.add(0, 1);
            return;
        }
        self.shadow_denials.rcu(|denials| {
            if find(denials, limit).is_some() {
                return denials.clone();
            }
            let limit = if denials.len() < MAX_SHADOW_LIMITS { limit } else { OTHER };
            let new = ShadowDenials { limit: limit.into(), count: Arc::default() };
            let mut denials = Vec::clone(denials);
            denials.push(new);
            Arc::new(denials)
        });
        if let Some(known) = find(&self.shadow_denials.load(), limit) {
            known.count.add(0, 1);
        }
    }

    /// Returns the decisions as outcome, source and count.
    pub(super) fn decisions(&self) -> impl Iterator<Item = (&'static str, Source, u64)> {
        let outcomes = ["denied", "allowed"].into_iter();
        let labels = outcomes.flat_map(|outcome| SOURCES.map(|source| (outcome, source)));
        labels.zip(self.decisions.sums()).map(|((outcome, source), count)| (outcome, source, count))
    }

    /// Returns the denials of shadow limits, by the name of the limit.
    pub(super) fn shadow_denials(&self) -> Vec<(Arc<str>, u64)> {
        let denials = self.shadow_denials.load();
        denials.iter().map(|one| (one.limit.clone(), one.count.sums()[0])).collect()
    }
}

/// Finds the counter of a limit, or the one of all further limits if there are too many.
fn find<'a>(denials: &'a [ShadowDenials], limit: &str) -> Option<&'a ShadowDenials> {
    let named = |name: &str| denials.iter().find(|one| *one.limit == *name);
    named(limit).or_else(|| named(OTHER).filter(|_| denials.len() > MAX_SHADOW_LIMITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_decision_is_counted_by_outcome_and_source() {
        let metrics = PolicyMetrics::default();
        for (times, source) in SOURCES.into_iter().enumerate() {
            (0..=times).for_each(|_| metrics.count_decision(true, source));
            (0..10 * times).for_each(|_| metrics.count_decision(false, source));
        }
        for (outcome, source, count) in metrics.decisions() {
            let times = SOURCES.iter().position(|one| *one == source).unwrap() as u64;
            assert_eq!(count, if outcome == "allowed" { times + 1 } else { 10 * times });
        }
    }

    #[test]
    fn shadow_limits_without_end_are_counted_together() {
        let metrics = PolicyMetrics::default();
        for limit in 0..MAX_SHADOW_LIMITS + 50 {
            metrics.count_shadow_denial(&format!("limit {limit}"));
            metrics.count_shadow_denial("limit 0");
        }
        let denials = metrics.shadow_denials();
        assert_eq!(denials.len(), MAX_SHADOW_LIMITS + 1);
        let count =
            |name: &str| denials.iter().find(|(limit, _)| **limit == *name).map(|one| one.1);
        assert_eq!(count("limit 0"), Some(MAX_SHADOW_LIMITS as u64 + 51));
        assert_eq!(count("limit 1"), Some(1));
        assert_eq!(count(OTHER), Some(50));
    }
}
