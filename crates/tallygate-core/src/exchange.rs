//! Policies and states as plain numbers, for those who decide elsewhere: a script inside a database.
//!
//! Such a script computes in doubles, which are exact up to 2⁵³. So everything here is a whole number
//! well below that, and a policy that has others is not [scripted](Policy::script): its states are
//! decided on by this crate alone. A bucket's level may need more; it is then two numbers, and the
//! script multiplies in two.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::Ticks;
use crate::codec::DecodeError;
use crate::doubles::{LARGEST, NumberReader};
use crate::limit::{Limit, Machine, Options};
use crate::numbers::Anchor;
use crate::penalty::{Penalty, Record};
use crate::policy::Policy;
use crate::several::Standing;

/// The constants of one limit, as a script takes them.
///
/// In this order: how it is decided (1 bucket, 2 deep bucket, 3 fixed window, 4 sliding window counter,
/// 5 sliding window log); its capacity; its window; what a new key has used; the most that can be used in
/// debt; what a unit of cost adds to a bucket's level, or 1 if a fixed window starts at the first request;
/// what a level drains a tick; whether it is a shadow; how long its penalty lasts, 0 for none; after how
/// many refusals.
pub type Constants = [u64; 10];

/// A policy in numbers that a script computes with exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Script {
    /// The constants of each limit.
    pub limits: Vec<Constants>,
}

impl Script {
    /// Whether a time or a cost is one that a script computes with exactly.
    #[must_use]
    pub const fn takes(number: i64) -> bool {
        number.unsigned_abs() <= LARGEST
    }
}

impl Limit {
    fn constants(&self) -> Constants {
        let numbers = self.numbers();
        let bucket = |unit, drain, is_deep| (if is_deep { 2 } else { 1 }, unit, drain);
        let (code, unit, drain) = match self.machine() {
            Machine::Bucket(b) => bucket(b.unit(), b.drain(), b.is_deep()),
            Machine::WideBucket(b) => bucket(b.unit(), b.drain(), b.is_deep()),
            Machine::FixedWindow(_) => (3, u64::from(numbers.anchor == Anchor::FirstRequest), 0),
            Machine::SlidingWindowCounter(_) => (4, 0, 0),
            Machine::SlidingWindowLog(_) => (5, 0, 0),
        };
        let (lasts, after) =
            self.penalty().map_or((0, 0), |penalty| (penalty.lasts().0, penalty.refusals()));
        [
            code,
            numbers.burst,
            numbers.window.0,
            numbers.burst - numbers.start,
            numbers.burst.saturating_add(numbers.debt),
            unit,
            drain,
            u64::from(self.is_shadow()),
            lasts,
            after,
        ]
    }
}

impl Policy {
    /// The policy in numbers that a script computes with exactly; `None` if some are too large.
    ///
    /// ```
    /// use tallygate_core::{Policy, Ticks};
    ///
    /// let policy = Policy::token_bucket(3).per(Ticks(10)).build()?;
    /// assert_eq!(policy.script().unwrap().limits, [[1, 3, 10, 0, 6, 10, 3, 0, 0, 0]]);
    /// assert_eq!(Policy::gcra(1).per(Ticks(1 << 60)).build()?.script(), None);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn script(&self) -> Option<Script> {
        let limits: Vec<Constants> = self.limits().iter().map(Limit::constants).collect();
        limits.iter().flatten().all(|number| *number <= LARGEST).then_some(Script { limits })
    }

    /// A state as numbers, in the order in which [`state_of_numbers`](Self::state_of_numbers) takes them:
    /// of a bucket when it last changed and its level (the higher of two numbers first, if it is deep);
    /// of a fixed window when it last changed, how far into its window that was, and the count; of a
    /// sliding window counter when it last changed, the count and the previous count; of a log when it last changed, the total
    /// before its first entry, how many entries there are, and of each its time and the total after it.
    /// A limit with a penalty has two more: since when refusals are counted and how many there were, or
    /// until when the penalty lasts and −1, or 0 and −2.
    #[must_use]
    pub fn numbers_of_state(&self, state: &[Standing]) -> Vec<i128> {
        let mut out = Vec::new();
        for (limit, standing) in self.limits().iter().zip(state) {
            limit.put_numbers(&standing.state, &mut out);
            if limit.penalty().is_some() {
                out.extend(match standing.record {
                    None => [0, -2],
                    Some(Record::Counting { since, refusals }) => [since.0.into(), refusals.into()],
                    Some(Record::Serving { until }) => [until.0.into(), -1],
                });
            }
        }
        out
    }

    /// The state that some numbers are.
    ///
    /// # Errors
    /// They are not what a decision can have left.
    pub fn state_of_numbers(&self, numbers: &[i128]) -> Result<Box<[Standing]>, DecodeError> {
        let mut numbers = NumberReader(numbers);
        let mut states = Vec::with_capacity(self.limits().len());
        for limit in self.limits() {
            let state = limit.take_numbers(&mut numbers)?;
            let record = match limit.penalty() {
                None => None,
                Some(_) => {
                    let (time, refusals) = (numbers.tick("penalty")?, numbers.any()?);
                    match refusals {
                        -2 => None,
                        -1 => Some(Record::Serving { until: time }),
                        refusals => Some(Record::Counting {
                            since: time,
                            refusals: u64::try_from(refusals)
                                .map_err(|_| DecodeError::Field { name: "refusals" })?,
                        }),
                    }
                }
            };
            states.push(Standing { state, record });
        }
        match numbers.0.len() {
            0 => Ok(states.into()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }

    /// The same policy where a tick is so many of the present ones.
    ///
    /// # Errors
    /// A window or a penalty is not a whole number of them.
    pub fn with_ticks_of(&self, ticks: u64) -> Result<Self, NotWhole> {
        let whole = |span: Ticks| match span.0.checked_rem(ticks) {
            Some(0) => Ok(Ticks(span.0 / ticks)),
            _ => Err(NotWhole { span, ticks }),
        };
        let limits = self.limits().iter().map(|limit| {
            let mut numbers = *limit.numbers();
            numbers.window = whole(numbers.window)?;
            let penalty = match limit.penalty() {
                Some(penalty) => {
                    Some(Penalty::lasting(whole(penalty.lasts())?).after(penalty.refusals()))
                }
                None => None,
            };
            let options = Options { shadow: limit.is_shadow(), penalty };
            // Smaller spans are as valid as greater ones, and never none.
            Limit::new(limit.name().into(), numbers, options)
                .map_err(|_| NotWhole { span: limit.numbers().window, ticks })
        });
        Ok(Self::new(self.name().into(), limits.collect::<Result<_, _>>()?))
    }
}

/// A span that is no whole number of the ticks it was to be counted in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotWhole {
    /// The span.
    pub span: Ticks,
    /// How many of its ticks are one.
    pub ticks: u64,
}

impl fmt::Display for NotWhole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { span, ticks } = self;
        write!(f, "a window or penalty of {span} ticks; use a multiple of {ticks} ticks")
    }
}

impl core::error::Error for NotWhole {}
