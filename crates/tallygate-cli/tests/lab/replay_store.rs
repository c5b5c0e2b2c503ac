//! Tests `tallygate replay --store`: real servers decide the traces and give the same results as memory.

use std::io::Write as _;
use std::process::{Command, Output, Stdio};

use tallygate_testkit::servers::{Cluster, Flavor, Server};
use tallygate_testkit::{decision_cases, replay_cases};

fn replay(options: &[&str], input: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tallygate"));
    command.arg("replay").args(options);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("the stream is piped");
    let input = input.to_owned();
    let writer = std::thread::spawn(move || drop(stdin.write_all(input.as_bytes())));
    let output = child.wait_with_output().expect("the process ends");
    writer.join().expect("the writer ends");
    output
}

/// Checks that a replay gives the same output, message and exit code with and without the store.
#[track_caller]
fn same(store: &str, options: &[&str], input: &str) {
    let in_memory = replay(options, input);
    let in_store = replay(&[options, &["--store", store]].concat(), input);
    assert_eq!(
        String::from_utf8_lossy(&in_memory.stderr),
        String::from_utf8_lossy(&in_store.stderr)
    );
    assert_eq!(
        String::from_utf8_lossy(&in_memory.stdout),
        String::from_utf8_lossy(&in_store.stdout)
    );
    assert_eq!(in_memory.status, in_store.status);
}

#[test]
fn redis_and_valkey_decide_every_vector_as_memory_does() {
    for flavor in Flavor::ALL {
        let server = Server::start(flavor);
        for case in replay_cases() {
            same(&server.url(), &[], &case.input);
        }
        for case in decision_cases() {
            let burst = case.burst.to_string();
            let options = ["--algorithm", &case.algorithm, "--burst", &burst, "--json"];
            same(&server.url(), &options, &case.as_replay());
        }
        assert_eq!(server.ask::<u64>(&["DBSIZE"]), 0, "every run removes its keys");
    }
}

/// Returns a trace of 50 clients at irregular times, some at equal times.
fn trace() -> String {
    let mut trace = String::from("7\n100\n3000\n");
    let mut random = 1_u64;
    for place in 0..3000_u64 {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let (client, cost) = ((random >> 40) % 50, (random >> 50) % 4);
        trace += &format!("request client-{client} {} {cost}\n", place * 3 + (random >> 60));
    }
    trace
}

#[test]
fn a_cluster_decides_a_trace_as_memory_does() {
    let cluster = Cluster::start(Flavor::Redis, 3, 0);
    let hosts: Vec<String> = cluster.nodes().iter().map(Server::address).collect();
    let store = format!("redis+cluster://{}", hosts.join(","));
    same(&store, &[], &trace());
    for algorithm in ["token_bucket", "sliding_window_log", "sliding_window_counter"] {
        same(&store, &["--algorithm", algorithm, "--json"], &trace());
    }
    let left: u64 = cluster.nodes().iter().map(|node| node.ask::<u64>(&["DBSIZE"])).sum();
    assert_eq!(left, 0);
}

#[test]
fn a_replay_uses_the_times_of_the_trace_and_its_own_keys() {
    let server = Server::start(Flavor::Redis);
    // Ten requests, an hour of ticks apart, decided at once. The second run must not see the keys of the first.
    let input: String =
        (0..10).map(|hour| format!("request a {}\n", hour * 3_600_000_000_i64)).collect();
    for _ in 0..2 {
        same(&server.url(), &["--exact", "--json"], &format!("1\n36000000000\n10\n{input}"));
    }
}

#[test]
fn a_malformed_number_never_reaches_the_store() {
    let server = Server::start(Flavor::Redis);
    for bad in ["inf", "nan", "0x10", "1e3", "+1", "1_000", "1.0", "-", "99999999999999999999"] {
        for line in [format!("request a {bad}"), format!("request a 0 {bad}")] {
            for options in [&["--exact"][..], &[]] {
                same(&server.url(), options, &format!("3\n10\n1\n{line}\n"));
            }
        }
        same(&server.url(), &["--exact"], &format!("{bad}\n10\n1\nrequest a 0\n"));
    }
    let stats = server.info("commandstats");
    assert!(!stats.keys().any(|name| name.starts_with("cmdstat_eval")), "{stats:?}");
}

#[test]
fn the_error_of_an_unavailable_store_hides_its_password() {
    let options = ["--exact", "--store", "redis://alice:hunter2@127.0.0.1:1/"];
    let output = replay(&options, "3\n10\n1\nrequest a 0\n");
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2));
    assert!(output.stdout.is_empty());
    assert!(message.starts_with("tallygate: --store: redis is unavailable: "), "{message}");
    assert!(!message.contains("hunter2"), "{message}");
}
