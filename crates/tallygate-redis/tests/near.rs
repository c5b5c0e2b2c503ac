//! What is answered without a call of its own, on real servers: remembered refusals, checks at one time, leases.

#![allow(clippy::unwrap_used, reason = "a test, also where it is no #[test]")]

mod common;

use std::time::{Duration, Instant};

use common::{AMPLE, Limiter, assert_all_expire, burst, count, patient, until};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tallygate::{Anchor, Ask, Decision, Op, Policy, RateLimiter, Source, Store as _, Tick, Ticks};
use tallygate_redis::{Leases, OnFailure, Options, Redis};
use tallygate_testkit::servers::{Flavor, Server};

fn limiter(redis: &Redis, policy: Policy) -> Limiter {
    RateLimiter::with_store(policy, redis.store("api").on_failure(OnFailure::Deny))
}

fn leasing(redis: &Redis, policy: Policy, life: Duration) -> Limiter {
    let store = redis.store("api").on_failure(OnFailure::Deny);
    RateLimiter::with_store(policy, store.leases(Leases::default().life(life)))
}

/// So long that it does not end while a test runs.
const LONG: Duration = Duration::from_secs(30);

#[tokio::test]
async fn what_was_refused_is_refused_without_a_call() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(1));
    assert!(limiter.check("alice").await.unwrap().allowed);
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    let calls = redis.counts().calls;
    let told = limiter.check("alice").await.unwrap();
    assert_eq!((told.allowed, told.source), (false, Source::DenyCache));
    let later = limiter.check("alice").await.unwrap();
    assert!(later.retry_after < told.retry_after, "{later:?} {told:?}");
    assert_eq!(redis.counts().calls, calls);
}

#[tokio::test]
async fn a_change_elsewhere_shows_within_a_second_and_one_from_here_at_once() {
    let server = Server::start(Flavor::Redis);
    let (here, elsewhere) = (patient(&server.url()), patient(&server.url()));
    let (here, elsewhere) = (limiter(&here, burst(1)), limiter(&elsewhere, burst(1)));
    for refund in [true, false] {
        assert!(here.check("alice").await.unwrap().allowed);
        assert!(!here.check("alice").await.unwrap().allowed);
        let refused = Instant::now();
        if refund {
            let _ = elsewhere.refund("alice").await.unwrap();
        } else {
            let _ = elsewhere.reset("alice").await.unwrap();
        }
        until("it shows", async || here.check("alice").await.unwrap().allowed.then_some(())).await;
        // A second, and what a loaded machine takes.
        assert!(refused.elapsed() < Duration::from_secs(3), "{:?}", refused.elapsed());
        assert!(!here.check("alice").await.unwrap().allowed);
        let _ = here.reset("alice").await.unwrap();
    }
    assert!(here.check("alice").await.unwrap().allowed, "a reset from here shows at once");
}

#[tokio::test]
async fn without_the_cache_and_at_a_given_time_everything_is_asked_for() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let store = redis.store("api").on_failure(OnFailure::Deny).deny_cache(false);
    let off = RateLimiter::with_store(burst(1), store);
    for _ in 0..3 {
        assert_eq!(off.check("alice").await.unwrap().source, Source::Store);
    }
    let (store, policy) = (redis.store("given"), burst(1));
    for _ in 0..3 {
        let told = store.apply::<Decision>(&policy, b"bob", Op::Check(1), Some(Tick(0))).await;
        assert_eq!(told.unwrap().source, Source::Store);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn checks_at_one_time_share_calls_and_are_admitted_exactly_the_quota() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    for policy in
        [burst(100), count(100), Policy::sliding_window_log(100).per_day().build().unwrap()]
    {
        let limiter = limiter(&redis, policy);
        let _ = limiter.reset("alice").await.unwrap();
        let before = redis.counts().calls;
        let told = join_all((0..500).map(|_| limiter.check("alice"))).await;
        let told: Vec<_> = told.into_iter().map(Result::unwrap).collect();
        assert_eq!(told.iter().filter(|told| told.allowed).count(), 100);
        let calls = redis.counts().calls - before;
        // One per check would be 500. How many share a call depends on how the machine runs the tasks.
        assert!(calls < 100, "{calls} calls for 500");
        let mut left: Vec<_> =
            told.iter().filter(|told| told.allowed).map(|told| told.remaining).collect();
        left.sort_unstable();
        assert_eq!(left, (0..100).collect::<Vec<_>>(), "each as if they had come one by one");
    }
    assert!(redis.counts().coalesced > 1000);
    assert_all_expire(&server);
}

