//! Turns checks into calls, through the broker of their key.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use futures_util::future::join_all;
use tallygate::algorithm::{Op, Script as Numbers, Timed};
use tallygate::store::MAX_KEY_BYTES;
use tallygate::{Cost, Tick};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::lease_calls::Keys;
use super::reply::{ScriptReply, read_reply};
use super::rule::RedisRule;
use super::{RedisStore, Shared};
use crate::brokers::{self, AskResult, SliceToReturn, WaiterResult};
use crate::error::Error;
use crate::key_broker::{Call, CallKind, CallResult, Number, Terms, UnusedSlice};
use crate::link::last_chance;
use crate::prepared::{Prepared, ScriptUse};
use crate::stall::STALL;
use crate::transaction::unexpected;

impl RedisStore {
    /// Returns the prepared policy and the cost of a check that goes through a broker: one by the clock of the store,
    /// of a policy that has scripts.
    pub(super) fn prepare_check(
        &self,
        rule: &impl RedisRule,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Option<(Arc<Prepared>, Cost)> {
        let (Op::Check(cost @ 1..), None) = (op, now) else { return None };
        let is_exact = i64::try_from(cost).is_ok_and(Numbers::is_exact);
        if !is_exact || client.len() > MAX_KEY_BYTES || !self.uses_broker_now(client) {
            return None;
        }
        let prepared = rule.prepared(self)?;
        prepared.scripted.is_some().then_some((prepared, cost))
    }

    /// Returns whether checks of a client go through the broker of its key now. They do not while units have to be
    /// charged in Redis first, and while other processes may not know that Redis is available again.
    pub(super) fn uses_broker_now(&self, client: &[u8]) -> bool {
        let local = &self.shared.local;
        let is_due = || !local.has_no_debts() && local.is_due(client, self.server_time());
        !is_due() && !self.is_just_back(client)
    }

    /// Decides on a check, through the broker of its key if possible.
    pub(crate) async fn decide_any<A: RedisRule>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let asked = self.prepare_check(rule, client, op, now);
        self.decide_prepared(rule, client, op, now, asked).await
    }

