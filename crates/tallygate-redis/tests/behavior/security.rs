//! Hostile names, passwords and certificates.

use std::collections::HashSet;

use crate::common::log::Log;
use crate::common::{
    AMPLE, assert_all_expire, count, limiter, patient, until, until_the_store_answers,
};
use tallygate::{Ask, RateLimiter, Source};
use tallygate_redis::{InFlight, JointAsk, OnFailure, Options, Redis, check_all};
use tallygate_testkit::servers::{Flavor, Server};

const HOSTILE: [&str; 8] = [
    "\"); redis.call('FLUSHALL') --",
    "'); redis.call('FLUSHALL') --",
    "]] redis.call('FLUSHALL') --[[",
    "*/ FLUSHALL",
    "alice\r\nFLUSHALL\r\n",
    "KEYS[1]",
    "--[[penalty",
    "\\\" .. redis.call('FLUSHALL') .. \\\"",
];

/// Fault H4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_are_never_part_of_a_script() {
    let server = Server::start(Flavor::Redis);
    server.ask::<()>(&["SET", "witness", "here", "EX", "1000"]);
    let redis = patient(&server.url());
    for policy in HOSTILE {
        let store = redis.store(policy).on_failure(OnFailure::Deny);
        let policy = tallygate::Policy::sliding_window_counter(10).per_day().named(policy);
        let limiter = RateLimiter::with_store(policy.build().unwrap(), store);
        for client in HOSTILE {
            // The text of the script is sent again.
            server.ask::<()>(&["SCRIPT", "FLUSH"]);
            let decision = limiter.check(client).await.unwrap();
            assert_eq!((decision.remaining, decision.source), (9, Source::Store), "{client}");
            let decision =
                check_all([JointAsk::of(&limiter, client).unwrap()]).await.unwrap().decision;
            assert_eq!((decision.remaining, decision.source), (8, Source::Store), "{client}");
            assert_eq!(limiter.refund(client).await.unwrap().remaining, 9, "{client}");
        }
    }
    let in_flight = InFlight::new(&redis, HOSTILE[0], 1, AMPLE);
    let place = in_flight.enter(HOSTILE[1]).await.unwrap().expect("there is one");
    place.leave().await.unwrap();
    let witness: String = server.ask(&["GET", "witness"]);
    assert_eq!(witness, "here");
    let keys: u64 = server.ask(&["DBSIZE"]);
    assert_eq!(keys, 1 + 2 * 8 * 8, "one key per pair, and one for its refunds");
    assert_all_expire(&server);
}

/// Fault H8.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn names_that_are_split_elsewhere_are_different_keys() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let pairs = [
        ("a:b", "c"),
        ("a", "b:c"),
        ("a=b", "c"),
        ("a", "b=c"),
        ("", "a:b:c"),
        ("a:b:c", ""),
        ("1:a", "b"),
        ("1", ":a=b"),
        ("in flight/a", "b"),
    ];
    let long = "x".repeat(200);
    let longer = "x".repeat(201);
    for (policy, client) in pairs.into_iter().chain([("a", &*long), ("a", &*longer)]) {
        let limiter = RateLimiter::with_store(count(1), redis.store(policy));
        let decision = limiter.check(client).await.unwrap();
        assert_eq!(
            (decision.allowed, decision.source),
            (true, Source::Store),
            "{policy:?} {client:?}"
        );
        assert!(!limiter.check(client).await.unwrap().allowed, "{policy:?} {client:?}");
    }
    let keys: Vec<Vec<u8>> = server.ask(&["KEYS", "*"]);
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), pairs.len() + 2);
    assert_all_expire(&server);
}

/// The user of `docs/redis-format.md`, with the fewest permissions.
fn set_user(server: &Server, password: &str) {
    let password = format!(">{password}");
    let mut words = vec!["ACL", "SETUSER", "limiter", "on", &password, "~tallygate:*"];
    words.extend(["+eval", "+evalsha", "+get", "+set", "+del", "+time", "+select"]);
    server.ask::<()>(&words);
}

