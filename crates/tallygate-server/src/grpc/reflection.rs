//! `grpc.reflection`: lists the services for tools such as grpcurl, in both versions of the protocol.

use std::collections::{BTreeSet, HashMap};
use std::sync::OnceLock;
use std::time::Duration;

use bytes::BytesMut;
use hyper::body::Incoming;
use tokio::sync::mpsc;

use super::call::{self, PREFIX_BYTES};
use super::schema::{FILES, SERVICES};
use crate::envoy::wire::{self, Fields, WireError};
use crate::http::{Caller, Reply, next_data};

/// How long a client may take to ask the next question.
const IDLE: Duration = Duration::from_secs(30);
/// The longest question, in bytes.
const MAX_QUESTION_BYTES: usize = 1024;
const NOT_FOUND: u64 = 5;
const UNIMPLEMENTED: u64 = 12;

/// Answers the questions of a stream one by one.
pub(super) fn reply(caller: &Caller, body: Incoming) -> Reply {
    let (send, messages) = mpsc::channel(1);
    let mut stop = caller.stop.clone();
    tokio::spawn(async move {
        tokio::select! {
            () = answer_all(body, &send) => {}
            _ = stop.wait_for(|stop| *stop) => {}
            () = send.closed() => {}
        }
    });
    call::stream_reply(messages)
}

/// Answers until the client ends the stream, is idle, or sends something else than questions.
async fn answer_all(mut body: Incoming, send: &mpsc::Sender<bytes::Bytes>) {
    let mut received = BytesMut::new();
    loop {
        while let Some(length) = complete(&received) {
            if length > MAX_QUESTION_BYTES {
                return;
            }
            let question = received.split_to(PREFIX_BYTES + length);
            let Ok(answer) = answer(&question[PREFIX_BYTES..]) else { return };
            if send.send(call::framed(&answer)).await.is_err() {
                return;
            }
        }
        match tokio::time::timeout(IDLE, next_data(&mut body)).await {
            Ok(Ok(Some(data))) if received.len() + data.len() <= 8 * MAX_QUESTION_BYTES => {
                received.extend_from_slice(&data);
            }
            _ => return,
        }
    }
}

/// Returns the length of the first message if it is complete, or if it is too long.
fn complete(received: &[u8]) -> Option<usize> {
    let length = call::prefixed_length(received.get(..PREFIX_BYTES)?).unwrap_or(usize::MAX);
    (length > MAX_QUESTION_BYTES || received.len() >= PREFIX_BYTES + length).then_some(length)
}

/// Answers a `ServerReflectionRequest` with a `ServerReflectionResponse`.
fn answer(question: &[u8]) -> Result<Vec<u8>, WireError> {
    let mut out = Vec::new();
    wire::bytes(&mut out, 2, question);
    let mut fields = Fields::of(question);
    while let Some((field, value)) = fields.next()? {
        match field {
            3 => files_reply(&mut out, file_named(value.text(field)?)),
            4 => files_reply(&mut out, symbols().get(value.text(field)?).copied()),
            5 => error_reply(&mut out, NOT_FOUND, "no message has extensions"),
            6 => error_reply(&mut out, UNIMPLEMENTED, "no message has extensions"),
            7 => wire::message(&mut out, 6, |out| {
                for service in SERVICES {
                    wire::message(out, 1, |out| wire::text(out, 1, service));
                }
            }),
            _ => {}
        }
    }
    Ok(out)
}

fn file_named(name: &str) -> Option<usize> {
    FILES.iter().position(|file| file.name == name)
}

/// Writes a file and the files that it depends on.
fn files_reply(out: &mut Vec<u8>, file: Option<usize>) {
    let Some(file) = file else { return error_reply(out, NOT_FOUND, "not found") };
    let (mut wanted, mut files) = (vec![file], BTreeSet::new());
    while let Some(file) = wanted.pop() {
        if files.insert(file) {
            wanted.extend(FILES[file].depends.iter().filter_map(|name| file_named(name)));
        }
    }
    // The file itself comes first.
    let others = files.into_iter().filter(|other| *other != file);
    wire::message(out, 4, |out| {
        for file in std::iter::once(file).chain(others) {
            wire::bytes(out, 1, &FILES[file].encode());
        }
    });
}

fn error_reply(out: &mut Vec<u8>, code: u64, detail: &str) {
    wire::message(out, 7, |out| {
        wire::number(out, 1, code);
        wire::text(out, 2, detail);
    });
}

/// Returns the file of every symbol.
fn symbols() -> &'static HashMap<String, usize> {
    static SYMBOLS: OnceLock<HashMap<String, usize>> = OnceLock::new();
    SYMBOLS.get_or_init(|| {
        let files = FILES.iter().enumerate();
        files
            .flat_map(|(at, file)| file.symbols().into_iter().map(move |name| (name, at)))
            .collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(question: &[u8]) -> usize {
        let answer = answer(question).unwrap();
        let mut fields = Fields::of(&answer);
        let mut count = 0;
        while let Some((field, value)) = fields.next().unwrap() {
            if field == 4 {
                let mut files = Fields::of(value.bytes(4).unwrap());
                while files.next().unwrap().is_some() {
                    count += 1;
                }
            }
        }
        count
    }

    #[test]
    fn every_service_message_and_dependency_is_found() {
        for service in SERVICES {
            assert!(symbols().contains_key(*service), "{service}");
        }
        for name in [
            "envoy.service.ratelimit.v3.RateLimitService.ShouldRateLimit",
            "envoy.service.ratelimit.v3.RateLimitResponse.RateLimit.Unit",
            "envoy.extensions.common.ratelimit.v3.RateLimitDescriptor.Entry",
            "google.protobuf.UInt64Value",
        ] {
            assert!(symbols().contains_key(name), "{name}");
        }
        for file in FILES {
            for name in file.depends {
                assert!(file_named(name).is_some(), "{} depends on {name}", file.name);
            }
            // Types of fields are names of symbols, with a dot before them.
            for name in file.types() {
                let name = name.strip_prefix('.').expect("a full name");
                assert!(symbols().contains_key(name), "{} uses {name}", file.name);
            }
        }
        let mut question = Vec::new();
        wire::text(&mut question, 4, "envoy.service.ratelimit.v3.RateLimitService");
        assert_eq!(files(&question), 7);
        let mut unknown = Vec::new();
        wire::text(&mut unknown, 4, "envoy.Unknown");
        assert_eq!(files(&unknown), 0);
    }

    #[test]
    fn a_question_is_complete_with_its_last_byte() {
        assert_eq!(complete(&[0, 0, 0, 0]), None);
        assert_eq!(complete(&[0, 0, 0, 0, 2, 1]), None);
        assert_eq!(complete(&[0, 0, 0, 0, 2, 1, 1]), Some(2));
        assert!(complete(&[0, 1, 0, 0, 0]).is_some_and(|length| length > MAX_QUESTION_BYTES));
    }
}
