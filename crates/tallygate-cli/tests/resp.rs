//! Tests the RESP surface: the bytes on the wire and hostile input; `clients.rs` has the tests with real clients, and
//! `transactions.rs` those of `MULTI` and `EXEC`.

#[path = "resp/clients.rs"]
mod clients;
mod common;
#[path = "resp/transactions.rs"]
mod transactions;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpStream, UdpSocket};
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Served;
use tallygate_testkit::servers::{Flavor, Server, wait_until};

/// The demo policy. Tests may use its admin commands.
const DEMO: &str = include_str!("../../tallygate-server/src/demo.toml");
/// The demo policy, with room for numbers so large that nothing refills during a test.
const LONG: &str = concat!(
    include_str!("../../tallygate-server/src/demo.toml"),
    "\n[limits]\nmax_time_to_fresh = \"36500d\"\n"
);
/// Long enough for a busy machine; only a failing test waits this long.
const PATIENCE: Duration = Duration::from_secs(20);

const POLICIES: &str = r#"
    [policies.api]
    algorithm = "token_bucket"
    limit = 1
    window = "1000h"
    burst = 5
    [policies.api.tiers.pro]
    limit = 1
    burst = 50
    [policies."a"]
    limit = 1
    window = "1000h"
    [policies."a:b"]
    limit = 1
    window = "1000h"
    [policies.smooth]
    algorithm = "leaky_bucket"
    limit = 1
    window = "1000s"
    burst = 5
"#;

/// A policy with a shadow limit, and a client without limits.
const SHADOWED: &str = r#"
    [policies.free]
    [[policies.free.limits]]
    name = "real"
    limit = 1
    window = "1000h"
    burst = 5
    [[policies.free.limits]]
    name = "trial"
    limit = 1
    window = "1000h"
    shadow = true
    [policies.free.overrides.vip]
    access = "unlimited"
"#;

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the connection opens");
    stream.set_nodelay(true).expect("the socket option is set");
    stream.set_read_timeout(Some(PATIENCE)).expect("the socket option is set");
    stream.set_write_timeout(Some(PATIENCE)).expect("the socket option is set");
    stream
}

/// Encodes a command as clients do.
fn command(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// Returns all replies until the server closes the connection.
fn rest_of(stream: &mut TcpStream) -> String {
    let mut replies = Vec::new();
    stream.read_to_end(&mut replies).expect("the replies arrive, then the connection ends");
    String::from_utf8(replies).expect("the text is UTF-8")
}

/// Sends bytes, closes the write side and returns all replies.
fn exchange(address: &str, bytes: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(bytes).expect("the write succeeds");
    stream.shutdown(Shutdown::Write).expect("the write side closes");
    rest_of(&mut stream)
}

/// Sends a line of words and returns the reply, with spaces for line ends.
fn ask(served: &Served, line: &str) -> String {
    let words: Vec<_> = line.split(' ').collect();
    exchange(served.resp(), &command(&words)).trim_end().replace("\r\n", " ")
}

#[track_caller]
fn replies_match(served: &Served, table: &[(&str, &str)]) {
    for (line, expected) in table {
        assert_eq!(ask(served, line), *expected, "{line}");
    }
}

/// Returns the resident memory of a server, in KiB.
fn resident_kib(served: &Served) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid()));
    let status = status.expect("the process is running");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("there is a line");
    line.split_whitespace()
        .nth(1)
        .expect("the value is a number")
        .parse()
        .expect("the value is a number")
}

#[test]
fn throttle_replies_like_redis_cell() {
    let served = Served::start(&[], None);
    replies_match(
        &served,
        &[
            // A burst of 3, then one per 1000 s. Fields: limited, limit, remaining, retry_after, reset_after.
            ("CL.THROTTLE k 2 1 1000", "*5 :0 :3 :2 :-1 :1000"),
            ("cl.throttle k 2 1 1000 1", "*5 :0 :3 :1 :-1 :2000"),
            // A cost of 0 charges nothing.
            ("CL.THROTTLE k 2 1 1000 0", "*5 :0 :3 :1 :-1 :2000"),
            ("CL.THROTTLE k 2 1 1000 2", "*5 :1 :3 :1 :1000 :2000"),
            ("CL.THROTTLE k 2 1 1000 1", "*5 :0 :3 :0 :-1 :3000"),
            // The denied request charged nothing.
            ("CL.THROTTLE k 2 1 1000 2", "*5 :1 :3 :0 :2000 :3000"),
            // The cost is above the capacity, so there is no retry time.
            ("CL.THROTTLE k 2 1 1000 4", "*5 :1 :3 :0 :-1 :3000"),
            // The key alone identifies a client; its usage stays under other numbers.
            ("CL.THROTTLE k 5 1 1000 4", "*5 :1 :6 :3 :1000 :3000"),
            ("CL.THROTTLE other 2 1 1000 3", "*5 :0 :3 :0 :-1 :3000"),
            // A max_burst of 0 allows one request.
            ("CL.THROTTLE one 0 1 1000", "*5 :0 :1 :0 :-1 :1000"),
            ("CL.THROTTLE one 0 1 1000", "*5 :1 :1 :0 :1000 :1000"),
        ],
    );
}

