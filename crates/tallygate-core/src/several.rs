//! [`Policy`] as an [`Algorithm`]: it decides all or nothing over its limits.
//!
//! The state of a policy is a list of the states of its limits. A decision has the least remaining units and the
//! longest wait of all limits. The options of limits take effect here: a shadow limit keeps its state but denies
//! no request, and a penalty denies requests after too many denials.

use alloc::boxed::Box;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Facts, Fit, FitBehind, Share, Used};
use crate::codec::{self, DecodeError, Reader};
use crate::limit::{Limit, LimitState};
use crate::numbers::saturate;
use crate::penalty::PenaltyState;
use crate::policy::Policy;
use crate::receipt::Receipt;
use crate::shadow::ShadowHistory;
use crate::{Bucket, Cost, Machine, Tick, Ticks};

/// The state of a key under one limit of a [`Policy`].
#[derive(Clone, Debug)]
pub struct LimitRecord {
    pub(crate) state: LimitState,
    /// The counted denials, or the penalty in force. Always `None` for limits without a penalty.
    pub(crate) penalty_state: Option<PenaltyState>,
    /// Which of the newest requests a shadow limit has charged. Always `None` for other limits.
    pub(crate) shadow_history: Option<Box<ShadowHistory>>,
}

impl From<LimitState> for LimitRecord {
    fn from(state: LimitState) -> Self {
        Self { state, penalty_state: None, shadow_history: None }
    }
}

impl LimitRecord {
    /// Returns the state of the limit itself.
    #[must_use]
    pub const fn state(&self) -> &LimitState {
        &self.state
    }

    /// Takes the newest units off the history of a shadow limit. Returns how many of them were charged.
    fn take_newest(&mut self, units: u128) -> u128 {
        self.shadow_history.as_mut().map_or(units, |history| history.take_newest(units))
    }

    /// Takes units of a reservation off the history of a shadow limit. Returns how many of them were charged.
    fn take_settled(&mut self, units: u128, run: u64, was_charged: bool) -> u128 {
        match &mut self.shadow_history {
            Some(history) => history.take_settled(units, run, was_charged),
            None if was_charged => units,
            None => 0,
        }
    }

    /// Returns the number of the run that the last request is in, or 0 if there is no history.
    fn newest_run(&self) -> u64 {
        self.shadow_history.as_ref().map_or(0, |history| history.newest())
    }

    /// Returns how much longer a penalty lasts.
    fn penalty_left(&self, now: Tick) -> Ticks {
        self.penalty_state.map_or(Ticks::ZERO, |penalty_state| penalty_state.wait(now))
    }
}

/// The methods of a limit with its penalty, if it has one.
impl Limit {
    fn window(&self) -> Ticks {
        self.numbers().window
    }

    fn allows_record(&self, record: &LimitRecord, now: Tick, cost: Cost) -> bool {
        record.penalty_left(now) == Ticks::ZERO && self.allows(&record.state, now, cost)
    }

    fn fit_record(&self, record: &LimitRecord, now: Tick, cost: Cost) -> Fit {
        let penalty = match record.penalty_left(now) {
            Ticks::ZERO => Fit::Now,
            wait => Fit::After(wait),
        };
        self.fit(&record.state, now, cost).or_later(penalty)
    }

    fn count_denial(&self, record: &mut LimitRecord, now: Tick, cost: Cost) {
        let Some(penalty) = self.penalty() else { return };
        if (1..=self.capacity()).contains(&cost) && !self.allows_record(record, now, cost) {
            let penalty_state =
                PenaltyState::after_denial(record.penalty_state, penalty, self.window(), now);
            record.penalty_state = Some(penalty_state);
        }
    }

    /// Charges units whether or not they are allowed, or refunds them, as [`charge`](Algorithm::charge) does.
    fn charge_record(&self, record: &mut LimitRecord, now: Tick, amount: i128) -> u128 {
        let amount = match amount {
            ..0 => 0_i128.saturating_sub_unsigned(record.take_newest(amount.unsigned_abs())),
            _ => {
                self.note_request(record, saturate(amount.unsigned_abs()), true, now);
                amount
            }
        };
        self.charge(&mut record.state, now, amount)
    }

