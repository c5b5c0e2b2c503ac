//! Tests leases and the deny cache: the source of a decision is reported and counted, and leased units are returned.

use crate::common::Served;
use crate::http_client::{get, post};
use serde_json::{Value, json};
use tallygate_testkit::servers::{Flavor, Server};

/// Policies that refill nothing during a test.
const POLICIES: &str = r#"
    [policies.leased]
    limit = 1000
    window = "1000h"
    lease = "20s"
    [policies.few]
    limit = 1
    window = "1000h"
    [policies.uncached]
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
    line.and_then(|value| value.parse().ok()).expect("the value is a number")
}

fn decisions(served: &Served, policy: &str, outcome: &str, source: &str) -> u64 {
    let labels = format!("policy=\"{policy}\",outcome=\"{outcome}\",source=\"{source}\"");
    count(served, &format!("tallygate_decisions_total{{{labels}}}"))
}

#[test]
fn a_hot_client_is_served_from_a_lease_that_is_reported_counted_and_returned() {
    let store = Server::start(Flavor::Redis);
    let mut served = Served::start(&["--store", &store.url()], Some(POLICIES));
    let decisions_made: Vec<Value> = (0..200).map(|_| ask(&served, "check", "leased")).collect();
    assert!(decisions_made.iter().all(|decision| decision["allowed"] == true));
    let by_lease = decisions_made.iter().filter(|decision| decision["source"] == "lease").count();
    assert!(by_lease > 50, "{by_lease} of 200");
    assert_eq!(
        u64::try_from(by_lease).ok(),
        Some(decisions(&served, "leased", "allowed", "lease"))
    );
    assert!(count(&served, "tallygate_store_leased_units_total") > 0);
    assert_eq!(count(&served, "tallygate_store_lease_expired_units_total"), 0);
    assert_eq!(served.stop(), Some(0));

    let other = Served::start(&["--store", &store.url()], Some(POLICIES));
    assert_eq!(
        ask(&other, "peek", "leased")["remaining"],
        800,
        "the unused units of the lease were returned"
    );
}

#[test]
fn a_denial_is_cached_unless_the_policy_disables_it() {
    let store = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &store.url()], Some(POLICIES));
    for (policy, expected) in [("few", "deny_cache"), ("uncached", "store")] {
        assert_eq!(ask(&served, "check", policy)["allowed"], true);
        assert_eq!(ask(&served, "check", policy)["source"], "store");
        let third = ask(&served, "check", policy);
        assert_eq!((&third["allowed"], &third["source"]), (&json!(false), &json!(expected)));
        assert_eq!(decisions(&served, policy, "denied", expected), 2 - u64::from(policy == "few"));
    }
}
