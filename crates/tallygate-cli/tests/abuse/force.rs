//! Tests hostile clients that try to get more than their quota, or to take the quota of others.
//!
//! Each test sends the requests of such a client and checks the bound that `docs/operations.md` states.
#![allow(clippy::panic, clippy::unwrap_used, reason = "a failing test panics")]

use std::fmt::Write as _;
use std::io::{Read as _, Write as _};
use std::iter::Peekable;
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use crate::common::Served;
use crate::http_client::{Client, ask, get, post};
use serde_json::json;
use tallygate_testkit::http2::{self, END_HEADERS, END_STREAM, Method, kind};
use tallygate_testkit::servers::{Flavor, Server};

const PATIENCE: Duration = Duration::from_secs(20);
const API: &str = "[policies.api]\nlimit = 1000000\nwindow = \"1h\"\n";
const MIB: u64 = 1024 * 1024;

fn connect(served: &Served) -> TcpStream {
    let stream = TcpStream::connect(served.resp()).expect("the connection opens");
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream
}

/// Sends commands, and returns all replies.
fn exchange(served: &Served, commands: &str) -> String {
    let mut stream = connect(served);
    let mut replies = String::new();
    std::thread::scope(|threads| {
        let mut writing = stream.try_clone().unwrap();
        threads.spawn(move || {
            writing.write_all(commands.as_bytes()).unwrap();
            writing.shutdown(Shutdown::Write).unwrap();
        });
        stream.read_to_string(&mut replies).unwrap();
    });
    replies
}

fn metric(served: &Served, name: &str) -> u64 {
    let metrics = get(served.http(), "/metrics").body;
    let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {name} in {metrics}")).parse().unwrap()
}

/// Fault J2.
#[test]
fn limits_that_need_years_to_refill_are_rejected_with_a_message() {
    let served = Served::start(&[], Some(API));
    for numbers in
        ["1000000 1 4000 1000000", "1000000 1 4000", "0 1 604801", "9223372036854775807 1 1"]
    {
        let denied = exchange(&served, &format!("CL.THROTTLE k {numbers}\r\n"));
        assert!(denied.starts_with("-ERR a key would need "), "{numbers}: {denied}");
        assert!(denied.contains("the maximum is 7d "), "{numbers}: {denied}");
    }
    // A time just above the bound is not rounded to the bound.
    let denied = exchange(&served, "CL.THROTTLE k 604800000 1000000001 1000000000\r\n");
    assert!(!denied.contains("would need 7d to"), "{denied}");
    assert!(exchange(&served, "CL.THROTTLE k 0 1 604800\r\n").starts_with("*5\r\n:0\r\n"));
    assert_eq!(metric(&served, "tallygate_keys_kept{policy=\"CL.THROTTLE\"}"), 1);
    let override_ = r#"{"policy":"api","key":"a","limit":1,"window":"365d"}"#;
    let denied = ask(served.http(), "PUT /v1/admin/overrides", &[], override_);
    assert_eq!(denied.status, 400, "{denied:?}");
    assert!(denied.problem().contains("max_time_to_fresh"), "{denied:?}");

    let longer = format!("{API}[limits]\nmax_time_to_fresh = \"30d\"\n");
    let served = Served::start(&[], Some(&longer));
    assert!(exchange(&served, "CL.THROTTLE k 0 1 2592000\r\n").starts_with("*5\r\n:0\r\n"));
    assert!(exchange(&served, "CL.THROTTLE k 0 1 2592001\r\n").contains("the maximum is 30d "));

    let off = Served::start(&[], Some(&format!("{API}[cl_throttle]\nenabled = false\n")));
    let denied = exchange(&off, "CL.THROTTLE k 4 10 60\r\n");
    assert!(denied.starts_with("-ERR CL.THROTTLE is disabled"), "{denied}");
}

/// Fault J2.
#[test]
fn every_key_in_redis_expires_within_the_bound() {
    let redis = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &redis.url()], Some(API));
    let mut script = String::new();
    for round in 0..200_u64 {
        let (burst, period) = (100 + round * 977 % 5000, 1000 + round * 7919 % 500_000);
        let _ = write!(script, "CL.THROTTLE k{round} {burst} 1000 {period} {}\r\n", burst + 1);
        let _ = write!(script, "TG.CHECK api k{round} COST {}\r\n", 1 + round * 4999);
    }
    exchange(&served, &script);
    let keys = redis.ask::<Vec<String>>(&["KEYS", "*"]);
    assert!(keys.len() > 220, "{}", keys.len());
    for key in keys {
        let lives: i64 = redis.ask(&["PTTL", &key]);
        // A key that has expired since has -2, and a key that never expires -1.
        let is_bounded = lives == -2 || (0..=7 * 86_400_000 + 1000).contains(&lives);
        assert!(is_bounded, "{key} lives {lives} ms");
    }
}

