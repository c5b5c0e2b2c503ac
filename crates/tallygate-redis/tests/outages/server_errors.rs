//! Servers that return errors or unexpected values: forgotten scripts, lost replies, no memory, foreign values.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::log::Log;
use crate::common::{
    AMPLE, assert_all_expire, burst, count, limiter, only_key, patient, until,
    until_the_store_answers,
};
use futures_util::future::join_all;
use tallygate::algorithm::Op;
use tallygate::policy::Penalty;
use tallygate::store::Store as _;
use tallygate::{Ask, Decision, Kind, Policy, Source, Tick, Ticks};
use tallygate_redis::{Error, OnFailure, Options, Redis};
use tallygate_testkit::servers::{Flavor, Proxy, Server};

/// Checks by several tasks while a function runs. Returns all decisions.
async fn under_load(
    limiter: &Arc<crate::common::Limiter>,
    meanwhile: impl AsyncFnOnce(),
) -> Vec<(Decision, Instant)> {
    let stop = Arc::new(AtomicBool::new(false));
    let asking: Vec<_> = (0..8)
        .map(|_| {
            let (limiter, stop) = (limiter.clone(), stop.clone());
            tokio::spawn(async move {
                let mut decisions = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    let decision = limiter.check("alice").await.expect("a decision");
                    decisions.push((decision, Instant::now()));
                }
                decisions
            })
        })
        .collect();
    meanwhile().await;
    stop.store(true, Ordering::Relaxed);
    join_all(asking).await.into_iter().flat_map(|decision| decision.expect("no panic")).collect()
}

/// Fault F10.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_that_a_server_forgot_are_sent_again() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = Arc::new(limiter(&redis, count(1_000_000), OnFailure::Deny));
    let decisions = under_load(&limiter, async || {
        for _ in 0..50 {
            server.ask::<()>(&["SCRIPT", "FLUSH"]);
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    })
    .await;
    let from_store =
        decisions.iter().filter(|(decision, _)| decision.source == Source::Store).count();
    assert_eq!(from_store, decisions.len(), "{:?}", redis.last_error());
    let used = 1_000_000 - limiter.peek(Ask::new("alice").cost(0)).await.unwrap().remaining;
    assert_eq!(used, decisions.len() as u64, "each is charged once");
    assert!(redis.counts().reloads > 1, "{:?}", redis.counts());
    assert_eq!(redis.counts().errors, 0);
    assert_all_expire(&server);
}

/// Fault F11.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_whose_reply_was_lost_is_not_repeated() {
    let server = Server::start(Flavor::Redis);
    let proxy = Proxy::start(&server.address());
    let redis = patient(&proxy.url());
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);

    proxy.lose_next_reply_to("EVALSHA");
    let lost = limiter.check(Ask::new("alice").cost(4)).await.unwrap();
    assert_eq!((lost.allowed, lost.source), (false, Source::FailedClosed));
    assert_eq!(proxy.replies_lost(), 1);
    let error = redis.last_error().expect("it says why");
    assert!(matches!(&*error, Error::Unavailable { sent: true, .. }), "{error:?}");
    assert_eq!(until_the_store_answers(&limiter, "alice").await, 5, "charged once");

    // By compare-and-set as well. Only the call that writes contains the start of a value.
    proxy.lose_next_reply_to("\u{1}n");
    let refund = limiter.reset("alice").await;
    assert!(matches!(refund, Err(Error::Unavailable { sent: true, .. })), "{refund:?}");
    until_the_store_answers(&limiter, "alice").await;
    assert_all_expire(&server);
}

/// Fault F12.
#[tokio::test]
async fn the_client_warns_once_about_an_eviction_policy_that_drops_keys() {
    for (policy, warnings) in [("allkeys-lru", 1), ("volatile-ttl", 1), ("noeviction", 0)] {
        let log = Log::start();
        let server = Server::with(Flavor::Redis, &["--maxmemory-policy", policy]);
        let redis = patient(&server.url());
        let limiter = limiter(&redis, burst(100), OnFailure::Deny);
        // The first decision starts the lookup on the same connection, so it is answered before the last decision.
        for _ in 0..20 {
            assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
            tokio::task::yield_now().await;
        }
        if warnings > 0 {
            until("the eviction policy is read", async || {
                (redis.counts().eviction_warnings > 0).then_some(())
            })
            .await;
        }
        assert_eq!(redis.counts().eviction_warnings, warnings, "{policy}");
        let said = log.lines().iter().filter(|line| line.contains("maxmemory-policy")).count();
        assert_eq!(said as u64, warnings, "{policy}: {:?}", log.lines());
        assert_eq!(log.lines().iter().any(|line| line.contains(policy)), warnings > 0);
        assert_all_expire(&server);
    }
}

