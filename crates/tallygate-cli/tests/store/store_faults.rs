//! The server over a store that fails: away at the start, gone while serving, back again.

use std::time::Duration;

use crate::common::Served;
use crate::http_client::{Reply, ask, get, post};
use serde_json::{Value, json};
use tallygate_testkit::servers::{Flavor, Proxy, Server, wait_until};

/// Long enough for a busy machine; nobody waits for it unless something is wrong.
const PATIENCE: Duration = Duration::from_secs(20);

/// One policy of each kind, of which nothing comes back while a test runs. Of `alone` this server has half.
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

/// Whether it was allowed, how much is left, and who answered.
#[track_caller]
fn told(decision: &Value) -> (bool, u64, &str) {
    let remaining = decision["remaining"].as_u64().expect("a number");
    let source = decision["source"].as_str().expect("a name");
    (decision["allowed"].as_bool().expect("yes or no"), remaining, source)
}

/// Waits until the store answers for every policy.
fn until_the_store_answers(served: &Served) {
    for policy in NAMES {
        wait_until("the store answers", PATIENCE, || {
            let look = posted(served, "/v1/peek", &question(policy, "nobody", 0));
            look.json()["source"] == "store"
        });
    }
}

/// Waits until the store is given up, so that nobody waits for it any more.
fn until_it_is_left_alone(served: &Served) {
    wait_until("the breaker opens", PATIENCE, || {
        check(served, "open", "nobody", 0);
        metric(served, "tallygate_store_breaker_open") == 1
    });
}

#[track_caller]
fn metric(served: &Served, name: &str) -> u64 {
    let metrics = get(served.http(), "/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    assert!(line.is_some(), "{name} in {metrics}");
    line.and_then(|value| value.parse().ok()).expect("a number")
}

fn decisions(served: &Served, policy: &str, outcome: &str, source: &str) -> u64 {
    let labels = format!("policy=\"{policy}\",outcome=\"{outcome}\",source=\"{source}\"");
    metric(served, &format!("tallygate_decisions_total{{{labels}}}"))
}

fn resp(served: &Served, words: &[&str]) -> Vec<i64> {
    let mut client =
        redis::Client::open(format!("redis://{}/", served.resp())).expect("an address");
    redis::cmd(words[0]).arg(&words[1..]).query(&mut client).expect("an answer")
}

/// What every surface answers while the store is away, which it is, and nobody has asked yet.
fn each_decides_by_its_failure_policy(served: &Served) {
    let open = check(served, "open", "alice", 3);
    assert_eq!(told(&open), (true, 0, "failed_open"));
    assert_eq!((&open["limit"], &open["retry_after_ms"]), (&json!(4), &json!(0)), "{open}");
    assert_eq!(told(&check(served, "open", "alice", 3)), (true, 0, "failed_open"), "and again");
    let closed = check(served, "closed", "alice", 1);
    assert_eq!(told(&closed), (false, 0, "failed_closed"));
    assert_eq!(closed["retry_after_ms"], 1000, "it says when to try again: {closed}");
    assert_eq!(told(&check(served, "alone", "alice", 2)), (true, 0, "local"));
    assert_eq!(told(&check(served, "alone", "alice", 1)), (false, 0, "local"));

    let look = |policy| posted(served, "/v1/peek", &question(policy, "bob", 1)).json();
    assert_eq!(told(&look("open")), (true, 0, "failed_open"));
    assert_eq!(told(&look("closed")), (false, 0, "failed_closed"));
    assert_eq!(told(&look("alone")), (true, 1, "local"));

    // What has no answer but "done" is a failure while nobody can do it.
    for policy in ["open", "closed"] {
        for path in ["/v1/refund", "/v1/reset"] {
            let reply = posted(served, path, &question(policy, "alice", 1));
            assert_eq!(reply.status, 503, "{path} {policy}: {reply:?}");
            assert!(reply.problem().contains("redis is not available"), "{reply:?}");
        }
    }
    assert_eq!(told(&posted(served, "/v1/refund", &question("alone", "alice", 1)).json()).1, 1);

    let list: Vec<_> = NAMES.iter().map(|name| question(name, "carol", 1)).collect();
    let results = posted(served, "/v1/check", &json!({ "checks": list })).json();
    let results: Vec<_> = results["results"].as_array().expect("a list").iter().map(told).collect();
    let expected = [(true, 0, "failed_open"), (false, 0, "failed_closed"), (true, 1, "local")];
    assert_eq!(results, expected);

    authorize_decides_by_its_failure_policy(served);
    assert_eq!(resp(served, &["CL.THROTTLE", "alice", "4", "1", "1000"]), [0, 5, 0, -1, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "open", "dora"]), [1, 4, 0, 0, 0, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "closed", "dora"]), [0, 4, 0, 1000, 0, 0]);
    assert_eq!(resp(served, &["TG.CHECK", "alone", "dora"])[..4], [1, 2, 1, 0]);
    assert_eq!(resp(served, &["TG.PEEK", "closed", "dora"])[0], 0);
    let mut client =
        redis::Client::open(format!("redis://{}/", served.resp())).expect("an address");
    let refund = redis::cmd("TG.REFUND").arg(&["open", "dora", "1"]).query::<()>(&mut client);
    let refund = refund.expect_err("nobody can").to_string();
    assert!(refund.contains("redis is not available"), "{refund}");
}

