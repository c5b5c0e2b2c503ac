//! What a store does while Redis does not answer, and when it is back.
//!
//! The failure setting decides meanwhile. The units that this process allowed by itself are charged afterwards, when the
//! client asks again or by a task in the background.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::Value;
use tallygate::{Access, Algorithm as _, Cost, Decision, Op, Plan, Script as Numbers, Tick, Timed};

use super::operation::changed;
use super::reply::{Scripts, read_reply};
use super::rule::{Judge, Shareable};
use super::{RedisStore, Shared};
use crate::error::Error;
use crate::failure::{
    Charge, NextDue, OnFailure, SHARED_FOR, ShareCharge, Taken, allowed, overloaded,
    pay_again_after, pay_each, refused,
};
use crate::key::Key;
use crate::script::{CHARGE_BUCKET, double};
use crate::transaction::{Seen, unexpected};

impl RedisStore {
    /// Charges a cost to this process's share as well, while other processes may not know that Redis is back: see
    /// [`Local::charge_share`]. Returns a denial if the share does not allow it.
    pub(crate) fn charge_share<'a>(
        &'a self,
        rule: &impl Shareable,
        client: &'a [u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Option<ShareCharge<'a>>, Timed> {
        if cost == 0 || now.is_some() || !self.is_just_back(client) {
            return Ok(None);
        }
        let at = self.server_time();
        let charged = self.shared.local.charge_share(&rule.plan(), client, cost, at);
        charged.map_err(|decision| Timed { decision, at })
    }

    /// Returns whether the server of a client did not answer a moment ago, and processes have shares of the quota.
    pub(super) fn is_just_back(&self, client: &[u8]) -> bool {
        let Shared { redis, on_failure, .. } = &*self.shared;
        if redis.inner().counters.breaker_opened.load(Ordering::Relaxed) == 0
            || !matches!(**on_failure.load(), OnFailure::Local { .. })
        {
            return false;
        }
        let slot = match redis.is_cluster() {
            true => self.key(client).map_or(0, |key| key.slot),
            false => 0,
        };
        let since = Instant::now().checked_sub(SHARED_FOR);
        since.is_some_and(|since| redis.was_away_since(slot, since))
    }

    pub(crate) fn fall_back(
        &self,
        error: Error,
        rule: &impl Shareable,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        if matches!(error, Error::KeyTooLong { .. } | Error::NotInMicroseconds(_)) {
            return Err(error);
        }
        let plan = &rule.plan();
        let Shared { redis, name, on_failure, said, .. } = &*self.shared;
        let counters = &redis.inner().counters;
        if matches!(error, Error::Overloaded { .. } | Error::Contended { .. }) {
            // The server answers: no failure policy decides.
            if !matches!(op, Op::Check(_) | Op::Peek(_)) {
                return Err(error);
            }
            counters.overloaded.fetch_add(1, Ordering::Relaxed);
            if matches!(error, Error::Contended { .. }) {
                counters.races_lost.fetch_add(1, Ordering::Relaxed);
            }
            if said.may() {
                tracing::warn!(policy = &**name, %error, "denying checks that are not decided in time");
            }
            let at = now.unwrap_or_else(|| self.outside(Tick(redis.now())));
            return Ok(Timed { decision: overloaded(plan, at, redis.budget()), at });
        }
        counters.errors.fetch_add(1, Ordering::Relaxed);
        counters.last_error.store(Some(Arc::new(error.clone())));
        if said.may() {
            tracing::warn!(policy = &**name, %error, "redis could not decide");
        }
        let asks = matches!(op, Op::Check(_) | Op::Peek(_));
        let at = now.unwrap_or_else(|| self.outside(Tick(redis.now())));
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let decision = match **on_failure.load() {
            // No store is needed to know that a client is blocked.
            OnFailure::Allow if asks && !matches!(plan.access(at), Access::Blocked) => {
                count(&counters.allowed);
                allowed(plan, at)
            }
            OnFailure::Allow | OnFailure::Deny if asks => {
                count(&counters.denied);
                refused(plan, at)
            }
            OnFailure::Local { .. } if op != Op::Reset => {
                count(&counters.local);
                let decision = self.shared.local.decide(plan, client, op, (at, now.is_some()));
                self.return_others();
                decision
            }
            // There is nothing to decide, and nothing was done.
            _ => return Err(error),
        };
        Ok(Timed { decision, at })
    }

