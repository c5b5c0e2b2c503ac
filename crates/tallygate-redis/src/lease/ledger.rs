//! Defines how the store takes slices and accepts returns.
//!
//! The scripts are a port of this definition, compared with it step by step, and the simulated fleet uses it as its
//! store. Only tests use it. Times are microseconds by the clock of the store.

use tallygate::algorithm::{Algorithm as _, LimitRecord, Receipt, Returns};
use tallygate::{Cost, Policy, Tick, Ticks};

use super::slice::{Slice, end_of_lease, tracks_outstanding};
use crate::settlement::settle_receipt;

/// The outstanding leases of one key, by when they end.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutstandingLeases {
    /// In the order in which they end.
    ending: Vec<(Tick, Cost)>,
    /// The units that were returned to a window.
    returns: Returns,
}

/// In how many steps a life is counted. A lease may count as outstanding for up to one step longer.
const STEPS: u64 = 8;
/// How many different ends are tracked. That is more than there are steps: processes may lease for different times.
const MOST_ENDS: usize = 16;
/// Which fraction of the available units one slice may take, beyond the units that are needed now.
const SHARE: u64 = 4;

impl OutstandingLeases {
    /// Returns all outstanding units.
    pub(crate) fn total(&self) -> Cost {
        self.ending.iter().fold(0, |total: Cost, (_, amount)| total.saturating_add(*amount))
    }

    /// Drops leases that have ended.
    fn bring_to(&mut self, now: Tick) {
        self.ending.retain(|(ends, _)| *ends > now);
    }

    fn add(&mut self, ends: Tick, amount: Cost) {
        let place = self.ending.partition_point(|(other, _)| *other < ends);
        match self.ending.get_mut(place) {
            Some((other, out)) if *other == ends => *out += amount,
            _ => self.ending.insert(place, (ends, amount)),
        }
        // The first lease counts as ending with the next one: outstanding units are never underestimated.
        while self.ending.len() > MOST_ENDS {
            let (_, first) = self.ending.remove(0);
            self.ending[0].1 += first;
        }
    }

    /// Removes returned units. Returns how many of them were outstanding.
    fn remove(&mut self, ends: Tick, amount: Cost) -> Cost {
        let place = self.ending.partition_point(|(other, _)| *other < ends);
        let Some((_, out)) = self.ending.get_mut(place) else { return 0 };
        let known = amount.min(*out);
        *out -= known;
        if *out == 0 {
            self.ending.remove(place);
        }
        known
    }
}

/// Returns when a lease counts as ended: at the end of a step, never before its own end.
fn end_of_step(ends: Tick, life: Ticks) -> Tick {
    let step = (life.0 / STEPS).max(1);
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    Tick((ends.0.div_euclid(step) + 1).saturating_mul(step))
}

/// Charges a slice, and records it as outstanding. Takes all units that are needed now, if available; more only up to a
/// fraction of the available units. Returns how many units were taken.
pub(crate) fn take(
    policy: &Policy,
    state: &mut Box<[LimitRecord]>,
    out: &mut OutstandingLeases,
    now: Tick,
    slice: Slice,
    life: Ticks,
) -> Cost {
    let there = policy.facts(state, now, None).remaining;
    let taken = slice.want.min(there).min(slice.need.max(there / SHARE));
    if taken == 0 {
        return 0;
    }
    policy.charge(state, now, taken.into());
    if tracks_outstanding(policy) {
        out.bring_to(now);
        out.add(end_of_step(end_of_lease(now, life), life), taken);
    }
    taken
}

