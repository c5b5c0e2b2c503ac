//! Tests `tallygate backtest` and `POST /v1/backtest` with the real binary.
//!
//! The expected reports are computed independently, with the reference model of the testkit over the whole log.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Client, Reply};
use crate::{Outcome, run};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tallygate_core::{Kind, Limit, Policy, Tick, Ticks};
use tallygate_testkit::Model;

/// 2026-01-01T00:00:00Z.
const START_S: i64 = 1_767_225_600;
const SECOND: i64 = 1_000_000_000;
const POLICY: &str = "token_bucket 3/10s burst 5";

fn backtest(options: &[&str], input: impl AsRef<[u8]>) -> Outcome {
    run("backtest", options, input.as_ref())
}

#[track_caller]
fn report(options: &[&str], input: impl AsRef<[u8]>) -> Value {
    let Outcome { output, message, code } = backtest(&[options, &["--json"]].concat(), input);
    assert_eq!((code, message.as_str()), (Some(0), ""));
    serde_json::from_str(&output).expect("the text is JSON")
}

#[track_caller]
fn fails(options: &[&str], input: impl AsRef<[u8]>, expected: &str) {
    let Outcome { output, message, code } = backtest(options, input);
    assert_eq!((code, output.as_str()), (Some(2), ""), "{message}");
    assert!(message.contains(expected), "{message}");
}

/// A request of a log.
#[derive(Clone, Debug)]
struct Request {
    client: String,
    second: i64,
}

/// Returns requests of sixteen clients, some of them busy. One in twenty is a few seconds late.
fn requests(count: u64) -> Vec<Request> {
    let mut random = fastrand::Rng::with_seed(7);
    let mut second = START_S + 10;
    let mut requests = Vec::new();
    for _ in 0..count {
        second += i64::from(random.u8(..) < 80);
        let busy = random.u8(..16).min(random.u8(..16)).min(random.u8(..16));
        let late = if random.u8(..20) == 0 { random.i64(0..4) } else { 0 };
        requests.push(Request { client: format!("192.0.2.{busy}"), second: second - late });
    }
    requests
}

/// Returns the day of January 2026 that contains a second, and the time of day.
fn day_and_time(second: i64) -> (i64, String) {
    let since = second - START_S;
    let (day, of_day) = (since.div_euclid(86_400), since.rem_euclid(86_400));
    (day + 1, format!("{:02}:{:02}:{:02}", of_day / 3600, of_day / 60 % 60, of_day % 60))
}

fn rfc_3339(second: i64) -> String {
    let (day, time) = day_and_time(second);
    format!("2026-01-{day:02}T{time}Z")
}

fn combined_line(request: &Request) -> String {
    let (day, time) = day_and_time(request.second);
    let client = &request.client;
    format!(
        "{client} - - [{day:02}/Jan/2026:{time} +0000] \"GET /a HTTP/1.1\" 200 12 \"-\" \"curl\"\n"
    )
}

fn combined(requests: &[Request]) -> String {
    requests.iter().map(combined_line).collect()
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(text).expect("writing to memory succeeds");
    packed.finish().expect("writing to memory succeeds")
}

/// A file that is removed at the end of the test.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, contents: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("tallygate-{}-{name}", std::process::id()));
        std::fs::write(&path, contents).expect("the file is written");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("the text is UTF-8")
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn limit_of(kind: Kind, limit: u64, window_s: i64, burst: u64) -> Limit {
    let window = Ticks((window_s * SECOND).unsigned_abs());
    Policy::of(kind, limit).per(window).burst(burst).limit().expect("the limit is valid")
}

/// Returns the indices of the requests that a limit denies.
fn denied_by(limit: &Limit, requests: &[Request]) -> BTreeSet<usize> {
    let mut clients: BTreeMap<&str, Model> = BTreeMap::new();
    let mut denied = BTreeSet::new();
    for (place, request) in requests.iter().enumerate() {
        let now = Tick(request.second * SECOND);
        let first = || Model::initial(limit.numbers(), now);
        let model = clients.entry(&request.client).or_insert_with(first);
        if !model.decide(now, 1).allowed {
            denied.insert(place);
        }
    }
    denied
}

/// Returns the most requests of each client in eight consecutive slices, computed from all slices.
fn peaks(requests: &[Request], window_s: i64) -> BTreeMap<&str, u64> {
    let mut slices: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for request in requests {
        let slices = slices.entry(&request.client).or_default();
        let slice = (request.second * 8).div_euclid(window_s);
        slices.push(slices.last().map_or(slice, |newest| slice.max(*newest)));
    }
    let most = |slices: &Vec<i64>| {
        let within = |last: i64| slices.iter().filter(|s| (last - 7..=last).contains(*s)).count();
        slices.iter().map(|last| within(*last) as u64).max().expect("there are requests")
    };
    slices.iter().map(|(client, slices)| (*client, most(slices))).collect()
}

