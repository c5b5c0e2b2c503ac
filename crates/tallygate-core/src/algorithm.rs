//! The trait [`Algorithm`]: a rule that decides from a state, a time and a cost.
//!
//! The six algorithms of this crate implement it, and so can a user's own algorithm. A store knows nothing
//! else about a rule: it keeps the states and calls the trait.

use alloc::vec::Vec;
use core::cmp::Ordering;

use crate::{Answer, Bucket, Cost, DecodeError, Limit, Quota, Receipt, Tick, Ticks};

/// The time at which a request would be allowed if no other request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// Immediately.
    Now,
    /// After exactly this wait, and not one tick earlier.
    After(Ticks),
    /// Not by waiting alone: the cost exceeds the capacity, or another request must first return units.
    Never,
}

impl Fit {
    /// Returns the later of two times.
    #[must_use]
    pub(crate) fn or_later(self, other: Self) -> Self {
        match (self, other) {
            (Self::Never, _) | (_, Self::Never) => Self::Never,
            (Self::After(one), Self::After(other)) => Self::After(one.max(other)),
            (Self::Now, wait) | (wait, Self::Now) => wait,
        }
    }
}

/// Bounds on the time at which a request can be allowed behind other requests that wait for the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitBehind {
    /// The earliest time at which the request can be allowed, if the requests ahead are allowed first and
    /// no other request comes.
    pub earliest: Fit,
    /// The longest possible wait, if every request ahead is allowed as soon as it fits; `None` if there is
    /// no known bound.
    pub latest: Option<Ticks>,
}

impl FitBehind {
    /// Returns the bounds for a request that fits at `fit` by itself.
    ///
    /// With nothing ahead, both bounds are `fit`. With `ahead` units whose effect is unknown, there is no
    /// upper bound.
    #[must_use]
    pub const fn alone(fit: Fit, ahead: u128) -> Self {
        let latest = match fit {
            Fit::Now if ahead == 0 => Some(Ticks::ZERO),
            Fit::After(wait) if ahead == 0 => Some(wait),
            _ => None,
        };
        Self { earliest: fit, latest }
    }
}

/// The state of a quota in the terms of a caller: what is left, and when it is restored.
///
/// Computing it takes divisions, so it is computed only for answers that
/// [have details](crate::Answer::HAS_DETAILS).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The capacity, from which `remaining` counts down.
    pub limit: Cost,
    /// The largest cost that would be allowed now.
    pub remaining: Cost,
    /// The time until the whole capacity is available again.
    pub reset_after: Ticks,
    /// How long the request that was just allowed should wait (leaky bucket only; 0 otherwise).
    pub delay: Ticks,
    /// The index of the limit that `limit` and `remaining` describe: the first one with the least remaining.
    /// It is 0 for a rule that is a single limit, and `None` if no limit applies.
    pub scarcest: Option<usize>,
    /// The quota of that limit; `None` for an algorithm that is not one of the six.
    pub quota: Option<Quota>,
}

impl Facts {
    /// The facts of a client without a limit.
    pub const UNLIMITED: Self = Self { scarcest: None, ..Self::all_of(Cost::MAX) };
    /// The facts of a client that is blocked.
    pub const BLOCKED: Self = Self { scarcest: None, ..Self::all_of(0) };

    /// Returns the facts of a capacity of which nothing is used.
    #[must_use]
    pub const fn all_of(capacity: Cost) -> Self {
        Self {
            limit: capacity,
            remaining: capacity,
            reset_after: Ticks::ZERO,
            delay: Ticks::ZERO,
            scarcest: Some(0),
            quota: None,
        }
    }
}

/// The units that a key has used and not yet earned back: whole units and a fraction of one.
///
/// A client keeps what it has used when its limit, window, burst or algorithm changes. Without the fraction,
/// a client whose tier changes with every request would lose what it earns between two requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// The whole units.
    pub whole: Cost,
    /// The fraction of one more unit: a numerator, and a larger denominator.
    pub part: (u64, u64),
}

impl Used {
    /// Nothing is used: the state is fresh.
    pub const NOTHING: Self = Self::whole(0);

    /// Returns a whole number of used units.
    #[must_use]
    pub const fn whole(whole: Cost) -> Self {
        Self { whole, part: (0, 1) }
    }

