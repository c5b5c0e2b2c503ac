//! Builds an explanation: the steps so far, and the numbers that all steps can use.

use alloc::vec::Vec;

use super::formula::{Formula, Operation, named};
use super::{DecisionField, Explanation, Step, value_of};
use crate::limit::Limit;
use crate::numbers::{Kind, saturate};
use crate::{Cost, Decision, Quota, Source, Tick, Ticks};

/// An explanation that is being built.
pub(super) struct ExplanationBuilder {
    pub(super) steps: Vec<Step>,
    pub(super) kind: Kind,
    pub(super) limit: Formula,
    pub(super) window: Formula,
    pub(super) burst: Formula,
    pub(super) cost: Formula,
    pub(super) now: Formula,
}

impl ExplanationBuilder {
    pub(super) fn new(limit: &Limit, now: Tick, cost: Cost) -> Self {
        let numbers = limit.numbers();
        Self {
            steps: Vec::new(),
            kind: numbers.kind,
            limit: named("L", numbers.limit),
            window: named("W", numbers.window.0),
            burst: named("B", numbers.burst),
            cost: named("c", cost),
            now: named("now", now.0),
        }
    }

    /// Adds a step. Returns its value under its name.
    pub(super) fn step(
        &mut self,
        name: &'static str,
        description: &'static str,
        formula: Formula,
    ) -> Formula {
        let value = formula.value();
        self.steps.push(Step { description, name, formula, field: None });
        Formula::Named { name, value }
    }

    /// Adds a step that computes a field of the decision. Returns its value.
    pub(super) fn field_step(
        &mut self,
        field: DecisionField,
        description: &'static str,
        formula: Formula,
    ) -> i128 {
        let name = match field {
            DecisionField::Allowed => "allowed",
            DecisionField::Remaining => "remaining",
            DecisionField::RetryAfter => "retry_after",
            DecisionField::ResetAfter => "reset_after",
            DecisionField::Delay => "delay",
        };
        let value = formula.value();
        self.steps.push(Step { description, name, formula, field: Some(field) });
        value
    }

    pub(super) fn explanation(self, capacity: Cost, quota: Quota) -> Explanation {
        let steps = self.steps;
        let whole =
            |field| value_of(&steps, field).map(|value| saturate(value.max(0).unsigned_abs()));
        let ticks = |field| whole(field).map(Ticks);
        let allowed = value_of(&steps, DecisionField::Allowed) == Some(1);
        let decision = Decision {
            allowed,
            limit: capacity,
            remaining: whole(DecisionField::Remaining).unwrap_or(0),
            retry_after: if allowed { Some(Ticks::ZERO) } else { ticks(DecisionField::RetryAfter) },
            reset_after: ticks(DecisionField::ResetAfter).unwrap_or(Ticks::ZERO),
            delay: ticks(DecisionField::Delay).unwrap_or(Ticks::ZERO),
            scarcest: Some(0),
            denied_by: (!allowed).then_some(0),
            shadow_denied_by: None,
            quota: Some(quota),
            source: Source::Store,
        };
        Explanation { steps, decision }
    }

    pub(super) fn set_back(&mut self, last: Tick) {
        let behind = named("last", last.0) - self.now.clone();
        self.step(
            "set_back",
            "whether the clock was set back by more than a window; then what was used counts from now on",
            self.window.clone().of(Operation::Below, behind),
        );
    }

    /// Adds the time since the last change. Returns it, and how far this request is before the last change if it
    /// is late.
    pub(super) fn times(&mut self, last: Tick, is_fresh: bool) -> (Formula, Option<Formula>) {
        let last_change = named("last", last.0);
        let elapsed = self.now.clone().above(last_change.clone());
        let elapsed = self.step("elapsed", "time since the last change", elapsed);
        let is_late = !is_fresh && Formula::value(&self.now) < last.0.into();
        let late = is_late.then(|| {
            let description =
                "how late this request is: it is before the last change, and decided at the time of that change";
            self.step("late", description, last_change - self.now.clone())
        });
        (elapsed, late)
    }

    /// Returns whether the cost exceeds the capacity, and adds a step if it does.
    pub(super) fn never_fits(&mut self, capacity: &Formula) -> bool {
        let fits = self.cost.clone().at_most(capacity.clone());
        let exceeds = fits.value() == 0;
        if exceeds {
            self.field_step(
                DecisionField::Allowed,
                "the cost exceeds the capacity, so waiting does not help",
                fits,
            );
        }
        exceeds
    }

    /// Compares the used units of a window with its limit. Returns the used units after the request.
    pub(super) fn compare_with_limit(&mut self, used: Formula) -> Formula {
        let room = self.step(
            "room",
            "the most that may be used for the cost to fit",
            self.limit.clone() - self.cost.clone(),
        );
        let fits = used.clone().at_most(room);
        if self.field_step(DecisionField::Allowed, "whether the cost fits", fits) == 1 {
            self.step("after", "used after this request", used + self.cost.clone())
        } else {
            used
        }
    }

    pub(super) fn remaining(&mut self, after: &Formula) {
        let left = self.limit.clone().above(after.clone());
        self.field_step(DecisionField::Remaining, "the largest cost that still fits", left);
    }
}

/// Adds the lateness of a request to a wait that counts from the last change.
pub(super) fn plus(late: &Option<Formula>, time: Formula) -> Formula {
    match late {
        Some(late) => late.clone() + time,
        None => time,
    }
}
