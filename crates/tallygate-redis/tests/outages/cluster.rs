//! A cluster that moves slots and loses servers, and decisions over keys of several slots.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use crate::common::{
    Limiter, PATIENCE, cluster_url, count, limiter, patient, until, until_the_store_answers,
};
use futures_util::future::join_all;
use tallygate::{Ask, RateLimiter, Source};
use tallygate_redis::{Error, JointAsk, OnFailure, Options, Redis, check_all};
use tallygate_testkit::servers::{Cluster, Flavor, Proxy};

fn assert_all_expire(cluster: &Cluster) {
    assert_eq!(cluster.keys_without_ttl(), Vec::<Vec<u8>>::new(), "keys without an expiry");
}

/// Opens a cluster with a configured slot secret, so that no secret is stored in the cluster.
fn open(cluster: &Cluster) -> Redis {
    let options = Options::default().slot_secret("of the tests");
    Redis::with(&cluster_url(cluster), options).expect("an address")
}

/// Returns the slots of all keys of a cluster.
fn slots(cluster: &Cluster) -> HashSet<u16> {
    let nodes = cluster.nodes().iter().filter(|node| node.is_running());
    let keys = nodes.flat_map(|node| node.ask::<Vec<Vec<u8>>>(&["KEYS", "*"]));
    keys.map(|key| cluster.slot_of(key)).collect()
}

/// Fault F6.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_primary_of_a_cluster_is_replaced_by_its_replica() {
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
    println!("cluster failover: decided by the failure setting for {:?}", start.elapsed());
    assert_eq!(back, left, "the replica has the state");
    assert_eq!(cluster.primary_of(slot), replica);
    assert!(redis.counts().denied > 0, "meanwhile the failure setting decides");
    let decision = until("it can be written", async || {
        limiter.check("alice").await.ok().filter(|decision| decision.source == Source::Store)
    })
    .await;
    assert_eq!(decision.remaining, left - 1);
    cluster.wait_until_ok(PATIENCE);
    assert_all_expire(&cluster);
}

/// All keys are in slots that move during the checks.
///
/// Fault F9.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn moving_slots_lose_no_decision_and_charge_no_unit_twice() {
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
            let redis = redis.clone();
            tokio::spawn(async move {
                let mut charged = 1;
                while !stop.load(Ordering::Relaxed) {
                    let decision = limiter.check(&name).await.expect("a decision");
                    assert_eq!(
                        (decision.allowed, decision.source),
                        (true, Source::Store),
                        "{name}: {:?}",
                        redis.last_error()
                    );
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
            // New keys of a moving slot are redirected; keys that have not moved yet are not.
            tokio::task::yield_now().await;
            cluster.migrate_keys(*slot, to);
            let before = redis.counts().redirections;
            until("a check is redirected", async || {
                (redis.counts().redirections > before).then_some(())
            })
            .await;
            cluster.end_migration(*slot, to);
        }
    }
    stop.store(true, Ordering::Relaxed);
    let charged = join_all(asking).await;
    for (name, charged) in names.iter().zip(charged) {
        let charged: u64 = charged.expect("the store makes every decision");
        let used = 1_000_000 - limiter.peek(Ask::new(name).cost(0)).await.unwrap().remaining;
        assert_eq!(used, charged, "{name}");
    }
    let counts = redis.counts();
    assert_eq!(counts.errors, 0, "{:?}", redis.last_error());
    assert!(counts.redirections > 0);
    assert_all_expire(&cluster);
}

/// During a reshard, two servers may redirect a call to each other until both know the new owner.
///
/// Fault F9.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_servers_redirect_to_each_other_is_decided_once_they_agree() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let limiter = Arc::new(limiter(&redis, count(10), OnFailure::Deny));
    assert!(limiter.check("alice").await.unwrap().allowed);
    let slot = *slots(&cluster).iter().next().expect("the key of alice");
    let from = cluster.primary_of(slot);
    let to = (from + 1) % 3;
    // A server gives up a slot only if the slot has no keys.
    cluster.nodes()[from].ask::<()>(&["FLUSHALL"]);

    cluster.assign_slot(from, slot, to);
    let before = redis.counts().redirections;
    let check = tokio::spawn(async move { limiter.check("alice").await });
    until("the servers redirect the call in a circle", async || {
        (redis.counts().redirections > before + 10).then_some(())
    })
    .await;
    assert!(!check.is_finished());
    cluster.assign_slot(to, slot, to);
    let decision = check.await.expect("no panic").unwrap();
    assert_eq!((decision.allowed, decision.source, decision.remaining), (true, Source::Store, 9));
}

/// Fault F11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_reply_a_cluster_lost_is_not_repeated() {
    let cluster = Cluster::start(Flavor::Redis, 1, 0);
    let node = &cluster.nodes()[0];
    // The cluster announces the address of the proxy for this server.
    let proxy = Proxy::start(&node.address());
    let port = proxy.address().rsplit_once(':').unwrap().1.to_owned();
    node.ask::<()>(&["CONFIG", "SET", "cluster-announce-port", &port]);
    let redis = patient(&format!("redis+cluster://{}", proxy.address()));
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);

    proxy.lose_next_reply_to("EVALSHA");
    let lost = limiter.check(Ask::new("alice").cost(4)).await.unwrap();
    assert_eq!(proxy.replies_lost(), 1, "the calls go through the proxy");
    assert_eq!((lost.allowed, lost.source), (false, Source::FailedClosed));
    let error = redis.last_error().expect("it says why");
    assert!(matches!(&*error, Error::Unavailable { sent: true, .. }), "{error:?}");
    assert_eq!(until_the_store_answers(&limiter, "alice").await, 5, "charged once");
    assert_all_expire(&cluster);
}

