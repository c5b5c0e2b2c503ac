//! The limiter in this process that decides during an outage, for its share of each quota.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use tallygate::algorithm::{Answer as _, Op};
use tallygate::clock::SystemClock;
use tallygate::store::{Capacity, MemoryStore, Store as _};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Decision, Policy, PolicyError, Source, StoreError, Tick, Ticks};

use super::debt::{Account, ClientDebt, DebtCharge, NextDebts, Payment, SentCharge, TakenDebt};
use super::share::{LimitShare, Overlap, Share, interval_of_share};
use super::{OnFailure, failed_closed, unknown_denial};

/// The limiter in this process that decides while Redis is unavailable.
///
/// It keeps the state of its clients when Redis is available again: the next outage is no reason for another burst.
pub(crate) struct LocalLimiter {
    instances: AtomicU32,
    /// The shares of clients: one store for the first limit of all policies, one for the second, and so on.
    stores: RwLock<Vec<Arc<MemoryStore<ClientRule>>>>,
    is_used: AtomicBool,
    /// The units that clients used in this process, until they are charged in Redis.
    debts: Mutex<HashMap<Box<[u8]>, ClientDebt>>,
    /// The shares of policies: one for all clients that have the same policy.
    shares: Mutex<Vec<Share>>,
}

/// A charge to this process's share, in addition to the charge in Redis. Its units are returned when it is dropped, unless the
/// request was allowed and the charge is [kept](Self::keep).
#[must_use = "its units are returned when it is dropped"]
pub(crate) struct ShareCharge<'a> {
    local: &'a LocalLimiter,
    limits: Arc<[LimitShare]>,
    client: &'a [u8],
    cost: Cost,
    at: Tick,
}

impl ShareCharge<'_> {
    /// Keeps the charge, because the request was allowed.
    pub(crate) fn keep(mut self) {
        self.cost = 0;
    }
}

impl Drop for ShareCharge<'_> {
    fn drop(&mut self) {
        if self.cost > 0 {
            let op = Op::Force(-i128::from(self.cost));
            for (index, limit) in self.limits.iter().enumerate() {
                // It was charged under this share, so the store takes it.
                let store = self.local.store(index);
                let _ = store.apply::<bool>(&limit.share, self.client, op, Some(self.at));
            }
        }
    }
}

/// How long a process keeps to its share of the quota after an outage: by then, all processes have found out that the server
/// answers again.
pub(crate) const SHARED_FOR: Duration = Duration::from_secs(1);

/// How many clients are decided on locally. Further clients are denied, because their units could not be charged later.
const MAX_CLIENTS: usize = 100_000;
/// How many shares are kept for reuse.
const MAX_SHARES: usize = 32;

impl LocalLimiter {
    pub(crate) fn new(on_failure: OnFailure) -> Self {
        let local = Self {
            instances: AtomicU32::new(1),
            stores: RwLock::default(),
            is_used: AtomicBool::new(false),
            debts: Mutex::default(),
            shares: Mutex::default(),
        };
        local.share_as(on_failure);
        local
    }

    /// Sets the number of processes that share the quota, if the failure setting has one.
    pub(crate) fn share_as(&self, on_failure: OnFailure) {
        if let OnFailure::Local { instances } = on_failure {
            self.instances.store(instances.max(1), Ordering::Relaxed);
        }
    }

    /// Returns the store for the shares of the limits with one index.
    fn store(&self, index: usize) -> Arc<MemoryStore<ClientRule>> {
        if let Some(store) = self.stores.read().unwrap_or_else(PoisonError::into_inner).get(index) {
            return store.clone();
        }
        let mut stores = self.stores.write().unwrap_or_else(PoisonError::into_inner);
        while stores.len() <= index {
            let store = MemoryStore::new(Capacity::of(MAX_CLIENTS), SystemClock::new());
            stores.push(Arc::new(store));
        }
        self.is_used.store(true, Ordering::Release);
        stores[index].clone()
    }

