//! Measures how much faster decisions are without a Redis call for each: decisions per second, calls per decision and
//! latency, for one hot key and for keys of different popularity.
//!
//! *plain* makes one call per decision (an explicit time prevents sharing). *shared* is the default of a store: concurrent
//! checks of one key share a call. *leased* decides locally from leases. All requests are allowed; denials would be
//! cheaper.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tallygate::algorithm::Op;
use tallygate::store::Store as _;
use tallygate::{Decision, Policy, Tick};
use tallygate_bench::workload::quick;
use tallygate_redis::{Leases, OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

const ROUNDS: usize = 5;
const TASKS: u64 = 64;
const KEYS: usize = 10_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Plain,
    Shared,
    Leased,
}

const MODES: [(Mode, &str); 3] =
    [(Mode::Plain, "plain"), (Mode::Shared, "shared"), (Mode::Leased, "leased")];

struct Measured {
    per_second: f64,
    calls: f64,
    percentiles_us: [f64; 3],
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let server = Server::start(Flavor::Redis);
        println!("one hot key, {TASKS} tasks, one process");
        println!(
            "{:<10}{:>14}{:>16}{:>10}{:>10}{:>10}",
            "mode", "decisions/s", "calls/decision", "p50 µs", "p99 µs", "p99.9 µs"
        );
        let mut plain = 0.0;
        for (mode, name) in MODES {
            let best = best(&server, mode, &[1.0]).await?;
            let [p50, p99, p999] = best.percentiles_us;
            println!(
                "{name:<10}{:>14.0}{:>16.5}{p50:>10.1}{p99:>10.1}{p999:>10.1}",
                best.per_second, best.calls
            );
            if mode == Mode::Plain {
                plain = best.per_second;
            } else {
                println!("ratio hot-key {name} plain {:.1}", best.per_second / plain);
            }
        }
        println!(
            "\n{KEYS} keys, by skew: key k is checked 1/k^skew times as often as the first key"
        );
        println!(
            "{:<8}{:>14}{:>14}{:>8}{:>16}",
            "skew", "plain/s", "leased/s", "ratio", "calls/decision"
        );
        for skew in [0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0] {
            let popularity: Vec<f64> = (1..=KEYS).map(|rank| (rank as f64).powf(-skew)).collect();
            let plain = best(&server, Mode::Plain, &popularity).await?;
            let leased = best(&server, Mode::Leased, &popularity).await?;
            let ratio = leased.per_second / plain.per_second;
            println!(
                "{skew:<8}{:>14.0}{:>14.0}{ratio:>8.2}{:>16.4}",
                plain.per_second, leased.per_second, leased.calls
            );
        }
        Ok(())
    })
}

/// Returns the best of several rounds, each on an empty server.
async fn best(
    server: &Server,
    mode: Mode,
    popularity: &[f64],
) -> Result<Measured, Box<dyn std::error::Error>> {
    let mut best: Option<Measured> = None;
    for _ in 0..if quick() { 1 } else { ROUNDS } {
        server.ask::<()>(&["FLUSHALL"]);
        let options = Options::default().budget(Duration::from_secs(5));
        let redis = Redis::with(&server.url(), options)?;
        let store = redis.store("bench").on_failure(OnFailure::Deny);
        let store = if mode == Mode::Leased { store.leases(Leases::default()) } else { store };
        let measured = load(&redis, store, mode, popularity).await;
        if best.as_ref().is_none_or(|best| measured.per_second > best.per_second) {
            best = Some(measured);
        }
    }
    best.ok_or_else(|| "no round was run".into())
}

async fn load(redis: &Redis, store: RedisStore, mode: Mode, popularity: &[f64]) -> Measured {
    let length = Duration::from_millis(if quick() { 300 } else { 2000 });
    // Large enough to allow every request.
    let policy = Policy::token_bucket(360_000_000).per_hour().build().expect("the policy is valid");
    let policy = Arc::new(policy);
    let mut sum = 0.0;
    let cumulated: Arc<[f64]> = popularity
        .iter()
        .map(|weight| {
            sum += weight;
            sum
        })
        .collect();
    let names: Arc<[String]> = (0..popularity.len()).map(|key| format!("client-{key}")).collect();
    let before = redis.counts().calls;
    let start = Instant::now();
    let tasks = (0..TASKS).map(|task| {
        let (store, policy) = (store.clone(), policy.clone());
        let (cumulated, names) = (cumulated.clone(), names.clone());
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(task);
            let mut waits = Vec::new();
            let mut last = Instant::now();
            while last - start < length {
                let place = random.f64() * cumulated[cumulated.len() - 1];
                let key = cumulated.partition_point(|end| *end < place).min(names.len() - 1);
                let now = (mode == Mode::Plain).then(|| {
                    Tick(i64::try_from(start.elapsed().as_nanos()).expect("the time fits 63 bits"))
                });
                let name = names[key].as_bytes();
                let decision = store.apply::<Decision>(&*policy, name, Op::Check(1), now).await;
                assert!(decision.expect("the store decides").allowed, "a request was denied");
                let ended = Instant::now();
                waits.push(u32::try_from((ended - last).as_nanos()).unwrap_or(u32::MAX));
                last = ended;
                // A local decision does not yield to other tasks, so yield here.
                if waits.len().is_multiple_of(64) {
                    tokio::task::yield_now().await;
                    last = Instant::now();
                }
            }
            waits
        })
    });
    let mut waits: Vec<u32> = Vec::new();
    for task in join_all(tasks).await {
        waits.extend(task.expect("the task ends"));
    }
    let took = start.elapsed();
    let calls = redis.counts().calls - before;
    store.give_back_leases().await;
    waits.sort_unstable();
    let at = |per_mille: usize| {
        f64::from(waits[(waits.len() * per_mille / 1000).min(waits.len() - 1)]) / 1e3
    };
    Measured {
        per_second: waits.len() as f64 / took.as_secs_f64(),
        calls: calls as f64 / waits.len() as f64,
        percentiles_us: [at(500), at(990), at(999)],
    }
}
