//! What the store does when a slice is taken and when it is given back.
//!
//! This is the definition: the scripts are a port of it, compared with it step by step, and the simulated fleet pays
//! here. Only tests use it. Times are microseconds by the store's clock.

use tallygate::{Algorithm as _, Cost, Policy, Receipt, Standing, Tick, Ticks};

use super::slice::{Slice, end_of_lease, notes_what_is_out};

/// What is out on lease of one key, by when it ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Out {
    /// The first to end first.
    ending: Vec<(Tick, Cost)>,
}

/// In how many steps a life is counted. What is out counts as out for up to one of them longer.
const STEPS: u64 = 8;
/// How many ends are told apart. More than there are steps: processes may lease for different times.
const MOST_ENDS: usize = 16;
/// Which part of what is there one slice may be, unless more is needed now: others come, too.
const SHARE: u64 = 4;

impl Out {
    /// All that is out.
    pub(crate) fn total(&self) -> Cost {
        self.ending.iter().fold(0, |total: Cost, (_, amount)| total.saturating_add(*amount))
    }

    /// Forgets what has ended.
    fn bring_to(&mut self, now: Tick) {
        self.ending.retain(|(ends, _)| *ends > now);
    }

    fn add(&mut self, ends: Tick, amount: Cost) {
        let place = self.ending.partition_point(|(other, _)| *other < ends);
        match self.ending.get_mut(place) {
            Some((other, out)) if *other == ends => *out += amount,
            _ => self.ending.insert(place, (ends, amount)),
        }
        // The first to end counts as ending with the next: what is out is never taken for less.
        while self.ending.len() > MOST_ENDS {
            let (_, first) = self.ending.remove(0);
            self.ending[0].1 += first;
        }
    }