/// Every command has other numbers. Each of them once stored a whole policy.
///
/// Fault J2.
#[test]
fn changing_numbers_take_no_more_memory_than_other_keys() {
    const KEYS: u64 = 200_000;
    let options = ["--max-keys", "100000"];
    let served = Served::start(&options, Some(API));
    let before = served.resident_kib();
    let mut script = String::new();
    for round in 0..KEYS {
        let _ = write!(
            script,
            "CL.THROTTLE key-{round} {} {} 3600 100\r\n",
            100 + round % 991,
            1000 + round % 983
        );
    }
    let replies = exchange(&served, &script);
    assert_eq!(replies.matches("*5\r\n:0\r\n").count() as u64, KEYS);
    let live = metric(&served, "tallygate_keys_kept{policy=\"CL.THROTTLE\"}");
    assert!((50_000..=100_000).contains(&live), "{live}");
    let grown = (served.resident_kib().saturating_sub(before)) * 1024;
    assert!(grown < 100_000 * 128 + 16 * MIB, "{grown} bytes for {live} keys");
}

/// Fault J4.
#[test]
fn the_number_of_items_in_all_has_a_configurable_bound() {
    let all = |count: usize| {
        let items: Vec<_> =
            (0..count).map(|key| json!({"policy":"api","key":key.to_string()})).collect();
        json!({ "all": items }).to_string()
    };
    let served = Served::start(&[], Some(API));
    assert_eq!(post(served.http(), "/v1/check", &all(64)).status, 200);
    let denied = post(served.http(), "/v1/check", &all(65));
    assert_eq!(denied.status, 400);
    assert!(denied.problem().contains("must have at most 64 items (got 65; "), "{denied:?}");
    assert_eq!(
        crate::http_client::remaining(served.http(), "api", "64"),
        1_000_000,
        "nothing was charged"
    );
    let more = Served::start(&[], Some(&format!("{API}[limits]\nmax_all_items = 100\n")));
    assert_eq!(post(more.http(), "/v1/check", &all(100)).status, 200);
    assert_eq!(post(more.http(), "/v1/check", &all(101)).status, 400);
}

