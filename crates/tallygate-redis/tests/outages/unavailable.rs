//! Redis is unavailable, slow, or has moved: how the limiter decides meanwhile, and how it recovers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::log::Log;
use crate::common::{
    PATIENCE, assert_all_expire, burst, count, limiter, patient, sentinel_url, until,
    until_the_store_answers,
};
use futures_util::future::join_all;
use tallygate::algorithm::Op;
use tallygate::store::Store as _;
use tallygate::{Ask, Decision, Policy, Source, Tick, Ticks};
use tallygate_redis::{Error, OnFailure, Redis};
use tallygate_testkit::servers::{Flavor, Proxy, Sentinel, Server};

/// How long a decision may take beyond its budget of 50 ms, on a busy machine.
const SLACK: Duration = Duration::from_millis(100);
const BUDGET: Duration = Duration::from_millis(50);

/// Fault F1.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_starts_later_is_found() {
    let server = Server::start(Flavor::Redis);
    server.kill();
    let redis = Redis::open(&server.url()).unwrap();
    let limiter = limiter(&redis, burst(3), OnFailure::Deny);
    let start = Instant::now();
    let decision = limiter.check("alice").await.unwrap();
    assert!(start.elapsed() < BUDGET + SLACK, "{:?}", start.elapsed());
    assert_eq!((decision.allowed, decision.source), (false, Source::FailedClosed));
    assert_eq!(redis.counts().denied, 1, "it says so");
    let error = redis.last_error().expect("it says why");
    assert!(matches!(&*error, Error::Unavailable { sent: false, .. }), "{error}");

    server.restart();
    until_the_store_answers(&limiter, "alice").await;
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 2);
    assert!(!redis.counts().is_open);
    assert_all_expire(&server);
}

/// Fault F2.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_server_costs_no_decision_more_than_its_budget() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    let limiter = limiter(&redis, burst(1_000), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    server.kill();
    for _ in 0..50 {
        let start = Instant::now();
        let decision = limiter.check("alice").await.unwrap();
        assert_eq!((decision.allowed, decision.source), (false, Source::FailedClosed));
        assert_eq!(decision.retry_after, Some(Ticks(1_000_000_000)), "it says when to try again");
        assert!(start.elapsed() < BUDGET + SLACK, "{:?}", start.elapsed());
    }
    server.restart();
    assert_eq!(until_the_store_answers(&limiter, "alice").await, 1_000);
}

/// Fault F3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_frozen_server_gets_no_more_calls_and_nothing_piles_up() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    let limiter = limiter(&redis, burst(10_000), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    server.freeze();
    // A hundred at once: all are decided within the budget, not one after the other. Each has its own key, because
    // concurrent checks of one key share a call.
    let start = Instant::now();
    let clients: Vec<String> = (0..100).map(|client| format!("client {client}")).collect();
    let decisions = join_all(clients.iter().map(|client| limiter.check(client))).await;
    assert!(start.elapsed() < BUDGET + SLACK, "{:?}", start.elapsed());
    assert!(decisions.iter().all(|decided| !decided.as_ref().unwrap().allowed));
    let counts = redis.counts();
    assert!(counts.breaker_opened == 1 && counts.is_open, "{counts:?}");

    // From now on no check waits for it, except for probes, and almost nothing is sent.
    let (before, start) = (redis.counts().calls, Instant::now());
    let (mut waited, mut asked) = (0, 0);
    while start.elapsed() < Duration::from_millis(500) {
        let one = Instant::now();
        assert_eq!(limiter.check("alice").await.unwrap().source, Source::FailedClosed);
        waited += u32::from(one.elapsed() > Duration::from_millis(5));
        asked += 1;
        tokio::task::yield_now().await;
    }
    // A busy machine may delay a few.
    assert!(asked > 500, "{asked}");
    assert!(waited * 100 <= asked, "{waited} of {asked} waited");
    let sent = redis.counts().calls - before;
    assert!(sent <= 5, "{sent} calls to a frozen server");

    server.thaw();
    until_the_store_answers(&limiter, "alice").await;
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    assert!(!redis.counts().is_open);
    assert_all_expire(&server);
}

