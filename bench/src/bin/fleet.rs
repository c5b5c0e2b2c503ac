//! What it buys not to ask Redis for each decision: decisions a second, calls a decision and how long they take, on one
//! hot key and over keys of which some are more popular than others.
//!
//! *plain* is a call a decision (the time is given, so nothing is shared), *shared* is what a store does by itself
//! (checks of one key at one time are one call), *leased* takes slices. All are admitted: refusals would be cheaper.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use tallygate::{Decision, Op, Policy, Store as _, Tick};
use tallygate_bench::workload::quick;
use tallygate_redis::{Leases, OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

const ROUNDS: usize = 5;
const LANES: u64 = 64;
const KEYS: usize = 10_000;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    Plain,
    Shared,
    Leased,
}

const WAYS: [(Way, &str); 3] =
    [(Way::Plain, "plain"), (Way::Shared, "shared"), (Way::Leased, "leased")];

struct Measured {
    per_second: f64,
    calls: f64,
    percentiles_us: [f64; 3],
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        let server = Server::start(Flavor::Redis);
        println!("one hot key, {LANES} lanes, one process");
        println!(
            "{:<10}{:>14}{:>16}{:>10}{:>10}{:>10}",
            "way", "decisions/s", "calls/decision", "p50 µs", "p99 µs", "p99.9 µs"
        );
        let mut plain = 0.0;
        for (way, name) in WAYS {
            let best = best(&server, way, &[1.0]).await?;
            let [p50, p99, p999] = best.percentiles_us;
            println!(
                "{name:<10}{:>14.0}{:>16.5}{p50:>10.1}{p99:>10.1}{p999:>10.1}",
                best.per_second, best.calls
            );
            if way == Way::Plain {
                plain = best.per_second;
            } else {
                println!("ratio hot-key {name} plain {:.1}", best.per_second / plain);
            }
        }
        println!("\n{KEYS} keys, by skew: the k-th is asked for 1/k^skew as often as the first");
        println!(
            "{:<8}{:>14}{:>14}{:>8}{:>16}",
            "skew", "plain/s", "leased/s", "ratio", "calls/decision"
        );
        for skew in [0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0] {
            let popularity: Vec<f64> = (1..=KEYS).map(|rank| (rank as f64).powf(-skew)).collect();
            let plain = best(&server, Way::Plain, &popularity).await?;
            let leased = best(&server, Way::Leased, &popularity).await?;
            let ratio = leased.per_second / plain.per_second;
            println!(
                "{skew:<8}{:>14.0}{:>14.0}{ratio:>8.2}{:>16.4}",
                plain.per_second, leased.per_second, leased.calls
            );
        }
        Ok(())
    })
}

/// The best of some rounds, each on an empty server.
async fn best(
    server: &Server,
    way: Way,
    popularity: &[f64],
) -> Result<Measured, Box<dyn std::error::Error>> {
    let mut best: Option<Measured> = None;
    for _ in 0..if quick() { 1 } else { ROUNDS } {
        server.ask::<()>(&["FLUSHALL"]);
        let options = Options::default().budget(Duration::from_secs(5));
        let redis = Redis::with(&server.url(), options)?;
        let store = redis.store("bench").on_failure(OnFailure::Deny);
        let store = if way == Way::Leased { store.leases(Leases::default()) } else { store };
        let measured = load(&redis, store, way, popularity).await;
        if best.as_ref().is_none_or(|best| measured.per_second > best.per_second) {
            best = Some(measured);
        }
    }
    best.ok_or_else(|| "no round".into())
}

async fn load(redis: &Redis, store: RedisStore, way: Way, popularity: &[f64]) -> Measured {
    let length = Duration::from_millis(if quick() { 300 } else { 2000 });
    // So much that all are admitted.
    let policy = Policy::token_bucket(360_000_000).per_hour().build().expect("a policy");
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
    let lanes = (0..LANES).map(|lane| {
        let (store, policy) = (store.clone(), policy.clone());
        let (cumulated, names) = (cumulated.clone(), names.clone());
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(lane);
            let mut waits = Vec::new();
            let mut last = Instant::now();
            while last - start < length {
                let place = random.f64() * cumulated[cumulated.len() - 1];
                let key = cumulated.partition_point(|end| *end < place).min(names.len() - 1);
                let now = (way == Way::Plain).then(|| {
                    Tick(i64::try_from(start.elapsed().as_nanos()).expect("it is not so long"))
                });
                let name = names[key].as_bytes();
                let told = store.apply::<Decision>(&*policy, name, Op::Check(1), now).await;
                assert!(told.expect("a decision").allowed, "all are admitted");
                let ended = Instant::now();
                waits.push(u32::try_from((ended - last).as_nanos()).unwrap_or(u32::MAX));
                last = ended;
                // What is answered at once does not let others have their turn by itself.
                if waits.len().is_multiple_of(64) {
                    tokio::task::yield_now().await;
                    last = Instant::now();
                }
            }
            waits
        })
    });
    let mut waits: Vec<u32> = Vec::new();
    for lane in join_all(lanes).await {
        waits.extend(lane.expect("a lane that ends"));
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
