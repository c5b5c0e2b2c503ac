//! Tests how long one request occupies a worker of the runtime, and how its cost grows with its size.
//!
//! A server runs on a runtime with one worker. On the same worker, a probe task yields in a loop and measures the
//! processor time between two of its runs: no other task waits longer. The time is that of the thread, so other
//! processes do not count. Each case runs a few times and the best run counts, since the host can interrupt a virtual
//! machine.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};
use std::path::Path;

use rustix::time::{ClockId, clock_gettime};
use tallygate::store::Capacity;
use tallygate_redis::Stores;
use tallygate_testkit::http2;
use tokio::sync::oneshot;

use super::*;
use crate::config::Config;
use crate::connection::Security;

/// The longest time that a request may occupy a worker.
const BOUND: Duration = Duration::from_millis(1);
/// How often a case is measured at most.
const RUNS: usize = 5;
/// A comment in a configuration that makes the test set 2000 overrides.
const MANY_OVERRIDES: &str = "# many overrides";

/// A measurement.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Measure {
    /// The longest time between two runs of the probe.
    Longest,
    /// The whole processor time of the worker.
    Total,
}

#[derive(Clone, Copy)]
enum Surface {
    Http,
    Resp,
}

/// The processor time of this thread.
fn thread_time() -> Duration {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.try_into().unwrap(), time.tv_nsec.try_into().unwrap())
}

/// Sends bytes and returns all replies. Over HTTP, the last request asks to close the connection: a half-closed
/// connection is not answered.
fn exchange(address: &str, surface: Surface, script: &[u8]) -> Vec<u8> {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let (mut reading, mut replies) = (stream.try_clone().unwrap(), Vec::new());
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut writing = &stream;
            // The server may close the connection early.
            let _ = writing.write_all(script);
            if let Surface::Resp = surface {
                let _ = stream.shutdown(Shutdown::Write);
            }
        });
        let _ = reading.read_to_end(&mut replies);
    });
    replies
}

/// Serves a script on one worker and measures it. The replies must satisfy a condition.
fn serve(
    measure: Measure,
    text: &str,
    surface: Surface,
    script: &[u8],
    is_right: &dyn Fn(&str),
) -> Duration {
    let config = Config::parse(text, Path::new("")).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (measured, replies) = runtime.block_on(async {
        let (reload, _) = mpsc::channel(1);
        let stores = Stores::Memory(Capacity::of(100_000));
        let shared = Arc::new(Shared::new(&config, stores, RestoredStores::default(), reload));
        if text.contains(MANY_OVERRIDES) {
            for number in 0..2_000 {
                let key = format!("client-{number}");
                let entry = shared.gate.policy("policy-number-0").unwrap();
                entry.limiter.set_override(key.as_bytes(), tallygate::tiers::Access::Blocked, None);
            }
        }
        shared.is_ready.store(true, Ordering::Release);
        let (_stop, stopped) = watch::channel(false);
        let listener = Listener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.to_string();
        match surface {
            Surface::Http => drop(tokio::spawn(listener.accept(
                "http",
                Security::none(),
                shared.clone(),
                stopped,
                http::serve_connection,
            ))),
            Surface::Resp => drop(tokio::spawn(listener.accept(
                "resp",
                Security::none(),
                shared.clone(),
                stopped,
                resp::serve_connection,
            ))),
        }
        let script = script.to_owned();
        let (sender, receiver) = oneshot::channel();
        let asking = std::thread::spawn(move || {
            let replies = exchange(&address, surface, &script);
            let _ = sender.send(());
            replies
        });
        let began = thread_time();
        let (mut longest, mut last) = (Duration::ZERO, began);
        if measure == Measure::Total {
            receiver.await.unwrap();
        }
        while !asking.is_finished() {
            tokio::task::yield_now().await;
            let now = thread_time();
            longest = longest.max(now - last);
            last = now;
        }
        let measured = match measure {
            Measure::Longest => longest,
            Measure::Total => thread_time() - began,
        };
        (measured, asking.join().unwrap())
    });
    is_right(&String::from_utf8_lossy(&replies));
    measured
}