/// Fault F4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_limit_has_its_own_failure_setting_which_is_counted_and_reported() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    let allow = limiter(&redis, burst(4), OnFailure::Allow);
    let deny = limiter(&redis, burst(4), OnFailure::Deny);
    let local = limiter(&redis, burst(4), OnFailure::Local { instances: 2 });
    server.kill();
    for _ in 0..3 {
        let decision = allow.check("alice").await.unwrap();
        assert_eq!((decision.allowed, decision.source), (true, Source::FailedOpen));
    }
    for _ in 0..5 {
        let decision = deny.check("alice").await.unwrap();
        assert_eq!((decision.allowed, decision.source), (false, Source::FailedClosed));
    }
    let mut allowed = 0;
    for _ in 0..7 {
        let decision = local.check("alice").await.unwrap();
        assert_eq!((decision.limit, decision.source), (2, Source::Local), "half of the quota");
        allowed += u32::from(decision.allowed);
    }
    assert_eq!(allowed, 2);
    let counts = redis.counts();
    assert_eq!((counts.allowed, counts.denied, counts.local), (3, 5, 7));
    assert_eq!(counts.errors, 15);
}

/// A refund that Redis cannot make is an error, except under `local`, where this process makes it.
///
/// Fault F4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refund_without_redis_is_an_error() {
    let server = Server::start(Flavor::Redis);
    let redis = Redis::open(&server.url()).unwrap();
    server.kill();
    for on_failure in [OnFailure::Allow, OnFailure::Deny] {
        let limiter = limiter(&redis, burst(4), on_failure);
        let refund = limiter.refund("alice").await;
        assert!(matches!(refund, Err(Error::Unavailable { .. })), "{refund:?}");
        let reset = limiter.reset("alice").await;
        assert!(matches!(reset, Err(Error::Unavailable { .. })), "{reset:?}");
    }
}

/// Fault F5.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_leaves_a_primary_that_became_a_replica() {
    let old = Server::start(Flavor::Redis);
    let new = Server::replica_of(&old);
    let proxy = Proxy::start(&old.address());
    let redis = Redis::open(&proxy.url()).unwrap();
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    until("two are charged", async || {
        (limiter.check("alice").await.ok()?.remaining <= 8).then_some(())
    })
    .await;
    let before = limiter.peek(Ask::new("alice").cost(0)).await.unwrap();
    new.wait_until_caught_up_with(&old);
    new.promote();
    proxy.point_to(&new.address());
    // The connection stays open and leads to the old primary, which rejects writes.
    old.demote_to(&new);

    let denied = limiter.check("alice").await.unwrap();
    assert_eq!(denied.source, Source::FailedClosed);
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.contains("READONLY") || error.contains("read only"), "{error}");
    let decision = until("the new primary decides", async || {
        limiter.check("alice").await.ok().filter(|decision| decision.source == Source::Store)
    })
    .await;
    assert_eq!(decision.remaining, before.remaining - 1, "the replica has the state");
    assert!(proxy.connections().len() >= 2, "it connected again");
    assert_all_expire(&new);
}

/// Fault F18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_server_behind_the_same_address_is_found() {
    let (first, second) = (Server::start(Flavor::Redis), Server::start(Flavor::Redis));
    let proxy = Proxy::start(&first.address());
    let redis = Redis::open(&proxy.url()).unwrap();
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);
    proxy.point_to(&second.address());
    first.kill();
    assert_eq!(until_the_store_answers(&limiter, "alice").await, 10, "it is another server");
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    assert_all_expire(&second);
}

