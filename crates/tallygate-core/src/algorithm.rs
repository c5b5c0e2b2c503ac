//! What an algorithm is: a rule that decides from a state, a time and a cost, and nothing else.
//!
//! The six algorithms of this crate and any algorithm of a user's own stand behind [`Algorithm`].
//! Stores see only this trait: they keep the states, and ask the rule everything else.

use alloc::vec::Vec;
use core::cmp::Ordering;

use crate::{Answer, Cost, DecodeError, Limit, Receipt, Tick, Ticks};

/// When a request would be admitted if nothing else came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// At once.
    Now,
    /// After exactly this wait, and not one tick sooner.
    After(Ticks),
    /// Never by itself: the cost exceeds the capacity, or somebody else has to give way.
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

/// When a request can be admitted behind others that wait for the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FitBehind {
    /// The earliest time at which it can fit, if the requests ahead are admitted first and nothing else
    /// comes.
    pub earliest: Fit,
    /// The wait after which it has been admitted at the latest, if every request ahead is admitted as soon as it
    /// fits; `None` if it is not known.
    pub latest: Option<Ticks>,
}

impl FitBehind {
    /// What is known of a request with nothing ahead, or with an unknown effect of what is ahead.
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

/// What a caller is told beside yes or no. It costs divisions, so it is computed only when asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Facts {
    /// The capacity: what `remaining` counts down from.
    pub limit: Cost,
    /// The largest cost that would be admitted now.
    pub remaining: Cost,
    /// The time until nothing is used.
    pub reset_after: Ticks,
    /// How long the request just admitted should wait for its turn (leaky bucket; else none).
    pub delay: Ticks,
    /// The limit that `limit` and `remaining` belong to, by its index: the first with the least remaining. 0 for a rule
    /// that is one limit, `None` if no limit applies.
    pub scarcest: Option<usize>,
}

impl Facts {
    /// What is told where nothing is limited.
    pub const UNLIMITED: Self = Self { scarcest: None, ..Self::all_of(Cost::MAX) };
    /// The facts of a client that is blocked.
    pub const BLOCKED: Self = Self { scarcest: None, ..Self::all_of(0) };

    /// What is told of a capacity of which nothing is used.
    #[must_use]
    pub const fn all_of(capacity: Cost) -> Self {
        Self {
            limit: capacity,
            remaining: capacity,
            reset_after: Ticks::ZERO,
            delay: Ticks::ZERO,
            scarcest: Some(0),
        }
    }
}

/// What a key has spent and not yet earned back: whole units and a part of one.
///
/// It is what survives a change of limit, window, burst or algorithm. The part keeps a client
/// whose tier flips with every request from losing the fraction it has earned in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Whole units.
    pub whole: Cost,
    /// The part of one more unit, as a numerator below its denominator.
    pub part: (u64, u64),
}

impl Used {
    /// Nothing used: fresh.
    pub const NOTHING: Self = Self::whole(0);

    /// A whole number of units.
    #[must_use]
    pub const fn whole(whole: Cost) -> Self {
        Self { whole, part: (0, 1) }
    }

    /// The least whole number of units that covers it.
    #[must_use]
    pub const fn rounded_up(self) -> Cost {
        self.whole.saturating_add((self.part.0 > 0) as Cost)
    }

    /// Returns whether it is more than another amount, to the last part of a unit.
    #[must_use]
    pub const fn is_more_than(self, other: Self) -> bool {
        if self.whole != other.whole {
            return self.whole > other.whole;
        }
        let (own, others) = (self.part, other.part);
        own.0 as u128 * others.1 as u128 > others.0 as u128 * own.1 as u128
    }

    /// The same, but not above a capacity.
    #[must_use]
    pub const fn at_most(self, capacity: Cost) -> Self {
        if self.whole < capacity { self } else { Self::whole(capacity) }
    }
}

/// The share of its own quota that a key has used: at least 0, at most all of it.
///
/// Shares of different rules compare exactly. A store that must drop keys ranks them by it, because a client can
/// choose how many units it uses, but not which share of its quota they are.
#[derive(Clone, Copy, Debug)]
pub struct Share {
    used: Cost,
    capacity: Cost,
}

impl Share {
    /// All of a quota.
    pub const ALL: Self = Self { used: 1, capacity: 1 };
    /// Half of a quota.
    pub const HALF: Self = Self { used: 1, capacity: 2 };

