//! Several keys in one decision on Redis: the same result as in memory, also if a key appears several times.

use std::time::{Duration, Instant};

use crate::common::{AMPLE, assert_all_expire, cluster_url, count, patient, until};
use tallygate::clock::ManualClock;
use tallygate::policy::Penalty;
use tallygate::store::{Capacity, MemoryStore};
use tallygate::tiers::{Access, ClientRule};
use tallygate::{Ask, Cost, Policy, RateLimiter, Source, Tick, Ticks, Tiers};
use tallygate_redis::{JointAsk, OnFailure, Options, Redis, RedisStore, check_all};
use tallygate_testkit::servers::{Cluster, Flavor, Proxy, Server};

type Tiered = RateLimiter<Tiers, RedisStore>;

fn hourly(limit: Cost) -> Policy {
    Policy::token_bucket(limit).per_hour().build().unwrap()
}

/// A limit of 10 per hour, and tiers of any kind.
fn rules() -> Tiers {
    Tiers::new(hourly(10))
        .tier("small", hourly(3))
        .tier("all", Access::Unlimited)
        .tier("none", Access::Blocked)
}

fn tiered(redis: &Redis, name: &'static str, on_failure: OnFailure) -> Tiered {
    RateLimiter::in_store(name, rules(), redis.store(name).on_failure(on_failure))
}

/// Returns the tier of a name; "" is the base.
fn of_name(tier: &str) -> Option<&str> {
    Some(tier).filter(|tier| !tier.is_empty())
}

/// Checks one key under each of some tiers; "" is the base.
async fn ask_tiers(
    limiter: &Tiered,
    key: &str,
    parts: &[(&str, Cost)],
) -> (bool, Option<usize>, Option<Ticks>, Source) {
    let asks = parts.iter().map(|(tier, cost)| {
        JointAsk::of(limiter, Ask::new(key).cost(*cost).tier(of_name(tier))).unwrap()
    });
    let asked = check_all(asks.collect::<Vec<_>>()).await.unwrap();
    let decision = asked.decision;
    (decision.allowed, asked.denied_ask, decision.retry_after, decision.source)
}

/// Fault J1: compare-and-set needs two calls and loses races, so callers of a busy key would be denied as overloaded.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_that_is_named_twice_under_one_rule_is_decided_by_one_call() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let redis = patient(&server.url());
        let limiter = tiered(&redis, "api", OnFailure::Deny);
        let ask = |parts: &'static [(&str, Cost)]| ask_tiers(&limiter, "alice", parts);
        // The first call loads the script.
        assert!(ask(&[("", 1), ("", 2)]).await.0);
        let calls_before = redis.counts().calls;
        assert!(ask(&[("", 3), ("", 1)]).await.0);
        assert_eq!(ask(&[("", 2), ("", 2)]).await.1, Some(0), "3 of 10 are left");
        assert_eq!(redis.counts().calls - calls_before, 2);
        assert_eq!(limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 3);
        assert_all_expire(&server);
    }
}

/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rule_that_a_key_is_checked_under_counts() {
    let server = Server::start(Flavor::Redis);
    let limiter = tiered(&patient(&server.url()), "api", OnFailure::Deny);
    let ask = |parts: &'static [(&str, Cost)]| ask_tiers(&limiter, "alice", parts);
    assert_eq!(ask(&[("all", 1), ("none", 1)]).await, (false, Some(1), None, Source::Store));
    assert_eq!(ask(&[("none", 1), ("all", 1)]).await.1, Some(0));
    assert_eq!(ask(&[("", 4), ("small", 0)]).await.1, Some(1), "4 are more than 3");
    let (allowed, denied_by, ..) = ask(&[("", 2), ("small", 1), ("all", 99)]).await;
    assert_eq!((allowed, denied_by), (true, None), "the sum is 3");
    assert_eq!(limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 7, "charged once");
    assert_eq!(limiter.peek(Ask::new("alice").cost(0).tier("small")).await.unwrap().remaining, 0);
    assert_all_expire(&server);
}

