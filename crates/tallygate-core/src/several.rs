//! Several limits as one rule: a policy decides all or nothing over its limits.
//!
//! The state is a list of theirs. What is told is the tightest of all: the least remaining, the
//! longest wait. This is also where the options of a limit take effect: a shadow keeps its state and
//! refuses nobody, a penalty refuses after refusals.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::limit::{Limit, LimitState};
use crate::penalty::Record;
use crate::policy::Policy;
use crate::receipt::Receipt;
use crate::{Cost, Tick, Ticks};

/// How a key stands under one limit of a [`Policy`].
#[derive(Clone, Debug)]
pub struct Standing {
    pub(crate) state: LimitState,
    /// Refusals and penalties; always `None` for limits without a penalty.
    pub(crate) record: Option<Record>,
}

impl From<LimitState> for Standing {
    fn from(state: LimitState) -> Self {
        Self { state, record: None }
    }
}

impl Standing {
    /// What the limit keeps.
    #[must_use]
    pub const fn state(&self) -> &LimitState {
        &self.state
    }

    /// How long a penalty still lasts.
    fn penalty(&self, now: Tick) -> Ticks {
        self.record.map_or(Ticks::ZERO, |record| record.wait(now))
    }
}

/// A limit with its penalty, if it has one.
impl Limit {
    fn window(&self) -> Ticks {
        self.numbers().window
    }

    fn lets(&self, standing: &Standing, now: Tick, cost: Cost) -> bool {
        standing.penalty(now) == Ticks::ZERO && self.admits(&standing.state, now, cost)
    }

    fn fits(&self, standing: &Standing, now: Tick, cost: Cost) -> Fit {
        let penalty = match standing.penalty(now) {
            Ticks::ZERO => Fit::Now,
            wait => Fit::After(wait),
        };
        self.fit(&standing.state, now, cost).or_later(penalty)
    }

    fn note_refusal(&self, standing: &mut Standing, now: Tick, cost: Cost) {
        if let Some(penalty) = self.penalty()
            && (1..=self.capacity()).contains(&cost)
            && !self.lets(standing, now, cost)
        {
            let record = Record::refused(standing.record, penalty, self.window(), now);
            standing.record = Some(record);
        }
    }

    fn told(&self, standing: &Standing, now: Tick, admitted: Option<Cost>) -> Facts {
        let mut facts = self.facts(&standing.state, now, admitted);
        if let Some(record) = standing.record {
            let over_at = record.over_at(self.window()).unwrap_or(Tick(i64::MAX));
            facts.reset_after = facts.reset_after.max(over_at.since(now));
            if record.wait(now) > Ticks::ZERO {
                facts.remaining = 0;
            }
        }
        facts
    }

    fn last_changed(&self, standing: &Standing) -> Tick {
        let record = standing.record.as_ref().zip(self.penalty());
        let state = self.last_change(&standing.state);
        record.map_or(state, |(record, penalty)| state.max(record.last_change(penalty)))
    }

    fn was_set_back(&self, standing: &Standing, now: Tick) -> bool {
        let record = standing.record.as_ref().zip(self.penalty());
        self.set_back(&standing.state, now)
            || record.is_some_and(|(record, penalty)| record.set_back(penalty, self.window(), now))
    }

    fn move_back(&self, standing: &mut Standing, now: Tick) {
        if self.set_back(&standing.state, now) {
            self.rebase(&mut standing.state, now);
        }
        if let (Some(record), Some(penalty)) = (standing.record, self.penalty())
            && record.set_back(penalty, self.window(), now)
        {
            standing.record = Some(record.moved(penalty, now));
        }
    }

    /// The time at which a limit decides for a caller that read `now` before the state was locked. Within a
    /// window before the last change, the limit itself takes `now` for that of its last change.
    fn decides_late_at(&self, Standing { state, record }: &Standing, now: Tick) -> Tick {
        let has_no_time = self.is_fresh(state, now);
        let at = match has_no_time || self.set_back(state, now) {
            true => now.max(self.last_change(state)),
            false => now,
        };
        match (record, self.penalty()) {
            (Some(record), Some(penalty)) if record.set_back(penalty, self.window(), now) => {
                at.max(record.last_change(penalty))
            }
            _ => at,
        }
    }

