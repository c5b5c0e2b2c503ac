//! Fault J16 for windows: repeated outages with `local` on a real server, under limits that forget at the end of a window.

use std::time::{Duration, Instant};

use crate::common::{assert_all_expire, patient, until};
use futures_util::future::join_all;
use tallygate::algorithm::{Op, Timed};
use tallygate::policy::Anchor;
use tallygate::store::Store as _;
use tallygate::tiers::ClientRule;
use tallygate::{Kind, Limit, Policy, Source, Tick, Ticks};
use tallygate_redis::{OnFailure, Redis, RedisStore};
use tallygate_testkit::servers::{Flavor, Proxy, Server};

const LIMIT: u64 = 40;

fn policies(window: Duration) -> [Policy; 4] {
    let window = Ticks::from_duration(window);
    [
        Policy::fixed_window(LIMIT).per(window),
        Policy::fixed_window(LIMIT).per(window).anchor(Anchor::FirstRequest),
        Policy::sliding_window_log(LIMIT).per(window),
        Policy::sliding_window_counter(LIMIT).per(window),
    ]
    .map(|policy| policy.build().unwrap())
}

/// Returns by how many units the worst of all intervals exceeds the bound of a policy of one window.
fn most_beyond_the_bound(policy: &Policy, allowed_at: Vec<i64>) -> i64 {
    most_beyond_the_bound_of(&policy.limits()[0], allowed_at)
}

/// Returns the same for one limit, which is a window.
fn most_beyond_the_bound_of(limit: &Limit, mut allowed_at: Vec<i64>) -> i64 {
    let numbers = *limit.numbers();
    let (limit, window) = (numbers.limit.cast_signed(), numbers.window.0.cast_signed());
    allowed_at.sort_unstable();
    let mut most = i64::MIN;
    for (first, from) in allowed_at.iter().enumerate() {
        for (until, units) in allowed_at[first..].iter().zip(1..) {
            let windows = match numbers.kind {
                Kind::SlidingWindowLog => (until - from) / window + 1,
                // Windows that begin at any time.
                Kind::FixedWindow if numbers.anchor == Anchor::FirstRequest => {
                    (until - from) / window + 2
                }
                _ => until.div_euclid(window) - from.div_euclid(window) + 1,
            };
            most = most.max(units - windows * limit);
        }
    }
    most
}

/// One process of a fleet, with its store.
struct Process {
    store: RedisStore,
    policy: Policy,
    /// Whether it checks under the rule of a client.
    is_tiered: bool,
}

impl Process {
    fn new(redis: &Redis, name: &str, policy: &Policy, instances: u32) -> Self {
        let on_failure = OnFailure::Local { instances };
        let store = redis.store(name).on_failure(on_failure).deny_cache(false);
        Self { store, policy: policy.clone(), is_tiered: false }
    }

    async fn apply(&self, op: Op, now: Option<Tick>) -> Timed {
        if self.is_tiered {
            let rule = ClientRule::of(self.policy.clone());
            return self.store.apply::<Timed>(&rule, b"alice", op, now).await.unwrap();
        }
        self.store.apply::<Timed>(&self.policy, b"alice", op, now).await.unwrap()
    }

    /// Waits until Redis answers this process, and has charged the units that the process allowed by itself.
    async fn until_redis_answers(&self, now: Tick) {
        until("the store answers", async || {
            let timed = self.apply(Op::Peek(0), Some(now)).await;
            (timed.decision.source == Source::Store).then_some(())
        })
        .await;
    }

    /// Checks until a request is denied. Returns how many were allowed. All decisions have the same source.
    async fn use_all(&self, now: Tick, source: Source) -> usize {
        let mut allowed = 0;
        loop {
            let Timed { decision, .. } = self.apply(Op::Check(1), Some(now)).await;
            assert_eq!(decision.source, source, "{:?}", self.store.redis().last_error());
            if !decision.allowed {
                return allowed;
            }
            allowed += 1;
        }
    }
}

