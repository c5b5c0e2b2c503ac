//! The service on Redis, Valkey and a cluster, and without an answer of the store.

use std::collections::HashMap;

use tallygate_testkit::servers::{Cluster, Flavor, Server, wait_until};

use crate::common::Served;
use crate::grpc_client::{GrpcClient, RateLimit, SHOULD_RATE_LIMIT};
use crate::http_client::{get, post};
use crate::service::{PATIENCE, RULES, Rules, serve};

const DEADLINE_EXCEEDED: u32 = 4;
const UNAVAILABLE: u32 = 14;

fn both(user: &str) -> RateLimit {
    RateLimit::of("web", &[&[("path", "/api")], &[("user", user)]])
}

fn remaining(client: &mut GrpcClient, request: &RateLimit) -> (u64, Vec<u64>) {
    let response = client.ask(request).unwrap();
    (response.code, response.statuses.iter().map(|status| status.remaining).collect())
}

/// Two descriptors are charged together, and two servers share the counters.
fn check_all_or_nothing(store: &str) {
    let rules = Rules::new(RULES);
    let [first, second] = [(); 2].map(|()| serve(&rules, &["--store", store], None));
    let mut first = GrpcClient::connect(first.grpc());
    let mut other = GrpcClient::connect(second.grpc());
    assert_eq!(remaining(&mut first, &both("a")), (1, vec![2, 1]));
    assert_eq!(remaining(&mut other, &both("a")), (1, vec![1, 0]));
    assert_eq!(remaining(&mut first, &both("a")), (2, vec![1, 0]), "it charges nothing");
    assert_eq!(remaining(&mut other, &both("b")), (1, vec![0, 1]));
    assert_eq!(remaining(&mut first, &both("b")), (2, vec![0, 1]));
}

#[test]
fn descriptors_are_charged_together_on_redis_and_valkey() {
    for flavor in [Flavor::Redis, Flavor::Valkey] {
        let store = Server::start(flavor);
        check_all_or_nothing(&store.url());
        assert_eq!(store.keys_without_ttl(), Vec::<Vec<u8>>::new());
    }
}

#[test]
fn descriptors_are_charged_together_across_the_slots_of_a_cluster() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let nodes: Vec<_> = cluster.nodes().iter().map(Server::address).collect();
    check_all_or_nothing(&format!("redis+cluster://{}", nodes.join(",")));
    // Only the slot secret never expires.
    assert_eq!(cluster.keys_without_ttl(), [b"tallygate:{slots}secret".to_vec()]);
}

#[test]
fn two_descriptors_take_one_call_to_redis() {
    let store = Server::start(Flavor::Redis);
    let rules = Rules::new(RULES);
    let served = serve(&rules, &["--store", &store.url()], None);
    let mut client = GrpcClient::connect(served.grpc());
    client.ask(&both("a")).unwrap();
    let calls = || {
        let metrics = get(served.http(), "/metrics").body;
        let line =
            metrics.lines().find_map(|line| line.strip_prefix("tallygate_store_calls_total "));
        line.unwrap().parse::<u64>().unwrap()
    };
    let before = calls();
    client.ask(&both("b")).unwrap();
    assert_eq!(calls() - before, 1);
}

/// Returns the code and the remaining units after each of some hits, with `charge = "always"`.
fn hits_always(options: &[&str]) -> Vec<(String, u64)> {
    let rules = Rules::new(RULES);
    let served = serve(&rules, options, Some("[envoy]\ncharge = \"always\"\n"));
    let hits = |(hits, is_negative): (u32, bool)| {
        let body = format!(
            r#"{{"domain":"web","descriptors":[{{"entries":[{{"key":"user","value":"a"}}],"hitsAddend":{hits},"isNegativeHits":{is_negative}}}]}}"#
        );
        let status = post(served.http(), "/json", &body).json()["statuses"][0].clone();
        let remaining = status["limitRemaining"].as_u64().unwrap_or_default();
        (status["code"].as_str().unwrap().to_owned(), remaining)
    };
    [(2, false), (0, false), (2, false), (0, false), (3, true), (0, false), (9, true), (3, false)]
        .map(hits)
        .into()
}

