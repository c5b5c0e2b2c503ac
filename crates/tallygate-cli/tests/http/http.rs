//! Tests the HTTP surface of the real binary over a socket.

use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Client, ask, get, post, remaining};
use serde_json::{Value, json};
use tallygate_testkit::servers::wait_until;

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

const CONFIG: &str = r#"
    [policies.api]
    limit = 10
    window = "1h"
    [policies.api.tiers.pro]
    limit = 100

    [policies.login]
    algorithm = "sliding_window_log"
    limit = 2
    window = "1h"

    [policies.several]
    [[policies.several.limits]]
    name = "many"
    limit = 100
    window = "1h"
    [[policies.several.limits]]
    name = "few"
    algorithm = "fixed_window"
    limit = 3
    window = "24h"

    [policies.by_token]
    limit = 2
    window = "1h"
    key = "header:x-api-key"
"#;

fn served() -> Served {
    Served::start(&[], Some(CONFIG))
}

#[test]
fn a_check_returns_every_field() {
    let served = served();
    let reply = post(served.http(), "/v1/check", r#"{"policy":"api","key":"alice","cost":4}"#);
    assert_eq!((reply.status, reply.field("content-type")), (200, Some("application/json")));
    let expected = json!({
        "allowed": true, "policy": "api", "limit": 10, "remaining": 6, "retry_after_ms": 0,
        "reset_after_ms": 1_440_000, "delay_ms": 0, "window_ms": 3_600_000, "source": "store",
    });
    assert_eq!(reply.json(), expected);
}

#[test]
fn a_denied_check_is_a_reply_with_a_retry_time() {
    let served = served();
    let check = |cost| {
        let body = format!(r#"{{"policy":"api","key":"alice","cost":{cost}}}"#);
        post(served.http(), "/v1/check", &body)
    };
    check(10);
    let denied = check(1);
    assert_eq!((denied.status, &denied.json()["allowed"]), (200, &Value::Bool(false)));
    let wait = denied.json()["retry_after_ms"].as_u64().unwrap();
    assert!((350_000..=360_000).contains(&wait), "{wait}");
}

#[test]
fn a_tier_has_its_own_limit() {
    let served = served();
    let reply = post(served.http(), "/v1/check", r#"{"policy":"api","key":"a","tier":"pro"}"#);
    assert_eq!(reply.json()["limit"], 100);
}

#[test]
fn the_checks_of_a_list_are_decided_one_by_one_in_order() {
    let served = served();
    let body = r#"{"checks":[{"policy":"login","key":"a"},{"policy":"login","key":"a","cost":2},
        {"policy":"login","key":"a"},{"policy":"api","key":"a"}]}"#;
    let reply = post(served.http(), "/v1/check", body).json();
    let results = reply["results"].as_array().unwrap();
    let allowed: Vec<_> = results.iter().map(|result| result["allowed"] == true).collect();
    assert_eq!(allowed, [true, false, true, true]);
}

#[test]
fn an_empty_list_is_an_error_whatever_it_is_called() {
    let served = served();
    for (path, body) in [
        ("/v1/check", r#"{"checks":[]}"#),
        ("/v1/check", r#"{"all":[]}"#),
        ("/v1/peek", r#"{"checks":[]}"#),
        ("/v1/refund", r#"{"checks":[]}"#),
    ] {
        let reply = post(served.http(), path, body);
        assert_eq!(reply.status, 400, "{path} {body}");
        assert_eq!(reply.problem(), "there is nothing to check; send at least one item");
    }
}

#[test]
fn all_are_charged_or_none_and_the_denying_one_is_named() {
    let served = served();
    let all = |cost| {
        let body = format!(
            r#"{{"all":[{{"policy":"api","key":"a"}},{{"policy":"login","key":"b","cost":{cost}}}]}}"#
        );
        post(served.http(), "/v1/check", &body).json()
    };
    let allowed = all(2);
    assert_eq!((&allowed["allowed"], &allowed["denied_index"]), (&json!(true), &Value::Null));
    let denied = all(1);
    assert_eq!((&denied["allowed"], &denied["denied_index"]), (&json!(false), &json!(1)));
    assert_eq!(denied["policy"], "login");
    assert_eq!(remaining(served.http(), "api", "a"), 9);
}

#[test]
fn the_reply_to_all_describes_one_item() {
    let served = served();
    let all =
        |items: &str| post(served.http(), "/v1/check", &format!(r#"{{"all":[{items}]}}"#)).json();
    let described = |reply: &Value| {
        ["policy", "limit", "remaining", "window_ms"]
            .map(|field| reply[field].to_string())
            .join(" ")
    };
    let api = |cost| format!(r#"{{"policy":"api","key":"a","cost":{cost}}}"#);
    let login = |cost| format!(r#"{{"policy":"login","key":"a","cost":{cost}}}"#);
    let several = r#"{"policy":"several","key":"a","cost":0}"#;
    // If all are allowed, it is the item with the least remaining, wherever it is in the list.
    for items in [format!("{},{several}", api(1)), format!("{several},{}", api(1))] {
        assert_eq!(described(&all(&items)), r#""several" 3 3 86400000"#, "{items}");
    }
    // If several are denied, it is the first of them, even if another one has less remaining.
    assert!(all(&login(2))["allowed"].as_bool().unwrap());
    let denied = all(&format!("{},{}", api(9), login(1)));
    assert_eq!(
        (&denied["denied_index"], described(&denied)),
        (&json!(0), r#""api" 10 8 3600000"#.into())
    );
    // The wait is long enough for all items: the one of `api` alone would be 360 s.
    assert!(denied["retry_after_ms"].as_u64().unwrap() > 3_000_000, "{denied}");
}

#[test]
fn an_error_in_a_list_names_its_index_and_nothing_is_charged() {
    let served = served();
    for list in ["checks", "all"] {
        for (item, status, expected) in [
            (r#"{"policy":"api"}"#, 400, "item 1: missing field `key`"),
            (
                r#"{"policy":"api","key":"a","cst":1}"#,
                400,
                "item 1: unknown field `cst`; did you mean `cost`?",
            ),
            (
                r#"{"policy":"api","key":"a","cost":-1}"#,
                400,
                "item 1: `cost`: found the number `-1`; expected a whole number",
            ),
            (
                r#"{"policy":"api","key":"a","tier":"gold"}"#,
                400,
                "item 1: no tier is named \"gold\"",
            ),
            (
                r#"{"policy":"apo","key":"a"}"#,
                404,
                "item 1: no policy is named \"apo\"; did you mean \"api\"?",
            ),
            (r#"["api","a"]"#, 400, "item 1: found a list; expected an object"),
        ] {
            let body = format!(r#"{{"{list}":[{{"policy":"api","key":"a"}},{item}]}}"#);
            let reply = post(served.http(), "/v1/check", &body);
            assert_eq!(reply.status, status, "{body}");
            assert!(reply.problem().starts_with(expected), "{body}: {}", reply.problem());
        }
    }
    assert_eq!(remaining(served.http(), "api", "a"), 10);
}

#[test]
fn a_list_excludes_other_fields() {
    let served = served();
    for body in [
        r#"{"policy":"api","key":"a","checks":[]}"#,
        r#"{"checks":[],"all":[]}"#,
        r#"{"all":[]}"#,
        "{}",
    ] {
        assert_eq!(post(served.http(), "/v1/check", body).status, 400, "{body}");
    }
    assert_eq!(
        post(served.http(), "/v1/peek", r#"{"all":[{"policy":"api","key":"a"}]}"#).status,
        400
    );
}

#[test]
fn a_peek_charges_nothing_a_refund_returns_units_and_a_reset_clears_usage() {
    let served = served();
    let body = r#"{"policy":"api","key":"a","cost":3}"#;
    let left = |verb: &str| post(served.http(), verb, body).json()["remaining"].clone();
    assert_eq!(left("/v1/check"), 7);
    // A peek returns what a check would.
    assert_eq!(left("/v1/peek"), 4);
    assert_eq!(left("/v1/check"), 4);
    assert_eq!(left("/v1/refund"), 7);
    assert_eq!(left("/v1/reset"), 10);
}

#[test]
fn a_reservation_is_settled_once_and_in_time() {
    let served = served();
    let reserve = |key: &str, ttl_ms: u64| {
        let body = format!(r#"{{"policy":"api","key":"{key}","cost":6,"ttl_ms":{ttl_ms}}}"#);
        post(served.http(), "/v1/reserve", &body).json()
    };
    let settle = |reservation: &Value| {
        let body = format!(r#"{{"reservation":{reservation},"actual":2}}"#);
        post(served.http(), "/v1/settle", &body)
    };
    let reserved = reserve("a", 60_000);
    assert_eq!((&reserved["allowed"], &reserved["remaining"]), (&json!(true), &json!(4)));
    let denied = reserve("a", 60_000);
    assert_eq!((&denied["allowed"], &denied["reservation"]), (&json!(false), &Value::Null));

    let settled = settle(&reserved["reservation"]);
    assert_eq!((settled.status, &settled.json()["remaining"]), (200, &json!(8)));
    let second = settle(&reserved["reservation"]);
    assert_eq!(second.status, 409);
    assert!(second.problem().contains("already settled"));
    assert_eq!(settle(&json!("0".repeat(32))).status, 404);
    assert_eq!(settle(&json!("no such thing")).status, 404);

    // A settlement within the millisecond succeeds; then try with another client.
    let mut clients = 0;
    let mut short = reserve("short", 1);
    wait_until("a settlement comes after the end of its reservation", PATIENCE, || {
        let is_late = settle(&short["reservation"]).status == 404;
        clients += 1;
        if !is_late {
            short = reserve(&format!("short-{clients}"), 1);
        }
        is_late
    });
}

#[test]
fn the_denying_limit_is_named_if_there_are_several() {
    let served = served();
    let check = |policy: &str| {
        let body = format!(r#"{{"policy":"{policy}","key":"a","cost":4}}"#);
        post(served.http(), "/v1/check", &body).json()
    };
    assert_eq!(check("several")["denied_by"], "few");
    assert_eq!(check("login")["denied_by"], Value::Null);
}

#[test]
fn unknown_paths_methods_and_names_are_errors() {
    let served = served();
    let unknown = post(served.http(), "/v1/check", r#"{"policy":"nothing","key":"a"}"#);
    assert_eq!((unknown.status, &*unknown.problem()), (404, "no policy is named \"nothing\""));
    let tier = post(served.http(), "/v1/check", r#"{"policy":"api","key":"a","tier":"gold"}"#);
    assert_eq!(
        (tier.status, &*tier.problem()),
        (400, "no tier is named \"gold\"; the only tier is pro")
    );
    for path in ["/v1", "/v1/check/", "/v2/check", "/v1/authorize/", "/v1/authorize/a/b"] {
        assert_eq!(get(served.http(), path).status, 404, "{path}");
    }
    let method = get(served.http(), "/v1/check");
    assert_eq!((method.status, method.field("allow")), (405, Some("POST")));
    method.problem();
    let method = ask(served.http(), "DELETE /livez", &[], "");
    assert_eq!((method.status, method.field("allow")), (405, Some("GET, HEAD")));
}

#[test]
fn authorize_allows_and_then_denies() {
    let served = served();
    let authorize = |query: &str| {
        ask(served.http(), &format!("GET /v1/authorize/by_token{query}"), &[("X-API-Key", "k")], "")
    };
    let passed = authorize("");
    assert_eq!((passed.status, &*passed.body), (200, ""));
    assert_eq!(passed.field("x-ratelimit-limit"), Some("2"));
    assert_eq!(passed.field("x-ratelimit-remaining"), Some("1"));
    assert_eq!(passed.field("x-ratelimit-reset"), Some("1800"));
    assert_eq!(passed.field("ratelimit-policy"), Some("\"by_token\";q=2;w=3600"));
    assert_eq!(passed.field("ratelimit"), Some("\"by_token\";r=1;t=1800"));
    assert_eq!(passed.field("retry-after"), None);
    authorize("");

    let denied = authorize("");
    assert_eq!((denied.status, denied.field("x-ratelimit-remaining")), (429, Some("0")));
    let wait: u64 = denied.field("retry-after").unwrap().parse().unwrap();
    assert!((1790..=1800).contains(&wait), "{wait}");
    assert_eq!(denied.field("ratelimit"), Some(&*format!("\"by_token\";r=0;t={wait}")));
    let expected = json!({
        "type": "https://iana.org/assignments/http-problem-types#quota-exceeded",
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429, "violated-policies": ["by_token"],
    });
    assert_eq!(denied.json(), expected);
    assert_eq!(denied.field("content-type"), Some("application/problem+json"));

    assert_eq!(authorize("?deny=403").status, 403);
    let x = authorize("?headers=x");
    assert!(x.field("x-ratelimit-limit").is_some() && x.field("ratelimit").is_none());
    let none = authorize("?headers=none");
    assert!(none.field("x-ratelimit-limit").is_none() && none.field("retry-after").is_some());
    for wrong in
        ["?deny=200", "?deny=500", "?deny=x", "?headers=y", "?cost=-1", "?tier=gold", "?dney=403"]
    {
        assert_eq!(authorize(wrong).status, 400, "{wrong}");
    }
    let expected = "deny must be a status from 400 to 499 (got x)";
    assert!(authorize("?deny=x").problem().contains(expected));
}

#[test]
fn a_missing_key_differs_from_a_denial() {
    let served = served();
    let authorize = |query: &str, fields: &[(&str, &str)]| {
        ask(served.http(), &format!("POST /v1/authorize/by_token{query}"), fields, "")
    };
    for query in ["", "?deny=403"] {
        let missing = authorize(query, &[]);
        assert_eq!((missing.status, missing.field("www-authenticate")), (401, Some("Key")));
        assert_eq!(
            missing.problem(),
            "missing header field x-api-key; the policy uses it as the key"
        );
        assert_eq!(authorize(query, &[("x-api-key", "")]).status, 401);
        assert_eq!(authorize(query, &[("x-api-key", "a"), ("x-api-key", "b")]).status, 401);
        assert_eq!(authorize(query, &[("x-api-key", "a")]).status, 200);
    }
    assert_eq!(authorize("", &[("x-api-key", "a")]).status, 429);
}

#[test]
fn an_unlimited_client_has_no_limit_rather_than_a_very_large_one() {
    let config = format!("{CONFIG}[policies.api.overrides.vip]\naccess = \"unlimited\"\n");
    let served = Served::start(&[], Some(&config));
    let reply = post(served.http(), "/v1/check", r#"{"policy":"api","key":"vip","cost":1000}"#);
    let expected = json!({
        "allowed": true, "policy": "api", "limit": null, "remaining": null, "retry_after_ms": 0,
        "reset_after_ms": 0, "delay_ms": 0, "window_ms": null, "source": "store",
    });
    assert_eq!(reply.json(), expected);
    let described = post(served.http(), "/v1/check?headers=all", r#"{"policy":"api","key":"vip"}"#);
    for name in [
        "x-ratelimit-limit",
        "x-ratelimit-remaining",
        "x-ratelimit-reset",
        "ratelimit",
        "ratelimit-policy",
    ] {
        assert_eq!(described.field(name), None, "{name}");
    }
}

#[test]
fn a_shadow_limit_is_named_in_the_reply_and_logged_at_debug_level() {
    let config = r#"
        [policies.trial]
        [[policies.trial.limits]]
        name = "real"
        limit = 10
        window = "1h"
        [[policies.trial.limits]]
        name = "stricter"
        limit = 1
        window = "1h"
        shadow = true
    "#;
    let served = Served::start(&["--log", "debug"], Some(config));
    let check = || post(served.http(), "/v1/check", r#"{"policy":"trial","key":"a"}"#).json();
    assert_eq!(check().get("shadow_denied_by"), None);
    let second = check();
    assert_eq!(
        (&second["allowed"], &second["shadow_denied_by"]),
        (&json!(true), &json!("stricter"))
    );
    wait_until("the log has the event", PATIENCE, || {
        let log = served.log();
        log.contains("a shadow limit would have denied the request")
            && log.contains("limit=\"stricter\"")
    });
}

const SMOOTH: &str = r#"
    [policies.smooth]
    algorithm = "leaky_bucket"
    limit = 5
    window = "1s"
    burst = 100
    key = "header:x-api-key"
"#;

#[test]
fn authorize_reports_the_delay_of_a_leaky_bucket() {
    let served = Served::start(&[], Some(SMOOTH));
    let authorize = |query: &str| {
        let path = format!("GET /v1/authorize/smooth{query}");
        ask(served.http(), &path, &[("x-api-key", "a")], "")
    };
    let first = authorize("");
    assert_eq!((first.status, first.field("x-ratelimit-delay-ms")), (200, None));
    let second = authorize("?cost=10");
    let delay: u64 = second.field("x-ratelimit-delay-ms").unwrap().parse().unwrap();
    assert!((1..=200).contains(&delay), "{delay}");
    let third = authorize("");
    let delay: u64 = third.field("x-ratelimit-delay-ms").unwrap().parse().unwrap();
    assert!((1_000..=2_200).contains(&delay), "{delay}");
    assert_eq!(
        authorize("?hold_ms=5001").problem(),
        "hold_ms must be at most 5000 (got 5001; the maximum is `max_hold` in `[limits]`)"
    );
}

#[test]
fn authorize_holds_the_reply_for_the_delay_within_a_bound() {
    let served = Served::start(&[], Some(SMOOTH));
    let authorize = |query: &str| {
        let began = std::time::Instant::now();
        let path = format!("GET /v1/authorize/smooth{query}");
        let reply = ask(served.http(), &path, &[("x-api-key", "a")], "");
        (reply, began.elapsed())
    };
    // The first request puts 2 s of work ahead of the others.
    assert_eq!(authorize("?cost=10&hold_ms=5000").0.field("x-ratelimit-delay-ms"), None);
    let (reply, took) = authorize("?hold_ms=300");
    let left: u64 = reply.field("x-ratelimit-delay-ms").unwrap().parse().unwrap();
    assert!(took >= Duration::from_millis(300), "the reply was held for {took:?}");
    assert!((1..=1_700).contains(&left), "{left} ms are left to wait");
    let (reply, took) = authorize("?hold_ms=5000");
    assert_eq!((reply.status, reply.field("x-ratelimit-delay-ms")), (200, None));
    assert!(took >= Duration::from_millis(left.saturating_sub(300)), "{took:?} of {left} ms");
}

#[test]
fn an_ignored_forwarded_address_is_logged_once() {
    let config = "[policies.site]\nlimit = 10\nwindow = \"1h\"\n";
    let served = Served::start(&[], Some(config));
    for address in ["192.0.2.1", "192.0.2.2", "192.0.2.3"] {
        let fields = [("x-forwarded-for", address)];
        assert_eq!(ask(served.http(), "GET /v1/authorize/site", &fields, "").status, 200);
    }
    let text = "ignoring X-Forwarded-For of a peer that is not in trusted_proxies";
    wait_until("the log has the warning", PATIENCE, || served.log().contains(text));
    assert_eq!(served.log().matches(text).count(), 1);
    let trusting = format!("trusted_proxies = [\"127.0.0.1/32\"]\n{config}");
    let served = Served::start(&[], Some(&trusting));
    let fields = [("x-forwarded-for", "192.0.2.1")];
    assert_eq!(ask(served.http(), "GET /v1/authorize/site", &fields, "").status, 200);
    assert!(!served.log().contains(text), "{}", served.log());
}

#[test]
fn pipelined_requests_are_answered_in_order_on_one_connection() {
    let served = served();
    let mut client = Client::connect(served.http());
    for _ in 0..3 {
        client.send("POST /v1/check", &[], br#"{"policy":"api","key":"a"}"#);
    }
    for left in [9, 8, 7] {
        assert_eq!(client.read().unwrap().json()["remaining"], left);
    }
}

#[test]
fn curl_works_with_both_http_versions_over_tcp_and_unix_sockets() {
    let path = std::env::temp_dir().join(format!("tallygate-http-{}.sock", std::process::id()));
    let unix = format!("unix:{}", path.display());
    let served = Served::start(&["--http", &unix], Some(CONFIG));
    let socket = path.display().to_string();
    for (version, left) in [("--http1.1", "9 1.1"), ("--http2-prior-knowledge", "8 2")] {
        let output = Command::new("curl")
            .args(["-sS", version, "--unix-socket", &socket, "-w", " %{http_version}"])
            .args(["-d", r#"{"policy":"api","key":"a"}"#, "http://localhost/v1/check"])
            .output()
            .expect("curl runs");
        let output = String::from_utf8(output.stdout).unwrap();
        let (json, version) = output.rsplit_once(' ').unwrap();
        let json: Value = serde_json::from_str(json).unwrap();
        assert_eq!(format!("{} {version}", json["remaining"]), left);
    }
    drop(served);
}

#[test]
fn an_override_applies_until_it_expires_or_is_removed() {
    let served = served();
    let overrides = "/v1/admin/overrides";
    let put = |body: &str| ask(served.http(), &format!("PUT {overrides}"), &[], body);
    let allowed = |key: &str| {
        let body = format!(r#"{{"policy":"login","key":"{key}","cost":5}}"#);
        post(served.http(), "/v1/check", &body).json()["allowed"] == true
    };
    assert!(!allowed("vip"));
    assert_eq!(put(r#"{"policy":"login","key":"vip","access":"unlimited"}"#).status, 200);
    assert!(allowed("vip"));
    assert_eq!(
        put(r#"{"policy":"login","key":"big","limit":5,"expires_in_ms":3600000}"#).status,
        200
    );
    assert!(allowed("big") && !allowed("big"));
    assert_eq!(
        put(r#"{"policy":"login","key":"soon","access":"unlimited","expires_in_ms":1}"#).status,
        200
    );
    wait_until("the override expires", PATIENCE, || !allowed("soon"));

    let listed = get(served.http(), overrides).json();
    let listed: Vec<_> = listed["overrides"].as_array().unwrap().iter().collect();
    let shown: Vec<_> = listed.iter().map(|one| (&one["key"], &one["access"])).collect();
    let big = json!("sliding_window_log 5 per 1h");
    assert_eq!(shown, [(&json!("big"), &big), (&json!("vip"), &json!("unlimited"))]);

    let remove =
        || ask(served.http(), &format!("DELETE {overrides}?policy=login&key=vip"), &[], "");
    assert_eq!((remove().status, remove().status), (204, 404));
    assert!(!allowed("vip"));
    for wrong in [
        r#"{"policy":"login","key":"a"}"#,
        r#"{"policy":"login","key":"a","access":"free"}"#,
        r#"{"policy":"login","key":"a","access":"blocked","limit":1}"#,
        r#"{"policy":"login","key":"a","limit":1,"window":"soon"}"#,
        r#"{"policy":"login","key":"a","limit":1,"algorithm":"dice"}"#,
    ] {
        assert_eq!(put(wrong).status, 400, "{wrong}");
    }
}

#[test]
fn an_override_of_the_configuration_is_listed_and_removed_only_there() {
    let config = "[policies.api]\nlimit = 10\nwindow = \"1h\"\n\
                  [policies.api.overrides.mallory]\naccess = \"blocked\"\n";
    let served = Served::start(&[], Some(config));
    let listed = || get(served.http(), "/v1/admin/overrides").json()["overrides"].clone();
    let shown = |access: &str, configured: bool| {
        json!({
            "policy": "api", "key": "mallory", "access": access, "expires_in_ms": null,
            "configured": configured,
            "scope": if configured { "configuration" } else { "this server" },
        })
    };
    let of_file = shown("blocked", true);
    assert_eq!(listed(), json!([of_file]));
    let remove =
        || ask(served.http(), "DELETE /v1/admin/overrides?policy=api&key=mallory", &[], "");
    let denied = remove();
    assert_eq!(denied.status, 409);
    let expected = "the override comes from the configuration (blocked) and cannot be removed here; \
                    remove it from the configuration, or set another one";
    assert_eq!(denied.problem(), expected);
    assert_eq!(listed(), json!([of_file]));

    let set = r#"{"policy":"api","key":"mallory","access":"unlimited"}"#;
    let set = ask(served.http(), "PUT /v1/admin/overrides", &[], set);
    assert_eq!(set.json(), shown("unlimited", false));
    assert_eq!(
        listed(),
        json!([shown("unlimited", false)]),
        "only the override in force is listed"
    );
    let removed = remove();
    assert_eq!((removed.status, removed.json()), (200, of_file));

    std::fs::write(
        served.config(),
        crate::common::with_admin("[policies.api]\nlimit = 10\nwindow = \"1h\"\n"),
    )
    .expect("the file is written");
    assert_eq!(post(served.http(), "/v1/admin/reload", "").status, 200);
    assert_eq!(listed(), json!([]));
    assert_eq!(remove().status, 404);
}

/// Overrides were once removed and set again one by one, and a blocked client was allowed in between.
///
/// Fault G4.
#[test]
fn a_client_that_is_blocked_before_and_after_a_reload_is_blocked_during_it() {
    let version = |limit: u32| {
        let mut text = format!("[policies.api]\nlimit = {limit}\nwindow = \"1h\"\n");
        for client in (0..500).map(|other| format!("other {other}")).chain(["mallory".to_owned()]) {
            text += &format!("[policies.api.overrides.\"{client}\"]\naccess = \"blocked\"\n");
        }
        text
    };
    let served = Served::start(&[], Some(&version(1_000_000)));
    let done = AtomicBool::new(false);
    let allowed = std::thread::scope(|scope| {
        let client_thread = scope.spawn(|| {
            let mut client = Client::connect(served.http());
            let mut allowed = 0;
            while !done.load(Ordering::Relaxed) {
                client.send("POST /v1/check", &[], br#"{"policy":"api","key":"mallory"}"#);
                let decision = client.read().expect("there is a reply").json();
                allowed += u32::from(decision["allowed"] != false);
            }
            allowed
        });
        for round in 0..30 {
            // The file is renamed, so that the server never reads half of it.
            let new = served.config().with_extension("new");
            std::fs::write(&new, crate::common::with_admin(&version(1_000_000 + round % 2)))
                .expect("the file is written");
            std::fs::rename(&new, served.config()).expect("the file is renamed");
            assert_eq!(post(served.http(), "/v1/admin/reload", "").status, 200);
        }
        done.store(true, Ordering::Relaxed);
        client_thread.join().expect("the thread does not panic")
    });
    assert_eq!(allowed, 0);
    assert_eq!(
        remaining(served.http(), "api", "another"),
        1_000_001,
        "the last version is in force"
    );
}

#[test]
fn one_client_is_shown_in_every_policy_without_being_charged() {
    let served = served();
    post(served.http(), "/v1/check", r#"{"policy":"api","key":"al ice","cost":3}"#);
    for _ in 0..2 {
        let shown = get(served.http(), "/v1/admin/client?key=al%20ice").json();
        let left: Vec<_> = shown["policies"].as_array().unwrap().iter().collect();
        let left: Vec<_> = left.iter().map(|one| (&one["policy"], &one["remaining"])).collect();
        assert_eq!(shown["key"], "al ice");
        assert_eq!(left[0], (&json!("api"), &json!(7)));
        assert_eq!(left.len(), 4);
    }
}

#[test]
fn hot_clients_are_found() {
    let served = served();
    let mut client = Client::connect(served.http());
    for _ in 0..400 {
        client.send("POST /v1/check", &[], br#"{"policy":"login","key":"greedy"}"#);
        client.read().unwrap();
    }
    let hot = get(served.http(), "/v1/admin/hot").json();
    for list in ["busiest", "most_denied"] {
        assert_eq!(hot[list][0]["key"], "greedy", "{hot}");
        assert_eq!(hot[list][0]["policy"], "login");
    }
}

#[test]
fn liveness_readiness_and_metrics_are_served() {
    let served = served();
    assert_eq!(get(served.http(), "/livez").status, 200);
    assert_eq!(get(served.http(), "/readyz").status, 200);
    assert!(get(served.http(), "/").body.contains("/v1/check"));
    post(served.http(), "/v1/check", r#"{"policy":"api","key":"a"}"#);
    let metrics = get(served.http(), "/metrics");
    let content_type = metrics.field("content-type").unwrap();
    assert!(content_type.starts_with("text/plain; version=0.0.4"), "{content_type}");
    let counted =
        "tallygate_decisions_total{policy=\"api\",outcome=\"allowed\",source=\"store\"} 1\n";
    assert!(metrics.body.contains(counted), "{}", metrics.body);
    assert!(metrics.body.contains("tallygate_request_seconds_count{surface=\"http\"}"));
    assert!(metrics.body.contains("tallygate_connections{surface=\"http\"}"), "{}", metrics.body);
}

#[test]
fn every_path_of_the_openapi_document_is_served() {
    let served = served();
    let document = get(served.http(), "/openapi.json").json();
    assert_eq!(document["openapi"], "3.1.0");
    let paths = document["paths"].as_object().unwrap();
    assert_eq!(paths.len(), 22);
    for (path, operations) in paths {
        let path = path.replace("{policy}", "api");
        for method in operations.as_object().unwrap().keys().filter(|name| *name != "parameters") {
            if method == "head" {
                continue;
            }
            let reply = ask(served.http(), &format!("{} {path}", method.to_uppercase()), &[], "");
            let responses = &operations[method]["responses"];
            assert!(responses[reply.status.to_string()].is_object(), "{method} {path}: {reply:?}");
            assert_ne!(reply.status, 405, "{method} {path}");
        }
    }
}

#[test]
fn a_decision_is_also_in_header_fields_if_requested() {
    let served = served();
    let question = r#"{"policy":"api","key":"fields"}"#;
    assert_eq!(post(served.http(), "/v1/check", question).field("x-ratelimit-limit"), None);
    let peeked = post(served.http(), "/v1/peek?headers=x", question);
    let limit = peeked.json()["limit"].to_string();
    assert_eq!(peeked.field("x-ratelimit-limit"), Some(limit.as_str()));
    assert_eq!(peeked.field("ratelimit"), None);
    let reply = loop {
        let reply = post(served.http(), "/v1/check?headers=all", question);
        let remaining = reply.json()["remaining"].to_string();
        assert_eq!(reply.field("x-ratelimit-remaining"), Some(remaining.as_str()));
        assert!(reply.field("ratelimit").unwrap().starts_with(&format!("\"api\";r={remaining}")));
        if reply.json()["allowed"] == false {
            break reply;
        }
        assert_eq!(reply.field("retry-after"), None);
    };
    assert_eq!(reply.status, 200);
    let wait_ms = reply.json()["retry_after_ms"].as_u64().unwrap();
    assert_eq!(reply.field("retry-after"), Some(wait_ms.div_ceil(1000).to_string().as_str()));
    for (query, body) in
        [("headers=all", r#"{"checks":[]}"#), ("headers=y", question), ("header=x", question)]
    {
        assert_eq!(post(served.http(), &format!("/v1/check?{query}"), body).status, 400, "{query}");
    }
}

#[test]
fn the_operator_can_list_the_policies_in_force() {
    let config = r#"
        [policies.api]
        limit = 100
        window = "1m"
        cost = 2
        [policies.api.tiers.pro]
        access = "unlimited"
        [policies.login]
        algorithm = "sliding_window_log"
        limit = 5
        window = "15m"
    "#;
    let served = Served::start(&[], Some(config));
    let expected = json!({ "policies": [
        { "name": "api", "rule": "token_bucket 100 per 1m", "cost": 2,
          "tiers": [{ "name": "pro", "rule": "unlimited" }] },
        { "name": "login", "rule": "sliding_window_log 5 per 15m", "cost": 1, "tiers": [] },
    ]});
    assert_eq!(get(served.http(), "/v1/policies").json(), expected);
    let sent = ask(served.http(), "GET /v1/policies", &[("x-forwarded-for", "192.0.2.1")], "");
    assert_eq!(sent.status, 403);
}