/// All policies of a client are in one slot, so they are decided in one step. A client cannot choose the slot.
///
/// Faults F15, F16.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn policies_of_a_client_share_a_slot_and_clients_are_spread() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let make = |name: &'static str| {
        RateLimiter::with_store(count(5), redis.store(name).on_failure(OnFailure::Deny))
    };
    let limiters = ["second", "{minute}", "d}a{y"].map(make);
    // One key per client: all of them would be in the slot of `x` if braces counted.
    let clients: Vec<String> = (0..60).map(|client| format!("{{x}}{client}")).collect();
    for client in &clients {
        let asks = limiters.each_ref().map(|limiter| JointAsk::of(limiter, client).unwrap());
        let calls = redis.counts().calls;
        let joint = check_all(asks).await.unwrap();
        assert!(joint.decision.allowed);
        assert_eq!(joint.decision.source, Source::Store, "{:?}", redis.last_error());
        assert_eq!(joint.decision.remaining, 4);
        // More calls only where a server was not known yet.
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

/// Fault F17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_setting_decides_on_slots_without_a_server() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let redis = patient(&cluster_url(&cluster));
    let limiter = limiter(&redis, count(1_000), OnFailure::Deny);
    let clients: Vec<String> = (0..20).map(|client| format!("client {client}")).collect();
    for client in &clients {
        assert_eq!(limiter.check(client).await.unwrap().source, Source::Store);
    }
    cluster.kill(2);
    // Keys of the other servers work until these notice it; then none do.
    until("the cluster says that it is down", async || {
        let mut is_down = false;
        for client in &clients {
            let decision = limiter.check(client).await.expect("a decision");
            let expected = [Source::Store, Source::FailedClosed];
            assert!(expected.contains(&decision.source), "{decision:?}");
            let error = redis.last_error().map(|error| error.to_string());
            is_down |= error.is_some_and(|error| error.contains("luster is down"));
        }
        is_down.then_some(())
    })
    .await;
    cluster.nodes()[2].restart();
    until("all are decided on again", async || {
        for client in &clients {
            let decision = limiter.check(client).await.expect("a decision");
            if decision.source != Source::Store {
                return None;
            }
        }
        Some(())
    })
    .await;
    assert_all_expire(&cluster);
}

/// A call on several keys of a moving slot is repeated within its time budget. Then the failure setting decides.
///
/// Faults F9, F17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_keys_of_a_moving_slot_are_decided_once_it_has_moved() {
    let cluster = Cluster::start(Flavor::Redis, 2, 0);
    let (redis, hasty) = (patient(&cluster_url(&cluster)), open(&cluster));
    let limiters = |redis: &Redis| {
        ["first", "second"].map(|name| {
            RateLimiter::with_store(count(5), redis.store(name).on_failure(OnFailure::Deny))
        })
    };
    let (patient_limiters, hasty_limiters) = (limiters(&redis), limiters(&hasty));
    assert_eq!(patient_limiters[0].check("alice").await.unwrap().source, Source::Store);
    // Both clients know the servers.
    assert_eq!(until_the_store_answers(&hasty_limiters[0], "alice").await, 4);
    let slot = *slots(&cluster).iter().next().unwrap();
    let to = 1 - cluster.primary_of(slot);
    cluster.begin_migration(slot, to);
    // One key is here and the other does not exist: no server can decide on both.
    let both = async |limiters: &[Limiter; 2]| {
        let asks = limiters.each_ref().map(|limiter| JointAsk::of(limiter, "alice").unwrap());
        check_all(asks).await.unwrap().decision
    };
    assert_eq!(both(&hasty_limiters).await.source, Source::FailedClosed);
    let error = hasty.last_error().expect("it says why").to_string();
    assert!(error.contains("TRYAGAIN") || error.contains("Multiple keys"), "{error}");

    let before = redis.counts().calls;
    let move_slot = async {
        until("the call is repeated", async || (redis.counts().calls > before + 5).then_some(()))
            .await;
        cluster.migrate_keys(slot, to);
        cluster.end_migration(slot, to);
    };
    let (decision, ()) = tokio::join!(both(&patient_limiters), move_slot);
    assert_eq!((decision.allowed, decision.source), (true, Source::Store));
    assert_eq!(decision.remaining, 3, "nothing was charged meanwhile");
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_all_expire(&cluster);
}

/// Keys in different slots are charged one after the other, and refunded if a later one denies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_different_slots_are_all_charged_or_all_refunded() {
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
        let joint = ask().await;
        assert!(joint.decision.allowed && joint.decision.remaining == left, "{joint:?}");
    }
    assert_eq!(slots(&cluster).len(), 2, "they are in different slots");
    let joint = ask().await;
    assert_eq!((joint.decision.allowed, joint.denied_ask), (false, Some(1)));
    assert_eq!(users.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 4, "returned");
    // Many at once: never more than the quota, and all unused units are available again.
    let decisions = join_all((0..30).map(|_| ask())).await;
    assert!(decisions.iter().all(|joint| !joint.decision.allowed));
    assert_eq!(users.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 4, "returned");
    assert_eq!(addresses.peek(Ask::new("192.0.2.1").cost(0)).await.unwrap().remaining, 0);
    assert_eq!(redis.counts().errors, 0, "{:?}", redis.last_error());
    assert_all_expire(&cluster);
}

/// Servers without a configured secret share the one that the first of them stored: so they share quotas, and a client
/// cannot predict the slot of its key.
///
/// Fault J13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_share_a_secret_for_slots_that_the_first_of_them_stored() {
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
    // Another fleet with another secret has the same client in another slot.
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
