//! A restart forgives nobody, however the server ended, and a damaged snapshot is not started with.

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

/// A folder that is gone with the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("tallygate-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
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
    let reply = client.read().expect("an answer");
    assert!(reply.status < 300, "{line} {body}: {reply:?}");
    serde_json::from_str(&reply.body).unwrap_or(Value::Null)
}

fn check(served: &Served, key: &str) -> Value {
    call(served, "POST /v1/check", &json!({ "policy": "api", "key": key }))
}

fn metric(served: &Served, name: &str) -> Option<String> {
    let mut client = Client::connect(served.http());
    client.send("GET /metrics", &[], b"");
    let body = client.read().expect("an answer").body;
    let line = body.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().to_owned())
}

/// A connection for RESP.
struct Resp(BufReader<TcpStream>);

impl Resp {
    fn connect(address: &str) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address)?;
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Self(BufReader::new(stream)))
    }

    /// Asks many things at once; the first number of each answer.
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
fn what_was_used_and_set_outlasts_a_restart() {
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
    let mut resp = Resp::connect(served.resp()).expect("it listens");
    let told = resp.ask_all(&vec![throttle.clone(); 3]).expect("answers");
    assert_eq!(told, [0, 0, 1], "0 is admitted");
    drop(resp);
    assert_eq!(served.stop(), Some(0));

    // A configuration without the policy `gone`, and without its override of `guest`.
    let config = format!("{API}[policies.api.tiers.pro]\nlimit = 10\n");
    let mut served = Served::start(&options, Some(&config));
    assert_eq!(check(&served, "alice")["allowed"], false);
    assert_eq!(call(&served, "POST /v1/check", &pro)["allowed"], false);
    assert_eq!(check(&served, "mallory")["allowed"], false);
    assert_eq!(check(&served, "guest")["allowed"], true, "the configuration no longer says so");
    assert_eq!(check(&served, "somebody else")["allowed"], true);
    let mut resp = Resp::connect(served.resp()).expect("it listens");
    assert_eq!(resp.ask_all(&[throttle]).expect("answers"), [1]);
    let log = served.log();
    assert!(log.contains("no longer there") && log.contains("policy=\"gone\""), "{log}");
    drop(resp);
    assert_eq!(served.stop(), Some(0));
    let left = std::fs::read_dir(&folder.0).expect("a folder").count();
    assert_eq!(left, 1, "nothing but the snapshot");
}

