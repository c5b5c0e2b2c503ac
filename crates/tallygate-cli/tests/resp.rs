//! The RESP surface as clients meet it: the bytes, real clients, and what strangers send.

mod common;

use std::io::{ErrorKind, Read as _, Write as _};
use std::net::{IpAddr, Shutdown, TcpStream, UdpSocket};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::Served;
use tallygate_testkit::servers::{Flavor, Server};

/// Long enough for a busy machine; nobody waits for it unless something is wrong.
/// The demo policy with the admin commands open.
const DEMO: &str = include_str!("../../tallygate-server/src/demo.toml");
/// The same, with numbers that nothing is earned back under while a test runs.
const LONG: &str = concat!(
    include_str!("../../tallygate-server/src/demo.toml"),
    "\n[limits]\nmax_time_to_fresh = \"100y\"\n"
);
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

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).expect("it listens");
    stream.set_nodelay(true).expect("a socket");
    stream.set_read_timeout(Some(PATIENCE)).expect("a socket");
    stream.set_write_timeout(Some(PATIENCE)).expect("a socket");
    stream
}

/// A command as clients send it.
fn command(words: &[impl AsRef<[u8]>]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words.iter().map(AsRef::as_ref) {
        bytes.extend_from_slice(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend_from_slice(word);
        bytes.extend_from_slice(b"\r\n");
    }
    bytes
}

/// All that is answered until the server closes the connection.
fn rest_of(stream: &mut TcpStream) -> String {
    let mut replies = Vec::new();
    stream.read_to_end(&mut replies).expect("replies, then the end");
    String::from_utf8(replies).expect("text")
}

/// Sends bytes, and says that nothing follows: all that is answered.
fn exchange(address: &str, bytes: &[u8]) -> String {
    let mut stream = connect(address);
    stream.write_all(bytes).expect("it is read");
    stream.shutdown(Shutdown::Write).expect("a socket");
    rest_of(&mut stream)
}

/// Sends a line of words, and what it answers, with spaces for line ends.
fn ask(served: &Served, line: &str) -> String {
    let words: Vec<_> = line.split(' ').collect();
    exchange(served.resp(), &command(&words)).trim_end().replace("\r\n", " ")
}

#[track_caller]
fn answers(served: &Served, table: &[(&str, &str)]) {
    for (line, expected) in table {
        assert_eq!(ask(served, line), *expected, "{line}");
    }
}

/// Memory that a server holds, in KiB.
fn resident_kib(served: &Served) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.pid()));
    let status = status.expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("a line");
    line.split_whitespace().nth(1).expect("a number").parse().expect("a number")
}

#[test]
fn throttle_answers_as_redis_cell_does() {
    let served = Served::start(&[], None);
    answers(
        &served,
        &[
            // 3 at once; one in 1000 s. limited, limit, remaining, retry_after, reset_after
            ("CL.THROTTLE k 2 1 1000", "*5 :0 :3 :2 :-1 :1000"),
            ("cl.throttle k 2 1 1000 1", "*5 :0 :3 :1 :-1 :2000"),
            // A5: a look charges nothing.
            ("CL.THROTTLE k 2 1 1000 0", "*5 :0 :3 :1 :-1 :2000"),
            ("CL.THROTTLE k 2 1 1000 2", "*5 :1 :3 :1 :1000 :2000"),
            ("CL.THROTTLE k 2 1 1000 1", "*5 :0 :3 :0 :-1 :3000"),
            // What was refused charged nothing.
            ("CL.THROTTLE k 2 1 1000 2", "*5 :1 :3 :0 :2000 :3000"),
            // A7: it never fits, so there is no time to come back.
            ("CL.THROTTLE k 2 1 1000 4", "*5 :1 :3 :0 :-1 :3000"),
            // A client is its key alone; what it used stays used under other numbers.
            ("CL.THROTTLE k 5 1 1000 4", "*5 :1 :6 :3 :1000 :3000"),
            ("CL.THROTTLE other 2 1 1000 3", "*5 :0 :3 :0 :-1 :3000"),
            // A burst of nothing beyond the first.
            ("CL.THROTTLE one 0 1 1000", "*5 :0 :1 :0 :-1 :1000"),
            ("CL.THROTTLE one 0 1 1000", "*5 :1 :1 :0 :1000 :1000"),
        ],
    );
}