    /// Decides on a check for which [`prepare_check`](Self::prepare_check) was called.
    pub(super) async fn decide_prepared<A: RedisRule>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
        asked: Option<(Arc<Prepared>, Cost)>,
    ) -> Result<Timed, Error> {
        let deadline = self.shared.redis.deadline();
        let script_use = match asked.filter(|_| self.uses_broker_now(client)) {
            None => ScriptUse::IfPossible,
            Some((prepared, cost)) => {
                match self.ask_broker(&prepared, client, cost, deadline).await {
                    Ok(BrokerAnswer::Decided(timed)) => {
                        self.pay_debts_in_background();
                        return Ok(self.in_caller_ticks(timed));
                    }
                    Ok(BrokerAnswer::Undecided(script_use)) => script_use,
                    Err(error) => return self.fall_back(error, rule, client, op, now),
                }
            }
        };
        match self.key(client) {
            // Boxed, because it would make every future several times as large.
            Ok(key) => {
                let by = (script_use, deadline);
                Box::pin(self.decide(rule, client, &key, op, now, by)).await
            }
            Err(error @ Error::Unavailable { .. }) => self.fall_back(error, rule, client, op, now),
            Err(error) => Err(error),
        }
    }

    /// Decides on a check through the broker of its key.
    async fn ask_broker(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        cost: Cost,
        deadline: Instant,
    ) -> Result<BrokerAnswer, Error> {
        let budget = self.shared.redis.budget();
        let asked = self.shared.brokers.ask(prepared, client, cost, (budget, deadline));
        self.keep_sweeping(&prepared.terms);
        let (mut waits, call, flush_at) = match asked {
            AskResult::Decided(timed, call) => {
                if let Some(call) = call {
                    self.spawn_call(prepared, client, call);
                }
                return Ok(BrokerAnswer::Decided(timed));
            }
            AskResult::Undecided(script_use) => return Ok(BrokerAnswer::Undecided(script_use)),
            AskResult::Overloaded => return Err(brokers::overloaded()),
            AskResult::Pending { waits, call, flush_at } => (waits, call, flush_at),
        };
        match call {
            // A call for several checks must not end with the caller that makes it.
            Some(call) if call.checks > 1 => self.spawn_call(prepared, client, call),
            Some(call) => self.make_call(prepared, client, call, deadline).await,
            None => {}
        }
        let result = match waits.try_recv() {
            Ok(result) => result,
            Err(_) => Box::pin(self.wait_for(prepared, client, waits, (flush_at, deadline))).await,
        };
        Ok(match result? {
            Some(timed) => BrokerAnswer::Decided(timed),
            None => BrokerAnswer::Undecided(ScriptUse::Never),
        })
    }

    /// Waits for the decision on a check, and flushes the queue in time.
    pub(super) async fn wait_for(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        mut waits: oneshot::Receiver<WaiterResult>,
        (flush_at, deadline): (Option<Instant>, Instant),
    ) -> WaiterResult {
        if let Some(flush_at) = flush_at.filter(|flush_at| *flush_at < deadline) {
            if let Ok(result) = timeout_at(flush_at.into(), &mut waits).await {
                return result.unwrap_or_else(|_| Err(brokers::abandoned()));
            }
            if let Some(call) = self.shared.brokers.flush(prepared, client) {
                self.spawn_call(prepared, client, call);
            }
        }
        let arrived = deadline.checked_sub(self.shared.redis.budget()).unwrap_or(deadline);
        let redis = &self.shared.redis;
        let mut result = timeout_at(deadline.into(), &mut waits).await.ok();
        let key = self.key(client)?;
        // A process that notices the deadline late was late to read the reply as well, although the server answers.
        let was_stalled = deadline.elapsed() > STALL;
        if result.is_none() && (was_stalled || !redis.is_busy_since(&key, arrived)) {
            result = last_chance(deadline, redis.budget(), &mut waits).await;
        }
        match result {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(brokers::abandoned()),
            None if redis.is_busy_since(&key, arrived) => Err(brokers::overloaded()),
            None => Err(Error::Unavailable {
                reason: "no reply within the time budget".into(),
                sent: true,
            }),
        }
    }

    pub(super) fn spawn_call(&self, prepared: &Arc<Prepared>, client: &[u8], call: Call) {
        let (store, prepared) = (self.clone(), prepared.clone());
        let client: Box<[u8]> = client.into();
        tokio::spawn(async move {
            let deadline = store.shared.brokers.deadline_of(&call, store.shared.redis.budget());
            store.make_call(&prepared, &client, call, deadline).await;
        });
    }

    /// Makes a call, and answers the checks that wait for it. A task makes the next call for the checks that arrived
    /// meanwhile.
    pub(super) async fn make_call(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        call: Call,
        deadline: Instant,
    ) {
        let number = call.number;
        let pending = PendingCall { store: self, prepared, client, number, is_finished: false };
        let result = self.carry_out(prepared, client, &call, deadline).await;
        pending.finish(result);
    }

    pub(super) async fn carry_out(
        &self,
        prepared: &Prepared,
        client: &[u8],
        call: &Call,
        deadline: Instant,
    ) -> Result<CallResult, Error> {
        let redis = &self.shared.redis;
        let key = self.key(client)?;
        match &call.kind {
            CallKind::Take(slice) => {
                let leases = redis.key_of_leases(&self.shared.name, client)?;
                let keys = Keys { client: &key, leases: &leases };
                let life = prepared.terms.leases().unwrap_or_default().in_store();
                let taking = redis.take_slice(prepared, keys, *slice, life, None, deadline);
                let taken = Box::pin(taking).await?;
                Ok(taken.map_or(CallResult::Undecided, CallResult::Taken))
            }
            CallKind::Check(costs) => {
                let Some(scripted) = &prepared.scripted else { return Ok(CallResult::Undecided) };
                if let [cost] = costs[..] {
                    let numbers = scripted.numbers(i64::try_from(cost).unwrap_or(i64::MAX));
                    let arguments =
                        [&prepared.head[..], &numbers, prepared.policy_change.argument()];
                    let reply = redis.run(&scripted.check, &[&key], &arguments, deadline).await?;
                    let (now, part) = match read_reply(reply)? {
                        ScriptReply::Decided { now, part }
                        | ScriptReply::SeveralPolicies { now, part, .. } => (now, part),
                        ScriptReply::Undecided(_) => return Ok(CallResult::Undecided),
                    };
                    redis.note_server_time(now);
                    let answers = vec![part.checked(prepared)?];
                    return Ok(CallResult::Checked { at: Tick(now), answers });
                }
                let requests: Vec<_> = costs.iter().map(|cost| [(0, *cost)]).collect();
                let requests: Vec<&[_]> = requests.iter().map(|request| &request[..]).collect();
                let keys = [(&key, prepared)];
                let decided = redis.run_many(&scripted.many, &keys, &requests, None, deadline);
                let Some((now, parts)) = Box::pin(decided).await? else {
                    return Ok(CallResult::Undecided);
                };
                let answers = parts.into_iter().map(|part| part.checked(prepared));
                let answers = answers.collect::<Result<Vec<_>, Error>>()?;
                if answers.len() != costs.len() {
                    return Err(unexpected());
                }
                Ok(CallResult::Checked { at: Tick(now), answers })
            }
        }
    }

    /// Returns unused slices to the store. Units whose return fails are lost.
    pub(super) async fn return_slices(&self, back: Vec<SliceToReturn>) {
        join_all(back.iter().map(|back| self.return_slice(back))).await;
    }

    /// Returns the unused rest of a slice to the store.
    async fn return_slice(&self, back: &SliceToReturn) {
        let Shared { redis, name, .. } = &*self.shared;
        let keys = self
            .key(&back.client)
            .and_then(|key| redis.key_of_leases(name, &back.client).map(|leases| (key, leases)));
        let Ok((key, leases)) = keys else { return };
        let keys = Keys { client: &key, leases: &leases };
        let UnusedSlice { amount, taken } = back.slice;
        let life = back.prepared.terms.leases().unwrap_or_default().in_store();
        let (prepared, deadline) = (&back.prepared, redis.deadline());
        let given = redis.return_slice(prepared, keys, (amount, taken), life, None, deadline).await;
        let counters = &redis.inner().counters;
        // A return without a reply may have been carried out. This process does not serve the units in any case.
        let counter =
            if given.is_ok() { &counters.lease_returned } else { &counters.lease_expired };
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Starts the task that sweeps the brokers while there are leases.
    pub(super) fn keep_sweeping(&self, terms: &Terms) {
        let Some(leases) = terms.leases() else { return };
        if self.shared.brokers.is_swept.load(Ordering::Relaxed)
            || self.shared.brokers.is_swept.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (shared, every) = (Arc::downgrade(&self.shared), leases.life / 4);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = shared.upgrade() else { return };
                let (back, has_leases) =
                    shared.brokers.sweep(false, &shared.redis.inner().counters);
                if !back.is_empty() {
                    let store = Self { shared: shared.clone() };
                    tokio::spawn(async move { store.return_slices(back).await });
                }
                if !has_leases {
                    shared.brokers.is_swept.store(false, Ordering::Release);
                    return;
                }
            }
        });
    }
}