/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn costs_of_one_key_are_added_up_exactly() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let most = Cost::MAX;
    // A limit that allows the largest cost.
    let largest = Policy::token_bucket(most).per(Ticks(1000)).build().unwrap();
    let largest =
        RateLimiter::with_store(largest, redis.store("largest").on_failure(OnFailure::Deny));
    for costs in [[most, most], [most, 1], [1, most]] {
        let asked = check_all(
            costs.map(|cost| JointAsk::of(&largest, Ask::new("alice").cost(cost)).unwrap()),
        );
        let asked = asked.await.unwrap();
        assert_eq!((asked.denied_ask, asked.decision.source), (Some(0), Source::Store));
        assert_eq!(asked.decision.retry_after, None, "no wait is long enough");
    }
    let asked = [most, 0].map(|cost| JointAsk::of(&largest, Ask::new("alice").cost(cost)).unwrap());
    assert!(check_all(asked).await.unwrap().decision.allowed);
    let limiter = tiered(&redis, "api", OnFailure::Deny);
    for parts in [[("", most), ("", most)], [("", most), ("", 2)], [("small", most), ("", 1)]] {
        let (allowed, denied_by, retry_after, source) = ask_tiers(&limiter, "alice", &parts).await;
        assert_eq!(
            (allowed, denied_by, retry_after, source),
            (false, Some(0), None, Source::Store)
        );
    }
    let parts = [("", 4), ("", 3), ("", 3)];
    assert!(ask_tiers(&limiter, "alice", &parts).await.0);
    assert!(!ask_tiers(&limiter, "alice", &[("", 1), ("", 0)]).await.0, "all 10 are used");
    assert_all_expire(&server);
}

/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_tiers_of_a_key_allow_the_sum_or_nothing_is_charged() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = tiered(&redis, "api", OnFailure::Deny);
    let routes =
        RateLimiter::with_store(count(5), redis.store("routes").on_failure(OnFailure::Deny));
    let ask = async |cost| {
        let asks = [
            JointAsk::of(&limiter, Ask::new("alice").cost(cost)).unwrap(),
            JointAsk::of(&routes, "/login").unwrap(),
            JointAsk::of(&limiter, Ask::new("alice").tier("small")).unwrap(),
        ];
        check_all(asks).await.unwrap()
    };
    assert_eq!(ask(3).await.denied_ask, Some(2), "4 are more than 3");
    assert_eq!(routes.peek(Ask::new("/login").cost(0)).await.unwrap().remaining, 5);
    assert_eq!(limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 10);
    assert!(ask(2).await.decision.allowed);
    assert_eq!(routes.peek(Ask::new("/login").cost(0)).await.unwrap().remaining, 4);
    assert_eq!(limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 7);
    assert_all_expire(&server);
}

/// Policies of every kind, with every option.
fn any_rules(random: &mut fastrand::Rng) -> Tiers {
    let any = |random: &mut fastrand::Rng| -> Access {
        let (limit, window) = (random.u64(1..12), Ticks(random.u64(5..80)));
        Access::from(match random.u8(0..8) {
            0 => return Access::Unlimited,
            1 => return Access::Blocked,
            2 => Policy::token_bucket(limit).per(window).burst(random.u64(1..9)).build().unwrap(),
            3 => Policy::fixed_window(limit).per(window).build().unwrap(),
            4 => Policy::sliding_window_counter(limit).per(window).build().unwrap(),
            5 => Policy::sliding_window_log(limit)
                .per(window)
                .penalty(Penalty::lasting(Ticks(30)).after(2))
                .build()
                .unwrap(),
            6 => Policy::leaky_bucket(limit).per(window).build().unwrap(),
            _ => Policy::all_of(
                "two",
                [
                    Policy::gcra(limit).per(window).named("one").shadow(),
                    Policy::token_bucket(limit + 3).per(Ticks(60)).named("other"),
                ],
            )
            .unwrap(),
        })
    };
    let base = any(random);
    Tiers::new(base).tier("b", any(random)).tier("c", any(random)).tier("d", any(random))
}