#[test]
fn a_part_of_a_second_is_told_as_a_whole_one() {
    let served = Served::start(&[], None);
    answers(
        &served,
        &[
            // One in 2/3 s, two at once.
            ("CL.THROTTLE k 1 3 2", "*5 :0 :2 :1 :-1 :1"),
            ("CL.THROTTLE k 1 3 2", "*5 :0 :2 :0 :-1 :2"),
            ("CL.THROTTLE k 1 3 2", "*5 :1 :2 :0 :1 :2"),
            // One in a microsecond: still never 0.
            ("CL.THROTTLE fast 0 1000000 1", "*5 :0 :1 :0 :-1 :1"),
        ],
    );
}

#[test]
fn a4_a6_a14_numbers_that_are_none_are_refused_by_name() {
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
                format!("-ERR {name} is '{bad}'; use a whole number from {least} to {most}");
            assert_eq!(ask(&served, &line), expected, "{line}");
        }
    }
    let spaced = command(&["CL.THROTTLE", "k", " 1", "1", "60"]);
    assert!(exchange(served.resp(), &spaced).starts_with("-ERR max_burst is ' 1'; "));
    answers(
        &served,
        &[
            (
                "CL.THROTTLE k 1 0 60",
                "-ERR count is '0'; use a whole number from 1 to 9223372036854775807",
            ),
            ("CL.THROTTLE k 1 1 0", "-ERR period is '0'; use a whole number from 1 to 9223372036"),
            // 292 years are the most that can be counted; a longer period would be another rate.
            (
                "CL.THROTTLE k 1 1 9223372037",
                "-ERR period is '9223372037'; use a whole number from 1 to 9223372036",
            ),
            // Nothing was charged by any of it.
            ("CL.THROTTLE k 1 1 60 0", "*5 :0 :2 :2 :-1 :0"),
            ("TG.PEEK demo k COST 0", "*6 :1 :5 :5 :0 :0 :0"),
        ],
    );
    let extreme = ask(&served, "CL.THROTTLE k 9223372036854775807 1 9223372036");
    assert!(
        extreme.starts_with("-ERR ") && extreme.contains("use numbers that need at most 100years"),
        "{extreme}"
    );
    let extreme = ask(&served, "CL.THROTTLE x 9223372036854775807 9223372036854775807 1");
    assert_eq!(extreme, "*5 :0 :9223372036854775807 :9223372036854775807 :-1 :1");
}

#[test]
fn policies_of_the_configuration_are_asked_by_name() {
    let served = Served::start(&[], Some(POLICIES));
    let hour_ms = 3_600_000_000_u64;
    let used = |count: u64| count * hour_ms;
    let table = [
        // What a check would be told; a look at nothing tells what there is.
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
        // What time has earned meanwhile is less than a second's worth of a thousand hours.
        let told = ask(&served, line);
        let near =
            |one: &str, other: &str| match (one[1..].parse::<i64>(), other[1..].parse::<i64>()) {
                (Ok(one), Ok(other)) => {
                    one == other || (one > 1_000_000 && one.abs_diff(other) < 20_000)
                }
                _ => one == other,
            };
        let same = told.split(' ').count() == expected.split(' ').count()
            && told.split(' ').zip(expected.split(' ')).all(|(one, other)| near(one, other));
        assert!(same, "{line}: {told}, expected {expected}");
    }
    assert!(ask(&served, "TG.CHECK api k TIER gold").starts_with("-ERR "));
    for wrong in [
        "TG.CHECK api",
        "TG.CHECK api k COST",
        "TG.CHECK api k COST 1 COST 2",
        "TG.CHECK api k PRICE 1",
        "TG.PEEK api",
        "TG.REFUND api k",
        "TG.RESET api k 1",
        "CL.THROTTLE k 1 1",
        "CL.THROTTLE k 1 1 60 1 1",
    ] {
        let told = ask(&served, wrong);
        let name = wrong.split(' ').next().expect("a name");
        assert!(told.starts_with(&format!("-ERR wrong arguments; use {name} ")), "{wrong}: {told}");
    }
}