    /// Returns the units, rounded up to a whole number.
    #[must_use]
    pub const fn rounded_up(self) -> Cost {
        self.whole.saturating_add((self.part.0 > 0) as Cost)
    }

    /// Returns whether more is used than in `other`, compared exactly.
    #[must_use]
    pub const fn is_more_than(self, other: Self) -> bool {
        if self.whole != other.whole {
            return self.whole > other.whole;
        }
        let (own, others) = (self.part, other.part);
        own.0 as u128 * others.1 as u128 > others.0 as u128 * own.1 as u128
    }

    /// Returns the smaller of these units and `capacity`.
    #[must_use]
    pub const fn at_most(self, capacity: Cost) -> Self {
        if self.whole < capacity { self } else { Self::whole(capacity) }
    }
}

/// The share of its quota that a key has used, from 0 to 1.
///
/// Shares of different rules are compared exactly. A full store evicts keys by their share and not by their
/// units, because clients choose how many units they use but cannot choose their quota.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    used: Cost,
    capacity: Cost,
}

impl Share {
    /// The whole quota.
    pub const ALL: Self = Self { used: 1, capacity: 1 };
    /// Half of the quota.
    pub const HALF: Self = Self { used: 1, capacity: 2 };

    /// Returns the used share of a capacity. Units are rounded up to whole ones, and a debt counts as the
    /// whole capacity.
    #[must_use]
    pub const fn of(used: Used, capacity: Cost) -> Self {
        let used = used.rounded_up();
        if used < capacity { Self { used, capacity } } else { Self::ALL }
    }
}

impl Ord for Share {
    fn cmp(&self, other: &Self) -> Ordering {
        if self.capacity == other.capacity {
            return self.used.cmp(&other.used);
        }
        let cross = |one: &Self, other: &Self| u128::from(one.used) * u128::from(other.capacity);
        cross(self, other).cmp(&cross(other, self))
    }
}