#[test]
fn every_figure_agrees_with_the_reference_model() {
    let requests = requests(2_400);
    let kinds = [
        (Kind::TokenBucket, "token_bucket 3/10s burst 5", 5),
        (Kind::Gcra, "gcra 3/10s burst 3", 3),
        (Kind::LeakyBucket, "leaky_bucket 3/10s burst 4", 4),
        (Kind::FixedWindow, "fixed_window 3/10s", 3),
        (Kind::SlidingWindowLog, "sliding_window_log 3/10s", 3),
        (Kind::SlidingWindowCounter, "sliding_window_counter 3/10s", 3),
    ];
    let options: Vec<&str> = kinds.iter().flat_map(|(_, text, _)| ["--policy", text]).collect();
    let report = report(&options, combined(&requests));

    let peaks = peaks(&requests, 10);
    assert_eq!(report["lines"], 2_400);
    assert_eq!((&report["unreadable"], &report["without_key"]), (&json!(0), &json!(0)));
    assert_eq!((&report["requests"], &report["clients"]), (&json!(2_400), &json!(peaks.len())));
    let seconds = || requests.iter().map(|request| request.second);
    assert_eq!(report["from"], rfc_3339(seconds().min().expect("there are requests")));
    assert_eq!(report["to"], rfc_3339(seconds().max().expect("there are requests")));

    let mut sorted: Vec<u64> = peaks.values().copied().collect();
    sorted.sort_unstable();
    for (quantile, thousandths) in report["peaks"]["quantiles"]
        .as_array()
        .expect("there are quantiles")
        .iter()
        .zip([500, 750, 900, 950, 990, 999, 1000])
    {
        let place = (sorted.len() * thousandths).div_ceil(1000) - 1;
        assert_eq!(quantile["requests"], sorted[place], "{quantile}");
    }

    let mut first = BTreeSet::new();
    for (place, (kind, text, burst)) in kinds.into_iter().enumerate() {
        let policy = &report["policies"][place];
        let denied = denied_by(&limit_of(kind, 3, 10, burst), &requests);
        if place == 0 {
            first.clone_from(&denied);
        }
        assert_eq!(policy["policy"], text);
        assert!(denied.len() > 100 && denied.len() < 2_300, "{text} denies some and allows some");
        assert_eq!(policy["denied"], denied.len(), "{text}");
        assert_eq!(policy["allowed"], 2_400 - denied.len());
        assert_eq!(policy["denied_here_only"], denied.difference(&first).count());
        assert_eq!(policy["denied_by_first_only"], first.difference(&denied).count());

        let mut denials: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for place in &denied {
            denials.entry(&requests[*place].client).or_default().push(requests[*place].second);
        }
        assert_eq!(policy["clients_denied"], denials.len());
        let mut most_denied: Vec<_> = denials.iter().collect();
        most_denied.sort_by_key(|(client, times)| (std::cmp::Reverse(times.len()), **client));
        let reported = policy["most_denied"].as_array().expect("the field is a list");
        assert_eq!(reported.len(), most_denied.len().min(10));
        for (report, (client, times)) in reported.iter().zip(most_denied) {
            let own = requests.iter().filter(|request| request.client == **client).count();
            assert_eq!(report["client"], **client);
            assert_eq!(
                (&report["denied"], &report["requests"]),
                (&json!(times.len()), &json!(own))
            );
            assert_eq!(report["first_denied"], rfc_3339(*times.iter().min().expect("a denial")));
            assert_eq!(report["last_denied"], rfc_3339(*times.iter().max().expect("a denial")));
            assert_eq!(report["peak"], peaks[*client]);
        }

        let step = report["over_time"]["step_s"].as_i64().expect("the step is a number");
        let mut steps: BTreeMap<i64, (u64, u64)> = BTreeMap::new();
        for (place, request) in requests.iter().enumerate() {
            let (all, denied_in_step) = steps.entry(request.second.div_euclid(step)).or_default();
            *all += 1;
            *denied_in_step += u64::from(denied.contains(&place));
        }
        let points = report["over_time"]["points"].as_array().expect("there are points");
        assert!(points.len() <= 400);
        assert_eq!(points.len(), steps.len());
        for (point, (index, (all, denied_in_step))) in points.iter().zip(&steps) {
            assert_eq!(point["time"], rfc_3339(index * step));
            assert_eq!(
                (&point["requests"], &point["denied"][place]),
                (&json!(all), &json!(denied_in_step))
            );
        }
        let worst = steps.values().map(|(_, denied)| *denied).max().expect("there are steps");
        assert_eq!(policy["worst"]["denied"], worst);
    }
}

#[test]
fn the_same_log_gives_the_same_report_in_every_format() {
    let requests = requests(500);
    let log = combined(&requests);
    let mut expected = report(&["--policy", POLICY], &log);

    let object = |request: &Request| {
        json!({ "level": "info", "ts": request.second, "request": { "remote_ip": request.client } })
            .to_string()
    };
    let json: String = requests.iter().map(|request| object(request) + "\n").collect();
    let mut table = String::from("status,time,client_ip\n");
    for Request { client, second } in &requests {
        writeln!(table, "\"200, OK\",{},{client}", rfc_3339(*second))
            .expect("writing to memory succeeds");
    }
    let elsewhere: String = requests
        .iter()
        .map(|Request { client, second }| {
            let ahead = Request { client: client.clone(), second: second + 19_800 };
            combined_line(&ahead).replace("+0000", "+0530")
        })
        .collect();
    let windows = log.replace('\n', "\r\n") + "\r\n\r\n";
    let with_mark = |text: &str| format!("\u{feff}{text}");
    for other in [
        json.as_bytes(),
        table.as_bytes(),
        windows.as_bytes(),
        with_mark(&log).as_bytes(),
        with_mark(&json).as_bytes(),
        with_mark(&table).as_bytes(),
        elsewhere.as_bytes(),
        &gzip(log.as_bytes()),
    ] {
        assert_eq!(report(&["--policy", POLICY], other), expected);
    }
    assert_eq!(report(&["--policy", POLICY, "-"], &log), expected);
    let unended = log.trim_end();
    assert_eq!(report(&["--policy", POLICY], unended), expected);

    let (first, second) =
        log.split_at(log.match_indices('\n').nth(249).expect("there are lines").0 + 1);
    let first = TempFile::new(
        "first.gz",
        [gzip(&first.as_bytes()[..1000]), gzip(&first.as_bytes()[1000..])].concat(),
    );
    let second = TempFile::new("second.log", second);
    assert_eq!(report(&["--policy", POLICY, first.path(), second.path()], ""), expected);

    // Each file has its own header, which does not count as a line.
    let (one, other) =
        table.split_at(table.match_indices('\n').nth(100).expect("there are lines").0 + 1);
    let one = TempFile::new("one.csv", one);
    let other = TempFile::new("other.csv", format!("status,time,client_ip\n{other}"));
    assert_eq!(report(&["--policy", POLICY, one.path(), other.path()], ""), expected);

    expected["key"] = json!("field:path");
    expected["clients"] = json!(1);
    let by_path = report(&["--policy", POLICY, "--key", "field:path"], &log);
    assert_eq!((&by_path["key"], &by_path["clients"]), (&expected["key"], &expected["clients"]));
}

