//! Requests that end early: charged once or not at all, and their places are released.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::get as on_get;
use http::{Request, Response};
use http_body_util::Empty;
use tallygate::clock::ManualClock;
use tallygate::store::{Capacity, PolicyStore};
use tallygate::{Ask, InFlight, Policy, RateLimiter, Tick};
use tallygate_tower::{Key, RateLimit, Rule, Settle};
use tower::{Layer as _, Service};

use crate::network::{SERVERS, client, ok, status_by, until};

fn per_hour(limit: u64) -> Arc<RateLimiter> {
    Arc::new(RateLimiter::new(Policy::fixed_window(limit).per_hour().build().unwrap()))
}

fn remaining(limiter: &RateLimiter) -> u64 {
    limiter.peek(Ask::new("").cost(0)).unwrap().remaining
}

#[tokio::test]
async fn a_handler_that_panics_is_charged_once_and_releases_its_place() {
    for (server, version) in SERVERS {
        let (limiter, in_flight) = (per_hour(10), InFlight::new(1));
        let panics = || async {
            if true {
                panic!("the handler panics, as it should");
            }
            ok()
        };
        let rule = Rule::new(limiter.clone(), Key::everyone()).settle(Settle::by_extension());
        let routes =
            Router::new().route("/", on_get(|| async { ok() })).route("/panic", on_get(panics));
        let limit = RateLimit::from(rule).in_flight(in_flight.clone(), Key::everyone());
        let server = server.serve(routes, limit).await;
        let request = Request::get(format!("http://{server}/panic")).body(Empty::new()).unwrap();
        assert!(client(version).request(request).await.is_err());
        until("the place is free", || in_flight.count("").unwrap() == 0).await;
        assert_eq!(remaining(&limiter), 9);
        assert_eq!(status_by(version, server, &[]).await, 200, "the others are served");
    }
}

#[tokio::test]
async fn a_client_that_disconnects_is_charged_once_and_releases_its_place() {
    for (server, version) in SERVERS {
        let (limiter, in_flight) = (per_hour(10), InFlight::new(1));
        let entered = Arc::new(tokio::sync::Semaphore::new(0));
        let entering = entered.clone();
        let never = move || async move {
            entering.add_permits(1);
            std::future::pending::<Response<Body>>().await
        };
        let limit = RateLimit::new(limiter.clone(), Key::everyone());
        let limit = limit.in_flight(in_flight.clone(), Key::everyone());
        let server = server.serve(Router::new().route("/", on_get(never)), limit).await;
        let request = Request::get(format!("http://{server}/")).body(Empty::new()).unwrap();
        let gone = tokio::spawn(client(version).request(request));
        entered.acquire().await.unwrap().forget();
        assert_eq!((remaining(&limiter), in_flight.count("").unwrap()), (9, 1));
        gone.abort();
        until("the place is free", || in_flight.count("").unwrap() == 0).await;
        assert_eq!(remaining(&limiter), 9);
    }
}

/// A body that sends one piece and never ends.
fn endless() -> Body {
    struct Endless(bool);
    impl http_body::Body for Endless {
        type Data = bytes::Bytes;
        type Error = std::convert::Infallible;
        fn poll_frame(
            mut self: std::pin::Pin<&mut Self>,
            _: &mut Context<'_>,
        ) -> Poll<Option<Result<http_body::Frame<bytes::Bytes>, Self::Error>>> {
            if std::mem::replace(&mut self.0, true) {
                return Poll::Pending;
            }
            Poll::Ready(Some(Ok(http_body::Frame::data(bytes::Bytes::from_static(b"12345")))))
        }
    }
    Body::new(Endless(false))
}

#[tokio::test]
async fn a_place_is_held_until_the_body_has_ended_or_was_cut_off() {
    for (server, version) in SERVERS {
        let (limiter, in_flight) = (per_hour(100), InFlight::new(1));
        let rule = Rule::new(limiter.clone(), Key::everyone())
            .cost(|_| 50)
            .settle(Settle::by_bytes(|bytes| bytes));
        let limit = RateLimit::from(rule).in_flight(in_flight.clone(), Key::everyone());
        let routes = Router::new().route("/", on_get(|| async { Response::new(endless()) }));
        let server = server.serve(routes, limit).await;
        let request = Request::get(format!("http://{server}/")).body(Empty::new()).unwrap();
        let client = client(version);
        let response = client.request(request).await.unwrap();
        assert_eq!(response.status().as_u16(), 200);
        assert_eq!(in_flight.count("").unwrap(), 1, "the head was sent, and the body goes on");
        assert_eq!(status_by(version, server, &[]).await, 429);
        assert_eq!(remaining(&limiter), 50);
        drop((response, client));
        until("the place is free", || in_flight.count("").unwrap() == 0).await;
        assert_eq!(remaining(&limiter), 95, "the bytes that were sent are charged");
    }
}

/// Fault C6.
#[tokio::test]
async fn a_future_dropped_at_any_poll_is_charged_once_or_not_at_all() {
    for settles in [false, true] {
        for polls in 0..6 {
            let clock = Arc::new(ManualClock::new(Tick(0)));
            let policy = Policy::leaky_bucket(1).per_second().burst(10).build().unwrap();
            let store = PolicyStore::new(&policy, Capacity::of(10), clock.clone());
            let first = Arc::new(RateLimiter::with_store(policy, store));
            let (second, in_flight) = (per_hour(10), InFlight::new(5));
            assert!(first.check("").unwrap().allowed, "so that the next one is delayed");
            let mut rule = Rule::new(second.clone(), Key::everyone());
            if settles {
                rule = rule.settle(Settle::by_response(|_| Some(1)));
            }
            let limit = RateLimit::all_of([Rule::new(first.clone(), Key::everyone()), rule])
                .in_flight(in_flight.clone(), Key::everyone())
                .delay_up_to(Duration::from_secs(5))
                .clock(clock.clone());
            let mut service = limit.layer(tower::service_fn(|_: Request<()>| async {
                let mut left = 2;
                poll_fn(|context| {
                    left -= 1;
                    context.waker().wake_by_ref();
                    if left > 0 { Poll::Pending } else { Poll::Ready(()) }
                })
                .await;
                Ok::<_, std::convert::Infallible>(ok())
            }));
            let mut context = Context::from_waker(Waker::noop());
            assert!(Service::<Request<()>>::poll_ready(&mut service, &mut context).is_ready());
            {
                let mut future = pin!(service.call(Request::new(())));
                for poll in 0..polls {
                    if future.as_mut().poll(&mut context).is_ready() {
                        break;
                    }
                    if poll == 0 {
                        clock.set(Tick(1_000_000_000));
                    }
                }
            }
            let used = 10 - first.peek(Ask::new("").cost(0)).unwrap().remaining;
            assert!(used <= 2, "{used} with the one before, after {polls} polls");
            assert!(10 - remaining(&second) <= 1, "after {polls} polls");
            assert_eq!(in_flight.count("").unwrap(), 0, "after {polls} polls");
        }
    }
}