/// Measures a case until it is below the bound, a few times at most.
fn assert_yields(
    case: &str,
    config: &str,
    surface: Surface,
    script: &[u8],
    is_right: &dyn Fn(&str),
) {
    let mut best = Duration::MAX;
    for _ in 0..RUNS {
        best = best.min(serve(Measure::Longest, config, surface, script, is_right));
        if best < BOUND {
            break;
        }
    }
    #[allow(clippy::print_stderr, reason = "the figures are what one looks for")]
    {
        eprintln!("{case}: {best:?} for {} bytes", script.len());
    }
    assert!(best < BOUND, "{case} holds the worker for {best:?}");
}

fn policies(count: usize) -> String {
    let mut config = "[admin]\nloopback = true\n[limits]\nmax_all_items = 1000\n".to_owned();
    for number in 0..count {
        let _ = write!(
            config,
            "[policies.policy-number-{number}]\nlimit = 1000000\nwindow = \"1h\"\n\
             [policies.policy-number-{number}.tiers.pro]\nlimit = 2000000\n"
        );
    }
    config
}

fn post(path: &str, body: &str) -> Vec<u8> {
    let bytes = body.len();
    format!(
        "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {bytes}\r\n\r\n{body}"
    )
    .into_bytes()
}

/// The same request, without closing the connection.
fn keep_alive(request: &[u8]) -> Vec<u8> {
    let request = String::from_utf8_lossy(request);
    request.replacen("connection: close\r\n", "", 1).into_bytes()
}

fn get(path: &str, times: usize) -> Vec<u8> {
    let one = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let last = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    [one.repeat(times - 1), last].concat().into_bytes()
}

/// Returns HTTP/2 requests that are sent at once.
fn streams(count: u32, path: &str, body: Option<&[u8]>) -> Vec<u8> {
    let requests = (0..count).flat_map(|stream| http2::request(2 * stream + 1, path, body));
    [http2::hello(&[]), requests.collect(), closing_frames()].concat()
}

/// Returns the bytes that end an HTTP/2 connection after all replies.
fn closing_frames() -> Vec<u8> {
    http2::frame(http2::kind::GOAWAY, 0, 0, &[0; 8])
}

