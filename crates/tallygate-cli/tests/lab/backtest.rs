//! `tallygate backtest` and `POST /v1/backtest` as their users meet them.
//!
//! What is expected is computed here in other ways: by the definitions of the testkit, over whole histories.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Client, Reply};
use flate2::Compression;
use flate2::write::GzEncoder;
use serde_json::{Value, json};
use tallygate_core::{Kind, Limit, Policy, Tick, Ticks};
use tallygate_testkit::Model;

/// 2026-01-01T00:00:00Z.
const START_S: i64 = 1_767_225_600;
const SECOND: i64 = 1_000_000_000;
const POLICY: &str = "token_bucket 3/10s burst 5";

struct Outcome {
    output: String,
    message: String,
    code: Option<i32>,
}

fn backtest(options: &[&str], input: impl AsRef<[u8]>) -> Outcome {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.arg("backtest").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let input = input.as_ref().to_vec();
    // It may stop reading early: that is its right.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let out = child.wait_with_output().expect("it ends");
    writer.join().expect("the writer ends");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    Outcome { output: text(out.stdout), message: text(out.stderr), code: out.status.code() }
}

#[track_caller]
fn report(options: &[&str], input: impl AsRef<[u8]>) -> Value {
    let Outcome { output, message, code } = backtest(&[options, &["--json"]].concat(), input);
    assert_eq!((code, message.as_str()), (Some(0), ""));
    serde_json::from_str(&output).expect("JSON")
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

/// Requests of sixteen clients, some busy and some not, now and then a few seconds late.
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

/// The day of January 2026 that a second is in, and its time.
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
    packed.write_all(text).expect("memory");
    packed.finish().expect("memory")
}

/// A file that is gone with the test.
struct Kept(PathBuf);