/// Fault F18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_primary_that_sentinels_name_is_followed() {
    let watching = Sentinel::start(Flavor::Redis, 1);
    let redis = Redis::open(&sentinel_url(&watching)).unwrap();
    let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    until("ten are charged", async || {
        (limiter.check("alice").await.ok()?.remaining <= 990).then_some(())
    })
    .await;
    let charged = limiter.peek(Ask::new("alice").cost(0)).await.unwrap();
    let (primary, replica) = (watching.primary_server(), &watching.servers()[1]);
    replica.wait_until_caught_up_with(primary);
    let start = Instant::now();
    primary.kill();
    let back = until_the_store_answers(&limiter, "alice").await;
    println!("sentinel failover: decided by the failure setting for {:?}", start.elapsed());
    assert_eq!(back, charged.remaining, "the replica has the state");
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    assert_eq!(watching.primary(), replica.address());
    assert_all_expire(replica);
}

/// Forty processes lose their server at the same time and keep checking.
///
/// A stall of the machine synchronizes them, so they have three attempts. A fleet without random pauses is synchronized
/// every time.
///
/// Fault F19.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_servers_of_a_fleet_do_not_reconnect_at_the_same_time() {
    const FLEET: usize = 40;
    for tries_left in (0..3).rev() {
        let Reconnects { all, later, busiest } = reconnects_of_a_fleet(FLEET).await;
        println!("reconnects: {all} in all, {later} later, {busiest} in 10 ms");
        assert!(later >= FLEET, "they reconnect: {later}");
        assert!(all <= FLEET * 14, "{all} attempts in 2.5 s");
        if busiest <= FLEET / 2 {
            return;
        }
        assert!(tries_left > 0, "{busiest} of {FLEET} within 10 ms");
    }
}

/// Servers and networks close idle connections. The client notices it and connects again before the next check.
///
/// Fault F18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_is_closed_while_idle_is_replaced_before_the_next_check() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = patient(&proxy.url());
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    // With its first call, the client also asks for the eviction policy. When a later check is decided, that call is too, and
    // no call is in flight.
    until("the other call is sent", async || (redis.counts().calls >= 2).then_some(())).await;
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    let before = proxy.connections().len();
    proxy.cut();
    until("the client connects again", async || (proxy.connections().len() > before).then_some(()))
        .await;
    let decision = limiter.check("alice").await.unwrap();
    assert_eq!((decision.source, decision.remaining), (Source::Store, 7));
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
}

struct Reconnects {
    all: usize,
    /// Connections after the first pauses, which are short and spread the fleet.
    later: usize,
    /// The largest number of these connections within 10 ms.
    busiest: usize,
}

async fn reconnects_of_a_fleet(size: usize) -> Reconnects {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let fleet: Vec<_> = (0..size).map(|_| Redis::open(&proxy.url()).expect("valid")).collect();
    let fleet: Vec<_> =
        fleet.iter().map(|redis| Arc::new(limiter(redis, burst(10), OnFailure::Deny))).collect();
    join_all(fleet.iter().map(|one| until_the_store_answers(one, "alice"))).await;
    proxy.reject_connections(true);
    proxy.cut();
    let start = Instant::now();
    let asking = fleet.iter().cloned().map(|one| {
        tokio::spawn(async move {
            while start.elapsed() < Duration::from_millis(2_500) {
                let _ = one.check("alice").await;
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        })
    });
    join_all(asking).await;
    let tries: Vec<Duration> = proxy
        .connections()
        .into_iter()
        .filter_map(|at| at.checked_duration_since(start))
        .filter(|after| *after < Duration::from_millis(2_500))
        .collect();
    let later: Vec<_> = tries.iter().filter(|after| after.as_millis() >= 400).collect();
    let busiest = later.iter().map(|from| {
        let until = **from + Duration::from_millis(10);
        later.iter().filter(|after| ***after >= **from && ***after < until).count()
    });
    let busiest = busiest.max().unwrap_or_default();
    Reconnects { all: tries.len(), later: later.len(), busiest }
}

/// A replica rejects every call. The client does not connect again for each of them.
///
/// Fault F19.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_client_pauses_before_it_connects_to_a_replica_again() {
    let primary = Server::start(Flavor::Redis);
    let replica = Server::replica_of(&primary);
    let proxy = Proxy::start(&replica.address());
    let redis = Redis::open(&proxy.url()).unwrap();
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    let (start, mut asked) = (Instant::now(), 0);
    while start.elapsed() < Duration::from_millis(500) {
        assert_eq!(limiter.check("alice").await.unwrap().source, Source::FailedClosed);
        asked += 1;
        tokio::task::yield_now().await;
    }
    let made = proxy.connections().len();
    println!("{made} connections for {asked} decisions");
    assert!((2..=50).contains(&made), "{made} connections for {asked} decisions");
    replica.promote();
    until_the_store_answers(&limiter, "alice").await;
    until("it can be written", async || {
        limiter
            .check("alice")
            .await
            .ok()
            .filter(|decision| decision.source == Source::Store)
            .map(|_| ())
    })
    .await;
    assert_all_expire(&replica);
}

