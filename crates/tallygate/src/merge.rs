//! Merges the parts of a joint decision, for every store that decides over several keys at once.
//!
//! One key may occur several times, under different rules. Its costs are added up, each rule must allow the sum, and one
//! rule charges it. The joint decision is allowed if all parts allow it; it reports the least remaining units and the
//! longest wait.

use tallygate_core::{Answer as _, Cost, Decision, Source, Ticks};

/// Groups parts by key.
///
/// Takes the identity of each part's key. Returns the indices of the parts of each key, in the order in which the keys
/// occur first.
pub fn group_by_key<I: Ord>(identities: impl IntoIterator<Item = I>) -> Vec<Vec<usize>> {
    let mut order: Vec<(I, usize)> = identities.into_iter().zip(0..).collect();
    order.sort_unstable();
    let same_key = order.chunk_by(|(one, _), (other, _)| one == other);
    let mut keys: Vec<Vec<usize>> =
        same_key.map(|parts| parts.iter().map(|(_, index)| *index).collect()).collect();
    keys.sort_unstable();
    keys
}

/// The cost of all parts of one key, and the part whose rule charges it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyCost {
    /// The sum of the costs of the parts whose rules charge. It may exceed [`Cost::MAX`].
    pub units: u128,
    /// The index of the part that charges the sum: the first whose rule charges, or the first part if none does.
    pub charger: usize,
}

impl KeyCost {
    /// Adds up the parts of one key: the index of each part, its cost, and whether its rule charges.
    pub fn of(parts: impl IntoIterator<Item = (usize, Cost, bool)>) -> Self {
        let (mut units, mut first, mut charger) = (0, None, None);
        for (index, cost, is_charging) in parts {
            first.get_or_insert(index);
            if is_charging {
                charger.get_or_insert(index);
                units += u128::from(cost);
            }
        }
        Self { units, charger: charger.or(first).unwrap_or(0) }
    }

    /// Returns the sum, or the largest possible cost if the sum is [impossible](Self::is_impossible).
    #[must_use]
    pub fn cost(&self) -> Cost {
        Cost::try_from(self.units).unwrap_or(Cost::MAX)
    }

    /// Returns whether the sum is larger than any limit can allow.
    #[must_use]
    pub fn is_impossible(&self) -> bool {
        self.units > Cost::MAX.into()
    }
}

/// Returns the denial of a cost that no limit can ever allow.
pub fn impossible(decision: Decision) -> Decision {
    let denied_by = decision.denied_by.or(Some(0));
    Decision { allowed: false, retry_after: None, denied_by, ..decision }
}

/// Merges the decisions of all parts into one, given the first part that denied.
///
/// The limit that denied and the source are those of that part. Without any part, everything is allowed.
pub fn merge(decisions: &[Decision], denial: Option<&Decision>) -> Decision {
    let merged = decisions.iter().copied().reduce(Decision::merge).unwrap_or(NO_PARTS);
    Decision {
        allowed: denial.is_none(),
        denied_by: denial.and_then(|denial| denial.denied_by),
        quota: denial.unwrap_or(&merged).quota,
        source: denial.map_or(merged.source, |denial| denial.source),
        ..merged
    }
}

/// The decision over no parts.
pub const NO_PARTS: Decision = Decision {
    allowed: true,
    limit: Cost::MAX,
    remaining: Cost::MAX,
    retry_after: Some(Ticks::ZERO),
    reset_after: Ticks::ZERO,
    delay: Ticks::ZERO,
    scarcest: None,
    denied_by: None,
    shadow_denied_by: None,
    quota: None,
    source: Source::Store,
};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_one_key_are_found_in_the_order_of_their_first_parts() {
        assert_eq!(group_by_key(["b", "a", "b", "c", "a"]), [vec![0, 2], vec![1, 4], vec![3]]);
        assert_eq!(group_by_key([0_u8; 0]), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn the_first_part_that_charges_is_charged_the_sum_of_all_that_charge() {
        let parts = [(3, 5, false), (4, Cost::MAX, true), (7, 1, true)];
        let sum = KeyCost::of(parts);
        assert_eq!((sum.units, sum.charger), (u128::from(Cost::MAX) + 1, 4));
        assert!(sum.is_impossible());
        assert_eq!(sum.cost(), Cost::MAX);
        assert_eq!(KeyCost::of([(3, 5, false)]), KeyCost { units: 0, charger: 3 });
    }
}