#[test]
fn resp3_tells_a_decision_by_name() {
    let served = Served::start(&[], Some(POLICIES));
    let script =
        [command(&["HELLO", "3"]), command(&["TG.PEEK", "api", "k", "COST", "0"])].concat();
    let told = exchange(served.resp(), &script);
    let (hello, told) = told.split_once("modules\r\n*0\r\n").expect("a greeting");
    assert!(hello.starts_with("%7\r\n$6\r\nserver\r\n$9\r\ntallygate\r\n"), "{hello}");
    let expected = "%6 $7 allowed #t $5 limit :5 $9 remaining :5 $14 retry_after_ms :0 \
                    $14 reset_after_ms :0 $8 delay_ms :0 ";
    assert_eq!(told.replace("\r\n", " "), expected);
}

#[test]
fn clients_introduce_themselves_as_they_do_to_redis() {
    let served = Served::start(&[], Some(DEMO));
    answers(
        &served,
        &[
            ("PING", "+PONG"),
            ("ping hello", "$5 hello"),
            ("ECHO hello", "$5 hello"),
            ("SELECT 0", "+OK"),
            ("SELECT 1", "-ERR there is no DB '1'; use 0"),
            ("HELLO 4", "-NOPROTO unsupported protocol version; use 2 or 3"),
            ("CLIENT SETNAME a", "+OK"),
            ("CLIENT SETINFO LIB-NAME x", "+OK"),
            ("CLIENT GETNAME", "$-1"),
            ("CLIENT NO-EVICT on", "+OK"),
            ("COMMAND COUNT", ":17"),
            ("COMMAND DOCS", "*0"),
            ("COMMAND INFO ping nothing", "*2 *6 $4 ping :-1 *1 +fast :0 :0 :0 $-1"),
            ("CONFIG GET maxmemory", "*0"),
            ("CONFIG GET appendonly", "*2 $10 appendonly $2 no"),
            ("RESET", "+RESET"),
            (
                "AUTH x",
                "-ERR AUTH called without any password configured: the configuration has no tokens",
            ),
            (
                "SET a b",
                "-ERR unknown command 'SET'; use CL.THROTTLE or TG.CHECK, PEEK, REFUND, RESET",
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

#[test]
fn e8_h5_what_an_error_quotes_is_cut_and_has_no_line_end() {
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
        let told = exchange(served.resp(), &[command(call), b"PING\r\n".to_vec()].concat());
        let (error, rest) = told.split_once("\r\n").expect("a line");
        assert!(error.starts_with("-ERR ") && error.len() < 600, "{error}");
        assert!(!error.contains(['\r', '\n']), "{error}");
        assert_eq!(rest, "+PONG\r\n", "{error}");
    }
}

#[test]
fn e9_lengths_that_no_limit_allows_close_the_connection_after_an_error() {
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
        stream.write_all(bytes.as_bytes()).expect("it is read");
        let told = rest_of(&mut stream);
        assert!(told.starts_with("-ERR Protocol error: invalid "), "{bytes:?}: {told}");
        assert_eq!(told.lines().count(), 1, "{bytes:?}: {told}");
    }
    // What is allowed is not made room for before it comes.
    let before = resident_kib(&served);
    let mut streams: Vec<_> = (0..200).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(b"PING\r\n*1048576\r\n$536870912\r\nx").expect("it is read");
    }
    for stream in &mut streams {
        stream.read_exact(&mut [0; 7]).expect("it was read that far");
    }
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 200 * 64, "{grown} KiB");
}

#[test]
fn e10_arrays_that_nest_close_the_connection_after_an_error() {
    let served = Served::start(&[], None);
    let told = exchange(served.resp(), &b"*1\r\n".repeat(100_000));
    assert_eq!(told, "-ERR Protocol error: expected '$', got '*'\r\n");
    assert_eq!(ask(&served, "PING"), "+PONG");
}

