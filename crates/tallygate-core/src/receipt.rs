//! Receipts: what a charge leaves behind, so that it can be returned later as far as it still counts.
//!
//! Units drain in the order in which they were charged. A reservation that is settled late may return only
//! units that have not drained yet: otherwise reserving, waiting and canceling would mint units.
//!
//! For a bucket, the receipt is the level that the charge left behind. It drains as the bucket does, and what
//! is left of it is an upper bound on what can be returned. That is exact as long as units leave the bucket
//! by draining only. A refund or another settlement also lowers the level, and then the units that were
//! charged later drain sooner. [`Returns`] remembers these steps: a receipt counts at most the lowest level
//! since its charge. A settlement then leaves the same state as if the reservation had been charged only what
//! it kept, so every bound of the bucket holds for the settled costs.
//!
//! For a window, the receipt is the time of the charge: it names the window, or the entry of a log.
//!
//! A cost that one policy allows is charged to the other policies of the client without asking, and a policy that has
//! less room drops the rest. The receipt knows how many units were dropped under each limit. Of an estimate `e` with
//! `d` units dropped, `e - d` were charged. If the actual cost is `a`, then `min(a, e - d)` of them stay, and the
//! others are returned: `max(0, (e - a) - d)`.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::Tick;
use crate::codec::{self, DecodeError, Reader};
use crate::policy::Policy;

/// What a charge left behind under each limit that it was charged to.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Receipt {
    /// Nothing was charged, or nothing can be returned.
    #[default]
    Nothing,
    /// Charged to one limit.
    Limit(Mark),
    /// Charged to the limits of a policy, in their order. A limit that was not charged has
    /// [`Nothing`](Self::Nothing).
    Each(Box<[Self]>),
    /// Charged to every policy that the client's state is kept under; the first is the one that decided.
    Policies(Vec<(Arc<Policy>, Self)>),
}

/// What a charge left behind under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    at: Tick,
    queue: Option<Queue>,
    /// How many units of the cost were not charged. It is not stored with [`Returns`]: a step there has none.
    dropped: u128,
}

/// The level of a bucket at a time, and how much of it drains per tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Queue {
    as_of: Tick,
    level: u128,
    drain: u64,
}

impl Queue {
    /// What is left of the level at a time not before it was taken.
    fn left(&self, at: Tick) -> u128 {
        let drained = u128::from(at.since(self.as_of).0) * u128::from(self.drain);
        self.level.saturating_sub(drained)
    }

    fn lower_to(&mut self, other: &Self) {
        let as_of = self.as_of.max(other.as_of);
        let level = self.left(as_of).min(other.left(as_of));
        *self = Self { as_of, level, ..*self };
    }
}

impl Mark {
    /// A charge to a window or to a log at a time.
    #[must_use]
    pub const fn at(at: Tick) -> Self {
        Self { at, queue: None, dropped: 0 }
    }

    /// A charge to a bucket that left this level behind, of which `drain` leaves per tick.
    #[must_use]
    pub const fn of_level(at: Tick, level: u128, drain: u64) -> Self {
        Self { at, queue: Some(Queue { as_of: at, level, drain }), dropped: 0 }
    }

    /// Returns the time of the charge.
    #[must_use]
    pub const fn charged_at(&self) -> Tick {
        self.at
    }

    /// Returns how many units can be returned at most if a cost turns out to be `less` units lower: units that were
    /// not charged are not returned.
    #[must_use]
    pub const fn returnable(&self, less: u128) -> u128 {
        less.saturating_sub(self.dropped)
    }

    /// Returns how much of the charge and of what was charged before it has not drained at `now`, given the
    /// time of the bucket's last change. A bucket that changed last before the receipt was taken is not the
    /// one that was charged: its clock was set back, or its state was lost.
    #[must_use]
    pub fn undrained(&self, last_change: Tick, now: Tick) -> u128 {
        match &self.queue {
            Some(queue) if queue.as_of <= last_change => queue.left(now.max(last_change)),
            _ => 0,
        }
    }
}

impl Receipt {
    /// The receipt of a charge to a policy of one window, made at a time.
    #[must_use]
    pub fn of_window(charged_at: Tick) -> Self {
        Self::Each([Self::Limit(Mark::at(charged_at))].into())
    }

    /// Returns the mark of a rule that is one limit.
    #[must_use]
    pub const fn mark(&self) -> Option<&Mark> {
        match self {
            Self::Limit(mark) => Some(mark),
            _ => None,
        }
    }

    /// Returns the time of the charge, if anything was charged.
    #[must_use]
    pub fn charged_at(&self) -> Option<Tick> {
        match self {
            Self::Nothing => None,
            Self::Limit(mark) => Some(mark.at),
            Self::Each(each) => each.iter().find_map(Self::charged_at),
            Self::Policies(policies) => policies.iter().find_map(|(_, one)| one.charged_at()),
        }
    }

    /// Notes that units of the cost were not charged to a limit.
    #[must_use]
    pub const fn with_dropped(mut self, units: u128) -> Self {
        if let Self::Limit(mark) = &mut self {
            mark.dropped = units;
        }
        self
    }

