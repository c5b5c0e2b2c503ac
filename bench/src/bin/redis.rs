//! Measures the Redis store: decisions per second, 99th percentiles, and server time per decision.
//!
//! The same rounds measure two rivals: a minimal GCRA script (TIME, GET, SET with PX; floating point, only an arrival time
//! as state, only yes or no as the answer), and Redis's INCR, which makes no decision. All have the same number of
//! connections and of calls in flight.

use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use redis::Value;
use redis::aio::MultiplexedConnection;
use tallygate::{Kind, Policy, RateLimiter};
use tallygate_bench::workload::quick;
use tallygate_redis::{OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

const ROUNDS: usize = 5;
/// The number of short rounds. Other load on the machine disturbs most of them, so there are many.
const COST_ROUNDS: usize = 15;
const CLIENTS: u64 = 10_000;

/// The smallest script that limits a rate.
const MINIMAL_GCRA: &str = "
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local tat = tonumber(redis.call('GET', KEYS[1]) or now)
if tat < now then tat = now end
local new = tat + tonumber(ARGV[1])
if new - now > tonumber(ARGV[2]) then return 0 end
redis.call('SET', KEYS[1], string.format('%.0f', new), 'PX', math.ceil((new - now) / 1000))
return 1";

type Limiter = RateLimiter<Policy, RedisStore>;

#[derive(Clone)]
enum Entrant {
    Tallygate(Arc<Limiter>),
    Minimal { connections: Vec<MultiplexedConnection>, hash: Arc<str> },
    Incr { connections: Vec<MultiplexedConnection> },
}

impl Entrant {
    const fn name(&self) -> &'static str {
        match self {
            Self::Tallygate(_) => "tallygate",
            Self::Minimal { .. } => "minimal-gcra",
            Self::Incr { .. } => "incr",
        }
    }

    /// Checks a client, which must be allowed.
    async fn check(&self, task: usize, client: u64) {
        let key = format!("client-{client}");
        match self {
            Self::Tallygate(limiter) => {
                let decision = limiter.check(&key).await.expect("the limiter decides");
                assert!(decision.allowed && decision.source.name() == "store", "{decision:?}");
            }
            Self::Minimal { connections, hash } => {
                let mut call = redis::cmd("EVALSHA");
                call.arg(&**hash).arg(1).arg(key).arg(INTERVAL).arg(BURST);
                let mut connection = connections[task % connections.len()].clone();
                let reply = connection.send_packed_command(&call).await.expect("Redis replies");
                assert_eq!(reply, Value::Int(1));
            }
            Self::Incr { connections } => {
                let mut connection = connections[task % connections.len()].clone();
                let call = redis::cmd("INCR").arg(key).take();
                assert!(matches!(connection.send_packed_command(&call).await, Ok(Value::Int(_))));
            }
        }
    }
}

/// One request per 10 µs, with a burst of an hour, so that every request is allowed.
const INTERVAL: u64 = 10;
const BURST: u64 = 3_600_000_000;

fn policy(kind: Kind) -> Policy {
    // A log stores one entry per request: 20 to 40 during the measurement.
    let limit = if kind == Kind::SlidingWindowLog { 1000 } else { 360_000_000 };
    Policy::of(kind, limit).per_hour().build().expect("the policy is valid")
}

struct Measured {
    per_second: f64,
    p99_us: f64,
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(async {
        for flavor in Flavor::ALL {
            let server = Server::start(flavor);
            if flavor == Flavor::Redis && std::env::args().nth(1).as_deref() != Some("costs") {
                println!("decisions per second and p99, {}", flavor.name());
                println!(
                    "{:<18}{:>12}{:>10}{:>16}{:>10}{:>12}{:>10}",
                    "case", "tallygate", "p99 µs", "minimal-gcra", "p99 µs", "incr", "p99 µs"
                );
                for connections in [1, 8] {
                    for in_flight in [1, 16, 256] {
                        contest(&server, connections, in_flight).await?;
                    }
                }
            }
            println!("server time, {} (from INFO commandstats), µs per call", flavor.name());
            costs(&server).await?;
        }
        Ok(())
    })
}

async fn contest(
    server: &Server,
    connections: usize,
    in_flight: usize,
) -> Result<(), Box<dyn std::error::Error>> {
    let entrants = entrants(server, connections, Kind::TokenBucket).await?;
    let mut best: Vec<Measured> = Vec::new();
    let rounds = if quick() { 1 } else { ROUNDS };
    for round in 0..rounds {
        for (index, entrant) in entrants.iter().enumerate() {
            server.ask::<()>(&["FLUSHALL"]);
            let measured = load(entrant, in_flight).await;
            if round == 0 {
                best.push(measured);
            } else if measured.per_second > best[index].per_second {
                best[index] = measured;
            }
        }
    }
    let case = format!("c{connections}-inflight{in_flight}");
    print!("{case:<18}");
    for (measured, widths) in best.iter().zip([(12, 10), (16, 10), (12, 10)]) {
        print!(
            "{:>w$.0}{:>p$.0}",
            measured.per_second,
            measured.p99_us,
            w = widths.0,
            p = widths.1
        );
    }
    println!();
    for (entrant, measured) in entrants.iter().zip(&best).skip(1) {
        println!("ratio {case} {} {:.2}", entrant.name(), best[0].per_second / measured.per_second);
    }
    Ok(())
}