/// Fault F13.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_setting_decides_while_the_server_is_out_of_memory() {
    let server = Server::with(Flavor::Redis, &["--maxmemory", "100mb"]);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);
    server.ask::<()>(&["CONFIG", "SET", "maxmemory", "1"]);
    let decision = limiter.check("alice").await.unwrap();
    assert_eq!((decision.allowed, decision.source), (false, Source::FailedClosed));
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.contains("OOM"), "{error}");
    server.ask::<()>(&["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 8, "nothing was charged");
    assert!(!redis.counts().is_open, "a server that returns errors is available");
    assert_all_expire(&server);
}

/// Policies of every kind, with and without options: each uses other scripts.
fn policies() -> Vec<Policy> {
    let mut policies: Vec<Policy> = Kind::ALL
        .into_iter()
        .flat_map(|kind| {
            let limit = || Policy::of(kind, 10).per(Ticks(60_000_000));
            let penalty = Penalty::lasting(Ticks(1_000_000)).after(3);
            [limit().build(), limit().penalty(penalty).build()]
        })
        .map(|policy| policy.expect("valid"))
        .collect();
    let deep = Policy::token_bucket(1_000_003).per(Ticks(1 << 50)).burst(1_000_000);
    policies.push(deep.build().expect("valid"));
    let wide = Policy::token_bucket(10).per(Ticks(1 << 58));
    policies.push(wide.build().expect("valid"));
    policies
}

/// A foreign or damaged value under a key of the limiter.
///
/// Fault F14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_corrupt_value_is_not_used_as_a_state() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let mut connection = server.connection().unwrap();
    for policy in policies() {
        server.ask::<()>(&["FLUSHALL"]);
        let store = redis.store("api").on_failure(OnFailure::Deny).in_ticks();
        let now = Some(Tick(1_000_000_000_000));
        let check = async |key: &[u8]| {
            store.apply::<Decision>(&policy, key, Op::Check(2), now).await.expect("a decision")
        };
        assert_eq!(check(b"alice").await.source, Source::Store);
        let key = only_key(&server);
        let good: Vec<u8> = server.ask(&[b"GET", &key[..]]);
        let other = check(b"bob").await.remaining;

        let number = |at: usize, number: f64| {
            let mut value = good.clone();
            let at = value.len() - at;
            value[at..at + 8].copy_from_slice(&number.to_be_bytes());
            value
        };
        let mut values: Vec<(String, Vec<u8>)> = Vec::new();
        for cut in 1..good.len() {
            values.push((format!("cut to {cut}"), good[..cut].to_vec()));
        }
        values.push(("more than all".into(), [&good[..], b"x"].concat()));
        values.push(("more than all".into(), [&good[..], &[0; 8]].concat()));
        values.push(("text".into(), b"hello".to_vec()));
        values.push(("noise".into(), (0..=255).collect()));
        values.push(("nothing".into(), vec![0; 64]));
        if good[1] == b'n' {
            let numbers = (good.len() - numbers_begin(&good)) / 8;
            for place in 1..=numbers {
                for wrong in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 1e300, -1e300, 0.5] {
                    values
                        .push((format!("{wrong} {place} from the end"), number(place * 8, wrong)));
                }
            }
            // The last number is a count, a level or a total, which is never negative.
            if policy.limits()[0].penalty().is_none() {
                values.push(("a negative count".into(), number(8, -5.0)));
            }
        }
        let (mut asked, before) = (0, redis.counts().errors);
        for (what, value) in values {
            set(&mut connection, &key, &value);
            for (op, after) in [(Op::Check(2), 0), (Op::Check(2), 10), (Op::Peek(2), 0)] {
                let then = now.map(|now| Tick(now.0 + after));
                let decision = store.apply::<Decision>(&policy, b"alice", op, then).await.unwrap();
                let value = value.escape_ascii();
                assert_eq!(
                    decision.source,
                    Source::FailedClosed,
                    "{op:?} {what} {policy:?}: {value}"
                );
                let error = redis.last_error().expect("it says why");
                let says = matches!(*error, Error::Corrupt { .. } | Error::Server { .. });
                assert!(says, "{what}: {error:?}");
                asked += 1;
            }
            let forced = store.apply::<Decision>(&policy, b"alice", Op::Force(1), now).await;
            assert!(forced.is_err(), "{what} {policy:?}: {forced:?}");
            asked += 1;
            let kept: Vec<u8> = server.ask(&[b"GET", &key[..]]);
            assert_eq!(kept, value, "{what}: whatever it is, it is not ours to overwrite");
        }
        assert_eq!(redis.counts().errors - before, asked, "counted");
        assert_eq!(check(b"bob").await.remaining, other - 2, "other clients are not affected");
        assert!(!redis.counts().is_open);
    }
}