    /// Returns the receipt of one of a policy's limits; `None` if the limit was not charged.
    #[must_use]
    pub fn of_limit(&self, limit: usize) -> Option<&Self> {
        match self {
            Self::Each(each) => each.get(limit).filter(|one| **one != Self::Nothing),
            other => Some(other),
        }
    }

    /// Returns the receipt under a policy, or [`Nothing`](Self::Nothing).
    #[must_use]
    pub fn under(&self, policy: &Arc<Policy>) -> &Self {
        self.place_of(policy).map_or(&Self::Nothing, |(_, one)| one)
    }

    /// Returns the policy that allowed the cost: the first that is listed.
    #[must_use]
    pub fn decided_by(&self) -> Option<&Arc<Policy>> {
        match self {
            Self::Policies(policies) => policies.first().map(|(policy, _)| policy),
            _ => None,
        }
    }

    /// Returns whether a policy is the one that allowed the cost.
    #[must_use]
    pub fn is_decided_by(&self, policy: &Arc<Policy>) -> bool {
        self.place_of(policy).is_some_and(|(place, _)| place == 0)
    }

    fn place_of(&self, policy: &Arc<Policy>) -> Option<(usize, &Self)> {
        let Self::Policies(policies) = self else { return None };
        let find = |is: &dyn Fn(&Arc<Policy>) -> bool| policies.iter().position(|(one, _)| is(one));
        let same = find(&|other| Arc::ptr_eq(other, policy) || other == policy);
        // A policy that was read from a store has no name.
        let place = same.or_else(|| find(&|other| other.limits() == policy.limits()))?;
        Some((place, &policies[place].1))
    }

    /// Removes limits that were not charged: those of the policy that decided, by their index.
    #[must_use]
    pub fn without(mut self, limits: &[usize]) -> Self {
        let each = match &mut self {
            Self::Policies(policies) => policies.first_mut().map(|(_, receipt)| receipt),
            receipt => Some(receipt),
        };
        if let Some(Self::Each(each)) = each {
            for limit in limits {
                if let Some(one) = each.get_mut(*limit) {
                    *one = Self::Nothing;
                }
            }
        }
        self
    }

    /// Lowers every level to that of a later receipt of the same state.
    fn lower_to(&mut self, later: &Self) {
        match (&mut *self, later) {
            (Self::Nothing, _) => {}
            (Self::Limit(mark), Self::Limit(other)) => {
                if let (Some(queue), Some(other)) = (&mut mark.queue, &other.queue) {
                    queue.lower_to(other);
                }
            }
            (Self::Each(each), Self::Each(others)) if each.len() == others.len() => {
                each.iter_mut().zip(others).for_each(|(one, other)| one.lower_to(other));
            }
            (Self::Policies(policies), Self::Policies(_)) => {
                for (policy, one) in policies {
                    one.lower_to(later.under(policy));
                }
            }
            _ => *self = Self::Nothing,
        }
    }

    /// Whether it holds the level of a bucket.
    fn has_level(&self) -> bool {
        match self {
            Self::Nothing => false,
            Self::Limit(mark) => mark.queue.is_some(),
            Self::Each(each) => each.iter().any(Self::has_level),
            Self::Policies(policies) => policies.iter().any(|(_, one)| one.has_level()),
        }
    }
}

/// The steps by which a key's usage was lowered other than by draining: returns and resets.
///
/// Steps are ordered by a number that grows with each of them. A reservation remembers the number of the last
/// step before its charge. The list is bounded: of too many steps, the oldest are merged, so that older reservations return
/// less than they could, never more.
#[derive(Clone, Debug, PartialEq)]
pub struct Returns {
    /// Reservations below this number are void: the key was reset.
    void_below: i64,
    /// Reservations below this number return nothing.
    closed_below: i64,
    /// Until when it matters.
    until: Tick,
    /// The oldest first.
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
struct Step {
    number: i64,
    /// From when on every charge before it has drained.
    until: Tick,
    /// What the step left.
    left: Receipt,
}

/// A time after which there is none.
const NEVER: Tick = Tick(i64::MAX);
/// How many steps are kept.
const MAX_STEPS: usize = 32;

impl Default for Returns {
    fn default() -> Self {
        Self {
            void_below: i64::MIN,
            closed_below: i64::MIN,
            until: Tick(i64::MIN),
            steps: Vec::new(),
        }
    }
}

impl Returns {
    /// Returns from when on nothing of it matters.
    #[must_use]
    pub const fn until(&self) -> Tick {
        self.until
    }

    /// Returns whether a reservation was made before the last reset.
    #[must_use]
    pub const fn voids(&self, number: i64) -> bool {
        number < self.void_below
    }

    /// Lowers a reservation's receipt to what it can still return.
    pub fn lower(&self, number: i64, receipt: &mut Receipt) {
        if number < self.closed_below {
            *receipt = Receipt::Nothing;
        }
        let later = self.steps.partition_point(|step| step.number <= number);
        self.steps[later..].iter().for_each(|step| receipt.lower_to(&step.left));
    }

