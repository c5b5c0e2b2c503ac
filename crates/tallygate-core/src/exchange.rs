//! Policies and states as plain numbers, for a script that decides inside a database.
//!
//! Such a script computes in doubles, which are exact up to 2⁵³. So all numbers here are whole numbers well below
//! that. A policy with larger numbers has no [script](Policy::script), and only this crate can decide it. The
//! level of a bucket may be larger: it is then split into two numbers, and the script computes with both.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;

use crate::Ticks;
use crate::codec::DecodeError;
use crate::doubles::{LARGEST, NumberReader};
use crate::limit::{Limit, Machine, Options};
use crate::numbers::Anchor;
use crate::penalty::{Penalty, PenaltyState};
use crate::policy::Policy;
use crate::several::LimitRecord;
use crate::shadow::ShadowHistory;

/// The constants of one limit that a script needs, in this order:
///
/// | index | constant |
/// |---|---|
/// | 0 | the algorithm: 1 bucket, 2 deep bucket, 3 fixed window, 4 sliding window counter, 5 sliding window log |
/// | 1 | the capacity |
/// | 2 | the window |
/// | 3 | the units that a new key has used |
/// | 4 | the most units that can be used, debt included |
/// | 5 | bucket: what a unit of cost adds to the level; fixed window: 1 if it starts at the first request |
/// | 6 | bucket: what the level drains per tick |
/// | 7 | 1 for a shadow limit |
/// | 8 | the duration of the penalty, or 0 |
/// | 9 | the denials that start the penalty |
pub type Constants = [u64; 10];

/// A policy as numbers with which a script computes exactly.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Script {
    /// The constants of each limit.
    pub limits: Vec<Constants>,
}

impl Script {
    /// Returns whether a script computes exactly with this time or cost.
    #[must_use]
    pub const fn is_exact(number: i64) -> bool {
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
        let (duration, denials) =
            self.penalty().map_or((0, 0), |penalty| (penalty.duration().0, penalty.denials()));
        [
            code,
            numbers.burst,
            numbers.window.0,
            numbers.burst - numbers.start,
            numbers.burst.saturating_add(numbers.debt),
            unit,
            drain,
            u64::from(self.is_shadow()),
            duration,
            denials,
        ]
    }
}

impl Policy {
    /// Returns the policy as numbers with which a script computes exactly; `None` if a number is too large.
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

    /// Returns a state as numbers, in the order in which [`state_from_numbers`](Self::state_from_numbers) reads
    /// them.
    ///
    /// | limit | numbers |
    /// |---|---|
    /// | bucket | time of the last change, level |
    /// | deep bucket | time of the last change, high part of the level, low part of the level |
    /// | fixed window | time of the last change, how far into its window that was, count |
    /// | sliding window counter | time of the last change, count, previous count |
    /// | sliding window log | time of the last change, total before the first entry, number of entries; for each entry its time and the total after it |
    ///
    /// A limit with a penalty has two more numbers: the time of the first denial and the number of denials; or
    /// the end of the penalty and −1; or 0 and −2 if there were no denials.
    ///
    /// A shadow limit has more numbers after these: how many runs of requests it remembers, at most 8; the number before
    /// that of the oldest run; and for each run, the newest first, the units that it charged and the older units that it
    /// did not charge.
    #[must_use]
    pub fn state_to_numbers(&self, state: &[LimitRecord]) -> Vec<i128> {
        let mut out = Vec::new();
        for (limit, record) in self.limits().iter().zip(state) {
            limit.write_numbers(&record.state, &mut out);
            if limit.penalty().is_some() {
                out.extend(match record.penalty_state {
                    None => [0, -2],
                    Some(PenaltyState::Counting { since, denials }) => {
                        [since.0.into(), denials.into()]
                    }
                    Some(PenaltyState::Denied { until }) => [until.0.into(), -1],
                });
            }
            if limit.is_shadow() {
                let history = record.shadow_history.as_deref();
                history.unwrap_or(&ShadowHistory::default()).write_numbers(&mut out);
            }
        }
        out
    }

    /// Returns the state that [`state_to_numbers`](Self::state_to_numbers) wrote.
    ///
    /// # Errors
    /// Returns an error if the numbers are not exactly one state that a decision can produce.
    pub fn state_from_numbers(&self, numbers: &[i128]) -> Result<Box<[LimitRecord]>, DecodeError> {
        let mut numbers = NumberReader(numbers);
        let mut states = Vec::with_capacity(self.limits().len());
        for limit in self.limits() {
            let state = limit.read_numbers(&mut numbers)?;
            let penalty_state = match limit.penalty() {
                None => None,
                Some(_) => {
                    let (time, denials) = (numbers.tick("penalty")?, numbers.any()?);
                    match denials {
                        -2 => None,
                        -1 => Some(PenaltyState::Denied { until: time }),
                        denials => Some(PenaltyState::Counting {
                            since: time,
                            denials: u64::try_from(denials)
                                .map_err(|_| DecodeError::Field { name: "number of denials" })?,
                        }),
                    }
                }
            };
            let shadow_history = match limit.is_shadow() {
                true => Some(ShadowHistory::read_numbers(&mut numbers)?),
                false => None,
            };
            let shadow_history = shadow_history.filter(|history| !history.is_empty()).map(Box::new);
            states.push(LimitRecord { state, penalty_state, shadow_history });
        }
        match numbers.0.len() {
            0 => Ok(states.into()),
            extra => Err(DecodeError::Trailing { extra }),
        }
    }

    /// Returns the same policy in coarser ticks: a new tick is as long as `ticks` old ones.
    ///
    /// # Errors
    /// Returns an error if a window or a penalty is not a multiple of `ticks`.
    pub fn with_coarser_ticks(&self, ticks: u64) -> Result<Self, NotAMultiple> {
        let whole = |span: Ticks| match span.0.checked_rem(ticks) {
            Some(0) => Ok(Ticks(span.0 / ticks)),
            _ => Err(NotAMultiple { span, ticks }),
        };
        let limits = self.limits().iter().map(|limit| {
            let mut numbers = *limit.numbers();
            numbers.window = whole(numbers.window)?;
            let penalty = match limit.penalty() {
                Some(penalty) => {
                    Some(Penalty::lasting(whole(penalty.duration())?).after(penalty.denials()))
                }
                None => None,
            };
            let options = Options { shadow: limit.is_shadow(), penalty };
            // Shorter windows and penalties stay valid, and they are never 0.
            Limit::new(limit.name().into(), numbers, options)
                .map_err(|_| NotAMultiple { span: limit.numbers().window, ticks })
        });
        Ok(Self::new(self.name().into(), limits.collect::<Result<_, _>>()?))
    }
}

/// The error for a window or a penalty that is not a multiple of a coarser tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NotAMultiple {
    /// The window or the penalty.
    pub span: Ticks,
    /// The length of the coarser tick.
    pub ticks: u64,
}

impl fmt::Display for NotAMultiple {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { span, ticks } = self;
        write!(f, "a window or penalty must be a multiple of {ticks} ticks (got {span})")
    }
}

impl core::error::Error for NotAMultiple {}
