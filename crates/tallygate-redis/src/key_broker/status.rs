//! The state of a key in the store, as this process last saw it.

use tallygate::algorithm::{Algorithm as _, Answer as _, LimitRecord, Outcome, Timed};
use tallygate::store::Bounds;
use tallygate::{Cost, Tick, Ticks};

use super::{NANOS_PER_MICRO, Terms};

/// The last known state of the key in the store.
#[derive(Clone, Debug)]
pub(super) struct StoreStatus {
    pub(super) state: Box<[LimitRecord]>,
    /// The time of that state, by the clock of the store.
    pub(super) at: Tick,
    /// When the call was sent, by the clock of this process.
    pub(super) sent: Tick,
    /// The cost that was denied; a smaller one may be allowed.
    pub(super) cost: Cost,
    pub(super) shadow: Option<usize>,
    pub(super) bounds: Bounds,
}

/// How long a denial is repeated without a call, in nanoseconds.
const DENIED_FOR: Ticks = Ticks(1_000_000_000);

impl StoreStatus {
    pub(super) fn of_slice(state: Box<[LimitRecord]>, at: Tick, sent: Tick) -> Self {
        Self { state, at, sent, cost: 1, shadow: None, bounds: Bounds::default() }
    }

    /// Estimates the time of the store. The time since the call was sent is at least the time since the store answered.
    pub(super) fn store_time(&self, now: Tick) -> Tick {
        let since = now.since(self.sent).0.div_ceil(NANOS_PER_MICRO);
        self.at.after(Ticks(since)).unwrap_or(self.at)
    }

    /// Returns whether the store is known to deny a cost.
    pub(super) fn denies(&self, terms: &Terms, cost: Cost, now: Tick) -> bool {
        let covers = cost == self.cost || (cost > self.cost && !terms.denies_one_cost);
        let at = self.store_time(now);
        covers
            && now.since(self.sent) < DENIED_FOR
            && !(terms.policy.allows(&self.state, at, cost) && self.bounds.have_room(at, cost))
    }

    /// Returns the denial of a cost, of which some units are held in this process.
    pub(super) fn denial(&self, terms: &Terms, cost: Cost, left: Cost, at: Tick) -> Timed {
        let outcome = Outcome::Denied(cost - left);
        let mut timed = Timed::from_outcome(&*terms.policy, &self.state, at, outcome, self.shadow);
        self.bounds.complete(&mut timed.decision, &terms.policy, at, Some(cost - left));
        let available = timed.decision.remaining.saturating_add(left);
        timed.decision.remaining = available.min(cost - 1);
        timed
    }
}
