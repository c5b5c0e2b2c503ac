//! Why a request is decided as it is: the arithmetic of one decision, step by step.
//!
//! An explanation is not a trace of the code that decides. It works the decision out once more, in formulas over what
//! is stored, the time and the cost, and its outcome is read from those formulas alone: an evaluation of them must give
//! the same decision, and tests check that it does. Rules of a user's own, several limits at once and penalties are not explained.
//!
//! | question | file |
//! |---|---|
//! | What is a formula, and how is it shown? | `formula.rs` |
//! | How do steps become an explanation? | `working.rs` |
//! | Which steps does a bucket take? | `bucket.rs` |
//! | Which steps does each of the windows take? | `windows.rs` |

mod bucket;
mod formula;
mod windows;
mod working;

use alloc::vec::Vec;
use core::fmt;

use crate::limit::{Limit, LimitState, Machine};
use crate::{Algorithm as _, Cost, Decision, Tick, Used};

pub use formula::{Formula, Operation};
use working::Working;

/// How a decision comes about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Explanation {
    /// From what is stored to what is told, in order.
    pub steps: Vec<Step>,
    /// What the steps come to.
    pub decision: Decision,
}

/// One step: a formula, and the name under which later ones know what it comes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Step {
    /// What it is, in words.
    pub says: &'static str,
    /// Its name in later formulas.
    pub name: &'static str,
    /// How it is computed.
    pub formula: Formula,
    /// Which part of the decision it is, if it is one.
    pub tells: Option<Tells>,
}

/// The parts of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Tells {
    /// Whether it is allowed: 1 or 0.
    Allowed,
    /// What remains.
    Remaining,
    /// The least wait.
    RetryAfter,
    /// The time until nothing is used.
    ResetAfter,
    /// The wait for one's turn.
    Delay,
}

impl Limit {
    /// Why a request would be decided as it would be: the arithmetic, with every number in it. The state stays as it is.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Decision, Policy, Tick, Ticks};
    ///
    /// let limit = Policy::token_bucket(3).per(Ticks(10)).limit()?;
    /// let mut state = limit.first(Tick(0));
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
        let mut working = Working::new(self, now, cost);
        let mut rebased = None;
        if self.set_back(state, now) {
            let mut state = state.clone();
            working.set_back(self.last_change(&state));
            self.rebase(&mut state, now);
            rebased = Some(state);
        }
        let state = rebased.as_ref().unwrap_or(state);
        match (self.machine(), state) {
            (Machine::Bucket(_), LimitState::Bucket(state)) => working.bucket(state),
            (Machine::WideBucket(_), LimitState::WideBucket(state)) => working.bucket(state),
            (Machine::FixedWindow(_), LimitState::FixedWindow(state)) => {
                working.fixed_window(state, self.numbers().anchor);
            }
            (Machine::SlidingWindowLog(rule), LimitState::SlidingWindowLog(state)) => {
                working.log(rule, state);
            }
            (Machine::SlidingWindowCounter(_), LimitState::SlidingWindowCounter(state)) => {
                working.counter(state);
            }
            // A state of another kind of limit refuses, as it does when it is decided on.
            _ => {
                return self.explain(&self.with_used(Used::whole(self.capacity()), now), now, cost);
            }
        }
        working.explanation(self.capacity())
    }
}

impl Explanation {
    /// What a part of the decision comes to, if a step tells it.
    #[must_use]
    pub fn told(&self, part: Tells) -> Option<i128> {
        told(&self.steps, part)
    }
}

fn told(steps: &[Step], part: Tells) -> Option<i128> {
    steps.iter().find(|step| step.tells == Some(part)).map(Step::value)
}

impl Step {
    /// What it comes to.
    #[must_use]
    pub fn value(&self) -> i128 {
        self.formula.value()
    }

    /// What it comes to, as it is shown: `yes` or `no` for a comparison.
    #[must_use]
    pub fn shown(&self) -> Shown {
        Shown { value: self.value(), is_answer: self.formula.is_answer() }
    }
}

/// A value as it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shown {
    value: i128,
    is_answer: bool,
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.is_answer, self.value) {
            (true, 0) => f.write_str("no"),
            (true, _) => f.write_str("yes"),
            (false, value) => value.fmt(f),
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.formula {
            Formula::Of(..) => write!(f, "{} = {} = {}", self.name, self.formula, self.shown()),
            _ => write!(f, "{} = {}", self.name, self.shown()),
        }
    }
}
