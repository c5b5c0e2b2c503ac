//! Tests which requests may administer: through proxies in their stock configuration, and from pages of other sites.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Client, Reply, ask, post, remaining};
use tallygate_testkit::servers::StockProxy;

const CLOSED: &str = r#"
    [admin]
    loopback = false
    [policies.api]
    limit = 5
    window = "1h"
"#;
const OPEN: &str = r#"
    [admin]
    loopback = true
    [policies.api]
    limit = 5
    window = "1h"
"#;
const PATIENCE: Duration = Duration::from_secs(20);

const ADMIN_VERBS: [&str; 10] = [
    "POST /v1/refund",
    "POST /v1/reset",
    "GET /v1/policies",
    "GET /v1/admin/hot",
    "GET /v1/admin/client?key=a",
    "GET /v1/admin/overrides",
    "PUT /v1/admin/overrides",
    "DELETE /v1/admin/overrides?policy=api&key=a",
    "POST /v1/admin/reload",
    "POST /v1/backtest?policy=gcra+1/s",
];

const CHECK: &str = r#"{"policy":"api","key":"a"}"#;

/// Sends bytes over a Unix socket and returns the whole reply.
fn over_socket(path: &str, bytes: &str) -> String {
    let mut stream = UnixStream::connect(path.strip_prefix("unix:").unwrap()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    reply
}

fn socket(name: &str) -> String {
    let path = std::env::temp_dir().join(format!("tallygate-{name}-{}.sock", std::process::id()));
    format!("unix:{}", path.display())
}

/// Fault J11.
#[test]
fn without_a_token_the_admin_verbs_are_disabled_over_tcp() {
    let served = Served::start(&[], Some(CLOSED));
    for line in ADMIN_VERBS {
        for host in ["127.0.0.1", "localhost"] {
            let denied = ask(served.http(), line, &[("host", host)], "");
            assert_eq!(denied.status, 403, "{line}: {denied:?}");
            assert!(denied.problem().starts_with("admin requests are disabled"), "{denied:?}");
        }
    }
    let mut resp = TcpStream::connect(served.resp()).unwrap();
    resp.set_read_timeout(Some(PATIENCE)).unwrap();
    resp.write_all(b"TG.RESET api a\r\nTG.REFUND api a 1\r\nQUIT\r\n").unwrap();
    let mut replies = String::new();
    resp.read_to_string(&mut replies).unwrap();
    assert_eq!(replies.matches("-NOPERM admin commands are disabled").count(), 2, "{replies}");
}

/// Fault J11.
#[test]
fn the_servers_own_user_administers_over_a_unix_socket() {
    let (http, resp) = (socket("admin-http"), socket("admin-resp"));
    let served = Served::start(&["--http", &http, "--resp", &resp], Some(CLOSED));
    let request = |more: &str| {
        let head = "GET /v1/policies HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n";
        over_socket(served.http(), &format!("{head}{more}\r\n"))
    };
    assert!(request("").starts_with("HTTP/1.1 200"), "{}", request(""));
    let proxied = request("x-forwarded-for: 203.0.113.9\r\n");
    assert!(proxied.starts_with("HTTP/1.1 403"), "a proxy's clients are others: {proxied}");
    let reset = over_socket(served.resp(), "TG.RESET api a\r\nQUIT\r\n");
    assert!(reset.starts_with("*6\r\n"), "{reset}");
}

/// Runs only as root, with `nobody` as the other user.
///
/// Fault J11.
#[test]
fn another_user_on_the_socket_is_not_the_operator() {
    let is_root = Command::new("id").arg("-u").output().unwrap().stdout == b"0\n";
    if !is_root {
        return;
    }
    // The server runs as another user than root, so that neither side is root.
    let http = socket("admin-other");
    let path = http.strip_prefix("unix:").unwrap();
    let served = Served::start(&["--http", &http], Some(CLOSED));
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o666)).unwrap();
    let by = |user: &str| {
        let output = Command::new("setpriv")
            .args(["--reuid", user, "--clear-groups", "curl", "-s", "-o", "/dev/null"])
            .args(["-w", "%{http_code}", "--unix-socket", path, "http://localhost/v1/policies"])
            .output()
            .expect("setpriv and curl are installed");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    assert_eq!(by("65534"), "403");
    assert_eq!(by("0"), "200");
    drop(served);
}