#[test]
fn e11_split_at_every_byte_gives_the_same_replies() {
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
    // The connection's number is its own.
    let without_id = |told: &str| {
        let (before, rest) = told.split_once("$2\r\nid\r\n").expect("a greeting");
        let (_, rest) = rest.split_once("\r\n").expect("a number");
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
        stream.write_all(first).expect("it is read");
        std::thread::yield_now();
        stream.write_all(second).expect("it is read");
        assert_eq!(without_id(&rest_of(&mut stream)), whole, "split at {at}");
    }
    let mut stream = connect(served.resp());
    for byte in script("key9999") {
        stream.write_all(&[byte]).expect("it is read");
    }
    assert_eq!(without_id(&rest_of(&mut stream)), whole, "byte by byte");
}

#[test]
fn d3_a_key_of_10_mib_is_read_past_and_the_connection_goes_on() {
    let served = Served::start(&[], None);
    let key = vec![b'x'; 10 << 20];
    let before = resident_kib(&served);
    let script = [
        command(&[&b"CL.THROTTLE"[..], &key, b"1", b"1", b"60"]),
        command(&[&b"TG.CHECK"[..], b"demo", &key]),
        // Within the surface's limits, but longer than a store takes.
        command(&[&b"CL.THROTTLE"[..], &key[..4097], b"1", b"1", b"60"]),
        command(&[&b"CL.THROTTLE"[..], &key[..4096], b"1", b"1", b"60"]),
    ]
    .concat();
    let told = exchange(served.resp(), &script);
    let lines: Vec<_> = told.split_terminator("\r\n").collect();
    let too_long = "-ERR an argument has 10485760 bytes; use at most 65536";
    let for_the_store = "-ERR the key has 4097 bytes; use at most 4096, or a hash of it";
    assert_eq!(lines, [too_long, too_long, for_the_store, "*5", ":0", ":2", ":1", ":-1", ":60"]);
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB");
}

#[test]
fn e3_e12_who_does_not_read_is_not_read_from() {
    let served = Served::start(&[], None);
    let before = resident_kib(&served);
    let mut stream = connect(served.resp());
    stream.set_nonblocking(true).expect("a socket");
    let piece = b"PING\r\n".repeat(10_000);
    let (mut sent, mut moved) = (0, Instant::now());
    // Until the server has taken nothing for a while.
    while moved.elapsed() < Duration::from_millis(500) {
        match stream.write(&piece[sent % piece.len()..]) {
            Ok(taken) => (sent, moved) = (sent + taken, Instant::now()),
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error} after {sent} bytes"),
        }
        assert!(sent < 256 << 20, "it reads whatever comes");
    }
    let grown = resident_kib(&served).saturating_sub(before);
    assert!(grown < 4096, "{grown} KiB for one client");
    // Others are served meanwhile, and this one goes on when it reads.
    assert_eq!(ask(&served, "PING"), "+PONG");
    stream.set_nonblocking(false).expect("a socket");
    let expected = sent / b"PING\r\n".len() * b"+PONG\r\n".len();
    let mut replies = vec![0; expected];
    stream.read_exact(&mut replies).expect("a reply to each");
    assert!(replies.chunks(7).all(|reply| reply == b"+PONG\r\n"));
}

#[test]
fn e13_http_on_the_port_for_resp_is_closed() {
    let served = Served::start(&[], None);
    for request in [
        "GET / HTTP/1.1\r\nHost: localhost\r\nX: y\r\n\r\nPING\r\n",
        "POST /v1/check HTTP/1.1\r\nHost: localhost\r\n\r\nTG.CHECK demo k COST 5\r\n",
        "Host: localhost\r\nTG.CHECK demo k COST 5\r\n",
    ] {
        let mut stream = connect(served.resp());
        stream.write_all(request.as_bytes()).expect("it is read");
        let told = rest_of(&mut stream);
        assert_eq!(told, "-ERR this is HTTP on a port for RESP; HTTP has a port of its own\r\n");
    }
    // What stood in a body was not carried out.
    assert_eq!(ask(&served, "TG.PEEK demo k COST 0"), "*6 :1 :5 :5 :0 :0 :0");
}

