//! How a store decides while Redis does not answer, and how it pays the debts of clients afterwards.
//!
//! The failure setting decides during an outage. The units that this process allowed by itself are charged in Redis afterwards:
//! before the client's next check, or by a task in the background.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::Value;
use tallygate::algorithm::{Algorithm as _, Op, Script as Numbers, Timed};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Cost, Decision, Tick};

use super::operation::changed;
use super::reply::{ScriptReply, read_reply};
use super::rule::{RedisRule, StateCodec};
use super::{RedisStore, Shared};
use crate::error::Error;
use crate::failure::{
    DebtCharge, NextDebts, OnFailure, SHARED_FOR, SentCharge, ShareCharge, TakenDebt,
    failed_closed, failed_open, overloaded, pay_again_after, pay_each,
};
use crate::key::Key;
use crate::script::{CHARGE_BUCKET, double};
use crate::transaction::{ReadValues, unexpected};

impl RedisStore {
    /// Charges a cost to this process's share as well, while other processes may not know that Redis is available again: see
    /// `LocalLimiter::charge_share`. Returns a denial if the share does not allow it.
    pub(crate) fn charge_share<'a>(
        &'a self,
        rule: &impl RedisRule,
        client: &'a [u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Result<Option<ShareCharge<'a>>, Timed> {
        if cost == 0 || now.is_some() || !self.is_just_back(client) {
            return Ok(None);
        }
        let at = self.server_time();
        let charged = self.shared.local.charge_share(&rule.client_rule(), client, cost, at);
        charged.map_err(|decision| Timed { decision, at })
    }