/// Returns the median time of checks over one connection.
fn median(served: &Served, checks: usize) -> Duration {
    let mut client = Client::connect(served.http());
    let mut times: Vec<_> = (0..checks)
        .map(|_| {
            let began = Instant::now();
            client.send("POST /v1/check", &[], br#"{"policy":"api","key":"good"}"#);
            assert_eq!(client.read().unwrap().status, 200);
            began.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[checks / 2]
}

/// Raises the limit of open files and returns how many connections a test may hold: at most as many as it wants and as
/// the machine allows.
fn connections(wanted: u64) -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).expect("below the maximum");
    // Other tests in this process also have connections.
    let most = maximum.map_or(wanted, |maximum| wanted.min(maximum.saturating_sub(500)));
    assert!(most >= 400, "a limit of {maximum:?} open files is too low for this test");
    #[allow(clippy::print_stderr, reason = "a test that does less says so")]
    if most < wanted {
        eprintln!("only {most} connections of {wanted}: the limit of open files is {maximum:?}");
    }
    most
}

/// Clients without a token that send the most expensive bytes.
///
/// Fault J5.
#[test]
fn connections_that_never_authenticate_hold_little_and_are_closed_soon() {
    let wanted = connections(3_000);
    let config = format!(
        "[auth]\ncheck = [\"env:CHECK\"]\n[limits]\nauth_timeout = \"12s\"\nmax_connections_per_address = 5000\n{API}"
    );
    let served = Served::with_variables(&[], Some(&config), &[("CHECK", "a-token-for-checks")]);
    let before = served.resident_kib();
    let words = format!("{}\r\n", "a ".repeat(1_900));
    let mut open: Vec<_> = (0..wanted)
        .map(|_| {
            let mut stream = connect(&served);
            // Complete lines of many words, then the longest possible part of one.
            stream.write_all(words.repeat(4).as_bytes()).unwrap();
            stream.write_all(&[b'x'; 3_000]).unwrap();
            stream
        })
        .collect();
    let mut heads: Vec<_> = (0..50)
        .map(|_| {
            let mut client = Client::connect(served.http());
            client.write(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nx: ").unwrap();
            client.write(&[b'x'; 30_000]).unwrap();
            client
        })
        .collect();
    // One reply per connection shows that everything before it was read.
    for stream in &mut open {
        stream.read_exact(&mut [0; 16]).unwrap();
    }
    let grown = (served.resident_kib().saturating_sub(before)) * 1024;
    // 32 KiB for a RESP connection, the largest head for an HTTP connection: less than the formula.
    let most = wanted * 32 * 1024 + 50 * 160 * 1024 + 16 * MIB;
    assert!(grown < most, "{grown} bytes, more than {most}");
    let began = Instant::now();
    for stream in &mut open {
        let mut rest = String::new();
        // The connection may be reset, because the server closes it with unread bytes.
        let _ = stream.read_to_string(&mut rest);
    }
    for client in &mut heads {
        assert!(client.is_closed());
    }
    let took = began.elapsed();
    assert!(took < Duration::from_secs(20), "closed after {took:?}");
    let long = exchange(&served, &format!("AUTH {}\r\n", "x".repeat(9_000)));
    assert!(long.starts_with("-NOAUTH Authentication required: before AUTH"), "{long}");
    let right = exchange(&served, "AUTH a-token-for-checks\r\nTG.CHECK api a\r\n");
    assert!(right.starts_with("+OK\r\n*6\r\n:1\r\n"), "{right}");
}

/// A connection that is amid a command releases the memory of the long command before it.
///
/// Fault J5.
#[test]
fn the_memory_of_a_long_command_is_released_amid_the_next() {
    const HEAD: u64 = 8192;
    const BUFFERS: u64 = 4 * MIB;
    let wanted = connections(500);
    let config = format!(
        "{API}[limits]\nmax_connections_per_address = 5000\nmax_head_bytes = {HEAD}\n\
         max_buffer_bytes = {BUFFERS}\n"
    );
    let served = Served::start(&[], Some(&config));
    let before = served.peak_kib();
    let argument = format!("$60000\r\n{}\r\n", "x".repeat(60_000));
    let long = format!("*3\r\n$4\r\nNONE\r\n{argument}{argument}");
    let open: Vec<_> = (0..wanted)
        .map(|_| {
            let mut stream = connect(&served);
            stream.write_all(long.as_bytes()).unwrap();
            stream.write_all(&argument.as_bytes()[..15_000]).unwrap();
            stream.read_exact(&mut [0; 16]).unwrap();
            stream
        })
        .collect();
    let grown = (served.peak_kib() - before) * 1024;
    let most = wanted * (HEAD + 64 * 1024) + 2 * BUFFERS;
    assert!(grown < most, "{grown} bytes for {wanted} connections, more than {most}");
    drop(open);
}

/// An idle connection releases the memory of a long line.
///
/// Fault J5.
#[test]
fn the_memory_of_a_long_line_is_released() {
    let wanted = connections(2_000);
    let config = format!("{API}[limits]\nmax_connections_per_address = 5000\n");
    let served = Served::start(&[], Some(&config));
    let before = served.resident_kib();
    let line = format!("{}\r\n", "a ".repeat(32_000));
    let open: Vec<_> = (0..wanted)
        .map(|_| {
            let mut stream = connect(&served);
            stream.write_all(line.as_bytes()).unwrap();
            let mut reply = [0; 100];
            let read = stream.read(&mut reply).unwrap();
            let reply = String::from_utf8_lossy(&reply[..read]).into_owned();
            assert!(
                reply.starts_with("-ERR the command has 32000 arguments; use at most 64"),
                "{reply}"
            );
            stream
        })
        .collect();
    let grown = (served.resident_kib().saturating_sub(before)) * 1024;
    assert!(grown < wanted * 32 * 1024 + 16 * MIB, "{grown} bytes for {wanted} connections");
    drop(open);
}

/// Fault J9.
#[test]
fn unlimited_reservations_leave_room_for_others_and_memory_bounded() {
    let config =
        format!("{API}[limits]\nmax_reservations = 2000\nmax_reservation_bytes = 4000000\n");
    let served = Served::start(&[], Some(&config));
    let mut client = Client::connect(served.http());
    let mut reserve = |key: &str| {
        let body = json!({"policy":"api","key":key,"ttl_ms":3_600_000}).to_string();
        client.send("POST /v1/reserve", &[], body.as_bytes());
        client.read().unwrap()
    };
    // A key has a hundredth of all reservations, and one address a quarter of that.
    let granted = (0..100).filter(|_| reserve("hot").status == 200).count();
    assert_eq!(granted, 5);
    let denied = reserve("hot");
    assert_eq!(denied.status, 429);
    let expected = "your address and this key have too many open reservations";
    assert!(denied.problem().starts_with(expected), "{denied:?}");
    // An address has a tenth of all, with any number of keys.
    let granted = (0..400).filter(|round| reserve(&format!("k{round}")).status == 200).count();
    assert_eq!(granted, 200 - 5);
    assert!(reserve("other").problem().starts_with("your address has"));
    // Another address still has its share.
    let mut other = Client::connect_from("127.0.0.9", served.http());
    let body = json!({"policy":"api","key":"polite","ttl_ms":60_000,"cost":3}).to_string();
    other.send("POST /v1/reserve", &[], body.as_bytes());
    let reply = other.read().unwrap();
    assert_eq!(reply.status, 200, "{reply:?}");
    let id = reply.json()["reservation"].as_str().unwrap().to_owned();
    assert_eq!(id.len(), 32);
    let settle = json!({"reservation": id, "actual": 1}).to_string();
    assert_eq!(post(served.http(), "/v1/settle", &settle).status, 200);
    assert_eq!(post(served.http(), "/v1/settle", &settle).status, 409);
    assert_eq!(metric(&served, "tallygate_reservations_open"), 200);
}

/// A client with a check token could once block the reservations of another client's key for a day at no cost.
#[test]
fn one_address_cannot_take_the_reservations_of_a_key_from_another() {
    let served = Served::start(&[], Some(&format!("{API}[limits]\nmax_reservations = 2000\n")));
    let reserve = |address: &str, cost: u64, ttl_ms: u64| {
        let mut client = Client::connect_from(address, served.http());
        let body = json!({"policy":"api","key":"victim","cost":cost,"ttl_ms":ttl_ms}).to_string();
        client.send("POST /v1/reserve", &[], body.as_bytes());
        client.read().unwrap()
    };
    let free = reserve("127.0.0.1", 0, 1_000);
    assert_eq!(free.status, 400, "{free:?}");
    assert!(free.problem().starts_with("cost must be at least 1 (got 0)"), "{free:?}");
    let long = reserve("127.0.0.1", 1, 3_600_001);
    assert_eq!(long.status, 400, "{long:?}");
    assert!(long.problem().contains("`max_reservation_ttl`"), "{long:?}");
    let granted = (0..40).filter(|_| reserve("127.0.0.1", 1, 3_600_000).status == 200).count();
    assert_eq!(granted, 5, "a quarter of the key's 20");
    assert_eq!(reserve("127.0.0.9", 1, 1_000).status, 200);
}

#[test]
fn settling_after_a_reset_names_the_reset() {
    let served = Served::start(&[], Some(&format!("{API}[admin]\nloopback = true\n")));
    let reserved =
        post(served.http(), "/v1/reserve", r#"{"policy":"api","key":"a","ttl_ms":60000}"#);
    let id = reserved.json()["reservation"].as_str().unwrap().to_owned();
    let reset = post(served.http(), "/v1/reset", r#"{"policy":"api","key":"a"}"#);
    assert_eq!(reset.status, 200, "{reset:?}");
    let settle = json!({"reservation": id, "actual": 1}).to_string();
    let denied = post(served.http(), "/v1/settle", &settle);
    assert_eq!(denied.status, 404, "{denied:?}");
    assert!(denied.problem().starts_with("the client was reset"), "{denied:?}");
}

/// Fault J9.
#[test]
fn a_settled_reservation_makes_room_and_ids_do_not_repeat() {
    let config = format!("{API}[limits]\nmax_reservations = 100\n");
    let served = Served::start(&[], Some(&config));
    let mut ids = std::collections::HashSet::new();
    for round in 0..300 {
        let body = json!({"policy":"api","key":format!("k{round}"),"ttl_ms":3_600_000}).to_string();
        let reply = post(served.http(), "/v1/reserve", &body);
        assert_eq!(reply.status, 200, "{round}: {reply:?}");
        let id = reply.json()["reservation"].as_str().unwrap().to_owned();
        let settle = json!({"reservation": id, "actual": 0}).to_string();
        assert_eq!(post(served.http(), "/v1/settle", &settle).status, 200);
        assert!(ids.insert(id));
    }
}

/// An unknown name is compared with the names of a hundred policies, which once took two milliseconds. It must cost about
/// as much as another error: an invalid cost in a command of the same length.
///
/// Fault J10.
#[test]
fn thousands_of_unknown_names_cost_little() {
    const NAMES: usize = 5_000;
    let mut config = String::new();
    for number in 0..100 {
        let name = format!("a-policy-with-some-name-{number:03}");
        let _ = write!(config, "[policies.{name}]\nlimit = 5\nwindow = \"1h\"\n");
    }
    let served = Served::start(&[], Some(&config));
    let time = |script: &str, error: &str| {
        let began = Instant::now();
        let replies = exchange(&served, script);
        assert_eq!(replies.matches(error).count(), NAMES, "{}", &replies[..200]);
        began.elapsed()
    };
    let (mut unknown, mut long, mut wrong) = (String::new(), String::new(), String::new());
    for number in 0..NAMES {
        let _ = write!(unknown, "TG.CHECK a-policy-with-some-name-x{number:04} key\r\n");
        let _ =
            write!(long, "TG.CHECK {}-{number:04} key\r\n", "a-policy-with-some-name".repeat(10));
        let _ = write!(wrong, "TG.CHECK a-policy-with-some-name-001 key COST x{number:04}\r\n");
    }
    let mut best = [Duration::MAX; 3];
    for _ in 0..5 {
        let took = [
            time(&unknown, "-ERR no policy is named"),
            time(&long, "-ERR no policy is named"),
            time(&wrong, "-ERR "),
        ];
        for (best, took) in best.iter_mut().zip(took) {
            *best = took.min(*best);
        }
    }
    let [unknown, long, wrong] = best;
    // A few names are still compared, so that the error suggests the right one.
    let most = 3 * wrong + Duration::from_millis(20);
    assert!(
        unknown < most && long < most,
        "{unknown:?} and {long:?}; another error took {wrong:?}"
    );
    let near = exchange(&served, "TG.CHECK policy k\r\n");
    assert!(near.starts_with("-ERR no policy is named \"policy\""), "{near}");
}

/// Fault J14.
#[test]
fn an_archive_with_many_clients_is_rejected_in_bounded_memory() {
    let config = "[backtest]\nmax_memory_bytes = 33554432\n";
    let served = Served::start(&[], Some(config));
    let packed = archive_of_many_clients();
    let path =
        "/v1/backtest?policy=gcra+1/s&policy=sliding_window_log+1000/1h&policy=fixed_window+5/1h";
    let mut client = Client::connect(served.http());
    client.send(&format!("POST {path}"), &[], &packed);
    let denied = client.read().expect("there is a reply");
    assert_eq!(denied.status, 413, "{denied:?}");
    assert!(denied.problem().contains("need more than 33554432 bytes of memory"), "{denied:?}");
    let peak = served.peak_kib() * 1024;
    assert!(peak < 150 * MIB, "{peak} bytes for a bound of 32 MiB");
}

/// A compressed log of two million clients.
fn archive_of_many_clients() -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for client in 0..2_000_000_u32 {
        let [_, b, c, d] = client.to_be_bytes();
        let line =
            format!("10.{b}.{c}.{d} - - [16/Nov/2026:06:00:00 +0000] \"GET / HTTP/1.1\" 200 1\n");
        packed.write_all(line.as_bytes()).unwrap();
    }
    packed.finish().unwrap()
}

/// The numbers of the formula, by name.
type Numbers = [(&'static str, u64)];

/// Computes the formula of `docs/operations.md` as it is written there.
fn documented_bound(numbers: &Numbers) -> u64 {
    let operations = include_str!("../../../../docs/operations.md");
    let (_, rest) = operations.split_once("- **The worst case**").expect("the value is stated");
    let lines = rest.lines().skip_while(|line| !line.starts_with("      "));
    let lines = lines.take_while(|line| line.starts_with("      "));
    // Each line has a term, several spaces and an explanation.
    let terms: String = lines.map(|line| line.trim_start().split("   ").next().unwrap()).collect();
    let mut words = Vec::new();
    for word in terms.replace('(', " ( ").replace(')', " ) ").replace('+', " + ").split_whitespace()
    {
        words.push(word.to_owned());
    }
    let mut words = words.iter().map(String::as_str).peekable();
    let sum = sum(&mut words, numbers);
    assert_eq!(words.next(), None, "{terms:?} has unparsed terms");
    sum
}

#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
fn sum<'w>(words: &mut Peekable<impl Iterator<Item = &'w str>>, numbers: &Numbers) -> u64 {
    let mut sum = product(words, numbers);
    while words.next_if_eq(&"+").is_some() {
        sum += product(words, numbers);
    }
    sum
}

#[expect(single_use_lifetimes, reason = "an elided one is not stable here")]
fn product<'w>(words: &mut Peekable<impl Iterator<Item = &'w str>>, numbers: &Numbers) -> u64 {
    let mut product = 1;
    loop {
        product *= match words.next().expect("the value is a number") {
            "(" => {
                // There are no nested parentheses.
                let inside: Vec<_> = words.by_ref().take_while(|word| *word != ")").collect();
                sum(&mut inside.into_iter().peekable(), numbers)
            }
            word => match word.parse::<u64>() {
                Ok(number) => number,
                Err(_) => {
                    let known = numbers.iter().find(|(name, _)| *name == word);
                    known.unwrap_or_else(|| panic!("{word} of the formula is unknown")).1
                }
            },
        };
        for (unit, bytes) in [("KiB", 1024), ("MiB", MIB)] {
            if words.next_if_eq(&unit).is_some() {
                product *= bytes;
            }
        }
        if words.next_if_eq(&"×").is_none() {
            return product;
        }
    }
}

/// Runs every attack at once, with about a tenth of the default limits.
#[test]
fn the_worst_case_of_memory_stays_below_the_documented_formula() {
    const KEYS: u64 = 50_000;
    const HELD: u64 = 16 * MIB;
    const RESERVED: u64 = 8 * MIB;
    const RESERVATIONS: u64 = 100_000;
    const BACKTEST: u64 = 8 * MIB;
    const HEAD: u64 = 16 * 1024;
    const OVERRIDES: u64 = 200;
    let wanted = connections(2_000);
    let config = format!(
        "{API}[limits]\nmax_connections = {wanted}\nmax_connections_per_address = {wanted}\n\
         max_buffer_bytes = {HELD}\nmax_head_bytes = {HEAD}\nmax_reservation_bytes = {RESERVED}\n\
         max_reservations = {RESERVATIONS}\nmax_overrides = {OVERRIDES}\n\
         [backtest]\nmax_memory_bytes = {BACKTEST}\n",
    );
    let served = Served::start(&["--max-keys", &KEYS.to_string()], Some(&config));
    let bound = documented_bound(&[
        ("max_keys", KEYS),
        ("key_bytes", 2 * 128),
        ("max_connections", wanted),
        ("tls_connections", 0),
        ("max_head_bytes", HEAD),
        ("max_buffer_bytes", HELD),
        ("threads", std::thread::available_parallelism().unwrap().get() as u64),
        ("max_streams", 100),
        ("max_http2_head_bytes", 16 * 1024),
        ("max_reservation_bytes", RESERVED),
        ("max_reservations", RESERVATIONS),
        ("max_overrides", OVERRIDES),
        ("max_memory_bytes", BACKTEST),
    ]);
    assert_eq!(
        metric(&served, "tallygate_memory_bound_bytes"),
        bound,
        "the server computes the same bound"
    );
    let (mut checks, mut throttles) = (String::new(), String::new());
    for key in 0..4 * KEYS {
        let _ = write!(checks, "TG.CHECK api invented-{key} COST {}\r\n", 1 + key % 1000);
        let _ = write!(throttles, "CL.THROTTLE invented-{key} {} {} 3600\r\n", key % 977, 1 + key);
    }
    let mut overrides = Client::connect(served.http());
    let mut set = |number: u64| {
        let key = format!("{number:x<4000}");
        let body = json!({"policy":"api","key":key,"limit":5,"window":"1h"}).to_string();
        overrides.send("PUT /v1/admin/overrides", &[], body.as_bytes());
        overrides.read().unwrap()
    };
    for number in 0..OVERRIDES {
        assert_eq!(set(number).status, 200);
    }
    assert_eq!(set(0).status, 200, "an existing override can be replaced");
    let denied = set(OVERRIDES);
    assert_eq!(denied.status, 409, "{denied:?}");
    assert!(denied.problem().contains("`max_overrides`"), "{denied:?}");
    let line = format!("{}\r\n", "a ".repeat(30_000));
    std::thread::scope(|threads| {
        threads.spawn(|| exchange(&served, &checks));
        threads.spawn(|| exchange(&served, &throttles));
        // Keys of 4000 bytes, reserved for an hour, by ten addresses.
        for address in 0..10 {
            let served = &served;
            threads.spawn(move || reserve_without_end(served, address, 10_000));
        }
        threads.spawn(|| {
            let held: Vec<_> = (0..wanted * 3 / 4)
                .map(|_| {
                    let mut stream = connect(&served);
                    stream.write_all(line.as_bytes()).unwrap();
                    // The memory of a long line is free after its reply; the next line needs it.
                    stream.read_exact(&mut [0; 16]).unwrap();
                    stream
                })
                .collect();
            let heads: Vec<_> = (0..wanted / 8)
                .map(|_| {
                    let mut client = Client::connect(served.http());
                    let _ = client.write(b"POST /v1/check HTTP/1.1\r\nhost: localhost\r\nx: ");
                    let _ = client.write(&[b'x'; 15_000]);
                    client
                })
                .collect();
            let bodies: Vec<_> = (0..60)
                .map(|_| {
                    let mut client = Client::connect(served.http());
                    let head = "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n";
                    let _ = client.write(head.as_bytes());
                    let _ = client.write(&vec![b' '; 999_000]);
                    client
                })
                .collect();
            drop((held, heads, bodies));
        });
    });
    let peak = served.peak_kib() * 1024;
    assert!(peak < bound, "{} MiB, more than the {} MiB of the formula", peak / MIB, bound / MIB);
    assert!(median(&served, 101) < Duration::from_millis(50), "the server is too slow");
}

/// Clients that use all of `max_buffer_bytes` take nothing from the reserve for operators.
#[test]
fn operators_read_metrics_and_overrides_while_clients_hold_all_memory() {
    const BODY: usize = 1 << 20;
    let config =
        format!("{API}[limits]\nmax_buffer_bytes = {}\nbody_timeout = \"60s\"\n", 4 * BODY);
    let served = Served::start(&[], Some(&config));
    // Four bodies lack one byte each and fill the buffers.
    let held: Vec<_> = (0..4)
        .map(|address| {
            let mut client =
                Client::connect_from(&format!("127.0.2.{}", address + 1), served.http());
            let head = format!(
                "POST /v1/check HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY}\r\n\r\n"
            );
            let _ = client.write(head.as_bytes());
            let _ = client.write(&vec![b' '; BODY - 1]);
            client
        })
        .collect();
    // Metrics are held in the reserve, so asking for them takes no room from the bodies that arrive.
    let since = Instant::now();
    while metric(&served, "tallygate_buffer_bytes") < 4 * (BODY as u64 - 1) {
        assert!(since.elapsed() < PATIENCE, "the bodies are not counted");
    }
    assert_eq!(get(served.http(), "/openapi.json").status, 503, "no room for other replies");
    let simulated = post(served.http(), "/v1/simulate", "{}");
    assert!(simulated.problem().contains("buffers are full"), "{simulated:?}");
    for name in 0..20 {
        let set = json!({"policy":"api","key":format!("{name:x<100}"),"access":"blocked"});
        assert_eq!(
            ask(served.http(), "PUT /v1/admin/overrides", &[], &set.to_string()).status,
            200
        );
    }
    for path in ["/metrics", "/v1/admin/overrides"] {
        let reply = get(served.http(), path);
        assert_eq!(reply.status, 200, "{path}: {reply:?}");
        assert!(reply.body.len() > 1024, "{path} is large enough to be counted");
    }
    assert_eq!(get(served.http(), "/openapi.json").status, 503, "the memory is still held");
    drop(held);
}

/// Makes reservations for an hour, 50 at a time, each with another key of 4000 bytes.
fn reserve_without_end(served: &Served, address: u32, count: usize) {
    let mut client = Client::connect_from(&format!("127.0.1.{}", address + 1), served.http());
    for batch in 0..count / 50 {
        for number in 0..50 {
            let key = format!("{address}-{batch}-{number:x<4000}");
            let body = json!({"policy":"api","key":key,"ttl_ms":3_600_000}).to_string();
            client.send("POST /v1/reserve", &[], body.as_bytes());
        }
        for _ in 0..50 {
            client.read().unwrap();
        }
    }
}

/// Limits under which the attacks below would need many times the memory of the formula without protection.
const SMALL_LIMITS: &str = "[limits]\nmax_connections = 500\nmax_connections_per_address = 500\n\
    max_buffer_bytes = 16777216\nmax_head_bytes = 8192\nmax_reservation_bytes = 1048576\n\
    max_reservations = 1000\nmax_overrides = 10\n[backtest]\nmax_memory_bytes = 1048576\n";

#[track_caller]
fn assert_below(served: &Served, bound: u64) {
    let peak = served.peak_kib() * 1024;
    assert!(peak < bound, "{} MiB, more than the {} MiB of the formula", peak / MIB, bound / MIB);
}

/// A simulation whose reply can never fit is rejected, and the work of all others is within the formula.
#[test]
fn simulations_stay_below_the_formula_and_their_replies_within_the_buffers() {
    let limits = "[limits]\nmax_connections = 60\nmax_buffer_bytes = 8388608\nmax_head_bytes = 8192\n\
        max_streams = 10\nmax_http2_head_bytes = 4096\nmax_reservation_bytes = 65536\n\
        max_reservations = 100\nmax_overrides = 10\n[backtest]\nmax_memory_bytes = 1048576\n";
    let served = Served::start(&["--max-keys", "1000"], Some(&format!("{API}{limits}")));
    let scenario = |rate: u64| {
        json!({"duration_ms": 86_400_000, "rate_per_minute": rate, "limit": 1_000_000, "window_ms": 86_400_000})
            .to_string()
    };
    let (large, small) = (scenario(13), scenario(1));
    let rejected = post(served.http(), "/v1/simulate", &large);
    assert_eq!(rejected.status, 400, "{rejected:?}");
    let problem = rejected.problem();
    assert!(problem.contains("1/4 of `max_buffer_bytes`"), "{problem}");
    assert!(problem.contains("use fewer `algorithms`"), "{problem}");
    assert_eq!(post(served.http(), "/v1/simulate", &small).status, 200);
    std::thread::scope(|threads| {
        for client in 0..6 {
            let (served, body) = (&served, if client % 2 == 0 { &large } else { &small });
            threads.spawn(move || {
                for _ in 0..3 {
                    let reply = post(served.http(), "/v1/simulate", body);
                    assert!([200, 400, 503].contains(&reply.status), "{reply:?}");
                }
            });
        }
    });
    assert_below(&served, metric(&served, "tallygate_memory_bound_bytes"));
}

/// Each byte of a head refers to one field of the dynamic table, whose decoded copy takes a hundred bytes. There is no body.
#[test]
fn http2_heads_of_tiny_fields_stay_below_the_formula() {
    const REQUESTS: u32 = 100;
    let served = Served::start(&["--max-keys", "1000"], Some(&format!("{API}{SMALL_LIMITS}")));
    let bound = metric(&served, "tallygate_memory_bound_bytes");
    let mut script = http2::hello(&[]);
    for id in 0..REQUESTS {
        let mut fields = http2::fields(Method::Post, "/v1/check");
        if id == 0 {
            fields.extend_from_slice(&[0x40, 1, b'a', 0]);
        }
        fields.resize(fields.len() + 470, 0xbe);
        script.extend(http2::frame(kind::HEADERS, END_HEADERS, 2 * id + 1, &fields));
    }
    let attackers: Vec<_> = (0..connections(400))
        .map(|number| {
            let mut client =
                Client::connect_from(&format!("127.0.0.{}", 1 + number % 8), served.http());
            let _ = client.write(&script);
            client
        })
        .collect();
    assert_below(&served, bound);
    drop(attackers);
    // The memory is free again, also for HTTP/2.
    let began = Instant::now();
    loop {
        let mut client = TcpStream::connect(served.http()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(&http2::hello(&[])).unwrap();
        client.write_all(&http2::request(1, "/livez", None)).unwrap();
        let mut reply = Vec::new();
        let mut chunk = [0; 4096];
        while !reply.windows(6).any(|found| found == b"alive\n") {
            match client.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(read) => reply.extend_from_slice(&chunk[..read]),
            }
        }
        if reply.windows(6).any(|found| found == b"alive\n") {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "HTTP/2 is not served any more");
    }
    assert_below(&served, bound);
}

/// A connection without memory is closed with GOAWAY before its heads are decoded.
#[test]
fn an_http2_connection_without_memory_is_rejected_with_goaway() {
    let limits = "[limits]\nmax_buffer_bytes = 4194304\nmax_http2_head_bytes = 65536\n";
    let served = Served::start(&[], Some(&format!("{API}{limits}")));
    let connect = || {
        let mut client = TcpStream::connect(served.http()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        client.write_all(&http2::hello(&[])).unwrap();
        client
    };
    // An address has a quarter of the bytes: two connections that have sent no request.
    let mut held = [connect(), connect()];
    for client in &mut held {
        let mut settings = [0; 9];
        client.read_exact(&mut settings).unwrap();
        assert_eq!(settings[3], kind::SETTINGS);
    }
    let mut reply = Vec::new();
    connect().read_to_end(&mut reply).unwrap();
    assert_eq!((reply[3], reply[12]), (kind::SETTINGS, kind::GOAWAY), "{reply:?}");
    assert_eq!(reply[reply.len() - 4..], http2::ENHANCE_YOUR_CALM.to_be_bytes());
    drop(held);
    let began = Instant::now();
    while get(served.http(), "/metrics").status != 200 {
        assert!(began.elapsed() < PATIENCE, "the memory is not free again");
    }
    assert_eq!(metric(&served, "tallygate_connections_rejected_total{reason=\"buffers\"}"), 1);
}

/// Trailers are decoded like heads, and no handler reads them.
#[test]
fn an_http2_client_that_sends_long_trailers_is_closed() {
    let served = Served::start(&[], Some(API));
    for (length, is_served) in [(20, true), (400, false)] {
        let mut client = TcpStream::connect(served.http()).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut trailers = vec![0x40, 1, b'a', 0];
        trailers.resize(length, 0xbe);
        let script = [
            http2::hello(&[]),
            http2::frame(kind::HEADERS, END_HEADERS, 1, &http2::fields(Method::Post, "/livez")),
            http2::frame(kind::HEADERS, END_HEADERS | END_STREAM, 1, &trailers),
            http2::frame(kind::PING, 0, 0, &[7; 8]),
        ];
        client.write_all(&script.concat()).unwrap();
        let (mut reply, mut chunk) = (Vec::new(), [0; 4096]);
        let pong = http2::frame(kind::PING, 1, 0, &[7; 8]);
        let mut is_pong = false;
        while !is_pong {
            match client.read(&mut chunk) {
                Ok(0) | Err(_) => break,
                Ok(read) => reply.extend_from_slice(&chunk[..read]),
            }
            is_pong = reply.windows(pong.len()).any(|found| found == pong);
        }
        assert_eq!(is_pong, is_served, "trailers of {length} bytes: {reply:?}");
    }
}

/// Each command that waits for Redis is a task of about 3 KB.
#[test]
fn resp_pipelines_that_wait_for_redis_stay_below_the_formula() {
    let redis = Server::start(Flavor::Redis);
    let config = format!("{API}{SMALL_LIMITS}");
    let options = ["--store", &redis.url(), "--max-keys", "1000"];
    let served = Served::start(&options, Some(&config));
    let bound = metric(&served, "tallygate_memory_bound_bytes");
    let mut clients: Vec<_> = (0..connections(450)).map(|_| connect(&served)).collect();
    for client in &mut clients {
        client.write_all(b"PING\r\n").unwrap();
        client.read_exact(&mut [0; 7]).unwrap();
    }
    redis.freeze();
    for (number, client) in clients.iter_mut().enumerate() {
        let mut script = String::new();
        for command in 0..256 {
            let _ = write!(script, "TG.CHECK api {number}-{command}\r\n");
        }
        client.write_all(script.as_bytes()).unwrap();
    }
    // Every command gets a reply, which shows that all were read.
    for client in &mut clients {
        let mut reply = [0; 1];
        client.read_exact(&mut reply).unwrap();
    }
    assert_below(&served, bound);
    redis.thaw();
}