/// A replica answers every probe and rejects every write. The log has one line for each change of its state, and an outage
/// after that is reported as always.
///
/// Fault F19.
#[tokio::test]
async fn a_replica_is_logged_once_and_not_at_each_probe() {
    let log = Log::start();
    let count = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let lines = |rejects, accepts, is_away, is_back| {
        let found = [
            count("redis rejects every call"),
            count("redis accepts calls again"),
            count("redis is unavailable; sending no checks"),
            count("redis is available again"),
        ];
        assert_eq!(found, [rejects, accepts, is_away, is_back], "{:?}", log.lines());
    };
    let primary = Server::start(Flavor::Redis);
    let replica = Server::replica_of(&primary);
    let proxy = Proxy::start(&replica.address());
    let redis = Redis::open(&proxy.url()).unwrap();
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    until("probes have found the replica several times", async || {
        let _ = limiter.check("alice").await.unwrap();
        (redis.counts().breaker_opened > 3).then_some(())
    })
    .await;
    lines(1, 0, 0, 0);
    replica.promote();
    let decided = async || {
        let decision = limiter.check("alice").await.ok()?;
        (decision.source == Source::Store && !redis.counts().is_rejecting).then_some(())
    };
    until("it accepts calls, and has rejected none for a while", decided).await;
    lines(1, 1, 0, 0);
    proxy.reject_connections(true);
    proxy.cut();
    until("the outage is noticed", async || {
        let _ = limiter.check("alice").await.unwrap();
        redis.counts().is_open.then_some(())
    })
    .await;
    lines(1, 1, 1, 0);
    proxy.reject_connections(false);
    until("the end of the outage is noticed", decided).await;
    lines(1, 1, 1, 1);
}

/// The units that this process allowed are charged before the next check, so that they are not allowed twice.
///
/// Fault F22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn units_allowed_in_this_process_are_charged_when_redis_is_back() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let fleet = [patient(&proxy.url()), patient(&proxy.url())];
    let on_failure = OnFailure::Local { instances: 2 };
    let limiters = fleet.each_ref().map(|redis| limiter(redis, count(20), on_failure));
    for limiter in &limiters {
        until_the_store_answers(limiter, "alice").await;
    }
    proxy.reject_connections(true);
    proxy.cut();
    let mut allowed = 0;
    for limiter in &limiters {
        for client in ["alice", "alice", "bob"] {
            let decision = limiter.check(Ask::new(client).cost(4)).await.unwrap();
            assert_eq!(
                decision.source,
                Source::Local,
                "{:?}",
                limiter.store().redis().last_error()
            );
            allowed += u64::from(decision.allowed && client == "alice") * 4;
        }
    }
    assert_eq!(allowed, 16, "eight in this process and eight in the other, of ten each");
    proxy.reject_connections(false);
    for limiter in &limiters {
        until_the_store_answers(limiter, "carol").await;
    }
    // Bob makes no further request: his units are charged in the background.
    for redis in &fleet {
        until("all is charged", async || (redis.counts().debts_charged == 2).then_some(())).await;
    }
    // For one second, each process keeps to its share. Then the store decides alone.
    until("the quota is used", async || {
        let decision = limiters[0].check("alice").await.unwrap();
        allowed += u64::from(decision.allowed);
        (!decision.allowed && decision.source == Source::Store).then_some(())
    })
    .await;
    assert_eq!(allowed, 20, "the quota, once");
    assert_eq!(limiters[1].peek(Ask::new("bob").cost(0)).await.unwrap().remaining, 12);
    assert!(fleet.iter().all(|redis| redis.counts().debts_charged == 2), "once each");
    assert_all_expire(&server);
}

