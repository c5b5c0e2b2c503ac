//! Tests floods of invented, colliding and expiring keys over the network: memory stays bounded, debts stay, and checks
//! stay fast. `scripts/abuse keys` does the same with ten million keys.

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Client, get};
use tallygate_testkit::servers::wait_until;

const PATIENCE: Duration = Duration::from_secs(20);
const MAX_KEYS: usize = 10_000;
/// The number of commands per pipeline.
const BATCH: usize = 1_000;

const POLICY: &str = "[policies.api]\nlimit = 100\nwindow = \"1000h\"\n";

fn served(policy: &str) -> Served {
    Served::start(&["--max-keys", &MAX_KEYS.to_string()], Some(policy))
}

/// A RESP connection.
struct RespClient(TcpStream);

impl RespClient {
    fn new(served: &Served) -> Self {
        let stream = TcpStream::connect(served.resp()).expect("the connection opens");
        stream.set_nodelay(true).expect("the socket option is set");
        stream.set_read_timeout(Some(PATIENCE)).expect("the timeout is set");
        Self(stream)
    }

    /// Checks keys and returns which are allowed.
    fn check(&mut self, keys: &[String], cost: u32) -> Vec<bool> {
        self.call("TG.CHECK", keys, cost)
    }

    fn call(&mut self, command: &str, keys: &[String], cost: u32) -> Vec<bool> {
        let mut script = String::new();
        for key in keys {
            let _ = write!(script, "{command} api {key} COST {cost}\r\n");
        }
        self.0.write_all(script.as_bytes()).expect("the write succeeds");
        let (mut replies, mut piece) = (Vec::new(), [0; 1 << 16]);
        // Each reply has seven lines: the length of the list and six numbers.
        while memchr::memchr_iter(b'\n', &replies).count() < 7 * keys.len() {
            let read = self.0.read(&mut piece).expect("there is a reply");
            assert!(read > 0, "the server closed the connection");
            replies.extend_from_slice(&piece[..read]);
        }
        let replies = String::from_utf8(replies).expect("the text is UTF-8");
        replies.split("*6\r\n:").skip(1).map(|reply| reply.starts_with('1')).collect()
    }

    /// Returns whether the next request of a key would be allowed.
    fn peek_one(&mut self, key: &str) -> bool {
        self.call("TG.PEEK", &[key.to_owned()], 1) == [true]
    }

    fn check_one(&mut self, key: &str, cost: u32) -> bool {
        self.check(&[key.to_owned()], cost) == [true]
    }

    /// Checks new keys one by one and returns the sorted times.
    fn times(&mut self, name: &str, count: usize) -> Vec<Duration> {
        let mut times: Vec<_> = numbered(name, 0..count)
            .iter()
            .map(|key| {
                let began = Instant::now();
                assert!(self.check_one(key, 1), "{key} is new");
                began.elapsed()
            })
            .collect();
        times.sort_unstable();
        times
    }
}

fn live(served: &Served) -> usize {
    counted(served, "tallygate_keys_kept{policy=\"api\"}")
}

fn counted(served: &Served, name: &str) -> usize {
    let metrics = get(served.http(), "/metrics").body;
    let line = metrics.lines().find_map(|line| line.strip_prefix(name)).expect("the metric exists");
    line.trim().parse().expect("the value is a number")
}

/// Faults D1, D2.
#[test]
fn a_flood_of_invented_keys_evicts_no_debt_and_takes_no_memory() {
    let served = served(POLICY);
    let (mut resp, mut http) = (RespClient::new(&served), Client::connect(served.http()));
    let mut by_http = |key: &str| {
        let body = format!(r#"{{"policy":"api","key":"{key}"}}"#);
        http.send("POST /v1/check", &[], body.as_bytes());
        http.read().expect("there is a reply").json()["allowed"] == true
    };
    assert!(resp.check_one("greedy", 100));
    assert!(resp.check(&numbered("first", 0..BATCH), 1).iter().all(|allowed| *allowed));
    let before = served.resident_kib();
    for batch in 0..300 {
        let invented = numbered("invented", batch * BATCH..(batch + 1) * BATCH);
        assert!(resp.check(&invented, 1).iter().all(|allowed| *allowed));
        for key in 0..10 {
            assert!(by_http(&format!("by-http-{batch}-{key}")));
        }
        assert!(!resp.check_one("greedy", 1) && !by_http("greedy"), "after {batch} batches");
        let honest = format!("honest-{batch}");
        assert!(resp.check_one(&honest, 1) && by_http(&honest), "other clients are served");
    }
    assert!(live(&served) <= MAX_KEYS, "{} keys", live(&served));
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 4 << 10, "{grown} KiB");
}

