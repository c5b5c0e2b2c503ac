//! Eight processes share one quota: together they are allowed exactly as much as one process.
//!
//! The processes are this test binary itself, which runs [`one_of_the_processes`] or [`one_of_the_processes_with_tiers`].

use std::env;
use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use futures_util::future::join_all;
use tallygate::{Ask, Kind, Policy, RateLimiter, Source, Ticks, Tiers};
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Proxy, Server};

const PROCESSES: usize = 8;
/// The number of concurrent callers per process.
const TASKS: usize = 4;
const LIMIT: u64 = 1000;
/// The limits of a client under two tiers.
const BASE_LIMIT: u64 = 100;
const PRO_LIMIT: u64 = 150;
/// Longer than the test runs: nothing is earned back, and no window ends.
const WINDOW: Ticks = Ticks(1000 * 86_400 * 1_000_000_000);
/// The variable with the address of the server.
const ADDRESS: &str = "TALLYGATE_PROCESSES_ADDRESS";

#[test]
fn eight_processes_get_exactly_the_bound_on_redis() {
    share_one_quota(Flavor::Redis);
}

#[test]
fn eight_processes_get_exactly_the_bound_on_valkey() {
    share_one_quota(Flavor::Valkey);
}

/// Fault J1.
#[test]
fn callers_of_several_processes_under_alternating_tiers_get_exactly_the_quota() {
    for round_trip in [Duration::ZERO, Duration::from_millis(20)] {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        proxy.delay(round_trip);
        let mut processes: Vec<Process> = (0..PROCESSES)
            .map(|_| Process::start("processes::one_of_the_processes_with_tiers", &proxy.url()))
            .collect();
        processes.iter_mut().for_each(|process| assert_eq!(process.hear(), "ready"));
        processes.iter_mut().for_each(Process::go);
        let heard = processes.iter_mut().map(Process::hear);
        let allowed: u64 = heard.map(|said| said.parse::<u64>().expect("a number")).sum();
        // A unit that is charged under one tier is charged under the other as well: the larger quota bounds both.
        assert_eq!(allowed, PRO_LIMIT, "at a round trip of {round_trip:?}");
        for mut process in processes {
            assert!(process.child.wait().expect("it is our child").success());
        }
    }
}

/// Runs 125 callers under alternating tiers: a thousand in all processes.
#[test]
#[ignore = "run by the test above, as a process of its own"]
fn one_of_the_processes_with_tiers() {
    let Ok(address) = env::var(ADDRESS) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    // Eight processes on one machine also wait for a processor.
    let options = Options::default().budget(Duration::from_secs(2));
    let redis = Redis::with(&address, options).unwrap();
    let policy = |limit| Policy::fixed_window(limit).per(WINDOW).build().unwrap();
    let tiers = Tiers::new(policy(BASE_LIMIT)).tier("pro", policy(PRO_LIMIT));
    let limiter = RateLimiter::in_store("api", tiers, redis.store("api"));
    runtime.block_on(async { while redis.ping().await.is_err() {} });
    println!("says: ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let limiter = &limiter;
    let callers = (0..125).map(|caller| async move {
        let tier = (caller % 2 == 1).then_some("pro");
        limiter.check(Ask::new("hot").tier(tier)).await.unwrap()
    });
    let decisions = runtime.block_on(join_all(callers));
    for decision in &decisions {
        // A denial of the server may be cached when another caller checks.
        let is_denied =
            matches!(decision.source, Source::Overloaded | Source::DenyCache) && !decision.allowed;
        assert!(decision.source == Source::Store || is_denied, "{decision:?}");
    }
    assert_eq!(redis.counts().breaker_opened, 0);
    println!("says: {}", decisions.iter().filter(|decision| decision.allowed).count());
}

fn share_one_quota(flavor: Flavor) {
    let server = Server::start(flavor);
    let mut processes: Vec<Process> = (0..PROCESSES)
        .map(|_| Process::start("processes::one_of_the_processes", &server.url()))
        .collect();
    // All at once, for each algorithm.
    for kind in Kind::ALL {
        processes
            .iter_mut()
            .for_each(|process| assert_eq!(process.hear(), format!("ready {kind}")));
        processes.iter_mut().for_each(Process::go);
        let allowed: Vec<u64> = processes
            .iter_mut()
            .map(|process| process.hear().parse().expect("what it was allowed"))
            .collect();
        assert_eq!(allowed.iter().sum::<u64>(), LIMIT, "{kind}: {allowed:?}");
        let served = allowed.iter().filter(|allowed| **allowed > 0).count();
        assert!(served > 1, "{kind}: they did not ask at once: {allowed:?}");
    }
    for mut process in processes {
        assert!(process.child.wait().expect("it is our child").success());
    }
    let keys: Vec<String> = server.ask(&["KEYS", "*"]);
    assert_eq!(keys.len(), Kind::ALL.len(), "one key an algorithm: {keys:?}");
    assert_eq!(server.keys_without_ttl(), Vec::<Vec<u8>>::new());
}

/// A child process.
struct Process {
    child: Child,
    says: BufReader<std::process::ChildStdout>,
}

impl Process {
    fn start(test: &str, address: &str) -> Self {
        let mut child = Command::new(env::current_exe().expect("this program has a path"))
            .args([test, "--exact", "--ignored", "--nocapture", "-q"])
            .env(ADDRESS, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("this program can be run again");
        let says = BufReader::new(child.stdout.take().expect("it is piped"));
        Self { child, says }
    }

    /// Waits for its next line, and skips the lines of the test harness.
    fn hear(&mut self) -> String {
        let mut line = String::new();
        loop {
            line.clear();
            let length = self.says.read_line(&mut line).expect("what it says is text");
            assert!(length > 0, "a process has ended: {:?}", self.child.wait());
            if let Some((_, said)) = line.split_once("says: ") {
                return said.trim().to_owned();
            }
        }
    }

    fn go(&mut self) {
        let stdin = self.child.stdin.as_mut().expect("it is piped");
        stdin.write_all(b"go\n").expect("it listens");
    }
}

/// Checks the key of each algorithm until it is denied.
#[test]
#[ignore = "run by the tests above, as a process of its own"]
fn one_of_the_processes() {
    let Ok(address) = env::var(ADDRESS) else { return };
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let redis = Redis::with(&address, Options::default().budget(Duration::from_secs(20))).unwrap();
    for kind in Kind::ALL {
        let policy = Policy::of(kind, LIMIT).per(WINDOW).named(kind.name()).build().unwrap();
        let store = redis.store(kind.name()).on_failure(OnFailure::Deny).deny_cache(false);
        let limiter = RateLimiter::with_store(policy, store);
        // It is connected then, and no process has started.
        assert_eq!(
            runtime.block_on(limiter.peek(Ask::new("hot").cost(0))).unwrap().remaining,
            LIMIT
        );
        println!("says: ready {kind}");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        let allowed = runtime.block_on(join_all((0..TASKS).map(|_| until_denied(&limiter))));
        println!("says: {}", allowed.iter().sum::<u64>());
    }
}

async fn until_denied(limiter: &RateLimiter<Policy, RedisStore>) -> u64 {
    let mut allowed = 0;
    loop {
        let decision = limiter.check("hot").await.expect("failures are denials");
        assert_eq!(decision.source, Source::Store);
        if !decision.allowed {
            return allowed;
        }
        allowed += 1;
    }
}