#[test]
fn a_fraction_of_a_second_is_rounded_up() {
    let served = Served::start(&[], None);
    replies_match(
        &served,
        &[
            // One per 2/3 s, with a burst of two.
            ("CL.THROTTLE k 1 3 2", "*5 :0 :2 :1 :-1 :1"),
            ("CL.THROTTLE k 1 3 2", "*5 :0 :2 :0 :-1 :2"),
            ("CL.THROTTLE k 1 3 2", "*5 :1 :2 :0 :1 :2"),
            // One per microsecond: the wait is still not 0.
            ("CL.THROTTLE fast 0 1000000 1", "*5 :0 :1 :0 :-1 :1"),
        ],
    );
}

/// Faults A4, A6, A14.
#[test]
fn the_error_of_a_malformed_number_names_its_argument() {
    let served = Served::start(&[], Some(LONG));
    let most = "9223372036854775807";
    for bad in [
        "-1",
        "inf",
        "nan",
        "0x10",
        "1e3",
        "+1",
        "1.5",
        "9223372036854775808",
        "99999999999999999999999",
    ] {
        for (line, name, least) in [
            (format!("CL.THROTTLE k {bad} 1 60"), "max_burst", 0),
            (format!("CL.THROTTLE k 1 {bad} 60"), "count", 1),
            (format!("CL.THROTTLE k 1 1 60 {bad}"), "quantity", 0),
            (format!("TG.CHECK demo k COST {bad}"), "COST", 0),
            (format!("TG.REFUND demo k {bad}"), "n", 0),
        ] {
            let expected =
                format!("-ERR {name} must be a whole number from {least} to {most} (got '{bad}')");
            assert_eq!(ask(&served, &line), expected, "{line}");
        }
    }
    let spaced = command(&["CL.THROTTLE", "k", " 1", "1", "60"]);
    assert!(exchange(served.resp(), &spaced).starts_with("-ERR max_burst must be a whole number "));
    replies_match(
        &served,
        &[
            (
                "CL.THROTTLE k 1 0 60",
                "-ERR count must be a whole number from 1 to 9223372036854775807 (got '0')",
            ),
            (
                "CL.THROTTLE k 1 1 0",
                "-ERR period must be a whole number from 1 to 9223372036 (got '0')",
            ),
            // 292 years is the longest period that can be represented.
            (
                "CL.THROTTLE k 1 1 9223372037",
                "-ERR period must be a whole number from 1 to 9223372036 (got '9223372037')",
            ),
            // None of these commands charged anything.
            ("CL.THROTTLE k 1 1 60 0", "*5 :0 :2 :2 :-1 :0"),
            ("TG.PEEK demo k COST 0", "*6 :1 :5 :5 :0 :0 :0"),
        ],
    );
    let extreme = ask(&served, "CL.THROTTLE k 9223372036854775807 1 9223372036");
    assert!(extreme.starts_with("-ERR ") && extreme.contains("the maximum is "), "{extreme}");
    let extreme = ask(&served, "CL.THROTTLE x 9223372036854775807 9223372036854775807 1");
    assert_eq!(extreme, "*5 :0 :9223372036854775807 :9223372036854775807 :-1 :1");
}

#[test]
fn policies_of_the_configuration_are_used_by_name() {
    let served = Served::start(&[], Some(POLICIES));
    let hour_ms = 3_600_000_000_u64;
    let used = |count: u64| count * hour_ms;
    let table = [
        // A peek returns what a check would; a peek with cost 0 returns the current state.
        ("TG.PEEK api k".to_owned(), format!("*6 :1 :5 :4 :0 :{} :0", used(1))),
        ("TG.PEEK api k COST 0".to_owned(), "*6 :1 :5 :5 :0 :0 :0".to_owned()),
        ("TG.CHECK api k".to_owned(), format!("*6 :1 :5 :4 :0 :{} :0", used(1))),
        ("tg.check api k cost 4".to_owned(), format!("*6 :1 :5 :0 :0 :{} :0", used(5))),
        ("TG.REFUND api k 5".to_owned(), "*6 :1 :5 :5 :0 :0 :0".to_owned()),
        ("TG.CHECK api k COST 6".to_owned(), "*6 :0 :5 :5 :-1 :0 :0".to_owned()),
        ("TG.CHECK api k TIER pro COST 50".to_owned(), format!("*6 :1 :50 :0 :0 :{} :0", used(50))),
        ("TG.RESET api k".to_owned(), "*6 :1 :5 :5 :0 :0 :0".to_owned()),
        ("TG.CHECK smooth k".to_owned(), "*6 :1 :5 :4 :0 :1000000 :0".to_owned()),
        (
            "TG.CHECK aip k".to_owned(),
            "-ERR no policy is named \"aip\"; did you mean \"api\"?".to_owned(),
        ),
    ];
    for (line, expected) in &table {
        // The refill during the test is less than 20 s of the thousand hours.
        let reply = ask(&served, line);
        let near =
            |one: &str, other: &str| match (one[1..].parse::<i64>(), other[1..].parse::<i64>()) {
                (Ok(one), Ok(other)) => {
                    one == other || (one > 1_000_000 && one.abs_diff(other) < 20_000)
                }
                _ => one == other,
            };
        let same = reply.split(' ').count() == expected.split(' ').count()
            && reply.split(' ').zip(expected.split(' ')).all(|(one, other)| near(one, other));
        assert!(same, "{line}: {reply}, expected {expected}");
    }
    assert!(ask(&served, "TG.CHECK api k TIER gold").starts_with("-ERR "));
    for (wrong, reason) in [
        ("TG.CHECK api", "wrong number of arguments (got 1)"),
        ("TG.CHECK api k COST", "wrong arguments"),
        ("TG.CHECK api k COST 1 COST 2", "unexpected argument 'COST'"),
        ("TG.CHECK api k PRICE 1", "unexpected argument 'PRICE'"),
        ("TG.PEEK api", "wrong number of arguments (got 1)"),
        ("TG.REFUND api k", "wrong number of arguments (got 2)"),
        ("TG.RESET api k 1", "wrong number of arguments (got 3)"),
        ("CL.THROTTLE k 1 1", "wrong number of arguments (got 3)"),
        ("CL.THROTTLE k 1 1 60 1 1", "wrong number of arguments (got 6)"),
        ("CLIENT SETNAME", "wrong arguments"),
        ("CLIENT TRACKING ON", "wrong arguments"),
    ] {
        let reply = ask(&served, wrong);
        let name = wrong.split(' ').next().expect("there is a name");
        assert!(reply.starts_with(&format!("-ERR {reason}; use {name} ")), "{wrong}: {reply}");
    }
}

