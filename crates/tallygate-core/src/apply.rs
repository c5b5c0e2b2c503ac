//! One step for every verb: some limits, each with a key's state, decided together.
//!
//! Check, look, refund, settle and reset are all an [`Op`] on one or more [`Part`]s. The step is all
//! or nothing: either every part that asks is admitted and all are charged, or none is. Whoever
//! holds the states (a table behind a lock, a compare-and-set loop) runs this function on them, or its
//! two halves part by part.

use crate::{Algorithm, Answer, Cost, Outcome, Receipt, Tick};

/// What to do to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Op {
    /// Ask for this much, and use it if it is admitted. A cost of 0 only looks.
    Check(Cost),
    /// Answer as a check would, and change nothing.
    Peek(Cost),
    /// Charge this much without asking, which may lead into debt, or refund it where it is negative.
    Force(i128),
    /// Make the key as it was before it was ever seen.
    Reset,
}

/// One limit's part in a decision.
#[derive(Debug)]
pub struct Part<'a, A: Algorithm> {
    /// The limit.
    pub rule: &'a A,
    /// The key's state under it.
    pub state: &'a mut A::State,
    /// What to do.
    pub op: Op,
}

/// What became of the parts: the merged answer, and who refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Applied<T> {
    /// The answer of all parts; `None` if there were none.
    pub answer: Option<T>,
    /// The first part that refused.
    pub refused_by: Option<usize>,
    /// How much of the forced charges and refunds had no effect.
    pub dropped: u128,
}

/// Decides several parts as one, all or nothing.
///
/// ```
/// use tallygate_core::{apply, Algorithm, Decision, Op, Part, Policy, Tick, Ticks};
///
/// let per_second = Policy::token_bucket(2).per(Ticks(10)).limit()?;
/// let per_minute = Policy::fixed_window(3).per(Ticks(600)).limit()?;
/// let now = Tick(0);
/// let (mut s, mut m) = (per_second.first(now), per_minute.first(now));
/// let mut ask = |now| {
///     let part = |rule, state| Part { rule, state, op: Op::Check(2) };
///     apply::<_, Decision>(&mut [part(&per_second, &mut s), part(&per_minute, &mut m)], now)
/// };
///
/// assert_eq!(ask(Tick(0)).refused_by, None);
/// assert_eq!(ask(Tick(0)).refused_by, Some(0));
/// let by_the_minute = ask(Tick(10));
/// assert_eq!(by_the_minute.refused_by, Some(1));
/// assert_eq!(by_the_minute.answer.and_then(|d| d.retry_after), Some(Ticks(590)));
/// # Ok::<(), tallygate_core::PolicyError>(())
/// ```
pub fn apply<A: Algorithm, T: Answer>(parts: &mut [Part<'_, A>], now: Tick) -> Applied<T> {
    let refused_by = parts.iter().position(|part| !part.admits(now));
    let mut applied = Applied { answer: None, refused_by, dropped: 0 };
    for part in parts {
        let (answer, dropped) = part.step::<T>(now, refused_by.is_none());
        applied.dropped = applied.dropped.saturating_add(dropped);
        applied.answer = Some(match applied.answer {
            Some(others) => T::merge(others, answer),
            None => answer,
        });
    }
    applied
}

/// The usual case without parts: one request under one rule.
#[inline(always)]
pub(crate) fn decide<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
) -> T {
    if cost == 0 { look(rule, state, now, true) } else { check(rule, state, now, cost, true) }
}

/// Decides an estimate as a check does; with the receipt of what was charged.
pub fn reserve<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    estimate: Cost,
) -> (T, Receipt) {
    if estimate == 0 {
        return (look(rule, state, now, true), Receipt::Nothing);
    }
    let mut receipt = Receipt::Nothing;
    let answer = check_by(rule, state, now, estimate, true, |state| {
        let charged = rule.admit_with_receipt(state, now, estimate);
        let is_allowed = charged.is_some();
        receipt = charged.unwrap_or_default();
        is_allowed
    });
    (answer, receipt)
}