fn numbered(name: &str, numbers: std::ops::Range<usize>) -> Vec<String> {
    numbers.map(|number| format!("{name}-{number}")).collect()
}

/// Fault D4.
#[test]
fn keys_that_were_chosen_to_collide_are_as_fast_as_any() {
    let served = served(POLICY);
    let mut resp = RespClient::new(&served);
    // Without a secret, their hashes start with the same 9 bits and fall into a 512th of the table.
    let is_chosen = |key: &String| xxhash_rust::xxh3::xxh3_128(key.as_bytes()) >> (128 - 9) == 0;
    let chosen: Vec<String> = (0..)
        .map(|number: u32| format!("chosen-{number}"))
        .filter(is_chosen)
        .take(5 * BATCH)
        .collect();
    let at_random = numbered("random", 0..chosen.len());
    for keys in [&at_random, &chosen] {
        for batch in keys.chunks(BATCH) {
            assert!(resp.check(batch, 100).iter().all(|allowed| *allowed));
        }
    }
    // No key was evicted.
    assert_eq!(counted(&served, "tallygate_evictions_total{policy=\"api\"}"), 0);
    let mut p99 = [Duration::MAX; 2];
    for _ in 0..5 {
        // Alternate, so that other load affects both equally.
        let mut times = [Vec::new(), Vec::new()];
        for pair in at_random.iter().zip(&chosen).take(BATCH) {
            for (times, key) in times.iter_mut().zip([pair.0, pair.1]) {
                let began = Instant::now();
                assert!(!resp.check_one(key, 1), "the debt of {key} was lost");
                times.push(began.elapsed());
            }
        }
        for (best, times) in p99.iter_mut().zip(&mut times) {
            times.sort_unstable();
            *best = (*best).min(times[times.len() * 99 / 100]);
        }
    }
    let [at_random, chosen] = p99;
    assert!(chosen < 2 * at_random, "{chosen:?} against {at_random:?}");
}

/// Fault D6.
#[test]
fn checks_stay_fast_while_all_keys_expire() {
    const KEYS: usize = 200_000;
    let policy = "[policies.api]\nlimit = 1\nwindow = \"2s\"\n";
    let served = Served::start(&["--max-keys", &(KEYS + KEYS / 5).to_string()], Some(policy));
    let mut resp = RespClient::new(&served);
    let mut p999 = [Duration::MAX; 2];
    for round in 0..2 {
        for batch in numbered(&format!("old-{round}"), 0..KEYS).chunks(BATCH) {
            resp.check(batch, 1);
        }
        let last = format!("old-{round}-{}", KEYS - 1);
        // First no old key has expired, then all have.
        for (best, kind) in p999.iter_mut().zip(["early", "late"]) {
            if kind == "late" {
                wait_until("the last old key has expired", PATIENCE, || resp.peek_one(&last));
                assert!(resp.check_one(&format!("first-{round}"), 1), "a new key is allowed");
                // One check sweeps only a few keys.
                assert!(live(&served) > KEYS / 2, "{} keys are left", live(&served));
            }
            let times = resp.times(&format!("{kind}-{round}"), 4_000);
            *best = (*best).min(times[times.len() * 999 / 1000]);
        }
    }
    let [live, expiring] = p999;
    let bound = (3 * live).max(Duration::from_millis(2));
    assert!(expiring < bound, "p99.9 {expiring:?} against {live:?}");
}
