//! All parts of a joint decision that are about one key.

use std::time::Instant;

use tallygate::algorithm::{Op, Receipt, Timed};
use tallygate::merge::{KeyCost, impossible};
use tallygate::{Cost, Source, Tick};

use super::part::JointPart;
use crate::client::Redis;
use crate::error::Error;
use crate::key::Key;
use crate::prepared::Prepared;
use crate::transaction::{ReadValues, Write};

/// The decisions of some parts, each with the index of its part.
pub(super) type Answers = Vec<(usize, Timed)>;

/// Returns whether all decisions are allowed.
pub(super) fn all_allow(answers: &Answers) -> bool {
    answers.iter().all(|(_, timed)| timed.decision.allowed)
}

/// The parts of one key, each with its index among all parts.
pub(super) struct KeyParts<'a> {
    pub(super) parts: Vec<(usize, &'a (dyn JointPart + 'a))>,
}

/// A step of all parts of one key.
pub(super) struct KeyStep {
    pub(super) write: Write,
    pub(super) is_changed: bool,
    pub(super) answers: Answers,
    receipt: Receipt,
    sum: KeyCost,
}

/// A key that was decided on alone, with everything that is needed to return its charge.
pub(super) struct ChargedKey {
    pub(super) answers: Answers,
    pub(super) receipt: Receipt,
    pub(super) cost: Cost,
    /// The position of the part that charged, among the parts of the key.
    pub(super) charger: usize,
}

impl KeyParts<'_> {
    pub(super) fn first(&self) -> &dyn JointPart {
        self.parts[0].1
    }

    pub(super) fn key(&self) -> &Key {
        self.first().key()
    }

    pub(super) fn redis(&self) -> &Redis {
        self.first().store().redis()
    }

    /// Adds up the costs of the parts whose rules charge. The charger is a position among the parts of the key.
    pub(super) fn sum(&self, charges: impl Fn(&dyn JointPart) -> bool) -> KeyCost {
        let parts = self.parts.iter().enumerate();
        KeyCost::of(parts.map(|(place, (_, part))| (place, part.cost(), charges(*part))))
    }

    /// Returns the policy and the sum that one script decides on; `None` if the parts have different rules, or a rule
    /// without a script.
    pub(super) fn scripted(&self) -> Option<(&Prepared, Cost)> {
        let sum = self.sum(|_| true);
        if sum.is_impossible() {
            return None;
        }
        let prepared = self.first().scripted(sum.cost())?;
        // A store prepares a policy once, so two parts under one rule have the same prepared policy.
        let is_same = |part: &dyn JointPart| {
            part.scripted(sum.cost()).is_some_and(|other| std::ptr::eq(other, prepared))
        };
        let are_same = self.parts[1..].iter().all(|(_, part)| is_same(*part));
        are_same.then_some((prepared, sum.cost()))
    }

    /// Returns whether every rule allows the sum to a key with this value.
    pub(super) fn agrees(&self, value: &[u8], now: i64) -> Result<bool, Error> {
        let sum = self.sum(|part| part.charges(now));
        let mut go = !sum.is_impossible();
        for (_, part) in &self.parts {
            go = go && part.agrees(value, now, sum.cost())?;
        }
        Ok(go)
    }

    /// Charges the sum if all keys allow it. The other rules report on the value as it was; the rule that charges gets a
    /// value that was brought under them.
    pub(super) fn step(&self, value: &[u8], now: i64, go: bool) -> Result<KeyStep, Error> {
        let sum = self.sum(|part| part.charges(now));
        let mut answers = Vec::with_capacity(self.parts.len());
        let mut brought = value.to_vec();
        for (place, (index, part)) in self.parts.iter().enumerate() {
            if place == sum.charger {
                continue;
            }
            answers.push((*index, part.report(value, now, sum.cost(), go)?));
            if !value.is_empty() && sum.units > 0 {
                brought = part.bring(brought, now)?;
            }
        }
        let (index, charger) = self.parts[sum.charger];
        let (write, timed, receipt) = charger.charge(&brought, now, sum.cost(), go)?;
        answers.push((index, timed));
        if sum.is_impossible() {
            answers.iter_mut().for_each(|(_, timed)| timed.decision = impossible(timed.decision));
        }
        let is_changed = write.value != value;
        Ok(KeyStep { write, is_changed, answers, receipt, sum })
    }

    /// Decides on this key alone. Returns the receipt of the charge as well.
    pub(super) async fn reserve(
        &self,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<ChargedKey, Error> {
        self.first().pay_debt(now, deadline).await?;
        let given = now.map(|now| self.first().store().to_redis_time(now).0);
        if let [(index, part)] = self.parts[..] {
            let (timed, receipt) = part.reserve(given, deadline).await?;
            let (answers, cost) = (vec![(index, timed)], part.cost());
            return Ok(ChargedKey { answers, receipt, cost, charger: 0 });
        }
        let decide = |seen: &ReadValues| {
            let value = &seen.values[0];
            let go = self.agrees(value, seen.now)?;
            let step = self.step(value, seen.now, go)?;
            let KeyStep { answers, receipt, sum, .. } = step;
            let charged = ChargedKey { answers, receipt, cost: sum.cost(), charger: sum.charger };
            Ok((step.is_changed.then(|| vec![step.write]), charged))
        };
        self.redis().transact(&[self.key()], given, None, deadline, decide).await
    }

    /// Decides by the failure settings of the parts: every rule must allow the sum. Returns the decisions, and the sum if
    /// this process has charged it (0 otherwise).
    pub(super) fn fall_back(
        &self,
        error: &Error,
        now: Option<Tick>,
    ) -> Result<(Answers, KeyCost), Error> {
        let sum = self.sum(|part| part.charges_for_caller(now));
        let cost = sum.cost();
        let mut answers = Vec::with_capacity(self.parts.len());
        let mut go = !sum.is_impossible();
        for (place, (index, part)) in self.parts.iter().enumerate() {
            if place != sum.charger {
                let timed = part.fall_back(error.clone(), Op::Peek(cost), now)?;
                go &= timed.decision.allowed;
                answers.push((*index, timed));
            }
        }
        let (index, charger) = self.parts[sum.charger];
        let op = if go { Op::Check(cost) } else { Op::Peek(cost) };
        answers.push((index, charger.fall_back(error.clone(), op, now)?));
        if sum.is_impossible() {
            answers.iter_mut().for_each(|(_, timed)| timed.decision = impossible(timed.decision));
        }
        Ok((answers, KeyCost { units: if go { sum.units } else { 0 }, ..sum }))
    }

    /// Returns the units that [falling back](Self::fall_back) has charged in this process, if any.
    pub(super) fn uncharge(&self, answers: &mut Answers, sum: &KeyCost, now: Option<Tick>) {
        // The part that charges is the last one.
        if let Some((_, timed)) = answers.last_mut()
            && timed.decision.allowed
            && timed.decision.source == Source::Local
            && sum.units > 0
        {
            timed.decision = self.parts[sum.charger].1.uncharge(sum.cost(), now);
        }
    }
}
