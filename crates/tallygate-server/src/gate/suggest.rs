//! The policy that was probably meant, at a bounded cost.
//!
//! A misspelled name is answered with the nearest right one. To compare two names takes time in the product of their
//! lengths, for every policy. So long names are not compared, few policies are, and only so many names per second, never
//! more than a few of them at once: unknown names by the million cost no more than any other error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tallygate_lab::names::nearest_of;

/// The longest name that is compared, in bytes.
const LONGEST: usize = 32;
/// The most policies that a name is compared with.
const MOST_COMPARED: usize = 64;
/// How long the search for one name is waited for by the next, in milliseconds: 100 names are compared per second.
const INTERVAL_MS: u64 = 10;
/// How many names are compared at once: together they take less than a millisecond.
const AT_ONCE: u64 = 4;

/// Finds the policy that was probably meant, so many times per second.
pub(super) struct Suggestions {
    since: Instant,
    /// When the searches so far will have been waited for, in milliseconds.
    busy_until: AtomicU64,
}

impl Default for Suggestions {
    fn default() -> Self {
        Self { since: Instant::now(), busy_until: AtomicU64::new(0) }
    }
}

impl Suggestions {
    /// Returns the known name that is nearest to a wrong one, if one is near and there is time to look for it.
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

    /// Counts a search, if there were not too many before it.
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

    #[test]
    fn j10_long_names_and_more_than_a_few_at_once_are_not_compared() {
        let known = ["search"];
        let suggestions = Suggestions::default();
        assert_eq!(suggestions.nearest(&"search".repeat(6), known.into_iter()), None);
        let found = |now_ms| (0..1_000).filter(|_| suggestions.may_look(now_ms)).count();
        assert_eq!((found(7_000), found(7_009), found(7_010), found(7_030)), (4, 0, 1, 2));
        let in_a_second: usize = (9_000..10_000).map(found).sum();
        assert_eq!(in_a_second, 4 + 99, "100 per second, and a few at once");
    }
}