fn authorize_decides_by_its_failure_policy(served: &Served) {
    let authorize = |path: &str| get(served.http(), &format!("/v1/authorize/{path}"));
    let open = authorize("open");
    assert_eq!((open.status, open.field("x-ratelimit-limit")), (200, None), "{open:?}");
    let closed = authorize("closed");
    assert_eq!((closed.status, closed.field("retry-after")), (503, Some("1")), "{closed:?}");
    assert!(closed.problem().contains("the store cannot be asked"), "{closed:?}");
    assert_eq!(closed.field("x-ratelimit-limit"), None, "nobody knows: {closed:?}");
    let closed = authorize("closed?deny=403");
    assert_eq!((closed.status, closed.problem().is_empty()), (403, false), "{closed:?}");
    let alone = authorize("alone?cost=2");
    assert_eq!((alone.status, alone.field("x-ratelimit-limit")), (200, Some("2")), "{alone:?}");
    assert_eq!(authorize("alone").status, 429);
    assert_eq!(authorize("alone?deny=403").status, 403);
}

#[test]
fn f1_without_its_store_it_starts_says_so_and_decides_by_its_failure_policies() {
    let store = Server::start(Flavor::Redis);
    store.kill();
    let served = served(&store.url());
    // The log is written by a thread of its own.
    wait_until("the log says so", PATIENCE, || served.log().contains("the store does not answer"));
    each_decides_by_its_failure_policy(&served);
    until_it_is_left_alone(&served);
    let ready = get(served.http(), "/readyz");
    assert_eq!(ready.status, 200, "it decides without it: {ready:?}");
    assert!(ready.body.contains("the store does not answer"), "{ready:?}");
    assert_eq!(get(served.http(), "/livez").status, 200);

    store.restart();
    until_the_store_answers(&served);
    assert_eq!(get(served.http(), "/readyz").body, "ready\n");
    assert_eq!(metric(&served, "tallygate_store_breaker_open"), 0);
    assert_eq!(store.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

#[test]
fn f2_f4_a_store_that_goes_away_is_decided_without_and_counted() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    let errors = metric(&served, "tallygate_store_errors_total");
    each_decides_by_its_failure_policy(&served);
    until_it_is_left_alone(&served);
    assert!(metric(&served, "tallygate_store_errors_total") >= errors + 20);
    assert!(metric(&served, "tallygate_store_breaker_opened_total") >= 1);
    assert!(decisions(&served, "open", "allowed", "failed_open") >= 4);
    assert_eq!(decisions(&served, "open", "refused", "failed_closed"), 0);
    assert_eq!(decisions(&served, "closed", "refused", "failed_closed"), 5);
    assert_eq!(decisions(&served, "closed", "allowed", "failed_open"), 0);
    assert_eq!(decisions(&served, "alone", "allowed", "local"), 4);
    assert_eq!(decisions(&served, "alone", "refused", "local"), 3);
    assert!(served.log().contains("redis could not decide"), "{}", served.log());
}

#[test]
fn f3_a_store_that_is_silent_costs_each_its_budget_and_then_nothing() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    proxy.stall(true);
    // A list of a hundred is waited for once, not a hundred times.
    let list: Vec<_> = (0..100).map(|n| question("closed", &format!("client {n}"), 1)).collect();
    let began = std::time::Instant::now();
    let results = posted(&served, "/v1/check", &json!({ "checks": list })).json();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    let results = results["results"].as_array().expect("a list");
    assert_eq!(results.len(), 100);
    // The first silence may be that of a busy server: such a check is denied as overloaded.
    let sources = ["failed_closed", "overloaded"];
    let is_denied = |result: &Value| {
        result["allowed"] == false && sources.iter().any(|source| result["source"] == *source)
    };
    assert_eq!(results.iter().find(|result| !is_denied(result)), None);
    assert!(metric(&served, "tallygate_store_timeouts_total") >= 1);
    until_it_is_left_alone(&served);
    assert_eq!(told(&check(&served, "closed", "alice", 1)), (false, 0, "failed_closed"));
    proxy.stall(false);
    until_the_store_answers(&served);
    assert_eq!(told(&check(&served, "closed", "alice", 1)), (true, 3, "store"));
}