#[test]
fn a_decision_is_the_same_six_integers_in_resp2_and_resp3() {
    let served = Served::start(&[], Some(POLICIES));
    let script = |protocol: &str, key: &str| {
        let reservation = "0".repeat(32);
        let commands: [&[&str]; 7] = [
            &["HELLO", protocol],
            &["TG.PEEK", "api", key, "COST", "0"],
            &["TG.CHECK", "api", key, "COST", "6"],
            &["TG.REFUND", "api", key, "1"],
            &["TG.RESET", "api", key],
            &["TG.CHECKALL", "api", key, "COST", "6"],
            &["TG.SETTLE", &reservation, "1"],
        ];
        let reply = exchange(served.resp(), &commands.map(command).concat());
        let (_, reply) = reply.split_once("modules\r\n*0\r\n").expect("the greeting arrives");
        reply.replace("\r\n", " ")
    };
    let expected = "*6 :1 :5 :5 :0 :0 :0 *6 :0 :5 :5 :-1 :0 :0 *6 :1 :5 :5 :0 :0 :0 *6 :1 :5 :5 :0 :0 :0 \
                    *7 :0 :5 :5 :-1 :0 :0 :0 -ERR no such reservation; it has expired, or another server made it ";
    assert_eq!(script("2", "two"), expected);
    assert_eq!(script("3", "three"), expected);
}

#[test]
fn a_decision_with_names_is_a_map_in_resp3_and_a_list_in_resp2() {
    let served = Served::start(&[], Some(SHADOWED));
    let check = command(&["TG.CHECKV", "free", "k"]).repeat(2);
    let reply = exchange(served.resp(), &check).replace("\r\n", " ");
    let numbers = "$7 allowed :1 $6 policy $4 free $5 limit :5 $9 remaining";
    assert!(reply.starts_with(&format!("*22 {numbers} :4 ")), "{reply}");
    let (_, second) = reply.rsplit_once("*22 ").expect("there are two replies");
    assert!(
        second.ends_with("$6 source $5 store $9 denied_by $-1 $16 shadow_denied_by $5 trial "),
        "{second}"
    );
    let peek = [command(&["HELLO", "3"]), command(&["TG.PEEKV", "free", "vip"])].concat();
    let reply = exchange(served.resp(), &peek).replace("\r\n", " ");
    // An unlimited client has no limit, rather than a very large one.
    let unlimited = "%11 $7 allowed :1 $6 policy $4 free $5 limit _ $9 remaining _ $14 retry_after_ms :0 \
                     $14 reset_after_ms :0 $8 delay_ms :0 $9 window_ms _ $6 source $5 store $9 denied_by _ $16 shadow_denied_by _ ";
    assert!(reply.ends_with(unlimited), "{reply}");
}

