//! Checks histories: whether a quota allows all the requests that were allowed.
//!
//! In every interval, a bucket allows at most its burst and the units that it earns. A request was decided at some time
//! between its call and its reply, so an interval is compared only with requests that lie in it completely. An excess
//! that is found is an excess whenever each of them was decided.

use std::time::Duration;

/// The quota of a bucket.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quota {
    pub(crate) burst: u64,
    pub(crate) limit: u64,
    pub(crate) window: Duration,
}

/// An allowed request. Its times are counted from the start of the load.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    pub(crate) call: Duration,
    pub(crate) reply: Duration,
    pub(crate) cost: u64,
}

/// The time of a fault, which excuses one more burst in every interval that touches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Excuse {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    /// Whether there is a second bucket meanwhile: the units that it earns are excused as well.
    pub(crate) refills: bool,
}

/// Servers truncate the time to microseconds: two times may differ by one more than the real times.
const CLOCK_STEP: Duration = Duration::from_micros(1);

impl Quota {
    /// Returns by how many units the worst of all intervals exceeds its bound.
    pub(crate) fn over(&self, admissions: &[Admission], excuses: &[Excuse]) -> u64 {
        let mut by_reply = admissions.to_vec();
        by_reply.sort_by_key(|admission| admission.reply);
        let mut worst = 0;
        for Admission { call: from, .. } in &by_reply {
            let mut allowed = 0;
            for Admission { call, reply: to, cost } in &by_reply {
                if call < from {
                    continue;
                }
                allowed += cost;
                let bound = self.burst + self.inflow(*to + CLOCK_STEP - *from);
                // Excuses are counted only where one is needed: there are millions of intervals.
                if allowed > bound + worst {
                    let excused = self.excused(*from, *to, excuses);
                    worst = worst.max(allowed.saturating_sub(bound + excused));
                }
            }
        }
        worst
    }

    fn excused(&self, from: Duration, to: Duration, excuses: &[Excuse]) -> u64 {
        let touching = excuses.iter().filter(|excuse| excuse.from <= to && excuse.to >= from);
        let each = touching.map(|excuse| {
            let both = excuse.to.min(to).saturating_sub(excuse.from.max(from));
            self.burst + if excuse.refills { self.inflow(both + CLOCK_STEP) } else { 0 }
        });
        each.sum()
    }

    /// Returns the units that are earned in a time, rounded down.
    fn inflow(&self, time: Duration) -> u64 {
        let inflow = time.as_nanos() * u128::from(self.limit) / self.window.as_nanos();
        u64::try_from(inflow).expect("a load of seconds")
    }
}

/// Returns the longest time between two of these times, or between the last one and the end.
pub(crate) fn longest_gap(times: &[Duration], end: Duration) -> Duration {
    let mut times = times.to_vec();
    times.sort();
    let nexts = times.iter().skip(1).copied().chain([end]);
    let gaps = times.iter().zip(nexts).map(|(time, next)| next.saturating_sub(*time));
    gaps.max().unwrap_or(end)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three at once, and one per 10 ms.
    const QUOTA: Quota = Quota { burst: 3, limit: 1, window: ms(10) };

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Returns requests that were decided at once.
    fn at(times: &[(u64, u64)]) -> Vec<Admission> {
        let each = times.iter();
        each.map(|&(at, cost)| Admission { call: ms(at), reply: ms(at), cost }).collect()
    }

    fn loss(from: u64, to: u64) -> Excuse {
        Excuse { from: ms(from), to: ms(to), refills: false }
    }

    #[test]
    fn a_history_within_the_bound_is_accepted() {
        assert_eq!(QUOTA.over(&at(&[(5, 3), (15, 1), (25, 1), (95, 3), (105, 1)]), &[]), 0);
        assert_eq!(QUOTA.over(&[], &[]), 0);
    }

    #[test]
    fn one_unit_too_many_is_found_in_any_interval() {
        assert_eq!(QUOTA.over(&at(&[(5, 4)]), &[]), 1);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (14, 1)]), &[]), 1);
        // The whole history is within the bound, but its last part is not.
        assert_eq!(QUOTA.over(&at(&[(0, 1), (500, 2), (509, 2)]), &[]), 1);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (14, 2), (200, 5)]), &[]), 2);
    }

    #[test]
    fn an_allowed_request_counts_only_in_intervals_that_contain_it() {
        let late = Admission { call: ms(5), reply: ms(15), cost: 1 };
        assert_eq!(QUOTA.over(&[at(&[(5, 3)]), vec![late]].concat(), &[]), 0);
        let soon = Admission { call: ms(5), reply: ms(14), cost: 1 };
        assert_eq!(QUOTA.over(&[at(&[(5, 3)]), vec![soon]].concat(), &[]), 1);
    }

    #[test]
    fn a_loss_excuses_one_burst_where_it_happened_and_nowhere_else() {
        let twice = at(&[(5, 3), (6, 3)]);
        assert_eq!(QUOTA.over(&twice, &[loss(5, 6)]), 0);
        assert_eq!(QUOTA.over(&twice, &[loss(7, 8)]), 3);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (6, 4)]), &[loss(5, 6)]), 1);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (6, 3), (7, 3)]), &[loss(5, 6)]), 3);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (6, 3), (7, 3)]), &[loss(5, 6), loss(6, 7)]), 0);
    }

    #[test]
    fn a_second_bucket_excuses_its_burst_and_its_inflow_while_it_is_there() {
        let split = Excuse { refills: true, ..loss(0, 100) };
        // Two buckets: three units each, and one more each after 10 ms and after 20 ms.
        let both = at(&[(0, 6), (10, 2), (20, 2)]);
        assert_eq!(QUOTA.over(&both, &[split]), 0);
        assert_eq!(QUOTA.over(&both, &[loss(0, 100)]), 2);
        assert_eq!(QUOTA.over(&at(&[(0, 6), (10, 2), (20, 3)]), &[split]), 1);
        assert_eq!(QUOTA.over(&at(&[(0, 6), (200, 4)]), &[split]), 1);
    }

    #[test]
    fn the_longest_gap_may_be_the_last() {
        let times = [ms(10), ms(40), ms(20)];
        assert_eq!(longest_gap(&times, ms(45)), ms(20));
        assert_eq!(longest_gap(&times, ms(99)), ms(59));
        assert_eq!(longest_gap(&[], ms(99)), ms(99));
    }
}
