//! The layer on Redis: one quota for several processes, outages, cancellation.

use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use axum::Router;
use axum::routing::get as on_get;
use http::Request;
use tallygate::{Ask, InFlight, Policy, RateLimiter, Tiers};
use tallygate_redis::{OnFailure, Options, Redis};
use tallygate_testkit::servers::{Flavor, Server};
use tallygate_tower::{Key, Limiter, RateLimit, Rule, Settle};
use tower::{Layer as _, Service as _};

use crate::network::{get, ok, serve, status};

fn app(limit: RateLimit) -> Router {
    Router::new().route("/", on_get(|| async { ok() })).layer(limit)
}

fn per_hour(limit: u64) -> Policy {
    Policy::fixed_window(limit).per_hour().build().unwrap()
}

/// A store with a time budget that a loaded machine keeps.
fn redis(url: &str) -> Redis {
    Redis::with(url, Options::default().budget(Duration::from_secs(10))).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn two_services_share_a_quota_through_a_store_chosen_by_url() {
    let server = Server::start(Flavor::Redis);
    for url in [server.url(), "memory".to_owned()] {
        let shared = url != "memory";
        let limiter = || Limiter::open(&url, "api", Tiers::new(per_hour(3))).unwrap();
        let one = serve(app(RateLimit::new(limiter(), Key::peer()))).await;
        let other = serve(app(RateLimit::new(limiter(), Key::peer()))).await;
        let mut seen = Vec::new();
        for service in [one, other, one, other] {
            let answer = get(service, "/").await;
            seen.push(format!(
                "{} {}",
                answer.status.as_u16(),
                answer.header("x-ratelimit-remaining")
            ));
        }
        let expected = if shared {
            ["200 2", "200 1", "200 0", "429 0"]
        } else {
            ["200 2", "200 2", "200 1", "200 1"]
        };
        assert_eq!(seen, expected, "{url}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_outage_is_decided_by_the_failure_setting() {
    let server = Server::start(Flavor::Redis);
    let service = |on_failure| {
        let redis = Redis::open(&server.url()).unwrap();
        let store = redis.store("api").on_failure(on_failure);
        app(RateLimit::new(RateLimiter::with_store(per_hour(100), store), Key::peer()))
    };
    let allows = serve(service(OnFailure::Allow)).await;
    let denies = serve(service(OnFailure::Deny)).await;
    server.kill();
    let allowed = get(allows, "/").await;
    assert_eq!((allowed.status.as_u16(), allowed.header("x-ratelimit-remaining")), (200, ""));
    let denied = get(denies, "/").await;
    assert_eq!((denied.status.as_u16(), denied.header("retry-after")), (503, "1"));
}

#[tokio::test(flavor = "multi_thread")]
async fn charges_on_redis_are_settled_by_the_response() {
    let server = Server::start(Flavor::Redis);
    let limiter =
        Arc::new(RateLimiter::with_store(per_hour(100), redis(&server.url()).store("api")));
    let rules = [
        Rule::new(limiter.clone(), Key::everyone())
            .cost(|_| 40)
            .settle(Settle::by_bytes(|bytes| bytes)),
        Rule::new(Policy::fixed_window(2).per_hour().build().unwrap(), Key::everyone()),
    ];
    let in_flight =
        tallygate_redis::InFlight::new(&redis(&server.url()), "api", 1, Duration::from_secs(60));
    let limit = RateLimit::all_of(rules).in_flight(in_flight.clone(), Key::everyone());
    let service = serve(app(limit)).await;
    let left = async || limiter.peek(Ask::new("").cost(0)).await.unwrap().remaining;
    for expected in [98, 96] {
        assert_eq!(status(service, "/").await, 200);
        // The body has ended, and a task settles it.
        while left().await != expected || in_flight.count("").await.unwrap() > 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_eq!(status(service, "/").await, 429);
    assert_eq!(
        left().await,
        96,
        "the rule that denies is the second; the first is charged nothing"
    );
}

/// Polls a future a number of times, each time when it is woken, and then drops it.
async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let (mut future, mut left) = (Box::pin(future), polls);
    let polled = poll_fn(move |context| {
        if left == 0 {
            return Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    });
    polled.await
}

/// The first rule is in memory, so it is charged when the second one is asked. The reply of the second one may or may
/// not arrive, and Redis may have charged it in both cases.
///
/// Fault C6.
#[tokio::test(flavor = "multi_thread")]
async fn a_decision_on_redis_that_is_dropped_is_charged_once_or_not_at_all() {
    let server = Server::start(Flavor::Redis);
    let redis = redis(&server.url());
    let mut seen = [false, false];
    for polls in 0..8 {
        let first = Arc::new(RateLimiter::new(per_hour(10)));
        let store = redis.store(format!("after {polls} polls")).on_failure(OnFailure::Deny);
        let second = Arc::new(RateLimiter::with_store(per_hour(10), store));
        let in_flight = InFlight::new(1);
        let settle = Settle::by_response(|_| Some(1));
        let rules = [
            Rule::new(first.clone(), Key::everyone()).settle(settle.clone()),
            Rule::new(second.clone(), Key::everyone()).settle(settle),
        ];
        let limit = RateLimit::all_of(rules).in_flight(in_flight.clone(), Key::everyone());
        let served = AtomicBool::new(false);
        let inner = |_: Request<()>| {
            served.store(true, Ordering::SeqCst);
            async { Ok::<_, std::convert::Infallible>(ok()) }
        };
        let mut service = limit.layer(tower::service_fn(inner));
        // Redis can be quick enough to answer during the first poll. Here it is frozen until the future is dropped, so
        // that the charge of the first rule is always there to be returned.
        let is_silent = polls == 1;
        if is_silent {
            server.freeze();
        }
        let response = polled(service.call(Request::new(())), polls).await;
        if is_silent {
            server.thaw();
            assert!(response.is_none(), "Redis cannot have answered");
        }
        let (served, is_done) = (served.load(Ordering::SeqCst), response.is_some());
        drop(response);
        assert_eq!(in_flight.count("").unwrap(), 0, "after {polls} polls");
        let used = 10 - first.peek(Ask::new("").cost(0)).unwrap().remaining;
        assert_eq!(used, u64::from(served), "after {polls} polls");
        let used = 10 - second.peek(Ask::new("").cost(0)).await.unwrap().remaining;
        assert!(used <= 1 && (used == 1 || !served), "{used} after {polls} polls");
        seen[usize::from(is_done)] = true;
    }
    assert_eq!(seen, [true, true], "some were dropped, and some were done");
}
