//! Servers on free ports, and clients for them.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto::Builder;
use hyper_util::service::TowerToHyperService;
use tallygate_tower::{Peer, RateLimit};
use tokio::net::TcpListener;
use tonic::transport::server::TcpIncoming;
use tower::{Layer as _, ServiceBuilder};

/// The servers that the layer supports.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Server {
    Axum,
    Hyper,
    Tonic,
}

/// All servers, with each version of HTTP that they speak.
pub(crate) const SERVERS: [(Server, Version); 5] = [
    (Server::Axum, Version::Http1),
    (Server::Axum, Version::Http2),
    (Server::Hyper, Version::Http1),
    (Server::Hyper, Version::Http2),
    (Server::Tonic, Version::Http2),
];

impl Server {
    /// Serves limited routes on a free port of the loopback interface until the test ends.
    pub(crate) async fn serve(self, routes: Router, limit: RateLimit) -> SocketAddr {
        self.serve_at("127.0.0.1:0", routes, limit).await
    }

    pub(crate) async fn serve_at(
        self,
        address: &str,
        routes: Router,
        limit: RateLimit,
    ) -> SocketAddr {
        // This listener has room for a thousand connections that are not accepted yet.
        let listener = TcpListener::bind(address).await.unwrap();
        let address = listener.local_addr().unwrap();
        match self {
            Self::Axum => serve_on(listener, routes.layer(limit)),
            Self::Hyper => drop(tokio::spawn(serve_by_hyper(listener, routes, limit, Some))),
            Self::Tonic => {
                let mut server = tonic::transport::Server::builder().layer(limit);
                let server = server.add_routes(routes.into());
                tokio::spawn(async move {
                    server.serve_with_incoming(TcpIncoming::from(listener)).await
                });
            }
        }
        address
    }
}

/// Serves each connection with a clone of the limit. `peer` returns what is known about the peer of a connection.
pub(crate) async fn serve_by_hyper(
    listener: TcpListener,
    routes: Router,
    limit: RateLimit,
    peer: fn(SocketAddr) -> Option<SocketAddr>,
) {
    while let Ok((stream, address)) = listener.accept().await {
        let service = ServiceBuilder::new()
            .map_request(move |mut request: Request<Incoming>| {
                if let Some(peer) = peer(address) {
                    request.extensions_mut().insert(Peer::from(peer));
                }
                request
            })
            .service(limit.layer(routes.clone()));
        let service = TowerToHyperService::new(service);
        tokio::spawn(async move {
            let builder = Builder::new(TokioExecutor::new());
            builder.serve_connection(TokioIo::new(stream), service).await
        });
    }
}

/// Serves a router on a free port of the loopback interface until the test ends.
pub(crate) async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    serve_on(listener, app);
    address
}

fn serve_on(listener: TcpListener, app: Router) {
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
}

/// The version of HTTP that a client speaks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Version {
    Http1,
    Http2,
}

pub(crate) const VERSIONS: [Version; 2] = [Version::Http1, Version::Http2];

pub(crate) fn client(version: Version) -> Client<HttpConnector, Empty<Bytes>> {
    let is_http2 = matches!(version, Version::Http2);
    Client::builder(TokioExecutor::new()).http2_only(is_http2).build_http()
}

/// The response to a request, with its whole body.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// Returns the value of a header field, or nothing if there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

pub(crate) async fn send(version: Version, request: http::request::Builder) -> Answer {
    let response = client(version).request(request.body(Empty::new()).unwrap()).await.unwrap();
    let (head, body) = response.into_parts();
    let body = body.collect().await.unwrap().to_bytes();
    Answer { status: head.status, headers: head.headers, body }
}

pub(crate) async fn get(server: SocketAddr, path: &str) -> Answer {
    get_by(Version::Http1, server, path).await
}

pub(crate) async fn get_by(version: Version, server: SocketAddr, path: &str) -> Answer {
    send(version, Request::get(format!("http://{server}{path}"))).await
}

/// Sends a request with header fields, and returns its status.
pub(crate) async fn status_with(server: SocketAddr, fields: &[(&str, &str)]) -> u16 {
    status_by(Version::Http1, server, fields).await
}

pub(crate) async fn status_by(
    version: Version,
    server: SocketAddr,
    fields: &[(&str, &str)],
) -> u16 {
    let mut request = Request::get(format!("http://{server}/"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    send(version, request).await.status.as_u16()
}

pub(crate) async fn status(server: SocketAddr, path: &str) -> u16 {
    get(server, path).await.status.as_u16()
}

pub(crate) fn ok() -> Response<Body> {
    Response::new(Body::from("ok"))
}

/// Waits until a condition holds, and lets other tasks run meanwhile.
pub(crate) async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let waiting = async {
        while !holds() {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    let limit = std::time::Duration::from_secs(30);
    assert!(tokio::time::timeout(limit, waiting).await.is_ok(), "{what}");
}
