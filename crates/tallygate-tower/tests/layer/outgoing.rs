//! Outgoing requests: a hyper client that is paced, and a server that asks it to wait.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get as on_get;
use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Empty;
use hyper::body::Incoming;
use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Policy, RateLimiter, Tick, Ticks};
use tallygate_tower::{Pace, PaceError};
use tower::{Layer as _, Service, ServiceExt as _};

use crate::network::{Version, client, serve, until};

type ClientPace = Pace<Request<Empty<Bytes>>, Response<Incoming>>;

/// A server that answers with the fields of a script, one line per request, and counts requests.
async fn scripted(script: &'static [(u16, &str, &str)]) -> (SocketAddr, Arc<AtomicUsize>) {
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let answer = move || {
        let (status, name, value) =
            script[counted.fetch_add(1, Ordering::SeqCst).min(script.len() - 1)];
        async move {
            let response = Response::builder().status(status);
            let response = if name.is_empty() { response } else { response.header(name, value) };
            response.body(Body::empty()).unwrap()
        }
    };
    (serve(Router::new().route("/", on_get(answer))).await, requests)
}

fn paced(
    pace: &ClientPace,
) -> impl Service<
    Request<Empty<Bytes>>,
    Response = Response<Incoming>,
    Error: std::fmt::Debug,
    Future: Send,
> + Clone
+ Send
+ 'static {
    pace.layer(client(Version::Http1))
}

fn request(server: SocketAddr) -> Request<Empty<Bytes>> {
    Request::get(format!("http://{server}/")).body(Empty::new()).unwrap()
}

const SECOND: i64 = 1_000_000_000;

#[tokio::test]
async fn the_next_request_waits_as_long_as_the_server_asks_for() {
    let script: &[_] =
        &[(429, "retry-after", "2"), (200, "ratelimit", "\"api\";r=0;t=3"), (200, "", "")];
    let (server, requests) = scripted(script).await;
    let (other, _) = scripted(&[(200, "", "")]).await;
    let clock = Arc::new(ManualClock::new(Tick(0)));
    let client = paced(&Pace::as_asked().clock(clock.clone()));
    let send = |server| {
        let client = client.clone();
        tokio::spawn(
            async move { client.oneshot(request(server)).await.unwrap().status().as_u16() },
        )
    };
    assert_eq!(send(server).await.unwrap(), 429, "the caller sees the denial");
    let second = send(server);
    until("it waits for 2 seconds", || clock.next_ring() == Some(Tick(2 * SECOND))).await;
    assert_eq!(send(other).await.unwrap(), 200, "another server is not affected");
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    clock.advance(Ticks::from(Duration::from_secs(2)));
    assert_eq!(second.await.unwrap(), 200);
    let third = send(server);
    until("it waits for 3 seconds", || clock.next_ring() == Some(Tick(5 * SECOND))).await;
    clock.advance(Ticks::from(Duration::from_secs(3)));
    assert_eq!(third.await.unwrap(), 200);
}

#[tokio::test]
async fn a_reqwest_client_waits_as_long_as_the_server_asks_for() {
    let (server, requests) = scripted(&[(503, "retry-after", "2"), (200, "", "")]).await;
    let clock = Arc::new(ManualClock::new(Tick(0)));
    let pace = Pace::of_client(
        |request: &reqwest::Request| request.url().host_str().unwrap_or_default().into(),
        |response: &reqwest::Response| (response.status(), response.headers()),
    );
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    let client = pace.clock(clock.clone()).layer(client);
    let send = || {
        let url = format!("http://{server}/").parse().unwrap();
        let request = reqwest::Request::new(reqwest::Method::GET, url);
        let sent = client.clone().oneshot(request);
        tokio::spawn(async move { sent.await.unwrap().status().as_u16() })
    };
    assert_eq!(send().await.unwrap(), 503, "the caller sees the response");
    let second = send();
    until("it waits for 2 seconds", || clock.next_ring() == Some(Tick(2 * SECOND))).await;
    assert_eq!(requests.load(Ordering::SeqCst), 1);
    clock.advance(Ticks::from(Duration::from_secs(2)));
    assert_eq!(second.await.unwrap(), 200);
}

#[tokio::test]
async fn a_request_that_would_wait_too_long_is_not_sent() {
    let (server, requests) = scripted(&[(503, "retry-after", "3600")]).await;
    let clock = Arc::new(ManualClock::new(Tick(0)));
    let pace: ClientPace = Pace::as_asked().max_wait(Duration::from_secs(60)).clock(clock);
    let client = pace.layer(client(Version::Http1));
    assert_eq!(client.clone().oneshot(request(server)).await.unwrap().status().as_u16(), 503);
    let error = client.oneshot(request(server)).await.unwrap_err();
    let wait = Duration::from_secs(3600);
    assert!(
        matches!(error, PaceError::TooLong { wait: Some(found), .. } if found == wait),
        "{error}"
    );
    assert_eq!(requests.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_leaky_bucket_paces_requests_in_order() {
    let (server, requests) = scripted(&[(200, "", "")]).await;
    let clock = Arc::new(ManualClock::new(Tick(0)));
    let policy = Policy::leaky_bucket(1).per_second().burst(4).build().unwrap();
    let store = PolicyStore::new(&policy, Capacity::of(10), clock.clone());
    let limiter = Arc::new(RateLimiter::with_store(policy, store));
    let pace: ClientPace =
        Pace::new(limiter.clone()).max_wait(Duration::from_secs(2)).clock(clock.clone());
    let client = pace.layer(client(Version::Http1));
    let mut sent = Vec::new();
    for expected in 1..=3 {
        let client = client.clone();
        sent.push(tokio::spawn(async move { client.oneshot(request(server)).await.unwrap() }));
        let key = server.to_string();
        until("it is charged", || {
            limiter.peek(tallygate::Ask::new(&key).cost(0)).unwrap().remaining == 4 - expected
        })
        .await;
    }
    until("the first is sent", || requests.load(Ordering::SeqCst) == 1).await;
    // The fourth would wait for 3 seconds, and is not charged.
    let error = client.clone().oneshot(request(server)).await.unwrap_err();
    assert!(matches!(error, PaceError::TooLong { .. }), "{error}");
    let left = limiter.peek(tallygate::Ask::new(&server.to_string()).cost(0)).unwrap().remaining;
    assert_eq!(left, 1);
    for expected in 2..=3 {
        until("it waits", || clock.next_ring().is_some()).await;
        assert_eq!(requests.load(Ordering::SeqCst), expected - 1);
        clock.advance(Ticks::from(Duration::from_secs(1)));
        until("the next is sent", || requests.load(Ordering::SeqCst) == expected).await;
    }
    for response in sent {
        assert_eq!(response.await.unwrap().status().as_u16(), 200);
    }
}