#[test]
fn addresses_are_converted_to_keys_as_in_the_server() {
    let line = |client: &str| combined_line(&Request { client: client.into(), second: START_S });
    let log: String =
        ["2001:db8::1", "2001:db8::ffff:1", "::ffff:192.0.2.1", "192.0.2.1"].map(line).concat();
    let report = report(&["--policy", "fixed_window 1/1m"], log);
    assert_eq!(report["clients"], 2);
    let most_denied = &report["policies"][0]["most_denied"];
    assert_eq!(
        (&most_denied[0]["client"], &most_denied[1]["client"]),
        (&json!("192.0.2.1"), &json!("2001:db8::/64"))
    );
}

#[test]
fn a_line_that_cannot_be_parsed_is_counted_and_skipped() {
    let requests = requests(300);
    let mut log = String::from("garbage at the start\n");
    for (place, request) in requests.iter().enumerate() {
        log += &combined_line(request);
        match place {
            10 => log += "more\u{1b}[31m garbage\n",
            20 => log += &format!("{}\n", "x".repeat(100_000)),
            // Longer than the read buffer, so its end is in another chunk.
            30 => log += &format!("{}\n", "y".repeat(1_000_000)),
            40 => {
                log +=
                    "localhost - - [01/Jan/2026:00:00:00 +0000] \"GET / HTTP/1.1\" 200 1\n\n  \n";
            }
            50.. if place % 50 == 0 => log += "{}\n",
            _ => {}
        }
    }
    let clean = report(&["--policy", POLICY], combined(&requests));
    let report = report(&["--policy", POLICY], &log);
    assert_eq!((&report["lines"], &report["unreadable"]), (&json!(310), &json!(10)));
    assert_eq!(report["policies"], clean["policies"]);
    assert_eq!(report["peaks"], clean["peaks"]);
    let shown: Vec<(u64, &str)> = report["unreadable_lines"]
        .as_array()
        .expect("there are lines")
        .iter()
        .map(|line| {
            (
                line["line"].as_u64().expect("the value is a number"),
                line["reason"].as_str().expect("the text is UTF-8"),
            )
        })
        .collect();
    let expected = [
        (1, "not a combined log line, not JSON, and not below a CSV header"),
        (13, "no timestamp in brackets"),
        (24, "the line is longer than 65536 bytes"),
        (35, "the line is longer than 65536 bytes"),
        (46, "the line does not start with an IP address"),
    ];
    assert_eq!(shown, expected);
    // Control characters are escaped.
    let text = backtest(&["--policy", POLICY], &log).output;
    assert!(text.contains("line 13: no timestamp in brackets: more\\u{1b}[31m garbage"), "{text}");
}

/// Returns a log in which half of the requests are failed logins, and some agents are bots.
fn logins() -> String {
    let line = |i: i64| {
        let (path, status) = if i % 2 == 0 { ("/login?next=/", 401) } else { ("/api/users", 200) };
        let agent = if i % 5 == 0 { "Mozilla (compatible; SomeBot/2.1)" } else { "curl/8" };
        let (day, time) = day_and_time(START_S + i);
        format!(
            "192.0.2.1 - - [{day:02}/Jan/2026:{time} +0000] \"GET {path} HTTP/1.1\" {status} 12 \"-\" \"{agent}\"\n"
        )
    };
    (0..100).map(line).collect()
}

#[test]
fn filters_select_lines_and_the_others_are_counted() {
    let selected = |options: &[&str], log: &str| {
        let report = report(&[&["--policy", POLICY], options].concat(), log);
        let [requests, filtered, lines] =
            ["requests", "filtered", "lines"].map(|field| report[field].as_u64().unwrap_or(0));
        assert_eq!((lines, requests + filtered), (100, 100), "{options:?}");
        requests
    };
    let json: String = (0..100)
        .map(|i| {
            let (path, status) =
                if i % 2 == 0 { ("/login?next=/", 401) } else { ("/api/users", 200) };
            let agent = if i % 5 == 0 { "Mozilla (compatible; SomeBot/2.1)" } else { "curl/8" };
            json!({
                "ts": START_S + i, "remote_addr": "192.0.2.1", "status": status,
                "request": { "uri": path, "method": "GET", "headers": { "User-Agent": [agent] } },
            })
            .to_string()
                + "\n"
        })
        .collect();
    let csv: String = std::iter::once("time,ip,path,method,status_code,user_agent\n".to_owned())
        .chain((0..100).map(|i| {
            let (path, status) =
                if i % 2 == 0 { ("/login?next=/", 401) } else { ("/api/users", 200) };
            let agent = if i % 5 == 0 { "Mozilla (compatible; SomeBot/2.1)" } else { "curl/8" };
            format!("{},192.0.2.1,{path},GET,{status},{agent}\n", START_S + i)
        }))
        .collect();
    for log in [&logins(), &json, &csv] {
        assert_eq!(selected(&[], log), 100);
        assert_eq!(selected(&["--where", "path=/login"], log), 50);
        assert_eq!(selected(&["--where", "path=/api/*"], log), 50);
        assert_eq!(selected(&["--where", "path!=/login", "--where", "method=GET"], log), 50);
        assert_eq!(selected(&["--status", "401"], log), 50);
        assert_eq!(selected(&["--status", "4xx,200"], log), 100);
        assert_eq!(selected(&["--exclude-agent", "bot"], log), 80);
        assert_eq!(selected(&["--where", "path=/login", "--exclude-agent", "BOT"], log), 40);
    }
    // The decisions are those of a log with only these lines.
    let only: String =
        logins().lines().filter(|l| l.contains("/login")).map(|l| format!("{l}\n")).collect();
    let filtered = report(&["--policy", POLICY, "--where", "path=/login"], logins());
    assert_eq!(filtered["policies"], report(&["--policy", POLICY], only)["policies"]);
    let text = backtest(&["--policy", POLICY, "--status", "401"], logins()).output;
    assert!(text.starts_with("100 lines, 0 unreadable, 50 filtered out\n"), "{text}");

    let policy = ["--policy", POLICY];
    fails(
        &[&policy[..], &["--where", "path"]].concat(),
        "",
        "expected FIELD=VALUE, such as path=/login",
    );
    for impossible in ["4", "9xx", "600", "200,6xx"] {
        let expected = "expected status codes from 100 to 599, such as 200, 404,429 or 5xx";
        fails(&[&policy[..], &["--status", impossible]].concat(), logins(), expected);
        let equals = format!("status={impossible}");
        fails(&[&policy[..], &["--where", &equals]].concat(), logins(), expected);
    }
    assert_eq!(selected(&["--where", "status!=2xx"], &logins()), 50);
    fails(
        &[&policy[..], &["--where", "tenant=a"]].concat(),
        logins(),
        "combined logs have no field \"tenant\"",
    );
    fails(
        &[&policy[..], &["--where", "tenant=a"]].concat(),
        &csv,
        "no column \"tenant\" for a filter",
    );
}

