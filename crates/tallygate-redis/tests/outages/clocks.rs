//! Clocks that differ: of a new primary, and of the processes.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::common::{PATIENCE, assert_all_expire, limiter, patient};
use tallygate::algorithm::{Op, Timed};
use tallygate::store::Store as _;
use tallygate::{Ask, Cost, Decision, Kind, Policy, Source, Tick, Ticks};
use tallygate_redis::{OnFailure, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

const SECOND: u64 = 1_000_000;
/// When the primary changes, in microseconds.
const START: i64 = 1_760_000_000_000_000;
const BURST: Cost = 10;

async fn check(store: &RedisStore, policy: &Policy, key: &str, cost: Cost, at: i64) -> Decision {
    let decision = store.apply::<Decision>(policy, key.as_bytes(), Op::Check(cost), Some(Tick(at)));
    let decision = decision.await.expect("a decision");
    assert_eq!(decision.source, Source::Store, "{:?}", store.redis().last_error());
    decision
}

/// Every kind, with windows shorter and longer than the clocks are apart.
fn policies() -> impl Iterator<Item = (Policy, i64)> {
    [1, 3, 60].into_iter().flat_map(|seconds| {
        Kind::ALL.into_iter().map(move |kind| {
            let window = seconds * SECOND;
            let policy = Policy::of(kind, BURST).per(Ticks(window)).build().expect("valid");
            (policy, i64::try_from(window).expect("small"))
        })
    })
}

/// Fault B5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_primary_whose_clock_is_behind_locks_no_client_out() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let behind = START - i64::try_from(5 * SECOND).unwrap();
    for (index, (policy, window)) in policies().enumerate() {
        let store = redis.store(format!("policy {index}")).on_failure(OnFailure::Deny).in_ticks();
        for key in ["at once", "later", "often"] {
            assert!(check(&store, &policy, key, BURST, START).await.allowed);
            assert!(!check(&store, &policy, key, 1, START).await.allowed);
        }
        // It takes one window to earn the used units back, and the other clock may cost one more window from when it
        // is first seen.
        for (key, first) in [("at once", behind), ("later", behind + 2 * window)] {
            let _ = check(&store, &policy, key, BURST, first).await;
            let decision = check(&store, &policy, key, BURST, first + 2 * window).await;
            assert!(decision.allowed, "{key}: {decision:?} {policy:?}");
        }
        let (mut now, mut allowed, by) = (behind, 0, behind + 2 * window);
        while now < by {
            let decision = check(&store, &policy, "often", 1, now).await;
            allowed += u64::from(decision.allowed);
            let wait = decision.retry_after.expect("it will fit");
            assert!(now.saturating_add_unsigned(wait.0) <= by, "{now}: {decision:?} {policy:?}");
            now += window / 8;
        }
        assert!(allowed > 0, "{policy:?}");
        assert!(allowed <= 2 * BURST, "{allowed} {policy:?}");
    }
    assert_all_expire(&server);
}

/// Fault B5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_primary_whose_clock_is_ahead_allows_at_most_one_extra_burst() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let ahead = START + i64::try_from(5 * SECOND).unwrap();
    for (index, (policy, _)) in policies().enumerate() {
        let store = redis.store(format!("policy {index}")).on_failure(OnFailure::Deny).in_ticks();
        // The old primary, the new one, and the old one again, at the same time.
        let mut allowed = [0; 3];
        for (place, at) in [START, ahead, START].into_iter().enumerate() {
            for _ in 0..3 * BURST {
                allowed[place] += u64::from(check(&store, &policy, "alice", 1, at).await.allowed);
            }
        }
        assert_eq!(allowed[0], BURST);
        assert!(allowed[1] + allowed[2] <= BURST, "{allowed:?} {policy:?}");
    }
    assert_all_expire(&server);
}

/// A library that sets the clock of a process ahead by a number of seconds.
const SHIFTED_CLOCK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *time) {
  static int (*real)(clockid_t, struct timespec *);
  if (!real) real = (int (*)(clockid_t, struct timespec *)) dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, time);
  const char *ahead = getenv("TALLYGATE_CLOCK_AHEAD");
  if (clock == CLOCK_REALTIME && ahead) time->tv_sec += atol(ahead);
  return result;
}
"#;