/// Returns the unused rest of a slice to the quota. Returns how many units can be used again.
pub(crate) fn return_units(
    policy: &Policy,
    state: &mut Box<[LimitRecord]>,
    out: &mut OutstandingLeases,
    now: Tick,
    (amount, taken): (Cost, Tick),
    life: Ticks,
) -> Cost {
    if !tracks_outstanding(policy) {
        let receipt = Receipt::of_window(taken);
        let (change, slice) = (-i128::from(amount), (&receipt, taken.0.saturating_sub(1)));
        let (_, lost) = settle_receipt(policy, (state, &mut out.returns), now, change, slice);
        return amount - Cost::try_from(lost).unwrap_or(amount);
    }
    let ends = end_of_lease(taken, life);
    if now > ends {
        return 0;
    }
    out.bring_to(now);
    let known = out.remove(end_of_step(ends, life), amount);
    if policy.clock_was_set_back(state, now) {
        return 0;
    }
    let used = policy.used(state, now).whole;
    let lifted = known.min(used.saturating_sub(out.total()));
    policy.charge(state, now, -i128::from(lifted));
    lifted
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFE: Ticks = Ticks(100);

    /// Returns a bucket of 20 that earns one unit per tick.
    fn bucket() -> Policy {
        Policy::token_bucket(20).per(Ticks(20)).build().expect("valid")
    }

    fn all(amount: Cost) -> Slice {
        Slice { need: amount, want: amount }
    }

    #[test]
    fn a_slice_covers_the_need_or_a_part_of_the_quota() {
        let policy = bucket();
        let (mut state, mut out) = (policy.initial(Tick(0)), OutstandingLeases::default());
        let mut take =
            |need, want| take(&policy, &mut state, &mut out, Tick(0), Slice { need, want }, LIFE);
        assert_eq!(take(1, 100), 5, "a quarter of 20");
        assert_eq!(take(1, 2), 2, "no more than is wanted");
        assert_eq!(take(12, 12), 12, "all that is needed");
        assert_eq!(take(3, 9), 1, "what is there");
        assert_eq!(take(3, 9), 0);
    }

    #[test]
    fn returned_units_never_raise_the_bucket_and_its_leases_above_the_burst() {
        let policy = bucket();
        let (mut state, mut out) = (policy.initial(Tick(0)), OutstandingLeases::default());
        let (mut now, mut held) = (Tick(0), Vec::new());
        let mut most = 0;
        for step in 0..50 {
            held.push((take(&policy, &mut state, &mut out, now, all(20), LIFE), now));
            if step > 2 {
                let lifted = return_units(&policy, &mut state, &mut out, now, held.remove(0), LIFE);
                let there = policy.facts(&state, now, None).remaining;
                assert!(lifted == 0 || there + out.total() <= 20, "{there} and {out:?}");
                most = most.max(there + out.total());
            }
            now = Tick(now.0 + 20);
        }
        // Units that are earned within the life of a lease are not returned, and add up by themselves.
        assert!(most <= 20 + 100, "{most}");
        assert_eq!(held.len(), 3);
        let last = held.pop().expect("there are three");
        now = Tick(last.1.0 + 1);
        for slice in held {
            return_units(&policy, &mut state, &mut out, now, slice, LIFE);
        }
        assert_eq!(return_units(&policy, &mut state, &mut out, now, last, LIFE), 19);
        assert_eq!((policy.facts(&state, now, None).remaining, out.total()), (20, 0));
    }

    #[test]
    fn returning_units_late_or_twice_has_no_effect() {
        let policy = bucket();
        let (mut state, mut out) = (policy.initial(Tick(0)), OutstandingLeases::default());
        let taken = take(&policy, &mut state, &mut out, Tick(0), all(20), LIFE);
        let mut back = |now, amount| {
            return_units(&policy, &mut state, &mut out, Tick(now), (amount, Tick(0)), LIFE)
        };
        assert_eq!(back(1, taken - 5), 14, "5 are out, and 1 was earned");
        assert_eq!(back(1, taken), 5, "only so many are out");
        assert_eq!(back(1, taken), 0);

        let slow = Policy::token_bucket(1).per(Ticks(1000)).burst(20).build().expect("valid");
        let (mut state, mut out) = (slow.initial(Tick(0)), OutstandingLeases::default());
        take(&slow, &mut state, &mut out, Tick(0), all(20), LIFE);
        let late = |now| {
            let (mut state, mut out) = (state.clone(), out.clone());
            return_units(&slow, &mut state, &mut out, Tick(now), (20, Tick(0)), LIFE)
        };
        assert_eq!((late(100), late(101)), (19, 0));
    }

    #[test]
    fn a_lease_is_forgotten_when_it_has_ended_and_never_before() {
        let policy = Policy::token_bucket(1).per(Ticks(1000)).burst(100).build().expect("valid");
        let (mut state, mut out) = (policy.initial(Tick(3)), OutstandingLeases::default());
        take(&policy, &mut state, &mut out, Tick(3), all(40), LIFE);
        for (now, expected) in [(103, 40), (103 + 100 / 8, 0)] {
            out.bring_to(Tick(now));
            assert_eq!(out.total(), expected, "at {now}");
        }
    }

    #[test]
    fn the_list_of_leases_is_bounded_for_any_lease_life() {
        let mut out = OutstandingLeases::default();
        for end in 0..1000 {
            out.add(Tick(end), 1);
        }
        assert_eq!((out.ending.len(), out.total()), (MOST_ENDS, 1000));
        assert_eq!(out.ending[0], (Tick(984), 985));
    }

    #[test]
    fn a_window_accepts_returns_of_its_own_units_only() {
        let policy = Policy::fixed_window(10).per(Ticks(50)).build().expect("valid");
        let (mut state, mut out) = (policy.initial(Tick(0)), OutstandingLeases::default());
        assert_eq!(take(&policy, &mut state, &mut out, Tick(40), all(10), LIFE), 10);
        let mut other = state.clone();
        assert_eq!(return_units(&policy, &mut state, &mut out, Tick(49), (4, Tick(40)), LIFE), 4);
        assert_eq!(take(&policy, &mut other, &mut out, Tick(50), all(10), LIFE), 10);
        assert_eq!(return_units(&policy, &mut other, &mut out, Tick(51), (4, Tick(40)), LIFE), 0);
        assert_eq!(out.total(), 0);
    }
}
