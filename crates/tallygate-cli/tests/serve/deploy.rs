//! Checks `deploy/` against the server: every metric that an alert or a dashboard names exists.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::common::Served;

const ALERTS: &str = include_str!("../../../../deploy/prometheus-alerts.yml");
const ALERTS_TEST: &str = include_str!("../../../../deploy/prometheus-alerts-test.yml");
const DASHBOARD: &str = include_str!("../../../../deploy/grafana-dashboard.json");
const OPERATIONS: &str = include_str!("../../../../docs/operations.md");

/// Returns the names of all metrics of a server with the memory store and of one with a Redis store, which need not run.
fn exposed_metrics() -> BTreeSet<String> {
    let policy = "[policies.api]\nlimit = 5\nwindow = \"1m\"\n";
    let in_memory = Served::start(&[], Some(policy));
    let in_redis = Served::start(&["--store", "redis://127.0.0.1:1"], Some(policy));
    let mut names = BTreeSet::new();
    for served in [&in_memory, &in_redis] {
        let mut stream = TcpStream::connect(served.http()).expect("the connection opens");
        stream
            .write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
            .expect("the request is sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("the server replies");
        names.extend(metrics_in(&text));
    }
    names
}

/// Returns the names of metrics in a text.
fn metrics_in(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("tallygate_")).map(str::to_owned)
}

#[test]
fn every_metric_of_the_alerts_and_the_dashboard_exists() {
    let exposed = exposed_metrics();
    for (file, text) in [("alerts", ALERTS), ("tests", ALERTS_TEST), ("dashboard", DASHBOARD)] {
        let named: BTreeSet<_> = metrics_in(text).collect();
        assert!(named.len() > 5, "{file} names {named:?}");
        let unknown: Vec<_> = named.difference(&exposed).collect();
        assert!(unknown.is_empty(), "{file}: no server has {unknown:?}");
    }
}

#[test]
fn every_alert_links_to_a_runbook() {
    let headings: BTreeSet<_> = OPERATIONS
        .lines()
        .filter_map(|line| line.strip_prefix("### "))
        .map(|heading| heading.to_lowercase().replace(' ', "-"))
        .collect();
    let alerts = ALERTS.matches("- alert: ").count();
    let places: Vec<_> = ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("runbook: docs/operations.md#"))
        .collect();
    assert_eq!(places.len(), alerts, "every alert needs one runbook");
    for place in places {
        assert!(headings.contains(place), "docs/operations.md has no {place:?} among {headings:?}");
    }
}