impl Kept {
    fn new(name: &str, contents: impl AsRef<[u8]>) -> Self {
        let path = std::env::temp_dir().join(format!("tallygate-{}-{name}", std::process::id()));
        std::fs::write(&path, contents).expect("the file is written");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("text")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn limit_of(kind: Kind, limit: u64, window_s: i64, burst: u64) -> Limit {
    let window = Ticks((window_s * SECOND).unsigned_abs());
    Policy::of(kind, limit).per(window).burst(burst).limit().expect("a limit")
}

/// The requests that a limit refuses, by their places.
fn refused_by(limit: &Limit, requests: &[Request]) -> BTreeSet<usize> {
    let mut clients: BTreeMap<&str, Model> = BTreeMap::new();
    let mut refused = BTreeSet::new();
    for (place, request) in requests.iter().enumerate() {
        let now = Tick(request.second * SECOND);
        let first = || Model::first(limit.numbers(), now);
        let model = clients.entry(&request.client).or_insert_with(first);
        if !model.decide(now, 1).allowed {
            refused.insert(place);
        }
    }
    refused
}

/// The most requests of each client in eight slices of an eighth of the window, by looking at all of them.
fn peaks(requests: &[Request], window_s: i64) -> BTreeMap<&str, u64> {
    let mut slices: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
    for request in requests {
        let slices = slices.entry(&request.client).or_default();
        let slice = (request.second * 8).div_euclid(window_s);
        slices.push(slices.last().map_or(slice, |newest| slice.max(*newest)));
    }
    let most = |slices: &Vec<i64>| {
        let within = |last: i64| slices.iter().filter(|s| (last - 7..=last).contains(*s)).count();
        slices.iter().map(|last| within(*last) as u64).max().expect("requests")
    };
    slices.iter().map(|(client, slices)| (*client, most(slices))).collect()
}

#[test]
fn every_figure_is_what_the_definitions_say() {
    let requests = requests(2_400);
    let kinds = [
        (Kind::TokenBucket, "token_bucket 3/10s burst 5", 5),
        (Kind::Gcra, "gcra 3/10s burst 3", 3),
        (Kind::LeakyBucket, "leaky_bucket 3/10s burst 4", 4),
        (Kind::FixedWindow, "fixed_window 3/10s", 3),
        (Kind::SlidingWindowLog, "sliding_window_log 3/10s", 3),
        (Kind::SlidingWindowCounter, "sliding_window_counter 3/10s", 3),
    ];
    let options: Vec<&str> =
        kinds.iter().flat_map(|(_, spelled, _)| ["--policy", spelled]).collect();
    let report = report(&options, combined(&requests));

    let peaks = peaks(&requests, 10);
    assert_eq!(report["lines"], 2_400);
    assert_eq!((&report["unreadable"], &report["without_key"]), (&json!(0), &json!(0)));
    assert_eq!((&report["requests"], &report["clients"]), (&json!(2_400), &json!(peaks.len())));
    let seconds = || requests.iter().map(|request| request.second);
    assert_eq!(report["from"], rfc_3339(seconds().min().expect("requests")));
    assert_eq!(report["to"], rfc_3339(seconds().max().expect("requests")));

    let mut sorted: Vec<u64> = peaks.values().copied().collect();
    sorted.sort_unstable();
    for (told, thousandths) in report["peaks"]["quantiles"]
        .as_array()
        .expect("quantiles")
        .iter()
        .zip([500, 750, 900, 950, 990, 999, 1000])
    {
        let place = (sorted.len() * thousandths).div_ceil(1000) - 1;
        assert_eq!(told["requests"], sorted[place], "{told}");
    }

    let mut first = BTreeSet::new();
    for (place, (kind, spelled, burst)) in kinds.into_iter().enumerate() {
        let told = &report["policies"][place];
        let refused = refused_by(&limit_of(kind, 3, 10, burst), &requests);
        if place == 0 {
            first.clone_from(&refused);
        }
        assert_eq!(told["policy"], spelled);
        assert!(refused.len() > 100 && refused.len() < 2_300, "{spelled} is put to the test");
        assert_eq!(told["refused"], refused.len(), "{spelled}");
        assert_eq!(told["allowed"], 2_400 - refused.len());
        assert_eq!(told["refused_here_only"], refused.difference(&first).count());
        assert_eq!(told["refused_by_first_only"], first.difference(&refused).count());

        let mut hit: BTreeMap<&str, Vec<i64>> = BTreeMap::new();
        for place in &refused {
            hit.entry(&requests[*place].client).or_default().push(requests[*place].second);
        }
        assert_eq!(told["clients_refused"], hit.len());
        let mut hardest: Vec<_> = hit.iter().collect();
        hardest.sort_by_key(|(client, times)| (std::cmp::Reverse(times.len()), **client));
        let told_hardest = told["hardest_hit"].as_array().expect("clients");
        assert_eq!(told_hardest.len(), hardest.len().min(10));
        for (told, (client, times)) in told_hardest.iter().zip(hardest) {
            let own = requests.iter().filter(|request| request.client == **client).count();
            assert_eq!(told["client"], **client);
            assert_eq!((&told["refused"], &told["requests"]), (&json!(times.len()), &json!(own)));
            assert_eq!(told["first_refused"], rfc_3339(*times.iter().min().expect("one")));
            assert_eq!(told["last_refused"], rfc_3339(*times.iter().max().expect("one")));
            assert_eq!(told["peak"], peaks[*client]);
        }

        let step = report["over_time"]["step_s"].as_i64().expect("a step");
        let mut steps: BTreeMap<i64, (u64, u64)> = BTreeMap::new();
        for (place, request) in requests.iter().enumerate() {
            let (all, of_these) = steps.entry(request.second.div_euclid(step)).or_default();
            *all += 1;
            *of_these += u64::from(refused.contains(&place));
        }
        let points = report["over_time"]["points"].as_array().expect("points");
        assert!(points.len() <= 400);
        assert_eq!(points.len(), steps.len());
        for (point, (index, (all, of_these))) in points.iter().zip(&steps) {
            assert_eq!(point["time"], rfc_3339(index * step));
            assert_eq!(
                (&point["requests"], &point["refused"][place]),
                (&json!(all), &json!(of_these))
            );
        }
        let worst = steps.values().map(|(_, refused)| *refused).max().expect("steps");
        assert_eq!(told["worst"]["refused"], worst);
    }
}

#[test]
fn the_same_log_tells_the_same_in_every_format() {
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
        writeln!(table, "\"200, OK\",{},{client}", rfc_3339(*second)).expect("memory");
    }
    let elsewhere: String = requests
        .iter()
        .map(|Request { client, second }| {
            let ahead = Request { client: client.clone(), second: second + 19_800 };
            combined_line(&ahead).replace("+0000", "+0530")
        })
        .collect();
    let windows = log.replace('\n', "\r\n") + "\r\n\r\n";
    for other in [
        json.as_bytes(),
        table.as_bytes(),
        windows.as_bytes(),
        elsewhere.as_bytes(),
        &gzip(log.as_bytes()),
    ] {
        assert_eq!(report(&["--policy", POLICY], other), expected);
    }
    assert_eq!(report(&["--policy", POLICY, "-"], &log), expected);
    let unended = log.trim_end();
    assert_eq!(report(&["--policy", POLICY], unended), expected);

    let (first, second) = log.split_at(log.match_indices('\n').nth(249).expect("lines").0 + 1);
    let first = Kept::new(
        "first.gz",
        [gzip(&first.as_bytes()[..1000]), gzip(&first.as_bytes()[1000..])].concat(),
    );
    let second = Kept::new("second.log", second);
    assert_eq!(report(&["--policy", POLICY, first.path(), second.path()], ""), expected);

    // Headers are read in each file, and are no lines of it.
    let (one, other) = table.split_at(table.match_indices('\n').nth(100).expect("lines").0 + 1);
    let one = Kept::new("one.csv", one);
    let other = Kept::new("other.csv", format!("status,time,client_ip\n{other}"));
    assert_eq!(report(&["--policy", POLICY, one.path(), other.path()], ""), expected);

    expected["key"] = json!("field:path");
    expected["clients"] = json!(1);
    let by_path = report(&["--policy", POLICY, "--key", "field:path"], &log);
    assert_eq!((&by_path["key"], &by_path["clients"]), (&expected["key"], &expected["clients"]));
}

#[test]
fn clients_are_those_of_the_server() {
    let line = |client: &str| combined_line(&Request { client: client.into(), second: START_S });
    let log: String =
        ["2001:db8::1", "2001:db8::ffff:1", "::ffff:192.0.2.1", "192.0.2.1"].map(line).concat();
    let report = report(&["--policy", "fixed_window 1/1m"], log);
    assert_eq!(report["clients"], 2);
    let hit = &report["policies"][0]["hardest_hit"];
    assert_eq!(
        (&hit[0]["client"], &hit[1]["client"]),
        (&json!("192.0.2.1"), &json!("2001:db8::/64"))
    );
}

#[test]
fn a_line_that_cannot_be_read_is_counted_and_nothing_stops_for_it() {
    let requests = requests(300);
    let mut log = String::from("garbage at the start\n");
    for (place, request) in requests.iter().enumerate() {
        log += &combined_line(request);
        match place {
            10 => log += "more\u{1b}[31m garbage\n",
            20 => log += &format!("{}\n", "x".repeat(100_000)),
            // Longer than is ever held, so that its end is in another chunk.
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
        .expect("lines")
        .iter()
        .map(|line| {
            (line["line"].as_u64().expect("a number"), line["reason"].as_str().expect("text"))
        })
        .collect();
    let expected = [
        (1, "neither a combined log, nor JSON, nor under a header"),
        (13, "no time in brackets"),
        (24, "more than 65536 bytes"),
        (35, "more than 65536 bytes"),
        (46, "no address at its start"),
    ];
    assert_eq!(shown, expected);
    // What a terminal would obey is only shown.
    let text = backtest(&["--policy", POLICY], &log).output;
    assert!(text.contains("line 13: no time in brackets: more\\u{1b}[31m garbage"), "{text}");
}

#[test]
fn requests_without_a_key_are_nobodys() {
    let log = "{\"ts\":1,\"user\":\"a\"}\n{\"ts\":1}\n{\"ts\":1,\"user\":null}\n{\"ts\":1,\"user\":\"\"}\n";
    let report = report(&["--policy", "gcra 1/s", "--key", "field:user"], log);
    assert_eq!((&report["lines"], &report["without_key"]), (&json!(4), &json!(3)));
    assert_eq!((&report["requests"], &report["unreadable"]), (&json!(1), &json!(0)));
}

#[test]
fn a_log_that_ends_in_an_error_is_cut_short_there() {
    let requests = requests(5_000);
    let packed = gzip(combined(&requests).as_bytes());
    let cut = Kept::new("cut.gz", &packed[..packed.len() / 2]);
    let whole = Kept::new("whole.log", combined(&requests));
    let Outcome { output, code, .. } =
        backtest(&["--json", "--policy", POLICY, cut.path(), whole.path()], "");
    assert_eq!(code, Some(1));
    let report: Value = serde_json::from_str(&output).expect("JSON");
    assert_eq!(report["cut_short"][0]["input"], cut.path());
    let read = report["lines"].as_u64().expect("a number");
    assert!(read > 5_000 && read < 10_000, "{read}");
    assert_eq!(report["unreadable"], 0);
    let told = backtest(&["--policy", POLICY, cut.path()], "").output;
    assert!(told.contains("was not read to its end"), "{told}");
}

#[test]
fn late_requests_and_a_log_that_goes_back_are_decided_as_they_come() {
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
        for (kind, spelled) in [
            (Kind::TokenBucket, "token_bucket 2/10s"),
            (Kind::FixedWindow, "fixed_window 2/10s"),
            (Kind::SlidingWindowLog, "sliding_window_log 2/10s"),
        ] {
            let expected = refused_by(&limit_of(kind, 2, 10, 2), &requests).len();
            let told = report(&["--policy", spelled], combined(&requests));
            assert_eq!(told["policies"][0]["refused"], expected, "{spelled} {seconds:?}");
        }
    }
}

#[test]
fn the_suggested_limit_spares_the_share_and_the_next_smaller_one_does_not() {
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
            let told = report(&["--policy", policy, "--suggest", share], &log);
            let clients = told["clients"].as_u64().expect("clients");
            let may_be_refused = clients - (clients * thousandths).div_ceil(1000);
            let suggestion = &told["policies"][0]["suggestion"];
            let limit = suggestion["limit"].as_u64().expect("a limit");
            let refused_under = |limit: u64| {
                let (kind, window) = policy
                    .split_once(' ')
                    .and_then(|(kind, rest)| {
                        Some((kind, rest.split_once('/')?.1.split(' ').next()?))
                    })
                    .expect("a policy");
                let burst = burst_of
                    .map(|(b, l): (u64, u64)| format!(" burst {}", (limit * b).div_ceil(l)));
                let spelled = format!("{kind} {limit}/{window}{}", burst.unwrap_or_default());
                let told = report(&["--policy", &spelled], &log);
                (spelled, told["policies"][0]["clients_refused"].as_u64().expect("clients"))
            };
            let (spelled, refused) = refused_under(limit);
            assert_eq!(suggestion["policy"], spelled);
            assert_eq!(suggestion["clients_refused"], refused);
            assert!(refused <= may_be_refused, "{spelled} refuses {refused}");
            if limit > 1 {
                let (spelled, refused) = refused_under(limit - 1);
                assert!(refused > may_be_refused, "{spelled} is less and refuses only {refused}");
            }
        }
    }
}

