//! Fuzz target for RESP: bytes in any pieces give the same commands and the same replies.

#![allow(clippy::missing_panics_doc, reason = "a fuzzer looks for failed assertions")]

use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::watch;

use super::connection;
use super::parse::{MAX_ARGUMENT, MAX_ARGUMENTS, Parsed, Parser, ProtocolError};
use crate::config::Config;
use crate::peer::Peer;
use crate::shared::Shared;

/// Checks that the replies to commands do not depend on how the bytes are split. The first four bytes define the split.
pub fn resp(input: &[u8]) {
    let Some((lengths, bytes)) = input.split_first_chunk::<4>() else { return };
    let pieces = cut(bytes, lengths);
    let whole = parsed(&[bytes]);
    assert_eq!(whole, parsed(&pieces), "the commands of {lengths:?}");
    let (one, other) = (replies_of_new_server(&[bytes]), replies_of_new_server(&pieces));
    if is_timeless(&whole) {
        assert_eq!(one, other, "the replies to {lengths:?}");
    } else {
        assert_eq!(without_numbers(&one), without_numbers(&other), "the replies to {lengths:?}");
    }
}

/// Splits bytes into pieces of these lengths plus one, repeatedly.
fn cut<'a>(mut bytes: &'a [u8], lengths: &[u8]) -> Vec<&'a [u8]> {
    let mut pieces = Vec::new();
    for &length in lengths.iter().cycle() {
        let (piece, rest) = bytes.split_at(bytes.len().min(usize::from(length) + 1));
        pieces.push(piece);
        bytes = rest;
        if bytes.is_empty() {
            break;
        }
    }
    pieces
}

#[derive(Debug, PartialEq, Eq)]
enum ParsedItem {
    Command(Vec<Vec<u8>>),
    Wrong(ProtocolError),
}

/// Returns the commands that a connection would parse from these reads.
fn parsed(pieces: &[&[u8]]) -> Vec<ParsedItem> {
    let (mut parser, mut input, mut seen) = (Parser::default(), Vec::new(), Vec::new());
    for piece in pieces {
        input.extend_from_slice(piece);
        loop {
            parser.look_ahead(&input, |_| {});
            let (used, parsed) = parser.next(&input);
            match parsed {
                Parsed::Command(words) => {
                    let words: Vec<_> = words.from(0).map(<[u8]>::to_vec).collect();
                    assert!((1..=MAX_ARGUMENTS).contains(&words.len()));
                    assert!(words.iter().all(|word| word.len() <= MAX_ARGUMENT));
                    assert!(used > 0, "a command has bytes");
                    seen.push(ParsedItem::Command(words));
                }
                Parsed::Nothing => assert!(used > 0, "nothing has bytes, too"),
                Parsed::Incomplete => {
                    input.drain(..used);
                    break;
                }
                Parsed::Wrong(error) => {
                    seen.push(ParsedItem::Wrong(error));
                    if error.closes() {
                        return seen;
                    }
                    assert!(used > 0, "{error} is gone past");
                }
            }
            input.drain(..used);
        }
    }
    seen
}

/// Returns whether the replies do not depend on the time or the id of the connection.
fn is_timeless(seen: &[ParsedItem]) -> bool {
    seen.iter().all(|seen| match seen {
        ParsedItem::Command(words) => {
            [&b"PING"[..], b"ECHO", b"SELECT", b"COMMAND", b"CONFIG", b"QUIT"]
                .iter()
                .any(|name| words[0].eq_ignore_ascii_case(name))
        }
        ParsedItem::Wrong(_) => true,
    })
}

fn without_numbers(replies: &[u8]) -> Vec<u8> {
    let mut kept: Vec<_> =
        replies.iter().map(|byte| if byte.is_ascii_digit() { b'0' } else { *byte }).collect();
    kept.dedup_by(|next, last| *next == b'0' && *last == b'0');
    kept
}

/// Returns the replies of a new server to these reads.
fn replies_of_new_server(pieces: &[&[u8]]) -> Vec<u8> {
    replies(&Arc::new(crate::fuzzing::shared(&Config::demo())), pieces)
}

/// Returns the replies of a server to these reads, until the client closes the connection.
pub(crate) fn replies(shared: &Arc<Shared>, pieces: &[&[u8]]) -> Vec<u8> {
    /// Enough for all replies: the client only reads at the end.
    const ROOM: usize = 1 << 30;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(async {
        let (mut client, server) = tokio::io::duplex(ROOM);
        let (_stop, stopped) = watch::channel(false);
        let peer = Peer { address: None, is_same_user: true };
        let serving = connection::serve(shared.clone(), Box::new(server), peer, stopped);
        let mut serving = pin!(serving);
        let mut is_over = false;
        for piece in pieces {
            // The server may have closed the connection.
            if is_over || client.write_all(piece).await.is_err() {
                break;
            }
            is_over = std::future::poll_fn(|context| {
                Poll::Ready(serving.as_mut().poll(context).is_ready())
            })
            .await;
            tokio::task::yield_now().await;
        }
        let _ = client.shutdown().await;
        let mut replies = Vec::new();
        let reading = client.read_to_end(&mut replies);
        let read = if is_over { reading.await } else { future::join(serving, reading).await.1 };
        read.expect("memory");
        replies
    })
}
