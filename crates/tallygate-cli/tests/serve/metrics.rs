//! Tests `/metrics`: Prometheus' own tools accept both formats, with every algorithm and every store.
//!
//! `scripts/check-deploy --install` installs promtool, and `scripts/install-test-clients` the Python parser.

#![allow(clippy::unwrap_used, reason = "a failing test panics")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use crate::common::Served;
use crate::http_client::{Client, Reply, post};
use serde_json::{Value, json};
use tallygate_testkit::servers::{Flavor, Server};

const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

const ALGORITHMS: [&str; 6] = [
    "token_bucket",
    "gcra",
    "leaky_bucket",
    "fixed_window",
    "sliding_window_log",
    "sliding_window_counter",
];

/// A policy per algorithm, one with several limits, of which one is a shadow, tiers, and a name that needs escapes.
fn config() -> String {
    let mut config = String::new();
    for algorithm in ALGORITHMS {
        config += &format!(
            "[policies.{algorithm}]\nalgorithm = \"{algorithm}\"\nlimit = 3\nwindow = \"1h\"\n"
        );
    }
    config += r#"
        ["policies".'a "name" with \ and ü']
        limit = 3
        window = "1h"
        [policies.several]
        limits = [
            { name = "hourly", limit = 100, window = "1h", algorithm = "fixed_window" },
            { name = "burst", limit = 2, window = "1m", shadow = true },
        ]
        [policies.several.tiers.pro]
        limit = 7
        window = "90s"
    "#;
    config
}

fn policies() -> Vec<String> {
    let names = ALGORITHMS.into_iter().chain([r#"a "name" with \ and ü"#, "several"]);
    names.map(str::to_owned).collect()
}

/// Sends some requests of every kind.
fn use_all(served: &Served) {
    for policy in policies() {
        for _ in 0..5 {
            let body = json!({ "policy": policy, "key": "alice" }).to_string();
            assert_eq!(post(served.http(), "/v1/check", &body).status, 200);
        }
    }
    for _ in 0..3 {
        resp(served, &["CL.THROTTLE", "bob", "0", "1", "3600"]);
    }
}

fn resp(served: &Served, words: &[&str]) {
    let output = Command::new("redis-cli").args(["-p", served.resp_port()]).args(words).output();
    let output = output.expect("redis-cli is installed: run scripts/install-test-servers");
    assert!(output.status.success(), "{output:?}");
}

fn metrics(served: &Served, accept: &[(&str, &str)]) -> Reply {
    let mut client = Client::connect(served.http());
    client.send("GET /metrics", accept, b"");
    let reply = client.read().expect("there is a reply");
    assert_eq!((reply.status, reply.field("vary")), (200, Some("accept")));
    reply
}

fn text_metrics(served: &Served) -> String {
    let reply = metrics(served, &[]);
    assert_eq!(reply.field("content-type"), Some(TEXT));
    reply.body
}

fn open_metrics(served: &Served) -> String {
    let accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
    let reply = metrics(served, &[("accept", accept)]);
    assert_eq!(reply.field("content-type"), Some(OPEN_METRICS));
    reply.body
}

fn target() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target"))
}

fn run(mut command: Command, input: &str) -> Output {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("it is installed: see the top of this file");
    let mut stdin = child.stdin.take().expect("the stream is piped");
    stdin.write_all(input.as_bytes()).expect("the program reads its input");
    drop(stdin);
    child.wait_with_output().expect("the program ends")
}

/// Checks the text format with promtool, whose lints also know naming conventions.
#[track_caller]
fn assert_promtool_accepts(text: &str) {
    let mut promtool = Command::new(target().join("deploy-checks/promtool"));
    promtool.args(["check", "metrics"]);
    let output = run(promtool, text);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.is_empty(), "promtool says:\n{said}\nabout:\n{text}");
}