#[test]
fn an_option_that_cannot_have_an_effect_is_rejected_or_reported() {
    let log = combined(&requests(10));
    fails(
        &["--policy", POLICY, "--time", "ts"],
        &log,
        "the time of a combined log is always in brackets; the time field \"ts\" applies only to JSON and CSV",
    );
    // The common format has no user agents.
    let common = log.replace(" \"-\" \"curl\"", "");
    let note =
        "the filter \"user agent without bot\" has no effect: no line has the header user-agent";
    let options = ["--policy", POLICY, "--exclude-agent", "bot", "--exclude-agent", "spider"];
    let page = TempFile::new("no-agents.html", "");
    let text = backtest(&[&options[..], &["--html", page.path()]].concat(), &common);
    assert_eq!(text.code, Some(0), "{}", text.message);
    assert!(text.output.contains(&format!("\n{note}\n")), "{}", text.output);
    let page = std::fs::read_to_string(&page.0).expect("the page is written");
    assert!(page.contains("user agent without bot&quot; has no effect: no line has the header"));
    assert_eq!(report(&options, &common)["filters_without_effect"][0], note);
    assert_eq!(report(&options, &log)["filters_without_effect"], json!([]));
}

#[test]
fn a_policy_with_several_limits_denies_what_one_of_them_denies() {
    let requests = requests(600);
    let text = "token_bucket 3/10s burst 5, fixed_window 15/1m";
    let report = report(&["--policy", text, "--suggest", "90"], combined(&requests));
    let policy = &report["policies"][0];
    assert_eq!(policy["policy"], text);
    // All or nothing, with the core's own policy.
    let limits = [
        Policy::token_bucket(3).per(Ticks(10_000_000_000)).burst(5).named("a"),
        Policy::fixed_window(15).per(Ticks(60_000_000_000)).named("b"),
    ];
    let both = Policy::all_of("both", limits).expect("the policy is valid");
    let trace = requests.iter().map(|r| (r.client.as_str(), Tick(r.second * SECOND), 1));
    let denied = tallygate_core::simulate(both, trace).filter(|decision| !decision.allowed).count();
    assert_eq!(policy["denied"], denied);
    let alone = |text: &str| {
        let report = self::report(&["--policy", text], combined(&requests));
        report["policies"][0]["denied"].as_u64().expect("the value is a number")
    };
    assert!(denied as u64 > alone("token_bucket 3/10s burst 5"));
    assert!(denied as u64 > alone("fixed_window 15/1m"));
    let suggested = policy["suggestion"]["policy"].as_str().expect("there is a suggestion");
    assert!(suggested.contains(", fixed_window "), "{suggested}");
    fails(&["--policy", "gcra 5/s, gcra 5/s"], "", "--policy \"gcra 5/s, gcra 5/s\": ");
}

#[test]
fn policies_come_from_a_configuration_file() {
    let config = TempFile::new(
        "policies.toml",
        "[policies.api]\nalgorithm = \"token_bucket\"\nlimit = 3\nwindow = \"10s\"\nburst = 5\n\
         [policies.api.tiers.pro]\nlimit = 6\nburst = 10\n\
         [policies.login]\nalgorithm = \"fixed_window\"\nlimit = 8\nwindow = \"10s\"\ncost = 2\n",
    );
    let log = combined(&requests(600));
    let names = |options: &[&str]| {
        let report = report(&[&["--config", config.path()], options].concat(), &log);
        let policies = report["policies"].as_array().expect("there are policies").clone();
        policies
            .iter()
            .map(|policy| policy["policy"].as_str().unwrap_or("").to_owned())
            .collect::<Vec<_>>()
    };
    let api = "api: token_bucket 3/10s burst 5";
    let pro = "api/pro: token_bucket 6/10s burst 10";
    let login = "login: fixed_window 8/10s";
    assert_eq!(names(&[]), [api, pro, login]);
    assert_eq!(names(&["--policy", "api/pro", "--policy", "gcra 5/s"]), [pro, "gcra 5/1s burst 5"]);
    let denied = |options: &[&str]| {
        let report = report(options, &log);
        report["policies"][0]["denied"].as_u64().expect("the value is a number")
    };
    let configured = |name| denied(&["--config", config.path(), "--policy", name]);
    assert_eq!(configured("api"), denied(&["--policy", "token_bucket 3/10s burst 5"]));
    // The policy charges 2 units per request.
    assert_eq!(configured("login"), denied(&["--policy", "fixed_window 4/10s"]));
    fails(
        &["--config", config.path(), "--policy", "lgoin"],
        "",
        "policies.toml (api, api/pro, login), and not a limit: found \"lgoin\"",
    );
    fails(&["--config", "/nowhere/at/all.toml"], "", "cannot read /nowhere/at/all.toml");
}