    fn forgets_at(&self, standing: &Standing) -> Option<Tick> {
        let fresh = self.fresh_at(&standing.state)?;
        match standing.record {
            Some(record) => Some(fresh.max(record.over_at(self.window())?)),
            None => Some(fresh),
        }
    }
}

impl Policy {
    fn each<'a>(
        &'a self,
        states: &'a [Standing],
    ) -> impl Iterator<Item = (&'a Limit, &'a Standing)> {
        self.limits().iter().zip(states)
    }

    fn each_mut<'a>(
        &'a self,
        states: &'a mut [Standing],
    ) -> impl Iterator<Item = (&'a Limit, &'a mut Standing)> {
        self.limits().iter().zip(states)
    }

    fn enforced<'a>(
        &'a self,
        states: &'a [Standing],
    ) -> impl Iterator<Item = (&'a Limit, &'a Standing)> {
        self.each(states).filter(|(limit, _)| !limit.is_shadow())
    }

    fn make(&self, make: impl FnMut(&Limit) -> LimitState) -> Box<[Standing]> {
        self.limits().iter().map(make).map(Standing::from).collect()
    }

    /// Takes over a state that was made under another policy: what was used stays used.
    ///
    /// A limit takes over from the one of its name, or from the only one there is; one that is new
    /// starts with the most that any of the others has used. A penalty goes on, but no longer than the
    /// new one lasts.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Policy, Tick, Ticks};
    ///
    /// let free = Policy::token_bucket(10).per(Ticks(60)).build()?;
    /// let pro = Policy::all_of("pro", [
    ///     Policy::token_bucket(100).per(Ticks(60)),
    ///     Policy::fixed_window(1000).per(Ticks(3600)).named("hour"),
    /// ])?;
    /// let mut state = free.first(Tick(0));
    /// assert!(free.decide::<bool>(&mut state, Tick(0), 10));
    /// let upgraded = pro.carry(&free, &state, Tick(0));
    /// assert_eq!(pro.facts(&upgraded, Tick(0), None).remaining, 90);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn carry(&self, from: &Self, states: &[Standing], now: Tick) -> Box<[Standing]> {
        let alone = self.limits().len() == 1 && from.limits().len() == 1;
        let carried = self.limits().iter().map(|limit| {
            let namesake =
                from.each(states).find(|(other, _)| alone || other.name() == limit.name());
            let Some((other, standing)) = namesake else {
                return limit.with_used(from.most_used(states, now), now).into();
            };
            let record = standing
                .record
                .filter(|record| record.over_at(other.window()).is_none_or(|over| over > now));
            Standing {
                state: limit.carry(other, &standing.state, now),
                record: record.zip(limit.penalty()).map(|(record, new)| record.moved(new, now)),
            }
        });
        carried.collect()
    }

    /// Merges two states of this policy: each limit keeps the state under which more is used, and the
    /// penalty that lasts longer.
    #[must_use]
    pub fn merge(&self, one: &[Standing], other: &[Standing], now: Tick) -> Box<[Standing]> {
        let merged = self.each(one).zip(other).map(|((limit, one), other)| {
            let used = |standing: &Standing| limit.used(&standing.state, now);
            let over_at =
                |record: &Record| record.over_at(limit.window()).unwrap_or(Tick(i64::MAX));
            let records = [one.record, other.record].into_iter().flatten();
            Standing {
                state: if used(other).is_more_than(used(one)) { other } else { one }.state.clone(),
                // A penalty that is served comes before refusals that are only counted.
                record: records.max_by_key(|record| (record.wait(now), over_at(record))),
            }
        });
        merged.collect()
    }

    fn most_used(&self, states: &[Standing], now: Tick) -> Used {
        let used = self.each(states).map(|(limit, standing)| limit.used(&standing.state, now));
        used.max_by_key(|used| used.rounded_up()).unwrap_or(Used::NOTHING)
    }
}