/// Parses `OpenMetrics` with the parser of `prometheus_client`. Returns the samples by name and labels.
#[track_caller]
fn parsed(open_metrics: &str) -> Vec<Sample> {
    const PARSE: &str = r#"
import json, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
families = list(text_string_to_metric_families(sys.stdin.read()))
for family in families:
    assert family.documentation, family.name
    for sample in family.samples:
        print(json.dumps([family.name, family.type, sample.name, sample.labels, sample.value]))
"#;
    let mut python = Command::new("python3");
    python.args(["-c", PARSE]).env("PYTHONPATH", target().join("test-clients/prometheus"));
    let output = run(python, open_metrics);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "the parser says:\n{said}\nabout:\n{open_metrics}");
    let lines = String::from_utf8(output.stdout).expect("the text is UTF-8");
    lines.lines().map(|line| Sample::of(&serde_json::from_str(line).unwrap())).collect()
}

#[derive(Debug)]
struct Sample {
    kind: String,
    name: String,
    labels: BTreeMap<String, String>,
    value: f64,
}

impl Sample {
    fn of(line: &Value) -> Self {
        let text = |index: usize| line[index].as_str().expect("the field is text").to_owned();
        let labels = serde_json::from_value(line[3].clone()).expect("labels are text");
        Self { kind: text(1), name: text(2), labels, value: line[4].as_f64().unwrap() }
    }

    fn label(&self, name: &str) -> &str {
        self.labels.get(name).map_or("", String::as_str)
    }
}

/// Returns the sum of the samples with this name and these labels.
fn sum(samples: &[Sample], name: &str, labels: &[(&str, &str)]) -> f64 {
    let is_it = |sample: &&Sample| {
        sample.name == name && labels.iter().all(|(label, value)| sample.label(label) == *value)
    };
    let found: Vec<_> = samples.iter().filter(is_it).collect();
    assert!(!found.is_empty(), "no {name} {labels:?} in {samples:#?}");
    found.iter().map(|sample| sample.value).sum()
}

/// Checks what holds with every store, and returns the samples.
fn check_all(served: &Served) -> Vec<Sample> {
    assert_promtool_accepts(&text_metrics(served));
    use_all(served);
    assert_promtool_accepts(&text_metrics(served));
    let samples = parsed(&open_metrics(served));
    for policy in policies() {
        let decisions = sum(&samples, "tallygate_decisions_total", &[("policy", &policy)]);
        assert_eq!(decisions, 5.0, "{policy}");
        assert_eq!(sum(&samples, "tallygate_policy_info", &[("policy", &policy)]), 1.0);
    }
    let throttled = [("policy", "CL.THROTTLE")];
    assert_eq!(sum(&samples, "tallygate_decisions_total", &throttled), 3.0);
    for algorithm in ALGORITHMS {
        let labels =
            [("policy", algorithm), ("algorithm", algorithm), ("quota", "3"), ("window", "1h")];
        assert_eq!(sum(&samples, "tallygate_limit_info", &labels), 1.0);
    }
    let tier = [("policy", "several"), ("tier", "pro"), ("quota", "7"), ("window", "1m30s")];
    assert_eq!(sum(&samples, "tallygate_limit_info", &tier), 1.0);
    let count = sum(&samples, "tallygate_request_seconds_count", &[("surface", "http")]);
    let last =
        sum(&samples, "tallygate_request_seconds_bucket", &[("surface", "http"), ("le", "+Inf")]);
    assert!(count >= 40.0 && count == last, "{count} {last}");
    samples
}

#[test]
fn promtool_and_the_python_parser_accept_the_metrics_of_the_memory_store() {
    let served = Served::start(&[], Some(&config()));
    let samples = check_all(&served);
    let denied = [("policy", "CL.THROTTLE"), ("outcome", "denied"), ("source", "store")];
    assert_eq!(sum(&samples, "tallygate_decisions_total", &denied), 2.0);
    assert_eq!(sum(&samples, "tallygate_keys_kept", &[("policy", "CL.THROTTLE")]), 1.0);
    assert_eq!(sum(&samples, "tallygate_keys_kept", &[("policy", "gcra")]), 1.0);
}

