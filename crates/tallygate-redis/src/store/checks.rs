//! How the checks of a key become calls: at the desk of the key, alone or together.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use tallygate::{Cost, MAX_KEY_BYTES, Op, Script as Numbers, Tick, Timed};
use tokio::sync::oneshot;
use tokio::time::timeout_at;

use super::reply::{Scripts, read_reply};
use super::rule::Shareable;
use super::{Prepared, RedisStore, Shared, Way};
use crate::desk::{Call, Came, GivenBack, Number, Terms, What};
use crate::error::Error;
use crate::lease::calls::Keys;
use crate::near::{self, Back, Said, Told};
use crate::node::{STALL, last_chance};
use crate::transaction::unexpected;

impl RedisStore {
    /// What is asked at the desk of a key: a check by the store's clock, of a policy that has scripts.
    pub(super) fn asked_near(
        &self,
        rule: &impl Shareable,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Option<(Arc<Prepared>, Cost)> {
        let (Op::Check(cost @ 1..), None) = (op, now) else { return None };
        let is_exact = i64::try_from(cost).is_ok_and(Numbers::takes);
        if !is_exact || client.len() > MAX_KEY_BYTES || !self.has_desk_now(client) {
            return None;
        }
        let prepared = rule.prepared(self)?;
        prepared.scripted.is_some().then_some((prepared, cost))
    }

    /// Returns whether checks of a client go to the desk of its key now. They do not while units have to be charged in Redis
    /// first, and while other processes may not know that Redis is back.
    pub(super) fn has_desk_now(&self, client: &[u8]) -> bool {
        let local = &self.shared.local;
        let is_due = || !local.is_unused() && local.is_due(client, self.server_time());
        !is_due() && !self.is_just_back(client)
    }

    /// Decides on a check, at the desk of its key if it has one.
    pub(crate) async fn decide_any<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
    ) -> Result<Timed, Error> {
        let asked = self.asked_near(rule, client, op, now);
        self.decide_asked(rule, client, op, now, asked).await
    }

