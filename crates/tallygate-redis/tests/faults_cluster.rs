//! A cluster that moves slots, loses servers, and has more than one place for keys.

mod common;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use common::{PATIENCE, cluster_url, count, limiter, patient, until, until_the_store_answers};
use futures_util::future::join_all;
use tallygate::{Ask, RateLimiter, Source};
use tallygate_redis::{Error, JointAsk, OnFailure, Options, Redis, check_all};
use tallygate_testkit::servers::{Cluster, Flavor, Proxy};

fn assert_all_expire(cluster: &Cluster) {
    assert_eq!(cluster.keys_without_ttl(), Vec::<Vec<u8>>::new(), "these never expire");
}

/// The way to a cluster with a secret for its slots that is known to the tests, so that nothing of it is stored.
fn open(cluster: &Cluster) -> Redis {
    let options = Options::default().slot_secret("of the tests");
    Redis::with(&cluster_url(cluster), options).expect("an address")
}

/// The slots of all keys of a cluster.
fn slots(cluster: &Cluster) -> HashSet<u16> {
    let nodes = cluster.nodes().iter().filter(|node| node.is_running());
    let keys = nodes.flat_map(|node| node.ask::<Vec<Vec<u8>>>(&["KEYS", "*"]));
    keys.map(|key| cluster.slot_of(key)).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f6_a_killed_primary_of_a_cluster_is_replaced_by_its_replica() {
    let cluster = Cluster::start(Flavor::Redis, 3, 1);
    let redis = open(&cluster);
    let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
    until("ten are charged", async || {
        (limiter.check("alice").await.ok()?.remaining <= 990).then_some(())
    })
    .await;
    let left = limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
    let slot = *slots(&cluster).iter().next().unwrap();
    let primary = cluster.primary_of(slot);
    let replica = cluster.replica_of(primary).unwrap();
    cluster.nodes()[replica].wait_until_caught_up_with(&cluster.nodes()[primary]);
    cluster.kill(primary);
    let start = Instant::now();
    let back = until_the_store_answers(&limiter, "alice").await;
    println!("cluster failover: decided by the failure policy for {:?}", start.elapsed());
    assert_eq!(back, left, "the state went with it");
    assert_eq!(cluster.primary_of(slot), replica);
    assert!(redis.counts().denied > 0, "meanwhile the failure policy decides");
    let decision = until("it can be written", async || {
        limiter.check("alice").await.ok().filter(|decision| decision.source == Source::Store)
    })
    .await;
    assert_eq!(decision.remaining, left - 1);
    cluster.wait_until_ok(PATIENCE);
    assert_all_expire(&cluster);
}

/// Clients whose keys are all in slots that are moved while they ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f9_slots_that_move_lose_no_decision_and_charge_nobody_twice() {
    const CLIENTS: usize = 12;
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let limiter = Arc::new(limiter(&redis, count(1_000_000), OnFailure::Deny));
    let names: Vec<String> = (0..CLIENTS).map(|client| format!("client {client}")).collect();
    for name in &names {
        assert_eq!(limiter.check(name).await.unwrap().source, Source::Store);
    }
    let slots = slots(&cluster);
    let stop = Arc::new(AtomicBool::new(false));
    let asking: Vec<_> = names
        .iter()
        .map(|name| {
            let (limiter, stop, name) = (limiter.clone(), stop.clone(), name.clone());
            tokio::spawn(async move {
                let mut charged = 1;
                while !stop.load(Ordering::Relaxed) {
                    let told = limiter.check(&name).await.expect("a decision");
                    assert_eq!((told.allowed, told.source), (true, Source::Store), "{name}");
                    charged += 1;
                }
                charged
            })
        })
        .collect();
    for round in 1..=2 {
        for slot in &slots {
            let to = (cluster.primary_of(*slot) + round) % 3;
            cluster.begin_migration(*slot, to);
            // New clients of an open slot are sent on, those it has not moved yet are not.
            tokio::task::yield_now().await;
            cluster.migrate_keys(*slot, to);
            let before = redis.counts().redirections;
            until("somebody is sent on", async || {
                (redis.counts().redirections > before).then_some(())
            })
            .await;
            cluster.end_migration(*slot, to);
        }
    }
    stop.store(true, Ordering::Relaxed);
    let charged = join_all(asking).await;
    for (name, charged) in names.iter().zip(charged) {
        let charged: u64 = charged.expect("every decision is the store's");
        let used = 1_000_000 - limiter.peek(Ask::new(name).cost(0)).await.unwrap().remaining;
        assert_eq!(used, charged, "{name}");
    }
    let counts = redis.counts();
    assert_eq!(counts.errors, 0, "{:?}", redis.last_error());
    assert!(counts.redirections > 0);
    assert_all_expire(&cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f11_a_reply_that_a_cluster_loses_is_not_asked_for_again() {
    let cluster = Cluster::start(Flavor::Redis, 1, 0);
    let node = &cluster.nodes()[0];
    // The cluster says where its servers are: this one is behind the proxy.
    let proxy = Proxy::start(&node.address());
    let port = proxy.address().rsplit_once(':').unwrap().1.to_owned();
    node.ask::<()>(&["CONFIG", "SET", "cluster-announce-port", &port]);
    let redis = patient(&format!("redis+cluster://{}", proxy.address()));
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);

    proxy.lose_next_reply_to("EVALSHA");
    let lost = limiter.check(Ask::new("alice").cost(4)).await.unwrap();
    assert_eq!(proxy.replies_lost(), 1, "the cluster is asked through the proxy");
    assert_eq!((lost.allowed, lost.source), (false, Source::FailedClosed));
    let error = redis.last_error().expect("it says why");
    assert!(matches!(&*error, Error::Unavailable { sent: true, .. }), "{error:?}");
    assert_eq!(until_the_store_answers(&limiter, "alice").await, 5, "charged once");
    assert_all_expire(&cluster);
}

/// All policies of a client are in one slot: they are decided on in one step. And a client cannot choose which.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f15_f16_policies_of_a_client_are_together_and_clients_are_apart() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let make = |name: &'static str| {
        RateLimiter::with_store(count(5), redis.store(name).on_failure(OnFailure::Deny))
    };
    let limiters = ["second", "{minute}", "d}a{y"].map(make);
    // One key a client: they would all be in the slot of `x` if braces counted.
    let clients: Vec<String> = (0..60).map(|client| format!("{{x}}{client}")).collect();
    for client in &clients {
        let asks = limiters.each_ref().map(|limiter| JointAsk::of(limiter, client).unwrap());
        let calls = redis.counts().calls;
        let told = check_all(asks).await.unwrap();
        assert!(told.decision.allowed);
        assert_eq!(told.decision.source, Source::Store, "{:?}", redis.last_error());
        assert_eq!(told.decision.remaining, 4);
        // More only where a server was not known yet.
        if client == "{x}59" {
            assert_eq!(redis.counts().calls - calls, 1, "one script");
        }
    }
    let slots = slots(&cluster);
    assert!(slots.len() > 50, "{} slots for {} clients", slots.len(), clients.len());
    let primaries: HashSet<_> = slots.iter().map(|slot| cluster.primary_of(*slot)).collect();
    assert_eq!(primaries.len(), 3);
    assert_all_expire(&cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f17_slots_that_nobody_has_leave_it_to_the_failure_policy() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
    let clients: Vec<String> = (0..20).map(|client| format!("client {client}")).collect();
    for client in &clients {
        assert_eq!(limiter.check(client).await.unwrap().source, Source::Store);
    }
    cluster.kill(2);
    // Those of the others work until the others find out, then nobody's do.
    until("the cluster says that it is down", async || {
        let mut is_down = false;
        for client in &clients {
            let told = limiter.check(client).await.expect("a decision");
            let expected = [Source::Store, Source::FailedClosed];
            assert!(expected.contains(&told.source), "{told:?}");
            let error = redis.last_error().map(|error| error.to_string());
            is_down |= error.is_some_and(|error| error.contains("luster is down"));
        }
        is_down.then_some(())
    })
    .await;
    cluster.nodes()[2].restart();
    until("all are decided on again", async || {
        for client in &clients {
            let told = limiter.check(client).await.expect("a decision");
            if told.source != Source::Store {
                return None;
            }
        }
        Some(())
    })
    .await;
    assert_all_expire(&cluster);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn f17_several_keys_of_a_slot_that_moves_leave_it_to_the_failure_policy() {
    let cluster = Cluster::start(Flavor::Redis, 2, 0);
    let redis = patient(&cluster_url(&cluster));
    let make = |name: &'static str| {
        RateLimiter::with_store(count(5), redis.store(name).on_failure(OnFailure::Deny))
    };
    let [first, second] = ["first", "second"].map(make);
    assert_eq!(first.check("alice").await.unwrap().source, Source::Store);
    let slot = *slots(&cluster).iter().next().unwrap();
    let to = 1 - cluster.primary_of(slot);
    cluster.begin_migration(slot, to);
    // One key is here, the other is nowhere: no server can decide on both.
    let both = || {
        [
            JointAsk::of(&first, "alice").expect("valid"),
            JointAsk::of(&second, "alice").expect("valid"),
        ]
    };
    let told = check_all(both()).await.unwrap();
    assert_eq!(told.decision.source, Source::FailedClosed);
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.contains("TRYAGAIN") || error.contains("Multiple keys"), "{error}");
    cluster.migrate_keys(slot, to);
    cluster.end_migration(slot, to);
    let told = check_all(both()).await.unwrap();
    assert_eq!((told.decision.allowed, told.decision.source), (true, Source::Store));
    assert_eq!(told.decision.remaining, 3, "nothing was charged meanwhile");
    assert_all_expire(&cluster);
}

