//! The server that asks its store less often: who answered is told and counted, and what is held is given back.

use crate::common::Served;
use crate::http_client::{get, post};
use serde_json::{Value, json};
use tallygate_testkit::servers::{Flavor, Server};

/// Of which nothing comes back while a test runs.
const POLICIES: &str = r#"
    [policies.leased]
    limit = 1000
    window = "1000h"
    lease = "20s"
    [policies.few]
    limit = 1
    window = "1000h"
    [policies.asked]
    limit = 1
    window = "1000h"
    deny_cache = false
"#;

#[track_caller]
fn ask(served: &Served, verb: &str, policy: &str) -> Value {
    let body = json!({ "policy": policy, "key": "alice", "cost": u8::from(verb == "check") });
    let reply = post(served.http(), &format!("/v1/{verb}"), &body.to_string());
    assert_eq!(reply.status, 200, "{reply:?}");
    reply.json()
}

fn count(served: &Served, name: &str) -> u64 {
    let metrics = get(served.http(), "/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    assert!(line.is_some(), "{name} in {metrics}");
    line.and_then(|value| value.parse().ok()).expect("a number")
}

fn decisions(served: &Served, policy: &str, outcome: &str, source: &str) -> u64 {
    let labels = format!("policy=\"{policy}\",outcome=\"{outcome}\",source=\"{source}\"");
    count(served, &format!("tallygate_decisions_total{{{labels}}}"))
}

#[test]
fn a_hot_client_is_served_from_a_lease_which_is_told_counted_and_given_back() {
    let store = Server::start(Flavor::Redis);
    let mut served = Served::start(&["--store", &store.url()], Some(POLICIES));
    let answers: Vec<Value> = (0..200).map(|_| ask(&served, "check", "leased")).collect();
    assert!(answers.iter().all(|answer| answer["allowed"] == true));
    let by_lease = answers.iter().filter(|answer| answer["source"] == "lease").count();
    assert!(by_lease > 50, "{by_lease} of 200");
    assert_eq!(
        u64::try_from(by_lease).ok(),
        Some(decisions(&served, "leased", "allowed", "lease"))
    );
    assert!(count(&served, "tallygate_store_leased_total") > 0);
    assert_eq!(count(&served, "tallygate_store_lease_lapsed_total"), 0);
    assert_eq!(served.stop(), Some(0));

    let other = Served::start(&["--store", &store.url()], Some(POLICIES));
    assert_eq!(ask(&other, "peek", "leased")["remaining"], 800, "what was left was given back");
}

#[test]
fn a_refusal_is_remembered_unless_the_policy_says_otherwise() {
    let store = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &store.url()], Some(POLICIES));
    for (policy, expected) in [("few", "deny_cache"), ("asked", "store")] {
        assert_eq!(ask(&served, "check", policy)["allowed"], true);
        assert_eq!(ask(&served, "check", policy)["source"], "store");
        let again = ask(&served, "check", policy);
        assert_eq!((&again["allowed"], &again["source"]), (&json!(false), &json!(expected)));
        assert_eq!(decisions(&served, policy, "refused", expected), 2 - u64::from(policy == "few"));
    }
}
