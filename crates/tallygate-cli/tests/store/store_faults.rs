//! Tests a server whose store fails: at startup, while serving, and after it is back.

use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Reply, ask, get, post};
use serde_json::{Value, json};
use tallygate_testkit::servers::{Flavor, Proxy, Server, wait_until};

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

/// One policy per failure setting. They refill nothing during a test. This server has half of the quota of `alone`.
const POLICIES: &str = r#"
    [policies.open]
    limit = 4
    window = "1000h"
    [policies.closed]
    limit = 4
    window = "1000h"
    on_store_error = "deny"
    [policies.alone]
    limit = 4
    window = "1000h"
    on_store_error = "local"
    instances = 2
"#;

const NAMES: [&str; 3] = ["open", "closed", "alone"];

fn served(store: &str) -> Served {
    Served::start(&["--store", store], Some(POLICIES))
}

fn question(policy: &str, key: &str, cost: u64) -> Value {
    json!({ "policy": policy, "key": key, "cost": cost })
}

#[track_caller]
fn posted(served: &Served, path: &str, body: &Value) -> Reply {
    post(served.http(), path, &body.to_string())
}

#[track_caller]
fn check(served: &Served, policy: &str, key: &str, cost: u64) -> Value {
    let reply = posted(served, "/v1/check", &question(policy, key, cost));
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()
}

/// Returns whether the request was allowed, the remaining units, and the source.
#[track_caller]
fn summary(decision: &Value) -> (bool, u64, &str) {
    let remaining = decision["remaining"].as_u64().expect("the value is a number");
    let source = decision["source"].as_str().expect("there is a name");
    (decision["allowed"].as_bool().expect("the decision is allow or deny"), remaining, source)
}

/// Waits until the store answers for every policy.
fn until_the_store_answers(served: &Served) {
    for policy in NAMES {
        wait_until("the store answers", PATIENCE, || {
            let look = posted(served, "/v1/peek", &question(policy, "probe", 0));
            look.json()["source"] == "store"
        });
    }
}

/// Waits until the circuit breaker is open, so that no request waits for the store.
fn until_the_breaker_opens(served: &Served) {
    wait_until("the breaker opens", PATIENCE, || {
        check(served, "open", "probe", 0);
        metric(served, "tallygate_store_breaker_open") == 1
    });
}

#[track_caller]
fn metric(served: &Served, name: &str) -> u64 {
    let metrics = get(served.http(), "/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    assert!(line.is_some(), "{name} in {metrics}");
    line.and_then(|value| value.parse().ok()).expect("the value is a number")
}

fn decisions(served: &Served, policy: &str, outcome: &str, source: &str) -> u64 {
    let labels = format!("policy=\"{policy}\",outcome=\"{outcome}\",source=\"{source}\"");
    metric(served, &format!("tallygate_decisions_total{{{labels}}}"))
}

fn resp(served: &Served, words: &[&str]) -> Vec<i64> {
    let mut client =
        redis::Client::open(format!("redis://{}/", served.resp())).expect("the address is valid");
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client).expect("there is a reply")
}