#[test]
fn a_line_with_nul_bytes_is_unreadable_and_reported() {
    let requests = requests(50);
    let mut log = combined(&requests).into_bytes();
    // A crash leaves a block of NUL bytes before the next line.
    let end = log.iter().rposition(|byte| *byte == b'\n').expect("there are lines") + 1;
    log.splice(end..end, std::iter::repeat_n(0, 300));
    log.extend_from_slice(combined_line(&requests[0]).as_bytes());
    let report = report(&["--policy", POLICY], &log);
    assert_eq!((&report["lines"], &report["unreadable"]), (&json!(51), &json!(1)));
    assert_eq!(report["unreadable_lines"][0]["reason"], "the line contains NUL bytes");
    assert_eq!(report["unreadable_lines"][0]["line"], 51);
    let text = backtest(&["--policy", POLICY], &log).output;
    let shown =
        format!("line 51: the line contains NUL bytes: {}", &combined_line(&requests[0])[..20]);
    assert!(text.contains(&shown), "{text}");
}

#[test]
fn a_log_in_utf_16_is_reported_as_such() {
    let text = combined(&requests(3));
    let units = |to_bytes: fn(u16) -> [u8; 2]| -> Vec<u8> {
        "\u{feff}".encode_utf16().chain(text.encode_utf16()).flat_map(to_bytes).collect()
    };
    for log in [units(u16::to_le_bytes), units(u16::to_be_bytes)] {
        fails(&["--policy", POLICY], &log, "UTF-16; convert it to UTF-8");
    }
}

#[test]
fn requests_without_a_key_are_counted_but_not_decided() {
    let log = "{\"ts\":1,\"user\":\"a\"}\n{\"ts\":1}\n{\"ts\":1,\"user\":null}\n{\"ts\":1,\"user\":\"\"}\n";
    let report = report(&["--policy", "gcra 1/s", "--key", "field:user"], log);
    assert_eq!((&report["lines"], &report["without_key"]), (&json!(4), &json!(3)));
    assert_eq!((&report["requests"], &report["unreadable"]), (&json!(1), &json!(0)));
}

#[test]
fn a_log_with_a_read_error_is_reported_as_read_in_part() {
    let requests = requests(5_000);
    let packed = gzip(combined(&requests).as_bytes());
    let cut = TempFile::new("cut.gz", &packed[..packed.len() / 2]);
    let whole = TempFile::new("whole.log", combined(&requests));
    let Outcome { output, code, .. } =
        backtest(&["--json", "--policy", POLICY, cut.path(), whole.path()], "");
    assert_eq!(code, Some(1));
    let report: Value = serde_json::from_str(&output).expect("the text is JSON");
    assert_eq!(report["cut_short"][0]["input"], cut.path());
    let read = report["lines"].as_u64().expect("the value is a number");
    assert!(read > 5_000 && read < 10_000, "{read}");
    assert_eq!(report["unreadable"], 0);
    let text = backtest(&["--policy", POLICY, cut.path()], "").output;
    assert!(text.contains("was read only in part"), "{text}");
}

#[test]
fn late_requests_are_decided_in_the_order_of_the_log() {
    let at = |seconds: &[i64]| -> Vec<Request> {
        seconds
            .iter()
            .map(|s| Request { client: "192.0.2.1".into(), second: START_S + s })
            .collect()
    };
    for seconds in [
        &[100, 101, 95, 102, 93, 110, 104][..],
        &[5000, 5000, 5000, 1, 1, 1, 2, 3, 5001, 5001, 4990],
        &[0, 86_000, 0, 86_000, 0, 0, 0],
    ] {
        let requests = at(seconds);
        for (kind, policy) in [
            (Kind::TokenBucket, "token_bucket 2/10s"),
            (Kind::FixedWindow, "fixed_window 2/10s"),
            (Kind::SlidingWindowLog, "sliding_window_log 2/10s"),
        ] {
            let expected = denied_by(&limit_of(kind, 2, 10, 2), &requests).len();
            let report = report(&["--policy", policy], combined(&requests));
            assert_eq!(report["policies"][0]["denied"], expected, "{policy} {seconds:?}");
        }
    }
}

