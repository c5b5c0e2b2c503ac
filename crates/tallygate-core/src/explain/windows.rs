//! The steps of a fixed window, a sliding window log and a sliding window counter.

use super::formula::{Formula, Operation, known, number};
use super::working::{Working, plus};
use super::{Tells, told};
use crate::Tick;
use crate::fixed_window::FixedWindowState;
use crate::numbers::{Anchor, saturate};
use crate::sliding_window_counter::SlidingWindowCounterState;
use crate::sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};

impl Working {
    pub(super) fn fixed_window(&mut self, state: &FixedWindowState, anchor: Anchor) {
        let last = known("last", state.last.0);
        let count = self.step(
            "count",
            "counted at the last change, in its window",
            known("count", state.count),
        );
        let (elapsed, _) = self.times(state.last, state.count == 0);
        let into = known("into", state.into);
        let left =
            self.step("left", "what its window still had to go then", self.window.clone() - into);
        let over =
            self.step("over", "whether that window has ended since", left.clone().at_most(elapsed));
        let is_over = over.value() == 1;
        let used = if is_over {
            self.step("used", "a window that has ended counts for nothing", number(0))
        } else {
            self.step("used", "counted in the window of now", count)
        };
        let until_end = left + last - self.now.clone();
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compared(used.clone());
            if told(&self.steps, Tells::Allowed) == Some(0) {
                let says = "the time until the window ends";
                self.tell(Tells::RetryAfter, says, until_end.clone());
            }
        }
        self.remaining(&after);
        let says = "the time until the window ends, if it has used anything";
        let reset = match (after.value(), used.value()) {
            (0, _) => number(0),
            (_, 0) if anchor == Anchor::Clock => {
                self.window.clone() - self.now.clone().of(Operation::Modulo, self.window.clone())
            }
            (_, 0) => self.window.clone(),
            _ => until_end,
        };
        self.tell(Tells::ResetAfter, says, reset);
    }

    pub(super) fn log(&mut self, rule: &SlidingWindowLog, state: &SlidingWindowLogState) {
        let now = Tick(i64::try_from(self.now.value()).unwrap_or(i64::MAX));
        let expired = rule.expired(state, now);
        let gone = state.total_before(expired).wrapping_sub(state.total_before(0));
        let total = state.total().wrapping_sub(state.total_before(0));
        let total = self.step("logged", "admitted, as the log has it", known("logged", total));
        let gone =
            self.step("gone", "of that, W old or older: it no longer counts", known("gone", gone));
        let used = self.step("used", "admitted in the last window", total - gone);
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compared(used.clone());
            if told(&self.steps, Tells::Allowed) == Some(0) {
                let room = known("room", self.limit.value() - self.cost.value());
                let excess = self.step("excess", "how much must leave first", used.clone() - room);
                let entry = state.leaving(expired, saturate(excess.value().unsigned_abs()));
                if let Some(entry) = entry {
                    let entry = self.step(
                        "entry",
                        "when the request came with which that much will have left",
                        known("entry", entry.0),
                    );
                    let wait = self.window.clone() + entry - self.now.clone();
                    self.tell(Tells::RetryAfter, "the time until that one is W old", wait);
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
            self.window.clone() + known("newest", newest.0) - self.now.clone()
        });
        self.tell(Tells::ResetAfter, "the time until the newest is W old", reset);
    }

    pub(super) fn counter(&mut self, state: &SlidingWindowCounterState) {
        let is_fresh = state.count == 0 && state.previous == 0;
        let count = self.step(
            "count",
            "counted at the last change, in its window",
            known("count", state.count),
        );
        let previous = self.step(
            "previous",
            "counted in the window before that",
            known("previous", state.previous),
        );
        let (elapsed, late) = self.times(state.last, is_fresh);
        let place = self.step(
            "place",
            "how far after that window's start this is",
            known("into", state.into) + elapsed,
        );
        let windows = place.clone().over(self.window.clone()).value();
        let (count, previous, into) = match windows {
            0 if !is_fresh => (
                self.step("current", "the same window goes on", count),
                self.step("before", "and so does the one before", previous),
                self.step("e", "how far into the window this is", place),
            ),
            1 if !is_fresh => (
                self.step("current", "a new window has begun", number(0)),
                self.step("before", "the one that was counted in is now the one before", count),
                self.step("e", "how far into the window this is", place - self.window.clone()),
            ),
            _ => {
                let into = self.now.clone().of(Operation::Modulo, self.window.clone());
                (
                    self.step("current", "nothing counts any more in this window", number(0)),
                    self.step("before", "nor in the one before", number(0)),
                    self.step("e", "how far into the window this is", into),
                )
            }
        };
        let weight = previous.clone() * (self.window.clone() - into.clone());
        let weighted = self.step(
            "weighted",
            "the one before counts as far as the last W reach into it, rounded down",
            weight.over(self.window.clone()),
        );
        let used = self.step("used", "the estimate of the last window", weighted + count.clone());
        let mut after = used.clone();
        if !self.never_fits(&self.limit.clone()) {
            after = self.compared(used.clone());
            if told(&self.steps, Tells::Allowed) == Some(0) {
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
        self.tell(Tells::ResetAfter, "the time until both windows have left", reset);
    }

    /// When the weighted part has come down enough, in this window or in the next.
    fn wait_for_weight(
        &mut self,
        count: &Formula,
        previous: &Formula,
        into: &Formula,
        late: &Option<Formula>,
    ) {
        let room = known("room", self.limit.value() - self.cost.value());
        let (window, one) = (self.window.clone(), number(1));
        let place = if count.value() <= room.value() {
            let least = (room - count.clone() + one.clone()) * window.clone() - one;
            let weight = self.step(
                "weight",
                "the most of W with which the window before weighs little enough",
                least.over(previous.clone()),
            );
            self.step("at", "so far into this window that is", window.above(weight))
        } else {
            let least = (room + one.clone()) * window.clone() - one;
            let weight = self.step(
                "weight",
                "this window alone is too much; the most of W with which it weighs little enough later",
                least.over(count.clone()),
            );
            let next = window.clone() + window.above(weight);
            self.step("at", "so far after this window's start that is", next)
        };
        let wait = plus(late, place.above(into.clone()));
        self.tell(Tells::RetryAfter, "the time until then", wait);
    }
}