/// Checks the replies of every surface while the store is down. No client may have sent a request before.
fn each_decides_by_its_failure_setting(served: &Served) {
    let open = check(served, "open", "alice", 3);
    assert_eq!(summary(&open), (true, 0, "failed_open"));
    assert_eq!((&open["limit"], &open["retry_after_ms"]), (&json!(4), &json!(0)), "{open}");
    assert_eq!(
        summary(&check(served, "open", "alice", 3)),
        (true, 0, "failed_open"),
        "a second request is allowed, too"
    );
    let closed = check(served, "closed", "alice", 1);
    assert_eq!(summary(&closed), (false, 0, "failed_closed"));
    assert_eq!(closed["retry_after_ms"], 1000, "the retry time is missing: {closed}");
    assert_eq!(summary(&check(served, "alone", "alice", 2)), (true, 0, "local"));
    assert_eq!(summary(&check(served, "alone", "alice", 1)), (false, 0, "local"));

    let look = |policy| posted(served, "/v1/peek", &question(policy, "bob", 1)).json();
    assert_eq!(summary(&look("open")), (true, 0, "failed_open"));
    assert_eq!(summary(&look("closed")), (false, 0, "failed_closed"));
    assert_eq!(summary(&look("alone")), (true, 1, "local"));

    // Refunds and resets fail while the store is down.
    for policy in ["open", "closed"] {
        for path in ["/v1/refund", "/v1/reset"] {
            let reply = posted(served, path, &question(policy, "alice", 1));
            assert_eq!(reply.status, 503, "{path} {policy}: {reply:?}");
            assert!(reply.problem().contains("redis is unavailable"), "{reply:?}");
        }
    }
    assert_eq!(summary(&posted(served, "/v1/refund", &question("alone", "alice", 1)).json()).1, 1);

    let list: Vec<_> = NAMES.iter().map(|name| question(name, "carol", 1)).collect();
    let results = posted(served, "/v1/check", &json!({ "checks": list })).json();
    let results: Vec<_> =
        results["results"].as_array().expect("the value is a list").iter().map(summary).collect();
    let expected = [(true, 0, "failed_open"), (false, 0, "failed_closed"), (true, 1, "local")];
    assert_eq!(results, expected);

    authorize_decides_by_its_failure_setting(served);
    assert_eq!(resp(served, &["CL.THROTTLE", "alice", "4", "1", "1000"]), [0, 5, 0, -1, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "open", "dora"]), [1, 4, 0, 0, 0, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "closed", "dora"]), [0, 4, 0, 1000, 0, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "alone", "dora"])[..4], [1, 2, 1, 0]);
    assert_eq!(resp(served, &["TG.PEEK", "closed", "dora"])[0], 0);
    let mut client =
        redis::Client::open(format!("redis://{}/", served.resp())).expect("the address is valid");
    let refund = redis::cmd("TG.REFUND").arg(&["open", "dora", "1"]).query::<()>(&mut client);
    let refund = refund.expect_err("the call fails").to_string();
    assert!(refund.contains("redis is unavailable"), "{refund}");
}

fn authorize_decides_by_its_failure_setting(served: &Served) {
    let authorize = |path: &str| get(served.http(), &format!("/v1/authorize/{path}"));
    let open = authorize("open");
    assert_eq!((open.status, open.field("x-ratelimit-limit")), (200, None), "{open:?}");
    let closed = authorize("closed");
    assert_eq!((closed.status, closed.field("retry-after")), (503, Some("1")), "{closed:?}");
    assert!(closed.problem().contains("the store is unavailable"), "{closed:?}");
    assert_eq!(closed.field("x-ratelimit-limit"), None, "the limit is unknown: {closed:?}");
    let closed = authorize("closed?deny=403");
    assert_eq!((closed.status, closed.problem().is_empty()), (403, false), "{closed:?}");
    let alone = authorize("alone?cost=2");
    assert_eq!((alone.status, alone.field("x-ratelimit-limit")), (200, Some("2")), "{alone:?}");
    assert_eq!(authorize("alone").status, 429);
    assert_eq!(authorize("alone?deny=403").status, 403);
}

