//! Leases: a process takes a slice of a hot key's quota in one call, and serves from it without asking.
//!
//! | question | file |
//! |---|---|
//! | What does the store do when a slice is taken or given back? | `lease/ledger.rs`, and its port `scripts/lease_*.lua` |
//! | How are they called? | `lease/calls.rs` |
//! | What does a process do with a key? | `desk.rs` |
//! | Does the bound hold in a fleet where everything fails? | `lease/fleet_tests.rs` |
//!
//! Both sides are pure: what happened and `now` go in, what is to be sent comes out.
//!
//! # What holds
//!
//! *Every admission was paid for in the store before*, so the store's own count is never exceeded, and whatever
//! fails, fails towards less: a reply that is lost, a process that crashes and a give-back that does not arrive
//! leave something charged that nobody serves.
//!
//! For a bucket of burst B that earns L in W, and leases that live for `life`, whatever is admitted in a closed
//! stretch of time, plainly or from leases, is
//!
//! > A\[s, t\] ≤ B + floor((t − s + life) · L / W).
//!
//! A fixed window admits at most L in each window, as without leases.
//!
//! # Why
//!
//! *A lease is short by every clock.* A process counts the life from when it **sent** the call, by its own monotonic
//! clock, and a thousandth less, for clocks that run unequally. The store counts it from when it **executed** the
//! call, at e, which is later. So what is admitted at a was paid for at some e with e ≤ a ≤ e + life, and no clock is
//! ever compared with another.
//!
//! *Without give-backs* that is all: what is admitted in \[s, t\] was charged in \[s − life, t\], and the bucket charges
//! at most B + (t − s + life) · L / W in that.
//!
//! *A give-back* puts back tokens that were charged at e and not served. The store takes it only while it knows the
//! lease (until e + life, by its own clock, and only as much as is out), and lifts the tokens T by no more than keeps
//! T + O ≤ B, where O is all that is then still out. Without that rule, give-backs add up: a bucket earns back what is
//! out on lease, which is then given back on top.
//!
//! Now let s′ = s − life. Give-backs in (s′, t\] are of leases that were taken since s′ (*new*), or before (*old*).
//! A new one takes from what could be admitted at least what it puts back into the bucket: it changes nothing. An old
//! one was taken before s′, so by e + life it is over before s. If none of the old ones lifted anything, then
//! A\[s, t\] ≤ T(s′) + (t − s′) · L / W ≤ B + (t − s′) · L / W. If some did, let b be the time of the last that did:
//! s′ < b < s. After it T(b) + O(b) ≤ B. What is admitted from s on was out at b, or is charged after b: at most
//! O(b) + T(b) + (t − b) · L / W ≤ B + (t − s′) · L / W. Both are the bound; and A is a whole number. ∎
//!
//! Refunds and resets are the caller's own verbs and know nothing of leases: A is net of the refunds in \[s − life, t\],
//! and a reset is worth a burst, as without leases.
//!
//! *A failover* that loses the last writes loses charges, and what is known of leases with them. What was charged before
//! it admits at most what the old bucket allows, what is charged after it what the new one does: one burst more, as
//! without leases. A give-back of a lease that the new primary does not know lifts nothing; where it is taken for
//! another one of the same time, it gives back what the old bucket has charged and nobody has served.
//!
//! *A fixed window* gives nothing back by itself: T + O never grows within a window, a lease ends with its window, and a
//! give-back counts only in the window in which it was taken. So nothing has to be known of leases.
//!
//! *A leaky bucket* tells each request its turn: the i-th of a lease has the turn that the bucket had for it when the
//! lease was taken. Departures are then at most 1 + floor((t − s + 1 + life) · L / W) in \[s, t\]. A give-back would
//! hand out turns twice, so of a leaky bucket nothing is given back: what is left over is lost.
//!
//! # What is kept in Redis
//!
//! What is out on lease is a second key in the same slot, not a part of the value: programs that know nothing of leases
//! take a value of another length for corrupt, and must go on deciding beside those who do. For them the bucket is what
//! it always was. It is at most 16 numbers of what ends when, and it expires with the last of them.

pub(crate) mod calls;
#[cfg(test)]
mod fleet_tests;
#[cfg(test)]
pub(crate) mod ledger;
pub(crate) mod slice;

use std::ops::RangeInclusive;
use std::time::Duration;

use tallygate::{Kind, Limit, Policy, Ticks};

/// How leases are taken.
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
    /// The shortest and the longest life: shorter ones end before they arrive, longer ones are no bound to speak of.
    pub const LIVES: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(60);

    /// How long a lease lives, 100 ms by default; from 1 ms to a minute. The bound on what is admitted widens
    /// by what is earned in that time. Leases of a fixed window live for a tenth of the window at most: longer ones
    /// would hold units that other processes need before the window ends.
    #[must_use]
    pub fn life(mut self, life: Duration) -> Self {
        self.life = life.clamp(*Self::LIVES.start(), *Self::LIVES.end());
        self
    }

    /// Whether slices of a policy can be leased: one bucket or one fixed window, without options.
    #[must_use]
    pub fn serve(policy: &Policy) -> bool {
        policy.plain().is_some_and(|limit| {
            let kind = limit.numbers().kind;
            kind.is_bucket() || kind == Kind::FixedWindow
        })
    }

    /// The same for a policy, in microseconds: a lease of a fixed window holds units that others cannot use until it
    /// ends, so it lives for a tenth of the window at most. `None` if that is less than the shortest life.
    pub(crate) fn shortened_for(self, policy: &Policy) -> Option<Self> {
        let window = policy.plain().map(Limit::numbers);
        let Some(numbers) = window.filter(|numbers| numbers.kind == Kind::FixedWindow) else {
            return Some(self);
        };
        let longest = Duration::from_micros(numbers.window.0 / PARTS_OF_A_WINDOW);
        (longest >= *Self::LIVES.start()).then(|| Self { life: self.life.min(longest) })
    }

    /// How long a lease lives.
    pub(crate) const fn lives_for(self) -> Duration {
        self.life
    }

    /// The life in microseconds, as the store counts it.
    pub(crate) fn in_store(self) -> Ticks {
        Ticks(u64::try_from(self.life.as_micros()).unwrap_or(u64::MAX))
    }

    /// The life in nanoseconds, as a process counts it.
    pub(crate) fn in_process(self) -> Ticks {
        by_any_clock(Ticks::from_duration(self.life))
    }
}

/// How many leases fit into a fixed window, one after the other.
const PARTS_OF_A_WINDOW: u64 = 10;

/// A span that is over when this much has passed by any other clock: a thousandth less.
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
            // What passes by other clocks while this much passes by one that is a thousandth slow.
            let passes = u128::from(leases.in_process().0) * 1000 / 999;
            assert!(passes <= life.as_nanos(), "{life:?}");
            assert_eq!(u128::from(leases.in_store().0), life.as_micros());
        }
    }
}
