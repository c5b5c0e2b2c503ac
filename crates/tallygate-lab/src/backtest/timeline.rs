//! Counts requests and denials per time step, with a bounded number of steps.
//!
//! A step is a second at first. When more than 400 steps have requests, the steps are merged into longer ones. Steps
//! without requests are not stored, so a line with an unusual time costs only one step.

use std::collections::BTreeMap;

use tallygate_core::{Tick, Ticks};

use super::timestamp::NANOS_PER_SECOND;

const MAX_POINTS: usize = 400;

/// The lengths of a step. Each is a multiple of the one before, so that steps can be merged.
const STEPS_S: [i64; 13] =
    [1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400, 604_800, 6_048_000, 60_480_000, 604_800_000];

/// The counts over time: per step the number of requests, then the denials of each policy.
#[derive(Debug)]
pub(super) struct Timeline {
    policies: usize,
    step: usize,
    points: BTreeMap<i64, Box<[u64]>>,
    /// The current step, which is not yet in `points`.
    current: i64,
    current_start: i64,
    counts: Box<[u64]>,
}

impl Timeline {
    pub(super) fn new(policies: usize) -> Self {
        let counts = vec![0; policies + 1].into();
        let (current, current_start) = (0, 0);
        Self { policies, step: 0, points: BTreeMap::new(), current, current_start, counts }
    }

    fn width(&self) -> i64 {
        STEPS_S[self.step] * NANOS_PER_SECOND
    }

    /// Counts a request and the policies that denied it.
    #[inline]
    pub(super) fn add(&mut self, now: Tick, denied_by: impl Iterator<Item = bool>) {
        let into = now.0.checked_sub(self.current_start);
        if into.is_none_or(|into| into < 0 || into >= self.width()) {
            self.start_step(now);
        }
        self.counts[0] += 1;
        for (count, denied) in self.counts[1..].iter_mut().zip(denied_by) {
            *count += u64::from(denied);
        }
    }

    fn start_step(&mut self, now: Tick) {
        self.store_current();
        while self.points.len() >= MAX_POINTS && self.step + 1 < STEPS_S.len() {
            let finer = self.width();
            self.step += 1;
            let times = self.width() / finer;
            for (index, counts) in std::mem::take(&mut self.points) {
                merge(&mut self.points, index.div_euclid(times), &counts);
            }
        }
        self.current = now.0.div_euclid(self.width());
        self.current_start = self.current.saturating_mul(self.width());
    }

    fn store_current(&mut self) {
        if self.counts[0] > 0 {
            let counts = std::mem::replace(&mut self.counts, vec![0; self.policies + 1].into());
            merge(&mut self.points, self.current, &counts);
        }
    }

    /// Returns the length of a step.
    pub(super) fn step(&self) -> Ticks {
        Ticks(self.width().unsigned_abs())
    }

    /// Returns the steps with requests: the start and the counts of each.
    pub(super) fn points(mut self) -> Vec<(Tick, Box<[u64]>)> {
        self.store_current();
        let width = self.width();
        let start = |index: i64| Tick(index.saturating_mul(width));
        self.points.into_iter().map(|(index, counts)| (start(index), counts)).collect()
    }
}

fn merge(points: &mut BTreeMap<i64, Box<[u64]>>, index: i64, counts: &[u64]) {
    let into = points.entry(index).or_insert_with(|| vec![0; counts.len()].into());
    into.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_steps_is_bounded_and_no_count_is_lost() {
        let mut timeline = Timeline::new(1);
        for second in (0..100_000_i64).rev() {
            timeline.add(Tick(second * NANOS_PER_SECOND), [second % 10 == 0].into_iter());
        }
        assert_eq!(timeline.step(), Ticks(300 * 1_000_000_000));
        let points = timeline.points();
        assert!(points.len() <= MAX_POINTS);
        let sum = |place: usize| points.iter().map(|(_, counts)| counts[place]).sum::<u64>();
        assert_eq!((sum(0), sum(1)), (100_000, 10_000));
        assert_eq!(points[1].0, Tick(300 * NANOS_PER_SECOND));
        assert_eq!(*points[1].1, [300, 30]);
    }

    #[test]
    fn an_unusual_time_costs_one_step() {
        let mut timeline = Timeline::new(0);
        for now in [0, i64::MAX, 1, i64::MIN, 2] {
            timeline.add(Tick(now), std::iter::empty());
        }
        assert_eq!(timeline.step(), Ticks(1_000_000_000));
        let counts: Vec<u64> = timeline.points().iter().map(|(_, counts)| counts[0]).collect();
        assert_eq!(counts, [1, 3, 1]);
    }
}