#[test]
fn nothing_in_a_page_is_more_than_text() {
    let hostile = r#"</td><script>alert('1')</script><img src=x onerror="alert(1)">&amp;"#;
    let object =
        |second: i64| json!({ "ts": START_S + second, "user": hostile }).to_string() + "\n";
    let log = (0..10).map(|_| object(0)).collect::<String>() + "<script>no JSON</script>\n";
    let page = Kept::new("page.html", "");
    let input = Kept::new("<b>log.json", log);
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
    let told = report(&[&options[..], &["--html", page.path(), input.path()]].concat(), "");
    assert_eq!(told["policies"][0]["hardest_hit"][0]["client"], hostile);
    let page = std::fs::read_to_string(page.path()).expect("a page");
    assert!(page.contains("&lt;/td&gt;&lt;script&gt;alert(&#39;1&#39;)&lt;/script&gt;"), "{page}");
    assert!(page.contains("&amp;amp;") && page.contains("&lt;script&gt;no JSON"), "{page}");
    for bad in ["<script", "<img", "<b>", "http://", "https://", "@import", "url("] {
        assert!(!page.contains(bad), "{bad} in {page}");
    }
    assert!(page.contains("default-src 'none'") && page.contains("prefers-color-scheme: dark"));
    // Policies beside each other, over time, peaks, and a bar for each policy's one client.
    assert_eq!(page.matches("<svg").count(), 3 + 2);
    assert_eq!(page.matches("<svg").count(), page.matches("</svg>").count());
}