/// Fault F1.
#[test]
fn without_its_store_the_server_starts_logs_it_and_uses_the_failure_settings() {
    let store = Server::start(Flavor::Redis);
    store.kill();
    let served = served(&store.url());
    // A background thread writes the log.
    wait_until("the log reports it", PATIENCE, || {
        served.log().contains("the store is unavailable")
    });
    each_decides_by_its_failure_setting(&served);
    until_the_breaker_opens(&served);
    let ready = get(served.http(), "/readyz");
    assert_eq!(ready.status, 200, "the server is ready without the store: {ready:?}");
    assert!(ready.body.contains("the store does not answer"), "{ready:?}");
    assert_eq!(get(served.http(), "/livez").status, 200);

    store.restart();
    until_the_store_answers(&served);
    assert_eq!(get(served.http(), "/readyz").body, "ready\n");
    assert_eq!(metric(&served, "tallygate_store_breaker_open"), 0);
    assert_eq!(store.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

/// Faults F2, F4.
#[test]
fn while_the_store_is_down_the_failure_settings_decide_and_are_counted() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    let errors = metric(&served, "tallygate_store_errors_total");
    each_decides_by_its_failure_setting(&served);
    until_the_breaker_opens(&served);
    assert!(metric(&served, "tallygate_store_errors_total") >= errors + 20);
    assert_eq!(metric(&served, "tallygate_store_breaker_opened_total"), 1, "probes do not count");
    assert!(decisions(&served, "open", "allowed", "failed_open") >= 4);
    assert_eq!(decisions(&served, "open", "denied", "failed_closed"), 0);
    assert_eq!(decisions(&served, "closed", "denied", "failed_closed"), 5);
    assert_eq!(decisions(&served, "closed", "allowed", "failed_open"), 0);
    assert_eq!(decisions(&served, "alone", "allowed", "local"), 4);
    assert_eq!(decisions(&served, "alone", "denied", "local"), 3);
    assert!(served.log().contains("redis check failed"), "{}", served.log());
}

/// Fault F3.
#[test]
fn a_silent_store_costs_one_time_budget_and_then_nothing() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    proxy.stall(true);
    // A list of a hundred checks waits for one time budget, not for a hundred.
    let list: Vec<_> = (0..100).map(|n| question("closed", &format!("client {n}"), 1)).collect();
    let began = std::time::Instant::now();
    let results = posted(&served, "/v1/check", &json!({ "checks": list })).json();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let results = results["results"].as_array().expect("the value is a list");
    assert_eq!(results.len(), 100);
    // The first timeout may come from a busy server: such a check is denied as overloaded.
    let sources = ["failed_closed", "overloaded"];
    let is_denied = |result: &Value| {
        result["allowed"] == false && sources.iter().any(|source| result["source"] == *source)
    };
    assert_eq!(results.iter().find(|result| !is_denied(result)), None);
    assert!(metric(&served, "tallygate_store_timeouts_total") >= 1);
    until_the_breaker_opens(&served);
    assert_eq!(summary(&check(&served, "closed", "alice", 1)), (false, 0, "failed_closed"));
    proxy.stall(false);
    until_the_store_answers(&served);
    assert_eq!(summary(&check(&served, "closed", "alice", 1)), (true, 3, "store"));
}

/// Fault F4.
#[test]
fn all_or_nothing_holds_without_the_store_and_names_the_denying_check() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    let all = |names: &[&str]| {
        let all: Vec<_> = names.iter().map(|name| question(name, "alice", 1)).collect();
        posted(&served, "/v1/check", &json!({ "all": all })).json()
    };
    let allowed = all(&["open", "alone"]);
    assert_eq!((summary(&allowed).0, &allowed["retry_after_ms"]), (true, &json!(0)), "{allowed}");
    for names in [["open", "alone", "closed"], ["closed", "alone", "open"]] {
        let denied = all(&names);
        assert_eq!(summary(&denied), (false, 0, "failed_closed"), "{denied}");
        let by = names.iter().position(|name| *name == "closed").expect("the policy is listed");
        assert_eq!((&denied["policy"], &denied["denied_index"]), (&json!("closed"), &json!(by)));
    }
    // The denied request charged nothing, so one of two units is left.
    assert_eq!(summary(&check(&served, "alone", "alice", 1)), (true, 0, "local"));
}

/// Fault F4.
#[test]
fn a_reservation_without_the_store_returns_nothing_that_was_not_charged() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    assert_eq!(summary(&check(&served, "open", "alice", 3)), (true, 1, "store"));
    store.kill();
    let reserve = |policy: &str| {
        let body = json!({ "policy": policy, "key": "alice", "cost": 2, "ttl_ms": 3_600_000 });
        posted(&served, "/v1/reserve", &body).json()
    };
    let closed = reserve("closed");
    assert_eq!(
        (summary(&closed).2, closed.get("reservation")),
        ("failed_closed", None),
        "{closed}"
    );
    let open = reserve("open");
    assert_eq!(summary(&open), (true, 0, "failed_open"));
    let settle = |reservation: &Value, actual: u64| {
        posted(&served, "/v1/settle", &json!({ "reservation": reservation, "actual": actual }))
    };
    // No client can charge it now, so it can still be settled later.
    let failed = settle(&open["reservation"], 0);
    assert_eq!(failed.status, 503, "{failed:?}");

    // The server that comes back has lost what it knew, as one without a disk does.
    store.restart();
    until_the_store_answers(&served);
    assert_eq!(summary(&check(&served, "open", "alice", 3)), (true, 1, "store"));
    let settled = settle(&open["reservation"], 0);
    assert_eq!(
        (settled.status, summary(&settled.json())),
        (200, (true, 1, "store")),
        "{settled:?}"
    );
    assert_eq!(settle(&open["reservation"], 0).status, 409);
}

