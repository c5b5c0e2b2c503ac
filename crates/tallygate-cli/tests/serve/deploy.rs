//! What `deploy/` says of the server is so: every metric that an alert or a dashboard names is told.

use std::collections::BTreeSet;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use crate::common::Served;

const ALERTS: &str = include_str!("../../../../deploy/prometheus-alerts.yml");
const ALERTS_TEST: &str = include_str!("../../../../deploy/prometheus-alerts-test.yml");
const DASHBOARD: &str = include_str!("../../../../deploy/grafana-dashboard.json");
const OPERATIONS: &str = include_str!("../../../../docs/operations.md");

/// All that a server tells, by name: with its clients in memory, and with a store, which need not be there.
fn told() -> BTreeSet<String> {
    let policy = "[policies.api]\nlimit = 5\nwindow = \"1m\"\n";
    let in_memory = Served::start(&[], Some(policy));
    let in_redis = Served::start(&["--store", "redis://127.0.0.1:1"], Some(policy));
    let mut names = BTreeSet::new();
    for served in [&in_memory, &in_redis] {
        let mut stream = TcpStream::connect(served.http()).expect("it listens");
        stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n").expect("it is asked");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("it answers");
        names.extend(metrics_in(&text));
    }
    names
}

/// The names of metrics in a text.
fn metrics_in(text: &str) -> impl Iterator<Item = String> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    words.filter(|word| word.starts_with("tallygate_")).map(str::to_owned)
}

#[test]
fn every_metric_of_the_alerts_and_the_dashboard_is_told_by_a_server() {
    let told = told();
    for (file, text) in [("alerts", ALERTS), ("tests", ALERTS_TEST), ("dashboard", DASHBOARD)] {
        let named: BTreeSet<_> = metrics_in(text).collect();
        assert!(named.len() > 5, "{file} names {named:?}");
        let unknown: Vec<_> = named.difference(&told).collect();
        assert!(unknown.is_empty(), "{file}: no server tells {unknown:?}");
    }
}

#[test]
fn every_alert_says_what_to_do() {
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
    assert_eq!(places.len(), alerts, "one for each alert");
    for place in places {
        assert!(headings.contains(place), "docs/operations.md has no {place:?} among {headings:?}");
    }
}
