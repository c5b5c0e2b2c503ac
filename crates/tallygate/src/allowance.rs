//! The allowance that the policies of one client share.
//!
//! The quotas of the policies that a client is checked under must not add up: k policies of rate r together allow r.
//! Each policy forgets usage in its own way (a window at its end, a log entry by entry), so no policy can know what the
//! client got under the others long ago. Therefore each policy of such a client has an allowance in addition to its own
//! state: an exact bucket that earns the policy's long-run rate. It counts what was allowed under this policy and under
//! all slower ones, and its capacity is the sum of their capacities. A request under a policy must also fit into the
//! allowances of this policy and of all faster ones.
//!
//! This is sufficient. Take any interval, and the fastest of the policies under which something was allowed in it. The
//! allowance of that policy counted everything that was allowed in the interval. It is a bucket, so that is at most its
//! capacity plus its rate times the length of the interval.
//!
//! No client is locked out. An allowance charges only what it has room for, so its level is at most its capacity. A
//! cost has room again after the time in which the faster policy earns that cost.

use tallygate_core::{Cost, Decision, Limit, Policy, Tick, Ticks, Used};

/// The used part of a policy's shared allowance, and the time of its last change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allowance {
    /// The time of the last change.
    pub last: Tick,
    /// The amount used at that time, in units of 1/W, where W is the window of the limit that gives the rate.
    pub level: u128,
}

/// The long-run rate of a policy: that of its slowest limit, without shadows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rate {
    /// The index of the limit that gives the rate.
    pub(crate) index: usize,
    limit: u64,
    window: u64,
    /// The capacity of that limit.
    capacity: Cost,
}

/// The allowances that a request under a policy must fit into, besides the policy itself, as a script returned them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Bounds(Box<[Bound]>);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Bound {
    allowance: Allowance,
    rate: Rate,
    /// The capacity of the allowance, which several policies share.
    capacity: Cost,
}

/// The longest time in which an allowance earns its whole capacity, as for every valid limit.
const MAX_TIME_TO_FRESH: u128 = 1 << 62;

impl Rate {
    /// Returns the rate of a policy; `None` if all its limits are shadows.
    pub(crate) fn of(policy: &Policy) -> Option<Self> {
        let enforced = policy.limits().iter().enumerate().filter(|(_, limit)| !limit.is_shadow());
        let rates = enforced.map(|(index, limit)| Self::of_limit(index, limit));
        rates.reduce(|one, other| if other.comes_before(&one) { other } else { one })
    }

    fn of_limit(index: usize, limit: &Limit) -> Self {
        let numbers = limit.numbers();
        Self { index, limit: numbers.limit, window: numbers.window.0, capacity: numbers.burst }
    }

    /// Slower, or as fast with less capacity.
    fn comes_before(&self, other: &Self) -> bool {
        let (own, others) = self.over_common_denominator(other);
        own < others || (own == others && self.capacity < other.capacity)
    }

    /// Both rates over their common denominator.
    fn over_common_denominator(&self, other: &Self) -> (u128, u128) {
        let times = |a: u64, b: u64| u128::from(a) * u128::from(b);
        (times(self.limit, other.window), times(other.limit, self.window))
    }

    pub(crate) fn is_at_most(&self, other: &Self) -> bool {
        let (own, others) = self.over_common_denominator(other);
        own <= others
    }

    /// Returns the sum of the capacities of the policies that are not faster than this one. If that is more than a
    /// bucket of this rate can count exactly, it stops there.
    pub(crate) fn shared_capacity(&self, rates: &[Option<Self>]) -> Cost {
        let counted = rates.iter().flatten().filter(|rate| rate.is_at_most(self));
        let sum: u128 = counted.map(|rate| u128::from(rate.capacity)).sum();
        let most = MAX_TIME_TO_FRESH * u128::from(self.limit) / u128::from(self.window);
        Cost::try_from(sum.min(most)).unwrap_or(Cost::MAX)
    }

    fn units(&self, amount: Cost) -> u128 {
        u128::from(amount) * u128::from(self.window)
    }

