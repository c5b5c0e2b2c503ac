//! Tests the page in a real Chromium and compares it with the server and the commands.
//!
//! `page/*.mjs` drive the browser, one file per case. A case fails on an assertion, on any error of the page or the
//! console, and on any request to another server. `scripts/install-test-clients` installs the browser and its driver.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

mod common;
mod http_client;

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use common::Served;
use http_client::{ask, get, post};
use serde_json::Value;
use tallygate::{Ask, Kind, Policy, RateLimiter, Tick, Ticks};

/// Policies whose names contain markup.
const POLICIES: &str = r#"
    [policies.api]
    algorithm = "token_bucket"
    limit = 5
    window = "1h"
    [policies.api.tiers.pro]
    limit = 50
    [policies.api.overrides.mallory]
    access = "blocked"
    [policies.brief]
    algorithm = "token_bucket"
    limit = 1
    window = "2s"
    [policies."<img src=x onerror=alert(1)>"]
    algorithm = "fixed_window"
    limit = 1
    window = "1h"
"#;

/// The policy of a server without a configuration. Tests may use its admin verbs.
const DEMO: &str = include_str!("../../tallygate-server/src/demo.toml");

/// Runs a case of `page/` in the browser, one at a time, and returns its output.
#[track_caller]
fn drive(case: &str, served: &Served) -> String {
    static BROWSER: Mutex<()> = Mutex::new(());
    let _one = BROWSER.lock().unwrap_or_else(PoisonError::into_inner);
    let clients = std::env::var_os("TALLYGATE_TEST_CLIENTS").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/test-clients")),
        PathBuf::from,
    );
    let script = format!("{}/tests/page/{case}.mjs", env!("CARGO_MANIFEST_DIR"));
    let output = Command::new("node")
        .arg(script)
        .arg(format!("http://{}/", served.http()))
        .env("TALLYGATE_BROWSER", clients.join("browser"))
        .env("TALLYGATE", env!("CARGO_BIN_EXE_tallygate"))
        .env("ONE_TIME_TOKEN", served.printed_token().unwrap_or_default())
        .output()
        .expect("node runs: run scripts/install-test-clients");
    let printed = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{case}: {printed}{errors}");
    printed.into_owned()
}

#[test]
fn a_link_passes_the_printed_token_to_the_page() {
    drive("token-in-link", &Served::start(&[], None));
}

#[test]
fn every_tab_opens_by_mouse_and_by_keyboard() {
    drive("tabs", &Served::start(&[], Some(DEMO)));
}

#[test]
fn dragging_a_slider_redraws_and_the_address_restores_it() {
    println!("{}", drive("dragging", &Served::start(&[], Some(DEMO))));
}

#[test]
fn the_plots_equal_the_output_of_the_command_and_the_decisions_of_the_library() {
    let printed = drive("plotted", &Served::start(&[], Some(DEMO)));
    let mut compared = 0;
    for line in printed.lines() {
        let plotted: Value = serde_json::from_str(line).unwrap();
        let number = |name: &str| plotted["scenario"][name].as_u64().unwrap();
        for lane in plotted["lanes"].as_array().unwrap() {
            let kind: Kind = lane["algorithm"].as_str().unwrap().parse().unwrap();
            let mut policy =
                Policy::of(kind, number("limit")).per(micros(number("window_ms") * 1000));
            if kind.is_bucket() {
                policy = policy.burst(number("burst"));
            }
            let limiter = RateLimiter::new(policy.build().unwrap());
            let [times, allowed, clients] =
                ["at_us", "value", "client"].map(|name| lane[name].as_array().unwrap());
            for ((at, allowed), client) in times.iter().zip(allowed).zip(clients) {
                let now = Tick(i64::try_from(micros(at.as_u64().unwrap()).0).unwrap());
                let decision = limiter
                    .check(Ask::new(&client.to_string()).cost(number("cost")).at(now))
                    .unwrap();
                assert_eq!(u64::from(decision.allowed), *allowed, "{kind} at {at}: {line}");
                compared += 1;
            }
        }
    }
    assert!(compared > 5_000, "{compared}");
}

/// Converts microseconds to the library's nanoseconds.
const fn micros(micros: u64) -> Ticks {
    Ticks(micros * 1000)
}

#[test]
fn requests_leave_a_leaky_bucket_evenly_and_a_token_bucket_at_once() {
    drive("departures", &Served::start(&[], Some(DEMO)));
}

#[test]
fn the_state_and_the_curves_are_those_of_the_chosen_client() {
    drive("greedy", &Served::start(&[], Some(DEMO)));
}

#[test]
fn instances_that_divide_a_quota_are_compared_with_a_shared_one() {
    drive("instances", &Served::start(&[], Some(DEMO)));
}

#[test]
fn a_share_is_shown_as_none_or_all_only_if_it_is() {
    drive("shares", &Served::start(&[], Some(DEMO)));
}

#[test]
fn time_can_be_played_paused_and_stepped() {
    drive("playback", &Served::start(&[], Some(DEMO)));
}

#[test]
fn the_error_of_an_invalid_scenario_is_shown_and_the_next_one_is_drawn() {
    drive("invalid-scenario", &Served::start(&[], Some(DEMO)));
}