    /// Decides for this process's share. Takes the time of the store's clock, as far as it is known, and whether the caller
    /// gave it.
    pub(crate) fn decide(
        &self,
        rule: &ClientRule,
        client: &[u8],
        op: Op,
        (at, is_given): (Tick, bool),
    ) -> Decision {
        let Ok(limits) = self.limits(rule, at) else { return failed_closed(rule, Tick(0)) };
        // Held until the units are counted: two threads must not both find the same room.
        let mut debts = self.debts();
        let mut debt = match debts.get(client) {
            Some(debt) => debt.clone(),
            None if debts.len() < MAX_CLIENTS => ClientDebt::default(),
            None => return failed_closed(rule, Tick(0)),
        };
        debt.fit(limits.len());
        debt.has_given_time = is_given;
        let began = *debt.began.get_or_insert(at);
        if let Access::Limited(policy) = rule.access(at) {
            debt.policy = Some(self.whole(policy));
        }
        let mut overlaps = Vec::with_capacity(limits.len());
        for (index, limit) in limits.iter().enumerate() {
            let overlap = limit.overlap(began);
            let account = &mut debt.accounts[index];
            self.end_overlap((index, limit), client, account, overlap, at);
            overlaps.push(overlap);
        }
        overlaps.iter_mut().for_each(|overlap| {
            *overlap = overlap.filter(|overlap| at < overlap.until);
        });
        let denial = match op {
            Op::Check(cost) | Op::Peek(cost) => {
                let wait = self.wait_for_first_unit(rule, &mut debt, at);
                let unpaid = wait_for_payment(&limits, &debt, &overlaps, cost, at);
                wait.max(unpaid)
            }
            Op::Force(_) | Op::Reset => None,
        };
        let decided = match denial {
            Some(wait) => self.apply_to_shares(&limits, client, Op::Peek(0), at).map(|status| {
                let (retry_after, denied_by) = (Some(wait), Some(0));
                Decision { allowed: false, remaining: 0, retry_after, denied_by, ..status }
            }),
            None => self.apply_to_shares(&limits, client, op, at).inspect(|decision| {
                for (account, overlap) in debt.accounts.iter_mut().zip(&overlaps) {
                    account.note(op, decision.allowed, overlap.is_some());
                }
            }),
        };
        let Ok(mut decision) = decided else { return failed_closed(rule, Tick(0)) };
        for ((limit, account), overlap) in limits.iter().zip(&debt.accounts).zip(&overlaps) {
            if overlap.is_some() {
                let left = limit.capacity(at).saturating_sub(account.unpaid);
                decision.remaining = decision.remaining.min(left);
            }
        }
        debts.insert(client.into(), debt);
        Decision { source: Source::Local, ..decision }
    }

    /// Applies an operation to all shares, all or nothing. Returns the tightest decision.
    fn apply_to_shares(
        &self,
        limits: &[LimitShare],
        client: &[u8],
        op: Op,
        at: Tick,
    ) -> Result<Decision, StoreError> {
        let apply = |index: usize, op| {
            let share = &limits[index].share;
            self.store(index).apply::<Decision>(share, client, op, Some(at))
        };
        let mut decisions = Vec::with_capacity(limits.len());
        if let (Op::Check(cost), 2..) = (op, limits.len()) {
            for index in 0..limits.len() {
                decisions.push(apply(index, Op::Peek(cost))?);
            }
            let is_allowed = decisions.iter().all(|decision| decision.allowed);
            for (index, decision) in decisions.iter_mut().enumerate() {
                // A limit that denies has to apply the operation: the denial may count towards a penalty.
                if is_allowed || !decision.allowed {
                    *decision = apply(index, op)?;
                }
            }
        } else {
            for index in 0..limits.len() {
                decisions.push(apply(index, op)?);
            }
        }
        let named = limits.iter().zip(decisions).map(|(limit, decision)| Decision {
            scarcest: decision.scarcest.map(|_| limit.index),
            denied_by: decision.denied_by.map(|_| limit.index),
            ..decision
        });
        Ok(named.reduce(Decision::merge).unwrap_or_else(unknown_denial))
    }