/// Compares random parts in memory and on Redis.
///
/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_same_parts_are_decided_alike_in_memory_and_on_redis() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let redis = patient(&server.url());
        let (mut allowed, mut denied) = (0, 0);
        for seed in 0..60 {
            let (yes, no) = one_history(&redis, seed).await;
            allowed += yes;
            denied += no;
        }
        assert!(allowed > 300 && denied > 300, "both happen: {allowed} and {denied}");
        assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
        assert_all_expire(&server);
    }
}

async fn one_history(redis: &Redis, seed: u64) -> (u32, u32) {
    const TIERS: [&str; 4] = ["", "b", "c", "d"];
    let mut random = fastrand::Rng::with_seed(seed);
    let clock = ManualClock::new(Tick(0));
    let name = |limiter: usize| format!("{seed}/{limiter}");
    let rules: Vec<Tiers> = (0..2).map(|_| any_rules(&mut random)).collect();
    let here: Vec<RateLimiter<Tiers, MemoryStore<ClientRule, &ManualClock>>> = (0..2)
        .map(|limiter| {
            let store = MemoryStore::new(Capacity::of(1000), &clock);
            RateLimiter::in_store(name(limiter), rules[limiter].copy(), store)
        })
        .collect();
    let there: Vec<Tiered> = (0..2)
        .map(|limiter| {
            let store = redis.store(name(limiter)).on_failure(OnFailure::Deny).in_ticks();
            RateLimiter::in_store(name(limiter), rules[limiter].copy(), store)
        })
        .collect();
    let (mut now, mut allowed, mut denied) = (1000, 0, 0);
    for step in 0..40 {
        now += random.i64(0..15);
        let parts: Vec<(usize, &str, &str, Cost)> = (0..random.usize(1..6))
            .map(|_| {
                let cost = if random.u8(0..40) == 0 { Cost::MAX } else { random.u64(0..4) };
                let tier = random.choice(TIERS).unwrap();
                (random.usize(0..2), tier, random.choice(["k", "l"]).unwrap(), cost)
            })
            .collect();
        let asks: Vec<(usize, Ask<'_>)> = parts
            .iter()
            .map(|(limiter, tier, key, cost)| {
                (*limiter, Ask::new(key).cost(*cost).tier(of_name(tier)).at(Tick(now)))
            })
            .collect();
        let joint = asks.iter().map(|(limiter, ask)| here[*limiter].joint(ask).unwrap());
        let expected = tallygate::check_all(joint).unwrap();
        let joint: Vec<_> = asks
            .iter()
            .map(|(limiter, ask)| JointAsk::of(&there[*limiter], ask).unwrap())
            .collect();
        let found = check_all(joint).await.unwrap();
        assert_eq!(
            (found.decision, found.denied_ask),
            (expected.decision, expected.denied_ask),
            "seed {seed}, step {step} at {now}: {parts:?} under {:?}; {:?}",
            rules.iter().map(|rules| (rules.base(), rules.by_name())).collect::<Vec<_>>(),
            redis.last_error()
        );
        *(if expected.decision.allowed { &mut allowed } else { &mut denied }) += 1;
    }
    (allowed, denied)
}

/// Keys in different slots are charged one after the other, each under all its rules.
///
/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rule_counts_also_for_keys_in_different_slots() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let users = tiered(&redis, "users", OnFailure::Deny);
    let addresses =
        RateLimiter::with_store(count(2), redis.store("addresses").on_failure(OnFailure::Deny));
    let [small, none] = ["small", "none"].map(|tier| Ask::new("alice").tier(tier));
    let ask = async |cost, blocked: bool| {
        let mut asks = vec![
            JointAsk::of(&users, Ask::new("alice").cost(cost)).unwrap(),
            JointAsk::of(&addresses, "192.0.2.1").unwrap(),
            JointAsk::of(&users, small).unwrap(),
        ];
        if blocked {
            asks.push(JointAsk::of(&users, none).unwrap());
        }
        check_all(asks).await.unwrap()
    };
    let left = async || users.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
    assert_eq!(ask(3, false).await.denied_ask, Some(2), "4 are more than 3");
    assert_eq!(ask(1, true).await.denied_ask, Some(3), "it is blocked");
    assert_eq!(ask(Cost::MAX, false).await.decision.retry_after, None);
    assert_eq!(
        (left().await, addresses.peek(Ask::new("192.0.2.1").cost(0)).await.unwrap().remaining),
        (10, 2)
    );
    assert!(ask(0, false).await.decision.allowed && ask(0, false).await.decision.allowed);
    assert_eq!(left().await, 8);
    let denied = ask(0, false).await;
    assert_eq!(denied.denied_ask, Some(1), "the address has used its 2");
    assert_eq!(left().await, 8, "refunded by the receipts of both rules");
    assert_eq!(users.peek(small.cost(0)).await.unwrap().remaining, 1);
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_eq!(cluster.keys_without_ttl(), Vec::<Vec<u8>>::new(), "keys without an expiry");
}

