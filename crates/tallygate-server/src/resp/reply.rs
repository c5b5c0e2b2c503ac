//! Writes replies in RESP2 or RESP3.
//!
//! The replies of a pipeline are collected in one buffer. Errors are one line of bounded length, whatever they quote.

use std::fmt::{self, Write as _};

/// The version of the protocol that a client speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Protocol {
    #[default]
    Resp2,
    Resp3,
}

/// Replies that are not yet written.
#[derive(Debug, Default)]
pub(super) struct Output {
    pub(super) bytes: Vec<u8>,
    pub(super) protocol: Protocol,
}

/// The longest text of an error, in bytes.
pub(super) const MAX_ERROR: usize = 512;

/// A reply for which the buffer grows by no more than it needs.
const LONG_REPLY: usize = 4 << 10;

impl Output {
    pub(super) const fn new(protocol: Protocol) -> Self {
        Self { bytes: Vec::new(), protocol }
    }

    /// Writes a word such as `OK`.
    pub(super) fn simple(&mut self, word: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(word.as_bytes());
        self.end();
    }

    /// Writes an error: a code for programs, and a text.
    pub(super) fn error(&mut self, code: &str, text: impl fmt::Display) {
        self.bytes.push(b'-');
        self.bytes.extend_from_slice(code.as_bytes());
        self.bytes.push(b' ');
        let mut line = Line { bytes: &mut self.bytes, room: MAX_ERROR };
        if write!(line, "{text}").is_err() {
            self.bytes.extend_from_slice(b"...");
        }
        self.end();
    }

    /// Writes an error as an HTTP response, for a client that mistook the port: it would not show an error of RESP.
    pub(super) fn http_error(&mut self, text: impl fmt::Display) {
        let body = format!("{text}\n");
        let head = "HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain\r\nconnection: close\r\n";
        let response = format!("{head}content-length: {}\r\n\r\n{body}", body.len());
        self.bytes.extend_from_slice(response.as_bytes());
    }

    pub(super) fn integer(&mut self, value: i64) {
        self.header_line(b':', value);
    }

    /// Writes a number. One above the integers of RESP is written as the largest integer.
    pub(super) fn count(&mut self, value: u64) {
        self.integer(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// Writes a bulk string.
    pub(super) fn bulk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.header_line(b'$', length(bytes.len()));
        if bytes.len() > LONG_REPLY {
            // A buffer that doubles would take far more than the reply.
            self.bytes.reserve_exact(bytes.len() + 2);
        }
        self.bytes.extend_from_slice(bytes);
        self.end();
    }

    /// Writes null.
    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// Writes null in place of an array.
    pub(super) fn null_array(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"*-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// Starts an array; `items` replies follow.
    pub(super) fn array(&mut self, items: usize) {
        self.header_line(b'*', length(items));
    }

    /// Starts a map; `pairs` names and values follow. In RESP2 it is an array.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * pairs),
            Protocol::Resp3 => self.header_line(b'%', length(pairs)),
        }
    }

    /// Starts a set; `items` replies follow. In RESP2 it is an array.
    pub(super) fn set(&mut self, items: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(items),
            Protocol::Resp3 => self.header_line(b'~', length(items)),
        }
    }

    fn header_line(&mut self, kind: u8, value: i64) {
        self.bytes.push(kind);
        self.bytes.extend_from_slice(itoa::Buffer::new().format(value).as_bytes());
        self.end();
    }

    fn end(&mut self) {
        self.bytes.extend_from_slice(b"\r\n");
    }
}

fn length(items: usize) -> i64 {
    i64::try_from(items).unwrap_or(i64::MAX)
}

/// Bytes of a client in quotes, with escapes.
pub(super) struct Quoted<'a>(pub(super) &'a [u8]);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Do not escape more than is shown.
        let shown = &self.0[..self.0.len().min(MAX_QUOTED)];
        let cut = if shown.len() < self.0.len() { "..." } else { "" };
        write!(f, "'{}{cut}'", shown.escape_ascii())
    }
}

/// Maximum number of quoted bytes.
const MAX_QUOTED: usize = 64;

/// A line with room for a number of bytes. Writing fails when it is full.
struct Line<'a> {
    bytes: &'a mut Vec<u8>,
    room: usize,
}

impl fmt::Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let mut utf8 = [0; 4];
            let escaped;
            let shown: &[u8] = if character.is_control() {
                escaped = character.escape_default().to_string();
                escaped.as_bytes()
            } else {
                character.encode_utf8(&mut utf8).as_bytes()
            };
            self.room = self.room.checked_sub(shown.len()).ok_or(fmt::Error)?;
            self.bytes.extend_from_slice(shown);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(protocol: Protocol, write: impl FnOnce(&mut Output)) -> String {
        let mut output = Output::new(protocol);
        write(&mut output);
        String::from_utf8(output.bytes).expect("text")
    }

    /// Fault H5.
    #[test]
    fn a_line_end_in_an_error_is_escaped() {
        let text = written(Protocol::Resp2, |out| out.error("ERR", "a\r\n+OK\r\n\0\u{85}é"));
        assert_eq!(text, "-ERR a\\r\\n+OK\\r\\n\\u{0}\\u{85}é\r\n");
        let quoted = written(Protocol::Resp2, |out| out.error("ERR", Quoted(b"x\r\n\xff")));
        assert_eq!(quoted, "-ERR 'x\\\\r\\\\n\\\\xff'\r\n".replace("\\\\", "\\"));
    }

    /// Fault E8.
    #[test]
    fn an_error_has_a_bounded_length_whatever_it_quotes() {
        let long = "é\n".repeat(100_000);
        let text = written(Protocol::Resp2, |out| out.error("ERR", &long));
        assert!(text.len() <= "-ERR ...\r\n".len() + MAX_ERROR, "{}", text.len());
        assert!(text.ends_with("...\r\n"));
        let quoted = written(Protocol::Resp2, |out| out.error("ERR", Quoted(long.as_bytes())));
        assert!(quoted.len() <= 5 * MAX_QUOTED, "{}", quoted.len());
    }

    #[test]
    fn a_long_reply_takes_no_more_memory_than_it_has() {
        let mut out = Output::default();
        while out.bytes.len() < 15 << 10 {
            out.count(1);
        }
        out.bulk([b'x'; 20 << 10]);
        assert!(out.bytes.capacity() < 36 << 10, "{}", out.bytes.capacity());
    }

    #[test]
    fn each_version_has_its_own_words() {
        let write = |out: &mut Output| {
            out.map(1);
            out.bulk("a");
            out.set(0);
            out.null();
            out.null_array();
            out.count(u64::MAX);
            out.integer(i64::MIN);
        };
        assert_eq!(
            written(Protocol::Resp2, write),
            "*2\r\n$1\r\na\r\n*0\r\n$-1\r\n*-1\r\n:9223372036854775807\r\n:-9223372036854775808\r\n"
        );
        assert_eq!(
            written(Protocol::Resp3, write),
            "%1\r\n$1\r\na\r\n~0\r\n_\r\n_\r\n:9223372036854775807\r\n:-9223372036854775808\r\n"
        );
    }
}