#[test]
fn f4_all_or_nothing_holds_without_the_store_and_names_who_refused() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    let all = |names: &[&str]| {
        let all: Vec<_> = names.iter().map(|name| question(name, "alice", 1)).collect();
        posted(&served, "/v1/check", &json!({ "all": all })).json()
    };
    let allowed = all(&["open", "alone"]);
    assert_eq!((told(&allowed).0, &allowed["retry_after_ms"]), (true, &json!(0)), "{allowed}");
    for names in [["open", "alone", "closed"], ["closed", "alone", "open"]] {
        let refused = all(&names);
        assert_eq!(told(&refused), (false, 0, "failed_closed"), "{refused}");
        let by = names.iter().position(|name| *name == "closed").expect("it is there");
        assert_eq!((&refused["policy"], &refused["refused"]), (&json!("closed"), &json!(by)));
    }
    // Refused with the others, this one was charged nothing: of its two one is left.
    assert_eq!(told(&check(&served, "alone", "alice", 1)), (true, 0, "local"));
}

#[test]
fn f4_a_reservation_without_the_store_gives_back_nothing_that_was_not_charged() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    assert_eq!(told(&check(&served, "open", "alice", 3)), (true, 1, "store"));
    store.kill();
    let reserve = |policy: &str| {
        let body = json!({ "policy": policy, "key": "alice", "cost": 2, "ttl_ms": 3_600_000 });
        posted(&served, "/v1/reserve", &body).json()
    };
    let closed = reserve("closed");
    assert_eq!((told(&closed).2, closed.get("reservation")), ("failed_closed", None), "{closed}");
    let open = reserve("open");
    assert_eq!(told(&open), (true, 0, "failed_open"));
    let settle = |reservation: &Value, actual: u64| {
        posted(&served, "/v1/settle", &json!({ "reservation": reservation, "actual": actual }))
    };
    // Nobody can charge it now, so it can still be settled later.
    let failed = settle(&open["reservation"], 0);
    assert_eq!(failed.status, 503, "{failed:?}");

    // The server that comes back has lost what it knew, as one without a disk does.
    store.restart();
    until_the_store_answers(&served);
    assert_eq!(told(&check(&served, "open", "alice", 3)), (true, 1, "store"));
    let settled = settle(&open["reservation"], 0);
    assert_eq!((settled.status, told(&settled.json())), (200, (true, 1, "store")), "{settled:?}");
    assert_eq!(settle(&open["reservation"], 0).status, 409);
}

#[test]
fn f4_a_settlement_whose_reply_was_lost_is_not_made_again() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    let body = json!({ "policy": "open", "key": "alice", "cost": 3, "ttl_ms": 3_600_000 });
    let reserved = posted(&served, "/v1/reserve", &body).json();
    assert_eq!(told(&reserved), (true, 1, "store"));
    let settle = json!({ "reservation": reserved["reservation"], "actual": 1 });
    // The server has been told the script of settling before: so the next call is the settlement.
    let other = posted(&served, "/v1/reserve", &question_with_life("bob")).json();
    let other = json!({ "reservation": other["reservation"], "actual": 1 });
    assert_eq!(posted(&served, "/v1/settle", &other).status, 200);
    // How a value begins: only the call that writes one has it, after the call that reads.
    proxy.lose_next_reply_to("\u{1}n");
    assert_eq!(posted(&served, "/v1/settle", &settle).status, 503);
    assert_eq!(proxy.replies_lost(), 1);
    until_the_store_answers(&served);
    assert_eq!(posted(&served, "/v1/settle", &settle).status, 409);
    assert_eq!(told(&check(&served, "open", "alice", 0)), (true, 3, "store"), "settled once");
}

fn question_with_life(key: &str) -> Value {
    json!({ "policy": "open", "key": key, "cost": 3, "ttl_ms": 3_600_000 })
}

#[test]
fn f22_what_was_used_without_the_store_is_charged_when_it_is_back() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    assert_eq!(told(&check(&served, "alone", "alice", 1)), (true, 3, "store"));
    proxy.refuse(true);
    proxy.cut();
    wait_until("it decides alone", PATIENCE, || {
        told(&check(&served, "alone", "bob", 0)).2 == "local"
    });
    assert_eq!(told(&check(&served, "alone", "alice", 2)), (true, 0, "local"));
    assert_eq!(told(&check(&served, "alone", "bob", 1)), (true, 1, "local"));
    proxy.refuse(false);
    // The first answer of the store knows what was used without it.
    let mut first = Value::Null;
    wait_until("the store answers", PATIENCE, || {
        first = check(&served, "alone", "alice", 0);
        first["source"] == "store"
    });
    assert_eq!(told(&first), (true, 1, "store"), "1 there, 2 here");
    wait_until("others are charged too", PATIENCE, || {
        told(&check(&served, "alone", "bob", 0)) == (true, 3, "store")
    });
    assert!(metric(&served, "tallygate_store_returned_total") >= 2);
}