    /// The same for a check of which is known what it asks at the desk of its key.
    pub(super) async fn decide_asked<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        now: Option<Tick>,
        asked: Option<(Arc<Prepared>, Cost)>,
    ) -> Result<Timed, Error> {
        let deadline = self.shared.redis.deadline();
        let Some((prepared, cost)) = asked.filter(|_| self.has_desk_now(client)) else {
            let by = (Way::AnyScript, deadline);
            return match self.key(client) {
                // In a box of its own: it would make every future several times as large.
                Ok(key) => Box::pin(self.decide(rule, client, &key, op, now, by)).await,
                Err(error @ Error::Unavailable { .. }) => {
                    self.fall_back(error, rule, client, op, now)
                }
                Err(error) => Err(error),
            };
        };
        let budget = self.shared.redis.budget();
        let told = self.shared.near.ask(&prepared, client, cost, (budget, deadline));
        self.keep_sweeping(&prepared.terms);
        self.decide_near(rule, client, op, &prepared, (told, deadline)).await
    }

    /// Decides on a check that came to a desk, by the failure policy if Redis cannot.
    pub(super) async fn decide_near<A: Shareable>(
        &self,
        rule: &A,
        client: &[u8],
        op: Op,
        prepared: &Arc<Prepared>,
        (told, deadline): (Told, Instant),
    ) -> Result<Timed, Error> {
        let mut way = Way::WithoutScript;
        let said = match told {
            Told::Now(told, call) => {
                if let Some(call) = call {
                    self.spawn_call(prepared, client, call);
                }
                return Ok(self.told(told));
            }
            Told::Alone => Ok(None),
            Told::WithoutDesk => {
                way = Way::AnyScript;
                Ok(None)
            }
            Told::Overloaded => Err(near::overloaded()),
            Told::Later { mut waits, call, flush_at } => {
                match call {
                    // Of a call for several, none may go with the one who made it.
                    Some(call) if call.checks > 1 => self.spawn_call(prepared, client, call),
                    Some(call) => self.make_call(prepared, client, call, deadline).await,
                    None => {}
                }
                match waits.try_recv() {
                    Ok(said) => said,
                    Err(_) => {
                        let until = (flush_at, deadline);
                        Box::pin(self.wait_for(prepared, client, waits, until)).await
                    }
                }
            }
        };
        match said {
            Ok(Some(told)) => {
                self.return_others();
                Ok(self.told(told))
            }
            Ok(None) => {
                let (key, by) = (self.key(client)?, (way, deadline));
                Box::pin(self.decide(rule, client, &key, op, None, by)).await
            }
            Err(error) => self.fall_back(error, rule, client, op, None),
        }
    }

    /// Waits for the answer to a check, and sees to it that it is sent in time.
    pub(super) async fn wait_for(
        &self,
        prepared: &Arc<Prepared>,
        client: &[u8],
        mut waits: oneshot::Receiver<Said>,
        (flush_at, deadline): (Option<Instant>, Instant),
    ) -> Said {
        if let Some(flush_at) = flush_at.filter(|flush_at| *flush_at < deadline) {
            if let Ok(said) = timeout_at(flush_at.into(), &mut waits).await {
                return said.unwrap_or_else(|_| Err(near::given_up()));
            }
            if let Some(call) = self.shared.near.flush(prepared, client) {
                self.spawn_call(prepared, client, call);
            }
        }
        let arrived = deadline.checked_sub(self.shared.redis.budget()).unwrap_or(deadline);
        let redis = &self.shared.redis;
        let mut said = timeout_at(deadline.into(), &mut waits).await.map_err(Some);
        let key = self.key(client)?;
        // A process that sees the deadline late was late to read the reply as well, although the server answers.
        let was_stalled = deadline.elapsed() > STALL;
        if said.is_err() && (was_stalled || !redis.is_busy_since(&key, arrived)) {
            said = last_chance(deadline, redis.budget(), &mut waits).await.ok_or(None);
        }
        match said {
            Ok(Ok(said)) => said,
            Ok(Err(_)) => Err(near::given_up()),
            Err(_) if redis.is_busy_since(&key, arrived) => Err(near::overloaded()),
            Err(_) => Err(Error::Unavailable {
                reason: "no reply within the time budget".into(),
                sent: true,
            }),
        }
    }

    pub(super) fn spawn_call(&self, prepared: &Arc<Prepared>, client: &[u8], call: Call) {
        let (store, prepared) = (self.clone(), prepared.clone());
        let client: Box<[u8]> = client.into();
        tokio::spawn(async move {
            let deadline = store.shared.near.deadline_of(&call, store.shared.redis.budget());
            store.make_call(&prepared, &client, call, deadline).await;
        });
    }

    /// Makes a call, and answers the checks that wait for it. A task makes the call for the checks that came meanwhile.
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
    ) -> Result<Came, Error> {
        let redis = &self.shared.redis;
        let key = self.key(client)?;
        match &call.what {
            What::Take(slice) => {
                let leases = redis.key_of_leases(&self.shared.name, client)?;
                let keys = Keys { client: &key, leases: &leases };
                let life = prepared.terms.leases().unwrap_or_default().in_store();
                let taking = redis.take_slice(prepared, keys, *slice, life, None, deadline);
                let taken = Box::pin(taking).await?;
                Ok(taken.map_or(Came::Undecided, Came::Taken))
            }
            What::Check(costs) => {
                let Some(scripted) = &prepared.scripted else { return Ok(Came::Undecided) };
                if let [cost] = costs[..] {
                    let numbers = scripted.numbers(i64::try_from(cost).unwrap_or(i64::MAX));
                    let arguments = [&prepared.head[..], &numbers, prepared.earlier.argument()];
                    let reply = redis.run(&scripted.check, &[&key], &arguments, deadline).await?;
                    let (now, part) = match read_reply(reply)? {
                        Scripts::Decided { now, part } | Scripts::Several { now, part, .. } => {
                            (now, part)
                        }
                        Scripts::Left(_) => return Ok(Came::Undecided),
                    };
                    redis.heard(now);
                    let answers = vec![part.checked(prepared)?];
                    return Ok(Came::Checked { at: Tick(now), answers });
                }
                let requests: Vec<_> = costs.iter().map(|cost| [(0, *cost)]).collect();
                let requests: Vec<&[_]> = requests.iter().map(|request| &request[..]).collect();
                let keys = [(&key, prepared)];
                let decided = redis.run_many(&scripted.many, &keys, &requests, None, deadline);
                let Some((now, parts)) = Box::pin(decided).await? else {
                    return Ok(Came::Undecided);
                };
                let answers = parts.into_iter().map(|part| part.checked(prepared));
                let answers = answers.collect::<Result<Vec<_>, Error>>()?;
                if answers.len() != costs.len() {
                    return Err(unexpected());
                }
                Ok(Came::Checked { at: Tick(now), answers })
            }
        }
    }

    /// Gives back what is left of a slice.
    pub(crate) async fn give_back(&self, back: &Back) {
        let Shared { redis, name, .. } = &*self.shared;
        let keys = self
            .key(&back.client)
            .and_then(|key| redis.key_of_leases(name, &back.client).map(|leases| (key, leases)));
        let Ok((key, leases)) = keys else { return };
        let keys = Keys { client: &key, leases: &leases };
        let GivenBack { amount, taken } = back.slice;
        let life = back.prepared.terms.leases().unwrap_or_default().in_store();
        let (prepared, deadline) = (&back.prepared, redis.deadline());
        let given =
            redis.give_back_slice(prepared, keys, (amount, taken), life, None, deadline).await;
        let counters = &redis.inner().counters;
        // What fails may have been given back; it is not served here any more in any case.
        let counter = if given.is_ok() { &counters.given_back } else { &counters.lapsed };
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Sweeps the desks while there are leases.
    pub(super) fn keep_sweeping(&self, terms: &Terms) {
        let Some(leases) = terms.leases() else { return };
        if self.shared.near.is_swept.load(Ordering::Relaxed)
            || self.shared.near.is_swept.swap(true, Ordering::AcqRel)
        {
            return;
        }
        let (shared, every) = (Arc::downgrade(&self.shared), leases.life / 4);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(every).await;
                let Some(shared) = shared.upgrade() else { return };
                let (back, has_desks) = shared.near.sweep(false, &shared.redis.inner().counters);
                if !back.is_empty() {
                    let store = Self { shared: shared.clone() };
                    tokio::spawn(async move { near::give_back_all(&store, back).await });
                }
                if !has_desks {
                    shared.near.is_swept.store(false, Ordering::Release);
                    return;
                }
            }
        });
    }
}

