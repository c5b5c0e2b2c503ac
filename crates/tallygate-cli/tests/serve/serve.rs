//! `tallygate serve` as its operators meet it: where it listens, how it changes, how it stops; and the commands around it.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use tallygate_testkit::servers::{Flavor, Server};

const API: &str = "[policies.api]\nlimit = 3\nwindow = \"1h\"\n";

/// The body of an answer to a request, and its status line.
fn http(address: &str, request: &str) -> (String, String) {
    let mut answer = String::new();
    let request = request.replace('\n', "\r\n");
    match address.strip_prefix("unix:") {
        Some(path) => {
            let mut stream = UnixStream::connect(path).expect("it listens");
            stream.write_all(request.as_bytes()).expect("it reads");
            stream.read_to_string(&mut answer).expect("it answers");
        }
        None => {
            let mut stream = TcpStream::connect(address).expect("it listens");
            stream.write_all(request.as_bytes()).expect("it reads");
            stream.read_to_string(&mut answer).expect("it answers");
        }
    }
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head and a body");
    (head.lines().next().expect("a status").to_owned(), body.to_owned())
}

fn post(address: &str, path: &str, body: &str) -> (String, serde_json::Value) {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\nHost: localhost\nConnection: close\nContent-Length: {length}\n\n"
    );
    let (status, answer) = http(address, &format!("{head}{body}"));
    (status, serde_json::from_str(&answer).unwrap_or(serde_json::Value::Null))
}

fn get(address: &str, path: &str) -> (String, String) {
    http(address, &format!("GET {path} HTTP/1.1\nHost: localhost\nConnection: close\n\n"))
}

fn check(served: &Served, key: &str) -> serde_json::Value {
    let body = format!("{{\"policy\":\"api\",\"key\":{}}}", serde_json::json!(key));
    let (status, answer) = post(served.http(), "/v1/check", &body);
    assert!(status.contains(" 200 "), "{status} {answer}");
    answer
}

fn limit(served: &Served) -> u64 {
    check(served, "who looks")["limit"].as_u64().expect("a limit")
}

fn resp(served: &Served, words: &[&str]) -> String {
    let output = Command::new("redis-cli").args(["-p", served.resp_port()]).args(words).output();
    String::from_utf8(output.expect("redis-cli runs").stdout).expect("text")
}

#[track_caller]
fn soon(what: &str, mut holds: impl FnMut() -> bool) {
    let started = Instant::now();
    while !holds() {
        assert!(started.elapsed() < Duration::from_secs(5), "{what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn tallygate(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallygate")).args(words).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn without_a_configuration_it_serves_a_demo_and_says_what_to_try() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["serve", "--http", "127.0.0.1:0", "--log", "error"])
        .env("TALLYGATE_RESP", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
    let mut line = || lines.next().expect("a line").expect("text");
    let http = line();
    assert!(http.starts_with("http 127.0.0.1:"), "{http}");
    let resp = line();
    assert!(resp.starts_with("resp 127.0.0.1:") && !resp.ends_with(":0"), "{resp}");
    assert_eq!(line(), "tallygate ready");
    assert!(line().contains("\"demo\""));
    // What it says to try works as it is.
    let tried = line();
    let output = Command::new("sh").args(["-c", &tried]).output().expect("a shell");
    assert!(text(&output.stdout).contains("\"allowed\":true"), "{tried}: {output:?}");
    for _ in 0..2 {
        let tried = line();
        let output = Command::new("sh").args(["-c", &tried]).output().expect("a shell");
        assert!(
            output.status.success() && !text(&output.stdout).contains("ERR"),
            "{tried}: {output:?}"
        );
    }
    child.kill().expect("it runs");
    child.wait().expect("it ends");
}

