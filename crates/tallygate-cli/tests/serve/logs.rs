//! Whatever becomes of the log, decisions go on; and nobody writes lines of their own into it.

use std::fs::File;
use std::io::{BufRead as _, BufReader, PipeReader, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::Client;
use serde_json::Value;

const API: &str = "[policies.api]\nlimit = 1000000\nwindow = \"1h\"\n";

/// What nobody reads: a pipe that is full.
fn full_pipe() -> (PipeReader, Stdio) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    rustix::io::ioctl_fionbio(&writer, true).expect("a pipe");
    let mut filling = &writer;
    for size in [4096, 1] {
        while filling.write(&vec![b'.'; size]).is_ok() {}
    }
    rustix::io::ioctl_fionbio(&writer, false).expect("a pipe");
    (reader, OwnedFd::from(writer).into())
}

/// Makes the server log much: configurations with mistakes, each another one.
fn log_much(served: &Served, from: usize) {
    for round in from..from + 100 {
        std::fs::write(served.config(), format!("{API}mistake-{round} = 1\n")).expect("written");
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("an answer").status, 422, "round {round}");
    }
}

/// Asks on every surface.
fn decisions_go_on(served: &Served) {
    let mut client = Client::connect(served.http());
    for _ in 0..100 {
        client.send("POST /v1/check", &[], b"{\"policy\":\"api\",\"key\":\"alice\"}");
        let reply = client.read().expect("an answer");
        assert_eq!(reply.status, 200);
        let told: Value = serde_json::from_str(&reply.body).expect("JSON");
        assert_eq!(told["allowed"], true);
    }
    let told = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .args(["check", "api", "alice", "--resp", served.resp()])
        .output()
        .expect("the binary runs");
    assert_eq!(told.status.code(), Some(0), "{told:?}");
}

fn lines_lost(served: &Served) -> u64 {
    let mut client = Client::connect(served.http());
    client.send("GET /metrics", &[], b"");
    let body = client.read().expect("an answer").body;
    let line = body.lines().find_map(|line| line.strip_prefix("tallygate_log_lines_lost_total "));
    line.and_then(|count| count.parse().ok()).expect("a count")
}

#[test]
fn i3_a_log_that_nobody_reads_stops_no_decision_and_not_the_end() {
    let (reader, full) = full_pipe();
    let mut served = Served::with_log(&["--log", "trace"], Some(API), &[], Some(full));
    log_much(&served, 0);
    decisions_go_on(&served);
    let started = Instant::now();
    assert_eq!(served.stop(), Some(0));
    assert!(started.elapsed() < Duration::from_secs(8), "it waited for {:?}", started.elapsed());
    drop(reader);
}

/// What waited is written when somebody reads again.
#[test]
fn i3_a_log_that_is_read_again_goes_on() {
    let (mut reader, full) = full_pipe();
    let mut served = Served::with_log(&[], Some(API), &[], Some(full));
    log_much(&served, 0);
    let mut filling = vec![0; 60_000];
    reader.read_exact(&mut filling).expect("what it was filled with");
    let reading = std::thread::spawn(move || {
        let lines = BufReader::new(reader).lines().map_while(Result::ok);
        lines.filter(|line| line.contains("mistake-")).count()
    });
    assert_eq!(served.stop(), Some(0));
    assert!(reading.join().expect("no panic") >= 100, "every mistake is another one");
}

#[test]
fn i3_a_full_disk_stops_no_decision_and_is_counted() {
    let full = File::options().write(true).open("/dev/full").expect("Linux");
    let mut served = Served::with_log(&[], Some(API), &[], Some(full.into()));
    log_much(&served, 0);
    decisions_go_on(&served);
    let started = Instant::now();
    while lines_lost(&served) < 100 {
        assert!(started.elapsed() < Duration::from_secs(20), "{} are lost", lines_lost(&served));
    }
    assert_eq!(served.stop(), Some(0));
}

/// The reader of the log is gone, and so is that of standard output.
#[test]
fn i3_a_log_whose_reader_is_gone_stops_no_decision() {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let gone = OwnedFd::from(writer).into();
    let mut served = Served::with_log(&[], Some(API), &[], Some(gone));
    log_much(&served, 0);
    decisions_go_on(&served);
    assert_eq!(served.stop(), Some(0));
}

/// Started with nothing to print to: a pipe that is full, and one whose reader is gone.
#[test]
fn i3_nobody_has_to_read_where_it_listens() {
    let (_reader, full) = full_pipe();
    let (reader, writer) = std::io::pipe().expect("a pipe");
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
        let asked = || {
            let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
            let told = command.args(["check", "demo", "alice", "--resp", &address]).output();
            told.expect("the binary runs").status.code()
        };
        while asked() != Some(0) {
            assert!(started.elapsed() < Duration::from_secs(20), "{name}: it does not answer");
            assert!(child.try_wait().expect("it can be asked").is_none(), "{name}: it has ended");
        }
        let stopped = Command::new("kill").arg(child.id().to_string()).status();
        assert!(stopped.expect("kill runs").success());
        assert_eq!(child.wait().expect("it ends").code(), Some(0), "{name}");
        let _ = std::fs::remove_file(&socket);
    }
}

/// The same mistake, told again and again, is a few lines and a count.
#[test]
fn i3_what_is_logged_again_and_again_is_counted() {
    let mut served = Served::start(&[], Some(API));
    std::fs::write(served.config(), "mistake = 1\n").expect("written");
    for _ in 0..200 {
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("an answer").status, 422);
    }
    assert_eq!(served.stop(), Some(0));
    let log = served.log();
    let (counted, told): (Vec<_>, Vec<_>) = log
        .lines()
        .filter(|line| line.contains("mistake"))
        .partition(|line| line.contains("more in the last"));
    let counts = counted.iter().filter_map(|line| {
        let (_, count) = line.split_once("… and ")?;
        count.split(' ').next()?.parse::<usize>().ok()
    });
    // The file itself is looked at, too: that may be one more.
    let all = told.len() + counts.sum::<usize>();
    assert!((200..=202).contains(&all), "{log}");
    assert!(told.len() <= 15 && !counted.is_empty(), "{log}");
}

/// Names with line ends: what is written into the log about them is one line.
#[test]
fn h5_nobody_writes_a_line_of_their_own_into_the_log() {
    for format in ["text", "json"] {
        let variables = [("TALLYGATE_LOG_FORMAT", format)];
        let mut served = Served::with_variables(&[], Some(API), &variables);
        let forged = "[policies.\"a\\r\\nERROR forged\\u001b[2J\"]\nlimit = 0\nwindow = \"1h\"\n";
        std::fs::write(served.config(), forged).expect("written");
        let mut client = Client::connect(served.http());
        client.send("POST /v1/admin/reload", &[], b"");
        assert_eq!(client.read().expect("an answer").status, 422);
        drop(client);
        assert_eq!(served.stop(), Some(0));
        let log = served.log();
        assert!(log.contains("forged"), "{format}: {log}");
        for line in log.lines() {
            assert!(!line.starts_with("ERROR forged"), "{format}: {log}");
            assert!(!line.contains(|c: char| c.is_ascii_control()), "{format}: {line:?}");
            if format == "json" {
                serde_json::from_str::<Value>(line).expect("JSON");
            }
        }
    }
}