    /// Returns the level of an amount, rounded up.
    fn level(&self, used: Used) -> u128 {
        let Used { whole, part: (numerator, denominator) } = used;
        let part = u128::from(numerator) * u128::from(self.window);
        self.units(whole).saturating_add(part.div_ceil(u128::from(denominator.max(1))))
    }

    /// Returns the time in which a level is earned back, rounded up.
    fn time_to_earn(&self, level: u128) -> Ticks {
        Ticks(u64::try_from(level.div_ceil(u128::from(self.limit))).unwrap_or(u64::MAX))
    }
}

impl Allowance {
    /// Returns an allowance of which nothing is used.
    pub(crate) const fn unused(now: Tick) -> Self {
        Self { last: now, level: 0 }
    }

    /// Returns the allowance of a client that has used an amount under this policy alone.
    pub(crate) fn with_used(rate: &Rate, used: Used, now: Tick) -> Self {
        Self { last: now, level: rate.level(used.at_most(rate.capacity)) }
    }

    /// Returns the allowance of a new policy, from that of the next slower policy.
    pub(crate) fn carried_to(&self, to: &Rate, from: &Rate, now: Tick) -> Self {
        let (level, window) = (self.level_at(from, now), u128::from(from.window));
        let part = (level % window * u128::from(to.window)).div_ceil(window);
        let level = (level / window).saturating_mul(u128::from(to.window)).saturating_add(part);
        Self { last: self.last.max(now), level }
    }

    pub(crate) fn level_at(&self, rate: &Rate, now: Tick) -> u128 {
        let earned = u128::from(now.since(self.last).0) * u128::from(rate.limit);
        self.level.saturating_sub(earned)
    }

    /// Returns whether the level is at most the level of a used amount.
    pub(crate) fn is_within(&self, rate: &Rate, used: Used, now: Tick) -> bool {
        self.level_at(rate, now) <= rate.level(used)
    }

    /// Returns by how many whole units a used amount exceeds the level.
    pub(crate) fn uncounted(&self, rate: &Rate, used: Used, now: Tick) -> u128 {
        rate.level(used).saturating_sub(self.level_at(rate, now)) / u128::from(rate.window)
    }

    /// Returns whether the level is at most a capacity.
    pub(crate) fn fits_into(&self, rate: &Rate, capacity: Cost, now: Tick) -> bool {
        self.level_at(rate, now) <= rate.units(capacity)
    }

    /// How far `now` is before the last change.
    fn behind(&self, now: Tick) -> Ticks {
        if self.level > 0 { self.last.since(now) } else { Ticks::ZERO }
    }

    fn set(&mut self, rate: &Rate, now: Tick, level: u128) {
        let last = if self.level_at(rate, now) > 0 { self.last.max(now) } else { now };
        *self = Self { last, level };
    }

    pub(crate) fn has_room(&self, rate: &Rate, capacity: Cost, now: Tick, cost: Cost) -> bool {
        let room = capacity.checked_sub(cost);
        room.is_some_and(|room| self.level_at(rate, now) <= rate.units(room))
    }

    /// Returns the time until a cost has room; `None` if it never has.
    pub(crate) fn wait(&self, rate: &Rate, capacity: Cost, now: Tick, cost: Cost) -> Option<Ticks> {
        let highest = rate.units(capacity.checked_sub(cost)?);
        let excess = self.level_at(rate, now).saturating_sub(highest);
        let waits = excess > 0;
        Some(if waits { self.behind(now).plus(rate.time_to_earn(excess)) } else { Ticks::ZERO })
    }

    /// Returns the largest cost that has room.
    pub(crate) fn remaining(&self, rate: &Rate, capacity: Cost, now: Tick) -> Cost {
        let free = rate.units(capacity).saturating_sub(self.level_at(rate, now));
        Cost::try_from(free / u128::from(rate.window)).unwrap_or(Cost::MAX)
    }

    /// Charges a cost that has room.
    pub(crate) fn charge(&mut self, rate: &Rate, now: Tick, cost: Cost) {
        self.set(rate, now, self.level_at(rate, now).saturating_add(rate.units(cost)));
    }

