//! Tests the rows of the fault catalog over HTTP, at least one test per row.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Client, Reply, ask, get, post, remaining};
use serde_json::json;

const CONFIG: &str = r#"
    [policies.api]
    limit = 10
    window = "1h"

    [policies.fast]
    limit = 5000
    window = "1s"
    burst = 1

    [policies.ip]
    limit = 10
    window = "1h"
    key = "ip"

    [policies.by_name]
    limit = 10
    window = "1h"
    key = "header:x-name"

    [policies."quo\"ted\\ é"]
    limit = 10
    window = "1h"
"#;

fn served() -> Served {
    Served::start(&[], Some(CONFIG))
}

/// Starts a server that trusts proxies on this machine.
fn served_to_proxies() -> Served {
    let config = format!("trusted_proxies = [\"127.0.0.0/8\", \"10.0.0.0/8\"]\n{CONFIG}");
    Served::start(&[], Some(&config))
}

fn check(served: &Served, key: &str) -> Reply {
    post(served.http(), "/v1/check", &json!({ "policy": "api", "key": key }).to_string())
}

/// Sends a check whose cost is the given text.
fn check_cost(served: &Served, cost: &str) -> Reply {
    let body = format!(r#"{{"policy":"api","key":"a","cost":{cost}}}"#);
    post(served.http(), "/v1/check", &body)
}

/// Fault A4.
#[test]
fn an_override_that_allows_nothing_is_rejected() {
    let served = served();
    for (numbers, expected) in [
        (r#""limit":0"#, "limit must be at least 1 (got 0)"),
        (r#""limit":1,"window":"0s""#, "window"),
        (r#""limit":1,"burst":0"#, "burst must be at least 1 (got 0)"),
    ] {
        let body = format!(r#"{{"policy":"api","key":"a",{numbers}}}"#);
        let reply = ask(served.http(), "PUT /v1/admin/overrides", &[], &body);
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.problem().contains(expected), "{}", reply.problem());
    }
    assert_eq!(remaining(served.http(), "api", "a"), 10);
}

/// Fault A5.
#[test]
fn a_cost_of_0_charges_nothing() {
    let served = served();
    for _ in 0..3 {
        let look = check_cost(&served, "0").json();
        assert_eq!((&look["allowed"], &look["remaining"]), (&json!(true), &json!(10)));
    }
}

/// Fault A6.
#[test]
fn a_negative_cost_is_rejected_and_refunds_nothing() {
    let served = served();
    check(&served, "a");
    let rejected = check_cost(&served, "-5");
    assert_eq!(rejected.status, 400);
    assert!(
        rejected
            .problem()
            .contains("`cost`: found the number `-5`; expected a whole number from 0"),
        "{rejected:?}"
    );
    assert_eq!(remaining(served.http(), "api", "a"), 9);
    assert_eq!(get(served.http(), "/v1/authorize/ip?cost=-5").status, 400);
}

/// Fault A7.
#[test]
fn a_cost_above_the_capacity_has_no_retry_time() {
    let served = served();
    for never in ["11", "18446744073709551615"] {
        let never = check_cost(&served, never).json();
        assert_eq!((&never["allowed"], &never["retry_after_ms"]), (&json!(false), &json!(null)));
    }
    let never = get(served.http(), "/v1/authorize/ip?cost=11");
    assert_eq!((never.status, never.field("retry-after")), (429, None));
}

/// Fault A11.
#[test]
fn a_wait_below_a_unit_is_rounded_up_and_never_0() {
    let served = served();
    let mut client = Client::connect(served.http());
    let mut seen = 0;
    // 5000 per second: the next request fits after 0.2 ms.
    for _ in 0..200 {
        let one = br#"{"policy":"fast","key":"a"}"#;
        client.send("POST /v1/check", &[], one);
        client.send("POST /v1/check", &[], one);
        for _ in 0..2 {
            let decision = client.read().unwrap().json();
            if decision["allowed"] == false {
                assert_eq!(decision["retry_after_ms"], 1);
                seen += 1;
            }
        }
    }
    assert!(seen > 0, "no request was denied");
}

/// Fault A14.
#[test]
fn a_malformed_number_is_rejected_before_anything_is_charged() {
    let served = served();
    for cost in ["inf", "NaN", "0x10", "1e3", "1.0", "1.5", "\" 1\"", "\"1\"", "01", "true", "null"]
    {
        let rejected = check_cost(&served, cost);
        assert_eq!(rejected.status, 400, "{cost}");
        rejected.problem();
    }
    for cost in ["inf", "0x10", "1e3", "%201", "+1", "1.0", ""] {
        let path = format!("/v1/authorize/ip?cost={cost}");
        assert_eq!(get(served.http(), &path).status, 400, "{cost}");
    }
    assert_eq!(remaining(served.http(), "api", "a"), 10);
    assert_eq!(remaining(served.http(), "ip", "127.0.0.1"), 10);
}

/// Fault D3.
#[test]
fn a_key_above_the_maximum_length_is_rejected() {
    let served = served();
    assert_eq!(check(&served, &"k".repeat(4096)).status, 200);
    let long = check(&served, &"k".repeat(4097));
    assert_eq!(long.status, 400);
    assert_eq!(long.problem(), "the key has 4097 bytes; use at most 4096, or a hash of it");
    let list = json!({"checks": [{"policy": "api", "key": "a"}, {"policy": "api", "key": "k".repeat(5000)}]});
    assert_eq!(post(served.http(), "/v1/check", &list.to_string()).status, 400);
    assert_eq!(remaining(served.http(), "api", "a"), 10);
    let name = "n".repeat(5000);
    assert_eq!(
        ask(served.http(), "GET /v1/authorize/by_name", &[("x-name", &name)], "").status,
        400
    );
    // 10 MiB is rejected before the body is parsed.
    assert_eq!(check(&served, &"k".repeat(10 << 20)).status, 413);
}

/// Fault D7.
#[test]
fn no_client_is_in_the_metrics() {
    let served = served();
    for client in 0..50 {
        check(&served, &format!("client-{client}"));
    }
    let metrics = get(served.http(), "/metrics").body;
    assert!(!metrics.contains("client-"), "{metrics}");
    let of_api =
        metrics.lines().filter(|line| line.starts_with("tallygate_decisions_total{policy=\"api\""));
    // Two outcomes; in memory, the store is the only source.
    assert_eq!(of_api.count(), 2);
}

/// Fault E2.
#[test]
fn a_body_with_a_too_long_length_is_rejected_before_it_arrives() {
    let served = served();
    let mut client = Client::connect(served.http());
    client
        .write(b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 1073741824\r\n\r\n")
        .unwrap();
    let rejected = client.read().unwrap();
    assert_eq!(rejected.status, 413);
    rejected.problem();
}

/// Fault E2.
#[test]
fn an_endless_body_ends_in_bounded_memory() {
    let served = served();
    let mut client = Client::connect(served.http());
    client
        .write(b"POST /v1/check HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n")
        .unwrap();
    let chunk = [b"10000\r\n".as_slice(), &[b' '; 0x1_0000], b"\r\n"].concat();
    let mut sent = 0;
    // Sends as much as the server accepts, at most 1 GiB.
    while sent < 1 << 30 && client.write(&chunk).is_ok() {
        sent += chunk.len();
    }
    assert!(sent < 64 << 20, "the server accepted {sent} bytes");
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid())).unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib < 200 * 1024, "{peak_kib} KiB");
    assert_eq!(check(&served, "a").status, 200);
}

/// Fault E2.
#[test]
fn a_client_that_sends_too_much_before_reading_still_gets_the_error() {
    let served = served();
    let mut client = Client::connect(served.http());
    client.send("POST /v1/check", &[], &[b' '; 4 << 20]);
    assert_eq!(client.read().unwrap().status, 413);
}

/// Fault E2.
#[test]
fn an_endless_head_is_rejected() {
    let served = served();
    let mut client = Client::connect(served.http());
    client.write(b"GET /livez HTTP/1.1\r\nhost: t\r\n").unwrap();
    let line = format!("x-filler: {}\r\n", "x".repeat(1000));
    let mut sent = 0;
    while sent < 16 << 20 && client.write(line.as_bytes()).is_ok() {
        sent += line.len();
    }
    assert!(sent < 16 << 20, "the server reads without a bound");
}

/// Fault E8.
#[test]
fn no_error_is_longer_than_a_screen() {
    let served = served();
    for (bytes, statuses) in [(30_000, &[400, 404][..]), (900_000, &[413])] {
        let long = "x".repeat(bytes);
        for body in [
            format!(r#"{{"policy":"{long}","key":"a"}}"#),
            format!(r#"{{"policy":"api","key":"a","tier":"{long}"}}"#),
            format!(r#"{{"{long}":1}}"#),
            format!(r#"{{"policy":"api","key":"a","cost":"{long}"}}"#),
            format!(r#"{{"checks":[{{"policy":"{long}","key":"a"}}]}}"#),
            format!(r#"{{"checks":[{{"{long}":"a"}}]}}"#),
        ] {
            let reply = post(served.http(), "/v1/check", &body);
            assert!(statuses.contains(&reply.status), "{reply:?}");
            assert!(reply.body.len() < 1024, "{} bytes", reply.body.len());
            reply.problem();
        }
    }
}

/// Sends a RESP command and returns the reply.
fn resp(served: &Served, words: &[&[u8]]) -> String {
    let mut request = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        request.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        request.extend_from_slice(word);
        request.extend_from_slice(b"\r\n");
    }
    let mut stream = TcpStream::connect(served.resp()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    stream.write_all(&request).unwrap();
    let mut reply = Vec::new();
    // A reply of six numbers has at most eight lines; the first has their count.
    while reply.iter().filter(|byte| **byte == b'\n').count() < 7 {
        let mut piece = [0; 512];
        let read = stream.read(&mut piece).unwrap();
        assert!(read > 0, "{reply:?}");
        reply.extend_from_slice(&piece[..read]);
    }
    String::from_utf8(reply).unwrap()
}

/// Fault E14.
#[test]
fn a_key_is_the_same_over_http_and_resp() {
    let served = served();
    for key in ["plain", "nul\0inside", "\0", "ümläut 🦀", "a\r\nb", ""] {
        assert_eq!(check(&served, key).json()["remaining"], 9, "{key:?}");
        let reply = resp(&served, &[b"TG.CHECK", b"api", key.as_bytes()]);
        assert!(reply.starts_with("*6\r\n:1\r\n:10\r\n:8\r\n"), "{key:?}: {reply:?}");
        assert_eq!(check(&served, key).json()["remaining"], 7, "{key:?}");
    }
}

/// Fault E14.
#[test]
fn invalid_utf8_is_rejected_in_json_and_escaped_if_it_came_over_resp() {
    let served = served();
    for body in [br#"{"policy":"api","key":"#.as_slice(), br#"{"policy":"api","key":"\ud800"}"#] {
        let mut client = Client::connect(served.http());
        let mut body = body.to_vec();
        if body.ends_with(b":") {
            body.extend_from_slice(b"\"\xff\xfe\"}");
        }
        client.send("POST /v1/check", &[], &body);
        let rejected = client.read().unwrap();
        assert_eq!(rejected.status, 400);
        rejected.problem();
    }
    resp(&served, &[b"TG.CHECK", b"api", b"\xff\xfe"]);
    let client = get(served.http(), "/v1/admin/client?key=%FF%FE").json();
    assert_eq!(client["key_encoded"], "%FF%FE");
    assert_eq!(client["policies"][0]["remaining"], 9, "{client}");
}

/// Fault E15.
#[test]
fn the_error_of_invalid_json_names_its_position() {
    let served = served();
    let deep = "[".repeat(200_000);
    for (body, expected) in [
        (
            r#"{"policy":"api","policy":"api","key":"a"}"#.to_owned(),
            "`policy` is set twice; remove one of them (line 1, column",
        ),
        (
            r#"{"policy":"api","key":"a","cost":1e400}"#.to_owned(),
            "`cost`: the number is too large (line 1, column",
        ),
        (
            r#"{"policy":"api","key":"a","cost":18446744073709551616}"#.to_owned(),
            "`cost`: found the number `1.8446744073709552e+19`; expected a whole number",
        ),
        (
            r#"{"policy":"api","key":"a"}}"#.to_owned(),
            "found text after the end of the JSON; remove it (line 1, column 27)",
        ),
        (r#"{"policy":"api","key":["a"]}"#.to_owned(), "`key`: found a list; expected a string"),
        (r#"["api","a"]"#.to_owned(), "found a list; expected an object"),
        (
            "{\"policy\":\"api\",\n\"key\":}".to_owned(),
            "`key`: not valid JSON: expected a value, such as \"text\", 5, true or {} (line 2, column 7)",
        ),
        (String::new(), "found nothing; expected a JSON object"),
        (
            "policy=api&key=a".to_owned(),
            "found text that is not JSON; expected an object, such as {",
        ),
        (deep.clone(), "found a list; expected an object"),
        (format!(r#"{{"policy":{deep}"#), "`policy`: found a list; expected a string"),
        (
            format!(r#"{{"checks":{}"#, &deep[..20_000]),
            "item 0: found a list; expected an object (line 1, column 11)",
        ),
        (
            format!(r#"{{"checks":[{}"#, r#"{"policy":"api","key":"a"},"#.repeat(1_000)),
            "item 1000: found nothing; expected a JSON object, such as {\"name\": \"value\"} (line 1, column 27011)",
        ),
        (
            format!(
                r#"{{"checks":[{}{{"kye":1}}]}}"#,
                r#"{"policy":"api","key":"a"},"#.repeat(1_000)
            ),
            "item 1000: unknown field `kye`; did you mean `key`? (line 1, column 27017)",
        ),
        (
            format!(
                r#"{{"checks":[{}{{}}],"kye":1}}"#,
                r#"{"policy":"api","key":"a"},"#.repeat(1_000)
            ),
            "unknown field `kye`",
        ),
    ] {
        let reply = post(served.http(), "/v1/check", &body);
        assert_eq!(reply.status, 400, "{reply:?}");
        assert!(reply.problem().starts_with(expected), "{:?} is not {expected:?}", reply.problem());
    }
    let denied = post(served.http(), "/v1/check", &format!(r#"{{"checks":{deep}"#));
    assert_eq!(
        (denied.status, denied.problem()),
        (413, "item 0: it has 199999 bytes; send at most 32768".into())
    );
    assert_eq!(remaining(served.http(), "api", "a"), 10);
    // A number above 2⁵³ keeps all its digits.
    let exact = post(
        served.http(),
        "/v1/reserve",
        r#"{"policy":"api","key":"a","cost":9007199254740993,"ttl_ms":1}"#,
    );
    assert_eq!((exact.status, &exact.json()["allowed"]), (200, &json!(false)));
}

/// Fault G1.
#[test]
fn an_invalid_configuration_is_reported_and_changes_nothing() {
    let served = served();
    check(&served, "a");
    std::fs::write(served.config(), "[policies.api]\nlimit = 0\nwindow = \"1h\"\n").unwrap();
    let rejected = post(served.http(), "/v1/admin/reload", "");
    assert_eq!(rejected.status, 422);
    assert!(
        rejected.problem().contains(":1:1: policy \"api\": limit must be at least 1 (got 0)"),
        "{rejected:?}"
    );
    assert_eq!(remaining(served.http(), "api", "a"), 9);
    let metrics = get(served.http(), "/metrics").body;
    assert!(metrics.contains("tallygate_reloads_total{outcome=\"rejected\"}"), "{metrics}");

    std::fs::write(
        served.config(),
        crate::common::with_admin("[policies.api]\nlimit = 20\nwindow = \"1h\"\n"),
    )
    .unwrap();
    assert_eq!(
        post(served.http(), "/v1/admin/reload", "").json(),
        json!({"reloaded": true, "needs_restart": []})
    );
    assert_eq!(remaining(served.http(), "api", "a"), 19);
}

/// Fault G6.
#[test]
fn the_error_of_a_misspelled_field_suggests_the_nearest_name() {
    let served = served();
    for (path, body, expected) in [
        (
            "/v1/check",
            r#"{"polciy":"api","key":"a"}"#,
            "unknown field `polciy`; did you mean `policy`?",
        ),
        ("/v1/check", r#"{"chekcs":[]}"#, "unknown field `chekcs`; did you mean `checks`?"),
        ("/v1/reserve", r#"{"ttl":1}"#, "unknown field `ttl`; did you mean"),
        (
            "/v1/settle",
            r#"{"reservatoin":"x"}"#,
            "unknown field `reservatoin`; did you mean `reservation`?",
        ),
    ] {
        let reply = post(served.http(), path, body);
        assert_eq!(reply.status, 400, "{body}");
        assert!(reply.problem().starts_with(expected), "{}", reply.problem());
    }
}

/// Returns the remaining units of the client behind some hops, after one request.
fn remaining_behind(served: &Served, forwarded: &[&str]) -> String {
    let fields: Vec<_> = forwarded.iter().map(|line| ("X-Forwarded-For", *line)).collect();
    let reply = ask(served.http(), "GET /v1/authorize/ip", &fields, "");
    reply.field("x-ratelimit-remaining").unwrap_or_else(|| panic!("{reply:?}")).to_owned()
}

/// Fault H1.
#[test]
fn a_forged_hop_changes_nothing() {
    let served = served_to_proxies();
    assert_eq!(remaining_behind(&served, &["203.0.113.9"]), "9");
    assert_eq!(remaining_behind(&served, &["6.6.6.6, 203.0.113.9"]), "8");
    assert_eq!(remaining_behind(&served, &["7.7.7.7", "203.0.113.9, 10.0.0.3"]), "7");
    assert_eq!(remaining_behind(&served, &["203.0.113.10"]), "9");
    // The right-most valid hop is the proxy itself.
    assert_eq!(remaining_behind(&served, &["203.0.113.9, garbage"]), "9");
    assert_eq!(remaining_behind(&served, &[]), "8");

    let strict = Served::start(&[], Some("[policies.ip]\nlimit = 10\nwindow = \"1h\"\n"));
    assert_eq!(remaining_behind(&strict, &["203.0.113.9"]), "9");
    assert_eq!(remaining_behind(&strict, &["203.0.113.10"]), "8");
}

/// Fault H2.
#[test]
fn rotating_through_a_64_is_one_client() {
    let served = served_to_proxies();
    assert_eq!(remaining_behind(&served, &["2001:db8:1:2::1"]), "9");
    assert_eq!(remaining_behind(&served, &["2001:db8:1:2:ffff:ffff:ffff:ffff"]), "8");
    assert_eq!(remaining_behind(&served, &["2001:db8:1:3::1"]), "9");
}

/// Fault H3.
#[test]
fn a_mapped_address_is_the_same_client() {
    let served = served_to_proxies();
    assert_eq!(remaining_behind(&served, &["203.0.113.9"]), "9");
    assert_eq!(remaining_behind(&served, &["::ffff:203.0.113.9"]), "8");
    assert_eq!(remaining_behind(&served, &["::ffff:cb00:7109"]), "7");
}

/// Fault H5.
#[test]
fn neither_a_name_nor_a_parameter_injects_a_header() {
    let served = served();
    let reply = get(served.http(), "/v1/authorize/quo%22ted%5C%20%C3%A9");
    assert_eq!(reply.status, 200);
    assert_eq!(reply.field("ratelimit"), Some("\"quo\\\"ted\\\\ %C3%A9\";r=9;t=360"));
    for path in ["/v1/authorize/a%0D%0Ax-evil:%201", "/v1/authorize/ip?tier=%0D%0Ax-evil:%201"] {
        let reply = get(served.http(), path);
        assert!(matches!(reply.status, 400 | 404), "{reply:?}");
        assert!(reply.field("x-evil").is_none());
        assert!(!reply.body.contains(['\r', '\n']), "{reply:?}");
        reply.problem();
    }
}

const FOR_OPERATORS: [&str; 8] = [
    "POST /v1/refund",
    "POST /v1/reset",
    "GET /v1/admin/hot",
    "GET /v1/admin/client?key=a",
    "GET /v1/admin/overrides",
    "PUT /v1/admin/overrides",
    "DELETE /v1/admin/overrides?policy=api&key=a",
    "POST /v1/admin/reload",
];

/// Fault H7.
#[test]
fn a_request_from_a_proxy_or_a_page_is_not_from_the_operator() {
    let served = served();
    for line in FOR_OPERATORS {
        for sent in [
            ("x-forwarded-for", "203.0.113.9"),
            ("forwarded", "for=203.0.113.9"),
            ("x-real-ip", "203.0.113.9"),
            ("x-forwarded-proto", "https"),
            ("via", "1.1 proxy"),
            ("origin", "https://evil.example"),
        ] {
            assert_eq!(ask(served.http(), line, &[sent], "").status, 403, "{line} {sent:?}");
        }
        assert_ne!(ask(served.http(), line, &[], "").status, 403, "{line}");
    }
}

/// A proxy may send no header about its client.
///
/// Fault H7.
#[test]
fn a_trusted_proxy_is_not_the_operator() {
    let served = served_to_proxies();
    for line in FOR_OPERATORS {
        assert_eq!(ask(served.http(), line, &[], "").status, 403, "{line}");
    }
    let output = Command::new("redis-cli")
        .args(["-p", served.resp_port(), "TG.RESET", "api", "alice"])
        .output()
        .expect("redis-cli is installed");
    let reply = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(reply.starts_with("NOPERM"), "{reply}");
}

/// DNS rebinding: an attacker's page can make its own host name resolve to this machine.
///
/// Fault H7.
#[test]
fn a_rebound_host_name_is_not_the_operator() {
    let served = served();
    for line in FOR_OPERATORS {
        for name in [
            "evil.example",
            "evil.example:8080",
            "localhost.evil.example",
            "0.0.0.0",
            "192.0.2.7",
            "a b",
        ] {
            let rejected = ask(served.http(), line, &[("host", name)], "");
            assert!(matches!(rejected.status, 400 | 403 | 421), "{line} {name}: {rejected:?}");
            rejected.problem();
        }
        for name in
            ["localhost", "LOCALHOST:8080", "127.0.0.1", "127.0.0.2:80", "[::1]", "[::1]:8080"]
        {
            let passed = ask(served.http(), line, &[("host", name)], "");
            assert!(!matches!(passed.status, 403 | 421), "{line} {name}: {passed:?}");
        }
    }
}

/// Faults H7, H10.
#[test]
fn with_a_token_only_the_token_counts_and_it_is_never_shown() {
    let config = format!("{CONFIG}\n[auth]\nadmin = [\"env:ADMIN\"]\n");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", "s3cret-token-16+")]);
    for line in FOR_OPERATORS {
        for wrong in [
            None,
            Some("Bearer s3cret-token-16"),
            Some("Bearer "),
            Some("s3cret-token-16+"),
            Some("Basic czNjcmV0"),
        ] {
            let fields: Vec<_> = wrong.iter().map(|given| ("authorization", *given)).collect();
            let rejected = ask(served.http(), line, &fields, "");
            assert_eq!(rejected.status, 401, "{line} {wrong:?}");
            assert_eq!(rejected.field("www-authenticate"), Some("Bearer"));
            assert!(!rejected.body.contains("s3cret"), "{rejected:?}");
        }
        let right =
            [("authorization", "Bearer s3cret-token-16+"), ("x-forwarded-for", "203.0.113.9")];
        let passed = ask(served.http(), line, &right, "");
        assert!(!matches!(passed.status, 401 | 403), "{line}: {passed:?}");
    }
    assert_eq!(check(&served, "a").status, 200);
}

/// Fault H8.
#[test]
fn different_policies_and_keys_never_share_a_quota() {
    let config = "[policies.\"a:b\"]\nlimit = 10\nwindow = \"1h\"\n[policies.a]\nlimit = 10\nwindow = \"1h\"\n";
    let served = Served::start(&[], Some(config));
    for (policy, key) in [("a:b", "c"), ("a", "b:c"), ("a", "c")] {
        let body = json!({ "policy": policy, "key": key }).to_string();
        assert_eq!(post(served.http(), "/v1/check", &body).json()["remaining"], 9, "{body}");
    }
}

/// Fault I1.
#[test]
fn no_request_is_dropped_on_shutdown() {
    let mut served = served();
    let address = served.http().to_owned();
    let answered = AtomicU32::new(0);
    let code = std::thread::scope(|threads| {
        for client in 0..8 {
            let (address, answered) = (&address, &answered);
            threads.spawn(move || {
                let body = format!(r#"{{"policy":"api","key":"{client}"}}"#);
                let mut client = Client::connect(address);
                loop {
                    client.send("POST /v1/check", &[], body.as_bytes());
                    let reply = client.read().expect("every request that was sent is answered");
                    assert_eq!(reply.status, 200);
                    answered.fetch_add(1, Ordering::Relaxed);
                    if reply.field("connection") == Some("close") {
                        assert!(client.is_closed());
                        return;
                    }
                    // The pause of a real client. Most connections are idle when the signal arrives; a server could
                    // close these too early.
                    std::thread::sleep(Duration::from_millis(20));
                }
            });
        }
        while answered.load(Ordering::Relaxed) < 100 {
            std::thread::yield_now();
        }
        served.stop()
    });
    assert_eq!(code, Some(0));
}

/// Fault I1.
#[test]
fn a_request_that_has_started_is_answered_after_the_signal() {
    let mut served = served();
    let mut client = Client::connect(served.http());
    client
        .write(b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 26\r\n\r\n{\"policy\":")
        .unwrap();
    let mut other = Client::connect(served.http());
    // This reply shows that the server has also read the first request.
    other.send("GET /livez", &[], b"");
    assert_eq!(other.read().unwrap().status, 200);
    served.signal("TERM");
    // An idle connection is closed.
    assert!(other.is_closed());
    client.write(b"\"api\",\"key\":\"a\"}").unwrap();
    assert_eq!(client.read().unwrap().json()["remaining"], 9);
    assert_eq!(served.wait_for_exit(), Some(0));
}

/// Connections that are not accepted yet when the signal arrives.
///
/// Fault I1.
#[test]
fn connections_in_the_accept_queue_are_answered_on_shutdown() {
    let mut served = served();
    served.signal("STOP");
    let mut clients: Vec<_> = (0..20).map(|_| Client::connect(served.http())).collect();
    for client in &mut clients {
        client.send("GET /livez", &[], b"");
    }
    served.signal("TERM");
    served.signal("CONT");
    for client in &mut clients {
        assert_eq!(client.read().expect("there is a reply").status, 200);
    }
    assert_eq!(served.wait_for_exit(), Some(0));
}

/// Fault I1.
#[test]
fn the_server_is_unready_before_it_stops() {
    let mut served = served();
    let mut client = Client::connect(served.http());
    client.send("GET /readyz", &[], b"");
    assert_eq!(client.read().unwrap().status, 200);
    served.signal("TERM");
    let unready = loop {
        client.send("GET /readyz", &[], b"");
        let reply = client.read().expect("a reply arrives during the upload");
        if reply.status != 200 {
            break reply;
        }
    };
    assert_eq!((unready.status, unready.field("connection")), (503, Some("close")));
    assert_eq!(served.wait_for_exit(), Some(0));
}