#[test]
fn unix_sockets_serve_too_and_are_removed() {
    let folder = std::env::temp_dir().join(format!("tallygate-unix-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let (http, resp) = (folder.join("http"), folder.join("resp"));
    let address = |path: &Path| format!("unix:{}", path.display());
    for _ in 0..2 {
        let mut served =
            Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
        assert_eq!(served.http(), address(&http));
        assert_eq!(check(&served, "alice")["remaining"], 2);
        let mut stream = UnixStream::connect(&resp).expect("it listens");
        stream.write_all(b"TG.CHECK api alice\r\n").expect("it reads");
        let mut reply = [0; 8];
        stream.read_exact(&mut reply).expect("it answers");
        assert_eq!(&reply, b"*6\r\n:1\r\n");
        drop(stream);
        assert_eq!(served.stop(), Some(0));
        assert!(!http.exists() && !resp.exists());
    }
    // One that was killed leaves its socket, which is not in the way of the next.
    let mut killed =
        Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
    killed.signal("KILL");
    assert_eq!(killed.ended(), None);
    assert!(http.exists());
    let served = Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
    assert_eq!(check(&served, "alice")["remaining"], 2);
    drop(served);
    std::fs::remove_dir_all(&folder).expect("it was there");
}

#[test]
fn e14_http_resp_and_the_library_see_one_quota_and_the_same_keys() {
    let server = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &server.url()], Some(API));
    let key = "a\u{0}b \u{fc}\"{x}\r\n";
    assert_eq!(check(&served, key)["remaining"], 2);
    // Over RESP, byte for byte.
    let mut stream = TcpStream::connect(served.resp()).expect("it listens");
    let request = format!("*3\r\n$8\r\nTG.CHECK\r\n$3\r\napi\r\n${}\r\n{key}\r\n", key.len());
    stream.write_all(request.as_bytes()).expect("it reads");
    let mut reply = [0; 15];
    stream.read_exact(&mut reply).expect("it answers");
    assert_eq!(&reply, b"*6\r\n:1\r\n:3\r\n:1\r");
    // By the library, in another process.
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime.block_on(async {
        let policy =
            tallygate::Policy::token_bucket(3).per_hour().named("api").build().expect("a policy");
        let redis = tallygate_redis::Redis::open(&server.url()).expect("an address");
        let limiter = tallygate::RateLimiter::with_store(policy, redis.store("api"));
        let decision = limiter.check(key).await.expect("a decision");
        assert_eq!((decision.remaining, decision.source), (0, tallygate::Source::Store));
    });
    assert_eq!(check(&served, key)["allowed"], false);
}

#[test]
fn g1_a_bad_file_changes_nothing_and_is_told() {
    let served = Served::start(&[], Some(API));
    assert_eq!(limit(&served), 3);
    std::fs::write(served.config(), "[policies.api]\nlimt = 9\nwindow = \"1h\"\n")
        .expect("written");
    soon("the mistake is counted", || {
        get(served.http(), "/metrics").1.contains("tallygate_reloads_total{outcome=\"refused\"} 1")
    });
    assert_eq!(limit(&served), 3);
    let (status, told) = post(served.http(), "/v1/admin/reload", "");
    assert!(status.contains(" 422 ") || status.contains(" 409 "), "{status}");
    assert!(told.to_string().contains("did you mean `limit`?"), "{told}");
    // And a good one is taken, also after the mistake.
    std::fs::write(served.config(), crate::common::with_admin(&API.replace('3', "5")))
        .expect("written");
    soon("the new limit", || limit(&served) == 5);
}

