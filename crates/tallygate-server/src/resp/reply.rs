//! What is answered, in RESP2 or RESP3.
//!
//! Replies of a pipeline are gathered in one buffer. Errors are one line of bounded length, whatever they quote.

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

impl Output {
    pub(super) const fn new(protocol: Protocol) -> Self {
        Self { bytes: Vec::new(), protocol }
    }

    /// A word such as `OK`.
    pub(super) fn simple(&mut self, word: &str) {
        self.bytes.push(b'+');
        self.bytes.extend_from_slice(word.as_bytes());
        self.end();
    }

    /// What is wrong: a code for programs, a text for people.
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

    pub(super) fn integer(&mut self, value: i64) {
        self.headed(b':', value);
    }

    /// A number that may be more than RESP's integers can say: then it is told as the largest.
    pub(super) fn count(&mut self, value: u64) {
        self.integer(i64::try_from(value).unwrap_or(i64::MAX));
    }

    /// Yes or no: 1 or 0 in RESP2.
    pub(super) fn boolean(&mut self, value: bool) {
        match self.protocol {
            Protocol::Resp2 => self.integer(value.into()),
            Protocol::Resp3 => {
                self.bytes.extend_from_slice(if value { b"#t\r\n" } else { b"#f\r\n" });
            }
        }
    }

    /// Bytes of any kind.
    pub(super) fn bulk(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.headed(b'$', length(bytes.len()));
        self.bytes.extend_from_slice(bytes);
        self.end();
    }

    /// Nothing.
    pub(super) fn null(&mut self) {
        self.bytes.extend_from_slice(match self.protocol {
            Protocol::Resp2 => b"$-1\r\n",
            Protocol::Resp3 => b"_\r\n",
        });
    }

    /// A list; so many replies follow.
    pub(super) fn array(&mut self, items: usize) {
        self.headed(b'*', length(items));
    }

    /// Names and values; so many pairs follow. In RESP2 a list of both in turn.
    pub(super) fn map(&mut self, pairs: usize) {
        match self.protocol {
            Protocol::Resp2 => self.array(2 * pairs),
            Protocol::Resp3 => self.headed(b'%', length(pairs)),
        }
    }

    fn headed(&mut self, kind: u8, value: i64) {
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

/// Bytes that somebody sent, to be quoted: printable, whatever they are.
pub(super) struct Quoted<'a>(pub(super) &'a [u8]);

impl fmt::Display for Quoted<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // More of it than fits is not worth the work.
        let told = &self.0[..self.0.len().min(MAX_QUOTED)];
        let cut = if told.len() < self.0.len() { "..." } else { "" };
        write!(f, "'{}{cut}'", told.escape_ascii())
    }
}

/// The most that is quoted, in bytes.
const MAX_QUOTED: usize = 64;

/// One line with room for so many bytes. It fails when it is full.
struct Line<'a> {
    bytes: &'a mut Vec<u8>,
    room: usize,
}

impl fmt::Write for Line<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for character in text.chars() {
            let mut utf8 = [0; 4];
            let escaped;
            let told: &[u8] = if character.is_control() {
                escaped = character.escape_default().to_string();
                escaped.as_bytes()
            } else {
                character.encode_utf8(&mut utf8).as_bytes()
            };
            self.room = self.room.checked_sub(told.len()).ok_or(fmt::Error)?;
            self.bytes.extend_from_slice(told);
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

    #[test]
    fn h5_a_line_end_in_an_error_is_escaped() {
        let text = written(Protocol::Resp2, |out| out.error("ERR", "a\r\n+OK\r\n\0\u{85}é"));
        assert_eq!(text, "-ERR a\\r\\n+OK\\r\\n\\u{0}\\u{85}é\r\n");
        let quoted = written(Protocol::Resp2, |out| out.error("ERR", Quoted(b"x\r\n\xff")));
        assert_eq!(quoted, "-ERR 'x\\\\r\\\\n\\\\xff'\r\n".replace("\\\\", "\\"));
    }

    #[test]
    fn e8_an_error_has_a_bounded_length_whatever_it_quotes() {
        let long = "é\n".repeat(100_000);
        let text = written(Protocol::Resp2, |out| out.error("ERR", &long));
        assert!(text.len() <= "-ERR ...\r\n".len() + MAX_ERROR, "{}", text.len());
        assert!(text.ends_with("...\r\n"));
        let quoted = written(Protocol::Resp2, |out| out.error("ERR", Quoted(long.as_bytes())));
        assert!(quoted.len() <= 5 * MAX_QUOTED, "{}", quoted.len());
    }

    #[test]
    fn each_version_has_its_own_words() {
        let write = |out: &mut Output| {
            out.map(1);
            out.bulk("a");
            out.boolean(true);
            out.null();
            out.count(u64::MAX);
            out.integer(i64::MIN);
        };
        assert_eq!(
            written(Protocol::Resp2, write),
            "*2\r\n$1\r\na\r\n:1\r\n$-1\r\n:9223372036854775807\r\n:-9223372036854775808\r\n"
        );
        assert_eq!(
            written(Protocol::Resp3, write),
            "%1\r\n$1\r\na\r\n#t\r\n_\r\n:9223372036854775807\r\n:-9223372036854775808\r\n"
        );
    }
}