    /// Records the units of an allowed request, if this is a shadow limit.
    fn note_request(&self, record: &mut LimitRecord, units: Cost, is_charged: bool, now: Tick) {
        // Without a history, all requests were charged.
        if self.is_shadow() && (!is_charged || record.shadow_history.is_some()) {
            record.shadow_history.get_or_insert_default().record(units, is_charged, now);
        }
    }

    fn settle_record(
        &self,
        record: &mut LimitRecord,
        now: Tick,
        change: i128,
        receipt: Option<&Receipt>,
    ) -> u128 {
        let Some(receipt) = receipt else { return 0 };
        let (run, units) = (receipt.run(), change.unsigned_abs());
        let was_charged = !matches!(receipt, Receipt::Uncharged { .. });
        let change = match change {
            ..0 => 0_i128.saturating_sub_unsigned(record.take_settled(units, run, was_charged)),
            _ => {
                self.note_request(record, saturate(units), was_charged, now);
                change
            }
        };
        self.rebase_record(record, now);
        match was_charged {
            true => self.settle(&mut record.state, now, change, receipt),
            // These units are from before the reservation, because a refund has returned those of the reservation.
            false if change < 0 => self.charge(&mut record.state, now, change),
            false => 0,
        }
    }

    fn facts_of_record(&self, record: &LimitRecord, now: Tick, charged: Option<Cost>) -> Facts {
        let mut facts = self.facts(&record.state, now, charged);
        if let Some(penalty_state) = record.penalty_state {
            let ends_at = penalty_state.ends_at(self.window()).unwrap_or(Tick(i64::MAX));
            facts.reset_after = facts.reset_after.max(ends_at.since(now));
            if penalty_state.wait(now) > Ticks::ZERO {
                facts.remaining = 0;
            }
        }
        facts
    }

    fn last_change_of_record(&self, record: &LimitRecord) -> Tick {
        let penalty_state = record.penalty_state.as_ref().zip(self.penalty());
        let state = self.last_change(&record.state);
        penalty_state
            .map_or(state, |(penalty_state, penalty)| state.max(penalty_state.last_change(penalty)))
    }

    fn clock_was_set_back_for_record(&self, record: &LimitRecord, now: Tick) -> bool {
        let penalty_state = record.penalty_state.as_ref().zip(self.penalty());
        self.clock_was_set_back(&record.state, now)
            || penalty_state.is_some_and(|(penalty_state, penalty)| {
                penalty_state.clock_was_set_back(penalty, self.window(), now)
            })
    }

    fn rebase_record(&self, record: &mut LimitRecord, now: Tick) {
        if self.clock_was_set_back(&record.state, now) {
            self.rebase(&mut record.state, now);
        }
        if let (Some(penalty_state), Some(penalty)) = (record.penalty_state, self.penalty()) {
            if penalty_state.clock_was_set_back(penalty, self.window(), now) {
                record.penalty_state = Some(penalty_state.rebased(penalty, now));
            }
        }
    }

    /// Returns the time at which the limit decides for a caller that read `now` before the state was locked.
    ///
    /// If `now` is at most a window before the last change, the limit itself takes the time of the last change.
    fn decision_time_of_record(
        &self,
        LimitRecord { state, penalty_state, .. }: &LimitRecord,
        now: Tick,
    ) -> Tick {
        let has_no_time = self.is_fresh(state, now);
        let at = match has_no_time || self.clock_was_set_back(state, now) {
            true => now.max(self.last_change(state)),
            false => now,
        };
        match (penalty_state, self.penalty()) {
            (Some(penalty_state), Some(penalty))
                if penalty_state.clock_was_set_back(penalty, self.window(), now) =>
            {
                at.max(penalty_state.last_change(penalty))
            }
            _ => at,
        }
    }

    fn record_fresh_at(&self, record: &LimitRecord) -> Option<Tick> {
        let fresh = self.fresh_at(&record.state)?;
        match record.penalty_state {
            Some(penalty_state) => Some(fresh.max(penalty_state.ends_at(self.window())?)),
            None => Some(fresh),
        }
    }
}