/// A lack of memory ends for all processes at the same time, but each of them notices it with its next write. Until all have
/// charged what they allowed, each keeps to its share.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_recover_from_a_lack_of_memory_allow_the_quota_once() {
    let server = Server::start(Flavor::Redis);
    let fleet = [patient(&server.url()), patient(&server.url())];
    let on_failure = OnFailure::Local { instances: 2 };
    let limiters = fleet.each_ref().map(|redis| limiter(redis, burst(20), on_failure));
    for limiter in &limiters {
        until_the_store_answers(limiter, "alice").await;
    }
    let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let mut allowed = 0;
    for limiter in &limiters {
        for _ in 0..3 {
            let decision = limiter.check(Ask::new("alice").cost(5)).await.unwrap();
            assert_eq!(decision.source, Source::Local);
            allowed += u64::from(decision.allowed) * 5;
        }
    }
    assert_eq!(allowed, 20, "the share of each process");
    let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    // The first process asks until the other one has charged its units as well, and for a second after that.
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_millis(1500)
        || fleet.iter().any(|redis| redis.counts().debts_charged == 0)
    {
        let decision = limiters[0].check("alice").await.unwrap();
        assert!(!decision.allowed, "{decision:?} after {:?}", begun.elapsed());
        assert!(begun.elapsed() < PATIENCE, "{:?}", fleet[1].counts());
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
    assert_eq!(limiters[0].check("alice").await.unwrap().source, Source::Store);
    assert_all_expire(&server);
}

/// The charge was sent to a server that does not answer, and it is unknown whether it arrived. Meanwhile this process must
/// not treat its own quota as unused.
///
/// Fault F22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_without_a_reply_does_not_renew_the_local_quota() {
    for policy in [count(10), burst(10)] {
        let server = Server::start(Flavor::Redis);
        let redis = Redis::open(&server.url()).unwrap();
        let limiter = limiter(&redis, policy, OnFailure::Local { instances: 1 });
        until_the_store_answers(&limiter, "alice").await;
        server.freeze();
        let mut allowed = 0;
        for _ in 0..12 {
            // On a machine that is short of processor time, silence counts as load at first.
            let decision = until("the failure setting decides", async || {
                let decision = limiter.check(Ask::new("alice").cost(5)).await.unwrap();
                (decision.source != Source::Overloaded).then_some(decision)
            })
            .await;
            assert_eq!(decision.source, Source::Local);
            allowed += u64::from(decision.allowed) * 5;
        }
        assert_eq!(allowed, 10, "the quota of this process, once");
        server.thaw();
        assert_eq!(until_the_store_answers(&limiter, "alice").await, 0, "and in Redis");
        assert_all_expire(&server);
    }
}

