//! A replay whose clients are kept in Redis: the same decisions, made by a server in the time of the trace.
//!
//! Every run has names of its own there, and removes them when it ends. Clients are decided on many at a time, each
//! client's requests in their order.

use anyhow::Context as _;
use futures_util::future::join_all;
use tallygate::{
    Algorithm, Ask, Cost, Decision, DecodeError, Facts, Fit, Op, Policy, RateLimiter, Source,
    Store, Tick, Used,
};
use tallygate_redis::{OnFailure, Options, OwnStore, Redis, RedisStore};

use super::clients::Request;
use super::engine::{Engine, as_json, verdict};
use crate::textbook::{Textbook, TextbookState};

/// Redis, for one run.
#[derive(Debug)]
pub(super) struct Remote {
    redis: Redis,
    runtime: tokio::runtime::Runtime,
}

/// A trace is not in a hurry: what the server takes long for is worth waiting for.
const BUDGET: std::time::Duration = std::time::Duration::from_secs(10);

impl Remote {
    pub(super) fn open(address: &str) -> anyhow::Result<Self> {
        let prefix = format!("tallygate-replay:{:016x}:", fastrand::u64(..));
        let options = Options::default().slot_secret(prefix.clone()).prefix(prefix).budget(BUDGET);
        let redis = Redis::with(address, options).context("--store")?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        Ok(Self { redis, runtime })
    }

    pub(super) fn production(self, policy: Policy, json: bool) -> impl Engine {
        let store = self.redis.store("replay").on_failure(OnFailure::Deny).in_ticks();
        let limiter = RateLimiter::with_store(policy, store);
        Production { remote: self, limiter, json, clients: 0 }
    }

    pub(super) fn textbook(self, rule: Textbook) -> impl Engine {
        let store = OwnStore::new(&self.redis, "replay").in_ticks();
        ByTextbook { remote: self, rule: Steps(rule), store, clients: 0 }
    }
}

/// Requests that can be decided at once: of different clients. The others come after them.
fn waves(requests: &[Request]) -> Vec<Vec<usize>> {
    let mut waves: Vec<Vec<usize>> = Vec::new();
    let mut next = std::collections::HashMap::<usize, usize>::new();
    for (place, request) in requests.iter().enumerate() {
        let wave = next.entry(request.client).or_default();
        match waves.get_mut(*wave) {
            Some(others) => others.push(place),
            None => waves.push(vec![place]),
        }
        *wave += 1;
    }
    waves
}

/// Clients are known by their numbers here.
fn name(client: usize) -> String {
    client.to_string()
}

struct Production {
    remote: Remote,
    limiter: RateLimiter<Policy, RedisStore>,
    json: bool,
    clients: usize,
}

impl Engine for Production {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        let Self { remote, limiter, json, clients } = self;
        let mut decisions: Vec<Option<Decision>> = vec![None; requests.len()];
        remote.runtime.block_on(async {
            for wave in waves(requests) {
                let names: Vec<_> =
                    wave.iter().map(|place| name(requests[*place].client)).collect();
                let asked = wave.iter().zip(&names).map(|(place, name)| {
                    let Request { client, now, cost } = requests[*place];
                    *clients = (*clients).max(client + 1);
                    limiter.check(Ask::new(name).cost(cost).at(now))
                });
                for (place, decision) in wave.iter().zip(join_all(asked).await) {
                    decisions[*place] = Some(decision?);
                }
            }
            anyhow::Ok(())
        })?;
        for decision in decisions.into_iter().flatten() {
            if decision.source != Source::Store {
                let error = remote.redis.last_error().context("the store did not decide")?;
                return Err(anyhow::Error::new((*error).clone()).context("--store"));
            }
            if *json {
                as_json(&decision, answers);
            } else {
                verdict(decision.allowed, answers);
            }
        }
        Ok(())
    }
}

impl Drop for Production {
    fn drop(&mut self) {
        // What cannot be removed goes by itself after a day.
        let names = (0..self.clients).map(name);
        let _ = self.remote.runtime.block_on(self.limiter.store().forget(names));
    }
}

struct ByTextbook {
    remote: Remote,
    rule: Steps,
    store: OwnStore,
    clients: usize,
}

impl Engine for ByTextbook {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        let Self { remote, rule, store, clients } = self;
        let mut verdicts = vec![false; requests.len()];
        remote.runtime.block_on(async {
            for wave in waves(requests) {
                let asked = wave.iter().map(|place| {
                    let Request { client, now, cost } = requests[*place];
                    *clients = (*clients).max(client + 1);
                    let step = Op::Force(i128::from(cost) + 1);
                    store.apply::<Decision>(&*rule, name(client).as_bytes(), step, Some(now))
                });
                for (place, decision) in wave.iter().zip(join_all(asked).await) {
                    verdicts[*place] = decision.context("--store")?.remaining > 0;
                }
            }
            anyhow::Ok(())
        })?;
        verdicts.into_iter().for_each(|allowed| verdict(allowed, answers));
        Ok(())
    }
}

impl Drop for ByTextbook {
    fn drop(&mut self) {
        let names = (0..self.clients).map(name);
        let _ = self.remote.runtime.block_on(self.store.forget(names));
    }
}

/// The textbook rule as an algorithm of one's own.
///
/// It settles its refills whatever it answers, also to a cost of 0. So every request is a charge without asking, of
/// one more than its cost, and what it came to is in the state: 1 remaining for yes.
struct Steps(Textbook);

impl Algorithm for Steps {
    type State = (TextbookState, bool);

    fn capacity(&self) -> Cost {
        1
    }

    fn fresh(&self, now: Tick) -> Self::State {
        (self.0.first(now), true)
    }

    fn last_change(&self, _: &Self::State) -> Tick {
        Tick(i64::MIN)
    }

    fn set_back(&self, _: &Self::State, _: Tick) -> bool {
        false
    }

    fn rebase(&self, _: &mut Self::State, _: Tick) {}

    fn fit(&self, _: &Self::State, _: Tick, _: Cost) -> Fit {
        Fit::Now
    }

    fn charge(&self, (state, allowed): &mut Self::State, now: Tick, amount: i128) -> u128 {
        let cost = Cost::try_from(amount - 1).unwrap_or(Cost::MAX);
        *allowed = self.0.decide(state, now, cost);
        0
    }

    fn facts(&self, (_, allowed): &Self::State, _: Tick, _: Option<Cost>) -> Facts {
        let remaining = u64::from(*allowed);
        Facts { remaining, ..Facts::all_of(1) }
    }

    fn fresh_at(&self, _: &Self::State) -> Option<Tick> {
        None
    }

    fn used(&self, _: &Self::State, _: Tick) -> Used {
        Used::NOTHING
    }

    fn with_used(&self, _: Used, now: Tick) -> Self::State {
        self.fresh(now)
    }

    fn encode(&self, (state, allowed): &Self::State, out: &mut Vec<u8>) {
        out.extend(state.tokens.to_be_bytes());
        out.extend(state.last.0.to_be_bytes());
        out.push(u8::from(*allowed));
    }

    fn decode(&self, bytes: &[u8]) -> Result<Self::State, DecodeError> {
        let number = |from: usize| {
            let bytes = bytes.get(from..from + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.map(i64::from_be_bytes).ok_or(DecodeError::Truncated)
        };
        let state = TextbookState { tokens: number(0)?, last: Tick(number(8)?) };
        Ok((state, bytes.get(16) == Some(&1)))
    }
}