    /// What is used of a capacity, in whole units, rounded up. A debt counts as all of it.
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

/// A rate limiting rule as a pure state machine: state, time and cost in; state and decision out.
///
/// Times may come in any order. An implementation takes a `now` before the state's last change as
/// that change's time, unless [`set_back`](Self::set_back) says that it cannot be a thread that came
/// late: then the state is [rebased](Self::rebase) before anything else is asked of it. A state that
/// has used nothing has no time: it must decide as [`fresh`](Self::fresh) does, because a store may
/// drop it whenever it likes.
///
/// A cooldown, as an algorithm of a user's own: one request, then silence for a while.
///
/// ```
/// use tallygate_core::{
///     Algorithm, Cost, Decision, DecodeError, Facts, Fit, Tick, Ticks, Used,
/// };
///
/// struct Cooldown(Ticks);
///
/// impl Algorithm for Cooldown {
///     type State = Option<Tick>; // when it was last used
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
///     fn set_back(&self, state: &Option<Tick>, now: Tick) -> bool {
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
/// let mut state = rule.first(Tick(100));
/// assert!(rule.decide::<bool>(&mut state, Tick(100), 1));
/// let refused: Decision = rule.decide(&mut state, Tick(110), 1);
/// assert_eq!(refused.retry_after, Some(Ticks(20)));
/// ```
pub trait Algorithm {
    /// What is kept for a key.
    type State: Clone;

    /// The most that can be used: `burst` for buckets, `limit` for windows.
    fn capacity(&self) -> Cost;

    /// The state of a key that has used nothing.
    fn fresh(&self, now: Tick) -> Self::State;

    /// The state of a key never seen. Differs from [`fresh`](Self::fresh) only for rules whose new
    /// keys do not start full.
    fn first(&self, now: Tick) -> Self::State {
        self.fresh(now)
    }

    /// Returns the time of the state's last change.
    ///
    /// A store that reads its clock before it locks the state decides at this time if its own reading
    /// is earlier: the caller is late, by however much, and must not earn that time twice. It never
    /// calls [`rebase`](Self::rebase) for a late caller.
    fn last_change(&self, state: &Self::State) -> Tick;

    /// Returns whether, in a history of explicit times, `now` is so far before the state's last change
    /// that the clock must have been set back.
    fn set_back(&self, state: &Self::State, now: Tick) -> bool;

    /// Moves the state to `now`, before its last change, keeping what was used.
    ///
    /// It is the one change that is kept even when the request is refused: otherwise a refused
    /// client would stay refused until the old time comes round again.
    fn rebase(&self, state: &mut Self::State, now: Tick);

    /// Returns the time at which a store decides for a caller that read `now` before it locked the state.
    ///
    /// This is the time of the last change if `now` is earlier.
    #[inline]
    fn decides_at(&self, state: &Self::State, now: Tick) -> Tick {
        now.max(self.last_change(state))
    }

    /// Moves the state to `now` after the clock was set back, keeping what was used.
    ///
    /// It decides as the state would in a history of explicit times: a state that is ahead of `now` by at
    /// most a window stays, and one that has used nothing starts at `now`.
    fn clock_set_back(&self, state: &mut Self::State, now: Tick) {
        if self.set_back(state, now) {
            self.rebase(state, now);
        } else if self.last_change(state) > now && self.is_fresh(state, now) {
            *state = self.fresh(now);
        }
    }

    /// Whether the cost would be admitted now. Override it where yes or no is cheaper than when.
    fn admits(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.fit(state, now, cost) == Fit::Now
    }

    /// Admits the cost and uses it, or refuses it and changes nothing: the whole of a yes/no
    /// decision. Override it where that is cheaper in one step than in two.
    #[inline]
    fn admit(&self, state: &mut Self::State, now: Tick, cost: Cost) -> bool {
        let admits = self.admits(state, now, cost);
        if admits && cost > 0 {
            self.charge(state, now, i128::from(cost));
        }
        admits
    }

    /// What a refusal leaves behind: nothing, unless the rule has a penalty.
    #[inline]
    fn refuse(&self, _state: &mut Self::State, _now: Tick, _cost: Cost) {}

    /// Which of the limits of a rule refuses a cost: the first that does, or the first that would if
    /// it were not a [shadow](crate::LimitBuilder::shadow).
    #[inline]
    fn refusing(&self, state: &Self::State, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        (!shadow && !self.admits(state, now, cost)).then_some(0)
    }

    /// Returns one of its limits at a time, by its index; `None` for a rule of another kind.
    ///
    /// With [`Decision::decided_by`](crate::Decision::decided_by), it gives the name, quota and window of the limit that
    /// a decision of this rule is about.
    fn limit(&self, _index: usize, _now: Tick) -> Option<&Limit> {
        None
    }

    /// Returns the name of one of its limits at a time.
    fn limit_name(&self, limit: usize, now: Tick) -> &str {
        self.limit(limit, now).map_or("", Limit::name)
    }

    /// Whether what it admits at a time is charged. What is not cannot be given back either.
    fn charges(&self, _now: Tick) -> bool {
        true
    }

    /// When the cost would be admitted if nothing else came, counted from the `now` that is given.
    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit;