/// Fault F4.
#[test]
fn a_settlement_with_a_lost_reply_is_not_repeated() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    let body = json!({ "policy": "open", "key": "alice", "cost": 3, "ttl_ms": 3_600_000 });
    let reserved = posted(&served, "/v1/reserve", &body).json();
    assert_eq!(summary(&reserved), (true, 1, "store"));
    let settle = json!({ "reservation": reserved["reservation"], "actual": 1 });
    // The server already has the script of settlements, so the next call is the settlement.
    let other = posted(&served, "/v1/reserve", &question_with_life("bob")).json();
    let other = json!({ "reservation": other["reservation"], "actual": 1 });
    assert_eq!(posted(&served, "/v1/settle", &other).status, 200);
    // How a value begins: only the call that writes one has it, after the call that reads.
    proxy.lose_next_reply_to("\u{1}n");
    assert_eq!(posted(&served, "/v1/settle", &settle).status, 503);
    assert_eq!(proxy.replies_lost(), 1);
    until_the_store_answers(&served);
    assert_eq!(posted(&served, "/v1/settle", &settle).status, 409);
    assert_eq!(summary(&check(&served, "open", "alice", 0)), (true, 3, "store"), "settled once");
}

fn question_with_life(key: &str) -> Value {
    json!({ "policy": "open", "key": key, "cost": 3, "ttl_ms": 3_600_000 })
}

/// Fault F22.
#[test]
fn usage_during_an_outage_is_charged_when_the_store_is_back() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    assert_eq!(summary(&check(&served, "alone", "alice", 1)), (true, 3, "store"));
    proxy.reject_connections(true);
    proxy.cut();
    wait_until("the server decides alone", PATIENCE, || {
        summary(&check(&served, "alone", "bob", 0)).2 == "local"
    });
    assert_eq!(summary(&check(&served, "alone", "alice", 2)), (true, 0, "local"));
    assert_eq!(summary(&check(&served, "alone", "bob", 1)), (true, 1, "local"));
    proxy.reject_connections(false);
    // The first decision of the store includes the usage during the outage.
    let mut first = Value::Null;
    wait_until("the store answers", PATIENCE, || {
        first = check(&served, "alone", "alice", 0);
        first["source"] == "store"
    });
    assert_eq!(
        summary(&first),
        (true, 1, "store"),
        "1 unit was charged in the store and 2 locally"
    );
    wait_until("the usage of other clients is charged, too", PATIENCE, || {
        summary(&check(&served, "alone", "bob", 0)) == (true, 3, "store")
    });
    assert!(metric(&served, "tallygate_store_charged_late_total") >= 2);
}

