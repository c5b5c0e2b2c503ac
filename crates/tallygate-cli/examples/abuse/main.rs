//! Measures attacks on a server: the latency of a good client, and the memory of the server.
//!
//! ```text
//! abuse SERVER [--write FILE] [ATTACK…]
//! ```
//!
//! Each attack has its own server with the default configuration. A good client sends steady requests over HTTP and RESP
//! from its own address, first without and then under attack. The result is a table, which replaces the one in FILE.
//! Attackers run at a lower priority, and their rate is limited where the attack is not about work: on a machine with two
//! cores, the attackers would be measured otherwise. `scripts/abuse` builds and runs this.
//!
//! | file | contents |
//! |---|---|
//! | `attacks.rs` | the attacks |
//! | `good.rs` | the well-behaved client |
//! | `keys.rs` | ten million invented keys |
//! | `medians.rs` | the largest requests, and the median of another client |
//! | `server.rs` | a server and its memory |
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the program prints a report")]

mod attacks;
mod good;
mod keys;
mod medians;
mod server;

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use attacks::{ATTACKS, Attack};
use good::{Good, Latency};
use server::{Holds, Server};

/// Seconds for which the good client is measured without and under attack.
const QUIET_SECONDS: usize = 5;
const ATTACKED: usize = 12;

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
        let mut table = String::from(HEAD);
        print!("{table}");
        for attack in chosen {
            // Other load only increases a time, so a measurement above the bound is repeated.
            let mut tries = 0;
            let (row, is_held) = loop {
                tries += 1;
                let (row, is_held) = measure(&binary, attack)?;
                print!("{row}");
                if is_held || tries == TRIES {
                    break (row, is_held);
                }
            };
            table.push_str(&row);
            held &= is_held;
        }
        if wanted.is_empty() {
            put(write.as_deref(), "attacks", &table)?;
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

const HEAD: &str = "\
| attack | HTTP p50, p99 without an attack | under attack | RESP p50, p99 without an attack | under attack | new connection p99 without an attack | under attack | MiB before | at most | descriptors at most | verdict |
|---|---|---|---|---|---|---|---|---|---|---|
";

/// Attacks one server. Returns a row of the table and whether the bounds held.
fn measure(binary: &std::path::Path, attack: &Attack) -> Result<(String, bool), Failure> {
    let server = Server::configured(binary, &[], attack.config)?;
    let mut good = Good::new(&server);
    let quiet = good.watch(QUIET_SECONDS)?;
    let before = server.holds()?;
    let over = AtomicBool::new(false);
    let (during, most) = std::thread::scope(|scope| -> Result<_, Failure> {
        for place in 0..attack.attackers {
            let (server, over) = (&server, &over);
            scope.spawn(move || {
                step_back();
                (attack.run)(server, place, over);
            });
        }
        let most = scope.spawn(|| most_held(&server, &over));
        // The attack needs a moment to reach its full rate.
        std::thread::sleep(Duration::from_secs(1));
        let during = good.watch(ATTACKED);
        over.store(true, Ordering::Relaxed);
        let most = most.join().map_err(|_| "the watcher failed")??;
        Ok((during?, most))
    })?;
    let mut faults = Vec::new();
    let grown = most.mib.saturating_sub(before.mib);
    if grown > attack.most_mib {
        faults.push(format!("{grown} MiB more, not {}", attack.most_mib));
    }
    let pairs = [("HTTP", quiet.http, during.http), ("RESP", quiet.resp, during.resp)];
    for (name, quiet, during) in pairs {
        if during.failed > 0 {
            faults.push(format!("{name} failed {} times", during.failed));
        }
        if during.p99 > allowed(quiet.p99) {
            faults.push(format!("{name} slower"));
        }
    }
    if attack.lets_in && during.new.failed > 0 {
        faults.push(format!("{} new connections failed", during.new.failed));
    }
    let verdict = if faults.is_empty() { "held".to_owned() } else { faults.join(", ") };
    let mut row = format!("| {} ", attack.name);
    for (_, quiet, during) in pairs {
        let _ = write!(row, "| {quiet} | {during} ");
    }
    let new = |latency: Latency| match latency.p99 {
        Duration::ZERO => "none".to_owned(),
        p99 => good::shown(p99),
    };
    let _ = write!(row, "| {} | {} ", new(quiet.new), new(during.new));
    let _ = writeln!(row, "| {} | {} | {} | {verdict} |", before.mib, most.mib, most.descriptors);
    Ok((row, faults.is_empty()))
}

/// Returns the bound of a p99: twice its value, or a millisecond more.
fn allowed(p99: Duration) -> Duration {
    (2 * p99).max(p99 + Duration::from_millis(1))
}

/// Returns the peak memory of a server until the attack ends.
fn most_held(server: &Server, over: &AtomicBool) -> Result<Holds, Failure> {
    let mut most = server.holds()?;
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        let now = server.holds()?;
        most.mib = most.mib.max(now.mib);
        most.descriptors = most.descriptors.max(now.descriptors);
    }
    Ok(most)
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

/// Waits until the attack ends, or for at most this long.
fn rest(over: &AtomicBool, time: Duration) {
    let until = Instant::now() + time;
    while !over.load(Ordering::Relaxed) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10).min(time));
    }
}
