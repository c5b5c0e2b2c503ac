//! The store in Redis and Valkey does what every store does.

use std::time::Duration;

use tallygate::{
    Ask, Charged, Cost, Decision, Op, Plan, Policy, SettleError, Store as _, Tick, Ticks, Timed,
};
use tallygate_redis::{Error, OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::contract::Subject;
use tallygate_testkit::servers::{Flavor, Server};

/// Asked with a policy.
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

/// Asked with what a client gets by its tier.
struct ByPlan(RedisStore);

impl Subject for ByPlan {
    async fn apply(&self, policy: &Policy, key: &[u8], op: Op, now: Tick) -> Timed {
        let plan = Plan::of(policy.clone());
        self.0.apply(&plan, key, op, Some(now)).await.expect("the server answers")
    }

    async fn check_many(
        &self,
        policy: &Policy,
        keys: &[&[u8]],
        cost: Cost,
        now: Tick,
    ) -> Vec<Timed> {
        let plan = Plan::of(policy.clone());
        let ask = |key| Ask::new(key).cost(cost).at(now);
        let asks: Vec<_> = keys.iter().map(ask).collect();
        self.0.check_many(&plan, &asks).await.expect("the server answers")
    }

    type Reservation = Charged;

    async fn reserve(
        &self,
        policy: &Policy,
        key: &[u8],
        cost: Cost,
        now: Tick,
    ) -> (Timed, Charged) {
        let plan = Plan::of(policy.clone());
        let charged = self.0.reserve(&plan, key, cost, Ticks(0), Some(now)).await;
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
        let plan = Plan::of(policy.clone());
        let settled = self.0.settle(&plan, key, change, reservation, Some(now)).ok()?.await;
        match settled {
            Err(Error::Settle(SettleError::Reset)) => None,
            settled => Some(settled.expect("the server answers")),
        }
    }
}

/// Runs a behaviour on an empty server, and looks that nothing would stay there for ever.
fn on_an_empty_server<S>(
    flavor: Flavor,
    subject: impl FnOnce(RedisStore) -> S,
    behaviour: impl AsyncFnOnce(&S),
) {
    let server = Server::start(flavor);
    let options = Options::default().budget(Duration::from_secs(20));
    let redis = Redis::with(&server.url(), options).expect("a valid address");
    let subject = subject(redis.store("contract").on_failure(OnFailure::Deny).in_ticks());
    let runtime = tokio::runtime::Runtime::new().expect("threads can be started");
    runtime.block_on(behaviour(&subject));
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

macro_rules! mount {
    ($($name:ident: $subject:ident on $flavor:ident $(, $of:ident)?;)*) => {
        $(
            mod $name {
                use super::*;

                fn on_an_empty_store(behaviour: impl AsyncFnOnce(&$subject)) {
                    on_an_empty_server(Flavor::$flavor, $subject, behaviour);
                }

                tallygate_testkit::store_contract!(on_an_empty_store $(, $of)?);
            }
        )*
    };
}

mount! {
    redis_by_policy: ByPolicy on Redis;
    redis_by_plan: ByPlan on Redis, plans;
    valkey_by_policy: ByPolicy on Valkey;
    valkey_by_plan: ByPlan on Valkey, plans;
}
