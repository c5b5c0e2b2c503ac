//! Tests `tallygate serve` (listeners, reloads, shutdown) and the commands `check` and `check-config`.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::Served;
use tallygate_testkit::servers::{Flavor, Server, wait_until};

/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

const API: &str = "[policies.api]\nlimit = 3\nwindow = \"1h\"\n";

/// Sends a request and returns the status line and the body of the reply.
fn http(address: &str, request: &str) -> (String, String) {
    let mut reply = String::new();
    let request = request.replace('\n', "\r\n");
    match address.strip_prefix("unix:") {
        Some(path) => {
            let mut stream = UnixStream::connect(path).expect("the connection opens");
            stream.write_all(request.as_bytes()).expect("the write succeeds");
            stream.read_to_string(&mut reply).expect("the server replies");
        }
        None => {
            let mut stream = TcpStream::connect(address).expect("the connection opens");
            stream.write_all(request.as_bytes()).expect("the write succeeds");
            stream.read_to_string(&mut reply).expect("the server replies");
        }
    }
    let (head, body) = reply.split_once("\r\n\r\n").expect("the reply has a head and a body");
    (head.lines().next().expect("there is a status").to_owned(), body.to_owned())
}

fn post(address: &str, path: &str, body: &str) -> (String, serde_json::Value) {
    let length = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\nHost: localhost\nConnection: close\nContent-Length: {length}\n\n"
    );
    let (status, reply) = http(address, &format!("{head}{body}"));
    (status, serde_json::from_str(&reply).unwrap_or(serde_json::Value::Null))
}

fn get(address: &str, path: &str) -> (String, String) {
    http(address, &format!("GET {path} HTTP/1.1\nHost: localhost\nConnection: close\n\n"))
}

fn check(served: &Served, key: &str) -> serde_json::Value {
    let body = format!("{{\"policy\":\"api\",\"key\":{}}}", serde_json::json!(key));
    let (status, reply) = post(served.http(), "/v1/check", &body);
    assert!(status.contains(" 200 "), "{status} {reply}");
    reply
}

fn limit(served: &Served) -> u64 {
    check(served, "probe")["limit"].as_u64().expect("the limit is a number")
}

fn resp(served: &Served, words: &[&str]) -> String {
    let output = Command::new("redis-cli").args(["-p", served.resp_port()]).args(words).output();
    String::from_utf8(output.expect("redis-cli runs").stdout).expect("the text is UTF-8")
}

fn tallygate(words: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_tallygate")).args(words).output().expect("the binary runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn without_a_configuration_the_server_serves_a_demo_and_prints_examples() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["serve", "--http", "127.0.0.1:0", "--log", "error"])
        .env("TALLYGATE_RESP", "127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut lines = BufReader::new(child.stdout.take().expect("the stream is piped")).lines();
    let mut line = || lines.next().expect("there is a line").expect("the text is UTF-8");
    let http = line();
    assert!(http.starts_with("http 127.0.0.1:"), "{http}");
    let resp = line();
    assert!(resp.starts_with("resp 127.0.0.1:") && !resp.ends_with(":0"), "{resp}");
    assert_eq!(line(), "tallygate ready");
    assert!(line().contains("\"demo\""));
    // The printed examples work unchanged.
    let example = line();
    let output = Command::new("sh").args(["-c", &example]).output().expect("the shell runs");
    assert!(text(&output.stdout).contains("\"allowed\":true"), "{example}: {output:?}");
    for _ in 0..2 {
        let example = line();
        let output = Command::new("sh").args(["-c", &example]).output().expect("the shell runs");
        assert!(
            output.status.success() && !text(&output.stdout).contains("ERR"),
            "{example}: {output:?}"
        );
    }
    child.kill().expect("the process is running");
    child.wait().expect("the process ends");
}

