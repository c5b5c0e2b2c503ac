//! The reference model: the design's definitions, with no thought for speed.
//!
//! It keeps whole histories and exact fractions, and knows one formula an algorithm: how much is
//! used at a time. Everything a decision tells follows from that formula by search, not by algebra:
//! the largest cost that fits, the first tick at which a request fits, the first tick that is fresh.
//! The core solves for all of these. Where the two agree, the algebra is right.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use num_bigint::BigInt;
use num_rational::BigRational;
use num_traits::{Signed, ToPrimitive, Zero};
use tallygate_core::{Anchor, Cost, Decision, Kind, Numbers, Source, Tick, Ticks};

/// A key's history under a limit.
#[derive(Clone, Debug)]
pub struct Model {
    numbers: Numbers,
    /// The time of the last change.
    last: i128,
    memory: Memory,
    /// The charges of reservations, for ever.
    charges: Vec<Charge>,
}

/// A charge that may be settled.
#[derive(Clone, Debug)]
struct Charge {
    name: u64,
    at: i128,
    /// The least that was in the bucket since, as it was at a time.
    as_of: i128,
    level: BigRational,
}

#[derive(Clone, Debug)]
enum Memory {
    /// Tokens used at the last change.
    Bucket(BigRational),
    /// What was used in each aligned window, by the window's number.
    Windows(BTreeMap<i128, u128>),
    /// The start of the current window and what was used in it.
    Anchored(i128, u128),
    /// What was admitted when.
    Log(Vec<(i128, u128)>),
}

fn ratio(n: impl Into<BigInt>) -> BigRational {
    BigRational::from_integer(n.into())
}

impl Model {
    /// A key never seen.
    #[must_use]
    pub fn first(numbers: &Numbers, now: Tick) -> Self {
        Self::with_used(numbers, &ratio(numbers.burst - numbers.start), now)
    }