#[tokio::test]
async fn whoever_waits_behind_a_call_that_is_given_up_is_answered() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(10));
    let mut first = limiter.check("alice");
    // It is sent, and nobody waits for it any more.
    assert!((&mut first).now_or_never().is_none());
    let mut second = limiter.check("alice");
    assert!((&mut second).now_or_never().is_none());
    drop(first);
    assert!(second.await.unwrap().allowed);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hot_key_is_served_from_leases_within_the_quota_and_the_rest_is_given_back() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let redis = patient(&server.url());
        for policy in [burst(10_000), count(10_000)] {
            let limiter = leasing(&redis, policy, Duration::from_millis(400));
            let _ = limiter.reset("alice").await.unwrap();
            let before = redis.counts();
            let mut by_lease = 0;
            for _ in 0..4000 {
                let told = limiter.check("alice").await.unwrap();
                assert!(told.allowed, "{told:?}");
                by_lease += u64::from(told.source == Source::Lease);
            }
            let after = redis.counts();
            assert!(by_lease > 3500, "{by_lease} of 4000 on {}", flavor.name());
            assert!(after.calls - before.calls < 200, "{before:?} {after:?}");
            limiter.store().give_back_leases().await;
            // What was given back can be used; what lapsed on a slow machine is lost, and counted.
            let left = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
            let lapsed = redis.counts().lapsed - before.lapsed;
            assert!((6000 - lapsed..=6000).contains(&left), "{left} left, {lapsed} lapsed");
        }
        assert_all_expire(&server);
    }
}

#[tokio::test]
async fn what_is_left_is_given_back_when_nobody_asks_any_more() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = leasing(&redis, burst(10_000), Duration::from_secs(2));
    for _ in 0..100 {
        assert!(limiter.check("alice").await.unwrap().allowed);
    }
    assert!(redis.counts().leased > 0);
    until("it is given back", async || {
        let left = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
        (left == 9900).then_some(())
    })
    .await;
    let counts = redis.counts();
    assert!(counts.given_back > 0 && counts.lapsed == 0, "{counts:?}");
}

#[tokio::test]
async fn plain_instances_decide_beside_leasing_ones_on_one_quota() {
    let server = Server::start(Flavor::Redis);
    let (leased, plain) = (patient(&server.url()), patient(&server.url()));
    let leasing = leasing(&leased, burst(1000), LONG);
    let plain = limiter(&plain, burst(1000));
    let (mut admitted, mut by_plain) = (0, 0);
    loop {
        let told = leasing.check("alice").await.unwrap();
        let other = plain.check("alice").await.unwrap();
        assert_ne!(other.source, Source::Lease);
        admitted += u64::from(told.allowed) + u64::from(other.allowed);
        by_plain += u64::from(other.allowed);
        if !told.allowed && !other.allowed {
            break;
        }
    }
    assert_eq!(admitted, 1000);
    assert!(by_plain > 100);
    assert_all_expire(&server);
}

#[tokio::test]
async fn a_crashed_process_loses_what_it_held_and_doubles_nothing() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let mut admitted = 0;
    for _ in 0..5 {
        // Dropped without giving back: as after a crash.
        let limiter = leasing(&redis, burst(1000), LONG);
        for _ in 0..50 {
            admitted += u64::from(limiter.check("alice").await.unwrap().allowed);
        }
    }
    assert_eq!(admitted, 250);
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
        let told = store.apply::<Decision>(&wide, b"alice", Op::Check(1), None).await;
        assert!(told.unwrap().allowed);
    }
    let told = store.apply::<Decision>(&narrow, b"alice", Op::Check(1), None).await.unwrap();
    assert!(!told.allowed, "what was used stays used: {told:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_live_on_while_the_store_is_away_and_end_then() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::with(&server.url(), Options::default().budget(AMPLE)).unwrap();
    let limiter = leasing(&redis, burst(100_000), Duration::from_secs(3));
    let mut admitted = 0;
    while admitted < 300 || redis.counts().leased < admitted + 20 {
        assert!(limiter.check("alice").await.unwrap().allowed);
        admitted += 1;
    }
    server.kill();
    let told = limiter.check("alice").await.unwrap();
    assert_eq!((told.allowed, told.source), (true, Source::Lease), "it is paid for");
    until("the lease is over", async || {
        let told = limiter.check("alice").await.unwrap();
        (told.source == Source::FailedClosed).then_some(())
    })
    .await;
}

#[tokio::test]
async fn what_is_known_of_keys_is_bounded() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let window = Policy::fixed_window(1).per(Ticks(3_600_000_000_000)).anchor(Anchor::FirstRequest);
    let limiter = limiter(&redis, window.build().unwrap());
    let names: Vec<String> = (0..40_000).map(|name| format!("client {name}")).collect();
    for some in names.chunks(500) {
        let told = join_all(some.iter().map(|name| limiter.check(Ask::new(name).cost(2)))).await;
        assert!(told.into_iter().all(|told| !told.unwrap().allowed));
    }
    // The desks are full of refusals, and everybody is still decided on.
    let told = join_all(names.iter().take(500).map(|name| limiter.check(name))).await;
    assert!(told.into_iter().all(|told| told.unwrap().allowed));
}

#[test]
fn a_check_is_made_where_it_is_awaited_and_one_that_never_is_blocks_nobody() {
    let server = Server::start(Flavor::Redis);
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = patient(&server.url());
    let limiter = leasing(&redis, burst(10_000), LONG);
    let began = Instant::now();
    for _ in 0..100 {
        // Made outside of the runtime, as the argument of `block_on` is.
        assert!(runtime.block_on(limiter.check("alice")).unwrap().allowed);
        drop(limiter.check("alice"));
    }
    assert!(began.elapsed() < AMPLE, "somebody waited for a call that nobody made");
    assert!(redis.counts().leased > 0);
}
