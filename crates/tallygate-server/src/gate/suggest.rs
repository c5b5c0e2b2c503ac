//! Suggests a policy for an unknown name, at a bounded cost.
//!
//! An error about an unknown name suggests the nearest policy. Comparing two names takes time proportional to the
//! product of their lengths, for every policy. So long names are not compared, a name is compared with few policies,
//! and the number of names per second is limited. A flood of unknown names costs no more than other errors.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tallygate_lab::names::nearest_of;

/// The longest name that is compared, in bytes.
const LONGEST: usize = 32;
/// The most policies that a name is compared with.
const MOST_COMPARED: usize = 64;
/// The average time between two searches, in milliseconds: 100 names per second.
const INTERVAL_MS: u64 = 10;
/// How many searches may follow each other immediately: together they take less than a millisecond.
const AT_ONCE: u64 = 4;

/// Finds the nearest policy, a limited number of times per second.
pub(super) struct Suggestions {
    since: Instant,
    /// The time until which the searches so far use up the rate, in milliseconds.
    busy_until: AtomicU64,
}

impl Default for Suggestions {
    fn default() -> Self {
        Self { since: Instant::now(), busy_until: AtomicU64::new(0) }
    }
}

impl Suggestions {
    /// Returns the known name nearest to `name`, if one is near and the rate allows a search.
    pub(super) fn nearest<K: AsRef<str> + Ord>(
        &self,
        name: &str,
        known: impl Iterator<Item = K>,
    ) -> Option<K> {
        let now_ms = || u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        if name.len() > LONGEST || !self.may_look(now_ms()) {
            return None;
        }
        nearest_of(name, known, MOST_COMPARED)
    }

    /// Counts a search, if the rate allows it.
    fn may_look(&self, now_ms: u64) -> bool {
        let next = |busy_until: u64| {
            let from = busy_until.max(now_ms);
            (from - now_ms <= (AT_ONCE - 1) * INTERVAL_MS).then_some(from + INTERVAL_MS)
        };
        self.busy_until.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found() {
        let known = ["api", "login", "search"];
        let nearest = |name| Suggestions::default().nearest(name, known.into_iter());
        assert_eq!(nearest("serach"), Some("search"));
        assert_eq!(nearest("logn"), Some("login"));
        assert_eq!(nearest("something else"), None);
    }

    /// Fault J10.
    #[test]
    fn long_names_and_more_than_a_few_at_once_are_not_compared() {
        let known = ["search"];
        let suggestions = Suggestions::default();
        assert_eq!(suggestions.nearest(&"search".repeat(6), known.into_iter()), None);
        let found = |now_ms| (0..1_000).filter(|_| suggestions.may_look(now_ms)).count();
        assert_eq!((found(7_000), found(7_009), found(7_010), found(7_030)), (4, 0, 1, 2));
        let in_a_second: usize = (9_000..10_000).map(found).sum();
        assert_eq!(in_a_second, 4 + 99, "100 per second, and a few at once");
    }
}