impl PartialOrd for Share {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Share {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Share {}

/// A rate limiting rule as a pure state machine.
///
/// A rule decides from three inputs: the state of a key, the time `now`, and the cost of the request. It
/// reads no clock and shares nothing, so a store can keep the states anywhere.
///
/// # Implementing it
///
/// These methods are required:
///
/// | method | question that it answers |
/// |---|---|
/// | [`capacity`](Self::capacity) | How many units can be used at most? |
/// | [`fresh`](Self::fresh) | What is the state of a key that has used nothing? |
/// | [`fit`](Self::fit) | When would a cost be allowed? |
/// | [`charge`](Self::charge) | What is the state after a charge or a refund? |
/// | [`facts`](Self::facts) | What is left, and when is it restored? |
/// | [`fresh_at`](Self::fresh_at) | From when on may a store drop the state? |
/// | [`used`](Self::used), [`with_used`](Self::with_used) | How much is used? Used when a policy changes, and for eviction. |
/// | [`last_change`](Self::last_change), [`clock_was_set_back`](Self::clock_was_set_back), [`rebase`](Self::rebase) | What happens if `now` is before the last change? |
/// | [`encode`](Self::encode), [`decode`](Self::decode) | What are the bytes of a state? |
///
/// The other methods have defaults. Override them if the rule can answer faster, or if it consists of several
/// limits.
///
/// # Time
///
/// Times may come in any order. If `now` is before the state's last change, the rule takes the time of the
/// last change instead: the caller is late. If [`clock_was_set_back`](Self::clock_was_set_back) returns
/// `true`, the clock itself was set back, and the caller [rebases](Self::rebase) the state before it calls
/// anything else.
///
/// A store may drop a fresh state at any time. So a state that has used nothing must decide exactly as
/// [`fresh`](Self::fresh) does, whatever its last change was.
///
/// # Example
///
/// A cooldown: one request, then none for a fixed time.
///
/// ```
/// use tallygate_core::{
///     Algorithm, Cost, Decision, DecodeError, Facts, Fit, Tick, Ticks, Used,
/// };
///
/// struct Cooldown(Ticks);
///
/// impl Algorithm for Cooldown {
///     type State = Option<Tick>; // the time of the last request
///
///     fn capacity(&self) -> Cost {
///         1
///     }
///     fn fresh(&self, _: Tick) -> Option<Tick> {
///         None
///     }
///     fn last_change(&self, state: &Option<Tick>) -> Tick {
///         state.unwrap_or(Tick(i64::MIN))
///     }
///     fn clock_was_set_back(&self, state: &Option<Tick>, now: Tick) -> bool {
///         state.is_some_and(|last| last.since(now) > self.0)
///     }
///     fn rebase(&self, state: &mut Option<Tick>, now: Tick) {
///         *state = Some(now);
///     }
///     fn fit(&self, state: &Option<Tick>, now: Tick, cost: Cost) -> Fit {
///         match (cost, self.facts(state, now, None).reset_after) {
///             (2.., _) => Fit::Never,
///             (0, _) | (_, Ticks::ZERO) => Fit::Now,
///             (_, wait) => Fit::After(wait),
///         }
///     }
///     fn charge(&self, state: &mut Option<Tick>, now: Tick, amount: i128) -> u128 {
///         if amount > 0 {
///             *state = Some(now);
///         } else if amount < 0 {
///             *state = None;
///         }
///         amount.unsigned_abs().saturating_sub(1)
///     }
///     fn facts(&self, state: &Option<Tick>, now: Tick, _: Option<Cost>) -> Facts {
///         let left = |last: Tick| Ticks(self.0.0.saturating_sub(now.since(last).0));
///         let reset_after = state.map_or(Ticks::ZERO, left);
///         let remaining = u64::from(reset_after == Ticks::ZERO);
///         Facts { remaining, reset_after, ..Facts::all_of(1) }
///     }
///     fn fresh_at(&self, state: &Option<Tick>) -> Option<Tick> {
///         state.map_or(Some(Tick(i64::MIN)), |last| last.after(self.0))
///     }
///     fn used(&self, state: &Option<Tick>, now: Tick) -> Used {
///         Used::whole(1 - self.facts(state, now, None).remaining)
///     }
///     fn with_used(&self, used: Used, now: Tick) -> Option<Tick> {
///         (used.rounded_up() > 0).then_some(now)
///     }
///     fn encode(&self, state: &Option<Tick>, out: &mut Vec<u8>) {
///         out.push(b'C');
///         out.extend(state.iter().flat_map(|last| last.0.to_be_bytes()));
///     }
///     fn decode(&self, bytes: &[u8]) -> Result<Option<Tick>, DecodeError> {
///         match bytes.split_first() {
///             Some((b'C', [])) => Ok(None),
///             Some((b'C', rest)) => {
///                 let last = rest.try_into().map_err(|_| DecodeError::Truncated)?;
///                 Ok(Some(Tick(i64::from_be_bytes(last))))
///             }
///             Some((&found, _)) => Err(DecodeError::Tag { found, expected: b'C' }),
///             None => Err(DecodeError::Truncated),
///         }
///     }
/// }
///
/// let rule = Cooldown(Ticks(30));
/// let mut state = rule.initial(Tick(100));
/// assert!(rule.decide::<bool>(&mut state, Tick(100), 1));
/// let denied: Decision = rule.decide(&mut state, Tick(110), 1);
/// assert_eq!(denied.retry_after, Some(Ticks(20)));
/// ```
pub trait Algorithm {
    /// The state that a store keeps for each key.
    type State: Clone + 'static;

    /// Returns the most units that can be used at once: the burst of a bucket, the limit of a window.
    fn capacity(&self) -> Cost;

    /// Returns the state of a key that has used nothing.
    fn fresh(&self, now: Tick) -> Self::State;

    /// Returns the state of a key that the store has never seen.
    ///
    /// It differs from [`fresh`](Self::fresh) only if new keys start with
    /// [less than the capacity](crate::LimitBuilder::starting_with).
    fn initial(&self, now: Tick) -> Self::State {
        self.fresh(now)
    }

    /// Returns the time of the state's last change.
    ///
    /// A store may read its clock before it locks the state. If that reading is earlier than the last change,
    /// the caller is late, and the store decides at the time of the last change: otherwise the key would
    /// earn the same time twice. The store never calls [`rebase`](Self::rebase) for a late caller.
    fn last_change(&self, state: &Self::State) -> Tick;

    /// Returns whether `now` is so far before the state's last change that the clock must have been set back.
    ///
    /// This applies to histories of explicit times, in which no caller can be late.
    fn clock_was_set_back(&self, state: &Self::State, now: Tick) -> bool;