impl Policy {
    fn each<'a>(
        &'a self,
        states: &'a [LimitRecord],
    ) -> impl Iterator<Item = (&'a Limit, &'a LimitRecord)> {
        self.limits().iter().zip(states)
    }

    fn each_mut<'a>(
        &'a self,
        states: &'a mut [LimitRecord],
    ) -> impl Iterator<Item = (&'a Limit, &'a mut LimitRecord)> {
        self.limits().iter().zip(states)
    }

    fn enforced<'a>(
        &'a self,
        states: &'a [LimitRecord],
    ) -> impl Iterator<Item = (&'a Limit, &'a LimitRecord)> {
        self.each(states).filter(|(limit, _)| !limit.is_shadow())
    }

    fn make(&self, make: impl FnMut(&Limit) -> LimitState) -> Box<[LimitRecord]> {
        self.limits().iter().map(make).map(LimitRecord::from).collect()
    }

    /// Carries a state over from another policy. The client keeps what it has used.
    ///
    /// Each limit takes the state of the old limit with the same name. If both policies have one limit, the
    /// names do not matter. A limit without a predecessor starts with the most units that any old limit has
    /// used. A penalty continues, but for at most the duration of the new penalty.
    ///
    /// ```
    /// use tallygate_core::{Algorithm, Policy, Tick, Ticks};
    ///
    /// let free = Policy::token_bucket(10).per(Ticks(60)).build()?;
    /// let pro = Policy::all_of("pro", [
    ///     Policy::token_bucket(100).per(Ticks(60)),
    ///     Policy::fixed_window(1000).per(Ticks(3600)).named("hour"),
    /// ])?;
    /// let mut state = free.initial(Tick(0));
    /// assert!(free.decide::<bool>(&mut state, Tick(0), 10));
    /// let upgraded = pro.carry(&free, &state, Tick(0));
    /// assert_eq!(pro.facts(&upgraded, Tick(0), None).remaining, 90);
    /// # Ok::<(), tallygate_core::PolicyError>(())
    /// ```
    #[must_use]
    pub fn carry(&self, from: &Self, states: &[LimitRecord], now: Tick) -> Box<[LimitRecord]> {
        let both_have_one = self.limits().len() == 1 && from.limits().len() == 1;
        let carried = self.limits().iter().map(|limit| {
            let namesake =
                from.each(states).find(|(other, _)| both_have_one || other.name() == limit.name());
            let Some((other, record)) = namesake else {
                return limit.with_used(from.most_used(states, now), now).into();
            };
            let penalty_state = record.penalty_state.filter(|penalty_state| {
                penalty_state.ends_at(other.window()).is_none_or(|over| over > now)
            });
            LimitRecord {
                state: limit.carry(other, &record.state, now),
                penalty_state: penalty_state
                    .zip(limit.penalty())
                    .map(|(penalty_state, new)| penalty_state.rebased(new, now)),
                shadow_history: record.shadow_history.clone().filter(|_| limit.is_shadow()),
            }
        });
        carried.collect()
    }

    /// Merges two states of this policy. Each limit keeps the state in which more is used, and the penalty
    /// that lasts longer.
    #[must_use]
    pub fn merge(
        &self,
        one: &[LimitRecord],
        other: &[LimitRecord],
        now: Tick,
    ) -> Box<[LimitRecord]> {
        let merged = self.each(one).zip(other).map(|((limit, one), other)| {
            let used = |record: &LimitRecord| limit.used(&record.state, now);
            let ends_at = |penalty_state: &PenaltyState| {
                penalty_state.ends_at(limit.window()).unwrap_or(Tick(i64::MAX))
            };
            let records = [one.penalty_state, other.penalty_state].into_iter().flatten();
            let most_used = if used(other).is_more_than(used(one)) { other } else { one };
            LimitRecord {
                state: most_used.state.clone(),
                shadow_history: most_used.shadow_history.clone(),
                // A penalty in force comes before denials that are only counted.
                penalty_state: records
                    .max_by_key(|penalty_state| (penalty_state.wait(now), ends_at(penalty_state))),
            }
        });
        merged.collect()
    }

    fn most_used(&self, states: &[LimitRecord], now: Tick) -> Used {
        let used = self.each(states).map(|(limit, record)| limit.used(&record.state, now));
        used.max_by_key(|used| used.rounded_up()).unwrap_or(Used::NOTHING)
    }
}

impl Algorithm for Policy {
    type State = Box<[LimitRecord]>;

    fn capacity(&self) -> Cost {
        let enforced = self.limits().iter().filter(|limit| !limit.is_shadow());
        enforced.map(Limit::capacity).min().unwrap_or(Cost::MAX)
    }

