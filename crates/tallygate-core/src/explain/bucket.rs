//! The steps of a bucket, in the words of a token bucket, a GCRA or a leaky bucket.

use super::Tells;
use super::formula::{Formula, Operation, known, number};
use super::working::{Working, plus};
use crate::bucket::{BucketState, Level};
use crate::numbers::Kind;

impl Working {
    pub(super) fn bucket<N: Level>(&mut self, state: &BucketState<N>) {
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
