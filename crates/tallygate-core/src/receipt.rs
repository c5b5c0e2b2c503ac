//! Receipts: records of charges, which limit what a settled reservation can return.
//!
//! Units drain in the order in which they were charged. A reservation that is settled late may return only units that
//! have not drained yet. Otherwise a client could gain units by reserving, waiting and canceling.
//!
//! **Buckets.** The receipt is the level after the charge. It drains as the bucket does, and the rest of it is an upper
//! bound on what can be returned. This bound is exact as long as units leave the bucket only by draining. A refund or
//! another settlement also lowers the level, and then units that were charged later drain sooner. [`Returns`] records
//! these steps, and a receipt counts at most the lowest level since its charge. So a settlement results in the same
//! state as if the reservation had charged only what it keeps, and every bound of the bucket holds for the settled
//! costs.
//!
//! **Windows.** A window is a bucket that does not drain. Its receipt is the count after the charge, and it counts at
//! most the lowest count of that window since the charge. Otherwise a refund and a settlement could both return the
//! same unit, the second one from the charge of another request.
//!
//! **Several settlements.** A settlement also lowers the recorded steps between its charge and itself by what it
//! returned: if the reservation had charged only what it keeps, the level after each of these steps would have been
//! lower. Otherwise two reservations could both return the units that a refund left.
//!
//! **Shadow limits.** The receipt contains the number of the run of requests that the reservation is in, also if the
//! shadow limit did not charge it.
//!
//! **Logs.** The receipt is the time of the charge. It identifies the entry of the log, which holds what is left of the
//! charge.
//!
//! **Several policies.** A cost that one policy allows is also charged to the other policies of the client, whether or
//! not they allow it. A policy with less room drops the rest. The receipt records how many units were dropped under each
//! limit. Of an estimate `e` with `d` dropped units, `e - d` were charged. If the actual cost is `a`, then
//! `min(a, e - d)` of them stay charged, and the others are returned: `max(0, (e - a) - d)`.

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::slice;

use crate::codec::{self, DecodeError, Reader};
use crate::doubles::{LARGEST, NumberReader};
use crate::limit::{Limit, Machine};
use crate::numbers::Kind;
use crate::policy::Policy;
use crate::{Cost, Tick};

/// The record of a charge under each limit that it was charged to.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Receipt {
    /// Nothing was charged, or nothing can be returned.
    #[default]
    Nothing,
    /// A charge to one limit.
    Limit(ChargeRecord),
    /// A shadow limit did not charge the cost.
    Uncharged {
        /// The number of the run of requests that the cost is in.
        run: u64,
    },
    /// A charge to the limits of a policy, in their order. A limit that was not charged has
    /// [`Nothing`](Self::Nothing) or [`Uncharged`](Self::Uncharged).
    Each(Box<[Self]>),
    /// A charge to every policy of the client. The first policy is the one that decided.
    Policies(Vec<(Arc<Policy>, Self)>),
}

/// The record of a charge under one limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChargeRecord {
    at: Tick,
    usage: Usage,
    /// How many units of the cost were not charged. It is not stored with [`Returns`]: a step there has none.
    dropped: u128,
    /// The number of the run of requests that the charge is in, under a shadow limit with a history; otherwise 0. It is
    /// not stored with [`Returns`] either.
    run: u64,
}

/// The lowest usage of a limit since a charge or a return.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Usage {
    /// The usage of a log, whose entries are in its state.
    Entry,
    /// The usage of a bucket.
    Level(Queue),
    /// The usage of a window and of the one before it.
    Counts(Counts),
}

/// The level of a bucket at a time, and how much of it drains per tick.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Queue {
    as_of: Tick,
    level: u128,
    drain: u64,
}

impl Queue {
    /// Returns what is left of the level at `at`, which is not before `as_of`.
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

/// The counts of two neighboring windows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Counts {
    /// The start of the later window.
    start: Tick,
    count: Cost,
    previous: Cost,
}

impl Counts {
    /// Returns the count of the window that contains a time.
    fn of_window_at(&mut self, at: Tick) -> &mut Cost {
        if at >= self.start { &mut self.count } else { &mut self.previous }
    }

    /// Lowers the count of the window that contains `at`, and that of the window before, to other counts.
    fn lower_to(&mut self, at: Tick, mut other: Self) {
        let is_same_window = self.start == other.start;
        self.count = self.count.min(*other.of_window_at(at));
        self.previous =
            self.previous.min(if is_same_window { other.previous } else { other.count });
    }
}

