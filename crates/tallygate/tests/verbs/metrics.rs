//! Decisions through the `metrics` facade, with no label that clients choose.

use std::sync::Mutex;

use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use tallygate::observer::MetricsObserver;
use tallygate::{Ask, Policy, RateLimiter, Tick};

/// Records the counted events, by name and labels.
#[derive(Default)]
struct RecordedCounts(Mutex<Vec<String>>);

impl Recorder for RecordedCounts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let mut labels: Vec<String> =
            key.labels().map(|label| format!("{}={}", label.key(), label.value())).collect();
        labels.sort();
        self.0.lock().expect("noted").push(format!("{} {}", key.name(), labels.join(" ")));
        Counter::noop()
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn decisions_are_counted_by_policy_outcome_and_source_only() {
    let noted = RecordedCounts::default();
    let policy = Policy::token_bucket(1).per_hour().named("api").build().unwrap();
    let limiter = RateLimiter::new(policy).observed_by(MetricsObserver);
    metrics::with_local_recorder(&noted, || {
        limiter.is_allowed(Ask::new("alice").at(Tick(0))).unwrap();
        limiter.is_allowed(Ask::new("alice").at(Tick(0))).unwrap();
    });
    assert_eq!(
        *noted.0.lock().unwrap(),
        [
            "tallygate_decisions_total outcome=allowed policy=api source=store",
            "tallygate_decisions_total outcome=denied policy=api source=store",
        ]
    );
}
