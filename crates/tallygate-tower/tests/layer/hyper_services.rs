//! A plain hyper server, HTTP/1 and HTTP/2.

use std::convert::Infallible;
use std::net::SocketAddr;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tallygate::Policy;
use tallygate_tower::{Key, Peer, RateLimit};
use tower::{Layer as _, ServiceBuilder};

use crate::network::{VERSIONS, send};

/// Serves with a limit that all connections share. Each connection inserts its peer.
async fn serve(limit: RateLimit) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let Ok((stream, peer)) = listener.accept().await else { return };
            let service = ServiceBuilder::new()
                .map_request(move |mut request: Request<Incoming>| {
                    request.extensions_mut().insert(Peer::from(peer));
                    request
                })
                .service(limit.layer(tower::service_fn(hello)));
            let service = TowerToHyperService::new(service);
            tokio::spawn(async move {
                let builder = Builder::new(TokioExecutor::new());
                builder.serve_connection(TokioIo::new(stream), service).await
            });
        }
    });
    address
}

async fn hello(_: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(Response::new(Full::new(Bytes::from_static(b"hello"))))
}

#[tokio::test]
async fn all_connections_of_a_hyper_server_share_the_limit() {
    for version in VERSIONS {
        let policy = Policy::fixed_window(2).per_hour().named("api").build().unwrap();
        let server = serve(RateLimit::new(policy, Key::peer())).await;
        let mut seen = Vec::new();
        for _ in 0..3 {
            // Each request has its own connection.
            let answer = send(version, Request::get(format!("http://{server}/"))).await;
            let left = answer.header("x-ratelimit-remaining");
            seen.push(format!("{} {left}", answer.status.as_u16()));
        }
        assert_eq!(seen, ["200 1", "200 0", "429 0"]);
    }
}

/// Without tower: the service calls the limit itself.
#[tokio::test]
async fn a_service_without_tower_checks_by_itself() {
    let policy = Policy::fixed_window(1).per_hour().build().unwrap();
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
    let get = || async {
        let answer = send(VERSIONS[0], Request::get(format!("http://{server}/"))).await;
        (answer.status.as_u16(), answer.header("x-ratelimit-remaining").to_owned())
    };
    assert_eq!(get().await, (200, "0".to_owned()));
    assert_eq!(get().await, (429, "0".to_owned()));
}