/// Fault C7.
#[test]
fn concurrent_lists_over_an_unstable_store_never_exceed_the_quota() {
    const CLIENTS: usize = 6;
    const LISTS: usize = 40;
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    let lists = |client: usize| {
        let mut shared = 0;
        for list in 0..LISTS {
            let own = format!("{client}:{list}");
            let asks = [
                question("closed", "shared", 1),
                question("open", &own, 1),
                question("closed", &own, 5),
                question("alone", &own, 1),
            ];
            let reply = posted(&served, "/v1/check", &json!({ "checks": asks }));
            assert_eq!(reply.status, 200, "{reply:?}");
            let results = reply.json();
            let results = results["results"].as_array().expect("the value is a list").clone();
            let names: Vec<_> = results.iter().map(|result| result["policy"].clone()).collect();
            assert_eq!(names, ["closed", "open", "closed", "alone"], "in order");
            assert_eq!(results[1]["allowed"], true, "{results:?}");
            assert_eq!(results[2]["allowed"], false, "the cost is above the capacity: {results:?}");
            shared += u64::from(summary(&results[0]).0);
        }
        shared
    };
    let allowed: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| scope.spawn(move || lists(client))).collect();
        while !clients.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            proxy.cut();
            proxy.stall(true);
            std::thread::yield_now();
            proxy.stall(false);
            check(&served, "open", "probe", 0);
        }
        clients.into_iter().map(|client| client.join().expect("the lists were answered")).sum()
    });
    assert!(allowed <= 4, "{allowed} of 4 were allowed");
    until_the_store_answers(&served);
    assert_eq!(store.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

/// Fault G1.
#[test]
fn a_reload_changes_the_failure_setting() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    assert_eq!(summary(&check(&served, "open", "alice", 1)).2, "failed_open");
    let text =
        POLICIES.replacen("window = \"1000h\"", "window = \"1000h\"\non_store_error = \"deny\"", 1);
    std::fs::write(served.config(), text.replace("instances = 2", "instances = 4"))
        .expect("the file is written");
    let reload = ask(served.http(), "POST /v1/admin/reload", &[], "");
    assert_eq!(reload.status, 200, "{reload:?}");
    assert_eq!(summary(&check(&served, "open", "alice", 1)).2, "failed_closed");
    assert_eq!(check(&served, "alone", "alice", 1)["limit"], 1, "a quarter of four");
}

/// Fault J3.
#[test]
fn readyz_reports_degraded_while_the_store_is_out_of_memory() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    assert_eq!(get(served.http(), "/readyz").body, "ready\n");
    assert_eq!(metric(&served, "tallygate_store_out_of_memory"), 0);
    let _: () = store.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    wait_until("the store rejects a write", PATIENCE, || {
        summary(&check(&served, "closed", "alice", 1)).2 == "failed_closed"
    });
    let ready = get(served.http(), "/readyz");
    assert_eq!(ready.status, 200);
    assert!(ready.body.starts_with("degraded: the store is out of memory"), "{}", ready.body);
    assert_eq!(metric(&served, "tallygate_store_out_of_memory"), 1);
    assert!(metric(&served, "tallygate_store_out_of_memory_replies_total") > 0);
    let _: () = store.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    wait_until("the store decides", PATIENCE, || {
        summary(&check(&served, "closed", "bob", 1)).2 == "store"
    });
    wait_until("it is ready", PATIENCE, || get(served.http(), "/readyz").body == "ready\n");
}

/// A store that rejects every call is as useless as one that does not answer.
#[test]
fn readyz_reports_degraded_while_the_store_rejects_every_call() {
    let store = Server::start(Flavor::Redis);
    let served_ready = served(&store.url());
    until_the_store_answers(&served_ready);
    assert_eq!(get(served_ready.http(), "/readyz").body, "ready\n");
    assert_eq!(metric(&served_ready, "tallygate_store_rejecting"), 0);
    let _: () = store.ask(&["ACL", "SETUSER", "default", "-eval", "-evalsha"]);
    wait_until("the store rejects a call", PATIENCE, || {
        summary(&check(&served_ready, "closed", "alice", 1)).2 == "failed_closed"
    });
    let is_degraded = |served: &Served| {
        let ready = get(served.http(), "/readyz");
        assert_eq!(ready.status, 200);
        ready.body.starts_with("degraded: the store answers, but rejects every call")
    };
    assert!(is_degraded(&served_ready));
    assert_eq!(metric(&served_ready, "tallygate_store_rejecting"), 1);
    let _: () = store.ask(&["ACL", "SETUSER", "default", "+eval", "+evalsha"]);
    until_the_store_answers(&served_ready);
    wait_until("it is ready", PATIENCE, || get(served_ready.http(), "/readyz").body == "ready\n");
    // A missing password is noticed before the first request.
    let _: () = store.ask(&["CONFIG", "SET", "requirepass", "secret"]);
    let without_password = served(&store.url());
    assert!(is_degraded(&without_password));
    wait_until("the log has the reason", PATIENCE, || {
        let log = without_password.log();
        log.contains("redis rejects every call; deciding by the failure setting of each policy")
            && log.contains("NOAUTH")
    });
}