#[test]
fn several_keys_are_charged_together_or_not_at_all() {
    for store in [None, Some(Server::start(Flavor::Redis))] {
        let url = store.as_ref().map(Server::url);
        let options = url.as_ref().map_or(vec![], |url| vec!["--store", url]);
        let served = Served::start(&options, Some(POLICIES));
        let numbers = |line: &str| {
            let reply = ask(&served, line);
            let numbers = reply.split(' ').map(|word| word[1..].parse().unwrap_or(-9));
            numbers.collect::<Vec<i64>>()
        };
        let both = numbers("TG.CHECKALL api k COST 2 AND a k");
        assert_eq!((both[0], both[1], both[3], both[7]), (7, 1, 0, -1), "{both:?}");
        // The second item is denied, so the first one is not charged.
        let denied = numbers("TG.CHECKALL api k AND a k");
        assert_eq!((denied[1], denied[7]), (0, 1), "{denied:?}");
        assert_eq!(numbers("TG.PEEK api k COST 0")[3], 3);
        // If both are denied, the numbers are those of the first, although the second has less remaining.
        let both_denied = numbers("TG.CHECKALL api k COST 4 AND a k");
        assert_eq!(
            (both_denied[2..4].to_vec(), both_denied[7]),
            (vec![5, 3], 0),
            "{both_denied:?}"
        );
        let tier = numbers("tg.checkall api pro tier pro cost 20 and api other");
        assert_eq!((tier[1], tier[7]), (1, -1), "{tier:?}");
        for wrong in ["TG.CHECKALL api k AND", "TG.CHECKALL api k a k", "TG.CHECKALL api k OR a k"]
        {
            let reply = ask(&served, wrong);
            assert!(
                reply.starts_with("-ERR wrong arguments; use TG.CHECKALL "),
                "{wrong}: {reply}"
            );
        }
        assert!(ask(&served, "TG.CHECKALL api k AND nothing k").starts_with("-ERR no policy"));
        assert_eq!(numbers("TG.PEEK api k COST 0")[3], 3, "an error charges nothing");
    }
}

#[test]
fn a_reservation_is_settled_or_canceled_once() {
    for store in [None, Some(Server::start(Flavor::Redis))] {
        let url = store.as_ref().map(Server::url);
        let options = url.as_ref().map_or(vec![], |url| vec!["--store", url]);
        let served = Served::start(&options, Some(POLICIES));
        let remaining =
            || ask(&served, "TG.PEEK api k COST 0").split(' ').nth(3).map(str::to_owned);
        let reserved = ask(&served, "TG.RESERVE api k 60000 COST 4");
        let id = reserved.rsplit(' ').next().expect("the reply has an id").to_owned();
        assert!(reserved.starts_with("*7 :1 :5 :1 :0 "), "{reserved}");
        assert_eq!(id.len(), 32, "{reserved}");
        let denied = ask(&served, "TG.RESERVE api k 60000 COST 4");
        assert!(denied.starts_with("*7 :0 :5 :1 :") && denied.ends_with(" $-1"), "{denied}");
        let settled = ask(&served, &format!("TG.SETTLE {id} 1"));
        assert!(settled.starts_with("*6 :1 :5 :4 :0 "), "{settled}");
        let again = ask(&served, &format!("TG.SETTLE {id} 1"));
        assert_eq!(again, "-ERR the reservation is already settled");
        assert_eq!(remaining().as_deref(), Some(":4"));
        let reserved = ask(&served, "TG.RESERVE api k 60000 COST 2 TIER pro");
        let id = reserved.rsplit(' ').next().expect("the reply has an id");
        let canceled = ask(&served, &format!("TG.CANCEL {id}"));
        assert!(canceled.starts_with("*6 :1 "), "{canceled}");
        assert_eq!(remaining().as_deref(), Some(":4"));
    }
    let served = Served::start(&[], Some(POLICIES));
    replies_match(
        &served,
        &[
            (
                "TG.CANCEL nothing",
                "-ERR no such reservation; it has expired, or another server made it",
            ),
            (
                "TG.RESERVE api k 0",
                "-ERR ttl_ms must be a whole number from 1 to 9223372036854775807 (got '0')",
            ),
            (
                "TG.RESERVE api k 3600001",
                "-ERR ttl_ms must be from 1 to 3600000 (got 3600001; the maximum is `max_reservation_ttl` in `[limits]`)",
            ),
            (
                "TG.RESERVE api k 1000 COST 0",
                "-ERR cost must be at least 1 (got 0); to look without charging, use a peek",
            ),
            (
                "TG.RESERVE api k",
                "-ERR wrong number of arguments (got 2); use TG.RESERVE policy key ttl_ms [COST n] [TIER name]",
            ),
        ],
    );
}

#[test]
fn the_commands_that_redis_clients_send_at_connect_work() {
    let served = Served::start(&[], Some(DEMO));
    replies_match(
        &served,
        &[
            ("PING", "+PONG"),
            ("ping hello", "$5 hello"),
            ("ECHO hello", "$5 hello"),
            ("SELECT 0", "+OK"),
            ("SELECT 1", "-ERR DB '1' does not exist; use 0"),
            ("HELLO 4", "-NOPROTO unsupported protocol version; use 2 or 3"),
            ("CLIENT SETNAME a", "+OK"),
            ("CLIENT SETINFO LIB-NAME x", "+OK"),
            ("CLIENT GETNAME", "$-1"),
            ("CLIENT NO-EVICT on", "+OK"),
            ("COMMAND COUNT", ":26"),
            ("COMMAND DOCS nothing", "*0"),
            (
                "COMMAND DOCS echo",
                "*2 $4 echo *6 $7 summary $43 Replies with the message. Use: ECHO message $5 since $5 0.1.0 $5 group $6 module",
            ),
            ("COMMAND INFO ping nothing", "*2 *10 $4 ping :-1 *1 +fast :0 :0 :0 *0 *0 *0 *0 *-1"),
            ("CONFIG GET maxmemory", "*0"),
            ("CONFIG GET appendonly", "*2 $10 appendonly $2 no"),
            ("RESET", "+RESET"),
            (
                "AUTH x",
                "-ERR AUTH called without any password configured: the configuration has no tokens",
            ),
            (
                "SET a b",
                "-ERR unknown command 'SET'; use TG.CHECK, TG.PEEK, CL.THROTTLE or another one that COMMAND LIST shows",
            ),
        ],
    );
    let info = ask(&served, "INFO server");
    assert!(info.contains(" redis_version:7."), "{info}");
    assert!(info.contains(" tallygate_version:0.1.0 "), "{info}");
    let script =
        b"CLIENT SETNAME me\r\nCLIENT GETNAME\r\nRESET\r\nCLIENT GETNAME\r\nQUIT\r\nPING\r\n";
    assert_eq!(exchange(served.resp(), script), "+OK\r\n$2\r\nme\r\n+RESET\r\n$-1\r\n+OK\r\n");
}

