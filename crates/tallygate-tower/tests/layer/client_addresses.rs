//! Client addresses behind proxies. The test's own connections come from loopback.

use std::net::SocketAddr;

use axum::Router;
use axum::routing::get as on_get;
use tallygate::Policy;
use tallygate_tower::{ClientAddress, Key, RateLimit};
use tokio::net::TcpListener;

use crate::network::{SERVERS, Server, VERSIONS, Version, get_by, ok, serve_by_hyper, status_by};

fn routes() -> Router {
    Router::new().route("/", on_get(|| async { ok() }))
}

fn limit(address: ClientAddress) -> RateLimit {
    RateLimit::new(Policy::fixed_window(1).per_hour().build().unwrap(), Key::client(address))
}

fn behind_loopback() -> ClientAddress {
    ClientAddress::behind(["127.0.0.0/8".parse().unwrap(), "::1/128".parse().unwrap()])
}

/// A server that allows one request per client.
struct Limited(SocketAddr, Version);

impl Limited {
    async fn by(address: ClientAddress, (server, version): (Server, Version)) -> Self {
        Self::at("127.0.0.1:0", address, (server, version)).await
    }

    async fn at(at: &str, address: ClientAddress, (server, version): (Server, Version)) -> Self {
        Self(server.serve_at(at, routes(), limit(address)).await, version)
    }

    /// Sends a request per address, and returns whether each was allowed: only the first request of a client is.
    async fn is_new(&self, field: &str, addresses: &[&str]) -> Vec<bool> {
        let mut seen = Vec::new();
        for address in addresses {
            let status = status_by(self.1, self.0, &[(field, address)]).await;
            assert!([200, 429].contains(&status), "{status}");
            seen.push(status == 200);
        }
        seen
    }
}

/// Fault H1.
#[tokio::test]
async fn a_client_cannot_forge_its_address() {
    for server in SERVERS {
        let direct = Limited::by(ClientAddress::peer(), server).await;
        let forged = ["203.0.113.1", "203.0.113.2", "203.0.113.3"];
        let seen = direct.is_new("x-forwarded-for", &forged).await;
        assert_eq!(seen, [true, false, false], "{server:?}");

        // Only what trusted proxies appended counts, from the right.
        let proxied = Limited::by(behind_loopback(), server).await;
        let hops = [
            "203.0.113.1",
            "6.6.6.6, 203.0.113.1",
            "127.0.0.9, 203.0.113.1",
            "203.0.113.1, 127.0.0.2",
        ];
        let seen = proxied.is_new("x-forwarded-for", &hops).await;
        assert_eq!(seen, [true, false, false, false], "{server:?}");
        assert_eq!(proxied.is_new("x-forwarded-for", &["203.0.113.1, 203.0.113.2"]).await, [true]);
        // The field that the proxy does not write comes from the client.
        let other = ["for=203.0.113.4", "for=203.0.113.5"];
        assert_eq!(proxied.is_new("forwarded", &other).await, [true, false], "{server:?}");
    }
}

/// Fault H1.
#[tokio::test]
async fn the_field_forwarded_counts_from_the_right_too() {
    for server in SERVERS {
        let proxied = Limited::by(behind_loopback().forwarded(), server).await;
        let hops = [
            "for=203.0.113.1;proto=https",
            "for=6.6.6.6, For=\"203.0.113.1:80\"",
            "for=\"evil, for=203.0.113.1",
            "for=203.0.113.1, for=127.0.0.1;by=10.0.0.1",
        ];
        let seen = proxied.is_new("forwarded", &hops).await;
        assert_eq!(seen, [true, false, false, false], "{server:?}");
        let other = ["203.0.113.8", "203.0.113.9"];
        assert_eq!(proxied.is_new("x-forwarded-for", &other).await, [true, false], "{server:?}");
    }
}

/// Fault H2.
#[tokio::test]
async fn rotating_through_a_64_is_one_client() {
    for server in SERVERS {
        let proxied = Limited::by(behind_loopback(), server).await;
        let rotated =
            ["2001:db8:1:2::1", "2001:db8:1:2:ffff::2", "[2001:db8:1:2::3]:99", "2001:db8:1:3::1"];
        let seen = proxied.is_new("x-forwarded-for", &rotated).await;
        assert_eq!(seen, [true, false, false, true], "{server:?}");
        let wide = Limited::by(behind_loopback().ipv6_prefix(48), server).await;
        let seen = wide.is_new("x-forwarded-for", &rotated).await;
        assert_eq!(seen, [true, false, false, false], "{server:?}");
    }
}

/// Fault H3.
#[tokio::test]
async fn an_ipv4_address_within_ipv6_is_the_same_client() {
    for server in SERVERS {
        let proxied = Limited::by(behind_loopback(), server).await;
        let same = ["192.0.2.1", "::ffff:192.0.2.1", "[::ffff:192.0.2.1]:80", "64:ff9b::192.0.2.1"];
        let seen = proxied.is_new("x-forwarded-for", &same).await;
        assert_eq!(seen, [true, false, false, false], "{server:?}");
    }
}

#[tokio::test]
async fn a_connection_over_ipv6_has_its_address() {
    for server in SERVERS {
        let direct = Limited::at("[::1]:0", ClientAddress::peer(), server).await;
        let clients = ["203.0.113.1", "203.0.113.2"];
        let seen = direct.is_new("x-forwarded-for", &clients).await;
        assert_eq!(seen, [true, false], "{server:?}");
        let proxied = Limited::at("[::1]:0", behind_loopback(), server).await;
        let seen = proxied.is_new("x-forwarded-for", &clients).await;
        assert_eq!(seen, [true, true], "{server:?}");
    }
}

#[tokio::test]
async fn a_server_that_does_not_provide_addresses_denies_and_does_not_share_one_quota() {
    let bind = async || {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    };
    let (listener, by_axum) = bind().await;
    let app = routes().layer(limit(behind_loopback()));
    tokio::spawn(async move { axum::serve(listener, app).await });
    let (listener, by_hyper) = bind().await;
    tokio::spawn(serve_by_hyper(listener, routes(), limit(behind_loopback()), |_| None));

    for server in [by_axum, by_hyper] {
        for version in VERSIONS {
            let denied = get_by(version, server, "/").await;
            assert_eq!(denied.status.as_u16(), 500);
            assert!(String::from_utf8_lossy(&denied.body).contains("misconfigured"), "{denied:?}");
            let forged = [("x-forwarded-for", "203.0.113.1")];
            assert_eq!(status_by(version, server, &forged).await, 500);
        }
    }
}