#[test]
fn e14_keys_are_bytes_of_any_kind() {
    let served = Served::start(&[], None);
    let keys: [&[u8]; 6] = [b"", b"\0", b"a\0", b"a\0b", b"\xff\xfe", b"\xff\xff"];
    for key in keys {
        let once = command(&[&b"CL.THROTTLE"[..], key, b"0", b"1", b"1000"]);
        let told = exchange(served.resp(), &once.repeat(2));
        let lines: Vec<_> = told.split_terminator("\r\n").collect();
        assert_eq!((lines[1], lines[7]), (":0", ":1"), "{key:?} is a key of its own: {told}");
    }
}

#[test]
fn throttled_clients_are_counted_as_those_of_policies_are() {
    let served = Served::start(&[], Some(DEMO));
    // More than are looked at ahead, with something else among them.
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
        stream.write_all(request.as_bytes()).expect("it reads");
        rest_of(&mut stream)
    };
    let metrics = get("/metrics");
    for (outcome, count) in [("allowed", 5), ("refused", 35)] {
        let line = format!(
            "tallygate_decisions_total{{policy=\"CL.THROTTLE\",outcome=\"{outcome}\",source=\"store\"}} {count}\n"
        );
        assert!(metrics.contains(&line), "{line} in {metrics}");
    }
    let hot = get("/v1/admin/hot");
    assert!(hot.contains("\"greedy\""), "{hot}");
}

#[test]
fn h8_a_policy_and_a_key_never_run_together() {
    for store in [None, Some(Server::start(Flavor::Redis))] {
        let url = store.as_ref().map(Server::url);
        let options = url.as_ref().map_or(vec![], |url| vec!["--store", url]);
        let served = Served::start(&options, Some(POLICIES));
        for line in ["TG.CHECK a:b c", "TG.CHECK a b:c", "CL.THROTTLE a:b:c 0 1 1000"] {
            let told = ask(&served, line);
            assert!(told.starts_with("*6 :1 ") || told.starts_with("*5 :0 "), "{line}: {told}");
            let told = ask(&served, line);
            assert!(told.starts_with("*6 :0 ") || told.starts_with("*5 :1 "), "{line}: {told}");
        }
    }
}

#[test]
fn replies_of_a_store_across_the_network_come_in_order() {
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
                "-ERR max_burst is 'x'; use a whole number from 0 to 9223372036854775807\r\n";
        }
    }
    // What takes back waits for what was asked before it.
    for key in 0..50 {
        let key = key.to_string();
        script.extend(command(&["TG.CHECK", "demo", &key, "COST", "5"]));
        script.extend(command(&["TG.RESET", "demo", &key]));
        expected += "*6\r\n:1\r\n:5\r\n:0\r\n:0\r\n:30000\r\n:0\r\n*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    }
    assert_eq!(exchange(served.resp(), &script), expected);
}

#[test]
fn admin_commands_need_the_token_where_there_is_one() {
    const TOKEN: &str = "sesame-of-the-operator";
    let config = format!("[auth]\nadmin = [\"env:ADMIN\"]\n{POLICIES}");
    let served = Served::with_variables(&[], Some(&config), &[("ADMIN", TOKEN)]);
    let wrong = "-WRONGPASS invalid username-password pair or user is disabled.";
    let needed = "-NOAUTH Authentication required: AUTH with an admin token first";
    answers(
        &served,
        &[
            ("TG.RESET api k", needed),
            ("TG.REFUND api k 1", needed),
            ("AUTH sesame-of-the-operato", wrong),
            ("AUTH sesame-of-the-operators", wrong),
            ("AUTH user open", wrong),
            ("HELLO 3 AUTH user open", wrong),
            ("AUTH a b c", "-ERR wrong arguments; use AUTH [user] token"),
            // Who may only ask needs none.
            ("TG.PEEK api k COST 0", "*6 :1 :5 :5 :0 :0 :0"),
        ],
    );
    let reset = "TG.RESET api k\r\n";
    let done = "*6\r\n:1\r\n:5\r\n:5\r\n:0\r\n:0\r\n:0\r\n";
    for auth in [format!("AUTH {TOKEN}\r\n"), format!("AUTH user {TOKEN}\r\n")] {
        let told = exchange(served.resp(), format!("{auth}{reset}RESET\r\n{reset}").as_bytes());
        assert_eq!(told, format!("+OK\r\n{done}+RESET\r\n{needed}\r\n"));
    }
    let told =
        exchange(served.resp(), format!("HELLO 2 AUTH default {TOKEN}\r\n{reset}").as_bytes());
    assert!(told.ends_with(done), "{told}");
}

