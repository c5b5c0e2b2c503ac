//! Compares the formats that docs/compatibility.md calls stable with the files in `tests/golden`.
//!
//! A test fails if a format changes. If the change is intended, run the tests with `UPDATE_GOLDEN=1`, look at the
//! difference, and describe the change in CHANGELOG.md.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::Duration;

use crate::common::Served;
use crate::http_client::Client;
use serde_json::Value;
use tallygate_testkit::servers::Certificates;

/// One policy of each kind, with a tier and an override. Nothing is earned back during a test.
const CONFIG: &str = include_str!("../golden/config.toml");

/// Requests, of which each has a reply with a stable form.
const REQUESTS: &[(&str, &str)] = &[
    ("POST /v1/check", r#"{"policy":"api","key":"alice"}"#),
    ("POST /v1/check", r#"{"policy":"api","key":"alice","cost":1000}"#),
    ("POST /v1/check", r#"{"checks":[{"policy":"api","key":"alice"}]}"#),
    (
        "POST /v1/check",
        r#"{"all":[{"policy":"api","key":"alice"},{"policy":"login","key":"alice"}]}"#,
    ),
    ("POST /v1/check", r#"{"policy":"nothing","key":"alice"}"#),
    ("POST /v1/peek", r#"{"policy":"api","key":"alice"}"#),
    ("POST /v1/refund", r#"{"policy":"api","key":"alice","cost":1}"#),
    ("POST /v1/reserve", r#"{"policy":"api","key":"alice","cost":2,"ttl_ms":60000}"#),
    ("POST /v1/settle", r#"{"reservation":"00000000000000000000000000000000","actual":1}"#),
    ("POST /v1/reset", r#"{"policy":"api","key":"alice"}"#),
    ("GET /v1/authorize/address", ""),
    ("GET /v1/policies", ""),
    ("GET /v1/admin/overrides", ""),
    ("GET /readyz", ""),
    ("GET /livez", ""),
];

const COMMANDS: &[&str] = &[
    "TG.CHECK api bob",
    "TG.CHECK api bob COST 2 TIER pro",
    "TG.PEEK api bob",
    "TG.REFUND api bob 1",
    "TG.RESET api bob",
    "CL.THROTTLE bob 4 10 60",
    "CL.THROTTLE bob 4 10 60 100",
    "TG.CHECK nothing bob",
    "TG.CHECK api bob COST -1",
    "PING",
    "ECHO hello",
    "SELECT 0",
];

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden")
}

/// Compares a text with a file, or writes the file if `UPDATE_GOLDEN` is set.
#[track_caller]
fn assert_golden(name: &str, actual: &str) {
    let path = folder().join(name);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, actual).expect("the file is written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_default();
    assert_eq!(
        expected, actual,
        "{name} differs. If the change is intended, run this test with UPDATE_GOLDEN=1 and describe the change in \
         CHANGELOG.md."
    );
}

/// Writes the names and types of a JSON value, without its values.
fn write_shape(out: &mut String, value: &Value, depth: usize) {
    let indent = "  ".repeat(depth + 1);
    match value {
        Value::Object(fields) => {
            let mut names: Vec<_> = fields.keys().collect();
            names.sort();
            for name in names {
                let kind = match &fields[name] {
                    Value::Null => "null",
                    Value::Bool(_) => "boolean",
                    Value::Number(_) => "number",
                    Value::String(_) => "string",
                    Value::Array(_) => "list",
                    Value::Object(_) => "object",
                };
                let _ = writeln!(out, "{indent}{name}: {kind}");
                write_shape(out, &fields[name], depth + 1);
            }
        }
        // The items of a list have one form.
        Value::Array(items) => {
            if let Some(first) = items.first() {
                write_shape(out, first, depth);
            }
        }
        _ => {}
    }
}

#[test]
fn replies_over_http_keep_their_form() {
    let served = Served::start(&[], Some(CONFIG));
    let mut out = String::new();
    for (line, body) in REQUESTS {
        let mut client = Client::connect(served.http());
        client.send(line, &[], body.as_bytes());
        let reply = client.read().expect("there is a reply");
        let _ = writeln!(out, "{line} {body}\n{}", reply.status);
        let named = [
            "RateLimit",
            "RateLimit-Policy",
            "X-RateLimit-Limit",
            "X-RateLimit-Remaining",
            "X-RateLimit-Reset",
            "Retry-After",
            "Content-Type",
        ];
        for name in named {
            if let Some(value) = reply.field(name) {
                let shown = if name == "Content-Type" { value } else { "…" };
                let _ = writeln!(out, "{name}: {shown}");
            }
        }
        if let Ok(value) = serde_json::from_str::<Value>(&reply.body) {
            write_shape(&mut out, &value, 0);
        }
        out.push('\n');
    }
    assert_golden("http.txt", &out);
}

/// Replaces integers of at least four digits by `n`: times differ from run to run. Counts are smaller.
fn without_times(reply: &str) -> String {
    let mut out = String::new();
    for line in reply.lines() {
        match line.strip_prefix(':').map(|number| number.trim_start_matches('-').len()) {
            Some(4..) => out.push_str(":n"),
            _ => out.push_str(line),
        }
        out.push('\n');
    }
    out
}

#[test]
fn replies_over_resp_keep_their_form_in_both_protocols() {
    let served = Served::start(&[], Some(CONFIG));
    let mut out = String::new();
    for protocol in ["2", "3"] {
        let _ = writeln!(out, "== RESP{protocol}");
        for command in COMMANDS {
            let mut stream = TcpStream::connect(served.resp()).expect("the server listens");
            stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout is set");
            // The greeting differs from run to run, so only the reply after the marker counts.
            let lines = format!("HELLO {protocol}\r\nECHO marker\r\n{command}\r\n");
            stream.write_all(lines.as_bytes()).expect("the server reads");
            stream.shutdown(Shutdown::Write).expect("the connection is open");
            let mut replies = String::new();
            stream.read_to_string(&mut replies).expect("the server replies");
            let (_, reply) = replies.split_once("marker\r\n").expect("the marker is returned");
            let _ = writeln!(out, "> {command}\n{}", without_times(reply));
        }
    }
    assert_golden("resp.txt", &out);
}

#[test]
fn metrics_keep_their_names_types_and_labels() {
    let served = Served::start(&[], Some(CONFIG));
    let mut client = Client::connect(served.http());
    client.send("POST /v1/check", &[], br#"{"policy":"api","key":"alice"}"#);
    assert_eq!(client.read().expect("there is a reply").status, 200);
    client.send("GET /metrics", &[], b"");
    let body = client.read().expect("there is a reply").body;
    let mut found = BTreeSet::new();
    for line in body.lines() {
        if let Some(kind) = line.strip_prefix("# TYPE ") {
            found.insert(format!("{kind}\n"));
        } else if let Some((name, labels)) = line.split_once('{') {
            let labels: Vec<_> = labels
                .split('}')
                .next()
                .unwrap_or_default()
                .split("\",")
                .filter_map(|label| label.split_once('=').map(|(name, _)| name))
                .collect();
            found.insert(format!("{name} {{{}}}\n", labels.join(",")));
        }
    }
    assert_golden("metrics.txt", &found.into_iter().collect::<String>());
}

/// The golden configurations. Together they have every setting.
const CONFIGS: [&str; 3] = ["config", "config-files", "config-redis"];

/// Runs `check-config` on a golden configuration in a folder with the files that it names.
fn check_config(folder: &Path, name: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .arg("check-config")
        .arg(folder.join(name).with_extension("toml"))
        .output()
        .expect("the binary runs")
}

#[test]
fn configurations_with_every_setting_are_read_as_before() {
    let certificates = Certificates::new();
    let with_files = certificates.folder();
    for token in ["check.token", "admin.token"] {
        let text = format!("0123456789abcdef-{token}\n");
        std::fs::write(with_files.join(token), text).expect("the file is written");
    }
    for name in ["config.toml", "config-files.toml", "config-redis.toml", "envoy.yaml"] {
        std::fs::copy(folder().join(name), with_files.join(name)).expect("the file is copied");
    }
    for name in CONFIGS {
        let shown = check_config(with_files, name);
        assert!(shown.status.success(), "{shown:?}");
        let text = String::from_utf8(shown.stdout).expect("the text is UTF-8");
        let place = with_files.display().to_string();
        assert_golden(&format!("{name}.txt"), &text.replace(&place, "FOLDER"));
    }
}

/// The tables of the configuration, each with the lines above which a setting is in it.
const TABLES: [&str; 13] = [
    "",
    "[listen]",
    "[auth]",
    "[tls]",
    "[admin]",
    "[limits]",
    "[cl_throttle]",
    "[backtest]",
    "[envoy]",
    "[policies.api]",
    "[[policies.api.limits]]",
    "[policies.api.tiers.pro]",
    "[policies.api.penalty]",
];

/// Returns the names of the settings that a table can have, which the error about an unknown one lists.
fn names_of_settings(table: &str) -> Vec<String> {
    let folder = Certificates::new();
    let unknown = format!("{table}\n0000000000000000 = 1\n");
    std::fs::write(folder.folder().join("unknown.toml"), unknown).expect("the file is written");
    let shown = check_config(folder.folder(), "unknown");
    let message = String::from_utf8(shown.stderr).expect("the text is UTF-8");
    let listed = message.split_once("expected one of ").or_else(|| message.split_once("expected "));
    let (_, names) = listed.expect("the error lists the settings");
    names.split([',', ' ', '`', '\n']).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// A new setting must be added to a golden configuration, so that later changes keep its form.
#[test]
fn every_setting_is_in_a_golden_configuration() {
    let configs: String = CONFIGS
        .iter()
        .map(|name| std::fs::read_to_string(folder().join(name).with_extension("toml")))
        .collect::<Result<_, _>>()
        .expect("the golden configurations can be read");
    let mut used = BTreeSet::new();
    for line in configs.lines().filter(|line| !line.starts_with('#')) {
        for name in line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')) {
            used.insert(name);
        }
    }
    for table in TABLES {
        let names = names_of_settings(table);
        assert!(!names.is_empty(), "{table}");
        for name in names {
            assert!(
                used.contains(name.as_str()),
                "no golden configuration has `{name}` of {table:?}"
            );
        }
    }
}

/// A snapshot of an earlier version: `alice` has used up 5 of 5 per 100 years in it.
#[test]
fn a_snapshot_of_an_earlier_version_is_loaded() {
    let golden = folder().join("snapshot.bin");
    let path = std::env::temp_dir().join(format!("tallygate-golden-{}", std::process::id()));
    let name = path.to_str().expect("the path is UTF-8").to_owned();
    let check = |served: &Served| {
        let mut client = Client::connect(served.http());
        client.send("POST /v1/check", &[], br#"{"policy":"api","key":"alice"}"#);
        let reply = client.read().expect("there is a reply");
        serde_json::from_str::<Value>(&reply.body).expect("the reply is JSON")["allowed"].clone()
    };
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        let mut served = Served::start(&["--snapshot", &name], Some(CONFIG));
        for _ in 0..5 {
            assert_eq!(check(&served), true);
        }
        assert_eq!(served.stop(), Some(0));
        std::fs::copy(&path, &golden).expect("the file is written");
    }
    std::fs::copy(&golden, &path).expect("there is a snapshot");
    let served = Served::start(&["--snapshot", &name], Some(CONFIG));
    assert_eq!(check(&served), false, "the usage is in the snapshot");
    drop(served);
    let _ = std::fs::remove_file(&path);
}