#[test]
fn mistakes_are_told_before_anything_is_read() {
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
        "expected a percentage above 0 up to 100",
    );
    fails(&["--policy", POLICY, "--peak", "0s"], &log, "expected a time such as");
    fails(
        &["--policy", POLICY, "--key", "header:x-api-key"],
        &log,
        "combined logs have no header \"x-api-key\"",
    );
    fails(&["--policy", POLICY, "--key", "field:x"], "time,ip\n1,192.0.2.1\n", "there is time, ip");
    fails(&["--policy", POLICY, "/nowhere/access.log"], "", "cannot open /nowhere/access.log");
    fails(
        &["--policy", POLICY],
        "what\nis\nthis\n",
        "the first is \"what\"; say combined, json or csv",
    );
    fails(&["--policy", POLICY, "--format", "csv"], "what\nis\nthis\n", "no column for the time");
    let none = report(&["--policy", POLICY, "--suggest", "99"], "\n\n");
    assert_eq!((&none["lines"], &none["clients"]), (&json!(0), &json!(0)));
    assert_eq!(none["policies"][0]["suggestion"]["reason"], "there are no clients");
}

#[test]
fn memory_does_not_grow_with_lines() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["backtest", "--policy", POLICY, "--suggest", "99"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("a pipe");
    let mut line = String::new();
    for number in 0..1_000_000_i64 {
        let client = format!("10.0.{}.{}", number % 4, number % 251);
        line += &combined_line(&Request { client, second: START_S + number / 1000 });
        if line.len() > 100_000 {
            stdin.write_all(line.as_bytes()).expect("it reads");
            line.clear();
        }
    }
    let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).expect("it runs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
    let kilobytes: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
    assert!(kilobytes < 24 * 1024, "{kilobytes} kB for 1004 clients");
    stdin.write_all(line.as_bytes()).expect("it reads");
    drop(stdin);
    let out = child.wait_with_output().expect("it ends");
    assert!(String::from_utf8_lossy(&out.stdout).starts_with("1 000 000 lines, 0 unreadable\n"));
}