/// Faults E8, H5.
#[test]
fn an_error_quotes_a_bounded_text_without_line_ends() {
    let served = Served::start(&[], None);
    let long = "x\r\n+OK\r\n".repeat(8000);
    let calls: [&[&str]; 6] = [
        &[&long],
        &["CL.THROTTLE", "k", &long, "1", "60"],
        &["TG.CHECK", &long, "k"],
        &["TG.CHECK", &long[..200], "k"],
        &["TG.CHECK", "demo", "k", "TIER", &long[..200]],
        &["SELECT", &long],
    ];
    for call in calls {
        let reply = exchange(served.resp(), &[command(call), b"PING\r\n".to_vec()].concat());
        let (error, rest) = reply.split_once("\r\n").expect("there is a line");
        assert!(error.starts_with("-ERR ") && error.len() < 600, "{error}");
        assert!(!error.contains(['\r', '\n']), "{error}");
        assert_eq!(rest, "+PONG\r\n", "{error}");
    }
}

/// Fault E9.
#[test]
fn lengths_that_no_limit_allows_close_the_connection_after_an_error() {
    let served = Served::start(&[], None);
    for bytes in [
        "*-1\r\n",
        "*2147483648\r\n",
        "*99999999999999999999\r\n",
        "*x\r\n",
        "*1\r\n$-1\r\n",
        "*1\r\n$536870913\r\n",
        "*1\r\n$9223372036854775807\r\n",
        "*1\r\n$18446744073709551617\r\n",
    ] {
        let mut stream = connect(served.resp());
        stream.write_all(bytes.as_bytes()).expect("the write succeeds");
        let reply = rest_of(&mut stream);
        assert!(reply.starts_with("-ERR Protocol error: invalid "), "{bytes:?}: {reply}");
        assert_eq!(reply.lines().count(), 1, "{bytes:?}: {reply}");
    }
    // The server allocates no memory for announced bytes before they arrive.
    let before = resident_kib(&served);
    let mut streams: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(b"PING\r\n*1048576\r\n$536870912\r\nx").expect("the write succeeds");
    }
    for stream in &mut streams {
        stream.read_exact(&mut [0; 7]).expect("the bytes were read");
    }
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 200 * 64, "{grown} KiB");
}

/// Fault E10.
#[test]
fn nested_arrays_close_the_connection_after_an_error() {
    let served = Served::start(&[], None);
    let reply = exchange(served.resp(), &b"*1\r\n".repeat(100_000));
    assert_eq!(reply, "-ERR Protocol error: expected '$', got '*'\r\n");
    assert_eq!(ask(&served, "PING"), "+PONG");
}

/// Fault E11.
#[test]
fn a_script_split_at_any_byte_gives_the_same_replies() {
    let served = Served::start(&[], None);
    let script = |key: &str| {
        [
            command(&["CL.THROTTLE", key, "2", "1", "1000000"]),
            b"PING\r\n\r\n".to_vec(),
            command(&["ECHO", "a\r\nb"]),
            command(&["TG.CHECK", "demo", key, "COST", "9"]),
            b"ECHO \"a b\"\n*0\r\n".to_vec(),
            command(&["HELLO", "3"]),
            command(&["TG.PEEK", "demo", key]),
            command(&["CL.THROTTLE", key, "2", "1", "1000000", "-1"]),
            command(&["x"; 65]),
            command(&["CL.THROTTLE", key, "2", "1", "1000000", "3"]),
            b"*1\r\n$x".to_vec(),
        ]
        .concat()
    };
    // The id of the connection differs.
    let without_id = |reply: &str| {
        let (before, rest) = reply.split_once("$2\r\nid\r\n").expect("the greeting arrives");
        let (_, rest) = rest.split_once("\r\n").expect("the value is a number");
        format!("{before}{rest}")
    };
    let whole = without_id(&exchange(served.resp(), &script("key0000")));
    assert!(
        whole.ends_with("-ERR Protocol error: invalid bulk length; use 0 to 536870912\r\n"),
        "{whole}"
    );
    let length = script("key0000").len();
    for at in 1..length {
        let bytes = script(&format!("key{at:04}"));
        let mut stream = connect(served.resp());
        let (first, second) = bytes.split_at(at);
        stream.write_all(first).expect("the write succeeds");
        std::thread::yield_now();
        stream.write_all(second).expect("the write succeeds");
        assert_eq!(without_id(&rest_of(&mut stream)), whole, "split at {at}");
    }
    let mut stream = connect(served.resp());
    for byte in script("key9999") {
        stream.write_all(&[byte]).expect("the write succeeds");
    }
    assert_eq!(without_id(&rest_of(&mut stream)), whole, "byte by byte");
}