#[test]
fn admin_commands_without_a_token_are_for_this_machine_only() {
    let served = Served::start(&["--resp", "0.0.0.0:0"], Some(POLICIES));
    let port = served.resp_port();
    let reset = b"TG.RESET api k\r\n";
    assert!(exchange(&format!("127.0.0.1:{port}"), reset).starts_with("*6\r\n"));
    // No packet is sent: it only asks which address this machine would have outside.
    let socket = UdpSocket::bind("0.0.0.0:0").expect("a socket");
    let outside = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr());
    let outside = outside.expect("this machine has a network").ip();
    assert!(matches!(outside, IpAddr::V4(address) if !address.is_loopback()));
    let told = exchange(&format!("{outside}:{port}"), reset);
    assert!(told.starts_with("-NOPERM admin is closed"), "{told}");
    assert!(exchange(&format!("{outside}:{port}"), b"TG.PEEK api k\r\n").starts_with("*6\r\n"));
}

#[test]
fn i1_what_was_sent_before_the_server_was_told_to_stop_is_answered() {
    let mut served = Served::start(&[], Some(LONG));
    let mut streams: Vec<_> = (0..20).map(|_| connect(served.resp())).collect();
    for stream in &mut streams {
        stream.write_all(b"PING\r\n").expect("it is read");
        stream.read_exact(&mut [0; 7]).expect("it is served");
    }
    // The server does nothing while this is sent and it is told to stop.
    served.signal("STOP");
    for (index, stream) in streams.iter_mut().enumerate() {
        let key = format!("client {index}");
        let one = command(&["CL.THROTTLE", &key, "999", "1", "1000000"]);
        stream.write_all(&one.repeat(1000)).expect("it is buffered");
    }
    served.signal("TERM");
    served.signal("CONT");
    for stream in &mut streams {
        let told = rest_of(stream);
        assert_eq!(told.matches("*5\r\n:0\r\n:1000\r\n").count(), 1000);
        assert!(told.contains(":1000\r\n:0\r\n:-1\r\n:1000000000\r\n"), "the last one");
    }
    assert_eq!(served.ended(), Some(0));
}

#[test]
fn i1_under_load_every_connection_ends_between_two_replies() {
    let mut served = Served::start(&[], Some(LONG));
    let one = command(&["CL.THROTTLE", "k", "999", "1", "1000000", "0"]);
    let reply = "*5\r\n:0\r\n:1000\r\n:1000\r\n:-1\r\n:0\r\n";
    let load = |mut stream: TcpStream, depth: usize| {
        let (script, mut answered) = (one.repeat(depth), 0);
        let mut replies = vec![0; reply.len() * depth];
        loop {
            // After the end of the replies the socket may take no more.
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
        }
    };
    let streams: Vec<_> = (0..8).map(|_| connect(served.resp())).collect();
    std::thread::scope(|scope| {
        let loads: Vec<_> = streams
            .into_iter()
            .enumerate()
            .map(|(index, stream)| scope.spawn(move || load(stream, [1, 16][index % 2])))
            .collect();
        std::thread::sleep(Duration::from_millis(200));
        served.signal("TERM");
        for load in loads {
            assert!(load.join().expect("it ends well") > 0);
        }
    });
    assert_eq!(served.ended(), Some(0));
}

#[test]
fn a_unix_socket_is_this_machine() {
    let path = std::env::temp_dir().join(format!("tallygate-resp-{}.sock", std::process::id()));
    let address = format!("unix:{}", path.display());
    let served = Served::start(&["--resp", &address], Some(POLICIES));
    assert_eq!(served.resp(), address);
    let told = redis_cli(&["-s", &path.display().to_string(), "TG.RESET", "api", "k"]);
    assert_eq!(told, "1\n5\n5\n0\n0\n0\n");
    let mut check = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    let told = run(check.args(["check", "--resp", &address, "api", "k"]));
    assert_eq!(told, "allowed, 4 of 5 left\n");
}