impl ChargeRecord {
    /// Creates the record of a charge to a log.
    #[must_use]
    pub const fn at(at: Tick) -> Self {
        Self { at, usage: Usage::Entry, dropped: 0, run: 0 }
    }

    /// Creates the record of a charge to a window: its position in the window, and the counts of this window and the
    /// previous one after the charge.
    #[must_use]
    pub const fn of_counts(at: Tick, into: u64, count: Cost, previous: Cost) -> Self {
        let start = Tick(at.0.saturating_sub_unsigned(into));
        Self { at, usage: Usage::Counts(Counts { start, count, previous }), dropped: 0, run: 0 }
    }

    /// Creates the record of a charge to a bucket: the level after the charge, which drains by `drain` per tick.
    #[must_use]
    pub const fn of_level(at: Tick, level: u128, drain: u64) -> Self {
        Self { at, usage: Usage::Level(Queue { as_of: at, level, drain }), dropped: 0, run: 0 }
    }

    /// Returns the time of the charge.
    #[must_use]
    pub const fn charged_at(&self) -> Tick {
        self.at
    }

    /// Returns how many units can be returned at most if a cost turns out to be `less` units lower.
    ///
    /// Units that were not charged are not returned, nor are units of a window that were already returned since the
    /// charge. For a bucket, [`undrained`](Self::undrained) is a further bound.
    #[must_use]
    pub fn returnable(&self, less: u128) -> u128 {
        let charged = less.saturating_sub(self.dropped);
        match self.usage {
            Usage::Counts(Counts { count, .. }) => charged.min(count.into()),
            Usage::Entry | Usage::Level(_) => charged,
        }
    }

    /// Returns how much of the charge, and of earlier charges, has not drained at `now`.
    ///
    /// `last_change` is the time of the bucket's last change. If it is before the charge, the clock was set back or the
    /// state was lost, and the result is 0.
    #[must_use]
    pub fn undrained(&self, last_change: Tick, now: Tick) -> u128 {
        match &self.usage {
            Usage::Level(queue) if queue.as_of <= last_change => queue.left(now.max(last_change)),
            _ => 0,
        }
    }

    /// Lowers the usage to that of another mark of the same limit.
    fn lower_to(&mut self, other: &Self) {
        match (&mut self.usage, &other.usage) {
            (Usage::Level(queue), Usage::Level(other)) => queue.lower_to(other),
            (Usage::Counts(counts), Usage::Counts(other)) => counts.lower_to(self.at, *other),
            _ => {}
        }
    }

    /// Lowers the usage by what a settlement returned: the difference between the usage `before` and `after` it. For
    /// windows, only the window that contains `charged` counts.
    fn lower_by(&mut self, charged: Tick, before: &Self, after: &Self) {
        match (&mut self.usage, before.usage, after.usage) {
            (Usage::Level(queue), Usage::Level(before), Usage::Level(after)) => {
                let returned = before.left(after.as_of).saturating_sub(after.level);
                queue.level = queue.level.saturating_sub(returned);
            }
            (Usage::Counts(counts), Usage::Counts(mut before), Usage::Counts(mut after)) => {
                let returned =
                    before.of_window_at(charged).saturating_sub(*after.of_window_at(charged));
                let count = counts.of_window_at(charged);
                *count = count.saturating_sub(returned);
            }
            _ => {}
        }
    }
}

impl Receipt {
    /// Creates the receipt of a charge to a policy of one window. The count after the charge is unknown, so it does not
    /// limit what can be returned.
    #[must_use]
    pub fn of_window(charged_at: Tick) -> Self {
        let counts = Counts { start: charged_at, count: Cost::MAX, previous: Cost::MAX };
        let mark =
            ChargeRecord { at: charged_at, usage: Usage::Counts(counts), dropped: 0, run: 0 };
        Self::Each([Self::Limit(mark)].into())
    }

    /// Returns the record of a charge to a single limit.
    #[must_use]
    pub const fn charge_record(&self) -> Option<&ChargeRecord> {
        match self {
            Self::Limit(mark) => Some(mark),
            _ => None,
        }
    }

    /// Returns the time of the charge, if anything was charged.
    #[must_use]
    pub fn charged_at(&self) -> Option<Tick> {
        match self {
            Self::Nothing | Self::Uncharged { .. } => None,
            Self::Limit(mark) => Some(mark.at),
            Self::Each(each) => each.iter().find_map(Self::charged_at),
            Self::Policies(policies) => policies.iter().find_map(|(_, one)| one.charged_at()),
        }
    }