/// How far it is is for whoever watches: `report` and `fails` see to it that nothing of it is in a pipe.
#[test]
fn a_terminal_is_told_how_far_it_is() {
    use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
    let terminal = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).expect("a terminal");
    grantpt(&terminal).expect("a terminal");
    unlockpt(&terminal).expect("a terminal");
    let name = ptsname(&terminal, Vec::new()).expect("its name");
    let screen =
        File::options().read(true).write(true).open(Path::new(name.to_str().expect("text")));
    let log = Kept::new("watched.log", combined(&requests(20_000)));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["backtest", "--policy", POLICY, log.path()]).env("TERM", "xterm");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(screen.expect("a screen"));
    let child = command.spawn().expect("the binary starts");
    drop(command);
    let reader = std::thread::spawn(move || {
        let mut shown = Vec::new();
        // A terminal that nobody writes to any more is an error to its reader.
        let _ = File::from(terminal).read_to_end(&mut shown);
        String::from_utf8_lossy(&shown).into_owned()
    });
    let out = child.wait_with_output().expect("it ends");
    assert!(out.stdout.starts_with(b"20 000 lines"));
    let shown = reader.join().expect("the reader ends");
    assert!(shown.contains(" %  ") && shown.contains(" lines, "), "{shown:?}");
    assert!(shown.contains(" a second  ") && shown.contains(" left"), "{shown:?}");
}