/// Fault D3.
#[test]
fn a_key_of_10_mib_is_skipped_and_the_connection_continues() {
    let served = Served::start(&[], None);
    let key = vec![b'x'; 10 << 20];
    let before = resident_kib(&served);
    let script = [
        command(&[&b"CL.THROTTLE"[..], &key, b"1", b"1", b"60"]),
        command(&[&b"TG.CHECK"[..], b"demo", &key]),
        // Within the limits of RESP, but longer than the longest key.
        command(&[&b"CL.THROTTLE"[..], &key[..4097], b"1", b"1", b"60"]),
        command(&[&b"CL.THROTTLE"[..], &key[..4096], b"1", b"1", b"60"]),
    ]
    .concat();
    let reply = exchange(served.resp(), &script);
    let lines: Vec<_> = reply.split_terminator("\r\n").collect();
    let too_long = "-ERR an argument has 10485760 bytes; use at most 65536";
    let for_the_store = "-ERR the key has 4097 bytes; use at most 4096, or a hash of it";
    assert_eq!(lines, [too_long, too_long, for_the_store, "*5", ":0", ":2", ":1", ":-1", ":60"]);
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB");
}

/// Faults E3, E12.
#[test]
fn the_server_stops_reading_from_a_client_that_does_not_read() {
    let served = Served::start(&[], None);
    let before = resident_kib(&served);
    let mut stream = connect(served.resp());
    // A write that the server does not read for half a second times out.
    stream.set_write_timeout(Some(Duration::from_millis(500))).expect("the socket option is set");
    let piece = b"PING\r\n".repeat(10_000);
    let mut sent = 0;
    loop {
        match stream.write(&piece[sent % piece.len()..]) {
            Ok(taken) => sent += taken,
            Err(error) if error.kind() == ErrorKind::WouldBlock => break,
            Err(error) => panic!("{error} after {sent} bytes"),
        }
        assert!(sent < 256 << 20, "the server reads without a bound");
    }
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB for one client");
    // Other clients are served, and this connection continues when the client reads.
    assert_eq!(ask(&served, "PING"), "+PONG");
    let expected = sent / b"PING\r\n".len() * b"+PONG\r\n".len();
    let mut replies = vec![0; expected];
    stream.read_exact(&mut replies).expect("each request gets a reply");
    assert!(replies.chunks(7).all(|reply| reply == b"+PONG\r\n"));
}

/// The reply to HTTP on the RESP port.
const WRONG_PORT: &str = "this is the RESP port, but the request is HTTP; use the HTTP port\n";

