//! Reads, decompresses and parses logs in one thread, and sends batches of requests to the thread that decides them.
//!
//! A line that cannot be parsed is counted, and the first few are kept for the report. If reading an input fails, the
//! report says so, and the next input is read.

use std::hash::BuildHasher as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::SyncSender;

use foldhash::fast::RandomState;
use serde::Serialize;
use tallygate_core::Tick;

use super::format::{LineReader, LogOptions, ParsedLine, Unreadable};
use super::input::Input;
use super::{BacktestError, Bounds};
use crate::replay::{Line, Lines, MAX_LINE};

/// The requests of some lines, and the counts of the other lines.
#[derive(Default)]
pub(super) struct ParsedBatch {
    /// All keys, concatenated.
    keys: Vec<u8>,
    requests: Vec<ParsedRequest>,
    pub(super) lines: u64,
    pub(super) without_key: u64,
    pub(super) filtered: u64,
    pub(super) unreadable: u64,
    pub(super) shown: Vec<UnreadableLine>,
    pub(super) cut_short: Option<PartialInput>,
}

struct ParsedRequest {
    key_end: usize,
    hash: u64,
    now: Tick,
}

/// A line that cannot be parsed, and the reason.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct UnreadableLine {
    pub(crate) input: String,
    pub(crate) line: usize,
    pub(crate) reason: String,
    /// The start of the line.
    pub(crate) text: String,
}

/// An input that was read only in part, and the reason.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct PartialInput {
    pub(crate) input: String,
    pub(crate) reason: String,
}

/// The kind of error with which the reader of an upload fails if the client closed the connection.
pub const UPLOAD_ABORTED: io::ErrorKind = io::ErrorKind::ConnectionAborted;
/// The longest key, as in the server.
const MAX_KEY_BYTES: usize = 4096;
/// What some programs write before the text of a file.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();
/// The same in UTF-16, which PowerShell and other programs of Windows write.
const UTF_16_MARKS: [[u8; 2]; 2] = [[0xff, 0xfe], [0xfe, 0xff]];
/// The least that a line counts towards the bound of an upload, because an empty line takes time, too.
const MIN_LINE_BYTES: u64 = 64;
/// The number of unparsable lines that the report shows, and the bytes of each.
const SHOWN_LINES: usize = 5;
const SHOWN_BYTES: usize = 160;

impl ParsedBatch {
    /// Returns the requests: the key, its hash and the time of each.
    pub(super) fn requests(&self) -> impl Iterator<Item = (&[u8], u64, Tick)> {
        let mut start = 0;
        self.requests.iter().map(move |&ParsedRequest { key_end, hash, now }| {
            let key = &self.keys[start..key_end];
            start = key_end;
            (key, hash, now)
        })
    }
}

/// Reads all inputs in order, until the receiver is gone.
pub(super) fn read(
    inputs: Vec<Input>,
    options: &LogOptions,
    bounds: &Bounds,
    hasher: &RandomState,
    bytes_read: &Arc<AtomicU64>,
    batches: &SyncSender<ParsedBatch>,
) -> Result<(), BacktestError> {
    let mut reader = LineReader::new(options)?;
    let (mut shown, mut unpacked) = (0, 0_u64);
    for input in inputs {
        let name = input.name.clone();
        let cut_short = |error: io::Error| ParsedBatch {
            cut_short: Some(PartialInput { input: name.clone(), reason: error.to_string() }),
            ..ParsedBatch::default()
        };
        let mut lines = match input.open(bytes_read.clone()) {
            Ok(source) => Lines::new(source),
            Err(error) => {
                if batches.send(cut_short(error)).is_err() {
                    return Ok(());
                }
                continue;
            }
        };
        reader.start_input();
        let mut is_utf_16 = false;
        loop {
            let before = lines.read();
            let more = lines.read_more();
            unpacked += lines.read() - before;
            let mut buffered = lines.buffered();
            let mut batch = ParsedBatch::default();
            while let Some(line) = buffered.next() {
                let (line, parsed) = match line {
                    Line::Whole(line) => {
                        unpacked += MIN_LINE_BYTES.saturating_sub(line.len() as u64 + 1);
                        let line = line.strip_suffix(b"\r").unwrap_or(line);
                        let line = match buffered.line_number() {
                            1 => line.strip_prefix(BYTE_ORDER_MARK).unwrap_or(line),
                            _ => line,
                        };
                        if line.trim_ascii().is_empty() {
                            continue;
                        }
                        let start = batch.keys.len();
                        // A log that was cut or not written completely has blocks of NUL bytes.
                        let mut parsed = if memchr::memchr(0, line).is_some() {
                            is_utf_16 |= buffered.line_number() == 1
                                && UTF_16_MARKS.iter().any(|mark| line.starts_with(mark));
                            Err(Unreadable(if is_utf_16 {
                                "the file is UTF-16; convert it to UTF-8"
                            } else {
                                "the line contains NUL bytes"
                            }))
                        } else {
                            reader.read(line, &mut batch.keys)?
                        };
                        if batch.keys.len() - start > MAX_KEY_BYTES {
                            batch.keys.truncate(start);
                            parsed = Err(Unreadable("the key is longer than 4096 bytes"));
                        }
                        if let Ok(ParsedLine::Request(now)) = parsed {
                            let hash = hasher.hash_one(&batch.keys[start..]);
                            let key_end = batch.keys.len();
                            batch.requests.push(ParsedRequest { key_end, hash, now });
                        }
                        (line, parsed.map_err(|unreadable| unreadable.0.to_owned()))
                    }
                    Line::TooLong => {
                        (&b""[..], Err(format!("the line is longer than {MAX_LINE} bytes")))
                    }
                };
                batch.lines += 1;
                match parsed {
                    Ok(ParsedLine::Request(_)) => {}
                    Ok(ParsedLine::NoKey) => batch.without_key += 1,
                    Ok(ParsedLine::Filtered) => batch.filtered += 1,
                    Ok(ParsedLine::Header) => batch.lines -= 1,
                    Err(reason) => {
                        batch.unreadable += 1;
                        if shown < SHOWN_LINES {
                            shown += 1;
                            // A block of NUL bytes does not help to find the line.
                            let nuls = line.iter().take_while(|byte| **byte == 0).count();
                            let start = &line[nuls..][..(line.len() - nuls).min(SHOWN_BYTES)];
                            batch.shown.push(UnreadableLine {
                                input: name.clone(),
                                line: buffered.line_number(),
                                reason,
                                text: String::from_utf8_lossy(start).into_owned(),
                            });
                        }
                    }
                }
            }
            let position = buffered.position();
            lines.advance_to(position);
            if unpacked > bounds.unpacked_bytes {
                return Err(BacktestError::LogTooLarge { max_bytes: bounds.unpacked_bytes });
            }
            let has_more = match more {
                Ok(has_more) => has_more,
                Err(error) if error.kind() == UPLOAD_ABORTED => {
                    return Err(BacktestError::UploadAborted);
                }
                Err(error) => {
                    batch.cut_short = cut_short(error).cut_short;
                    false
                }
            };
            if batches.send(batch).is_err() {
                return Ok(());
            }
            if !has_more {
                break;
            }
        }
    }
    reader.end()
}
