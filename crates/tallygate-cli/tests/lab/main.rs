//! Tests of the commands replay, backtest and simulate, and of their HTTP counterparts.

#[path = "../common/mod.rs"]
mod common;
#[path = "../http_client/mod.rs"]
mod http_client;

mod backtest;
mod replay;
mod replay_store;
mod simulate;

use std::io::Write as _;
use std::process::{Command, Stdio};

/// The result of a command.
struct Outcome {
    output: String,
    message: String,
    code: Option<i32>,
}

/// Runs a command of the binary with an input.
fn run(command: &str, options: &[&str], input: &[u8]) -> Outcome {
    let mut child = Command::new(env!("CARGO_BIN_EXE_tallygate"))
        .arg(command)
        .args(options)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("the binary starts");
    let mut stdin = child.stdin.take().expect("the stream is piped");
    let input = input.to_vec();
    // The command may stop reading early, so the write may fail.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let out = child.wait_with_output().expect("the process ends");
    writer.join().expect("the writer ends");
    let text = |bytes| String::from_utf8(bytes).expect("the text is UTF-8");
    Outcome { output: text(out.stdout), message: text(out.stderr), code: out.status.code() }
}