/// Fault J11.
#[test]
fn without_a_configuration_the_printed_token_administers() {
    let served = Served::start(&[], None);
    assert_eq!(ask(served.http(), "GET /v1/policies", &[], "").status, 401);
    let wrong = [("authorization", "Bearer 0000000000000000")];
    assert_eq!(ask(served.http(), "GET /v1/policies", &wrong, "").status, 401);
    let bearer = format!("Bearer {}", served.one_time_token());
    let right = [("authorization", &*bearer)];
    assert_eq!(ask(served.http(), "GET /v1/policies", &right, "").status, 200);
    let other = Served::start(&[], None);
    assert_ne!(served.one_time_token(), other.one_time_token());
}

/// Asserts that the admin verbs are denied through a proxy with every host name, and that checks are allowed.
fn admin_is_denied_through(proxy: &StockProxy) {
    for line in ADMIN_VERBS {
        for host in ["example.com", "localhost", "127.0.0.1", proxy.address()] {
            let denied = ask(proxy.address(), line, &[("host", host)], "");
            // A public host name is rejected before the role is checked.
            let is_public = denied.status == 421 && host == "example.com";
            assert!(is_public || denied.status == 403, "{line} {host}: {denied:?}");
        }
    }
    assert_eq!(post(proxy.address(), "/v1/check", CHECK).status, 200, "checks are allowed");
}

/// Fault J11.
#[test]
fn a_stock_nginx_makes_no_client_the_operator() {
    let served = Served::start(&[], Some(CLOSED));
    admin_is_denied_through(&StockProxy::nginx(served.http()));
}

/// Fault J11.
#[test]
fn a_stock_haproxy_makes_no_client_the_operator() {
    let served = Served::start(&[], Some(CLOSED));
    admin_is_denied_through(&StockProxy::haproxy("http", served.http()));
}

/// Fault J11.
#[test]
fn a_stock_caddy_makes_no_client_the_operator() {
    let served = Served::start(&[], Some(CLOSED));
    admin_is_denied_through(&StockProxy::caddy(served.http()));
}

/// A TCP proxy forwards bytes, in front of RESP and of HTTP.
///
/// Fault J11.
#[test]
fn a_tcp_proxy_makes_no_client_the_operator() {
    let served = Served::start(&[], Some(CLOSED));
    let proxy = StockProxy::haproxy("tcp", served.resp());
    let mut resp = TcpStream::connect(proxy.address()).unwrap();
    resp.set_read_timeout(Some(PATIENCE)).unwrap();
    resp.write_all(b"TG.RESET api a\r\nTG.REFUND api a 1\r\nTG.CHECK api a\r\nQUIT\r\n").unwrap();
    let mut replies = String::new();
    resp.read_to_string(&mut replies).unwrap();
    assert_eq!(replies.matches("-NOPERM admin commands are disabled").count(), 2, "{replies}");
    assert!(replies.contains("*6\r\n:1\r\n"), "checks are allowed: {replies}");
    drop(proxy);
    admin_is_denied_through(&StockProxy::haproxy("tcp", served.http()));
}

/// `[admin] loopback = true` is documented as unsafe with a proxy on the same machine. An admin token makes it safe.
///
/// Fault J11.
#[test]
fn with_an_admin_token_a_proxy_on_the_same_machine_makes_no_client_the_operator() {
    let config = format!("{OPEN}[auth]\nadmin = [\"env:ADMIN\"]\n");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", "a-token-for-the-admin")]);
    let proxy = StockProxy::haproxy("http", served.http());
    for line in ADMIN_VERBS {
        let denied = ask(proxy.address(), line, &[("host", "localhost")], "");
        assert_eq!(denied.status, 401, "{line}: {denied:?}");
    }
    drop(proxy);
    let proxy = StockProxy::haproxy("tcp", served.resp());
    let mut resp = TcpStream::connect(proxy.address()).unwrap();
    resp.set_read_timeout(Some(PATIENCE)).unwrap();
    resp.write_all(b"TG.RESET api a\r\nQUIT\r\n").unwrap();
    let mut replies = String::new();
    resp.read_to_string(&mut replies).unwrap();
    assert!(replies.starts_with("-NOAUTH"), "{replies}");
}

