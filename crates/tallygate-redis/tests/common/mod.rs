//! What the tests with real servers share.

#![allow(dead_code, reason = "each file of tests uses what it needs")]

pub(crate) mod log;

use std::time::{Duration, Instant};

use tallygate::{Anchor, Ask, Cost, Policy, RateLimiter, Source};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Cluster, Sentinel, Server};

/// How long something may take that should take a second or two, on a machine that builds meanwhile.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The budget of a decision that must not fail for want of time.
pub(crate) const AMPLE: Duration = Duration::from_secs(5);

pub(crate) type Limiter = RateLimiter<Policy, RedisStore>;

/// A burst, and nothing earned back while a test runs.
pub(crate) fn burst(burst: Cost) -> Policy {
    Policy::token_bucket(1).per_hour().burst(burst).build().expect("valid")
}

/// A count that is exact, and nothing that leaves it while a test runs.
pub(crate) fn count(limit: Cost) -> Policy {
    let day = Policy::fixed_window(limit).per_day();
    day.anchor(Anchor::FirstRequest).build().expect("valid")
}

/// Redis with a budget that a loaded machine keeps.
pub(crate) fn patient(url: &str) -> Redis {
    Redis::with(url, Options::default().budget(AMPLE).slot_secret("of the tests"))
        .expect("an address")
}

/// A limiter that asks the server for each decision: what is tested is the server.
pub(crate) fn limiter(redis: &Redis, policy: Policy, on_failure: OnFailure) -> Limiter {
    let store = redis.store("api").on_failure(on_failure);
    RateLimiter::with_store(policy, store.deny_cache(false))
}

pub(crate) fn cluster_url(cluster: &Cluster) -> String {
    let hosts: Vec<String> = cluster.nodes().iter().map(Server::address).collect();
    format!("redis+cluster://{}", hosts.join(","))
}

pub(crate) fn sentinel_url(watching: &Sentinel) -> String {
    let hosts: Vec<String> = watching.sentinels().iter().map(Server::address).collect();
    format!("redis+sentinel://{}/{}", hosts.join(","), watching.name())
}

/// Asks again and again until there is an answer.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "waited {PATIENCE:?} in vain until {what}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Looks at a client until the store answers, and says how much is left.
pub(crate) async fn until_the_store_answers(limiter: &Limiter, key: &str) -> Cost {
    until("the store answers", async || {
        let decision = limiter.peek(Ask::new(key).cost(0)).await.ok()?;
        (decision.source == Source::Store).then_some(decision.remaining)
    })
    .await
}

/// No key stays for ever.
pub(crate) fn assert_all_expire(server: &Server) {
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new(), "these never expire");
}

/// The only key of a server that holds a client's usage: not one of returns and resets.
pub(crate) fn only_key(server: &Server) -> Vec<u8> {
    let mut keys: Vec<Vec<u8>> = server.ask(&["KEYS", "*"]);
    keys.retain(|key| !key.windows(2).any(|mark| mark == b"^="));
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.remove(0)
}