#[test]
fn the_suggested_limit_is_the_smallest_that_denies_few_enough_clients() {
    let log = combined(&requests(3_000));
    for (policy, burst_of) in [
        ("token_bucket 4/10s burst 3", Some((3, 4))),
        ("gcra 1/3s", Some((1, 1))),
        ("leaky_bucket 2/10s burst 6", Some((6, 2))),
        ("fixed_window 1/30s", None),
        ("sliding_window_log 200/10s", None),
        ("sliding_window_counter 1/10s", None),
    ] {
        for (share, thousandths) in [("100", 1000), ("90", 900), ("42.5", 425)] {
            let suggested = report(&["--policy", policy, "--suggest", share], &log);
            let clients = suggested["clients"].as_u64().expect("the field is a number");
            let max_denied = clients - (clients * thousandths).div_ceil(1000);
            let suggestion = &suggested["policies"][0]["suggestion"];
            let limit = suggestion["limit"].as_u64().expect("there is a suggestion");
            let clients_denied_by = |limit: u64| {
                let (kind, window) = policy
                    .split_once(' ')
                    .and_then(|(kind, rest)| {
                        Some((kind, rest.split_once('/')?.1.split(' ').next()?))
                    })
                    .expect("the policy is valid");
                let burst = burst_of
                    .map(|(b, l): (u64, u64)| format!(" burst {}", (limit * b).div_ceil(l)));
                let tried = format!("{kind} {limit}/{window}{}", burst.unwrap_or_default());
                let report = report(&["--policy", &tried], &log);
                let denied = report["policies"][0]["clients_denied"].as_u64();
                (tried, denied.expect("the field is a number"))
            };
            let (tried, denied) = clients_denied_by(limit);
            assert_eq!(suggestion["policy"], tried);
            assert_eq!(suggestion["clients_denied"], denied);
            assert!(denied <= max_denied, "{tried} denies {denied}");
            if limit > 1 {
                let (tried, denied) = clients_denied_by(limit - 1);
                assert!(denied > max_denied, "{tried} is smaller and denies only {denied}");
            }
        }
    }
}

#[test]
fn the_labels_of_the_html_report_are_whole_and_explained() {
    // One client that is denied about 82 % of its requests, and one with a long address.
    let mut log: String = (0..600)
        .map(|i| combined_line(&Request { client: "192.0.2.1".into(), second: START_S + i / 2 }))
        .collect();
    for _ in 0..9 {
        log += &combined_line(&Request {
            client: "2001:db8:1234:5678::9".into(),
            second: START_S + 300,
        });
    }
    let page = TempFile::new("labels.html", "");
    let options = ["--policy", "gcra 21/1m burst 3", "--policy", "fixed_window 1/1h", "--html"];
    report(&[&options[..], &[page.path()]].concat(), log);
    let page = std::fs::read_to_string(page.path()).expect("the page is written");
    let mut labels = 0;
    for text in page.split("<text ").skip(1) {
        let (attributes, rest) = text.split_once('>').expect("the tag ends");
        let label = rest.split("</text>").next().expect("the text ends");
        let label = label.replace("&lt;", "<").replace("&gt;", ">");
        let x = attributes.split("x=\"").nth(1).and_then(|x| x.split('"').next());
        let x: usize = x.and_then(|x| x.parse().ok()).expect("the label has a place");
        // A character of this font is at most about 7 units wide.
        let width = 7 * label.chars().count();
        let (left, right) = match attributes.split("text-anchor=\"").nth(1) {
            Some(anchor) if anchor.starts_with("end") => (x.checked_sub(width), x),
            Some(_) => (x.checked_sub(width / 2), x + width / 2),
            None => (Some(x), x + width),
        };
        assert!(left.is_some() && right <= 900, "{label:?} at {attributes} is cut off");
        labels += 1;
    }
    assert!(labels > 10, "{page}");
    assert!(page.contains(
        "only by this one: requests that this policy denies and the first policy allows"
    ));
    assert!(page.contains("<td class=\"name whole\">2001:db8:1234:5678::/64"));
}

