//! The load: a fleet that checks a few keys as fast as it can, and records every decision.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use tallygate::{Ask, Decision, Kind, Policy, RateLimiter, Source, Ticks};
use tallygate_redis::{Counts, OnFailure, Options, Redis, RedisStore};
use tallygate_testkit::servers::wait_until;
use tokio::runtime::Runtime;
use tokio::task::JoinHandle;

use crate::history::{Admission, Excuse, Quota, longest_gap};

/// The number of tasks that check.
const TASKS: usize = 8;
/// The number of Redis clients that they share: each represents a process.
const PROCESSES: usize = 4;
/// The number of keys that they check.
pub(crate) const KEYS: usize = 4;
/// How long a decision may take beyond its time budget, on a busy machine.
const SLACK: Duration = Duration::from_millis(500);
/// How long it may take until the store decides again.
const PATIENCE: Duration = Duration::from_secs(20);
/// An additional key whose charged units can be counted exactly afterwards: its quota is never used up, and nothing is
/// earned back while a test runs.
pub(crate) const METER: &str = "meter";

/// A running fleet.
pub(crate) struct Load {
    begin: Instant,
    runtime: Runtime,
    tasks: Vec<JoinHandle<Vec<Observed>>>,
    processes: Vec<Process>,
    shared: Arc<Shared>,
    quota: Quota,
    budget: Duration,
    excuses: Vec<(Excuse, Vec<usize>)>,
    random: fastrand::Rng,
}

/// One process of the fleet.
#[derive(Clone)]
struct Process {
    redis: Redis,
    api: Arc<RateLimiter<Policy, RedisStore>>,
    meter: Arc<RateLimiter<Policy, RedisStore>>,
}

#[derive(Default)]
struct Shared {
    is_over: AtomicBool,
    /// When the store last decided on each key, in nanoseconds since the load began.
    decided: [AtomicU64; KEYS],
}

/// One decision.
struct Observed {
    /// `None` for the meter.
    key: Option<usize>,
    cost: u64,
    call: Duration,
    reply: Duration,
    decision: Decision,
}

/// The result of a load.
#[derive(Debug)]
pub(crate) struct Outcome {
    /// By how many units the worst interval of any key exceeds its bound.
    pub(crate) over: u64,
    /// The longest time in which the store decided nothing on a key.
    pub(crate) gap: Duration,
    /// The time of the slowest decision.
    pub(crate) slowest: Duration,
    pub(crate) allowed: usize,
    /// Decisions that the store did not make.
    pub(crate) failed: usize,
    /// The units that were charged to the meter, less the allowed units.
    pub(crate) charged_too_much: i64,
    /// The counts of each process.
    pub(crate) counts: Vec<Counts>,
    /// Expectations that were not met.
    pub(crate) complaints: Vec<String>,
}

impl Outcome {
    pub(crate) fn must(&mut self, holds: bool, what: &str) {
        if !holds {
            self.complaints.push(what.into());
        }
    }

    /// Requires that the fault was invisible: the store made every decision, and charged exactly what it allowed.
    pub(crate) fn must_not_show(&mut self) {
        self.must(self.failed == 0, "the store decides everything");
        self.must(self.charged_too_much == 0, "exactly the allowed units were charged");
    }
}

pub(crate) fn key(index: usize) -> String {
    format!("client {index}")
}

impl Load {
    /// Starts the fleet. Its processes use the addresses in turn.
    pub(crate) fn start(
        addresses: &[String],
        budget: Duration,
        random: &mut fastrand::Rng,
    ) -> Self {
        let window = Duration::from_secs(1);
        let quota = Quota { burst: random.u64(20..=100), limit: random.u64(50..=200), window };
        let policy = policy(quota, random);
        let meter = Policy::token_bucket(1).per_hour().burst(1_000_000);
        let meter = meter.named(METER).build().expect("a valid policy");
        let processes: Vec<Process> = (0..PROCESSES)
            .map(|index| {
                let options = Options::default().budget(budget).slot_secret("of the chaos");
                let redis = Redis::with(&addresses[index % addresses.len()], options)
                    .expect("a valid address");
                let limiter = |policy: &Policy| {
                    let store =
                        redis.store(policy.name()).on_failure(OnFailure::Deny).deny_cache(false);
                    Arc::new(RateLimiter::with_store(policy.clone(), store))
                };
                Process { api: limiter(&policy), meter: limiter(&meter), redis: redis.clone() }
            })
            .collect();
        let runtime = Runtime::new().expect("threads can be started");
        let (shared, begin) = (Arc::new(Shared::default()), Instant::now());
        let tasks = (0..TASKS).map(|task| {
            let process = processes[task % PROCESSES].clone();
            runtime.spawn(ask(process, shared.clone(), begin, random.fork()))
        });
        let tasks = tasks.collect();
        let random = random.fork();
        Self {
            begin,
            runtime,
            tasks,
            processes,
            shared,
            quota,
            budget,
            excuses: Vec::new(),
            random,
        }
    }

    /// Runs until the store has decided on every key, and a random time longer.
    pub(crate) fn until_some_moment(&mut self) {
        self.until_all_are_decided_again();
        self.run_for(200, 600);
    }

    /// Runs for a random time between two bounds, in milliseconds.
    pub(crate) fn run_for(&mut self, least: u64, most: u64) {
        thread::sleep(Duration::from_millis(self.random.u64(least..=most)));
    }

    /// Runs until the store has decided on every key since now.
    pub(crate) fn until_all_are_decided_again(&self) {
        let now = self.begin.elapsed();
        wait_until("the store decides on every key", PATIENCE, || {
            self.shared
                .decided
                .iter()
                .all(|decided| Duration::from_nanos(decided.load(Ordering::Relaxed)) > now)
        });
    }

