//! Splits an input that is read in chunks into numbered lines. Replays and backtests use it.

use std::io::{self, Read};

/// The size of the read buffer, in bytes.
const CHUNK: usize = 256 * 1024;

/// The longest line, in bytes: far more than any instruction needs, and little memory.
pub(crate) const MAX_LINE: usize = 64 * 1024;

/// An input, with the bytes that have been read and not yet consumed.
pub(crate) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    end: usize,
    ended: bool,
    position: Position,
    read: u64,
}

/// How far an input has been consumed: the offset in the buffer, and the number of lines since the start.
#[derive(Clone, Copy)]
pub(crate) struct Position {
    start: usize,
    lines: usize,
    /// Whether the next bytes are the rest of a line that was too long.
    is_skipping: bool,
}

/// A line of an input, without its end.
pub(crate) enum Line<'a> {
    Whole(&'a [u8]),
    /// The line has more than [`MAX_LINE`] bytes. Reading continues with the line after it.
    TooLong,
}

/// The complete lines in the buffer, which can be read without waiting.
pub(crate) struct BufferedLines<'a> {
    buffer: &'a [u8],
    ended: bool,
    position: Position,
}

impl<R: Read> Lines<R> {
    pub(crate) fn new(input: R) -> Self {
        let position = Position { start: 0, lines: 0, is_skipping: false };
        Self { input, buffer: vec![0; CHUNK], end: 0, ended: false, position, read: 0 }
    }

    /// Returns how many bytes have been read.
    pub(crate) const fn read(&self) -> u64 {
        self.read
    }

    /// Returns the number of the line that was consumed last.
    pub(crate) const fn line_number(&self) -> usize {
        self.position.lines
    }

    /// Returns the number of the line that was consumed last, as error messages show it.
    pub(crate) fn line_label(&self) -> String {
        format!("line {}", self.position.lines)
    }

    /// Returns the buffered lines. Afterwards, call [`advance_to`](Self::advance_to) with the position that was reached.
    pub(crate) fn buffered(&self) -> BufferedLines<'_> {
        BufferedLines {
            buffer: &self.buffer[..self.end],
            ended: self.ended,
            position: self.position,
        }
    }

    /// Returns the number of the first buffered line that is not blank.
    pub(crate) fn buffered_text(&self) -> Option<usize> {
        let rest = &self.buffer[self.position.start..self.end];
        let start = rest.iter().position(|byte| !byte.is_ascii_whitespace())?;
        Some(self.position.lines + 1 + memchr::memchr_iter(b'\n', &rest[..start]).count())
    }

    /// Consumes all lines before a position.
    pub(crate) const fn advance_to(&mut self, position: Position) {
        self.position = position;
    }

    /// Waits for more input. Returns false at the end of the input.
    pub(crate) fn read_more(&mut self) -> io::Result<bool> {
        if self.ended {
            return Ok(false);
        }
        // The rest is the start of one line and smaller than the buffer, because longer lines are skipped.
        self.buffer.copy_within(self.position.start..self.end, 0);
        self.end -= self.position.start;
        self.position.start = 0;
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

impl<'a> BufferedLines<'a> {
    /// Returns the number of the line that was returned last.
    pub(crate) const fn line_number(&self) -> usize {
        self.position.lines
    }

    /// Returns the position of the next line.
    pub(crate) const fn position(&self) -> Position {
        self.position
    }

    /// Returns the next line if all of it is buffered.
    #[inline]
    pub(crate) fn next(&mut self) -> Option<Line<'a>> {
        if self.position.is_skipping && !self.skip_rest() {
            return None;
        }
        let rest = &self.buffer[self.position.start..];
        let (length, end) = match memchr::memchr(b'\n', rest) {
            Some(length) => (length, 1),
            None if rest.len() > MAX_LINE => {
                self.position.is_skipping = !self.ended;
                (rest.len(), 0)
            }
            None if self.ended && !rest.is_empty() => (rest.len(), 0),
            None => return None,
        };
        self.position.start += length + end;
        self.position.lines += 1;
        Some(if length > MAX_LINE { Line::TooLong } else { Line::Whole(&rest[..length]) })
    }

    /// Skips the rest of a line that was too long. Returns false if the end of the line is not buffered yet.
    #[cold]
    fn skip_rest(&mut self) -> bool {
        let end = memchr::memchr(b'\n', &self.buffer[self.position.start..]);
        self.position.start = end.map_or(self.buffer.len(), |end| self.position.start + end + 1);
        self.position.is_skipping = end.is_none();
        end.is_some()
    }
}