/// The reply to the charge of what this process allowed is lost. Whether or not Redis carried it out, the units are
/// charged once.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_charge_of_a_bucket_without_a_reply_is_charged_once() {
    for is_carried_out in [false, true] {
        let server = Server::start(Flavor::Redis);
        let proxy = Proxy::start(&server.address());
        let redis = patient(&proxy.url());
        let limiter = limiter(&redis, burst(20), OnFailure::Local { instances: 1 });
        until_the_store_answers(&limiter, "bob").await;
        if is_carried_out {
            proxy.reject_connections(true);
            proxy.cut();
        } else {
            let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
        }
        // Only the script that charges contains this word.
        proxy.lose_next_reply_to("drained_at");
        let decision = limiter.check(Ask::new("alice").cost(8)).await.unwrap();
        assert_eq!((decision.allowed, decision.source), (true, Source::Local));
        if is_carried_out {
            proxy.reject_connections(false);
        }
        until("the reply is lost", async || (proxy.replies_lost() == 1).then_some(())).await;
        let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
        until("it is charged", async || (redis.counts().debts_charged == 1).then_some(())).await;
        let remaining = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
        assert_eq!(remaining, 12, "charged once, carried out at first: {is_carried_out}");
        assert_all_expire(&server);
    }
}

/// Repeated outages do not grant another burst each.
///
/// Fault F22.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn all_outages_share_one_quota() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = patient(&proxy.url());
    let limiter = limiter(&redis, count(10), OnFailure::Local { instances: 1 });
    let mut allowed = 0;
    for _ in 0..3 {
        until_the_store_answers(&limiter, "alice").await;
        proxy.reject_connections(true);
        proxy.cut();
        for _ in 0..4 {
            let decision = limiter.check(Ask::new("alice").cost(4)).await.unwrap();
            assert_eq!(decision.source, Source::Local);
            allowed += u64::from(decision.allowed) * 4;
        }
        proxy.reject_connections(false);
    }
    assert_eq!(allowed, 8, "twice four of ten");
    let back = until_the_store_answers(&limiter, "alice").await;
    assert_eq!(back, 2, "charged once");
    assert_all_expire(&server);
}

/// The policy of J16: the promise is at most one burst beyond its bound, over any interval.
const LIMIT: u128 = 100;
const BURST: u128 = 40;

/// A decision, and the times between which it was made.
struct Answer {
    called: Instant,
    replied: Instant,
    decision: Decision,
}

/// Checks a client by some processes until a time.
async fn ask_without_end(fleet: &[Redis], until: Instant) -> Vec<Answer> {
    let policy = Policy::token_bucket(100).per_second().burst(40).build().expect("valid");
    let instances = u32::try_from(fleet.len()).expect("few");
    let on_failure = OnFailure::Local { instances };
    let asking = fleet.iter().map(|redis| {
        let store = redis.store("api").on_failure(on_failure).deny_cache(false);
        let policy = policy.clone();
        tokio::spawn(async move {
            let mut answers = Vec::new();
            while Instant::now() < until {
                let called = Instant::now();
                let asked = store.apply::<Decision>(&policy, b"alice", Op::Check(1), None).await;
                let decision = asked.expect("a decision");
                answers.push(Answer { called, replied: Instant::now(), decision });
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            answers
        })
    });
    let asking: Vec<_> = asking.collect();
    let mut answers = Vec::new();
    for one in asking {
        answers.extend(one.await.expect("no panic"));
    }
    answers
}

/// Returns by how many requests the worst of all intervals is above what the limit earns in it. An interval has the
/// requests that were called and replied to within it.
fn most_beyond_the_rate(answers: &[Answer]) -> i128 {
    let mut allowed: Vec<_> = answers.iter().filter(|answer| answer.decision.allowed).collect();
    allowed.sort_unstable_by_key(|answer| answer.replied);
    let mut most = 0;
    for begin in allowed.iter().map(|answer| answer.called) {
        let within = allowed.iter().filter(|answer| answer.called >= begin);
        for (before, answer) in within.enumerate() {
            let earned = (answer.replied - begin).as_nanos() * LIMIT / 1_000_000_000;
            let earned = i128::try_from(earned).unwrap_or(i128::MAX);
            most = most.max(i128::try_from(before + 1).unwrap_or(i128::MAX) - earned);
        }
    }
    most
}

fn assert_the_promise(answers: &[Answer]) {
    let most = most_beyond_the_rate(answers);
    // One more, because two clocks have different rates.
    assert!(most <= i128::try_from(2 * BURST + 1).unwrap_or(0), "{most} beyond the rate");
}

/// Two processes and repeated short outages. In between, the shares earn units again.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_after_outage_allows_one_burst_more_in_all_and_the_rate_of_the_policy() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let fleet = [Redis::open(&proxy.url()).unwrap(), Redis::open(&proxy.url()).unwrap()];
    let lasts = Duration::from_millis(7500);
    let outages = async {
        for _ in 0..4 {
            // Longer than processes keep to their shares after an outage.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            proxy.reject_connections(true);
            proxy.cut();
            tokio::time::sleep(Duration::from_millis(300)).await;
            proxy.reject_connections(false);
        }
    };
    let (answers, ()) = tokio::join!(ask_without_end(&fleet, Instant::now() + lasts), outages);
    let by_local = answers.iter().filter(|answer| answer.decision.source == Source::Local).count();
    assert!(by_local > 100, "there were outages: {by_local}");
    assert_the_promise(&answers);
    let allowed = answers.iter().filter(|answer| answer.decision.allowed).count();
    let possible = BURST + LIMIT * lasts.as_millis() / 1000;
    assert!(allowed as u128 * 10 > possible * 6, "the quota can be used: {allowed} of {possible}");
}

