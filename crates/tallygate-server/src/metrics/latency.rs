//! A histogram of response times, counted per thread.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use prometheus_client::encoding::{MetricEncoder, NoLabelSet};
use prometheus_client::metrics::exemplar::Exemplar;

use crate::striped::Counters;

const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;

/// The upper bounds of the buckets in nanoseconds, from 1 µs to 1 s.
const BOUNDS: [u64; 13] = [
    MICROSECOND,
    5 * MICROSECOND,
    10 * MICROSECOND,
    50 * MICROSECOND,
    100 * MICROSECOND,
    250 * MICROSECOND,
    500 * MICROSECOND,
    MILLISECOND,
    5 * MILLISECOND,
    10 * MILLISECOND,
    50 * MILLISECOND,
    250 * MILLISECOND,
    1_000 * MILLISECOND,
];

/// The counter of everything above the last bound.
const ABOVE: usize = BOUNDS.len();
/// The sum of all times, in nanoseconds.
const SUM: usize = ABOVE + 1;

/// A histogram of response times.
#[derive(Default)]
pub(crate) struct Latency(Counters<{ SUM + 1 }>);

impl Latency {
    /// Counts a response time.
    pub(crate) fn observe(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.0.add(BOUNDS.partition_point(|bound| *bound < nanos), 1);
        self.0.add(SUM, nanos);
    }

    pub(super) fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let sums = self.0.sums();
        let mut buckets = [(f64::INFINITY, sums[ABOVE]); ABOVE + 1];
        for ((bucket, bound), count) in buckets.iter_mut().zip(BOUNDS).zip(sums) {
            *bucket = (seconds(bound), count);
        }
        let count = sums[..=ABOVE].iter().sum();
        let no_exemplars = None::<&HashMap<usize, Exemplar<NoLabelSet, f64>>>;
        encoder.encode_histogram(seconds(sums[SUM]), count, &buckets, no_exemplars)
    }
}

fn seconds(nanos: u64) -> f64 {
    Duration::from_nanos(nanos).as_secs_f64()
}
