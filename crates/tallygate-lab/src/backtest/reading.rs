//! Lines into requests: one thread reads, unpacks and parses, another decides.
//!
//! Batches go from one to the other. A line that cannot be read is counted, and the first few are kept to be shown; an
//! input that ends in an error is cut short there, and the next one is read.

use std::hash::BuildHasher as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::SyncSender;

use foldhash::fast::RandomState;
use serde::Serialize;
use tallygate_core::Tick;

use super::format::{LineReader, Told, Unreadable, Wanted};
use super::input::Input;
use super::{BacktestError, Bounds};
use crate::replay::{Line, Lines, MAX_LINE};

/// Requests on their way, and what else was on the lines.
#[derive(Default)]
pub(super) struct Batch {
    /// All names, one after the other.
    names: Vec<u8>,
    requests: Vec<Found>,
    pub(super) lines: u64,
    pub(super) without_key: u64,
    pub(super) unreadable: u64,
    pub(super) shown: Vec<UnreadableLine>,
    pub(super) cut_short: Option<CutShort>,
}

struct Found {
    name_end: usize,
    hash: u64,
    now: Tick,
}

/// A line that cannot be read, and why.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct UnreadableLine {
    pub(crate) input: String,
    pub(crate) line: usize,
    pub(crate) reason: String,
    /// Its start.
    pub(crate) text: String,
}

/// An input that could not be read to its end.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CutShort {
    pub(crate) input: String,
    pub(crate) reason: String,
}

/// How an upload fails whose sender has gone: nobody wants to know what was in it.
pub const ABANDONED: io::ErrorKind = io::ErrorKind::ConnectionAborted;
/// The longest name of a client, as for the server.
const MAX_NAME: usize = 4096;
/// What a line counts at least to the bound of an upload: one without anything takes time, too.
const LEAST_LINE: u64 = 64;
/// How many lines that cannot be read are shown, and how much of each.
const SHOWN_LINES: usize = 5;
const SHOWN_BYTES: usize = 160;

impl Batch {
    /// The requests: each client's name with its hash, and the time.
    pub(super) fn requests(&self) -> impl Iterator<Item = (&[u8], u64, Tick)> {
        let mut start = 0;
        self.requests.iter().map(move |&Found { name_end, hash, now }| {
            let name = &self.names[start..name_end];
            start = name_end;
            (name, hash, now)
        })
    }
}

/// Reads all inputs, in order, until nobody wants any more.
pub(super) fn read(
    inputs: Vec<Input>,
    wanted: &Wanted,
    bounds: &Bounds,
    hasher: &RandomState,
    counted: &Arc<AtomicU64>,
    batches: &SyncSender<Batch>,
) -> Result<(), BacktestError> {
    let mut reader = LineReader::new(wanted)?;
    let (mut shown, mut unpacked) = (0, 0_u64);
    for input in inputs {
        let name = input.name.clone();
        let cut_short = |error: io::Error| Batch {
            cut_short: Some(CutShort { input: name.clone(), reason: error.to_string() }),
            ..Batch::default()
        };
        let mut lines = match input.open(counted.clone()) {
            Ok(source) => Lines::new(source),
            Err(error) => {
                if batches.send(cut_short(error)).is_err() {
                    return Ok(());
                }
                continue;
            }
        };
        reader.start_input();
        loop {
            let before = lines.read();
            let more = lines.read_more();
            unpacked += lines.read() - before;
            let mut here = lines.here();
            let mut batch = Batch::default();
            while let Some(line) = here.next() {
                let (line, told) = match line {
                    Line::Whole(line) => {
                        unpacked += LEAST_LINE.saturating_sub(line.len() as u64 + 1);
                        let line = line.strip_suffix(b"\r").unwrap_or(line);
                        if line.trim_ascii().is_empty() {
                            continue;
                        }
                        let start = batch.names.len();
                        let mut told = reader.read(line, &mut batch.names)?;
                        if batch.names.len() - start > MAX_NAME {
                            batch.names.truncate(start);
                            told = Err(Unreadable("a client's name of more than 4096 bytes"));
                        }
                        if let Ok(Told::Request(now)) = told {
                            let hash = hasher.hash_one(&batch.names[start..]);
                            let name_end = batch.names.len();
                            batch.requests.push(Found { name_end, hash, now });
                        }
                        (line, told.map_err(|unreadable| unreadable.0.to_owned()))
                    }
                    Line::TooLong => (&b""[..], Err(format!("more than {MAX_LINE} bytes"))),
                };
                batch.lines += 1;
                match told {
                    Ok(Told::Request(_)) => {}
                    Ok(Told::Nobody) => batch.without_key += 1,
                    Ok(Told::Header) => batch.lines -= 1,
                    Err(reason) => {
                        batch.unreadable += 1;
                        if shown < SHOWN_LINES {
                            shown += 1;
                            let start = &line[..line.len().min(SHOWN_BYTES)];
                            batch.shown.push(UnreadableLine {
                                input: name.clone(),
                                line: here.taken(),
                                reason,
                                text: String::from_utf8_lossy(start).into_owned(),
                            });
                        }
                    }
                }
            }
            let place = here.place();
            lines.take(place);
            if unpacked > bounds.unpacked_bytes {
                return Err(BacktestError::TooLarge {
                    what: "bytes, unpacked (each line counts as at least 64 bytes)",
                    most: bounds.unpacked_bytes,
                });
            }
            let goes_on = match more {
                Ok(goes_on) => goes_on,
                Err(error) if error.kind() == ABANDONED => return Err(BacktestError::Abandoned),
                Err(error) => {
                    batch.cut_short = cut_short(error).cut_short;
                    false
                }
            };
            if batches.send(batch).is_err() {
                return Ok(());
            }
            if !goes_on {
                break;
            }
        }
    }
    reader.end()
}