/// A list under a field, of keys of a length.
fn list(field: &str, count: usize, key_bytes: usize) -> String {
    let items: Vec<_> = (0..count)
        .map(|key| {
            format!(r#"{{"policy":"policy-number-0","tier":"pro","key":"{key:x<key_bytes$}"}}"#)
        })
        .collect();
    format!(r#"{{"{field}":[{}]}}"#, items.join(","))
}

fn status(expected: u16) -> impl Fn(&str) {
    move |replies: &str| {
        let expected = format!("HTTP/1.1 {expected} ");
        assert!(replies.starts_with(&expected), "{}", &replies[..replies.len().min(300)]);
    }
}

fn replies(expected: &'static str, count: usize) -> impl Fn(&str) {
    move |replies: &str| {
        let found = replies.matches(expected).count();
        assert_eq!(found, count, "of {expected:?} in {}", &replies[..replies.len().min(300)]);
    }
}

/// Fault J4.
#[test]
fn no_http_request_holds_a_worker_longer_than_a_millisecond() {
    let config = policies(300) + MANY_OVERRIDES;
    let http = |case: &str, script: Vec<u8>, is_right: &dyn Fn(&str)| {
        assert_yields(case, &config, Surface::Http, &script, is_right);
    };
    http("the longest list", post("/v1/check", &list("checks", 10_000, 1)), &status(200));
    http("the largest list", post("/v1/check", &list("checks", 9_000, 55)), &status(200));
    http("the largest `all`", post("/v1/check", &list("all", 64, 4_000)), &status(200));
    http("an `all` that is too long", post("/v1/check", &list("all", 10_000, 1)), &status(400));
    let last_is_wrong = list("checks", 9_000, 50).replace("]}", r#",{"key":1}]}"#);
    http("a mistake in the last item", post("/v1/check", &last_is_wrong), &status(400));
    let escaped = format!(r#"{{"policy":"a","key":"{}"}}"#, r"\u0061".repeat(5_300));
    http("the longest escaped key", post("/v1/check", &escaped), &status(404));
    let long = format!(r#"{{"policy":"a","key":"{}"}}"#, r"\u0061".repeat(170_000));
    http("a key of a whole body", post("/v1/check", &long), &status(413));
    let long = format!(r#"{{"checks":[{long}]}}"#);
    http("an item of a whole body", post("/v1/check", &long), &status(413));
    http("a body of brackets", post("/v1/check", &"[".repeat(1_000_000)), &status(400));
    http(
        "a list of nothing",
        post("/v1/check", &format!(r#"{{"checks":[{}]}}"#, ",".repeat(1_000_000))),
        &status(400),
    );
    http(
        "a list of strings",
        post("/v1/peek", &format!(r#"{{"checks":[{}]}}"#, "\"\"".repeat(500_000))),
        &status(413),
    );
    let head = format!(
        "GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\nx: {}\r\n\r\n",
        "y".repeat(60_000)
    );
    http("the longest head", head.into_bytes(), &status(200));
    let fields: String =
        (0..90).map(|field| format!("x-{field}: {}\r\n", "y".repeat(600))).collect();
    let head =
        format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{fields}\r\n");
    http("a head of many fields", head.into_bytes(), &status(200));
    http("a pipeline", get("/livez", 2_000), &replies("alive", 2_000));
    // The probe waits for all heads to be decoded: as many as a build without much optimization decodes in time.
    http("streams of HTTP/2", streams(70, "/livez", None), &replies("alive", 70));
    let check = br#"{"policy":"policy-number-0","key":"a"}"#;
    http("checks of HTTP/2", streams(70, "/v1/check", Some(check)), &replies("\"remaining\"", 70));
    let bomb = http2::frame(http2::kind::HEADERS, http2::END_HEADERS, 1, &http2::bomb());
    http("a bomb of HTTP/2", [http2::hello(&[]), bomb, closing_frames()].concat(), &|_| {});
    http("metrics of 300 policies", get("/metrics", 4), &replies("# TYPE process_threads", 4));
    http("300 policies", get("/v1/policies", 4), &replies("policy-number-299", 4));
    http("2000 overrides", get("/v1/admin/overrides", 4), &replies("client-1999", 4));
    http("hot clients", get("/v1/admin/hot", 20), &replies("busiest", 20));
    http(
        "a client in 300 policies",
        get("/v1/admin/client?key=a", 4),
        &replies("policy-number-299", 4),
    );
    let set = r#"{"policy":"policy-number-0","key":"a","access":"blocked"}"#;
    let set = [b"PUT".as_slice(), &post("/v1/admin/overrides", set)[4..]].concat();
    http("one more override", set, &status(200));
    http("the description", get("/openapi.json", 50), &replies("HTTP/1.1 200", 50));
}

/// Fault J4.
#[test]
fn no_resp_command_holds_a_worker_longer_than_a_millisecond() {
    let config = policies(100);
    let resp = |case: &str, script: String, is_right: &dyn Fn(&str)| {
        assert_yields(case, &config, Surface::Resp, script.as_bytes(), is_right);
    };
    let many = |command: &str, times: usize| format!("{command}\r\n").repeat(times);
    resp("throttles", many("CL.THROTTLE k 1 1 1", 20_000), &replies("*5\r\n", 20_000));
    resp("checks", many("TG.CHECK policy-number-0 k", 20_000), &replies("*6\r\n", 20_000));
    resp("empty commands", "\r\n".repeat(100_000), &replies("*", 0));
    resp("pings", many("PING", 20_000), &replies("+PONG", 20_000));
    resp("introductions", many("HELLO", 5_000), &replies("tallygate", 5_000));
    resp("commands", many("COMMAND", 500), &replies("cl.throttle", 500));
    resp("information", many("INFO", 5_000), &replies("redis_version", 5_000));
    resp("wrong tokens", many("AUTH x", 5_000), &replies("-ERR AUTH", 5_000));
    let names: String =
        (0..5_000).map(|name| format!("TG.CHECK policy-number-x{name} k\r\n")).collect();
    resp("unknown names", names, &replies("-ERR no policy is named", 5_000));
    resp(
        "lines of many words",
        many(&"a ".repeat(32_000), 10),
        &replies("-ERR the command has", 10),
    );
    let quoted = format!("PING \"{}\"", r"\x61".repeat(16_000));
    resp("lines of escapes", many(&quoted, 10), &replies("$16000", 10));
    let long = "x".repeat(64 << 10);
    let key =
        format!("*3\r\n$8\r\nTG.CHECK\r\n$15\r\npolicy-number-0\r\n${}\r\n{long}\r\n", long.len());
    resp("long keys", key.repeat(20), &replies("-ERR", 20));
    let name = format!("*3\r\n$8\r\nTG.CHECK\r\n${}\r\n{long}\r\n$1\r\nk\r\n", long.len());
    resp("long names", name.repeat(20), &replies("-ERR", 20));
    let unknown = format!("*1\r\n${}\r\n{long}\r\n", long.len());
    resp("long commands", unknown.repeat(20), &replies("-ERR unknown command", 20));
}

/// Fault J4.
#[test]
fn no_request_of_envoy_holds_a_worker_longer_than_a_millisecond() {
    let rules = |value: &dyn Fn(usize) -> String| {
        let mut rules = "domain: web\ndescriptors:\n".to_owned();
        for number in 0..300 {
            let value = value(number);
            let _ = writeln!(rules, "  - {{key: key, value: '{value}'");
            rules += "    , rate_limit: {unit: day, requests_per_unit: 1000}}\n";
        }
        let mut file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
        file.write_all(rules.as_bytes()).unwrap();
        file
    };
    let request = |count: usize, value: &str| {
        let one = format!(r#"{{"entries":[{{"key":"key","value":"{value}"}}]}}"#);
        let list = vec![one; count].join(",");
        post("/json", &format!(r#"{{"domain":"web","descriptors":[{list}]}}"#))
    };
    // The texts and the values have the same rare letters, which the search looks for first.
    let middle = rules(&|number| format!("*zq{number:03}*x"));
    let repeated = rules(&|number| format!("{}b{number}*", "a*".repeat(13)));
    let cases = [
        ("one long value", &middle, request(1, &format!("{}x", "zq".repeat(16_000)))),
        ("64 values", &middle, request(64, &format!("{}x", "zq".repeat(220)))),
        ("values of many parts", &repeated, request(64, &"a".repeat(450))),
        ("values like the rules", &repeated, request(64, &"aaaab".repeat(88))),
    ];
    for (case, rules, script) in cases {
        let config = format!("[envoy]\nconfig = {:?}\n", rules.path());
        assert_yields(case, &config, Surface::Http, &script, &status(200));
    }
}

/// The cost of ten times the bytes is at most about ten times the cost, for each thing that a request may have many of.
///
/// Fault J4.
#[test]
fn a_request_costs_time_linear_in_its_bytes() {
    let config = policies(2);
    let total = |surface, script: &[u8]| serve(Measure::Total, &config, surface, script, &|_| {});
    let check = |case: &str, surface, few: &[u8], many: &[u8]| {
        let grown = 100 * many.len() as u128 / few.len() as u128;
        let mut best = [Duration::MAX; 2];
        for _ in 0..RUNS {
            best = [best[0].min(total(surface, few)), best[1].min(total(surface, many))];
        }
        let [few, many] = best;
        let percent = 100 * many.as_nanos() / few.as_nanos();
        #[allow(clippy::print_stderr, reason = "the figures are what one looks for")]
        {
            eprintln!("{case}: {few:?}, {many:?}, {percent} % for {grown} % of the bytes");
        }
        assert!(2 * percent < 3 * grown, "{case}: {few:?}, {many:?} for {grown} % of the bytes");
    };
    let of = |field: &str, count| post("/v1/check", &list(field, count, 5));
    check("lists", Surface::Http, &of("checks", 1_000), &of("checks", 10_000));
    check("`all` of new keys", Surface::Http, &of("all", 300), &of("all", 1_000));
    let all = |count| [keep_alive(&of("all", count)).repeat(20), of("all", count)].concat();
    check("`all` of known keys", Surface::Http, &all(100), &all(1_000));
    let same = |count: usize| {
        let item = r#"{"policy":"policy-number-0","key":"same"}"#;
        post("/v1/check", &format!(r#"{{"checks":[{}]}}"#, vec![item; count].join(",")))
    };
    check("lists of one key", Surface::Http, &same(1_000), &same(10_000));
    let throttles = |count| "CL.THROTTLE k 1 1 1\r\n".repeat(count).into_bytes();
    check("pipelines", Surface::Resp, &throttles(5_000), &throttles(50_000));
    let words = |count| format!("{}\r\n", "a ".repeat(count)).repeat(50).into_bytes();
    check("words", Surface::Resp, &words(3_000), &words(30_000));
    let heads = |bytes| {
        let one =
            format!("GET /livez HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "y".repeat(bytes));
        [one.repeat(20).into_bytes(), get("/livez", 1)].concat()
    };
    check("heads", Surface::Http, &heads(6_000), &heads(60_000));
}