impl Algorithm for Policy {
    type State = Box<[Standing]>;

    fn capacity(&self) -> Cost {
        let enforced = self.limits().iter().filter(|limit| !limit.is_shadow());
        enforced.map(Limit::capacity).min().unwrap_or(Cost::MAX)
    }

    fn fresh(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.fresh(now))
    }

    fn first(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.first(now))
    }

    fn last_change(&self, state: &Self::State) -> Tick {
        let each = self.each(state).map(|(limit, standing)| limit.last_changed(standing));
        each.max().unwrap_or(Tick(i64::MIN))
    }

    fn set_back(&self, state: &Self::State, now: Tick) -> bool {
        self.each(state).any(|(limit, standing)| limit.was_set_back(standing, now))
    }

    fn rebase(&self, state: &mut Self::State, now: Tick) {
        self.each_mut(state).for_each(|(limit, standing)| limit.move_back(standing, now));
    }

    fn decides_at(&self, state: &Self::State, now: Tick) -> Tick {
        let each = self.each(state).map(|(limit, standing)| limit.decides_late_at(standing, now));
        each.max().unwrap_or(now)
    }

    fn clock_set_back(&self, state: &mut Self::State, now: Tick) {
        for (limit, standing) in self.each_mut(state) {
            limit.move_back(standing, now);
            limit.clock_set_back(&mut standing.state, now);
        }
    }

    fn admits(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.enforced(state).all(|(limit, standing)| limit.lets(standing, now, cost))
    }

    fn admit(&self, state: &mut Self::State, now: Tick, cost: Cost) -> bool {
        let admits = self.admits(state, now, cost);
        if admits && cost > 0 {
            for (limit, standing) in self.each_mut(state) {
                // Only a shadow can refuse here.
                if limit.lets(standing, now, cost) {
                    limit.charge(&mut standing.state, now, i128::from(cost));
                } else {
                    limit.note_refusal(standing, now, cost);
                }
            }
        }
        admits
    }

    fn refuse(&self, state: &mut Self::State, now: Tick, cost: Cost) {
        self.each_mut(state).for_each(|(limit, standing)| limit.note_refusal(standing, now, cost));
    }

    fn refusing(&self, state: &Self::State, now: Tick, cost: Cost, shadow: bool) -> Option<usize> {
        self.each(state).position(|(limit, standing)| {
            limit.is_shadow() == shadow && !limit.lets(standing, now, cost)
        })
    }

    fn limit(&self, index: usize, _: Tick) -> Option<&Limit> {
        self.limits().get(index)
    }

    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit {
        self.enforced(state)
            .map(|(limit, standing)| limit.fits(standing, now, cost))
            .fold(Fit::Now, Fit::or_later)
    }

    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let mut enforced = self.enforced(state);
        let (first, others) = (enforced.next(), enforced.count());
        let mut behind = FitBehind { earliest: Fit::Now, latest: Some(Ticks::ZERO) };
        if let Some((limit, standing)) = first {
            behind = limit.fit_behind(&standing.state, now, ahead, cost);
        }
        for (limit, standing) in self.enforced(state) {
            let under = limit.fit_behind(&standing.state, now, ahead, cost).earliest;
            let penalty = match standing.penalty(now) {
                Ticks::ZERO => Fit::Now,
                wait => Fit::After(wait),
            };
            behind.earliest = behind.earliest.or_later(under).or_later(penalty);
            // Which of several limits the requests ahead wait for can differ from one to the next.
            if others > 0 || penalty != Fit::Now {
                behind.latest = None;
            }
        }
        if ahead == 0 { FitBehind::alone(behind.earliest, 0) } else { behind }
    }

    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128 {
        let each = self.each_mut(state);
        each.map(|(limit, standing)| limit.charge(&mut standing.state, now, amount))
            .max()
            .unwrap_or(0)
    }

    fn uncharged(&self, state: &Self::State, now: Tick, cost: Cost) -> Vec<usize> {
        let denies = |(limit, standing): (&Limit, &Standing)| {
            limit.is_shadow() && !limit.lets(standing, now, cost)
        };
        let each = self.each(state).enumerate();
        each.filter(|(_, one)| denies(*one)).map(|(limit, _)| limit).collect()
    }

    fn receipt(&self, state: &Self::State) -> Receipt {
        Receipt::Each(
            self.each(state).map(|(limit, standing)| limit.receipt(&standing.state)).collect(),
        )
    }

    fn charge_with_receipt(&self, state: &mut Self::State, now: Tick, cost: Cost) -> Receipt {
        let each = self.each_mut(state);
        let charge = |(limit, standing): (&Limit, &mut Standing)| {
            limit.charge_with_receipt(&mut standing.state, now, cost)
        };
        Receipt::Each(each.map(charge).collect())
    }

    /// A shadow limit that did not charge the estimate takes no part: enforced, it would have denied the
    /// reservation.
    fn settle(&self, state: &mut Self::State, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let each = self.each_mut(state).enumerate();
        let charged = each.filter_map(|(index, one)| Some((one, receipt.of_limit(index)?)));
        let dropped = charged.map(|((limit, standing), receipt)| {
            limit.move_back(standing, now);
            limit.settle(&mut standing.state, now, change, receipt)
        });
        dropped.max().unwrap_or(0)
    }

    fn facts(&self, state: &Self::State, now: Tick, admitted: Option<Cost>) -> Facts {
        let enforced = self.each(state).enumerate().filter(|(_, (limit, _))| !limit.is_shadow());
        let facts = enforced.map(|(index, (limit, standing))| Facts {
            scarcest: Some(index),
            ..limit.told(standing, now, admitted)
        });
        let tightest = facts.reduce(|one, other| {
            let tightest = if other.remaining < one.remaining { other } else { one };
            Facts {
                reset_after: one.reset_after.max(other.reset_after),
                delay: one.delay.max(other.delay),
                ..tightest
            }
        });
        // Nothing is enforced if all are shadows.
        tightest.unwrap_or(Facts::UNLIMITED)
    }

    fn fresh_at(&self, state: &Self::State) -> Option<Tick> {
        self.each(state).try_fold(Tick(i64::MIN), |last, (limit, standing)| {
            Some(last.max(limit.forgets_at(standing)?))
        })
    }

    /// The most that any of the limits has used.
    fn used(&self, state: &Self::State, now: Tick) -> Used {
        self.most_used(state, now)
    }

    /// The largest share that any of the limits that are enforced has used. A penalty counts as all of it.
    fn share_used(&self, state: &Self::State, now: Tick) -> Share {
        let each = self.enforced(state).map(|(limit, standing)| match standing.record {
            Some(record) if record.wait(now) > Ticks::ZERO => Share::ALL,
            _ => limit.share_used(&standing.state, now),
        });
        each.max().unwrap_or(Share::of(Used::NOTHING, 1))
    }

    fn with_used(&self, used: Used, now: Tick) -> Self::State {
        self.make(|limit| limit.with_used(used, now))
    }

    fn encode(&self, state: &Self::State, out: &mut Vec<u8>) {
        let mut one = Vec::new();
        out.push(TAG);
        codec::put(out, state.len() as u64);
        for (limit, standing) in self.each(state) {
            one.clear();
            limit.encode(&standing.state, &mut one);
            codec::put(out, one.len() as u64);
            out.extend_from_slice(&one);
            Record::encode(standing.record.as_ref(), out);
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
            let state = limit.decode(reader.bytes(length)?)?;
            let record = Record::decode(&mut reader)?;
            if record.is_some() && limit.penalty().is_none() {
                return Err(DecodeError::Field { name: "penalty" });
            }
            states.push(Standing { state, record });
        }
        reader.end()?;
        Ok(states.into())
    }
}

/// The first byte of an encoded policy's state; the algorithms have 1 to 6.
const TAG: u8 = 0x10;