/// Keys in different slots are taken one after the other, and given back if a later one refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_different_slots_are_all_charged_or_given_back() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let make = |name: &'static str, limit| {
        RateLimiter::with_store(count(limit), redis.store(name).on_failure(OnFailure::Deny))
    };
    let (users, addresses) = (make("users", 10), make("addresses", 3));
    let ask = async || {
        let asks = [
            JointAsk::of(&users, Ask::new("alice").cost(2)).expect("valid"),
            JointAsk::of(&addresses, "192.0.2.1").expect("valid"),
        ];
        check_all(asks).await.expect("a decision")
    };
    for left in [2, 1, 0] {
        let told = ask().await;
        assert!(told.decision.allowed && told.decision.remaining == left, "{told:?}");
    }
    assert_eq!(slots(&cluster).len(), 2, "they are in different slots");
    let told = ask().await;
    assert_eq!((told.decision.allowed, told.refused_ask), (false, Some(1)));
    assert_eq!(users.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 4, "given back");
    // Many at once: never more than there is, and all that is not used is there again.
    let told = join_all((0..30).map(|_| ask())).await;
    assert!(told.iter().all(|told| !told.decision.allowed));
    assert_eq!(users.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 4, "given back");
    assert_eq!(addresses.peek(Ask::new("192.0.2.1").cost(0)).await.unwrap().remaining, 0);
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_all_expire(&cluster);
}