    /// Takes away what is given back; how much of it was known to be out.
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

/// When a lease counts as ended that ends at a time: at the end of a step, never before.
fn end_of_step(ends: Tick, life: Ticks) -> Tick {
    let step = (life.0 / STEPS).max(1);
    let step = i64::try_from(step).unwrap_or(i64::MAX);
    Tick((ends.0.div_euclid(step) + 1).saturating_mul(step))
}

/// Charges a slice, and notes that it is out: all that is needed now if that is there, else what is there; more only
/// up to a part of what is there. How much was taken.
pub(crate) fn take(
    policy: &Policy,
    state: &mut Box<[Standing]>,
    out: &mut Out,
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
    if notes_what_is_out(policy) {
        out.bring_to(now);
        out.add(end_of_step(end_of_lease(now, life), life), taken);
    }
    taken
}

/// Gives back what is left of a slice. How much of it can be used again.
pub(crate) fn give_back(
    policy: &Policy,
    state: &mut Box<[Standing]>,
    out: &mut Out,
    now: Tick,
    (amount, taken): (Cost, Tick),
    life: Ticks,
) -> Cost {
    if !notes_what_is_out(policy) {
        let receipt = Receipt::of_window(taken);
        let lost = policy.settle(state, now, -i128::from(amount), &receipt);
        return amount - Cost::try_from(lost).unwrap_or(amount);
    }
    let ends = end_of_lease(taken, life);
    if now > ends {
        return 0;
    }
    out.bring_to(now);
    let known = out.remove(end_of_step(ends, life), amount);
    if policy.set_back(state, now) {
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

    /// Earns one a tick, 20 at most.
    fn bucket() -> Policy {
        Policy::token_bucket(20).per(Ticks(20)).build().expect("valid")
    }

    fn all(amount: Cost) -> Slice {
        Slice { need: amount, want: amount }
    }

    #[test]
    fn a_slice_is_what_is_needed_and_else_a_part_of_what_is_there() {
        let policy = bucket();
        let (mut state, mut out) = (policy.first(Tick(0)), Out::default());
        let mut take =
            |need, want| take(&policy, &mut state, &mut out, Tick(0), Slice { need, want }, LIFE);
        assert_eq!(take(1, 100), 5, "a quarter of 20");
        assert_eq!(take(1, 2), 2, "no more than is wanted");
        assert_eq!(take(12, 12), 12, "all that is needed");
        assert_eq!(take(3, 9), 1, "what is there");
        assert_eq!(take(3, 9), 0);
    }

    #[test]
    fn give_backs_never_lift_the_bucket_and_what_is_out_above_the_burst() {
        let policy = bucket();
        let (mut state, mut out) = (policy.first(Tick(0)), Out::default());
        let (mut now, mut held) = (Tick(0), Vec::new());
        let mut most = 0;
        for step in 0..50 {
            held.push((take(&policy, &mut state, &mut out, now, all(20), LIFE), now));
            if step > 2 {
                let lifted = give_back(&policy, &mut state, &mut out, now, held.remove(0), LIFE);
                let there = policy.facts(&state, now, None).remaining;
                assert!(lifted == 0 || there + out.total() <= 20, "{there} and {out:?}");
                most = most.max(there + out.total());
            }
            now = Tick(now.0 + 20);
        }
        // What is earned within a lease's life is not given back, and adds up by itself.
        assert!(most <= 20 + 100, "{most}");
        assert_eq!(held.len(), 3);
        let last = held.pop().expect("there are three");
        now = Tick(last.1.0 + 1);
        for slice in held {
            give_back(&policy, &mut state, &mut out, now, slice, LIFE);
        }
        assert_eq!(give_back(&policy, &mut state, &mut out, now, last, LIFE), 19);
        assert_eq!((policy.facts(&state, now, None).remaining, out.total()), (20, 0));
    }

    #[test]
    fn what_is_given_back_late_or_twice_lifts_nothing() {
        let policy = bucket();
        let (mut state, mut out) = (policy.first(Tick(0)), Out::default());
        let taken = take(&policy, &mut state, &mut out, Tick(0), all(20), LIFE);
        let mut back = |now, amount| {
            give_back(&policy, &mut state, &mut out, Tick(now), (amount, Tick(0)), LIFE)
        };
        assert_eq!(back(1, taken - 5), 14, "5 are out, and 1 was earned");
        assert_eq!(back(1, taken), 5, "only so many are out");
        assert_eq!(back(1, taken), 0);

        let slow = Policy::token_bucket(1).per(Ticks(1000)).burst(20).build().expect("valid");
        let (mut state, mut out) = (slow.first(Tick(0)), Out::default());
        take(&slow, &mut state, &mut out, Tick(0), all(20), LIFE);
        let late = |now| {
            let (mut state, mut out) = (state.clone(), out.clone());
            give_back(&slow, &mut state, &mut out, Tick(now), (20, Tick(0)), LIFE)
        };
        assert_eq!((late(100), late(101)), (19, 0));
    }

    #[test]
    fn what_is_out_is_forgotten_when_it_has_ended_and_never_before() {
        let policy = Policy::token_bucket(1).per(Ticks(1000)).burst(100).build().expect("valid");
        let (mut state, mut out) = (policy.first(Tick(3)), Out::default());
        take(&policy, &mut state, &mut out, Tick(3), all(40), LIFE);
        for (now, expected) in [(103, 40), (103 + 100 / 8, 0)] {
            out.bring_to(Tick(now));
            assert_eq!(out.total(), expected, "at {now}");
        }
    }

    #[test]
    fn what_is_out_takes_bounded_room_whatever_the_lives_are() {
        let mut out = Out::default();
        for end in 0..1000 {
            out.add(Tick(end), 1);
        }
        assert_eq!((out.ending.len(), out.total()), (MOST_ENDS, 1000));
        assert_eq!(out.ending[0], (Tick(984), 985));
    }

    #[test]
    fn a_window_takes_back_only_what_was_taken_in_it() {
        let policy = Policy::fixed_window(10).per(Ticks(50)).build().expect("valid");
        let (mut state, mut out) = (policy.first(Tick(0)), Out::default());
        assert_eq!(take(&policy, &mut state, &mut out, Tick(40), all(10), LIFE), 10);
        let mut other = state.clone();
        assert_eq!(give_back(&policy, &mut state, &mut out, Tick(49), (4, Tick(40)), LIFE), 4);
        assert_eq!(take(&policy, &mut other, &mut out, Tick(50), all(10), LIFE), 10);
        assert_eq!(give_back(&policy, &mut other, &mut out, Tick(51), (4, Tick(40)), LIFE), 0);
        assert_eq!(out, Out::default());
    }
}
