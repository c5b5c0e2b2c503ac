//! Tests that decisions continue whatever happens to the log, and that names inject no lines into it.

use std::fs::File;
use std::io::{BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::Client;
use serde_json::Value;

const API: &str = "[policies.api]\nlimit = 1000000\nwindow = \"1h\"\n";

/// Returns a full pipe with its reader.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, writer) = std::io::pipe().expect("the stream is piped");
    rustix::io::ioctl_fionbio(&writer, true).expect("the stream is piped");
    let mut filling = &writer;
    for size in [4096, 1] {
        while filling.write(&vec![b'.'; size]).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).expect("the stream is piped");
    (reader, OwnedFd::from(writer).into())
}

/// Makes the server log many lines: each reload has a different error.
fn log_many_lines(served: &Served, from: usize) {
    for round in from..from + 100 {
        std::fs::write(served.config(), format!("{API}mistake-{round} = 1\n"))
            .expect("the file is written");
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("there is a reply").status, 422, "round {round}");
    }
}

/// Checks that the server decides over HTTP and RESP.
fn decisions_continue(served: &Served) {
    let mut client = Client::connect(served.http());
    for _ in 0..100 {
        client.send("POST /v1/check", &[], b"{\"policy\":\"api\",\"key\":\"alice\"}");
        let reply = client.read().expect("there is a reply");
        assert_eq!(reply.status, 200);
        let decision: Value = serde_json::from_str(&reply.body).expect("the text is JSON");
        assert_eq!(decision["allowed"], true);
    }
    let output = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["check", "api", "alice", "--resp", served.resp()])
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

fn lines_lost(served: &Served) -> u64 {
    let mut client = Client::connect(served.http());
    client.send("GET /metrics", &[], b"");
    let body = client.read().expect("there is a reply").body;
    let line = body.lines().find_map(|line| line.strip_prefix("tallygate_log_lines_lost_total "));
    line.and_then(|count| count.parse().ok()).expect("the metric exists")
}

/// Fault I3.
#[test]
fn an_unread_log_blocks_neither_requests_nor_shutdown() {
    let (reader, full) = full_pipe();
    let mut served = Served::with_log(&["--log", "trace"], Some(API), &[], Some(full));
    log_many_lines(&served, 0);
    decisions_continue(&served);
    let started = Instant::now();
    assert_eq!(served.stop(), Some(0));
    assert!(
        started.elapsed() < Duration::from_secs(8),
        "the shutdown took {:?}",
        started.elapsed()
    );
    drop(reader);
}

/// The buffered lines are written when the pipe is read again.
///
/// Fault I3.
#[test]
fn a_log_continues_when_it_is_read_again() {
    let (mut reader, full) = full_pipe();
    let mut served = Served::with_log(&[], Some(API), &[], Some(full));
    log_many_lines(&served, 0);
    let mut filling = vec![0; 60_000];
    reader.read_exact(&mut filling).expect("the pipe was filled");
    let reading = std::thread::spawn(move || {
        let lines = BufReader::new(reader).lines().map_while(Result::ok);
        lines.filter(|line| line.contains("mistake-")).count()
    });
    assert_eq!(served.stop(), Some(0));
    assert!(reading.join().expect("the thread does not panic") >= 100, "every error is logged");
}

/// Fault I3.
#[test]
fn a_full_disk_blocks_no_decision_and_is_counted() {
    let full = File::options().write(true).open("/dev/full").expect("the system is Linux");
    let mut served = Served::with_log(&[], Some(API), &[], Some(full.into()));
    log_many_lines(&served, 0);
    decisions_continue(&served);
    let started = Instant::now();
    while lines_lost(&served) < 100 {
        assert!(
            started.elapsed() < Duration::from_secs(20),
            "{} lines are lost",
            lines_lost(&served)
        );
    }
    assert_eq!(served.stop(), Some(0));
}

/// The reader of the log is gone.
///
/// Fault I3.
#[test]
fn a_closed_log_blocks_no_decision() {
    let (reader, writer) = std::io::pipe().expect("the stream is piped");
    drop(reader);
    let gone = OwnedFd::from(writer).into();
    let mut served = Served::with_log(&[], Some(API), &[], Some(gone));
    log_many_lines(&served, 0);
    decisions_continue(&served);
    assert_eq!(served.stop(), Some(0));
}

/// Standard output is a full pipe, or a pipe whose reader is gone.
///
/// Fault I3.
#[test]
fn the_server_runs_although_its_output_is_not_read() {
    let (_reader, full) = full_pipe();
    let (reader, writer) = std::io::pipe().expect("the stream is piped");
    drop(reader);
    for (name, stdout) in [("full", full), ("gone", OwnedFd::from(writer).into())] {
        let file = format!("tallygate-quiet-{name}-{}.sock", std::process::id());
        let socket = std::env::temp_dir().join(file);
        let address = format!("unix:{}", socket.display());
        let mut child = Command::new(env!("CARGO_BIN_EXE_tallygate"))
            .args(["serve", "--http", "127.0.0.1:0", "--resp", &address])
            .stdout(stdout)
            .stderr(Stdio::null())
            .spawn()
            .expect("the binary starts");
        let started = Instant::now();
        let check = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
            let output = command.args(["check", "demo", "alice", "--resp", &address]).output();
            output.expect("the binary runs").status.code()
        };
        while check() != Some(0) {
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{name}: the server does not reply"
            );
            assert!(
                child.try_wait().expect("the process status is readable").is_none(),
                "{name}: the server has exited"
            );
        }
        let stopped = Command::new("kill").arg(child.id().to_string()).status();
        assert!(stopped.expect("kill runs").success());
        assert_eq!(child.wait().expect("the process ends").code(), Some(0), "{name}");
        let _ = std::fs::remove_file(&socket);
    }
}