    /// Charges an amount whether or not it has room, at most up to the capacity.
    pub(crate) fn force(&mut self, rate: &Rate, capacity: Cost, now: Tick, amount: u128) {
        let level = self.level_at(rate, now);
        let charged = level.saturating_add(amount.saturating_mul(u128::from(rate.window)));
        self.set(rate, now, charged.min(rate.units(capacity).max(level)));
    }

    /// Returns units that were charged at a time: the part that has not been earned back since, at most until nothing
    /// is used. Units are earned back in the order in which they were charged, so at least this part is left.
    pub(crate) fn return_units(&mut self, rate: &Rate, now: Tick, amount: u128, charged_at: Tick) {
        let earned = u128::from(now.since(charged_at).0) * u128::from(rate.limit);
        let returned = amount.saturating_mul(u128::from(rate.window)).saturating_sub(earned);
        self.set(rate, now, self.level_at(rate, now).saturating_sub(returned));
    }

    /// Returns the time until nothing is used.
    pub(crate) fn reset_after(&self, rate: &Rate, now: Tick) -> Ticks {
        match self.level_at(rate, now) {
            0 => Ticks::ZERO,
            level => self.behind(now).plus(rate.time_to_earn(level)),
        }
    }

    /// Returns the time from which on nothing is used; `None` if it is beyond the last tick.
    pub(crate) fn fresh_at(&self, rate: &Rate) -> Option<Tick> {
        match self.level {
            0 => Some(Tick(i64::MIN)),
            level => self.last.after(rate.time_to_earn(level)),
        }
    }

    /// Returns whether `now` is so far before the last change that the clock was set back.
    pub(crate) fn set_back(&self, rate: &Rate, now: Tick) -> bool {
        self.behind(now).0 > rate.window
    }

    /// Moves the last change to `now`, keeping what was used.
    pub(crate) const fn rebase(&mut self, now: Tick) {
        self.last = now;
    }
}

impl Bounds {
    /// Reads bounds from five numbers each: the time of the last change of an allowance, its level, the limit and the
    /// window that give its rate, and its capacity. Returns `None` if the numbers are not those of bounds.
    #[must_use]
    pub fn of_numbers(numbers: &[i128]) -> Option<Self> {
        let each = numbers.chunks_exact(5);
        let rest = each.remainder();
        let bounds = each.map(|numbers| {
            let [last, level, limit, window, capacity] = numbers else { return None };
            let positive = |number: &i128| u64::try_from(*number).ok().filter(|number| *number > 0);
            let capacity = positive(capacity)?;
            let (limit, window) = (positive(limit)?, positive(window)?);
            let allowance = Allowance {
                last: Tick(i64::try_from(*last).ok()?),
                level: u128::try_from(*level).ok()?,
            };
            Some(Bound { allowance, rate: Rate { index: 0, limit, window, capacity }, capacity })
        });
        let bounds = bounds.collect::<Option<_>>()?;
        rest.is_empty().then_some(Self(bounds))
    }

    /// Returns whether all allowances have room for a cost.
    #[must_use]
    pub fn have_room(&self, now: Tick, cost: Cost) -> bool {
        self.0.iter().all(|Bound { allowance, rate, capacity }| {
            allowance.has_room(rate, *capacity, now, cost)
        })
    }

    /// Completes a decision that a policy made by its own state at `now`, where `denied` is the cost that was denied,
    /// if one was: the least remaining, the longest wait.
    pub fn complete(
        &self,
        decision: &mut Decision,
        policy: &Policy,
        now: Tick,
        denied: Option<Cost>,
    ) {
        for Bound { allowance, rate, capacity } in &self.0 {
            decision.remaining = decision.remaining.min(allowance.remaining(rate, *capacity, now));
            decision.reset_after = decision.reset_after.max(allowance.reset_after(rate, now));
            if let Some(cost) = denied {
                let wait = allowance.wait(rate, *capacity, now, cost);
                decision.retry_after =
                    decision.retry_after.zip(wait).map(|(own, wait)| own.max(wait));
            }
        }
        if decision.denied_by.is_none() && denied.is_some_and(|cost| !self.have_room(now, cost)) {
            decision.denied_by = Rate::of(policy).map(|rate| rate.index);
        }
    }
}
