//! Attacks with connections: requests that never end, replies that are not read, connections without number.

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use crate::attack::Attempt;
use crate::client::{fill, keep_open, open};

/// 900 connections with a part of a head each.
pub(super) fn half_open(attempt: &Attempt) {
    hold_heads(attempt, 900, 0);
}

/// Connections with a part of a head of this many bytes.
pub(super) fn hold_heads(attempt: &Attempt, connections: usize, bytes: usize) {
    let head = format!("GET /livez HTTP/1.1\r\nhost: t\r\nx: {}", "x".repeat(bytes));
    keep_open(attempt, attempt.server.http, connections, |stream| {
        let _ = stream.write_all(head.as_bytes());
    });
}

/// 500 requests whose bodies arrive one byte per second.
pub(super) fn slow_bodies(attempt: &Attempt) {
    let mut streams: Vec<Option<TcpStream>> = (0..500).map(|_| None).collect();
    while attempt.goes_on() {
        for place in &mut streams {
            let is_lost = place.as_mut().is_none_or(|stream| stream.write_all(b" ").is_err());
            if is_lost {
                *place = open(attempt.server.http);
                if let Some(stream) = place {
                    let head =
                        b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n";
                    let _ = stream.write_all(head);
                }
            }
        }
        attempt.rest(Duration::from_secs(1));
    }
}

/// Endless bodies, 25 MB per second each.
pub(super) fn endless_bodies(attempt: &Attempt) {
    let chunk = [b"40000\r\n".as_slice(), &[b' '; 0x4_0000], b"\r\n"].concat();
    while attempt.goes_on() {
        let Some(mut stream) = open(attempt.server.http) else { continue };
        let head = b"POST /v1/check HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n";
        let _ = stream.write_all(head);
        while attempt.goes_on() && stream.write_all(&chunk).is_ok() {
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// 500 incomplete bodies of nearly a megabyte.
pub(super) fn unfinished_bodies(attempt: &Attempt) {
    hold_bodies(attempt, 500);
}

/// Connections with incomplete bodies of nearly a megabyte.
pub(super) fn hold_bodies(attempt: &Attempt, connections: usize) {
    let body = vec![b' '; (1 << 20) - 1];
    keep_open(attempt, attempt.server.http, connections, |stream| {
        let head = b"POST /v1/check HTTP/1.1\r\nhost: t\r\ncontent-length: 1048576\r\n\r\n";
        let _ = stream.write_all(head).and_then(|()| stream.write_all(&body));
    });
}

/// 20 connections that request a large reply repeatedly and read none.
pub(super) fn http_pipelines(attempt: &Attempt) {
    keep_open(attempt, attempt.server.http, 20, |stream| {
        fill(stream, b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n");
    });
}

/// 20 connections that send requests repeatedly and read no reply.
pub(super) fn resp_pipelines(attempt: &Attempt) {
    keep_open(attempt, attempt.server.resp, 20, |stream| {
        fill(stream, b"TG.CHECK api attacker\r\n");
    });
}

/// 900 connections that send lines of many words, and then nothing.
pub(super) fn resp_words(attempt: &Attempt) {
    hold_lines(attempt, 900);
}

/// Connections that send a line of many words, and then nothing.
pub(super) fn hold_lines(attempt: &Attempt, connections: usize) {
    let line = format!("{}\r\n", "a ".repeat(32_000));
    keep_open(attempt, attempt.server.resp, connections, |stream| {
        let _ = stream.write_all(line.as_bytes());
    });
}

/// As many connections as possible, at most 1000 per second and thread; half of them for HTTP.
pub(super) fn connections(attempt: &Attempt) {
    let to = [attempt.server.http, attempt.server.resp][attempt.place % 2];
    let mut kept = Vec::new();
    while attempt.goes_on() {
        if let Some(mut stream) = open(to) {
            let _ = stream.write_all(b"PING\r\n");
            let _ = stream.set_read_timeout(Some(Duration::from_millis(1)));
            // Accepted connections stay open.
            if !matches!(stream.read(&mut [0; 7]), Ok(0)) && kept.len() < 5_000 {
                kept.push(stream);
            }
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The server can open no descriptors for 8 s while 50 connections wait to be accepted.
pub(super) fn no_descriptors(attempt: &Attempt) {
    let set = |most: &str| {
        let pid = attempt.server.pid().to_string();
        let _ =
            Command::new("prlimit").args(["--pid", &pid, &format!("--nofile={most}:")]).status();
    };
    set("3");
    let waiting: Vec<_> = (0..50).map(|_| open(attempt.server.http)).collect();
    attempt.rest(Duration::from_secs(8));
    set("10000");
    drop(waiting);
}

/// 3000 connections without a token, half of which send the longest lines that are accepted without one, and half the
/// longest that are accepted with one.
pub(super) fn unauthenticated(attempt: &Attempt) {
    let accepted = format!("{}\r\n", "a ".repeat(1_900)).repeat(4) + &"x".repeat(3_000);
    let line = match attempt.place % 2 {
        0 => accepted,
        _ => format!("{}\r\n", "a ".repeat(32_000)),
    };
    keep_open(attempt, attempt.server.resp, 1_500, |stream| {
        let _ = stream.write_all(line.as_bytes());
    });
}
