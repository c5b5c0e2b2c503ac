//! Lines of an input that is read in chunks, each with its number. Backtests read theirs here, too.

use std::io::{self, Read};

/// How much is read at a time.
const CHUNK: usize = 256 * 1024;

/// The longest line: far more than any instruction needs, far less than any memory.
pub(crate) const MAX_LINE: usize = 64 * 1024;

/// An input, and what of it has been read and not yet taken.
pub(crate) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    end: usize,
    ended: bool,
    place: Place,
    read: u64,
}

/// How far an input has been taken: in its buffer, and in lines from its start.
#[derive(Clone, Copy)]
pub(crate) struct Place {
    start: usize,
    lines: usize,
    /// Whether what comes next is the rest of a line that was too long.
    is_past: bool,
}

/// A line of an input, without its end.
pub(crate) enum Line<'a> {
    Whole(&'a [u8]),
    /// More than [`MAX_LINE`] bytes, which nobody needs; the next line is the one after it.
    TooLong,
}

/// The whole lines of an input that are here without waiting.
pub(crate) struct Here<'a> {
    buffer: &'a [u8],
    ended: bool,
    place: Place,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(input: R) -> Self {
        let place = Place { start: 0, lines: 0, is_past: false };
        Self { input, buffer: vec![0; CHUNK], end: 0, ended: false, place, read: 0 }
    }

    /// How many bytes have been read.
    pub(crate) const fn read(&self) -> u64 {
        self.read
    }

    /// How many lines have been taken.
    pub(crate) const fn taken(&self) -> usize {
        self.place.lines
    }

    /// The line taken last, as messages name it.
    pub(crate) fn place(&self) -> String {
        format!("line {}", self.place.lines)
    }

    /// The lines that are here. What has been seen of them is to be [taken](Self::take).
    pub(crate) fn here(&self) -> Here<'_> {
        Here { buffer: &self.buffer[..self.end], ended: self.ended, place: self.place }
    }

    /// Takes all lines up to a place.
    pub(crate) const fn take(&mut self, place: Place) {
        self.place = place;
    }

    /// Waits for more input; false if there is none.
    pub(crate) fn read_more(&mut self) -> io::Result<bool> {
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
                    self.read += read as u64;
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
    pub(crate) const fn taken(&self) -> usize {
        self.place.lines
    }

    /// Where the next line starts.
    pub(crate) const fn place(&self) -> Place {
        self.place
    }

    /// The next line, if all of it is here.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Line<'a>> {
        if self.place.is_past && !self.pass() {
            return None;
        }
        let rest = &self.buffer[self.place.start..];
        let (length, end) = match memchr::memchr(b'\n', rest) {
            Some(length) => (length, 1),
            None if rest.len() > MAX_LINE => {
                self.place.is_past = !self.ended;
                (rest.len(), 0)
            }
            None if self.ended && !rest.is_empty() => (rest.len(), 0),
            None => return None,
        };
        self.place.start += length + end;
        self.place.lines += 1;
        Some(if length > MAX_LINE { Line::TooLong } else { Line::Whole(&rest[..length]) })
    }

    /// Goes past the rest of a line that was too long; false if its end is not here yet.
    #[cold]
    fn pass(&mut self) -> bool {
        let end = memchr::memchr(b'\n', &self.buffer[self.place.start..]);
        self.place.start = end.map_or(self.buffer.len(), |end| self.place.start + end + 1);
        self.place.is_past = end.is_none();
        end.is_some()
    }
}