#[test]
fn excess_and_negative_hits_count_the_same_in_memory_and_on_redis() {
    let store = Server::start(Flavor::Redis);
    let in_memory = hits_always(&[]);
    assert_eq!(hits_always(&["--store", &store.url()]), in_memory);
    let expected = [
        ("OK", 0),
        ("OK", 0),
        ("OVER_LIMIT", 0),
        ("OVER_LIMIT", 0),
        // Four of two were used.
        ("OK", 1),
        ("OK", 1),
        ("OK", 2),
        ("OVER_LIMIT", 0),
    ];
    assert_eq!(in_memory, expected.map(|(code, remaining)| (code.to_owned(), remaining)));
}

const BY_SETTING: &str = "
domain: web
descriptors:
  - key: error
    rate_limit: {unit: year, requests_per_unit: 2}
  - key: allow
    rate_limit: {unit: year, requests_per_unit: 2, on_store_error: allow}
  - key: deny
    rate_limit: {unit: year, requests_per_unit: 2, on_store_error: deny}
  - key: local
    rate_limit: {unit: year, requests_per_unit: 2, on_store_error: local, instances: 2}
  - key: shadow
    shadow_mode: true
    rate_limit: {unit: year, requests_per_unit: 2}
";

/// Fault F4.
#[test]
fn without_the_store_each_rule_uses_its_failure_setting() {
    let store = Server::start(Flavor::Redis);
    let rules = Rules::new(BY_SETTING);
    let served = serve(&rules, &["--store", &store.url()], None);
    let mut client = GrpcClient::connect(served.grpc());
    let ask = |client: &mut GrpcClient, key: &str| {
        client.ask(&RateLimit::of("web", &[&[(key, "x")]])).map(|response| response.code)
    };
    for key in ["error", "allow", "deny", "local", "shadow"] {
        assert_eq!(ask(&mut client, key), Ok(1), "{key}");
    }
    store.kill();
    wait_until("the breaker opens", PATIENCE, || {
        let _ = ask(&mut client, "allow");
        get(served.http(), "/metrics").body.contains("tallygate_store_breaker_open 1")
    });
    let codes: HashMap<_, _> = ["error", "allow", "deny", "shadow"]
        .into_iter()
        .map(|key| (key, ask(&mut client, key).map_err(|failed| failed.code)))
        .collect();
    let expected = HashMap::from([
        ("error", Err(UNAVAILABLE)),
        ("allow", Ok(1)),
        ("deny", Ok(2)),
        ("shadow", Ok(1)),
    ]);
    assert_eq!(codes, expected);
    // The share of this server is one request.
    assert_eq!([ask(&mut client, "local"), ask(&mut client, "local")], [Ok(1), Ok(2)]);
    // With a rule that leaves the decision to Envoy, the whole request fails.
    let both = RateLimit::of("web", &[&[("allow", "x")], &[("error", "x")]]);
    assert_eq!(client.ask(&both).unwrap_err().code, UNAVAILABLE);
    store.restart();
    wait_until("the store answers", PATIENCE, || ask(&mut client, "error").is_ok());
}

/// The caller's deadline is shorter than the time budget of the store.
#[test]
fn a_call_ends_at_its_deadline() {
    let store = Server::start(Flavor::Redis);
    let rules = Rules::new(RULES);
    let served = serve(&rules, &["--store", &store.url()], None);
    let mut client = GrpcClient::connect(served.grpc());
    client.ask(&both("a")).unwrap();
    store.freeze();
    let deadline = [("grpc-timeout", "1m")];
    let late = client.call(SHOULD_RATE_LIMIT, &deadline, &both("b").encode());
    store.thaw();
    assert_eq!(late.unwrap_err().code, DEADLINE_EXCEEDED);
}

/// A snapshot has the counters of Envoy's rules as well.
#[test]
fn a_snapshot_keeps_the_counters() {
    let rules = Rules::new(RULES);
    let folder = tempfile::tempdir().unwrap();
    let snapshot = folder.path().join("snapshot").display().to_string();
    let start = || serve(&rules, &["--snapshot", &snapshot], None);
    let ask = |served: &Served| remaining(&mut GrpcClient::connect(served.grpc()), &both("a"));
    let mut served = start();
    assert_eq!(ask(&served), (1, vec![2, 1]));
    assert_eq!(served.stop(), Some(0));
    assert_eq!(ask(&start()), (1, vec![1, 0]));
}
