//! When it happened: requests and refusals in steps of time, of which there are never too many.
//!
//! Steps start at a second. Whenever more than 400 have something in them they are made coarser. Steps in which
//! nothing happened are not kept, so one line with a strange time costs one step.

use std::collections::BTreeMap;

use tallygate_core::{Tick, Ticks};

use super::moment::NANOS_PER_SECOND;

const MAX_POINTS: usize = 400;

/// Each is a multiple of the one before it, so that steps can be put together.
const STEPS_S: [i64; 13] =
    [1, 5, 15, 60, 300, 900, 3_600, 21_600, 86_400, 604_800, 6_048_000, 60_480_000, 604_800_000];

/// Counts over time: for each step the requests, then the refusals of each policy.
#[derive(Debug)]
pub(super) struct Timeline {
    policies: usize,
    step: usize,
    points: BTreeMap<i64, Box<[u64]>>,
    /// The point that is being counted, which is not among the others.
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

    /// Counts a request, and by which policies it was refused.
    #[inline]
    pub(super) fn add(&mut self, now: Tick, refused_by: impl Iterator<Item = bool>) {
        let into = now.0.checked_sub(self.current_start);
        if into.is_none_or(|into| into < 0 || into >= self.width()) {
            self.turn_to(now);
        }
        self.counts[0] += 1;
        for (count, refused) in self.counts[1..].iter_mut().zip(refused_by) {
            *count += u64::from(refused);
        }
    }

    fn turn_to(&mut self, now: Tick) {
        self.put_away();
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

    fn put_away(&mut self) {
        if self.counts[0] > 0 {
            let counts = std::mem::replace(&mut self.counts, vec![0; self.policies + 1].into());
            merge(&mut self.points, self.current, &counts);
        }
    }

    /// How long a step is.
    pub(super) fn step(&self) -> Ticks {
        Ticks(self.width().unsigned_abs())
    }

    /// The steps in which something happened: when they start, and their counts.
    pub(super) fn points(mut self) -> Vec<(Tick, Box<[u64]>)> {
        self.put_away();
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
    fn there_are_never_too_many_steps_and_none_of_the_counts_is_lost() {
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
    fn a_strange_time_costs_one_step() {
        let mut timeline = Timeline::new(0);
        for now in [0, i64::MAX, 1, i64::MIN, 2] {
            timeline.add(Tick(now), std::iter::empty());
        }
        assert_eq!(timeline.step(), Ticks(1_000_000_000));
        let counts: Vec<u64> = timeline.points().iter().map(|(_, counts)| counts[0]).collect();
        assert_eq!(counts, [1, 3, 1]);
    }
}