/// Fault K8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_rule_counts_also_without_redis() {
    let server = Server::start(Flavor::Redis);
    server.kill();
    let redis = Redis::open(&server.url()).unwrap();
    let local = tiered(&redis, "local", OnFailure::Local { instances: 1 });
    let ask = |parts: &'static [(&str, Cost)]| ask_tiers(&local, "alice", parts);
    assert_eq!(ask(&[("all", 1), ("none", 1)]).await, (false, Some(1), None, Source::Local));
    assert_eq!(ask(&[("", 3), ("small", 1)]).await.1, Some(1), "4 are more than 3");
    assert!(ask(&[("", 2), ("small", 1)]).await.0, "3 are not");
    assert_eq!(local.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 7, "charged once");
    assert_eq!(ask(&[("", Cost::MAX), ("", Cost::MAX)]).await.2, None);
    assert_eq!(
        local.peek(Ask::new("alice").cost(0)).await.unwrap().remaining,
        7,
        "a denial charges nothing"
    );
    // Decisions that need no store are not left to the failure setting.
    let open = tiered(&redis, "open", OnFailure::Allow);
    assert!(ask_tiers(&open, "alice", &[("", 1), ("small", 1)]).await.0);
    assert_eq!(ask_tiers(&open, "alice", &[("all", 1), ("none", 1)]).await.1, Some(1));
    assert!(!ask_tiers(&open, "alice", &[("", Cost::MAX), ("", Cost::MAX)]).await.0);
}

/// Two servers, so that the keys are charged in order: the first at a distance, the second always denies.
struct TwoServers {
    first: Server,
    second: Server,
    to_first: Proxy,
    to_second: Proxy,
}

impl TwoServers {
    fn start() -> Self {
        let (first, second) = (Server::start(Flavor::Redis), Server::start(Flavor::Redis));
        let (to_first, to_second) =
            (Proxy::start(&first.address()), Proxy::start(&second.address()));
        Self { first, second, to_first, to_second }
    }

    /// Returns a limiter of each, for 5 units, of which `bob` has used all.
    async fn limiters(
        &self,
        budget: Duration,
        on_failure: OnFailure,
    ) -> [RateLimiter<Policy, RedisStore>; 2] {
        let limiters = [&self.to_first, &self.to_second].map(|proxy| {
            let redis = Redis::with(&proxy.url(), Options::default().budget(budget)).unwrap();
            RateLimiter::with_store(count(5), redis.store("api").on_failure(on_failure))
        });
        for limiter in &limiters {
            until("the store answers", async || {
                let asked = limiter.check(Ask::new("bob").cost(5)).await.ok()?;
                (asked.source == Source::Store).then_some(())
            })
            .await;
        }
        limiters
    }
}

