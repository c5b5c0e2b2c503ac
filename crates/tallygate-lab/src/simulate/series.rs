//! The curves of a report: the state over time, cumulative counts, and the worst window.

use std::collections::VecDeque;

use serde::{Serialize, Serializer};
use tallygate_core::{Algorithm as _, Cost, Kind, Limit, LimitState, Machine, Used};

use super::scenario::tick;

/// The number of evenly spaced samples of the state, in addition to those at decisions.
const EVEN_STEPS: u64 = 240;

/// A number in thousandths, serialized as a JSON number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Thousandths(pub(crate) u64);

impl Thousandths {
    /// Returns a fraction, rounded to the nearest thousandth.
    pub(super) fn of(numerator: u128, denominator: u128) -> Self {
        let rounded = (numerator * 2000 + denominator) / (2 * denominator);
        Self(u64::try_from(rounded).unwrap_or(u64::MAX))
    }
}

impl Serialize for Thousandths {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        if self.0.is_multiple_of(1000) {
            return serializer.serialize_u64(self.0 / 1000);
        }
        #[expect(
            clippy::cast_precision_loss,
            reason = "JSON numbers are doubles, and this one is only displayed"
        )]
        #[expect(clippy::float_arithmetic, reason = "the result is only displayed")]
        let shown = self.0 as f64 / 1000.0;
        serializer.serialize_f64(shown)
    }
}

/// The state of a client over time.
#[derive(Debug, Serialize)]
pub(crate) struct StateSeries {
    /// The name of the quantity.
    pub(crate) name: &'static str,
    pub(crate) unit: &'static str,
    pub(crate) at_us: Vec<u64>,
    pub(crate) value: Vec<Thousandths>,
    /// The largest possible value.
    pub(crate) capacity: Thousandths,
    #[serde(skip)]
    duration_us: u64,
    /// The number of evenly spaced samples taken so far.
    #[serde(skip)]
    steps: u64,
}

impl StateSeries {
    pub(super) fn new(limit: &Limit, duration_us: u64) -> Self {
        let numbers = limit.numbers();
        let (name, unit) = match numbers.kind {
            Kind::TokenBucket => ("tokens", "tokens"),
            Kind::Gcra => ("arrival time ahead", "ms"),
            Kind::LeakyBucket => ("level", "requests"),
            Kind::FixedWindow => ("count in the window", "requests"),
            Kind::SlidingWindowLog => ("in the last window", "requests"),
            Kind::SlidingWindowCounter => ("estimate", "requests"),
        };
        let capacity = match numbers.kind {
            Kind::Gcra => {
                let time = u128::from(numbers.burst) * u128::from(numbers.window.0);
                Thousandths::of(time, u128::from(numbers.limit) * 1000)
            }
            _ => Thousandths::of(numbers.burst.into(), 1),
        };
        let (at_us, value) = (Vec::new(), Vec::new());
        Self { name, unit, at_us, value, capacity, duration_us, steps: 0 }
    }

    /// Takes the evenly spaced samples up to a time, before the request at that time changes the state.
    pub(super) fn up_to(&mut self, at_us: u64, level: impl Fn(u64) -> Thousandths) {
        while self.steps <= EVEN_STEPS {
            let step =
                u128::from(self.duration_us) * u128::from(self.steps) / u128::from(EVEN_STEPS);
            // At most the duration.
            let step = u64::try_from(step).unwrap_or(self.duration_us);
            if step > at_us {
                break;
            }
            self.sample(step, level(step));
            self.steps += 1;
        }
    }

    /// Takes a sample, unless it equals the last one.
    pub(super) fn sample(&mut self, at_us: u64, value: Thousandths) {
        if (self.at_us.last(), self.value.last()) != (Some(&at_us), Some(&value)) {
            self.at_us.push(at_us);
            self.value.push(value);
        }
    }
}

/// Converts the exact state to the quantity that is shown.
pub(super) fn level(limit: &Limit, state: &LimitState, at_us: u64) -> Thousandths {
    let arrival = match (limit.machine(), state) {
        (Machine::Bucket(bucket), LimitState::Bucket(state)) => Some(bucket.arrival_time(state)),
        (Machine::WideBucket(bucket), LimitState::WideBucket(state)) => {
            Some(bucket.arrival_time(state))
        }
        _ => None,
    };
    if let Some(arrival) = arrival.filter(|_| limit.numbers().kind == Kind::Gcra) {
        let (part, of) = arrival.fraction;
        let (part, of) = (i128::from(part), i128::from(of));
        let ahead = (i128::from(arrival.tick.0) - i128::from(at_us)) * of + part;
        return Thousandths::of(u128::try_from(ahead).unwrap_or(0), of.unsigned_abs() * 1000);
    }
    let Used { whole, part: (part, of) } = limit.used(state, tick(at_us));
    let (part, of) = (u128::from(part), u128::from(of));
    let used = u128::from(whole) * of + part;
    match limit.numbers().kind {
        Kind::TokenBucket => {
            Thousandths::of((u128::from(limit.capacity()) * of).saturating_sub(used), of)
        }
        _ => Thousandths::of(used, of),
    }
}

/// A curve that rises in steps, as a list of its corners.
#[derive(Debug, Serialize)]
pub(crate) struct StepLine {
    pub(crate) at_us: Vec<u64>,
    pub(crate) value: Vec<u64>,
}

impl StepLine {
    /// Returns the curve that starts at 0 and rises by the given amounts at the given times.
    pub(super) fn of(rises: impl IntoIterator<Item = (u64, u64)>, end_us: u64) -> Self {
        let mut steps = Self { at_us: vec![0], value: vec![0] };
        let mut sum = 0;
        for (at_us, by) in rises {
            if steps.at_us.last() != Some(&at_us) {
                steps.push(at_us, sum);
            }
            sum += by;
            // Rises at the same time share one upper corner.
            let corners = steps.at_us.len();
            match corners.checked_sub(2).map(|before| steps.at_us[before]) {
                Some(before) if before == at_us => steps.value[corners - 1] = sum,
                _ => steps.push(at_us, sum),
            }
        }
        steps.push(end_us, sum);
        steps
    }

    fn push(&mut self, at_us: u64, value: u64) {
        self.at_us.push(at_us);
        self.value.push(value);
    }
}

/// The most units that a client was allowed in any window, and the start of that window.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct WorstWindow {
    pub(crate) count: Cost,
    pub(crate) from_us: u64,
}

impl WorstWindow {
    /// Returns the worst half-open window of one client's allowed requests, which must be in order; the first if several
    /// are equal.
    pub(super) fn of(allowed: impl IntoIterator<Item = (u64, Cost)>, window_us: u64) -> Self {
        let mut within = VecDeque::new();
        let (mut sum, mut worst) = (0, Self::default());
        for (at_us, cost) in allowed {
            within.push_back((at_us, cost));
            sum += cost;
            while let Some(&(first, cost)) = within.front()
                && at_us - first >= window_us
            {
                within.pop_front();
                sum -= cost;
            }
            if let Some(&(from_us, _)) = within.front()
                && sum > worst.count
            {
                worst = Self { count: sum, from_us };
            }
        }
        worst
    }
}
