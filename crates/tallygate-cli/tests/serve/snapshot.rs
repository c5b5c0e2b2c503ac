//! Tests snapshots: usage survives a restart, and the server does not start with a damaged snapshot.

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::Client;
use serde_json::{Value, json};

const API: &str = "[policies.api]\nlimit = 3\nwindow = \"1h\"\n";

/// A directory that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallygate-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("the directory is created");
        Self(path)
    }

    fn snapshot(&self) -> String {
        self.0.join("clients").display().to_string()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn call(served: &Served, line: &str, body: &Value) -> Value {
    let mut client = Client::connect(served.http());
    client.send(line, &[], body.to_string().as_bytes());
    let reply = client.read().expect("there is a reply");
    assert!(reply.status < 300, "{line} {body}: {reply:?}");
    serde_json::from_str(&reply.body).unwrap_or(Value::Null)
}

fn check(served: &Served, key: &str) -> Value {
    call(served, "POST /v1/check", &json!({ "policy": "api", "key": key }))
}

fn metric(served: &Served, name: &str) -> Option<String> {
    let mut client = Client::connect(served.http());
    client.send("GET /metrics", &[], b"");
    let body = client.read().expect("there is a reply").body;
    let line = body.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().to_owned())
}

/// A RESP connection.
struct Resp(BufReader<TcpStream>);

impl Resp {
    fn connect(address: &str) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Sends a pipeline and returns the first number of each reply.
    fn ask_all(&mut self, all: &[Vec<String>]) -> std::io::Result<Vec<i64>> {
        let mut sent = String::new();
        for words in all {
            sent.push_str(&format!("*{}\r\n", words.len()));
            for word in words {
                sent.push_str(&format!("${}\r\n{word}\r\n", word.len()));
            }
        }
        self.0.get_mut().write_all(sent.as_bytes())?;
        all.iter().map(|_| self.numbers().map(|numbers| numbers[0])).collect()
    }

    fn numbers(&mut self) -> std::io::Result<Vec<i64>> {
        let count = self.line()?;
        let count = count.strip_prefix('*').and_then(|count| count.parse::<usize>().ok());
        let count = count.ok_or(std::io::ErrorKind::InvalidData)?;
        (0..count)
            .map(|_| {
                let line = self.line()?;
                let number = line.strip_prefix(':').and_then(|number| number.parse().ok());
                number.ok_or(std::io::ErrorKind::InvalidData.into())
            })
            .collect()
    }

    fn line(&mut self) -> std::io::Result<String> {
        let mut line = String::new();
        match self.0.read_line(&mut line)? {
            0 => Err(std::io::ErrorKind::UnexpectedEof.into()),
            _ => Ok(line.trim_end().to_owned()),
        }
    }
}

fn words(words: &[&str]) -> Vec<String> {
    words.iter().map(|word| (*word).to_owned()).collect()
}

#[test]
fn usage_and_overrides_survive_a_restart() {
    let folder = Folder::new("restart");
    let options = ["--snapshot", &folder.snapshot()];
    let config = format!(
        "{API}[policies.api.tiers.pro]\nlimit = 10\n[policies.api.overrides.\"guest\"]\naccess = \"blocked\"\n\
         [policies.gone]\nlimit = 1\nwindow = \"1h\"\n"
    );
    let mut served = Served::start(&options, Some(&config));
    for _ in 0..3 {
        assert_eq!(check(&served, "alice")["allowed"], true);
    }
    let pro = json!({ "policy": "api", "key": "bob", "tier": "pro", "cost": 10 });
    assert_eq!(call(&served, "POST /v1/check", &pro)["allowed"], true);
    call(&served, "POST /v1/check", &json!({ "policy": "gone", "key": "alice" }));
    let blocked = json!({ "policy": "api", "key": "mallory", "access": "blocked" });
    call(&served, "PUT /v1/admin/overrides", &blocked);
    let throttle = words(&["CL.THROTTLE", "alice", "1", "1", "3600"]);
    let mut resp = Resp::connect(served.resp()).expect("the connection opens");
    let limited = resp.ask_all(&vec![throttle.clone(); 3]).expect("there are replies");
    assert_eq!(limited, [0, 0, 1], "0 means allowed");
    drop(resp);
    assert_eq!(served.stop(), Some(0));

    // A configuration without the policy `gone`, and without its override of `guest`.
    let config = format!("{API}[policies.api.tiers.pro]\nlimit = 10\n");
    let mut served = Served::start(&options, Some(&config));
    assert_eq!(check(&served, "alice")["allowed"], false);
    assert_eq!(call(&served, "POST /v1/check", &pro)["allowed"], false);
    assert_eq!(check(&served, "mallory")["allowed"], false);
    assert_eq!(check(&served, "guest")["allowed"], true, "the configuration has no such override");
    assert_eq!(check(&served, "another client")["allowed"], true);
    let mut resp = Resp::connect(served.resp()).expect("the connection opens");
    assert_eq!(resp.ask_all(&[throttle]).expect("there are replies"), [1]);
    let log = served.log();
    assert!(log.contains("not in the configuration") && log.contains("policy=\"gone\""), "{log}");
    drop(resp);
    assert_eq!(served.stop(), Some(0));
    let left = std::fs::read_dir(&folder.0).expect("the directory is created").count();
    assert_eq!(left, 1, "only the snapshot is left");
}

