//! Why a request is decided as it is: the arithmetic of one decision, step by step.
//!
//! An explanation is not a trace of the code that decides. It works the decision out once more, in formulas over what
//! is stored, the time and the cost, and its outcome is read from those formulas alone: whoever evaluates them comes to
//! the same decision, and tests do. Rules of a user's own, several limits at once and penalties are not explained.

use alloc::boxed::Box;
use alloc::vec::Vec;
use core::fmt;
use core::ops::{Add, Mul, Sub};

use crate::bucket::{BucketState, Level, saturate};
use crate::fixed_window::FixedWindowState;
use crate::limit::{Anchor, Kind, Limit, LimitState, Machine};
use crate::sliding_window_counter::SlidingWindowCounterState;
use crate::sliding_window_log::{SlidingWindowLog, SlidingWindowLogState};
use crate::{Algorithm as _, Cost, Decision, Source, Tick, Ticks, Used};

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

/// A formula over whole numbers. What would pass 2¹²⁷ stops there, as levels and waits do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Formula {
    /// A number that speaks for itself.
    Number(i128),
    /// A number that is known: of the limit, of the state, of the request, or of an earlier step.
    Known {
        /// Its name.
        name: &'static str,
        /// What it is.
        value: i128,
    },
    /// Two formulas, combined.
    Of(Operation, Box<(Self, Self)>),
}

/// What is done to two numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// a + b
    Plus,
    /// a − b
    Minus,
    /// max(0, a − b)
    Above,
    /// a · b
    Times,
    /// a / b, rounded down. Never by 0.
    Over,
    /// a / b, rounded up. Never by 0.
    OverRoundedUp,
    /// What is left of a after whole b, from 0 on. Never of 0.
    Modulo,
    /// The greatest number that divides both.
    CommonDivisor,
    /// Whether a ≤ b: 1 or 0.
    AtMost,
    /// Whether a < b: 1 or 0.
    Below,
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

impl Formula {
    /// What it comes to.
    #[must_use]
    pub fn value(&self) -> i128 {
        match self {
            Self::Number(value) | Self::Known { value, .. } => *value,
            Self::Of(operation, both) => operation.of(both.0.value(), both.1.value()),
        }
    }

    fn is_answer(&self) -> bool {
        matches!(self, Self::Of(Operation::AtMost | Operation::Below, _))
    }

    fn of(self, operation: Operation, other: Self) -> Self {
        Self::Of(operation, Box::new((self, other)))
    }

    fn above(self, other: Self) -> Self {
        self.of(Operation::Above, other)
    }

    fn over(self, other: Self) -> Self {
        self.of(Operation::Over, other)
    }

    fn over_rounded_up(self, other: Self) -> Self {
        self.of(Operation::OverRoundedUp, other)
    }

    fn at_most(self, other: Self) -> Self {
        self.of(Operation::AtMost, other)
    }

    /// Writes it with names, or with the numbers they stand for.
    fn write(&self, f: &mut fmt::Formatter<'_>, named: bool) -> fmt::Result {
        match self {
            Self::Known { name, .. } if named => f.write_str(name),
            Self::Known { value, .. } | Self::Number(value) => write!(f, "{value}"),
            Self::Of(operation, both) => {
                let (before, between, after) = operation.signs();
                f.write_str(before)?;
                both.0.write_within(f, named, *operation, false)?;
                f.write_str(between)?;
                both.1.write_within(f, named, *operation, true)?;
                f.write_str(after)
            }
        }
    }

    fn write_within(
        &self,
        f: &mut fmt::Formatter<'_>,
        named: bool,
        outer: Operation,
        is_right: bool,
    ) -> fmt::Result {
        let needs = match self {
            Self::Of(inner, _) => {
                inner.binds() < outer.holds() || (is_right && inner.binds() == outer.holds())
            }
            Self::Known { value, .. } => !named && *value < 0 && is_right,
            Self::Number(value) => *value < 0 && is_right,
        };
        if !needs {
            return self.write(f, named);
        }
        f.write_str("(")?;
        self.write(f, named)?;
        f.write_str(")")
    }
}

/// First with names, then with numbers, where there are names.
impl fmt::Display for Formula {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.write(f, true)?;
        if let Self::Of(..) = self {
            f.write_str(" = ")?;
            self.write(f, false)?;
        }
        Ok(())
    }
}