    /// Moves the state back to `now`, which is before its last change, and keeps what was used.
    ///
    /// The caller keeps this change even if the request is denied. Otherwise a denied client would stay denied
    /// until the clock reaches the old time again.
    fn rebase(&self, state: &mut Self::State, now: Tick);

    /// Returns the time at which a store decides a request if it read `now` before it locked the state: the
    /// later of `now` and the last change.
    #[inline]
    fn decision_time(&self, state: &Self::State, now: Tick) -> Tick {
        now.max(self.last_change(state))
    }

    /// Adapts the state to a clock that was set back to `now`, and keeps what was used.
    ///
    /// The result is the same as in a history of explicit times: a state that is ahead of `now` by at most a
    /// window does not change, and a state that has used nothing starts at `now`.
    fn rebase_after_set_back(&self, state: &mut Self::State, now: Tick) {
        if self.clock_was_set_back(state, now) {
            self.rebase(state, now);
        } else if self.last_change(state) > now && self.is_fresh(state, now) {
            *state = self.fresh(now);
        }
    }

    /// Returns whether the cost would be allowed now.
    ///
    /// Override it if this can be computed faster than [`fit`](Self::fit).
    fn allows(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.fit(state, now, cost) == Fit::Now
    }

    /// Charges the cost if it is allowed, and returns whether it is. A denied cost changes nothing.
    ///
    /// Override it if one step is faster than [`allows`](Self::allows) and [`charge`](Self::charge).
    #[inline]
    fn try_charge(&self, state: &mut Self::State, now: Tick, cost: Cost) -> bool {
        let is_allowed = self.allows(state, now, cost);
        if is_allowed && cost > 0 {
            self.charge(state, now, i128::from(cost));
        }
        is_allowed
    }

    /// Records that a request was denied. It changes nothing unless the rule has a
    /// [penalty](crate::Penalty).
    #[inline]
    fn record_denial(&self, _state: &mut Self::State, _now: Tick, _cost: Cost) {}

    /// Returns the index of the first limit that denies the cost; `None` if no limit does.
    ///
    /// With `shadow`, it returns the first [shadow limit](crate::LimitBuilder::shadow) that would deny the
    /// cost if it were enforced.
    #[inline]
    fn denying_limit(
        &self,
        state: &Self::State,
        now: Tick,
        cost: Cost,
        shadow: bool,
    ) -> Option<usize> {
        (!shadow && !self.allows(state, now, cost)).then_some(0)
    }

    /// Returns the limit with this index that is in force at `now`; `None` if the rule has no such [`Limit`].
    ///
    /// Use it with [`Decision::decided_by`](crate::Decision::decided_by) to find the name, quota and window of
    /// the limit that a decision is about.
    fn limit(&self, _index: usize, _now: Tick) -> Option<&Limit> {
        None
    }

    /// Returns the name of a [`limit`](Self::limit), or an empty string.
    fn limit_name(&self, limit: usize, now: Tick) -> &str {
        self.limit(limit, now).map_or("", Limit::name)
    }

    /// Returns whether allowed requests are charged at `now`.
    ///
    /// It is `false` for clients without a limit. A request that was not charged cannot be refunded either.
    fn charges(&self, _now: Tick) -> bool {
        true
    }

    /// Returns the bucket that alone decides a check at `now`: for a state under this bucket, every answer of the
    /// rule is the bucket's answer. By default there is none.
    ///
    /// A store can then deny a key that has used up its quota from a copy of the bucket's state, without
    /// locking the key.
    fn sole_bucket(&self, _now: Tick) -> Option<&Bucket> {
        None
    }

    /// Returns when the cost would be allowed if no other request came, counted from `now`.
    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit;

    /// Returns bounds on the time at which the cost is allowed if `ahead` units of waiting requests must be
    /// allowed before it. Each of these requests fits by itself.
    ///
    /// It must be as fast as [`fit`](Self::fit): a store calls it for every request that arrives while others
    /// wait. The default ignores the units ahead.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        FitBehind::alone(self.fit(state, now, cost), ahead)
    }

    /// Returns a number that distinguishes rules that a store applies to the same key.
    ///
    /// Override it only if one key can be decided under several rules.
    fn identity(&self) -> u64 {
        0
    }

    /// Charges `amount` units whether or not they are allowed, or refunds units if `amount` is negative.
    /// Returns how many units had no effect.
    ///
    /// A charge stops at the bound on debt, in whole units. A refund stops when nothing is used, and only
    /// affects usage that still counts: an expired window returns nothing. An amount of 0 changes nothing.
    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128;

