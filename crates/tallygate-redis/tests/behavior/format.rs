//! The values in Redis, byte for byte: programs of other versions read and write them.
//!
//! If one of these tests fails, the format has changed. It then needs another version number, and values of this version
//! must still be read: see `docs/redis-format.md`.

use crate::common::{only_key, patient};
use tallygate::algorithm::{Algorithm as _, LimitRecord, Op, Part, Timed};
use tallygate::policy::Penalty;
use tallygate::store::Store as _;
use tallygate::{Ask, Decision, Policy, RateLimiter, Source, Tick, Ticks, Tiers};
use tallygate_redis::{CustomStore, OnFailure, RedisStore};
use tallygate_testkit::servers::{Flavor, Server};

const NOW: i64 = 1_760_000_000_000_000;

/// The operations on a client, each a thousand microseconds after the previous one.
const HISTORY: [Op; 3] = [Op::Check(2), Op::Check(1), Op::Check(60)];

/// The values of this version after these operations, in hexadecimal. Never change one: add one.
fn golden() -> Vec<(Policy, &'static str)> {
    let per_minute = Ticks(60_000_000);
    let one = |limit: tallygate::policy::LimitBuilder| limit.named("x").build().expect("valid");
    let penalty = Penalty::lasting(Ticks(9_000_000)).after(3);
    vec![
        (
            one(Policy::token_bucket(10).per(per_minute).burst(20)),
            "016e0000000f010178010a808ece1c141414000000431902d7bb380fa041712a4980000000",
        ),
        (
            one(Policy::gcra(10).per(per_minute)),
            "016e0000000f010178020a808ece1c0a0a0a000000431902d7bb380fa041712a4980000000",
        ),
        (
            one(Policy::leaky_bucket(10).per(per_minute).debt(5)),
            "016e0000000f010178030a808ece1c0a050a000000431902d7bb380fa041712a4980000000",
        ),
        (
            one(Policy::fixed_window(10).per(per_minute)),
            "016e0000000f010178040a808ece1c0a0a0a000000431902d7bb380fa04173130e800000004008000000000000",
        ),
        (
            one(Policy::sliding_window_log(10).per(per_minute)),
            "016e0000000f010178050a808ece1c0a0a0a000000431902d7bb380fa000000000000000004000000000000000431902d7bb3800004000000000000000431902d7bb380fa04008000000000000",
        ),
        (
            one(Policy::sliding_window_counter(10).per(per_minute)),
            "016e0000000f010178060a808ece1c0a0a0a000000431902d7bb380fa040080000000000000000000000000000",
        ),
        (
            one(Policy::token_bucket(60).per(per_minute).penalty(penalty)),
            "016e00000012010178013c808ece1c3c3c3c0003c0a8a504431902d7bb380fa04146e16c00000000431902d7bb381f403ff0000000000000",
        ),
        // A deep bucket: its levels need two numbers.
        (
            one(Policy::token_bucket(1_000_003).per(Ticks(1 << 40)).burst(1_000_000)),
            "016e0000001901017801c3843d808080808020c0843dc0843dc0843d000000431902d7bb381f40000000000000000042cf7fc4652a4800",
        ),
        // A wide bucket: it is not exact in doubles.
        (
            one(Policy::token_bucket(50).per(Ticks((1 << 58) + 1))),
            "0177000000140101780132818080808080808004323232000000100120013281808080808080800432320001d08ff0ecbdada006d7fe98b3e6cc99b30200",
        ),
        (
            Policy::all_of(
                "two",
                [
                    Policy::gcra(10).per(per_minute).named("a"),
                    Policy::fixed_window(100).per(per_minute).named("b").shadow(),
                ],
            )
            .expect("valid"),
            "016e0000001d020161020a808ece1c0a0a0a00000001620464808ece1c646464020000431902d7bb380fa041712a4980000000431902d7bb380fa04173130e80000000400800000000000000000000000000000000000000000000",
        ),
    ]
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let pairs = text.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).expect("text"), 16);
    pairs.map(|pair| byte(pair).expect("hexadecimal")).collect()
}

fn at(step: usize) -> Tick {
    Tick(NOW + 1000 * i64::try_from(step).expect("small"))
}

/// Applies an operation by the core.
fn core(policy: &Policy, state: &mut Box<[LimitRecord]>, op: Op, now: Tick) -> Decision {
    let mut part = Part { rule: policy, state, op };
    let agrees = part.allows(now);
    part.step::<Timed>(now, agrees).0.decision
}