/// Fault H9.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tls_users_passwords_and_databases_are_those_of_the_address() {
    let server = Server::with_tls(Flavor::Redis);
    set_user(&server, "pass/word@1");
    let address = server.rediss_url().replace("rediss://", "rediss://limiter:pass%2Fword%401@");
    let authority = std::fs::read(server.ca_certificate()).unwrap();
    let options = Options::default().budget(AMPLE).root_certificates(authority);
    let redis = Redis::with(&format!("{address}2"), options.clone()).unwrap();
    let known = limiter(&redis, count(10), OnFailure::Deny);
    let decision = known.check("alice").await.unwrap();
    assert_eq!(decision.source, Source::Store, "{:?}", redis.last_error());
    assert_eq!(known.peek(Ask::new("alice").cost(0)).await.unwrap().remaining, 9);
    let keys = server.info("keyspace").remove("db2").expect("it is in that database");
    assert!(keys.starts_with("keys=1,expires=1"), "{keys}");
    let users: String = server.ask(&["CLIENT", "LIST"]);
    assert!(users.contains("user=limiter"), "{users}");

    // A server without a trusted certificate is not used.
    let strangers = Options::default().budget(AMPLE);
    let redis = Redis::with(&address, strangers).unwrap();
    let decision = limiter(&redis, count(10), OnFailure::Deny).check("alice").await.unwrap();
    assert_eq!(decision.source, Source::FailedClosed);
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.to_lowercase().contains("certificate"), "{error}");

    // The failure setting decides if the user has no permission.
    let others = options.prefix("others:");
    let redis = Redis::with(&address, others).unwrap();
    let decision = limiter(&redis, count(10), OnFailure::Deny).check("alice").await.unwrap();
    assert_eq!(decision.source, Source::FailedClosed);
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.contains("NOPERM"), "{error}");
}

/// Faults H9, H10.
#[tokio::test]
async fn no_message_contains_a_password() {
    const SECRET: &str = "hunter2%24x";
    let log = Log::start();
    let server = Server::start(Flavor::Redis);
    set_user(&server, "another");
    let dead = Server::start(Flavor::Redis);
    dead.kill();
    let mut said = Vec::new();
    for (login, host, path) in [
        ("limiter", server.address(), "redis://"),
        ("", server.address(), "redis://"),
        ("limiter", dead.address(), "redis://"),
        ("limiter", server.address(), "rediss://"),
        ("limiter", "host.invalid:6379".into(), "redis://"),
        ("limiter", server.address(), "redis+cluster://"),
        ("limiter", format!("{},{}", dead.address(), server.address()), "redis+cluster://"),
        ("limiter", format!("{}/main", dead.address()), "redis+sentinel://"),
    ] {
        let address = format!("{path}{login}:{SECRET}@{host}");
        let redis = patient(&address);
        let limiter = limiter(&redis, count(10), OnFailure::Deny);
        for _ in 0..4 {
            let decision = limiter.check("alice").await.unwrap();
            assert_eq!(decision.source, Source::FailedClosed, "{host}");
            let error = redis.last_error().expect("it says why");
            said.push(format!("{error} {error:?}"));
        }
        said.push(format!("{redis:?} {:?} {limiter:?}", limiter.store()));
        let in_flight = InFlight::new(&redis, "uploads", 1, AMPLE);
        let error = in_flight.enter("alice").await.unwrap_err();
        said.push(format!("{in_flight:?} {error} {error:?}"));
    }
    for wrong in [format!("redis://limiter:{SECRET}@host:port"), format!("x://:{SECRET}@host")] {
        let error = Redis::open(&wrong).unwrap_err();
        said.push(format!("{error} {error:?}"));
    }
    assert!(said[0].contains("WRONGPASS") || said[0].contains("uthentication"), "{}", said[0]);
    let logged = log.lines();
    assert!(logged.iter().any(|line| line.contains("redis check failed")), "{logged:?}");
    assert!(
        logged.iter().any(|line| line.contains("sending no checks to it until a probe succeeds")),
        "{logged:?}"
    );
    for line in said.iter().chain(&logged) {
        assert!(!line.contains("hunter2"), "{line}");
    }
}

/// A password is changed on the server: an open connection stays, and the next one needs the new password.
///
/// Fault H9.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_that_becomes_valid_is_accepted() {
    let server = Server::start(Flavor::Redis);
    set_user(&server, "old");
    let redis = patient(&server.url().replace("redis://", "redis://limiter:new@"));
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::FailedClosed);
    server.ask::<()>(&["ACL", "SETUSER", "limiter", ">new"]);
    until_the_store_answers(&limiter, "alice").await;
    until("it is charged", async || {
        limiter
            .check("alice")
            .await
            .ok()
            .filter(|decision| decision.source == Source::Store)
            .map(|_| ())
    })
    .await;
    assert_all_expire(&server);
}