impl Operation {
    fn of(self, a: i128, b: i128) -> i128 {
        match self {
            Self::Plus => a.saturating_add(b),
            Self::Minus => a.saturating_sub(b),
            Self::Above => a.saturating_sub(b).max(0),
            Self::Times => a.saturating_mul(b),
            Self::Over => a.checked_div_euclid(b).unwrap_or(0),
            Self::OverRoundedUp => {
                let whole = a.checked_div_euclid(b).unwrap_or(0);
                whole + i128::from(a.checked_rem_euclid(b).unwrap_or(0) > 0)
            }
            Self::Modulo => a.checked_rem_euclid(b).unwrap_or(0),
            Self::CommonDivisor => {
                let (mut a, mut b) = (a, b);
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                a
            }
            Self::AtMost => (a <= b).into(),
            Self::Below => (a < b).into(),
        }
    }

    const fn signs(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Self::Plus => ("", " + ", ""),
            Self::Minus => ("", " − ", ""),
            Self::Above => ("max(0, ", " − ", ")"),
            Self::Times => ("", " · ", ""),
            Self::Over => ("⌊", " / ", "⌋"),
            Self::OverRoundedUp => ("⌈", " / ", "⌉"),
            Self::Modulo => ("", " mod ", ""),
            Self::CommonDivisor => ("gcd(", ", ", ")"),
            Self::AtMost => ("", " ≤ ", ""),
            Self::Below => ("", " < ", ""),
        }
    }

    /// How strongly it holds its sides.
    const fn holds(self) -> u8 {
        match self {
            Self::CommonDivisor => 0,
            Self::Above => Self::Minus.binds(),
            Self::Over | Self::OverRoundedUp => Self::Times.binds(),
            other => other.binds(),
        }
    }

    /// How strongly it holds together, seen from outside.
    const fn binds(self) -> u8 {
        match self {
            Self::AtMost | Self::Below => 0,
            Self::Plus | Self::Minus => 1,
            Self::Times | Self::Modulo => 2,
            Self::Above | Self::Over | Self::OverRoundedUp | Self::CommonDivisor => 3,
        }
    }
}

impl Add for Formula {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        self.of(Operation::Plus, other)
    }
}

impl Sub for Formula {
    type Output = Self;

    fn sub(self, other: Self) -> Self {
        self.of(Operation::Minus, other)
    }
}

impl Mul for Formula {
    type Output = Self;

    fn mul(self, other: Self) -> Self {
        self.of(Operation::Times, other)
    }
}

fn known(name: &'static str, value: impl Into<i128>) -> Formula {
    Formula::Known { name, value: value.into() }
}

fn number(value: i128) -> Formula {
    Formula::Number(value)
}

/// An explanation in the making.
struct Working {
    steps: Vec<Step>,
    kind: Kind,
    limit: Formula,
    window: Formula,
    burst: Formula,
    cost: Formula,
    now: Formula,
}