#[test]
fn the_html_report_escapes_hostile_names() {
    let hostile = r#"</td><script>alert('1')</script><img src=x onerror="alert(1)">&amp;"#;
    let object =
        |second: i64| json!({ "ts": START_S + second, "user": hostile }).to_string() + "\n";
    let log = (0..10).map(|_| object(0)).collect::<String>() + "<script>no JSON</script>\n";
    let page = TempFile::new("page.html", "");
    let input = TempFile::new("<b>log.json", log);
    let options = [
        "--policy",
        "gcra 1/s",
        "--policy",
        "fixed_window 2/1m",
        "--key",
        "field:user",
        "--suggest",
        "50",
    ];
    let report = report(&[&options[..], &["--html", page.path(), input.path()]].concat(), "");
    assert_eq!(report["policies"][0]["most_denied"][0]["client"], hostile);
    let page = std::fs::read_to_string(page.path()).expect("the page is readable");
    assert!(page.contains("&lt;/td&gt;&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;"), "{page}");
    assert!(page.contains("&amp;amp;") && page.contains("&lt;script&gt;no JSON"), "{page}");
    for bad in ["<script", "<img", "<b>", "http://", "https://", "@import", "url("] {
        assert!(!page.contains(bad), "{bad} in {page}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("prefers-color-scheme: dark"));
    // The comparison, the timeline, the peaks, and one bar for the client of each policy.
    assert_eq!(page.matches("<svg").count(), 3 + 2);
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
}

#[test]
fn invalid_options_and_formats_are_errors() {
    let log = combined(&requests(10));
    fails(&["--policy", "gcra"], &log, "expected a limit and a window such as `100/1m`");
    fails(&[], &log, "--policy");
    fails(
        &["--policy", POLICY, "--key", "cookie"],
        &log,
        "expected `ip`, `header:NAME` or `field:NAME`",
    );
    fails(
        &["--policy", POLICY, "--suggest", "101"],
        &log,
        "expected a percentage above 0 and up to 100",
    );
    fails(&["--policy", "gcra 1/1M"], &log, "(whole numbers; units: ms, s, m, h, d)");
    fails(&["--policy", POLICY, "--peak", "x"], &log, "expected a time such as");
    fails(&["--policy", POLICY, "--peak", "0s"], &log, "must be longer than 0s");
    fails(
        &["--policy", POLICY, "--key", "header:x-api-key"],
        &log,
        "combined logs have no header \"x-api-key\"",
    );
    fails(
        &["--policy", POLICY, "--key", "field:x"],
        "time,ip\n1,192.0.2.1\n",
        "the columns are time, ip",
    );
    fails(&["--policy", POLICY, "/nowhere/access.log"], "", "cannot open /nowhere/access.log");
    fails(
        &["--policy", POLICY],
        "what\nis\nthis\n",
        "the first line is \"what\"; expected the combined or common format of nginx and Apache, a JSON object, or a CSV \
         header with a column for the time; set `format` to combined, json or csv, and `time` to the name of the time field",
    );
    fails(&["--policy", POLICY, "--format", "csv"], "what\nis\nthis\n", "no column for the time");
    fails(&["--policy", POLICY, "--suggest", "99"], "\n\n", "the log has no lines");
}

#[test]
fn memory_does_not_grow_with_lines() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["backtest", "--policy", POLICY, "--suggest", "99"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("the stream is piped");
    let mut line = String::new();
    for number in 0..1_000_000_i64 {
        let client = format!("10.0.{}.{}", number % 4, number % 251);
        line += &combined_line(&Request { client, second: START_S + number / 1000 });
        if line.len() > 100_000 {
            stdin.write_all(line.as_bytes()).expect("the write succeeds");
            line.clear();
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id()))
        .expect("the process is running");
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("the status has a peak");
    let kilobytes: u64 =
        peak.trim().trim_end_matches(" kB").parse().expect("the value is a number");
    assert!(kilobytes < 24 * 1024, "{kilobytes} kB for 1004 clients");
    stdin.write_all(line.as_bytes()).expect("the write succeeds");
    drop(stdin);
    let out = child.wait_with_output().expect("the process ends");
    assert!(String::from_utf8_lossy(&out.stdout).starts_with("1 000 000 lines, 0 unreadable\n"));
}

/// The progress is shown only on a terminal: `report` and `fails` check that a pipe does not get it.
#[test]
fn a_terminal_shows_the_progress() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("the terminal is opened");
    grantpt(&terminal).expect("the terminal is opened");
    unlockpt(&terminal).expect("the terminal is opened");
    let name = ptsname(&terminal, Vec::new()).expect("the terminal has a name");
    let screen = File::options()
        .read(true)
        .write(true)
        .open(Path::new(name.to_str().expect("the text is UTF-8")));
    let log = TempFile::new("watched.log", combined(&requests(20_000)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["backtest", "--policy", POLICY, log.path()]).env("TERM", "xterm");
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(screen.expect("the terminal is opened"));
    let child = command.spawn().expect("the binary starts");
    drop(command);
    let reader = std::thread::spawn(move || {
        let mut shown = Vec::new();
        // Reading fails when the last writer has closed the terminal.
        let _ = File::from(terminal).read_to_end(&mut shown);
        String::from_utf8_lossy(&shown).into_owned()
    });
    let out = child.wait_with_output().expect("the process ends");
    assert!(out.stdout.starts_with(b"20 000 lines"));
    let shown = reader.join().expect("the reader ends");
    assert!(shown.contains(" %  ") && shown.contains(" lines, "), "{shown:?}");
    assert!(shown.contains(" per second  ") && shown.contains(" left"), "{shown:?}");
}

fn upload(address: &str, query: &str, body: &[u8]) -> Reply {
    let mut client = Client::connect(address);
    client.send(&format!("POST /v1/backtest?{query}"), &[], body);
    client.read().expect("there is a reply")
}

const QUERY: &str = "policy=token_bucket+3/10s%20burst+5&policy=gcra+1/s&suggest=90&top=3";

#[test]
fn an_upload_gets_the_same_report_as_the_command() {
    let served = Served::start(&[], Some(""));
    let log = combined(&requests(2_000)) + "garbage\n";
    let options = ["--policy", POLICY, "--policy", "gcra 1/s", "--suggest", "90", "--top", "3"];
    let mut expected = report(&options, &log);
    expected["unreadable_lines"][0]["input"] = json!("request body");
    for body in [log.as_bytes(), &gzip(log.as_bytes())] {
        let reply = upload(served.http(), QUERY, body);
        assert_eq!((reply.status, reply.field("content-type")), (200, Some("application/json")));
        assert_eq!(reply.json(), expected);
    }
    // A chunked body without a length.
    let mut client = Client::connect(served.http());
    let head = format!(
        "POST /v1/backtest?{QUERY} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    client.write(head.as_bytes()).expect("the write succeeds");
    for chunk in log.as_bytes().chunks(777) {
        client.write(format!("{:x}\r\n", chunk.len()).as_bytes()).expect("the write succeeds");
        client.write(&[chunk, b"\r\n"].concat()).expect("the write succeeds");
    }
    client.write(b"0\r\n\r\n").expect("the write succeeds");
    assert_eq!(client.read().expect("there is a reply").json(), expected);
}

#[test]
fn an_upload_is_bounded_before_and_after_decompression() {
    let served = Served::start(&[], Some("[backtest]\nmax_bytes = 100000\n"));
    let line = combined_line(&Request { client: "192.0.2.1".into(), second: START_S });
    let fits = line.repeat(100_000 / line.len());
    assert_eq!(upload(served.http(), "policy=gcra+1/s", fits.as_bytes()).status, 200);
    let rejected = upload(served.http(), "policy=gcra+1/s", (fits + &line).as_bytes());
    assert_eq!(rejected.status, 413);
    assert_eq!(rejected.problem(), "the body is longer than 100000 bytes");
    let bomb = gzip(line.repeat(2_000_000 / line.len()).as_bytes());
    assert!(bomb.len() < 100_000);
    let rejected = upload(served.http(), "policy=gcra+1/s", &bomb);
    assert_eq!(rejected.status, 413);
    let too_large = "the log has more than 1600000 bytes after decompression (each line counts as at least 64 \
                     bytes); send a smaller part of it";
    assert_eq!(rejected.problem(), too_large);
    // Empty lines count, and so does the rest of a line that is too long.
    for bomb in [line.clone() + &"\n".repeat(26_000), line.clone() + &"x".repeat(1_700_000)] {
        let rejected = upload(served.http(), "policy=gcra+1/s", &gzip(bomb.as_bytes()));
        assert_eq!(rejected.status, 413, "{rejected:?}");
        assert_eq!(rejected.problem(), too_large);
    }
    let fits = line.clone() + &"\n".repeat(24_000);
    assert_eq!(upload(served.http(), "policy=gcra+1/s", &gzip(fits.as_bytes())).status, 200);
    // Without a length, the server notices while it reads.
    let mut client = Client::connect(served.http());
    let head = "POST /v1/backtest?policy=gcra+1/s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    client.write(head.as_bytes()).expect("the write succeeds");
    let chunk = format!("{:x}\r\n{line}\r\n", line.len());
    client.write(chunk.repeat(1_300).as_bytes()).expect("the write succeeds");
    assert_eq!(client.read().expect("there is a reply").status, 413);
}

#[test]
fn invalid_parameters_and_formats_of_an_upload_are_problems() {
    let served = Served::start(&[], Some(""));
    let log = combined(&requests(10));
    for (query, expected) in [
        ("", "parameter \"policy\" must be given 1 to 8 times (got 0)"),
        ("policy=gcra", "parameter \"policy\": found \"\"; expected a limit and a window"),
        ("policy=gcra+1/s&key=x", "parameter \"key\": found \"x\"; expected `ip`"),
        ("policy=gcra+1/s&key=ip&key=ip", "parameter \"key\" is given more than once"),
        ("policy=gcra+1/s&suggest=0", "parameter \"suggest\": found \"0\""),
        ("policy=gcra+1/s&format=xml", "parameter \"format\": found \"xml\""),
        ("policy=gcra+1/s&peak=x", "parameter \"peak\": found \"x\""),
        ("policy=gcra+1/s&top=1001", "parameter \"top\": found 1001; expected at most 1000"),
        ("policy=gcra+1/s&plicy=x", "unknown parameter \"plicy\""),
        ("policy=gcra+1/s&key=field:x", "combined logs have no field \"x\""),
    ] {
        let reply = upload(served.http(), query, log.as_bytes());
        assert_eq!(reply.status, 400, "{query}");
        assert!(reply.problem().contains(expected), "{query}: {}", reply.problem());
    }
    let reply = upload(served.http(), "policy=gcra+1/s", b"what\nis\nthis\n");
    assert_eq!(reply.status, 400);
    assert!(reply.problem().contains("cannot detect the log format"), "{}", reply.problem());
    let broken = upload(served.http(), "policy=gcra+1/s", &gzip(log.as_bytes())[..100]);
    assert_eq!(
        (broken.status, broken.json()["cut_short"][0]["input"].as_str()),
        (200, Some("request body"))
    );
}

#[test]
fn only_the_operator_may_upload_logs() {
    let served = Served::start(&[], Some(""));
    let mut client = Client::connect(served.http());
    client.send("POST /v1/backtest?policy=gcra+1/s", &[("x-forwarded-for", "192.0.2.1")], b"");
    assert_eq!(client.read().expect("there is a reply").status, 403);
    let config = "[auth]\nadmin = [\"env:ADMIN\"]\n";
    let variables = [("ADMIN", "secret-of-the-operator")];
    let served = Served::with_variables(&[], Some(config), &variables);
    assert_eq!(upload(served.http(), "policy=gcra+1/s", b"").status, 401);
}

/// Sends the first half of a log after the server accepts the upload.
fn begin(address: &str, line: &str) -> Client {
    let mut client = Client::connect(address);
    let head = format!(
        "POST /v1/backtest?policy=gcra+1/s HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
         content-length: {}\r\n\r\n",
        2 * line.len()
    );
    client.write(head.as_bytes()).expect("the write succeeds");
    client.wait_for_continue();
    client.write(line.as_bytes()).expect("the write succeeds");
    client
}

#[test]
fn at_most_two_uploads_run_at_once_and_a_closed_one_makes_room() {
    let served = Served::start(&[], Some(""));
    let line = combined_line(&Request { client: "192.0.2.1".into(), second: START_S });
    let mut both = [begin(served.http(), &line), begin(served.http(), &line)];
    let rejected = upload(served.http(), "policy=gcra+1/s", line.as_bytes());
    assert_eq!(rejected.status, 503);
    assert_eq!(rejected.field("retry-after"), Some("10"));
    assert!(rejected.problem().contains("2 backtests are already running"));
    for client in &mut both {
        client.write(line.as_bytes()).expect("the write succeeds");
        assert_eq!(client.read().expect("there is a reply").json()["requests"], 2);
    }
    assert_eq!(upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status, 200);
    let gone = [begin(served.http(), &line), begin(served.http(), &line)];
    assert_eq!(upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status, 503);
    drop(gone);
    // The server notices the closed connections after a while.
    let began = Instant::now();
    while upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status == 503 {
        assert!(began.elapsed() < Duration::from_secs(20), "the server accepts no upload");
    }
}

#[test]
fn a_log_without_a_usable_line_is_an_error_that_describes_what_was_read() {
    let policy = ["--policy", POLICY];
    fails(&policy, "", "the log has no lines; expected one request per line");
    let json = "{\"time\":\"2026-01-01T00:00:00Z\",\"ip\":\"192.0.2.1\",\"path\":\"/\"}\n";
    let filtered = [&policy[..], &["--where", "path=/login"]].concat();
    fails(
        &filtered,
        json,
        "the filters leave no line; remove a filter or change its value: 1 lines read, 1 excluded by the filters (path=/login)",
    );
    let other_key = [&policy[..], &["--key", "field:user"]].concat();
    fails(&other_key, json, "1 without the key field:user (choose another key)");
    let other_time = [&policy[..], &["--time", "when"]].concat();
    fails(&other_time, json, "1 unreadable (line 1 of ");
}
