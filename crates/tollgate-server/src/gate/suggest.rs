//! The policy that was probably meant, at a bounded cost.
//!
//! A misspelled name is answered with the nearest right one. To compare two names takes time in the product of their
//! lengths, for every policy. So long names are not compared, few policies are, and only so many names per second: unknown
//! names by the million cost no more than any other error.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// The longest name that is compared, in bytes.
const LONGEST: usize = 32;
/// The most policies that a name is compared with.
const MOST_COMPARED: usize = 64;
/// How many names are compared per second.
const PER_SECOND: u64 = 100;

/// Finds the policy that was probably meant, so many times per second.
pub(super) struct Suggestions {
    since: Instant,
    /// The second that it is, and how many names were compared in it.
    spent: AtomicU64,
}

impl Default for Suggestions {
    fn default() -> Self {
        Self { since: Instant::now(), spent: AtomicU64::new(0) }
    }
}

impl Suggestions {
    /// Returns the known name that is nearest to a wrong one, if one is near and there is time to look for it.
    pub(super) fn nearest<K: AsRef<str> + Ord>(
        &self,
        name: &str,
        known: impl Iterator<Item = K>,
    ) -> Option<K> {
        if name.len() > LONGEST || !self.may_look(self.since.elapsed().as_secs()) {
            return None;
        }
        let most = |known: &K| known.as_ref().len() / 3 + 1;
        known
            .filter(|known| known.as_ref().len().abs_diff(name.len()) <= most(known))
            .take(MOST_COMPARED)
            .map(|known| (strsim::osa_distance(name, known.as_ref()), known))
            .filter(|(distance, known)| *distance <= most(known))
            .min()
            .map(|(_, near)| near)
    }

    /// Counts a search, if there are not too many in this second already.
    fn may_look(&self, second: u64) -> bool {
        const COUNT_BITS: u32 = 16;
        let next = |spent: u64| {
            let (of, count) = (spent >> COUNT_BITS, spent & ((1 << COUNT_BITS) - 1));
            match (of == second, count) {
                (true, PER_SECOND..) => None,
                (true, _) => Some(spent + 1),
                (false, _) => Some(second << COUNT_BITS | 1),
            }
        };
        self.spent.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
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
    fn j10_long_names_and_more_than_a_hundred_per_second_are_not_compared() {
        let known = ["search"];
        let suggestions = Suggestions::default();
        assert_eq!(suggestions.nearest(&"search".repeat(6), known.into_iter()), None);
        let found = |second| (0..1_000).filter(|_| suggestions.may_look(second)).count();
        assert_eq!((found(7), found(7), found(8)), (100, 0, 100));
    }
}