    /// Returns whether the server of a client was unavailable, out of memory or rejecting every call until a moment ago, and
    /// processes have shares of the quota.
    pub(super) fn is_just_back(&self, client: &[u8]) -> bool {
        let Shared { redis, on_failure, .. } = &*self.shared;
        if !redis.inner().counters.was_ever_away()
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

    /// Decides by the failure setting, because of an error.
    pub(crate) fn fall_back(
        &self,
        error: Error,
        rule: &impl RedisRule,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        if matches!(error, Error::KeyTooLong { .. } | Error::NotInMicroseconds(_)) {
            return Err(error);
        }
        let client_rule = &rule.client_rule();
        let Shared { redis, name, on_failure, log_throttle, .. } = &*self.shared;
        let counters = &redis.inner().counters;
        if matches!(error, Error::Overloaded { .. } | Error::Contended { .. }) {
            // The server answers, so the failure setting does not decide.
            if !matches!(op, Op::Check(_) | Op::Peek(_)) {
                return Err(error);
            }
            counters.overloaded.fetch_add(1, Ordering::Relaxed);
            if matches!(error, Error::Contended { .. }) {
                counters.races_lost.fetch_add(1, Ordering::Relaxed);
            }
            if log_throttle.allows() {
                tracing::warn!(policy = &**name, %error, "redis did not decide in time; denying the check");
            }
            let at = now.unwrap_or_else(|| self.server_time());
            return Ok(Timed { decision: overloaded(client_rule, at, redis.budget()), at });
        }
        counters.errors.fetch_add(1, Ordering::Relaxed);
        counters.last_error.store(Some(Arc::new(error.clone())));
        if log_throttle.allows() {
            let failure_setting = on_failure.load().name();
            tracing::warn!(
                policy = &**name,
                failure_setting,
                %error,
                "redis check failed; deciding by the policy's failure setting"
            );
        }
        let asks = matches!(op, Op::Check(_) | Op::Peek(_));
        let at = now.unwrap_or_else(|| self.server_time());
        let count = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        let decision = match **on_failure.load() {
            // A blocked client is denied without the store.
            OnFailure::Allow if asks && !matches!(client_rule.access(at), Access::Blocked) => {
                count(&counters.allowed);
                failed_open(client_rule, at)
            }
            OnFailure::Allow | OnFailure::Deny if asks => {
                count(&counters.denied);
                failed_closed(client_rule, at)
            }
            OnFailure::Local { .. } if op != Op::Reset => {
                count(&counters.local);
                let decision =
                    self.shared.local.decide(client_rule, client, op, (at, now.is_some()));
                self.pay_debts_in_background();
                decision
            }
            // The operation is not a check, and it was not carried out.
            _ => return Err(error),
        };
        Ok(Timed { decision, at })
    }

    /// Returns units that were just charged to a client in this process.
    pub(crate) fn uncharge(
        &self,
        rule: &impl RedisRule,
        client: &[u8],
        cost: Cost,
        now: Option<Tick>,
    ) -> Decision {
        let at = now.unwrap_or_else(|| self.server_time());
        let op = Op::Force(-i128::from(cost));
        self.shared.local.decide(&rule.client_rule(), client, op, (at, now.is_some()))
    }

    /// Charges the debt of a client in Redis before its next check: the units that this process allowed while Redis was
    /// unavailable.
    pub(crate) async fn pay_debt(
        &self,
        rule: &impl RedisRule,
        client: &[u8],
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let local = &self.shared.local;
        if local.has_no_debts() || !local.is_due(client, now.unwrap_or_else(|| self.server_time()))
        {
            return Ok(());
        }
        let (codec, key, client_rule) =
            (rule.codec(self, now)?, self.key(client)?, rule.client_rule());
        // Peek first: a charge that is sent to a server that does not answer is lost, or is carried out later.
        let status = self.ask(&codec, &key, Op::Peek(0), now, deadline).await?;
        let mut charge = match local.take(&client_rule, client, now.unwrap_or(status.at)) {
            TakenDebt::Nothing => return Ok(()),
            TakenDebt::ByAnother => {
                let reason = "another task is charging the units used in this process".into();
                return Err(Error::Unavailable { reason, sent: false });
            }
            TakenDebt::Charge(charge) => charge,
        };
        let mut result = Ok(());
        if let Some(sent) = charge.sent {
            let terms = (sent, charge.processes);
            result = self.charge_debt(&codec, client, &key, terms, now, deadline).await;
            charge.is_used_charged = result.is_ok();
        }
        if result.is_ok() && charge.has_payments() {
            result = match charge.is_per_limit {
                true => self.pay_each_limit(&codec, &key, &mut charge, now, deadline).await,
                false => {
                    self.pay_windows(
                        &codec,
                        &key,
                        &client_rule,
                        &mut charge,
                        (status, now),
                        deadline,
                    )
                    .await
                }
            };
        }
        match result {
            Ok(()) => {
                if charge.is_any_charged() {
                    self.shared
                        .redis
                        .inner()
                        .counters
                        .debts_charged
                        .fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }
            Err(error) => {
                if !error.may_be_done() {
                    charge.failed();
                }
                Err(error)
            }
        }
    }

    /// Charges the units that a client was allowed in this process, as far as there is room for them. The rest stays unpaid,
    /// because a window would forget units beyond its limit.
    pub(super) async fn pay_windows<J: StateCodec + Clone + 'static>(
        &self,
        codec: &J,
        key: &Key,
        client_rule: &ClientRule,
        charge: &mut DebtCharge<'_>,
        (status, now): (Timed, Option<Tick>),
        deadline: Instant,
    ) -> Result<(), Error> {
        let at = now.unwrap_or(status.at);
        let retry_at = |decision: &Decision| match client_rule.access(at) {
            Access::Limited(policy) => {
                let limit = policy.limits().first()?;
                at.after(pay_again_after(limit, decision.reset_after))
            }
            Access::Unlimited | Access::Blocked => None,
        };
        charge.retry_at = retry_at(&status.decision);
        let Some(payment) = charge.payments.first_mut() else { return Ok(()) };
        let amount = payment.pay.min(status.decision.remaining);
        if amount > 0 {
            let checked = self.ask(codec, key, Op::Check(amount), now, deadline).await?.decision;
            charge.retry_at = retry_at(&checked);
            if checked.allowed {
                payment.paid = amount;
            }
        }
        Ok(())
    }

    /// Charges the units to each limit of a policy separately, because one limit may have forgotten units for which another
    /// has no room yet. This is rare, so there is no script for it.
    pub(super) async fn pay_each_limit<J: StateCodec + Clone + 'static>(
        &self,
        codec: &J,
        key: &Key,
        charge: &mut DebtCharge<'_>,
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let Some(policy) = codec.script().map(|prepared| prepared.policy.clone()) else {
            // The client is not limited any more.
            charge.payments.iter_mut().for_each(|payment| payment.paid = payment.pay);
            return Ok(());
        };
        let amounts: Vec<_> =
            charge.payments.iter().map(|payment| (payment.index, payment.pay)).collect();
        let given = now.map(|now| self.to_redis_time(now).0);
        let decide = |seen: &ReadValues| {
            let at = Tick(seen.now);
            let before = &seen.values[0];
            let mut state = match before.is_empty() {
                true => codec.rule().initial(at),
                false => codec.read(before, at)?,
            };
            let mut paid = Ok(Vec::new());
            codec.charge_limits(&mut state, at, &mut |records, room| {
                paid = pay_each(&policy, records, &amounts, room, at);
                let each = paid.iter().flatten().map(|(amount, _)| *amount);
                each.max().unwrap_or(0)
            });
            // These limits were valid when the policy was built.
            let paid = paid.map_err(|_| unexpected())?;
            let is_any_paid = paid.iter().any(|(amount, _)| *amount > 0);
            let writes = is_any_paid.then(|| changed(codec, &state, before)).flatten();
            Ok((writes, (paid, at)))
        };
        let (paid, at) = self.shared.redis.transact(&[key], given, None, deadline, decide).await?;
        let mut retry_at = None;
        for (payment, (amount, reset_after)) in charge.payments.iter_mut().zip(paid) {
            payment.paid = amount;
            if payment.paid < payment.pay {
                let wait = pay_again_after(&policy.limits()[payment.index], reset_after);
                let next = self.to_caller_time(at.after(wait).unwrap_or(at));
                retry_at = Some(retry_at.map_or(next, |before: Tick| before.min(next)));
            }
        }
        charge.retry_at = retry_at;
        Ok(())
    }

