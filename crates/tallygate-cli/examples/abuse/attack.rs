//! One attack: what it needs, and how it is measured.

use std::fmt::Write as _;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::client::{self, FROM};
use crate::good::{self, GoodClient, Latency};
use crate::server::{Server, ServerUsage, Store, StoreKind};
use crate::{Failure, QUIET_SECONDS, allowed, step_back};

/// The seconds of an attack, unless it needs more.
const SECONDS: usize = 5;

/// An attack that several threads run at once.
pub(crate) struct Attack {
    pub(crate) name: &'static str,
    pub(crate) attackers: usize,
    pub(crate) most: MemoryBound,
    /// Additional configuration, and options of the server.
    pub(crate) config: fn() -> String,
    pub(crate) options: &'static [&'static str],
    pub(crate) store: StoreKind,
    /// Whether other clients can connect during the attack.
    pub(crate) lets_in: bool,
    pub(crate) latency: Promise,
    pub(crate) seconds: usize,
    pub(crate) run: fn(&Attempt),
    /// Looks at the server after the attack.
    pub(crate) after: fn(&Attempt),
}

/// The most memory of the server under an attack.
#[derive(Clone, Copy)]
pub(crate) enum MemoryBound {
    /// This many MiB more than before.
    Mib(u64),
    /// The formula of `docs/operations.md`, which the server computes as well.
    Formula,
}

/// What is promised to the well-behaved client, beside its replies.
#[derive(Clone, Copy)]
pub(crate) enum Promise {
    /// The p99 at most doubles, or grows by a millisecond.
    P99,
    /// The median at most doubles, or grows by a millisecond: the attackers send as much work as they can.
    Median,
    /// No latency: all checks wait for the same Redis.
    Replies,
}

impl Promise {
    fn is_kept(self, quiet: Latency, during: Latency) -> bool {
        match self {
            Self::P99 => during.p99 <= allowed(quiet.p99),
            Self::Median => during.p50 <= allowed(quiet.p50),
            Self::Replies => true,
        }
    }
}

/// Returns an attack on a server with the default configuration.
pub(crate) const fn attack(
    name: &'static str,
    attackers: usize,
    most_mib: u64,
    run: fn(&Attempt),
) -> Attack {
    Attack {
        name,
        attackers,
        most: MemoryBound::Mib(most_mib),
        config: String::new,
        options: &[],
        store: StoreKind::Memory,
        lets_in: true,
        latency: Promise::P99,
        seconds: SECONDS,
        run,
        after: |_| (),
    }
}

/// An attack in progress, as one of its threads sees it.
pub(crate) struct Attempt<'a> {
    pub(crate) server: &'a Server,
    pub(crate) store: &'a Store,
    pub(crate) place: usize,
    /// The address from which this thread connects.
    pub(crate) from: [u8; 4],
    over: &'a AtomicBool,
    findings: &'a Findings,
}

/// What an attack got from the server.
#[derive(Default)]
pub(crate) struct Findings {
    notes: Mutex<Vec<String>>,
    faults: Mutex<Vec<String>>,
}

impl Attempt<'_> {
    /// Returns the same attempt from another address.
    pub(crate) const fn at_address(&self, from: [u8; 4]) -> Self {
        let Self { server, store, place, over, findings, .. } = *self;
        Self { server, store, place, from, over, findings }
    }

    pub(crate) fn goes_on(&self) -> bool {
        !self.over.load(Ordering::Relaxed)
    }

    /// Waits until the attack ends, or for at most this long.
    pub(crate) fn rest(&self, time: Duration) {
        let until = Instant::now() + time;
        while self.goes_on() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(10).min(time));
        }
    }

    /// Reports what the attack got. It is a fault if it is more than was promised.
    pub(crate) fn finds(&self, is_promised: bool, what: impl Into<String>) {
        let list = if is_promised { &self.findings.notes } else { &self.findings.faults };
        if let Ok(mut list) = list.lock() {
            list.push(what.into());
        }
    }

    /// Reports an attack that could not be made.
    pub(crate) fn expects(&self, result: Result<(), Failure>) {
        if let Err(error) = result {
            self.finds(false, error.to_string());
        }
    }

    /// Returns the metrics of the server whose names start with the given text, added up.
    pub(crate) fn metric(&self, name: &str) -> Result<u64, Failure> {
        let reply = client::ask([127, 0, 0, 3], self.server.http, "GET /metrics", "")?;
        let values = reply.body.lines().filter(|line| line.starts_with(name));
        let values = values.filter_map(|line| line.rsplit_once(' ')?.1.parse::<u64>().ok());
        Ok(values.sum())
    }
}