/// Fault E13.
#[test]
fn http_on_the_resp_port_closes_the_connection() {
    let served = Served::start(&[], None);
    for request in [
        "GET / HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\r\nPING\r\n",
        "POST /v1/check HTTP/1.1\r\nHost: localhost\r\n\r\nTG.CHECK demo k COST 5\r\n",
        "Host: localhost\r\nTG.CHECK demo k COST 5\r\n",
    ] {
        let mut stream = connect(served.resp());
        stream.write_all(request.as_bytes()).expect("the write succeeds");
        let reply = rest_of(&mut stream);
        assert!(reply.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{reply}");
        assert!(reply.ends_with(&format!("\r\n\r\n{WRONG_PORT}")), "{reply}");
    }
    // An HTTP client shows the reason.
    let url = format!("http://{}/v1/check", served.resp());
    assert_eq!(clients::run(Command::new("curl").args(["-sS", &url])), WRONG_PORT);
    // The command in the body was not executed.
    assert_eq!(ask(&served, "TG.PEEK demo k COST 0"), "*6 :1 :5 :5 :0 :0 :0");
}

/// Fault J12: a page can make its visitor's browser resume a TLS session with a ticket that contains commands.
#[test]
fn a_tls_handshake_on_the_resp_port_executes_no_command() {
    let served = Served::start(&[], None);
    let ticket = b"\r\nTG.CHECK demo k COST 5\r\n";
    let hello =
        [&b"\x16\x03\x01\x00\x5c\x01\x00\x00\x58\x03\x03"[..], &[0xa7; 32], ticket].concat();
    let mut stream = connect(served.resp());
    stream.write_all(&hello).expect("the write succeeds");
    let reply = rest_of(&mut stream);
    assert!(reply.starts_with("-ERR Protocol error: control characters"), "{reply}");
    assert_eq!(ask(&served, "TG.PEEK demo k COST 0"), "*6 :1 :5 :5 :0 :0 :0");
}

/// Fault E14.
#[test]
fn keys_are_arbitrary_bytes() {
    let served = Served::start(&[], None);
    let keys: [&[u8]; 6] = [b"", b"\0", b"a\0", b"a\0b", b"\xff\xfe", b"\xff\xff"];
    for key in keys {
        let once = command(&[&b"CL.THROTTLE"[..], key, b"0", b"1", b"1000"]);
        let reply = exchange(served.resp(), &once.repeat(2));
        let lines: Vec<_> = reply.split_terminator("\r\n").collect();
        assert_eq!((lines[1], lines[7]), (":0", ":1"), "{key:?} is a separate key: {reply}");
    }
}

#[test]
fn throttled_clients_are_counted_like_clients_of_policies() {
    let served = Served::start(&[], Some(DEMO));
    // More commands than the server prefetches, with others among them.
    let mut pipeline = Vec::new();
    for _ in 0..40 {
        pipeline.extend(command(&["CL.THROTTLE", "greedy", "4", "1", "60"]));
        pipeline.extend(b"PING\r\n");
    }
    pipeline.extend(command(&["QUIT"]));
    let replies = exchange(served.resp(), &pipeline);
    assert_eq!(replies.matches("+PONG").count(), 40);
    assert_eq!(replies.matches("*5\r\n:0\r\n").count(), 5);
    let get = |path: &str| {
        let mut stream = connect(served.http());
        let request =
            format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).expect("the write succeeds");
        rest_of(&mut stream)
    };
    let metrics = get("/metrics");
    for (outcome, count) in [("allowed", 5), ("denied", 35)] {
        let line = format!(
            "tallygate_decisions_total{{policy=\"CL.THROTTLE\",outcome=\"{outcome}\",source=\"store\"}} {count}\n"
        );
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let hot = get("/v1/admin/hot");
    assert!(hot.contains("\"greedy\""), "{hot}");
}

/// Fault H8.
#[test]
fn different_policies_and_keys_never_share_a_quota_over_resp() {
    for store in [None, Some(Server::start(Flavor::Redis))] {
        let url = store.as_ref().map(Server::url);
        let options = url.as_ref().map_or(vec![], |url| vec!["--store", url]);
        let served = Served::start(&options, Some(POLICIES));
        for line in ["TG.CHECK a:b c", "TG.CHECK a b:c", "CL.THROTTLE a:b:c 0 1 1000"] {
            let reply = ask(&served, line);
            assert!(reply.starts_with("*6 :1 ") || reply.starts_with("*5 :0 "), "{line}: {reply}");
            let reply = ask(&served, line);
            assert!(reply.starts_with("*6 :0 ") || reply.starts_with("*5 :1 "), "{line}: {reply}");
        }
    }
}

#[test]
fn replies_of_a_remote_store_arrive_in_order() {
    let redis = Server::start(Flavor::Redis);
    let served = Served::start(&["--store", &redis.url()], Some(LONG));
    let (mut script, mut expected) = (Vec::new(), String::new());
    for round in 0..500 {
        script.extend(command(&[
            "CL.THROTTLE",
            &format!("key {round}"),
            "999",
            "1",
            "1000",
            &round.to_string(),
        ]));
        let reset = round * 1000;
        expected += &format!("*5\r\n:0\r\n:1000\r\n:{}\r\n:-1\r\n:{reset}\r\n", 1000 - round);
        if round % 7 == 0 {
            script.extend(command(&["ECHO", &round.to_string()]));
            expected += &format!("${}\r\n{round}\r\n", round.to_string().len());
        }
        if round % 11 == 0 {
            script.extend(command(&["CL.THROTTLE", "k", "x", "1", "1000"]));
            expected +=
                "-ERR max_burst must be a whole number from 0 to 9223372036854775807 (got 'x')\r\n";
        }
    }
    // A reset waits for the checks before it.
    for key in 0..50 {
        let key = key.to_string();
        script.extend(command(&["TG.CHECK", "demo", &key, "COST", "5"]));
        script.extend(command(&["TG.RESET", "demo", &key]));
        expected += "*6\r\n:1\r\n:5\r\n:0\r\n:0\r\n:30000\r\n:0\r\n*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    }
    assert_eq!(exchange(served.resp(), &script), expected);
}

#[test]
fn admin_commands_need_the_token_if_there_is_one() {
    const TOKEN: &str = "sesame-of-the-operator";
    let config = format!("[auth]\nadmin = [\"env:ADMIN\"]\n{POLICIES}");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", TOKEN)]);
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.";
    let needed = "-NOAUTH Authentication required: use AUTH with an admin token first";
    replies_match(
        &served,
        &[
            ("TG.RESET api k", needed),
            ("TG.REFUND api k 1", needed),
            ("AUTH sesame-of-the-operato", wrong),
            ("AUTH sesame-of-the-operators", wrong),
            ("AUTH user open", wrong),
            ("HELLO 3 AUTH user open", wrong),
            ("AUTH a b c", "-ERR wrong number of arguments (got 3); use AUTH [user] token"),
            // A peek needs no token.
            ("TG.PEEK api k COST 0", "*6 :1 :5 :5 :0 :0 :0"),
        ],
    );
    let reset = "TG.RESET api k\r\n";
    let done = "*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    for auth in [format!("AUTH {TOKEN}\r\n"), format!("AUTH user {TOKEN}\r\n")] {
        let reply = exchange(served.resp(), format!("{auth}{reset}RESET\r\n{reset}").as_bytes());
        assert_eq!(reply, format!("+OK\r\n{done}+RESET\r\n{needed}\r\n"));
    }
    let reply =
        exchange(served.resp(), format!("HELLO 2 AUTH default {TOKEN}\r\n{reset}").as_bytes());
    assert!(reply.ends_with(done), "{reply}");
}

#[test]
fn admin_commands_without_a_token_are_for_this_machine_only() {
    let served = Served::start(&["--resp", "0.0.0.0:0"], Some(POLICIES));
    let port = served.resp_port();
    let reset = b"TG.RESET api k\r\n";
    assert!(exchange(&format!("127.0.0.1:{port}"), reset).starts_with("*6\r\n"));
    // This sends no packet; it only finds the outside address of this machine.
    let socket = UdpSocket::bind("0.0.0.0:0").expect("the socket is bound");
    let outside = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr());
    let outside = outside.expect("this machine has a network").ip();
    assert!(matches!(outside, IpAddr::V4(address) if !address.is_loopback()));
    let reply = exchange(&format!("{outside}:{port}"), reset);
    assert!(reply.starts_with("-NOPERM admin commands are disabled"), "{reply}");
    assert!(exchange(&format!("{outside}:{port}"), b"TG.PEEK api k\r\n").starts_with("*6\r\n"));
}

