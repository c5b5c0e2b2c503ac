//! Attacks on the gRPC listener: memory stays bounded, the hostile connection is closed, and others are served.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;

use tallygate_testkit::http2::{
    self, END_HEADERS, END_STREAM, INITIAL_WINDOW_SIZE, Method, frame, kind,
};
use tallygate_testkit::servers::wait_until;

use crate::common::Served;
use crate::grpc_client::{GrpcClient, RateLimit, framed};
use crate::http_client::get;
use crate::service::{PATIENCE, RULES, Rules, serve};

const PATH: &str = "/grpc.health.v1.Health/Check";

fn connect(served: &Served, settings: &[(u16, u32)]) -> TcpStream {
    let mut stream = TcpStream::connect(served.grpc()).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream.set_write_timeout(Some(PATIENCE)).unwrap();
    stream.write_all(&http2::hello(settings)).unwrap();
    stream
}

/// Other clients are served.
#[track_caller]
fn check_service(served: &Served) {
    let request = RateLimit::of("web", &[&[("user", "another-user")]]);
    assert_eq!(GrpcClient::connect(served.grpc()).ask(&request).unwrap().code, 1);
}

/// Fault E4.
#[test]
fn a_client_that_resets_its_calls_rapidly_is_disconnected() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let before = served.resident_kib();
    let mut stream = connect(&served, &[]);
    let fields = http2::fields(Method::Post, PATH);
    let mut pairs = 0_u32;
    while pairs < 200_000 {
        let mut batch = Vec::new();
        for _ in 0..500 {
            let id = 2 * pairs + 1;
            batch.extend(frame(kind::HEADERS, END_HEADERS, id, &fields));
            batch.extend(http2::reset(id));
            pairs += 1;
        }
        if stream.write_all(&batch).is_err() {
            break;
        }
    }
    assert!(pairs < 200_000, "the server accepted all of them");
    let grown = served.resident_kib().saturating_sub(before);
    assert!(grown < 16 << 10, "{grown} KiB for one client");
    check_service(&served);
}

/// Fault E5.
#[test]
fn an_endless_head_of_a_call_ends_the_connection() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let before = served.resident_kib();
    let field = [&[0x40, 1, b'x', 126][..], &[b'y'; 126]].concat();
    for piece in [field.repeat(120), b"\x86".to_vec(), Vec::new()] {
        let mut stream = connect(&served, &[]);
        let block = http2::fields(Method::Post, PATH);
        stream.write_all(&frame(kind::HEADERS, END_STREAM, 1, &block)).unwrap();
        let more = frame(kind::CONTINUATION, 0, 1, &piece);
        let (mut sent, most) = (0, 100_000 * more.len().min(200));
        while sent < most && stream.write_all(&more).is_ok() {
            sent += more.len();
        }
        assert!(sent < most, "all {sent} bytes were accepted, {} per frame", more.len());
        let grown = served.resident_kib().saturating_sub(before);
        assert!(grown < 8 << 10, "{grown} KiB for one client");
    }
    check_service(&served);
}

/// Fault E6.
#[test]
fn a_header_bomb_in_a_call_is_not_decompressed() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], None);
    let before = served.peak_kib();
    let mut stream = connect(&served, &[]);
    for id in 0..10 {
        let bomb = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * id + 1, &http2::bomb());
        if stream.write_all(&bomb).is_err() {
            break;
        }
    }
    // The server rejects each head without a body, or ends the connection. It answers the valid request after them.
    let _ = stream.write_all(&http2::request(101, "/livez", None));
    let mut answered = Vec::new();
    let mut head = [0; 9];
    while !answered.contains(&101) && stream.read_exact(&mut head).is_ok() {
        let [_, _, _, kind, _, stream_id @ ..] = head;
        if kind == kind::DATA {
            answered.push(u32::from_be_bytes(stream_id));
        }
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        if std::io::copy(&mut (&stream).take(length.into()), &mut std::io::sink()).is_err() {
            break;
        }
    }
    assert!(answered.iter().all(|id| *id == 101), "the heads of {answered:?} were accepted");
    let grown = served.peak_kib().saturating_sub(before);
    assert!(grown < 8 << 10, "{grown} KiB for one client");
    check_service(&served);
}

/// Fault E6.
#[test]
fn a_call_without_a_window_ends_the_connection() {
    let rules = Rules::new(RULES);
    let served = serve(&rules, &[], Some("[limits]\nwrite_timeout = \"200ms\"\n"));
    let mut stream = connect(&served, &[(INITIAL_WINDOW_SIZE, 0)]);
    // The content type of gRPC, as a literal field without an index.
    let mut fields = http2::fields(Method::Post, PATH);
    for text in ["content-type", "application/grpc"] {
        if text == "content-type" {
            fields.push(0);
        }
        fields.push(u8::try_from(text.len()).unwrap());
        fields.extend_from_slice(text.as_bytes());
    }
    stream.write_all(&frame(kind::HEADERS, END_HEADERS, 1, &fields)).unwrap();
    stream.write_all(&frame(kind::DATA, END_STREAM, 1, &framed(&[]))).unwrap();
    wait_until("the connection ends", PATIENCE, || {
        get(served.http(), "/metrics").body.contains("tallygate_connections_aborted_total 1")
    });
    check_service(&served);
}