/// Returns the state after the history.
fn state(policy: &Policy) -> Box<[LimitRecord]> {
    let mut state = policy.initial(at(0));
    for (step, op) in HISTORY.into_iter().enumerate() {
        let _ = core(policy, &mut state, op, at(step));
    }
    state
}

fn store(server: &Server) -> RedisStore {
    patient(&server.url()).store("api").on_failure(OnFailure::Deny).in_ticks()
}

fn value(server: &Server) -> Vec<u8> {
    server.ask(&[b"GET", &only_key(server)[..]])
}

const KEY: &str = "tallygate:{16b0}3:api=alice";

/// Fault I4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_values_of_this_version_are_pinned() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        let store = store(&server);
        for (policy, golden) in golden() {
            for (step, op) in HISTORY.into_iter().enumerate() {
                let decision = store.apply::<Decision>(&policy, b"alice", op, Some(at(step)));
                assert_eq!(decision.await.unwrap().source, Source::Store);
            }
            assert_eq!(String::from_utf8_lossy(&only_key(&server)), KEY);
            assert_eq!(hex(&value(&server)), golden, "{policy:?}");
            server.ask::<()>(&["FLUSHALL"]);
        }
    }
}

/// Scripts, compare-and-set and a change of the policy all read the values of another version correctly.
///
/// Fault I4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_of_another_version_are_read_on_every_path() {
    let server = Server::start(Flavor::Redis);
    let store = store(&server);
    let now = at(50);
    for (policy, golden) in golden() {
        for op in [Op::Check(3), Op::Check(60), Op::Peek(3), Op::Force(4), Op::Force(-1), Op::Reset]
        {
            server.ask::<()>(&[b"SET", KEY.as_bytes(), &unhex(golden), b"EX", b"1000"]);
            let decision = store.apply::<Decision>(&policy, b"alice", op, Some(now)).await.unwrap();
            let mut state = state(&policy);
            assert_eq!(decision, core(&policy, &mut state, op, now), "{op:?} {policy:?}");
            // The next operation reads the resulting value.
            let next = store.apply::<Decision>(&policy, b"alice", Op::Check(1), Some(at(51)));
            let expected = core(&policy, &mut state, Op::Check(1), at(51));
            assert_eq!(next.await.unwrap(), expected, "after {op:?} {policy:?}");
        }
        server.ask::<()>(&[b"SET", KEY.as_bytes(), &unhex(golden), b"EX", b"1000"]);
        let other = Policy::sliding_window_counter(40).per(Ticks(70_000_000)).build().unwrap();
        let decision = store.apply::<Decision>(&other, b"alice", Op::Check(3), Some(now)).await;
        let mut carried = other.carry(&policy, &state(&policy), now);
        assert_eq!(decision.unwrap(), core(&other, &mut carried, Op::Check(3), now), "{policy:?}");
        server.ask::<()>(&["FLUSHALL"]);
    }
}

/// Fault I4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_values_of_tiers_and_custom_algorithms_are_pinned() {
    let server = Server::start(Flavor::Redis);
    let policy = |limit| Policy::token_bucket(limit).per(Ticks(60_000_000)).named("x").build();
    let tiers = Tiers::new(policy(10).unwrap()).tier("pro", policy(20).unwrap());
    let limiter = RateLimiter::in_store("api", tiers, store(&server));
    let _ = limiter.check(Ask::new("alice").cost(3).at(at(0))).await.unwrap();
    let pro = Ask::new("alice").cost(4).tier("pro").at(at(1));
    assert_eq!(limiter.check(pro).await.unwrap().source, Source::Store);
    assert_eq!(hex(&value(&server)), SEVERAL);
    // A peek reads the state of the first tier.
    assert_eq!(limiter.peek(Ask::new("alice").cost(0).at(at(1))).await.unwrap().remaining, 3);

    server.ask::<()>(&["FLUSHALL"]);
    let own = CustomStore::new(&patient(&server.url()), "api").in_ticks();
    let rule = Policy::gcra(10).per(Ticks(60_000_000)).limit().unwrap();
    let limiter = RateLimiter::in_store("api", rule, own);
    assert_eq!(limiter.check(Ask::new("alice").cost(3).at(at(0))).await.unwrap().remaining, 7);
    assert_eq!(String::from_utf8_lossy(&only_key(&server)), KEY);
    assert_eq!(hex(&value(&server)), OWN);
}