    /// Sets how many units of the cost were not charged to the limit.
    #[must_use]
    pub const fn with_dropped(mut self, units: u128) -> Self {
        if let Self::Limit(mark) = &mut self {
            mark.dropped = units;
        }
        self
    }

    /// Sets the number of the run that the charge is in, if this is the charge to one limit.
    #[must_use]
    pub(crate) const fn in_run(mut self, run: u64) -> Self {
        if let Self::Limit(mark) = &mut self {
            mark.run = run;
        }
        self
    }

    /// Returns the number of the run that the charge to a limit is in, or 0.
    pub(crate) const fn run(&self) -> u64 {
        match self {
            Self::Limit(mark) => mark.run,
            Self::Uncharged { run } => *run,
            _ => 0,
        }
    }

    /// Returns the receipt of a limit of the policy; `None` if it has none.
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
        self.position_of(policy).map_or(&Self::Nothing, |(_, one)| one)
    }

    /// Returns the policy that allowed the cost.
    #[must_use]
    pub fn decided_by(&self) -> Option<&Arc<Policy>> {
        match self {
            Self::Policies(policies) => policies.first().map(|(policy, _)| policy),
            _ => None,
        }
    }

    /// Returns whether this policy allowed the cost.
    #[must_use]
    pub fn is_decided_by(&self, policy: &Arc<Policy>) -> bool {
        self.position_of(policy).is_some_and(|(index, _)| index == 0)
    }

    fn position_of(&self, policy: &Arc<Policy>) -> Option<(usize, &Self)> {
        let Self::Policies(policies) = self else { return None };
        let find = |is: &dyn Fn(&Arc<Policy>) -> bool| policies.iter().position(|(one, _)| is(one));
        let same = find(&|other| Arc::ptr_eq(other, policy) || other == policy);
        // A policy that was read from a store has no name.
        let index = same.or_else(|| find(&|other| other.limits() == policy.limits()))?;
        Some((index, &policies[index].1))
    }

    /// Marks shadow limits that did not charge the cost. The indexes are those of the policy that decided.
    #[must_use]
    pub fn without(mut self, limits: &[usize]) -> Self {
        let each = match &mut self {
            Self::Policies(policies) => policies.first_mut().map(|(_, receipt)| receipt),
            receipt => Some(receipt),
        };
        if let Some(Self::Each(each)) = each {
            for limit in limits {
                if let Some(one) = each.get_mut(*limit) {
                    *one = Self::Uncharged { run: one.run() };
                }
            }
        }
        self
    }

    /// Lowers every level and count to that of a later receipt of the same state.
    fn lower_to(&mut self, later: &Self) {
        match (&mut *self, later) {
            (Self::Nothing | Self::Uncharged { .. }, _) => {}
            (Self::Limit(mark), Self::Limit(other)) => mark.lower_to(other),
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

    /// Lowers every level and count by what a settlement of a reservation returned.
    fn lower_by(&mut self, settlement: &Settlement<'_>) {
        let Settlement { reservation, before, after } = *settlement;
        match (self, reservation, before, after) {
            (
                Self::Limit(mark),
                Self::Limit(reservation),
                Self::Limit(before),
                Self::Limit(after),
            ) => mark.lower_by(reservation.at, before, after),
            (Self::Each(each), Self::Each(reservation), Self::Each(before), Self::Each(after)) => {
                let of_limits = reservation.iter().zip(before).zip(after);
                for (one, ((reservation, before), after)) in each.iter_mut().zip(of_limits) {
                    one.lower_by(&Settlement { reservation, before, after });
                }
            }
            (Self::Policies(policies), ..) => {
                for (policy, one) in policies {
                    let [reservation, before, after] =
                        [reservation, before, after].map(|one| one.under(policy));
                    one.lower_by(&Settlement { reservation, before, after });
                }
            }
            // Nothing was returned to this limit.
            _ => {}
        }
    }

    /// Returns the receipt as numbers for a script: five for each limit of the policy.
    ///
    /// | limit | numbers |
    /// |---|---|
    /// | bucket | 2, time of the charge, time of the level, level, what drains per tick |
    /// | fixed window, sliding window counter | 5, time of the charge, start of the window, count, previous count |
    /// | sliding window log | 1, time of the charge, three times 0 |
    ///
    /// `is_of_client` says whether it has to be the receipt of a client with policies, and not of a policy. Returns `None`
    /// for every other receipt: of other policies, of shadow limits, or of a cost that was not charged in full.
    #[must_use]
    pub fn to_numbers(&self, policy: &Policy, is_of_client: bool) -> Option<Vec<i128>> {
        let receipt = match self {
            Self::Policies(policies) if is_of_client => match &policies[..] {
                [(one, receipt)] if one.limits() == policy.limits() => receipt,
                _ => return None,
            },
            receipt if !is_of_client => receipt,
            _ => return None,
        };
        let each = match receipt {
            Self::Each(each) if !is_of_sole_bucket(policy, is_of_client) => each,
            Self::Limit(_) if is_of_sole_bucket(policy, is_of_client) => slice::from_ref(receipt),
            _ => return None,
        };
        let mut out = Vec::with_capacity(each.len() * NUMBERS_PER_LIMIT);
        for (limit, one) in policy.limits().iter().zip(each) {
            let Self::Limit(ChargeRecord { at, usage, dropped: 0, run: 0 }) = one else {
                return None;
            };
            let at = i128::from(at.0);
            out.extend(match (limit.numbers().kind, usage) {
                (Kind::SlidingWindowLog, Usage::Entry) => [OF_LOG, at, 0, 0, 0],
                (kind, Usage::Level(Queue { as_of, level, drain })) if kind.is_bucket() => {
                    let level = i128::try_from(*level).ok()?;
                    [OF_BUCKET, at, as_of.0.into(), level, (*drain).into()]
                }
                (
                    Kind::FixedWindow | Kind::SlidingWindowCounter,
                    Usage::Counts(Counts { start, count, previous }),
                ) => {
                    // An unknown count is the largest number. No window counts more than the largest number of a script.
                    let [count, previous] =
                        [count, previous].map(|count| i128::from((*count).min(LARGEST)));
                    [OF_WINDOW, at, start.0.into(), count, previous]
                }
                _ => return None,
            });
        }
        (each.len() == policy.limits().len()).then_some(out)
    }

    /// Reads the numbers of [`to_numbers`](Self::to_numbers).
    fn from_numbers(
        numbers: &mut NumberReader<'_>,
        policy: &Arc<Policy>,
        is_of_client: bool,
    ) -> Result<Self, DecodeError> {
        let mut each = Vec::with_capacity(policy.limits().len());
        for _ in policy.limits() {
            let (tag, at) = (numbers.any()?, numbers.tick("time of the charge")?);
            each.push(Self::Limit(match tag {
                OF_LOG => {
                    let _unused = [numbers.any()?, numbers.any()?, numbers.any()?];
                    ChargeRecord::at(at)
                }
                OF_BUCKET => {
                    let as_of = numbers.tick("time of the level")?;
                    let (level, drain) = (numbers.next("level")?, numbers.next("rate")?);
                    let usage = Usage::Level(Queue { as_of, level, drain });
                    ChargeRecord { at, usage, dropped: 0, run: 0 }
                }
                OF_WINDOW => {
                    let start = numbers.tick("start of the window")?;
                    let (count, previous) = (numbers.next("count")?, numbers.next("count")?);
                    let usage = Usage::Counts(Counts { start, count, previous });
                    ChargeRecord { at, usage, dropped: 0, run: 0 }
                }
                _ => return Err(DecodeError::Field { name: "receipt" }),
            }));
        }
        let receipt = match each.pop() {
            Some(sole) if is_of_sole_bucket(policy, is_of_client) => sole,
            last => {
                each.extend(last);
                Self::Each(each.into())
            }
        };
        Ok(if is_of_client { Self::Policies(vec![(policy.clone(), receipt)]) } else { receipt })
    }

    /// Returns whether it holds a level or a count, which a return lowers.
    fn has_usage(&self) -> bool {
        match self {
            Self::Nothing | Self::Uncharged { .. } => false,
            Self::Limit(mark) => mark.usage != Usage::Entry,
            Self::Each(each) => each.iter().any(Self::has_usage),
            Self::Policies(policies) => policies.iter().any(|(_, one)| one.has_usage()),
        }
    }
}

/// Returns whether the receipt under a policy is that of its only limit: a client keeps the state of a plain bucket
/// without a list.
fn is_of_sole_bucket(policy: &Policy, is_of_client: bool) -> bool {
    is_of_client && matches!(policy.plain().map(Limit::machine), Some(Machine::Bucket(_)))
}

/// A settlement that returned units of a reservation.
#[derive(Clone, Copy, Debug)]
pub struct Settlement<'a> {
    /// The receipt of the reservation.
    pub reservation: &'a Receipt,
    /// The usage before the settlement, as a receipt.
    pub before: &'a Receipt,
    /// The usage after the settlement, as a receipt.
    pub after: &'a Receipt,
}