    /// Charges the units that were allowed in the overlap to the share, once it is over.
    ///
    /// The share starts again at that time. All units that it counted are unpaid, or were charged in Redis, which has forgotten
    /// them by then.
    fn end_overlap(
        &self,
        (index, limit): (usize, &LimitShare),
        client: &[u8],
        account: &mut Account,
        overlap: Option<Overlap>,
        at: Tick,
    ) {
        let Some(overlap) = overlap.filter(|overlap| at >= overlap.until) else { return };
        let (store, share) = (self.store(index), &limit.share);
        let mut charged_at = at;
        if !account.is_past_overlap {
            account.is_past_overlap = true;
            charged_at = overlap.until;
            let all = Op::Force(-i128::from(Cost::MAX));
            // A store in memory takes every time and every amount.
            let _ = store.apply::<bool>(share, client, all, Some(charged_at));
        }
        if account.unpaid > 0
            && let Ok(status) = self.peek((index, limit), client, charged_at)
        {
            let paid = account.unpaid.min(status.remaining);
            let op = Op::Force(paid.into());
            if store.apply::<bool>(share, client, op, Some(charged_at)).is_ok() {
                account.unpaid -= paid;
                account.cost = account.cost.saturating_add(paid);
            }
        }
    }

    fn peek(
        &self,
        (index, limit): (usize, &LimitShare),
        client: &[u8],
        at: Tick,
    ) -> Result<Decision, StoreError> {
        self.store(index).apply::<Decision>(&limit.share, client, Op::Peek(0), Some(at))
    }

    /// Returns this process's share of each limit that a client has now.
    fn limits(&self, rule: &ClientRule, at: Tick) -> Result<Arc<[LimitShare]>, PolicyError> {
        let instances = self.instances.load(Ordering::Relaxed);
        let overlaps = match rule.access(at) {
            Access::Limited(policy) => {
                let limits = self.share_of(policy, instances)?.limits;
                if !limits.is_empty() {
                    return Ok(limits);
                }
                // The policy has one limit, or no enforced one.
                let enforced = policy.limits().iter().find(|limit| !limit.is_shadow());
                enforced.filter(|limit| !limit.numbers().kind.is_bucket()).cloned()
            }
            Access::Unlimited | Access::Blocked => None,
        };
        let share = rule.with(|policy| Ok(self.share_of(policy, instances)?.part), |time| time)?;
        Ok([LimitShare { index: 0, share, overlaps }].into())
    }

    /// Returns how long a client has to wait until its share has earned a first unit; `None` if the share starts with one.
    ///
    /// Where a quota is smaller than the fleet, a share is less than a unit. If every process began with a whole one, they
    /// would allow more than the quota together. So a process allows nothing until one to two of the intervals have
    /// passed in which its share earns a unit: then all of them together never allow more than the quota earns from
    /// the beginning of the outage. The moment is random, so that they do not allow their units all at once.
    fn wait_for_first_unit(
        &self,
        rule: &ClientRule,
        debt: &mut ClientDebt,
        at: Tick,
    ) -> Option<Ticks> {
        let Access::Limited(policy) = rule.access(at) else { return None };
        let interval = interval_of_share(policy, self.instances.load(Ordering::Relaxed))?;
        let not_before = *debt.not_before.get_or_insert_with(|| {
            let waits = interval.0.saturating_add(fastrand::u64(0..=interval.0));
            at.after(Ticks(waits)).unwrap_or(Tick(i64::MAX))
        });
        (at < not_before).then(|| not_before.since(at))
    }

    /// Returns a policy that all clients of an equal policy share.
    fn whole(&self, policy: &Arc<Policy>) -> Arc<Policy> {
        let shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let same = shares.iter().find(|share| share.whole == *policy);
        same.map_or(policy, |share| &share.whole).clone()
    }

    /// Returns the share of a policy, one for all clients of an equal policy.
    fn share_of(&self, whole: &Arc<Policy>, instances: u32) -> Result<Share, PolicyError> {
        let mut shares = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |share: &&Share| share.instances == instances && share.whole == *whole;
        if let Some(share) = shares.iter().find(is_it) {
            return Ok(share.clone());
        }
        let share = Share::of(whole, instances)?;
        if shares.len() == MAX_SHARES {
            shares.clear();
        }
        shares.push(share.clone());
        Ok(share)
    }

    /// Returns whether a client has units to be charged in Redis before its next check is decided.
    pub(crate) fn is_due(&self, client: &[u8], at: Tick) -> bool {
        self.debts().get(client).is_some_and(|debt| debt.is_due(at))
    }

