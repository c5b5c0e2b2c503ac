//! The steps of a bucket, described as a token bucket, a GCRA or a leaky bucket.

use super::DecisionField;
use super::builder::{ExplanationBuilder, plus};
use super::formula::{Formula, Operation, named, number};
use crate::bucket::{BucketState, Level};
use crate::numbers::Kind;

impl ExplanationBuilder {
    pub(super) fn bucket<N: Level>(&mut self, state: &BucketState<N>) {
        let words = Descriptions::of(self.kind);
        let divisor = self.limit.clone().of(Operation::CommonDivisor, self.window.clone());
        let unit = self.step("W′", words.unit, self.window.clone().over(divisor.clone()));
        let drain = self.step("L′", words.drain, self.limit.clone().over(divisor));
        let level: u128 = state.level.into();
        // Levels stay below 2¹²⁷: see `MAX_TIME_TO_FRESH_IN_DEBT`.
        let level = i128::try_from(level).unwrap_or(i128::MAX);
        let level = self.step("level", words.level, named("level", level));
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
            if self.field_step(DecisionField::Allowed, words.fits, fits) == 1 {
                let charged = used.clone() + self.cost.clone() * unit.clone();
                after = self.step("after", words.after, charged);
                if self.kind == Kind::LeakyBucket {
                    let ahead = plus(&late, whole(used));
                    self.field_step(
                        DecisionField::Delay,
                        "the time until the requests before it have drained, rounded up",
                        ahead,
                    );
                }
            } else {
                let wait = plus(&late, whole(used - room));
                self.field_step(
                    DecisionField::RetryAfter,
                    "the time until the excess has drained, rounded up",
                    wait,
                );
            }
        }
        let left = (self.burst.clone() * unit.clone()).above(after.clone()).over(unit);
        self.field_step(
            DecisionField::Remaining,
            "the largest cost that still fits, rounded down",
            left,
        );
        let reset = if after.value() > 0 { plus(&late, whole(after)) } else { number(0) };
        self.field_step(
            DecisionField::ResetAfter,
            "the time until everything has drained, rounded up",
            reset,
        );
    }
}

/// The descriptions of the same numbers for each kind of bucket.
struct Descriptions {
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

impl Descriptions {
    const fn of(kind: Kind) -> Self {
        match kind {
            Kind::Gcra => Self {
                unit: "how far one request moves the arrival time, in fractions of a tick",
                drain: "the fractions per tick",
                level: "how far the arrival time was ahead at the last change, in fractions",
                drained: "the time since then, in fractions",
                used: "how far the arrival time is ahead of now (0 if it is in the past)",
                shown_name: "ahead",
                shown: "the same in ticks, rounded up",
                room: "the farthest ahead at which the cost conforms",
                fits: "whether the cost conforms",
                after: "how far the arrival time is ahead after this request",
            },
            Kind::LeakyBucket => Self {
                unit: "how much one request adds to the level",
                drain: "how much drains per tick",
                level: "the level at the last change",
                drained: "how much has drained since",
                used: "the level now",
                shown_name: "waiting",
                shown: "the same in whole requests",
                room: "the highest level at which the cost fits",
                fits: "whether the cost fits",
                after: "the level after this request",
            },
            _ => Self {
                unit: "the fractions per token",
                drain: "the fractions that are earned per tick",
                level: "used at the last change, in fractions of a token",
                drained: "earned since",
                used: "used now",
                shown_name: "tokens",
                shown: "the whole tokens that are available",
                room: "the most that may be used for the cost to fit",
                fits: "whether there are enough tokens",
                after: "used after this request",
            },
        }
    }
}