/// A password that is wrong from the start, and one that is changed while the server runs. The server recovers as soon as
/// the password works.
///
/// Fault F17.
#[test]
fn readyz_reports_degraded_while_the_password_of_the_store_is_wrong() {
    let store = Server::start(Flavor::Redis);
    let set_user = |password: &str| {
        let user = ["ACL", "SETUSER", "limiter", "reset", "on", "~*", "&*", "+@all", password];
        store.ask::<()>(&user);
    };
    set_user(">new-secret");
    let served = served(&store.url().replace("redis://", "redis://limiter:old-secret@"));
    let until_degraded = || {
        wait_until("the store rejects the connection", PATIENCE, || {
            check(&served, "closed", "alice", 1);
            let ready = get(served.http(), "/readyz");
            assert_eq!(ready.status, 200);
            ready.body.starts_with("degraded: the store answers, but rejects every call")
        });
        assert_eq!(metric(&served, "tallygate_store_rejecting"), 1);
    };
    until_degraded();
    wait_until("the log has the reason", PATIENCE, || {
        let log = served.log();
        log.contains("redis rejects every call; deciding by the failure setting of each policy")
            && log.contains("authentication failed")
    });
    assert!(!served.log().contains("old-secret"), "{}", served.log());
    set_user(">old-secret");
    until_the_store_answers(&served);
    wait_until("it is ready", PATIENCE, || get(served.http(), "/readyz").body == "ready\n");
    assert_eq!(metric(&served, "tallygate_store_rejecting"), 0);

    set_user(">new-secret");
    store.ask::<i64>(&["CLIENT", "KILL", "USER", "limiter"]);
    until_degraded();
    // A server that has gone does not answer.
    store.kill();
    wait_until("the store is unavailable", PATIENCE, || {
        check(&served, "closed", "alice", 1);
        get(served.http(), "/readyz").body.starts_with("ready, but the store does not answer")
    });
}

#[test]
fn cl_throttle_has_its_own_name_in_the_log_of_a_failing_store() {
    let served = served("redis://127.0.0.1:1");
    let mut redis = std::process::Command::new("redis-cli");
    redis.args(["-p", served.resp_port(), "CL.THROTTLE", "alice", "4", "10", "60"]);
    let output = redis.output().expect("redis-cli is installed");
    assert!(output.status.success(), "{output:?}");
    wait_until("the log has the error", PATIENCE, || {
        served.log().contains(
            "redis check failed; deciding by the policy's failure setting policy=\"CL.THROTTLE\"",
        )
    });
    // The command says that nothing was checked, and not that nothing is left.
    let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_tallygate"));
    check.args(["check", "--resp", served.resp(), "open", "alice"]);
    let output = check.output().expect("the binary runs");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text, "allowed without a check, because the store is unavailable\n");
}

/// Callers that share a hot key get exactly the quota over HTTP, and the failure setting, which would allow more, is not
/// used.
///
/// Fault J15.
#[test]
fn many_connections_on_one_key_of_a_remote_store_get_exactly_the_quota() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    proxy.delay(Duration::from_millis(20));
    let mut sources = std::collections::BTreeMap::<(String, bool), u32>::new();
    std::thread::scope(|scope| {
        let callers: Vec<_> = (0..40)
            .map(|_| {
                scope.spawn(|| (0..3).map(|_| check(&served, "open", "hot", 1)).collect::<Vec<_>>())
            })
            .collect();
        for caller in callers {
            for decision in caller.join().expect("the thread does not panic") {
                let (allowed, _, source) = summary(&decision);
                *sources.entry((source.to_owned(), allowed)).or_default() += 1;
            }
        }
    });
    let allowed: u32 = sources.iter().filter(|((_, allowed), _)| *allowed).map(|(_, n)| n).sum();
    assert_eq!(allowed, 4, "{sources:?}");
    assert!(!sources.keys().any(|(source, _)| source.starts_with("failed")), "{sources:?}");
}