fn shifted_clock() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let name = format!("shifted-clock-{}", std::process::id());
    let (source, library) =
        (folder.join(format!("{name}.c")), folder.join(format!("lib{name}.so")));
    std::fs::write(&source, SHIFTED_CLOCK).expect("the folder is writable");
    let compiler = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .args([&library, &source])
        .arg("-ldl")
        .status()
        .expect("there is a C compiler: Rust links with it");
    assert!(compiler.success());
    std::fs::remove_file(&source).expect("it was just written");
    library
}

fn unix(time: SystemTime) -> Duration {
    time.duration_since(UNIX_EPOCH).expect("after 1970")
}

/// The number of checks per process, and the number that is allowed in all.
const ASKED: u64 = 25;
const SHARED: Cost = 30;

fn shared_policy() -> Policy {
    // One every two seconds: in thirty seconds, half of the burst.
    Policy::token_bucket(SHARED).per_minute().build().expect("valid")
}

/// Fault B6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_whose_clocks_differ_by_thirty_seconds_use_the_clock_of_the_server() {
    let server = Server::start(Flavor::Redis);
    let clock = shifted_clock();
    let start = Instant::now();
    let mut allowed = 0;
    for ahead in [0, 30, -30, 30] {
        let before = unix(SystemTime::now());
        let node = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "clocks::a_node", "--ignored", "--nocapture"])
            .env("TALLYGATE_CLOCK_AHEAD", ahead.to_string())
            .env("TALLYGATE_NODE_URL", server.url())
            .env("LD_PRELOAD", &clock)
            .output()
            .expect("this program runs");
        let after = unix(SystemTime::now());
        let said = String::from_utf8_lossy(&node.stdout);
        assert!(node.status.success(), "{said}{}", String::from_utf8_lossy(&node.stderr));
        let number = |name: &str| -> i64 {
            let (_, value) = said.split_once(name).expect("it says so");
            value.split_whitespace().next().expect("a number").parse().expect("a number")
        };
        let seconds = |time: Duration| i64::try_from(time.as_secs()).expect("small");
        let wall = number("wall=");
        assert!((wall - seconds(before) - ahead).abs() <= 2 + seconds(after - before), "{said}");
        assert!((seconds(before) - 1..=seconds(after) + 1).contains(&number("at=")), "{said}");
        allowed += u64::try_from(number("allowed=")).unwrap();
        assert_eq!(number("settled="), 1, "{ahead}: {said}");
    }
    std::fs::remove_file(&clock).unwrap();
    let earned = start.elapsed().as_secs() / 2 + 1;
    assert!((SHARED..=SHARED + earned).contains(&allowed), "{allowed} with {earned} earned");
    assert!(start.elapsed() < PATIENCE, "the burst would be earned back");
    assert_all_expire(&server);
}

/// One of these processes.
#[tokio::test]
#[ignore = "run by processes_whose_clocks_differ_by_thirty_seconds_use_the_clock_of_the_server"]
async fn a_node() {
    let redis = patient(&std::env::var("TALLYGATE_NODE_URL").expect("run by another test"));
    let limiter = limiter(&redis, shared_policy(), OnFailure::Deny);
    let mut allowed = 0;
    for _ in 0..ASKED {
        let decision = limiter.check("alice").await.unwrap();
        assert_eq!(decision.source, Source::Store);
        allowed += u64::from(decision.allowed);
    }
    let (store, policy) = (limiter.store(), shared_policy());
    let looked = store.apply::<Timed>(&policy, b"alice", Op::Peek(1), None).await.unwrap();
    // It can be settled for five seconds, by the clock of the server.
    let client = format!("client {}", std::process::id());
    let reserved =
        limiter.reserve(Ask::new(&client).cost(5), Duration::from_secs(5)).await.unwrap();
    let mut reservation = reserved.granted().expect("the quota is not used up");
    let settled = limiter.settle(&mut reservation, 2).await.unwrap();
    assert_eq!(settled.remaining, SHARED - 2);
    let wall = unix(SystemTime::now()).as_secs();
    let at = looked.at.0 / 1_000_000_000;
    println!("wall={wall} at={at} allowed={allowed} settled=1");
}
