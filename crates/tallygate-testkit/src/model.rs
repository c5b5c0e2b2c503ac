//! The reference model: the definitions of the design, without regard for speed.
//!
//! It keeps whole histories and exact fractions, and has one formula per algorithm: how much is used at a time. It
//! finds every field of a decision from that formula by search, not by algebra: the largest cost that fits, the first
//! tick at which a request fits, the first tick at which the state is fresh. The core solves for all of these. If both
//! agree, the algebra is right.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};
use tallygate_core::{Anchor, Cost, Decision, Kind, Numbers, Quota, Source, Tick, Ticks};

/// The history of a key under a limit.
#[derive(Clone, Debug)]
pub struct Model {
    numbers: Numbers,
    /// The time of the last change.
    last: i128,
    memory: Memory,
    /// All charges of reservations.
    charges: Vec<Charge>,
    /// The level of the bucket after each return.
    returns: Vec<Level>,
    /// The changes to the counts of windows, in order.
    changes: Vec<Change>,
}

/// A charge that may be settled.
#[derive(Clone, Debug)]
struct Charge {
    name: u64,
    /// The level of a bucket after the charge, and the time.
    left: Level,
    /// The number of returns before the charge.
    returns_before: usize,
}

/// The level of a bucket at a time.
#[derive(Clone, Debug)]
struct Level {
    at: i128,
    level: BigRational,
}

/// A change to the count of a window.
#[derive(Clone, Debug)]
struct Change {
    /// The number of the window, or its start if it starts with the first request.
    window: i128,
    /// Units that were charged; negative for units that were refunded.
    units: i128,
    /// The name of the charge, if a reservation made it.
    charge: Option<u64>,
}

#[derive(Clone, Debug)]
enum Memory {
    /// The tokens that are used at the last change.
    Bucket(BigRational),
    /// The units that are used in each aligned window, by the number of the window.
    Windows(BTreeMap<i128, u128>),
    /// The start of the current window, and the units that are used in it.
    Anchored(i128, u128),
    /// The times and costs of allowed requests.
    Log(Vec<(i128, u128)>),
}

fn ratio(n: impl Into<BigInt>) -> BigRational {
    BigRational::from_integer(n.into())
}

impl Model {
    /// Creates the history of a new key.
    #[must_use]
    pub fn initial(numbers: &Numbers, now: Tick) -> Self {
        Self::with_used(numbers, &ratio(numbers.burst - numbers.start), now)
    }

    /// Creates the history of a key that has used these units at `now`.
    fn with_used(numbers: &Numbers, used: &BigRational, now: Tick) -> Self {
        let now = i128::from(now.0);
        let whole = || used.ceil().to_integer().to_u128().expect("the number is not negative");
        let memory = match (numbers.kind, numbers.anchor) {
            (Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket, _) => {
                // A fraction of a token is rounded up to a unit of the new limit.
                let units = numbers.window.0 / gcd(numbers.limit, numbers.window.0);
                let level = (used * ratio(units)).ceil() / ratio(units);
                Memory::Bucket(level)
            }
            (Kind::FixedWindow, Anchor::FirstRequest) => Memory::Anchored(now, whole()),
            (Kind::FixedWindow | Kind::SlidingWindowCounter, _) => {
                Memory::Windows([(now.div_euclid(window(numbers)), whole())].into())
            }
            (Kind::SlidingWindowLog, _) => Memory::Log(vec![(now, whole())]),
        };
        let mut model = Self {
            numbers: *numbers,
            last: now,
            memory,
            charges: Vec::new(),
            returns: Vec::new(),
            changes: Vec::new(),
        };
        model.forget_changes();
        model.forget_if_fresh();
        model
    }

    /// Replaces the changes to windows by their present counts.
    fn forget_changes(&mut self) {
        let as_change = |(window, count): (i128, u128)| Change {
            window,
            units: count.try_into().expect("the count fits"),
            charge: None,
        };
        self.changes = match &self.memory {
            Memory::Windows(counts) => {
                counts.iter().map(|(window, count)| as_change((*window, *count))).collect()
            }
            Memory::Anchored(start, count) => vec![as_change((*start, *count))],
            Memory::Bucket(_) | Memory::Log(_) => Vec::new(),
        };
    }