#[test]
fn promtool_and_the_python_parser_accept_the_metrics_of_redis() {
    let redis = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &redis.url()], Some(&config()));
    let samples = check_all(&served);
    assert!(sum(&samples, "tallygate_store_calls_total", &[]) > 0.0);
    // Without Redis there is a decision as well, with another source.
    let unavailable = Served::start(&["--store", "redis://127.0.0.1:1"], Some(&config()));
    let samples = check_all(&unavailable);
    assert!(sum(&samples, "tallygate_decisions_total", &[("source", "failed_open")]) > 0.0);
}

#[test]
fn denials_of_shadow_limits_are_counted_from_the_start() {
    let served = Served::start(&[], Some(&config()));
    let shadow = "tallygate_shadow_denials_total{policy=\"several\",limit=\"burst\"}";
    let before = text_metrics(&served);
    assert!(before.contains(&format!("\n{shadow} 0\n")), "{before}");
    for _ in 0..5 {
        let reply = post(served.http(), "/v1/check", r#"{"policy":"several","key":"alice"}"#);
        assert_eq!(reply.json()["allowed"], true);
    }
    let after = text_metrics(&served);
    assert!(after.contains(&format!("\n{shadow} 3\n")), "{after}");
}

#[test]
fn the_process_has_the_usual_metrics() {
    let served = Served::start(&[], Some(&config()));
    let samples = parsed(&open_metrics(&served));
    let value = |name: &str| sum(&samples, name, &[]);
    assert!(value("process_cpu_seconds_total") > 0.0);
    let resident = value("process_resident_memory_bytes") / 1024.0;
    let peak = served.peak_kib() as f64;
    assert!(resident > 1024.0 && resident <= peak, "{resident} of {peak} KiB");
    assert!(value("process_virtual_memory_bytes") > 1024.0 * resident);
    let (open, most) = (value("process_open_fds"), value("process_max_fds"));
    assert!((3.0..=most).contains(&open), "{open} of {most}");
    assert!(value("process_threads") >= 2.0);
    let age = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
    let age = age.as_secs_f64() - value("process_start_time_seconds");
    assert!((-1.0..600.0).contains(&age), "{age} s");
}

#[test]
fn every_metric_of_the_documentation_exists_and_every_metric_is_documented() {
    let documentation = include_str!("../../../../docs/server.md");
    let rows = documentation.lines().filter_map(|line| line.strip_prefix("| `"));
    let mut documented: BTreeSet<_> = rows
        .filter_map(|row| row.split_once('`'))
        .map(|(name, _)| name.to_owned())
        .filter(|name| name.starts_with("tallygate_") || name.starts_with("process_"))
        .collect();
    let mut exposed = BTreeSet::new();
    for store in ["memory", "redis://127.0.0.1:1"] {
        let served = Served::start(&["--store", store], Some(&config()));
        use_all(&served);
        for sample in parsed(&open_metrics(&served)) {
            let name = match &*sample.kind {
                "histogram" => sample.name.rsplit_once('_').unwrap().0.to_owned(),
                _ => sample.name,
            };
            exposed.insert(name);
        }
    }
    // It exists only with rules of Envoy that ask for it; the tests of Envoy read it.
    assert!(documented.remove("tallygate_envoy_descriptor_decisions_total"));
    assert_eq!(documented, exposed);
}

/// Everyone counts at the same time, while metrics are read: nothing is lost.
#[test]
fn decisions_of_many_connections_add_up() {
    let served = Served::start(&[], Some(&config()));
    std::thread::scope(|scope| {
        for connection in 0..8 {
            let address = served.http().to_owned();
            scope.spawn(move || {
                let mut client = Client::connect(&address);
                for _ in 0..100 {
                    let body = json!({ "policy": "gcra", "key": format!("{connection}") });
                    client.send("POST /v1/check", &[], body.to_string().as_bytes());
                    assert_eq!(client.read().unwrap().status, 200);
                }
            });
        }
        for _ in 0..5 {
            open_metrics(&served);
        }
    });
    let samples = parsed(&open_metrics(&served));
    let decisions = |outcome| {
        sum(&samples, "tallygate_decisions_total", &[("policy", "gcra"), ("outcome", outcome)])
    };
    assert_eq!((decisions("allowed"), decisions("denied")), (24.0, 776.0));
}