fn upload(address: &str, query: &str, body: &[u8]) -> Reply {
    let mut client = Client::connect(address);
    client.send(&format!("POST /v1/backtest?{query}"), &[], body);
    client.read().expect("a reply")
}

const QUERY: &str = "policy=token_bucket+3/10s%20burst+5&policy=gcra+1/s&suggest=90&top=3";

#[test]
fn a_log_that_is_sent_is_told_of_as_the_command_does() {
    let served = Served::start(&[], Some(""));
    let log = combined(&requests(2_000)) + "garbage\n";
    let options = ["--policy", POLICY, "--policy", "gcra 1/s", "--suggest", "90", "--top", "3"];
    let mut expected = report(&options, &log);
    expected["unreadable_lines"][0]["input"] = json!("the body");
    for body in [log.as_bytes(), &gzip(log.as_bytes())] {
        let reply = upload(served.http(), QUERY, body);
        assert_eq!((reply.status, reply.field("content-type")), (200, Some("application/json")));
        assert_eq!(reply.json(), expected);
    }
    // In chunks, without a length.
    let mut client = Client::connect(served.http());
    let head = format!(
        "POST /v1/backtest?{QUERY} HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    client.write(head.as_bytes()).expect("it reads");
    for chunk in log.as_bytes().chunks(777) {
        client.write(format!("{:x}\r\n", chunk.len()).as_bytes()).expect("it reads");
        client.write(&[chunk, b"\r\n"].concat()).expect("it reads");
    }
    client.write(b"0\r\n\r\n").expect("it reads");
    assert_eq!(client.read().expect("a reply").json(), expected);
}

#[test]
fn what_is_sent_is_bounded_packed_and_unpacked() {
    let served = Served::start(&[], Some("[backtest]\nmax_bytes = 100000\n"));
    let line = combined_line(&Request { client: "192.0.2.1".into(), second: START_S });
    let fits = line.repeat(100_000 / line.len());
    assert_eq!(upload(served.http(), "policy=gcra+1/s", fits.as_bytes()).status, 200);
    let refused = upload(served.http(), "policy=gcra+1/s", (fits + &line).as_bytes());
    assert_eq!(refused.status, 413);
    assert_eq!(refused.problem(), "the body has more than 100000 bytes");
    let bomb = gzip(line.repeat(2_000_000 / line.len()).as_bytes());
    assert!(bomb.len() < 100_000);
    let refused = upload(served.http(), "policy=gcra+1/s", &bomb);
    assert_eq!(refused.status, 413);
    let too_large = "more than 1600000 bytes, unpacked (each line counts as at least 64 bytes)";
    assert_eq!(refused.problem(), too_large);
    // Lines without anything take time, and so does the rest of a line that is too long.
    for bomb in [line.clone() + &"\n".repeat(26_000), line.clone() + &"x".repeat(1_700_000)] {
        let refused = upload(served.http(), "policy=gcra+1/s", &gzip(bomb.as_bytes()));
        assert_eq!(refused.status, 413, "{refused:?}");
        assert_eq!(refused.problem(), too_large);
    }
    let fits = line.clone() + &"\n".repeat(24_000);
    assert_eq!(upload(served.http(), "policy=gcra+1/s", &gzip(fits.as_bytes())).status, 200);
    // Without a length it is found out on the way.
    let mut client = Client::connect(served.http());
    let head = "POST /v1/backtest?policy=gcra+1/s HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n";
    client.write(head.as_bytes()).expect("it reads");
    let chunk = format!("{:x}\r\n{line}\r\n", line.len());
    client.write(chunk.repeat(1_300).as_bytes()).expect("it reads");
    assert_eq!(client.read().expect("a reply").status, 413);
}

#[test]
fn mistakes_in_what_is_sent_are_problems() {
    let served = Served::start(&[], Some(""));
    let log = combined(&requests(10));
    for (query, expected) in [
        ("", "parameter \"policy\": found 0; expected 1 to 8"),
        ("policy=gcra", "parameter \"policy\": found \"\"; expected a limit and a window"),
        ("policy=gcra+1/s&key=x", "parameter \"key\": found \"x\"; expected `ip`"),
        ("policy=gcra+1/s&key=ip&key=ip", "parameter \"key\" is given twice"),
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
    assert!(reply.problem().contains("cannot tell the format"), "{}", reply.problem());
    let broken = upload(served.http(), "policy=gcra+1/s", &gzip(log.as_bytes())[..100]);
    assert_eq!(
        (broken.status, broken.json()["cut_short"][0]["input"].as_str()),
        (200, Some("the body"))
    );
}

#[test]
fn only_the_operator_may_send_logs() {
    let served = Served::start(&[], Some(""));
    let mut client = Client::connect(served.http());
    client.send("POST /v1/backtest?policy=gcra+1/s", &[("x-forwarded-for", "192.0.2.1")], b"");
    assert_eq!(client.read().expect("a reply").status, 403);
    let config = "[auth]\nadmin = [\"env:ADMIN\"]\n";
    let variables = [("ADMIN", "secret-of-the-operator")];
    let served = Served::with_variables(&[], Some(config), &variables);
    assert_eq!(upload(served.http(), "policy=gcra+1/s", b"").status, 401);
}

/// Sends the start of a log when it is wanted, and keeps the rest.
fn begin(address: &str, line: &str) -> Client {
    let mut client = Client::connect(address);
    let head = format!(
        "POST /v1/backtest?policy=gcra+1/s HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
         content-length: {}\r\n\r\n",
        2 * line.len()
    );
    client.write(head.as_bytes()).expect("it reads");
    client.go_on();
    client.write(line.as_bytes()).expect("it reads");
    client
}

#[test]
fn two_are_decided_at_a_time_and_whoever_leaves_makes_room() {
    let served = Served::start(&[], Some(""));
    let line = combined_line(&Request { client: "192.0.2.1".into(), second: START_S });
    let mut both = [begin(served.http(), &line), begin(served.http(), &line)];
    let refused = upload(served.http(), "policy=gcra+1/s", line.as_bytes());
    assert_eq!(refused.status, 503);
    assert_eq!(refused.field("retry-after"), Some("10"));
    assert!(refused.problem().contains("2 backtests are being decided"));
    for client in &mut both {
        client.write(line.as_bytes()).expect("it reads");
        assert_eq!(client.read().expect("a reply").json()["requests"], 2);
    }
    assert_eq!(upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status, 200);
    let gone = [begin(served.http(), &line), begin(served.http(), &line)];
    assert_eq!(upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status, 503);
    drop(gone);
    // That they have gone is noticed at some time.
    let began = Instant::now();
    while upload(served.http(), "policy=gcra+1/s", line.as_bytes()).status == 503 {
        assert!(began.elapsed() < Duration::from_secs(20), "nobody is served");
    }
}