    /// Clears the history if nothing is used: a fresh key has no past and no last change.
    fn forget_if_fresh(&mut self) {
        if self.is_fresh(self.last) {
            self.last = i64::MIN.into();
            match &mut self.memory {
                Memory::Bucket(used) => *used = BigRational::zero(),
                Memory::Windows(counts) => counts.clear(),
                Memory::Anchored(start, count) => (*start, *count) = (self.last, 0),
                Memory::Log(entries) => entries.clear(),
            }
        }
    }

    /// Returns the units that are used at a time that is not before the last change.
    fn used(&self, t: i128) -> BigRational {
        let w = window(&self.numbers);
        match &self.memory {
            Memory::Bucket(used) => {
                let earned = ratio(t - self.last) * ratio(self.numbers.limit) / ratio(w);
                let left = used - earned;
                if left.is_negative() { BigRational::zero() } else { left }
            }
            Memory::Windows(counts) => {
                let of = |number| counts.get(&number).copied().unwrap_or(0);
                let (number, into) = (t.div_euclid(w), t.rem_euclid(w));
                let previous = match self.numbers.kind {
                    Kind::SlidingWindowCounter => {
                        (ratio(of(number - 1)) * ratio(w - into) / ratio(w)).floor()
                    }
                    _ => BigRational::zero(),
                };
                previous + ratio(of(number))
            }
            Memory::Anchored(start, count) => {
                if t < start + w {
                    ratio(*count)
                } else {
                    BigRational::zero()
                }
            }
            Memory::Log(entries) => ratio(
                entries.iter().filter(|(at, _)| t - w < *at).map(|(_, cost)| cost).sum::<u128>(),
            ),
        }
    }

    /// Returns whether the past no longer matters.
    fn is_fresh(&self, t: i128) -> bool {
        match &self.memory {
            Memory::Windows(counts) if self.numbers.kind == Kind::SlidingWindowCounter => {
                let number = t.div_euclid(window(&self.numbers));
                [number - 1, number].iter().all(|number| counts.get(number).is_none_or(|&n| n == 0))
            }
            _ => self.used(t).is_zero(),
        }
    }

    /// Returns the time at which a request is decided, after a rebase if the clock was set back.
    fn decision_time(&self, now: i128) -> i128 {
        now.max(self.last)
    }

    fn allows_at(&self, now: i128, cost: impl Into<BigInt>) -> bool {
        self.used(self.decision_time(now)) + ratio(cost) <= ratio(self.numbers.burst)
    }

    fn rebase(&mut self, now: i128) {
        let behind = self.last - now;
        if behind <= window(&self.numbers) {
            return;
        }
        let most = ratio(self.numbers.burst) + ratio(self.numbers.debt);
        let used = self.used(self.last).min(most);
        let whole = || used.ceil().to_integer().to_u128().expect("the number is not negative");
        self.memory = match &self.memory {
            Memory::Bucket(_) => Memory::Bucket(used),
            Memory::Windows(_) => {
                Memory::Windows([(now.div_euclid(window(&self.numbers)), whole())].into())
            }
            Memory::Anchored(..) => Memory::Anchored(now, whole()),
            Memory::Log(entries) => Memory::Log(
                entries
                    .iter()
                    .filter(|(at, _)| self.last - window(&self.numbers) < *at)
                    .map(|(at, cost)| ((at - behind).max(i64::MIN.into()), *cost))
                    .collect(),
            ),
        };
        self.last = now;
        self.forget_changes();
        self.forget_if_fresh();
    }

    /// Decides a request, and charges it if it is allowed.
    pub fn decide(&mut self, now: Tick, cost: Cost) -> Decision {
        let at = i128::from(now.0);
        if cost == 0 {
            let mut copy = self.clone();
            copy.rebase(at);
            return copy.describe(at, 0, copy.allows_at(at, 0));
        }
        self.rebase(at);
        let allowed = self.allows_at(at, cost);
        let ahead = self.used(self.decision_time(at));
        if allowed {
            self.force(now, cost.into());
        }
        let mut decision = self.describe(at, cost, allowed);
        if allowed && self.numbers.kind == Kind::LeakyBucket {
            decision.delay = self.delay(at, &ahead);
        }
        decision
    }