/// Makes Redis available or unavailable, and lets every process use its whole quota. Returns the time of each unit.
async fn use_all(proxy: &Proxy, processes: &[Process], is_down: bool, now: Tick) -> Vec<i64> {
    proxy.reject_connections(is_down);
    if is_down {
        proxy.cut();
    } else {
        for process in processes {
            process.until_redis_answers(now).await;
        }
    }
    let source = if is_down { Source::Local } else { Source::Store };
    let mut allowed = 0;
    for process in processes {
        allowed += process.use_all(now, source).await;
    }
    vec![now.0; allowed]
}

/// In every window, the client uses the quota in Redis, then the shares in an outage (or two), then Redis again. The
/// times are given, so the test does not depend on how long it takes.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_in_every_window_allows_one_burst_more_in_all() {
    const WINDOW: i64 = 1_000_000_000;
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    for instances in [1, 4] {
        let fleet: Vec<Redis> = (0..instances).map(|_| patient(&proxy.url())).collect();
        for (kind, policy) in policies(Duration::from_secs(1)).iter().enumerate() {
            for outages in [1, 2] {
                let name = format!("api {instances} {kind} {outages}");
                let processes: Vec<_> = fleet
                    .iter()
                    .map(|redis| Process::new(redis, &name, policy, instances))
                    .collect();
                let mut allowed_at = Vec::new();
                for window in 100..110 {
                    for part in 0..2 * outages {
                        let now = Tick(window * WINDOW + part * WINDOW / (2 * outages) + 1);
                        let is_down = part % 2 == 1;
                        allowed_at.extend(use_all(&proxy, &processes, is_down, now).await);
                    }
                }
                proxy.reject_connections(false);
                let (allowed, most) = (allowed_at.len(), most_beyond_the_bound(policy, allowed_at));
                println!("{name}: {allowed} of {}, {most} beyond the bound", 10 * LIMIT);
                assert!(most <= LIMIT.cast_signed(), "{name}: {most} beyond the bound");
                assert!(allowed as u64 * 10 > 10 * LIMIT * 5, "{name}: {allowed} allowed");
            }
        }
    }
    assert_all_expire(&server);
}

/// Outages that are shorter than the short window, longer than it, and longer than all windows. The times are explicit.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_limit_of_a_policy_keeps_its_bound_in_outages_of_any_length() {
    const WINDOW: i64 = 1_000_000_000;
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let window = |windows| Ticks::from_duration(Duration::from_secs(windows));
    let policy = Policy::all_of(
        "api",
        [
            Policy::fixed_window(LIMIT).per(window(1)).named("short"),
            Policy::fixed_window(2 * LIMIT).per(window(4)).named("long"),
        ],
    )
    .unwrap();
    for (instances, is_tiered) in [(1, false), (1, true), (4, false)] {
        let fleet: Vec<Redis> = (0..instances).map(|_| patient(&proxy.url())).collect();
        let name = format!("several {instances} {is_tiered}");
        let processes: Vec<_> = fleet
            .iter()
            .map(|redis| Process { is_tiered, ..Process::new(redis, &name, &policy, instances) })
            .collect();
        let mut allowed_at = Vec::new();
        for part in 0..100 {
            // Four parts are one short window.
            let now = Tick(100 * WINDOW + part * WINDOW / 4 + 1);
            let is_down = matches!(part % 40, 3 | 6..12 | 15..20 | 22..39);
            allowed_at.extend(use_all(&proxy, &processes, is_down, now).await);
        }
        proxy.reject_connections(false);
        for limit in policy.limits() {
            let most = most_beyond_the_bound_of(limit, allowed_at.clone());
            let burst = limit.numbers().limit.cast_signed();
            println!(
                "{name}: {} allowed, {most} beyond the bound of {}",
                allowed_at.len(),
                limit.name()
            );
            assert!(most <= burst, "{name}: {most} beyond the bound of {}", limit.name());
        }
        assert!(allowed_at.len() as u64 > 4 * LIMIT, "{name}: {} allowed", allowed_at.len());
    }
    assert_all_expire(&server);
}