#[test]
fn g2_a_symlink_swap_and_a_rename_are_taken_whole() {
    let folder = std::env::temp_dir().join(format!("tallygate-swap-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    // As Kubernetes does: the name is a link to a link to a folder, which is swapped.
    for (version, limit) in [("one", "3"), ("two", "4")] {
        std::fs::create_dir_all(folder.join(version)).expect("a folder");
        std::fs::write(
            folder.join(version).join("tallygate.toml"),
            crate::common::with_admin(&API.replace('3', limit)),
        )
        .expect("written");
    }
    std::os::unix::fs::symlink("one", folder.join("data")).expect("a link");
    std::os::unix::fs::symlink("data/tallygate.toml", folder.join("tallygate.toml"))
        .expect("a link");
    let config = folder.join("tallygate.toml");
    let served = Served::start(&["--config", config.to_str().expect("a name")], None);
    assert_eq!(limit(&served), 3);
    assert_eq!(check(&served, "alice")["remaining"], 2);
    std::os::unix::fs::symlink("two", folder.join("data.new")).expect("a link");
    std::fs::rename(folder.join("data.new"), folder.join("data")).expect("swapped");
    soon("the swapped limit", || limit(&served) == 4);
    // What was used stays used.
    assert_eq!(check(&served, "alice")["remaining"], 2);
    // A file that is being rewritten is not taken before it rests, though it is a configuration all the time.
    for round in 0..40 {
        std::fs::write(
            folder.join("two/tallygate.toml"),
            crate::common::with_admin(&API.replace('3', &format!("1{round:02}"))),
        )
        .expect("written");
        std::thread::sleep(Duration::from_millis(50));
        assert_eq!(limit(&served), 4, "a file that was still being written was taken");
    }
    soon("the file that rests", || limit(&served) == 139);
    drop(served);
    std::fs::remove_dir_all(&folder).expect("it was there");
}

#[test]
fn g4_under_load_every_decision_is_by_one_version() {
    // Two versions whose limits and bursts go together; a decision by both would show another pair.
    let versions = ["limit = 100\nburst = 1000\n", "limit = 200\nburst = 2000\n"];
    let config = |version: &str| format!("[policies.api]\nwindow = \"1h\"\n{version}");
    let served = Served::start(&[], Some(&config(versions[0])));
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        let asking = scope.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let answer = check(&served, "alice");
                let limit = answer["limit"].as_u64().expect("a limit");
                assert!(answer["remaining"].as_u64().expect("a number") <= limit, "{answer}");
                seen.insert(limit);
            }
            seen
        });
        for round in 1..6 {
            std::fs::write(
                served.config(),
                crate::common::with_admin(&config(versions[round % 2])),
            )
            .expect("written");
            served.signal("HUP");
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let seen = asking.join().expect("it asks");
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1000, 2000]);
    });
}

#[test]
fn i1_told_to_stop_it_answers_what_it_was_asked_and_exits_with_0() {
    let mut served = Served::start(&[], Some(&API.replace('3', "1000000")));
    let address = served.http().to_owned();
    let resp = served.resp().to_owned();
    let stop = std::sync::atomic::AtomicBool::new(false);
    let stopping = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        // Each asks over one connection until it is closed; whatever was sent whole must be answered whole, unless the
        // connection was closed before it was read.
        let asking: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    let mut answered = 0_u32;
                    while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                        let Ok(mut stream) = TcpStream::connect(&resp) else { break };
                        stream.write_all(b"TG.CHECK api alice\r\n").expect("it is open");
                        let mut reply = String::new();
                        let mut reader = BufReader::new(&stream);
                        if reader.read_line(&mut reply).unwrap_or(0) == 0 {
                            // Not read: only after it was told to stop.
                            assert!(stopping.load(std::sync::atomic::Ordering::SeqCst));
                            break;
                        }
                        assert_eq!(reply, "*6\r\n");
                        answered += 1;
                    }
                    answered
                })
            })
            .collect();
        std::thread::sleep(Duration::from_millis(300));
        stopping.store(true, std::sync::atomic::Ordering::SeqCst);
        assert_eq!(served.stop(), Some(0));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        let answered: u32 = asking.into_iter().map(|one| one.join().expect("it asks")).sum();
        assert!(answered > 100, "{answered}");
    });
    assert!(TcpStream::connect(&address).is_err());
}

#[test]
fn the_little_client_tells_by_its_exit_code() {
    let served = Served::start(&[], Some(API));
    let ask = |words: &[&str]| tallygate(&[&["check", "--resp", served.resp()], words].concat());
    let first = ask(&["api", "alice", "--cost", "3"]);
    assert_eq!(
        (first.status.code(), text(&first.stdout).as_str()),
        (Some(0), "allowed, 0 of 3 left\n")
    );
    let refused = ask(&["api", "alice"]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stdout).starts_with("refused, try again in "), "{refused:?}");
    let never = ask(&["api", "alice", "--cost", "4"]);
    assert_eq!(text(&never.stdout), "refused, and no wait will do\n");
    assert_eq!(text(&ask(&["--quiet", "api", "alice"]).stdout), "");
    let unknown = ask(&["apii", "alice"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("did you mean \"api\"?"), "{unknown:?}");
    let nobody = tallygate(&["check", "--resp", "127.0.0.1:1", "api", "alice"]);
    assert_eq!(nobody.status.code(), Some(2));
    assert!(text(&nobody.stderr).contains("cannot ask 127.0.0.1:1"), "{nobody:?}");
}

