//! Stores requests in a temporary file, a few bytes each, so that they can be decided several times.
//!
//! Standard input and uploads can be read only once, and memory must not grow with requests. The file has no name, so the
//! operating system removes it when the process ends.

use std::fs::File;
use std::io::{self, BufWriter, Read as _, Seek as _, Write as _};
use std::ops::ControlFlow;

use tallygate_core::Tick;

/// A temporary file to which requests are written.
pub(super) struct Spool {
    file: BufWriter<File>,
    last: Tick,
}

/// A temporary file of requests, which can be read any number of times.
pub(super) struct SpooledRequests {
    file: File,
    buffer: Vec<u8>,
}

/// The size of the read and write buffers, in bytes.
const CHUNK: usize = 256 * 1024;
/// The most bytes of a request: two 64-bit numbers, seven bits per byte.
const MAX_REQUEST_BYTES: usize = 20;

impl Spool {
    pub(super) fn new() -> io::Result<Self> {
        let file = BufWriter::with_capacity(CHUNK, tempfile::tempfile()?);
        Ok(Self { file, last: Tick(0) })
    }

    /// Writes a request: the time since the previous one, and the client.
    pub(super) fn push(&mut self, client: usize, now: Tick) -> io::Result<()> {
        let since = now.0.wrapping_sub(self.last.0);
        self.last = now;
        let mut bytes = [0; MAX_REQUEST_BYTES];
        // Zigzag encoding: small steps back in time are small numbers, too.
        let length = write_varint(
            &mut bytes,
            0,
            (since.cast_unsigned() << 1) ^ (since >> 63).cast_unsigned(),
        );
        let length = write_varint(&mut bytes, length, client as u64);
        self.file.write_all(&bytes[..length])
    }

    pub(super) fn finish(self) -> io::Result<SpooledRequests> {
        let file = self.file.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(SpooledRequests { file, buffer: vec![0; CHUNK] })
    }
}

impl SpooledRequests {
    /// Calls `request` for all requests in order, until it returns `Break`.
    pub(super) fn for_each(
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
            let bytes = &self.buffer[..end];
            let (since, after) = read_varint(bytes, start).ok_or(io::ErrorKind::UnexpectedEof)?;
            let (client, after) = read_varint(bytes, after).ok_or(io::ErrorKind::UnexpectedEof)?;
            start = after;
            now = now.wrapping_add((since >> 1).cast_signed() ^ -(since & 1).cast_signed());
            let client = usize::try_from(client).map_err(io::Error::other)?;
            if request(client, Tick(now)).is_break() {
                return Ok(());
            }
        }
    }
}

fn write_varint(bytes: &mut [u8; MAX_REQUEST_BYTES], mut place: usize, mut number: u64) -> usize {
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
fn read_varint(bytes: &[u8], mut place: usize) -> Option<(u64, usize)> {
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
    fn written_requests_can_be_read_several_times() {
        let mut requests: Vec<(usize, Tick)> = (0..100_000)
            .zip(0..)
            .map(|(n, now)| (n * 7 % 1000, Tick(now * 1_000_007 % 97)))
            .collect();
        requests.extend([(usize::MAX, Tick(i64::MAX)), (0, Tick(i64::MIN)), (1, Tick(-1))]);
        let mut spool = Spool::new().expect("the file is created");
        for (client, now) in &requests {
            spool.push(*client, *now).expect("the request is written");
        }
        let mut spooled = spool.finish().expect("the file is written");
        for _ in 0..2 {
            let mut read = Vec::new();
            let all = spooled.for_each(|client, now| {
                read.push((client, now));
                ControlFlow::Continue(())
            });
            all.expect("the file is readable");
            assert!(read == requests);
        }
        let mut count = 0;
        let few = spooled.for_each(|_, _| {
            count += 1;
            if count < 10 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
        });
        few.expect("the file is readable");
        assert_eq!(count, 10);
    }
}
