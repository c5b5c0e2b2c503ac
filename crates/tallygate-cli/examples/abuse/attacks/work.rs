//! Attacks with requests that cost the server much processor time or memory each.

use std::io::{Read as _, Write as _};
use std::sync::OnceLock;

use crate::attack::Attempt;
use crate::client::{http_rounds, open, resp_flood};

/// 2 connections that send 1000 requests at a time and read the replies as fast as they arrive.
pub(super) fn resp_commands(attempt: &Attempt) {
    let Some(mut stream) = open(attempt.server.resp) else { return };
    let (script, mut piece) = (b"TG.CHECK api attacker\r\n".repeat(1000), vec![0; 1 << 16]);
    while attempt.goes_on() && stream.write_all(&script).is_ok() {
        let mut lines = 0;
        while lines < 7 * 1000 {
            match stream.read(&mut piece) {
                Ok(read @ 1..) => lines += memchr::memchr_iter(b'\n', &piece[..read]).count(),
                _ => return,
            }
        }
    }
}

/// Expensive scenarios, one after another.
pub(super) fn simulations(attempt: &Attempt) {
    let body = r#"{"rate_per_minute":60000,"duration_ms":10000}"#;
    let length = body.len();
    let request = format!(
        "POST /v1/simulate HTTP/1.1\r\nhost: t\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    );
    while attempt.goes_on() {
        let Some(mut stream) = open(attempt.server.http) else { continue };
        let _ = stream.write_all(request.as_bytes());
        let mut piece = vec![0; 1 << 16];
        while matches!(stream.read(&mut piece), Ok(1..)) {}
    }
}

/// Returns a body of 10 000 checks.
fn body(attempt: &Attempt, field: &str) -> String {
    let place = attempt.place;
    let items: Vec<_> =
        (0..10_000).map(|key| format!(r#"{{"policy":"keys","key":"{place}-{key}"}}"#)).collect();
    format!(r#"{{"{field}":[{}]}}"#, items.join(","))
}

/// Lists with the most items.
pub(super) fn large_lists(attempt: &Attempt) {
    let body = body(attempt, "checks");
    http_rounds(attempt, "/v1/check", |_| &body);
}

/// `all` with as many items as fit into a body.
pub(super) fn large_alls(attempt: &Attempt) {
    let body = body(attempt, "all");
    http_rounds(attempt, "/v1/check", |_| &body);
}

/// `all` with as many items as are accepted, with long keys.
pub(super) fn accepted_alls(attempt: &Attempt) {
    http_rounds(attempt, "/v1/check", |round| {
        let place = attempt.place;
        let items: Vec<_> = (0..64)
            .map(|key| format!(r#"{{"policy":"keys","key":"{place}-{round}-{key:x<4000}"}}"#))
            .collect();
        format!(r#"{{"all":[{}]}}"#, items.join(","))
    });
}

/// `all` and lists over Redis.
pub(super) fn over_redis(attempt: &Attempt) {
    match attempt.place {
        0 => large_alls(attempt),
        1 => accepted_alls(attempt),
        _ => large_lists(attempt),
    }
}

/// Unknown names of policies beside a hundred known ones. The short names are similar to known names.
pub(super) fn unknown_names(attempt: &Attempt) {
    resp_flood(attempt, |round| match round % 2 {
        0 => format!("TG.CHECK policy-number-x{} k\r\n", round % 1_000),
        _ => format!("TG.CHECK {}{round} k\r\n", "policy-number".repeat(18)),
    });
}

/// Uploads archives for a backtest that are small only while they are compressed.
pub(super) fn archives(attempt: &Attempt) {
    let packed = match attempt.place {
        0 | 1 => many_clients(),
        _ => blank_lines(),
    };
    let path = "/v1/backtest?policy=gcra+1/s&policy=sliding_window_log+1000/1h";
    http_rounds(attempt, path, |_| packed);
}

/// Returns a compressed log of two million clients, which is made once.
fn many_clients() -> &'static [u8] {
    static PACKED: OnceLock<Vec<u8>> = OnceLock::new();
    PACKED.get_or_init(|| {
        packed((0..2_000_000_u32).map(|client| {
            let [_, b, c, d] = client.to_be_bytes();
            format!("10.{b}.{c}.{d} - - [16/Nov/2026:06:00:00 +0000] \"GET / HTTP/1.1\" 200 1\n")
        }))
    })
}

/// Returns 256 MiB of line breaks, compressed to a thousandth of that.
fn blank_lines() -> &'static [u8] {
    static PACKED: OnceLock<Vec<u8>> = OnceLock::new();
    PACKED.get_or_init(|| packed((0..256).map(|_| "\n".repeat(1 << 20))))
}

fn packed(parts: impl Iterator<Item = String>) -> Vec<u8> {
    let mut packed = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    for part in parts {
        // Writing to memory does not fail.
        let _ = packed.write_all(part.as_bytes());
    }
    packed.finish().unwrap_or_default()
}