impl Working {
    fn new(limit: &Limit, now: Tick, cost: Cost) -> Self {
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
    fn step(&mut self, name: &'static str, says: &'static str, formula: Formula) -> Formula {
        let value = formula.value();
        self.steps.push(Step { says, name, formula, tells: None });
        Formula::Known { name, value }
    }

    /// Adds a step that is a part of the decision.
    fn tell(&mut self, part: Tells, says: &'static str, formula: Formula) -> i128 {
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

    fn explanation(self, capacity: Cost) -> Explanation {
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
            refused_by: (!allowed).then_some(0),
            shadow_refused_by: None,
            source: Source::Store,
        };
        Explanation { steps, decision }
    }

    fn set_back(&mut self, last: Tick) {
        let behind = known("last", last.0) - self.now.clone();
        self.step(
            "set_back",
            "the clock was set back by more than a window: what was used counts from now on",
            self.window.clone().of(Operation::Below, behind),
        );
    }

    /// The time since the last change; and how far before it this request lies, if it does.
    fn times(&mut self, last: Tick, is_fresh: bool) -> (Formula, Option<Formula>) {
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
    fn never_fits(&mut self, capacity: &Formula) -> bool {
        let fits = self.cost.clone().at_most(capacity.clone());
        let exceeds = fits.value() == 0;
        if exceeds {
            self.tell(Tells::Allowed, "the cost exceeds the capacity: no wait will do", fits);
        }
        exceeds
    }

    fn bucket<N: Level>(&mut self, state: &BucketState<N>) {
        let words = Words::of(self.kind);
        let divisor = self.limit.clone().of(Operation::CommonDivisor, self.window.clone());
        let unit = self.step("W′", words.unit, self.window.clone().over(divisor.clone()));
        let drain = self.step("L′", words.drain, self.limit.clone().over(divisor));
        let level: u128 = state.level.into();
        // Levels stay below 2¹²⁷: see `MAX_TIME_TO_FRESH_IN_DEBT`.
        let level = i128::try_from(level).unwrap_or(i128::MAX);
        let level = self.step("level", words.level, known("level", level));
        let (elapsed, late) = self.times(state.last, state.level == N::ZERO);
        let drained = self.step("drained", words.drained, elapsed * drain.clone());
        let used = self.step("used", words.used, level.above(drained));
        self.step(
            words.shown_name,
            words.shown,
            match self.kind {
                Kind::TokenBucket => {
                    (self.burst.clone() * unit.clone()).above(used.clone()).over(unit.clone())
                }
                Kind::Gcra => used.clone().over_rounded_up(drain.clone()),
                _ => used.clone().over(unit.clone()),
            },
        );
        let whole = |formula: Formula| formula.over_rounded_up(drain.clone());
        let mut after = used.clone();
        if !self.never_fits(&self.burst.clone()) {
            let room = (self.burst.clone() - self.cost.clone()) * unit.clone();
            let room = self.step("room", words.room, room);
            let fits = used.clone().at_most(room.clone());
            if self.tell(Tells::Allowed, words.fits, fits) == 1 {
                let charged = used.clone() + self.cost.clone() * unit.clone();
                after = self.step("after", words.after, charged);
                if self.kind == Kind::LeakyBucket {
                    let ahead = plus(&late, whole(used));
                    self.tell(
                        Tells::Delay,
                        "what was there before it drains first, rounded up",
                        ahead,
                    );
                }
            } else {
                let wait = plus(&late, whole(used - room));
                self.tell(
                    Tells::RetryAfter,
                    "the time until the excess has drained, rounded up",
                    wait,
                );
            }
        }
        let left = (self.burst.clone() * unit.clone()).above(after.clone()).over(unit);
        self.tell(Tells::Remaining, "what would still fit, rounded down", left);
        let reset = if after.value() > 0 { plus(&late, whole(after)) } else { number(0) };
        self.tell(Tells::ResetAfter, "the time until all of it has drained, rounded up", reset);
    }

    fn fixed_window(&mut self, state: &FixedWindowState, anchor: Anchor) {
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

    fn log(&mut self, rule: &SlidingWindowLog, state: &SlidingWindowLogState) {
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

    fn counter(&mut self, state: &SlidingWindowCounterState) {
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

    /// Compares what is used with what may be, in a window; what is used afterwards.
    fn compared(&mut self, used: Formula) -> Formula {
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

    fn remaining(&mut self, after: &Formula) {
        let left = self.limit.clone().above(after.clone());
        self.tell(Tells::Remaining, "what would still fit", left);
    }
}

/// A time that counts from the last change, for a request that lies before it.
fn plus(late: &Option<Formula>, time: Formula) -> Formula {
    match late {
        Some(late) => late.clone() + time,
        None => time,
    }
}

/// How each kind of bucket calls the same numbers.
struct Words {
    unit: &'static str,
    drain: &'static str,
    level: &'static str,
    drained: &'static str,
    used: &'static str,
    shown_name: &'static str,
    shown: &'static str,
    room: &'static str,
    fits: &'static str,
    after: &'static str,
}

impl Words {
    const fn of(kind: Kind) -> Self {
        match kind {
            Kind::Gcra => Self {
                unit: "how far one request moves the arrival time, in parts of a tick",
                drain: "how many parts a tick has",
                level: "how far the arrival time was ahead of the last change, in those parts",
                drained: "how far time has come since",
                used: "how far the arrival time is ahead of now (or behind: then not at all)",
                shown_name: "ahead",
                shown: "the same in ticks, rounded up",
                room: "the farthest ahead at which the cost conforms",
                fits: "whether it conforms",
                after: "how far the arrival time is ahead with it",
            },
            Kind::LeakyBucket => Self {
                unit: "what one request pours in, in parts",
                drain: "how many parts drain a tick",
                level: "the level at the last change",
                drained: "what has drained since",
                used: "the level now",
                shown_name: "waiting",
                shown: "the same in whole requests",
                room: "the highest level on which the cost fits",
                fits: "whether it fits",
                after: "the level with it",
            },
            _ => Self {
                unit: "how many parts a token has",
                drain: "how many parts are earned a tick",
                level: "used at the last change, in those parts",
                drained: "earned since",
                used: "used now",
                shown_name: "tokens",
                shown: "the whole tokens there are",
                room: "the most that may be used for the cost to fit",
                fits: "whether there are tokens enough",
                after: "used with it",
            },
        }
    }
}