    /// Returns what a check would return.
    pub fn peek(&self, now: Tick, cost: Cost) -> Decision {
        self.clone().decide(now, cost)
    }

    fn delay(&self, now: i128, ahead: &BigRational) -> Ticks {
        let wait = ahead * ratio(self.numbers.window.0) / ratio(self.numbers.limit);
        let wait = wait.ceil().to_integer().to_i128().expect("the wait fits");
        Ticks((wait + self.decision_time(now) - now).try_into().unwrap_or(u64::MAX))
    }

    fn describe(&self, now: i128, cost: Cost, allowed: bool) -> Decision {
        let capacity = self.numbers.burst;
        let retry_after = match (allowed, cost > capacity) {
            (true, _) => Some(Ticks::ZERO),
            (false, true) => None,
            (false, false) => Some(Ticks(least(|wait| self.allows_at(now + wait, cost)))),
        };
        let fresh = |wait| self.is_fresh(self.decision_time(now + wait));
        let mut delay = Ticks::ZERO;
        if allowed && cost == 0 && self.numbers.kind == Kind::LeakyBucket {
            delay = self.delay(now, &self.used(self.decision_time(now)));
        }
        // The largest cost that is allowed is one below the smallest cost that is denied.
        let remaining = match self.allows_at(now, 0) {
            true if self.allows_at(now, capacity) => capacity,
            true => least(|cost| !self.allows_at(now, cost)) - 1,
            false => 0,
        };
        Decision {
            allowed,
            limit: capacity,
            remaining,
            retry_after,
            reset_after: Ticks(least(fresh)),
            delay,
            scarcest: Some(0),
            denied_by: (!allowed).then_some(0),
            shadow_denied_by: None,
            quota: Some(Quota { amount: self.numbers.limit, window: self.numbers.window }),
            source: Source::Store,
        }
    }

    /// Charges an amount whether or not it is allowed, or refunds it. Returns how many units had no effect.
    pub fn force(&mut self, now: Tick, amount: i128) -> u128 {
        let at = i128::from(now.0);
        if amount == 0 {
            return 0;
        }
        self.rebase(at);
        let t = self.decision_time(at);
        if self.is_fresh(t)
            && let Memory::Anchored(..) = self.memory
        {
            self.memory = Memory::Anchored(t, 0);
        }
        let used = self.used(t);
        let ceiling = u128::from(self.numbers.burst) + u128::from(self.numbers.debt);
        let asked = amount.unsigned_abs();
        let moved = if amount > 0 {
            let room = (ratio(ceiling) - self.charged(t)).floor().to_integer();
            asked.min(room.to_u128().unwrap_or(0))
        } else {
            asked.min(self.charged_with_previous(t).ceil().to_integer().to_u128().unwrap_or(0))
        };
        let w = window(&self.numbers);
        let mut note = |window: i128, moved: u128| {
            let units = i128::try_from(moved).expect("the count fits") * amount.signum();
            self.changes.push(Change { window, units, charge: None });
        };
        match &mut self.memory {
            Memory::Bucket(level) => {
                let new = if amount > 0 { used + ratio(moved) } else { used - ratio(moved) };
                *level = if new.is_negative() { BigRational::zero() } else { new };
            }
            Memory::Anchored(start, count) => {
                *count = if amount > 0 { *count + moved } else { *count - moved };
                note(*start, moved);
            }
            Memory::Windows(counts) => {
                let number = t.div_euclid(w);
                if amount > 0 {
                    *counts.entry(number).or_default() += moved;
                    note(number, moved);
                } else {
                    let mut left = moved;
                    for number in [number, number - 1] {
                        let count = counts.entry(number).or_default();
                        let given = left.min(*count);
                        *count -= given;
                        left -= given;
                        note(number, given);
                    }
                }
            }
            Memory::Log(entries) => {
                entries.retain(|(at, _)| t - w < *at);
                if amount > 0 {
                    entries.push((t, moved));
                } else {
                    let mut left = moved;
                    for (_, cost) in entries.iter_mut().rev() {
                        let given = left.min(*cost);
                        *cost -= given;
                        left -= given;
                    }
                    entries.retain(|(_, cost)| *cost > 0);
                }
            }
        }
        self.last = t;
        if amount < 0 {
            self.note_level();
        }
        self.forget_if_fresh();
        asked - moved
    }