/// Servers that were told no secret share the one that the first of them stored: so they share quotas, and keys are where
/// no client can foresee.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn j13_servers_share_a_secret_for_slots_that_the_first_of_them_stored() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let servers = [(); 3].map(|()| Redis::open(&cluster_url(&cluster)).unwrap());
    for (server, used) in servers.iter().zip(1..) {
        until("the secret is known", async || server.agree_on_slots().await.ok()).await;
        let limiter = limiter(server, count(1_000), OnFailure::Deny);
        let left = until("the store answers", async || {
            let decision = limiter.check("alice").await.ok()?;
            (decision.source == Source::Store).then_some(decision.remaining)
        })
        .await;
        assert_eq!(left, 1_000 - used, "they share the quota");
    }
    let stored = cluster.keys_without_ttl();
    assert_eq!(stored.len(), 1, "the secret stays");
    assert!(stored[0].ends_with(b"{slots}secret"), "{stored:?}");
    // Another fleet, with another secret, has the same client elsewhere.
    let slots_of = async |secret: &str| {
        let other = Cluster::start(Flavor::Redis, 1, 0);
        let options = Options::default().slot_secret(secret);
        let redis = Redis::with(&cluster_url(&other), options).unwrap();
        let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
        for client in 0..20 {
            until("the store answers", async || {
                let decision = limiter.check(&client.to_string()).await.ok()?;
                (decision.source == Source::Store).then_some(())
            })
            .await;
        }
        slots(&other)
    };
    let (one, other) = (slots_of("one").await, slots_of("other").await);
    assert!(one.intersection(&other).count() <= 2, "{one:?} {other:?}");
}
