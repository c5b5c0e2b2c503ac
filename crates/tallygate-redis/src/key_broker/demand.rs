//! Estimates how many units the checks of a key will need.

use tallygate::{Cost, Tick, Ticks};

/// The demand in the current and in the previous half of the life of a lease.
#[derive(Debug, Default)]
pub(super) struct Demand {
    half: i64,
    this: DemandCount,
    last: DemandCount,
}

#[derive(Clone, Copy, Debug, Default)]
struct DemandCount {
    requests: u64,
    cost: Cost,
}

impl Demand {
    /// Records a request.
    pub(super) fn note(&mut self, cost: Cost, now: Tick, half_life: Ticks) {
        let half = half_of(now, half_life);
        if half != self.half {
            self.last = if half == self.half + 1 { self.this } else { DemandCount::default() };
            (self.half, self.this) = (half, DemandCount::default());
        }
        self.this.requests += 1;
        self.this.cost = self.this.cost.saturating_add(cost);
    }

    /// Returns the requests in half the life of a lease.
    pub(super) const fn requests(&self) -> u64 {
        if self.this.requests > self.last.requests {
            self.this.requests
        } else {
            self.last.requests
        }
    }

    /// Returns the expected demand in half the life of a lease.
    pub(super) const fn expected(&self) -> Cost {
        if self.this.cost > self.last.cost { self.this.cost } else { self.last.cost }
    }

    /// Returns whether there was no request for a while.
    pub(super) fn is_over(&self, now: Tick, half_life: Ticks) -> bool {
        self.requests() == 0 || half_of(now, half_life) > self.half + 1
    }
}

fn half_of(now: Tick, half_life: Ticks) -> i64 {
    now.0.div_euclid(i64::try_from(half_life.0).unwrap_or(i64::MAX))
}
