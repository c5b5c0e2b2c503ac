//! A hyper service without tower.

use std::convert::Infallible;

use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use tallygate::Policy;
use tallygate_tower::{Key, RateLimit};

use crate::network::{Version, send};

#[tokio::test]
async fn a_service_without_tower_checks_by_itself() {
    let policy = Policy::fixed_window(2).per_hour().build().unwrap();
    let limit = RateLimit::new(policy, Key::everyone());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let Ok((stream, _)) = listener.accept().await else { return };
            let limit = limit.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let limit = limit.clone();
                async move {
                    let (parts, _) = request.into_parts();
                    let verdict = limit.check(&parts).await;
                    if let Some(denied) = verdict.response() {
                        return Ok(denied.map(Full::new));
                    }
                    let (mut head, body) = Response::new(Full::from("hello")).into_parts();
                    let _guard = verdict.respond(&mut head).await;
                    Ok::<_, Infallible>(Response::from_parts(head, body))
                }
            });
            tokio::spawn(async move {
                let builder = Builder::new(TokioExecutor::new());
                builder.serve_connection(TokioIo::new(stream), service).await
            });
        }
    });
    let get = async |version| {
        let answer = send(version, Request::get(format!("http://{server}/"))).await;
        format!("{} {}", answer.status.as_u16(), answer.header("x-ratelimit-remaining"))
    };
    assert_eq!([get(Version::Http1).await, get(Version::Http2).await], ["200 1", "200 0"]);
    assert_eq!([get(Version::Http1).await, get(Version::Http2).await], ["429 0", "429 0"]);
}