/// Sends a raw request. Returns `None` if the server closed the connection.
fn raw(served: &Served, request: &str) -> Option<Reply> {
    let mut client = Client::connect(served.http());
    client.write(request.as_bytes()).unwrap();
    client.read()
}

/// Fault J12.
#[test]
fn a_page_of_another_site_charges_changes_and_reads_nothing() {
    let served = Served::start(&[], Some(OPEN));
    let own = format!("http://{}", served.http());
    let foreign: [&[(&str, &str)]; 7] = [
        &[("origin", "https://evil.example"), ("content-type", "text/plain")],
        &[("origin", "null")],
        &[("origin", "http://127.0.0.1:1")],
        &[("origin", "http://localhost:3000")],
        &[("sec-fetch-site", "cross-site")],
        &[("sec-fetch-site", "same-site")],
        &[("origin", &own), ("origin", "https://evil.example"), ("host", served.http())],
    ];
    for fields in foreign {
        for path in ["check", "peek", "reserve", "refund", "reset", "settle", "simulate"] {
            let line = format!("POST /v1/{path}");
            let denied = ask(served.http(), &line, fields, CHECK);
            assert_eq!(denied.status, 403, "{line} {fields:?}: {denied:?}");
        }
        for line in ["GET /metrics", "GET /v1/authorize/api", "PUT /v1/admin/overrides"] {
            assert_eq!(ask(served.http(), line, fields, "").status, 403, "{line} {fields:?}");
        }
    }
    assert_eq!(remaining(served.http(), "api", "a"), 5, "nothing was charged");
    assert_eq!(remaining(served.http(), "api", "127.0.0.1"), 5, "nothing was charged");
    let page = [("origin", &*own), ("host", served.http()), ("sec-fetch-site", "same-origin")];
    assert_eq!(
        ask(served.http(), "POST /v1/check", &page, CHECK).status,
        200,
        "the server's own page is allowed"
    );
    let typed = [("sec-fetch-site", "none")];
    assert_eq!(
        ask(served.http(), "GET /metrics", &typed, "").status,
        200,
        "an address that a user typed is allowed"
    );
}

/// Fault J12.
#[test]
fn a_public_host_name_is_denied_unless_it_is_listed() {
    let served = Served::start(&[], Some(OPEN));
    let rebound = [("host", "evil.example"), ("origin", "http://evil.example")];
    for fields in [&rebound[..1], &rebound] {
        for line in ["POST /v1/check", "POST /v1/peek", "GET /metrics", "GET /v1/authorize/api"] {
            let denied = ask(served.http(), line, fields, CHECK);
            assert!(matches!(denied.status, 403 | 421), "{line} {fields:?}: {denied:?}");
        }
    }
    assert_eq!(remaining(served.http(), "api", "a"), 5, "nothing was charged");
    let listed = format!("[listen]\nnames = [\"Gate.example\"]\n{OPEN}");
    let served = Served::start(&[], Some(&listed));
    let named = [("host", "gate.example"), ("origin", "https://gate.example")];
    assert_eq!(ask(served.http(), "POST /v1/check", &named, CHECK).status, 200);
    assert_eq!(ask(served.http(), "GET /metrics", &named[..1], "").status, 200);
}

/// Fault J12.
#[test]
fn a_request_that_names_two_hosts_is_denied() {
    let served = Served::start(&[], Some(OPEN));
    let length = CHECK.len();
    for head in [
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\n",
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\nhost: localhost\r\n",
        "POST http://localhost/v1/check HTTP/1.1\r\nhost: evil.example\r\n",
    ] {
        let denied = raw(&served, &format!("{head}content-length: {length}\r\n\r\n{CHECK}"));
        let denied = denied.expect("there is a reply");
        assert_eq!(denied.status, 400, "{head}: {denied:?}");
    }
    let twice = "PUT /v1/admin/overrides HTTP/1.1\r\nhost: localhost\r\nhost: x\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(raw(&served, twice).expect("there is a reply").status, 400);
    assert_eq!(remaining(served.http(), "api", "a"), 5, "nothing was charged");
}