fn redis_cli(words: &[&str]) -> String {
    run(Command::new("redis-cli").args(words))
}

/// What a program prints; it must succeed.
#[track_caller]
fn run(command: &mut Command) -> String {
    let output = command.output().expect("it is installed: run scripts/install-test-clients");
    let (printed, said) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && said.is_empty(), "{command:?}: {printed}{said}");
    printed.into_owned()
}

/// Where scripts/install-test-clients puts them.
fn clients() -> PathBuf {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../target/test-clients");
    std::fs::canonicalize(path).expect("clients: run scripts/install-test-clients")
}

#[test]
fn redis_cli_works() {
    let served = Served::start(&[], None);
    let port = served.resp_port();
    let throttle = ["-p", port, "CL.THROTTLE", "k", "1", "1", "1000"];
    assert_eq!(redis_cli(&throttle), "0\n2\n1\n-1\n1000\n");
    assert_eq!(
        redis_cli(&["-p", port, "-3", "TG.PEEK", "demo", "k"]).lines().next(),
        Some("allowed (true)")
    );
    assert!(redis_cli(&["-p", port, "INFO"]).contains("tallygate_version:"));
    assert_eq!(redis_cli(&["-p", port, "-r", "3", "PING"]), "PONG\nPONG\nPONG\n");
}

#[test]
fn redis_benchmark_works() {
    let served = Served::start(&[], None);
    let arguments = ["-q", "-n", "20000", "-P", "16", "-r", "1000", "-p", served.resp_port()];
    let throttle = ["CL.THROTTLE", "key:__rand_int__", "15", "30", "60"];
    let printed = run(Command::new("redis-benchmark").args(arguments).args(throttle));
    assert!(printed.contains("requests per second"), "{printed}");
    assert!(!printed.to_lowercase().contains("err"), "{printed}");
}

#[test]
fn redis_py_works() {
    let served = Served::start(&[], None);
    let script = r#"
import redis, sys
for protocol in (2, 3):
    r = redis.Redis(port=int(sys.argv[1]), protocol=protocol, client_name="test", decode_responses=True)
    assert r.ping() is True
    key = f"py{protocol}"
    assert r.execute_command("CL.THROTTLE", key, 1, 1, 1000) == [0, 2, 1, -1, 1000]
    told = r.execute_command("TG.CHECK", "demo", key, "COST", 6)
    if protocol == 2:
        assert told == [0, 5, 5, -1, 0, 0], told
    else:
        assert told == {"allowed": False, "limit": 5, "remaining": 5, "retry_after_ms": -1,
                        "reset_after_ms": 0, "delay_ms": 0}, told
    pipeline = r.pipeline(transaction=False)
    for _ in range(100):
        pipeline.execute_command("CL.THROTTLE", "many" + key, 49, 1, 1000)
    assert [reply[0] for reply in pipeline.execute()] == [0] * 50 + [1] * 50
    try:
        r.execute_command("CL.THROTTLE", key, "inf", 1, 60)
        raise SystemExit("it was taken")
    except redis.ResponseError as error:
        assert "max_burst is 'inf'" in str(error), error
    assert r.info("server")["redis_version"].startswith("7.")
    assert r.client_getname() == "test"
    assert r.execute_command("CL.THROTTLE", b"\xff\x00", 1, 1, 1000)[0] == 0
print("done")
"#;
    let mut python = Command::new("python3");
    python.env("PYTHONPATH", clients().join("python")).args(["-c", script, served.resp_port()]);
    assert_eq!(run(&mut python), "done\n");
}