#[test]
fn c7_lists_at_once_over_a_store_that_comes_and_goes_admit_no_more_than_there_is() {
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
            let results = results["results"].as_array().expect("a list").clone();
            let names: Vec<_> = results.iter().map(|result| result["policy"].clone()).collect();
            assert_eq!(names, ["closed", "open", "closed", "alone"], "in order");
            assert_eq!(results[1]["allowed"], true, "{results:?}");
            assert_eq!(results[2]["allowed"], false, "more than there ever is: {results:?}");
            shared += u64::from(told(&results[0]).0);
        }
        shared
    };
    let admitted: u64 = std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS).map(|client| scope.spawn(move || lists(client))).collect();
        while !clients.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            proxy.cut();
            proxy.stall(true);
            std::thread::yield_now();
            proxy.stall(false);
            check(&served, "open", "nobody", 0);
        }
        clients.into_iter().map(|client| client.join().expect("its lists were answered")).sum()
    });
    assert!(admitted <= 4, "{admitted} of 4 were admitted");
    until_the_store_answers(&served);
    assert_eq!(store.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

#[test]
fn g1_a_failure_policy_is_read_anew_with_the_rest() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    store.kill();
    assert_eq!(told(&check(&served, "open", "alice", 1)).2, "failed_open");
    let text =
        POLICIES.replacen("window = \"1000h\"", "window = \"1000h\"\non_store_error = \"deny\"", 1);
    std::fs::write(served.config(), text.replace("instances = 2", "instances = 4"))
        .expect("written");
    let reload = ask(served.http(), "POST /v1/admin/reload", &[], "");
    assert_eq!(reload.status, 200, "{reload:?}");
    assert_eq!(told(&check(&served, "open", "alice", 1)).2, "failed_closed");
    assert_eq!(check(&served, "alone", "alice", 1)["limit"], 1, "a quarter of four");
}

#[test]
fn j3_a_store_that_is_out_of_memory_makes_readyz_say_degraded_until_it_has_memory_again() {
    let store = Server::start(Flavor::Redis);
    let served = served(&store.url());
    until_the_store_answers(&served);
    assert_eq!(get(served.http(), "/readyz").body, "ready\n");
    assert_eq!(metric(&served, "tallygate_store_out_of_memory"), 0);
    let _: () = store.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    wait_until("the store refuses a write", PATIENCE, || {
        told(&check(&served, "closed", "alice", 1)).2 == "failed_closed"
    });
    let ready = get(served.http(), "/readyz");
    assert_eq!(ready.status, 200);
    assert!(ready.body.starts_with("degraded: the store is out of memory"), "{}", ready.body);
    assert_eq!(metric(&served, "tallygate_store_out_of_memory"), 1);
    assert!(metric(&served, "tallygate_store_out_of_memory_replies_total") > 0);
    let _: () = store.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    wait_until("the store decides", PATIENCE, || {
        told(&check(&served, "closed", "bob", 1)).2 == "store"
    });
    wait_until("it is ready", PATIENCE, || get(served.http(), "/readyz").body == "ready\n");
}

/// Callers that share a hot key get the quota and no more over HTTP, and the failure setting, which would allow them, is
/// never asked.
#[test]
fn j15_many_connections_on_one_key_of_a_store_at_a_distance_get_exactly_the_quota() {
    let store = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&store.address());
    let served = served(&proxy.url());
    until_the_store_answers(&served);
    proxy.delay(Duration::from_millis(20));
    let mut sources = std::collections::BTreeMap::<(String, bool), u32>::new();
    std::thread::scope(|scope| {
        let asking: Vec<_> = (0..40)
            .map(|_| {
                scope.spawn(|| (0..3).map(|_| check(&served, "open", "hot", 1)).collect::<Vec<_>>())
            })
            .collect();
        for one in asking {
            for decision in one.join().expect("no panic") {
                let (allowed, _, source) = told(&decision);
                *sources.entry((source.to_owned(), allowed)).or_default() += 1;
            }
        }
    });
    let allowed: u32 = sources.iter().filter(|((_, allowed), _)| *allowed).map(|(_, n)| n).sum();
    assert_eq!(allowed, 4, "{sources:?}");
    assert!(!sources.keys().any(|(source, _)| source.starts_with("failed")), "{sources:?}");
}
