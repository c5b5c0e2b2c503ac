//! Servers on free ports, and clients for them.

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

/// Serves a router on a free port of the loopback interface until the test ends.
pub(crate) async fn serve(app: Router) -> SocketAddr {
    serve_at("127.0.0.1:0", app).await
}

pub(crate) async fn serve_at(address: &str, app: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind(address).await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
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
    send(Version::Http1, Request::get(format!("http://{server}{path}"))).await
}

/// Sends a request with header fields, and returns its status.
pub(crate) async fn status_with(server: SocketAddr, fields: &[(&str, &str)]) -> u16 {
    let mut request = Request::get(format!("http://{server}/"));
    for (name, value) in fields {
        request = request.header(*name, *value);
    }
    send(Version::Http1, request).await.status.as_u16()
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