/// The rows of an attack in the two tables, and whether its bounds held.
pub(crate) struct Measured {
    pub(crate) row: String,
    pub(crate) found: Option<String>,
    pub(crate) is_held: bool,
}

/// The head of the table of latencies and memory.
pub(crate) const HEAD: &str = "\
| attack | HTTP p50, p99 without an attack | under attack | RESP p50, p99 without an attack | under attack | new connection p99 without an attack | under attack | MiB before | at most | allowed | descriptors at most | verdict |
|---|---|---|---|---|---|---|---|---|---|---|---|
";

/// The head of the table of findings.
pub(crate) const FOUND_HEAD: &str = "| attack | measured | verdict |\n|---|---|---|\n";

/// Attacks one server.
pub(crate) fn measure(binary: &Path, attack: &Attack) -> Result<Measured, Failure> {
    let store = Store::start(attack.store);
    let server = Server::configured(binary, attack.options, &(attack.config)(), &store)?;
    let mut good = GoodClient::new(&server);
    let quiet = good.watch(QUIET_SECONDS)?;
    let before = server.holds()?;
    let (over, findings) = (AtomicBool::new(false), Findings::default());
    let attempt = |place| {
        let (server, store, over, findings) = (&server, &store, &over, &findings);
        Attempt { server, store, place, from: FROM, over, findings }
    };
    let allowed_mib = match attack.most {
        MemoryBound::Mib(more) => before.mib + more,
        MemoryBound::Formula => attempt(0).metric("tallygate_memory_bound_bytes")? >> 20,
    };
    let (during, most) = std::thread::scope(|scope| -> Result<_, Failure> {
        let attackers: Vec<_> = (0..attack.attackers)
            .map(|place| {
                let attempt = attempt(place);
                scope.spawn(move || {
                    step_back();
                    (attack.run)(&attempt);
                })
            })
            .collect();
        let most = scope.spawn(|| most_held(&server, &over));
        // The attack needs a moment to reach its full rate.
        std::thread::sleep(Duration::from_secs(1));
        let during = good.watch(attack.seconds);
        over.store(true, Ordering::Relaxed);
        for attacker in attackers {
            attacker.join().map_err(|_| "an attacker failed")?;
        }
        let most = most.join().map_err(|_| "the watcher failed")??;
        Ok((during?, most))
    })?;
    (attack.after)(&attempt(0));
    let Findings { notes, faults } = findings;
    let (notes, mut faults) = (notes.into_inner()?, faults.into_inner()?);
    let found = [&notes[..], &faults[..]].concat().join("; ");
    let broken = !faults.is_empty();
    if most.peak_mib > allowed_mib {
        faults.push(format!("{} MiB", most.peak_mib));
    }
    let pairs = [("HTTP", quiet.http, during.http), ("RESP", quiet.resp, during.resp)];
    for (name, quiet, during) in pairs {
        if during.failed > 0 {
            faults.push(format!("{name} failed {} times", during.failed));
        }
        if !attack.latency.is_kept(quiet, during) {
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
    let _ = write!(row, "| {} | {} | {allowed_mib} ", before.mib, most.peak_mib);
    let _ = writeln!(row, "| {} | {verdict} |", most.descriptors);
    let of_findings = if broken { "broken" } else { "held" };
    let found =
        (!found.is_empty()).then(|| format!("| {} | {found} | {of_findings} |\n", attack.name));
    Ok(Measured { row, found, is_held: faults.is_empty() })
}

/// Returns the peak memory and descriptors of a server until the attack ends.
fn most_held(server: &Server, over: &AtomicBool) -> Result<ServerUsage, Failure> {
    let mut most = server.holds()?;
    while !over.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(20));
        let now = server.holds()?;
        most.peak_mib = now.peak_mib;
        most.descriptors = most.descriptors.max(now.descriptors);
    }
    Ok(most)
}