/// It vanished at the next reload, and was not saved.
#[test]
fn an_override_set_over_one_of_the_file_outlasts_a_reload_and_a_restart() {
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
fn a_policy_that_changed_meanwhile_keeps_what_was_used() {
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
    let told = check(&served, "alice");
    assert_eq!((&told["allowed"], &told["remaining"]), (&json!(true), &json!(1)));
    assert_eq!(served.stop(), Some(0));
    let mut served = Served::start(&["--snapshot", &path, "--max-keys", "7"], Some(&changed));
    assert_eq!(check(&served, "alice")["remaining"], 0);
    assert_eq!(served.stop(), Some(0));
}

/// A question that is still being asked when the server is told to stop.
#[test]
fn what_is_decided_while_it_stops_is_saved() {
    let folder = Folder::new("draining");
    let path = folder.snapshot();
    let mut served = Served::start(&["--snapshot", &path], Some(API));
    let mut last = Client::connect(served.http());
    let body = json!({ "policy": "api", "key": "last", "cost": 3 }).to_string();
    let head = format!(
        "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {}\r\nexpect: 100-continue\r\n\r\n",
        body.len()
    );
    last.write(head.as_bytes()).expect("sent");
    last.go_on();
    served.signal("TERM");
    let started = Instant::now();
    while TcpStream::connect(served.http()).is_ok() {
        assert!(started.elapsed() < Duration::from_secs(20), "it does not stop");
    }
    last.write(body.as_bytes()).expect("sent");
    assert_eq!(last.read().expect("an answer").json()["allowed"], true);
    assert_eq!(served.ended(), Some(0));
    let served = Served::start(&["--snapshot", &path], Some(API));
    assert_eq!(check(&served, "last")["allowed"], false, "it is forgiven");
}

/// One greedy client, four servers one after the other: one burst.
#[test]
fn a_restart_under_load_forgives_nobody() {
    let folder = Folder::new("load");
    let path = folder.snapshot();
    let config = "[policies.api]\nlimit = 500\nwindow = \"10h\"\n";
    let mut served = Served::start(&["--snapshot", &path], Some(config));
    let (http, resp) = (served.http().to_owned(), served.resp().to_owned());
    let (admitted, asked) = (AtomicU64::new(0), AtomicU64::new(0));
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let asks = vec![words(&["TG.CHECK", "api", "greedy"]); 4];
                while !is_over.load(Ordering::Relaxed) {
                    // Between two servers nobody listens.
                    let Ok(mut connection) = Resp::connect(&resp) else { continue };
                    while let Ok(told) = connection.ask_all(&asks) {
                        let allowed = told.iter().filter(|allowed| **allowed == 1).count();
                        admitted.fetch_add(allowed as u64, Ordering::Relaxed);
                        asked.fetch_add(asks.len() as u64, Ordering::Relaxed);
                        if is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
            });
        }
        for round in 1..=4_u64 {
            let started = Instant::now();
            while asked.load(Ordering::Relaxed) < 300 * round {
                assert!(started.elapsed() < Duration::from_secs(20), "nobody is answered");
                std::thread::yield_now();
            }
            assert_eq!(served.stop(), Some(0));
            let options = ["--snapshot", &path, "--http", &http, "--resp", &resp];
            served = Served::start(&options, Some(config));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    let (admitted, asked) = (admitted.into_inner(), asked.into_inner());
    assert!(asked >= 1_200);
    // What is earned meanwhile is one in 72 s.
    assert!((499..=501).contains(&admitted), "{admitted} of {asked}");
}

/// Killed at any moment, also while it saves: the snapshot is the one before or the next one, whole.
#[test]
fn killed_while_it_saves_it_leaves_a_whole_snapshot() {
    let folder = Folder::new("killed");
    let path = folder.snapshot();
    let options = ["--snapshot", &path, "--snapshot-every", "1ms"];
    let mut served = Served::start(&options, Some(API));
    let mut resp = Resp::connect(served.resp()).expect("it listens");
    let greedy = vec![words(&["TG.CHECK", "api", "greedy"]); 4];
    assert_eq!(resp.ask_all(&greedy).expect("answers"), [1, 1, 1, 0]);
    for round in 0..10_u64 {
        // Many others, so that saving takes a while.
        let many =
            (0..2_000).map(|key| words(&["TG.CHECK", "api", &format!("client-{round}-{key}")]));
        resp.ask_all(&many.collect::<Vec<_>>()).expect("answers");
        let saved = || metric(&served, "tallygate_snapshots_total{outcome=\"written\"}");
        let before = saved();
        let started = Instant::now();
        while saved() == before {
            assert!(started.elapsed() < Duration::from_secs(20), "nothing is saved");
        }
        let moment = Duration::from_micros(300 * round);
        while started.elapsed() < moment {
            std::hint::spin_loop();
        }
        served.signal("KILL");
        served.ended();
        served = Served::start(&options, Some(API));
        assert_eq!(check(&served, "greedy")["allowed"], false, "round {round}");
        resp = Resp::connect(served.resp()).expect("it listens");
    }
}

/// What it says when it does not start.
fn refused(options: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0"]).args(options);
    let output = command.output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    assert!(output.stdout.is_empty(), "it must not listen: {output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn a_damaged_snapshot_is_not_started_with_and_not_touched() {
    let folder = Folder::new("damaged");
    let path = folder.snapshot();
    let mut served = Served::start(&["--snapshot", &path], Some(API));
    check(&served, "alice");
    assert_eq!(served.stop(), Some(0));
    let whole = std::fs::read(&path).expect("a snapshot");
    let mut flipped = whole.clone();
    flipped[whole.len() / 2] ^= 4;
    for (bytes, expected) in [
        (&flipped[..], "it is damaged: the checksum of the block at byte 13 is wrong"),
        (&whole[..whole.len() - 9], "it is cut short after"),
        (&b""[..], "it is cut short after 0 bytes"),
        (&b"PK\x03\x04 an archive"[..], "it is no snapshot"),
        (&b"tallygate\x02\0\0\0"[..], "it is of version 2, and version 1 is known here"),
    ] {
        std::fs::write(&path, bytes).expect("written");
        let said = refused(&["--snapshot", &path]);
        assert!(said.contains(&format!("the snapshot {path} is refused: {expected}")), "{said}");
        assert!(said.contains("move it away to start with nobody remembered"), "{said}");
        assert_eq!(std::fs::read(&path).expect("it is there"), bytes);
    }
}

#[test]
fn where_it_cannot_be_saved_is_told_at_the_start_and_at_the_end() {
    let folder = Folder::new("nowhere");
    let nowhere = folder.0.join("nowhere/clients").display().to_string();
    let said = refused(&["--snapshot", &nowhere]);
    assert!(said.contains("snapshots cannot be written to"), "{said}");
    let mut served = Served::start(&["--snapshot", &folder.snapshot()], Some(API));
    std::fs::remove_dir_all(&folder.0).expect("removed");
    assert_eq!(served.stop(), Some(2));
    assert!(served.log().contains("cannot be written"), "{}", served.log());
}

#[test]
fn a_snapshot_is_for_clients_in_memory() {
    let folder = Folder::new("redis");
    let options = ["--snapshot", &folder.snapshot(), "--store", "redis://127.0.0.1:1"];
    let said = refused(&options);
    assert!(said.contains("a snapshot is for store = \"memory\""), "{said}");
    let config = folder.0.join("tallygate.toml");
    let text = "snapshot = \"/var/lib/tallygate/clients\"\nsnapshot_every = \"30s\"\n";
    std::fs::write(&config, text).expect("written");
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let output = command.arg("check-config").arg(&config).output().expect("the binary runs");
    let shown = String::from_utf8(output.stdout).expect("text");
    let mut shown: Vec<_> = shown.lines().collect();
    shown.retain(|line| line.starts_with("snapshot"));
    assert_eq!(shown, ["snapshot /var/lib/tallygate/clients, every 30s and at the end"]);
}