    /// Returns bounds on the time at which the cost fits if `ahead` units, of requests that fit by themselves,
    /// must be admitted before it.
    ///
    /// It must cost no more than [`fit`](Self::fit): a store asks it for every request behind a line of waiting
    /// requests. The default ignores the units ahead.
    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        FitBehind::alone(self.fit(state, now, cost), ahead)
    }

    /// Returns a number that differs between rules under which the same key can be decided differently.
    ///
    /// Rules that are the only ones for their keys, as nearly all are, need not override it.
    fn identity(&self) -> u64 {
        0
    }

    /// Uses `amount` without asking, or gives back where it is negative; returns how much of it
    /// had no effect.
    ///
    /// A refund stops at fresh, and acts where the charge was. A charge stops at the bound on debt,
    /// in whole units. An amount of 0 changes nothing.
    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128;

    /// Returns the limits that an allowed cost would not be charged to: the shadow limits that would deny
    /// it, by their index.
    fn uncharged(&self, _state: &Self::State, _now: Tick, _cost: Cost) -> Vec<usize> {
        Vec::new()
    }

    /// Returns the receipt of the charge that was just made, for a reservation to keep.
    ///
    /// By default there is none, and a settled reservation returns nothing of its estimate.
    fn receipt(&self, _state: &Self::State) -> Receipt {
        Receipt::Nothing
    }

    /// Charges a cost if it is allowed; returns the receipt of the charge, or `None` if it is not allowed.
    fn admit_with_receipt(
        &self,
        state: &mut Self::State,
        now: Tick,
        cost: Cost,
    ) -> Option<Receipt> {
        let uncharged = self.uncharged(state, now, cost);
        let is_allowed = self.admit(state, now, cost);
        is_allowed.then(|| match self.charges(now) {
            true => self.receipt(state).without(&uncharged),
            false => Receipt::Nothing,
        })
    }

    /// Charges a cost without asking, as [`charge`](Self::charge) does; returns the receipt, which knows how much
    /// was not charged under each limit.
    fn charge_with_receipt(&self, state: &mut Self::State, now: Tick, cost: Cost) -> Receipt {
        let dropped = self.charge(state, now, cost.into());
        self.receipt(state).with_dropped(dropped)
    }

    /// Changes a charge that left a receipt by `change` units: charges more without asking, or returns
    /// units where the change is negative. Returns how many units had no effect.
    ///
    /// It returns at most the units of the charge that still count, as far as the receipt shows it: a
    /// bucket's units that have not drained, the count of a window that has not passed, the charge's own
    /// entry in a log. Units that were [not charged](crate::Mark::returnable) are not returned.
    fn settle(&self, state: &mut Self::State, now: Tick, change: i128, _receipt: &Receipt) -> u128 {
        if change <= 0 {
            return change.unsigned_abs();
        }
        if self.set_back(state, now) {
            self.rebase(state, now);
        }
        self.charge(state, now, change)
    }

    /// What the caller is told. `admitted` is the cost just charged, if the request was admitted.
    fn facts(&self, state: &Self::State, now: Tick, admitted: Option<Cost>) -> Facts;

    /// From when on the state is fresh if nothing else comes: a store may drop it then.
    fn fresh_at(&self, state: &Self::State) -> Option<Tick>;

    /// Returns whether the state is fresh at `now`: whether [`fresh_at`](Self::fresh_at) is not later.
    ///
    /// A store that is full asks it of many states. Override it where this can be answered without a division.
    #[inline]
    fn is_fresh(&self, state: &Self::State, now: Tick) -> bool {
        self.fresh_at(state).is_some_and(|fresh| fresh <= now)
    }

    /// What is used at `now`.
    fn used(&self, state: &Self::State, now: Tick) -> Used;

    /// Returns the share of the quota that is used at `now`: by it a full store chooses which key to evict.
    ///
    /// Override it where one capacity does not say it all, such as for a rule of several limits.
    fn share_used(&self, state: &Self::State, now: Tick) -> Share {
        Share::of(self.used(state, now), self.capacity())
    }

    /// The state of a key that has used this much, at most the capacity, at `now`.
    fn with_used(&self, used: Used, now: Tick) -> Self::State;

    /// Appends the state to `out`, starting with a tag of its algorithm.
    fn encode(&self, state: &Self::State, out: &mut Vec<u8>);

    /// Reads back what [`encode`](Self::encode) wrote.
    ///
    /// # Errors
    /// The bytes are not a whole state of this rule. Nothing is guessed.
    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError>;

    /// Decides a request and charges it if it is admitted. Ask for a `bool` when yes or no will do,
    /// for a [`Decision`](crate::Decision) to be told everything.
    #[inline]
    fn decide<T: Answer>(&self, state: &mut Self::State, now: Tick, cost: Cost) -> T
    where
        Self: Sized,
    {
        crate::apply::decide(self, state, now, cost)
    }
}
