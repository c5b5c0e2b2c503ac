//! The steps of a fixed window, a sliding window log and a sliding window counter.

use super::builder::{ExplanationBuilder, plus};
use super::formula::{Formula, Operation, named, number};
use super::{DecisionField, value_of};
use crate::Tick;
use crate::fixed_window::FixedWindowState;
use crate::numbers::{Anchor, saturate};
use crate::sliding_window_counter::SlidingWindowCounterState;
use crate::sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};

impl ExplanationBuilder {
    pub(super) fn fixed_window(&mut self, state: &FixedWindowState, anchor: Anchor) {
        let last = named("last", state.last.0);
        let count = self.step(
            "count",
            "the count at the last change, in its window",
            named("count", state.count),
        );
        let (elapsed, _) = self.times(state.last, state.count == 0);
        let into = named("into", state.into);
        let left = self.step(
            "left",
            "the rest of that window at the last change",
            self.window.clone() - into,
        );
        let over =
            self.step("over", "whether that window has ended", left.clone().at_most(elapsed));
        let is_over = over.value() == 1;
        let used = if is_over {
            self.step("used", "the count of an ended window no longer applies", number(0))
        } else {
            self.step("used", "the count in the current window", count)
        };
        let until_end = left + last - self.now.clone();
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compare_with_limit(used.clone());
            if value_of(&self.steps, DecisionField::Allowed) == Some(0) {
                let description = "the time until the window ends";
                self.field_step(DecisionField::RetryAfter, description, until_end.clone());
            }
        }
        self.remaining(&after);
        let description = "the time until the window ends, or 0 if nothing is used";
        let reset = match (after.value(), used.value()) {
            (0, _) => number(0),
            (_, 0) if anchor == Anchor::Clock => {
                self.window.clone() - self.now.clone().of(Operation::Modulo, self.window.clone())
            }
            (_, 0) => self.window.clone(),
            _ => until_end,
        };
        self.field_step(DecisionField::ResetAfter, description, reset);
    }

    pub(super) fn log(&mut self, rule: &SlidingWindowLog, state: &SlidingWindowLogState) {
        let now = Tick(i64::try_from(self.now.value()).unwrap_or(i64::MAX));
        let expired = rule.expired(state, now);
        let gone = state.total_before(expired).wrapping_sub(state.total_before(0));
        let total = state.total().wrapping_sub(state.total_before(0));
        let total = self.step("logged", "the allowed units in the log", named("logged", total));
        let gone = self.step(
            "gone",
            "the units of entries that are W old or older and no longer count",
            named("gone", gone),
        );
        let used = self.step("used", "the allowed units in the last window", total - gone);
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compare_with_limit(used.clone());
            if value_of(&self.steps, DecisionField::Allowed) == Some(0) {
                let room = named("room", self.limit.value() - self.cost.value());
                let excess =
                    self.step("excess", "the units that must expire first", used.clone() - room);
                let entry = state.expiring(expired, saturate(excess.value().unsigned_abs()));
                if let Some(entry) = entry {
                    let entry = self.step(
                        "entry",
                        "the time of the request with which these units will have expired",
                        named("entry", entry.0),
                    );
                    let wait = self.window.clone() + entry - self.now.clone();
                    self.field_step(
                        DecisionField::RetryAfter,
                        "the time until that request is W old",
                        wait,
                    );
                }
            }
        }
        self.remaining(&after);
        let newest = state.entries.back().filter(|_| used.value() > 0).map(|(tick, _)| *tick);
        let is_charged = after.value() > used.value();
        let newest = match newest {
            Some(newest) if is_charged => Some(newest.max(state.last).max(now)),
            None if is_charged => Some(now),
            newest => newest,
        };
        let reset = newest.map_or(number(0), |newest| {
            self.window.clone() + named("newest", newest.0) - self.now.clone()
        });
        self.field_step(
            DecisionField::ResetAfter,
            "the time until the newest request is W old",
            reset,
        );
    }

    pub(super) fn counter(&mut self, state: &SlidingWindowCounterState) {
        let is_fresh = state.count == 0 && state.previous == 0;
        let count = self.step(
            "count",
            "the count at the last change, in its window",
            named("count", state.count),
        );
        let previous = self.step(
            "previous",
            "the count in the window before it",
            named("previous", state.previous),
        );
        let (elapsed, late) = self.times(state.last, is_fresh);
        let place = self.step(
            "place",
            "the time from the start of that window to this request",
            named("into", state.into) + elapsed,
        );
        let windows = place.clone().over(self.window.clone()).value();
        let (count, previous, into) = match windows {
            0 if !is_fresh => (
                self.step(
                    "current",
                    "the count in the current window, which is still that window",
                    count,
                ),
                self.step("before", "the count in the window before it", previous),
                self.step(
                    "e",
                    "the time from the start of the current window to this request",
                    place,
                ),
            ),
            1 if !is_fresh => (
                self.step("current", "a new window has begun", number(0)),
                self.step("before", "the counted window is now the previous one", count),
                self.step(
                    "e",
                    "the time from the start of the current window to this request",
                    place - self.window.clone(),
                ),
            ),
            _ => {
                let into = self.now.clone().of(Operation::Modulo, self.window.clone());
                (
                    self.step("current", "nothing is counted in the current window", number(0)),
                    self.step("before", "nothing is counted in the previous window", number(0)),
                    self.step(
                        "e",
                        "the time from the start of the current window to this request",
                        into,
                    ),
                )
            }
        };
        let weight = previous.clone() * (self.window.clone() - into.clone());
        let weighted = self.step(
            "weighted",
            "the previous window, weighted by how much of it lies within the last W, rounded down",
            weight.over(self.window.clone()),
        );
        let used = self.step("used", "the estimate for the last window", weighted + count.clone());
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compare_with_limit(used.clone());
            if value_of(&self.steps, DecisionField::Allowed) == Some(0) {
                self.wait_for_weight(&count, &previous, &into, &late);
            }
        }
        self.remaining(&after);
        let left = self.window.clone() - into;
        let is_charged = after.value() > used.value();
        let reset = match (count.value(), previous.value()) {
            (0, 0) if !is_charged => number(0),
            (0, _) if !is_charged => plus(&late, left),
            _ => plus(&late, left + self.window.clone()),
        };
        self.field_step(
            DecisionField::ResetAfter,
            "the time until both windows have expired",
            reset,
        );
    }

    /// Adds the steps for the time until the weighted count leaves enough room, in this window or in the next.
    fn wait_for_weight(
        &mut self,
        count: &Formula,
        previous: &Formula,
        into: &Formula,
        late: &Option<Formula>,
    ) {
        let room = named("room", self.limit.value() - self.cost.value());
        let (window, one) = (self.window.clone(), number(1));
        let place = if count.value() <= room.value() {
            let least = (room - count.clone() + one.clone()) * window.clone() - one;
            let weight = self.step(
                "weight",
                "the largest part of the previous window at which its count leaves enough room, in ticks",
                least.over(previous.clone()),
            );
            self.step(
                "at",
                "when only this part still counts, after the start of the current window",
                window.above(weight),
            )
        } else {
            let least = (room + one.clone()) * window.clone() - one;
            let weight = self.step(
                "weight",
                "the current count alone leaves no room, so the wait ends in the next window: the largest part of the current window at which its count leaves enough room, in ticks",
                least.over(count.clone()),
            );
            let next = window.clone() + window.above(weight);
            self.step(
                "at",
                "when only this part still counts, after the start of the current window",
                next,
            )
        };
        let wait = plus(late, place.above(into.clone()));
        self.field_step(DecisionField::RetryAfter, "the time until that moment", wait);
    }
}