/// Four processes lose the server at the same time. One of them reaches it again before the others.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_back_first_takes_nothing_of_the_shares_of_the_others() {
    let server = Server::start(Flavor::Redis);
    let proxies = [(); 4].map(|()| Proxy::start(&server.address()));
    let fleet = proxies.each_ref().map(|proxy| Redis::open(&proxy.url()).unwrap());
    let outage = async {
        tokio::time::sleep(Duration::from_millis(600)).await;
        for proxy in &proxies {
            proxy.reject_connections(true);
            proxy.cut();
        }
        tokio::time::sleep(Duration::from_millis(900)).await;
        proxies[0].reject_connections(false);
        until("it is back", async || (!fleet[0].counts().is_open).then_some(())).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        proxies.iter().for_each(|proxy| proxy.reject_connections(false));
    };
    let end = Instant::now() + Duration::from_millis(4500);
    let (answers, ()) = tokio::join!(ask_without_end(&fleet, end), outage);
    assert_the_promise(&answers);
    let later = answers.iter().rev().filter(|answer| answer.decision.source == Source::Store);
    assert!(later.count() > 100, "the store decides again");
    assert_all_expire(&server);
}

/// Checks a client every two milliseconds of virtual time, while a server rejects every write in some intervals.
async fn ask_during_rejections(lasts: i64, is_down: impl Fn(i64) -> bool) -> Vec<Answer> {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let policy = Policy::token_bucket(100).per_second().burst(40).build().expect("valid");
    let store = redis.store("api").on_failure(OnFailure::Local { instances: 1 }).deny_cache(false);
    let start = Instant::now();
    let (mut answers, mut was_down) = (Vec::new(), false);
    for now in (0..lasts).step_by(2) {
        if is_down(now) != was_down {
            was_down = !was_down;
            let bytes = if was_down { "1" } else { "0" };
            let _: () = server.ask(&["CONFIG", "SET", "maxmemory", bytes]);
        }
        let at = Some(Tick(now * 1_000_000));
        let asked = store.apply::<Decision>(&policy, b"alice", Op::Check(1), at).await;
        let called = start + Duration::from_millis(now.unsigned_abs());
        let decision = asked.expect("a decision");
        if decision.allowed {
            let by = if was_down { Source::Local } else { Source::Store };
            assert_eq!(decision.source, by, "after {now} ms: {:?}", redis.last_error());
        }
        answers.push(Answer { called, replied: called, decision });
    }
    assert_all_expire(&server);
    answers
}