#[test]
fn a_proxy_may_forward_the_headers_of_its_clients_browser() {
    let config = format!("trusted_proxies = [\"127.0.0.1/32\"]\n{OPEN}");
    let trusting = Served::start(&[], Some(&config));
    let plain = Served::start(&[], Some(OPEN));
    let sent = [
        ("origin", "https://shop.example"),
        ("sec-fetch-site", "cross-site"),
        ("x-forwarded-for", "203.0.113.9"),
    ];
    for served in [&trusting, &plain] {
        let passed = ask(served.http(), "GET /v1/authorize/api", &sent, "");
        assert_eq!(passed.status, 200, "{passed:?}");
    }
    let public = [("host", "shop.example"), sent[0], sent[1], sent[2]];
    assert_eq!(ask(trusting.http(), "GET /v1/authorize/api", &public, "").status, 200);
    let old =
        "GET /v1/authorize/api HTTP/1.0\r\nhost: shop.example\r\norigin: https://a.example\r\n\r\n";
    assert_eq!(
        raw(&plain, old).expect("there is a reply").status,
        200,
        "no browser speaks HTTP/1.0"
    );
}

/// By default, nginx uses HTTP/1.0 and adds no forwarding field.
#[test]
fn a_proxy_that_uses_http_1_0_is_not_the_operator() {
    let served = Served::start(&[], Some(OPEN));
    for line in ADMIN_VERBS {
        let mut client = Client::connect(served.http());
        let request = format!("{line} HTTP/1.0\r\nhost: 127.0.0.1\r\ncontent-length: 0\r\n\r\n");
        client.write(request.as_bytes()).unwrap();
        let denied = client.read().expect("there is a reply");
        assert_eq!(denied.status, 403, "{line}: {denied:?}");
        for field in ["via", "forwarded", "x-real-ip", "x-forwarded-for", "x-forwarded-proto"] {
            let denied = ask(served.http(), line, &[(field, "1")], "");
            assert_eq!(denied.status, 403, "{line} with {field}: {denied:?}");
        }
    }
    assert_eq!(ask(served.http(), "GET /v1/policies", &[], "").status, 200);
}

#[test]
fn a_request_without_a_plain_host_charges_and_changes_nothing() {
    let served = Served::start(&[], Some(OPEN));
    for host in ["", "host: evil.com@localhost\r\n", "host: evil.com@127.0.0.1\r\n"] {
        for line in ["POST /v1/check", "POST /v1/reset"] {
            let mut client = Client::connect(served.http());
            let length = CHECK.len();
            let head = format!("{line} HTTP/1.1\r\n{host}content-length: {length}\r\n\r\n{CHECK}");
            client.write(head.as_bytes()).unwrap();
            let denied = client.read().expect("there is a reply");
            assert_eq!(denied.status, 400, "{line} {host:?}: {denied:?}");
            assert_eq!(denied.field("connection"), Some("close"), "the body is not read");
        }
    }
    assert_eq!(remaining(served.http(), "api", "a"), 5);
}

#[test]
fn a_reply_to_an_unread_body_announces_that_the_connection_closes() {
    let served = Served::start(&[], Some(CLOSED));
    for (line, status) in [
        ("POST /livez", 405),
        ("GET /livez", 200),
        ("POST /nothing", 404),
        ("POST /v1/authorize/api", 200),
        ("POST /v1/reset", 403),
    ] {
        let reply = ask(served.http(), line, &[], CHECK);
        assert_eq!((reply.status, reply.field("connection")), (status, Some("close")), "{line}");
    }
    let mut client = Client::connect(served.http());
    for _ in 0..2 {
        client.send("POST /v1/check", &[], CHECK.as_bytes());
        let reply = client.read().expect("there is a reply");
        assert_eq!((reply.status, reply.field("connection")), (200, None));
        client.send("GET /livez", &[], b"");
        assert_eq!(client.read().expect("there is a reply").field("connection"), None);
    }
}