/// The same error, repeated many times, is logged as a few lines and a count.
///
/// Fault I3.
#[test]
fn repeated_log_lines_are_counted() {
    let mut served = Served::start(&[], Some(API));
    std::fs::write(served.config(), "mistake = 1\n").expect("the file is written");
    for _ in 0..200 {
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("there is a reply").status, 422);
    }
    assert_eq!(served.stop(), Some(0));
    let log = served.log();
    let (counted, logged): (Vec<_>, Vec<_>) = log
        .lines()
        .filter(|line| line.contains("mistake"))
        .partition(|line| line.contains("more times in the last"));
    let counts = counted.iter().filter_map(|line| {
        let (_, count) = line.split_once("… repeated ")?;
        count.split(' ').next()?.parse::<usize>().ok()
    });
    // The server also watches the file, which may add one or two errors.
    let all = logged.len() + counts.sum::<usize>();
    assert!((200..=202).contains(&all), "{log}");
    assert!(logged.len() <= 15 && !counted.is_empty(), "{log}");
}

/// A name with line ends is logged as one line.
///
/// Fault H5.
#[test]
fn names_inject_no_line_into_the_log() {
    for format in ["text", "json"] {
        let variables = [("TALLYGATE_LOG_FORMAT", format)];
        let mut served = Served::with_variables(&[], Some(API), &variables);
        let forged = "[policies.\"a\\r\\nERROR forged\\u001b[2J\"]\nlimit = 0\nwindow = \"1h\"\n";
        std::fs::write(served.config(), forged).expect("the file is written");
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("there is a reply").status, 422);
        drop(client);
        assert_eq!(served.stop(), Some(0));
        let log = served.log();
        assert!(log.contains("forged"), "{format}: {log}");
        for line in log.lines() {
            assert!(!line.starts_with("ERROR forged"), "{format}: {log}");
            assert!(!line.contains(|c: char| c.is_ascii_control()), "{format}: {line:?}");
            if format == "json" {
                serde_json::from_str::<Value>(line).expect("the text is JSON");
            }
        }
    }
}

/// Returns the lines of a log in JSON.
fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect("each line is JSON")).collect()
}

#[test]
fn structured_logs_are_structured_from_the_start_to_the_end_on_both_streams() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["serve", "--http", "127.0.0.1:0", "--resp", "127.0.0.1:0", "--log-format", "json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary runs");
    let mut output = BufReader::new(child.stdout.take().expect("the stream is piped"));
    let mut ready = String::new();
    output.read_line(&mut ready).expect("the server prints its addresses");
    let ready = &json_lines(&ready)[0];
    let http = ready["http"].as_str().expect("the address is text");
    let mut client = Client::connect(http);
    let token = ready["admin_token"].as_str().expect("the token is text");
    client.send("GET /v1/policies", &[("authorization", &format!("Bearer {token}"))], b"");
    assert_eq!(client.read().expect("there is a reply").status, 200);
    let stopped = Command::new("kill").arg(child.id().to_string()).status().expect("kill runs");
    assert!(stopped.success());
    let (mut rest, mut log) = (String::new(), String::new());
    output.read_to_string(&mut rest).expect("the output ends");
    child
        .stderr
        .take()
        .expect("the stream is piped")
        .read_to_string(&mut log)
        .expect("the log ends");
    assert!(child.wait().expect("the server exits").success());
    assert_eq!(rest, "", "everything is in one line");
    let log = json_lines(&log);
    let started = &log[0]["fields"];
    assert_eq!(started["message"], "server started", "{log:?}");
    assert_eq!(started["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!((&started["store"], &started["policies"]), (&"memory".into(), &1.into()));
    assert_eq!((&started["http"], &started["resp"]), (&ready["http"], &ready["resp"]));
    let stopped = &log[log.len() - 1]["fields"];
    assert_eq!(stopped["message"], "server stopped", "{log:?}");
    assert!(stopped["uptime_seconds"].is_u64(), "{log:?}");
}

#[test]
fn a_failed_start_is_structured_as_well() {
    let output = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["serve", "--config", "missing.toml", "--log-format", "json"])
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(2));
    let log = json_lines(&String::from_utf8(output.stderr).expect("the text is UTF-8"));
    let failed = &log[log.len() - 1];
    assert_eq!(failed["level"], "ERROR", "{log:?}");
    assert!(failed["fields"]["error"].as_str().is_some_and(|why| why.contains("missing.toml")));
}

#[test]
fn the_start_and_the_end_are_one_line_each() {
    let mut served = Served::start(&["--log", "info"], Some(API));
    assert_eq!(served.stop(), Some(0));
    let log = served.log();
    let lines = |text: &str| log.lines().filter(|line| line.contains(text)).count();
    assert_eq!((lines("server started"), lines("server stopped")), (1, 1), "{log}");
    let config = served.config().display().to_string();
    for part in ["version=", "store=\"memory\"", "policies=1", "http=", "resp=", &config] {
        assert!(
            log.lines().any(|line| line.contains("server started") && line.contains(part)),
            "{log}"
        );
    }
}

#[test]
fn debug_logs_are_about_tallygate_and_trace_logs_about_libraries_too() {
    for (level, has_frames) in [("debug", false), ("trace", true)] {
        let mut served = Served::start(&["--log", level], Some(API));
        let url = format!("http://{}/livez", served.http());
        let output = Command::new("curl").args(["-s", "--http2-prior-knowledge", &url]).output();
        assert_eq!(output.expect("curl is installed").stdout, b"alive\n");
        assert_eq!(served.stop(), Some(0));
        let log = served.log();
        assert_eq!(log.contains("h2::"), has_frames, "{level}: {log}");
        assert!(log.contains("server stopped"), "{level}: {log}");
    }
}