/// Such an override once vanished at the next reload and was not saved.
#[test]
fn an_override_that_replaces_one_of_the_file_survives_a_reload_and_a_restart() {
    let folder = Folder::new("set-over");
    let options = ["--snapshot", &folder.snapshot()];
    let config = format!("{API}[policies.api.overrides.guest]\naccess = \"blocked\"\n");
    let mut served = Served::start(&options, Some(&config));
    assert_eq!(check(&served, "guest")["allowed"], false);
    let unlimited = json!({ "policy": "api", "key": "guest", "access": "unlimited" });
    call(&served, "PUT /v1/admin/overrides", &unlimited);
    call(&served, "POST /v1/admin/reload", &Value::Null);
    assert_eq!(check(&served, "guest")["allowed"], true);
    assert_eq!(served.stop(), Some(0));

    let mut served = Served::start(&options, Some(&config));
    assert_eq!(check(&served, "guest")["allowed"], true);
    let left = call(&served, "DELETE /v1/admin/overrides?policy=api&key=guest", &Value::Null);
    assert_eq!((&left["access"], &left["configured"]), (&json!("blocked"), &json!(true)));
    assert_eq!(check(&served, "guest")["allowed"], false);
    assert_eq!(served.stop(), Some(0));
}

#[test]
fn a_changed_policy_keeps_the_usage_of_the_snapshot() {
    let folder = Folder::new("changed");
    let path = folder.snapshot();
    let mut served = Served::start(&["--snapshot", &path, "--max-keys", "10"], Some(API));
    for _ in 0..3 {
        assert_eq!(check(&served, "alice")["allowed"], true);
    }
    assert_eq!(served.stop(), Some(0));
    let changed = API.replace("limit = 3", "limit = 5\nalgorithm = \"sliding_window_log\"");
    let options = ["--snapshot", &path, "--max-keys", "100000"];
    let mut served = Served::start(&options, Some(&changed));
    let decision = check(&served, "alice");
    assert_eq!((&decision["allowed"], &decision["remaining"]), (&json!(true), &json!(1)));
    assert_eq!(served.stop(), Some(0));
    let mut served = Served::start(&["--snapshot", &path, "--max-keys", "7"], Some(&changed));
    assert_eq!(check(&served, "alice")["remaining"], 0);
    assert_eq!(served.stop(), Some(0));
}

/// A request that is still being sent when the shutdown starts.
#[test]
fn decisions_during_shutdown_are_saved() {
    let folder = Folder::new("draining");
    let path = folder.snapshot();
    let mut served = Served::start(&["--snapshot", &path], Some(API));
    let mut last = Client::connect(served.http());
    let body = json!({ "policy": "api", "key": "last", "cost": 3 }).to_string();
    let head = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n",
        body.len()
    );
    last.write(head.as_bytes()).expect("the bytes are sent");
    last.wait_for_continue();
    served.signal("TERM");
    let started = Instant::now();
    while TcpStream::connect(served.http()).is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20), "the server does not stop");
    }
    last.write(body.as_bytes()).expect("the bytes are sent");
    assert_eq!(last.read().expect("there is a reply").json()["allowed"], true);
    assert_eq!(served.wait_for_exit(), Some(0));
    let served = Served::start(&["--snapshot", &path], Some(API));
    assert_eq!(check(&served, "last")["allowed"], false, "the usage was lost");
}

/// A greedy client gets one burst from four servers that run one after the other.
#[test]
fn a_restart_under_load_loses_no_usage() {
    let folder = Folder::new("load");
    let path = folder.snapshot();
    let config = "[policies.api]\nlimit = 500\nwindow = \"10h\"\n";
    let mut served = Served::start(&["--snapshot", &path], Some(config));
    let (http, resp) = (served.http().to_owned(), served.resp().to_owned());
    let (allowed_total, requests) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let asks = vec![words(&["TG.CHECK", "api", "greedy"]); 4];
                while !is_over.load(Ordering::Relaxed) {
                    // Between two servers, connecting fails.
                    let Ok(mut connection) = Resp::connect(&resp) else { continue };
                    while let Ok(replies) = connection.ask_all(&asks) {
                        let allowed = replies.iter().filter(|allowed| **allowed == 1).count();
                        allowed_total.fetch_add(allowed as u64, Ordering::Relaxed);
                        requests.fetch_add(asks.len() as u64, Ordering::Relaxed);
                        if is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
            });
        }
        for round in 1..=4_u64 {
            let started = Instant::now();
            while requests.load(Ordering::Relaxed) < 300 * round {
                assert!(started.elapsed() < Duration::from_secs(20), "the server does not reply");
                std::thread::yield_now();
            }
            assert_eq!(served.stop(), Some(0));
            let options = ["--snapshot", &path, "--http", &http, "--resp", &resp];
            served = Served::start(&options, Some(config));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let (allowed_total, requests) = (allowed_total.into_inner(), requests.into_inner());
    assert!(requests >= 1_200);
    // One unit refills per 72 s.
    assert!((499..=501).contains(&allowed_total), "{allowed_total} of {requests}");
}