/// Fault I1.
#[test]
fn commands_that_were_sent_before_shutdown_are_answered() {
    let mut served = Served::start(&[], Some(LONG));
    let mut streams: Vec<_> = (0..20).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(b"PING\r\n").expect("the write succeeds");
        stream.read_exact(&mut [0; 7]).expect("the connection is served");
    }
    // The server is suspended while the commands are sent and until SIGTERM is pending.
    served.signal("STOP");
    for (index, stream) in streams.iter_mut().enumerate() {
        let key = format!("client {index}");
        let one = command(&["CL.THROTTLE", &key, "999", "1", "1000000"]);
        stream.write_all(&one.repeat(1000)).expect("the bytes are buffered");
    }
    served.signal("TERM");
    served.signal("CONT");
    for stream in &mut streams {
        let reply = rest_of(stream);
        assert_eq!(reply.matches("*5\r\n:0\r\n:1000\r\n").count(), 1000);
        assert!(
            reply.contains(":1000\r\n:0\r\n:-1\r\n:1000000000\r\n"),
            "the last reply is missing"
        );
    }
    assert_eq!(served.wait_for_exit(), Some(0));
}

/// Fault I1.
#[test]
fn under_load_every_connection_ends_between_two_replies() {
    let mut served = Served::start(&[], Some(LONG));
    let one = command(&["CL.THROTTLE", "k", "999", "1", "1000000", "0"]);
    let reply = "*5\r\n:0\r\n:1000\r\n:1000\r\n:-1\r\n:0\r\n";
    let total = AtomicUsize::new(0);
    let load = |mut stream: TcpStream, depth: usize| {
        let (script, mut answered) = (one.repeat(depth), 0);
        let mut replies = vec![0; reply.len() * depth];
        loop {
            // After the last reply, the write may fail.
            let sent = stream.write_all(&script);
            let mut got = 0;
            while got < replies.len() {
                match stream.read(&mut replies[got..]) {
                    Ok(0) => {
                        assert_eq!(got % reply.len(), 0, "a reply was cut");
                        return answered + got / reply.len();
                    }
                    Ok(read) => got += read,
                    Err(error) => panic!("{error} after {answered}, {sent:?}"),
                }
            }
            assert_eq!(replies, reply.repeat(depth).as_bytes());
            answered += depth;
            total.fetch_add(depth, Ordering::Relaxed);
        }
    };
    let streams: Vec<_> = (0..8).map(|_| connect(served.resp())).collect();
    std::thread::scope(|scope| {
        let loads: Vec<_> = streams
            .into_iter()
            .enumerate()
            .map(|(index, stream)| scope.spawn(move || load(stream, [1, 16][index % 2])))
            .collect();
        wait_until("the load runs", PATIENCE, || total.load(Ordering::Relaxed) > 1000);
        served.signal("TERM");
        for load in loads {
            assert!(load.join().expect("the thread does not panic") > 0);
        }
    });
    assert_eq!(served.wait_for_exit(), Some(0));
}

#[test]
fn a_unix_socket_counts_as_local() {
    let path = std::env::temp_dir().join(format!("tallygate-resp-{}.sock", std::process::id()));
    let address = format!("unix:{}", path.display());
    let served = Served::start(&["--resp", &address], Some(POLICIES));
    assert_eq!(served.resp(), address);
    let reply = clients::redis_cli(&["-s", &path.display().to_string(), "TG.RESET", "api", "k"]);
    assert_eq!(reply, "1\n5\n5\n0\n0\n0\n");
    let mut check = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let reply = clients::run(check.args(["check", "--resp", &address, "api", "k"]));
    assert_eq!(reply, "allowed, 4 of 5 left\n");
}
