//! Client addresses behind proxies. The test's own connections come from loopback.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get as on_get;
use tallygate::Policy;
use tallygate_tower::{ClientAddress, Key, RateLimit};

use crate::network::{get, ok, serve, serve_at, status_with};

fn app(address: ClientAddress) -> Router {
    let policy = Policy::fixed_window(1).per_hour().build().unwrap();
    let limit = RateLimit::new(policy, Key::client(address));
    Router::new().route("/", on_get(|| async { ok() })).layer(limit)
}

fn behind_loopback() -> ClientAddress {
    ClientAddress::behind(["127.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()])
}

/// Sends a request per address, and returns whether each was allowed: only the first request of a client is.
async fn is_new(server: SocketAddr, field: &str, addresses: &[&str]) -> Vec<bool> {
    let mut seen = Vec::new();
    for address in addresses {
        seen.push(status_with(server, &[(field, address)]).await == 200);
    }
    seen
}

/// Fault H1.
#[tokio::test]
async fn a_client_cannot_forge_its_address() {
    let direct = serve(app(ClientAddress::peer())).await;
    let forged = ["203.0.113.1", "203.0.113.2", "203.0.113.3"];
    assert_eq!(is_new(direct, "x-forwarded-for", &forged).await, [true, false, false]);

    // Only what trusted proxies appended counts, from the right.
    let proxied = serve(app(behind_loopback())).await;
    let hops =
        ["203.0.113.1", "6.6.6.6, 203.0.113.1", "127.0.0.9, 203.0.113.1", "203.0.113.1, 127.0.0.2"];
    assert_eq!(is_new(proxied, "x-forwarded-for", &hops).await, [true, false, false, false]);
    assert_eq!(is_new(proxied, "x-forwarded-for", &["203.0.113.1, 203.0.113.2"]).await, [true]);
    // The field that the proxy does not write comes from the client.
    let other = ["for=203.0.113.4", "for=203.0.113.5"];
    assert_eq!(is_new(proxied, "forwarded", &other).await, [true, false]);
}

/// Fault H1.
#[tokio::test]
async fn the_field_forwarded_counts_from_the_right_too() {
    let server = serve(app(behind_loopback().forwarded())).await;
    let hops = [
        "for=203.0.113.1;proto=https",
        "for=6.6.6.6, For=\"203.0.113.1:80\"",
        "for=\"evil, for=203.0.113.1",
        "for=203.0.113.1, for=127.0.0.1;by=10.0.0.1",
    ];
    assert_eq!(is_new(server, "forwarded", &hops).await, [true, false, false, false]);
    assert_eq!(
        is_new(server, "x-forwarded-for", &["203.0.113.8", "203.0.113.9"]).await,
        [true, false]
    );
}

/// Fault H2.
#[tokio::test]
async fn rotating_through_a_64_is_one_client() {
    let server = serve(app(behind_loopback())).await;
    let rotated =
        ["2001:db8:1:2::1", "2001:db8:1:2:ffff::2", "[2001:db8:1:2::3]:99", "2001:db8:1:3::1"];
    assert_eq!(is_new(server, "x-forwarded-for", &rotated).await, [true, false, false, true]);
    let wide = serve(app(behind_loopback().ipv6_prefix(48))).await;
    assert_eq!(is_new(wide, "x-forwarded-for", &rotated).await, [true, false, false, false]);
}

/// Fault H3.
#[tokio::test]
async fn an_ipv4_address_within_ipv6_is_the_same_client() {
    let server = serve(app(behind_loopback())).await;
    let same = ["192.0.2.1", "::ffff:192.0.2.1", "[::ffff:192.0.2.1]:80", "64:ff9b::192.0.2.1"];
    assert_eq!(is_new(server, "x-forwarded-for", &same).await, [true, false, false, false]);
}

#[tokio::test]
async fn a_connection_over_ipv6_has_its_address() {
    let server = serve_at("[::1]:0", app(ClientAddress::peer())).await;
    assert_eq!(
        is_new(server, "x-forwarded-for", &["203.0.113.1", "203.0.113.2"]).await,
        [true, false]
    );
    let proxied = serve_at("[::1]:0", app(behind_loopback())).await;
    assert_eq!(
        is_new(proxied, "x-forwarded-for", &["203.0.113.1", "203.0.113.2"]).await,
        [true, true]
    );
}

#[tokio::test]
async fn a_server_that_does_not_provide_addresses_denies_and_does_not_share_one_quota() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let server = listener.local_addr().unwrap();
    let app = app(behind_loopback());
    tokio::spawn(async move { axum::serve(listener, app).await });
    let denied = get(server, "/").await;
    assert_eq!(denied.status.as_u16(), 500);
    assert!(String::from_utf8_lossy(&denied.body).contains("misconfigured"), "{denied:?}");
    assert_eq!(status_with(server, &[("x-forwarded-for", "203.0.113.1")]).await, 500);
}
