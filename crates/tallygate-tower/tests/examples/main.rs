//! The examples behave as their comments describe.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::net::SocketAddr;

use axum::Router;
use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;

/// Each example has a `main` of its own, which is not called here.
macro_rules! examples {
    ($($name:ident: $path:literal),*) => { $(
        #[path = $path]
        #[allow(dead_code, reason = "the example has a `main` of its own")]
        mod $name;
    )* };
}

examples!(
    axum_by_address: "../../examples/axum_by_address.rs",
    axum_by_api_key: "../../examples/axum_by_api_key.rs",
    llm_tokens: "../../examples/llm_tokens.rs",
    login: "../../examples/login.rs",
    outgoing: "../../examples/outgoing.rs",
    outgoing_reqwest: "../../examples/outgoing_reqwest.rs",
    tonic_service: "../../examples/tonic.rs"
);

async fn serve(app: Router) -> SocketAddr {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

/// Sends a request, and returns its status and the remaining units.
async fn send(request: http::request::Builder, body: &'static str) -> String {
    let client = Client::builder(TokioExecutor::new()).build_http();
    let request = request.body(Full::new(Bytes::from(body))).unwrap();
    let response = client.request(request).await.unwrap();
    let left = response.headers().get("x-ratelimit-remaining").map(|left| left.to_str().unwrap());
    let text = format!("{} {}", response.status().as_u16(), left.unwrap_or("-"));
    response.into_body().collect().await.unwrap();
    text
}

#[tokio::test]
async fn axum_by_address_allows_five_requests_at_once() {
    let server = serve(axum_by_address::app().unwrap()).await;
    for left in (0..5).rev() {
        assert_eq!(
            send(Request::get(format!("http://{server}/")), "").await,
            format!("200 {left}")
        );
    }
    assert_eq!(send(Request::get(format!("http://{server}/")), "").await, "429 0");
}

#[tokio::test]
async fn axum_by_api_key_limits_customers_by_plan_and_others_by_address() {
    let server = serve(axum_by_api_key::app().unwrap()).await;
    let with = |key: &'static str| {
        send(Request::get(format!("http://{server}/")).header("x-api-key", key), "")
    };
    for _ in 0..5 {
        assert!(with("key-of-alice").await.starts_with("200"));
    }
    assert_eq!([with("key-of-bob").await, with("key-of-bob").await], ["200 2", "200 1"]);
    assert_eq!([with("key-of-bob").await, with("key-of-bob").await], ["200 0", "429 0"]);
    // Invented keys share the quota of the address.
    assert_eq!([with("x1").await, with("x2").await, with("x3").await], ["200 1", "200 0", "429 0"]);
}

#[tokio::test]
async fn login_counts_only_failures() {
    let server = serve(login::app().unwrap()).await;
    let attempt = |password| send(Request::post(format!("http://{server}/login")), password);
    for _ in 0..8 {
        assert_eq!(attempt("correct horse").await, "200 5");
    }
    for left in (0..5).rev() {
        assert_eq!(attempt("guess").await, format!("401 {left}"));
    }
    assert_eq!(attempt("correct horse").await, "429 0");
}

#[tokio::test]
async fn llm_tokens_settles_what_the_stream_used() {
    let server = serve(llm_tokens::app().unwrap()).await;
    let generate = |prompt| {
        let request =
            Request::post(format!("http://{server}/generate")).header("x-api-key", "alice");
        send(request, prompt)
    };
    // The head of a response shows the reservation; the stream is settled at its end.
    assert_eq!(generate("one two three").await, "200 600");
    assert_eq!(generate("four").await, "200 597");
    assert_eq!(generate("").await, "200 596");
    // Nothing was counted for the last one, so its reservation stays charged.
    assert_eq!(generate("five").await, "200 196");
    assert_eq!(generate("six").await, "200 195");
}

#[tokio::test]
async fn the_tonic_service_denies_the_sixth_call() {
    use tonic::transport::Endpoint;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    let incoming =
        tonic::transport::server::TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let server = incoming.local_addr().unwrap();
    tokio::spawn(async move { tonic_service::serve(incoming).await.unwrap() });
    let channel = Endpoint::from_shared(format!("http://{server}")).unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    for _ in 0..5 {
        client.check(HealthCheckRequest::default()).await.unwrap();
    }
    let denied = client.check(HealthCheckRequest::default()).await.unwrap_err();
    assert_eq!(denied.code(), tonic::Code::ResourceExhausted);
}

/// Expects four requests to a server to be allowed, 100 ms apart.
async fn assert_paced<F>(send: impl FnOnce(String) -> F)
where
    F: Future<Output = Result<Vec<http::StatusCode>, Box<dyn std::error::Error>>>,
{
    let app = Router::new().route("/", axum::routing::get(|| async { "ok" }));
    let server = serve(app).await;
    let started = std::time::Instant::now();
    assert_eq!(send(format!("http://{server}/")).await.unwrap(), [http::StatusCode::OK; 4]);
    assert!(started.elapsed() >= std::time::Duration::from_millis(300), "{:?}", started.elapsed());
}

#[tokio::test]
async fn outgoing_requests_are_paced() {
    assert_paced(async |url| outgoing::send(&url, 4).await).await;
}

#[tokio::test]
async fn outgoing_requests_of_reqwest_are_paced() {
    // The proxies of the environment do not lead to a server on loopback.
    let client = reqwest::Client::builder().no_proxy().build().unwrap();
    assert_paced(async |url| outgoing_reqwest::send(client, &url, 4).await).await;
}
