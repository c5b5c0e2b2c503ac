//! Several limits as one rule: a policy decides all or nothing over its limits.
//!
//! The state is a list of theirs. What is told is the tightest of all: the least remaining, the
//! longest wait.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::limit::{Limit, LimitState};
use crate::policy::Policy;
use crate::{Cost, Tick};

impl Policy {
    fn each<'a>(
        &'a self,
        states: &'a [LimitState],
    ) -> impl Iterator<Item = (&'a Limit, &'a LimitState)> {
        self.limits().iter().zip(states)
    }

    fn make(&self, make: impl FnMut(&Limit) -> LimitState) -> Box<[LimitState]> {
        self.limits().iter().map(make).collect()
    }
}

impl Algorithm for Policy {
    type State = Box<[LimitState]>;

    fn capacity(&self) -> Cost {
        self.limits().iter().map(Limit::capacity).min().unwrap_or(0)
    }

    fn fresh(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.fresh(now))
    }

    fn first(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.first(now))
    }

    fn set_back(&self, state: &Self::State, now: Tick) -> bool {
        self.each(state).any(|(limit, state)| limit.set_back(state, now))
    }

    fn rebase(&self, state: &mut Self::State, now: Tick) {
        for (limit, state) in self.limits().iter().zip(state) {
            if limit.set_back(state, now) {
                limit.rebase(state, now);
            }
        }
    }

    fn admits(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.each(state).all(|(limit, state)| limit.admits(state, now, cost))
    }

    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit {
        let longest = |longest, (limit, state): (&Limit, &LimitState)| match (
            longest,
            limit.fit(state, now, cost),
        ) {
            (Fit::Never, _) | (_, Fit::Never) => Fit::Never,
            (Fit::After(one), Fit::After(other)) => Fit::After(one.max(other)),
            (Fit::Now, wait) | (wait, Fit::Now) => wait,
        };
        self.each(state).fold(Fit::Now, longest)
    }

    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128 {
        let each = self.limits().iter().zip(state);
        each.map(|(limit, state)| limit.charge(state, now, amount)).max().unwrap_or(0)
    }

    fn facts(&self, state: &Self::State, now: Tick, admitted: Option<Cost>) -> Facts {
        let facts = self.each(state).map(|(limit, state)| limit.facts(state, now, admitted));
        let tightest = facts.reduce(|one, other| {
            let tightest = if other.remaining < one.remaining { other } else { one };
            Facts {
                reset_after: one.reset_after.max(other.reset_after),
                delay: one.delay.max(other.delay),
                ..tightest
            }
        });
        // A policy has at least one limit.
        tightest.unwrap_or(Facts {
            limit: 0,
            remaining: 0,
            reset_after: crate::Ticks::ZERO,
            delay: crate::Ticks::ZERO,
        })
    }

    fn fresh_at(&self, state: &Self::State) -> Option<Tick> {
        self.each(state)
            .try_fold(Tick(i64::MIN), |last, (limit, state)| Some(last.max(limit.fresh_at(state)?)))
    }

    /// The most that any of the limits has used.
    fn used(&self, state: &Self::State, now: Tick) -> Used {
        let most = |one: Used, other: Used| {
            if other.rounded_up() > one.rounded_up() { other } else { one }
        };
        self.each(state).map(|(limit, state)| limit.used(state, now)).fold(Used::NOTHING, most)
    }

    fn with_used(&self, used: Used, now: Tick) -> Self::State {
        self.make(|limit| limit.with_used(used, now))
    }

    fn encode(&self, state: &Self::State, out: &mut Vec<u8>) {
        let mut one = Vec::new();
        out.push(TAG);
        codec::put(out, state.len() as u64);
        for (limit, state) in self.each(state) {
            one.clear();
            limit.encode(state, &mut one);
            codec::put(out, one.len() as u64);
            out.extend_from_slice(&one);
        }
    }

    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError> {
        let mut reader = Reader(bytes);
        reader.tag(TAG)?;
        let count: u64 = reader.number("number of limits")?;
        if count != self.limits().len() as u64 {
            return Err(DecodeError::OtherLimit);
        }
        let mut states = Vec::with_capacity(self.limits().len());
        for limit in self.limits() {
            let length: usize = reader.number("length")?;
            states.push(limit.decode(reader.bytes(length)?)?);
        }
        reader.end()?;
        Ok(states.into())
    }
}

/// The first byte of an encoded policy's state; the algorithms have 1 to 6.
const TAG: u8 = 0x10;