#[test]
fn a_decision_is_explained_by_the_servers_arithmetic() {
    drive("explain", &Served::start(&[], Some(DEMO)));
}

#[test]
fn a_lane_gives_its_policy_as_toml_and_as_rust() {
    drive("code", &Served::start(&[], Some(DEMO)));
}

#[test]
fn requests_of_one_client_do_not_affect_another() {
    drive("clients", &Served::start(&[], Some(POLICIES)));
}

#[test]
fn the_page_fits_a_phone() {
    drive("phone", &Served::start(&[], Some(DEMO)));
}

#[test]
fn the_html_reports_fit_a_phone() {
    drive("reports", &Served::start(&[], Some(DEMO)));
}

#[test]
fn the_dark_and_light_themes_are_readable() {
    drive("theme", &Served::start(&[], Some(DEMO)));
}

#[test]
fn live_shows_what_the_server_counts() {
    drive("live", &Served::start(&[], Some(POLICIES)));
}

#[test]
fn with_a_token_live_shows_clients_to_the_operator_only() {
    let config = format!("[auth]\nadmin = [\"env:ADMIN\"]\n{POLICIES}");
    let variables = [("ADMIN", "sesame-of-the-operator")];
    drive("token", &Served::with_variables(&[], Some(&config), &variables));
}

#[test]
fn a_server_without_tokens_asks_for_none() {
    drive(
        "no-token",
        &Served::start(&[], Some("[admin]\n[policies.api]\nlimit = 5\nwindow = \"1h\"")),
    );
}

#[test]
fn an_uploaded_log_gives_the_same_report_as_the_command() {
    drive("backtest", &Served::start(&[], Some(POLICIES)));
}

/// Fault H6.
#[test]
fn a_name_with_a_script_is_shown_as_text() {
    drive("hostile", &Served::start(&[], Some(POLICIES)));
}

#[test]
fn a_browser_gets_the_page_and_other_clients_get_text() {
    let served = Served::start(&[], Some(DEMO));
    let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
    let page = ask(served.http(), "GET /", &[("accept", browser)], "");
    assert_eq!(page.field("content-type"), Some("text/html; charset=utf-8"));
    assert_eq!(page.field("vary"), Some("accept"));
    for accept in [&[][..], &[("accept", "*/*")], &[("accept", "application/json")]] {
        let lines = ask(served.http(), "GET /", accept, "");
        assert_eq!(lines.field("content-type"), Some("text/plain; charset=utf-8"));
        assert!(lines.body.contains("/v1/check"), "{lines:?}");
    }
    // The example names the address that the client used.
    let example = |host: &str| {
        let reply = ask(served.http(), "GET /", &[("host", host)], "");
        let line = reply.body.lines().find(|line| line.starts_with("Try: ")).unwrap().to_owned();
        line.rsplit(' ').next().unwrap().to_owned()
    };
    assert_eq!(example("localhost:8443"), "http://localhost:8443/v1/check");
    assert_eq!(example("[::1]:80"), "http://[::1]:80/v1/check");
    let hello = |config| get(Served::start(&[], Some(config)).http(), "/").body;
    assert!(hello(DEMO).contains(r#"Try: curl -d '{"policy":"demo","key":"alice"}'"#));
    let other = "[policies.site]\nlimit = 1\nwindow = \"1m\"\n";
    assert!(hello(other).contains(r#"Try: curl -d '{"policy":"NAME","key":"alice"}'"#));
    assert_eq!(get(served.http(), "/page/none.js").status, 404);
    assert_eq!(get(served.http(), "/page/../page.rs").status, 404);
    assert_eq!(post(served.http(), "/", "").status, 405);
}

/// Fault H6.
#[test]
fn the_page_runs_only_its_own_files() {
    let served = Served::start(&[], Some(DEMO));
    for path in ["/", "/page/main.js", "/page/style.css"] {
        let reply = ask(served.http(), &format!("GET {path}"), &[("accept", "text/html")], "");
        let policy = reply.field("content-security-policy").unwrap();
        let mut rules: Vec<_> = policy.split("; ").collect();
        rules.sort_unstable();
        let expected = [
            "base-uri 'none'",
            "connect-src 'self'",
            "default-src 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "img-src 'self' data:",
            "script-src 'self'",
            "style-src 'self'",
        ];
        assert_eq!(rules, expected, "{path}");
        assert_eq!(reply.field("x-content-type-options"), Some("nosniff"));
        assert_eq!(reply.field("referrer-policy"), Some("no-referrer"));
    }
}

#[test]
fn an_unchanged_file_is_not_sent_again() {
    let served = Served::start(&[], Some(DEMO));
    let first = get(served.http(), "/page/uplot.js");
    assert_eq!((first.status, first.field("cache-control")), (200, Some("no-cache")));
    let tag = first.field("etag").unwrap();
    let again = ask(served.http(), "GET /page/uplot.js", &[("if-none-match", tag)], "");
    assert_eq!((again.status, again.body.as_str()), (304, ""));
    assert_eq!(again.field("etag"), Some(tag));
    let others = get(served.http(), "/page/main.js");
    assert_ne!(others.field("etag"), Some(tag));
    let stale = ask(served.http(), "GET /page/main.js", &[("if-none-match", tag)], "");
    assert_eq!(stale.status, 200);
}
