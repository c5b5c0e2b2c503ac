//! Replays a trace against a Redis server, which keeps the clients' states and decides at the times of the trace.
//!
//! Every run uses its own key prefix and deletes its keys at the end. Requests of different clients are sent at the same
//! time; requests of one client are sent in order.

use anyhow::Context as _;
use futures_util::future::join_all;
use tallygate::algorithm::{Algorithm, DecodeError, Facts, Fit, Op, Used};
use tallygate::store::Store;
use tallygate::{Ask, Cost, Decision, Policy, RateLimiter, Source, Tick};
use tallygate_redis::{CustomStore, OnFailure, Options, Redis, RedisStore};

use super::clients::Request;
use super::engine::{Engine, write_json, write_verdict};
use crate::textbook::{Textbook, TextbookState};

/// The Redis connection of one run.
#[derive(Debug)]
pub(super) struct RedisRun {
    redis: Redis,
    runtime: tokio::runtime::Runtime,
}

/// The time limit of a call. A replay prefers a slow answer to none.
const BUDGET: std::time::Duration = std::time::Duration::from_secs(10);

impl RedisRun {
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
        RedisEngine { redis_run: self, limiter, json, clients: 0 }
    }

    pub(super) fn textbook(self, rule: Textbook) -> impl Engine {
        let store = CustomStore::new(&self.redis, "replay").in_ticks();
        RedisTextbookEngine { redis_run: self, rule: TextbookAlgorithm(rule), store, clients: 0 }
    }
}

/// Groups requests into rounds. Each round has at most one request per client; the rounds are decided in order.
fn rounds(requests: &[Request]) -> Vec<Vec<usize>> {
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    let mut next = std::collections::HashMap::<usize, usize>::new();
    for (place, request) in requests.iter().enumerate() {
        let round = next.entry(request.client).or_default();
        match rounds.get_mut(*round) {
            Some(others) => others.push(place),
            None => rounds.push(vec![place]),
        }
        *round += 1;
    }
    rounds
}

/// Returns the key of a client: its number.
fn key(client: usize) -> String {
    client.to_string()
}

struct RedisEngine {
    redis_run: RedisRun,
    limiter: RateLimiter<Policy, RedisStore>,
    json: bool,
    clients: usize,
}

impl Engine for RedisEngine {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        let Self { redis_run, limiter, json, clients } = self;
        let mut decisions: Vec<Option<Decision>> = vec![None; requests.len()];
        redis_run.runtime.block_on(async {
            for round in rounds(requests) {
                let keys: Vec<_> = round.iter().map(|place| key(requests[*place].client)).collect();
                let checks = round.iter().zip(&keys).map(|(place, key)| {
                    let Request { client, now, cost } = requests[*place];
                    *clients = (*clients).max(client + 1);
                    limiter.check(Ask::new(key).cost(cost).at(now))
                });
                for (place, decision) in round.iter().zip(join_all(checks).await) {
                    decisions[*place] = Some(decision?);
                }
            }
            anyhow::Ok(())
        })?;
        for decision in decisions.into_iter().flatten() {
            if decision.source != Source::Store {
                let error = redis_run
                    .redis
                    .last_error()
                    .context("the store returned no decision and no error")?;
                return Err(anyhow::Error::new((*error).clone()).context("--store"));
            }
            if *json {
                write_json(&decision, answers);
            } else {
                write_verdict(decision.allowed, answers);
            }
        }
        Ok(())
    }
}

impl Drop for RedisEngine {
    fn drop(&mut self) {
        // If this fails, the keys expire after a day.
        let keys = (0..self.clients).map(key);
        let _ = self.redis_run.runtime.block_on(self.limiter.store().forget(keys));
    }
}

struct RedisTextbookEngine {
    redis_run: RedisRun,
    rule: TextbookAlgorithm,
    store: CustomStore,
    clients: usize,
}

impl Engine for RedisTextbookEngine {
    fn decide(&mut self, requests: &[Request], answers: &mut Vec<u8>) -> anyhow::Result<()> {
        let Self { redis_run, rule, store, clients } = self;
        let mut verdicts = vec![false; requests.len()];
        redis_run.runtime.block_on(async {
            for round in rounds(requests) {
                let checks = round.iter().map(|place| {
                    let Request { client, now, cost } = requests[*place];
                    *clients = (*clients).max(client + 1);
                    let step = Op::Force(i128::from(cost) + 1);
                    store.apply::<Decision>(&*rule, key(client).as_bytes(), step, Some(now))
                });
                for (place, decision) in round.iter().zip(join_all(checks).await) {
                    verdicts[*place] = decision.context("--store")?.remaining > 0;
                }
            }
            anyhow::Ok(())
        })?;
        verdicts.into_iter().for_each(|allowed| write_verdict(allowed, answers));
        Ok(())
    }
}

impl Drop for RedisTextbookEngine {
    fn drop(&mut self) {
        let keys = (0..self.clients).map(key);
        let _ = self.redis_run.runtime.block_on(self.store.forget(keys));
    }
}

/// The textbook rule as a custom algorithm.
///
/// The textbook rule changes its state on every request, also on a denial and at a cost of 0. A check would not write the
/// state in these cases. Every request is therefore a forced charge of its cost plus 1, and the state holds the result:
/// `remaining` is 1 if the request was allowed.
struct TextbookAlgorithm(Textbook);

impl Algorithm for TextbookAlgorithm {
    type State = (TextbookState, bool);

    fn capacity(&self) -> Cost {
        1
    }

    fn fresh(&self, now: Tick) -> Self::State {
        (self.0.full_state(now), true)
    }

    fn last_change(&self, _: &Self::State) -> Tick {
        Tick(i64::MIN)
    }

    fn clock_was_set_back(&self, _: &Self::State, _: Tick) -> bool {
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