const SEVERAL: &str = "017300000025016e0000000f0101780114808ece1c141414000000431902d7bb380fa0417406d4c0000000000640b5eece03e8000000000000000000000000190889f000000025016e0000000f010178010a808ece1c0a0a0a000000431902d7bb380fa0418406d4c0000000000640b5eece03e80000000000000000000000000aba6df0";
const OWN: &str = "016f020a808ece1c0a0a00028080f0ecbdada00680d1ca08";

/// Fault I4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_are_pinned() {
    let server = Server::start(Flavor::Redis);
    let long = "x".repeat(129);
    for (client, key) in [
        ("alice", KEY),
        ("", "tallygate:{94c2}3:api="),
        ("{x}\u{fc}", "tallygate:{443a}3:api={x}ü"),
        (
            &*long,
            "tallygate:{27dc}3:api#0ec9eb33e74510bcdd1f2ea55206e82f21649c5c2becbf2b433eb475b34c01bd",
        ),
    ] {
        let store = store(&server);
        let policy = Policy::gcra(10).per(Ticks(60_000_000)).build().unwrap();
        let decision =
            store.apply::<Decision>(&policy, client.as_bytes(), Op::Check(1), Some(at(0)));
        assert_eq!(decision.await.unwrap().source, Source::Store);
        assert_eq!(String::from_utf8_lossy(&only_key(&server)), key);
        server.ask::<()>(&["FLUSHALL"]);
    }
}

/// A later version may write values that this one cannot read. This version neither decides on them nor overwrites them.
///
/// Fault I4.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_value_of_an_unknown_version_is_not_changed() {
    let server = Server::start(Flavor::Redis);
    let store = store(&server);
    for (policy, golden) in golden() {
        for (place, byte) in [(0, 2), (0, 0), (1, b'z')] {
            let mut later = unhex(golden);
            later[place] = byte;
            server.ask::<()>(&[b"SET", KEY.as_bytes(), &later, b"EX", b"1000"]);
            for op in [Op::Check(1), Op::Peek(1)] {
                let decision = store.apply::<Decision>(&policy, b"alice", op, Some(at(50))).await;
                assert_eq!(decision.unwrap().source, Source::FailedClosed, "{op:?}");
            }
            let reset = store.apply::<Decision>(&policy, b"alice", Op::Force(1), Some(at(50)));
            assert!(reset.await.is_err());
            assert_eq!(value(&server), later, "it is still there");
        }
    }
}

/// Leases are stored beside the value, which is the same as without leases: a process without leases can use it.
///
/// Fault I4.
#[tokio::test]
async fn leases_are_stored_beside_an_unchanged_value() {
    let server = Server::start(Flavor::Redis);
    let redis = patient(&server.url());
    let policy = crate::common::burst(1000);
    let leases = tallygate_redis::Leases::default().life(std::time::Duration::from_secs(30));
    let leasing = redis.store("api").on_failure(OnFailure::Deny).leases(leases);
    let leasing = RateLimiter::with_store(policy.clone(), leasing);
    for _ in 0..20 {
        assert!(leasing.check("alice").await.unwrap().allowed);
    }
    let plain = crate::common::limiter(&redis, policy, OnFailure::Deny);
    assert!(plain.check("bob").await.unwrap().allowed);
    let value = |client: &str| {
        let mut keys: Vec<Vec<u8>> = server.ask(&["KEYS", &format!("*}}3:api{client}")]);
        assert_eq!(keys.len(), 1, "{client}: {keys:?}");
        server.ask::<Vec<u8>>(&[b"GET", &keys.remove(0)[..]])
    };
    let (alice, bob, out) = (value("=alice"), value("=bob"), value("~=alice"));
    let numbers = bob.len() - 16;
    assert_eq!((alice.len(), &alice[..numbers]), (bob.len(), &bob[..numbers]));
    assert_eq!((&out[..2], (out.len() - 2) % 16), (&[1, b'l'][..], 0), "{out:?}");
    // A list of leases that cannot be read counts as empty, and is overwritten.
    let key = server.ask::<Vec<Vec<u8>>>(&["KEYS", "*~=alice"]).remove(0);
    server.ask::<()>(&[b"SET", &key[..], b"garbage", b"PX", b"100000"]);
    for _ in 0..100 {
        assert!(leasing.check("alice").await.unwrap().allowed);
    }
    assert_eq!(value("~=alice")[..2], [1, b'l']);
    crate::common::assert_all_expire(&server);
}
