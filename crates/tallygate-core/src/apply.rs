//! One step for every operation, on one or more states.
//!
//! Checks, peeks, charges, refunds and resets are an [`Op`] on one or more [`Part`]s. The step is all or nothing:
//! if every part allows the request, all parts charge it; otherwise none does. A store calls [`apply`] on the
//! states that it has locked. A store that cannot hold all states at once calls [`Part::allows`] for each part,
//! and then [`Part::step`] for each part.

use crate::{Algorithm, Answer, Cost, Outcome, Receipt, Tick};

/// An operation on the state of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Charges a cost if it is allowed. A cost of 0 only reads the state.
    Check(Cost),
    /// Returns what a check would return, and changes nothing.
    Peek(Cost),
    /// Charges units whether or not they are allowed, which may lead into debt. A negative amount is a refund.
    Force(i128),
    /// Restores the initial state.
    Reset,
}

/// One of the states on which an operation is carried out.
#[derive(Debug)]
pub struct Part<'a, A: Algorithm> {
    /// The rule.
    pub rule: &'a A,
    /// The state of the key under the rule.
    pub state: &'a mut A::State,
    /// The operation.
    pub op: Op,
}

/// The result of [`apply`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied<T> {
    /// The merged answer of all parts; `None` if there are no parts.
    pub answer: Option<T>,
    /// The index of the first part that denied the request.
    pub denied_by: Option<usize>,
    /// How many units of forced charges and refunds had no effect.
    pub dropped: u128,
}

/// Carries out an operation on several states, all or nothing.
///
/// ```
/// use tallygate_core::{apply, Algorithm, Decision, Op, Part, Policy, Tick, Ticks};
///
/// let per_second = Policy::token_bucket(2).per(Ticks(10)).limit()?;
/// let per_minute = Policy::fixed_window(3).per(Ticks(600)).limit()?;
/// let now = Tick(0);
/// let (mut second, mut minute) = (per_second.initial(now), per_minute.initial(now));
/// let mut check = |now| {
///     let part = |rule, state| Part { rule, state, op: Op::Check(2) };
///     let parts = &mut [part(&per_second, &mut second), part(&per_minute, &mut minute)];
///     apply::<_, Decision>(parts, now)
/// };
///
/// assert_eq!(check(Tick(0)).denied_by, None);
/// assert_eq!(check(Tick(0)).denied_by, Some(0));
/// let denied = check(Tick(10));
/// assert_eq!(denied.denied_by, Some(1));
/// assert_eq!(denied.answer.and_then(|decision| decision.retry_after), Some(Ticks(590)));
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
pub fn apply<A: Algorithm, T: Answer>(parts: &mut [Part<'_, A>], now: Tick) -> Applied<T> {
    let denied_by = parts.iter().position(|part| !part.allows(now));
    let mut applied = Applied { answer: None, denied_by, dropped: 0 };
    for part in parts {
        let (answer, dropped) = part.step::<T>(now, denied_by.is_none());
        applied.dropped = applied.dropped.saturating_add(dropped);
        applied.answer = Some(match applied.answer {
            Some(others) => T::merge(others, answer),
            None => answer,
        });
    }
    applied
}

/// Decides one request under one rule.
#[inline(always)]
pub(crate) fn decide<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
) -> T {
    if cost == 0 { read_only(rule, state, now, true) } else { check(rule, state, now, cost, true) }
}

/// Charges an estimated cost if it is allowed. Returns the answer and the receipt of the charge.
///
/// Pass the receipt to [`settle`] when the actual cost is known.
pub fn reserve<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    estimate: Cost,
) -> (T, Receipt) {
    if estimate == 0 {
        return (read_only(rule, state, now, true), Receipt::Nothing);
    }
    let mut receipt = Receipt::Nothing;
    let answer = check_with(rule, state, now, estimate, true, |state| {
        let charged = rule.try_charge_with_receipt(state, now, estimate);
        let is_allowed = charged.is_some();
        receipt = charged.unwrap_or_default();
        is_allowed
    });
    (answer, receipt)
}

/// Changes an earlier charge by `change` units: the actual cost minus the estimate.
///
/// Returns the answer after the change, and how many units had no effect. See [`Algorithm::settle`].
pub fn settle<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    change: i128,
    receipt: &Receipt,
) -> (T, u128) {
    let dropped = if change == 0 { 0 } else { rule.settle(state, now, change, receipt) };
    (answer(rule, state, now), dropped)
}