/// Returns where the numbers of a value begin: after two bytes, a length, and the description of the policy.
fn numbers_begin(value: &[u8]) -> usize {
    let length = value[2..6].try_into().expect("four bytes");
    6 + u32::from_be_bytes(length) as usize
}

fn set(connection: &mut redis::Connection, key: &[u8], value: &[u8]) {
    let mut command = redis::cmd("SET");
    command.arg(key).arg(value).arg("EX").arg(1000);
    command.query::<()>(connection).expect("SET succeeds");
}

/// Fault F14.
#[tokio::test]
async fn a_value_of_another_type_is_not_changed_and_is_logged() {
    let log = Log::start();
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    for policy in [burst(10), count(10)] {
        server.ask::<()>(&["FLUSHALL"]);
        let limiter = limiter(&redis, policy, OnFailure::Deny);
        assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
        let key = only_key(&server);
        server.ask::<()>(&[b"DEL", &key[..]]);
        server.ask::<()>(&[b"RPUSH", &key[..], b"a", b"b"]);
        for decision in [limiter.check("alice").await, limiter.peek("alice").await] {
            assert_eq!(decision.unwrap().source, Source::FailedClosed);
            let error = redis.last_error().expect("it says why").to_string();
            assert!(error.contains("WRONGTYPE"), "{error}");
        }
        let length: u64 = server.ask(&[b"LLEN", &key[..]]);
        assert_eq!(length, 2);
        assert_eq!(limiter.check("bob").await.unwrap().source, Source::Store);
    }
    assert!(log.lines().iter().any(|line| line.contains("WRONGTYPE")), "{:?}", log.lines());
}

/// Fault F17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_setting_decides_while_a_script_keeps_the_server_busy() {
    let server = Server::with(Flavor::Redis, &["--busy-reply-threshold", "1"]);
    let redis = patient(&server.url());
    let limiter = limiter(&redis, count(10), OnFailure::Deny);
    assert_eq!(limiter.check("alice").await.unwrap().remaining, 9);
    let mut connection = server.connection().unwrap();
    let busy = thread::spawn(move || {
        redis::cmd("EVAL").arg("while true do end").arg(0).query::<()>(&mut connection)
    });
    let decision = until("it is busy", async || {
        let decision = limiter.check("alice").await.expect("a decision");
        (decision.source != Source::Store).then_some(decision)
    })
    .await;
    assert_eq!((decision.allowed, decision.source), (false, Source::FailedClosed));
    let error = redis.last_error().expect("it says why").to_string();
    assert!(error.to_lowercase().contains("busy"), "{error}");
    server.ask::<()>(&["SCRIPT", "KILL"]);
    assert!(busy.join().expect("no panic").is_err());
    assert_eq!(limiter.check("alice").await.unwrap().source, Source::Store);
    assert!(!redis.counts().is_open, "a server that returns errors is available");
    assert_all_expire(&server);
}

/// A server that answers every command with the same line.
fn answering(line: &'static str) -> (u16, Arc<AtomicU64>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let port = listener.local_addr().expect("bound").port();
    let commands = Arc::new(AtomicU64::new(0));
    let counted = commands.clone();
    thread::spawn(move || {
        for connection in listener.incoming().map_while(Result::ok) {
            let counted = counted.clone();
            thread::spawn(move || {
                let mut writer = connection.try_clone().expect("a socket");
                let mut reader = BufReader::new(connection);
                // An array of bulk strings: `*n`, then `$length` and the bytes of each.
                loop {
                    let number = |reader: &mut BufReader<_>, sign| -> Option<usize> {
                        let mut line = String::new();
                        reader.read_line(&mut line).ok()?;
                        line.trim_end().strip_prefix(sign)?.parse().ok()
                    };
                    let Some(words) = number(&mut reader, '*') else { return };
                    for _ in 0..words {
                        let Some(length) = number(&mut reader, '$') else { return };
                        let mut word = vec![0; length + 2];
                        if reader.read_exact(&mut word).is_err() {
                            return;
                        }
                    }
                    counted.fetch_add(1, Ordering::Relaxed);
                    if writer.write_all(format!("{line}\r\n").as_bytes()).is_err() {
                        return;
                    }
                }
            });
        }
    });
    (port, commands)
}

