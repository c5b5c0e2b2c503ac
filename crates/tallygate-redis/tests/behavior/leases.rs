//! Eight processes with leases on one hot key: together they stay within the bound and use almost the whole quota, also
//! while processes are killed and the server restarts.
//!
//! The processes are this test binary itself, which runs [`one_of_the_processes`].

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tallygate::{Ask, Policy, RateLimiter, Source};
use tallygate_redis::{Leases, OnFailure, Options, Redis};
use tallygate_testkit::servers::{Flavor, Server};

const PROCESSES: usize = 8;
const LIMIT: u64 = 4000;
/// The quota of a fifth of a second: on a busy machine, all of them may wait for that long.
const BURST: u64 = 800;
const LIFE: Duration = Duration::from_millis(100);
const LASTS: Duration = Duration::from_secs(3);
const ADDRESS: &str = "TALLYGATE_LEASES_ADDRESS";

fn policy() -> Policy {
    Policy::token_bucket(LIMIT).per_second().burst(BURST).named("hot").build().unwrap()
}

/// The units that were allowed in each millisecond since 1970.
type Allowed = BTreeMap<u64, u64>;

#[test]
fn eight_processes_use_the_quota_and_no_more() {
    let server = Server::start(Flavor::Redis);
    let before = now_ms();
    let processes: Vec<Process> = (0..PROCESSES).map(|_| Process::start(&server.url())).collect();
    let (allowed, by_lease) = sum(processes);
    let total: u64 = allowed.values().sum();
    assert_eq!(over(&allowed, &[]), 0);
    assert!(by_lease * 4 > total * 3, "{by_lease} of {total} from leases");

    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = Redis::open(&server.url()).unwrap();
    let limiter = RateLimiter::with_store(policy(), redis.store("hot"));
    let left = runtime.block_on(limiter.peek(Ask::new("hot").cost(0))).unwrap().remaining;
    // The units that were earned meanwhile, by the clock of this machine.
    let (first, last) = (*allowed.keys().next().unwrap(), *allowed.keys().next_back().unwrap());
    assert!(first >= before);
    let there = BURST + (last - first) * LIMIT / 1000;
    assert!(left <= BURST);
    assert!(total * 100 >= there * 99, "{total} of {there} were used in {} ms", last - first);
}

#[test]
fn killed_processes_and_a_restarted_server_do_not_exceed_the_bound() {
    let server = Server::start(Flavor::Redis);
    let mut processes: Vec<Process> =
        (0..PROCESSES).map(|_| Process::start(&server.url())).collect();
    let mut restarts = Vec::new();
    for process in processes.iter_mut().take(3) {
        process.wait_for_report();
        process.child.kill().unwrap();
        let from = now_ms();
        server.restart();
        restarts.push((from, now_ms()));
    }
    let (allowed, by_lease) = sum(processes);
    // A server without persistence forgets all usage: one burst per restart.
    assert_eq!(over(&allowed, &restarts), 0);
    assert!(by_lease > 0);
    assert!(allowed.values().sum::<u64>() > LIMIT, "they went on");
}

/// Returns by how many units the worst interval exceeds the bound: a burst, the units that are earned in it, and those
/// that are earned in the life of a lease.
fn over(allowed: &Allowed, restarts: &[(u64, u64)]) -> u64 {
    let life = u64::try_from(LIFE.as_millis()).unwrap();
    let mut worst = 0;
    let slots: Vec<(u64, u64)> = allowed.iter().map(|(slot, count)| (*slot, *count)).collect();
    for (index, (from, _)) in slots.iter().enumerate() {
        let mut sum = 0;
        for (to, count) in &slots[index..] {
            sum += count;
            // A slot is one millisecond.
            let excused =
                restarts.iter().filter(|(begin, end)| *begin <= *to && *end + life >= *from);
            let bursts = 1 + u64::try_from(excused.count()).unwrap();
            let bound = bursts * BURST + (to + 1 - from + life) * LIMIT / 1000;
            worst = worst.max(sum.saturating_sub(bound));
        }
    }
    worst
}

fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

struct Process {
    child: Child,
    heard: JoinHandle<(Allowed, u64)>,
    reports: std::sync::mpsc::Receiver<()>,
}

impl Process {
    fn start(address: &str) -> Self {
        let mut child = Command::new(env::current_exe().unwrap())
            .args(["leases::one_of_the_processes", "--exact", "--ignored", "--nocapture", "-q"])
            .env(ADDRESS, address)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let says = BufReader::new(child.stdout.take().unwrap());
        let (sender, reports) = std::sync::mpsc::channel();
        let heard = std::thread::spawn(move || {
            let (mut allowed, mut by_lease) = (Allowed::new(), 0);
            for line in says.lines().map_while(Result::ok) {
                let Some((_, said)) = line.split_once("says: ") else { continue };
                let mut numbers = said.split(' ').map(str::parse::<u64>);
                // The last line of a killed process may be incomplete, and is not counted.
                while let (Some(Ok(slot)), Some(Ok(count)), Some(Ok(leased))) =
                    (numbers.next(), numbers.next(), numbers.next())
                {
                    *allowed.entry(slot).or_default() += count;
                    by_lease += leased;
                }
                let _ = sender.send(());
            }
            (allowed, by_lease)
        });
        Self { child, heard, reports }
    }

    fn wait_for_report(&self) {
        self.reports.recv().expect("the process reports");
    }
}

/// The units that all processes were allowed, and how many of them came from leases.
fn sum(processes: Vec<Process>) -> (Allowed, u64) {
    let (mut all, mut by_lease) = (Allowed::new(), 0);
    for mut process in processes {
        let (allowed, leased) = process.heard.join().unwrap();
        process.child.wait().unwrap();
        allowed.into_iter().for_each(|(slot, count)| *all.entry(slot).or_default() += count);
        by_lease += leased;
    }
    (all, by_lease)
}

/// Checks the key all the time, and prints the units that were allowed in each millisecond.
#[test]
#[ignore = "run by the tests above, as a process of its own"]
fn one_of_the_processes() {
    let Ok(address) = env::var(ADDRESS) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    runtime.block_on(async {
        let options = Options::default().budget(Duration::from_millis(500));
        let store =
            Redis::with(&address, options).unwrap().store("hot").on_failure(OnFailure::Deny);
        let limiter = RateLimiter::with_store(policy(), store.leases(Leases::default().life(LIFE)));
        let ends = now_ms() + u64::try_from(LASTS.as_millis()).unwrap();
        let mut said = String::new();
        let (mut slot, mut count, mut leased) = (0, 0, 0);
        loop {
            let decision = limiter.check("hot").await.unwrap();
            let now = now_ms();
            if now != slot {
                if count > 0 {
                    said += &format!("{slot} {count} {leased} ");
                }
                if said.len() > 200 || now > ends {
                    println!("says: {said}");
                    std::io::stdout().flush().unwrap();
                    said.clear();
                }
                (slot, count, leased) = (now, 0, 0);
            }
            if now > ends {
                break;
            }
            if decision.allowed {
                count += 1;
                leased += u64::from(decision.source == Source::Lease);
            } else {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
        limiter.store().give_back_leases().await;
    });
}