impl<A: Algorithm> Part<'_, A> {
    /// Returns whether this part allows the operation.
    ///
    /// A caller that cannot hold all states at once calls this for every part, and then [`step`](Self::step) for
    /// every part.
    pub fn allows(&self, now: Tick) -> bool {
        match self.op {
            Op::Check(cost) | Op::Peek(cost) => {
                with_state_at(self.rule, self.state, now, |state| {
                    self.rule.allows(state, now, cost)
                })
            }
            Op::Force(_) | Op::Reset => true,
        }
    }

    /// Carries out the operation if `go` is true, which means that all parts allow it.
    ///
    /// Returns the answer of this part, and how many units of a forced charge or a refund had no effect.
    pub fn step<T: Answer>(&mut self, now: Tick, go: bool) -> (T, u128) {
        let rule = self.rule;
        match self.op {
            Op::Check(0) | Op::Peek(0) => (read_only(rule, self.state, now, go), 0),
            Op::Check(cost) => (check(rule, self.state, now, cost, go), 0),
            Op::Peek(cost) => (check(rule, &mut self.state.clone(), now, cost, go), 0),
            Op::Force(0) => (answer(rule, self.state, now), 0),
            Op::Force(amount) => {
                let mut dropped = 0;
                if go {
                    if rule.clock_was_set_back(self.state, now) {
                        rule.rebase(self.state, now);
                    }
                    dropped = rule.charge(self.state, now, amount);
                }
                (answer(rule, self.state, now), dropped)
            }
            Op::Reset => {
                if go {
                    *self.state = rule.initial(now);
                }
                (answer(rule, self.state, now), 0)
            }
        }
    }
}

/// Returns the answer to an operation that charges nothing.
fn answer<A: Algorithm, T: Answer>(rule: &A, state: &A::State, now: Tick) -> T {
    with_state_at(rule, state, now, |state| {
        T::from_outcome(rule, state, now, Outcome::NotCharged(0), None)
    })
}

/// Returns the answer to a check or a peek of cost 0. It changes nothing.
#[cold]
fn read_only<A: Algorithm, T: Answer>(rule: &A, state: &A::State, now: Tick, go: bool) -> T {
    with_state_at(rule, state, now, |state| {
        let outcome = match rule.allows(state, now, 0) {
            true if go => Outcome::Charged(0),
            true => Outcome::NotCharged(0),
            false => Outcome::Denied(0),
        };
        let shadow_denied_by = rule.denying_limit(state, now, 0, true);
        T::from_outcome(rule, state, now, outcome, shadow_denied_by)
    })
}

#[inline(always)]
fn check<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
    go: bool,
) -> T {
    check_with(rule, state, now, cost, go, |state| rule.try_charge(state, now, cost))
}

/// Decides a request. `try_charge` charges it if it is allowed.
#[inline(always)]
fn check_with<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
    go: bool,
    try_charge: impl FnOnce(&mut A::State) -> bool,
) -> T {
    if rule.clock_was_set_back(state, now) {
        rule.rebase(state, now);
    }
    let shadow_denied_by =
        if T::HAS_DETAILS { rule.denying_limit(state, now, cost, true) } else { None };
    let allowed = match go {
        true => try_charge(state).then_some(Outcome::Charged(cost)),
        false => rule.allows(state, now, cost).then_some(Outcome::NotCharged(cost)),
    };
    let outcome = allowed.unwrap_or_else(|| {
        rule.record_denial(state, now, cost);
        Outcome::Denied(cost)
    });
    T::from_outcome(rule, state, now, outcome, shadow_denied_by)
}

/// Calls `read` with the state at `now`. If the clock was set back, this is a rebased copy.
#[inline]
fn with_state_at<A: Algorithm, R>(
    rule: &A,
    state: &A::State,
    now: Tick,
    read: impl FnOnce(&A::State) -> R,
) -> R {
    if rule.clock_was_set_back(state, now) {
        let mut rebased = state.clone();
        rule.rebase(&mut rebased, now);
        read(&rebased)
    } else {
        read(state)
    }
}
