//! Measures attacks on a server: the latency of a good client, and the memory of the server.
//!
//! ```text
//! abuse SERVER [--write FILE] [ATTACK…]
//! ```
//!
//! Each attack has its own server with the default configuration. A good client sends steady requests over HTTP and RESP
//! from its own address, first without and then under attack. The results are tables, which replace those in FILE.
//! Attackers run at a lower priority, and their rate is limited where the attack is not about work: on a machine with two
//! cores, the attackers would be measured otherwise. `scripts/abuse` builds and runs this.
//!
//! | file | contents |
//! |---|---|
//! | `attack.rs` | what an attack is, and how one is measured |
//! | `attacks/` | the attacks |
//! | `client.rs` | connections of attackers |
//! | `good.rs` | the well-behaved client |
//! | `keys.rs` | ten million invented keys |
//! | `medians.rs` | the largest requests, and the median of another client |
//! | `server.rs` | a server, its store and its memory |
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the program prints a report")]

mod attack;
mod attacks;
mod client;
mod good;
mod keys;
mod medians;
mod server;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use attacks::ATTACKS;

/// Seconds for which the good client is measured without an attack.
const QUIET_SECONDS: usize = 2;

/// The most measurements of an attack, until one is within the bounds.
const TRIES: usize = 2;

/// The measurements other than attacks.
const OTHERS: [&str; 2] = ["medians", "keys"];

/// The markers of a table in a document.
const BEGIN: &str = "<!-- measured: ";
const END: &str = "<!-- end -->";

type Failure = Box<dyn std::error::Error + Send + Sync>;

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Runs the measurements and returns whether all were within their bounds.
fn run() -> Result<bool, Failure> {
    let mut words = std::env::args().skip(1);
    let binary = PathBuf::from(words.next().ok_or("expected the path of the server binary")?);
    let (mut write, mut wanted) = (None, Vec::new());
    while let Some(word) = words.next() {
        match word.as_str() {
            "--write" => write = Some(PathBuf::from(words.next().ok_or("--write what?")?)),
            _ => wanted.push(word),
        }
    }
    let is_known = |name: &&String| {
        OTHERS.contains(&name.as_str()) || ATTACKS.iter().any(|attack| attack.name == **name)
    };
    if let Some(name) = wanted.iter().find(|name| !is_known(name)) {
        let known: Vec<_> = ATTACKS.iter().map(|attack| attack.name).chain(OTHERS).collect();
        return Err(format!("there is no attack {name:?}; use {}", known.join(", ")).into());
    }
    let is_wanted = |name: &str| wanted.is_empty() || wanted.iter().any(|word| word == name);
    let mut held = true;
    let chosen: Vec<_> = ATTACKS.iter().filter(|attack| is_wanted(attack.name)).collect();
    if !chosen.is_empty() {
        let (mut table, mut findings) = (attack::HEAD.to_owned(), attack::FOUND_HEAD.to_owned());
        print!("{table}");
        for attack in chosen {
            // Other load only increases a time, so a measurement above the bound is repeated.
            let mut tries = 0;
            let measured = loop {
                tries += 1;
                let measured = attack::measure(&binary, attack)?;
                print!("{}", measured.row);
                if measured.is_held || tries == TRIES {
                    break measured;
                }
            };
            table.push_str(&measured.row);
            findings.push_str(measured.found.as_deref().unwrap_or_default());
            held &= measured.is_held;
        }
        print!("\n{findings}");
        if wanted.is_empty() {
            put(write.as_deref(), "attacks", &table)?;
            put(write.as_deref(), "findings", &findings)?;
        }
    }
    if is_wanted("medians") {
        let (table, is_held) = medians::measure(&binary)?;
        put(write.as_deref(), "medians", &table)?;
        held &= is_held;
    }
    if is_wanted("keys") {
        let (table, is_held) = keys::measure(&binary)?;
        print!("\n{table}");
        put(write.as_deref(), "keys", &table)?;
        held &= is_held;
    }
    Ok(held)
}

/// Returns the bound of a latency: twice its value, or a millisecond more.
fn allowed(latency: Duration) -> Duration {
    (2 * latency).max(latency + Duration::from_millis(1))
}

/// Replaces a table in a document.
fn put(document: Option<&std::path::Path>, name: &str, table: &str) -> Result<(), Failure> {
    let Some(document) = document else { return Ok(()) };
    let text = std::fs::read_to_string(document)?;
    let begin = format!("{BEGIN}{name} -->\n");
    let (before, rest) =
        text.split_once(&begin).ok_or_else(|| format!("the document has no table {name}"))?;
    let (_, after) = rest.split_once(END).ok_or("the table has no end marker")?;
    std::fs::write(document, format!("{before}{begin}{table}{END}{after}"))?;
    Ok(())
}

/// Lowers the priority of the attackers below that of the server and the good client.
fn step_back() {
    let _ = rustix::process::setpriority_process(None, 19);
}
