//! Checks without a call of their own, on real servers: cached denials, shared calls, leases.

use std::time::{Duration, Instant};

use crate::common::{AMPLE, Limiter, assert_all_expire, burst, count, patient, until};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tallygate::algorithm::Op;
use tallygate::policy::Anchor;
use tallygate::store::Store as _;
use tallygate::{Ask, Decision, Policy, RateLimiter, Source, Tick, Ticks};
use tallygate_redis::{Leases, OnFailure, Options, Redis};
use tallygate_testkit::servers::{Flavor, Server};

fn limiter(redis: &Redis, policy: Policy) -> Limiter {
    RateLimiter::with_store(policy, redis.store("api").on_failure(OnFailure::Deny))
}

fn leasing(redis: &Redis, policy: Policy, life: Duration) -> Limiter {
    let store = redis.store("api").on_failure(OnFailure::Deny);
    RateLimiter::with_store(policy, store.leases(Leases::default().life(life)))
}

/// Longer than a test runs.
const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn a_denial_is_repeated_without_a_call() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(1));
    assert!(limiter.check("alice").await.unwrap().allowed);
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    let calls = redis.counts().calls;
    let decision = limiter.check("alice").await.unwrap();
    assert_eq!((decision.allowed, decision.source), (false, Source::DenyCache));
    // Two checks may be within the same microsecond.
    until("the retry time is shorter", async || {
        let later = limiter.check("alice").await.unwrap();
        (later.retry_after < decision.retry_after).then_some(())
    })
    .await;
    assert_eq!(redis.counts().calls, calls);
}

#[tokio::test]
async fn a_change_by_another_process_shows_within_a_second_and_one_by_this_process_at_once() {
    let server = Server::start(Flavor::Redis);
    let (here, elsewhere) = (patient(&server.url()), patient(&server.url()));
    let (here, elsewhere) = (limiter(&here, burst(1)), limiter(&elsewhere, burst(1)));
    for refund in [true, false] {
        assert!(here.check("alice").await.unwrap().allowed);
        assert!(!here.check("alice").await.unwrap().allowed);
        let started = Instant::now();
        if refund {
            let _ = elsewhere.refund("alice").await.unwrap();
        } else {
            let _ = elsewhere.reset("alice").await.unwrap();
        }
        until("it shows", async || here.check("alice").await.unwrap().allowed.then_some(())).await;
        // One second, and some time for a busy machine.
        assert!(started.elapsed() < Duration::from_secs(3), "{:?}", started.elapsed());
        assert!(!here.check("alice").await.unwrap().allowed);
        let _ = here.reset("alice").await.unwrap();
    }
    assert!(here.check("alice").await.unwrap().allowed, "a reset from here shows at once");
}

#[tokio::test]
async fn without_the_cache_or_at_a_given_time_every_check_makes_a_call() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let store = redis.store("api").on_failure(OnFailure::Deny).deny_cache(false);
    let off = RateLimiter::with_store(burst(1), store);
    for _ in 0..3 {
        assert_eq!(off.check("alice").await.unwrap().source, Source::Store);
    }
    let (store, policy) = (redis.store("given"), burst(1));
    for _ in 0..3 {
        let decision = store.apply::<Decision>(&policy, b"bob", Op::Check(1), Some(Tick(0))).await;
        assert_eq!(decision.unwrap().source, Source::Store);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_checks_share_calls_and_get_exactly_the_quota() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    for policy in
        [burst(100), count(100), Policy::sliding_window_log(100).per_day().build().unwrap()]
    {
        let limiter = limiter(&redis, policy);
        let _ = limiter.reset("alice").await.unwrap();
        let before = redis.counts().calls;
        let decisions = join_all((0..500).map(|_| limiter.check("alice"))).await;
        let decisions: Vec<_> = decisions.into_iter().map(Result::unwrap).collect();
        assert_eq!(decisions.iter().filter(|decision| decision.allowed).count(), 100);
        let calls = redis.counts().calls - before;
        // One call per check would be 500. How many checks share a call depends on the scheduling of the tasks.
        assert!(calls < 100, "{calls} calls for 500");
        let mut left: Vec<_> = decisions
            .iter()
            .filter(|decision| decision.allowed)
            .map(|decision| decision.remaining)
            .collect();
        left.sort_unstable();
        assert_eq!(left, (0..100).collect::<Vec<_>>(), "each as if they had come one by one");
    }
    assert!(redis.counts().coalesced > 1000);
    assert_all_expire(&server);
}

#[tokio::test]
async fn checks_behind_an_abandoned_call_are_answered() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(10));
    let mut first = limiter.check("alice");
    // The call is sent, and its caller is dropped.
    assert!((&mut first).now_or_never().is_none());
    let mut second = limiter.check("alice");
    assert!((&mut second).now_or_never().is_none());
    drop(first);
    assert!(second.await.unwrap().allowed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_served_from_leases_within_the_quota_and_unused_units_are_returned() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let redis = patient(&server.url());
        for policy in [burst(10_000), count(10_000)] {
            let limiter = leasing(&redis, policy, Duration::from_millis(400));
            let _ = limiter.reset("alice").await.unwrap();
            let before = redis.counts();
            let mut by_lease = 0;
            for _ in 0..4000 {
                let decision = limiter.check("alice").await.unwrap();
                assert!(decision.allowed, "{decision:?}");
                by_lease += u64::from(decision.source == Source::Lease);
            }
            let after = redis.counts();
            assert!(by_lease > 3500, "{by_lease} of 4000 on {}", flavor.name());
            assert!(after.calls - before.calls < 200, "{before:?} {after:?}");
            limiter.store().give_back_leases().await;
            // Returned units can be used. Units that expired on a slow machine are lost, and counted.
            let left = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
            let expired = redis.counts().lease_expired - before.lease_expired;
            assert!((6000 - expired..=6000).contains(&left), "{left} left, {expired} expired");
        }
        assert_all_expire(&server);
    }
}

