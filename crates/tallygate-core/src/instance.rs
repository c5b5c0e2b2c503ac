//! The share of one of several instances that have no common store.
//!
//! Every unit of a quota belongs to exactly one instance, so all instances together allow no more than the policy.
//! They may allow less: an instance denies a client that has used this instance's share, even if other shares are
//! left. How much less depends only on how evenly requests are balanced.

use crate::limit::{Limit, Options};
use crate::numbers::{Numbers, PolicyError};
use crate::policy::Policy;

/// One of several instances of a program that share a quota, each with a part of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Instance {
    /// The number of this instance: 0 for the first, less than `count`.
    pub index: u32,
    /// How many instances there are.
    pub count: u32,
}

impl Instance {
    /// Returns the part of this instance: an equal part, and one more unit for the first instances if there is a
    /// remainder. The parts of all instances add up to `units`.
    const fn part(self, units: u64) -> u64 {
        let (index, count) = (self.index as u64, self.count as u64);
        units / count + (index < units % count) as u64
    }
}

impl Policy {
    /// Returns the share of this policy that one of several instances enforces by itself, without a common store.
    ///
    /// Each limit is divided by the number of instances, and so are its burst, its debt and the units of a new key.
    /// The first instances get the remainder. All instances together allow at most what the policy allows.
    ///
    /// They allow less if requests are not balanced evenly. A client whose requests all reach one of three instances
    /// gets a third of its quota. Prefer a common store where this matters.
    ///
    /// ```
    /// use tallygate_core::{Instance, Policy};
    ///
    /// let policy = Policy::token_bucket(100).per_minute().build()?;
    /// let share = |index| policy.share(Instance { index, count: 3 });
    /// assert_eq!(share(0)?.limits()[0].quota().amount, 34);
    /// assert_eq!(share(1)?.limits()[0].quota().amount, 33);
    /// assert_eq!(share(2)?.limits()[0].quota().amount, 33);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    ///
    /// # Errors
    /// Returns an error if the index is not less than the count, or if a limit or burst has fewer units than there
    /// are instances: some of them would have to deny every request.
    pub fn share(&self, instance: Instance) -> Result<Self, PolicyError> {
        let Instance { index, count } = instance;
        if index >= count {
            return Err(PolicyError::NoSuchInstance { index, count });
        }
        let share = |limit: &Limit| {
            let whole = limit.numbers();
            let least = whole.limit.min(whole.burst);
            if least < u64::from(count) {
                return Err(PolicyError::TooManyInstances { units: least, count });
            }
            let numbers = Numbers {
                limit: instance.part(whole.limit),
                burst: instance.part(whole.burst),
                debt: instance.part(whole.debt),
                start: instance.part(whole.start),
                ..*whole
            };
            let options = Options { shadow: limit.is_shadow(), penalty: limit.penalty().copied() };
            Limit::new(limit.name().into(), numbers, options)
        };
        let limits = self.limits().iter().map(share).collect::<Result<_, _>>()?;
        Ok(Self::new(self.name().into(), limits))
    }
}
