//! Charges that depend on the response, and delays.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::routing::{get as on_get, post as on_post};
use axum::{Extension, Router};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::StreamBody;
use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, Policy, RateLimiter, Tick, Ticks};
use tallygate_tower::{ActualCost, Key, Meter, RateLimit, Rule, Settle};

use crate::network::{Version, get, ok, send, serve, status, until};

fn per_hour(limit: u64) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(Policy::fixed_window(limit).per_hour().build().unwrap()))
}

fn remaining(limiter: &RateLimiter) -> u64 {
    limiter.peek(Ask::new("").cost(0)).unwrap().remaining
}

#[tokio::test]
async fn only_failed_logins_count() {
    let limiter = per_hour(2);
    let rule = Rule::new(limiter.clone(), Key::everyone())
        .settle(Settle::refund_if(|response| response.status != StatusCode::UNAUTHORIZED));
    let login = |body: String| async move { if body == "secret" { ok() } else { unauthorized() } };
    let app = Router::new().route("/login", on_post(login)).layer(RateLimit::from(rule));
    let server = serve(app).await;
    let try_it = async |password: &'static str| {
        let client =
            hyper_util::client::legacy::Client::builder(hyper_util::rt::TokioExecutor::new());
        let request = Request::post(format!("http://{server}/login"));
        let request = request.body(http_body_util::Full::new(Bytes::from(password))).unwrap();
        let response = client.build_http().request(request).await.unwrap();
        let left = response.headers().get("x-ratelimit-remaining").unwrap().to_str().unwrap();
        format!("{} {left}", response.status().as_u16())
    };
    for _ in 0..5 {
        assert_eq!(try_it("secret").await, "200 2", "the field shows the corrected quota");
    }
    assert_eq!(try_it("guess").await, "401 1");
    assert_eq!(try_it("secret").await, "200 1");
    assert_eq!(try_it("guess").await, "401 0");
    assert_eq!(try_it("secret").await, "429 0");
}

fn unauthorized() -> Response<Body> {
    Response::builder().status(401).body(Body::empty()).unwrap()
}

#[tokio::test]
async fn a_handler_reports_the_actual_cost_in_its_response() {
    let limiter = per_hour(1000);
    let rule =
        Rule::new(limiter.clone(), Key::everyone()).cost(|_| 500).settle(Settle::by_extension());
    let app = Router::new()
        .route("/cheap", on_get(|| async { (Extension(ActualCost(30)), "ok") }))
        .route("/dear", on_get(|| async { (Extension(ActualCost(800)), "ok") }))
        .route("/unknown", on_get(|| async { "ok" }))
        .layer(RateLimit::from(rule));
    let server = serve(app).await;
    assert_eq!(get(server, "/cheap").await.header("x-ratelimit-remaining"), "970");
    assert_eq!(get(server, "/unknown").await.header("x-ratelimit-remaining"), "470");
    assert_eq!(status(server, "/dear").await, 429, "the estimate does not fit");
    assert_eq!(remaining(&limiter), 470);
}

/// A body of pieces. The meter counts one unit per piece.
fn pieces(meter: Meter, pieces: Vec<Result<&'static str, &'static str>>) -> Body {
    let frames = pieces.into_iter().map(move |piece| {
        meter.add(1);
        piece.map(|text| Frame::data(Bytes::from(text)))
    });
    Body::new(StreamBody::new(Iterating(frames)))
}

/// An iterator as a stream.
struct Iterating<I>(I);

impl<I: Iterator + Unpin> futures_core::Stream for Iterating<I> {
    type Item = I::Item;

    fn poll_next(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<I::Item>> {
        std::task::Poll::Ready(self.0.next())
    }
}

#[tokio::test]
async fn a_stream_is_settled_at_its_end_by_what_it_counted() {
    let limiter = per_hour(100);
    let rule = Rule::new(limiter.clone(), Key::everyone()).cost(|_| 50).settle(Settle::by_meter());
    let whole = |Extension(meter): Extension<Meter>| async {
        Response::new(pieces(meter, vec![Ok("a"), Ok("b"), Ok("c")]))
    };
    let broken = |Extension(meter): Extension<Meter>| async {
        Response::new(pieces(meter, vec![Ok("a"), Err("the model failed"), Ok("c")]))
    };
    let app = Router::new()
        .route("/whole", on_get(whole))
        .route("/broken", on_get(broken))
        .route("/uncounted", on_get(|| async { ok() }))
        .layer(RateLimit::from(rule));
    let server = serve(app).await;
    assert_eq!(&get(server, "/whole").await.body[..], b"abc");
    until("3 units", || remaining(&limiter) == 97).await;
    // The body is cut off: what was counted until then is charged.
    let client = crate::network::client(Version::Http1);
    let request = Request::get(format!("http://{server}/broken"));
    let response = client.request(request.body(http_body_util::Empty::new()).unwrap()).await;
    if let Ok(response) = response {
        use http_body_util::BodyExt as _;
        assert!(response.into_body().collect().await.is_err());
    }
    until("2 units", || remaining(&limiter) == 95).await;
    assert_eq!(get(server, "/uncounted").await.status.as_u16(), 200);
    assert_eq!(remaining(&limiter), 45, "without a count, the estimate stays charged");
}

#[tokio::test]
async fn a_response_is_charged_by_its_bytes() {
    let limiter = per_hour(10_000);
    let rule = Rule::new(limiter.clone(), Key::everyone())
        .cost(|_| 5000)
        .settle(Settle::by_bytes(|bytes| bytes.div_ceil(1000)));
    let app = Router::new()
        .route(
            "/{bytes}",
            on_get(|path: axum::extract::Path<usize>| async move { "x".repeat(*path) }),
        )
        .layer(RateLimit::from(rule));
    let server = serve(app).await;
    let cases = [
        (Version::Http1, 2500, 9997),
        (Version::Http1, 0, 9997),
        (Version::Http2, 0, 9997),
        (Version::Http1, 100_000, 9897),
        (Version::Http2, 100_000, 9797),
    ];
    for (version, bytes, expected) in cases {
        let answer = send(version, Request::get(format!("http://{server}/{bytes}"))).await;
        assert_eq!(answer.body.len(), bytes);
        until("the body is charged", || remaining(&limiter) == expected).await;
    }
}

#[tokio::test]
async fn a_leaky_bucket_delays_requests_within_a_bound() {
    let clock = Arc::new(ManualClock::new(Tick(0)));
    let policy = Policy::leaky_bucket(1).per_second().burst(10).build().unwrap();
    let store = PolicyStore::new(&policy, Capacity::of(10), clock.clone());
    let limiter = Arc::new(RateLimiter::with_store(policy, store));
    let limit = RateLimit::new(limiter.clone(), Key::everyone())
        .delay_up_to(Duration::from_millis(1500))
        .clock(clock.clone());
    let app = Router::new().route("/", on_get(|| async { ok() })).layer(limit);
    let server = serve(app).await;
    assert_eq!(status(server, "/").await, 200);
    let delayed = tokio::spawn(get(server, "/"));
    until("it waits", || clock.next_ring() == Some(Tick(1_000_000_000))).await;
    // The third would wait for 2 seconds.
    let denied = get(server, "/").await;
    assert_eq!((denied.status.as_u16(), denied.header("retry-after")), (429, "1"));
    assert_eq!(limiter.peek(Ask::new("").cost(0)).unwrap().remaining, 8, "it is not charged");
    clock.advance(Ticks(999_999_999));
    assert!(!delayed.is_finished());
    clock.advance(Ticks(1));
    assert_eq!(delayed.await.unwrap().status.as_u16(), 200);
}