async fn entrants(
    server: &Server,
    connections: usize,
    kind: Kind,
) -> Result<Vec<Entrant>, Box<dyn std::error::Error>> {
    let options = Options::default().connections(connections).budget(Duration::from_secs(5));
    let redis = Redis::with(&server.url(), options)?;
    let store = redis.store("bench").on_failure(OnFailure::Deny);
    let limiter = Arc::new(RateLimiter::with_store(policy(kind), store));
    let client = redis::Client::open(server.url())?;
    let mut links = Vec::new();
    for _ in 0..connections {
        links.push(client.get_multiplexed_async_connection().await?);
    }
    let load = redis::cmd("SCRIPT").arg("LOAD").arg(MINIMAL_GCRA).take();
    let hash = match links[0].send_packed_command(&load).await? {
        Value::BulkString(hash) => String::from_utf8(hash)?.into(),
        other => return Err(format!("SCRIPT LOAD returned {other:?}").into()),
    };
    Ok(vec![
        Entrant::Tallygate(limiter),
        Entrant::Minimal { connections: links.clone(), hash },
        Entrant::Incr { connections: links },
    ])
}

/// Runs `in_flight` tasks; each sends the next request after the reply to the last one.
async fn load(entrant: &Entrant, in_flight: usize) -> Measured {
    let length = Duration::from_millis(if quick() { 100 } else { 1000 });
    entrant.check(0, 0).await;
    let start = Instant::now();
    let tasks = (0..in_flight).map(|task| {
        let entrant = entrant.clone();
        tokio::spawn(async move {
            let mut random = fastrand::Rng::with_seed(task as u64);
            let mut waits = Vec::new();
            while start.elapsed() < length {
                let sent = Instant::now();
                entrant.check(task, random.u64(0..CLIENTS)).await;
                waits.push(sent.elapsed());
            }
            waits
        })
    });
    let mut waits: Vec<Duration> = Vec::new();
    for task in join_all(tasks).await {
        waits.extend(task.expect("the task ends"));
    }
    let took = start.elapsed();
    waits.sort_unstable();
    Measured {
        per_second: waits.len() as f64 / took.as_secs_f64(),
        p99_us: waits[waits.len() * 99 / 100].as_secs_f64() * 1e6,
    }
}

/// Measures the server time per call, as the server reports it: the best of several rounds with all entrants.
async fn costs(server: &Server) -> Result<(), Box<dyn std::error::Error>> {
    let mut best: Vec<(String, f64, f64)> = Vec::new();
    for _ in 0..if quick() { 1 } else { COST_ROUNDS } {
        let minimal = entrants(server, 1, Kind::TokenBucket).await?.swap_remove(1);
        let incr = entrants(server, 1, Kind::TokenBucket).await?.swap_remove(2);
        let mut measured = vec![cost(server, "minimal-gcra", &minimal, "evalsha").await];
        measured.push(cost(server, "incr", &incr, "incr").await);
        for kind in Kind::ALL {
            let tallygate = entrants(server, 1, kind).await?.swap_remove(0);
            measured.push(cost(server, kind.name(), &tallygate, "evalsha").await);
        }
        for (index, found) in measured.into_iter().enumerate() {
            match best.get_mut(index) {
                None => best.push(found),
                Some(before) if found.1 < before.1 => *before = found,
                Some(_) => {}
            }
        }
    }
    let minimal = best[0].1;
    for (name, micros, calls) in &best {
        println!("{name:<24}{micros:>8.2} µs{calls:>8.3} calls per decision");
    }
    for (name, micros, _) in &best[2..] {
        println!(
            "ratio server-cost-{name}-{} minimal-gcra {:.2}",
            server.flavor().name(),
            micros / minimal
        );
    }
    Ok(())
}

async fn cost(server: &Server, name: &str, entrant: &Entrant, command: &str) -> (String, f64, f64) {
    const CALLS: u64 = 4000;
    server.ask::<()>(&["FLUSHALL"]);
    // In the second round, every client and the script are known.
    let calls = CALLS;
    for round in [0, 1] {
        if round == 1 {
            server.ask::<()>(&["CONFIG", "RESETSTAT"]);
        }
        for chunk in (0..calls).collect::<Vec<_>>().chunks(64) {
            join_all(chunk.iter().map(|call| entrant.check(0, call % 200))).await;
        }
    }
    let stats = server.info("commandstats");
    let stat = &stats[&format!("cmdstat_{command}")];
    let field = |name: &str| -> f64 {
        let value = stat.split(',').find_map(|field| field.strip_prefix(name));
        value
            .and_then(|value| value.strip_prefix('='))
            .expect("the field exists")
            .parse()
            .expect("the field is a number")
    };
    let sent: f64 = field("calls");
    (name.to_owned(), field("usec_per_call"), sent / calls as f64)
}
