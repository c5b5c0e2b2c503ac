//! Shared by the tests with real servers.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub(crate) mod log;

use std::time::{Duration, Instant};

use tallygate::policy::Anchor;
use tallygate::{Ask, Cost, Policy, RateLimiter, Source};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Cluster, Sentinel, Server};

/// How long a condition may take that usually takes a second or two, on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// The time budget of a decision that must not time out.
pub(crate) const AMPLE: Duration = Duration::from_secs(5);

pub(crate) type Limiter = RateLimiter<Policy, RedisStore>;

/// Returns a bucket with this burst, which earns nothing back while a test runs.
pub(crate) fn burst(burst: Cost) -> Policy {
    Policy::token_bucket(1).per_hour().burst(burst).build().expect("valid")
}

/// Returns a window with this limit, which does not end while a test runs.
pub(crate) fn count(limit: Cost) -> Policy {
    let day = Policy::fixed_window(limit).per_day();
    day.anchor(Anchor::FirstRequest).build().expect("valid")
}

/// Opens Redis with a time budget that is ample on a busy machine.
pub(crate) fn patient(url: &str) -> Redis {
    Redis::with(url, Options::default().budget(AMPLE).slot_secret("of the tests"))
        .expect("an address")
}

/// Returns a limiter that makes a call for each decision.
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

/// Polls until there is an answer.
pub(crate) async fn until<T>(what: &str, mut ask: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

/// Peeks until the store answers, and returns the remaining units.
pub(crate) async fn until_the_store_answers(limiter: &Limiter, key: &str) -> Cost {
    until("the store answers", async || {
        let decision = limiter.peek(Ask::new(key).cost(0)).await.ok()?;
        (decision.source == Source::Store).then_some(decision.remaining)
    })
    .await
}

/// Requires that every key expires.
pub(crate) fn assert_all_expire(server: &Server) {
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new(), "keys without an expiry");
}

/// Returns the only key that holds the usage of a client. Keys of returns and resets do not count.
pub(crate) fn only_key(server: &Server) -> Vec<u8> {
    let mut keys: Vec<Vec<u8>> = server.ask(&["KEYS", "*"]);
    keys.retain(|key| !key.windows(2).any(|mark| mark == b"^="));
    assert_eq!(keys.len(), 1, "{keys:?}");
    keys.remove(0)
}