    /// Waits until every process has left its first connection.
    pub(crate) fn until_all_have_reconnected(&self) {
        wait_until("every process leaves the old primary", PATIENCE, || {
            self.processes.iter().all(|process| process.redis.counts().connections > 1)
        });
    }

    /// Causes a fault that may cost one burst of all keys.
    pub(crate) fn losing_a_burst<T>(&mut self, fault: impl FnOnce() -> T) -> T {
        self.losing_a_burst_of(&(0..KEYS).collect::<Vec<_>>(), fault)
    }

    /// Causes a fault that may cost one burst of some keys.
    pub(crate) fn losing_a_burst_of<T>(&mut self, keys: &[usize], fault: impl FnOnce() -> T) -> T {
        let from = self.begin.elapsed();
        let done = fault();
        let excuse = Excuse { from, to: self.begin.elapsed(), refills: false };
        self.excuses.push((excuse, keys.to_vec()));
        done
    }

    /// Causes a fault during which every key has two buckets.
    pub(crate) fn splitting(&mut self, fault: impl FnOnce(&mut Self)) {
        let from = self.begin.elapsed();
        fault(self);
        let excuse = Excuse { from, to: self.begin.elapsed(), refills: true };
        self.excuses.push((excuse, (0..KEYS).collect()));
    }

    /// Runs until the store decides again and a random time longer, stops the fleet, and checks the decisions.
    pub(crate) fn end(mut self) -> Outcome {
        self.until_all_are_decided_again();
        self.run_for(200, 400);
        self.shared.is_over.store(true, Ordering::Relaxed);
        let Self { runtime, tasks, processes, quota, budget, excuses, .. } = self;
        let ended = tasks.into_iter().map(|task| runtime.block_on(task));
        let decisions: Vec<Observed> =
            ended.flat_map(|observed| observed.expect("nothing panics")).collect();
        let end = self.begin.elapsed();

        let (mut over, mut gap) = (0, Duration::ZERO);
        for key in 0..KEYS {
            let of_key = || decisions.iter().filter(|observed| observed.key == Some(key));
            let admissions: Vec<_> = of_key().filter_map(Observed::admission).collect();
            let excuses = excuses.iter().filter(|(_, keys)| keys.contains(&key));
            let excuses: Vec<_> = excuses.map(|(excuse, _)| *excuse).collect();
            over = over.max(quota.over(&admissions, &excuses));
            let decided: Vec<_> = of_key()
                .filter(|observed| observed.is_decided())
                .map(|observed| observed.reply)
                .collect();
            gap = gap.max(longest_gap(&decided, end));
        }
        let slowest = decisions
            .iter()
            .map(|observed| observed.reply - observed.call)
            .max()
            .expect("at least one decision");
        let meter = runtime
            .block_on(processes[0].meter.peek(Ask::new(METER).cost(0)))
            .expect("a short key");
        let of_meter =
            decisions.iter().filter(|observed| observed.key.is_none() && observed.decision.allowed);
        let on_meter: u64 = of_meter.map(|observed| observed.cost).sum();
        let mut outcome = Outcome {
            over,
            gap,
            slowest,
            allowed: decisions.iter().filter(|observed| observed.decision.allowed).count(),
            failed: decisions.iter().filter(|observed| !observed.is_decided()).count(),
            charged_too_much: (meter.limit - meter.remaining).cast_signed()
                - on_meter.cast_signed(),
            counts: processes.iter().map(|process| process.redis.counts()).collect(),
            complaints: Vec::new(),
        };
        outcome.must(slowest < budget + SLACK, "decisions keep within their time budget");
        outcome
    }
}

impl Observed {
    fn is_decided(&self) -> bool {
        self.decision.source == Source::Store
    }

    fn admission(&self) -> Option<Admission> {
        let Self { cost, call, reply, .. } = *self;
        self.decision.allowed.then_some(Admission { call, reply, cost })
    }
}

/// Returns a bucket of a random kind, alone or beside a limit that never denies, which uses another script.
fn policy(quota: Quota, random: &mut fastrand::Rng) -> Policy {
    let window = Ticks(nanoseconds(quota.window));
    let kind = [Kind::TokenBucket, Kind::Gcra, Kind::LeakyBucket][random.usize(0..3)];
    let bucket = Policy::of(kind, quota.limit).per(window).burst(quota.burst);
    if random.bool() {
        return bucket.named("api").build().expect("a valid policy");
    }
    let loose = Policy::fixed_window(1_000_000).per_hour().named("loose");
    Policy::all_of("api", [bucket.named("tight"), loose]).expect("a valid policy")
}

async fn ask(
    process: Process,
    shared: Arc<Shared>,
    begin: Instant,
    mut random: fastrand::Rng,
) -> Vec<Observed> {
    let mut all = Vec::new();
    while !shared.is_over.load(Ordering::Relaxed) {
        let key_index = Some(random.usize(0..=KEYS)).filter(|key| *key < KEYS);
        let cost = if random.u8(0..4) == 0 { random.u64(2..=3) } else { 1 };
        let call = begin.elapsed();
        let decision = match key_index {
            Some(index) => process.api.check(Ask::new(&key(index)).cost(cost)).await,
            None => process.meter.check(Ask::new(METER).cost(cost)).await,
        };
        let reply = begin.elapsed();
        let decision = decision.expect("failures are denials");
        if decision.source == Source::Store {
            if let Some(key) = key_index {
                shared.decided[key].store(nanoseconds(reply), Ordering::Relaxed);
            }
        } else {
            // It was denied without a round trip: without a pause, no other task would run.
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        all.push(Observed { key: key_index, cost, call, reply, decision });
    }
    all
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).expect("a load of seconds")
}
