//! The store in Redis and Valkey fulfills the contract of every store.

use std::time::Duration;

use tallygate::algorithm::{Op, Timed};
use tallygate::reservation::{Charged, SettleError};
use tallygate::store::Store as _;
use tallygate::tiers::ClientRule;
use tallygate::{Ask, Cost, Decision, Policy, Tick, Ticks};
use tallygate_redis::{Error, OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::contract::Subject;
use tallygate_testkit::servers::{Flavor, Server};

/// The store under a policy.
struct ByPolicy(RedisStore);

impl Subject for ByPolicy {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        self.0.apply(policy, key, op, Some(now)).await.expect("the server answers")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let ask = |key| Ask::new(key).cost(cost).at(now);
        let asks: Vec<_> = keys.iter().map(ask).collect();
        self.0.check_many(policy, &asks).await.expect("the server answers")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let charged = self.0.reserve(policy, key, cost, Ticks(0), Some(now)).await;
        let charged = charged.expect("the server answers");
        (charged.timed, charged)
    }

    async fn settle(
        &self,
        policy: &Policy,
        key: &[u8],
        change: i128,
        reservation: &Charged,
        now: Tick,
    ) -> Option<Decision> {
        let settled = self.0.settle(policy, key, change, reservation, Some(now)).ok()?.await;
        match settled {
            Err(Error::Settle(SettleError::Reset)) => None,
            settled => Some(settled.expect("the server answers")),
        }
    }
}

/// The store under the rule of a client.
struct ByClientRule(RedisStore);

impl Subject for ByClientRule {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        let rule = ClientRule::of(policy.clone());
        self.0.apply(&rule, key, op, Some(now)).await.expect("the server answers")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let rule = ClientRule::of(policy.clone());
        let ask = |key| Ask::new(key).cost(cost).at(now);
        let asks: Vec<_> = keys.iter().map(ask).collect();
        self.0.check_many(&rule, &asks).await.expect("the server answers")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let rule = ClientRule::of(policy.clone());
        let charged = self.0.reserve(&rule, key, cost, Ticks(0), Some(now)).await;
        let charged = charged.expect("the server answers");
        (charged.timed, charged)
    }

    async fn settle(
        &self,
        policy: &Policy,
        key: &[u8],
        change: i128,
        reservation: &Charged,
        now: Tick,
    ) -> Option<Decision> {
        let rule = ClientRule::of(policy.clone());
        let settled = self.0.settle(&rule, key, change, reservation, Some(now)).ok()?.await;
        match settled {
            Err(Error::Settle(SettleError::Reset)) => None,
            settled => Some(settled.expect("the server answers")),
        }
    }
}

/// Runs a test of the contract on an empty server, and requires that every key expires.
fn on_an_empty_server<S>(
    flavor: Flavor,
    subject: impl FnOnce(RedisStore) -> S,
    test: impl AsyncFnOnce(&S),
) {
    let server = Server::start(flavor);
    let options = Options::default().budget(Duration::from_secs(20));
    let redis = Redis::with(&server.url(), options).expect("a valid address");
    let subject = subject(redis.store("contract").on_failure(OnFailure::Deny).in_ticks());
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(test(&subject));
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

macro_rules! mount {
    ($($name:ident: $subject:ident on $flavor:ident $(, $of:ident)?;)*) => {
        $(
            mod $name {
                use super::*;

                fn on_an_empty_store(test: impl AsyncFnOnce(&$subject)) {
                    on_an_empty_server(Flavor::$flavor, $subject, test);
                }

                tallygate_testkit::store_contract!(on_an_empty_store $(, $of)?);
            }
        )*
    };
}

mount! {
    redis_by_policy: ByPolicy on Redis;
    redis_by_client_rule: ByClientRule on Redis, tiers;
    valkey_by_policy: ByPolicy on Valkey;
    valkey_by_client_rule: ByClientRule on Valkey, tiers;
}