    /// Takes the debt of a client, to be charged in Redis. The share keeps counting the units as used.
    ///
    /// For a window, the debt is the units that count in it now, and the units that are unpaid: see [`Overlap`]. For a bucket,
    /// it is all units that this process allowed, less the units that the bucket in Redis could not earn meanwhile because it
    /// was full. Without this reduction, a client that used its quota during an outage of one hour would be locked out for
    /// another hour.
    ///
    /// The units that the bucket could not earn are known only if its key has expired when the first process
    /// reconnects, since a key expires when its bucket is full. Suppose that this is after a time d, in which L units
    /// are earned. If the level was at most a burst B before, at least L − B units were lost. If it was higher, the
    /// client owed units of an outage before, and was allowed none in Redis since. Then the bucket is full at the time
    /// that the script noted when it charged them, and loses only what it earns from then on. Each of the n processes
    /// charges (L − B) / n less, so all together reduce the debt by no more than was lost; but each charges at least
    /// what its share has not earned back. Each process allowed at most what its share did: (B + L) / n. So after an
    /// outage of any length, all processes together charge at most two bursts, and never less than if every request had
    /// been charged in Redis at its time.
    pub(crate) fn take<'a>(
        &'a self,
        rule: &ClientRule,
        client: &'a [u8],
        at: Tick,
    ) -> TakenDebt<'a> {
        let mut debts = self.debts();
        let Some(debt) = debts.get_mut(client) else { return TakenDebt::Nothing };
        if debt.is_being_charged {
            return TakenDebt::ByAnother;
        }
        let began = debt.began.unwrap_or(Tick(i64::MAX));
        let limits = self.limits(rule, at).unwrap_or_else(|_| [].into());
        debt.fit(limits.len());
        let (mut payments, mut used, mut least) = (Vec::new(), 0, 0);
        for (index, limit) in limits.iter().enumerate() {
            let account = &mut debt.accounts[index];
            let overlap = limit.overlap(began);
            if debt.began.is_some() {
                self.end_overlap((index, limit), client, account, overlap, at);
            }
            let Account { cost, unpaid, .. } = *account;
            let status = self.peek((index, limit), client, at).ok();
            least = status.map_or(cost, |status| cost.min(status.limit - status.remaining));
            let pay = match overlap {
                Some(_) => unpaid.saturating_add(least),
                None => {
                    used = cost.saturating_add(unpaid);
                    0
                }
            };
            payments.push(Payment { index: limit.index, cost, unpaid, pay, paid: 0 });
        }
        if used == 0 && payments.iter().all(|payment| payment.pay == 0) {
            debts.remove(client);
            return TakenDebt::Nothing;
        }
        let is_repeated = used > 0 && debt.unresolved.is_some();
        let sent = (used > 0).then(|| {
            let new = || SentCharge { number: fastrand::i64(0..1 << 53), used, least, began };
            *debt.unresolved.get_or_insert_with(new)
        });
        if let (Some(sent), [payment]) = (sent, &mut payments[..]) {
            payment.cost = payment.cost.min(sent.used);
            payment.unpaid = payment.unpaid.min(sent.used - payment.cost);
        }
        debt.is_being_charged = true;
        let policy = match rule.access(at) {
            Access::Limited(policy) => Some(policy),
            Access::Unlimited | Access::Blocked => None,
        };
        TakenDebt::Charge(DebtCharge {
            local: self,
            client,
            payments,
            is_per_limit: policy.is_some_and(|policy| policy.limits().len() > 1),
            sent,
            is_used_charged: used == 0,
            is_repeated,
            retry_at: None,
            processes: self.instances.load(Ordering::Relaxed),
            has_failed: false,
        })
    }

    /// Charges a cost to this process's share of the quota, for a request that is then decided by Redis. Returns a denial if
    /// the share does not allow it.
    ///
    /// Processes do not find out at the same time that Redis is available again. The first process finds the quota as it was
    /// before the outage, plus all units earned since, while the others have allowed their shares of the same quota and have
    /// not charged them yet. So it keeps to its own share until they have: see [`SHARED_FOR`]. Then a fleet allows no more
    /// after an outage than during it.
    pub(crate) fn charge_share<'a>(
        &'a self,
        rule: &ClientRule,
        client: &'a [u8],
        cost: Cost,
        at: Tick,
    ) -> Result<Option<ShareCharge<'a>>, Decision> {
        // A single process has the whole quota.
        if self.instances.load(Ordering::Relaxed) < 2 {
            return Ok(None);
        }
        let Ok(limits) = self.limits(rule, at) else { return Ok(None) };
        match self.apply_to_shares(&limits, client, Op::Check(cost), at) {
            Ok(decision) if !decision.allowed => {
                let most = Ticks::from_duration(SHARED_FOR);
                let retry_after = Some(decision.retry_after.map_or(most, |wait| wait.min(most)));
                Err(Decision { retry_after, source: Source::Local, ..decision })
            }
            _ => Ok(Some(ShareCharge { local: self, limits, client, cost, at })),
        }
    }

    /// Settles the debt of a client after it was charged, as far as it was.
    pub(super) fn charged(&self, charge: &DebtCharge<'_>) {
        let mut debts = self.debts();
        let Some(debt) = debts.get_mut(charge.client) else { return };
        debt.is_being_charged = false;
        if charge.is_unresolved() {
            // Units that are allowed from now on belong to another charge.
            debt.began = None;
            return;
        }
        if !charge.is_used_charged && !charge.is_repeated {
            debt.unresolved = None;
        }
        let is_any_paid = charge.payments.iter().any(|payment| payment.paid > 0);
        if charge.has_failed && !is_any_paid && (charge.sent.is_none() || !charge.is_used_charged) {
            return;
        }
        debt.fit(charge.payments.len());
        if charge.is_used_charged {
            debt.unresolved = None;
            for (account, charge) in debt.accounts.iter_mut().zip(&charge.payments) {
                account.cost = account.cost.saturating_sub(charge.cost);
                let left = charge.pay - charge.paid;
                account.unpaid = account.unpaid.saturating_sub(charge.unpaid).saturating_add(left);
            }
            debt.retry_at = charge.retry_at;
        }
        if !charge.has_failed && !charge.is_repeated {
            debt.began = None;
            debt.accounts.iter_mut().for_each(|account| account.is_past_overlap = false);
        }
        if debt.is_empty() {
            debts.remove(charge.client);
        }
    }

    /// Returns some of the clients whose debts are due, with their rules; or, if none is due, when the next one will be. Omits
    /// clients whose callers give the time, because only the callers know when to charge.
    pub(crate) fn next_due(&self, at: Tick, at_most: usize) -> NextDebts {
        let debts = self.debts();
        let pending = debts.iter().filter(|(_, debt)| !debt.has_given_time);
        let due: Vec<_> = pending.clone().filter(|(_, debt)| debt.is_due(at)).collect();
        if due.is_empty() {
            let next = pending.filter_map(|(_, debt)| debt.retry_at).min();
            return next.map_or(NextDebts::Never, |next| NextDebts::In(next.since(at)));
        }
        // Not always the same clients: some servers of a cluster may be unavailable while others answer.
        let first = fastrand::usize(0..due.len());
        let some = due.iter().cycle().skip(first).take(due.len().min(at_most));
        let rule = |debt: &ClientDebt| match &debt.policy {
            Some(policy) => ClientRule::of(Access::Limited(policy.clone())),
            None => ClientRule::of(Access::Unlimited),
        };
        NextDebts::Now(some.map(|(client, debt)| ((*client).clone(), rule(debt))).collect())
    }

    /// Returns whether no client owes anything.
    pub(crate) fn has_no_debts(&self) -> bool {
        !self.is_used.load(Ordering::Acquire) || self.debts().is_empty()
    }

    fn debts(&self) -> std::sync::MutexGuard<'_, HashMap<Box<[u8]>, ClientDebt>> {
        self.debts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns how long to wait until enough of the unpaid units are paid for a cost; `None` if none has to be paid first.
fn wait_for_payment(
    limits: &[LimitShare],
    debt: &ClientDebt,
    overlaps: &[Option<Overlap>],
    cost: Cost,
    at: Tick,
) -> Option<Ticks> {
    let each = limits.iter().zip(&debt.accounts).zip(overlaps);
    let waits = each.filter_map(|((limit, account), overlap)| {
        let overlap = overlap
            .filter(|_| cost > 0 && account.unpaid.saturating_add(cost) > limit.capacity(at))?;
        // The window after the overlap pays for the units that are unpaid.
        Some(Ticks(overlap.until.since(at).0.saturating_add(overlap.window.0)))
    });
    waits.max()
}
