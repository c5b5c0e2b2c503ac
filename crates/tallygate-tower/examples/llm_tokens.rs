//! A language model with a quota of tokens: reserves the most tokens that a request may use, and settles with the real
//! number when its stream has ended.
//!
//!     cargo run -p tallygate-tower --features axum --example llm_tokens

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};

use axum::body::Body;
use axum::http::HeaderName;
use axum::response::Response;
use axum::routing::post;
use axum::{Extension, Router};
use bytes::Bytes;
use http_body::Frame;
use tallygate::{Policy, PolicyError};
use tallygate_tower::{Key, Meter, RateLimit, Rule, Settle};

/// The most tokens that one answer may have.
const MAX_TOKENS: u64 = 400;

/// Builds the service. Each key may use 1000 tokens per hour.
pub(crate) fn app() -> Result<Router, PolicyError> {
    let policy = Policy::fixed_window(1000).per_hour().named("tokens").build()?;
    let rule = Rule::new(policy, Key::header(HeaderName::from_static("x-api-key")))
        .cost(|_| MAX_TOKENS)
        .settle(Settle::by_meter());
    Ok(Router::new().route("/generate", post(generate)).layer(RateLimit::from(rule)))
}

/// Streams an answer, and counts its tokens. If the client disconnects, the tokens until then are charged.
async fn generate(Extension(meter): Extension<Meter>, prompt: String) -> Response {
    let tokens = prompt.split_whitespace().map(|word| format!("{word} ")).collect::<Vec<_>>();
    Response::new(Body::new(Tokens { tokens: tokens.into_iter(), meter }))
}

/// A model that repeats the prompt.
struct Tokens {
    tokens: std::vec::IntoIter<String>,
    meter: Meter,
}

impl http_body::Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(token) = self.tokens.next() else { return Poll::Ready(None) };
        self.meter.add(1);
        Poll::Ready(Some(Ok(Frame::data(token.into()))))
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:3000").await?;
    let service = app()?.into_make_service_with_connect_info::<SocketAddr>();
    axum::serve(listener, service).await?;
    Ok(())
}
