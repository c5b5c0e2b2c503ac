//! Attacks on a server, measured: what a good client notices, and what the server holds.
//!
//! ```text
//! abuse SERVER [--write FILE] [ATTACK…]
//! ```
//!
//! Each attack has a server of its own, as it is shipped. A good client asks it steadily over HTTP and RESP from an
//! address of its own, first in peace and then under attack. What comes out is a table, which takes the place of the one
//! in FILE. Attackers have only the processors' time that server and good client leave, and are held back where the attack is
//! not about work: on a machine of two cores they would be measured instead. `scripts/abuse` builds and runs this.
//!
//! | file | what |
//! |---|---|
//! | `attacks.rs` | what is done to the server |
//! | `good.rs` | the client that must not notice |
//! | `keys.rs` | ten million invented keys |
//! | `medians.rs` | the largest requests, and the median of another client |
//! | `server.rs` | a server, and what it holds |
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "it is a program for people")]

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

/// How many seconds a good client is watched in peace, and under attack.
const PEACE: usize = 5;
const ATTACKED: usize = 12;

/// How many times an attack is measured at most, until it was held.
const TRIES: usize = 2;

/// What is measured besides attacks.
const OTHERS: [&str; 2] = ["medians", "keys"];

/// Where a table begins and ends in a document.
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

/// Whether all attacks were held.
fn run() -> Result<bool, Failure> {
    let mut words = std::env::args().skip(1);
    let binary = PathBuf::from(words.next().ok_or("which server?")?);
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
            // Other programs on the machine only ever add to a time: one that is too long is measured again.
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
| attack | HTTP p50, p99 in peace | under attack | RESP p50, p99 in peace | under attack | new connection p99 in peace | under attack | MiB before | at most | descriptors at most | verdict |
|---|---|---|---|---|---|---|---|---|---|---|
";

/// Attacks one server; a row of the table, and whether it was held.
fn measure(binary: &std::path::Path, attack: &Attack) -> Result<(String, bool), Failure> {
    let server = Server::configured(binary, &[], attack.config)?;
    let mut good = Good::new(&server);
    let peace = good.watch(PEACE)?;
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
        // An attack takes a moment to be one.
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
    let pairs = [("HTTP", peace.http, during.http), ("RESP", peace.resp, during.resp)];
    for (name, peace, during) in pairs {
        if during.failed > 0 {
            faults.push(format!("{name} failed {} times", during.failed));
        }
        if during.p99 > allowed(peace.p99) {
            faults.push(format!("{name} slower"));
        }
    }
    if attack.lets_in && during.new.failed > 0 {
        faults.push(format!("{} new connections failed", during.new.failed));
    }
    let verdict = if faults.is_empty() { "held".to_owned() } else { faults.join(", ") };
    let mut row = format!("| {} ", attack.name);
    for (_, peace, during) in pairs {
        let _ = write!(row, "| {peace} | {during} ");
    }
    let new = |latency: Latency| match latency.p99 {
        Duration::ZERO => "none".to_owned(),
        p99 => good::shown(p99),
    };
    let _ = write!(row, "| {} | {} ", new(peace.new), new(during.new));
    let _ = writeln!(row, "| {} | {} | {} | {verdict} |", before.mib, most.mib, most.descriptors);
    Ok((row, faults.is_empty()))
}

/// What a p99 may become: twice itself, or a millisecond more.
fn allowed(p99: Duration) -> Duration {
    (2 * p99).max(p99 + Duration::from_millis(1))
}

/// The most that a server holds until it is over.
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

/// Puts a table where the one before was.
fn put(document: Option<&std::path::Path>, name: &str, table: &str) -> Result<(), Failure> {
    let Some(document) = document else { return Ok(()) };
    let text = std::fs::read_to_string(document)?;
    let begin = format!("{BEGIN}{name} -->\n");
    let (before, rest) = text.split_once(&begin).ok_or_else(|| format!("no place for {name}"))?;
    let (_, after) = rest.split_once(END).ok_or("a table without end")?;
    std::fs::write(document, format!("{before}{begin}{table}{END}{after}"))?;
    Ok(())
}

/// Leaves the processors to the server and the good client as far as they need them: attackers are elsewhere.
fn step_back() {
    let _ = rustix::process::setpriority_process(None, 19);
}

/// Waits until it is over, or for so long.
fn rest(over: &AtomicBool, time: Duration) {
    let until = Instant::now() + time;
    while !over.load(Ordering::Relaxed) && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10).min(time));
    }
}
