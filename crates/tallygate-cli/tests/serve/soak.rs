//! Tests that connections, keys and reloads leave no memory or descriptors behind. `scripts/soak` runs for longer.

use std::io::{Read as _, Write as _};
use std::net::{Shutdown, TcpStream};

use crate::common::Served;

/// Rounds in which memory may grow, and rounds in which it may not.
const WARM_UP: usize = 4;
const ROUNDS: usize = 4;
/// The work per round.
const CONNECTIONS: usize = 1500;
const NEW_KEYS: usize = 10_000;
const RELOADS: usize = 100;
/// The memory that the allocator may keep over all rounds. One KiB per connection would be twelve times as much.
const SLACK_KIB: u64 = 512;

/// Returns a policy with many names, so that a leak of policies shows.
fn configuration(limit: usize) -> String {
    let tiers = (0..50).map(|tier| format!("[policies.api.tiers.t{tier}]\nlimit = {limit}\n"));
    let tiers: String = tiers.collect();
    format!("[policies.api]\nlimit = {limit}\nwindow = \"1m\"\n{tiers}")
}

/// Fault I5.
#[test]
fn connections_keys_and_reloads_leave_nothing_behind() {
    let mut served = Served::start(&["--max-keys", "2000"], Some(&configuration(5)));
    let descriptors = served.descriptors();
    let mut resident = Vec::new();
    for round in 0..WARM_UP + ROUNDS {
        open_and_close_connections(&served);
        check_new_keys(&served, round);
        reload(&served, round);
        resident.push(served.resident_kib());
    }
    let (before, after) = (resident[WARM_UP - 1], resident[WARM_UP + ROUNDS - 1]);
    assert!(after < before + SLACK_KIB, "KiB after each round: {resident:?}");
    served.wait_for_descriptors(descriptors);
    assert_eq!(served.stop(), Some(0));
}

/// Opens connections that send a whole request, a part of one, or nothing, and closes them.
fn open_and_close_connections(served: &Served) {
    let requests: [(&str, &[u8]); 5] = [
        (served.resp(), b"TG.CHECK api alice\r\n"),
        (served.resp(), b"*3\r\n$8\r\nTG.CHECK\r\n$3\r\nap"),
        (
            served.http(),
            b"GET /v1/authorize/api HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        ),
        (
            served.http(),
            b"POST /v1/check HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{",
        ),
        (served.http(), b""),
    ];
    for (address, request) in requests.iter().cycle().take(CONNECTIONS) {
        let mut stream = TcpStream::connect(address).expect("the connection opens");
        stream.write_all(request).expect("the write succeeds");
        // The reply does not matter, only that the connection ends.
        let _ = stream.shutdown(Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    }
}

fn check_new_keys(served: &Served, round: usize) {
    let mut stream = TcpStream::connect(served.resp()).expect("the connection opens");
    for keys in (0..NEW_KEYS).collect::<Vec<_>>().chunks(1000) {
        let key = |key: &usize| format!("TG.CHECK api round-{round}-{key}\r\n");
        let commands: String = keys.iter().map(key).collect();
        stream.write_all(commands.as_bytes()).expect("the write succeeds");
        // Each reply has seven lines: an array of six numbers.
        let (mut lines, mut buffer) = (0, [0; 65536]);
        while lines < 7 * keys.len() {
            let read = stream.read(&mut buffer).expect("the server replies");
            assert!(read > 0, "the server closed the connection");
            lines += buffer[..read].iter().filter(|byte| **byte == b'\n').count();
        }
    }
}

/// Reloads valid configurations and, every fourth time, an invalid one.
fn reload(served: &Served, round: usize) {
    for turn in 0..RELOADS {
        let text = match turn % 4 {
            3 => "[policies.api]\nlimt = 5\n".to_owned(),
            _ => configuration(5 + round + turn),
        };
        std::fs::write(served.config(), crate::common::with_admin(&text))
            .expect("the file can be changed");
        let mut stream = TcpStream::connect(served.http()).expect("the connection opens");
        let request = "POST /v1/admin/reload HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 0\r\n\r\n";
        stream.write_all(request.as_bytes()).expect("the write succeeds");
        let mut reply = String::new();
        stream.read_to_string(&mut reply).expect("the server replies");
        let expected = if turn % 4 == 3 { "HTTP/1.1 4" } else { "HTTP/1.1 2" };
        assert!(reply.starts_with(expected), "{reply}");
    }
}