#[test]
fn unix_sockets_work_and_are_removed_on_shutdown() {
    let folder = std::env::temp_dir().join(format!("tallygate-unix-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the directory is created");
    let (http, resp) = (folder.join("http"), folder.join("resp"));
    let address = |path: &Path| format!("unix:{}", path.display());
    for _ in 0..2 {
        let mut served =
            Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
        assert_eq!(served.http(), address(&http));
        assert_eq!(check(&served, "alice")["remaining"], 2);
        let mut stream = UnixStream::connect(&resp).expect("the connection opens");
        stream.write_all(b"TG.CHECK api alice\r\n").expect("the write succeeds");
        let mut reply = [0; 8];
        stream.read_exact(&mut reply).expect("the server replies");
        assert_eq!(&reply, b"*6\r\n:1\r\n");
        drop(stream);
        assert_eq!(served.stop(), Some(0));
        assert!(!http.exists() && !resp.exists());
    }
    // A killed server leaves its socket, which does not prevent the next start.
    let mut killed =
        Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
    killed.signal("KILL");
    assert_eq!(killed.wait_for_exit(), None);
    assert!(http.exists());
    let served = Served::start(&["--http", &address(&http), "--resp", &address(&resp)], Some(API));
    assert_eq!(check(&served, "alice")["remaining"], 2);
    drop(served);
    std::fs::remove_dir_all(&folder).expect("the file is removed");
}

/// Fault E14.
#[test]
fn http_resp_and_the_library_share_one_quota_and_the_same_keys() {
    let server = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &server.url()], Some(API));
    let key = "a\u{0}b \u{fc}\"{x}\r\n";
    assert_eq!(check(&served, key)["remaining"], 2);
    // Over RESP, with the same bytes.
    let mut stream = TcpStream::connect(served.resp()).expect("the connection opens");
    let request = format!("*3\r\n$8\r\nTG.CHECK\r\n$3\r\napi\r\n${}\r\n{key}\r\n", key.len());
    stream.write_all(request.as_bytes()).expect("the write succeeds");
    let mut reply = [0; 15];
    stream.read_exact(&mut reply).expect("the server replies");
    assert_eq!(&reply, b"*6\r\n:1\r\n:3\r\n:1\r");
    // With the library, in another process.
    let runtime = tokio::runtime::Runtime::new().expect("the runtime starts");
    runtime.block_on(async {
        let policy = tallygate::Policy::token_bucket(3)
            .per_hour()
            .named("api")
            .build()
            .expect("the policy is valid");
        let redis = tallygate_redis::Redis::open(&server.url()).expect("the address is valid");
        let limiter = tallygate::RateLimiter::with_store(policy, redis.store("api"));
        let decision = limiter.check(key).await.expect("there is a decision");
        assert_eq!((decision.remaining, decision.source), (0, tallygate::Source::Store));
    });
    assert_eq!(check(&served, key)["allowed"], false);
}

/// Fault G1.
#[test]
fn an_invalid_file_changes_nothing_and_is_reported() {
    let served = Served::start(&[], Some(API));
    assert_eq!(limit(&served), 3);
    std::fs::write(served.config(), "[policies.api]\nlimt = 9\nwindow = \"1h\"\n")
        .expect("the file is written");
    wait_until("the error is counted", PATIENCE, || {
        get(served.http(), "/metrics").1.contains("tallygate_reloads_total{outcome=\"rejected\"} 1")
    });
    assert_eq!(limit(&served), 3);
    let (status, problem) = post(served.http(), "/v1/admin/reload", "");
    assert!(status.contains(" 422 ") || status.contains(" 409 "), "{status}");
    assert!(problem.to_string().contains("did you mean `limit`?"), "{problem}");
    // A valid file is loaded after the error.
    std::fs::write(served.config(), crate::common::with_admin(&API.replace('3', "5")))
        .expect("the file is written");
    wait_until("the new limit is in force", PATIENCE, || limit(&served) == 5);
}