    /// Takes back what was just charged to a client in this process.
    pub(crate) fn uncharge(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Decision {
        let at = now.unwrap_or_else(|| self.server_time());
        let op = Op::Force(-i128::from(cost));
        self.shared.local.decide(&rule.plan(), client, op, (at, now.is_some()))
    }

    /// Charges in Redis what a client used here while Redis was away, before it is asked again.
    pub(crate) async fn give_in(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let local = &self.shared.local;
        if local.is_unused() || !local.is_due(client, now.unwrap_or_else(|| self.server_time())) {
            return Ok(());
        }
        let (judge, key, plan) = (rule.judge(self, now)?, self.key(client)?, rule.plan());
        // A look first: what is sent to a server that does not answer is lost, or is charged later.
        let stands = self.ask(&judge, &key, Op::Peek(0), now, deadline).await?;
        let mut charge = match local.take(&plan, client, now.unwrap_or(stands.at)) {
            Taken::Nothing => return Ok(()),
            Taken::ByAnother => {
                let reason = "what was used in this process is just being charged".into();
                return Err(Error::Unavailable { reason, sent: false });
            }
            Taken::Charge(charge) => charge,
        };
        let mut result = Ok(());
        if charge.used > 0 {
            charge.is_used_charged = true;
            result = self.charge_owed(&judge, client, &key, &charge, now, deadline).await;
            charge.is_used_charged = result.is_ok() || may_be_done(&result);
        }
        if result.is_ok() && charge.has_payments() {
            result = match charge.is_per_limit {
                true => self.pay_limits(&judge, &key, &mut charge, now, deadline).await,
                false => self.pay(&judge, &key, &plan, &mut charge, (stands, now), deadline).await,
            };
        }
        match result {
            Ok(()) => {
                if charge.is_any_charged() {
                    self.shared.redis.inner().counters.returned.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => {
                if !may_be_done(&Err(error.clone())) {
                    charge.failed();
                }
                Err(error)
            }
        }
    }

    /// Charges units that a client was allowed here, as far as there is room for them. The rest stays unpaid: a window would
    /// forget what exceeds its limit.
    pub(super) async fn pay<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        key: &Key,
        plan: &Plan,
        charge: &mut Charge<'_>,
        (stands, now): (Timed, Option<Tick>),
        deadline: Instant,
    ) -> Result<(), Error> {
        let at = now.unwrap_or(stands.at);
        let retry_at = |decision: &Decision| match plan.access(at) {
            Access::Limited(policy) => {
                let limit = policy.limits().first()?;
                at.after(pay_again_after(limit, decision.reset_after))
            }
            Access::Unlimited | Access::Blocked => None,
        };
        charge.retry_at = retry_at(&stands.decision);
        let Some(payment) = charge.payments.first_mut() else { return Ok(()) };
        let amount = payment.pay.min(stands.decision.remaining);
        if amount > 0 {
            let checked = self.ask(judge, key, Op::Check(amount), now, deadline).await?.decision;
            charge.retry_at = retry_at(&checked);
            if checked.allowed {
                payment.paid = amount;
            }
        }
        Ok(())
    }

    /// The same for a policy of several limits: each of them is charged by itself, because one has forgotten units for which
    /// another has no room yet. No script does that; it is rare.
    pub(super) async fn pay_limits<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        key: &Key,
        charge: &mut Charge<'_>,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let Some(policy) = judge.script().map(|prepared| prepared.policy.clone()) else {
            // The client has no limits any more.
            charge.payments.iter_mut().for_each(|payment| payment.paid = payment.pay);
            return Ok(());
        };
        let amounts: Vec<_> =
            charge.payments.iter().map(|payment| (payment.index, payment.pay)).collect();
        let given = now.map(|now| self.in_redis(now).0);
        let decide = |seen: &Seen| {
            let at = Tick(seen.now);
            let before = &seen.values[0];
            let mut state = match before.is_empty() {
                true => judge.rule().first(at),
                false => judge.read(before, at)?,
            };
            let mut paid = Ok(Vec::new());
            judge.change_limits(&mut state, at, &mut |standings| {
                paid = pay_each(&policy, standings, &amounts, at);
            });
            // The limits were built before.
            let paid = paid.map_err(|_| unexpected())?;
            let is_any_paid = paid.iter().any(|(amount, _)| *amount > 0);
            let writes = is_any_paid.then(|| changed(judge, &state, before)).flatten();
            Ok((writes, (paid, at)))
        };
        let (paid, at) = self.shared.redis.transact(&[key], given, None, deadline, decide).await?;
        let mut retry_at = None;
        for (payment, (amount, reset_after)) in charge.payments.iter_mut().zip(paid) {
            payment.paid = amount;
            if payment.paid < payment.pay {
                let wait = pay_again_after(&policy.limits()[payment.index], reset_after);
                let next = self.outside(at.after(wait).unwrap_or(at));
                retry_at = Some(retry_at.map_or(next, |before: Tick| before.min(next)));
            }
        }
        charge.retry_at = retry_at;
        Ok(())
    }

