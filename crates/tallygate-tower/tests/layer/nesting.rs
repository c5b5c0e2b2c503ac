//! Layers within layers, clones that are used at the same time, closures that panic, and responses without a body.

use std::convert::Infallible;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use axum::body::Body;
use axum::routing::get as on_get;
use axum::{Extension, Router};
use http::{Request, Response};
use tallygate::{Ask, InFlight, Policy, RateLimiter};
use tallygate_tower::{Dialect, Key, Meter, RateLimit, Rule, Settle};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tower::{Layer as _, Service as _, service_fn};

use crate::network::{Version, get, ok, send, serve, status, until};

fn per_hour(name: &'static str, limit: u64) -> Arc<RateLimiter> {
    let policy = Policy::fixed_window(limit).per_hour().named(name).build().unwrap();
    Arc::new(RateLimiter::new(policy))
}

fn remaining(limiter: &RateLimiter) -> u64 {
    limiter.peek(Ask::new("").cost(0)).unwrap().remaining
}

fn all(limiter: &Arc<RateLimiter>) -> RateLimit {
    RateLimit::new(limiter.clone(), Key::everyone())
}

#[tokio::test]
async fn the_response_of_nested_layers_shows_each_quota_and_the_scarcest() {
    let (wide, narrow) = (per_hour("wide", 9), per_hour("narrow", 2));
    for [inner, outer] in [[&narrow, &wide], [&wide, &narrow]] {
        for limiter in [inner, outer] {
            let _ = limiter.reset("").unwrap();
        }
        let routes = Router::new().route("/", on_get(|| async { ok() }));
        let server = serve(routes.layer(all(inner)).layer(all(outer))).await;
        let shown = async |left: &str| {
            let answer = get(server, "/").await;
            let list = |name| {
                let values = answer.headers.get_all(name).iter();
                let mut values: Vec<_> = values.map(|value| value.to_str().unwrap()).collect();
                values.sort_unstable();
                values.join(", ")
            };
            let policies = list("ratelimit-policy");
            assert_eq!(policies, r#""narrow";q=2;w=3600, "wide";q=9;w=3600"#);
            assert_eq!(list("ratelimit").matches("r=").count(), 2);
            for (name, value) in [("x-ratelimit-limit", "2"), ("x-ratelimit-remaining", left)] {
                assert_eq!(list(name), value);
            }
            answer.status.as_u16()
        };
        assert_eq!([shown("1").await, shown("0").await], [200, 200]);
    }
    // Only the inner layer denies: the outer one has much left, and the response says why it was denied.
    let routes = Router::new().route("/", on_get(|| async { ok() }));
    let server = serve(routes.layer(all(&narrow)).layer(all(&per_hour("outer", 9)))).await;
    let denied = get(server, "/").await;
    assert_eq!(denied.status.as_u16(), 429);
    assert_eq!(
        (denied.header("x-ratelimit-limit"), denied.header("x-ratelimit-remaining")),
        ("2", "0")
    );
    assert_ne!(denied.header("retry-after"), "");
    assert!(denied.header("ratelimit").starts_with("\"narrow\";r=0"), "{denied:?}");
}

#[tokio::test]
async fn a_layer_adds_the_dialect_that_the_service_within_it_does_not_write() {
    let limit = |name, quota, dialect| all(&per_hour(name, quota)).headers([dialect]);
    let routes = Router::new().route("/", on_get(|| async { ok() }));
    let routes =
        routes.layer(limit("inner", 5, Dialect::Draft10)).layer(limit("outer", 7, Dialect::X));
    let answer = get(serve(routes).await, "/").await;
    assert_eq!(answer.header("x-ratelimit-remaining"), "6");
    assert!(answer.header("ratelimit").starts_with("\"inner\";r=4"), "{answer:?}");
}

#[tokio::test]
async fn rules_and_layers_that_settle_by_a_meter_share_it() {
    let limiters = ["minute", "day", "inner"].map(|name| per_hour(name, 100));
    let [minute, day, inner] = &limiters;
    let rule = |limiter: &Arc<RateLimiter>| {
        Rule::new(limiter.clone(), Key::everyone()).cost(|_| 50).settle(Settle::by_meter())
    };
    let handler = |Extension(meter): Extension<Meter>| async move {
        meter.add(7);
        ok()
    };
    let app = Router::new()
        .route("/", on_get(handler))
        .layer(RateLimit::from(rule(inner)))
        .layer(RateLimit::all_of([rule(minute), rule(day)]));
    assert_eq!(status(serve(app).await, "/").await, 200);
    until("all are settled", || limiters.iter().all(|limiter| remaining(limiter) == 93)).await;
}

#[test]
fn a_closure_that_panics_leaves_no_place_taken_and_the_service_usable() {
    let limiter = per_hour("api", 10);
    let in_flight = InFlight::new(1);
    let asks_to_panic = |parts: &http::request::Parts, name: &str| {
        assert!(parts.uri.path() != name, "the closure panics, as it should");
    };
    let rule = Rule::new(limiter.clone(), Key::everyone())
        .cost(move |parts| {
            asks_to_panic(parts, "/cost");
            1
        })
        .settle(Settle::by_response(|response| {
            assert!(!response.headers.contains_key("panic"), "the closure panics, as it should");
            Some(1)
        }));
    let limit =
        RateLimit::from(rule).in_flight(in_flight.clone(), Key::everyone()).exempt(move |parts| {
            asks_to_panic(parts, "/exempt");
            false
        });
    let mut service = limit.layer(service_fn(async |request: Request<()>| {
        let mut response = ok();
        if request.uri().path() == "/settle" {
            response.headers_mut().insert("panic", "1".parse().unwrap());
        }
        Ok::<_, Infallible>(response)
    }));
    let mut call = |path: &str| {
        let request = Request::get(path).body(()).unwrap();
        let call = AssertUnwindSafe(|| tallygate::block_on(service.call(request)).map(drop));
        catch_unwind(call).is_ok()
    };
    for (path, left) in [("/cost", 10), ("/exempt", 10), ("/settle", 9)] {
        assert!(!call(path), "{path}");
        assert_eq!((remaining(&limiter), in_flight.count("").unwrap()), (left, 0), "{path}");
    }
    assert!(call("/"));
    assert_eq!((remaining(&limiter), in_flight.count("").unwrap()), (8, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_one_service_that_are_used_at_the_same_time_share_the_quota() {
    let limiter = per_hour("api", 50);
    let limit = all(&limiter).in_flight(InFlight::new(1000), Key::everyone());
    let service = limit.layer(service_fn(async |_: Request<()>| Ok::<_, Infallible>(ok())));
    let calls = (0..200).map(|_| {
        let mut service = service.clone();
        // The clone is called without a check that it is ready, as careless callers do.
        tokio::spawn(async move {
            let response = service.call(Request::new(())).await.unwrap();
            u64::from(response.status().is_success())
        })
    });
    let mut allowed = 0;
    for call in calls.collect::<Vec<_>>() {
        allowed += call.await.unwrap();
    }
    assert_eq!((allowed, remaining(&limiter)), (50, 0));
}

#[tokio::test]
async fn one_limiter_in_two_rules_with_one_key_is_charged_twice() {
    let limiter = per_hour("api", 3);
    let rule = || Rule::new(limiter.clone(), Key::everyone());
    let app = Router::new().route("/", on_get(|| async { ok() }));
    let server = serve(app.layer(RateLimit::all_of([rule(), rule()]))).await;
    assert_eq!([status(server, "/").await, status(server, "/").await], [200, 429]);
    assert_eq!(remaining(&limiter), 1, "the denied request charged nothing");
}

#[tokio::test]
async fn a_response_to_head_and_a_cost_of_0_release_and_charge_what_they_should() {
    let (limiter, in_flight) = (per_hour("api", 10), InFlight::new(1));
    let rule = Rule::new(limiter.clone(), Key::everyone())
        .cost(|parts| u64::from(parts.uri.path() != "/free"))
        .settle(Settle::by_bytes(|bytes| 1 + bytes));
    let limit = RateLimit::from(rule).in_flight(in_flight.clone(), Key::everyone());
    let app = Router::new()
        .route("/", on_get(|| async { ok() }))
        .route("/free", on_get(|| async { Response::new(Body::empty()) }));
    let server = serve(app.layer(limit)).await;
    for version in [Version::Http1, Version::Http2] {
        let before = remaining(&limiter);
        let head = send(version, Request::head(format!("http://{server}/"))).await;
        assert_eq!((head.status.as_u16(), head.body.len()), (200, 0));
        until("the place is free", || in_flight.count("").unwrap() == 0).await;
        assert_eq!(remaining(&limiter), before - 1, "no byte of the body was sent");
    }
    assert_eq!(status(server, "/free").await, 200);
    until("the place is free", || in_flight.count("").unwrap() == 0).await;
}

#[tokio::test]
async fn an_upgraded_connection_works_and_holds_no_place() {
    let in_flight = InFlight::new(1);
    let upgrade = |mut request: axum::extract::Request| async move {
        let upgrading = hyper::upgrade::on(&mut request);
        tokio::spawn(async move {
            let mut upgraded = hyper_util::rt::TokioIo::new(upgrading.await.unwrap());
            upgraded.write_all(b"hello").await.unwrap();
        });
        let head = Response::builder().status(101).header("connection", "upgrade");
        head.header("upgrade", "test").body(Body::empty()).unwrap()
    };
    let limit = all(&per_hour("api", 10)).in_flight(in_flight.clone(), Key::everyone());
    let server = serve(Router::new().route("/", on_get(upgrade)).layer(limit)).await;
    let mut stream = tokio::net::TcpStream::connect(server).await.unwrap();
    let request = b"GET / HTTP/1.1\r\nhost: x\r\nconnection: upgrade\r\nupgrade: test\r\n\r\n";
    stream.write_all(request).await.unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).await.unwrap();
    let received = String::from_utf8(received).unwrap();
    assert!(
        received.starts_with("HTTP/1.1 101 ") && received.ends_with("\r\n\r\nhello"),
        "{received}"
    );
    assert_eq!(in_flight.count("").unwrap(), 0);
}