/// Fault G2.
#[test]
fn a_symlink_swap_and_a_rewritten_file_are_loaded_only_when_complete() {
    let folder = std::env::temp_dir().join(format!("tallygate-swap-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("the directory is created");
    // As in Kubernetes, the file is a link into a linked directory, which is swapped.
    for (version, limit) in [("one", "3"), ("two", "4")] {
        std::fs::create_dir_all(folder.join(version)).expect("the directory is created");
        std::fs::write(
            folder.join(version).join("tallygate.toml"),
            crate::common::with_admin(&API.replace('3', limit)),
        )
        .expect("the file is written");
    }
    std::os::unix::fs::symlink("one", folder.join("data")).expect("the link is created");
    std::os::unix::fs::symlink("data/tallygate.toml", folder.join("tallygate.toml"))
        .expect("the link is created");
    let config = folder.join("tallygate.toml");
    let served = Served::start(&["--config", config.to_str().expect("there is a name")], None);
    assert_eq!(limit(&served), 3);
    assert_eq!(check(&served, "alice")["remaining"], 2);
    std::os::unix::fs::symlink("two", folder.join("data.new")).expect("the link is created");
    std::fs::rename(folder.join("data.new"), folder.join("data")).expect("the files are swapped");
    wait_until("the swapped file is loaded", PATIENCE, || limit(&served) == 4);
    // The usage stays.
    assert_eq!(check(&served, "alice")["remaining"], 2);
    // A file that keeps changing is not loaded, although it is always a valid configuration.
    for round in 0..40 {
        std::fs::write(
            folder.join("two/tallygate.toml"),
            crate::common::with_admin(&API.replace('3', &format!("1{round:02}"))),
        )
        .expect("the file is written");
        let written = Instant::now();
        while written.elapsed() < Duration::from_millis(50) {
            assert_eq!(limit(&served), 4, "a file that was still changing was loaded");
        }
    }
    wait_until("the unchanged file is loaded", PATIENCE, || limit(&served) == 139);
    drop(served);
    std::fs::remove_dir_all(&folder).expect("the file is removed");
}

/// Fault G4.
#[test]
fn under_load_every_decision_uses_one_version() {
    // A decision that mixed both versions would show a remaining count above its limit.
    let versions = ["limit = 100\nburst = 1000\n", "limit = 200\nburst = 2000\n"];
    let config = |version: &str| format!("[policies.api]\nwindow = \"1h\"\n{version}");
    let served = Served::start(&[], Some(&config(versions[0])));
    let stop = AtomicBool::new(false);
    let latest = AtomicU64::new(0);
    std::thread::scope(|scope| {
        let client = scope.spawn(|| {
            let mut seen = std::collections::BTreeSet::new();
            while !stop.load(Ordering::Relaxed) {
                let reply = check(&served, "alice");
                let limit = reply["limit"].as_u64().expect("the limit is a number");
                assert!(
                    reply["remaining"].as_u64().expect("the value is a number") <= limit,
                    "{reply}"
                );
                latest.store(limit, Ordering::Relaxed);
                seen.insert(limit);
            }
            seen
        });
        for round in 1..6 {
            std::fs::write(
                served.config(),
                crate::common::with_admin(&config(versions[round % 2])),
            )
            .expect("the file is written");
            served.signal("HUP");
            let expected = [1000, 2000][round % 2];
            wait_until("the client sees the new version", PATIENCE, || {
                latest.load(Ordering::Relaxed) == expected
            });
        }
        stop.store(true, Ordering::Relaxed);
        let seen = client.join().expect("the thread does not panic");
        assert_eq!(seen.into_iter().collect::<Vec<_>>(), [1000, 2000]);
    });
}

/// Fault I1.
#[test]
fn on_shutdown_the_server_answers_pending_requests_and_exits_with_0() {
    let mut served = Served::start(&[], Some(&API.replace('3', "1000000")));
    let address = served.http().to_owned();
    let resp = served.resp().to_owned();
    let stop = AtomicBool::new(false);
    let stopping = AtomicBool::new(false);
    let answered = AtomicU64::new(0);
    std::thread::scope(|scope| {
        // Each thread sends one request per connection until the server stops. A request gets a whole reply, unless the
        // server stopped before it read the request.
        let clients: Vec<_> = (0..8)
            .map(|_| {
                scope.spawn(|| {
                    while !stop.load(Ordering::Relaxed) {
                        let Ok(mut stream) = TcpStream::connect(&resp) else { break };
                        stream
                            .write_all(b"TG.CHECK api alice\r\n")
                            .expect("the connection is open");
                        let mut reply = String::new();
                        let mut reader = BufReader::new(&stream);
                        if reader.read_line(&mut reply).unwrap_or(0) == 0 {
                            // A request stays unread only during shutdown.
                            assert!(stopping.load(Ordering::SeqCst));
                            break;
                        }
                        assert_eq!(reply, "*6\r\n");
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        wait_until("the load runs", PATIENCE, || answered.load(Ordering::Relaxed) > 100);
        stopping.store(true, Ordering::SeqCst);
        assert_eq!(served.stop(), Some(0));
        stop.store(true, Ordering::Relaxed);
        for client in clients {
            client.join().expect("the thread does not panic");
        }
    });
    assert!(TcpStream::connect(&address).is_err());
}

#[test]
fn the_check_command_reports_the_decision_in_its_exit_code() {
    let config = format!(
        "{API}[policies.api.overrides.mallory]\naccess = \"blocked\"\n\
         [policies.api.overrides.root]\naccess = \"unlimited\"\n"
    );
    let served = Served::start(&[], Some(&config));
    let ask = |words: &[&str]| tallygate(&[&["check", "--resp", served.resp()], words].concat());
    let blocked = ask(&["api", "mallory"]);
    let first = ask(&["api", "alice", "--cost", "3"]);
    assert_eq!(
        (first.status.code(), text(&first.stdout).as_str()),
        (Some(0), "allowed, 0 of 3 left\n")
    );
    let denied = ask(&["api", "alice"]);
    assert_eq!(denied.status.code(), Some(1));
    assert!(text(&denied.stdout).starts_with("denied, retry in "), "{denied:?}");
    let never = ask(&["api", "alice", "--cost", "4"]);
    assert_eq!(text(&never.stdout), "denied; the cost is higher than the limit can ever allow\n");
    assert_eq!(
        (blocked.status.code(), text(&blocked.stdout).as_str()),
        (Some(1), "denied; the client is blocked\n")
    );
    let unlimited = ask(&["api", "root"]);
    assert_eq!(
        (unlimited.status.code(), text(&unlimited.stdout).as_str()),
        (Some(0), "allowed, unlimited\n")
    );
    assert_eq!(text(&ask(&["--quiet", "api", "alice"]).stdout), "");
    for cost in ["-1", "1.5"] {
        let invalid = ask(&["api", "alice", "--cost", cost]);
        assert_eq!(invalid.status.code(), Some(2));
        assert!(text(&invalid.stderr).contains("expected a whole number"), "{invalid:?}");
    }
    let unknown = ask(&["apii", "alice"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert!(text(&unknown.stderr).contains("did you mean \"api\"?"), "{unknown:?}");
    let unreachable = tallygate(&["check", "--resp", "127.0.0.1:1", "api", "alice"]);
    assert_eq!(unreachable.status.code(), Some(2));
    assert!(text(&unreachable.stderr).contains("check on 127.0.0.1:1 failed"), "{unreachable:?}");
    assert!(text(&unreachable.stderr).contains("check that the server is running"));
    let no_port = tallygate(&["check", "--resp", "localhost", "api", "alice"]);
    assert!(text(&no_port.stderr).contains("expected HOST:PORT or unix:/path"), "{no_port:?}");
}

#[test]
fn check_config_validates_a_configuration_without_serving_it() {
    let path = std::env::temp_dir().join(format!("tallygate-check-{}.toml", std::process::id()));
    let name = path.to_str().expect("there is a name");
    // A path without a directory is relative to the configuration.
    let tokens = path.with_extension("tokens");
    std::fs::write(&tokens, "hunter2-of-the-operator\n").expect("the file is written");
    let tokens_name = tokens.file_name().and_then(|name| name.to_str()).expect("there is a name");
    let config = format!(
        r#"
        store = "redis://alice:hunter2@example.com"
        trusted_proxies = ["10.0.0.0/8"]
        [auth]
        admin = ["file:{tokens_name}"]
        [policies.api]
        limit = 100
        window = "1m"
        burst = 200
        key = "header:X-API-Key"
        lease = "50ms"
        [policies.api.tiers.pro]
        limit = 1000
        [policies.api.overrides.bob]
        access = "unlimited"
        [policies.day]
        algorithm = "fixed_window"
        limit = 5
        window = "1d"
        anchor = "first_request"
        penalty = {{ after = 3, lasts = "15m" }}
        instances = 3
        "#
    );
    std::fs::write(&path, config).expect("the file is written");
    let check = |variables: &[(&str, &str)]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        command.args(["check-config", name]).envs(variables.iter().copied());
        command.output().expect("the binary runs")
    };
    let shown = check(&[]);
    assert_eq!(shown.status.code(), Some(0), "{shown:?}");
    let output = text(&shown.stdout);
    let (before, after) = output.split_once("limits max_connections 10000, ").expect("limits");
    assert_eq!(
        before,
        "http 127.0.0.1:8080\nresp 127.0.0.1:6380\nnames none\nstore redis://alice:***@example.com\nsnapshot none\n\
         tls none\nauth check is open to everyone, admin needs a token\ntrusted_proxies 10.0.0.0/8\n"
    );
    let (limits, after) = after.split_once('\n').expect("a line");
    assert!(
        limits.contains("head_timeout 1m, ") && limits.ends_with("idle_timeout none"),
        "{limits}"
    );
    assert_eq!(
        after,
        "backtest max_bytes 268435456, max_memory_bytes 268435456\ncl_throttle enabled\n\
         policy api: token_bucket 100 per 1m, burst 200\n\
         policy api, settings: cost 1, key header:x-api-key, on_store_error allow, lease 50ms, deny_cache true\n\
         policy api, tier pro: token_bucket 1000 per 1m, burst 1000\n\
         policy api, override bob: unlimited\n\
         policy day: fixed_window 5 per 1d, anchor first_request, penalty of 15m after 3 denials\n\
         policy day, settings: cost 1, key ip, ipv6_prefix 64, instances 3, on_store_error allow, lease none, deny_cache true\n\
         environment none\n"
    );
    let errors = text(&shown.stderr);
    assert!(
        errors.starts_with(
            "tallygate: warning: policy \"day\": instances has no effect, because Redis"
        ),
        "{errors}"
    );
    // Environment variables count as they do for the server.
    let shown = check(&[("TALLYGATE_STORE", "memory"), ("TALLYGATE_HTTP", "0.0.0.0:80")]);
    let output = text(&shown.stdout);
    assert!(
        output.starts_with("http 0.0.0.0:80\n") && output.contains("\nstore memory\n"),
        "{output}"
    );
    assert!(output.ends_with("environment TALLYGATE_HTTP, TALLYGATE_STORE\n"), "{output}");
    assert_eq!(
        text(&shown.stderr),
        "tallygate: warning: policy \"api\": lease has no effect, because the store is in memory\n"
    );
    std::fs::remove_file(&tokens).expect("the file is removed");
    std::fs::write(&path, "[policies.api]\nlimt = 1\n").expect("the file is written");
    let wrong = tallygate(&["check-config", name]);
    assert_eq!(wrong.status.code(), Some(2));
    assert_eq!(
        text(&wrong.stderr),
        format!("tallygate: {name}:2:1: unknown field `limt`; did you mean `limit`?\n")
    );
    std::fs::remove_file(&path).expect("the file is removed");
    let gone = tallygate(&["check-config", name]);
    assert!(text(&gone.stderr).starts_with(&format!("tallygate: cannot read {name}")), "{gone:?}");
}

/// What fails at startup fails in `check-config`, too.
#[test]
fn a_wrong_address_fails_in_check_config_as_in_serve() {
    let path = std::env::temp_dir().join(format!("tallygate-address-{}.toml", std::process::id()));
    let name = path.to_str().expect("there is a name");
    for address in ["8080", ":8080", "*:8080"] {
        let config = format!("[listen]\nhttp = \"{address}\"\n");
        std::fs::write(&path, config).expect("the file is written");
        let expected = format!("{name}:2:8: found \"{address}\"; expected HOST:PORT");
        for words in [&["check-config", name][..], &["serve", "--config", name]] {
            let failed = tallygate(words);
            assert_eq!(failed.status.code(), Some(2), "{failed:?}");
            assert!(text(&failed.stderr).contains(&expected), "{failed:?}");
        }
        let failed = tallygate(&["serve", "--http", address]);
        assert_eq!(failed.status.code(), Some(2), "{failed:?}");
        assert!(text(&failed.stderr).contains("--http: found "), "{failed:?}");
    }
    for (config, expected) in [
        ("[listen]\nhttp = 8080\n", ":2:8: found the number `8080`; expected HOST:PORT, such as"),
        (
            "[listen]\nhttp = \"0.0.0.0:80\"\nresp = \"0.0.0.0:80\"\n",
            "http and resp have the same address, 0.0.0.0:80; give each listener its own",
        ),
        (
            "[listen]\nnames = [\"https://gate.example.com\"]\n",
            "found \"https://gate.example.com\"; expected a host name without scheme, port or path",
        ),
    ] {
        std::fs::write(&path, config).expect("the file is written");
        for words in [&["check-config", name][..], &["serve", "--config", name]] {
            let failed = tallygate(words);
            assert_eq!(failed.status.code(), Some(2), "{failed:?}");
            assert!(text(&failed.stderr).contains(expected), "{failed:?}");
        }
    }
    std::fs::write(&path, "").expect("the file is written");
    let empty = tallygate(&["check-config", name]);
    assert_eq!(empty.status.code(), Some(0));
    assert_eq!(
        text(&empty.stderr),
        "tallygate: warning: no policies are configured; only CL.THROTTLE can be used\n"
    );
    std::fs::remove_file(&path).expect("the file is removed");
}

/// Fault G6: a misspelled variable must not be ignored silently, and those of Kubernetes must not be reported.
#[test]
fn a_misspelled_environment_variable_is_reported() {
    let path = std::env::temp_dir().join(format!("tallygate-names-{}.toml", std::process::id()));
    let name = path.to_str().expect("there is a name");
    let config = format!("[auth]\ncheck = [\"env:TALLYGATE_TOKENS\"]\n{API}");
    std::fs::write(&path, config).expect("the file is written");
    let variables = [
        ("TALLYGATE_HTPT", "127.0.0.1:1"),
        ("TALLYGATE_MAX_KEYS", "5"),
        ("TALLYGATE_PORT", "tcp://10.0.0.1:8080"),
        ("TALLYGATE_SERVICE_HOST", "10.0.0.1"),
        ("TALLYGATE_TOKENS", "0123456789abcdef"),
    ];
    let expected =
        "the environment variable TALLYGATE_HTPT has no effect; did you mean TALLYGATE_HTTP?";
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let shown = command.args(["check-config", name]).envs(variables).output().expect("it runs");
    assert_eq!(text(&shown.stderr), format!("tallygate: warning: {expected}\n"));
    let output = text(&shown.stdout);
    assert!(output.contains("\nmax_keys 5\n"), "{output}");
    assert!(output.ends_with("\nenvironment TALLYGATE_MAX_KEYS, TALLYGATE_TOKENS\n"), "{output}");
    std::fs::remove_file(&path).expect("the file is removed");
    let served = Served::with_variables(&[], Some(API), &variables[..1]);
    wait_until("the log has the warning", PATIENCE, || served.log().contains(expected));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let wrong = command.arg("serve").env("TALLYGATE_MAX_KEYS", "many").output().expect("it runs");
    let message = text(&wrong.stderr);
    assert!(message.contains("'many' for '--max-keys <N>': expected a whole number"), "{message}");
}

#[test]
fn a_reload_names_the_changes_that_need_a_restart() {
    let served = Served::start(&[], Some(API));
    let reload = |config: &str| {
        let config = crate::common::with_admin(config);
        std::fs::write(served.config(), config).expect("the file is written");
        post(served.http(), "/v1/admin/reload", "").1
    };
    assert_eq!(reload(API), serde_json::json!({"reloaded": true, "needs_restart": []}));
    // The flags of the test name both listeners, so only the other settings change.
    let changed = format!(
        "store = \"redis://127.0.0.1:1\"\n{API}lease = \"50ms\"\n[listen]\nhttp = \"127.0.0.1:1\"\n"
    );
    let expected = serde_json::json!({"reloaded": true, "needs_restart": ["store"]});
    assert_eq!(reload(&changed), expected);
    let snapshot = format!("snapshot = \"clients\"\n{API}");
    let expected = serde_json::json!({"reloaded": true, "needs_restart": ["snapshot"]});
    assert_eq!(reload(&snapshot), expected);
    wait_until("the log has the warning", PATIENCE, || {
        served.log().contains(
            "settings that need a restart; keeping the old ones until then settings=\"store\"",
        )
    });
}

/// A client whose quota is full again needs no memory.
#[test]
fn idle_clients_are_dropped_in_the_background() {
    let config = "sweep_every = \"100ms\"\n[policies.api]\nlimit = 1\nwindow = \"50ms\"\n\
                  [policies.slow]\nlimit = 1\nwindow = \"1h\"\n";
    let served = Served::start(&[], Some(config));
    for key in 0..500 {
        for policy in ["api", "slow"] {
            post(served.http(), "/v1/check", &format!(r#"{{"policy":"{policy}","key":"{key}"}}"#));
        }
    }
    let keys = |kind: &str, policy: &str| {
        let (_, metrics) = get(served.http(), "/metrics");
        let name = format!("tallygate_keys_{kind}{{policy=\"{policy}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&*name));
        value.and_then(|value| value.parse::<u64>().ok()).expect("the metric exists")
    };
    wait_until("the idle clients are gone", PATIENCE, || keys("kept", "api") == 0);
    wait_until("the next sweep finds no client", PATIENCE, || keys("in_use", "api") == 0);
    assert_eq!(keys("kept", "slow"), 500, "clients that have used units stay");
    wait_until("a sweep counts them", PATIENCE, || keys("in_use", "slow") == 500);
}

#[test]
fn sighup_without_a_configuration_file_is_reported() {
    let served = Served::start(&[], None);
    served.signal("HUP");
    wait_until("the log has the reason", PATIENCE, || {
        served.log().contains("started without a configuration file; there is nothing to reload")
    });
}

#[test]
fn settings_without_effect_are_reported_and_useless_ones_rejected() {
    let path = std::env::temp_dir().join(format!("tallygate-vain-{}.toml", std::process::id()));
    let name = path.to_str().expect("there is a name");
    let check = |config: &str, options: &[&str]| {
        std::fs::write(&path, config).expect("the file is written");
        let output = tallygate(&[&["check-config", name], options].concat());
        (output.status.code(), text(&output.stderr))
    };
    let redis = ["--store", "redis://127.0.0.1:1"];
    for (config, options, expected) in [
        (
            API,
            &["--instance", "2"][..],
            "--instance has no effect, because no policy sets `instances`",
        ),
        (
            API,
            &[&redis[..], &["--max-keys", "5"]].concat(),
            "--max-keys has no effect, because Redis keeps the keys",
        ),
        (
            "[policies.api]\nlimit = 5\nwindow = \"1m\"\non_store_error = \"deny\"\nlease = \"50ms\"\n",
            &[],
            "policy \"api\": on_store_error, lease have no effect, because the store is in memory",
        ),
        (
            "[envoy]\ncharge = \"always\"\n[policies.api]\nlimit = 5\nwindow = \"1m\"\n",
            &[],
            "charge in [envoy] has no effect, because no rules for Envoy are configured; add config = \"PATH\"",
        ),
        (
            "[policies.api]\nlimit = 5\nwindow = \"1m\"\ncost = 6\n",
            &[],
            "policy \"api\": cost 6 is more than the limit can ever allow (5), so every request with this cost is denied; \
             lower `cost` or raise the limit or `burst`",
        ),
        (
            "[policies.api]\nlimit = 5\nwindow = \"1m\"\ncost = 5\n[policies.api.tiers.small]\nlimit = 4\n",
            &[],
            "policy \"api\", tier \"small\": cost 5 is more than the limit can ever allow (4), so every request with this \
             cost is denied; lower `cost` or raise the limit or `burst`",
        ),
    ] {
        let (code, message) = check(config, options);
        assert_eq!(code, Some(0), "{message}");
        assert_eq!(message, format!("tallygate: warning: {expected}\n"));
    }
    for (config, options, expected) in [
        (API.to_owned(), &["--max-keys", "0"][..], "--max-keys must be at least 1 (got 0)"),
        (
            API.to_owned(),
            &["--store", "memry"],
            "the store \"memry\" is unknown; did you mean \"memory\"?",
        ),
        (
            format!("[auth]\ncheck = []\n{API}"),
            &[],
            "auth: check lists no tokens, so it would protect nothing; add \"file:PATH\" or \"env:NAME\", or remove it",
        ),
        (
            format!("[auth]\n{API}"),
            &[],
            "auth: the table is empty; set `check` or `admin`, or remove it",
        ),
        (
            format!("trusted_proxies = [\"10.0.0.0\"]\n{API}"),
            &[],
            "found \"10.0.0.0\", an address; add the size of the network, such as \"10.0.0.0/32\"",
        ),
        (
            format!("trusted_proxies = [\"10.0.0.0/33\"]\n{API}"),
            &[],
            "found \"10.0.0.0/33\"; the number after the slash must be from 0 to 32 for IPv4, and to 128 for IPv6",
        ),
        (
            "[policies.api]\nlimit = 1\n".to_owned(),
            &[],
            "policy \"api\" has no window; add one, such as window = \"1m\"",
        ),
        (
            "[policies.\"CL.THROTTLE\"]\nlimit = 1\nwindow = \"1m\"\n".to_owned(),
            &[],
            "policy \"CL.THROTTLE\": this is the name of the command in metrics and in the store; choose another name",
        ),
        (
            "[policies.api]\nlimit = 1\nwindow = \"0s\"\n".to_owned(),
            &[],
            "policy \"api\": window must be longer than \"0s\"; use a duration such as \"1m\"",
        ),
        (
            "[policies.api]\nlimit = 1\nwindow = \"36500d\"\nburst = 9\n".to_owned(),
            &[],
            "policy \"api\": a token_bucket with limit 1 and burst 9 per 36500d takes more than a century to restore a full \
             quota, which cannot be counted exactly; use a shorter window, a smaller burst or a larger limit",
        ),
    ] {
        let (code, message) = check(&config, options);
        assert_eq!(code, Some(2), "{message}");
        assert!(message.ends_with(&format!("{expected}\n")), "{message}");
    }
    std::fs::remove_file(&path).expect("the file is removed");
}

#[test]
fn several_servers_in_memory_share_a_quota() {
    let config = "[policies.api]\nlimit = 10\nwindow = \"1h\"\ninstances = 3\n\
                  [policies.api.tiers.pro]\nlimit = 100\n";
    let limits = |options: &[&str]| {
        let served = Served::start(options, Some(config));
        let limit = |body: &str| post(served.http(), "/v1/peek", body).1["limit"].as_u64();
        let base = limit(r#"{"policy":"api","key":"a"}"#);
        let pro = limit(r#"{"policy":"api","key":"a","tier":"pro"}"#);
        (base.expect("a limit"), pro.expect("a limit"))
    };
    let shares = ["1", "2", "3"].map(|number| limits(&["--instance", number]));
    assert_eq!(shares, [(4, 34), (3, 33), (3, 33)]);
    assert_eq!(limits(&[]), (3, 33), "without a number, the smallest share");
    let path = std::env::temp_dir().join(format!("tallygate-share-{}.toml", std::process::id()));
    std::fs::write(&path, config).expect("the file is written");
    let name = path.to_str().expect("there is a name");
    let wrong = tallygate(&["check-config", name, "--instance", "4"]);
    assert_eq!(
        text(&wrong.stderr),
        "tallygate: policy \"api\": instance must be from 1 to 3 (got 4)\n"
    );
    std::fs::remove_file(&path).expect("the file is removed");
}

#[test]
fn startup_errors_are_printed_and_nothing_is_served() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = taken.local_addr().expect("the address is valid").to_string();
    let failed = tallygate(&["serve", "--http", &address]);
    assert_eq!(failed.status.code(), Some(2));
    assert!(
        text(&failed.stderr).contains(&format!("cannot listen for HTTP on {address}")),
        "{failed:?}"
    );
    let failed = tallygate(&["serve", "--store", "redis://alice:hunter2@host:port"]);
    assert_eq!(failed.status.code(), Some(2));
    let message = text(&failed.stderr);
    assert!(message.contains("use redis://") && !message.contains("hunter2"), "{message}");
}

#[test]
fn help_man_pages_and_completions_are_printed() {
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
    // A reader that has closed the pipe, such as `head`, is not an error.
    for words in [&["completions", "bash"][..], &["man"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe is made");
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
        let closed = command.args(words).stdout(writer).stderr(Stdio::piped()).output();
        let closed = closed.expect("the binary runs");
        assert!(closed.status.success() && closed.stderr.is_empty(), "{closed:?}");
    }
    let page = text(&tallygate(&["man"]).stdout);
    assert!(page.contains(".TH tallygate 1") && page.contains("check\\-config"), "{page}");
    let folder = std::env::temp_dir().join(format!("tallygate-man-{}", std::process::id()));
    std::fs::create_dir(&folder).expect("the folder is new");
    let written = tallygate(&["man", folder.to_str().expect("the path is UTF-8")]);
    let serve = std::fs::read_to_string(folder.join("tallygate-serve.1"));
    std::fs::remove_dir_all(&folder).expect("the folder is removed");
    assert!(written.status.success(), "{written:?}");
    assert!(serve.expect("one page per command").contains("\\-\\-store"));
}

/// Fault D7.
#[test]
fn no_metric_has_a_client_as_a_label() {
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
    assert!(metrics.contains("tallygate_keys_kept{policy=\"api\"} 50"), "{metrics}");
    assert!(!metrics.contains("client-"), "{metrics}");
}
