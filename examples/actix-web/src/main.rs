//! Rate limits in actix-web: a middleware that calls `RateLimit::check`.
//!
//!     cargo run --manifest-path examples/actix-web/Cargo.toml

use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::StatusCode;
use actix_web::http::header::{HeaderName, HeaderValue};
use actix_web::middleware::{Next, from_fn};
use actix_web::{App, Error, HttpResponse, HttpServer, web};
use tallygate::{Policy, PolicyError};
use tallygate_tower::{Key, Peer, RateLimit};

/// Each client may send 5 requests at once and 100 per hour.
fn limit() -> Result<RateLimit, PolicyError> {
    let policy = Policy::token_bucket(100).per_hour().burst(5).named("api").build()?;
    Ok(RateLimit::new(policy, Key::peer()))
}

/// Allows or denies a request before it reaches its handler.
async fn rate_limit(
    limit: web::Data<RateLimit>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<BoxBody>, Error> {
    let verdict = limit.check(&parts_of(&request)).await;
    if let Some(denied) = verdict.response() {
        let mut response = HttpResponse::new(status(denied.status()));
        copy(denied.headers(), response.headers_mut());
        let response = response.set_body(BoxBody::new(denied.into_body()));
        return Ok(request.into_response(response));
    }
    let mut response = next.call(request).await?.map_into_boxed_body();
    copy(&verdict.headers(), response.headers_mut());
    Ok(response)
}

/// Returns the head of a request as `tallygate-tower` reads it. actix-web has an older version of the `http` crate.
fn parts_of(request: &ServiceRequest) -> http::request::Parts {
    let (mut parts, ()) = http::Request::new(()).into_parts();
    parts.method = request.method().as_str().parse().unwrap_or_default();
    parts.uri = request.uri().to_string().parse().unwrap_or_default();
    for (name, value) in request.headers() {
        let name = http::HeaderName::from_bytes(name.as_str().as_bytes());
        let value = http::HeaderValue::from_bytes(value.as_bytes());
        if let (Ok(name), Ok(value)) = (name, value) {
            parts.headers.append(name, value);
        }
    }
    if let Some(address) = request.peer_addr() {
        parts.extensions.insert(Peer::from(address));
    }
    parts
}

fn status(status: http::StatusCode) -> StatusCode {
    StatusCode::from_u16(status.as_u16()).unwrap_or(StatusCode::TOO_MANY_REQUESTS)
}

fn copy(from: &http::HeaderMap, to: &mut actix_web::http::header::HeaderMap) {
    for (name, value) in from {
        let name = HeaderName::from_bytes(name.as_str().as_bytes());
        let value = HeaderValue::from_bytes(value.as_bytes());
        if let (Ok(name), Ok(value)) = (name, value) {
            to.append(name, value);
        }
    }
}

async fn hello() -> &'static str {
    "hello\n"
}

#[actix_web::main]
async fn main() -> std::io::Result<()> {
    // One limit for all worker threads.
    let limit = web::Data::new(limit().map_err(std::io::Error::other)?);
    let app = move || {
        let app = App::new().app_data(limit.clone()).wrap(from_fn(rate_limit));
        app.route("/", web::get().to(hello))
    };
    HttpServer::new(app).bind("127.0.0.1:3000")?.run().await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Starts the service on a free port, and sends requests over real connections.
    #[actix_web::test]
    async fn the_sixth_request_of_a_client_is_denied() {
        let limit = web::Data::new(limit().unwrap());
        let app = move || {
            let app = App::new().app_data(limit.clone()).wrap(from_fn(rate_limit));
            app.route("/", web::get().to(hello))
        };
        let server = HttpServer::new(app).workers(2).bind("127.0.0.1:0").unwrap();
        let address = server.addrs()[0];
        let server = server.run();
        let handle = server.handle();
        actix_web::rt::spawn(server);
        let get = move || {
            use std::io::{Read as _, Write as _};
            let mut stream = std::net::TcpStream::connect(address).unwrap();
            let request = "GET / HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
            stream.write_all(request.as_bytes()).unwrap();
            let mut response = String::new();
            stream.read_to_string(&mut response).unwrap();
            response
        };
        let responses =
            web::block(move || (0..6).map(|_| get()).collect::<Vec<_>>()).await.unwrap();
        for (sent, response) in responses.iter().enumerate() {
            let response = response.to_ascii_lowercase();
            let remaining = format!("x-ratelimit-remaining: {}\r\n", 4_usize.saturating_sub(sent));
            assert!(response.contains(&remaining), "{response}");
            let status = if sent < 5 { "http/1.1 200" } else { "http/1.1 429" };
            assert!(response.starts_with(status), "{response}");
        }
        let denied = responses[5].to_ascii_lowercase();
        assert!(denied.contains("retry-after: 36\r\n"), "{denied}");
        assert!(denied.contains("content-type: application/problem+json\r\n"), "{denied}");
        handle.stop(false).await;
    }
}