    /// Charges the units that a client used in this process while Redis was unavailable, even beyond the policy's bound on
    /// debt: no unit is lost. A charge whose reply was lost is sent again. The script of a plain bucket recognizes it by its
    /// number; otherwise the client may be charged twice, but is never allowed too much. Several limits keep their bounds, or the shortest would lock the client out for as long as the
    /// longest needs.
    pub(super) async fn charge_debt<J: StateCodec + Clone + 'static>(
        &self,
        codec: &J,
        client: &[u8],
        key: &Key,
        (sent, processes): (SentCharge, u32),
        now: Option<Tick>,
        deadline: Instant,
    ) -> Result<(), Error> {
        let redis = &self.shared.redis;
        let given = now.map(|now| self.to_redis_time(now).0);
        let scripted = codec.script().and_then(|prepared| {
            let scripted = prepared.scripted.as_ref()?;
            (given.is_none_or(Numbers::is_exact) && prepared.policy.limits().len() == 1)
                .then_some((prepared, scripted))
        });
        let amount = i64::try_from(sent.used).ok().filter(|amount| Numbers::is_exact(*amount));
        if let (Some((prepared, scripted)), Some(amount)) = (scripted, amount) {
            let head = &prepared.head[..];
            if scripted.is_plain_bucket() {
                let outage = redis.key_of_outage(&self.shared.name, client)?;
                let began = self.to_redis_time(sent.began).0;
                let least = sent.least.min(sent.used);
                let processes = i128::from(processes);
                let terms = [least.into(), began.into(), processes, sent.number.into()];
                let terms = terms.map(double).concat();
                let (numbers, time) = (scripted.numbers(amount), given.map(|at| at.to_string()));
                let mut arguments = vec![head, &numbers, &terms];
                arguments.extend(time.as_ref().map(String::as_bytes));
                let reply =
                    redis.run(&CHARGE_BUCKET, &[key, &outage], &arguments, deadline).await?;
                if matches!(reply, Value::BulkString(_)) {
                    return Ok(());
                }
            } else if let Some(force) = &scripted.force {
                let numbers = scripted.numbers_past_debt(amount);
                let reply = redis.run(force, &[key], &[head, &numbers], deadline).await?;
                if matches!(read_reply(reply)?, ScriptReply::Decided { .. }) {
                    return Ok(());
                }
            }
        }
        self.ask(codec, key, Op::Force(sent.used.into()), now, deadline).await.map(|_| ())
    }

    /// Charges the debts of all clients in the background, as soon as Redis is available and has room for them. That includes
    /// clients that make no requests: other processes would allow the same units again.
    pub(super) fn pay_debts_in_background(&self) {
        let shared = &self.shared;
        if shared.local.has_no_debts()
            || shared.is_paying_debts.load(Ordering::Relaxed)
            || tokio::runtime::Handle::try_current().is_err()
            || shared.is_paying_debts.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let payer = DebtPayer(Arc::downgrade(shared));
        tokio::spawn(async move {
            while let Some(shared) = payer.0.upgrade() {
                let store = Self { shared };
                let Some(pause) = store.pay_some_debts().await else { return };
                drop(store);
                tokio::time::sleep(pause).await;
            }
        });
    }

    /// Charges the debts of some clients. Returns how long to wait before the next ones; `None` if there are no more.
    pub(super) async fn pay_some_debts(&self) -> Option<Duration> {
        let some = match self.shared.local.next_due(self.server_time(), 256) {
            NextDebts::Now(some) => some,
            NextDebts::In(wait) => {
                return Some(Duration::from_nanos(wait.0).clamp(PAYMENT_PAUSE, 10 * PAYMENT_PAUSE));
            }
            NextDebts::Never => return None,
        };
        // No caller waits for this, and it takes several round trips.
        let deadline = Instant::now() + 4 * self.shared.redis.budget();
        // Start with a few, so that little is sent as long as Redis does not answer.
        let (first, rest) = some.split_at(some.len().min(4));
        for clients in [first, rest] {
            let each = clients
                .iter()
                .map(|(client, client_rule)| self.pay_debt(client_rule, client, None, deadline));
            let each = join_all(each).await;
            if !each.is_empty() && each.iter().all(Result::is_err) {
                return Some(PAYMENT_PAUSE);
            }
        }
        Some(Duration::ZERO)
    }
}

/// How long the background task waits before it tries Redis again.
const PAYMENT_PAUSE: Duration = Duration::from_millis(100);

/// The background task that charges the debts of clients. When it ends, another one can start.
struct DebtPayer(Weak<Shared>);

impl Drop for DebtPayer {
    fn drop(&mut self) {
        if let Some(shared) = self.0.upgrade() {
            shared.is_paying_debts.store(false, Ordering::Release);
        }
    }
}