    /// Returns the indexes of the limits that an allowed cost would not be charged to: the shadow limits that
    /// would deny it.
    fn uncharged_limits(&self, _state: &Self::State, _now: Tick, _cost: Cost) -> Vec<usize> {
        Vec::new()
    }

    /// Returns the receipt of the charge that was just made, which a reservation keeps until it is settled.
    ///
    /// By default there is no receipt, and settling a reservation returns no units.
    fn receipt(&self, _state: &Self::State) -> Receipt {
        Receipt::Nothing
    }

    /// Charges the cost if it is allowed. Returns the receipt of the charge, or `None` if the cost is denied.
    fn try_charge_with_receipt(
        &self,
        state: &mut Self::State,
        now: Tick,
        cost: Cost,
    ) -> Option<Receipt> {
        let uncharged = self.uncharged_limits(state, now, cost);
        let is_allowed = self.try_charge(state, now, cost);
        is_allowed.then(|| match self.charges(now) {
            true => self.receipt(state).without(&uncharged),
            false => Receipt::Nothing,
        })
    }

    /// Charges the cost whether or not it is allowed, as [`charge`](Self::charge) does. Returns a receipt that
    /// includes the units that were not charged under each limit.
    fn charge_with_receipt(&self, state: &mut Self::State, now: Tick, cost: Cost) -> Receipt {
        let dropped = self.charge(state, now, cost.into());
        self.receipt(state).with_dropped(dropped)
    }

    /// Changes an earlier charge by `change` units: charges more whether or not it is allowed, or returns
    /// units if `change` is negative. Returns how many units had no effect.
    ///
    /// It returns at most the units of that charge that still count according to the receipt: units of a
    /// bucket that have not drained, the lowest count since the charge in a window that has not ended, or the
    /// charge's own entry in a log. Units that were [not charged](crate::ChargeRecord::returnable) are not returned.
    fn settle(&self, state: &mut Self::State, now: Tick, change: i128, _receipt: &Receipt) -> u128 {
        if change <= 0 {
            return change.unsigned_abs();
        }
        if self.clock_was_set_back(state, now) {
            self.rebase(state, now);
        }
        self.charge(state, now, change)
    }

    /// Returns what is left of the quota and when it is restored.
    ///
    /// `charged` is the cost that was just charged, if the request was allowed.
    fn facts(&self, state: &Self::State, now: Tick, charged: Option<Cost>) -> Facts;

    /// Returns the time from which on the state is fresh if no other request comes; `None` if that time is
    /// later than the last tick.
    ///
    /// From then on, a store may drop the state.
    fn fresh_at(&self, state: &Self::State) -> Option<Tick>;

    /// Returns whether the state is fresh at `now`.
    ///
    /// A full store calls it for many states. Override it if it can be computed without a division.
    #[inline]
    fn is_fresh(&self, state: &Self::State, now: Tick) -> bool {
        self.fresh_at(state).is_some_and(|fresh| fresh <= now)
    }

    /// Returns the units that are used at `now`.
    fn used(&self, state: &Self::State, now: Tick) -> Used;

    /// Returns the share of the quota that is used at `now`. A full store evicts the key with the smallest
    /// share.
    ///
    /// Override it if the rule has more than one capacity.
    fn share_used(&self, state: &Self::State, now: Tick) -> Share {
        Share::of(self.used(state, now), self.capacity())
    }

    /// Returns the state of a key that has used these units at `now`, but at most the capacity.
    fn with_used(&self, used: Used, now: Tick) -> Self::State;

    /// Appends the state to `out`. The first byte is a tag that identifies the algorithm.
    fn encode(&self, state: &Self::State, out: &mut Vec<u8>);

    /// Reads a state that [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// Returns an error if the bytes are not exactly one valid state of this rule.
    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError>;

    /// Decides a request, and charges its cost if it is allowed. A cost of 0 only reads the state.
    ///
    /// The type of the result determines the work: `bool` is the fastest, and a
    /// [`Decision`](crate::Decision) also has the remaining units and the wait.
    #[inline]
    fn decide<T: Answer>(&self, state: &mut Self::State, now: Tick, cost: Cost) -> T
    where
        Self: Sized,
    {
        crate::apply::decide(self, state, now, cost)
    }
}
