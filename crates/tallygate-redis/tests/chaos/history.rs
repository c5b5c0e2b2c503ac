//! The observer of histories: whether what was admitted is what a quota allows.
//!
//! A bucket admits at most its burst and what flows in, in every stretch of time. An admission happened
//! somewhere between its call and its reply, so a stretch is held against those alone that lie in it whole:
//! whatever is found too much is too much, whenever each of them was decided.

use std::time::Duration;

/// What a bucket may admit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quota {
    pub(crate) burst: u64,
    pub(crate) limit: u64,
    pub(crate) window: Duration,
}

/// Something that was admitted. Times are those since the load began.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Admission {
    pub(crate) call: Duration,
    pub(crate) reply: Duration,
    pub(crate) cost: u64,
}

/// A time at which a fault excuses that more was admitted: one more burst, in every stretch that touches it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Excuse {
    pub(crate) from: Duration,
    pub(crate) to: Duration,
    /// Whether a second bucket is filled meanwhile: what flows into that is excused as well.
    pub(crate) refills: bool,
}

/// Servers tell the time in microseconds, cut off: two times may be one further apart than they were.
const CLOCK_STEP: Duration = Duration::from_micros(1);

impl Quota {
    /// By how much the worst stretch of all exceeds what it may have.
    pub(crate) fn over(&self, admissions: &[Admission], excuses: &[Excuse]) -> u64 {
        let mut by_reply = admissions.to_vec();
        by_reply.sort_by_key(|admission| admission.reply);
        let mut worst = 0;
        for Admission { call: from, .. } in &by_reply {
            let mut admitted = 0;
            for Admission { call, reply: to, cost } in &by_reply {
                if call < from {
                    continue;
                }
                admitted += cost;
                let bound = self.burst + self.inflow(*to + CLOCK_STEP - *from);
                // The excuses are counted only where one is needed: there are millions of stretches.
                if admitted > bound + worst {
                    let excused = self.excused(*from, *to, excuses);
                    worst = worst.max(admitted.saturating_sub(bound + excused));
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

    /// What flows in, rounded down.
    fn inflow(&self, time: Duration) -> u64 {
        let inflow = time.as_nanos() * u128::from(self.limit) / self.window.as_nanos();
        u64::try_from(inflow).expect("a load of seconds")
    }
}

/// The longest time without one of these, from the first to the end.
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

    /// Three at once, and one each 10 ms.
    const QUOTA: Quota = Quota { burst: 3, limit: 1, window: ms(10) };

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Admissions that took no time.
    fn at(times: &[(u64, u64)]) -> Vec<Admission> {
        let each = times.iter();
        each.map(|&(at, cost)| Admission { call: ms(at), reply: ms(at), cost }).collect()
    }

    fn loss(from: u64, to: u64) -> Excuse {
        Excuse { from: ms(from), to: ms(to), refills: false }
    }

    #[test]
    fn what_a_bucket_admits_is_not_too_much() {
        assert_eq!(QUOTA.over(&at(&[(5, 3), (15, 1), (25, 1), (95, 3), (105, 1)]), &[]), 0);
        assert_eq!(QUOTA.over(&[], &[]), 0);
    }

    #[test]
    fn one_too_many_is_found_in_whatever_stretch_it_is() {
        assert_eq!(QUOTA.over(&at(&[(5, 4)]), &[]), 1);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (14, 1)]), &[]), 1);
        // All of it would be within the bound: the last three with what came just before are not.
        assert_eq!(QUOTA.over(&at(&[(0, 1), (500, 2), (509, 2)]), &[]), 1);
        assert_eq!(QUOTA.over(&at(&[(5, 3), (14, 2), (200, 5)]), &[]), 2);
    }

    #[test]
    fn an_admission_counts_where_it_certainly_was() {
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
        // Two buckets: three each, and each one more by 10, and by 20.
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
