//! A tonic server and a tonic client.

use std::net::SocketAddr;
use std::time::Duration;

use http::HeaderName;
use tallygate::{Policy, RateLimiter};
use tallygate_tower::{Key, RateLimit};
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Endpoint, Server};
use tonic::{Code, Request, Status};
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_client::HealthClient;
use tonic_types::StatusExt as _;

async fn serve(limit: RateLimit) -> SocketAddr {
    let incoming = TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = incoming.local_addr().unwrap();
    let (_, health) = tonic_health::server::health_reporter();
    let server = Server::builder().layer(limit).add_service(health);
    tokio::spawn(async move { server.serve_with_incoming(incoming).await });
    address
}

async fn check(server: SocketAddr, api_key: Option<&'static str>) -> Result<String, Status> {
    let channel = Endpoint::from_shared(format!("http://{server}")).unwrap();
    let mut client = HealthClient::new(channel.connect().await.unwrap());
    let mut request = Request::new(HealthCheckRequest { service: String::new() });
    if let Some(key) = api_key {
        request.metadata_mut().insert("x-api-key", key.parse().unwrap());
    }
    let response = client.check(request).await?;
    let left = response.metadata().get("x-ratelimit-remaining").unwrap();
    Ok(left.to_str().unwrap().to_owned())
}

#[tokio::test]
async fn a_denied_call_is_resource_exhausted_with_the_time_to_retry() {
    let policy = Policy::token_bucket(2).per_hour().named("calls").build().unwrap();
    let limiter = RateLimiter::new(policy);
    let server = serve(RateLimit::new(limiter, Key::peer())).await;
    assert_eq!(check(server, None).await.unwrap(), "1");
    assert_eq!(check(server, None).await.unwrap(), "0");
    let denied = check(server, None).await.unwrap_err();
    assert_eq!(denied.code(), Code::ResourceExhausted);
    assert_eq!(denied.message(), "the quota of calls is exceeded");
    let retry_info = denied.get_details_retry_info().expect("a RetryInfo");
    let wait = retry_info.retry_delay.expect("a time");
    assert!(wait > Duration::from_secs(1790) && wait <= Duration::from_secs(1800), "{wait:?}");
    assert_eq!(denied.metadata().get("retry-after").unwrap(), "1800");
    assert_eq!(denied.metadata().get("x-ratelimit-remaining").unwrap(), "0");
}

#[tokio::test]
async fn a_call_without_its_key_is_an_invalid_argument() {
    let policy = Policy::token_bucket(1).per_hour().build().unwrap();
    let key = Key::header(HeaderName::from_static("x-api-key"));
    let server = serve(RateLimit::new(policy, key)).await;
    let denied = check(server, None).await.unwrap_err();
    assert_eq!(denied.code(), Code::InvalidArgument);
    assert_eq!(denied.message(), "missing header field x-api-key");
    assert_eq!(check(server, Some("alice")).await.unwrap(), "0");
    assert_eq!(check(server, Some("alice")).await.unwrap_err().code(), Code::ResourceExhausted);
    assert_eq!(check(server, Some("bob")).await.unwrap(), "0");
}