/// After a kill at any time, also during a save, the snapshot is the previous or the next one, complete.
#[test]
fn a_kill_during_a_save_leaves_a_complete_snapshot() {
    let folder = Folder::new("killed");
    let path = folder.snapshot();
    let options = ["--snapshot", &path, "--snapshot-every", "1ms"];
    let mut served = Served::start(&options, Some(API));
    let mut resp = Resp::connect(served.resp()).expect("the connection opens");
    let greedy = vec![words(&["TG.CHECK", "api", "greedy"]); 4];
    assert_eq!(resp.ask_all(&greedy).expect("there are replies"), [1, 1, 1, 0]);
    for round in 0..10_u64 {
        // Many other clients, so that a save takes a while.
        let many =
            (0..2_000).map(|key| words(&["TG.CHECK", "api", &format!("client-{round}-{key}")]));
        resp.ask_all(&many.collect::<Vec<_>>()).expect("there are replies");
        let saved = || metric(&served, "tallygate_snapshots_total{outcome=\"written\"}");
        let before = saved();
        let started = Instant::now();
        while saved() == before {
            assert!(started.elapsed() < Duration::from_secs(20), "no snapshot is written");
        }
        let moment = Duration::from_micros(300 * round);
        while started.elapsed() < moment {
            std::hint::spin_loop();
        }
        served.signal("KILL");
        served.wait_for_exit();
        served = Served::start(&options, Some(API));
        assert_eq!(check(&served, "greedy")["allowed"], false, "round {round}");
        resp = Resp::connect(served.resp()).expect("the connection opens");
    }
}

/// Starts a server, which must fail, and returns its error output.
fn startup_error(options: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"]).args(options);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "the server must not listen: {output:?}");
    String::from_utf8(output.stderr).expect("the text is UTF-8")
}

#[test]
fn the_server_neither_loads_nor_changes_a_damaged_snapshot() {
    let folder = Folder::new("damaged");
    let path = folder.snapshot();
    let mut served = Served::start(&["--snapshot", &path], Some(API));
    check(&served, "alice");
    assert_eq!(served.stop(), Some(0));
    let whole = std::fs::read(&path).expect("the snapshot exists");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for (bytes, expected) in [
        (&flipped[..], "the snapshot is damaged: the checksum of the block at byte 13 is wrong"),
        (&whole[..whole.len() - 9], "the snapshot is incomplete: it ends after"),
        (&b""[..], "the snapshot is incomplete: it ends after 0 bytes"),
        (&b"PK\x03\x04 an archive"[..], "the file is not a snapshot"),
        (
            &b"tallygate\x02\0\0\0"[..],
            "the snapshot has version 2, and this program reads version 1",
        ),
    ] {
        std::fs::write(&path, bytes).expect("the file is written");
        let error = startup_error(&["--snapshot", &path]);
        assert!(error.contains(&format!("cannot load the snapshot {path}: {expected}")), "{error}");
        assert!(error.contains("move it away to start with an empty store"), "{error}");
        assert_eq!(std::fs::read(&path).expect("the file exists"), bytes);
    }
}

#[test]
fn an_unwritable_snapshot_is_reported_at_startup_and_shutdown() {
    let folder = Folder::new("nowhere");
    let nowhere = folder.0.join("nowhere/clients").display().to_string();
    let error = startup_error(&["--snapshot", &nowhere]);
    assert!(error.contains("cannot write snapshots to the directory"), "{error}");
    let mut served = Served::start(&["--snapshot", &folder.snapshot()], Some(API));
    std::fs::remove_dir_all(&folder.0).expect("the file is removed");
    assert_eq!(served.stop(), Some(2));
    assert!(served.log().contains("cannot write the snapshot"), "{}", served.log());
}

#[test]
fn a_snapshot_needs_the_memory_store() {
    let folder = Folder::new("redis");
    let options = ["--snapshot", &folder.snapshot(), "--store", "redis://127.0.0.1:1"];
    let error = startup_error(&options);
    assert!(error.contains("a snapshot only works with the memory store"), "{error}");
    let config = folder.0.join("tallygate.toml");
    let text = "snapshot = \"/var/lib/tallygate/clients\"\nsnapshot_every = \"30s\"\n";
    std::fs::write(&config, text).expect("the file is written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let output = command.arg("check-config").arg(&config).output().expect("the binary runs");
    let shown = String::from_utf8(output.stdout).expect("the text is UTF-8");
    let mut shown: Vec<_> = shown.lines().collect();
    shown.retain(|line| line.starts_with("snapshot"));
    assert_eq!(shown, ["snapshot /var/lib/tallygate/clients, written every 30s and on shutdown"]);
}