/// Charging takes one round trip and a refund two, together longer than the budget.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_budget_covers_a_joint_decision_and_late_charges_are_refunded_in_the_background() {
    const ROUND_TRIP: Duration = Duration::from_millis(300);
    const BUDGET: Duration = Duration::from_millis(500);
    let servers = TwoServers::start();
    let [first, second] = servers.limiters(BUDGET, OnFailure::Allow).await;
    servers.to_first.delay(ROUND_TRIP);
    let start = Instant::now();
    let asks = [
        JointAsk::of(&first, Ask::new("alice").cost(2)).unwrap(),
        JointAsk::of(&second, "bob").unwrap(),
    ];
    let asked = check_all(asks).await.unwrap();
    let took = start.elapsed();
    assert_eq!((asked.decision.allowed, asked.denied_ask), (false, Some(1)));
    assert!(took < BUDGET + ROUND_TRIP / 2, "{took:?}");
    servers.to_first.delay(Duration::ZERO);
    until("the charge is refunded", async || {
        (first.peek(Ask::new("alice").cost(0)).await.ok()?.remaining == 5).then_some(())
    })
    .await;
    assert_eq!(first.store().redis().counts().unreturned, 0);
    assert_all_expire(&servers.first);
    assert_all_expire(&servers.second);
}

/// The failure setting of the first allows, and the denial of the second stays a denial.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_that_cannot_be_refunded_is_counted_and_the_denial_stands() {
    const BUDGET: Duration = Duration::from_secs(2);
    let servers = TwoServers::start();
    let [first, second] = servers.limiters(BUDGET, OnFailure::Allow).await;
    servers.to_second.stall(true);
    let asks = [
        JointAsk::of(&first, Ask::new("alice").cost(2)).unwrap(),
        JointAsk::of(&second, "bob").unwrap(),
    ];
    let calls = || second.store().redis().counts().calls;
    let calls_before = calls();
    let cut = async {
        until("the first has answered and the second is asked", async || {
            (calls() > calls_before).then_some(())
        })
        .await;
        servers.to_first.reject_connections(true);
        servers.to_first.cut();
        servers.to_second.stall(false);
    };
    let (asked, ()) = tokio::join!(check_all(asks), cut);
    let asked = asked.unwrap();
    assert_eq!((asked.decision.allowed, asked.denied_ask), (false, Some(1)), "{asked:?}");
    let redis = first.store().redis();
    until("it is counted", async || (redis.counts().unreturned == 2).then_some(())).await;
}

/// If a server is down, the failure setting decides on its keys only. The limits of other servers still hold.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_limits_of_a_server_that_answers_hold_while_another_is_down() {
    for on_failure in [OnFailure::Allow, OnFailure::Local { instances: 1 }] {
        let servers = TwoServers::start();
        let [first, second] = servers.limiters(AMPLE, on_failure).await;
        servers.to_first.reject_connections(true);
        servers.to_first.cut();
        let ask = async |cost, of_second| {
            let of_first = JointAsk::of(&first, Ask::new("alice").cost(cost)).unwrap();
            check_all([of_first, JointAsk::of(&second, of_second).unwrap()]).await.unwrap()
        };
        for _ in 0..3 {
            let denied = ask(5, "bob").await;
            let decision = denied.decision;
            assert_eq!((decision.allowed, denied.denied_ask), (false, Some(1)), "{on_failure:?}");
        }
        // The denials charged nothing in this process, either.
        let allowed = ask(5, "carol").await.decision;
        assert!(allowed.allowed, "{on_failure:?}: {allowed:?}");
        assert_ne!(allowed.source, Source::Store);
        assert_eq!(second.peek(Ask::new("carol").cost(0)).await.unwrap().remaining, 4);
    }
}