    fn fresh(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.fresh(now))
    }

    fn initial(&self, now: Tick) -> Self::State {
        self.make(|limit| limit.initial(now))
    }

    fn last_change(&self, state: &Self::State) -> Tick {
        let each = self.each(state).map(|(limit, record)| limit.last_change_of_record(record));
        each.max().unwrap_or(Tick(i64::MIN))
    }

    fn sole_bucket(&self, _: Tick) -> Option<&Bucket> {
        match self.plain().map(Limit::machine) {
            Some(Machine::Bucket(bucket)) => Some(bucket),
            _ => None,
        }
    }

    fn clock_was_set_back(&self, state: &Self::State, now: Tick) -> bool {
        self.each(state).any(|(limit, record)| limit.clock_was_set_back_for_record(record, now))
    }

    fn rebase(&self, state: &mut Self::State, now: Tick) {
        self.each_mut(state).for_each(|(limit, record)| limit.rebase_record(record, now));
    }

    fn decision_time(&self, state: &Self::State, now: Tick) -> Tick {
        let each =
            self.each(state).map(|(limit, record)| limit.decision_time_of_record(record, now));
        each.max().unwrap_or(now)
    }

    fn rebase_after_set_back(&self, state: &mut Self::State, now: Tick) {
        for (limit, record) in self.each_mut(state) {
            limit.rebase_record(record, now);
            limit.rebase_after_set_back(&mut record.state, now);
        }
    }

    fn allows(&self, state: &Self::State, now: Tick, cost: Cost) -> bool {
        self.enforced(state).all(|(limit, record)| limit.allows_record(record, now, cost))
    }

    fn try_charge(&self, state: &mut Self::State, now: Tick, cost: Cost) -> bool {
        let is_allowed = self.allows(state, now, cost);
        if is_allowed && cost > 0 {
            for (limit, record) in self.each_mut(state) {
                // Only a shadow limit can deny here.
                let is_charged = limit.allows_record(record, now, cost);
                limit.note_request(record, cost, is_charged, now);
                if is_charged {
                    limit.charge(&mut record.state, now, i128::from(cost));
                } else {
                    limit.count_denial(record, now, cost);
                }
            }
        }
        is_allowed
    }

    fn record_denial(&self, state: &mut Self::State, now: Tick, cost: Cost) {
        self.each_mut(state).for_each(|(limit, record)| limit.count_denial(record, now, cost));
    }

    fn denying_limit(
        &self,
        state: &Self::State,
        now: Tick,
        cost: Cost,
        shadow: bool,
    ) -> Option<usize> {
        self.each(state).position(|(limit, record)| {
            limit.is_shadow() == shadow && !limit.allows_record(record, now, cost)
        })
    }

    fn limit(&self, index: usize, _: Tick) -> Option<&Limit> {
        self.limits().get(index)
    }

    fn fit(&self, state: &Self::State, now: Tick, cost: Cost) -> Fit {
        self.enforced(state)
            .map(|(limit, record)| limit.fit_record(record, now, cost))
            .fold(Fit::Now, Fit::or_later)
    }

    fn fit_behind(&self, state: &Self::State, now: Tick, ahead: u128, cost: Cost) -> FitBehind {
        let mut enforced = self.enforced(state);
        let (first, others) = (enforced.next(), enforced.count());
        let mut behind = FitBehind { earliest: Fit::Now, latest: Some(Ticks::ZERO) };
        if let Some((limit, record)) = first {
            behind = limit.fit_behind(&record.state, now, ahead, cost);
        }
        for (limit, record) in self.enforced(state) {
            let under = limit.fit_behind(&record.state, now, ahead, cost).earliest;
            let penalty = match record.penalty_left(now) {
                Ticks::ZERO => Fit::Now,
                wait => Fit::After(wait),
            };
            behind.earliest = behind.earliest.or_later(under).or_later(penalty);
            // Each request ahead may wait for another limit, so there is no upper bound.
            if others > 0 || penalty != Fit::Now {
                behind.latest = None;
            }
        }
        if ahead == 0 { FitBehind::alone(behind.earliest, 0) } else { behind }
    }

    fn charge(&self, state: &mut Self::State, now: Tick, amount: i128) -> u128 {
        let mut dropped = 0;
        for (limit, record) in self.each_mut(state) {
            let by_limit = limit.charge_record(record, now, amount);
            // A shadow limit must not affect the others.
            dropped = dropped.max(if limit.is_shadow() { 0 } else { by_limit });
        }
        dropped
    }

    fn uncharged_limits(&self, state: &Self::State, now: Tick, cost: Cost) -> Vec<usize> {
        let denies = |(limit, record): (&Limit, &LimitRecord)| {
            limit.is_shadow() && !limit.allows_record(record, now, cost)
        };
        let each = self.each(state).enumerate();
        each.filter(|(_, one)| denies(*one)).map(|(limit, _)| limit).collect()
    }

    fn receipt(&self, state: &Self::State) -> Receipt {
        let of_limit = |(limit, record): (&Limit, &LimitRecord)| {
            limit.receipt(&record.state).in_run(record.newest_run())
        };
        Receipt::Each(self.each(state).map(of_limit).collect())
    }

    fn charge_with_receipt(&self, state: &mut Self::State, now: Tick, cost: Cost) -> Receipt {
        let each = self.each_mut(state);
        let charge = |(limit, record): (&Limit, &mut LimitRecord)| {
            limit.note_request(record, cost, true, now);
            limit.charge_with_receipt(&mut record.state, now, cost).in_run(record.newest_run())
        };
        Receipt::Each(each.map(charge).collect())
    }

    /// Changes the state of a shadow limit only by units that it charged: if it were enforced, it would have denied the
    /// others.
    fn settle(&self, state: &mut Self::State, now: Tick, change: i128, receipt: &Receipt) -> u128 {
        let mut dropped = 0;
        for (index, (limit, record)) in self.each_mut(state).enumerate() {
            let by_limit = limit.settle_record(record, now, change, receipt.of_limit(index));
            dropped = dropped.max(if limit.is_shadow() { 0 } else { by_limit });
        }
        dropped
    }

    fn facts(&self, state: &Self::State, now: Tick, charged: Option<Cost>) -> Facts {
        let enforced = self.each(state).enumerate().filter(|(_, (limit, _))| !limit.is_shadow());
        let facts = enforced.map(|(index, (limit, record))| Facts {
            scarcest: Some(index),
            ..limit.facts_of_record(record, now, charged)
        });
        let tightest = facts.reduce(|one, other| {
            let tightest = if other.remaining < one.remaining { other } else { one };
            Facts {
                reset_after: one.reset_after.max(other.reset_after),
                delay: one.delay.max(other.delay),
                ..tightest
            }
        });
        // If all limits are shadow limits, nothing is enforced.
        tightest.unwrap_or(Facts::UNLIMITED)
    }

    fn fresh_at(&self, state: &Self::State) -> Option<Tick> {
        self.each(state).try_fold(Tick(i64::MIN), |last, (limit, record)| {
            Some(last.max(limit.record_fresh_at(record)?))
        })
    }

    /// Returns the most units that any limit has used.
    fn used(&self, state: &Self::State, now: Tick) -> Used {
        self.most_used(state, now)
    }

    /// Returns the largest share that any enforced limit has used. A penalty counts as the whole quota.
    fn share_used(&self, state: &Self::State, now: Tick) -> Share {
        let each = self.enforced(state).map(|(limit, record)| match record.penalty_state {
            Some(penalty_state) if penalty_state.wait(now) > Ticks::ZERO => Share::ALL,
            _ => limit.share_used(&record.state, now),
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
        for (limit, record) in self.each(state) {
            one.clear();
            limit.encode(&record.state, &mut one);
            codec::put(out, one.len() as u64);
            out.extend_from_slice(&one);
            PenaltyState::encode(record.penalty_state.as_ref(), out);
            if limit.is_shadow() {
                record.shadow_history.as_deref().unwrap_or(&ShadowHistory::default()).encode(out);
            }
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
            let penalty_state = PenaltyState::decode(&mut reader)?;
            if penalty_state.is_some() && limit.penalty().is_none() {
                return Err(DecodeError::Field { name: "penalty" });
            }
            let shadow_history = match limit.is_shadow() {
                true => {
                    Some(ShadowHistory::decode(&mut reader)?).filter(|history| !history.is_empty())
                }
                false => None,
            };
            let shadow_history = shadow_history.map(Box::new);
            states.push(LimitRecord { state, penalty_state, shadow_history });
        }
        reader.end()?;
        Ok(states.into())
    }
}

/// The first byte of an encoded state of a policy. The algorithms have 1 to 6.
const TAG: u8 = 0x10;