/// The shares can be used during a long outage, and the quota after it.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_outage_locks_no_client_out() {
    const WINDOW: i64 = 1_000_000_000;
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    for instances in [1, 4] {
        let fleet: Vec<Redis> = (0..instances).map(|_| patient(&proxy.url())).collect();
        for (kind, policy) in policies(Duration::from_secs(1)).iter().enumerate() {
            let name = format!("long {instances} {kind}");
            let processes: Vec<_> =
                fleet.iter().map(|redis| Process::new(redis, &name, policy, instances)).collect();
            let at = |window: i64, part: i64| Tick((100 + window) * WINDOW + part * WINDOW / 20);
            let all = async |now, source| {
                let mut allowed = 0;
                for process in &processes {
                    if source == Source::Store {
                        process.until_redis_answers(now).await;
                    }
                    allowed += process.use_all(now, source).await as u64;
                }
                allowed
            };
            assert_eq!(all(at(0, 0), Source::Store).await, LIMIT);
            proxy.reject_connections(true);
            proxy.cut();
            for window in 0..8 {
                let mut allowed = 0;
                for part in 1..=20 {
                    allowed += all(at(window, part), Source::Local).await;
                }
                let is_enough = allowed * 100 >= LIMIT * 95;
                assert!(window < 2 || is_enough, "{name}: {allowed} in window {window}");
            }
            proxy.reject_connections(false);
            let mut after = 0;
            for part in 0..40 {
                after += all(at(9, part), Source::Store).await;
            }
            assert!(after >= LIMIT, "{name}: {after} in two windows after the outage");
        }
    }
    assert_all_expire(&server);
}

/// The same by the server's clock: the client checks all the time, and units are charged in the background.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn short_outages_of_a_fleet_allow_one_burst_more_in_all_by_the_servers_clock() {
    let (window, lasts) = (Duration::from_millis(500), Duration::from_secs(7));
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let end = Instant::now() + lasts;
    let mut fleets = Vec::new();
    for instances in [1_u32, 4] {
        let redis: Vec<_> = (0..instances).map(|_| Redis::open(&proxy.url()).unwrap()).collect();
        for (kind, policy) in policies(window).into_iter().enumerate() {
            let name = format!("api {instances} {kind}");
            let processes =
                redis.iter().map(|redis| Process::new(redis, &name, &policy, instances));
            let asking = processes.map(|process| {
                tokio::spawn(async move {
                    let (mut allowed_at, mut by_local) = (Vec::new(), 0);
                    while Instant::now() < end {
                        let Timed { decision, at } = process.apply(Op::Check(1), None).await;
                        allowed_at.extend(decision.allowed.then_some(at.0));
                        by_local += u64::from(decision.source == Source::Local);
                        tokio::time::sleep(Duration::from_millis(2)).await;
                    }
                    (allowed_at, by_local)
                })
            });
            let asking: Vec<_> = asking.collect();
            fleets.push((name, policy, asking));
        }
    }
    // Late in a window, when Redis has allowed the quota.
    while Instant::now() + window < end {
        tokio::time::sleep(window * 7 / 10).await;
        proxy.reject_connections(true);
        proxy.cut();
        tokio::time::sleep(window * 3 / 10).await;
        proxy.reject_connections(false);
    }
    for (name, policy, asking) in fleets {
        let (mut allowed_at, mut by_local) = (Vec::new(), 0);
        for answers in join_all(asking).await {
            let (at, local) = answers.unwrap();
            allowed_at.extend(at);
            by_local += local;
        }
        let windows = u64::try_from(lasts.as_millis() / window.as_millis()).unwrap();
        let possible = LIMIT * windows;
        let (allowed, most) = (allowed_at.len(), most_beyond_the_bound(&policy, allowed_at));
        println!("{name}: {allowed} of {possible}, {by_local} by local, {most} beyond the bound");
        assert!(by_local > 20, "there were outages: {by_local}");
        assert!(most <= LIMIT.cast_signed(), "{name}: {most} beyond the bound");
        assert!(allowed as u64 * 10 > possible * 5, "{name}: {allowed} of {possible}");
    }
    assert_all_expire(&server);
}