    /// Notes at `now` that units were returned and what that left. `until` is the time at which the state
    /// before it would have been fresh; the last tick of all means never.
    pub fn note(&mut self, number: i64, left: Receipt, now: Tick, until: Tick) {
        let matters = |until: Tick| until > now || until == NEVER;
        if !matters(until) || !left.has_level() {
            return;
        }
        // By a clock that was set back, the order of the steps stays.
        let number = self.steps.last().map_or(number, |last| last.number.max(number));
        self.until = self.until.max(until);
        self.steps.retain(|step| matters(step.until));
        self.steps.push(Step { number, until, left });
        if self.steps.len() > MAX_STEPS {
            let oldest = self.steps.remove(0);
            let next = &mut self.steps[0];
            // A charge between the two counts as one before both.
            next.left.lower_to(&oldest.left);
            next.until = next.until.max(oldest.until);
        }
    }

    /// Notes a step after which no earlier reservation can return anything, until a time.
    pub fn close(&mut self, number: i64, until: Tick) {
        self.closed_below = self.closed_below.max(number);
        self.until = self.until.max(until);
        self.steps.retain(|step| step.number > number);
    }

    /// Notes a reset: earlier reservations are void, until a time.
    pub fn reset(&mut self, number: i64, until: Tick) {
        self.void_below = self.void_below.max(number);
        self.close(number, until);
    }

    /// Appends it to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        for time in [self.void_below, self.closed_below, self.until.0] {
            codec::put_tick(out, Tick(time));
        }
        codec::put(out, self.steps.len() as u64);
        for step in &self.steps {
            codec::put_tick(out, Tick(step.number));
            codec::put_tick(out, step.until);
            step.left.encode(out);
        }
    }

    /// Reads back what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// The bytes are something else.
    pub fn decode(bytes: &[u8]) -> Result<Self, DecodeError> {
        let mut reader = Reader(bytes);
        let void_below = reader.tick("reset")?.0;
        let closed_below = reader.tick("end of returns")?.0;
        let until = reader.tick("expiry")?;
        let count: u64 = reader.number("number of returns")?;
        let mut steps = Vec::new();
        for _ in 0..count {
            steps.push(Step {
                number: reader.tick("return")?.0,
                until: reader.tick("expiry")?,
                left: Receipt::decode(&mut reader)?,
            });
        }
        reader.end()?;
        Ok(Self { void_below, closed_below, until, steps })
    }
}

impl Receipt {
    fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Nothing => out.push(0),
            Self::Limit(Mark { at, queue: None, .. }) => {
                out.push(1);
                codec::put_tick(out, *at);
            }
            Self::Limit(Mark { at, queue: Some(Queue { as_of, level, drain }), .. }) => {
                out.push(2);
                codec::put_tick(out, *at);
                codec::put_tick(out, *as_of);
                codec::put(out, *level);
                codec::put(out, *drain);
            }
            Self::Each(each) => {
                out.push(3);
                codec::put(out, each.len() as u64);
                each.iter().for_each(|one| one.encode(out));
            }
            Self::Policies(policies) => {
                out.push(4);
                codec::put(out, policies.len() as u64);
                for (policy, one) in policies {
                    let mut description = Vec::new();
                    policy.describe(&mut description);
                    codec::put(out, description.len() as u64);
                    out.extend(description);
                    one.encode(out);
                }
            }
        }
    }

    fn decode(reader: &mut Reader<'_>) -> Result<Self, DecodeError> {
        Ok(match reader.byte()? {
            0 => Self::Nothing,
            1 => Self::Limit(Mark::at(reader.tick("time of the charge")?)),
            2 => {
                let at = reader.tick("time of the charge")?;
                let as_of = reader.tick("time of the level")?;
                let (level, drain) = (reader.number("level")?, reader.number("rate")?);
                Self::Limit(Mark { at, queue: Some(Queue { as_of, level, drain }), dropped: 0 })
            }
            3 => {
                let count: u64 = reader.number("number of limits")?;
                let each =
                    (0..count).map(|_| Self::decode(reader)).collect::<Result<Vec<_>, _>>()?;
                if each.iter().any(|one| matches!(one, Self::Each(_) | Self::Policies(_))) {
                    return Err(DecodeError::Field { name: "receipt" });
                }
                Self::Each(each.into())
            }
            4 => {
                let count: u64 = reader.number("number of policies")?;
                let mut policies = Vec::new();
                for _ in 0..count {
                    let length = reader.number("length of a policy")?;
                    let policy = Policy::of_description(reader.bytes(length)?)?;
                    let one = Self::decode(reader)?;
                    if matches!(one, Self::Policies(_)) {
                        return Err(DecodeError::Field { name: "receipt" });
                    }
                    policies.push((Arc::new(policy), one));
                }
                Self::Policies(policies)
            }
            _ => return Err(DecodeError::Field { name: "receipt" }),
        })
    }
}