    /// Decides a request, and charges it if it is allowed. Returns a name by which the charge can be settled.
    pub fn reserve(&mut self, now: Tick, cost: Cost) -> (Decision, Option<u64>) {
        let decision = self.decide(now, cost);
        let charge = (decision.allowed && cost > 0).then(|| self.name_charge());
        (decision, charge)
    }

    /// Names the charge that was just made.
    pub fn name_charge(&mut self) -> u64 {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let name = NAMES.fetch_add(1, Ordering::Relaxed);
        let left = Level { at: self.last, level: self.used(self.last) };
        self.charges.push(Charge { name, left, returns_before: self.returns.len() });
        if let Some(change) = self.changes.last_mut() {
            change.charge = Some(name);
        }
        name
    }

    /// Changes a charge by an amount: charges more, or returns the units of it that still count. Returns how many units
    /// had no effect.
    ///
    /// A bucket returns at most what was in it after the charge and has not drained since, and at most the lowest level
    /// since the charge. The count of a window becomes what it would be if only the rest had been charged.
    pub fn settle(&mut self, now: Tick, charge: Option<u64>, change: i128) -> u128 {
        if change == 0 {
            return 0;
        }
        if change > 0 {
            return self.force(now, change);
        }
        self.rebase(now.0.into());
        let (t, w, asked) =
            (self.decision_time(now.0.into()), window(&self.numbers), change.unsigned_abs());
        let named = self.charges.iter().find(|one| Some(one.name) == charge);
        let Some(charge) = named.cloned() else {
            return asked;
        };
        if charge.left.at > t || self.is_fresh(t) {
            return asked;
        }
        let used = self.used(t);
        let left = self.left_of(&charge, t);
        let of_window = self.without(charge.name, asked);
        let returned = match &mut self.memory {
            Memory::Bucket(level) => {
                let returned = ratio(asked).min(left).min(used.clone());
                // Nothing changes otherwise, not even the time of the last change.
                if !returned.is_zero() {
                    *level = used - &returned;
                    for earlier in &mut self.returns[charge.returns_before..] {
                        earlier.level -= &returned;
                    }
                }
                returned
            }
            Memory::Anchored(start, count) => match of_window {
                Some((window, left)) if window == *start => {
                    ratio(std::mem::replace(count, left) - left)
                }
                _ => BigRational::zero(),
            },
            Memory::Windows(counts) => {
                let oldest = match self.numbers.kind {
                    Kind::SlidingWindowCounter => t.div_euclid(w) - 1,
                    _ => t.div_euclid(w),
                };
                match of_window {
                    Some((window, left)) if window >= oldest => {
                        ratio(counts.insert(window, left).unwrap_or(left) - left)
                    }
                    _ => BigRational::zero(),
                }
            }
            Memory::Log(entries) => {
                entries.retain(|(at, _)| t - w < *at);
                let mut left = asked;
                for (_, cost) in entries.iter_mut().filter(|(at, _)| *at == charge.left.at) {
                    let returned = left.min(*cost);
                    *cost -= returned;
                    left -= returned;
                }
                entries.retain(|(_, cost)| *cost > 0);
                ratio(asked - left)
            }
        };
        if matches!(self.memory, Memory::Log(_)) || !returned.is_zero() {
            self.last = t;
        }
        if let Some(change) =
            self.changes.iter_mut().find(|change| change.charge == Some(charge.name))
        {
            change.units -= returned.to_integer().to_i128().expect("the count fits");
        }
        self.note_level();
        self.forget_if_fresh();
        asked - returned.floor().to_integer().to_u128().expect("the number is not negative")
    }

    /// Records the level after a return. Earlier charges return at most that level.
    fn note_level(&mut self) {
        self.returns.push(Level { at: self.last, level: self.used(self.last) });
    }

