//! Lines of an input that is read in chunks, each with its number.

use std::io::{self, Read};

/// How much is read at a time.
const CHUNK: usize = 256 * 1024;

/// The longest line: far more than any instruction needs, far less than any memory.
const MAX_LINE: usize = 64 * 1024;

/// An input, and what of it has been read and not yet taken.
pub(super) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    end: usize,
    ended: bool,
    place: Place,
}

/// How far an input has been taken: in its buffer, and in lines from its start.
#[derive(Clone, Copy)]
pub(super) struct Place {
    start: usize,
    lines: usize,
}

/// The whole lines of an input that are here without waiting.
pub(super) struct Here<'a> {
    buffer: &'a [u8],
    ended: bool,
    place: Place,
}

impl<R: Read> Lines<R> {
    pub(super) fn new(input: R) -> Self {
        let place = Place { start: 0, lines: 0 };
        Self { input, buffer: vec![0; CHUNK], end: 0, ended: false, place }
    }

    /// How many lines have been taken.
    pub(super) const fn taken(&self) -> usize {
        self.place.lines
    }

    /// The line taken last, as messages name it.
    pub(super) fn place(&self) -> String {
        format!("line {}", self.place.lines)
    }

    /// The lines that are here. What has been seen of them is to be [taken](Self::take).
    pub(super) fn here(&self) -> Here<'_> {
        Here { buffer: &self.buffer[..self.end], ended: self.ended, place: self.place }
    }

    /// Takes all lines up to a place.
    pub(super) const fn take(&mut self, place: Place) {
        self.place = place;
    }

    /// Waits for more input; false if there is none.
    pub(super) fn read_more(&mut self) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        // What is left is the start of one line, and so less than the buffer: longer ones are refused.
        self.buffer.copy_within(self.place.start..self.end, 0);
        self.end -= self.place.start;
        self.place.start = 0;
        loop {
            match self.input.read(&mut self.buffer[self.end..]) {
                Ok(read) => {
                    self.end += read;
                    self.ended = read == 0;
                    return Ok(self.end > 0);
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}

impl<'a> Here<'a> {
    /// How many lines have been taken, with these.
    pub(super) const fn taken(&self) -> usize {
        self.place.lines
    }

    /// Where the next line starts.
    pub(super) const fn place(&self) -> Place {
        self.place
    }

    /// The next line, without its end, if all of it is here.
    #[inline]
    pub(super) fn next(&mut self) -> anyhow::Result<Option<&'a [u8]>> {
        let rest = &self.buffer[self.place.start..];
        let (length, end) = match memchr::memchr(b'\n', rest) {
            Some(length) => (length, 1),
            None if rest.len() > MAX_LINE || (self.ended && !rest.is_empty()) => (rest.len(), 0),
            None => return Ok(None),
        };
        if length > MAX_LINE {
            anyhow::bail!(
                "line {}: found more than {MAX_LINE} bytes; expected a shorter line",
                self.place.lines + 1
            );
        }
        self.place.start += length + end;
        self.place.lines += 1;
        Ok(Some(&rest[..length]))
    }
}