/// Changes a charge that left a receipt by `change` units, and reads the answer from what is left; with how
/// many units had no effect.
pub fn settle<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    change: i128,
    receipt: &Receipt,
) -> (T, u128) {
    let dropped = if change == 0 { 0 } else { rule.settle(state, now, change, receipt) };
    (told(rule, state, now), dropped)
}

impl<A: Algorithm> Part<'_, A> {
    /// Whether this part has nothing against the decision. Whoever cannot have all states at once
    /// asks every part this, and then lets every part [`step`](Self::step).
    pub fn admits(&self, now: Tick) -> bool {
        match self.op {
            Op::Check(cost) | Op::Peek(cost) => {
                seen_from(self.rule, self.state, now, |state| self.rule.admits(state, now, cost))
            }
            Op::Force(_) | Op::Reset => true,
        }
    }

    /// Carries the part out, if every part agrees to `go`, and reads the answer from what is left;
    /// with how much of a forced charge or a refund had no effect.
    pub fn step<T: Answer>(&mut self, now: Tick, go: bool) -> (T, u128) {
        let rule = self.rule;
        match self.op {
            Op::Check(0) | Op::Peek(0) => (look(rule, self.state, now, go), 0),
            Op::Check(cost) => (check(rule, self.state, now, cost, go), 0),
            Op::Peek(cost) => (check(rule, &mut self.state.clone(), now, cost, go), 0),
            Op::Force(0) => (told(rule, self.state, now), 0),
            Op::Force(amount) => {
                let mut dropped = 0;
                if go {
                    if rule.set_back(self.state, now) {
                        rule.rebase(self.state, now);
                    }
                    dropped = rule.charge(self.state, now, amount);
                }
                (told(rule, self.state, now), dropped)
            }
            Op::Reset => {
                if go {
                    *self.state = rule.first(now);
                }
                (told(rule, self.state, now), 0)
            }
        }
    }
}

/// The answer to an operation that asks for nothing.
fn told<A: Algorithm, T: Answer>(rule: &A, state: &A::State, now: Tick) -> T {
    seen_from(rule, state, now, |state| T::of(rule, state, now, Outcome::Spared(0), None))
}

/// Tells how a key stands, and changes nothing.
#[cold]
fn look<A: Algorithm, T: Answer>(rule: &A, state: &A::State, now: Tick, go: bool) -> T {
    seen_from(rule, state, now, |state| {
        let outcome = match rule.admits(state, now, 0) {
            true if go => Outcome::Admitted(0),
            true => Outcome::Spared(0),
            false => Outcome::Refused(0),
        };
        let shadowed = rule.refusing(state, now, 0, true);
        T::of(rule, state, now, outcome, shadowed)
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
    check_by(rule, state, now, cost, go, |state| rule.admit(state, now, cost))
}

/// The one place where a request is decided. `admit` charges it if it is allowed.
#[inline(always)]
fn check_by<A: Algorithm, T: Answer>(
    rule: &A,
    state: &mut A::State,
    now: Tick,
    cost: Cost,
    go: bool,
    admit: impl FnOnce(&mut A::State) -> bool,
) -> T {
    if rule.set_back(state, now) {
        rule.rebase(state, now);
    }
    let shadowed = if T::TELLS { rule.refusing(state, now, cost, true) } else { None };
    let allowed = match go {
        true => admit(state).then_some(Outcome::Admitted(cost)),
        false => rule.admits(state, now, cost).then_some(Outcome::Spared(cost)),
    };
    let outcome = allowed.unwrap_or_else(|| {
        rule.refuse(state, now, cost);
        Outcome::Refused(cost)
    });
    T::of(rule, state, now, outcome, shadowed)
}

/// Reads a state as it stands at `now`, on a copy if the clock was set back.
#[inline]
fn seen_from<A: Algorithm, R>(
    rule: &A,
    state: &A::State,
    now: Tick,
    read: impl FnOnce(&A::State) -> R,
) -> R {
    if rule.set_back(state, now) {
        let mut rebased = state.clone();
        rule.rebase(&mut rebased, now);
        read(&rebased)
    } else {
        read(state)
    }
}