#[test]
fn node_redis_works() {
    let served = Served::start(&[], None);
    let script = r#"
const assert = require("node:assert");
const { createClient } = require("redis");
(async () => {
    for (const RESP of [2, 3]) {
        const client = createClient({ url: `redis://127.0.0.1:${process.argv[1]}`, RESP, name: "test" });
        client.on("error", (error) => { throw error; });
        await client.connect();
        assert.equal(await client.ping(), "PONG");
        const ask = (...words) => client.sendCommand(words);
        assert.deepEqual(await ask("CL.THROTTLE", `node${RESP}`, "1", "1", "1000"), [0, 2, 1, -1, 1000]);
        // Sent at once, without waiting for each.
        const many = [];
        for (let i = 0; i < 100; i++) many.push(ask("CL.THROTTLE", `many${RESP}`, "49", "1", "1000"));
        assert.equal((await Promise.all(many)).filter((reply) => reply[0] === 0).length, 50);
        const told = await ask("TG.PEEK", "demo", "node");
        assert.equal(RESP === 2 ? told[1] : told.limit, 5);
        await assert.rejects(ask("CL.THROTTLE", "k", "-1", "1", "60"), /max_burst is '-1'/);
        await client.close();
    }
    console.log("done");
})();
"#;
    assert_eq!(node("node", script, &served), "done\n");
}

#[test]
fn ioredis_works() {
    let served = Served::start(&[], None);
    let script = r#"
const assert = require("node:assert");
const { Redis } = require("ioredis");
(async () => {
    for (const protocol of [2, 3]) {
        const client = new Redis({ port: process.argv[1], connectionName: "test", protocol });
        client.on("error", (error) => { throw error; });
        assert.equal(await client.ping(), "PONG");
        const ask = (...words) => client.call(...words);
        const key = `io${protocol}`;
        assert.deepEqual(await ask("CL.THROTTLE", key, 1, 1, 1000), [0, 2, 1, -1, 1000]);
        const pipeline = client.pipeline();
        for (let i = 0; i < 100; i++) pipeline.call("CL.THROTTLE", `many ${key}`, 49, 1, 1000);
        const replies = await pipeline.exec();
        assert.equal(replies.filter(([error, reply]) => error === null && reply[0] === 0).length, 50);
        const told = await ask("TG.PEEK", "demo", key);
        // It makes a list of a map.
        assert.equal(protocol === 2 ? told[1] : told[told.indexOf("limit") + 1], 5);
        await assert.rejects(ask("CL.THROTTLE", key, "-1", 1, 60), /max_burst is '-1'/);
        assert.equal(await client.client("GETNAME"), "test");
        assert.equal((await client.call("CL.THROTTLE", Buffer.from([255, 0]), 1, 1, 1000))[1], 2);
        assert.equal(await client.quit(), "OK");
    }
    console.log("done");
})();
"#;
    assert_eq!(node("ioredis", script, &served), "done\n");
}

/// What a script prints that talks to the server through one of the clients.
#[track_caller]
fn node(client: &str, script: &str, served: &Served) -> String {
    let modules = clients().join(client).join("node_modules");
    let arguments = ["-e", script, served.resp_port()];
    run(Command::new("node").env("NODE_PATH", modules).args(arguments))
}

#[test]
fn the_redis_crate_works() {
    let served = Served::start(&[], None);
    for protocol in ["resp2", "resp3"] {
        let url = format!("redis://{}/?protocol={protocol}", served.resp());
        let mut client = redis::Client::open(url).expect("an address");
        let told: Vec<i64> = redis::cmd("CL.THROTTLE")
            .arg(&[protocol, "1", "1", "1000"])
            .query(&mut client)
            .expect("a decision");
        assert_eq!(told, [0, 2, 1, -1, 1000]);
        let mut pipeline = redis::pipe();
        for _ in 0..100 {
            pipeline.cmd("CL.THROTTLE").arg(format!("many {protocol}")).arg(&[49, 1, 1000]);
        }
        let told: Vec<Vec<i64>> = pipeline.query(&mut client).expect("decisions");
        assert_eq!(told.iter().filter(|told| told[0] == 0).count(), 50);
        let error = redis::cmd("CL.THROTTLE").arg(&["k", "1", "1"]).query::<()>(&mut client);
        assert!(error.expect_err("too few").to_string().contains("CL.THROTTLE key max_burst"));
    }
}