/// Fault F17.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_failure_setting_decides_after_every_error_of_a_server() {
    for line in [
        "-LOADING Redis is loading the dataset in memory",
        "-CLUSTERDOWN The cluster is down",
        "-TRYAGAIN Multiple keys request during rehashing of slot",
        "-BUSY Redis is busy running a script.",
        "-MASTERDOWN Link with MASTER is down",
        "-NOREPLICAS Not enough good replicas to write.",
        "-MISCONF Redis is configured to save RDB snapshots",
        "-NOPERM this user has no permissions",
        "-ERR unknown command",
        "-NOSCRIPT No matching script.",
        "-MOVED 0 127.0.0.1:1",
        "-ASK 0 127.0.0.1:1",
        "-MOVED",
        "+OK",
        ":1",
        "$-1",
        "*0",
        "*3\r\n:1\r\n:1\r\n:1",
        "*3\r\n$1\r\nx\r\n:1\r\n:1",
        "$3\r\nabc",
        "%1\r\n+a\r\n+b",
    ] {
        let (port, commands) = answering(line);
        let options = Options::default().budget(AMPLE);
        let redis = Redis::with(&format!("redis://127.0.0.1:{port}"), options).unwrap();
        let limiter = limiter(&redis, count(10), OnFailure::Deny);
        let decision = until("the error is seen", async || {
            let decision = limiter.check("alice").await.expect("a decision");
            assert_eq!(
                (decision.allowed, decision.source),
                (false, Source::FailedClosed),
                "{line}"
            );
            (commands.load(Ordering::Relaxed) > 0).then_some(decision)
        })
        .await;
        assert!(decision.retry_after.is_some());
        assert!(redis.last_error().is_some(), "{line}");
        let peeked = limiter.peek("alice").await.unwrap();
        assert_eq!(peeked.source, Source::FailedClosed, "{line}");
        assert!(limiter.reset("alice").await.is_err(), "{line}");
    }
}

/// Fault F20.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_all_keys_costs_at_most_one_extra_burst() {
    const BURST: u64 = 50;
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let limiter = Arc::new(limiter(&redis, burst(BURST), OnFailure::Deny));
    let decisions = under_load(&limiter, async || {
        until("the burst is used", async || {
            (limiter.peek(Ask::new("alice").cost(0)).await.ok()?.remaining == 0).then_some(())
        })
        .await;
        server.ask::<()>(&["FLUSHALL"]);
        until("the burst is used again", async || {
            (limiter.peek(Ask::new("alice").cost(0)).await.ok()?.remaining == 0).then_some(())
        })
        .await;
    })
    .await;
    let allowed = decisions.iter().filter(|(decision, _)| decision.allowed).count() as u64;
    assert_eq!(allowed, 2 * BURST, "exactly one extra burst");
    assert!(decisions.iter().all(|(decision, _)| decision.source == Source::Store));
    assert_all_expire(&server);
}

/// Every value that any operation writes expires, soon after it is fresh.
///
/// Fault F21.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_key_expires_when_it_is_fresh_again() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    for kind in Kind::ALL {
        for penalty in [false, true] {
            let mut limit = Policy::of(kind, 10).per_minute();
            if penalty {
                limit = limit.penalty(Penalty::lasting(Ticks(30_000_000_000)).after(2));
            }
            let limiter = limiter(&redis, limit.build().unwrap(), OnFailure::Deny);
            for (client, verb) in ["check", "deny", "force", "refund"].iter().enumerate() {
                server.ask::<()>(&["FLUSHALL"]);
                let key = format!("client {client}");
                let decision = limiter.check(Ask::new(&key).cost(5)).await.unwrap();
                assert_eq!(decision.source, Source::Store);
                let reset_after = match *verb {
                    "check" => limiter.check(&key).await.unwrap().reset_after,
                    "deny" => {
                        let _ = limiter.check(Ask::new(&key).cost(9)).await.unwrap();
                        limiter.check(Ask::new(&key).cost(9)).await.unwrap().reset_after
                    }
                    "force" => {
                        let more = limiter.reserve(&key, Ticks(60_000_000_000)).await.unwrap();
                        let mut more = more.granted().unwrap();
                        limiter.settle(&mut more, 3).await.unwrap().reset_after
                    }
                    _ => limiter.refund(Ask::new(&key).cost(2)).await.unwrap().reset_after,
                };
                assert_all_expire(&server);
                let left: i64 = server.ask(&[b"PTTL", &only_key(&server)[..]]);
                let left = Duration::from_millis(left.try_into().unwrap());
                let fresh = reset_after.as_duration();
                let what = format!("{kind} {verb} {penalty}: {left:?} for {fresh:?}");
                // Some time passed between the two calls.
                assert!(left + Duration::from_secs(1) > fresh, "too early: {what}");
                assert!(left <= fresh.max(Duration::from_secs(120)), "too late: {what}");
            }
        }
    }
}
