//! An explanation in the making: the steps so far, and the numbers that every step may use.

use alloc::vec::Vec;

use super::formula::{Formula, Operation, known};
use super::{Explanation, Step, Tells, told};
use crate::limit::Limit;
use crate::numbers::{Kind, saturate};
use crate::{Cost, Decision, Source, Tick, Ticks};

/// An explanation in the making.
pub(super) struct Working {
    pub(super) steps: Vec<Step>,
    pub(super) kind: Kind,
    pub(super) limit: Formula,
    pub(super) window: Formula,
    pub(super) burst: Formula,
    pub(super) cost: Formula,
    pub(super) now: Formula,
}

impl Working {
    pub(super) fn new(limit: &Limit, now: Tick, cost: Cost) -> Self {
        let numbers = limit.numbers();
        Self {
            steps: Vec::new(),
            kind: numbers.kind,
            limit: known("L", numbers.limit),
            window: known("W", numbers.window.0),
            burst: known("B", numbers.burst),
            cost: known("c", cost),
            now: known("now", now.0),
        }
    }

    /// Adds a step; what it comes to, by its name.
    pub(super) fn step(
        &mut self,
        name: &'static str,
        says: &'static str,
        formula: Formula,
    ) -> Formula {
        let value = formula.value();
        self.steps.push(Step { says, name, formula, tells: None });
        Formula::Known { name, value }
    }

    /// Adds a step that is a part of the decision.
    pub(super) fn tell(&mut self, part: Tells, says: &'static str, formula: Formula) -> i128 {
        let name = match part {
            Tells::Allowed => "allowed",
            Tells::Remaining => "remaining",
            Tells::RetryAfter => "retry_after",
            Tells::ResetAfter => "reset_after",
            Tells::Delay => "delay",
        };
        let value = formula.value();
        self.steps.push(Step { says, name, formula, tells: Some(part) });
        value
    }

    pub(super) fn explanation(self, capacity: Cost) -> Explanation {
        let steps = self.steps;
        let whole = |part| told(&steps, part).map(|value| saturate(value.max(0).unsigned_abs()));
        let ticks = |part| whole(part).map(Ticks);
        let allowed = told(&steps, Tells::Allowed) == Some(1);
        let decision = Decision {
            allowed,
            limit: capacity,
            remaining: whole(Tells::Remaining).unwrap_or(0),
            retry_after: if allowed { Some(Ticks::ZERO) } else { ticks(Tells::RetryAfter) },
            reset_after: ticks(Tells::ResetAfter).unwrap_or(Ticks::ZERO),
            delay: ticks(Tells::Delay).unwrap_or(Ticks::ZERO),
            scarcest: Some(0),
            refused_by: (!allowed).then_some(0),
            shadow_refused_by: None,
            source: Source::Store,
        };
        Explanation { steps, decision }
    }

    pub(super) fn set_back(&mut self, last: Tick) {
        let behind = known("last", last.0) - self.now.clone();
        self.step(
            "set_back",
            "the clock was set back by more than a window: what was used counts from now on",
            self.window.clone().of(Operation::Below, behind),
        );
    }

    /// The time since the last change; and how far before it this request lies, if it does.
    pub(super) fn times(&mut self, last: Tick, is_fresh: bool) -> (Formula, Option<Formula>) {
        let last_change = known("last", last.0);
        let elapsed = self.now.clone().above(last_change.clone());
        let elapsed = self.step("elapsed", "time since the last change", elapsed);
        let is_late = !is_fresh && Formula::value(&self.now) < last.0.into();
        let late = is_late.then(|| {
            let says =
                "this comes late: it lies so far before the last change, whose time it is taken at";
            self.step("late", says, last_change - self.now.clone())
        });
        (elapsed, late)
    }

    /// Whether the cost exceeds what there can ever be; then what is told of that.
    pub(super) fn never_fits(&mut self, capacity: &Formula) -> bool {
        let fits = self.cost.clone().at_most(capacity.clone());
        let exceeds = fits.value() == 0;
        if exceeds {
            self.tell(Tells::Allowed, "the cost exceeds the capacity: no wait will do", fits);
        }
        exceeds
    }

    /// Compares what is used with what may be, in a window; what is used afterwards.
    pub(super) fn compared(&mut self, used: Formula) -> Formula {
        let room = self.step(
            "room",
            "the most that may be used for the cost to fit",
            self.limit.clone() - self.cost.clone(),
        );
        let fits = used.clone().at_most(room);
        if self.tell(Tells::Allowed, "whether the cost fits", fits) == 1 {
            self.step("after", "used with it", used + self.cost.clone())
        } else {
            used
        }
    }

    pub(super) fn remaining(&mut self, after: &Formula) {
        let left = self.limit.clone().above(after.clone());
        self.tell(Tells::Remaining, "what would still fit", left);
    }
}

/// A time that counts from the last change, for a request that lies before it.
pub(super) fn plus(late: &Option<Formula>, time: Formula) -> Formula {
    match late {
        Some(late) => late.clone() + time,
        None => time,
    }
}