    /// A key that has used this much, at `now`.
    fn with_used(numbers: &Numbers, used: &BigRational, now: Tick) -> Self {
        let now = i128::from(now.0);
        let whole = || used.ceil().to_integer().to_u128().expect("not negative");
        let memory = match (numbers.kind, numbers.anchor) {
            (Kind::TokenBucket | Kind::Gcra | Kind::LeakyBucket, _) => {
                // A part of a token is kept to a unit of the new limit, rounded up.
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
        let mut model = Self { numbers: *numbers, last: now, memory, charges: Vec::new() };
        model.forget_if_fresh();
        model
    }

    /// What has used nothing has no past, and no time of its own.
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

    /// How much is used at a time not before the last change.
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

    /// Whether nothing of the past can matter any more.
    fn is_fresh(&self, t: i128) -> bool {
        match &self.memory {
            Memory::Windows(counts) if self.numbers.kind == Kind::SlidingWindowCounter => {
                let number = t.div_euclid(window(&self.numbers));
                [number - 1, number].iter().all(|number| counts.get(number).is_none_or(|&n| n == 0))
            }
            _ => self.used(t).is_zero(),
        }
    }

    /// The time that `now` is taken as, once a clock set back has been dealt with.
    fn taken_as(&self, now: i128) -> i128 {
        now.max(self.last)
    }

    fn admits_at(&self, now: i128, cost: impl Into<BigInt>) -> bool {
        self.used(self.taken_as(now)) + ratio(cost) <= ratio(self.numbers.burst)
    }

    fn rebase(&mut self, now: i128) {
        let behind = self.last - now;
        if behind <= window(&self.numbers) {
            return;
        }
        let most = ratio(self.numbers.burst) + ratio(self.numbers.debt);
        let used = self.used(self.last).min(most);
        let whole = || used.ceil().to_integer().to_u128().expect("not negative");
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
        self.forget_if_fresh();
    }

    /// Decides a request, charging it if it is admitted.
    pub fn decide(&mut self, now: Tick, cost: Cost) -> Decision {
        let at = i128::from(now.0);
        if cost == 0 {
            let mut look = self.clone();
            look.rebase(at);
            return look.describe(at, 0, look.admits_at(at, 0));
        }
        self.rebase(at);
        let admitted = self.admits_at(at, cost);
        let ahead = self.used(self.taken_as(at));
        if admitted {
            self.force(now, cost.into());
        }
        let mut decision = self.describe(at, cost, admitted);
        if admitted && self.numbers.kind == Kind::LeakyBucket {
            decision.delay = self.delay(at, &ahead);
        }
        decision
    }

    /// Answers as a check would.
    pub fn peek(&self, now: Tick, cost: Cost) -> Decision {
        self.clone().decide(now, cost)
    }

    fn delay(&self, now: i128, ahead: &BigRational) -> Ticks {
        let wait = ahead * ratio(self.numbers.window.0) / ratio(self.numbers.limit);
        let wait = wait.ceil().to_integer().to_i128().expect("a wait");
        Ticks((wait + self.taken_as(now) - now).try_into().unwrap_or(u64::MAX))
    }

    fn describe(&self, now: i128, cost: Cost, allowed: bool) -> Decision {
        let capacity = self.numbers.burst;
        let retry_after = match (allowed, cost > capacity) {
            (true, _) => Some(Ticks::ZERO),
            (false, true) => None,
            (false, false) => Some(Ticks(least(|wait| self.admits_at(now + wait, cost)))),
        };
        let fresh = |wait| self.is_fresh(self.taken_as(now + wait));
        let mut delay = Ticks::ZERO;
        if allowed && cost == 0 && self.numbers.kind == Kind::LeakyBucket {
            delay = self.delay(now, &self.used(self.taken_as(now)));
        }
        // The largest cost that is admitted: one below the least that is not.
        let remaining = match self.admits_at(now, 0) {
            true if self.admits_at(now, capacity) => capacity,
            true => least(|cost| !self.admits_at(now, cost)) - 1,
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
            refused_by: (!allowed).then_some(0),
            shadow_refused_by: None,
            source: Source::Store,
        }
    }

    /// Uses an amount without asking, or gives it back; returns how much had no effect.
    pub fn force(&mut self, now: Tick, amount: i128) -> u128 {
        let at = i128::from(now.0);
        if amount == 0 {
            return 0;
        }
        self.rebase(at);
        let t = self.taken_as(at);
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
        match &mut self.memory {
            Memory::Bucket(level) => {
                let new = if amount > 0 { used + ratio(moved) } else { used - ratio(moved) };
                *level = if new.is_negative() { BigRational::zero() } else { new };
            }
            Memory::Anchored(_, count) => {
                *count = if amount > 0 { *count + moved } else { *count - moved };
            }
            Memory::Windows(counts) => {
                let number = t.div_euclid(w);
                if amount > 0 {
                    *counts.entry(number).or_default() += moved;
                } else {
                    let mut left = moved;
                    for number in [number, number - 1] {
                        let count = counts.entry(number).or_default();
                        let given = left.min(*count);
                        *count -= given;
                        left -= given;
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

    /// Decides a request, charging it if it is allowed; with a name for the charge, by which it can be settled.
    pub fn reserve(&mut self, now: Tick, cost: Cost) -> (Decision, Option<u64>) {
        let decision = self.decide(now, cost);
        let charge = (decision.allowed && cost > 0).then(|| self.name_charge());
        (decision, charge)
    }

    /// Names the charge that was just made.
    pub fn name_charge(&mut self) -> u64 {
        static NAMES: AtomicU64 = AtomicU64::new(0);
        let name = NAMES.fetch_add(1, Ordering::Relaxed);
        let (at, level) = (self.last, self.used(self.last));
        self.charges.push(Charge { name, at, as_of: at, level });
        name
    }

    /// Changes a charge by an amount: charges more, or returns what still counts of it; returns how much had no
    /// effect.
    ///
    /// A bucket returns no more than was in it at the charge and has not drained since, and no more than was ever
    /// in it since the charge.
    pub fn settle(&mut self, now: Tick, charge: Option<u64>, change: i128) -> u128 {
        if change == 0 {
            return 0;
        }
        if change > 0 {
            return self.force(now, change);
        }
        self.rebase(now.0.into());
        let (t, w, asked) =
            (self.taken_as(now.0.into()), window(&self.numbers), change.unsigned_abs());
        let named = self.charges.iter().find(|one| Some(one.name) == charge);
        let Some(charge) = named.cloned() else {
            return asked;
        };
        if charge.at > t || self.is_fresh(t) {
            return asked;
        }
        let used = self.used(t);
        let per_tick = self.per_tick();
        let returned = match &mut self.memory {
            Memory::Bucket(_) if self.last < charge.as_of => BigRational::zero(),
            Memory::Bucket(level) => {
                let left = charge.level - ratio(t - charge.as_of) * per_tick;
                let returned = ratio(asked).min(left.max(BigRational::zero())).min(used.clone());
                // Nothing changes otherwise, not even the time of the last change.
                if !returned.is_zero() {
                    *level = used - &returned;
                }
                returned
            }
            Memory::Anchored(start, count) if charge.at >= *start => {
                let returned = asked.min(*count);
                *count -= returned;
                ratio(returned)
            }
            Memory::Anchored(..) => BigRational::zero(),
            Memory::Windows(counts) => {
                let (number, of_charge) = (t.div_euclid(w), charge.at.div_euclid(w));
                let back = i128::from(self.numbers.kind == Kind::SlidingWindowCounter);
                let count = counts.get_mut(&of_charge).filter(|_| number - of_charge <= back);
                ratio(count.map_or(0, |count| {
                    let returned = asked.min(*count);
                    *count -= returned;
                    returned
                }))
            }
            Memory::Log(entries) => {
                entries.retain(|(at, _)| t - w < *at);
                let mut left = asked;
                for (_, cost) in entries.iter_mut().filter(|(at, _)| *at == charge.at) {
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
        self.note_level();
        self.forget_if_fresh();
        asked - returned.floor().to_integer().to_u128().expect("not negative")
    }

    /// Lowers what earlier charges can return to what is in the bucket now.
    fn note_level(&mut self) {
        if !matches!(self.memory, Memory::Bucket(_)) {
            return;
        }
        let (t, now) = (self.last, self.used(self.last));
        let per_tick = self.per_tick();
        for charge in self.charges.iter_mut().filter(|charge| charge.as_of <= t) {
            let left = &charge.level - ratio(t - charge.as_of) * &per_tick;
            charge.level = left.min(now.clone()).max(BigRational::zero());
            charge.as_of = t;
        }
    }

    fn per_tick(&self) -> BigRational {
        ratio(self.numbers.limit) / ratio(window(&self.numbers))
    }

    /// What a further charge comes on top of.
    fn charged(&self, t: i128) -> BigRational {
        match &self.memory {
            Memory::Windows(counts) => {
                let number = t.div_euclid(window(&self.numbers));
                ratio(counts.get(&number).copied().unwrap_or(0))
            }
            _ => self.used(t),
        }
    }

    /// What a refund can give back.
    fn charged_with_previous(&self, t: i128) -> BigRational {
        match &self.memory {
            Memory::Windows(counts) if self.numbers.kind == Kind::SlidingWindowCounter => {
                let number = t.div_euclid(window(&self.numbers));
                self.charged(t) + ratio(counts.get(&(number - 1)).copied().unwrap_or(0))
            }
            _ => self.charged(t),
        }
    }

    /// Returns what is used at a time, in this many parts of a unit, rounded up.
    pub fn used_in_parts(&self, now: Tick, parts: u64) -> u128 {
        let used = self.used(self.taken_as(now.0.into())) * ratio(parts);
        used.ceil().to_integer().to_u128().expect("not negative")
    }

    /// Returns whether nothing of the past matters any more.
    pub fn is_fresh_at(&self, now: Tick) -> bool {
        self.is_fresh(self.taken_as(now.0.into()))
    }

    /// What is used at a time, in whole units, rounded up.
    pub fn used_up(&self, now: Tick) -> u128 {
        let used = self.used(self.taken_as(now.0.into())).ceil().to_integer();
        used.to_u128().expect("not negative")
    }

    /// Forgets everything: the key is as it was before it was ever seen.
    pub fn reset(&mut self, now: Tick) {
        *self = Self::first(&self.numbers, now);
    }

    /// Goes on under other numbers, keeping what was used, at most the new capacity.
    pub fn change(&mut self, numbers: &Numbers, now: Tick) {
        let rule = |n: &Numbers| (n.kind, n.limit, n.window, n.burst, n.debt, n.anchor);
        if rule(numbers) == rule(&self.numbers) {
            self.numbers = *numbers;
            return;
        }
        self.rebase(now.0.into());
        // A late time is that of the last change.
        let t = self.taken_as(now.0.into());
        let used = self.used(t);
        let now = Tick(i64::try_from(t).expect("between two ticks"));
        *self = Self::with_used(numbers, &used.min(ratio(numbers.burst)), now);
    }
}

fn window(numbers: &Numbers) -> i128 {
    numbers.window.0.into()
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// The least number for which a predicate holds that, once true, stays true.
fn least(holds: impl Fn(i128) -> bool) -> u64 {
    let (mut low, mut high) = (0_i128, 1_i128);
    while !holds(high) {
        assert!(high < 1 << 66, "never becomes true");
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
    // Beyond 2⁶⁴ there is no tick left to tell.
    high.try_into().unwrap_or(u64::MAX)
}