/// The steps that lowered the usage of a key other than by draining: returns and resets.
///
/// Each step has a number that is larger than those before it. A reservation remembers the number of the last step
/// before its charge. The list is bounded: if there are too many steps, the oldest are merged. Older reservations then
/// return less than they could, but never more.
#[derive(Clone, Debug, PartialEq)]
pub struct Returns {
    /// Reservations below this number are void: the key was reset.
    void_below: i64,
    /// Reservations below this number return nothing.
    closed_below: i64,
    /// The time until which the steps matter.
    until: Tick,
    /// The steps, the oldest first.
    steps: Vec<Step>,
}

#[derive(Clone, Debug, PartialEq)]
struct Step {
    number: i64,
    /// The time from which on every charge before the step has drained.
    until: Tick,
    /// The usage after the step.
    left: Receipt,
}

/// The numbers of a receipt for scripts: how many there are for each limit, and what the first one is.
const NUMBERS_PER_LIMIT: usize = 5;
const OF_LOG: i128 = 1;
const OF_BUCKET: i128 = 2;
const OF_WINDOW: i128 = 5;

/// The number that means "none" for scripts: before all times, and exact in doubles.
const NO_TIME: i128 = -(1 << 53);

/// The last tick, which means never.
const NEVER: Tick = Tick(i64::MAX);
/// The most steps that are kept.
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
    /// Returns the time from which on the steps no longer matter.
    #[must_use]
    pub const fn until(&self) -> Tick {
        self.until
    }

    /// Returns whether a reservation was made before the last reset.
    #[must_use]
    pub const fn voids(&self, number: i64) -> bool {
        number < self.void_below
    }

    /// Lowers the receipt of a reservation to what it can still return.
    ///
    /// Returns whether there were returns since its charge. If so, the settlement must be recorded with
    /// [`settled`](Self::settled).
    pub fn lower(&self, number: i64, receipt: &mut Receipt) -> bool {
        if number < self.closed_below {
            *receipt = Receipt::Nothing;
        }
        let later = self.steps.partition_point(|step| step.number <= number);
        self.steps[later..].iter().for_each(|step| receipt.lower_to(&step.left));
        later < self.steps.len()
    }

    /// Records a settlement: lowers the usage after each step since the charge by what the settlement returned.
    pub fn settled(&mut self, number: i64, settlement: &Settlement<'_>) {
        let later = self.steps.partition_point(|step| step.number <= number);
        self.steps[later..].iter_mut().for_each(|step| step.left.lower_by(settlement));
    }

    /// Records that units were returned, and the usage after that.
    ///
    /// `until` is the time at which the state before the return would have been fresh. The last tick means never.
    /// `last_change` is the last change of the state after the return. A settlement that returns nothing does not
    /// change the state, so a later settlement may still be decided at a time before it, but never before the
    /// last change.
    pub fn note(&mut self, number: i64, left: Receipt, last_change: Tick, until: Tick) {
        let matters = |until: Tick| until > last_change || until == NEVER;
        if !matters(until) || !left.has_usage() {
            return;
        }
        // Keep the order of the steps if the clock was set back.
        let number = self.steps.last().map_or(number, |last| last.number.max(number));
        self.until = self.until.max(until);
        self.steps.retain(|step| matters(step.until));
        self.steps.push(Step { number, until, left });
        if self.steps.len() > MAX_STEPS {
            let oldest = self.steps.remove(0);
            let next = &mut self.steps[0];
            // A charge between the two steps now counts as a charge before both.
            next.left.lower_to(&oldest.left);
            next.until = next.until.max(oldest.until);
        }
    }

    /// Records a step after which no earlier reservation can return units. It matters until `until`.
    pub fn close(&mut self, number: i64, until: Tick) {
        self.closed_below = self.closed_below.max(number);
        self.until = self.until.max(until);
        self.steps.retain(|step| step.number > number);
    }

    /// Records a reset, which makes earlier reservations void. It matters until `until`.
    pub fn reset(&mut self, number: i64, until: Tick) {
        self.void_below = self.void_below.max(number);
        self.close(number, until);
    }

    /// Returns the steps as numbers for a script; `None` if a step is not one of this policy.
    ///
    /// The numbers are those of three steps: the one below which reservations return nothing, the one below which they are
    /// void, and the time until which the steps matter; −2⁵³ for none. For each step, its number, the time until
    /// which it matters, and the numbers of [its receipt](Receipt::to_numbers) follow.
    #[must_use]
    pub fn to_numbers(&self, policy: &Policy, is_of_client: bool) -> Option<Vec<i128>> {
        let time = |time: i64| if time == i64::MIN { NO_TIME } else { time.into() };
        let mut out = vec![time(self.closed_below), time(self.void_below), time(self.until.0)];
        for step in &self.steps {
            out.extend([i128::from(step.number), step.until.0.into()]);
            out.extend(step.left.to_numbers(policy, is_of_client)?);
        }
        Some(out)
    }

    /// Reads the numbers of [`to_numbers`](Self::to_numbers).
    ///
    /// # Errors
    /// Returns an error if the numbers are not the steps of keys under this policy.
    pub fn from_numbers(
        numbers: &[i128],
        policy: &Arc<Policy>,
        is_of_client: bool,
    ) -> Result<Self, DecodeError> {
        let mut numbers = NumberReader(numbers);
        let mut time = |name| {
            let time = numbers.any()?;
            if time == NO_TIME {
                return Ok(i64::MIN);
            }
            i64::try_from(time).map_err(|_| DecodeError::Field { name })
        };
        let closed_below = time("end of returns")?;
        let void_below = time("reset")?;
        let until = Tick(time("expiry")?);
        let mut steps = Vec::new();
        while !numbers.0.is_empty() {
            steps.push(Step {
                number: numbers.tick("return")?.0,
                until: numbers.tick("expiry")?,
                left: Receipt::from_numbers(&mut numbers, policy, is_of_client)?,
            });
        }
        let mut returns = Self { void_below, closed_below, until, steps };
        returns.close(closed_below, until);
        Ok(returns)
    }

    /// Appends the steps to `out`.
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

    /// Reads the steps that [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// Returns an error if the bytes are not a valid encoding.
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
            Self::Nothing | Self::Uncharged { .. } => out.push(0),
            Self::Limit(ChargeRecord { at, usage: Usage::Entry, .. }) => {
                out.push(1);
                codec::put_tick(out, *at);
            }
            Self::Limit(ChargeRecord {
                at,
                usage: Usage::Level(Queue { as_of, level, drain }),
                ..
            }) => {
                out.push(2);
                codec::put_tick(out, *at);
                codec::put_tick(out, *as_of);
                codec::put(out, *level);
                codec::put(out, *drain);
            }
            Self::Limit(ChargeRecord {
                at,
                usage: Usage::Counts(Counts { start, count, previous }),
                ..
            }) => {
                out.push(5);
                codec::put_tick(out, *at);
                codec::put_tick(out, *start);
                codec::put(out, *count);
                codec::put(out, *previous);
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
            1 => Self::Limit(ChargeRecord::at(reader.tick("time of the charge")?)),
            2 => {
                let at = reader.tick("time of the charge")?;
                let as_of = reader.tick("time of the level")?;
                let (level, drain) = (reader.number("level")?, reader.number("rate")?);
                let usage = Usage::Level(Queue { as_of, level, drain });
                Self::Limit(ChargeRecord { at, usage, dropped: 0, run: 0 })
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
                    let policy = Policy::from_description(reader.bytes(length)?)?;
                    let one = Self::decode(reader)?;
                    if matches!(one, Self::Policies(_)) {
                        return Err(DecodeError::Field { name: "receipt" });
                    }
                    policies.push((Arc::new(policy), one));
                }
                Self::Policies(policies)
            }
            5 => {
                let at = reader.tick("time of the charge")?;
                let start = reader.tick("start of the window")?;
                let (count, previous) = (reader.number("count")?, reader.number("previous count")?);
                let usage = Usage::Counts(Counts { start, count, previous });
                Self::Limit(ChargeRecord { at, usage, dropped: 0, run: 0 })
            }
            _ => return Err(DecodeError::Field { name: "receipt" }),
        })
    }
}