#[test]
fn a_configuration_is_checked_without_serving_it() {
    let path = std::env::temp_dir().join(format!("tallygate-check-{}.toml", std::process::id()));
    let name = path.to_str().expect("a name");
    // Named without its folder: that of the configuration.
    let tokens = path.with_extension("tokens");
    std::fs::write(&tokens, "hunter2-of-the-operator\n").expect("written");
    let tokens_name = tokens.file_name().and_then(|name| name.to_str()).expect("a name");
    let config = format!(
        "store = \"redis://alice:hunter2@example.com\"\n[auth]\nadmin = [\"file:{tokens_name}\"]\n\
         [policies.api]\nlimit = 100\nwindow = \"1m\"\nburst = 200\n[policies.api.tiers.pro]\nlimit = 1000\n\
         [policies.api.overrides.bob]\naccess = \"unlimited\"\n"
    );
    std::fs::write(&path, config).expect("written");
    let shown = tallygate(&["check-config", name]);
    assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    std::fs::remove_file(&tokens).expect("it was there");
    assert_eq!(
        text(&shown.stdout),
        "http 127.0.0.1:8080\nresp 127.0.0.1:6380\nstore redis://alice:***@example.com\nsnapshot none\n\
         tls none\n\
         auth check by anybody, admin by token\n\
         limits 10000 connections, 1000 an address, heads of 65536 bytes in 1m, bodies of 1048576 bytes in 10s, \
         268435456 bytes held, 100 streams, 256 commands at once, replies taken within 30s\n\
         policy api: token_bucket 100 per 60s burst 200\npolicy api, tier pro: token_bucket 1000 per 60s\n\
         policy api, override bob: unlimited\n"
    );
    std::fs::write(&path, "[policies.api]\nlimt = 1\n").expect("written");
    let wrong = tallygate(&["check-config", name]);
    assert_eq!(wrong.status.code(), Some(2));
    assert_eq!(
        text(&wrong.stderr),
        format!("tallygate: {name}:2:1: unknown field `limt`; did you mean `limit`?\n")
    );
    std::fs::remove_file(&path).expect("it was there");
    let gone = tallygate(&["check-config", name]);
    assert!(text(&gone.stderr).starts_with(&format!("tallygate: cannot read {name}")), "{gone:?}");
}

#[test]
fn mistakes_at_the_start_are_told_and_nothing_is_served() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = taken.local_addr().expect("an address").to_string();
    let refused = tallygate(&["serve", "--http", &address]);
    assert_eq!(refused.status.code(), Some(2));
    assert!(
        text(&refused.stderr).contains(&format!("cannot listen for HTTP on {address}")),
        "{refused:?}"
    );
    let refused = tallygate(&["serve", "--store", "redis://alice:hunter2@host:port"]);
    assert_eq!(refused.status.code(), Some(2));
    let message = text(&refused.stderr);
    assert!(message.contains("use redis://") && !message.contains("hunter2"), "{message}");
}

#[test]
fn help_and_completions_are_there() {
    let help = text(&tallygate(&["serve", "--help"]).stdout);
    for flag in ["--config", "--http", "--resp", "--store", "TALLYGATE_STORE", "--log-format"] {
        assert!(help.contains(flag), "{flag} is not in the help");
    }
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            text(&tallygate(&["completions", shell]).stdout).contains("check-config"),
            "{shell}"
        );
    }
}

#[test]
fn d7_no_client_is_a_label() {
    let served = Served::start(&[], Some(API));
    for place in 0..50 {
        check(&served, &format!("client-{place}"));
    }
    assert!(resp(&served, &["TG.CHECK", "api", "client-1"]).contains('1'));
    let (_, metrics) = get(served.http(), "/metrics");
    assert!(
        metrics.contains(
            "tallygate_decisions_total{policy=\"api\",outcome=\"allowed\",source=\"store\"} 51"
        ),
        "{metrics}"
    );
    assert!(metrics.contains("tallygate_keys_live{policy=\"api\"} 50"), "{metrics}");
    assert!(!metrics.contains("client-"), "{metrics}");
}
