//! Requests that were read once and will be decided again: a few bytes each, in a temporary file without a name.
//!
//! So standard input and uploads can be decided under one limit after the other as files can, and memory stays with
//! the clients. The file is gone when the process is.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek as _, Write as _};
use std::ops::ControlFlow;

use tallygate_core::Tick;

/// Requests being put away.
pub(super) struct Spool {
    file: BufWriter<File>,
    last: Tick,
}

/// Requests to be read as often as one likes.
pub(super) struct Kept {
    file: File,
    buffer: Vec<u8>,
}

/// How much is read and written at a time.
const CHUNK: usize = 256 * 1024;
/// The most that a request takes: two numbers of 64 bits, seven bits a byte.
const MAX_REQUEST_BYTES: usize = 20;

impl Spool {
    pub(super) fn new() -> io::Result<Self> {
        let file = BufWriter::with_capacity(CHUNK, tempfile::tempfile()?);
        Ok(Self { file, last: Tick(0) })
    }

    /// Puts a request away: the time since the one before it, and the client.
    pub(super) fn put(&mut self, client: usize, now: Tick) -> io::Result<()> {
        let since = now.0.wrapping_sub(self.last.0);
        self.last = now;
        let mut bytes = [0; MAX_REQUEST_BYTES];
        // Small steps back are small numbers, too.
        let length =
            put(&mut bytes, 0, (since.cast_unsigned() << 1) ^ (since >> 63).cast_unsigned());
        let length = put(&mut bytes, length, client as u64);
        self.file.write_all(&bytes[..length])
    }

    pub(super) fn keep(self) -> io::Result<Kept> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(Kept { file, buffer: vec![0; CHUNK] })
    }
}

impl Kept {
    /// All requests in order, until it has seen enough.
    pub(super) fn each(
        &mut self,
        mut request: impl FnMut(usize, Tick) -> ControlFlow<()>,
    ) -> io::Result<()> {
        self.file.rewind()?;
        let (mut start, mut end, mut ended) = (0, 0, false);
        let mut now = 0_i64;
        loop {
            if !ended && end - start < MAX_REQUEST_BYTES {
                self.buffer.copy_within(start..end, 0);
                (start, end) = (0, end - start);
                let read = self.file.read(&mut self.buffer[end..])?;
                (end, ended) = (end + read, read == 0);
                continue;
            }
            if start == end {
                return Ok(());
            }
            let here = &self.buffer[..end];
            let (since, after) = take(here, start).ok_or(io::ErrorKind::UnexpectedEof)?;
            let (client, after) = take(here, after).ok_or(io::ErrorKind::UnexpectedEof)?;
            start = after;
            now = now.wrapping_add((since >> 1).cast_signed() ^ -(since & 1).cast_signed());
            let client = usize::try_from(client).map_err(io::Error::other)?;
            if request(client, Tick(now)).is_break() {
                return Ok(());
            }
        }
    }
}

fn put(bytes: &mut [u8; MAX_REQUEST_BYTES], mut place: usize, mut number: u64) -> usize {
    loop {
        let low = number.to_le_bytes()[0] & 0x7f;
        number >>= 7;
        bytes[place] = if number == 0 { low } else { low | 0x80 };
        place += 1;
        if number == 0 {
            return place;
        }
    }
}

#[inline]
fn take(bytes: &[u8], mut place: usize) -> Option<(u64, usize)> {
    let (mut number, mut shift) = (0_u64, 0_u32);
    loop {
        let byte = *bytes.get(place)?;
        place += 1;
        number |= u64::from(byte & 0x7f).checked_shl(shift)?;
        shift += 7;
        if byte < 0x80 {
            return Some((number, place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_put_away_comes_back_as_often_as_one_likes() {
        let mut requests: Vec<(usize, Tick)> = (0..100_000)
            .zip(0..)
            .map(|(n, now)| (n * 7 % 1000, Tick(now * 1_000_007 % 97)))
            .collect();
        requests.extend([(usize::MAX, Tick(i64::MAX)), (0, Tick(i64::MIN)), (1, Tick(-1))]);
        let mut spool = Spool::new().expect("a file");
        for (client, now) in &requests {
            spool.put(*client, *now).expect("room");
        }
        let mut kept = spool.keep().expect("a file");
        for _ in 0..2 {
            let mut read = Vec::new();
            let all = kept.each(|client, now| {
                read.push((client, now));
                ControlFlow::Continue(())
            });
            all.expect("they are there");
            assert!(read == requests);
        }
        let mut count = 0;
        let few = kept.each(|_, _| {
            count += 1;
            if count < 10 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        few.expect("they are there");
        assert_eq!(count, 10);
    }
}