    /// Charges what a client used here while Redis was away, also past the policy's bound on debt: nothing is forgiven.
    /// Several limits keep their bounds, or the shortest would lock the client out for as long as the longest needs.
    pub(super) async fn charge_owed<J: Judge + Clone + 'static>(
        &self,
        judge: &J,
        client: &[u8],
        key: &Key,
        charge: &Charge<'_>,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let redis = &self.shared.redis;
        let scripted = judge.script().and_then(|prepared| {
            let scripted = prepared.scripted.as_ref()?;
            (prepared.policy.limits().len() == 1).then_some((prepared, scripted))
        });
        let amount = i64::try_from(charge.used).ok().filter(|amount| Numbers::takes(*amount));
        if let (Some((prepared, scripted)), Some(amount)) = (scripted, amount) {
            let head = &prepared.head[..];
            if scripted.is_plain_bucket() {
                let outage = redis.key_of_outage(&self.shared.name, client)?;
                let began = self.in_redis(charge.began).0;
                let least = charge.least.min(charge.used);
                let terms = [least.into(), began.into(), i128::from(charge.processes)];
                let terms = terms.map(double).concat();
                let arguments = [head, &scripted.numbers(amount), &terms];
                let reply =
                    redis.run(&CHARGE_BUCKET, &[key, &outage], &arguments, deadline).await?;
                if matches!(reply, Value::BulkString(_)) {
                    return Ok(());
                }
            } else if let Some(force) = &scripted.force {
                let numbers = scripted.numbers_past_debt(amount);
                let reply = redis.run(force, &[key], &[head, &numbers], deadline).await?;
                if matches!(read_reply(reply)?, Scripts::Decided { .. }) {
                    return Ok(());
                }
            }
        }
        self.ask(judge, key, Op::Force(charge.used.into()), now, deadline).await.map(|_| ())
    }

    /// Charges in the background what clients used here, as soon as Redis is back and has room for it. Clients that make no
    /// request are charged, too: other processes would allow the same units again.
    pub(super) fn return_others(&self) {
        let shared = &self.shared;
        if shared.local.is_unused()
            || shared.is_returning.load(Ordering::Relaxed)
            || tokio::runtime::Handle::try_current().is_err()
            || shared.is_returning.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let returning = Returning(Arc::downgrade(shared));
        tokio::spawn(async move {
            while let Some(shared) = returning.0.upgrade() {
                let store = Self { shared };
                let Some(pause) = store.return_some().await else { return };
                drop(store);
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Charges what some clients used here. Returns how long to wait before the next ones; `None` if there are none.
    pub(super) async fn return_some(&self) -> Option<Duration> {
        let some = match self.shared.local.next_due(self.server_time(), 256) {
            NextDue::Now(some) => some,
            NextDue::In(wait) => {
                return Some(Duration::from_nanos(wait.0).clamp(RETURN_PAUSE, 10 * RETURN_PAUSE));
            }
            NextDue::Never => return None,
        };
        // No caller waits for it, and it takes several round trips.
        let deadline = Instant::now() + 4 * self.shared.redis.budget();
        // A few first: as long as Redis does not answer, little is sent.
        let (first, rest) = some.split_at(some.len().min(4));
        for clients in [first, rest] {
            let each =
                clients.iter().map(|(client, plan)| self.give_in(plan, client, None, deadline));
            let each = join_all(each).await;
            if !each.is_empty() && each.iter().all(Result::is_err) {
                return Some(RETURN_PAUSE);
            }
        }
        Some(Duration::ZERO)
    }
}

/// How long the background task waits before it asks again whether Redis is back.
const RETURN_PAUSE: Duration = Duration::from_millis(100);

/// The background task that charges what clients used here. When it ends, another one can begin.
struct Returning(Weak<Shared>);

impl Drop for Returning {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.is_returning.store(false, Ordering::Release);
        }
    }
}

/// Returns whether a call without a reply may have been carried out.
const fn may_be_done(result: &Result<(), Error>) -> bool {
    matches!(
        result,
        Err(Error::Unavailable { sent: true, .. } | Error::Overloaded { sent: true, .. })
    )
}