    /// Returns how much of a charge to a bucket, and of earlier charges, has neither drained nor been returned since.
    fn left_of(&self, charge: &Charge, t: i128) -> BigRational {
        let since = [&charge.left].into_iter().chain(&self.returns[charge.returns_before..]);
        let lowest = since.map(|one| match one.at <= self.last {
            true => &one.level - ratio(t - one.at) * self.per_tick(),
            false => BigRational::zero(),
        });
        lowest.min().expect("the level of the charge is in the list").max(BigRational::zero())
    }

    /// Returns the window of a charge, and the count of that window if the charge had been `units` lower.
    fn without(&self, charge: u64, units: u128) -> Option<(i128, u128)> {
        let window = self.changes.iter().find(|change| change.charge == Some(charge))?.window;
        let changes = self.changes.iter().filter(|change| change.window == window);
        let less = i128::try_from(units).expect("the cost fits");
        let count = changes.fold(0, |count: i128, change| {
            let less = if change.charge == Some(charge) { less } else { 0 };
            // A refund stops at a count of 0.
            (count + change.units - less).max(0)
        });
        Some((window, count.try_into().expect("the number is not negative")))
    }

    fn per_tick(&self) -> BigRational {
        ratio(self.numbers.limit) / ratio(window(&self.numbers))
    }

    /// Returns the units on top of which a further charge comes.
    fn charged(&self, t: i128) -> BigRational {
        match &self.memory {
            Memory::Windows(counts) => {
                let number = t.div_euclid(window(&self.numbers));
                ratio(counts.get(&number).copied().unwrap_or(0))
            }
            _ => self.used(t),
        }
    }

    /// Returns the units that a refund can return.
    fn charged_with_previous(&self, t: i128) -> BigRational {
        match &self.memory {
            Memory::Windows(counts) if self.numbers.kind == Kind::SlidingWindowCounter => {
                let number = t.div_euclid(window(&self.numbers));
                self.charged(t) + ratio(counts.get(&(number - 1)).copied().unwrap_or(0))
            }
            _ => self.charged(t),
        }
    }

    /// Returns the used units at a time in fractions of 1/`parts`, rounded up.
    pub fn used_in_parts(&self, now: Tick, parts: u64) -> u128 {
        let used = self.used(self.decision_time(now.0.into())) * ratio(parts);
        used.ceil().to_integer().to_u128().expect("the number is not negative")
    }

    /// Returns whether the past no longer matters.
    pub fn is_fresh_at(&self, now: Tick) -> bool {
        self.is_fresh(self.decision_time(now.0.into()))
    }

    /// Returns the used units at a time, rounded up.
    pub fn used_up(&self, now: Tick) -> u128 {
        let used = self.used(self.decision_time(now.0.into())).ceil().to_integer();
        used.to_u128().expect("the number is not negative")
    }

    /// Resets the key to its initial state.
    pub fn reset(&mut self, now: Tick) {
        *self = Self::initial(&self.numbers, now);
    }

    /// Continues with other numbers. The key keeps what it has used, but at most the new capacity.
    pub fn change(&mut self, numbers: &Numbers, now: Tick) {
        let rule = |n: &Numbers| (n.kind, n.limit, n.window, n.burst, n.debt, n.anchor);
        if rule(numbers) == rule(&self.numbers) {
            self.numbers = *numbers;
            return;
        }
        self.rebase(now.0.into());
        // A late caller is decided at the time of the last change.
        let t = self.decision_time(now.0.into());
        let used = self.used(t);
        let now = Tick(i64::try_from(t).expect("the time is in the range of ticks"));
        *self = Self::with_used(numbers, &used.min(ratio(numbers.burst)), now);
    }
}

fn window(numbers: &Numbers) -> i128 {
    numbers.window.0.into()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Returns the smallest number for which a predicate is true. Once true, the predicate must stay true.
fn least(holds: impl Fn(i128) -> bool) -> u64 {
    let (mut low, mut high) = (0_i128, 1_i128);
    while !holds(high) {
        assert!(high < 1 << 66, "the predicate never becomes true");
        low = high;
        high *= 2;
    }
    if low == 0 && holds(0) {
        return 0;
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if holds(middle) { high = middle } else { low = middle }
    }
    // A wait of 2⁶⁴ or more becomes the longest wait.
    high.try_into().unwrap_or(u64::MAX)
}
