//! Leases: a process takes a slice of a hot key's quota in one call, and serves from it without further calls.
//!
//! | question | file |
//! |---|---|
//! | How does the store take slices and accept returns? | `lease/ledger.rs`, and its port `scripts/lease_*.lua` |
//! | When does a process take a slice of a key? | `key_broker.rs` |
//! | Does the bound hold in a fleet where everything fails? | `lease/fleet_tests.rs` |
//!
//! Both sides are pure: events and `now` go in, decisions and calls come out.
//!
//! # The bound
//!
//! *Every allowed unit was charged in the store before*, so the store's own count is never exceeded. Every failure
//! allows less: after a lost reply, a crash, or a return that does not arrive, charged units stay unused.
//!
//! Let a bucket have burst B and earn L per W, and let leases live for `life`. All units that are allowed in a closed
//! interval, with or without leases, are
//!
//! > A\[s, t\] ≤ B + floor((t − s + life) · L / W).
//!
//! A fixed window allows at most L in each window, as without leases.
//!
//! # The proof
//!
//! *A lease is short by every clock.* A process counts the life from when it **sent** the call, by its own monotonic
//! clock, and subtracts a thousandth, because clocks have different rates. The store counts it from when it **executed**
//! the call, at e, which is later. So a unit that is allowed at a was charged at some e with e ≤ a ≤ e + life, and no
//! clock is ever compared with another.
//!
//! *Without returns*, that is all: the units that are allowed in \[s, t\] were charged in \[s − life, t\], and the bucket
//! charges at most B + (t − s + life) · L / W in that interval.
//!
//! *A return* puts back tokens that were charged at e and not served. The store accepts it only while the lease is
//! outstanding (until e + life, by its own clock, and only up to the outstanding units). It raises the tokens T only as
//! far as T + O ≤ B, where O is the sum of the units that are still outstanding. Without that rule, returns add up: a
//! bucket earns the leased units back, and then they are returned in addition.
//!
//! Now let s′ = s − life. Returns in (s′, t\] belong to leases that were taken since s′ (*new*), or before (*old*). A new
//! return takes at least as much from the units that could be allowed as it puts back into the bucket: it changes nothing.
//! An old lease was taken before s′, so it ends before s, at e + life. If no old return raised the tokens, then
//! A\[s, t\] ≤ T(s′) + (t − s′) · L / W ≤ B + (t − s′) · L / W. Otherwise, let b be the time of the last one that did:
//! s′ < b < s. After it, T(b) + O(b) ≤ B. Every unit that is allowed from s on was outstanding at b, or is charged after
//! b: at most O(b) + T(b) + (t − b) · L / W ≤ B + (t − s′) · L / W. Both are the bound, and A is a whole number. ∎
//!
//! Refunds and resets are operations of the caller and independent of leases: A is net of the refunds in \[s − life, t\],
//! and a reset is worth a burst, as without leases.
//!
//! *A failover* that loses the last writes loses charges together with the leases. The charges before it are bounded by
//! the old bucket, and those after it by the new one: one burst more, as without leases. A return of a lease that the new
//! primary does not have has no effect. If it is mistaken for another lease of the same time, it returns units that the
//! old bucket charged and no process served.
//!
//! *A fixed window* earns nothing back: T + O never grows within a window, a lease ends with its window, and a return
//! counts only in the window of its lease. So outstanding leases are not recorded.
//!
//! *A leaky bucket* gives each request a departure time: the i-th request of a lease departs when the bucket would have
//! let it depart when the lease was taken. There are at most 1 + floor((t − s + 1 + life) · L / W) departures in \[s, t\].
//! A return would assign departure times twice, so a leaky bucket accepts no returns: unused units are lost.
//!
//! # In Redis
//!
//! The outstanding leases are a second key in the same slot, and not a part of the value: processes without leases would
//! treat a longer value as corrupt, and have to decide on the same key. For them, the bucket is the same as without
//! leases. The key has at most 16 pairs of an end and a number of units, and expires with the last of them.

#[cfg(test)]
mod fleet_tests;
#[cfg(test)]
pub(crate) mod ledger;
pub(crate) mod slice;

use std::ops::RangeInclusive;
use std::time::Duration;

use tallygate::{Kind, Limit, Policy, Ticks};

/// The settings of leases.
///
/// ```
/// use std::time::Duration;
/// use tallygate_redis::Leases;
///
/// let leases = Leases::default().life(Duration::from_millis(50));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leases {
    pub(crate) life: Duration,
}

impl Default for Leases {
    fn default() -> Self {
        Self { life: Duration::from_millis(100) }
    }
}

impl Leases {
    /// The shortest and the longest life. A shorter lease would end before its reply arrives, and a longer one would hardly
    /// bound anything.
    pub const LIVES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);

    /// Sets the life of a lease: 100 ms by default, from 1 ms to one minute. The bound grows by the units that are earned in
    /// that time. Leases of a fixed window live for a tenth of the window at most: longer ones would hold units that other
    /// processes need before the window ends.
    #[must_use]
    pub fn life(mut self, life: Duration) -> Self {
        self.life = life.clamp(*Self::LIVES.start(), *Self::LIVES.end());
        self
    }

    /// Returns whether slices of a policy can be leased: one bucket or one fixed window, without options.
    #[must_use]
    pub fn serve(policy: &Policy) -> bool {
        policy.plain().is_some_and(|limit| {
            let kind = limit.numbers().kind;
            kind.is_bucket() || kind == Kind::FixedWindow
        })
    }

    /// Returns the leases of a policy, whose times are in microseconds. Other processes cannot use leased units before the
    /// lease ends, so a lease of a fixed window lives for a tenth of the window at most. Returns `None` if that is less
    /// than the shortest life.
    pub(crate) fn shortened_for(self, policy: &Policy) -> Option<Self> {
        let window = policy.plain().map(Limit::numbers);
        let Some(numbers) = window.filter(|numbers| numbers.kind == Kind::FixedWindow) else {
            return Some(self);
        };
        let longest = Duration::from_micros(numbers.window.0 / PARTS_OF_A_WINDOW);
        (longest >= *Self::LIVES.start()).then(|| Self { life: self.life.min(longest) })
    }

    /// Returns the life of a lease.
    pub(crate) const fn lives_for(self) -> Duration {
        self.life
    }

    /// Returns the life in microseconds, as the store counts it.
    pub(crate) fn in_store(self) -> Ticks {
        Ticks(u64::try_from(self.life.as_micros()).unwrap_or(u64::MAX))
    }

    /// Returns the life in nanoseconds, as a process counts it.
    pub(crate) fn in_process(self) -> Ticks {
        by_any_clock(Ticks::from_duration(self.life))
    }
}

/// How many leases fit into a fixed window, one after the other.
const PARTS_OF_A_WINDOW: u64 = 10;

/// Returns a time that ends by this clock before `span` ends by any other clock: a thousandth less.
pub(crate) const fn by_any_clock(span: Ticks) -> Ticks {
    Ticks(span.0 - span.0.div_ceil(1000))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_that_is_a_thousandth_slow_ends_a_lease_in_time() {
        for life in [1_000, 1_500, 100_000, 60_000_000].map(Duration::from_micros) {
            let leases = Leases::default().life(life);
            // The time by other clocks, while this clock is a thousandth slow.
            let passes = u128::from(leases.in_process().0) * 1000 / 999;
            assert!(passes <= life.as_nanos(), "{life:?}");
            assert_eq!(u128::from(leases.in_store().0), life.as_micros());
        }
    }
}
