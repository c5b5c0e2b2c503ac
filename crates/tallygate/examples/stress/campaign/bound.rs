//! The most that a limit allows in a period, and the least that it must have allowed, given its denials.
//!
//! A machine may run none of the threads for longer than a window. Then no thread checks, and the units of that time
//! are lost. A denial proves that the limit was exhausted at that time. So the minimum is computed from the times of
//! denials, and does not depend on other load of the machine.

use std::sync::atomic::{AtomicU64, Ordering};

use tallygate::{Kind, Tick, Ticks};

/// A limit whose burst, if it has one, is its limit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limit {
    pub(crate) kind: Kind,
    pub(crate) limit: u64,
    pub(crate) window: Ticks,
}

impl Limit {
    /// The most that is allowed from the first request of a new key at `start` until `end`, inclusive.
    pub(crate) fn at_most(self, start: Tick, end: Tick) -> u64 {
        let (limit, window) = (u128::from(self.limit), u128::from(self.window.0));
        let elapsed = u128::from(end.since(start).0);
        let windows = u128::from(self.window_of(end).abs_diff(self.window_of(start)));
        let most = match self.kind {
            // The burst, and the units that are earned.
            Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => limit + elapsed * limit / window,
            // The limit in each half-open window.
            Kind::SlidingWindowLog => limit * (elapsed / window + 1),
            // The limit in each aligned window.
            Kind::FixedWindow => limit * (windows + 1),
            // The limit in each aligned window. In the last one, only the room that the previous window leaves until
            // `end`, if that window was full.
            Kind::SlidingWindowCounter if windows > 0 => {
                let rest = window - end.0.rem_euclid(self.window.0.cast_signed()) as u128;
                limit * (windows + 1) - limit * rest / window
            }
            Kind::SlidingWindowCounter => limit,
        };
        u64::try_from(most).unwrap_or(u64::MAX)
    }

    /// The number of the aligned window in which a time lies.
    fn window_of(self, at: Tick) -> i64 {
        at.0.div_euclid(self.window.0.cast_signed())
    }
}

/// Slots per window. The lengths of all windows are multiples of it.
const SLOTS: usize = 64;

/// Records when requests were denied: which slots of time, each a fraction of a window, contain a denial.
pub(crate) struct Denials {
    limit: Limit,
    /// The start of the first slot, which is also the start of an aligned window.
    origin: Tick,
    bits: Vec<AtomicU64>,
}

impl Denials {
    /// Creates the record for a period. Later denials are not recorded.
    pub(crate) fn new(limit: Limit, start: Tick, period: Ticks) -> Self {
        let origin = Tick(limit.window_of(start) * limit.window.0.cast_signed());
        let windows = period.0 / limit.window.0 + 2;
        let bits = (0..windows).map(|_| AtomicU64::new(0)).collect();
        Self { limit, origin, bits }
    }

    const fn slot_ticks(&self) -> u64 {
        self.limit.window.0 / SLOTS as u64
    }

    /// Records that a request was denied between two times, if both lie in the same slot.
    pub(crate) fn record(&self, began: Tick, ended: Tick) {
        let slot_of = |at: Tick| usize::try_from(at.since(self.origin).0 / self.slot_ticks());
        let (Ok(slot), Ok(last)) = (slot_of(began), slot_of(ended)) else { return };
        if slot != last {
            return;
        }
        let (word, bit) = (slot / SLOTS, 1 << (slot % SLOTS));
        if let Some(word) = self.bits.get(word)
            // Most slots are recorded already. Write only changes, so that the threads do not wait for each other.
            && word.load(Ordering::Relaxed) & bit == 0
        {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Returns the slots with a denial, in order.
    fn slots(&self) -> impl Iterator<Item = usize> {
        (0..self.bits.len() * SLOTS).filter(|slot| {
            self.bits[slot / SLOTS].load(Ordering::Relaxed) & (1 << (slot % SLOTS)) != 0
        })
    }

    /// Returns the fewest units that must have been allowed, given these denials.
    pub(crate) fn at_least(&self) -> u64 {
        match self.limit.kind {
            Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket => self.at_least_by_bucket(),
            Kind::SlidingWindowLog => self.at_least_by_log(),
            Kind::SlidingWindowCounter => self.at_least_by_counter(),
            Kind::FixedWindow => {
                let exhausted = self.bits.iter().filter(|bits| bits.load(Ordering::Relaxed) != 0);
                self.limit.limit * exhausted.count() as u64
            }
        }
    }

    /// The burst until the first denial; from one denial to the next, the units that are earned meanwhile, at most a
    /// burst.
    fn at_least_by_bucket(&self) -> u64 {
        let (slot, window) = (self.slot_ticks(), self.limit.window.0);
        let slots: Vec<usize> = self.slots().collect();
        if slots.is_empty() {
            return 0;
        }
        // The time in which units are earned. The time between two denials is known to within one slot. So is the time
        // between the first and the last denial of a series without a long gap.
        let (mut earning, mut series) = (0, 0);
        for pair in slots.windows(2) {
            let gap = (pair[1] - pair[0]) as u64 * slot;
            if gap + slot <= window {
                series += gap;
            } else {
                earning += u64::saturating_sub(series, slot) + window.min(gap - slot);
                series = 0;
            }
        }
        earning += series.saturating_sub(slot);
        let earned = u128::from(earning) * u128::from(self.limit.limit) / u128::from(window);
        self.limit.limit + u64::try_from(earned).unwrap_or(u64::MAX)
    }

    /// A denial proves that the window before it was full. So there are as many full windows as denials that are a
    /// window apart.
    fn at_least_by_log(&self) -> u64 {
        let mut full = 0;
        let mut next = 0;
        for slot in self.slots() {
            if slot >= next {
                full += 1;
                // The two denials may be at the end and at the start of their slots.
                next = slot + SLOTS + 1;
            }
        }
        self.limit.limit * full
    }

    /// In the first window of a key, a denial proves the whole limit. In a later window, it proves the part of the
    /// limit that has become available until then, if the window before was full.
    fn at_least_by_counter(&self) -> u64 {
        let words = self.bits.iter().map(|bits| bits.load(Ordering::Relaxed)).enumerate();
        let denied = words.filter(|(_, bits)| *bits != 0);
        denied
            .map(|(window, bits)| match (window, bits.ilog2()) {
                (0, _) => self.limit.limit,
                (_, last) => self.limit.limit * u64::from(last) / SLOTS as u64,
            })
            .sum()
    }
}