/// A call that was made, until its checks are answered.
struct PendingCall<'a> {
    store: &'a RedisStore,
    prepared: &'a Arc<Prepared>,
    client: &'a [u8],
    number: Number,
    is_finished: bool,
}

impl PendingCall<'_> {
    /// Answers the checks that wait for the call, and makes the next one.
    fn finish(mut self, result: Result<Came, Error>) {
        self.is_finished = true;
        if let Some(call) = self.answer(self.number, result) {
            self.store.spawn_call(self.prepared, self.client, call);
        }
    }

    fn answer(&self, number: Number, result: Result<Came, Error>) -> Option<Call> {
        let Shared { redis, near, .. } = &*self.store.shared;
        near.hear(self.prepared, self.client, number, result, &redis.inner().counters)
    }
}

/// The caller that made the call has gone before the reply. The checks that wait behind it go on.
impl Drop for PendingCall<'_> {
    fn drop(&mut self) {
        if self.is_finished {
            return;
        }
        let Some(call) = self.answer(self.number, Err(near::given_up())) else { return };
        match tokio::runtime::Handle::try_current() {
            Ok(_) => self.store.spawn_call(self.prepared, self.client, call),
            // Without a runtime, no task can make the next call.
            Err(_) => {
                let _ = self.answer(call.number, Err(near::given_up()));
            }
        }
    }
}
