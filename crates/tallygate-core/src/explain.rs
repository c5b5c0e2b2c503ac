//! The arithmetic of one decision, step by step, for display.
//!
//! [`Limit::explain`] computes a decision a second time, as formulas over the stored state, the time and the cost.
//! It does not trace the code that decides. The outcome is read from the formulas alone, and tests check that it
//! equals the decision. Only single limits are explained: no policies of several limits, no penalties, no
//! algorithms of users.
//!
//! | file | contents |
//! |---|---|
//! | `formula.rs` | formulas, and how they are written |
//! | `builder.rs` | the list of steps while it is built |
//! | `bucket.rs` | the steps of a bucket |
//! | `windows.rs` | the steps of the three window algorithms |

mod bucket;
mod builder;
mod formula;
mod windows;

use alloc::vec::Vec;
use core::fmt;

use crate::limit::{Limit, LimitState, Machine};
use crate::{Algorithm as _, Cost, Decision, Tick, Used};

use builder::ExplanationBuilder;
pub use formula::{Formula, Operation};

/// The steps that lead to a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// The steps in order, from the stored state to the fields of the decision.
    pub steps: Vec<Step>,
    /// The decision that the steps lead to.
    pub decision: Decision,
}

/// One step: a formula, and the name by which later steps refer to its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What the value means, in words.
    pub description: &'static str,
    /// The name of the value in later formulas.
    pub name: &'static str,
    /// How the value is computed.
    pub formula: Formula,
    /// The field of the decision that the value is, if it is one.
    pub field: Option<DecisionField>,
}

/// A field of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecisionField {
    /// [`Decision::allowed`]: 1 or 0.
    Allowed,
    /// [`Decision::remaining`].
    Remaining,
    /// [`Decision::retry_after`].
    RetryAfter,
    /// [`Decision::reset_after`].
    ResetAfter,
    /// [`Decision::delay`].
    Delay,
}

impl Limit {
    /// Explains how a request would be decided: the formulas with all their numbers. The state does not change.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
    ///
    /// let limit = Policy::token_bucket(3).per(Ticks(10)).limit()?;
    /// let mut state = limit.initial(Tick(0));
    /// assert!(limit.decide::<bool>(&mut state, Tick(0), 3));
    ///
    /// let why = limit.explain(&state, Tick(2), 1);
    /// assert_eq!(why.decision, limit.decide::<Decision>(&mut state, Tick(2), 1));
    /// let shown: Vec<String> = why.steps.iter().map(|step| step.to_string()).collect();
    /// assert_eq!(shown[5], "used = max(0, level − drained) = max(0, 30 − 6) = 24");
    /// assert_eq!(shown[8], "allowed = used ≤ room = 24 ≤ 20 = no");
    /// assert_eq!(shown[9], "retry_after = ⌈(used − room) / L′⌉ = ⌈(24 − 20) / 3⌉ = 2");
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn explain(&self, state: &LimitState, now: Tick, cost: Cost) -> Explanation {
        let mut builder = ExplanationBuilder::new(self, now, cost);
        let mut rebased = None;
        if self.clock_was_set_back(state, now) {
            let mut state = state.clone();
            builder.set_back(self.last_change(&state));
            self.rebase(&mut state, now);
            rebased = Some(state);
        }
        let state = rebased.as_ref().unwrap_or(state);
        match (self.machine(), state) {
            (Machine::Bucket(_), LimitState::Bucket(state)) => builder.bucket(state),
            (Machine::WideBucket(_), LimitState::WideBucket(state)) => builder.bucket(state),
            (Machine::FixedWindow(_), LimitState::FixedWindow(state)) => {
                builder.fixed_window(state, self.numbers().anchor);
            }
            (Machine::SlidingWindowLog(rule), LimitState::SlidingWindowLog(state)) => {
                builder.log(rule, state);
            }
            (Machine::SlidingWindowCounter(_), LimitState::SlidingWindowCounter(state)) => {
                builder.counter(state);
            }
            // A state of another kind of limit counts as used up, as it does in a decision.
            _ => {
                return self.explain(&self.with_used(Used::whole(self.capacity()), now), now, cost);
            }
        }
        builder.explanation(self.capacity(), self.quota())
    }
}

impl Explanation {
    /// Returns the value of a field of the decision, if a step computes it.
    #[must_use]
    pub fn value_of(&self, field: DecisionField) -> Option<i128> {
        value_of(&self.steps, field)
    }
}

fn value_of(steps: &[Step], field: DecisionField) -> Option<i128> {
    steps.iter().find(|step| step.field == Some(field)).map(Step::value)
}

impl Step {
    /// Returns the value of the formula.
    #[must_use]
    pub fn value(&self) -> i128 {
        self.formula.value()
    }

    /// Returns the value for display: `yes` or `no` for a comparison, a number otherwise.
    #[must_use]
    pub fn display_value(&self) -> DisplayValue {
        DisplayValue { value: self.value(), is_comparison: self.formula.is_comparison() }
    }
}

/// The value of a step for display.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DisplayValue {
    value: i128,
    is_comparison: bool,
}

impl fmt::Display for DisplayValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_comparison, self.value) {
            (true, 0) => f.write_str("no"),
            (true, _) => f.write_str("yes"),
            (false, value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.formula {
            Formula::Binary(..) => {
                write!(f, "{} = {} = {}", self.name, self.formula, self.display_value())
            }
            _ => write!(f, "{} = {}", self.name, self.display_value()),
        }
    }
}