/// After an outage that is longer than the bucket needs to fill, a client owes more than the bound on debt. The process
/// still has to be able to read this state.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_owes_more_than_its_bound_on_debt_is_decided_by_redis() {
    let answers = ask_during_rejections(9_800, |now| now % 1_400 >= 800).await;
    assert_the_promise(&answers);
    let allowed = answers.iter().filter(|answer| answer.decision.allowed).count();
    assert!(allowed > 600, "the quota can be used: {allowed} of 1020");
}

/// A long outage begins while the client still owes what it was allowed in a short one. Meanwhile the bucket is full later
/// than a bucket without debts.
///
/// Fault J16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_outage_does_not_forgive_the_debt_of_the_outage_before() {
    let is_down =
        |now| (800..1_150).contains(&(now % 12_000)) || (1_200..3_200).contains(&(now % 12_000));
    let answers = ask_during_rejections(40_000, is_down).await;
    assert_the_promise(&answers);
}

/// After a failover, the gauge ignores the breaker of the old server.
///
/// Fault J18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_failover_the_breaker_gauge_shows_the_new_server() {
    let watching = Sentinel::start(Flavor::Redis, 1);
    let redis = Redis::open(&sentinel_url(&watching)).unwrap();
    let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    let (primary, replica) = (watching.primary_server(), &watching.servers()[1]);
    replica.wait_until_caught_up_with(primary);
    primary.kill();
    until("the breaker opens", async || {
        let _ = limiter.check("alice").await;
        redis.counts().is_open.then_some(())
    })
    .await;
    until_the_store_answers(&limiter, "alice").await;
    until("the gauge shows the current state", async || (!redis.counts().is_open).then_some(()))
        .await;
}

/// The client notices the recovery without any request.
///
/// Fault J18.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_recovered_server_is_noticed_within_a_second_without_any_request() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = Redis::open(&proxy.url()).unwrap();
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    proxy.reject_connections(true);
    proxy.cut();
    until("the breaker opens", async || {
        let _ = limiter.check("alice").await;
        redis.counts().is_open.then_some(())
    })
    .await;
    // Long enough for the longest pause.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(3) {
        let _ = limiter.check("alice").await;
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    proxy.reject_connections(false);
    let back = Instant::now();
    until("the recovery is noticed", async || (!redis.counts().is_open).then_some(())).await;
    // One second, and some time for a busy machine.
    assert!(back.elapsed() < Duration::from_millis(1500), "{:?}", back.elapsed());
}

/// Fault J3.
#[tokio::test]
async fn a_server_that_is_out_of_memory_is_reported_and_recovers_by_itself() {
    let log = Log::start();
    let count = |text: &str| log.lines().iter().filter(|line| line.contains(text)).count();
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, burst(10), OnFailure::Deny);
    until_the_store_answers(&limiter, "alice").await;
    assert!(limiter.check("alice").await.unwrap().allowed);
    let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let denied = limiter.check("bob").await.unwrap();
    assert_eq!((denied.allowed, denied.source), (false, Source::FailedClosed));
    let error = redis.last_error().expect("it says why");
    assert!(matches!(&*error, Error::OutOfMemory { .. }), "{error:?}");
    let counts = redis.counts();
    assert!(counts.out_of_memory >= 1 && counts.is_out_of_memory, "{counts:?}");
    assert!(!counts.is_open, "it answers: {counts:?}");
    let _: () = server.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(limiter.check("bob").await.unwrap().allowed);
    assert_eq!(count("out of memory and rejects writes"), 1, "{:?}", log.lines());
    assert_eq!(count("redis accepts calls again"), 0, "too early: {:?}", log.lines());
    until("it has memory again", async || (!redis.counts().is_out_of_memory).then_some(())).await;
    for _ in 0..2 {
        assert!(limiter.check("bob").await.unwrap().allowed);
    }
    assert_eq!(count("redis accepts calls again"), 1, "{:?}", log.lines());
}