/// The answer of a broker to a check.
enum BrokerAnswer {
    Decided(Timed),
    /// The check has to be decided without the broker.
    Undecided(ScriptUse),
}

/// A call that was sent, until its checks are answered.
struct PendingCall<'a> {
    store: &'a RedisStore,
    prepared: &'a Arc<Prepared>,
    client: &'a [u8],
    number: Number,
    is_finished: bool,
}

impl PendingCall<'_> {
    /// Answers the checks that wait for the call, and makes the next call.
    fn finish(mut self, result: Result<CallResult, Error>) {
        self.is_finished = true;
        if let Some(call) = self.answer(self.number, result) {
            self.store.spawn_call(self.prepared, self.client, call);
        }
    }

    fn answer(&self, number: Number, result: Result<CallResult, Error>) -> Option<Call> {
        let Shared { redis, brokers, .. } = &*self.store.shared;
        brokers.handle_reply(self.prepared, self.client, number, result, &redis.inner().counters)
    }
}

/// Handles a caller that was dropped before the reply: the checks that wait behind it continue.
impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let Some(call) = self.answer(self.number, Err(brokers::abandoned())) else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(_) => self.store.spawn_call(self.prepared, self.client, call),
            // Without a runtime, no task can make the next call.
            Err(_) => {
                let _ = self.answer(call.number, Err(brokers::abandoned()));
            }
        }
    }
}