#[tokio::test]
async fn an_idle_lease_is_returned() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = leasing(&redis, burst(10_000), Duration::from_secs(2));
    for _ in 0..100 {
        assert!(limiter.check("alice").await.unwrap().allowed);
    }
    assert!(redis.counts().leased > 0);
    until("it is returned", async || {
        let left = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
        (left == 9900).then_some(())
    })
    .await;
    let counts = redis.counts();
    assert!(counts.lease_returned > 0 && counts.lease_expired == 0, "{counts:?}");
}

#[tokio::test]
async fn plain_instances_decide_beside_leasing_ones_on_one_quota() {
    let server = Server::start(Flavor::Redis);
    let (leased, plain) = (patient(&server.url()), patient(&server.url()));
    let leasing = leasing(&leased, burst(1000), LONG);
    let plain = limiter(&plain, burst(1000));
    let (mut allowed, mut by_plain) = (0, 0);
    loop {
        let decision = leasing.check("alice").await.unwrap();
        let other = plain.check("alice").await.unwrap();
        assert_ne!(other.source, Source::Lease);
        allowed += u64::from(decision.allowed) + u64::from(other.allowed);
        by_plain += u64::from(other.allowed);
        if !decision.allowed && !other.allowed {
            break;
        }
    }
    assert_eq!(allowed, 1000);
    assert!(by_plain > 100);
    assert_all_expire(&server);
}

#[tokio::test]
async fn a_crashed_process_loses_its_leased_units_and_allows_nothing_twice() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let mut allowed = 0;
    for _ in 0..5 {
        // Dropped without returning its leases, as after a crash.
        let limiter = leasing(&redis, burst(1000), LONG);
        for _ in 0..50 {
            allowed += u64::from(limiter.check("alice").await.unwrap().allowed);
        }
    }
    assert_eq!(allowed, 250);
    let counts = redis.counts();
    let left =
        limiter(&redis, burst(1000)).peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
    assert!(left < 750, "what was held is lost: {left}, {counts:?}");
}

#[tokio::test]
async fn leases_under_a_policy_that_has_changed_are_not_served() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let store = redis.store("api").on_failure(OnFailure::Deny);
    let store = store.leases(Leases::default().life(LONG));
    let (wide, narrow) = (burst(1000), burst(20));
    for _ in 0..100 {
        let decision = store.apply::<Decision>(&wide, b"alice", Op::Check(1), None).await;
        assert!(decision.unwrap().allowed);
    }
    let decision = store.apply::<Decision>(&narrow, b"alice", Op::Check(1), None).await.unwrap();
    assert!(!decision.allowed, "used units stay used: {decision:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_serve_while_the_store_is_unavailable_and_then_end() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::with(&server.url(), Options::default().budget(AMPLE)).unwrap();
    let limiter = leasing(&redis, burst(100_000), Duration::from_secs(3));
    let mut allowed = 0;
    while allowed < 300 || redis.counts().leased < allowed + 20 {
        assert!(limiter.check("alice").await.unwrap().allowed);
        allowed += 1;
    }
    server.kill();
    let decision = limiter.check("alice").await.unwrap();
    assert_eq!(
        (decision.allowed, decision.source),
        (true, Source::Lease),
        "its units are charged already"
    );
    until("the lease is over", async || {
        let decision = limiter.check("alice").await.unwrap();
        (decision.source == Source::FailedClosed).then_some(())
    })
    .await;
}

#[tokio::test]
async fn the_number_of_key_brokers_is_bounded() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let window = Policy::fixed_window(1).per(Ticks(3_600_000_000_000)).anchor(Anchor::FirstRequest);
    let limiter = limiter(&redis, window.build().unwrap());
    let names: Vec<String> = (0..40_000).map(|name| format!("client {name}")).collect();
    for some in names.chunks(500) {
        let decisions =
            join_all(some.iter().map(|name| limiter.check(Ask::new(name).cost(2)))).await;
        assert!(decisions.into_iter().all(|decision| !decision.unwrap().allowed));
    }
    // The brokers are full of cached denials, and other keys are still decided.
    let decisions = join_all(names.iter().take(500).map(|name| limiter.check(name))).await;
    assert!(decisions.into_iter().all(|decision| decision.unwrap().allowed));
}

#[test]
fn a_check_that_is_never_awaited_blocks_no_other() {
    let server = Server::start(Flavor::Redis);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = patient(&server.url());
    let limiter = leasing(&redis, burst(10_000), LONG);
    let began = Instant::now();
    for _ in 0..100 {
        // Made outside of the runtime, as the argument of `block_on`.
        assert!(runtime.block_on(limiter.check("alice")).unwrap().allowed);
        drop(limiter.check("alice"));
    }
    assert!(began.elapsed() < AMPLE, "a check waited for a call that was never made");
    assert!(redis.counts().leased > 0);
}
