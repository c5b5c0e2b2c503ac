//! Traces, as a collector receives them. Only where they are built in: `--features otlp`.
#![cfg(feature = "otlp")]

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

use crate::common::Served;
use crate::http_client::{Reply, ask, get, post};

const CONFIG: &str = r#"
    [policies.api]
    limit = 1
    window = "1000h"
    burst = 2
    key = "header:x-client"
    [policies.other]
    limit = 1
    window = "1000h"
"#;

/// Texts that no trace may contain.
const CLIENT: &str = "client-4711";

/// A collector that stores the exported spans.
struct Collector {
    url: String,
    taken: Arc<Mutex<Vec<u8>>>,
}

impl Collector {
    fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("the address has a port");
        let url = format!("http://{}", listener.local_addr().expect("the address is valid"));
        let taken = Arc::<Mutex<Vec<u8>>>::default();
        let keep = taken.clone();
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let keep = keep.clone();
                std::thread::spawn(move || take(stream, &keep));
            }
        });
        Self { url, taken }
    }

    fn taken(&self) -> Vec<u8> {
        self.taken.lock().expect("no thread panicked").clone()
    }
}

/// Reads requests off a connection, and accepts each.
fn take(stream: TcpStream, keep: &Mutex<Vec<u8>>) -> Option<()> {
    let mut stream = BufReader::new(stream);
    loop {
        let (mut line, mut length) = (String::new(), 0);
        stream.read_line(&mut line).ok().filter(|read| *read > 0)?;
        assert_eq!(line, "POST /v1/traces HTTP/1.1\r\n");
        while line != "\r\n" {
            line.clear();
            stream.read_line(&mut line).ok()?;
            if let Some(given) = line.to_lowercase().strip_prefix("content-length: ") {
                length = given.trim().parse().ok()?;
            }
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).ok()?;
        keep.lock().expect("no thread panicked").extend_from_slice(&body);
        stream.get_mut().write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n").ok()?;
    }
}

#[track_caller]
fn contains(taken: &[u8], wanted: &[u8]) -> bool {
    taken.windows(wanted.len()).any(|part| part == wanted)
}

/// An attribute with a small number, as protobuf writes it.
fn number(name: &str, value: u8) -> Vec<u8> {
    [name.as_bytes(), &[0x12, 2, 0x18, value]].concat()
}

#[track_caller]
fn status(reply: &Reply, expected: u16) {
    assert_eq!(reply.status, expected, "{reply:?}");
}

#[test]
fn requests_and_batches_are_traced_without_client_names_and_flushed_on_shutdown() {
    let collector = Collector::start();
    let mut served = Served::start(&["--otlp", &collector.url], Some(CONFIG));
    let body = format!(r#"{{"policy":"api","key":"{CLIENT}"}}"#);
    let parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let fields = [("traceparent", parent), ("x-request-id", CLIENT)];
    status(&ask(served.http(), "POST /v1/check", &fields, &body), 200);
    let list = format!(r#"{{"checks":[{body},{body},{body}]}}"#);
    status(&post(served.http(), "/v1/check", &list), 200);
    let client = [("x-client", CLIENT)];
    status(&ask(served.http(), "GET /v1/authorize/api", &client, ""), 429);
    status(&get(served.http(), &format!("/v1/admin/client?key={CLIENT}")), 200);
    status(&get(served.http(), &format!("/{CLIENT}")), 404);
    let mut resp =
        redis::Client::open(format!("redis://{}/", served.resp())).expect("the address is valid");
    let mut batch = redis::pipe();
    batch.cmd("TG.CHECK").arg(&["other", CLIENT]).cmd("CL.THROTTLE").arg(&[CLIENT, "1", "1", "60"]);
    batch.cmd("TG.CHECK").arg(&["other", CLIENT]);
    let _: Vec<redis::Value> = batch.query(&mut resp).expect("there are replies");
    assert_eq!(served.stop(), Some(0));

    let taken = collector.taken();
    for wanted in [
        "POST /v1/check",
        "GET /v1/authorize/{policy}",
        "GET /v1/admin/client",
        "resp batch",
        "tallygate.policies",
        "other",
        "CL.THROTTLE",
        "service.name",
    ] {
        assert!(contains(&taken, wanted.as_bytes()), "{wanted}");
    }
    // One alone, the list (one of three), the batch (two of three); and the rejected request.
    assert!(contains(&taken, &number("tallygate.allowed", 2)), "of the batch");
    assert!(contains(&taken, &number("tallygate.denied", 2)), "of the list");
    assert!(contains(&taken, &number("tallygate.denied", 0)), "of the first");
    let status = |code: u16| {
        let [high, low] =
            [code >> 7, code & 0x7f].map(|part| u8::try_from(part).expect("the byte is ASCII"));
        ["http.response.status_code".as_bytes(), &[0x12, 3, 0x18, low | 0x80, high]].concat()
    };
    for code in [200, 404, 429] {
        assert!(contains(&taken, &status(code)), "{code}");
    }
    let trace =
        u128::from_str_radix(&parent[3..35], 16).expect("the number is hexadecimal").to_be_bytes();
    assert!(contains(&taken, &trace), "the caller's trace goes on");
    assert!(!contains(&taken, CLIENT.as_bytes()), "no trace contains a client");
}

#[test]
fn the_collector_can_be_set_with_the_standard_variable() {
    let collector = Collector::start();
    let variable = [("OTEL_EXPORTER_OTLP_ENDPOINT", &*collector.url)];
    let mut served = Served::with_variables(&[], Some(CONFIG), &variable);
    status(&get(served.http(), "/livez"), 200);
    assert_eq!(served.stop(), Some(0));
    assert!(contains(&collector.taken(), b"GET /livez"));
}

#[test]
fn an_unavailable_collector_blocks_nothing() {
    let gone = TcpListener::bind("127.0.0.1:0")
        .expect("the address has a port")
        .local_addr()
        .expect("the address is valid");
    let mut served = Served::start(&["--otlp", &format!("http://{gone}")], Some(CONFIG));
    status(&post(served.http(), "/v1/check", r#"{"policy":"api","key":"a"}"#), 200);
    assert_eq!(served.stop(), Some(0));
    assert!(served.log().contains("cannot send traces; dropping them"), "{}", served.log());
}
